/* The GEMM of sm_100f (cuda/sm100/gemm.cu) with operands across the contraction, which the gradients of linear layers
 * have, through the library on an emulated GPU, with the checker on, compared with sums in double. Kernels are compiled
 * when they are first used. test_gemm.c and test_emulator_gemm.c have the operands along it. */
#include "kernel/cuda/gpu_kernels.h"
#include "library_gemm.h"

static const char gpu[] = "emulator:sm_100a";

/* A GPU with so few SMs that blocks, or pairs, compute several tiles. */
static dw__context few_sms(void) {
    const dw__context *context;
    assert_int_equal(device_named(gpu)->context(&context), DW_OK);
    dw__context few = *context;
    few.sm_count = 4;
    return few;
}

static dw__gemm_shape shape_of(const problem *p, int tile) {
    return (dw__gemm_shape){.tile = (uint64_t)tile,
                            .scheme_a = DW_SCHEME_BF16,
                            .scheme_b = DW_SCHEME_BF16,
                            .output = p->f32_output ? DW_GEMM_OUTPUT_F32 : DW_GEMM_OUTPUT_ELEMENT,
                            .activation = p->activation,
                            .f16 = p->f16,
                            .bias = p->bias,
                            .residual = p->residual,
                            .turned_a = p->turned_a,
                            .turned_b = p->turned_b};
}

static void expect_tile_right(const problem *p, int tile) {
    const dw__context few = few_sms();
    const dw__variant *variant;
    run r;
    open_run(p, device_named(gpu), &r);
    const dw__gemm_turned turned = {p->turned_a, p->turned_b};
    assert_int_equal(dw__sm100_supports(&r.call, turned, NULL), DW_OK);
    if (dw__variant_of(&few, &dw__sm100_gemm, shape_of(p, tile).params, &variant) != DW_OK ||
        dw__sm100_gemm.enqueue(&r.call, &few, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
    check(p, &r);
    close_run(&r);
}

/* Each tile with both operands turned, and each operand turned alone by blocks and by pairs. */
static void each_tile_is_right(void **state) {
    static const struct {
        int ctas, n; /* 0: every tile */
        problem p;
    } forms[] = {{0, 0, {.turned_a = true, .turned_b = true}},
                 {1, 128, {.turned_b = true, .bias = true, .activation = DW_ACTIVATION_GELU}},
                 {2, 256, {.turned_b = true, .f16 = true}},
                 {1, 256, {.turned_a = true, .f32_output = true, .residual = true}},
                 {2, 128, {.turned_a = true, .activation = DW_ACTIVATION_SWIGLU}}};
    (void)state;
    need_compiler();
    for (int tile = 0; tile < DW__GEMM_TILES; tile++) {
        const dw__gemm_tile *t = &dw__gemm_tiles[tile];
        for (size_t i = 0; i < DW_COUNT(forms) && t->scheme == DW_SCHEME_BF16; i++) {
            problem p = forms[i].p;
            if (forms[i].ctas && (forms[i].ctas != t->ctas || forms[i].n != t->n)) continue;
            p.m = 128 * t->ctas + 61, p.n = t->n + 37, p.k = 459;
            p.integers = i % 2, p.seed = 40 + i;
            expect_tile_right(&p, tile);
        }
    }
}

/* Sizes of 1, primes, no multiples of a step or of a tile, and a contraction of no elements. */
static void small_calls_are_right(void **state) {
    static const int sizes[][3] = {
        {1, 1, 1}, {67, 131, 257}, {129, 65, 65}, {5, 9, 0}, {257, 7, 13}};
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(sizes); i++) {
        const problem p = {.m = sizes[i][0],
                           .n = sizes[i][1],
                           .k = sizes[i][2],
                           .turned_a = true,
                           .turned_b = true,
                           .seed = i};
        expect_tile_right(&p, 1);
    }
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

static void keep_correct(void) {
    const problem p = {.m = 67, .n = 41, .k = 129, .turned_b = true, .seed = 4};
    const dw__context *context;
    const dw__variant *variant;
    run r;
    open_run(&p, device_named(gpu), &r);
    REQUIRE(r.device->context(&context) == DW_OK);
    const dw__gemm_turned turned = {p.turned_a, p.turned_b};
    REQUIRE(dw__sm100_prepare(&r.call, turned, context, &variant) == DW_OK);
    REQUIRE(!variant->disabled && lines == 0);
    REQUIRE(variant->kernel->enqueue(&r.call, context, variant) == DW_OK);
    check(&p, &r);
    close_run(&r);
}
static void correct_kernels_pass(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_correct);
}

/* ---- selection --------------------------------------------------------------------------------------- */

/* matmul of matrices of 64 x 64, and the kernel that is chosen among ours. */
static const char *chosen(bool transpose_a, bool transpose_b, const char *target) {
    const dw_attr both[] = {{.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = transpose_a},
                            {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = transpose_b}};
    dw__gpu_target on;
    dw__operation_call call = {.call = {.op = DW_OP_MATMUL,
                                        .attr_count = 2,
                                        .attrs = both,
                                        .input_count = 2,
                                        .output_count = 1}};
    dw__tensor matrix = {.dtype = DW_BF16, .rank = 2, .shape = {64, 64}};
    dw__tensor_set_contiguous(&matrix);
    call.call.inputs[0] = call.call.inputs[1] = call.call.outputs[0] = matrix;
    assert_int_equal(dw__gpu_target_named(target, &on), DW_OK);
    const dw__kernel *kernel = NULL;
    do kernel = dw__kernel_for(&call, &on, kernel);
    while (kernel && strcmp(kernel->backend, "deepwell") != 0);
    assert_non_null(kernel);
    return kernel->name;
}

static void engine_takes_them(void **state) {
    (void)state;
    assert_string_equal(chosen(false, true, "sm_100a"), "gemm");
    assert_string_equal(chosen(false, false, "sm_100a"), "gemm_turned");
    assert_string_equal(chosen(true, false, "sm_100a"), "gemm_turned");
    assert_string_equal(chosen(true, true, "sm_103a"), "gemm_turned");
    assert_string_equal(chosen(true, false, "sm_120a"), "gemm");
    assert_string_equal(chosen(true, false, "sm_90a"), "sm90_linear");
}

int main(void) {
    /* The child comes first, because a process keeps variants that were loaded without a check. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_pass),
        cmocka_unit_test(each_tile_is_right),
        cmocka_unit_test(small_calls_are_right),
        cmocka_unit_test(engine_takes_them),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
