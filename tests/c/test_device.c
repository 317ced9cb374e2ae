/* Devices: found by name, memory that is what was asked for. */
#include "base/base.h"
#include "deepwell/device.h"
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
    assert_int_equal(dw_device_find("emulator:sm_100a", &device), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "not supported in this version"));
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
    assert_int_equal(dw_device_allocate(cpu(), SIZE_MAX, &none), DW_OUT_OF_MEMORY); /* is not */
    dw_device_release(cpu(), large, (size_t)5 << 20);
    dw_device_memory_restart(cpu());
    dw_device_memory(cpu(), NULL, &most);
    assert_int_equal(most, before);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_found_by_name),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_too_much),
        cmocka_unit_test(test_memory_is_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
