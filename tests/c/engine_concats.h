/* Models with concatenations, for plans that compute the operands in their slices. */
#ifndef DW_TESTS_ENGINE_CONCATS_H
#define DW_TESTS_ENGINE_CONCATS_H

#include "engine_problem.h"

typedef enum concat_kind {
    CONCAT_OF_TWO,       /* results of one elementwise program */
    CONCAT_OF_READ,      /* one of them has another reader */
    CONCAT_OF_ADDEND,    /* one of them is added to a product */
    CONCAT_OF_SAME,      /* one of them is an operand twice */
    CONCAT_OF_CONCATS,   /* along another axis */
    CONCAT_OF_LEAF,      /* and a result */
    CONCAT_OF_PRODUCT,   /* and a result */
    CONCAT_OF_ROWS,      /* along the first axis: each operand is contiguous there */
    CONCAT_OF_HEADS,     /* whose permute is multiplied */
    CONCAT_OF_NARROW,    /* rows too short to be written in place */
    CONCAT_OF_GRADIENTS, /* those of the halves of a matrix: backward of SwiGLU */
    CONCAT_OF_COLUMNS,   /* the same of every other column */
    CONCAT_KINDS
} concat_kind;

/* The model that model_concat builds next. */
static struct {
    concat_kind kind;
    bool observed; /* operands are outputs, too, and therefore do not lie in the concatenation */
    dw_dtype type;
} concat_built;

enum { CONCAT_INNER = 24, CONCAT_RESULTS = 8 };

static inline void concat_output(model *m, dw_value value) {
    if (m->e.status == DW_OK)
        m->e.status = dw_graph_add_output(m->graph, dw__emit_cast(&m->e, value, DW_F32));
}

static inline dw_value concat_parameter(model *m, const char *name, dw_dim rows, dw_dim columns) {
    return dw__emit_cast(&m->e, model_parameter(m, name, -1, 2, rows, columns), concat_built.type);
}

static inline dw_value concat_softmax(model *m, dw_value x) {
    const dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
    return dw__emit(&m->e, DW_OP_SOFTMAX, 1, &x, 1, &axis);
}

static inline dw_status model_concat(model *m) {
    model_begin(m);
    dw__emitter *e = &m->e;
    const concat_kind kind = concat_built.kind;
    const dw_dim rows = dw__emit_dim_mul(e, m->batch, m->sequence),
                 width = kind == CONCAT_OF_NARROW ? 5 : 128;
    const dw_value a = concat_parameter(m, "a", rows, width),
                   b = concat_parameter(m, "b", rows, width),
                   x = concat_parameter(m, "x", rows, CONCAT_INNER),
                   w = concat_parameter(m, "w", CONCAT_INNER,
                                        kind >= CONCAT_OF_GRADIENTS ? dw__emit_dim_mul(e, 2, width)
                                                                    : width);
    dw_value p = dw__emit_binary(e, DW_OP_MUL, dw__emit_unary(e, DW_OP_TANH, a), b),
             q = dw__emit_binary(e, DW_OP_ADD, dw__emit_unary(e, DW_OP_SIGMOID, a), b), all;
    int operands = 2, axis = 1;
    switch (kind) {
    case CONCAT_OF_SAME:
        operands = 3;
        all = dw__emit(e, DW_OP_CONCAT, 3, (dw_value[]){p, q, p}, 1,
                       (dw_attr[]){dw_attr_int(DW_ATTR_KEY_AXIS, 1)});
        break;
    case CONCAT_OF_CONCATS:
        all = dw__emit_concat(e, dw__emit_concat(e, p, q, 1),
                              dw__emit_concat(e, dw__emit_unary(e, DW_OP_TANH, q),
                                              dw__emit_unary(e, DW_OP_SIGMOID, p), 1),
                              axis = 0);
        break;
    case CONCAT_OF_LEAF:
        p = dw__emit_concat(e, b, q, 1);
        all = p;
        break;
    case CONCAT_OF_PRODUCT:
        p = dw__emit_matmul(e, x, w, false, false);
        all = dw__emit_concat(e, p, q, 1);
        break;
    case CONCAT_OF_ROWS:
        p = concat_softmax(m, p);
        operands = 1;
        all = dw__emit_concat(e, p, q, 0);
        break;
    case CONCAT_OF_HEADS: {
        const dw_dim heads[] = {m->batch, m->sequence, 2, 64}, together[] = {rows, 256};
        const int64_t perm[] = {0, 2, 1, 3};
        const dw_value x4 = dw__emit_permute(e, dw__emit_reshape(e, p, 4, heads), 4, perm),
                       y4 = dw__emit_permute(e, dw__emit_reshape(e, q, 4, heads), 4, perm);
        all = dw__emit_permute(e, dw__emit_concat(e, x4, y4, 3), 4, perm);
        all = dw__emit_reshape(e, all, 2, together);
        break;
    }
    case CONCAT_OF_GRADIENTS: {
        const dw_value halves = dw__emit_matmul(e, x, w, false, false),
                       gate = dw__emit_slice(e, halves, 1, 0, width),
                       up = dw__emit_slice(e, halves, 1, width, dw__emit_dim_mul(e, 2, width));
        operands = 1;
        all = dw__emit_binary(e, DW_OP_MUL, dw__emit_unary(e, DW_OP_SILU, gate), up);
        break;
    }
    case CONCAT_OF_COLUMNS: {
        const dw_dim pairs[] = {rows, width, 2}, columns[] = {rows, width};
        const dw_value both = dw__emit_reshape(e, dw__emit_matmul(e, x, w, false, false), 3, pairs);
        const dw_value gate = dw__emit_reshape(e, dw__emit_slice(e, both, 2, 0, 1), 2, columns),
                       up = dw__emit_reshape(e, dw__emit_slice(e, both, 2, 1, 2), 2, columns);
        operands = 1;
        all = dw__emit_binary(e, DW_OP_MUL, dw__emit_unary(e, DW_OP_SILU, gate), up);
        break;
    }
    default: all = dw__emit_concat(e, p, q, 1); break;
    }
    const dw_value v =
        concat_parameter(m, "v", dw__emit_dim_mul(e, operands, width), CONCAT_RESULTS);
    concat_output(m, dw__emit_unary(e, DW_OP_TANH, dw__emit_matmul(e, all, v, false, false)));
    if (kind == CONCAT_OF_READ) concat_output(m, dw__emit_binary(e, DW_OP_MUL, p, q));
    if (kind == CONCAT_OF_ADDEND)
        concat_output(m, dw__emit_binary(e, DW_OP_ADD, dw__emit_matmul(e, x, w, false, false), p));
    if (concat_built.observed) {
        if (e->status == DW_OK && p != all) e->status = dw_graph_add_output(m->graph, p);
        if (e->status == DW_OK) e->status = dw_graph_add_output(m->graph, q);
    }
    return e->status;
}

static inline void concat_choose(concat_kind kind, bool observed, dw_dtype type) {
    concat_built.kind = kind;
    concat_built.observed = observed;
    concat_built.type = type;
}

/* The instructions of concatenations, and of reshapes that copy, in forward; in backward if only gradients are
 * concatenated. Backward may repeat those of forward. */
static inline int concat_copies(const char *listing) {
    const bool backward = concat_built.kind >= CONCAT_OF_GRADIENTS;
    const char *const lines[] = {backward ? " B concat " : " F concat ",
                                 backward ? " B reshape " : " F reshape "};
    int count = 0;
    for (size_t i = 0; i < DW_COUNT(lines); i++)
        for (const char *at = listing; (at = strstr(at, lines[i])) != NULL; at++) count++;
    return count;
}

/* Compares the outputs that both have. */
static inline void concat_expect_same(const results *a, const results *b) {
    for (uint32_t i = 0; i < a->output_count && i < b->output_count; i++)
        assert_memory_equal(a->outputs[i].data, b->outputs[i].data, bytes_of(&a->outputs[i]));
}

#endif
