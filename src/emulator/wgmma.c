/* Hopper's tensor cores: wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). An MMA belongs to four
 * warps: it is issued when the last of them has executed the instruction, and is performed for all of them at once,
 * some turns later. F32 accumulators have the hardware's bits (wgmma_sum.h); F16 accumulators are rounded once.
 */
#include "base/isa.h"
#include "emulator/lanes.h"
#include "emulator/matrix_element.h"
#include "emulator/matrix_operand.h"
#include "emulator/race.h"
#include "emulator/wgmma_loops.h"
#include "emulator/wgmma_sum.h"
#include "emulator/written.h"
#include "number/format.h"
#include "number/half.h"
#include <stdio.h>
#include <string.h>

#define ROWS 16 /* one warp's share of 64 rows */
#define MOST_N 256
#define LINES 8        /* rows, columns and the depth are multiples of this */
#define MOST_TURNED 64 /* rows of A if it is contiguous along its rows; the depth of B is less */

DW_ISA_TABLE(dw__wgmma_loops)

typedef struct mma_op {
    int n, k;
    dw__emu_type d, a, b;
    bool a_in_registers;
    int scale_a, scale_b, transposed_a, transposed_b;
    uint32_t predicate; /* whether D is accumulated or overwritten */
    uint32_t descriptor_a, descriptor_b;
    uint32_t a_places[4];
    int d_count;
    uint32_t d_places[128];
} mma_op;

#define WARPS 4
typedef struct mma mma;
struct mma {
    dw__emu_async work;
    const mma_op *op;
    uint64_t ordinal;       /* number among the MMAs of its four warps */
    int came;               /* number of warps that have executed the instruction */
    dw__emu_warp *warps;    /* the first of the four warps */
    uint32_t groups[WARPS]; /* the group of each warp to which it belongs */
    bool accumulate;
    uint64_t descriptor_a, descriptor_b;
    dw__matrix_operand a, b;
    uint32_t a_values[WARPS][4][DW__LANES];
    mma *next; /* the previous MMA that some warps have yet to execute */
};

struct dw__emu_wgmma {
    uint32_t open;          /* number of the group to which new MMAs belong; the first is 1 */
    uint32_t in_flight[64]; /* pending MMAs of each group, indexed by its number modulo 64 */
    uint32_t times[64];     /* time of each group's youngest MMA, for the checker */
    uint64_t asked;         /* number of MMAs executed */
    /* Kept by the first of four warps: MMAs that some of the four have yet to execute. */
    mma *begun;
};

/* ---- elements ------------------------------------------------------------------------------ */

static bool blame(const mma *p, dw__emu_finding kind, const char *what, uint32_t where) {
    dw__emu_found_at(p->work.cta, p->work.warp, -1, p->work.pc, kind, "%s 0x%x", what, where);
    return false;
}

/* Destination of a matrix's codes: element (i, k) goes to codes[i * along + k * deep]. */
typedef struct placing {
    uint32_t *codes;
    size_t along, deep;
} placing;

static void spread(const unsigned char *from, uint32_t bytes, uint32_t *to) {
    uint16_t halves[8];
    switch (bytes) {
    case 1:
        for (int i = 0; i < 16; i++) to[i] = from[i];
        break;
    case 2:
        memcpy(halves, from, 16);
        for (int i = 0; i < 8; i++) to[i] = halves[i];
        break;
    default: memcpy(to, from, 16);
    }
}

/* Reads the codes of an operand in shared memory, with `count` rows or columns. Sixteen aligned bytes are
 * contiguous. */
static bool read_operand(mma *p, const dw__matrix_operand *o, uint32_t count, uint32_t k_count,
                         placing to) {
    const dw__emu_cta *cta = p->work.cta;
    const uint32_t bytes = (uint32_t)o->bits / 8, together = 16 / bytes;
    const uint32_t across = o->mn_major ? count : k_count, lines = o->mn_major ? k_count : count;
    const size_t step = o->mn_major ? to.along : to.deep, next = o->mn_major ? to.deep : to.along;
    dw__operand_reads reads = {
        .work = &p->work, .warp = p->warps->index, .side = DW__SIDE_WGMMA, .cta = p->work.cta};
    for (uint32_t i = 0; i < lines; i += LINES) {
        uint32_t some[LINES][MOST_TURNED], *to_codes = to.codes + i * next;
        for (uint32_t line = 0; line < LINES; line++) {
            uint32_t *const along = step == 1 ? to_codes + line * next : some[line];
            for (uint32_t j = 0; j < across; j += together) {
                const uint32_t at = o->mn_major ? dw__matrix_address(o, j, i + line)
                                                : dw__matrix_address(o, i + line, j);
                if (at < DW__SHARED_FIRST || at + 16 > cta->shared_bytes)
                    return blame(p, DW__FOUND_BOUNDS,
                                 "a matrix extends beyond the block's shared memory, to", at);
                dw__operand_reads_add(&reads, at, 16);
                spread(cta->shared + at, bytes, along + j);
            }
        }
        for (uint32_t j = 0; step != 1 && j < across; j++)
            for (uint32_t line = 0; line < LINES; line++)
                to_codes[j * step + line * next] = some[line][j];
    }
    dw__operand_reads_end(&reads);
    if (reads.undefined && cta->cluster->grid->check)
        blame(p, DW__FOUND_UNDEFINED,
              "an MMA reads shared memory that was never written, in the matrix at", o->start);
    return true;
}

/* Unpacks A from registers: words of two halves, four bytes or one tf32 (PTX ISA, "Register Fragments"). */
static void unpack_a(const mma *p, uint32_t warp, placing to) {
    const int bytes = dw__emu_type_bytes(p->op->a), per_word = 4 / bytes;
    const uint32_t mask = bytes == 4 ? UINT32_MAX : ((uint32_t)1 << 8 * bytes) - 1;
    for (uint32_t lane = 0; lane < DW__LANES; lane++) {
        for (uint32_t word = 0; word < 4; word++) {
            const uint32_t row = warp * ROWS + lane / 4 + (word & 1) * 8;
            const uint32_t k = (lane % 4 + (word >> 1) * 4) * (uint32_t)per_word;
            for (int i = 0; i < per_word; i++)
                to.codes[row * to.along + (k + (uint32_t)i) * to.deep] =
                    p->a_values[warp][word][lane] >> 8 * bytes * i & mask;
        }
    }
}

/* ---- one MMA ------------------------------------------------------------------------------- */

/* The codes of A (rows, k) and B (k, columns, up to the maximum), and their values and exponents as factors. */
enum { A_ROWS = WARPS * ROWS, A_CODES = A_ROWS * DW__SUM_MOST, B_CODES = MOST_N * DW__SUM_MOST };
typedef struct operands {
    uint32_t a[A_CODES], b[B_CODES];
    float a_values[A_CODES], b_values[B_CODES];
    int16_t a_exponents[A_CODES], b_exponents[B_CODES];
    uint32_t a_twice[A_CODES]; /* exponents in both halves */
} operands;

static bool read_codes(mma *p, operands *o) {
    const mma_op *op = p->op;
    const uint32_t k = (uint32_t)op->k;
    const placing a = {o->a, k, 1}, b = {o->b, 1, MOST_N};
    if (!read_operand(p, &p->b, (uint32_t)op->n, k, b)) return false;
    if (!op->a_in_registers) return read_operand(p, &p->a, A_ROWS, k, a);
    for (uint32_t warp = 0; warp < WARPS; warp++) unpack_a(p, warp, a);
    return true;
}

/* Location of a row's columns 2 i and 2 i + 1 of D, in steps of eight columns: registers of 4 lanes each. */
typedef struct d_row {
    dw__emu_warp *warp;
    /* Places of the first eight columns; each further eight columns have four more, half of them this row's. */
    const uint32_t *places;
    uint32_t lane;
} d_row;
static d_row row_of(const mma *p, uint32_t row) {
    return (d_row){&p->warps[row / ROWS],
                   p->op->d_places + row % ROWS / 8 * (p->op->d == DW__T_F16 ? 1 : 2), row % 8 * 4};
}

/* ---- into F32 ------------------------------------------------------------------------------ */

static dw__wgmma_format format_of(dw__emu_type type) {
    switch (type) {
    case DW__T_F16: return (dw__wgmma_format){5, 10, 0, false};
    case DW__T_BF16: return (dw__wgmma_format){8, 7, 0, false};
    case DW__T_TF32: return (dw__wgmma_format){8, 10, 13, false};
    case DW__T_E4M3: return (dw__wgmma_format){4, 3, 0, true};
    default: return (dw__wgmma_format){5, 2, 0, false};
    }
}

/* The exponent of the least normal number of each type. */
static int least_exponent(dw__emu_type type) {
    return 2 - (1 << (format_of(type).exponent_bits - 1));
}

/* Computes one accumulator that the loops do not handle. */
static float sum_alone(const mma *p, const uint32_t *a, const uint32_t *b, float d) {
    const mma_op *op = p->op;
    const int narrow = dw__emu_type_bytes(op->a) == 1;
    dw__factors row, column;
    for (int k = 0; k < op->k; k++) {
        row.value[k] = dw__matrix_element(op->a, a[k]);
        column.value[k] = dw__matrix_element(op->b, b[k * MOST_N]);
        row.exponent[k] = dw__factor_exponent(row.value[k], least_exponent(op->a));
        column.exponent[k] = dw__factor_exponent(column.value[k], least_exponent(op->b));
    }
    return dw__wgmma_sum(&row, &column, op->k, (double)(op->scale_a * op->scale_b), d, narrow);
}

/* Reads some adjacent rows of D and columns from `first` on. Each eight columns have two registers, one for the even
 * columns and one for the odd ones. */
typedef float quad __attribute__((vector_size(16)));
static void read_tile(const d_row *row, uint32_t first, uint32_t end,
                      float (*d)[DW__WGMMA_COLUMNS]) {
    for (uint32_t column = first; column < end; column += 8) {
        const uint32_t *places = row->places + column / 2;
        const float *even = DW__REGISTER(row->warp, const float, places[0]) + row->lane,
                    *odd = DW__REGISTER(row->warp, const float, places[1]) + row->lane;
        for (int r = 0; r < DW__WGMMA_ROWS; r++) {
            quad x, y;
            memcpy(&x, even + 4 * r, sizeof x), memcpy(&y, odd + 4 * r, sizeof y);
            const quad eight[2] = {__builtin_shufflevector(x, y, 0, 4, 1, 5),
                                   __builtin_shufflevector(x, y, 2, 6, 3, 7)};
            memcpy(&d[r][column - first], eight, sizeof eight);
        }
    }
}
static void write_tile(const d_row *row, uint32_t first, uint32_t end,
                       float (*d)[DW__WGMMA_COLUMNS]) {
    for (uint32_t column = first; column < end; column += 8) {
        const uint32_t *places = row->places + column / 2;
        float *even = DW__REGISTER(row->warp, float, places[0]) + row->lane,
              *odd = DW__REGISTER(row->warp, float, places[1]) + row->lane;
        for (int r = 0; r < DW__WGMMA_ROWS; r++) {
            quad eight[2];
            memcpy(eight, &d[r][column - first], sizeof eight);
            const quad x = __builtin_shufflevector(eight[0], eight[1], 0, 2, 4, 6),
                       y = __builtin_shufflevector(eight[0], eight[1], 1, 3, 5, 7);
            memcpy(even + 4 * r, &x, sizeof x), memcpy(odd + 4 * r, &y, sizeof y);
        }
    }
}

/* Returns false if some values are infinite or NaN. */
static bool decode(const mma *p, operands *o, uint32_t columns) {
    const mma_op *op = p->op;
    const dw__wgmma_loops *loops = dw__wgmma_loops_now();
    const uint32_t n = (uint32_t)op->n, k_count = (uint32_t)op->k;
    const dw__wgmma_format format_a = format_of(op->a), format_b = format_of(op->b);
    bool finite = loops->decode(o->a, A_ROWS * k_count, &format_a, o->a_values, o->a_exponents);
    for (uint32_t i = 0; i < A_ROWS * k_count; i++) {
        o->a_twice[i] = (uint16_t)o->a_exponents[i] * 0x10001u;
        if (op->scale_a * op->scale_b < 0) o->a_values[i] = -o->a_values[i];
    }
    for (uint32_t at = 0; at < k_count * MOST_N; at += MOST_N) {
        memset(o->b + at + n, 0, (columns - n) * sizeof *o->b); /* zeros after the last column */
        finite &=
            loops->decode(o->b + at, columns, &format_b, o->b_values + at, o->b_exponents + at);
    }
    return finite;
}

static void multiply_f32(const mma *p, operands *o) {
    const mma_op *op = p->op;
    const dw__wgmma_loops *loops = dw__wgmma_loops_now();
    const uint32_t n = (uint32_t)op->n, k_count = (uint32_t)op->k;
    const bool narrow = dw__emu_type_bytes(op->a) == 1,
               finite = decode(p, o,
                               (n + DW__WGMMA_COLUMNS - 1) / DW__WGMMA_COLUMNS * DW__WGMMA_COLUMNS);
    for (uint32_t first = 0; first < n; first += DW__WGMMA_COLUMNS) {
        const uint32_t end = n - first < DW__WGMMA_COLUMNS ? n : first + DW__WGMMA_COLUMNS,
                       count = end - first <= DW__WGMMA_STEP ? DW__WGMMA_STEP : DW__WGMMA_COLUMNS;
        for (uint32_t row = 0; row < A_ROWS; row += DW__WGMMA_ROWS) {
            const d_row place = row_of(p, row);
            float d[DW__WGMMA_ROWS][DW__WGMMA_COLUMNS];
            uint32_t others[DW__WGMMA_ROWS];
            if (!p->accumulate || end - first < DW__WGMMA_COLUMNS) memset(d, 0, sizeof d);
            if (p->accumulate) read_tile(&place, first, end, d);
            if (finite)
                loops->sums(op->k, o->a_values + row * k_count, o->a_twice + row * k_count,
                            o->b_values + first, o->b_exponents + first, MOST_N, count, narrow, d,
                            others);
            for (uint32_t r = 0; r < DW__WGMMA_ROWS; r++) {
                uint32_t left = finite ? others[r] : UINT32_MAX;
                for (; left; left &= left - 1) {
                    const uint32_t i = (uint32_t)__builtin_ctz(left);
                    d[r][i] = sum_alone(p, o->a + (row + r) * k_count, o->b + first + i, d[r][i]);
                }
            }
            write_tile(&place, first, end, d);
        }
    }
}

/* ---- into F16 and S32 ---------------------------------------------------------------------- */

static double read_d(const mma *p, const d_row *row, uint32_t column) {
    const uint32_t lane = row->lane + column % 8 / 2;
    if (p->op->d == DW__T_F16) {
        const uint32_t word = DW__REGISTER(row->warp, uint32_t, row->places[column / 8 * 2])[lane];
        return (double)dw__f16_to_f32((uint16_t)(column & 1 ? word >> 16 : word));
    }
    const uint32_t place = row->places[column / 8 * 4 + column % 2];
    return (double)DW__REGISTER(row->warp, int32_t, place)[lane];
}
static void write_d(const mma *p, const d_row *row, uint32_t column, double value) {
    const uint32_t lane = row->lane + column % 8 / 2;
    if (p->op->d == DW__T_F16) {
        uint32_t *word = &DW__REGISTER(row->warp, uint32_t, row->places[column / 8 * 2])[lane];
        const uint32_t half = dw__f32_to_f16((float)value);
        *word = column & 1 ? (*word & 0xFFFF) | half << 16 : (*word & 0xFFFF0000) | half;
        return;
    }
    DW__REGISTER(row->warp, int32_t, row->places[column / 8 * 4 + column % 2])
    [lane] = (int32_t)(int64_t)value;
}

static void multiply_plainly(const mma *p, const operands *o) {
    const mma_op *op = p->op;
    const double sign = (double)(op->scale_a * op->scale_b);
    for (uint32_t row = 0; row < A_ROWS; row++) {
        const d_row place = row_of(p, row);
        double a[DW__SUM_MOST] = {0};
        for (int k = 0; k < op->k; k++)
            a[k] = sign * dw__matrix_element(op->a, o->a[row * (uint32_t)op->k + (uint32_t)k]);
        for (uint32_t column = 0; column < (uint32_t)op->n; column++) {
            double value = p->accumulate ? read_d(p, &place, column) : 0;
            for (uint32_t k = 0; k < (uint32_t)op->k; k++)
                value += a[k] * dw__matrix_element(op->b, o->b[k * MOST_N + column]);
            write_d(p, &place, column, value);
        }
    }
}

static bool multiply(dw__emu_cluster *cluster, dw__emu_async *work) {
    mma *p = (mma *)(void *)work;
    operands o;
    (void)cluster;
    if (!read_codes(p, &o)) return false;
    if (p->op->d == DW__T_F32)
        multiply_f32(p, &o);
    else
        multiply_plainly(p, &o);
    for (uint32_t warp = 0; warp < WARPS; warp++)
        p->warps[warp].wgmma->in_flight[p->groups[warp] % 64]--;
    return true;
}

/* ---- issuing ------------------------------------------------------------------------------- */

static dw__matrix_operand operand_of(uint64_t descriptor, dw__emu_type type, bool mn_major) {
    static const int swizzles[] = {DW__SWIZZLE_NONE, DW__SWIZZLE_128, DW__SWIZZLE_64,
                                   DW__SWIZZLE_32};
    return (dw__matrix_operand){(uint32_t)(descriptor & 0x3FFF) << 4,
                                (uint32_t)(descriptor >> 16 & 0x3FFF) << 4,
                                (uint32_t)(descriptor >> 32 & 0x3FFF) << 4,
                                swizzles[descriptor >> 62],
                                mn_major,
                                8 * dw__emu_type_bytes(type)};
}

void dw__emu_free_wgmma(dw__emu_warp *w) {
    if (!w->wgmma) return;
    while (w->wgmma->begun) {
        mma *p = w->wgmma->begun;
        w->wgmma->begun = p->next;
        dw__free(p->work.clock);
        dw__free(p);
    }
    dw__free(w->wgmma);
}

static bool know(dw__emu_warp *w) {
    if (w->wgmma) return true;
    w->wgmma = dw__calloc(1, sizeof *w->wgmma);
    if (w->wgmma) w->wgmma->open = 1;
    return w->wgmma != NULL;
}

/* Returns the warp's next MMA: one that another of the four warps has started, or a new one. */
static mma *joined(dw__emu_warp *w, dw__emu_warp *first, const mma_op *k) {
    const uint64_t ordinal = w->wgmma->asked++;
    for (mma **link = &first->wgmma->begun; *link; link = &(*link)->next) {
        mma *p = *link;
        if (p->ordinal != ordinal) continue;
        if (++p->came == WARPS) *link = p->next;
        return p;
    }
    mma *p = dw__calloc(1, sizeof *p);
    if (!p) return NULL;
    p->work = (dw__emu_async){.done = multiply,
                              .cta = w->cta,
                              .warp = w->index,
                              .pc = w->now.pc,
                              .queue = 1 + w->cta->rank * 64 + w->index / WARPS};
    p->op = k;
    p->ordinal = ordinal;
    p->warps = first;
    dw__emu_race_next_time(&p->work, first->index, DW__SIDE_WGMMA);
    p->came = 1;
    p->next = first->wgmma->begun;
    first->wgmma->begun = p;
    return p;
}

static dw__emu_next product_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const mma_op *k = op->detail;
    dw__emu_warp *first = &w->cta->warps[w->index / WARPS * WARPS];
    const uint32_t warp = w->index % WARPS;
    (void)mask;
    if (w->index / WARPS * WARPS + WARPS > w->cta->warp_count) {
        dw__emu_found(w, -1, DW__FOUND_INVALID, "a wgmma by a group of fewer than four warps");
        return DW__FAULT;
    }
    if (!know(w) || !know(first)) return dw__emu_no_memory(w, -1);
    mma *p = joined(w, first, k);
    if (!p) return dw__emu_no_memory(w, -1);
    const bool accumulate = *DW__REGISTER(w, uint32_t, k->predicate) & 1;
    const uint64_t a = k->a_in_registers ? 0 : DW__REGISTER(w, uint64_t, k->descriptor_a)[0];
    const uint64_t b = DW__REGISTER(w, uint64_t, k->descriptor_b)[0];
    if (p->came == 1) p->accumulate = accumulate, p->descriptor_a = a, p->descriptor_b = b;
    if (p->op != k || p->accumulate != accumulate || p->descriptor_a != a || p->descriptor_b != b) {
        dw__emu_found(w, -1, DW__FOUND_DIVERGENCE,
                      "the four warps of a group execute different wgmma instructions");
        return DW__FAULT;
    }
    if (k->a_in_registers)
        for (int i = 0; i < 4; i++)
            memcpy(p->a_values[warp][i], DW__REGISTER(w, uint32_t, k->a_places[i]),
                   sizeof p->a_values[warp][i]);
    else
        p->a = operand_of(a, k->a, k->transposed_a);
    p->b = operand_of(b, k->b, k->transposed_b);
    if (!dw__emu_race_issue(w, &p->work)) return dw__emu_no_memory(w, -1);
    p->groups[warp] = w->wgmma->open;
    w->wgmma->times[w->wgmma->open % 64] = p->work.time;
    w->wgmma->in_flight[w->wgmma->open % 64]++;
    if (p->came == WARPS) dw__emu_later(w->cta->cluster, &p->work);
    for (int i = 0; i < k->d_count; i++)
        if (!dw__emu_set_pending(w, k->d_places[i], 128, DW__PENDING_WGMMA, w->wgmma->open))
            return dw__emu_no_memory(w, -1);
    return DW__NEXT;
}

bool dw__emu_wgmma_in_flight(const dw__emu_warp *w, uint32_t group) {
    return w->wgmma && w->wgmma->in_flight[group % 64] > 0;
}

static dw__emu_next commit_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)op, (void)mask;
    if (!w->wgmma) return DW__NEXT;
    if (w->wgmma->in_flight[(w->wgmma->open + 1) % 64]) {
        w->now.wait = DW__WAIT_ASYNC;
        return DW__AGAIN;
    }
    w->wgmma->times[(w->wgmma->open + 1) % 64] = w->wgmma->times[w->wgmma->open % 64];
    w->wgmma->open++;
    return DW__NEXT;
}

static dw__emu_next wait_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)mask;
    if (!w->wgmma) return DW__NEXT;
    const uint32_t open = w->wgmma->open, keep = (uint32_t)op->immediate;
    const uint32_t last =
        open - 1 > keep ? open - 1 - keep : 0; /* the youngest group that must be complete */
    for (uint32_t group = open > 63 ? open - 63 : 1; group <= last; group++) {
        if (!w->wgmma->in_flight[group % 64]) continue;
        w->now.wait = DW__WAIT_ASYNC;
        return DW__AGAIN;
    }
    dw__emu_clear_pending(w, DW__PENDING_WGMMA, last);
    dw__emu_race_waited(w, w->index / WARPS * WARPS, DW__SIDE_WGMMA, w->wgmma->times[last % 64]);
    return DW__NEXT;
}

/* ---- translators --------------------------------------------------------------------------- */

static bool take_shape(dw__emu_translator *t, mma_op *k) {
    if (dw__emu_all_taken(t)) return false;
    int m = 0, read = 0;
    const char *shape = t->in->modifiers[t->cursor];
    if (sscanf(shape, "m%3dn%3dk%3d%n", &m, &k->n, &k->k, &read) != 3 || shape[read] || m != 64)
        return false;
    t->cursor++;
    return k->n >= 8 && k->n <= MOST_N && k->n % 8 == 0;
}

static dw_status take_flag(dw__emu_translator *t, const dw__ptx_operand *o, int *value) {
    if (o->kind != DW__PTX_INTEGER || o->integer < -1 || o->integer > 1)
        return dw__emu_malformed(t, "the operand must be -1, 0 or 1");
    *value = (int)o->integer;
    return DW_OK;
}

static dw_status translate_product(dw__emu_translator *t) {
    mma_op *k = dw__emu_detail(t, sizeof *k);
    const dw__ptx_operand *o = t->in->operands;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned") || !take_shape(t, k) ||
        !dw__emu_take_type(t, &k->d))
        return dw__emu_unsupported(t);
    (void)dw__emu_take(t, "satfinite");
    if (!dw__emu_take_type(t, &k->a) || !dw__emu_take_type(t, &k->b)) return dw__emu_unsupported(t);
    static const int depths[] = {[1] = 32, [2] = 16, [4] = 8};
    const int bytes = dw__emu_type_bytes(k->a);
    const bool known = (k->d == DW__T_F32 || k->d == DW__T_F16 || k->d == DW__T_S32) &&
                       (bytes == 1 || bytes == 2 || bytes == 4) &&
                       bytes == dw__emu_type_bytes(k->b) && depths[bytes] == k->k;
    if (!known || t->in->operand_count < 4 || o[0].kind != DW__PTX_VECTOR)
        return dw__emu_unsupported(t);
    k->d_count = k->n / (k->d == DW__T_F16 ? 4 : 2);
    if (o[0].count != k->d_count) return dw__emu_malformed(t, "wrong number of registers for D");
    const dw__emu_type word = k->d == DW__T_F16 ? DW__T_B32 : k->d;
    for (int i = 0; i < k->d_count; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_result(t, &o[0].items[i], word, &k->d_places[i]));
    k->a_in_registers = o[1].kind == DW__PTX_VECTOR;
    if (k->a_in_registers) {
        if (o[1].count != 4) return dw__emu_malformed(t, "A must have four registers");
        for (int i = 0; i < 4; i++)
            DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[1].items[i], DW__T_B32, &k->a_places[i]));
    } else {
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[1], DW__T_B64, &k->descriptor_a));
    }
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[2], DW__T_B64, &k->descriptor_b));
    k->scale_a = k->scale_b = 1;
    int at = 3;
    const int given = t->in->operand_count;
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &o[at++], DW__T_PRED, &k->predicate));
    if (k->d != DW__T_S32) {
        if (given < 6) return dw__emu_malformed(t, "an operand is missing");
        DW_RETURN_IF_FAILED(take_flag(t, &o[at++], &k->scale_a));
        DW_RETURN_IF_FAILED(take_flag(t, &o[at++], &k->scale_b));
    }
    if (bytes == 2) {
        if (given < at + (k->a_in_registers ? 1 : 2))
            return dw__emu_malformed(t, "an operand is missing");
        if (!k->a_in_registers) DW_RETURN_IF_FAILED(take_flag(t, &o[at++], &k->transposed_a));
        DW_RETURN_IF_FAILED(take_flag(t, &o[at++], &k->transposed_b));
    }
    if (at != given) return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_emit(t, product_run));
    t->op->detail = k;
    t->op->aligned = true;
    t->op->reads_pending = true;
    return DW_OK;
}

static dw_status translate_wgmma(dw__emu_translator *t) {
    if (dw__emu_take(t, "mma_async")) return translate_product(t);
    const bool commit = dw__emu_take(t, "commit_group"),
               wait = !commit && dw__emu_take(t, "wait_group");
    const bool fence = !commit && !wait && dw__emu_take(t, "fence");
    if (!(commit || wait || fence) || !dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned"))
        return dw__emu_unsupported(t);
    if (wait && (t->in->operand_count != 1 || t->in->operands[0].kind != DW__PTX_INTEGER ||
                 t->in->operands[0].integer < 0 || t->in->operands[0].integer > 62))
        return dw__emu_malformed(t, "the operand must be a number of groups from 0 to 62");
    DW_RETURN_IF_FAILED(dw__emu_emit(t, commit ? commit_run : wait ? wait_run : dw__emu_nothing));
    t->op->aligned = true;
    if (wait) t->op->immediate = t->in->operands[0].integer;
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_wgmma[] = {{"wgmma", translate_wgmma}, {NULL, NULL}};
