/* The cache of loaded variants: one hash table for all kernels and contexts.
 *
 * A bucket is a list that only grows at its head, so that readers need no lock: a call computes a hash of three numbers
 * and follows one or two pointers. The lock serializes first uses. It is recursive because a first-use check loads the
 * family's reference, which is a variant like any other.
 */
#include "kernel/gpu_kernel.h"
#include <pthread.h>

enum { BUCKET_BITS = 10 };
static dw__variant *_Atomic buckets[1 << BUCKET_BITS];
static pthread_mutex_t lock;
static pthread_once_t lock_once = PTHREAD_ONCE_INIT;

static void make_lock(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

static dw__variant *_Atomic *bucket_of(int context, const dw__kernel *kernel, uint64_t params) {
    uint64_t hash = (params ^ (uintptr_t)kernel) * 0x9E3779B97F4A7C15u;
    hash = (hash ^ hash >> 32 ^ (uint64_t)context) * 0xD6E8FEB86659FD93u;
    return &buckets[hash >> (64 - BUCKET_BITS)];
}

static const dw__variant *find(dw__variant *_Atomic *bucket, int context, const dw__kernel *kernel,
                               uint64_t params) {
    const dw__variant *v = atomic_load_explicit(bucket, memory_order_acquire);
    while (v && (v->params != params || v->kernel != kernel || v->context != context)) v = v->next;
    return v;
}

static dw_status load_functions(const dw__context *context, dw__variant *v) {
    dw__entry_point points[DW__ENTRY_POINTS] = {0};
    if (!v->kernel->entry_points) return DW_OK;
    DW_RETURN_IF_FAILED(v->kernel->entry_points(v->kernel, context->capability, v->params, points));
    for (int i = 0; i < DW__ENTRY_POINTS; i++)
        if ((int)points[i].shared_bytes > context->shared_bytes)
            return dw__fail(
                DW_UNSUPPORTED, "the kernel needs %u bytes of shared memory, GPU %d (%s) gives %d",
                points[i].shared_bytes, context->ordinal, context->name, context->shared_bytes);
    if (context->plans_only) return DW_OK;
    for (int i = 0; i < DW__ENTRY_POINTS && points[i].code.entry; i++)
        DW_RETURN_IF_FAILED(
            dw__jit_load(context, &points[i].code, points[i].shared_bytes, &v->functions[i]));
    return DW_OK;
}

static dw_status add(dw__variant *_Atomic *bucket, const dw__context *context,
                     const dw__kernel *kernel, uint64_t params, const dw__variant **variant) {
    dw_status status = DW_OK;
    *variant = find(bucket, context->index, kernel, params); /* another thread may have added it */
    if (*variant) return DW_OK;
    dw__variant *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a loaded kernel", sizeof *made);
    made->kernel = kernel;
    made->params = params;
    made->context = context->index;
    DW_TRY(load_functions(context, made));
    if (kernel->first_use && !context->plans_only && dw__first_use_is_on())
        DW_TRY(dw__first_use_check(context, made));
    if (made->disabled) dw__log(DW_LOG_WARNING, "%s", made->reason);
    made->next = atomic_load_explicit(bucket, memory_order_relaxed);
    atomic_store_explicit(bucket, made, memory_order_release);
    *variant = made;
    made = NULL;

cleanup:
    dw__free(made);
    return status;
}

dw_status dw__variant_of(const dw__context *context, const dw__kernel *kernel, uint64_t params,
                         const dw__variant **variant) {
    dw__variant *_Atomic *bucket = bucket_of(context->index, kernel, params);
    *variant = find(bucket, context->index, kernel, params);
    if (*variant) return DW_OK;
    pthread_once(&lock_once, make_lock);
    pthread_mutex_lock(&lock);
    dw_status status = add(bucket, context, kernel, params, variant);
    pthread_mutex_unlock(&lock);
    return status;
}
