/* Runs a GEMM kernel on the emulator for any kind of operands: problems, a run of one problem, and the tests that every
 * GEMM kernel must pass. A gemm_kernel, the initial state of these tests, describes the properties in which kernels
 * differ. */
#ifndef DW_EMULATED_GEMM_RUN_H
#define DW_EMULATED_GEMM_RUN_H

#include "common/scheme_params.h"
#include "deepwell/hardware.h"
#include "emulated_gemm_call.h"

/* Compile-time parameters; only block-scaled kernels have the first three. */
typedef struct variant {
    int scheme_a, scheme_b, ctas, tile_n, stages, element, output, activation, bias, residual,
        schedule;
} variant;

typedef struct problem {
    variant v;
    int m, n, k, clusters; /* largest number of clusters in the grid */
    float alpha;
    bool integers; /* small integers: every sum is exact in F32, and so is D before it is rounded */
    bool factors;  /* alpha has two further factors in device memory */
    uint64_t seed;
    const char *without; /* instruction that is removed, which makes the kernel wrong; or NULL */
} problem;

typedef struct operand {
    matrix codes;
    double *values; /* values of the codes with their scales: rows x k */
    /* Block-scaled operands on the device, in the tensor cores' tile order. */
    size_t scale_bytes;
    void *scales;
    int tiles_wide, tiles_high;
} operand;

typedef struct run {
    dw_emulator *emulator;
    operand a, b;
    matrix bias, residual, d, factors;
    scales_of_d scales;
    uint64_t instructions;
} run;

enum { MAP_BYTES = 128, MOST_OPERAND_MAPS = 4 };

typedef struct sizes {
    int m, n, k;
} sizes;

typedef struct gemm_kernel {
    const char *source, *entry;
    const variant *variants;
    size_t variant_count;
    /* In addition to those of all kernels. */
    void (*add_defines)(dw__jit_variant *jit, const variant *v);
    void (*make_operands)(run *r, const problem *p, uint64_t *state);
    int operand_maps; /* number of tensor maps in front of D's */
    void (*make_operand_maps)(const run *r, const problem *p, unsigned char (*maps)[MAP_BYTES]);
    uint32_t (*shared_bytes)(const variant *v);
    const sizes *shapes;
    size_t shape_count;
    /* Each block processes several tiles; the contraction is longer than the ring. */
    sizes persistent, mistaken;
    float persistent_alpha;
} gemm_kernel;

/* ---- a run ----------------------------------------------------------------------------------------- */

static inline bool is_swiglu(const problem *p) { return p->v.activation == DW_GEMM_SWIGLU; }
static inline int ceil_divide(int a, int b) { return (a + b - 1) / b; }
/* Rows of B that a block loads in one step. */
static inline uint32_t rows_of_b(const problem *p) {
    return (uint32_t)(p->v.ctas == 2 || is_swiglu(p) ? p->v.tile_n / 2 : p->v.tile_n);
}

static inline dw__jit_variant jit_of(const gemm_kernel *kernel, const variant *v) {
    dw__jit_variant jit = {.source = kernel->source, .arch = "sm_100f"};
    dw__jit_add_define(&jit, "CTAS", v->ctas);
    dw__jit_add_define(&jit, "TILE_N", v->tile_n);
    dw__jit_add_define(&jit, "STAGES", v->stages);
    dw__jit_add_define(&jit, "ELEMENT", v->element);
    dw__jit_add_define(&jit, "OUTPUT", v->output);
    dw__jit_add_define(&jit, "ACTIVATION", v->activation);
    dw__jit_add_define(&jit, "BIAS", v->bias);
    dw__jit_add_define(&jit, "RESIDUAL", v->residual);
    kernel->add_defines(&jit, v);
    return jit;
}

static inline void need_kernels(const gemm_kernel *kernel) {
    const dw__jit_variant jit = jit_of(kernel, &kernel->variants[0]);
    need_ptx(&jit);
}

static inline void open_run(const gemm_kernel *kernel, const problem *p, run *r) {
    const variant *v = &p->v;
    uint64_t state = p->seed;
    const matrix_type element = v->element ? MATRIX_F16 : MATRIX_BF16,
                      type_d = v->output == DW_GEMM_OUTPUT_MXFP8 ? MATRIX_E4M3
                               : v->output                       ? MATRIX_F32
                                                                 : element;
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    options.seed = p->seed;
    *r = (run){0};
    assert_int_equal(dw_emulator_create("sm_100a", &options, &r->emulator), DW_OK);
    kernel->make_operands(r, p, &state);
    make_random(&r->bias, r->emulator, 1, is_swiglu(p) ? 2 * p->n : p->n, element, &state,
                p->integers);
    make_random(&r->residual, r->emulator, p->m, p->n, type_d, &state, p->integers);
    make_random(&r->factors, r->emulator, 1, 2, MATRIX_F32, &state, false);
    make_matrix(&r->d, r->emulator, p->m, p->n, type_d);
    copy_in(&r->d, r->emulator);
    make_scales(&r->scales, r->emulator, p->m, p->n);
}
static inline void close_run(run *r) {
    dw_emulator_destroy(r->emulator);
    matrix *all[] = {&r->a.codes, &r->b.codes, &r->bias, &r->residual, &r->d, &r->factors};
    for (size_t i = 0; i < DW_COUNT(all); i++) free(all[i]->host);
    free(r->a.values);
    free(r->b.values);
    free(r->scales.host);
}

static inline dw_status launch(const gemm_kernel *kernel, const problem *p, run *r) {
    const variant *v = &p->v;
    const dw__jit_variant jit = jit_of(kernel, v);
    dw_emulator_module *module = load_variant(r->emulator, &jit, p->without);
    /* Followed by D's and the residual's. */
    _Alignas(64) unsigned char maps[MOST_OPERAND_MAPS + 2][MAP_BYTES];
    const uint32_t box = 1024u / (uint32_t)bits_of(r->d.type);
    const int count = kernel->operand_maps;
    if (p->k) {
        kernel->make_operand_maps(r, p, maps);
    } else { /* nothing is loaded, and a matrix without columns has no map */
        for (int i = 0; i < count; i++) make_map(&r->d, box, 32, maps[i]);
    }
    make_map(&r->d, box, 32, maps[count]);
    make_map(v->residual ? &r->residual : &r->d, box, 32, maps[count + 1]);
    dw_gemm_params params = {.m = p->m, .n = p->n, .k = p->k, .groups = 1, .alpha = p->alpha};
    params.tiles_m = ceil_divide(p->m, v->ctas * DW_GEMM_ROWS);
    params.tiles_n = ceil_divide(p->n, is_swiglu(p) ? v->tile_n / 2 : v->tile_n);
    params.bias = v->bias ? r->bias.device : NULL;
    params.scales_d = r->scales.device;
    if (p->factors) {
        params.factor_a = r->factors.device;
        params.factor_b = (const float *)r->factors.device + 1;
    }
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    int clusters = params.tiles_m * params.tiles_n;
    if (!v->schedule && clusters > p->clusters) clusters = p->clusters;
    options.grid[0] = (uint32_t)(clusters * v->ctas);
    options.block[0] = (uint32_t)DW_GEMM_THREADS_OF(v->schedule);
    options.shared_bytes = kernel->shared_bytes(v);
    void *arguments[MOST_OPERAND_MAPS + 3];
    for (int i = 0; i < count + 2; i++) arguments[i] = maps[i];
    arguments[count + 2] = &params;
    dw_status status =
        dw_emulator_launch(module, kernel->entry, &options, arguments, &r->instructions);
    dw_emulator_unload(module);
    copy_out(&r->d, r->emulator);
    assert_int_equal(
        dw_emulator_copy_out(r->emulator, r->scales.host, r->scales.device, r->scales.bytes),
        DW_OK);
    return status;
}

/* ---- expected results ----------------------------------------------------------------------------- */

/* A product of two elements and their scales has at most 24 bits and is exact in F32. Each of the k additions, and
 * those of alpha, its factors and the bias, has an error of at most 2^-23 of the sum of magnitudes, even if the
 * accumulator is truncated. */
typedef struct summed {
    const problem *problem;
    const run *run;
} summed;
static inline expected sum_of(const void *context, int row, int column) {
    const problem *p = ((const summed *)context)->problem;
    const run *r = ((const summed *)context)->run;
    const double *a = r->a.values + (size_t)row * (size_t)p->k,
                 *b = r->b.values + (size_t)column * (size_t)p->k;
    double sum = 0, magnitude = 0, alpha = p->alpha;
    for (int k = 0; k < p->k; k++) {
        sum += a[k] * b[k];
        magnitude += fabs(a[k] * b[k]);
    }
    if (p->factors) alpha *= (double)get(&r->factors, 0, 0) * get(&r->factors, 0, 1);
    return (expected){alpha * sum, (p->k + 4) * 0x1p-23 * fabs(alpha) * magnitude};
}

static inline void check(const problem *p, const run *r) {
    char name[80];
    const summed context = {p, r};
    const expected_gemm product = {.m = p->m,
                                   .n = p->n,
                                   .activation = p->v.activation,
                                   .integers = p->integers,
                                   .bias = p->v.bias ? &r->bias : NULL,
                                   .residual = p->v.residual ? &r->residual : NULL,
                                   .sum = sum_of,
                                   .context = &context,
                                   .name = name};
    snprintf(name, sizeof name, "k %d, SCHEME_A %d, CTAS %d, TILE_N %d", p->k, p->v.scheme_a,
             p->v.ctas, p->v.tile_n);
    if (p->v.output == DW_GEMM_OUTPUT_MXFP8)
        check_quantized(&product, &r->d, &r->scales);
    else
        check_gemm(&product, &r->d);
}

static inline void expect_right(const gemm_kernel *kernel, const problem *p) {
    run r;
    open_run(kernel, p, &r);
    dw_status status = launch(kernel, p, &r);
    expect_no_finding(r.emulator);
    if (status != DW_OK) fail_msg("%s", dw_last_error());
    check(p, &r);
    close_run(&r);
}

/* ---- tests of every kernel ------------------------------------------------------------------------- */

static inline void each_variant_is_right(const gemm_kernel *kernel, bool integers) {
    need_kernels(kernel);
    for (size_t i = 0; i < kernel->variant_count; i++) {
        if (integers && kernel->variants[i].activation != DW_GEMM_LINEAR) continue;
        for (size_t s = 0; s < kernel->shape_count; s++) {
            problem p = {.v = kernel->variants[i],
                         .m = kernel->shapes[s].m,
                         .n = kernel->shapes[s].n,
                         .k = kernel->shapes[s].k,
                         .clusters = 148,
                         .alpha = integers ? 0.5f : 0.37f,
                         .integers = integers,
                         .factors = !integers && s % 2,
                         .seed = 1 + i + 100 * s};
            expect_right(kernel, &p);
        }
    }
}
static inline void random_numbers_are_right(void **state) { each_variant_is_right(*state, false); }
static inline void integers_are_exact(void **state) { each_variant_is_right(*state, true); }

/* Each block computes several tiles: this tests both accumulators, the columns that they share, and rings that continue
 * across tiles. */
static inline void persistent_blocks_process_several_tiles(void **state) {
    const gemm_kernel *kernel = *state;
    need_kernels(kernel);
    for (size_t i = 0; i < kernel->variant_count; i++) {
        problem p = {.v = kernel->variants[i],
                     .m = kernel->persistent.m,
                     .n = kernel->persistent.n,
                     .k = kernel->persistent.k,
                     .clusters = 2,
                     .alpha = kernel->persistent_alpha,
                     .seed = 7 + i};
        expect_right(kernel, &p);
    }
}

/* Removing a required instruction makes the kernel wrong, and the checker reports it. With a single cluster the finding
 * is always the same. */
static inline void expect_mistakes(const gemm_kernel *kernel, const variant *v,
                                   const mistake *mistakes, size_t count) {
    need_kernels(kernel);
    for (size_t i = 0; i < count; i++) {
        problem p = {.v = *v,
                     .m = kernel->mistaken.m,
                     .n = kernel->mistaken.n,
                     .k = kernel->mistaken.k,
                     .clusters = 1,
                     .alpha = 1,
                     .seed = 5 + i,
                     .without = mistakes[i].opcode};
        run r;
        open_run(kernel, &p, &r);
        (void)launch(kernel, &p, &r);
        expect_found(r.emulator, &mistakes[i]);
        close_run(&r);
    }
}

/* ---- cost model ------------------------------------------------------------------------------------ */

enum { GEMM_SIZE = 8192 }; /* m, n and k of the GEMM that is modelled */

typedef struct tile_cost {
    int scheme, ctas, tile_n, stages;
} tile_cost;

/* Returns a lower bound in seconds for the GEMM on a GPU where a block's step of `step` columns of A and B takes
 * `step_seconds`: the larger of all rounds over the SMs and the time to move `bytes` once. */
static inline double least_seconds(const dw_hardware *gpu, const tile_cost *t, int step,
                                   double step_seconds, double bytes) {
    const double size = GEMM_SIZE;
    double tiles = ceil(size / (t->ctas * DW_GEMM_ROWS)) * ceil(size / t->tile_n),
           rounds = ceil(tiles / floor(gpu->sm_count.value / t->ctas)),
           compute = rounds * (size / step) * step_seconds;
    return fmax(compute, bytes / gpu->memory_bandwidth.value);
}

/* Checks that `costs` lists every tested variant. */
static inline void expect_listed(const gemm_kernel *kernel, const tile_cost *costs, size_t count) {
    for (size_t i = 0; i < kernel->variant_count; i++) {
        const variant *v = &kernel->variants[i];
        bool listed = false;
        for (size_t j = 0; j < count; j++) /* MXFP8 tiles serve both element types. */
            listed |= costs[j].scheme ==
                          (DW_CODES_ARE_MXFP8(v->scheme_a) ? DW_CODES_MXFP8 : v->scheme_a) &&
                      costs[j].ctas == v->ctas && costs[j].tile_n == v->tile_n &&
                      costs[j].stages == v->stages;
        assert_true(listed);
    }
}

#endif
