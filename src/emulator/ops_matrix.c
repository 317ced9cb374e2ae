/* Matrix fragments between shared memory and registers: PTX ISA, "ldmatrix", "stmatrix", "movmatrix". */
#include "emulator/lanes.h"
#include <string.h>

/* `count` matrices with rows of 16 bytes: 8 x 8 halves, 8 x 16 bytes, or 16 x 16 bytes that are transposed on the
 * way. Consecutive lanes hold the addresses of the rows. The lane layouts of 16 x 16 bytes, and of transposed bytes
 * that are stored, are those of CUTLASS's include/cute/atom/copy_traits_sm100.hpp. */
typedef enum fragment_shape { HALVES_8X8, BYTES_8X16, BYTES_16X16, BYTES_16X8 } fragment_shape;
typedef struct fragment {
    dw__emu_address address;
    dw__ptx_space space;
    fragment_shape shape;
    int count, registers;
    bool transposed; /* only for HALVES_8X8 */
    /* 4 or 6: sixteen elements of this width are expanded to the low bits of bytes; 0: the elements are bytes. */
    int packed_bits;
    uint32_t places[4];
} fragment;

/* Expands sixteen elements of `bits` from the low end of 16 bytes; the rest of the bytes is ignored. */
static void unpack_row(unsigned char *row, int bits) {
    unsigned char from[16];
    memcpy(from, row, sizeof from);
    for (int i = 0; i < 16; i++) {
        const int at = i * bits;
        const uint32_t pair = from[at / 8] | (uint32_t)from[(at / 8 + 1) % 16] << 8;
        row[i] = (unsigned char)(pair >> at % 8 & ((1u << bits) - 1));
    }
}

static dw__emu_next load_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const fragment *k = op->detail;
    const int height = k->shape == BYTES_16X16 ? 16 : 8;
    (void)mask;
    for (int matrix = 0; matrix < k->count; matrix++) {
        unsigned char rows[16][16];
        for (int row = 0; row < height; row++) {
            const int lane = height * matrix + row;
            const void *from = dw__emu_reach(
                w, k->space, lane, dw__emu_lane_address(w, &k->address, lane), 16, 16, DW__READ);
            if (!from) return DW__FAULT;
            memcpy(rows[row], from, 16);
            if (k->packed_bits) unpack_row(rows[row], k->packed_bits);
        }
        for (int half = 0; half < height / 8; half++) {
            uint32_t *d = DW__REGISTER(w, uint32_t, k->places[matrix * height / 8 + half]);
            for (uint32_t lane = 0; lane < DW__LANES; lane++) {
                const uint32_t major = lane / 4, minor = lane % 4;
                unsigned char bytes[4];
                for (uint32_t i = 0; i < 4; i++) {
                    if (k->shape == BYTES_16X16)
                        bytes[i] = rows[4 * minor + i][major + 8 * (uint32_t)half];
                    else if (k->transposed)
                        bytes[i] = rows[2 * minor + i / 2][2 * major + i % 2];
                    else
                        bytes[i] = rows[major][4 * minor + i];
                }
                memcpy(&d[lane], bytes, sizeof bytes);
            }
        }
    }
    return DW__NEXT;
}

static dw__emu_next store_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const fragment *k = op->detail;
    (void)mask;
    for (int matrix = 0; matrix < k->count; matrix++) {
        const uint32_t *a = DW__REGISTER(w, uint32_t, k->places[matrix]);
        unsigned char rows[8][16];
        for (uint32_t lane = 0; lane < DW__LANES; lane++) {
            const uint32_t major = lane / 4, minor = lane % 4;
            unsigned char bytes[4];
            memcpy(bytes, &a[lane], sizeof bytes);
            for (uint32_t i = 0; i < 4; i++) {
                if (k->shape == BYTES_16X8)
                    rows[2 * minor + i % 2][major + 8 * (i / 2)] = bytes[i];
                else if (k->transposed)
                    rows[2 * minor + i / 2][2 * major + i % 2] = bytes[i];
                else
                    rows[major][4 * minor + i] = bytes[i];
            }
        }
        for (int row = 0; row < 8; row++) {
            const int lane = 8 * matrix + row;
            void *to = dw__emu_reach(w, k->space, lane, dw__emu_lane_address(w, &k->address, lane),
                                     16, 16, DW__WRITE);
            if (!to) return DW__FAULT;
            memcpy(to, rows[row], 16);
        }
    }
    w->cta->cluster->progress++;
    return DW__NEXT;
}

/* Takes shape, count and .trans in any order. */
static bool take_shape(dw__emu_translator *t, fragment *k, bool load) {
    static const char *const shapes[] = {"m8n8", "m8n16", "m16n16", "m16n8", NULL};
    static const char *const counts[] = {"x1", "x2", "x4", NULL};
    int count = -1, shape = -1;
    for (bool more = true; more;) {
        more = false;
        if (count < 0) more = (count = dw__emu_take_one_of(t, counts)) >= 0;
        if (shape < 0 && !more) more = (shape = dw__emu_take_one_of(t, shapes)) >= 0;
        if (!k->transposed && !more) more = k->transposed = dw__emu_take(t, "trans");
    }
    k->space =
        dw__emu_take(t, "shared") || dw__emu_take(t, "shared::cta") ? DW__PTX_SHARED : DW__PTX_REG;
    if (count < 0 || shape < 0) return false;
    k->shape = (fragment_shape)shape;
    k->count = 1 << count;
    k->registers = k->shape == BYTES_16X16 ? 2 * k->count : k->count;
    if (k->registers > 4) return false;
    if (k->shape == HALVES_8X8) return dw__emu_take(t, "b16");
    /* Matrices of 16 rows of bytes are always transposed, those of 8 rows never. */
    if (k->transposed != (k->shape != BYTES_8X16)) return false;
    if (k->shape == BYTES_16X8) return !load && dw__emu_take(t, "b8");
    if (!load) return false;
    if (k->shape == BYTES_16X16 && dw__emu_take(t, "b8")) return true;
    if (!dw__emu_take(t, "b8x16")) return false;
    k->packed_bits = dw__emu_take(t, "b6x16_p32") ? 6 : dw__emu_take(t, "b4x16_p64") ? 4 : 0;
    return k->packed_bits != 0;
}

static dw_status translate_fragment(dw__emu_translator *t, bool load) {
    fragment *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned") || !take_shape(t, k, load) ||
        t->in->operand_count != 2)
        return dw__emu_unsupported(t);
    const dw__ptx_operand *list = &t->in->operands[load ? 0 : 1],
                          *items = list->kind == DW__PTX_VECTOR ? list->items : list;
    if ((list->kind == DW__PTX_VECTOR ? list->count : 1) != k->registers)
        return dw__emu_malformed(t, "wrong number of registers");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[load ? 1 : 0], &k->address));
    for (int i = 0; i < k->registers; i++)
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
