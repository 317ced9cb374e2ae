/* Replaces libnccl.so.2: NCCL over GPUs with host memory, with an all-reduce that sums. */
#include <stddef.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, MOST = 64 };

typedef struct communicator {
    int rank, count;
} communicator;
typedef struct call {
    const float *from;
    float *to;
    size_t count;
    int rank, ranks;
} call;

static int open_group, calls, live, reduced;
static call pending[MOST];

API int fake_nccl_live(void);
API int fake_nccl_live(void) { return live; }
API int fake_nccl_reduced(void);
API int fake_nccl_reduced(void) { return reduced; }

API int ncclCommInitAll(communicator **made, int count, const int *devices) {
    for (int i = 0; i < count; i++) {
        if (devices[i] != i) return INVALID_ARGUMENT;
        made[i] = malloc(sizeof **made);
        *made[i] = (communicator){i, count};
        live++;
    }
    return OK;
}
API int ncclCommDestroy(communicator *of) {
    live--;
    free(of);
    return OK;
}
API int ncclGroupStart(void) {
    if (open_group) return INVALID_USAGE;
    open_group = 1;
    calls = 0;
    return OK;
}
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation,
                      communicator *of, void *stream) {
    if (!open_group || !stream || type != 7 || operation != 0 || from == to)
        return INVALID_ARGUMENT;
    pending[calls++] = (call){from, to, count, of->rank, of->count};
    return OK;
}
API int ncclGroupEnd(void) {
    if (!open_group || calls == 0 || calls != pending[0].ranks) return INVALID_USAGE;
    open_group = 0;
    for (size_t i = 0; i < pending[0].count; i++) {
        float sum = 0;
        for (int rank = 0; rank < calls; rank++) sum += pending[rank].from[i];
        for (int rank = 0; rank < calls; rank++) pending[rank].to[i] = sum;
    }
    reduced++;
    return OK;
}
