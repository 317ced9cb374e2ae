/* tcgen05.shift moves rows of eight columns by one, in the tensor pipe (PTX ISA, "tcgen05.shift"). The shape is that
 * of one warp, .31x256b: each of 31 rows takes the value of the next row, as A does for .ashift, and the last row
 * keeps its value.
 */
#include "emulator/tcgen05.h"
#include <string.h>

#define COLUMNS 8u

typedef struct shift_op {
    int cta_group;
    dw__emu_address address;
} shift_op;

typedef struct shift {
    dw__emu_async work;
    int blocks;
    dw__emu_cta *pair[2];
    uint32_t address;
} shift;

static bool shift_block(shift *s, dw__emu_cta *cta) {
    const uint32_t first = s->address >> 16, column = s->address & 0xFFFF;
    dw__tensor_user user = dw__tensor_user_of_work(&s->work);
    if (!dw__emu_tensor_holds(cta, &user, "a shift", first, DW__LANES, column, COLUMNS))
        return false;
    dw__emu_race_tensor(&s->work, DW__SIDE_TENSOR, cta, first, DW__LANES, column, COLUMNS, true);
    dw__emu_tensor_move_up(cta->tensor, first, column, COLUMNS);
    return true;
}

static bool shift_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    shift *s = (shift *)(void *)work;
    (void)cluster;
    for (int i = 0; i < s->blocks; i++)
        if (!shift_block(s, s->pair[i])) return false;
    return true;
}

static dw__emu_next shift_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const shift_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        dw__tensor_user user = dw__tensor_user_of(w, (int)lane);
        const uint32_t address = (uint32_t)dw__emu_lane_address(w, &k->address, (int)lane);
        if ((address >> 16) % DW__LANES) {
            dw__emu_found(
                w, (int)lane, DW__FOUND_ALIGNMENT,
                "shifts rows of tensor memory at 0x%08x: its lane must be a multiple of 32",
                address);
            return DW__FAULT;
        }
        shift *s = dw__calloc(1, sizeof *s);
        if (!s) return dw__emu_no_memory(w, (int)lane);
        s->work = (dw__emu_async){.done = shift_done,
                                  .cta = w->cta,
                                  .warp = w->index,
                                  .lane = lane,
                                  .pc = w->now.pc,
                                  .queue = dw__emu_tensor_queue(w->cta, k->cta_group)};
        s->blocks = k->cta_group;
        s->address = address;
        if (!dw__emu_tensor_pair(w->cta, k->cta_group, &user, s->pair)) {
            dw__free(s);
            return DW__FAULT;
        }
        if (!dw__emu_race_issue(w, &s->work)) {
            dw__free(s);
            return dw__emu_no_memory(w, (int)lane);
        }
        dw__emu_race_next_time(&s->work, w->index, DW__SIDE_TENSOR);
        dw__emu_later(w->cta->cluster, &s->work);
    }
    return DW__NEXT;
}

dw_status dw__emu_translate_tensor_shift(dw__emu_translator *t) {
    shift_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    k->cta_group = dw__emu_take_cta_group(t);
    if (!k->cta_group || !dw__emu_take(t, "down")) return dw__emu_unsupported(t);
    if (t->in->operand_count != 1) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, shift_run));
    t->op->detail = k;
    return DW_OK;
}
