/* Devices: found by name, with memory of the requested size. */
#include "base/base.h"
#include "deepwell/device.h"
#include "device/device_table.h"
#include "ptx_file.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static const dw_device *cpu(void) {
    const dw_device *device = NULL;
    assert_int_equal(dw_device_find("cpu", &device), DW_OK);
    return device;
}

static void test_found_by_name(void **state) {
    (void)state;
    assert_string_equal(dw_device_name(cpu()), "cpu");
    const dw_device *device = NULL;
    assert_int_equal(dw_device_find("emulator:sm_80", &device), DW_NOT_FOUND);
    assert_non_null(strstr(dw_last_error(), "sm_100a"));
    assert_int_equal(dw_device_find("cpo", &device), DW_NOT_FOUND);
    assert_null(device);
}

static void test_memory(void **state) {
    (void)state;
    const size_t sizes[] = {0, 1, 63, 4096, (2u << 20) - 1, 2u << 20, (2u << 20) + 1, 9999991};
    for (size_t i = 0; i < DW_COUNT(sizes); i++) {
        size_t bytes = sizes[i];
        unsigned char *a = NULL, *b = NULL;
        assert_int_equal(dw_device_allocate(cpu(), bytes, (void **)&a), DW_OK);
        assert_int_equal(dw_device_allocate(cpu(), bytes, (void **)&b), DW_OK);
        assert_int_equal((uintptr_t)a % 64, 0);
        assert_int_equal(dw_device_fill(cpu(), a, 0x5a, bytes), DW_OK);
        assert_int_equal(dw_device_fill(cpu(), b, 0, bytes), DW_OK);
        assert_int_equal(dw_device_copy(cpu(), b, a, bytes), DW_OK);
        for (size_t at = 0; at < bytes; at += bytes / 7 + 1) assert_int_equal(b[at], 0x5a);
        if (bytes > 0) assert_int_equal(b[bytes - 1], 0x5a);
        dw_device_release(cpu(), a, bytes);
        dw_device_release(cpu(), b, bytes);
    }
    dw_device_release(cpu(), NULL, 5);
}

/* Runs a kernel through a GPU's table: checks the values that it writes, and that it fails if the checker has a
 * finding. */
static void test_emulated_gpu(void **state) {
    char *ptx = read_ptx("multiply_thread_index.ptx");
    const dw_device *device = NULL;
    const dw__context *context;
    void *memory, *module, *function, *stream;
    uint32_t n = 7, out[96];
    (void)state;
    assert_int_equal(dw_device_find("emulator:sm_100a", &device), DW_OK);
    assert_string_equal(dw_device_name(device), "emulator:sm_100a");
    assert_int_equal(device->context(&context), DW_OK);
    assert_int_equal(context->capability, 100);
    assert_int_equal(dw_device_allocate(device, sizeof out, &memory), DW_OK);
    assert_int_equal(device->stream_create(&stream), DW_OK);
    assert_int_equal(device->module_load(ptx, "f.ptx", &module), DW_OK);
    free(ptx);
    assert_int_equal(device->module_function(module, "g", &function), DW_NOT_FOUND);
    assert_int_equal(device->module_function(module, "f", &function), DW_OK);
    dw__launch call = {.name = "f",
                       .function = function,
                       .grid = {1, 1, 1},
                       .block = {96, 1, 1},
                       .stream = stream,
                       .arguments = (void *[]){&memory, &n}};
    assert_int_equal(device->launch(&call), DW_OK);
    assert_int_equal(device->copy_out(out, memory, sizeof out, stream), DW_OK);
    for (uint32_t i = 0; i < 96; i++) assert_int_equal(out[i], 7 * i);
    call.block[0] = 97;
    assert_int_equal(device->launch(&call), DW_DEVICE);
    assert_non_null(strstr(dw_last_error(), "out of bounds: kernel f, PTX line 13"));
    device->module_unload(module);
    device->stream_destroy(stream);
    dw_device_release(device, memory, sizeof out);
}

/* A graph of an emulated GPU holds launches with copies of their arguments, and nothing else. */
static void an_emulated_device_replays_launches(void **state) {
    char *ptx = read_ptx("multiply_thread_index.ptx");
    const dw_device *device = NULL;
    void *memory, *module, *function, *stream, *graph = NULL;
    uint32_t n = 7, out[32];
    (void)state;
    assert_int_equal(dw_device_find("emulator:sm_100a", &device), DW_OK);
    assert_int_equal(dw_device_allocate(device, sizeof out, &memory), DW_OK);
    assert_int_equal(dw_device_fill(device, memory, 0, sizeof out), DW_OK);
    assert_int_equal(device->module_load(ptx, "f.ptx", &module), DW_OK);
    free(ptx);
    assert_int_equal(device->module_function(module, "f", &function), DW_OK);
    const int64_t live = dw__memory_live();
    assert_int_equal(device->stream_create(&stream), DW_OK);
    assert_int_equal(device->graph_end(stream, &graph), DW_STATE);
    assert_int_equal(device->graph_begin(NULL), DW_STATE);
    assert_int_equal(device->graph_begin(stream), DW_OK);
    assert_int_equal(device->graph_begin(stream), DW_STATE);
    const dw__launch call = {.name = "f",
                             .function = function,
                             .grid = {1, 1, 1},
                             .block = {32, 1, 1},
                             .stream = stream,
                             .arguments = (void *[]){&memory, &n}};
    assert_int_equal(device->launch(&call), DW_OK);
    assert_int_equal(device->copy_out(out, memory, sizeof out, stream), DW_UNSUPPORTED);
    assert_int_equal(device->graph_end(stream, &graph), DW_OK);
    n = 0; /* the graph has its own */
    assert_int_equal(device->copy_out(out, memory, sizeof out, stream), DW_OK);
    assert_int_equal(out[31], 0); /* recorded, not run */
    assert_int_equal(device->graph_launch(graph, stream), DW_OK);
    assert_int_equal(device->copy_out(out, memory, sizeof out, stream), DW_OK);
    for (uint32_t i = 0; i < 32; i++) assert_int_equal(out[i], 7 * i);
    assert_int_equal(device->graph_begin(stream), DW_OK);
    assert_int_equal(device->launch(&call), DW_OK);
    assert_int_equal(device->graph_launch(graph, stream), DW_UNSUPPORTED);
    device->stream_destroy(stream); /* with what it has recorded */
    device->graph_destroy(graph);
    assert_int_equal(dw__memory_live(), live);
    device->module_unload(module);
    dw_device_release(device, memory, sizeof out);
}

static void test_too_much(void **state) {
    (void)state;
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 60};
    for (size_t i = 0; i < DW_COUNT(sizes); i++) {
        void *memory = NULL;
        assert_int_equal(dw_device_allocate(cpu(), sizes[i], &memory), DW_OUT_OF_MEMORY);
        assert_null(memory);
    }
}

static void test_memory_is_counted(void **state) {
    (void)state;
    size_t before, now, most;
    void *small = NULL, *large = NULL, *none = NULL;
    dw_device_memory_restart(cpu());
    dw_device_memory(cpu(), &before, &most);
    assert_int_equal(before, most);
    assert_int_equal(dw_device_allocate(cpu(), 1000, &small), DW_OK);
    assert_int_equal(dw_device_allocate(cpu(), (size_t)5 << 20, &large), DW_OK);
    dw_device_release(cpu(), small, 1000);
    dw_device_memory(cpu(), &now, &most);
    assert_int_equal(now - before, 5 << 20);
    assert_int_equal(most - before, (5 << 20) + 1000);
    /* Not a name of a device. */
    assert_int_equal(dw_device_allocate(cpu(), SIZE_MAX, &none), DW_OUT_OF_MEMORY);
    dw_device_release(cpu(), large, (size_t)5 << 20);
    dw_device_memory_restart(cpu());
    dw_device_memory(cpu(), NULL, &most);
    assert_int_equal(most, before);
}

/* This also holds if the same line of a kernel was reported before. */
static void every_wrong_launch_of_an_emulated_device_fails(void **state) {
    (void)state;
    static const char wrong[] = ".version 8.7\n.target sm_90a\n.address_size 64\n"
                                ".visible .entry f()\n{ .reg .b64 %rd<2>; .reg .b32 %r<2>;\n"
                                "mov.u64 %rd1, 64;\nmov.u32 %r1, 1;\n"
                                "st.global.u32 [%rd1], %r1;\nret; }\n";
    const dw_device *device = &dw__device_emulator_sm_90a;
    void *module, *function;
    assert_int_equal(device->open(), DW_OK);
    assert_int_equal(device->module_load(wrong, "wrong.ptx", &module), DW_OK);
    assert_int_equal(device->module_function(module, "f", &function), DW_OK);
    const dw__launch launch = {
        .name = "f", .function = function, .grid = {1, 1, 1}, .block = {32, 1, 1}};
    for (int time = 0; time < 2; time++) {
        assert_int_equal(device->launch(&launch), DW_DEVICE);
        assert_non_null(strstr(dw_last_error(), "out of bounds"));
    }
    device->module_unload(module);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_found_by_name),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_emulated_gpu),
        cmocka_unit_test(an_emulated_device_replays_launches),
        cmocka_unit_test(test_too_much),
        cmocka_unit_test(test_memory_is_counted),
        cmocka_unit_test(every_wrong_launch_of_an_emulated_device_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
