/* Small transformers for the engine's tests, built node by node, with random data for their leaves. */
#ifndef DW_TESTS_ENGINE_MODELS_H
#define DW_TESTS_ENGINE_MODELS_H

#include "graph/emit.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The sizes are odd on purpose: heads, widths and vocabulary are not multiples of a vector. */
enum {
    MODEL_LAYERS = 2,
    MODEL_HEADS = 3,
    MODEL_KEY_HEADS = 1,
    MODEL_HEAD = 6,
    MODEL_WIDTH = MODEL_HEADS * MODEL_HEAD,
    MODEL_HIDDEN = 43,
    MODEL_VOCABULARY = 29,
    MODEL_POSITIONS = 64
};

typedef struct model {
    dw_graph *graph;
    dw__emitter e;
    dw_dim batch, sequence;
    double dropout; /* dropout probability; 0: no dropout nodes */
    dw_value seed;
    int64_t streams;
} model;

static inline dw_value model_leaf(model *m, dw_role role, const char *name, dw_dtype dtype,
                                  int rank, const dw_dim *shape) {
    dw_value value = DW_NONE;
    if (m->e.status == DW_OK) {
        m->e.status = dw_graph_leaf(m->graph, role, name, dtype, rank, shape, &value);
    }
    return value;
}

static inline dw_value model_parameter(model *m, const char *name, int layer, int rank, dw_dim rows,
                                       dw_dim columns) {
    char full[64];
    if (layer < 0)
        snprintf(full, sizeof full, "%.40s", name);
    else
        snprintf(full, sizeof full, "%.40s.%d", name, layer);
    dw_dim shape[2] = {rows, columns};
    return model_leaf(m, DW_ROLE_PARAMETER, full, DW_F32, rank, shape);
}

static inline dw_value model_linear(model *m, dw_value x, const char *name, int layer,
                                    dw_dim outputs, dw_dim inputs, bool bias) {
    char full[64];
    dw_value operands[3] = {x, model_parameter(m, name, layer, 2, outputs, inputs), DW_NONE};
    if (bias) {
        snprintf(full, sizeof full, "%.40s.bias", name);
        operands[2] = model_parameter(m, full, layer, 1, outputs, 0);
    }
    return dw__emit(&m->e, DW_OP_LINEAR, 3, operands, 0, NULL);
}

static inline dw_value model_dropout(model *m, dw_value x) {
    if (m->dropout == 0.0) return x;
    dw_attr attrs[2] = {dw_attr_float(DW_ATTR_KEY_P, m->dropout),
                        dw_attr_int(DW_ATTR_KEY_STREAM, m->streams++)};
    dw_value operands[2] = {x, m->seed};
    return dw__emit(&m->e, DW_OP_DROPOUT, 2, operands, 2, attrs);
}

/* [B, S, heads * D] -> [B, heads, S, D] */
static inline dw_value model_split_heads(model *m, dw_value x, dw_dim heads) {
    dw_dim shape[4] = {m->batch, m->sequence, heads, MODEL_HEAD};
    int64_t perm[4] = {0, 2, 1, 3};
    return dw__emit_permute(&m->e, dw__emit_reshape(&m->e, x, 4, shape), 4, perm);
}

static inline dw_value model_attention(model *m, dw_value q, dw_value k, dw_value v,
                                       dw_value mask) {
    dw_attr attrs[4] = {dw_attr_float(DW_ATTR_KEY_SCALE, 1.0 / sqrt(MODEL_HEAD)),
                        dw_attr_int(DW_ATTR_KEY_CAUSAL, 1)};
    uint32_t count = 2;
    dw_value operands[5] = {q, k, v, mask, DW_NONE};
    if (m->dropout > 0.0) {
        operands[4] = m->seed;
        attrs[count++] = dw_attr_float(DW_ATTR_KEY_P, m->dropout);
        attrs[count++] = dw_attr_int(DW_ATTR_KEY_STREAM, m->streams++);
    }
    dw_value o = dw__emit(&m->e, DW_OP_ATTENTION, 5, operands, count, attrs);
    int64_t perm[4] = {0, 2, 1, 3};
    dw_dim shape[3] = {m->batch, m->sequence, MODEL_WIDTH};
    return dw__emit_reshape(&m->e, dw__emit_permute(&m->e, o, 4, perm), 3, shape);
}

static inline dw_value model_layer_norm(model *m, dw_value x, const char *name, int layer) {
    char bias[64];
    snprintf(bias, sizeof bias, "%.40s.bias", name);
    dw_attr eps = dw_attr_float(DW_ATTR_KEY_EPS, 1e-5);
    dw_value operands[3] = {x, model_parameter(m, name, layer, 1, MODEL_WIDTH, 0),
                            model_parameter(m, bias, layer, 1, MODEL_WIDTH, 0)};
    return dw__emit(&m->e, DW_OP_LAYER_NORM, 3, operands, 1, &eps);
}

static inline dw_value model_rms_norm(model *m, dw_value x, const char *name, int layer) {
    dw_attr eps = dw_attr_float(DW_ATTR_KEY_EPS, 1e-5);
    dw_value operands[2] = {x, model_parameter(m, name, layer, 1, MODEL_WIDTH, 0)};
    return dw__emit(&m->e, DW_OP_RMS_NORM, 2, operands, 1, &eps);
}

static inline dw_value model_gpt_layer(model *m, dw_value x, int layer) {
    dw__emitter *e = &m->e;
    dw_value h = model_layer_norm(m, x, "attn.norm", layer);
    dw_value qkv = model_linear(m, h, "attn.qkv", layer, 3 * MODEL_WIDTH, MODEL_WIDTH, true);
    dw_value parts[3];
    for (int i = 0; i < 3; i++) {
        dw_value part = dw__emit_slice(e, qkv, 2, i * MODEL_WIDTH, (i + 1) * MODEL_WIDTH);
        parts[i] = model_split_heads(m, part, MODEL_HEADS);
    }
    dw_value o = model_attention(m, parts[0], parts[1], parts[2], DW_NONE);
    o = model_dropout(m, model_linear(m, o, "attn.out", layer, MODEL_WIDTH, MODEL_WIDTH, true));
    x = dw__emit_binary(e, DW_OP_ADD, x, o);
    h = model_layer_norm(m, x, "mlp.norm", layer);
    h = model_linear(m, h, "mlp.up", layer, MODEL_HIDDEN, MODEL_WIDTH, true);
    dw_attr tanh_form = dw_attr_string(DW_ATTR_KEY_APPROXIMATE, "tanh");
    h = dw__emit(e, DW_OP_GELU, 1, &h, 1, &tanh_form);
    h = model_linear(m, h, "mlp.down", layer, MODEL_WIDTH, MODEL_HIDDEN, true);
    return dw__emit_binary(e, DW_OP_ADD, x, model_dropout(m, h));
}

static inline dw_value model_rope(model *m, dw_value x, dw_value cosines, dw_value sines) {
    dw_value operands[3] = {x, cosines, sines};
    return dw__emit(&m->e, DW_OP_ROPE, 3, operands, 0, NULL);
}

static inline dw_value model_llama_layer(model *m, dw_value x, dw_value mask, dw_value cosines,
                                         dw_value sines, int layer) {
    enum { KEY_WIDTH = MODEL_KEY_HEADS * MODEL_HEAD };
    dw__emitter *e = &m->e;
    dw_value h = model_rms_norm(m, x, "attn.norm", layer);
    dw_value q = model_linear(m, h, "attn.q", layer, MODEL_WIDTH, MODEL_WIDTH, false);
    dw_value k = model_linear(m, h, "attn.k", layer, KEY_WIDTH, MODEL_WIDTH, false);
    dw_value v = model_linear(m, h, "attn.v", layer, KEY_WIDTH, MODEL_WIDTH, false);
    q = model_rope(m, model_split_heads(m, q, MODEL_HEADS), cosines, sines);
    k = model_rope(m, model_split_heads(m, k, MODEL_KEY_HEADS), cosines, sines);
    dw_value o = model_attention(m, q, k, model_split_heads(m, v, MODEL_KEY_HEADS), mask);
    o = model_linear(m, o, "attn.out", layer, MODEL_WIDTH, MODEL_WIDTH, false);
    x = dw__emit_binary(e, DW_OP_ADD, x, o);
    h = model_rms_norm(m, x, "mlp.norm", layer);
    dw_value gate_up[2] = {model_linear(m, h, "mlp.gate", layer, MODEL_HIDDEN, MODEL_WIDTH, false),
                           model_linear(m, h, "mlp.up", layer, MODEL_HIDDEN, MODEL_WIDTH, false)};
    h = dw__emit(e, DW_OP_SWIGLU, 2, gate_up, 0, NULL);
    h = model_linear(m, h, "mlp.down", layer, MODEL_WIDTH, MODEL_HIDDEN, false);
    return dw__emit_binary(e, DW_OP_ADD, x, h);
}

/* Adds the loss over [B*S] targets. The outputs are the logits [B, S, V] and the loss. */
static inline void model_head(model *m, dw_value logits) {
    dw__emitter *e = &m->e;
    dw_dim tokens = dw__emit_dim_mul(e, m->batch, m->sequence);
    dw_dim shape[2] = {tokens, MODEL_VOCABULARY}, given[2] = {m->batch, m->sequence};
    dw_value target = model_leaf(m, DW_ROLE_INPUT, "target", DW_I64, 2, given);
    dw_value operands[2] = {dw__emit_reshape(e, logits, 2, shape),
                            dw__emit_reshape(e, target, 1, &tokens)};
    dw_attr mean = dw_attr_string(DW_ATTR_KEY_REDUCTION, "mean");
    dw_value loss = dw__emit(e, DW_OP_CROSS_ENTROPY, 2, operands, 1, &mean);
    if (e->status == DW_OK) e->status = dw_graph_add_output(m->graph, logits);
    if (e->status == DW_OK) e->status = dw_graph_add_output(m->graph, loss);
}

static inline dw_value model_tokens(model *m) {
    dw_dim shape[2] = {m->batch, m->sequence};
    return model_leaf(m, DW_ROLE_INPUT, "tokens", DW_I64, 2, shape);
}

static inline dw_value model_embedding(model *m, dw_value table, dw_value index) {
    dw_value operands[2] = {table, index};
    return dw__emit(&m->e, DW_OP_EMBEDDING, 2, operands, 0, NULL);
}

static inline void model_begin(model *m) {
    m->e.status = dw_graph_create(&m->graph);
    m->e.graph = m->graph;
    if (m->e.status == DW_OK) m->e.status = dw_graph_symbol(m->graph, "B", &m->batch);
    if (m->e.status == DW_OK) m->e.status = dw_graph_symbol(m->graph, "S", &m->sequence);
    dw_dim two = 2;
    m->seed = m->dropout > 0.0 ? model_leaf(m, DW_ROLE_SEED, "seed", DW_I64, 1, &two) : DW_NONE;
}

/* A model with tied embeddings, learned positions, biases and GELU. */
static inline dw_status model_gpt(model *m) {
    model_begin(m);
    dw__emitter *e = &m->e;
    dw_value table = model_parameter(m, "wte", -1, 2, MODEL_VOCABULARY, MODEL_WIDTH);
    dw_value places = model_parameter(m, "wpe", -1, 2, MODEL_POSITIONS, MODEL_WIDTH);
    dw_value x = model_embedding(m, table, model_tokens(m));
    dw_value at = model_embedding(m, places, dw__emit_iota(e, DW_I64, 1, &m->sequence, 0));
    x = dw__emit_binary(e, DW_OP_ADD, x, dw__emit_broadcast_like(e, at, x));
    x = model_dropout(m, x);
    for (int layer = 0; layer < MODEL_LAYERS; layer++) x = model_gpt_layer(m, x, layer);
    x = model_layer_norm(m, x, "norm", -1);
    dw_value operands[2] = {x, table};
    model_head(m, dw__emit(e, DW_OP_LINEAR, 2, operands, 0, NULL));
    return e->status;
}

/* A model with grouped heads, rotary positions, RMS norms, SwiGLU and a padding mask. */
static inline dw_status model_llama(model *m) {
    model_begin(m);
    dw__emitter *e = &m->e;
    dw_dim rope_shape[4] = {1, 1, m->sequence, MODEL_HEAD};
    dw_dim mask_shape[4] = {m->batch, 1, 1, m->sequence};
    dw_value cosines = model_leaf(m, DW_ROLE_CONSTANT, "cos", DW_F32, 4, rope_shape);
    dw_value sines = model_leaf(m, DW_ROLE_CONSTANT, "sin", DW_F32, 4, rope_shape);
    dw_value mask = model_leaf(m, DW_ROLE_INPUT, "mask", DW_BOOL, 4, mask_shape);
    dw_value table = model_parameter(m, "embed", -1, 2, MODEL_VOCABULARY, MODEL_WIDTH);
    dw_value x = model_embedding(m, table, model_tokens(m));
    for (int layer = 0; layer < MODEL_LAYERS; layer++) {
        x = model_llama_layer(m, x, mask, cosines, sines, layer);
    }
    x = model_rms_norm(m, x, "norm", -1);
    model_head(m, model_linear(m, x, "head", -1, MODEL_VOCABULARY, MODEL_WIDTH, false));
    return e->status;
}

/* ---- data ------------------------------------------------------------------------------------ */

static inline double model_random(uint64_t *state) { /* [-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int32_t)(*state >> 32) / 2147483648.0;
}

static inline void model_fill(const dw_graph *graph, dw_value leaf, int64_t count, uint64_t seed,
                              void *data) {
    const char *name = dw_value_name(graph, leaf);
    uint64_t state = seed * 2654435761u + leaf + 1;
    bool norm = strstr(name, "norm") && !strstr(name, "bias");
    for (int64_t i = 0; i < count; i++) {
        double r = model_random(&state);
        switch (dw_value_dtype(graph, leaf)) {
        case DW_F32: ((float *)data)[i] = (float)(norm ? 1.0 + 0.3 * r : 0.4 * r); break;
        case DW_BF16: {
            const float number = (float)(0.4 * r);
            uint32_t bits;
            memcpy(&bits, &number, sizeof bits);
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
            break;
        }
        case DW_BOOL: ((uint8_t *)data)[i] = i == 0 || r < 0.7; break;
        case DW_I64: {
            int64_t token = (int64_t)((0.5 + 0.5 * r) * MODEL_VOCABULARY);
            if (strcmp(name, "target") == 0 && r > 0.8) token = -100;
            ((int64_t *)data)[i] = token;
            break;
        }
        default: break;
        }
    }
}

#endif
