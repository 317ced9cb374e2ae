// AdamW of many tensors in one launch (Loshchilov and Hutter 2019, algorithm 2, with the roundings of
// torch.optim.AdamW(fused=True)): each stored value is computed in FP32 and rounded once.
//
// A step is adamw_norm, if gradients are clipped, then adamw_begin (one block), then adamw_update. Bits repeat: the sum
// of squares of each chunk is stored by itself, and adamw_begin adds them in a fixed order.
//
// Defines: PARAM, GRAD, STATE: the element types of p, of g, and of m and v (element_types.h). COPY: the type in which the
// update also writes the new p, for models that compute in 16 bits and keep p in FP32; 0: none. TENSORS (adamw_params.h).
//
// Bytes per element: adamw_norm reads g; adamw_update reads p, g, m and v and writes p, m, v and the copy.

#include "adamw_params.h"
#include "tensor_types.cuh"

typedef element_of<PARAM> param_element;
typedef element_of<GRAD> grad_element;
typedef element_of<STATE> state_element;
typedef element_of<COPY ? COPY : PARAM> copy_element;
typedef param_element::stored param_stored;
typedef grad_element::stored grad_stored;
typedef state_element::stored state_stored;
typedef copy_element::stored copy_stored;

#define NARROWEST (sizeof(param_stored) < sizeof(state_stored) ? sizeof(param_stored) : sizeof(state_stored))
#define PER_VECTOR ((int)(16 / NARROWEST))
// Vectors of each tensor that a thread loads before it uses the first: 4 blocks of an SM have 64 KB in flight. With 2 an
// SM holds fewer blocks, or registers spill.
#define AHEAD 1
#define STRIDE (DW_ADAMW_THREADS * PER_VECTOR) // elements of a vector of each thread

template <class T> struct alignas(sizeof(T) * PER_VECTOR < 16 ? sizeof(T) * PER_VECTOR : 16) vector_of {
    T x[PER_VECTOR];
};
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
        if (n % 2) result *= x;
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
    dw_adamw_scalars scalars = {0.0f, 0.0f};
    if (!skip) {
        const float step = *p.step[i] + 1.0f;
        const double lr = p.lr_at ? (double)*p.lr_at : p.lr;
        *p.step[i] = step;
        scalars.step_size = (float)(lr / (1.0 - power(p.beta1, (unsigned)step)));
        scalars.inverse_root = (float)(1.0 / __dsqrt_rn(1.0 - power(p.beta2, (unsigned)step)));
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

extern "C" __global__ void __launch_bounds__(DW_ADAMW_THREADS, 4) adamw_update(const __grid_constant__ dw_adamw_params p) {
    const int tensor = tensor_of_block(p);
    const dw_adamw_entry &of = p.tensor[tensor];
    const bool store_gradients = p.store_gradients != 0;
    copy_stored *cs = 0;
    if constexpr (COPY != 0) cs = (copy_stored *)p.copy[tensor];
    const bool aligned = (address(of.p) | address(of.m) | address(of.v)) % 16 == 0 &&
                         address(of.g) % alignof(grad_vector) == 0 && address(cs) % alignof(copy_vector) == 0;
    const chunk c = chunk_of_block(p, tensor, aligned);
    param_stored *ps = (param_stored *)of.p + c.first;
    grad_stored *gs = (grad_stored *)of.g + c.first;
    state_stored *ms = (state_stored *)of.m + c.first, *vs = (state_stored *)of.v + c.first;
    if constexpr (COPY != 0) cs += c.first;
    const dw_adamw_common common = *p.common;
    const dw_adamw_scalars scalars = p.scalars[tensor];
    const float lr = p.lr_at ? *p.lr_at : p.lr;
    constants k;
    k.unscale = common.unscale;
    k.clip = p.maximize ? -common.clip : common.clip;
    k.decay = lr * p.weight_decay;
    k.beta1 = p.beta1, k.beta2 = p.beta2;
    k.one_minus_beta1 = 1.0f - p.beta1, k.one_minus_beta2 = 1.0f - p.beta2;
    k.step_size = scalars.step_size, k.inverse_root = scalars.inverse_root;
    k.eps = p.eps;
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
            mv[i] = *(const state_vector *)(ms + at);
            vv[i] = *(const state_vector *)(vs + at);
        }
        if (common.skip) return; // tested here, so that these loads do not wait for it
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int at = pass + i * STRIDE + (int)threadIdx.x * PER_VECTOR;
            if (at >= c.whole) continue;
#pragma unroll
            for (int j = 0; j < PER_VECTOR; j++) {
                const float gx = grad_element::load(gv[i].x, j);
                float px = param_element::load(pv[i].x, j);
                float mx = state_element::load(mv[i].x, j), vx = state_element::load(vv[i].x, j);
                update(k, px, gx, mx, vx);
                param_element::store(pv[i].x, j, px);
                state_element::store(mv[i].x, j, mx);
                state_element::store(vv[i].x, j, vx);
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
            *(state_vector *)(ms + at) = mv[i];
            *(state_vector *)(vs + at) = vv[i];
        }
    }
    if (common.skip) return;
    for (int at = c.whole + (int)threadIdx.x; at < c.count; at += DW_ADAMW_THREADS) {
        const float gx = grad_element::load(gs, at);
        float px = param_element::load(ps, at);
        float mx = state_element::load(ms, at), vx = state_element::load(vs, at);
        update(k, px, gx, mx, vx);
        param_element::store(ps, at, px);
        if constexpr (COPY != 0) copy_element::store(cs, at, param_element::load(ps, at));
        if (store_gradients) grad_element::store(gs, at, gx * k.unscale);
        state_element::store(ms, at, mx);
        state_element::store(vs, at, vx);
    }
}
