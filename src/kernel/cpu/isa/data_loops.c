/* Loops of data movement and reductions (see kernel/cpu/data.h). */
#include "kernel/cpu/cpu.h"
#include "kernel/cpu/data.h"
#include "kernel/cpu/isa/vector_math.h"

/* ---- moving ---------------------------------------------------------------------------------- */

enum { TILE = 16 };

/* One function per element size, so that the compiler knows it. Transposes use tiles of 16 by 16, so that
 * both sides use whole cache lines while they are in L1. */
#define MOVES(size, type)                                                                          \
    static void copy_##size(int64_t n, void *to, const void *from, int64_t stride) {               \
        type *y = to;                                                                              \
        const type *x = from;                                                                      \
        if (stride == 0) {                                                                         \
            for (int64_t i = 0; i < n; i++) y[i] = x[0];                                           \
        } else {                                                                                   \
            for (int64_t i = 0; i < n; i++) y[i] = x[i * stride];                                  \
        }                                                                                          \
    }                                                                                              \
    static void scatter_##size(int64_t n, void *to, int64_t stride, const void *from) {            \
        type *y = to;                                                                              \
        const type *x = from;                                                                      \
        for (int64_t i = 0; i < n; i++) y[i * stride] = x[i];                                      \
    }                                                                                              \
    static void transpose_tile_##size(int64_t rows, int64_t columns, type *to, int64_t to_stride,  \
                                      const type *from, int64_t from_stride) {                     \
        type tile[TILE][TILE];                                                                     \
        for (int64_t j = 0; j < columns; j++)                                                      \
            for (int64_t i = 0; i < rows; i++) tile[i][j] = from[j * from_stride + i];             \
        for (int64_t i = 0; i < rows; i++)                                                         \
            memcpy(to + i * to_stride, tile[i], (size_t)columns * sizeof(type));                   \
    }                                                                                              \
    static void transpose_##size(int64_t rows, int64_t columns, void *to, int64_t to_stride,       \
                                 const void *from, int64_t from_stride) {                          \
        for (int64_t i = 0; i < rows; i += TILE) {                                                 \
            for (int64_t j = 0; j < columns; j += TILE) {                                          \
                int64_t down = rows - i < TILE ? rows - i : TILE;                                  \
                int64_t across = columns - j < TILE ? columns - j : TILE;                          \
                type *y = (type *)to + i * to_stride + j;                                          \
                const type *x = (const type *)from + j * from_stride + i;                          \
                if (down == TILE && across == TILE)                                                \
                    TRANSPOSE_WHOLE_##size(y, to_stride, x, from_stride);                          \
                else                                                                               \
                    transpose_tile_##size(down, across, y, to_stride, x, from_stride);             \
            }                                                                                      \
        }                                                                                          \
    }
#define TRANSPOSE_WHOLE_1(y, sy, x, sx) transpose_tile_1(TILE, TILE, y, sy, x, sx)
#define TRANSPOSE_WHOLE_2(y, sy, x, sx) transpose_tile_2(TILE, TILE, y, sy, x, sx)
#define TRANSPOSE_WHOLE_8(y, sy, x, sx) transpose_tile_8(TILE, TILE, y, sy, x, sx)

#if DW_VECTOR_AVX512
/* Transposes 16 rows of 16: exchanges 1, 2, 4 and 8 elements between rows of the same distance. */
static inline void transpose_whole_4(uint32_t *to, int64_t to_stride, const uint32_t *from,
                                     int64_t from_stride) {
    __m512i a[TILE], b[TILE];
    for (int i = 0; i < TILE; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < TILE; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < TILE; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    /* a[4g + c], 128-bit lane l, holds column 4l + c of rows 4g .. 4g+3. */
    for (int c = 0; c < 4; c++) {
        b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        b[4 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        b[8 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    }
    for (int c = 0; c < 4; c++) {
        _mm512_storeu_si512(to + c * to_stride, _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88));
        _mm512_storeu_si512(to + (4 + c) * to_stride,
                            _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88));
        _mm512_storeu_si512(to + (8 + c) * to_stride, _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd));
        _mm512_storeu_si512(to + (12 + c) * to_stride,
                            _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd));
    }
}
#define TRANSPOSE_WHOLE_4(y, sy, x, sx) transpose_whole_4(y, sy, x, sx)
#else
#define TRANSPOSE_WHOLE_4(y, sy, x, sx) transpose_tile_4(TILE, TILE, y, sy, x, sx)
#endif

MOVES(1, uint8_t)
MOVES(2, uint16_t)
MOVES(4, uint32_t)
MOVES(8, uint64_t)

#define BY_SIZE(name, ...)                                                                         \
    switch (size) {                                                                                \
    case 1: name##_1(__VA_ARGS__); break;                                                          \
    case 2: name##_2(__VA_ARGS__); break;                                                          \
    case 4: name##_4(__VA_ARGS__); break;                                                          \
    default: name##_8(__VA_ARGS__); break;                                                         \
    }

static void copy(int size, int64_t n, void *to, const void *from, int64_t stride) {
    if (stride == 1)
        memcpy(to, from, (size_t)(n * size));
    else
        BY_SIZE(copy, n, to, from, stride)
}

static void transpose(int size, int64_t rows, int64_t columns, void *to, int64_t to_stride,
                      const void *from, int64_t from_stride) {
    BY_SIZE(transpose, rows, columns, to, to_stride, from, from_stride)
}

static void scatter(int size, int64_t n, void *to, int64_t stride, const void *from) {
    BY_SIZE(scatter, n, to, stride, from)
}

/* ---- adding and folding ---------------------------------------------------------------------- */

static void add(int64_t n, float *to, const float *from) {
    int64_t i = 0;
    for (; i + DW_LANES <= n; i += DW_LANES) v_store(to + i, v_load(to + i) + v_load(from + i));
    for (; i < n; i++) to[i] += from[i];
}

static void scaled(bool adds, int64_t n, float *to, const float *from, float scale) {
    const vf factor = v_set(scale);
    int64_t i = 0;
    if (adds) {
        for (; i + DW_LANES <= n; i += DW_LANES)
            v_store(to + i, v_load(to + i) + factor * v_load(from + i));
        for (; i < n; i++) to[i] += scale * from[i];
    } else {
        for (; i + DW_LANES <= n; i += DW_LANES) v_store(to + i, factor * v_load(from + i));
        for (; i < n; i++) to[i] = scale * from[i];
    }
}

static double dot(int64_t n, const float *x, const float *y) {
    vf a = v_set(0.0f), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * DW_LANES <= n; i += 4 * DW_LANES) {
        a += v_load(x + i) * v_load(y + i);
        b += v_load(x + i + DW_LANES) * v_load(y + i + DW_LANES);
        c += v_load(x + i + 2 * DW_LANES) * v_load(y + i + 2 * DW_LANES);
        d += v_load(x + i + 3 * DW_LANES) * v_load(y + i + 3 * DW_LANES);
    }
    for (; i + DW_LANES <= n; i += DW_LANES) a += v_load(x + i) * v_load(y + i);
    if (i < n) b += v_load_part(x + i, n - i) * v_load_part(y + i, n - i);
    return v_sum((a + b) + (c + d));
}

static inline vf combine(dw__fold fold, vf a, vf b) {
    switch (fold) {
    case DW_FOLD_SUM: return a + b;
    case DW_FOLD_MAX: return v_max_nan(a, b);
    default: return v_min_nan(a, b);
    }
}

static inline double combine_lanes(dw__fold fold, vf x, double start) {
    if (fold == DW_FOLD_SUM) return start + v_sum(x);
    for (int i = 0; i < DW_LANES; i++) {
        double lane = (double)x[i];
        bool better = fold == DW_FOLD_MAX ? lane > start : lane < start;
        if (better || lane != lane) start = lane;
    }
    return start;
}

static inline double fold_any_row(dw__fold fold, int64_t n, const float *x, double start) {
    float empty = fold == DW_FOLD_SUM ? 0.0f : fold == DW_FOLD_MAX ? -INFINITY : INFINITY;
    vf a = v_set(empty), b = a, c = a, d = a;
    int64_t i = 0;
    for (; i + 4 * DW_LANES <= n; i += 4 * DW_LANES) {
        a = combine(fold, a, v_load(x + i));
        b = combine(fold, b, v_load(x + i + DW_LANES));
        c = combine(fold, c, v_load(x + i + 2 * DW_LANES));
        d = combine(fold, d, v_load(x + i + 3 * DW_LANES));
    }
    for (; i + DW_LANES <= n; i += DW_LANES) a = combine(fold, a, v_load(x + i));
    if (i < n) b = combine(fold, b, v_load_part_or(x + i, n - i, empty));
    return combine_lanes(fold, combine(fold, combine(fold, a, b), combine(fold, c, d)), start);
}

static double fold_row(dw__fold fold, int64_t n, const float *x, double start) {
    switch (fold) {
    case DW_FOLD_SUM: return fold_any_row(DW_FOLD_SUM, n, x, start);
    case DW_FOLD_MAX: return fold_any_row(DW_FOLD_MAX, n, x, start);
    default: return fold_any_row(DW_FOLD_MIN, n, x, start);
    }
}

static inline void fold_any_rows(dw__fold fold, int64_t n, float *to, const float *from) {
    int64_t i = 0;
    for (; i + DW_LANES <= n; i += DW_LANES)
        v_store(to + i, combine(fold, v_load(to + i), v_load(from + i)));
    if (i < n)
        v_store_part(
            to + i, combine(fold, v_load_part(to + i, n - i), v_load_part(from + i, n - i)), n - i);
}

static void fold_rows(dw__fold fold, int64_t n, float *to, const float *from) {
    switch (fold) {
    case DW_FOLD_SUM: fold_any_rows(DW_FOLD_SUM, n, to, from); break;
    case DW_FOLD_MAX: fold_any_rows(DW_FOLD_MAX, n, to, from); break;
    default: fold_any_rows(DW_FOLD_MIN, n, to, from); break;
    }
}

/* ---- rotary embedding ------------------------------------------------------------------------ */

/* Rotates pairs (x1, x2) to (x1 c1 - x2 s1, x2 c2 + x1 s2), or transposed to (x1 c1 + x2 s2, x2 c2 - x1 s1).
 * step 1: the elements of a pair are `half` apart; step 2: they are neighbours. */
static inline void rope_pairs(bool transposed, int64_t count, int64_t step, int64_t apart,
                              const float *x, const float *cosine, const float *sine, float *y) {
    for (int64_t i = 0; i < count; i++) {
        int64_t p = i * step, q = p + apart;
        float x1 = x[p], x2 = x[q];
        float s1 = transposed ? -sine[q] : sine[p], s2 = transposed ? -sine[p] : sine[q];
        y[p] = x1 * cosine[p] - x2 * s1;
        y[q] = x2 * cosine[q] + x1 * s2;
    }
}

static void rope(bool interleaved, bool transposed, int64_t n, int64_t turned, const float *x,
                 const float *cosine, const float *sine, float *y) {
    int64_t half = turned / 2, i = 0;
    if (interleaved) {
        rope_pairs(transposed, half, 2, 1, x, cosine, sine, y);
    } else {
        vf sign = v_set(transposed ? -1.0f : 1.0f);
        for (; i + DW_LANES <= half; i += DW_LANES) {
            vf x1 = v_load(x + i), x2 = v_load(x + half + i);
            vf s1 = v_load(sine + i), s2 = v_load(sine + half + i);
            vf t1 = sign * (transposed ? s2 : s1), t2 = sign * (transposed ? s1 : s2);
            v_store(y + i, x1 * v_load(cosine + i) - x2 * t1);
            v_store(y + half + i, x2 * v_load(cosine + half + i) + x1 * t2);
        }
        rope_pairs(transposed, half - i, 1, half, x + i, cosine + i, sine + i, y + i);
    }
    if (turned < n) memcpy(y + turned, x + turned, (size_t)(n - turned) * sizeof *y);
}

const dw__data_loops DW_ISA_NAME(dw__data_loops) = {
    .copy = copy,
    .transpose = transpose,
    .scatter = scatter,
    .add = add,
    .scaled = scaled,
    .dot = dot,
    .fold_row = fold_row,
    .fold_rows = fold_rows,
    .rope = rope,
};
