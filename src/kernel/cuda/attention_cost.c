/* The cost model of attention, and the operators behind PyTorch's scaled_dot_product_attention as entries. Their limits
 * are those that PyTorch 2.9 to 2.13 checks before it calls them
 * (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
 */
#include "deepwell/explain.h"
#include "graph/attention_work.h"
#include "kernel/cuda/gpu_attention.h"
#include <math.h>
#include <stdio.h>

/* ---- work -------------------------------------------------------------------------------------------- */

dw__attention_work dw__attention_work_of(const dw_attention *c, bool backward) {
    double shift = c->bottom_right ? (double)c->seq_len_kv - c->seq_len_q : 0.0;
    double rows_q = (double)c->batch * c->heads_q * c->seq_len_q,
           rows_k = (double)c->batch * c->heads_kv * c->seq_len_kv;
    double left = c->window_left < 0 ? INFINITY : c->window_left;
    double right = c->window_right < 0 ? INFINITY : c->window_right;
    double pairs = (double)c->batch * c->heads_q *
                   dw__attention_pairs(c->seq_len_q, c->seq_len_kv, shift, left, right);
    double scores = rows_q * c->seq_len_kv;
    if (c->offsets_q) { /* the longest sequence says little: as many full ones as there are rows */
        double filled_q = (double)c->total_q / fmax(1.0, (double)c->batch * c->seq_len_q);
        double filled_k = (double)c->total_k / fmax(1.0, (double)c->batch * c->seq_len_kv);
        rows_q *= filled_q, pairs *= filled_q, scores *= filled_q;
        rows_k *= filled_k;
    }
    return (dw__attention_work){
        .flops = dw__attention_flops(pairs, c->head_dim, c->head_dim, backward),
        .bytes = 2.0 * dw__attention_traffic(rows_q, rows_k, c->head_dim, c->head_dim, backward),
        .score_bytes = 2.0 * scores,
    };
}

/* ---- costs -------------------------------------------------------------------------------------------- */

static const double least_seconds = 4e-6; /* a launch with an empty grid */

static double at_least(double seconds, const dw__attention_work *work,
                       const dw__gpu_target *target) {
    return fmax(least_seconds, fmax(seconds, work->bytes / target->bytes));
}

/* Finds the row of measurements with the nearest head dimension, then the nearest number of rows, by ratio. */
static const dw__attention_rate *nearest_rate(const dw_attention *c) {
    const dw__attention_rate *best = NULL;
    bool causal = c->window_right == 0;
    double least = INFINITY;
    for (size_t i = 0; i < dw__attention_rate_count; i++) {
        const dw__attention_rate *r = &dw__attention_rates[i];
        double off = 100.0 * fabs(log2((double)r->head_dim / c->head_dim)) +
                     fabs(log2((double)r->rows / fmax(1.0, (double)c->seq_len_kv))) +
                     (r->causal != causal ? 1e4 : 0.0);
        if (off < least) least = off, best = r;
    }
    return best;
}

/* Scales a measured rate to the target by the ratio of their peak rates. */
static double seconds_at_rate(const dw_attention *c, bool backward, const dw__gpu_target *target,
                              double tflops) {
    const double peak_measured = 989.4e12; /* H200 */
    dw__attention_work work = dw__attention_work_of(c, backward);
    return at_least(work.flops / (tflops * 1e12 * target->flops / peak_measured), &work, target);
}

static bool is_backward(const dw__kernel *kernel) {
    return kernel->kind == DW__CALL_ATTENTION_BACKWARD;
}

/* A figure for another GPU than the measured one is an estimate and is marked as one. */
static void measured_seconds(const dw__kernel *kernel, const dw_attention *call,
                             const dw__gpu_target *gpu, int which, dw__kernel_seconds *result) {
    const bool backward = is_backward(kernel);
    result->measured = gpu->capability == 90;
    snprintf(result->from, sizeof result->from, "%s",
             result->measured ? dw__attention_rates_source
                              : "estimate, not measured: an H200's rate at the nearest shape, "
                                "scaled by the data sheets' BF16 rates");
    result->seconds =
        seconds_at_rate(call, backward, gpu, nearest_rate(call)->tflops[which][backward]);
}

void dw__attention_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                           dw__kernel_seconds *result) {
    if (gpu->capability < 100)
        measured_seconds(kernel, call, gpu, DW__RATE_DEEPWELL, result);
    else /* the measurement is of another kernel */
        snprintf(result->from, sizeof result->from,
                 "takes it, as asked; proven on the emulator, not run on hardware");
}

/* ---- PyTorch's operators ------------------------------------------------------------------------------- */

/* Returns what scaled_dot_product_attention cannot express, whichever operator is behind it; NULL: it can. */
static const char *lacking_in_sdpa(const dw_attention *c) {
    if (c->offsets_q)
        return "scaled_dot_product_attention has no packed sequences of dense tensors";
    if (c->bias_kind) return "calls with a bias are not measured";
    if (c->softcap > 0.0f) return "scaled_dot_product_attention has no soft cap";
    if (c->window_left >= 0 || c->window_right > 0)
        return "a window is an arbitrary mask to scaled_dot_product_attention";
    if (c->window_right == 0 && c->bottom_right && c->seq_len_q != c->seq_len_kv)
        return "is_causal aligns the first query with the first key, not the last with the last";
    if (c->dropout > 0.0f && (c->seed != 0 || c->seed_offset != 0 || c->seed_memory))
        return "its dropout mask is not the one that the seed stands for";
    return NULL;
}

const char *dw__attention_why_unmeasured(const dw_attention *c) {
    const char *lacking = lacking_in_sdpa(c);
    return lacking             ? lacking
           : c->dropout > 0.0f ? "the first in order; calls with dropout are not measured"
           : c->deterministic  ? "the first in order; deterministic calls are not measured"
                               : NULL;
}

bool dw_attention_has_alternative(const dw_attention *call) {
    return dw__attention_why_unmeasured(call) == NULL;
}

/* In the order of dw__torch_attention. */
typedef enum torch_operator { CUDNN, FLASH, EFFICIENT, UNFUSED } torch_operator;

static torch_operator operator_of(const dw__kernel *kernel) {
    return (torch_operator)(kernel - dw__torch_attention[is_backward(kernel)]);
}

static dw_status torch_supports(const dw__kernel *kernel, const void *call,
                                const dw__gpu_target *gpu) {
    const torch_operator which = operator_of(kernel);
    const bool wide = which == FLASH || gpu->capability == 90 || gpu->capability >= 100;
    const int most_head_dim = which == EFFICIENT ? 1 << 16
                              : wide             ? 256
                                                 : 128,
              least_capability = which == EFFICIENT ? 50 : 80;
    dw_attention c = *(const dw_attention *)call;
    if (which == UNFUSED &&
        (c.window_left >= 0 || c.window_right > 0 || (c.window_right == 0 && c.bottom_right)))
        c.window_left = c.window_right = -1; /* the operator expects the mask as a tensor */
    const char *lacking = lacking_in_sdpa(&c);
    if (lacking) return dw__fail(DW_UNSUPPORTED, "%s", lacking);
    if (which == UNFUSED) return DW_OK;
    if (c.head_dim % 8 != 0 || c.head_dim > most_head_dim)
        return dw__fail(DW_UNSUPPORTED, "head_dim is %d; it takes multiples of 8 up to %d on %s",
                        (int)c.head_dim, most_head_dim, gpu->name);
    if (gpu->capability < least_capability)
        return dw__fail(DW_UNSUPPORTED, "it needs compute capability %d.%d", least_capability / 10,
                        least_capability % 10);
    if (which == FLASH && c.window_right == 0 && c.seq_len_q != c.seq_len_kv)
        return dw__fail(DW_UNSUPPORTED, "is_causal needs as many queries as keys there");
    return DW_OK;
}

/* Unfused attention moves the bytes of scores and probabilities: softmax accesses them four times in F32, and the
 * matmuls in two bytes. */
static void torch_seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                          dw__kernel_seconds *result) {
    const bool backward = is_backward(kernel);
    const dw__attention_work work = dw__attention_work_of(call, backward);
    switch (operator_of(kernel)) {
    case CUDNN: measured_seconds(kernel, call, gpu, DW__RATE_CUDNN, result); break;
    case FLASH: measured_seconds(kernel, call, gpu, DW__RATE_FLASH, result); break;
    case EFFICIENT:
        snprintf(result->from, sizeof result->from, "takes it; not measured yet");
        break;
    case UNFUSED:
        snprintf(result->from, sizeof result->from, "memory traffic of the stored scores");
        result->seconds =
            at_least((backward ? 16.0 : 8.0) * work.score_bytes / gpu->bytes, &work, gpu);
        break;
    }
}

#define TORCH_OPERATOR(which, called, known_as, from, races, exactness)                            \
    {                                                                                              \
        .name = "torch." called, .backend = called, .label = known_as, .kind = which,              \
        .competes = races, .described = "PyTorch: " from, .supports = torch_supports,              \
        .seconds = torch_seconds, .tolerance = exactness                                           \
    }
#define TORCH_OPERATORS(which)                                                                     \
    {                                                                                              \
        TORCH_OPERATOR(which, "cudnn", "cuDNN", "cuDNN attention", true, DW__ATTENTION_TOLERANCE), \
            TORCH_OPERATOR(which, "flash", "FlashAttention-2", "FlashAttention-2", true,           \
                           DW__ATTENTION_TOLERANCE),                                               \
            TORCH_OPERATOR(which, "efficient", "memory-efficient attention",                       \
                           "memory-efficient attention", false, DW__ATTENTION_TOLERANCE),          \
            TORCH_OPERATOR(which, "math", "unfused attention", "unfused, scores in memory", false, \
                           "rounds the scores, too"),                                              \
    }
const dw__kernel dw__torch_attention[2][DW__TORCH_ATTENTION] = {
    TORCH_OPERATORS(DW__CALL_ATTENTION_FORWARD),
    TORCH_OPERATORS(DW__CALL_ATTENTION_BACKWARD),
};
