/* tcgen05.cp copies from shared memory to tensor memory, in the tensor pipe (PTX ISA, "tcgen05.cp"). The source is a
 * matrix of rows of 16 or 32 contiguous bytes in the layout of its descriptor. Elements of 4 and 6 bits, which lie in
 * groups of sixteen in sixteen bytes, may be expanded to bytes.
 */
#include "emulator/tcgen05.h"
#include "emulator/tcgen05_descriptor.h"
#include "emulator/written.h"
#include <string.h>

typedef struct copy_shape {
    const char *name, *multicast; /* multicast NULL: none */
    uint32_t rows, columns;
    /* Row r is written to lane r / 32 * block + r % 32 and to further lanes at a distance of `repeat`, `copies` lanes
     * in all. */
    uint32_t block, copies, repeat;
} copy_shape;

static const copy_shape shapes[] = {
    {"128x256b", NULL, 128, 8, 32, 1, 0},           {"128x128b", NULL, 128, 4, 32, 1, 0},
    {"64x128b", "warpx2::02_13", 64, 4, 32, 2, 64}, {"64x128b", "warpx2::01_23", 64, 4, 64, 2, 32},
    {"32x128b", "warpx4", 32, 4, 32, 4, 32},
};

typedef struct copy_op {
    const copy_shape *shape;
    int cta_group, bits; /* bits: width of elements that are expanded to bytes; 8: none are */
    dw__emu_address address;
    uint32_t descriptor;
} copy_op;

typedef struct copy {
    dw__emu_async work;
    const copy_op *op;
    dw__emu_cta *pair[2];
    dw__matrix_operand from;
    uint32_t address;
} copy;

/* Expands sixteen packed elements of `bits` bits to sixteen bytes. */
static void space_out(unsigned char *bytes, int bits) {
    unsigned char packed[16];
    memcpy(packed, bytes, sizeof packed);
    for (int i = 0; i < 16; i++) {
        const int at = i * bits;
        unsigned word = packed[at / 8];
        if (at % 8 + bits > 8) word |= (unsigned)packed[at / 8 + 1] << 8;
        bytes[i] =
            (unsigned char)((word >> at % 8 & ((1u << bits) - 1)) << dw__tensor_spaced_shift(bits));
    }
}

/* Each block copies from its own shared memory to its own tensor memory. */
static bool copy_block(copy *c, dw__emu_cta *cta) {
    const copy_shape *s = c->op->shape;
    const uint32_t column = c->address & 0xFFFF;
    dw__tensor_user user = dw__tensor_user_of_work(&c->work);
    bool undefined = false;
    if (!dw__emu_tensor_holds(cta, &user, "a copy", c->address >> 16, DW__TENSOR_LANES, column,
                              s->columns))
        return false;
    dw__emu_race_tensor(&c->work, DW__SIDE_TENSOR, cta, 0, DW__TENSOR_LANES, column, s->columns,
                        true);
    for (uint32_t row = 0; row < s->rows; row++) {
        for (uint32_t i = 0; i < s->columns; i += 4) {
            const uint32_t at = dw__matrix_address(&c->from, row, 4 * i);
            const uint32_t here =
                2 * (uint32_t)c->op->bits; /* the rest of the sixteen bytes is not read */
            uint32_t words[4];
            if (at < DW__SHARED_FIRST || at + 16 > cta->shared_bytes) {
                dw__emu_found_at(user.cta, user.warp, user.lane, user.pc, DW__FOUND_BOUNDS,
                                 "a matrix extends beyond the block's shared memory, to 0x%x", at);
                return false;
            }
            dw__emu_race_work(&c->work, c->work.warp, DW__SIDE_TENSOR, cta, at, here, false);
            undefined = undefined || dw__count_unwritten(cta->defined, at, here);
            memcpy(words, cta->shared + at, sizeof words);
            if (c->op->bits < 8) space_out((unsigned char *)words, c->op->bits);
            for (uint32_t k = 0; k < 4 * s->copies; k++)
                dw__emu_tensor_write(cta->tensor,
                                     row / 32 * s->block + row % 32 + k / 4 * s->repeat,
                                     column + i + k % 4, words[k % 4]);
        }
    }
    if (undefined && cta->cluster->grid->check)
        dw__emu_found_at(user.cta, user.warp, user.lane, user.pc, DW__FOUND_UNDEFINED,
                         "a copy reads shared memory that was never written, in the matrix at 0x%x",
                         c->from.start);
    return true;
}

static bool copy_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    copy *c = (copy *)(void *)work;
    (void)cluster;
    for (int i = 0; i < c->op->cta_group; i++)
        if (!copy_block(c, c->pair[i])) return false;
    return true;
}

static dw__emu_next copy_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const copy_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        dw__tensor_user user = dw__tensor_user_of(w, (int)lane);
        copy *c = dw__calloc(1, sizeof *c);
        if (!c) return dw__emu_no_memory(w, -1);
        c->work = (dw__emu_async){.done = copy_done,
                                  .cta = w->cta,
                                  .warp = w->index,
                                  .lane = lane,
                                  .pc = w->now.pc,
                                  .queue = dw__emu_tensor_queue(w->cta, k->cta_group)};
        c->op = k;
        c->address = (uint32_t)dw__emu_lane_address(w, &k->address, (int)lane);
        if (!dw__emu_tensor_pair(w->cta, k->cta_group, &user, c->pair) ||
            !dw__emu_tensor_operand(&user, DW__REGISTER(w, uint64_t, k->descriptor)[lane], false, 8,
                                    &c->from)) {
            dw__free(c);
            return DW__FAULT;
        }
        if (!dw__emu_race_issue(w, &c->work)) {
            dw__free(c);
            return dw__emu_no_memory(w, -1);
        }
        dw__emu_race_next_time(&c->work, w->index, DW__SIDE_TENSOR);
        dw__emu_later(w->cta->cluster, &c->work);
    }
    return DW__NEXT;
}

dw_status dw__emu_translate_tensor_copy(dw__emu_translator *t) {
    copy_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    k->cta_group = dw__emu_take_cta_group(t);
    if (!k->cta_group) return dw__emu_unsupported(t);
    const int before = t->cursor;
    for (size_t i = 0; i < DW_COUNT(shapes) && !k->shape; i++) {
        /* The multicast follows the shape; compilers also write it before the shape. */
        t->cursor = before;
        const bool early = shapes[i].multicast && dw__emu_take(t, shapes[i].multicast);
        if (!dw__emu_take(t, shapes[i].name)) continue;
        if (!shapes[i].multicast || early || dw__emu_take(t, shapes[i].multicast))
            k->shape = &shapes[i];
    }
    k->bits = 8;
    if (k->shape && dw__emu_take(t, "b8x16"))
        k->bits = dw__emu_take(t, "b4x16_p64") ? 4 : dw__emu_take(t, "b6x16_p32") ? 6 : 0;
    if (!k->shape || !k->bits || !dw__emu_all_taken(t)) return dw__emu_unsupported(t);
    if (t->in->operand_count != 2) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B64, &k->descriptor));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, copy_run));
    t->op->detail = k;
    return DW_OK;
}
