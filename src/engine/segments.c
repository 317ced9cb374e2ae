/* The arena's segments, and the places of storages in them.
 *
 * The gradients of the parameters pile up while backward runs, and what forward saved is needed less and less. A caller
 * that releases memory after a part of backward therefore needs less at its peak. A segment is released after the last
 * part that reads it; a storage lies in a segment that lasts at least as long.
 *
 * Backward also computes values that are no gradients. They take the places of saved values that nothing reads any
 * more. For those that find no such place, each group of parts between two releases has a segment that begins late,
 * with the group, and is released with it.
 */
#include "engine/engine_internal.h"

_Static_assert((int)DW_MOST_SEGMENTS == (int)DW_PLACEMENT_SEGMENTS + 1, "and one of kept values");

/* The figures that segments are chosen by, in bytes by part of backward. */
typedef struct profile {
    uint32_t parts;
    size_t saved[DW__MOST_PARTS]; /* read by this part last */
    size_t other[DW__MOST_PARTS]; /* the most that is live at once, besides what forward saved */
    size_t grads[DW__MOST_PARTS]; /* gradients that parts up to this one have begun */
    size_t bound;                 /* the most that is live at once in forward or backward */
} profile;

/* Segments that are cut after some parts: bit p of `cuts` says that one is released after part p. */
typedef struct choice {
    uint32_t cuts, count;
    size_t peak; /* of live segments and gradients */
} choice;

static bool in_arena(const dw__storage *storage) {
    return storage->home == DW_HOME_ARENA && storage->first <= storage->last;
}

static size_t rounded(const dw_plan *plan, size_t bytes) {
    size_t alignment = plan->target.alignment;
    return (bytes + alignment - 1) / alignment * alignment;
}

/* ---- the profile ------------------------------------------------------------------------------ */

/* Fills `other`: the most bytes of storages that are not saved, during each part. */
static dw_status profile_other(const dw_plan *plan, profile *found) {
    const size_t instructions = plan->code.count;
    size_t *change = dw__calloc(instructions + 1, sizeof *change), live = 0;
    if (!change) return dw__fail_memory("the profile of live bytes", instructions * sizeof *change);
    for (size_t s = 0; s < plan->storages.count; s++) {
        const dw__storage *storage = &plan->storages.items[s];
        if (!in_arena(storage) || storage->saved) continue;
        change[storage->first] += rounded(plan, storage->bytes);
        change[storage->last + 1] -= rounded(plan, storage->bytes);
    }
    for (uint32_t i = 0, part = 0; i < instructions; i++) {
        live += change[i];
        if (i < plan->first_backward) continue;
        while (i >= plan->part_ends[part]) part++;
        if (live > found->other[part]) found->other[part] = live;
    }
    dw__free(change);
    return DW_OK;
}

static dw_status make_profile(const dw_plan *plan, profile *found) {
    *found = (profile){.parts = plan->part_count, .bound = plan->bound_bytes};
    for (size_t s = 0; s < plan->storages.count; s++) {
        const dw__storage *storage = &plan->storages.items[s];
        if (in_arena(storage) && storage->saved)
            found->saved[dw__plan_part_of(plan, storage->last)] += rounded(plan, storage->bytes);
    }
    for (uint32_t i = 0; i < plan->engine->wrt_count; i++) {
        if (plan->grad_first[i] == UINT32_MAX) continue;
        size_t bytes = dw__tensor_bytes(&plan->leaves[plan->engine->wrt_leaf[i]]);
        for (uint32_t p = plan->grad_first[i]; p < found->parts; p++) found->grads[p] += bytes;
    }
    return profile_other(plan, found);
}

/* ---- the choice ------------------------------------------------------------------------------- */

/* Returns the most bytes of live segments and gradients in a part; live[p]: bytes of the segments that part p has. */
static size_t peak_of(const profile *of, const size_t *live) {
    size_t peak = 0;
    for (uint32_t p = 0; p < of->parts; p++) {
        if (live[p] + of->grads[p] > peak) peak = live[p] + of->grads[p];
    }
    return peak;
}

/* Estimates the peak with these cuts: a segment has what forward saved for its parts, and these lay what else is live
 * where parts before them in the segment have read everything, and the rest in a late segment of their own. */
static size_t estimate(const profile *of, uint32_t cuts) {
    size_t live[DW__MOST_PARTS], later = 0;
    for (uint32_t p = 0; p < of->parts;) {
        size_t missing = 0, read = 0;
        uint32_t begin = p;
        do {
            if (of->other[p] > read + missing) missing = of->other[p] - read;
            read += of->saved[p];
        } while (!(cuts >> p++ & 1) && p < of->parts);
        /* A segment is released as a whole. */
        for (; begin < p; begin++) live[begin] = missing + read;
    }
    for (uint32_t p = of->parts; p-- > 0;) {
        live[p] += later;
        if (p > 0 && cuts >> (p - 1) & 1) {
            for (uint32_t q = p; q < of->parts; q++) {
                later += of->saved[q];
                if (cuts >> q & 1) break;
            }
        }
    }
    /* Buffers that only forward uses lie in the segment that is released first. */
    size_t more = live[0] < of->bound ? of->bound - live[0] : 0;
    for (uint32_t p = 0; p < of->parts; p++) {
        live[p] += more;
        if (cuts >> p & 1) break;
    }
    return peak_of(of, live);
}

/* Fills best[n - 1] with the lowest peak of n segments. */
static void search(const profile *of, uint32_t most, choice *best) {
    for (uint32_t n = 0; n < most; n++) best[n] = (choice){.peak = SIZE_MAX, .count = n + 1};
    for (uint32_t cuts = 0; cuts < (uint32_t)1 << (of->parts - 1); cuts++) {
        uint32_t count = 1 + (uint32_t)__builtin_popcount(cuts);
        if (count > most) continue;
        size_t peak = estimate(of, cuts);
        if (peak >= best[count - 1].peak) continue;
        best[count - 1].peak = peak;
        best[count - 1].cuts = cuts;
    }
}

/* ---- places ----------------------------------------------------------------------------------- */

/* The number of segments that last from forward, at most, if each but the first released has a late one beside it. */
static uint32_t most_early(const dw_plan *plan) { return (plan->engine->most_segments + 1) / 2; }

/* Fills in the parts of the segments of a choice. The first `early` of them last from forward to the end of a group of
 * parts, segment 0 to the last part. Each group but the first has a late segment behind these. */
static uint32_t set_parts(const dw_plan *plan, const choice *chosen, dw_segment *segments) {
    uint32_t early = 0;
    for (uint32_t p = plan->part_count; p-- > 0;) {
        if (p + 1 == plan->part_count || (chosen->cuts >> p & 1))
            segments[early++] = (dw_segment){.part = p};
    }
    for (uint32_t s = 0; s + 1 < early; s++)
        segments[early + s] =
            (dw_segment){.part = segments[s].part, .first_part = segments[s + 1].part + 1};
    return early;
}

/* The segments that may hold a storage. */
static void limit(const dw_plan *plan, const dw__storage *storage, const dw_segment *segments,
                  uint32_t early, dw__interval *item) {
    const uint32_t last = dw__plan_part_of(plan, storage->last);
    uint32_t most = early - 1;
    while (segments[most].part < last) most--;
    item->most = most;
    item->late = 0;
    if (most + 1 < early && storage->first >= plan->first_backward &&
        dw__plan_part_of(plan, storage->first) >= segments[early + most].first_part)
        item->late = early + most;
}

/* Removes late segments that hold nothing. Returns how many segments remain. */
static uint32_t drop_empty(uint32_t early, uint32_t count, uint32_t item_count, dw__interval *items,
                           dw_segment *segments) {
    uint32_t kept = early, place[DW_MOST_SEGMENTS];
    for (uint32_t s = 0; s < count; s++) {
        place[s] = s < early ? s : kept;
        if (s < early || segments[s].bytes == 0) continue;
        segments[kept++] = segments[s];
    }
    for (uint32_t i = 0; i < item_count; i++)
        if (items[i].bytes) items[i].segment = place[items[i].segment];
    return kept;
}

/* Places the intervals, one for each storage in the arena, in the segments of a choice. */
static dw_status place(const dw_plan *plan, const choice *chosen, uint32_t count,
                       dw__interval *items, dw_segment *segments, uint32_t *segment_count) {
    dw__extent extents[DW_MOST_SEGMENTS];
    const uint32_t early = set_parts(plan, chosen, segments);
    uint32_t n = 2 * early - 1, at = 0;
    for (size_t s = 0; s < plan->storages.count; s++) {
        if (in_arena(&plan->storages.items[s]))
            limit(plan, &plan->storages.items[s], segments, early, &items[at++]);
    }
    DW_RETURN_IF_FAILED(dw__place(count, items, plan->target.alignment, n, extents));
    for (uint32_t s = 0; s < n; s++) {
        segments[s].bytes = extents[s].bytes;
        segments[s].saved_bytes = extents[s].pinned_bytes;
    }
    n = drop_empty(early, n, count, items, segments);
    *segment_count = n;
    size_t end = 0;
    for (uint32_t s = 0; s < n; s++) {
        segments[s].offset = rounded(plan, end);
        end = segments[s].offset + segments[s].bytes;
        if (end > DW_PLACEMENT_MOST)
            return dw__fail(DW_SHAPE, "the segments of the arena need more than 2^62 bytes "
                                      "together at these sizes: use a smaller batch or sequence");
    }
    return DW_OK;
}

static void keep(dw_plan *plan, const dw__interval *items, uint32_t count,
                 const dw_segment *segments) {
    plan->segment_count = count;
    for (uint32_t s = 0; s < count; s++) {
        plan->segments[s] = segments[s];
        if (segments[s].bytes) plan->arena_bytes = segments[s].offset + segments[s].bytes;
        if (segments[s].saved_bytes)
            plan->saved_bytes = segments[s].offset + segments[s].saved_bytes;
    }
    uint32_t at = 0;
    for (size_t s = 0; s < plan->storages.count; s++) {
        dw__storage *storage = &plan->storages.items[s];
        if (!in_arena(storage)) continue;
        storage->segment = items[at].segment;
        storage->offset = segments[items[at].segment].offset + items[at].offset;
        at++;
    }
}

/* Returns the peak of these segments and the gradients; *most: the most bytes of segments at once. */
static size_t placed_peak(const profile *of, uint32_t count, const dw_segment *segments,
                          size_t *most) {
    size_t live[DW__MOST_PARTS] = {0};
    *most = 0;
    for (uint32_t s = 0; s < count; s++) {
        for (uint32_t p = segments[s].first_part; p <= segments[s].part; p++)
            live[p] += segments[s].bytes;
    }
    for (uint32_t p = 0; p < of->parts; p++) {
        if (live[p] > *most) *most = live[p];
    }
    return peak_of(of, live);
}

/* Places the storages, which lie in one segment already, in the segments of the best choice: the fewest whose peak is
 * near the lowest. They are worth it if the peak falls by a sixteenth of the arena, and by four times what
 * segments take more at once than the arena did. */
static dw_status cut(dw_plan *plan, uint32_t count, dw__interval *items) {
    const size_t whole = plan->arena_bytes;
    profile of;
    choice best[DW_PLACEMENT_SEGMENTS];
    dw_segment segments[DW_MOST_SEGMENTS];
    DW_RETURN_IF_FAILED(make_profile(plan, &of));
    const uint32_t most = most_early(plan) < of.parts ? most_early(plan) : of.parts;
    search(&of, most, best);
    size_t held;
    const size_t before = placed_peak(&of, 1, plan->segments, &held);
    uint32_t n = most;
    while (n > 1 && best[n - 2].peak <= best[most - 1].peak + whole / 64) n--;
    for (; n > 1; n--) {
        uint32_t placed;
        DW_RETURN_IF_FAILED(place(plan, &best[n - 1], count, items, segments, &placed));
        const size_t peak = placed_peak(&of, placed, segments, &held),
                     growth = held > whole ? held - whole : 0;
        if (peak + whole / 16 > before || peak + 4 * growth > before) continue;
        keep(plan, items, placed, segments);
        return DW_OK;
    }
    return DW_OK;
}

dw_status dw__plan_place(dw_plan *plan) {
    dw_status status = DW_OK;
    uint32_t count = 0, segment_count;
    dw_segment whole[DW_MOST_SEGMENTS];
    const choice one = {.count = 1};
    dw__interval *items = dw__calloc(plan->storages.count + 1, sizeof *items);
    if (!items) return dw__fail_memory("lifetimes", plan->storages.count * sizeof *items);
    for (size_t s = 0; s < plan->storages.count; s++) {
        dw__storage *storage = &plan->storages.items[s];
        if (!in_arena(storage)) continue;
        storage->saved =
            storage->first < plan->first_backward && storage->last >= plan->first_backward;
        items[count++] = (dw__interval){.bytes = storage->bytes,
                                        .first = storage->first,
                                        .last = storage->last,
                                        .pinned = storage->saved};
    }
    DW_TRY(dw__placement_bound(count, items, plan->target.alignment, &plan->bound_bytes));
    DW_TRY(place(plan, &one, count, items, whole, &segment_count));
    keep(plan, items, 1, whole);
    if (most_early(plan) > 1 && plan->part_count > 1) DW_TRY(cut(plan, count, items));
cleanup:
    dw__free(items);
    return status;
}
