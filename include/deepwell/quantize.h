/* Block quantization on a GPU: converts a matrix to codes and block scales along its rows, along its columns, or along
 * both in one pass. The result has the same bits as dw_block_quantize with rounding to nearest and dw_scales_swizzle
 * (deepwell/number.h). dw_gemm_run (deepwell/gemm.h) reads it.
 *
 *     dw_quantize call = {.struct_size = sizeof(call), .dtype = DW_BF16, .scheme = DW_SCHEME_MXFP8,
 *                         .rows = 4096, .cols = 4096, .source = x, .row_stride = 4096,
 *                         .along_rows = {1, codes, 4096, scales}, .stream = stream};
 *     if (dw_quantize_run(&call) != DW_OK) fprintf(stderr, "%s\n", dw_last_error());
 *
 * It needs compute capability 9.0 (H100, H200), 10.0, 10.3 (B200, B300) or 12.0 (RTX 50, RTX PRO Blackwell), or a
 * device "emulator:sm_90a", "emulator:sm_100a", "emulator:sm_103a" or "emulator:sm_120a". The Blackwell kernels have
 * been tested on the emulator but not on hardware. The engine does not use these kernels. The first use of each on a
 * GPU compares it with dw_block_quantize.
 *
 * Calls are asynchronous on the caller's stream. They run in the calling thread's current context; if there is none, in
 * the first device's primary context. They allocate no device memory, do not synchronise except at a kernel's first
 * use, and may be captured in a CUDA graph.
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

/* ---- types ---------------------------------------------------------------------------------- */

/* The result along one axis, [outer, inner] as in dw_block_options: [rows, cols] along the rows, [cols, rows] along the
 * columns. Device memory, 16-byte aligned. */
typedef struct dw_quantized_matrix {
    int wanted; /* 1: compute it; 0: the other members are not read */
    /* E2M1 has two codes per byte, the first in the low nibble; a zero nibble follows an odd last code. */
    void *codes;
    int64_t stride; /* bytes from one row of codes to the next: a multiple of 16 */
    /* dw_scales_swizzled_bytes(outer, ceil(inner / block)): whole tiles. A square block's scale is in each of its
     * rows. */
    void *scales;
} dw_quantized_matrix;

/* One call. Fill it with zeros first. */
typedef struct dw_quantize {
    size_t struct_size;       /* sizeof(dw_quantize) */
    const dw_device *device;  /* NULL: "cuda" */
    dw_dtype dtype;           /* of the matrix: DW_BF16, DW_F16 or DW_F32 */
    dw_scheme scheme;         /* MXFP8, MXFP8_E5M2, MXFP4 or NVFP4 */
    dw_scale_rule scale_rule; /* as in dw_block_options */
    int square;               /* 1: one scale for 32 x 32 (NVFP4: 16 x 16) elements */
    int64_t rows, cols;       /* at most 2^30 */
    const void *source; /* contiguous rows, aligned to an element; fastest if aligned to 16 bytes */
    int64_t row_stride; /* elements from one row to the next; not read for one row */
    dw_quantized_matrix along_rows, along_cols;
    /* NVFP4 only, device memory. `amax` NULL: *tensor_scale is read. Otherwise the matrix's dw_amax is written to *amax
     * and its dw_nvfp4_tensor_scale to *tensor_scale. dw_gemm's factors may point to *tensor_scale. */
    float *tensor_scale, *amax;
    void *stream; /* CUstream; NULL is the legacy default stream */
} dw_quantize;

/* ---- calls ---------------------------------------------------------------------------------- */

/* Quantizes the matrix. A matrix without rows or columns does nothing. DW_INVALID_ARGUMENT, DW_SHAPE, DW_TYPE: the
 * call is inconsistent. DW_UNSUPPORTED: the call is not supported, on this GPU or at all, or the kernel failed its
 * first-use check. */
DW_API dw_status dw_quantize_run(const dw_quantize *call);

/* ---- queries -------------------------------------------------------------------------------- */

/* Returns DW_OK if a kernel supports the call, else the reason. Pointers may be NULL; `amax` NULL means that the tensor
 * scale is given. Compiles and checks the kernel if necessary. */
DW_API dw_status dw_quantize_supported(const dw_quantize *call);

#ifdef __cplusplus
}
#endif
#endif
