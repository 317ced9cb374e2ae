/* The steps from a public call of attention to launches on a GPU. */
#ifndef DW_CUDA_ATTENTION_H
#define DW_CUDA_ATTENTION_H

#include "common/attention_params.h"
#include "deepwell/attention.h"
#include "device/device.h"
#include "jit/jit.h"

typedef enum dw__attention_pass {
    DW__ATTENTION_FORWARD,
    DW__ATTENTION_BACKWARD
} dw__attention_pass;

/* Whether the call's members make sense together, GPU or not. `launching`: pointers are needed, too; otherwise NULL
 * passes and what is given must only be aligned. */
dw_status dw__attention_check(const dw_attention *call, dw__attention_pass pass, bool launching);

/* Nothing to multiply: no query or no key. What is left is filling outputs with zeros. */
static inline bool dw__attention_is_empty(const dw_attention *call) {
    bool packed = call->offsets_q != NULL;
    return call->batch == 0 || call->rows_q == 0 || call->rows_k == 0 ||
           (packed && (call->total_q == 0 || call->total_k == 0));
}

/* What a kernel is compiled for. */
typedef struct dw__attention_shape {
    int head_dim; /* rounded up to one of those that there are kernels for */
    bool f16, softcap, dropout, packed, window, deterministic;
    bool many_keys; /* enough for the wide tiles, where there are such */
} dw__attention_shape;
dw__attention_shape dw__attention_shape_of(const dw_attention *call, dw__attention_pass pass);

/* Tiles of one kernel: cuda/sm90/attention_tiles.h. */
typedef struct dw__attention_tile {
    int head_dim;
    bool window;
    int keys; /* rows_k from which on */
    int m, n, stages, consumers;
    unsigned shared_bytes; /* dynamic */
} dw__attention_tile;
const dw__attention_tile *dw__attention_tile_of(const dw__attention_shape *shape,
                                                dw__attention_pass pass);

/* The kernels' parameters; those of the workspace and `tiles` are left for the pass. */
void dw__attention_set_params(const dw_attention *call, dw_attention_params *params);

/* Tensor map of `tensor`, [batch, heads, rows, head_dim], in boxes of 64 columns and `box_rows` rows. */
dw_status dw__attention_map(const dw_attention *call, const dw_attention_tensor *tensor,
                            const char *name, int heads, int64_t rows, int box_rows,
                            dw__tensor_map *map);

/* The variant that `shape` is compiled as; its source is `source`, its entry point `entry`. */
dw__jit_variant dw__attention_variant(const dw__attention_shape *shape, dw__attention_pass pass,
                                      const char *entry, const char *arch);

/* "batch 2, 16 query heads on 4, rows 512 x 512, head_dim 128, bf16, causal": for messages. */
const char *dw__attention_describe(const dw_attention *call, char *text, size_t bytes);

#endif
