/* Counts of parameters by a model's sizes, and the check of sizes. */
#include "model/model_sizes.h"

double dw__value_dim(const dw_model_sizes *model) {
    return model->value_dim ? model->value_dim : model->head_dim;
}

double dw__attention_parameters(const dw_model_sizes *model) {
    double h = model->hidden, heads = model->heads, d = model->head_dim, v = dw__value_dim(model);
    if (!model->kv_rank)
        return h * d * (heads + model->kv_heads) + h * v * (heads + model->kv_heads);
    double query = heads * (d + model->rope_dim);
    query = model->q_rank ? model->q_rank * (h + query) : h * query;
    return query + h * (model->kv_rank + model->rope_dim) + model->kv_rank * heads * (d + v) +
           heads * v * h;
}

static double mlp(const dw_model_sizes *model, double width) {
    return (model->gated ? 3.0 : 2.0) * model->hidden * width;
}
double dw__dense_mlp_parameters(const dw_model_sizes *model) { return mlp(model, model->ffn); }
double dw__expert_parameters(const dw_model_sizes *model) { return mlp(model, model->expert_ffn); }
double dw__shared_parameters(const dw_model_sizes *model) { return mlp(model, model->shared_ffn); }
double dw__router_parameters(const dw_model_sizes *model) {
    return (double)model->hidden * model->experts;
}
double dw__embedding_parameters(const dw_model_sizes *model) {
    return (double)model->hidden * model->vocabulary;
}

int dw__moe_layers(const dw_model_sizes *model) {
    if (!model->experts) return 0;
    int rest = model->layers - model->dense_layers;
    return model->moe_every > 1 ? rest / model->moe_every : rest;
}

static double layer_parameters(const dw_model_sizes *model, double experts) {
    int moe = dw__moe_layers(model);
    double mixture = experts * dw__expert_parameters(model) + dw__shared_parameters(model) +
                     dw__router_parameters(model);
    return model->layers * (dw__attention_parameters(model) + 2.0 * model->hidden) +
           (model->layers - moe) * dw__dense_mlp_parameters(model) + (moe ? moe * mixture : 0);
}

double dw_model_sizes_parameters(const dw_model_sizes *model) {
    if (model->parameters > 0) return model->parameters;
    return layer_parameters(model, model->experts) +
           dw__embedding_parameters(model) * (model->tied ? 1 : 2) +
           (double)model->positions * model->hidden;
}

double dw__counted_active(const dw_model_sizes *model) {
    return layer_parameters(model, model->top_k) + dw__embedding_parameters(model);
}

double dw_model_sizes_active(const dw_model_sizes *model) {
    /* The widths do not describe mixers other than attention; the stated number includes them. */
    if (model->attention_layers && model->active > 0) return model->active;
    return dw__counted_active(model);
}

dw_status dw_model_sizes_check(const dw_model_sizes *model) {
    const struct {
        const char *name;
        int value, least;
    } sizes[] = {{"layers", model->layers, 1},
                 {"hidden", model->hidden, 1},
                 {"heads", model->heads, 1},
                 {"kv_heads", model->kv_heads, 1},
                 {"head_dim", model->head_dim, 1},
                 {"vocabulary", model->vocabulary, 1},
                 {"ffn", model->ffn, 0},
                 {"experts", model->experts, 0},
                 {"top_k", model->top_k, 0},
                 {"expert_ffn", model->expert_ffn, 0},
                 {"shared_ffn", model->shared_ffn, 0},
                 {"expert_bias", model->expert_bias, 0},
                 {"dense_layers", model->dense_layers, 0},
                 {"moe_every", model->moe_every, 0},
                 {"q_rank", model->q_rank, 0},
                 {"kv_rank", model->kv_rank, 0},
                 {"rope_dim", model->rope_dim, 0},
                 {"value_dim", model->value_dim, 0},
                 {"window", model->window, 0},
                 {"window_layers", model->window_layers, 0},
                 {"positions", model->positions, 0},
                 {"lora_rank", model->lora_rank, 0}};
    for (size_t at = 0; at < DW_COUNT(sizes); at++) {
        if (sizes[at].value < sizes[at].least || sizes[at].value > 1 << 28)
            return dw__fail(DW_INVALID_ARGUMENT, "the model's %s is %d; expected %d to %d",
                            sizes[at].name, sizes[at].value, sizes[at].least, 1 << 28);
    }
    if (model->heads % model->kv_heads)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the model's %d heads are not a multiple of its %d key-value heads",
                        model->heads, model->kv_heads);
    if (model->window_layers > model->layers)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "window_layers is %d; expected at most the model's %d layers",
                        model->window_layers, model->layers);
    if (!model->experts) {
        if (!model->ffn)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "the model has neither ffn nor experts; set one of them");
        return DW_OK;
    }
    if (model->top_k < 1 || model->top_k > model->experts)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the model's top_k is %d; expected 1 to its %d experts", model->top_k,
                        model->experts);
    if (!model->expert_ffn)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the model has experts but expert_ffn is 0; set their width");
    if (model->dense_layers > model->layers)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dense_layers is %d; expected at most the model's %d layers",
                        model->dense_layers, model->layers);
    return DW_OK;
}
