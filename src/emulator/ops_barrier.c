/* Barriers of a block (bar, barrier), of a cluster (barrier.cluster) and in memory (mbarrier), and mapa and
 * getctarank, which translate addresses between the blocks of a cluster: PTX ISA, "Parallel Synchronization and
 * Communication Instructions".
 */
#include "emulator/barrier.h"
#include "emulator/lanes.h"
#include "emulator/race.h"
#include "emulator/written.h"
#include <stdio.h>
#include <string.h>

/* ---- barriers of a block ------------------------------------------------------------------- */

typedef struct block_barrier {
    enum { SYNC, ARRIVE, RED_AND, RED_OR, RED_POPC } kind;
    bool counted;
    uint32_t index, count, predicate;
} block_barrier;

static void complete_barrier(dw__emu_cta *cta, dw__emu_barrier *b) {
    dw__emu_race_complete(cta, (uint32_t)(b - cta->barriers));
    b->phase++;
    b->arrived = 0;
    b->result_and = b->gathered_and, b->result_or = b->gathered_or,
    b->result_count = b->gathered_count;
    b->gathered_and = 1, b->gathered_or = 0, b->gathered_count = 0;
}

static uint32_t live_threads(const dw__emu_cta *cta) {
    uint32_t live = 0;
    for (uint32_t i = 0; i < cta->warp_count; i++)
        if (cta->warps[i].live) live += DW__LANES;
    return live;
}

/* Barriers do not wait for threads that have exited. */
void dw__emu_barriers_after_exit(dw__emu_cta *cta) {
    for (int i = 0; i < DW__BARRIERS; i++) {
        dw__emu_barrier *b = &cta->barriers[i];
        if (b->arrived > 0 && b->expected == 0 && b->arrived >= live_threads(cta))
            complete_barrier(cta, b);
    }
}

static dw__emu_next barrier_result(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask,
                                   const dw__emu_barrier *b) {
    const block_barrier *k = op->detail;
    dw__emu_race_leave(w, (uint32_t)(b - w->cta->barriers));
    if (k->kind == RED_POPC) {
        DW__EACH_LANE(lane, mask) DW__REGISTER(w, uint32_t, op->d)[lane] = b->result_count;
    } else if (k->kind == RED_AND || k->kind == RED_OR) {
        uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
        bool yes = k->kind == RED_AND ? b->result_and : b->result_or;
        *d = (*d & ~mask) | (yes ? mask : 0);
    }
    return DW__NEXT;
}

static dw__emu_next barrier_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const block_barrier *k = op->detail;
    const int first = __builtin_ctz(mask);
    dw__emu_cta *cta = w->cta;
    if (w->now.inside) {
        dw__emu_barrier *b = &cta->barriers[w->now.object];
        if (b->phase == w->now.phase) {
            w->now.wait = DW__WAIT_BARRIER;
            return DW__AGAIN;
        }
        w->now.inside = false;
        return barrier_result(w, op, mask, b);
    }
    const uint32_t index = DW__REGISTER(w, uint32_t, k->index)[first];
    const uint32_t count = k->counted ? DW__REGISTER(w, uint32_t, k->count)[first] : 0;
    if (index >= DW__BARRIERS || count % DW__LANES || (k->counted && count == 0)) {
        dw__emu_found(w, first, DW__FOUND_INVALID,
                      "barrier %u with %u threads: there are %d barriers, and the count must be a "
                      "multiple of 32",
                      index, count, DW__BARRIERS);
        return DW__FAULT;
    }
    dw__emu_barrier *b = &cta->barriers[index];
    if (b->arrived == 0)
        b->expected = count, b->gathered_and = 1, b->gathered_or = 0, b->gathered_count = 0;
    const uint32_t all = cta->warp_count * DW__LANES;
    if ((b->expected ? b->expected : all) != (count ? count : all)) {
        dw__emu_found(w, first, DW__FOUND_INVALID,
                      "barrier %u with %u threads, but other threads expect %u", index,
                      count ? count : all, b->expected ? b->expected : all);
        return DW__FAULT;
    }
    if (k->kind >= RED_AND) {
        uint32_t p = *DW__REGISTER(w, uint32_t, k->predicate) & mask;
        b->gathered_and &= p == mask, b->gathered_or |= p != 0,
            b->gathered_count += (uint32_t)__builtin_popcount(p);
    }
    cta->cluster->progress++;
    const uint32_t phase = b->phase;
    dw__emu_race_arrive(w, index);
    b->arrived += DW__LANES;
    if (b->arrived >= (count ? count : live_threads(cta))) complete_barrier(cta, b);
    if (k->kind == ARRIVE) return DW__NEXT;
    if (b->phase != phase) return barrier_result(w, op, mask, b);
    w->now = (dw__emu_group){.pc = w->now.pc,
                             .mask = w->now.mask,
                             .wait = DW__WAIT_BARRIER,
                             .inside = true,
                             .object = index,
                             .phase = phase};
    return DW__AGAIN;
}

static dw_status translate_block(dw__emu_translator *t) {
    block_barrier *k = dw__emu_detail(t, sizeof *k);
    const dw__ptx_operand *o = t->in->operands;
    int at = 0;
    uint32_t d = 0;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    (void)dw__emu_take(t, "cta");
    if (dw__emu_take(t, "sync")) {
        k->kind = SYNC;
    } else if (dw__emu_take(t, "arrive")) {
        k->kind = ARRIVE;
    } else if (dw__emu_take(t, "red")) {
        k->kind = dw__emu_take(t, "and")    ? RED_AND
                  : dw__emu_take(t, "or")   ? RED_OR
                  : dw__emu_take(t, "popc") ? RED_POPC
                                            : SYNC;
        if (k->kind == SYNC) return dw__emu_unsupported(t);
    } else {
        return t->cursor = 0, dw__emu_unsupported(t);
    }
    (void)dw__emu_take(t, "aligned");
    bool reduces = k->kind >= RED_AND;
    if (reduces && !dw__emu_take(t, k->kind == RED_POPC ? "u32" : "pred"))
        return dw__emu_unsupported(t);
    int given = t->in->operand_count, rest = given - 2 * reduces;
    if (rest < 1 || rest > 2) return dw__emu_malformed(t, "wrong number of operands");
    if (reduces)
        DW_RETURN_IF_FAILED(
            dw__emu_take_result(t, &o[at++], k->kind == RED_POPC ? DW__T_B32 : DW__T_PRED, &d));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_B32, &k->index));
    k->counted = rest == 2;
    if (k->counted) DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_B32, &k->count));
    if (reduces) DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_PRED, &k->predicate));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, barrier_run));
    t->op->d = d;
    t->op->detail = k;
    /* Subgroups of a warp may reach barriers that are not .aligned. Barriers count whole warps, so the lanes are
     * gathered here. */
    t->op->aligned = true;
    return DW_OK;
}

/* ---- barriers of a cluster ----------------------------------------------------------------- */

static uint32_t cluster_warps(const dw__emu_cluster *cluster) {
    uint32_t live = 0;
    for (uint32_t i = 0; i < cluster->cta_count; i++)
        for (uint32_t k = 0; k < cluster->ctas[i].warp_count; k++)
            live += cluster->ctas[i].warps[k].live != 0;
    return live;
}
static void complete_cluster(dw__emu_cluster *cluster) {
    if (cluster->barrier.arrived < cluster_warps(cluster)) return;
    dw__emu_race_cluster_complete(cluster);
    cluster->barrier.arrived = 0, cluster->barrier.phase++;
}
void dw__emu_cluster_after_exit(dw__emu_cluster *cluster) {
    if (cluster->barrier.arrived > 0) complete_cluster(cluster);
}
static dw__emu_next cluster_arrive_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    dw__emu_cluster *cluster = w->cta->cluster;
    if (w->cluster_arrived) {
        dw__emu_found(w, __builtin_ctz(mask), DW__FOUND_INVALID,
                      "arrives at the cluster's barrier twice without waiting");
        return DW__FAULT;
    }
    w->cluster_arrived = true;
    w->cluster_phase = cluster->barrier.phase;
    cluster->progress++;
    dw__emu_race_cluster_arrive(w, op->immediate);
    cluster->barrier.arrived++;
    complete_cluster(cluster);
    return DW__NEXT;
}
static dw__emu_next cluster_wait_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)op;
    if (!w->cluster_arrived) {
        dw__emu_found(w, __builtin_ctz(mask), DW__FOUND_INVALID,
                      "waits at the cluster's barrier without having arrived");
        return DW__FAULT;
    }
    if (w->cta->cluster->barrier.phase == w->cluster_phase) {
        w->now.wait = DW__WAIT_CLUSTER;
        return DW__AGAIN;
    }
    w->cluster_arrived = false;
    dw__emu_race_cluster_leave(w);
    return DW__NEXT;
}
static dw_status translate_cluster(dw__emu_translator *t) {
    bool arrive = dw__emu_take(t, "arrive"), wait = !arrive && dw__emu_take(t, "wait");
    if (!arrive && !wait) return dw__emu_unsupported(t);
    static const char *const senses[] = {"release", "relaxed", "acquire", NULL};
    const bool relaxed = dw__emu_take_one_of(t, senses) == 1;
    (void)dw__emu_take(t, "aligned");
    DW_RETURN_IF_FAILED(dw__emu_emit(t, arrive ? cluster_arrive_run : cluster_wait_run));
    t->op->aligned = true;
    t->op->immediate = relaxed;
    return DW_OK;
}

static dw_status translate_barrier(dw__emu_translator *t) {
    return dw__emu_take(t, "cluster") ? translate_cluster(t) : translate_block(t);
}
static dw_status translate_bar(dw__emu_translator *t) { return translate_block(t); }

/* ---- mbarrier ------------------------------------------------------------------------------ */

typedef struct mbarrier {
    uint32_t pending, expected;
    int32_t outstanding;
    uint32_t parity;
    bool valid;
} mbarrier;

static mbarrier decode(uint64_t bits) {
    return (mbarrier){(uint32_t)bits & DW__MBARRIER_MOST,
                      (uint32_t)(bits >> 20) & DW__MBARRIER_MOST,
                      (int32_t)((bits >> 40) & 0x1FFFFF) - (1 << 20), (uint32_t)(bits >> 61) & 1,
                      bits >> 62 == 3};
}
static uint64_t encode(const mbarrier *b) {
    return (uint64_t)3 << 62 | (uint64_t)b->parity << 61 |
           (uint64_t)(uint32_t)(b->outstanding + (1 << 20)) << 40 | (uint64_t)b->expected << 20 |
           b->pending;
}

/* The agent that accesses an mbarrier, for messages. */
typedef struct accessor {
    dw__emu_cta *cta;
    uint32_t warp, pc;
    int lane;
    /* Asynchronous work that arrives; NULL: the warp itself arrives, or a copy completes bytes. */
    const dw__emu_async *work;
    dw__emu_side side; /* of `work` */
    bool copy;
} accessor;
static accessor asker_of(const dw__emu_warp *w, int lane) {
    return (accessor){w->cta, w->index, w->now.pc, lane, NULL, DW__SIDE_GENERIC, false};
}

/* Returns the mbarrier at a shared::cluster address. */
static unsigned char *mbarrier_at(const accessor *who, uint32_t address, mbarrier *b,
                                  bool initial) {
    uint32_t offset;
    dw__emu_cta *owner = dw__emu_block_at(who->cta->cluster, address, 8, &offset);
    if (!owner || offset % 8) {
        dw__emu_found_at(who->cta, who->warp, who->lane, who->pc, DW__FOUND_BOUNDS,
                         "mbarrier at 0x%x, which is not an aligned address in shared memory",
                         address);
        return NULL;
    }
    unsigned char *at = owner->shared + offset;
    uint64_t bits;
    memcpy(&bits, at, sizeof bits);
    *b = decode(bits);
    const bool known = dw__count_unwritten(owner->defined, offset, 8) == 0;
    if (!initial && (!b->valid || !known)) {
        dw__emu_found_at(who->cta, who->warp, who->lane, who->pc, DW__FOUND_MBARRIER,
                         "no mbarrier at 0x%x: it was not initialised, or was overwritten",
                         address);
        return NULL;
    }
    return at;
}

static void settle(dw__emu_cluster *cluster, uint32_t address, unsigned char *at, mbarrier *b) {
    if (b->pending == 0 && b->outstanding == 0) {
        dw__emu_race_mbarrier_complete(cluster, address);
        b->parity ^= 1, b->pending = b->expected;
    }
    uint64_t bits = encode(b);
    memcpy(at, &bits, sizeof bits);
    cluster->progress++;
}

static bool add_arrivals(const accessor *who, uint32_t address, uint32_t count, bool drop,
                         int32_t transactions, uint64_t *before) {
    mbarrier b;
    unsigned char *at = mbarrier_at(who, address, &b, false);
    if (!at) return false;
    *before = encode(&b);
    if (count > b.pending) {
        dw__emu_found_at(
            who->cta, who->warp, who->lane, who->pc, DW__FOUND_MBARRIER,
            "%u arrivals at the mbarrier at 0x%x, which expects %u more in this phase (of %u)",
            count, address, b.pending, b.expected);
        return false;
    }
    if (b.outstanding + transactions >= (1 << 20) || b.outstanding + transactions <= -(1 << 20)) {
        dw__emu_found_at(who->cta, who->warp, who->lane, who->pc, DW__FOUND_MBARRIER,
                         "%d more bytes at the mbarrier at 0x%x, which has %d outstanding: the "
                         "limit is 2^20 - 1",
                         transactions, address, b.outstanding);
        return false;
    }
    b.outstanding += transactions;
    b.pending -= count;
    if (drop) b.expected -= count;
    if (who->work)
        dw__emu_race_mbarrier_signal(who->work, who->side, address);
    else if (!who->copy)
        dw__emu_race_mbarrier_arrive(&who->cta->warps[who->warp], who->lane, address);
    settle(who->cta->cluster, address, at, &b);
    return true;
}

bool dw__emu_mbarrier_arrive(const dw__emu_async *work, dw__emu_side side, uint32_t address,
                             uint32_t count) {
    accessor who = {work->cta, work->warp, work->pc, (int)work->lane, work, side, false};
    uint64_t before;
    return add_arrivals(&who, address, count, false, 0, &before);
}
bool dw__emu_mbarrier_complete(dw__emu_cta *by, uint32_t warp, int lane, uint32_t pc,
                               uint32_t address, uint32_t bytes) {
    accessor who = {by, warp, pc, lane, NULL, DW__SIDE_GENERIC, true};
    uint64_t before;
    return add_arrivals(&who, address, 0, false, -(int32_t)bytes, &before);
}
bool dw__emu_mbarrier_expect_arrival(dw__emu_cta *by, uint32_t warp, int lane, uint32_t pc,
                                     uint32_t address) {
    accessor who = {by, warp, pc, lane, NULL, DW__SIDE_GENERIC, true};
    mbarrier b;
    unsigned char *at = mbarrier_at(&who, address, &b, false);
    if (!at) return false;
    if (b.pending == DW__MBARRIER_MOST) {
        dw__emu_found_at(
            by, warp, lane, pc, DW__FOUND_MBARRIER,
            "one more pending arrival at the mbarrier at 0x%x, whose count is limited to %u",
            address, DW__MBARRIER_MOST);
        return false;
    }
    b.pending++;
    const uint64_t bits = encode(&b);
    memcpy(at, &bits, sizeof bits);
    return true;
}
void dw__emu_mbarrier_describe(const dw__emu_cluster *cluster, uint32_t address, char *text,
                               size_t bytes) {
    uint32_t offset;
    const dw__emu_cta *owner = dw__emu_block_at(cluster, address, 8, &offset);
    uint64_t bits = 0;
    if (owner) memcpy(&bits, owner->shared + offset, sizeof bits);
    mbarrier b = decode(bits);
    snprintf(text, bytes,
             "mbarrier 0x%x: %u of %u arrivals pending, %d bytes outstanding, phase of parity %u",
             address, b.pending, b.expected, b.outstanding, b.parity);
}

typedef struct mbarrier_op {
    dw__emu_address address;
    bool generic, has_count, drop, has_result, blocks, by_parity, init;
    uint32_t count, result, state;
    enum { COUNT_ARRIVALS, COUNT_BYTES, COUNT_BOTH } what; /* the unit of `count` */
    bool completes;
} mbarrier_op;

/* Computes a lane's shared::cluster address. Generic addresses must lie in the shared window. */
static bool shared_address(dw__emu_warp *w, const mbarrier_op *k, int lane, uint32_t *address) {
    uint64_t full = dw__emu_lane_address(w, &k->address, lane);
    if ((full & DW__WINDOW_MASK) == DW__SHARED_WINDOW)
        full &= ~DW__WINDOW_MASK;
    else if (k->generic || full > UINT32_MAX) {
        dw__emu_found(w, lane, DW__FOUND_BOUNDS,
                      "mbarrier at 0x%llx, which is not in shared memory",
                      (unsigned long long)full);
        return false;
    }
    *address = (uint32_t)full;
    return true;
}

static dw__emu_next init_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const mbarrier_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        uint32_t address, count = k->init ? DW__REGISTER(w, uint32_t, k->count)[lane] : 0;
        mbarrier b;
        accessor who = asker_of(w, (int)lane);
        if (!shared_address(w, k, (int)lane, &address)) return DW__FAULT;
        unsigned char *at = mbarrier_at(&who, address, &b, k->init);
        if (!at) return DW__FAULT;
        if (k->init && (count == 0 || count > DW__MBARRIER_MOST)) {
            dw__emu_found(w, (int)lane, DW__FOUND_MBARRIER,
                          "an mbarrier of %u arrivals: must be 1 to %u", count, DW__MBARRIER_MOST);
            return DW__FAULT;
        }
        dw__emu_race_mbarrier_init(w, (int)lane, address, k->init);
        dw__set_written(w->cta->cluster->ctas[address >> DW__RANK_SHIFT].defined,
                        address & DW__OFFSET_MASK, 8, true);
        uint64_t bits = 0;
        b = (mbarrier){.pending = count, .expected = count};
        if (k->init) bits = encode(&b);
        memcpy(at, &bits, sizeof bits);
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}

static dw__emu_next arrive_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const mbarrier_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        const uint32_t count = k->has_count ? DW__REGISTER(w, uint32_t, k->count)[lane] : 1;
        uint32_t address;
        uint64_t before;
        accessor who = asker_of(w, (int)lane);
        if (!shared_address(w, k, (int)lane, &address)) return DW__FAULT;
        const uint32_t arrivals = k->what == COUNT_ARRIVALS ? count : k->what == COUNT_BOTH ? 1 : 0;
        const int32_t bytes = k->what == COUNT_ARRIVALS ? 0
                              : k->completes            ? -(int32_t)count
                                                        : (int32_t)count;
        if (!add_arrivals(&who, address, arrivals, k->drop, bytes, &before)) return DW__FAULT;
        if (k->has_result) DW__REGISTER(w, uint64_t, k->result)[lane] = before;
    }
    return DW__NEXT;
}

/* Number of times that a potentially blocking wait is tried before it returns false, as hardware does after a time
 * limit. */
#define TRIES 8

static dw__emu_next wait_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const mbarrier_op *k = op->detail;
    uint32_t done = 0, address = 0, *d = DW__REGISTER(w, uint32_t, op->d);
    DW__EACH_LANE(lane, mask) {
        mbarrier b;
        accessor who = asker_of(w, (int)lane);
        if (!shared_address(w, k, (int)lane, &address) || !mbarrier_at(&who, address, &b, false))
            return DW__FAULT;
        uint32_t wanted = k->by_parity
                              ? DW__REGISTER(w, uint32_t, k->state)[lane] & 1
                              : (uint32_t)(DW__REGISTER(w, uint64_t, k->state)[lane] >> 61) & 1;
        const bool passed = b.parity != wanted;
        done |= (uint32_t)passed << lane;
        if (passed) dw__emu_race_mbarrier_passed(w, (int)lane, address);
    }
    if (done != mask) {
        const uint32_t phase = dw__emu_race_mbarrier_phase(w->cta->cluster, address);
        const bool again = w->now.tries > 0 && w->now.object == address;
        if (again && w->now.phase && phase > w->now.phase + 1)
            dw__emu_found(w, __builtin_ctz(mask & ~done), DW__FOUND_MBARRIER,
                          "%u phases of the mbarrier at 0x%x completed while a wait for one of "
                          "them was pending",
                          phase - w->now.phase, address);
        if (!again) w->now.phase = phase;
        w->now.wait = DW__WAIT_MBARRIER;
        w->now.object = address;
        if (k->blocks && w->now.tries++ < TRIES) return DW__AGAIN;
    }
    w->now.tries = 0;
    *d = (*d & ~mask) | done;
    if (done == mask) return w->now.wait = DW__WAIT_NONE, DW__NEXT;
    return DW__GAVE_WAY;
}

static bool take_mbarrier_space(dw__emu_translator *t, mbarrier_op *k) {
    static const char *const orders[] = {"release", "acquire",    "relaxed", "cta",
                                         "cluster", "noComplete", NULL};
    static const char *const spaces[] = {"shared", "shared::cta", "shared::cluster", NULL};
    while (dw__emu_take_one_of(t, orders) >= 0) {
    }
    k->generic = dw__emu_take_one_of(t, spaces) < 0;
    return dw__emu_take(t, "b64");
}

static dw_status emit_mbarrier(dw__emu_translator *t, mbarrier_op *k, dw__emu_run run) {
    DW_RETURN_IF_FAILED(dw__emu_emit(t, run));
    t->op->detail = k;
    return DW_OK;
}

static dw_status translate_mbarrier_init(dw__emu_translator *t, mbarrier_op *k, bool init) {
    k->init = init;
    if (!take_mbarrier_space(t, k) || t->in->operand_count != 1 + init)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    if (init)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B32, &k->count));
    return emit_mbarrier(t, k, init_run);
}

static dw_status translate_mbarrier_arrive(dw__emu_translator *t, mbarrier_op *k, bool drop) {
    k->drop = drop;
    k->what = dw__emu_take(t, "expect_tx") ? COUNT_BOTH : COUNT_ARRIVALS;
    (void)dw__emu_take(t, "noComplete");
    if (!take_mbarrier_space(t, k)) return dw__emu_unsupported(t);
    const int given = t->in->operand_count;
    const bool result = given > 0 && t->in->operands[0].kind != DW__PTX_ADDRESS;
    if (given < 1 + result || given > 2 + result)
        return dw__emu_malformed(t, "wrong number of operands");
    k->has_result = result && t->in->operands[0].kind != DW__PTX_SINK;
    if (k->has_result)
        DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_B64, &k->result));
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[result], &k->address));
    k->has_count = given == 2 + result;
    if (k->what == COUNT_BOTH && !k->has_count)
        return dw__emu_malformed(t, "the number of bytes is missing");
    if (k->has_count)
        DW_RETURN_IF_FAILED(
            dw__emu_take_source(t, &t->in->operands[1 + result], DW__T_B32, &k->count));
    return emit_mbarrier(t, k, arrive_run);
}

static dw_status translate_mbarrier_bytes(dw__emu_translator *t, mbarrier_op *k, bool completes) {
    k->what = COUNT_BYTES;
    k->completes = completes;
    k->has_count = true;
    if (!take_mbarrier_space(t, k) || t->in->operand_count != 2) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B32, &k->count));
    return emit_mbarrier(t, k, arrive_run);
}

static dw_status translate_mbarrier_wait(dw__emu_translator *t, mbarrier_op *k, bool blocks) {
    uint32_t d;
    k->blocks = blocks;
    k->by_parity = dw__emu_take(t, "parity");
    if (!take_mbarrier_space(t, k) || t->in->operand_count < 3 || t->in->operand_count > 4)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_PRED, &d));
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[1], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2],
                                            k->by_parity ? DW__T_B32 : DW__T_B64, &k->state));
    DW_RETURN_IF_FAILED(emit_mbarrier(t, k, wait_run));
    t->op->d = d;
    return DW_OK;
}

static dw__emu_next pending_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint64_t *a = DW__REGISTER(w, uint64_t, op->a);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    DW__EACH_LANE(lane, mask) d[lane] = decode(a[lane]).pending;
    return DW__NEXT;
}

static dw_status translate_mbarrier(dw__emu_translator *t) {
    mbarrier_op *k = dw__emu_detail(t, sizeof *k);
    uint32_t a, d;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (dw__emu_take(t, "init")) return translate_mbarrier_init(t, k, true);
    if (dw__emu_take(t, "inval")) return translate_mbarrier_init(t, k, false);
    if (dw__emu_take(t, "arrive")) return translate_mbarrier_arrive(t, k, false);
    if (dw__emu_take(t, "arrive_drop")) return translate_mbarrier_arrive(t, k, true);
    if (dw__emu_take(t, "expect_tx")) return translate_mbarrier_bytes(t, k, false);
    if (dw__emu_take(t, "complete_tx")) return translate_mbarrier_bytes(t, k, true);
    if (dw__emu_take(t, "try_wait")) return translate_mbarrier_wait(t, k, true);
    if (dw__emu_take(t, "test_wait")) return translate_mbarrier_wait(t, k, false);
    if (!dw__emu_take(t, "pending_count") || !dw__emu_take(t, "b64") || t->in->operand_count != 2)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B64, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], DW__T_B32, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, pending_run));
    t->op->a = a, t->op->d = d;
    return DW_OK;
}

/* ---- addresses in a cluster ---------------------------------------------------------------- */

static dw__emu_next mapa_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *b = DW__REGISTER(w, uint32_t, op->b);
    DW__EACH_LANE(lane, mask) {
        if (b[lane] >= w->cta->cluster->cta_count) {
            dw__emu_found(w, (int)lane, DW__FOUND_BOUNDS, "mapa to block %u of a cluster of %u",
                          b[lane], w->cta->cluster->cta_count);
            return DW__FAULT;
        }
        if (op->immediate == 8) {
            uint64_t x = DW__REGISTER(w, uint64_t, op->a)[lane];
            DW__REGISTER(w, uint64_t, op->d)
            [lane] = (x & ((uint64_t)DW__OFFSET_MASK | DW__WINDOW_MASK)) | (uint64_t)b[lane]
                                                                               << DW__RANK_SHIFT;
        } else {
            uint32_t x = DW__REGISTER(w, uint32_t, op->a)[lane];
            DW__REGISTER(w, uint32_t, op->d)
            [lane] = (uint32_t)(x & DW__OFFSET_MASK) | b[lane] << DW__RANK_SHIFT;
        }
    }
    return DW__NEXT;
}
static dw__emu_next rank_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    DW__EACH_LANE(lane, mask) {
        uint64_t x = op->immediate == 8 ? DW__REGISTER(w, uint64_t, op->a)[lane]
                                        : DW__REGISTER(w, uint32_t, op->a)[lane];
        DW__REGISTER(w, uint32_t, op->d)[lane] = (uint32_t)(x >> DW__RANK_SHIFT) & 0xFF;
    }
    return DW__NEXT;
}
static dw_status translate_cluster_address(dw__emu_translator *t, bool map) {
    uint32_t a, b = 0, d;
    (void)dw__emu_take(t, "shared::cluster");
    bool wide = dw__emu_take(t, "u64");
    if ((!wide && !dw__emu_take(t, "u32")) || t->in->operand_count != 2 + map)
        return dw__emu_unsupported(t);
    dw__emu_type type = wide ? DW__T_B64 : DW__T_B32;
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    if (map) DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], DW__T_B32, &b));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], map ? type : DW__T_B32, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, map ? mapa_run : rank_run));
    t->op->a = a, t->op->b = b, t->op->d = d;
    t->op->immediate = wide ? 8 : 4;
    return DW_OK;
}
static dw_status translate_mapa(dw__emu_translator *t) {
    return translate_cluster_address(t, true);
}
static dw_status translate_getctarank(dw__emu_translator *t) {
    return translate_cluster_address(t, false);
}

const dw__emu_opcode dw__emu_opcodes_barrier[] = {
    {"bar", translate_bar},
    {"barrier", translate_barrier},
    {"mbarrier", translate_mbarrier},
    {"mapa", translate_mapa},
    {"getctarank", translate_getctarank},
    {NULL, NULL},
};
