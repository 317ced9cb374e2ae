/* Backward in parts. The instructions of backward are cut where enough gradients are complete, so that a caller can use
 * gradients, and free their memory, before backward is done. They are also cut where much of what forward saved has
 * been read, mostly logits, so that its segment of the arena can be released before further gradients begin. */
#include "engine/engine_internal.h"

/* approximate number; each part completes at least a sixteenth of the gradients' bytes */
enum { PARTS = DW__MOST_PARTS - 1 };
static const size_t RELEASED_BYTES_MIN = (size_t)64 << 20;

/* Sets after[i] if instruction i is the last reader of at least an eighth of what forward saved, and if the gradients
 * are that large too: fewer do not raise the peak by much. */
static void mark_releases(const dw_plan *plan, size_t gradients, bool *after) {
    size_t saved = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (size_t s = 0; s < plan->storages.count; s++) {
            const dw__storage *storage = &plan->storages.items[s];
            if (storage->home != DW_HOME_ARENA || storage->first >= plan->first_backward ||
                storage->last < plan->first_backward || storage->last >= plan->code.count)
                continue;
            if (pass == 0)
                saved += storage->bytes;
            else if (storage->bytes >= saved / 8 && storage->bytes >= RELEASED_BYTES_MIN)
                after[storage->last] = true;
        }
        if (gradients < saved / 8) return;
    }
}

/* Adds to completed[i] the bytes of the gradients that instruction i uses last. Returns their sum in backward. */
static size_t count_completed(const dw_plan *plan, size_t *completed) {
    size_t total = 0;
    for (size_t s = 0; s < plan->storages.count; s++) {
        const dw__storage *storage = &plan->storages.items[s];
        if (storage->home != DW_HOME_GRAD || storage->first > storage->last ||
            storage->last < plan->first_backward || storage->last >= plan->code.count)
            continue;
        completed[storage->last] += storage->bytes;
        total += storage->bytes;
    }
    return total;
}

uint32_t dw__plan_part_of(const dw_plan *plan, uint32_t instruction) {
    uint32_t part = 0;
    while (part + 1 < plan->part_count && instruction >= plan->part_ends[part]) part++;
    return part;
}

static dw_status allocate_parts(dw_plan *plan) {
    const dw_engine *engine = plan->engine;
    uint32_t gradients = engine->wrt_count + 1;
    plan->part_ends = dw__arena_alloc(plan->memory, DW__MOST_PARTS * sizeof *plan->part_ends);
    plan->grad_first = dw__arena_alloc(plan->memory, gradients * sizeof *plan->grad_first);
    plan->grad_last = dw__arena_alloc(plan->memory, gradients * sizeof *plan->grad_last);
    plan->output_last =
        dw__arena_alloc(plan->memory, (engine->output_count + 1) * sizeof *plan->output_last);
    plan->leaf_last =
        dw__arena_alloc(plan->memory, (engine->leaf_count + 1) * sizeof *plan->leaf_last);
    if (!plan->part_ends || !plan->grad_first || !plan->grad_last || !plan->output_last ||
        !plan->leaf_last)
        return dw__fail_memory("the parts of a plan's backward", gradients * sizeof(uint32_t));
    return DW_OK;
}

/* Bytes that find_ends counts for each instruction. */
typedef struct ends {
    size_t *completed; /* of gradients that it uses last */
    size_t *begun;     /* of gradients that it uses first */
    size_t *across;    /* of storages of the arena that are used before its end and after it */
    bool *releases;    /* not in bytes: marked by mark_releases */
} ends;

static void count_others(const dw_plan *plan, ends *e) {
    const size_t end = plan->code.count;
    for (size_t s = 0; s < plan->storages.count; s++) {
        const dw__storage *storage = &plan->storages.items[s];
        if (storage->first > storage->last || storage->last >= end) continue;
        if (storage->home == DW_HOME_GRAD) e->begun[storage->first] += storage->bytes;
        if (storage->home != DW_HOME_ARENA || storage->first == storage->last) continue;
        e->across[storage->first] += storage->bytes; /* so far: the change */
        e->across[storage->last] -= storage->bytes;
    }
    for (size_t i = 1; i < end; i++) e->across[i] += e->across[i - 1];
}

/* Returns the last instruction of a part that may end at `i`: the one behind which the least of the arena is in use,
 * mostly the end of a layer, among those before further gradients of `most` bytes begin. Buffers that outlive a part
 * keep their segment from being released. */
static uint32_t best_end(const dw_plan *plan, const ends *e, uint32_t i, size_t most) {
    uint32_t best = i;
    size_t begun = 0;
    for (uint32_t j = i + 1; j < plan->code.count; j++) {
        begun += e->begun[j];
        if (begun >= most) break;
        if (e->across[j] < e->across[best]) best = j;
        if (e->releases[j]) return j;
    }
    return best;
}

static dw_status find_ends(dw_plan *plan) {
    const uint32_t end = (uint32_t)plan->code.count;
    const size_t count = (size_t)end + 1;
    ends e = {.completed = dw__calloc(count, 3 * sizeof *e.completed + sizeof(bool))};
    if (!e.completed)
        return dw__fail_memory("the parts of a plan's backward", count * sizeof *e.completed);
    e.begun = e.completed + count;
    e.across = e.begun + count;
    e.releases = (bool *)(e.across + count);
    const size_t total = count_completed(plan, e.completed);
    mark_releases(plan, total, e.releases);
    count_others(plan, &e);
    const size_t least = plan->engine->part_bytes;
    size_t enough = total / PARTS > least ? total / PARTS : least, complete = 0;
    for (uint32_t i = plan->first_backward; i < end; i++) {
        complete += e.completed[i];
        if ((complete < enough && !e.releases[i]) || plan->part_count == PARTS) continue;
        if (!e.releases[i]) i = best_end(plan, &e, i, enough / 2);
        plan->part_ends[plan->part_count++] = i + 1;
        complete = 0;
    }
    dw__free(e.completed);
    /* Instructions that complete no further gradient belong to the last part. */
    if (plan->part_count == 0 || complete > 0) plan->part_count++;
    plan->part_ends[plan->part_count - 1] = end;
    return DW_OK;
}

/* Records the last part that reads a leaf or an output of the caller. */
static void note_reader(dw_plan *plan, const dw__storage *storage) {
    if (storage->last < plan->first_backward) return;
    uint32_t *reader = NULL, last = dw__plan_part_of(plan, storage->last);
    if (storage->home == DW_HOME_OUTPUT) reader = &plan->output_last[storage->index];
    if (storage->home == DW_HOME_LEAF && storage->index < plan->engine->leaf_count)
        reader = &plan->leaf_last[storage->index];
    if (reader && last > *reader) *reader = last;
}

static void note_gradient(dw_plan *plan, const dw__storage *storage) {
    if (storage->home != DW_HOME_GRAD) return;
    uint32_t first = dw__plan_part_of(plan, storage->first),
             last = dw__plan_part_of(plan, storage->last);
    uint32_t *grad_first = &plan->grad_first[storage->index];
    uint32_t *grad_last = &plan->grad_last[storage->index];
    if (first < *grad_first) *grad_first = first;
    if (last > *grad_last) *grad_last = last;
}

dw_status dw__plan_cut_backward(dw_plan *plan) {
    DW_RETURN_IF_FAILED(allocate_parts(plan));
    DW_RETURN_IF_FAILED(find_ends(plan));
    for (uint32_t i = 0; i < plan->engine->wrt_count; i++) plan->grad_first[i] = UINT32_MAX;
    for (size_t s = 0; s < plan->storages.count; s++) {
        const dw__storage *storage = &plan->storages.items[s];
        if (storage->first > storage->last) continue;
        note_reader(plan, storage);
        note_gradient(plan, storage);
    }
    return DW_OK;
}

uint32_t dw_plan_part_count(const dw_plan *plan) { return plan->part_count; }

void dw_plan_grad_parts(const dw_plan *plan, uint32_t index, uint32_t *first, uint32_t *last) {
    bool written = index < plan->engine->wrt_count && plan->grad_first[index] != UINT32_MAX;
    *first = written ? plan->grad_first[index] : 0;
    *last = written ? plan->grad_last[index] : 0;
}

uint32_t dw_plan_leaf_part(const dw_plan *plan, uint32_t index) {
    return index < plan->engine->leaf_count ? plan->leaf_last[index] : 0;
}

uint32_t dw_plan_output_part(const dw_plan *plan, uint32_t index) {
    return index < plan->engine->output_count ? plan->output_last[index] : 0;
}
