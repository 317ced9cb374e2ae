/* sm_100's GEMM (cuda/sm100/gemm.cu) on the emulator, compared with sums in double. Runs the compiler's PTX with the
 * checker on. */
#include "emulated_gemm.h"
#include "emulated_gemm_run.h"
#include "sm100/gemm_tiles.h"
#include <time.h>

#define ROW(...) {0, 0, __VA_ARGS__},
static const variant variants[] = {EMULATED_GEMM(ROW)};

/* ---- the kernel ---------------------------------------------------------------------------------- */

static void add_defines(dw__jit_variant *jit, const variant *v) {
    if (v->schedule) dw__jit_add_define(jit, "SCHEDULE", v->schedule);
}

static void make_operand(operand *o, dw_emulator *emulator, const problem *p, int rows,
                         uint64_t *state) {
    const size_t k = (size_t)p->k;
    make_random(&o->codes, emulator, rows, p->k, p->v.element ? MATRIX_F16 : MATRIX_BF16, state,
                p->integers);
    o->values = malloc((size_t)rows * k * sizeof *o->values + 1);
    assert_non_null(o->values);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < p->k; j++)
            o->values[(size_t)i * k + (size_t)j] = (double)get(&o->codes, i, j);
}
static void make_operands(run *r, const problem *p, uint64_t *state) {
    make_operand(&r->a, r->emulator, p, p->m, state);
    make_operand(&r->b, r->emulator, p, is_swiglu(p) ? 2 * p->n : p->n, state);
}

static void make_operand_maps(const run *r, const problem *p, unsigned char (*maps)[MAP_BYTES]) {
    make_map(&r->a.codes, DW_GEMM_STEP, DW_GEMM_ROWS, maps[0]);
    make_map(&r->b.codes, DW_GEMM_STEP, rows_of_b(p), maps[1]);
}

static uint32_t shared_bytes(const variant *v) {
    return (uint32_t)DW_GEMM_SHARED_BYTES(v->ctas, v->tile_n, v->stages);
}

/* Shapes: one element, prime sizes, one past a tile, K of 0 and of no multiple of a step, rings that wrap. */
static const sizes shapes[] = {{1, 1, 1},  {128, 64, 64},  {129, 129, 65},
                               {3, 70, 0}, {67, 257, 131}, {257, 61, 709}};

static const gemm_kernel kernel = {.source = "sm100/gemm.cu",
                                   .entry = "sm100_gemm",
                                   .variants = variants,
                                   .variant_count = DW_COUNT(variants),
                                   .add_defines = add_defines,
                                   .make_operands = make_operands,
                                   .operand_maps = 2,
                                   .make_operand_maps = make_operand_maps,
                                   .shared_bytes = shared_bytes,
                                   .shapes = shapes,
                                   .shape_count = DW_COUNT(shapes),
                                   .persistent = {517, 331, 200},
                                   .persistent_alpha = 1,
                                   .mistaken = {300, 300, 300}};

/* ---- tests ---------------------------------------------------------------------------------------- */

static void mistakes_are_found(void **state) {
    static const mistake mistakes[] = {
        {"tcgen05.wait::ld", "too early", "before the wait that makes its value valid"},
        {"tcgen05.dealloc", "tensor memory", "were not freed"},
        {"tcgen05.alloc", "undefined", "never written"},
        {"tcgen05.mma", "undefined", "never written"},
        {"tcgen05.commit", "deadlock", "1 of 1 arrivals pending"},
        {"mbarrier.arrive.expect_tx", "deadlock", "1 of 1 arrivals pending"},
        {"mbarrier.arrive.shared", "deadlock", "arrivals pending"},
        {"mbarrier.init", "mbarrier", "not initialised"},
        {"fence.proxy.async", "missing fence", "a fence.proxy.async between"},
        {"fence.mbarrier_init", "missing fence", "a copy completes on the mbarrier"},
        {"tcgen05.fence::after_thread_sync", "missing fence",
         "tcgen05.fence::after_thread_sync is missing"},
        {"tcgen05.fence::before_thread_sync", "missing fence",
         "tcgen05.fence::before_thread_sync is missing"},
        {"cp.async.bulk.wait_group.read", "race", "nothing orders the two"},
        {"<tcgen05.mma", "race", "which a copy of warp 4"},
        {"<<tcgen05.mma", "race", "tensor memory of block"},
        {"<tcgen05.ld", "undefined", "never written"},
    };
    static const mistake with_launch_control[] = {
        {"clusterlaunchcontrol.try_cancel", "deadlock", "pending"},
        {"mbarrier.arrive.expect_tx.release.cluster", "deadlock", "arrivals pending"},
    };
    (void)state;
    expect_mistakes(&kernel, &variants[0], mistakes, DW_COUNT(mistakes));
    expect_mistakes(&kernel, &variants[DW_COUNT(variants) - 1], with_launch_control,
                    DW_COUNT(with_launch_control));
}

/* A kernel without any tcgen05.fence, like CUTLASS's, relies on the hardware: the checker reports nothing. */
static void fences_are_checked_only_in_kernels_that_use_them(void **state) {
    (void)state;
    need_kernels(&kernel);
    problem p = {.v = variants[0],
                 .m = 300,
                 .n = 300,
                 .k = 300,
                 .clusters = 1,
                 .alpha = 1,
                 .seed = 4,
                 .without = "tcgen05.fence"};
    expect_right(&kernel, &p);
}

static void time_is_bounded(void **state) {
    (void)state;
    need_kernels(&kernel);
    problem p = {.v = {0, 0, 2, 256, 6, 0, 0, 0, 0, 0, 0},
                 .m = 512,
                 .n = 512,
                 .k = 512,
                 .clusters = 148,
                 .alpha = 1,
                 .seed = 3};
    run r;
    open_run(&kernel, &p, &r);
    clock_t begun = clock(); /* of all threads, so that other programs do not count */
    assert_int_equal(launch(&kernel, &p, &r), DW_OK);
    double seconds = (double)(clock() - begun) / CLOCKS_PER_SEC;
    expect_no_finding(r.emulator);
    print_message("512 x 512 x 512: %.2f s of one core, %.1f million lane-instructions\n", seconds,
                  (double)r.instructions / 1e6);
    assert_true(seconds < 5);
    close_run(&r);
}

/* ---- cost model ----------------------------------------------------------------------------------- */

#define COST(...) {0, __VA_ARGS__},
static const tile_cost costs[] = {DW_SM100_GEMM_TILES(COST)};

/* The cost of a tile on an SM, and a lower bound for the GEMM on a B200: over all rounds of the SMs the time of the
 * tensor cores, or of reading A and B from shared memory (128 bytes per clock, as on Hopper), or the time to move A, B
 * and D once. */
static void tiles_fit(void **state) {
    (void)state;
    const double size = GEMM_SIZE;
    dw_hardware *b200;
    assert_int_equal(dw_hardware_named("b200", &b200), DW_OK);
    double sms = b200->sm_count.value, rate = b200->rate[DW_RATE_BF16].value,
           clock = b200->clock.value;
    print_message(
        "CTAS TILE_N STAGES  columns  shared bytes  bytes/step  MFLOP/step  shared/tensor time  "
        "8192^3 on B200\n");
    for (size_t i = 0; i < DW_COUNT(costs); i++) {
        const tile_cost *t = &costs[i];
        int columns = DW_GEMM_COLUMNS(t->tile_n),
            shared = DW_GEMM_SHARED_BYTES(t->ctas, t->tile_n, t->stages),
            stage = DW_GEMM_STAGE_BYTES(t->ctas, t->tile_n);
        assert_true(columns >= 2 * t->tile_n && columns <= 512 && (columns & (columns - 1)) == 0);
        assert_true(shared <= DW_GEMM_MOST_SHARED);
        assert_true(DW_GEMM_SHARED_BYTES(t->ctas, t->tile_n, t->stages + 1) > DW_GEMM_MOST_SHARED ||
                    t->stages >= 8);
        /* The pattern of the swizzle. */
        assert_int_equal(DW_GEMM_B_BYTES(t->ctas, t->tile_n) % 1024, 0);
        /* Bytes of a block's step. */
        double flops = 2.0 * DW_GEMM_ROWS * t->tile_n * DW_GEMM_STEP;
        double tensor = flops / (rate / sms), shared_time = stage / (128 * clock);
        double step = tensor > shared_time ? tensor : shared_time;
        double bound = least_seconds(b200, t, DW_GEMM_STEP, step, 3.0 * size * size * 2);
        print_message("%4d %6d %6d %8d %13d %11d %11.2f %19.2f  %.0f us, %.0f TFLOP/s\n", t->ctas,
                      t->tile_n, t->stages, columns, shared, stage, flops / 1e6,
                      shared_time / tensor, bound * 1e6, 2.0 * size * size * size / bound / 1e12);
    }
    dw_hardware_destroy(b200);
    expect_listed(&kernel, costs, DW_COUNT(costs));
}

int main(void) {
    void *state = (void *)(uintptr_t)&kernel;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_fit),
        cmocka_unit_test_prestate(random_numbers_are_right, state),
        cmocka_unit_test_prestate(integers_are_exact, state),
        cmocka_unit_test_prestate(persistent_blocks_process_several_tiles, state),
        cmocka_unit_test(mistakes_are_found),
        cmocka_unit_test(fences_are_checked_only_in_kernels_that_use_them),
        cmocka_unit_test(time_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
