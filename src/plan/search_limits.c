/* Constraints: "tp=8", "pp<=4", "recompute=full". */
#include "plan/plan_fields.h"
#include "plan/search.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>

void dw__limits_begin(dw__limits *limits) {
    *limits = (dw__limits){0};
    dw_layout_default(&limits->base);
    for (size_t at = 0; at < dw__layout_fields.count; at++) {
        const dw__field *field = &dw__layout_fields.fields[at];
        if (field->kind != DW__FIELD_REAL) dw__field_set(&limits->high, field, INT_MAX);
    }
}

/* The search varies these members. All others have one value for all layouts. */
static int is_searched(const char *name) {
    static const char *const searched[] = {"tp",
                                           "cp",
                                           "pp",
                                           "dp",
                                           "ep",
                                           "etp",
                                           "attention_tp",
                                           "virtual_stages",
                                           "zero_stage",
                                           "shard",
                                           "reshard",
                                           "micro_batch",
                                           "schedule",
                                           "recompute",
                                           "recompute_layers",
                                           "precision",
                                           "offload_layers",
                                           "offload_optimizer"};
    for (size_t at = 0; at < DW_COUNT(searched); at++)
        if (strcmp(searched[at], name) == 0) return 1;
    return 0;
}

static dw_status fail_text(const char *text, const char *why) {
    return dw__fail(DW_INVALID_ARGUMENT,
                    "the constraint \"%.64s\" %s; expected FIELD=VALUE, FIELD<=VALUE or "
                    "FIELD>=VALUE, as in tp=8 or recompute=full",
                    text, why);
}

static dw_status fail_field(const char *text) {
    dw__text names = {0};
    dw_status status = DW_OK;
    for (size_t at = 0; at < dw__layout_fields.count; at++)
        DW_TRY(dw__text_printf(&names, "%s, ", dw__layout_fields.fields[at].name));
    status =
        dw__fail(DW_INVALID_ARGUMENT,
                 "the constraint \"%.64s\" names no field of a layout; expected one of %soffload",
                 text, names.text);
cleanup:
    dw__text_free(&names);
    return status;
}

static dw_status read_value(const dw__field *field, const char *text, const char *value,
                            int *read) {
    int count = dw__field_value_count(field->kind);
    if (count == 0) {
        size_t digits = strspn(value, "0123456789");
        if (digits == 0 || digits > 9 || value[digits])
            return fail_text(text, "has a value that is not a number");
        *read = atoi(value);
        if (field->kind == DW__FIELD_FLAG && *read > 1)
            return fail_text(text, "has a value other than 0 and 1");
        return DW_OK;
    }
    dw__text names = {0};
    dw_status status = DW_OK;
    for (int at = 0; at < count; at++) {
        const char *name = dw__field_value_name(field->kind, at);
        if (!name) continue;
        if (strcmp(name, value) == 0) {
            *read = at;
            goto cleanup;
        }
        DW_TRY(dw__text_printf(&names, "%s%s", at ? ", " : "", name));
    }
    status = dw__fail(DW_INVALID_ARGUMENT, "the constraint \"%.64s\": %s must be one of %s", text,
                      field->name, names.text);
cleanup:
    dw__text_free(&names);
    return status;
}

/* Translates the short form "offload=WORD" into constraints on both members. */
static dw_status add_offload(dw__limits *limits, const char *text, const char *value) {
    static const struct {
        const char *name, *layers, *optimizer;
    } words[] = {{"none", "offload_layers=0", "offload_optimizer=0"},
                 {"activations", "offload_layers>=1", "offload_optimizer=0"},
                 {"optimizer", "offload_layers=0", "offload_optimizer=1"},
                 {"all", "offload_layers>=1", "offload_optimizer=1"}};
    for (size_t at = 0; at < DW_COUNT(words); at++) {
        if (strcmp(words[at].name, value) != 0) continue;
        dw_status status = dw__limits_add(limits, words[at].layers);
        if (status == DW_OK) status = dw__limits_add(limits, words[at].optimizer);
        return status == DW_OK ? DW_OK : dw__fail_prefix(status, "\"%.64s\"", text);
    }
    return dw__fail(
        DW_INVALID_ARGUMENT,
        "the constraint \"%.64s\": offload must be one of none, activations, optimizer, all", text);
}

dw_status dw__limits_add(dw__limits *limits, const char *text) {
    size_t length = text ? strcspn(text, "=<>") : 0;
    if (!text || length == 0 || !text[length])
        return fail_text(text ? text : "", "has no field or no value");
    if (strncmp(text, "offload=", 8) == 0) return add_offload(limits, text, text + 8);
    const dw__field *field = dw__field_named(dw__layout_fields, text, length);
    if (!field) return fail_field(text);
    int less = text[length] == '<', more = text[length] == '>', value;
    const char *rest = text + length + (less || more);
    if (*rest != '=') return fail_text(text, "has no field or no value");
    if (strcmp(field->name, "gpus") == 0 || strcmp(field->name, "global_batch") == 0 ||
        strcmp(field->name, "seq_len") == 0)
        return fail_text(text, "sets what the request itself gives");
    if (field->kind == DW__FIELD_REAL) {
        char *end;
        double real = strtod(rest + 1, &end);
        if (less || more || *end || end == rest + 1 || !(real >= 0 && real <= INT_MAX))
            return fail_text(text, "does not have a single number as its value");
        const double one = 1;
        memcpy((char *)&limits->base + field->offset, &real, sizeof real);
        memcpy((char *)&limits->set + field->offset, &one, sizeof one);
        return DW_OK;
    }
    DW_RETURN_IF_FAILED(read_value(field, text, rest + 1, &value));
    if (field->kind == DW__FIELD_RECOMPUTE && value == DW_RECOMPUTE_AUTO) return DW_OK;
    if ((less || more) && (!is_searched(field->name) || field->kind > DW__FIELD_INTEGER))
        return fail_text(text, "gives a range to a field that takes a single value");
    int low = less ? 0 : value, high = more ? INT_MAX : value;
    int low_before = dw__field_get(&limits->low, field),
        high_before = dw__field_get(&limits->high, field);
    if (low < low_before) low = low_before;
    if (high > high_before) high = high_before;
    if (low > high)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "the constraint \"%.64s\" contradicts another constraint on %s; leave one of them out",
            text, field->name);
    dw__field_set(&limits->low, field, low);
    dw__field_set(&limits->high, field, high);
    dw__field_set(&limits->set, field, 1);
    if (!is_searched(field->name)) dw__field_set(&limits->base, field, value);
    return DW_OK;
}

int dw__limits_allow(const dw__limits *limits, const dw_layout *layout) {
    dw_layout resolved = *layout;
    if (!resolved.attention_tp) resolved.attention_tp = resolved.tp;
    for (size_t at = 0; at < dw__layout_fields.count; at++) {
        const dw__field *field = &dw__layout_fields.fields[at];
        if (field->kind == DW__FIELD_REAL || !dw__field_get(&limits->set, field)) continue;
        int value = dw__field_get(&resolved, field);
        if (value < dw__field_get(&limits->low, field) ||
            value > dw__field_get(&limits->high, field))
            return 0;
    }
    if ((limits->set.first_stage_layers > 0 &&
         layout->first_stage_layers != limits->base.first_stage_layers) ||
        (limits->set.last_stage_layers > 0 &&
         layout->last_stage_layers != limits->base.last_stage_layers))
        return 0;
    /* "recompute" alone fixes the recomputation of all layers; with "recompute_layers" it fixes their number. */
    return !limits->set.recompute || limits->set.recompute_layers || !layout->recompute_layers;
}

void dw__limits_finish(dw__limits *limits) {
    if (limits->base.framework == DW_FRAMEWORK_TORCHTITAN && !limits->set.compiled)
        limits->base.compiled = 1;
}
