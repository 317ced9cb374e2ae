/* oneDNN behind our wrapper: a signal that arrives during a GEMM must find a stack to run on. */
#include "kernel/library/onednn.h"
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmocka.h>

static uintptr_t stack_low, stack_high;
static volatile sig_atomic_t arrived, off_the_stack;

/* Runs on its own stack and checks the interrupted code's stack pointer. */
static void on_signal(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    arrived++;
#if defined(__x86_64__)
    uintptr_t at = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RSP];
    if (at < stack_low || at >= stack_high) off_the_stack++;
#else
    (void)context;
#endif
}

static void find_stack(void) {
    pthread_attr_t attributes;
    void *low;
    size_t bytes;
    assert_int_equal(pthread_getattr_np(pthread_self(), &attributes), 0);
    assert_int_equal(pthread_attr_getstack(&attributes, &low, &bytes), 0);
    pthread_attr_destroy(&attributes);
    stack_low = (uintptr_t)low;
    stack_high = stack_low + bytes;
}

static float *random_matrix(size_t count) {
    float *x = malloc(count * sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < count; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return x;
}

static void signals_find_a_valid_stack(void **state) {
    (void)state;
    enum { N = 288, K = 384, ROUNDS = 200000, ENOUGH = 300, MICROSECONDS = 50, STACK = 1 << 18 };
    if (!dw__onednn_version()) skip();
    /* With few rows oneDNN 2.6.3 uses its stack pointer for something else most of the time. */
    static const int row_counts[] = {8, 16, 48};
    float *a = random_matrix(48 * K), *b = random_matrix(K * N), *c = random_matrix(48 * N);
    stack_t own = {.ss_sp = malloc(STACK), .ss_size = STACK}, none = {.ss_flags = SS_DISABLE};
    struct sigaction before,
        action = {.sa_sigaction = on_signal, .sa_flags = SA_RESTART | SA_SIGINFO | SA_ONSTACK};
    const struct itimerval often = {{0, MICROSECONDS}, {0, MICROSECONDS}}, never = {{0, 0}, {0, 0}};
    find_stack();
    assert_non_null(own.ss_sp);
    assert_int_equal(sigaltstack(&own, NULL), 0);
    assert_int_equal(sigaction(SIGALRM, &action, &before), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
    for (int round = 0; round < ROUNDS && arrived < ENOUGH; round++) {
        int m = row_counts[round % 3];
        assert_int_equal(dw__onednn_sgemm(false, false, m, N, K, a, K, b, N, 0.0f, c, N), DW_OK);
    }
    assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
    assert_int_equal(sigaction(SIGALRM, &before, NULL), 0);
    assert_int_equal(sigaltstack(&none, NULL), 0);
    assert_true(arrived > 0);
    assert_int_equal(off_the_stack, 0);
    free(a), free(b), free(c), free(own.ss_sp);
}

/* ---- memory that oneDNN allocates -------------------------------------------------------------------------------- */

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern void *__libc_memalign(size_t alignment, size_t bytes);
static size_t allocated;

/* The allocation function that oneDNN calls. */
__attribute__((visibility("default"))) int posix_memalign(void **pointer, size_t alignment,
                                                          size_t bytes) {
    *pointer = __libc_memalign(alignment, bytes);
    allocated += bytes;
    return *pointer ? 0 : ENOMEM;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The value of ONEDNN_MAX_CPU_ISA for each instruction set of dw__onednn_isa; NULL: no limit. */
static const char *const limits[] = {"SSE41", "AVX", "AVX2", "AVX512_CORE", NULL};

/* oneDNN reads its limit once per process, so each test of a limit runs in a child that has not called it. */
static void in_children(int (*check)(void)) {
    for (size_t i = 0; i < DW_COUNT(limits); i++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            if (limits[i]) setenv("ONEDNN_MAX_CPU_ISA", limits[i], 1);
            _exit(dw__onednn_version() ? check() : 0);
        }
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (status != 0)
            fail_msg("ONEDNN_MAX_CPU_ISA=%s: status %x", limits[i] ? limits[i] : "", status);
    }
}

/* Tests random extents and leading dimensions. Many are round numbers, because oneDNN's choice of loops depends on
 * them. Tests 2.6; later versions have workspaces that are 64 bytes larger. */
static int compare_memory(void) {
    enum { ROUNDS = 400, MOST_M = 512, MOST_N = 768, MOST_K = 1100, LEADING = 2048 };
    static const int grains[] = {1, 1, 8, 64, 128, 256};
    if (strncmp(dw__onednn_version(), "2.6.", 4) != 0 || !dw__onednn_memory_known()) return 0;
    float *a = calloc((size_t)LEADING * LEADING, sizeof *a);
    float *b = calloc((size_t)LEADING * LEADING, sizeof *b);
    float *c = calloc((size_t)MOST_M * LEADING, sizeof *c);
    if (!a || !b || !c) return 1;
    int packed = 0;
    for (int round = 0; round < ROUNDS; round++) {
        bool at = rand() % 2, bt = rand() % 2;
        int grain = grains[rand() % 6], few = rand() % 4 == 0;
        int64_t m = 1 + rand() % (few ? 20 : MOST_M), n = 1 + rand() % MOST_N,
                k = 1 + rand() % MOST_K;
        k = (k + grain - 1) / grain * grain;
        grain = grains[rand() % 6];
        if (!few) m = least((m + grain - 1) / grain * grain, MOST_M);
        n = least((n + grain - 1) / grain * grain, MOST_N);
        int64_t lda = at ? m : k, ldb = bt ? k : n, ldc = n;
        if (rand() % 4 == 0) lda = (lda + 1023) / 1024 * 1024;
        if (rand() % 4 == 0) ldb = (ldb + 1023) / 1024 * 1024;
        if (rand() % 3 == 0) ldc = (ldc + 255) / 256 * 256;
        for (int time = 0; time < 2; time++) { /* the first may generate code */
            allocated = 0;
            if (dw__onednn_sgemm(at, bt, m, n, k, a, lda, b, ldb, 0.0f, c, ldc) != DW_OK) return 1;
        }
        size_t known = dw__onednn_sgemm_bytes(at, bt, m, n, k, lda, ldb, ldc);
        if (allocated != known) {
            fprintf(stderr, "%s: %d%d m %d n %d k %d, leading %d %d %d: %zu bytes, %zu expected\n",
                    dw__onednn_isa(), at, bt, (int)m, (int)n, (int)k, (int)lda, (int)ldb, (int)ldc,
                    allocated, known);
            return 1;
        }
        packed += known > 100000;
    }
    free(a), free(b), free(c);
    bool always = strcmp(dw__onednn_isa(), "sse41") == 0; /* all of its loops pack */
    if (always || (packed >= ROUNDS / 40 && packed <= ROUNDS * 3 / 4)) return 0;
    fprintf(stderr, "%s: %d of %d GEMMs pack\n", dw__onednn_isa(), packed, ROUNDS);
    return 1;
}

static void allocated_memory_is_predicted(void **state) {
    (void)state;
    in_children(compare_memory);
}

static size_t mapped_bytes(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    size_t pages = 0;
    if (!file || fscanf(file, "%zu", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* The first GEMMs run under address-space limits that leave more and more room. Each fails with an error or gives a
 * result, and the last one gives a result. */
static int multiply_in_little_memory(void) {
    enum { STEP = 1 << 18, STEPS = 128, K = 3, N = 2 };
    const float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 2, 3, 4, 5, 6}, by_hand[] = {22, 28, 49, 64};
    int refused = 0, fine = 0;
    struct rlimit none;
    if (getrlimit(RLIMIT_AS, &none) != 0) return 1;
    size_t before = mapped_bytes();
    for (int i = 0; i < STEPS; i++) {
        float c[4] = {0};
        struct rlimit limit = {before + (size_t)i * STEP, none.rlim_max};
        if (setrlimit(RLIMIT_AS, &limit) != 0) return 2;
        dw_status status = dw__onednn_sgemm(false, false, 2, N, K, a, K, b, N, 0.0f, c, N);
        if (status == DW_OK) /* and with transposed B, which has separate code on AVX-512 */
            status = dw__onednn_sgemm(false, true, 2, 2, K, a, K, a, K, 0.0f, c, 2);
        if (setrlimit(RLIMIT_AS, &none) != 0) return 2;
        if (status == DW_OUT_OF_MEMORY) {
            if (!strstr(dw_last_error(), "ulimit -v")) return 3;
            refused++;
        } else {
            if (status != DW_OK || c[0] != 14 || c[1] != 32 || c[3] != 77) return 4;
            status = dw__onednn_sgemm(false, false, 2, N, K, a, K, b, N, 0.0f, c, N);
            if (status != DW_OK || memcmp(c, by_hand, sizeof c) != 0) return 5;
            fine++;
        }
    }
    return refused == 0 || fine == 0;
}

static void lack_of_memory_is_an_error(void **state) {
    (void)state;
    in_children(multiply_in_little_memory);
}

static size_t anonymous_bytes(void) {
    char line[256];
    unsigned long kilobytes = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "RssAnon: %lu", &kilobytes) == 1) break;
    if (file) fclose(file);
    return (size_t)kilobytes << 10;
}

/* GEMMs on one thread, whose blocks may all have one address. */
static void *multiply_often(void *context) {
    enum { M = 512, N = 768, K = 768, OFTEN = 40 };
    float *a = random_matrix(M * K), *b = random_matrix(K * N), *c = random_matrix(M * N);
    size_t *grown = context, after_first = 0;
    for (int i = 0; i < OFTEN; i++) {
        int64_t m = M - 32 * (i % 4);
        if (dw__onednn_sgemm(false, true, m, N, K, a, K, b, K, 0.0f, c, N) != DW_OK) abort();
        if (i == 3) after_first = anonymous_bytes();
    }
    size_t at_last = anonymous_bytes();
    *grown = at_last > after_first ? at_last - after_first : 0;
    free(a), free(b), free(c);
    return NULL;
}

static void a_threads_heap_does_not_grow(void **state) {
    (void)state;
    size_t grown = 0, block = dw__onednn_sgemm_bytes(false, true, 512, 768, 768, 768, 768, 768);
    pthread_t thread;
    if (!dw__onednn_version() || !dw__onednn_memory_known()) skip();
    assert_int_equal(pthread_create(&thread, NULL, multiply_often, &grown), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_in_range(grown, 0, block + (1 << 18)); /* one more at most */
}
#else
static void allocated_memory_is_predicted(void **state) {
    (void)state;
    skip();
}
static void lack_of_memory_is_an_error(void **state) {
    (void)state;
    skip();
}
static void a_threads_heap_does_not_grow(void **state) {
    (void)state;
    skip();
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        /* Tests with children run first, before this process calls oneDNN. */
        cmocka_unit_test(allocated_memory_is_predicted),
        cmocka_unit_test(lack_of_memory_is_an_error),
        cmocka_unit_test(a_threads_heap_does_not_grow),
        cmocka_unit_test(signals_find_a_valid_stack),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
