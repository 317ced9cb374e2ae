/* Kernels of matrix products that are loaded: one table per context, read without a lock, filled by the first call that
 * needs a shape. */
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/product.h"
#include <pthread.h>

typedef dw__product_kernel *_Atomic slot;
static slot fast[DW__CONTEXTS][DW__PRODUCT_SHAPES];
static void *_Atomic references[DW__CONTEXTS][2][2];     /* by f16, then f32 output */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of filling */

bool dw__product_runs_on(int capability) { return capability == 100 || capability == 103; }

dw_status dw__product_reference_of(const dw__context *context, bool f16, bool f32_output,
                                   void **function) {
    void *_Atomic *at = &references[context->index][f16][f32_output];
    *function = atomic_load_explicit(at, memory_order_acquire);
    if (*function) return DW_OK;
    dw__jit_variant variant = dw__product_reference_variant(context->capability, f16, f32_output);
    DW_RETURN_IF_FAILED(dw__jit_load(context, &variant, 0, function));
    atomic_store_explicit(at, *function, memory_order_release); /* by another thread: the same */
    return DW_OK;
}

/* ---- fast ------------------------------------------------------------------------------------------ */

static dw_status load_function(const dw__context *context, const dw__product_shape *shape,
                               dw__product_kernel *made) {
    const dw__product_tile *tile = &dw__product_tiles[shape->tile];
    if ((int)tile->shared_bytes > context->shared_bytes)
        return dw__fail(DW_UNSUPPORTED,
                        "the kernel needs %u bytes of shared memory, GPU %d (%s) gives %d",
                        tile->shared_bytes, context->ordinal, context->name, context->shared_bytes);
    dw__jit_variant variant = dw__product_variant(shape);
    made->shape = *shape;
    return dw__jit_load(context, &variant, tile->shared_bytes, &made->function);
}

/* Three tiles of rows and two of columns, the last of each not full, on two blocks (or pairs): each takes
 * three, of three steps each, so that both accumulators and every stage of the ring come round again. */
enum { EXTRA_ROWS = 45, EXTRA_COLUMNS = 33, STEPS = 3, MISSING = 27, CLUSTERS = 2 };

static dw_status launch_few(const dw__product_subject *subject, const dw_product *call,
                            const dw__context *context) {
    const dw__product_kernel *kernel = subject->kernel;
    const int ctas = dw__product_tiles[kernel->shape.tile].ctas;
    return dw__product_launch(call, context, CLUSTERS * ctas, kernel);
}

static dw_product case_of(const dw__product_shape *s) {
    static const dw_scheme schemes[] = {DW_SCHEME_MXFP8_E4M3, DW_SCHEME_MXFP8_E4M3, DW_SCHEME_NVFP4,
                                        DW_SCHEME_MXFP4};
    const dw_dtype type = s->f16 ? DW_F16 : DW_BF16;
    return (dw_product){
        .dtype = type,
        .output = s->output == DW_GEMM_OUTPUT_F32 ? DW_F32 : type,
        .m = 2 * dw__product_tile_rows(s) + EXTRA_ROWS,
        .n = dw__product_tile_columns(s) + EXTRA_COLUMNS,
        .k = STEPS * dw__product_step(s->kind) - MISSING,
        .alpha = 0.75f,
        .activation = s->activation,
        .quantized = s->kind != DW__PRODUCT_DENSE,
        .quantized_d = s->output == DW_GEMM_OUTPUT_MXFP8,
        .scheme_a = s->e5m2_a ? DW_SCHEME_MXFP8_E5M2 : schemes[s->kind],
        .scheme_b = s->e5m2_b ? DW_SCHEME_MXFP8_E5M2 : schemes[s->kind],
    };
}

static dw_status compare(const dw__context *context, dw__product_kernel *kernel) {
    const dw__product_shape *shape = &kernel->shape;
    const dw__jit_variant variant = dw__product_variant(shape);
    dw__text name = {0};
    dw_status status = DW_OK;
    DW_TRY(dw__jit_variant_name(&variant, &name));
    const dw__product_subject subject = {
        .name = name.text,
        .has_reference = dw__product_has_reference(shape),
        .call = case_of(shape),
        .bias = shape->bias,
        .residual = shape->residual,
        .groups = 1,
        .kernel = kernel,
        .launch = launch_few,
    };
    DW_TRY(dw__product_guard(context, &subject, kernel->reason));
    kernel->disabled = kernel->reason[0] != 0;

cleanup:
    dw__text_free(&name);
    return status;
}

/* Kept for the life of the process, as compared or not. */
static dw_status load_kernel(const dw__context *context, const dw__product_shape *shape, slot *at,
                             const dw__product_kernel **kernel) {
    dw__product_kernel *made;
    *kernel = atomic_load_explicit(at, memory_order_acquire); /* by another thread, meanwhile */
    if (*kernel) return DW_OK;
    made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("the kernel of a product", sizeof *made);
    dw_status status = load_function(context, shape, made);
    if (status == DW_OK && dw__first_use_is_on()) status = compare(context, made);
    if (status != DW_OK) {
        dw__free(made);
        return status;
    }
    if (made->disabled) dw__log(DW_LOG_WARNING, "%s", made->reason);
    atomic_store_explicit(at, made, memory_order_release);
    *kernel = made;
    return DW_OK;
}

dw_status dw__product_kernel_of(const dw__context *context, const dw__product_shape *shape,
                                const dw__product_kernel **kernel) {
    slot *at = &fast[context->index][dw__product_index(shape)];
    *kernel = atomic_load_explicit(at, memory_order_acquire);
    if (*kernel) return DW_OK;
    pthread_mutex_lock(&lock);
    dw_status status = load_kernel(context, shape, at, kernel);
    pthread_mutex_unlock(&lock);
    return status;
}
