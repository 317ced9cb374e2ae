// AdamW of many tensors in one launch (Loshchilov and Hutter 2019, algorithm 2, with the roundings of
// torch.optim.AdamW(fused=True)): each stored value is computed in FP32 and rounded once.
//
// A step is adamw_norm, if gradients are clipped, then adamw_begin (one block), then adamw_update. Bits repeat: the sum
// of squares of each chunk is stored by itself, and adamw_begin adds them in a fixed order.
//
// Defines: PARAM, GRAD, STATE: the element types of p, of g, and of m and v (element_types.h); STATE 7: blocks of codes; STATE 0: none.
// COPY: the type in which the update also writes the new p, for models that compute in 16 bits and keep p in FP32; 0: none.
// STOCHASTIC: 1: stored values in BF16 and codes are rounded stochastically. TENSORS (adamw_params.h).
//
// Codes and random bits are those of deepwell/adamw.h. Variants with either compute without fused multiply-adds, as the
// CPU does (src/kernel/cpu/isa/adamw_loops.c), so that both give the same bits.
//
// Bytes per element: adamw_norm reads g; adamw_update reads p, g, m and v and writes p, m, v and the copy.

#define BLOCKS (STATE == 7)
#define AVERAGES (STATE != 0)
#define EXACT (STOCHASTIC || BLOCKS || !AVERAGES)
#define EXTRAS ((COPY != 0) + BLOCKS)

#include "adamw_params.h"
#include "random_word.cuh"
#include "tensor_types.cuh"

// Codes of blocks, as they lie in memory.
struct code_element {
    typedef unsigned char stored;
};
template <int type> struct state_of : element_of<type> {};
template <> struct state_of<7> : code_element {};
template <> struct state_of<0> : element_of<PARAM> {}; // no memory has them

typedef element_of<PARAM> param_element;
typedef element_of<GRAD> grad_element;
typedef state_of<STATE> state_element;
typedef element_of<COPY ? COPY : PARAM> copy_element;
typedef param_element::stored param_stored;
typedef grad_element::stored grad_stored;
typedef state_element::stored state_stored;
typedef copy_element::stored copy_stored;

#define NARROWEST (sizeof(param_stored) < sizeof(state_stored) ? sizeof(param_stored) : sizeof(state_stored))
#define PER_VECTOR (BLOCKS ? 8 : (int)(16 / NARROWEST))
// Vectors of each tensor that a thread loads before it uses the first: 4 blocks of an SM have 64 KB in flight. With 2 an
// SM holds fewer blocks, or registers spill.
#define AHEAD 1
#define STRIDE (DW_ADAMW_THREADS * PER_VECTOR) // elements of a vector of each thread

template <class T> struct alignas(sizeof(T) * PER_VECTOR < 16 ? sizeof(T) * PER_VECTOR : 16) vector_of {
    T x[PER_VECTOR];
};
DEVICE void *extra_of(const dw_adamw_params &p, int tensor, int which) {
#if EXTRAS
    return p.extra[tensor * EXTRAS + which];
#else
    return 0;
#endif
}
typedef vector_of<param_stored> param_vector;
typedef vector_of<grad_stored> grad_vector;
typedef vector_of<state_stored> state_vector;
typedef vector_of<copy_stored> copy_vector;

// Finds the block's tensor, by the first chunks of all.
DEVICE int tensor_of_block(const dw_adamw_params &p) {
    int low = 0, high = p.tensors - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (p.tensor[middle].first_chunk <= (int)blockIdx.x) low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// The elements of a block's chunk, from `first` on. Those before `whole` are processed as vectors, and none are if a
// tensor does not lie at a multiple of 16 bytes.
struct chunk {
    long long first;
    int count, whole;
};

DEVICE chunk chunk_of_block(const dw_adamw_params &p, int tensor, bool aligned) {
    chunk c;
    c.first = (long long)((int)blockIdx.x - p.tensor[tensor].first_chunk) * DW_ADAMW_CHUNK;
    const long long left = p.tensor[tensor].count - c.first;
    c.count = left < DW_ADAMW_CHUNK ? (int)left : DW_ADAMW_CHUNK;
    c.whole = aligned ? c.count / PER_VECTOR * PER_VECTOR : 0;
    return c;
}

DEVICE unsigned long long address(const void *at) { return (unsigned long long)at; }

// ---- the norm --------------------------------------------------------------------------------------------------

DEVICE double sum_over_warp(double x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// Returns the sum over a block's threads, at least a warp and at most 32; the first warp has it.
DEVICE double sum_over_block(double x) {
    __shared__ double shares[32];
    const int warps = (int)blockDim.x / 32;
    x = sum_over_warp(x);
    if (threadIdx.x % 32 == 0) shares[threadIdx.x / 32] = x;
    __syncthreads();
    x = (int)threadIdx.x % 32 < warps ? shares[threadIdx.x % 32] : 0.0;
    return sum_over_warp(x);
}

// Squares are added in FP32 within a vector and in FP64 beyond, because some GPUs have few FP64 units. Where they overflow
// FP32, they are added in FP64, so that the norm of finite gradients is finite.
DEVICE double sum_of_squares(const grad_vector &v) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) {
        const float x = grad_element::load(v.x, j);
        squares += x * x;
    }
    if (squares <= 3.402823466e38f) return (double)squares;
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) {
        const double x = (double)grad_element::load(v.x, j);
        sum += x * x;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(DW_ADAMW_THREADS) adamw_norm(const __grid_constant__ dw_adamw_params p) {
    const int tensor = tensor_of_block(p);
    const grad_stored *g = (const grad_stored *)p.tensor[tensor].g;
    const chunk c = chunk_of_block(p, tensor, address(g) % alignof(grad_vector) == 0);
    double sum = 0.0;
    g += c.first;
#pragma unroll
    for (int pass = 0; pass < DW_ADAMW_CHUNK / STRIDE; pass++) {
        const int at = pass * STRIDE + (int)threadIdx.x * PER_VECTOR;
        if (at >= c.whole) continue;
        sum += sum_of_squares(*(const grad_vector *)(g + at));
    }
    for (int at = c.whole + (int)threadIdx.x; at < c.count; at += DW_ADAMW_THREADS) {
        const double x = (double)grad_element::load(g, at);
        sum += x * x;
    }
    sum = sum_over_block(sum);
    if (threadIdx.x == 0) p.partials[blockIdx.x] = sum;
}

// ---- the beginning of a step -----------------------------------------------------------------------------------

// x^n for a whole n >= 0.
DEVICE double power(double x, unsigned n) {
    double result = 1.0;
    for (; n; n /= 2, x *= x)
        if (n % 2) result = __dmul_rn(result, x); // not fused with what follows
    return result;
}

// As torch.nn.utils.clip_grad_norm_: an infinite norm makes finite gradients 0, and a NaN makes every gradient NaN.
DEVICE float clip_of(double norm, double max_norm) {
    const double factor = max_norm / (norm + 1e-6);
    return (float)(factor > 1.0 ? 1.0 : factor);
}

extern "C" __global__ void __launch_bounds__(DW_ADAMW_BEGIN_THREADS)
    adamw_begin(const __grid_constant__ dw_adamw_begin_params p) {
    __shared__ int skip_of_step;
    if (p.first) {
        const double scale = p.grad_scale ? (double)*p.grad_scale : 1.0;
        double sum = 0.0;
        for (long long i = threadIdx.x; i < p.partial_count; i += DW_ADAMW_BEGIN_THREADS) sum += p.partials[i];
        sum = sum_over_block(sum);
        if (threadIdx.x == 0) {
            const double norm = __dsqrt_rn(sum) / (scale < 0.0 ? -scale : scale);
            dw_adamw_common common;
            common.unscale = (float)(1.0 / scale);
            common.clip = p.max_norm < 0.0 ? 1.0f : clip_of(norm, p.max_norm);
            common.norm = p.max_norm < 0.0 ? 0.0f : (float)norm;
            common.skip = (p.found_inf && *p.found_inf == 1.0f) || (p.finite_only && !(norm <= 1.7976931348623157e308));
            *p.common = common;
            skip_of_step = common.skip;
            if (p.norm) *p.norm = common.norm;
            if (p.told) {
                p.told->norm = p.max_norm < 0.0 ? 0.0 : norm;
                p.told->applied = !common.skip;
            }
        }
        __syncthreads();
    }
    const bool skip = p.first ? skip_of_step != 0 : p.common->skip != 0;
    const int i = (int)threadIdx.x;
    if (i >= p.tensors) return;
    dw_adamw_scalars scalars = {0.0f, 0.0f, 0, 0};
    if (!skip) {
        const float step = *p.step[i] + 1.0f;
        const double lr = p.lr_at ? (double)*p.lr_at : p.lr;
        *p.step[i] = step;
        scalars.step_size = (float)(lr / (1.0 - power(p.beta1, (unsigned)step)));
        scalars.inverse_root = (float)(1.0 / __dsqrt_rn(1.0 - power(p.beta2, (unsigned)step)));
        scalars.step = (unsigned)step;
    }
    p.scalars[i] = scalars;
}

// ---- the update ------------------------------------------------------------------------------------------------

struct constants {
    float unscale, clip; // clip has the sign of maximize
    float decay, beta1, beta2, one_minus_beta1, one_minus_beta2, step_size, inverse_root, eps;
};

// Replaces p, m and v; g is not unscaled yet. Where p has 16 bits, its rounding hides the error of approximate
// roots and quotients, which is below 2^-21 of the change.
DEVICE void update(const constants &c, float &p, float g, float &m, float &v) {
    if constexpr (EXACT) {
        const float x = __fmul_rn(__fmul_rn(g, c.unscale), c.clip);
        if constexpr (!AVERAGES) {
            p = __fadd_rn(__fadd_rn(p, -__fmul_rn(c.decay, p)), -__fmul_rn(c.step_size, x));
            return;
        }
        m = __fadd_rn(__fmul_rn(c.beta1, m), __fmul_rn(c.one_minus_beta1, x));
        v = __fadd_rn(__fmul_rn(c.beta2, v), __fmul_rn(c.one_minus_beta2, __fmul_rn(x, x)));
        const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v), c.inverse_root), c.eps);
        p = __fadd_rn(__fadd_rn(p, -__fmul_rn(c.decay, p)), -__fdiv_rn(__fmul_rn(c.step_size, m), denominator));
        return;
    }
    float root, quotient;
    const float x = g * c.unscale * c.clip;
    m = fmaf(c.beta1, m, c.one_minus_beta1 * x);
    v = fmaf(c.beta2, v, c.one_minus_beta2 * (x * x));
    if constexpr (sizeof(param_stored) == 2) asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
    else
        root = __fsqrt_rn(v);
    const float denominator = fmaf(root, c.inverse_root, c.eps), numerator = c.step_size * m;
    if constexpr (sizeof(param_stored) == 2) quotient = __fdividef(numerator, denominator);
    else
        quotient = __fdiv_rn(numerator, denominator);
    p = fmaf(-c.decay, p, p) - quotient;
}

// ---- stochastic rounding ---------------------------------------------------------------------------------------

// 16 random bits for each of the stored values of an element.
struct element_bits {
    unsigned p, m, v;
};
DEVICE element_bits bits_of(unsigned word) {
    element_bits b;
    b.p = word & 0xffffu, b.v = word >> 16, b.m = b.p ^ b.v;
    return b;
}

// Stores a value of an element type, in BF16 with random bits.
template <int type> DEVICE void store_rounded(void *to, int at, float x, unsigned random) {
    if constexpr (STOCHASTIC && type == DW_ELEMENT_BF16) {
        const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
        const unsigned nan = magnitude > 0x7f800000u ? 0x40u : 0u;
        ((unsigned short *)to)[at] = (unsigned short)((bits + (magnitude >= 0x7f800000u ? 0u : random)) >> 16 | nan);
    } else {
        element_of<type>::store(to, at, x);
    }
}

// The factors of a block's tensor.
DEVICE constants constants_of(const dw_adamw_params &p, const dw_adamw_common &common, const dw_adamw_scalars &scalars) {
    const float lr = p.lr_at ? *p.lr_at : p.lr;
    constants k;
    k.unscale = common.unscale;
    k.clip = p.maximize ? -common.clip : common.clip;
    k.decay = lr * p.weight_decay;
    k.beta1 = p.beta1, k.beta2 = p.beta2;
    k.one_minus_beta1 = 1.0f - p.beta1, k.one_minus_beta2 = 1.0f - p.beta2;
    k.step_size = scalars.step_size, k.inverse_root = scalars.inverse_root;
    k.eps = p.eps;
    return k;
}

#if !BLOCKS
// Stochastic rounding needs more registers than 4 blocks of an SM have.
extern "C" __global__ void __launch_bounds__(DW_ADAMW_THREADS, STOCHASTIC ? 3 : 4)
    adamw_update(const __grid_constant__ dw_adamw_params p) {
    const int tensor = tensor_of_block(p);
    const dw_adamw_entry &of = p.tensor[tensor];
    const bool store_gradients = p.store_gradients != 0;
    copy_stored *cs = 0;
    if constexpr (COPY != 0) cs = (copy_stored *)extra_of(p, tensor, 0);
    const bool aligned = (address(of.p) | address(of.m) | address(of.v)) % 16 == 0 &&
                         address(of.g) % alignof(grad_vector) == 0 && address(cs) % alignof(copy_vector) == 0;
    const chunk c = chunk_of_block(p, tensor, aligned);
    param_stored *ps = (param_stored *)of.p + c.first;
    grad_stored *gs = (grad_stored *)of.g + c.first;
    state_stored *ms = (state_stored *)of.m + c.first, *vs = (state_stored *)of.v + c.first;
    if constexpr (COPY != 0) cs += c.first;
    const dw_adamw_common common = *p.common;
    const dw_adamw_scalars scalars = p.scalars[tensor];
    const constants k = constants_of(p, common, scalars);
#pragma unroll 1
    for (int pass = 0; pass < c.whole; pass += AHEAD * STRIDE) {
        param_vector pv[AHEAD];
        grad_vector gv[AHEAD];
        state_vector mv[AHEAD], vv[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = pass + i * STRIDE + (int)threadIdx.x * PER_VECTOR;
            if (at >= c.whole) continue;
            pv[i] = *(const param_vector *)(ps + at);
            gv[i] = *(const grad_vector *)(gs + at);
            if constexpr (AVERAGES) {
                mv[i] = *(const state_vector *)(ms + at);
                vv[i] = *(const state_vector *)(vs + at);
            }
        }
        if (common.skip) return; // tested here, so that these loads do not wait for it
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = pass + i * STRIDE + (int)threadIdx.x * PER_VECTOR;
            if (at >= c.whole) continue;
            unsigned words[4] = {};
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) {
                const float gx = grad_element::load(gv[i].x, j);
                float px = param_element::load(pv[i].x, j);
                float mx = 0.0f, vx = 0.0f;
                if constexpr (AVERAGES) mx = state_element::load(mv[i].x, j), vx = state_element::load(vv[i].x, j);
                update(k, px, gx, mx, vx);
                if (STOCHASTIC && j % 4 == 0)
                    random_words(p.seed, scalars.step, of.stream, (unsigned long long)(c.first + at + j) / 4, words);
                const element_bits random = bits_of(words[j % 4]);
                store_rounded<PARAM>(pv[i].x, j, px, random.p);
                if constexpr (AVERAGES) {
                    store_rounded<STATE>(mv[i].x, j, mx, random.m);
                    store_rounded<STATE>(vv[i].x, j, vx, random.v);
                }
            }
            *(param_vector *)(ps + at) = pv[i];
            if constexpr (COPY != 0) {
                copy_vector copied;
#pragma unroll
                for (int j = 0; j < PER_VECTOR; j++)
                    copy_element::store(copied.x, j, param_element::load(pv[i].x, j));
                *(copy_vector *)(cs + at) = copied;
            }
            if (store_gradients) {
#pragma unroll
                for (int j = 0; j < PER_VECTOR; j++)
                    grad_element::store(gv[i].x, j, grad_element::load(gv[i].x, j) * k.unscale);
                *(grad_vector *)(gs + at) = gv[i];
            }
            if constexpr (AVERAGES) {
                *(state_vector *)(ms + at) = mv[i];
                *(state_vector *)(vs + at) = vv[i];
            }
        }
    }
    if (common.skip) return;
    for (int at = c.whole + (int)threadIdx.x; at < c.count; at += DW_ADAMW_THREADS) {
        const float gx = grad_element::load(gs, at);
        float px = param_element::load(ps, at);
        float mx = 0.0f, vx = 0.0f;
        if constexpr (AVERAGES) mx = state_element::load(ms, at), vx = state_element::load(vs, at);
        update(k, px, gx, mx, vx);
        const element_bits random =
            bits_of(STOCHASTIC ? random_word(p.seed, scalars.step, of.stream, (unsigned long long)(c.first + at)) : 0);
        store_rounded<PARAM>(ps, at, px, random.p);
        if constexpr (COPY != 0) copy_element::store(cs, at, param_element::load(ps, at));
        if (store_gradients) grad_element::store(gs, at, gx * k.unscale);
        if constexpr (AVERAGES) {
            store_rounded<STATE>(ms, at, mx, random.m);
            store_rounded<STATE>(vs, at, vx, random.v);
        }
    }
}
#endif

// ---- averages in blocks of codes -------------------------------------------------------------------------------

#if BLOCKS
// A format of codes: the first normal number is 2^-6 in both. Adding 2^-6 to a smaller one gives it the exponent of the
// subnormals, so that code and number differ by a constant of the bits in either range.
struct e4m3_codes {
    static constexpr int dropped = 20, first_normal = 8, normal = 960, subnormal = 968, nan = 0x7f;
    static constexpr float most = 448.0f;
};
struct root_codes {
    static constexpr int dropped = 19, first_normal = 16, normal = 1920, subnormal = 1936, nan = 0xff;
    static constexpr float most = 480.0f;
};
#define LEAST_NORMAL 0.015625f
#define LEAST_SCALED 7.888609052210118e-31f // 2^-100; a block of smaller numbers becomes 0

template <class Codes> DEVICE float from_code(unsigned code, float scale) {
    const bool small = code < Codes::first_normal;
    const float t = __uint_as_float((code + (small ? Codes::subnormal : Codes::normal)) << Codes::dropped);
    return __fmul_rn(t - (small ? LEAST_NORMAL : 0.0f), scale);
}
DEVICE float load_code(unsigned char stored, float scale) {
    const unsigned code = stored & 0x7fu, sign = (stored & 0x80u) << 24;
    const float x = from_code<e4m3_codes>(code, scale);
    return __uint_as_float((code == e4m3_codes::nan ? 0x7fc00000u : __float_as_uint(x)) | sign);
}
DEVICE float load_root(unsigned char code, float scale) {
    const float x = from_code<root_codes>(code, scale);
    return code == root_codes::nan ? __uint_as_float(0x7fc00000u) : __fmul_rn(x, x);
}

// The largest magnitude of a block, whose elements 16 threads have, and its scale. Numbers that are not finite count as 0.
template <class Codes> struct block_scale {
    float scale, inverse;
    DEVICE_MEMBER block_scale of(const float x[PER_VECTOR]) {
        unsigned most = 0;
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            const unsigned bits = __float_as_uint(x[j]) & 0x7fffffffu;
            if (bits < 0x7f800000u && bits > most) most = bits;
        }
#pragma unroll
        for (int distance = DW_ADAMW_BLOCK_THREADS / 2; distance > 0; distance /= 2) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, most, distance);
            if (other > most) most = other;
        }
        const float largest = __uint_as_float(most);
        const bool scaled = largest >= LEAST_SCALED;
        block_scale s;
        s.scale = scaled ? __fmul_rn(largest, 1.0f / Codes::most) : 0.0f;
        s.inverse = scaled ? __fdiv_rn(Codes::most, largest) : 0.0f;
        return s;
    }
};

DEVICE unsigned even_below(unsigned bits, int dropped) { return (1u << (dropped - 1)) - 1 + (bits >> dropped & 1u); }

DEVICE unsigned char to_code(float x, float inverse, unsigned random) {
    typedef e4m3_codes codes;
    const unsigned magnitude = __float_as_uint(x) & 0x7fffffffu;
    float y = __fmul_rn(__uint_as_float(magnitude), inverse);
    if (y > codes::most) y = codes::most;
    const bool small = y < LEAST_NORMAL;
    const unsigned bits = __float_as_uint(__fadd_rn(y, small ? LEAST_NORMAL : 0.0f));
    const unsigned added = STOCHASTIC ? random << 4 : even_below(bits, codes::dropped);
    unsigned code = ((bits + added) >> codes::dropped) - (small ? codes::subnormal : codes::normal);
    if (magnitude >= 0x7f800000u) code = codes::nan;
    return (unsigned char)(code | (__float_as_uint(x) >> 24 & 0x80u));
}

// Between codes of roots a < b a square v becomes b^2 with probability (v - a^2) / (b^2 - a^2).
DEVICE unsigned char to_root_code(float root, float inverse, unsigned random) {
    typedef root_codes codes;
    const unsigned magnitude = __float_as_uint(root) & 0x7fffffffu;
    float y = __fmul_rn(__uint_as_float(magnitude), inverse);
    if (y > codes::most) y = codes::most;
    const bool small = y < LEAST_NORMAL;
    const float shift = small ? LEAST_NORMAL : 0.0f;
    const unsigned kept = __float_as_uint(__fadd_rn(y, shift)) >> codes::dropped;
    const float low = __uint_as_float(kept << codes::dropped) - shift;
    const float high = __uint_as_float((kept + 1) << codes::dropped) - shift;
    const float above = __fmul_rn(__fadd_rn(y, -low), __fadd_rn(y, low));
    const float width = __fmul_rn(__fadd_rn(high, -low), __fadd_rn(high, low));
    const float uniform = (float)(int)random * 1.52587890625e-05f; // 2^-16
    const bool up = STOCHASTIC ? above > __fmul_rn(uniform, width) : __fadd_rn(y, -low) > __fadd_rn(high, -y);
    unsigned code = kept - (small ? codes::subnormal : codes::normal) + (up ? 1u : 0u);
    if (code == 0 && magnitude > 0) code = 1;
    return (unsigned char)(magnitude >= 0x7f800000u ? codes::nan : code);
}

// Copies a thread's elements between memory and registers, at most `count` of them; at once if `whole`.
template <class T> DEVICE void read(vector_of<T> &to, const T *from, int count, bool whole) {
    if (whole) {
        to = *(const vector_of<T> *)from;
        return;
    }
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++) to.x[j] = j < count ? from[j] : (T)0;
}
template <class T> DEVICE void write(T *to, const vector_of<T> &from, int count, bool whole) {
    if (whole) {
        *(vector_of<T> *)to = from;
        return;
    }
#pragma unroll
    for (int j = 0; j < PER_VECTOR; j++)
        if (j < count) to[j] = from.x[j];
}

extern "C" __global__ void __launch_bounds__(DW_ADAMW_THREADS, 3) adamw_update(const __grid_constant__ dw_adamw_params p) {
    const int tensor = tensor_of_block(p);
    const dw_adamw_entry &of = p.tensor[tensor];
    copy_stored *cs = 0;
    if constexpr (COPY != 0) cs = (copy_stored *)extra_of(p, tensor, 0);
    const bool aligned = address(of.p) % alignof(param_vector) == 0 && (address(of.m) | address(of.v)) % 8 == 0 &&
                         address(of.g) % alignof(grad_vector) == 0 && address(cs) % alignof(copy_vector) == 0;
    const chunk c = chunk_of_block(p, tensor, aligned);
    const long long blocks = (of.count + DW_ADAMW_BLOCK_ELEMENTS - 1) / DW_ADAMW_BLOCK_ELEMENTS;
    float *const scales = (float *)extra_of(p, tensor, EXTRAS - 1) + c.first / DW_ADAMW_BLOCK_ELEMENTS;
    param_stored *const ps = (param_stored *)of.p + c.first;
    grad_stored *const gs = (grad_stored *)of.g + c.first;
    state_stored *const ms = (state_stored *)of.m + c.first, *const vs = (state_stored *)of.v + c.first;
    if constexpr (COPY != 0) cs += c.first;
    const dw_adamw_common common = *p.common;
    if (common.skip) return;
    const dw_adamw_scalars scalars = p.scalars[tensor];
    const constants k = constants_of(p, common, scalars);
#pragma unroll 1
    for (int pass = 0; pass < c.count; pass += STRIDE) {
        const int at = pass + (int)threadIdx.x * PER_VECTOR;
        const int count = c.count - at; // of this thread; may be more than it has, or none
        const bool whole = at + PER_VECTOR <= c.whole, first = threadIdx.x % DW_ADAMW_BLOCK_THREADS == 0 && count > 0;
        float *const scale = scales + at / DW_ADAMW_BLOCK_ELEMENTS;
        param_vector pv;
        grad_vector gv;
        state_vector mv, vv;
        float m[PER_VECTOR], v[PER_VECTOR];
        read(pv, ps + at, count, whole), read(gv, gs + at, count, whole);
        read(mv, ms + at, count, whole), read(vv, vs + at, count, whole);
        const float m_scale = count > 0 ? scale[0] : 0.0f, v_scale = count > 0 ? scale[blocks] : 0.0f;
        unsigned words[8];
        if constexpr (STOCHASTIC) {
            random_words(p.seed, scalars.step, of.stream, (unsigned long long)(c.first + at) / 4, words);
            random_words(p.seed, scalars.step, of.stream, (unsigned long long)(c.first + at) / 4 + 1, words + 4);
        }
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            float px = param_element::load(pv.x, j);
            m[j] = load_code(mv.x[j], m_scale), v[j] = load_root(vv.x[j], v_scale);
            update(k, px, grad_element::load(gv.x, j), m[j], v[j]);
            store_rounded<PARAM>(pv.x, j, px, STOCHASTIC ? bits_of(words[j]).p : 0);
            if (p.store_gradients) grad_element::store(gv.x, j, grad_element::load(gv.x, j) * k.unscale);
            v[j] = __fsqrt_rn(v[j]);
        }
        write(ps + at, pv, count, whole);
        if constexpr (COPY != 0) {
            copy_vector copied;
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) copy_element::store(copied.x, j, param_element::load(pv.x, j));
            write(cs + at, copied, count, whole);
        }
        if (p.store_gradients) write(gs + at, gv, count, whole);
        const block_scale<e4m3_codes> of_m = block_scale<e4m3_codes>::of(m);
        const block_scale<root_codes> of_v = block_scale<root_codes>::of(v);
#pragma unroll
        for (int j = 0; j < PER_VECTOR; j++) {
            const element_bits random = bits_of(STOCHASTIC ? words[j] : 0);
            mv.x[j] = to_code(m[j], of_m.inverse, random.m);
            vv.x[j] = to_root_code(v[j], of_v.inverse, random.v);
        }
        write(ms + at, mv, count, whole), write(vs + at, vv, count, whole);
        if (first) scale[0] = of_m.scale, scale[blocks] = of_v.scale;
    }
}
#endif
