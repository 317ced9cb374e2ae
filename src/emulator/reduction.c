#include "emulator/reduction.h"
#include "number/half.h"
#include <math.h>
#include <string.h>

bool dw__emu_take_reduction(dw__emu_translator *t, bool exchanges, dw__emu_reduction *kind) {
    static const char *const names[] = {"add", "min", "max",  "inc", "dec", "and",
                                        "or",  "xor", "exch", "cas", NULL};
    const int before = t->cursor, index = dw__emu_take_one_of(t, names);
    *kind = (dw__emu_reduction)index;
    if (index >= 0 && (exchanges || index < DW__REDUCE_EXCHANGE)) return true;
    t->cursor = before;
    return false;
}

static bool is_half(dw__emu_type type) {
    return type == DW__T_F16 || type == DW__T_BF16 || type == DW__T_F16X2 || type == DW__T_BF16X2;
}

bool dw__emu_reduces(dw__emu_reduction kind, dw__emu_type type) {
    const int bytes = dw__emu_type_bytes(type);
    const bool half = is_half(type), real = half || type == DW__T_F32 || type == DW__T_F64,
               whole = !real && (type == DW__T_B32 || type == DW__T_U32 || type == DW__T_S32 ||
                                 type == DW__T_B64 || type == DW__T_U64 || type == DW__T_S64);
    switch (kind) {
    case DW__REDUCE_ADD: return real || whole;
    case DW__REDUCE_MIN:
    case DW__REDUCE_MAX: return half || whole;
    case DW__REDUCE_INC:
    case DW__REDUCE_DEC: return whole && bytes == 4;
    case DW__REDUCE_COMPARE: return whole || type == DW__T_B16;
    default: return whole;
    }
}

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

static uint32_t single_sum(uint32_t x, uint32_t y, bool in_global) {
    float a = dw__f32_from_bits(x), b = dw__f32_from_bits(y);
    if (in_global) a = flushed(a), b = flushed(b);
    float sum = a + b;
    if (in_global) sum = flushed(sum);
    return isnan(sum) ? 0x7FFFFFFF : dw__f32_bits(sum);
}

static uint64_t double_sum(uint64_t x, uint64_t y) {
    double a, b;
    memcpy(&a, &x, sizeof a), memcpy(&b, &y, sizeof b);
    a += b;
    memcpy(&x, &a, sizeof x);
    return x;
}

/* An F32 sum of two halves rounds to the half like the exact sum: 24 bits are at least twice 11 plus two. */
static uint16_t half_result(dw__emu_reduction kind, bool brain, uint16_t x, uint16_t y) {
    const float a = brain ? dw__bf16_to_f32(x) : dw__f16_to_f32(x),
                b = brain ? dw__bf16_to_f32(y) : dw__f16_to_f32(y);
    if (kind == DW__REDUCE_ADD) {
        const float sum = a + b;
        return isnan(sum) ? 0x7FFF : brain ? dw__f32_to_bf16(sum) : dw__f32_to_f16(sum);
    }
    if (isnan(a) && isnan(b)) return 0x7FFF;
    if (isnan(a)) return y;
    if (isnan(b)) return x;
    const bool less = a < b || (a == b && signbit(a) && !signbit(b));
    return less == (kind == DW__REDUCE_MIN) ? x : y;
}

static uint64_t whole_result(dw__emu_reduction kind, dw__emu_type type, uint64_t x, uint64_t y,
                             uint64_t z) {
    const int spare = 64 - 8 * dw__emu_type_bytes(type);
    const bool less = dw__emu_type_signed(type)
                          ? (int64_t)(x << spare) >> spare < (int64_t)(y << spare) >> spare
                          : x < y;
    switch (kind) {
    case DW__REDUCE_ADD: return x + y;
    case DW__REDUCE_MIN: return less ? x : y;
    case DW__REDUCE_MAX: return less ? y : x;
    case DW__REDUCE_INC: return x >= y ? 0 : x + 1;
    case DW__REDUCE_DEC: return x == 0 || x > y ? y : x - 1;
    case DW__REDUCE_AND: return x & y;
    case DW__REDUCE_OR: return x | y;
    case DW__REDUCE_XOR: return x ^ y;
    case DW__REDUCE_COMPARE: return x == y ? z : x;
    default: return y;
    }
}

static uint64_t result_of(dw__emu_reduction kind, dw__emu_type type, bool in_global, uint64_t x,
                          uint64_t y, uint64_t z) {
    switch (type) {
    case DW__T_F32: return single_sum((uint32_t)x, (uint32_t)y, in_global);
    case DW__T_F64: return double_sum(x, y);
    case DW__T_F16:
    case DW__T_BF16: return half_result(kind, type == DW__T_BF16, (uint16_t)x, (uint16_t)y);
    case DW__T_F16X2:
    case DW__T_BF16X2: {
        const bool brain = type == DW__T_BF16X2;
        return (uint32_t)half_result(kind, brain, (uint16_t)(x >> 16), (uint16_t)(y >> 16)) << 16 |
               half_result(kind, brain, (uint16_t)x, (uint16_t)y);
    }
    default: return whole_result(kind, type, x, y, z);
    }
}

/* Uses the host's compare-and-swap, because other clusters run on other threads. */
#define SWAP(T)                                                                                    \
    do {                                                                                           \
        T x = __atomic_load_n((T *)at, __ATOMIC_ACQUIRE);                                          \
        while (!__atomic_compare_exchange_n((T *)at, &x,                                           \
                                            (T)result_of(kind, type, in_global, x, y, z), false,   \
                                            __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {                 \
        }                                                                                          \
        return x;                                                                                  \
    } while (0)

uint64_t dw__emu_reduce(dw__emu_reduction kind, dw__emu_type type, bool in_global, void *at,
                        uint64_t y, uint64_t z) {
    switch (dw__emu_type_bytes(type)) {
    case 2: SWAP(uint16_t);
    case 4: SWAP(uint32_t);
    default: SWAP(uint64_t);
    }
}
