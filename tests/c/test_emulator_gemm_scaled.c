/* sm_100's block-scaled GEMMs (cuda/sm100/gemm_scaled.cu) on the emulator, compared with sums in double of the
 * operands' values. Runs the compiler's PTX with the checker on. */
#include "deepwell/number.h"
#include "emulated_gemm_run.h"
#include "emulated_gemm_scaled.h"
#include "sm100/gemm_scaled_params.h"
#include "sm100/gemm_tiles.h"

#define ROW(...) {__VA_ARGS__},
static const variant variants[] = {EMULATED_GEMM_SCALED(ROW)};

/* ---- operands ------------------------------------------------------------------------------------ */

/* This keeps every sum within F16's range if D is F16. */
static uint8_t random_scale(const problem *p, uint64_t *state) {
    const uint64_t word = random_word(state);
    const bool half = p->v.element && !p->v.output;
    if (p->v.scheme_a != DW_CODES_NVFP4)
        return (uint8_t)(p->integers ? 127 + word % 3 : 117 + word % (half ? 14 : 40));
    if (!p->integers) return (uint8_t)(word % (half ? 0x40 : 0x7F)); /* from 2^-9 to 448, and 0 */
    return (uint8_t)dw__encode_one(DW_UE4M3, (float)(word % 4), DW_OVERFLOW_SATURATE,
                                   DW_ROUND_NEAREST, 0);
}

/* Makes `parts` matrices of `rows` rows, one after the other, each with its own scales. */
static void make_operand(operand *o, dw_emulator *emulator, const problem *p, int rows, int parts,
                         matrix_type type, uint64_t *state) {
    const int block = DW_SCALED_BLOCK(p->v.scheme_a), wide = ceil_divide(p->k, block);
    const dw_dtype format = p->v.scheme_a == DW_CODES_NVFP4 ? DW_UE4M3 : DW_E8M0;
    const size_t part_bytes = (size_t)dw_scales_swizzled_bytes(rows, wide);
    make_random(&o->codes, emulator, parts * rows, p->k, type, state, p->integers);
    if (type == MATRIX_E2M1 && p->k % 2) { /* the unused half of the last byte */
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

/* Makes a map of the scales: adjacent tiles of 128 rows, as many as a step reads, in 64-bit words. */
static void make_scale_map(const operand *o, int step_tiles, void *map) {
    enum { WORDS = DW_SCALE_TILE_BYTES / 8, U64 = 4 };
    dw_emulator_tensor_shape shape = {
        .struct_size = sizeof shape,
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

static void add_defines(dw__jit_variant *jit, const variant *v) {
    dw__jit_add_define(jit, "SCHEME_A", v->scheme_a);
    dw__jit_add_define(jit, "SCHEME_B", v->scheme_b);
    dw__jit_add_define(jit, "SCHEDULE", v->schedule);
}

static matrix_type element_of(int scheme) {
    return scheme == DW_CODES_MXFP8        ? MATRIX_E4M3
           : scheme == DW_CODES_MXFP8_E5M2 ? MATRIX_E5M2
                                           : MATRIX_E2M1;
}
static void make_operands(run *r, const problem *p, uint64_t *state) {
    const variant *v = &p->v;
    make_operand(&r->a, r->emulator, p, p->m, 1, element_of(v->scheme_a), state);
    make_operand(&r->b, r->emulator, p, p->n, is_swiglu(p) ? 2 : 1, element_of(v->scheme_b), state);
}

static void make_operand_maps(const run *r, const problem *p, unsigned char (*maps)[MAP_BYTES]) {
    const uint32_t step = (uint32_t)DW_SCALED_STEP(p->v.scheme_a);
    const int step_tiles = DW_SCALED_STEP_TILES(p->v.scheme_a);
    make_map(&r->a.codes, step, DW_GEMM_ROWS, maps[0]);
    make_map(&r->b.codes, step, rows_of_b(p), maps[1]);
    make_scale_map(&r->a, step_tiles, maps[2]);
    make_scale_map(&r->b, step_tiles, maps[3]);
}

static uint32_t shared_bytes(const variant *v) {
    return (uint32_t)DW_SCALED_SHARED_BYTES(v->scheme_a, v->ctas, v->tile_n, v->stages);
}

/* Shapes: one element, prime sizes, one past a tile, K of 0, of no multiple of a block and of no multiple of a step,
 * rings that wrap. */
static const sizes shapes[] = {{1, 1, 1},  {128, 128, 256}, {129, 257, 65},
                               {3, 70, 0}, {67, 131, 367},  {257, 193, 1021}};

static const gemm_kernel kernel = {.source = "sm100/gemm_scaled.cu",
                                   .entry = "sm100_gemm_scaled",
                                   .variants = variants,
                                   .variant_count = DW_COUNT(variants),
                                   .add_defines = add_defines,
                                   .make_operands = make_operands,
                                   .operand_maps = 4,
                                   .make_operand_maps = make_operand_maps,
                                   .shared_bytes = shared_bytes,
                                   .shapes = shapes,
                                   .shape_count = DW_COUNT(shapes),
                                   .persistent = {517, 651, 400},
                                   .persistent_alpha = 0.01f,
                                   .mistaken = {300, 300, 600}};

/* ---- tests ---------------------------------------------------------------------------------------- */

static void mistakes_are_found(void **state) {
    static const mistake mistakes[] = {
        {"tcgen05.cp", "undefined", "scale factors"},
        {"tcgen05.wait::ld", "too early", "before the wait that makes its value valid"},
        {"tcgen05.commit", "deadlock", "1 of 1 arrivals pending"},
        {"tcgen05.mma", "undefined", "never written"},
        {"cp.async.bulk.tensor.2d.shared", "deadlock", "pending"},
        {"mbarrier.arrive.expect_tx", "deadlock", "1 of 1 arrivals pending"},
        {"fence.proxy.async", "missing fence", "a fence.proxy.async between"},
        {"tcgen05.fence::after_thread_sync", "missing fence",
         "tcgen05.fence::after_thread_sync is missing"},
        {"tcgen05.fence::before_thread_sync", "missing fence",
         "tcgen05.fence::before_thread_sync is missing"},
        {"<tcgen05.cp", "race", "which a copy of warp 4"},
        {"<<tcgen05.cp", "race", "tensor memory of block"},
        {"<tcgen05.ld", "undefined", "never written"},
        {"<cp.async.bulk.tensor.2d.shared", "mbarrier", "which expects 0 more in this phase"},
    };
    static const mistake of_a_pair[] = {
        {"tcgen05.cp", "undefined", "scale factors"},
        {"tcgen05.commit", "deadlock", "1 of 1 arrivals pending"},
        {"<tcgen05.cp", "race", "which a copy of warp 4"},
        {"<<tcgen05.cp", "race", "tensor memory of block"},
    };
    (void)state;
    assert_true(DW_SCALED_OVERLAP(variants[2].tile_n) && DW_SCALED_OVERLAP(variants[4].tile_n));
    assert_true(variants[2].ctas == 1 && variants[4].ctas == 2);
    expect_mistakes(&kernel, &variants[2], mistakes, DW_COUNT(mistakes));
    expect_mistakes(&kernel, &variants[4], of_a_pair, DW_COUNT(of_a_pair));
}

/* D of one GEMM as MXFP8, with its codes and scales unchanged, is A of the next GEMM. */
static void quantized_output_is_the_next_input(void **state) {
    const problem first = {
        .v = {DW_CODES_MXFP8, DW_CODES_MXFP8, 1, 256, 3, 0, DW_GEMM_OUTPUT_MXFP8, 0, 0, 0, 0},
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
    need_kernels(&kernel);
    open_run(&kernel, &first, &one);
    assert_int_equal(launch(&kernel, &first, &one), DW_OK);
    expect_no_finding(one.emulator);
    open_run(&kernel, &second, &two);
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
                (double)dw__decode_one(DW_E8M0, scales[i * blocks + j / BLOCK_OF_D]);
    assert_int_equal(launch(&kernel, &second, &two), DW_OK);
    expect_no_finding(two.emulator);
    check(&second, &two);
    free(scales);
    close_run(&one);
    close_run(&two);
}

/* ---- cost model ----------------------------------------------------------------------------------- */

#define COST(...) {__VA_ARGS__},
static const tile_cost costs[] = {DW_SM100_SCALED_TILES(COST)};

/* The cost of a tile on an SM, and a lower bound for the GEMM on a B200: over all rounds of the SMs the time of the
 * tensor cores, or of reading A, B and scales from shared memory (128 bytes per clock, as on Hopper), or the time to
 * move A, B, their scales and D (BF16) once. */
static void tiles_fit(void **state) {
    (void)state;
    const double size = GEMM_SIZE;
    dw_hardware *b200;
    assert_int_equal(dw_hardware_named("b200", &b200), DW_OK);
    double sms = b200->sm_count.value, clock = b200->clock.value;
    print_message("scheme CTAS TILE_N STAGES  columns (shared, scales)  shared bytes  bytes/step  "
                  "MFLOP/step  shared/tensor time  8192^3 on B200\n");
    for (size_t i = 0; i < DW_COUNT(costs); i++) {
        const tile_cost *t = &costs[i];
        const int overlap = DW_SCALED_OVERLAP(t->tile_n),
                  scales = DW_SCALED_SCALE_COLUMNS_USED(t->scheme, t->tile_n),
                  shared = DW_SCALED_SHARED_BYTES(t->scheme, t->ctas, t->tile_n, t->stages),
                  stage = DW_SCALED_STAGE_BYTES(t->scheme, t->ctas, t->tile_n),
                  step = DW_SCALED_STEP(t->scheme);
        assert_true(2 * t->tile_n - overlap + scales <= DW_SCALED_COLUMNS);
        assert_true(scales <= DW_SCALED_SCALE_COLUMNS && overlap <= t->tile_n / 4);
        assert_true(shared <= DW_GEMM_MOST_SHARED && DW_GEMM_MOST_SHARED < shared + stage);
        /* The pattern of the swizzle. */
        assert_int_equal(DW_GEMM_B_BYTES(t->ctas, t->tile_n) % 1024, 0);
        const double rate =
            b200->rate[t->scheme == DW_CODES_MXFP8 ? DW_RATE_MXFP8 : DW_RATE_FP4].value;
        double flops = 2.0 * DW_GEMM_ROWS * t->tile_n * step; /* bytes of a block's step */
        double tensor = flops / (rate / sms), shared_time = stage / (128 * clock);
        double step_time = tensor > shared_time ? tensor : shared_time;
        double element = DW_GEMM_ROW_BYTES / (double)step + 1.0 / DW_SCALED_BLOCK(t->scheme);
        double bound = least_seconds(b200, t, step, step_time, (2 * element + 2) * size * size);
        print_message(
            "%s %5d %6d %6d  %7d (%6d, %6d)  %12d  %10d  %10.2f  %18.2f  %.0f us, %.0f TFLOP/s\n",
            dw_scheme_name((dw_scheme)t->scheme), t->ctas, t->tile_n, t->stages,
            2 * t->tile_n - overlap + scales, overlap, scales, shared, stage, flops / 1e6,
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
        cmocka_unit_test(quantized_output_is_the_next_input),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
