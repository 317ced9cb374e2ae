/* oneDNN threads itself through OpenMP. Called from a task of our pool it must stay on that thread,
 * so the calling thread's OpenMP team size is 1 during the call. It is restored afterwards, because the thread may be
 * the user's own and run other OpenMP code.
 *
 * Its generated kernels (seen in 2.6.3, for AVX-512) move the stack pointer into a workspace on the heap. The frame of
 * a signal that arrives then would be written there, over other data on the heap, so these kernels run with signals
 * blocked.
 *
 * Its first GEMM generates code into mapped memory. If that memory cannot be mapped, oneDNN writes to a null pointer,
 * or throws an exception through C. So the first GEMM of each kind is a tiny one, run after a check that the memory can
 * be mapped. */
#include "kernel/library/onednn.h"

#ifdef DW_HAVE_ONEDNN

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static struct {
    int (*get_max_threads)(void);
    void (*set_num_threads)(int);
} openmp; /* NULL members: this oneDNN has another threading runtime, or none */

/* oneDNN's OpenMP runtime is already loaded: look it up, and never load another one. */
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
static enum { ISA_OTHER, ISA_SSE41, ISA_AVX, ISA_AVX2, ISA_AVX512, ISA_COUNT } isa;
static bool memory_known;

/* Sets `isa` to the instruction set of oneDNN's GEMM. ONEDNN_MAX_CPU_ISA may lower it. `isa` is 0 if oneDNN has no
 * x86-64 code here. */
static void find_isa(void) {
    static const int least_of[ISA_COUNT] = {[ISA_SSE41] = dnnl_cpu_isa_sse41,
                                            [ISA_AVX] = dnnl_cpu_isa_avx,
                                            [ISA_AVX2] = dnnl_cpu_isa_avx2,
                                            [ISA_AVX512] = dnnl_cpu_isa_avx512_core};
    int has = (int)dnnl_get_effective_cpu_isa();
    for (int i = ISA_SSE41; i < ISA_COUNT; i++)
        if ((has & least_of[i]) == least_of[i]) isa = i;
}

static void start(void) {
    const dnnl_version_t *v = dnnl_version();
    snprintf(version, sizeof version, "%d.%d.%d", v->major, v->minor, v->patch);
    find_openmp();
    find_isa();
    memory_known = isa != ISA_OTHER && ((v->major == 2 && v->minor >= 6) || v->major == 3);
}

static pthread_once_t started = PTHREAD_ONCE_INIT;

const char *dw__onednn_version(void) {
    pthread_once(&started, start);
    return version;
}

const char *dw__onednn_isa(void) {
    static const char *const names[ISA_COUNT] = {"portable", "sse41", "avx", "avx2", "avx512"};
    pthread_once(&started, start);
    return names[isa];
}

bool dw__onednn_memory_known(void) {
    pthread_once(&started, start);
    return memory_known;
}

/* Blocks all signals except for those that a fault raises in the thread itself. */
static void hold_signals(sigset_t *before) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
    sigset_t held;
    sigfillset(&held);
    for (size_t i = 0; i < DW_COUNT(faults); i++) sigdelset(&held, faults[i]);
    pthread_sigmask(SIG_BLOCK, &held, before);
}

/* ---- GEMM -------------------------------------------------------------------------------------------------------- */

/* Runs one GEMM on this thread, with signals blocked. */
static dnnl_status_t call_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n,
                                int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb,
                                float beta, float *c, int64_t ldc) {
    sigset_t before;
    int team = openmp.get_max_threads ? openmp.get_max_threads() : 1;
    if (team != 1) openmp.set_num_threads(1);
    hold_signals(&before);
    dnnl_status_t result = dnnl_sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', m, n, k,
                                      1.0f, a, lda, b, ldb, beta, c, ldc);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (team != 1) openmp.set_num_threads(team);
    return result;
}

/* The kinds of GEMM for which oneDNN generates separate code. */
enum { CODE_COMMON, CODE_FEW_ROWS, CODE_KINDS };
enum { FEW_ROWS = 15 };

/* On AVX-512, a transposed B with so few rows of A has its own kernels. */
static bool few_rows(bool a_transposed, bool b_transposed, int64_t m, int64_t n) {
    return isa == ISA_AVX512 && !a_transposed && b_transposed && m > 1 && m <= FEW_ROWS && n > 1;
}

/* Generates a kind's code. The sizes of the mappings were counted in the sources of 2.6.3 and, below AVX-512, observed
 * (5.8 MiB): 16 copies of a kernel of 320 KiB and 8 of 256 KiB, or 36 of 256 KiB; plus half as much for growth. */
static dw_status generate_code(int kind) {
    static const size_t needed[CODE_KINDS] = {(size_t)12 << 20, (size_t)16 << 20};
    static const float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    float c[4];
    void *room =
        mmap(NULL, needed[kind], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return dw__fail(
            DW_OUT_OF_MEMORY,
            "oneDNN %s needs %zu MiB of address space for the code of its first GEMM, which "
            "cannot be mapped: raise the limit (ulimit -v) or free memory",
            version, needed[kind] >> 20);
    munmap(room, needed[kind]);
    dnnl_status_t result =
        call_sgemm(false, kind == CODE_FEW_ROWS, 2, 2, 2, ones, 2, ones, 2, 0.0f, c, 2);
    if (result == dnnl_success) return DW_OK;
    return dw__fail(result == dnnl_out_of_memory ? DW_OUT_OF_MEMORY : DW_INTERNAL,
                    "oneDNN %s cannot generate the code of a GEMM: status %d", version,
                    (int)result);
}

/* Generates a kind's code once. The next GEMM tries again if memory was short. */
static dw_status have_code(int kind) {
    static atomic_bool ready[CODE_KINDS];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (atomic_load_explicit(&ready[kind], memory_order_acquire)) return DW_OK;
    dw_status status = DW_OK;
    pthread_mutex_lock(&lock);
    if (!atomic_load_explicit(&ready[kind], memory_order_relaxed)) {
        status = generate_code(kind);
        if (status == DW_OK) atomic_store_explicit(&ready[kind], true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

dw_status dw__onednn_prepare(void) {
    pthread_once(&started, start);
    return have_code(CODE_COMMON);
}

/* oneDNN allocates its blocks with posix_memalign. glibc's version trims the ends of a larger block and puts them into
 * the thread's cache of small blocks, where they are not merged with their neighbours. When the block is freed, the
 * next one does not fit there, and a thread's heap grows by megabytes with each GEMM until that cache is full. So this
 * function fills the cache first. */
static void fill_cache_of_small_blocks(void) {
    enum { STEP = 16, SIZES = 16, OF_EACH = 7 }; /* the trimmed ends are shorter than 256 bytes */
    static _Thread_local bool filled;
    /* volatile, because the compiler would remove both calls */
    void *volatile blocks[SIZES * OF_EACH];
    if (filled) return;
    filled = true;
    for (int i = 0; i < SIZES * OF_EACH; i++) blocks[i] = malloc((size_t)(i / OF_EACH + 1) * STEP);
    for (int i = 0; i < SIZES * OF_EACH; i++) free(blocks[i]);
}

dw_status dw__onednn_sgemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                           const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                           float *c, int64_t ldc) {
    pthread_once(&started, start);
    fill_cache_of_small_blocks();
    DW_RETURN_IF_FAILED(have_code(CODE_COMMON));
    if (few_rows(a_transposed, b_transposed, m, n)) DW_RETURN_IF_FAILED(have_code(CODE_FEW_ROWS));
    dnnl_status_t result =
        call_sgemm(a_transposed, b_transposed, m, n, k, a, lda, b, ldb, beta, c, ldc);
    if (result == dnnl_success) return DW_OK;
    return dw__fail(result == dnnl_out_of_memory ? DW_OUT_OF_MEMORY : DW_INTERNAL,
                    "oneDNN %s refused a GEMM of %lld x %lld x %lld: status %d", version,
                    (long long)m, (long long)n, (long long)k, (int)result);
}

/* ---- memory that oneDNN allocates -------------------------------------------------------------------------------- */

/* oneDNN stores matrices by columns: its M is our n, its A our B. */
typedef struct columns_matmul {
    bool a_transposed, b_transposed;
    int64_t m, n, k, lda, ldb, ldc;
} columns_matmul;

/* Below these sizes, copying blocks costs more than it saves. */
static bool too_small_to_pack(const columns_matmul *p, double threshold) {
    return 1.0 / (double)p->m + 1.0 / (double)p->n >= threshold;
}

enum { LONG = 378 };
static bool long_enough_to_pack(const columns_matmul *p) {
    return p->k >= LONG && ((p->m <= LONG && p->n <= LONG) || p->m >= LONG);
}

static bool packs_avx512(const columns_matmul *p) {
    bool nn = !p->a_transposed && !p->b_transposed, nt = !p->a_transposed && p->b_transposed;
    bool tn = p->a_transposed && !p->b_transposed;
    /* Returns whether rows of this leading dimension map to the same cache sets. */
    bool a_bad = p->lda % 256 == 0, b_bad = p->ldb % 256 == 0, c_bad = p->ldc % 256 == 0;
    bool a_worst = p->lda % 1024 == 0;
    if (tn && p->m > 100 && ((p->m < 1200 && p->n < 200 && p->k < 1200) || (a_bad && b_bad)))
        return true;
    if (nn && a_worst && p->k > 500 && p->n > 100) return true;
    if (too_small_to_pack(p, 0.00196) && !(a_worst && nt)) return false;
    if ((a_bad || b_bad || c_bad) && p->m >= 32) {
        if (p->n > 16) return true;
        if (p->n == 16 && (p->k >= 6400 || p->a_transposed || p->m == 4096)) return true;
    }
    if (long_enough_to_pack(p)) return true;
    bool narrow = p->m <= 28 && (!p->b_transposed || p->m >= p->n);
    return !narrow && p->n > 28 && p->k > 1;
}

/* AVX follows the same rules as AVX2. */
static bool packs_avx2(const columns_matmul *p) {
    if (too_small_to_pack(p, 0.0038)) return false;
    if (long_enough_to_pack(p)) return true;
    if (p->m <= 128 && p->n <= 128) return false;
    if (p->b_transposed) return p->n > 1 && p->k > 1;
    return p->n > 16 && p->k > 2 && p->m > 64;
}

/* Returns whether oneDNN copies blocks of both operands, on one thread. */
static bool packs(const columns_matmul *p) {
    if (isa == ISA_SSE41) return true;
    return isa == ISA_AVX512 ? packs_avx512(p) : packs_avx2(p);
}

/* Returns the workspace of loops that do not pack. The loops for AVX and AVX2 keep it on the stack if it fits there. */
static size_t unpacked_bytes(const columns_matmul *p) {
    enum { AVX512_FLOATS = 384 * 48 + 64, AVX2_FLOATS = 256 * 16 + 64 };
    if (isa == ISA_AVX512) return AVX512_FLOATS * sizeof(float);
    return isa == ISA_AVX2 && !p->b_transposed ? AVX2_FLOATS * sizeof(float) : 0;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

/* Register tiles, largest blocks, and the K up to which K is not divided. */
typedef struct blocking {
    int64_t tile_m, tile_n, block_m, block_n, block_k, whole_k;
} blocking;
static const blocking blockings[ISA_COUNT] = {
    [ISA_SSE41] = {8, 4, 4096, 96, 256, 256},
    [ISA_AVX] = {16, 4, 4096, 96, 256, 256},
    [ISA_AVX2] = {24, 4, 10000, 384, 192, 256},
    [ISA_AVX512] = {48, 8, 9984, 384, 384, 384},
};

size_t dw__onednn_sgemm_bytes(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                              int64_t lda, int64_t ldb, int64_t ldc) {
    enum {
        SHORT_K = 48, /* for fewer rows, blocks of N have SHORT_N columns */
        SHORT_N = 24,
        LEAST_K = 128,
        PAGE = 4096
    };
    columns_matmul p = {b_transposed, a_transposed, n, m, k, ldb, lda, ldc};
    if (!dw__onednn_memory_known()) return 0;
    if (p.m <= 1 || p.n <= 1 || few_rows(a_transposed, b_transposed, m, n)) return 0;
    if (!packs(&p)) return unpacked_bytes(&p);
    const blocking *by = &blockings[isa];
    int64_t depth = p.k <= by->whole_k      ? most(p.k, LEAST_K)
                    : p.k < 2 * by->block_k ? (p.k + 1) / 2
                                            : by->block_k;
    int64_t rows = round_up(least(most(p.m, by->tile_m), by->block_m), by->tile_m);
    int64_t columns =
        round_up(least(most(p.n, by->tile_n), p.k < SHORT_K ? SHORT_N : by->block_n), by->tile_n);
    /* Returns the bytes of both blocks and of the sums of a row of tiles and of the columns, each on its own pages. */
    return (size_t)(depth * (rows + columns) + by->tile_m + columns) * sizeof(float) + 4 * PAGE;
}

#else

const char *dw__onednn_version(void) { return NULL; }
const char *dw__onednn_isa(void) { return NULL; }
bool dw__onednn_memory_known(void) { return true; } /* this case allocates nothing */
dw_status dw__onednn_prepare(void) { return DW_OK; }

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
