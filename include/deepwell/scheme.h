/* Schemes: how a tensor is stored. A scheme says the element type, which elements share a scale, and how scales are
 * stored. One table names all of them; number formats, graphs, precision policies, GPU kernels and the planner use it.
 *
 *     const dw_scheme_info *info = dw_scheme_find("mxfp8", &scheme) == DW_OK ? dw_scheme_describe(scheme) : NULL;
 *     info->element, info->block, info->scale;    // DW_E4M3, 32, DW_E8M0
 *
 * Code that supports some of the schemes refuses the others with DW_UNSUPPORTED, and its message lists those that it
 * supports.
 *
 * Sources. MX: "OCP Microscaling Formats (MX) Specification v1.0", 2023. NVFP4: "Pretraining Large Language Models with
 * NVFP4", arXiv 2509.25149. fp8-block: "DeepSeek-V3 Technical Report", arXiv 2412.19437, 3.3. Tiles of scales: PTX,
 * tcgen05.mma block scaling.
 */
#ifndef DEEPWELL_SCHEME_H
#define DEEPWELL_SCHEME_H

#include "deepwell/dtype.h"
#include "deepwell/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Values of dw_scheme_info.block that are not lengths. */
#define DW_BLOCK_NONE 0    /* no scales */
#define DW_BLOCK_ROW -1    /* a row along the reduction axis shares a scale */
#define DW_BLOCK_TENSOR -2 /* the tensor has one scale */

/* The order in which a GEMM on tensor cores reads the scales. */
typedef enum dw_scale_layout {
    DW_SCALES_ROWS, /* [outer, blocks along the reduction axis] */
    DW_SCALES_TILES /* tiles of 128 x 4, as dw_scales_swizzle arranges them */
} dw_scale_layout;

/* key, name, element, block, scale, layout of scales, 1: one more F32 scale for the whole tensor */
#define DW_SCHEME_MAP(X)                                                                           \
    X(BF16, "bf16", BF16, DW_BLOCK_NONE, F32, ROWS, 0)                                             \
    X(FP32, "fp32", F32, DW_BLOCK_NONE, F32, ROWS, 0)                                              \
    X(FP16, "fp16", F16, DW_BLOCK_NONE, F32, ROWS, 0)                                              \
    X(FP8_TENSOR, "fp8-tensor", E4M3, DW_BLOCK_TENSOR, F32, ROWS, 0)                               \
    X(FP8_ROW, "fp8-row", E4M3, DW_BLOCK_ROW, F32, ROWS, 0)                                        \
    X(FP8_BLOCK, "fp8-block", E4M3, 128, F32, ROWS, 0)                                             \
    X(MXFP8, "mxfp8", E4M3, 32, E8M0, TILES, 0)                                                    \
    X(MXFP8_E5M2, "mxfp8-e5m2", E5M2, 32, E8M0, TILES, 0)                                          \
    X(MXFP6, "mxfp6", E3M2, 32, E8M0, TILES, 0)                                                    \
    X(MXFP6_E2M3, "mxfp6-e2m3", E2M3, 32, E8M0, TILES, 0)                                          \
    X(MXFP4, "mxfp4", E2M1, 32, E8M0, TILES, 0)                                                    \
    X(NVFP4, "nvfp4", E2M1, 16, UE4M3, TILES, 1)                                                   \
    X(FP8_TENSOR_E5M2, "fp8-tensor-e5m2", E5M2, DW_BLOCK_TENSOR, F32, ROWS, 0)

typedef enum dw_scheme {
#define DW_SCHEME_ENUM(key, name, element, block, scale, layout, tensor_scale) DW_SCHEME_##key,
    DW_SCHEME_MAP(DW_SCHEME_ENUM)
#undef DW_SCHEME_ENUM
        DW_SCHEME_COUNT
} dw_scheme;

typedef struct dw_scheme_info {
    const char *name;
    dw_dtype element;
    int block;      /* elements along the reduction axis that share a scale, or DW_BLOCK_... */
    dw_dtype scale; /* element type of scales; not read for DW_BLOCK_NONE */
    dw_scale_layout scale_layout;
    int tensor_scale; /* 1: an F32 scale of the whole tensor multiplies the scales of blocks */
} dw_scheme_info;

DW_API const char *dw_scheme_name(dw_scheme scheme); /* "mxfp8" ...; "unknown" */
/* DW_INVALID_ARGUMENT: no scheme has the name; the message lists the names. */
DW_API dw_status dw_scheme_find(const char *name, dw_scheme *scheme);
/* Returns a row of the table; NULL if there is no such scheme. */
DW_API const dw_scheme_info *dw_scheme_describe(dw_scheme scheme);

#ifdef __cplusplus
}
#endif
#endif
