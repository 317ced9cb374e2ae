/* dw_model_config -> graph: the forward pass of transformers' class, built from composites where the table
 * has them. Regions, layers and module paths equal those of a capture of that class. */
#include "graph/emit.h"
#include "model/model_internal.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { IGNORED_LABEL = -100 };

typedef struct builder {
    dw__emitter e;
    const dw_model_config *config;
    const dw_model_graph_options *options;
    dw_dim batch, length;
    dw_value ids, labels, seed; /* labels, seed: DW_NONE if absent */
    int layer;                  /* -1 outside of the layers */
    int64_t stream;             /* stream of the next dropout */
    dw_value cos, sin;          /* [1,1,S,D] */
    /* With a cache of keys and values; DW_NONE without. */
    dw_dim capacity, row_count;
    dw_value position, rows;
    dw_value past,
        past_in_window; /* [1,1,1,C] and [1,1,S,C] bool: cached keys that queries attend to */
} builder;

/* ---- origin of nodes ----------------------------------------------------------------------- */

/* Sets the origin. `module` is relative to the layer, or the whole path outside of the layers. */
static void at(builder *b, dw_region region, const char *module) {
    char path[160];
    bool gpt2 = b->config->family == DW__BUILT_GPT2;
    if (b->e.status != DW_OK) return;
    if (b->layer < 0)
        snprintf(path, sizeof path, "%s", module);
    else
        snprintf(path, sizeof path, "%s.%d%s%s", gpt2 ? "transformer.h" : "model.layers", b->layer,
                 *module ? "." : "", module);
    b->e.status = dw_graph_set_origin(b->e.graph, region, b->layer, path);
}

/* Finds a parameter by its name in the layer, or by its whole name outside of the layers. */
static dw_value parameter(builder *b, const char *name) {
    char path[160];
    const char *folder = b->config->family == DW__BUILT_GPT2 ? "transformer.h" : "model.layers";
    if (b->e.status != DW_OK) return DW_NONE;
    if (b->layer < 0)
        snprintf(path, sizeof path, "%s", name);
    else
        snprintf(path, sizeof path, "%s.%d.%s", folder, b->layer, name);
    dw_value found = dw_graph_find(b->e.graph, path);
    if (found == DW_NONE)
        b->e.status = dw__fail(DW_INTERNAL, "the model has no parameter \"%s\"", path);
    return found;
}

/* ---- pieces -------------------------------------------------------------------------------- */

static dw_value linear(builder *b, const char *module, dw_region region, dw_value x, bool biased,
                       bool transposed) {
    char weight[96], bias[96];
    snprintf(weight, sizeof weight, "%s.weight", module);
    snprintf(bias, sizeof bias, "%s.bias", module);
    at(b, region, module);
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transposed);
    dw_value inputs[] = {x, parameter(b, weight), biased ? parameter(b, bias) : DW_NONE};
    return dw__emit(&b->e, DW_OP_LINEAR, 3, inputs, 1, &attr);
}

static dw_value dropout(builder *b, dw_value x, double p, dw_region region, const char *module) {
    if (!b->options->dropout || p == 0.0) return x;
    at(b, region, module);
    dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_P, p),
                       dw_attr_int(DW_ATTR_KEY_STREAM, b->stream++)};
    return dw__emit(&b->e, DW_OP_DROPOUT, 2, (dw_value[]){x, b->seed}, 2, attrs);
}

static dw_value embedding(builder *b, const char *module, dw_value indices, int64_t padding) {
    char weight[96];
    snprintf(weight, sizeof weight, "%s.weight", module);
    at(b, DW_REGION_EMBED, module);
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_PADDING_INDEX, padding);
    return dw__emit(&b->e, DW_OP_EMBEDDING, 2, (dw_value[]){parameter(b, weight), indices}, 1,
                    &attr);
}

static dw_value layer_norm(builder *b, const char *module, dw_value x) {
    char weight[96], bias[96];
    snprintf(weight, sizeof weight, "%s.weight", module);
    snprintf(bias, sizeof bias, "%s.bias", module);
    at(b, DW_REGION_NORM, module);
    dw_attr attr = dw_attr_float(DW_ATTR_KEY_EPS, b->config->eps);
    dw_value inputs[] = {x, parameter(b, weight), parameter(b, bias)};
    return dw__emit(&b->e, DW_OP_LAYER_NORM, 3, inputs, 1, &attr);
}

static dw_value rms_norm(builder *b, const char *module, dw_value x) {
    char weight[96];
    snprintf(weight, sizeof weight, "%s.weight", module);
    at(b, DW_REGION_NORM, module);
    dw_attr attr = dw_attr_float(DW_ATTR_KEY_EPS, b->config->eps);
    return dw__emit(&b->e, DW_OP_RMS_NORM, 2, (dw_value[]){x, parameter(b, weight)}, 1, &attr);
}

static dw_value activation(builder *b, dw_value x) {
    dw_attr approximate = dw_attr_string(DW_ATTR_KEY_APPROXIMATE, "none");
    switch (b->config->activation) {
    case DW__ACTIVATION_RELU: return dw__emit_unary(&b->e, DW_OP_RELU, x);
    case DW__ACTIVATION_SILU: return dw__emit_unary(&b->e, DW_OP_SILU, x);
    case DW__ACTIVATION_TANH: return dw__emit_unary(&b->e, DW_OP_TANH, x);
    case DW__ACTIVATION_GELU_TANH: approximate.string = "tanh"; break;
    case DW__ACTIVATION_GELU: break;
    }
    return dw__emit(&b->e, DW_OP_GELU, 1, &x, 1, &approximate);
}

/* [B,S,heads*D] -> [B,S,heads,D] */
static dw_value split_heads(builder *b, dw_value x, int64_t heads) {
    return dw__emit_reshape(&b->e, x, 4,
                            (dw_dim[]){b->batch, b->length, heads, b->config->sizes.head_dim});
}

/* [B,S,heads,D] <-> [B,heads,S,D] */
static dw_value swap_heads(builder *b, dw_value x) {
    return dw__emit_permute(&b->e, x, 4, (int64_t[]){0, 2, 1, 3});
}

/* ---- cache of keys and values -------------------------------------------------------------- */

/* The leaf of the layer's cache, [C,B,Hk,D] -> [B,Hk,C,D]. */
static dw_value cached(builder *b, const char *which) {
    char name[64];
    snprintf(name, sizeof name, "cache.%d.%s", b->layer, which);
    return dw__emit_permute(&b->e, dw_graph_find(b->e.graph, name), 4, (int64_t[]){1, 2, 0, 3});
}

/* New keys or values [B,Hk,S,D] become an output [S,B,Hk,D]. */
static void add_cache_output(builder *b, dw_value x) {
    x = dw__emit_permute(&b->e, x, 4, (int64_t[]){2, 0, 1, 3});
    if (b->e.status == DW_OK) b->e.status = dw_graph_add_output(b->e.graph, x);
}

/* Adds the position to integers that count the new tokens. */
static dw_value add_position(builder *b, dw_value index) {
    dw__type type = dw__type_of(b->e.graph, index);
    dw_dim ones[DW_MAX_RANK] = {1, 1, 1, 1};
    dw_value position = dw__emit_reshape(&b->e, b->position, type.rank, ones);
    position = dw__emit_cast(&b->e, position, type.dtype);
    return dw__emit_binary(&b->e, DW_OP_ADD, index,
                           dw__emit_broadcast_like(&b->e, position, index));
}

/* Which cached keys the queries attend to: those before the position, and within the window of each query. */
static void masks(builder *b) {
    dw__emitter *e = &b->e;
    dw_dim keys[] = {1, 1, 1, b->capacity}, all[] = {1, 1, b->length, b->capacity};
    at(b, DW_REGION_ATTN, "");
    dw_value index = dw__emit_iota(e, DW_I64, 4, keys, 3);
    dw_value position = dw__emit_reshape(e, b->position, 4, (dw_dim[]){1, 1, 1, 1});
    b->past = dw__emit_binary(e, DW_OP_LT, index, dw__emit_broadcast(e, position, 4, keys));
    if (b->config->window == 0) return;
    dw_value query = add_position(b, dw__emit_iota(e, DW_I64, 4, all, 2));
    dw_value first = dw__emit_with_number(e, DW_OP_SUB, query, (double)b->config->window);
    dw_value inside = dw__emit_binary(e, DW_OP_GT, dw__emit_broadcast(e, index, 4, all), first);
    b->past_in_window =
        dw__emit_binary(e, DW_OP_AND, inside, dw__emit_broadcast(e, b->past, 4, all));
}

/* Attention over cached and new keys together. Each set has its own softmax, and the log-sum-exp of both gives the
 * weight of each result: sigmoid(lse_cached - lse_new). An empty cache has the weight 0. */
static dw_value attention_with_cache(builder *b, dw_value q, dw_value k, dw_value v,
                                     uint32_t attr_count, const dw_attr *attrs) {
    dw__emitter *e = &b->e;
    dw_dtype dtype = b->options->dtype, wide = dw__compute_dtype(dtype);
    dw_attr scale = attrs[0];
    dw_value mask = b->config->sliding[b->layer] ? b->past_in_window : b->past;
    dw_value past_inputs[] = {q, cached(b, "key"), cached(b, "value"), mask, DW_NONE};
    dw_value new_inputs[] = {q, k, v, DW_NONE, DW_NONE};
    dw_node past = dw__emit_node(e, DW_OP_ATTENTION, 5, past_inputs, 1, &scale);
    dw_node fresh = dw__emit_node(e, DW_OP_ATTENTION, 5, new_inputs, attr_count, attrs);
    add_cache_output(b, k);
    add_cache_output(b, v);
    if (e->status != DW_OK) return DW_NONE;
    dw_value o_past = dw__emit_cast(e, dw_node_output(e->graph, past, 0), wide);
    dw_value o_new = dw__emit_cast(e, dw_node_output(e->graph, fresh, 0), wide);
    dw_value weight =
        dw__emit_unary(e, DW_OP_SIGMOID,
                       dw__emit_binary(e, DW_OP_SUB, dw_node_output(e->graph, past, 1),
                                       dw_node_output(e->graph, fresh, 1)));
    dw_dim shape[] = {b->batch, b->config->sizes.heads, b->length, 1};
    weight = dw__emit_broadcast_like(e, dw__emit_reshape(e, weight, 4, shape), o_new);
    dw_value difference = dw__emit_binary(e, DW_OP_SUB, o_past, o_new);
    dw_value o =
        dw__emit_binary(e, DW_OP_ADD, o_new, dw__emit_binary(e, DW_OP_MUL, weight, difference));
    return dw__emit_cast(e, o, dtype);
}

/* Keeps the tokens whose logits are wanted. */
static dw_value wanted_rows(builder *b, dw_value x) {
    if (!b->options->cached) return x;
    at(b, DW_REGION_HEAD, "");
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
    return dw__emit(&b->e, DW_OP_TAKE, 2, (dw_value[]){x, b->rows}, 1, &axis);
}

/* ---- attention ----------------------------------------------------------------------------- */

/* q [B,H,S,D], k and v [B,Hk,S,D] -> [B,S,H*D] */
static dw_value attention(builder *b, dw_value q, dw_value k, dw_value v) {
    const dw_model_config *c = b->config;
    bool drops = b->options->dropout && c->attention_dropout > 0.0;
    double scale = c->scale_by_width ? 1.0 / sqrt((double)c->sizes.head_dim) : 1.0;
    if (c->scale_by_layer) scale /= b->layer + 1;
    dw_attr attrs[5] = {dw_attr_float(DW_ATTR_KEY_SCALE, scale),
                        dw_attr_int(DW_ATTR_KEY_CAUSAL, 1)};
    uint32_t count = 2;
    if (c->sliding[b->layer]) attrs[count++] = dw_attr_int(DW_ATTR_KEY_WINDOW, c->window);
    if (drops) {
        attrs[count++] = dw_attr_float(DW_ATTR_KEY_P, c->attention_dropout);
        attrs[count++] = dw_attr_int(DW_ATTR_KEY_STREAM, b->stream++);
    }
    dw_value inputs[] = {q, k, v, DW_NONE, drops ? b->seed : DW_NONE};
    dw_value o = b->options->cached ? attention_with_cache(b, q, k, v, count, attrs)
                                    : dw__emit(&b->e, DW_OP_ATTENTION, 5, inputs, count, attrs);
    return dw__emit_reshape(
        &b->e, swap_heads(b, o), 3,
        (dw_dim[]){b->batch, b->length, (dw_dim)c->sizes.heads * c->sizes.head_dim});
}

/* ---- GPT-2 --------------------------------------------------------------------------------- */

static dw_value gpt2_head(builder *b, dw_value qkv, int which) {
    dw_dim width = b->config->sizes.hidden;
    dw_value part = dw__emit_slice(&b->e, qkv, 2, which * width, (which + 1) * width);
    return swap_heads(b, split_heads(b, part, b->config->sizes.heads));
}

static dw_value gpt2_layer(builder *b, dw_value x) {
    const dw_model_config *c = b->config;
    dw_value y = layer_norm(b, "ln_1", x);
    y = linear(b, "attn.c_attn", DW_REGION_ATTN, y, true, false);
    at(b, DW_REGION_ATTN, "attn");
    y = attention(b, gpt2_head(b, y, 0), gpt2_head(b, y, 1), gpt2_head(b, y, 2));
    y = linear(b, "attn.c_proj", DW_REGION_ATTN, y, true, false);
    y = dropout(b, y, c->residual_dropout, DW_REGION_ATTN, "attn.resid_dropout");
    at(b, DW_REGION_NONE, "");
    x = dw__emit_binary(&b->e, DW_OP_ADD, y, x);
    y = layer_norm(b, "ln_2", x);
    y = linear(b, "mlp.c_fc", DW_REGION_MLP, y, true, false);
    at(b, DW_REGION_MLP, "mlp.act");
    y = activation(b, y);
    y = linear(b, "mlp.c_proj", DW_REGION_MLP, y, true, false);
    y = dropout(b, y, c->residual_dropout, DW_REGION_MLP, "mlp.dropout");
    at(b, DW_REGION_NONE, "");
    return dw__emit_binary(&b->e, DW_OP_ADD, x, y);
}

static dw_value gpt2_hidden(builder *b) {
    const dw_model_config *c = b->config;
    dw_value x = embedding(b, "transformer.wte", b->ids, -1);
    at(b, DW_REGION_NONE, "transformer");
    dw_value index = dw__emit_iota(&b->e, DW_I64, 1, &b->length, 0);
    if (b->options->cached) /* tokens that only fill a chunk up may lie behind the table */
        index = dw__emit_binary(
            &b->e, DW_OP_MIN, add_position(b, index),
            dw__emit_constant(&b->e, DW_I64, 1, &b->length, (double)(c->sizes.positions - 1)));
    dw_value places = embedding(b, "transformer.wpe", index, -1);
    at(b, DW_REGION_NONE, "transformer");
    places = dw__emit_broadcast_like(&b->e, places, x);
    x = dw__emit_binary(&b->e, DW_OP_ADD, x, places);
    x = dropout(b, x, c->embedding_dropout, DW_REGION_NONE, "transformer.drop");
    for (b->layer = 0; b->layer < c->sizes.layers; b->layer++) x = gpt2_layer(b, x);
    b->layer = -1;
    return layer_norm(b, "transformer.ln_f", wanted_rows(b, x));
}

/* ---- Llama, Qwen3, Mistral ----------------------------------------------------------------- */

static dw_value divide(builder *b, dw_value x, double by) {
    return dw__emit_with_number(&b->e, DW_OP_DIV, x, by);
}

static dw_value compare(builder *b, dw_op op, dw_value x, double with) {
    return dw__emit_with_number(&b->e, op, x, with);
}

/* Llama 3's frequencies: long wavelengths are stretched by `factor`, short ones are kept, and those between
 * are interpolated. As in transformers' modeling_rope_utils.py, each step is rounded to F32. */
static dw_value llama3_frequencies(builder *b, dw_value inverse) {
    const dw__rope *rope = &b->config->rope;
    dw__emitter *e = &b->e;
    double low = rope->low_frequency, high = rope->high_frequency;
    double positions = rope->original_positions;
    dw_value wavelength =
        dw__emit_binary(e, DW_OP_DIV, dw__emit_like(e, inverse, 2.0 * M_PI), inverse);
    dw_value is_long = compare(b, DW_OP_GT, wavelength, positions / low);
    dw_value is_short = compare(b, DW_OP_LT, wavelength, positions / high);
    dw_value kept = dw__emit_select(e, is_long, divide(b, inverse, rope->factor), inverse);
    dw_value turns =
        dw__emit_binary(e, DW_OP_DIV, dw__emit_like(e, wavelength, positions), wavelength);
    dw_value smooth = divide(b, dw__emit_with_number(e, DW_OP_SUB, turns, low), high - low);
    dw_value rest = dw__emit_binary(e, DW_OP_SUB, dw__emit_like(e, smooth, 1.0), smooth);
    dw_value stretched = divide(b, dw__emit_binary(e, DW_OP_MUL, rest, kept), rope->factor);
    dw_value between =
        dw__emit_binary(e, DW_OP_ADD, stretched, dw__emit_binary(e, DW_OP_MUL, smooth, kept));
    dw_value is_end = dw__emit_binary(e, DW_OP_OR, is_long, is_short);
    return dw__emit_select(e, is_end, kept, between);
}

/* 1 / theta^(2i/D), [D/2] F32. The power is computed in F64, so that it is the nearest F32, as in PyTorch. */
static dw_value frequencies(builder *b) {
    const dw_model_config *c = b->config;
    dw__emitter *e = &b->e;
    dw_dim half = c->sizes.head_dim / 2;
    dw_value index = dw__emit_iota(e, DW_F32, 1, &half, 0);
    dw_value exponent =
        divide(b, dw__emit_with_number(e, DW_OP_MUL, index, 2.0), (double)c->sizes.head_dim);
    exponent = dw__emit_cast(e, exponent, DW_F64);
    dw_value power =
        dw__emit_binary(e, DW_OP_POW, dw__emit_like(e, exponent, c->rope.theta), exponent);
    power = dw__emit_cast(e, power, DW_F32);
    dw_value inverse = dw__emit_binary(e, DW_OP_DIV, dw__emit_like(e, power, 1.0), power);
    if (c->rope.type == DW__ROPE_LINEAR) return divide(b, inverse, c->rope.factor);
    if (c->rope.type == DW__ROPE_LLAMA3) return llama3_frequencies(b, inverse);
    return inverse;
}

/* cos and sin of position * frequency. Both halves of a head use the same values. F32 for every model dtype. */
static void rotations(builder *b) {
    dw__emitter *e = &b->e;
    dw_dim half = b->config->sizes.head_dim / 2;
    at(b, DW_REGION_EMBED, "model.rotary_emb");
    dw_value inverse = frequencies(b);
    dw_dim table[] = {b->length, half}, shape[] = {1, 1, b->length, 2 * half};
    dw_value places = dw__emit_iota(e, DW_F32, 2, table, 0);
    if (b->options->cached) places = add_position(b, places);
    dw_value angles =
        dw__emit_binary(e, DW_OP_MUL, places, dw__emit_broadcast(e, inverse, 2, table));
    angles = dw__emit_reshape(e, dw__emit_concat(e, angles, angles, 1), 4, shape);
    b->cos = dw__emit_cast(e, dw__emit_unary(e, DW_OP_COS, angles), b->options->dtype);
    b->sin = dw__emit_cast(e, dw__emit_unary(e, DW_OP_SIN, angles), b->options->dtype);
}

/* Queries or keys of all heads: [B,S,W] -> [B,heads,S,D], normalised (Qwen3) and rotated. */
static dw_value llama_head(builder *b, dw_value x, const char *projection, const char *norm,
                           int64_t heads) {
    const dw_model_config *c = b->config;
    x = linear(b, projection, DW_REGION_ATTN, x, c->attention_bias, true);
    at(b, DW_REGION_ATTN, "self_attn");
    x = split_heads(b, x, heads);
    if (norm && c->family == DW__BUILT_QWEN3) x = rms_norm(b, norm, x);
    at(b, DW_REGION_ATTN, "self_attn");
    x = swap_heads(b, x);
    if (!norm) return x;
    return dw__emit(&b->e, DW_OP_ROPE, 3, (dw_value[]){x, b->cos, b->sin}, 0, NULL);
}

static dw_value llama_mlp(builder *b, dw_value x) {
    bool biased = b->config->mlp_bias;
    dw_value gate = linear(b, "mlp.gate_proj", DW_REGION_MLP, x, biased, true);
    dw_value up = linear(b, "mlp.up_proj", DW_REGION_MLP, x, biased, true);
    at(b, DW_REGION_MLP, "mlp");
    dw_value y = b->config->activation == DW__ACTIVATION_SILU
                     ? dw__emit_binary(&b->e, DW_OP_SWIGLU, gate, up)
                     : dw__emit_binary(&b->e, DW_OP_MUL, activation(b, gate), up);
    return linear(b, "mlp.down_proj", DW_REGION_MLP, y, biased, true);
}

static dw_value llama_layer(builder *b, dw_value x) {
    const dw_model_config *c = b->config;
    dw_value y = rms_norm(b, "input_layernorm", x);
    dw_value q = llama_head(b, y, "self_attn.q_proj", "self_attn.q_norm", c->sizes.heads);
    dw_value k = llama_head(b, y, "self_attn.k_proj", "self_attn.k_norm", c->sizes.kv_heads);
    dw_value v = llama_head(b, y, "self_attn.v_proj", NULL, c->sizes.kv_heads);
    y = attention(b, q, k, v);
    y = linear(b, "self_attn.o_proj", DW_REGION_ATTN, y, c->attention_bias, true);
    at(b, DW_REGION_NONE, "");
    x = dw__emit_binary(&b->e, DW_OP_ADD, x, y);
    y = llama_mlp(b, rms_norm(b, "post_attention_layernorm", x));
    at(b, DW_REGION_NONE, "");
    return dw__emit_binary(&b->e, DW_OP_ADD, x, y);
}

static dw_value llama_hidden(builder *b) {
    dw_value x = embedding(b, "model.embed_tokens", b->ids, b->config->padding_index);
    rotations(b);
    for (b->layer = 0; b->layer < b->config->sizes.layers; b->layer++) x = llama_layer(b, x);
    b->layer = -1;
    return rms_norm(b, "model.norm", wanted_rows(b, x));
}

/* ---- head ---------------------------------------------------------------------------------- */

/* Targets [B*S]: the label at t + 1 for position t and none for the last position, or the labels unchanged. */
static dw_value targets(builder *b) {
    dw_value labels = b->labels;
    dw__emitter *e = &b->e;
    if (!b->options->labels_moved) {
        dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_LOW, 2, (dw_dim[]){0, 0}),
                           dw_attr_list(DW_ATTR_KEY_HIGH, 2, (dw_dim[]){0, 1}),
                           dw_attr_float(DW_ATTR_KEY_VALUE, IGNORED_LABEL)};
        labels = dw__emit(e, DW_OP_PAD, 1, &labels, DW_COUNT(attrs), attrs);
        labels = dw__emit_slice(e, labels, 1, 1, dw__emit_dim_add(e, b->length, 1));
    }
    dw_dim all = dw__emit_dim_mul(e, b->batch, b->length);
    return dw__emit_reshape(e, labels, 1, &all);
}

static dw_value head(builder *b, dw_value hidden) {
    const dw_model_config *c = b->config;
    const char *embedded =
        c->family == DW__BUILT_GPT2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
    dw_value weight = parameter(b, c->sizes.tied ? embedded : "lm_head.weight");
    dw__emitter *e = &b->e;
    at(b, DW_REGION_HEAD, "lm_head");
    if (b->options->output == DW_MODEL_LOGITS) {
        dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, 1);
        return dw__emit(e, DW_OP_LINEAR, 3, (dw_value[]){hidden, weight, DW_NONE}, 1, &attr);
    }
    dw_dim rows[] = {dw__emit_dim_mul(e, b->batch, b->length), c->sizes.hidden};
    hidden = dw__emit_reshape(e, hidden, 2, rows);
    at(b, DW_REGION_LOSS, "");
    dw_value inputs[] = {hidden, weight, DW_NONE, targets(b)};
    dw_attr attrs[] = {dw_attr_string(DW_ATTR_KEY_REDUCTION, "mean"),
                       dw_attr_int(DW_ATTR_KEY_IGNORE_INDEX, IGNORED_LABEL)};
    return dw__emit(e, DW_OP_LINEAR_CROSS_ENTROPY, 4, inputs, DW_COUNT(attrs), attrs);
}

/* ---- whole --------------------------------------------------------------------------------- */

static bool has_dropout(const dw_model_config *config) {
    dw_model_info info;
    dw_model_describe(config, &info);
    return info.dropout;
}

static dw_status add_cache_leaves(builder *b) {
    dw_graph *graph = b->e.graph;
    const dw_model_sizes *m = &b->config->sizes;
    dw_dim one = 1, shape[] = {b->capacity, b->batch, m->kv_heads, m->head_dim};
    DW_RETURN_IF_FAILED(
        dw_graph_leaf(graph, DW_ROLE_INPUT, "position", DW_I64, 1, &one, &b->position));
    DW_RETURN_IF_FAILED(
        dw_graph_leaf(graph, DW_ROLE_INPUT, "rows", DW_I64, 1, &b->row_count, &b->rows));
    for (int layer = 0; layer < m->layers; layer++) {
        static const char *const names[] = {"key", "value"};
        for (int which = 0; which < 2; which++) {
            char name[64];
            dw_value leaf;
            snprintf(name, sizeof name, "cache.%d.%s", layer, names[which]);
            DW_RETURN_IF_FAILED(
                dw_graph_leaf(graph, DW_ROLE_INPUT, name, b->options->dtype, 4, shape, &leaf));
        }
    }
    return DW_OK;
}

static dw_status add_leaves(builder *b) {
    dw_graph *graph = b->e.graph;
    const dw_model_config *c = b->config;
    for (uint32_t i = 0; i < dw_model_parameter_count(c); i++) {
        const dw__parameter *p = &c->parameters.items[i];
        dw_value value;
        DW_RETURN_IF_FAILED(dw_graph_leaf(graph, DW_ROLE_PARAMETER, p->name, b->options->dtype,
                                          p->rank, p->shape, &value));
    }
    dw_dim shape[] = {b->batch, b->length}, pair = 2;
    DW_RETURN_IF_FAILED(
        dw_graph_leaf(graph, DW_ROLE_INPUT, "input_ids", DW_I64, 2, shape, &b->ids));
    if (b->options->output == DW_MODEL_LOSS)
        DW_RETURN_IF_FAILED(
            dw_graph_leaf(graph, DW_ROLE_INPUT, "labels", DW_I64, 2, shape, &b->labels));
    if (b->options->dropout && has_dropout(c))
        DW_RETURN_IF_FAILED(dw_graph_leaf(graph, DW_ROLE_SEED, "seed", DW_I64, 1, &pair, &b->seed));
    return b->options->cached ? add_cache_leaves(b) : DW_OK;
}

static dw_status check_options(const dw_model_config *config,
                               const dw_model_graph_options *options) {
    if (!config) return dw__fail(DW_INVALID_ARGUMENT, "the configuration of a model is NULL");
    if (options->cached && (options->output != DW_MODEL_LOGITS || options->dropout))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "cached is set with %s; expected the logits without dropout",
                        options->dropout ? "dropout" : "another output");
    if (options->output != DW_MODEL_LOGITS && options->output != DW_MODEL_LOSS)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "output is %d; expected DW_MODEL_LOGITS or "
                        "DW_MODEL_LOSS",
                        (int)options->output);
    if (options->dtype != DW_F32 && options->dtype != DW_F64 && options->dtype != DW_BF16)
        return dw__fail(DW_UNSUPPORTED, "dtype is %s; models are built in bf16, f32 or f64",
                        (unsigned)options->dtype < DW_DTYPE_COUNT ? dw_dtype_name(options->dtype)
                                                                  : "none");
    return DW_OK;
}

dw_status dw_model_graph(const dw_model_config *config, const dw_model_graph_options *options,
                         dw_graph **graph) {
    static const dw__struct known = {
        "dw_model_graph_options", sizeof *options, {offsetof(dw_model_graph_options, cached)}};
    dw_model_graph_options given = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    dw_status status = DW_OK;
    if (options) DW_RETURN_IF_FAILED(dw__struct_read(&known, options, &given));
    DW_RETURN_IF_FAILED(check_options(config, &given));
    builder b = {
        .config = config, .options = &given, .labels = DW_NONE, .seed = DW_NONE, .layer = -1};
    DW_TRY(dw_graph_create(&b.e.graph));
    DW_TRY(dw_graph_symbol(b.e.graph, "B", &b.batch));
    DW_TRY(dw_graph_symbol(b.e.graph, "S", &b.length));
    if (given.cached) {
        DW_TRY(dw_graph_symbol(b.e.graph, "C", &b.capacity));
        DW_TRY(dw_graph_symbol(b.e.graph, "R", &b.row_count));
    }
    DW_TRY(add_leaves(&b));
    if (given.cached) masks(&b);
    dw_value hidden = config->family == DW__BUILT_GPT2 ? gpt2_hidden(&b) : llama_hidden(&b);
    dw_value output = head(&b, hidden);
    DW_TRY(b.e.status);
    DW_TRY(dw_graph_add_output(b.e.graph, output));
    DW_TRY(dw_graph_set_origin(b.e.graph, DW_REGION_NONE, -1, NULL));
    *graph = b.e.graph;
    b.e.graph = NULL;
cleanup:
    dw_graph_destroy(b.e.graph);
    return status;
}
