/* Attention on consumer and workstation Blackwell GPUs (cuda/sm120) through the library on an emulated one, with the
 * checker on, against the definition in FP64. Kernels are compiled when they are first used. */
#include "attention_definition.h"
#include "kernel/cuda/gpu_attention.h"

static const problem problems[] = {
    /* one element; primes; one past a tile; heads that share keys; other strides; rows that see no key */
    {64, 1, 1, 1, 1, 1, .f16 = false},
    {64, 2, 4, 2, 131, 67, .rows_first = true},
    {128, 1, 2, 1, 70, 131, .causal = true, .bottom_right = true},
    {64, 1, 1, 1, 130, 70, .causal = true, .bottom_right = true},
    {72, 1, 2, 2, 66, 135, .f16 = true, .causal = true, .window = 20, .rows_first = true,
     .dropout = 0.2f},
    {128, 1, 1, 1, 129, 65, .f16 = true},
    /* forward alone */
    {64, 1, 2, 2, 70, 136, .axes = "1xxx", .content = HIDDEN, .inputs_only = true},
    {96, 1, 2, 1, 66, 75, .axes = "x1xx", .bytes = true, .content = HIDDEN, .causal = true,
     .dropout = 0.2f, .inputs_only = true},
    {128, 1, 1, 1, 66, 90, .softcap = 2.0f, .dropout = 0.2f, .inputs_only = true},
};

static int find_rtx(void **state) {
    (void)state;
#ifdef TEST_NVRTC
    setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    setenv("DEEPWELL_BLACKWELL", "try", 1);
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1); /* this test compares by itself */
    return dw_device_find("emulator:sm_120a", &device) == DW_OK ? 0 : -1;
}
static void need_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) != DW_OK) skip();
}

static void both_passes_agree_with_the_definition(void **state) {
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(problems); i++) solve(&problems[i], (int)i);
}

/* Gradients have the same bits in every run. */
static void gradients_repeat(void **state) {
    enum { CHECKED = DQ };
    run r;
    void *first[3];
    (void)state;
    need_compiler();
    open_run(&r, &problems[1], 1);
    assert_int_equal(dw_attention_forward(&r.call), DW_OK);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(dw_attention_backward(&r.call), DW_OK);
        for (int i = 0; i < 3; i++) {
            const array *a = &r.of[CHECKED + i];
            fetch(a);
            if (again) assert_memory_equal(first[i], a->host, a->count * a->size);
            if (again)
                free(first[i]);
            else
                assert_non_null(first[i] = malloc(a->count * a->size)),
                    memcpy(first[i], a->host, a->count * a->size);
        }
    }
    close_run(&r);
}

/* Every query gives one key its whole weight: that key's value gets all gradients, and nothing is infinite, although
 * the rounding of scores and LSE is by itself larger than any exponent. */
static void gradients_of_large_scores_are_finite(void **state) {
    static const problem large = {64, 1, 2, 2, 70, 135, .f16 = false};
    static const float largest[] = {3e4f, 133120.0f, 0x1p30f};
    enum { CHOSEN = 77, DIM = 64 };
    (void)state;
    need_compiler();
    for (size_t n = 0; n < DW_COUNT(largest); n++) {
        run r;
        open_run(&r, &large, 2);
        for (size_t i = 0; i < r.of[Q].count; i++)
            ((uint16_t *)r.of[Q].host)[i] = to_half(&r, largest[n]);
        for (size_t i = 0; i < r.of[K].count; i++)
            ((uint16_t *)r.of[K].host)[i] =
                to_half(&r, i / DIM % 135 == CHOSEN ? largest[n] : largest[n] / 2);
        send(&r.of[Q]), send(&r.of[K]);
        assert_int_equal(dw_attention_forward(&r.call), DW_OK);
        assert_int_equal(dw_attention_backward(&r.call), DW_OK);
        for (int which = DQ; which <= DV; which++) fetch(&r.of[which]);
        for (int which = DQ; which <= DK; which++)
            for (size_t i = 0; i < r.of[which].count; i++)
                assert_true(isfinite(number(&r, &r.of[which], (int64_t)i)));
        for (int h = 0; h < 2; h++)
            for (int j = 0; j < 135; j++)
                for (int d = 0; d < DIM; d++) {
                    const int64_t at = place(&r, DV, 0, h, j) + d;
                    double exact = 0, size = 0;
                    for (int i = 0; i < 70 && j == CHOSEN; i++) {
                        const double x = number(&r, &r.of[D_O], place(&r, D_O, 0, h, i) + d);
                        exact += x, size += fabs(x);
                    }
                    /* a sum of 70 terms in F32, rounded once */
                    const double allowed = 0x1p-8 * fabs(exact) + 70 * 0x1p-23 * size;
                    if (!(fabs(number(&r, &r.of[DV], at) - exact) <= allowed))
                        fail_msg("%g: dv[%d, %d, %d] is %g; expected %g", (double)largest[n], h, j,
                                 d, number(&r, &r.of[DV], at), exact);
                }
        close_run(&r);
    }
}

/* ---- what is refused --------------------------------------------------------------------------------- */

static void expect_refused(dw_attention call, bool backward, const char *words) {
    assert_int_equal(dw_attention_supported(&call, backward), DW_UNSUPPORTED);
    if (!strstr(dw_last_error(), words)) fail_msg("%s", dw_last_error());
}
static void what_no_kernel_supports_is_refused(void **state) {
    run r;
    (void)state;
    open_run(&r, &problems[0], 0);
    dw_attention call = r.call;
    call.softcap = 2.0f;
    expect_refused(call, true,
                   "there is no kernel for a soft cap in backward on 12.0 (RTX 50, RTX PRO)");
    call = r.call;
    call.head_dim = 136;
    call.q.row = call.k.row = call.v.row = call.o.row = 136;
    expect_refused(call, false, "head dimensions above 128 on 12.0");
    unsetenv("DEEPWELL_BLACKWELL");
    expect_refused(r.call, false, "only with DEEPWELL_BLACKWELL=try");
    setenv("DEEPWELL_BLACKWELL", "try", 1);
    close_run(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_passes_agree_with_the_definition),
        cmocka_unit_test(gradients_repeat),
        cmocka_unit_test(gradients_of_large_scores_are_finite),
        cmocka_unit_test(what_no_kernel_supports_is_refused),
    };
    return cmocka_run_group_tests(tests, find_rtx, NULL);
}
