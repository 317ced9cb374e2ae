/* GEMM on consumer and workstation Blackwell GPUs (sm_120a): variants, cost model, launch and entries. The call and its
 * checks are those of gemm.c. Nothing here is measured: no GPU of this family was available. */
#include "base/json.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include <math.h>
#include <stdio.h>

/* ---- tiles ----------------------------------------------------------------------------------------- */

const dw__sm120_tile dw__sm120_tiles[] = {
#define DENSE(rows, columns, multipliers, depth, resident)                                         \
    {.m = rows, .n = columns, .warps = multipliers, .stages = depth, .blocks = resident},
#define SCALED(rows, columns, multipliers, depth, resident)                                        \
    {.scaled = true,                                                                               \
     .m = rows,                                                                                    \
     .n = columns,                                                                                 \
     .warps = multipliers,                                                                         \
     .stages = depth,                                                                              \
     .blocks = resident},
    DW_SM120_GEMM_TILES(DENSE) DW_SM120_SCALED_TILES(SCALED)
#undef DENSE
#undef SCALED
};
_Static_assert(DW_COUNT(dw__sm120_tiles) == DW__SM120_TILES, "the header's number");

static bool is_scaled(const dw__gemm_shape *s) { return s->scheme_a != DW_SCHEME_BF16; }
static bool is_swiglu(const dw__gemm_shape *s) { return s->activation == DW_ACTIVATION_SWIGLU; }

int dw__sm120_tile_columns(const dw__gemm_shape *s) {
    const int n = dw__sm120_tiles[s->tile].n;
    return is_swiglu(s) ? n / 2 : n;
}

/* D as MXFP8 needs whole tiles of its scales along the rows, and a turned operand has no parts. */
bool dw__sm120_exists(const dw__gemm_shape *s) {
    const dw__sm120_tile *t = &dw__sm120_tiles[s->tile];
    if (t->scaled != is_scaled(s)) return false;
    if (s->turned_b && is_swiglu(s)) return false;
    return s->output != DW_GEMM_OUTPUT_MXFP8 || t->m == DW_SCALE_TILE_ROWS;
}

unsigned dw__sm120_shared_bytes(const dw__gemm_shape *s) {
    const dw__sm120_tile *t = &dw__sm120_tiles[s->tile];
    if (!t->scaled) return DW_SM120_GEMM_SHARED_BYTES(t->m, t->n, t->stages);
    return DW_SM120_SCALED_SHARED_BYTES((int)s->scheme_a, is_swiglu(s), t->m, t->n, t->stages);
}

/* ---- cost model ------------------------------------------------------------------------------------ */

/* Rates per SM and clock of GeForce cards with sums in F32: 209.5 TFLOP/s (419 for FP8, 1676 for FP4) on 170 SMs at
 * 2.407 GHz. Workstation cards have twice the first two. The rate of shared memory is Hopper's, assumed to be
 * unchanged. */
enum {
    FLOPS_PER_CLOCK = 512,
    FP8_FLOPS_PER_CLOCK = 1024,
    FP4_FLOPS_PER_CLOCK = 4096,
    SHARED_BYTES_PER_CLOCK = 128
};

static int step_of(const dw__gemm_shape *s) {
    return is_scaled(s) ? DW_SM120_STEP((int)s->scheme_a) : DW_SM120_ELEMENT_STEP;
}

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* A stage is written to shared memory once. Each warp reads its rows of A and of B from it. */
dw__gemm_cost dw__sm120_cost_of(const dw_gemm *call, const dw__gemm_shape *s, int sm_count) {
    const dw__sm120_tile *t = &dw__sm120_tiles[s->tile];
    const int columns = dw__sm120_tile_columns(s), warps_n = columns / 32,
              rows_of_warp = t->m / (t->warps / warps_n) + t->n / warps_n, step = step_of(s),
              rate = !is_scaled(s)                          ? FLOPS_PER_CLOCK
                     : DW_CODES_ARE_MXFP8((int)s->scheme_a) ? FP8_FLOPS_PER_CLOCK
                                                            : FP4_FLOPS_PER_CLOCK;
    const int stage = DW_SM120_OPERAND_BYTES(t->m, t->n) +
                      (is_scaled(s) ? DW_SM120_SCALE_BYTES((int)s->scheme_a, is_swiglu(s)) : 0);
    const int tensor = 2 * t->m * t->n * step / rate,
              shared =
                  (stage + t->warps * rows_of_warp * DW_SM120_ROW_BYTES) / SHARED_BYTES_PER_CLOCK;
    const int64_t places = (int64_t)(sm_count > 0 ? sm_count : 1) * t->blocks;
    dw__gemm_cost made = {
        .tiles = ceil_divide(call->m, t->m) * ceil_divide(call->n, columns),
        .steps = ceil_divide(call->k, step),
        .step_clocks = t->blocks * (tensor > shared ? tensor : shared),
    };
    made.rounds = ceil_divide(made.tiles, places);
    made.clocks = (double)made.rounds * (double)made.steps * made.step_clocks;
    made.bytes = (double)made.tiles * (double)made.steps * stage;
    return made;
}

dw__gemm_shape dw__sm120_shape_of(const dw_gemm *call, dw__gemm_turned turned, int sm_count) {
    dw__gemm_shape shape = dw__gemm_shape_without_tile(call);
    shape.turned_a = turned.a;
    shape.turned_b = turned.b;
    /* Counted clocks are no closer than an eighth to what hardware takes; the bytes of all tiles load the L2 cache. */
    const double close = 1.125;
    double clocks[DW__SM120_TILES], bytes[DW__SM120_TILES], least = INFINITY;
    int best = 0;
    for (shape.tile = 0; shape.tile < DW__SM120_TILES; shape.tile++) {
        const dw__gemm_cost cost = dw__sm120_cost_of(call, &shape, sm_count);
        clocks[shape.tile] = dw__sm120_exists(&shape) ? cost.clocks : INFINITY;
        bytes[shape.tile] = dw__sm120_exists(&shape) ? cost.bytes : INFINITY;
        if (clocks[shape.tile] >= least) continue;
        least = clocks[shape.tile];
        best = shape.tile;
    }
    for (int tile = 0; tile < DW__SM120_TILES; tile++)
        if (clocks[tile] <= close * least && bytes[tile] < bytes[best]) best = tile;
    shape.tile = best;
    return shape;
}

static dw__gemm_cost cost_on(const dw_gemm *call, const dw__gpu_target *gpu,
                             dw__gemm_shape *shape) {
    *shape = dw__sm120_shape_of(call, (dw__gemm_turned){false, false}, gpu->sm_count);
    return dw__sm120_cost_of(call, shape, gpu->sm_count);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    dw__gemm_shape shape;
    (void)kernel;
    snprintf(result->from, sizeof result->from, "the least by counted work, nothing measured");
    if (dw__gemm_is_empty(call)) return;
    const dw__gemm_cost cost = cost_on(call, gpu, &shape);
    result->seconds = dw__gemm_least_seconds(call, gpu, &cost, FLOPS_PER_CLOCK);
}

static json_t *describe_tile(const dw__kernel *kernel, const void *call,
                             const dw__gpu_target *gpu) {
    dw__gemm_shape shape;
    (void)kernel;
    if (dw__gemm_is_empty(call)) return json_null();
    const dw__gemm_cost cost = cost_on(call, gpu, &shape);
    const dw__sm120_tile *t = &dw__sm120_tiles[shape.tile];
    return json_pack("{s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:i, s:f}", "ctas", 1, "tile_m", t->m,
                     "tile_n", t->n, "stages", t->stages, "tiles", (json_int_t)cost.tiles, "rounds",
                     (json_int_t)cost.rounds, "steps", (json_int_t)cost.steps, "step_clocks",
                     cost.step_clocks, "least_seconds",
                     dw__gemm_least_seconds(call, gpu, &cost, FLOPS_PER_CLOCK));
}

/* ---- variants -------------------------------------------------------------------------------------- */

dw__jit_variant dw__sm120_variant(const dw__gemm_shape *s) {
    const dw__sm120_tile *t = &dw__sm120_tiles[s->tile];
    dw__jit_variant v = {.source = t->scaled ? "sm120/sm120_gemm_scaled.cu" : "sm120/sm120_gemm.cu",
                         .entry = t->scaled ? "sm120_gemm_scaled" : "sm120_gemm",
                         .arch = "sm_120a"};
    if (t->scaled) {
        dw__jit_add_define(&v, "SCHEME_A", (int)s->scheme_a);
        dw__jit_add_define(&v, "SCHEME_B", (int)s->scheme_b);
    } else {
        dw__jit_add_define(&v, "TURNED_A", s->turned_a);
        dw__jit_add_define(&v, "TURNED_B", s->turned_b);
    }
    dw__jit_add_define(&v, "TILE_M", t->m);
    dw__jit_add_define(&v, "TILE_N", t->n);
    dw__jit_add_define(&v, "WARPS", t->warps);
    dw__jit_add_define(&v, "STAGES", t->stages);
    dw__gemm_add_epilogue(&v, s);
    return v;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point points[DW__ENTRY_POINTS]) {
    const dw__gemm_shape shape = {.params = params};
    (void)kernel, (void)capability;
    points[0].code = dw__sm120_variant(&shape);
    points[0].shared_bytes = dw__sm120_shared_bytes(&shape);
    return DW_OK;
}

/* Three tiles of rows and two of columns, the last of each incomplete, for few SMs: each block processes several tiles
 * of more steps than its ring has stages. */
dw__gemm_case dw__sm120_case_of(const dw__variant *variant) {
    enum { EXTRA_ROWS = 45, EXTRA_COLUMNS = 35, STEPS = 4, MISSING = 27 };
    const dw__gemm_shape s = {.params = variant->params};
    const dw__sm120_tile *t = &dw__sm120_tiles[s.tile];
    const dw_dtype type = s.f16 ? DW_F16 : DW_BF16;
    return (dw__gemm_case){
        .call = {.dtype = type,
                 .output = s.output == DW_GEMM_OUTPUT_F32 ? DW_F32 : type,
                 .m = 2 * t->m + EXTRA_ROWS,
                 .n = dw__sm120_tile_columns(&s) + EXTRA_COLUMNS,
                 .k = STEPS * step_of(&s) - MISSING,
                 .alpha = 0.75f,
                 .activation = s.activation,
                 .quantized = is_scaled(&s),
                 .quantized_d = s.output == DW_GEMM_OUTPUT_MXFP8,
                 .scheme_a = (dw_scheme)s.scheme_a,
                 .scheme_b = (dw_scheme)s.scheme_b},
        .bias = s.bias,
        .residual = s.residual,
        .turned = {s.turned_a, s.turned_b},
        .sm_count = t->blocks == 1 ? 2 : 1,
        .groups = 1,
    };
}

/* ---- launch ---------------------------------------------------------------------------------------- */

/* Makes the map of an operand of `rows` rows; boxes of `box_rows`, or of a step if it is turned. */
static dw_status map_operand(const dw_gemm *c, const dw__context *context, const dw_matrix *x,
                             const char *name, int64_t rows, bool turned, int box_rows,
                             dw__tensor_map *map) {
    const dw__map_element element = dw__gemm_map_element(c->dtype, c->quantized);
    if (turned)
        return dw__gemm_map(context, x, name, c->k, rows, element, DW_SM120_ELEMENT_STEP, map);
    return dw__gemm_map(context, x, name, rows, dw__gemm_row_units(c), element, box_rows, map);
}

/* Makes the maps of A and B, then of their scales if they are codes. */
static dw_status map_operands(const dw_gemm *c, const dw__context *context, const dw__gemm_shape *s,
                              dw__tensor_map *maps) {
    const dw__sm120_tile *t = &dw__sm120_tiles[s->tile];
    const int parts = is_swiglu(s) ? 2 : 1;
    DW_RETURN_IF_FAILED(map_operand(c, context, &c->a, "A", c->m, s->turned_a, t->m, &maps[0]));
    DW_RETURN_IF_FAILED(map_operand(c, context, &c->b, "B", dw__gemm_rows_b(c), s->turned_b,
                                    t->n / parts, &maps[1]));
    return dw__gemm_scale_maps(context, c, (int)s->scheme_a, &maps[2]);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw_gemm *c = call;
    const dw__gemm_shape shape = {.params = variant->params};
    const dw__sm120_tile *t = &dw__sm120_tiles[shape.tile];
    const int operands = c->quantized ? 4 : 2;
    dw__tensor_map maps[4] = {0}; /* nothing reads them if k is 0 */
    dw_sm120_gemm_params params = {
        .m = (int)c->m,
        .n = (int)c->n,
        .k = (int)c->k,
        .tiles_m = (int)ceil_divide(c->m, t->m),
        .tiles_n = (int)ceil_divide(c->n, dw__sm120_tile_columns(&shape)),
        .alpha = c->alpha,
        .bias = c->bias,
        .factor_a = c->quantized ? c->factor_a : NULL,
        .factor_b = c->quantized ? c->factor_b : NULL,
        .residual = c->residual.data,
        .d = c->d.data,
        .stride_d = c->d.stride,
        .stride_residual = c->residual.stride,
        .scales_d = c->quantized_d ? c->scales_d : NULL,
    };
    if (c->k > 0) DW_RETURN_IF_FAILED(map_operands(c, context, &shape, maps));
    const int64_t places = (int64_t)(context->sm_count > 0 ? context->sm_count : 1) * t->blocks,
                  tiles = (int64_t)params.tiles_m * params.tiles_n;
    void *arguments[5];
    for (int i = 0; i < operands; i++) arguments[i] = &maps[i];
    arguments[operands] = &params;
    return context->device->launch(&(dw__launch){
        .name = variant->kernel->name,
        .function = variant->functions[0],
        .grid = {(unsigned)(tiles < places ? tiles : places), 1, 1},
        .block = {(unsigned)DW_SM120_GEMM_THREADS(t->warps), 1, 1},
        .shared_bytes = dw__sm120_shared_bytes(&shape),
        .stream = c->stream,
        .arguments = arguments,
    });
}

/* ---- entries --------------------------------------------------------------------------------------- */

dw_status dw__sm120_supports(const dw_gemm *call, dw__gemm_turned turned,
                             const dw__gpu_target *gpu) {
    DW_RETURN_IF_FAILED(dw__gemm_check_turned(call, turned, false));
    if (gpu && !dw__gpu_is_rtx_blackwell(gpu->capability))
        return dw__fail(DW_TYPE, "its kernels are for sm_120a (RTX 50, RTX PRO), not for %s",
                        gpu->name);
    return DW_OK;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    DW_RETURN_IF_FAILED(dw__sm120_supports(call, (dw__gemm_turned){false, false}, gpu));
    DW_RETURN_IF_FAILED(dw__gemm_refuse_sm90(call));
    if (dw__gemm_kernel_on(call, 120) == kernel) return DW_OK;
    return dw__fail(DW_TYPE, "%s multiplies %s", kernel->name, kernel->elements);
}

dw_status dw__sm120_prepare(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context,
                            const dw__variant **variant) {
    const dw__gemm_shape shape = dw__sm120_shape_of(call, turned, context->sm_count);
    return dw__variant_of(context, dw__gemm_kernel_on(call, 120), shape.params, variant);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    (void)kernel;
    return dw__sm120_prepare(call, (dw__gemm_turned){false, false}, context, variant);
}

#define SM120_GEMM                                                                                 \
    .backend = "deepwell", .label = "Deepwell", .described = "ours, CUDA C for sm_120a",           \
    .kind = DW__CALL_GEMM, .proof = DW__PROVEN_ON_EMULATOR, .asked_for = true,                     \
    .architectures = "sm_120a (RTX 50, RTX PRO)", .supports = supports, .seconds = seconds,        \
    .describe_tile = describe_tile, .prepare = prepare, .enqueue = enqueue,                        \
    .entry_points = entry_points, .first_use = &dw__gemm_first_use,                                \
    .tolerance = "sums in F32, then D's rounding, against FP64"
const dw__kernel dw__sm120_gemm = {
    SM120_GEMM,
    .name = "sm120_gemm",
    .operation = "GEMM with bias, GELU, SwiGLU, residual",
    .source = "cuda/sm120/sm120_gemm.cu",
    .elements = "BF16, F16; D also F32, MXFP8",
    .needs = "16-byte rows",
};
const dw__kernel dw__sm120_gemm_scaled = {
    SM120_GEMM,
    .name = "sm120_gemm_scaled",
    .operation = "GEMM of MXFP8, NVFP4 or MXFP4 operands, with the same epilogue",
    .source = "cuda/sm120/sm120_gemm_scaled.cu",
    .elements = "E4M3, E5M2, E2M1; D BF16, F16, F32, MXFP8",
    .needs = "rows of codes from multiples of 16 bytes; scales in tiles of 128 x 4",
};
