/* The first-use check of attention on consumer and workstation Blackwell GPUs, on an emulated one: a correct kernel
 * passes, a wrong one is rejected. test_sm120_attention compares results. */
#include "deepwell/jit.h"
#include "emulated_call.h"
#include "kernel/cuda/gpu_attention.h"

static const dw_device *device;

static int find_rtx(void **state) {
    (void)state;
#ifdef TEST_NVRTC
    setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    device = device_named("emulator:sm_120a");
    return 0;
}
static void need_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) != DW_OK) skip();
}

static const dw__attention_shape plain = {.head_dim = 64, .rtx = true}, packed = {.head_dim = 64,
                                                                                  .window = true,
                                                                                  .packed = true,
                                                                                  .softcap = true,
                                                                                  .rtx = true};

static const dw__variant *first_use(const dw__kernel *kernel, const dw__attention_shape *shape) {
    const dw__context *context;
    const dw__variant *variant = NULL;
    REQUIRE(device->context(&context) == DW_OK);
    REQUIRE(dw__variant_of(context, kernel, shape->params, &variant) == DW_OK);
    return variant;
}
/* Replaces words of a kernel's PTX. */
static void carry_changed(dw__attention_pass pass, const char *was, const char *now) {
    const dw__jit_variant variant = dw__attention_variant(&plain, pass, "", "sm_120a");
    dw__text source = {0};
    void *image;
    size_t bytes;
    REQUIRE(dw__jit_expand(variant.source, &source) == DW_OK);
    REQUIRE(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL) == DW_OK);
    dw__text_free(&source);
    REQUIRE(strlen(was) == strlen(now) && strstr(image, was));
    for (char *at = strstr(image, was); at; at = strstr(at, was)) memcpy(at, now, strlen(now));
    carry(name_of(&variant), image);
}

static void keep_packed(void) {
    REQUIRE(!first_use(&dw__sm120_attention_forward, &packed)->disabled && lines == 0);
}
/* Operands are read as F16, which the checker cannot see. */
static void keep_wrong_forward(void) {
    carry_changed(DW__ATTENTION_FORWARD, "f32.bf16.bf16.f32", "f32.f16.f16.f32  ");
    const dw__variant *variant = first_use(&dw__sm120_attention_forward, &plain);
    REQUIRE(
        variant->disabled &&
        strstr(variant->reason, "disagrees with the reference on Deepwell emulator of sm_120a"));
}
static void first_uses_tell_right_from_wrong(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_packed);
    in_child(keep_wrong_forward);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_uses_tell_right_from_wrong),
    };
    return cmocka_run_group_tests(tests, find_rtx, NULL);
}
