/* One warp: its groups of lanes, and the loop that runs operations. Divergent lanes run in groups, the one with the
 * least program counter first, so that they reconverge without an analysis of the control flow.
 */
#include "emulator/race.h"
#include "emulator/tensor_memory.h"
#include "emulator/translate.h"
#include <string.h>

/* ---- where a warp begins ------------------------------------------------------------------- */

static uint32_t special_value(const dw__emu_warp *w, const dw__emu_preset *p, uint32_t lane) {
    const dw__emu_cta *cta = w->cta;
    const dw__emu_grid *grid = cta->cluster->grid;
    const uint32_t thread = w->index * DW__LANES + lane, *block = grid->block;
    const uint32_t axis = (uint32_t)p->axis;
    switch (p->special) {
    case DW__SPECIAL_TID: {
        const uint32_t position[3] = {thread % block[0], thread / block[0] % block[1],
                                      thread / block[0] / block[1]};
        return position[axis];
    }
    case DW__SPECIAL_NTID: return block[axis];
    case DW__SPECIAL_CTAID: return cta->id[axis];
    case DW__SPECIAL_NCTAID: return grid->grid[axis];
    case DW__SPECIAL_LANEID: return lane;
    case DW__SPECIAL_WARPID: return w->index;
    case DW__SPECIAL_NWARPID: return cta->warp_count;
    case DW__SPECIAL_SMID: return cta->id[0] % (uint32_t)grid->sm_count;
    case DW__SPECIAL_NSMID: return (uint32_t)grid->sm_count;
    case DW__SPECIAL_GRIDID: return (uint32_t)grid->id;
    case DW__SPECIAL_CLUSTERID: return cta->cluster->id[axis];
    case DW__SPECIAL_NCLUSTERID: return grid->grid[axis] / grid->cluster[axis];
    case DW__SPECIAL_CLUSTER_CTAID: return cta->id[axis] % grid->cluster[axis];
    case DW__SPECIAL_CLUSTER_NCTAID: return grid->cluster[axis];
    case DW__SPECIAL_CLUSTER_CTARANK: return cta->rank;
    case DW__SPECIAL_CLUSTER_NCTARANK: return cta->cluster->cta_count;
    case DW__SPECIAL_IS_EXPLICIT_CLUSTER: return cta->cluster->cta_count > 1;
    case DW__SPECIAL_LANEMASK_EQ: return (uint32_t)1 << lane;
    case DW__SPECIAL_LANEMASK_LT: return ((uint32_t)1 << lane) - 1;
    case DW__SPECIAL_LANEMASK_LE: return ((uint32_t)2 << lane) - 1;
    case DW__SPECIAL_LANEMASK_GE: return ~(((uint32_t)1 << lane) - 1);
    case DW__SPECIAL_LANEMASK_GT: return ~(((uint32_t)2 << lane) - 1);
    case DW__SPECIAL_DYNAMIC_SMEM_SIZE: return grid->dynamic_shared;
    case DW__SPECIAL_TOTAL_SMEM_SIZE: return cta->shared_bytes;
    case DW__SPECIAL_WORKSPACE:
        return (uint32_t)((uint64_t)(uintptr_t)grid->workspace >> (axis == 0 ? 32 : 0));
    case DW__SPECIAL_COUNT: break;
    }
    return 0;
}

void dw__emu_start_warp(dw__emu_warp *w, uint32_t live) {
    const dw__emu_kernel *kernel = w->cta->cluster->grid->kernel;
    for (uint32_t i = 0; i < kernel->preset_count; i++) {
        const dw__emu_preset *p = &kernel->presets[i];
        uint64_t bits = p->bits;
        if (p->source == DW__SOURCE_SHARED) bits |= (uint64_t)w->cta->rank << DW__RANK_SHIFT;
        if (p->bytes == 0) {
            uint32_t word = (uint32_t)bits;
            if (p->source == DW__SOURCE_SPECIAL) word = special_value(w, p, 0) ? DW__ALL_LANES : 0;
            *DW__REGISTER(w, uint32_t, p->place) = word;
            continue;
        }
        for (uint32_t lane = 0; lane < DW__LANES; lane++) {
            if (p->source == DW__SOURCE_SPECIAL) bits = special_value(w, p, lane);
            if (p->bytes == 8)
                DW__REGISTER(w, uint64_t, p->place)[lane] = bits;
            else
                DW__REGISTER(w, uint32_t, p->place)[lane] = (uint32_t)bits;
        }
    }
    w->now = (dw__emu_group){.mask = live};
    w->live = live;
    w->soonest = UINT32_MAX;
}

/* ---- groups -------------------------------------------------------------------------------- */

static bool can_run(const dw__emu_group *g) { return g->wait == DW__WAIT_NONE; }

/* Merges groups at the same PC, then retries warp-wide operations. */
static void merge(dw__emu_warp *w) {
    for (int i = 0; i < w->other_count; i++) {
        for (int k = i + 1; k < w->other_count;) {
            dw__emu_group *a = &w->others[i], *b = &w->others[k];
            if (a->pc != b->pc || a->inside || b->inside) {
                k++;
                continue;
            }
            a->mask |= b->mask;
            a->wait = DW__WAIT_NONE;
            *b = w->others[--w->other_count];
        }
    }
}

static void note_soonest(dw__emu_warp *w) {
    w->soonest = UINT32_MAX;
    for (int i = 0; i < w->other_count; i++)
        if ((can_run(&w->others[i]) || w->others[i].wait == DW__WAIT_LANES) &&
            w->others[i].pc < w->soonest)
            w->soonest = w->others[i].pc;
}

/* Puts the running group among the others and picks the one with the least PC or, by chance, another one. Returns
 * false if none can run. */
static bool regroup(dw__emu_warp *w, bool by_chance) {
    if (w->now.mask) w->others[w->other_count++] = w->now;
    w->now.mask = 0;
    merge(w);
    int best = -1, choices = 0;
    for (int i = 0; i < w->other_count; i++) {
        if (!can_run(&w->others[i])) continue;
        choices++;
        bool take =
            best < 0 || (by_chance ? dw__emu_random(w->cta->cluster) % (uint32_t)choices == 0
                                   : w->others[i].pc < w->others[best].pc);
        if (take) best = i;
    }
    if (best >= 0) {
        w->now = w->others[best];
        w->others[best] = w->others[--w->other_count];
    }
    note_soonest(w);
    return best >= 0;
}

void dw__emu_leave_behind(dw__emu_warp *w, uint32_t lanes) {
    w->others[w->other_count++] =
        (dw__emu_group){.pc = w->now.pc, .mask = lanes, .wait = DW__WAIT_LANES};
    w->now.mask &= ~lanes;
    note_soonest(w);
}

void dw__emu_let_pass(dw__emu_warp *w, uint32_t lanes) {
    for (int i = 0; i < w->other_count; i++) {
        dw__emu_group *g = &w->others[i];
        if (!(g->mask & lanes) || g->wait != DW__WAIT_LANES) continue;
        g->pc++;
        g->wait = DW__WAIT_NONE;
    }
    note_soonest(w);
}

/* Lanes have ended: retries operations that waited for them. */
static void wake_waiting(dw__emu_warp *w) {
    for (int i = 0; i < w->other_count; i++)
        if (w->others[i].wait == DW__WAIT_LANES) w->others[i].wait = DW__WAIT_NONE;
}

/* Returns whether all groups wait at warp-wide operations for lanes that can no longer arrive. */
static bool are_all_waiting_apart(const dw__emu_warp *w) {
    for (int i = 0; i < w->other_count; i++)
        if (w->others[i].wait != DW__WAIT_LANES) return false;
    return w->other_count > 0;
}

static bool report_apart(dw__emu_warp *w) {
    const dw__emu_group *first = &w->others[0], *second = &w->others[w->other_count > 1 ? 1 : 0];
    const dw__emu_kernel *kernel = w->cta->cluster->grid->kernel;
    int other_line = kernel->function->code.items[kernel->from[second->pc]].line;
    w->now = *first;
    dw__emu_found(w, __builtin_ctz(first->mask), DW__FOUND_DIVERGENCE,
                  "lanes 0x%08x wait here for other lanes of the warp (0x%08x live); lanes 0x%08x "
                  "wait at PTX line %d",
                  first->mask, w->live, second->mask, other_line);
    return false;
}

/* ---- values on their way ------------------------------------------------------------------- */

bool dw__emu_set_pending(dw__emu_warp *w, uint32_t place, uint32_t bytes, uint32_t kind,
                         uint32_t group) {
    if (!w->pending) {
        uint32_t count = w->cta->cluster->grid->kernel->register_bytes / 64 + 4;
        w->pending = dw__calloc(1, sizeof *w->pending + count * sizeof *w->pending->until);
        if (!w->pending) return false;
    }
    const uint32_t first = place / 64, end = (place + bytes) / 64;
    if (!w->pending->live || first < w->pending->first) w->pending->first = first;
    if (!w->pending->live || end > w->pending->end) w->pending->end = end;
    for (uint32_t at = first; at < end; at++) {
        w->pending->live += w->pending->until[at] == 0;
        w->pending->until[at] = kind << 24 | (group & 0xFFFFFF);
    }
    return true;
}

void dw__emu_clear_pending(dw__emu_warp *w, uint32_t kind, uint32_t group) {
    if (!w->pending || !w->pending->live) return;
    for (uint32_t at = w->pending->first; at < w->pending->end; at++) {
        uint32_t until = w->pending->until[at];
        if (until >> 24 != kind || ((group - until) & 0xFFFFFF) > 0x7FFFFF) continue;
        w->pending->until[at] = 0;
        w->pending->live--;
    }
}

/* Returns whether the instruction reads a register that asynchronous work has yet to write; *product: an MMA that is
 * pending. */
static bool reads_early(dw__emu_warp *w, const dw__emu_kernel *kernel, bool *mma) {
    const uint32_t in = kernel->from[w->now.pc];
    bool early = false;
    *mma = false;
    for (uint32_t i = kernel->first_read[in]; i < kernel->first_read[in + 1]; i++) {
        const uint32_t until = w->pending->until[kernel->reads[i] / 64];
        if (!until) continue;
        early = true;
        *mma = *mma ||
               (until >> 24 == DW__PENDING_WGMMA && dw__emu_wgmma_in_flight(w, until & 0xFFFFFF));
    }
    return early;
}

/* Returns whether the instruction may proceed. An early read is a finding. The warp then waits for the load of tensor
 * memory or the MMA, as a GPU's registers do: published kernels for B200 rely on that. For H100, ptxas removes the
 * accumulator copies that compilers place before the wait, and published kernels rely on that. */
static bool may_read(dw__emu_warp *w, const dw__emu_kernel *kernel, uint32_t mask) {
    const struct dw__emu_tensor *tensor = w->cta->tensor;
    bool mma;
    if (!reads_early(w, kernel, &mma)) return true;
    if (!w->pending->reported)
        dw__emu_found(w, __builtin_ctz(mask), DW__FOUND_EARLY,
                      "reads a register before the wait that makes its value valid");
    w->pending->reported = mma || (tensor && tensor->loading[w->index] > 0);
    if (w->pending->reported) return false;
    dw__emu_clear_pending(w, DW__PENDING_TENSOR_LOAD, 1);
    dw__emu_race_waited_all(w, DW__SIDE_TENSOR_LOAD);
    return true;
}

/* ---- the loop ------------------------------------------------------------------------------ */

bool dw__emu_run_warp(dw__emu_warp *w, uint32_t turns) {
    const dw__emu_kernel *kernel = w->cta->cluster->grid->kernel;
    const dw__emu_op *code = kernel->code;
    for (int i = 0; i < w->other_count; i++)
        if (w->others[i].wait != DW__WAIT_LANES) w->others[i].wait = DW__WAIT_NONE;
    if (w->now.wait != DW__WAIT_LANES) w->now.wait = DW__WAIT_NONE;
    /* Lanes behind may loop until lanes ahead make progress, so every group gets turns. */
    bool ahead = w->other_count > 0 && dw__emu_random(w->cta->cluster) % 8 == 0;
    if (w->other_count > 0 && !regroup(w, ahead)) {
        if (are_all_waiting_apart(w)) return report_apart(w);
        return true;
    }
    w->gave_way = false;
    while (turns-- > 0) {
        if (w->now.pc >= w->soonest && w->other_count > 0 && !ahead) {
            if (!regroup(w, false)) return true;
        }
        const dw__emu_op *op = &code[w->now.pc];
        uint32_t mask = w->now.mask;
        dw__emu_next next = DW__NEXT;
        if (op->guard != DW__PTX_NO_GUARD) {
            uint32_t p = *DW__REGISTER(w, uint32_t, op->guard);
            mask &= op->guard_negated ? ~p : p;
        }
        if (op->aligned && w->now.mask != w->live)
            next = DW__APART;
        else if (mask) {
            if (w->pending && w->pending->live && !op->reads_pending &&
                !may_read(w, kernel, mask)) {
                w->now.wait = DW__WAIT_ASYNC;
                next = DW__AGAIN;
            } else {
                next = op->run(w, op, mask);
            }
        }
        w->operations++;
        w->executed += mask == DW__ALL_LANES ? DW__LANES : (uint32_t)__builtin_popcount(mask);
        switch (next) {
        case DW__NEXT: w->now.pc++; break;
        case DW__JUMPED: break;
        case DW__GAVE_WAY:
            w->now.pc++;
            w->gave_way = true;
            return true;
        case DW__APART: w->now.wait = DW__WAIT_LANES; /* fall through */
        case DW__AGAIN:
            ahead = false;
            if (!regroup(w, false)) {
                if (are_all_waiting_apart(w)) return report_apart(w);
                return true;
            }
            break;
        case DW__ENDED:
            if (w->live == 0) {
                dw__emu_race_ended(w);
                dw__emu_barriers_after_exit(w->cta);
                dw__emu_cluster_after_exit(w->cta->cluster);
                return true;
            }
            ahead = false;
            wake_waiting(w);
            if (!regroup(w, false)) {
                if (are_all_waiting_apart(w)) return report_apart(w);
                return true;
            }
            break;
        case DW__FAULT: return false;
        }
    }
    return true;
}
