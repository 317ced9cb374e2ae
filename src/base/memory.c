/* Host memory: counted, and made to fail on request by tests. */
#include "base/base.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { TENSOR_ALIGNMENT = 64 }; /* a cache line, and the widest vector register */

static _Atomic int64_t live;
static _Atomic int64_t remaining = -1; /* allocations that may still succeed; negative: no limit */
static _Atomic int64_t failures;
static _Atomic bool only_one; /* one allocation fails, which lifts the limit */

static void limit(int64_t count, bool once) {
    atomic_store(&failures, 0);
    atomic_store(&only_one, once);
    atomic_store(&remaining, count < 0 ? -1 : count);
}

void dw__memory_fail_after(int64_t count) { limit(count, false); }

void dw__memory_fail_once(int64_t count) { limit(count, true); }

int64_t dw__memory_failures(void) { return atomic_load(&failures); }

int64_t dw__memory_live(void) { return atomic_load(&live); }

bool dw__memory_allowed(void) {
    int64_t left = atomic_load_explicit(&remaining, memory_order_relaxed);
    while (left > 0) {
        if (atomic_compare_exchange_weak(&remaining, &left, left - 1)) return true;
    }
    if (left < 0) return true;
    atomic_fetch_add(&failures, 1);
    if (atomic_load(&only_one)) atomic_store(&remaining, -1);
    return false;
}

static void *counted(void *pointer) {
    if (pointer) atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return pointer;
}

void *dw__malloc(size_t bytes) {
    return dw__memory_allowed() ? counted(malloc(bytes ? bytes : 1)) : NULL;
}

void *dw__calloc(size_t count, size_t bytes) {
    if ((bytes && count > SIZE_MAX / bytes) || !dw__memory_allowed()) return NULL;
    return counted(count && bytes ? calloc(count, bytes) : calloc(1, 1));
}

void *dw__realloc(void *pointer, size_t bytes) {
    if (!pointer) return dw__malloc(bytes);
    return dw__memory_allowed() ? realloc(pointer, bytes ? bytes : 1) : NULL;
}

void dw__free(void *pointer) {
    if (!pointer) return;
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(pointer);
}

void *dw__malloc_aligned(size_t bytes) {
    if (bytes > SIZE_MAX - TENSOR_ALIGNMENT || !dw__memory_allowed()) return NULL;
    size_t rounded = (bytes + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT;
    return counted(aligned_alloc(TENSOR_ALIGNMENT, rounded ? rounded : TENSOR_ALIGNMENT));
}

void dw__free_aligned(void *pointer) { dw__free(pointer); }

dw_status dw__grow(void **items, size_t *capacity, size_t needed, size_t item_bytes) {
    enum { FIRST_CAPACITY = 8 };
    if (needed <= *capacity) return DW_OK;
    size_t wanted = *capacity > SIZE_MAX / 2 ? needed : 2 * *capacity;
    if (wanted < FIRST_CAPACITY) wanted = FIRST_CAPACITY;
    if (wanted < needed) wanted = needed;
    if (wanted > SIZE_MAX / item_bytes) return dw__fail_memory("a growing array", SIZE_MAX);
    void *moved = dw__realloc(*items, wanted * item_bytes);
    if (!moved) return dw__fail_memory("a growing array", wanted * item_bytes);
    *items = moved;
    *capacity = wanted;
    return DW_OK;
}
