/* Builds the model of a row: printed widths, and details that tables omit (gates, shared experts, latent attention)
 * from the notes, the name, or the stated number of parameters. */
#include "runs.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

static int whole(const lab_csv *table, size_t row, const char *name) {
    double value = strtod(lab_csv_cell(table, row, name), NULL);
    return value >= 1 && value <= 1 << 26 ? (int)(value + 0.5) : 0;
}

static void latent_attention(const char *name, const char *notes, dw_model_sizes *model) {
    double number;
    bool deepseek = lab_says(name, "DeepSeek-V2") || lab_says(name, "DeepSeek-V3") ||
                    lab_says(name, "DeepSeek-R1") || lab_says(name, "Kimi-K2");
    if (!deepseek && !lab_says(notes, "MLA")) return;
    model->q_rank = 1536, model->kv_rank = 512, model->head_dim = 128, model->rope_dim = 64,
    model->value_dim = 128;
    if (lab_says(name, "Lite")) model->q_rank = 0;
    model->kv_heads = model->heads;
    if (lab_number_after(notes, "q_lora", &number)) model->q_rank = (int)number;
    if (lab_number_after(notes, "kv_lora", &number)) model->kv_rank = (int)number;
}

/* Chooses between MLPs of three matrices and of two: by the stated number of parameters, else by the family's usual
 * form. */
static void gates(const char *name, const char *notes, dw_model_sizes *model) {
    static const char *const plain[] = {"GPT",    "MPT",      "BLOOM",  "bigscience",
                                        "OPT",    "Nemotron", "MT-NLG", "Pythia",
                                        "Falcon", "Turing",   "PaLM"};
    model->gated = 1;
    for (size_t at = 0; at < LAB_COUNT(plain); at++)
        if (lab_says(name, plain[at])) model->gated = 0;
    if (lab_says(name, "gpt-oss")) model->gated = 1;
    if (lab_says(notes, "2-matrix") || lab_says(notes, "squared-ReLU") ||
        lab_says(notes, "GELU MLP")) {
        model->gated = 0;
        return;
    }
    if (lab_says(notes, "SwiGLU")) {
        model->gated = 1;
        return;
    }
    if (model->parameters <= 0 || model->experts) return;
    double off[2];
    for (int gated = 0; gated < 2; gated++) {
        dw_model_sizes trial = *model;
        trial.gated = gated;
        trial.parameters = 0;
        double most = dw_model_sizes_parameters(&trial);
        trial.tied = 1;
        double least = dw_model_sizes_parameters(&trial);
        off[gated] =
            fmin(fabs(log(most / model->parameters)), fabs(log(least / model->parameters)));
    }
    if (fabs(off[0] - off[1]) > 0.02) model->gated = off[1] < off[0];
}

static double embedding_parameters(const dw_model_sizes *model) {
    return (double)model->hidden * model->vocabulary;
}
static double expert_parameters(const dw_model_sizes *model) { /* of one */
    return (model->gated ? 3.0 : 2.0) * model->hidden * model->expert_ffn;
}
static int moe_layers(const dw_model_sizes *model) {
    const int rest = model->layers - model->dense_layers;
    return model->moe_every > 1 ? rest / model->moe_every : rest;
}

static void experts(const char *name, const char *notes, double stated, dw_model_sizes *model) {
    double number;
    model->expert_ffn = model->ffn;
    model->moe_every = 1;
    bool said = lab_number_after(notes, "moe_ffn", &number) ||
                lab_number_after(notes, "moe-ffn-hidden-size=", &number);
    if (said) model->expert_ffn = (int)number;
    if (lab_says(notes, "per-expert")) said = true;
    if (lab_number_before(notes, "dense layers", &number) && number < model->layers)
        model->dense_layers = (int)number;
    else if (lab_says(name, "DeepSeek-V3") || lab_says(name, "DeepSeek-R1"))
        model->dense_layers = 3;
    else if (lab_says(name, "DeepSeek-V2") || lab_says(name, "Kimi-K2"))
        model->dense_layers = 1;
    model->expert_bias = lab_says(name, "gpt-oss");
    if (lab_says(notes, "alternating dense")) model->moe_every = 2;
    if (lab_number_after(notes, "dense(", &number)) model->ffn = (int)number;
    if (!said && stated > 0) {
        /* If the stated total contradicts the printed width, that width is the dense layers'. */
        dw_model_sizes trial = *model;
        trial.parameters = 0;
        double all = dw_model_sizes_parameters(&trial), each = expert_parameters(&trial);
        double many = (double)moe_layers(&trial) * trial.experts;
        if (fabs(log(all / stated)) > 0.15 && many * each > 0) {
            double width = (stated - (all - many * each)) / many / (each / trial.expert_ffn);
            if (width >= 64 && width <= 4.0 * model->ffn)
                model->expert_ffn = (int)(width / 64 + 0.5) * 64;
        }
    }
    double shared = 0;
    if (lab_number_after(notes, "shared-expert-intermediate-size=", &number))
        model->shared_ffn = (int)number;
    else if (lab_number_before(notes, "shared expert", &shared))
        model->shared_ffn = (int)fmin(shared * model->expert_ffn, 1 << 28);
    else if (lab_says(name, "DeepSeek-V2"))
        model->shared_ffn = 2 * model->expert_ffn;
    else if (lab_says(name, "DeepSeek") || lab_says(name, "Kimi") || lab_says(name, "Llama-4"))
        model->shared_ffn = model->expert_ffn;
}

/* Reads "hybrid-layer-pattern=MEM*EM...": a letter per layer for Mamba, experts, attention and MLP. The part after a
 * slash describes multi-token prediction. */
static void layer_pattern(const char *notes, dw_model_sizes *model) {
    static const char key[] = "hybrid-layer-pattern=";
    const char *at = strstr(notes, key);
    if (!at) return;
    int layers = 0, attention = 0, mixtures = 0;
    for (at += sizeof key - 1; *at && strchr("MEA*-|", *at); at++) {
        layers += *at != '|';
        attention += *at == '*' || *at == 'A';
        mixtures += *at == 'E';
    }
    if (layers != model->layers || !attention) return;
    model->attention_layers = attention;
    if (!mixtures || !model->experts) return;
    model->moe_every = layers / mixtures;
    model->dense_layers = layers - model->moe_every * mixtures;
}

/* If the row states no vocabulary, chooses GPT-2's or Llama's: the one that comes nearer to the stated parameters,
 * with a tied head or without. */
static void vocabulary(double stated, dw_model_sizes *model) {
    static const int sizes[] = {51200, 32000};
    double nearest = HUGE_VAL;
    dw_model_sizes trial = *model;
    trial.parameters = 0;
    trial.tied = 1;
    for (size_t at = 0; at < LAB_COUNT(sizes); at++) {
        trial.vocabulary = sizes[at];
        double one = dw_model_sizes_parameters(&trial), two = one + embedding_parameters(&trial);
        double off = fmin(fabs(one - stated), fabs(two - stated));
        if (off >= nearest) continue;
        nearest = off;
        model->vocabulary = sizes[at];
    }
}

const char *lab_run_model(const lab_csv *table, size_t row, dw_model_sizes *model) {
    const char *name = lab_csv_cell(table, row, "model"),
               *notes = lab_csv_cell(table, row, "notes");
    double stated = strtod(lab_csv_cell(table, row, "params_total_b"), NULL) * 1e9;
    double active = strtod(lab_csv_cell(table, row, "params_active_b"), NULL) * 1e9;
    *model = (dw_model_sizes){
        .layers = whole(table, row, "layers"),
        .hidden = whole(table, row, "hidden"),
        .heads = whole(table, row, "heads"),
        .kv_heads = whole(table, row, "kv_heads"),
        .head_dim = whole(table, row, "head_dim"),
        .ffn = whole(table, row, "ffn_hidden"),
        .vocabulary = whole(table, row, "vocab"),
        .experts = whole(table, row, "experts"),
        .top_k = whole(table, row, "topk"),
        .parameters = stated > 0 && isfinite(stated) ? stated : 0,
        .active = active > 0 && isfinite(active) ? active : 0,
    };
    if (lab_says(notes, "encoder-decoder") || lab_says(notes, "encoder and decoder") ||
        lab_says(lab_csv_cell(table, row, "arch"), "encoder-decoder"))
        return "an encoder with a decoder is not predicted; expected layers that are alike";
    if (lab_says(lab_csv_cell(table, row, "arch"), "diffusion") ||
        lab_says(lab_csv_cell(table, row, "arch"), "vision"))
        return "only language models are predicted";
    if (!model->layers) return "layers is missing";
    if (!model->hidden) return "hidden is missing";
    if (!model->heads)
        model->heads =
            model->head_dim ? model->hidden / model->head_dim : (model->hidden + 127) / 128;
    if (model->heads < 1) model->heads = 1;
    if (!model->head_dim) model->head_dim = model->hidden / model->heads;
    if (model->head_dim < 1)
        return "head_dim is missing and cannot be derived from hidden and heads";
    if (!model->kv_heads || model->heads % model->kv_heads) model->kv_heads = model->heads;
    double rows;
    if (!model->vocabulary && lab_number_after(notes, "vocab-size=", &rows))
        model->vocabulary = (int)rows;
    int silent = !model->vocabulary;
    /* GPT-2's vocabulary, padded: most papers that state none used this one. */
    if (silent) model->vocabulary = 51200;
    if (!model->ffn) model->ffn = 4 * model->hidden;
    if (model->experts == 1) model->experts = 0;
    if (model->experts && (model->top_k < 1 || model->top_k > model->experts))
        return "topk is missing or above experts";
    latent_attention(name, notes, model);
    gates(name, notes, model);
    if (model->experts) experts(name, notes, stated, model);
    double number;
    if (lab_says(notes, "hybrid") &&
        lab_says(notes, "mamba")) { /* Nemotron: attention in one layer of nine */
        model->attention_layers = (model->layers + 8) / 9;
        if (model->experts) model->moe_every = 2;
    }
    if (lab_says(name, "Nemotron-H")) model->attention_layers = (model->layers + 11) / 12;
    layer_pattern(notes, model);
    if (lab_number_after(notes, "sliding-window", &number)) model->window = (int)number;
    if (model->window) model->window_every = lab_says(notes, "alternating") ? 2 : 1;
    if (lab_says(notes, "LoRA") || lab_says(name, "LoRA") || lab_says(notes, "lora fine-tune"))
        model->lora_rank = 16;
    if (silent && !model->experts && stated > 0) vocabulary(stated, model);
    if (stated > 0) { /* the head is tied if the stated total has room for only one table */
        dw_model_sizes trial = *model;
        trial.parameters = 0;
        double two = dw_model_sizes_parameters(&trial),
               table_elements = embedding_parameters(model);
        model->tied = fabs(two - table_elements - stated) < fabs(two - stated);
    } else {
        model->tied =
            (lab_says(name, "GPT") || lab_says(name, "bigscience")) && !lab_says(notes, "untie");
    }
    return dw_model_sizes_check(model) == DW_OK ? NULL : dw_last_error();
}
