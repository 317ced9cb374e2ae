#include "evaluation.h"
#include <assert.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of the character at `text`, 0 if it is malformed UTF-8 or a control character. `text` ends with a NUL. */
static int character_bytes(const char *text) {
    const unsigned char first = (unsigned char)text[0], second = (unsigned char)text[1];
    if (first < 0x80) return first >= 0x20 && first != 0x7f;
    const int length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4) return 0;
    for (int at = 1; at < length; at++)
        if (((unsigned char)text[at] & 0xc0) != 0x80) return 0;
    const unsigned char least = first == 0xe0   ? 0xa0
                                : first == 0xf0 ? 0x90
                                                : 0x80,
                        most = first == 0xed   ? 0x9f
                               : first == 0xf4 ? 0x8f
                                               : 0xbf;
    return second >= least && second <= most ? length : 0;
}

dw_status lab_json_quote(lab_text *out, const char *text) {
    LAB_RETURN_IF_FAILED(lab_text_append(out, "\"", 1));
    while (*text) {
        int length = character_bytes(text);
        if (length == 0) { /* broken, or a control character */
            LAB_RETURN_IF_FAILED(lab_text_append(out, "?", 1));
            text++;
            continue;
        }
        if (*text == '"' || *text == '\\') LAB_RETURN_IF_FAILED(lab_text_append(out, "\\", 1));
        LAB_RETURN_IF_FAILED(lab_text_append(out, text, (size_t)length));
        text += length;
    }
    return lab_text_append(out, "\"", 1);
}

void lab_constants_built_in(lab_constants *constants) {
    const dw_planner_constant *table;
    const int count = dw_planner_constants(&table);
    assert(count <= LAB_CONSTANTS_MOST);
    for (int at = 0; at < count; at++) constants->value[at] = table[at].value;
}

int lab_constant_index(const char *name) {
    const dw_planner_constant *table;
    const int count = dw_planner_constants(&table);
    for (int at = 0; at < count; at++)
        if (strcmp(table[at].name, name) == 0) return at;
    return -1;
}

dw_status lab_constants_json(const lab_constants *constants, lab_text *out) {
    const dw_planner_constant *table;
    const int count = dw_planner_constants(&table);
    LAB_RETURN_IF_FAILED(lab_text_printf(out, "{"));
    for (int at = 0; at < count; at++)
        LAB_RETURN_IF_FAILED(lab_text_printf(out, "%s\n    \"%s\": %.5g", at ? "," : "",
                                             table[at].name, constants->value[at]));
    return lab_text_printf(out, "\n  }");
}

static dw_status set_constant(const char *name, const json_t *value, lab_constants *constants) {
    const dw_planner_constant *table;
    const int at = lab_constant_index(name);
    dw_planner_constants(&table);
    if (at < 0)
        return lab_fail(DW_NOT_FOUND,
                        "there is no constant \"%s\"; src/plan/planner_constants.h lists them",
                        name);
    const double number = json_number_value(value), prior = table[at].prior;
    if (!json_is_number(value) || !(number >= prior / 1000 && number <= prior * 1000))
        return lab_fail(
            DW_INVALID_ARGUMENT, "the constant \"%s\" must be a number from %g to %g, and is %s %g",
            name, prior / 1000, prior * 1000, json_is_number(value) ? "" : "no number:", number);
    constants->value[at] = number;
    return DW_OK;
}

dw_status lab_constants_load(const char *path, lab_constants *constants) {
    enum { MOST = 4 << 20 };
    dw_status status = DW_OK;
    char *text = NULL;
    size_t bytes = 0;
    json_error_t error;
    lab_constants_built_in(constants);
    LAB_RETURN_IF_FAILED(lab_file_read(path, MOST, &text, &bytes));
    json_t *root = json_loadb(text, bytes, 0, &error);
    lab_free(text);
    json_t *object = json_object_get(root, "constants");
    if (!root)
        status = lab_fail(DW_PARSE, "\"%s\", line %d: %s", path, error.line, error.text);
    else if (!json_is_object(object))
        status = lab_fail(DW_PARSE,
                          "\"%s\" has no object \"constants\"; expected a file of `deepwell-lab "
                          "calibrate`",
                          path);
    const char *name;
    json_t *value;
    json_object_foreach(object, name, value) {
        if (status == DW_OK) status = set_constant(name, value, constants);
    }
    json_decref(root);
    return status;
}

bool lab_counts(const lab_run *run) {
    return run->scored && !run->reason && run->tokens_per_second > 0 &&
           strcmp(run->group, "ultrascale") != 0;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double lab_quantile(double *values, size_t count, double part) {
    if (!count) return 0;
    qsort(values, count, sizeof *values, ascending);
    double at = part * (double)(count - 1);
    size_t below = (size_t)at;
    if (below + 1 >= count) return values[count - 1];
    return values[below] + (values[below + 1] - values[below]) * (at - (double)below);
}

static const char *kind_of(const lab_run *run) { return run->mixture ? "mixture" : "dense"; }
static const char *group_of(const lab_run *run) { return run->group; }
static const char *gpu_of(const lab_run *run) { return run->gpu; }
static const char *precision_of(const lab_run *run) {
    return dw_scheme_name(run->layout.precision);
}
static const char *any_of(const lab_run *run) { return run ? "all" : ""; }

/* Returns whether an earlier row counts and has the same key. */
static bool key_before(const lab_runs *runs, size_t row, const char *(*key)(const lab_run *)) {
    for (size_t at = 0; at < row; at++)
        if (lab_counts(&runs->rows[at]) && strcmp(key(&runs->rows[at]), key(&runs->rows[row])) == 0)
            return true;
    return false;
}

static dw_status write_split(const lab_runs *runs, const double *predicted, const char *title,
                             const char *(*key)(const lab_run *), double *errors, lab_text *out) {
    dw_status status = DW_OK;
    int written = 0;
    if (*title) LAB_TRY(lab_text_printf(out, ",\n    \"%s\": {", title));
    for (size_t first = 0; first < runs->table.rows; first++) {
        const lab_run *run = &runs->rows[first];
        if (!lab_counts(run) || key_before(runs, first, key)) continue;
        size_t count = 0;
        double sum = 0;
        for (size_t at = first; at < runs->table.rows; at++) {
            const lab_run *other = &runs->rows[at];
            if (!lab_counts(other) || strcmp(key(run), key(other)) != 0) continue;
            double ratio = predicted[at] / other->tokens_per_second;
            errors[count++] = fabs(ratio - 1);
            sum += log(ratio);
        }
        LAB_TRY(lab_text_printf(out, "%s\n      ", written++ ? "," : ""));
        LAB_TRY(lab_json_quote(out, key(run)));
        double median = lab_quantile(errors, count, 0.5), high = lab_quantile(errors, count, 0.9);
        LAB_TRY(lab_text_printf(
            out, ": {\"rows\": %zu, \"median\": %.4f, \"p90\": %.4f, \"bias\": %.4f}", count,
            median, high, exp(sum / (double)count) - 1));
    }
    if (*title) LAB_TRY(lab_text_printf(out, "}"));
cleanup:
    return status;
}

dw_status lab_write_errors(const lab_runs *runs, const double *predicted, lab_text *out) {
    dw_status status = DW_OK;
    double *errors = lab_malloc(sizeof(double) * (runs->table.rows + 1));
    if (!errors) return lab_fail_memory("errors", sizeof(double) * runs->table.rows);
    LAB_TRY(lab_text_printf(out, "{"));
    LAB_TRY(write_split(runs, predicted, "", any_of, errors, out));
    /* A file with no row that counts has no errors. */
    if (out->text[out->length - 1] == '{') LAB_TRY(lab_text_printf(out, "\"all\": {\"rows\": 0}"));
    LAB_TRY(write_split(runs, predicted, "group", group_of, errors, out));
    LAB_TRY(write_split(runs, predicted, "gpu", gpu_of, errors, out));
    LAB_TRY(write_split(runs, predicted, "precision", precision_of, errors, out));
    LAB_TRY(write_split(runs, predicted, "kind", kind_of, errors, out));
    LAB_TRY(lab_text_printf(out, "}"));
cleanup:
    lab_free(errors);
    return status;
}
