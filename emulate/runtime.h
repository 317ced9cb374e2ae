/* The interface shared by the files of libcudart: the CUDA runtime over the emulated driver. CUDART_MAJOR is 12 or
 * 13; the two libraries differ in a few layouts and names. Prototypes and numbers are the runtime API's, written down
 * here so that no CUDA header is needed.
 */
#ifndef DW_EMULATE_RUNTIME_H
#define DW_EMULATE_RUNTIME_H

#include "driver.h"

enum { /* cudaError_t, where it differs from the driver's number */
       INVALID_CONFIGURATION = 9,
       INVALID_SYMBOL = 13,
       MISSING_CONFIGURATION = 52,
       INVALID_FUNCTION = 98,
};

typedef struct dim3 {
    unsigned x, y, z;
} dim3;

/* Records the result of a call and returns it. cudaGetLastError returns the last failure. */
int keep(int result);
/* Finds the kernel of a registered host function or of a handle from cudaGetKernel. */
int find_kernel(const void *host, void **kernel);
/* Finds the address of a __device__ or __constant__ variable. */
int find_symbol(const void *host, address *memory, size_t *bytes);

/* Defines the same function under the name that programs with a default stream for each thread use. */
#define ALSO(name, suffix, ...) API int name##suffix(__VA_ARGS__) __attribute__((alias(#name)))

#endif
