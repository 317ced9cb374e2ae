/* Decodes the instruction descriptors of tcgen05.mma (PTX ISA, "Instruction descriptor") and the elements of its
 * operands.
 */
#include "emulator/tcgen05_descriptor.h"
#include "number/format.h"
#include "number/half.h"
#include <stddef.h>
#include <string.h>

static uint32_t field(uint32_t descriptor, int first, int bits) {
    return descriptor >> first & ((1u << bits) - 1);
}

static bool is_scaled(dw__tensor_kind kind) { return kind >= DW__KIND_MXF8F6F4; }

static dw__tensor_format format_of(dw__tensor_kind kind, uint32_t code) {
    static const dw__tensor_format narrow[8] = {DW__FORMAT_E4M3, DW__FORMAT_E5M2, DW__FORMAT_NONE,
                                                DW__FORMAT_E2M3, DW__FORMAT_E3M2, DW__FORMAT_E2M1,
                                                DW__FORMAT_NONE, DW__FORMAT_NONE};
    switch (kind) {
    case DW__KIND_F16:
        return code == 0 ? DW__FORMAT_F16 : code == 1 ? DW__FORMAT_BF16 : DW__FORMAT_NONE;
    case DW__KIND_TF32: return code == 2 ? DW__FORMAT_TF32 : DW__FORMAT_NONE;
    case DW__KIND_I8:
        return code == 0 ? DW__FORMAT_U8 : code == 1 ? DW__FORMAT_S8 : DW__FORMAT_NONE;
    case DW__KIND_F8F6F4:
    case DW__KIND_MXF8F6F4: return narrow[code];
    default: return code == 1 ? DW__FORMAT_E2M1 : DW__FORMAT_NONE;
    }
}

int dw__tensor_format_bits(dw__tensor_format format) {
    static const int bits[] = {16, 16, 32, 8, 8, 8, 8, 6, 6, 4, 0};
    return bits[format];
}

static int depth_of(dw__tensor_kind kind) {
    switch (kind) {
    case DW__KIND_F16: return 16;
    case DW__KIND_TF32: return 8;
    case DW__KIND_MXF4:
    case DW__KIND_MXF4NVF4: return 64;
    default: return 32;
    }
}

static const char *shape_error(const dw__tensor_form *form, int m, int n) {
    if (form->stationary) {
        if (m != 32 && m != 64 && m != 128) return "M must be 32, 64 or 128";
        return n == 64 || n == 128 || n == 256 ? NULL : "N must be 64, 128 or 256";
    }
    if (form->cta_group == 2) {
        if (m != 128 && m != 256) return "M must be 128 or 256";
    } else if (is_scaled(form->kind)) {
        if (m != 128) return "M must be 128";
    } else if (m != 64 && m != 128) {
        return "M must be 64 or 128";
    }
    const int step = m == 64 || (is_scaled(form->kind) && form->cta_group == 1) ? 8 : 16;
    if (n < step || n > 256 || n % step)
        return step == 8 ? "N must be a multiple of 8, up to 256"
                         : "N must be a multiple of 16, up to 256";
    return NULL;
}

static const char *scales_error(const dw__tensor_form *form, const dw__tensor_instruction *i) {
    if (i->ue4m3 && form->kind != DW__KIND_MXF4NVF4) return "its scale factors must be UE8M0";
    const int step = form->scales == 4 ? 4 : form->scales;
    if (i->a_scale_id % step || i->b_scale_id % step)
        return form->scales == 4 ? "its scale factor IDs must be 0"
                                 : "its scale factor IDs must be 0 or 2";
    return NULL;
}

const char *dw__tensor_instruction_decode(const dw__tensor_form *form, uint32_t descriptor,
                                          dw__tensor_instruction *out) {
    dw__tensor_instruction i = {
        .m = (int)field(descriptor, 24, 5) * 16,
        .n = (int)field(descriptor, 17, 6) * 8,
        .k = depth_of(form->kind),
        .a = format_of(form->kind, field(descriptor, 7, 3)),
        .b = format_of(form->kind, field(descriptor, 10, 3)),
        .a_negated = field(descriptor, 13, 1),
        .b_negated = field(descriptor, 14, 1),
        .a_mn_major = field(descriptor, 15, 1),
        .b_mn_major = field(descriptor, 16, 1),
        .d = DW__SUM_F32,
    };
    *out = i;
    if (field(descriptor, 2, 1)) return "sparse matrices are not supported by the emulator";
    if (i.a == DW__FORMAT_NONE || i.b == DW__FORMAT_NONE)
        return "this kind does not support the type of A or B";
    const char *why = shape_error(form, i.m, i.n);
    if (why) return why;
    if ((i.a_mn_major && dw__tensor_format_bits(i.a) < 8) ||
        (i.b_mn_major && dw__tensor_format_bits(i.b) < 8))
        return "elements of fewer than 8 bits must be contiguous along K";
    if (form->a_in_tensor) {
        if (i.a_mn_major) return "A in tensor memory cannot be transposed";
        if (form->a_shifted && i.m != 128 * form->cta_group)
            return "A can be shifted only with 128 rows in each block";
        if (form->stationary && i.m != 128)
            return "the emulator supports .ws with A in tensor memory only for M of 128";
    }
    if (is_scaled(form->kind)) {
        i.ue4m3 = !field(descriptor, 23, 1);
        i.a_scale_id = (int)field(descriptor, 29, 2), i.b_scale_id = (int)field(descriptor, 4, 2);
        *out = i;
        if (field(descriptor, 31, 1)) return "K of 96 is not supported by the emulator";
        return scales_error(form, &i);
    }
    const uint32_t sum = field(descriptor, 4, 2);
    if (sum > 2) return "the type of D is not defined";
    i.d = sum == 0 ? DW__SUM_F16 : sum == 1 ? DW__SUM_F32 : DW__SUM_S32;
    i.saturate = field(descriptor, 3, 1);
    *out = i;
    if ((i.d == DW__SUM_S32) != (form->kind == DW__KIND_I8))
        return "D of .kind::i8 must be S32, D of other kinds F16 or F32";
    if (i.d == DW__SUM_F16 &&
        (form->kind == DW__KIND_TF32 || i.a == DW__FORMAT_BF16 || i.b == DW__FORMAT_BF16))
        return "D of TF32 and BF16 must be F32";
    if (form->kind == DW__KIND_I8 ? i.a_negated || i.b_negated : i.saturate)
        return "integers cannot be negated, and real numbers cannot be saturated";
    if (field(descriptor, 30, 2)) return "shifts of B are not supported by the emulator";
    return NULL;
}

/* ---- numbers ------------------------------------------------------------------------------- */

static dw_dtype narrow_format(dw__tensor_format format) {
    switch (format) {
    case DW__FORMAT_E4M3: return DW_E4M3;
    case DW__FORMAT_E5M2: return DW_E5M2;
    case DW__FORMAT_E2M3: return DW_E2M3;
    case DW__FORMAT_E3M2: return DW_E3M2;
    default: return DW_E2M1;
    }
}

void dw__tensor_fill_table(dw__tensor_format format, double table[256]) {
    const int bits = dw__tensor_format_bits(format);
    for (uint32_t code = 0; bits <= 8 && code < 1u << bits; code++)
        table[code] = format == DW__FORMAT_U8 ? (double)code
                      : format == DW__FORMAT_S8
                          ? (double)(int8_t)code
                          : (double)dw__decode_one(narrow_format(format), code);
}

/* Decodes elements of 4 and 6 bits. */
static void decode_narrow(int bits, const double *table, int k, bool spaced,
                          const unsigned char *bytes, double *values) {
    const unsigned mask = (1u << bits) - 1;
    for (int i = 0; i < k; i++) {
        if (spaced) {
            values[i] = table[bytes[i] >> dw__tensor_spaced_shift(bits) & mask];
            continue;
        }
        /* 32 elements lie in two groups of sixteen bytes with sixteen elements each; 64 elements are packed. */
        const int first = k == 64 ? 0 : i / 16 * 16, at = (k == 64 ? i : i % 16) * bits;
        unsigned word = bytes[first + at / 8];
        if (at % 8 + bits > 8) word |= (unsigned)bytes[first + at / 8 + 1] << 8;
        values[i] = table[word >> at % 8 & mask];
    }
}

void dw__tensor_decode_row(dw__tensor_format format, const double *table, int k, bool spaced,
                           const unsigned char *bytes, double *values) {
    uint16_t half;
    uint32_t word;
    switch (format) {
    case DW__FORMAT_F16:
        for (int i = 0; i < k; i++) {
            memcpy(&half, bytes + 2 * i, 2);
            values[i] = (double)dw__f16_to_f32(half);
        }
        break;
    case DW__FORMAT_BF16:
        for (int i = 0; i < k; i++) {
            memcpy(&half, bytes + 2 * i, 2);
            values[i] = (double)dw__bf16_to_f32(half);
        }
        break;
    case DW__FORMAT_TF32: /* the 13 bits that TF32 lacks are ignored */
        for (int i = 0; i < k; i++) {
            memcpy(&word, bytes + 4 * i, 4);
            values[i] = (double)dw__f32_from_bits(word & ~(uint32_t)0x1FFF);
        }
        break;
    case DW__FORMAT_E2M3:
    case DW__FORMAT_E3M2:
    case DW__FORMAT_E2M1:
        decode_narrow(dw__tensor_format_bits(format), table, k, spaced, bytes, values);
        break;
    default:
        for (int i = 0; i < k; i++) values[i] = table[bytes[i]];
    }
}
