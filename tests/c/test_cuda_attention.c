/* The launcher of attention, up to the driver: which kernel, with which grid, shared memory, tensor maps, parameters. */
#include "fake/fake_gpu.h"
#include "kernel/cuda/attention.h"

static char folder[256];

static dw_attention plain_call(void) {
    static char memory[64] __attribute__((aligned(64)));
    const int64_t row = 128, head = 1000 * row, batch = 4 * head;
    dw_attention_tensor tensor = {memory, batch, head, row};
    return (dw_attention){.size = sizeof(dw_attention),
                          .dtype = DW_BF16,
                          .batch = 3,
                          .heads_q = 4,
                          .heads_kv = 2,
                          .rows_q = 1000,
                          .rows_k = 900,
                          .head_dim = 128,
                          .scale = 0.125f,
                          .window_left = -1,
                          .window_right = -1,
                          .q = tensor,
                          .k = tensor,
                          .v = tensor,
                          .o = tensor,
                          .d_o = tensor,
                          .dq = tensor,
                          .dk = tensor,
                          .dv = tensor,
                          .lse = (float *)memory,
                          .stream = memory + 8};
}

static void set_arguments(int maps) {
    fake->argument_count = maps + 1;
    for (int i = 0; i < maps; i++) fake->argument_bytes[i] = 128;
    fake->argument_bytes[maps] = sizeof(dw_attention_params);
}

static void test_forward(void **state) {
    (void)state;
    dw_attention call = plain_call();
    set_arguments(3);
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    const fake_launch *launch = &fake->launches[0];
    assert_string_equal(launch->name, "sm90_attention_forward");
    dw_attention_params p;
    memcpy(&p, launch->arguments[3], sizeof p);
    assert_int_equal(p.group, 2);
}

static int setup(void **state) {
    (void)state;
    load_fake_driver();
    use_fake_compiler(folder, sizeof folder);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    remove_folder(folder);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_forward)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
