/* Tiled attention on the CPU: the interface between the strategy (attention.c) and the inner loops
 * (isa/attention_loops.c), which are compiled once per instruction set.
 *
 * Scores are computed transposed, tile by tile: S^T [keys, queries] = K Q^T. Queries are then in vector
 * lanes, so that maxima, sums and exponentials need no horizontal step. Only the small block of Q (and of dO)
 * is ever transposed; K and V are read in place. */
#ifndef DW_CPU_ATTENTION_H
#define DW_CPU_ATTENTION_H

#include "kernel/cpu/cpu.h"

enum {
    /* queries of a tile, and keys of a tile: S^T, K and V tiles are 16 KB each */
    DW_ATTENTION_QUERIES = 64,
    DW_ATTENTION_KEYS = 64,
    DW_ATTENTION_HEAD_MAX = 256,
};

/* Rows of a [B, H, S, D] tensor whose last stride is 1. data NULL: not computed. */
typedef struct dw__attention_rows {
    float *data;
    int64_t batch, head, row; /* strides in elements */
} dw__attention_rows;

typedef struct dw__attention {
    int64_t batches, heads, key_heads, queries, keys, head_size, value_size;
    float scale;
    float softcap; /* 0 for none */
    bool causal;
    int64_t shift;     /* query i has position i + shift among the keys */
    int64_t window;    /* negative for none */
    const void *mask;  /* NULL for none */
    bool mask_is_bool; /* else F32, added to the scores */
    int64_t mask_stride[4];
    float p; /* dropout probability */
    int64_t seed[2], stream;
    dw__attention_rows q, k, v, o, lse; /* lse: row stride 1 */
    dw__attention_rows d_o, dq, dk, dv; /* backward */
} dw__attention;

/* The tile range of one (batch, key head) that a backward task covers. Sums run over query heads, then
 * queries, then keys in ascending order for every range, so that every division into tasks gives the same
 * bits. */
typedef struct dw__attention_part {
    int64_t batch, key_head;
    int64_t head, head_end;   /* query heads */
    int64_t query, query_end; /* multiples of DW_ATTENTION_QUERIES, or the end */
    int64_t key, key_end;     /* multiples of DW_ATTENTION_KEYS, or the end */
    bool wants_dq, wants_dkv;
} dw__attention_part;

typedef struct dw__attention_loops {
    /* Computes outputs o and lse of the block of queries that starts at `query`. */
    void (*forward)(const dw__attention *attention, int64_t batch, int64_t head, int64_t query,
                    float *scratch);
    void (*backward)(const dw__attention *attention, const dw__attention_part *part,
                     float *scratch);
} dw__attention_loops;

/* Floats of scratch that one call of either function needs. */
size_t dw__attention_forward_floats(const dw__attention *attention);
size_t dw__attention_backward_floats(const dw__attention *attention);

extern const dw__kernel dw__attention_tiled, dw__attention_backward_tiled; /* F32 */
extern const dw__kernel dw__attention_widened,
    dw__attention_backward_widened; /* BF16 and F16 (attention_widened.c) */

#endif
