/* Reads safetensors: one file, or shards with an index.
 *
 * The reader uses a header only after it has checked all of it: every entry by itself, then that all entries
 * together cover the data exactly, without overlap or gap. */
#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { INDEX_MOST = 100000000, FILE_NAME_MOST = 255 };
/* {"name": {"shape": [..]}} has depth three. 2^22 values allow half a million tensors. */
static const dw__json_limits header_limits = {4, 1 << 22};

typedef struct shard {
    char *path;
    int file;
    uint64_t data_start, data_bytes;
} shard;

typedef struct entry {
    dw_stored_tensor tensor;
    uint64_t begin, end; /* offsets in the shard's data */
    uint32_t shard;
} entry;

struct dw_safetensors {
    dw__arena *arena; /* memory of names, shapes and paths */
    struct {
        shard *items;
        size_t count, capacity;
    } shards;
    struct {
        entry *items;
        size_t count, capacity;
    } entries;
    const entry **by_name;
};

/* ---- one entry of a header ----------------------------------------------------------------- */

static dw_status copy_text(dw_safetensors *file, const char *text, const char **copy) {
    *copy = dw__arena_strdup(file->arena, text);
    return *copy ? DW_OK : dw__fail_memory("a name in a header", strlen(text) + 1);
}

static dw_status read_shape(dw_safetensors *file, const json_t *json, dw_stored_tensor *tensor) {
    if (!json_is_array(json)) return dw__json_wrong_kind("shape", json, "an array");
    size_t rank = json_array_size(json);
    if (rank > DW_STORED_MAX_RANK)
        return dw__fail(DW_UNSUPPORTED, "it has %zu dims; Deepwell reads tensors of at most %d",
                        rank, DW_STORED_MAX_RANK);
    int64_t *shape = dw__arena_alloc(file->arena, (rank + 1) * sizeof *shape);
    if (!shape) return dw__fail_memory("a shape", (rank + 1) * sizeof *shape);
    for (size_t i = 0; i < rank; i++) {
        const json_t *dim = json_array_get(json, i);
        if (!json_is_integer(dim))
            return dw__json_wrong_kind("an entry of shape", dim, "an integer");
        shape[i] = json_integer_value(dim);
    }
    tensor->rank = (int)rank;
    tensor->shape = shape;
    return DW_OK;
}

static dw_status read_offsets(const json_t *json, entry *made) {
    uint64_t *ends[] = {&made->begin, &made->end};
    if (!json_is_array(json)) return dw__json_wrong_kind("data_offsets", json, "an array");
    if (json_array_size(json) != 2)
        return dw__fail(DW_PARSE, "data_offsets has %zu entries; expected 2",
                        json_array_size(json));
    for (size_t i = 0; i < 2; i++) {
        const json_t *offset = json_array_get(json, i);
        if (!json_is_integer(offset))
            return dw__json_wrong_kind("an entry of data_offsets", offset, "an integer");
        if (json_integer_value(offset) < 0)
            return dw__fail(DW_PARSE, "data_offsets has %lld; expected 0 or more",
                            (long long)json_integer_value(offset));
        *ends[i] = (uint64_t)json_integer_value(offset);
    }
    return DW_OK;
}

static dw_status read_entry(dw_safetensors *file, const shard *from, const json_t *json,
                            entry *made) {
    static const char *const members[] = {"dtype", "shape", "data_offsets"};
    const json_t *values[DW_COUNT(members)];
    uint64_t bytes;
    if (!json_is_object(json)) return dw__json_wrong_kind("it", json, "an object");
    for (size_t i = 0; i < DW_COUNT(members); i++) values[i] = json_object_get(json, members[i]);
    const char *dtype = json_string_value(values[0]);
    if (!dtype) return dw__json_wrong_kind("dtype", values[0], "a string");
    int found = dw__stored_dtype_find(dtype);
    if (found < 0)
        return dw__fail(DW_UNSUPPORTED,
                        "dtype is \"%.32s\", which Deepwell does not read; save the tensor as F32, "
                        "BF16 or F16",
                        dw__json_is_plain(dtype) ? dtype : "?");
    made->tensor.dtype = (dw_stored_dtype)found;
    DW_RETURN_IF_FAILED(read_shape(file, values[1], &made->tensor));
    DW_RETURN_IF_FAILED(read_offsets(values[2], made));
    if (json_object_size(json) != DW_COUNT(members))
        return dw__fail(DW_PARSE,
                        "it has %zu members; expected dtype, shape and data_offsets alone",
                        json_object_size(json));
    DW_RETURN_IF_FAILED(dw__stored_size(made->tensor.dtype, made->tensor.rank, made->tensor.shape,
                                        &made->tensor.count, &bytes));
    if (made->begin > made->end || made->end > from->data_bytes)
        return dw__fail(DW_PARSE,
                        "data_offsets are %llu and %llu; expected a range within the file's %llu "
                        "bytes of data; was the file cut short?",
                        (unsigned long long)made->begin, (unsigned long long)made->end,
                        (unsigned long long)from->data_bytes);
    if (made->end - made->begin != bytes)
        return dw__fail(DW_PARSE, "data_offsets span %llu bytes; its shape and dtype need %llu",
                        (unsigned long long)(made->end - made->begin), (unsigned long long)bytes);
    return DW_OK;
}

/* ---- one header ---------------------------------------------------------------------------- */

/* Nothing here reads the texts of "__metadata__", but other readers expect them to be texts. */
static dw_status check_metadata(json_t *json) {
    const char *key;
    json_t *value;
    if (!json_is_object(json)) return dw__json_wrong_kind("__metadata__", json, "an object");
    json_object_foreach(json, key, value) {
        if (!json_is_string(value))
            return dw__json_wrong_kind("a value of __metadata__", value, "a string");
    }
    return DW_OK;
}

static int by_begin(const void *a, const void *b) {
    const entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return strcmp(x->tensor.name, y->tensor.name);
}

/* Checks that the shard's entries, sorted by offset, follow each other from the first byte to the last. */
static dw_status check_cover(const shard *from, entry *entries, size_t count) {
    uint64_t at = 0;
    if (count > 0) qsort(entries, count, sizeof *entries, by_begin);
    for (size_t i = 0; i < count; i++) {
        if (entries[i].begin != at)
            return dw__fail(DW_PARSE,
                            "tensor \"%.200s\": its data begin at byte %llu; expected byte %llu, "
                            "where those before it end: tensors may neither overlap nor leave a "
                            "hole",
                            entries[i].tensor.name, (unsigned long long)entries[i].begin,
                            (unsigned long long)at);
        at = entries[i].end;
    }
    if (at != from->data_bytes)
        return dw__fail(DW_PARSE,
                        "its tensors have %llu bytes and the file has %llu bytes of data; expected "
                        "as many",
                        (unsigned long long)at, (unsigned long long)from->data_bytes);
    return DW_OK;
}

static dw_status read_tensors(dw_safetensors *file, uint32_t index, json_t *root) {
    const shard *from = &file->shards.items[index];
    size_t first = file->entries.count;
    const char *name;
    json_t *json;
    json_object_foreach(root, name, json) {
        entry made = {.shard = index};
        size_t length = strlen(name);
        if (strcmp(name, "__metadata__") == 0) {
            DW_RETURN_IF_FAILED(check_metadata(json));
            continue;
        }
        if (length == 0 || length > DW__TENSOR_NAME_MOST || !dw__json_is_plain(name))
            return dw__fail(DW_PARSE,
                            "the name of a tensor has %zu bytes; expected 1 to %d without control "
                            "characters",
                            length, DW__TENSOR_NAME_MOST);
        DW_RETURN_IF_FAILED(copy_text(file, name, &made.tensor.name));
        dw_status status = read_entry(file, from, json, &made);
        if (status != DW_OK)
            return dw__fail_prefix(status == DW_SHAPE ? DW_PARSE : status, "tensor \"%.200s\"",
                                   name);
        DW_RETURN_IF_FAILED(DW_PUSH(&file->entries, made));
    }
    size_t count = file->entries.count - first;
    return count ? check_cover(from, file->entries.items + first, count)
                 : check_cover(from, NULL, 0);
}

static dw_status read_at(const shard *from, uint64_t offset, void *to, size_t bytes) {
    char *put = to;
    while (bytes > 0) {
        ssize_t got = pread(from->file, put, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return dw__fail_io("cannot read", from->path, errno);
        if (got == 0)
            return dw__fail(DW_IO,
                            "cannot read \"%s\": it ends at byte %llu, earlier than when it was "
                            "opened; do not change a file while it is read",
                            from->path, (unsigned long long)offset);
        put += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return DW_OK;
}

static dw_status read_header(dw_safetensors *file, uint32_t index, uint64_t file_bytes) {
    dw_status status = DW_OK;
    shard *from = &file->shards.items[index];
    json_t *root = NULL;
    char *text = NULL;
    uint64_t length;
    if (file_bytes < DW__HEADER_PREFIX)
        return dw__fail(DW_PARSE,
                        "it has %llu bytes; a safetensors file begins with %d that hold its "
                        "header's length",
                        (unsigned long long)file_bytes, DW__HEADER_PREFIX);
    DW_RETURN_IF_FAILED(read_at(from, 0, &length, sizeof length));
    if (length > DW__HEADER_MOST || length > file_bytes - DW__HEADER_PREFIX)
        return dw__fail(DW_PARSE,
                        "its header has %llu bytes by its first 8; expected at most %llu; is it a "
                        "safetensors file, and whole?",
                        (unsigned long long)length,
                        (unsigned long long)(file_bytes - DW__HEADER_PREFIX > DW__HEADER_MOST
                                                 ? DW__HEADER_MOST
                                                 : file_bytes - DW__HEADER_PREFIX));
    from->data_start = DW__HEADER_PREFIX + length;
    from->data_bytes = file_bytes - from->data_start;
    text = dw__malloc(length);
    if (!text) return dw__fail_memory("a header", length);
    DW_TRY(read_at(from, DW__HEADER_PREFIX, text, length));
    if (length == 0 || text[0] != '{')
        DW_TRY(dw__fail(DW_PARSE, "its header does not begin with \"{\"; is it a safetensors "
                                  "file?"));
    DW_TRY(dw__json_parse("its header", text, length, header_limits, &root));
    DW_TRY(read_tensors(file, index, root));
cleanup:
    json_decref(root);
    dw__free(text);
    return status;
}

/* ---- files --------------------------------------------------------------------------------- */

static dw_status add_shard(dw_safetensors *file, const char *path) {
    shard made = {.file = -1};
    uint64_t bytes = 0;
    made.path = dw__arena_strdup(file->arena, path);
    if (!made.path) return dw__fail_memory("a path", strlen(path) + 1);
    DW_RETURN_IF_FAILED(DW_PUSH(&file->shards, made));
    uint32_t index = (uint32_t)file->shards.count - 1;
    DW_RETURN_IF_FAILED(dw__file_open(path, &file->shards.items[index].file, &bytes));
    dw_status status = read_header(file, index, bytes);
    if (status == DW_PARSE || status == DW_UNSUPPORTED)
        return dw__fail_prefix(status, "\"%s\"", path);
    return status;
}

static int by_name(const void *a, const void *b) {
    const entry *const *x = a, *const *y = b;
    return strcmp((*x)->tensor.name, (*y)->tensor.name);
}

static dw_status sort_names(dw_safetensors *file) {
    size_t count = file->entries.count;
    file->by_name = dw__malloc((count + 1) * sizeof *file->by_name);
    if (!file->by_name)
        return dw__fail_memory("names of tensors", (count + 1) * sizeof *file->by_name);
    for (size_t i = 0; i < count; i++) file->by_name[i] = &file->entries.items[i];
    qsort(file->by_name, count, sizeof *file->by_name, by_name);
    for (size_t i = 1; i < count; i++) {
        const entry *one = file->by_name[i - 1], *other = file->by_name[i];
        if (strcmp(one->tensor.name, other->tensor.name) == 0)
            return dw__fail(DW_PARSE,
                            "tensor \"%.200s\" is in \"%s\" and in \"%s\"; expected it in one",
                            one->tensor.name, file->shards.items[one->shard].path,
                            file->shards.items[other->shard].path);
    }
    return DW_OK;
}

static const entry *find(const dw_safetensors *file, const char *name) {
    entry wanted = {.tensor.name = name};
    const entry *key = &wanted, **found = NULL;
    if (file->entries.count > 0)
        found = bsearch(&key, file->by_name, file->entries.count, sizeof key, by_name);
    return found ? *found : NULL;
}

/* ---- an index of shards -------------------------------------------------------------------- */

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Lists the distinct file names of a weight_map, sorted, in *names (release with dw__free). The JSON owns the
 * strings. */
static dw_status list_files(json_t *weight_map, const char ***names, size_t *count) {
    size_t all = 0, kept = 0;
    const char *tensor, **list = dw__malloc((json_object_size(weight_map) + 1) * sizeof *list);
    json_t *value;
    if (!list)
        return dw__fail_memory("names of files", (json_object_size(weight_map) + 1) * sizeof *list);
    json_object_foreach(weight_map, tensor, value) {
        const char *name = json_string_value(value);
        dw_status status = DW_OK;
        if (!name)
            status = dw__json_wrong_kind("a value of weight_map", value, "a string");
        else if (name[0] == '\0' || strlen(name) > FILE_NAME_MOST || strchr(name, '/') ||
                 strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || !dw__json_is_plain(name))
            status = dw__fail(DW_PARSE,
                              "weight_map names the file \"%.*s\"; expected a plain file name: "
                              "shards lie beside their index",
                              FILE_NAME_MOST, dw__json_is_plain(name) ? name : "?");
        if (status != DW_OK) {
            dw__free(list);
            return status;
        }
        list[all++] = name;
    }
    qsort(list, all, sizeof *list, by_text);
    for (size_t i = 0; i < all; i++)
        if (kept == 0 || strcmp(list[kept - 1], list[i]) != 0) list[kept++] = list[i];
    *names = list;
    *count = kept;
    return DW_OK;
}

static const char *last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Checks that the index and the shards agree on every tensor. */
static dw_status compare_with_shards(const dw_safetensors *file, json_t *weight_map) {
    const char *name;
    json_t *value;
    json_object_foreach(weight_map, name, value) {
        const entry *found = find(file, name);
        const char *named = json_string_value(value);
        if (!found || strcmp(last_part(file->shards.items[found->shard].path), named) != 0)
            return dw__fail(DW_PARSE,
                            "weight_map puts tensor \"%.200s\" into \"%s\", which does "
                            "not have it",
                            dw__json_is_plain(name) ? name : "?", named);
    }
    for (size_t i = 0; i < file->entries.count; i++) {
        const entry *here = &file->entries.items[i];
        if (!json_object_get(weight_map, here->tensor.name))
            return dw__fail(DW_PARSE,
                            "\"%s\" has tensor \"%.200s\", which weight_map does not name",
                            file->shards.items[here->shard].path, here->tensor.name);
    }
    return DW_OK;
}

static dw_status open_shards(dw_safetensors *file, const char *path, json_t *weight_map) {
    dw_status status = DW_OK;
    const char **names = NULL;
    size_t count = 0;
    int folder = (int)(last_part(path) - path);
    if (!json_is_object(weight_map))
        return dw__json_wrong_kind("weight_map", weight_map, "an object");
    if (json_object_size(weight_map) == 0)
        return dw__fail(DW_PARSE, "weight_map is empty; expected names of tensors and of their "
                                  "files");
    DW_RETURN_IF_FAILED(list_files(weight_map, &names, &count));
    for (size_t i = 0; i < count; i++) {
        char whole[PATH_MAX];
        if (snprintf(whole, sizeof whole, "%.*s%s", folder, path, names[i]) >= (int)sizeof whole)
            DW_TRY(dw__fail_io("cannot open", names[i], ENAMETOOLONG));
        DW_TRY(add_shard(file, whole));
    }
    DW_TRY(sort_names(file));
    status = compare_with_shards(file, weight_map);
cleanup:
    dw__free(names);
    return status;
}

static dw_status open_index(dw_safetensors *file, const char *path) {
    dw_status status = DW_OK;
    char *text = NULL;
    size_t bytes = 0;
    json_t *root = NULL;
    DW_RETURN_IF_FAILED(dw__file_read_at_most(path, INDEX_MOST, &text, &bytes));
    DW_TRY(dw__json_parse("index", text, bytes, (dw__json_limits){16, 1 << 22}, &root));
    if (!json_is_object(root)) DW_TRY(dw__json_wrong_kind("index", root, "an object"));
    DW_TRY(open_shards(file, path, json_object_get(root, "weight_map")));
cleanup:
    json_decref(root);
    dw__free(text);
    return status == DW_PARSE ? dw__fail_prefix(status, "\"%s\"", path) : status;
}

/* ---- lifecycle ----------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), last = strlen(end);
    return length >= last && strcmp(text + length - last, end) == 0;
}

/* Chooses the file of a folder to open: the index or the single file. */
static dw_status choose_in_folder(const char *folder, char path[PATH_MAX]) {
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    struct stat info;
    for (size_t i = 0; i < DW_COUNT(names); i++) {
        if (snprintf(path, PATH_MAX, "%s/%s", folder, names[i]) >= PATH_MAX)
            return dw__fail_io("cannot open", folder, ENAMETOOLONG);
        if (lstat(path, &info) == 0) return DW_OK;
        if (errno != ENOENT) return dw__fail_io("cannot open", path, errno);
    }
    return dw__fail(DW_NOT_FOUND,
                    "\"%s\" has neither %s nor %s; older formats are rewritten by transformers: "
                    "from_pretrained, then save_pretrained",
                    folder, names[0], names[1]);
}

dw_status dw_safetensors_open(const char *path, dw_safetensors **file) {
    dw_status status = DW_OK;
    char chosen[PATH_MAX];
    struct stat info;
    if (!path || !file) return dw__fail(DW_INVALID_ARGUMENT, "the path of tensors is NULL");
    dw_safetensors *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a reader of tensors", sizeof *made);
    made->arena = dw__arena_create();
    if (!made->arena) DW_TRY(dw__fail_memory("a reader of tensors", sizeof *made));
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        DW_TRY(choose_in_folder(path, chosen));
        path = chosen;
    }
    if (ends_with(path, ".json")) {
        DW_TRY(open_index(made, path));
    } else {
        DW_TRY(add_shard(made, path));
        DW_TRY(sort_names(made));
    }
    *file = made;
    made = NULL;
cleanup:
    dw_safetensors_close(made);
    return status;
}

void dw_safetensors_close(dw_safetensors *file) {
    if (!file) return;
    for (size_t i = 0; i < file->shards.count; i++)
        if (file->shards.items[i].file >= 0) close(file->shards.items[i].file);
    dw__free(file->shards.items);
    dw__free(file->entries.items);
    dw__free(file->by_name);
    dw__arena_destroy(file->arena);
    dw__free(file);
}

/* ---- queries ------------------------------------------------------------------------------- */

uint32_t dw_safetensors_count(const dw_safetensors *file) { return (uint32_t)file->entries.count; }

const dw_stored_tensor *dw_safetensors_at(const dw_safetensors *file, uint32_t index) {
    return &file->entries.items[index].tensor;
}

dw_status dw_safetensors_find(const dw_safetensors *file, const char *name, uint32_t *index) {
    const entry *found = find(file, name);
    if (!found)
        return dw__fail(DW_NOT_FOUND, "\"%s\"%s has no tensor \"%.200s\"; it has %zu others",
                        file->shards.items[0].path,
                        file->shards.count > 1 ? " (or a shard beside it)" : "", name,
                        file->entries.count);
    *index = (uint32_t)(found - file->entries.items);
    return DW_OK;
}

/* ---- data ---------------------------------------------------------------------------------- */

dw_status dw_safetensors_read_bytes(const dw_safetensors *file, uint32_t index, uint64_t from,
                                    void *to, size_t bytes) {
    const entry *here = &file->entries.items[index];
    const shard *in = &file->shards.items[here->shard];
    uint64_t size = here->end - here->begin;
    if (from > size || bytes > size - from)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "tensor \"%.200s\" of \"%s\" has %llu bytes; %zu from byte %llu were asked "
                        "for",
                        here->tensor.name, in->path, (unsigned long long)size, bytes,
                        (unsigned long long)from);
    return read_at(in, in->data_start + here->begin + from, to, bytes);
}

dw_status dw_safetensors_read_f32(const dw_safetensors *file, uint32_t index, float *to) {
    const dw_stored_tensor *tensor = &file->entries.items[index].tensor;
    size_t width = dw_stored_dtype_bytes(tensor->dtype), step = DW__CONVERSION_BYTES / width;
    if (!dw__stored_to_f32(tensor->dtype, 0, to, to))
        return dw__fail(DW_TYPE, "tensor \"%.200s\" has the type %s; expected floating point",
                        tensor->name, dw_stored_dtype_name(tensor->dtype));
    size_t count = (size_t)tensor->count;
    if (tensor->dtype == DW_STORED_F32)
        return dw_safetensors_read_bytes(file, index, 0, to, count * width);
    double piece[DW__CONVERSION_BYTES / sizeof(double)]; /* aligned for every type */
    for (size_t at = 0; at < count; at += step) {
        size_t here = count - at < step ? count - at : step;
        DW_RETURN_IF_FAILED(
            dw_safetensors_read_bytes(file, index, at * width, piece, here * width));
        dw__stored_to_f32(tensor->dtype, here, piece, to + at);
    }
    return DW_OK;
}
