/* Inner loops of data movement and reductions. Loops that only move elements get their size in bytes (1, 2, 4
 * or 8); reductions are F32. Strides are in elements. */
#ifndef DW_CPU_DATA_H
#define DW_CPU_DATA_H

#include "kernel/kernel.h"

typedef enum dw__fold { DW_FOLD_SUM, DW_FOLD_MAX, DW_FOLD_MIN } dw__fold;

typedef struct dw__data_loops {
    /* to[i] = from[i * stride]; stride 0 repeats one element */
    void (*copy)(int size, int64_t n, void *to, const void *from, int64_t stride);
    /* to[i * to_stride + j] = from[j * from_stride + i], i < rows, j < columns */
    void (*transpose)(int size, int64_t rows, int64_t columns, void *to, int64_t to_stride,
                      const void *from, int64_t from_stride);
    /* to[i * stride] = from[i] */
    void (*scatter)(int size, int64_t n, void *to, int64_t stride, const void *from);
    void (*add)(int64_t n, float *to, const float *from);
    /* to[i] = scale * from[i], or with `adds` to[i] += scale * from[i] */
    void (*scaled)(bool adds, int64_t n, float *to, const float *from, float scale);
    double (*dot)(int64_t n, const float *x, const float *y);
    /* Folds one row into `start`. Maxima and minima propagate NaN. */
    double (*fold_row)(dw__fold fold, int64_t n, const float *x, double start);
    /* to[i] = fold(to[i], from[i]) */
    void (*fold_rows)(dw__fold fold, int64_t n, float *to, const float *from);
    /* One row of rotary embedding: rotates the first `turned` of n elements and copies the rest. */
    void (*rope)(bool interleaved, bool transposed, int64_t n, int64_t turned, const float *x,
                 const float *cosine, const float *sine, float *y);
} dw__data_loops;

/* data_rows.c */
extern const dw__kernel dw__cpu_spread_rows, dw__cpu_combine_rows, dw__cpu_combine_rows_backward;
/* data_gather.c */
extern const dw__kernel dw__cpu_take, dw__cpu_embedding, dw__cpu_scatter_add,
    dw__cpu_embedding_backward;
/* data_reduce.c */
extern const dw__kernel dw__cpu_reduce_sum, dw__cpu_reduce_max, dw__cpu_reduce_min, dw__cpu_mean,
    dw__cpu_cumsum;

#endif
