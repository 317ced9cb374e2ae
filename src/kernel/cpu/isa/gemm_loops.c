/* Inner loops of GEMMs: a register tile of ROWS x (VECTORS * DW_LANES) accumulators, to which each step of k adds
 * a column of A times a row of B. The tile's size makes accumulators, one row of B and one broadcast element of A
 * fill the register file, and keeps loads (ROWS + VECTORS per step) below the two per cycle that feed the two
 * multiply-adds per cycle. */
#include "kernel/cpu/gemm_loops.h"
#include "base/transpose.h"
#include "kernel/cpu/isa/vector_math.h"

#if defined(__AVX512F__)
enum { ROWS = 8, VECTORS = 3, DEPTH = 384 }; /* 24 accumulators of 32 registers */
#else
enum { ROWS = 6, VECTORS = 2, DEPTH = 256 }; /* 12 accumulators of 16 registers */
#endif
/* Large tasks and prefetches: measured with AVX2, where large GEMMs use these loops (matmul_packed.c). */
#if DW_VECTOR_AVX2 && !DW_VECTOR_AVX512
enum { TASK_ROWS = 192, TASK_COLUMNS = 3072, PREFETCHES = 1 };
#else
enum { TASK_ROWS = 96, TASK_COLUMNS = 768, PREFETCHES = 0 };
#endif
enum { COLUMNS = VECTORS * DW_LANES, CACHE_LINE = 64 };

/* ---- packing ------------------------------------------------------------------------------- */

/* Packs one panel: panel[kk*width + i] = from[i*stride + kk*k_stride] for i < count, 0 for the rest. */
DW_INLINE void pack_panel(int64_t width, int64_t count, int64_t k, const float *from,
                          int64_t stride, int64_t k_stride, float *panel) {
    int64_t by_quads = 0; /* elements of the panel's width that transposition has packed */
    int64_t k_quads = k / DW_QUAD * DW_QUAD;
    if (k_stride == 1) {
        by_quads = count / DW_QUAD * DW_QUAD;
        for (int64_t kk = 0; kk < k_quads; kk += DW_QUAD) {
            for (int64_t i = 0; i < by_quads; i += DW_QUAD) {
                dw__transpose_quad(from + i * stride + kk, stride, panel + kk * width + i, width);
            }
        }
    }
    for (int64_t kk = 0; kk < k; kk++) {
        for (int64_t i = kk < k_quads ? by_quads : 0; i < count; i++) {
            panel[kk * width + i] = from[i * stride + kk * k_stride];
        }
        for (int64_t i = count; i < width; i++) panel[kk * width + i] = 0.0f;
    }
}

/* k is the outermost loop, so that each row in memory is read once, whole, for all panels. */
DW_INLINE void pack_rows(int64_t width, int64_t panel_count, int64_t k, const float *from,
                         int64_t k_stride, float *panels) {
    for (int64_t kk = 0; kk < k; kk++) {
        for (int64_t p = 0; p < panel_count; p++) {
            memcpy(panels + (p * k + kk) * width, from + kk * k_stride + p * width,
                   (size_t)width * sizeof(float));
        }
    }
}

DW_INLINE void pack(int64_t width, int64_t extent, int64_t k, const float *from, int64_t stride,
                    int64_t k_stride, float *panels) {
    int64_t done = 0;
    if (stride == 1) {
        done = extent / width * width;
        pack_rows(width, extent / width, k, from, k_stride, panels);
    }
    for (int64_t i = done; i < extent; i += width) {
        int64_t count = extent - i < width ? extent - i : width;
        pack_panel(width, count, k, from + i * stride, stride, k_stride, panels + i * k);
    }
}

static void pack_a(int64_t m, int64_t k, const float *a, int64_t row_stride, int64_t k_stride,
                   float *panels) {
    pack(ROWS, m, k, a, row_stride, k_stride, panels);
}

static void pack_b(int64_t n, int64_t k, const float *b, int64_t column_stride, int64_t k_stride,
                   float *panels) {
    pack(COLUMNS, n, k, b, column_stride, k_stride, panels);
}

/* ---- the register tile ----------------------------------------------------------------------- */

/* sum[i][v] = sum over kk of a[i*row_stride + kk*k_stride] * b[kk*b_stride + v*DW_LANES ..] */
DW_INLINE void accumulate_tile(int rows, int vectors, int64_t k, const float *a, int64_t row_stride,
                               int64_t k_stride, const float *b, int64_t b_stride,
                               vf sum[ROWS][VECTORS]) {
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[i][v] = (vf){0};
    }
    for (int64_t kk = 0; kk < k; kk++) {
        vf row[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = v_load(b + kk * b_stride + v * DW_LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            vf element = v_set(a[i * row_stride + kk * k_stride]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[i][v] += element * row[v];
        }
    }
}

/* ---- packed GEMM --------------------------------------------------------------------------- */

DW_INLINE void store_row(int vectors, float *c, const vf *sum, bool accumulate, const float *bias) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        vf value = sum[v];
        if (accumulate) value += v_load(c + v * DW_LANES);
        if (bias) value += v_load(bias + v * DW_LANES);
        v_store(c + v * DW_LANES, value);
    }
}

static void store_row_part(float *c, const vf *sum, int64_t count, bool accumulate,
                           const float *bias) {
    float whole[COLUMNS];
    for (int v = 0; v * DW_LANES < count; v++) v_store(whole + v * DW_LANES, sum[v]);
    for (int64_t j = 0; j < count; j++) {
        float value = whole[j];
        if (accumulate) value += c[j];
        if (bias) value += bias[j];
        c[j] = value;
    }
}

/* Hardware prefetchers do not predict rows of C, which are far apart. They are prefetched while the sums are
 * computed. */
DW_INLINE void prefetch_rows(int64_t rows, int64_t columns, const float *c, int64_t c_stride) {
    for (int64_t r = 0; PREFETCHES && r < rows; r++) {
        __builtin_prefetch(c + r * c_stride, 1);
        __builtin_prefetch(c + r * c_stride + columns - 1, 1);
    }
}

/* Multiplies columns [0, columns) of all rows of A by one panel of B. `vectors` vectors hold the columns. */
DW_INLINE void multiply_panel(int vectors, int64_t m, int64_t columns, int64_t k,
                              const float *a_panels, const float *b, float *c, int64_t c_stride,
                              bool accumulate, const float *bias) {
    /* Meanwhile the next panel of B is prefetched into L2, a part with each tile. The last panel has no next
     * one, but a prefetch does not fault. */
    uintptr_t next = (uintptr_t)(b + COLUMNS * k);
    uintptr_t share = (uintptr_t)(COLUMNS * k) * sizeof(float) / (uintptr_t)((m + ROWS - 1) / ROWS);
    for (int64_t i = 0; i < m; i += ROWS) {
        int64_t rows = m - i < ROWS ? m - i : ROWS;
        float *corner = c + i * c_stride;
        vf sum[ROWS][VECTORS];
        prefetch_rows(rows, columns, corner, c_stride);
        for (uintptr_t at = 0; PREFETCHES && at < share; at += CACHE_LINE) {
            __builtin_prefetch((const void *)(next + at), 0, 2);
        }
        next += share;
        accumulate_tile(ROWS, vectors, k, a_panels + i * k, 1, ROWS, b, COLUMNS, sum);
        if (rows == ROWS && columns == vectors * DW_LANES) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                store_row(vectors, corner + r * c_stride, sum[r], accumulate, bias);
            }
            continue;
        }
        vf spilled[ROWS][VECTORS]; /* a copy in memory, so that `sum` can stay in registers */
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) spilled[r][v] = sum[r][v];
        }
        for (int64_t r = 0; r < rows; r++) {
            store_row_part(corner + r * c_stride, spilled[r], columns, accumulate, bias);
        }
    }
}

static void multiply(int64_t m, int64_t n, int64_t k, const float *a_panels, const float *b_panels,
                     float *c, int64_t row_stride, bool accumulate, const float *bias) {
    if (accumulate) bias = NULL;
    for (int64_t j = 0; j < n; j += COLUMNS) {
        int64_t columns = n - j < COLUMNS ? n - j : COLUMNS;
        const float *b = b_panels + j * k;
        const float *add = bias ? bias + j : NULL;
        if (columns <= DW_LANES) {
            multiply_panel(1, m, columns, k, a_panels, b, c + j, row_stride, accumulate, add);
        } else if (VECTORS > 2 && columns <= 2 * DW_LANES) {
            multiply_panel(2, m, columns, k, a_panels, b, c + j, row_stride, accumulate, add);
        } else {
            multiply_panel(VECTORS, m, columns, k, a_panels, b, c + j, row_stride, accumulate, add);
        }
    }
}

/* ---- small GEMM: operands in place ----------------------------------------------------------- */

enum { SMALL_DEPTH = 128 }; /* of the buffer for a copy of a transposed or ragged B */

typedef struct small_gemm {
    int64_t k;
    const float *a;
    int64_t a_row, a_k;
    float alpha, beta;
    float *c;
    int64_t c_row;
} small_gemm;

DW_INLINE void small_tile(int rows, int vectors, const small_gemm *p, int64_t i, const float *b,
                          int64_t b_stride, int64_t j, int64_t columns) {
    vf sum[ROWS][VECTORS];
    accumulate_tile(rows, vectors, p->k, p->a + i * p->a_row, p->a_row, p->a_k, b, b_stride, sum);
    bool whole = columns == vectors * DW_LANES;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *c = p->c + (i + r) * p->c_row + j;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            vf value = sum[r][v] * p->alpha;
            int64_t left = columns - v * DW_LANES;
            if (whole || left >= DW_LANES) {
                if (p->beta != 0.0f) value += v_load(c + v * DW_LANES) * p->beta;
                v_store(c + v * DW_LANES, value);
            } else {
                if (p->beta != 0.0f) value += v_load_part(c + v * DW_LANES, left) * p->beta;
                v_store_part(c + v * DW_LANES, value, left);
            }
        }
    }
}

DW_INLINE void small_panel(int vectors, int64_t m, const small_gemm *p, const float *b,
                           int64_t b_stride, int64_t j, int64_t columns) {
    int64_t i = 0;
    for (; i + ROWS <= m; i += ROWS) small_tile(ROWS, vectors, p, i, b, b_stride, j, columns);
    for (; i + 4 <= m; i += 4) small_tile(4, vectors, p, i, b, b_stride, j, columns);
    for (; i < m; i++) small_tile(1, vectors, p, i, b, b_stride, j, columns);
}

static void small_columns(int64_t m, const small_gemm *p, const float *b, int64_t b_stride,
                          int64_t j, int64_t columns) {
    if (columns <= DW_LANES) {
        small_panel(1, m, p, b, b_stride, j, columns);
    } else if (VECTORS > 2 && columns <= 2 * DW_LANES) {
        small_panel(2, m, p, b, b_stride, j, columns);
    } else {
        small_panel(VECTORS, m, p, b, b_stride, j, columns);
    }
}

/* Width of the next panel. 64 columns, the usual head size, are two panels of two vectors: a panel of one
 * vector has too few accumulators to hide the latency of a multiply-add. */
static int64_t small_width(int64_t left) {
    if (VECTORS > 2 && left > COLUMNS && left <= 4 * DW_LANES) return 2 * DW_LANES;
    return left < COLUMNS ? left : COLUMNS;
}

static void scale_rows(int64_t m, int64_t n, float beta, float *c, int64_t ldc) {
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++)
            c[i * ldc + j] = beta == 0.0f ? 0.0f : beta * c[i * ldc + j];
    }
}

static void small(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k,
                  float alpha, const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                  float *c, int64_t ldc) {
    float panel[SMALL_DEPTH * COLUMNS];
    int64_t a_row = a_transposed ? 1 : lda, a_k = a_transposed ? lda : 1;
    int64_t b_column = b_transposed ? ldb : 1, b_k = b_transposed ? 1 : ldb;
    if (k == 0) scale_rows(m, n, beta, c, ldc);
    for (int64_t j = 0, columns; j < n; j += columns) {
        columns = small_width(n - j);
        bool in_place = !b_transposed && columns % DW_LANES == 0;
        for (int64_t start = 0; start < k;) {
            int64_t depth = in_place || k - start < SMALL_DEPTH ? k - start : SMALL_DEPTH;
            const float *block = b + start * b_k + j * b_column;
            if (!in_place) pack_panel(COLUMNS, columns, depth, block, b_column, b_k, panel);
            small_gemm p = {depth, a + start * a_k, a_row, a_k, alpha, start ? 1.0f : beta, c, ldc};
            small_columns(m, &p, in_place ? block : panel, in_place ? ldb : COLUMNS, j, columns);
            start += depth;
        }
    }
}

const dw__gemm_loops DW_ISA_NAME(dw__gemm_loops) = {.small = small};

const dw__gemm_blocks DW_ISA_NAME(dw__gemm_blocks) = {
    .rows = ROWS,
    .columns = COLUMNS,
    .depth = DEPTH,
    .task_rows = TASK_ROWS,
    .task_columns = TASK_COLUMNS,
    .pack_a = pack_a,
    .pack_b = pack_b,
    .multiply = multiply,
};
