/* Replaces libcublasLt.so. It rejects what the real one would reject and computes GEMMs of F32, F64, F16, BF16, of FP8
 * with scales of tensors or F32 scales of blocks, and small ones of FP8 with other scales of blocks, in double, on the
 * host, where the fake driver has its memory; results of other operands with scales of blocks are zeros. The rules come
 * from the documentation: matrices are column-major, for FP8 the first factor is transposed, the workspace has the
 * stated size, and the algorithm is one that it returned itself. FAKE_CUBLASLT_FAIL is the status of the heuristic, or
 * with "none" it finds no algorithm. With FAKE_CUBLASLT_NO_SUMS it sums no operand. FAKE_CUBLASLT_WRONG spoils the first
 * element of results. With FAKE_CUBLASLT_14_BITS sums of FP8 products keep 14 bits of each addend. With
 * FAKE_CUBLASLT_ROWS_OF_SCALES F32 scales of 128 elements are read row by row. With FAKE_CUBLASLT_ROUNDS the sum is
 * rounded to the result's type before the bias is added, as some kernels of the real one do.
 *
 * FAKE_CUBLASLT_TIMES, such as "3 1 2", gives it that many algorithms for each GEMM, which compute nothing and take so
 * many milliseconds by the fake driver's events; without it there is one. With sums they take FAKE_CUBLASLT_SUM_TIME
 * more. */
#include "fake_cuda.h"
#include "number/half.h"
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum {
    OK = 0,
    INVALID = 7,
    NOT_SUPPORTED = 15,
    F32 = 0,
    F64 = 1,
    F16 = 2,
    BF16 = 14,
    E4M3 = 28,
    E5M2 = 29,
    E2M1 = 33,
    SCALES_OF_16 = 1,
    SCALES_OF_32 = 2,
    SCALES_OF_128 = 4,     /* F32, along the axis that is summed over */
    SCALES_OF_SQUARES = 5, /* F32, of 128 x 128 */
    EPILOGUE_NONE = 1,
    EPILOGUE_BIAS = 4,
    EPILOGUE_SUMS_A = 256,
    EPILOGUE_SUMS_B = 512,
};

typedef struct product {
    int compute, scale, transpose_a, transpose_b, epilogue, bias_type, mode[2], pointers;
    const void *bias;
    const unsigned char *scales[2]; /* of blocks of factors, or of whole factors */
    int8_t fast;
} product;
typedef struct matrix {
    int type;
    uint64_t rows, columns;
    int64_t leading, step; /* step: elements from one matrix of a batch to the next */
    int32_t batch;
} matrix;
typedef struct preference {
    size_t workspace;
    uint32_t reductions, alignment[4];
} preference;
typedef struct algorithm {
    uint64_t data[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} algorithm;

static int live, multiplied[64]; /* objects, and GEMMs by the type of their operands */
static int chosen_count;         /* heuristics that were asked for */
API int fake_cublaslt_live(void);
API int fake_cublaslt_live(void) { return live; }
API int fake_cublaslt_multiplied(int type);
API int fake_cublaslt_multiplied(int type) { return multiplied[type]; }
API int fake_cublaslt_chosen(void);
API int fake_cublaslt_chosen(void) { return chosen_count; }
static int multiplied_fast; /* GEMMs with fast accumulation */
API int fake_cublaslt_fast(void);
API int fake_cublaslt_fast(void) { return multiplied_fast; }
static int last_algorithm;
API int fake_cublaslt_last(void);
API int fake_cublaslt_last(void) { return last_algorithm; }
API size_t cublasLtGetVersion(void);
API size_t cublasLtGetVersion(void) {
    const char *version = getenv("FAKE_CUBLASLT_VERSION");
    return version ? (size_t)atol(version) : 130100;
}

/* The milliseconds of an algorithm; -1: there are fewer. */
static float time_of(uint64_t index) {
    const char *times = getenv("FAKE_CUBLASLT_TIMES");
    char *end = NULL;
    if (!times) return index == 0 ? 1.5f : -1.0f;
    for (uint64_t i = 0;; i++, times = end) {
        const float time = strtof(times, &end);
        if (end == times) return -1.0f;
        if (i == index) return time;
    }
}

static void *made(size_t bytes) {
    live++;
    return calloc(1, bytes);
}
static int gone(void *object) {
    live--;
    free(object);
    return OK;
}

/* An attribute's place and size. */
typedef struct place {
    void *at;
    size_t bytes;
} place;
static int set_at(place to, const void *value, size_t bytes) {
    if (!to.at || bytes != to.bytes) return INVALID;
    memcpy(to.at, value, bytes);
    return OK;
}

API int cublasLtCreate(void **handle) {
    *handle = made(1);
    return OK;
}
API int cublasLtDestroy(void *handle) { return gone(handle); }
API int cublasLtMatmulDescCreate(product **of, int compute, int scale) {
    *of = made(sizeof **of);
    **of =
        (product){.compute = compute, .scale = scale, .epilogue = EPILOGUE_NONE, .bias_type = -1};
    if (compute == 70) return scale == F64 ? OK : INVALID;
    return (compute == 68 || compute == 77) && scale == F32 ? OK : INVALID;
}
API int cublasLtMatmulDescDestroy(product *of) { return gone(of); }
API int cublasLtMatmulDescSetAttribute(product *of, int attribute, const void *value,
                                       size_t bytes) {
    place to = {NULL, 0};
    switch (attribute) {
    case 2: to = (place){&of->pointers, sizeof of->pointers}; break;
    case 3: to = (place){&of->transpose_a, sizeof of->transpose_a}; break;
    case 4: to = (place){&of->transpose_b, sizeof of->transpose_b}; break;
    case 7: to = (place){&of->epilogue, sizeof of->epilogue}; break;
    case 8: to = (place){&of->bias, sizeof of->bias}; break;
    case 25: to = (place){&of->fast, sizeof of->fast}; break;
    case 26: to = (place){&of->bias_type, sizeof of->bias_type}; break;
    case 17:
    case 18: to = (place){&of->scales[attribute - 17], sizeof of->scales[0]}; break;
    case 31:
    case 32: to = (place){&of->mode[attribute - 31], sizeof of->mode[0]}; break;
    }
    return set_at(to, value, bytes);
}
API int cublasLtMatrixLayoutCreate(matrix **of, int type, uint64_t rows, uint64_t columns,
                                   int64_t leading) {
    *of = made(sizeof **of);
    **of = (matrix){.type = type, .rows = rows, .columns = columns, .leading = leading, .batch = 1};
    return leading >= (int64_t)rows ? OK : INVALID;
}
API int cublasLtMatrixLayoutDestroy(matrix *of) { return gone(of); }
API int cublasLtMatrixLayoutSetAttribute(matrix *of, int attribute, const void *value,
                                         size_t bytes) {
    return set_at(attribute == 5   ? (place){&of->batch, sizeof of->batch}
                  : attribute == 6 ? (place){&of->step, sizeof of->step}
                                   : (place){NULL, 0},
                  value, bytes);
}
API int cublasLtMatmulPreferenceCreate(preference **of) {
    *of = made(sizeof **of);
    **of = (preference){.reductions = 7, .alignment = {256, 256, 256, 256}};
    return OK;
}
API int cublasLtMatmulPreferenceDestroy(preference *of) { return gone(of); }
API int cublasLtMatmulPreferenceSetAttribute(preference *of, int attribute, const void *value,
                                             size_t bytes) {
    return set_at(attribute == 1   ? (place){&of->workspace, sizeof of->workspace}
                  : attribute == 3 ? (place){&of->reductions, sizeof of->reductions}
                  : attribute >= 5 && attribute <= 8
                      ? (place){&of->alignment[attribute - 5], sizeof of->alignment[0]}
                      : (place){NULL, 0},
                  value, bytes);
}

/* ---- what it supports ---------------------------------------------------------------------------- */

static int is_fp8(int type) { return type == E4M3 || type == E5M2; }

static int narrow_takes(const product *p, const matrix *a, const matrix *d) {
    int mode = p->mode[0];
    if (p->transpose_a != 1 || p->transpose_b != 0) return NOT_SUPPORTED;
    if (p->mode[1] != mode || (mode != 0) != (p->scales[0] && p->scales[1])) return INVALID;
    if ((a->type == E2M1) != (mode == 1) || (mode == SCALES_OF_32 && !is_fp8(a->type)))
        return NOT_SUPPORTED;
    if (a->rows % 16 != 0 || a->leading % 16 != 0) return NOT_SUPPORTED;
    return p->compute == 68 && (d->type == BF16 || d->type == F16 || d->type == F32)
               ? OK
               : NOT_SUPPORTED;
}

/* FP8 with one scale for each factor. */
static int fp8_takes(const product *p, const matrix *a, const matrix *b, const matrix *d) {
    if (a->type == E5M2 && b->type == E5M2) return NOT_SUPPORTED;
    if (p->transpose_a != 1 || p->transpose_b != 0 || p->mode[1] != 0) return NOT_SUPPORTED;
    if (a->rows % 16 || d->rows % 16 || a->leading % 16 || b->leading % 16) return NOT_SUPPORTED;
    return p->compute == 68 && (d->type == BF16 || d->type == F16 || d->type == F32)
               ? OK
               : NOT_SUPPORTED;
}

static int is_fp8_block(int mode) { return mode == SCALES_OF_128 || mode == SCALES_OF_SQUARES; }

/* FP8 with F32 scales of blocks, as on Hopper: square ones for one factor at most, aligned scales, columns in eights. */
static int fp8_block_takes(const product *p, const matrix *a, const matrix *b, const matrix *d) {
    if (cublasLtGetVersion() < 120900) return INVALID;
    if (!is_fp8_block(p->mode[0]) || !is_fp8_block(p->mode[1])) return NOT_SUPPORTED;
    if (p->mode[0] == SCALES_OF_SQUARES && p->mode[1] == SCALES_OF_SQUARES) return NOT_SUPPORTED;
    if (!p->scales[0] || !p->scales[1]) return INVALID;
    if ((uintptr_t)p->scales[0] % 16 || (uintptr_t)p->scales[1] % 16) return INVALID;
    if (d->rows % 4 || d->columns % 8 || d->batch != 1 || p->fast) return NOT_SUPPORTED;
    if (p->epilogue != EPILOGUE_NONE && p->epilogue != EPILOGUE_BIAS) return NOT_SUPPORTED;
    if (!is_fp8(a->type) || !is_fp8(b->type) || (a->type == E5M2 && b->type == E5M2))
        return NOT_SUPPORTED;
    if (p->transpose_a != 1 || p->transpose_b != 0) return NOT_SUPPORTED;
    if (a->rows % 16 || d->rows % 16 || a->leading % 16 || b->leading % 16) return NOT_SUPPORTED;
    return p->compute == 68 && (d->type == BF16 || d->type == F16 || d->type == F32)
               ? OK
               : NOT_SUPPORTED;
}

static int takes(const product *p, const matrix *a, const matrix *b, const matrix *d) {
    const uint64_t rows = p->transpose_a ? a->columns : a->rows,
                   inner = p->transpose_a ? a->rows : a->columns;
    if (inner != (p->transpose_b ? b->columns : b->rows) || rows != d->rows ||
        d->columns != (p->transpose_b ? b->rows : b->columns) || inner == 0)
        return INVALID;
    if (a->batch != b->batch || a->batch != d->batch || a->batch < 1) return INVALID;
    if (d->batch > 1 && d->step < d->leading * (int64_t)(d->columns - 1) + (int64_t)d->rows)
        return INVALID; /* the results overlap */
    if (is_fp8_block(p->mode[0]) || is_fp8_block(p->mode[1])) return fp8_block_takes(p, a, b, d);
    if (p->mode[0] == 0 && is_fp8(a->type) && is_fp8(b->type)) return fp8_takes(p, a, b, d);
    if (p->fast) return NOT_SUPPORTED;
    if (a->type != b->type &&
        !(is_fp8(a->type) && is_fp8(b->type) && a->type + b->type != 2 * E5M2))
        return NOT_SUPPORTED;
    if (p->epilogue == EPILOGUE_SUMS_A || p->epilogue == EPILOGUE_SUMS_B) {
        /* The operand's columns are summed as they lie in memory, in the type of D. */
        if (p->epilogue == EPILOGUE_SUMS_A ? p->transpose_a : !p->transpose_b) return NOT_SUPPORTED;
        if (d->batch > 1 || p->bias_type != d->type || getenv("FAKE_CUBLASLT_NO_SUMS"))
            return NOT_SUPPORTED;
    } else if (p->epilogue != EPILOGUE_NONE && p->epilogue != EPILOGUE_BIAS)
        return NOT_SUPPORTED;
    switch (a->type) {
    case F64:
        return p->compute == 70 && d->type == F64 && p->epilogue == EPILOGUE_NONE ? OK
                                                                                  : NOT_SUPPORTED;
    case F32: return p->compute != 70 && d->type == F32 ? OK : NOT_SUPPORTED;
    case F16:
    case BF16:
        return p->compute == 68 && (d->type == a->type || d->type == F32) ? OK : NOT_SUPPORTED;
    }
    return narrow_takes(p, a, d);
}

/* C may have a leading dimension and a step of its own, and overlap itself. */
static int same_shape(const matrix *c, const matrix *d) {
    return c->type == d->type && c->rows == d->rows && c->columns == d->columns &&
           c->batch == d->batch;
}

/* Algorithms carry the operands' type and the alignment that they were chosen for. */
API int cublasLtMatmulAlgoGetHeuristic(void *handle, product *p, matrix *a, matrix *b, matrix *c,
                                       matrix *d, preference *wanted, int most,
                                       algorithm *algorithms, int *count) {
    const char *failing = getenv("FAKE_CUBLASLT_FAIL");
    chosen_count++;
    if (!handle || most < 1 || !same_shape(c, d) || wanted->workspace == 0) return INVALID;
    if (failing && strcmp(failing, "none") != 0) return atoi(failing);
    *count = 0;
    const int status = takes(p, a, b, d);
    if (status != OK || failing) return status;
    memset(algorithms, 0, (size_t)most * sizeof *algorithms);
    if (most > 1) { /* one that does not support the GEMM, as the real one may list */
        algorithms[0].state = NOT_SUPPORTED;
        algorithms++;
        ++*count;
    }
    for (uint64_t index = 0; time_of(index) > 0.0f && *count < most; index++, algorithms++) {
        algorithms->data[0] = 0xA160 + (uint64_t)a->type;
        for (int i = 0; i < 4; i++) algorithms->data[1 + i] = wanted->alignment[i];
        algorithms->data[5] = index;
        algorithms->workspace = wanted->workspace < 4096 ? wanted->workspace : 4096;
        ++*count;
    }
    return OK;
}

API int cublasLtMatmulAlgoCheck(void *handle, product *p, matrix *a, matrix *b, matrix *c,
                                matrix *d, const uint64_t *kept, algorithm *result) {
    if (!handle || !same_shape(c, d) || kept[0] != 0xA160 + (uint64_t)a->type) return INVALID;
    if (time_of(kept[5]) < 0.0f) return NOT_SUPPORTED;
    result->state = takes(p, a, b, d);
    result->workspace = 4096;
    return OK;
}

/* ---- GEMMs ---------------------------------------------------------------------------------------- */

/* The number of an FP8 code. Codes of infinity are not needed. */
static double decode(int type, unsigned code) {
    static const double e2m1[] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
    if (type == E2M1) return code & 8 ? -e2m1[code & 7] : e2m1[code];
    const int fraction = type == E4M3 ? 3 : 2, bias = type == E4M3 ? 7 : 15,
              exponent = (int)(code & 127) >> fraction, digits = (int)code & ((1 << fraction) - 1);
    const double value = exponent == 0
                             ? ldexp(digits, 1 - bias - fraction)
                             : ldexp(digits + (1 << fraction), exponent - bias - fraction);
    if ((code & 127) == 127) return NAN;
    return code & 128 ? -value : value;
}

static double get(const void *data, int type, int64_t at) {
    switch (type) {
    case F64: return ((const double *)data)[at];
    case F32: return ((const float *)data)[at];
    case F16: return dw__f16_to_f32(((const uint16_t *)data)[at]);
    case E4M3:
    case E5M2: return decode(type, ((const unsigned char *)data)[at]);
    default: return dw__bf16_to_f32(((const uint16_t *)data)[at]);
    }
}

static void put(void *data, int type, int64_t at, double value) {
    switch (type) {
    case F64: ((double *)data)[at] = value; break;
    case F32: ((float *)data)[at] = (float)value; break;
    case F16: ((uint16_t *)data)[at] = dw__f32_to_f16((float)value); break;
    default: ((uint16_t *)data)[at] = dw__f32_to_bf16((float)value);
    }
}

/* Element (row, column) of op(m), of one matrix of a batch. */
static double factor(const void *data, const matrix *m, int transpose, int64_t start, int64_t row,
                     int64_t column) {
    return get(data, m->type,
               start + (transpose ? column + row * m->leading : row + column * m->leading));
}

static double rounded(int type, double value) {
    double place;
    put(&place, type, 0, value);
    return get(&place, type, 0);
}

enum { GROUP = 32 }; /* products that a tensor core adds at once to the sum so far */

/* Each addend keeps 14 bits relative to the largest one, as in Hopper's tensor cores with FP8 products. */
static double sum_of_14_bits(const double terms[GROUP + 1]) {
    double largest = 0.0, sum = 0.0;
    for (int i = 0; i <= GROUP; i++) largest = fmax(largest, fabs(terms[i]));
    if (largest == 0.0) return 0.0;
    const double unit = ldexp(1.0, ilogb(largest) - 13);
    for (int i = 0; i <= GROUP; i++) sum += trunc(terms[i] / unit) * unit;
    return sum;
}

/* Element (row, column) of op(A) op(B), of one matrix of a batch: the sum of products [first, end). */
static double part_at(const product *p, const void *a, const matrix *am, const void *b,
                      const matrix *bm, int64_t batch, int64_t row, int64_t column, bool cuts,
                      int64_t first, int64_t end) {
    double sum = 0.0, terms[GROUP + 1];
    for (int64_t k = first; k < end; k++) {
        const double term = factor(a, am, p->transpose_a, batch * am->step, row, k) *
                            factor(b, bm, p->transpose_b, batch * bm->step, k, column);
        if (!cuts) {
            sum += term;
            continue;
        }
        if (k % GROUP == 0) memset(terms, 0, sizeof terms);
        terms[k % GROUP] = term;
        if ((k + 1) % GROUP != 0 && k + 1 < end) continue;
        terms[GROUP] = sum;
        sum = sum_of_14_bits(terms);
    }
    return sum;
}

static double product_at(const product *p, const void *a, const matrix *am, const void *b,
                         const matrix *bm, int64_t batch, int64_t row, int64_t column, bool cuts) {
    return part_at(p, a, am, b, bm, batch, row, column, cuts, 0,
                   (int64_t)(p->transpose_a ? am->rows : am->columns));
}

/* The scale of a block of a factor: [block][line], or [line / 128][blocks in whole fours]. */
static double block_scale(const product *p, int factor_index, const matrix *m, int64_t line,
                          int64_t block) {
    const float *scales = (const float *)(const void *)p->scales[factor_index];
    const int64_t blocks = ((int64_t)m->rows + 127) / 128;
    return (double)(p->mode[factor_index] == SCALES_OF_SQUARES
                        ? scales[line / 128 * ((blocks + 3) / 4 * 4) + block]
                    : getenv("FAKE_CUBLASLT_ROWS_OF_SCALES")
                        ? scales[line * blocks + block]
                        : scales[block * (int64_t)m->columns + line]);
}

/* The sum of each 128 products times the scales of their blocks. */
static double fp8_block_product_at(const product *p, const void *a, const matrix *am, const void *b,
                                   const matrix *bm, int64_t row, int64_t column, bool cuts) {
    const int64_t inner = (int64_t)am->rows;
    double sum = 0.0;
    for (int64_t k = 0; k < inner; k += 128)
        sum +=
            part_at(p, a, am, b, bm, 0, row, column, cuts, k, k + 128 < inner ? k + 128 : inner) *
            block_scale(p, 0, am, row, k / 128) * block_scale(p, 1, bm, column, k / 128);
    return sum;
}

static void compute(const product *p, const void *a, const matrix *am, const void *b,
                    const matrix *bm, double beta, const void *c, const matrix *cm, void *d,
                    const matrix *dm) {
    const int rounds = getenv("FAKE_CUBLASLT_ROUNDS") != NULL;
    const bool cuts = is_fp8(am->type) && getenv("FAKE_CUBLASLT_14_BITS");
    for (int64_t i = 0; i < dm->batch; i++)
        for (int64_t column = 0; column < (int64_t)dm->columns; column++)
            for (int64_t row = 0; row < (int64_t)dm->rows; row++) {
                const bool blocks = is_fp8_block(p->mode[0]);
                double sum = blocks ? fp8_block_product_at(p, a, am, b, bm, row, column, cuts)
                                    : product_at(p, a, am, b, bm, i, row, column, cuts);
                const int64_t at = i * dm->step + row + column * dm->leading;
                for (int f = 0; f < 2 && p->scales[f] && !blocks; f++)
                    sum *= get(p->scales[f], F32, 0);
                if (beta != 0.0)
                    sum += beta * get(c, cm->type, i * cm->step + row + column * cm->leading);
                if (p->epilogue == EPILOGUE_BIAS) {
                    if (rounds) sum = rounded(dm->type, sum);
                    sum += get(p->bias, p->bias_type < 0 ? dm->type : p->bias_type, row);
                }
                put(d, dm->type, at, sum);
            }
    if (getenv("FAKE_CUBLASLT_WRONG")) put(d, dm->type, 0, 1e4);
}

/* Sums of op(A) by rows, or of op(B) by columns. */
static void sum_operand(const product *p, const void *a, const matrix *am, const void *b,
                        const matrix *bm, const matrix *dm) {
    const int64_t inner = (int64_t)(p->transpose_a ? am->rows : am->columns);
    const int of_a = p->epilogue == EPILOGUE_SUMS_A;
    for (int64_t i = 0; i < (int64_t)(of_a ? dm->rows : dm->columns); i++) {
        double sum = 0.0;
        for (int64_t k = 0; k < inner; k++)
            sum += of_a ? factor(a, am, p->transpose_a, 0, i, k)
                        : factor(b, bm, p->transpose_b, 0, k, i);
        put((void *)p->bias, p->bias_type, i, sum);
    }
}

/* Element k of a row of codes, times its block's scale: tiles of 128 rows x 4 scales follow one another along a row.
 * Within one, 32 lines of 16 bytes each have four scales of rows 32 apart. */
static double scaled(const unsigned char *codes, const matrix *m, const unsigned char *scales,
                     int64_t row, int64_t k) {
    const int64_t block = m->type == E2M1 ? 16 : 32, wide = ((int64_t)m->rows / block + 3) / 4,
                  column = k / block, at = row * m->leading + k;
    const unsigned char *tile = scales + (row / 128 * wide + column / 4) * 512;
    const unsigned scale = tile[row % 32 * 16 + row % 128 / 32 * 4 + column % 4];
    if (m->type == E2M1)
        return decode(E2M1, codes[at / 2] >> at % 2 * 4 & 15) * decode(E4M3, scale);
    return decode(m->type, codes[at]) * ldexp(1.0, (int)scale - 127);
}

static void compute_scaled(const product *p, double alpha, const void *a, const matrix *am,
                           const void *b, const matrix *bm, void *d, const matrix *dm) {
    for (int64_t column = 0; column < (int64_t)dm->columns; column++)
        for (int64_t row = 0; row < (int64_t)dm->rows; row++) {
            double sum = 0.0;
            for (int64_t k = 0; k < (int64_t)am->rows; k++)
                sum += scaled(a, am, p->scales[0], row, k) * scaled(b, bm, p->scales[1], column, k);
            put(d, dm->type, row + column * dm->leading, alpha * sum);
        }
    if (getenv("FAKE_CUBLASLT_WRONG")) put(d, dm->type, 0, 1e4);
}

static int is_aligned(const void *at, uint64_t bytes) { return (uintptr_t)at % bytes == 0; }

API int cublasLtMatmul(void *handle, product *p, const void *alpha, const void *a, matrix *a_matrix,
                       const void *b, matrix *b_matrix, const void *beta, const void *c,
                       matrix *c_matrix, void *d, matrix *d_matrix, const uint64_t *chosen,
                       void *workspace, size_t workspace_bytes, void *stream) {
    const int status = takes(p, a_matrix, b_matrix, d_matrix);
    (void)stream;
    if (!handle || !a || !b || !c || !d || (c == d) != (c_matrix == d_matrix)) return INVALID;
    if (!same_shape(c_matrix, d_matrix)) return INVALID;
    const double scale = get(alpha, p->scale, 0), kept = get(beta, p->scale, 0);
    /* Only alpha and beta in the device's memory, which is the host's here, may be any. */
    if ((scale != 1.0 && !p->pointers) || (kept != 0.0 && kept != 1.0)) return INVALID;
    if (!workspace || !is_aligned(workspace, 16) || workspace_bytes == 0) return INVALID;
    if (chosen[0] != 0xA160 + (uint64_t)a_matrix->type) return INVALID;
    if (!is_aligned(a, chosen[1]) || !is_aligned(b, chosen[2]) || !is_aligned(c, chosen[3]) ||
        !is_aligned(d, chosen[4]))
        return INVALID;
    if (status != OK || (p->epilogue != EPILOGUE_NONE && !p->bias))
        return status ? status : INVALID;
    multiplied[a_matrix->type]++;
    last_algorithm = (int)chosen[5];
    memset(workspace, 0xA5, workspace_bytes < 4096 ? workspace_bytes : 4096); /* must be there */
    if (getenv("FAKE_CUBLASLT_TIMES")) {
        fake_cuda *(*driver)(void) = NULL;
        *(void **)&driver = dlsym(RTLD_DEFAULT, "fake_cuda_state");
        if (!driver || time_of(chosen[5]) < 0.0f) return INVALID;
        const char *more = getenv("FAKE_CUBLASLT_SUM_TIME");
        const int sums = p->epilogue == EPILOGUE_SUMS_A || p->epilogue == EPILOGUE_SUMS_B;
        driver()->event_milliseconds =
            time_of(chosen[5]) + (more && sums ? strtof(more, NULL) : 0.0f);
        return OK;
    }
    const bool in_bytes = p->mode[0] == SCALES_OF_16 || p->mode[0] == SCALES_OF_32;
    if (in_bytes && d_matrix->rows * d_matrix->columns * a_matrix->rows <= (uint64_t)1 << 23) {
        compute_scaled(p, scale, a, a_matrix, b, b_matrix, d, d_matrix);
        return OK;
    }
    if (!in_bytes && a_matrix->type != E2M1) {
        multiplied_fast += p->fast;
        compute(p, a, a_matrix, b, b_matrix, kept, c, c_matrix, d, d_matrix);
        if (p->epilogue == EPILOGUE_SUMS_A || p->epilogue == EPILOGUE_SUMS_B)
            sum_operand(p, a, a_matrix, b, b_matrix, d_matrix);
        return OK;
    }
    /* Checks that the first operand is complete in memory, and the last tile of its scales. */
    volatile const unsigned char *last = a;
    (void)last[a_matrix->rows * a_matrix->columns * (a_matrix->type == E2M1 ? 4 : 8) / 8 - 1];
    if (p->mode[0] != 0) {
        uint64_t in_row = a_matrix->rows / (p->mode[0] == 1 ? 16 : 32);
        last = p->scales[0];
        (void)last[(a_matrix->columns + 127) / 128 * 128 * ((in_row + 3) / 4 * 4) - 1];
    }
    memset(d, 0, d_matrix->rows * d_matrix->columns * (d_matrix->type == F32 ? 4 : 2));
    return OK;
}
