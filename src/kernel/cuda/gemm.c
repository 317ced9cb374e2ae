/* GEMM on a GPU: checks of a call, variants, cost model, launch, kernels and the public calls. A call does only
 * arithmetic before its launch: it allocates nothing, takes no lock and does not synchronize. */
#include "common/gemm_reference_params.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "sm100/gemm_tiles.h"
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* ---- checks of a call ------------------------------------------------------------------------------ */

/* TMA counts rows and columns in 31 bits, and tiles may extend beyond the last row. */
static const int64_t most_size = (int64_t)1 << 30;
static const int64_t most_stride_bytes = ((int64_t)1 << 40) - 16;

const char *dw__gemm_describe(const void *call, char *text, size_t bytes) {
    const dw_gemm *c = call;
    static const char *const activations[] = {"", ", gelu", ", gelu by tanh", ", swiglu"};
    const char *to =
        c->quantized_d ? dw_scheme_name(dw__gemm_scheme_d(c)) : dw_dtype_name(c->output);
    char operands[96];
    if (c->quantized)
        snprintf(operands, sizeof operands, "%s x %s to %s", dw_scheme_name(c->scheme_a),
                 dw_scheme_name(c->scheme_b), to);
    else if (c->quantized_d || c->output == DW_F32)
        snprintf(operands, sizeof operands, "%s to %s", dw_dtype_name(c->dtype), to);
    else
        snprintf(operands, sizeof operands, "%s", dw_dtype_name(c->dtype));
    snprintf(text, bytes, "m %lld, n %lld, k %lld, %s%s%s%s%s%s", (long long)c->m, (long long)c->n,
             (long long)c->k, operands, c->bias ? ", bias" : "", activations[c->activation],
             c->residual.data ? ", residual" : "", c->row_scale ? ", factors of rows" : "",
             c->row_squares ? ", squares of rows" : "");
    return text;
}

int64_t dw__gemm_row_units(const dw_gemm *c) {
    return c->quantized ? dw_tensor_bytes(dw_scheme_describe(c->scheme_a)->element, 1, &c->k)
                        : c->k;
}

dw_status dw__gemm_read(const dw_gemm *given, dw_gemm *call) {
    static const dw__struct known = {"dw_gemm",
                                     sizeof *call,
                                     {offsetof(dw_gemm, quantized), offsetof(dw_gemm, kernel),
                                      offsetof(dw_gemm, row_scale), offsetof(dw_gemm, scheme_d)}};
    return dw__struct_read(&known, given, call);
}

static dw_status check_sizes(const dw_gemm *c) {
    const bool swiglu = c->activation == DW_ACTIVATION_SWIGLU;
    const dw__size_range sizes[] = {{"m", c->m, 0, most_size},
                                    {"n", c->n, 0, swiglu ? most_size / 2 : most_size},
                                    {"k", c->k, 0, most_size}};
    DW_RETURN_IF_FAILED(dw__check_sizes("GEMM", sizes, DW_COUNT(sizes)));
    int64_t tiles = ((c->m + 127) / 128) * ((dw__gemm_rows_b(c) + 63) / 64);
    if (tiles > most_size)
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: m is %lld and n is %lld: %lld tiles of 128 x 64, more than %lld; "
                        "split the rows of A",
                        (long long)c->m, (long long)c->n, (long long)tiles, (long long)most_size);
    return DW_OK;
}

static dw_status check_types(const dw_gemm *c) {
    DW_RETURN_IF_FAILED(dw__check_half("GEMM", c->dtype));
    if (!c->quantized_d && c->output != c->dtype && c->output != DW_F32)
        return dw__fail(DW_TYPE, "GEMM: D's element type is %s; expected %s or f32",
                        dw_dtype_name(c->output), dw_dtype_name(c->dtype));
    if ((int)c->activation < 0 || c->activation >= DW_ACTIVATION_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT, "GEMM: the activation is %d; expected 0 to %d",
                        (int)c->activation, DW_ACTIVATION_COUNT - 1);
    if (!isfinite(c->alpha))
        return dw__fail(DW_INVALID_ARGUMENT, "GEMM: alpha is %g; expected a finite number",
                        (double)c->alpha);
    return DW_OK;
}

static bool is_mxfp8(dw_scheme scheme) {
    return scheme == DW_SCHEME_MXFP8 || scheme == DW_SCHEME_MXFP8_E5M2;
}

/* Checks which codes D becomes, and the members that only codes of fp8-block have. */
static dw_status check_scheme_d(const dw_gemm *c) {
    const bool blocks = dw__gemm_has_blocks_d(c);
    if (c->quantized_d && !blocks && dw__gemm_scheme_d(c) != DW_SCHEME_MXFP8)
        return dw__fail(DW_UNSUPPORTED, "GEMM: scheme_d is %s; expected mxfp8 or fp8-block",
                        dw_scheme_name(c->scheme_d));
    if (!blocks && (c->turned_d.data || c->turned_scales_d || c->plain_d.data))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "GEMM: %s is not NULL; expected NULL, or quantized_d 1 and scheme_d "
                        "fp8-block",
                        c->plain_d.data    ? "plain_d"
                        : c->turned_d.data ? "turned_d"
                                           : "turned_scales_d");
    return DW_OK;
}

static dw_status check_schemes(const dw_gemm *c) {
    DW_RETURN_IF_FAILED(check_scheme_d(c));
    if (c->quantized_d && c->residual.data)
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: D is quantized, and there is a residual, which no kernel adds "
                        "then; expected none");
    if (!c->quantized) return DW_OK;
    if (is_mxfp8(c->scheme_a) && is_mxfp8(c->scheme_b)) return DW_OK;
    if (c->scheme_a == c->scheme_b &&
        (c->scheme_a == DW_SCHEME_NVFP4 || c->scheme_a == DW_SCHEME_MXFP4))
        return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "GEMM: A is %s and B is %s; expected mxfp8 or mxfp8-e5m2 for each, or "
                    "nvfp4 or mxfp4 for both",
                    dw_scheme_name(c->scheme_a), dw_scheme_name(c->scheme_b));
}

static dw_status check_rows(const dw_gemm *c) {
    if (c->row_norm != 0 && c->row_norm != 1)
        return dw__fail(DW_INVALID_ARGUMENT, "GEMM: row_norm is %d; expected 0 or 1", c->row_norm);
    if (!(c->row_epsilon >= 0.0f) || !isfinite(c->row_epsilon))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "GEMM: row_epsilon is %g; expected a finite number, 0 or above",
                        (double)c->row_epsilon);
    if (c->row_squares && (c->quantized_d || c->output != c->dtype))
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: D is %s, and row_squares is not NULL; expected D of %s, or sum the "
                        "squares of its rows by yourself",
                        c->quantized_d ? "quantized" : dw_dtype_name(c->output),
                        dw_dtype_name(c->dtype));
    return DW_OK;
}

dw_status dw__gemm_refuse_sm90(const dw_gemm *c) {
    if (dw__gemm_has_blocks_d(c))
        return dw__fail(DW_UNSUPPORTED,
                        "scheme_d fp8-block is for sm90_gemm (H100, H200) alone; expected mxfp8, "
                        "or quantize D by yourself");
    if (!c->row_scale && !c->row_squares) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "%s is for sm90_gemm (H100, H200) alone; expected NULL: run the norm apart",
                    c->row_scale ? "row_scale" : "row_squares");
}

/* Checks what a call that multiplies reads and writes beside its matrices. */
static dw_status check_addresses(const dw_gemm *c, bool launching) {
    const bool read = c->quantized && launching && c->k > 0;
    const dw__address all[] = {
        {"bias", c->bias, dw_dtype_bytes(c->dtype), false},
        {"scales_d", c->quantized_d ? c->scales_d : NULL, 16, c->quantized_d && launching},
        {"turned_scales_d", c->turned_scales_d, 4, c->turned_d.data && launching},
        {"scales_a", c->quantized ? c->scales_a : NULL, 16, read},
        {"scales_b", c->quantized ? c->scales_b : NULL, 16, read},
        {"factor_a", c->quantized ? c->factor_a : NULL, 4, false},
        {"factor_b", c->quantized ? c->factor_b : NULL, 4, false},
        {"row_scale", c->row_scale, 4, false},
        {"row_squares", c->row_squares, 4, false}};
    return dw__check_addresses("GEMM", all, DW_COUNT(all));
}

/* `element`: bytes of the unit of the stride; a row has `columns` of these units. */
static dw_status check_matrix(const dw_matrix *x, const char *name, int64_t rows, int64_t columns,
                              size_t element, bool launching) {
    const int64_t width = (int64_t)element, most = most_stride_bytes / width;
    const char *unit = width == 1 ? "bytes" : "elements";
    if (rows == 0 || columns == 0) return DW_OK; /* a matrix without elements needs no address */
    DW_RETURN_IF_FAILED(dw__check_tensor("GEMM", name, x->data, launching));
    if (rows == 1) return DW_OK;
    if (x->stride < columns)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "GEMM: the rows of %s are %lld %s apart and %lld long; expected "
                        "contiguous rows that do not overlap (make %s contiguous)",
                        name, (long long)x->stride, unit, (long long)columns, name);
    if (x->stride * width % 16 != 0 || x->stride > most)
        return dw__fail(DW_UNSUPPORTED,
                        "GEMM: the rows of %s are %lld %s apart; expected a multiple of "
                        "%lld (16 bytes) up to %lld; pad its rows",
                        name, (long long)x->stride, unit, (long long)(16 / width), (long long)most);
    return DW_OK;
}

/* Codes of fp8-block have padded rows. */
static dw_status check_blocks_d(const dw_gemm *c, bool launching) {
    const int64_t row = dw__gemm_code_row(c->n), column = dw__gemm_code_row(c->m);
    DW_RETURN_IF_FAILED(check_matrix(&c->d, "D", c->m, row, 1, launching));
    if (c->turned_d.data)
        DW_RETURN_IF_FAILED(check_matrix(&c->turned_d, "turned_d", c->n, column, 1, launching));
    if (!c->plain_d.data) return DW_OK;
    return check_matrix(&c->plain_d, "plain_d", c->m, c->n, dw_dtype_bytes(c->dtype), launching);
}

dw_status dw__gemm_check_turned(const dw_gemm *c, dw__gemm_turned turned, bool launching) {
    DW_RETURN_IF_FAILED(check_types(c));
    DW_RETURN_IF_FAILED(check_schemes(c));
    DW_RETURN_IF_FAILED(check_sizes(c));
    DW_RETURN_IF_FAILED(check_rows(c));
    if (dw__gemm_is_empty(c)) return DW_OK;
    const int64_t units = dw__gemm_row_units(c);
    const size_t width = c->quantized ? 1 : dw_dtype_bytes(c->dtype),
                 width_d = c->quantized_d ? 1 : dw_dtype_bytes(c->output);
    const int64_t rows[] = {c->m, dw__gemm_rows_b(c)};
    DW_RETURN_IF_FAILED(check_matrix(&c->a, "A", turned.a ? units : rows[0],
                                     turned.a ? rows[0] : units, width, launching));
    DW_RETURN_IF_FAILED(check_matrix(&c->b, "B", turned.b ? units : rows[1],
                                     turned.b ? rows[1] : units, width, launching));
    DW_RETURN_IF_FAILED(dw__gemm_has_blocks_d(c)
                            ? check_blocks_d(c, launching)
                            : check_matrix(&c->d, "D", c->m, c->n, width_d, launching));
    if (c->residual.data)
        DW_RETURN_IF_FAILED(
            check_matrix(&c->residual, "the residual", c->m, c->n, width_d, launching));
    return check_addresses(c, launching);
}

dw_status dw__gemm_check(const dw_gemm *c, bool launching) {
    return dw__gemm_check_turned(c, (dw__gemm_turned){false, false}, launching);
}

/* ---- tiles ----------------------------------------------------------------------------------------- */

#define FAMILY "sm_100f"

const dw__gemm_tile dw__gemm_tiles[] = {
#define DENSE(blocks, columns, depth)                                                              \
    {.ctas = blocks,                                                                               \
     .n = columns,                                                                                 \
     .stages = depth,                                                                              \
     .shared_bytes = DW_GEMM_SHARED_BYTES(blocks, columns, depth)},
#define SCALED(codes, blocks, columns, depth)                                                      \
    {.scheme = (dw_scheme)(codes),                                                                 \
     .ctas = blocks,                                                                               \
     .n = columns,                                                                                 \
     .stages = depth,                                                                              \
     .shared_bytes = DW_SCALED_SHARED_BYTES(codes, blocks, columns, depth)},
    DW_SM100_GEMM_TILES(DENSE) DW_SM100_SCALED_TILES(SCALED)
#undef DENSE
#undef SCALED
};
_Static_assert(DW_COUNT(dw__gemm_tiles) == DW__GEMM_TILES, "the header's number");

int dw__gemm_tile_rows(const dw__gemm_shape *s) {
    return dw__gemm_tiles[s->tile].ctas * DW_GEMM_ROWS;
}
int dw__gemm_tile_columns(const dw__gemm_shape *s) {
    int n = dw__gemm_tiles[s->tile].n;
    return s->activation == DW_ACTIVATION_SWIGLU ? n / 2 : n;
}

static bool is_scaled(dw_scheme scheme) { return scheme != DW_SCHEME_BF16; }

bool dw__gemm_exists(const dw__gemm_shape *s) {
    static const int box_columns[] = {64, 32, 128}; /* 128 bytes of D */
    const dw__gemm_tile *t = &dw__gemm_tiles[s->tile];
    if (s->groups != DW_GROUPS_BATCH && t->ctas > 1) return false;
    if (s->turned_b && s->activation == DW_ACTIVATION_SWIGLU) return false; /* it has no parts */
    if (t->scheme != s->scheme_a &&
        !(t->scheme == DW_SCHEME_MXFP8 && s->scheme_a == DW_SCHEME_MXFP8_E5M2))
        return false;
    /* Each half has whole tiles of scales. */
    if (is_scaled(t->scheme) && s->activation == DW_ACTIVATION_SWIGLU && t->n != 256) return false;
    return dw__gemm_tile_columns(s) % box_columns[s->output] == 0;
}

int dw__gemm_step(dw_scheme scheme) {
    return is_scaled(scheme) ? DW_SCALED_STEP((int)scheme) : DW_GEMM_STEP;
}

/* The rate of an SM's shared memory is Hopper's, assumed to be unchanged. */
enum { SHARED_BYTES_PER_CLOCK = 128 };

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Rows of tiles; the last one of each group of rows has on average half of its rows. */
static double tiles_high(const dw__gemm_groups_call *c, int tile_m) {
    if (c->groups.kind != DW_GROUPS_ROWS)
        return (double)c->groups.count * (double)ceil_divide(c->gemm.m, tile_m);
    return (double)c->gemm.m / tile_m + (double)c->groups.count * 0.5;
}

/* The last step of each group of the contraction has on average half of its elements. */
static int64_t steps_of(const dw__gemm_groups_call *c, int step) {
    int64_t k = c->gemm.k;
    if (c->groups.kind == DW_GROUPS_CONTRACTION && c->groups.count > 0)
        k = ceil_divide(k, c->groups.count) + step / 2;
    return ceil_divide(k, step);
}

dw__gemm_cost dw__gemm_groups_cost_of(const dw__gemm_groups_call *call, const dw__gemm_shape *shape,
                                      int sm_count) {
    const dw__gemm_tile *t = &dw__gemm_tiles[shape->tile];
    int clusters = sm_count / t->ctas > 0 ? sm_count / t->ctas : 1;
    const int scheme = (int)t->scheme, step = dw__gemm_step(t->scheme);
    int stage = is_scaled(t->scheme) ? DW_SCALED_STAGE_BYTES(scheme, t->ctas, t->n)
                                     : DW_GEMM_STAGE_BYTES(t->ctas, t->n);
    int tensor = 2 * DW_GEMM_ROWS * t->n * DW_GEMM_STEP /
                 DW__SM100_FLOPS_PER_CLOCK, /* of rows of 128 bytes */
        shared = stage / SHARED_BYTES_PER_CLOCK;
    const double tiles = tiles_high(call, dw__gemm_tile_rows(shape)) *
                         (double)ceil_divide(call->gemm.n, dw__gemm_tile_columns(shape));
    dw__gemm_cost made = {
        .tiles = (int64_t)ceil(tiles),
        .steps = steps_of(call, step),
        .step_clocks = tensor > shared ? tensor : shared,
    };
    made.rounds = ceil_divide(made.tiles, clusters);
    made.clocks = (double)made.rounds * (double)made.steps * made.step_clocks;
    made.bytes = (double)made.tiles * (double)made.steps * stage * t->ctas;
    return made;
}

dw__gemm_cost dw__gemm_cost_of(const dw_gemm *call, const dw__gemm_shape *shape, int sm_count) {
    const dw__gemm_groups_call c = dw__gemm_single(call, (dw__gemm_turned){false, false});
    return dw__gemm_groups_cost_of(&c, shape, sm_count);
}

dw__gemm_shape dw__gemm_shape_without_tile(const dw_gemm *call) {
    return (dw__gemm_shape){
        .scheme_a = dw__gemm_scheme_a(call),
        .scheme_b = dw__gemm_scheme_b(call),
        .output = call->quantized_d        ? DW_GEMM_OUTPUT_MXFP8
                  : call->output == DW_F32 ? DW_GEMM_OUTPUT_F32
                                           : DW_GEMM_OUTPUT_ELEMENT,
        .f16 = call->dtype == DW_F16,
        .bias = call->bias != NULL,
        .residual = call->residual.data != NULL,
        .activation = call->activation,
    };
}

dw__gemm_shape dw__gemm_groups_shape_of(const dw__gemm_groups_call *call, int sm_count) {
    dw__gemm_shape shape = dw__gemm_shape_without_tile(&call->gemm);
    dw__gemm_cost least = {.clocks = -1};
    int best = 0;
    shape.turned_a = call->turned.a;
    shape.turned_b = call->turned.b;
    shape.groups = (uint64_t)call->groups.kind;
    for (shape.tile = 0; shape.tile < DW__GEMM_TILES; shape.tile++) {
        if (!dw__gemm_exists(&shape)) continue;
        dw__gemm_cost cost = dw__gemm_groups_cost_of(call, &shape, sm_count);
        if (least.clocks >= 0 && (cost.clocks > least.clocks ||
                                  (cost.clocks == least.clocks && cost.bytes >= least.bytes)))
            continue;
        least = cost;
        best = shape.tile;
    }
    shape.tile = best;
    return shape;
}

dw__gemm_shape dw__gemm_shape_of(const dw_gemm *call, int sm_count) {
    const dw__gemm_groups_call c = dw__gemm_single(call, (dw__gemm_turned){false, false});
    return dw__gemm_groups_shape_of(&c, sm_count);
}

_Static_assert((int)DW_ACTIVATION_NONE == DW_GEMM_LINEAR &&
                   (int)DW_ACTIVATION_GELU == DW_GEMM_GELU &&
                   (int)DW_ACTIVATION_GELU_TANH == DW_GEMM_GELU_TANH &&
                   (int)DW_ACTIVATION_SWIGLU == DW_GEMM_SWIGLU,
               "passed on as they are");

/* ---- variants ---------------------------------------------------------------------------------------- */

void dw__gemm_add_epilogue(dw__jit_variant *v, const dw__gemm_shape *s) {
    dw__jit_add_define(v, "ELEMENT", s->f16);
    dw__jit_add_define(v, "OUTPUT", s->output);
    dw__jit_add_define(v, "ACTIVATION", (int)s->activation);
    dw__jit_add_define(v, "BIAS", s->bias);
    dw__jit_add_define(v, "RESIDUAL", s->residual);
}

dw__jit_variant dw__gemm_variant(const dw__gemm_shape *s) {
    const dw__gemm_tile *t = &dw__gemm_tiles[s->tile];
    const bool scaled = is_scaled((dw_scheme)s->scheme_a);
    dw__jit_variant v = {.source = scaled ? "sm100/gemm_scaled.cu" : "sm100/gemm.cu",
                         .entry = scaled ? "sm100_gemm_scaled" : "sm100_gemm",
                         .arch = FAMILY};
    if (scaled) {
        dw__jit_add_define(&v, "SCHEME_A", (int)s->scheme_a);
        dw__jit_add_define(&v, "SCHEME_B", (int)s->scheme_b);
        dw__jit_add_define(&v, "SCHEDULE", DW_GEMM_STATIC);
    }
    dw__jit_add_define(&v, "CTAS", t->ctas);
    dw__jit_add_define(&v, "TILE_N", t->n);
    dw__jit_add_define(&v, "STAGES", t->stages);
    /* Their defaults are 0. */
    if (s->groups != DW_GROUPS_BATCH) dw__jit_add_define(&v, "GROUPS", (int)s->groups);
    if (s->turned_a) dw__jit_add_define(&v, "TURNED_A", 1);
    if (s->turned_b) dw__jit_add_define(&v, "TURNED_B", 1);
    dw__gemm_add_epilogue(&v, s);
    return v;
}

dw__jit_variant dw__gemm_reference_variant(int capability, bool f16, bool f32_output) {
    dw__jit_variant v = {.source = "common/gemm_reference.cu",
                         .entry = "reference_gemm",
                         .arch = dw__gpu_arch(capability)};
    dw__jit_add_define(&v, "ELEMENT", f16);
    dw__jit_add_define(&v, "OUTPUT", f32_output);
    return v;
}

/* ---- launch ---------------------------------------------------------------------------------------- */

dw__map_element dw__gemm_map_element(dw_dtype type, bool codes) {
    if (codes) return DW__MAP_U8;
    return type == DW_F32 ? DW__MAP_F32 : type == DW_F16 ? DW__MAP_F16 : DW__MAP_BF16;
}

/* A map of rank 2 of one matrix, or of rank 4. `side_by_side`: a row of one matrix, then the same row of the next. */
static dw_status make_map(const dw__context *context, const dw_matrix *x, const char *name,
                          int rank, int64_t groups, bool side_by_side, int64_t rows,
                          int64_t columns, dw__map_element element, int box_rows,
                          dw__tensor_map *map) {
    static const int64_t widths[] = {
        [DW__MAP_F16] = 2, [DW__MAP_BF16] = 2, [DW__MAP_F32] = 4, [DW__MAP_U8] = 1};
    const int64_t width = widths[element], row = columns * width;
    /* The caller's matrix may have any stride if it has a single row, but the map may not. */
    const int64_t stride = rows > 1 || groups > 1 ? x->stride * width : (row + 15) / 16 * 16,
                  next = side_by_side ? row : stride * rows;
    const dw__tensor_map_shape shape = {
        .element = element,
        .rank = rank,
        .address = x->data,
        .size = {(uint64_t)columns, (uint64_t)rows, (uint64_t)groups, 1},
        .stride = {(uint64_t)stride, (uint64_t)next, (uint64_t)next},
        .box = {(uint32_t)(DW_GEMM_ROW_BYTES / width), (uint32_t)box_rows, 1, 1},
        .swizzle_bytes = 128,
    };
    return dw__gpu_map(context, &shape, name, map);
}

dw_status dw__gemm_map(const dw__context *context, const dw_matrix *x, const char *name,
                       int64_t rows, int64_t columns, dw__map_element element, int box_rows,
                       dw__tensor_map *map) {
    return make_map(context, x, name, 2, 1, false, rows, columns, element, box_rows, map);
}

dw_status dw__gemm_groups_map(const dw__context *context, const dw_matrix *x, const char *name,
                              int64_t groups, int64_t rows, int64_t columns,
                              dw__map_element element, int box_rows, dw__tensor_map *map) {
    return make_map(context, x, name, 4, groups, false, rows, columns, element, box_rows, map);
}

dw_status dw__gemm_groups_operand_maps(const dw__gemm_groups_call *c, const dw__context *context,
                                       int box_a, int box_b, dw__tensor_map maps[2]) {
    const dw_gemm *g = &c->gemm;
    const dw__map_element element = dw__gemm_map_element(g->dtype, dw__gemm_is_fp8(c->codes.a));
    const int64_t groups_a = c->groups.kind == DW_GROUPS_BATCH ? c->groups.count : 1,
                  groups_b = c->groups.kind == DW_GROUPS_CONTRACTION ? 1 : c->groups.count,
                  rows_a = g->m, rows_b = dw__gemm_rows_b(g) * (c->halves ? 2 : 1);
    const dw__gemm_turned turned = c->turned;
    DW_RETURN_IF_FAILED(dw__gemm_groups_map(context, &g->a, "A", groups_a, turned.a ? g->k : rows_a,
                                            turned.a ? rows_a : g->k, element,
                                            turned.a ? DW_GEMM_STEP : box_a, &maps[0]));
    return make_map(context, &g->b, "B", 4, groups_b, c->codes.side_by_side,
                    turned.b ? g->k : rows_b, turned.b ? rows_b : g->k, element,
                    turned.b ? DW_GEMM_STEP : box_b, &maps[1]);
}

dw_status dw__gemm_scale_map(const dw__context *context, const void *scales, const char *name,
                             int64_t rows, int parts, int64_t k, int scheme, dw__tensor_map *map) {
    enum { WORDS = DW_SCALE_TILE_BYTES / 8 };
    const int64_t block = DW_SCALED_BLOCK(scheme),
                  wide = DW_SCALE_TILES_WIDE((k + block - 1) / block);
    const dw__tensor_map_shape shape = {
        .element = DW__MAP_U64,
        .rank = 2,
        .address = (void *)(uintptr_t)scales,
        .size = {(uint64_t)(WORDS * wide), (uint64_t)(parts * DW_SCALE_TILES_HIGH(rows))},
        .stride = {(uint64_t)(DW_SCALE_TILE_BYTES * wide)},
        .box = {(uint32_t)(WORDS * DW_SCALED_STEP_TILES(scheme)), 1},
    };
    return dw__gpu_map(context, &shape, name, map);
}

dw_status dw__gemm_scale_maps(const dw__context *context, const dw_gemm *c, int scheme,
                              dw__tensor_map *maps) {
    const int parts = c->activation == DW_ACTIVATION_SWIGLU ? 2 : 1;
    if (!c->quantized) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__gemm_scale_map(context, c->scales_a, "A's scales", c->m, 1, c->k, scheme, &maps[0]));
    return dw__gemm_scale_map(context, c->scales_b, "B's scales", c->n, parts, c->k, scheme,
                              &maps[1]);
}

int64_t dw__gemm_grid(const dw__gemm_groups_call *c, int tile_m, int tiles_n, int64_t places) {
    /* Each group of rows has at most one incomplete tile. */
    const int64_t high = c->groups.kind == DW_GROUPS_ROWS
                             ? c->gemm.m / tile_m + c->groups.count
                             : ceil_divide(c->gemm.m, tile_m) * c->groups.count,
                  tiles = high * tiles_n;
    if (places < 1) places = 1;
    return tiles < places ? tiles : places;
}

/* Makes the maps of the operands: A, B, then their scales if they are codes. */
static dw_status make_operand_maps(const dw__gemm_groups_call *call, const dw__context *context,
                                   const dw__gemm_shape *shape, dw__tensor_map *maps) {
    const dw_gemm *c = &call->gemm;
    const dw__gemm_tile *tile = &dw__gemm_tiles[shape->tile];
    const bool halves = tile->ctas == 2 || c->activation == DW_ACTIVATION_SWIGLU;
    const int box_b = halves ? tile->n / 2 : tile->n;
    const int64_t units = dw__gemm_row_units(c), rows_b = dw__gemm_rows_b(c);
    const dw__map_element element = dw__gemm_map_element(c->dtype, c->quantized);
    if (shape->groups != DW_GROUPS_BATCH)
        return dw__gemm_groups_operand_maps(call, context, DW_GEMM_ROWS, box_b, maps);
    DW_RETURN_IF_FAILED(
        shape->turned_a
            ? dw__gemm_map(context, &c->a, "A", units, c->m, element, DW_GEMM_STEP, &maps[0])
            : dw__gemm_map(context, &c->a, "A", c->m, units, element, DW_GEMM_ROWS, &maps[0]));
    DW_RETURN_IF_FAILED(
        shape->turned_b
            ? dw__gemm_map(context, &c->b, "B", units, rows_b, element, DW_GEMM_STEP, &maps[1])
            : dw__gemm_map(context, &c->b, "B", rows_b, units, element, box_b, &maps[1]));
    return dw__gemm_scale_maps(context, c, (int)shape->scheme_a, &maps[2]);
}

/* Makes the map of D or of the residual. */
static dw_status make_result_map(const dw__gemm_groups_call *call, const dw__context *context,
                                 const dw_matrix *x, const char *name, dw__tensor_map *map) {
    enum { BOX_ROWS = 32 }; /* rows of D that one warp stores */
    const dw_gemm *c = &call->gemm;
    const dw__map_element element = dw__gemm_map_element(c->output, c->quantized_d);
    if (call->groups.kind == DW_GROUPS_CONTRACTION)
        return dw__gemm_groups_map(context, x, name, call->groups.count, c->m, c->n, element,
                                   BOX_ROWS, map);
    return dw__gemm_map(context, x, name, c->m, c->n, element, BOX_ROWS, map);
}

dw_status dw__sm100_enqueue(const dw__gemm_groups_call *call, const dw__context *context,
                            const dw__variant *variant) {
    const dw_gemm *c = &call->gemm;
    const dw__gemm_shape unpacked = {.params = variant->params}, *shape = &unpacked;
    const dw__gemm_tile *tile = &dw__gemm_tiles[shape->tile];
    const int operands = c->quantized ? 4 : 2; /* maps of them; then D's and the residual's */
    const int tile_rows = dw__gemm_tile_rows(shape), tile_columns = dw__gemm_tile_columns(shape);
    dw__tensor_map maps[6], *d = &maps[operands], *residual = d + 1;
    dw_gemm_params params = {
        .m = (int)c->m,
        .n = (int)c->n,
        .k = (int)c->k,
        .groups = (int)call->groups.count,
        .tiles_m = (int)((c->m + tile_rows - 1) / tile_rows),
        .tiles_n = (int)((c->n + tile_columns - 1) / tile_columns),
        .alpha = c->alpha,
        .bias = c->bias,
        .factor_a = c->quantized ? c->factor_a : NULL,
        .factor_b = c->quantized ? c->factor_b : NULL,
        .scales_d = c->quantized_d ? c->scales_d : NULL,
        .offsets = call->groups.offsets,
        .d = c->d.data,
        .residual = c->residual.data,
        .stride_d = c->d.stride,
        .stride_residual = c->residual.stride,
        .error = call->groups.error,
    };
    DW_RETURN_IF_FAILED(make_result_map(call, context, &c->d, "D", d));
    *residual = *d; /* the kernel does not read these maps */
    for (int i = 0; i < operands; i++) maps[i] = *d;
    if (c->k > 0) DW_RETURN_IF_FAILED(make_operand_maps(call, context, shape, maps));
    if (c->residual.data)
        DW_RETURN_IF_FAILED(make_result_map(call, context, &c->residual, "the residual", residual));
    /* Blocks, or pairs of blocks, are persistent and process tile after tile. */
    const int64_t clusters =
        dw__gemm_grid(call, tile_rows, params.tiles_n, context->sm_count / tile->ctas);
    void *arguments[7];
    for (int i = 0; i < operands + 2; i++) arguments[i] = &maps[i];
    arguments[operands + 2] = &params;
    return context->device->launch(&(dw__launch){
        .name = variant->kernel->name,
        .function = variant->functions[0],
        .grid = {(unsigned)(clusters * tile->ctas), 1, 1},
        .block = {DW_GEMM_THREADS, 1, 1},
        .cluster = {tile->ctas > 1 ? (unsigned)tile->ctas : 0, 1, 1},
        .shared_bytes = tile->shared_bytes,
        .stream = c->stream,
        .arguments = arguments,
    });
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__gemm_shape shape = {.params = variant->params};
    const dw__gemm_groups_call c =
        dw__gemm_single(call, (dw__gemm_turned){shape.turned_a, shape.turned_b});
    return dw__sm100_enqueue(&c, context, variant);
}

static dw_status enqueue_reference(const void *call, const dw__context *context,
                                   const dw__variant *variant) {
    enum { REFERENCE_THREADS = 256, MOST_BLOCKS = 4096 };
    const dw_gemm *c = call;
    dw_gemm_reference_params params = {
        .m = c->m,
        .n = c->n,
        .k = c->k,
        .stride_a = c->a.stride,
        .stride_b = c->b.stride,
        .stride_d = c->d.stride,
        .stride_residual = c->residual.stride,
        .a = c->a.data,
        .b = c->b.data,
        .bias = c->bias,
        .residual = c->residual.data,
        .d = c->d.data,
        .alpha = c->alpha,
        .activation = (int)c->activation,
    };
    int64_t blocks = (c->m * c->n + REFERENCE_THREADS - 1) / REFERENCE_THREADS;
    void *arguments[] = {&params};
    return context->device->launch(&(dw__launch){
        .name = "reference_gemm",
        .function = variant->functions[0],
        .grid = {(unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), 1, 1},
        .block = {REFERENCE_THREADS, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}

/* ---- kernels --------------------------------------------------------------------------------------- */

const dw__kernel *dw__gemm_kernel_on(const dw_gemm *call, int capability) {
    if (capability == 90) return &dw__sm90_gemm;
    if (dw__gpu_is_rtx_blackwell(capability))
        return call->quantized ? &dw__sm120_gemm_scaled : &dw__sm120_gemm;
    return call->quantized ? &dw__sm100_gemm_scaled : &dw__sm100_gemm;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    DW_RETURN_IF_FAILED(dw__gemm_check(call, false));
    DW_RETURN_IF_FAILED(dw__gemm_refuse_sm90(call));
    if (!dw__gpu_is_blackwell(gpu->capability))
        return dw__fail(DW_TYPE, "its kernels are for sm_100f (B200, B300), not for %s", gpu->name);
    if (dw__gemm_kernel_on(call, gpu->capability) == kernel) return DW_OK;
    return dw__fail(DW_TYPE, "%s multiplies %s", kernel->name, kernel->elements);
}

dw_status dw__sm100_supports(const dw_gemm *c, dw__gemm_turned turned, const dw__gpu_target *gpu) {
    DW_RETURN_IF_FAILED(dw__gemm_check_turned(c, turned, false));
    if (gpu && !dw__gpu_is_blackwell(gpu->capability))
        return dw__fail(DW_TYPE, "its kernels are for sm_100f (B200, B300), not for %s", gpu->name);
    if (c->quantized || c->quantized_d)
        return dw__fail(DW_UNSUPPORTED, "codes with scales of blocks lie along k in a single GEMM; "
                                        "expected operands and D of BF16, F16 or F32");
    if (turned.b && c->activation == DW_ACTIVATION_SWIGLU)
        return dw__fail(DW_UNSUPPORTED, "the rows of B have two parts with SwiGLU; expected B with "
                                        "contiguous rows along k");
    return DW_OK;
}

dw_status dw__sm100_prepare(const dw_gemm *call, dw__gemm_turned turned, const dw__context *context,
                            const dw__variant **variant) {
    const dw__gemm_groups_call c = dw__gemm_single(call, turned);
    const dw__gemm_shape shape = dw__gemm_groups_shape_of(&c, context->sm_count);
    return dw__variant_of(context, &dw__sm100_gemm, shape.params, variant);
}

dw_status dw__sm100_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                 dw__entry_point points[DW__ENTRY_POINTS]) {
    const dw__gemm_shape shape = {.params = params};
    (void)kernel, (void)capability;
    points[0].code = dw__gemm_variant(&shape);
    points[0].shared_bytes = dw__gemm_tiles[shape.tile].shared_bytes;
    return DW_OK;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__gemm_shape shape = dw__gemm_shape_of(call, context->sm_count);
    return dw__variant_of(context, kernel, shape.params, variant);
}

#define SM100_GEMM                                                                                 \
    .backend = "deepwell", .label = "Deepwell", .described = "ours, CUDA C for sm_100f",           \
    .kind = DW__CALL_GEMM, .proof = DW__PROVEN_ON_EMULATOR, .asked_for = true,                     \
    .architectures = "sm_100f (B200, B300)", .supports = supports,                                 \
    .seconds = dw__gemm_kernel_seconds, .describe_tile = dw__gemm_describe_tile,                   \
    .prepare = prepare, .enqueue = enqueue, .entry_points = dw__sm100_entry_points,                \
    .first_use = &dw__gemm_first_use, .tolerance = "sums in F32, then D's rounding, against FP64"
const dw__kernel dw__sm100_gemm = {
    SM100_GEMM,
    .name = "sm100_gemm",
    .operation = "GEMM with bias, GELU, SwiGLU, residual",
    .source = "cuda/sm100/gemm.cu",
    .elements = "BF16, F16; D also F32, MXFP8",
    .needs = "16-byte rows",
};
const dw__kernel dw__sm100_gemm_scaled = {
    SM100_GEMM,
    .name = "sm100_gemm_scaled",
    .operation = "GEMM of MXFP8, NVFP4 or MXFP4 operands, with the same epilogue",
    .source = "cuda/sm100/gemm_scaled.cu",
    .elements = "E4M3, E5M2, E2M1; D BF16, F16, F32, MXFP8",
    .needs = "rows of codes from multiples of 16 bytes; scales in tiles of 128 x 4",
};

/* Three tiles of rows and two of columns, the last of each incomplete, for two blocks (or pairs). Each block processes
 * three tiles of three steps each, so that both accumulators and every stage of the ring are reused. */
dw__gemm_case dw__gemm_case_of(const dw__variant *variant) {
    enum { EXTRA_ROWS = 45, EXTRA_COLUMNS = 33, STEPS = 3, MISSING = 27, CLUSTERS = 2 };
    const dw__gemm_shape s = {.params = variant->params};
    const bool scaled = is_scaled((dw_scheme)s.scheme_a);
    const dw_dtype type = s.f16 ? DW_F16 : DW_BF16;
    return (dw__gemm_case){
        .call = {.dtype = type,
                 .output = s.output == DW_GEMM_OUTPUT_F32 ? DW_F32 : type,
                 .m = 2 * dw__gemm_tile_rows(&s) + EXTRA_ROWS,
                 .n = dw__gemm_tile_columns(&s) + EXTRA_COLUMNS,
                 .k = STEPS * dw__gemm_step((dw_scheme)s.scheme_a) - MISSING,
                 .alpha = 0.75f,
                 .activation = s.activation,
                 .quantized = scaled,
                 .quantized_d = s.output == DW_GEMM_OUTPUT_MXFP8,
                 .scheme_a = (dw_scheme)s.scheme_a,
                 .scheme_b = (dw_scheme)s.scheme_b},
        .bias = s.bias,
        .residual = s.residual,
        .turned = {s.turned_a, s.turned_b},
        .sm_count = CLUSTERS * dw__gemm_tiles[s.tile].ctas,
        .groups = 1,
    };
}

/* ---- GEMM by its definition -------------------------------------------------------------------- */

enum { REFERENCE_F16 = 1, REFERENCE_F32_OUTPUT = 2 };

static dw_status reference_points(const dw__kernel *kernel, int capability, uint64_t params,
                                  dw__entry_point points[DW__ENTRY_POINTS]) {
    (void)kernel;
    points[0].code = dw__gemm_reference_variant(capability, params & REFERENCE_F16,
                                                params & REFERENCE_F32_OUTPUT);
    return DW_OK;
}

static dw_status prepare_reference(const dw__kernel *kernel, const void *call,
                                   const dw__context *context, const dw__variant **variant) {
    const dw_gemm *c = call;
    return dw__variant_of(context, kernel,
                          (c->dtype == DW_F16 ? REFERENCE_F16 : 0u) |
                              (c->output == DW_F32 ? REFERENCE_F32_OUTPUT : 0u),
                          variant);
}

const dw__kernel dw__reference_gemm = {
    .name = "reference_gemm",
    .backend = "deepwell",
    .kind = DW__CALL_GEMM,
    .proof = DW__MEASURED_ON_HARDWARE,
    .source = "cuda/common/gemm_reference.cu",
    .prepare = prepare_reference,
    .enqueue = enqueue_reference,
    .entry_points = reference_points,
};

/* ---- the public calls ------------------------------------------------------------------------------ */

dw_status dw__gemm_choose(const void *call, int capability, const dw__kernel **kernel) {
    *kernel = dw__gemm_kernel_on(call, capability);
    if (capability == 90) return dw__sm90_check_types(call);
    if (dw__gpu_has_kernels(capability)) return dw__gemm_refuse_sm90(call);
    return dw__fail(DW_UNSUPPORTED,
                    "these kernels are for 9.0 (H100, H200), 10.0 and 10.3 (B200, B300) and 12.0 "
                    "(RTX 50, RTX PRO); use PyTorch's own GEMM on this GPU");
}

static const dw__gpu_family family = {
    .title = "GEMM",
    .kind = DW__CALL_GEMM,
    .own = {&dw__sm90_gemm, &dw__sm100_gemm, &dw__sm100_gemm_scaled, &dw__sm120_gemm,
            &dw__sm120_gemm_scaled},
    .choose = dw__gemm_choose,
    .describe = dw__gemm_describe,
    .workspace_query = "dw_gemm_workspace",
};

static dw_status make_job(const dw_gemm *given, bool launching, dw_gemm *call, dw__gpu_job *j) {
    DW_RETURN_IF_FAILED(dw__gemm_read(given, call));
    DW_RETURN_IF_FAILED(dw__gemm_check(call, launching));
    if (!call->workspace) call->workspace_bytes = 0;
    *j = (dw__gpu_job){.call = call,
                       .device = call->device,
                       .named = call->kernel,
                       .empty = dw__gemm_is_empty(call),
                       .workspace = call->workspace,
                       .workspace_bytes = call->workspace_bytes,
                       .reference = call->quantized || call->quantized_d || call->row_scale ||
                                            call->row_squares
                                        ? NULL
                                        : &dw__reference_gemm};
    return dw__job_find(&family, j);
}

dw_status dw_gemm_run(const dw_gemm *given) {
    dw_gemm call;
    dw__gpu_job j;
    DW_RETURN_IF_FAILED(make_job(given, true, &call, &j));
    return j.empty ? DW_OK : dw__job_run(&family, &j);
}

dw_status dw_gemm_supported(const dw_gemm *given) {
    dw_gemm call;
    dw__gpu_job j;
    DW_RETURN_IF_FAILED(make_job(given, false, &call, &j));
    return dw__job_would_run(&family, &j);
}

dw_status dw_gemm_workspace(const dw_gemm *given, size_t *bytes) {
    dw_gemm call;
    dw__gpu_job j;
    if (!bytes) return dw__fail(DW_INVALID_ARGUMENT, "GEMM: bytes is NULL");
    *bytes = 0;
    DW_RETURN_IF_FAILED(make_job(given, false, &call, &j));
    return dw__job_workspace(&family, &j, bytes);
}
