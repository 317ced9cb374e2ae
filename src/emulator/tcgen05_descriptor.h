/* Decodes what a tcgen05.mma computes, from its kind and its instruction descriptor (PTX ISA, "Instruction
 * descriptor").
 */
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

/* Each operand row has 32 bytes along K. In .kind::f8f6f4 and ::mxf8f6f4, elements of 4 and 6 bits lie in groups of
 * sixteen, one group in sixteen bytes; the other kinds pack their elements. */
#define DW__TENSOR_K_BYTES 32

typedef struct dw__tensor_instruction {
    int m, n, k;
    dw__tensor_format a, b;
    bool a_mn_major, b_mn_major, a_negated, b_negated, saturate;
    enum { DW__SUM_F16, DW__SUM_F32, DW__SUM_S32 } d;
    /* Only for block-scaled kinds: */
    bool ue4m3; /* scale factors are UE4M3; false: UE8M0 */
    int a_scale_id, b_scale_id;
} dw__tensor_instruction;

/* The restrictions that the kind and its modifiers put on the descriptor. */
typedef struct dw__tensor_form {
    dw__tensor_kind kind;
    int cta_group;    /* 1 or 2 */
    int scales;       /* scale factors along the K of one instruction: 0, 1, 2 or 4 */
    bool stationary;  /* .ws */
    bool a_in_tensor; /* a is read from tensor memory */
    /* Rows of A move up by one in every 32 lanes (.ashift); only with a_in_tensor. */
    bool a_shifted;
} dw__tensor_form;

/* Returns NULL, or the reason why the form does not support this descriptor. */
const char *dw__tensor_instruction_decode(const dw__tensor_form *form, uint32_t descriptor,
                                          dw__tensor_instruction *out);
/* Returns the bits of an element: 32, 16, 8, 6 or 4. */
int dw__tensor_format_bits(dw__tensor_format format);
/* Fills the table with the value of every code of a format of 8 or fewer bits. */
void dw__tensor_fill_table(dw__tensor_format format, double table[256]);
/* Decodes the K elements in the DW__TENSOR_K_BYTES bytes of one row with the format's table. `spaced`: each element
 * of 4 or 6 bits lies in the middle of a byte of its own, as in tensor memory for the kinds that also support 8-bit
 * elements. */
void dw__tensor_decode_row(dw__tensor_format format, const double *table, int k, bool spaced,
                           const unsigned char *bytes, double *values);
/* Returns the shift of an element within a byte of its own. */
static inline int dw__tensor_spaced_shift(int bits) { return (8 - bits) / 2; }

#endif
