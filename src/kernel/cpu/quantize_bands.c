/* quantize, quantization_error, quantize_blocks and dequantize_blocks. The codecs (number/) round an F32 matrix;
 * quantize first widens a BF16 or F16 one into its scratch. quantize_blocks has them write its results, quantize its
 * scratch, from which it decodes contiguous BF16, band by band, as dequantize_blocks does. */
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/quantization.h"
#include "number/half.h"
#include <stdatomic.h>
#include <string.h>

static const int64_t ROUND_TASK = 1 << 14; /* elements */

typedef struct job {
    dw__quantization q;
    const dw__tensor *operand;
    const float *x; /* of F32, or widened */
    int64_t row_stride;
    float *widened, scale;
    uint16_t *y;
    dw__coded coded;
    char *worker_bands;
    size_t band_bytes;
    dw__rounding_sums *sums; /* of quantization_error, for each band */
    _Atomic int failed;
} job;

static int64_t band_extent(const dw__quantization *q) {
    return q->options.axis == 1 ? q->rows : q->cols;
}

static size_t band_bytes(const dw__quantization *q) {
    int64_t across = q->options.axis == 1 ? q->cols : q->rows;
    return (size_t)(across * DW_QUANTIZE_BAND) * sizeof(float);
}

static void round_row(const float *from, int64_t count, uint16_t *to) {
    for (int64_t i = 0; i < count; i++) to[i] = dw__f32_to_bf16(from[i]);
}

static dw_status decode_band(const job *j, int64_t index, int worker) {
    const dw__quantization *q = &j->q;
    int64_t first = index * DW_QUANTIZE_BAND, count = band_extent(q) - first;
    if (count > DW_QUANTIZE_BAND) count = DW_QUANTIZE_BAND;
    float *band = (float *)(j->worker_bands + (size_t)worker * j->band_bytes);
    DW_RETURN_IF_FAILED(dw__quantize_decode(q, j->coded, first, count, band));
    if (q->options.axis == 1) {
        round_row(band, count * q->cols, j->y + first * q->cols);
    } else {
        for (int64_t row = 0; row < q->rows; row++)
            round_row(band + row * count, count, j->y + row * q->cols + first);
    }
    return DW_OK;
}

static void decode_task(void *context, int64_t index, int worker) {
    job *j = context;
    if (decode_band(j, index, worker) != DW_OK) atomic_store(&j->failed, 1);
}

static int64_t rows_per_task(const dw__quantization *q) {
    return q->cols < ROUND_TASK ? ROUND_TASK / (q->cols > 0 ? q->cols : 1) : 1;
}

static void round_task(void *context, int64_t index, int worker) {
    (void)worker;
    job *j = context;
    int64_t rows = rows_per_task(&j->q);
    for (int64_t row = index * rows; row < (index + 1) * rows && row < j->q.rows; row++)
        round_row(j->x + row * j->row_stride, j->q.cols, j->y + row * j->q.cols);
}

/* FP8 with one scale. */
static dw_status round_whole_rows(const job *j, int64_t first) {
    enum { CHUNK = 512 };
    float values[CHUNK];
    const int64_t rows = rows_per_task(&j->q), cols = j->q.cols;
    for (int64_t row = first; row < first + rows && row < j->q.rows; row++)
        for (int64_t start = 0; start < cols; start += CHUNK) {
            const int64_t count = cols - start < CHUNK ? cols - start : CHUNK;
            DW_RETURN_IF_FAILED(dw__quantize_whole(&j->q, count, j->x + row * j->row_stride + start,
                                                   j->scale, values));
            round_row(values, count, j->y + row * cols + start);
        }
    return DW_OK;
}

static void round_whole_task(void *context, int64_t index, int worker) {
    (void)worker;
    job *j = context;
    if (round_whole_rows(j, index * rows_per_task(&j->q)) != DW_OK) atomic_store(&j->failed, 1);
}

static void widen_task(void *context, int64_t index, int worker) {
    (void)worker;
    job *j = context;
    const int64_t rows = rows_per_task(&j->q), cols = j->q.cols;
    const bool bf16 = j->operand->dtype == DW_BF16;
    for (int64_t row = index * rows; row < (index + 1) * rows && row < j->q.rows; row++) {
        const uint16_t *from = (const uint16_t *)j->operand->data + row * j->row_stride;
        float *to = j->widened + row * cols;
        for (int64_t i = 0; i < cols; i++)
            to[i] = bf16 ? dw__bf16_to_f32(from[i]) : dw__f16_to_f32(from[i]);
    }
}

static bool is_rows(const dw__tensor *x) {
    return (x->stride[1] == 1 || x->shape[1] == 1) &&
           (x->stride[0] >= x->shape[1] || x->shape[0] == 1);
}
static bool rows_of_f32(const dw__tensor *x) { return x->dtype == DW_F32 && is_rows(x); }
static bool is_narrow(const dw__tensor *x) { return x->dtype == DW_BF16 || x->dtype == DW_F16; }

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    const dw__tensor *x = &call->inputs[0];
    return (x->dtype == DW_F32 || is_narrow(x)) && is_rows(x) && call->outputs[0].dtype == DW_BF16
               ? DW_OK
               : dw__kernel_refuse(kernel);
}
static dw_status supports_blocks(const dw__kernel *kernel, const void *given,
                                 const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return rows_of_f32(&call->inputs[0]) ? DW_OK : dw__kernel_refuse(kernel);
}
static dw_status supports_codes(const dw__kernel *kernel, const void *given,
                                const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    return dw__tensor_is_contiguous(&call->inputs[0]) &&
                   dw__tensor_is_contiguous(&call->inputs[1]) && call->outputs[0].dtype == DW_BF16
               ? DW_OK
               : dw__kernel_refuse(kernel);
}

static size_t shared_bytes(const dw__quantization *q) {
    return (dw__quantize_scratch(q) + 63) / 64 * 64;
}

static size_t widened_bytes(const dw__call *call, const dw__quantization *q) {
    const size_t widened = is_narrow(&call->inputs[0]) ? sizeof(float) : 0;
    return ((size_t)(q->rows * q->cols) * widened + 63) / 64 * 64;
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *given,
                                 const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__quantization q;
    if (dw__quantization_of(call, &q) != DW_OK) return DW_OK;
    *bytes = widened_bytes(call, &q);
    if (!q.bf16 && !q.whole)
        *bytes += shared_bytes(&q) + (size_t)dw__pool_threads() * band_bytes(&q);
    return DW_OK;
}
static dw_status scratch_of_blocks(const dw__kernel *kernel, const void *given,
                                   const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__quantization q;
    *bytes = dw__quantization_of(call, &q) == DW_OK ? shared_bytes(&q) : 0;
    return DW_OK;
}
static dw_status scratch_of_codes(const dw__kernel *kernel, const void *given,
                                  const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__quantization q;
    if (dw__quantization_of(call, &q) != DW_OK) return DW_OK;
    *bytes = (size_t)dw__pool_threads() * band_bytes(&q);
    return DW_OK;
}

static int64_t row_stride_of(const dw__call *call) {
    const dw__tensor *x = &call->inputs[0];
    return x->shape[0] == 1 ? x->shape[1] : x->stride[0];
}

/* Decodes the job's codes, with bands at `bands`. */
static dw_status decode(job *j, char *bands) {
    j->worker_bands = bands;
    j->band_bytes = band_bytes(&j->q);
    if (j->y)
        dw__pool_run((band_extent(&j->q) + DW_QUANTIZE_BAND - 1) / DW_QUANTIZE_BAND, decode_task,
                     j);
    return atomic_load(&j->failed) ? decode_band(j, 0, 0) : DW_OK; /* for this thread's message */
}

static bool is_empty(const dw__quantization *q) { return q->rows == 0 || q->cols == 0; }

/* Widens an operand of BF16 or F16 into the scratch. Returns the rest of the scratch. */
static void *widen(job *j, void *scratch) {
    const dw__quantization *q = &j->q;
    if (!is_narrow(j->operand) || is_empty(q)) return scratch;
    j->widened = scratch;
    dw__pool_run((q->rows + rows_per_task(q) - 1) / rows_per_task(q), widen_task, j);
    j->x = j->widened;
    j->row_stride = q->cols;
    return (char *)scratch + ((size_t)(q->rows * q->cols) * sizeof(float) + 63) / 64 * 64;
}

static dw_status run(const dw__call *call, void *scratch) {
    job j = {.operand = &call->inputs[0],
             .x = call->inputs[0].data,
             .y = call->outputs[0].data,
             .scale = 1.0f};
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &j.q));
    const dw__quantization *q = &j.q;
    const int64_t tasks = (q->rows + rows_per_task(q) - 1) / rows_per_task(q);
    j.row_stride = row_stride_of(call);
    scratch = widen(&j, scratch);
    if (q->bf16) {
        if (j.y && !is_empty(q)) dw__pool_run(tasks, round_task, &j);
    } else if (q->whole && !is_empty(q)) {
        DW_RETURN_IF_FAILED(dw__quantize_whole_scale(q, j.x, j.row_stride, &j.scale));
        if (j.y) dw__pool_run(tasks, round_whole_task, &j);
        if (atomic_load(&j.failed)) return round_whole_rows(&j, 0); /* for this thread's message */
    } else if (!is_empty(q)) {
        j.coded = dw__quantize_in_scratch(q, scratch);
        DW_RETURN_IF_FAILED(dw__quantize_encode(q, j.x, j.row_stride, j.coded, scratch, &j.scale));
        DW_RETURN_IF_FAILED(decode(&j, (char *)scratch + shared_bytes(q)));
    }
    if (call->outputs[1].data) *(float *)call->outputs[1].data = j.scale;
    return DW_OK;
}

static dw_status run_blocks(const dw__call *call, void *scratch) {
    dw__quantization q;
    float scale = 1.0f;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &q));
    if (!is_empty(&q)) {
        /* A result that nobody reads is written to the scratch. */
        dw__coded to = dw__quantize_in_scratch(&q, scratch);
        if (call->outputs[0].data) to.codes = call->outputs[0].data;
        if (call->outputs[1].data) to.scales = call->outputs[1].data;
        DW_RETURN_IF_FAILED(dw__quantize_encode(&q, call->inputs[0].data, row_stride_of(call), to,
                                                scratch, &scale));
    }
    if (call->outputs[2].data) *(float *)call->outputs[2].data = scale;
    return DW_OK;
}

static dw_status run_codes(const dw__call *call, void *scratch) {
    job j = {.y = call->outputs[0].data, .coded = {call->inputs[0].data, call->inputs[1].data}};
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &j.q));
    return is_empty(&j.q) ? DW_OK : decode(&j, scratch);
}

/* ---- quantization_error --------------------------------------------------------------------------- */

/* A task is a band of blocks, or of rows for a format without blocks. Its sums are kept until all bands are done and
 * then added in order, so that the result does not depend on the number of threads. */
static int64_t error_tasks(const dw__quantization *q) {
    return (band_extent(q) + DW_QUANTIZE_BAND - 1) / DW_QUANTIZE_BAND;
}

static dw_status measure_band(const job *j, int64_t index, int worker) {
    const dw__quantization *q = &j->q;
    const bool along = q->options.axis == 1;
    const int64_t first = index * DW_QUANTIZE_BAND, extent = band_extent(q),
                  count = extent - first < DW_QUANTIZE_BAND ? extent - first : DW_QUANTIZE_BAND,
                  rows = along ? count : q->rows, cols = along ? q->cols : count,
                  row = along ? first : 0, column = along ? 0 : first;
    const double limit = dw__quantize_limit(q) * (double)j->scale;
    float *band = (float *)(j->worker_bands + (size_t)worker * j->band_bytes);
    dw__rounding_sums sums = {0};
    if (!q->whole) DW_RETURN_IF_FAILED(dw__quantize_decode(q, j->coded, first, count, band));
    for (int64_t i = 0; i < rows; i++) {
        const float *x = j->x + (row + i) * j->row_stride + column;
        float *values = band + i * cols;
        if (q->whole) DW_RETURN_IF_FAILED(dw__quantize_whole(q, cols, x, j->scale, values));
        for (int64_t k = 0; k < cols; k++)
            dw__rounding_add(
                &sums, x[k], (double)values[k] * (double)j->scale,
                limit * (double)dw__quantize_block_scale(q, j->coded, row + i, column + k));
    }
    j->sums[index] = sums;
    return DW_OK;
}

static void measure_task(void *context, int64_t index, int worker) {
    job *j = context;
    if (measure_band(j, index, worker) != DW_OK) atomic_store(&j->failed, 1);
}

static size_t error_sums_bytes(const dw__quantization *q) {
    return ((size_t)error_tasks(q) * sizeof(dw__rounding_sums) + 63) / 64 * 64;
}

static dw_status supports_error(const dw__kernel *kernel, const void *given,
                                const dw__gpu_target *gpu) {
    const dw__call *call = given;
    (void)gpu;
    const dw__tensor *x = &call->inputs[0];
    return (x->dtype == DW_F32 || is_narrow(x)) && is_rows(x) ? DW_OK : dw__kernel_refuse(kernel);
}

static dw_status scratch_of_error(const dw__kernel *kernel, const void *given,
                                  const dw__context *context, size_t *bytes) {
    const dw__call *call = given;
    (void)kernel, (void)context;
    dw__quantization q;
    if (dw__quantization_of(call, &q) != DW_OK) return DW_OK;
    *bytes = widened_bytes(call, &q) + shared_bytes(&q) + error_sums_bytes(&q) +
             (size_t)dw__pool_threads() * band_bytes(&q);
    return DW_OK;
}

static dw_status run_error(const dw__call *call, void *scratch) {
    job j = {.operand = &call->inputs[0], .x = call->inputs[0].data, .scale = 1.0f};
    double *numbers = call->outputs[0].data;
    dw__rounding_sums sums = {0};
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &j.q));
    const dw__quantization *q = &j.q;
    j.row_stride = row_stride_of(call);
    if (!is_empty(q)) {
        scratch = widen(&j, scratch);
        if (q->whole) {
            DW_RETURN_IF_FAILED(dw__quantize_whole_scale(q, j.x, j.row_stride, &j.scale));
        } else {
            j.coded = dw__quantize_in_scratch(q, scratch);
            DW_RETURN_IF_FAILED(
                dw__quantize_encode(q, j.x, j.row_stride, j.coded, scratch, &j.scale));
            if (q->hadamard) {
                j.x = dw__quantize_rotated(q, scratch);
                j.row_stride = q->cols;
            }
        }
        j.sums = (dw__rounding_sums *)((char *)scratch + shared_bytes(q));
        j.worker_bands = (char *)j.sums + error_sums_bytes(q);
        j.band_bytes = band_bytes(q);
        dw__pool_run(error_tasks(q), measure_task, &j);
        if (atomic_load(&j.failed)) return measure_band(&j, 0, 0); /* for this thread's message */
        for (int64_t i = 0; i < error_tasks(q); i++) {
            sums.signal += j.sums[i].signal;
            sums.noise += j.sums[i].noise;
            sums.nonzero += j.sums[i].nonzero;
            sums.underflow += j.sums[i].underflow;
            sums.saturated += j.sums[i].saturated;
        }
    }
    const double found[DW_OPERAND_STATISTICS] = {sums.signal, sums.noise, sums.nonzero,
                                                 sums.underflow, sums.saturated};
    if (numbers) memcpy(numbers, found, sizeof found);
    return DW_OK;
}

/* ---- entries ------------------------------------------------------------------------------------------ */

static const dw__kernel quantize_bands = {
    .name = "cpu.quantize",
    .op = DW_OP_QUANTIZE,
    .source = "ours, codecs in C per instruction set",
    .needs = "rows of F32, BF16 or F16, and a BF16 result",
    .supports = supports,
    .workspace_bytes = workspace_bytes,
    .run = run,
    .tolerance_factor = 1.0,
};

static const dw__kernel quantization_error = {
    .name = "cpu.quantization_error",
    .op = DW_OP_QUANTIZATION_ERROR,
    .source = "ours, codecs in C per instruction set",
    .needs = "rows of F32, BF16 or F16",
    .supports = supports_error,
    .workspace_bytes = scratch_of_error,
    .run = run_error,
    /* The rounding of n additions of like signs has a standard deviation of sqrt(n / 3) u, here and in the
     * definition. */
    .tolerance_factor = 4.0,
};

static const dw__kernel quantize_blocks = {
    .name = "cpu.quantize_blocks",
    .op = DW_OP_QUANTIZE_BLOCKS,
    .source = "ours, codecs in C per instruction set",
    .needs = "rows of F32",
    .supports = supports_blocks,
    .workspace_bytes = scratch_of_blocks,
    .run = run_blocks,
    .tolerance_factor = 1.0,
};

static const dw__kernel dequantize_bands = {
    .name = "cpu.dequantize_blocks",
    .op = DW_OP_DEQUANTIZE_BLOCKS,
    .source = "ours, codecs in C per instruction set",
    .needs = "contiguous codes and scales, and a BF16 result",
    .supports = supports_codes,
    .workspace_bytes = scratch_of_codes,
    .run = run_codes,
    .tolerance_factor = 1.0,
};

const dw__kernel *const dw__kernels_cpu_quantize[] = {&quantize_bands, &quantization_error,
                                                      &quantize_blocks, &dequantize_bands, NULL};
