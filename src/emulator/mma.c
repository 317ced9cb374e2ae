/* mma.sync (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions"; block scales: "Block Scaling for
 * mma.sync"). Products are exact and the sum of one instruction is rounded once, to nearest (for F64 after every
 * term, in the order of K). The bargain: the hardware's order and truncation are not documented, so results may
 * differ from a GPU's in the last bits.
 */
#include "emulator/lanes.h"
#include "number/format.h"
#include "number/half.h"
#include <math.h>
#include <string.h>

#define MOST_M 16
#define MOST_N 8
#define MOST_K 256

/* Element types, by their layout in registers. */
typedef enum element {
    NO_ELEMENT,
    F16,
    BF16,
    TF32,
    F64,
    E4M3,
    E5M2,
    E3M2,
    E2M3,
    E2M1, /* in the middle of a byte */
    E2M1_PACKED,
    S8,
    U8,
    S4,
    U4,
    B1,
} element;

typedef struct mma_op {
    int m, k, a_count, b_count, d_count;
    element a, b;
    dw__emu_type d, c;        /* F16, F32, F64, S32 */
    bool saturate, exclusive; /* `exclusive`, for B1: xor instead of and */
    uint32_t a_places[8], b_places[4], c_places[4], d_places[4];
    int scales; /* scale factors in each row: 0, 1, 2 or 4 */
    dw_dtype scale_format;
    uint32_t scale_a, scale_b, byte_a, byte_b, thread_a, thread_b;
} mma_op;

static int element_bits(element type) {
    switch (type) {
    case F64: return 64;
    case TF32: return 32;
    case F16:
    case BF16: return 16;
    case S4:
    case U4:
    case E2M1_PACKED: return 4;
    case B1: return 1;
    default: return 8;
    }
}

static double real_value(element type, uint32_t bits) {
    switch (type) {
    case F16: return (double)dw__f16_to_f32((uint16_t)bits);
    case BF16: return (double)dw__bf16_to_f32((uint16_t)bits);
    case TF32: return (double)dw__f32_from_bits(bits & ~(uint32_t)0x1FFF);
    case E4M3: return (double)dw__decode_one(DW_E4M3, bits);
    case E5M2: return (double)dw__decode_one(DW_E5M2, bits);
    case E3M2: return (double)dw__decode_one(DW_E3M2, bits & 0x3F);
    case E2M3: return (double)dw__decode_one(DW_E2M3, bits & 0x3F);
    case E2M1: return (double)dw__decode_one(DW_E2M1, bits >> 2 & 0xF);
    case E2M1_PACKED: return (double)dw__decode_one(DW_E2M1, bits);
    case S8: return (int8_t)bits;
    case S4: return (int)(bits ^ 8) - 8;
    default: return bits;
    }
}

/* Returns element `index` of a lane's registers of one operand. */
static double lane_element(const dw__emu_warp *w, element type, const uint32_t *places, int index,
                           uint32_t lane) {
    if (type == F64) return DW__REGISTER(w, double, places[index])[lane];
    const int bits = element_bits(type), per = 32 / bits;
    const uint32_t word = DW__REGISTER(w, uint32_t, places[index / per])[lane];
    if (bits == 32) return real_value(type, word);
    return real_value(type, word >> index % per * bits & ((1u << bits) - 1));
}

/* Gathers an operand into values[row * MOST_K + k]. A group of four lanes holds a row (for B, a column). If there are
 * sixteen rows, its registers alternate between the row and the one eight below. */
static void gather(const dw__emu_warp *w, element type, const uint32_t *places, int rows,
                   int k_count, double *values) {
    const int per = type == F64 ? 1 : 32 / element_bits(type), halves = rows / 8;
    const int count = rows * k_count / DW__LANES;
    for (uint32_t lane = 0; lane < DW__LANES; lane++) {
        for (int i = 0; i < count; i++) {
            const int word = i / per;
            const int row = (int)lane / 4 + 8 * (word % halves);
            const int k = ((int)lane % 4 + word / halves * 4) * per + i % per;
            values[row * MOST_K + k] = lane_element(w, type, places, i, lane);
        }
    }
}

/* Multiplies the gathered values by the scales of their chunks. A product of two elements and two scales is exact in
 * double. */
static void apply_scales(const dw__emu_warp *w, const mma_op *op, bool of_a, double *values) {
    const int rows = of_a ? op->m : MOST_N, chunk = op->k / op->scales;
    const uint32_t *words = DW__REGISTER(w, uint32_t, of_a ? op->scale_a : op->scale_b);
    const uint32_t *bytes = DW__REGISTER(w, uint32_t, of_a ? op->byte_a : op->byte_b);
    const uint32_t *threads = DW__REGISTER(w, uint32_t, of_a ? op->thread_a : op->thread_b);
    for (int row = 0; row < rows; row++) {
        const uint32_t lane =
            (uint32_t)row % 8 * 4 + (of_a ? threads[0] * 2 + (uint32_t)row / 8 : threads[0]);
        for (int k = 0; k < op->k; k++) {
            const uint32_t code = words[lane] >> 8 * (bytes[0] + (uint32_t)(k / chunk)) & 0xFF;
            values[row * MOST_K + k] *= (double)dw__decode_one(op->scale_format, code);
        }
    }
}

/* Returns whether the scale selectors are valid. The scales of a row are adjacent: two start at byte 0 or 2, four at
 * byte 0. */
static bool selects(const dw__emu_warp *w, const mma_op *op) {
    const uint32_t step = (uint32_t)op->scales;
    const uint32_t a = *DW__REGISTER(w, uint32_t, op->byte_a),
                   b = *DW__REGISTER(w, uint32_t, op->byte_b);
    return a < 4 && b < 4 && a % step == 0 && b % step == 0 &&
           *DW__REGISTER(w, uint32_t, op->thread_a) < 2 &&
           *DW__REGISTER(w, uint32_t, op->thread_b) < 4;
}

/* ---- results ------------------------------------------------------------------------------- */

/* Returns the lane that holds element (row, column) of C and D. */
static uint32_t result_lane(int row, int column) { return (uint32_t)(row % 8 * 4 + column / 2); }
static double load_c(const dw__emu_warp *w, const mma_op *op, int row, int column) {
    const uint32_t lane = result_lane(row, column);
    const int index = row / 8 * 2 + column % 2;
    switch (op->c) {
    case DW__T_F16: {
        const uint32_t word = DW__REGISTER(w, uint32_t, op->c_places[row / 8])[lane];
        return (double)dw__f16_to_f32((uint16_t)(column % 2 ? word >> 16 : word));
    }
    case DW__T_F64: return DW__REGISTER(w, double, op->c_places[index])[lane];
    case DW__T_S32: return DW__REGISTER(w, int32_t, op->c_places[index])[lane];
    default: return (double)DW__REGISTER(w, float, op->c_places[index])[lane];
    }
}
static void store_d(dw__emu_warp *w, const mma_op *op, int row, int column, double value) {
    const uint32_t lane = result_lane(row, column);
    const int index = row / 8 * 2 + column % 2;
    switch (op->d) {
    case DW__T_F16: {
        uint32_t *word = &DW__REGISTER(w, uint32_t, op->d_places[row / 8])[lane];
        const uint32_t half = isnan(value) ? 0x7FFF : dw__f32_to_f16((float)value);
        *word = column % 2 ? (*word & 0xFFFF) | half << 16 : (*word & 0xFFFF0000) | half;
        return;
    }
    case DW__T_F64: DW__REGISTER(w, double, op->d_places[index])[lane] = value; return;
    case DW__T_S32: {
        int64_t sum = (int64_t)value;
        if (op->saturate) sum = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
        DW__REGISTER(w, uint32_t, op->d_places[index])[lane] = (uint32_t)sum;
        return;
    }
    default:
        DW__REGISTER(w, uint32_t, op->d_places[index])
        [lane] = isnan(value) ? 0x7FFFFFFF : dw__f32_bits((float)value);
    }
}

static double dot(const mma_op *op, const double *a, const double *b, double sum) {
    if (op->d == DW__T_F64) {
        for (int k = 0; k < op->k; k++) sum = fma(a[k], b[k], sum);
        return sum;
    }
    if (op->a == B1) {
        for (int k = 0; k < op->k; k++)
            sum += op->exclusive ? a[k] != b[k] : a[k] != 0 && b[k] != 0;
        return sum;
    }
    /* Adds the products before the accumulator, so that small products beside a large accumulator survive as far as
     * double allows. */
    double products = 0;
    for (int k = 0; k < op->k; k++) products += a[k] * b[k];
    return sum + products;
}

static dw__emu_next mma_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const mma_op *k = op->detail;
    double a[MOST_M * MOST_K], b[MOST_N * MOST_K], d[MOST_M][MOST_N];
    if (k->scales && !selects(w, k)) {
        dw__emu_found(w, __builtin_ctz(mask), DW__FOUND_INVALID,
                      "selects scales by bytes %u and %u of threads %u and %u: must be thread "
                      "0 or 1 for A, 0 to 3 for B, and the first byte of %d scales",
                      *DW__REGISTER(w, uint32_t, k->byte_a), *DW__REGISTER(w, uint32_t, k->byte_b),
                      *DW__REGISTER(w, uint32_t, k->thread_a),
                      *DW__REGISTER(w, uint32_t, k->thread_b), k->scales);
        return DW__FAULT;
    }
    gather(w, k->a, k->a_places, k->m, k->k, a);
    gather(w, k->b, k->b_places, MOST_N, k->k, b);
    if (k->scales) apply_scales(w, k, true, a), apply_scales(w, k, false, b);
    for (int row = 0; row < k->m; row++)
        for (int column = 0; column < MOST_N; column++)
            d[row][column] =
                dot(k, &a[row * MOST_K], &b[column * MOST_K], load_c(w, k, row, column));
    for (int row = 0; row < k->m; row++)
        for (int column = 0; column < MOST_N; column++) store_d(w, k, row, column, d[row][column]);
    return DW__NEXT;
}

/* ---- translation --------------------------------------------------------------------------- */

typedef enum kind { PLAIN, F8F6F4, MXF8F6F4, MXF4, MXF4NVF4 } kind;
static const char *const kinds[] = {"kind::f8f6f4", "kind::mxf8f6f4", "kind::mxf4",
                                    "kind::mxf4nvf4", NULL};
static const char *const vectors[] = {"scale_vec::1X", "scale_vec::2X", "scale_vec::4X", NULL};

static void take_kind(dw__emu_translator *t, kind *which, int *scales) {
    int index = dw__emu_take_one_of(t, kinds);
    if (index < 0) return;
    *which = (kind)(index + 1);
    if (!dw__emu_take(t, "block_scale")) return;
    int vector = dw__emu_take_one_of(t, vectors);
    *scales = vector >= 0 ? 1 << vector : *which == MXF8F6F4 ? 1 : *which == MXF4 ? 2 : 0;
}

static bool take_element(dw__emu_translator *t, kind which, element *type) {
    static const char *const names[] = {"f16",  "bf16", "tf32", "f64",  "e4m3",
                                        "e5m2", "e3m2", "e2m3", "e2m1", "s8",
                                        "u8",   "s4",   "u4",   "b1",   NULL};
    static const element elements[] = {F16,  BF16, TF32, F64, E4M3, E5M2, E3M2,
                                       E2M3, E2M1, S8,   U8,  S4,   U4,   B1};
    int index = dw__emu_take_one_of(t, names);
    if (index < 0) return false;
    *type = elements[index];
    if (which >= MXF4 && *type == E2M1) *type = E2M1_PACKED;
    return true;
}

/* Returns whether the tables of the PTX ISA have this combination (dense), except for m8n8k4 of halves, which is
 * Volta's. */
static bool is_known(const mma_op *k, kind which) {
    const bool wide = k->m == 16, same = k->a == k->b;
    if (which == PLAIN && k->scales) return false;
    if (which >= MXF8F6F4 && !k->scales) return false;
    if (k->saturate && k->d != DW__T_S32) return false;
    if (k->c != k->d) return false;
    switch (which) {
    case F8F6F4:
    case MXF8F6F4:
        return wide && k->k == 32 && k->a >= E4M3 && k->a <= E2M1 && k->b >= E4M3 && k->b <= E2M1 &&
               (k->d == DW__T_F32 || (which == F8F6F4 && k->d == DW__T_F16)) &&
               (which == F8F6F4 || (k->scales == 1 && k->scale_format == DW_E8M0));
    case MXF4:
        return wide && k->k == 64 && k->a == E2M1_PACKED && same && k->d == DW__T_F32 &&
               k->scales == 2 && k->scale_format == DW_E8M0;
    case MXF4NVF4:
        return wide && k->k == 64 && k->a == E2M1_PACKED && same && k->d == DW__T_F32 &&
               (k->scales == 4 || (k->scales == 2 && k->scale_format == DW_E8M0));
    default: break;
    }
    switch (k->a) {
    case F16:
        return same && wide && (k->k == 8 || k->k == 16) && k->d != DW__T_F64 && k->d != DW__T_S32;
    case BF16: return same && wide && (k->k == 8 || k->k == 16) && k->d == DW__T_F32;
    case TF32: return same && wide && (k->k == 4 || k->k == 8) && k->d == DW__T_F32;
    case F64:
        return same && k->d == DW__T_F64 &&
               (wide ? k->k == 4 || k->k == 8 || k->k == 16 : k->k == 4);
    case E4M3:
    case E5M2:
        return (k->b == E4M3 || k->b == E5M2) && wide && (k->k == 16 || k->k == 32) &&
               (k->d == DW__T_F32 || k->d == DW__T_F16);
    case S8:
    case U8:
        return (k->b == S8 || k->b == U8) && k->d == DW__T_S32 &&
               (wide ? k->k == 16 || k->k == 32 : k->k == 16);
    case S4:
    case U4:
        return (k->b == S4 || k->b == U4) && k->d == DW__T_S32 &&
               (wide ? k->k == 32 || k->k == 64 : k->k == 32);
    case B1:
        return same && k->d == DW__T_S32 && !k->saturate &&
               (wide ? k->k == 128 || k->k == 256 : k->k == 128);
    default: return false;
    }
}

static dw_status take_list(dw__emu_translator *t, int index, dw__emu_type type, int count,
                           bool result, uint32_t *places) {
    const dw__ptx_operand *list = &t->in->operands[index],
                          *items = list->kind == DW__PTX_VECTOR ? list->items : list;
    if ((list->kind == DW__PTX_VECTOR ? list->count : 1) != count)
        return dw__emu_malformed(t, "a fragment has the wrong number of registers");
    for (int i = 0; i < count; i++)
        DW_RETURN_IF_FAILED(result ? dw__emu_take_result(t, &items[i], type, &places[i])
                                   : dw__emu_take_source(t, &items[i], type, &places[i]));
    return DW_OK;
}

/* Takes "scale or {scale}, {byte, thread}". */
static dw_status take_scale(dw__emu_translator *t, int index, uint32_t *scale, uint32_t *byte,
                            uint32_t *thread) {
    const dw__ptx_operand *pair = &t->in->operands[index + 1];
    if (pair->kind != DW__PTX_VECTOR || pair->count != 2)
        return dw__emu_malformed(t, "the scale selector, such as {0, 0}, is missing");
    DW_RETURN_IF_FAILED(take_list(t, index, DW__T_B32, 1, false, scale));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &pair->items[0], DW__T_B16, byte));
    return dw__emu_take_source(t, &pair->items[1], DW__T_B16, thread);
}

static dw_status translate_mma(dw__emu_translator *t) {
    static const struct {
        const char *name;
        int m, k;
    } shapes[] = {{"m16n8k4", 16, 4},     {"m16n8k8", 16, 8},   {"m16n8k16", 16, 16},
                  {"m16n8k32", 16, 32},   {"m16n8k64", 16, 64}, {"m16n8k128", 16, 128},
                  {"m16n8k256", 16, 256}, {"m8n8k4", 8, 4},     {"m8n8k16", 8, 16},
                  {"m8n8k32", 8, 32},     {"m8n8k128", 8, 128}};
    mma_op *k = dw__emu_detail(t, sizeof *k);
    kind which = PLAIN;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "sync") || !dw__emu_take(t, "aligned")) return dw__emu_unsupported(t);
    take_kind(t, &which, &k->scales);
    for (size_t i = 0; i < DW_COUNT(shapes) && !k->m; i++)
        if (dw__emu_take(t, shapes[i].name)) k->m = shapes[i].m, k->k = shapes[i].k;
    if (!k->m || !dw__emu_take(t, "row") || !dw__emu_take(t, "col")) return dw__emu_unsupported(t);
    if (which == PLAIN) take_kind(t, &which, &k->scales);
    k->saturate = dw__emu_take(t, "satfinite");
    if (!dw__emu_take_type(t, &k->d) || !take_element(t, which, &k->a) ||
        !take_element(t, which, &k->b) || !dw__emu_take_type(t, &k->c))
        return dw__emu_unsupported(t);
    if (k->a == B1) {
        k->exclusive = dw__emu_take(t, "xor");
        if ((!k->exclusive && !dw__emu_take(t, "and")) || !dw__emu_take(t, "popc"))
            return dw__emu_unsupported(t);
    }
    if (k->scales) {
        k->scale_format = dw__emu_take(t, "ue4m3") ? DW_UE4M3 : DW_E8M0;
        if (k->scale_format == DW_E8M0 && !dw__emu_take(t, "ue8m0")) return dw__emu_unsupported(t);
    }
    if (!is_known(k, which) || t->in->operand_count != (k->scales ? 8 : 4))
        return dw__emu_unsupported(t);

    const int lane_bits = k->k * element_bits(k->a) / DW__LANES * 8;
    const dw__emu_type operand = k->a == F64 ? DW__T_F64 : DW__T_B32;
    const dw__emu_type result = k->d == DW__T_F64 ? DW__T_F64 : DW__T_B32;
    k->b_count = lane_bits / (k->a == F64 ? 64 : 32);
    k->a_count = k->b_count * k->m / 8;
    k->d_count = k->m / 8 * (k->d == DW__T_F16 ? 1 : 2);
    DW_RETURN_IF_FAILED(take_list(t, 1, operand, k->a_count, false, k->a_places));
    DW_RETURN_IF_FAILED(take_list(t, 2, operand, k->b_count, false, k->b_places));
    DW_RETURN_IF_FAILED(take_list(t, 3, result, k->d_count, false, k->c_places));
    DW_RETURN_IF_FAILED(take_list(t, 0, result, k->d_count, true, k->d_places));
    if (k->scales) {
        DW_RETURN_IF_FAILED(take_scale(t, 4, &k->scale_a, &k->byte_a, &k->thread_a));
        DW_RETURN_IF_FAILED(take_scale(t, 6, &k->scale_b, &k->byte_b, &k->thread_b));
    }
    DW_RETURN_IF_FAILED(dw__emu_emit(t, mma_run));
    t->op->detail = k;
    t->op->aligned = true;
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_mma[] = {{"mma", translate_mma}, {NULL, NULL}};
