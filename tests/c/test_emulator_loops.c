/* Loops that never end are told from those that take long, whatever the number of blocks, and soon. */
#include "deepwell/threads.h"
#include "emulator_findings.h"

#define HEAD                                                                                       \
    ".version 8.7\n.target sm_90a\n.address_size 64\n.shared .align 8 .b64 barrier;\n"             \
    ".visible .entry f(.param .u64 out)\n{ .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 "         \
    "%rd<9>;\n"                                                                                    \
    ".local .align 8 .b8 own[8];\n"                                                                \
    "ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;\n"

enum { WORDS = 64 };

typedef struct program {
    const char *name, *body;
    uint32_t blocks, threads;
    uint64_t endless; /* 0: the default */
} program;

/* Memory begins as zeros. Returns the launch's status; `finding`: the first. */
static dw_status run(const program *p, int threads, uint32_t *out, dw_finding *finding,
                     uint64_t *executed) {
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    dw_emulator_launch_options launch = DW_EMULATOR_LAUNCH_DEFAULT;
    dw_emulator *emulator;
    dw_emulator_module *module;
    void *memory;
    char text[4000];
    options.endless = p->endless;
    options.threads = threads;
    options.multiprocessors = 8;
    snprintf(text, sizeof text, "%s%s\nret; }\n", HEAD, p->body);
    assert_int_equal(dw_emulator_create("sm_90a", &options, &emulator), DW_OK);
    assert_int_equal(dw_emulator_multiprocessors(emulator), 8);
    if (dw_emulator_load(emulator, text, strlen(text), "test.ptx", &module) != DW_OK)
        fail_msg("%s: %s", p->name, dw_last_error());
    assert_int_equal(dw_emulator_allocate(emulator, 4 * WORDS, &memory), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, memory, 0, 4 * WORDS), DW_OK);
    launch.grid[0] = p->blocks;
    launch.block[0] = p->threads;
    const dw_status status =
        dw_emulator_launch(module, "f", &launch, (void *[]){&memory}, executed);
    *finding = (dw_finding){0};
    if (dw_emulator_finding_count(emulator) > 0)
        assert_int_equal(dw_emulator_finding(emulator, 0, finding), DW_OK);
    assert_int_equal(dw_emulator_copy_out(emulator, out, memory, 4 * WORDS), DW_OK);
    dw_emulator_destroy(emulator);
    return status;
}

#define FEW 4000000 /* operations of a warp that is stopped soon, of all its lanes */

static void endless_loops_are_stopped(void **state) {
    (void)state;
    static const program programs[] = {
        {"a predicate that nobody wrote", "$l: @!%p3 bra $l;", 1, 32, 0},
        {"a flag that nobody sets, by one lane; the others wait for it",
         "setp.ne.u32 %p1, %r1, 0; @%p1 bra $end;\n"
         "$l: ld.volatile.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra $l;\n"
         "$end: bar.warp.sync -1;",
         1, 32, 0},
        {"a lock that nobody frees",
         "$l: atom.global.cas.b32 %r3, [%rd1], 0, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra $l;", 1, 64,
         0},
        {"writes what is there", "$l: st.global.u32 [%rd1], 0; bra.uni $l;", 1, 32, 0},
        {"a flag of its own memory",
         "st.local.u32 [own], 7;\n$l: ld.local.u32 %r3, [own]; st.local.u32 [own], %r3;\n"
         "setp.eq.u32 %p1, %r3, 7; @%p1 bra $l;",
         1, 32, 0},
        {"a phase that is tested for",
         "setp.ne.u32 %p1, %r1, 0; @%p1 bra $end; mbarrier.init.shared.b64 [barrier], 2;\n"
         "mbarrier.arrive.shared.b64 _, [barrier];\n"
         "$l: mbarrier.test_wait.parity.shared.b64 %p2, [barrier], 0; @!%p2 bra $l;\n$end:",
         1, 32, 0},
        {"some warps at a barrier",
         "shr.u32 %r4, %r1, 5; setp.eq.u32 %p1, %r4, 1; @!%p1 bra $wait;\n"
         "$l: ld.volatile.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra $l;\n"
         "$wait: bar.sync 0;",
         1, 128, 0},
        {"many blocks", "$l: @!%p3 bra $l;", 40, 32, 0},
        {"it counts", "$l: add.u32 %r5, %r5, 1; bra.uni $l;", 1, 32, 60000},
        {"it counts in its own memory",
         "st.local.u32 [own], 0;\n$l: ld.local.u32 %r3, [own]; add.u32 %r3, %r3, 1;\n"
         "st.local.u32 [own], %r3; bra.uni $l;",
         1, 1, 60000},
        {"blocks that count", "$l: add.u32 %r5, %r5, 1; bra.uni $l;", 5, 32, 60000},
        /* Something happens in each round. */
        {"a barrier each time", "$l: bar.sync 0; bra.uni $l;", 1, 128, 10000},
        {"an atomic addition", "$l: atom.global.add.u32 %r3, [%rd1], 1; bra.uni $l;", 1, 64, 10000},
        {"a store that changes", "$l: add.u32 %r5, %r5, 1; st.global.u32 [%rd1], %r5; bra.uni $l;",
         3, 32, 10000},
        {"one that ends, one that does not",
         "setp.lt.u32 %p1, %r1, 32; @%p1 bra $end;\n"
         "st.shared.u32 [barrier], 0;\n$l: atom.shared.add.u32 %r3, [barrier], 1; bra.uni "
         "$l;\n$end:",
         2, 64, 10000},
    };
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) {
        const program *p = &programs[i];
        for (int threads = 1; threads <= 3; threads += 2) {
            uint32_t out[WORDS];
            dw_finding finding;
            uint64_t executed;
            if (run(p, threads, out, &finding, &executed) != DW_INTERNAL)
                fail_msg("%s: it ended", p->name);
            if (!finding.kind || strcmp(finding.kind, "deadlock") != 0 ||
                (!strstr(finding.what, "in a loop that does not end") &&
                 !strstr(finding.what, "waiting for mbarrier 0x400: 1 of 2 arrivals to come")))
                fail_msg("%s: %s %s", p->name, finding.kind ? finding.kind : "", finding.what);
            if (executed / p->blocks > (uint64_t)FEW * (p->threads + 31) / 32)
                fail_msg("%s: %llu operations", p->name, (unsigned long long)executed);
        }
    }
}

static void long_loops_are_not(void **state) {
    (void)state;
    static const struct {
        program program;
        uint32_t expected; /* in word 0 */
    } cases[] = {
        {{"a long way to a flag",
          "setp.ne.u32 %p1, %r1, 0; @%p1 bra $end; setp.eq.u32 %p2, %r2, 0; @%p2 bra $wait;\n"
          "mov.u32 %r5, 0;\n$l: add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 500000; @%p3 bra $l;\n"
          "st.volatile.global.u32 [%rd1+4], %r5; bra.uni $end;\n"
          "$wait: ld.volatile.global.u32 %r3, [%rd1+4]; setp.eq.u32 %p4, %r3, 0; @%p4 bra $wait;\n"
          "st.global.u32 [%rd1], %r3;\n$end:",
          2, 32, 0},
         500000},
        {{"turns of two blocks",
          "setp.ne.u32 %p1, %r1, 0; @%p1 bra $end; mov.u32 %r5, 0;\n"
          "$turn: shl.b32 %r6, %r5, 1; add.u32 %r6, %r6, %r2;\n"
          "$wait: ld.volatile.global.u32 %r3, [%rd1]; setp.ne.u32 %p2, %r3, %r6; @%p2 bra $wait;\n"
          "add.u32 %r6, %r6, 1; st.volatile.global.u32 [%rd1], %r6;\n"
          "add.u32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 70; @%p3 bra $turn;\n$end:",
          2, 32, 0},
         140},
        {{"a block that begins when others have ended",
          "setp.ne.u32 %p1, %r1, 0; @%p1 bra $end; atom.global.add.u32 %r3, [%rd1], 1;\n"
          "setp.ne.u32 %p2, %r2, 0; @%p2 bra $end;\n"
          "$wait: ld.volatile.global.u32 %r3, [%rd1]; setp.lt.u32 %p2, %r3, 30; @%p2 bra $wait;\n"
          "$end:",
          30, 32, 0},
         30},
        {{"a clock that runs out",
          "mov.u64 %rd2, %clock64;\n"
          "$l: mov.u64 %rd3, %clock64; sub.u64 %rd4, %rd3, %rd2; setp.lt.u64 %p1, %rd4, 300000;\n"
          "@%p1 bra $l; st.global.u32 [%rd1], 5;",
          1, 1, 0},
         5},
        {{"fewer operations than are taken to be endless",
          "mov.u32 %r5, 0;\n$l: add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 100000; @%p1 bra $l;\n"
          "st.global.u32 [%rd1], %r5;",
          3, 64, 2000000},
         100000},
        {{"fewer operations of a warp in which something happens",
          "mov.u32 %r5, 0;\n$l: bar.sync 0; atom.global.add.u32 %r3, [%rd1], 1; add.u32 %r5, %r5, "
          "1;\n"
          "setp.lt.u32 %p1, %r5, 20000; @%p1 bra $l;\n",
          1, 64, 60000},
         64 * 20000},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int threads = 1; threads <= 3; threads += 2) {
            uint32_t out[WORDS];
            dw_finding finding;
            if (run(&cases[i].program, threads, out, &finding, NULL) != DW_OK)
                fail_msg("%s: %s: %s", cases[i].program.name, dw_last_error(), finding.what);
            assert_int_equal(out[0], cases[i].expected);
            assert_null(finding.kind);
        }
}

static void options_are_checked(void **state) {
    dw_emulator *emulator = NULL;
    (void)state;
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    options.size = offsetof(dw_emulator_options, threads); /* as it was at first */
    options.threads = -7;
    assert_int_equal(dw_emulator_create("sm_100a", &options, &emulator), DW_OK);
    assert_int_equal(dw_emulator_multiprocessors(emulator), 148);
    dw_emulator_destroy(emulator);
    options.size--;
    assert_int_equal(dw_emulator_create("sm_100a", &options, &emulator), DW_INVALID_ARGUMENT);
    options.size = sizeof options;
    assert_int_equal(dw_emulator_create("sm_100a", &options, &emulator), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "-7 threads"));
    options.threads = 0;
    options.multiprocessors = 1025;
    assert_int_equal(dw_emulator_create("sm_100a", &options, &emulator), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "1025 multiprocessors"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(endless_loops_are_stopped),
        cmocka_unit_test(long_loops_are_not),
        cmocka_unit_test(options_are_checked),
    };
    dw_set_threads(3); /* whatever the machine has */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
