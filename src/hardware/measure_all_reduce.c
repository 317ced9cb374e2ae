/* Measures the bandwidth of the links with NCCL: an all-reduce over all GPUs of this process. */
#include "device/cuda_library.h"
#include "hardware/measure.h"
#include <dlfcn.h>
#include <pthread.h>

enum { TYPE_FLOAT32 = 7, SUM = 0, MOST_GPUS = 64, CALLS = 8, SERIES = 5, BLOCK = 1 << 20 };

#define NCCL_FUNCTIONS(X)                                                                          \
    X(init_all, ncclCommInitAll, (void **communicators, int count, const int *devices))            \
    X(destroy, ncclCommDestroy, (void *communicator))                                              \
    X(group_start, ncclGroupStart, (void))                                                         \
    X(group_end, ncclGroupEnd, (void))                                                             \
    X(all_reduce, ncclAllReduce,                                                                   \
      (const void *from, void *to, size_t count, int type, int operation, void *communicator,      \
       void *stream))

typedef struct nccl {
#define MEMBER(member, name, parameters) int(*member) parameters;
    NCCL_FUNCTIONS(MEMBER)
#undef MEMBER
} nccl;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static nccl loaded;
static const nccl *outcome;

static void load_once(void) {
    static const char *const names[] = {"libnccl.so.2", NULL};
    void *library = NULL;
    if (dw__library_open("NCCL (libnccl.so.2)", "DEEPWELL_NCCL", names, &library) != DW_OK) return;
#define LOAD(member, name, parameters)                                                             \
    *(void **)&loaded.member = dlsym(library, #name);                                              \
    if (!loaded.member) return;
    NCCL_FUNCTIONS(LOAD)
#undef LOAD
    outcome = &loaded;
}

static dw_status check(int result, const char *what) {
    return result == 0 ? DW_OK : dw__fail(DW_UNSUPPORTED, "%s: NCCL's result is %d", what, result);
}

typedef struct ring {
    const dw__cuda *cuda;
    int gpus;
    size_t bytes;
    dw__bench benches[MOST_GPUS]; /* one for each GPU, with its stream */
    void *contexts[MOST_GPUS], *communicators[MOST_GPUS];
    dw__cu_address from[MOST_GPUS], to[MOST_GPUS];
} ring;

static dw_status enter(const ring *r, int gpu) {
    int result = r->cuda->context_set_current(r->contexts[gpu]);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "the context of GPU %d", gpu);
}

static dw_status prepare(ring *r, const void *block) {
    int devices[MOST_GPUS];
    for (int i = 0; i < r->gpus; i++) {
        devices[i] = i;
        DW_RETURN_IF_FAILED(dw__bench_begin(r->cuda, i, &r->benches[i]));
        r->cuda->context_current(&r->contexts[i]);
        DW_RETURN_IF_FAILED(
            dw__bench_allocate(&r->benches[i], r->bytes, block, BLOCK, &r->from[i]));
        DW_RETURN_IF_FAILED(dw__bench_allocate(&r->benches[i], r->bytes, block, BLOCK, &r->to[i]));
    }
    return check(outcome->init_all(r->communicators, r->gpus, devices),
                 "joining the GPUs (ncclCommInitAll)");
}

static void release(ring *r) {
    for (int i = 0; i < r->gpus; i++) {
        if (!r->contexts[i]) continue;
        r->cuda->context_set_current(r->contexts[i]);
        if (r->communicators[i]) outcome->destroy(r->communicators[i]);
        dw__bench_release(&r->benches[i], r->from[i]);
        dw__bench_release(&r->benches[i], r->to[i]);
        dw__bench_end(&r->benches[i]);
    }
}

/* Reduces out of place, so that sums do not grow from call to call. */
static dw_status reduce_once(const ring *r) {
    DW_RETURN_IF_FAILED(check(outcome->group_start(), "ncclGroupStart"));
    dw_status status = DW_OK;
    for (int i = 0; i < r->gpus && status == DW_OK; i++)
        status = check(outcome->all_reduce((const void *)(uintptr_t)r->from[i],
                                           (void *)(uintptr_t)r->to[i], r->bytes / 4, TYPE_FLOAT32,
                                           SUM, r->communicators[i], r->benches[i].stream),
                       "ncclAllReduce");
    int ended = outcome->group_end();
    return status == DW_OK ? check(ended, "ncclGroupEnd") : status;
}

static dw_status wait_for_all(const ring *r) {
    for (int i = 0; i < r->gpus; i++) {
        DW_RETURN_IF_FAILED(enter(r, i));
        int result = r->cuda->stream_synchronize(r->benches[i].stream);
        if (result != 0) return dw__cuda_fail(result, "the all-reduce on GPU %d", i);
    }
    return DW_OK;
}

/* Times with the host's clock, since the calls end on the slowest GPU. The fastest series counts: other work on the
 * host has delayed it least. */
static dw_status time_reductions(const ring *r, double *seconds) {
    *seconds = 0;
    for (int series = -1; series < SERIES; series++) {
        DW_RETURN_IF_FAILED(wait_for_all(r));
        double start = dw__seconds();
        for (int i = 0; i < CALLS; i++) DW_RETURN_IF_FAILED(reduce_once(r));
        DW_RETURN_IF_FAILED(wait_for_all(r));
        double taken = (dw__seconds() - start) / CALLS;
        if (series == 0 || (series > 0 && taken < *seconds)) *seconds = taken;
    }
    return *seconds > 0 ? DW_OK : dw__fail(DW_STATE, "an all-reduce took no time");
}

dw_status dw__measure_all_reduce(const dw__cuda *cuda, const dw__machine_options *options, int gpus,
                                 dw_figure *bandwidth) {
    dw_status status = DW_OK;
    double seconds;
    pthread_once(&once, load_once);
    if (!outcome)
        return dw__fail(DW_UNSUPPORTED,
                        "NCCL (libnccl.so.2) was not found; install a CUDA build of PyTorch, or "
                        "name the file in DEEPWELL_NCCL");
    if (gpus > MOST_GPUS)
        return dw__fail(DW_UNSUPPORTED, "%d GPUs; an all-reduce over at most %d is measured", gpus,
                        MOST_GPUS);
    void *block = dw__malloc(BLOCK);
    ring *r = dw__calloc(1, sizeof *r);
    if (!block || !r) DW_TRY(dw__fail_memory("an all-reduce", BLOCK));
    *r = (ring){.cuda = cuda, .gpus = gpus, .bytes = options->copy_bytes};
    dw__bench_random(DW_RATE_FP32, block, BLOCK);
    DW_TRY(prepare(r, block));
    DW_TRY(time_reductions(r, &seconds));
    /* Bus bandwidth as nccl-tests defines it: bytes per second through each GPU's links in one direction. */
    *bandwidth =
        (dw_figure){2.0 * (gpus - 1) / gpus * (double)r->bytes / seconds, DW_FIGURE_MEASURED,
                    "all-reduce of FP32 over all GPUs, NCCL: bus bandwidth"};
cleanup:
    if (r) release(r);
    dw__free(r);
    dw__free(block);
    return status;
}
