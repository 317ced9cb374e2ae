/* Chooses the kernel for a call, and explains the choice as JSON: why each kernel is selected or not, and how long it
 * would take. Uses the entries of the registry and the times measured on this GPU. */
#include "base/json.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/tune.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct judgement {
    bool runs;
    bool fits; /* the measurement was made with the versions that the query requires */
    char reason[1024];
    dw__kernel_seconds expected;
    double measured, error; /* seconds; measured 0: not measured */
} judgement;

static void judge(const dw__gpu_query *q, int pass, const dw__kernel *kernel, judgement *j) {
    dw__tuned found;
    *j = (judgement){0};
    j->runs = kernel->supports(kernel, q->call, q->target) == DW_OK;
    if (!j->runs) {
        snprintf(j->reason, sizeof j->reason, "%s", dw_last_error());
        return;
    }
    if (kernel->seconds) kernel->seconds(kernel, q->call, q->target, &j->expected);
    if (!q->gpu || !q->shape_class[pass]) return;
    if (dw__tune_read(q->gpu, q->shape_class[pass], kernel->backend, &found) != DW_OK) return;
    j->fits = !q->with || strcmp(q->with, found.with) == 0;
    j->measured = found.seconds;
    j->error = found.error;
    if (!j->fits || !found.failure[0]) return;
    j->runs = false;
    snprintf(j->reason, sizeof j->reason, "it failed when it was measured: %s", found.failure);
}

/* A backend must support every pass; the times of all passes are added. */
static void judge_passes(const dw__gpu_query *q, const dw__gpu_candidates *passes, size_t which,
                         judgement *j) {
    judgement other;
    judge(q, 0, passes[0].kernels[which], j);
    for (int pass = 1; pass < q->passes && j->runs; pass++) {
        judge(q, pass, passes[pass].kernels[which], &other);
        if (!other.runs) {
            *j = other;
            return;
        }
        const bool whole = j->measured > 0.0 && other.measured > 0.0;
        j->fits = j->fits && other.fits;
        j->measured = whole ? j->measured + other.measured : 0.0;
        j->error = sqrt(j->error * j->error + other.error * other.error);
    }
}

/* ---- choice -------------------------------------------------------------------------------------------- */

/* An alternative must be faster by more than the difference between a measurement and a training step, whose clock and
 * caches differ, and by more than the measurement's own error. */
static bool is_faster(const judgement *one, const judgement *first) {
    const double error = sqrt(one->error * one->error + first->error * first->error);
    return first->measured - one->measured > fmax(0.03 * first->measured, 3.0 * error);
}

static void choose_from(const dw__gpu_query *q, const dw__gpu_candidates *all,
                        const judgement *judged, dw__gpu_choice *made) {
    const bool unmeasured = q->unmeasured && judged[0].runs; /* entry 0 is Deepwell's */
    int first = -1, fastest = -1, runners = 0, passed_over = 0;
    made->measured = true;
    for (size_t i = 0; i < all->count; i++) {
        if (!judged[i].runs) continue;
        if (first < 0) first = (int)i;
        if (!all->kernels[i]->competes) continue;
        if (unmeasured && i > 0) {
            passed_over++;
            continue;
        }
        runners++;
        if (!judged[i].fits || !(judged[i].measured > 0.0))
            made->measured = false;
        else if (fastest < 0 || judged[i].measured < judged[fastest].measured)
            fastest = (int)i;
    }
    made->kernel = first < 0 ? NULL : all->kernels[first];
    if (runners < 2) made->measured = true; /* there is no measurement to compare with */
    const char *because =
        first < 0          ? "no candidate supports the call"
        : runners == 0     ? "the first that supports the call; no fast one does"
        : passed_over > 0  ? q->unmeasured
        : runners < 2      ? "the only one that supports the call without storing scores"
        : !made->measured  ? "the first in order; not all have been measured on this GPU"
        : fastest == first ? "the fastest as measured on this GPU"
                           : "the first in order; no other is faster by more than "
                             "the measurement's error on this GPU";
    snprintf(made->because, sizeof made->because, "%s", because);
    if (runners < 2 || !made->measured || !is_faster(&judged[fastest], &judged[first])) return;
    made->kernel = all->kernels[fastest];
    snprintf(made->because, sizeof made->because, "%s is faster here: %.4g ms against %.4g%s",
             made->kernel->label, 1e3 * judged[fastest].measured, 1e3 * judged[first].measured,
             q->passes > 1 ? ", forward and backward" : "");
}

void dw__gpu_choose(const dw__gpu_query *q, dw__gpu_choice *made) {
    dw__gpu_candidates passes[DW__GPU_PASSES];
    judgement judged[DW__GPU_CANDIDATES];
    for (int pass = 0; pass < q->passes; pass++)
        dw__gpu_candidates_of(q->kind[pass], q->call, q->target, &passes[pass]);
    for (size_t i = 0; i < passes[0].count; i++) judge_passes(q, passes, i, &judged[i]);
    if (q->refused) {
        judged[0].runs = false;
        snprintf(judged[0].reason, sizeof judged[0].reason, "%s", q->refused);
    }
    snprintf(made->refusal, sizeof made->refusal, "%s", judged[0].runs ? "" : judged[0].reason);
    choose_from(q, &passes[0], judged, made);
}

/* ---- explanation ----------------------------------------------------------------------------------------- */

static json_t *number_or_null(double value) { return value > 0.0 ? json_real(value) : json_null(); }

/* Adds "proof" for kernels that run only on request, and "tile" for kernels that choose one. */
static json_t *describe(const dw__gpu_query *q, const dw__kernel *k, const judgement *j) {
    const dw__kernel_seconds *e = &j->expected;
    const char *kind = !(e->seconds > 0.0) ? NULL : e->measured ? "measured" : "estimated";
    const char *shown = dw__gpu_kernel_proof(k);
    json_t *proof = !k->asked_for ? NULL : shown ? json_string(shown) : json_null();
    json_t *row = json_pack("{s:s, s:s, s:b, s:s?, s:s, s:o*, s:o, s:s?, s:s?, s:o}", "name",
                            k->backend, "source", k->described, "runs", (int)j->runs, "reason",
                            j->runs ? NULL : j->reason, "tolerance", k->tolerance, "proof", proof,
                            "expected_seconds", number_or_null(e->seconds), "expected_kind", kind,
                            "expected_from", e->from[0] ? e->from : NULL, "measured_seconds",
                            number_or_null(j->measured));
    bool lost = !row;
    if (!lost && k->describe_tile)
        lost = json_object_set_new(row, "tile",
                                   j->runs ? k->describe_tile(k, q->call, q->target) : json_null());
    if (!lost) return row;
    json_decref(row);
    return NULL;
}

/* Returns the first of the optional library's kernels for calls of this kind and this target, whether it supports this
 * call or not. */
static json_t *describe_provided(const dw__gpu_query *q, const dw__gpu_explanation *e) {
    const dw__kernel *all, *found = NULL;
    judgement j = {0};
    size_t count = 0;
    dw_status status = dw__gpu_kernels_provided(&all, &count);
    for (size_t i = 0; status == DW_OK && i < count && !found; i++) {
        if (all[i].kind != e->provided->kind) continue;
        const dw_status one = all[i].supports(&all[i], q->call, q->target);
        if (one == DW_TYPE) continue; /* it is for other operands or another GPU */
        found = &all[i];
        status = one;
    }
    if (status == DW_OK && !found)
        status = dw__fail(DW_UNSUPPORTED, "none of its kernels is for %s on %s", e->operands,
                          q->target->name);
    if (found && found->kind != q->kind[0])
        status = dw__fail(DW_UNSUPPORTED, "%s is of forward", found->name);
    j.runs = status == DW_OK;
    if (!j.runs) snprintf(j.reason, sizeof j.reason, "%s", dw_last_error());
    const dw__kernel *kernel = found ? found : e->provided;
    kernel->seconds(kernel, q->call, q->target, &j.expected);
    return describe(q, kernel, &j);
}

dw_status dw__gpu_explain(const dw__gpu_query *q, const dw__gpu_explanation *e,
                          const dw__gpu_subject *subject, char **json) {
    const dw__gpu_target *target = q->target;
    dw_status status = DW_OK;
    dw__gpu_candidates all;
    dw__gpu_choice made = {.kernel = NULL};
    json_t *root = NULL, *rows = json_array();
    bool lost = !rows;
    if (e->because) {
        made.kernel = e->chosen;
        snprintf(made.because, sizeof made.because, "%s", e->because);
    } else {
        dw__gpu_choose(q, &made);
    }
    dw__gpu_candidates_of(q->kind[0], q->call, target, &all);
    for (size_t i = 0; i < all.count && !lost; i++) {
        const dw__kernel *k = all.kernels[i];
        judgement j;
        judge(q, 0, k, &j);
        lost = json_array_append_new(rows, describe(q, k, &j)) != 0;
    }
    if (e->provided && !lost) lost = json_array_append_new(rows, describe_provided(q, e)) != 0;
    root = lost ? NULL
                : json_pack("{s:s, s:s, s:s*, s:s, s:s, s:s?, s:s?, s:s?, s:s, s:f, s:f, s:O}",
                            "operation", e->operation, "shape", e->shape, "class",
                            q->shape_class[0], "target", target->name, "target_source",
                            target->source, "gpu", subject->gpu, "gpu_error", subject->missing,
                            "chosen", made.kernel ? made.kernel->backend : NULL, "because",
                            made.because, "flops", e->flops, "bytes", e->bytes, "candidates", rows);
    if (!root) DW_TRY(dw__fail_memory("an explanation", 0));
    DW_TRY(dw__json_string(root, json));

cleanup:
    json_decref(rows);
    json_decref(root);
    return status;
}
