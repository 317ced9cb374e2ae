/* libcuda.so.1 as an emulated GPU has it: the driver API over deepwell/emulator.h. A program that finds this
 * library before NVIDIA's runs its kernels on the CPU. Prototypes are the driver API's (CUDA 13), written down
 * here; work is done when it is asked for, so that streams and events have nothing to wait for.
 *
 *     DEEPWELL_EMULATE_ARCH    sm_90a (the default), sm_100a, sm_103a, sm_120a
 *     DEEPWELL_EMULATE_SEED    of the order of warps and asynchronous work
 *     DEEPWELL_EMULATE_CHECK   0: no search for undefined reads and races
 */
#include "deepwell/emulator.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define API __attribute__((visibility("default")))
typedef uint64_t address;

enum { /* CUresult */
       SUCCESS = 0,
       INVALID_VALUE = 1,
       OUT_OF_MEMORY = 2,
       NO_DEVICE = 100,
       INVALID_DEVICE = 101,
       INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201,
       NO_BINARY_FOR_GPU = 209,
       INVALID_PTX = 218,
       INVALID_HANDLE = 400,
       NOT_FOUND = 500,
       LAUNCH_FAILED = 719,
       NOT_SUPPORTED = 801,
};

/* ---- the one device ------------------------------------------------------------------------ */

static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    dw_emulator *emulator;
    int capability, failed; /* failed: what every call gives after a kernel was stopped */
    bool started;
    size_t told; /* findings that have been printed */
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};
static int the_context; /* its address is the handle */
static _Thread_local void *current;

/* Findings go to the error stream as they come: the program may not live to the end. */
static void tell(void) {
    pthread_mutex_lock(&gpu.lock);
    for (size_t count = dw_emulator_finding_count(gpu.emulator); gpu.told < count; gpu.told++) {
        dw_finding finding;
        char text[1500];
        if (dw_emulator_finding(gpu.emulator, gpu.told, &finding) != DW_OK) break;
        dw_finding_text(&finding, text, sizeof text);
        fprintf(stderr, "deepwell emulate: %s\n", text);
    }
    pthread_mutex_unlock(&gpu.lock);
}

static void start(void) {
    const char *architecture = getenv("DEEPWELL_EMULATE_ARCH"),
               *seed = getenv("DEEPWELL_EMULATE_SEED");
    const char *check = getenv("DEEPWELL_EMULATE_CHECK");
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    if (!architecture || !*architecture) architecture = "sm_90a";
    if (seed && *seed) options.seed = strtoull(seed, NULL, 10);
    if (check && strcmp(check, "0") == 0) options.check = false;
    if (dw_emulator_create(architecture, &options, &gpu.emulator) != DW_OK) {
        fprintf(stderr, "deepwell emulate: %s\n", dw_last_error());
        gpu.failed = NO_DEVICE;
        return;
    }
    gpu.capability = atoi(architecture + 3);
}

API int cuInit(unsigned flags) {
    (void)flags;
    pthread_once(&gpu.once, start);
    return gpu.emulator ? SUCCESS : NO_DEVICE;
}
API int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

static const struct {
    int result;
    const char *name, *text;
} results[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "the emulator takes PTX text"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "the emulator takes PTX text, not machine code"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "PTX that the emulator does not take; it has said why"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "the emulator stopped the kernel; it has said why"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported by the emulator"},
};
static int result_index(int result) {
    for (int i = 0; i < (int)(sizeof results / sizeof *results); i++)
        if (results[i].result == result) return i;
    return -1;
}
API int cuGetErrorName(int result, const char **name) {
    int index = result_index(result);
    *name = index < 0 ? NULL : results[index].name;
    return index < 0 ? INVALID_VALUE : SUCCESS;
}
API int cuGetErrorString(int result, const char **text) {
    int index = result_index(result);
    *text = index < 0 ? NULL : results[index].text;
    return index < 0 ? INVALID_VALUE : SUCCESS;
}

/* What a failure of ours is to the caller; the reason is printed, since the driver's codes cannot hold it. */
static int result_of(dw_status status) {
    if (status == DW_OK) return SUCCESS;
    fprintf(stderr, "deepwell emulate: %s\n", dw_last_error());
    switch (status) {
    case DW_OUT_OF_MEMORY: return OUT_OF_MEMORY;
    case DW_PARSE: return INVALID_PTX;
    case DW_UNSUPPORTED: return NOT_SUPPORTED;
    case DW_NOT_FOUND: return NOT_FOUND;
    case DW_INTERNAL: return LAUNCH_FAILED;
    default: return INVALID_VALUE;
    }
}

/* ---- devices and contexts ------------------------------------------------------------------ */

API int cuDeviceGetCount(int *count) {
    *count = 1;
    return SUCCESS;
}
API int cuDeviceGet(int *device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGetName(char *name, int bytes, int device) {
    snprintf(name, (size_t)bytes, "Deepwell emulator of sm_%d", gpu.capability);
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = (size_t)80 << 30;
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int values[][2] = {
        /* CUdevice_attribute: value */
        {1, 1024},  {2, 1024},  {3, 1024},    {4, 64},       {5, 2147483647}, {6, 65535},
        {7, 65535}, {8, 49152}, {9, 65536},   {10, 32},      {12, 65536},     {13, 1980000},
        {20, 0},    {33, 0},    {34, 0},      {36, 2619000}, {37, 5120},      {38, 50 << 20},
        {39, 2048}, {50, 0},    {81, 233472}, {82, 65536},   {97, 232448},    {111, 1},
        {115, 1},   {120, 1},   {127, 1},     {41, 1},
    };
    if (device != 0) return INVALID_DEVICE;
    *value = 0;
    if (attribute == 16) *value = gpu.capability == 90 ? 132 : gpu.capability == 120 ? 188 : 148;
    if (attribute == 75) *value = gpu.capability / 10;
    if (attribute == 76) *value = gpu.capability % 10;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i][0] == attribute) *value = values[i][1];
    return SUCCESS;
}
API int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &the_context;
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDevicePrimaryCtxRelease_v2(int device) { return device == 0 ? SUCCESS : INVALID_DEVICE; }
API int cuCtxGetCurrent(void **context) {
    *context = current;
    return SUCCESS;
}
API int cuCtxSetCurrent(void *context) {
    current = context;
    return SUCCESS;
}
API int cuCtxGetDevice(int *device) {
    *device = 0;
    return current ? SUCCESS : INVALID_CONTEXT;
}
API int cuCtxGetId(void *context, unsigned long long *id) {
    (void)context;
    *id = 1;
    return SUCCESS;
}
API int cuCtxSynchronize(void) { return gpu.failed; }
API int cuThreadExchangeStreamCaptureMode(int *mode) {
    (void)mode;
    return SUCCESS;
}

/* ---- memory -------------------------------------------------------------------------------- */

#define GO()                                                                                       \
    do {                                                                                           \
        if (gpu.failed) return gpu.failed;                                                         \
    } while (0)

API int cuMemAlloc_v2(address *memory, size_t bytes) {
    void *made = NULL;
    GO();
    if (bytes == 0) return INVALID_VALUE;
    int result = result_of(dw_emulator_allocate(gpu.emulator, bytes, &made));
    *memory = (address)(uintptr_t)made;
    return result;
}
API int cuMemFree_v2(address memory) {
    return result_of(dw_emulator_release(gpu.emulator, (void *)(uintptr_t)memory));
}
API int cuMemAllocHost_v2(void **memory, size_t bytes) {
    GO();
    return result_of(dw_emulator_allocate_host(gpu.emulator, bytes, memory));
}
API int cuMemFreeHost(void *memory) { return result_of(dw_emulator_release(gpu.emulator, memory)); }
API int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) {
    (void)flags;
    GO();
    return result_of(dw_emulator_register(gpu.emulator, memory, bytes));
}
API int cuMemHostUnregister(void *memory) {
    return result_of(dw_emulator_release(gpu.emulator, memory));
}
API int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
    (void)stream;
    GO();
    return result_of(dw_emulator_copy(gpu.emulator, (void *)(uintptr_t)to,
                                      (const void *)(uintptr_t)from, bytes));
}
API int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    GO();
    return result_of(dw_emulator_copy_in(gpu.emulator, (void *)(uintptr_t)to, from, bytes));
}
API int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    (void)stream;
    GO();
    return result_of(dw_emulator_copy_out(gpu.emulator, to, (const void *)(uintptr_t)from, bytes));
}
API int cuMemsetD8Async(address memory, unsigned char byte, size_t bytes, void *stream) {
    (void)stream;
    GO();
    return result_of(dw_emulator_fill(gpu.emulator, (void *)(uintptr_t)memory, byte, bytes));
}

/* ---- streams and events -------------------------------------------------------------------- */

typedef struct event {
    struct timespec at;
} event;

static int handle(void **made, size_t bytes) {
    *made = calloc(1, bytes);
    return *made ? SUCCESS : OUT_OF_MEMORY;
}
API int cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    return handle(stream, 16);
}
API int cuStreamDestroy_v2(void *stream) {
    free(stream);
    return SUCCESS;
}
API int cuStreamSynchronize(void *stream) {
    (void)stream;
    return gpu.failed;
}
API int cuStreamWaitEvent(void *stream, void *of, unsigned flags) {
    (void)stream, (void)of, (void)flags;
    return SUCCESS;
}
API int cuEventCreate(void **made, unsigned flags) {
    (void)flags;
    return handle(made, sizeof(event));
}
API int cuEventDestroy_v2(void *of) {
    free(of);
    return SUCCESS;
}
API int cuEventRecord(void *of, void *stream) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &((event *)of)->at);
    return gpu.failed;
}
API int cuEventSynchronize(void *of) {
    (void)of;
    return gpu.failed;
}
API int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    const struct timespec *a = &((event *)from)->at, *b = &((event *)to)->at;
    *milliseconds =
        (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) * 1e-6);
    return SUCCESS;
}

/* ---- modules ------------------------------------------------------------------------------- */

typedef struct function {
    dw_emulator_module *module;
    char name[512];
    int dynamic_shared;
    struct function *next;
} function;
typedef struct module {
    dw_emulator_module *module;
    function *functions;
} module;

API int cuModuleLoadData(void **made, const void *image) {
    GO();
    const char *text = image;
    /* An ELF file, or a bundle of such: machine code. */
    if (memcmp(text, "\177ELF", 4) == 0 || memcmp(text, "\x50\xed\x55\xba", 4) == 0)
        return NO_BINARY_FOR_GPU;
    int result = handle(made, sizeof(module));
    if (result != SUCCESS) return result;
    result = result_of(
        dw_emulator_load(gpu.emulator, text, strlen(text), "module", &((module *)*made)->module));
    if (result == SUCCESS) return SUCCESS;
    free(*made);
    return result;
}
API int cuModuleUnload(void *of) {
    module *m = of;
    while (m->functions) {
        function *f = m->functions;
        m->functions = f->next;
        free(f);
    }
    dw_emulator_unload(m->module);
    free(m);
    return SUCCESS;
}
API int cuModuleGetFunction(void **made, void *in, const char *name) {
    module *m = in;
    dw_status status = dw_emulator_has_kernel(m->module, name);
    if (status == DW_NOT_FOUND) return NOT_FOUND;
    if (status != DW_OK) return result_of(status);
    int result = handle(made, sizeof(function));
    if (result != SUCCESS) return result;
    function *f = *made;
    f->module = m->module;
    snprintf(f->name, sizeof f->name, "%s", name);
    f->next = m->functions;
    m->functions = f;
    return SUCCESS;
}
API int cuFuncGetAttribute(int *value, int attribute, void *of) {
    const function *f = of;
    uint32_t shared, local;
    dw_status status = dw_emulator_kernel_memory(f->module, f->name, &shared, &local);
    if (status != DW_OK) return result_of(status);
    *value = attribute == 0                     ? 1024 /* threads of a block */
             : attribute == 1                   ? (int)shared - 1024
             : attribute == 3                   ? (int)local
             : attribute == 4                   ? 64 /* registers: not known here */
             : attribute == 5 || attribute == 6 ? gpu.capability
             : attribute == 8                   ? f->dynamic_shared
                                                : 0;
    return SUCCESS;
}
API int cuFuncSetAttribute(void *of, int attribute, int value) {
    if (attribute == 8) ((function *)of)->dynamic_shared = value;
    return SUCCESS;
}

/* ---- launches ------------------------------------------------------------------------------ */

typedef struct launch_attribute {
    int id;
    char pad[4];
    union {
        char bytes[64];
        unsigned cluster[3];
    } value;
} launch_attribute;
typedef struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    launch_attribute *attributes;
    unsigned attribute_count;
} launch_config;
enum { ATTRIBUTE_CLUSTER = 4 };

API int cuLaunchKernelEx(const launch_config *config, void *of, void **arguments, void **extra) {
    const function *f = of;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    GO();
    if (extra) return NOT_SUPPORTED;
    for (int axis = 0; axis < 3; axis++)
        options.grid[axis] = config->grid[axis], options.block[axis] = config->block[axis];
    options.shared_bytes = config->shared_bytes;
    for (unsigned i = 0; i < config->attribute_count; i++)
        if (config->attributes[i].id == ATTRIBUTE_CLUSTER)
            for (int axis = 0; axis < 3; axis++)
                options.cluster[axis] = config->attributes[i].value.cluster[axis];
    dw_status status = dw_emulator_launch(f->module, f->name, &options, arguments, NULL);
    tell();
    int result = result_of(status);
    if (status == DW_INTERNAL)
        gpu.failed = result; /* as on a GPU, nothing goes on in this context */
    return result;
}
API int cuLaunchKernel(void *of, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared_bytes, void *stream, void **arguments,
                       void **extra) {
    launch_config config = {{gx, gy, gz}, {bx, by, bz}, shared_bytes, stream, NULL, 0};
    return cuLaunchKernelEx(&config, of, arguments, extra);
}

API int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *memory,
                               const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                               const uint32_t *steps, int interleave, int swizzle, int promotion,
                               int fill) {
    dw_emulator_tensor_shape shape = {.size_of = sizeof shape,
                                      .element = type,
                                      .rank = (int)rank,
                                      .address = memory,
                                      .interleave = interleave,
                                      .swizzle = swizzle,
                                      .fill_nan = fill};
    (void)promotion;
    if (rank < 1 || rank > 5) return INVALID_VALUE;
    for (uint32_t axis = 0; axis < rank; axis++) {
        shape.size[axis] = sizes[axis], shape.box[axis] = box[axis], shape.step[axis] = steps[axis];
        if (axis > 0) shape.stride[axis - 1] = strides[axis - 1];
    }
    return result_of(dw_emulator_tensor_map(&shape, map));
}
