/* Rows of cross-entropy, and the AdamW update. */
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/isa/row_max.h"
#include "kernel/cpu/isa/vector_math.h"
#include "kernel/cpu/loss.h"

/* For each block, first its maximum and then its exponentials while it is in L1, so that memory is read once. */
enum { BLOCK = 2048 };

/* The maximum ignores NaNs; the sum of exponentials propagates them. */
static dw__row_sums row_sums(int64_t n, const float *x) {
    float max = -INFINITY;
    double exponents = 0.0, plain = 0.0;
    for (int64_t at = 0; at < n; at += BLOCK) {
        int64_t count = n - at < BLOCK ? n - at : BLOCK, i = 0;
        const float *from = x + at;
        float top = max_row(count, from);
        if (top > max) {
            if (exponents != 0.0) exponents *= exp((double)max - (double)top);
            max = top;
        }
        vf m = v_set(max == -INFINITY ? 0.0f : max), e0 = {0}, e1 = {0}, s0 = {0}, s1 = {0};
        for (; i + 2 * DW_LANES <= count; i += 2 * DW_LANES) {
            vf x0 = v_load(from + i), x1 = v_load(from + i + DW_LANES);
            e0 += v_exp(x0 - m);
            e1 += v_exp(x1 - m);
            s0 += x0;
            s1 += x1;
        }
        for (; i < count; i += DW_LANES) {
            int64_t left = count - i;
            bool whole = left >= DW_LANES;
            e0 += v_exp((whole ? v_load(from + i) : v_load_part_or(from + i, left, -INFINITY)) - m);
            s0 += whole ? v_load(from + i) : v_load_part(from + i, left);
        }
        exponents += v_sum(e0 + e1);
        plain += v_sum(s0 + s1);
    }
    return (dw__row_sums){max == -INFINITY ? 0.0 : (double)max, exponents, plain};
}

static void backward_row(int64_t n, const float *x, float lse, float even, float weight,
                         float *dx) {
    vf l = v_set(lse), e = v_set(even), w = v_set(weight);
    int64_t i = 0;
    for (; i + DW_LANES <= n; i += DW_LANES) v_store(dx + i, (v_exp(v_load(x + i) - l) - e) * w);
    if (i < n) v_store_part(dx + i, (v_exp(v_load_part(x + i, n - i) - l) - e) * w, n - i);
}

static void adamw(int64_t n, const dw__adamw_constants *k, const float *p, const float *g,
                  const float *m, const float *v, float *p_out, float *m_out, float *v_out) {
    for (int64_t i = 0; i < n; i += DW_LANES) {
        int64_t left = n - i;
        bool whole = left >= DW_LANES;
        vf grad = (whole ? v_load(g + i) : v_load_part(g + i, left)) * k->grad_scale;
        vf first = whole ? v_load(m + i) : v_load_part(m + i, left);
        vf second = whole ? v_load(v + i) : v_load_part(v + i, left);
        vf param = whole ? v_load(p + i) : v_load_part(p + i, left);
        first = first + k->one_minus_beta1 * (grad - first);
        second = k->beta2 * second + (k->one_minus_beta2 * grad) * grad;
        vf denominator = v_sqrt(second) * k->inverse_sqrt_correction2 + k->eps;
        param = param * k->decay - k->step_size * (first / denominator);
        if (whole) {
            if (p_out) v_store(p_out + i, param);
            if (m_out) v_store(m_out + i, first);
            if (v_out) v_store(v_out + i, second);
        } else {
            if (p_out) v_store_part(p_out + i, param, left);
            if (m_out) v_store_part(m_out + i, first, left);
            if (v_out) v_store_part(v_out + i, second, left);
        }
    }
}

const dw__loss_loops DW_ISA_NAME(dw__loss_loops) = {
    .row_sums = row_sums,
    .backward_row = backward_row,
    .adamw = adamw,
};
