/* Candidates for attention: ours, and the operators that PyTorch has behind scaled_dot_product_attention, whose
 * limits are those that PyTorch 2.9 to 2.13 checks before it takes them
 * (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
 */
#include "kernel/cuda/attention_candidates.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- work -------------------------------------------------------------------------------------------- */

/* Pairs of query and key in one head of one sequence. Long sequences: every step-th row stands for its neighbours. */
static double count_pairs(const dw_attention *c) {
    int64_t shift = c->bottom_right ? (int64_t)c->rows_k - c->rows_q : 0,
            step = c->rows_q / (1 << 16) + 1;
    double pairs = 0.0, rows = 0.0;
    for (int64_t i = step / 2; i < c->rows_q; i += step) {
        int64_t first = c->window_left < 0 ? 0 : i + shift - c->window_left;
        int64_t last = c->window_right < 0 ? c->rows_k : i + shift + c->window_right + 1;
        if (first < 0) first = 0;
        if (last > c->rows_k) last = c->rows_k;
        if (last > first) pairs += (double)(last - first);
        rows += 1.0;
    }
    return rows > 0.0 ? pairs * (double)c->rows_q / rows : 0.0;
}

dw__attention_work dw__attention_work_of(const dw_attention *c, bool backward) {
    double heads = (double)c->batch * c->heads_q, heads_kv = (double)c->batch * c->heads_kv;
    double of_q = heads * c->rows_q * c->head_dim * 2.0,
           of_k = heads_kv * c->rows_k * c->head_dim * 2.0;
    if (c->offsets_q) { /* the longest sequence says little: as many full ones as there are rows */
        double filled_q = (double)c->total_q / fmax(1.0, (double)c->batch * c->rows_q);
        double filled_k = (double)c->total_k / fmax(1.0, (double)c->batch * c->rows_k);
        of_q *= filled_q, of_k *= filled_k;
        heads *= filled_q;
    }
    double forward = 4.0 * heads * c->head_dim * count_pairs(c);
    /* Forward reads q, k, v and writes o; backward reads those and dO and writes three gradients. */
    return (dw__attention_work){
        .flops = backward ? 2.5 * forward : forward,
        .bytes = backward ? 4.0 * of_q + 4.0 * of_k : 2.0 * of_q + 2.0 * of_k,
        .score_bytes = 2.0 * heads * c->rows_q * c->rows_k,
    };
}

/* ---- costs -------------------------------------------------------------------------------------------- */

static const double least_seconds = 4e-6; /* a launch and an empty grid */

static double at_least(double seconds, const dw__attention_work *work,
                       const dw__gpu_target *target) {
    return fmax(least_seconds, fmax(seconds, work->bytes / target->bytes));
}

/* The nearest measured line: head dimension first, then rows, by ratio. */
static const dw__attention_rate *nearest_rate(const dw_attention *c) {
    const dw__attention_rate *best = NULL;
    bool causal = c->window_right == 0;
    double least = INFINITY;
    for (size_t i = 0; i < dw__attention_rate_count; i++) {
        const dw__attention_rate *r = &dw__attention_rates[i];
        double off = 100.0 * fabs(log2((double)r->head_dim / c->head_dim)) +
                     fabs(log2((double)r->rows / fmax(1.0, (double)c->rows_k))) +
                     (r->causal != causal ? 1e4 : 0.0);
        if (off < least) least = off, best = r;
    }
    return best;
}

/* A measured rate, carried over to the target by its peak. */
static double cost_of_rate(const dw_attention *c, bool backward, const dw__gpu_target *target,
                           double tflops) {
    const double peak_measured = 989.4e12; /* H200 */
    dw__attention_work work = dw__attention_work_of(c, backward);
    return at_least(work.flops / (tflops * 1e12 * target->flops / peak_measured), &work, target);
}

/* Another GPU's figure is an estimate, and called one. */
static const char scaled[] = "estimate, not measured: an H200's rate at the nearest shape, scaled "
                             "by the data sheets' BF16 rates";

static double measured_cost(const dw_attention *c, bool backward, const dw__gpu_target *target,
                            int which, const char **from) {
    *from = target->capability == 90 ? dw__attention_rates_source : scaled;
    return cost_of_rate(c, backward, target, nearest_rate(c)->tflops[which][backward]);
}

static double deepwell_cost(const dw_attention *c, bool backward, const dw__gpu_target *target,
                            const char **from) {
    if (target->capability >= 100) { /* another kernel than the one that was measured */
        *from = "takes it, as asked; proven on the emulator, not run on hardware";
        return 0.0;
    }
    return measured_cost(c, backward, target, DW__RATE_DEEPWELL, from);
}

static double cudnn_cost(const dw_attention *c, bool backward, const dw__gpu_target *target,
                         const char **from) {
    return measured_cost(c, backward, target, DW__RATE_CUDNN, from);
}

static double flash_cost(const dw_attention *c, bool backward, const dw__gpu_target *target,
                         const char **from) {
    return measured_cost(c, backward, target, DW__RATE_FLASH, from);
}

static double unknown_cost(const dw_attention *c, bool backward, const dw__gpu_target *target,
                           const char **from) {
    (void)c, (void)backward, (void)target;
    *from = "takes it; not measured yet";
    return 0.0;
}

/* Scores and probabilities written and read: softmax in F32 four times, the products in two bytes. */
static double math_cost(const dw_attention *c, bool backward, const dw__gpu_target *target,
                        const char **from) {
    dw__attention_work work = dw__attention_work_of(c, backward);
    *from = "memory traffic of the stored scores";
    return at_least((backward ? 16.0 : 8.0) * work.score_bytes / target->bytes, &work, target);
}

/* ---- what they take -------------------------------------------------------------------------------------- */

static bool refuse(char *reason, size_t bytes, const char *text) {
    snprintf(reason, bytes, "%s", text);
    return false;
}

static bool deepwell_takes(const dw_attention *c, bool backward, const dw__gpu_target *target,
                           char *reason, size_t bytes) {
    if (dw__attention_check(c, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD, false) !=
        DW_OK)
        return refuse(reason, bytes, dw_last_error());
    if (dw__attention_check_capability(c, backward ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD,
                                       target->capability) == DW_OK)
        return true;
    if (target->capability == 100 || target->capability == 103)
        return refuse(reason, bytes, dw_last_error());
    snprintf(reason, bytes, "its kernels are for sm_90a (H100, H200), not for %s", target->name);
    return false;
}

/* What scaled_dot_product_attention cannot say, whichever operator is behind it. */
static bool sdpa_says(const dw_attention *c, char *reason, size_t bytes) {
    bool causal = c->window_left < 0 && c->window_right == 0;
    if (c->offsets_q)
        return refuse(reason, bytes,
                      "scaled_dot_product_attention has no packed sequences of dense tensors");
    if (c->softcap > 0.0f)
        return refuse(reason, bytes, "scaled_dot_product_attention has no soft cap");
    if (c->window_left >= 0 || c->window_right > 0)
        return refuse(reason, bytes,
                      "a window is an arbitrary mask to scaled_dot_product_attention");
    if (causal && c->bottom_right && c->rows_q != c->rows_k)
        return refuse(
            reason, bytes,
            "is_causal aligns the first query with the first key, not the last with the last");
    if (c->dropout > 0.0f && (c->seed != 0 || c->seed_offset != 0 || c->seed_memory))
        return refuse(reason, bytes, "its dropout mask is not the one that the seed stands for");
    return true;
}

static bool fused_takes(const dw_attention *c, int most_head_dim, int least_capability,
                        const dw__gpu_target *target, char *reason, size_t bytes) {
    if (!sdpa_says(c, reason, bytes)) return false;
    if (c->head_dim % 8 != 0 || c->head_dim > most_head_dim) {
        snprintf(reason, bytes, "head_dim is %d; it takes multiples of 8 up to %d on %s",
                 (int)c->head_dim, most_head_dim, target->name);
        return false;
    }
    if (target->capability < least_capability) {
        snprintf(reason, bytes, "it needs compute capability %d.%d", least_capability / 10,
                 least_capability % 10);
        return false;
    }
    return true;
}

static bool cudnn_takes(const dw_attention *c, bool backward, const dw__gpu_target *target,
                        char *reason, size_t bytes) {
    (void)backward;
    return fused_takes(c, target->capability == 90 || target->capability >= 100 ? 256 : 128, 80,
                       target, reason, bytes);
}

static bool flash_takes(const dw_attention *c, bool backward, const dw__gpu_target *target,
                        char *reason, size_t bytes) {
    (void)backward;
    if (!fused_takes(c, 256, 80, target, reason, bytes)) return false;
    if (c->window_right == 0 && c->rows_q != c->rows_k)
        return refuse(reason, bytes, "is_causal needs as many queries as keys there");
    return true;
}

static bool efficient_takes(const dw_attention *c, bool backward, const dw__gpu_target *target,
                            char *reason, size_t bytes) {
    (void)backward;
    return fused_takes(c, 1 << 16, 50, target, reason, bytes);
}

static bool math_takes(const dw_attention *c, bool backward, const dw__gpu_target *target,
                       char *reason, size_t bytes) {
    (void)backward, (void)target;
    if (c->window_left >= 0 || c->window_right > 0 || (c->window_right == 0 && c->bottom_right)) {
        dw_attention masked = *c; /* it takes the mask as a tensor */
        masked.window_left = masked.window_right = -1;
        return sdpa_says(&masked, reason, bytes);
    }
    return sdpa_says(c, reason, bytes);
}

static const char fused_tolerance[] =
    "twice the error of rounding P, dS and results to the type, against FP64";

const dw__attention_candidate dw__attention_candidates[] = {
    {"deepwell", "Deepwell", "ours, CUDA C for sm_90a", true, deepwell_takes, deepwell_cost,
     fused_tolerance},
    {"cudnn", "cuDNN", "PyTorch: cuDNN attention", true, cudnn_takes, cudnn_cost, fused_tolerance},
    {"flash", "FlashAttention-2", "PyTorch: FlashAttention-2", true, flash_takes, flash_cost,
     fused_tolerance},
    {"efficient", "memory-efficient attention", "PyTorch: memory-efficient attention", false,
     efficient_takes, unknown_cost, fused_tolerance},
    {"math", "unfused attention", "PyTorch: unfused, scores in memory", false, math_takes,
     math_cost, "rounds the scores, too"},
};
const size_t dw__attention_candidate_count = DW_COUNT(dw__attention_candidates);
