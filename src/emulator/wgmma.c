/* Hopper's tensor cores: wgmma. PTX ISA 9.7.15. A product is the four warps' together: it is begun when the
 * last of them has asked for it, and is done for all of them at once, some turns later. Sums into F32 are the
 * hardware's to the bit (wgmma_sum.h), those into F16 are rounded once.
 */
#include "emulator/lanes.h"
#include "emulator/matrix_operand.h"
#include "emulator/race.h"
#include "emulator/wgmma_sum.h"
#include "emulator/written.h"
#include "number/format.h"
#include "number/half.h"
#include <stdio.h>
#include <string.h>

#define ROWS 16 /* of 64: one warp's */
#define MOST_N 256

typedef struct product_op {
    int n, k;
    dw__emu_type d, a, b;
    bool a_in_registers;
    int scale_a, scale_b, transposed_a, transposed_b;
    uint32_t predicate; /* whether D counts */
    uint32_t descriptor_a, descriptor_b;
    uint32_t a_places[4];
    int d_count;
    uint32_t d_places[128];
} product_op;

#define WARPS 4
typedef struct product product;
struct product {
    dw__emu_async work;
    const product_op *op;
    uint64_t ordinal;       /* among the products of its four warps */
    int came;               /* warps that have asked for it */
    dw__emu_warp *warps;    /* the first of the four */
    uint32_t groups[WARPS]; /* which group of each warp it belongs to */
    bool accumulate;
    uint64_t descriptor_a, descriptor_b;
    dw__matrix_operand a, b;
    uint32_t a_values[WARPS][4][DW__LANES];
    product *next; /* the one that was begun before it */
};

struct dw__emu_wgmma {
    uint32_t open;          /* number of the group that products are added to; the first is 1 */
    uint32_t in_flight[64]; /* products of each group, by its number modulo 64 */
    uint32_t times[64];     /* of each group's youngest product, for the checker */
    uint64_t asked;         /* products */
    product *begun; /* of the first of four warps: those that some of the four have not asked for */
};

/* ---- elements ------------------------------------------------------------------------------ */

static double element_value(dw__emu_type type, const unsigned char *at) {
    uint32_t word;
    uint16_t half;
    switch (type) {
    case DW__T_F16: memcpy(&half, at, 2); return (double)dw__f16_to_f32(half);
    case DW__T_BF16: memcpy(&half, at, 2); return (double)dw__bf16_to_f32(half);
    case DW__T_TF32:
        memcpy(&word, at, 4);
        return (double)dw__f32_from_bits(word & ~(uint32_t)0x1FFF);
    case DW__T_E4M3: return (double)dw__decode_one(DW_FORMAT_E4M3, *at);
    case DW__T_E5M2: return (double)dw__decode_one(DW_FORMAT_E5M2, *at);
    case DW__T_S8: return *(const signed char *)at;
    default: return *at;
    }
}

static bool blame(const product *p, dw__emu_finding kind, const char *what, uint32_t where) {
    dw__emu_found_at(p->work.cta, p->work.warp, -1, p->work.pc, kind, "%s 0x%x", what, where);
    return false;
}

/* Tells the checker of a matrix that is read: its elements lie together by sixteen bytes. */
static void note_operand(product *p, const dw__matrix_operand *o, uint32_t first, uint32_t count,
                         uint32_t k_count) {
    const uint32_t together = 128 / (uint32_t)o->bits, across = o->mn_major ? count : k_count,
                   along = o->mn_major ? k_count : count;
    if (!p->work.clock) return;
    for (uint32_t i = 0; i < along; i++) {
        for (uint32_t j = 0; j < across; j += together) {
            const uint32_t at = o->mn_major ? dw__matrix_address(o, first + j, i)
                                            : dw__matrix_address(o, first + i, j);
            dw__emu_race_work(&p->work, p->warps->index, DW__SIDE_WGMMA, p->work.cta, at, 16,
                              false);
        }
    }
}

/* Elements (first + i, k) of an operand in shared memory, as values[i * k_count + k]. */
static bool read_operand(product *p, const dw__matrix_operand *o, dw__emu_type type, uint32_t first,
                         uint32_t count, uint32_t k_count, double *values) {
    const dw__emu_cta *cta = p->work.cta;
    const uint32_t bytes = (uint32_t)o->bits / 8;
    bool undefined = false;
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < k_count; k++) {
            const uint32_t at = dw__matrix_address(o, first + i, k);
            if (at < DW__SHARED_FIRST || at + bytes > cta->shared_bytes)
                return blame(p, DW__FOUND_BOUNDS,
                             "a matrix reaches beyond the block's shared memory, to", at);
            undefined = undefined || dw__count_unwritten(cta->defined, at, bytes);
            values[i * k_count + k] = element_value(type, cta->shared + at);
        }
    }
    note_operand(p, o, first, count, k_count);
    if (undefined && cta->cluster->grid->check)
        blame(p, DW__FOUND_UNDEFINED,
              "a product reads shared memory that was never written, of the matrix at", o->start);
    return true;
}

/* A from registers: words of 2 halves, 4 bytes or one tf32; see the fragments of PTX ISA 9.7.15.5.2. */
static void unpack_a(const product *p, uint32_t warp, uint32_t k_count, double *values) {
    const int per_word = 4 / dw__emu_type_bytes(p->op->a);
    for (uint32_t lane = 0; lane < DW__LANES; lane++) {
        for (uint32_t word = 0; word < 4; word++) {
            const uint32_t row = lane / 4 + (word & 1) * 8,
                           k = (lane % 4 + (word >> 1) * 4) * (uint32_t)per_word;
            unsigned char bytes[4];
            memcpy(bytes, &p->a_values[warp][word][lane], 4);
            for (int i = 0; i < per_word; i++)
                values[row * k_count + k + (uint32_t)i] =
                    element_value(p->op->a, bytes + i * dw__emu_type_bytes(p->op->a));
        }
    }
}

/* ---- one product --------------------------------------------------------------------------- */

static double read_d(const product *p, uint32_t warp, uint32_t row, uint32_t column) {
    dw__emu_warp *w = &p->warps[warp];
    const uint32_t lane = row % 8 * 4 + column % 8 / 2, pair = column / 8 * 2 + row / 8;
    if (p->op->d == DW__T_F16) {
        uint32_t word = DW__REGISTER(w, uint32_t, p->op->d_places[pair])[lane];
        return (double)dw__f16_to_f32((uint16_t)(column & 1 ? word >> 16 : word));
    }
    uint32_t word = DW__REGISTER(w, uint32_t, p->op->d_places[pair * 2 + column % 2])[lane];
    return p->op->d == DW__T_S32 ? (double)(int32_t)word : (double)dw__f32_from_bits(word);
}
static void write_d(const product *p, uint32_t warp, uint32_t row, uint32_t column, double value) {
    dw__emu_warp *w = &p->warps[warp];
    const uint32_t lane = row % 8 * 4 + column % 8 / 2, pair = column / 8 * 2 + row / 8;
    if (p->op->d == DW__T_F16) {
        uint32_t *word = &DW__REGISTER(w, uint32_t, p->op->d_places[pair])[lane];
        uint32_t half = dw__f32_to_f16((float)value);
        *word = column & 1 ? (*word & 0xFFFF) | half << 16 : (*word & 0xFFFF0000) | half;
        return;
    }
    uint32_t *word = &DW__REGISTER(w, uint32_t, p->op->d_places[pair * 2 + column % 2])[lane];
    if (p->op->d == DW__T_S32)
        *word = (uint32_t)(int64_t)value;
    else
        *word = value != value ? 0x7FFFFFFF : dw__f32_bits((float)value);
}

/* The exponent of the least normal number of each type. */
static int least_exponent(dw__emu_type type) {
    return type == DW__T_F16 || type == DW__T_E5M2 ? -14 : type == DW__T_E4M3 ? -6 : -126;
}

static void make_factors(dw__emu_type type, const double *values, uint32_t count, uint32_t k,
                         dw__factors *factors) {
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t at = 0; at < k; at++) {
            factors[i].value[at] = values[i * k + at];
            factors[i].exponent[at] = dw__factor_exponent(values[i * k + at], least_exponent(type));
        }
    }
}

/* Rows of sixteen of one warp against every column. */
static void multiply_rows(const product *p, uint32_t warp, const dw__factors *rows,
                          const dw__factors *columns) {
    const product_op *op = p->op;
    const double sign = (double)(op->scale_a * op->scale_b);
    for (uint32_t row = 0; row < ROWS; row++) {
        for (uint32_t column = 0; column < (uint32_t)op->n; column++) {
            const double begin = p->accumulate ? read_d(p, warp, row, column) : 0;
            double value;
            if (op->d == DW__T_F32) {
                value = (double)dw__wgmma_sum(&rows[row], &columns[column], op->k, sign,
                                              (float)begin, dw__emu_type_bytes(op->a) == 1);
            } else {
                value = begin;
                for (int k = 0; k < op->k; k++)
                    value += sign * rows[row].value[k] * columns[column].value[k];
            }
            write_d(p, warp, row, column, value);
        }
    }
}

static bool multiply(dw__emu_cluster *cluster, dw__emu_async *work) {
    product *p = (product *)(void *)work;
    const product_op *op = p->op;
    const uint32_t n = (uint32_t)op->n, k = (uint32_t)op->k;
    double a[ROWS * DW__SUM_MOST], b[MOST_N * DW__SUM_MOST];
    dw__factors rows[ROWS], columns[MOST_N];
    (void)cluster;
    if (!read_operand(p, &p->b, op->b, 0, n, k, b)) return false;
    make_factors(op->b, b, n, k, columns);
    for (uint32_t warp = 0; warp < WARPS; warp++) {
        if (op->a_in_registers)
            unpack_a(p, warp, k, a);
        else if (!read_operand(p, &p->a, op->a, warp * ROWS, ROWS, k, a))
            return false;
        make_factors(op->a, a, ROWS, k, rows);
        multiply_rows(p, warp, rows, columns);
        p->warps[warp].wgmma->in_flight[p->groups[warp] % 64]--;
    }
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
        product *p = w->wgmma->begun;
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

/* The product that the warp asks for next: begun by another of the four, or new. */
static product *joined(dw__emu_warp *w, dw__emu_warp *first, const product_op *k) {
    const uint64_t ordinal = w->wgmma->asked++;
    for (product **link = &first->wgmma->begun; *link; link = &(*link)->next) {
        product *p = *link;
        if (p->ordinal != ordinal) continue;
        if (++p->came == WARPS) *link = p->next;
        return p;
    }
    product *p = dw__calloc(1, sizeof *p);
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
    const product_op *k = op->detail;
    dw__emu_warp *first = &w->cta->warps[w->index / WARPS * WARPS];
    const uint32_t warp = w->index % WARPS;
    (void)mask;
    if (w->index / WARPS * WARPS + WARPS > w->cta->warp_count) {
        dw__emu_found(w, -1, DW__FOUND_INVALID, "a product by a group of fewer than four warps");
        return DW__FAULT;
    }
    if (!know(w) || !know(first)) return dw__emu_no_memory(w, -1);
    product *p = joined(w, first, k);
    if (!p) return dw__emu_no_memory(w, -1);
    const bool accumulate = *DW__REGISTER(w, uint32_t, k->predicate) & 1;
    const uint64_t a = k->a_in_registers ? 0 : DW__REGISTER(w, uint64_t, k->descriptor_a)[0];
    const uint64_t b = DW__REGISTER(w, uint64_t, k->descriptor_b)[0];
    if (p->came == 1) p->accumulate = accumulate, p->descriptor_a = a, p->descriptor_b = b;
    if (p->op != k || p->accumulate != accumulate || p->descriptor_a != a || p->descriptor_b != b) {
        dw__emu_found(w, -1, DW__FOUND_DIVERGENCE,
                      "the four warps of a group ask for different products");
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
        open - 1 > keep ? open - 1 - keep : 0; /* the youngest group that must be done */
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

static bool take_shape(dw__emu_translator *t, product_op *k) {
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
        return dw__emu_malformed(t, "-1, 0 or 1 is wanted");
    *value = (int)o->integer;
    return DW_OK;
}

static dw_status translate_product(dw__emu_translator *t) {
    product_op *k = dw__emu_detail(t, sizeof *k);
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
    if (o[0].count != k->d_count) return dw__emu_malformed(t, "another number of registers for D");
    const dw__emu_type word = k->d == DW__T_F16 ? DW__T_B32 : k->d;
    for (int i = 0; i < k->d_count; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_result(t, &o[0].items[i], word, &k->d_places[i]));
    k->a_in_registers = o[1].kind == DW__PTX_VECTOR;
    if (k->a_in_registers) {
        if (o[1].count != 4) return dw__emu_malformed(t, "A in other than four registers");
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
    if (at != given) return dw__emu_malformed(t, "it takes another number of operands");
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
        return dw__emu_malformed(t, "a number of groups is wanted");
    DW_RETURN_IF_FAILED(dw__emu_emit(t, commit ? commit_run : wait ? wait_run : dw__emu_nothing));
    t->op->aligned = true;
    if (wait) t->op->immediate = t->in->operands[0].integer;
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_wgmma[] = {{"wgmma", translate_wgmma}, {NULL, NULL}};
