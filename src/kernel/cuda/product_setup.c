/* From a checked call to the kernel that is to compute it. */
#include "kernel/cuda/product.h"
#include "sm100/gemm_tiles.h"

static const char family[] = "sm_100f";

const dw__product_tile dw__product_tiles[] = {
#define DENSE(blocks, columns, depth)                                                              \
    {.ctas = blocks,                                                                               \
     .n = columns,                                                                                 \
     .stages = depth,                                                                              \
     .shared_bytes = DW_GEMM_SHARED_BYTES(blocks, columns, depth)},
#define SCALED(scheme, blocks, columns, depth)                                                     \
    {.kind = (dw__product_kind)((scheme) + 1),                                                     \
     .ctas = blocks,                                                                               \
     .n = columns,                                                                                 \
     .stages = depth,                                                                              \
     .shared_bytes = DW_SCALED_SHARED_BYTES(scheme, blocks, columns, depth)},
    DW_SM100_GEMM_TILES(DENSE) DW_SM100_SCALED_TILES(SCALED)
#undef DENSE
#undef SCALED
};
_Static_assert(DW__PRODUCT_MXFP8 == DW_GEMM_MXFP8 + 1 && DW__PRODUCT_NVFP4 == DW_GEMM_NVFP4 + 1 &&
                   DW__PRODUCT_MXFP4 == DW_GEMM_MXFP4 + 1,
               "dw__product_scheme");
_Static_assert(DW_COUNT(dw__product_tiles) == DW__PRODUCT_TILES, "the table of loaded kernels");

int dw__product_index(const dw__product_shape *s) {
    int index =
        (s->tile * DW_ACTIVATION_COUNT + (int)s->activation) * DW__PRODUCT_OUTPUTS + s->output;
    const bool flags[] = {s->f16, s->bias, s->residual, s->e5m2_a, s->e5m2_b};
    for (size_t i = 0; i < DW_COUNT(flags); i++) index = index << 1 | flags[i];
    return index;
}

/* ---- tiles ----------------------------------------------------------------------------------------- */

int dw__product_tile_rows(const dw__product_shape *s) {
    return dw__product_tiles[s->tile].ctas * DW_GEMM_ROWS;
}
int dw__product_tile_columns(const dw__product_shape *s) {
    int n = dw__product_tiles[s->tile].n;
    return s->activation == DW_ACTIVATION_SWIGLU ? n / 2 : n;
}

bool dw__product_exists(const dw__product_shape *s) {
    static const int box_columns[] = {64, 32, 128}; /* 128 bytes of D */
    const dw__product_tile *t = &dw__product_tiles[s->tile];
    if (t->kind != s->kind) return false;
    /* Each half has whole tiles of scales. */
    if (t->kind && s->activation == DW_ACTIVATION_SWIGLU && t->n != 256) return false;
    return dw__product_tile_columns(s) % box_columns[s->output] == 0;
}

int dw__product_step(dw__product_kind kind) {
    return kind ? DW_SCALED_STEP(dw__product_scheme(kind)) : DW_GEMM_STEP;
}

/* Per processor and clock: what the data sheet's 2250 TFLOP/s (twice that of MXFP8, four times of FP4) are of 148
 * processors at 1.85 GHz, and what shared memory gives on Hopper, assumed to be so here. */
enum { FLOPS_PER_CLOCK = 8192, SHARED_BYTES_PER_CLOCK = 128 };

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

dw__product_account dw__product_account_of(const dw_product *call, const dw__product_shape *shape,
                                           int sm_count) {
    const dw__product_tile *t = &dw__product_tiles[shape->tile];
    int clusters = sm_count / t->ctas > 0 ? sm_count / t->ctas : 1;
    const int scheme = dw__product_scheme(t->kind), step = dw__product_step(t->kind);
    int stage =
        t->kind ? DW_SCALED_STAGE_BYTES(scheme, t->ctas, t->n) : DW_GEMM_STAGE_BYTES(t->ctas, t->n);
    int tensor =
            2 * DW_GEMM_ROWS * t->n * DW_GEMM_STEP / FLOPS_PER_CLOCK, /* the same of 128 bytes */
        shared = stage / SHARED_BYTES_PER_CLOCK;
    dw__product_account made = {
        .tiles = ceil_divide(call->m, dw__product_tile_rows(shape)) *
                 ceil_divide(call->n, dw__product_tile_columns(shape)),
        .steps = ceil_divide(call->k, step),
        .step_clocks = tensor > shared ? tensor : shared,
    };
    made.rounds = ceil_divide(made.tiles, clusters);
    made.clocks = (double)made.rounds * (double)made.steps * made.step_clocks;
    made.bytes = (double)made.tiles * (double)made.steps * stage * t->ctas;
    return made;
}

dw__product_shape dw__product_shape_of(const dw_product *call, int sm_count) {
    dw__product_shape shape = {
        .kind = dw__product_kind_of(call),
        .output = call->quantized_d        ? DW_GEMM_OUTPUT_MXFP8
                  : call->output == DW_F32 ? DW_GEMM_OUTPUT_F32
                                           : DW_GEMM_OUTPUT_ELEMENT,
        .f16 = call->dtype == DW_F16,
        .e5m2_a = call->quantized && call->scheme_a == DW_SCHEME_MXFP8_E5M2,
        .e5m2_b = call->quantized && call->scheme_b == DW_SCHEME_MXFP8_E5M2,
        .bias = call->bias != NULL,
        .residual = call->residual.data != NULL,
        .activation = call->activation,
    };
    dw__product_account least = {.clocks = -1};
    int best = 0;
    for (shape.tile = 0; shape.tile < DW__PRODUCT_TILES; shape.tile++) {
        if (!dw__product_exists(&shape)) continue;
        dw__product_account account = dw__product_account_of(call, &shape, sm_count);
        if (least.clocks >= 0 && (account.clocks > least.clocks ||
                                  (account.clocks == least.clocks && account.bytes >= least.bytes)))
            continue;
        least = account;
        best = shape.tile;
    }
    shape.tile = best;
    return shape;
}

_Static_assert((int)DW_ACTIVATION_NONE == DW_GEMM_LINEAR &&
                   (int)DW_ACTIVATION_GELU == DW_GEMM_GELU &&
                   (int)DW_ACTIVATION_GELU_TANH == DW_GEMM_GELU_TANH &&
                   (int)DW_ACTIVATION_SWIGLU == DW_GEMM_SWIGLU,
               "passed on as they are");

/* ---- variants ---------------------------------------------------------------------------------------- */

dw__jit_variant dw__product_variant(const dw__product_shape *s) {
    const dw__product_tile *t = &dw__product_tiles[s->tile];
    dw__jit_variant v = {.source = s->kind ? "sm100/gemm_scaled.cu" : "sm100/gemm.cu",
                         .entry = s->kind ? "sm100_gemm_scaled" : "sm100_gemm",
                         .arch = family};
    if (s->kind) {
        dw__jit_add_define(&v, "SCHEME", dw__product_scheme(s->kind));
        dw__jit_add_define(&v, "FORMAT_A", s->e5m2_a);
        dw__jit_add_define(&v, "FORMAT_B", s->e5m2_b);
        dw__jit_add_define(&v, "SCHEDULE", DW_GEMM_STATIC);
    }
    dw__jit_add_define(&v, "CTAS", t->ctas);
    dw__jit_add_define(&v, "TILE_N", t->n);
    dw__jit_add_define(&v, "STAGES", t->stages);
    dw__jit_add_define(&v, "ELEMENT", s->f16);
    dw__jit_add_define(&v, "OUTPUT", s->output);
    dw__jit_add_define(&v, "ACTIVATION", (int)s->activation);
    dw__jit_add_define(&v, "BIAS", s->bias);
    dw__jit_add_define(&v, "RESIDUAL", s->residual);
    return v;
}

dw__jit_variant dw__product_reference_variant(int capability, bool f16, bool f32_output) {
    dw__jit_variant v = {.source = "common/product_reference.cu",
                         .entry = "reference_product",
                         .arch = capability == 90 ? "sm_90a" : family};
    dw__jit_add_define(&v, "ELEMENT", f16);
    dw__jit_add_define(&v, "OUTPUT", f32_output);
    return v;
}
