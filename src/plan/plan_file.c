/* Reads and writes plan files: the output of `deepwell plan`, which people edit. Members have the structures' names.
 *
 * Members of the layout that the file omits have the values of dw_layout_default. A file without a prediction is
 * predicted when it is read, so remove the prediction after editing the layout. */
#include "plan/plan_file.h"
#include "base/json.h"
#include "deepwell/graph.h"
#include "plan/plan_fields.h"
#include "plan/plan_text.h"
#include <limits.h>
#include <math.h>
#include <string.h>

enum { FILE_MOST = 1 << 24 /* bytes */, OTHERS_MOST = 1024 };
static const dw__json_limits limits = {.depth = 16, .values = 1 << 20};

/* ---- plans ---------------------------------------------------------------------------------- */

void dw_autoplan_destroy(dw_autoplan *plan) {
    dw__autoplan *own = (dw__autoplan *)plan;
    if (!own) return;
    dw_hardware_destroy(own->hardware);
    dw__arena_destroy(own->arena);
    dw__free(own);
}

dw_status dw__autoplan_text(dw__autoplan *plan, const char *text, const char **copy) {
    *copy = dw__arena_strdup(plan->arena, text);
    return *copy ? DW_OK : dw__fail_memory("a plan", strlen(text));
}

dw_status dw__autoplan_others(dw__autoplan *plan, size_t count, dw_autoplan_other **others) {
    *others = dw__arena_alloc(plan->arena, (count ? count : 1) * sizeof **others);
    if (!*others) return dw__fail_memory("a plan", count * sizeof **others);
    for (size_t at = 0; at < count; at++)
        (*others)[at].name = (*others)[at].why = (*others)[at].unmeasured = "";
    return DW_OK;
}

dw_status dw__autoplan_kernels(dw__autoplan *plan, size_t count, dw_autoplan_kernel **kernels) {
    *kernels = dw__arena_alloc(plan->arena, (count ? count : 1) * sizeof **kernels);
    if (!*kernels) return dw__fail_memory("a plan", count * sizeof **kernels);
    for (size_t at = 0; at < count; at++)
        (*kernels)[at].operation = (*kernels)[at].kernel = (*kernels)[at].source = "";
    return DW_OK;
}

dw_status dw__autoplan_create(const char *model_name, const dw_model_sizes *model,
                              const dw_hardware *hardware, dw__autoplan **plan) {
    dw_status status = DW_OK;
    dw__autoplan *made = dw__calloc(1, sizeof *made);
    *plan = NULL;
    if (!made) return dw__fail_memory("a plan", sizeof *made);
    made->arena = dw__arena_create();
    if (!made->arena) DW_TRY(dw__fail_memory("a plan", sizeof *made));
    DW_TRY(dw__autoplan_text(made, model_name ? model_name : "", &made->plan.model_name));
    DW_TRY(dw_hardware_with_gpus(hardware, hardware->gpus, &made->hardware));
    made->plan.model = *model;
    made->plan.hardware = made->hardware;
    made->plan.tightest = made->plan.unmeasured = "";
    dw_layout_default(&made->plan.layout);
    *plan = made;
    return DW_OK;
cleanup:
    dw_autoplan_destroy(&made->plan);
    return status;
}

static dw_status check_finite(const void *structure, dw__field_list list) {
    for (size_t at = 0; at < list.count; at++) {
        if (list.fields[at].kind != DW__FIELD_REAL) continue;
        if (!isfinite(dw__field_real(structure, &list.fields[at])))
            return dw__fail(DW_INVALID_ARGUMENT,
                            "the prediction's %s is not finite; correct the model or the hardware: "
                            "one of its figures is unrealistic",
                            list.fields[at].name);
    }
    return DW_OK;
}

dw_status dw__prediction_check(const dw_prediction *prediction) {
    DW_RETURN_IF_FAILED(check_finite(prediction, dw__prediction_fields));
    DW_RETURN_IF_FAILED(check_finite(&prediction->time, dw__time_fields));
    return check_finite(&prediction->memory, dw__memory_fields);
}

dw_status dw_autoplan_of(const char *model_name, const dw_model_sizes *model,
                         const dw_hardware *hardware, const dw_layout *layout, dw_autoplan **plan) {
    dw_status status = DW_OK;
    dw__autoplan *made = NULL;
    if (!model || !hardware || !layout || !plan)
        return dw__fail(DW_INVALID_ARGUMENT, "a plan's model, hardware or layout is NULL");
    *plan = NULL;
    DW_RETURN_IF_FAILED(dw__autoplan_create(model_name, model, hardware, &made));
    made->plan.layout = *layout;
    DW_TRY(dw_predict(model, hardware, layout, &made->plan.prediction));
    DW_TRY(dw__prediction_check(&made->plan.prediction));
    made->plan.layout.recompute = made->plan.prediction.recompute;
    made->plan.layout.recompute_layers = made->plan.prediction.recompute_layers;
    *plan = &made->plan;
    return DW_OK;
cleanup:
    dw_autoplan_destroy(&made->plan);
    return status;
}

/* ---- reading -------------------------------------------------------------------------------- */

static dw_status check_members(const json_t *object, dw__field_list list,
                               const char *const *besides) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value) {
        if (dw__field_named(list, key, strlen(key))) continue;
        const char *const *at = besides;
        while (*at && strcmp(*at, key) != 0) at++;
        if (!*at)
            return dw__fail(DW_PARSE, "there is no field \"%.64s\"; see docs/autoplan.md", key);
    }
    return DW_OK;
}

static dw_status read_name(const json_t *object, const dw__field *field, int *value) {
    const char *text = NULL;
    DW_RETURN_IF_FAILED(dw__json_text(object, field->name, &text));
    for (int at = 0; at < dw__field_value_count(field->kind); at++) {
        const char *name = dw__field_value_name(field->kind, at);
        *value = at;
        if (name && strcmp(name, text) == 0) return DW_OK;
    }
    return dw__fail(DW_PARSE, "%s is \"%.64s\"; see docs/autoplan.md for its values", field->name,
                    text);
}

static dw_status read_field(const json_t *object, const dw__field *field, void *structure) {
    int value = 0;
    if (field->kind == DW__FIELD_REAL) {
        double real;
        DW_RETURN_IF_FAILED(dw__json_number(object, field->name, -HUGE_VAL, HUGE_VAL, NAN, &real));
        if (!isfinite(real)) return dw__fail(DW_PARSE, "%s is not finite", field->name);
        memcpy((char *)structure + field->offset, &real, sizeof real);
        return DW_OK;
    }
    if (field->kind == DW__FIELD_FLAG) {
        bool flag;
        DW_RETURN_IF_FAILED(dw__json_flag(object, field->name, false, &flag));
        value = flag;
    } else if (field->kind == DW__FIELD_INTEGER) {
        int64_t read;
        DW_RETURN_IF_FAILED(dw__json_integer(object, field->name, 0, INT_MAX, 0, &read));
        value = (int)read;
    } else {
        DW_RETURN_IF_FAILED(read_name(object, field, &value));
    }
    dw__field_set(structure, field, value);
    return DW_OK;
}

/* Reads the fields that the object has. With `all` a missing field is an error, otherwise it keeps its value. */
static dw_status read_fields(const json_t *object, dw__field_list list, int all,
                             const char *const *besides, void *structure) {
    if (!json_is_object(object)) return dw__json_wrong_kind("it", object, "an object");
    DW_RETURN_IF_FAILED(check_members(object, list, besides));
    for (size_t at = 0; at < list.count; at++) {
        if (!dw__json_member(object, list.fields[at].name)) {
            if (all) return dw__fail(DW_PARSE, "%s is missing", list.fields[at].name);
            continue;
        }
        DW_RETURN_IF_FAILED(read_field(object, &list.fields[at], structure));
    }
    return DW_OK;
}

static const char *const nothing[] = {NULL};

#define DW_READ_MEMBER(object, name, call)                                                         \
    do {                                                                                           \
        dw_status status_ = (call);                                                                \
        if (status_ == DW_OUT_OF_MEMORY) return status_;                                           \
        if (status_ != DW_OK) return dw__fail_prefix(status_, name);                               \
    } while (0)

static dw_status read_prediction(const json_t *object, dw_prediction *prediction) {
    static const char *const besides[] = {"time", "memory", NULL};
    DW_RETURN_IF_FAILED(read_fields(object, dw__prediction_fields, 1, besides, prediction));
    DW_READ_MEMBER(object, "time",
                   read_fields(dw__json_member(object, "time"), dw__time_fields, 1, nothing,
                               &prediction->time));
    DW_READ_MEMBER(object, "memory",
                   read_fields(dw__json_member(object, "memory"), dw__memory_fields, 1, nothing,
                               &prediction->memory));
    return DW_OK;
}

static dw_status read_layout(const json_t *object, dw_layout *layout) {
    dw_layout_default(layout);
    return read_fields(object, dw__layout_fields, 0, nothing, layout);
}

static dw_status read_own_text(const json_t *object, const char *name, dw__autoplan *plan,
                               const char **text) {
    const char *found = NULL;
    DW_RETURN_IF_FAILED(dw__json_text(object, name, &found));
    return dw__autoplan_text(plan, found ? found : "", text);
}

static dw_status read_other(const json_t *json, dw__autoplan *plan, dw_autoplan_other *other) {
    bool found;
    if (!json_is_object(json)) return dw__json_wrong_kind("it", json, "an object");
    DW_RETURN_IF_FAILED(read_own_text(json, "name", plan, &other->name));
    DW_RETURN_IF_FAILED(read_own_text(json, "why", plan, &other->why));
    DW_RETURN_IF_FAILED(read_own_text(json, "unmeasured", plan, &other->unmeasured));
    DW_RETURN_IF_FAILED(dw__json_flag(json, "found", true, &found));
    other->found = found;
    if (!found) return DW_OK;
    DW_RETURN_IF_FAILED(dw__json_number(json, "loss", -HUGE_VAL, HUGE_VAL, NAN, &other->loss));
    DW_READ_MEMBER(json, "layout", read_layout(dw__json_member(json, "layout"), &other->layout));
    DW_READ_MEMBER(json, "prediction",
                   read_prediction(dw__json_member(json, "prediction"), &other->prediction));
    return DW_OK;
}

static dw_status read_others(const json_t *root, const char *name, dw__autoplan *plan,
                             const dw_autoplan_other **others, uint32_t *count) {
    const json_t *list = dw__json_member(root, name);
    size_t at, number = json_array_size(list);
    json_t *json;
    dw_autoplan_other *made;
    *others = NULL;
    *count = 0;
    if (!list) return DW_OK;
    if (!json_is_array(list)) return dw__json_wrong_kind(name, list, "an array");
    if (number > OTHERS_MOST)
        return dw__fail(DW_PARSE, "%s has %zu elements; expected at most %d", name, number,
                        OTHERS_MOST);
    DW_RETURN_IF_FAILED(dw__autoplan_others(plan, number, &made));
    json_array_foreach((json_t *)list, at, json) {
        dw_status status = read_other(json, plan, &made[at]);
        if (status != DW_OK && status != DW_OUT_OF_MEMORY)
            return dw__fail_prefix(status, "%s[%zu]", name, at);
        if (status != DW_OK) return status;
    }
    *others = made;
    *count = (uint32_t)number;
    return DW_OK;
}

static dw_status read_kernel(const json_t *json, dw__autoplan *plan, dw_autoplan_kernel *kernel) {
    if (!json_is_object(json)) return dw__json_wrong_kind("it", json, "an object");
    DW_RETURN_IF_FAILED(read_own_text(json, "operation", plan, &kernel->operation));
    DW_RETURN_IF_FAILED(read_own_text(json, "kernel", plan, &kernel->kernel));
    DW_RETURN_IF_FAILED(dw__json_number(json, "predicted", 0, 1e30, 0, &kernel->predicted));
    DW_RETURN_IF_FAILED(dw__json_number(json, "measured", 0, 1e30, 0, &kernel->measured));
    return read_own_text(json, "source", plan, &kernel->source);
}

static dw_status read_kernels(const json_t *root, dw__autoplan *plan) {
    const json_t *list = dw__json_member(root, "kernels");
    size_t at, number = json_array_size(list);
    json_t *json;
    dw_autoplan_kernel *made;
    if (!list) return DW_OK;
    if (!json_is_array(list)) return dw__json_wrong_kind("kernels", list, "an array");
    if (number > OTHERS_MOST)
        return dw__fail(DW_PARSE, "kernels has %zu elements; expected at most %d", number,
                        OTHERS_MOST);
    DW_RETURN_IF_FAILED(dw__autoplan_kernels(plan, number, &made));
    json_array_foreach((json_t *)list, at, json) {
        dw_status status = read_kernel(json, plan, &made[at]);
        if (status == DW_OUT_OF_MEMORY) return status;
        if (status != DW_OK) return dw__fail_prefix(status, "kernels[%zu]", at);
    }
    plan->plan.kernels = made;
    plan->plan.kernel_count = (uint32_t)number;
    return DW_OK;
}

static dw_status read_hardware(const json_t *json, dw_hardware **hardware) {
    dw__text text = {0};
    if (!json_is_object(json)) return dw__json_wrong_kind("it", json, "an object");
    dw_status status = dw__json_write(json, &text);
    if (status == DW_OK) status = dw_hardware_parse(text.text, text.length, hardware);
    dw__text_free(&text);
    return status;
}

static dw_status read_version(const json_t *root) {
    int64_t version;
    DW_RETURN_IF_FAILED(dw__json_integer(root, "version", 1, INT_MAX, -1, &version));
    if (version <= DW_AUTOPLAN_VERSION) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "version is %lld, and this Deepwell reads up to %d; make the plan again, or "
                    "use the Deepwell version that wrote it",
                    (long long)version, DW_AUTOPLAN_VERSION);
}

static dw_status read_rest(const json_t *root, dw__autoplan *own) {
    dw_autoplan *plan = &own->plan;
    const json_t *prediction = dw__json_member(root, "prediction"),
                 *statistics = dw__json_member(root, "statistics");
    int64_t needed;
    DW_READ_MEMBER(root, "layout", read_layout(dw__json_member(root, "layout"), &plan->layout));
    DW_RETURN_IF_FAILED(dw__json_number(root, "reserve", 0, 1e15, 0, &plan->reserve));
    DW_READ_MEMBER(root, "layout", dw_layout_check(&plan->model, plan->hardware, &plan->layout));
    if (plan->layout.gpus != plan->hardware->gpus)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the layout has %d GPUs and the hardware %d; expected equal numbers",
                        plan->layout.gpus, plan->hardware->gpus);
    if (prediction) {
        DW_READ_MEMBER(root, "prediction", read_prediction(prediction, &plan->prediction));
    } else {
        DW_RETURN_IF_FAILED(
            dw_predict(&plan->model, plan->hardware, &plan->layout, &plan->prediction));
        DW_RETURN_IF_FAILED(dw__prediction_check(&plan->prediction));
    }
    plan->layout.recompute = plan->prediction.recompute;
    plan->layout.recompute_layers = plan->prediction.recompute_layers;
    if (statistics)
        DW_READ_MEMBER(
            root, "statistics",
            read_fields(statistics, dw__statistics_fields, 0, nothing, &plan->statistics));
    DW_RETURN_IF_FAILED(
        read_others(root, "runners_up", own, &plan->runners_up, &plan->runner_up_count));
    DW_RETURN_IF_FAILED(read_others(root, "what_ifs", own, &plan->what_ifs, &plan->what_if_count));
    DW_RETURN_IF_FAILED(read_others(root, "bolder", own, &plan->bolder, &plan->bolder_count));
    DW_RETURN_IF_FAILED(read_kernels(root, own));
    DW_RETURN_IF_FAILED(read_own_text(root, "tightest", own, &plan->tightest));
    DW_RETURN_IF_FAILED(read_own_text(root, "unmeasured", own, &plan->unmeasured));
    DW_RETURN_IF_FAILED(dw__json_integer(root, "gpus_needed", 0, INT_MAX, 0, &needed));
    plan->gpus_needed = (int)needed;
    return DW_OK;
}

static dw_status read_plan(const json_t *root, dw__autoplan **own) {
    static const char *const members[] = {"version",    "model",      "hardware",   "layout",
                                          "prediction", "reserve",    "statistics", "runners_up",
                                          "what_ifs",   "kernels",    "tightest",   "gpus_needed",
                                          "bolder",     "unmeasured", "remarks",    NULL};
    static const char *const besides[] = {"name", NULL};
    dw_status status = DW_OK;
    dw_hardware *hardware = NULL;
    dw_model_sizes model = {0};
    const json_t *json = dw__json_member(root, "model");
    const char *name = NULL;
    if (!json_is_object(root)) return dw__json_wrong_kind("it", root, "an object");
    DW_RETURN_IF_FAILED(check_members(root, (dw__field_list){NULL, 0}, members));
    DW_RETURN_IF_FAILED(read_version(root));
    DW_READ_MEMBER(root, "model", read_fields(json, dw__model_fields, 0, besides, &model));
    DW_READ_MEMBER(root, "model", dw__json_text(json, "name", &name));
    DW_RETURN_IF_FAILED(dw_model_sizes_check(&model));
    DW_READ_MEMBER(root, "hardware", read_hardware(dw__json_member(root, "hardware"), &hardware));
    DW_TRY(dw__autoplan_create(name, &model, hardware, own));
    DW_TRY(read_rest(root, *own));
cleanup:
    dw_hardware_destroy(hardware);
    return status;
}

dw_status dw_autoplan_parse(const char *json, size_t bytes, dw_autoplan **plan) {
    json_t *root = NULL;
    dw__autoplan *own = NULL;
    if (!json || !plan) return dw__fail(DW_INVALID_ARGUMENT, "the text of a plan is NULL");
    *plan = NULL;
    DW_RETURN_IF_FAILED(dw__json_parse("plan", json, bytes, limits, &root));
    dw_status status = read_plan(root, &own);
    json_decref(root);
    if (status != DW_OK) {
        if (own) dw_autoplan_destroy(&own->plan);
        return status;
    }
    *plan = &own->plan;
    return DW_OK;
}

dw_status dw_autoplan_load(const char *path, dw_autoplan **plan) {
    char *bytes = NULL;
    size_t count = 0;
    if (!path || !plan) return dw__fail(DW_INVALID_ARGUMENT, "the path of a plan is NULL");
    *plan = NULL;
    DW_RETURN_IF_FAILED(dw__file_read_at_most(path, FILE_MOST, &bytes, &count));
    dw_status status = dw_autoplan_parse(bytes, count, plan);
    dw__free(bytes);
    if (status == DW_OK || status == DW_OUT_OF_MEMORY) return status;
    return dw__fail_prefix(status, "\"%s\"", path);
}

/* ---- writing -------------------------------------------------------------------------------- */

static dw_status put(json_t *object, const char *key, json_t *value) {
    if (value && json_object_set_new(object, key, value) == 0) return DW_OK;
    return dw__fail_memory("a plan", strlen(key));
}

static dw_status put_fields(json_t *object, dw__field_list list, const void *structure) {
    for (size_t at = 0; at < list.count; at++) {
        const dw__field *field = &list.fields[at];
        json_t *json = NULL;
        if (field->kind == DW__FIELD_REAL) {
            double value = dw__field_real(structure, field);
            if (!isfinite(value))
                return dw__fail(DW_INVALID_ARGUMENT, "the plan's %s is not finite", field->name);
            json = json_real(value);
        } else {
            int value = dw__field_get(structure, field);
            const char *name = dw__field_value_name(field->kind, value);
            json = field->kind == DW__FIELD_INTEGER ? json_integer(value)
                   : field->kind == DW__FIELD_FLAG  ? json_boolean(value)
                                                    : json_string(name ? name : "unknown");
        }
        DW_RETURN_IF_FAILED(put(object, field->name, json));
    }
    return DW_OK;
}

/* Adds a new object to `parent`. */
static dw_status put_object(json_t *parent, const char *key, json_t **object) {
    *object = json_object();
    return put(parent, key, *object);
}

static dw_status put_structure(json_t *parent, const char *key, dw__field_list list,
                               const void *structure) {
    json_t *object;
    DW_RETURN_IF_FAILED(put_object(parent, key, &object));
    return put_fields(object, list, structure);
}

static dw_status put_prediction(json_t *parent, const dw_prediction *prediction) {
    json_t *object;
    DW_RETURN_IF_FAILED(put_object(parent, "prediction", &object));
    DW_RETURN_IF_FAILED(put_fields(object, dw__prediction_fields, prediction));
    DW_RETURN_IF_FAILED(put_structure(object, "time", dw__time_fields, &prediction->time));
    return put_structure(object, "memory", dw__memory_fields, &prediction->memory);
}

static dw_status put_others(json_t *root, const char *key, const dw_autoplan_other *others,
                            uint32_t count) {
    json_t *list = json_array();
    DW_RETURN_IF_FAILED(put(root, key, list));
    for (uint32_t at = 0; at < count; at++) {
        json_t *object = json_object();
        if (!object || json_array_append_new(list, object) != 0)
            return dw__fail_memory("a plan", sizeof *others);
        DW_RETURN_IF_FAILED(put(object, "name", json_string(others[at].name)));
        DW_RETURN_IF_FAILED(put(object, "why", json_string(others[at].why)));
        DW_RETURN_IF_FAILED(put(object, "unmeasured", json_string(others[at].unmeasured)));
        DW_RETURN_IF_FAILED(put(object, "found", json_boolean(others[at].found)));
        if (!others[at].found) continue;
        DW_RETURN_IF_FAILED(put(object, "loss", json_real(others[at].loss)));
        DW_RETURN_IF_FAILED(put_structure(object, "layout", dw__layout_fields, &others[at].layout));
        DW_RETURN_IF_FAILED(put_prediction(object, &others[at].prediction));
    }
    return DW_OK;
}

static dw_status put_kernels(json_t *root, const dw_autoplan *plan) {
    json_t *list = json_array();
    DW_RETURN_IF_FAILED(put(root, "kernels", list));
    for (uint32_t at = 0; at < plan->kernel_count; at++) {
        const dw_autoplan_kernel *kernel = &plan->kernels[at];
        json_t *object = json_object();
        if (!object || json_array_append_new(list, object) != 0)
            return dw__fail_memory("a plan", sizeof *kernel);
        DW_RETURN_IF_FAILED(put(object, "operation", json_string(kernel->operation)));
        DW_RETURN_IF_FAILED(put(object, "kernel", json_string(kernel->kernel)));
        DW_RETURN_IF_FAILED(put(object, "predicted", json_real(kernel->predicted)));
        DW_RETURN_IF_FAILED(put(object, "measured", json_real(kernel->measured)));
        DW_RETURN_IF_FAILED(put(object, "source", json_string(kernel->source)));
    }
    return DW_OK;
}

static dw_status put_hardware(json_t *root, const dw_hardware *hardware) {
    char *text = NULL;
    json_t *json = NULL;
    DW_RETURN_IF_FAILED(dw_hardware_json(hardware, &text));
    dw_status status = dw__json_parse("hardware", text, strlen(text), limits, &json);
    dw_text_free(text);
    return status == DW_OK ? put(root, "hardware", json) : status;
}

/* Remarks are for readers of the file. They are derived again whenever a plan is written. */
static dw_status put_remarks(json_t *root, const dw_autoplan *plan) {
    json_t *list = json_array();
    dw_status status = put(root, "remarks", list);
    for (int at = 0; status == DW_OK && at < DW__REMARKS; at++) {
        dw__text text = {0};
        status = dw__remark_words(plan, (dw__remark)at, &text);
        if (status == DW_OK && text.length &&
            json_array_append_new(list, json_string(text.text)) != 0)
            status = dw__fail_memory("a plan", text.length);
        dw__text_free(&text);
    }
    return status;
}

static dw_status put_plan(json_t *root, const dw_autoplan *plan) {
    json_t *model;
    DW_RETURN_IF_FAILED(put(root, "version", json_integer(DW_AUTOPLAN_VERSION)));
    DW_RETURN_IF_FAILED(put_object(root, "model", &model));
    DW_RETURN_IF_FAILED(put(model, "name", json_string(plan->model_name)));
    DW_RETURN_IF_FAILED(put_fields(model, dw__model_fields, &plan->model));
    DW_RETURN_IF_FAILED(put_hardware(root, plan->hardware));
    DW_RETURN_IF_FAILED(put_structure(root, "layout", dw__layout_fields, &plan->layout));
    DW_RETURN_IF_FAILED(put_prediction(root, &plan->prediction));
    DW_RETURN_IF_FAILED(put(root, "reserve", json_real(plan->reserve)));
    DW_RETURN_IF_FAILED(
        put_structure(root, "statistics", dw__statistics_fields, &plan->statistics));
    DW_RETURN_IF_FAILED(put_others(root, "runners_up", plan->runners_up, plan->runner_up_count));
    DW_RETURN_IF_FAILED(put_others(root, "what_ifs", plan->what_ifs, plan->what_if_count));
    DW_RETURN_IF_FAILED(put_others(root, "bolder", plan->bolder, plan->bolder_count));
    DW_RETURN_IF_FAILED(put_kernels(root, plan));
    DW_RETURN_IF_FAILED(put_remarks(root, plan));
    DW_RETURN_IF_FAILED(put(root, "unmeasured", json_string(plan->unmeasured)));
    DW_RETURN_IF_FAILED(put(root, "tightest", json_string(plan->tightest)));
    return put(root, "gpus_needed", json_integer(plan->gpus_needed));
}

dw_status dw_autoplan_json(const dw_autoplan *plan, char **text) {
    dw_status status = DW_OK;
    dw__text written = {0};
    if (!plan || !text) return dw__fail(DW_INVALID_ARGUMENT, "the plan or `text` is NULL");
    *text = NULL;
    json_t *root = json_object();
    if (!root) return dw__fail_memory("a plan", sizeof *plan);
    DW_TRY(put_plan(root, plan));
    DW_TRY(dw__json_write(root, &written));
    DW_TRY(dw__text_append(&written, "\n", 1));
    *text = written.text;
    written.text = NULL;
cleanup:
    dw__text_free(&written);
    json_decref(root);
    return status;
}

dw_status dw_autoplan_save(const dw_autoplan *plan, const char *path) {
    char *text = NULL;
    if (!path) return dw__fail(DW_INVALID_ARGUMENT, "the path of a plan is NULL");
    DW_RETURN_IF_FAILED(dw_autoplan_json(plan, &text));
    dw_status status = dw__file_write(path, text, strlen(text));
    dw_text_free(text);
    return status;
}
