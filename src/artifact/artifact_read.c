/* Opens artifacts. Nothing of a file is used before it has been checked. */
#include "artifact/artifact_internal.h"
#include "checkpoint/checkpoint.h"
#include "model/model_internal.h"
#include "train/file_hash.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TEXT_MOST = 1 << 28, MANIFEST_VALUES = 1 << 20 };

/* ---- texts --------------------------------------------------------------------------------- */

/* Reads a tensor of bytes. *text stays NULL if the file does not have it. */
static dw_status read_text(dw_artifact *a, dw__artifact_text which) {
    uint32_t index;
    const char *name = dw__artifact_text_names[which];
    if (dw_safetensors_find(a->file, name, &index) != DW_OK) return DW_OK;
    const dw_stored_tensor *tensor = dw_safetensors_at(a->file, index);
    if (tensor->dtype != DW_STORED_U8 || tensor->rank != 1 || tensor->count > TEXT_MOST)
        return dw__fail(DW_PARSE, "\"%s\" is not a text: it has %lld elements of %s", name,
                        (long long)tensor->count, dw_stored_dtype_name(tensor->dtype));
    size_t bytes = (size_t)tensor->count;
    a->texts[which] = dw__malloc(bytes + 1);
    if (!a->texts[which]) return dw__fail_memory(name, bytes + 1);
    a->texts[which][bytes] = '\0';
    a->text_bytes[which] = bytes;
    return dw_safetensors_read_bytes(a->file, index, 0, a->texts[which], bytes);
}

static dw_status read_texts(dw_artifact *a) {
    for (int which = 0; which < DW__TEXT_COUNT; which++)
        DW_RETURN_IF_FAILED(read_text(a, (dw__artifact_text)which));
    if (a->texts[DW__TEXT_MANIFEST]) return DW_OK;
    return dw__fail(DW_PARSE,
                    "it has no tensor \"%s\", so it is not an artifact; make one with "
                    "deepwell export",
                    dw__artifact_text_names[DW__TEXT_MANIFEST]);
}

/* ---- manifest ------------------------------------------------------------------------------ */

dw_status dw__artifact_check_hash(const dw_artifact *artifact, const char *name, uint64_t hash) {
    const json_t *hashes = json_object_get(artifact->manifest, "xxh3");
    const char *expected = json_string_value(json_object_get(hashes, name));
    char digits[DW__HASH_DIGITS + 1];
    snprintf(digits, sizeof digits, "%016llx", (unsigned long long)hash);
    if (expected && strcmp(expected, digits) == 0) return DW_OK;
    if (!expected) return dw__fail(DW_PARSE, "the manifest has no hash of \"%.200s\"", name);
    return dw__fail(DW_PARSE,
                    "tensor \"%.200s\" has the hash %s and the manifest says %.16s: the file was "
                    "changed or damaged; export the model again",
                    name, digits, dw__json_is_plain(expected) ? expected : "?");
}

static dw_status check_texts(const dw_artifact *a) {
    for (int which = 0; which < DW__TEXT_MANIFEST; which++) {
        uint64_t hash;
        if (!a->texts[which]) continue;
        DW_RETURN_IF_FAILED(dw__artifact_hash(a->texts[which], a->text_bytes[which], &hash));
        DW_RETURN_IF_FAILED(dw__artifact_check_hash(a, dw__artifact_text_names[which], hash));
    }
    return DW_OK;
}

static bool is_power_of_two(int64_t value) { return (value & (value - 1)) == 0; }

static dw_status read_plan(dw_artifact *a) {
    const json_t *plan = json_object_get(a->manifest, "plan");
    if (!json_is_object(plan)) return dw__json_wrong_kind("plan", plan, "an object");
    DW_RETURN_IF_FAILED(dw__json_integer(plan, "chunk", 1, 1 << 16, -1, &a->chunk));
    DW_RETURN_IF_FAILED(dw__json_integer(plan, "capacity", 1, 1 << 30, -1, &a->capacity));
    if (is_power_of_two(a->chunk) && is_power_of_two(a->capacity)) return DW_OK;
    return dw__fail(DW_PARSE, "plan has chunk %lld and capacity %lld; expected powers of two",
                    (long long)a->chunk, (long long)a->capacity);
}

static dw_status read_manifest(dw_artifact *a) {
    static const dw__json_limits limits = {8, MANIFEST_VALUES};
    const char *format, *dtype;
    dw_precision_policy policy;
    int64_t version;
    DW_RETURN_IF_FAILED(dw__json_parse("manifest", a->texts[DW__TEXT_MANIFEST],
                                       a->text_bytes[DW__TEXT_MANIFEST], limits, &a->manifest));
    if (!json_is_object(a->manifest))
        return dw__json_wrong_kind("the manifest", a->manifest, "an object");
    DW_RETURN_IF_FAILED(dw__json_text(a->manifest, "format", &format));
    if (!format || strcmp(format, DW__ARTIFACT_FORMAT) != 0)
        return dw__fail(DW_PARSE, "format is \"%.64s\"; expected \"%s\"", format ? format : "",
                        DW__ARTIFACT_FORMAT);
    DW_RETURN_IF_FAILED(dw__json_integer(a->manifest, "version", 1, INT32_MAX, -1, &version));
    if (version != DW__ARTIFACT_VERSION)
        return dw__fail(DW_UNSUPPORTED,
                        "version is %lld and this Deepwell reads %d; use a newer Deepwell, or "
                        "export the model again",
                        (long long)version, DW__ARTIFACT_VERSION);
    DW_RETURN_IF_FAILED(dw__json_text(a->manifest, "dtype", &dtype));
    int stored = dtype ? dw__artifact_dtype_find(dtype) : -1;
    if (stored < 0)
        return dw__fail(DW_PARSE, "dtype is \"%.32s\"; expected f32, bf16 or f16",
                        dtype ? dtype : "");
    a->dtype = (dw_stored_dtype)stored;
    DW_RETURN_IF_FAILED(dw__json_text(a->manifest, "precision", &a->precision));
    if (!a->precision) return dw__json_wrong_kind("precision", NULL, "the name of a policy");
    DW_RETURN_IF_FAILED(dw__artifact_policy(a->precision, &policy));
    DW_RETURN_IF_FAILED(read_plan(a));
    return check_texts(a);
}

static dw_status read_ends(dw_artifact *a) {
    const json_t *ends = json_object_get(a->manifest, "end_tokens");
    dw_model_info info;
    dw_model_describe(a->config, &info);
    if (!json_is_array(ends)) return dw__json_wrong_kind("end_tokens", ends, "an array");
    for (size_t i = 0; i < json_array_size(ends); i++) {
        const json_t *id = json_array_get(ends, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= info.sizes.vocabulary)
            return dw__fail(DW_PARSE, "end_tokens has an entry that is no id of the vocabulary");
        DW_RETURN_IF_FAILED(DW_PUSH(&a->ends, json_integer_value(id)));
    }
    return DW_OK;
}

/* ---- graphs -------------------------------------------------------------------------------- */

static bool same_dims(const dw_graph *a, dw_value x, const dw_graph *b, dw_value y) {
    if (dw_value_rank(a, x) != dw_value_rank(b, y) || dw_value_dtype(a, x) != dw_value_dtype(b, y))
        return false;
    for (int axis = 0; axis < dw_value_rank(a, x); axis++) {
        char first[64], second[64];
        dw_dim_text(a, dw_value_shape(a, x)[axis], first, sizeof first);
        dw_dim_text(b, dw_value_shape(b, y)[axis], second, sizeof second);
        if (strcmp(first, second) != 0) return false;
    }
    return true;
}

/* A stored graph is run with buffers for the leaves and outputs of the graph that this version builds, so these must be
 * the same. */
static dw_status check_signature(const dw_graph *stored, const dw_graph *built) {
    bool same = dw_graph_symbol_count(stored) == dw_graph_symbol_count(built) &&
                dw_graph_leaf_count(stored) == dw_graph_leaf_count(built) &&
                dw_graph_output_count(stored) == dw_graph_output_count(built);
    for (uint32_t i = 0; same && i < dw_graph_symbol_count(built); i++)
        same = strcmp(dw_graph_symbol_name(stored, i), dw_graph_symbol_name(built, i)) == 0;
    for (uint32_t i = 0; same && i < dw_graph_leaf_count(built); i++) {
        dw_value x = dw_graph_leaf_at(stored, i), y = dw_graph_leaf_at(built, i);
        same = strcmp(dw_value_name(stored, x), dw_value_name(built, y)) == 0 &&
               dw_value_role(stored, x) == dw_value_role(built, y) &&
               same_dims(stored, x, built, y);
    }
    for (uint32_t i = 0; same && i < dw_graph_output_count(built); i++)
        same = same_dims(stored, dw_graph_output(stored, i), built, dw_graph_output(built, i));
    if (same) return DW_OK;
    return dw__fail(DW_PARSE, "its leaves or outputs are not those of the model's configuration");
}

static dw_status read_graph(dw_artifact *a, dw__artifact_text which, dw_dtype dtype,
                            dw_graph **graph) {
    dw_graph *built = NULL;
    dw_status status = DW_OK;
    if (!a->texts[which])
        return dw__fail(DW_PARSE, "it has no tensor \"%s\"", dw__artifact_text_names[which]);
    DW_TRY(dw__artifact_graph(a->config, dtype, &built));
    DW_TRY(dw_graph_from_json(a->texts[which], a->text_bytes[which], graph));
    DW_TRY(check_signature(*graph, built));
cleanup:
    dw_graph_destroy(built);
    if (status != DW_OK && status != DW_OUT_OF_MEMORY)
        status = dw__fail_prefix(DW_PARSE, "\"%s\"", dw__artifact_text_names[which]);
    return status;
}

/* ---- weights ------------------------------------------------------------------------------- */

static dw_status check_weight(dw_artifact *a, uint32_t index) {
    dw_model_parameter wanted;
    dw_model_parameter_at(a->config, index, &wanted);
    if (dw_safetensors_find(a->file, wanted.name, &a->parameters[index]) != DW_OK)
        return dw__fail(DW_SHAPE, "it has no weight \"%.200s\"", wanted.name);
    const dw_stored_tensor *found = dw_safetensors_at(a->file, a->parameters[index]);
    if (found->dtype == a->dtype && found->rank == wanted.rank &&
        memcmp(found->shape, wanted.shape, (size_t)wanted.rank * sizeof *wanted.shape) == 0)
        return DW_OK;
    return dw__fail(DW_SHAPE,
                    "the weight \"%.200s\" has %lld elements of %s in %d dims; the model has %lld "
                    "of %s in %d",
                    wanted.name, (long long)found->count, dw_stored_dtype_name(found->dtype),
                    found->rank, (long long)wanted.count, dw_stored_dtype_name(a->dtype),
                    wanted.rank);
}

static dw_status check_weights(dw_artifact *a) {
    uint32_t count = dw_model_parameter_count(a->config), texts = 0;
    a->parameters = dw__calloc((size_t)count + 1, sizeof *a->parameters);
    if (!a->parameters) return dw__fail_memory("weights", count * sizeof *a->parameters);
    for (uint32_t i = 0; i < count; i++) DW_RETURN_IF_FAILED(check_weight(a, i));
    for (int which = 0; which < DW__TEXT_COUNT; which++) texts += a->texts[which] != NULL;
    if (dw_safetensors_count(a->file) == count + texts) return DW_OK;
    return dw__fail(DW_SHAPE, "it has %u tensors; expected the model's %u weights and %u texts",
                    dw_safetensors_count(a->file), count, texts);
}

dw_status dw__artifact_read_weight(const dw_artifact *artifact, uint32_t index, dw_dtype dtype,
                                   dw__weight_sink sink, void *context) {
    enum { PIECE = 1 << 18 }; /* elements at a time */
    const dw_stored_tensor *tensor = dw_safetensors_at(artifact->file, artifact->parameters[index]);
    size_t width = dw_stored_dtype_bytes(tensor->dtype), count = (size_t)tensor->count;
    bool as_stored = dtype == DW_F32 ? tensor->dtype == DW_STORED_F32 : true;
    dw_status status = DW_OK;
    dw__hasher *hasher = dw__hasher_create();
    char *bytes = dw__malloc_aligned(PIECE * sizeof(float));
    float *elements = as_stored ? NULL : dw__malloc_aligned(PIECE * sizeof(float));
    if (!hasher || !bytes || (!as_stored && !elements))
        DW_TRY(dw__fail_memory(tensor->name, PIECE * sizeof(float)));
    for (size_t at = 0; at < count; at += PIECE) {
        size_t here = count - at < PIECE ? count - at : PIECE;
        DW_TRY(dw_safetensors_read_bytes(artifact->file, artifact->parameters[index], at * width,
                                         bytes, here * width));
        dw__hasher_update(hasher, bytes, here * width);
        if (!as_stored) dw__stored_to_f32(tensor->dtype, here, bytes, elements);
        DW_TRY(as_stored ? sink(context, bytes, here * width)
                         : sink(context, elements, here * sizeof *elements));
    }
    DW_TRY(dw__artifact_check_hash(artifact, tensor->name, dw__hasher_value(hasher)));
cleanup:
    dw__hasher_destroy(hasher);
    dw__free_aligned(bytes);
    dw__free_aligned(elements);
    return status;
}

/* ---- lifecycle ----------------------------------------------------------------------------- */

static dw_status read_all(dw_artifact *a) {
    DW_RETURN_IF_FAILED(read_texts(a));
    DW_RETURN_IF_FAILED(read_manifest(a));
    if (!a->texts[DW__TEXT_CONFIG])
        return dw__fail(DW_PARSE, "it has no tensor \"%s\"",
                        dw__artifact_text_names[DW__TEXT_CONFIG]);
    DW_RETURN_IF_FAILED(dw_model_config_parse(a->texts[DW__TEXT_CONFIG],
                                              a->text_bytes[DW__TEXT_CONFIG], &a->config));
    DW_RETURN_IF_FAILED(check_weights(a));
    DW_RETURN_IF_FAILED(read_ends(a));
    DW_RETURN_IF_FAILED(read_graph(a, DW__TEXT_GRAPH_F32, DW_F32, &a->graphs[0]));
    if (a->dtype == DW_STORED_BF16)
        DW_RETURN_IF_FAILED(read_graph(a, DW__TEXT_GRAPH_BF16, DW_BF16, &a->graphs[1]));
    if (a->texts[DW__TEXT_TOKENIZER])
        DW_RETURN_IF_FAILED(dw_tokenizer_parse(a->texts[DW__TEXT_TOKENIZER],
                                               a->text_bytes[DW__TEXT_TOKENIZER], &a->tokenizer));
    return DW_OK;
}

dw_status dw_artifact_open(const char *path, dw_artifact **artifact) {
    dw_status status = DW_OK;
    if (!path || !artifact) return dw__fail(DW_INVALID_ARGUMENT, "the path of an artifact is NULL");
    dw_artifact *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("an artifact", sizeof *made);
    DW_TRY(dw_safetensors_open(path, &made->file));
    status = read_all(made);
    if (status != DW_OK && status != DW_OUT_OF_MEMORY)
        status = dw__fail_prefix(status, "\"%s\"", path);
    if (status != DW_OK) goto cleanup;
    /* Only the configuration's text is needed from now on. */
    for (int which = DW__TEXT_TOKENIZER; which < DW__TEXT_COUNT; which++) {
        dw__free(made->texts[which]);
        made->texts[which] = NULL;
    }
    *artifact = made;
    made = NULL;
cleanup:
    dw_artifact_close(made);
    return status;
}

void dw_artifact_close(dw_artifact *artifact) {
    if (!artifact) return;
    for (int which = 0; which < DW__TEXT_COUNT; which++) dw__free(artifact->texts[which]);
    dw_safetensors_close(artifact->file);
    dw_tokenizer_destroy(artifact->tokenizer);
    dw_graph_destroy(artifact->graphs[0]);
    dw_graph_destroy(artifact->graphs[1]);
    json_decref(artifact->manifest);
    dw__free(artifact->ends.items);
    dw__free(artifact->parameters);
    dw_model_config_destroy(artifact->config);
    dw__free(artifact);
}

void dw_artifact_describe(const dw_artifact *artifact, dw_artifact_info *info) {
    dw_model_describe(artifact->config, &info->model);
    info->dtype = dw__artifact_dtype_name(artifact->dtype);
    info->precision = artifact->precision;
    info->config = artifact->texts[DW__TEXT_CONFIG];
    info->end_tokens = artifact->ends.items;
    info->end_count = artifact->ends.count;
}

const dw_tokenizer *dw_artifact_tokenizer(const dw_artifact *artifact) {
    return artifact->tokenizer;
}
