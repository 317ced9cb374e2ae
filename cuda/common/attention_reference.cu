// Attention by its definition, in F32, one warp per row. The first-use check compares the fast kernels with it. It
// runs on any GPU with any number of thread blocks and any multiple of 32 threads, needs no workspace and no atomics,
// and supports every field of dw_attention_params. Head dimensions up to 256. ELEMENT: 0 BF16, 1 F16.
//
// The bargain: nothing is stored, so each score is recomputed for each use, and backward computes the dot products of
// a pair of rows up to three times.
#include "attention_params.h"
#include "sm90.cuh" // for its types and conversions; nothing specific to that architecture
#include "philox.cuh"

#define PER_LANE 8 // Columns of a row that a lane holds: lane, lane + 32, ...

static __device__ float load_element(const dw_strided &t, long long at) {
    return element_low(((const uint16 *)t.data)[at]);
}

static __device__ void store_element(const dw_strided &t, long long at, float value) {
    ((uint16 *)t.data)[at] = (uint16)pack_elements(value, 0.f);
}

// A sequence of the batch: its first rows and its lengths.
struct sequence {
    long long batch; // factor of the batch stride: 0 for packed rows
    long long first_q, first_k;
    int rows_q, rows_k;
};

static __device__ sequence sequence_of(const dw_attention_params &p, int batch) {
    sequence s = {batch, 0, 0, p.rows_q, p.rows_k};
    if (p.offsets_q) {
        s.batch = 0;
        s.first_q = p.offsets_q[batch];
        s.first_k = p.offsets_k[batch];
        s.rows_q = p.offsets_q[batch + 1] - p.offsets_q[batch];
        s.rows_k = p.offsets_k[batch + 1] - p.offsets_k[batch];
    }
    return s;
}

static __device__ long long place_q(const dw_strided &t, const sequence &s, int head, int row) {
    return s.batch * t.batch + head * t.head + (s.first_q + row) * t.row;
}

static __device__ long long place_k(const dw_strided &t, const sequence &s, int head, int row) {
    return s.batch * t.batch + head * t.head + (s.first_k + row) * t.row;
}

static __device__ long long place_lse(const dw_attention_params &p, const sequence &s, int head, int row) {
    return p.offsets_q ? head * p.total_q + s.first_q + row : (s.batch * p.heads_q + head) * p.rows_q + row;
}

static __device__ float warp_sum(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

static __device__ void load_row(float *row, const dw_strided &t, long long at, int head_dim) {
    for (int i = 0; i < PER_LANE; i++) {
        int column = (threadIdx.x & 31) + 32 * i;
        row[i] = column < head_dim ? load_element(t, at + column) : 0.f;
    }
}

static __device__ void store_row(const float *row, const dw_strided &t, long long at, int head_dim, float factor) {
    for (int i = 0; i < PER_LANE; i++) {
        int column = (threadIdx.x & 31) + 32 * i;
        if (column < head_dim) store_element(t, at + column, row[i] * factor);
    }
}

static __device__ float dot(const float *a, const float *b) {
    float sum = 0.f;
    for (int i = 0; i < PER_LANE; i++) sum += a[i] * b[i];
    return warp_sum(sum);
}

static __device__ bool sees(const dw_attention_params &p, const sequence &s, int i, int j) {
    int at = i + (p.bottom_right ? s.rows_k - s.rows_q : 0);
    return j >= at - p.window_left && j <= at + p.window_right;
}

// The mask of a pair, in the bias's type: a number, or a byte.
static __device__ float bias_of(const dw_attention_params &p, int batch, int head, int i, int j) {
    if (!p.bias_kind) return 0.f;
    long long at = batch * p.bias.batch + head * p.bias.head + i * p.bias.row + j * p.bias_key;
    if (p.bias_kind == 1) return load_element(p.bias, at);
    return ((const uint8 *)p.bias.data)[at] ? 0.f : -INFINITY_F;
}

// A score before the exponential and without its bias, and its derivative with respect to q k.
static __device__ float score(const dw_attention_params &p, float qk, float *slope) {
    if (p.cap_scale == 0.f) {
        *slope = p.scale;
        return p.scale * qk;
    }
    float softcap = p.scale_log2 * 0.6931471805599453f, t = tanhf(p.cap_scale * qk);
    *slope = p.scale * (1.f - t * t);
    return softcap * t;
}

// Returns 1 / (1 - dropout) if the probability is kept, 0 if it is dropped.
static __device__ float kept(const dw_attention_params &p, int batch, int head, int i, int j) {
    if (p.dropout == 0.f) return 1.f;
    uint64 index = (((uint64)batch * p.heads_q + head) * p.rows_q + i) * p.rows_k + j;
    uint32 word = philox_word(philox(philox_key_of(p), index >> 2), (int)(index & 3));
    return word >> 8 >= p.keep_threshold ? p.keep_scale : 0.f;
}

extern "C" __global__ void reference_attention_forward(const __grid_constant__ dw_attention_params p) {
    long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    long long warps = (long long)gridDim.x * blockDim.x / 32;
    for (long long item = warp; item < (long long)p.batch * p.heads_q * p.rows_q; item += warps) {
        int i = (int)(item % p.rows_q), head = (int)(item / p.rows_q % p.heads_q);
        int batch = (int)(item / p.rows_q / p.heads_q), head_kv = head / p.group;
        sequence s = sequence_of(p, batch);
        if (i >= s.rows_q) continue;
        float q[PER_LANE], k[PER_LANE], o[PER_LANE] = {0.f}, slope;
        load_row(q, p.q, place_q(p.q, s, head, i), p.head_dim);

        float highest = -INFINITY_F, sum = 0.f;
        for (int j = 0; j < s.rows_k; j++) {
            if (!sees(p, s, i, j)) continue;
            load_row(k, p.k, place_k(p.k, s, head_kv, j), p.head_dim);
            highest = fmaxf(highest, score(p, dot(q, k), &slope) + bias_of(p, batch, head, i, j));
        }
        for (int j = 0; j < s.rows_k; j++) {
            if (!sees(p, s, i, j)) continue;
            load_row(k, p.k, place_k(p.k, s, head_kv, j), p.head_dim);
            float e = score(p, dot(q, k), &slope) + bias_of(p, batch, head, i, j), keep = kept(p, batch, head, i, j);
            e = e == -INFINITY_F ? 0.f : expf(e - highest);
            sum += e;
            if (keep == 0.f || e == 0.f) continue;
            load_row(k, p.v, place_k(p.v, s, head_kv, j), p.head_dim);
            for (int c = 0; c < PER_LANE; c++) o[c] += e * keep * k[c];
        }
        store_row(o, p.o, place_q(p.o, s, head, i), p.head_dim, sum > 0.f ? 1.f / sum : 0.f);
        if (p.lse && (threadIdx.x & 31) == 0)
            p.lse[place_lse(p, s, head, i)] = sum > 0.f ? highest + logf(sum) : -INFINITY_F;
    }
}

// Whether a bias has absorbed all scores of a row, and with them the logarithm of their number in its LSE.
static __device__ bool is_absorbed(const dw_attention_params &p, float lse) {
    return p.bias_kind && lse < -1e30f && lse != -INFINITY_F;
}

// The sum of the exponentials of such a row, relative to its LSE: each score is its bias.
static __device__ float absorbed_sum(const dw_attention_params &p, const sequence &s, int batch, int head, int i, float lse) {
    float sum = 0.f;
    for (int j = threadIdx.x & 31; j < s.rows_k; j += 32)
        if (sees(p, s, i, j)) sum += expf(bias_of(p, batch, head, i, j) - lse);
    return warp_sum(sum);
}

// Computes P and dS of query row i and key row j from the statistics of the first. dS is the gradient of the bias, that
// times the slope the gradient of q k.
static __device__ void pair(const dw_attention_params &p, const sequence &s, int batch, int head, int i, int j, float qk,
                            float dp, float lse, float delta, float *probability, float *ds, float *slope) {
    float x = score(p, qk, slope) + bias_of(p, batch, head, i, j), keep = kept(p, batch, head, i, j);
    float e = x == -INFINITY_F ? 0.f : expf(x - lse);
    if (is_absorbed(p, lse)) e /= absorbed_sum(p, s, batch, head, i, lse);
    *probability = e * keep;
    *ds = e * (dp * keep - delta);
}

// Work items: first the rows of dQ, then those of dK and dV. Reads O and LSE as forward stored them.
extern "C" __global__ void reference_attention_backward(const __grid_constant__ dw_attention_params p) {
    long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    long long warps = (long long)gridDim.x * blockDim.x / 32;
    long long items_q = (long long)p.batch * p.heads_q * p.rows_q, items_k = (long long)p.batch * p.heads_kv * p.rows_k;
    float q[PER_LANE], k[PER_LANE], v[PER_LANE], o[PER_LANE], d_o[PER_LANE], probability, ds, slope;

    for (long long item = warp; item < items_q; item += warps) {
        int i = (int)(item % p.rows_q), head = (int)(item / p.rows_q % p.heads_q);
        int batch = (int)(item / p.rows_q / p.heads_q), head_kv = head / p.group;
        sequence s = sequence_of(p, batch);
        if (i >= s.rows_q) continue;
        float dq[PER_LANE] = {0.f};
        load_row(q, p.q, place_q(p.q, s, head, i), p.head_dim);
        load_row(o, p.o, place_q(p.o, s, head, i), p.head_dim);
        load_row(d_o, p.d_o, place_q(p.d_o, s, head, i), p.head_dim);
        float delta = dot(o, d_o), lse = p.lse[place_lse(p, s, head, i)];
        for (int j = 0; j < s.rows_k; j++) {
            if (!sees(p, s, i, j)) continue;
            load_row(k, p.k, place_k(p.k, s, head_kv, j), p.head_dim);
            load_row(v, p.v, place_k(p.v, s, head_kv, j), p.head_dim);
            pair(p, s, batch, head, i, j, dot(q, k), dot(d_o, v), lse, delta, &probability, &ds, &slope);
            for (int c = 0; c < PER_LANE; c++) dq[c] += ds * slope * k[c];
        }
        store_row(dq, p.dq, place_q(p.dq, s, head, i), p.head_dim, 1.f);
    }

    for (long long item = warp; item < items_k; item += warps) {
        int j = (int)(item % p.rows_k), head_kv = (int)(item / p.rows_k % p.heads_kv);
        int batch = (int)(item / p.rows_k / p.heads_kv);
        sequence s = sequence_of(p, batch);
        if (j >= s.rows_k) continue;
        float dk[PER_LANE] = {0.f}, dv[PER_LANE] = {0.f};
        load_row(k, p.k, place_k(p.k, s, head_kv, j), p.head_dim);
        load_row(v, p.v, place_k(p.v, s, head_kv, j), p.head_dim);
        for (int head = head_kv * p.group; head < (head_kv + 1) * p.group; head++) {
            for (int i = 0; i < s.rows_q; i++) {
                if (!sees(p, s, i, j)) continue;
                load_row(q, p.q, place_q(p.q, s, head, i), p.head_dim);
                load_row(o, p.o, place_q(p.o, s, head, i), p.head_dim);
                load_row(d_o, p.d_o, place_q(p.d_o, s, head, i), p.head_dim);
                pair(p, s, batch, head, i, j, dot(q, k), dot(d_o, v), p.lse[place_lse(p, s, head, i)], dot(o, d_o),
                     &probability, &ds, &slope);
                for (int c = 0; c < PER_LANE; c++) {
                    dk[c] += ds * slope * q[c];
                    dv[c] += probability * d_o[c];
                }
            }
        }
        store_row(dk, p.dk, place_k(p.dk, s, head_kv, j), p.head_dim, 1.f);
        store_row(dv, p.dv, place_k(p.dv, s, head_kv, j), p.head_dim, 1.f);
    }

    if (p.bias_kind != 1 || !p.d_bias.data) return;
    long long items = (long long)p.bias_batches * p.bias_heads * p.rows_q * p.rows_k;
    for (long long item = warp; item < items; item += warps) {
        int j = (int)(item % p.rows_k), i = (int)(item / p.rows_k % p.rows_q);
        int first_head = (int)(item / p.rows_k / p.rows_q % p.bias_heads);
        int first_batch = (int)(item / p.rows_k / p.rows_q / p.bias_heads);
        int last_head = p.bias_heads == 1 ? p.heads_q - 1 : first_head;
        int last_batch = p.bias_batches == 1 ? p.batch - 1 : first_batch;
        float sum = 0.f;
        for (int batch = first_batch; batch <= last_batch; batch++)
            for (int head = first_head; head <= last_head; head++) {
                sequence s = sequence_of(p, batch);
                if (!sees(p, s, i, j)) continue;
                load_row(q, p.q, place_q(p.q, s, head, i), p.head_dim);
                load_row(k, p.k, place_k(p.k, s, head / p.group, j), p.head_dim);
                load_row(v, p.v, place_k(p.v, s, head / p.group, j), p.head_dim);
                load_row(o, p.o, place_q(p.o, s, head, i), p.head_dim);
                load_row(d_o, p.d_o, place_q(p.d_o, s, head, i), p.head_dim);
                pair(p, s, batch, head, i, j, dot(q, k), dot(d_o, v), p.lse[place_lse(p, s, head, i)], dot(o, d_o),
                     &probability, &ds, &slope);
                sum += ds;
            }
        if ((threadIdx.x & 31) == 0)
            store_element(p.d_bias, first_batch * p.d_bias.batch + first_head * p.d_bias.head + i * p.d_bias.row + j, sum);
    }
}
