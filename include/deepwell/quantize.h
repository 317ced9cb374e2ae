/* Quantization in blocks on a GPU: a matrix to codes and block scales along its rows, along its columns, or
 * both with one pass over it; to the bit what dw_block_quantize and dw_scales_swizzle (deepwell/number.h) make
 * of it, rounding to nearest. What it writes is what dw_product_run (deepwell/product.h) reads.
 *
 * GPUs of compute capability 9.0 (H100, H200), 10.0 and 10.3 (B200, B300), and the devices "emulator:sm_90a",
 * "emulator:sm_100a" and "emulator:sm_103a". On Blackwell proven on the emulator, not run on hardware. Nothing
 * chooses these kernels by itself. The first use of each on a GPU compares it with dw_block_quantize.
 *
 * Calls are asynchronous on the caller's stream, in the calling thread's current context (where there is none:
 * the first device's primary context). They allocate no device memory and synchronise with nothing, but for a
 * kernel's first use, and may be captured in a CUDA graph.
 */
#ifndef DEEPWELL_QUANTIZE_H
#define DEEPWELL_QUANTIZE_H

#include "deepwell/device.h"
#include "deepwell/graph.h"
#include "deepwell/number.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One direction's result, [outer, inner] as dw_block_options says: along the rows [rows, cols], along the columns
 * [cols, rows]. Device memory, 16-byte aligned. */
typedef struct dw_quantized_matrix {
    int wanted; /* 0: nothing here is read */
    void *
        codes; /* E2M1: two in a byte, the first in the low half; behind an odd last one is a zero */
    int64_t stride; /* bytes from one row of codes to the next: a multiple of 16 */
    void *
        scales; /* dw_scales_swizzled_bytes(outer, ceil(inner / block)): whole tiles, a square's in each row */
} dw_quantized_matrix;

/* One call. Fill it with zeros first. */
typedef struct dw_quantize {
    uint32_t size;            /* sizeof(dw_quantize) */
    const dw_device *device;  /* NULL: "cuda" */
    dw_dtype dtype;           /* of the matrix: DW_BF16, DW_F16 or DW_F32 */
    dw_scheme scheme;         /* MXFP8_E4M3, MXFP8_E5M2, MXFP4 or NVFP4 */
    dw_scale_rule scale_rule; /* as in dw_block_options */
    int square;               /* 1: a scale belongs to 32 x 32 (NVFP4: 16 x 16) elements */
    int64_t rows, cols;       /* at most 2^30 */
    const void *source; /* rows contiguous, at a multiple of an element's size; best of 16 bytes */
    int64_t row_stride; /* elements from one row to the next; not read where there is one row */
    dw_quantized_matrix along_rows, along_cols;
    /* NVFP4, device memory. `amax` NULL: *tensor_scale is read. Else the matrix's dw_amax is written to *amax,
     * and its dw_nvfp4_tensor_scale to *tensor_scale, which dw_product's factors may be. */
    float *tensor_scale, *amax;
    void *stream; /* CUstream; NULL is the legacy default stream */
} dw_quantize;

/* A matrix without rows or columns does nothing. DW_INVALID_ARGUMENT, DW_SHAPE, DW_TYPE: the call makes no sense;
 * DW_UNSUPPORTED: it is not served, on this GPU or at all, or the kernel differed at its first use. */
DW_API dw_status dw_quantize_run(const dw_quantize *call);

/* Whether a kernel would do it: DW_OK, or what is wrong. Pointers may be NULL; `amax` then means that the
 * tensor's scale is given. Compiles and compares if need be. */
DW_API dw_status dw_quantize_supported(const dw_quantize *call);

#ifdef __cplusplus
}
#endif
#endif
