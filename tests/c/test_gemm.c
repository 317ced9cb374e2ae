/* GEMMs through the library on emulated Blackwell GPUs, with the checker on, compared with sums in double: selection,
 * launch, rejection, the first-use check and the reference that replaces a rejected kernel. */
#include "emulated_gemm.h"
#include "library_gemm.h"

enum { SMS = 148 };

/* ---- kernels ---------------------------------------------------------------------------------------- */

/* Finds the tests' compiled variant with these tiles. */
static dw__gemm_shape shape_of(int ctas, int tile_n, int stages, int element, int output,
                               int activation, int bias, int residual) {
    dw__gemm_shape shape = {.f16 = element,
                            .output = output,
                            .bias = bias,
                            .residual = residual,
                            .activation = (dw_activation)activation};
    for (shape.tile = 0; shape.tile < DW__GEMM_TILES; shape.tile++) {
        const dw__gemm_tile *t = &dw__gemm_tiles[shape.tile];
        if (t->ctas == ctas && t->n == tile_n && t->stages == stages) return shape;
    }
    fail();
    return shape;
}
typedef struct row {
    dw__gemm_shape shape;
    /* The launcher never selects variants with cluster launch control or quantized output here. */
    bool others;
} row;
#define ROW(ctas, tile_n, stages, element, output, activation, bias, residual, schedule)           \
    {shape_of(ctas, tile_n, stages, element, output, activation, bias, residual),                  \
     schedule || output > 1},

/* The variants that were compiled with the library. Under the sanitizers, DEEPWELL_TEST_PTX may name another build's
 * folder. */
static void need_kernels(void) {
    const dw__gemm_shape shape = shape_of(1, 64, 8, 0, 0, 0, 1, 0);
    const dw__jit_variant variant = dw__gemm_variant(&shape);
    need_ptx(&variant);
}

static void carry_all(void) {
    if (carried_count > 0) return;
    const row all[] = {EMULATED_GEMM(ROW)};
    for (size_t i = 0; i < DW_COUNT(all); i++) {
        const dw__jit_variant variant = dw__gemm_variant(&all[i].shape);
        if (!all[i].others) carry_variant(&variant);
    }
    for (int bias = 0; bias < 2; bias++) { /* as the library names it */
        const dw__gemm_shape small = shape_of(1, 64, 8, 0, 0, 0, bias, 0),
                             large = shape_of(2, 256, 6, 0, 0, 0, bias, 0);
        const dw__jit_variant of_small = dw__gemm_variant(&small),
                              of_large = dw__gemm_variant(&large);
        carry_variant(&of_small);
        carry_variant(&of_large);
    }
    const dw__jit_variant reference = dw__gemm_reference_variant(100, false, false);
    carry_variant(&reference);
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

static const problem small_one = {.m = 67, .n = 41, .k = 129, .bias = true, .seed = 4};

/* Runs a call whose kernel is rejected with `words`: the reference computes it, the log reports it once, and the kernel
 * stays rejected. */
static void expect_refused(const char *words) {
    run r;
    open_run(&small_one, device_named("emulator:sm_100a"), &r);
    REQUIRE(dw_gemm_supported(&r.call) == DW_UNSUPPORTED);
    REQUIRE(strstr(dw_last_error(), words) && strstr(dw_last_error(), "is not used"));
    REQUIRE(lines == 1 && strstr(logged, words));
    for (int i = 0; i < 2; i++) {
        REQUIRE(dw_gemm_run(&r.call) == DW_OK);
        check(&small_one, &r);
    }
    REQUIRE(dw_gemm_supported(&r.call) == DW_UNSUPPORTED && strstr(dw_last_error(), words));
    REQUIRE(lines == 1);
    close_run(&r);
}

static void keep_correct(void) {
    run r;
    if (!dw__jit_ptx[0].name) carry_all(); /* otherwise the library's own PTX is used */
    open_run(&small_one, device_named("emulator:sm_100a"), &r);
    REQUIRE(dw_gemm_supported(&r.call) == DW_OK);
    REQUIRE(dw_gemm_run(&r.call) == DW_OK && lines == 0);
    check(&small_one, &r);
    close_run(&r);
}
static void correct_kernel_passes(void **state) {
    (void)state;
    need_kernels();
    in_child(keep_correct);
}

/* Reads the PTX that replaces the kernel of `small_one`. */
static void carry_in_place(char *text) {
    const dw__gemm_shape shape = shape_of(1, 64, 8, 0, 0, 0, 1, 0);
    const dw__jit_variant variant = dw__gemm_variant(&shape),
                          reference = dw__gemm_reference_variant(100, false, false);
    carry(name_of(&variant), text);
    carry_variant(&reference);
}
static void read_tile(int ctas, int tile_n, int stages, char **text) {
    const dw__gemm_shape shape = shape_of(ctas, tile_n, stages, 0, 0, 0, 1, 0);
    const dw__jit_variant variant = dw__gemm_variant(&shape);
    size_t bytes;
    assert_true(read_ptx(&variant, text, &bytes));
}

/* Operands read as F16: one wrong constant, which the checker cannot see. */
static void keep_wrong_elements(void) {
    char *text = NULL;
    const unsigned shape = 1u << 4 | 64u >> 3 << 17 | 128u >> 4 << 24, bf16 = 1u << 7 | 1u << 10;
    read_tile(1, 64, 8, &text);
    replace_constant(text, shape | bf16, shape);
    carry_in_place(text);
    expect_refused("disagrees with the reference on Deepwell emulator of sm_100a: D[0][0]");
}
static void wrong_numbers_are_rejected(void **state) {
    (void)state;
    need_kernels();
    in_child(keep_wrong_elements);
}

static void keep_wrong_tile(void) {
    char *text = NULL;
    read_tile(2, 256, 6, &text);
    carry_in_place(text);
    expect_refused("failed on Deepwell emulator of sm_100a");
}
static void wrong_tile_is_rejected(void **state) {
    (void)state;
    need_kernels();
    in_child(keep_wrong_tile);
}

static void keep_without_wait(void) {
    char *text = NULL;
    read_tile(1, 64, 8, &text);
    take_out(text, "tcgen05.wait::ld");
    carry_in_place(text);
    expect_refused("too early");
}
static void missing_wait_is_rejected(void **state) {
    (void)state;
    need_kernels();
    in_child(keep_without_wait);
}

/* ---- calls -------------------------------------------------------------------------------------------- */

/* Shapes: one element, primes, one past a tile, K of no multiple of a step, K of 0, empty results. */
static void small_calls_are_right(void **state) {
    static const int shapes[][3] = {{1, 1, 1},      {128, 64, 64}, {129, 65, 65},
                                    {67, 131, 257}, {3, 300, 129}, {257, 7, 13},
                                    {5, 9, 0},      {0, 9, 5},     {7, 0, 5}};
    (void)state;
    need_kernels();
    carry_all();
    for (size_t i = 0; i < DW_COUNT(shapes); i++) {
        problem p = {.m = shapes[i][0], .n = shapes[i][1], .k = shapes[i][2], .seed = i};
        p.bias = i % 2, p.integers = i % 3 == 0;
        expect_right(&p, "emulator:sm_100a");
        p.activation = DW_ACTIVATION_GELU, p.bias = p.residual = true;
        expect_right(&p, "emulator:sm_103a");
    }
}

/* There are so many tiles that pairs of blocks compute them. */
static void large_call_is_right(void **state) {
    problem p = {.m = 1537, .n = 1665, .k = 16, .integers = true, .seed = 5};
    run r;
    (void)state;
    need_kernels();
    carry_all();
    open_run(&p, device_named("emulator:sm_100a"), &r);
    const dw__gemm_shape shape = dw__gemm_shape_of(&r.call, SMS);
    assert_int_equal(dw__gemm_tiles[shape.tile].ctas, 2);
    if (dw_gemm_run(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(&p, &r);
    close_run(&r);
}

/* D overwrites its own residual. */
static void residual_may_be_d(void **state) {
    problem p = {.m = 131,
                 .n = 70,
                 .k = 33,
                 .bias = true,
                 .residual = true,
                 .activation = DW_ACTIVATION_GELU,
                 .seed = 6};
    run r;
    (void)state;
    need_kernels();
    carry_all();
    open_run(&p, device_named("emulator:sm_100a"), &r);
    assert_int_equal(r.device->copy(r.d.device, r.residual.device, r.d.bytes), DW_OK);
    r.call.residual = r.call.d;
    if (dw_gemm_run(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
    check(&p, &r);
    close_run(&r);
}

/* Every compiled tile, through the launcher, with so few SMs that blocks compute several tiles. */
static void each_tile_is_right(void **state) {
    const row all[] = {EMULATED_GEMM(ROW)};
    const dw_device *device = device_named("emulator:sm_100a");
    const dw__context *context;
    (void)state;
    need_kernels();
    carry_all();
    assert_int_equal(device->context(&context), DW_OK);
    dw__context few = *context;
    few.sm_count = 3;
    for (size_t i = 0; i < DW_COUNT(all); i++) {
        const dw__gemm_shape *s = &all[i].shape;
        const dw__variant *variant;
        if (all[i].others) continue;
        problem p = {.m = 259 + dw__gemm_tile_rows(s),
                     .n = dw__gemm_tile_columns(s) + 29,
                     .k = 131,
                     .f16 = s->f16,
                     .f32_output = s->output == DW_GEMM_OUTPUT_F32,
                     .bias = s->bias,
                     .residual = s->residual,
                     .activation = s->activation,
                     .seed = 40 + i};
        run r;
        open_run(&p, device, &r);
        if (dw__variant_of(context, &dw__sm100_gemm, s->params, &variant) != DW_OK)
            fail_msg("%s", dw_last_error());
        if (dw__sm100_gemm.enqueue(&r.call, &few, variant) != DW_OK)
            fail_msg("%s", dw_last_error());
        check(&p, &r);
        close_run(&r);
    }
}

/* Tests the reference kernel: every activation, type and output. */
static void definition_is_right(void **state) {
    const dw_device *device = device_named("emulator:sm_100a");
    const dw__context *context;
    (void)state;
    need_kernels();
    carry_all();
    assert_int_equal(device->context(&context), DW_OK);
    for (int i = 0; i < DW_ACTIVATION_COUNT; i++) {
        problem p = {.m = 19,
                     .n = 37,
                     .k = 23,
                     .bias = i % 2,
                     .residual = i > 1,
                     .activation = (dw_activation)i,
                     .seed = 70 + (uint64_t)i};
        run r;
        open_run(&p, device, &r);
        if (dw__gpu_run(&dw__reference_gemm, NULL, &r.call, context) != DW_OK)
            fail_msg("%s", dw_last_error());
        check(&p, &r);
        close_run(&r);
    }
}

/* ---- rejected calls -------------------------------------------------------------------------------------- */

static void wrong_arguments_are_rejected(void **state) {
    static char memory[4096] __attribute__((aligned(16)));
    dw_gemm good = {.struct_size = sizeof good,
                    .device = device_named("emulator:sm_100a"),
                    .dtype = DW_BF16,
                    .output = DW_BF16,
                    .m = 3,
                    .n = 4,
                    .k = 5,
                    .alpha = 1,
                    .a = {memory, 8},
                    .b = {memory, 8},
                    .d = {memory, 8}};
    (void)state;
    assert_int_equal(dw__gemm_check(&good, true), DW_OK);
    assert_int_equal(dw_gemm_run(NULL), DW_INVALID_ARGUMENT);
#define REFUSED(status, words, change)                                                             \
    do {                                                                                           \
        dw_gemm c = good;                                                                          \
        change;                                                                                    \
        assert_int_equal(dw_gemm_run(&c), status);                                                 \
        if (!strstr(dw_last_error(), words)) fail_msg("%s: %s", #change, dw_last_error());         \
    } while (0)
    REFUSED(DW_INVALID_ARGUMENT, "struct_size is 8", c.struct_size = 8);
    REFUSED(DW_TYPE, "the element type is f32; expected bf16 or f16", c.dtype = DW_F32);
    REFUSED(DW_TYPE, "D's element type is f16; expected bf16 or f32", c.output = DW_F16);
    REFUSED(DW_INVALID_ARGUMENT, "the activation is 7", c.activation = (dw_activation)7);
    REFUSED(DW_INVALID_ARGUMENT, "alpha is", c.alpha = NAN);
    REFUSED(DW_SHAPE, "m is -1; expected 0 to", c.m = -1);
    REFUSED(DW_SHAPE, "n is 1073741824; expected 0 to 536870912",
            (c.n = 1 << 30, c.activation = DW_ACTIVATION_SWIGLU));
    REFUSED(DW_SHAPE, "k is 4294967296", c.k = (int64_t)1 << 32);
    REFUSED(DW_UNSUPPORTED, "split the rows of A", c.m = c.n = 1 << 30);
    REFUSED(DW_INVALID_ARGUMENT, "A is NULL", c.a.data = NULL);
    REFUSED(DW_UNSUPPORTED, "B lies at", c.b.data = memory + 8);
    REFUSED(DW_UNSUPPORTED, "the rows of D are 12 elements apart; expected a multiple of 8",
            c.d.stride = 12);
    REFUSED(DW_UNSUPPORTED, "the rows of D are 6 elements apart; expected a multiple of 4",
            (c.d.stride = 6, c.output = DW_F32));
    REFUSED(DW_INVALID_ARGUMENT, "the rows of A are 0 elements apart and 5 long", c.a.stride = 0);
    REFUSED(DW_INVALID_ARGUMENT, "the rows of B are -8 elements apart", c.b.stride = -8);
    REFUSED(DW_INVALID_ARGUMENT, "bias lies at", c.bias = memory + 1);
    REFUSED(DW_UNSUPPORTED, "the residual lies at", (c.residual = (dw_matrix){memory + 2, 8}));
    REFUSED(DW_UNSUPPORTED, "\"cpu\" runs no kernels", c.device = device_named("cpu"));
    good.a.data = good.b.data = good.d.data = NULL;
    good.a.stride = 4;
    assert_int_equal(dw_gemm_supported(&good), DW_INVALID_ARGUMENT); /* strides count */
}

/* ---- selection ------------------------------------------------------------------------------------------- */

static void cheapest_tile_is_chosen(void **state) {
    static const struct {
        int64_t m, n, k;
        dw_activation activation;
        int ctas, tile_n;
    } cases[] = {
        /* As fast as others, with the fewest bytes. */
        {8192, 8192, 8192, DW_ACTIVATION_NONE, 2, 256},
        /* A single round: small tiles finish first. */
        {1, 4096, 4096, DW_ACTIVATION_NONE, 1, 64},
        {128, 128, 128, DW_ACTIVATION_NONE, 1, 64},
        {128, 64, 64, DW_ACTIVATION_SWIGLU, 1, 128}, /* 64 columns would be half a box of D */
    };
    (void)state;
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_gemm call = {.dtype = DW_BF16,
                        .output = DW_BF16,
                        .m = cases[i].m,
                        .n = cases[i].n,
                        .k = cases[i].k,
                        .activation = cases[i].activation};
        dw__gemm_shape shape = dw__gemm_shape_of(&call, SMS), other = shape;
        const dw__gemm_tile *t = &dw__gemm_tiles[shape.tile];
        if (t->ctas != cases[i].ctas || t->n != cases[i].tile_n)
            fail_msg("case %zu has CTAS %d, TILE_N %d", i, t->ctas, t->n);
        assert_true(dw__gemm_exists(&shape));
        double chosen = dw__gemm_cost_of(&call, &shape, SMS).clocks;
        for (other.tile = 0; other.tile < DW__GEMM_TILES; other.tile++)
            if (dw__gemm_exists(&other))
                assert_true(chosen <= dw__gemm_cost_of(&call, &other, SMS).clocks);
    }
    /* For 8192^3, pairs have 1024 tiles on 74 pairs: 14 rounds of 128 steps of 512 clocks. */
    dw_gemm call = {.m = 8192, .n = 8192, .k = 8192};
    dw__gemm_shape shape = shape_of(2, 256, 6, 0, 0, 0, 0, 0);
    dw__gemm_cost cost = dw__gemm_cost_of(&call, &shape, SMS);
    assert_int_equal(cost.tiles, 1024);
    assert_int_equal(cost.rounds, 14);
    assert_true(cost.clocks == 14.0 * 128 * 512);
}

/* Different variants have different parameters, and unpacking the parameters gives the variant. */
static void parameters_are_unique(void **state) {
    enum { COUNT = DW__GEMM_TILES * DW_ACTIVATION_COUNT * DW__GEMM_OUTPUTS << 5 };
    static uint64_t packed[COUNT];
    (void)state;
    for (int i = 0; i < COUNT; i++) {
        const int at_output = i >> 5, at_activation = at_output / DW__GEMM_OUTPUTS;
        dw__gemm_shape s = {.tile = at_activation / DW_ACTIVATION_COUNT,
                            .activation = (dw_activation)(at_activation % DW_ACTIVATION_COUNT),
                            .output = at_output % DW__GEMM_OUTPUTS,
                            .f16 = i & 1,
                            .bias = i & 2,
                            .residual = i & 4,
                            .scheme_a = i & 8,
                            .scheme_b = i & 16};
        packed[i] = s.params;
        const dw__gemm_shape again = {.params = packed[i]};
        assert_int_equal(again.tile, s.tile);
        assert_int_equal(again.activation, s.activation);
        assert_int_equal(again.output, s.output);
        assert_int_equal(again.f16 | again.bias << 1 | again.residual << 2 | again.scheme_a |
                             again.scheme_b,
                         i & 31);
    }
    for (int i = 0; i < COUNT; i++)
        for (int j = 0; j < i; j++) assert_true(packed[i] != packed[j]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernel_passes),   cmocka_unit_test(wrong_numbers_are_rejected),
        cmocka_unit_test(wrong_tile_is_rejected),  cmocka_unit_test(missing_wait_is_rejected),
        cmocka_unit_test(small_calls_are_right),   cmocka_unit_test(large_call_is_right),
        cmocka_unit_test(residual_may_be_d),       cmocka_unit_test(each_tile_is_right),
        cmocka_unit_test(definition_is_right),     cmocka_unit_test(wrong_arguments_are_rejected),
        cmocka_unit_test(cheapest_tile_is_chosen), cmocka_unit_test(parameters_are_unique),
    };
    /* Except in the children, because the tests compare results themselves. */
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
