/* Writes artifacts. The weights are converted twice, first for their hashes: the manifest's size must be known when the
 * file's header is written. */
#include "artifact/artifact_internal.h"
#include "checkpoint/checkpoint.h"
#include "deepwell/number.h"
#include "deepwell/version.h"
#include "model/model_internal.h"
#include "train/file_hash.h"
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { COMPANION_MOST = 1 << 28 }; /* bytes of a tokenizer.json */

const char *const dw__artifact_text_names[DW__TEXT_COUNT] = {
    [DW__TEXT_CONFIG] = "deepwell.config",       [DW__TEXT_TOKENIZER] = "deepwell.tokenizer",
    [DW__TEXT_GRAPH_F32] = "deepwell.graph.f32", [DW__TEXT_GRAPH_BF16] = "deepwell.graph.bf16",
    [DW__TEXT_MANIFEST] = "deepwell.manifest",
};

static const struct {
    const char *name;
    dw_stored_dtype stored;
} dtypes[] = {{"f32", DW_STORED_F32}, {"bf16", DW_STORED_BF16}, {"f16", DW_STORED_F16}};

int dw__artifact_dtype_find(const char *name) {
    for (size_t i = 0; i < DW_COUNT(dtypes); i++)
        if (strcmp(dtypes[i].name, name) == 0) return (int)dtypes[i].stored;
    return -1;
}

const char *dw__artifact_dtype_name(dw_stored_dtype dtype) {
    for (size_t i = 0; i < DW_COUNT(dtypes); i++)
        if (dtypes[i].stored == dtype) return dtypes[i].name;
    return NULL;
}

dw_status dw__artifact_policy(const char *name, dw_precision_policy *policy) {
    DW_RETURN_IF_FAILED(dw_precision_policy_init(policy, name));
    for (int operand = DW_DGRAD_DY; operand < DW_LINEAR_OPERANDS; operand++)
        policy->layer.operand[operand].stochastic = 0;
    return DW_OK;
}

dw_status dw__artifact_hash(const char *bytes, size_t count, uint64_t *hash) {
    dw__hasher *hasher = dw__hasher_create();
    if (!hasher) return dw__fail_memory("a hash", DW_HASH_BLOCK);
    dw__hasher_update(hasher, bytes, count);
    *hash = dw__hasher_value(hasher);
    dw__hasher_destroy(hasher);
    return DW_OK;
}

dw_status dw__artifact_graph(const dw_model_config *config, dw_dtype dtype, dw_graph **graph) {
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    options.dtype = dtype;
    options.cached = 1;
    return dw_model_graph(config, &options, graph);
}

/* ---- end tokens ---------------------------------------------------------------------------- */

static dw_status add_end_token(const json_t *id, int vocabulary, dw__end_tokens *ends) {
    if (!json_is_integer(id)) return dw__json_wrong_kind("eos_token_id", id, "an integer");
    int64_t value = json_integer_value(id);
    return value < 0 || value >= vocabulary ? DW_OK : DW_PUSH(ends, value);
}

dw_status dw__read_end_tokens(const json_t *json, int vocabulary, dw__end_tokens *ends) {
    const json_t *found = dw__json_member(json, "eos_token_id");
    if (!found) return DW_OK;
    if (!json_is_array(found)) return add_end_token(found, vocabulary, ends);
    for (size_t i = 0; i < json_array_size(found); i++)
        DW_RETURN_IF_FAILED(add_end_token(json_array_get(found, i), vocabulary, ends));
    return DW_OK;
}

static dw_status find_end_tokens(const dw_model_config *config, const dw_artifact_options *options,
                                 dw__end_tokens *ends) {
    static const dw__json_limits limits = {64, 1 << 20};
    json_t *json = NULL;
    int vocabulary = config->sizes.vocabulary;
    if (options->generation) {
        DW_RETURN_IF_FAILED(dw__json_parse("generation_config.json", options->generation,
                                           options->generation_bytes, limits, &json));
        dw_status status = dw__read_end_tokens(json, vocabulary, ends);
        json_decref(json);
        if (status != DW_OK) return dw__fail_prefix(status, "generation_config.json");
        if (ends->count) return DW_OK;
    }
    return dw__read_end_tokens(config->json, vocabulary, ends);
}

/* ---- manifest ------------------------------------------------------------------------------ */

typedef struct maker {
    const dw_model_config *config;
    dw_stored_dtype dtype;
    const char *precision;
    dw__end_tokens ends;
    const float *const *weights;
    uint32_t parameter_count, count; /* count: with the texts */
    dw_stored_tensor *tensors;
    uint64_t *hashes;
    char *texts[DW__TEXT_COUNT];
    int64_t text_bytes[DW__TEXT_COUNT];
    dw__artifact_text *order; /* of the texts, behind the parameters */
    uint32_t text_count;
} maker;

static json_t *hashes_object(const maker *m) {
    json_t *object = json_object();
    for (uint32_t i = 0; object && i + 1 < m->count; i++) {
        char digits[DW__HASH_DIGITS + 1];
        snprintf(digits, sizeof digits, "%016llx", (unsigned long long)m->hashes[i]);
        if (json_object_set_new(object, m->tensors[i].name, json_string(digits)) != 0) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

/* Replaces the manifest's text. Its length does not depend on the hashes' values. */
static dw_status write_manifest(maker *m) {
    json_t *ends = json_array(), *hashes = hashes_object(m);
    for (size_t i = 0; ends && i < m->ends.count; i++)
        if (json_array_append_new(ends, json_integer(m->ends.items[i])) != 0) {
            json_decref(ends);
            ends = NULL;
        }
    json_t *json = json_pack("{s:s, s:i, s:s, s:s, s:s, s:o, s:{s:i, s:i}, s:o}", "format",
                             DW__ARTIFACT_FORMAT, "version", DW__ARTIFACT_VERSION, "deepwell",
                             DW_VERSION, "dtype", dw__artifact_dtype_name(m->dtype), "precision",
                             m->precision, "end_tokens", ends, "plan", "chunk", DW__ARTIFACT_CHUNK,
                             "capacity", DW__ARTIFACT_CAPACITY, "xxh3", hashes);
    if (!json) return dw__fail_memory("a manifest", m->count * sizeof *m->hashes);
    dw__free(m->texts[DW__TEXT_MANIFEST]);
    m->texts[DW__TEXT_MANIFEST] = NULL;
    dw_status status = dw__json_string(json, &m->texts[DW__TEXT_MANIFEST]);
    json_decref(json);
    if (status == DW_OK)
        m->text_bytes[DW__TEXT_MANIFEST] = (int64_t)strlen(m->texts[DW__TEXT_MANIFEST]);
    return status;
}

/* ---- contents ------------------------------------------------------------------------------ */

static dw_status copy_text(maker *m, dw__artifact_text which, const char *text, size_t bytes) {
    m->texts[which] = dw__malloc(bytes + 1);
    if (!m->texts[which]) return dw__fail_memory(dw__artifact_text_names[which], bytes + 1);
    memcpy(m->texts[which], text, bytes);
    m->texts[which][bytes] = '\0';
    m->text_bytes[which] = (int64_t)bytes;
    return DW_OK;
}

static dw_status make_graph(maker *m, dw__artifact_text which, dw_dtype dtype) {
    dw_graph *graph = NULL;
    DW_RETURN_IF_FAILED(dw__artifact_graph(m->config, dtype, &graph));
    dw_status status = dw_graph_to_json(graph, &m->texts[which]);
    if (status == DW_OK) m->text_bytes[which] = (int64_t)strlen(m->texts[which]);
    dw_graph_destroy(graph);
    return status;
}

static dw_status check_tokenizer(const dw_artifact_options *options) {
    dw_tokenizer *tokenizer = NULL;
    if (!options->tokenizer || !options->tokenizer_bytes) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw_tokenizer_parse(options->tokenizer, options->tokenizer_bytes, &tokenizer));
    dw_tokenizer_destroy(tokenizer);
    return DW_OK;
}

static dw_status make_texts(maker *m, const dw_artifact_options *options) {
    DW_RETURN_IF_FAILED(dw__json_string(m->config->json, &m->texts[DW__TEXT_CONFIG]));
    m->text_bytes[DW__TEXT_CONFIG] = (int64_t)strlen(m->texts[DW__TEXT_CONFIG]);
    DW_RETURN_IF_FAILED(check_tokenizer(options));
    if (options->tokenizer && options->tokenizer_bytes)
        DW_RETURN_IF_FAILED(
            copy_text(m, DW__TEXT_TOKENIZER, options->tokenizer, options->tokenizer_bytes));
    DW_RETURN_IF_FAILED(make_graph(m, DW__TEXT_GRAPH_F32, DW_F32));
    if (m->dtype == DW_STORED_BF16)
        DW_RETURN_IF_FAILED(make_graph(m, DW__TEXT_GRAPH_BF16, DW_BF16));
    return find_end_tokens(m->config, options, &m->ends);
}

static dw_status list_tensors(maker *m) {
    static const int64_t no_bytes = 0;
    size_t most = (size_t)m->parameter_count + DW__TEXT_COUNT;
    m->tensors = dw__calloc(most, sizeof *m->tensors);
    m->hashes = dw__calloc(most, sizeof *m->hashes);
    if (!m->tensors || !m->hashes)
        return dw__fail_memory("a list of weights", most * sizeof *m->tensors);
    for (uint32_t i = 0; i < m->parameter_count; i++) {
        const dw__parameter *p = &m->config->parameters.items[i];
        dw_model_parameter parameter;
        dw_model_parameter_at(m->config, i, &parameter);
        m->tensors[i] = (dw_stored_tensor){p->name, m->dtype, p->rank, p->shape, parameter.count};
    }
    m->count = m->parameter_count;
    for (int which = 0; which < DW__TEXT_COUNT; which++)
        if (m->texts[which] || which == DW__TEXT_MANIFEST)
            m->tensors[m->count++] =
                (dw_stored_tensor){dw__artifact_text_names[which], DW_STORED_U8, 1, &no_bytes, 0};
    DW_RETURN_IF_FAILED(write_manifest(m)); /* for its size */
    uint32_t at = m->parameter_count;
    for (int which = 0; which < DW__TEXT_COUNT; which++) {
        if (!m->texts[which]) continue;
        m->tensors[at].shape = &m->text_bytes[which];
        m->tensors[at++].count = m->text_bytes[which];
    }
    return DW_OK;
}

/* ---- hashes -------------------------------------------------------------------------------- */

static void hash_weight(const maker *m, uint32_t index, dw__hasher *hasher) {
    enum { STEP = DW__CONVERSION_BYTES / sizeof(uint16_t) };
    const float *weights = m->weights[index];
    int64_t count = m->tensors[index].count;
    uint16_t piece[STEP];
    if (m->dtype == DW_STORED_F32) {
        dw__hasher_update(hasher, weights, (size_t)count * sizeof *weights);
        return;
    }
    for (int64_t at = 0; at < count; at += STEP) {
        int64_t here = count - at < STEP ? count - at : STEP;
        dw__stored_from_f32(m->dtype, (size_t)here, weights + at, piece);
        dw__hasher_update(hasher, piece, (size_t)here * sizeof *piece);
    }
}

static dw_status hash_all(maker *m) {
    uint32_t at = m->parameter_count;
    for (int which = 0; which < DW__TEXT_MANIFEST; which++)
        if (m->texts[which])
            DW_RETURN_IF_FAILED(
                dw__artifact_hash(m->texts[which], (size_t)m->text_bytes[which], &m->hashes[at++]));
    for (uint32_t i = 0; i < m->parameter_count; i++) {
        dw__hasher *hasher = dw__hasher_create();
        if (!hasher) return dw__fail_memory("a hash", DW_HASH_BLOCK);
        hash_weight(m, i, hasher);
        m->hashes[i] = dw__hasher_value(hasher);
        dw__hasher_destroy(hasher);
    }
    return write_manifest(m);
}

/* ---- files --------------------------------------------------------------------------------- */

static dw_status write_file(const maker *m, const char *path) {
    static const char *const metadata[] = {"deepwell", DW__ARTIFACT_FORMAT};
    dw_status status = DW_OK;
    dw_safetensors_writer *writer = NULL;
    DW_TRY(dw_safetensors_writer_create(path, m->count, m->tensors, 1, metadata, &writer));
    for (uint32_t i = 0; i < m->parameter_count; i++)
        DW_TRY(dw_safetensors_writer_put_f32(writer, m->weights[i], m->tensors[i].count));
    for (int which = 0; which < DW__TEXT_COUNT; which++)
        if (m->texts[which])
            DW_TRY(
                dw_safetensors_writer_put(writer, m->texts[which], (size_t)m->text_bytes[which]));
    DW_TRY(dw_safetensors_writer_commit(writer));
cleanup:
    dw_safetensors_writer_destroy(writer);
    return status;
}

static dw_status read_options(const dw_artifact_options *options, dw_stored_dtype *dtype) {
    dw_precision_policy policy;
    static const dw__struct known = {"dw_artifact_options", sizeof *options, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    int found = options->dtype ? dw__artifact_dtype_find(options->dtype) : (int)DW_STORED_F32;
    if (found < 0)
        return dw__fail(DW_INVALID_ARGUMENT, "dtype is \"%.32s\"; expected f32, bf16 or f16",
                        options->dtype);
    *dtype = (dw_stored_dtype)found;
    return options->precision ? dw__artifact_policy(options->precision, &policy) : DW_OK;
}

dw_status dw_artifact_write(const dw_model_config *config, const char *path,
                            const dw_artifact_options *options, const float *const *weights) {
    static const dw_artifact_options defaults = DW_ARTIFACT_OPTIONS_DEFAULT;
    dw_status status = DW_OK;
    maker m = {.config = config, .weights = weights};
    if (!options) options = &defaults;
    if (!config || !path || !weights)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_artifact_write: %s is NULL",
                        !config ? "config"
                        : !path ? "path"
                                : "weights");
    DW_RETURN_IF_FAILED(read_options(options, &m.dtype));
    m.precision = options->precision ? options->precision : "fp32";
    m.parameter_count = dw_model_parameter_count(config);
    DW_TRY(make_texts(&m, options));
    DW_TRY(list_tensors(&m));
    DW_TRY(hash_all(&m));
    DW_TRY(write_file(&m, path));
cleanup:
    for (int which = 0; which < DW__TEXT_COUNT; which++) dw__free(m.texts[which]);
    dw__free(m.ends.items);
    dw__free(m.tensors);
    dw__free(m.hashes);
    return status;
}

/* ---- folders ------------------------------------------------------------------------------- */

/* Writes FOLDER/NAME to `path` and returns whether such a file exists. */
static bool find_file(const char *folder, const char *name, char path[PATH_MAX]) {
    struct stat info;
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX && stat(path, &info) == 0;
}

/* Sets `chosen` to the folder of a model: `folder`, or the newest checkpoint in it. */
static dw_status choose_folder(const char *folder, char chosen[PATH_MAX]) {
    static const char prefix[] = "step-";
    char newest[NAME_MAX + 1] = "", path[PATH_MAX];
    if (snprintf(chosen, PATH_MAX, "%s", folder) >= PATH_MAX)
        return dw__fail(DW_IO, "cannot open \"%.80s\": its name is too long", folder);
    if (find_file(folder, "config.json", path)) return DW_OK;
    DIR *listing = opendir(folder);
    if (!listing) return DW_OK; /* reading config.json reports why */
    for (const struct dirent *entry; (entry = readdir(listing));) {
        const char *name = entry->d_name;
        /* The numbers have one width, so that the order of names is that of steps. */
        if (strncmp(name, prefix, sizeof prefix - 1) == 0 && strcmp(name, newest) > 0)
            snprintf(newest, sizeof newest, "%s", name);
    }
    closedir(listing);
    if (*newest && snprintf(chosen, PATH_MAX, "%s/%s", folder, newest) >= PATH_MAX)
        return dw__fail(DW_IO, "cannot open \"%.80s\": its name is too long", folder);
    return DW_OK;
}

/* Reads a file of the folder if it exists; *text stays NULL if not. */
static dw_status read_companion(const char *folder, const char *name, char **text, size_t *bytes) {
    char path[PATH_MAX];
    if (!find_file(folder, name, path)) return DW_OK;
    return dw__file_read_at_most(path, COMPANION_MOST, text, bytes);
}

/* The type of the weights of a folder if all have one that an artifact can have; else *dtype stays NULL, which means
 * F32 and loses nothing. */
static dw_status stored_type(const char *folder, const char **dtype) {
    dw_safetensors *file = NULL;
    DW_RETURN_IF_FAILED(dw_safetensors_open(folder, &file));
    bool same = dw_safetensors_count(file) > 0;
    for (uint32_t i = 1; i < dw_safetensors_count(file); i++)
        same = same && dw_safetensors_at(file, i)->dtype == dw_safetensors_at(file, 0)->dtype;
    if (same) *dtype = dw__artifact_dtype_name(dw_safetensors_at(file, 0)->dtype);
    dw_safetensors_close(file);
    return DW_OK;
}

static dw_status load_weights(const dw_model_config *config, const char *folder, float ***weights) {
    uint32_t count = dw_model_parameter_count(config);
    *weights = dw__calloc((size_t)count + 1, sizeof **weights);
    if (!*weights) return dw__fail_memory("weights", count * sizeof **weights);
    for (uint32_t i = 0; i < count; i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(config, i, &parameter);
        (*weights)[i] = dw__malloc_aligned((size_t)parameter.count * sizeof(float));
        if (!(*weights)[i])
            return dw__fail_memory(parameter.name, (size_t)parameter.count * sizeof(float));
    }
    return dw_model_load(config, folder, NULL, *weights);
}

dw_status dw_artifact_export(const char *folder, const char *path,
                             const dw_artifact_options *options) {
    dw_status status = DW_OK;
    dw_artifact_options given = DW_ARTIFACT_OPTIONS_DEFAULT;
    dw_stored_dtype dtype;
    char chosen[PATH_MAX], *tokenizer = NULL, *generation = NULL;
    dw_model_config *config = NULL;
    float **weights = NULL;
    if (!folder || !path)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_artifact_export: %s is NULL",
                        folder ? "path" : "folder");
    if (options) {
        DW_RETURN_IF_FAILED(read_options(options, &dtype));
        given = *options;
    }
    DW_RETURN_IF_FAILED(choose_folder(folder, chosen));
    DW_TRY(dw_model_config_load(chosen, &config));
    if (!given.tokenizer) {
        DW_TRY(read_companion(chosen, "tokenizer.json", &tokenizer, &given.tokenizer_bytes));
        given.tokenizer = tokenizer;
    }
    if (!given.generation) {
        DW_TRY(
            read_companion(chosen, "generation_config.json", &generation, &given.generation_bytes));
        given.generation = generation;
    }
    DW_TRY(check_tokenizer(&given)); /* before the weights, which may take long */
    if (!given.dtype) DW_TRY(stored_type(chosen, &given.dtype));
    DW_TRY(load_weights(config, chosen, &weights));
    DW_TRY(dw_artifact_write(config, path, &given, (const float *const *)weights));
cleanup:
    for (uint32_t i = 0; weights && i < dw_model_parameter_count(config); i++)
        dw__free_aligned(weights[i]);
    dw__free(weights);
    dw__free(tokenizer);
    dw__free(generation);
    dw_model_config_destroy(config);
    return status;
}
