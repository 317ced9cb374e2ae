/* What the files of libcudart share: the CUDA runtime over the emulated driver. CUDART_MAJOR is 12 or 13, whose
 * libraries differ in a few layouts and names. Prototypes and numbers are the runtime API's, written down here.
 */
#ifndef DW_EMULATE_RUNTIME_H
#define DW_EMULATE_RUNTIME_H

#include "driver.h"

enum { /* cudaError_t, where it is not the driver's number */
       INVALID_CONFIGURATION = 9,
       INVALID_SYMBOL = 13,
       MISSING_CONFIGURATION = 52,
       INVALID_FUNCTION = 98,
};

typedef struct dim3 {
    unsigned x, y, z;
} dim3;

/* Every call's result goes through here: cudaGetLastError gives the last one that was no success. */
int keep(int result);
/* The kernel behind a host function that was registered, or a handle of cudaGetKernel. */
int find_kernel(const void *host, void **kernel);
/* The address of a __device__ or __constant__ variable. */
int find_symbol(const void *host, address *memory, size_t *bytes);

/* The same function by the name that programs with a default stream for each thread use. */
#define ALSO(name, suffix, ...) API int name##suffix(__VA_ARGS__) __attribute__((alias(#name)))

#endif
