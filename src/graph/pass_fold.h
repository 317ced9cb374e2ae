/* What the two files of the pass `fold` share. */
#ifndef DW_GRAPH_PASS_FOLD_H
#define DW_GRAPH_PASS_FOLD_H

#include "graph/passes.h"

/* The value of an elementwise operation on known operands, when it is the same on every machine:
 * a correctly rounded operation of the type, or an exact one. `operand_dtype` is the first
 * operand's. */
bool dw__fold_evaluate(dw_op op, dw_dtype dtype, dw_dtype operand_dtype, uint32_t count,
                       const double *operands, double *result);

#endif
