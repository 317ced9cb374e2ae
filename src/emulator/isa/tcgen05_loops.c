#include "emulator/tcgen05_loops.h"
#include "base/isa.h"
#include "base/vector.h"

enum { HALF = DW_LANES / 2 }; /* doubles in a vector */
typedef float vf_half __attribute__((vector_size(DW_VECTOR_BYTES / 2)));
typedef int32_t vi_half __attribute__((vector_size(DW_VECTOR_BYTES / 2)));

static inline vd load(const double *at) {
    vd x;
    memcpy(&x, at, sizeof x);
    return x;
}
static inline vd fused(double a, vd b, vd sum) {
#if DW_VECTOR_AVX512
    return (vd)_mm512_fmadd_pd(_mm512_set1_pd(a), (__m512d)b, (__m512d)sum);
#elif DW_VECTOR_AVX2
    return (vd)_mm256_fmadd_pd(_mm256_set1_pd(a), (__m256d)b, (__m256d)sum);
#else
    return a * b + sum;
#endif
}

/* GCC splits conversions of wide vectors, so they are written as intrinsics. */
static inline vd doubles(vf_half x) {
#if DW_VECTOR_AVX512
    return (vd)_mm512_cvtps_pd((__m256)x);
#elif DW_VECTOR_AVX2
    return (vd)_mm256_cvtps_pd((__m128)x);
#else
    return __builtin_convertvector(x, vd);
#endif
}
static inline vf_half singles(vd x) {
#if DW_VECTOR_AVX512
    return (vf_half)_mm512_cvtpd_ps((__m512d)x);
#elif DW_VECTOR_AVX2
    return (vf_half)_mm256_cvtpd_ps((__m256d)x);
#else
    return __builtin_convertvector(x, vf_half);
#endif
}

static inline vd widened(const uint32_t *cells, double scale) {
    vf_half x;
    if (scale == 0) return (vd){0}; /* the old value is ignored, even if it is infinite */
    memcpy(&x, cells, sizeof x);
    return scale * doubles(x);
}
static inline void narrowed(uint32_t *cells, vd sum) {
    const vf_half x = singles(sum);
    const vi_half none = ((vi_half)x & INT32_MAX) > 0x7F800000,
                  bits = ((vi_half)x & ~none) | (none & INT32_MAX);
    memcpy(cells, &bits, sizeof bits);
}

/* A tile of accumulators in registers: `rows` times `across` vectors. */
#define INLINE static inline __attribute__((always_inline))
enum { MOST_ROWS = 4, MOST_ACROSS = DW_LANES == 16 ? 4 : 2 };

INLINE void add_products(size_t rows, size_t across, const double *a, size_t depth, const double *b,
                         size_t wide, vd sums[MOST_ROWS][MOST_ACROSS]) {
    for (size_t k = 0; k < depth; k++)
        for (size_t v = 0; v < across; v++) {
            const vd column = load(b + k * wide + v * HALF);
            for (size_t r = 0; r < rows; r++)
                sums[r][v] = fused(a[r * depth + k], column, sums[r][v]);
        }
}

INLINE void tile_f32(size_t rows, size_t across, const double *a, size_t depth, const double *b,
                     size_t wide, double scale, uint32_t *const *cells, size_t column) {
    vd sums[MOST_ROWS][MOST_ACROSS];
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < across; v++)
            sums[r][v] = widened(cells[r] + column + v * HALF, scale);
    add_products(rows, across, a, depth, b + column, wide, sums);
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < across; v++) narrowed(cells[r] + column + v * HALF, sums[r][v]);
}
INLINE void rows_f32(size_t rows, const double *a, size_t depth, const double *b, size_t columns,
                     size_t wide, double scale, uint32_t *const *cells) {
    size_t column = 0;
    for (; column + MOST_ACROSS * HALF <= columns; column += MOST_ACROSS * HALF)
        tile_f32(rows, MOST_ACROSS, a, depth, b, wide, scale, cells, column);
    for (; column < columns; column += HALF)
        tile_f32(rows, 1, a, depth, b, wide, scale, cells, column);
}
static void add_f32(const double *a, size_t rows, size_t depth, const double *b, size_t columns,
                    size_t wide, double scale, uint32_t *const *cells) {
    size_t row = 0;
    for (; row + MOST_ROWS <= rows; row += MOST_ROWS)
        rows_f32(MOST_ROWS, a + row * depth, depth, b, columns, wide, scale, cells + row);
    for (; row < rows; row++)
        rows_f32(1, a + row * depth, depth, b, columns, wide, scale, cells + row);
}

static void add(const double *a, size_t rows, size_t depth, const double *b, size_t columns,
                size_t wide, double *sums) {
    for (size_t row = 0; row < rows; row++)
        for (size_t column = 0; column < columns; column += HALF) {
            double *at = sums + row * wide + column;
            vd sum[MOST_ROWS][MOST_ACROSS] = {{load(at)}};
            add_products(1, 1, a + row * depth, depth, b + column, wide, sum);
            memcpy(at, &sum[0][0], sizeof sum[0][0]);
        }
}

const dw__tensor_loops DW_ISA_NAME(dw__tensor_loops) = {.add = add, .add_f32 = add_f32};
