/* Sizes of the families whose class Deepwell builds, read as that class of transformers reads them: its fields under
 * its names, with its defaults. Fields that the class does not read are ignored. */
#include "model/model_internal.h"
#include "model/model_reader.h"
#include <string.h>

/* Sizes of absent fields. */
static const struct {
    int ffn, vocabulary, positions, kv_heads; /* kv_heads 0: as many as heads */
    int head_dim;                             /* 0: hidden / heads */
} defaults[DW__BUILT_COUNT] = {
    [DW__BUILT_LLAMA] = {11008, 32000, 2048, 0, 0},
    [DW__BUILT_QWEN3] = {22016, 151936, 32768, 32, 128},
    [DW__BUILT_MISTRAL] = {14336, 32000, 131072, 8, 0},
};

static dw__built_kind kind_of(const dw__reading *r) {
    return (dw__built_kind)(r->family->built - dw__built_families);
}

static dw_status size(const dw__reading *r, const char *name, int64_t high, int64_t absent,
                      int *value) {
    int64_t read;
    DW_RETURN_IF_FAILED(dw__json_integer(r->json, name, 1, high, absent, &read));
    *value = (int)read;
    return DW_OK;
}

/* GPT-2's fields have two names each. Both are read and must agree. */
static dw_status size_either(const dw__reading *r, const char *name, const char *other,
                             int64_t high, int64_t absent, int *value) {
    int second;
    if (!dw__json_member(r->json, name)) return size(r, other, high, absent, value);
    DW_RETURN_IF_FAILED(size(r, name, high, absent, value));
    DW_RETURN_IF_FAILED(size(r, other, high, *value, &second));
    if (second == *value) return DW_OK;
    return dw__fail(DW_PARSE, "%s is %d and %s is %d; expected the same value under both names",
                    name, *value, other, second);
}

/* ---- windows ----------------------------------------------------------------------------------------------------- */

dw_status dw__layer_slides(const dw__reading *r, int layer, bool *sliding) {
    const json_t *types = dw__json_member(r->json, "layer_types");
    *sliding = r->window > 0 && layer >= r->first_window;
    if (!types) return DW_OK;
    const json_t *entry = json_array_get(types, (size_t)layer);
    const char *type = json_string_value(entry);
    if (!type) return dw__json_wrong_kind("an entry of layer_types", entry, "a string");
    bool slides = strcmp(type, "sliding_attention") == 0;
    if (!slides && strcmp(type, "full_attention") != 0)
        return dw__fail(DW_UNSUPPORTED,
                        "layer_types has \"%.64s\"; Deepwell builds full_attention and "
                        "sliding_attention",
                        dw__json_is_plain(type) ? type : "?");
    if (slides && r->window == 0)
        return dw__fail(DW_PARSE,
                        "layer_types has sliding_attention for layer %d, and there is no "
                        "sliding_window",
                        layer);
    if (kind_of(r) != DW__BUILT_QWEN3 && slides != *sliding)
        return dw__fail(DW_UNSUPPORTED,
                        "layer_types has \"%s\" for layer %d, which transformers' %s does not "
                        "support; leave the field out, or use the model_type that does",
                        type, layer, r->family->built->architecture);
    *sliding = slides;
    return DW_OK;
}

/* Reads the window and which layers have it: by the class's rule the layers from `first_window` on. */
static dw_status read_windows(dw__reading *r) {
    dw_model_sizes *m = r->model;
    const json_t *types = dw__json_member(r->json, "layer_types");
    bool windows = kind_of(r) == DW__BUILT_MISTRAL;
    if (kind_of(r) == DW__BUILT_QWEN3) {
        DW_RETURN_IF_FAILED(dw__json_flag(r->json, "use_sliding_window", false, &windows));
        DW_RETURN_IF_FAILED(
            dw__json_integer(r->json, "max_window_layers", 0, DW__SIZE_MOST, 28, &r->first_window));
    }
    if (windows) {
        bool given = json_object_get(r->json, "sliding_window") != NULL; /* null: no window */
        DW_RETURN_IF_FAILED(dw__json_integer(r->json, "sliding_window", 1, INT64_C(1) << 40,
                                             given ? 0 : 4096, &r->window));
    }
    if (types && !json_is_array(types))
        return dw__json_wrong_kind("layer_types", types, "an array");
    if (types && json_array_size(types) != (size_t)m->layers)
        return dw__fail(DW_PARSE,
                        "layer_types has %zu entries; expected one for each of the %d layers",
                        json_array_size(types), m->layers);
    for (int layer = 0; layer < m->layers; layer++) {
        bool sliding;
        DW_RETURN_IF_FAILED(dw__layer_slides(r, layer, &sliding));
        m->window_layers += sliding;
    }
    if (m->window_layers) dw__set_window(m, r->window);
    return DW_OK;
}

/* ---- classes ------------------------------------------------------------------------------------------------------ */

static dw_status read_gpt2(dw__reading *r) {
    dw_model_sizes *m = r->model;
    DW_RETURN_IF_FAILED(size_either(r, "n_embd", "hidden_size", DW__SIZE_MOST, 768, &m->hidden));
    DW_RETURN_IF_FAILED(
        size_either(r, "n_layer", "num_hidden_layers", DW__LAYERS_MOST, 12, &m->layers));
    DW_RETURN_IF_FAILED(
        size_either(r, "n_head", "num_attention_heads", DW__SIZE_MOST, 12, &m->heads));
    DW_RETURN_IF_FAILED(size_either(r, "n_positions", "max_position_embeddings",
                                    DW__VOCABULARY_MOST, 1024, &m->positions));
    DW_RETURN_IF_FAILED(size(r, "vocab_size", DW__VOCABULARY_MOST, 50257, &m->vocabulary));
    DW_RETURN_IF_FAILED(size(r, "n_inner", DW__SIZE_MOST, INT64_C(4) * m->hidden, &m->ffn));
    if (m->hidden % m->heads != 0)
        return dw__fail(DW_PARSE, "n_embd is %d and n_head is %d; expected a multiple", m->hidden,
                        m->heads);
    m->kv_heads = m->heads;
    m->head_dim = m->hidden / m->heads;
    r->positions = m->positions;
    return read_windows(r);
}

/* The classes' defaults apply to absent fields only; null has another meaning. */
static dw_status read_llama_heads(dw__reading *r) {
    dw_model_sizes *m = r->model;
    bool heads_given = json_object_get(r->json, "num_key_value_heads") != NULL;
    bool width_given = json_object_get(r->json, "head_dim") != NULL;
    int kv_heads = defaults[kind_of(r)].kv_heads, head_dim = defaults[kind_of(r)].head_dim;
    DW_RETURN_IF_FAILED(size(r, "num_attention_heads", DW__SIZE_MOST, 32, &m->heads));
    DW_RETURN_IF_FAILED(size(r, "num_key_value_heads", DW__SIZE_MOST,
                             heads_given || !kv_heads ? m->heads : kv_heads, &m->kv_heads));
    /* null is rejected where the class has a default, as in transformers */
    DW_RETURN_IF_FAILED(
        size(r, "head_dim", DW__SIZE_MOST, head_dim && width_given ? -1 : head_dim, &m->head_dim));
    if (m->head_dim == 0) {
        if (m->hidden % m->heads != 0)
            return dw__fail(DW_PARSE,
                            "hidden_size is %d and num_attention_heads is %d; expected a multiple, "
                            "or head_dim",
                            m->hidden, m->heads);
        m->head_dim = m->hidden / m->heads;
    }
    DW_RETURN_IF_FAILED(dw__check_heads(m));
    if (m->head_dim % 2 != 0)
        return dw__fail(DW_PARSE, "head_dim is %d; rotary positions need an even number",
                        m->head_dim);
    return DW_OK;
}

static dw_status read_llama(dw__reading *r) {
    dw_model_sizes *m = r->model;
    dw__built_kind kind = kind_of(r);
    DW_RETURN_IF_FAILED(
        size(r, "vocab_size", DW__VOCABULARY_MOST, defaults[kind].vocabulary, &m->vocabulary));
    DW_RETURN_IF_FAILED(size(r, "hidden_size", DW__SIZE_MOST, 4096, &m->hidden));
    DW_RETURN_IF_FAILED(size(r, "num_hidden_layers", DW__LAYERS_MOST, 32, &m->layers));
    DW_RETURN_IF_FAILED(size(r, "intermediate_size", DW__SIZE_MOST, defaults[kind].ffn, &m->ffn));
    DW_RETURN_IF_FAILED(dw__json_integer(r->json, "max_position_embeddings", 1, INT64_C(1) << 40,
                                         defaults[kind].positions, &r->positions));
    DW_RETURN_IF_FAILED(read_llama_heads(r));
    return read_windows(r);
}

dw_status dw__read_class(dw__reading *r) {
    return kind_of(r) == DW__BUILT_GPT2 ? read_gpt2(r) : read_llama(r);
}
