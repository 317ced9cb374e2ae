/* Sequence mixers other than attention: which layers have them, and their parameters.
 *
 * Their GEMMs are part of the stated totals `parameters` and `active`. A prediction scales the work of linear layers
 * to these totals, and counts attention in `attention_layers` only. The scans, which are linear in the sequence
 * length, are not counted. */
#include "model/model_reader.h"
#include "model/model_sizes.h"
#include <string.h>

/* ---- elements of one -------------------------------------------------------------------------------------------- */

static dw_status size(const dw__reading *r, const char *const *names, int64_t absent, int *value) {
    return dw__read_size(r, names, 1, DW__SIZE_MOST, absent, value);
}

/* Mamba-2: input projection, short convolution, scan, norm, output projection. */
static dw_status mamba2(const dw__reading *r, double *elements) {
    int heads, width, groups, state, kernel;
    bool bias, convolution_bias, normed = true,
                                 beside = r->family->mixer == DW__MIXER_MAMBA2_BESIDE;
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("mamba_num_heads", "mamba_n_heads"), -1, &heads));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("mamba_head_dim", "mamba_d_head"), -1, &width));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("n_groups", "mamba_n_groups"),
                             dw__reading_has(r, DW__IS_BLOCKS) ? 8 : 1, &groups));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("ssm_state_size", "mamba_d_state"), -1, &state));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("conv_kernel", "mamba_d_conv"), 4, &kernel));
    bool blocks = dw__reading_has(r, DW__IS_BLOCKS);
    DW_RETURN_IF_FAILED(dw__read_flag(r, blocks ? "use_bias" : "mamba_proj_bias", false, &bias));
    DW_RETURN_IF_FAILED(
        dw__read_flag(r, blocks ? "use_conv_bias" : "mamba_conv_bias", true, &convolution_bias));
    if (beside) DW_RETURN_IF_FAILED(dw__read_flag(r, "mamba_rms_norm", false, &normed));
    double h = r->model->hidden, inner = (double)heads * width;
    double mixed = inner + 2.0 * groups * state, in = inner + mixed + heads;
    *elements = h * in + mixed * (kernel + convolution_bias) + 3.0 * heads + (normed ? inner : 0) +
                inner * h;
    if (bias) *elements += in + h;
    return DW_OK;
}

static dw_status mamba(const dw__reading *r, double *elements) {
    int expand, state, kernel, rank, up;
    bool bias, convolution_bias;
    up = (r->model->hidden + 15) / 16;
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("mamba_expand"), 2, &expand));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("mamba_d_state"), 16, &state));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("mamba_d_conv"), 4, &kernel));
    rank = up; /* "auto" */
    if (!json_is_string(dw__json_member(r->json, "mamba_dt_rank")))
        DW_RETURN_IF_FAILED(size(r, DW__NAMES("mamba_dt_rank"), up, &rank));
    DW_RETURN_IF_FAILED(dw__read_flag(r, "mamba_proj_bias", false, &bias));
    DW_RETURN_IF_FAILED(dw__read_flag(r, "mamba_conv_bias", true, &convolution_bias));
    double h = r->model->hidden, inner = h * expand, mixed = rank + 2.0 * state;
    *elements = 3 * h * inner + inner * (kernel + convolution_bias) + inner * mixed + mixed +
                (rank + 1.0) * inner + inner * (state + 1.0);
    if (bias) *elements += 2 * inner + h;
    return DW_OK;
}

/* Gated delta rule: queries, keys, values and a gate; two numbers per head; convolution; norm; output projection. */
static dw_status delta(const dw__reading *r, double *elements) {
    int keys, values, key_width, value_width, kernel;
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("linear_num_key_heads"), -1, &keys));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("linear_num_value_heads"), -1, &values));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("linear_key_head_dim"), -1, &key_width));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("linear_value_head_dim"), -1, &value_width));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("linear_conv_kernel_dim"), 4, &kernel));
    double h = r->model->hidden, key = (double)keys * key_width,
           value = (double)values * value_width;
    *elements = h * (2 * key + 2 * value + 2.0 * values) + kernel * (2 * key + value) +
                2.0 * values + value_width + value * h;
    return DW_OK;
}

/* The same with a decay for every element of a head. Decay and gate come from low-rank projections. */
static dw_status delta_wide(const dw__reading *r, double *elements) {
    int heads, width, kernel;
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("linear_num_heads", "num_heads"), -1, &heads));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("linear_head_dim", "head_dim"), -1, &width));
    DW_RETURN_IF_FAILED(
        size(r, DW__NAMES("linear_conv_kernel_dim", "short_conv_kernel_size"), 4, &kernel));
    double h = r->model->hidden, all = (double)heads * width;
    *elements = 4 * h * all + kernel * 3 * all + 2 * (h * width + width * all) + all + heads +
                h * heads + width;
    return DW_OK;
}

static dw_status convolution(const dw__reading *r, double *elements) {
    int kernel;
    bool bias;
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("conv_L_cache"), 3, &kernel));
    DW_RETURN_IF_FAILED(dw__read_flag(r, "conv_bias", false, &bias));
    double h = r->model->hidden;
    *elements = 4 * h * h + h * kernel + (bias ? 5 * h : 0);
    return DW_OK;
}

static dw_status lightning(const dw__reading *r, double *elements) {
    double h = r->model->hidden, all = (double)r->model->heads * r->model->head_dim;
    *elements = 5 * h * all + all;
    return DW_OK;
}

static dw_status recurrent(const dw__reading *r, double *elements) {
    int width, kernel;
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("lru_width"), r->model->hidden, &width));
    DW_RETURN_IF_FAILED(size(r, DW__NAMES("conv1d_width"), 4, &kernel));
    double h = r->model->hidden, w = width;
    *elements = 3 * h * w + 2 * w + h + w * (kernel + 1.0) + w + 2 * (w * w / r->model->heads + w);
    return DW_OK;
}

static dw_status mixer_elements(const dw__reading *r, double *elements) {
    *elements = 0;
    switch (r->family->mixer) {
    case DW__MIXER_MAMBA2:
    case DW__MIXER_MAMBA2_BESIDE: return mamba2(r, elements);
    case DW__MIXER_MAMBA: return mamba(r, elements);
    case DW__MIXER_DELTA: return delta(r, elements);
    case DW__MIXER_DELTA_WIDE: return delta_wide(r, elements);
    case DW__MIXER_CONVOLUTION: return convolution(r, elements);
    case DW__MIXER_LIGHTNING: return lightning(r, elements);
    case DW__MIXER_RECURRENT: return recurrent(r, elements);
    case DW__MIXER_NONE: break;
    }
    return DW_OK;
}

/* ---- which layers ----------------------------------------------------------------------------------------------- */

/* Reads a list of layer kinds, which is repeated up to the number of layers if it is shorter and `repeated` is set. */
static dw_status count_kinds(const dw__reading *r, const char *name, bool repeated,
                             int *attentions) {
    const json_t *list;
    DW_RETURN_IF_FAILED(dw__read_list(r, name, &list));
    size_t count = json_array_size(list), layers = (size_t)r->model->layers;
    if (count < layers && !(repeated && count))
        return dw__fail(DW_PARSE, "%s has %zu entries; expected one for each of %zu layers", name,
                        count, layers);
    *attentions = 0;
    for (size_t at = 0; at < layers; at++) {
        const char *kind = json_string_value(json_array_get(list, at % count));
        static const char *const others[] = {"linear_attention", "mamba", "conv", "recurrent"};
        bool other = false;
        for (size_t i = 0; i < DW_COUNT(others); i++) other |= strcmp(kind, others[i]) == 0;
        if (!other && !strstr(kind, "attention"))
            return dw__fail(DW_UNSUPPORTED,
                            "%s has \"%.32s\"; expected attention, full_attention, "
                            "linear_attention, mamba, conv or recurrent",
                            name, kind);
        *attentions += !other;
    }
    return DW_OK;
}

/* Counts attention layers: the entries of a list of layer numbers, or the ones in a list of flags. */
static int count_numbers(const dw__reading *r, const json_t *list, bool flags) {
    int count = 0;
    for (size_t at = 0; at < json_array_size(list); at++) {
        const json_t *entry = json_array_get(list, at);
        if (!json_is_integer(entry)) continue;
        count +=
            flags ? json_integer_value(entry) == 1
                  : json_integer_value(entry) >= 0 && json_integer_value(entry) <= r->model->layers;
    }
    return count < r->model->layers ? count : r->model->layers;
}

static dw_status read_attentions(const dw__reading *r, int *attentions) {
    const dw_model_sizes *m = r->model;
    static const struct {
        const char *name;
        bool repeated;
    } kinds[] = {{"layer_types", false}, {"layers_block_type", false}, {"block_types", true}};
    static const struct {
        const char *name;
        bool flags;
    } numbers[] = {{"attn_layer_indices", false},
                   {"full_attn_idxs", false},
                   {"full_attn_layers", false},
                   {"attn_type_list", true}};
    for (size_t at = 0; at < DW_COUNT(kinds); at++)
        if (dw__json_member(r->json, kinds[at].name))
            return count_kinds(r, kinds[at].name, kinds[at].repeated, attentions);
    const json_t *inner = dw__json_member(r->json, "linear_attn_config");
    for (size_t at = 0; at < DW_COUNT(numbers); at++) {
        const json_t *list = dw__json_member(r->json, numbers[at].name);
        if (!list && json_is_object(inner)) list = dw__json_member(inner, numbers[at].name);
        if (!list) continue;
        if (!json_is_array(list)) return dw__json_wrong_kind(numbers[at].name, list, "an array");
        *attentions = count_numbers(r, list, numbers[at].flags);
        return DW_OK;
    }
    int every, offset;
    *attentions = 0;
    /* Bamba without a list has no attention layers */
    if (r->family->mixer == DW__MIXER_MAMBA2) return DW_OK;
    DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("full_attention_interval", "attn_layer_period"),
                                      1, DW__LAYERS_MOST,
                                      r->family->full_every ? r->family->full_every : -1, &every));
    DW_RETURN_IF_FAILED(
        dw__read_size(r, DW__NAMES("attn_layer_offset"), 0, DW__LAYERS_MOST, every - 1, &offset));
    *attentions = offset < m->layers ? (m->layers - offset - 1) / every + 1 : 0;
    return DW_OK;
}

dw_status dw__read_mixers(dw__reading *r, int *others, double *elements) {
    dw_model_sizes *m = r->model;
    int attentions = m->layers;
    *others = m->layers;
    DW_RETURN_IF_FAILED(mixer_elements(r, elements));
    if (r->family->mixer == DW__MIXER_MAMBA2_BESIDE) return DW_OK;
    DW_RETURN_IF_FAILED(read_attentions(r, &attentions));
    *others = m->layers - attentions;
    if (!attentions)
        return dw__fail(
            DW_UNSUPPORTED,
            "none of the %d layers has attention; models without attention are not supported",
            m->layers);
    if (attentions < m->layers) m->attention_layers = attentions;
    /* The window applies to some of the attention layers; window_layers counts a share of all layers. */
    if (m->window && m->attention_layers) {
        double part = m->window_layers < attentions ? (double)m->window_layers / attentions : 1;
        m->window_layers = (int)(part * m->layers + 0.5);
        if (m->window_layers < 1) m->window = m->window_layers = m->window_every = 0;
    }
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

static dw_status read_pattern(const dw__reading *r, blocks *count) {
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
                                   "one letter per layer, or layers_block_type");
    for (; *pattern; pattern++) DW_RETURN_IF_FAILED(count_block((char[2]){*pattern, 0}, count));
    return DW_OK;
}

dw_status dw__read_blocks(dw__reading *r) {
    dw_model_sizes *m = r->model;
    blocks count;
    int latent = 0, unused;
    double mamba = 0, attention;
    DW_RETURN_IF_FAILED(read_pattern(r, &count));
    m->layers = count.attention + count.mlp + count.experts + count.mamba;
    if (m->layers < 1 || m->layers > DW__LAYERS_MOST)
        return dw__fail(DW_PARSE, "hybrid_override_pattern has %d layers; expected 1 to %d",
                        m->layers, DW__LAYERS_MOST);
    DW_RETURN_IF_FAILED(dw__read_heads(r));
    m->attention_layers = count.attention ? count.attention : 1;
    if (count.experts) {
        DW_RETURN_IF_FAILED(dw__read_experts(r, &unused));
        if (!m->experts)
            return dw__json_wrong_kind("n_routed_experts",
                                       dw__json_member(r->json, "n_routed_experts"),
                                       "the number of experts, since some layers have them");
        m->moe_every = (int)((double)m->layers / count.experts + 0.5);
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("moe_latent_size"), 1, DW__SIZE_MOST, 0, &latent));
    }
    DW_RETURN_IF_FAILED(dw__read_size(r, DW__NAMES("intermediate_size"), 1, DW__SIZE_MOST,
                                      count.mlp ? -1 : m->expert_ffn, &m->ffn));
    /* no MLPs: the width is a placeholder, Mamba's GEMMs come from the totals */
    if (!m->ffn) m->ffn = m->hidden;
    DW_RETURN_IF_FAILED(dw__attention_elements(r, &attention));
    if (count.mamba) DW_RETURN_IF_FAILED(mixer_elements(r, &mamba));
    double h = m->hidden, expert = dw__expert_parameters(m);
    double always = dw__shared_parameters(m) + dw__router_parameters(m);
    if (latent) { /* experts work on a projection of the hidden vector */
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
