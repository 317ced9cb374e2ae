/* Declarations shared by the two files of the pass `fold`. */
#ifndef DW_GRAPH_PASS_FOLD_H
#define DW_GRAPH_PASS_FOLD_H

#include "graph/passes.h"

/* Evaluates an elementwise operation on known operands. Returns false unless every machine gives the same
 * result: the operation is exact or correctly rounded in its dtype. `operand_dtype` is the dtype of the first
 * operand. */
bool dw__fold_evaluate(dw_op op, dw_dtype dtype, dw_dtype operand_dtype, uint32_t count,
                       const double *operands, double *result);

#endif
