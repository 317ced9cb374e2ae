/* The thread pool: every index once, nesting, fork, concurrent callers, sizes, failures. */
#include "base/pool.h"
#include "deepwell/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka requires the four headers above. */
#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MANY = 1009 };

typedef struct tally {
    _Atomic int runs[MANY];
    _Atomic int bad_workers;
} tally;

static void count_run(void *context, int64_t index, int worker) {
    tally *to = context;
    atomic_fetch_add(&to->runs[index], 1);
    if (worker < 0 || worker >= dw__pool_threads()) atomic_fetch_add(&to->bad_workers, 1);
}

static void expect_each_once(tally *to, int64_t count) {
    assert_int_equal(to->bad_workers, 0);
    for (int64_t index = 0; index < MANY; index++) {
        assert_int_equal(to->runs[index], index < count);
    }
}

static void runs_each_index_once(void **state) {
    (void)state;
    static const int threads[] = {1, 2, 3, 4, 7, 1, 5};
    static const int64_t counts[] = {0, 1, 2, 3, 5, 64, MANY};
    for (size_t t = 0; t < DW_COUNT(threads); t++) {
        assert_int_equal(dw__pool_set_threads(threads[t]), DW_OK);
        assert_int_equal(dw__pool_threads(), threads[t]);
        for (size_t c = 0; c < DW_COUNT(counts); c++) {
            tally to = {0};
            dw__pool_run(counts[c], count_run, &to);
            expect_each_once(&to, counts[c]);
        }
    }
}

static void do_nothing(void *context, int64_t index, int worker) {
    (void)context;
    (void)index;
    (void)worker;
}

/* Workers are stopped while they start, run their first loop, or go to sleep after it. */
static void workers_stop_at_any_moment(void **state) {
    (void)state;
    for (int round = 0; round < 3000; round++) {
        assert_int_equal(dw__pool_set_threads(2 + round % 3), DW_OK);
        dw__pool_run(2 + round % 5, do_nothing, NULL);
        for (volatile int wait = 0; wait < round % 257 * 16; wait++) {
        }
    }
}

typedef struct limited {
    int limit;
    _Atomic int highest;
} limited;

static void note_worker(void *context, int64_t index, int worker) {
    limited *l = context;
    (void)index;
    int seen = atomic_load(&l->highest);
    while (worker > seen && !atomic_compare_exchange_weak(&l->highest, &seen, worker)) continue;
    usleep(50); /* gives the other callers a turn */
}

/* Scratch for two threads still suffices after another caller requests five. */
static void a_limit_holds_whatever_others_set(void **state) {
    (void)state;
    assert_int_equal(dw__pool_set_threads(5), DW_OK);
    for (int limit = 1; limit <= 6; limit++) {
        limited l = {.limit = limit};
        assert_int_equal(dw__pool_limit(limit), 0);
        assert_int_equal(dw__pool_threads(), limit);
        assert_int_equal(dw_get_threads(), 5);
        for (int loop = 0; loop < 20; loop++) dw__pool_run(64, note_worker, &l);
        assert_int_equal(dw__pool_limit(0), limit);
        assert_true(l.highest < limit);
        if (limit > 1) assert_true(l.highest > 0);
    }
    assert_int_equal(dw__pool_threads(), 5);
}

/* Many short loops: each start and end races with workers that go to sleep. */
static void survives_many_short_loops(void **state) {
    (void)state;
    enum { LOOPS = 20000 };
    assert_int_equal(dw__pool_set_threads(4), DW_OK);
    for (int loop = 0; loop < LOOPS; loop++) {
        _Atomic int64_t sum = 0;
        tally to;
        memset(&to, 0, sizeof(_Atomic int) * 8);
        to.bad_workers = 0;
        int64_t count = loop % 7;
        dw__pool_run(count, count_run, &to);
        for (int64_t index = 0; index < count; index++) sum += to.runs[index];
        if (sum != count) fail_msg("loop %d ran %d of %d", loop, (int)sum, (int)count);
        if (loop % 1000 == 0) usleep(1000); /* long enough for the workers to fall asleep */
    }
}

static void write_square(void *context, int64_t index, int worker) {
    (void)worker;
    ((double *)context)[index] = (double)index * (double)index / 3.0;
}

static void results_do_not_depend_on_threads(void **state) {
    (void)state;
    double serial[MANY], parallel[MANY];
    assert_int_equal(dw__pool_set_threads(1), DW_OK);
    dw__pool_run(MANY, write_square, serial);
    for (int threads = 2; threads < 6; threads++) {
        assert_int_equal(dw__pool_set_threads(threads), DW_OK);
        memset(parallel, 0, sizeof parallel);
        dw__pool_run(MANY, write_square, parallel);
        assert_memory_equal(parallel, serial, sizeof serial);
    }
}

typedef struct nest {
    tally inner[8];
    _Atomic int foreign, refused;
} nest;

typedef struct nested_loop {
    tally *to;
    int worker;
    pthread_t thread;
    nest *outer;
} nested_loop;

static void inner_task(void *context, int64_t index, int worker) {
    nested_loop *loop = context;
    if (worker != loop->worker || !pthread_equal(pthread_self(), loop->thread)) {
        atomic_fetch_add(&loop->outer->foreign, 1);
    }
    count_run(loop->to, index, worker);
}

static void outer_task(void *context, int64_t index, int worker) {
    nest *outer = context;
    nested_loop loop = {&outer->inner[index], worker, pthread_self(), outer};
    dw__pool_run(31, inner_task, &loop);
    if (dw__pool_set_threads(2) == DW_STATE) atomic_fetch_add(&outer->refused, 1);
}

static void nested_loops_run_serially_on_their_worker(void **state) {
    (void)state;
    nest *outer = calloc(1, sizeof *outer);
    assert_int_equal(dw__pool_set_threads(3), DW_OK);
    dw__pool_run(8, outer_task, outer);
    for (int index = 0; index < 8; index++) expect_each_once(&outer->inner[index], 31);
    assert_int_equal(outer->foreign, 0);
    assert_int_equal(outer->refused, 8);
    free(outer);
}

enum { CALLERS = 4, ROUNDS = 300 };
static _Atomic int failed_rounds;
static _Atomic int owner_of_worker[DW_POOL_MAX_THREADS];

/* Tasks of two callers never share a worker number at the same time. */
static void exclusive_task(void *context, int64_t index, int worker) {
    int nobody = 0;
    if (!atomic_compare_exchange_strong(&owner_of_worker[worker], &nobody, 1)) failed_rounds++;
    count_run(context, index, worker);
    atomic_store(&owner_of_worker[worker], 0);
}

static void *call_repeatedly(void *argument) {
    int64_t count = 1 + (int64_t)(intptr_t)argument * 5; /* 1 thread as well: the serial path */
    for (int round = 0; round < ROUNDS; round++) {
        tally to = {0};
        dw__pool_run(count, exclusive_task, &to);
        for (int64_t index = 0; index < count; index++) {
            if (to.runs[index] != 1) atomic_fetch_add(&failed_rounds, 1);
        }
    }
    return NULL;
}

static void concurrent_callers_take_turns(void **state) {
    (void)state;
    pthread_t callers[CALLERS];
    failed_rounds = 0;
    assert_int_equal(dw__pool_set_threads(3), DW_OK);
    for (intptr_t at = 0; at < CALLERS; at++) {
        assert_int_equal(pthread_create(&callers[at], NULL, call_repeatedly, (void *)at), 0);
    }
    /* And the number of threads may change between turns. */
    for (int threads = 1; threads < 6; threads++) {
        assert_int_equal(dw__pool_set_threads(1 + threads % 3), DW_OK);
        usleep(1000);
    }
    for (int at = 0; at < CALLERS; at++) pthread_join(callers[at], NULL);
    assert_int_equal(failed_rounds, 0);
}

/* ThreadSanitizer still tracks the parent's threads after a fork, and dies if the child's C library reuses
 * the identity of one of them for a new thread. */
static void skip_under_tsan(void) {
#if defined(__SANITIZE_THREAD__)
    skip();
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
    skip();
#endif
#endif
}

static int run_in_child(void) {
    tally to = {0};
    dw__pool_run(MANY, count_run, &to);
    for (int64_t index = 0; index < MANY; index++) {
        if (to.runs[index] != 1) return 1;
    }
    return dw__pool_set_threads(2) == DW_OK ? 0 : 2;
}

static void expect_child_works(void) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(60); /* a child that hangs fails */
        _exit(run_in_child());
    }
    int result = -1;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_int_equal(result, 0);
}

static void forked_children_start_fresh_workers(void **state) {
    (void)state;
    skip_under_tsan();
    tally to = {0};
    assert_int_equal(dw__pool_set_threads(3), DW_OK);
    dw__pool_run(MANY, count_run, &to);
    for (int child = 0; child < 5; child++) expect_child_works();
    memset(&to, 0, sizeof to);
    dw__pool_run(MANY, count_run, &to); /* and the parent's workers are unaffected */
    expect_each_once(&to, MANY);
}

static _Atomic bool stop_calling;

static void *call_until_told(void *unused) {
    (void)unused;
    while (!stop_calling) {
        tally to = {0};
        dw__pool_run(64, count_run, &to);
    }
    return NULL;
}

static void fork_while_another_thread_runs_a_loop(void **state) {
    (void)state;
    skip_under_tsan();
    pthread_t caller;
    stop_calling = false;
    assert_int_equal(dw__pool_set_threads(3), DW_OK);
    assert_int_equal(pthread_create(&caller, NULL, call_until_told, NULL), 0);
    for (int child = 0; child < 10; child++) {
        usleep(500);
        expect_child_works();
    }
    stop_calling = true;
    pthread_join(caller, NULL);
}

static void rejects_sizes_outside_the_range(void **state) {
    (void)state;
    static const int wrong[] = {0, -1, DW_MAX_THREADS + 1, INT32_MAX, INT32_MIN};
    assert_int_equal(dw_set_threads(2), DW_OK);
    for (size_t at = 0; at < DW_COUNT(wrong); at++) {
        assert_int_equal(dw_set_threads(wrong[at]), DW_INVALID_ARGUMENT);
        assert_non_null(strstr(dw_last_error(), "expected 1 to 256"));
    }
    assert_int_equal(dw_get_threads(), 2);
}

/* ---- the first decision, each in a process of its own ---------------------------------------- */

static void note_warning(void *context, int level, const char *line) {
    if (level == DW_LOG_WARNING && strstr(line, "DEEPWELL_THREADS")) (*(int *)context)++;
}

/* Number of threads that a new process chooses, plus WARNED per warning. */
static int decided_with(const char *program, const char *value) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (value) {
            setenv("DEEPWELL_THREADS", value, 1);
        } else {
            unsetenv("DEEPWELL_THREADS");
        }
        execl(program, program, "--decide", (char *)NULL);
        _exit(255);
    }
    int result = -1;
    assert_int_equal(waitpid(child, &result, 0), child);
    assert_true(WIFEXITED(result));
    return WEXITSTATUS(result);
}

enum { WARNED = 100 };

static int decide(void) {
    int warnings = 0;
    dw_log_set_sink(note_warning, &warnings, DW_LOG_WARNING);
    return dw_get_threads() + WARNED * warnings;
}

static void environment_decides_first(void **state) {
    const char *program = *state;
    int usual = decided_with(program, NULL);
    assert_true(usual >= 1 && usual < WARNED);
    assert_int_equal(decided_with(program, ""), usual);
    assert_int_equal(decided_with(program, "7"), 7);
    assert_int_equal(decided_with(program, "0"), usual + WARNED);
    assert_int_equal(decided_with(program, "two"), usual + WARNED);
    assert_int_equal(decided_with(program, "2x"), usual + WARNED);
    assert_int_equal(decided_with(program, "99999999999999999999"), usual + WARNED);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--decide") == 0) return decide();
    static char program[] = "/proc/self/exe";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(environment_decides_first, program),
        cmocka_unit_test(runs_each_index_once),
        cmocka_unit_test(a_limit_holds_whatever_others_set),
        cmocka_unit_test(survives_many_short_loops),
        cmocka_unit_test(workers_stop_at_any_moment),
        cmocka_unit_test(results_do_not_depend_on_threads),
        cmocka_unit_test(nested_loops_run_serially_on_their_worker),
        cmocka_unit_test(concurrent_callers_take_turns),
        cmocka_unit_test(forked_children_start_fresh_workers),
        cmocka_unit_test(fork_while_another_thread_runs_a_loop),
        cmocka_unit_test(rejects_sizes_outside_the_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
