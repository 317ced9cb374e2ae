/* Kernels of attention that are loaded: one table per context, read without a lock, filled by the first call that
 * needs a shape. */
#include "kernel/cuda/attention.h"
#include "kernel/cuda/gpu_kernels.h"
#include <pthread.h>

typedef dw__attention_kernels *_Atomic slot;
enum { SHAPES = 5 << 9 };
static slot fast[DW__CONTEXTS][2][SHAPES];                       /* by pass, then shape */
static slot of_cutlass[DW__CONTEXTS][DW__CUTLASS_KERNELS][2][2]; /* wide heads, then causal */
static slot references[DW__CONTEXTS][2][2];                      /* by pass, then whether f16 */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;         /* of filling */

static size_t index_of(const dw__attention_shape *s) {
    static const unsigned char dims[] = {
        [64 / 32] = 0, [96 / 32] = 1, [128 / 32] = 2, [192 / 32] = 3, [256 / 32] = 4};
    size_t index = dims[s->head_dim / 32];
    const bool flags[] = {s->blackwell, s->serial, s->many_keys, s->f16,          s->softcap,
                          s->dropout,   s->packed, s->window,    s->deterministic};
    for (size_t i = 0; i < DW_COUNT(flags); i++) index = index << 1 | flags[i];
    return index;
}

static slot *slot_of(const dw__context *context, const dw__attention_shape *shape,
                     dw__attention_pass pass) {
    const dw__cutlass *library;
    if (!shape->cutlass) return &fast[context->index][pass][index_of(shape)];
    (void)dw__cutlass_load(&library); /* it is where the kernel is from */
    const size_t row = (size_t)(shape->cutlass - library->kernels);
    return &of_cutlass[context->index][row][shape->head_dim > 64][shape->window];
}

static dw__attention_kernels *loaded(slot *at) {
    return atomic_load_explicit(at, memory_order_acquire);
}

/* Kept for the life of the process: a context's kernels are few. */
static dw_status publish(slot *at, const dw__attention_kernels *made,
                         const dw__attention_kernels **kernels) {
    dw__attention_kernels *copy = dw__malloc(sizeof *copy);
    if (!copy) return dw__fail_memory("the kernels of a shape of attention", sizeof *copy);
    *copy = *made;
    atomic_store_explicit(at, copy, memory_order_release);
    *kernels = copy;
    return DW_OK;
}

/* ---- by definition -------------------------------------------------------------------------------- */

static dw_status load_reference(const dw__context *context, bool f16, dw__attention_pass pass,
                                slot *at, const dw__attention_kernels **kernels) {
    dw__attention_kernels made = {0};
    *kernels = loaded(at);
    if (*kernels) return DW_OK;
    dw__jit_variant variant =
        dw__attention_reference_variant(f16, pass, dw__attention_arch(context->capability >= 100));
    DW_RETURN_IF_FAILED(dw__jit_load(context, &variant, 0, &made.main));
    return publish(at, &made, kernels);
}

dw_status dw__attention_reference_of(const dw__context *context, bool f16, dw__attention_pass pass,
                                     const dw__attention_kernels **kernels) {
    slot *at = &references[context->index][pass][f16];
    *kernels = loaded(at);
    if (*kernels) return DW_OK;
    static pthread_mutex_t reference_lock =
        PTHREAD_MUTEX_INITIALIZER; /* the guard asks while it holds the other */
    pthread_mutex_lock(&reference_lock);
    dw_status status = load_reference(context, f16, pass, at, kernels);
    pthread_mutex_unlock(&reference_lock);
    return status;
}

/* ---- fast ------------------------------------------------------------------------------------------ */

static dw_status load_functions(const dw__context *context, const dw__attention_shape *shape,
                                dw__attention_pass pass, dw__attention_kernels *made) {
    bool backward = pass == DW__ATTENTION_BACKWARD;
    made->shape = *shape;
    if (shape->cutlass) return DW_OK; /* the runtime loads it */
    const dw__attention_tile *tile = dw__attention_tile_of(shape, pass);
    if (!tile)
        return dw__fail(DW_UNSUPPORTED,
                        "there is no kernel for head_dim %d; use another implementation",
                        shape->head_dim);
    if ((int)tile->shared_bytes > context->shared_bytes)
        return dw__fail(DW_UNSUPPORTED,
                        "the kernel needs %u bytes of shared memory, GPU %d (%s) gives %d",
                        tile->shared_bytes, context->ordinal, context->name, context->shared_bytes);
    const struct {
        const char *entry;
        unsigned shared_bytes;
        void **function;
    } entries[] = {
        {backward ? "sm90_attention_backward" : dw__attention_forward_entry(shape),
         tile->shared_bytes, &made->main},
        {"sm90_attention_backward_prepare", 0, &made->prepare},
        {"sm90_attention_backward_finish", 0, &made->finish},
    };
    made->tile = tile;
    for (size_t i = 0; i < (backward ? DW_COUNT(entries) : 1); i++) {
        dw__jit_variant variant = dw__attention_variant(shape, pass, entries[i].entry,
                                                        dw__attention_arch(shape->blackwell));
        DW_RETURN_IF_FAILED(
            dw__jit_load(context, &variant, entries[i].shared_bytes, entries[i].function));
    }
    return DW_OK;
}

static dw_status load_kernels(const dw__context *context, const dw__attention_shape *shape,
                              dw__attention_pass pass, slot *at,
                              const dw__attention_kernels **kernels) {
    dw__attention_kernels made = {0};
    *kernels = loaded(at); /* by another thread, meanwhile */
    if (*kernels) return DW_OK;
    DW_RETURN_IF_FAILED(load_functions(context, shape, pass, &made));
    if (dw__first_use_is_on())
        DW_RETURN_IF_FAILED(dw__attention_guard(context, shape, pass, &made));
    if (made.disabled) dw__log(DW_LOG_WARNING, "%s", made.reason);
    return publish(at, &made, kernels);
}

dw_status dw__attention_kernels_of(const dw__context *context, const dw__attention_shape *shape,
                                   dw__attention_pass pass, const dw__attention_kernels **kernels) {
    slot *at = slot_of(context, shape, pass);
    *kernels = loaded(at);
    if (*kernels) return DW_OK;
    pthread_mutex_lock(&lock);
    dw_status status = load_kernels(context, shape, pass, at, kernels);
    pthread_mutex_unlock(&lock);
    return status;
}
