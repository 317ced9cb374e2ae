/* Measurements on disk; see tune.h. */
#include "kernel/tune.h"
#include "base/json.h"
#include "device/device_table.h"
#include "jit/jit_internal.h"
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { MOST_BYTES = 1 << 24 };

/* Makes the file name, such as "NVIDIA_H200.json". */
static dw_status name_of(const char *gpu, dw__text *name) {
    for (; *gpu; gpu++)
        DW_RETURN_IF_FAILED(dw__text_printf(name, "%c", isalnum((unsigned char)*gpu) ? *gpu : '_'));
    return dw__text_printf(name, ".json");
}

/* *root is NULL if there is no valid file. */
static dw_status read_file(const dw__private *folder, const char *name, json_t **root) {
    const dw__json_limits limits = {.depth = 4, .values = 1 << 20};
    char *bytes = NULL;
    size_t count = 0;
    *root = NULL;
    dw_status status = dw__private_read(folder, name, MOST_BYTES, &bytes, &count);
    if (status == DW_OK) status = dw__json_parse(name, bytes, count, limits, root);
    dw__free(bytes);
    if (status == DW_OK && !json_is_object(json_object_get(*root, "measured"))) {
        json_decref(*root);
        *root = NULL;
    }
    return status == DW_OUT_OF_MEMORY ? status : DW_OK;
}

/* The checksum of a record's text, with what it was measured for. */
static dw_status checksum(const char *shape_class, const char *with, const char *detail,
                          dw__jit_digest *sum) {
    dw__text text = {0};
    dw_status status = dw__text_printf(&text, "%s\n%s\n%s", shape_class, with ? with : "", detail);
    if (status == DW_OK) *sum = dw__jit_digest_of(text.text);
    dw__text_free(&text);
    return status;
}

static bool is_sound(const char *shape_class, const json_t *of_class, const json_t *entry) {
    const json_t *detail = json_object_get(entry, "detail");
    const char *check = json_string_value(json_object_get(entry, "check"));
    dw__jit_digest sum;
    if (!detail) return true;
    return check && json_is_string(detail) &&
           checksum(shape_class, json_string_value(json_object_get(of_class, "with")),
                    json_string_value(detail), &sum) == DW_OK &&
           strcmp(check, sum.text) == 0;
}

/* True if the class has a sound entry with a time or the reason for its absence. */
static bool says_something(const char *shape_class, const json_t *of_class, const char *name) {
    const json_t *entry = json_object_get(of_class, name);
    const char *failure = json_string_value(json_object_get(entry, "failure"));
    if (!is_sound(shape_class, of_class, entry)) return false;
    return (failure && *failure) || json_number_value(json_object_get(entry, "seconds")) > 0.0;
}

static void copy_text(const json_t *text, char *to, size_t bytes) {
    const char *from = json_string_value(text);
    snprintf(to, bytes, "%s", from ? from : "");
}

/* A shape class is an object: candidates' names with {"seconds", "error"} or {"failure"}, and perhaps {"detail",
 * "check"}; and "with". */
static void read_entry(const json_t *of_class, const char *name, dw__tuned *found) {
    const json_t *entry = json_object_get(of_class, name);
    const double error = json_number_value(json_object_get(entry, "error"));
    *found = (dw__tuned){0};
    copy_text(json_object_get(entry, "failure"), found->failure, sizeof found->failure);
    copy_text(json_object_get(of_class, "with"), found->with, sizeof found->with);
    copy_text(json_object_get(entry, "detail"), found->detail, sizeof found->detail);
    if (found->failure[0]) return;
    found->seconds = json_number_value(json_object_get(entry, "seconds"));
    found->error = error > 0.0 ? error : 0.0;
}

dw_status dw__tune_read(const char *gpu, const char *shape_class, const char *name,
                        dw__tuned *found) {
    dw_status status = DW_OK;
    dw__private folder;
    dw__text file = {0};
    json_t *root = NULL;
    *found = (dw__tuned){0};
    DW_TRY(dw__cache_open("tune", false, &folder));
    DW_TRY(name_of(gpu, &file));
    DW_TRY(read_file(&folder, file.text, &root));
    const json_t *of_class = json_object_get(json_object_get(root, "measured"), shape_class);
    read_entry(of_class, name, found);
    if (!says_something(shape_class, of_class, name))
        DW_TRY(dw__fail(DW_NOT_FOUND, "%s has not been measured for \"%s\" on %s", name,
                        shape_class, gpu));

cleanup:
    json_decref(root);
    dw__text_free(&file);
    dw__private_close(&folder);
    return status;
}

dw_status dw__tune_each(const char *gpu, const char *name,
                        dw_status (*visit)(void *state, const char *shape_class,
                                           const dw__tuned *found),
                        void *state) {
    dw_status status = DW_OK;
    dw__private folder;
    dw__text file = {0};
    json_t *root = NULL, *of_class;
    const char *shape_class;
    dw__tuned found;
    if (dw__cache_open("tune", false, &folder) != DW_OK) goto cleanup;
    DW_TRY(name_of(gpu, &file));
    DW_TRY(read_file(&folder, file.text, &root));
    json_object_foreach(json_object_get(root, "measured"), shape_class, of_class) {
        if (!says_something(shape_class, of_class, name)) continue;
        read_entry(of_class, name, &found);
        DW_TRY(visit(state, shape_class, &found));
    }

cleanup:
    json_decref(root);
    dw__text_free(&file);
    dw__private_close(&folder);
    return status;
}

/* ---- writing -------------------------------------------------------------------------------------- */

static dw_status lock_beside(const dw__private *folder, const char *name, int *lock) {
    dw__text beside = {0};
    dw_status status = dw__text_printf(&beside, "%s.lock", name);
    if (status == DW_OK) status = dw__private_lock(folder, beside.text, lock);
    dw__text_free(&beside);
    return status;
}

/* Sets a member. Takes ownership of `value`. */
static dw_status set(json_t *object, const char *key, json_t *value) {
    return json_object_set_new(object, key, value) == 0
               ? DW_OK
               : dw__fail_memory("a measurement", strlen(key));
}

/* Returns the object under `key`. Makes it if it is missing. */
static dw_status enter(json_t *object, const char *key, json_t **member) {
    *member = json_object_get(object, key);
    if (json_is_object(*member)) return DW_OK;
    DW_RETURN_IF_FAILED(set(object, key, json_object()));
    *member = json_object_get(object, key);
    return DW_OK;
}

static dw_status check(const dw_tune_time *time) {
    if (time->failure) return DW_OK;
    if (!(time->seconds > 0.0) || !isfinite(time->seconds))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "a measurement of %g seconds; expected a positive number", time->seconds);
    if (!(time->error >= 0.0) || !isfinite(time->error))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "a standard error of %g seconds; expected a number that is not negative",
                        time->error);
    return DW_OK;
}

/* Length of the first line, truncated at the first byte that is not UTF-8 and to the size of dw__tuned. */
static size_t plain_bytes(const char *text) {
    size_t bytes = 0, most = sizeof((dw__tuned *)NULL)->failure - 1;
    for (int length; (length = dw__utf8_length(text + bytes)) > 0; bytes += (size_t)length)
        if (bytes + (size_t)length > most) break;
    return bytes;
}

static json_t *record_of(const dw_tune_time *time) {
    const char *why = time->failure;
    if (why && plain_bytes(why) == 0) why = "no reason was given";
    if (why) return json_pack("{s:s%}", "failure", why, plain_bytes(why));
    return json_pack("{s:f, s:f}", "seconds", time->seconds, "error", time->error);
}

/* Sets the candidate's entry, with a text if `detail` is not NULL. */
static dw_status set_entry(json_t *of_class, const char *shape_class, const char *with,
                           const dw_tune_time *time, const char *detail) {
    json_t *entry = record_of(time);
    dw__jit_digest sum;
    DW_RETURN_IF_FAILED(set(of_class, time->name, entry));
    if (!detail) return DW_OK;
    DW_RETURN_IF_FAILED(checksum(shape_class, with, detail, &sum));
    DW_RETURN_IF_FAILED(set(entry, "detail", json_string(detail)));
    return set(entry, "check", json_string(sum.text));
}

/* True if all of `times` are present, measured with `with`. */
static bool has_all(const char *shape_class, const json_t *of_class, const char *with,
                    const dw_tune_time *times, size_t count) {
    const char *before = json_string_value(json_object_get(of_class, "with"));
    if (!before || strcmp(before, with) != 0) return false;
    for (size_t i = 0; i < count; i++)
        if (!says_something(shape_class, of_class, times[i].name)) return false;
    return true;
}

static dw_status write_file(const char *gpu, const char *shape_class, const char *with,
                            const dw_tune_time *times, size_t count, const char *detail) {
    dw_status status = DW_OK;
    dw__private folder = {.file = -1};
    dw__text name = {0}, text = {0};
    json_t *root = NULL, *measured, *of_class;
    int lock = -1;
    for (size_t i = 0; i < count; i++) DW_TRY(check(&times[i]));
    DW_TRY(dw__cache_open("tune", true, &folder));
    DW_TRY(name_of(gpu, &name));
    DW_TRY(lock_beside(&folder, name.text, &lock));
    DW_TRY(read_file(&folder, name.text, &root));
    if (!root && !(root = json_object())) DW_TRY(dw__fail_memory("measurements", 0));
    DW_TRY(set(root, "gpu", json_string(gpu)));
    DW_TRY(enter(root, "measured", &measured));
    DW_TRY(enter(measured, shape_class, &of_class));
    if (with && has_all(shape_class, of_class, with, times, count)) goto cleanup;
    if (with) json_object_clear(of_class); /* the old times were measured with something else */
    if (with) DW_TRY(set(of_class, "with", json_string(with)));
    for (size_t i = 0; i < count; i++)
        DW_TRY(set_entry(of_class, shape_class, with, &times[i], detail));
    DW_TRY(dw__json_write(root, &text));
    DW_TRY(dw__private_write(&folder, name.text, text.text, text.length));

cleanup:
    if (lock >= 0) close(lock);
    json_decref(root);
    dw__private_close(&folder);
    dw__text_free(&name);
    dw__text_free(&text);
    return status;
}

dw_status dw__tune_write(const char *gpu, const char *shape_class, const char *with,
                         const dw_tune_time *times, size_t count) {
    return write_file(gpu, shape_class, with, times, count, NULL);
}

dw_status dw__tune_write_detail(const char *gpu, const char *shape_class, const char *with,
                                const dw_tune_time *time, const char *detail) {
    return write_file(gpu, shape_class, with, time, 1, detail);
}

/* ---- the calling thread's GPU ----------------------------------------------------------------------- */

dw_status dw_tune_publish(const char *shape_class, const char *with, const dw_tune_time *times,
                          size_t count) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__device_cuda.context(&context));
    return dw__tune_write(context->name, shape_class, with, times, count);
}

dw_status dw_tune_record(const char *shape_class, const char *name, double seconds) {
    const dw__context *context;
    const dw_tune_time time = {.name = name, .seconds = seconds};
    DW_RETURN_IF_FAILED(dw__device_cuda.context(&context));
    return dw__tune_write(context->name, shape_class, NULL, &time, 1);
}
