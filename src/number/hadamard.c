/* Random Hadamard transform of runs along either axis. */
#include "base/base.h"
#include "number/number_loops.h"
#include "number/number_run.h"

DW_ISA_TABLE(dw__number_loops)

enum { MOST = 128, WORD_BITS = 32, LINES = 64 };

/* 1 / sqrt(2), 1 / sqrt(4) ... 1 / sqrt(128), as F32. */
static const float inverse_roots[] = {0x1.6a09e6p-1f, 0x1p-1f, 0x1.6a09e6p-2f, 0x1p-2f,
                                      0x1.6a09e6p-3f, 0x1p-3f, 0x1.6a09e6p-4f};

typedef struct hadamard_call {
    const dw__number_loops *loops;
    int size, axis;
    float scale, before[MOST], after[MOST];
    int64_t rows, cols, source_stride, result_stride, task_rows;
    const float *source;
    float *result;
} hadamard_call;

static void rows_task(void *context, int64_t index, int worker) {
    (void)worker;
    const hadamard_call *call = context;
    int64_t end = (index + 1) * call->task_rows;
    for (int64_t row = index * call->task_rows; row < end && row < call->rows; row++)
        call->loops->hadamard(call->source + row * call->source_stride, call->before, call->after,
                              call->size, call->scale, call->cols / call->size,
                              call->result + row * call->result_stride);
}

/* Transforms LINES columns of one run: transposes them, transforms the rows and transposes back. */
static void columns_task(void *context, int64_t index, int worker) {
    (void)worker;
    const hadamard_call *call = context;
    int64_t across = (call->cols + LINES - 1) / LINES;
    int64_t row = index / across * call->size, col = index % across * LINES;
    int64_t cols = call->cols - col < LINES ? call->cols - col : LINES;
    float turned[LINES * MOST];
    call->loops->transpose(call->source + row * call->source_stride + col, call->source_stride,
                           call->size, cols, turned, call->size);
    call->loops->hadamard(turned, call->before, call->after, call->size, call->scale, cols, turned);
    call->loops->transpose(turned, call->size, cols, call->size,
                           call->result + row * call->result_stride + col, call->result_stride);
}

static void choose_signs(const dw_hadamard_options *options, hadamard_call *call) {
    uint32_t words[MOST / WORD_BITS];
    call->loops->words(&options->random, 0, MOST / WORD_BITS, words);
    float *signs = options->inverse ? call->after : call->before;
    for (int i = 0; i < call->size; i++) {
        call->before[i] = call->after[i] = 1.0f;
        if (options->random_signs && words[i / WORD_BITS] >> i % WORD_BITS & 1) signs[i] = -1.0f;
    }
}

static dw_status check(const dw_hadamard_options *options, int64_t rows, int64_t cols,
                       int64_t row_stride, int64_t result_stride) {
    static const dw__struct known = {"dw_hadamard_options", sizeof *options, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, options, NULL));
    if (options->size < 2 || options->size > MOST || (options->size & (options->size - 1)) != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_hadamard: size is %d: expected 2, 4, 8, 16, 32, 64 or 128",
                        options->size);
    if (options->axis != 0 && options->axis != 1)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_hadamard: axis is %d: expected 0 or 1",
                        options->axis);
    int64_t elements;
    if (rows < 0 || cols < 0 || __builtin_mul_overflow(rows, cols, &elements))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_hadamard: the matrix is [%lld, %lld]: expected "
                        "sizes of 0 or more whose product fits into an int64",
                        (long long)rows, (long long)cols);
    if (row_stride < cols || result_stride < cols)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_hadamard: strides are %lld and %lld for %lld columns: expected at "
                        "least as many",
                        (long long)row_stride, (long long)result_stride, (long long)cols);
    int64_t along = options->axis ? cols : rows;
    if (along % options->size != 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "dw_hadamard: %lld %s are not a multiple of size %d: choose a smaller "
                        "size, or pad with zeros",
                        (long long)along, options->axis ? "columns" : "rows", options->size);
    return DW_OK;
}

dw_status dw_hadamard(const dw_hadamard_options *options, int64_t rows, int64_t cols,
                      const float *source, int64_t row_stride, float *result,
                      int64_t result_stride) {
    const dw_hadamard_options defaults = DW_HADAMARD_OPTIONS_DEFAULT;
    if (options == NULL) options = &defaults;
    DW_RETURN_IF_FAILED(check(options, rows, cols, row_stride, result_stride));
    if (rows == 0 || cols == 0) return DW_OK;
    enum { TASK = 1 << 15 };
    hadamard_call call = {.loops = dw__number_loops_now(),
                          .size = options->size,
                          .axis = options->axis,
                          .scale = inverse_roots[__builtin_ctz((unsigned)options->size) - 1],
                          .rows = rows,
                          .cols = cols,
                          .source_stride = row_stride,
                          .result_stride = result_stride,
                          .task_rows = cols < TASK ? TASK / cols : 1,
                          .source = source,
                          .result = result};
    choose_signs(options, &call);
    if (options->axis == 1)
        dw__number_run((rows - 1) / call.task_rows + 1, rows_task, &call);
    else
        dw__number_run(rows / options->size * ((cols + LINES - 1) / LINES), columns_task, &call);
    return DW_OK;
}
