/* Who would compute a call of attention, said as JSON. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "kernel/cuda/attention_candidates.h"
#include "kernel/tune.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- targets ------------------------------------------------------------------------------------------ */

/* Without a GPU: what the vendor says of one. */
static const dw__attention_target architectures[] = {
    {"sm_90a", 90, 989.4e12, 4.8e12, "H200 SXM data sheet: 989 TFLOP/s dense, 4.8 TB/s"},
};

/* Dense products of 16-bit elements, per processor and clock: 4096 operations on Hopper, 1024 halves of that before. */
static dw__attention_target target_of(const dw__context *context, char *name, size_t bytes) {
    double per_clock = context->capability >= 90 ? 4096.0 : 2048.0;
    snprintf(name, bytes, "sm_%d%s", context->capability, context->capability == 90 ? "a" : "");
    return (dw__attention_target){
        .name = name,
        .capability = context->capability,
        .flops = per_clock * context->sm_count * 1e3 * context->clock_khz,
        .bytes = 2e3 * context->memory_clock_khz * context->memory_bus_bits /
                 8.0, /* two transfers per clock */
        .source = "the driver's processors, clocks and bus width",
    };
}

static dw_status find_target(const char *name, dw__attention_target *target) {
    for (size_t i = 0; i < DW_COUNT(architectures); i++) {
        if (strcmp(architectures[i].name, name) != 0) continue;
        *target = architectures[i];
        return DW_OK;
    }
    return dw__fail(DW_INVALID_ARGUMENT, "target \"%s\" is not known; expected sm_90a", name);
}

/* ---- shapes --------------------------------------------------------------------------------------------- */

static int64_t power_of_2(double x) { return x < 1.0 ? 0 : (int64_t)exp2(round(log2(x))); }

/* What our kernels do not take may still be somebody else's. */
static dw_status check_sense(const dw_attention *call, bool backward) {
    dw_status status =
        dw__attention_check(call, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD, false);
    return status == DW_UNSUPPORTED ? DW_OK : status;
}

dw_status dw_attention_class(const dw_attention *call, bool backward, char *text, size_t bytes) {
    DW_RETURN_IF_FAILED(check_sense(call, backward));
    const char *mask = call->window_left >= 0 || call->window_right > 0 ? " window"
                       : call->window_right == 0
                           ? (call->bottom_right ? " causal" : " causal-top-left")
                           : "";
    snprintf(text, bytes, "attention %s %s d%d group%d q%lld k%lld heads%lld%s%s%s%s%s",
             backward ? "backward" : "forward", call->dtype == DW_F16 ? "f16" : "bf16",
             (int)call->head_dim, (int)(call->heads_q / call->heads_kv),
             (long long)power_of_2(call->rows_q), (long long)power_of_2(call->rows_k),
             (long long)power_of_2((double)call->batch * call->heads_q), mask,
             call->offsets_q ? " packed" : "", call->softcap > 0.0f ? " softcap" : "",
             call->dropout > 0.0f ? " dropout" : "",
             backward && call->deterministic ? " deterministic" : "");
    return DW_OK;
}

/* ---- candidates -------------------------------------------------------------------------------------------- */

typedef struct judgement {
    bool runs;
    char reason[1024];
    double expected, measured; /* seconds; measured 0: not */
    const char *from;
} judgement;

static judgement judge(const dw__attention_candidate *candidate, const dw_attention *call,
                       bool backward, const dw__attention_target *target, const char *gpu,
                       const char *shape_class) {
    judgement j = {0};
    j.runs = candidate->takes(call, backward, target, j.reason, sizeof j.reason);
    if (!j.runs) return j;
    j.expected = candidate->cost(call, backward, target, &j.from);
    if (gpu && dw__tune_read(gpu, shape_class, candidate->name, &j.measured) != DW_OK)
        j.measured = 0.0;
    return j;
}

/* Index of the one that is taken, or -1, and why. Times decide where there are times of all that count: math, which
 * needs the scores in memory, comes last without one. */
static int choose(const judgement *all, const char **because) {
    int first = -1, fastest = -1, runners = 0;
    bool all_measured = true;
    for (size_t i = 0; i < dw__attention_candidate_count; i++) {
        if (!all[i].runs) continue;
        runners++;
        if (first < 0) first = (int)i;
        bool counts = strcmp(dw__attention_candidates[i].name, "math") != 0 || first == (int)i;
        if (counts && !(all[i].measured > 0.0)) all_measured = false;
        if (all[i].measured > 0.0 && (fastest < 0 || all[i].measured < all[fastest].measured))
            fastest = (int)i;
    }
    *because = first < 0       ? "no candidate takes the call"
               : runners == 1  ? "the only one that takes the call"
               : !all_measured ? "the first in order; not all have been measured on this GPU"
                               : "the fastest as measured on this GPU";
    return first >= 0 && all_measured ? fastest : first;
}

static json_t *number_or_null(double value) { return value > 0.0 ? json_real(value) : json_null(); }

static json_t *describe(const dw__attention_candidate *candidate, const judgement *j) {
    return json_pack("{s:s, s:s, s:b, s:s?, s:s, s:o, s:s?, s:o}", "name", candidate->name,
                     "source", candidate->source, "runs", j->runs, "reason",
                     j->runs ? NULL : j->reason, "tolerance", candidate->tolerance,
                     "expected_seconds", number_or_null(j->expected), "expected_from", j->from,
                     "measured_seconds", number_or_null(j->measured));
}

static dw_status explain(const dw_attention *call, bool backward,
                         const dw__attention_target *target, const char *gpu, const char *gpu_error,
                         json_t **root) {
    enum { MOST = 8 };
    judgement all[MOST];
    char shape_class[256], shape[256];
    const char *because;
    dw__attention_work work = dw__attention_work_of(call, backward);
    DW_RETURN_IF_FAILED(dw_attention_class(call, backward, shape_class, sizeof shape_class));
    dw__attention_describe(call, shape, sizeof shape);
    json_t *candidates = json_array();
    for (size_t i = 0; i < dw__attention_candidate_count; i++) {
        all[i] = judge(&dw__attention_candidates[i], call, backward, target, gpu, shape_class);
        json_array_append_new(candidates, describe(&dw__attention_candidates[i], &all[i]));
    }
    int chosen = choose(all, &because);
    *root = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s?, s:s?, s:s?, s:s, s:f, s:f, s:o}",
                      "operation", backward ? "attention backward" : "attention forward", "shape",
                      shape, "class", shape_class, "target", target->name, "target_source",
                      target->source, "gpu", gpu, "gpu_error", gpu_error, "chosen",
                      chosen < 0 ? NULL : dw__attention_candidates[chosen].name, "because", because,
                      "flops", work.flops, "bytes", work.bytes, "candidates", candidates);
    return *root ? DW_OK : dw__fail_memory("an explanation", 0);
}

dw_status dw_attention_explain(const dw_attention *call, bool backward, const char *target,
                               char **json) {
    const dw__context *context = NULL;
    dw__attention_target at;
    char name[32], gpu_error[1024] = "";
    dw__text text = {0};
    json_t *root = NULL;
    dw_status status = DW_OK;
    DW_RETURN_IF_FAILED(check_sense(call, backward));
    dw_status found = dw__device_cuda.context(&context);
    if (found != DW_OK) snprintf(gpu_error, sizeof gpu_error, "%s", dw_last_error());
    if (target)
        DW_TRY(find_target(target, &at));
    else if (found != DW_OK)
        return dw__fail_prefix(found, "there is no GPU to explain for (name a target: sm_90a)");
    else
        at = target_of(context, name, sizeof name);
    bool here = context && context->capability == at.capability; /* measurements are this GPU's */
    DW_TRY(explain(call, backward, &at, here ? context->name : NULL,
                   found == DW_OK ? NULL : gpu_error, &root));
    DW_TRY(dw__json_write(root, &text));
    *json = text.text;
    text.text = NULL;

cleanup:
    json_decref(root);
    dw__text_free(&text);
    return status;
}
