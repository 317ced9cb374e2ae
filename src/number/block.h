/* Shared by quantization and dequantization in blocks: the checked options, and the division of a matrix into
 * tasks. */
#ifndef DW_BLOCK_H
#define DW_BLOCK_H

#include "base/base.h"
#include "number/number_loops.h"

enum {
    DW_BLOCK_PASS = 1024,        /* elements of a row per pass, in buffers on the stack */
    DW_BLOCK_TASK = 1 << 15,     /* elements of a task along axis 1 */
    DW_BLOCK_TURNED = 128 * 128, /* the same along axis 0, where tasks transpose on the stack */
    DW_BLOCK_GAP = 16,           /* gap after each transposed row: powers of two share cache sets */
    DW_BLOCK_SCRATCH = DW_BLOCK_TURNED + 128 * DW_BLOCK_GAP
};

typedef struct dw__block_call {
    const dw__number_loops *loops;
    dw_block_options options;
    dw_scale_rule rule; /* not DEFAULT */
    dw__mx_rule mx;     /* for E8M0 scales */
    dw_block_layout layout;
    int64_t row_stride, code_stride;
    const float *source; /* used by quantization */
    float *result;       /* used by dequantization */
    uint8_t *codes;
    void *scales;
    int64_t outer_step, inner_step, outer_tasks, inner_tasks;
} dw__block_call;

/* A task's region of [outer, inner]. Both starts are starts of blocks. */
typedef struct dw__block_region {
    int64_t outer, outers, inner, inners;
} dw__block_region;

/* Checks all options and fills `call` except for source, result, codes and scales. */
dw_status dw__block_prepare(const char *function, const dw_block_options *options, int64_t rows,
                            int64_t cols, int64_t row_stride, int64_t code_stride,
                            dw__block_call *call);
dw__block_region dw__block_region_at(const dw__block_call *call, int64_t index);
static inline int64_t dw__block_tasks(const dw__block_call *call) {
    return call->outer_tasks * call->inner_tasks;
}

/* Bytes of `count` codes of the call's elements. `count` is not negative. */
static inline int64_t dw__block_bytes(const dw__block_call *call, int64_t count) {
    return call->layout.element == DW_E2M1 ? (count + 1) / 2 : count;
}
static inline int64_t dw__block_scale_index(const dw__block_call *call, int64_t outer,
                                            int64_t inner) {
    int64_t row = call->options.square ? outer / call->layout.block : outer;
    return row * call->layout.scale_cols + inner / call->layout.block;
}

#endif
