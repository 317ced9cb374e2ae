/* The body of a `fused` node: a straight-line program over scalars, run once for each element of the
 * iteration shape. The node holds it as a text attribute, so that printing, parsing and comparing graphs need
 * no special case:
 *
 *     t0=mul(i0,i1);t1=add(t0,c0.5);t2=tanh(t1);out(t2,t0)
 *
 *     iN         input N
 *     tN         result of instruction N; instructions are numbered 0, 1, 2, ... in order
 *     c<number>  a constant with the dtype of its partner operand; the shortest decimal that reads back
 *     out(...)   the results that are the node's outputs
 *
 * Operations are the elementwise rows of the operation table: primitives and elementwise composites. gelu and
 * gelu_backward write their approximation as gelu_tanh and gelu_tanh_backward; cast writes its dtype as
 * cast_f32. Dropout is dropout(iX, iSEED, c<p>, c<stream>): the seed operand is an input of the node and is
 * read as a whole; the element index is the index in the iteration shape. */
#ifndef DW_GRAPH_BODY_H
#define DW_GRAPH_BODY_H

#include "base/base.h"
#include "deepwell/graph.h"

#define DW_BODY_MAX_CODE 256

typedef enum dw__body_source { DW_BODY_INPUT, DW_BODY_RESULT, DW_BODY_CONSTANT } dw__body_source;

typedef struct dw__body_operand {
    dw__body_source source;
    uint16_t index; /* number of the input or the instruction */
    double constant;
} dw__body_operand;

typedef struct dw__body_code {
    dw_op op;
    bool tanh_approximation; /* gelu, gelu_backward */
    dw_dtype dtype;          /* dtype of the result */
    dw_dtype operand_dtype;  /* dtype of the first operand; comparisons and casts need it */
    uint8_t operand_count;
    dw__body_operand operands[4];
} dw__body_code;

typedef struct dw__body {
    uint16_t input_count, code_count, output_count;
    dw__body_code code[DW_BODY_MAX_CODE];
    dw__body_operand outputs[DW_MAX_OUTPUTS];
} dw__body;

/* Parses `text`. `input_dtypes` has input_count entries. Fails with DW_PARSE, naming the byte, if the text is
 * malformed. */
dw_status dw__body_parse(const char *text, uint32_t input_count, const dw_dtype *input_dtypes,
                         dw__body *body);
dw_status dw__body_print(const dw__body *body, dw__text *out);

/* Makes one program of two over the same elements: the outputs of `a`, then those of `b`. Input i of `b` is input
 * b_inputs[i] of the result, which has `input_count` inputs; those of `a` keep their numbers. Instructions that both
 * have are computed once. Outputs that no instruction reads come last, so that they may overwrite inputs. Returns false
 * if the result would be too long. */
bool dw__body_join(const dw__body *a, const dw__body *b, const uint16_t *b_inputs,
                   uint16_t input_count, dw__body *joint);
/* Makes the program of the `wanted` outputs of `from` alone, in their order. Input i of the result is input inputs[i] of
 * `from`; inputs that no wanted output depends on are left out. */
void dw__body_select(const dw__body *from, const bool *wanted, dw__body *made, uint16_t *inputs);
/* Makes a program that computes input `input` of `body` itself: it is output 0 of `maker`, whose input i is input
 * maker_inputs[i] of `body`. The result has the inputs of `body` without that one, in their order, and its outputs.
 * Instructions that both have are computed once. Returns false if the result would be too long. */
bool dw__body_inline(const dw__body *body, uint16_t input, const dw__body *maker,
                     const uint16_t *maker_inputs, dw__body *made);
/* True when output `output`, stored as soon as it is computed, may overwrite the elements of input
 * `input`: nothing in the body reads that input afterwards. */
bool dw__body_may_overwrite(const dw__body *body, uint32_t input, uint32_t output);
/* True for out(add(i0,i1)) and out(add(i1,i0)). */
bool dw__body_is_sum(const dw__body *body);

#endif
