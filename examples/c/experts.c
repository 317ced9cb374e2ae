/* One linear layer of a mixture of experts on a GPU: a GEMM for each expert over its own rows, in one call, and the
 * MXFP8 of the result.
 *
 *     cc experts.c $(pkg-config --cflags --libs deepwell) -o experts
 *     ./experts                            on an NVIDIA GPU (B200 or B300)
 *     ./experts emulator:sm_100a           without a GPU: an emulated B200 runs the same kernels, slowly
 *
 * All inputs are small integers, so that the sums are exact. The program compares every element of the results.
 */
#include <deepwell/deepwell.h>
#include <stdio.h>
#include <stdlib.h>

enum { EXPERTS = 3, MOST_ROWS = 100, N = 128, K = 64, MOST = MOST_ROWS * N };

static const dw_device *gpu;

static void must(dw_status status) {
    if (status == DW_OK) return;
    fprintf(stderr, "experts: %s: %s\n", dw_status_text(status), dw_last_error());
    exit(1);
}

static void *device_memory(size_t bytes) {
    void *memory = NULL;
    must(dw_device_allocate(gpu, bytes, &memory));
    return memory;
}

/* A matrix of rows * cols small integers in BF16. */
static void *integers(int64_t rows, int64_t cols, float *host) {
    static unsigned short codes[MOST];
    void *memory = device_memory(2 * (size_t)(rows * cols));
    for (int64_t i = 0; i < rows * cols; i++) host[i] = (float)(rand() % 5 - 2);
    must(dw_encode(DW_BF16, rows * cols, host, NULL, codes));
    must(dw_device_copy_in(gpu, memory, codes, 2 * (size_t)(rows * cols)));
    return memory;
}

/* Compares D, [rows, N], with A B^T, and returns how many elements differ. */
static int differing(const float *a, const float *b, const void *d, int64_t rows) {
    static unsigned short codes[MOST];
    static float got[MOST];
    int count = 0;
    must(dw_device_copy_out(gpu, codes, d, 2 * (size_t)(rows * N)));
    must(dw_decode(DW_BF16, rows * N, codes, got));
    for (int64_t i = 0; i < rows * N; i++) {
        float sum = 0;
        for (int k = 0; k < K; k++) sum += a[i / N * K + k] * b[i % N * K + k];
        count += got[i] != sum;
    }
    return count;
}

int main(int argc, char **argv) {
    const int64_t rows[EXPERTS] = {MOST_ROWS, 0, 29}; /* no token chose the second expert */
    static float a[EXPERTS][MOST_ROWS * K], b[EXPERTS][N * K];
    void *as[EXPERTS], *bs[EXPERTS], *ds[EXPERTS];
    must(dw_device_find(argc > 1 ? argv[1] : "cuda", &gpu));
    for (int e = 0; e < EXPERTS; e++) {
        as[e] = integers(rows[e], K, a[e]);
        bs[e] = integers(N, K, b[e]);
        ds[e] = device_memory(2 * (size_t)(rows[e] * N));
    }
    dw_grouped_gemm call = {.struct_size = sizeof call, .device = gpu, .dtype = DW_BF16};
    call.alpha = 1, call.groups = EXPERTS, call.n = N, call.k = K;
    call.m = rows, call.a = as, call.b = bs, call.d = ds;
    call.stride_a = call.stride_b = K, call.stride_d = N;
    must(dw_grouped_gemm_supported(&call));
    must(dw_grouped_gemm_workspace(&call, &call.workspace_bytes));
    call.workspace = device_memory(call.workspace_bytes);
    must(dw_grouped_gemm_run(&call));
    int wrong = 0; /* reading back waits for the stream */
    for (int e = 0; e < EXPERTS; e++) wrong += differing(a[e], b[e], ds[e], rows[e]);
    printf("%d experts on %s: %d elements differ\n", EXPERTS, dw_device_name(gpu), wrong);

    dw_quantize quantize = {.struct_size = sizeof quantize, .device = gpu, .dtype = DW_BF16};
    quantize.scheme = DW_SCHEME_MXFP8, quantize.rows = MOST_ROWS, quantize.cols = N;
    quantize.source = ds[0], quantize.row_stride = N;
    quantize.along_rows = (dw_quantized_matrix){.wanted = 1, .stride = N};
    quantize.along_rows.codes = device_memory(MOST_ROWS * N);
    quantize.along_rows.scales =
        device_memory((size_t)dw_scales_swizzled_bytes(MOST_ROWS, (N + 31) / 32));
    if (dw_quantize_supported(&quantize) == DW_OK) {
        must(dw_quantize_run(&quantize));
        printf("quantized to MXFP8: %d x %d codes\n", MOST_ROWS, N);
    } else {
        printf("not quantized: %s\n", dw_last_error()); /* NVRTC may be missing */
    }
    return wrong != 0;
}
