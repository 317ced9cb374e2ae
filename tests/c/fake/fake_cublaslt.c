/* Replaces libcublasLt.so: cuBLASLt that multiplies nothing but rejects what the real one would reject. Its rules
 * come from the documentation: for FP8 the first factor is transposed, the workspace has the stated size, and the
 * algorithm is one that it returned itself. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { OK = 0, INVALID = 7, NOT_SUPPORTED = 15, F32 = 0, BF16 = 14, E4M3 = 28, E2M1 = 33 };

typedef struct product {
    int compute, scale, transpose_a, mode[2];
    const unsigned char *scales[2]; /* of blocks of factors */
} product;
typedef struct matrix {
    int type;
    uint64_t rows, columns;
    int64_t leading;
} matrix;
typedef struct algorithm {
    uint64_t data[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} algorithm;

static int live, multiplied[64]; /* objects, and GEMMs by the type of their operands */
API int fake_cublaslt_live(void);
API int fake_cublaslt_live(void) { return live; }
API int fake_cublaslt_multiplied(int type);
API int fake_cublaslt_multiplied(int type) { return multiplied[type]; }

static void *made(size_t bytes) {
    live++;
    return calloc(1, bytes);
}
static int gone(void *object) {
    live--;
    free(object);
    return OK;
}

API int cublasLtCreate(void **handle) {
    *handle = made(1);
    return OK;
}
API int cublasLtDestroy(void *handle) { return gone(handle); }
API int cublasLtMatmulDescCreate(product **of, int compute, int scale) {
    *of = made(sizeof **of);
    (*of)->compute = compute;
    (*of)->scale = scale;
    return (compute == 68 || compute == 77) && scale == F32 ? OK : INVALID;
}
API int cublasLtMatmulDescDestroy(product *of) { return gone(of); }
API int cublasLtMatmulDescSetAttribute(product *of, int attribute, const void *value,
                                       size_t bytes) {
    void *at = attribute == 3                       ? (void *)&of->transpose_a
               : attribute == 31 || attribute == 32 ? (void *)&of->mode[attribute - 31]
               : attribute == 17 || attribute == 18 ? (void *)&of->scales[attribute - 17]
                                                    : NULL;
    size_t expected = attribute == 17 || attribute == 18 ? sizeof(void *) : sizeof(int);
    if (!at || bytes != expected) return INVALID;
    memcpy(at, value, bytes);
    return OK;
}
API int cublasLtMatrixLayoutCreate(matrix **of, int type, uint64_t rows, uint64_t columns,
                                   int64_t leading) {
    *of = made(sizeof **of);
    **of = (matrix){type, rows, columns, leading};
    return leading >= (int64_t)rows ? OK : INVALID;
}
API int cublasLtMatrixLayoutDestroy(matrix *of) { return gone(of); }
API int cublasLtMatmulPreferenceCreate(size_t **of) {
    *of = made(sizeof **of);
    return OK;
}
API int cublasLtMatmulPreferenceDestroy(size_t *of) { return gone(of); }
API int cublasLtMatmulPreferenceSetAttribute(size_t *of, int attribute, const void *value,
                                             size_t bytes) {
    if (attribute != 1 || bytes != sizeof *of) return INVALID;
    memcpy(of, value, bytes);
    return OK;
}

static int takes(const product *p, const matrix *a, const matrix *b, const matrix *d) {
    if (a->rows != b->rows || d->rows != a->columns || d->columns != b->columns) return INVALID;
    if (a->type != b->type || p->transpose_a != 1) return NOT_SUPPORTED;
    int narrow = a->type != F32;
    int mode = p->mode[0];
    if (p->mode[1] != mode || (mode != 0) != (p->scales[0] && p->scales[1])) return INVALID;
    if ((a->type == E2M1) != (mode == 1) || (mode == 2 && a->type != E4M3)) return NOT_SUPPORTED;
    if (mode != 0) { /* checks that the last tile of 128 rows and 4 scales exists */
        uint64_t in_row = a->rows / (mode == 1 ? 16 : 32);
        volatile const unsigned char *last = p->scales[0];
        (void)last[(a->columns + 127) / 128 * 128 * ((in_row + 3) / 4 * 4) - 1];
    }
    if (narrow && p->compute != 68) return NOT_SUPPORTED;
    return d->type == (narrow ? BF16 : F32) ? OK : NOT_SUPPORTED;
}

API int cublasLtMatmulAlgoGetHeuristic(void *handle, product *p, matrix *a, matrix *b, matrix *c,
                                       matrix *d, size_t *workspace, int most,
                                       algorithm *algorithms, int *count) {
    (void)handle;
    if (most < 1 || c != d || *workspace == 0) return INVALID;
    memset(algorithms, 0, sizeof *algorithms);
    algorithms[0].data[0] = 0xA160 + (uint64_t)a->type;
    algorithms[0].workspace = *workspace;
    *count = 1;
    return takes(p, a, b, d);
}

API int cublasLtMatmul(void *handle, product *p, const float *alpha, const void *a,
                       matrix *a_matrix, const void *b, matrix *b_matrix, const float *beta,
                       const void *c, matrix *c_matrix, void *d, matrix *d_matrix,
                       const uint64_t *chosen, void *workspace, size_t workspace_bytes,
                       void *stream) {
    if (!handle || !stream || !a || !b || !d || c != d || c_matrix != d_matrix) return INVALID;
    if (*alpha != 1.0f || *beta != 0.0f || !workspace || workspace_bytes == 0) return INVALID;
    if (chosen[0] != 0xA160 + (uint64_t)a_matrix->type) return INVALID;
    /* Checks that each operand matrix is complete in memory, and the result too. */
    size_t bits = a_matrix->type == F32    ? 32
                  : a_matrix->type == BF16 ? 16
                  : a_matrix->type == E4M3 ? 8
                                           : 4;
    volatile const unsigned char *last = a;
    (void)last[a_matrix->rows * a_matrix->columns * bits / 8 - 1];
    memset(d, 0, d_matrix->rows * d_matrix->columns * (d_matrix->type == F32 ? 4 : 2));
    multiplied[a_matrix->type]++;
    return takes(p, a_matrix, b_matrix, d_matrix);
}
