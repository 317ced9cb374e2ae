/* oneDNN behind our wrapper: a signal that arrives during a product must find a stack to run on. */
#include "kernel/library/onednn.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/time.h>
#include <ucontext.h>

#include <cmocka.h>

static uintptr_t stack_low, stack_high;
static volatile sig_atomic_t arrived, off_the_stack;

/* Runs on a stack of its own, and looks where the interrupted code's stack pointer was. */
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

static void a_signal_finds_a_stack(void **state) {
    (void)state;
    enum { N = 288, K = 384, ROUNDS = 200000, ENOUGH = 300, MICROSECONDS = 50, STACK = 1 << 18 };
    if (!dw__onednn_version()) skip();
    /* Few rows: there oneDNN 2.6.3 has its stack pointer elsewhere most of the time. */
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

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_signal_finds_a_stack)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
