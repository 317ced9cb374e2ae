/* GEMM on Hopper (sm_90a): tiles, cost model, variants, launch and the entry of the public call. Other files make calls
 * of several GEMMs in one launch: rows in groups, groups of the contraction (common/gemm_groups.h). */
#include "base/json.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_loss.h"
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/random.h>
#include <time.h>

/* ---- tiles ----------------------------------------------------------------------------------------- */

const dw__sm90_tile dw__sm90_tiles[] = {
#define TILE(rows, columns, depth, both, blocks)                                                   \
    {.m = rows, .n = columns, .stages = depth, .together = both, .cluster = blocks},
    DW_SM90_GEMM_TILES(TILE)
#undef TILE
};
_Static_assert(DW_COUNT(dw__sm90_tiles) == DW__SM90_TILES, "the header's number");

static bool has_halves(const dw__sm90_shape *s) {
    return s->halves || s->activation == DW_ACTIVATION_SWIGLU;
}

int dw__sm90_tile_columns(const dw__sm90_shape *s) {
    const int n = dw__sm90_tiles[s->tile].n;
    return has_halves(s) ? n / 2 : n;
}

static unsigned shared_bytes_of(const dw__sm90_shape *s, int stages) {
    const dw__sm90_tile *t = &dw__sm90_tiles[s->tile];
    unsigned bytes = DW_SM90_GEMM_SHARED_BYTES(t->m, t->n, stages);
    if (t->cluster > 1)
        bytes += DW_SM90_CLUSTER_BYTES(t->m, t->n, t->cluster) + 8 * DW_SM90_MULTIPLIERS;
    if (s->blocks) bytes += stages * DW_SM90_BLOCK_SCALES_BYTES(t->m, t->n);
    if (s->row_scales) bytes += DW_SM90_ROW_SCALES_BYTES(t->m, t->n);
    if (s->coded) bytes += DW_SM90_CODED_BYTES(dw__sm90_tile_columns(s));
    return bytes;
}

/* Scales may take the place of a stage. */
static int stages_of(const dw__sm90_shape *s) {
    int stages = dw__sm90_tiles[s->tile].stages;
    while (shared_bytes_of(s, stages) > DW_SM90_MOST_SHARED) stages--;
    return stages;
}

static unsigned shared_bytes(const dw__sm90_shape *s) { return shared_bytes_of(s, stages_of(s)); }

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- cost model ------------------------------------------------------------------------------------ */

bool dw__sm90_exists(const dw__sm90_shape *s) {
    const dw__sm90_tile *t = &dw__sm90_tiles[s->tile];
    const dw__tile_work work = {.groups_kind = (int)s->groups,
                                .element_bytes = s->output == DW_GEMM_OUTPUT_F32 ? 4 : 2,
                                .activation = (dw_activation)s->activation,
                                .codes = dw__sm90_has_codes(s),
                                .promote = s->promote,
                                .split = s->split,
                                .cluster = t->cluster};
    if (t->cluster > 0 && (s->halves || s->row_factors || s->row_squares || s->coded ||
                           (s->turned_b && t->n % 64 != 0)))
        return false;
    /* Two warpgroups together make codes of whole blocks. */
    if (s->coded && (!t->together || dw__sm90_tile_columns(s) % DW_SM90_BLOCK != 0)) return false;
    return dw__sm90_tile_exists(&work, t->n, t->together);
}

static dw__tile_count count_of(const dw__gemm_groups_call *c, const dw__sm90_shape *s,
                               int sm_count) {
    const dw__sm90_tile *t = &dw__sm90_tiles[s->tile];
    const dw__tile_work work = {
        .groups_kind = c->groups.kind,
        .m = (double)c->gemm.m,
        .n = (double)c->gemm.n * (s->halves ? 2 : 1),
        .k = (double)c->gemm.k,
        .groups = (double)c->groups.count,
        .element_bytes = (double)dw_dtype_bytes(c->gemm.output),
        .activation = (dw_activation)s->activation,
        .residual = s->residual,
        .codes = dw__sm90_has_codes(s),
        .promote = s->promote,
        .split = s->split,
        .cluster = t->cluster,
    };
    return dw__sm90_tile_count(&work, t->m, t->n, t->together, sm_count);
}

dw__gemm_cost dw__sm90_cost_of(const dw__gemm_groups_call *c, const dw__sm90_shape *s,
                               int sm_count) {
    const dw__sm90_tile *t = &dw__sm90_tiles[s->tile];
    const dw__tile_count count = count_of(c, s, sm_count);
    return (dw__gemm_cost){
        .tiles = (int64_t)count.tiles,
        .rounds = (int64_t)count.rounds,
        .steps = (int64_t)count.steps,
        .step_clocks = count.step_clocks,
        .clocks = count.clocks,
        .bytes = count.tiles * count.steps * DW_SM90_STAGE_BYTES(t->m, t->n),
    };
}

/* CODES_A of sm90_gemm.cu. */
static uint64_t code_of(dw_dtype type) { return type == DW_E4M3 ? 1 : type == DW_E5M2 ? 2 : 0; }

dw__sm90_split dw__sm90_split_of(const dw__gemm_groups_call *c, const dw__sm90_shape *s,
                                 int sm_count) {
    const dw__sm90_tile *t = &dw__sm90_tiles[s->tile];
    const dw__tile_count count = count_of(c, s, sm_count);
    dw__sm90_split made = {.alone = (int)count.alone,
                           .tiles = (int)(count.tiles - count.alone),
                           .blocks = (int)count.blocks};
    made.sums_bytes = DW_SM90_SPLIT_SUMS_BYTES(t->m, t->n, made.blocks);
    made.bytes = made.sums_bytes + DW_SM90_SPLIT_FLAGS_BYTES(made.blocks);
    return made;
}

/* Whether blocks can share the contraction of a call. */
static bool may_split(const dw__gemm_groups_call *c, const dw__sm90_shape *s) {
    return c->groups.kind == DW_GROUPS_BATCH && c->groups.count == 1 && !c->halves &&
           !dw__sm90_has_codes(s) && !s->coded && c->gemm.k > 0 && !c->gemm.row_squares &&
           !c->gemm.row_scale;
}

/* Returns the variant that the call asks for, with the first tile. */
static dw__sm90_shape without_tile(const dw__gemm_groups_call *c) {
    const bool coded = dw__gemm_has_blocks_d(&c->gemm);
    dw__sm90_shape shape = {
        .groups = (uint64_t)c->groups.kind,
        .output = c->gemm.output == DW_F32 && !coded ? DW_GEMM_OUTPUT_F32 : DW_GEMM_OUTPUT_ELEMENT,
        .activation = c->gemm.activation,
        .coded = coded,
        .coded_turned = coded && c->gemm.turned_d.data,
        .coded_d = coded && c->gemm.plain_d.data,
        .f16 = c->gemm.dtype == DW_F16,
        .bias = c->gemm.bias != NULL,
        .residual = c->gemm.residual.data != NULL,
        .turned_a = c->turned.a,
        .turned_b = c->turned.b,
        .halves = c->halves,
        .codes_a = code_of(c->codes.a),
        .codes_b = code_of(c->codes.b),
        .blocks = c->codes.blocks,
        .square_a = c->codes.square_a,
        .square_b = c->codes.square_b,
        .row_scales = c->codes.row_scales,
        .row_factors = c->gemm.row_scale != NULL,
        .row_squares = c->gemm.row_squares != NULL,
        .gather = (uint64_t)c->rows.gather,
        .scatter = c->rows.scatter,
        .weighted = c->rows.weighted,
    };
    shape.promote = dw__sm90_has_codes(&shape) && (c->codes.blocks || !c->codes.fast);
    return shape;
}

int dw__sm90_proposals(const dw__gemm_groups_call *c, int sm_count,
                       dw__sm90_proposal proposals[DW__SM90_MOST_PROPOSALS], int *best) {
    dw__sm90_shape shape = without_tile(c);
    const int ways = c->gemm.workspace_bytes > 0 && may_split(c, &shape) ? 2 : 1;
    double least = INFINITY;
    int count = *best = 0;
    for (int trial = 0; trial < ways * DW__SM90_TILES; trial++) {
        shape.tile = (uint64_t)(trial % DW__SM90_TILES);
        shape.split = trial >= DW__SM90_TILES;
        if (!dw__sm90_exists(&shape)) continue;
        if (dw__sm90_tiles[shape.tile].cluster > 0 && !may_split(c, &shape)) continue;
        const dw__gemm_cost cost = dw__sm90_cost_of(c, &shape, sm_count);
        if (isinf(cost.clocks)) continue; /* no tile would be shared */
        if (shape.split && dw__sm90_split_of(c, &shape, sm_count).bytes > c->gemm.workspace_bytes)
            continue;
        proposals[count] = (dw__sm90_proposal){shape, cost.clocks};
        if (count == 0 || cost.clocks * DW__SM90_CLOSE_CLOCKS < least) {
            least = cost.clocks;
            *best = count;
        }
        count++;
    }
    return count;
}

dw__sm90_shape dw__sm90_shape_of(const dw__gemm_groups_call *c, int sm_count) {
    dw__sm90_proposal proposals[DW__SM90_MOST_PROPOSALS];
    int best;
    return dw__sm90_proposals(c, sm_count, proposals, &best) > 0 ? proposals[best].shape
                                                                 : without_tile(c);
}

static dw__gemm_cost cost_on(const dw_gemm *call, const dw__gpu_target *gpu,
                             dw__sm90_shape *shape) {
    const dw__gemm_groups_call c = dw__gemm_single(call, (dw__gemm_turned){false, false});
    *shape = dw__sm90_shape_of(&c, gpu->sm_count);
    return dw__sm90_cost_of(&c, shape, gpu->sm_count);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    dw__sm90_shape shape;
    (void)kernel;
    snprintf(result->from, sizeof result->from, "the least by counted work");
    if (dw__gemm_is_empty(call)) return;
    const dw__gemm_cost cost = cost_on(call, gpu, &shape);
    result->seconds = dw__gemm_least_seconds(call, gpu, &cost, DW__SM90_FLOPS_PER_CLOCK);
}

static json_t *describe_tile(const dw__kernel *kernel, const void *call,
                             const dw__gpu_target *gpu) {
    const dw__gemm_groups_call c = dw__gemm_single(call, (dw__gemm_turned){false, false});
    dw__sm90_shape shape;
    double measured = 0.0;
    (void)kernel;
    if (dw__gemm_is_empty(call)) return json_null();
    dw__gemm_cost cost = cost_on(call, gpu, &shape);
    const bool is_measured = gpu->context && dw__sm90_measured(&c, gpu->context, &shape, &measured);
    if (is_measured) cost = dw__sm90_cost_of(&c, &shape, gpu->sm_count);
    const dw__sm90_tile *t = &dw__sm90_tiles[shape.tile];
    return json_pack("{s:i, s:i, s:i, s:i, s:b, s:b, s:I, s:I, s:I, s:i, s:f, s:s, s:o*}", "ctas",
                     t->cluster > 1 ? t->cluster : 1, "tile_m", t->m, "tile_n", t->n, "stages",
                     t->stages, "in_turn", !t->together, "shared", shape.split, "tiles",
                     (json_int_t)cost.tiles, "rounds", (json_int_t)cost.rounds, "steps",
                     (json_int_t)cost.steps, "step_clocks", cost.step_clocks, "least_seconds",
                     dw__gemm_least_seconds(call, gpu, &cost, DW__SM90_FLOPS_PER_CLOCK),
                     "chosen_by", is_measured ? "measurement" : "cost model", "measured_seconds",
                     is_measured ? json_real(measured) : NULL);
}

/* ---- variants -------------------------------------------------------------------------------------- */

dw__jit_variant dw__sm90_variant(const dw__sm90_shape *s) {
    const dw__sm90_tile *t = &dw__sm90_tiles[s->tile];
    dw__jit_variant v = {
        .source = "sm90/sm90_gemm.cu", .entry = "sm90_gemm", .arch = dw__gpu_arch(90)};
    dw__jit_add_define(&v, "TILE_M", t->m);
    dw__jit_add_define(&v, "TILE_N", t->n);
    dw__jit_add_define(&v, "STAGES", stages_of(s));
    dw__jit_add_define(&v, "TOGETHER", s->split || (t->together && !s->promote));
    dw__jit_add_define(&v, "GROUPS", (int)s->groups);
    dw__jit_add_define(&v, "TURNED_A", s->turned_a);
    dw__jit_add_define(&v, "TURNED_B", s->turned_b);
    dw__jit_add_define(&v, "ELEMENT", s->f16);
    dw__jit_add_define(&v, "OUTPUT", s->output);
    dw__jit_add_define(&v, "ACTIVATION", (int)s->activation);
    dw__jit_add_define(&v, "BIAS", s->bias);
    dw__jit_add_define(&v, "RESIDUAL", s->residual);
    /* Their defaults are 0. */
    if (s->row_factors) dw__jit_add_define(&v, "ROW_FACTORS", 1);
    if (s->row_squares) dw__jit_add_define(&v, "ROW_SQUARES", 1);
    if (s->split) dw__jit_add_define(&v, "SPLIT", 1);
    if (t->cluster > 0) dw__jit_add_define(&v, "CLUSTER", t->cluster);
    if (s->coded)
        dw__jit_add_define(&v, "CODED",
                           DW_SM90_CODED | (s->coded_turned ? DW_SM90_CODED_TURNED : 0) |
                               (s->coded_d ? DW_SM90_CODED_D : 0));
    if (s->gather || s->scatter || s->weighted) {
        dw__jit_add_define(&v, "GATHER", (int)s->gather);
        dw__jit_add_define(&v, "SCATTER", s->scatter);
        dw__jit_add_define(&v, "WEIGHTS", s->weighted);
    }
    if (!dw__sm90_has_codes(s)) return v;
    dw__jit_add_define(&v, "CODES_A", (int)s->codes_a);
    dw__jit_add_define(&v, "CODES_B", (int)s->codes_b);
    dw__jit_add_define(&v, "PROMOTE", s->promote);
    dw__jit_add_define(&v, "BLOCKS",
                       (s->blocks ? DW_SM90_BLOCKS : 0) | (s->square_a ? DW_SM90_SQUARE_A : 0) |
                           (s->square_b ? DW_SM90_SQUARE_B : 0));
    dw__jit_add_define(&v, "ROW_SCALES", s->row_scales);
    return v;
}

dw_status dw__sm90_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                dw__entry_point points[DW__ENTRY_POINTS]) {
    const dw__sm90_shape shape = {.params = params};
    (void)kernel, (void)capability;
    points[0].code = dw__sm90_variant(&shape);
    points[0].shared_bytes = shared_bytes(&shape);
    if (shape.row_squares)
        points[1].code = (dw__jit_variant){.source = "sm90/sm90_row_squares.cu",
                                           .entry = "sm90_row_squares",
                                           .arch = dw__gpu_arch(90)};
    return DW_OK;
}

/* Three tiles of rows and two of columns, the last of each incomplete, for two SMs: each block computes several tiles
 * of more steps than its ring has stages. With `split` nine blocks share the six tiles. */
dw__gemm_case dw__sm90_case_of(const dw__variant *variant) {
    enum { EXTRA_ROWS = 45, EXTRA_COLUMNS = 35, STEPS = 7, MISSING = 27, SPLIT_SMS = 9 };
    const dw__sm90_shape s = {.params = variant->params};
    const dw_dtype type = s.f16 ? DW_F16 : DW_BF16;
    dw__gemm_case made = {
        .call = {.dtype = type,
                 .output = s.output == DW_GEMM_OUTPUT_F32 ? DW_F32 : type,
                 .m = 2 * dw__sm90_tiles[s.tile].m + EXTRA_ROWS,
                 .n = dw__sm90_tile_columns(&s) + EXTRA_COLUMNS,
                 .k = STEPS * DW_SM90_GEMM_STEP - MISSING,
                 .alpha = 0.75f,
                 .activation = s.activation,
                 .quantized_d = s.coded,
                 .scheme_d = s.coded ? DW_SCHEME_FP8_BLOCK : DW_SCHEME_BF16},
        .bias = s.bias,
        .residual = s.residual,
        .turned_d = s.coded_turned,
        .plain_d = s.coded_d,
        .row_factors = s.row_factors,
        .row_squares = s.row_squares,
        .turned = {s.turned_a, s.turned_b},
        .sm_count = s.split ? SPLIT_SMS : 2,
        .groups = 1,
    };
    if (s.split) {
        const dw__gemm_groups_call c = dw__gemm_single(&made.call, made.turned);
        made.workspace_bytes = dw__sm90_split_of(&c, &s, made.sm_count).bytes;
    }
    return made;
}

/* ---- launch ---------------------------------------------------------------------------------------- */

static uint64_t mixed(uint64_t x) { /* splitmix64: different numbers give different ones */
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* A number that memory does not hold by chance, another one for each launch. */
static uint64_t new_mark(void) {
    static _Atomic uint64_t seed;
    uint64_t now = atomic_load_explicit(&seed, memory_order_relaxed);
    if (now == 0) {
        struct timespec time = {0};
        uint64_t first = 0;
        if (getrandom(&first, sizeof first, GRND_NONBLOCK) != sizeof first || first == 0) {
            (void)clock_gettime(CLOCK_REALTIME, &time);
            first = mixed((uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec) | 1;
        }
        (void)atomic_compare_exchange_strong(&seed, &now, first);
    }
    const uint64_t mark = mixed(atomic_fetch_add(&seed, 0x9E3779B97F4A7C15u));
    return mark ? mark : 1;
}

static int64_t greatest_divisor(int64_t a, int64_t b) {
    while (b) {
        const int64_t rest = a % b;
        a = b, b = rest;
    }
    return a;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Chooses the order of tiles that blocks share. Blocks that read the same rows of A or B at the same time do so from the
 * L2 cache. All blocks form groups of as many, each with the same number of tiles, whose blocks are at the same steps: for
 * a block of a group, the others of the same place have different tiles along the line of tiles and along the other axis.
 * The fewer of them differ, the less is read. */
static int order_of(const dw__sm90_split *s, const dw__sm90_tile *t, int64_t tiles_m,
                    int64_t tiles_n) {
    const int64_t groups = greatest_divisor(s->tiles, s->blocks), tiles = s->tiles / groups;
    if (s->alone > 0) return DW_SM90_BANDS;
    const int64_t along_m = least(groups, tiles_m / greatest_divisor(tiles, tiles_m)) * t->m +
                            least(groups, tiles_n) * t->n,
                  along_n = least(groups, tiles_n / greatest_divisor(tiles, tiles_n)) * t->n +
                            least(groups, tiles_m) * t->m;
    return along_m <= along_n ? DW_SM90_ALONG_M : DW_SM90_ALONG_N;
}

/* D's codes. Widths of their rows are the kernel's matter. */
static dw_fp8_block_codes_params codes_params(const dw_gemm *g) {
    return (dw_fp8_block_codes_params){.rows = (int)g->m,
                                       .columns = (int)g->n,
                                       .codes = g->d.data,
                                       .turned = g->turned_d.data,
                                       .row_bytes = g->d.stride,
                                       .turned_row_bytes = g->turned_d.stride,
                                       .scales = g->scales_d,
                                       .turned_scales = g->turned_scales_d};
}

static dw_sm90_split split_params(const dw__gemm_groups_call *c, const dw__sm90_split *split,
                                  const dw__sm90_tile *tile, const dw_sm90_gemm_params *params) {
    char *const workspace = c->gemm.workspace;
    const int64_t steps = (int64_t)split->tiles * ceil_divide(c->gemm.k, DW_SM90_GEMM_STEP);
    return (dw_sm90_split){.alone = split->alone,
                           .blocks = split->blocks,
                           .share = (int)(steps / split->blocks),
                           .rest = (int)(steps % split->blocks),
                           .order = order_of(split, tile, params->tiles_m, params->tiles_n),
                           .mark = new_mark(),
                           .sums = (float *)(void *)workspace,
                           .flags = (unsigned long long *)(void *)(workspace + split->sums_bytes)};
}

/* An emulated GPU reports reads of memory that was never written. Its graphs hold kernels alone. */
static dw_status write_flags(const dw__context *context, const dw_sm90_split *split, void *stream) {
    bool recorded = true;
    if (!context->ptx_only) return DW_OK;
    DW_RETURN_IF_FAILED(context->device->stream_records(stream, &recorded));
    if (recorded) return DW_OK;
    return context->device->fill_on(split->flags, 0, DW_SM90_SPLIT_FLAGS_BYTES(split->blocks),
                                    stream);
}

/* Gathered rows are copied 16 bytes at a time, at distances of 32 bits. */
bool dw__sm90_gathers(const dw__gemm_groups_call *c) {
    enum { CHUNK = 8 };
    const dw_gemm *g = &c->gemm;
    const bool of_a = c->rows.gather == DW_SM90_GATHER_A,
               is_rows = c->groups.kind == DW_GROUPS_ROWS;
    const dw_matrix *rows = of_a ? &g->a : &g->b;
    const int64_t columns = is_rows ? g->k : of_a ? g->m : g->n;
    if (c->rows.gather == DW_SM90_GATHER_NONE) return true;
    return columns % CHUNK == 0 && rows->stride % CHUNK == 0 && rows->stride <= INT32_MAX &&
           c->rows.count >= 1 && c->rows.count <= INT32_MAX;
}

/* Whether a launch should be dependent. On an H200 short GEMMs gained 0.7 us and more; one of 177 us gained nothing in bursts
 * and lost 2 % under load. Trees lost, too. Graphs of earlier drivers do not record dependent launches. */
static bool is_dependent(const dw__gemm_groups_call *c, const dw__sm90_shape *shape,
                         const dw__context *context) {
    enum { DRIVER = 12030, MOST_CLOCKS = 100000 };
    const double count = c->groups.kind == DW_GROUPS_BATCH ? (double)c->groups.count : 1,
                 clocks = 2.0 * (double)c->gemm.m * (double)c->gemm.n * (double)c->gemm.k * count /
                          DW__SM90_FLOPS_PER_CLOCK / context->sm_count;
    return !shape->split && clocks < MOST_CLOCKS && context->driver_version >= DRIVER;
}

dw_status dw__sm90_launch(const dw__gemm_groups_call *c, const dw__sm90_program *program,
                          dw__sm90_shape shape, const dw__context *context,
                          const dw__variant *variant) {
    const dw__sm90_tile *t = &dw__sm90_tiles[shape.tile];
    const dw_gemm *g = &c->gemm;
    const int columns = dw__sm90_tile_columns(&shape);
    const int64_t count = c->groups.count;
    const dw_sm90_loss *loss = program ? program->loss : NULL;
    const dw_gemm *second = program ? program->second : NULL;
    const dw_matrix *d = shape.coded ? &g->plain_d : &g->d;
    /* The maps of A and B, which nothing reads if k is 0, and of a loss's D or the second B. */
    dw__tensor_map maps[3] = {0};
    dw_sm90_gemm_params params = {
        .m = (int)g->m,
        .n = (int)g->n,
        .k = (int)g->k,
        .groups = (int)count,
        .tiles_m = (int)ceil_divide(g->m, t->m),
        .tiles_n = (int)ceil_divide(g->n, columns),
        .alpha = g->alpha,
        .bias = g->bias,
        .residual = g->residual.data,
        .d = d->data,
        .stride_d = d->stride,
        .stride_residual = g->residual.stride,
        .group_d = g->m * d->stride,
        .group_residual = g->m * g->residual.stride,
        .offsets = c->groups.offsets,
        .error = c->groups.error,
        .scale_a = c->codes.scale_a,
        .scale_b = c->codes.scale_b,
        .scale_b_step = c->codes.scale_b_each,
        .wide_a = c->codes.wide_a,
        .wide_b = c->codes.wide_b,
        .row_factors = g->row_scale,
        .row_squares = shape.row_squares ? g->workspace : NULL,
        .gather = {.in = c->rows.in,
                   .count = (int)c->rows.count,
                   .out = c->rows.out,
                   .weights = c->rows.weights},
    };
    if (c->rows.gather) {
        const dw_matrix *rows = c->rows.gather == DW_SM90_GATHER_A ? &g->a : &g->b;
        params.gather.rows = rows->data;
        params.gather.stride = (int)rows->stride;
    }
    if (g->k > 0) /* nothing reads the map of gathered rows */
        DW_RETURN_IF_FAILED(dw__gemm_groups_operand_maps(c, context, t->m, columns, maps));
    for (int i = 0; program && i < program->result_count; i++) {
        params.results[i] = program->results[i].data;
        params.result_strides[i] = program->results[i].stride;
        params.sums[i] = program->sums[i];
    }
    for (int i = 0; program && i < program->vector_count; i++) {
        params.vectors[i] = program->vectors[i].data;
        params.vector_strides[i] = program->vectors[i].stride;
    }
    for (int i = 0; program && i < program->operand_count; i++) {
        params.operands[i] = program->operands[i].data;
        params.operand_strides[i] = program->operands[i].stride;
    }
    if (program) {
        params.random_key = program->random_key;
        params.random_key_stride = program->random_key_stride;
        params.rope = program->rope;
    }
    if (second) {
        dw__gemm_groups_call other = *c;
        dw__tensor_map both[2];
        other.gemm = *second;
        DW_RETURN_IF_FAILED(dw__gemm_groups_operand_maps(&other, context, t->m, columns, both));
        maps[2] = both[1];
        params.second_d = second->d.data;
        params.stride_second_d = second->d.stride;
        params.second_bias = second->bias;
    }
    if (loss) params.loss = *loss;
    if (shape.coded) params.codes = codes_params(g);
    int64_t blocks = dw__gemm_grid(c, t->m, params.tiles_n, context->sm_count);
    if (params.loss.count > 0) blocks = context->sm_count;
    if (shape.split) {
        const dw__sm90_split split = dw__sm90_split_of(c, &shape, context->sm_count);
        params.split = split_params(c, &split, t, &params);
        DW_RETURN_IF_FAILED(write_flags(context, &params.split, g->stream));
        blocks = split.alone > 0 ? context->sm_count : split.blocks;
    }
    if (t->cluster > 0) blocks = (int64_t)params.tiles_m * params.tiles_n * t->cluster;
    if (loss && !loss->logits && g->d.data) /* not beside a GEMM */
        DW_RETURN_IF_FAILED(dw__sm90_loss_map(g, context, &maps[2]));
    void *arguments[] = {&maps[0], &maps[1], &params, &maps[2]};
    return context->device->launch(&(dw__launch){
        .name = variant->kernel->name,
        .function = variant->functions[0],
        .grid = {(unsigned)blocks, 1, 1},
        .block = {program && !loss && !second ? DW_SM90_PROGRAM_THREADS : DW_SM90_GEMM_THREADS, 1,
                  1},
        .shared_bytes = program ? program->shared_bytes : shared_bytes(&shape),
        .dependent = is_dependent(c, &shape, context),
        .stream = g->stream,
        .arguments = arguments,
    });
}

dw_status dw__sm90_enqueue(const dw__gemm_groups_call *c, const dw__context *context,
                           const dw__variant *variant) {
    return dw__sm90_launch(c, NULL, (dw__sm90_shape){.params = variant->params}, context, variant);
}

/* ---- sums of squares of rows ------------------------------------------------------------------------- */

static int64_t column_tiles_of(const dw_gemm *g, const dw__sm90_shape *s) {
    return ceil_divide(g->n, dw__sm90_tile_columns(s));
}

/* Partial sums of squares, enough for the narrowest tiles, or the parts of tiles that blocks share. */
static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    enum { LEAST_COLUMNS = 64 }; /* of D, in 128 of B */
    const dw_gemm *g = call;
    (void)kernel;
    *bytes = g->row_squares ? (size_t)(ceil_divide(g->n, LEAST_COLUMNS) * g->m) * sizeof(float)
                            : dw__sm90_workspace(g, (dw__gemm_turned){false, false}, context);
    return DW_OK;
}

static bool workspace_optional(const void *call) { return !((const dw_gemm *)call)->row_squares; }

static dw_status add_squares(const dw_gemm *g, const dw__context *context,
                             const dw__variant *variant) {
    enum { THREADS = 256 };
    const dw__sm90_shape shape = {.params = variant->params};
    dw_sm90_row_squares_params params = {.partials = g->workspace,
                                         .result = g->row_squares,
                                         .rows = (int)g->m,
                                         .tiles = (int)column_tiles_of(g, &shape),
                                         .columns = (int)g->n,
                                         .norm = g->row_norm,
                                         .epsilon = g->row_epsilon};
    void *arguments[] = {&params};
    return context->device->launch(
        &(dw__launch){.name = "sm90_row_squares",
                      .function = variant->functions[1],
                      .grid = {(unsigned)ceil_divide(g->m, THREADS), 1, 1},
                      .block = {THREADS, 1, 1},
                      .stream = g->stream,
                      .arguments = arguments});
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__sm90_shape shape = {.params = variant->params};
    const dw__gemm_groups_call c =
        dw__gemm_single(call, (dw__gemm_turned){shape.turned_a, shape.turned_b});
    DW_RETURN_IF_FAILED(dw__sm90_enqueue(&c, context, variant));
    return shape.row_squares ? add_squares(&c.gemm, context, variant) : DW_OK;
}

/* ---- entry ----------------------------------------------------------------------------------------- */

dw_status dw__sm90_check_types(const dw_gemm *call) {
    if (!call->quantized && (!call->quantized_d || dw__gemm_has_blocks_d(call))) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "sm_90a has no tensor cores for scales of blocks; expected operands "
                    "of BF16 or F16, and D of BF16, F16, F32 or fp8-block");
}

dw_status dw__sm90_supports(const dw_gemm *call, dw__gemm_turned turned,
                            const dw__gpu_target *gpu) {
    DW_RETURN_IF_FAILED(dw__gemm_check_turned(call, turned, false));
    if (gpu && gpu->capability != 90)
        return dw__fail(DW_TYPE, "its kernels are for sm_90a (H100, H200), not for %s", gpu->name);
    DW_RETURN_IF_FAILED(dw__sm90_check_types(call));
    if (turned.b && call->activation == DW_ACTIVATION_SWIGLU)
        return dw__fail(DW_UNSUPPORTED, "the rows of B have two parts with SwiGLU; expected B with "
                                        "contiguous rows along k");
    return DW_OK;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    (void)kernel;
    return dw__sm90_supports(call, (dw__gemm_turned){false, false}, gpu);
}

dw_status dw__sm90_prepare(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context,
                           const dw__variant **variant) {
    const dw__gemm_groups_call c = dw__gemm_single(call, turned);
    return dw__variant_of(context, &dw__sm90_gemm, dw__sm90_choose(&c, context).params, variant);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    (void)kernel;
    return dw__sm90_prepare(call, (dw__gemm_turned){false, false}, context, variant);
}

const dw__kernel dw__sm90_gemm = {
    .name = "sm90_gemm",
    .backend = "deepwell",
    .label = "Deepwell",
    .described = "ours, CUDA C for sm_90a",
    .kind = DW__CALL_GEMM,
    .proof = DW__MEASURED_ON_HARDWARE,
    .operation = "GEMM with bias, GELU, SwiGLU, residual, norms of rows, codes of D",
    .source = "cuda/sm90/sm90_gemm.cu",
    .architectures = "sm_90a (H100, H200)",
    .elements = "BF16, F16; D also F32, fp8-block",
    .needs = "16-byte rows",
    .supports = supports,
    .seconds = seconds,
    .describe_tile = describe_tile,
    .workspace_bytes = workspace_bytes,
    .workspace_optional = workspace_optional,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = dw__sm90_entry_points,
    .first_use = &dw__gemm_first_use,
    .tolerance = "sums in F32, then D's rounding, against FP64",
};
