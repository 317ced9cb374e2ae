#include "train/manifest.h"
#include "base/json.h"
#include "train/file_hash.h"
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FORMAT "deepwell checkpoint"
enum { VERSION = 1, HEX_BYTES = 17 };

static void hex_of(uint64_t hash, char hex[HEX_BYTES]) {
    snprintf(hex, HEX_BYTES, "%016" PRIx64, hash);
}

/* ---- options that change a step -------------------------------------------------------------- */

/* The options that change what a step computes. Options for validation, logs and checkpoints do not, and
 * neither does the number of steps (only the schedule's). Returns NULL if memory is exhausted. */
static json_t *options_json(const dw_trainer_options *o) {
    return json_pack(
        "{s:I, s:I, s:I, s:b, s:b, s:b, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:b, s:f, s:s, s:s, "
        "s:s, s:s}",
        "sequence", (json_int_t)o->sequence, "batch", (json_int_t)o->batch, "micro_batch",
        (json_int_t)o->micro_batch, "init", o->init != 0, "shuffle", o->shuffle != 0, "dropout",
        o->dropout != 0, "warmup_steps", (json_int_t)o->warmup_steps, "lr", o->lr, "min_lr_ratio",
        o->min_lr_ratio, "beta1", o->beta1, "beta2", o->beta2, "eps", o->eps, "weight_decay",
        o->weight_decay, "decay_all", o->decay_all != 0, "clip", o->clip, "precision", o->precision,
        "device", o->device, "optimizer", "adamw", "schedule", o->schedule);
}

/* Checkpoints of earlier versions do not say what they had no choice of. */
static int add_defaults(json_t *options) {
    static const char *const defaults[][2] = {
        {"device", "cpu"}, {"optimizer", "adamw"}, {"schedule", "cosine"}};
    if (!json_is_object(options)) return 0;
    for (size_t i = 0; i < DW_COUNT(defaults); i++) {
        const char *key = defaults[i][0];
        if (json_object_get(options, key)) continue;
        if (json_object_set_new(options, key, json_string(defaults[i][1])) != 0) return -1;
    }
    return 0;
}

static json_t *data_json(const dw__dataset *data) {
    json_t *list = json_array();
    for (uint32_t i = 0; list && i < dw__dataset_file_count(data); i++) {
        const dw__dataset_file *f = dw__dataset_file_at(data, i);
        char hex[HEX_BYTES];
        hex_of(f->hash, hex);
        /* JSON cannot hold a path that is not UTF-8. The file's hash still identifies it. */
        json_t *path = json_string(f->path);
        json_t *entry =
            json_pack("{s:o, s:I, s:s, s:I}", "path", path ? path : json_null(), "bytes",
                      (json_int_t)f->bytes, "xxh3", hex, "tokens", (json_int_t)f->layout.count);
        if (!entry || json_array_append_new(list, entry) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

dw_status dw__manifest_run(const dw_trainer_options *options, const dw__dataset *data, char **run) {
    json_t *root = json_pack("{s:{s:s, s:I}, s:o, s:o}", "random", "generator", "philox4x32-10",
                             "seed", (json_int_t)options->seed, "options", options_json(options),
                             "data", data ? data_json(data) : json_array());
    if (!root) return dw__fail_memory("a run's description", sizeof *options);
    dw_status status = dw__json_string(root, run);
    json_decref(root);
    return status;
}

static dw_status parse_run(const char *run, json_t **root) {
    static const dw__json_limits limits = {.depth = 8, .values = 1 << 20};
    DW_RETURN_IF_FAILED(dw__json_parse("a run's description", run, strlen(run), limits, root));
    if (json_is_object(*root)) return DW_OK;
    json_decref(*root);
    *root = NULL;
    return dw__fail(DW_INVALID_ARGUMENT, "a run's description is not a JSON object");
}

/* ---- writing --------------------------------------------------------------------------------- */

/* The file in which torch.distributed.checkpoint lists the tensors of a folder: the only hidden file of a
 * checkpoint. */
#define DISTRIBUTED ".metadata"

static int is_file(const struct dirent *entry) {
    return entry->d_name[0] != '.' || strcmp(entry->d_name, DISTRIBUTED) == 0;
}

static dw_status add_file(json_t *list, const char *folder, const char *name) {
    char path[PATH_MAX], hex[HEX_BYTES];
    uint64_t bytes = 0, hash = 0;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= PATH_MAX)
        return dw__fail(DW_INVALID_ARGUMENT, "the path of \"%s\" is too long", name);
    DW_RETURN_IF_FAILED(dw__file_hash(path, &bytes, &hash));
    hex_of(hash, hex);
    json_t *entry =
        json_pack("{s:s, s:I, s:s}", "name", name, "bytes", (json_int_t)bytes, "xxh3", hex);
    if (!entry || json_array_append_new(list, entry) != 0)
        return dw__fail_memory("a checkpoint's manifest", sizeof path);
    return DW_OK;
}

static dw_status manifest_path(const char *folder, char path[PATH_MAX]) {
    if (snprintf(path, PATH_MAX, "%s/manifest.json", folder) < PATH_MAX) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "the path of folder \"%s\" is too long", folder);
}

static dw_status files_json(const char *folder, json_t *list) {
    struct dirent **entries = NULL;
    int count = scandir(folder, &entries, is_file, alphasort);
    if (count < 0) return dw__fail_io("cannot list folder", folder, errno);
    dw_status status = DW_OK;
    for (int i = 0; i < count; i++) {
        if (status == DW_OK) status = add_file(list, folder, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
    return status;
}

/* Members that JSON cannot hold do not occur: an applied step has a finite loss. */
static dw_status add_losses(json_t *root, const dw__recent_losses *recent) {
    if (!recent || recent->count == 0) return DW_OK;
    json_t *list = json_array();
    bool fine = list && json_object_set_new(root, "losses", list) == 0;
    for (int64_t i = 0; fine && i < recent->count; i++)
        fine = json_array_append_new(
                   list, json_pack("[I, f]", (json_int_t)recent->steps[i], recent->losses[i])) == 0;
    return fine ? DW_OK : dw__fail_memory("a checkpoint's losses", (size_t)recent->count);
}

static dw_status add_guard(json_t *root, const dw_precision_watch *watch) {
    static const dw__json_limits limits = {.depth = 8, .values = 1 << 20};
    char *text = NULL;
    json_t *state = NULL;
    if (!watch) return DW_OK;
    DW_RETURN_IF_FAILED(dw_precision_watch_state(watch, &text));
    dw_status status = dw__json_parse("the state of a guard", text, strlen(text), limits, &state);
    if (status == DW_OK && json_object_update(root, state) != 0)
        status = dw__fail_memory("the state of a guard", strlen(text));
    json_decref(state);
    dw_text_free(text);
    return status;
}

dw_status dw__manifest_write(const char *folder, const char *run, const dw__progress *progress) {
    dw_status status = DW_OK;
    char path[PATH_MAX];
    dw__text text = {0};
    json_t *files = NULL, *root = NULL, *described = NULL;
    DW_TRY(parse_run(run, &described));
    if (!(files = json_array())) DW_TRY(dw__fail_memory("a checkpoint's manifest", sizeof path));
    DW_TRY(files_json(folder, files));
    root = json_pack("{s:s, s:i, s:s, s:I, s:I, s:I}", "format", FORMAT, "version", VERSION,
                     "deepwell", dw_version(), "step", (json_int_t)progress->step, "updates",
                     (json_int_t)progress->updates, "schedule_steps",
                     (json_int_t)progress->schedule_steps);
    if (!root || json_object_update_missing(root, described) != 0 ||
        json_object_set(root, "files", files) != 0)
        DW_TRY(dw__fail_memory("a checkpoint's manifest", sizeof path));
    DW_TRY(add_losses(root, progress->losses));
    DW_TRY(add_guard(root, progress->watch));
    DW_TRY(manifest_path(folder, path));
    DW_TRY(dw__json_write(root, &text));
    DW_TRY(dw__text_printf(&text, "\n"));
    DW_TRY(dw__file_write(path, text.text, text.length));
cleanup:
    dw__text_free(&text);
    json_decref(root);
    json_decref(files);
    json_decref(described);
    return status;
}

/* ---- reading --------------------------------------------------------------------------------- */

static dw_status fail_manifest(const char *path, const char *expected) {
    return dw__fail(DW_PARSE, "\"%s\": expected %s; it is not what deepwell wrote", path, expected);
}

static dw_status load(const char *path, json_t **root) {
    static const dw__json_limits limits = {.depth = 8, .values = 1 << 20};
    enum { MOST_BYTES = 1 << 26 };
    char what[PATH_MAX + 2];
    char *bytes = NULL;
    size_t count = 0;
    DW_RETURN_IF_FAILED(dw__file_read_at_most(path, MOST_BYTES, &bytes, &count));
    snprintf(what, sizeof what, "\"%s\"", path);
    dw_status status = dw__json_parse(what, bytes, count, limits, root);
    dw__free(bytes);
    return status;
}

static dw_status check_form(const char *path, const json_t *root) {
    const char *format = json_string_value(json_object_get(root, "format"));
    const json_t *version = json_object_get(root, "version");
    if (!format || strcmp(format, FORMAT) != 0)
        return fail_manifest(path, "\"format\": \"" FORMAT "\"");
    if (!json_is_integer(version)) return fail_manifest(path, "an integer \"version\"");
    if (json_integer_value(version) != VERSION)
        return dw__fail(
            DW_UNSUPPORTED,
            "\"%s\": version %lld of the checkpoint format; this Deepwell (%s) reads version "
            "%d: use the version that wrote it",
            path, (long long)json_integer_value(version), dw_version(), VERSION);
    return DW_OK;
}

static dw_status count_of(const char *path, const json_t *root, const char *key, int64_t *value) {
    const json_t *number = json_object_get(root, key);
    char expected[128];
    snprintf(expected, sizeof expected, "an integer \"%s\" of 0 or more", key);
    if (!json_is_integer(number) || json_integer_value(number) < 0)
        return fail_manifest(path, expected);
    *value = json_integer_value(number);
    return DW_OK;
}

static dw_status check_file(const char *folder, const char *manifest, const json_t *entry) {
    const char *name = json_string_value(json_object_get(entry, "name"));
    const char *hash = json_string_value(json_object_get(entry, "xxh3"));
    const json_t *bytes = json_object_get(entry, "bytes");
    char path[PATH_MAX], hex[HEX_BYTES];
    uint64_t found_bytes = 0, found_hash = 0;
    if (!name || !hash || !json_is_integer(bytes) || strchr(name, '/') ||
        (name[0] == '.' && strcmp(name, DISTRIBUTED) != 0))
        return fail_manifest(manifest, "\"files\" to have a plain name, bytes and xxh3 each");
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= PATH_MAX)
        return fail_manifest(manifest, "a shorter name in \"files\"");
    DW_RETURN_IF_FAILED(dw__file_hash(path, &found_bytes, &found_hash));
    hex_of(found_hash, hex);
    if (found_bytes != (uint64_t)json_integer_value(bytes))
        return dw__fail(DW_IO, "\"%s\" has %" PRIu64 " bytes, but its manifest says %lld", path,
                        found_bytes, (long long)json_integer_value(bytes));
    if (strcmp(hex, hash) != 0)
        return dw__fail(DW_IO, "\"%s\" is not what was written (hash %s, its manifest says %.32s)",
                        path, hex, hash);
    return DW_OK;
}

/* The files that resuming requires must be listed: config.json, and the optimizer's or
 * torch.distributed.checkpoint's. */
static dw_status check_files(const char *folder, const char *manifest, const json_t *root) {
    const json_t *files = json_object_get(root, "files");
    bool config = false, optimizer = false;
    if (!json_is_array(files)) return fail_manifest(manifest, "a list \"files\"");
    for (size_t i = 0; i < json_array_size(files); i++) {
        const json_t *entry = json_array_get(files, i);
        DW_RETURN_IF_FAILED(check_file(folder, manifest, entry));
        const char *name = json_string_value(json_object_get(entry, "name"));
        config |= strcmp(name, "config.json") == 0;
        optimizer |= strcmp(name, "optimizer.safetensors") == 0 || strcmp(name, DISTRIBUTED) == 0;
    }
    if (!config || !optimizer)
        return fail_manifest(manifest, "config.json and optimizer.safetensors in \"files\"");
    return DW_OK;
}

/* Returns whether two values are the texts of the same JSON object. deepwell.Trainer and this program write a policy in
 * different forms. */
static bool is_same_object(const json_t *here, const json_t *there) {
    static const dw__json_limits limits = {.depth = 8, .values = 1 << 20};
    const char *mine = json_string_value(here), *its = json_string_value(there);
    json_t *a = NULL, *b = NULL;
    if (!mine || !its || *mine != '{' || *its != '{') return false;
    const bool same = dw__json_parse("here", mine, strlen(mine), limits, &a) == DW_OK &&
                      dw__json_parse("there", its, strlen(its), limits, &b) == DW_OK &&
                      json_equal(a, b);
    json_decref(a);
    json_decref(b);
    return same;
}

/* Writes "batch is 8 (checkpoint: 4)" to `out` for each value that differs. */
static dw_status compare_values(dw__text *out, const json_t *here, const json_t *there) {
    const char *key = NULL;
    json_t *value = NULL;
    json_object_foreach((json_t *)here, key, value) {
        const json_t *other = json_object_get(there, key);
        if (other && (json_equal(value, other) || is_same_object(value, other))) continue;
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s%s is ", out->length > 0 ? "; " : "", key));
        DW_RETURN_IF_FAILED(dw__json_write(value, out));
        DW_RETURN_IF_FAILED(dw__text_printf(out, " (checkpoint: "));
        DW_RETURN_IF_FAILED(other ? dw__json_write(other, out) : dw__text_printf(out, "absent"));
        DW_RETURN_IF_FAILED(dw__text_printf(out, ")"));
    }
    return DW_OK;
}

static const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "?";
}

static bool is_same_file(const json_t *here, const json_t *there) {
    static const char *const keys[] = {"xxh3", "bytes", "tokens"};
    for (size_t i = 0; i < DW_COUNT(keys); i++) {
        const json_t *a = json_object_get(here, keys[i]), *b = json_object_get(there, keys[i]);
        if (!a || !b || !json_equal(a, b)) return false;
    }
    return true;
}

static dw_status compare_data(dw__text *out, const json_t *here, const json_t *there) {
    const size_t count = json_array_size(here), others = json_array_size(there);
    const char *separator = out->length > 0 ? "; " : "";
    if (count != others)
        return dw__text_printf(out, "%sthe data are %zu files (checkpoint: %zu)", separator, count,
                               others);
    for (size_t i = 0; i < count; i++) {
        const json_t *mine = json_array_get(here, i), *its = json_array_get(there, i);
        if (is_same_file(mine, its)) continue;
        return dw__text_printf(
            out,
            "%sdata file %zu is \"%s\" with %lld bytes, hash %s (checkpoint: \"%.300s\" with %lld "
            "bytes, hash %.32s)",
            separator, i + 1, text_of(mine, "path"),
            (long long)json_integer_value(json_object_get(mine, "bytes")), text_of(mine, "xxh3"),
            text_of(its, "path"), (long long)json_integer_value(json_object_get(its, "bytes")),
            text_of(its, "xxh3"));
    }
    return DW_OK;
}

/* The option `steps` may differ from the checkpoint's, because the schedule has its own number of steps. A checkpoint
 * converted from another program's says "converted": true and has neither options nor data to compare. */
static dw_status compare(const char *folder, const json_t *root, const json_t *run) {
    static const char *const objects[] = {"random", "options"};
    dw_status status = DW_OK;
    dw__text out = {0};
    if (add_defaults(json_object_get(root, "options")) != 0)
        DW_TRY(dw__fail_memory("comparing options", HEX_BYTES));
    if (json_is_true(json_object_get(root, "converted"))) return DW_OK;
    for (size_t i = 0; i < DW_COUNT(objects); i++)
        DW_TRY(compare_values(&out, json_object_get(run, objects[i]),
                              json_object_get(root, objects[i])));
    const json_t *data = json_object_get(run, "data");
    if (data) DW_TRY(compare_data(&out, data, json_object_get(root, "data")));
    if (out.length > 0)
        DW_TRY(dw__fail(
            DW_STATE,
            "this run differs from the checkpoint \"%s\": %s. Give the checkpoint's values to "
            "go on; to train further in another way, start a new run with that folder as the "
            "model",
            folder, out.text));
cleanup:
    dw__text_free(&out);
    return status;
}

/* Adds to every failure that damage may have caused how to continue without the checkpoint. */
static dw_status judge(dw_status status, const char *folder) {
    if (status != DW_IO && status != DW_PARSE) return status;
    return dw__fail_prefix(status,
                           "the checkpoint \"%s\" is damaged or cannot be read (if it is damaged, "
                           "remove that folder to resume from an earlier one)",
                           folder);
}

/* A checkpoint of a run without a limit for spikes has no losses; the limit then begins anew. */
static dw_status read_losses(const char *path, const json_t *root, dw__recent_losses *recent) {
    const json_t *list = json_object_get(root, "losses");
    if (!recent || !list) return DW_OK;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *pair = json_array_get(list, i), *step = json_array_get(pair, 0),
                     *loss = json_array_get(pair, 1);
        if (!json_is_integer(step) || !json_is_number(loss))
            return fail_manifest(path, "\"losses\" to be pairs of a step and a number");
        dw__recent_losses_add(recent, json_integer_value(step), json_number_value(loss));
    }
    return DW_OK;
}

static dw_status read_guard(const char *path, const json_t *root, dw_precision_watch *watch) {
    char *text = NULL;
    if (!watch) return DW_OK;
    DW_RETURN_IF_FAILED(dw__json_string(root, &text));
    dw_status status = dw_precision_watch_restore(watch, text);
    dw__free(text);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "\"%s\"", path);
}

/* Older checkpoints lack schedule_steps: their schedule had as many steps as their run. */
static dw_status read_progress(const char *path, const json_t *root, dw__progress *progress) {
    DW_RETURN_IF_FAILED(count_of(path, root, "step", &progress->step));
    DW_RETURN_IF_FAILED(count_of(path, root, "updates", &progress->updates));
    if (progress->updates > progress->step)
        return fail_manifest(path, "no more \"updates\" than steps");
    DW_RETURN_IF_FAILED(read_losses(path, root, progress->losses));
    DW_RETURN_IF_FAILED(read_guard(path, root, progress->watch));
    if (json_object_get(root, "schedule_steps"))
        return count_of(path, root, "schedule_steps", &progress->schedule_steps);
    return count_of(path, json_object_get(root, "options"), "steps", &progress->schedule_steps);
}

dw_status dw__manifest_step(const char *folder, int64_t *step) {
    dw_status status = DW_OK;
    char path[PATH_MAX];
    json_t *root = NULL;
    DW_RETURN_IF_FAILED(manifest_path(folder, path));
    DW_TRY(load(path, &root));
    DW_TRY(check_form(path, root));
    DW_TRY(count_of(path, root, "step", step));
cleanup:
    json_decref(root);
    return judge(status, folder);
}

dw_status dw__manifest_read(const char *folder, const char *run, dw__progress *progress,
                            char **text) {
    dw_status status = DW_OK;
    char path[PATH_MAX];
    json_t *root = NULL, *described = NULL;
    DW_RETURN_IF_FAILED(parse_run(run, &described));
    DW_TRY(manifest_path(folder, path));
    DW_TRY(load(path, &root));
    DW_TRY(check_form(path, root));
    DW_TRY(check_files(folder, path, root));
    DW_TRY(compare(folder, root, described));
    DW_TRY(read_progress(path, root, progress));
    if (text) DW_TRY(dw__json_string(root, text));
cleanup:
    json_decref(root);
    json_decref(described);
    return judge(status, folder);
}
