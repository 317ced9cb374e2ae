/* The interface shared by the files of libcuda.so.1, and the part of it that libcudart calls. Prototypes and numbers
 * are the driver API's (CUDA 13), written down here so that no CUDA header is needed.
 */
#ifndef DW_EMULATE_DRIVER_H
#define DW_EMULATE_DRIVER_H

#include "deepwell/emulator.h"

#define API __attribute__((visibility("default")))
typedef uint64_t address;

enum { /* CUresult. The runtime uses the same numbers, except for those in runtime.h. */
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
       ILLEGAL_ADDRESS = 700,
       ASSERT = 710,
       MISALIGNED_ADDRESS = 716,
       LAUNCH_FAILED = 719,
       COOPERATIVE_TOO_LARGE = 720,
       NOT_SUPPORTED = 801,
       INVALID_CLUSTER_SIZE = 912,
};

typedef struct launch_attribute {
    int id;
    char pad[4];
    union {
        char bytes[64];
        unsigned cluster[3];
        int cooperative;
    } value;
} launch_attribute;
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_CLUSTER = 4, ATTRIBUTE_PREFERRED_CLUSTER = 11 };
/* Shared memory that a block gets without an opt-in, in bytes. */
enum { SHARED_UNASKED = 48 << 10 };
typedef struct launch_config {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    launch_attribute *attributes;
    unsigned attribute_count;
} launch_config;

/* ---- within libcuda ------------------------------------------------------------------------ */

typedef struct emulated_gpu {
    dw_emulator *emulator;
    int capability; /* 90 */
    int failed;     /* returned by every call after a kernel was stopped */
    uint64_t seed;
} emulated_gpu;
extern emulated_gpu gpu;

/* Converts a status to a driver code and prints the message, because driver codes cannot carry it. */
int result_of(dw_status status);
/* Prints the findings that have not been printed and writes them to the report. */
void print_findings(void);
/* Writes the file of findings at once, because the program may not exit normally. */
void write_report(void);
/* Allocates zeroed host memory as a handle. */
int handle(void **made, size_t bytes);

#define GO()                                                                                       \
    do {                                                                                           \
        if (cuInit(0) != SUCCESS) return NO_DEVICE;                                                \
        if (gpu.failed) return gpu.failed;                                                         \
    } while (0)

/* ---- called by libcudart ------------------------------------------------------------------- */

API int cuInit(unsigned flags);
API int cuGetErrorName(int result, const char **name);
API int cuGetErrorString(int result, const char **text);
API int cuDeviceGetName(char *name, int bytes, int device);
API int cuDeviceGetAttribute(int *value, int attribute, int device);
API int cuDeviceTotalMem_v2(size_t *bytes, int device);
API int cuCtxSynchronize(void);
API int cuMemGetInfo_v2(size_t *available, size_t *total);
API int cuMemAlloc_v2(address *memory, size_t bytes);
API int cuMemFree_v2(address memory);
API int cuMemAllocHost_v2(void **memory, size_t bytes);
API int cuMemFreeHost(void *memory);
API int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags);
API int cuMemHostUnregister(void *memory);
API int cuMemcpy(address to, address from, size_t bytes);
API int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes);
API int cuMemcpyDtoH_v2(void *to, address from, size_t bytes);
API int cuMemcpyDtoD_v2(address to, address from, size_t bytes);
API int cuMemsetD8_v2(address to, unsigned char value, size_t count);
API int cuPointerGetAttribute(void *value, int attribute, address pointer);
API int cuStreamCreate(void **stream, unsigned flags);
API int cuStreamDestroy_v2(void *stream);
API int cuStreamSynchronize(void *stream);
API int cuEventCreate(void **made, unsigned flags);
API int cuEventDestroy_v2(void *of);
API int cuEventRecord(void *of, void *stream);
API int cuEventElapsedTime(float *milliseconds, void *from, void *to);
API int cuModuleLoadData(void **made, const void *image);
API int cuModuleUnload(void *of);
API int cuModuleGetFunction(void **made, void *in, const char *name);
API int cuModuleGetGlobal_v2(address *memory, size_t *bytes, void *in, const char *name);
API int cuFuncGetAttribute(int *value, int attribute, void *of);
API int cuFuncSetAttribute(void *of, int attribute, int value);
API int cuFuncGetName(const char **name, void *of);
API int cuFuncGetParamInfo(void *of, size_t index, size_t *offset, size_t *bytes);
API int cuLaunchKernelEx(const launch_config *config, void *of, void **arguments, void **extra);
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *of, int threads,
                                                    size_t dynamic);
API int cuOccupancyMaxPotentialClusterSize(int *size, void *of, const launch_config *config);
API int cuOccupancyMaxActiveClusters(int *clusters, void *of, const launch_config *config);
API int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                            int *status);

#endif
