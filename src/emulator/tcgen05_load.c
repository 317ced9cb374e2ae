/* Transfers between tensor memory and registers: PTX ISA, "tcgen05.ld", "tcgen05.st", "tcgen05.wait"; the fragments
 * are those of "Data Movement Shape". Loads reach the registers and stores reach tensor memory some turns after their
 * issue, so that code that relies on them before the wait fails. A warp accesses a quarter of the lanes: 32 * (its
 * index modulo 4) and up.
 */
#include "emulator/tcgen05.h"
#include <stdio.h>
#include <string.h>

typedef enum shape { OF_32X32B, OF_16X64B, OF_16X128B, OF_16X256B, OF_16X32BX2 } shape;
static const char *const shapes[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2", NULL};

#define MOST_REGISTERS 128
typedef struct transfer_op {
    shape shape;
    bool packed, store; /* packed: two columns of 16 bits in one register */
    dw__emu_address address;
    uint32_t split; /* only for 16x32bx2: columns from the first half to the second */
    uint32_t count, lanes, columns;
    uint32_t places[MOST_REGISTERS];
} transfer_op;

typedef struct transfer {
    dw__emu_async work;
    const transfer_op *op;
    uint32_t lane, column; /* of the address */
    uint32_t values[];     /* for a store: count * DW__LANES values */
} transfer;

/* Computes the cell, relative to the address, of register i of a thread. For packed transfers the column counts pairs
 * of columns. */
static void place_of(const transfer_op *k, uint32_t thread, uint32_t i, uint32_t *lane,
                     uint32_t *column) {
    switch (k->shape) {
    case OF_32X32B: *lane = thread, *column = i; break;
    case OF_16X64B: *lane = thread / 4 + thread % 2 * 8, *column = 2 * i + thread / 2 % 2; break;
    case OF_16X128B: *lane = thread / 4 + i % 2 * 8, *column = i / 2 * 4 + thread % 4; break;
    case OF_16X256B:
        *lane = thread / 4 + i / 2 % 2 * 8, *column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        break;
    case OF_16X32BX2: *lane = thread % 16, *column = i; break;
    }
}

static dw__emu_side side_of(const transfer_op *k) {
    return k->store ? DW__SIDE_TENSOR_STORE : DW__SIDE_TENSOR_LOAD;
}

static bool transfer_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    const transfer *c = (const transfer *)(const void *)work;
    const transfer_op *k = c->op;
    struct dw__emu_tensor *tensor = work->cta->tensor;
    dw__emu_warp *w = &work->cta->warps[work->warp];
    dw__tensor_user user = dw__tensor_user_of_work(work);
    uint32_t undefined = 0;
    (void)cluster;
    const char *what = k->store ? "a store" : "a load";
    if (!dw__emu_tensor_holds(work->cta, &user, what, c->lane, k->lanes, c->column, k->columns))
        return false;
    if (k->shape == OF_16X32BX2 && !dw__emu_tensor_holds(work->cta, &user, what, c->lane, k->lanes,
                                                         c->column + k->split, k->columns))
        return false;
    dw__emu_race_tensor(work, side_of(k), work->cta, c->lane, k->lanes, c->column, k->columns,
                        k->store);
    if (k->shape == OF_16X32BX2)
        dw__emu_race_tensor(work, side_of(k), work->cta, c->lane, k->lanes, c->column + k->split,
                            k->columns, k->store);
    for (uint32_t thread = 0; thread < DW__LANES; thread++) {
        for (uint32_t i = 0; i < k->count; i++) {
            uint32_t lane = 0, column = 0;
            place_of(k, thread, i, &lane, &column);
            lane += c->lane;
            column = c->column + (k->packed ? 2 * column : column) +
                     (k->shape == OF_16X32BX2 && thread >= 16 ? k->split : 0);
            if (k->store) {
                const uint32_t value = c->values[i * DW__LANES + thread];
                if (k->packed) {
                    dw__emu_tensor_write(tensor, lane, column, value & 0xFFFF);
                    dw__emu_tensor_write(tensor, lane, column + 1, value >> 16);
                } else {
                    dw__emu_tensor_write(tensor, lane, column, value);
                }
                continue;
            }
            uint32_t value = tensor->cells[lane][column];
            undefined += !dw__emu_tensor_defined(tensor, lane, column);
            if (k->packed) {
                value = (value & 0xFFFF) | tensor->cells[lane][column + 1] << 16;
                undefined += !dw__emu_tensor_defined(tensor, lane, column + 1);
            }
            DW__REGISTER(w, uint32_t, k->places[i])[thread] = value;
        }
    }
    if (!k->store)
        dw__emu_tensor_undefined(&user, "a load reads", c->lane << 16 | c->column, undefined);
    (k->store ? tensor->storing : tensor->loading)[work->warp]--;
    return true;
}

static dw__emu_next transfer_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const transfer_op *k = op->detail;
    const int first = __builtin_ctz(mask);
    const uint32_t address = (uint32_t)dw__emu_lane_address(w, &k->address, first);
    dw__tensor_user user = dw__tensor_user_of(w, -1);
    struct dw__emu_tensor *tensor = dw__emu_tensor_of(w->cta, &user);
    if (!tensor) return DW__FAULT;
    DW__EACH_LANE(lane, mask) {
        if ((uint32_t)dw__emu_lane_address(w, &k->address, (int)lane) == address) continue;
        dw__emu_found(w, (int)lane, DW__FOUND_DIVERGENCE,
                      "the lanes of a warp have different tensor-memory addresses");
        return DW__FAULT;
    }
    /* A warp accesses its own quarter of the lanes. An address in the first quarter also means the warp's quarter:
     * published kernels for B200 rely on that. */
    const uint32_t quarter = w->index % 4 * DW__LANES, lane = address >> 16,
                   within = lane % DW__LANES;
    if ((lane != within && lane != quarter + within) ||
        (within != 0 && !(k->lanes == 16 && within == 16))) {
        dw__emu_found(w, -1, DW__FOUND_TENSOR_MEMORY,
                      "tensor memory at 0x%08x, lanes %u to %u: warp %u can access lanes %u to %u",
                      address, lane, lane + k->lanes - 1, w->index, quarter, quarter + 31);
        return DW__FAULT;
    }
    const size_t bytes = k->store ? sizeof(uint32_t) * k->count * DW__LANES : 0;
    transfer *c = dw__malloc(sizeof *c + bytes);
    if (!c) return dw__emu_no_memory(w, -1);
    c->work = (dw__emu_async){.done = transfer_done,
                              .cta = w->cta,
                              .warp = w->index,
                              .lane = 0,
                              .pc = w->now.pc,
                              .queue = dw__emu_quarter_queue(w->cta, w->index)};
    c->op = k;
    c->lane = quarter + within, c->column = address & 0xFFFF;
    if (k->store) {
        for (uint32_t i = 0; i < k->count; i++)
            memcpy(&c->values[i * DW__LANES], DW__REGISTER(w, uint32_t, k->places[i]),
                   DW__LANES * sizeof(uint32_t));
    } else {
        for (uint32_t i = 0; i < k->count; i++) {
            if (dw__emu_set_pending(w, k->places[i], 4 * DW__LANES, DW__PENDING_TENSOR_LOAD, 1))
                continue;
            dw__free(c);
            return dw__emu_no_memory(w, -1);
        }
    }
    for (uint32_t half = 0; half <= (k->shape == OF_16X32BX2); half++) {
        const uint32_t first = c->column + half * k->split;
        if (k->store)
            dw__emu_tensor_stores(tensor, w->index, w->now.pc, first, k->columns);
        else
            dw__emu_tensor_unsettled(tensor, &user, first, k->columns);
    }
    if (!dw__emu_race_issue(w, &c->work)) {
        dw__free(c);
        return dw__emu_no_memory(w, -1);
    }
    dw__emu_race_issued(&c->work);
    (k->store ? tensor->storing : tensor->loading)[w->index]++;
    dw__emu_later(w->cta->cluster, &c->work);
    return DW__NEXT;
}

static dw__emu_next wait_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    struct dw__emu_tensor *tensor = w->cta->tensor;
    const bool store = op->immediate != 0;
    (void)mask;
    if (tensor && (store ? tensor->storing : tensor->loading)[w->index]) {
        w->now.wait = DW__WAIT_ASYNC;
        return DW__AGAIN;
    }
    if (!store)
        dw__emu_clear_pending(w, DW__PENDING_TENSOR_LOAD, 1);
    else if (tensor)
        memset(&tensor->unsettled[w->index], 0, sizeof tensor->unsettled[w->index]);
    dw__emu_race_waited_all(w, store ? DW__SIDE_TENSOR_STORE : DW__SIDE_TENSOR_LOAD);
    return DW__NEXT;
}

/* ---- translators --------------------------------------------------------------------------- */

static bool take_count(dw__emu_translator *t, uint32_t *count) {
    static const char *const counts[] = {"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128", NULL};
    const int index = dw__emu_take_one_of(t, counts);
    *count = 1u << (index < 0 ? 0 : index);
    return index >= 0;
}

dw_status dw__emu_translate_tensor_load(dw__emu_translator *t, bool store) {
    /* Number of registers of .x1, by shape. */
    static const uint32_t registers[] = {1, 1, 2, 4, 1};
    static const uint32_t columns[] = {1, 2, 4, 8, 1};
    transfer_op *k = dw__emu_detail(t, sizeof *k);
    uint32_t times;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned")) return dw__emu_unsupported(t);
    const int index = dw__emu_take_one_of(t, shapes);
    if (index < 0 || !take_count(t, &times)) return dw__emu_unsupported(t);
    k->shape = (shape)index;
    k->store = store;
    k->packed = dw__emu_take(t, store ? "unpack::16b" : "pack::16b");
    k->count = times * registers[index];
    k->lanes = k->shape == OF_32X32B ? 32 : 16;
    k->columns = times * columns[index] * (k->packed ? 2 : 1);
    if (!dw__emu_take(t, "b32") || k->count > MOST_REGISTERS) return dw__emu_unsupported(t);

    const dw__ptx_operand *o = t->in->operands;
    const bool split = k->shape == OF_16X32BX2;
    if (t->in->operand_count != 2 + split) return dw__emu_malformed(t, "wrong number of operands");
    const dw__ptx_operand *vector = store ? &o[1 + split] : &o[0];
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, store ? &o[0] : &o[1], &k->address));
    if (split) {
        const dw__ptx_operand *offset = store ? &o[1] : &o[2];
        if (offset->kind != DW__PTX_INTEGER || offset->integer < 0 ||
            offset->integer >= DW__TENSOR_COLUMNS)
            return dw__emu_malformed(t, "the distance to the second half must be a constant");
        k->split = (uint32_t)offset->integer;
    }
    const bool single = vector->kind != DW__PTX_VECTOR;
    if ((single ? 1 : vector->count) != (int)k->count)
        return dw__emu_malformed(t, "wrong number of registers");
    for (uint32_t i = 0; i < k->count; i++) {
        const dw__ptx_operand *item = single ? vector : &vector->items[i];
        DW_RETURN_IF_FAILED(store ? dw__emu_take_source(t, item, DW__T_B32, &k->places[i])
                                  : dw__emu_take_result(t, item, DW__T_B32, &k->places[i]));
    }
    DW_RETURN_IF_FAILED(dw__emu_emit(t, transfer_run));
    t->op->detail = k;
    t->op->aligned = true;
    return DW_OK;
}

dw_status dw__emu_translate_tensor_wait(dw__emu_translator *t, bool store) {
    if (!dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned")) return dw__emu_unsupported(t);
    if (t->in->operand_count != 0) return dw__emu_malformed(t, "it has no operands");
    DW_RETURN_IF_FAILED(dw__emu_emit(t, wait_run));
    t->op->aligned = true;
    t->op->immediate = store;
    return DW_OK;
}
