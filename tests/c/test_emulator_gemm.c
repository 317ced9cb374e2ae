/* The matrix product of sm_100 (cuda/sm100/gemm.cu) on the emulator, against sums in double: its PTX as the compiler
 * makes it, the checker on. */
#include "deepwell/hardware.h"
#include "emulated_gemm.h"
#include "emulated_product.h"
#include "sm100/gemm_tiles.h"
#include <time.h>

typedef struct variant {
    int ctas, tile_n, stages, element, output, activation, bias, residual, schedule;
} variant;
#define ROW(...) {__VA_ARGS__},
static const variant variants[] = {EMULATED_GEMM(ROW)};

typedef struct problem {
    variant v;
    int m, n, k, clusters; /* at most so many of the grid */
    float alpha;
    bool integers; /* small ones: every sum is exact in F32, and so is D before its rounding */
    bool factors;  /* alpha has two more on the device */
    uint64_t seed;
    const char *without; /* what is taken out, so that the kernel is wrong; NULL */
} problem;

/* ---- the kernel ---------------------------------------------------------------------------------- */

static dw__jit_variant jit_of(const variant *v) {
    dw__jit_variant jit = {.source = "sm100/gemm.cu", .arch = "sm_100f"};
    dw__jit_add_define(&jit, "CTAS", v->ctas);
    dw__jit_add_define(&jit, "TILE_N", v->tile_n);
    dw__jit_add_define(&jit, "STAGES", v->stages);
    dw__jit_add_define(&jit, "ELEMENT", v->element);
    dw__jit_add_define(&jit, "OUTPUT", v->output);
    dw__jit_add_define(&jit, "ACTIVATION", v->activation);
    dw__jit_add_define(&jit, "BIAS", v->bias);
    dw__jit_add_define(&jit, "RESIDUAL", v->residual);
    if (v->schedule) dw__jit_add_define(&jit, "SCHEDULE", v->schedule);
    return jit;
}

static int ceil_divide(int a, int b) { return (a + b - 1) / b; }

typedef struct run {
    dw_emulator *emulator;
    matrix a, b, bias, residual, d, factors;
    scales_of_d scales;
    uint64_t instructions;
} run;

static dw_status launch(const problem *p, run *r) {
    const variant *v = &p->v;
    const dw__jit_variant jit = jit_of(v);
    dw_emulator_module *module = load_variant(r->emulator, &jit, p->without);
    _Alignas(64) unsigned char map_a[128], map_b[128], map_d[128], map_r[128];
    const bool swiglu = v->activation == DW_GEMM_SWIGLU;
    const int box = 1024 / bits_of(r->d.type), tile_columns = swiglu ? v->tile_n / 2 : v->tile_n;
    if (p->k) {
        make_map(&r->a, DW_GEMM_STEP, DW_GEMM_ROWS, map_a);
        make_map(&r->b, DW_GEMM_STEP,
                 (uint32_t)(v->ctas == 2 || swiglu ? v->tile_n / 2 : v->tile_n), map_b);
    } else { /* nothing is loaded, and there is no map of no columns */
        make_map(&r->d, (uint32_t)box, 32, map_a);
        make_map(&r->d, (uint32_t)box, 32, map_b);
    }
    make_map(&r->d, (uint32_t)box, 32, map_d);
    make_map(v->residual ? &r->residual : &r->d, (uint32_t)box, 32, map_r);
    dw_gemm_params params = {.m = p->m, .n = p->n, .k = p->k, .alpha = p->alpha};
    params.tiles_m = ceil_divide(p->m, v->ctas * DW_GEMM_ROWS);
    params.tiles_n = ceil_divide(p->n, tile_columns);
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
    options.shared_bytes = DW_GEMM_SHARED_BYTES(v->ctas, v->tile_n, v->stages);
    dw_status status =
        dw_emulator_launch(module, "sm100_gemm", &options,
                           (void *[]){map_a, map_b, map_d, map_r, &params}, &r->instructions);
    dw_emulator_unload(module);
    copy_out(&r->d, r->emulator);
    assert_int_equal(
        dw_emulator_copy_out(r->emulator, r->scales.host, r->scales.device, r->scales.bytes),
        DW_OK);
    return status;
}

/* ---- what it should be ---------------------------------------------------------------------------- */

/* Products of two elements are exact in F32. Each of the k additions, and those of alpha, its factors and the
 * bias, errs by at most 2^-23 of the sum of magnitudes, were the sum truncated. */
typedef struct summed {
    const problem *problem;
    const run *run;
} summed;
static expected sum_of(const void *context, int row, int column) {
    const problem *p = ((const summed *)context)->problem;
    const run *r = ((const summed *)context)->run;
    double sum = 0, magnitude = 0, alpha = p->alpha;
    for (int k = 0; k < p->k; k++) {
        double product = (double)get(&r->a, row, k) * get(&r->b, column, k);
        sum += product;
        magnitude += fabs(product);
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
    snprintf(name, sizeof name, "k %d, CTAS %d, TILE_N %d", p->k, p->v.ctas, p->v.tile_n);
    if (p->v.output == DW_GEMM_OUTPUT_MXFP8)
        check_quantized(&product, &r->d, &r->scales);
    else
        check_product(&product, &r->d);
}

static void open_run(const problem *p, run *r) {
    const variant *v = &p->v;
    uint64_t state = p->seed;
    const int n_b = v->activation == DW_GEMM_SWIGLU ? 2 * p->n : p->n;
    const matrix_type element = v->element ? MATRIX_F16 : MATRIX_BF16,
                      type_d = v->output == DW_GEMM_OUTPUT_MXFP8 ? MATRIX_E4M3
                               : v->output                       ? MATRIX_F32
                                                                 : element;
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    options.seed = p->seed;
    *r = (run){0};
    assert_int_equal(dw_emulator_create("sm_100a", &options, &r->emulator), DW_OK);
    make_random(&r->a, r->emulator, p->m, p->k, element, &state, p->integers);
    make_random(&r->b, r->emulator, n_b, p->k, element, &state, p->integers);
    make_random(&r->bias, r->emulator, 1, n_b, element, &state, p->integers);
    make_random(&r->residual, r->emulator, p->m, p->n, type_d, &state, p->integers);
    make_random(&r->factors, r->emulator, 1, 2, MATRIX_F32, &state, false);
    make_matrix(&r->d, r->emulator, p->m, p->n, type_d);
    copy_in(&r->d, r->emulator);
    make_scales(&r->scales, r->emulator, p->m, p->n);
}
static void close_run(run *r) {
    dw_emulator_destroy(r->emulator);
    matrix *all[] = {&r->a, &r->b, &r->bias, &r->residual, &r->d, &r->factors};
    for (size_t i = 0; i < DW_COUNT(all); i++) free(all[i]->host);
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

/* One element, prime sizes, one past a tile, contractions of nothing and of no multiple of a step, rings that go
 * round. */
static const struct {
    int m, n, k;
} shapes[] = {{1, 1, 1}, {128, 64, 64}, {129, 129, 65}, {3, 70, 0}, {67, 257, 131}, {257, 61, 709}};

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

/* Blocks that take several tiles each: both accumulators, and rings that go on from tile to tile. */
static void blocks_stay(void **state) {
    (void)state;
    need_kernels();
    for (size_t i = 0; i < DW_COUNT(variants); i++) {
        problem p = {.v = variants[i],
                     .m = 517,
                     .n = 331,
                     .k = 200,
                     .clusters = 2,
                     .alpha = 1,
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
                     .k = 300,
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
        {"tcgen05.wait::ld", "too early", "before the wait that makes its value valid"},
        {"tcgen05.dealloc", "tensor memory", "were not freed"},
        {"tcgen05.alloc", "undefined", "never written"},
        {"tcgen05.mma", "undefined", "never written"},
        {"tcgen05.commit", "deadlock", "1 of 1 arrivals to come"},
        {"mbarrier.arrive.expect_tx", "deadlock", "1 of 1 arrivals to come"},
        {"mbarrier.arrive.shared", "deadlock", "arrivals to come"},
        {"mbarrier.init", "mbarrier", "not initialised"},
        {"fence.proxy.async", "missing fence", "no fence.proxy.async is between"},
        {"fence.mbarrier_init", "missing fence", "a copy tells the mbarrier"},
        {"tcgen05.fence::after_thread_sync", "missing fence",
         "tcgen05.fence::after_thread_sync is"},
        {"tcgen05.fence::before_thread_sync", "missing fence",
         "tcgen05.fence::before_thread_sync came"},
        {"cp.async.bulk.wait_group.read", "race", "nothing orders the two"},
        {"<tcgen05.mma", "race", "which a copy of warp 4"},
        {"<<tcgen05.mma", "race", "tensor memory of block"},
        {"<tcgen05.ld", "undefined", "never written"},
    };
    static const mistake with_launch_control[] = {
        {"clusterlaunchcontrol.try_cancel", "deadlock", "to come"},
        {"mbarrier.arrive.expect_tx.release.cluster", "deadlock", "arrivals to come"},
    };
    (void)state;
    expect_mistakes(&variants[0], mistakes, DW_COUNT(mistakes));
    expect_mistakes(&variants[DW_COUNT(variants) - 1], with_launch_control,
                    DW_COUNT(with_launch_control));
}

/* A kernel that has no tcgen05.fence at all, as CUTLASS's have none, counts on the hardware: nothing is said. */
static void fences_are_looked_for_where_there_are_some(void **state) {
    (void)state;
    need_kernels();
    problem p = {.v = variants[0],
                 .m = 300,
                 .n = 300,
                 .k = 300,
                 .clusters = 1,
                 .alpha = 1,
                 .seed = 4,
                 .without = "tcgen05.fence"};
    expect_right(&p);
}

static void time_is_bounded(void **state) {
    (void)state;
    need_kernels();
    problem p = {.v = {2, 256, 6, 0, 0, 0, 0, 0, 0},
                 .m = 512,
                 .n = 512,
                 .k = 512,
                 .clusters = 148,
                 .alpha = 1,
                 .seed = 3};
    run r;
    open_run(&p, &r);
    clock_t begun = clock(); /* of all threads: other programs do not count */
    assert_int_equal(launch(&p, &r), DW_OK);
    double seconds = (double)(clock() - begun) / CLOCKS_PER_SEC;
    expect_no_finding(r.emulator);
    print_message("512 x 512 x 512: %.2f s of one core, %.1f million lane-instructions\n", seconds,
                  (double)r.instructions / 1e6);
    assert_true(seconds < 5);
    close_run(&r);
}

/* ---- accounting ----------------------------------------------------------------------------------- */

typedef struct account {
    int ctas, tile_n, stages;
} account;
#define ACCOUNT(ctas, tile_n, stages) {ctas, tile_n, stages},
static const account accounts[] = {DW_SM100_GEMM_TILES(ACCOUNT)};

/* What a tile takes of a multiprocessor, and how long a product must take on a B200 at least: of all processors'
 * rounds the tensor cores' time, or that of reading A and B from shared memory (128 bytes a clock, as on Hopper), or
 * the time to move A, B and D once. */
static void tiles_fit(void **state) {
    (void)state;
    enum { SIZE = 8192 };
    dw_hardware *b200;
    assert_int_equal(dw_hardware_named("b200", &b200), DW_OK);
    double sms = b200->sm_count.value, rate = b200->rate[DW_RATE_BF16].value,
           clock = b200->clock.value;
    print_message(
        "CTAS TILE_N STAGES  columns  shared bytes  bytes/step  MFLOP/step  shared/tensor time  "
        "8192^3 on B200\n");
    for (size_t i = 0; i < DW_COUNT(accounts); i++) {
        const account *t = &accounts[i];
        int columns = DW_GEMM_COLUMNS(t->tile_n),
            shared = DW_GEMM_SHARED_BYTES(t->ctas, t->tile_n, t->stages),
            stage = DW_GEMM_STAGE_BYTES(t->ctas, t->tile_n);
        assert_true(columns >= 2 * t->tile_n && columns <= 512 && (columns & (columns - 1)) == 0);
        assert_true(shared <= DW_GEMM_MOST_SHARED);
        assert_true(DW_GEMM_SHARED_BYTES(t->ctas, t->tile_n, t->stages + 1) > DW_GEMM_MOST_SHARED ||
                    t->stages >= 8);
        assert_int_equal(DW_GEMM_B_BYTES(t->ctas, t->tile_n) % 1024, 0); /* the swizzle's pattern */
        double flops = 2.0 * DW_GEMM_ROWS * t->tile_n * DW_GEMM_STEP;    /* of a block, a step */
        double tensor = flops / (rate / sms), shared_time = stage / (128 * clock);
        double step = tensor > shared_time ? tensor : shared_time;
        double tiles =
            ceil((double)SIZE / (t->ctas * DW_GEMM_ROWS)) * ceil((double)SIZE / t->tile_n);
        double rounds = ceil(tiles / floor(sms / t->ctas));
        double compute = rounds * ((double)SIZE / DW_GEMM_STEP) * step;
        double memory = 3.0 * SIZE * SIZE * 2 / b200->memory_bandwidth.value;
        double bound = compute > memory ? compute : memory;
        print_message("%4d %6d %6d %8d %13d %11d %11.2f %19.2f  %.0f us, %.0f TFLOP/s\n", t->ctas,
                      t->tile_n, t->stages, columns, shared, stage, flops / 1e6,
                      shared_time / tensor, bound * 1e6, 2.0 * SIZE * SIZE * SIZE / bound / 1e12);
    }
    dw_hardware_destroy(b200);
    for (size_t i = 0; i < DW_COUNT(variants); i++) { /* what is tested is what is listed */
        bool listed = false;
        for (size_t j = 0; j < DW_COUNT(accounts); j++)
            listed |= accounts[j].ctas == variants[i].ctas &&
                      accounts[j].tile_n == variants[i].tile_n &&
                      accounts[j].stages == variants[i].stages;
        assert_true(listed);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_fit),
        cmocka_unit_test(random_numbers_are_right),
        cmocka_unit_test(integers_are_exact),
        cmocka_unit_test(blocks_stay),
        cmocka_unit_test(mistakes_are_found),
        cmocka_unit_test(fences_are_looked_for_where_there_are_some),
        cmocka_unit_test(time_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
