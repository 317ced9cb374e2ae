// Rows copied to places, with weights, and their sums: spread_rows, combine_rows and its backward.
//
// All three are bound by memory, and visit the rows of the tokens in order, so that each of those is read or written
// once; the rows at the places are read or written once by definition. spread_rows and combine_rows have a thread for
// each vector of a token's row. The backward has a warp for each place: it reads dy and x once for both results,
// writes dx and adds up dw. Sums are F32 (F64 for F64) in an order that depends on sizes alone, and rounded once.
//
// A place outside of the rows is reported (data_error.h); a row is then neither read nor written.
//
// Defines: TYPE (element_types.h) of x and of rows like it, WEIGHT of the weights (0: none), OTHER of combine_rows'
// result and of dy; VECTOR: elements of a thread, 16 bytes of x or 1.
//
// Bytes: spread and combine one read of x and one write of the result; backward two reads of rows at places and of dy,
// which caches hold for the places of one token, and one write.

#include "spread_rows_params.h"
#include "strided.cuh"

typedef element_of<TYPE> element;
typedef element_of<OTHER> other_element;
typedef element_of<(WEIGHT ? WEIGHT : TYPE)> weight_element;
typedef element::value value;

#define BATCH 4 // rows that a thread of combine_rows loads before it adds them

template <class E> struct alignas(VECTOR == 1 ? sizeof(typename E::stored) : 16) vector_of {
    typename E::stored x[VECTOR];
};
typedef vector_of<element> piece;
typedef vector_of<other_element> other_piece;

DEVICE bool find_place(const dw_spread_rows_params &p, long long token, long long j, long long *place) {
    *place = p.place[token * p.place_row + j * p.place_column];
    if (*place >= 0 && *place < p.tokens * p.each) return true;
    report(p.error, DW_DATA_INDEX);
    return false;
}

DEVICE value weight_of(const dw_spread_rows_params &p, long long token, long long j) {
    if constexpr (WEIGHT == 0) return (value)1;
    else
        return (value)weight_element::load(p.weight, token * p.weight_row + j * p.weight_column);
}

template <class E> DEVICE vector_of<E> load(const void *rows, long long row, long long row_stride, long long column,
                                            long long column_stride) {
    const long long at = row * row_stride + column * VECTOR * column_stride;
    return *(const vector_of<E> *)((const typename E::stored *)rows + at);
}

template <class E> DEVICE void store(void *rows, long long width, long long row, long long column,
                                     const vector_of<E> &made) {
    ((vector_of<E> *)rows)[row * width + column] = made;
}

extern "C" __global__ void __launch_bounds__(256) spread_rows(const __grid_constant__ dw_spread_rows_params p) {
    EACH_ELEMENT(e, p.tokens * p.width) {
        const long long token = e / p.width, column = e % p.width;
        const piece own = load<element>(p.x, token, p.x_row, column, p.x_column);
        for (long long j = 0; j < p.each; j++) {
            long long place;
            if (!find_place(p, token, j, &place)) continue;
            piece made = own;
            if constexpr (WEIGHT != 0) {
                const value weight = weight_of(p, token, j);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) element::store(made.x, i, weight * element::load(own.x, i));
            }
            store<element>(p.y, p.width, place, column, made);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) combine_rows(const __grid_constant__ dw_spread_rows_params p) {
    EACH_ELEMENT(e, p.tokens * p.width) {
        const long long token = e / p.width, column = e % p.width;
        value sum[VECTOR] = {};
        for (long long first = 0; first < p.each; first += BATCH) {
            piece own[BATCH] = {};
            value weight[BATCH] = {};
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                long long place;
                if (first + b >= p.each || !find_place(p, token, first + b, &place)) continue;
                own[b] = load<element>(p.x, place, p.x_row, column, p.x_column);
                weight[b] = weight_of(p, token, first + b);
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                if (first + b >= p.each) break;
#pragma unroll
                for (int i = 0; i < VECTOR; i++) sum[i] += weight[b] * element::load(own[b].x, i);
            }
        }
        other_piece made;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) other_element::store(made.x, i, (other_element::value)sum[i]);
        store<other_element>(p.y, p.width, token, column, made);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    combine_rows_backward(const __grid_constant__ dw_spread_rows_params p) {
    const int lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    for (long long pair = blockIdx.x * (long long)warps + threadIdx.x / 32; pair < p.tokens * p.each;
         pair += gridDim.x * (long long)warps) {
        const long long token = pair / p.each, j = pair % p.each;
        const value weight = weight_of(p, token, j);
        value sum = (value)0;
        long long place;
        const bool valid = find_place(p, token, j, &place);
        for (long long column = lane; valid && column < p.width; column += 32) {
            const other_piece dy = load<other_element>(p.dy, token, p.dy_row, column, p.dy_column);
            if (p.dweight) {
                const piece x = load<element>(p.x, place, p.x_row, column, p.x_column);
#pragma unroll
                for (int i = 0; i < VECTOR; i++)
                    sum += element::load(x.x, i) * (value)other_element::load(dy.x, i);
            }
            if (p.y) {
                piece dx;
#pragma unroll
                for (int i = 0; i < VECTOR; i++)
                    element::store(dx.x, i, weight * (value)other_element::load(dy.x, i));
                store<element>(p.y, p.width, place, column, dx);
            }
        }
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (p.dweight && lane == 0) weight_element::store(p.dweight, pair, (weight_element::value)sum);
    }
}
