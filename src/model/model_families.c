/* Table of model families: what the transformers class of each model_type builds and config.json does not state. */
#include "base/base.h"
#include "model/model_internal.h"
#include "model/model_reader.h"
#include <string.h>

#define GATE DW__HAS_GATE
#define BIASED DW__HAS_NORM_BIAS
#define TIED DW__HAS_TIED_HEAD
#define WIDE DW__HAS_WIDE_MLP
#define WINDOW DW__HAS_WINDOW
#define HEAD_NORMS DW__HAS_HEAD_NORMS
#define ATTENTION "attention_bias", "attention_bias"
#define ALL_BIASES "+", "+", "+"
#define NO_BIASES NULL, NULL, NULL
#define ENCODER                                                                                    \
    ALL_BIASES, BIASED | TIED | DW__HAS_POSITIONS | DW__HAS_EMBEDDING_NORM | DW__IS_ENCODER

/* clang-format off */
static const dw__model_family families[] = {
    /* families whose class is built; model_classes.c reads their sizes */
    {"gpt2", 2, 0, ALL_BIASES, BIASED | TIED | DW__HAS_POSITIONS, 0, &dw__built_families[DW__BUILT_GPT2]},
    {"llama", 2, 0, ATTENTION, "mlp_bias", GATE, 0, &dw__built_families[DW__BUILT_LLAMA]},
    {"qwen3", 2, 0, ATTENTION, NULL, GATE | HEAD_NORMS, 0, &dw__built_families[DW__BUILT_QWEN3]},
    {"mistral", 2, 0, NO_BIASES, GATE, 0, &dw__built_families[DW__BUILT_MISTRAL]},
    /* GPT-2 and families without a gate */
    {"gpt-sw3 openai-gpt", 2, 0, ALL_BIASES, BIASED | TIED | WIDE | DW__HAS_POSITIONS, 0, NULL},
    {"gpt_bigcode", 2, 0, ALL_BIASES, BIASED | TIED | WIDE | DW__HAS_POSITIONS | DW__HAS_MULTI_QUERY, 0, NULL},
    {"gpt_neo", 2, 2, NULL, "+", "+", BIASED | TIED | WIDE | DW__HAS_POSITIONS | WINDOW, 0, NULL},
    {"gpt_neox", 2, 0, "+attention_bias", "+attention_bias", "+", BIASED, 0, NULL},
    {"gpt_neox_japanese", 2, 0, NO_BIASES, BIASED | TIED | WIDE, 0, NULL},
    {"gptj codegen", 1, 0, NULL, NULL, "+", BIASED | WIDE | DW__HAS_HEAD_BIAS, 0, NULL},
    {"ctrl", 2, 0, ALL_BIASES, BIASED | TIED | DW__HAS_HEAD_BIAS, 0, NULL},
    {"opt", 2, 0, "+enable_bias", "+enable_bias", "+enable_bias",
     BIASED | TIED | DW__HAS_POSITIONS | DW__IS_OPT, 0, NULL},
    {"biogpt", 2, 0, ALL_BIASES, BIASED | TIED | DW__HAS_POSITIONS | DW__IS_OPT, 0, NULL},
    {"xglm", 2, 0, ALL_BIASES, BIASED | TIED, 0, NULL},
    {"bloom", 2, 0, ALL_BIASES, BIASED | TIED | WIDE | DW__HAS_EMBEDDING_NORM, 0, NULL},
    {"mpt", 2, 0, NO_BIASES, TIED | WIDE, 0, NULL},
    {"falcon", 2, 0, "bias", "bias", "bias", BIASED | TIED | WIDE | DW__IS_FALCON, 0, NULL},
    {"phi", 1, 0, ALL_BIASES, BIASED | DW__HAS_HEAD_BIAS, 0, NULL},
    {"persimmon", 2, 0, ALL_BIASES, BIASED | HEAD_NORMS, 0, NULL},
    {"starcoder2", 2, 0, "+use_bias", "+use_bias", "+use_bias", BIASED | TIED | WINDOW, 0, NULL},
    {"nemotron", 2, 0, ATTENTION, "mlp_bias", BIASED, 0, NULL},
    {"jais2", 2, 0, "+attention_bias", "+attention_bias", "+mlp_bias", BIASED, 0, NULL},
    {"arcee", 2, 0, ATTENTION, "mlp_bias", 0, 0, NULL},
    {"apertus apertus1p5_text", 2, 0, ATTENTION, NULL, HEAD_NORMS, 0, NULL},
    {"nanochat", 2, 0, ATTENTION, NULL, DW__HAS_NO_NORMS, 0, NULL},
    /* Llama and similar families */
    {"aquila baichuan cwm exaone helium yi deepseek", 2, 0, ATTENTION, "mlp_bias", GATE, 0, NULL},
    {"ministral ministral3", 2, 0, NO_BIASES, GATE | WINDOW, 0, NULL},
    {"qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
     2, 0, "+", NULL, NULL, GATE | DW__HAS_WINDOW_IF_USED, 0, NULL},
    {"qwen", 2, 0, "+", NULL, NULL, GATE | DW__HAS_HALF_MLP, 0, NULL},
    {"qwen3_vl_text", 2, 0, ATTENTION, NULL, GATE | HEAD_NORMS | DW__HAS_WINDOW_IF_USED, 0, NULL},
    {"phi3", 2, 0, NO_BIASES, GATE | WINDOW, 0, NULL},
    {"gemma", 2, 0, ATTENTION, NULL, GATE | TIED, 0, NULL},
    {"gemma2", 4, 2, ATTENTION, NULL, GATE | TIED | WINDOW, 0, NULL},
    {"gemma3_text", 4, 6, ATTENTION, NULL, GATE | TIED | HEAD_NORMS | WINDOW, 0, NULL},
    {"vaultgemma", 2, 2, ATTENTION, NULL, GATE | TIED | WINDOW, 0, NULL},
    {"olmo", 2, 0, ATTENTION, NULL, GATE | DW__HAS_NO_NORMS, 0, NULL},
    {"olmo2", 2, 0, ATTENTION, NULL, GATE | DW__HAS_WIDE_NORMS, 0, NULL},
    {"olmo3", 2, 4, ATTENTION, NULL, GATE | DW__HAS_WIDE_NORMS | WINDOW, 0, NULL},
    {"cohere", 1, 0, ATTENTION, NULL, GATE | TIED | DW__HAS_WIDE_NORMS | DW__HAS_CHOICE_OF_NORMS, 0, NULL},
    {"cohere2", 1, 4, ATTENTION, NULL, GATE | TIED | WINDOW, 0, NULL},
    {"glm", 2, 0, "+attention_bias", NULL, NULL, GATE, 0, NULL},
    {"glm4", 4, 0, "attention_bias", NULL, NULL, GATE, 0, NULL},
    {"chatglm", 2, 0, "add_qkv_bias", NULL, NULL, GATE, 0, NULL},
    {"granite", 2, 0, ATTENTION, "mlp_bias", GATE | TIED, 0, NULL},
    {"granite_swa", 2, 0, ATTENTION, "mlp_bias", GATE | TIED | WINDOW | DW__HAS_SINKS, 0, NULL},
    {"smollm3", 2, 0, ATTENTION, "mlp_bias", GATE | TIED | DW__HAS_WINDOW_IF_USED, 0, NULL},
    {"internlm2", 2, 0, "bias", "bias", NULL, GATE, 0, NULL},
    {"internlm3", 2, 0, "qkv_bias", "bias", "bias", GATE, 0, NULL},
    {"minicpm", 2, 0, NO_BIASES, GATE | TIED, 0, NULL},
    {"exaone4", 2, 4, NO_BIASES, GATE | HEAD_NORMS | WINDOW, 0, NULL},
    {"hunyuan_v1_dense", 2, 0, ATTENTION, NULL, GATE | HEAD_NORMS, 0, NULL},
    {"hyperclovax", 2, 0, ATTENTION, "mlp_bias", GATE | DW__HAS_POST_NORMS, 0, NULL},
    {"bitnet", 2, 0, ATTENTION, NULL, GATE | DW__HAS_SUB_NORMS, 0, NULL},
    {"seed_oss", 2, 0, "attention_bias", "attention_out_bias", "mlp_bias", GATE, 0, NULL},
    {"stablelm", 2, 0, "use_qkv_bias", NULL, NULL, GATE | BIASED, 0, NULL},
    {"ernie4_5", 2, 0, "use_bias", "use_bias", "use_bias", GATE | TIED, 0, NULL},
    {"moshi", 2, 0, NO_BIASES, GATE | DW__HAS_HALF_MLP | WINDOW, 0, NULL},
    /* mixtures of experts */
    {"mixtral", 2, 0, NO_BIASES, GATE | WINDOW, 0, NULL},
    {"qwen2_moe", 2, 0, "+qkv_bias", NULL, NULL, GATE | DW__HAS_SHARED_GATE | DW__HAS_WINDOW_IF_USED, 0, NULL},
    {"qwen3_moe qwen3_vl_moe_text qwen3_omni_moe_text", 2, 0, ATTENTION, NULL,
     GATE | HEAD_NORMS | DW__HAS_WINDOW_IF_USED, 0, NULL},
    {"deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe_lite glm_moe_dsa youtu minicpm3", 2, 0, ATTENTION, NULL,
     GATE, 0, NULL},
    {"axk1", 2, 0, ATTENTION, NULL, GATE, 0, NULL},
    {"glm4_moe solar_open glm4v_moe_text", 2, 0, "attention_bias", NULL, NULL,
     GATE | HEAD_NORMS | DW__HAS_CHOICE_OF_NORMS, 0, NULL},
    {"gpt_oss", 2, 2, "+attention_bias", "+attention_bias", NULL,
     GATE | WINDOW | DW__HAS_SINKS | DW__HAS_EXPERT_BIAS, 0, NULL},
    {"olmoe flex_olmo", 2, 0, ATTENTION, NULL, GATE | DW__HAS_WIDE_NORMS, 0, NULL},
    {"granitemoe", 2, 0, ATTENTION, NULL, GATE | TIED, 0, NULL},
    {"granitemoeshared", 2, 0, ATTENTION, NULL, GATE | DW__HAS_SHARED_MLP, 0, NULL},
    {"granitemoe_swa", 2, 0, ATTENTION, NULL, GATE | WINDOW | DW__HAS_SINKS | DW__HAS_SHARED_MLP, 0, NULL},
    {"llama4_text", 2, 0, ATTENTION, NULL, GATE | DW__HAS_SHARED_EXPERT, 0, NULL},
    {"grok-1", 4, 0, NO_BIASES, GATE | TIED, 0, NULL},
    {"dbrx", 2, 0, NO_BIASES, GATE, 0, NULL},
    {"aria_text", 2, 0, ATTENTION, "mlp_bias", GATE, 0, NULL},
    {"phimoe", 2, 0, ATTENTION, NULL, GATE | BIASED | DW__HAS_WINDOW_IF_USED, 0, NULL},
    {"ernie4_5_moe", 2, 0, "use_bias", "use_bias", "use_bias", GATE | TIED | DW__HAS_ROUTER_BIAS, 0, NULL},
    {"afmoe", 4, 4, ATTENTION, NULL, GATE | HEAD_NORMS | WINDOW | DW__HAS_OUTPUT_GATE | DW__HAS_ROUTER_BIAS, 0, NULL},
    {"beam", 4, 0, ATTENTION, NULL, GATE | HEAD_NORMS | WINDOW | DW__HAS_OUTPUT_GATE, 0, NULL},
    {"dots1 hy_v3", 2, 0, ATTENTION, NULL, GATE | HEAD_NORMS, 0, NULL},
    {"exaone_moe mellum", 2, 0, NO_BIASES, GATE | HEAD_NORMS | WINDOW, 0, NULL},
    {"kolibri1", 4, 0, NO_BIASES, GATE | HEAD_NORMS | WINDOW, 0, NULL},
    {"laguna", 2, 0, ATTENTION, NULL, GATE | HEAD_NORMS | WINDOW | DW__HAS_ROUTER_BIAS, 0, NULL},
    {"minimax_m2", 2, 0, NO_BIASES, GATE | DW__HAS_WIDE_NORMS, 0, NULL},
    {"minimax_m3_vl_text", 2, 0, NO_BIASES, GATE | HEAD_NORMS, 0, NULL},
    {"mimo_v2_flash", 2, 0, ATTENTION, NULL, GATE | WINDOW, 0, NULL},
    {"cohere2_moe", 1, 4, ATTENTION, NULL, GATE | TIED | WINDOW, 0, NULL},
    {"hunyuan_v1_moe", 2, 0, ATTENTION, NULL, GATE | HEAD_NORMS | DW__HAS_SHARED_EXPERT, 0, NULL},
    /* hybrids with other mixers than attention */
    {"nemotron_h", 1, 0, ATTENTION, "mlp_bias", DW__IS_BLOCKS, DW__MIXER_MAMBA2, NULL},
    {"qwen3_next qwen3_5_text qwen3_5_moe_text", 2, 4, ATTENTION, NULL,
     GATE | HEAD_NORMS | DW__HAS_OUTPUT_GATE | DW__HAS_SHARED_GATE, DW__MIXER_DELTA, NULL},
    {"olmo_hybrid", 2, 0, ATTENTION, NULL, GATE | DW__HAS_WIDE_NORMS, DW__MIXER_DELTA, NULL},
    {"kimi_linear", 2, 0, ATTENTION, NULL, GATE, DW__MIXER_DELTA_WIDE, NULL},
    {"jamba", 2, 0, NO_BIASES, GATE, DW__MIXER_MAMBA, NULL},
    {"bamba", 2, 0, ATTENTION, "mlp_bias", GATE, DW__MIXER_MAMBA2, NULL},
    {"granitemoehybrid", 2, 0, ATTENTION, NULL, GATE | DW__HAS_SHARED_MLP, DW__MIXER_MAMBA2, NULL},
    {"falcon_h1", 2, 0, ATTENTION, "mlp_bias", GATE, DW__MIXER_MAMBA2_BESIDE, NULL},
    {"minimax minimax_text_01", 2, 0, NO_BIASES, GATE, DW__MIXER_LIGHTNING, NULL},
    {"lfm2", 2, 0, NO_BIASES, GATE | TIED | HEAD_NORMS | DW__HAS_ADJUSTED_MLP, DW__MIXER_CONVOLUTION, NULL},
    {"lfm2_moe", 2, 0, NO_BIASES, GATE | TIED | HEAD_NORMS, DW__MIXER_CONVOLUTION, NULL},
    {"recurrent_gemma", 2, 0, "attention_bias", "+", "+",
     GATE | TIED | DW__HAS_HALF_MLP | WINDOW, DW__MIXER_RECURRENT, NULL},
    /* encoders */
    {"bert ernie", 2, 0, ENCODER, 0, NULL},
    {"roberta camembert xlm-roberta data2vec-text", 2, 0, ENCODER, 0, NULL},
};
/* clang-format on */

const dw__model_family dw__model_family_unknown = {"", 2,   0, ATTENTION, "mlp_bias", GATE | WINDOW,
                                                   0,  NULL};

#define PAIR                                                                                       \
    "models with an encoder and a decoder are not supported; models with one stack of layers are"
#define OTHER "its layers are neither attention, MLPs, experts nor a mixer that is counted here"
#define VARIANT "it is an encoder with parts that BERT lacks"

static const struct {
    const char *names, *why;
} refused[] = {
    {"bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp "
     "nllb-moe pegasus "
     "pegasus_x plbart prophetnet switch_transformers t5 t5gemma trocr umt5 whisper",
     PAIR},
    {"mamba mamba2 falcon_mamba rwkv xlstm", "models without attention are not supported"},
    {"zamba zamba2", "its attention blocks share their parameters"},
    {"gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text gemma4_assistant "
     "gemma4_unified_assistant",
     "each layer has an embedding of its own, and layers have different numbers of heads"},
    {"deepseek_v4 bailing_hybrid axk2 dots3_note dots3_note_text hy_v4 inkling_text inkling2_text "
     "lfm3 longcat_flash "
     "zaya doge jetmoe hrm_text qwen4_exp qwen4_exp_text blt cpmant decilm openelm "
     "cohere_compass_text",
     OTHER},
    {"big_bird bert-generation electra megatron-bert rembert roberta-prelayernorm roc_bert "
     "roformer xlm-roberta-xl "
     "xmod reformer xlm xlnet deberta deberta-v2 albert distilbert modernbert",
     VARIANT},
    {"git got_ocr2 mllama mllama_text_model musicgen musicgen_decoder musicgen_melody "
     "musicgen_melody_decoder phi4_multimodal moss_transcribe_diarize",
     "its language model's layers have parts for images or sound"},
};

static bool is_one_of(const char *names, const char *name) {
    size_t length = strlen(name);
    while (*names) {
        size_t count = strcspn(names, " ");
        if (count == length && strncmp(names, name, count) == 0) return true;
        names += count + (names[count] == ' ');
    }
    return false;
}

const dw__model_family *dw__model_family_named(const char *model_type) {
    for (size_t at = 0; at < DW_COUNT(families); at++)
        if (is_one_of(families[at].names, model_type)) return &families[at];
    return NULL;
}

const char *dw__model_family_refused(const char *model_type) {
    for (size_t at = 0; at < DW_COUNT(refused); at++)
        if (is_one_of(refused[at].names, model_type)) return refused[at].why;
    return NULL;
}
