#include "engine/placement.h"
#include <stdlib.h>
#include <string.h>

static size_t align_up(size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

/* Order of placement: pinned buffers by time, then the others by size and time. The address breaks
 * ties, so that the result does not depend on qsort. */
static int compare(const void *left, const void *right) {
    const dw__interval *a = *(dw__interval *const *)left;
    const dw__interval *b = *(dw__interval *const *)right;
    if (a->pinned != b->pinned) return a->pinned ? -1 : 1;
    if (a->pinned && a->first != b->first) return a->first < b->first ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes > b->bytes ? -1 : 1;
    if (a->first != b->first) return a->first < b->first ? -1 : 1;
    return a < b ? -1 : a > b;
}

static bool meet(const dw__interval *a, const dw__interval *b) {
    return a->first <= b->last && b->first <= a->last;
}

/* Returns the tightest hole between the placed buffers (sorted by offset) whose lives overlap that of `item`. */
static size_t find_offset(const dw__interval *item, size_t alignment, uint32_t count,
                          dw__interval *const *placed) {
    size_t end = 0, best = SIZE_MAX, best_room = SIZE_MAX;
    for (uint32_t i = 0; i < count; i++) {
        const dw__interval *other = placed[i];
        if (!meet(item, other)) continue;
        if (other->offset >= end) {
            size_t room = other->offset - end;
            if (item->bytes <= room && room < best_room) {
                best = end;
                best_room = room;
            }
        }
        size_t other_end = align_up(other->offset + other->bytes, alignment);
        if (other_end > end) end = other_end;
    }
    return best_room != SIZE_MAX ? best : end;
}

static void insert_sorted(dw__interval *item, uint32_t count, dw__interval **placed) {
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (placed[middle]->offset <= item->offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    memmove(placed + low + 1, placed + low, (count - low) * sizeof(dw__interval *));
    placed[low] = item;
}

dw_status dw__place(uint32_t count, dw__interval *items, size_t alignment, size_t *pinned_bytes,
                    size_t *peak) {
    *pinned_bytes = *peak = 0;
    if (count == 0) return DW_OK;
    dw__interval **order = dw__malloc(2 * (size_t)count * sizeof(dw__interval *));
    if (!order)
        return dw__fail_memory("the order of placement", 2 * count * sizeof(dw__interval *));
    dw__interval **placed = order + count;
    uint32_t wanted = 0, placed_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        items[i].offset = 0;
        if (items[i].bytes) order[wanted++] = &items[i];
    }
    qsort(order, wanted, sizeof(dw__interval *), compare);
    for (uint32_t i = 0; i < wanted; i++) {
        dw__interval *item = order[i];
        item->offset = item->pinned ? align_up(*pinned_bytes, alignment)
                                    : find_offset(item, alignment, placed_count, placed);
        /* Offsets and sizes are at most DW_PLACEMENT_MOST each, so their sum has not wrapped. */
        size_t end = item->offset + item->bytes;
        if (item->bytes > DW_PLACEMENT_MOST || end > DW_PLACEMENT_MOST) {
            dw__free(order);
            return dw__fail(DW_SHAPE,
                            "the buffers need more than 2^62 bytes together at these sizes: use a "
                            "smaller batch or sequence");
        }
        if (item->pinned) *pinned_bytes = end;
        if (end > *peak) *peak = end;
        insert_sorted(item, placed_count++, placed);
    }
    dw__free(order);
    return DW_OK;
}

dw_status dw__placement_bound(uint32_t count, const dw__interval *items, size_t alignment,
                              size_t *bytes) {
    *bytes = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (items[i].last > last) last = items[i].last;
    }
    /* At each step: bytes whose lives begin, minus bytes whose lives ended at the step before. */
    size_t *change = dw__calloc((size_t)last + 2, sizeof *change);
    if (!change) return dw__fail_memory("the profile of live bytes", last * sizeof *change);
    for (uint32_t i = 0; i < count; i++) {
        change[items[i].first] += align_up(items[i].bytes, alignment);
        change[items[i].last + 1] -= align_up(items[i].bytes, alignment);
    }
    size_t live = 0;
    for (uint32_t step = 0; step <= last; step++) {
        live += change[step];
        if (live > *bytes) *bytes = live;
    }
    dw__free(change);
    return DW_OK;
}
