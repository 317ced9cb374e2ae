/* NVIDIA's driver, loaded on first use: libcuda.so.1 comes with the driver, never with Deepwell.
 *
 * The prototypes below are the driver API functions that we call, declared here so that no toolkit is needed
 * to build. Handles (contexts, streams, events, modules, functions) are pointers, device addresses are 64-bit
 * numbers, and enumerations are ints. Names with a version suffix (_v2) are the binary interface since CUDA
 * 4; the library's plain names are older versions. */
#ifndef DW_CUDA_DRIVER_H
#define DW_CUDA_DRIVER_H

#include "base/base.h"

/* cuTensorMapEncodeTiled and thread block clusters require 12.0. */
#define DW_CUDA_OLDEST_DRIVER 12000

typedef uint64_t dw__cu_address;

/* CUlaunchAttribute: the value is a union padded to 64 bytes. */
typedef struct dw__cu_launch_attribute {
    int id;
    char pad[4];
    union {
        char bytes[64];
        unsigned cluster[3];
        int flag;
    } value;
} dw__cu_launch_attribute;

/* CUlaunchConfig */
typedef struct dw__cu_launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    dw__cu_launch_attribute *attributes;
    unsigned attribute_count;
} dw__cu_launch_config;

enum { /* CUlaunchAttributeID */
       DW_CU_LAUNCH_CLUSTER = 4,
       DW_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION = 6,
};
enum { /* CUdevice_attribute */
       DW_CU_DEVICE_CLOCK_RATE = 13,
       DW_CU_DEVICE_SM_COUNT = 16,
       DW_CU_DEVICE_PCI_BUS = 33,
       DW_CU_DEVICE_PCI_DEVICE = 34,
       DW_CU_DEVICE_MEMORY_CLOCK_RATE = 36,
       DW_CU_DEVICE_MEMORY_BUS_WIDTH = 37,
       DW_CU_DEVICE_L2_BYTES = 38,
       DW_CU_DEVICE_PCI_DOMAIN = 50,
       DW_CU_DEVICE_CAPABILITY_MAJOR = 75,
       DW_CU_DEVICE_CAPABILITY_MINOR = 76,
       DW_CU_DEVICE_SHARED_BYTES_OPTIN = 97,
};
enum {
    DW_CU_FUNCTION_DYNAMIC_SHARED_BYTES = 8
};     /* CUfunction_attribute: largest dynamic shared memory */
enum { /* CUresult: the ones that we distinguish */
       DW_CU_OUT_OF_MEMORY = 2,
       DW_CU_NOT_INITIALIZED = 3,
       DW_CU_STUB_LIBRARY = 34,
       DW_CU_NO_DEVICE = 100,
       DW_CU_INVALID_IMAGE = 200,
       DW_CU_INVALID_CONTEXT = 201,
       DW_CU_NO_BINARY_FOR_GPU = 209,
       DW_CU_UNSUPPORTED_PTX_VERSION = 222,
       DW_CU_INVALID_HANDLE = 400,
       DW_CU_ILLEGAL_ADDRESS = 700,
       DW_CU_LAUNCH_OUT_OF_RESOURCES = 701,
       DW_CU_LAUNCH_FAILED = 719,
       DW_CU_NOT_SUPPORTED = 801,
       DW_CU_DRIVER_MISMATCH = 803,
       DW_CU_CAPTURE_UNSUPPORTED = 900,
       DW_CU_CAPTURE_LAST = 910,
};

/* member, name in the library, parameters */
#define DW_CUDA_FUNCTIONS(X)                                                                       \
    X(init, cuInit, (unsigned flags))                                                              \
    X(driver_version, cuDriverGetVersion, (int *version))                                          \
    X(error_name, cuGetErrorName, (int result, const char **name))                                 \
    X(error_text, cuGetErrorString, (int result, const char **text))                               \
    X(device_count, cuDeviceGetCount, (int *count))                                                \
    X(device_get, cuDeviceGet, (int *device, int ordinal))                                         \
    X(device_name, cuDeviceGetName, (char *name, int bytes, int device))                           \
    X(device_attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))             \
    X(device_memory, cuDeviceTotalMem_v2, (size_t * bytes, int device))                            \
    X(primary_retain, cuDevicePrimaryCtxRetain, (void **context, int device))                      \
    X(context_current, cuCtxGetCurrent, (void **context))                                          \
    X(context_set_current, cuCtxSetCurrent, (void *context))                                       \
    X(context_device, cuCtxGetDevice, (int *device))                                               \
    X(context_id, cuCtxGetId, (void *context, unsigned long long *id))                             \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *mode))                                \
    X(memory_allocate, cuMemAlloc_v2, (dw__cu_address * address, size_t bytes))                    \
    X(memory_release, cuMemFree_v2, (dw__cu_address address))                                      \
    X(host_allocate, cuMemAllocHost_v2, (void **memory, size_t bytes))                             \
    X(host_release, cuMemFreeHost, (void *memory))                                                 \
    X(copy, cuMemcpyDtoDAsync_v2,                                                                  \
      (dw__cu_address to, dw__cu_address from, size_t bytes, void *stream))                        \
    X(copy_in, cuMemcpyHtoDAsync_v2,                                                               \
      (dw__cu_address to, const void *from, size_t bytes, void *stream))                           \
    X(copy_out, cuMemcpyDtoHAsync_v2, (void *to, dw__cu_address from, size_t bytes, void *stream)) \
    X(fill, cuMemsetD8Async,                                                                       \
      (dw__cu_address memory, unsigned char byte, size_t bytes, void *stream))                     \
    X(stream_create, cuStreamCreate, (void **stream, unsigned flags))                              \
    X(stream_destroy, cuStreamDestroy_v2, (void *stream))                                          \
    X(stream_synchronize, cuStreamSynchronize, (void *stream))                                     \
    X(stream_wait, cuStreamWaitEvent, (void *stream, void *event, unsigned flags))                 \
    X(event_create, cuEventCreate, (void **event, unsigned flags))                                 \
    X(event_destroy, cuEventDestroy_v2, (void *event))                                             \
    X(event_record, cuEventRecord, (void *event, void *stream))                                    \
    X(event_synchronize, cuEventSynchronize, (void *event))                                        \
    X(event_elapsed, cuEventElapsedTime, (float *milliseconds, void *from, void *to))              \
    X(module_load, cuModuleLoadData, (void **module, const void *image))                           \
    X(module_unload, cuModuleUnload, (void *module))                                               \
    X(module_function, cuModuleGetFunction, (void **function, void *module, const char *name))     \
    X(function_attribute, cuFuncGetAttribute, (int *value, int attribute, void *function))         \
    X(function_set_attribute, cuFuncSetAttribute, (void *function, int attribute, int value))      \
    X(launch, cuLaunchKernelEx,                                                                    \
      (const dw__cu_launch_config *config, void *function, void **arguments, void **extra))        \
    X(capture_begin, cuStreamBeginCapture_v2, (void *stream, int mode))                            \
    X(capture_status, cuStreamIsCapturing, (void *stream, int *status))                            \
    X(capture_end, cuStreamEndCapture, (void *stream, void **graph))                               \
    X(graph_instantiate, cuGraphInstantiateWithFlags,                                              \
      (void **executable, void *graph, unsigned long long flags))                                  \
    X(graph_update, cuGraphExecUpdate_v2, (void *executable, void *graph, void *result))           \
    X(graph_launch, cuGraphLaunch, (void *executable, void *stream))                               \
    X(graph_destroy, cuGraphDestroy, (void *graph))                                                \
    X(graph_release, cuGraphExecDestroy, (void *executable))                                       \
    X(tensor_map_tiled, cuTensorMapEncodeTiled,                                                    \
      (void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,                   \
       const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,        \
       int swizzle, int promotion, int fill))

typedef struct dw__cuda {
#define DW_CUDA_MEMBER(member, name, parameters) int(*member) parameters;
    DW_CUDA_FUNCTIONS(DW_CUDA_MEMBER)
#undef DW_CUDA_MEMBER
    int version; /* 13000 for CUDA 13.0 */
    int devices; /* at least 1 */
} dw__cuda;

/* Returns the initialised driver with at least one device. The result, or the failure, is the same for the
 * life of the process, as in the driver itself. DW_UNSUPPORTED: there is no driver, it is too old, or there
 * is no GPU. */
dw_status dw__cuda_driver(const dw__cuda **driver);

/* The message has the arguments' text, the driver's name and text for `result`, and the next step if one is known. */
dw_status dw__cuda_fail(int result, const char *format, ...) DW_PRINTF(2, 3);
#define dw__cuda_fail(...) dw__not_ok((dw__cuda_fail)(__VA_ARGS__))

#endif
