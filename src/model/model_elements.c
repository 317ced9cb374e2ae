/* Counts the parameters of a model from its config.json, including every bias. */
#include "model/model_reader.h"
#include "model/model_sizes.h"
#include <string.h>

static double norm_elements(const dw__reading *r) {
    if (dw__reading_has(r, DW__HAS_NO_NORMS)) return 0;
    return (dw__reading_has(r, DW__HAS_NORM_BIAS) ? 2.0 : 1.0) * r->model->hidden;
}

dw_status dw__attention_elements(const dw__reading *r, double *elements) {
    const dw_model_sizes *m = r->model;
    double d = m->head_dim, h = m->hidden;
    double queries = m->heads * d, both = (m->heads + m->kv_heads) * d;
    double norms = 0;
    bool normed = true, layer_normed = true;
    *elements = dw__attention_parameters(m);
    if (m->kv_rank) {
        *elements += m->q_rank + m->kv_rank; /* norms of the compressed vectors */
        if (r->query_bias) *elements += m->q_rank + m->kv_rank + m->rope_dim;
    } else if (r->query_bias) {
        *elements += queries + 2.0 * m->kv_heads * d;
    }
    if (r->output_bias) *elements += h;
    if (dw__reading_has(r, DW__HAS_CHOICE_OF_NORMS))
        DW_RETURN_IF_FAILED(dw__read_flag(r, "use_qk_norm", false, &normed));
    if (!r->family->built)
        DW_RETURN_IF_FAILED(dw__read_flag(r, "qk_layernorm", true, &layer_normed));
    if (dw__reading_has(r, DW__HAS_HEAD_NORMS)) norms += 2 * d;
    if (dw__reading_has(r, DW__HAS_WIDE_NORMS)) norms += both;
    if (dw__reading_has(r, DW__HAS_NORM_BIAS)) norms *= 2;
    if (normed && layer_normed) *elements += norms;
    if (dw__reading_has(r, DW__HAS_SUB_NORMS)) *elements += queries;
    if (dw__reading_has(r, DW__HAS_OUTPUT_GATE)) *elements += h * queries;
    if (m->kv_rank && dw__json_member(r->json, "index_topk")) {
        int heads, width; /* indexer that selects tokens (DeepSeek-V3.2) */
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("index_n_heads"), 1, DW__SIZE_MOST, -1, &heads));
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("index_head_dim"), 1, DW__SIZE_MOST, -1, &width));
        *elements += (double)(m->q_rank ? m->q_rank : m->hidden) * heads * width + h * width +
                     2.0 * width + h * heads;
    }
    if (dw__reading_has(r, DW__HAS_SINKS)) *elements += m->heads;
    return DW_OK;
}

static double mlp_biases(const dw__reading *r, double width) {
    return (dw__reading_has(r, DW__HAS_GATE) ? 2 : 1) * width + r->model->hidden;
}

/* Counts embeddings, the head, and everything else outside of the layers. */
dw_status dw__count_ends(dw__reading *r) {
    dw_model_sizes *m = r->model;
    double table = dw__embedding_parameters(m), h = m->hidden, rest = 0;
    r->total += table * (m->tied ? 1 : 2) + (double)m->positions * h;
    r->active += table;
    if (dw__reading_has(r, DW__HAS_EMBEDDING_NORM)) rest += norm_elements(r);
    if (dw__reading_has(r, DW__HAS_HEAD_BIAS)) rest += m->vocabulary;
    if (dw__reading_has(r, DW__IS_ENCODER)) {
        int types;
        DW_RETURN_IF_FAILED(
            dw__read_size(r, DW__NAMES("type_vocab_size"), 0, DW__SIZE_MOST, 2, &types));
        r->total += types * h; /* looked up: not active */
        rest += h * h + h + m->vocabulary;
    }
    rest += norm_elements(r); /* the final norm; an encoder's head has one instead */
    r->total += rest, r->active += rest;
    return DW_OK;
}

dw_status dw__count_layers(dw__reading *r, int mixtures) {
    dw_model_sizes *m = r->model;
    double attention, mixer = 0, h = m->hidden;
    int others = 0, norms = r->norms;
    bool post = false, parallel = false;
    DW_RETURN_IF_FAILED(dw__attention_elements(r, &attention));
    if (r->family->mixer) DW_RETURN_IF_FAILED(dw__read_mixers(r, &others, &mixer));
    if (dw__reading_has(r, DW__HAS_POST_NORMS))
        DW_RETURN_IF_FAILED(dw__read_flag(r, "use_post_norm", true, &post));
    if (strcmp(r->family->names, "stablelm") == 0)
        DW_RETURN_IF_FAILED(dw__read_flag(r, "use_parallel_residual", false, &parallel));
    if (post) norms += 2;
    if (parallel) norms = 1;
    int attentions = m->attention_layers ? m->attention_layers : m->layers;
    double dense = dw__dense_mlp_parameters(m) + (r->mlp_bias ? mlp_biases(r, m->ffn) : 0);
    if (dw__reading_has(r, DW__HAS_SUB_NORMS)) dense += m->ffn;
    double both = attentions * attention + others * mixer + m->layers * norms * norm_elements(r) +
                  (m->layers - mixtures) * dense;
    if (!m->experts) {
        r->total += both, r->active += both;
        return DW_OK;
    }
    double expert = dw__expert_parameters(m),
           always = dw__shared_parameters(m) + dw__router_parameters(m);
    if (dw__reading_has(r, DW__HAS_SHARED_GATE) && m->shared_ffn) always += h;
    if (dw__reading_has(r, DW__HAS_ROUTER_BIAS)) always += m->experts;
    if (dw__reading_has(r, DW__HAS_EXPERT_BIAS)) {
        expert += mlp_biases(r, m->expert_ffn);
        always += m->experts;
    }
    r->total += both + mixtures * (always + m->experts * expert);
    r->active += both + mixtures * (always + m->top_k * expert);
    return DW_OK;
}
