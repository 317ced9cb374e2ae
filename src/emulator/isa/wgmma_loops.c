/* Sums of wgmma by columns side by side. All of it is integer arithmetic or exact, so that every instruction
 * set gives the same bits. */
#include "emulator/wgmma_loops.h"
#include "base/isa.h"
#include "base/vector.h"
#include "emulator/wgmma_sum.h"

/* Half as many lanes, of 64 bits. */
typedef int64_t vl __attribute__((vector_size(DW_VECTOR_BYTES)));
typedef int32_t vi_half __attribute__((vector_size(DW_VECTOR_BYTES / 2)));
typedef float vf_half __attribute__((vector_size(DW_VECTOR_BYTES / 2)));

static inline vi load(const int32_t *at) {
    vi x;
    memcpy(&x, at, sizeof x);
    return x;
}
static inline void store(int32_t *at, vi x) { memcpy(at, &x, sizeof x); }
static inline vi greater(vi a, vi b) {
    const vi more = a > b;
    return (a & more) | (b & ~more);
}
static inline vi lesser(vi a, vi b) {
    const vi less = a < b;
    return (a & less) | (b & ~less);
}
static inline vi right(vi magnitude, vi by) { return (vi)((vu)magnitude >> (vu)by); }

static bool decode(const uint32_t *codes, size_t count, const dw__wgmma_format *format,
                   const dw__wgmma_factors *factors) {
    const int fraction_bits = format->fraction_bits, top = (1 << format->exponent_bits) - 1;
    const int bias = top >> 1, sign_at = format->exponent_bits + fraction_bits;
    const int fraction_mask = (1 << fraction_bits) - 1;
    const vi none = v_set_int(DW__NO_EXPONENT);
    vi special = v_set_int(0);
    for (size_t i = 0; i < count; i += DW_LANES) {
        const vi code = load((const int32_t *)codes + i) >> format->unused,
                 fraction = code & fraction_mask;
        const vi field = code >> fraction_bits & top, subnormal = field == 0;
        const vi magnitude = fraction | (~subnormal & (1 << fraction_bits));
        const vi exponent = field - bias - subnormal, zero = magnitude == 0;
        special |=
            (field == top) & (format->finite_top ? fraction == fraction_mask : v_set_int(-1));
        store(factors->magnitude + i, magnitude);
        store(factors->exponent + i, (exponent & ~zero) | (none & zero));
        store(factors->sign + i, -(code >> sign_at & 1));
    }
    int any = 0;
    for (int i = 0; i < DW_LANES; i++) any |= special[i];
    return !any;
}

/* What D begins with as a term, and its exponent; true where some are no numbers. */
typedef struct term {
    vi magnitude, exponent, sign, special;
} term;
static inline term term_of(const float *d) {
    vi bits;
    memcpy(&bits, d, sizeof bits);
    const vi field = bits >> 23 & 255, fraction = bits & 0x7FFFFF, subnormal = field == 0;
    const vi magnitude = fraction | (~subnormal & 0x800000), zero = magnitude == 0;
    return (term){magnitude, ((field - 127 - subnormal) & ~zero) | (DW__NO_EXPONENT & zero),
                  bits >> 31, field == 255};
}

/* Half of the lanes: sum * 2^quantum, cut off; `small` gets the lanes that would not be normal. */
static inline vf_half scaled(vi_half first, vi_half second, vi_half quantum, int64_t kept_bits,
                             vl *small) {
    const vd sum = __builtin_convertvector(first, vd) + __builtin_convertvector(second, vd);
    const vd cut = (vd)((vl)sum & kept_bits);
    const vl power = (__builtin_convertvector(quantum, vl) + 1023) << 52;
    const vd value = cut * (vd)power;
    const vl size = (vl)value & INT64_MAX;
    *small = (size != 0) & (size < ((vl){0} + ((int64_t)(1023 - 126) << 52)));
    return __builtin_convertvector(value, vf_half);
}

static inline __attribute__((always_inline)) uint32_t
sum_lanes(int depth, const dw__wgmma_factors *row, const dw__wgmma_factors *columns, size_t stride,
          int left, bool narrow, float *d) {
    const int kept = narrow ? 13 : 25;
    const int64_t kept_bits = narrow ? ~(((int64_t)1 << 39) - 1) : ~(((int64_t)1 << 29) - 1);
    const vi most = v_set_int(31);
    const term begin = term_of(d);
    vi top = begin.exponent;
    for (int k = 0; k < depth; k++)
        top = greater(top, load(columns->exponent + (size_t)k * stride) + row->exponent[k]);
    top = greater(top, v_set_int(-900)); /* nothing but zeros */

    /* Two sums: each of at most 8 products of 27 bits, and one with D's. */
    vi sums[2] = {right(begin.magnitude << 2, lesser(top - begin.exponent + (25 - kept), most)),
                  v_set_int(0)};
    sums[0] = (sums[0] ^ begin.sign) - begin.sign;
    for (int k = 0; k < depth; k++) {
        const size_t at = (size_t)k * stride;
        const vi by = lesser(top - (load(columns->exponent + at) + row->exponent[k]), most);
        const vi product = right(load(columns->magnitude + at) * (row->magnitude[k] << left), by);
        const vi sign = load(columns->sign + at) ^ row->sign[k];
        sums[k >> 3 & 1] += (product ^ sign) - sign;
    }

    int32_t first[DW_LANES], second[DW_LANES], quantum[DW_LANES], special[DW_LANES];
    float made[DW_LANES];
    int64_t small[DW_LANES];
    uint32_t others = 0;
    store(first, sums[0]), store(second, sums[1]), store(quantum, top - kept),
        store(special, begin.special);
    for (int i = 0; i < DW_LANES; i += DW_LANES / 2) {
        vi_half a, b, q;
        vl tiny;
        memcpy(&a, first + i, sizeof a), memcpy(&b, second + i, sizeof b),
            memcpy(&q, quantum + i, sizeof q);
        const vf_half half = scaled(a, b, q, kept_bits, &tiny);
        memcpy(made + i, &half, sizeof half), memcpy(small + i, &tiny, sizeof tiny);
    }
    for (int i = 0; i < DW_LANES; i++) others |= (uint32_t)(small[i] != 0 || special[i] != 0) << i;
    if (!others) {
        memcpy(d, made, sizeof made);
        return 0;
    }
    for (int i = 0; i < DW_LANES; i++)
        if (!(others >> i & 1)) d[i] = made[i];
    return others;
}

static inline __attribute__((always_inline)) uint32_t
sums_of(int depth, const dw__wgmma_factors *row, const dw__wgmma_factors *columns, size_t stride,
        int left, bool narrow, float *d) {
    uint32_t others = 0;
    for (int i = 0; i < DW__WGMMA_COLUMNS; i += DW_LANES) {
        const dw__wgmma_factors part = {columns->magnitude + i, columns->exponent + i,
                                        columns->sign + i};
        others |= sum_lanes(depth, row, &part, stride, left, narrow, d + i) << i;
    }
    return others;
}

/* The depths that there are, so that their loops are unrolled. */
static uint32_t sums(int depth, const dw__wgmma_factors *row, const dw__wgmma_factors *columns,
                     size_t stride, int left, bool narrow, float *d) {
    switch (depth) {
    case 8: return sums_of(8, row, columns, stride, left, false, d);
    case 16: return sums_of(16, row, columns, stride, left, false, d);
    default: return sums_of(depth, row, columns, stride, left, narrow, d);
    }
}

const dw__wgmma_loops DW_ISA_NAME(dw__wgmma_loops) = {.decode = decode, .sums = sums};
