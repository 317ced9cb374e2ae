/* Writes a folder that transformers can load: config.json, weights, and the files that came with the model. */
#include "deepwell/safetensors.h"
#include "model/model_internal.h"
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Files of a model folder besides weights and configuration. Training does not change them. */
static const char *const companions[] = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
};

static dw_status path_in(const char *folder, const char *name, char path[PATH_MAX]) {
    if (snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX) return DW_OK;
    return dw__fail_io("cannot write", folder, ENAMETOOLONG);
}

/* ---- config.json --------------------------------------------------------------------------- */

static dw_status set(json_t *json, const char *key, json_t *value) {
    if (value && json_object_set_new(json, key, value) == 0) return DW_OK;
    return dw__fail_memory("config.json", strlen(key));
}

static dw_status write_config(const dw_model_config *config, dw_dtype dtype, const char *folder) {
    dw_status status = DW_OK;
    char path[PATH_MAX];
    dw__text text = {0};
    const char *type = dtype == DW_F32 ? "float32" : dtype == DW_BF16 ? "bfloat16" : "float16";
    json_t *json = json_copy(config->json);
    if (!json) return dw__fail_memory("config.json", sizeof *json);
    json_t *list = json_array();
    if (!list ||
        json_array_append_new(list, json_string(dw__built_families[config->family].architecture))) {
        json_decref(list);
        DW_TRY(dw__fail_memory("config.json", sizeof *json));
    }
    DW_TRY(set(json, "architectures", list));
    /* transformers 5 writes "dtype", transformers 4 wrote "torch_dtype"; both read "torch_dtype" */
    if (json_object_get(json, "dtype")) DW_TRY(set(json, "dtype", json_string(type)));
    if (json_object_get(json, "torch_dtype") || !json_object_get(json, "dtype"))
        DW_TRY(set(json, "torch_dtype", json_string(type)));
    DW_TRY(dw__json_write(json, &text));
    DW_TRY(dw__text_append(&text, "\n", 1));
    DW_TRY(path_in(folder, "config.json", path));
    DW_TRY(dw__file_write(path, text.text, text.length));
cleanup:
    json_decref(json);
    dw__text_free(&text);
    return status;
}

/* ---- weights ------------------------------------------------------------------------------- */

typedef struct saver {
    const dw_model_config *config;
    const dw_model_save_options *options;
    const char *folder;
    const float *const *weights;
    dw_stored_tensor *tensors; /* one entry per parameter */
    uint32_t *shards;          /* one entry per parameter */
    uint32_t count, shard_count;
    int64_t total_bytes;
} saver;

static dw_status list_tensors(saver *s) {
    dw_stored_dtype dtype = s->options->dtype == DW_F32    ? DW_STORED_F32
                            : s->options->dtype == DW_BF16 ? DW_STORED_BF16
                                                           : DW_STORED_F16;
    int64_t in_shard = 0;
    s->count = dw_model_parameter_count(s->config);
    s->tensors = dw__calloc((size_t)s->count + 1, sizeof *s->tensors);
    s->shards = dw__calloc((size_t)s->count + 1, sizeof *s->shards);
    if (!s->tensors || !s->shards)
        return dw__fail_memory("a list of weights", ((size_t)s->count + 1) * sizeof *s->tensors);
    for (uint32_t i = 0; i < s->count; i++) {
        const dw__parameter *p = &s->config->parameters.items[i];
        dw_model_parameter parameter;
        dw_model_parameter_at(s->config, i, &parameter);
        int64_t bytes = parameter.count * (int64_t)dw_stored_dtype_bytes(dtype);
        if (i == 0 || in_shard + bytes > s->options->shard_bytes) {
            s->shard_count++;
            in_shard = 0;
        }
        in_shard += bytes;
        s->total_bytes += bytes;
        s->shards[i] = s->shard_count - 1;
        s->tensors[i] = (dw_stored_tensor){.name = p->name,
                                           .dtype = dtype,
                                           .rank = p->rank,
                                           .shape = p->shape,
                                           .count = parameter.count};
    }
    return DW_OK;
}

/* "model.safetensors", or "model-00001-of-00002.safetensors" */
static void shard_name(const saver *s, uint32_t shard, char name[64]) {
    if (s->shard_count == 1)
        snprintf(name, 64, "model.safetensors");
    else
        snprintf(name, 64, "model-%05u-of-%05u.safetensors", shard + 1, s->shard_count);
}

static dw_status write_shard(const saver *s, uint32_t first, uint32_t count) {
    dw_status status = DW_OK;
    char path[PATH_MAX], name[64];
    dw_safetensors_writer *writer = NULL;
    shard_name(s, s->shards[first], name);
    DW_RETURN_IF_FAILED(path_in(s->folder, name, path));
    DW_TRY(dw_safetensors_writer_create(path, count, s->tensors + first, 0, NULL, &writer));
    for (uint32_t i = first; i < first + count; i++)
        DW_TRY(dw_safetensors_writer_put_f32(writer, s->weights[i], s->tensors[i].count));
    DW_TRY(dw_safetensors_writer_commit(writer));
cleanup:
    dw_safetensors_writer_destroy(writer);
    return status;
}

static dw_status write_index(const saver *s) {
    dw_status status = DW_OK;
    char path[PATH_MAX], name[64];
    dw__text text = {0};
    DW_TRY(path_in(s->folder, "model.safetensors.index.json", path));
    DW_TRY(dw__text_printf(&text,
                           "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n"
                           "  \"weight_map\": {",
                           (long long)s->total_bytes));
    for (uint32_t i = 0; i < s->count; i++) {
        shard_name(s, s->shards[i], name);
        DW_TRY(dw__text_printf(&text, "%s\n    \"%s\": \"%s\"", i ? "," : "", s->tensors[i].name,
                               name));
    }
    DW_TRY(dw__text_printf(&text, "\n  }\n}\n"));
    DW_TRY(dw__file_write(path, text.text, text.length));
cleanup:
    dw__text_free(&text);
    return status;
}

static dw_status write_weights(const dw_model_config *config, const char *folder,
                               const dw_model_save_options *options, const float *const *weights) {
    dw_status status = DW_OK;
    saver s = {.config = config, .options = options, .folder = folder, .weights = weights};
    DW_TRY(list_tensors(&s));
    for (uint32_t first = 0, end; first < s.count; first = end) {
        for (end = first + 1; end < s.count && s.shards[end] == s.shards[first];) end++;
        DW_TRY(write_shard(&s, first, end - first));
    }
    if (s.shard_count > 1) DW_TRY(write_index(&s));
cleanup:
    dw__free(s.tensors);
    dw__free(s.shards);
    return status;
}

/* ---- companion files ----------------------------------------------------------------------- */

static dw_status copy_file(const char *from, const char *to) {
    enum { STEP = 1 << 16 };
    dw_status status = DW_OK;
    char bytes[STEP];
    int file = -1;
    uint64_t size;
    dw__file_writer *writer = NULL;
    DW_RETURN_IF_FAILED(dw__file_open(from, &file, &size));
    DW_TRY(dw__file_writer_create(to, &writer));
    for (;;) {
        ssize_t got = read(file, bytes, sizeof bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) DW_TRY(dw__fail_io("cannot read", from, errno));
        if (got == 0) break;
        DW_TRY(dw__file_writer_put(writer, bytes, (size_t)got));
    }
    DW_TRY(dw__file_writer_commit(writer));
cleanup:
    dw__file_writer_destroy(writer);
    close(file);
    return status;
}

static bool is_below(const char *path, const char *folder) {
    size_t length = strlen(folder);
    return strncmp(path, folder, length) == 0 && path[length] == '/';
}

/* A link may point to a file of the model's own folder, or, in the cache of the Hugging Face hub, from
 * models--NAME/snapshots/REVISION to models--NAME/blobs. A link to another place is rejected, because saving
 * would publish that file. */
static dw_status resolve_link(const char *source, char path[PATH_MAX]) {
    static const char snapshots[] = "/snapshots", blobs[] = "/blobs";
    char target[PATH_MAX], folder[PATH_MAX];
    if (!realpath(path, target)) return dw__fail_io("cannot read", path, errno);
    if (!realpath(source, folder)) return dw__fail_io("cannot read", source, errno);
    bool inside = is_below(target, folder);
    char *slash = strrchr(folder, '/');
    if (!inside && slash) {
        *slash = '\0';
        size_t length = strlen(folder), tail = sizeof snapshots - 1;
        if (length > tail && strcmp(folder + length - tail, snapshots) == 0) {
            strcpy(folder + length - tail, blobs);
            inside = is_below(target, folder);
        }
    }
    if (!inside)
        return dw__fail(DW_STATE,
                        "\"%s\" is a link to \"%s\", outside of the model's folder, and would be "
                        "copied into the trained model; put the file itself in its place",
                        path, target);
    strcpy(path, target);
    return DW_OK;
}

/* Finds a companion's file, which must be regular. `path` is "" if the folder has none. */
static dw_status find_companion(const char *source, const char *name, char path[PATH_MAX]) {
    struct stat info;
    int file;
    uint64_t bytes;
    DW_RETURN_IF_FAILED(path_in(source, name, path));
    if (stat(path, &info) != 0 && errno == ENOENT) {
        path[0] = '\0';
        return DW_OK;
    }
    if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode))
        DW_RETURN_IF_FAILED(resolve_link(source, path));
    DW_RETURN_IF_FAILED(dw__file_open(path, &file, &bytes));
    close(file);
    return DW_OK;
}

static dw_status check_companions(const char *source) {
    char path[PATH_MAX];
    for (size_t i = 0; i < DW_COUNT(companions); i++)
        DW_RETURN_IF_FAILED(find_companion(source, companions[i], path));
    return DW_OK;
}

static dw_status copy_companions(const char *source, const char *folder) {
    for (size_t i = 0; i < DW_COUNT(companions); i++) {
        char from[PATH_MAX], to[PATH_MAX];
        DW_RETURN_IF_FAILED(find_companion(source, companions[i], from));
        DW_RETURN_IF_FAILED(path_in(folder, companions[i], to));
        if (from[0] != '\0') DW_RETURN_IF_FAILED(copy_file(from, to));
    }
    return DW_OK;
}

/* ---- whole --------------------------------------------------------------------------------- */

static dw_status check_options(const dw_model_config *config, const char *folder,
                               const dw_model_save_options *options, const float *const *weights) {
    static const dw__struct known = {"dw_model_save_options", sizeof *options, {0}};
    if (!config || !folder || !weights)
        return dw__fail(DW_INVALID_ARGUMENT, "saving a model: %s is NULL",
                        !config   ? "config"
                        : !folder ? "folder"
                                  : "weights");
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    if (options->dtype != DW_F32 && options->dtype != DW_BF16 && options->dtype != DW_F16)
        return dw__fail(DW_UNSUPPORTED, "dtype is %s; models are saved in f32, bf16 or f16",
                        (unsigned)options->dtype < DW_DTYPE_COUNT ? dw_dtype_name(options->dtype)
                                                                  : "none");
    if (options->shard_bytes < 1)
        return dw__fail(DW_INVALID_ARGUMENT, "shard_bytes is %lld; expected 1 or more",
                        (long long)options->shard_bytes);
    return DW_OK;
}

dw_status dw_model_save_into(const dw_model_config *config, const char *folder,
                             const dw_model_save_options *options, const float *const *weights) {
    static const dw_model_save_options defaults = DW_MODEL_SAVE_OPTIONS_DEFAULT;
    if (!options) options = &defaults;
    DW_RETURN_IF_FAILED(check_options(config, folder, options, weights));
    DW_RETURN_IF_FAILED(write_config(config, options->dtype, folder));
    if (options->source) DW_RETURN_IF_FAILED(copy_companions(options->source, folder));
    return write_weights(config, folder, options, weights);
}

static bool starts_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/* Replacing a folder removes its files, so it may contain only files that this writer writes. */
static bool is_ours(const char *name) {
    const char *dot = strrchr(name, '.');
    if (strcmp(name, "config.json") == 0) return true;
    if (starts_with(name, "model") && dot && strcmp(dot, ".safetensors") == 0) return true;
    if (strcmp(name, "model.safetensors.index.json") == 0) return true;
    for (size_t i = 0; i < DW_COUNT(companions); i++)
        if (strcmp(name, companions[i]) == 0) return true;
    return false;
}

static dw_status check_replaceable(const char *folder) {
    dw_status status = DW_OK;
    DIR *entries = opendir(folder);
    if (!entries) return errno == ENOENT ? DW_OK : dw__fail_io("cannot replace", folder, errno);
    for (struct dirent *entry; status == DW_OK && (entry = readdir(entries));)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            !is_ours(entry->d_name))
            status =
                dw__fail(DW_STATE,
                         "\"%s\" has \"%.200s\", which is not a file of a model and would be lost; "
                         "name a new folder, or move it away",
                         folder, entry->d_name);
    closedir(entries);
    return status;
}

dw_status dw_model_check_save(const char *folder, const dw_model_save_options *options) {
    if (folder) {
        DW_RETURN_IF_FAILED(check_replaceable(folder));
        dw__folder_remove_stale(folder);
    }
    return options && options->source ? check_companions(options->source) : DW_OK;
}

dw_status dw_model_save(const dw_model_config *config, const char *folder,
                        const dw_model_save_options *options, const float *const *weights) {
    dw__folder_writer writer;
    if (!folder) return dw__fail(DW_INVALID_ARGUMENT, "the folder of a model is NULL");
    DW_RETURN_IF_FAILED(check_replaceable(folder));
    DW_RETURN_IF_FAILED(dw__folder_begin(folder, &writer));
    dw_status status = dw_model_save_into(config, writer.temporary, options, weights);
    if (status == DW_OK) status = dw__folder_commit(&writer, folder);
    if (status == DW_OK) {
        dw__folder_end(&writer);
        return DW_OK;
    }
    char message[1024];
    snprintf(message, sizeof message, "%s", dw_last_error());
    dw__folder_end(&writer); /* its own failure is not reported */
    return dw__fail(status, "%s", message);
}
