/* A product by Hopper's GEMM with one block for each tile, for tests of kernels that compute it with something behind it:
 * it adds in the same order as they do, where a cluster that shares the contraction does not. */
#ifndef DW_TESTS_HOPPER_PRODUCT_H
#define DW_TESTS_HOPPER_PRODUCT_H

#include "emulated_call.h"
#include "kernel/cuda/gpu_gemm.h"

static inline void enqueue_product(const dw__context *context, const dw__operation_call *call) {
    dw__gemm_groups_call c;
    const dw__variant *variant;
    assert_true(dw__graph_gemm_call(call, &c));
    dw__sm90_shape shape = dw__sm90_shape_of(&c, context->sm_count);
    shape.tile = 0;
    assert_int_equal(dw__sm90_tiles[0].cluster, 0);
    if (dw__variant_of(context, &dw__sm90_gemm, shape.params, &variant) != DW_OK ||
        dw__variant_status(variant) != DW_OK || dw__sm90_enqueue(&c, context, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
}

#endif
