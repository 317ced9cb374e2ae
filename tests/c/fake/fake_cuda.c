/* See fake_cuda.h. The signatures are the driver's; a real driver is never linked. */
#include "fake_cuda.h"
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
typedef uint64_t address;

static fake_cuda state = {.version = 13000,
                          .devices = 1,
                          .capability = 90,
                          .sm_count = 132,
                          .shared_bytes = 232448,
                          .l2_bytes = 60 << 20};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

API fake_cuda *fake_cuda_state(void);
API fake_cuda *fake_cuda_state(void) { return &state; }

/* Returns 0 if the call may continue. */
static int asked(const char *name) {
    pthread_mutex_lock(&lock);
    state.calls++;
    int result = state.failing && strcmp(state.failing, name) == 0 ? state.result : 0;
    pthread_mutex_unlock(&lock);
    return result;
}
#define ASKED()                                                                                    \
    do {                                                                                           \
        int result_ = asked(__func__);                                                             \
        if (result_ != 0) return result_;                                                          \
    } while (0)

typedef struct module {
    char image[64];
} module;
typedef struct function {
    module *in;
    char name[64];
    unsigned largest_shared;
} function;

API int cuInit(unsigned flags) {
    (void)flags;
    ASKED();
    return state.devices > 0 ? 0 : 100;
}
API int cuDriverGetVersion(int *version) {
    ASKED();
    *version = state.version;
    return 0;
}
API int cuGetErrorName(int result, const char **name) {
    *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
    return 0;
}
API int cuGetErrorString(int result, const char **text) {
    *text = result == 2 ? "out of memory" : "as requested";
    return 0;
}
API int cuDeviceGetCount(int *count) {
    ASKED();
    *count = state.devices;
    return 0;
}
API int cuDeviceGet(int *device, int ordinal) {
    ASKED();
    *device = ordinal;
    return 0;
}
API int cuDeviceGetName(char *name, int bytes, int device) {
    ASKED();
    if (state.name)
        snprintf(name, (size_t)bytes, "%s", state.name);
    else
        snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    return 0;
}
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ASKED();
    switch (attribute) {
    case 13: *value = 1980000; return 0;
    case 16: *value = state.sm_count; return 0;
    case 33: *value = 0x10 + device; return 0;
    case 34: *value = 0; return 0;
    case 36: *value = 3201000; return 0;
    case 37: *value = 6144; return 0;
    case 38: *value = state.l2_bytes; return 0;
    case 50: *value = 0; return 0;
    case 75: *value = state.capability / 10; return 0;
    case 76: *value = state.capability % 10; return 0;
    case 97: *value = state.shared_bytes; return 0;
    }
    return 1;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ASKED();
    (void)device;
    *bytes = (size_t)141 << 30;
    return 0;
}
API int cuDevicePrimaryCtxRetain(void **context, int device) {
    ASKED();
    pthread_mutex_lock(&lock);
    state.retains++;
    pthread_mutex_unlock(&lock);
    *context = (void *)(uintptr_t)(1000 + device);
    return 0;
}
API int cuCtxGetCurrent(void **context) {
    ASKED();
    pthread_mutex_lock(&lock);
    *context = (void *)(uintptr_t)state.current;
    pthread_mutex_unlock(&lock);
    return 0;
}
API int cuCtxSetCurrent(void *context) {
    ASKED();
    pthread_mutex_lock(&lock);
    state.current = (uintptr_t)context;
    pthread_mutex_unlock(&lock);
    return 0;
}
API int cuCtxGetDevice(int *device) {
    ASKED();
    pthread_mutex_lock(&lock);
    *device = state.current >= 1000 ? (int)(state.current - 1000) : 0;
    pthread_mutex_unlock(&lock);
    return 0;
}
API int cuCtxGetId(void *context, unsigned long long *id) {
    ASKED();
    *id = (uintptr_t)context;
    return 0;
}
API int cuThreadExchangeStreamCaptureMode(int *mode) {
    static _Thread_local int current;
    ASKED();
    int before = current;
    current = *mode;
    *mode = before;
    pthread_mutex_lock(&lock);
    state.relaxed += current == 2;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Device memory is host memory, so that a test can read it. It lies at multiples of 256 bytes, as the driver's does. */
API int cuMemAlloc_v2(address *memory, size_t bytes) {
    ASKED();
    void *place = NULL;
    if (bytes >= (size_t)1 << 40 || posix_memalign(&place, 256, bytes + 256) != 0) return 2;
    size_t *block = place;
    block[0] = bytes;
    pthread_mutex_lock(&lock);
    state.memory += (int64_t)bytes;
    pthread_mutex_unlock(&lock);
    *memory = (address)(uintptr_t)block + 256;
    return 0;
}
API int cuMemFree_v2(address memory) {
    ASKED();
    size_t *block = (size_t *)(uintptr_t)(memory - 256);
    pthread_mutex_lock(&lock);
    state.memory -= (int64_t)block[0];
    pthread_mutex_unlock(&lock);
    free(block);
    return 0;
}
API int cuMemAllocHost_v2(void **memory, size_t bytes) {
    ASKED();
    *memory = malloc(bytes);
    return *memory ? 0 : 2;
}
API int cuMemFreeHost(void *memory) {
    ASKED();
    free(memory);
    return 0;
}
API int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
    ASKED();
    (void)stream;
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return 0;
}
API int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    ASKED();
    (void)stream;
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}
API int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    ASKED();
    (void)stream;
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return 0;
}
API int cuMemsetD8Async(address memory, unsigned char byte, size_t bytes, void *stream) {
    ASKED();
    (void)stream;
    memset((void *)(uintptr_t)memory, byte, bytes);
    return 0;
}

API int cuStreamCreate(void **stream, unsigned flags) {
    ASKED();
    (void)flags;
    *stream = malloc(1);
    return 0;
}
API int cuStreamDestroy_v2(void *stream) {
    ASKED();
    free(stream);
    return 0;
}
API int cuStreamSynchronize(void *stream) {
    ASKED();
    (void)stream;
    return 0;
}
API int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ASKED();
    (void)stream, (void)event, (void)flags;
    return 0;
}
API int cuEventCreate(void **event, unsigned flags) {
    ASKED();
    (void)flags;
    *event = malloc(1);
    return 0;
}
API int cuEventDestroy_v2(void *event) {
    ASKED();
    free(event);
    return 0;
}
API int cuEventRecord(void *event, void *stream) {
    ASKED();
    (void)event, (void)stream;
    return 0;
}
API int cuEventSynchronize(void *event) {
    ASKED();
    (void)event;
    return 0;
}
API int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    ASKED();
    (void)from, (void)to;
    *milliseconds = state.event_milliseconds > 0.0f ? state.event_milliseconds : 1.5f;
    return 0;
}

/* Modules live until the process ends, because the library keeps them. They stay reachable, so that no leak is
 * reported. */
static void *kept[4096];
static int kept_count;

static void *keep(void *pointer) {
    pthread_mutex_lock(&lock);
    kept[kept_count++ % 4096] = pointer;
    pthread_mutex_unlock(&lock);
    return pointer;
}

API int cuModuleLoadData(void **made, const void *image) {
    ASKED();
    bool ptx = strncmp(image, ".version", 8) == 0 || strncmp(image, "//", 2) == 0;
    if (ptx && state.refuse_ptx) return 222; /* CUDA_ERROR_UNSUPPORTED_PTX_VERSION */
    if (!ptx && memcmp(image, "\177ELF", 4) != 0) return 200;
    if (!ptx && state.refuse_real && ((const char *)image)[4] != '\n') return 200;
    module *m = keep(calloc(1, sizeof *m));
    if (ptx) /* The image ends with a NUL. */
        snprintf(m->image, sizeof m->image, "%s", (const char *)image);
    else
        memcpy(m->image, image, sizeof m->image);
    pthread_mutex_lock(&lock);
    state.loads++;
    memcpy(state.loaded, m->image, sizeof state.loaded);
    pthread_mutex_unlock(&lock);
    *made = m;
    return 0;
}
API int cuModuleUnload(void *made) {
    ASKED();
    (void)made;
    return 0;
}
API int cuModuleGetFunction(void **made, void *in, const char *name) {
    ASKED();
    function *f = keep(calloc(1, sizeof *f));
    f->in = in;
    snprintf(f->name, sizeof f->name, "%s", name);
    pthread_mutex_lock(&lock);
    state.functions++;
    pthread_mutex_unlock(&lock);
    *made = f;
    return 0;
}
API int cuFuncGetAttribute(int *value, int attribute, void *of) {
    ASKED();
    (void)attribute, (void)of;
    *value = 0;
    return 0;
}
API int cuFuncSetAttribute(void *of, int attribute, int value) {
    ASKED();
    if (attribute != 8 || value > state.shared_bytes) return 1;
    ((function *)of)->largest_shared = (unsigned)value;
    return 0;
}

typedef struct launch_attribute {
    int id;
    char pad[4];
    union {
        char bytes[64];
        unsigned cluster[3];
        int flag;
    } value;
} launch_attribute;
typedef struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    launch_attribute *attributes;
    unsigned attribute_count;
} launch_config;

API int cuLaunchKernelEx(const launch_config *config, void *of, void **arguments, void **extra) {
    ASKED();
    (void)extra;
    const function *f = of;
    if (config->shared_bytes > 48 * 1024 && config->shared_bytes > f->largest_shared) return 1;
    pthread_mutex_lock(&lock);
    fake_launch *to = &state.launches[state.launch_count++ % FAKE_LAUNCHES];
    memset(to, 0, sizeof *to);
    memcpy(to->name, f->name, sizeof to->name);
    memcpy(to->image, f->in->image, sizeof to->image);
    memcpy(to->grid, config->grid, sizeof to->grid);
    memcpy(to->block, config->block, sizeof to->block);
    to->shared_bytes = config->shared_bytes;
    to->stream = config->stream;
    to->largest_shared = f->largest_shared;
    to->attribute_count = (int)config->attribute_count;
    for (unsigned i = 0; i < config->attribute_count; i++) {
        if (config->attributes[i].id == 4)
            memcpy(to->cluster, config->attributes[i].value.cluster, sizeof to->cluster);
        if (config->attributes[i].id == 6) to->dependent = config->attributes[i].value.flag;
    }
    int maps = state.maps_of ? state.maps_of(f->name) : 0;
    for (int i = 0; i < maps; i++) memcpy(&to->maps[i], arguments[i], sizeof to->maps[i]);
    if (state.params_bytes > 0) memcpy(to->params, arguments[maps], (size_t)state.params_bytes);
    fake_launch copy = *to;
    pthread_mutex_unlock(&lock);
    if (state.kernel) state.kernel(&copy);
    return 0;
}

/* Graphs: launches of a stream that records run all the same, and are counted. */
API int cuStreamBeginCapture_v2(void *stream, int mode) {
    ASKED();
    (void)mode;
    return stream ? 0 : 900;
}
API int cuStreamIsCapturing(void *stream, int *status) {
    ASKED();
    (void)stream;
    *status = 0;
    return 0;
}
API int cuStreamEndCapture(void *stream, void **graph) {
    ASKED();
    (void)stream;
    *graph = malloc(1);
    return 0;
}
API int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    ASKED();
    (void)graph, (void)flags;
    *executable = malloc(1);
    state.graphs++;
    return 0;
}
API int cuGraphExecUpdate_v2(void *executable, void *graph, void *result) {
    ASKED();
    (void)executable, (void)graph, (void)result;
    return 0;
}
API int cuGraphLaunch(void *executable, void *stream) {
    ASKED();
    (void)executable, (void)stream;
    state.graph_launches++;
    return 0;
}
API int cuGraphDestroy(void *graph) {
    ASKED();
    free(graph);
    return 0;
}
API int cuGraphExecDestroy(void *executable) {
    ASKED();
    free(executable);
    state.graphs--;
    return 0;
}

/* Rejects what the driver's documentation says is rejected. */
API int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *memory,
                               const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                               const uint32_t *steps, int interleave, int swizzle, int promotion,
                               int fill) {
    static const int element_bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    ASKED();
    if ((uintptr_t)map % 64 != 0 || (uintptr_t)memory % 16 != 0 || !memory) return 1;
    if (rank < 1 || rank > 5 || type < 0 || type > 12) return 1;
    for (uint32_t i = 0; i < rank; i++) {
        if (sizes[i] == 0 || sizes[i] > (uint64_t)1 << 32) return 1;
        if (box[i] == 0 || box[i] > 256 || steps[i] == 0 || steps[i] > 8) return 1;
        if (i + 1 < rank &&
            (strides[i] == 0 || strides[i] % 16 != 0 || strides[i] >= (uint64_t)1 << 40))
            return 1;
    }
    int inner = (int)box[0] * element_bytes[type];
    if (inner % 16 != 0 || (swizzle > 0 && inner > 16 << swizzle)) return 1;
    pthread_mutex_lock(&lock);
    fake_map *to = &state.maps[state.map_count++ % FAKE_MAPS];
    *to = (fake_map){.type = type,
                     .rank = (int)rank,
                     .interleave = interleave,
                     .swizzle = swizzle,
                     .promotion = promotion,
                     .fill = fill,
                     .address = memory};
    memcpy(to->sizes, sizes, rank * sizeof sizes[0]);
    memcpy(to->strides, strides, (rank - 1) * sizeof strides[0]);
    memcpy(to->box, box, rank * sizeof box[0]);
    memcpy(to->steps, steps, rank * sizeof steps[0]);
    memset(map, 0, 128);
    memcpy(map, &state.map_count,
           sizeof state.map_count); /* number of the map, for the launch that receives it */
    pthread_mutex_unlock(&lock);
    return 0;
}
