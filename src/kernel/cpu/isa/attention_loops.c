/* Inner loops of tiled attention. Forward is the online softmax (Milakov and Gimelshein 2018; Dao et al.
 * 2022): running maximum m, running sum l and the unnormalised output are corrected with each tile. Backward
 * recomputes each tile of P from the saved log-sum-exp (Dao et al. 2022, algorithm 4). */
#include "base/transpose.h"
#include "kernel/cpu/cpu_attention.h"
#include "kernel/cpu/isa/vector_math.h"
#include "number/isa/philox_lanes.h"
#include <math.h>

extern const dw__gemm_loops DW_ISA_NAME(dw__gemm_loops);

enum { QUERIES = DW_ATTENTION_QUERIES, KEYS = DW_ATTENTION_KEYS, TILE = QUERIES * KEYS };

static int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

static float *rows_at(const dw__attention_rows *rows, int64_t batch, int64_t head, int64_t row) {
    return rows->data + batch * rows->batch + head * rows->head + row * rows->row;
}

static void multiply(bool a_transposed, int64_t m, int64_t n, int64_t k, float alpha,
                     const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                     int64_t ldc) {
    DW_ISA_NAME(dw__gemm_loops)
        .small(a_transposed, false, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* to[d*QUERIES + i] = from[i*stride + d]; zeros after `count` rows. */
static void transpose_block(int64_t count, int64_t size, const float *from, int64_t stride,
                            float *to) {
    int64_t rows = count / DW_QUAD * DW_QUAD, columns = size / DW_QUAD * DW_QUAD;
    for (int64_t i = 0; i < rows; i += DW_QUAD) {
        for (int64_t d = 0; d < columns; d += DW_QUAD) {
            dw__transpose_quad(from + i * stride + d, stride, to + d * QUERIES + i, QUERIES);
        }
    }
    for (int64_t d = 0; d < size; d++) {
        for (int64_t i = d < columns ? rows : 0; i < count; i++) {
            to[d * QUERIES + i] = from[i * stride + d];
        }
        for (int64_t i = count; i < QUERIES; i++) to[d * QUERIES + i] = 0.0f;
    }
}

/* ---- which keys a query may attend to --------------------------------------------------------- */

enum { STEP = 16, STEPS = QUERIES / STEP };
_Static_assert(QUERIES == KEYS && STEP % DW_LANES == 0, "stairs are squares of whole vectors");

/* One tile: `query_count` queries from `query`, `key_count` keys from `key`. Causality masks a staircase of
 * it in squares of STEP. Only the squares that some query may attend to are computed:
 *
 *               queries
 *      keys     [x x x x]     first_lane[step of keys]: queries before it attend to none of these keys
 *               [. x x x]     key_limit[step of queries]: these queries attend to no key from there on
 *               [. . x x]
 *               [. . . x] */
typedef struct tile {
    int64_t batch, head, query, query_count, key, key_count;
    int64_t lanes; /* of scores that are computed: a multiple of STEP that holds the queries */
    bool has_stairs;
    int64_t first_lane[STEPS], key_limit[STEPS];
} tile;

/* Computes [*first, *end), which covers all keys that some query of the block may attend to by position. */
static void reachable_keys(const dw__attention *a, int64_t query, int64_t query_count,
                           int64_t *first, int64_t *end) {
    *first = 0;
    *end = a->keys;
    if (a->causal) *end = at_most(*end, query + query_count + a->shift);
    if (a->window >= 0) *first = at_least(0, query + a->shift - a->window + 1);
    if (*end <= *first) *first = *end = 0;
}

/* Moves the tile to `key`. */
static void place_tile(const dw__attention *a, int64_t key, tile *t) {
    t->key = key;
    t->key_count = at_most(KEYS, a->keys - key);
    t->has_stairs = a->causal && key + t->key_count - 1 > t->query + a->shift;
    for (int step = 0; step < STEPS; step++) t->key_limit[step] = t->has_stairs ? 0 : t->key_count;
    for (int64_t step = 0; step < STEPS && step * STEP < t->key_count; step++) {
        int64_t position = key + step * STEP - a->shift - t->query; /* among the block's queries */
        int64_t lane = at_most(QUERIES, at_least(0, position) / STEP * STEP);
        t->first_lane[step] = t->has_stairs ? lane : 0;
        for (int64_t i = t->first_lane[step] / STEP; i < STEPS; i++) {
            t->key_limit[i] = at_most(t->key_count, (step + 1) * STEP);
        }
    }
}

/* True if the positions alone mask some pair of the tile. */
static bool is_cut_by_position(const dw__attention *a, const tile *t) {
    int64_t last_query = t->query + t->query_count - 1;
    if (t->has_stairs) return true;
    return a->window >= 0 && t->key <= last_query + a->shift - a->window;
}

/* bias[key][query] = 0 or -inf by position. */
static void fill_position(const dw__attention *a, const tile *t, float *bias) {
    for (int64_t kk = 0; kk < t->key_count; kk++) {
        int64_t position =
            t->key + kk - a->shift - t->query; /* of the key among the block's queries */
        /* First lane that may see the key. int32 is as wide as a lane, so that the loop vectorises. */
        int32_t first = a->causal ? (int32_t)at_most(at_least(position, 0), QUERIES) : 0;
        int32_t end = QUERIES;
        if (a->window >= 0) end = (int32_t)at_least(first, at_most(QUERIES, position + a->window));
        float *row = bias + kk * QUERIES;
        for (int32_t i = 0; i < QUERIES; i++) {
            row[i] = ((i >= first) & (i < end)) ? 0.0f : -INFINITY;
        }
    }
}

static void add_mask(const dw__attention *a, const tile *t, float *bias) {
    int64_t base = t->batch * a->mask_stride[0] + t->head * a->mask_stride[1] +
                   t->query * a->mask_stride[2] + t->key * a->mask_stride[3];
    int64_t query_stride = a->mask_stride[2], key_stride = a->mask_stride[3];
    const uint8_t *allowed = a->mask;
    const float *added = a->mask;
    for (int64_t i = 0; i < t->query_count; i++) {
        for (int64_t kk = 0; kk < t->key_count; kk++) {
            int64_t at = base + i * query_stride + kk * key_stride;
            if (!a->mask_is_bool) {
                bias[kk * QUERIES + i] += added[at];
            } else if (!allowed[at]) {
                bias[kk * QUERIES + i] = -INFINITY;
            }
        }
    }
}

/* Computes the bias that is added to scaled scores. Returns false if it would be zero. */
static bool fill_bias(const dw__attention *a, const tile *t, float *bias) {
    bool cut = is_cut_by_position(a, t);
    if (!cut && !a->mask) return false;
    if (cut) {
        fill_position(a, t, bias);
    } else {
        for (int64_t kk = 0; kk < t->key_count; kk++)
            memset(bias + kk * QUERIES, 0, (size_t)t->lanes * sizeof(float));
    }
    if (a->mask) add_mask(a, t, bias);
    return true;
}

/* ---- the three matmuls of a tile ---------------------------------------------------------------- */

/* out[key][query] = alpha * (rows of K or V) * (packed block of Q or dO); `depth` is the head size. */
static void multiply_rows(const tile *t, int64_t depth, float alpha, const float *rows,
                          int64_t stride, const float *block, float *out) {
    if (!t->has_stairs) {
        multiply(false, t->key_count, t->lanes, depth, alpha, rows, stride, block, QUERIES, 0.0f,
                 out, QUERIES);
        return;
    }
    for (int64_t key = 0; key < t->key_count; key += STEP) {
        int64_t lane = t->first_lane[key / STEP];
        if (lane >= t->lanes) break;
        multiply(false, at_most(STEP, t->key_count - key), t->lanes - lane, depth, alpha,
                 rows + key * stride, stride, block + lane, QUERIES, 0.0f,
                 out + key * QUERIES + lane, QUERIES);
    }
}

/* out[key] = beta * out[key] + x[key][..] * (rows of Q or dO): gradients of K and V */
static void reduce_queries(const tile *t, int64_t size, const float *x, const float *rows,
                           int64_t stride, float beta, float *out, int64_t out_stride) {
    if (!t->has_stairs) {
        multiply(false, t->key_count, size, t->query_count, 1.0f, x, QUERIES, rows, stride, beta,
                 out, out_stride);
        return;
    }
    for (int64_t key = 0; key < t->key_count; key += STEP) {
        int64_t lane = at_most(t->first_lane[key / STEP], t->query_count);
        multiply(false, at_most(STEP, t->key_count - key), size, t->query_count - lane, 1.0f,
                 x + key * QUERIES + lane, QUERIES, rows + lane * stride, stride, beta,
                 out + key * out_stride, out_stride);
    }
}

/* out[query] = beta * out[query] + x[..][query] * (rows of V or K): output, gradient of Q */
static void reduce_keys(const tile *t, int64_t size, const float *x, const float *rows,
                        int64_t stride, float beta, float *out, int64_t out_stride) {
    if (!t->has_stairs) {
        multiply(true, t->query_count, size, t->key_count, 1.0f, x, QUERIES, rows, stride, beta,
                 out, out_stride);
        return;
    }
    for (int64_t lane = 0; lane < t->query_count; lane += STEP) {
        multiply(true, at_most(STEP, t->query_count - lane), size, t->key_limit[lane / STEP], 1.0f,
                 x + lane, QUERIES, rows, stride, beta, out + lane * out_stride, out_stride);
    }
}

/* ---- dropout ------------------------------------------------------------------------------------- */

/* Index in [B, H, Sq, Sk] of the tile's pair (0, 0). */
static uint64_t first_element(const dw__attention *a, const tile *t) {
    int64_t row = (t->batch * a->heads + t->head) * a->queries + t->query;
    return (uint64_t)(row * a->keys + t->key);
}

/* For rows of scores that start at a multiple of four: the four words of a Philox call are four keys of a
 * query, and one vector computes the calls of as many queries as it has lanes. */
static void fill_dropout_aligned(const dw__attention *a, const tile *t, float factor, float *keep) {
    uint64_t first = first_element(a, t) / 4, per_row = (uint64_t)a->keys / 4;
    for (int64_t lane = 0; lane < t->query_count; lane += DW_LANES) {
        uint64_t block[DW_LANES];
        for (int i = 0; i < DW_LANES; i++) block[i] = first + (uint64_t)(lane + i) * per_row;
        for (int64_t key = 0; key < t->key_limit[lane / STEP]; key += 4) {
            vu words[4];
            dw__philox_lanes(a->seed, a->stream, block, words);
            for (int word = 0; word < 4; word++) {
                vm kept = v_ge(dw__philox_lanes_to_uniform(words[word]), v_set(a->p));
                v_store(keep + (key + word) * QUERIES + lane,
                        v_select(kept, v_set(factor), v_set(0.0f)));
            }
            for (int i = 0; i < DW_LANES; i++) block[i]++;
        }
    }
}

static void fill_dropout_anywhere(const dw__attention *a, const tile *t, float factor,
                                  float *keep) {
    float uniform[KEYS];
    for (int64_t i = 0; i < t->query_count; i++) {
        dw__philox_fill(a->seed[0], a->seed[1], a->stream,
                        first_element(a, t) + (uint64_t)(i * a->keys), t->key_count, uniform);
        for (int64_t kk = 0; kk < t->key_count; kk++) {
            keep[kk * QUERIES + i] = uniform[kk] >= a->p ? factor : 0.0f;
        }
    }
}

/* keep[key][query] = 0 or 1/(1-p) for pairs inside the tile. */
static void fill_dropout(const dw__attention *a, const tile *t, float *keep) {
    float factor = 1.0f / (1.0f - a->p);
    if (a->keys % 4 == 0) {
        fill_dropout_aligned(a, t, factor, keep);
    } else {
        fill_dropout_anywhere(a, t, factor, keep);
    }
}

/* to = x * y for queries inside the tile. */
static void multiply_elements(const tile *t, const float *x, const float *y, float *to) {
    for (int64_t lane = 0; lane < t->query_count; lane += DW_LANES) {
        for (int64_t kk = 0; kk < t->key_limit[lane / STEP]; kk++) {
            int64_t at = kk * QUERIES + lane;
            v_store(to + at, v_load(x + at) * v_load(y + at));
        }
    }
}

/* ---- soft cap ------------------------------------------------------------------------------------ */

/* Replaces scores x by cap * tanh(x / cap). If slope is not NULL it receives the derivative 1 - tanh^2. */
static void cap_scores(const tile *t, float cap, float *scores, float *slope) {
    float inverse = 1.0f / cap;
    for (int64_t lane = 0; lane < t->lanes; lane += DW_LANES) {
        for (int64_t kk = 0; kk < t->key_limit[lane / STEP]; kk++) {
            int64_t at = kk * QUERIES + lane;
            vf bent = v_tanh(v_load(scores + at) * inverse);
            v_store(scores + at, bent * cap);
            if (slope) v_store(slope + at, 1.0f - bent * bent);
        }
    }
}

/* e^x, but 0 below e^-87: a masked score would otherwise use the slow path of CPUs for subnormal results, and
 * so small a probability is lost in any sum with the largest one. */
static inline vf exp_or_zero(vf x) {
    vf lowest = v_set(-87.0f);
    return v_select(v_lt(x, lowest), v_set(0.0f), v_exp(v_select(v_lt(x, lowest), lowest, x)));
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct forward_state {
    float *queries; /* Q^T [head_size][QUERIES] */
    float *scores;  /* S^T, then P^T [KEYS][QUERIES] */
    float *bias;    /* [KEYS][QUERIES], followed by dropout */
    float *output;  /* [QUERIES][value_size] */
    float maximum[QUERIES], sum[QUERIES], correction[QUERIES];
} forward_state;

/* Replaces scores by exp(score - maximum) and updates the maximum, the sum and the correction of the previous
 * sums. A query that has not seen any key keeps maximum -inf and sum 0. */
static void softmax_step(const tile *t, const float *bias, forward_state *s) {
    for (int64_t lane = 0; lane < t->lanes; lane += DW_LANES) {
        float *scores = s->scores + lane;
        int64_t key_count = t->key_limit[lane / STEP];
        vf before = v_load(s->maximum + lane), maximum = before;
        if (bias) {
            for (int64_t kk = 0; kk < key_count; kk++) {
                vf x = v_load(scores + kk * QUERIES) + v_load(bias + kk * QUERIES + lane);
                v_store(scores + kk * QUERIES, x);
                maximum = v_max(maximum, x);
            }
        } else {
            for (int64_t kk = 0; kk < key_count; kk++) {
                maximum = v_max(maximum, v_load(scores + kk * QUERIES));
            }
        }
        /* -inf - -inf would be NaN */
        vf origin = v_select(v_eq(maximum, v_set(-INFINITY)), v_set(0.0f), maximum);
        vf correction = exp_or_zero(before - origin), sum = v_load(s->sum + lane) * correction;
        for (int64_t kk = 0; kk < key_count; kk++) {
            vf x = exp_or_zero(v_load(scores + kk * QUERIES) - origin);
            v_store(scores + kk * QUERIES, x);
            sum += x;
        }
        v_store(s->maximum + lane, maximum);
        v_store(s->sum + lane, sum);
        v_store(s->correction + lane, correction);
    }
}

static void correct_output(int64_t count, int64_t size, const float *correction, float *output) {
    for (int64_t i = 0; i < count; i++) {
        if (correction[i] == 1.0f) continue;
        float *row = output + i * size;
        for (int64_t d = 0; d < size; d++) row[d] *= correction[i];
    }
}

static void forward_tile(const dw__attention *a, const tile *t, bool first, forward_state *s) {
    int64_t key_head = t->head / (a->heads / a->key_heads);
    multiply_rows(t, a->head_size, a->scale, rows_at(&a->k, t->batch, key_head, t->key), a->k.row,
                  s->queries, s->scores);
    if (a->softcap > 0.0f) cap_scores(t, a->softcap, s->scores, NULL);
    softmax_step(t, fill_bias(a, t, s->bias) ? s->bias : NULL, s);
    if (a->p > 0.0f) {
        fill_dropout(a, t, s->bias);
        multiply_elements(t, s->scores, s->bias, s->scores);
    }
    if (!first) correct_output(t->query_count, a->value_size, s->correction, s->output);
    reduce_keys(t, a->value_size, s->scores, rows_at(&a->v, t->batch, key_head, t->key), a->v.row,
                first ? 0.0f : 1.0f, s->output, a->value_size);
}

static void finish_forward(const dw__attention *a, const tile *t, const forward_state *s) {
    for (int64_t i = 0; i < t->query_count; i++) {
        float sum = s->sum[i];
        float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (a->lse.data) {
            *rows_at(&a->lse, t->batch, t->head, t->query + i) =
                sum == 0.0f ? -INFINITY : s->maximum[i] + logf(sum);
        }
        if (!a->o.data) continue;
        float *o = rows_at(&a->o, t->batch, t->head, t->query + i);
        const float *row = s->output + i * a->value_size;
        if (sum == 0.0f) {
            memset(o, 0, (size_t)a->value_size * sizeof(float));
        } else {
            for (int64_t d = 0; d < a->value_size; d++) o[d] = row[d] * inverse;
        }
    }
}

static void forward(const dw__attention *a, int64_t batch, int64_t head, int64_t query,
                    float *scratch) {
    forward_state s;
    s.queries = scratch;
    s.scores = s.queries + a->head_size * QUERIES;
    s.bias = s.scores + TILE;
    s.output = s.bias + TILE;
    for (int i = 0; i < QUERIES; i++) {
        s.maximum[i] = -INFINITY;
        s.sum[i] = 0.0f;
    }
    tile t = {.batch = batch, .head = head, .query = query};
    t.query_count = at_most(QUERIES, a->queries - query);
    t.lanes = (t.query_count + STEP - 1) / STEP * STEP; /* few in a step of generation */
    transpose_block(t.query_count, a->head_size, rows_at(&a->q, batch, head, query), a->q.row,
                    s.queries);
    int64_t first, end;
    reachable_keys(a, query, t.query_count, &first, &end);
    int64_t start = first / KEYS * KEYS;
    for (int64_t key = start; key < end; key += KEYS) {
        place_tile(a, key, &t);
        forward_tile(a, &t, key == start, &s);
    }
    finish_forward(a, &t, &s);
}

/* ---- backward -------------------------------------------------------------------------------- */

typedef struct backward_state {
    float *queries;  /* Q^T [head_size][QUERIES] */
    float *grads;    /* dO^T [value_size][QUERIES] */
    float *scores;   /* S^T, then P^T [KEYS][QUERIES] */
    float *d_scores; /* dP^T, then dS^T */
    float *bias;
    float *dropped;                     /* P^T after dropout */
    float *slope;                       /* slope of the soft cap; NULL for none */
    float lse[QUERIES], delta[QUERIES]; /* delta = sum of dO * O: the softmax's inner product */
    bool has_low_rows;                  /* some rows' lse has lost the sum of their exponentials */
    float inverse_sum[QUERIES];         /* factor of their probabilities; 1 for other rows */
} backward_state;

/* Replaces scores by P = exp(score - lse). */
static void probabilities(const tile *t, const float *bias, backward_state *s) {
    for (int64_t lane = 0; lane < QUERIES; lane += DW_LANES) {
        vf lse = v_load(s->lse + lane);
        for (int64_t kk = 0; kk < t->key_limit[lane / STEP]; kk++) {
            float *x = s->scores + kk * QUERIES + lane;
            vf score = v_load(x);
            if (bias) score += v_load(bias + kk * QUERIES + lane);
            v_store(x, exp_or_zero(score - lse));
        }
        if (!s->has_low_rows) continue;
        vf inverse = v_load(s->inverse_sum + lane);
        for (int64_t kk = 0; kk < t->key_limit[lane / STEP]; kk++) {
            float *x = s->scores + kk * QUERIES + lane;
            v_store(x, v_load(x) * inverse);
        }
    }
}

/* dS = P * (dP - delta) * scale */
static void score_gradients(const tile *t, float scale, backward_state *s) {
    for (int64_t lane = 0; lane < QUERIES; lane += DW_LANES) {
        vf delta = v_load(s->delta + lane);
        for (int64_t kk = 0; kk < t->key_limit[lane / STEP]; kk++) {
            int64_t at = kk * QUERIES + lane;
            v_store(s->d_scores + at,
                    v_load(s->scores + at) * scale * (v_load(s->d_scores + at) - delta));
        }
    }
}

/* `first_keys`: dq has no terms yet. `first_queries`: dk and dv of these keys have none either. */
static void backward_tile(const dw__attention *a, const dw__attention_part *part, const tile *t,
                          bool first_keys, bool first_queries, backward_state *s) {
    const float *k = rows_at(&a->k, t->batch, part->key_head, t->key);
    const float *v = rows_at(&a->v, t->batch, part->key_head, t->key);
    const float *dropped = s->scores;
    multiply_rows(t, a->head_size, a->scale, k, a->k.row, s->queries, s->scores);
    if (a->softcap > 0.0f) cap_scores(t, a->softcap, s->scores, s->slope);
    probabilities(t, fill_bias(a, t, s->bias) ? s->bias : NULL, s);
    multiply_rows(t, a->value_size, 1.0f, v, a->v.row, s->grads, s->d_scores);
    if (a->p > 0.0f) {
        fill_dropout(a, t, s->bias);
        multiply_elements(t, s->scores, s->bias, s->dropped);
        multiply_elements(t, s->d_scores, s->bias, s->d_scores);
        dropped = s->dropped;
    }
    score_gradients(t, a->scale, s);
    if (s->slope) multiply_elements(t, s->d_scores, s->slope, s->d_scores);
    if (part->wants_dkv && a->dv.data) {
        reduce_queries(t, a->value_size, dropped, rows_at(&a->d_o, t->batch, t->head, t->query),
                       a->d_o.row, first_queries ? 0.0f : 1.0f,
                       rows_at(&a->dv, t->batch, part->key_head, t->key), a->dv.row);
    }
    if (part->wants_dkv && a->dk.data) {
        reduce_queries(t, a->head_size, s->d_scores, rows_at(&a->q, t->batch, t->head, t->query),
                       a->q.row, first_queries ? 0.0f : 1.0f,
                       rows_at(&a->dk, t->batch, part->key_head, t->key), a->dk.row);
    }
    if (part->wants_dq && a->dq.data) {
        reduce_keys(t, a->head_size, s->d_scores, k, a->k.row, first_keys ? 0.0f : 1.0f,
                    rows_at(&a->dq, t->batch, t->head, t->query), a->dq.row);
    }
}

/* Sum of exp(score - lse) over the keys of a query whose mask values absorbed the scores: each score equals
 * its mask value. */
static float sum_of_low_row(const dw__attention *a, const tile *t, int64_t query, float lse) {
    const float *added = a->mask;
    int64_t first, end;
    float sum = 0.0f;
    reachable_keys(a, query, 1, &first, &end);
    if (!added || a->mask_is_bool) return 1.0f; /* no float mask: the scores themselves were low */
    added += t->batch * a->mask_stride[0] + t->head * a->mask_stride[1] + query * a->mask_stride[2];
    for (int64_t key = first; key < end; key++) sum += expf(added[key * a->mask_stride[3]] - lse);
    return sum;
}

static void load_queries(const dw__attention *a, const tile *t, backward_state *s) {
    const float *d_o = rows_at(&a->d_o, t->batch, t->head, t->query);
    const float *o = rows_at(&a->o, t->batch, t->head, t->query);
    transpose_block(t->query_count, a->head_size, rows_at(&a->q, t->batch, t->head, t->query),
                    a->q.row, s->queries);
    transpose_block(t->query_count, a->value_size, d_o, a->d_o.row, s->grads);
    s->has_low_rows = false;
    for (int64_t i = 0; i < QUERIES; i++) {
        s->inverse_sum[i] = 1.0f;
        /* P = exp(score - inf) = 0 for missing queries and for queries that may attend to no key. */
        s->lse[i] = INFINITY;
        s->delta[i] = 0.0f;
        if (i >= t->query_count) continue;
        float lse = *rows_at(&a->lse, t->batch, t->head, t->query + i);
        if (lse != -INFINITY) s->lse[i] = lse;
        if (lse < (float)DW_LOW_SCORE && lse != -INFINITY) {
            s->has_low_rows = true;
            s->inverse_sum[i] = 1.0f / sum_of_low_row(a, t, t->query + i, lse);
        }
        float delta = 0.0f;
        for (int64_t e = 0; e < a->value_size; e++) {
            delta += d_o[i * a->d_o.row + e] * o[i * a->o.row + e];
        }
        s->delta[i] = delta;
    }
}

static void zero_rows(const dw__attention_rows *rows, int64_t batch, int64_t head, int64_t first,
                      int64_t end, int64_t size) {
    if (!rows->data) return;
    for (int64_t i = first; i < end; i++) {
        memset(rows_at(rows, batch, head, i), 0, (size_t)size * sizeof(float));
    }
}

static void zero_keys(const dw__attention *a, const dw__attention_part *part, int64_t first,
                      int64_t end) {
    if (!part->wants_dkv) return;
    zero_rows(&a->dk, part->batch, part->key_head, first, end, a->head_size);
    zero_rows(&a->dv, part->batch, part->key_head, first, end, a->value_size);
}

/* dk and dv are written up to *written. Later blocks of keys are initialised instead of added to. Both ends
 * of a query block's key range only grow with the block, so one number suffices. */
static void backward_queries(const dw__attention *a, const dw__attention_part *part, tile *t,
                             int64_t *written, backward_state *s) {
    int64_t first, end;
    reachable_keys(a, t->query, t->query_count, &first, &end);
    int64_t start = at_least(part->key, first / KEYS * KEYS);
    end = at_most(part->key_end, end);
    if (start >= end) {
        if (part->wants_dq) {
            zero_rows(&a->dq, t->batch, t->head, t->query, t->query + t->query_count, a->head_size);
        }
        return;
    }
    if (start > *written) {
        zero_keys(a, part, *written, start);
        *written = start;
    }
    load_queries(a, t, s);
    for (int64_t key = start; key < end; key += KEYS) {
        place_tile(a, key, t);
        backward_tile(a, part, t, key == start, key >= *written, s);
        *written = at_least(*written, key + t->key_count);
    }
}

static void backward(const dw__attention *a, const dw__attention_part *part, float *scratch) {
    backward_state s;
    s.queries = scratch;
    s.grads = s.queries + a->head_size * QUERIES;
    s.scores = s.grads + a->value_size * QUERIES;
    s.d_scores = s.scores + TILE;
    s.bias = s.d_scores + TILE;
    s.dropped = s.bias + TILE;
    s.slope = a->softcap > 0.0f ? s.dropped + TILE : NULL;
    int64_t written = part->key;
    for (int64_t head = part->head; head < part->head_end; head++) {
        for (int64_t query = part->query; query < part->query_end; query += QUERIES) {
            tile t = {.batch = part->batch, .head = head, .query = query, .lanes = QUERIES};
            t.query_count = at_most(QUERIES, part->query_end - query);
            backward_queries(a, part, &t, &written, &s);
        }
    }
    zero_keys(a, part, written, part->key_end);
}

const dw__attention_loops DW_ISA_NAME(dw__attention_loops) = {
    .forward = forward,
    .backward = backward,
};
