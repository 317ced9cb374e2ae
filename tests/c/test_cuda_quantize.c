/* Block quantization up to the driver, which is a fake: the grid and parameters of each launch, and first
 * uses that fail. test_quantized_gemm checks results. */
#include "common/quantize_params.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/gpu_quantize.h"

static int maps_of(const char *name) {
    (void)name;
    fake->params_bytes = sizeof(dw_quantize_params);
    return 0;
}

/* Only the kernel reads this memory. */
static void *address(uint64_t number) { return (void *)(uintptr_t)(number << 32); }

static dw_quantize plain_call(void) {
    return (dw_quantize){.struct_size = sizeof(dw_quantize),
                         .dtype = DW_F16,
                         .scheme = DW_SCHEME_MXFP4,
                         .rows = 300,
                         .cols = 1000,
                         .source = address(1),
                         .row_stride = 1003,
                         .along_rows = {1, address(2), 512, address(3)},
                         .along_cols = {1, address(4), 160, address(5)},
                         .stream = folder};
}

static void test_launch(void **state) {
    (void)state;
    dw_quantize call = plain_call();
    dw_quantize_params p;
    fake->launch_count = 0;
    assert_int_equal(dw_quantize_run(&call), DW_OK);
    assert_int_equal(fake->launch_count, 1);
    const fake_launch *launch = &fake->launches[0];
    memcpy(&p, launch->params, sizeof p);
    assert_string_equal(launch->name, "quantize_blocks");
    assert_ptr_equal(launch->stream, folder);
    assert_int_equal(launch->grid[0], 3 * 8); /* tiles of 128 x 128 */
    assert_int_equal(launch->block[0], DW_QUANTIZE_THREADS);
    assert_ptr_equal(p.source, call.source);
    assert_int_equal(p.row_stride, 1003);
    assert_int_equal(p.rows, 300);
    assert_int_equal(p.columns, 1000);
    assert_ptr_equal(p.along_rows.codes, address(2));
    assert_int_equal(p.along_rows.stride, 512);
    assert_ptr_equal(p.along_rows.scales, address(3));
    assert_ptr_equal(p.along_columns.codes, address(4));
    assert_ptr_equal(p.amax, NULL);

    /* NVFP4 with a given tensor scale: still one launch. */
    call.scheme = DW_SCHEME_NVFP4, call.tensor_scale = address(6);
    assert_int_equal(dw_quantize_run(&call), DW_OK);
    assert_int_equal(fake->launch_count, 2);
    memcpy(&p, fake->launches[1].params, sizeof p);
    assert_ptr_equal(p.tensor_scale, address(6));
    assert_ptr_equal(p.amax, NULL);
}

static void use_other_gpu(void *capability) {
    const dw_quantize call = plain_call();
    fake->capability = *(int *)capability;
    CHILD_REQUIRE(dw_quantize_run(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "quantize (300 x 1000, f16 to mxfp4 along rows and "));
    CHILD_REQUIRE(strstr(dw_last_error(), "these kernels are for 9.0, 10.0, 10.3 and 12.0"));
    CHILD_REQUIRE(fake->launch_count == 0 && fake->loads == 0);
}
static void test_other_gpus(void **state) {
    int capabilities[] = {80, 110, 121};
    (void)state;
    for (size_t i = 0; i < DW_COUNT(capabilities); i++)
        expect_child(start_child(use_other_gpu, &capabilities[i]));
}

/* ---- first use ----------------------------------------------------------------------------------- */

static void check_first_uses(void) {
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    fake->launch_count = fake->relaxed = 0;
}

/* Uses another kernel than those that the parent has loaded. */
static dw_quantize other_call(void) {
    dw_quantize call = plain_call();
    call.square = 1;
    return call;
}

/* A kernel that writes nothing is rejected, and so is every call with it. */
static void wrong_kernel_is_rejected(void *unused) {
    (void)unused;
    check_first_uses();
    const dw_quantize call = other_call();
    for (int i = 0; i < 2; i++) {
        CHILD_REQUIRE(dw_quantize_run(&call) == DW_UNSUPPORTED);
        CHILD_REQUIRE(
            strstr(dw_last_error(), "disagrees with the definition on Fake GPU 0: byte 0"));
        CHILD_REQUIRE(fake->launch_count == 1 && fake->memory == 0 && fake->relaxed > 0);
    }
}

/* A failure that prevents the first-use check is an error, not a verdict. */
static void failed_check_is_an_error(void *unused) {
    static const char *const calls[] = {
        "cuModuleLoadData",     "cuMemAlloc_v2",
        "cuStreamCreate",       "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize",
        "cuLaunchKernelEx",     "cuThreadExchangeStreamCaptureMode"};
    (void)unused;
    check_first_uses();
    const dw_quantize call = other_call();
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        fake->failing = calls[i];
        fake->result = 2;
        CHILD_REQUIRE(dw_quantize_run(&call) == DW_OUT_OF_MEMORY);
        fake->failing = NULL;
        CHILD_REQUIRE(fake->memory == 0);
    }
    CHILD_REQUIRE(dw_quantize_run(&call) == DW_UNSUPPORTED);
}

/* Each allocation of a first use fails in turn. */
static void memory_fails(void *unused) {
    (void)unused;
    check_first_uses();
    const dw_quantize call = other_call();
    int failed = 0;
    for (int64_t after = 0;; after++) {
        dw__memory_fail_once(after);
        const dw_status status = dw_quantize_supported(&call);
        const int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        CHILD_REQUIRE(fake->memory == 0);
        CHILD_REQUIRE(status == (failures > 0 ? DW_OUT_OF_MEMORY : DW_UNSUPPORTED));
        failed += failures > 0;
        if (failures == 0) break;
    }
    CHILD_REQUIRE(failed > 3);
}

static void test_first_use(void **state) {
    (void)state;
    expect_child(start_child(wrong_kernel_is_rejected, NULL));
    expect_child(start_child(failed_check_is_an_error, NULL));
    expect_child(start_child(memory_fails, NULL));
}

static int setup(void **state) {
    begin_on_fake_gpu(state);
    fake->capability = 90;
    fake->sm_count = 132;
    fake->maps_of = maps_of;
    return 0;
}
int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_gpus),
        cmocka_unit_test(test_launch),
        cmocka_unit_test(test_first_use),
    };
    return cmocka_run_group_tests(tests, setup, end_on_fake_gpu);
}
