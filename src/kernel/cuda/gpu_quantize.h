/* Block quantization on a GPU: declarations shared by the family's files and their tests. */
#ifndef DW_GPU_QUANTIZE_H
#define DW_GPU_QUANTIZE_H

#include "deepwell/quantize.h"
#include "kernel/gpu_kernel.h"

/* Checks whether the call's members are consistent, with or without a GPU. If `launching`, pointers must be set. */
dw_status dw__quantize_check(const dw_quantize *call, bool launching);

/* Returns the options of dw_block_quantize for the result of a checked call along `axis`, with a tensor scale of 1. */
dw_block_options dw__quantize_options(const dw_quantize *call, int axis);

/* The compile-time parameters of a variant. */
typedef union dw__quantize_shape {
    struct {
        uint64_t dtype : 8, scheme : 8;
        uint64_t rule : 8; /* dw_scale_rule, not DEFAULT */
        bool along_rows : 1, along_cols : 1, square : 1;
        uint64_t unused : 37;
    };
    uint64_t params; /* of dw__variant */
} dw__quantize_shape;
_Static_assert(sizeof(dw__quantize_shape) == sizeof(uint64_t), "packed, and no bit is padding");

/* `arch`: "sm_90a", "sm_100f" or "sm_120a". */
dw__jit_variant dw__quantize_variant(const dw__quantize_shape *shape, const char *entry,
                                     const char *arch);

extern const dw__kernel dw__quantize_blocks;
/* Launches a checked call by a variant of dw__quantize_blocks. `amax_is_0`: the launch before has set *amax to 0; else
 * the device's own fill does, which a recorded graph of an emulated device cannot hold. */
dw_status dw__quantize_enqueue(const dw_quantize *call, const dw__context *context,
                               const dw__variant *variant, bool amax_is_0);
extern const dw__first_use dw__quantize_first_use; /* quantize_first_use.c */

#endif
