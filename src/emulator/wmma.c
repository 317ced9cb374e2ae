/* Fragments whose layout the ISA leaves open: wmma.load, wmma.mma, wmma.store (PTX ISA, "Warp level Matrix
 * Instructions").
 *
 * The emulator uses the layout of mma.sync's fragments: eight rows of four words are 32 lanes, so lane l has row l /
 * 4 and word l % 4, and its registers go down the rows first. A row of A is a row, and a word holds neighbours along
 * K. For B a row is a column. For C and D, the pair of columns 2 (l % 4) has two registers, or one of two halves.
 * Halves of A and B have eight registers for every shape, some with the same contents. Products are exact, and the
 * sum of one instruction is rounded once, to nearest, as in mma.c.
 */
#include "emulator/lanes.h"
#include "emulator/matrix_element.h"
#include <math.h>
#include <string.h>

#define MOST_ROWS 32
#define MOST_K 16
#define MOST_REGISTERS 8

typedef enum role { OF_A, OF_B, OF_C } role;

typedef struct fragment {
    role role;
    dw__emu_type type;
    int rows, width;  /* for A: M and K; for B: N and K; for C: M and N */
    int bytes, words; /* bytes of an element; number of distinct registers */
    int registers;
    uint32_t places[MOST_REGISTERS];
} fragment;

typedef struct shape {
    const char *name;
    int m, n, k;
} shape;
static const shape shapes[] = {{"m16n16k16", 16, 16, 16},
                               {"m8n32k16", 8, 32, 16},
                               {"m32n8k16", 32, 8, 16},
                               {"m16n16k8", 16, 16, 8}};

/* ---- fragments ----------------------------------------------------------------------------- */

/* Returns false if there is no such fragment. */
static bool lay_out(fragment *f, const shape *s) {
    const bool narrow = s->k == 8;
    bool known;
    switch (f->type) {
    case DW__T_F16: known = !narrow; break;
    case DW__T_F32: known = f->role == OF_C; break;
    case DW__T_S32: known = f->role == OF_C && !narrow; break;
    case DW__T_TF32: known = f->role != OF_C && narrow; break;
    case DW__T_BF16:
    case DW__T_S8:
    case DW__T_U8: known = f->role != OF_C && !narrow; break;
    default: known = false;
    }
    f->rows = f->role == OF_B ? s->n : s->m, f->width = f->role == OF_C ? s->n : s->k;
    f->bytes = dw__emu_type_bytes(f->type);
    f->words = f->rows * f->width * f->bytes / 4 / DW__LANES;
    f->registers = f->type == DW__T_F16 && f->role != OF_C ? 8 : f->words;
    return known;
}

/* Computes the element that part `i` of a lane's register `r` holds. */
static void element_at(const fragment *f, uint32_t lane, int r, int i, int *row, int *column) {
    const int per = 4 / f->bytes, blocks = f->rows / 8;
    if (f->role == OF_C && per == 1) { /* two registers for a pair of columns */
        *row = (int)lane / 4 + r / 2 % blocks * 8;
        *column = r / 2 / blocks * 8 + (int)lane % 4 * 2 + r % 2;
        return;
    }
    *row = (int)lane / 4 + r % blocks * 8;
    *column = (r / blocks * 4 + (int)lane % 4) * per + i;
}

static uint32_t element_bits(const dw__emu_warp *w, const fragment *f, uint32_t lane, int r,
                             int i) {
    const uint32_t word = DW__REGISTER(w, uint32_t, f->places[r])[lane];
    return f->bytes == 4 ? word : word >> 8 * f->bytes * i & ((1u << 8 * f->bytes) - 1);
}
static void set_element(dw__emu_warp *w, const fragment *f, uint32_t lane, int r, int i,
                        uint32_t bits) {
    uint32_t *word = &DW__REGISTER(w, uint32_t, f->places[r])[lane];
    if (f->bytes == 4) {
        *word = bits;
        return;
    }
    const uint32_t part = ((1u << 8 * f->bytes) - 1) << 8 * f->bytes * i;
    *word = (*word & ~part) | bits << 8 * f->bytes * i;
}

/* ---- loads and stores ---------------------------------------------------------------------- */

typedef struct transfer_op {
    fragment f;
    /* along_rows: elements of a row (for B, of a column) are neighbours in memory. */
    bool store, along_rows;
    dw__emu_address address;
    dw__ptx_space space;
    uint32_t stride;
    bool has_stride;
} transfer_op;

static dw__emu_next transfer_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const transfer_op *k = op->detail;
    const fragment *f = &k->f;
    DW__EACH_LANE(lane, mask) {
        const uint64_t base = dw__emu_lane_address(w, &k->address, (int)lane),
                       stride = k->has_stride   ? DW__REGISTER(w, uint32_t, k->stride)[lane]
                                : k->along_rows ? (uint32_t)f->width
                                                : (uint32_t)f->rows;
        for (int r = 0; r < f->registers; r++) {
            for (int i = 0; i < 4 / f->bytes; i++) {
                int row, column;
                element_at(f, lane, r % f->words, i, &row, &column);
                const uint64_t index = k->along_rows ? (uint64_t)row * stride + (uint64_t)column
                                                     : (uint64_t)column * stride + (uint64_t)row;
                void *at = dw__emu_reach(w, k->space, (int)lane, base + index * (uint64_t)f->bytes,
                                         (uint32_t)f->bytes, (uint32_t)f->bytes,
                                         k->store ? DW__WRITE : DW__READ);
                uint32_t bits = k->store ? element_bits(w, f, lane, r, i) : 0;
                if (!at) return DW__FAULT;
                if (k->store) {
                    memcpy(at, &bits, (size_t)f->bytes);
                } else {
                    memcpy(&bits, at, (size_t)f->bytes);
                    set_element(w, f, lane, r, i, bits);
                }
            }
        }
    }
    if (k->store) w->cta->cluster->progress++;
    return DW__NEXT;
}

static dw_status take_fragment(dw__emu_translator *t, const dw__ptx_operand *list, fragment *f,
                               bool result) {
    const dw__ptx_operand *items = list->kind == DW__PTX_VECTOR ? list->items : list;
    if ((list->kind == DW__PTX_VECTOR ? list->count : 1) != f->registers)
        return dw__emu_malformed(t, "a fragment has the wrong number of registers");
    for (int i = 0; i < f->registers; i++)
        DW_RETURN_IF_FAILED(result ? dw__emu_take_result(t, &items[i], DW__T_B32, &f->places[i])
                                   : dw__emu_take_source(t, &items[i], DW__T_B32, &f->places[i]));
    return DW_OK;
}

/* Takes layout, shape, space and type, whose order varies. */
static dw_status translate_transfer(dw__emu_translator *t, bool store) {
    static const char *const roles[] = {"a", "b", "c", NULL},
                             *const layouts[] = {"row", "col", NULL},
                             *const spaces[] = {"global", "shared", "shared::cta", NULL};
    transfer_op *k = dw__emu_detail(t, sizeof *k);
    const shape *s = NULL;
    int layout = -1, space = -1;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    const int which = store ? dw__emu_take(t, "d") ? OF_C : -1 : dw__emu_take_one_of(t, roles);
    if (which < 0 || !dw__emu_take(t, "sync")) return dw__emu_unsupported(t);
    (void)dw__emu_take(t, "aligned");
    for (bool more = true; more;) {
        const int before = t->cursor;
        if (layout < 0) layout = dw__emu_take_one_of(t, layouts);
        if (space < 0) space = dw__emu_take_one_of(t, spaces);
        for (size_t i = 0; i < DW_COUNT(shapes) && !s; i++)
            if (dw__emu_take(t, shapes[i].name)) s = &shapes[i];
        more = t->cursor > before;
    }
    k->f.role = (role)which;
    k->store = store;
    k->along_rows = (layout == 0) == (k->f.role != OF_B);
    k->space = space < 0 ? DW__PTX_REG : space == 0 ? DW__PTX_GLOBAL : DW__PTX_SHARED;
    if (layout < 0 || !s || !dw__emu_take_type(t, &k->f.type) || !lay_out(&k->f, s))
        return dw__emu_unsupported(t);
    const int given = t->in->operand_count;
    if (given != 2 && given != 3) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[store ? 0 : 1], &k->address));
    DW_RETURN_IF_FAILED(take_fragment(t, &t->in->operands[store ? 1 : 0], &k->f, !store));
    k->has_stride = given == 3;
    if (k->has_stride)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], DW__T_B32, &k->stride));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, transfer_run));
    t->op->detail = k;
    t->op->aligned = true;
    return DW_OK;
}

/* ---- products ------------------------------------------------------------------------------ */

typedef struct mma_op {
    fragment a, b, c, d;
    bool saturate;
} mma_op;

static void gather(const dw__emu_warp *w, const fragment *f, double values[][MOST_ROWS]) {
    for (uint32_t lane = 0; lane < DW__LANES; lane++)
        for (int r = 0; r < f->words; r++)
            for (int i = 0; i < 4 / f->bytes; i++) {
                int row, column;
                element_at(f, lane, r, i, &row, &column);
                values[row][column] = dw__matrix_element(f->type, element_bits(w, f, lane, r, i));
            }
}

static uint32_t rounded(const mma_op *k, double sum) {
    switch (k->d.type) {
    case DW__T_S32:
        if (k->saturate && sum > INT32_MAX) return INT32_MAX;
        if (k->saturate && sum < INT32_MIN) return (uint32_t)INT32_MIN;
        return (uint32_t)(int64_t)sum;
    case DW__T_F16: return isnan(sum) ? 0x7FFF : dw__f32_to_f16((float)sum);
    default: return isnan(sum) ? 0x7FFFFFFF : dw__f32_bits((float)sum);
    }
}

static dw__emu_next product_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const mma_op *k = op->detail;
    double a[MOST_ROWS][MOST_ROWS], b[MOST_ROWS][MOST_ROWS], c[MOST_ROWS][MOST_ROWS];
    (void)mask;
    gather(w, &k->a, a);
    gather(w, &k->b, b);
    gather(w, &k->c, c);
    for (uint32_t lane = 0; lane < DW__LANES; lane++)
        for (int r = 0; r < k->d.words; r++)
            for (int i = 0; i < 4 / k->d.bytes; i++) {
                int row, column;
                double sum = 0;
                element_at(&k->d, lane, r, i, &row, &column);
                for (int n = 0; n < k->a.width; n++) sum += a[row][n] * b[column][n];
                set_element(w, &k->d, lane, r, i, rounded(k, sum + c[row][column]));
            }
    return DW__NEXT;
}

/* The modifiers of halves name only the types of D and C, such as .f32.f16. */
static dw_status translate_product(dw__emu_translator *t) {
    mma_op *k = dw__emu_detail(t, sizeof *k);
    const shape *s = NULL;
    dw__emu_type types[4];
    int layouts = 0, given = 0;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "sync")) return dw__emu_unsupported(t);
    (void)dw__emu_take(t, "aligned");
    for (bool more = true; more;) {
        const int before = t->cursor;
        if (layouts < 2 && (dw__emu_take(t, "row") || dw__emu_take(t, "col"))) layouts++;
        for (size_t i = 0; i < DW_COUNT(shapes) && !s; i++)
            if (dw__emu_take(t, shapes[i].name)) s = &shapes[i];
        more = t->cursor > before;
    }
    while (given < 4 && dw__emu_take_type(t, &types[given])) given++;
    k->saturate = dw__emu_take(t, "satfinite");
    if (layouts != 2 || !s || (given != 2 && given != 4) || t->in->operand_count != 4)
        return dw__emu_unsupported(t);
    k->d = (fragment){.role = OF_C, .type = types[0]};
    k->a = (fragment){.role = OF_A, .type = given == 4 ? types[1] : DW__T_F16};
    k->b = (fragment){.role = OF_B, .type = given == 4 ? types[2] : DW__T_F16};
    k->c = (fragment){.role = OF_C, .type = types[given - 1]};
    const bool whole = k->a.type == DW__T_S8 || k->a.type == DW__T_U8,
               half = k->a.type == DW__T_F16;
    if (!lay_out(&k->d, s) || !lay_out(&k->a, s) || !lay_out(&k->b, s) || !lay_out(&k->c, s) ||
        k->a.type != k->b.type || half != (given == 2) || whole != (k->d.type == DW__T_S32) ||
        whole != (k->c.type == DW__T_S32) || (!half && k->d.type == DW__T_F16) ||
        (!half && k->c.type == DW__T_F16) || (k->saturate && !whole))
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(take_fragment(t, &t->in->operands[1], &k->a, false));
    DW_RETURN_IF_FAILED(take_fragment(t, &t->in->operands[2], &k->b, false));
    DW_RETURN_IF_FAILED(take_fragment(t, &t->in->operands[3], &k->c, false));
    DW_RETURN_IF_FAILED(take_fragment(t, &t->in->operands[0], &k->d, true));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, product_run));
    t->op->detail = k;
    t->op->aligned = true;
    return DW_OK;
}

static dw_status translate_wmma(dw__emu_translator *t) {
    if (dw__emu_take(t, "load")) return translate_transfer(t, false);
    if (dw__emu_take(t, "store")) return translate_transfer(t, true);
    return dw__emu_take(t, "mma") ? translate_product(t) : dw__emu_unsupported(t);
}

const dw__emu_opcode dw__emu_opcodes_wmma[] = {{"wmma", translate_wmma}, {NULL, NULL}};
