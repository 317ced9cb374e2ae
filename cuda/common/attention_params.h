/* Launch parameters of the attention kernels. Plain C, read by the host launcher and by device code. */
#ifndef DW_ATTENTION_PARAMS_H
#define DW_ATTENTION_PARAMS_H

/* The offset of an element is row * row_stride + head * head_stride + batch * batch_stride, in elements. */
typedef struct dw_strided {
    void *data;
    long long batch, head, row;
} dw_strided;

typedef struct dw_attention_params {
    int batch, heads_q, heads_kv, group; /* group = heads_q / heads_kv */
    int rows_q, rows_k;                  /* packed: of the longest sequence */
    int head_dim;                        /* as stored; HEAD_DIM is the variant's */
    const int *offsets_q, *offsets_k;    /* NULL: not packed */
    long long total_q;

    float scale;      /* of the scores */
    float scale_log2; /* scale * log2(e); with a soft cap: softcap * log2(e) */
    float cap_scale;  /* scale / softcap, the factor before tanh; 0 without a soft cap */
    int window_left,
        /* Clamped to the range that the rows can need: never negative, at most 2^30. */
        window_right;
    int bottom_right;

    float dropout, keep_scale; /* keep_scale = 1 / (1 - dropout) */
    unsigned keep_threshold;   /* an element is kept if (word >> 8) >= keep_threshold */
    unsigned dropout_stream;   /* the low 32 bits, which are all that Philox's counter takes */
    long long seed, seed_offset;
    const long long *seed_memory;

    dw_strided q, k, v, o, d_o, dq, dk, dv;
    float *lse;    /* [batch, heads_q, rows_q] or [heads_q, total_q] */
    float *delta;  /* backward: row sums of dO * O; see attention_backward.cu */
    float *dq_sum; /* backward: F32 accumulators of dQ */
    int *turn;     /* backward, deterministic: the turn to add to dq_sum */
    int tiles;     /* work items of the grid */

    /* A mask of all pairs: numbers that are added to the scaled scores (of the elements' type), or bytes, 0 for pairs
     * that do not see each other. Strides are in its elements, and 0 along axes on which it repeats. */
    dw_strided bias,
        d_bias; /* backward: d_bias is its gradient, summed over the axes on which it repeats */
    long long bias_key;           /* stride from one key to the next */
    int bias_kind;                /* dw_attention_bias_kind: 0 none, 1 numbers, 2 bytes */
    int bias_batches, bias_heads; /* lengths of its first two axes: 1, or batch and heads_q */
    /* Rows can be read, or written, 8 keys at a time: keys are adjacent, rows start at 16 bytes (8 for bytes), and
     * rows_k is a multiple of 8. */
    int bias_wide, d_bias_wide;
} dw_attention_params;

/* Forward rotates its queries (sm90/attention_rotate.cuh): all heads have the same tables, whose rows belong to queries.
 * Rotated queries are stored in `rotated` unless its data is NULL. */
typedef struct dw_attention_rotation {
    dw_strided rotated;
    int batches; /* 1: each batch has tables of its own; 0: all have the same */
} dw_attention_rotation;

/* Shared memory for it: tiles of queries, and rows of cosines and of sines for a tile of so many rows. */
#define DW_ROTATE_QUERY_BUFFERS 2
#define DW_ROTATE_TABLE_ROWS(tile_m) ((tile_m) / 2)

#endif
