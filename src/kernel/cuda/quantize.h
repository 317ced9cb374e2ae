/* The steps from a public call of quantization in blocks to its launch on a GPU: check, find the kernel, launch. */
#ifndef DW_CUDA_QUANTIZE_H
#define DW_CUDA_QUANTIZE_H

#include "base/base.h"
#include "deepwell/quantize.h"
#include "device/device.h"
#include "jit/jit.h"

/* ---- quantize_check.c ------------------------------------------------------------------------ */

/* Whether the call's members make sense together, GPU or not. `launching`: pointers are needed, too. */
dw_status dw__quantize_check(const dw_quantize *call, bool launching);

static inline bool dw__quantize_is_empty(const dw_quantize *call) {
    return call->rows == 0 || call->cols == 0;
}

/* As the definition has the result of a checked call along `axis`, its tensor scale 1. */
dw_block_options dw__quantize_options(const dw_quantize *call, int axis);

/* "8192 x 4096, bf16 to mxfp8_e4m3 along rows and columns": for messages. */
const char *dw__quantize_describe(const dw_quantize *call, char *text, size_t bytes);

/* ---- quantize_kernels.c ----------------------------------------------------------------------- */

/* What a kernel is compiled for. */
typedef struct dw__quantize_shape {
    dw_dtype dtype;
    dw_scheme scheme;
    dw_scale_rule rule; /* not DEFAULT */
    bool along_rows, along_cols, square;
} dw__quantize_shape;
dw__quantize_shape dw__quantize_shape_of(const dw_quantize *call);

/* Of one shape and context. */
typedef struct dw__quantize_kernel {
    dw__quantize_shape shape;
    void *blocks, *amax; /* the second with NVFP4 alone */
    bool disabled;       /* differed from the definition on this GPU */
    char reason[1024];   /* why it was */
} dw__quantize_kernel;

/* Whether a GPU of this compute capability (90 for 9.0) has these kernels. */
bool dw__quantize_runs_on(int capability);

/* `arch`: "sm_90a" or "sm_100f". */
dw__jit_variant dw__quantize_variant(const dw__quantize_shape *shape, const char *entry,
                                     const char *arch);
const char *dw__quantize_arch(int capability);

/* Loaded, and compared with the definition, by the first call that needs it; then found without a lock. */
dw_status dw__quantize_kernel_of(const dw__context *context, const dw__quantize_shape *shape,
                                 const dw__quantize_kernel **kernel);

/* `call` has been checked and is not empty. Nothing is allocated. */
dw_status dw__quantize_launch(const dw_quantize *call, const dw__context *context,
                              const dw__quantize_kernel *kernel);

/* ---- quantize_guard.c -------------------------------------------------------------------------- */

/* Runs the kernel on small matrices of ordinary and of awkward numbers, on a stream of its own, and sets
 * `disabled` and `reason` where it fails or where any byte differs from what the definition makes. Failing
 * means that nothing was learnt. */
dw_status dw__quantize_guard(const dw__context *context, dw__quantize_kernel *kernel);

#endif
