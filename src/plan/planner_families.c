/* The families: what transformers' class of each model_type builds, which config.json does not say. */
#include "base/base.h"
#include "plan/planner_config.h"
#include <string.h>

#define GATE DW__HAS_GATE
#define BIASED DW__HAS_NORM_BIAS
#define TIED DW__HAS_TIED_HEAD
#define WIDE DW__HAS_WIDE_MLP
#define ATTENTION "attention_bias", "attention_bias"
#define ALL_BIASES "+", "+", "+"
#define NO_BIASES NULL, NULL, NULL

static const dw__planner_family families[] = {
    /* GPT-2 and those before the gate */
    {"gpt2", 2, 0, ALL_BIASES, BIASED | TIED | WIDE | DW__HAS_POSITIONS},
    {"gpt_bigcode", 2, 0, ALL_BIASES,
     BIASED | TIED | WIDE | DW__HAS_POSITIONS | DW__HAS_MULTI_QUERY},
    {"gpt_neox", 2, 0, "+attention_bias", "+attention_bias", "+", BIASED},
    {"gptj", 1, 0, NULL, NULL, "+", BIASED | WIDE | DW__HAS_HEAD_BIAS},
    {"opt", 2, 0, "+enable_bias", "+enable_bias", "+enable_bias",
     BIASED | TIED | DW__HAS_POSITIONS | DW__IS_OPT},
    {"bloom", 2, 0, ALL_BIASES, BIASED | TIED | WIDE | DW__HAS_EMBEDDING_NORM},
    {"mpt", 2, 0, NO_BIASES, TIED | WIDE},
    {"falcon", 2, 0, "bias", "bias", "bias", BIASED | TIED | WIDE | DW__IS_FALCON},
    {"phi", 1, 0, ALL_BIASES, BIASED | DW__HAS_HEAD_BIAS},
    {"starcoder2", 2, 0, "+use_bias", "+use_bias", "+use_bias", BIASED | TIED | DW__HAS_WINDOW},
    {"nemotron", 2, 0, ATTENTION, "mlp_bias", BIASED},
    /* Llama and its like */
    {"llama", 2, 0, ATTENTION, "mlp_bias", GATE},
    {"mistral", 2, 0, NO_BIASES, GATE | DW__HAS_WINDOW},
    {"qwen2", 2, 0, "+", NULL, NULL, GATE | DW__HAS_WINDOW_IF_USED},
    {"qwen3", 2, 0, ATTENTION, NULL, GATE | DW__HAS_HEAD_NORMS | DW__HAS_WINDOW_IF_USED},
    {"phi3", 2, 0, NO_BIASES, GATE | DW__HAS_WINDOW},
    {"gemma", 2, 0, ATTENTION, NULL, GATE | TIED},
    {"gemma2", 4, 2, ATTENTION, NULL, GATE | TIED | DW__HAS_WINDOW},
    {"gemma3_text", 4, 6, ATTENTION, NULL, GATE | TIED | DW__HAS_HEAD_NORMS | DW__HAS_WINDOW},
    {"olmo", 2, 0, ATTENTION, NULL, GATE | DW__HAS_NO_NORMS},
    {"olmo2", 2, 0, ATTENTION, NULL, GATE | DW__HAS_WIDE_NORMS},
    {"olmo3", 2, 4, ATTENTION, NULL, GATE | DW__HAS_WIDE_NORMS | DW__HAS_WINDOW},
    {"cohere", 1, 0, ATTENTION, NULL, GATE | TIED | DW__HAS_WIDE_NORMS | DW__HAS_CHOICE_OF_NORMS},
    {"cohere2", 1, 4, ATTENTION, NULL, GATE | TIED | DW__HAS_WINDOW},
    {"glm", 2, 0, "+attention_bias", NULL, NULL, GATE},
    {"glm4", 4, 0, "attention_bias", NULL, NULL, GATE},
    {"granite", 2, 0, ATTENTION, "mlp_bias", GATE | TIED},
    {"smollm3", 2, 0, ATTENTION, "mlp_bias", GATE | TIED | DW__HAS_WINDOW_IF_USED},
    /* mixtures of experts */
    {"mixtral", 2, 0, NO_BIASES, GATE | DW__HAS_WINDOW},
    {"qwen2_moe", 2, 0, "+qkv_bias", NULL, NULL,
     GATE | DW__HAS_SHARED_GATE | DW__HAS_WINDOW_IF_USED},
    {"qwen3_moe", 2, 0, ATTENTION, NULL, GATE | DW__HAS_HEAD_NORMS | DW__HAS_WINDOW_IF_USED},
    {"deepseek_v2", 2, 0, ATTENTION, NULL, GATE},
    {"deepseek_v3", 2, 0, ATTENTION, NULL, GATE},
    {"kimi_k2", 2, 0, ATTENTION, NULL, GATE},
    {"glm4_moe", 2, 0, "attention_bias", NULL, NULL,
     GATE | DW__HAS_HEAD_NORMS | DW__HAS_CHOICE_OF_NORMS},
    {"gpt_oss", 2, 2, "+attention_bias", "+attention_bias", NULL,
     GATE | DW__HAS_WINDOW | DW__HAS_SINKS | DW__HAS_EXPERT_BIAS},
    {"olmoe", 2, 0, ATTENTION, NULL, GATE | DW__HAS_WIDE_NORMS},
    {"granitemoe", 2, 0, ATTENTION, NULL, GATE | TIED},
    {"llama4_text", 2, 0, ATTENTION, NULL, GATE | DW__HAS_SHARED_EXPERT},
    {"grok-1", 4, 0, NO_BIASES, GATE | TIED},
    /* others */
    {"bert", 2, 0, ALL_BIASES,
     BIASED | TIED | DW__HAS_POSITIONS | DW__HAS_EMBEDDING_NORM | DW__IS_ENCODER},
    {"roberta", 2, 0, ALL_BIASES,
     BIASED | TIED | DW__HAS_POSITIONS | DW__HAS_EMBEDDING_NORM | DW__IS_ENCODER},
    {"nemotron_h", 1, 0, ATTENTION, "mlp_bias", DW__IS_HYBRID},
};

const dw__planner_family dw__planner_family_unknown = {
    NULL, 2, 0, ATTENTION, "mlp_bias", GATE | DW__HAS_WINDOW};

const dw__planner_family *dw__planner_family_named(const char *model_type) {
    for (size_t at = 0; at < DW_COUNT(families); at++)
        if (strcmp(families[at].name, model_type) == 0) return &families[at];
    return NULL;
}
