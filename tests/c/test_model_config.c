/* config.json: the configurations that Deepwell builds, and one message for every other one. */
#include "base/base.h"
#include "deepwell/model.h"
#include "same_model_sizes.h"

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

static void expect_refused(const char *text, size_t bytes, dw_status expected, const char *part) {
    dw_model_config *config = NULL;
    int64_t live = dw__memory_live();
    dw_status status = dw_model_config_parse(text, bytes, &config);
    if (status != expected || !strstr(dw_last_error(), part))
        print_error("%.200s: \"%s\" does not have \"%s\"\n", text,
                    status ? dw_last_error() : "no failure", part);
    assert_int_equal(status, expected);
    assert_non_null(strstr(dw_last_error(), part));
    assert_null(config);
    assert_int_equal(dw__memory_live(), live);
}

/* ---- rejected configurations --------------------------------------------------------------- */

#define GPT2 "{\"model_type\": \"gpt2\", "
#define LLAMA "{\"model_type\": \"llama\", "
#define QWEN3 "{\"model_type\": \"qwen3\", "
#define MISTRAL "{\"model_type\": \"mistral\", "
#define ROPE LLAMA "\"rope_parameters\": "

static void invalid_configurations_are_rejected(void **state) {
    (void)state;
    static const struct {
        const char *text;
        dw_status status;
        const char *part;
    } cases[] = {
        {"", DW_PARSE, "config.json: line 1"},
        {"\xEF\xBB\xBF{}", DW_PARSE, "config.json: line 1"},
        {"{", DW_PARSE, "config.json: line 1"},
        {"nonsense", DW_PARSE, "config.json: line 1"},
        {"[]", DW_PARSE, "it is an array; expected an object"},
        {"3", DW_PARSE, "config.json"},
        {"{}", DW_PARSE, "model_type is missing"},
        {"{\"model_type\": null}", DW_PARSE, "model_type is missing"},
        {"{\"model_type\": 3}", DW_PARSE, "model_type is an integer; expected a string"},
        {"{\"model_type\": \"\\u001b[2J\"}", DW_PARSE, "model_type has control characters"},
        {"{\"model_type\": \"mamba\"}", DW_UNSUPPORTED, "model_type is \"mamba\""},
        {GPT2 "\"model_type\": \"gpt2\"}", DW_PARSE, "duplicate object key"},
        /* other models of the same type */
        {GPT2 "\"architectures\": [\"GPT2ForSequenceClassification\"]}", DW_UNSUPPORTED,
         "architectures has \"GPT2ForSequenceClassification\"; expected GPT2LMHeadModel"},
        {GPT2 "\"architectures\": \"GPT2LMHeadModel\"}", DW_PARSE, "architectures is a string"},
        {GPT2 "\"architectures\": [7]}", DW_PARSE, "entry of architectures is an integer"},
        {GPT2 "\"add_cross_attention\": true}", DW_UNSUPPORTED, "add_cross_attention is true"},
        {GPT2 "\"is_encoder_decoder\": true}", DW_UNSUPPORTED, "is_encoder_decoder is true"},
        {LLAMA "\"is_causal\": false}", DW_UNSUPPORTED, "is_causal is false"},
        {LLAMA "\"quantization_config\": {\"quant_method\": \"fp8\"}}", DW_UNSUPPORTED,
         "quantization_config is an object: models with quantized weights are not supported; save"},
        {LLAMA "\"auto_map\": {\"AutoConfig\": \"x.y\"}}", DW_UNSUPPORTED,
         "auto_map is an object: models with code of their own are not supported; train"},
        {GPT2 "\"pruned_heads\": {\"0\": [1]}}", DW_UNSUPPORTED, "pruned_heads names 1 layers"},
        /* sizes */
        {GPT2 "\"n_layer\": \"12\"}", DW_PARSE, "n_layer is a string; expected an integer"},
        {GPT2 "\"n_layer\": 12.0}", DW_PARSE, "n_layer is a real number"},
        {GPT2 "\"n_layer\": 0}", DW_PARSE, "n_layer is 0; expected 1 to"},
        {GPT2 "\"n_layer\": -1}", DW_PARSE, "n_layer is -1"},
        {GPT2 "\"n_layer\": 1000000000}", DW_PARSE, "n_layer is 1000000000"},
        {GPT2 "\"n_layer\": 99999999999999999999}", DW_PARSE, "too big integer"},
        {GPT2 "\"n_layer\": true}", DW_PARSE, "n_layer is a boolean"},
        {GPT2 "\"n_layer\": [12]}", DW_PARSE, "n_layer is an array"},
        {GPT2 "\"n_layer\": 12, \"num_hidden_layers\": 13}", DW_PARSE,
         "n_layer is 12 and num_hidden_layers is 13"},
        {GPT2 "\"n_embd\": 100, \"n_head\": 12}", DW_PARSE, "n_embd is 100 and n_head is 12"},
        {GPT2 "\"vocab_size\": 0}", DW_PARSE, "vocab_size is 0"},
        {GPT2 "\"n_inner\": 0}", DW_PARSE, "n_inner is 0"},
        {LLAMA "\"hidden_size\": 100}", DW_PARSE,
         "hidden_size is 100 and num_attention_heads is 32"},
        {LLAMA "\"num_key_value_heads\": 5}", DW_PARSE, "num_key_value_heads is 5"},
        {LLAMA "\"num_attention_heads\": 8, \"num_key_value_heads\": 16}", DW_PARSE,
         "expected a multiple"},
        {LLAMA "\"head_dim\": 7}", DW_PARSE, "head_dim is 7; rotary positions need an even"},
        {QWEN3 "\"head_dim\": null}", DW_PARSE, "head_dim is missing"},
        {LLAMA
         "\"hidden_size\": 16777216, \"intermediate_size\": 16777216, \"head_dim\": 16777216, "
         "\"num_attention_heads\": 16777216, \"num_key_value_heads\": 16777216}",
         DW_PARSE, "more than 2^48 weights"},
        {LLAMA "\"hidden_size\": 16777216, \"intermediate_size\": 16777216}", DW_PARSE,
         "more than 2^48 weights"},
        /* numbers, flags, activations */
        {LLAMA "\"rms_norm_eps\": -1e-6}", DW_PARSE, "rms_norm_eps is -1e-06; expected 0 to 1"},
        {LLAMA "\"rms_norm_eps\": \"1e-6\"}", DW_PARSE, "rms_norm_eps is a string"},
        {LLAMA "\"rms_norm_eps\": 1e999}", DW_PARSE, "real number overflow"},
        {LLAMA "\"rms_norm_eps\": NaN}", DW_PARSE, "config.json: line 1"},
        {GPT2 "\"resid_pdrop\": 1.0}", DW_PARSE, "resid_pdrop is 1; expected 0 to"},
        {GPT2 "\"attn_pdrop\": -0.1}", DW_PARSE, "attn_pdrop is -0.1"},
        {GPT2 "\"initializer_range\": 2}", DW_PARSE, "initializer_range is 2"},
        {GPT2 "\"tie_word_embeddings\": 1}", DW_PARSE, "tie_word_embeddings is an integer"},
        {GPT2 "\"scale_attn_weights\": \"true\"}", DW_PARSE, "scale_attn_weights is a string"},
        {GPT2 "\"activation_function\": \"mish\"}", DW_UNSUPPORTED,
         "activation_function is \"mish\"; Deepwell builds"},
        {LLAMA "\"hidden_act\": 3}", DW_PARSE, "hidden_act is an integer"},
        {LLAMA "\"pad_token_id\": 32000}", DW_PARSE, "pad_token_id is 32000"},
        {LLAMA "\"pad_token_id\": -32001}", DW_PARSE, "pad_token_id is -32001"},
        {LLAMA "\"pad_token_id\": \"0\"}", DW_PARSE, "pad_token_id is a string"},
        /* rotary positions */
        {ROPE "3}", DW_PARSE, "rope_parameters is an integer"},
        {ROPE "{\"rope_type\": \"yarn\", \"factor\": 4.0}}", DW_UNSUPPORTED,
         "rope_type is \"yarn\"; Deepwell builds default, linear and llama3"},
        {ROPE "{\"rope_type\": \"dynamic\"}}", DW_UNSUPPORTED, "rope_type is \"dynamic\""},
        {ROPE "{\"rope_type\": 4}}", DW_PARSE, "rope_type is an integer"},
        {ROPE "{\"rope_type\": \"linear\"}}", DW_PARSE, "factor is missing"},
        {ROPE "{\"rope_type\": \"linear\", \"factor\": 0}}", DW_PARSE, "factor is 0"},
        {ROPE "{\"rope_type\": \"llama3\", \"factor\": 8.0}}", DW_PARSE,
         "low_freq_factor is missing"},
        {ROPE "{\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 4.0, "
              "\"high_freq_factor\": 4.0}}",
         DW_PARSE, "high_freq_factor is 4 and low_freq_factor is 4"},
        {ROPE "{\"full_attention\": {\"rope_type\": \"default\"}}}", DW_UNSUPPORTED,
         "rope_parameters has an object \"full_attention\""},
        {ROPE "{\"rope_type\": \"default\", \"partial_rotary_factor\": 0.5}}", DW_UNSUPPORTED,
         "partial_rotary_factor is 0.5"},
        {LLAMA "\"rope_theta\": 0}", DW_PARSE, "rope_theta is 0"},
        {LLAMA "\"rope_scaling\": \"linear\"}", DW_PARSE, "rope_scaling is a string"},
        {LLAMA "\"rope_scaling\": {\"type\": \"ntk\"}}", DW_UNSUPPORTED, "rope_type is \"ntk\""},
        {LLAMA
         "\"rope_scaling\": {\"type\": \"default\"}, \"rope_parameters\": {\"rope_theta\": 3.0}}",
         DW_PARSE, "rope_scaling and rope_parameters differ"},
        /* windows */
        {MISTRAL "\"sliding_window\": 0}", DW_PARSE, "sliding_window is 0"},
        {MISTRAL "\"sliding_window\": \"all\"}", DW_PARSE, "sliding_window is a string"},
        {QWEN3 "\"layer_types\": 3}", DW_PARSE, "layer_types is an integer"},
        {QWEN3 "\"num_hidden_layers\": 1, \"layer_types\": [\"linear_attention\"]}", DW_UNSUPPORTED,
         "layer_types has \"linear_attention\""},
        {QWEN3 "\"num_hidden_layers\": 1, \"layer_types\": [1]}", DW_PARSE,
         "entry of layer_types is an integer"},
        {QWEN3 "\"num_hidden_layers\": 2, \"layer_types\": [\"full_attention\"]}", DW_PARSE,
         "layer_types has 1 entries; expected one for each of the 2 layers"},
        {QWEN3 "\"num_hidden_layers\": 1, \"layer_types\": [\"sliding_attention\"]}", DW_PARSE,
         "and there is no sliding_window"},
        {MISTRAL "\"num_hidden_layers\": 1, \"layer_types\": [\"full_attention\"]}", DW_UNSUPPORTED,
         "which transformers' MistralForCausalLM does not support"},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++)
        expect_refused(cases[i].text, strlen(cases[i].text), cases[i].status, cases[i].part);
    expect_refused("{\"model_type\": \"gpt2\0\"}", 23, DW_PARSE, "config.json: line 1");
    dw_model_config *config = NULL;
    assert_int_equal(dw_model_config_parse(NULL, 0, &config), DW_INVALID_ARGUMENT);
}

/* Any field of any kind is read, or rejected by name. */
static void every_field_of_every_kind(void **state) {
    (void)state;
    static const char *const fields[] = {"model_type",
                                         "architectures",
                                         "vocab_size",
                                         "hidden_size",
                                         "n_embd",
                                         "n_layer",
                                         "n_head",
                                         "num_hidden_layers",
                                         "num_attention_heads",
                                         "num_key_value_heads",
                                         "head_dim",
                                         "n_inner",
                                         "intermediate_size",
                                         "max_position_embeddings",
                                         "n_positions",
                                         "rope_theta",
                                         "rope_scaling",
                                         "rope_parameters",
                                         "sliding_window",
                                         "use_sliding_window",
                                         "max_window_layers",
                                         "layer_types",
                                         "attention_bias",
                                         "mlp_bias",
                                         "tie_word_embeddings",
                                         "hidden_act",
                                         "activation_function",
                                         "rms_norm_eps",
                                         "layer_norm_epsilon",
                                         "initializer_range",
                                         "attention_dropout",
                                         "resid_pdrop",
                                         "embd_pdrop",
                                         "attn_pdrop",
                                         "pad_token_id",
                                         "scale_attn_weights",
                                         "scale_attn_by_inverse_layer_idx",
                                         "is_causal",
                                         "auto_map",
                                         "quantization_config",
                                         "partial_rotary_factor",
                                         "original_max_position_embeddings",
                                         "pruned_heads",
                                         "something_else"};
    static const char *const values[] = {"null",
                                         "true",
                                         "false",
                                         "0",
                                         "1",
                                         "2",
                                         "-1",
                                         "9223372036854775807",
                                         "-9223372036854775808",
                                         "0.5",
                                         "-0.0",
                                         "1e308",
                                         "1e-320",
                                         "\"\"",
                                         "\"x\"",
                                         "[]",
                                         "{}",
                                         "[null]",
                                         "[[]]",
                                         "{\"rope_type\": \"llama3\"}",
                                         "{\"\": {}}",
                                         "[\"full_attention\"]",
                                         "4096",
                                         "16777216"};
    static const char *const families[] = {"gpt2", "llama", "qwen3", "mistral"};
    int64_t live = dw__memory_live();
    int accepted = 0, refused = 0;
    for (size_t i = 0; i < DW_COUNT(families) * DW_COUNT(fields) * DW_COUNT(values); i++) {
        const char *family = families[i % DW_COUNT(families)];
        const char *field = fields[i / DW_COUNT(families) % DW_COUNT(fields)];
        const char *value = values[i / DW_COUNT(families) / DW_COUNT(fields)];
        bool type = strcmp(field, "model_type") == 0;
        char text[256];
        int length = type ? snprintf(text, sizeof text, "{\"model_type\": %s}", value)
                          : snprintf(text, sizeof text, "{\"model_type\": \"%s\", \"%s\": %s}",
                                     family, field, value);
        dw_model_config *config = NULL;
        dw_status status = dw_model_config_parse(text, (size_t)length, &config);
        if (status == DW_OK) {
            dw_model_info info;
            dw_model_describe(config, &info);
            double elements = 0;
            for (uint32_t p = 0; p < dw_model_parameter_count(config); p++) {
                dw_model_parameter parameter;
                dw_model_parameter_at(config, p, &parameter);
                elements += (double)parameter.count;
            }
            assert_true(elements == info.sizes.parameters && info.sizes.head_dim > 0);
            dw_model_sizes sizes;
            assert_ok(dw_model_sizes_parse(text, (size_t)length, &sizes));
            expect_same_sizes(&sizes, &info.sizes);
            accepted++;
        } else {
            assert_true(status == DW_PARSE || status == DW_UNSUPPORTED);
            assert_true(strlen(dw_last_error()) > strlen("config.json: "));
            refused++;
        }
        dw_model_config_destroy(config);
    }
    assert_true(accepted > 1000 && refused > 1000);
    assert_int_equal(dw__memory_live(), live);
}

static void nesting_without_end_is_rejected(void **state) {
    (void)state;
    enum { BYTES = 3000000 };
    char *text = malloc(BYTES + 1);
    text[BYTES] = '\0';
    memset(text, '[', BYTES);
    expect_refused(text, BYTES, DW_PARSE, "within one another; expected at most 32");
    for (size_t i = 0; i + 5 <= BYTES; i += 5) memcpy(text + i, "{\"a\":", 5);
    expect_refused(text, BYTES, DW_PARSE, "within one another; expected at most 32");
    memset(text, ',', BYTES);
    expect_refused(text, BYTES, DW_PARSE, "values");
    free(text);
}

/* ---- paths --------------------------------------------------------------------------------- */

static void invalid_paths_are_rejected(void **state) {
    (void)state;
    char folder[64], path[128];
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%.40s/deepwell-XXXXXX", parent && *parent ? parent : "/tmp");
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/config.json", folder);
    dw_model_config *config = NULL;

    assert_int_equal(dw_model_config_load(folder, &config), DW_IO);
    assert_non_null(strstr(dw_last_error(), "config.json\": No such file"));
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(dw_model_config_load(folder, &config), DW_IO); /* config.json/config.json */
    rmdir(path);
    assert_int_equal(symlink("config.json", path), 0);
    assert_int_equal(dw_model_config_load(folder, &config), DW_IO);
    assert_non_null(strstr(dw_last_error(), "symbolic links"));
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(dw_model_config_load(folder, &config), DW_IO);
    assert_non_null(strstr(dw_last_error(), "a device or a pipe"));
    unlink(path);
    assert_ok(dw__file_write(path, "", 0));
    assert_int_equal(dw_model_config_load(folder, &config), DW_PARSE);
    assert_non_null(strstr(dw_last_error(), path));
    assert_int_equal(truncate(path, 1 << 25), 0); /* a sparse file, which is not a configuration */
    assert_int_equal(dw_model_config_load(folder, &config), DW_PARSE);
    assert_non_null(strstr(dw_last_error(), "more than 16777216 bytes"));
    if (geteuid() != 0) {
        assert_int_equal(chmod(path, 0), 0);
        assert_int_equal(dw_model_config_load(folder, &config), DW_IO);
        assert_non_null(strstr(dw_last_error(), "Permission denied"));
    }
    assert_null(config);
    unlink(path);
    rmdir(folder);
}

/* A configuration truncated at any byte is rejected. */
static const char whole[] =
    "{\"model_type\": \"qwen3\", \"vocab_size\": 11, \"hidden_size\": 8, \"intermediate_size\": "
    "12, "
    "\"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "
    "\"head_dim\": 4, \"use_sliding_window\": true, \"sliding_window\": 3, "
    "\"layer_types\": [\"full_attention\", \"sliding_attention\"], \"attention_dropout\": 0.1, "
    "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, "
    "\"high_freq_factor\": 4.0, \"rope_theta\": 500.0}}";

static void truncated_configurations_are_rejected(void **state) {
    (void)state;
    dw_model_config *config = NULL;
    for (size_t bytes = 0; bytes < strlen(whole); bytes++)
        expect_refused(whole, bytes, DW_PARSE, "config.json: ");
    assert_ok(dw_model_config_parse(whole, strlen(whole), &config));
    dw_model_config_destroy(config);
}

/* ---- accepted configurations --------------------------------------------------------------- */

static void options_are_checked(void **state) {
    (void)state;
    dw_model_config *config = NULL;
    dw_graph *graph = NULL;
    assert_ok(dw_model_config_parse(whole, strlen(whole), &config));
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    options.struct_size = 3;
    assert_int_equal(dw_model_graph(config, &options, &graph), DW_INVALID_ARGUMENT);
    options = (dw_model_graph_options)DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    options.output = (dw_model_output)7;
    assert_int_equal(dw_model_graph(config, &options, &graph), DW_INVALID_ARGUMENT);
    options = (dw_model_graph_options)DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    options.dtype = DW_F16;
    assert_int_equal(dw_model_graph(config, &options, &graph), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "f16"));
    assert_int_equal(dw_model_graph(NULL, NULL, &graph), DW_INVALID_ARGUMENT);
    assert_null(graph);
    dw_model_config_destroy(config);
}

static void parameters_are_the_graphs_first_leaves(void **state) {
    (void)state;
    static const char *const names[] = {
        "gpt2",       "gpt2-medium", "gpt2-large",  "gpt2-xl",   "llama3-8b",      "llama3-70b",
        "qwen3-0.6b", "qwen3-1.7b",  "llama3-405b", "qwen3-4b",  "qwen3-8b",       "mistral-7b",
        "gpt3-175b",  "llama2-70b",  "llama3.2-1b", "qwen3-32b", "mistral-7b-v0.3"};
    for (size_t i = 0; i < DW_COUNT(names); i++) {
        dw_model_config *config = NULL;
        dw_graph *graph = NULL;
        dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
        options.output = DW_MODEL_LOSS;
        assert_ok(dw_model_config_named(names[i], &config));
        assert_ok(dw_model_graph(config, &options, &graph));
        assert_ok(dw_graph_verify(graph));
        uint32_t count = dw_model_parameter_count(config);
        assert_int_equal(dw_graph_leaf_count(graph), count + 2);
        for (uint32_t p = 0; p < count; p++) {
            dw_model_parameter parameter;
            dw_model_parameter_at(config, p, &parameter);
            dw_value leaf = dw_graph_leaf_at(graph, p);
            assert_string_equal(dw_value_name(graph, leaf), parameter.name);
            assert_int_equal(dw_value_role(graph, leaf), DW_ROLE_PARAMETER);
            assert_int_equal(dw_value_rank(graph, leaf), parameter.rank);
        }
        dw_graph_destroy(graph);
        dw_model_config_destroy(config);
    }
}

/* Names in any spelling; a name that is not built says so, and an unknown one lists similar names. */
static void names_of_the_catalogue(void **state) {
    (void)state;
    dw_model_config *config = NULL;
    assert_ok(dw_model_config_named("meta-llama/Llama-3.1-8B", &config));
    dw_model_config_destroy(config);
    config = NULL;
    assert_int_equal(dw_model_config_named("Mixtral-8x7B", &config), DW_UNSUPPORTED);
    assert_non_null(
        strstr(dw_last_error(), "\"mixtral-8x7b\": config.json: model_type is \"mixtral\""));
    assert_int_equal(dw_model_config_named("qwen3-9b", &config), DW_NOT_FOUND);
    assert_non_null(strstr(dw_last_error(), "similar names: qwen3-"));
    assert_int_equal(dw_model_config_named(NULL, &config), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_model_config_find("/nowhere", &config), DW_NOT_FOUND);
    assert_int_equal(dw_model_config_find("/", &config), DW_IO); /* a folder without config.json */
    assert_int_equal(dw_model_config_find(NULL, &config), DW_INVALID_ARGUMENT);
    assert_null(config);
    assert_ok(dw_model_config_find("gpt2", &config));
    char *text = NULL;
    assert_ok(dw_model_config_json(config, &text));
    assert_non_null(strstr(text, "\"n_embd\": 768"));
    dw_text_free(text);
    assert_int_equal(dw_model_config_json(NULL, &text), DW_INVALID_ARGUMENT);
    dw_model_config_destroy(config);
    config = NULL;
    assert_null(config);
    assert_null(dw_model_catalogue_name(dw_model_catalogue_count()));
    assert_null(dw_model_catalogue_source(UINT32_MAX));
}

/* ---- memory -------------------------------------------------------------------------------- */

static void remove_model(const char *folder) {
    char path[128];
    snprintf(path, sizeof path, "%s/model", folder);
    assert_ok(dw__folder_remove(path));
}

/* Calls every function of this layer, in a folder. */
static bool run_everything(const char *folder) {
    dw_model_config *config = NULL, *again = NULL, *named = NULL;
    dw_graph *graph = NULL;
    float *weights[64] = {0};
    char path[128];
    dw_status status = DW_OK;
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    dw_model_save_options saving = DW_MODEL_SAVE_OPTIONS_DEFAULT;
    options.output = DW_MODEL_LOSS;
    options.dropout = 1;
    saving.shard_bytes = 1000;
    saving.source = folder;
    snprintf(path, sizeof path, "%s/model", folder);
    DW_TRY(dw_model_config_parse(whole, strlen(whole), &config));
    for (uint32_t i = 0; i < dw_model_parameter_count(config); i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(config, i, &parameter);
        weights[i] = malloc((size_t)parameter.count * sizeof(float));
    }
    DW_TRY(dw_model_config_named("qwen3-0.6b", &named));
    DW_TRY(dw_model_graph(config, &options, &graph));
    DW_TRY(dw_model_init(config, 3, weights));
    DW_TRY(dw_model_save(config, path, &saving, (const float *const *)weights));
    DW_TRY(dw_model_config_load(path, &again));
    DW_TRY(dw_model_load(again, path, NULL, weights));
cleanup:
    dw__memory_fail_after(-1);
    if (status != DW_OK) {
        if (status != DW_OUT_OF_MEMORY) print_error("%s\n", dw_last_error());
        assert_int_equal(status, DW_OUT_OF_MEMORY);
        assert_true(dw_last_error()[0] != '\0');
    }
    dw_model_config_destroy(config);
    dw_model_config_destroy(again);
    dw_model_config_destroy(named);
    dw_graph_destroy(graph);
    for (size_t i = 0; i < DW_COUNT(weights); i++) free(weights[i]);
    return status == DW_OK;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    enum { ENOUGH = 100000 };
    char folder[64];
    /* In memory if possible, because thousands of folders are synced. */
    const char *parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(folder, sizeof folder, "%s/deepwell-XXXXXX", parent);
    assert_non_null(mkdtemp(folder));
    int64_t live = dw__memory_live(), count = 0;
    for (bool done = false; !done; count++) {
        assert_true(count < ENOUGH);
        dw__memory_fail_after(count);
        done = run_everything(folder);
        assert_int_equal(dw__memory_live(), live);
        remove_model(folder);
    }
    assert_true(count > 200);
    assert_int_equal(rmdir(folder), 0); /* no temporary folder remains */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(invalid_configurations_are_rejected),
        cmocka_unit_test(every_field_of_every_kind),
        cmocka_unit_test(nesting_without_end_is_rejected),
        cmocka_unit_test(invalid_paths_are_rejected),
        cmocka_unit_test(truncated_configurations_are_rejected),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(parameters_are_the_graphs_first_leaves),
        cmocka_unit_test(names_of_the_catalogue),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
