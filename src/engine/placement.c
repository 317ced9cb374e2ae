#include "engine/placement.h"
#include <stdlib.h>
#include <string.h>

static size_t align_up(size_t bytes, size_t alignment) {
    return (bytes + alignment - 1) / alignment * alignment;
}

/* Order of placement: pinned buffers by time, then the others by the segments that they may use, size and time; those
 * for a late segment last, because they find holes where the others have been. The address breaks ties, so that the
 * result does not depend on qsort. */
static int compare(const void *left, const void *right) {
    const dw__interval *a = *(dw__interval *const *)left;
    const dw__interval *b = *(dw__interval *const *)right;
    if (a->pinned != b->pinned) return a->pinned ? -1 : 1;
    if (a->pinned && a->first != b->first) return a->first < b->first ? -1 : 1;
    if ((a->late != 0) != (b->late != 0)) return a->late ? 1 : -1;
    if (a->most != b->most) return a->most < b->most ? -1 : 1;
    if (a->bytes != b->bytes) return a->bytes > b->bytes ? -1 : 1;
    if (a->first != b->first) return a->first < b->first ? -1 : 1;
    return a < b ? -1 : a > b;
}

static bool meet(const dw__interval *a, const dw__interval *b) {
    return a->first <= b->last && b->first <= a->last;
}

/* Returns the tightest hole between the placed buffers (sorted by offset) whose lives overlap that of `item`, and its
 * size in *room_found; without a hole, the end of these buffers and SIZE_MAX. */
static size_t find_offset(const dw__interval *item, size_t alignment, uint32_t count,
                          dw__interval *const *placed, size_t *room_found) {
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
    *room_found = best_room;
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

/* The buffers that lie in a segment, sorted by offset. */
typedef struct dw__filled {
    dw__interval **placed;
    uint32_t count;
    dw__extent *extent;
} dw__filled;

/* Sets the segment and offset of a buffer that is not pinned: the tightest hole of all segments that it may use, or
 * the place where a segment grows least. Between equals the segment that is released first is taken. A buffer for which
 * a segment would grow goes to its late one, if it has one. */
static void find_place(dw__interval *item, size_t alignment, const dw__filled *segments) {
    size_t best_room = SIZE_MAX, best_growth = SIZE_MAX;
    for (uint32_t s = 0; s <= item->most; s++) {
        size_t room, held = segments[s].extent->bytes;
        size_t offset = find_offset(item, alignment, segments[s].count, segments[s].placed, &room);
        size_t growth = offset + item->bytes > held ? offset + item->bytes - held : 0;
        if (room > best_room || (room == best_room && growth > best_growth)) continue;
        best_room = room;
        best_growth = growth;
        item->segment = s;
        item->offset = offset;
    }
    if (!item->late || best_room != SIZE_MAX || best_growth == 0) return;
    const dw__filled *late = &segments[item->late];
    item->segment = item->late;
    item->offset = find_offset(item, alignment, late->count, late->placed, &best_room);
}

static void pin(dw__interval *item, size_t alignment, const dw__filled *segments) {
    item->segment = item->most;
    item->offset = align_up(segments[item->most].extent->pinned_bytes, alignment);
}

dw_status dw__place(uint32_t count, dw__interval *items, size_t alignment, uint32_t segment_count,
                    dw__extent *extents) {
    for (uint32_t s = 0; s < segment_count; s++) extents[s] = (dw__extent){0};
    if (count == 0) return DW_OK;
    dw__filled segments[DW_PLACEMENT_SEGMENTS];
    const size_t lists = (size_t)segment_count + 1;
    dw__interval **order = dw__malloc(lists * count * sizeof(dw__interval *));
    if (!order)
        return dw__fail_memory("the order of placement", lists * count * sizeof(dw__interval *));
    for (uint32_t s = 0; s < segment_count; s++) {
        segments[s] =
            (dw__filled){.placed = order + (s + 1) * (size_t)count, .extent = &extents[s]};
    }
    uint32_t wanted = 0;
    for (uint32_t i = 0; i < count; i++) {
        items[i].offset = 0;
        items[i].segment = 0;
        if (items[i].bytes) order[wanted++] = &items[i];
    }
    qsort(order, wanted, sizeof(dw__interval *), compare);
    for (uint32_t i = 0; i < wanted; i++) {
        dw__interval *item = order[i];
        size_t end = SIZE_MAX;
        if (item->bytes <= DW_PLACEMENT_MOST) {
            if (item->pinned) {
                pin(item, alignment, segments);
            } else {
                find_place(item, alignment, segments);
            }
            /* Offsets and sizes are at most DW_PLACEMENT_MOST each, so their sum has not wrapped. */
            end = item->offset + item->bytes;
        }
        if (end > DW_PLACEMENT_MOST) {
            dw__free(order);
            return dw__fail(DW_SHAPE,
                            "the buffers need more than 2^62 bytes together at these sizes: use a "
                            "smaller batch or sequence");
        }
        dw__filled *segment = &segments[item->segment];
        if (item->pinned) segment->extent->pinned_bytes = end;
        if (end > segment->extent->bytes) segment->extent->bytes = end;
        insert_sorted(item, segment->count++, segment->placed);
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
