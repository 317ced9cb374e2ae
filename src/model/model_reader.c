/* Reads config.json into dw_model_sizes: any family with the usual fields.
 *
 * The parameter total includes every bias, as the transformers class with a language-model head has it. The
 * predictions compute with the widths. */
#include "model/model_reader.h"
#include "model/model_internal.h"
#include "model/model_sizes.h"
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* ---- fields ---------------------------------------------------------------------------------------------------- */

/* Returns the object that has the field: the configuration itself, or one of the nested objects of DBRX and MPT. */
static const json_t *object_with(const dw__reading *r, const char *name) {
    static const char *const inner[] = {"attn_config", "ffn_config", "linear_attn_config"};
    if (dw__json_member(r->json, name)) return r->json;
    for (size_t at = 0; at < DW_COUNT(inner); at++) {
        const json_t *object = dw__json_member(r->json, inner[at]);
        if (json_is_object(object) && dw__json_member(object, name)) return object;
    }
    return NULL;
}

/* Returns the first entry of a list of numbers if all its entries are equal, else NULL. */
static const json_t *sole_entry(const json_t *list) {
    const json_t *first = json_array_get(list, 0);
    for (size_t at = 0; at < json_array_size(list); at++)
        if (!json_is_integer(json_array_get(list, at)) ||
            json_integer_value(json_array_get(list, at)) != json_integer_value(first))
            return NULL;
    return first;
}

dw_status dw__read_size(const dw__reading *r, const char *const *names, int64_t low, int64_t high,
                        int64_t absent, int *value) {
    int64_t read;
    const char *name = names[0];
    const json_t *object = r->json;
    for (int at = 0; at < DW__NAMES_MOST && names[at]; at++) {
        const json_t *found = object_with(r, names[at]);
        if (!found) continue;
        name = names[at], object = found;
        break;
    }
    const json_t *field = dw__json_member(object, name);
    if (json_is_array(field)) {
        const json_t *entry = sole_entry(field);
        if (!entry)
            return dw__json_wrong_kind(name, field,
                                       "an integer, or a list of equal ones: layers that differ in "
                                       "width are not supported");
        read = json_integer_value(entry);
        if (read < low || read > high)
            return dw__fail(DW_PARSE, "%s has %lld; expected %lld to %lld", name, (long long)read,
                            (long long)low, (long long)high);
    } else {
        DW_RETURN_IF_FAILED(dw__json_integer(object, name, low, high, absent, &read));
    }
    *value = (int)read;
    return DW_OK;
}

dw_status dw__read_flag(const dw__reading *r, const char *name, bool absent, bool *value) {
    return dw__json_flag(r->json, name, absent, value);
}

dw_status dw__read_list(const dw__reading *r, const char *name, const json_t **list) {
    *list = dw__json_member(r->json, name);
    if (!*list) return DW_OK;
    if (!json_is_array(*list)) return dw__json_wrong_kind(name, *list, "an array");
    for (size_t at = 0; at < json_array_size(*list); at++)
        if (!json_is_string(json_array_get(*list, at))) {
            char entry[64];
            snprintf(entry, sizeof entry, "an entry of %s", name);
            return dw__json_wrong_kind(entry, json_array_get(*list, at), "a string");
        }
    return DW_OK;
}

/* Applies a bias rule of dw__model_family. */
static dw_status read_bias(const dw__reading *r, const char *rule, bool *value) {
    *value = rule && rule[0] == '+';
    if (!rule || strcmp(rule, "+") == 0) return DW_OK;
    return dw__read_flag(r, rule + *value, *value, value);
}

static dw_status read_family(dw__reading *r) {
    const char *type = NULL, *why;
    DW_RETURN_IF_FAILED(dw__json_text(r->json, "model_type", &type));
    if (type && (why = dw__model_family_refused(type)))
        return dw__fail(DW_UNSUPPORTED,
                        "model_type is \"%.64s\": %s; give the widths of a similar model as a dict "
                        "of the planner's fields, or with dw_model_sizes",
                        type, why);
    r->family = type ? dw__model_family_named(type) : NULL;
    if (r->family) return DW_OK;
    static const char *const others[] = {"ssm_state_size",
                                         "mamba_d_state",
                                         "mamba_d_ssm",
                                         "state_size",
                                         "linear_attn_config",
                                         "lru_width",
                                         "linear_num_value_heads",
                                         "layers_block_type"};
    for (size_t at = 0; at < DW_COUNT(others); at++)
        if (dw__json_member(r->json, others[at]))
            return dw__fail(DW_UNSUPPORTED,
                            "model_type is \"%.64s\", with %s: its state-space or linear-attention "
                            "layers are not supported; give the widths with dw_model_sizes",
                            type ? type : "", others[at]);
    r->family = &dw__model_family_unknown;
    dw__log(DW_LOG_WARNING,
            "model_type \"%.64s\" is unknown and counted as Llama's: three matrices in an MLP, two "
            "norms in a layer, biases if attention_bias and mlp_bias say so",
            type ? type : "");
    return DW_OK;
}

/* ---- widths ---------------------------------------------------------------------------------------------------- */

static dw_status read_key_value_heads(dw__reading *r) {
    dw_model_sizes *m = r->model;
    bool one = false, all_kinds = true;
    if (dw__reading_has(r, DW__HAS_MULTI_QUERY | DW__IS_FALCON))
        DW_RETURN_IF_FAILED(dw__read_flag(r, "multi_query", true, &one));
    if (dw__reading_has(r, DW__IS_FALCON)) {
        bool parallel;
        DW_RETURN_IF_FAILED(dw__read_flag(r, "new_decoder_architecture", false, &all_kinds));
        DW_RETURN_IF_FAILED(dw__read_flag(r, "parallel_attn", true, &parallel));
        int count = 0;
        DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("num_ln_in_parallel_attn"), 1, 2,
                                          all_kinds ? 2 : 1, &count));
        r->norms = parallel ? count : 2;
        if (all_kinds) one = false;
    }
    m->kv_heads = one ? 1 : m->heads;
    if (one || !all_kinds) return DW_OK;
    return dw__read_size(
        r, DW__NAMES("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num"),
        1, DW__SIZE_MOST, m->heads, &m->kv_heads);
}

dw_status dw__check_heads(const dw_model_sizes *model) {
    if (model->heads % model->kv_heads == 0) return DW_OK;
    return dw__fail(DW_PARSE,
                    "num_attention_heads is %d and num_key_value_heads is %d; expected a multiple",
                    model->heads, model->kv_heads);
}

dw_status dw__read_heads(dw__reading *r) {
    dw_model_sizes *m = r->model;
    DW_RETURN_IF_FAILED(dw__read_size(
        r, DW__NAMES("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 1,
        DW__SIZE_MOST, -1, &m->heads));
    DW_RETURN_IF_FAILED(read_key_value_heads(r));
    DW_RETURN_IF_FAILED(dw__check_heads(m));
    if (dw__json_member(r->json, "kv_lora_rank")) {
        m->kv_heads = m->heads;
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("kv_lora_rank"), 1, DW__SIZE_MOST, -1, &m->kv_rank));
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("q_lora_rank"), 1, DW__SIZE_MOST, 0, &m->q_rank));
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("qk_nope_head_dim"), 1, DW__SIZE_MOST, -1, &m->head_dim));
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("qk_rope_head_dim"), 1, DW__SIZE_MOST, -1, &m->rope_dim));
        return dw__read_size(r, DW__NAMES("v_head_dim"), 1, DW__SIZE_MOST, -1, &m->value_dim);
    }
    DW_RETURN_IF_FAILED(
        dw__read_size(r, DW__NAMES("head_dim", "attention_head_dim", "kv_channels", "dim_head"), 1,
                      DW__SIZE_MOST, 0, &m->head_dim));
    DW_RETURN_IF_FAILED(
        dw__read_size(r, DW__NAMES("v_head_dim"), 1, DW__SIZE_MOST, 0, &m->value_dim));
    if (m->head_dim) {
        if (m->value_dim == m->head_dim) m->value_dim = 0;
        return DW_OK;
    }
    if (m->hidden % m->heads)
        return dw__fail(DW_PARSE,
                        "hidden_size is %d and num_attention_heads is %d; expected a multiple, or "
                        "head_dim",
                        m->hidden, m->heads);
    m->head_dim = m->hidden / m->heads;
    if (m->value_dim == m->head_dim) m->value_dim = 0;
    return DW_OK;
}

/* Counts of layers by attention kind, read from layer_types. */
typedef struct layer_kinds {
    bool listed;
    int full, sliding, chunked, indexed;
} layer_kinds;

static dw_status read_layer_types(const dw__reading *r, layer_kinds *kinds) {
    const json_t *types;
    *kinds = (layer_kinds){0};
    DW_RETURN_IF_FAILED(dw__read_list(r, "layer_types", &types));
    if (!types) return DW_OK;
    kinds->listed = true;
    for (size_t at = 0; at < json_array_size(types) && at < (size_t)r->model->layers; at++) {
        const char *type = json_string_value(json_array_get(types, at));
        if (strcmp(type, "sliding_attention") == 0)
            kinds->sliding++;
        else if (strcmp(type, "chunked_attention") == 0)
            kinds->chunked++;
        else if (strcmp(type, "indexed_attention") == 0)
            kinds->indexed++;
        else if (strcmp(type, "full_attention") == 0 || strcmp(type, "attention") == 0)
            kinds->full++;
        else if (!r->family->mixer)
            return dw__fail(DW_UNSUPPORTED,
                            "layer_types has \"%.32s\"; expected full_attention, "
                            "sliding_attention, chunked_attention or indexed_attention",
                            type);
    }
    return DW_OK;
}

void dw__set_window(dw_model_sizes *model, int64_t window) {
    enum { WINDOW_MOST = 1 << 28 };
    model->window = window > WINDOW_MOST ? WINDOW_MOST : (int)window;
    model->window_every = 1;
}

/* Decides which layers have windowed attention: by layer_types, else by the family's rule. Attention to the best
 * `index_topk` tokens is planned as a window of that length, which costs the same. */
static dw_status read_window(dw__reading *r) {
    dw_model_sizes *m = r->model;
    layer_kinds kinds;
    bool used = dw__reading_has(r, DW__HAS_WINDOW);
    int first = 0, every = r->family->full_every;
    if (dw__reading_has(r, DW__HAS_WINDOW | DW__HAS_WINDOW_IF_USED))
        DW_RETURN_IF_FAILED(dw__read_flag(r, "use_sliding_window", used, &used));
    DW_RETURN_IF_FAILED(read_layer_types(r, &kinds));
    if (m->kv_rank && dw__json_member(r->json, "index_topk") && !kinds.listed)
        kinds.indexed = m->layers;
    if (kinds.indexed) {
        DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("index_topk"), 1, INT_MAX, -1, &m->window));
        m->window_layers = kinds.indexed;
    } else if (kinds.chunked) { /* a token attends to half a chunk on average */
        int chunk;
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("attention_chunk_size"), 2, INT_MAX, -1, &chunk));
        m->window = chunk / 2, m->window_layers = kinds.chunked;
    } else if (used) {
        DW_RETURN_IF_FAILED(dw__read_size(
            r, DW__NAMES("sliding_window", "sliding_window_size", "attention_window_size"), 0,
            INT_MAX, 0, &m->window));
        if (!m->window && strcmp(r->family->names, "gpt_neo") == 0)
            DW_RETURN_IF_FAILED(
                dw__read_size(r, DW__NAMES("window_size"), 0, INT_MAX, 256, &m->window));
        if (kinds.listed) {
            m->window_layers = kinds.sliding;
        } else {
            DW_RETURN_IF_FAILED(
                dw__read_size(r,
                              DW__NAMES("sliding_window_pattern", "_sliding_window_pattern",
                                        "global_attn_every_n_layers"),
                              1, DW__LAYERS_MOST, every, &every));
            DW_RETURN_IF_FAILED(
                dw__read_size(r, DW__NAMES("max_window_layers"), 0, DW__LAYERS_MOST, 0, &first));
            m->window_layers = m->layers - (every ? m->layers / every : 0) - first;
        }
    }
    if (!m->window || m->window_layers < 1) {
        m->window = m->window_layers = 0;
        return DW_OK;
    }
    if (m->window_layers > m->layers) m->window_layers = m->layers;
    dw__set_window(m, m->window);
    return DW_OK;
}

/* ---- experts --------------------------------------------------------------------------------------------------- */

/* A list with one entry per layer; "sparse", "moe" or a positive integer marks a mixture. */
static dw_status read_kinds(const dw__reading *r, const char *name, const json_t *kinds,
                            int *mixtures) {
    dw_model_sizes *m = r->model;
    if (!json_is_array(kinds)) return dw__json_wrong_kind(name, kinds, "an array");
    *mixtures = 0;
    for (size_t at = 0; at < json_array_size(kinds) && at < (size_t)m->layers; at++) {
        const json_t *entry = json_array_get(kinds, at);
        const char *kind = json_string_value(entry);
        *mixtures += kind ? strcmp(kind, "sparse") == 0 || strcmp(kind, "moe") == 0
                          : json_integer_value(entry) > 0;
    }
    m->dense_layers = m->layers - *mixtures;
    return DW_OK;
}

/* Counts the mixture layers, and the dense layers before them. */
static dw_status read_mixtures(const dw__reading *r, int *mixtures) {
    dw_model_sizes *m = r->model;
    const json_t *kinds = dw__json_member(r->json, "mlp_layer_types"),
                 *often = dw__json_member(r->json, "moe_layer_freq"),
                 *dense = dw__json_member(r->json, "mlp_only_layers");
    int every, offset, last;
    m->moe_every = 1;
    if (kinds) return read_kinds(r, "mlp_layer_types", kinds, mixtures);
    if (json_is_array(often)) return read_kinds(r, "moe_layer_freq", often, mixtures);
    DW_RETURN_IF_FAILED(dw__read_size(
        r, DW__NAMES("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0,
        DW__LAYERS_MOST, 0, &m->dense_layers));
    DW_RETURN_IF_FAILED(
        dw__read_size(r,
                      DW__NAMES("decoder_sparse_step", "interleave_moe_layer_step",
                                "moe_layer_freq", "moe_layer_interval", "expert_layer_period"),
                      1, DW__LAYERS_MOST, 1, &every));
    DW_RETURN_IF_FAILED(
        dw__read_size(r, DW__NAMES("expert_layer_offset"), 0, DW__LAYERS_MOST, 0, &offset));
    DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("moe_layer_end_index"), -1, DW__LAYERS_MOST,
                                      m->layers - 1, &last));
    if (dense && !json_is_array(dense))
        return dw__json_wrong_kind("mlp_only_layers", dense, "an array");
    m->moe_every = every;
    /* every n-th layer, starting at the offset */
    if (dw__json_member(r->json, "expert_layer_period")) {
        int count = offset < m->layers ? (m->layers - offset - 1) / every + 1 : 0;
        if (m->layers % every || offset >= every)
            m->dense_layers = m->layers - count, m->moe_every = 1;
        *mixtures = count;
        return DW_OK;
    }
    if (last >= 0 && last < m->layers - 1) m->dense_layers += m->layers - 1 - last;
    size_t only = json_array_size(dense);
    if (m->dense_layers > m->layers) m->dense_layers = m->layers;
    if (only > (size_t)(m->layers - m->dense_layers)) only = (size_t)(m->layers - m->dense_layers);
    m->dense_layers += (int)only;
    *mixtures = dw__moe_layers(m);
    return DW_OK;
}

dw_status dw__read_experts(dw__reading *r, int *mixtures) {
    dw_model_sizes *m = r->model;
    int shared = 0;
    *mixtures = 0;
    DW_RETURN_IF_FAILED(dw__read_size(
        r, DW__NAMES("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 0,
        DW__SIZE_MOST, 0, &m->experts));
    if (m->experts < 2 && !dw__json_member(r->json, "moe_intermediate_size")) m->experts = 0;
    if (!m->experts) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__read_size(r,
                      DW__NAMES("num_experts_per_tok", "num_experts_per_token", "experts_per_token",
                                "moe_top_k", "moe_topk", "moe_k"),
                      1, m->experts, -1, &m->top_k));
    DW_RETURN_IF_FAILED(
        dw__read_size(r, DW__NAMES("moe_intermediate_size", "ffn_hidden_size", "intermediate_size"),
                      1, DW__SIZE_MOST, -1, &m->expert_ffn));
    DW_RETURN_IF_FAILED(dw__read_size(r,
                                      DW__NAMES("n_shared_experts", "num_shared_experts",
                                                "moe_num_shared_experts", "num_shared_expert"),
                                      0, DW__SIZE_MOST, dw__reading_has(r, DW__HAS_SHARED_EXPERT),
                                      &shared));
    m->expert_bias = dw__reading_has(r, DW__HAS_EXPERT_BIAS);
    int64_t width = (int64_t)shared * m->expert_ffn;
    if (width > DW__SIZE_MOST)
        return dw__fail(DW_PARSE,
                        "n_shared_experts is %d, each %d wide; expected at most %d in all", shared,
                        m->expert_ffn, DW__SIZE_MOST);
    DW_RETURN_IF_FAILED(
        dw__read_size(r,
                      DW__NAMES("shared_expert_intermediate_size",
                                "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
                      0, DW__SIZE_MOST, width, &m->shared_ffn));
    return dw__reading_has(r, DW__IS_BLOCKS) ? DW_OK : read_mixtures(r, mixtures);
}

static dw_status read_mlp(dw__reading *r) {
    dw_model_sizes *m = r->model;
    int64_t absent = dw__reading_has(r, DW__HAS_WIDE_MLP) ? INT64_C(4) * m->hidden : -1;
    if (m->experts && m->dense_layers == 0 && m->moe_every == 1) absent = m->expert_ffn;
    if (dw__reading_has(r, DW__HAS_SHARED_MLP) && !m->experts)
        return dw__read_size(r, DW__NAMES("shared_intermediate_size", "intermediate_size"), 1,
                             DW__SIZE_MOST, -1, &m->ffn);
    if (dw__reading_has(r, DW__IS_FALCON))
        return dw__read_size(r, DW__NAMES("ffn_hidden_size"), 1, DW__SIZE_MOST, absent, &m->ffn);
    static const char *const beside[] = {"intermediate_size_mlp", "dense_intermediate_size"};
    /* width of dense MLPs where intermediate_size is the experts' */
    for (size_t at = 0; at < DW_COUNT(beside); at++)
        if (dw__json_member(r->json, beside[at]))
            return dw__read_size(r, DW__NAMES(beside[at]), 1, DW__SIZE_MOST, -1, &m->ffn);
    DW_RETURN_IF_FAILED(dw__read_size(
        r, DW__NAMES("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff", "dim_ff"),
        1, DW__SIZE_MOST, absent, &m->ffn));
    if (dw__reading_has(r, DW__HAS_HALF_MLP)) m->ffn = (m->ffn + 1) / 2;
    bool adjusted = dw__reading_has(r, DW__HAS_ADJUSTED_MLP);
    DW_RETURN_IF_FAILED(dw__read_flag(r, "block_auto_adjust_ff_dim", adjusted, &adjusted));
    if (!adjusted || !dw__reading_has(r, DW__HAS_ADJUSTED_MLP)) return DW_OK;
    double multiplier;
    int multiple;
    DW_RETURN_IF_FAILED(
        dw__json_number(r->json, "block_ffn_dim_multiplier", 1e-3, 1e3, 1, &multiplier));
    DW_RETURN_IF_FAILED(
        dw__read_size(r, DW__NAMES("block_multiple_of"), 1, DW__SIZE_MOST, 256, &multiple));
    double width = floor(multiplier * floor(2.0 * m->ffn / 3));
    width = ceil(width / multiple) * multiple;
    if (!(width >= 1 && width <= DW__SIZE_MOST))
        return dw__fail(DW_PARSE, "intermediate_size becomes %.0f; expected 1 to %d", width,
                        DW__SIZE_MOST);
    m->ffn = (int)width;
    return DW_OK;
}

/* ---- the whole ------------------------------------------------------------------------------------------------- */

/* The widths that every family has, by their usual names. */
static dw_status read_usual(dw__reading *r) {
    dw_model_sizes *m = r->model;
    DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("padded_vocab_size", "vocab_size"), 1,
                                      DW__VOCABULARY_MOST, -1, &m->vocabulary));
    DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("hidden_size", "n_embd", "d_model", "n_embed"),
                                      1, DW__SIZE_MOST, -1, &m->hidden));
    if (dw__reading_has(r, DW__IS_OPT)) {
        int width = 0;
        DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("word_embed_proj_dim"), 1, DW__SIZE_MOST,
                                          m->hidden, &width));
        if (width != m->hidden)
            return dw__fail(DW_UNSUPPORTED,
                            "word_embed_proj_dim is %d and hidden_size is %d; an embedding with "
                            "another width than the layers is not supported",
                            width, m->hidden);
    }
    int head = 0; /* rows, of Apertus 1.5: fewer than the embedding's if they are pruned */
    DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("output_vocab_size"), 1, DW__VOCABULARY_MOST,
                                      m->vocabulary, &head));
    if (head != m->vocabulary)
        return dw__fail(DW_UNSUPPORTED,
                        "output_vocab_size is %d and vocab_size is %d; a head with fewer rows than "
                        "the embedding is not supported; set output_vocab_size to null to plan for "
                        "a whole head",
                        head, m->vocabulary);
    if (!dw__reading_has(r, DW__HAS_POSITIONS)) return DW_OK;
    DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("max_position_embeddings", "n_positions"), 1,
                                      DW__VOCABULARY_MOST - 2, -1, &m->positions));
    if (dw__reading_has(r, DW__IS_OPT)) m->positions += 2; /* two rows that no position uses */
    return DW_OK;
}

static dw_status read_layers(dw__reading *r, int *mixtures) {
    dw_model_sizes *m = r->model;
    DW_RETURN_IF_FAILED(
        dw__read_size(r, DW__NAMES("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1,
                      DW__LAYERS_MOST, -1, &m->layers));
    DW_RETURN_IF_FAILED(dw__read_heads(r));
    DW_RETURN_IF_FAILED(read_window(r));
    DW_RETURN_IF_FAILED(dw__read_experts(r, mixtures));
    return read_mlp(r);
}

/* Uses the language model's part of a model with others, unless the class of the whole is known not to have one. */
static void enter_text(dw__reading *r) {
    const json_t *text = dw__json_member(r->json, "text_config");
    const char *type = json_string_value(dw__json_member(r->json, "model_type"));
    const dw__model_family *family = type ? dw__model_family_named(type) : NULL;
    if (!json_is_object(text) || (family && family->built)) return;
    r->json = text;
    dw__log(DW_LOG_WARNING, "only text_config is planned, not the other parts of the model");
}

dw_status dw__read_sizes(dw__reading *r) {
    dw_model_sizes *m = r->model;
    bool encoder_decoder;
    int mixtures = 0;
    enter_text(r);
    DW_RETURN_IF_FAILED(dw__read_flag(r, "is_encoder_decoder", false, &encoder_decoder));
    if (encoder_decoder)
        return dw__fail(DW_UNSUPPORTED,
                        "is_encoder_decoder is true: models with an encoder and a decoder are not "
                        "supported; models with one stack of layers are");
    DW_RETURN_IF_FAILED(read_family(r));
    if (dw__reading_has(r, DW__IS_ENCODER))
        dw__log(DW_LOG_WARNING,
                "attention is counted as causal; an encoder's attention does twice the work");
    *m = (dw_model_sizes){.gated = dw__reading_has(r, DW__HAS_GATE)};
    r->norms = r->family->norms;
    bool tied = dw__reading_has(r, DW__HAS_TIED_HEAD);
    DW_RETURN_IF_FAILED(dw__read_flag(r, "tie_word_embeddings", tied, &tied));
    m->tied = tied;
    DW_RETURN_IF_FAILED(r->family->built ? dw__read_class(r) : read_usual(r));
    DW_RETURN_IF_FAILED(read_bias(r, r->family->query_bias, &r->query_bias));
    DW_RETURN_IF_FAILED(read_bias(r, r->family->output_bias, &r->output_bias));
    DW_RETURN_IF_FAILED(read_bias(r, r->family->mlp_bias, &r->mlp_bias));
    if (dw__reading_has(r, DW__IS_BLOCKS)) {
        DW_RETURN_IF_FAILED(dw__read_blocks(r));
    } else {
        if (!r->family->built) DW_RETURN_IF_FAILED(read_layers(r, &mixtures));
        DW_RETURN_IF_FAILED(dw__count_layers(r, mixtures));
    }
    DW_RETURN_IF_FAILED(dw__count_ends(r));
    m->parameters = r->total;
    m->active = r->active;
    dw_status status = dw_model_sizes_check(m);
    return status == DW_OK ? DW_OK : DW_PARSE; /* the message names the field */
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

dw_status dw__config_parse(const char *text, size_t bytes, json_t **root) {
    static const dw__json_limits limits = {32, 1 << 20};
    DW_RETURN_IF_FAILED(dw__json_parse("config.json", text, bytes, limits, root));
    if (json_is_object(*root)) return DW_OK;
    dw_status status = dw__json_wrong_kind("it", *root, "an object");
    json_decref(*root);
    *root = NULL;
    return dw__fail_prefix(status, "config.json");
}

dw_status dw_model_sizes_parse(const char *json, size_t bytes, dw_model_sizes *model) {
    json_t *root = NULL;
    dw_model_sizes made;
    if (!json || !model)
        return dw__fail(DW_INVALID_ARGUMENT, "the configuration or the model is NULL");
    DW_RETURN_IF_FAILED(dw__config_parse(json, bytes, &root));
    dw__reading r = {.json = root, .model = &made};
    dw_status status = dw__read_sizes(&r);
    json_decref(root);
    if (status == DW_OK) *model = made;
    return status == DW_OK || status == DW_OUT_OF_MEMORY ? status
                                                         : dw__fail_prefix(status, "config.json");
}

dw_status dw_model_sizes_load(const char *path, dw_model_sizes *model) {
    char file[PATH_MAX], *text = NULL;
    size_t bytes = 0;
    if (!path || !model) return dw__fail(DW_INVALID_ARGUMENT, "the path or the model is NULL");
    DW_RETURN_IF_FAILED(dw__model_config_read(path, file, &text, &bytes));
    dw_status status = dw_model_sizes_parse(text, bytes, model);
    dw__free(text);
    return status == DW_OK || status == DW_OUT_OF_MEMORY ? status
                                                         : dw__fail_prefix(status, "\"%s\"", file);
}

dw_status dw_model_sizes_find(const char *path_or_name, dw_model_sizes *model) {
    struct stat info;
    if (!path_or_name || !model)
        return dw__fail(DW_INVALID_ARGUMENT, "the model's name or the model is NULL");
    if (stat(path_or_name, &info) == 0) return dw_model_sizes_load(path_or_name, model);
    return dw_model_sizes_named(path_or_name, model);
}
