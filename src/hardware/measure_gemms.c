/* Measures GEMM rates with cuBLASLt: the rates that tuned kernels reach on this GPU at its clocks and power.
 *
 * Matrices are square and the first is transposed, which is the only layout that supports FP8 on Hopper. */
#include "device/cublaslt.h"
#include "hardware/measure.h"

static dw_status check(int result, const char *what) {
    return result == 0 ? DW_OK
                       : dw__fail(DW_UNSUPPORTED, "%s: cuBLASLt's status is %d", what, result);
}

static const struct {
    dw_rate rate;
    int oldest, type, compute;
    unsigned bits;
    int scales, calls; /* calls: in one series */
} kinds[] = {
    {DW_RATE_FP32, 50, DW_LT_F32, DW_LT_COMPUTE_F32, 32, DW_LT_SCALES_NONE, 2},
    {DW_RATE_TF32, 80, DW_LT_F32, DW_LT_COMPUTE_TF32, 32, DW_LT_SCALES_NONE, 8},
    {DW_RATE_BF16, 80, DW_LT_BF16, DW_LT_COMPUTE_F32, 16, DW_LT_SCALES_NONE, 16},
    {DW_RATE_FP8, 89, DW_LT_E4M3, DW_LT_COMPUTE_F32, 8, DW_LT_SCALES_NONE, 16},
    {DW_RATE_MXFP8, 100, DW_LT_E4M3, DW_LT_COMPUTE_F32, 8, DW_LT_SCALES_OF_32, 16},
    {DW_RATE_FP4, 100, DW_LT_E2M1, DW_LT_COMPUTE_F32, 4, DW_LT_SCALES_OF_16, 32},
};

enum { WORKSPACE = 32 << 20, BLOCK = 1 << 20 };

/* D = A^T B. D is FP32, or BF16 if the operands are narrower. */
typedef struct product {
    const dw__cublaslt *lt;
    void *handle, *kind, *factor, *result, *preference;
    dw__lt_algorithm algorithm;
    dw__cu_address a, b, d, workspace, scales;
} product;

static dw_status multiply(const dw__bench *bench, void *context) {
    static const float one = 1, zero = 0;
    const product *p = context;
    void *d = (void *)(uintptr_t)p->d;
    return check(p->lt->multiply(p->handle, p->kind, &one, (const void *)(uintptr_t)p->a, p->factor,
                                 (const void *)(uintptr_t)p->b, p->factor, &zero, d, p->result, d,
                                 p->result, p->algorithm.data, (void *)(uintptr_t)p->workspace,
                                 WORKSPACE, bench->stream),
                 "a GEMM");
}

static dw_status set(product *p, int attribute, const void *value, size_t bytes) {
    return check(p->lt->product_set(p->kind, attribute, value, bytes), "a GEMM's attribute");
}

/* Both operands use the same block of scales. */
static dw_status describe_scales(product *p, int kind) {
    int mode = kinds[kind].scales;
    if (mode == DW_LT_SCALES_NONE) return DW_OK;
    DW_RETURN_IF_FAILED(set(p, DW_LT_SCALE_MODE_A, &mode, sizeof mode));
    DW_RETURN_IF_FAILED(set(p, DW_LT_SCALE_MODE_B, &mode, sizeof mode));
    DW_RETURN_IF_FAILED(set(p, DW_LT_SCALES_A, &p->scales, sizeof p->scales));
    return set(p, DW_LT_SCALES_B, &p->scales, sizeof p->scales);
}

static dw_status describe(product *p, int kind, uint64_t n) {
    static const int transpose = DW_LT_TRANSPOSED;
    static const size_t workspace = WORKSPACE;
    const dw__cublaslt *t = p->lt;
    int count = 0, type = kinds[kind].type,
        result_type = type == DW_LT_F32 ? DW_LT_F32 : DW_LT_BF16;
    DW_RETURN_IF_FAILED(
        check(t->product_create(&p->kind, kinds[kind].compute, DW_LT_F32), "a GEMM"));
    DW_RETURN_IF_FAILED(set(p, DW_LT_TRANSPOSE_A, &transpose, sizeof transpose));
    DW_RETURN_IF_FAILED(describe_scales(p, kind));
    DW_RETURN_IF_FAILED(check(t->matrix_create(&p->factor, type, n, n, (int64_t)n), "a matrix"));
    DW_RETURN_IF_FAILED(
        check(t->matrix_create(&p->result, result_type, n, n, (int64_t)n), "a matrix"));
    DW_RETURN_IF_FAILED(check(t->preference_create(&p->preference), "a preference"));
    DW_RETURN_IF_FAILED(check(
        t->preference_set(p->preference, DW_LT_PREFER_WORKSPACE, &workspace, sizeof workspace),
        "the workspace"));
    int result = t->choose(p->handle, p->kind, p->factor, p->factor, p->result, p->result,
                           p->preference, 1, &p->algorithm, &count);
    if (result == 0 && count == 0)
        return dw__fail(DW_UNSUPPORTED, "cuBLASLt has no kernel for GEMMs of type %s here",
                        dw_rate_name(kinds[kind].rate));
    return check(result, "choosing a kernel");
}

/* E8M0: powers of two from 1/8 to 1. E4M3: numbers from 1/2 to 1. */
static void random_scales(int scales, unsigned char *block) {
    dw__bench_random(DW_RATE_FP4, block, BLOCK);
    for (int i = 0; i < BLOCK; i++)
        block[i] = scales == DW_LT_SCALES_OF_32 ? (unsigned char)(0x7F - (block[i] & 3))
                                                : (unsigned char)(0x38 - (block[i] & 7));
}

/* Scales are stored in tiles of 128 rows and 4 scales. */
static size_t scale_bytes(int scales, uint64_t n) {
    uint64_t in_row = n / (scales == DW_LT_SCALES_OF_32 ? 32 : 16);
    return (size_t)((n + 127) / 128 * 128 * ((in_row + 3) / 4 * 4));
}

static dw_status measure(const dw__bench *bench, const dw__cublaslt *lt, void *handle, int kind,
                         int size, double *rate) {
    dw_status status = DW_OK;
    uint64_t n = (uint64_t)size;
    size_t factor = n * n * kinds[kind].bits / 8;
    size_t result = n * n * (kinds[kind].type == DW_LT_F32 ? 4 : 2);
    product p = {.lt = lt, .handle = handle};
    double seconds;
    void *block = dw__malloc(BLOCK);
    if (!block) DW_TRY(dw__fail_memory("random numbers", BLOCK));
    if (kinds[kind].scales != DW_LT_SCALES_NONE) {
        random_scales(kinds[kind].scales, block);
        DW_TRY(
            dw__bench_allocate(bench, scale_bytes(kinds[kind].scales, n), block, BLOCK, &p.scales));
    }
    dw__bench_random(kinds[kind].rate, block, BLOCK);
    DW_TRY(describe(&p, kind, n));
    DW_TRY(dw__bench_allocate(bench, factor, block, BLOCK, &p.a));
    DW_TRY(dw__bench_allocate(bench, factor, block, BLOCK, &p.b));
    DW_TRY(dw__bench_allocate(bench, result, block, BLOCK, &p.d));
    DW_TRY(dw__bench_allocate(bench, WORKSPACE, block, BLOCK, &p.workspace));
    DW_TRY(dw__bench_time(bench, kinds[kind].calls, multiply, &p, &seconds));
    *rate = 2.0 * (double)n * (double)n * (double)n / seconds;
cleanup:
    if (p.kind) lt->product_destroy(p.kind);
    if (p.factor) lt->matrix_destroy(p.factor);
    if (p.result) lt->matrix_destroy(p.result);
    if (p.preference) lt->preference_destroy(p.preference);
    dw__bench_release(bench, p.a);
    dw__bench_release(bench, p.b);
    dw__bench_release(bench, p.d);
    dw__bench_release(bench, p.workspace);
    dw__bench_release(bench, p.scales);
    dw__free(block);
    return status;
}

dw_status dw__measure_gemms(const dw__bench *bench, const dw__machine_options *options,
                            dw_machine_gpu *gpu) {
    void *handle = NULL;
    dw_status status = DW_OK;
    const dw__cublaslt *lt = NULL;
    DW_RETURN_IF_FAILED(dw__cublaslt_load(&lt));
    DW_RETURN_IF_FAILED(check(lt->create(&handle), "starting cuBLASLt"));
    for (int i = 0; i < (int)DW_COUNT(kinds); i++) {
        double rate = 0;
        if (gpu->capability < kinds[i].oldest) continue;
        DW_TRY(measure(bench, lt, handle, i, options->matrix_size, &rate));
        gpu->rate[kinds[i].rate] =
            (dw_figure){rate, DW_FIGURE_MEASURED, "square GEMMs of random numbers, cuBLASLt"};
    }
cleanup:
    lt->destroy(handle);
    return status;
}
