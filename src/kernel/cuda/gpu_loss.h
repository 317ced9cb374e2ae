/* Declarations that the kernels of cross-entropy share with those of cross-entropy behind a linear layer, which call
 * them for blocks of rows or of classes (cuda/common/cross_entropy.cu, cross_entropy.c). */
#ifndef DW_GPU_LOSS_H
#define DW_GPU_LOSS_H

#include "common/cross_entropy_params.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/gpu_kernel.h"

/* The defines of cross_entropy.cu. */
typedef struct dw__loss_variant {
    dw_dtype type, statistics; /* of the logits; of lse, losses and their gradients */
    int lanes;                 /* threads of a row */
    bool backward;
    /* Hopper: a GEMM finds the statistics of its tiles of logits, or makes their gradients (sm90/sm90_loss.cuh). It has a
     * bias, or reads the weight's rows across the contraction. `given`: backward is given the logits, and the GEMM of the
     * weight's gradient makes their gradient beside (sm90/sm90_beside.cuh). */
    bool tiles, bias, turned, given;
} dw__loss_variant;

uint64_t dw__loss_pack(dw__loss_variant v);
dw__loss_variant dw__loss_unpack(uint64_t params);
/* The number of threads that share a row of so many logits. */
int dw__loss_lanes(int64_t columns);

/* Entry points of a variant. DW__LOSS_TOTAL: forward, the sum or mean of `partials`; backward, dloss divided by the
 * number of targets that count. DW__LOSS_ROUND is for backward alone. With `tiles` the first is the GEMM, and those behind
 * make a row's results from its tiles, or what its gradients have in common. */
enum { DW__LOSS_ROWS, DW__LOSS_TOTAL, DW__LOSS_ROUND };
enum { DW__LOSS_GEMM, DW__LOSS_COMBINE = 2, DW__LOSS_WEIGHTS };
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

/* With `tiles`: the kernel that makes results of rows from tiles, or weights of rows. */
dw_status dw__loss_tiles(const dw__operation_call *call, const dw__context *context,
                         const dw__variant *variant, dw_cross_entropy_tile_params *params);

/* ---- sm90_loss.c: logits on Hopper that are never read again ----------------------------------------- */

/* Rows and columns of a tile of logits. */
enum { DW__SM90_LOSS_ROWS = 128, DW__SM90_LOSS_COLUMNS = 256 };

/* Returns whether the GEMM can compute these logits; those of a product that are not stored have no address. */
dw_status dw__sm90_loss_supports(const dw__gemm_groups_call *call, const dw__gpu_target *gpu);
/* The number of classes whose gradients of the weight, [classes, size] or its transpose, fill the tiles of all SMs. */
int64_t dw__sm90_loss_classes(int64_t size, bool transposed, int sm_count);
/* The number of classes of a block, at most `most`, so that the products of a backward that computes logits again take the
 * fewest rounds of tiles. */
int64_t dw__sm90_loss_block(int64_t rows, int64_t size, int64_t classes, int64_t most,
                            int sm_count);
/* Enqueues gradients of logits alone. */
dw_status dw__sm90_loss_alone(const dw_sm90_loss *loss, void *stream, const dw__context *context,
                              const dw__variant *variant);
/* The GEMM of a variant. */
void dw__sm90_loss_point(dw__loss_variant v, dw__entry_point *point);
dw_status dw__sm90_loss_enqueue(const dw__gemm_groups_call *call, const dw_sm90_loss *loss,
                                const dw__context *context, const dw__variant *variant);
/* Makes a map of the strips of D that the GEMM stores. */
dw_status dw__sm90_loss_map(const dw_gemm *gemm, const dw__context *context, dw__tensor_map *map);
/* The least seconds of the GEMM. */
double dw__sm90_loss_seconds(const dw__gemm_groups_call *call, const dw__gpu_target *gpu);

#endif
