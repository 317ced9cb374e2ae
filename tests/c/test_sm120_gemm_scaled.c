/* The block-scaled GEMM of consumer and workstation Blackwell GPUs (cuda/sm120/sm120_gemm_scaled.cu) through the
 * library on an emulated one, with the checker on: from a matrix, by the library's quantization, to D, compared with
 * sums in double. Kernels are compiled when they are first used. */
#include "library_quantized_gemm.h"
#include "run_time_compiler.h"

static const char gpu[] = "emulator:sm_120a";

/* Each scheme, one element, primes, one past a tile, no multiples of a block, K of 0, tiles of both sizes. */
static void quantized_operands_give_the_right_gemm(void **state) {
    static const problem problems[] = {
        {MXFP8, MXFP8, 1, 1, 1, 0, false, false, false},
        {MXFP8, MXFP8, 131, 67, 367, 0, false, false, false},
        {MXFP8, MXFP8, 3, 70, 0, 0, true, false, false},
        {MXFP8, MXFP8, 0, 9, 5, 0, false, false, false},
        {MXFP8, MXFP8_E5M2, 129, 257, 65, 0, false, true, false},
        {MXFP8_E5M2, MXFP8_E5M2, 33, 65, 130, 0, false, false, false},
        {MXFP8, MXFP8, 67, 131, 130, DW_ACTIVATION_GELU, true, false, true},
        {MXFP8, MXFP8, 130, 71, 290, DW_ACTIVATION_SWIGLU, true, false, true},
        {NVFP4, NVFP4, 67, 129, 790, 0, false, false, false},
        {NVFP4, NVFP4, 1, 1, 1, 0, false, false, false},
        {NVFP4_ROWS, NVFP4_SQUARES, 201, 100, 81, DW_ACTIVATION_SWIGLU, false, true, false},
        {MXFP4, MXFP4, 67, 300, 331, DW_ACTIVATION_GELU, false, false, false},
    };
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(problems); i++) expect_right_on(gpu, &problems[i], 10 + i);
}

/* Both tiles for each scheme, with one SM, so that blocks compute several tiles of more steps than the ring has. */
static void each_tile_is_right(void **state) {
    static const problem problems[] = {
        {MXFP8_E5M2, MXFP8, 190, 170, 530, 0, true, true, false},
        {NVFP4, NVFP4, 150, 101, 1100, DW_ACTIVATION_SWIGLU, true, false, false},
        {MXFP4, MXFP4, 150, 201, 1100, 0, false, false, false},
    };
    const dw__context *context;
    (void)state;
    need_compiler();
    assert_int_equal(device_named(gpu)->context(&context), DW_OK);
    dw__context few = *context;
    few.sm_count = 1;
    for (size_t i = 0; i < DW_COUNT(problems); i++)
        for (int tile = 0; tile < DW__SM120_TILES; tile++) {
            const dw__variant *variant;
            run r;
            if (!dw__sm120_tiles[tile].scaled) continue;
            open_run_on(gpu, &problems[i], &r, 30 + i);
            dw__gemm_shape shape = dw__sm120_shape_of(&r.call, (dw__gemm_turned){false, false}, 1);
            shape.tile = (uint64_t)tile;
            if (dw__variant_of(context, &dw__sm120_gemm_scaled, shape.params, &variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            if (dw__sm120_gemm_scaled.enqueue(&r.call, &few, variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            check(&r);
            close_run(&r);
        }
}

/* A GEMM of unquantized operands, with codes and scales as its result, which are A of the next GEMM. */
static void quantized_output_is_the_next_input(void **state) {
    static const problem first = {MXFP8, MXFP8, 67, 131, 45, DW_ACTIVATION_GELU, true, false, true},
                         second = {MXFP8, MXFP8, 67, 70, 131, 0, false, false, false};
    run one, two;
    (void)state;
    need_compiler();
    open_run_on(gpu, &first, &one, 3);
    open_run_on(gpu, &second, &two, 4);
    one.call.quantized = 0;
    one.call.a = matrix_of(&one.a.source);
    one.call.b = matrix_of(&one.b.source);
    for (int i = 0; i < first.m; i++)
        for (int j = 0; j < first.k; j++)
            one.a.values[i * first.k + j] = (double)get(&one.a.source, i, j);
    for (int i = 0; i < first.n; i++)
        for (int j = 0; j < first.k; j++)
            one.b.values[i * first.k + j] = (double)get(&one.b.source, i, j);
    two.call.a = one.call.d;
    two.call.scales_a = one.call.scales_d;
    if (dw_gemm_run(&one.call) != DW_OK) fail_msg("%s", dw_last_error());
    if (dw_gemm_run(&two.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(&one);
    find_values(&one.d, DW_SCHEME_MXFP8, 1, two.a.values);
    check(&two);
    close_run(&one);
    close_run(&two);
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

static void keep_correct(void) {
    static const problem problems[] = {
        {MXFP8, MXFP8_E5M2, 5, 7, 33, 0, false, false, false},
        {MXFP8, MXFP8, 5, 7, 33, DW_ACTIVATION_SWIGLU, true, false, true},
        {NVFP4, NVFP4, 5, 7, 33, 0, false, false, false},
        {MXFP4, MXFP4, 5, 7, 33, 0, false, false, false},
    };
    for (size_t i = 0; i < DW_COUNT(problems); i++) {
        run r;
        open_run_on(gpu, &problems[i], &r, i);
        REQUIRE(dw_gemm_supported(&r.call) == DW_OK && dw_gemm_run(&r.call) == DW_OK);
        check(&r);
        close_run(&r);
    }
    REQUIRE(lines == 0);
}
static void correct_kernels_pass(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_correct);
}

static void refuse(const char *was, const char *now) {
    static const problem tiny = {NVFP4, NVFP4, 5, 7, 33, 0, false, false, false};
    run r;
    dw__text source = {0};
    void *image;
    size_t bytes;
    open_run_on(gpu, &tiny, &r, 1);
    const dw__gemm_shape shape = dw__sm120_shape_of(&r.call, (dw__gemm_turned){false, false}, 188);
    const dw__jit_variant variant = dw__sm120_variant(&shape);
    REQUIRE(dw__jit_expand(variant.source, &source) == DW_OK);
    REQUIRE(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL) == DW_OK);
    REQUIRE(strlen(was) == strlen(now) && strstr(image, was));
    for (char *at = strstr(image, was); at; at = strstr(at, was)) memcpy(at, now, strlen(now));
    carry(name_of(&variant), image);
    REQUIRE(dw_gemm_supported(&r.call) == DW_UNSUPPORTED);
    REQUIRE(strstr(dw_last_error(), "disagrees with the reference") &&
            strstr(dw_last_error(), "GEMMs are refused"));
    REQUIRE(dw_gemm_run(&r.call) == DW_UNSUPPORTED && lines == 1);
}
/* Scales of 32 elements in place of 16. */
static void keep_other_blocks(void) {
    refuse("scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
           "scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0");
}
static void wrong_kernels_are_rejected(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_other_blocks);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_pass),
        cmocka_unit_test(wrong_kernels_are_rejected),
        cmocka_unit_test(quantized_operands_give_the_right_gemm),
        cmocka_unit_test(each_tile_is_right),
        cmocka_unit_test(quantized_output_is_the_next_input),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
