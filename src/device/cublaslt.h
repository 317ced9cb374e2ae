/* NVIDIA's library of GEMMs, cuBLASLt, loaded on first use: the version of CUDA 12 or 13 that PyTorch or the toolkit
 * brings. DEEPWELL_CUBLASLT names another file; "off" turns it off. The prototypes below are the functions that we
 * call, declared here so that no toolkit is needed to build. Matrices are column-major. */
#ifndef DW_CUBLASLT_H
#define DW_CUBLASLT_H

#include "base/base.h"
#include "device/device_table.h"

enum { /* cudaDataType_t */
       DW_LT_F32 = 0,
       DW_LT_F64 = 1,
       DW_LT_F16 = 2,
       DW_LT_BF16 = 14,
       DW_LT_E4M3 = 28,
       DW_LT_E5M2 = 29,
       DW_LT_E2M1 = 33,
};
enum { /* cublasComputeType_t */
       DW_LT_COMPUTE_F32 = 68,
       DW_LT_COMPUTE_F64 = 70,
       DW_LT_COMPUTE_TF32 = 77,
};
enum { DW_LT_NORMAL = 0, DW_LT_TRANSPOSED = 1 }; /* cublasOperation_t */
enum {                                           /* cublasLtMatmulDescAttributes_t */
       DW_LT_POINTER_MODE = 2,                   /* int: where alpha and beta are */
       DW_LT_TRANSPOSE_A = 3,
       DW_LT_TRANSPOSE_B = 4,
       DW_LT_EPILOGUE = 7,
       DW_LT_BIAS_POINTER = 8,
       DW_LT_SCALES_A = 17,
       DW_LT_SCALES_B = 18,
       DW_LT_FAST_ACCUMULATION = 25, /* int8_t */
       DW_LT_BIAS_TYPE = 26,
       DW_LT_SCALE_MODE_A = 31,
       DW_LT_SCALE_MODE_B = 32,
};
enum { DW_LT_POINTERS_OF_DEVICE = 1 }; /* cublasLtPointerMode_t; 0: of the host */
enum {                                 /* cublasLtMatmulMatrixScale_t */
       DW_LT_SCALES_NONE = 0,          /* or one F32 for the tensor */
       DW_LT_SCALES_OF_16 = 1,         /* E4M3, for NVFP4 */
       DW_LT_SCALES_OF_32 = 2,         /* E8M0, for MXFP8 */
       DW_LT_SCALES_OF_128 = 4,        /* F32, along the axis that is summed over; Hopper alone */
       DW_LT_SCALES_OF_SQUARES = 5,    /* F32, of 128 x 128; for one matrix at most; Hopper alone */
};
enum {                          /* cublasLtEpilogue_t */
       DW_LT_EPILOGUE_BIAS = 4, /* adds element i to row i of D */
       DW_LT_EPILOGUE_SUMS_A =
           256, /* stores the sum of op(A) over k, for row i of D, in element i */
       DW_LT_EPILOGUE_SUMS_B = 512, /* the same of op(B), for column i of D */
};
enum {                         /* cublasLtMatrixLayoutAttribute_t */
       DW_LT_BATCH_COUNT = 5,  /* int32_t */
       DW_LT_BATCH_STRIDE = 6, /* int64_t: elements from one matrix to the next */
};
enum {                               /* cublasLtMatmulPreferenceAttributes_t */
       DW_LT_PREFER_WORKSPACE = 1,   /* uint64_t: most bytes */
       DW_LT_PREFER_REDUCTIONS = 3,  /* uint32_t: mask of the schemes below */
       DW_LT_PREFER_ALIGNMENT_A = 5, /* uint32_t: least bytes; B, C and D follow */
       DW_LT_PREFER_ALIGNMENT_B = 6,
       DW_LT_PREFER_ALIGNMENT_C = 7,
       DW_LT_PREFER_ALIGNMENT_D = 8,
};
/* cublasLtReductionScheme_t: parts of split sums are stored in the compute type in the workspace, then added in a
 * separate step. */
enum { DW_LT_REDUCTION_COMPUTE_TYPE = 2 };
enum { /* cublasStatus_t: the ones that we distinguish */
       DW_LT_NOT_INITIALIZED = 1,
       DW_LT_ALLOC_FAILED = 3,
       DW_LT_INVALID_VALUE = 7,
       DW_LT_ARCH_MISMATCH = 8,
       DW_LT_EXECUTION_FAILED = 13,
       DW_LT_NOT_SUPPORTED = 15,
};

typedef struct dw__lt_algorithm { /* cublasLtMatmulHeuristicResult_t */
    uint64_t data[8];
    size_t workspace;
    int state; /* cublasStatus_t */
    float waves;
    int reserved[4];
} dw__lt_algorithm;
_Static_assert(sizeof(dw__lt_algorithm) == 96, "as the library has it");

/* member, name in the library, parameters */
#define DW_CUBLASLT_FUNCTIONS(X)                                                                   \
    X(create, cublasLtCreate, (void **handle))                                                     \
    X(destroy, cublasLtDestroy, (void *handle))                                                    \
    X(product_create, cublasLtMatmulDescCreate, (void **product, int compute, int scale))          \
    X(product_destroy, cublasLtMatmulDescDestroy, (void *product))                                 \
    X(product_set, cublasLtMatmulDescSetAttribute,                                                 \
      (void *product, int attribute, const void *value, size_t bytes))                             \
    X(matrix_create, cublasLtMatrixLayoutCreate,                                                   \
      (void **matrix, int type, uint64_t rows, uint64_t columns, int64_t leading))                 \
    X(matrix_destroy, cublasLtMatrixLayoutDestroy, (void *matrix))                                 \
    X(matrix_set, cublasLtMatrixLayoutSetAttribute,                                                \
      (void *matrix, int attribute, const void *value, size_t bytes))                              \
    X(preference_create, cublasLtMatmulPreferenceCreate, (void **preference))                      \
    X(preference_destroy, cublasLtMatmulPreferenceDestroy, (void *preference))                     \
    X(preference_set, cublasLtMatmulPreferenceSetAttribute,                                        \
      (void *preference, int attribute, const void *value, size_t bytes))                          \
    X(choose, cublasLtMatmulAlgoGetHeuristic,                                                      \
      (void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,          \
       int most, dw__lt_algorithm *algorithms, int *count))                                        \
    X(check, cublasLtMatmulAlgoCheck,                                                              \
      (void *handle, void *product, void *a, void *b, void *c, void *d, const void *algorithm,     \
       dw__lt_algorithm *result))                                                                  \
    X(multiply, cublasLtMatmul,                                                                    \
      (void *handle, void *product, const void *alpha, const void *a, void *a_matrix,              \
       const void *b, void *b_matrix, const void *beta, const void *c, void *c_matrix, void *d,    \
       void *d_matrix, const void *algorithm, void *workspace, size_t workspace_bytes,             \
       void *stream))

typedef struct dw__cublaslt {
#define DW_CUBLASLT_MEMBER(member, name, parameters) int(*member) parameters;
    DW_CUBLASLT_FUNCTIONS(DW_CUBLASLT_MEMBER)
#undef DW_CUBLASLT_MEMBER
    size_t (*version)(void); /* cublasLtGetVersion: 130100 for 13.1.0 */
} dw__cublaslt;

/* The library. The result, or the failure, is the same for the life of the process. DW_UNSUPPORTED: it is not there, or
 * lacks a function. Call it only where there is a GPU. */
dw_status dw__cublaslt_load(const dw__cublaslt **library);
/* DW_UNSUPPORTED if DEEPWELL_CUBLASLT turns the library off. Loads nothing. */
dw_status dw__cublaslt_wanted(void);
/* The handle of a context, which must be current. It is made once and lives until the process ends. */
dw_status dw__cublaslt_handle(const dw__cublaslt *library, const dw__context *context,
                              void **handle);
/* DW_OK for status 0. Otherwise the message names the call and the status. */
dw_status dw__cublaslt_check(int result, const char *call);

#endif
