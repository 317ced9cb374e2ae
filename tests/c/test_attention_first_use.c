/* Blackwell's attention through the library's launcher and first-use check, on an emulated GPU: a correct
 * kernel passes, a wrong one is rejected. test_emulator_attention tests results for all shapes. */
#include "emulated_call.h"
#include "kernel/cuda/gpu_attention.h"

enum { HEAD_DIM = 64 };

static const dw__attention_shape shape = {.head_dim = HEAD_DIM, .window = true, .blackwell = true};

static dw__jit_variant fast_variant(void) {
    return dw__attention_variant(&shape, DW__ATTENTION_FORWARD, "", "sm_100f");
}

static const dw__variant *first_use(bool wrong) {
    const dw__jit_variant fast = fast_variant(), reference = dw__attention_reference_variant(
                                                     false, DW__ATTENTION_FORWARD, "sm_100f");
    const dw_device *device;
    const dw__context *context;
    const dw__variant *variant = NULL;
    char *text;
    size_t bytes;
    assert_true(read_ptx(&fast, &text, &bytes));
    carried_count = 0;
    carry(name_of(&fast), text);
    carry_variant(&reference);
    if (wrong) { /* reads Q and K as F16: one wrong constant, which the checker cannot see */
        const unsigned f16 = 1u << 4 | 128u >> 3 << 17 | 128u >> 4 << 24, bf16 = 1u << 7 | 1u << 10;
        replace_constant(text, f16 | bf16, f16);
    }
    REQUIRE(dw_device_find("emulator:sm_100a", &device) == DW_OK);
    REQUIRE(device->context(&context) == DW_OK);
    REQUIRE(dw__variant_of(context, &dw__sm100_attention_forward, shape.params, &variant) == DW_OK);
    return variant;
}

static void correct(void) { REQUIRE(!first_use(false)->disabled); }
static void wrong(void) {
    const dw__variant *variant = first_use(true);
    REQUIRE(variant->disabled);
    fprintf(stderr, "%s\n", variant->reason);
    REQUIRE(
        strstr(variant->reason, "sm100_attention_forward.sm_100f.") &&
        strstr(variant->reason, "disagrees with the reference on Deepwell emulator of sm_100a"));
    REQUIRE(first_use(false)->disabled); /* the result is kept */
}

/* Runs in a child, because a process keeps the result of a first use. */
static void first_use_in_child(void (*check)(void)) {
    const dw__jit_variant fast = fast_variant();
    need_ptx(&fast);
    in_child(check);
}

static void correct_kernel_passes(void **state) {
    (void)state;
    first_use_in_child(correct);
}
static void wrong_kernel_is_rejected(void **state) {
    (void)state;
    first_use_in_child(wrong);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernel_passes),
        cmocka_unit_test(wrong_kernel_is_rejected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
