/* One block of an AdamW step (deepwell/adamw.h): widened to F32, updated, and rounded to what memory holds. */
#include "base/isa.h"
#include "kernel/cpu/adamw_block.h"
#include "kernel/cpu/isa/vector_math.h"
#include "number/half.h"
#include "number/isa/philox_lanes.h"

enum { BLOCK = DW_ADAMW_BLOCK, QUIET = 0x40 };
_Static_assert(BLOCK % (4 * DW_LANES) == 0, "a block is whole calls of Philox");

/* What a rounding adds below the last kept bit: random bits, or NULL to round to nearest even. */
typedef struct randomness {
    bool stochastic;
    uint32_t param[BLOCK], exp_avg[BLOCK], exp_avg_sq[BLOCK]; /* 16 bits */
} randomness;

/* ---- memory ------------------------------------------------------------------------------------ */

/* Elements from `count` on become 0. */
static void load(dw_dtype dtype, const void *from, int64_t first, int count, float to[BLOCK]) {
    for (int i = count; i < BLOCK; i++) to[i] = 0.0f;
    if (dtype == DW_F32) {
        memcpy(to, (const float *)from + first, (size_t)count * sizeof(float));
        return;
    }
    const uint16_t *half = (const uint16_t *)from + first;
    if (dtype == DW_BF16)
        for (int i = 0; i < count; i++) to[i] = dw__bf16_to_f32(half[i]);
    else
        for (int i = 0; i < count; i++) to[i] = dw__f16_to_f32(half[i]);
}

static inline uint32_t even_below(uint32_t bits, int dropped) {
    return (1u << (dropped - 1)) - 1 + (bits >> dropped & 1u);
}

static inline uint16_t to_bf16(float x, uint32_t added) {
    const uint32_t bits = dw__f32_bits(x), magnitude = bits & 0x7FFFFFFFu;
    const uint32_t nan = magnitude > 0x7F800000u ? QUIET : 0;
    return (uint16_t)((bits + (magnitude >= 0x7F800000u ? 0 : added)) >> 16 | nan);
}

/* `random` has 16 bits for each element; NULL: to nearest even. F16 is always rounded to nearest. */
static void store(dw_dtype dtype, void *to, int64_t first, int count, const float from[BLOCK],
                  const uint32_t *random) {
    if (dtype == DW_F32) {
        memcpy((float *)to + first, from, (size_t)count * sizeof(float));
        return;
    }
    uint16_t *half = (uint16_t *)to + first;
    if (dtype == DW_F16)
        for (int i = 0; i < count; i++) half[i] = dw__f32_to_f16(from[i]);
    else if (random)
        for (int i = 0; i < count; i++) half[i] = to_bf16(from[i], random[i]);
    else
        for (int i = 0; i < count; i++)
            half[i] = to_bf16(from[i], even_below(dw__f32_bits(from[i]), 16));
}

/* ---- codes of averages --------------------------------------------------------------------------- */

/* Both formats have their first normal number at 2^-6. Adding 2^-6 to a smaller one gives it the exponent of the
 * subnormals, so that code and number differ by a constant of the bits in either range. */
static const float least_normal = 0x1p-6f;
/* Bits above the dropped ones, less the code: E4M3 drops 20 bits of an F32, the code of roots 19. */
enum { E4M3_DROPPED = 20, E4M3_NORMAL = 960, E4M3_SUBNORMAL = 968, E4M3_NAN = 0x7F };
enum { ROOT_DROPPED = 19, ROOT_NORMAL = 1920, ROOT_SUBNORMAL = 1936, ROOT_NAN = 0xFF };
static const float e4m3_largest = 448.0f, root_largest = 480.0f;
/* A block whose largest magnitude is smaller becomes 0: its reciprocal would be infinite. */
static const float least_scaled = 0x1p-100f;

/* The loops below have constant bounds and one width of elements each, so that compilers vectorise them. */

static void widen(const uint8_t *codes, int count, uint32_t to[BLOCK]) {
    uint8_t copy[BLOCK] = {0};
    memcpy(copy, codes, (size_t)count);
    for (int i = 0; i < BLOCK; i++) to[i] = copy[i];
}

static void narrow(const uint32_t from[BLOCK], int count, uint8_t *codes) {
    uint8_t copy[BLOCK];
    for (int i = 0; i < BLOCK; i++) copy[i] = (uint8_t)from[i];
    memcpy(codes, copy, (size_t)count);
}

static inline float from_code(uint32_t code, uint32_t first_normal, uint32_t normal,
                              uint32_t subnormal, int dropped) {
    const bool small = code < first_normal;
    const float t = dw__f32_from_bits((code + (small ? subnormal : normal)) << dropped);
    return t - (small ? least_normal : 0.0f);
}

static void load_codes(const uint8_t *codes, float scale, int count, float to[BLOCK]) {
    uint32_t stored[BLOCK];
    widen(codes, count, stored);
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t code = stored[i] & 0x7Fu;
        const float x = from_code(code, 8, E4M3_NORMAL, E4M3_SUBNORMAL, E4M3_DROPPED) * scale;
        const uint32_t bits = code == E4M3_NAN ? 0x7FC00000u : dw__f32_bits(x);
        to[i] = dw__f32_from_bits(bits | (stored[i] & 0x80u) << 24);
    }
}

static void load_roots(const uint8_t *codes, float scale, int count, float to[BLOCK]) {
    uint32_t stored[BLOCK];
    widen(codes, count, stored);
    for (int i = 0; i < BLOCK; i++) {
        const float x = from_code(stored[i], 16, ROOT_NORMAL, ROOT_SUBNORMAL, ROOT_DROPPED) * scale;
        to[i] = dw__f32_from_bits(stored[i] == ROOT_NAN ? 0x7FC00000u : dw__f32_bits(x * x));
    }
}

/* Returns the largest finite magnitude. Elements beyond a tensor's end are 0. */
static float largest(const float x[BLOCK]) {
    enum { COLUMNS = 16 };
    int32_t most[COLUMNS] = {0}, all = 0;
    for (int i = 0; i < BLOCK; i += COLUMNS)
        for (int j = 0; j < COLUMNS; j++) {
            const int32_t bits = (int32_t)(dw__f32_bits(x[i + j]) & 0x7FFFFFFFu);
            const int32_t finite = bits < 0x7F800000 ? bits : 0;
            most[j] = finite > most[j] ? finite : most[j];
        }
    for (int j = 0; j < COLUMNS; j++) all = most[j] > all ? most[j] : all;
    return dw__f32_from_bits((uint32_t)all);
}

static void scale_of(float most, float largest_code, float *scale, float *inverse) {
    const bool scaled = most >= least_scaled;
    *scale = scaled ? most * (1.0f / largest_code) : 0.0f;
    *inverse = scaled ? largest_code / most : 0.0f;
}

static void store_codes(uint8_t *codes, float *scale, int count, const float x[BLOCK],
                        const uint32_t *random) {
    float inverse;
    uint32_t made[BLOCK], added[BLOCK];
    scale_of(largest(x), e4m3_largest, scale, &inverse);
    for (int i = 0; i < BLOCK; i++) added[i] = random ? random[i] << 4 : 0;
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t magnitude = dw__f32_bits(x[i]) & 0x7FFFFFFFu;
        float y = dw__f32_from_bits(magnitude) * inverse;
        y = y > e4m3_largest ? e4m3_largest : y;
        const bool small = y < least_normal;
        const uint32_t bits = dw__f32_bits(y + (small ? least_normal : 0.0f));
        const uint32_t below = random ? added[i] : even_below(bits, E4M3_DROPPED);
        uint32_t code = ((bits + below) >> E4M3_DROPPED) - (small ? E4M3_SUBNORMAL : E4M3_NORMAL);
        code = magnitude >= 0x7F800000u ? E4M3_NAN : code;
        made[i] = code | (dw__f32_bits(x[i]) >> 24 & 0x80u);
    }
    narrow(made, count, codes);
}

/* Between codes of roots a < b a square v becomes b^2 with probability (v - a^2) / (b^2 - a^2). */
static void store_roots(uint8_t *codes, float *scale, int count, const float v[BLOCK],
                        const uint32_t *random) {
    float root[BLOCK], above[BLOCK], bound[BLOCK], inverse;
    uint32_t made[BLOCK];
    for (int i = 0; i < BLOCK; i += DW_LANES) v_store(root + i, v_sqrt(v_load(v + i)));
    scale_of(largest(root), root_largest, scale, &inverse);
    for (int i = 0; i < BLOCK; i++) {
        float y = dw__f32_from_bits(dw__f32_bits(root[i]) & 0x7FFFFFFFu) * inverse;
        y = y > root_largest ? root_largest : y;
        const bool small = y < least_normal;
        const float shift = small ? least_normal : 0.0f;
        const uint32_t kept = dw__f32_bits(y + shift) >> ROOT_DROPPED;
        const float low = dw__f32_from_bits(kept << ROOT_DROPPED) - shift;
        const float high = dw__f32_from_bits((kept + 1) << ROOT_DROPPED) - shift;
        above[i] = random ? (y - low) * (y + low) : y - low;
        bound[i] = random ? (high - low) * (high + low) : high - y;
        made[i] = kept - (small ? ROOT_SUBNORMAL : ROOT_NORMAL);
    }
    if (random)
        for (int i = 0; i < BLOCK; i++) bound[i] *= (float)(int32_t)random[i] * 0x1p-16f;
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t magnitude = dw__f32_bits(root[i]) & 0x7FFFFFFFu;
        uint32_t code = made[i] + (above[i] > bound[i] ? 1u : 0u);
        const uint32_t least = magnitude > 0 ? 1 : 0;
        code = code < least ? least : code;
        made[i] = magnitude >= 0x7F800000u ? ROOT_NAN : code;
    }
    narrow(made, count, codes);
}

/* ---- a block --------------------------------------------------------------------------------------- */

static void draw(const dw_adamw_gpu_group *g, uint32_t stream, uint32_t step, int64_t first,
                 randomness *r) {
    const int64_t seed[2] = {(int64_t)g->seed, (int64_t)step};
    for (int at = 0; at < BLOCK; at += 4 * DW_LANES) {
        uint64_t block[DW_LANES];
        vu words[4];
        for (int i = 0; i < DW_LANES; i++) block[i] = (uint64_t)(first + at) / 4 + (uint64_t)i;
        dw__philox_lanes(seed, stream, block, words);
        v_store_interleaved(r->param + at, words[0], words[1], words[2], words[3]);
    }
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t word = r->param[i], low = word & 0xFFFFu, high = word >> 16;
        r->param[i] = low, r->exp_avg_sq[i] = high, r->exp_avg[i] = low ^ high;
    }
}

static void compute(const dw__adamw_factors *k, float p[BLOCK], const float g[BLOCK],
                    float m[BLOCK], float v[BLOCK]) {
    for (int i = 0; i < BLOCK; i += DW_LANES) {
        const vf x = v_load(g + i) * k->unscale * k->clip;
        const vf first = k->beta1 * v_load(m + i) + k->one_minus_beta1 * x;
        const vf second = k->beta2 * v_load(v + i) + k->one_minus_beta2 * (x * x);
        const vf denominator = v_sqrt(second) * k->inverse_root + k->eps;
        const vf param = v_load(p + i);
        v_store(p + i, (param - k->decay * param) - (k->step_size * first) / denominator);
        v_store(m + i, first);
        v_store(v + i, second);
    }
}

/* A step without averages. */
static void move(const dw__adamw_factors *k, float p[BLOCK], const float g[BLOCK]) {
    for (int i = 0; i < BLOCK; i += DW_LANES) {
        const vf x = v_load(g + i) * k->unscale * k->clip, param = v_load(p + i);
        v_store(p + i, (param - k->decay * param) - k->step_size * x);
    }
}

static void update(const dw_adamw_gpu_group *group, const dw_adamw_gpu_tensor *t,
                   const dw__adamw_factors *k, int64_t block) {
    const int64_t first = block * BLOCK, blocks = (t->count + BLOCK - 1) / BLOCK;
    const int count = t->count - first < BLOCK ? (int)(t->count - first) : BLOCK;
    const dw_dtype grad = group->grad_dtype ? group->grad_dtype : group->param_dtype;
    const bool codes = group->state_dtype == DW_E4M3, averages = group->state_dtype != 0;
    float p[BLOCK], g[BLOCK], m[BLOCK], v[BLOCK];
    uint8_t *m_codes = codes ? (uint8_t *)t->exp_avg + first : NULL;
    uint8_t *v_codes = codes ? (uint8_t *)t->exp_avg_sq + first : NULL;
    randomness r;
    if (group->stochastic) draw(group, t->stream, k->step, first, &r);
    load(group->param_dtype, t->param, first, count, p);
    load(grad, t->grad, first, count, g);
    if (codes) {
        load_codes(m_codes, t->scales[block], count, m);
        load_roots(v_codes, t->scales[blocks + block], count, v);
    } else if (averages) {
        load(group->state_dtype, t->exp_avg, first, count, m);
        load(group->state_dtype, t->exp_avg_sq, first, count, v);
    }
    if (averages)
        compute(k, p, g, m, v);
    else
        move(k, p, g);
    const uint32_t *const rp = group->stochastic ? r.param : NULL,
                          *const rm = group->stochastic ? r.exp_avg : NULL,
                          *const rv = group->stochastic ? r.exp_avg_sq : NULL;
    store(group->param_dtype, t->param, first, count, p, rp);
    if (group->copy_dtype) {
        load(group->param_dtype, t->param, first, count, p); /* as it was stored */
        store(group->copy_dtype, t->copy, first, count, p, NULL);
    }
    if (k->store_gradients) {
        for (int i = 0; i < BLOCK; i++) g[i] *= k->unscale;
        store(grad, t->grad, first, count, g, NULL);
    }
    if (codes) {
        store_codes(m_codes, &t->scales[block], count, m, rm);
        store_roots(v_codes, &t->scales[blocks + block], count, v, rv);
    } else if (averages) {
        store(group->state_dtype, t->exp_avg, first, count, m, rm);
        store(group->state_dtype, t->exp_avg_sq, first, count, v, rv);
    }
}

static double squares(dw_dtype dtype, const void *grad, int64_t first, int64_t count) {
    double sum = 0.0;
    for (int64_t at = 0; at < count; at += BLOCK) {
        float g[BLOCK];
        double sums[8] = {0.0};
        load(dtype, grad, first + at, count - at < BLOCK ? (int)(count - at) : BLOCK, g);
        for (int i = 0; i < BLOCK; i += 8)
            for (int j = 0; j < 8; j++) sums[j] += (double)g[i + j] * (double)g[i + j];
        for (int j = 0; j < 8; j++) sum += sums[j];
    }
    return sum;
}

const dw__adamw_loops DW_ISA_NAME(dw__adamw_loops) = {.update = update, .squares = squares};
