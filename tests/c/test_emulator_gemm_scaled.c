/* The block-scaled matrix products of sm_100 (cuda/sm100/gemm_scaled.cu) on the emulator, against sums in
 * double of what the operands stand for: their PTX as the compiler makes it, the checker on. */
#include "deepwell/hardware.h"
#include "deepwell/number.h"
#include "emulated_gemm_scaled.h"
#include "emulated_product.h"
#include "sm100/gemm_scaled_params.h"
#include "sm100/gemm_tiles.h"
#include <time.h>

typedef struct variant {
    int scheme, format_a, format_b, ctas, tile_n, stages, element, output, activation, bias,
        residual, schedule;
} variant;
#define ROW(...) {__VA_ARGS__},
static const variant variants[] = {EMULATED_GEMM_SCALED(ROW)};

typedef struct problem {
    variant v;
    int m, n, k, clusters; /* at most so many of the grid */
    float alpha;
    bool
        integers; /* small ones, and small scales: every sum is exact in F32, and so is D before its rounding */
    bool factors; /* alpha has two more on the device */
    uint64_t seed;
    const char *without; /* what is taken out, so that the kernel is wrong; NULL */
} problem;

static bool is_swiglu(const problem *p) { return p->v.activation == DW_GEMM_SWIGLU; }
static int ceil_divide(int a, int b) { return (a + b - 1) / b; }

/* ---- operands ------------------------------------------------------------------------------------ */

typedef struct operand {
    matrix codes;
    double *values; /* what they stand for: rows x k */
    size_t scale_bytes;
    void *scales;               /* on the device, as the tensor cores read them */
    int tiles_wide, tiles_high; /* of scales */
} operand;

/* Where D is F16, no sum exceeds its range. */
static uint8_t random_scale(const problem *p, uint64_t *state) {
    const uint64_t word = random_word(state);
    const bool half = p->v.element && !p->v.output;
    if (p->v.scheme != DW_GEMM_NVFP4)
        return (uint8_t)(p->integers ? 127 + word % 3 : 117 + word % (half ? 14 : 40));
    if (!p->integers) return (uint8_t)(word % (half ? 0x40 : 0x7F)); /* 0, 2^-9 to 448 */
    return (uint8_t)dw__encode_one(DW_FORMAT_UE4M3, (float)(word % 4), DW_OVERFLOW_SATURATE,
                                   DW_ROUND_NEAREST, 0);
}

/* `parts` matrices of `rows` rows, one below the other, each with scales of its own. */
static void make_operand(operand *o, dw_emulator *emulator, const problem *p, int rows, int parts,
                         matrix_type type, uint64_t *state) {
    const int block = DW_SCALED_BLOCK(p->v.scheme), wide = ceil_divide(p->k, block);
    const dw_format format = p->v.scheme == DW_GEMM_NVFP4 ? DW_FORMAT_UE4M3 : DW_FORMAT_E8M0;
    const size_t part_bytes = (size_t)dw_scales_swizzled_bytes(rows, wide);
    make_random(&o->codes, emulator, parts * rows, p->k, type, state, p->integers);
    if (type == MATRIX_E2M1 && p->k % 2) { /* the last byte's other half */
        for (int i = 0; i < parts * rows; i++) set(&o->codes, i, p->k, 0);
        copy_in(&o->codes, emulator);
    }
    o->tiles_wide = DW_SCALE_TILES_WIDE(wide);
    o->tiles_high = parts * DW_SCALE_TILES_HIGH(rows);
    o->scale_bytes = (size_t)parts * part_bytes;
    assert_int_equal(o->scale_bytes,
                     (size_t)o->tiles_wide * (size_t)o->tiles_high * DW_SCALE_TILE_BYTES);
    o->values = malloc((size_t)(parts * rows) * (size_t)p->k * sizeof *o->values + 1);
    uint8_t *scales = malloc((size_t)(parts * rows) * (size_t)wide + 1),
            *swizzled = malloc(o->scale_bytes + 1);
    assert_true(o->values && scales && swizzled);
    for (int i = 0; i < parts * rows * wide; i++) scales[i] = random_scale(p, state);
    for (int i = 0; i < parts * rows; i++)
        for (int k = 0; k < p->k; k++)
            o->values[(size_t)i * (size_t)p->k + (size_t)k] =
                (double)get(&o->codes, i, k) *
                (double)dw__decode_one(format, scales[i * wide + k / block]);
    for (int part = 0; part < parts; part++)
        assert_int_equal(dw_scales_swizzle(rows, wide, 1, scales + part * rows * wide,
                                           swizzled + (size_t)part * part_bytes),
                         DW_OK);
    if (o->scale_bytes) {
        assert_int_equal(dw_emulator_allocate(emulator, o->scale_bytes, &o->scales), DW_OK);
        assert_int_equal(dw_emulator_copy_in(emulator, o->scales, swizzled, o->scale_bytes), DW_OK);
    }
    free(scales);
    free(swizzled);
}

/* Tiles of 128 rows beside each other, as many as a step takes, in words of 64 bits. */
static void make_scale_map(const operand *o, int step_tiles, void *map) {
    enum { WORDS = DW_SCALE_TILE_BYTES / 8, U64 = 4 };
    dw_emulator_tensor_shape shape = {
        .size_of = sizeof shape,
        .element = U64,
        .rank = 2,
        .address = o->scales,
        .size = {(uint64_t)(WORDS * o->tiles_wide), (uint64_t)o->tiles_high},
        .stride = {(uint64_t)(DW_SCALE_TILE_BYTES * o->tiles_wide)},
        .box = {(uint32_t)(WORDS * step_tiles), 1},
        .step = {1, 1},
    };
    if (dw_emulator_tensor_map(&shape, map) != DW_OK) fail_msg("%s", dw_last_error());
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

static dw__jit_variant jit_of(const variant *v) {
    dw__jit_variant jit = {.source = "sm100/gemm_scaled.cu", .arch = "sm_100f"};
    dw__jit_add_define(&jit, "SCHEME", v->scheme);
    dw__jit_add_define(&jit, "FORMAT_A", v->format_a);
    dw__jit_add_define(&jit, "FORMAT_B", v->format_b);
    dw__jit_add_define(&jit, "CTAS", v->ctas);
    dw__jit_add_define(&jit, "TILE_N", v->tile_n);
    dw__jit_add_define(&jit, "STAGES", v->stages);
    dw__jit_add_define(&jit, "ELEMENT", v->element);
    dw__jit_add_define(&jit, "OUTPUT", v->output);
    dw__jit_add_define(&jit, "ACTIVATION", v->activation);
    dw__jit_add_define(&jit, "BIAS", v->bias);
    dw__jit_add_define(&jit, "RESIDUAL", v->residual);
    dw__jit_add_define(&jit, "SCHEDULE", v->schedule);
    return jit;
}

typedef struct run {
    dw_emulator *emulator;
    operand a, b;
    matrix bias, residual, d, factors;
    scales_of_d scales;
    uint64_t instructions;
} run;

static dw_status launch(const problem *p, run *r) {
    const variant *v = &p->v;
    const dw__jit_variant jit = jit_of(v);
    dw_emulator_module *module = load_variant(r->emulator, &jit, p->without);
    _Alignas(64) unsigned char maps[6][128]; /* A, B, their scales, D, the residual */
    const uint32_t box = 1024u / (uint32_t)bits_of(r->d.type),
                   step = (uint32_t)DW_SCALED_STEP(v->scheme);
    const uint32_t rows_b = (uint32_t)(v->ctas == 2 || is_swiglu(p) ? v->tile_n / 2 : v->tile_n);
    const int step_tiles = DW_SCALED_STEP_TILES(v->scheme);
    if (p->k) {
        make_map(&r->a.codes, step, DW_GEMM_ROWS, maps[0]);
        make_map(&r->b.codes, step, rows_b, maps[1]);
        make_scale_map(&r->a, step_tiles, maps[2]);
        make_scale_map(&r->b, step_tiles, maps[3]);
    } else { /* nothing is loaded, and there is no map of no columns */
        for (int i = 0; i < 4; i++) make_map(&r->d, box, 32, maps[i]);
    }
    make_map(&r->d, box, 32, maps[4]);
    make_map(v->residual ? &r->residual : &r->d, box, 32, maps[5]);
    dw_gemm_params params = {.m = p->m, .n = p->n, .k = p->k, .alpha = p->alpha};
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
    options.shared_bytes =
        (uint32_t)DW_SCALED_SHARED_BYTES(v->scheme, v->ctas, v->tile_n, v->stages);
    dw_status status = dw_emulator_launch(
        module, "sm100_gemm_scaled", &options,
        (void *[]){maps[0], maps[1], maps[2], maps[3], maps[4], maps[5], &params},
        &r->instructions);
    dw_emulator_unload(module);
    copy_out(&r->d, r->emulator);
    assert_int_equal(
        dw_emulator_copy_out(r->emulator, r->scales.host, r->scales.device, r->scales.bytes),
        DW_OK);
    return status;
}

/* ---- what it should be ---------------------------------------------------------------------------- */

/* Products of two elements and their scales have at most 12 bits and are exact in F32. Each of the k additions,
 * and those of alpha, its factors and the bias, errs by at most 2^-23 of the sum of magnitudes, were the sum
 * truncated. */
typedef struct summed {
    const problem *problem;
    const run *run;
} summed;
static expected sum_of(const void *context, int row, int column) {
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

static void check(const problem *p, const run *r) {
    char name[80];
    const summed context = {p, r};
    const expected_product product = {.m = p->m,
                                      .n = p->n,
                                      .activation = p->v.activation,
                                      .integers = p->integers,
                                      .bias = p->v.bias ? &r->bias : NULL,
                                      .residual = p->v.residual ? &r->residual : NULL,
                                      .sum = sum_of,
                                      .context = &context,
                                      .name = name};
    snprintf(name, sizeof name, "k %d, SCHEME %d, CTAS %d, TILE_N %d", p->k, p->v.scheme, p->v.ctas,
             p->v.tile_n);
    if (p->v.output == DW_GEMM_OUTPUT_MXFP8)
        check_quantized(&product, &r->d, &r->scales);
    else
        check_product(&product, &r->d);
}

static matrix_type element_of(const variant *v, int format) {
    return v->scheme != DW_GEMM_MXFP8 ? MATRIX_E2M1 : format ? MATRIX_E5M2 : MATRIX_E4M3;
}

static void open_run(const problem *p, run *r) {
    const variant *v = &p->v;
    uint64_t state = p->seed;
    const int parts = is_swiglu(p) ? 2 : 1;
    const matrix_type element = v->element ? MATRIX_F16 : MATRIX_BF16,
                      type_d = v->output == DW_GEMM_OUTPUT_MXFP8 ? MATRIX_E4M3
                               : v->output                       ? MATRIX_F32
                                                                 : element;
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    options.seed = p->seed;
    *r = (run){0};
    assert_int_equal(dw_emulator_create("sm_100a", &options, &r->emulator), DW_OK);
    make_operand(&r->a, r->emulator, p, p->m, 1, element_of(v, v->format_a), &state);
    make_operand(&r->b, r->emulator, p, p->n, parts, element_of(v, v->format_b), &state);
    make_random(&r->bias, r->emulator, 1, parts * p->n, element, &state, p->integers);
    make_random(&r->residual, r->emulator, p->m, p->n, type_d, &state, p->integers);
    make_random(&r->factors, r->emulator, 1, 2, MATRIX_F32, &state, false);
    make_matrix(&r->d, r->emulator, p->m, p->n, type_d);
    copy_in(&r->d, r->emulator);
    make_scales(&r->scales, r->emulator, p->m, p->n);
}
static void close_run(run *r) {
    dw_emulator_destroy(r->emulator);
    matrix *all[] = {&r->a.codes, &r->b.codes, &r->bias, &r->residual, &r->d, &r->factors};
    for (size_t i = 0; i < DW_COUNT(all); i++) free(all[i]->host);
    free(r->a.values);
    free(r->b.values);
    free(r->scales.host);
}

static void expect_right(const problem *p) {
    run r;
    open_run(p, &r);
    dw_status status = launch(p, &r);
    expect_no_finding(r.emulator);
    if (status != DW_OK) fail_msg("%s", dw_last_error());
    check(p, &r);
    close_run(&r);
}

/* ---- tests ---------------------------------------------------------------------------------------- */

static void need_kernels(void) {
    const dw__jit_variant jit = jit_of(&variants[0]);
    need_ptx(&jit);
}

/* One element, prime sizes, one past a tile, contractions of nothing, of no multiple of a block and of no
 * multiple of a step, rings that go round. */
static const struct {
    int m, n, k;
} shapes[] = {{1, 1, 1},  {128, 128, 256}, {129, 257, 65},
              {3, 70, 0}, {67, 131, 367},  {257, 193, 1021}};

static void each_variant_is_right(bool integers) {
    need_kernels();
    for (size_t i = 0; i < DW_COUNT(variants); i++) {
        if (integers && variants[i].activation != DW_GEMM_LINEAR) continue;
        for (size_t s = 0; s < DW_COUNT(shapes); s++) {
            problem p = {.v = variants[i],
                         .m = shapes[s].m,
                         .n = shapes[s].n,
                         .k = shapes[s].k,
                         .clusters = 148,
                         .alpha = integers ? 0.5f : 0.37f,
                         .integers = integers,
                         .factors = !integers && s % 2,
                         .seed = 1 + i + 100 * s};
            expect_right(&p);
        }
    }
}
static void random_numbers_are_right(void **state) {
    (void)state;
    each_variant_is_right(false);
}
static void integers_are_exact(void **state) {
    (void)state;
    each_variant_is_right(true);
}

/* Blocks that take several tiles each: both accumulators, what they share, and rings that go on from tile to tile. */
static void blocks_stay(void **state) {
    (void)state;
    need_kernels();
    for (size_t i = 0; i < DW_COUNT(variants); i++) {
        problem p = {.v = variants[i],
                     .m = 517,
                     .n = 651,
                     .k = 400,
                     .clusters = 2,
                     .alpha = 0.01f,
                     .seed = 7 + i};
        expect_right(&p);
    }
}

/* Without what it needs the kernel is wrong, and the checker says so; of one cluster always the same. */
static void expect_mistakes(const variant *v, const mistake *mistakes, size_t count) {
    need_kernels();
    for (size_t i = 0; i < count; i++) {
        problem p = {.v = *v,
                     .m = 300,
                     .n = 300,
                     .k = 600,
                     .clusters = 1,
                     .alpha = 1,
                     .seed = 5 + i,
                     .without = mistakes[i].opcode};
        run r;
        open_run(&p, &r);
        (void)launch(&p, &r);
        expect_found(r.emulator, &mistakes[i]);
        close_run(&r);
    }
}
static void mistakes_are_found(void **state) {
    static const mistake mistakes[] = {
        {"tcgen05.cp", "undefined", "scale factors"},
        {"tcgen05.wait::ld", "too early", "before the wait that makes its value valid"},
        {"tcgen05.commit", "deadlock", "1 of 1 arrivals to come"},
        {"tcgen05.mma", "undefined", "never written"},
        {"cp.async.bulk.tensor.2d.shared", "deadlock", "to come"},
        {"mbarrier.arrive.expect_tx", "deadlock", "1 of 1 arrivals to come"},
        {"fence.proxy.async", "missing fence", "no fence.proxy.async is between"},
        {"tcgen05.fence::after_thread_sync", "missing fence", "tcgen05.fence::after_thread_sync is"},
        {"tcgen05.fence::before_thread_sync", "missing fence",
         "tcgen05.fence::before_thread_sync came"},
        {"<tcgen05.cp", "race", "which a copy of warp 4"},
        {"<<tcgen05.cp", "race", "tensor memory of block"},
        {"<tcgen05.ld", "undefined", "never written"},
        {"<cp.async.bulk.tensor.2d.shared", "mbarrier", "which waits for 0 more in this phase"},
    };
    static const mistake of_a_pair[] = {
        {"tcgen05.cp", "undefined", "scale factors"},
        {"tcgen05.commit", "deadlock", "1 of 1 arrivals to come"},
        {"<tcgen05.cp", "race", "which a copy of warp 4"},
        {"<<tcgen05.cp", "race", "tensor memory of block"},
    };
    (void)state;
    assert_true(DW_SCALED_OVERLAP(variants[2].tile_n) && DW_SCALED_OVERLAP(variants[4].tile_n));
    assert_true(variants[2].ctas == 1 && variants[4].ctas == 2);
    expect_mistakes(&variants[2], mistakes, DW_COUNT(mistakes));
    expect_mistakes(&variants[4], of_a_pair, DW_COUNT(of_a_pair));
}

/* A product's D as MXFP8, its codes and scales as they are, is the A of another. */
static void quantized_output_is_the_next_input(void **state) {
    const problem first = {.v = {0, 0, 0, 1, 256, 3, 0, DW_GEMM_OUTPUT_MXFP8, 0, 0, 0, 0},
                           .m = 150,
                           .n = 300,
                           .k = 96,
                           .clusters = 148,
                           .alpha = 0.2f,
                           .seed = 3};
    const problem second = {.v = variants[0],
                            .m = first.m,
                            .n = 70,
                            .k = first.n,
                            .clusters = 148,
                            .alpha = 1,
                            .seed = 4};
    const int blocks = ceil_divide(first.n, BLOCK_OF_D);
    run one, two;
    (void)state;
    need_kernels();
    open_run(&first, &one);
    assert_int_equal(launch(&first, &one), DW_OK);
    expect_no_finding(one.emulator);
    open_run(&second, &two);
    operand *a = &two.a;
    assert_int_equal(a->codes.bytes, one.d.bytes);
    assert_int_equal(a->scale_bytes, one.scales.bytes);
    memcpy(a->codes.host, one.d.host, one.d.bytes);
    copy_in(&a->codes, two.emulator);
    assert_int_equal(dw_emulator_copy_in(two.emulator, a->scales, one.scales.host, a->scale_bytes),
                     DW_OK);
    uint8_t *scales = malloc((size_t)first.m * (size_t)blocks);
    assert_non_null(scales);
    assert_int_equal(dw_scales_unswizzle(first.m, blocks, 1, one.scales.host, scales), DW_OK);
    for (int i = 0; i < first.m; i++)
        for (int j = 0; j < first.n; j++)
            a->values[i * first.n + j] =
                (double)get(&a->codes, i, j) *
                (double)dw__decode_one(DW_FORMAT_E8M0, scales[i * blocks + j / BLOCK_OF_D]);
    assert_int_equal(launch(&second, &two), DW_OK);
    expect_no_finding(two.emulator);
    check(&second, &two);
    free(scales);
    close_run(&one);
    close_run(&two);
}

/* ---- accounting ----------------------------------------------------------------------------------- */

typedef struct account {
    int scheme, ctas, tile_n, stages;
} account;
#define ACCOUNT(...) {__VA_ARGS__},
static const account accounts[] = {DW_SM100_SCALED_TILES(ACCOUNT)};

/* What a tile takes of a multiprocessor, and how long a product must take on a B200 at least: of all processors'
 * rounds the tensor cores' time, or that of reading A, B and scales from shared memory (128 bytes a clock, as on
 * Hopper), or the time to move A, B, their scales and D, of BF16, once. */
static void tiles_fit(void **state) {
    (void)state;
    enum { SIZE = 8192 };
    static const char *const names[] = {"MXFP8", "NVFP4", "MXFP4"};
    dw_hardware *b200;
    assert_int_equal(dw_hardware_named("b200", &b200), DW_OK);
    double sms = b200->sm_count.value, clock = b200->clock.value;
    print_message("scheme CTAS TILE_N STAGES  columns (shared, scales)  shared bytes  bytes/step  "
                  "MFLOP/step  shared/tensor time  8192^3 on B200\n");
    for (size_t i = 0; i < DW_COUNT(accounts); i++) {
        const account *t = &accounts[i];
        const int overlap = DW_SCALED_OVERLAP(t->tile_n),
                  scales = DW_SCALED_SCALE_COLUMNS_USED(t->scheme, t->tile_n),
                  shared = DW_SCALED_SHARED_BYTES(t->scheme, t->ctas, t->tile_n, t->stages),
                  stage = DW_SCALED_STAGE_BYTES(t->scheme, t->ctas, t->tile_n),
                  step = DW_SCALED_STEP(t->scheme);
        assert_true(2 * t->tile_n - overlap + scales <= DW_SCALED_COLUMNS);
        assert_true(scales <= DW_SCALED_SCALE_COLUMNS && overlap <= t->tile_n / 4);
        assert_true(shared <= DW_GEMM_MOST_SHARED && DW_GEMM_MOST_SHARED < shared + stage);
        assert_int_equal(DW_GEMM_B_BYTES(t->ctas, t->tile_n) % 1024, 0); /* the swizzle's pattern */
        const double rate =
            b200->rate[t->scheme == DW_GEMM_MXFP8 ? DW_RATE_MXFP8 : DW_RATE_FP4].value;
        double flops = 2.0 * DW_GEMM_ROWS * t->tile_n * step; /* of a block, a step */
        double tensor = flops / (rate / sms), shared_time = stage / (128 * clock);
        double step_time = tensor > shared_time ? tensor : shared_time;
        double tiles =
            ceil((double)SIZE / (t->ctas * DW_GEMM_ROWS)) * ceil((double)SIZE / t->tile_n);
        double rounds = ceil(tiles / floor(sms / t->ctas));
        double compute = rounds * ((double)SIZE / step) * step_time;
        double element = DW_GEMM_ROW_BYTES / (double)step + 1.0 / DW_SCALED_BLOCK(t->scheme);
        double memory = (2 * element + 2) * SIZE * SIZE / b200->memory_bandwidth.value;
        double bound = compute > memory ? compute : memory;
        print_message(
            "%s %5d %6d %6d  %7d (%6d, %6d)  %12d  %10d  %10.2f  %18.2f  %.0f us, %.0f TFLOP/s\n",
            names[t->scheme], t->ctas, t->tile_n, t->stages, 2 * t->tile_n - overlap + scales,
            overlap, scales, shared, stage, flops / 1e6, shared_time / tensor, bound * 1e6,
            2.0 * SIZE * SIZE * SIZE / bound / 1e12);
    }
    dw_hardware_destroy(b200);
    for (size_t i = 0; i < DW_COUNT(variants); i++) { /* what is tested is what is listed */
        bool listed = false;
        for (size_t j = 0; j < DW_COUNT(accounts); j++)
            listed |= accounts[j].scheme == variants[i].scheme &&
                      accounts[j].ctas == variants[i].ctas &&
                      accounts[j].tile_n == variants[i].tile_n &&
                      accounts[j].stages == variants[i].stages;
        assert_true(listed);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_fit),          cmocka_unit_test(random_numbers_are_right),
        cmocka_unit_test(integers_are_exact), cmocka_unit_test(blocks_stay),
        cmocka_unit_test(mistakes_are_found), cmocka_unit_test(quantized_output_is_the_next_input),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
