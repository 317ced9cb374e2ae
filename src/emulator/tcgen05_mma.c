/* tcgen05.mma (PTX ISA, "tcgen05.mma"): multiplies matrices in shared memory (A also in tensor memory) and
 * accumulates into tensor memory. Products of numbers are exact and the accumulator of one instruction is rounded
 * once, to nearest. The bargain: the hardware's order and truncation are not documented, so results may differ from a
 * GPU's in the last bits.
 *
 * The layout of D (PTX ISA, "Data path layout organization"): the rows of a block are its lanes. M of 64 in one block
 * uses 16 rows in each 32 lanes. If a block has 64 rows of a pair's or of a weight-stationary MMA, lanes 64 to 127
 * hold the second half of the columns. If it has 32 rows, each 32 lanes hold a quarter of the columns.
 */
#include "base/isa.h"
#include "emulator/tcgen05.h"
#include "emulator/tcgen05_descriptor.h"
#include "emulator/tcgen05_loops.h"
#include "emulator/written.h"
#include "number/format.h"
#include "number/half.h"
#include <assert.h>
#include <math.h>
#include <string.h>

#define MOST_N 256
#define MOST_K 64
/* Rows of D processed together; their number is a multiple of this. */
#define TOGETHER 8
#define K_COLUMNS (DW__TENSOR_K_BYTES / 4) /* of A in tensor memory */

DW_ISA_TABLE(dw__tensor_loops)

typedef struct mma_op {
    dw__tensor_form form;
    dw__emu_address d, a, a_scales, b_scales;
    uint32_t a_descriptor, b_descriptor, instruction, predicate;
    int disable_count, shift; /* the MMA scales D by 2^-shift */
    uint32_t disable[8];
} mma_op;

typedef struct mma {
    dw__emu_async work;
    const mma_op *op;
    dw__emu_cta *pair[2];
    dw__tensor_instruction i;
    dw__matrix_operand a, b;
    uint32_t d_address, a_address, a_scales, b_scales;
    uint32_t disabled[8];
    bool accumulate;
} mma;

static int blocks_of(const mma *p) { return p->op->form.cta_group; }

static bool blame(const mma *p, dw__emu_finding kind, const char *what, uint32_t where) {
    dw__emu_found_at(p->work.cta, p->work.warp, (int)p->work.lane, p->work.pc, kind, "%s 0x%x",
                     what, where);
    return false;
}

/* ---- operands ------------------------------------------------------------------------------ */

/* Reads rows of a matrix in a block's shared memory, DW__TENSOR_K_BYTES bytes each. */
static bool read_shared(mma *p, dw__emu_cta *cta, const dw__matrix_operand *o,
                        dw__tensor_format format, uint32_t rows, unsigned char *to) {
    const uint32_t size = o->mn_major ? (uint32_t)dw__tensor_format_bits(format) / 8 : 1;
    /* Sixteen contiguous bytes belong to one row or, in a matrix that is contiguous along its rows, to one K. */
    const uint32_t along = o->mn_major ? rows * size : DW__TENSOR_K_BYTES,
                   across = o->mn_major ? DW__TENSOR_K_BYTES / size : rows;
    const bool gaps = p->i.k < 64 && dw__tensor_format_bits(format) < 8;
    dw__operand_reads reads = {
        .work = &p->work, .warp = p->work.warp, .side = DW__SIDE_TENSOR, .cta = cta};
    for (uint32_t i = 0; i < across; i++) {
        for (uint32_t byte = 0; byte < along; byte += 16) {
            const uint32_t at = o->mn_major ? dw__matrix_address(o, byte / size, i)
                                            : dw__matrix_address(o, i, byte);
            const uint32_t here = along - byte < 16 ? along - byte : 16,
                           used = gaps ? 2 * (uint32_t)dw__tensor_format_bits(format) : here;
            if (at < DW__SHARED_FIRST || at + here > cta->shared_bytes)
                return blame(p, DW__FOUND_BOUNDS,
                             "a matrix extends beyond the block's shared memory, to", at);
            dw__operand_reads_add(&reads, at, used);
            if (!o->mn_major) {
                memcpy(to + i * DW__TENSOR_K_BYTES + byte, cta->shared + at, here);
                continue;
            }
            for (uint32_t k = 0; k < here; k += size)
                memcpy(to + (byte + k) / size * DW__TENSOR_K_BYTES + i * size, cta->shared + at + k,
                       size);
        }
    }
    dw__operand_reads_end(&reads);
    if (reads.undefined && cta->cluster->grid->check)
        blame(p, DW__FOUND_UNDEFINED,
              "an MMA reads shared memory that was never written, in the matrix at", o->start);
    return true;
}

/* Returns whether the rows lie in each 32 lanes: M of 64 in a single block. */
static bool is_spread(const mma *p) {
    return p->i.m == 64 && p->op->form.cta_group == 1 && !p->op->form.stationary;
}
static uint32_t lane_of(const mma *p, uint32_t row) {
    return is_spread(p) ? row / 16 * 32 + row % 16 : row;
}
/* Returns the number of lane ranges over which the columns of D are distributed. */
static uint32_t folds_of(const mma *p, uint32_t rows) {
    assert(rows > 0);
    return is_spread(p) ? 1 : DW__TENSOR_LANES / rows;
}

/* Reports rows of a matrix in tensor memory, from lane `first` on, to the checker. */
static void touch_rows(mma *p, dw__emu_cta *cta, uint32_t first, uint32_t column, uint32_t columns,
                       bool write) {
    if (is_spread(p))
        for (uint32_t lane = first; lane < DW__TENSOR_LANES; lane += 32)
            dw__emu_race_tensor(&p->work, DW__SIDE_TENSOR, cta, lane, 16, column, columns, write);
    else
        dw__emu_race_tensor(&p->work, DW__SIDE_TENSOR, cta, 0, DW__TENSOR_LANES, column, columns,
                            write);
}

/* Reads rows of A in a block's tensor memory. If D is folded, each range of lanes holds all rows. */
static bool read_tensor(mma *p, dw__emu_cta *cta, uint32_t rows, unsigned char *to) {
    const uint32_t first = p->a_address >> 16, column = p->a_address & 0xFFFF,
                   lanes = is_spread(p) ? 112 : DW__TENSOR_LANES;
    dw__tensor_user user = dw__tensor_user_of_work(&p->work);
    uint32_t undefined = 0;
    if (!dw__emu_tensor_holds(cta, &user, "A", first, lanes, column, K_COLUMNS)) return false;
    touch_rows(p, cta, first, column, K_COLUMNS, p->op->form.a_shifted);
    for (uint32_t row = 0; row < rows; row++) {
        const uint32_t lane = first + lane_of(p, row);
        memcpy(to + row * DW__TENSOR_K_BYTES, &cta->tensor->cells[lane][column],
               DW__TENSOR_K_BYTES);
        undefined += dw__count_unwritten(cta->tensor->defined[lane], column, K_COLUMNS);
        for (uint32_t fold = 1; fold < folds_of(p, rows); fold++)
            if (memcmp(&cta->tensor->cells[lane + fold * rows][column],
                       &cta->tensor->cells[lane][column], DW__TENSOR_K_BYTES) != 0)
                return blame(p, DW__FOUND_TENSOR_MEMORY,
                             "A differs between the two halves of the lanes, at", p->a_address);
    }
    dw__emu_tensor_undefined(&user, "an MMA reads A in", p->a_address, undefined);
    return true;
}

/* Reads the scale factors of `rows` rows (PTX ISA, "Block scaling for tcgen05.mma"): row r is a cell of lane r modulo
 * 32, 32 rows to a column, its factors are bytes from `id` on, and all ranges of 32 lanes hold the same. For a pair's
 * B with M of 128, the upper lanes hold the second half of the rows. */
static bool read_scales(mma *p, dw__emu_cta *cta, const char *name, uint32_t address, int id,
                        uint32_t rows, bool folded, double (*scales)[4]) {
    const uint32_t per_half = folded ? rows / 2 : rows, copies = folded ? 2 : 4,
                   column = address & 0xFFFF;
    const dw_dtype format = p->i.ue4m3 ? DW_UE4M3 : DW_E8M0;
    dw__tensor_user user = dw__tensor_user_of_work(&p->work);
    uint32_t undefined = 0;
    if (!dw__emu_tensor_holds(cta, &user, name, address >> 16, DW__TENSOR_LANES, column,
                              (per_half + 31) / 32))
        return false;
    dw__emu_race_tensor(&p->work, DW__SIDE_TENSOR, cta, 0, DW__TENSOR_LANES, column,
                        (per_half + 31) / 32, false);
    for (uint32_t row = 0; row < rows; row++) {
        const uint32_t within = row % per_half, at = column + within / 32,
                       lane = within % 32 + row / per_half * 64;
        const uint32_t word = cta->tensor->cells[lane][at];
        const uint32_t used =
            p->op->form.scales == 4 ? UINT32_MAX : ((1u << 8 * p->op->form.scales) - 1) << 8 * id;
        for (uint32_t copy = 0; copy < copies; copy++) {
            const uint32_t other = lane + 32 * copy;
            undefined += !dw__emu_tensor_defined(cta->tensor, other, at);
            if (((cta->tensor->cells[other][at] ^ word) & used) != 0)
                return blame(p, DW__FOUND_TENSOR_MEMORY,
                             "scale factors differ between the ranges of 32 lanes, at", address);
        }
        for (int i = 0; i < p->op->form.scales; i++)
            scales[row][i] = (double)dw__decode_one(format, word >> 8 * (id + i) & 0xFF);
    }
    dw__emu_tensor_undefined(&user, "an MMA reads scale factors in", address, undefined);
    return true;
}

/* ---- accumulators -------------------------------------------------------------------------- */

static double sum_value(const mma *p, uint32_t cell) {
    switch (p->i.d) {
    case DW__SUM_F16: return (double)dw__f16_to_f32((uint16_t)cell);
    default: return (double)(int32_t)cell;
    }
}
static uint32_t sum_bits(const mma *p, uint32_t cell, double value) {
    switch (p->i.d) {
    case DW__SUM_F16:
        /* Round to odd first, so that rounding twice gives the same result as rounding the sum once. */
        {
            float narrow = (float)value;
            if ((double)narrow != value && value == value && !isinf(value)) {
                uint32_t bits = dw__f32_bits(narrow);
                if (fabs((double)narrow) > fabs(value)) bits--;
                narrow = dw__f32_from_bits(bits | 1);
            }
            return (cell & 0xFFFF0000) |
                   (value != value ? 0x7FFFu : (uint32_t)dw__f32_to_f16(narrow));
        }
    default:
        if (p->i.saturate) {
            if (value > INT32_MAX) return INT32_MAX;
            if (value < INT32_MIN) return (uint32_t)INT32_MIN;
        }
        return (uint32_t)(int64_t)value;
    }
}

/* Accumulates F16 and S32 for `count` rows, or folds of them. */
static void add_plainly(const mma *p, const double *a, uint32_t count, const double *b,
                        uint32_t columns, uint32_t *const *cells) {
    const double scale = p->accumulate ? ldexp(1, -p->op->shift) : 0;
    double sums[TOGETHER][MOST_N];
    for (uint32_t row = 0; row < count; row++)
        for (uint32_t i = 0; i < columns; i++)
            sums[row][i] = p->accumulate ? scale * sum_value(p, cells[row][i]) : 0;
    dw__tensor_loops_now()->add(a, count, (size_t)p->i.k, b, columns, MOST_N, sums[0]);
    for (uint32_t row = 0; row < count; row++)
        for (uint32_t i = 0; i < columns; i++)
            cells[row][i] = sum_bits(p, cells[row][i], sums[row][i]);
}

/* Computes D of one block from a[row][k] and b[k][column], whose scales are applied. */
static bool add_to_d(mma *p, dw__emu_cta *cta, int block, uint32_t rows, const double *a,
                     double (*b)[MOST_N]) {
    const uint32_t n = (uint32_t)p->i.n, k_count = (uint32_t)p->i.k, folds = folds_of(p, rows),
                   per_fold = n / folds, first = p->d_address >> 16, column = p->d_address & 0xFFFF;
    dw__tensor_user user = dw__tensor_user_of_work(&p->work);
    uint32_t undefined = 0;
    if (!dw__emu_tensor_holds(cta, &user, "D", first, is_spread(p) ? 112 : DW__TENSOR_LANES, column,
                              per_fold))
        return false;
    struct dw__emu_tensor *tensor = cta->tensor;
    touch_rows(p, cta, first, column, per_fold, true);
    for (uint32_t fold = 0; fold < folds; fold++) {
        const double *columns = &b[0][fold * per_fold];
        for (uint32_t row = 0; row < rows; row += TOGETHER) {
            uint32_t *cells[TOGETHER], count = 0;
            double some[TOGETHER * MOST_K];
            for (uint32_t i = row; i < row + TOGETHER; i++) {
                const uint32_t lane = first + lane_of(p, i) + fold * rows;
                if (p->accumulate)
                    undefined += dw__count_unwritten(tensor->defined[lane], column, per_fold);
                if (p->disabled[4 * block + lane / 32] >> lane % 32 & 1) continue;
                memcpy(some + count * k_count, a + i * k_count, k_count * sizeof *a);
                cells[count++] = &tensor->cells[lane][column];
                dw__set_written(tensor->defined[lane], column, per_fold, true);
            }
            if (p->i.d == DW__SUM_F32)
                dw__tensor_loops_now()->add_f32(some, count, k_count, columns, per_fold, MOST_N,
                                                p->accumulate ? ldexp(1, -p->op->shift) : 0, cells);
            else
                add_plainly(p, some, count, columns, per_fold, cells);
        }
    }
    dw__emu_tensor_undefined(&user, "an MMA adds to D in", p->d_address, undefined);
    return true;
}

/* ---- one MMA ------------------------------------------------------------------------------- */

typedef struct buffers {
    unsigned char bytes[MOST_N * DW__TENSOR_K_BYTES];
    double b[MOST_K][MOST_N], scaled_b[MOST_K][MOST_N];
    double a[DW__TENSOR_LANES * MOST_K];
    double a_scales[DW__TENSOR_LANES][4], b_scales[MOST_N][4];
    double table[256];
} buffers;

/* Reads B as [k][n]; each block of a pair holds half of the columns. */
static bool read_b(mma *p, buffers *s) {
    const uint32_t blocks = (uint32_t)blocks_of(p), n = (uint32_t)p->i.n, share = n / blocks;
    for (uint32_t block = 0; block < blocks; block++)
        if (!read_shared(p, p->pair[block], &p->b, p->i.b, share,
                         s->bytes + block * share * DW__TENSOR_K_BYTES))
            return false;
    dw__tensor_fill_table(p->i.b, s->table);
    for (uint32_t first = 0; first < n; first += DW__TENSOR_STEP) {
        double some[DW__TENSOR_STEP][MOST_K];
        for (uint32_t i = 0; i < DW__TENSOR_STEP; i++)
            dw__tensor_decode_row(p->i.b, s->table, p->i.k, false,
                                  s->bytes + (first + i) * DW__TENSOR_K_BYTES, some[i]);
        const double sign = p->i.b_negated ? -1 : 1;
        for (int k = 0; k < p->i.k; k++)
            for (uint32_t i = 0; i < DW__TENSOR_STEP; i++) s->b[k][first + i] = sign * some[i][k];
    }
    return true;
}

static bool multiply_block(mma *p, buffers *s, int block) {
    dw__emu_cta *cta = p->pair[block];
    const uint32_t rows = (uint32_t)(p->i.m / blocks_of(p)), n = (uint32_t)p->i.n,
                   k_count = (uint32_t)p->i.k;
    const int scales = p->op->form.scales;
    if (p->op->form.a_in_tensor ? !read_tensor(p, cta, rows, s->bytes)
                                : !read_shared(p, cta, &p->a, p->i.a, rows, s->bytes))
        return false;
    for (uint32_t lane = 0; p->op->form.a_shifted && lane < DW__TENSOR_LANES; lane += DW__LANES)
        dw__emu_tensor_move_up(cta->tensor, lane, p->a_address & 0xFFFF, K_COLUMNS);
    dw__tensor_fill_table(p->i.a, s->table);
    for (uint32_t row = 0; row < rows; row++) {
        double *values = s->a + row * k_count;
        dw__tensor_decode_row(p->i.a, s->table, p->i.k, p->op->form.a_in_tensor && p->i.k < 64,
                              s->bytes + row * DW__TENSOR_K_BYTES, values);
        for (uint32_t k = 0; p->i.a_negated && k < k_count; k++) values[k] = -values[k];
    }
    if (!scales) return add_to_d(p, cta, block, rows, s->a, s->b);
    if (!read_scales(p, cta, "scale factors of A", p->a_scales, p->i.a_scale_id, rows, false,
                     s->a_scales) ||
        !read_scales(p, cta, "scale factors of B", p->b_scales, p->i.b_scale_id, n,
                     blocks_of(p) == 2 && rows == 64, s->b_scales))
        return false;
    const uint32_t chunk = k_count / (uint32_t)scales;
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t k = 0; k < k_count; k++)
            s->a[row * k_count + k] *= s->a_scales[row][k / chunk];
    for (uint32_t k = 0; k < k_count; k++)
        for (uint32_t column = 0; column < n; column++)
            s->scaled_b[k][column] = s->b[k][column] * s->b_scales[column][k / chunk];
    return add_to_d(p, cta, block, rows, s->a, s->scaled_b);
}

static bool multiply(dw__emu_cluster *cluster, dw__emu_async *work) {
    mma *p = (mma *)(void *)work;
    buffers *s = dw__malloc(sizeof *s);
    (void)cluster;
    if (!s)
        return blame(p, DW__FOUND_INVALID, "the host is out of memory for an MMA with D at",
                     p->d_address);
    bool good = read_b(p, s);
    for (int block = 0; good && block < blocks_of(p); block++) good = multiply_block(p, s, block);
    dw__free(s);
    return good;
}

/* ---- issuing ------------------------------------------------------------------------------- */

/* The upper two bits of a scale factor's address select a byte, as the descriptor's IDs do. */
#define SCALE_ADDRESS 0x3FFFFFFFu

static bool fill(dw__emu_warp *w, const mma_op *k, int lane, mma *p) {
    dw__tensor_user user = dw__tensor_user_of(w, lane);
    const uint32_t instruction = DW__REGISTER(w, uint32_t, k->instruction)[lane];
    const char *why = dw__tensor_instruction_decode(&k->form, instruction, &p->i);
    if (why) {
        dw__emu_found(w, lane, DW__FOUND_INVALID, "the instruction descriptor 0x%08x: %s",
                      instruction, why);
        return false;
    }
    if (!dw__emu_tensor_pair(w->cta, k->form.cta_group, &user, p->pair)) return false;
    p->d_address = (uint32_t)dw__emu_lane_address(w, &k->d, lane);
    if (k->form.a_in_tensor)
        p->a_address = (uint32_t)dw__emu_lane_address(w, &k->a, lane);
    else if (!dw__emu_tensor_operand(&user, DW__REGISTER(w, uint64_t, k->a_descriptor)[lane],
                                     p->i.a_mn_major,
                                     p->i.a_mn_major ? dw__tensor_format_bits(p->i.a) : 8, &p->a))
        return false;
    if (!dw__emu_tensor_operand(&user, DW__REGISTER(w, uint64_t, k->b_descriptor)[lane],
                                p->i.b_mn_major,
                                p->i.b_mn_major ? dw__tensor_format_bits(p->i.b) : 8, &p->b))
        return false;
    if (k->form.scales) {
        p->a_scales = (uint32_t)dw__emu_lane_address(w, &k->a_scales, lane) & SCALE_ADDRESS;
        p->b_scales = (uint32_t)dw__emu_lane_address(w, &k->b_scales, lane) & SCALE_ADDRESS;
    }
    for (int i = 0; i < k->disable_count; i++)
        p->disabled[i] = DW__REGISTER(w, uint32_t, k->disable[i])[lane];
    p->accumulate = *DW__REGISTER(w, uint32_t, k->predicate) >> lane & 1;
    return true;
}

static dw__emu_next product_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const mma_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        mma *p = dw__calloc(1, sizeof *p);
        if (!p) return dw__emu_no_memory(w, -1);
        p->op = k;
        p->work = (dw__emu_async){.done = multiply,
                                  .cta = w->cta,
                                  .warp = w->index,
                                  .lane = lane,
                                  .pc = w->now.pc,
                                  .queue = dw__emu_tensor_queue(w->cta, k->form.cta_group)};
        if (!fill(w, k, (int)lane, p)) {
            dw__free(p);
            return DW__FAULT;
        }
        if (!dw__emu_race_issue(w, &p->work)) {
            dw__free(p);
            return dw__emu_no_memory(w, -1);
        }
        dw__emu_race_next_time(&p->work, w->index, DW__SIDE_TENSOR);
        dw__emu_later(w->cta->cluster, &p->work);
    }
    return DW__NEXT;
}

/* ---- the translator ------------------------------------------------------------------------ */

static const char *const kinds[] = {
    "kind::f16",      "kind::tf32", "kind::f8f6f4",   "kind::i8",
    "kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4", NULL,
};

/* Takes the number of scale factors along the K of one instruction, from the modifier or the kind's default. */
static bool take_scales(dw__emu_translator *t, dw__tensor_form *form) {
    static const char *const sizes[] = {"scale_vec::1X", "scale_vec::2X", "scale_vec::4X",
                                        "block32",       "block16",       NULL};
    if (form->kind < DW__KIND_MXF8F6F4) return true;
    if (!dw__emu_take(t, "block_scale")) return false;
    const int size = dw__emu_take_one_of(t, sizes), by_32 = form->kind == DW__KIND_MXF8F6F4 ? 1 : 2;
    form->scales = size < 0 || size == 3 ? by_32 : size == 0 ? 1 : size == 1 ? 2 : 4;
    if (form->kind == DW__KIND_MXF4NVF4) return size > 0;
    return form->scales == by_32;
}

/* Takes a modifier of the collector buffers, which keep A or B between instructions and do not affect results. */
static void take_collector(dw__emu_translator *t) {
    static const char *const uses[] = {
        "collector::a::fill",     "collector::a::use",      "collector::a::lastuse",
        "collector::a::discard",  "collector::b0::fill",    "collector::b0::use",
        "collector::b0::lastuse", "collector::b0::discard", "collector::b1::fill",
        "collector::b1::use",     "collector::b1::lastuse", "collector::b1::discard",
        "collector::b2::fill",    "collector::b2::use",     "collector::b2::lastuse",
        "collector::b2::discard", "collector::b3::fill",    "collector::b3::use",
        "collector::b3::lastuse", "collector::b3::discard", NULL};
    (void)dw__emu_take_one_of(t, uses);
}

static dw_status take_disabled(dw__emu_translator *t, mma_op *k, const dw__ptx_operand *o) {
    if (o->count != 4 * k->form.cta_group || k->form.scales || k->form.stationary)
        return dw__emu_malformed(t, "wrong number of lane masks, or one operand too many");
    k->disable_count = o->count;
    for (int i = 0; i < o->count; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o->items[i], DW__T_B32, &k->disable[i]));
    return DW_OK;
}

dw_status dw__emu_translate_tensor_product(dw__emu_translator *t) {
    mma_op *k = dw__emu_detail(t, sizeof *k);
    const dw__ptx_operand *o = t->in->operands;
    const int given = t->in->operand_count;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    k->form.stationary = dw__emu_take(t, "ws");
    k->form.cta_group = dw__emu_take_cta_group(t);
    const int kind = dw__emu_take_one_of(t, kinds);
    if (!k->form.cta_group || kind < 0) return dw__emu_unsupported(t);
    k->form.kind = (dw__tensor_kind)kind;
    if (!take_scales(t, &k->form)) return dw__emu_unsupported(t);
    k->form.a_shifted = !k->form.scales && !k->form.stationary && dw__emu_take(t, "ashift");
    take_collector(t);
    if (!dw__emu_all_taken(t) || (k->form.stationary && (k->form.cta_group == 2 || k->form.scales)))
        return dw__emu_unsupported(t);

    if (given < (k->form.scales ? 7 : 5)) return dw__emu_malformed(t, "an operand is missing");
    int at = 0;
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[at++], &k->d));
    k->form.a_in_tensor = o[at].kind == DW__PTX_ADDRESS;
    if (k->form.a_in_tensor)
        DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[at++], &k->a));
    else if (k->form.a_shifted)
        return dw__emu_malformed(t, "A can be shifted only in tensor memory");
    else
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_B64, &k->a_descriptor));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_B64, &k->b_descriptor));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_B32, &k->instruction));
    if (k->form.scales) {
        DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[at++], &k->a_scales));
        DW_RETURN_IF_FAILED(dw__emu_take_address(t, &o[at++], &k->b_scales));
    }
    if (o[at].kind == DW__PTX_VECTOR) DW_RETURN_IF_FAILED(take_disabled(t, k, &o[at++]));
    if (at >= given) return dw__emu_malformed(t, "an operand is missing");
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_PRED, &k->predicate));
    if (at < given && kind <= DW__KIND_TF32 && !k->form.stationary) {
        if (o[at].kind != DW__PTX_INTEGER || o[at].integer < 0 || o[at].integer > 15)
            return dw__emu_malformed(t, "the scale of D must be a power of two from 0 to 15");
        k->shift = (int)o[at++].integer;
    }
    /* The remaining operand would be the mask of columns that a weight-stationary MMA treats as zeros. The emulator
     * does not support it. */
    if (at < given && k->form.stationary) return dw__emu_unsupported(t);
    if (at != given) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_emit(t, product_run));
    t->op->detail = k;
    return DW_OK;
}
