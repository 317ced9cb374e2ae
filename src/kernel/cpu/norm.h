/* Inner loops of the normalisations and of softmax. Each call handles one row of n contiguous F32 elements. */
#ifndef DW_CPU_NORM_H
#define DW_CPU_NORM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct dw__norm_loops {
    /* w, b, y, mean and rstd may be NULL. Without `centred` it computes RMS norm and does not write mean. */
    void (*forward)(bool centred, int64_t n, const float *x, const float *w, const float *b,
                    double eps, float *y, float *mean, float *rstd);
    /* Adds this row's contribution to dw and db [n]. w, dx and db may be NULL. */
    void (*backward)(bool centred, int64_t n, const float *dy, const float *x, const float *w,
                     float mean, float rstd, float *dx, float *dw, float *db);
    /* y may equal x. */
    void (*softmax)(bool logarithm, int64_t n, const float *x, float *y);
    void (*softmax_backward)(bool logarithm, int64_t n, const float *y, const float *dy, float *dx);
    /* sum[i] = sum over `count` rows, in order, of row[r * stride + i] */
    void (*add_rows)(int64_t n, int64_t count, const float *rows, int64_t stride, float *sum);
} dw__norm_loops;

#endif
