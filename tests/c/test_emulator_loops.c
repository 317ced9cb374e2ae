/* The emulator distinguishes endless loops from long ones, quickly, for any number of blocks. */
#include "deepwell/threads.h"
#include "emulator_findings.h"
#include "ptx_file.h"

enum { WORDS = 64 };

typedef struct program {
    const char *name; /* name of the kernel in tests/ptx/loops.ptx */
    uint32_t blocks, threads;
    uint64_t endless; /* 0: the default */
} program;

/* Runs a program with zeroed memory. Returns the launch's status; `finding` receives the first finding. */
static dw_status run(const program *p, int threads, uint32_t *out, dw_finding *finding,
                     uint64_t *executed) {
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    dw_emulator_launch_options launch = DW_EMULATOR_LAUNCH_DEFAULT;
    dw_emulator *emulator;
    dw_emulator_module *module;
    void *memory;
    char *text = read_ptx("loops.ptx");
    options.endless = p->endless;
    options.threads = threads;
    options.multiprocessors = 8;
    assert_int_equal(dw_emulator_create("sm_90a", &options, &emulator), DW_OK);
    assert_int_equal(dw_emulator_multiprocessors(emulator), 8);
    if (dw_emulator_load(emulator, text, strlen(text), "loops.ptx", &module) != DW_OK)
        fail_msg("%s", dw_last_error());
    free(text);
    assert_int_equal(dw_emulator_allocate(emulator, 4 * WORDS, &memory), DW_OK);
    assert_int_equal(dw_emulator_fill(emulator, memory, 0, 4 * WORDS), DW_OK);
    launch.grid[0] = p->blocks;
    launch.block[0] = p->threads;
    const dw_status status =
        dw_emulator_launch(module, p->name, &launch, (void *[]){&memory}, executed);
    *finding = (dw_finding){0};
    if (dw_emulator_finding_count(emulator) > 0)
        assert_int_equal(dw_emulator_finding(emulator, 0, finding), DW_OK);
    assert_int_equal(dw_emulator_copy_out(emulator, out, memory, 4 * WORDS), DW_OK);
    dw_emulator_destroy(emulator);
    return status;
}

#define FEW 4000000 /* most operations, over all lanes, of a warp that is stopped early */

static void endless_loops_are_stopped(void **state) {
    (void)state;
    static const program programs[] = {
        {"a_predicate_that_nobody_wrote", 1, 32, 0},
        {"a_flag_that_nobody_sets", 1, 32, 0},
        {"a_lock_that_nobody_frees", 1, 64, 0},
        {"writes_what_is_there", 1, 32, 0},
        {"a_flag_of_its_own_memory", 1, 32, 0},
        {"a_phase_that_is_tested_for", 1, 32, 0},
        {"some_warps_at_a_barrier", 1, 128, 0},
        {"many_blocks", 40, 32, 0},
        {"it_counts", 1, 32, 60000},
        {"it_counts_in_its_own_memory", 1, 1, 60000},
        {"blocks_that_count", 5, 32, 60000},
        /* Each round of these loops has an effect. */
        {"a_barrier_each_time", 1, 128, 10000},
        {"an_atomic_addition", 1, 64, 10000},
        {"a_store_that_changes", 3, 32, 10000},
        {"one_that_ends_one_that_does_not", 2, 64, 10000},
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
                (!strstr(finding.what, "in an endless loop") &&
                 !strstr(finding.what, "waiting for mbarrier 0x400: 1 of 2 arrivals pending")))
                fail_msg("%s: %s %s", p->name, finding.kind ? finding.kind : "", finding.what);
            if (executed / p->blocks > (uint64_t)FEW * (p->threads + 31) / 32)
                fail_msg("%s: %llu operations", p->name, (unsigned long long)executed);
        }
    }
}

static void long_loops_are_not_stopped(void **state) {
    (void)state;
    static const struct {
        program program;
        uint32_t expected; /* in word 0 */
    } cases[] = {
        {{"a_long_way_to_a_flag", 2, 32, 0}, 500000},
        {{"turns_of_two_blocks", 2, 32, 0}, 140},
        {{"a_block_that_begins_when_others_have_ended", 30, 32, 0}, 30},
        {{"a_clock_that_runs_out", 1, 1, 0}, 5},
        {{"fewer_operations", 3, 64, 2000000}, 100000},
        {{"fewer_operations_with_effects", 1, 64, 60000}, 64 * 20000},
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
    options.struct_size = offsetof(dw_emulator_options, threads); /* as the variable was at first */
    options.threads = -7;
    assert_int_equal(dw_emulator_create("sm_100a", &options, &emulator), DW_OK);
    assert_int_equal(dw_emulator_multiprocessors(emulator), 148);
    dw_emulator_destroy(emulator);
    options.struct_size--;
    assert_int_equal(dw_emulator_create("sm_100a", &options, &emulator), DW_INVALID_ARGUMENT);
    options.struct_size = sizeof options;
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
        cmocka_unit_test(long_loops_are_not_stopped),
        cmocka_unit_test(options_are_checked),
    };
    dw_set_threads(3); /* on any machine */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
