/* The global norm of gradients, in one pass over memory. */
#ifndef DW_GRADIENT_NORM_H
#define DW_GRADIENT_NORM_H

#include "base/base.h"

/* Bytes of scratch that the sum of `count` elements needs. */
size_t dw__norm_scratch(int64_t count);
/* Euclidean norm of `elements`, summed in F64, by blocks in a fixed order: the same bits on any number of
 * threads. NaN or infinite exactly when an element is. */
double dw__norm(const float *elements, int64_t count, double *scratch);
/* to += from. */
void dw__accumulate(float *to, const float *from, int64_t count);

#endif
