/* Attention by its definition in FP64, and bounds of the difference between two machines that run the same kernel on
 * the same inputs.
 *
 * Two machines agree to the bit in MMAs (src/emulator/wgmma_sum.h), in arithmetic and in conversions. They may differ
 * in the following:
 *
 * - ex2.approx and rcp.approx have relative errors of up to 2^-22 each (PTX ISA 9.7.3), so two machines differ by up
 *   to 2^-21 (APPROXIMATE). A soft cap's tanh is 1 - 2 / (2^x + 1) and differs by up to 2^-20; the exponent differs by
 *   that times the cap.
 * - P and dS are rounded to the element type before the matmuls. Numbers near the middle of two neighbours may be
 *   rounded differently, by at most UNIT of themselves, or one step of F16's subnormal numbers. The reference kernel
 *   multiplies in F32 and has none of these roundings.
 * - lg2.approx has an error of 2^-22 of the larger of 1 and the result.
 * - dQ is summed by atomic additions in F32, in any order: the sum of each of a row's tiles has an error of 2^-24 of
 *   its terms.
 * - F32 sums (of dO O, of dP) differ by 2^-22 of their terms, if one machine's compiler fuses a product with a sum and
 *   the other's does not.
 * - Outputs are rounded, which adds one step of the type.
 *
 * The bounds below are first-order sums of the worst case of each term. Differences in practice are far smaller.
 */
#include "machine_attention.h"
#include "number/half.h"
#include "number/philox.h"
#include <math.h>

#define APPROXIMATE 0x1p-21

typedef struct sequence {
    const attention_case *c;
    const attention_tensors *t;
    attention_results *r;
    int64_t batch, first_q, first_k, seq_len_q, seq_len_kv;
    double *p, *ds, *ds_bound; /* one query's values for all keys; p includes dropout's factor */
} sequence;

static double number(const sequence *s, const uint16_t *data, const dw_attention_tensor *t,
                     int64_t first, int64_t head, int64_t row, int64_t column) {
    const int64_t batch = s->c->ends_q ? 0 : s->batch;
    const uint16_t bits = data[batch * t->batch + head * t->head + (first + row) * t->row + column];
    return (double)(s->c->call.dtype == DW_F16 ? dw__f16_to_f32(bits) : dw__bf16_to_f32(bits));
}
static int64_t place(const sequence *s, const dw_attention_tensor *t, int64_t first, int64_t head,
                     int64_t row) {
    const int64_t batch = s->c->ends_q ? 0 : s->batch;
    return batch * t->batch + head * t->head + (first + row) * t->row;
}
static int64_t place_lse(const sequence *s, int64_t head, int64_t row) {
    const dw_attention *c = &s->c->call;
    return s->c->ends_q ? head * c->total_q + s->first_q + row
                        : (s->batch * c->heads_q + head) * c->seq_len_q + row;
}

#define Q(h, i, d) number(s, s->t->q, &s->c->call.q, s->first_q, h, i, d)
#define K(h, i, d) number(s, s->t->k, &s->c->call.k, s->first_k, h, i, d)
#define V(h, i, d) number(s, s->t->v, &s->c->call.v, s->first_k, h, i, d)
#define O(h, i, d) number(s, s->t->o, &s->c->call.o, s->first_q, h, i, d)
#define D_O(h, i, d) number(s, s->t->d_o, &s->c->call.d_o, s->first_q, h, i, d)

static double kept(const sequence *s, int64_t head, int64_t i, int64_t j) {
    const dw_attention *c = &s->c->call;
    if (c->dropout == 0.0f) return 1;
    const int64_t index = ((s->batch * c->heads_q + head) * c->seq_len_q + i) * c->seq_len_kv + j;
    const float random =
        dw__philox_uniform(c->seed, c->seed_offset, c->dropout_stream, (uint64_t)index);
    return random >= c->dropout ? 1 / (1 - (double)c->dropout) : 0;
}

/* Returns the score of query i and key j; -infinity if it is masked. *slope receives its derivative by scale q k. */
static double score(const sequence *s, int64_t head, int64_t i, int64_t j, double *slope) {
    const dw_attention *c = &s->c->call;
    const int64_t at = i + (c->bottom_right ? s->seq_len_kv - s->seq_len_q : 0),
                  kv = head / (c->heads_q / c->heads_kv);
    double sum = 0, cap = (double)c->softcap;
    *slope = 1;
    if ((c->window_left >= 0 && j < at - c->window_left) ||
        (c->window_right >= 0 && j > at + c->window_right))
        return -INFINITY;
    for (int64_t d = 0; d < c->head_dim; d++) sum += Q(head, i, d) * K(kv, j, d);
    sum *= (double)c->scale;
    if (cap == 0) return sum;
    const double t = tanh(sum / cap);
    *slope = 1 - t * t;
    return cap * t;
}

/* Relative difference of probabilities and of rounded probabilities, and the step of the smallest one. */
static double apart(const sequence *s) {
    return APPROXIMATE + (double)s->c->call.softcap * 0x1p-20;
}
static double rounded_apart(const sequence *s) {
    const double unit = s->c->by_definition ? 0 : s->c->call.dtype == DW_F16 ? 0x1p-10 : 0x1p-7;
    return unit + apart(s);
}
static double smallest(const sequence *s) {
    return s->c->call.dtype == DW_F16 && !s->c->by_definition ? 0x1p-24 : 0;
}
static compare_type type_of(const sequence *s) {
    return s->c->call.dtype == DW_F16 ? COMPARE_F16 : COMPARE_BF16;
}

/* If sums are exact, probabilities are multiples of 1 / `parts`, which FP64's exp only approximates. */
static double snapped(const sequence *s, double p, double parts) {
    return s->c->data == ATTENTION_ANY ? p : nearbyint(p * parts) / parts;
}

/* Computes one query's rows of O and LSE. */
static void forward_row(const sequence *s, int64_t head, int64_t i) {
    const dw_attention *c = &s->c->call;
    const int64_t kv = head / (c->heads_q / c->heads_kv), at = place(s, &c->o, s->first_q, head, i);
    const int64_t row = place_lse(s, head, i);
    /* The largest number of times that a sum is rescaled. */
    const double tiles = (double)s->seq_len_kv / 64 + 3;
    double top = -INFINITY, sum = 0, slope;
    for (int64_t j = 0; j < s->seq_len_kv; j++) {
        s->p[j] = score(s, head, i, j, &slope);
        top = fmax(top, s->p[j]);
    }
    for (int64_t j = 0; j < s->seq_len_kv; j++) {
        s->p[j] = snapped(s, s->p[j] == -INFINITY ? 0 : exp(s->p[j] - top), 1);
        sum += s->p[j];
    }
    s->r->lse[row] = sum > 0 ? top + log(sum) : -INFINITY;
    s->r->lse_bound[row] =
        sum > 0 ? apart(s) * tiles + 0x1p-21 * fmax(1, log(sum)) +
                      4 * compare_ulp(COMPARE_F32, fmax(fabs(top), fabs(s->r->lse[row])))
                : 0;
    for (int64_t j = 0; j < s->seq_len_kv; j++) s->p[j] *= kept(s, head, i, j);
    for (int64_t d = 0; d < c->head_dim; d++) {
        double o = 0, size = 0, values = 0;
        for (int64_t j = 0; j < s->seq_len_kv; j++) {
            const double v = V(kv, j, d);
            o += s->p[j] * v, size += s->p[j] * fabs(v), values += fabs(v);
        }
        const double bound =
            sum > 0 ? ((rounded_apart(s) + tiles * apart(s)) * size + smallest(s) * values) / sum
                    : 0;
        s->r->o[at + d] = sum > 0 ? o / sum : 0;
        s->r->o_bound[at + d] = bound + compare_ulp(type_of(s), fabs(s->r->o[at + d]) + bound);
    }
}

/* Computes one query's row of dQ, and adds its terms to dK and dV. */
static void backward_row(const sequence *s, int64_t head, int64_t i) {
    const dw_attention *c = &s->c->call;
    const int64_t kv = head / (c->heads_q / c->heads_kv),
                  at = place(s, &c->dq, s->first_q, head, i);
    const double lse = (double)s->t->lse[place_lse(s, head, i)], scale = (double)c->scale;
    const double tiles = (double)s->seq_len_kv / 64 + 1;
    double delta = 0, delta_size = 0, slope;
    for (int64_t d = 0; d < c->head_dim; d++) {
        const double product = D_O(head, i, d) * O(head, i, d);
        delta += product, delta_size += fabs(product);
    }
    for (int64_t j = 0; j < s->seq_len_kv; j++) {
        const double x = score(s, head, i, j, &slope), keep = kept(s, head, i, j);
        const double p = snapped(s, x == -INFINITY ? 0 : exp(x - lse), (double)s->seq_len_kv);
        double dp = 0, size = delta_size;
        for (int64_t d = 0; d < c->head_dim; d++) {
            const double product = D_O(head, i, d) * V(kv, j, d);
            dp += product, size += fabs(product * keep);
        }
        const double without = p * (dp * keep - delta);
        s->p[j] = p * keep;
        s->ds[j] = without * slope;
        s->ds_bound[j] = rounded_apart(s) * fabs(s->ds[j]) + (p > 0 ? smallest(s) : 0) +
                         0x1p-22 * p * size + (c->softcap > 0.0f ? 0x1p-19 * fabs(without) : 0);
    }
    for (int64_t d = 0; d < c->head_dim; d++) {
        double dq = 0, bound = 0;
        for (int64_t j = 0; j < s->seq_len_kv; j++) {
            const int64_t to_k = place(s, &c->dk, s->first_k, kv, j) + d,
                          to_v = place(s, &c->dv, s->first_k, kv, j) + d;
            const double k = K(kv, j, d), q = Q(head, i, d), d_o = D_O(head, i, d);
            dq += s->ds[j] * k * scale;
            bound += (s->ds_bound[j] + tiles * 0x1p-23 * fabs(s->ds[j])) * fabs(k * scale);
            s->r->dk[to_k] += s->ds[j] * q * scale;
            s->r->dk_bound[to_k] += s->ds_bound[j] * fabs(q * scale);
            s->r->dv[to_v] += s->p[j] * d_o;
            s->r->dv_bound[to_v] +=
                (s->p[j] * rounded_apart(s) + (s->p[j] > 0 ? smallest(s) : 0)) * fabs(d_o);
        }
        s->r->dq[at + d] = dq;
        s->r->dq_bound[at + d] = bound + compare_ulp(type_of(s), fabs(dq) + bound);
    }
}

/* Rounds dK and dV, which are complete now. */
static void finish_keys(const sequence *s) {
    const dw_attention *c = &s->c->call;
    for (int64_t h = 0; h < c->heads_kv; h++)
        for (int64_t j = 0; j < s->seq_len_kv; j++)
            for (int64_t d = 0; d < c->head_dim; d++) {
                const int64_t to_k = place(s, &c->dk, s->first_k, h, j) + d,
                              to_v = place(s, &c->dv, s->first_k, h, j) + d;
                s->r->dk_bound[to_k] +=
                    compare_ulp(type_of(s), fabs(s->r->dk[to_k]) + s->r->dk_bound[to_k]);
                s->r->dv_bound[to_v] +=
                    compare_ulp(type_of(s), fabs(s->r->dv[to_v]) + s->r->dv_bound[to_v]);
            }
}

dw_status attention_define(const attention_case *c, const attention_tensors *tensors,
                           attention_results *results) {
    dw_status status = DW_OK;
    compare_memory memory = {0};
    sequence s = {.c = c, .t = tensors, .r = results};
    const size_t keys = (size_t)c->call.seq_len_kv * sizeof(double);
    DW_TRY(compare_host(&memory, keys, (void **)&s.p));
    DW_TRY(compare_host(&memory, keys, (void **)&s.ds));
    DW_TRY(compare_host(&memory, keys, (void **)&s.ds_bound));
    for (s.batch = 0; s.batch < c->call.batch; s.batch++) {
        s.seq_len_q = c->call.seq_len_q, s.seq_len_kv = c->call.seq_len_kv;
        if (c->ends_q) {
            s.first_q = c->ends_q[s.batch], s.first_k = c->ends_k[s.batch];
            s.seq_len_q = c->ends_q[s.batch + 1] - s.first_q,
            s.seq_len_kv = c->ends_k[s.batch + 1] - s.first_k;
        }
        for (int64_t head = 0; head < c->call.heads_q; head++)
            for (int64_t i = 0; i < s.seq_len_q; i++)
                c->backward ? backward_row(&s, head, i) : forward_row(&s, head, i);
        if (c->backward) finish_keys(&s);
    }

cleanup:
    compare_release(&memory);
    return status;
}
