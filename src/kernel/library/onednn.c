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

/* ---- its own memory ---------------------------------------------------------------------------------------------- */

/* oneDNN's matrices have columns one behind the other: its M is our n, its A our B. */
typedef struct columns_product {
    bool a_transposed, b_transposed;
    int64_t m, n, k, lda, ldb, ldc;
} columns_product;

/* Whether it copies blocks of both operands, on one thread. */
static bool packs(const columns_product *p) {
    bool nn = !p->a_transposed && !p->b_transposed, nt = !p->a_transposed && p->b_transposed;
    bool tn = p->a_transposed && !p->b_transposed;
    /* Leading dimensions whose rows fall on the same cache sets. */
    bool a_bad = p->lda % 256 == 0, b_bad = p->ldb % 256 == 0, c_bad = p->ldc % 256 == 0;
    bool a_worst = p->lda % 1024 == 0;
    if (tn && p->m > 100 && ((p->m < 1200 && p->n < 200 && p->k < 1200) || (a_bad && b_bad)))
        return true;
    if (nn && a_worst && p->k > 500 && p->n > 100) return true;
    /* Copies would cost more than they save. */
    if (1.0 / (double)p->m + 1.0 / (double)p->n >= 0.00196 && !(a_worst && nt)) return false;
    if ((a_bad || b_bad || c_bad) && p->m >= 32) {
        if (p->n > 16) return true;
        if (p->n == 16 && (p->k >= 6400 || p->a_transposed || p->m == 4096)) return true;
    }
    if (p->k >= 378 && ((p->m <= 378 && p->n <= 378) || p->m >= 378)) return true;
    bool narrow = p->m <= 28 && (!p->b_transposed || p->m >= p->n);
    return !narrow && p->n > 28 && p->k > 1;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

size_t dw__onednn_sgemm_bytes(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                              int64_t lda, int64_t ldb, int64_t ldc) {
    enum {
        TILE_M = 48,
        TILE_N = 8,
        BLOCK_M = 9984,
        BLOCK_N = 384,
        BLOCK_K = 384,
        SHORT_K = 48, /* below it, blocks of N are SHORT_N */
        SHORT_N = 24,
        LEAST_K = 128,
        FEW_N = 15, /* transposed A times so few columns needs no memory */
        PAGE = 4096
    };
    columns_product p = {b_transposed, a_transposed, n, m, k, ldb, lda, ldc};
    if (p.m <= 1 || p.n <= 1) return 0;
    if (p.a_transposed && !p.b_transposed && p.n <= FEW_N) return 0;
    if (!packs(&p)) return (BLOCK_K * TILE_M + 64) * sizeof(float);
    int64_t depth = p.k <= BLOCK_K      ? most(p.k, LEAST_K)
                    : p.k < 2 * BLOCK_K ? (p.k + 1) / 2
                                        : BLOCK_K;
    int64_t rows = round_up(least(most(p.m, TILE_M), BLOCK_M), TILE_M);
    int64_t columns = round_up(least(most(p.n, TILE_N), p.k < SHORT_K ? SHORT_N : BLOCK_N), TILE_N);
    /* Both blocks, and sums of a row of tiles and of the columns; each on a page of its own. */
    return (size_t)(depth * (rows + columns) + TILE_M + columns) * sizeof(float) + 4 * PAGE;
}

#else

const char *dw__onednn_version(void) { return NULL; }

size_t dw__onednn_sgemm_bytes(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                              int64_t lda, int64_t ldb, int64_t ldc) {
    (void)a_transposed, (void)b_transposed, (void)m, (void)n, (void)k, (void)lda, (void)ldb;
    (void)ldc;
    return 0;
}

dw_status dw__onednn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                           float *c, int64_t ldc) {
    (void)a_transposed, (void)b_transposed, (void)m, (void)n, (void)k, (void)a, (void)lda;
    (void)b, (void)ldb, (void)beta, (void)c, (void)ldc;
    return dw__fail(DW_UNSUPPORTED, "built without oneDNN: install its development package and "
                                    "configure again");
}

#endif
