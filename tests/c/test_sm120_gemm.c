/* The GEMM of consumer and workstation Blackwell GPUs (cuda/sm120/sm120_gemm.cu) through the library on an emulated
 * one, with the checker on, compared with sums in double. Kernels are compiled when they are first used. */
#include "library_gemm.h"

static const char gpu[] = "emulator:sm_120a";

/* ---- calls -------------------------------------------------------------------------------------------- */

static void small_calls_are_right(void **state) {
    (void)state;
    expect_small_calls_right(gpu);
}

/* Every tile with every form of its epilogue and operands, with so few SMs that blocks compute several tiles. */
static void each_tile_is_right(void **state) {
    static const struct {
        int f16, f32_output, bias, residual, turned_a, turned_b;
        dw_activation activation;
    } forms[] = {
        {0, 0, 0, 0, 0, 0, DW_ACTIVATION_NONE},      {1, 0, 1, 1, 0, 0, DW_ACTIVATION_SWIGLU},
        {0, 1, 1, 1, 0, 0, DW_ACTIVATION_GELU_TANH}, {0, 1, 0, 1, 0, 0, DW_ACTIVATION_SWIGLU},
        {0, 0, 0, 0, 0, 1, DW_ACTIVATION_NONE},      {1, 1, 0, 0, 1, 1, DW_ACTIVATION_NONE},
        {0, 0, 1, 1, 1, 0, DW_ACTIVATION_NONE}};
    const dw_device *device = device_named(gpu);
    const dw__context *context;
    (void)state;
    need_compiler();
    assert_int_equal(device->context(&context), DW_OK);
    dw__context few = *context;
    few.sm_count = 2;
    for (int tile = 0; tile < DW__SM120_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(forms); i++) {
            const dw__sm120_tile *t = &dw__sm120_tiles[tile];
            const dw__variant *variant;
            if (t->scaled) continue;
            problem p = {.m = t->m + 61,
                         .n = t->n + 37,
                         .k = 331,
                         .f16 = forms[i].f16,
                         .f32_output = forms[i].f32_output,
                         .bias = forms[i].bias,
                         .residual = forms[i].residual,
                         .turned_a = forms[i].turned_a,
                         .turned_b = forms[i].turned_b,
                         .integers = i % 2,
                         .activation = forms[i].activation,
                         .seed = 40 + i};
            const dw__gemm_turned turned = {p.turned_a, p.turned_b};
            run r;
            open_run(&p, device, &r);
            assert_int_equal(dw__gemm_check_turned(&r.call, turned, true), DW_OK);
            dw__gemm_shape shape = dw__sm120_shape_of(&r.call, turned, 2);
            shape.tile = (uint64_t)tile;
            if (dw__variant_of(context, &dw__sm120_gemm, shape.params, &variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            if (dw__sm120_gemm.enqueue(&r.call, &few, variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            check(&p, &r);
            close_run(&r);
        }
}

static void residual_may_be_d(void **state) {
    (void)state;
    expect_residual_may_be_d(gpu);
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

static const problem small_one = {.m = 67, .n = 41, .k = 129, .bias = true, .seed = 4};

/* The PTX of the kernel that computes `small_one`. */
static char *small_text(dw__jit_variant *variant) {
    run r;
    dw__text source = {0};
    void *image;
    size_t bytes;
    open_run(&small_one, device_named(gpu), &r);
    const dw__gemm_shape shape = dw__sm120_shape_of(&r.call, (dw__gemm_turned){false, false}, 188);
    *variant = dw__sm120_variant(&shape);
    REQUIRE(dw__jit_expand(variant->source, &source) == DW_OK);
    REQUIRE(dw__jit_compile(variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL) == DW_OK);
    dw__text_free(&source);
    close_run(&r);
    return image;
}

/* Runs a call whose kernel is rejected with `words`: the reference computes it, and the log reports it once. */
static void expect_refused(const char *words) {
    run r;
    open_run(&small_one, device_named(gpu), &r);
    REQUIRE(dw_gemm_supported(&r.call) == DW_UNSUPPORTED);
    REQUIRE(strstr(dw_last_error(), words) && strstr(dw_last_error(), "is not used"));
    for (int i = 0; i < 2; i++) {
        REQUIRE(dw_gemm_run(&r.call) == DW_OK);
        check(&small_one, &r);
    }
    REQUIRE(lines == 1 && strstr(logged, words));
    close_run(&r);
}

static void replace_all(char *text, const char *was, const char *now) {
    REQUIRE(strlen(was) == strlen(now) && strstr(text, was));
    for (char *at = strstr(text, was); at; at = strstr(at, was)) memcpy(at, now, strlen(now));
}

static void keep_correct(void) {
    static const problem others[] = {
        {.m = 5, .n = 9, .k = 70, .f16 = true, .activation = DW_ACTIVATION_SWIGLU, .seed = 9},
        {.m = 5, .n = 9, .k = 70, .f32_output = true, .residual = true, .seed = 9}};
    const dw__context *context;
    const dw__variant *variant;
    REQUIRE(device_named(gpu)->context(&context) == DW_OK);
    run r;
    open_run(&small_one, device_named(gpu), &r);
    REQUIRE(dw_gemm_supported(&r.call) == DW_OK && dw_gemm_run(&r.call) == DW_OK);
    check(&small_one, &r);
    for (size_t i = 0; i < DW_COUNT(others); i++) expect_right(&others[i], gpu);
    const dw__gemm_turned turned = {true, true};
    r.call.a.stride = r.call.b.stride = 72;
    REQUIRE(dw__sm120_prepare(&r.call, turned, context, &variant) == DW_OK && !variant->disabled);
    REQUIRE(lines == 0);
    close_run(&r);
}
static void correct_kernels_pass(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_correct);
}

/* Operands read as F16, which the checker cannot see. */
static void keep_wrong_elements(void) {
    dw__jit_variant variant;
    char *text = small_text(&variant);
    replace_all(text, "f32.bf16.bf16.f32", "f32.f16.f16.f32  ");
    carry(name_of(&variant), text);
    expect_refused("disagrees with the reference on Deepwell emulator of sm_120a: D[0][0]");
}
/* Fragments are loaded before their stage has arrived. */
static void keep_without_wait(void) {
    dw__jit_variant variant;
    char *text = small_text(&variant);
    take_out(text, "<ldmatrix");
    carry(name_of(&variant), text);
    expect_refused("failed on Deepwell emulator of sm_120a");
}
static void wrong_kernels_are_rejected(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_wrong_elements);
    in_child(keep_without_wait);
}

/* ---- selection ------------------------------------------------------------------------------------------- */

static void cheapest_tile_is_chosen(void **state) {
    static const struct {
        int64_t m, n, k;
        dw_activation activation;
        int tile_m;
    } cases[] = {{8192, 8192, 8192, DW_ACTIVATION_NONE, 128},
                 {4096, 4096, 4096, DW_ACTIVATION_NONE, 128},
                 {8192, 4096, 4096, DW_ACTIVATION_SWIGLU, 128},
                 /* A single round: small tiles finish first. */
                 {1, 4096, 4096, DW_ACTIVATION_NONE, 64},
                 {128, 128, 128, DW_ACTIVATION_NONE, 64}};
    (void)state;
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        const dw_gemm call = {.dtype = DW_BF16,
                              .output = DW_BF16,
                              .m = cases[i].m,
                              .n = cases[i].n,
                              .k = cases[i].k,
                              .activation = cases[i].activation};
        const dw__gemm_turned turned = {false, false};
        dw__gemm_shape shape = dw__sm120_shape_of(&call, turned, 188), other = shape;
        if (dw__sm120_tiles[shape.tile].m != cases[i].tile_m)
            fail_msg("case %zu has tiles of %d rows", i, dw__sm120_tiles[shape.tile].m);
        const double chosen = dw__sm120_cost_of(&call, &shape, 188).clocks;
        for (other.tile = 0; other.tile < DW__SM120_TILES; other.tile++)
            if (dw__sm120_exists(&other))
                assert_true(chosen <= 1.125 * dw__sm120_cost_of(&call, &other, 188).clocks);
    }
}

/* Every variant's shared memory fits, with as many blocks as an SM is to hold: 100 KiB, of which each block costs 1. */
static void tiles_fit(void **state) {
    static const dw_scheme schemes[] = {DW_SCHEME_BF16, DW_SCHEME_MXFP8, DW_SCHEME_MXFP4,
                                        DW_SCHEME_NVFP4};
    (void)state;
    for (int tile = 0; tile < DW__SM120_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(schemes); i++)
            for (int swiglu = 0; swiglu < 2; swiglu++) {
                const dw__gemm_shape s = {.tile = (uint64_t)tile,
                                          .scheme_a = schemes[i],
                                          .scheme_b = schemes[i],
                                          .activation =
                                              swiglu ? DW_ACTIVATION_SWIGLU : DW_ACTIVATION_NONE};
                if (!dw__sm120_exists(&s)) continue;
                assert_true(dw__sm120_shared_bytes(&s) <= DW_SM120_MOST_SHARED);
                assert_true((int)(dw__sm120_shared_bytes(&s) + 1024) *
                                dw__sm120_tiles[tile].blocks <=
                            100 << 10);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_pass),
        cmocka_unit_test(wrong_kernels_are_rejected),
        cmocka_unit_test(small_calls_are_right),
        cmocka_unit_test(each_tile_is_right),
        cmocka_unit_test(residual_may_be_d),
        cmocka_unit_test(cheapest_tile_is_chosen),
        cmocka_unit_test(tiles_fit),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
