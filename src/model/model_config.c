/* config.json -> dw_model_config.
 *
 * The function that a model computes depends on the fields that transformers' class of that model_type reads. The
 * reader of sizes reads some of them (model_reader.h); each of the others is read here with the class's default, or
 * rejected with its value if Deepwell does not build that case. Fields that the class does not read (token ids for
 * generation, versions, ...) are ignored. */
#include "model/model_internal.h"
#include "model/model_reader.h"
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { CONFIG_MOST = 1 << 24 }; /* bytes of a config.json */

static dw_status read_dropout(const json_t *json, const char *name, double absent, double *value) {
    return dw__json_number(json, name, 0.0, 0.999999, absent, value);
}

/* ---- features of other models -------------------------------------------------------------- */

/* Flags with a single supported value. The other value is a model that Deepwell does not build. */
static dw_status refuse_other_models(const json_t *json) {
    static const struct {
        const char *name;
        bool only;
        const char *meaning;
    } flags[] = {
        {"add_cross_attention", false, "cross-attention"},
        {"is_causal", true, "attention in both directions"},
        {"use_bidirectional_attention", false, "attention in both directions"},
    };
    static const char *const objects[] = {"quantization_config", "auto_map"};
    for (size_t i = 0; i < DW_COUNT(flags); i++) {
        bool value;
        DW_RETURN_IF_FAILED(dw__json_flag(json, flags[i].name, flags[i].only, &value));
        if (value != flags[i].only)
            return dw__fail(DW_UNSUPPORTED,
                            "%s is %s: a model with %s is not supported; train it "
                            "with deepwell.optimize in PyTorch",
                            flags[i].name, value ? "true" : "false", flags[i].meaning);
    }
    for (size_t i = 0; i < DW_COUNT(objects); i++)
        if (dw__json_member(json, objects[i]))
            return dw__fail(DW_UNSUPPORTED, "%s is %s: models with %s", objects[i],
                            dw__json_kind(dw__json_member(json, objects[i])),
                            i == 0 ? "quantized weights are not supported; save a dequantized "
                                     "copy of the model first"
                                   : "code of their own are not supported; train it with "
                                     "deepwell.optimize in PyTorch");
    const json_t *pruned = dw__json_member(json, "pruned_heads");
    if (json_object_size(pruned) > 0)
        return dw__fail(DW_UNSUPPORTED,
                        "pruned_heads names %zu layers: pruned heads are not "
                        "supported",
                        json_object_size(pruned));
    return DW_OK;
}

static dw_status read_family(const json_t *json, dw__built_kind *family) {
    const char *type;
    DW_RETURN_IF_FAILED(dw__json_text(json, "model_type", &type));
    if (!type) return dw__json_wrong_kind("model_type", NULL, "gpt2, llama, qwen3 or mistral");
    for (int i = 0; i < DW__BUILT_COUNT; i++)
        if (strcmp(dw__built_families[i].name, type) == 0) {
            *family = (dw__built_kind)i;
            return DW_OK;
        }
    return dw__fail(DW_UNSUPPORTED,
                    "model_type is \"%.64s\"; gpt2, llama, qwen3 and mistral are "
                    "built without Python; for others use deepwell.optimize in PyTorch",
                    type);
}

/* A sequence classifier has the same model_type but another head. */
static dw_status check_architecture(const json_t *json, dw__built_kind family) {
    const dw__built_family *row = &dw__built_families[family];
    const json_t *list = dw__json_member(json, "architectures");
    if (!list) return DW_OK;
    if (!json_is_array(list)) return dw__json_wrong_kind("architectures", list, "an array");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (!name)
            return dw__json_wrong_kind("an entry of architectures", json_array_get(list, i),
                                       "a string");
        if (strcmp(name, row->architecture) != 0 && strcmp(name, row->base_architecture) != 0)
            return dw__fail(DW_UNSUPPORTED, "architectures has \"%.64s\"; expected %s",
                            dw__json_is_plain(name) ? name : "?", row->architecture);
    }
    return DW_OK;
}

/* ---- parts --------------------------------------------------------------------------------- */

static dw_status read_activation(const json_t *json, const char *name, const char *absent,
                                 dw__activation *activation) {
    static const struct {
        const char *name;
        dw__activation activation;
    } known[] = {
        {"gelu", DW__ACTIVATION_GELU},          {"gelu_python", DW__ACTIVATION_GELU},
        {"gelu_new", DW__ACTIVATION_GELU_TANH}, {"gelu_pytorch_tanh", DW__ACTIVATION_GELU_TANH},
        {"relu", DW__ACTIVATION_RELU},          {"silu", DW__ACTIVATION_SILU},
        {"swish", DW__ACTIVATION_SILU},         {"tanh", DW__ACTIVATION_TANH},
    };
    const char *text;
    DW_RETURN_IF_FAILED(dw__json_text(json, name, &text));
    if (!text) text = absent;
    for (size_t i = 0; i < DW_COUNT(known); i++)
        if (strcmp(known[i].name, text) == 0) {
            *activation = known[i].activation;
            return DW_OK;
        }
    return dw__fail(DW_UNSUPPORTED,
                    "%s is \"%.64s\"; Deepwell builds gelu, gelu_new, "
                    "gelu_pytorch_tanh, relu, silu and tanh",
                    name, text);
}

/* transformers 5 writes rope_parameters, which include the base; transformers 4 wrote rope_theta and rope_scaling. */
static dw_status read_rope(const json_t *json, dw_model_config *config) {
    dw__rope *rope = &config->rope;
    const json_t *scaling = dw__json_member(json, "rope_scaling");
    const json_t *parameters = dw__json_member(json, "rope_parameters");
    const char *type, *key;
    json_t *value;
    double partial;
    if (scaling && !json_is_object(scaling))
        return dw__json_wrong_kind("rope_scaling", scaling, "an object");
    if (parameters && !json_is_object(parameters))
        return dw__json_wrong_kind("rope_parameters", parameters, "an object");
    if (json_object_size(scaling) > 0 && json_object_size(parameters) > 0 &&
        !json_equal(scaling, parameters))
        return dw__fail(DW_PARSE, "rope_scaling and rope_parameters differ; expected one of them");
    if (json_object_size(scaling) > 0) parameters = scaling;

    json_object_foreach((json_t *)parameters, key, value) {
        if (json_is_object(value))
            return dw__fail(DW_UNSUPPORTED,
                            "rope_parameters has an object \"%.64s\": positions "
                            "that differ between layers are not supported",
                            dw__json_is_plain(key) ? key : "?");
    }
    DW_RETURN_IF_FAILED(dw__json_number(json, "rope_theta", 1e-3, 1e30, 10000.0, &rope->theta));
    DW_RETURN_IF_FAILED(dw__json_number(json, "partial_rotary_factor", 0.0, 1.0, 1.0, &partial));
    if (parameters) {
        DW_RETURN_IF_FAILED(
            dw__json_number(parameters, "rope_theta", 1e-3, 1e30, rope->theta, &rope->theta));
        DW_RETURN_IF_FAILED(
            dw__json_number(parameters, "partial_rotary_factor", 0.0, 1.0, partial, &partial));
    }
    if (partial != 1.0)
        return dw__fail(DW_UNSUPPORTED,
                        "partial_rotary_factor is %g; Deepwell rotates whole heads "
                        "in this model",
                        partial);
    rope->type = DW__ROPE_DEFAULT;
    if (!parameters) return DW_OK;
    DW_RETURN_IF_FAILED(dw__json_text(parameters, "rope_type", &type));
    if (!type) DW_RETURN_IF_FAILED(dw__json_text(parameters, "type", &type));
    if (!type || strcmp(type, "default") == 0) return DW_OK;
    if (strcmp(type, "linear") == 0) {
        rope->type = DW__ROPE_LINEAR;
        return dw__json_number(parameters, "factor", 1e-3, 1e6, NAN, &rope->factor);
    }
    if (strcmp(type, "llama3") != 0)
        return dw__fail(DW_UNSUPPORTED,
                        "rope_type is \"%.64s\"; Deepwell builds default, linear and "
                        "llama3",
                        type);
    rope->type = DW__ROPE_LLAMA3;
    DW_RETURN_IF_FAILED(dw__json_number(parameters, "factor", 1e-3, 1e6, NAN, &rope->factor));
    DW_RETURN_IF_FAILED(
        dw__json_number(parameters, "low_freq_factor", 1e-3, 1e6, NAN, &rope->low_frequency));
    DW_RETURN_IF_FAILED(
        dw__json_number(parameters, "high_freq_factor", 1e-3, 1e6, NAN, &rope->high_frequency));
    if (rope->high_frequency <= rope->low_frequency)
        return dw__fail(DW_PARSE,
                        "high_freq_factor is %g and low_freq_factor is %g; expected the "
                        "first to be larger",
                        rope->high_frequency, rope->low_frequency);
    double inner;
    DW_RETURN_IF_FAILED(dw__json_number(parameters, "original_max_position_embeddings", 1.0, 1e12,
                                        (double)config->positions, &inner));
    return dw__json_number(json, "original_max_position_embeddings", 1.0, 1e12, inner,
                           &rope->original_positions);
}

static dw_status read_padding(const json_t *json, dw_model_config *config) {
    const json_t *found = dw__json_member(json, "pad_token_id");
    config->padding_index = -1;
    if (!found) return DW_OK;
    if (!json_is_integer(found)) return dw__json_wrong_kind("pad_token_id", found, "an integer");
    const int64_t vocabulary = config->sizes.vocabulary;
    int64_t index = json_integer_value(found), given = index;
    if (index < 0 && index >= -vocabulary) index += vocabulary; /* as torch does */
    if (index < 0 || index >= vocabulary)
        return dw__fail(DW_PARSE,
                        "pad_token_id is %lld; expected a row of the %lld of the "
                        "embedding",
                        (long long)given, (long long)vocabulary);
    config->padding_index = index;
    return DW_OK;
}

/* ---- families ------------------------------------------------------------------------------ */

static dw_status read_gpt2(const json_t *json, dw_model_config *c) {
    c->padding_index = -1;
    DW_RETURN_IF_FAILED(read_activation(json, "activation_function", "gelu_new", &c->activation));
    DW_RETURN_IF_FAILED(dw__json_number(json, "layer_norm_epsilon", 0.0, 1.0, 1e-5, &c->eps));
    DW_RETURN_IF_FAILED(read_dropout(json, "embd_pdrop", 0.1, &c->embedding_dropout));
    DW_RETURN_IF_FAILED(read_dropout(json, "resid_pdrop", 0.1, &c->residual_dropout));
    DW_RETURN_IF_FAILED(read_dropout(json, "attn_pdrop", 0.1, &c->attention_dropout));
    DW_RETURN_IF_FAILED(dw__json_flag(json, "scale_attn_weights", true, &c->scale_by_width));
    return dw__json_flag(json, "scale_attn_by_inverse_layer_idx", false, &c->scale_by_layer);
}

static dw_status read_llama(const json_t *json, dw_model_config *c) {
    DW_RETURN_IF_FAILED(read_activation(json, "hidden_act", "silu", &c->activation));
    DW_RETURN_IF_FAILED(dw__json_number(json, "rms_norm_eps", 0.0, 1.0, 1e-6, &c->eps));
    DW_RETURN_IF_FAILED(read_dropout(json, "attention_dropout", 0.0, &c->attention_dropout));
    c->scale_by_width = true;
    DW_RETURN_IF_FAILED(read_padding(json, c));
    return read_rope(json, c);
}

/* Copies the fields that the reader of sizes has read. */
static dw_status read_sizes(dw_model_config *c) {
    dw__reading r = {.json = c->json, .model = &c->sizes};
    DW_RETURN_IF_FAILED(dw__read_sizes(&r));
    c->positions = r.positions;
    c->window = r.window;
    c->attention_bias = r.query_bias;
    c->mlp_bias = r.mlp_bias;
    c->sliding = dw__arena_alloc(c->arena, (size_t)c->sizes.layers * sizeof(bool));
    if (!c->sliding) return dw__fail_memory("layers", (size_t)c->sizes.layers);
    for (int layer = 0; layer < c->sizes.layers; layer++)
        DW_RETURN_IF_FAILED(dw__layer_slides(&r, layer, &c->sliding[layer]));
    return DW_OK;
}

/* ---- lifecycle ----------------------------------------------------------------------------- */

static dw_status read_config(dw_model_config *config) {
    const json_t *json = config->json;
    DW_RETURN_IF_FAILED(read_family(json, &config->family));
    DW_RETURN_IF_FAILED(check_architecture(json, config->family));
    DW_RETURN_IF_FAILED(refuse_other_models(json));
    DW_RETURN_IF_FAILED(read_sizes(config));
    DW_RETURN_IF_FAILED(
        dw__json_number(json, "initializer_range", 0.0, 1.0, 0.02, &config->initializer_range));
    if (config->family == DW__BUILT_GPT2)
        DW_RETURN_IF_FAILED(read_gpt2(json, config));
    else
        DW_RETURN_IF_FAILED(read_llama(json, config));
    return dw__model_list_parameters(config);
}

dw_status dw_model_config_parse(const char *json, size_t bytes, dw_model_config **config) {
    dw_status status = DW_OK;
    if (!json || !config) return dw__fail(DW_INVALID_ARGUMENT, "a configuration is NULL");
    dw_model_config *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a configuration", sizeof *made);
    made->arena = dw__arena_create();
    if (!made->arena) DW_TRY(dw__fail_memory("a configuration", sizeof *made));
    DW_TRY(dw__config_parse(json, bytes, &made->json));
    status = read_config(made);
    if (status != DW_OK && status != DW_OUT_OF_MEMORY)
        status = dw__fail_prefix(status, "config.json");
    if (status != DW_OK) goto cleanup;
    *config = made;
    made = NULL;
cleanup:
    dw_model_config_destroy(made);
    return status;
}

dw_status dw__model_config_read(const char *path, char file[PATH_MAX], char **text, size_t *bytes) {
    struct stat info;
    bool folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    if (snprintf(file, PATH_MAX, folder ? "%s/config.json" : "%s", path) >= PATH_MAX)
        return dw__fail_io("cannot open", path, ENAMETOOLONG);
    return dw__file_read_at_most(file, CONFIG_MOST, text, bytes);
}

dw_status dw_model_config_load(const char *path, dw_model_config **config) {
    char file[PATH_MAX], *text = NULL;
    size_t bytes = 0;
    if (!path || !config) return dw__fail(DW_INVALID_ARGUMENT, "the path of a model is NULL");
    DW_RETURN_IF_FAILED(dw__model_config_read(path, file, &text, &bytes));
    dw_status status = dw_model_config_parse(text, bytes, config);
    dw__free(text);
    if (status == DW_PARSE || status == DW_UNSUPPORTED)
        status = dw__fail_prefix(status, "\"%s\"", file);
    return status;
}

dw_status dw_model_config_find(const char *path_or_name, dw_model_config **config) {
    struct stat info;
    if (!path_or_name) return dw__fail(DW_INVALID_ARGUMENT, "the name of a model is NULL");
    if (stat(path_or_name, &info) == 0) return dw_model_config_load(path_or_name, config);
    return dw_model_config_named(path_or_name, config);
}

void dw_model_config_destroy(dw_model_config *config) {
    if (!config) return;
    json_decref(config->json);
    dw__free(config->parameters.items);
    dw__arena_destroy(config->arena);
    dw__free(config);
}

dw_status dw_model_config_json(const dw_model_config *config, char **text) {
    if (!config || !text) return dw__fail(DW_INVALID_ARGUMENT, "config or text is NULL");
    return dw__json_string(config->json, text);
}

void dw_model_describe(const dw_model_config *config, dw_model_info *info) {
    double most =
        fmax(config->attention_dropout, fmax(config->embedding_dropout, config->residual_dropout));
    *info = (dw_model_info){
        .family = dw__built_families[config->family].name,
        .sizes = config->sizes,
        .positions = config->positions,
        .positions_are_limit = config->sizes.positions > 0,
        .dropout = most > 0.0,
    };
}
