/* The parameters of each family: names, shapes and initialisation, in the order of transformers' modules. */
#include "model/model_internal.h"
#include <string.h>

const dw__built_family dw__built_families[DW__BUILT_COUNT] = {
    [DW__BUILT_GPT2] = {"gpt2",
                        "GPT2LMHeadModel",
                        "GPT2Model",
                        "transformer.",
                        {".attn.bias", ".attn.masked_bias"}},
    [DW__BUILT_LLAMA] =
        {"llama", "LlamaForCausalLM", "LlamaModel", "model.", {".rotary_emb.inv_freq", NULL}},
    [DW__BUILT_QWEN3] =
        {"qwen3", "Qwen3ForCausalLM", "Qwen3Model", "model.", {".rotary_emb.inv_freq", NULL}},
    [DW__BUILT_MISTRAL] =
        {"mistral", "MistralForCausalLM", "MistralModel", "model.", {".rotary_emb.inv_freq", NULL}},
};

enum { ELEMENTS_MOST_BITS = 48 }; /* a quadrillion bytes in F32; a file with more is wrong */

typedef struct lister {
    dw_model_config *config;
    dw_status status;
    int64_t layer; /* -1 outside of the layers */
    int64_t elements;
} lister;

/* Adds a parameter. `columns` 0 makes a vector. */
static void add(lister *l, const char *name, int64_t rows, int64_t columns, dw__initial initial) {
    dw_model_config *config = l->config;
    int64_t count;
    if (l->status != DW_OK) return;
    if (__builtin_mul_overflow(rows, columns ? columns : 1, &count) ||
        __builtin_add_overflow(l->elements, count, &l->elements) ||
        l->elements > INT64_C(1) << ELEMENTS_MOST_BITS) {
        l->status =
            dw__fail(DW_PARSE, "the model would have more than 2^%d weights; check its sizes",
                     ELEMENTS_MOST_BITS);
        return;
    }
    const char *prefix = dw__built_families[config->family].prefix;
    dw__parameter made = {.rank = columns ? 2 : 1, .shape = {rows, columns}, .initial = initial};
    if (l->layer < 0)
        made.name = dw__arena_printf(config->arena, "%s", name);
    else
        made.name = dw__arena_printf(config->arena, "%s%s.%lld.%s", prefix,
                                     config->family == DW__BUILT_GPT2 ? "h" : "layers",
                                     (long long)l->layer, name);
    l->status = made.name ? DW_PUSH(&config->parameters, made)
                          : dw__fail_memory("the name of a parameter", strlen(name) + 1);
}

static void list_gpt2_layer(lister *l) {
    const int64_t h = l->config->sizes.hidden, ffn = l->config->sizes.ffn;
    add(l, "ln_1.weight", h, 0, DW__INITIAL_ONES);
    add(l, "ln_1.bias", h, 0, DW__INITIAL_ZEROS);
    add(l, "attn.c_attn.weight", h, 3 * h, DW__INITIAL_NORMAL);
    add(l, "attn.c_attn.bias", 3 * h, 0, DW__INITIAL_ZEROS);
    add(l, "attn.c_proj.weight", h, h, DW__INITIAL_RESIDUAL);
    add(l, "attn.c_proj.bias", h, 0, DW__INITIAL_ZEROS);
    add(l, "ln_2.weight", h, 0, DW__INITIAL_ONES);
    add(l, "ln_2.bias", h, 0, DW__INITIAL_ZEROS);
    add(l, "mlp.c_fc.weight", h, ffn, DW__INITIAL_NORMAL);
    add(l, "mlp.c_fc.bias", ffn, 0, DW__INITIAL_ZEROS);
    add(l, "mlp.c_proj.weight", ffn, h, DW__INITIAL_RESIDUAL);
    add(l, "mlp.c_proj.bias", h, 0, DW__INITIAL_ZEROS);
}

static void add_linear(lister *l, const char *weight, const char *bias, int64_t out, int64_t in,
                       bool biased) {
    add(l, weight, out, in, DW__INITIAL_NORMAL);
    if (biased) add(l, bias, out, 0, DW__INITIAL_ZEROS);
}

static void list_llama_layer(lister *l) {
    const dw_model_config *c = l->config;
    const int64_t h = c->sizes.hidden, ffn = c->sizes.ffn, d = c->sizes.head_dim;
    const int64_t queries = c->sizes.heads * d, keys = c->sizes.kv_heads * d;
    bool attention = c->attention_bias, mlp = c->mlp_bias;
    add_linear(l, "self_attn.q_proj.weight", "self_attn.q_proj.bias", queries, h, attention);
    add_linear(l, "self_attn.k_proj.weight", "self_attn.k_proj.bias", keys, h, attention);
    add_linear(l, "self_attn.v_proj.weight", "self_attn.v_proj.bias", keys, h, attention);
    add_linear(l, "self_attn.o_proj.weight", "self_attn.o_proj.bias", h, queries, attention);
    if (c->family == DW__BUILT_QWEN3) {
        add(l, "self_attn.q_norm.weight", d, 0, DW__INITIAL_ONES);
        add(l, "self_attn.k_norm.weight", d, 0, DW__INITIAL_ONES);
    }
    add_linear(l, "mlp.gate_proj.weight", "mlp.gate_proj.bias", ffn, h, mlp);
    add_linear(l, "mlp.up_proj.weight", "mlp.up_proj.bias", ffn, h, mlp);
    add_linear(l, "mlp.down_proj.weight", "mlp.down_proj.bias", h, ffn, mlp);
    add(l, "input_layernorm.weight", h, 0, DW__INITIAL_ONES);
    add(l, "post_attention_layernorm.weight", h, 0, DW__INITIAL_ONES);
}

dw_status dw__model_list_parameters(dw_model_config *config) {
    lister l = {config, DW_OK, -1, 0};
    const dw_model_sizes *m = &config->sizes;
    bool gpt2 = config->family == DW__BUILT_GPT2;
    add(&l, gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight", m->vocabulary, m->hidden,
        DW__INITIAL_NORMAL);
    if (gpt2) add(&l, "transformer.wpe.weight", m->positions, m->hidden, DW__INITIAL_NORMAL);
    for (l.layer = 0; l.layer < m->layers; l.layer++)
        if (gpt2)
            list_gpt2_layer(&l);
        else
            list_llama_layer(&l);
    l.layer = -1;
    add(&l, gpt2 ? "transformer.ln_f.weight" : "model.norm.weight", m->hidden, 0, DW__INITIAL_ONES);
    if (gpt2) add(&l, "transformer.ln_f.bias", m->hidden, 0, DW__INITIAL_ZEROS);
    if (!m->tied) add(&l, "lm_head.weight", m->vocabulary, m->hidden, DW__INITIAL_NORMAL);
    return l.status;
}

uint32_t dw_model_parameter_count(const dw_model_config *config) {
    return (uint32_t)config->parameters.count;
}

void dw_model_parameter_at(const dw_model_config *config, uint32_t index,
                           dw_model_parameter *parameter) {
    const dw__parameter *from = &config->parameters.items[index];
    *parameter = (dw_model_parameter){.name = from->name, .rank = from->rank, .count = 1};
    for (int axis = 0; axis < from->rank; axis++) {
        parameter->shape[axis] = from->shape[axis];
        parameter->count *= from->shape[axis];
    }
    parameter->decay = from->rank == 2;
}
