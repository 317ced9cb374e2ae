// quantize, quantize_blocks and dequantize_blocks of the graph: every scheme with scales of one byte, either axis, any
// strides. Results are bit-identical to dw_block_quantize and dw_hadamard (deepwell/number.h), which define the rules.
//
// These kernels are for calls that no specialized kernel supports: formats are parameters, not constants. A group of 16
// or 32 lanes computes a block, one row of it at a time.
//
// Define: TYPE, of the matrix (element_types.h).
//
// Bytes per element: quantize reads it once more for the tensor scale and writes and reads four bytes if it is rotated.

#include "graph_quantize_params.h"
#include "random_word.cuh"
#include "strided.cuh"

typedef element_of<TYPE> element;

#define INFINITE 0x7f800000u
#define NOT_A_NUMBER 0x7fc00000u

DEVICE float load_plain(const dw_graph_quantize_params &p, long long row, long long column) {
    return (float)element::load(p.x, row * p.row_stride + column * p.column_stride);
}
DEVICE float load(const dw_graph_quantize_params &p, long long row, long long column) {
    return p.rotated ? p.rotated[row * p.columns + column] : load_plain(p, row, column);
}
DEVICE long long outers(const dw_graph_quantize_params &p) { return p.axis ? p.rows : p.columns; }
DEVICE long long inners(const dw_graph_quantize_params &p) { return p.axis ? p.columns : p.rows; }

// ---- formats -----------------------------------------------------------------------------------------------------

// The largest number, and the least normal one, as bits of an F32.
DEVICE unsigned largest_bits(const dw_code_format &f) {
    return (f.largest << (23 - f.fraction)) + ((unsigned)(127 - f.bias) << 23);
}
DEVICE unsigned least_normal(const dw_code_format &f) { return (unsigned)(127 - f.bias + 1) << 23; }

// The nearest code of a magnitude that is not above the largest number. The power of two that is added has the distance
// of neighbouring codes as its last place, so that the sum is rounded to a code and its low bits count codes.
DEVICE unsigned nearest_code(const dw_code_format &f, unsigned magnitude) {
    const int shift = 23 - f.fraction;
    const unsigned binade = max(magnitude & INFINITE, least_normal(f)), anchor = binade + ((unsigned)shift << 23);
    const unsigned sum = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(anchor)));
    return (sum + (binade >> shift) - (least_normal(f) >> shift)) & 0xff;
}

// The same by stochastic rounding: what is dropped, in units of 2^-32 of the distance of codes, plus a random word
// carries into the code.
DEVICE unsigned stochastic_code(const dw_code_format &f, unsigned magnitude, unsigned word) {
    const unsigned least = (unsigned)(127 - f.bias + 1), field = magnitude >> 23;
    const unsigned long long significand = (magnitude & 0x7fffffu) | (field ? 0x800000u : 0u);
    const unsigned from = max(field, 1u), normal = max(from, least), shift = normal - from + 23u - (unsigned)f.fraction;
    const unsigned long long kept = shift < 64 ? significand >> shift : 0,
                             dropped = shift < 64 ? significand - (kept << shift) : significand;
    const unsigned long long share = shift <= 32   ? dropped << (32 - shift)
                                     : shift < 96 ? dropped >> (shift - 32)
                                                  : 0;
    return (((normal - least) << f.fraction) + (unsigned)kept + (unsigned)((share + word) >> 32)) & 0xff;
}

DEVICE float code_value(const dw_code_format &f, unsigned code) {
    const unsigned magnitude = code & (f.sign - 1);
    const float quantum = __uint_as_float((unsigned)(128 - f.bias - f.fraction) << 23);
    unsigned bits = (magnitude << (23 - f.fraction)) + ((unsigned)(127 - f.bias) << 23);
    if (magnitude >> f.fraction == 0) bits = __float_as_uint((float)magnitude * quantum);
    if (magnitude > f.largest) bits = f.infinity && magnitude == f.infinity ? INFINITE : NOT_A_NUMBER;
    return __uint_as_float(code & f.sign ? bits | 0x80000000u : bits);
}

DEVICE dw_code_format e4m3() { return {3, 7, 0x80u, 0x7eu, 0x7fu, 0u}; }

// ---- scales ------------------------------------------------------------------------------------------------------

// A block's scale: its code, the number that it means, and the factor of elements. The factor of a block whose codes
// must be NaN is not read.
struct block_scale {
    unsigned code;
    float value, factor;
    bool is_nan;
};

DEVICE float scale_value(bool e8m0, unsigned code) {
    if (!e8m0) return code_value(e4m3(), code & 0x7f);
    return __uint_as_float(code == 0xff ? NOT_A_NUMBER : code ? code << 23 : 0x00400000u);
}

// `most`: bits of the block's largest magnitude; a NaN's are above infinity's. `rule`: of dw_graph_quantize_params.
DEVICE block_scale e8m0_scale(const dw_code_format &f, int rule, unsigned most) {
    const unsigned fraction = 0x7fffffu, largest = largest_bits(f);
    const unsigned carry = rule == 0 ? fraction - (largest & fraction) : rule == 1 ? 0 : fraction;
    const int exponent = (int)(largest >> 23) - 127;
    int code = (int)((most + carry) >> 23) - exponent;
    code = most > INFINITE ? 0xff : most == INFINITE ? (rule == 0 ? 254 : 255 - exponent) : max(code, 0);
    const unsigned factor = code < 254 ? (unsigned)(254 - code) << 23 : 0x00400000u;
    return {(unsigned)code, scale_value(true, code), __uint_as_float(factor), most > INFINITE};
}

DEVICE block_scale e4m3_scale(unsigned most, float tensor_scale) {
    const dw_code_format f = e4m3();
    const float wanted = __uint_as_float(most) / 6.f / tensor_scale, greatest = 3.402823466e38f;
    unsigned code = nearest_code(f, min(__float_as_uint(wanted) & 0x7fffffffu, largest_bits(f)));
    float factor = 1.f / tensor_scale / code_value(f, code);
    factor = code == 0 ? 0.f : factor < greatest ? factor : greatest;
    if (most >= INFINITE) code = 0x7f;
    return {code, scale_value(false, code), factor, most >= INFINITE};
}

// The largest of all threads' numbers, in every thread of the block.
DEVICE unsigned most_of_block(unsigned x) {
    __shared__ unsigned warps[DW_GRAPH_QUANTIZE_THREADS / 32];
    x = __reduce_max_sync(0xffffffffu, x);
    __syncthreads(); // the numbers of the call before have been read
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    for (int i = 0; i < DW_GRAPH_QUANTIZE_THREADS / 32; i++) x = max(x, warps[i]);
    return x;
}

// dw_nvfp4_tensor_scale, and dw__quantize_whole_scale (kernel/quantization.h)
DEVICE float tensor_scale_of(const dw_graph_quantize_params &p) {
    const float amax = p.amax ? __uint_as_float(most_of_block(p.amax[threadIdx.x])) : 0.f;
    const float largest = p.whole ? __uint_as_float(largest_bits(p.format)) : 448.f * 6.f;
    return amax > 0.f ? fmaxf(amax / largest, 1.175494351e-38f) : 1.f;
}

// ---- kernels -----------------------------------------------------------------------------------------------------

// Each thread rotates a run of DW_ROTATED_RUN elements along the axis; a shorter last run is copied.
extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    quantize_rotate(const __grid_constant__ dw_graph_quantize_params p) {
    constexpr int RUN = DW_ROTATED_RUN;
    const unsigned signs = random_word(0, 0, 0, 0);
    const long long runs = (inners(p) + RUN - 1) / RUN;
    EACH_ELEMENT(e, outers(p) * runs) {
        // neighbouring threads read neighbouring columns
        const long long outer = p.axis ? e / runs : e % outers(p), first = (p.axis ? e % runs : e / outers(p)) * RUN;
        const long long count = min((long long)RUN, inners(p) - first);
        float x[RUN];
#pragma unroll
        for (int i = 0; i < RUN; i++)
            x[i] = i >= count ? 0.f : p.axis ? load_plain(p, outer, first + i) : load_plain(p, first + i, outer);
        if (count == RUN) {
#pragma unroll
            for (int i = 0; i < RUN; i++) x[i] = signs >> i & 1 ? -x[i] : x[i];
#pragma unroll
            for (int stride = 1; stride < RUN; stride *= 2)
#pragma unroll
                for (int i = 0; i < RUN; i++)
                    if (!(i & stride)) {
                        const float a = x[i], b = x[i + stride];
                        x[i] = a + b, x[i + stride] = a - b;
                    }
#pragma unroll
            for (int i = 0; i < RUN; i++) x[i] *= 0.25f;
        }
#pragma unroll
        for (int i = 0; i < RUN; i++)
            if (i < count) p.rotated[p.axis ? outer * p.columns + first + i : (first + i) * p.columns + outer] = x[i];
    }
}

extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    quantize_amax(const __grid_constant__ dw_graph_quantize_params p) {
    const long long count = p.rows * p.columns, share = (count + DW_MAGNITUDES - 1) / DW_MAGNITUDES;
    for (int part = blockIdx.x; part < DW_MAGNITUDES; part += gridDim.x) {
        unsigned most = 0;
        for (long long e = part * share + threadIdx.x; e < min(count, (part + 1) * share); e += blockDim.x) {
            const unsigned magnitude = __float_as_uint(load(p, e / p.columns, e % p.columns)) & 0x7fffffffu;
            if (magnitude < INFINITE) most = max(most, magnitude);
        }
        most = most_of_block(most);
        if (threadIdx.x == 0) p.amax[part] = most;
    }
}

DEVICE void store_value(const dw_graph_quantize_params &p, long long outer, long long inner, float x) {
    const long long row = p.axis ? outer : inner, column = p.axis ? inner : outer;
    if (p.values) bf16_element::store(p.values, row * p.value_row_stride + column * p.value_column_stride, x);
}

extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    quantize_encode(const __grid_constant__ dw_graph_quantize_params p) {
    const int lane = (int)threadIdx.x % p.block, height = p.square ? p.block : 1;
    const long long across = (inners(p) + p.block - 1) / p.block, down = (outers(p) + height - 1) / height;
    const long long per_block = blockDim.x / p.block;
    const float tensor_scale = tensor_scale_of(p);
    if (p.tensor_scale && blockIdx.x == 0 && threadIdx.x == 0) *p.tensor_scale = tensor_scale;
    for (long long first = blockIdx.x * per_block; first < across * down; first += gridDim.x * per_block) {
        const long long own = first + threadIdx.x / p.block, top = own / across * height,
                        inner = own % across * p.block + lane;
        const bool has_column = own < across * down && inner < inners(p);
        unsigned most = 0;
        for (int i = 0; i < height; i++)
            if (has_column && top + i < outers(p)) {
                const float x = p.axis ? load(p, top + i, inner) : load(p, inner, top + i);
                most = max(most, __float_as_uint(x) & 0x7fffffffu);
            }
        for (int distance = p.block / 2; distance > 0; distance /= 2)
            most = max(most, __shfl_xor_sync(0xffffffffu, most, distance));
        const block_scale scale = p.whole  ? block_scale{0u, 1.f, 1.f, false}
                                  : p.e8m0 ? e8m0_scale(p.format, p.rule, most)
                                           : e4m3_scale(most, tensor_scale);
        if (p.scales && lane == 0 && own < across * down) p.scales[own / across * p.scale_columns + own % across] = scale.code;
        for (int i = 0; i < height; i++) {
            const long long outer = top + i;
            const bool is_inside = has_column && outer < outers(p);
            const float x = !is_inside ? 0.f : p.axis ? load(p, outer, inner) : load(p, inner, outer);
            const unsigned scaled = __float_as_uint(p.whole ? x / tensor_scale : x * scale.factor);
            const unsigned magnitude = min(scaled & 0x7fffffffu, largest_bits(p.format));
            unsigned code;
            if (p.stochastic)
                code = stochastic_code(p.format, magnitude,
                                       random_word((unsigned long long)p.seed[0],
                                                   (unsigned long long)p.seed[p.seed_stride], p.stream,
                                                   (unsigned long long)(outer * inners(p) + inner)));
            else
                code = nearest_code(p.format, magnitude);
            if (p.whole && (scaled & 0x7fffffffu) >= INFINITE) // infinite or NaN
                code = (scaled & 0x7fffffffu) == INFINITE && p.format.infinity ? p.format.infinity : p.format.nan;
            if (scaled >> 31) code |= p.format.sign;
            if (scale.is_nan) code = p.format.nan;
            if (is_inside) store_value(p, outer, inner, p.rounds ? code_value(p.format, code) * scale.value : x);
            const unsigned next = __shfl_down_sync(0xffffffffu, is_inside ? code : 0u, 1);
            if (!p.codes || !is_inside) continue;
            if (!p.paired) p.codes[outer * p.code_row_bytes + inner] = (unsigned char)code;
            else if (lane % 2 == 0)
                p.codes[outer * p.code_row_bytes + inner / 2] = (unsigned char)(code | next << 4);
        }
    }
}

extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    dequantize(const __grid_constant__ dw_graph_quantize_params p) {
    EACH_ELEMENT(e, p.rows * p.columns) {
        const long long outer = e / inners(p), inner = e % inners(p);
        unsigned code = p.codes[outer * p.code_row_bytes + (p.paired ? inner / 2 : inner)];
        if (p.paired) code = code >> inner % 2 * 4 & 15;
        const long long scale = (p.square ? outer / p.block : outer) * p.scale_columns + inner / p.block;
        store_value(p, outer, inner, code_value(p.format, code) * scale_value(p.e8m0, p.scales[scale]));
    }
}
