/* Kernels of quantization: variants, those that are loaded (one table per context, read without a lock, filled by the
 * first call that needs a shape), and their launch. */
#include "common/quantize_params.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/quantize.h"
#include <pthread.h>

bool dw__quantize_runs_on(int capability) {
    return capability == 90 || capability == 100 || capability == 103;
}
const char *dw__quantize_arch(int capability) { return capability == 90 ? "sm_90a" : "sm_100f"; }

/* ---- variants -------------------------------------------------------------------------------------- */

_Static_assert(DW_QUANTIZE_MXFP8_E4M3 == (int)DW_SCHEME_MXFP8_E4M3 &&
                   DW_QUANTIZE_MXFP8_E5M2 == (int)DW_SCHEME_MXFP8_E5M2 &&
                   DW_QUANTIZE_MXFP4 == (int)DW_SCHEME_MXFP4 &&
                   DW_QUANTIZE_NVFP4 == (int)DW_SCHEME_NVFP4 &&
                   DW_QUANTIZE_RCEIL == (int)DW_SCALE_RCEIL &&
                   DW_QUANTIZE_FLOOR == (int)DW_SCALE_FLOOR &&
                   DW_QUANTIZE_CEIL == (int)DW_SCALE_CEIL,
               "passed on as they are");

dw__quantize_shape dw__quantize_shape_of(const dw_quantize *c) {
    const bool nvfp4 = c->scheme == DW_SCHEME_NVFP4;
    return (dw__quantize_shape){
        .dtype = c->dtype,
        .scheme = c->scheme,
        .rule = nvfp4                               ? DW_SCALE_AMAX
                : c->scale_rule == DW_SCALE_DEFAULT ? DW_SCALE_RCEIL
                                                    : c->scale_rule,
        .along_rows = c->along_rows.wanted,
        .along_cols = c->along_cols.wanted,
        .square = c->square,
    };
}

static int input_of(dw_dtype type) {
    return type == DW_F32 ? DW_QUANTIZE_F32 : type == DW_F16 ? DW_QUANTIZE_F16 : DW_QUANTIZE_BF16;
}
static int rule_of(const dw__quantize_shape *s) { /* NVFP4's is not read */
    return s->rule == DW_SCALE_AMAX ? DW_QUANTIZE_RCEIL : (int)s->rule;
}

dw__jit_variant dw__quantize_variant(const dw__quantize_shape *s, const char *entry,
                                     const char *arch) {
    dw__jit_variant v = {.source = "common/quantize.cu", .entry = entry, .arch = arch};
    dw__jit_add_define(&v, "INPUT", input_of(s->dtype));
    dw__jit_add_define(&v, "SCHEME", (int)s->scheme);
    dw__jit_add_define(&v, "RULE", rule_of(s));
    dw__jit_add_define(&v, "ROWS", s->along_rows);
    dw__jit_add_define(&v, "COLUMNS", s->along_cols);
    dw__jit_add_define(&v, "SQUARE", s->square);
    return v;
}

/* ---- loaded ---------------------------------------------------------------------------------------- */

typedef dw__quantize_kernel *_Atomic slot;
enum { INPUTS = 3, RULES = 4 };
static slot loaded[DW__CONTEXTS][INPUTS][DW_SCHEME_COUNT][RULES]
                  [8];                                   /* the last by directions and square */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of filling */

/* Kept for the life of the process, as compared or not. */
static dw_status load_kernel(const dw__context *context, const dw__quantize_shape *shape, slot *at,
                             const dw__quantize_kernel **kernel) {
    const char *arch = dw__quantize_arch(context->capability);
    const dw__jit_variant blocks = dw__quantize_variant(shape, "quantize_blocks", arch),
                          amax = dw__quantize_variant(shape, "quantize_amax", arch);
    dw_status status = DW_OK;
    *kernel = atomic_load_explicit(at, memory_order_acquire); /* by another thread, meanwhile */
    if (*kernel) return DW_OK;
    dw__quantize_kernel *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a kernel of quantization", sizeof *made);
    made->shape = *shape;
    DW_TRY(dw__jit_load(context, &blocks, 0, &made->blocks));
    if (shape->scheme == DW_SCHEME_NVFP4) DW_TRY(dw__jit_load(context, &amax, 0, &made->amax));
    if (dw__gpu_guard_is_on()) DW_TRY(dw__quantize_guard(context, made));
    if (made->disabled) dw__log(DW_LOG_WARNING, "%s", made->reason);
    atomic_store_explicit(at, made, memory_order_release);
    *kernel = made;
    made = NULL;

cleanup:
    dw__free(made);
    return status;
}

dw_status dw__quantize_kernel_of(const dw__context *context, const dw__quantize_shape *s,
                                 const dw__quantize_kernel **kernel) {
    slot *at = &loaded[context->index][input_of(s->dtype)][s->scheme][rule_of(s)]
                      [s->along_rows | s->along_cols << 1 | s->square << 2];
    *kernel = atomic_load_explicit(at, memory_order_acquire);
    if (*kernel) return DW_OK;
    pthread_mutex_lock(&lock);
    dw_status status = load_kernel(context, s, at, kernel);
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- launch ---------------------------------------------------------------------------------------- */

static dw_quantized result_of(const dw_quantized_matrix *to) {
    return (dw_quantized){to->codes, to->stride, to->scales};
}

dw_status dw__quantize_launch(const dw_quantize *c, const dw__context *context,
                              const dw__quantize_kernel *kernel) {
    const bool find_amax = kernel->amax && c->amax;
    dw_quantize_params params = {
        .source = c->source,
        .row_stride = c->row_stride,
        .rows = (int)c->rows,
        .columns = (int)c->cols,
        .along_rows = result_of(&c->along_rows),
        .along_columns = result_of(&c->along_cols),
        .amax = find_amax ? c->amax : NULL,
        .tensor_scale = c->tensor_scale,
    };
    void *arguments[] = {&params};
    dw__launch launch = {
        .name = "quantize_amax",
        .function = kernel->amax,
        .grid = {(unsigned)(DW_QUANTIZE_TILES(c->rows) * DW_QUANTIZE_TILES(c->cols)), 1, 1},
        .block = {DW_QUANTIZE_THREADS, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    };
    if (find_amax) {
        DW_RETURN_IF_FAILED(context->device->fill_on(c->amax, 0, sizeof *c->amax, c->stream));
        DW_RETURN_IF_FAILED(context->device->launch(&launch));
    }
    launch.name = "quantize_blocks";
    launch.function = kernel->blocks;
    return context->device->launch(&launch);
}
