/* Fragments of matrices between shared memory and registers: ldmatrix, stmatrix, movmatrix. PTX ISA 9.7.14.5.15
 * to 9.7.14.5.17. */
#include "emulator/lanes.h"
#include <string.h>

/* `count` matrices of 8 x 8 halves; the rows of matrix i are at the addresses of lanes 8 i to 8 i + 7. */
typedef struct fragment {
    dw__emu_address address;
    int count;
    bool transposed, bytes; /* bytes: of 16 x 8 elements of 8 bits, stored transposed */
    uint32_t places[4];
} fragment;

static dw__emu_next load_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const fragment *k = op->detail;
    (void)mask;
    for (int matrix = 0; matrix < k->count; matrix++) {
        uint16_t rows[8][8];
        for (int row = 0; row < 8; row++) {
            const int lane = 8 * matrix + row;
            const void *from =
                dw__emu_reach(w, DW__PTX_SHARED, lane, dw__emu_lane_address(w, &k->address, lane),
                              16, 16, DW__READ);
            if (!from) return DW__FAULT;
            memcpy(rows[row], from, 16);
        }
        uint32_t *d = DW__REGISTER(w, uint32_t, k->places[matrix]);
        for (uint32_t lane = 0; lane < DW__LANES; lane++) {
            const uint32_t row = lane / 4, column = lane % 4 * 2;
            d[lane] = k->transposed ? (uint32_t)rows[column + 1][row] << 16 | rows[column][row]
                                    : (uint32_t)rows[row][column + 1] << 16 | rows[row][column];
        }
    }
    return DW__NEXT;
}

static dw__emu_next store_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const fragment *k = op->detail;
    (void)mask;
    for (int matrix = 0; matrix < k->count; matrix++) {
        const uint32_t *a = DW__REGISTER(w, uint32_t, k->places[matrix]);
        for (uint32_t row = 0; row < 8; row++) {
            const int lane = 8 * matrix + (int)row;
            uint16_t values[8];
            for (uint32_t column = 0; column < 8; column++) {
                const uint32_t r = k->transposed ? column : row, c = k->transposed ? row : column;
                const uint32_t word = a[r * 4 + c / 2];
                values[column] = (uint16_t)(c & 1 ? word >> 16 : word);
            }
            void *to = dw__emu_reach(w, DW__PTX_SHARED, lane,
                                     dw__emu_lane_address(w, &k->address, lane), 16, 16, DW__WRITE);
            if (!to) return DW__FAULT;
            memcpy(to, values, 16);
        }
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}

static dw_status translate_fragment(dw__emu_translator *t, bool load) {
    static const char *const counts[] = {"x1", "x2", "x4", NULL};
    fragment *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned") || !dw__emu_take(t, "m8n8"))
        return dw__emu_unsupported(t);
    int count = dw__emu_take_one_of(t, counts);
    k->count = 1 << count;
    k->transposed = dw__emu_take(t, "trans");
    if (count < 0 || !(dw__emu_take(t, "shared") || dw__emu_take(t, "shared::cta")) ||
        !dw__emu_take(t, "b16") || t->in->operand_count != 2)
        return dw__emu_unsupported(t);
    const dw__ptx_operand *list = &t->in->operands[load ? 0 : 1],
                          *items = list->kind == DW__PTX_VECTOR ? list->items : list;
    if ((list->kind == DW__PTX_VECTOR ? list->count : 1) != k->count)
        return dw__emu_malformed(t, "another number of registers");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[load ? 1 : 0], &k->address));
    for (int i = 0; i < k->count; i++)
        DW_RETURN_IF_FAILED(load ? dw__emu_take_result(t, &items[i], DW__T_B32, &k->places[i])
                                 : dw__emu_take_source(t, &items[i], DW__T_B32, &k->places[i]));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, load ? load_run : store_run));
    t->op->detail = k;
    t->op->aligned = true;
    return DW_OK;
}
static dw_status translate_ldmatrix(dw__emu_translator *t) { return translate_fragment(t, true); }
static dw_status translate_stmatrix(dw__emu_translator *t) { return translate_fragment(t, false); }

static dw__emu_next move_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    uint32_t a[DW__LANES], *d = DW__REGISTER(w, uint32_t, op->d);
    (void)mask;
    memcpy(a, DW__REGISTER(w, uint32_t, op->a), sizeof a);
    for (uint32_t lane = 0; lane < DW__LANES; lane++) {
        const uint32_t row = lane / 4, column = lane % 4 * 2;
        uint32_t word = 0;
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t from = a[(column + i) * 4 + row / 2];
            word |= (row & 1 ? from >> 16 : from & 0xFFFF) << 16 * i;
        }
        d[lane] = word;
    }
    return DW__NEXT;
}
static dw_status translate_movmatrix(dw__emu_translator *t) {
    if (!dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned") || !dw__emu_take(t, "m8n8") ||
        !dw__emu_take(t, "trans") || !dw__emu_take(t, "b16"))
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_emit_same(t, DW__T_B32, 1, move_run));
    t->op->aligned = true;
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_matrix[] = {{"ldmatrix", translate_ldmatrix},
                                                 {"stmatrix", translate_stmatrix},
                                                 {"movmatrix", translate_movmatrix},
                                                 {NULL, NULL}};
