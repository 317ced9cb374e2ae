/* Device code that nvcc's host code registers, and launches of it. */
#include "runtime.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- registration -------------------------------------------------------------------------- */

/* A host function or variable that represents one of the device. */
typedef struct named {
    const void *host;
    const char *name;
    void **managed; /* for a __managed__ variable: receives its address */
    void *kernel;   /* set once found */
    bool variable;
    struct named *next;
} named;
typedef struct binary {
    const void *image;
    void *module; /* set once loaded */
    int failure;  /* result of loading it; reported once */
    named *all;
    struct binary *next;
} binary;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static binary *binaries;

API void **__cudaRegisterFatBinary(void *image) {
    binary *made = calloc(1, sizeof *made);
    if (!made) {
        fprintf(stderr, "deepwell emulate: out of memory for the program's device code\n");
        abort(); /* the caller has no way to receive an error */
    }
    made->image = image;
    pthread_mutex_lock(&lock);
    made->next = binaries;
    binaries = made;
    pthread_mutex_unlock(&lock);
    return (void **)made;
}
API void __cudaRegisterFatBinaryEnd(void **of) { (void)of; }

API void __cudaUnregisterFatBinary(void **of) {
    binary *b = (binary *)of;
    pthread_mutex_lock(&lock);
    for (binary **link = &binaries; *link; link = &(*link)->next) {
        if (*link != b) continue;
        *link = b->next;
        break;
    }
    pthread_mutex_unlock(&lock);
    while (b->all) {
        named *n = b->all;
        b->all = n->next;
        free(n);
    }
    if (b->module) cuModuleUnload(b->module);
    free(b);
}

static void add(void **of, const void *host, const char *name, void **managed, bool variable) {
    binary *b = (binary *)of;
    named *made = calloc(1, sizeof *made);
    if (!made) {
        fprintf(stderr, "deepwell emulate: out of memory for the program's device code\n");
        abort();
    }
    *made = (named){.host = host, .name = name, .managed = managed, .variable = variable};
    pthread_mutex_lock(&lock);
    made->next = b->all;
    b->all = made;
    pthread_mutex_unlock(&lock);
}
API void __cudaRegisterFunction(void **of, const void *host, char *device, const char *name,
                                int limit, void *tid, void *bid, void *block, void *grid,
                                int *warp) {
    (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    add(of, host, name, NULL, false);
}
API void __cudaRegisterVar(void **of, void *host, char *device, const char *name, int external,
                           size_t bytes, int constant, int global) {
    (void)device, (void)external, (void)bytes, (void)constant, (void)global;
    add(of, host, name, NULL, true);
}
API void __cudaRegisterManagedVar(void **of, void **host, char *device, const char *name,
                                  int external, size_t bytes, int constant, int global) {
    (void)device, (void)external, (void)bytes, (void)constant, (void)global;
    add(of, host, name, host, true);
}
API void __cudaRegisterHostVar(void **of, const char *name, void *host, size_t bytes) {
    (void)of, (void)name, (void)host, (void)bytes;
}

/* The caller holds the lock. */
static int load(binary *b) {
    if (b->module || b->failure) return b->failure;
    b->failure = cuModuleLoadData(&b->module, b->image);
    for (named *n = b->all; n && !b->failure; n = n->next) {
        address memory;
        if (n->managed && cuModuleGetGlobal_v2(&memory, NULL, b->module, n->name) == SUCCESS)
            *n->managed = (void *)(uintptr_t)memory;
    }
    return b->failure;
}
/* Called before the host uses a __managed__ variable. */
API char __cudaInitModule(void **of) {
    pthread_mutex_lock(&lock);
    int result = load((binary *)of);
    pthread_mutex_unlock(&lock);
    return result == SUCCESS;
}

static named *find(const void *host, bool variable, binary **in) {
    for (binary *b = binaries; b; b = b->next)
        for (named *n = b->all; n; n = n->next)
            if (n->host == host && n->variable == variable) return *in = b, n;
    return NULL;
}

int find_kernel(const void *host, void **kernel) {
    binary *b;
    int result = SUCCESS;
    pthread_mutex_lock(&lock);
    named *n = find(host, false, &b);
    if (n && !n->kernel && (result = load(b)) == SUCCESS) {
        result = cuModuleGetFunction(&n->kernel, b->module, n->name);
        if (result == NOT_FOUND) result = INVALID_FUNCTION;
    }
    if (n) *kernel = n->kernel;
    for (binary *k = binaries; k && !n; k = k->next) /* a handle, not a function */
        for (named *m = k->all; m && !n; m = m->next)
            if (m->kernel && m->kernel == host) n = m, *kernel = m->kernel;
    pthread_mutex_unlock(&lock);
    return n ? result : INVALID_FUNCTION;
}

int find_symbol(const void *host, address *memory, size_t *bytes) {
    binary *b;
    int result = INVALID_SYMBOL;
    pthread_mutex_lock(&lock);
    named *n = find(host, true, &b);
    if (n && (result = load(b)) == SUCCESS)
        result = cuModuleGetGlobal_v2(memory, bytes, b->module, n->name);
    pthread_mutex_unlock(&lock);
    return result == NOT_FOUND ? INVALID_SYMBOL : result;
}

/* ---- launches ------------------------------------------------------------------------------ */

typedef struct configuration {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} configuration;
enum { DEEPEST = 64 };
static _Thread_local configuration pushed[DEEPEST];
static _Thread_local int depth;

/* name<<<grid, block, shared, stream>>>: the compiler's code pushes the configuration before it evaluates the
 * arguments; the stub pops it. */
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    if (depth == DEEPEST) return (unsigned)keep(INVALID_CONFIGURATION);
    pushed[depth++] = (configuration){grid, block, shared_bytes, stream};
    return SUCCESS;
}
API int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    if (depth == 0) return keep(MISSING_CONFIGURATION);
    const configuration *c = &pushed[--depth];
    *grid = c->grid, *block = c->block, *shared_bytes = c->shared_bytes;
    *(void **)stream = c->stream;
    return SUCCESS;
}

/* Launch shapes that no GPU supports have their own error; other invalid values are INVALID_VALUE. */
static int launch(const void *host, const launch_config *config, void **arguments) {
    void *kernel;
    int result = find_kernel(host, &kernel), own = 0;
    if (result == SUCCESS) result = cuLaunchKernelEx(config, kernel, arguments, NULL);
    if (result != INVALID_VALUE) return keep(result);
    const bool shared = cuFuncGetAttribute(&own, 1, kernel) == SUCCESS &&
                        (uint64_t)own + config->shared_bytes > SHARED_UNASKED;
    return keep(shared ? INVALID_VALUE : INVALID_CONFIGURATION);
}
static launch_config shape(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    return (launch_config){{grid.x, grid.y, grid.z},
                           {block.x, block.y, block.z},
                           (unsigned)shared_bytes,
                           stream,
                           NULL,
                           0};
}

API int cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments,
                         size_t shared_bytes, void *stream) {
    launch_config config = shape(grid, block, shared_bytes, stream);
    return launch(host, &config, arguments);
}
ALSO(cudaLaunchKernel, _ptsz, const void *, dim3, dim3, void **, size_t, void *);
API int __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments,
                           size_t shared_bytes, void *stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
ALSO(__cudaLaunchKernel, _ptsz, void *, dim3, dim3, void **, size_t, void *);
API int cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments,
                                    size_t shared_bytes, void *stream) {
    launch_attribute cooperative = {.id = ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
    launch_config config = shape(grid, block, shared_bytes, stream);
    config.attributes = &cooperative, config.attribute_count = 1;
    return launch(host, &config, arguments);
}
ALSO(cudaLaunchCooperativeKernel, _ptsz, const void *, dim3, dim3, void **, size_t, void *);

typedef struct runtime_launch_config {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
    launch_attribute *attributes;
    unsigned attribute_count;
} runtime_launch_config;
static launch_config from_runtime(const runtime_launch_config *given) {
    launch_config config = shape(given->grid, given->block, given->shared_bytes, given->stream);
    config.attributes = given->attributes;
    config.attribute_count = given->attribute_count;
    return config;
}
API int cudaLaunchKernelExC(const runtime_launch_config *given, const void *host,
                            void **arguments) {
    launch_config config = from_runtime(given);
    return launch(host, &config, arguments);
}
ALSO(cudaLaunchKernelExC, _ptsz, const runtime_launch_config *, const void *, void **);
API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    (void)stream;
    function(data);
    return SUCCESS;
}
ALSO(cudaLaunchHostFunc, _ptsz, void *, void (*)(void *), void *);

/* ---- attributes of kernels ----------------------------------------------------------------- */

API int cudaGetKernel(void **kernel, const void *host) { return keep(find_kernel(host, kernel)); }
API int __cudaGetKernel(void **kernel, const void *host) {
    *kernel = NULL;
    return keep(find_kernel(host, kernel));
}
API int cudaGetFuncBySymbol(void **kernel, const void *host) {
    return keep(find_kernel(host, kernel));
}
API int cudaFuncGetName(const char **name, const void *host) {
    void *kernel;
    int result = find_kernel(host, &kernel);
    return keep(result == SUCCESS ? cuFuncGetName(name, kernel) : result);
}
API int cudaFuncGetParamInfo(const void *host, size_t index, size_t *offset, size_t *bytes) {
    void *kernel;
    int result = find_kernel(host, &kernel);
    return keep(result == SUCCESS ? cuFuncGetParamInfo(kernel, index, offset, bytes) : result);
}

typedef struct function_attributes {
    size_t shared_bytes, constant_bytes, local_bytes;
    int most_threads, registers, ptx_version, binary_version, cache_mode, most_dynamic_shared,
        shared_carveout, cluster_required, cluster[3], scheduling, large_clusters, reserved[16];
} function_attributes;
API int cudaFuncGetAttributes(function_attributes *made, const void *host) {
    void *kernel;
    int value[15] = {0};
    int result = find_kernel(host, &kernel);
    for (int i = 0; i < 15 && result == SUCCESS; i++)
        result = cuFuncGetAttribute(&value[i], i, kernel);
    if (result != SUCCESS) return keep(result);
    *made = (function_attributes){.shared_bytes = (size_t)value[1],
                                  .constant_bytes = (size_t)value[2],
                                  .local_bytes = (size_t)value[3],
                                  .most_threads = value[0],
                                  .registers = value[4],
                                  .ptx_version = value[5],
                                  .binary_version = value[6],
                                  .most_dynamic_shared = value[8],
                                  .shared_carveout = -1,
                                  .cluster_required = value[10],
                                  .cluster = {value[11], value[12], value[13]},
                                  .large_clusters = value[14]};
    return SUCCESS;
}
API int cudaFuncSetAttribute(const void *host, int attribute, int value) {
    void *kernel;
    int result = find_kernel(host, &kernel), most = 0;
    if (result != SUCCESS) return keep(result);
    if (attribute == 8) {
        cuDeviceGetAttribute(&most, 97, 0);
        if (value < 0 || value > most) return keep(INVALID_VALUE);
    }
    return keep(cuFuncSetAttribute(kernel, attribute, value));
}
API int cudaFuncSetCacheConfig(const void *host, int config) {
    (void)host, (void)config;
    return SUCCESS;
}
API int cudaFuncSetSharedMemConfig(const void *host, int config) {
    (void)host, (void)config;
    return SUCCESS;
}

API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads,
                                                      size_t dynamic) {
    void *kernel;
    int result = find_kernel(host, &kernel);
    if (result == SUCCESS)
        result = cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, dynamic);
    return keep(result);
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host,
                                                               int threads, size_t dynamic,
                                                               unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, host, threads, dynamic);
}
API int cudaOccupancyMaxActiveClusters(int *clusters, const void *host,
                                       const runtime_launch_config *given) {
    void *kernel;
    launch_config config = from_runtime(given);
    int result = find_kernel(host, &kernel);
    if (result == SUCCESS) result = cuOccupancyMaxActiveClusters(clusters, kernel, &config);
    return keep(result);
}
API int cudaOccupancyMaxPotentialClusterSize(int *size, const void *host,
                                             const runtime_launch_config *given) {
    void *kernel;
    launch_config config = from_runtime(given);
    int result = find_kernel(host, &kernel);
    if (result == SUCCESS) result = cuOccupancyMaxPotentialClusterSize(size, kernel, &config);
    return keep(result);
}
