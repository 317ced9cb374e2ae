/* quantize for F32 matrices: the codecs (number/) round in the operation's scratch. The kernel then decodes
 * the codes to contiguous BF16, band by band. */
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/quantization.h"
#include "number/half.h"
#include <stdatomic.h>

static const int64_t ROUND_TASK = 1 << 14; /* elements */

typedef struct job {
    dw__quantization q;
    const float *x;
    int64_t row_stride;
    uint16_t *y;
    void *scratch;
    char *worker_bands;
    size_t band_bytes;
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
    DW_RETURN_IF_FAILED(dw__quantize_decode(q, j->scratch, first, count, band));
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

static bool fits(const dw__call *call) {
    const dw__tensor *x = &call->inputs[0];
    return x->dtype == DW_F32 && (x->stride[1] == 1 || x->shape[1] == 1) &&
           (x->stride[0] >= x->shape[1] || x->shape[0] == 1) && call->outputs[0].dtype == DW_BF16;
}

static size_t shared_bytes(const dw__quantization *q) {
    return (dw__quantize_scratch(q) + 63) / 64 * 64;
}

static size_t scratch_bytes(const dw__call *call) {
    dw__quantization q;
    if (dw__quantization_of(call, &q) != DW_OK || q.bf16) return 0;
    return shared_bytes(&q) + (size_t)dw__pool_threads() * band_bytes(&q);
}

static dw_status run(const dw__call *call, void *scratch) {
    job j = {.x = call->inputs[0].data, .y = call->outputs[0].data, .scratch = scratch};
    float scale = 1.0f;
    DW_RETURN_IF_FAILED(dw__quantization_of(call, &j.q));
    const dw__quantization *q = &j.q;
    j.row_stride = q->rows == 1 ? q->cols : call->inputs[0].stride[0];
    bool empty = q->rows == 0 || q->cols == 0;
    if (q->bf16) {
        if (j.y && !empty)
            dw__pool_run((q->rows + rows_per_task(q) - 1) / rows_per_task(q), round_task, &j);
    } else if (!empty) {
        DW_RETURN_IF_FAILED(dw__quantize_encode(q, j.x, j.row_stride, scratch, &scale));
        j.worker_bands = (char *)scratch + shared_bytes(q);
        j.band_bytes = band_bytes(q);
        int64_t bands = (band_extent(q) + DW_QUANTIZE_BAND - 1) / DW_QUANTIZE_BAND;
        if (j.y) dw__pool_run(bands, decode_task, &j);
        if (atomic_load(&j.failed)) return decode_band(&j, 0, 0); /* for this thread's message */
    }
    if (call->outputs[1].data) *(float *)call->outputs[1].data = scale;
    return DW_OK;
}

static const dw__kernel quantize_bands = {
    .name = "cpu.quantize",
    .op = DW_OP_QUANTIZE,
    .source = "ours, codecs in C per instruction set",
    .fits = fits,
    .scratch_bytes = scratch_bytes,
    .run = run,
    .tolerance_factor = 1.0,
};

const dw__kernel *const dw__kernels_cpu_quantize[] = {&quantize_bands, NULL};
