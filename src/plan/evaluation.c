#include "plan/evaluation.h"
#include "base/json.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

dw_status dw__json_quote(dw__text *out, const char *text) {
    DW_RETURN_IF_FAILED(dw__text_append(out, "\"", 1));
    while (*text) {
        int length = dw__utf8_length(text);
        if (length == 0) { /* broken, or a control character */
            DW_RETURN_IF_FAILED(dw__text_append(out, "?", 1));
            text++;
            continue;
        }
        if (*text == '"' || *text == '\\') DW_RETURN_IF_FAILED(dw__text_append(out, "\\", 1));
        DW_RETURN_IF_FAILED(dw__text_append(out, text, (size_t)length));
        text += length;
    }
    return dw__text_append(out, "\"", 1);
}

dw_status dw__constants_json(const dw__constants *constants, dw__text *out) {
    const double *values = (const double *)constants;
    DW_RETURN_IF_FAILED(dw__text_printf(out, "{"));
    for (int at = 0; at < DW__CONSTANT_COUNT; at++)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s\n    \"%s\": %.5g", at ? "," : "",
                                            dw__constant_table[at].name, values[at]));
    return dw__text_printf(out, "\n  }");
}

static dw_status set_constant(const char *name, const json_t *value, dw__constants *constants) {
    for (int at = 0; at < DW__CONSTANT_COUNT; at++) {
        if (strcmp(dw__constant_table[at].name, name) != 0) continue;
        double number = json_number_value(value), prior = dw__constant_table[at].prior;
        if (!json_is_number(value) || !(number >= prior / 1000 && number <= prior * 1000))
            return dw__fail(DW_INVALID_ARGUMENT,
                            "the constant \"%s\" is %s %g; expected a number from %g to %g", name,
                            dw__json_kind(value), number, prior / 1000, prior * 1000);
        ((double *)constants)[at] = number;
        return DW_OK;
    }
    return dw__fail(
        DW_NOT_FOUND,
        "there is no constant \"%s\"; src/plan/planner_constants.h lists those that there are",
        name);
}

dw_status dw__constants_load(const char *path, dw__constants *constants) {
    enum { MOST = 4 << 20 };
    dw_status status = DW_OK;
    char *text = NULL;
    size_t bytes = 0;
    json_t *root = NULL;
    *constants = dw__constants_default;
    DW_RETURN_IF_FAILED(dw__file_read_at_most(path, MOST, &text, &bytes));
    DW_TRY(dw__json_parse(path, text, bytes, (dw__json_limits){16, 200000}, &root));
    json_t *object = json_object_get(root, "constants");
    if (!json_is_object(object)) {
        status = dw__fail(
            DW_PARSE, "\"%s\" has no object \"constants\"; expected a file of `deepwell calibrate`",
            path);
        goto cleanup;
    }
    const char *name;
    json_t *value;
    json_object_foreach(object, name, value) DW_TRY(set_constant(name, value, constants));
cleanup:
    json_decref(root);
    dw__free(text);
    return status;
}

bool dw__counts(const dw_run *run) {
    return run->scored && !run->reason && run->tokens_per_second > 0 &&
           strcmp(run->group, "ultrascale") != 0;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dw__quantile(double *values, size_t count, double part) {
    if (!count) return 0;
    qsort(values, count, sizeof *values, ascending);
    double at = part * (double)(count - 1);
    size_t below = (size_t)at;
    if (below + 1 >= count) return values[count - 1];
    return values[below] + (values[below + 1] - values[below]) * (at - (double)below);
}

static const char *kind_of(const dw_run *run) { return run->mixture ? "mixture" : "dense"; }
static const char *group_of(const dw_run *run) { return run->group; }
static const char *gpu_of(const dw_run *run) { return run->gpu; }
static const char *precision_of(const dw_run *run) {
    return dw_train_precision_name(run->layout.precision);
}
static const char *any_of(const dw_run *run) { return run ? "all" : ""; }

static dw_status write_split(const dw_runs *runs, const double *predicted, const char *title,
                             const char *(*key)(const dw_run *), double *errors, dw__text *out) {
    dw_status status = DW_OK;
    dw__map *seen = dw__map_create();
    if (!seen) return dw__fail_memory("a table of errors", 64);
    int written = 0;
    if (*title) DW_TRY(dw__text_printf(out, ",\n    \"%s\": {", title));
    for (size_t first = 0; first < runs->table.rows; first++) {
        uint32_t ignored;
        const dw_run *run = &runs->rows[first];
        if (!dw__counts(run) || dw__map_get(seen, key(run), &ignored)) continue;
        DW_TRY(dw__map_set(seen, key(run), 1));
        size_t count = 0;
        double sum = 0;
        for (size_t at = first; at < runs->table.rows; at++) {
            const dw_run *other = &runs->rows[at];
            if (!dw__counts(other) || strcmp(key(run), key(other)) != 0) continue;
            double ratio = predicted[at] / other->tokens_per_second;
            errors[count++] = fabs(ratio - 1);
            sum += log(ratio);
        }
        DW_TRY(dw__text_printf(out, "%s\n      ", written++ ? "," : ""));
        DW_TRY(dw__json_quote(out, key(run)));
        double median = dw__quantile(errors, count, 0.5), high = dw__quantile(errors, count, 0.9);
        DW_TRY(dw__text_printf(out,
                               ": {\"rows\": %zu, \"median\": %.4f, \"p90\": %.4f, \"bias\": %.4f}",
                               count, median, high, exp(sum / (double)count) - 1));
    }
    if (*title) DW_TRY(dw__text_printf(out, "}"));
cleanup:
    dw__map_destroy(seen);
    return status;
}

dw_status dw__write_errors(const dw_runs *runs, const double *predicted, dw__text *out) {
    dw_status status = DW_OK;
    double *errors = dw__malloc(sizeof(double) * (runs->table.rows + 1));
    if (!errors) return dw__fail_memory("errors", sizeof(double) * runs->table.rows);
    DW_TRY(dw__text_printf(out, "{"));
    DW_TRY(write_split(runs, predicted, "", any_of, errors, out));
    /* A file without a row that counts has no errors at all. */
    if (out->text[out->length - 1] == '{') DW_TRY(dw__text_printf(out, "\"all\": {\"rows\": 0}"));
    DW_TRY(write_split(runs, predicted, "group", group_of, errors, out));
    DW_TRY(write_split(runs, predicted, "gpu", gpu_of, errors, out));
    DW_TRY(write_split(runs, predicted, "precision", precision_of, errors, out));
    DW_TRY(write_split(runs, predicted, "kind", kind_of, errors, out));
    DW_TRY(dw__text_printf(out, "}"));
cleanup:
    dw__free(errors);
    return status;
}
