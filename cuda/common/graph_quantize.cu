// quantize, quantize_blocks, dequantize_blocks and quantization_error of the graph: every scheme with scales of one byte,
// either axis, any strides. Results are bit-identical to dw_block_quantize and dw_hadamard (deepwell/number.h), which define the rules.
//
// These kernels are for calls that round_blocks.cu does not compute. A group of 16 or 32 lanes computes a block, one row of
// it at a time.
//
// Defines: TYPE, of the matrix (element_types.h); MEASURES: 1 for quantization_error. quantize_encode then writes no codes
// but the sums of each block of threads, in F64, and quantization_error_sum adds them in the order of the blocks.
//
// Bytes per element: quantize reads it once more for the tensor scale and writes and reads four bytes if it is rotated.

#include "graph_quantize.cuh"

typedef element_of<TYPE> element;

DEVICE float load_plain(const dw_graph_quantize_params &p, long long row, long long column) {
    return (float)element::load(p.x, row * p.row_stride + column * p.column_stride);
}
DEVICE float load(const dw_graph_quantize_params &p, long long row, long long column) {
    return p.rotated ? p.rotated[row * p.columns + column] : load_plain(p, row, column);
}
DEVICE long long outers(const dw_graph_quantize_params &p) { return p.axis ? p.rows : p.columns; }
DEVICE long long inners(const dw_graph_quantize_params &p) { return p.axis ? p.columns : p.rows; }

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

#if MEASURES
// The numbers of quantization_error, of a thread.
struct rounding_sums {
    double x[DW_ROUNDING_SUMS];
};

// `limit`: the magnitude from which rounding alone goes beyond the largest number of the block.
DEVICE void add_rounding(rounding_sums &sums, double x, double value, double limit) {
    if (x - x != 0.0 || value - value != 0.0) return;
    sums.x[0] += x * x;
    sums.x[1] += (x - value) * (x - value);
    sums.x[2] += x != 0.0;
    sums.x[3] += x != 0.0 && value == 0.0;
    sums.x[4] += value != 0.0 && fabs(x) > limit;
}

DEVICE double sum_of_warp(double x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// Stores the sums of a block's threads.
DEVICE void store_sums(const dw_graph_quantize_params &p, const rounding_sums &sums) {
    constexpr int WARPS = DW_GRAPH_QUANTIZE_THREADS / 32;
    __shared__ double warps[DW_ROUNDING_SUMS][WARPS];
#pragma unroll
    for (int i = 0; i < DW_ROUNDING_SUMS; i++) {
        const double sum = sum_of_warp(sums.x[i]);
        if (threadIdx.x % 32 == 0) warps[i][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= DW_ROUNDING_SUMS) return;
    double sum = 0.0;
    for (int i = 0; i < WARPS; i++) sum += warps[threadIdx.x][i];
    p.sums[(long long)blockIdx.x * DW_ROUNDING_SUMS + threadIdx.x] = sum;
}

// One block; a warp for each number.
extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    quantization_error_sum(const __grid_constant__ dw_graph_quantize_params p) {
    const int number = (int)threadIdx.x / 32;
    if (number >= DW_ROUNDING_SUMS) return;
    double sum = 0.0;
    for (int part = (int)threadIdx.x % 32; part < p.parts; part += 32)
        sum += p.sums[(long long)part * DW_ROUNDING_SUMS + number];
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) p.statistics[number] = sum;
}
#endif

extern "C" __global__ void __launch_bounds__(DW_GRAPH_QUANTIZE_THREADS)
    quantize_encode(const __grid_constant__ dw_graph_quantize_params p) {
    // Lanes of a group, which visit a block of 128 in parts.
    const int lanes = min(p.block, 32), lane = (int)threadIdx.x % lanes, height = p.square ? p.block : 1,
              parts = p.block / lanes;
    const long long across = (inners(p) + p.block - 1) / p.block, down = (outers(p) + height - 1) / height;
    const long long per_block = blockDim.x / lanes;
    const float tensor_scale = tensor_scale_of(p), whole_factor = 1.f / tensor_scale;
    if (p.tensor_scale && blockIdx.x == 0 && threadIdx.x == 0) *p.tensor_scale = tensor_scale;
#if MEASURES
    rounding_sums sums = {};
#endif
    for (long long first = blockIdx.x * per_block; first < across * down; first += gridDim.x * per_block) {
        const long long own = first + threadIdx.x / lanes, top = own / across * height,
                        start = own % across * p.block + lane;
        const bool has_block = own < across * down;
        unsigned most = 0;
        for (int i = 0; i < height * parts; i++) {
            const long long outer = top + i / parts, inner = start + i % parts * lanes;
            if (!has_block || inner >= inners(p) || outer >= outers(p)) continue;
            const float x = p.axis ? load(p, outer, inner) : load(p, inner, outer);
            most = max(most, __float_as_uint(x) & 0x7fffffffu);
        }
        for (int distance = lanes / 2; distance > 0; distance /= 2)
            most = max(most, __shfl_xor_sync(0xffffffffu, most, distance));
        const block_scale scale = p.whole  ? block_scale{0u, 1.f, 1.f, false}
                                  : p.f32  ? f32_scale(most)
                                  : p.e8m0 ? e8m0_scale(p.format, p.rule, most)
                                           : e4m3_scale(most, tensor_scale);
        if (p.scales && lane == 0 && has_block) p.scales[own / across * p.scale_columns + own % across] = scale.code;
        for (int i = 0; i < height * parts; i++) {
            const long long outer = top + i / parts, inner = start + i % parts * lanes;
            const bool is_inside = has_block && inner < inners(p) && outer < outers(p);
            const float x = !is_inside ? 0.f : p.axis ? load(p, outer, inner) : load(p, inner, outer);
            const unsigned scaled =
                __float_as_uint(p.f32 ? x / scale.factor : x * (p.whole ? whole_factor : scale.factor));
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
#if MEASURES
            if (is_inside)
                add_rounding(sums, (double)x, (double)(code_value(p.format, code) * scale.value) * (double)tensor_scale,
                             p.limit * (double)scale.value * (double)tensor_scale);
            continue;
#endif
            if (is_inside) store_value(p, outer, inner, p.rounds ? code_value(p.format, code) * scale.value : x);
            const unsigned next = __shfl_down_sync(0xffffffffu, is_inside ? code : 0u, 1);
            if (!p.codes || !is_inside) continue;
            if (!p.paired) p.codes[outer * p.code_row_bytes + inner] = (unsigned char)code;
            else if (lane % 2 == 0)
                p.codes[outer * p.code_row_bytes + inner / 2] = (unsigned char)(code | next << 4);
        }
    }
#if MEASURES
    store_sums(p, sums);
#endif
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
