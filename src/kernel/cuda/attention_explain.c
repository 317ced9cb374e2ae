/* Who would compute a call of attention, said as JSON. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "kernel/cuda/attention_candidates.h"
#include "kernel/tune.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- shapes --------------------------------------------------------------------------------------------- */

/* Exponent of the nearest power of 2 by ratio, and 1 more; 0 for 0. */
static unsigned rounded_log2(uint64_t x) {
    if (x == 0) return 0;
    unsigned floor = 63 - (unsigned)__builtin_clzll(x);
    uint64_t mantissa = floor > 31 ? x >> (floor - 31) : x << (31 - floor);
    return 1 + floor + (mantissa * mantissa >> 63 != 0); /* beyond sqrt(2) times the lower one */
}

static long long power_of_2(uint64_t x) { return x == 0 ? 0 : 1ll << (rounded_log2(x) - 1); }

enum { MASK_NONE, MASK_CAUSAL, MASK_CAUSAL_TOP_LEFT, MASK_WINDOW };

static unsigned mask_of(const dw_attention *c) {
    if (c->window_left >= 0 || c->window_right > 0) return MASK_WINDOW;
    if (c->window_right < 0) return MASK_NONE;
    return c->bottom_right || c->rows_q == c->rows_k ? MASK_CAUSAL : MASK_CAUSAL_TOP_LEFT;
}

uint64_t dw_attention_class_number(const dw_attention *c, bool backward) {
    if (c->batch < 0 || c->heads_q < 1 || c->heads_kv < 1 || c->rows_q < 0 || c->rows_k < 0)
        return 0;
    uint64_t group = (uint64_t)(c->heads_q / c->heads_kv);
    if (c->head_dim < 1 || c->head_dim > 4095 || group < 1 || group > 4095) return 0;
    const struct {
        uint64_t value;
        unsigned bits;
    } parts[] = {
        {(uint64_t)c->head_dim, 12},
        {group, 12},
        {rounded_log2((uint64_t)c->rows_q), 6},
        {rounded_log2((uint64_t)c->rows_k), 6},
        {rounded_log2((uint64_t)c->batch * (uint64_t)c->heads_q), 7},
        {mask_of(c), 2},
        {c->dtype == DW_F16, 1},
        {c->offsets_q != NULL, 1},
        {c->softcap > 0.0f, 1},
        {c->dropout > 0.0f, 1},
        {backward, 1},
        {backward && c->deterministic, 1},
    };
    uint64_t number = 0;
    for (size_t i = 0; i < DW_COUNT(parts); i++) number = number << parts[i].bits | parts[i].value;
    return number;
}

/* What our kernels do not take may still be somebody else's. Which kernel a call names is of no matter here. */
static dw_status read_call(const dw_attention *given, bool backward, dw_attention *call) {
    DW_RETURN_IF_FAILED(dw__attention_read(given, call));
    call->kernel = NULL;
    dw_status status =
        dw__attention_check(call, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD, false);
    return status == DW_UNSUPPORTED ? DW_OK : status;
}

static void name_class(const dw_attention *call, bool backward, char *text, size_t bytes) {
    static const char *const masks[] = {"", " causal", " causal-top-left", " window"};
    snprintf(text, bytes, "attention %s %s d%d group%d q%lld k%lld heads%lld%s%s%s%s%s",
             backward ? "backward" : "forward", call->dtype == DW_F16 ? "f16" : "bf16",
             (int)call->head_dim, (int)(call->heads_q / call->heads_kv),
             power_of_2((uint64_t)call->rows_q), power_of_2((uint64_t)call->rows_k),
             power_of_2((uint64_t)call->batch * (uint64_t)call->heads_q), masks[mask_of(call)],
             call->offsets_q ? " packed" : "", call->softcap > 0.0f ? " softcap" : "",
             call->dropout > 0.0f ? " dropout" : "",
             backward && call->deterministic ? " deterministic" : "");
}

dw_status dw_attention_class(const dw_attention *given, bool backward, char *text, size_t bytes) {
    dw_attention call;
    DW_RETURN_IF_FAILED(read_call(given, backward, &call));
    name_class(&call, backward, text, bytes);
    return DW_OK;
}

/* ---- candidates -------------------------------------------------------------------------------------------- */

enum { MOST = 8 };

typedef struct judgement {
    bool runs, fits; /* fits: what was measured was measured with what was asked for */
    char reason[1024];
    double expected, measured, error; /* seconds; measured 0: not */
    const char *from;
} judgement;

/* `with` NULL: anything. */
static void judge(const dw__attention_candidate *candidate, const dw_attention *call, bool backward,
                  const dw__gpu_target *target, const char *gpu, const char *with, judgement *j) {
    char shape_class[256];
    dw__tuned found;
    *j = (judgement){0};
    j->runs = candidate->takes(call, backward, target, j->reason, sizeof j->reason);
    if (!j->runs) return;
    j->expected = candidate->cost(call, backward, target, &j->from);
    if (!gpu) return;
    name_class(call, backward, shape_class, sizeof shape_class);
    if (dw__tune_read(gpu, shape_class, candidate->name, &found) != DW_OK) return;
    j->fits = !with || strcmp(with, found.with) == 0;
    j->measured = found.seconds;
    j->error = found.error;
    if (!j->fits || !found.failure[0]) return;
    j->runs = false;
    snprintf(j->reason, sizeof j->reason, "it failed when it was measured: %s", found.failure);
}

/* Of a whole call. Forward must run for backward to; their times count together. */
static void judge_both(const dw__attention_candidate *candidate, const dw_attention *call,
                       bool gradients, const dw__gpu_target *target, const char *gpu,
                       const char *with, judgement *j) {
    judgement forward;
    judge(candidate, call, gradients, target, gpu, with, j);
    if (!gradients || !j->runs) return;
    judge(candidate, call, false, target, gpu, with, &forward);
    if (!forward.runs) {
        *j = forward;
        return;
    }
    bool whole = j->measured > 0.0 && forward.measured > 0.0;
    j->fits = j->fits && forward.fits;
    j->measured = whole ? j->measured + forward.measured : 0.0;
    j->error = sqrt(j->error * j->error + forward.error * forward.error);
}

/* By more than times differ between a measurement and a training step, whose clock and caches are others, and by more
 * than the measurement itself errs. */
static bool is_faster(const judgement *one, const judgement *first) {
    double error = sqrt(one->error * one->error + first->error * first->error);
    return first->measured - one->measured > fmax(0.03 * first->measured, 3.0 * error);
}

typedef struct choice {
    int chosen; /* index of the candidate; -1: none */
    bool measured;
    char because[256];
} choice;

static void choose(const judgement *all, bool gradients, choice *made) {
    int first = -1, fastest = -1, runners = 0;
    made->measured = true;
    for (size_t i = 0; i < dw__attention_candidate_count; i++) {
        if (!all[i].runs) continue;
        if (first < 0) first = (int)i;
        if (!dw__attention_candidates[i].competes) continue;
        runners++;
        if (!all[i].fits || !(all[i].measured > 0.0))
            made->measured = false;
        else if (fastest < 0 || all[i].measured < all[fastest].measured)
            fastest = (int)i;
    }
    made->chosen = first;
    if (runners < 2) made->measured = true; /* nothing to compare */
    const char *because =
        first < 0          ? "no candidate takes the call"
        : runners == 0     ? "the first of those that take the call; no fast one does"
        : runners < 2      ? "the only one that takes the call without storing scores"
        : !made->measured  ? "the first in order; not all have been measured on this GPU"
        : fastest == first ? "the fastest as measured on this GPU"
                           : "the first in order; no other is faster by more than "
                             "measuring errs on this GPU";
    snprintf(made->because, sizeof made->because, "%s", because);
    if (runners < 2 || !made->measured || !is_faster(&all[fastest], &all[first])) return;
    made->chosen = fastest;
    snprintf(made->because, sizeof made->because, "%s is faster here: %.4g ms against %.4g%s",
             dw__attention_candidates[fastest].label, 1e3 * all[fastest].measured,
             1e3 * all[first].measured, gradients ? ", forward and backward" : "");
}

static void choose_for(const dw_attention *call, bool gradients, const dw__gpu_target *target,
                       const char *gpu, const char *with, choice *made) {
    judgement all[MOST];
    for (size_t i = 0; i < dw__attention_candidate_count; i++)
        judge_both(&dw__attention_candidates[i], call, gradients, target, gpu, with, &all[i]);
    choose(all, gradients, made);
}

dw_status dw_attention_choose(const dw_attention *given, bool gradients, const char *with,
                              const char **name, char *because, size_t bytes) {
    const dw__context *context;
    char target_name[DW__TARGET_NAME];
    dw_attention call;
    choice made;
    DW_RETURN_IF_FAILED(read_call(given, gradients, &call));
    DW_RETURN_IF_FAILED(dw__device_cuda.context(&context));
    dw__gpu_target target = dw__gpu_target_of(context, target_name);
    choose_for(&call, gradients, &target, context->name, with, &made);
    if (made.chosen < 0) return dw__fail(DW_UNSUPPORTED, "attention: %s", made.because);
    if (!made.measured)
        return dw__fail(DW_NOT_FOUND, "attention: not all candidates have been measured on %s",
                        context->name);
    *name = dw__attention_candidates[made.chosen].name;
    snprintf(because, bytes, "%s", made.because);
    return DW_OK;
}

/* ---- explaining ---------------------------------------------------------------------------------------------- */

static json_t *number_or_null(double value) { return value > 0.0 ? json_real(value) : json_null(); }

static json_t *describe(const dw__attention_candidate *candidate, const judgement *j) {
    const char *kind = !(j->expected > 0.0)                    ? NULL
                       : j->from == dw__attention_rates_source ? "measured"
                                                               : "estimated";
    return json_pack("{s:s, s:s, s:b, s:s?, s:s, s:o, s:s?, s:s?, s:o}", "name", candidate->name,
                     "source", candidate->source, "runs", j->runs, "reason",
                     j->runs ? NULL : j->reason, "tolerance", candidate->tolerance,
                     "expected_seconds", number_or_null(j->expected), "expected_kind", kind,
                     "expected_from", j->from, "measured_seconds", number_or_null(j->measured));
}

/* CUTLASS's kernel, which nothing takes by itself. */
static json_t *describe_cutlass(const dw_attention *call, bool backward,
                                const dw__gpu_target *target) {
    const dw__cutlass *library;
    const dw_cutlass_kernel *kernel = NULL;
    dw_status status = dw__cutlass_load(&library);
    size_t bytes;
    if (status == DW_OK)
        kernel =
            dw__cutlass_find(library, DW_CUTLASS_ATTENTION, DW_CUTLASS_BF16, target->capability);
    if (status == DW_OK && !kernel)
        status =
            dw__fail(DW_UNSUPPORTED, "none of its kernels is for attention on %s", target->name);
    if (status == DW_OK && backward)
        status = dw__fail(DW_UNSUPPORTED, "%s is of forward", kernel->name);
    if (status == DW_OK) status = dw__attention_check(call, DW__ATTENTION_FORWARD, false);
    if (status == DW_OK) status = dw__attention_cutlass_check(call, kernel, &bytes);
    return json_pack("{s:s, s:s, s:b, s:s?, s:s, s:s?, s:n, s:s, s:n}", "name", "cutlass", "source",
                     kernel ? kernel->name : "CUTLASS, an optional library", "runs",
                     status == DW_OK, "reason", status == DW_OK ? NULL : dw_last_error(),
                     "tolerance", "twice the error of rounding P and O to the type, against FP64",
                     "proof", kernel ? kernel->shown : NULL, "expected_seconds", "expected_from",
                     "taken only by its name; not measured", "measured_seconds");
}

static dw_status explain(const dw_attention *call, bool backward, const dw__gpu_target *target,
                         const char *gpu, const char *gpu_error, json_t **root) {
    char shape_class[256], shape[256];
    judgement j;
    choice made;
    dw__attention_work work = dw__attention_work_of(call, backward);
    name_class(call, backward, shape_class, sizeof shape_class);
    dw__attention_describe(call, shape, sizeof shape);
    json_t *candidates = json_array();
    bool lost = false;
    for (size_t i = 0; i < dw__attention_candidate_count; i++) {
        judge(&dw__attention_candidates[i], call, backward, target, gpu, NULL, &j);
        lost |= json_array_append_new(candidates, describe(&dw__attention_candidates[i], &j)) != 0;
    }
    if (target->capability == 100)
        lost |= json_array_append_new(candidates, describe_cutlass(call, backward, target)) != 0;
    choose_for(call, backward, target, gpu, NULL, &made);
    *root = json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s?, s:s?, s:s?, s:s, s:f, s:f, s:o}", "operation",
        backward ? "attention backward" : "attention forward", "shape", shape, "class", shape_class,
        "target", target->name, "target_source", target->source, "gpu", gpu, "gpu_error", gpu_error,
        "chosen", made.chosen < 0 ? NULL : dw__attention_candidates[made.chosen].name, "because",
        made.because, "flops", work.flops, "bytes", work.bytes, "candidates", candidates);
    return *root && !lost ? DW_OK : dw__fail_memory("an explanation", 0);
}

dw_status dw_attention_explain(const dw_attention *given, bool backward, const char *target,
                               char **json) {
    dw__gpu_subject at;
    json_t *root = NULL;
    dw_attention call;
    dw_status status = DW_OK;
    DW_RETURN_IF_FAILED(read_call(given, backward, &call));
    DW_RETURN_IF_FAILED(dw__gpu_subject_find(target, "sm_90a", &at));
    DW_TRY(explain(&call, backward, &at.target, at.gpu, at.missing,
                   &root)); /* measurements are this GPU's */
    DW_TRY(dw__json_string(root, json));

cleanup:
    json_decref(root);
    return status;
}
