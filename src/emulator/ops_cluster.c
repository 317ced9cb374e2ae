/* Stores to other blocks of a cluster that complete on an mbarrier (PTX ISA, "st.async", "red.async"), and cluster
 * launch control ("clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel").
 */
#include "emulator/barrier.h"
#include "emulator/lanes.h"
#include "emulator/reduction.h"
#include "emulator/written.h"
#include <string.h>

/* Returns shared memory for asynchronous work; NULL after a finding. */
static unsigned char *reach_shared(dw__emu_cluster *cluster, dw__emu_async *work, uint32_t address,
                                   uint32_t bytes, uint32_t barrier) {
    uint32_t offset;
    dw__emu_cta *owner = dw__emu_block_at(cluster, address, bytes, &offset);
    if (!owner || offset % bytes) {
        dw__emu_found_at(work->cta, work->warp, (int)work->lane, work->pc,
                         offset % bytes ? DW__FOUND_ALIGNMENT : DW__FOUND_BOUNDS,
                         "writes %u bytes of shared memory at 0x%x", bytes, address);
        return NULL;
    }
    dw__emu_race_copied(work, barrier, owner, offset, bytes, true);
    dw__emu_race_mbarrier_bytes(work, barrier, 0);
    dw__set_written(owner->defined, offset, bytes, true);
    return owner->shared + offset;
}

/* ---- st.async, red.async ------------------------------------------------------------------- */

typedef struct remote_op {
    dw__emu_address address, barrier;
    dw__emu_reduction kind; /* DW__REDUCE_NONE: a store */
    dw__emu_type type;
    int bytes, count;
    uint32_t places[4];
} remote_op;
typedef struct remote {
    dw__emu_async work;
    const remote_op *op;
    uint32_t address, barrier;
    uint64_t values[4];
} remote;

static bool remote_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    const remote *r = (const remote *)(void *)work;
    const remote_op *k = r->op;
    const uint32_t total = (uint32_t)(k->bytes * k->count);
    unsigned char *to = reach_shared(cluster, work, r->address, total, r->barrier);
    if (!to) return false;
    for (int i = 0; i < k->count; i++) {
        if (k->kind == DW__REDUCE_NONE)
            memcpy(to + i * k->bytes, &r->values[i], (size_t)k->bytes);
        else
            dw__emu_reduce(k->kind, k->type, false, to + i * k->bytes, r->values[i], 0);
    }
    return dw__emu_mbarrier_complete(work->cta, work->warp, (int)work->lane, work->pc, r->barrier,
                                     total);
}

static dw__emu_next remote_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const remote_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        remote *r = dw__calloc(1, sizeof *r);
        if (!r) return dw__emu_no_memory(w, (int)lane);
        r->work = (dw__emu_async){
            .done = remote_done, .cta = w->cta, .warp = w->index, .lane = lane, .pc = w->now.pc};
        r->op = k;
        r->address = (uint32_t)dw__emu_lane_address(w, &k->address, (int)lane);
        r->barrier = (uint32_t)dw__emu_lane_address(w, &k->barrier, (int)lane);
        for (int i = 0; i < k->count; i++)
            r->values[i] = k->bytes == 8 ? DW__REGISTER(w, uint64_t, k->places[i])[lane]
                                         : DW__REGISTER(w, uint32_t, k->places[i])[lane];
        if (!dw__emu_race_issue(w, &r->work)) {
            dw__free(r);
            return dw__emu_no_memory(w, (int)lane);
        }
        dw__emu_race_generic(&r->work);
        dw__emu_later(w->cta->cluster, &r->work);
    }
    return DW__NEXT;
}

/* Without .async, another table translates the instruction. */
static dw_status translate_remote(dw__emu_translator *t, bool reduces) {
    static const char *const vectors[] = {"v2", "v4", NULL};
    remote_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "async")) return dw__emu_unsupported(t);
    if (dw__emu_take(t, reduces ? "relaxed" : "weak")) (void)dw__emu_take(t, "cluster");
    (void)dw__emu_take(t, "shared::cluster");
    if (!dw__emu_take(t, "mbarrier::complete_tx::bytes")) return dw__emu_unsupported(t);
    k->kind = DW__REDUCE_NONE;
    k->count = 1;
    if (reduces) {
        if (!dw__emu_take_reduction(t, false, &k->kind)) return dw__emu_unsupported(t);
    } else {
        int vector = dw__emu_take_one_of(t, vectors);
        if (vector >= 0) k->count = 2 << vector;
    }
    if (!dw__emu_take_type(t, &k->type) || t->in->operand_count != 3) return dw__emu_unsupported(t);
    k->bytes = dw__emu_type_bytes(k->type);
    if ((k->bytes != 4 && k->bytes != 8) || k->bytes * k->count > 16 ||
        (reduces && (!dw__emu_reduces(k->kind, k->type) || dw__emu_type_float(k->type) ||
                     (k->bytes == 8 && k->kind != DW__REDUCE_ADD))))
        return dw__emu_unsupported(t);
    const dw__ptx_operand *list = &t->in->operands[1],
                          *items = list->kind == DW__PTX_VECTOR ? list->items : list;
    if ((list->kind == DW__PTX_VECTOR ? list->count : 1) != k->count)
        return dw__emu_malformed(t, "the vector has the wrong length");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    for (int i = 0; i < k->count; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &items[i], k->type, &k->places[i]));
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[2], &k->barrier));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, remote_run));
    t->op->detail = k;
    return DW_OK;
}
static dw_status translate_st(dw__emu_translator *t) { return translate_remote(t, false); }
static dw_status translate_red(dw__emu_translator *t) { return translate_remote(t, true); }

/* ---- cluster launch control ---------------------------------------------------------------- */

/* The response to a request, in a layout of our own: the first block of the canceled cluster. */
typedef struct answer {
    uint32_t block[3], canceled;
} answer;

typedef struct cancel_op {
    dw__emu_address address, barrier;
    bool multicast;
} cancel_op;
typedef struct cancel {
    dw__emu_async work;
    uint32_t address, barrier;
    bool multicast;
} cancel;

static bool cancel_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    const cancel *c = (const cancel *)(void *)work;
    const dw__emu_grid *grid = cluster->grid;
    answer a = {0};
    uint64_t index;
    if (dw__emu_take_cluster(cluster->grid, &index)) {
        a.canceled = 1;
        for (int axis = 0; axis < 3; axis++) {
            const uint32_t extent = grid->grid[axis] / grid->cluster[axis];
            a.block[axis] = (uint32_t)(index % extent) * grid->cluster[axis];
            index /= extent;
        }
    }
    const uint32_t own = c->address >> DW__RANK_SHIFT;
    for (uint32_t rank = 0; rank < cluster->cta_count; rank++) {
        if (!c->multicast && rank != own) continue;
        const uint32_t place = rank << DW__RANK_SHIFT;
        unsigned char *to = reach_shared(cluster, work, (c->address & DW__OFFSET_MASK) | place,
                                         sizeof a, (c->barrier & DW__OFFSET_MASK) | place);
        if (!to) return false;
        memcpy(to, &a, sizeof a);
        if (!dw__emu_mbarrier_complete(work->cta, work->warp, (int)work->lane, work->pc,
                                       (c->barrier & DW__OFFSET_MASK) | place, sizeof a))
            return false;
    }
    return true;
}

static dw__emu_next cancel_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const cancel_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        cancel *c = dw__calloc(1, sizeof *c);
        if (!c) return dw__emu_no_memory(w, (int)lane);
        c->work = (dw__emu_async){
            .done = cancel_done, .cta = w->cta, .warp = w->index, .lane = lane, .pc = w->now.pc};
        c->address = (uint32_t)dw__emu_lane_address(w, &k->address, (int)lane);
        c->barrier = (uint32_t)dw__emu_lane_address(w, &k->barrier, (int)lane);
        c->multicast = k->multicast;
        if (!dw__emu_race_issue(w, &c->work)) {
            dw__free(c);
            return dw__emu_no_memory(w, (int)lane);
        }
        dw__emu_race_generic(&c->work); /* its fences have another form */
        dw__emu_later(w->cta->cluster, &c->work);
    }
    return DW__NEXT;
}

static dw_status translate_try_cancel(dw__emu_translator *t) {
    cancel_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "async")) return dw__emu_unsupported(t);
    (void)dw__emu_take(t, "shared::cta");
    if (!dw__emu_take(t, "mbarrier::complete_tx::bytes")) return dw__emu_unsupported(t);
    k->multicast = dw__emu_take(t, "multicast::cluster::all");
    if (!dw__emu_take(t, "b128") || t->in->operand_count != 2) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[1], &k->barrier));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, cancel_run));
    t->op->detail = k;
    return DW_OK;
}

static dw__emu_next canceled_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const answer *a = DW__REGISTER(w, const answer, op->a);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    DW__EACH_LANE(lane, mask)
    *d = (*d & ~((uint32_t)1 << lane)) | (uint32_t)(a[lane].canceled & 1) << lane;
    return DW__NEXT;
}
/* If nothing was canceled the block is undefined; here it is 0. */
static dw__emu_next first_block_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const answer *a = DW__REGISTER(w, const answer, op->a);
    const uint32_t *places = op->detail;
    DW__EACH_LANE(lane, mask)
    for (int axis = 0; axis < 3; axis++)
        if (places[axis] != UINT32_MAX)
            DW__REGISTER(w, uint32_t, places[axis])[lane] = a[lane].block[axis];
    return DW__NEXT;
}

static dw_status translate_query(dw__emu_translator *t) {
    static const char *const axes[] = {"get_first_ctaid::x", "get_first_ctaid::y",
                                       "get_first_ctaid::z", "get_first_ctaid", NULL};
    uint32_t a, d, *places = dw__emu_detail(t, 3 * sizeof *places);
    if (!places) return dw__fail_memory("an operation", 3 * sizeof *places);
    const bool asks = dw__emu_take(t, "is_canceled");
    const int axis = asks ? -1 : dw__emu_take_one_of(t, axes);
    if (asks ? !dw__emu_take(t, "pred")
             : axis < 0 || (axis == 3 && !dw__emu_take(t, "v4")) || !dw__emu_take(t, "b32"))
        return dw__emu_unsupported(t);
    if (!dw__emu_take(t, "b128") || t->in->operand_count != 2) return dw__emu_unsupported(t);
    const dw__ptx_operand *result = &t->in->operands[0];
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B128, &a));
    if (asks) {
        DW_RETURN_IF_FAILED(dw__emu_take_result(t, result, DW__T_PRED, &d));
        DW_RETURN_IF_FAILED(dw__emu_emit(t, canceled_run));
        t->op->a = a, t->op->d = d;
        return DW_OK;
    }
    if (axis == 3 && (result->kind != DW__PTX_VECTOR || result->count != 4))
        return dw__emu_malformed(t,
                                 "the result must be four registers, such as {%r1, %r2, %r3, _}");
    for (int i = 0; i < 3; i++) {
        places[i] = UINT32_MAX;
        if (axis == 3 || axis == i)
            DW_RETURN_IF_FAILED(dw__emu_take_result(t, axis == 3 ? &result->items[i] : result,
                                                    DW__T_B32, &places[i]));
    }
    DW_RETURN_IF_FAILED(dw__emu_emit(t, first_block_run));
    t->op->a = a;
    t->op->detail = places;
    return DW_OK;
}

static dw_status translate_launch_control(dw__emu_translator *t) {
    if (dw__emu_take(t, "try_cancel")) return translate_try_cancel(t);
    if (dw__emu_take(t, "query_cancel")) return translate_query(t);
    return dw__emu_unsupported(t);
}

const dw__emu_opcode dw__emu_opcodes_cluster[] = {
    {"st", translate_st},
    {"red", translate_red},
    {"clusterlaunchcontrol", translate_launch_control},
    {NULL, NULL},
};
