/* The emulator's peak memory: as many blocks as a GPU has SMs, each with all of its shared and tensor memory, wait for
 * one another. The checker is on and keeps a separate record for every 128 words. */
#include "deepwell/emulator.h"
#include "ptx_file.h"
#include <sys/resource.h>

enum { BLOCKS = 148, SHARED_BYTES = 227 * 1024, TENSOR_BYTES = 128 * 512 * 4 };

static double peak_mib(void) {
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
    return (double)usage.ru_maxrss / 1024;
}

static void waiting_blocks_take_little_memory(void **state) {
    dw_emulator_options chosen = DW_EMULATOR_OPTIONS_DEFAULT;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    dw_emulator *emulator;
    dw_emulator_module *module;
    dw_finding finding;
    char text[1200];
    void *count;
    uint32_t came = 0;
    (void)state;
    char *ptx = read_ptx("fill_all_memory.ptx");
    const double before = peak_mib();
    assert_int_equal(dw_emulator_create("sm_100a", &chosen, &emulator), DW_OK);
    assert_int_equal(dw_emulator_load(emulator, ptx, strlen(ptx), "memory.ptx", &module), DW_OK);
    free(ptx);
    assert_int_equal(dw_emulator_allocate(emulator, sizeof came, &count), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, count, 0, sizeof came), DW_OK);
    options.grid[0] = BLOCKS, options.block[0] = 128, options.shared_bytes = SHARED_BYTES;
    const dw_status status = dw_emulator_launch(module, "f", &options, (void *[]){&count}, NULL);
    if (dw_emulator_finding(emulator, 0, &finding) == DW_OK) {
        dw_finding_text(&finding, text, sizeof text);
        fail_msg("%s", text);
    }
    if (status != DW_OK) fail_msg("%s", dw_last_error());
    assert_int_equal(dw_emulator_copy_out(emulator, &came, count, sizeof came), DW_OK);
    assert_int_equal(came, BLOCKS);
    dw_emulator_destroy(emulator);

    const double taken = peak_mib() - before,
                 memories = (double)BLOCKS * (SHARED_BYTES + TENSOR_BYTES) / 1048576;
    print_message("%.0f MiB, %.0f of them shared and tensor memory\n", taken, memories);
    assert_true(taken > memories); /* all blocks were resident together */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(taken < 200);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(waiting_blocks_take_little_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
