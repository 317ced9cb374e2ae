/* Global memory, and the resolution of addresses in every space. Global memory consists of allocations of host
 * memory, so that a global address is the host's address; each allocation has one bit per byte that says whether the
 * byte was written.
 */
#include "emulator/load_uses.h"
#include "emulator/race.h"
#include "emulator/translate.h"
#include "emulator/written.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef struct allocation {
    uintptr_t first, last; /* `last` is one past the end */
    uint8_t *defined;      /* NULL: all bytes count as written */
    void *block;           /* block to free; NULL: not owned */
} allocation;

struct dw__emu_memory {
    pthread_rwlock_t lock;
    struct {
        allocation *items; /* sorted by address */
        size_t count, capacity;
    } allocations;
    struct {
        allocation *items; /* freed by kernels; kept until the launch has ended */
        size_t count, capacity;
    } retired;
};

/* ---- allocations --------------------------------------------------------------------------- */

dw_status dw__emu_memory_create(dw__emu_memory **out) {
    dw__emu_memory *memory = dw__calloc(1, sizeof *memory);
    if (!memory) return dw__fail_memory("an emulated device", sizeof *memory);
    pthread_rwlock_init(&memory->lock, NULL);
    *out = memory;
    return DW_OK;
}

static void release(const allocation *a) {
    dw__free(a->defined);
    dw__free_aligned(a->block);
}

void dw__emu_memory_destroy(dw__emu_memory *memory) {
    if (!memory) return;
    for (size_t i = 0; i < memory->allocations.count; i++) release(&memory->allocations.items[i]);
    dw__free(memory->allocations.items);
    dw__emu_memory_collect(memory);
    dw__free(memory->retired.items);
    pthread_rwlock_destroy(&memory->lock);
    dw__free(memory);
}

/* Returns the index of the first allocation that ends after the address. */
static size_t position_of(const dw__emu_memory *memory, uintptr_t address) {
    size_t low = 0, high = memory->allocations.count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memory->allocations.items[middle].last <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Removes registered ranges that overlap a new allocation: their owner has freed them without unregistering them. */
static void forget_registered(dw__emu_memory *memory, const allocation *made) {
    allocation *items = memory->allocations.items;
    size_t kept = position_of(memory, made->first), at = kept;
    for (; at < memory->allocations.count && items[at].first < made->last; at++)
        if (items[at].block) items[kept++] = items[at];
    memmove(items + kept, items + at, (memory->allocations.count - at) * sizeof *items);
    memory->allocations.count -= at - kept;
}

static dw_status add(dw__emu_memory *memory, const allocation *made) {
    pthread_rwlock_wrlock(&memory->lock);
    if (memory->allocations.count > 0) forget_registered(memory, made);
    size_t at = position_of(memory, made->first);
    dw_status status = DW_PUSH(&memory->allocations, *made);
    if (status == DW_OK) {
        allocation *items = memory->allocations.items;
        memmove(items + at + 1, items + at, (memory->allocations.count - 1 - at) * sizeof *items);
        items[at] = *made;
    }
    pthread_rwlock_unlock(&memory->lock);
    return status;
}

/* Allocations start at multiples of 256 bytes, like the driver's, with at least 256 unused bytes on either side. */
#define GUARD 256
dw_status dw__emu_memory_allocate(dw__emu_memory *memory, size_t bytes, void **address) {
    if (bytes > SIZE_MAX / 2) return dw__fail_memory("emulated memory", bytes);
    allocation made = {.block = dw__malloc_aligned(bytes + 3 * GUARD),
                       .defined = dw__calloc(bytes / 8 + 1, 1)};
    if (!made.block || !made.defined) {
        release(&made);
        return dw__fail_memory("emulated memory", bytes);
    }
    made.first = ((uintptr_t)made.block + 2 * GUARD - 1) / GUARD * GUARD;
    made.last = made.first + (bytes ? bytes : 1);
    dw_status status = add(memory, &made);
    if (status != DW_OK) {
        release(&made);
        return dw__fail_memory("emulated memory", bytes);
    }
    *address = (void *)made.first;
    return DW_OK;
}

dw_status dw__emu_memory_register(dw__emu_memory *memory, void *address, size_t bytes) {
    allocation made = {.first = (uintptr_t)address,
                       .last = (uintptr_t)address + (bytes ? bytes : 1)};
    return add(memory, &made);
}

/* Removes an allocation from the list; with `later`, moves it to the retired ones. */
static dw_status take_out(dw__emu_memory *memory, void *address, allocation *found, bool later) {
    dw_status status = DW_OK;
    pthread_rwlock_wrlock(&memory->lock);
    size_t at = position_of(memory, (uintptr_t)address);
    allocation *items = memory->allocations.items;
    bool here = at < memory->allocations.count && items[at].first == (uintptr_t)address;
    if (here && later) status = DW_PUSH(&memory->retired, items[at]);
    if (here && status == DW_OK) {
        *found = items[at];
        memmove(items + at, items + at + 1, (--memory->allocations.count - at) * sizeof *items);
    }
    pthread_rwlock_unlock(&memory->lock);
    return here ? status
                : dw__fail(DW_INVALID_ARGUMENT,
                           "%p was not allocated on the emulated device, or was already freed",
                           address);
}

dw_status dw__emu_memory_release(dw__emu_memory *memory, void *address) {
    allocation found;
    DW_RETURN_IF_FAILED(take_out(memory, address, &found, false));
    release(&found);
    return DW_OK;
}

dw_status dw__emu_memory_retire(dw__emu_memory *memory, void *address) {
    allocation found;
    return take_out(memory, address, &found, true);
}

void dw__emu_memory_collect(dw__emu_memory *memory) {
    pthread_rwlock_wrlock(&memory->lock);
    for (size_t i = 0; i < memory->retired.count; i++) release(&memory->retired.items[i]);
    memory->retired.count = 0;
    pthread_rwlock_unlock(&memory->lock);
}

/* Finds the allocation that contains the address. */
static bool find(const dw__emu_memory *memory, uintptr_t address, allocation *found) {
    dw__emu_memory *locked = (dw__emu_memory *)memory;
    pthread_rwlock_rdlock(&locked->lock);
    size_t at = position_of(memory, address);
    bool here = at < memory->allocations.count && memory->allocations.items[at].first <= address;
    if (here) *found = memory->allocations.items[at];
    pthread_rwlock_unlock(&locked->lock);
    return here;
}

bool dw__emu_memory_holds(const dw__emu_memory *memory, const void *address, size_t bytes) {
    allocation a;
    return find(memory, (uintptr_t)address, &a) && bytes <= a.last - (uintptr_t)address;
}

void dw__emu_memory_describe(const dw__emu_memory *memory, uint64_t address, char *text,
                             size_t bytes) {
    dw__emu_memory *locked = (dw__emu_memory *)memory;
    pthread_rwlock_rdlock(&locked->lock);
    size_t at = position_of(memory, (uintptr_t)address);
    const allocation *items = memory->allocations.items;
    const allocation *before = at > 0 ? &items[at - 1] : NULL;
    if (at < memory->allocations.count && items[at].first <= address)
        snprintf(text, bytes, "%llu bytes before the end of the allocation of %llu bytes at 0x%llx",
                 (unsigned long long)(items[at].last - address),
                 (unsigned long long)(items[at].last - items[at].first),
                 (unsigned long long)items[at].first);
    else if (before && address - before->last < 1 << 20)
        snprintf(text, bytes, "%llu bytes past the end of the allocation of %llu bytes at 0x%llx",
                 (unsigned long long)(address - before->last),
                 (unsigned long long)(before->last - before->first),
                 (unsigned long long)before->first);
    else
        snprintf(text, bytes, "no allocation is near");
    pthread_rwlock_unlock(&locked->lock);
}

/* ---- what has been written ----------------------------------------------------------------- */

void dw__emu_memory_mark(dw__emu_memory *memory, const void *address, size_t bytes, bool defined) {
    allocation a;
    if (!find(memory, (uintptr_t)address, &a) || !a.defined) return;
    size_t first = (uintptr_t)address - a.first, most = a.last - (uintptr_t)address;
    dw__set_written(a.defined, first, bytes < most ? bytes : most, defined);
}

void dw__emu_memory_copy_marks(dw__emu_memory *memory, const void *to, const void *from,
                               size_t bytes) {
    allocation a, b;
    if (!find(memory, (uintptr_t)to, &a) || !find(memory, (uintptr_t)from, &b) || !a.defined)
        return;
    const size_t first = (uintptr_t)to - a.first, other = (uintptr_t)from - b.first;
    if (!b.defined || dw__count_unwritten(b.defined, other, bytes) == 0) {
        dw__set_written(a.defined, first, bytes, true);
        return;
    }
    for (size_t i = 0; i < bytes; i++)
        dw__set_written(a.defined, first + i, 1, dw__count_unwritten(b.defined, other + i, 1) == 0);
}

bool dw__emu_memory_touch(dw__emu_memory *memory, uint64_t address, uint32_t bytes, bool write,
                          uint32_t *undefined) {
    allocation a;
    *undefined = 0;
    if (!find(memory, (uintptr_t)address, &a) || bytes > a.last - address) return false;
    if (!a.defined) return true;
    if (write)
        dw__set_written(a.defined, address - a.first, bytes, true);
    else
        *undefined = dw__count_unwritten(a.defined, address - a.first, bytes);
    return true;
}

/* ---- where an address leads ---------------------------------------------------------------- */

static const char *name_of(dw__emu_access access) {
    return (access & DW__ATOMIC) == DW__ATOMIC ? "updates" : access & DW__READ ? "reads" : "writes";
}

static void found_undefined(dw__emu_warp *w, int lane, const char *space, uint64_t address,
                            uint32_t bytes, uint32_t undefined) {
    dw__emu_found(w, lane, DW__FOUND_UNDEFINED,
                  "reads %u bytes of %s memory at 0x%llx, of which %u were never written", bytes,
                  space, (unsigned long long)address, undefined);
}

static void *reach_global(dw__emu_warp *w, int lane, uint64_t address, uint32_t bytes,
                          dw__emu_access access) {
    const dw__emu_grid *grid = w->cta->cluster->grid;
    if (address < w->recent.first || address >= w->recent.last) {
        allocation a = {0};
        if (find(grid->memory, (uintptr_t)address, &a)) {
            w->recent.first = a.first, w->recent.last = a.last, w->recent.defined = a.defined;
        } else {
            w->recent.first = w->recent.last = 0;
        }
    }
    if (address < w->recent.first || address >= w->recent.last ||
        bytes > w->recent.last - address) {
        char where[160];
        dw__emu_memory_describe(grid->memory, address, where, sizeof where);
        dw__emu_found(w, lane, DW__FOUND_BOUNDS, "%s %u bytes of global memory at 0x%llx: %s",
                      name_of(access), bytes, (unsigned long long)address, where);
        return NULL;
    }
    if (w->recent.defined) {
        size_t first = address - w->recent.first;
        uint32_t undefined = access & DW__READ && grid->check
                                 ? dw__count_unwritten(w->recent.defined, first, bytes)
                                 : 0;
        if (undefined) found_undefined(w, lane, "global", address, bytes, undefined);
        if (access & DW__WRITE) dw__set_written(w->recent.defined, first, bytes, true);
    }
    return (void *)(uintptr_t)address;
}

dw__emu_cta *dw__emu_block_at(const dw__emu_cluster *cluster, uint32_t address, uint64_t bytes,
                              uint32_t *offset) {
    const uint32_t rank = address >> DW__RANK_SHIFT;
    *offset = address & DW__OFFSET_MASK;
    if (rank >= cluster->cta_count || *offset < DW__SHARED_FIRST ||
        *offset + bytes > cluster->ctas[rank].shared_bytes)
        return NULL;
    return &cluster->ctas[rank];
}

unsigned char *dw__emu_shared(dw__emu_warp *w, int lane, uint32_t address, uint32_t bytes,
                              dw__emu_cta **owner) {
    const dw__emu_cluster *cluster = w->cta->cluster;
    const uint32_t rank = address >> DW__RANK_SHIFT;
    uint32_t offset;
    *owner = dw__emu_block_at(cluster, address, bytes, &offset);
    if (!*owner) {
        dw__emu_found(
            w, lane, DW__FOUND_BOUNDS,
            "%u bytes of shared memory at 0x%x: block %u of the cluster has addresses 0x%x to "
            "0x%x, and the cluster has %u blocks",
            bytes, address, rank, DW__SHARED_FIRST,
            rank < cluster->cta_count ? cluster->ctas[rank].shared_bytes : 0, cluster->cta_count);
        return NULL;
    }
    return (*owner)->shared + offset;
}

/* Returns whether reading unwritten bytes of local memory counts as an error. Padding of structures may be copied. If
 * other threads see the copy, unwritten bytes count as padding if they are part of a word, or less than one. */
static bool matters(const dw__emu_warp *w, uint32_t bytes, uint32_t undefined) {
    const dw__emu_kernel *kernel = w->cta->cluster->grid->kernel;
    const dw__emu_use use = (dw__emu_use)kernel->load_uses[kernel->from[w->now.pc]];
    return use == DW__USE_COMPUTED ||
           (use == DW__USE_PUBLISHED && undefined == bytes && bytes >= 4);
}

static void *reach_local(dw__emu_warp *w, int lane, uint64_t offset, uint32_t bytes,
                         dw__emu_access access) {
    const size_t first = (size_t)lane * w->cta->cluster->grid->kernel->local_bytes + offset;
    const uint32_t undefined = access & DW__READ && w->cta->cluster->grid->check
                                   ? dw__count_unwritten(w->local_defined, first, bytes)
                                   : 0;
    if (undefined && matters(w, bytes, undefined))
        found_undefined(w, lane, "local", offset, bytes, undefined);
    if (access & DW__WRITE) dw__set_written(w->local_defined, first, bytes, true);
    return w->local + first;
}

static void *reach_shared(dw__emu_warp *w, int lane, uint32_t address, uint32_t bytes,
                          dw__emu_access access) {
    dw__emu_cta *owner;
    unsigned char *at = dw__emu_shared(w, lane, address, bytes, &owner);
    if (!at) return NULL;
    size_t first = (size_t)(at - owner->shared);
    uint32_t undefined = access & DW__READ && w->cta->cluster->grid->check
                             ? dw__count_unwritten(owner->defined, first, bytes)
                             : 0;
    if (undefined) found_undefined(w, lane, "shared", address, bytes, undefined);
    int how = (int)access;
    if (w->clock && w->storing && memcmp(at, w->storing, bytes) == 0 &&
        dw__count_unwritten(owner->defined, first, bytes) == 0)
        how |= DW__SAME;
    if (access & DW__WRITE) dw__set_written(owner->defined, first, bytes, true);
    if (w->clock) dw__emu_race_touch(w, lane, owner, (uint32_t)first, bytes, how);
    return at;
}

void *dw__emu_reach(dw__emu_warp *w, dw__ptx_space space, int lane, uint64_t address,
                    uint32_t bytes, uint32_t align, dw__emu_access access) {
    const dw__emu_kernel *kernel = w->cta->cluster->grid->kernel;
    if (address % align) {
        dw__emu_found(w, lane, DW__FOUND_ALIGNMENT,
                      "%s %u bytes at 0x%llx, which is not a multiple of %u", name_of(access),
                      bytes, (unsigned long long)address, align);
        return NULL;
    }
    const uint64_t window = address & DW__WINDOW_MASK;
    if (space == DW__PTX_REG)
        space = window == DW__SHARED_WINDOW  ? DW__PTX_SHARED
                : window == DW__LOCAL_WINDOW ? DW__PTX_LOCAL
                : window == DW__PARAM_WINDOW ? DW__PTX_PARAM
                                             : DW__PTX_GLOBAL;
    const uint64_t offset = address & ~DW__WINDOW_MASK;
    switch (space) {
    case DW__PTX_SHARED:
        if (offset <= UINT32_MAX) return reach_shared(w, lane, (uint32_t)offset, bytes, access);
        break;
    case DW__PTX_LOCAL:
        if (offset + bytes <= kernel->local_bytes)
            return reach_local(w, lane, offset, bytes, access);
        break;
    case DW__PTX_PARAM:
        if (offset + bytes <= kernel->parameter_bytes && !(access & DW__WRITE))
            return (unsigned char *)(uintptr_t)w->cta->cluster->grid->parameters + offset;
        break;
    default: return reach_global(w, lane, address, bytes, access);
    }
    dw__emu_found(w, lane, DW__FOUND_BOUNDS, "%s %u bytes of %s memory at 0x%llx, beyond its end",
                  name_of(access), bytes,
                  space == DW__PTX_SHARED  ? "shared"
                  : space == DW__PTX_LOCAL ? "local"
                                           : "parameter",
                  (unsigned long long)offset);
    return NULL;
}
