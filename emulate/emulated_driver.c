/* libcuda.so.1 of an emulated GPU: the driver API over deepwell/emulator.h. A program that finds this library before
 * NVIDIA's runs its kernels on the CPU. The bargain: work runs when it is issued, so streams and events never wait,
 * and nothing overlaps.
 *
 *       DEEPWELL_EMULATE_ARCH    sm_90a (the default), sm_100a, sm_103a, sm_120a
 *       DEEPWELL_EMULATE_SEED    seed of the order of warps and asynchronous work
 *       DEEPWELL_EMULATE_CHECK   0 disables the search for undefined reads and races
 *       DEEPWELL_EMULATE_REPORT  file for the findings, as JSON
 *       DEEPWELL_EMULATE_THREADS           most host threads
 *       DEEPWELL_EMULATE_MULTIPROCESSORS   SMs of the GPU
 *       DEEPWELL_EMULATE_ENDLESS           operations without progress after which a loop is endless
 */
#include "driver.h"
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the one device ------------------------------------------------------------------------ */

emulated_gpu gpu;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static size_t printed;  /* findings that have been printed */
static int the_context; /* its address is the context's handle */
static _Thread_local void *current;

void write_report(void) {
    const char *path = getenv("DEEPWELL_EMULATE_REPORT");
    if (path && *path && dw_emulator_report(gpu.emulator, path) != DW_OK)
        fprintf(stderr, "deepwell emulate: %s\n", dw_last_error());
}

/* Prints findings at once, because the program may not exit normally. */
void print_findings(void) {
    pthread_mutex_lock(&lock);
    const size_t before = printed;
    for (size_t count = dw_emulator_finding_count(gpu.emulator); printed < count; printed++) {
        dw_finding finding;
        char text[2000];
        if (dw_emulator_finding(gpu.emulator, printed, &finding) != DW_OK) break;
        dw_finding_text(&finding, text, sizeof text);
        fflush(stdout);
        fprintf(stderr, "deepwell emulate: %s\n", text);
    }
    if (printed > before) write_report();
    pthread_mutex_unlock(&lock);
}

static void print(void *context, const char *text, size_t bytes) {
    (void)context;
    fwrite(text, 1, bytes, stdout);
}

/* Reads an environment variable; an unset or empty one changes nothing. Returns false after reporting an invalid
 * value. */
static bool read_number(const char *name, uint64_t most, uint64_t *number) {
    const char *text = getenv(name);
    char *end = NULL;
    if (!text || !*text) return true;
    errno = 0;
    const uint64_t read = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && !*end && !errno && read <= most)
        return *number = read, true;
    fprintf(stderr, "deepwell emulate: %s is \"%s\": must be a whole number\n", name, text);
    return false;
}

static void start(void) {
    const char *architecture = getenv("DEEPWELL_EMULATE_ARCH"),
               *seed = getenv("DEEPWELL_EMULATE_SEED");
    const char *check = getenv("DEEPWELL_EMULATE_CHECK");
    uint64_t threads = 0, multiprocessors = 0;
    dw_emulator_options options = DW_EMULATOR_OPTIONS_DEFAULT;
    if (!architecture || !*architecture) architecture = "sm_90a";
    if (seed && *seed) options.seed = strtoull(seed, NULL, 10);
    if (check && strcmp(check, "0") == 0) options.check = false;
    if (!read_number("DEEPWELL_EMULATE_THREADS", INT_MAX, &threads) ||
        !read_number("DEEPWELL_EMULATE_MULTIPROCESSORS", INT_MAX, &multiprocessors) ||
        !read_number("DEEPWELL_EMULATE_ENDLESS", UINT64_MAX, &options.endless)) {
        gpu.failed = NO_DEVICE;
        return;
    }
    options.threads = (int)threads;
    options.multiprocessors = (int)multiprocessors;
    options.print = print;
    if (dw_emulator_create(architecture, &options, &gpu.emulator) != DW_OK) {
        fprintf(stderr, "deepwell emulate: %s\n", dw_last_error());
        gpu.failed = NO_DEVICE;
        return;
    }
    gpu.capability = atoi(architecture + 3);
    gpu.seed = options.seed;
    write_report();
    atexit(write_report);
}

API int cuInit(unsigned flags) {
    (void)flags;
    pthread_once(&once, start);
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
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "the emulator supports only PTX text"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "the emulator supports PTX text, not machine code"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX",
     "PTX that the emulator does not support; see its message"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "the emulator stopped the kernel; see its message"},
    {COOPERATIVE_TOO_LARGE, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
     "too many blocks in cooperative launch"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported by the emulator"},
    {INVALID_CLUSTER_SIZE, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster misconfiguration"},
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

/* Reports that there are no undocumented function tables. NVRTC 13, once it has found a driver, calls this function
 * without checking that it exists. */
API int cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

/* Returns the code for the last finding, which stopped the kernel. */
static int result_of_stop(void) {
    static const struct {
        const char *kind;
        int result;
    } kinds[] = {{"out of bounds", ILLEGAL_ADDRESS},
                 {"not aligned", MISALIGNED_ADDRESS},
                 {"assertion", ASSERT}};
    dw_finding finding;
    size_t count = dw_emulator_finding_count(gpu.emulator);
    if (count > 0 && dw_emulator_finding(gpu.emulator, count - 1, &finding) == DW_OK)
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
            if (strcmp(kinds[i].kind, finding.kind) == 0) return kinds[i].result;
    return LAUNCH_FAILED;
}

int result_of(dw_status status) {
    if (status == DW_OK) return SUCCESS;
    fprintf(stderr, "deepwell emulate: %s\n", dw_last_error());
    switch (status) {
    case DW_OUT_OF_MEMORY: return OUT_OF_MEMORY;
    case DW_PARSE: return INVALID_PTX;
    case DW_UNSUPPORTED: return NOT_SUPPORTED;
    case DW_NOT_FOUND: return NOT_FOUND;
    case DW_INTERNAL: return result_of_stop();
    default: return INVALID_VALUE;
    }
}

/* ---- devices and contexts ------------------------------------------------------------------ */

API int cuDeviceGetCount(int *count) {
    *count = 1;
    return SUCCESS;
}
API int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    static const char name[16] = "deepwell emulate";
    memcpy(uuid, name, sizeof name);
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGet(int *device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGetName(char *name, int bytes, int device) {
    snprintf(name, (size_t)bytes, DW_EMULATOR_GPU_NAME "sm_%d", gpu.capability);
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = (size_t)80 << 30;
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int values[][2] = {
        /* CUdevice_attribute: value. */
        {1, 1024},  {2, 1024},  {3, 1024},    {4, 64},         {5, 2147483647},  {6, 65535},
        {7, 65535}, {8, 49152}, {9, 65536},   {10, 32},        {12, 65536},      {13, 1980000},
        {20, 0},    {33, 0},    {34, 0},      {36, 2619000},   {37, 5120},       {38, 50 << 20},
        {39, 2048}, {50, 0},    {81, 233472}, {82, 65536},     {97, 232448},     {111, 1},
        {115, 1},   {120, 1},   {127, 1},     {41, 1},         {11, 2147483647}, {14, 512},
        {15, 1},    {19, 1},    {31, 1},      {32, 1},         {40, 3},          {51, 32},
        {78, 1},    {79, 1},    {80, 1},      {83, 1},         {88, 0},          {90, 1},
        {95, 1},    {99, 1},    {106, 32},    {108, 32 << 20}, {109, 128 << 20},
    };
    /* sm_120: shared memory and threads of an SM, and shared memory of a block. */
    static const int geforce[][2] = {{39, 1536}, {81, 102400}, {97, 101376}, {106, 24}};
    if (device != 0) return INVALID_DEVICE;
    *value = 0;
    if (attribute == 16) *value = dw_emulator_multiprocessors(gpu.emulator);
    if (attribute == 75) *value = gpu.capability / 10;
    if (attribute == 76) *value = gpu.capability % 10;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i][0] == attribute) *value = values[i][1];
    if (gpu.capability == 120)
        for (size_t i = 0; i < sizeof geforce / sizeof *geforce; i++)
            if (geforce[i][0] == attribute) *value = geforce[i][1];
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
API int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    (void)flags;
    *context = current = &the_context;
    return device == 0 ? cuInit(0) : INVALID_DEVICE;
}
/* CUDA 13's form; its additional parameters have no effect here. */
API int cuCtxCreate_v4(void **context, const void *parameters, unsigned flags, int device) {
    (void)parameters;
    return cuCtxCreate_v2(context, flags, device);
}
API int cuCtxDestroy_v2(void *context) {
    (void)context;
    current = NULL;
    return SUCCESS;
}
API int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
API int cuCtxPopCurrent_v2(void **context) {
    if (context) *context = current;
    current = NULL;
    return SUCCESS;
}
API int cuCtxSynchronize(void) { return gpu.failed; }
API int cuThreadExchangeStreamCaptureMode(int *mode) {
    (void)mode;
    return SUCCESS;
}

/* ---- memory -------------------------------------------------------------------------------- */

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
API int cuMemAllocManaged(address *memory, size_t bytes, unsigned flags) {
    void *made = NULL;
    (void)flags;
    GO();
    if (bytes == 0) return INVALID_VALUE;
    int result = result_of(dw_emulator_allocate_host(gpu.emulator, bytes, &made));
    *memory = (address)(uintptr_t)made;
    return result;
}
API int cuMemAllocAsync(address *memory, size_t bytes, void *stream) {
    (void)stream;
    return cuMemAlloc_v2(memory, bytes);
}
API int cuMemFreeAsync(address memory, void *stream) {
    (void)stream;
    return cuMemFree_v2(memory);
}
API int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    (void)flags;
    return cuMemAllocHost_v2(memory, bytes);
}
API int cuMemHostGetDevicePointer_v2(address *memory, void *of, unsigned flags) {
    (void)flags;
    *memory = (address)(uintptr_t)of;
    return SUCCESS;
}
API int cuMemGetInfo_v2(size_t *available, size_t *total) {
    (void)cuDeviceTotalMem_v2(total, 0);
    *available = *total;
    return SUCCESS;
}
API int cuPointerGetAttribute(void *value, int attribute, address pointer) {
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, ORDINAL = 9 };
    GO();
    if (!dw_emulator_holds(gpu.emulator, (void *)(uintptr_t)pointer, 1)) return INVALID_VALUE;
    switch (attribute) {
    case CONTEXT: *(void **)value = &the_context; return SUCCESS;
    case MEMORY_TYPE: *(unsigned *)value = 2; return SUCCESS;
    case DEVICE_POINTER:
    case HOST_POINTER: *(address *)value = pointer; return SUCCESS;
    case ORDINAL: *(int *)value = 0; return SUCCESS;
    default: return NOT_SUPPORTED;
    }
}

/* ---- copies -------------------------------------------------------------------------------- */

API int cuMemcpyDtoD_v2(address to, address from, size_t bytes) {
    GO();
    return result_of(dw_emulator_copy(gpu.emulator, (void *)(uintptr_t)to,
                                      (const void *)(uintptr_t)from, bytes));
}
API int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) {
    GO();
    return result_of(dw_emulator_copy_in(gpu.emulator, (void *)(uintptr_t)to, from, bytes));
}
API int cuMemcpyDtoH_v2(void *to, address from, size_t bytes) {
    GO();
    return result_of(dw_emulator_copy_out(gpu.emulator, to, (const void *)(uintptr_t)from, bytes));
}
/* The addresses determine the direction. */
API int cuMemcpy(address to, address from, size_t bytes) {
    GO();
    const bool to_gpu = dw_emulator_holds(gpu.emulator, (void *)(uintptr_t)to, 1),
               from_gpu = dw_emulator_holds(gpu.emulator, (void *)(uintptr_t)from, 1);
    if (to_gpu && from_gpu) return cuMemcpyDtoD_v2(to, from, bytes);
    if (to_gpu) return cuMemcpyHtoD_v2(to, (const void *)(uintptr_t)from, bytes);
    if (from_gpu) return cuMemcpyDtoH_v2((void *)(uintptr_t)to, from, bytes);
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return SUCCESS;
}
API int cuMemcpyAsync(address to, address from, size_t bytes, void *stream) {
    (void)stream;
    return cuMemcpy(to, from, bytes);
}
API int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
    (void)stream;
    return cuMemcpyDtoD_v2(to, from, bytes);
}
API int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    return cuMemcpyHtoD_v2(to, from, bytes);
}
API int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    (void)stream;
    return cuMemcpyDtoH_v2(to, from, bytes);
}

/* Sets elements of 1, 2 or 4 bytes. */
static int set_elements(address to, const void *value, size_t bytes, size_t count) {
    GO();
    if (count > SIZE_MAX / bytes) return INVALID_VALUE;
    int result = result_of(dw_emulator_fill(gpu.emulator, (void *)(uintptr_t)to,
                                            *(const uint8_t *)value, bytes * count));
    for (size_t i = 0; i < count && result == SUCCESS && bytes > 1; i++)
        memcpy((char *)(uintptr_t)to + i * bytes, value, bytes);
    return result;
}
API int cuMemsetD8_v2(address to, unsigned char value, size_t count) {
    return set_elements(to, &value, 1, count);
}
API int cuMemsetD16_v2(address to, unsigned short value, size_t count) {
    return set_elements(to, &value, 2, count);
}
API int cuMemsetD32_v2(address to, unsigned value, size_t count) {
    return set_elements(to, &value, 4, count);
}
API int cuMemsetD8Async(address to, unsigned char value, size_t count, void *stream) {
    (void)stream;
    return cuMemsetD8_v2(to, value, count);
}
API int cuMemsetD16Async(address to, unsigned short value, size_t count, void *stream) {
    (void)stream;
    return cuMemsetD16_v2(to, value, count);
}
API int cuMemsetD32Async(address to, unsigned value, size_t count, void *stream) {
    (void)stream;
    return cuMemsetD32_v2(to, value, count);
}

/* ---- streams and events -------------------------------------------------------------------- */

typedef struct event {
    struct timespec at;
} event;

int handle(void **made, size_t bytes) {
    *made = calloc(1, bytes);
    return *made ? SUCCESS : OUT_OF_MEMORY;
}
API int cuStreamCreate(void **stream, unsigned flags) {
    (void)flags;
    return handle(stream, 16);
}
API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(stream, flags);
}
API int cuStreamQuery(void *stream) {
    (void)stream;
    return gpu.failed;
}
API int cuStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return SUCCESS;
}
API int cuStreamDestroy_v2(void *stream) {
    free(stream);
    return SUCCESS;
}
/* CUDA graphs are not emulated: programs that ask for them are told so. */
API int cuStreamBeginCapture_v2(void *stream, int mode) {
    (void)stream, (void)mode;
    return NOT_SUPPORTED;
}
API int cuStreamEndCapture(void *stream, void **graph) {
    (void)stream, (void)graph;
    return NOT_SUPPORTED;
}
API int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    (void)executable, (void)graph, (void)flags;
    return NOT_SUPPORTED;
}
API int cuGraphExecUpdate_v2(void *executable, void *graph, void *result) {
    (void)executable, (void)graph, (void)result;
    return NOT_SUPPORTED;
}
API int cuGraphLaunch(void *executable, void *stream) {
    (void)executable, (void)stream;
    return NOT_SUPPORTED;
}
API int cuGraphDestroy(void *graph) {
    (void)graph;
    return NOT_SUPPORTED;
}
API int cuGraphExecDestroy(void *executable) {
    (void)executable;
    return NOT_SUPPORTED;
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
API int cuEventQuery(void *of) {
    (void)of;
    return gpu.failed;
}
API int cuEventRecordWithFlags(void *of, void *stream, unsigned flags) {
    (void)flags;
    return cuEventRecord(of, stream);
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
