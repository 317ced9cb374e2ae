/* Implements deepwell/attention.h on the CPU, by definition and in double. Tests of the layers above preload it in the
 * place of libdeepwell's own functions, so that marshalling is tested without a GPU. Every element is written through
 * the call's strides, and the workspace is requested and filled.
 */
#include "deepwell/attention.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static double load(const dw_attention *c, const dw_attention_tensor *t, int64_t b, int64_t h,
                   int64_t i, int64_t d) {
    uint16_t bits = ((const uint16_t *)t->data)[b * t->batch + h * t->head + i * t->row + d];
    if (c->dtype == DW_BF16) {
        uint32_t wide = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &wide, 4);
        return x;
    }
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double x = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 ? -x : x;
}

static void store(const dw_attention *c, const dw_attention_tensor *t, int64_t b, int64_t h,
                  int64_t i, int64_t d, double x) {
    uint16_t *place = (uint16_t *)t->data + b * t->batch + h * t->head + i * t->row + d;
    int digits = c->dtype == DW_BF16 ? 8 : 11, exponent;
    if (x == 0) {
        *place = 0;
        return;
    }
    frexp(x, &exponent);
    if (c->dtype == DW_F16 && exponent < -13) exponent = -13;
    double rounded = ldexp(nearbyint(ldexp(x, digits - exponent)), exponent - digits);
    if (c->dtype == DW_BF16) {
        float f = (float)rounded;
        uint32_t wide;
        memcpy(&wide, &f, 4);
        *place = (uint16_t)(wide >> 16);
        return;
    }
    double size = fabs(rounded);
    uint16_t bits;
    if (size < 0x1p-14) {
        bits = (uint16_t)(size * 0x1p24);
    } else {
        int e;
        double m = frexp(size, &e); /* u is in [0.5, 1) */
        bits = (uint16_t)((e + 14) << 10) + (uint16_t)((m * 2 - 1) * 1024);
    }
    *place = (uint16_t)(bits | (rounded < 0 ? 0x8000 : 0));
}

static double uniform(int64_t seed, int64_t offset, int64_t stream, uint64_t index) {
    uint64_t block = index / 4;
    uint32_t x[4] = {(uint32_t)block, (uint32_t)stream ^ (uint32_t)(block >> 32) << 20,
                     (uint32_t)offset, (uint32_t)((uint64_t)offset >> 32)};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)((uint64_t)seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        uint64_t a = (uint64_t)0xD2511F53u * x[0], b = (uint64_t)0xCD9E8D57u * x[2];
        uint32_t y[4] = {(uint32_t)(b >> 32) ^ x[1] ^ k0, (uint32_t)b,
                         (uint32_t)(a >> 32) ^ x[3] ^ k1, (uint32_t)a};
        memcpy(x, y, sizeof x);
    }
    return (x[index % 4] >> 8) * 0x1p-24;
}

/* Each sequence of a packed batch becomes a batch of one whose tensors begin later. */
static dw_attention_tensor from_row(dw_attention_tensor t, int64_t row) {
    if (t.data != NULL) t.data = (uint16_t *)t.data + row * t.row;
    t.batch = 0;
    return t;
}

static void sequence(const dw_attention *c, int64_t b, int64_t seq_len_q, int64_t seq_len_kv,
                     int64_t first_q, int64_t first_k, int backward) {
    dw_attention_tensor q = c->q, k = c->k, v = c->v, o = c->o, d_o = c->d_o, dq = c->dq,
                        dk = c->dk, dv = c->dv;
    int64_t batch = b;
    int packed = c->offsets_q != NULL;
    if (packed) {
        q = from_row(q, first_q), o = from_row(o, first_q), d_o = from_row(d_o, first_q),
        dq = from_row(dq, first_q);
        k = from_row(k, first_k), v = from_row(v, first_k), dk = from_row(dk, first_k),
        dv = from_row(dv, first_k);
        batch = 0;
    }
    int64_t dim = c->head_dim, group = c->heads_q / c->heads_kv;
    int64_t seed = c->seed_memory ? c->seed_memory[0] : c->seed;
    int64_t offset = c->seed_memory ? c->seed_memory[1] : c->seed_offset;
    int64_t diagonal = c->bottom_right ? seq_len_kv - seq_len_q : 0;
    double *p = calloc((size_t)(seq_len_kv + 1), 8), *keep = calloc((size_t)(seq_len_kv + 1), 8);
    double *slope = calloc((size_t)(seq_len_kv + 1), 8),
           *gk = calloc((size_t)(c->heads_kv * seq_len_kv * dim + 1), 8);
    double *gv = calloc((size_t)(c->heads_kv * seq_len_kv * dim + 1), 8);
    for (int64_t h = 0; h < c->heads_q; h++) {
        int64_t kv = h / group;
        for (int64_t i = 0; i < seq_len_q; i++) {
            double top = -INFINITY, sum = 0;
            for (int64_t j = 0; j < seq_len_kv; j++) {
                double s = 0;
                for (int64_t d = 0; d < dim; d++)
                    s += load(c, &q, batch, h, i, d) * load(c, &k, batch, kv, j, d);
                s *= c->scale, slope[j] = 1;
                if (c->softcap > 0) {
                    double t = tanh(s / c->softcap);
                    s = c->softcap * t, slope[j] = 1 - t * t;
                }
                if (c->window_left >= 0 && j < i + diagonal - c->window_left) s = -INFINITY;
                if (c->window_right >= 0 && j > i + diagonal + c->window_right) s = -INFINITY;
                keep[j] = 1;
                if (c->dropout > 0) {
                    uint64_t index =
                        (uint64_t)(((b * c->heads_q + h) * c->seq_len_q + i) * c->seq_len_kv + j);
                    keep[j] = uniform(seed, offset, c->dropout_stream, index) >= c->dropout
                                  ? 1 / (1 - (double)c->dropout)
                                  : 0;
                }
                p[j] = s, top = fmax(top, s);
            }
            for (int64_t j = 0; j < seq_len_kv; j++)
                sum += p[j] = p[j] == -INFINITY ? 0 : exp(p[j] - top);
            for (int64_t j = 0; j < seq_len_kv; j++) p[j] = sum > 0 ? p[j] / sum : 0;
            if (!backward) {
                float *lse = c->lse + (packed ? h * c->total_q + first_q + i
                                              : (b * c->heads_q + h) * c->seq_len_q + i);
                *lse = sum > 0 ? (float)(top + log(sum)) : -INFINITY;
                for (int64_t d = 0; d < dim; d++) {
                    double x = 0;
                    for (int64_t j = 0; j < seq_len_kv; j++)
                        x += p[j] * keep[j] * load(c, &v, batch, kv, j, d);
                    store(c, &o, batch, h, i, d, x);
                }
                continue;
            }
            double delta = 0;
            for (int64_t d = 0; d < dim; d++)
                delta += load(c, &d_o, batch, h, i, d) * load(c, &o, batch, h, i, d);
            for (int64_t j = 0; j < seq_len_kv; j++) {
                double x = 0;
                for (int64_t d = 0; d < dim; d++)
                    x += load(c, &d_o, batch, h, i, d) * load(c, &v, batch, kv, j, d);
                for (int64_t d = 0; d < dim; d++)
                    gv[(kv * seq_len_kv + j) * dim + d] +=
                        p[j] * keep[j] * load(c, &d_o, batch, h, i, d);
                slope[j] *= p[j] * (x * keep[j] - delta) * c->scale; /* p holds dS from here on */
                for (int64_t d = 0; d < dim; d++)
                    gk[(kv * seq_len_kv + j) * dim + d] += slope[j] * load(c, &q, batch, h, i, d);
            }
            for (int64_t d = 0; d < dim; d++) {
                double x = 0;
                for (int64_t j = 0; j < seq_len_kv; j++)
                    x += slope[j] * load(c, &k, batch, kv, j, d);
                store(c, &dq, batch, h, i, d, x);
            }
        }
    }
    for (int64_t kv = 0; backward && kv < c->heads_kv; kv++) {
        for (int64_t j = 0; j < seq_len_kv; j++) {
            for (int64_t d = 0; d < dim; d++) {
                store(c, &dk, batch, kv, j, d, gk[(kv * seq_len_kv + j) * dim + d]);
                store(c, &dv, batch, kv, j, d, gv[(kv * seq_len_kv + j) * dim + d]);
            }
        }
    }
    free(p), free(keep), free(slope), free(gk), free(gv);
}

static void run(const dw_attention *c, int backward) {
    for (int64_t b = 0; b < c->batch; b++) {
        if (c->offsets_q == NULL) {
            sequence(c, b, c->seq_len_q, c->seq_len_kv, 0, 0, backward);
        } else {
            int64_t q = c->offsets_q[b], k = c->offsets_k[b];
            sequence(c, b, c->offsets_q[b + 1] - q, c->offsets_k[b + 1] - k, q, k, backward);
        }
    }
}

DW_API dw_status dw_attention_supported(const dw_attention *call, bool backward) {
    (void)backward;
    return call->head_dim % 8 == 0 ? DW_OK : DW_UNSUPPORTED;
}

DW_API dw_status dw_attention_forward(const dw_attention *call) {
    run(call, 0);
    return DW_OK;
}

DW_API dw_status dw_attention_backward_workspace(const dw_attention *call, size_t *bytes) {
    *bytes = 64 + (size_t)call->seq_len_q;
    return DW_OK;
}

DW_API dw_status dw_attention_backward(const dw_attention *call) {
    if (call->workspace == NULL || call->workspace_bytes < 64 + (size_t)call->seq_len_q)
        return DW_INVALID_ARGUMENT;
    memset(call->workspace, 0xA5, call->workspace_bytes);
    run(call, 1);
    return DW_OK;
}
