/* Any file is refused with a message, or is an artifact that generates tokens. The first byte of an input says what the
 * rest replaces in a valid artifact, whose manifest then has the right hashes: 'c' config.json, 'g' the graph, 't' the
 * tokenizer, 'm' the manifest; 'f' the whole file. */
#include "../c/tiny_artifact.h"
#include "artifact/artifact_internal.h"
#include "deepwell/generate.h"
#include "scratch_folder.h"

static char valid_path[256];

static dw__artifact_text replaced_text(uint8_t letter) {
    switch (letter) {
    case 'c': return DW__TEXT_CONFIG;
    case 'g': return DW__TEXT_GRAPH_F32;
    case 't': return DW__TEXT_TOKENIZER;
    case 'm': return DW__TEXT_MANIFEST;
    default: return DW__TEXT_COUNT;
    }
}

/* The manifest of `count` tensors with these contents, as JSON. */
static char *manifest_of(uint32_t count, const dw_stored_tensor *tensors, char *const *contents) {
    char *text = NULL;
    json_t *hashes = json_object();
    for (uint32_t i = 0; i < count; i++) {
        uint64_t hash;
        char digits[DW__HASH_DIGITS + 1];
        size_t bytes = (size_t)tensors[i].count * dw_stored_dtype_bytes(tensors[i].dtype);
        fuzz_require(dw__artifact_hash(contents[i], bytes, &hash) == DW_OK, "hash");
        snprintf(digits, sizeof digits, "%016llx", (unsigned long long)hash);
        json_object_set_new(hashes, tensors[i].name, json_string(digits));
    }
    json_t *json =
        json_pack("{s:s, s:i, s:s, s:s, s:[i], s:{s:i, s:i}, s:o}", "format", DW__ARTIFACT_FORMAT,
                  "version", DW__ARTIFACT_VERSION, "dtype", "f32", "precision", "fp32",
                  "end_tokens", 3, "plan", "chunk", 4, "capacity", 8, "xxh3", hashes);
    fuzz_require(dw__json_string(json, &text) == DW_OK, "manifest");
    json_decref(json);
    return text;
}

/* Writes the valid artifact with one text replaced, or added at the end. */
static void write_replaced(const char *path, dw__artifact_text which, const uint8_t *bytes,
                           size_t count) {
    enum { MOST = 64 };
    dw_stored_tensor tensors[MOST];
    char *contents[MOST], *manifest = NULL;
    int64_t replaced = (int64_t)count, manifest_bytes;
    uint32_t made = 0;
    dw_safetensors *valid = NULL;
    dw_safetensors_writer *writer = NULL;
    fuzz_require(dw_safetensors_open(valid_path, &valid) == DW_OK, "the valid artifact");
    for (uint32_t i = 0; i < dw_safetensors_count(valid); i++) {
        const dw_stored_tensor *tensor = dw_safetensors_at(valid, i);
        if (strcmp(tensor->name, dw__artifact_text_names[which]) == 0 ||
            strcmp(tensor->name, dw__artifact_text_names[DW__TEXT_MANIFEST]) == 0)
            continue;
        size_t size = (size_t)tensor->count * dw_stored_dtype_bytes(tensor->dtype);
        tensors[made] = *tensor;
        contents[made] = dw__malloc(size + 1);
        fuzz_require(dw_safetensors_read_bytes(valid, i, 0, contents[made++], size) == DW_OK,
                     "a tensor");
    }
    if (which != DW__TEXT_MANIFEST) {
        tensors[made] = (dw_stored_tensor){dw__artifact_text_names[which], DW_STORED_U8, 1,
                                           &replaced, replaced};
        contents[made] = dw__malloc(count + 1);
        memcpy(contents[made++], bytes, count);
        manifest = manifest_of(made, tensors, contents);
    } else {
        manifest = dw__malloc(count + 1);
        memcpy(manifest, bytes, count);
    }
    manifest_bytes = which == DW__TEXT_MANIFEST ? replaced : (int64_t)strlen(manifest);
    tensors[made] = (dw_stored_tensor){dw__artifact_text_names[DW__TEXT_MANIFEST], DW_STORED_U8, 1,
                                       &manifest_bytes, manifest_bytes};
    contents[made++] = manifest;
    fuzz_require(dw_safetensors_writer_create(path, made, tensors, 0, NULL, &writer) == DW_OK,
                 "a file");
    for (uint32_t i = 0; i < made; i++) {
        size_t size = (size_t)tensors[i].count * dw_stored_dtype_bytes(tensors[i].dtype);
        fuzz_require(dw_safetensors_writer_put(writer, contents[i], size) == DW_OK, "data");
        dw__free(contents[i]);
    }
    fuzz_require(dw_safetensors_writer_commit(writer) == DW_OK, "the file");
    dw_safetensors_writer_destroy(writer);
    dw_safetensors_close(valid);
}

/* A graph that was replaced may compute anything, at any cost, so it is not run. */
static void check(const dw_artifact *artifact, bool runs) {
    dw_session *session = NULL;
    dw_artifact_info info;
    dw_generate_options options = DW_GENERATE_OPTIONS_DEFAULT;
    size_t generated = 0;
    dw_artifact_describe(artifact, &info);
    fuzz_require(info.model.sizes.vocabulary > 0 && info.dtype, "its description");
    if (!runs || info.model.sizes.layers > 4 || info.model.sizes.parameters > 1e5) return;
    options.max_tokens = 5;
    if (dw_session_create(artifact, NULL, &session) == DW_OK &&
        dw_session_generate(session, (const int64_t[]){0, 0}, 2, &options, &generated) == DW_OK)
        fuzz_require(generated > 0 && generated <= 5, "new tokens");
    dw_session_destroy(session);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    char path[256];
    dw_artifact *artifact = NULL;
    if (!*valid_path) {
        scratch_make();
        scratch_write("valid.engine", "", 0, valid_path);
        fuzz_require(tiny_artifact_write(valid_path, "f32") == DW_OK, "a valid artifact");
        fuzz_require(dw_artifact_open(valid_path, &artifact) == DW_OK, "it is valid");
        check(artifact, true);
        dw_artifact_close(artifact);
        artifact = NULL;
    }
    if (count == 0) return 0;
    int64_t live = dw__memory_live();
    dw__artifact_text which = replaced_text(bytes[0]);
    scratch_write("model.engine", bytes + 1, count - 1, path);
    if (which != DW__TEXT_COUNT) write_replaced(path, which, bytes + 1, count - 1);
    if (dw_artifact_open(path, &artifact) == DW_OK)
        check(artifact, which == DW__TEXT_MANIFEST);
    else
        fuzz_require(dw_last_error()[0] != '\0', "message");
    dw_artifact_close(artifact);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
