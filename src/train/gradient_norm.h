/* The global norm of the gradients in one pass over memory. */
#ifndef DW_GRADIENT_NORM_H
#define DW_GRADIENT_NORM_H

#include "base/base.h"

/* Bytes of scratch that the sum of `count` elements needs. */
size_t dw__norm_scratch(int64_t count);
/* Euclidean norm of `elements`, summed in F64 in blocks of fixed order: the same bits on any number of
 * threads. The result is NaN or infinite exactly if an element is. */
double dw__norm(const float *elements, int64_t count, double *scratch);
/* The square of that norm, before rounding the root. */
double dw__square_sum(const float *elements, int64_t count, double *scratch);
/* to += from. */
void dw__accumulate(float *to, const float *from, int64_t count);

#endif
