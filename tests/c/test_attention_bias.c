/* Masks and biases of dw_attention on an emulated Hopper GPU, its checker on, against the definition in FP64: each axis
 * repeated, numbers and bytes, rows that a mask hides or absorbs, the gradient of the bias. DEEPWELL_TEST_DEVICE=cuda
 * runs the same on a GPU. */
#include "attention_definition.h"

static const problem problems[] = {
    /* T5: a learned bias that repeats along the batch; 8 keys at a time, and one at a time */
    {64, 3, 2, 2, 136, 200, .axes = "1xxx", .gradient = true, .deterministic = true},
    {64, 2, 2, 2, 70, 75, .axes = "1xxx", .gradient = true, .causal = true, .deterministic = true},
    {64, 2, 4, 2, 130, 264, .axes = "xxxx", .gradient = true, .causal = true, .bottom_right = true,
     .deterministic = true, .content = HIDDEN},
    /* absorbed rows have equal probabilities, hidden ones none */
    {64, 2, 2, 1, 66, 136, .axes = "x1xx", .gradient = true, .content = ABSORBED,
     .deterministic = true},
    {64, 2, 2, 2, 66, 136, .axes = "11xx", .gradient = true, .content = LOW},
    {64, 2, 2, 2, 66, 72, .axes = "x1xx", .content = ABSORBED, .causal = true},
    /* padding, ALiBi, one number for a query */
    {64, 2, 2, 2, 129, 77, .axes = "x11x", .content = HIDDEN},
    {64, 2, 2, 2, 64, 130, .axes = "1x1x", .padding = 3},
    {64, 1, 2, 2, 64, 72, .axes = "x1x1"},
    /* bytes */
    {64, 2, 2, 2, 70, 136, .axes = "x11x", .bytes = true, .content = HIDDEN},
    {64, 2, 2, 2, 70, 75, .axes = "x1xx", .bytes = true, .content = HIDDEN, .causal = true},
    /* other kernels: queries are rows above a head dimension of 128; F16; dropout; narrow heads */
    {128, 2, 2, 1, 70, 136, .axes = "1xxx", .gradient = true, .padding = 8, .deterministic = true},
    {192, 2, 2, 2, 70, 104, .axes = "1xxx", .gradient = true, .content = ABSORBED},
    {256, 1, 2, 1, 70, 90, .axes = "1xxx", .gradient = true, .causal = true},
    {72, 2, 2, 2, 66, 72, .axes = "1xxx", .gradient = true, .f16 = true, .content = HIDDEN},
    {64, 2, 2, 2, 130, 136, .axes = "1xxx", .gradient = true, .dropout = 0.2f,
     .deterministic = true},
};

/* ---- tests --------------------------------------------------------------------------------------------- */

static int find_device(void **state) {
    (void)state;
    const char *name = getenv("DEEPWELL_TEST_DEVICE");
#ifdef TEST_NVRTC
    if (!name) setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 0); /* this test compares by itself */
    if (dw_device_find(name ? name : "emulator:sm_90a", &device) != DW_OK)
        fail_msg("%s", dw_last_error());
    return 0;
}

static void needs_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) != DW_OK) skip();
}

static void masks_and_biases_agree_with_the_definition(void **state) {
    (void)state;
    needs_compiler();
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) solve(&problems[i], (int)i);
}

static void refused(dw_attention call, bool backward, dw_status status, const char *words) {
    const dw_status got = backward ? dw_attention_backward(&call) : dw_attention_forward(&call);
    assert_int_equal(got, status);
    if (!strstr(dw_last_error(), words)) fail_msg("%s", dw_last_error());
}

static void what_no_kernel_supports_is_refused(void **state) {
    (void)state;
    run r;
    open_run(&r, &problems[0], 0);
    dw_attention call = r.call;
    call.softcap = 2;
    refused(call, false, DW_UNSUPPORTED, "a bias with a soft cap");
    call = r.call;
    call.bias_kind = (dw_attention_bias_kind)7;
    refused(call, false, DW_INVALID_ARGUMENT, "bias_kind is 7");
    call = r.call;
    call.bias.row = -8;
    refused(call, false, DW_INVALID_ARGUMENT, "the strides of bias are");
    call = r.call;
    call.bias.data = NULL;
    refused(call, false, DW_INVALID_ARGUMENT, "bias is NULL");
    call = r.call;
    call.bias.row = 0;
    refused(call, true, DW_UNSUPPORTED, "a bias that repeats along queries or keys");
    call = r.call;
    call.bias_kind = DW_ATTENTION_VISIBLE;
    refused(call, true, DW_UNSUPPORTED, "d_bias is given for a bias of bytes");
    close_run(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(masks_and_biases_agree_with_the_definition),
        cmocka_unit_test(what_no_kernel_supports_is_refused),
    };
    return cmocka_run_group_tests(tests, find_device, NULL);
}
