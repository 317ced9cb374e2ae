/* Writes safetensors: first the header, which fixes all offsets, then the data as they arrive. */
#include "base/json.h"
#include "checkpoint/checkpoint.h"
#include "number/half.h"
#include <stdlib.h>
#include <string.h>

struct dw_safetensors_writer {
    dw__file_writer *file;
    uint64_t expected, written; /* bytes of data */
    uint32_t count, current;    /* tensors; the tensor being written or next to write */
    struct {
        dw_stored_dtype dtype;
        uint64_t end; /* end of its data */
    } * tensors;
};

/* ---- header -------------------------------------------------------------------------------- */

/* Names have no control characters; they were checked. */
static dw_status write_string(dw__text *out, const char *text) {
    DW_RETURN_IF_FAILED(dw__text_append(out, "\"", 1));
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') DW_RETURN_IF_FAILED(dw__text_append(out, "\\", 1));
        DW_RETURN_IF_FAILED(dw__text_append(out, text, 1));
    }
    return dw__text_append(out, "\"", 1);
}

static int by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static dw_status check_names(uint32_t count, const dw_stored_tensor *tensors) {
    dw_status status = DW_OK;
    const char **names = dw__malloc(((size_t)count + 1) * sizeof *names);
    if (!names) return dw__fail_memory("names of tensors", ((size_t)count + 1) * sizeof *names);
    for (uint32_t i = 0; i < count; i++) {
        const char *name = names[i] = tensors[i].name;
        size_t length = name ? strlen(name) : 0;
        if (length == 0 || length > DW__TENSOR_NAME_MOST || !dw__json_is_plain(name) ||
            strcmp(name, "__metadata__") == 0)
            DW_TRY(dw__fail(DW_INVALID_ARGUMENT,
                            "tensor %u has the name \"%.64s\"; expected 1 to %d bytes without "
                            "control characters, and not __metadata__",
                            i, length && dw__json_is_plain(name) ? name : "",
                            DW__TENSOR_NAME_MOST));
        if ((unsigned)tensors[i].dtype >= DW_STORED_DTYPE_COUNT)
            DW_TRY(dw__fail(DW_INVALID_ARGUMENT, "tensor \"%.200s\" has no element type", name));
    }
    qsort(names, count, sizeof *names, by_text);
    for (uint32_t i = 1; i < count; i++)
        if (strcmp(names[i - 1], names[i]) == 0)
            DW_TRY(dw__fail(DW_INVALID_ARGUMENT, "two tensors have the name \"%.200s\"", names[i]));
cleanup:
    dw__free(names);
    return status;
}

static dw_status write_metadata(dw__text *out, uint32_t count, const char *const *metadata) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "{\"__metadata__\":{\"format\":\"pt\""));
    for (uint32_t i = 0; i < count; i++) {
        const char *key = metadata[2 * i], *value = metadata[2 * i + 1];
        if (!dw__json_is_plain(key) || !dw__json_is_plain(value) || strcmp(key, "format") == 0)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "metadata %u: expected text without control characters, and a key "
                            "other than \"format\"",
                            i);
        DW_RETURN_IF_FAILED(dw__text_append(out, ",", 1));
        DW_RETURN_IF_FAILED(write_string(out, key));
        DW_RETURN_IF_FAILED(dw__text_append(out, ":", 1));
        DW_RETURN_IF_FAILED(write_string(out, value));
    }
    return dw__text_append(out, "}", 1);
}

/* Writes the tensor's entry. Its data begin at the writer's current end, which then moves past them. */
static dw_status write_entry(dw__text *out, dw_safetensors_writer *writer,
                             const dw_stored_tensor *tensor) {
    int64_t count;
    uint64_t bytes, begin = writer->expected;
    dw_status status = dw__stored_size(tensor->dtype, tensor->rank, tensor->shape, &count, &bytes);
    if (status == DW_OK && bytes > (uint64_t)INT64_MAX - begin)
        status = dw__fail(DW_SHAPE, "the file would have 2^63 bytes or more");
    if (status != DW_OK) return dw__fail_prefix(status, "tensor \"%.200s\"", tensor->name);
    writer->expected += bytes;
    DW_RETURN_IF_FAILED(dw__text_append(out, ",", 1));
    DW_RETURN_IF_FAILED(write_string(out, tensor->name));
    DW_RETURN_IF_FAILED(dw__text_printf(out, ":{\"dtype\":\"%s\",\"shape\":[",
                                        dw_stored_dtype_name(tensor->dtype)));
    for (int axis = 0; axis < tensor->rank; axis++)
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, axis ? ",%lld" : "%lld", (long long)tensor->shape[axis]));
    return dw__text_printf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin,
                           (unsigned long long)writer->expected);
}

static dw_status write_header(dw_safetensors_writer *writer, const dw_stored_tensor *tensors,
                              uint32_t metadata_count, const char *const *metadata) {
    dw_status status = DW_OK;
    dw__text text = {0};
    static const uint64_t room; /* zeros where the header's length will be */
    DW_TRY(dw__text_append(&text, (const char *)&room, sizeof room));
    DW_TRY(write_metadata(&text, metadata_count, metadata));
    for (uint32_t i = 0; i < writer->count; i++) {
        DW_TRY(write_entry(&text, writer, &tensors[i]));
        writer->tensors[i].dtype = tensors[i].dtype;
        writer->tensors[i].end = writer->expected;
    }
    DW_TRY(dw__text_append(&text, "}", 1));
    while (text.length % DW__HEADER_ALIGNMENT != 0) DW_TRY(dw__text_append(&text, " ", 1));
    uint64_t length = text.length - sizeof length;
    if (length > DW__HEADER_MOST)
        DW_TRY(dw__fail(DW_UNSUPPORTED,
                        "the header of %u tensors has %llu bytes; the format allows %d: write "
                        "several files",
                        writer->count, (unsigned long long)length, DW__HEADER_MOST));
    memcpy(text.text, &length, sizeof length);
    DW_TRY(dw__file_writer_put(writer->file, text.text, text.length));
cleanup:
    dw__text_free(&text);
    return status;
}

/* ---- lifecycle ----------------------------------------------------------------------------- */

dw_status dw_safetensors_writer_create(const char *path, uint32_t count,
                                       const dw_stored_tensor *tensors, uint32_t metadata_count,
                                       const char *const *metadata,
                                       dw_safetensors_writer **writer) {
    dw_status status = DW_OK;
    if (!path || !writer || (count > 0 && !tensors) || (metadata_count > 0 && !metadata))
        return dw__fail(DW_INVALID_ARGUMENT, "a writer of tensors was given NULL");
    DW_RETURN_IF_FAILED(check_names(count, tensors));
    dw_safetensors_writer *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a writer of tensors", sizeof *made);
    made->count = count;
    made->tensors = dw__calloc((size_t)count + 1, sizeof *made->tensors);
    if (!made->tensors)
        DW_TRY(dw__fail_memory("a writer of tensors", ((size_t)count + 1) * sizeof *made->tensors));
    DW_TRY(dw__file_writer_create(path, &made->file));
    DW_TRY(write_header(made, tensors, metadata_count, metadata));
    *writer = made;
    made = NULL;
cleanup:
    dw_safetensors_writer_destroy(made);
    return status;
}

void dw_safetensors_writer_destroy(dw_safetensors_writer *writer) {
    if (!writer) return;
    dw__file_writer_destroy(writer->file);
    dw__free(writer->tensors);
    dw__free(writer);
}

/* ---- data ---------------------------------------------------------------------------------- */

dw_status dw_safetensors_writer_put(dw_safetensors_writer *writer, const void *bytes,
                                    size_t count) {
    uint64_t left = writer->expected - writer->written;
    if (count > left)
        return dw__fail(DW_STATE,
                        "%zu bytes of tensors were given and the header leaves room for %llu",
                        count, (unsigned long long)left);
    DW_RETURN_IF_FAILED(dw__file_writer_put(writer->file, bytes, count));
    writer->written += count;
    return DW_OK;
}

dw_status dw_safetensors_writer_put_f32(dw_safetensors_writer *writer, const float *elements,
                                        int64_t count) {
    enum { STEP = DW__CONVERSION_BYTES / sizeof(uint16_t) };
    uint16_t piece[STEP];
    if (count == 0) return DW_OK;
    while (writer->current < writer->count &&
           writer->tensors[writer->current].end <= writer->written)
        writer->current++;
    if (writer->current == writer->count)
        return dw__fail(DW_STATE, "all tensors of the file have their data already");
    dw_stored_dtype dtype = writer->tensors[writer->current].dtype;
    uint64_t left = writer->tensors[writer->current].end - writer->written;
    if (dtype != DW_STORED_F32 && dtype != DW_STORED_BF16 && dtype != DW_STORED_F16)
        return dw__fail(DW_TYPE,
                        "F32 elements were given for a tensor of type %s; expected F32, "
                        "BF16 or F16",
                        dw_stored_dtype_name(dtype));
    if (count < 0 || (uint64_t)count > left / dw_stored_dtype_bytes(dtype))
        return dw__fail(DW_STATE, "%lld elements were given and the tensor has room for %llu",
                        (long long)count,
                        (unsigned long long)(left / dw_stored_dtype_bytes(dtype)));
    if (dtype == DW_STORED_F32)
        return dw_safetensors_writer_put(writer, elements, (size_t)count * sizeof *elements);
    for (int64_t at = 0; at < count; at += STEP) {
        size_t here = count - at < STEP ? (size_t)(count - at) : STEP;
        dw__stored_from_f32(dtype, here, elements + at, piece);
        DW_RETURN_IF_FAILED(dw_safetensors_writer_put(writer, piece, here * sizeof *piece));
    }
    return DW_OK;
}

dw_status dw_safetensors_writer_commit(dw_safetensors_writer *writer) {
    if (writer->written != writer->expected)
        return dw__fail(DW_STATE, "%llu of the file's %llu bytes of tensors were given",
                        (unsigned long long)writer->written, (unsigned long long)writer->expected);
    return dw__file_writer_commit(writer->file);
}
