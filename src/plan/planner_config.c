/* config.json -> dw_planner_model, for any family with the usual fields. docs/planner-models.md has the rules.
 *
 * The total is counted to the last bias, as transformers' class with a language-model head has it; the widths are what
 * the predictions compute with. */
#include "plan/planner_config.h"
#include "base/json.h"
#include "model/model.h"
#include "plan/planner_internal.h"
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum {
    LAYERS_MOST = 1 << 16,
    SIZE_MOST = 1 << 24,
    VOCABULARY_MOST = 1 << 28,
    NAMES_MOST = 4, /* of one size */
};
static const dw__json_limits config_limits = {32, 1 << 20};

typedef struct reading {
    const json_t *json;
    const dw__planner_family *family;
    dw_planner_model *model;
    int norms; /* of the hidden width, in a layer */
    bool query_bias, output_bias, mlp_bias;
    double total, active; /* elements, as far as they have been counted */
} reading;

static bool has(const reading *r, unsigned what) { return (r->family->has & what) != 0; }

/* ---- fields ---------------------------------------------------------------------------------------------------- */

/* Families have several names for one size: the first that is there. `absent` negative: one must be. */
static dw_status read_size(const reading *r, const char *const *names, int64_t low, int64_t high,
                           int64_t absent, int *value) {
    int64_t read;
    const char *name = names[0];
    for (int at = 0; at < NAMES_MOST && names[at]; at++)
        if (dw__json_member(r->json, names[at])) {
            name = names[at];
            break;
        }
    DW_RETURN_IF_FAILED(dw__json_integer(r->json, name, low, high, absent, &read));
    *value = (int)read;
    return DW_OK;
}
#define NAMES(...) ((const char *const[NAMES_MOST + 1]){__VA_ARGS__})

static dw_status read_flag(const reading *r, const char *name, bool absent, bool *value) {
    return dw__json_flag(r->json, name, absent, value);
}

/* "+": yes; "field"; "+field": yes where it is absent. */
static dw_status read_bias(const reading *r, const char *rule, bool *value) {
    *value = rule && rule[0] == '+';
    if (!rule || strcmp(rule, "+") == 0) return DW_OK;
    return read_flag(r, rule + *value, *value, value);
}

static dw_status read_family(reading *r) {
    const char *type = NULL;
    DW_RETURN_IF_FAILED(dw__json_text(r->json, "model_type", &type));
    r->family = type ? dw__planner_family_named(type) : NULL;
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
                            "layers are not planned; give the widths with dw_planner_model",
                            type ? type : "", others[at]);
    r->family = &dw__planner_family_unknown;
    dw__log(DW_LOG_WARNING,
            "model_type \"%.64s\" is not known: counted as Llama's (three matrices in an MLP, two "
            "norms in a layer, biases where attention_bias and mlp_bias say so)",
            type ? type : "");
    return DW_OK;
}

/* ---- widths ---------------------------------------------------------------------------------------------------- */

static dw_status read_key_value_heads(reading *r) {
    dw_planner_model *m = r->model;
    bool one = false, all_kinds = true;
    if (has(r, DW__HAS_MULTI_QUERY | DW__IS_FALCON))
        DW_RETURN_IF_FAILED(read_flag(r, "multi_query", true, &one));
    if (has(r, DW__IS_FALCON)) {
        bool parallel;
        DW_RETURN_IF_FAILED(read_flag(r, "new_decoder_architecture", false, &all_kinds));
        DW_RETURN_IF_FAILED(read_flag(r, "parallel_attn", true, &parallel));
        int count = 0;
        DW_RETURN_IF_FAILED(
            read_size(r, NAMES("num_ln_in_parallel_attn"), 1, 2, all_kinds ? 2 : 1, &count));
        r->norms = parallel ? count : 2;
        if (all_kinds) one = false;
    }
    m->kv_heads = one ? 1 : m->heads;
    if (one || !all_kinds) return DW_OK;
    return read_size(r, NAMES("num_key_value_heads", "num_kv_heads"), 1, SIZE_MOST, m->heads,
                     &m->kv_heads);
}

static dw_status read_attention(reading *r) {
    dw_planner_model *m = r->model;
    DW_RETURN_IF_FAILED(read_size(r, NAMES("num_attention_heads", "n_head", "n_heads", "num_heads"),
                                  1, SIZE_MOST, -1, &m->heads));
    DW_RETURN_IF_FAILED(read_key_value_heads(r));
    if (m->heads % m->kv_heads)
        return dw__fail(DW_PARSE,
                        "num_attention_heads is %d and num_key_value_heads is %d; expected a "
                        "multiple",
                        m->heads, m->kv_heads);
    if (dw__json_member(r->json, "kv_lora_rank")) {
        m->kv_heads = m->heads;
        DW_RETURN_IF_FAILED(read_size(r, NAMES("kv_lora_rank"), 1, SIZE_MOST, -1, &m->kv_rank));
        DW_RETURN_IF_FAILED(read_size(r, NAMES("q_lora_rank"), 1, SIZE_MOST, 0, &m->q_rank));
        DW_RETURN_IF_FAILED(
            read_size(r, NAMES("qk_nope_head_dim"), 1, SIZE_MOST, -1, &m->head_dim));
        DW_RETURN_IF_FAILED(
            read_size(r, NAMES("qk_rope_head_dim"), 1, SIZE_MOST, -1, &m->rope_dim));
        return read_size(r, NAMES("v_head_dim"), 1, SIZE_MOST, -1, &m->value_dim);
    }
    DW_RETURN_IF_FAILED(read_size(r, NAMES("head_dim", "attention_head_dim", "kv_channels"), 1,
                                  SIZE_MOST, 0, &m->head_dim));
    if (m->head_dim) return DW_OK;
    if (m->hidden % m->heads)
        return dw__fail(DW_PARSE,
                        "hidden_size is %d and num_attention_heads is %d; expected a multiple, or "
                        "head_dim",
                        m->hidden, m->heads);
    m->head_dim = m->hidden / m->heads;
    return DW_OK;
}

/* Which layers see a window only: layer_types, or the family's habit. */
static dw_status read_window(reading *r) {
    dw_planner_model *m = r->model;
    const json_t *types = dw__json_member(r->json, "layer_types");
    bool used = has(r, DW__HAS_WINDOW);
    int first = 0, every = r->family->full_every;
    if (has(r, DW__HAS_WINDOW | DW__HAS_WINDOW_IF_USED))
        DW_RETURN_IF_FAILED(read_flag(r, "use_sliding_window", used, &used));
    int sliding = 0, chunked = 0;
    if (types && !json_is_array(types))
        return dw__json_wrong_kind("layer_types", types, "an array");
    for (size_t at = 0; at < json_array_size(types); at++) {
        const char *type = json_string_value(json_array_get(types, at));
        if (!type)
            return dw__json_wrong_kind("an entry of layer_types", json_array_get(types, at),
                                       "a string");
        if (strcmp(type, "sliding_attention") == 0)
            sliding++;
        else if (strcmp(type, "chunked_attention") == 0)
            chunked++;
        else if (strcmp(type, "full_attention") != 0)
            return dw__fail(DW_UNSUPPORTED,
                            "layer_types has \"%.32s\"; layers of full_attention, "
                            "sliding_attention and chunked_attention are planned",
                            type);
    }
    if (chunked) { /* a token sees half a chunk in the mean */
        int chunk;
        DW_RETURN_IF_FAILED(read_size(r, NAMES("attention_chunk_size"), 2, INT_MAX, -1, &chunk));
        m->window = chunk / 2, m->window_layers = chunked;
    } else if (used) {
        DW_RETURN_IF_FAILED(read_size(r, NAMES("sliding_window"), 0, INT_MAX, 0, &m->window));
        DW_RETURN_IF_FAILED(read_size(r, NAMES("sliding_window_pattern", "_sliding_window_pattern"),
                                      1, LAYERS_MOST, every, &every));
        DW_RETURN_IF_FAILED(read_size(r, NAMES("max_window_layers"), 0, LAYERS_MOST, 0, &first));
        m->window_layers = m->layers - (every ? m->layers / every : 0) - first;
        if (types) m->window_layers = sliding;
    }
    if (m->window > 1 << 28) m->window = 1 << 28; /* none that any sequence reaches */
    if (m->window_layers < 1) m->window = 0;
    if (!m->window || m->window_layers < 1) m->window_layers = 0;
    if (m->window_layers > m->layers) m->window_layers = m->layers;
    m->window_every = m->window ? 1 : 0;
    return DW_OK;
}

/* ---- experts --------------------------------------------------------------------------------------------------- */

/* How many layers are mixtures, and how many of the first are not. */
static dw_status read_mixtures(const reading *r, int *mixtures) {
    dw_planner_model *m = r->model;
    const json_t *kinds = dw__json_member(r->json, "mlp_layer_types"),
                 *dense = dw__json_member(r->json, "mlp_only_layers");
    int every;
    m->moe_every = 1;
    if (kinds) { /* "dense" or "sparse" of each */
        if (!json_is_array(kinds)) return dw__json_wrong_kind("mlp_layer_types", kinds, "an array");
        *mixtures = 0;
        for (size_t at = 0; at < json_array_size(kinds); at++) {
            const char *kind = json_string_value(json_array_get(kinds, at));
            *mixtures += kind && strcmp(kind, "sparse") == 0;
        }
        if (*mixtures > m->layers) *mixtures = m->layers;
        m->dense_layers = m->layers - *mixtures;
        return DW_OK;
    }
    DW_RETURN_IF_FAILED(
        read_size(r, NAMES("first_k_dense_replace"), 0, LAYERS_MOST, 0, &m->dense_layers));
    DW_RETURN_IF_FAILED(
        read_size(r, NAMES("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq"), 1,
                  LAYERS_MOST, 1, &every));
    if (dense && !json_is_array(dense))
        return dw__json_wrong_kind("mlp_only_layers", dense, "an array");
    size_t only = json_array_size(dense);
    if (m->dense_layers > m->layers) m->dense_layers = m->layers;
    if (only > (size_t)(m->layers - m->dense_layers)) only = (size_t)(m->layers - m->dense_layers);
    m->dense_layers += (int)only;
    m->moe_every = every;
    *mixtures = dw__moe_layers(m);
    return DW_OK;
}

static dw_status read_experts(reading *r, int *mixtures) {
    dw_planner_model *m = r->model;
    int shared = 0;
    *mixtures = 0;
    DW_RETURN_IF_FAILED(read_size(r, NAMES("num_experts", "num_local_experts", "n_routed_experts"),
                                  0, SIZE_MOST, 0, &m->experts));
    if (m->experts < 2 && !dw__json_member(r->json, "moe_intermediate_size")) m->experts = 0;
    if (!m->experts) return DW_OK;
    DW_RETURN_IF_FAILED(read_size(
        r, NAMES("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k"),
        1, m->experts, -1, &m->top_k));
    DW_RETURN_IF_FAILED(read_size(r, NAMES("moe_intermediate_size", "intermediate_size"), 1,
                                  SIZE_MOST, -1, &m->expert_ffn));
    DW_RETURN_IF_FAILED(read_size(r, NAMES("n_shared_experts", "num_shared_experts"), 0, SIZE_MOST,
                                  has(r, DW__HAS_SHARED_EXPERT), &shared));
    int64_t width = (int64_t)shared * m->expert_ffn;
    if (width > SIZE_MOST)
        return dw__fail(DW_PARSE,
                        "n_shared_experts is %d, each %d wide; expected at most %d in all", shared,
                        m->expert_ffn, SIZE_MOST);
    DW_RETURN_IF_FAILED(
        read_size(r,
                  NAMES("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                        "shared_intermediate_size"),
                  0, SIZE_MOST, width, &m->shared_ffn));
    return has(r, DW__IS_HYBRID) ? DW_OK : read_mixtures(r, mixtures);
}

static dw_status read_mlp(reading *r) {
    dw_planner_model *m = r->model;
    int64_t absent = has(r, DW__HAS_WIDE_MLP) ? INT64_C(4) * m->hidden : -1;
    if (m->experts && m->dense_layers == 0 && m->moe_every == 1) absent = m->expert_ffn;
    if (dw__json_member(r->json, "intermediate_size_mlp")) /* beside the experts' width */
        return read_size(r, NAMES("intermediate_size_mlp"), 1, VOCABULARY_MOST, -1, &m->ffn);
    if (has(r, DW__IS_FALCON))
        return read_size(r, NAMES("ffn_hidden_size"), 1, VOCABULARY_MOST, absent, &m->ffn);
    return read_size(r, NAMES("intermediate_size", "n_inner", "ffn_dim"), 1, VOCABULARY_MOST,
                     absent, &m->ffn);
}

/* ---- counting -------------------------------------------------------------------------------------------------- */

static double norm_elements(const reading *r) {
    if (has(r, DW__HAS_NO_NORMS)) return 0;
    return (has(r, DW__HAS_NORM_BIAS) ? 2.0 : 1.0) * r->model->hidden;
}

static dw_status attention_elements(const reading *r, double *elements) {
    const dw_planner_model *m = r->model;
    double d = m->head_dim, h = m->hidden;
    double queries = m->heads * d, both = (m->heads + m->kv_heads) * d;
    bool normed = true;
    *elements = dw__attention_parameters(m);
    if (m->kv_rank) {
        *elements += m->q_rank + m->kv_rank; /* norms of what is compressed */
        if (r->query_bias) *elements += m->q_rank + m->kv_rank + m->rope_dim;
    } else if (r->query_bias) {
        *elements += queries + 2.0 * m->kv_heads * d;
    }
    if (r->output_bias) *elements += h;
    if (has(r, DW__HAS_CHOICE_OF_NORMS))
        DW_RETURN_IF_FAILED(read_flag(r, "use_qk_norm", false, &normed));
    if (normed && has(r, DW__HAS_HEAD_NORMS)) *elements += 2 * d;
    if (normed && has(r, DW__HAS_WIDE_NORMS)) *elements += both;
    if (has(r, DW__HAS_SINKS)) *elements += m->heads;
    return DW_OK;
}

static double mlp_biases(const reading *r, double width) {
    return (has(r, DW__HAS_GATE) ? 2 : 1) * width + r->model->hidden;
}

/* Tables, what stands before and after the layers, and the head. */
static dw_status count_ends(reading *r) {
    dw_planner_model *m = r->model;
    double table = dw__embedding_parameters(m), h = m->hidden, rest = 0;
    r->total += table * (m->tied ? 1 : 2) + (double)m->positions * h;
    r->active += table;
    if (has(r, DW__HAS_EMBEDDING_NORM)) rest += norm_elements(r);
    if (has(r, DW__HAS_HEAD_BIAS)) rest += m->vocabulary;
    if (has(r, DW__IS_ENCODER)) {
        int types;
        DW_RETURN_IF_FAILED(read_size(r, NAMES("type_vocab_size"), 0, SIZE_MOST, 2, &types));
        rest += types * h + h * h + h + m->vocabulary;
    }
    rest += norm_elements(r); /* the last one; an encoder's head has one */
    r->total += rest, r->active += rest;
    return DW_OK;
}

static dw_status count_layers(reading *r, int mixtures) {
    const dw_planner_model *m = r->model;
    double attention, h = m->hidden;
    DW_RETURN_IF_FAILED(attention_elements(r, &attention));
    double both = m->layers * (attention + r->norms * norm_elements(r));
    both += (m->layers - mixtures) *
            (dw__dense_mlp_parameters(m) + (r->mlp_bias ? mlp_biases(r, m->ffn) : 0));
    if (!m->experts) {
        r->total += both, r->active += both;
        return DW_OK;
    }
    double expert = dw__expert_parameters(m),
           always = dw__shared_parameters(m) + dw__router_parameters(m);
    if (has(r, DW__HAS_SHARED_GATE) && m->shared_ffn) always += h;
    if (has(r, DW__HAS_EXPERT_BIAS)) {
        expert += mlp_biases(r, m->expert_ffn);
        always += m->experts;
    }
    r->total += both + mixtures * (always + m->experts * expert);
    r->active += both + mixtures * (always + m->top_k * expert);
    return DW_OK;
}

/* ---- Nemotron-H: one kind of block in a layer ------------------------------------------------------------------- */

typedef struct blocks {
    int attention, mlp, experts, mamba;
} blocks;

static dw_status count_block(const char *kind, blocks *count) {
    static const struct {
        const char *letter, *names[3];
        size_t at;
    } kinds[] = {
        {"*", {"attention", "full_attention"}, offsetof(blocks, attention)},
        {"-", {"mlp"}, offsetof(blocks, mlp)},
        {"E", {"moe"}, offsetof(blocks, experts)},
        {"M", {"mamba", "linear_attention", "mamba2"}, offsetof(blocks, mamba)},
    };
    for (size_t i = 0; i < DW_COUNT(kinds); i++) {
        bool is = strcmp(kinds[i].letter, kind) == 0;
        for (int name = 0; name < 3 && kinds[i].names[name]; name++)
            is |= strcmp(kinds[i].names[name], kind) == 0;
        if (!is) continue;
        ++*(int *)((char *)count + kinds[i].at);
        return DW_OK;
    }
    return dw__fail(DW_UNSUPPORTED,
                    "a layer is \"%.32s\"; attention (*), mlp (-), moe (E) and mamba (M) are "
                    "planned",
                    kind);
}

static dw_status read_blocks(const reading *r, blocks *count) {
    const json_t *list = dw__json_member(r->json, "layers_block_type");
    const char *pattern = NULL;
    *count = (blocks){0};
    if (!list) list = dw__json_member(r->json, "layer_types");
    if (list) {
        if (!json_is_array(list)) return dw__json_wrong_kind("layers_block_type", list, "an array");
        for (size_t at = 0; at < json_array_size(list); at++) {
            const char *kind = json_string_value(json_array_get(list, at));
            if (!kind)
                return dw__json_wrong_kind("an entry of layers_block_type",
                                           json_array_get(list, at), "a string");
            DW_RETURN_IF_FAILED(count_block(kind, count));
        }
        return DW_OK;
    }
    DW_RETURN_IF_FAILED(dw__json_text(r->json, "hybrid_override_pattern", &pattern));
    if (!pattern)
        return dw__json_wrong_kind("hybrid_override_pattern", NULL,
                                   "a letter for each layer, or layers_block_type");
    for (; *pattern; pattern++) DW_RETURN_IF_FAILED(count_block((char[2]){*pattern, 0}, count));
    return DW_OK;
}

/* Mamba-2 (Dao and Gu 2024): one product in, a short convolution, a scan, a norm, one product out. */
static dw_status mamba_elements(const reading *r, double *elements) {
    int heads, width, groups, state, kernel;
    bool bias, convolution_bias;
    DW_RETURN_IF_FAILED(read_size(r, NAMES("mamba_num_heads"), 1, SIZE_MOST, -1, &heads));
    DW_RETURN_IF_FAILED(read_size(r, NAMES("mamba_head_dim"), 1, SIZE_MOST, -1, &width));
    DW_RETURN_IF_FAILED(
        read_size(r, NAMES("n_groups", "mamba_n_groups"), 1, SIZE_MOST, 8, &groups));
    DW_RETURN_IF_FAILED(read_size(r, NAMES("ssm_state_size"), 1, SIZE_MOST, -1, &state));
    DW_RETURN_IF_FAILED(
        read_size(r, NAMES("conv_kernel", "mamba_d_conv"), 1, SIZE_MOST, 4, &kernel));
    DW_RETURN_IF_FAILED(read_flag(r, "use_bias", false, &bias));
    DW_RETURN_IF_FAILED(read_flag(r, "use_conv_bias", true, &convolution_bias));
    double h = r->model->hidden, inner = (double)heads * width;
    double mixed = inner + 2.0 * groups * state, in = inner + mixed + heads;
    *elements = h * in + mixed * (kernel + convolution_bias) + 3.0 * heads + inner + inner * h;
    if (bias) *elements += in + h;
    return DW_OK;
}

static dw_status read_hybrid(reading *r) {
    dw_planner_model *m = r->model;
    blocks count;
    int latent = 0, unused;
    double mamba = 0, attention;
    DW_RETURN_IF_FAILED(read_blocks(r, &count));
    m->layers = count.attention + count.mlp + count.experts + count.mamba;
    if (m->layers < 1 || m->layers > LAYERS_MOST)
        return dw__fail(DW_PARSE, "hybrid_override_pattern has %d layers; expected 1 to %d",
                        m->layers, LAYERS_MOST);
    DW_RETURN_IF_FAILED(read_attention(r));
    m->attention_layers = count.attention ? count.attention : 1;
    if (count.experts) {
        DW_RETURN_IF_FAILED(read_experts(r, &unused));
        if (!m->experts)
            return dw__json_wrong_kind("n_routed_experts",
                                       dw__json_member(r->json, "n_routed_experts"),
                                       "their number, for layers that are experts");
        m->moe_every = (int)((double)m->layers / count.experts + 0.5);
        DW_RETURN_IF_FAILED(read_size(r, NAMES("moe_latent_size"), 1, SIZE_MOST, 0, &latent));
    }
    DW_RETURN_IF_FAILED(read_size(r, NAMES("intermediate_size"), 1, SIZE_MOST,
                                  count.mlp ? -1 : m->expert_ffn, &m->ffn));
    if (!m->ffn) m->ffn = m->hidden; /* no MLP at all: Mamba's products stand for them */
    DW_RETURN_IF_FAILED(attention_elements(r, &attention));
    if (count.mamba) DW_RETURN_IF_FAILED(mamba_elements(r, &mamba));
    double h = m->hidden, expert = dw__expert_parameters(m);
    double always = dw__shared_parameters(m) + dw__router_parameters(m);
    if (latent) { /* experts work on a projection */
        expert = expert / h * latent;
        always += 2 * h * latent;
    }
    double rest = m->layers * h + count.attention * attention +
                  count.mlp * (dw__dense_mlp_parameters(m) + (r->mlp_bias ? m->ffn + h : 0)) +
                  count.mamba * mamba;
    r->total += rest + count.experts * (always + m->experts * expert);
    r->active += rest + count.experts * (always + m->top_k * expert);
    return DW_OK;
}

/* ---- the whole ------------------------------------------------------------------------------------------------- */

static dw_status read_ordinary(reading *r) {
    dw_planner_model *m = r->model;
    int mixtures;
    DW_RETURN_IF_FAILED(read_size(r,
                                  NAMES("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
                                  1, LAYERS_MOST, -1, &m->layers));
    DW_RETURN_IF_FAILED(read_attention(r));
    DW_RETURN_IF_FAILED(read_window(r));
    DW_RETURN_IF_FAILED(read_experts(r, &mixtures));
    DW_RETURN_IF_FAILED(read_mlp(r));
    return count_layers(r, mixtures);
}

static dw_status read_config(reading *r) {
    dw_planner_model *m = r->model;
    bool encoder_decoder, bidirectional;
    if (!json_is_object(r->json)) return dw__json_wrong_kind("it", r->json, "an object");
    const json_t *text = dw__json_member(r->json, "text_config");
    if (json_is_object(text)) {
        r->json = text;
        dw__log(DW_LOG_WARNING, "text_config is planned; other parts of the model are not");
    }
    DW_RETURN_IF_FAILED(read_flag(r, "is_encoder_decoder", false, &encoder_decoder));
    if (encoder_decoder)
        return dw__fail(DW_UNSUPPORTED,
                        "is_encoder_decoder is true: models of an encoder and a decoder are not "
                        "planned; models of one stack of layers are");
    DW_RETURN_IF_FAILED(read_family(r));
    bidirectional = has(r, DW__IS_ENCODER);
    if (bidirectional)
        dw__log(DW_LOG_WARNING, "attention is counted as causal; an encoder's does twice as much");
    *m = (dw_planner_model){.gated = has(r, DW__HAS_GATE)};
    r->norms = r->family->norms;
    bool tied = has(r, DW__HAS_TIED_HEAD);
    DW_RETURN_IF_FAILED(read_flag(r, "tie_word_embeddings", tied, &tied));
    m->tied = tied;
    DW_RETURN_IF_FAILED(read_size(r, NAMES("vocab_size"), 1, VOCABULARY_MOST, -1, &m->vocabulary));
    DW_RETURN_IF_FAILED(read_size(r, NAMES("hidden_size", "n_embd", "d_model", "n_embed"), 1,
                                  SIZE_MOST, -1, &m->hidden));
    if (has(r, DW__IS_OPT)) {
        int width;
        DW_RETURN_IF_FAILED(
            read_size(r, NAMES("word_embed_proj_dim"), 1, SIZE_MOST, m->hidden, &width));
        if (width != m->hidden)
            return dw__fail(DW_UNSUPPORTED,
                            "word_embed_proj_dim is %d and hidden_size is %d; a table of another "
                            "width than the layers is not planned",
                            width, m->hidden);
    }
    if (has(r, DW__HAS_POSITIONS)) {
        DW_RETURN_IF_FAILED(read_size(r, NAMES("max_position_embeddings", "n_positions"), 1,
                                      SIZE_MOST, -1, &m->positions));
        if (has(r, DW__IS_OPT)) m->positions += 2; /* that no token has */
    }
    DW_RETURN_IF_FAILED(read_bias(r, r->family->query_bias, &r->query_bias));
    DW_RETURN_IF_FAILED(read_bias(r, r->family->output_bias, &r->output_bias));
    DW_RETURN_IF_FAILED(read_bias(r, r->family->mlp_bias, &r->mlp_bias));
    DW_RETURN_IF_FAILED(has(r, DW__IS_HYBRID) ? read_hybrid(r) : read_ordinary(r));
    DW_RETURN_IF_FAILED(count_ends(r));
    m->parameters = r->total;
    m->active = r->active;
    dw_status status = dw_planner_model_check(m);
    return status == DW_OK ? DW_OK : DW_PARSE; /* its message says which */
}

dw_status dw_planner_model_parse(const char *json, size_t bytes, dw_planner_model *model) {
    json_t *root = NULL;
    dw_planner_model made;
    if (!json || !model) return dw__fail(DW_INVALID_ARGUMENT, "a configuration is NULL");
    DW_RETURN_IF_FAILED(dw__json_parse("config.json", json, bytes, config_limits, &root));
    reading r = {.json = root, .model = &made};
    dw_status status = read_config(&r);
    json_decref(root);
    if (status == DW_OK) *model = made;
    return status == DW_OK || status == DW_OUT_OF_MEMORY ? status
                                                         : dw__fail_prefix(status, "config.json");
}

dw_status dw_planner_model_load(const char *path, dw_planner_model *model) {
    char file[PATH_MAX], *text = NULL;
    size_t bytes = 0;
    if (!path || !model) return dw__fail(DW_INVALID_ARGUMENT, "the path of a model is NULL");
    DW_RETURN_IF_FAILED(dw__model_config_read(path, file, &text, &bytes));
    dw_status status = dw_planner_model_parse(text, bytes, model);
    dw__free(text);
    return status == DW_OK || status == DW_OUT_OF_MEMORY ? status
                                                         : dw__fail_prefix(status, "\"%s\"", file);
}

dw_status dw_planner_model_find(const char *path_or_name, dw_planner_model *model) {
    struct stat info;
    if (!path_or_name || !model) return dw__fail(DW_INVALID_ARGUMENT, "a model's name is NULL");
    if (stat(path_or_name, &info) == 0) return dw_planner_model_load(path_or_name, model);
    return dw_planner_model_named(path_or_name, model);
}
