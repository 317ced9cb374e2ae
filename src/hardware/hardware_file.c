/* Reads and writes description files: the output of `deepwell probe`, which people edit.
 *
 * A figure is a number, or {"value": 3.35e12, "kind": "measured", "source": "..."}. Figures that the file omits come
 * from the named profile. An unknown field is refused, since it is probably misspelt. "machine" holds the probe's
 * description of single devices and links for people; plans do not read it. */
#include "base/json.h"
#include "hardware/hardware_internal.h"
#include <math.h>
#include <string.h>

enum { FILE_MOST = 1 << 24 /* bytes */ };
static const dw__json_limits limits = {.depth = 16, .values = 1 << 20};

/* ---- reading -------------------------------------------------------------------------------- */

static dw_status fail_unknown(const char *what, const char *key, const char *expected) {
    return dw__fail(DW_PARSE, "%s has a field \"%.64s\"; expected %s", what, key, expected);
}

static dw_status check_fields(const json_t *root) {
    static const char *const known[] = {"profile", "rates", "machine",
#define NAME(member, ...) #member,
                                        DW_HARDWARE_TEXTS(NAME) DW_HARDWARE_COUNTS(NAME)
                                            DW_HARDWARE_FIGURES(NAME)
#undef NAME
    };
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)root, key, value) {
        size_t at = 0;
        while (at < DW_COUNT(known) && strcmp(known[at], key) != 0) at++;
        if (at == DW_COUNT(known))
            return fail_unknown("it", key,
#define LIST(member, ...) #member ", "
                                "profile, rates, " DW_HARDWARE_TEXTS(LIST) DW_HARDWARE_COUNTS(LIST)
                                    DW_HARDWARE_FIGURES(LIST) "or machine");
#undef LIST
    }
    return DW_OK;
}

static dw_status read_kind(const json_t *json, dw_figure_kind *kind) {
    const char *text = NULL;
    *kind = DW_FIGURE_GIVEN;
    DW_RETURN_IF_FAILED(dw__json_text(json, "kind", &text));
    if (!text) return DW_OK;
    for (int i = DW_FIGURE_PUBLISHED; i <= DW_FIGURE_GIVEN; i++)
        if (strcmp(dw__figure_kind_name((dw_figure_kind)i), text) == 0) {
            *kind = (dw_figure_kind)i;
            return DW_OK;
        }
    return dw__fail(DW_PARSE,
                    "kind is \"%.64s\"; expected published, read, measured, estimated or given",
                    text);
}

static dw_status read_figure_object(const json_t *json, const char *name, dw_figure *figure) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)json, key, value) {
        if (strcmp(key, "value") != 0 && strcmp(key, "kind") != 0 && strcmp(key, "source") != 0)
            return fail_unknown(name, key, "value, kind or source");
    }
    const json_t *number = dw__json_member(json, "value");
    if (!json_is_number(number)) return dw__json_wrong_kind("value", number, "a number");
    figure->value = json_number_value(number);
    DW_RETURN_IF_FAILED(read_kind(json, &figure->kind));
    DW_RETURN_IF_FAILED(dw__json_text(json, "source", &figure->source));
    if (!figure->source) figure->source = "";
    return DW_OK;
}

/* Keeps the figure if the file does not give it. */
static dw_status read_figure(const json_t *object, const char *name, dw_figure *figure) {
    const json_t *json = dw__json_member(object, name);
    if (!json) return DW_OK;
    if (json_is_number(json)) {
        *figure = (dw_figure){json_number_value(json), DW_FIGURE_GIVEN, ""};
        return DW_OK;
    }
    if (!json_is_object(json))
        return dw__json_wrong_kind(name, json, "a number, or an object with \"value\"");
    dw_status status = read_figure_object(json, name, figure);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "%s", name);
}

static dw_status read_rates(const json_t *root, dw_hardware *hardware) {
    const json_t *rates = dw__json_member(root, "rates");
    const char *key;
    json_t *value;
    if (!rates) return DW_OK;
    if (!json_is_object(rates)) return dw__json_wrong_kind("rates", rates, "an object");
    json_object_foreach((json_t *)rates, key, value) {
        int at = 0;
        while (at < DW_RATES && strcmp(dw_rate_name((dw_rate)at), key) != 0) at++;
        if (at == DW_RATES)
            return fail_unknown("rates", key, "fp32, tf32, bf16, fp8, mxfp8 or fp4");
        dw_status status = read_figure(rates, key, &hardware->rate[at]);
        if (status != DW_OK) return dw__fail_prefix(status, "rates");
    }
    return DW_OK;
}

static dw_status read_count(const json_t *root, const char *name, int64_t low, int64_t high,
                            int *count) {
    int64_t value;
    DW_RETURN_IF_FAILED(dw__json_integer(root, name, INT64_MIN, INT64_MAX, *count, &value));
    DW_RETURN_IF_FAILED(dw__hardware_check_count(name, value, low, high));
    *count = (int)value;
    return DW_OK;
}

static dw_status read_text(const json_t *root, const char *name, const char **text) {
    const char *found;
    DW_RETURN_IF_FAILED(dw__json_text(root, name, &found));
    if (found) *text = found;
    return DW_OK;
}

/* Without a profile the file must state how many GPUs form a node and a domain, unless there is at most one GPU. */
static dw_status read_counts(const json_t *root, dw_hardware *hardware) {
    DW_RETURN_IF_FAILED(read_count(root, "gpus", 0, DW_HARDWARE_MOST_GPUS, &hardware->gpus));
    if (hardware->gpus <= 1) {
        if (hardware->gpus_per_node < 0) hardware->gpus_per_node = hardware->gpus;
        if (hardware->gpus_per_domain < 0) hardware->gpus_per_domain = hardware->gpus;
    }
#define READ(member, low, high)                                                                    \
    DW_RETURN_IF_FAILED(read_count(root, #member, low, high, &hardware->member));
    DW_HARDWARE_COUNTS(READ)
#undef READ
    return DW_OK;
}

static dw_status read_base(const json_t *root, dw_hardware *hardware) {
    const char *profile = NULL;
    DW_RETURN_IF_FAILED(read_text(root, "profile", &profile));
    const dw_hardware *found = profile ? dw__hardware_profile(profile) : NULL;
    if (profile && !found) return dw__fail_prefix(dw__hardware_no_profile(profile), "profile");
    *hardware =
        found ? *found : (dw_hardware){.gpus = -1, .gpus_per_node = -1, .gpus_per_domain = -1};
    return DW_OK;
}

/* The texts of the result belong to `root`. */
static dw_status read_all(const json_t *root, dw_hardware *hardware) {
    if (!json_is_object(root)) return dw__json_wrong_kind("it", root, "an object");
    const json_t *machine = dw__json_member(root, "machine");
    DW_RETURN_IF_FAILED(check_fields(root));
    if (machine && !json_is_object(machine))
        return dw__json_wrong_kind("machine", machine, "an object");
    DW_RETURN_IF_FAILED(read_base(root, hardware));
    DW_RETURN_IF_FAILED(read_counts(root, hardware));
#define READ(member) DW_RETURN_IF_FAILED(read_text(root, #member, &hardware->member));
    DW_HARDWARE_TEXTS(READ)
#undef READ
    DW_RETURN_IF_FAILED(read_rates(root, hardware));
#define READ(member) DW_RETURN_IF_FAILED(read_figure(root, #member, &hardware->member));
    DW_HARDWARE_FIGURES(READ)
#undef READ
    return DW_OK;
}

dw_status dw_hardware_parse(const char *json, size_t bytes, dw_hardware **hardware) {
    dw_status status = DW_OK;
    json_t *root = NULL;
    dw_hardware read;
    if (!json || !hardware)
        return dw__fail(DW_INVALID_ARGUMENT, "the text of a hardware description is NULL");
    *hardware = NULL;
    DW_RETURN_IF_FAILED(dw__json_parse("hardware description", json, bytes, limits, &root));
    DW_TRY(read_all(root, &read));
    DW_TRY(dw__hardware_copy(&read, hardware));
cleanup:
    json_decref(root);
    return status;
}

dw_status dw_hardware_load(const char *path, dw_hardware **hardware) {
    char *bytes = NULL;
    size_t count = 0;
    if (!path || !hardware)
        return dw__fail(DW_INVALID_ARGUMENT, "the path of a hardware description is NULL");
    *hardware = NULL;
    DW_RETURN_IF_FAILED(dw__file_read_at_most(path, FILE_MOST, &bytes, &count));
    dw_status status = dw_hardware_parse(bytes, count, hardware);
    dw__free(bytes);
    if (status == DW_OK || status == DW_OUT_OF_MEMORY) return status;
    return dw__fail_prefix(status, "\"%s\"", path);
}

/* ---- writing -------------------------------------------------------------------------------- */

dw_status dw__hardware_put_json(json_t *object, const char *key, json_t *value) {
    if (value && json_object_set_new(object, key, value) == 0) return DW_OK;
    return dw__fail_memory("a hardware description", strlen(key));
}

static json_t *number(double value) {
    bool whole = fabs(value) < 1e15 && value == (double)(int64_t)value;
    return whole ? json_integer((int64_t)value) : json_real(value);
}

dw_status dw__hardware_put_figure(json_t *object, const char *key, const dw_figure *figure) {
    const char *kind = dw__figure_kind_name(figure->kind);
    if (figure->value == 0.0 && !kind) return DW_OK;
    json_t *json = json_object();
    DW_RETURN_IF_FAILED(dw__hardware_put_json(object, key, json));
    DW_RETURN_IF_FAILED(dw__hardware_put_json(json, "value", number(figure->value)));
    DW_RETURN_IF_FAILED(dw__hardware_put_json(json, "kind", json_string(kind ? kind : "given")));
    return dw__hardware_put_json(json, "source", json_string(figure->source));
}

static dw_status put_rates(json_t *root, const dw_hardware *hardware) {
    json_t *rates = json_object();
    DW_RETURN_IF_FAILED(dw__hardware_put_json(root, "rates", rates));
    for (int i = 0; i < DW_RATES; i++)
        DW_RETURN_IF_FAILED(
            dw__hardware_put_figure(rates, dw_rate_name((dw_rate)i), &hardware->rate[i]));
    return DW_OK;
}

dw_status dw__hardware_put(json_t *root, const dw_hardware *hardware) {
#define PUT(member)                                                                                \
    DW_RETURN_IF_FAILED(dw__hardware_put_json(root, #member, json_string(hardware->member)));
    DW_HARDWARE_TEXTS(PUT)
#undef PUT
#define PUT(member, low, high)                                                                     \
    DW_RETURN_IF_FAILED(dw__hardware_put_json(root, #member, json_integer(hardware->member)));
    DW_HARDWARE_COUNTS(PUT)
#undef PUT
    DW_RETURN_IF_FAILED(put_rates(root, hardware));
#define PUT(member) DW_RETURN_IF_FAILED(dw__hardware_put_figure(root, #member, &hardware->member));
    DW_HARDWARE_FIGURES(PUT)
#undef PUT
    return DW_OK;
}

dw_status dw__hardware_text(const json_t *root, char **text) {
    dw_status status = DW_OK;
    dw__text written = {0};
    DW_TRY(dw__json_write(root, &written));
    DW_TRY(dw__text_append(&written, "\n", 1));
    *text = written.text;
    written.text = NULL;
cleanup:
    dw__text_free(&written);
    return status;
}

dw_status dw_hardware_json(const dw_hardware *hardware, char **text) {
    dw_status status = DW_OK;
    if (!hardware || !text) return dw__fail(DW_INVALID_ARGUMENT, "the hardware or `text` is NULL");
    *text = NULL;
    json_t *root = json_object();
    if (!root) return dw__fail_memory("a hardware description", sizeof *hardware);
    DW_TRY(dw__hardware_put(root, hardware));
    DW_TRY(dw__hardware_text(root, text));
cleanup:
    json_decref(root);
    return status;
}
