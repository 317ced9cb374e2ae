/* Configurations by name, as in their publishers' config.json, without fields that do not change the
 * function. Sources: the model repositories of the same names on huggingface.co. */
#include "model/model_internal.h"
#include <string.h>

#define GPT2(layers, width, heads)                                                                 \
    "{\"model_type\": \"gpt2\", \"vocab_size\": 50257, \"n_positions\": 1024, \"n_embd\": " width  \
    ", \"n_layer\": " layers ", \"n_head\": " heads                                                \
    ", \"activation_function\": \"gelu_new\", \"bos_token_id\": 50256, \"eos_token_id\": 50256}"
#define LLAMA3(layers, width, heads, mlp, positions, rope)                                         \
    "{\"model_type\": \"llama\", \"vocab_size\": 128256, \"hidden_size\": " width                  \
    ", \"intermediate_size\": " mlp ", \"num_hidden_layers\": " layers                             \
    ", \"num_attention_heads\": " heads ", \"num_key_value_heads\": 8, \"hidden_act\": \"silu\", " \
    "\"max_position_embeddings\": " positions                                                      \
    ", \"rms_norm_eps\": 1e-5, \"rope_theta\": 500000.0" rope                                      \
    ", \"bos_token_id\": 128000, \"eos_token_id\": 128001}"
#define LLAMA31_ROPE                                                                               \
    ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, "  \
    "\"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 8192}"
#define QWEN3(layers, width, heads, mlp, tied)                                                     \
    "{\"model_type\": \"qwen3\", \"vocab_size\": 151936, \"hidden_size\": " width                  \
    ", \"intermediate_size\": " mlp ", \"num_hidden_layers\": " layers                             \
    ", \"num_attention_heads\": " heads ", \"num_key_value_heads\": 8, \"head_dim\": 128, "        \
    "\"hidden_act\": \"silu\", \"max_position_embeddings\": 40960, \"rms_norm_eps\": 1e-6, "       \
    "\"rope_theta\": 1000000.0, \"tie_word_embeddings\": " tied                                    \
    ", \"bos_token_id\": 151643, \"eos_token_id\": 151645}"
#define MISTRAL(vocabulary, window, theta)                                                         \
    "{\"model_type\": \"mistral\", \"vocab_size\": " vocabulary ", \"hidden_size\": 4096, "        \
    "\"intermediate_size\": 14336, \"num_hidden_layers\": 32, \"num_attention_heads\": 32, "       \
    "\"num_key_value_heads\": 8, \"hidden_act\": \"silu\", \"max_position_embeddings\": 32768, "   \
    "\"rms_norm_eps\": 1e-5, \"rope_theta\": " theta ", \"sliding_window\": " window               \
    ", \"bos_token_id\": 1, \"eos_token_id\": 2}"

static const struct {
    const char *name, *json;
} catalogue[] = {
    {"gpt2", GPT2("12", "768", "12")},
    {"gpt2-medium", GPT2("24", "1024", "16")},
    {"gpt2-large", GPT2("36", "1280", "20")},
    {"gpt2-xl", GPT2("48", "1600", "25")},
    {"llama3-8b", LLAMA3("32", "4096", "32", "14336", "8192", "")},
    {"llama3-70b", LLAMA3("80", "8192", "64", "28672", "8192", "")},
    {"llama3-405b", LLAMA3("126", "16384", "128", "53248", "131072", LLAMA31_ROPE)},
    {"qwen3-0.6b", QWEN3("28", "1024", "16", "3072", "true")},
    {"qwen3-1.7b", QWEN3("28", "2048", "16", "6144", "true")},
    {"qwen3-4b", QWEN3("36", "2560", "32", "9728", "true")},
    {"qwen3-8b", QWEN3("36", "4096", "32", "12288", "false")},
    {"mistral-7b", MISTRAL("32000", "4096", "10000.0")},
};

uint32_t dw_model_catalogue_count(void) { return DW_COUNT(catalogue); }

const char *dw_model_catalogue_name(uint32_t index) {
    return index < DW_COUNT(catalogue) ? catalogue[index].name : NULL;
}

dw_status dw_model_config_named(const char *name, dw_model_config **config) {
    dw_status status = DW_OK;
    dw__text names = {0};
    if (!name) return dw__fail(DW_INVALID_ARGUMENT, "the name of a model is NULL");
    for (size_t i = 0; i < DW_COUNT(catalogue); i++)
        if (strcmp(catalogue[i].name, name) == 0)
            return dw_model_config_parse(catalogue[i].json, strlen(catalogue[i].json), config);
    for (size_t i = 0; i < DW_COUNT(catalogue); i++)
        DW_TRY(dw__text_printf(&names, "%s%s", i ? ", " : "", catalogue[i].name));
    status = dw__fail(DW_NOT_FOUND, "there is no model \"%.64s\" in the catalogue; it has %s", name,
                      names.text);
cleanup:
    dw__text_free(&names);
    return status;
}
