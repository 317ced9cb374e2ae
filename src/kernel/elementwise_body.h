/* The body of an elementwise call: that of a `fused` node, or one instruction for any other elementwise operation. */
#ifndef DW_ELEMENTWISE_BODY_H
#define DW_ELEMENTWISE_BODY_H

#include "graph/body.h"
#include "kernel/kernel.h"

/* `body` begins as zeros. DW_PARSE, DW_INVALID_ARGUMENT: the call's attribute `body` is malformed or missing. */
dw_status dw__elementwise_body(const dw__call *call, dw__body *body);
/* dtype of operand `i` of an instruction. */
dw_dtype dw__body_operand_dtype(const dw__body_code *code, int i);
/* Strides of `in` over the iteration shape of `shape`: aligned right, 0 on broadcast axes. */
void dw__broadcast_strides(const dw__tensor *in, const dw__tensor *shape, int64_t *stride);

#endif
