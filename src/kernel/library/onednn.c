/* oneDNN threads itself through OpenMP. Called from a task of our pool it must stay on that thread,
 * so the calling thread's OpenMP team size is 1 for the time of the call and restored afterwards:
 * the thread may be the user's own, with OpenMP code of its own.
 *
 * Its generated kernels (seen in 2.6.3, for AVX-512) move the stack pointer into a workspace on the heap. A signal
 * that arrives then has its frame written there, over what lies below: such kernels run with signals held back. */
#include "kernel/library/onednn.h"

#ifdef DW_HAVE_ONEDNN

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>

static struct {
    int (*get_max_threads)(void);
    void (*set_num_threads)(int);
} openmp; /* NULL members: this oneDNN has another threading runtime, or none */

/* The OpenMP runtime that oneDNN is bound to is loaded already; look it up, never load another. */
static void find_openmp(void) {
    static const char *const runtimes[] = {"libgomp.so.1", "libiomp5.so", "libomp.so.5"};
    for (size_t i = 0; i < DW_COUNT(runtimes); i++) {
        void *library = dlopen(runtimes[i], RTLD_LAZY | RTLD_NOLOAD);
        if (!library) continue;
        *(void **)&openmp.get_max_threads = dlsym(library, "omp_get_max_threads");
        *(void **)&openmp.set_num_threads = dlsym(library, "omp_set_num_threads");
        dlclose(library);
        if (openmp.get_max_threads && openmp.set_num_threads) return;
    }
    openmp.get_max_threads = NULL;
}

static char version[32];

static void start(void) {
    const dnnl_version_t *v = dnnl_version();
    snprintf(version, sizeof version, "%d.%d.%d", v->major, v->minor, v->patch);
    find_openmp();
}

static pthread_once_t started = PTHREAD_ONCE_INIT;

const char *dw__onednn_version(void) {
    pthread_once(&started, start);
    return version;
}

/* All but those that a fault raises in the thread itself. */
static void hold_signals(sigset_t *before) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigset_t held;
    sigfillset(&held);
    for (size_t i = 0; i < DW_COUNT(faults); i++) sigdelset(&held, faults[i]);
    pthread_sigmask(SIG_BLOCK, &held, before);
}

dw_status dw__onednn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                           float *c, int64_t ldc) {
    sigset_t before;
    pthread_once(&started, start);
    int team = openmp.get_max_threads ? openmp.get_max_threads() : 1;
    if (team != 1) openmp.set_num_threads(1);
    hold_signals(&before);
    dnnl_status_t result = dnnl_sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', m, n, k,
                                      1.0f, a, lda, b, ldb, beta, c, ldc);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (team != 1) openmp.set_num_threads(team);
    if (result == dnnl_success) return DW_OK;
    return dw__fail(result == dnnl_out_of_memory ? DW_OUT_OF_MEMORY : DW_INTERNAL,
                    "oneDNN %s refused a product of %lld x %lld x %lld: status %d", version,
                    (long long)m, (long long)n, (long long)k, (int)result);
}

#else

const char *dw__onednn_version(void) { return NULL; }

dw_status dw__onednn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                           float *c, int64_t ldc) {
    (void)a_transposed, (void)b_transposed, (void)m, (void)n, (void)k, (void)a, (void)lda;
    (void)b, (void)ldb, (void)beta, (void)c, (void)ldc;
    return dw__fail(DW_UNSUPPORTED, "built without oneDNN: install its development package and "
                                    "configure again");
}

#endif
