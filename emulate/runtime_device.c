/* The device part of an emulated GPU's libcudart: the one device, errors, streams, events, entry points. */
#include "runtime.h"
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* ---- errors -------------------------------------------------------------------------------- */

static _Thread_local int last;

int keep(int result) {
    if (result != SUCCESS) last = result;
    return result;
}
API int cudaPeekAtLastError(void) { return last; }
API int cudaGetLastError(void) {
    int result = last;
    last = SUCCESS;
    return result;
}

static const struct {
    int result;
    const char *name, *text;
} results[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {12, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {INVALID_SYMBOL, "cudaErrorInvalidSymbol", "invalid device symbol"},
    {21, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {MISSING_CONFIGURATION, "cudaErrorMissingConfiguration",
     "__global__ function call is not configured"},
    {INVALID_FUNCTION, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_IMAGE, "cudaErrorInvalidKernelImage", "device kernel image is invalid"},
    {NO_BINARY_FOR_GPU, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {INVALID_PTX, "cudaErrorInvalidPtx", "PTX that the emulator does not support; see its message"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {ILLEGAL_ADDRESS, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {ASSERT, "cudaErrorAssert", "device-side assert triggered"},
    {MISALIGNED_ADDRESS, "cudaErrorMisalignedAddress", "misaligned address"},
    {LAUNCH_FAILED, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {COOPERATIVE_TOO_LARGE, "cudaErrorCooperativeLaunchTooLarge",
     "too many blocks in cooperative launch"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {INVALID_CLUSTER_SIZE, "cudaErrorInvalidClusterSize", "cluster misconfiguration"},
};
API const char *cudaGetErrorName(int result) {
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].result == result) return results[i].name;
    return "unrecognized error code";
}
API const char *cudaGetErrorString(int result) {
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].result == result) return results[i].text;
    return "unrecognized error code";
}

/* ---- the device ---------------------------------------------------------------------------- */

API int cudaGetDeviceCount(int *count) {
    *count = cuInit(0) == SUCCESS ? 1 : 0;
    return keep(*count ? SUCCESS : NO_DEVICE);
}
API int cudaGetDevice(int *device) {
    *device = 0;
    return keep(cuInit(0));
}
API int cudaSetDevice(int device) { return keep(device == 0 ? cuInit(0) : INVALID_DEVICE); }
API int cudaInitDevice(int device, unsigned flags, unsigned how) {
    (void)flags, (void)how;
    return cudaSetDevice(device);
}
API int cudaSetDeviceFlags(unsigned flags) {
    (void)flags;
    return SUCCESS;
}
API int cudaGetDeviceFlags(unsigned *flags) {
    *flags = 0;
    return SUCCESS;
}
API int cudaSetValidDevices(int *devices, int count) {
    (void)devices, (void)count;
    return SUCCESS;
}
API int cudaDeviceReset(void) { return SUCCESS; }
API int cudaDeviceSynchronize(void) { return keep(cuCtxSynchronize()); }
API int cudaRuntimeGetVersion(int *version) {
    *version = CUDART_MAJOR == 12 ? 12080 : 13000;
    return SUCCESS;
}
API int cudaDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}
API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (cuInit(0) != SUCCESS) return keep(NO_DEVICE);
    return keep(cuDeviceGetAttribute(value, attribute, device));
}
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return SUCCESS;
}
API int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return SUCCESS;
}
API int cudaDeviceGetPCIBusId(char *text, int bytes, int device) {
    (void)device;
    snprintf(text, (size_t)bytes, "0000:00:00.0");
    return SUCCESS;
}
/* Limits have no effect: stacks, the heap and printf's buffer grow on demand. */
static size_t limits[8] = {1024, 1 << 20, 8 << 20};
API int cudaDeviceSetLimit(int limit, size_t value) {
    if (limit < 0 || limit >= 8) return keep(INVALID_VALUE);
    limits[limit] = value;
    return SUCCESS;
}
API int cudaDeviceGetLimit(size_t *value, int limit) {
    if (limit < 0 || limit >= 8) return keep(INVALID_VALUE);
    *value = limits[limit];
    return SUCCESS;
}
API int cudaDeviceSetCacheConfig(int config) {
    (void)config;
    return SUCCESS;
}
API int cudaDeviceGetCacheConfig(int *config) {
    *config = 0;
    return SUCCESS;
}
API int cudaDeviceSetSharedMemConfig(int config) {
    (void)config;
    return SUCCESS;
}
API int cudaDeviceGetSharedMemConfig(int *config) {
    *config = 1;
    return SUCCESS;
}
API int cudaCtxResetPersistingL2Cache(void) { return SUCCESS; }
API int cudaProfilerStart(void) { return SUCCESS; }
API int cudaProfilerStop(void) { return SUCCESS; }

/* cudaDeviceProp. Members that the emulated GPU does not have are 0. */
typedef struct properties {
    char name[256], uuid[16], luid[8];
    unsigned luid_mask;
    size_t memory, shared_bytes;
    int registers, warp_size;
    size_t pitch;
    int threads, block[3], grid[3];
#if CUDART_MAJOR == 12
    int clock_rate;
#endif
    size_t constant_bytes;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
#if CUDART_MAJOR == 12
    int overlap;
#endif
    int multiprocessors;
#if CUDART_MAJOR == 12
    int timeout;
#endif
    int integrated, maps_host;
#if CUDART_MAJOR == 12
    int compute_mode;
#endif
    int textures_1d[2];
#if CUDART_MAJOR == 12
    int texture_1d_linear;
#endif
    int textures_and_surfaces[37];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, engines, unified_addressing;
#if CUDART_MAJOR == 12
    int memory_clock_rate;
#endif
    int bus_width, l2_bytes, l2_persisting_bytes, threads_of_multiprocessor, stream_priorities,
        global_l1, local_l1;
    size_t shared_of_multiprocessor;
    int registers_of_multiprocessor, managed, multi_gpu_board, multi_gpu_group, host_atomics;
#if CUDART_MAJOR == 12
    int double_ratio;
#endif
    int pageable, concurrent_managed, preemption, host_pointer_registered, cooperative;
#if CUDART_MAJOR == 12
    int cooperative_multi;
#endif
    size_t shared_optin;
    int pageable_tables, managed_from_host, blocks_of_multiprocessor, window;
    size_t shared_reserved;
    int host_register, sparse, host_register_read_only, timeline, pools, rdma;
    unsigned rdma_flush;
    int rdma_order;
    unsigned pool_handles;
    int deferred_arrays, ipc, clusters, function_pointers;
#if CUDART_MAJOR == 12
    int reserved[63];
#else
    int numa[3], mps_and_pci[4], reserved[56];
#endif
} properties;

static int attribute(int number) {
    int value = 0;
    (void)cuDeviceGetAttribute(&value, number, 0);
    return value;
}
API int cudaGetDeviceProperties(properties *p, int device) {
    if (cuInit(0) != SUCCESS) return keep(NO_DEVICE);
    if (device != 0) return keep(INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    (void)cuDeviceGetName(p->name, sizeof p->name, 0);
    (void)cuDeviceTotalMem_v2(&p->memory, 0);
    memcpy(p->uuid, "deepwell emulate", sizeof p->uuid);
    p->shared_bytes = (size_t)attribute(8);
    p->registers = attribute(12), p->warp_size = attribute(10);
    p->pitch = (size_t)attribute(11);
    p->threads = attribute(1);
    for (int axis = 0; axis < 3; axis++)
        p->block[axis] = attribute(2 + axis), p->grid[axis] = attribute(5 + axis);
#if CUDART_MAJOR == 12
    p->clock_rate = attribute(13), p->memory_clock_rate = attribute(36), p->overlap = 1;
#endif
    p->constant_bytes = (size_t)attribute(9);
    p->major = attribute(75), p->minor = attribute(76);
    p->texture_alignment = 512, p->texture_pitch_alignment = 32, p->surface_alignment = 512;
    p->multiprocessors = attribute(16), p->maps_host = attribute(19);
    p->concurrent_kernels = attribute(31), p->ecc = attribute(32), p->engines = attribute(40);
    p->unified_addressing = attribute(41), p->bus_width = attribute(37);
    p->l2_bytes = attribute(38), p->l2_persisting_bytes = attribute(108);
    p->threads_of_multiprocessor = attribute(39), p->stream_priorities = attribute(78);
    p->global_l1 = attribute(79), p->local_l1 = attribute(80);
    p->shared_of_multiprocessor = (size_t)attribute(81);
    p->registers_of_multiprocessor = attribute(82), p->managed = attribute(83);
    p->preemption = attribute(90), p->cooperative = attribute(95);
    p->shared_optin = (size_t)attribute(97), p->blocks_of_multiprocessor = attribute(106);
    p->window = attribute(109), p->shared_reserved = (size_t)attribute(111);
    p->host_register = attribute(99), p->pools = attribute(115), p->clusters = attribute(120);
    return SUCCESS;
}
#if CUDART_MAJOR == 12
ALSO(cudaGetDeviceProperties, _v2, properties *, int);
#endif
/* Sizes from the toolkits' headers. */
#if CUDART_MAJOR == 12
_Static_assert(sizeof(properties) == 1032 && offsetof(properties, clusters) == 772,
               "cudaDeviceProp of CUDA 12");
#else
_Static_assert(sizeof(properties) == 1008 && offsetof(properties, clusters) == 748,
               "cudaDeviceProp of CUDA 13");
#endif

/* ---- streams ------------------------------------------------------------------------------- */

API int cudaStreamCreate(void **stream) { return keep(cuStreamCreate(stream, 0)); }
API int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    return keep(cuStreamCreate(stream, flags));
}
API int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    (void)priority;
    return keep(cuStreamCreate(stream, flags));
}
API int cudaStreamDestroy(void *stream) { return keep(cuStreamDestroy_v2(stream)); }
API int cudaStreamSynchronize(void *stream) { return keep(cuStreamSynchronize(stream)); }
ALSO(cudaStreamSynchronize, _ptsz, void *);
API int cudaStreamQuery(void *stream) { return keep(cuStreamSynchronize(stream)); }
ALSO(cudaStreamQuery, _ptsz, void *);
API int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return SUCCESS;
}
ALSO(cudaStreamWaitEvent, _ptsz, void *, void *, unsigned);
API int cudaStreamGetPriority(void *stream, int *priority) {
    (void)stream;
    *priority = 0;
    return SUCCESS;
}
ALSO(cudaStreamGetPriority, _ptsz, void *, int *);
API int cudaStreamGetFlags(void *stream, unsigned *flags) {
    (void)stream;
    *flags = 0;
    return SUCCESS;
}
ALSO(cudaStreamGetFlags, _ptsz, void *, unsigned *);
API int cudaStreamGetDevice(void *stream, int *device) {
    (void)stream;
    *device = 0;
    return SUCCESS;
}
API int cudaStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return SUCCESS;
}
ALSO(cudaStreamIsCapturing, _ptsz, void *, int *);
API int cudaStreamAddCallback(void *stream, void (*callback)(void *, int, void *), void *data,
                              unsigned flags) {
    (void)flags;
    callback(stream, SUCCESS, data);
    return SUCCESS;
}
ALSO(cudaStreamAddCallback, _ptsz, void *, void (*)(void *, int, void *), void *, unsigned);
API int cudaStreamAttachMemAsync(void *stream, void *memory, size_t bytes, unsigned flags) {
    (void)stream, (void)memory, (void)bytes, (void)flags;
    return SUCCESS;
}
API int cudaThreadExchangeStreamCaptureMode(int *mode) {
    (void)mode;
    return SUCCESS;
}
#if CUDART_MAJOR == 12
API int cudaThreadSynchronize(void) { return cudaDeviceSynchronize(); }
API int cudaThreadExit(void) { return SUCCESS; }
#endif

/* ---- events -------------------------------------------------------------------------------- */

API int cudaEventCreate(void **event) { return keep(cuEventCreate(event, 0)); }
API int cudaEventCreateWithFlags(void **event, unsigned flags) {
    return keep(cuEventCreate(event, flags));
}
API int cudaEventDestroy(void *event) { return keep(cuEventDestroy_v2(event)); }
API int cudaEventRecord(void *event, void *stream) { return keep(cuEventRecord(event, stream)); }
ALSO(cudaEventRecord, _ptsz, void *, void *);
API int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    (void)flags;
    return cudaEventRecord(event, stream);
}
ALSO(cudaEventRecordWithFlags, _ptsz, void *, void *, unsigned);
API int cudaEventSynchronize(void *event) {
    (void)event;
    return keep(cuCtxSynchronize());
}
API int cudaEventQuery(void *event) { return cudaEventSynchronize(event); }
API int cudaEventElapsedTime(float *milliseconds, void *from, void *to) {
    return keep(cuEventElapsedTime(milliseconds, from, to));
}
#if CUDART_MAJOR == 12
ALSO(cudaEventElapsedTime, _v2, float *, void *, void *);
#endif

/* ---- entry points -------------------------------------------------------------------------- */

API int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                         unsigned long long flags, int *status) {
    int found = 1;
    (void)cuGetProcAddress_v2(name, function, (int)version, flags, &found);
    if (status) *status = found;
    return found == 0 || status ? SUCCESS : keep(NOT_FOUND);
}
ALSO(cudaGetDriverEntryPointByVersion, _ptsz, const char *, void **, unsigned, unsigned long long,
     int *);
API int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, 1000 * CUDART_MAJOR, flags, status);
}
ALSO(cudaGetDriverEntryPoint, _ptsz, const char *, void **, unsigned long long, int *);

/* The element format of textures and arrays, which are not emulated; only this description works. */
typedef struct channels {
    int bits[4], kind;
} channels;
API channels cudaCreateChannelDesc(int x, int y, int z, int w, int kind) {
    return (channels){{x, y, z, w}, kind};
}
