/* Tests the planner's models: the catalogue against published totals, names in any spelling, and config.json with every
 * kind of mistake. tests/python/test_planner_models.py compares counts with transformers' classes. */
#include "base/base.h"
#include "deepwell/log.h"
#include "deepwell/planner.h"
#include "model/model_internal.h"
#include "plan/planner_internal.h"
#include "same_model_sizes.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define assert_ok(call)                                                                            \
    do {                                                                                           \
        dw_status status_ = (call);                                                                \
        if (status_ != DW_OK) print_error("%s: %s\n", #call, dw_last_error());                     \
        assert_int_equal(status_, DW_OK);                                                          \
    } while (0)

/* ---- published totals ------------------------------------------------------------------------------------------ */

/* Part of Llama 4, from its vision_config, as transformers builds it. */
#define VISION 871.932416
/* Part of GLM-4.5: attention, a mixture with its router, two norms and three of its own, and a matmul of both
 * its inputs. */
#define SECOND_TOKEN                                                                               \
    ((2 * 5120 * 128.0 * (96 + 8) + 161 * 3 * 5120 * 1536.0 + 160 * 5120 + 2 * 5120 * 5120.0) / 1e6)

/* Elements as the publisher prints them, and half a unit of the last digit, in millions. A whole number is
 * the size of the published weights. `tables`: tables that the publisher counts as active. `cut`: the digits
 * are truncated, not rounded. `without`: number of tables not counted. `besides`: elements of the weights
 * outside of the language model. */
static const struct {
    const char *name;
    double total, half, active, active_half;
    int tables, cut, without;
    double besides;
} published[] = {
    {"gpt2", 124.439808, 0, 0, 0, 0, 0, 0, 0},
    {"gpt2-medium", 354.823168, 0, 0, 0, 0, 0, 0, 0},
    {"gpt2-large", 774.030080, 0, 0, 0, 0, 0, 0, 0},
    {"gpt2-xl", 1557.611200, 0, 0, 0, 0, 0, 0, 0},
    {"gpt3-125m", 125, 0.5, 0, 0, 0, 0, 0, 0},
    {"gpt3-350m", 350, 5, 0, 0, 0, 1, 0, 0}, /* the paper prints two digits */
    {"gpt3-760m", 760, 5, 0, 0, 0, 0, 0, 0},
    {"gpt3-1.3b", 1300, 50, 0, 0, 0, 0, 0, 0},
    {"gpt3-2.7b", 2700, 50, 0, 0, 0, 0, 0, 0},
    {"gpt3-6.7b", 6700, 50, 0, 0, 0, 0, 0, 0},
    {"gpt3-13b", 13000, 500, 0, 0, 0, 0, 0, 0},
    {"gpt3-175b", 175000, 500, 0, 0, 0, 0, 0, 0},
    {"megatron-1.7b", 1700, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-3.6b", 3600, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-7.5b", 7500, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-18.4b", 18400, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-22b", 22000, 500, 0, 0, 0, 0, 0, 0},
    {"megatron-39.1b", 39100, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-76.1b", 76100, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-145.6b", 145600, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-310b", 310100, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-530b", 529600, 50, 0, 0, 0, 0, 0, 0},
    {"megatron-1t", 1008000, 50, 0, 0, 0, 0, 0, 0},
    {"llama-7b", 6700, 50, 0, 0, 0, 0, 0, 0},
    {"llama-13b", 13000, 50, 0, 0, 0, 0, 0, 0},
    {"llama-33b", 32500, 50, 0, 0, 0, 0, 0, 0},
    {"llama-65b", 65200, 50, 0, 0, 0, 1, 0, 0}, /* the weights have 65.286 */
    {"llama2-7b", 6738.415616, 0, 0, 0, 0, 0, 0, 0},
    {"llama2-13b", 13015.864320, 0, 0, 0, 0, 0, 0, 0},
    {"llama2-34b", 34000, 500, 0, 0, 0, 0, 0, 0},
    {"llama2-70b", 68976.648192, 0, 0, 0, 0, 0, 0, 0},
    {"llama3-8b", 8030.261248, 0, 0, 0, 0, 0, 0, 0},
    {"llama3-70b", 70553.706496, 0, 0, 0, 0, 0, 0, 0},
    {"llama3.1-8b", 8030.261248, 0, 0, 0, 0, 0, 0, 0},
    {"llama3.1-70b", 70553.706496, 0, 0, 0, 0, 0, 0, 0},
    {"llama3-405b", 405853.388800, 0, 0, 0, 0, 0, 0, 0},
    {"llama3.2-1b", 1235.814400, 0, 0, 0, 0, 0, 0, 0},
    {"llama3.2-3b", 3212.749824, 0, 0, 0, 0, 0, 0, 0},
    {"llama4-scout", 109000, 500, 17000, 500, 2, 0, 0, VISION},
    /* The paper prints two digits. */
    {"llama4-maverick", 400000, 5000, 17000, 500, 2, 0, 0, VISION},
    {"qwen2.5-0.5b", 494.032768, 0, 0, 0, 0, 0, 0, 0},
    {"qwen2.5-1.5b", 1543.714304, 0, 0, 0, 0, 0, 0, 0},
    {"qwen2.5-3b", 3085.938688, 0, 0, 0, 0, 0, 0, 0},
    {"qwen2.5-7b", 7615.616512, 0, 0, 0, 0, 0, 0, 0},
    {"qwen2.5-14b", 14770.033664, 0, 0, 0, 0, 0, 0, 0},
    {"qwen2.5-32b", 32763.876352, 0, 0, 0, 0, 0, 0, 0},
    {"qwen2.5-72b", 72706.203648, 0, 0, 0, 0, 0, 0, 0},
    {"qwen3-0.6b", 600, 50, 0, 0, 0, 0, 0, 0},
    {"qwen3-1.7b", 1700, 50, 0, 0, 0, 0, 0, 0},
    {"qwen3-4b", 4000, 50, 0, 0, 0, 0, 0, 0},
    {"qwen3-8b", 8200, 50, 0, 0, 0, 0, 0, 0},
    {"qwen3-14b", 14800, 50, 0, 0, 0, 0, 0, 0},
    {"qwen3-32b", 32800, 50, 0, 0, 0, 0, 0, 0},
    {"qwen3-30b-a3b", 30500, 50, 3300, 60, 2, 0, 0, 0},
    {"qwen3-235b-a22b", 235000, 500, 22000, 500, 2, 0, 0, 0},
    {"qwen3-next-80b-a3b", 80000, 500, 0, 0, 0, 0, 0, 0},
    {"mistral-7b", 7241.732096, 0, 0, 0, 0, 0, 0, 0},
    {"mistral-7b-v0.2", 7241.732096, 0, 0, 0, 0, 0, 0, 0},
    {"mistral-7b-v0.3", 7248.023552, 0, 0, 0, 0, 0, 0, 0},
    {"mixtral-8x7b", 46702.792704, 0, 12900, 50, 2, 0, 0, 0},
    {"mixtral-8x22b", 140620.634112, 0, 39000, 500, 2, 0, 0, 0},
    {"deepseek-v2-lite", 15706.484224, 0, 2400, 60, 1, 0, 0, 0},
    {"deepseek-v2", 235741.434880, 0, 21000, 500, 1, 0, 0, 0},
    {"deepseek-v3", 671026.404352, 0, 37000, 500, 1, 0, 0,
     0}, /* and 14,848 biases that no gradient moves */
    {"kimi-k2", 1026000, 500, 32600, 500, 2, 0, 0, 0},
    {"gpt-oss-20b", 20914.757184, 0, 3610, 5, 1, 0, 0, 0},
    {"gpt-oss-120b", 116829.156672, 0, 5130, 5, 1, 0, 0, 0},
    {"nemotron3-8b", 8500, 50, 0, 0, 0, 0, 0, 0},
    {"nemotron3-22b", 21266.116608, 0, 0, 0, 0, 0, 0, 0}, /* NeMo's widths; "22B" is a name */
    {"nemotron4-15b", 15600, 50, 0, 0, 0, 0, 0, 0},       /* 3.2 of tables, 12.5 of layers */
    {"nemotron4-340b", 341000, 100, 0, 0, 0, 0, 0, 0},    /* 9.4 and 331.6 */
    {"nemotron-h-8b", 8100, 50, 0, 0, 0, 0, 0, 0},
    {"nemotron-h-47b", 47000, 500, 0, 0, 0, 0, 0, 0},
    {"nemotron-h-56b", 56300, 500, 0, 0, 0, 0, 0, 0},
    {"nemotron3-nano-30b-a3b", 31600, 50, 3200, 50, 1, 0, 0, 0},
    {"grok-1", 314000, 500, 0, 0, 0, 1, 1, 0},
    {"gemma-2b", 2506.172416, 0, 0, 0, 0, 0, 0, 0},
    {"gemma-7b", 8537.680896, 0, 0, 0, 0, 0, 0, 0},
    {"gemma2-2b", 2614.341888, 0, 0, 0, 0, 0, 0, 0},
    {"gemma2-9b", 9241.705984, 0, 0, 0, 0, 0, 0, 0},
    {"gemma2-27b", 27227.128320, 0, 0, 0, 0, 0, 0, 0},
    {"gemma3-270m", 268.098176, 0, 0, 0, 0, 0, 0, 0},
    {"gemma3-1b", 999.885952, 0, 0, 0, 0, 0, 0, 0},
    {"gemma3-4b", 3880, 5, 0, 0, 0, 0, 0, 0},
    {"gemma3-12b", 11765, 5, 0, 0, 0, 0, 0, 0},
    {"gemma3-27b", 27010, 5, 0, 0, 0, 0, 0, 0},
    {"falcon-7b", 6921.720704, 0, 0, 0, 0, 0, 0, 0},
    {"falcon-40b", 41303.293952, 0, 0, 0, 0, 0, 0, 0},
    {"falcon-180b", 179522.565120, 0, 0, 0, 0, 0, 0, 0},
    {"bloom-560m", 559.214592, 0, 0, 0, 0, 0, 0, 0},
    {"bloom-7.1b", 7069.016064, 0, 0, 0, 0, 0, 0, 0},
    {"bloom-176b", 176247.271424, 0, 0, 0, 0, 0, 0, 0},
    {"mpt-7b", 6649.286656, 0, 0, 0, 0, 0, 0, 0},
    {"mpt-30b", 29957.200896, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-70m", 70.426624, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-160m", 162.322944, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-410m", 405.334016, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-1b", 1011.781632, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-1.4b", 1414.647808, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-2.8b", 2775.208960, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-6.9b", 6857.302016, 0, 0, 0, 0, 0, 0, 0},
    {"pythia-12b", 11846.072320, 0, 0, 0, 0, 0, 0, 0},
    {"phi3-mini", 3821.079552, 0, 0, 0, 0, 0, 0, 0},
    {"phi3-medium", 13960.238080, 0, 0, 0, 0, 0, 0, 0},
    {"phi4", 14659.507200, 0, 0, 0, 0, 0, 0, 0},
    {"phi4-mini", 3836.021760, 0, 0, 0, 0, 0, 0, 0},
    /* GLM-4.5's report counts no tables, and for the larger model also the layer that predicts a second token. */
    {"glm-4.5", 355000, 500, 32000, 500, 0, 0, 2, SECOND_TOKEN},
    {"glm-4.5-air", 106000, 500, 12000, 500, 0, 0, 2, 0},
};

static void every_model_has_its_published_size(void **state) {
    (void)state;
    assert_int_equal(DW_COUNT(published), dw_model_catalogue_count());
    for (size_t at = 0; at < DW_COUNT(published); at++) {
        dw_model_sizes model;
        assert_string_equal(published[at].name, dw_model_catalogue_name((uint32_t)at));
        assert_true(strlen(dw_model_catalogue_source((uint32_t)at)) > 8);
        assert_ok(dw_model_sizes_named(published[at].name, &model));
        double total = model.parameters / 1e6, table = dw__embedding_parameters(&model) / 1e6;
        double active = model.active / 1e6;
        if (published[at].tables == 0) active -= table;
        if (published[at].tables == 2 && !model.tied) active += table;
        double counted = total + published[at].besides - published[at].without * table;
        if (published[at].cut) counted -= published[at].half; /* rounded down, not to the nearest */
        if (fabs(counted - published[at].total) >
            published[at].half + 1e-7 * total * !published[at].half / 1e3)
            fail_msg("%s has %.6f M, published %.6f", published[at].name, total,
                     published[at].total);
        if (published[at].active > 0 &&
            fabs(active - published[at].active) > published[at].active_half)
            fail_msg("%s has %.1f M active, published %.0f", published[at].name, active,
                     published[at].active);
    }
    assert_null(dw_model_catalogue_name((uint32_t)DW_COUNT(published)));
    assert_null(dw_model_catalogue_source(UINT32_MAX));
}

/* The predictions use the same model: the widths make the total, except for biases and norms. */
static void widths_make_the_total(void **state) {
    (void)state;
    for (uint32_t at = 0; at < dw_model_catalogue_count(); at++) {
        dw_model_sizes model;
        assert_ok(dw_model_sizes_named(dw_model_catalogue_name(at), &model));
        double total = model.parameters, active = model.active;
        model.parameters = 0;
        if (model.attention_layers) continue; /* Mamba's matrices are not part of any width */
        double off = fabs(dw_model_sizes_parameters(&model) / total - 1);
        double active_off = fabs(dw_model_sizes_active(&model) / active - 1);
        if (off > 1e-3 || active_off > 1e-3)
            fail_msg("%s: widths are off by %g and %g", dw_model_catalogue_name(at), off,
                     active_off);
    }
}

/* Every name is a configuration or is refused with its family. The engine and the planner read the same sizes. */
static void engine_and_planner_read_the_same_sizes(void **state) {
    (void)state;
    int built = 0;
    for (uint32_t at = 0; at < dw_model_catalogue_count(); at++) {
        const char *name = dw_model_catalogue_name(at);
        dw_model_sizes model;
        dw_model_info info;
        dw_model_config *config = NULL;
        assert_ok(dw_model_sizes_named(name, &model));
        dw_status status = dw_model_config_named(name, &config);
        if (status != DW_OK) {
            assert_int_equal(status, DW_UNSUPPORTED);
            assert_non_null(strstr(dw_last_error(), name));
            assert_non_null(strstr(dw_last_error(), "gpt2, llama, qwen3 and mistral are built"));
            assert_null(config);
            continue;
        }
        built++;
        dw_model_describe(config, &info);
        expect_same_sizes(&model, &info.sizes);
        int64_t elements = 0;
        for (uint32_t p = 0; p < dw_model_parameter_count(config); p++) {
            dw_model_parameter parameter;
            dw_model_parameter_at(config, p, &parameter);
            elements += parameter.count;
        }
        assert_true(model.parameters == (double)elements);
        assert_int_equal(model.gated, !info.positions_are_limit); /* all but GPT-2's */
        assert_int_equal(model.positions, info.positions_are_limit ? info.positions : 0);
        int64_t sliding = 0;
        for (int64_t layer = 0; layer < model.layers; layer++) sliding += config->sliding[layer];
        assert_int_equal(model.window, sliding ? config->window : 0);
        dw_model_config_destroy(config);
    }
    assert_int_equal(built, 47);
}

/* ---- names ----------------------------------------------------------------------------------------------------- */

static void names_are_found_in_any_spelling(void **state) {
    (void)state;
    static const struct {
        const char *written, *name;
    } names[] = {
        {"Llama-3-70B", "llama3-70b"},
        {"llama3-70b", "llama3-70b"},
        {"LLAMA_3_70B", "llama3-70b"},
        {"meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"},
        {"meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b"},
        {"meta-llama/Llama-3.1-405B", "llama3-405b"},
        {"llama3.1-405b", "llama3-405b"},
        {"meta-llama/Llama-2-7b-chat-hf", "llama2-7b"},
        {"llama-33b", "llama-33b"},
        {"Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"},
        {"Qwen2.5-72B", "qwen2.5-72b"},
        {"mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"},
        {"mistralai/Mistral-7B-v0.1", "mistral-7b"},
        {"mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"},
        {"DeepSeek-R1", "deepseek-v3"},
        {"deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"},
        {"GPT-OSS-120B", "gpt-oss-120b"},
        {"GPT3 175B", "gpt3-175b"},
        {"gpt-1t", "megatron-1t"},
        {"Nemotron-4-340B", "nemotron4-340b"},
        {"google/gemma-2-27b-it", "gemma2-27b"},
        {"zai-org/GLM-4.5-Air", "glm-4.5-air"},
    };
    for (size_t at = 0; at < DW_COUNT(names); at++) {
        dw_model_sizes written, named;
        assert_ok(dw_model_sizes_named(names[at].written, &written));
        assert_ok(dw_model_sizes_named(names[at].name, &named));
        expect_same_sizes(&written, &named);
    }
}

static void unknown_names_get_suggestions(void **state) {
    (void)state;
    static const char *const cases[][2] = {{"llama3-71b", "llama3-70b"},
                                           {"lama2-13b", "llama2-13b"},
                                           {"mixtral-8x8b", "mixtral-8x7b"},
                                           {"llama3-3b", "llama3-8b"},
                                           {"", "similar names"},
                                           {"----", "similar names"},
                                           {"org/", "similar names"},
                                           {"\x1b[2J\xff", "similar names"}};
    dw_model_sizes model;
    char lengthy[5000];
    memset(lengthy, 'x', sizeof lengthy - 1);
    lengthy[sizeof lengthy - 1] = 0;
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        assert_int_equal(dw_model_sizes_named(cases[at][0], &model), DW_NOT_FOUND);
        if (!strstr(dw_last_error(), cases[at][1])) fail_msg("%s", dw_last_error());
    }
    assert_int_equal(dw_model_sizes_named(lengthy, &model), DW_NOT_FOUND);
    assert_int_equal(dw_model_sizes_named(NULL, &model), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_model_sizes_named("gpt2", NULL), DW_INVALID_ARGUMENT);
}

/* ---- config.json ----------------------------------------------------------------------------------------------- */

#define SIZES "\"vocab_size\": 100, \"hidden_size\": 64, \"num_hidden_layers\": 4, "
#define LLAMA "{\"model_type\": \"llama\", " SIZES "\"num_attention_heads\": 4"
/* A family with the usual fields, whose class is not built. */
#define YI "{\"model_type\": \"yi\", " SIZES "\"num_attention_heads\": 4"
#define GROUPED "\"num_attention_heads\": 4, \"num_key_value_heads\": 2"
#define FFN ", \"intermediate_size\": 96"
#define MOE YI FFN ", \"num_experts\": 8, \"num_experts_per_tok\": 2"
#define MIXED(type) "{\"model_type\": \"" type "\", " SIZES "\"num_attention_heads\": 4" FFN
#define MAMBA                                                                                      \
    ", \"mamba_n_heads\": 4, \"mamba_d_head\": 16, \"mamba_d_state\": 8, \"mamba_n_groups\": 1"
#define HYBRID                                                                                     \
    "{\"model_type\": \"nemotron_h\", " SIZES                                                      \
    "\"num_attention_heads\": 4, \"intermediate_size\": 96, \"mamba_num_heads\": 4, "              \
    "\"mamba_head_dim\": 16, \"ssm_state_size\": 8"

static void invalid_configurations_are_rejected(void **state) {
    (void)state;
    static const struct {
        const char *text;
        dw_status status;
        const char *part;
    } cases[] = {
        {"", DW_PARSE, "config.json: line 1"},
        {"[]", DW_PARSE, "it is an array; expected an object"},
        {"{}", DW_PARSE, "vocab_size is missing"},
        {"{\"model_type\": 3}", DW_PARSE, "model_type is an integer"},
        {"{\"model_type\": \"yi\", \"vocab_size\": 9}", DW_PARSE, "hidden_size is missing"},
        {"{\"model_type\": \"yi\", \"vocab_size\": 9, \"hidden_size\": 8}", DW_PARSE,
         "num_hidden_layers is missing"},
        {"{\"model_type\": \"yi\", " SIZES "\"x\": 1}", DW_PARSE, "num_attention_heads is missing"},
        {YI "}", DW_PARSE, "intermediate_size is missing"},
        {YI ", \"intermediate_size\": 0}", DW_PARSE, "intermediate_size is 0"},
        {YI ", \"intermediate_size\": \"96\"}", DW_PARSE, "intermediate_size is a string"},
        {YI ", \"intermediate_size\": 96.5}", DW_PARSE, "intermediate_size is a real number"},
        {YI ", \"intermediate_size\": 99999999999999999999}", DW_PARSE, "too big integer"},
        {YI FFN ", \"num_key_value_heads\": 3}", DW_PARSE, "expected a multiple"},
        {YI FFN ", \"head_dim\": -1}", DW_PARSE, "head_dim is -1"},
        {YI FFN ", \"tie_word_embeddings\": 1}", DW_PARSE, "tie_word_embeddings is an integer"},
        {YI FFN ", \"attention_bias\": \"yes\"}", DW_PARSE, "attention_bias is a string"},
        {YI FFN ", \"layer_types\": 3}", DW_PARSE, "layer_types is an integer"},
        {YI FFN ", \"layer_types\": [3]}", DW_PARSE, "entry of layer_types is an integer"},
        {YI FFN ", \"layer_types\": [\"linear_attention\"]}", DW_UNSUPPORTED,
         "layer_types has \"linear_attention\""},
        {YI FFN ", \"layer_types\": [\"chunked_attention\"]}", DW_PARSE,
         "attention_chunk_size is missing"},
        {YI FFN ", \"is_encoder_decoder\": true}", DW_UNSUPPORTED, "is_encoder_decoder is true"},
        {YI FFN ", \"num_experts\": 8}", DW_PARSE, "num_experts_per_tok is missing"},
        {YI FFN ", \"num_experts\": 8, \"num_experts_per_tok\": 9}", DW_PARSE,
         "num_experts_per_tok is 9; expected 1 to 8"},
        {MOE ", \"moe_intermediate_size\": 16000000, \"n_shared_experts\": 1000}", DW_PARSE,
         "n_shared_experts is 1000"},
        {MOE ", \"mlp_only_layers\": 3}", DW_PARSE, "mlp_only_layers is an integer"},
        {MOE ", \"decoder_sparse_step\": 0}", DW_PARSE, "decoder_sparse_step is 0"},
        {YI FFN ", \"kv_lora_rank\": 16}", DW_PARSE, "qk_nope_head_dim is missing"},
        {"{\"model_type\": \"t5\", \"is_encoder_decoder\": true}", DW_UNSUPPORTED,
         "is_encoder_decoder"},
        {"{\"model_type\": \"mamba\", \"state_size\": 16}", DW_UNSUPPORTED,
         "\"mamba\": models without attention are not supported"},
        {"{\"model_type\": \"of-tomorrow\", \"state_size\": 16}", DW_UNSUPPORTED, "state_size"},
        {"{\"model_type\": \"whisper\"}", DW_UNSUPPORTED, "an encoder and a decoder"},
        {"{\"model_type\": \"gemma3n_text\"}", DW_UNSUPPORTED,
         "each layer has an embedding of its own"},
        {YI ", \"intermediate_size\": [96, 96, 48, 96]}", DW_PARSE,
         "intermediate_size is an array; expected an integer, or a list of equal ones"},
        {YI ", \"intermediate_size\": []}", DW_PARSE, "intermediate_size is an array"},
        {YI ", \"intermediate_size\": [0, 0, 0, 0]}", DW_PARSE, "intermediate_size has 0"},
        {MIXED("qwen3_next") "}", DW_PARSE, "linear_num_key_heads is missing"},
        {MIXED("bamba") MAMBA "}", DW_UNSUPPORTED, "none of the 4 layers has attention"},
        {MIXED("bamba") MAMBA ", \"attn_layer_indices\": {}}", DW_PARSE,
         "attn_layer_indices is an object"},
        {MIXED("lfm2") ", \"layer_types\": [\"conv\"]}", DW_PARSE,
         "layer_types has 1 entries; expected one for each of 4 layers"},
        {MIXED("lfm2") ", \"layer_types\": [\"conv\", \"conv\", \"dream\", \"conv\"]}",
         DW_UNSUPPORTED, "layer_types has \"dream\""},
        {MIXED("lfm2") ", \"layer_types\": [\"conv\", \"conv\", \"conv\", \"conv\"]}",
         DW_UNSUPPORTED, "none of the 4 layers has attention"},
        {MIXED("jamba") "}", DW_PARSE, "full_attention_interval is missing"},
        {MIXED("lfm2") ", \"full_attn_idxs\": [1], \"block_ffn_dim_multiplier\": \"2\"}", DW_PARSE,
         "block_ffn_dim_multiplier is a string"},
        {MOE ", \"moe_layer_freq\": \"often\"}", DW_PARSE, "moe_layer_freq is a string"},
        {"{\"model_type\": \"bert\", " SIZES "\"num_attention_heads\": 4" FFN "}", DW_PARSE,
         "max_position_embeddings is missing"},
        {"{\"model_type\": \"opt\", " SIZES "\"word_embed_proj_dim\": 32}", DW_UNSUPPORTED,
         "word_embed_proj_dim is 32"},
        {HYBRID "}", DW_PARSE, "hybrid_override_pattern is missing"},
        {HYBRID ", \"hybrid_override_pattern\": \"\"}", DW_PARSE, "has 0 layers"},
        {HYBRID ", \"hybrid_override_pattern\": \"M-X\"}", DW_UNSUPPORTED, "a layer is \"X\""},
        {HYBRID ", \"hybrid_override_pattern\": \"ME\"}", DW_PARSE, "n_routed_experts is missing"},
        {HYBRID ", \"layers_block_type\": {}}", DW_PARSE, "layers_block_type is an object"},
        {HYBRID ", \"layers_block_type\": [1]}", DW_PARSE, "entry of layers_block_type"},
        {"{\"text_config\": {\"model_type\": \"yi\"}}", DW_PARSE, "vocab_size is missing"},
        /* a class that is built reads its own fields */
        {LLAMA ", \"intermediate_size\": 0}", DW_PARSE, "intermediate_size is 0"},
        {LLAMA ", \"intermediate_size\": [96, 96, 96, 96]}", DW_PARSE,
         "intermediate_size is an array"},
        {LLAMA ", \"num_key_value_heads\": 3}", DW_PARSE, "expected a multiple"},
        {LLAMA ", \"head_dim\": 7}", DW_PARSE, "head_dim is 7; rotary positions"},
        {"{\"model_type\": \"llama\", \"num_hidden_layers\": 8193}", DW_PARSE,
         "num_hidden_layers is 8193; expected 1 to 8192"},
        {"{\"model_type\": \"yi\", \"vocab_size\": 9, \"hidden_size\": 8, "
         "\"num_hidden_layers\": 8193}",
         DW_PARSE, "num_hidden_layers is 8193; expected 1 to 8192"},
        {LLAMA ", \"layer_types\": [\"chunked_attention\"]}", DW_PARSE,
         "layer_types has 1 entries; expected one for each of the 4 layers"},
        {"{\"model_type\": \"mistral\"" FFN ", \"num_hidden_layers\": 1, "
         "\"layer_types\": [\"full_attention\"]}",
         DW_UNSUPPORTED, "transformers' MistralForCausalLM does not support"},
        {"{\"model_type\": \"qwen3\", \"head_dim\": null}", DW_PARSE, "head_dim is missing"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 12, \"num_hidden_layers\": 13}", DW_PARSE,
         "n_layer is 12 and num_hidden_layers is 13"},
    };
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_model_sizes model, before;
        memset(&model, 0x5a, sizeof model);
        before = model;
        int64_t live = dw__memory_live();
        dw_status status = dw_model_sizes_parse(cases[at].text, strlen(cases[at].text), &model);
        if (status != cases[at].status || !strstr(dw_last_error(), cases[at].part))
            print_error("%s: %d \"%s\"\n", cases[at].text, status, dw_last_error());
        assert_int_equal(status, cases[at].status);
        assert_non_null(strstr(dw_last_error(), cases[at].part));
        expect_same_sizes(&model, &before);
        assert_int_equal(dw__memory_live(), live);
    }
    assert_int_equal(dw_model_sizes_parse(NULL, 0, NULL), DW_INVALID_ARGUMENT);
}

/* Absent fields have the class's defaults, which are its first model's, and fields that it does not read change
 * nothing. */
static void built_families_are_read_as_their_classes_read_them(void **state) {
    (void)state;
    static const struct {
        const char *text, *name;
    } cases[] = {
        {"{\"model_type\": \"gpt2\"}", "gpt2"},
        {"{\"model_type\": \"llama\"}", "llama2-7b"},
        {"{\"model_type\": \"mistral\"}", "mistral-7b"},
        {"{\"model_type\": \"mistral\", \"sliding_window\": null}", "mistral-7b-v0.2"},
        {"{\"model_type\": \"llama\", \"num_experts\": 8, \"num_experts_per_tok\": 2, "
         "\"kv_lora_rank\": 16, \"v_head_dim\": 64, \"sliding_window\": 7, \"n_embd\": 9, "
         "\"padded_vocab_size\": 32064, \"qk_layernorm\": false, \"text_config\": {}}",
         "llama2-7b"},
        {"{\"model_type\": \"gpt2\", \"head_dim\": 3, \"num_key_value_heads\": 1}", "gpt2"},
        {"{\"model_type\": \"llava\", \"text_config\": {\"model_type\": \"llama\"}}", "llama2-7b"},
    };
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_model_sizes read, named;
        assert_ok(dw_model_sizes_parse(cases[at].text, strlen(cases[at].text), &read));
        assert_ok(dw_model_sizes_named(cases[at].name, &named));
        expect_same_sizes(&read, &named);
    }
    static const char qwen3[] = "{\"model_type\": \"qwen3\", \"use_sliding_window\": true}";
    dw_model_sizes model;
    assert_ok(dw_model_sizes_parse(qwen3, strlen(qwen3), &model));
    assert_int_equal(model.kv_heads, 32);
    assert_int_equal(model.head_dim, 128);
    assert_int_equal(model.window, 4096);
    assert_int_equal(model.window_layers, 4); /* all but the first 28 */
}

static void keep_line(void *context, int level, const char *line) {
    assert_int_equal(level, 2);
    snprintf(context, 256, "%s", line);
}

static void assumptions_are_logged(void **state) {
    (void)state;
    static const char unknown[] =
        "{\"model_type\": \"ferret\", " SIZES "\"num_attention_heads\": 4" FFN "}";
    static const char known[] = LLAMA FFN "}";
    static const char nested[] = "{\"vision_config\": {}, \"text_config\": " LLAMA FFN "}}";
    char line[256] = "";
    dw_model_sizes a, b, c;
    dw_log_set_sink(keep_line, line, 2);
    assert_ok(dw_model_sizes_parse(known, strlen(known), &a));
    assert_string_equal(line, "");
    assert_ok(dw_model_sizes_parse(unknown, strlen(unknown), &b));
    assert_non_null(strstr(line, "\"ferret\" is unknown"));
    assert_ok(dw_model_sizes_parse(nested, strlen(nested), &c));
    assert_non_null(strstr(line, "only text_config is planned"));
    dw_log_set_sink(NULL, NULL, 0);
    expect_same_sizes(&a, &b);
    expect_same_sizes(&a, &c);
}

static void windows_follow_the_configuration(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int window, layers;
    } cases[] = {
        {LLAMA FFN ", \"sliding_window\": 8}", 0, 0}, /* the class does not read it */
        {"{\"model_type\": \"mistral\", " SIZES GROUPED FFN ", \"sliding_window\": 8}", 8, 4},
        {"{\"model_type\": \"mistral\", " SIZES GROUPED FFN ", \"sliding_window\": null}", 0, 0},
        {"{\"model_type\": \"gemma2\", " SIZES "\"num_attention_heads\": 4" FFN
         ", \"sliding_window\": 8}",
         8, 2},
        {"{\"model_type\": \"gemma3_text\", " SIZES "\"num_attention_heads\": 4" FFN
         ", \"sliding_window\": 8, \"layer_types\": [\"sliding_attention\", \"full_attention\", "
         "\"sliding_attention\", \"sliding_attention\"]}",
         8, 3},
        {"{\"model_type\": \"gemma3_text\", " SIZES "\"num_attention_heads\": 4" FFN
         ", \"sliding_window\": 8, \"sliding_window_pattern\": 4}",
         8, 3},
        {"{\"model_type\": \"qwen2\", " SIZES "\"num_attention_heads\": 4" FFN
         ", \"sliding_window\": 8}",
         0, 0},
        {"{\"model_type\": \"qwen2\", " SIZES "\"num_attention_heads\": 4" FFN
         ", \"sliding_window\": 8, \"use_sliding_window\": true, \"max_window_layers\": 3}",
         8, 1},
    };
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_model_sizes model;
        assert_ok(dw_model_sizes_parse(cases[at].text, strlen(cases[at].text), &model));
        assert_int_equal(model.window, cases[at].window);
        assert_int_equal(model.window_layers, cases[at].layers);
    }
}

/* Only some layers have attention, in every spelling of the configuration; the operations follow it. */
static void layers_without_attention(void **state) {
    (void)state;
#define DELTA                                                                                      \
    ", \"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, \"linear_key_head_dim\": 8, "   \
    "\"linear_value_head_dim\": 8"
    static const struct {
        const char *text;
        int attentions, window, window_layers;
    } cases[] = {
        /* Every fourth layer, unless the configuration states it. */
        {MIXED("qwen3_next") DELTA "}", 1, 0, 0},
        {MIXED("qwen3_next") DELTA ", \"full_attention_interval\": 2}", 2, 0, 0},
        {MIXED("qwen3_next") DELTA ", \"layer_types\": [\"full_attention\", \"full_attention\", "
                                   "\"linear_attention\", \"full_attention\"]}",
         3, 0, 0},
        {MIXED("jamba") ", \"attn_layer_period\": 3, \"attn_layer_offset\": 0}", 2, 0, 0},
        {MIXED("jamba") ", \"attn_layer_period\": 8, \"attn_layer_offset\": 3}", 1, 0, 0},
        {MIXED("bamba") MAMBA ", \"attn_layer_indices\": [2]}", 1, 0, 0},
        {MIXED("lfm2") ", \"full_attn_idxs\": [0, 1, 2]}", 3, 0, 0},
        {MIXED("lfm2") ", \"full_attn_idxs\": [0, 1, 2, 3]}", 0, 0, 0}, /* all layers */
        {MIXED("minimax_text_01") ", \"attn_type_list\": [0, 0, 0, 1]}", 1, 0, 0},
        {MIXED("kimi_linear") ", \"linear_attn_config\": {\"full_attn_layers\": [4], "
                              "\"num_heads\": 4, \"head_dim\": 16}}",
         1, 0, 0},
        {MIXED("falcon_h1") MAMBA "}", 0, 0, 0}, /* in every layer, besides attention */
        {MIXED(
             "recurrent_gemma") ", \"block_types\": [\"recurrent\", \"recurrent\", \"attention\"], "
                                "\"attention_window_size\": 32}",
         1, 32, 4},
    };
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_model_sizes model, all;
        assert_ok(dw_model_sizes_parse(cases[at].text, strlen(cases[at].text), &model));
        assert_int_equal(model.attention_layers, cases[at].attentions);
        assert_int_equal(model.window, cases[at].window);
        assert_int_equal(model.window_layers, cases[at].window_layers);
        if (!model.attention_layers) continue;
        dw_planner_work some, every;
        dw_planner_model_work(&model, 2, 100, &some);
        all = model, all.attention_layers = model.layers;
        dw_planner_model_work(&all, 2, 100, &every);
        assert_float_equal(some.attention * model.layers / model.attention_layers, every.attention,
                           1e-6 * every.attention);
        assert_true(some.gemm == every.gemm); /* as stated, mixers included */
        assert_float_equal(some.gemm, 2 * 200 * (model.active - 2.0 * model.layers * model.hidden),
                           1);
    }
}

/* As a sequence grows past its window, nothing jumps, and the pairs are a sum over tokens. */
static void windows_limit_the_visible_pairs(void **state) {
    (void)state;
    static const char text[] =
        "{\"model_type\": \"mistral\", " SIZES GROUPED FFN ", \"sliding_window\": 64}";
    dw_model_sizes model;
    assert_ok(dw_model_sizes_parse(text, strlen(text), &model));
    for (int length = 1; length < 300; length += 7) {
        dw_planner_work work;
        double pairs = 0;
        for (int token = 0; token < length; token++) pairs += token + 1 < 64 ? token + 1 : 64;
        dw_planner_model_work(&model, 1, length, &work);
        double each = 2.0 * model.layers * model.heads * 2 * model.head_dim;
        /* a token's pair with itself counts half */
        double off = pairs - work.attention / each;
        assert_float_equal(off, (length < 64 ? length : 64) / 2.0, 1e-6 * pairs);
    }
}

/* ---- files ----------------------------------------------------------------------------------------------------- */

static void paths_come_before_names(void **state) {
    (void)state;
    char folder[64] = "/tmp/deepwell-XXXXXX", file[128];
    static const char text[] = LLAMA FFN "}";
    dw_model_sizes model, named;
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/config.json", folder);
    assert_int_equal(dw_model_sizes_load(folder, &model), DW_IO);
    assert_int_equal(dw_model_sizes_find(folder, &model), DW_IO);
    FILE *out = fopen(file, "w");
    assert_non_null(out);
    fputs(text, out);
    fclose(out);
    assert_ok(dw_model_sizes_load(folder, &model));
    assert_int_equal(model.ffn, 96);
    assert_ok(dw_model_sizes_find(file, &model));
    assert_int_equal(model.ffn, 96);
    out = fopen(file, "w");
    fputs("{\"model_type\": \"yi\"}", out);
    fclose(out);
    assert_int_equal(dw_model_sizes_load(file, &model), DW_PARSE);
    assert_non_null(strstr(dw_last_error(), file));
    assert_non_null(strstr(dw_last_error(), "vocab_size is missing"));
    unlink(file);
    rmdir(folder);
    assert_ok(dw_model_sizes_find("gpt2", &model));
    assert_ok(dw_model_sizes_named("gpt2", &named));
    expect_same_sizes(&model, &named);
    assert_int_equal(dw_model_sizes_find("no-such-thing", &model), DW_NOT_FOUND);
    assert_int_equal(dw_model_sizes_load("/nowhere", &model), DW_IO);
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    dw_model_sizes model;
    int64_t live = dw__memory_live(), count = 0;
    dw_status status = DW_OUT_OF_MEMORY;
    for (; status != DW_OK; count++) {
        assert_true(count < 1000);
        dw__memory_fail_after(count);
        status = dw_model_sizes_named("deepseek-v3", &model);
        dw__memory_fail_after(-1);
        if (status != DW_OK) assert_int_equal(status, DW_OUT_OF_MEMORY);
        assert_int_equal(dw__memory_live(), live);
    }
    assert_true(count > 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_model_has_its_published_size),
        cmocka_unit_test(widths_make_the_total),
        cmocka_unit_test(engine_and_planner_read_the_same_sizes),
        cmocka_unit_test(names_are_found_in_any_spelling),
        cmocka_unit_test(unknown_names_get_suggestions),
        cmocka_unit_test(invalid_configurations_are_rejected),
        cmocka_unit_test(built_families_are_read_as_their_classes_read_them),
        cmocka_unit_test(assumptions_are_logged),
        cmocka_unit_test(windows_follow_the_configuration),
        cmocka_unit_test(layers_without_attention),
        cmocka_unit_test(windows_limit_the_visible_pairs),
        cmocka_unit_test(paths_come_before_names),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
