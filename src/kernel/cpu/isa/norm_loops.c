/* Rows of layer norm, RMS norm and softmax. Sums use four vectors of partial sums, which are added in double:
 * rounding grows with n / (4 DW_LANES), not with n. */
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/isa/row_max.h"
#include "kernel/cpu/isa/vector_math.h"
#include "kernel/cpu/norm.h"
#include <float.h>

static inline double sum_of(vf a, vf b, vf c, vf d) { return v_sum((a + b) + (c + d)); }

/* sum of (x - shift)^power, power 1 or 2 */
static inline double sum_row(int64_t n, const float *x, float shift, int power) {
    vf s = v_set(shift), a = {0}, b = {0}, c = {0}, d = {0};
    int64_t i = 0;
#define TERM(sum, load)                                                                            \
    {                                                                                              \
        vf t = load - s;                                                                           \
        sum += power == 2 ? t * t : t;                                                             \
    }
    for (; i + 4 * DW_LANES <= n; i += 4 * DW_LANES) {
        TERM(a, v_load(x + i))
        TERM(b, v_load(x + i + DW_LANES))
        TERM(c, v_load(x + i + 2 * DW_LANES))
        TERM(d, v_load(x + i + 3 * DW_LANES))
    }
    for (; i + DW_LANES <= n; i += DW_LANES) TERM(a, v_load(x + i))
    if (i < n) TERM(b, v_load_part_or(x + i, n - i, shift))
#undef TERM
    return sum_of(a, b, c, d);
}

/* Rows too large to normalize give PyTorch's results on every instruction set: squares whose sum overflows
 * F32 make rstd 0, and a mean whose square overflows makes it NaN (PyTorch's running moments multiply that
 * infinity by 0). */
static float rstd_of(double sum_of_squares, int64_t n, float mean, double eps) {
    if (isinf(mean * mean)) return NAN;
    if (sum_of_squares > (double)FLT_MAX) return 0.0f;
    return (float)(1.0 / sqrt(sum_of_squares / (double)n + eps));
}

static void forward(bool centred, int64_t n, const float *x, const float *w, const float *b,
                    double eps, float *y, float *mean, float *rstd) {
    float m = centred ? (float)(sum_row(n, x, 0.0f, 1) / (double)n) : 0.0f;
    float r = rstd_of(sum_row(n, x, m, 2), n, m, eps);
    if (centred && mean) *mean = m;
    if (rstd) *rstd = r;
    if (!y) return;
    vf shift = v_set(m), scale = v_set(r);
    int64_t i = 0;
    for (; i + DW_LANES <= n; i += DW_LANES) {
        vf t = (v_load(x + i) - shift) * scale;
        if (w) t = t * v_load(w + i);
        if (b) t = t + v_load(b + i);
        v_store(y + i, t);
    }
    for (; i < n; i++) {
        float t = (x[i] - m) * r;
        if (w) t = t * w[i];
        y[i] = b ? t + b[i] : t;
    }
}

/* One vector of the first pass: sums for dx, contributions to dw and db. */
typedef struct sums {
    vf g, along; /* sums of g = dy w, and of g xhat */
} sums;

static inline sums backward_terms(sums s, vf dy, vf x, vf w, vf mean, vf rstd, vf *xhat) {
    vf g = dy * w;
    *xhat = (x - mean) * rstd;
    s.g += g;
    s.along += g * *xhat;
    return s;
}

static void add_to(float *sum, vf term) { v_store(sum, v_load(sum) + term); }

static void backward(bool centred, int64_t n, const float *dy, const float *x, const float *w,
                     float mean, float rstd, float *dx, float *dw, float *db) {
    vf m = v_set(centred ? mean : 0.0f), r = v_set(rstd), one = v_set(1.0f), xhat;
    sums even = {{0}, {0}}, odd = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * DW_LANES <= n; i += 2 * DW_LANES) {
        int64_t j = i + DW_LANES;
        vf dy0 = v_load(dy + i), dy1 = v_load(dy + j);
        even = backward_terms(even, dy0, v_load(x + i), w ? v_load(w + i) : one, m, r, &xhat);
        add_to(dw + i, dy0 * xhat);
        if (db) add_to(db + i, dy0);
        odd = backward_terms(odd, dy1, v_load(x + j), w ? v_load(w + j) : one, m, r, &xhat);
        add_to(dw + j, dy1 * xhat);
        if (db) add_to(db + j, dy1);
    }
    for (; i < n; i += DW_LANES) {
        int64_t left = n - i < DW_LANES ? n - i : DW_LANES;
        bool whole = left == DW_LANES;
        vf d = whole ? v_load(dy + i) : v_load_part(dy + i, left);
        vf v = whole ? v_load(x + i) : v_load_part_or(x + i, left, m[0]);
        vf weight = !w ? one : whole ? v_load(w + i) : v_load_part(w + i, left);
        even = backward_terms(even, d, v, weight, m, r, &xhat);
        for (int64_t lane = 0; lane < left; lane++) {
            dw[i + lane] += d[lane] * xhat[lane];
            if (db) db[i + lane] += d[lane];
        }
    }
    if (!dx) return;
    vf mean_g = v_set(centred ? (float)(v_sum(even.g + odd.g) / (double)n) : 0.0f);
    vf mean_along = v_set((float)(v_sum(even.along + odd.along) / (double)n));
    for (i = 0; i < n; i += DW_LANES) {
        int64_t left = n - i;
        if (left >= DW_LANES) {
            vf g = w ? v_load(dy + i) * v_load(w + i) : v_load(dy + i);
            vf h = (v_load(x + i) - m) * r;
            v_store(dx + i, r * (g - mean_g - h * mean_along));
        } else {
            vf g = v_load_part(dy + i, left);
            if (w) g = g * v_load_part(w + i, left);
            vf h = (v_load_part(x + i, left) - m) * r;
            v_store_part(dx + i, r * (g - mean_g - h * mean_along), left);
        }
    }
}

/* Sum of e^(x - max). If y is not NULL it receives the terms. */
static inline double exp_row(int64_t n, const float *x, float max, float *y) {
    vf m = v_set(max), a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * DW_LANES <= n; i += 2 * DW_LANES) {
        vf e0 = v_exp(v_load(x + i) - m), e1 = v_exp(v_load(x + i + DW_LANES) - m);
        a += e0;
        b += e1;
        if (!y) continue;
        v_store(y + i, e0);
        v_store(y + i + DW_LANES, e1);
    }
    for (; i < n; i += DW_LANES) {
        int64_t left = n - i;
        bool whole = left >= DW_LANES;
        vf e = v_exp((whole ? v_load(x + i) : v_load_part_or(x + i, left, -INFINITY)) - m);
        a += e;
        if (!y) continue;
        if (whole)
            v_store(y + i, e);
        else
            v_store_part(y + i, e, left);
    }
    return v_sum(a + b);
}

/* y = x * scale + shift */
static inline void scale_row(int64_t n, const float *x, float scale, float shift, float *y) {
    vf s = v_set(scale), t = v_set(shift);
    int64_t i = 0;
    for (; i + DW_LANES <= n; i += DW_LANES) v_store(y + i, v_load(x + i) * s + t);
    if (i < n) v_store_part(y + i, v_load_part(x + i, n - i) * s + t, n - i);
}

static void softmax(bool logarithm, int64_t n, const float *x, float *y) {
    float max = max_row(n, x);
    if (logarithm) {
        /* Subtracts max first: the sum max + log(sum) would lose the smaller term. */
        float log_sum = (float)log(exp_row(n, x, max, NULL));
        vf m = v_set(max), l = v_set(log_sum);
        int64_t i = 0;
        for (; i + DW_LANES <= n; i += DW_LANES) v_store(y + i, (v_load(x + i) - m) - l);
        if (i < n) v_store_part(y + i, (v_load_part(x + i, n - i) - m) - l, n - i);
        return;
    }
    if (max == -INFINITY) max = 0.0f; /* a row of -inf alone: all terms are 0, not NaN */
    double sum = exp_row(n, x, max, y);
    scale_row(n, y, sum == 0.0 ? 0.0f : (float)(1.0 / sum), 0.0f, y);
}

static void softmax_backward(bool logarithm, int64_t n, const float *y, const float *dy,
                             float *dx) {
    vf a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * DW_LANES <= n; i += 2 * DW_LANES) {
        vf t0 = v_load(dy + i), t1 = v_load(dy + i + DW_LANES);
        a += logarithm ? t0 : t0 * v_load(y + i);
        b += logarithm ? t1 : t1 * v_load(y + i + DW_LANES);
    }
    for (; i < n; i += DW_LANES) {
        int64_t left = n - i;
        bool whole = left >= DW_LANES;
        vf t = whole ? v_load(dy + i) : v_load_part(dy + i, left);
        vf p = whole ? v_load(y + i) : v_load_part(y + i, left);
        a += logarithm ? t : t * p;
    }
    vf sum = v_set((float)v_sum(a + b));
    for (i = 0; i < n; i += DW_LANES) {
        int64_t left = n - i;
        bool whole = left >= DW_LANES;
        vf t = whole ? v_load(dy + i) : v_load_part(dy + i, left);
        vf p = whole ? v_load(y + i) : v_load_part(y + i, left);
        vf r = logarithm ? t - v_exp(p) * sum : p * (t - sum);
        if (whole)
            v_store(dx + i, r);
        else
            v_store_part(dx + i, r, left);
    }
}

static void add_rows(int64_t n, int64_t count, const float *rows, int64_t stride, float *sum) {
    for (int64_t i = 0; i < n; i++) sum[i] = rows[i];
    for (int64_t r = 1; r < count; r++) {
        const float *row = rows + r * stride;
        for (int64_t i = 0; i < n; i++) sum[i] += row[i];
    }
}

const dw__norm_loops DW_ISA_NAME(dw__norm_loops) = {
    .forward = forward,
    .backward = backward,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .add_rows = add_rows,
};
