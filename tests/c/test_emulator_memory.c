/* What the emulator takes at most: as many blocks as a GPU has multiprocessors, each with all of its shared and its
 * tensor memory, waiting for each other, under the checker, which has something else to remember of every 128 words.
 */
#include "deepwell/emulator.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

enum { BLOCKS = 148, SHARED_BYTES = 227 * 1024, TENSOR_BYTES = 128 * 512 * 4 };

/* Every thread stores to all of shared memory in steps of a barrier, then to its lane of tensor memory, and counts
 * its block when that is done; the last but one thing that it does is to wait for all blocks. */
static const char ptx[] =
    ".version 9.0\n.target sm_100a\n.address_size 64\n"
    ".extern .shared .align 1024 .b8 dynamic[];\n"
    ".visible .entry f(.param .u64 out)\n"
    "{ .reg .pred %p<8>; .reg .b32 %r<40>; .reg .b64 %rd<8>;\n"
    "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, dynamic;\n"
    "setp.ge.u32 %p1, %r1, 32; @%p1 bra $allocated;\n"
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 512;\n"
    "$allocated: bar.sync 0; ld.shared.u32 %r3, [%r2]; bar.sync 0;\n"
    "shl.b32 %r4, %r1, 2; add.u32 %r5, %r2, %r4; mov.u32 %r6, 0;\n"
    "$fill: st.shared.u32 [%r5], %r6; bar.sync 0; add.u32 %r5, %r5, 512; add.u32 %r6, %r6, 1;\n"
    "setp.lt.u32 %p2, %r6, 454; @%p2 bra $fill;\n"
    "shr.u32 %r7, %r1, 5; shl.b32 %r7, %r7, 21; add.u32 %r8, %r3, %r7; mov.u32 %r9, 0;\n"
    "$store: tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, "
    "%r9};\n"
    "tcgen05.wait::st.sync.aligned; add.u32 %r8, %r8, 8; add.u32 %r9, %r9, 1;\n"
    "setp.lt.u32 %p2, %r9, 64; @%p2 bra $store;\n"
    "bar.sync 0; setp.ne.u32 %p3, %r1, 0; @!%p3 red.release.gpu.global.add.u32 [%rd1], 1;\n"
    "$wait: ld.acquire.gpu.global.u32 %r10, [%rd1]; setp.lt.u32 %p4, %r10, 148; @%p4 bra $wait;\n"
    "bar.sync 0; @%p1 bra $end;\n"
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;\n"
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
    "$end: ret; }\n";

static double peak_mib(void) {
    struct rusage usage;
    assert_int_equal(getrusage(RUSAGE_SELF, &usage), 0);
    return (double)usage.ru_maxrss / 1024;
}

static void blocks_that_wait_take_little(void **state) {
    dw_emulator_options chosen = DW_EMULATOR_OPTIONS_DEFAULT;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    dw_emulator *emulator;
    dw_emulator_module *module;
    dw_finding finding;
    char text[1200];
    void *count;
    uint32_t came = 0;
    (void)state;
    const double before = peak_mib();
    assert_int_equal(dw_emulator_create("sm_100a", &chosen, &emulator), DW_OK);
    assert_int_equal(dw_emulator_load(emulator, ptx, sizeof ptx - 1, "memory.ptx", &module), DW_OK);
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
    assert_true(taken > memories); /* they were there together */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_true(taken < 200);
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(blocks_that_wait_take_little)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
