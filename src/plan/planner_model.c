/* Counts of a model's operations. */
#include "graph/attention_work.h"
#include "plan/planner_internal.h"

double dw__trained_part(const dw_model_sizes *model) {
    if (!model->lora_rank) return 1;
    /* LoRA: two thin matrices beside each of attention's four. */
    double h = model->hidden, wide = (double)model->head_dim * (model->heads + model->kv_heads);
    return model->layers * model->lora_rank * (4 * h + 2 * wide) / dw_model_sizes_parameters(model);
}

double dw__attention_part_of_layers(const dw_model_sizes *model) {
    return model->attention_layers ? (double)model->attention_layers / model->layers : 1;
}

double dw__window_layers(const dw_model_sizes *model) {
    if (!model->window) return 0;
    if (model->window_layers) return model->window_layers;
    return (double)model->layers / (model->window_every > 1 ? model->window_every : 1);
}

double dw__seen_tokens(const dw_model_sizes *model, double span, int windowed) {
    return dw__attention_keys_seen(span, windowed ? model->window : 0);
}

/* Sum over all heads and layers. */
static double seen_in_all(const dw_model_sizes *model, double span) {
    double windowed = dw__window_layers(model), full = model->layers - windowed;
    return dw__attention_part_of_layers(model) * model->heads *
           (full * dw__seen_tokens(model, span, 0) + windowed * dw__seen_tokens(model, span, 1));
}

double dw_planner_token_flops(const dw_model_sizes *model, int seq_len) {
    double linear = dw_model_sizes_active(model);
    double width = model->head_dim + model->rope_dim + dw__value_dim(model);
    return (model->lora_rank ? 4 : 6) * linear + 6 * width * seen_in_all(model, seq_len);
}

void dw_planner_model_work(const dw_model_sizes *model, double sequences, double seq_len,
                           dw_planner_work *work) {
    double tokens = sequences * seq_len, key = model->head_dim + model->rope_dim;
    double norms = 2.0 * model->layers * model->hidden;
    double gemm = 2 * tokens * (dw_model_sizes_active(model) - norms);
    double pairs = tokens * seen_in_all(model, seq_len);
    *work = (dw_planner_work){
        .gemm = gemm,
        .attention = dw__attention_flops(pairs, key, dw__value_dim(model), false),
        .backward_gemm = (model->lora_rank ? 1 : 2) * gemm,
        .backward_attention = dw__attention_flops(pairs, key, dw__value_dim(model), true),
    };
}
