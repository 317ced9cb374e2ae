/* Measurements on disk: see tune.h. */
#include "kernel/tune.h"
#include "base/json.h"
#include "deepwell/explain.h"
#include "device/device.h"
#include "jit/jit.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { MOST_BYTES = 1 << 24 };

/* "FOLDER/tune/NVIDIA_H200.json" */
static dw_status file_of(const char *gpu, dw__text *path) {
    DW_RETURN_IF_FAILED(dw__jit_cache_folder(path));
    DW_RETURN_IF_FAILED(dw__text_printf(path, "/tune/"));
    for (; *gpu; gpu++)
        DW_RETURN_IF_FAILED(dw__text_printf(path, "%c", isalnum((unsigned char)*gpu) ? *gpu : '_'));
    return dw__text_printf(path, ".json");
}

/* NULL: there is no sound file. */
static dw_status read_file(const char *path, json_t **root) {
    const dw__json_limits limits = {.depth = 4, .values = 1 << 20};
    char *bytes = NULL;
    size_t count = 0;
    *root = NULL;
    dw_status status = dw__file_read_at_most(path, MOST_BYTES, &bytes, &count);
    if (status == DW_OK) status = dw__json_parse(path, bytes, count, limits, root);
    dw__free(bytes);
    if (status == DW_OK && !json_is_object(json_object_get(*root, "measured"))) {
        json_decref(*root);
        *root = NULL;
    }
    return status == DW_OUT_OF_MEMORY ? status : DW_OK;
}

dw_status dw__tune_read(const char *gpu, const char *shape_class, const char *name,
                        double *seconds) {
    dw_status status = DW_OK;
    dw__text path = {0};
    json_t *root = NULL;
    DW_TRY(file_of(gpu, &path));
    DW_TRY(read_file(path.text, &root));
    const json_t *of_class = json_object_get(json_object_get(root, "measured"), shape_class);
    double found = json_number_value(json_object_get(of_class, name));
    if (!(found > 0.0))
        DW_TRY(dw__fail(DW_NOT_FOUND, "%s has not been measured for \"%s\" on %s", name,
                        shape_class, gpu));
    *seconds = found;

cleanup:
    json_decref(root);
    dw__text_free(&path);
    return status;
}

/* ---- writing -------------------------------------------------------------------------------------- */

static dw_status lock_beside(const char *path, int *file) {
    dw__text name = {0};
    DW_RETURN_IF_FAILED(dw__text_printf(&name, "%s.lock", path));
    dw_status status = DW_OK;
    *file = open(name.text, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (*file < 0 || flock(*file, LOCK_EX) != 0)
        status = dw__fail_io("cannot lock", name.text, errno);
    dw__text_free(&name);
    return status;
}

/* Takes `value`. */
static dw_status set(json_t *object, const char *key, json_t *value) {
    return json_object_set_new(object, key, value) == 0
               ? DW_OK
               : dw__fail_memory("a measurement", strlen(key));
}

/* The object under `key`, made if it is not there. */
static dw_status enter(json_t *object, const char *key, json_t **member) {
    *member = json_object_get(object, key);
    if (json_is_object(*member)) return DW_OK;
    DW_RETURN_IF_FAILED(set(object, key, json_object()));
    *member = json_object_get(object, key);
    return DW_OK;
}

dw_status dw__tune_write(const char *gpu, const char *shape_class, const char *name,
                         double seconds) {
    dw_status status = DW_OK;
    dw__text path = {0}, text = {0};
    json_t *root = NULL, *measured, *of_class;
    int lock = -1;
    if (!(seconds > 0.0) || !isfinite(seconds))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "a measurement of %g seconds; expected a positive number", seconds);
    DW_TRY(file_of(gpu, &path));
    DW_TRY(dw__folder_make_above(path.text));
    DW_TRY(lock_beside(path.text, &lock));
    DW_TRY(read_file(path.text, &root));
    if (!root && !(root = json_object())) DW_TRY(dw__fail_memory("measurements", 0));
    DW_TRY(set(root, "gpu", json_string(gpu)));
    DW_TRY(enter(root, "measured", &measured));
    DW_TRY(enter(measured, shape_class, &of_class));
    DW_TRY(set(of_class, name, json_real(seconds)));
    DW_TRY(dw__json_write(root, &text));
    DW_TRY(dw__file_write(path.text, text.text, text.length));

cleanup:
    if (lock >= 0) close(lock);
    json_decref(root);
    dw__text_free(&path);
    dw__text_free(&text);
    return status;
}

/* ---- the calling thread's GPU ----------------------------------------------------------------------- */

dw_status dw_tune_record(const char *shape_class, const char *name, double seconds) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__device_cuda.context(&context));
    return dw__tune_write(context->name, shape_class, name, seconds);
}

dw_status dw_tune_lookup(const char *shape_class, const char *name, double *seconds) {
    const dw__context *context;
    DW_RETURN_IF_FAILED(dw__device_cuda.context(&context));
    return dw__tune_read(context->name, shape_class, name, seconds);
}
