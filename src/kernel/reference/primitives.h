/* The reference kernels: one function per group of primitives, each a plain loop over strided tensors of any
 * dtype. Types come from the tensors, so the interpreter can hold every float as F64. The kernels use no
 * scratch; those that need memory allocate it. */
#ifndef DW_REFERENCE_PRIMITIVES_H
#define DW_REFERENCE_PRIMITIVES_H

#include "kernel/kernel.h"

/* reference_elementwise.c */
dw_status dw__reference_elementwise(const dw__call *call, void *scratch);
dw_status dw__reference_cast(const dw__call *call, void *scratch);
/* reference_create.c */
dw_status dw__reference_constant(const dw__call *call, void *scratch);
dw_status dw__reference_size(const dw__call *call, void *scratch);
dw_status dw__reference_iota(const dw__call *call, void *scratch);
dw_status dw__reference_random_uniform(const dw__call *call, void *scratch);
/* reference_move.c */
dw_status dw__reference_reshape(const dw__call *call, void *scratch);
dw_status dw__reference_permute(const dw__call *call, void *scratch);
dw_status dw__reference_broadcast(const dw__call *call, void *scratch);
dw_status dw__reference_slice(const dw__call *call, void *scratch);
dw_status dw__reference_pad(const dw__call *call, void *scratch);
dw_status dw__reference_concat(const dw__call *call, void *scratch);
/* reference_gather.c */
dw_status dw__reference_take(const dw__call *call, void *scratch);
dw_status dw__reference_take_along(const dw__call *call, void *scratch);
dw_status dw__reference_scatter_add(const dw__call *call, void *scratch);
dw_status dw__reference_put_along_add(const dw__call *call, void *scratch);
/* reference_reduce.c */
dw_status dw__reference_reduce(const dw__call *call, void *scratch);
dw_status dw__reference_arg(const dw__call *call, void *scratch);
dw_status dw__reference_cumsum(const dw__call *call, void *scratch);
/* reference_sort.c */
dw_status dw__reference_sort(const dw__call *call, void *scratch);
/* reference_matmul.c */
dw_status dw__reference_matmul(const dw__call *call, void *scratch);
/* reference_quantize.c */
dw_status dw__reference_quantize(const dw__call *call, void *scratch);
dw_status dw__reference_quantize_blocks(const dw__call *call, void *scratch);
dw_status dw__reference_dequantize_blocks(const dw__call *call, void *scratch);
dw_status dw__reference_quantization_error(const dw__call *call, void *scratch);
dw_status dw__reference_quantize_tensor(const dw__call *call, void *scratch);
dw_status dw__reference_quantize_tiles(const dw__call *call, void *scratch);
dw_status dw__reference_multiply_codes(const dw__call *call, void *scratch);
dw_status dw__reference_segment_multiply_codes(const dw__call *call, void *scratch);

/* reference_fused.c. The body's text was written for `input_dtypes`. With `high_precision` the tensors hold
 * F64 for every float type, and nothing is rounded. */
dw_status dw__reference_fused_parse(const dw__call *call, void **prepared);
dw_status dw__reference_fused(const dw__call *call, void *scratch);
dw_status dw__fused_evaluate(const dw__call *call, const dw_dtype *input_dtypes,
                             bool high_precision);
/* reference_expand.c: the same for composites. */
dw_status dw__reference_expand(const dw__call *call, void *scratch);
dw_status dw__expansion_evaluate(const dw__call *call, const dw_dtype *input_dtypes,
                                 bool high_precision);

#endif
