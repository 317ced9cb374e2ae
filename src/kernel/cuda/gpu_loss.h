/* Declarations that the kernels of cross-entropy share with those of cross-entropy behind a linear layer, which call
 * them for blocks of rows or of classes (cuda/common/cross_entropy.cu, cross_entropy.c). */
#ifndef DW_GPU_LOSS_H
#define DW_GPU_LOSS_H

#include "common/cross_entropy_params.h"
#include "kernel/gpu_kernel.h"

/* The defines of cross_entropy.cu. */
typedef struct dw__loss_variant {
    dw_dtype type, statistics; /* of the logits; of lse, losses and their gradients */
    int lanes;                 /* threads of a row */
    bool backward;
} dw__loss_variant;

uint64_t dw__loss_pack(dw__loss_variant v);
dw__loss_variant dw__loss_unpack(uint64_t params);
/* The number of threads that share a row of so many logits. */
int dw__loss_lanes(int64_t columns);

/* Entry points of a variant. DW__LOSS_TOTAL: forward, the sum or mean of `partials`; backward, dloss divided by the
 * number of targets that count. DW__LOSS_ROUND is for backward alone. */
enum { DW__LOSS_ROWS, DW__LOSS_TOTAL, DW__LOSS_ROUND };
dw_status dw__loss_entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                                dw__entry_point *points);

/* Returns DW_LOSS_MEAN, DW_LOSS_SUM or DW_LOSS_NONE. */
int dw__loss_reduction(const dw__call *call);

/* Launches, on the call's stream. Nothing is launched for 0 rows, but the total of a forward. */
dw_status dw__loss_rows(const dw__operation_call *call, const dw__context *context,
                        const dw__variant *variant, dw_cross_entropy_params *params);
dw_status dw__loss_total(const dw__operation_call *call, const dw__context *context,
                         const dw__variant *variant, dw_cross_entropy_params *params);
dw_status dw__loss_round(const dw__operation_call *call, const dw__context *context,
                         const dw__variant *variant, dw_cross_entropy_round_params *params);

#endif
