/* Multilayer perceptrons and attention in 16 bits, for plans that run elementwise programs or rope behind products. */
#ifndef DW_ENGINE_EPILOGUES_H
#define DW_ENGINE_EPILOGUES_H

#include "engine_problem.h"

typedef enum epilogue_kind {
    EPILOGUE_GELU,     /* behind a linear layer with a bias */
    EPILOGUE_OBSERVED, /* the same, and the linear layer's result is an output */
    EPILOGUE_RESIDUAL, /* the result of the second layer is added to x: an accumulation, no epilogue */
    EPILOGUE_DROPOUT, /* the first layer's result is dropped out and added to x */
    EPILOGUE_GATED,   /* SwiGLU of two products */
    EPILOGUE_ROPE,    /* attention with rope of queries, and of keys of one head */
    EPILOGUE_HALVES,  /* SwiGLU of the halves of one product */
    EPILOGUE_EXPERTS, /* SwiGLU of two products of experts */
    EPILOGUE_HALVES_OF_EXPERTS,
    EPILOGUE_KINDS
} epilogue_kind;

/* The model that model_epilogue builds next. */
static struct {
    epilogue_kind kind;
    dw_dim hidden;
    dw_dtype type;
} epilogue_built;

enum { EPILOGUE_WIDTH = 72, EPILOGUE_EXPERT_COUNT = 3, EPILOGUE_HEAD = 64 };

/* The chosen model's probability of dropout. */
static inline double epilogue_dropout(void) {
    return epilogue_built.kind == EPILOGUE_DROPOUT ? 0.25 : 0.0;
}

static inline dw_value epilogue_parameter(model *m, const char *name, dw_dim rows, dw_dim columns) {
    const dw_dim shape[] = {EPILOGUE_EXPERT_COUNT, rows, columns};
    const bool experts = epilogue_built.kind >= EPILOGUE_EXPERTS;
    const dw_value p = columns == 0 ? model_parameter(m, name, -1, 1, rows, 0)
                                    : model_leaf(m, DW_ROLE_PARAMETER, name, DW_F32,
                                                 experts ? 3 : 2, shape + !experts);
    return dw__emit_cast(&m->e, p, epilogue_built.type);
}

/* `index`: of the experts; DW_NONE: a linear layer. */
static inline dw_value epilogue_product(model *m, dw_value x, const char *name, dw_dim outputs,
                                        dw_dim inputs, dw_value index, dw_value bias) {
    const dw_value w = epilogue_parameter(m, name, outputs, inputs);
    return index == DW_NONE ? dw__emit(&m->e, DW_OP_LINEAR, 3, (dw_value[]){x, w, bias}, 0, NULL)
                            : dw__emit(&m->e, DW_OP_GROUPED_LINEAR, 4,
                                       (dw_value[]){x, w, index, DW_NONE}, 0, NULL);
}

/* Tokens, which are below MODEL_VOCABULARY, as numbers of experts. */
static inline dw_value epilogue_index(model *m) {
    dw__emitter *e = &m->e;
    const dw_dim rows = dw__emit_dim_mul(e, m->batch, m->sequence);
    const dw_value tokens = dw__emit_reshape(e, model_tokens(m), 1, &rows);
    return dw__emit_binary(e, DW_OP_ADD,
                           dw__emit_cast(e, dw__emit_with_number(e, DW_OP_LT, tokens, 9), DW_I64),
                           dw__emit_cast(e, dw__emit_with_number(e, DW_OP_LT, tokens, 17), DW_I64));
}

static inline dw_value epilogue_heads(model *m, dw_value x, dw_dim heads) {
    const dw_dim shape[] = {m->batch, m->sequence, heads, EPILOGUE_HEAD};
    const int64_t perm[] = {0, 2, 1, 3};
    return dw__emit_permute(&m->e, dw__emit_reshape(&m->e, x, 4, shape), 4, perm);
}

/* Attention of hidden / EPILOGUE_HEAD heads. */
static inline dw_value epilogue_attention(model *m, dw_value x) {
    enum { Q, K, V, PARTS };
    static const char *const names[PARTS] = {"q", "k", "v"};
    const dw_dim heads[PARTS] = {epilogue_built.hidden / EPILOGUE_HEAD, 1, 1},
                 table[] = {1, 1, m->sequence, EPILOGUE_HEAD},
                 rows[] = {m->batch, m->sequence, epilogue_built.hidden};
    const dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_SCALE, 0.125),
                             dw_attr_int(DW_ATTR_KEY_CAUSAL, 1)};
    const int64_t perm[] = {0, 2, 1, 3};
    dw__emitter *e = &m->e;
    dw_value rope[3] = {DW_NONE}, parts[PARTS];
    rope[1] = dw__emit_cast(e, model_leaf(m, DW_ROLE_CONSTANT, "cos", DW_F32, 4, table),
                            epilogue_built.type);
    rope[2] = dw__emit_cast(e, model_leaf(m, DW_ROLE_CONSTANT, "sin", DW_F32, 4, table),
                            epilogue_built.type);
    for (int i = 0; i < PARTS; i++)
        parts[i] = epilogue_product(m, x, names[i], heads[i] * EPILOGUE_HEAD, EPILOGUE_WIDTH,
                                    DW_NONE, DW_NONE);
    for (int i = 0; i < PARTS; i++) {
        rope[0] = parts[i] = epilogue_heads(m, parts[i], heads[i]);
        if (i != V) parts[i] = dw__emit(e, DW_OP_ROPE, 3, rope, 0, NULL);
    }
    const dw_value o = dw__emit(e, DW_OP_ATTENTION, PARTS, parts, 2, attrs);
    return dw__emit_reshape(e, dw__emit_permute(e, o, 4, perm), 3, rows);
}

static inline dw_value epilogue_hidden(model *m, dw_value x, dw_value index) {
    const epilogue_kind kind = epilogue_built.kind;
    const dw_dim n = epilogue_built.hidden, k = EPILOGUE_WIDTH;
    const bool halves = kind == EPILOGUE_HALVES || kind == EPILOGUE_HALVES_OF_EXPERTS;
    const int axis = index == DW_NONE ? 2 : 1;
    dw__emitter *e = &m->e;
    if (kind == EPILOGUE_ROPE) return epilogue_attention(m, x);
    if (kind <= EPILOGUE_DROPOUT) {
        const dw_attr tanh_form = dw_attr_string(DW_ATTR_KEY_APPROXIMATE, "tanh");
        const dw_value bias = epilogue_parameter(m, "b", n, 0),
                       y = epilogue_product(m, x, "up", n, k, DW_NONE, bias);
        if (kind == EPILOGUE_OBSERVED && e->status == DW_OK)
            e->status = dw_graph_add_output(m->graph, y);
        if (kind == EPILOGUE_DROPOUT) return dw__emit_binary(e, DW_OP_ADD, x, model_dropout(m, y));
        return dw__emit(e, DW_OP_GELU, 1, &y, 1, &tanh_form);
    }
    dw_value gate_up[2];
    if (halves) {
        const dw_value y =
            epilogue_product(m, x, "gate_up", dw__emit_dim_mul(e, 2, n), k, index, DW_NONE);
        gate_up[0] = dw__emit_slice(e, y, axis, 0, n);
        gate_up[1] = dw__emit_slice(e, y, axis, n, dw__emit_dim_mul(e, 2, n));
    } else {
        gate_up[0] = epilogue_product(m, x, "gate", n, k, index, DW_NONE);
        gate_up[1] = epilogue_product(m, x, "up", n, k, index, DW_NONE);
    }
    return dw__emit(e, DW_OP_SWIGLU, 2, gate_up, 0, NULL);
}

static inline dw_status model_epilogue(model *m) {
    model_begin(m);
    dw__emitter *e = &m->e;
    const epilogue_kind kind = epilogue_built.kind;
    const bool experts = kind >= EPILOGUE_EXPERTS;
    const dw_dim shape[] = {m->batch, m->sequence, EPILOGUE_WIDTH},
                 rows[] = {dw__emit_dim_mul(e, m->batch, m->sequence), EPILOGUE_WIDTH};
    const dw_value index = experts ? epilogue_index(m) : DW_NONE,
                   leaf = model_leaf(m, DW_ROLE_PARAMETER, "x", DW_F32, experts ? 2 : 3,
                                     experts ? rows : shape),
                   x = dw__emit_cast(e, leaf, epilogue_built.type);
    dw_value y = epilogue_product(m, epilogue_hidden(m, x, index), "down", EPILOGUE_WIDTH,
                                  epilogue_built.hidden, index, DW_NONE);
    if (kind == EPILOGUE_RESIDUAL) y = dw__emit_binary(e, DW_OP_ADD, x, y);
    if (e->status == DW_OK) e->status = dw_graph_add_output(m->graph, dw__emit_cast(e, y, DW_F32));
    return e->status;
}

static inline void epilogue_choose(epilogue_kind kind, dw_dim hidden, dw_dtype type) {
    epilogue_built.kind = kind;
    epilogue_built.hidden = hidden;
    epilogue_built.type = type;
}

#endif
