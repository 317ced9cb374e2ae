/* Obeys the guard of a run's precision policy (docs/precision.md): runs sampled steps by a program that has the
 * statistics of the linear layers' operands, and plans again where the policy changes. precision_watch.c has the
 * rule. */
#include "base/json.h"
#include "train/trainer_internal.h"
#include <limits.h>
#include <stdio.h>
#include <string.h>

static size_t numbers_of(uint32_t layers) { return (size_t)layers * DW__STATISTICS_STRIDE; }

/* Plans sampled steps of t->policy, if a layer is observed. */
static dw_status make_samples(dw_trainer *t, dw__program *p) {
    if (!t->policy->guard.every) return DW_OK;
    DW_RETURN_IF_FAILED(dw__trainer_make_program(t, DW__SAMPLES, p));
    if (p->observed == 0) dw__trainer_release_program(p);
    return DW_OK;
}

/* Raises *needs to those of a step in BF16, so that the repair needs no more memory than was known. Layers that fall
 * back one by one are between that and the first policy. */
static dw_status raise_to_bf16(dw_trainer *t, dw__needs *needs) {
    dw_precision_policy *given = t->policy, *bf16 = NULL;
    dw__program p = {0};
    DW_RETURN_IF_FAILED(dw_precision_policy_in_bf16(given, &bf16));
    t->policy = bf16;
    dw_status status = dw__trainer_make_program(t, DW__TRAINS, &p);
    t->policy = given;
    dw__trainer_raise(&p, needs);
    dw__trainer_release_program(&p);
    dw_precision_policy_destroy(bf16);
    return status;
}

dw_status dw__trainer_guard_create(dw_trainer *t, dw__needs *needs) {
    dw__guard *g = &t->guard;
    if (!g->watch) return DW_OK;
    g->operands = json_array();
    g->changes = json_array();
    if (!g->operands || !g->changes) return dw__fail_memory("the samples of a guard", 0);
    DW_RETURN_IF_FAILED(make_samples(t, &g->samples));
    dw__trainer_raise(&g->samples, needs);
    g->most = g->samples.observed;
    if (g->most > 0) g->memory.bytes = numbers_of(g->most + 1) * sizeof(double);
    return raise_to_bf16(t, needs);
}

dw_status dw__trainer_guard_begin(dw_trainer *t) {
    dw__guard *g = &t->guard;
    const size_t bytes = numbers_of(g->most) * sizeof(double);
    void *staged = NULL;
    if (g->most == 0) return DW_OK;
    DW_RETURN_IF_FAILED(dw__trainer_allocate(t, g->memory.bytes, &g->memory));
    DW_RETURN_IF_FAILED(dw_device_fill(t->device, g->memory.data, 0, g->memory.bytes));
    g->zeros = g->memory.data;
    g->statistics = g->zeros + numbers_of(1);
    g->sums = dw__calloc(g->most, DW_LAYER_STATISTICS * sizeof *g->sums);
    if (!g->sums) return dw__fail_memory("the samples of a guard", bytes);
    if (!t->gpu) return DW_OK;
    const size_t micro_batches = (size_t)(t->options.batch / t->options.micro_batch);
    DW_RETURN_IF_FAILED(t->device->host_allocate(micro_batches * bytes, &staged));
    g->staged = staged;
    return DW_OK;
}

void dw__trainer_guard_destroy(dw_trainer *t) {
    dw__guard *g = &t->guard;
    dw__trainer_release_program(&g->samples);
    dw__trainer_release(t, &g->memory);
    if (g->staged) t->device->host_release(g->staged);
    dw__free(g->sums);
    json_decref(g->operands);
    json_decref(g->changes);
    dw_precision_watch_destroy(g->watch);
    *g = (dw__guard){0};
}

size_t dw__trainer_guard_bytes(const dw_trainer *t) { return t->guard.memory.bytes; }

/* ---- another policy -------------------------------------------------------------------------- */

typedef struct programs {
    dw__program train, validate, samples;
} programs;

static void release_programs(programs *p) {
    dw__trainer_release_program(&p->train);
    dw__trainer_release_program(&p->validate);
    dw__trainer_release_program(&p->samples);
}

static dw_status make_programs(dw_trainer *t, programs *p, dw__needs *needs) {
    dw__program *const every[] = {&p->train, &p->validate, &p->samples};
    DW_RETURN_IF_FAILED(dw__trainer_make_program(t, DW__TRAINS, &p->train));
    if (t->validation)
        DW_RETURN_IF_FAILED(dw__trainer_make_program(t, DW__VALIDATES, &p->validate));
    DW_RETURN_IF_FAILED(make_samples(t, &p->samples));
    for (size_t i = 0; i < DW_COUNT(every); i++) {
        if (!every[i]->plan) continue;
        DW_RETURN_IF_FAILED(dw__trainer_bind_leaves(t, every[i]));
        dw__trainer_raise(every[i], needs);
    }
    return DW_OK;
}

/* Between two steps the block holds nothing that is needed. */
static dw_status grow(const dw_trainer *t, size_t bytes, dw__block *block) {
    if (bytes <= block->bytes) return DW_OK;
    dw__trainer_release(t, block);
    return dw__trainer_allocate(t, bytes, block);
}

/* Gives the programs the policy of a step. The programs of before stay if these cannot be planned. */
static dw_status plan_again(dw_trainer *t, int64_t step) {
    dw_status status = DW_OK;
    dw_precision_policy *before = t->policy, *policy = NULL;
    dw__needs needs = {0};
    programs made = {0};
    char *text = NULL;
    DW_TRY(dw_precision_watch_policy(t->guard.watch, step, t->options.steps, &text));
    DW_TRY(dw_precision_policy_parse(text, strlen(text), &policy));
    t->policy = policy;
    policy = before;
    status = make_programs(t, &made, &needs);
    if (status != DW_OK) {
        policy = t->policy;
        t->policy = before;
        goto cleanup;
    }
    if (t->gpu) dw__trainer_gpu_forget(t);
    const programs old = {t->train, t->validate, t->guard.samples};
    t->train = made.train;
    t->validate = made.validate;
    t->guard.samples = made.samples;
    made = old;
    DW_TRY(grow(t, needs.arena, &t->arena));
    DW_TRY(grow(t, needs.accumulation, &t->accumulation));
cleanup:
    release_programs(&made);
    dw_precision_policy_destroy(policy);
    dw_text_free(text);
    return status;
}

/* Appends a JSON object, or the elements of a JSON array. */
static dw_status append(json_t *list, const char *text) {
    static const dw__json_limits limits = {.depth = 8, .values = 1 << 22};
    json_t *found = NULL;
    DW_RETURN_IF_FAILED(dw__json_parse("a guard's text", text, strlen(text), limits, &found));
    const int failed =
        json_is_array(found) ? json_array_extend(list, found) : json_array_append(list, found);
    json_decref(found);
    return failed ? dw__fail_memory("the samples of a guard", strlen(text)) : DW_OK;
}

dw_status dw__trainer_guard_prepare(dw_trainer *t) {
    dw__guard *g = &t->guard;
    const int64_t step = t->step + 1, steps = t->options.steps;
    char *change = NULL;
    if (!g->watch) return DW_OK;
    json_array_clear(g->operands);
    json_array_clear(g->changes);
    const int64_t phase = dw_precision_watch_phase(g->watch, step, steps);
    if (phase == g->phase) return DW_OK;
    DW_RETURN_IF_FAILED(plan_again(t, step));
    g->phase = phase;
    if (step != dw_precision_watch_repair_begins(g->watch, steps)) return DW_OK;
    DW_RETURN_IF_FAILED(dw_precision_watch_repair(g->watch, step, &change));
    dw_status status = append(g->changes, change);
    dw_text_free(change);
    return status;
}

/* ---- samples --------------------------------------------------------------------------------- */

bool dw__trainer_guard_samples(const dw_trainer *t) {
    const dw__guard *g = &t->guard;
    return g->samples.plan && dw_precision_watch_samples(g->watch, t->step + 1, t->options.steps);
}

void dw__trainer_guard_add(dw_trainer *t, const double *statistics, bool first) {
    for (uint32_t layer = 0; layer < t->guard.samples.observed; layer++) {
        double *sums = t->guard.sums + (size_t)layer * DW_LAYER_STATISTICS;
        for (int i = 0; i < DW_LAYER_STATISTICS; i++)
            sums[i] = (first ? 0.0 : sums[i]) + statistics[numbers_of(layer) + (size_t)i];
    }
}

dw_status dw__trainer_guard_judge(dw_trainer *t, int64_t step, bool applied) {
    dw_status status = DW_OK;
    dw__guard *g = &t->guard;
    char *operands = NULL, *changes = NULL;
    DW_TRY(dw_precision_operands_json(g->samples.layers, g->samples.observed, g->sums, &operands));
    DW_TRY(append(g->operands, operands));
    if (!applied) goto cleanup;
    DW_TRY(dw_precision_watch_judge(g->watch, step, operands, &changes));
    DW_TRY(append(g->changes, changes));
cleanup:
    dw_text_free(operands);
    dw_text_free(changes);
    return status;
}

dw_status dw_trainer_precision_json(const dw_trainer *t, char **json) {
    const dw__guard *g = &t->guard;
    *json = NULL;
    if (json_array_size(g->operands) == 0 && json_array_size(g->changes) == 0) return DW_OK;
    json_t *root = json_pack("{s:I, s:O, s:O}", "step", (json_int_t)t->step, "operands",
                             g->operands, "changes", g->changes);
    if (!root) return dw__fail_memory("the sample of a step", 0);
    dw_status status = dw__json_string(root, json);
    json_decref(root);
    return status;
}

dw_status dw__trainer_guard_write(const dw_trainer *t, const char *folder) {
    char path[PATH_MAX], *text = NULL;
    if (!t->guard.watch) return DW_OK;
    if (snprintf(path, sizeof path, "%s/precision.json", folder) >= PATH_MAX)
        return dw__fail(DW_INVALID_ARGUMENT, "the path of folder \"%s\" is too long", folder);
    DW_RETURN_IF_FAILED(dw_precision_watch_policy(t->guard.watch, t->step + 1, 0, &text));
    dw_status status = dw__file_write(path, text, strlen(text));
    dw_text_free(text);
    return status;
}
