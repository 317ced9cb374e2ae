/* Judges the samples of a run with a guard (deepwell/precision_watch.h). What it knows is kept as JSON, in the form
 * that manifests have. */
#include "deepwell/precision_watch.h"
#include "base/json.h"
#include "graph/layer_precision.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define CHANGES "precision_changes"
#define FAILED "precision_failed"

struct dw_precision_watch {
    dw_precision_policy *policy; /* its guard has no members that stand for a default */
    json_t *changes; /* an array: layers that fell back, and the repair, in their order */
    json_t *failed;  /* an object: samples that a layer has failed in a row */
};

static const dw__json_limits limits = {.depth = 8, .values = 1 << 22};

static dw_status fail_memory(void) { return dw__fail_memory("the samples of a guard", 0); }

static dw_status parse(const char *what, const char *text, json_t **root) {
    return dw__json_parse(what, text, strlen(text), limits, root);
}

dw_status dw_precision_watch_create(const dw_precision_policy *policy, dw_precision_watch **watch) {
    dw_status status = DW_OK;
    *watch = NULL;
    dw_precision_watch *made = dw__calloc(1, sizeof *made);
    if (!made) return fail_memory();
    DW_TRY(dw_precision_policy_with_fallen_back(policy, 0, NULL, &made->policy));
    if (made->policy->guard.every == 0 && made->policy->guard.repair == 0.0)
        DW_TRY(dw__fail(DW_INVALID_ARGUMENT, "the precision policy has no guard to obey"));
    made->changes = json_array();
    made->failed = json_object();
    if (!made->changes || !made->failed) DW_TRY(fail_memory());
    *watch = made;
    made = NULL;
cleanup:
    dw_precision_watch_destroy(made);
    return status;
}

void dw_precision_watch_destroy(dw_precision_watch *watch) {
    if (!watch) return;
    dw_precision_policy_destroy(watch->policy);
    json_decref(watch->changes);
    json_decref(watch->failed);
    dw__free(watch);
}

/* ---- steps ----------------------------------------------------------------------------------- */

int64_t dw_precision_watch_repair_begins(const dw_precision_watch *watch, int64_t steps) {
    return steps - (int64_t)(watch->policy->guard.repair * (double)steps + 0.5) + 1;
}

int dw_precision_watch_samples(const dw_precision_watch *watch, int64_t step, int64_t steps) {
    const int64_t every = watch->policy->guard.every;
    return every > 0 && step % every == 0 && step < dw_precision_watch_repair_begins(watch, steps);
}

/* Returns the layer that a change names, or NULL if it is another change. */
static const char *layer_of(const json_t *change) {
    return json_string_value(json_object_get(change, "layer"));
}

/* Returns whether the change is a layer that has fallen back by step `step`. */
static bool applies(const json_t *change, int64_t step) {
    return layer_of(change) && json_integer_value(json_object_get(change, "from_step")) <= step;
}

int64_t dw_precision_watch_phase(const dw_precision_watch *watch, int64_t step, int64_t steps) {
    int64_t fallen = 0;
    if (steps > 0 && watch->policy->guard.repair > 0.0 &&
        step >= dw_precision_watch_repair_begins(watch, steps))
        return -1;
    for (size_t i = 0; i < json_array_size(watch->changes); i++)
        fallen += applies(json_array_get(watch->changes, i), step);
    return fallen;
}

static dw_status fallen_policy(const dw_precision_watch *watch, int64_t step,
                               dw_precision_policy **made) {
    uint32_t count = 0;
    const size_t most = json_array_size(watch->changes);
    const char **names = dw__malloc((most + 1) * sizeof *names);
    if (!names) return fail_memory();
    for (size_t i = 0; i < most; i++) {
        const json_t *change = json_array_get(watch->changes, i);
        if (applies(change, step)) names[count++] = layer_of(change);
    }
    dw_status status = dw_precision_policy_with_fallen_back(watch->policy, count, names, made);
    dw__free(names);
    return status;
}

dw_status dw_precision_watch_policy(const dw_precision_watch *watch, int64_t step, int64_t steps,
                                    char **json) {
    dw_precision_policy *made = NULL;
    *json = NULL;
    DW_RETURN_IF_FAILED(dw_precision_watch_phase(watch, step, steps) < 0
                            ? dw_precision_policy_in_bf16(watch->policy, &made)
                            : fallen_policy(watch, step, &made));
    dw_status status = dw_precision_policy_json(made, json);
    dw_precision_policy_destroy(made);
    return status;
}

/* ---- samples --------------------------------------------------------------------------------- */

static dw_status append(json_t *list, json_t *entry) {
    return entry && json_array_append_new(list, entry) == 0 ? DW_OK : fail_memory();
}

/* Infinite ratios are null. */
static json_t *ratio_json(double ratio) { return isfinite(ratio) ? json_real(ratio) : json_null(); }

static double ratio_of(double signal, double noise) {
    if (noise == 0.0) return INFINITY;
    return signal > 0.0 ? 10.0 * log10(signal / noise) : 0.0;
}

static dw_status describe_operand(json_t *list, const json_t *layer, const char *operand,
                                  const double *sums) {
    const json_t *bound = json_object_get(json_object_get(layer, "bounds"), operand);
    const char *scheme =
        json_string_value(json_object_get(json_object_get(layer, "operands"), operand));
    const char *module = json_string_value(json_object_get(layer, "module"));
    if (!bound || !(sums[2] > 0.0)) return DW_OK;
    if (!module || !scheme || !json_is_number(bound))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "an observed layer has no \"module\", or no scheme and bound for its "
                        "operand %s; expected an entry of dw_precision_layers_json",
                        operand);
    return append(
        list, json_pack("{s:s, s:s, s:s, s:o, s:f, s:I, s:I, s:I}", "layer", module, "operand",
                        operand, "scheme", scheme, "snr_db", ratio_json(ratio_of(sums[0], sums[1])),
                        "bound_db", json_number_value(bound), "elements", (json_int_t)sums[2],
                        "underflow", (json_int_t)sums[3], "saturated", (json_int_t)sums[4]));
}

dw_status dw_precision_operands_json(const char *layers, uint32_t count, const double *statistics,
                                     char **json) {
    dw_status status = DW_OK;
    json_t *root = NULL, *list = json_array();
    *json = NULL;
    if (!list) DW_TRY(fail_memory());
    DW_TRY(parse("the observed layers", layers, &root));
    if (!json_is_array(root) || json_array_size(root) != count)
        DW_TRY(dw__fail(DW_INVALID_ARGUMENT,
                        "the observed layers are %zu, and the statistics are of %" PRIu32
                        "; expected one row of statistics for each",
                        json_array_size(root), count));
    for (uint32_t i = 0; i < count; i++)
        for (int operand = 0; operand < DW_LINEAR_OPERANDS; operand++)
            DW_TRY(describe_operand(list, json_array_get(root, i),
                                    dw_attr_name(dw__operand_key((dw_linear_operand)operand)),
                                    statistics + (size_t)i * DW_LAYER_STATISTICS +
                                        (size_t)operand * DW_OPERAND_STATISTICS));
    DW_TRY(dw__json_string(list, json));
cleanup:
    json_decref(root);
    json_decref(list);
    return status;
}

/* A layer of a sample. */
typedef struct judged {
    const char *name;
    const json_t *worst; /* the operand that failed by most, or NULL if none did */
    double excess;       /* of its ratio over its bound */
    char reason[96];
} judged;

static double ratio_in(const json_t *operand) {
    const json_t *ratio = json_object_get(operand, "snr_db");
    return json_is_number(ratio) ? json_number_value(ratio) : INFINITY;
}

static double share_of(const json_t *operand) {
    return (double)json_integer_value(json_object_get(operand, "underflow")) /
           (double)json_integer_value(json_object_get(operand, "elements"));
}

/* Writes why an operand fails, or "". */
static void find_failure(const json_t *operand, double most_underflow, char reason[96]) {
    const double ratio = ratio_in(operand),
                 bound = json_number_value(json_object_get(operand, "bound_db")),
                 underflow = share_of(operand);
    reason[0] = '\0';
    if (ratio < bound)
        snprintf(reason, 96, "SNR %.1f dB, bound %.1f dB", ratio, bound);
    else if (underflow > most_underflow)
        snprintf(reason, 96, "%.1f%% of its elements became 0, bound %.0f%%", 100.0 * underflow,
                 100.0 * most_underflow);
}

static dw_status check_operand(const json_t *operand) {
    const json_t *elements = json_object_get(operand, "elements");
    static const char *const texts[] = {"layer", "operand", "scheme"};
    bool fine = json_is_integer(elements) && json_integer_value(elements) > 0 &&
                json_is_integer(json_object_get(operand, "underflow")) &&
                json_is_number(json_object_get(operand, "bound_db"));
    for (size_t i = 0; i < DW_COUNT(texts); i++)
        fine &= json_is_string(json_object_get(operand, texts[i]));
    if (fine) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT, "an operand of a sample lacks a member; expected what "
                                         "dw_precision_operands_json writes");
}

/* Lists the layers of a sample in their order, each with its worst operand. `layers` has room for one of each
 * operand. */
static dw_status judge_operands(const json_t *operands, double most_underflow, judged *layers,
                                size_t *count) {
    dw_status status = DW_OK;
    json_t *places = json_object(); /* layer -> its place in `layers` */
    if (!places) DW_TRY(fail_memory());
    for (size_t i = 0; i < json_array_size(operands); i++) {
        const json_t *operand = json_array_get(operands, i);
        char reason[96];
        DW_TRY(check_operand(operand));
        const char *name = layer_of(operand);
        const json_t *place = json_object_get(places, name);
        const size_t at = place ? (size_t)json_integer_value(place) : *count;
        if (!place) {
            if (json_object_set_new(places, name, json_integer((json_int_t)at)) != 0)
                DW_TRY(fail_memory());
            layers[(*count)++] = (judged){.name = name};
        }
        find_failure(operand, most_underflow, reason);
        const double excess =
            ratio_in(operand) - json_number_value(json_object_get(operand, "bound_db"));
        if (!*reason || (layers[at].worst && excess >= layers[at].excess)) continue;
        layers[at].worst = operand;
        layers[at].excess = excess;
        memcpy(layers[at].reason, reason, sizeof reason);
    }
cleanup:
    json_decref(places);
    return status;
}

static bool has_fallen(const json_t *changes, const char *layer) {
    for (size_t i = 0; i < json_array_size(changes); i++) {
        const char *name = layer_of(json_array_get(changes, i));
        if (name && strcmp(name, layer) == 0) return true;
    }
    return false;
}

static json_t *fallback_json(const judged *layer, int64_t step) {
    return json_pack("{s:I, s:s, s:I, s:O, s:O, s:o, s:O, s:f, s:s}", "from_step",
                     (json_int_t)(step + 2), "layer", layer->name, "sampled_step", (json_int_t)step,
                     "operand", json_object_get(layer->worst, "operand"), "scheme",
                     json_object_get(layer->worst, "scheme"), "snr_db",
                     ratio_json(ratio_in(layer->worst)), "bound_db",
                     json_object_get(layer->worst, "bound_db"), "underflow", share_of(layer->worst),
                     "reason", layer->reason);
}

/* Counts the failed samples of each layer in `failed`, and appends those that fall back to `found`. */
static dw_status count_failures(const dw_precision_watch *watch, int64_t step, size_t count,
                                const judged *layers, json_t *failed, json_t *found) {
    for (size_t i = 0; i < count; i++) {
        const judged *layer = &layers[i];
        const json_int_t before = json_integer_value(json_object_get(failed, layer->name)),
                         now = layer->worst ? before + 1 : 0;
        if (now == 0)
            json_object_del(failed, layer->name);
        else if (json_object_set_new(failed, layer->name, json_integer(now)) != 0)
            return fail_memory();
        if (now < watch->policy->guard.samples || has_fallen(watch->changes, layer->name)) continue;
        DW_RETURN_IF_FAILED(append(found, fallback_json(layer, step)));
    }
    return DW_OK;
}

/* On failure the watch is as it was. */
static dw_status add_changes(dw_precision_watch *watch, json_t *found, json_t *failed) {
    json_t *changes = json_copy(watch->changes);
    if (!changes || json_array_extend(changes, found) != 0) {
        json_decref(changes);
        return fail_memory();
    }
    json_decref(watch->changes);
    watch->changes = changes;
    if (!failed) return DW_OK;
    json_decref(watch->failed);
    watch->failed = json_incref(failed);
    return DW_OK;
}

dw_status dw_precision_watch_judge(dw_precision_watch *watch, int64_t step, const char *operands,
                                   char **changes) {
    dw_status status = DW_OK;
    json_t *root = NULL, *found = json_array(), *failed = json_copy(watch->failed);
    judged *layers = NULL;
    size_t count = 0;
    *changes = NULL;
    if (!found || !failed) DW_TRY(fail_memory());
    DW_TRY(parse("the operands of a sample", operands, &root));
    const size_t bytes = (json_array_size(root) + 1) * sizeof *layers;
    if (!(layers = dw__malloc(bytes))) DW_TRY(fail_memory());
    DW_TRY(judge_operands(root, watch->policy->guard.underflow, layers, &count));
    DW_TRY(count_failures(watch, step, count, layers, failed, found));
    DW_TRY(dw__json_string(found, changes));
    DW_TRY(add_changes(watch, found, failed));
cleanup:
    if (status != DW_OK) {
        dw_text_free(*changes);
        *changes = NULL;
    }
    dw__free(layers);
    json_decref(root);
    json_decref(found);
    json_decref(failed);
    return status;
}

dw_status dw_precision_watch_repair(dw_precision_watch *watch, int64_t step, char **change) {
    dw_status status = DW_OK;
    json_t *list = json_array();
    *change = NULL;
    if (!list) DW_TRY(fail_memory());
    DW_TRY(append(list, json_pack("{s:I, s:b}", "from_step", (json_int_t)step, "repair", 1)));
    DW_TRY(dw__json_string(json_array_get(list, 0), change));
    DW_TRY(add_changes(watch, list, NULL));
cleanup:
    if (status != DW_OK) {
        dw_text_free(*change);
        *change = NULL;
    }
    json_decref(list);
    return status;
}

dw_status dw_precision_change_text(const char *change, char **text) {
    dw_status status = DW_OK;
    json_t *root = NULL;
    dw__text out = {0};
    *text = NULL;
    DW_TRY(parse("a change of precision", change, &root));
    const char *layer = layer_of(root);
    const long long from = json_integer_value(json_object_get(root, "from_step"));
    if (!layer) {
        DW_TRY(dw__text_printf(&out, "step %lld  every layer is BF16 from here on (repair)", from));
    } else {
        const char *operand = json_string_value(json_object_get(root, "operand")),
                   *scheme = json_string_value(json_object_get(root, "scheme")),
                   *reason = json_string_value(json_object_get(root, "reason"));
        DW_TRY(dw__text_printf(&out,
                               "step %lld  %s falls back to BF16 from step %lld on: %s in %s: %s",
                               (long long)json_integer_value(json_object_get(root, "sampled_step")),
                               *layer ? layer : "(the model)", from, operand ? operand : "?",
                               scheme ? scheme : "?", reason ? reason : "?"));
    }
    *text = out.text;
    out = (dw__text){0};
cleanup:
    dw__text_free(&out);
    json_decref(root);
    return status;
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

dw_status dw_precision_watch_state(const dw_precision_watch *watch, char **json) {
    json_t *root = json_object();
    *json = NULL;
    bool fine = root != NULL;
    if (fine && json_array_size(watch->changes) > 0)
        fine = json_object_set(root, CHANGES, watch->changes) == 0;
    if (fine && json_object_size(watch->failed) > 0)
        fine = json_object_set(root, FAILED, watch->failed) == 0;
    dw_status status = fine ? dw__json_string(root, json) : fail_memory();
    json_decref(root);
    return status;
}

static bool is_change(const json_t *change) {
    const json_t *from = json_object_get(change, "from_step");
    return json_is_integer(from) &&
           (layer_of(change) || json_is_true(json_object_get(change, "repair")));
}

static dw_status check_state(const json_t *changes, const json_t *failed) {
    const char *layer;
    json_t *value;
    size_t i;
    if (changes && !json_is_array(changes))
        return dw__json_wrong_kind("\"" CHANGES "\"", changes, "a list");
    json_array_foreach((json_t *)changes, i, value) {
        if (!is_change(value))
            return dw__fail(DW_PARSE,
                            "\"" CHANGES "\"[%zu] has no integer \"from_step\", or neither a "
                            "\"layer\" nor \"repair\"; it is not what deepwell wrote",
                            i);
    }
    if (failed && !json_is_object(failed))
        return dw__json_wrong_kind("\"" FAILED "\"", failed, "an object");
    json_object_foreach((json_t *)failed, layer, value) {
        if (!json_is_integer(value) || json_integer_value(value) < 0)
            return dw__json_wrong_kind("an entry of \"" FAILED "\"", value,
                                       "how many samples in a row a layer has failed");
    }
    return DW_OK;
}

dw_status dw_precision_watch_restore(dw_precision_watch *watch, const char *json) {
    dw_status status = DW_OK;
    json_t *root = NULL, *changes = NULL, *failed = NULL;
    DW_TRY(parse("the state of a guard", json, &root));
    const json_t *kept = json_object_get(root, CHANGES), *counts = json_object_get(root, FAILED);
    DW_TRY(check_state(kept, counts));
    changes = kept ? json_copy((json_t *)kept) : json_array();
    failed = counts ? json_copy((json_t *)counts) : json_object();
    if (!changes || !failed) DW_TRY(fail_memory());
    json_decref(watch->changes);
    json_decref(watch->failed);
    watch->changes = changes;
    watch->failed = failed;
    changes = failed = NULL;
cleanup:
    json_decref(changes);
    json_decref(failed);
    json_decref(root);
    return status;
}
