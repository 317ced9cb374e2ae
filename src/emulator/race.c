#include "emulator/race.h"
#include "emulator/race_history.h"
#include "emulator/tensor_memory.h"
#include <stdio.h>
#include <string.h>

/* One access: bits 63-51 agent, 50-25 time, 24-6 operation, 5-1 lane (for an mbarrier's agent, the issuer's warp), 0
 * strong. The value 0 is no access. */
typedef uint64_t epoch;
#define TIME_BITS 26
#define PC_BITS 19
#define MOST_AGENTS 8192 /* sixteen blocks of 32 warps have fewer agents */
#define LAST_TIME ((1u << TIME_BITS) - 1)
static epoch made(uint32_t agent, uint32_t time, uint32_t pc, uint32_t lane, bool strong) {
    const uint32_t most = (1u << PC_BITS) - 1;
    return (epoch)agent << 51 | (epoch)time << 25 | (epoch)(pc < most ? pc : most) << 6 |
           (epoch)(lane & 31) << 1 | strong;
}
static uint32_t agent_of(epoch e) { return (uint32_t)(e >> 51); }
static uint32_t time_of(epoch e) { return (uint32_t)(e >> 25) & LAST_TIME; }
static uint32_t pc_of(epoch e) { return (uint32_t)(e >> 6) & ((1u << PC_BITS) - 1); }
static uint32_t lane_of(epoch e) { return (uint32_t)(e >> 1) & 31; }
static bool is_strong(epoch e) { return e & 1; }

/* Histories: see race_history.h. */
#define SLOTS DW__HISTORY_SLOTS
typedef dw__history history;
static uint32_t part_of(uint32_t parts, int slot) { return parts >> 4 * slot & 15; }
static bool is_write(uint32_t parts, int slot) { return parts >> (4 * SLOTS + slot) & 1; }
static bool is_same(uint32_t parts, int slot) { return parts >> (5 * SLOTS + slot) & 1; }
#define LIVE_MBARRIER DW__HISTORY_LIVE_MBARRIER

typedef struct mbarrier {
    uint32_t agent, time;
    uint32_t phases; /* counted from 1 */
    epoch init;
    bool valid;
    dw__emu_clock *gathered, *completed;
} mbarrier;

/* The words of tensor memory follow those of shared memory: one for each column of a quarter of the lanes. Each half
 * of the quarter's lanes has two of the word's bytes. */
#define TENSOR_WORDS (DW__TENSOR_LANES / 32 * DW__TENSOR_COLUMNS)

/* Agents per block for mbarriers; a block with more mbarriers shares agents among them. */
#define MBARRIERS 64
#define STRONG 64 /* clocks of strong accesses, indexed by address */

typedef struct meeting {
    dw__emu_clock *gathered, *completed;
} meeting;

/* State shared by the blocks of a cluster. */
typedef struct common {
    uint32_t agents, vectors, warps_per_block, first_mbarrier;
    uint32_t *times;        /* last time of each agent that is no warp */
    dw__emu_clock **fenced; /* for each warp, its clock at its last fence */
    meeting cluster;
    dw__emu_clock *global; /* clock of strong accesses to global memory */
    bool off;              /* memory or times have run out */
} common;

/* The transition of a history by an access. */
typedef struct step {
    uint32_t generation; /* of the access; 0: none */
    uint32_t before, after, how;
    int slot; /* the slot that keeps the access, or -1 */
} step;
#define STEPS 32 /* number of cached transitions */

/* The last access of a warp of another block to a block's shared memory. */
typedef struct visit {
    uint32_t time, pc; /* time 0: none */
    uint32_t lane;
    bool reported; /* a late access was, or may have been, reported; one report is enough */
} visit;

struct dw__emu_race {
    common *common;
    visit *visits; /* indexed by the warps of the cluster; NULL if there is only one block */
    dw__histories histories;
    uint32_t *places; /* the history number of each four bytes */
    uint16_t *lanes;  /* for generic accesses, the lane of each slot, five bits each */
    uint32_t place_count;
    /* The access to which the cached steps belong, and its clock. Copies that complete on one mbarrier are one
     * agent. */
    epoch last;
    const uint32_t *last_seen;
    uint32_t generation;
    step steps[STEPS];
    meeting barriers[DW__BARRIERS];
    dw__emu_clock *strong[STRONG];
    uint16_t *mbarrier_at; /* for each eight bytes: 1 + index into `mbarriers` */
    struct {
        mbarrier *items;
        size_t count, capacity;
    } mbarriers;
};

/* ---- clocks -------------------------------------------------------------------------------- */

static dw__emu_clock *new_clock(uint32_t agents, uint32_t vectors) {
    dw__emu_clock *c = dw__calloc(1, sizeof *c + vectors * (size_t)agents * sizeof *c->times);
    if (c) c->agents = agents, c->vectors = vectors;
    return c;
}
/* The part of a clock that is passed on: all vectors except for `ordered`. */
static uint32_t given(const dw__emu_clock *c) {
    return (c->vectors == 4 ? 3 : c->vectors) * c->agents;
}
static void join(dw__emu_clock *to, const dw__emu_clock *from) {
    for (uint32_t i = 0; i < given(to); i++)
        to->times[i] = to->times[i] > from->times[i] ? to->times[i] : from->times[i];
}
static void meet(dw__emu_clock *to, const dw__emu_clock *from) {
    for (uint32_t i = 0; i < to->vectors * to->agents; i++)
        to->times[i] = to->times[i] < from->times[i] ? to->times[i] : from->times[i];
}
static void assign(dw__emu_clock *to, const dw__emu_clock *from) {
    memcpy(to->times, from->times, to->vectors * (size_t)to->agents * sizeof *to->times);
}

static common *common_of(const dw__emu_cluster *cluster) {
    return cluster->ctas[0].race ? cluster->ctas[0].race->common : NULL;
}
static bool is_on(const dw__emu_cluster *cluster) {
    const common *all = common_of(cluster);
    return all && !all->off;
}
static void stop(dw__emu_cta *cta, uint32_t warp, uint32_t pc, const char *why) {
    common_of(cta->cluster)->off = true;
    dw__emu_found_at(cta, warp, -1, pc, DW__FOUND_INVALID,
                     "%s: races of this cluster are no longer checked", why);
}

/* Returns a clock, created on first use. Returns NULL and stops the checker if memory is out. */
static dw__emu_clock *wanted(dw__emu_cta *cta, uint32_t warp, uint32_t pc, dw__emu_clock **clock) {
    const common *all = common_of(cta->cluster);
    if (!*clock) *clock = new_clock(all->agents, all->vectors);
    if (!*clock) stop(cta, warp, pc, "the host is out of memory for the checker");
    return *clock;
}

static uint32_t agent_at(const common *all, const dw__emu_cta *cta, uint32_t warp,
                         dw__emu_side side) {
    return (cta->rank * all->warps_per_block + warp) * DW__SIDES + (uint32_t)side;
}
static uint32_t own_agent(const dw__emu_warp *w) {
    return agent_at(w->cta->race->common, w->cta, w->index, DW__SIDE_GENERIC);
}

/* Advances the warp's time after its clock was passed on: later accesses are not covered. */
static void tick(dw__emu_warp *w) {
    if (++dw__emu_seen(w->clock)[own_agent(w)] == LAST_TIME)
        stop(w->cta, w->index, w->now.pc, "too many synchronisations for the checker");
}
static void give(dw__emu_warp *w, dw__emu_clock **to) {
    dw__emu_clock *clock = wanted(w->cta, w->index, w->now.pc, to);
    if (!clock) return;
    join(clock, w->clock);
    tick(w);
}
/* An operation that does not release passes on what an earlier fence released. */
static void give_ordered(dw__emu_warp *w, dw__emu_clock **to, bool releases) {
    const common *all = w->cta->race->common;
    const dw__emu_clock *fenced = all->fenced[w->cta->rank * all->warps_per_block + w->index];
    if (releases)
        give(w, to);
    else if (fenced && wanted(w->cta, w->index, w->now.pc, to))
        join(*to, fenced);
}
static void complete(meeting *m, dw__emu_cta *cta) {
    if (m->gathered && wanted(cta, 0, 0, &m->completed)) assign(m->completed, m->gathered);
}

static bool active(const dw__emu_warp *w) { return w->clock && !w->cta->race->common->off; }

static uint32_t first_tensor_word(const dw__emu_cta *cta) { return cta->shared_bytes / 4 + 1; }

/* ---- life ---------------------------------------------------------------------------------- */

bool dw__emu_race_begin(dw__emu_cluster *cluster) {
    if (!cluster->grid->check) return true;
    const uint32_t warps = cluster->ctas[0].warp_count,
                   sides = cluster->cta_count * warps * DW__SIDES,
                   agents = sides + cluster->cta_count * MBARRIERS;
    if (agents > MOST_AGENTS) return true;
    common *all = dw__calloc(1, sizeof *all);
    if (!all) return false;
    *all = (common){.agents = agents,
                    .vectors = cluster->grid->kernel->tensor_fences ? 4 : 2,
                    .warps_per_block = warps,
                    .first_mbarrier = sides};
    for (uint32_t rank = 0; rank < cluster->cta_count; rank++) {
        dw__emu_cta *cta = &cluster->ctas[rank];
        cta->race = dw__calloc(1, sizeof *cta->race);
        if (!cta->race) {
            if (rank == 0) dw__free(all);
            return false;
        }
        cta->race->common = all;
    }
    all->times = dw__calloc(agents, sizeof *all->times);
    all->fenced = dw__calloc((size_t)cluster->cta_count * warps, sizeof(void *));
    if (!all->times || !all->fenced) return false;
    for (uint32_t rank = 0; rank < cluster->cta_count; rank++) {
        dw__emu_cta *cta = &cluster->ctas[rank];
        const uint32_t shared = first_tensor_word(cta), places = shared + TENSOR_WORDS;
        dw__emu_race *race = cta->race;
        race->place_count = places;
        race->places = dw__calloc(places, sizeof *race->places);
        race->lanes = dw__calloc(shared, sizeof *race->lanes);
        race->mbarrier_at = dw__calloc(shared / 2 + 1, sizeof *race->mbarrier_at);
        if (cluster->cta_count > 1) {
            race->visits = dw__calloc((size_t)cluster->cta_count * warps, sizeof *race->visits);
            if (!race->visits) return false;
        }
        if (!dw__histories_create(&race->histories) || !race->places || !race->lanes ||
            !race->mbarrier_at)
            return false;
        for (uint32_t i = 0; i < warps; i++) {
            cta->warps[i].clock = new_clock(agents, all->vectors);
            if (!cta->warps[i].clock) return false;
            dw__emu_seen(cta->warps[i].clock)[own_agent(&cta->warps[i])] = 1;
        }
    }
    return true;
}

void dw__emu_race_end(dw__emu_cluster *cluster) {
    common *all = common_of(cluster);
    if (!all) return;
    for (uint32_t rank = 0; rank < cluster->cta_count; rank++) {
        dw__emu_cta *cta = &cluster->ctas[rank];
        for (uint32_t i = 0; i < cta->warp_count; i++) {
            dw__free(cta->warps[i].clock);
            if (all->fenced) dw__free(all->fenced[rank * all->warps_per_block + i]);
        }
        dw__emu_race *race = cta->race;
        if (!race) continue;
        for (int i = 0; i < DW__BARRIERS; i++) {
            dw__free(race->barriers[i].gathered);
            dw__free(race->barriers[i].completed);
        }
        for (int i = 0; i < STRONG; i++) dw__free(race->strong[i]);
        for (size_t i = 0; i < race->mbarriers.count; i++) {
            dw__free(race->mbarriers.items[i].gathered);
            dw__free(race->mbarriers.items[i].completed);
        }
        dw__free(race->mbarriers.items);
        dw__free(race->mbarrier_at);
        dw__free(race->visits);
        dw__free(race->places);
        dw__free(race->lanes);
        dw__histories_free(&race->histories);
        dw__free(race);
    }
    dw__free(all->cluster.gathered);
    dw__free(all->cluster.completed);
    dw__free(all->global);
    dw__free(all->times);
    dw__free(all->fenced);
    dw__free(all);
}

/* ---- accesses ------------------------------------------------------------------------------ */

/* An access and its agent. */
typedef struct toucher {
    dw__emu_cta *cta; /* block of the warp that acts or that issued the work */
    uint32_t warp, pc;
    int lane;
    const uint32_t *seen;
    const uint32_t *shown;              /* NULL: generic proxy */
    const uint32_t *released, *ordered; /* for tensor memory; NULL: fences are not checked */
    epoch self;
    bool write, reported;
    bool in_order;  /* the agent performs its accesses in order */
    bool transfers; /* a transfer between registers and tensor memory */
    bool same;      /* a write that does not change the value */
} toucher;

static bool through_generic(const common *all, epoch e) {
    return agent_of(e) < all->first_mbarrier && agent_of(e) % DW__SIDES <= DW__SIDE_COPY;
}

static bool is_generic(const common *all, epoch e) {
    return agent_of(e) < all->first_mbarrier && agent_of(e) % DW__SIDES == DW__SIDE_GENERIC;
}

static void describe(const dw__emu_cluster *cluster, epoch e, uint32_t lane, char *text,
                     size_t bytes) {
    static const char *const sides[DW__SIDES] = {[DW__SIDE_GENERIC] = "",
                                                 [DW__SIDE_INIT] = "",
                                                 [DW__SIDE_COPY] = "a copy of ",
                                                 [DW__SIDE_BULK] = "a copy of ",
                                                 [DW__SIDE_WGMMA] =
                                                     "a wgmma of the four warps from ",
                                                 [DW__SIDE_TENSOR] = "tcgen05 work of ",
                                                 [DW__SIDE_TENSOR_LOAD] = "a load of ",
                                                 [DW__SIDE_TENSOR_STORE] = "a store of "};
    const common *all = common_of(cluster);
    const dw__emu_kernel *kernel = cluster->grid->kernel;
    const uint32_t agent = agent_of(e), pc = pc_of(e);
    const dw__ptx_instruction *in =
        &kernel->function->code.items[kernel->from[pc < kernel->code_count ? pc : 0]];
    char who[96];
    if (agent >= all->first_mbarrier) {
        snprintf(who, sizeof who, "a copy of warp %u that completes on an mbarrier", lane);
    } else {
        const uint32_t warp = agent / DW__SIDES;
        const uint32_t *id = cluster->ctas[warp / all->warps_per_block].id;
        snprintf(who, sizeof who, "%sblock (%u, %u, %u) warp %u lane %u", sides[agent % DW__SIDES],
                 id[0], id[1], id[2], warp % all->warps_per_block, lane);
    }
    snprintf(text, bytes, "%s at PTX line %d (%s)", who, in->line, in->spelling);
}

/* "shared memory at 0x400" */
static void name_place(const dw__emu_cta *owner, uint32_t at, char *text, size_t bytes) {
    const uint32_t first = first_tensor_word(owner), column = at / 4 - first;
    if (at / 4 < first)
        snprintf(text, bytes, "shared memory at 0x%x", owner->rank << DW__RANK_SHIFT | at);
    else
        snprintf(text, bytes, "tensor memory of block %u, lanes %u to %u of column %u", owner->rank,
                 column / DW__TENSOR_COLUMNS * 32, column / DW__TENSOR_COLUMNS * 32 + 31,
                 column % DW__TENSOR_COLUMNS);
}

/* `other` is the access in a slot of a place. */
static void report(toucher *t, const dw__emu_cta *owner, uint32_t index, int slot, epoch other,
                   bool wrote, dw__emu_finding kind) {
    const dw__emu_race *race = owner->race;
    const uint32_t at = 4 * index, lane = is_generic(race->common, other)
                                              ? race->lanes[index] >> 5 * slot & 31
                                              : lane_of(other);
    char whom[200], place[96];
    if (t->reported) return;
    t->reported = true;
    describe(t->cta->cluster, other, lane, whom, sizeof whom);
    name_place(owner, at, place, sizeof place);
    if (kind == DW__FOUND_PROXY)
        dw__emu_found_at(t->cta, t->warp, t->lane, t->pc, kind,
                         "%s %s through the asynchronous proxy, which %s wrote "
                         "through the generic proxy: a fence.proxy.async between them is missing",
                         t->write ? "writes" : "reads", place, whom);
    else
        dw__emu_found_at(t->cta, t->warp, t->lane, t->pc, kind,
                         "%s %s, which %s %s: nothing orders the two",
                         t->write ? "writes" : "reads", place, whom, wrote ? "wrote" : "read");
}

/* Returns whether the access is tensor work of another warp that was waited for without a tcgen05.fence. */
static bool lacks_fence(const toucher *t, epoch e) {
    const uint32_t agent = agent_of(e);
    return t->ordered && agent / DW__SIDES != agent_of(t->self) / DW__SIDES &&
           t->seen[agent] >= time_of(e) && t->ordered[agent] < time_of(e);
}
static void report_fence(toucher *t, const dw__emu_cta *owner, uint32_t index, epoch other,
                         bool wrote) {
    char whom[200], place[96];
    if (t->reported) return;
    t->reported = true;
    describe(t->cta->cluster, other, lane_of(other), whom, sizeof whom);
    name_place(owner, 4 * index, place, sizeof place);
    dw__emu_found_at(
        t->cta, t->warp, t->lane, t->pc, DW__FOUND_PROXY, "%s %s, which %s %s: tcgen05.fence::%s",
        t->write ? "writes" : "reads", place, whom, wrote ? "wrote" : "read",
        t->released[agent_of(other)] >= time_of(other)
            ? "after_thread_sync is missing between the wait for that access and this one"
            : "before_thread_sync is missing after that access in its warp");
}

static bool is_transfer(uint32_t agent) {
    return agent % DW__SIDES == DW__SIDE_TENSOR_LOAD || agent % DW__SIDES == DW__SIDE_TENSOR_STORE;
}
/* Loads and stores of tensor memory by a quarter of the lanes are ordered by their issue. */
static bool is_issued_before(const toucher *t, epoch e) {
    const uint32_t warp = agent_of(e) / DW__SIDES;
    return warp == agent_of(t->self) / DW__SIDES ||
           t->seen[warp * DW__SIDES + DW__SIDE_GENERIC] > time_of(e);
}

/* Returns whether the access needs no further order: the same agent, or ordered before this one. */
static inline bool is_known(const toucher *t, epoch e) {
    const uint32_t agent = agent_of(e);
    return t->seen[agent] >= time_of(e) ||
           (agent == agent_of(t->self) && (t->in_order || time_of(e) == time_of(t->self))) ||
           (t->transfers && is_transfer(agent) && is_issued_before(t, e)) ||
           (is_strong(e) && is_strong(t->self));
}

static void after_write(toucher *t, const dw__emu_cta *owner, uint32_t index, int slot,
                        epoch write) {
    const common *all = owner->race->common;
    if (!is_known(t, write))
        report(t, owner, index, slot, write, true, DW__FOUND_RACE);
    else if (t->shown && through_generic(all, write) && t->shown[agent_of(write)] < time_of(write))
        report(t, owner, index, slot, write, true, DW__FOUND_PROXY);
    else if (lacks_fence(t, write))
        report_fence(t, owner, index, write, true);
}

static bool same_work(epoch a, epoch b) {
    return agent_of(a) == agent_of(b) && time_of(a) == time_of(b);
}

/* Chooses the slot for an access: one with the same agent, an empty one, that of a read that happened before, that of
 * any read, and only then that of a write. */
static int slot_for(const toucher *t, const history *x, uint32_t parts) {
    int best = (int)(time_of(t->self) % SLOTS), rank = 0;
    for (int i = 0; i < SLOTS; i++) {
        const epoch e = x->slots[i];
        const bool read = !is_write(parts, i), here = part_of(parts, i) != 0;
        const int value = !here                                                     ? 4
                          : read == !t->write && same_work(e, t->self)              ? 5
                          : read && t->seen[agent_of(e)] >= time_of(e) && !t->write ? 3
                          : read                                                    ? 1
                                                                                    : 0;
        if (value > rank) best = i, rank = value;
    }
    return best;
}

/* Returns whether another write of the same value is known, so that slot `i` does not matter. */
static bool is_known_otherwise(const toucher *t, const history *x, uint32_t parts, int i,
                               uint32_t part) {
    if (!is_same(parts, i)) return false;
    for (int k = 0; k < SLOTS; k++) {
        const epoch e = x->slots[k];
        if (k == i || !is_same(parts, k) || (part_of(parts, k) & part) != part) continue;
        if (is_known(t, e) && (!t->shown || t->shown[agent_of(e)] >= time_of(e))) return true;
    }
    return false;
}

/* Adds an access to a history. Returns the slot that keeps it; -1 if the history already covers it. */
static int add_access(toucher *t, const dw__emu_cta *owner, uint32_t index, uint32_t part,
                      history *x) {
    const uint32_t before = x->parts;
    uint32_t parts = before;
    bool beside = false; /* another agent has written the same value */
    for (int i = 0; i < SLOTS; i++) {
        const epoch e = x->slots[i];
        const uint32_t common_part = part_of(before, i) & part;
        if (!common_part) continue;
        const bool wrote = is_write(before, i);
        /* An atomic operation does not hide a preceding plain write of the warp. */
        const bool kept = e == t->self || (same_work(e, t->self) && !is_strong(e));
        if (kept && wrote && t->write && common_part == part) return -1;
        if (e == t->self && !wrote && !t->write && common_part == part) return -1;
        /* The old value remains, so agents that know the earlier write need not know this one. */
        if (t->same && wrote && agent_of(e) != agent_of(t->self)) {
            parts |= 1u << (5 * SLOTS + i);
            beside = true;
            continue;
        }
        if (t->same && !wrote && !is_known(t, e)) continue;
        if (wrote && !is_known_otherwise(t, x, before, i, common_part))
            after_write(t, owner, index, i, e);
        else if (!wrote && t->write && !is_known(t, e))
            report(t, owner, index, i, e, false, DW__FOUND_RACE);
        else if (!wrote && t->write && lacks_fence(t, e))
            report_fence(t, owner, index, e, false);
        if (t->write) parts &= ~(common_part << 4 * i);
    }
    if (t->write && parts & LIVE_MBARRIER && !t->reported) {
        t->reported = true;
        dw__emu_found_at(t->cta, t->warp, t->lane, t->pc, DW__FOUND_MBARRIER,
                         "overwrites the mbarrier at 0x%x, which is in use",
                         owner->rank << DW__RANK_SHIFT | (4 * index & ~7u));
    }
    const int slot = slot_for(t, x, parts);
    const uint32_t write = 1u << (4 * SLOTS + slot), same = 1u << (5 * SLOTS + slot);
    x->parts = parts;
    /* A read never replaces one of several writes of the same value: the next reader may know only that one. */
    if (!t->write && part_of(parts, slot) && is_same(parts, slot)) return -1;
    if (part_of(parts, slot) && same_work(x->slots[slot], t->self) &&
        is_write(parts, slot) == t->write)
        part |= part_of(parts, slot);
    x->slots[slot] = t->self;
    parts &= ~(15u << 4 * slot | write | same);
    x->parts = parts | part << 4 * slot | (t->write ? write : 0) | (beside ? same : 0);
    return slot;
}

/* Returns the number of a history. Returns DW__NO_HISTORY and stops the checker if memory is out. */
static uint32_t number_of(const toucher *t, dw__emu_race *race, const history *x) {
    uint32_t number = dw__history_number(&race->histories, x);
    if (number != DW__NO_HISTORY) return number;
    race->generation++; /* numbers of unused histories are assigned anew */
    if (dw__histories_make_room(&race->histories, race->places, race->place_count))
        number = dw__history_number(&race->histories, x);
    if (number == DW__NO_HISTORY)
        stop(t->cta, t->warp, t->pc, "the host is out of memory for the checker");
    return number;
}

/* Returns the transition that an access makes at a place, from the cache if the access made it at another place with
 * the same history. (Its clock can only have grown since then, so no finding is missed.) `spare` holds a transition
 * that is not cached. Returns NULL if the checker has stopped. */
static const step *step_of(toucher *t, const dw__emu_cta *owner, uint32_t index, uint32_t part,
                           step *spare) {
    dw__emu_race *race = owner->race;
    if (race->last != t->self || race->last_seen != t->seen)
        race->last = t->self, race->last_seen = t->seen, race->generation++;
    const uint32_t before = race->places[index],
                   how = part << 2 | (uint32_t)t->write << 1 | (uint32_t)t->same;
    step *kept = &race->steps[(before ^ before >> 5 ^ part) % STEPS];
    if (kept->generation == race->generation && kept->before == before && kept->how == how)
        return kept;
    history x = race->histories.items[before];
    const int slot = add_access(t, owner, index, part, &x);
    const uint32_t after = number_of(t, race, &x);
    if (after == DW__NO_HISTORY) return NULL;
    if (t->reported) kept = spare; /* the next place reports as well */
    *kept = (step){race->generation, before, after, how, slot};
    return kept;
}

static void touch_places(toucher *t, const dw__emu_cta *owner, uint32_t first, uint32_t count,
                         uint32_t part) {
    uint32_t *places = owner->race->places;
    const bool generic = is_generic(owner->race->common, t->self);
    const uint32_t end = first + count;
    for (uint32_t i = first; i < end;) {
        step spare;
        const step *taken = step_of(t, owner, i, part, &spare);
        if (!taken) return;
        const uint32_t begin = i, before = taken->before, after = taken->after;
        while (i < end && places[i] == before) places[i++] = after;
        if (!generic || taken->slot < 0) continue;
        const uint32_t at = 5 * (uint32_t)taken->slot;
        for (uint32_t k = begin; k < i; k++) {
            uint16_t *lanes = &owner->race->lanes[k];
            *lanes = (uint16_t)((*lanes & ~(31u << at)) | (uint32_t)t->lane << at);
        }
    }
}

static void touch(toucher *t, const dw__emu_cta *owner, uint32_t offset, uint32_t bytes) {
    const uint32_t end = offset + bytes;
    for (uint32_t at = offset; at < end;) {
        if (!(at & 3u) && end - at >= 4) {
            touch_places(t, owner, at / 4, (end - at) / 4, 15);
            at = end & ~3u;
            continue;
        }
        const uint32_t next = (at & ~3u) + 4, last = next < end ? next : end;
        touch_places(t, owner, at / 4, 1, ((1u << (last - at)) - 1) << (at & 3u));
        at = last;
    }
}

static toucher toucher_of(dw__emu_warp *w, int lane, bool write, bool strong) {
    const uint32_t agent = own_agent(w), *seen = dw__emu_seen(w->clock);
    return (toucher){w->cta, w->index, w->now.pc, lane, seen, NULL, NULL, NULL,
                     /* The lane is stored beside it. */
                     made(agent, seen[agent], w->now.pc, 0, strong), write, false, false, false,
                     false};
}

/* ---- the end of a block: its shared memory must be live while others access it --------------- */

static uint32_t place_of(const dw__emu_warp *w) {
    return w->cta->rank * w->cta->race->common->warps_per_block + w->index;
}
static bool has_ended(const dw__emu_cta *cta) {
    for (uint32_t i = 0; i < cta->warp_count; i++)
        if (cta->warps[i].live) return false;
    return true;
}

static void note_visit(dw__emu_warp *w, int lane, const dw__emu_cta *owner, uint32_t offset) {
    const uint32_t now = dw__emu_seen(w->clock)[own_agent(w)];
    visit *last = &owner->race->visits[place_of(w)];
    if (last->reported) return;
    last->reported = has_ended(owner);
    if (last->reported)
        dw__emu_found(w, lane, DW__FOUND_RACE,
                      "accesses shared memory at 0x%x of block (%u, %u, %u), which has ended",
                      owner->rank << DW__RANK_SHIFT | offset, owner->id[0], owner->id[1],
                      owner->id[2]);
    else
        last->time = now, last->pc = w->now.pc, last->lane = (uint32_t)lane;
}

void dw__emu_race_ended(dw__emu_warp *w) {
    dw__emu_cta *cta = w->cta;
    if (!active(w) || !cta->race->visits || !has_ended(cta)) return;
    const common *all = cta->race->common;
    for (uint32_t i = 0; i < cta->cluster->cta_count * all->warps_per_block; i++) {
        visit *v = &cta->race->visits[i];
        dw__emu_cta *from = &cta->cluster->ctas[i / all->warps_per_block];
        const uint32_t warp = i % all->warps_per_block;
        bool known = v->time == 0;
        for (uint32_t k = 0; k < cta->warp_count && !known; k++)
            known =
                dw__emu_seen(cta->warps[k].clock)[agent_at(all, from, warp, DW__SIDE_GENERIC)] >=
                v->time;
        v->reported = !known;
        if (!known)
            dw__emu_found_at(from, warp, (int)v->lane, v->pc, DW__FOUND_RACE,
                             "accesses shared memory of block (%u, %u, %u), which exits without "
                             "waiting for the access: a cluster barrier is missing before its exit",
                             cta->id[0], cta->id[1], cta->id[2]);
    }
}

void dw__emu_race_touch(dw__emu_warp *w, int lane, dw__emu_cta *owner, uint32_t offset,
                        uint32_t bytes, int access) {
    if (!active(w)) return;
    if (owner != w->cta) note_visit(w, lane, owner, offset);
    const bool strong = (access & DW__STRONG) != 0;
    dw__emu_clock **order = &owner->race->strong[offset / 4 % STRONG];
    if (strong && *order) join(w->clock, *order);
    toucher t = toucher_of(w, lane, (access & DW__WRITE) != 0, strong);
    t.same = (access & DW__SAME) && !strong;
    touch(&t, owner, offset, bytes);
    if (strong && access & DW__WRITE) give_ordered(w, order, (access & DW__ORDERS) != 0);
}

void dw__emu_race_strong(dw__emu_warp *w, bool acquires, bool releases, bool orders) {
    if (!active(w)) return;
    dw__emu_clock **order = &w->cta->race->common->global;
    if (acquires && *order) join(w->clock, *order);
    if (releases) give_ordered(w, order, orders);
}

/* ---- fences and barriers -------------------------------------------------------------------- */

void dw__emu_race_fence_proxy(dw__emu_warp *w) {
    if (!active(w)) return;
    memcpy(dw__emu_shown(w->clock), dw__emu_seen(w->clock),
           w->clock->agents * sizeof *w->clock->times);
    tick(w);
}
static dw__emu_clock *fenced_of(dw__emu_warp *w) {
    common *all = w->cta->race->common;
    return wanted(w->cta, w->index, w->now.pc,
                  &all->fenced[w->cta->rank * all->warps_per_block + w->index]);
}
void dw__emu_race_fence_init(dw__emu_warp *w) {
    if (!active(w)) return;
    const uint32_t agent = own_agent(w) + DW__SIDE_INIT;
    dw__emu_clock *fenced = fenced_of(w);
    if (!fenced) return;
    const uint32_t now = dw__emu_seen(w->clock)[agent];
    dw__emu_shown(w->clock)[agent] = now;
    dw__emu_seen(fenced)[agent] = dw__emu_shown(fenced)[agent] = now;
}
void dw__emu_race_fence(dw__emu_warp *w) {
    if (!active(w)) return;
    dw__emu_clock *fenced = fenced_of(w);
    if (!fenced) return;
    join(fenced, w->clock);
    tick(w);
}

void dw__emu_race_tensor_fence(dw__emu_warp *w, bool after) {
    if (!active(w) || w->clock->vectors < 4) return;
    uint32_t *released = dw__emu_released(w->clock), *ordered = dw__emu_ordered(w->clock);
    const uint32_t own = own_agent(w);
    if (after) {
        memcpy(ordered, released, w->clock->agents * sizeof *ordered);
        return;
    }
    for (int side = DW__SIDE_TENSOR; side <= DW__SIDE_TENSOR_STORE; side++)
        released[own + (uint32_t)side] = dw__emu_seen(w->clock)[own + (uint32_t)side];
}

void dw__emu_race_arrive(dw__emu_warp *w, uint32_t barrier) {
    if (active(w)) give(w, &w->cta->race->barriers[barrier].gathered);
}
void dw__emu_race_complete(dw__emu_cta *cta, uint32_t barrier) {
    if (is_on(cta->cluster)) complete(&cta->race->barriers[barrier], cta);
}
void dw__emu_race_leave(dw__emu_warp *w, uint32_t barrier) {
    if (active(w) && w->cta->race->barriers[barrier].completed)
        join(w->clock, w->cta->race->barriers[barrier].completed);
}

void dw__emu_race_cluster_arrive(dw__emu_warp *w, bool relaxed) {
    if (!active(w)) return;
    common *all = w->cta->race->common;
    /* Reads are complete before any arrival, including one that releases nothing else. */
    for (uint32_t rank = 0; rank < w->cta->cluster->cta_count && w->cta->race->visits; rank++)
        w->cta->cluster->ctas[rank].race->visits[place_of(w)].time = 0;
    give_ordered(w, &all->cluster.gathered, !relaxed);
}
void dw__emu_race_cluster_complete(dw__emu_cluster *cluster) {
    if (is_on(cluster)) complete(&common_of(cluster)->cluster, &cluster->ctas[0]);
}
void dw__emu_race_cluster_leave(dw__emu_warp *w) {
    if (active(w) && w->cta->race->common->cluster.completed)
        join(w->clock, w->cta->race->common->cluster.completed);
}

/* ---- mbarriers ----------------------------------------------------------------------------- */

static dw__emu_cta *owner_of(const dw__emu_cluster *cluster, uint32_t address) {
    return &cluster->ctas[address >> DW__RANK_SHIFT];
}
static mbarrier *mbarrier_at(const dw__emu_cluster *cluster, uint32_t address) {
    if (!is_on(cluster)) return NULL;
    dw__emu_race *race = owner_of(cluster, address)->race;
    const uint16_t index = race->mbarrier_at[(address & DW__OFFSET_MASK) / 8];
    return index ? &race->mbarriers.items[index - 1] : NULL;
}

static uint32_t next_time(common *all, uint32_t agent) {
    return all->times[agent] < LAST_TIME ? ++all->times[agent] : LAST_TIME;
}

/* Marks the bytes as a live mbarrier, which data must not overwrite, or as free. */
static void mark_mbarrier(dw__emu_warp *w, dw__emu_race *race, uint32_t offset, bool live) {
    const toucher t = toucher_of(w, 0, true, false);
    for (uint32_t place = offset / 4; place < offset / 4 + 2; place++) {
        history x = race->histories.items[race->places[place]];
        x.parts = live ? x.parts | LIVE_MBARRIER : x.parts & ~LIVE_MBARRIER;
        const uint32_t number = number_of(&t, race, &x);
        if (number == DW__NO_HISTORY) return;
        race->places[place] = number;
    }
}

void dw__emu_race_mbarrier_init(dw__emu_warp *w, int lane, uint32_t address, bool valid) {
    if (!active(w)) return;
    dw__emu_cta *owner = owner_of(w->cta->cluster, address);
    common *all = owner->race->common;
    dw__emu_race *race = owner->race;
    const uint32_t offset = address & DW__OFFSET_MASK;
    uint16_t *index = &race->mbarrier_at[offset / 8];
    if (!*index) {
        mbarrier fresh = {.agent = all->first_mbarrier + owner->rank * MBARRIERS +
                                   (uint32_t)(race->mbarriers.count % MBARRIERS)};
        if (race->mbarriers.count == UINT16_MAX || DW_PUSH(&race->mbarriers, fresh) != DW_OK) {
            stop(w->cta, w->index, w->now.pc, "the host is out of memory for the checker");
            return;
        }
        *index = (uint16_t)race->mbarriers.count;
    }
    mbarrier *b = &race->mbarriers.items[*index - 1];
    if (valid && b->valid) {
        char whom[200];
        describe(w->cta->cluster, b->init, lane_of(b->init), whom, sizeof whom);
        dw__emu_found(w, lane, DW__FOUND_MBARRIER,
                      "initialises the mbarrier at 0x%x, which %s initialised: an mbarrier.inval "
                      "between them is missing",
                      address, whom);
    }
    mark_mbarrier(w, race, offset, false);
    /* This counts as an ordinary write with respect to earlier accesses, except that fence.mbarrier_init also makes it
     * visible. */
    toucher t = toucher_of(w, lane, true, false);
    const uint32_t agent = own_agent(w) + DW__SIDE_INIT;
    const uint32_t time = dw__emu_seen(w->clock)[agent] = next_time(all, agent);
    t.self = made(agent, time, w->now.pc, (uint32_t)lane, false);
    touch(&t, owner, offset, 8);
    b->valid = valid;
    b->phases++;
    b->init = t.self;
    b->time = next_time(all, b->agent);
    if (valid) mark_mbarrier(w, race, offset, true);
}

static bool is_initialised(dw__emu_clock *clock, const mbarrier *b) {
    return dw__emu_seen(clock)[agent_of(b->init)] >= time_of(b->init);
}
static void use(dw__emu_warp *w, int lane, uint32_t address, const mbarrier *b) {
    char whom[200];
    if (is_initialised(w->clock, b)) return;
    describe(w->cta->cluster, b->init, lane_of(b->init), whom, sizeof whom);
    dw__emu_found(w, lane, DW__FOUND_RACE,
                  "uses the mbarrier at 0x%x, which %s initialised: nothing orders the two",
                  address, whom);
}

void dw__emu_race_mbarrier_arrive(dw__emu_warp *w, int lane, uint32_t address) {
    mbarrier *b = active(w) ? mbarrier_at(w->cta->cluster, address) : NULL;
    if (!b) return;
    use(w, lane, address, b);
    give(w, &b->gathered);
}

void dw__emu_race_mbarrier_signal(const dw__emu_async *work, dw__emu_side side, uint32_t address) {
    mbarrier *b = work->clock ? mbarrier_at(work->cta->cluster, address) : NULL;
    dw__emu_clock *gathered = b ? wanted(work->cta, work->warp, work->pc, &b->gathered) : NULL;
    if (!gathered) return;
    const uint32_t agent = agent_at(common_of(work->cta->cluster), work->cta, work->warp, side);
    join(gathered, work->clock);
    if (dw__emu_seen(gathered)[agent] < work->time) dw__emu_seen(gathered)[agent] = work->time;
    if (gathered->vectors == 4 && dw__emu_released(gathered)[agent] < work->time)
        dw__emu_released(gathered)[agent] = work->time;
}

void dw__emu_race_mbarrier_complete(dw__emu_cluster *cluster, uint32_t address) {
    mbarrier *b = mbarrier_at(cluster, address);
    if (!b) return;
    dw__emu_cta *owner = owner_of(cluster, address);
    if (!wanted(owner, 0, 0, &b->gathered) || !wanted(owner, 0, 0, &b->completed)) return;
    dw__emu_seen(b->gathered)[b->agent] = b->time;
    assign(b->completed, b->gathered);
    b->phases++;
    b->time = next_time(owner->race->common, b->agent);
}

void dw__emu_race_mbarrier_passed(dw__emu_warp *w, int lane, uint32_t address) {
    mbarrier *b = active(w) ? mbarrier_at(w->cta->cluster, address) : NULL;
    if (!b) return;
    use(w, lane, address, b);
    if (b->completed) join(w->clock, b->completed);
}

uint32_t dw__emu_race_mbarrier_phase(const dw__emu_cluster *cluster, uint32_t address) {
    uint32_t offset;
    if (!dw__emu_block_at(cluster, address, 8, &offset)) return 0;
    const mbarrier *b = mbarrier_at(cluster, address);
    return b ? b->phases : 0;
}

void dw__emu_race_mbarrier_bytes(const dw__emu_async *work, uint32_t address, uint32_t phase) {
    const mbarrier *b = work->clock && dw__emu_race_mbarrier_phase(work->cta->cluster, address)
                            ? mbarrier_at(work->cta->cluster, address)
                            : NULL;
    if (!b) return;
    const uint32_t agent = agent_of(b->init);
    const bool ordered = is_initialised(work->clock, b);
    if (!ordered || dw__emu_shown(work->clock)[agent] < time_of(b->init)) {
        char whom[200];
        describe(work->cta->cluster, b->init, lane_of(b->init), whom, sizeof whom);
        dw__emu_found_at(work->cta, work->warp, (int)work->lane, work->pc,
                         ordered ? DW__FOUND_PROXY : DW__FOUND_RACE,
                         "a copy completes on the mbarrier at 0x%x, which %s initialised: %s",
                         address, whom,
                         ordered ? "a fence.mbarrier_init or fence.proxy.async between them is "
                                   "missing"
                                 : "nothing orders the two");
    }
    if (phase && b->phases != phase)
        dw__emu_found_at(
            work->cta, work->warp, (int)work->lane, work->pc, DW__FOUND_MBARRIER,
            "the phase of the mbarrier at 0x%x in which this copy was issued completed "
            "without its bytes: expect_tx was missing, late, or of too few bytes",
            address);
}

/* ---- work beside the warps ------------------------------------------------------------------ */

bool dw__emu_race_issue(dw__emu_warp *w, dw__emu_async *work) {
    if (!active(w)) return true;
    if (work->clock) {
        meet(work->clock, w->clock);
    } else {
        work->clock = new_clock(w->clock->agents, w->clock->vectors);
        if (!work->clock) return false;
        assign(work->clock, w->clock);
    }
    tick(w);
    return true;
}

void dw__emu_race_generic(dw__emu_async *work) {
    if (!work->clock) return;
    memcpy(dw__emu_shown(work->clock), dw__emu_seen(work->clock),
           work->clock->agents * sizeof *work->clock->times);
}

void dw__emu_race_next_time(dw__emu_async *work, uint32_t warp, dw__emu_side side) {
    if (!is_on(work->cta->cluster)) return;
    common *all = work->cta->race->common;
    work->time = next_time(all, agent_at(all, work->cta, warp, side));
}
void dw__emu_race_last_time(dw__emu_async *work, dw__emu_side side) {
    if (!is_on(work->cta->cluster)) return;
    const common *all = work->cta->race->common;
    work->time = all->times[agent_at(all, work->cta, work->warp, side)];
}

void dw__emu_race_issued(dw__emu_async *work) {
    if (!work->clock) return;
    work->time = dw__emu_seen(work->clock)[agent_at(common_of(work->cta->cluster), work->cta,
                                                    work->warp, DW__SIDE_GENERIC)];
}

static void touch_for(dw__emu_async *work, epoch self, bool generic, dw__emu_cta *owner,
                      uint32_t offset, uint32_t bytes, bool write) {
    toucher t = {work->cta,
                 work->warp,
                 work->pc,
                 (int)work->lane,
                 dw__emu_seen(work->clock),
                 generic ? NULL : dw__emu_shown(work->clock),
                 NULL,
                 NULL,
                 self,
                 write,
                 work->reported,
                 false,
                 false,
                 false};
    touch(&t, owner, offset, bytes);
    work->reported = t.reported;
}

void dw__emu_race_work(dw__emu_async *work, uint32_t warp, dw__emu_side side, dw__emu_cta *owner,
                       uint32_t offset, uint32_t bytes, bool write) {
    if (!work->clock || !is_on(owner->cluster)) return;
    const uint32_t agent = agent_at(owner->race->common, work->cta, warp, side);
    touch_for(work, made(agent, work->time, work->pc, work->lane, false), side == DW__SIDE_COPY,
              owner, offset, bytes, write);
}

/* `part`: bits of the word's bytes, two for each half of a quarter's lanes. */
static void touch_tensor(toucher *t, dw__emu_cta *owner, uint32_t lane, uint32_t lanes,
                         uint32_t column, uint32_t columns) {
    for (uint32_t quarter = 0; quarter < DW__TENSOR_LANES / 32; quarter++) {
        const uint32_t begin = 32 * quarter, end = lane + lanes;
        const uint32_t part = (lane < begin + 16 && end > begin ? 3u : 0u) |
                              (lane < begin + 32 && end > begin + 16 ? 12u : 0u);
        if (part)
            touch_places(t, owner, first_tensor_word(owner) + quarter * DW__TENSOR_COLUMNS + column,
                         columns, part);
    }
}

void dw__emu_race_tensor(dw__emu_async *work, dw__emu_side side, dw__emu_cta *owner, uint32_t lane,
                         uint32_t lanes, uint32_t column, uint32_t columns, bool write) {
    if (!work->clock || !is_on(owner->cluster)) return;
    const uint32_t agent = agent_at(owner->race->common, work->cta, work->warp, side);
    const bool fences = work->clock->vectors == 4;
    toucher t = {work->cta,
                 work->warp,
                 work->pc,
                 (int)work->lane,
                 dw__emu_seen(work->clock),
                 NULL,
                 fences ? dw__emu_released(work->clock) : NULL,
                 fences ? dw__emu_ordered(work->clock) : NULL,
                 made(agent, work->time, work->pc, work->lane, false),
                 write,
                 work->reported,
                 side == DW__SIDE_TENSOR,
                 side != DW__SIDE_TENSOR,
                 false};
    touch_tensor(&t, owner, lane, lanes, column, columns);
    work->reported = t.reported;
}

void dw__emu_race_tensor_allocated(dw__emu_cta *owner, uint32_t column, uint32_t columns) {
    if (!is_on(owner->cluster)) return;
    for (uint32_t quarter = 0; quarter < DW__TENSOR_LANES / 32; quarter++)
        memset(
            &owner->race->places[first_tensor_word(owner) + quarter * DW__TENSOR_COLUMNS + column],
            0, columns * sizeof *owner->race->places);
}

void dw__emu_race_copied(dw__emu_async *work, uint32_t address, dw__emu_cta *owner, uint32_t offset,
                         uint32_t bytes, bool write) {
    if (!work->clock || !dw__emu_race_mbarrier_phase(owner->cluster, address)) return;
    const mbarrier *b = mbarrier_at(owner->cluster, address);
    touch_for(work, made(b->agent, b->time, work->pc, work->warp, false), false, owner, offset,
              bytes, write);
}

void dw__emu_race_waited(dw__emu_warp *w, uint32_t warp, dw__emu_side side, uint32_t time) {
    if (!active(w)) return;
    uint32_t *seen = &dw__emu_seen(w->clock)[agent_at(w->cta->race->common, w->cta, warp, side)];
    if (*seen < time) *seen = time;
}

void dw__emu_race_waited_all(dw__emu_warp *w, dw__emu_side side) {
    if (!active(w)) return;
    uint32_t *seen = dw__emu_seen(w->clock);
    seen[own_agent(w) + (uint32_t)side] = seen[own_agent(w)];
}
