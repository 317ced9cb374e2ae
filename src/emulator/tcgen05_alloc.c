/* Allocation of tensor memory: PTX ISA, "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish_alloc_permit". */
#include "emulator/tcgen05.h"
#include <string.h>

typedef struct alloc_op {
    dw__emu_address address;
    bool generic;
    int cta_group;
    uint32_t tensor, columns;
} alloc_op;

static bool is_size(uint32_t columns) {
    return columns >= DW__TENSOR_UNIT && columns <= DW__TENSOR_COLUMNS &&
           (columns & (columns - 1)) == 0;
}

static dw__emu_next alloc_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const alloc_op *k = op->detail;
    const int lane = __builtin_ctz(mask);
    const uint32_t columns = DW__REGISTER(w, uint32_t, k->columns)[lane];
    dw__tensor_user user = dw__tensor_user_of(w, -1);
    dw__emu_cta *pair[2];
    struct dw__emu_tensor *tensor = dw__emu_tensor_of(w->cta, &user);
    if (!tensor || !dw__emu_tensor_pair(w->cta, k->cta_group, &user, pair)) return DW__FAULT;
    if (!is_size(columns)) {
        dw__emu_found(w, lane, DW__FOUND_INVALID,
                      "%u columns of tensor memory: must be a power of two from 32 to 512",
                      columns);
        return DW__FAULT;
    }
    if (tensor->relinquished) {
        dw__emu_found(w, -1, DW__FOUND_TENSOR_MEMORY,
                      "allocates tensor memory after the block relinquished its permit");
        return DW__FAULT;
    }
    const uint32_t first = dw__emu_tensor_allocate(tensor, columns, w->index, w->now.pc);
    if (first == DW__TENSOR_COLUMNS) {
        w->now.wait = DW__WAIT_TENSOR;
        w->now.object = columns;
        return DW__AGAIN;
    }
    uint32_t *to =
        dw__emu_reach(w, k->generic ? DW__PTX_REG : DW__PTX_SHARED, lane,
                      dw__emu_lane_address(w, &k->address, lane), sizeof *to, 4, DW__WRITE);
    if (!to) return DW__FAULT;
    memcpy(to, &first, sizeof first);
    dw__emu_race_tensor_allocated(w->cta, first, columns);
    w->cta->cluster->progress++;
    return DW__NEXT;
}

static dw__emu_next dealloc_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const alloc_op *k = op->detail;
    const int lane = __builtin_ctz(mask);
    const uint32_t address = DW__REGISTER(w, uint32_t, k->tensor)[lane],
                   columns = DW__REGISTER(w, uint32_t, k->columns)[lane];
    dw__tensor_user user = dw__tensor_user_of(w, -1);
    struct dw__emu_tensor *tensor = dw__emu_tensor_of(w->cta, &user);
    if (!tensor) return DW__FAULT;
    const char *why = dw__emu_tensor_free(tensor, address, columns);
    if (why) {
        dw__emu_found(w, -1, DW__FOUND_TENSOR_MEMORY,
                      "frees %u columns of tensor memory at 0x%08x, but %s", columns, address, why);
        return DW__FAULT;
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}

static dw__emu_next relinquish_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)op, (void)mask;
    dw__tensor_user user = dw__tensor_user_of(w, -1);
    struct dw__emu_tensor *tensor = dw__emu_tensor_of(w->cta, &user);
    if (!tensor) return DW__FAULT;
    tensor->relinquished = true;
    return DW__NEXT;
}

/* Takes .cta_group.sync.aligned, which all three instructions have. */
static dw_status begin(dw__emu_translator *t, alloc_op **made) {
    alloc_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    k->cta_group = dw__emu_take_cta_group(t);
    if (!k->cta_group || !dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned"))
        return dw__emu_unsupported(t);
    *made = k;
    return DW_OK;
}
static dw_status emit(dw__emu_translator *t, alloc_op *k, dw__emu_run run) {
    DW_RETURN_IF_FAILED(dw__emu_emit(t, run));
    t->op->detail = k;
    t->op->aligned = true;
    return DW_OK;
}

dw_status dw__emu_translate_tensor_alloc(dw__emu_translator *t) {
    alloc_op *k = NULL;
    DW_RETURN_IF_FAILED(begin(t, &k));
    k->generic = !dw__emu_take(t, "shared::cta") && !dw__emu_take(t, "shared");
    if (!dw__emu_take(t, "b32")) return dw__emu_unsupported(t);
    if (t->in->operand_count != 2) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B32, &k->columns));
    return emit(t, k, alloc_run);
}

dw_status dw__emu_translate_tensor_dealloc(dw__emu_translator *t) {
    alloc_op *k = NULL;
    DW_RETURN_IF_FAILED(begin(t, &k));
    if (!dw__emu_take(t, "b32")) return dw__emu_unsupported(t);
    if (t->in->operand_count != 2) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[0], DW__T_B32, &k->tensor));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B32, &k->columns));
    return emit(t, k, dealloc_run);
}

dw_status dw__emu_translate_tensor_relinquish(dw__emu_translator *t) {
    alloc_op *k = NULL;
    DW_RETURN_IF_FAILED(begin(t, &k));
    if (t->in->operand_count != 0) return dw__emu_malformed(t, "it has no operands");
    return emit(t, k, relinquish_run);
}
