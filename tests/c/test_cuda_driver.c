/* The driver is loaded on first use. Tests each way in which loading can fail, and the device's use of the driver's
 * answers. */
#include "deepwell/device.h"
#include "deepwell/emulator.h"
#include "device/cuda_driver.h"
#include "device/device_table.h"
#include "fake/fake_gpu.h"
#include <pthread.h>

static void expect_failure(const char *part) {
    const dw_device *device = NULL;
    CHILD_REQUIRE(dw_device_find("cuda", &device) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), part));
    CHILD_REQUIRE(device == NULL);
    /* The second call returns the same result. */
    CHILD_REQUIRE(dw_device_find("cuda", &device) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), part));
}

static void no_driver(void *context) {
    (void)context;
    if (dlopen("libcuda.so.1", RTLD_NOW)) _exit(0); /* this machine has a driver */
    expect_failure("there is no NVIDIA driver");
}

static void too_old(void *context) {
    (void)context;
    load_fake_driver();
    fake->version = 11080;
    expect_failure("it supports CUDA 11.8, Deepwell needs CUDA 12.0 (driver 525) or later");
}

static void no_gpu(void *context) {
    (void)context;
    load_fake_driver();
    fake->devices = 0;
    expect_failure("shows no GPU");
}

static void driver_mismatch(void *context) {
    (void)context;
    load_fake_driver();
    fake->failing = "cuInit";
    fake->result = 803;
    expect_failure("restart after updating the driver");
}

static void test_failures(void **state) {
    (void)state;
    void (*const checks[])(void *) = {no_driver, too_old, no_gpu, driver_mismatch};
    for (size_t i = 0; i < DW_COUNT(checks); i++) expect_child(start_child(checks[i], NULL));
}

static void use_device(void *unused) {
    (void)unused;
    const dw_device *device = NULL;
    const dw__context *context = NULL;
    load_fake_driver();
    CHILD_REQUIRE(dw_device_find("cuda", &device) == DW_OK);
    CHILD_REQUIRE(strcmp(dw_device_name(device), "cuda") == 0);

    /* A thread without a context gets the first GPU's primary context; a thread with a context keeps it. */
    CHILD_REQUIRE(device->context(&context) == DW_OK);
    CHILD_REQUIRE(fake->current == 1000 && fake->retains == 1);
    CHILD_REQUIRE(context->capability == 90 && context->sm_count == 132 && context->ordinal == 0);
    CHILD_REQUIRE(context->shared_bytes == 232448 && strcmp(context->name, "Fake GPU 0") == 0);
    const dw__context *first = context;
    fake->current = 1003;
    CHILD_REQUIRE(device->context(&context) == DW_OK);
    CHILD_REQUIRE(fake->current == 1003 && context->ordinal == 3 && context != first);
    CHILD_REQUIRE(context->index != first->index && !context->ptx_only);
    /* The emulator's driver reports that it supports no machine code. */
    fake->current = 1002;
    fake->name = DW_EMULATOR_GPU_NAME "sm_100";
    CHILD_REQUIRE(device->context(&context) == DW_OK && context->ptx_only);
    fake->current = 0;
    CHILD_REQUIRE(device->context(&context) == DW_OK && context == first && fake->retains == 1);

    /* Memory. */
    unsigned char *a = NULL, *b = NULL, host[100] = {0};
    CHILD_REQUIRE(dw_device_allocate(device, 100, (void **)&a) == DW_OK);
    CHILD_REQUIRE(dw_device_allocate(device, 0, (void **)&b) == DW_OK);
    dw_device_release(device, b, 0);
    CHILD_REQUIRE(dw_device_allocate(device, 100, (void **)&b) == DW_OK);
    CHILD_REQUIRE(dw_device_fill(device, a, 0x5a, 100) == DW_OK);
    CHILD_REQUIRE(dw_device_copy(device, b, a, 100) == DW_OK);
    CHILD_REQUIRE(device->copy_out(host, b, 100, NULL) == DW_OK && host[99] == 0x5a);
    dw_device_release(device, a, 100);
    dw_device_release(device, b, 100);
    CHILD_REQUIRE(fake->memory == 0);
    CHILD_REQUIRE(dw_device_allocate(device, (size_t)1 << 41, (void **)&a) == DW_OUT_OF_MEMORY);
    CHILD_REQUIRE(strstr(dw_last_error(), "2199023255552 bytes") &&
                  strstr(dw_last_error(), "CUDA_ERROR_OUT_OF_MEMORY"));

    /* Launches with and without attributes. */
    void *module, *function;
    unsigned char image[64] = "\177ELF";
    CHILD_REQUIRE(device->module_load(image, "test", &module) == DW_OK);
    CHILD_REQUIRE(device->module_function(module, "kernel", &function) == DW_OK);
    CHILD_REQUIRE(device->function_shared(function, "kernel", 100000) == DW_OK);
    CHILD_REQUIRE(device->function_shared(function, "kernel", 300000) != DW_OK);
    dw__launch launch = {.name = "kernel",
                         .function = function,
                         .grid = {4, 2, 1},
                         .block = {128, 1, 1},
                         .shared_bytes = 100000,
                         .stream = image};
    CHILD_REQUIRE(device->launch(&launch) == DW_OK);
    CHILD_REQUIRE(fake->launches[0].attribute_count == 0 && fake->launches[0].stream == image);
    CHILD_REQUIRE(fake->launches[0].grid[1] == 2 && fake->launches[0].shared_bytes == 100000);
    launch.cluster[0] = 2, launch.cluster[1] = launch.cluster[2] = 1;
    launch.dependent = true;
    CHILD_REQUIRE(device->launch(&launch) == DW_OK);
    CHILD_REQUIRE(fake->launches[1].attribute_count == 2 && fake->launches[1].cluster[0] == 2 &&
                  fake->launches[1].dependent == 1);
    int before = -1;
    CHILD_REQUIRE(device->capture_relax(&before) == DW_OK && before == 0);
    device->capture_restore(before);
    CHILD_REQUIRE(device->capture_relax(&before) == DW_OK && before == 0);
}

static void test_device(void **state) {
    (void)state;
    expect_child(start_child(use_device, NULL));
}

/* The message of every failed driver call has its name and the driver's own text. */
static void each_failing(void *unused) {
    static const char *const names[] = {
        "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxGetId",
        "cuCtxGetDevice",  "cuDeviceGetAttribute",     "cuDeviceGetName", "cuDeviceTotalMem_v2"};
    const dw__context *context = NULL;
    (void)unused;
    load_fake_driver();
    for (size_t i = 0; i < DW_COUNT(names); i++) {
        fake->failing = names[i];
        fake->result = 201;
        fake->current = 0;
        CHILD_REQUIRE(dw__device_cuda.context(&context) == DW_STATE);
        CHILD_REQUIRE(strstr(dw_last_error(), "CUDA_ERROR_FAKE (201): as requested"));
    }
    fake->failing = "cuLaunchKernelEx";
    fake->result = 700;
    fake->current = 1000;
    CHILD_REQUIRE(dw__device_cuda.launch(&(dw__launch){
                      .name = "a_kernel", .grid = {7, 1, 1}, .block = {32, 1, 1}}) == DW_DEVICE);
    CHILD_REQUIRE(strstr(dw_last_error(), "launching a_kernel, grid (7, 1, 1), 32 threads") &&
                  strstr(dw_last_error(), "compute-sanitizer"));
    fake->result = 901;
    CHILD_REQUIRE(dw__device_cuda.launch(&(dw__launch){.name = "a_kernel"}) == DW_STATE);
    CHILD_REQUIRE(strstr(dw_last_error(), "graph capture"));
}

static void test_each_failing(void **state) {
    (void)state;
    expect_child(start_child(each_failing, NULL));
}

static void *ask_often(void *contexts) {
    for (uint64_t i = 0; i < 3000; i++) {
        const dw__context *context = NULL;
        if (dw__device_cuda.context(&context) != DW_OK || context->sm_count != 132) return contexts;
    }
    return NULL;
}

/* Several threads look up contexts at once while new ones appear. */
static void many_threads(void *unused) {
    (void)unused;
    pthread_t threads[4];
    load_fake_driver();
    for (int i = 0; i < 4; i++)
        CHILD_REQUIRE(pthread_create(&threads[i], NULL, ask_often, &threads) == 0);
    for (int i = 0; i < 4; i++) {
        void *failed = NULL;
        CHILD_REQUIRE(pthread_join(threads[i], &failed) == 0 && !failed);
    }
    const dw__context *context = NULL;
    for (int i = 1; i < DW__CONTEXTS; i++) {
        fake->current = 1000 + (uint64_t)i;
        CHILD_REQUIRE(dw__device_cuda.context(&context) == DW_OK && context->index == i);
    }
    fake->current = 5000;
    CHILD_REQUIRE(dw__device_cuda.context(&context) == DW_UNSUPPORTED);
}

static void test_many_threads(void **state) {
    (void)state;
    expect_child(start_child(many_threads, NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_each_failing),
        cmocka_unit_test(test_many_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
