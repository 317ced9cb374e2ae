/* Loads weights from a folder's safetensors. All of them are checked against the configuration before any is read. */
#include "deepwell/safetensors.h"
#include "model/model_internal.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct loader {
    const dw_model_config *config;
    dw_safetensors *file;
    uint32_t *indices; /* numbers of the parameters in the file */
    bool *used;        /* one entry per tensor of the file */
    dw__text problems;
    size_t problem_count;
} loader;

/* ---- contents of the file ------------------------------------------------------------------ */

static const char *prefix_of(const loader *l) {
    return dw__built_families[l->config->family].prefix;
}

/* Finds a name, or the name without the base model's prefix, which the base model's own class writes. */
static bool find(loader *l, const char *name, uint32_t *index) {
    size_t length = strlen(prefix_of(l));
    if (dw_safetensors_find(l->file, name, index) == DW_OK) return true;
    return strncmp(name, prefix_of(l), length) == 0 &&
           dw_safetensors_find(l->file, name + length, index) == DW_OK;
}

static bool ends_with(const char *text, const char *end) {
    size_t length = strlen(text), last = strlen(end);
    return length >= last && strcmp(text + length - last, end) == 0;
}

static bool is_ignored(const loader *l, const char *name) {
    const char *const *ends = dw__built_families[l->config->family].ignored;
    for (size_t i = 0; i < 2 && ends[i]; i++)
        if (ends_with(name, ends[i])) return true;
    return false;
}

/* ---- problems, collected into one message -------------------------------------------------- */

enum { PROBLEMS_SHOWN = 8 };

static dw_status add_problem(loader *l, const char *name, const char *format, ...) DW_PRINTF(3, 4);
static dw_status add_problem(loader *l, const char *name, const char *format, ...) {
    char text[200];
    va_list arguments;
    if (++l->problem_count > PROBLEMS_SHOWN) return DW_OK;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return dw__text_printf(&l->problems, "%s\"%.80s\" %s", l->problem_count > 1 ? "; " : "", name,
                           text);
}

static void shape_text(int rank, const int64_t *shape, char *text, size_t bytes) {
    size_t at = 1;
    snprintf(text, bytes, "[");
    for (int axis = 0; axis < rank && at < bytes; axis++)
        at += (size_t)snprintf(text + at, bytes - at, axis ? ", %lld" : "%lld",
                               (long long)shape[axis]);
    if (at < bytes) snprintf(text + at, bytes - at, "]");
}

static dw_status check_parameter(loader *l, uint32_t which) {
    dw_model_parameter wanted;
    dw_model_parameter_at(l->config, which, &wanted);
    if (!find(l, wanted.name, &l->indices[which])) return add_problem(l, wanted.name, "is missing");
    const dw_stored_tensor *found = dw_safetensors_at(l->file, l->indices[which]);
    l->used[l->indices[which]] = true;
    if (found->rank != wanted.rank ||
        memcmp(found->shape, wanted.shape, (size_t)wanted.rank * sizeof *wanted.shape) != 0) {
        char has[80], expected[80];
        shape_text(found->rank, found->shape, has, sizeof has);
        shape_text(wanted.rank, wanted.shape, expected, sizeof expected);
        return add_problem(l, found->name, "has the shape %s, expected %s", has, expected);
    }
    return DW_OK;
}

/* If the file also holds a tied head, it must equal the embedding. Otherwise the file and the configuration
 * contradict each other. */
static dw_status check_tied_head(loader *l) {
    enum { STEP = 4096 };
    uint8_t head_bytes[STEP], bytes[STEP];
    uint32_t head;
    if (!l->config->sizes.tied || dw_safetensors_find(l->file, "lm_head.weight", &head) != DW_OK)
        return DW_OK;
    const dw_stored_tensor *other = dw_safetensors_at(l->file, head);
    const dw_stored_tensor *embedding = dw_safetensors_at(l->file, l->indices[0]);
    uint64_t size = (uint64_t)other->count * dw_stored_dtype_bytes(other->dtype);
    l->used[head] = true;
    bool same = other->dtype == embedding->dtype && other->count == embedding->count;
    for (uint64_t at = 0; same && at < size; at += STEP) {
        size_t here = size - at < STEP ? (size_t)(size - at) : STEP;
        DW_RETURN_IF_FAILED(dw_safetensors_read_bytes(l->file, head, at, head_bytes, here));
        DW_RETURN_IF_FAILED(dw_safetensors_read_bytes(l->file, l->indices[0], at, bytes, here));
        same = memcmp(head_bytes, bytes, here) == 0;
    }
    if (same) return DW_OK;
    return add_problem(l, "lm_head.weight",
                       "differs from the embedding, but tie_word_embeddings is true "
                       "(set it to false in config.json to train both)");
}

static dw_status check_names(loader *l) {
    dw_status status = DW_OK;
    uint32_t parameters = dw_model_parameter_count(l->config);
    uint32_t tensors = dw_safetensors_count(l->file);
    for (uint32_t i = 0; i < parameters; i++) DW_TRY(check_parameter(l, i));
    if (l->problem_count == 0) DW_TRY(check_tied_head(l));
    for (uint32_t i = 0; i < tensors; i++) {
        const char *name = dw_safetensors_at(l->file, i)->name;
        if (l->used[i] || is_ignored(l, name)) continue;
        if (l->config->sizes.tied && strcmp(name, "lm_head.weight") == 0) continue;
        DW_TRY(add_problem(l, name, "is not a parameter of this model"));
    }
    if (l->problem_count == 0) return DW_OK;
    if (l->problem_count > PROBLEMS_SHOWN)
        DW_TRY(dw__text_printf(&l->problems, "; and %zu more", l->problem_count - PROBLEMS_SHOWN));
    return dw__fail(DW_SHAPE, "the weights do not fit config.json: %s", l->problems.text);
cleanup:
    return status;
}

/* ---- reading ------------------------------------------------------------------------------- */

static dw_status check_finite(const char *name, int64_t count, const float *elements) {
    int64_t bad = 0, first = 0;
    for (int64_t i = count - 1; i >= 0; i--) {
        if (isfinite(elements[i])) continue;
        first = i;
        bad++;
    }
    if (bad == 0) return DW_OK;
    return dw__fail(
        DW_INVALID_ARGUMENT,
        "the weight \"%.200s\" is %s at element %lld (and %lld of its %lld elements are "
        "not finite numbers); load an earlier checkpoint, whose weights are finite",
        name, isnan(elements[first]) ? "NaN" : "infinite", (long long)first, (long long)bad,
        (long long)count);
}

static dw_status read_all(loader *l, bool allow_not_finite, float *const *weights) {
    for (uint32_t i = 0; i < dw_model_parameter_count(l->config); i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(l->config, i, &parameter);
        DW_RETURN_IF_FAILED(dw_safetensors_read_f32(l->file, l->indices[i], weights[i]));
        if (!allow_not_finite)
            DW_RETURN_IF_FAILED(check_finite(parameter.name, parameter.count, weights[i]));
    }
    return DW_OK;
}

dw_status dw_model_load(const dw_model_config *config, const char *folder,
                        const dw_model_load_options *options, float *const *weights) {
    static const dw_model_load_options defaults = DW_MODEL_LOAD_OPTIONS_DEFAULT;
    static const dw__struct known = {"dw_model_load_options", sizeof *options, {0}};
    dw_status status = DW_OK;
    loader l = {.config = config};
    if (!options) options = &defaults;
    if (!config || !folder || !weights)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_model_load: %s is NULL",
                        !config   ? "config"
                        : !folder ? "folder"
                                  : "weights");
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    DW_RETURN_IF_FAILED(dw_safetensors_open(folder, &l.file));
    size_t parameters = dw_model_parameter_count(config), tensors = dw_safetensors_count(l.file);
    l.indices = dw__calloc(parameters + 1, sizeof *l.indices);
    l.used = dw__calloc(tensors + 1, sizeof *l.used);
    if (!l.indices || !l.used)
        DW_TRY(dw__fail_memory("a loader of weights",
                               (parameters + 1) * sizeof *l.indices + tensors + 1));
    DW_TRY(check_names(&l));
    DW_TRY(read_all(&l, options->allow_not_finite != 0, weights));
cleanup:
    dw_safetensors_close(l.file);
    dw__free(l.indices);
    dw__free(l.used);
    dw__text_free(&l.problems);
    if (status == DW_SHAPE || status == DW_INVALID_ARGUMENT || status == DW_TYPE)
        status = dw__fail_prefix(status, "\"%s\"", folder);
    return status;
}
