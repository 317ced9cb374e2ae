/* What a tcgen05.mma computes: its kind, and what the instruction descriptor (PTX ISA 9.7.16.4.2) adds to it. */
#ifndef DW_EMULATOR_TCGEN05_DESCRIPTOR_H
#define DW_EMULATOR_TCGEN05_DESCRIPTOR_H

#include <stdbool.h>
#include <stdint.h>

typedef enum dw__tensor_kind {
    DW__KIND_F16,
    DW__KIND_TF32,
    DW__KIND_F8F6F4,
    DW__KIND_I8,
    DW__KIND_MXF8F6F4,
    DW__KIND_MXF4,
    DW__KIND_MXF4NVF4,
} dw__tensor_kind;

typedef enum dw__tensor_format {
    DW__FORMAT_F16,
    DW__FORMAT_BF16,
    DW__FORMAT_TF32,
    DW__FORMAT_U8,
    DW__FORMAT_S8,
    DW__FORMAT_E4M3,
    DW__FORMAT_E5M2,
    DW__FORMAT_E2M3,
    DW__FORMAT_E3M2,
    DW__FORMAT_E2M1,
    DW__FORMAT_NONE,
} dw__tensor_format;

/* Every operand has 32 bytes of K in each row. Elements of 4 and 6 bits of .kind::f8f6f4 and ::mxf8f6f4 lie by
 * sixteen in sixteen bytes, those of the other kinds are packed. */
#define DW__TENSOR_K_BYTES 32

typedef struct dw__tensor_instruction {
    int m, n, k;
    dw__tensor_format a, b;
    bool a_mn_major, b_mn_major, a_negated, b_negated, saturate;
    enum { DW__SUM_F16, DW__SUM_F32, DW__SUM_S32 } d;
    /* Of block-scaled kinds: */
    bool ue4m3; /* scale factors, else UE8M0 */
    int a_scale_id, b_scale_id;
} dw__tensor_instruction;

/* How the kind and its modifiers restrict what the descriptor says. */
typedef struct dw__tensor_form {
    dw__tensor_kind kind;
    int cta_group;    /* 1 or 2 */
    int scales;       /* scale factors for the K of one instruction: 0, 1, 2, 4 */
    bool stationary;  /* .ws */
    bool a_in_tensor; /* A is read from tensor memory, */
    bool a_shifted;   /* whose rows then move up by one in every 32 lanes (.ashift) */
} dw__tensor_form;

/* NULL, or why the form does not take this descriptor. */
const char *dw__tensor_instruction_decode(const dw__tensor_form *form, uint32_t descriptor,
                                          dw__tensor_instruction *out);
/* Of an element: 32, 16, 8, 6, 4. */
int dw__tensor_format_bits(dw__tensor_format format);
/* What every code of a format of 8 bits and fewer stands for. */
void dw__tensor_fill_table(dw__tensor_format format, double table[256]);
/* Values of the K elements of one row's DW__TENSOR_K_BYTES bytes, by the format's table. `spaced`: elements of 4 and 6
 * bits have a byte each, in the middle of which they lie, as tensor memory has them for other kinds than those of 4
 * bits alone. */
void dw__tensor_decode_row(dw__tensor_format format, const double *table, int k, bool spaced,
                           const unsigned char *bytes, double *values);
/* How far to the left an element lies in a byte of its own. */
static inline int dw__tensor_spaced_shift(int bits) { return (8 - bits) / 2; }

#endif
