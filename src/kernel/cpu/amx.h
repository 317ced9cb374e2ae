/* F32 and BF16 products on AMX: the inner loops (isa/amx_loops.c) for the strategy in product_amx.c.
 *
 * AMX multiplies BF16 and accumulates F32. An F32 number is, but for its last bit or two, the sum of
 * three BF16 numbers, x = x0 + x1 + x2, each the rounding of what the ones before leave; so
 *
 *     a*b = a0*b0 + (a0*b1 + a1*b0) + (a0*b2 + a1*b1 + a2*b0) + terms below 2^-25 |a*b|
 *
 * and six BF16 products stand for one F32 product, as exactly as F32 rounds it (Henry, Tang and Heinecke
 * 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations").
 * A core whose BF16 rate is some fourteen times its F32 rate gains twofold. What the split cannot carry (NaN,
 * infinities, magnitudes from 2^127) pack() reports, and the caller multiplies in F32 instead; below
 * 2^-110 the lower parts flush to zero, which costs digits that are 2^-126 in absolute terms.
 *
 * A panel is 32 rows of A, or 32 columns of B, over one block of K, cut into steps of 32:
 *
 *     step | part 0: tile, tile | part 1: tile, tile | part 2: tile, tile | next step
 *
 * (of an operand in BF16, part 0 alone), a tile being 16 x 64 bytes: of A, row i holds a(i, k..k+31);
 * of B, row p holds the pairs b(k+2p, j), b(k+2p+1, j) for 16 columns j (Intel SDM, TDPBF16PS).
 * Missing rows, columns and k's are 0.
 */
#ifndef DW_AMX_H
#define DW_AMX_H

#include "kernel/cpu/cpu.h"

enum {
    DW_AMX_PANEL = 32, /* rows or columns of a panel */
    DW_AMX_STEP = 32,  /* k's of a step */
    DW_AMX_PARTS = 3,
    DW_AMX_STEP_BYTES = 6144, /* of a panel, one step; a third of it in BF16 */
};

/* True when this CPU and this kernel can; asks the kernel for permission once. */
bool dw__amx_available(void);
/* Around a thread's multiplications. */
void dw__amx_begin(void);
void dw__amx_end(void);
/* Packs `count` <= 32 rows of A (as_a) or columns of B over k's [0, k). Element (i, k) is
 * x[i*stride + k*k_stride], and one of the two strides is 1. True when every number could be split. */
bool dw__amx_pack(bool as_a, int64_t count, int64_t k, const float *x, int64_t stride,
                  int64_t k_stride, void *panel);
/* The same for any number of rows or columns: panel i of 32 begins at panels + i * panel_bytes. Walks memory
 * along its rows as far as it can. */
bool dw__amx_pack_panels(bool as_a, int64_t extent, int64_t k, const float *x, int64_t stride,
                         int64_t k_stride, void *panels, size_t panel_bytes);
/* The same for an operand in BF16, of which there is one part. */
void dw__amx_pack_bf16_panels(bool as_a, int64_t extent, int64_t k, const uint16_t *x,
                              int64_t stride, int64_t k_stride, void *panels, size_t panel_bytes);
/* tile[32][32] (row stride in elements) = panel of A times panel of B over `steps` steps. */
void dw__amx_multiply(int64_t steps, const void *a, const void *b, float *tile, int64_t stride);
void dw__amx_multiply_bf16(int64_t steps, const void *a, const void *b, float *tile,
                           int64_t stride);
/* c[rows][columns] (row stride c_stride) gets the product tile[32][32]: added to it, or in its place with
 * `bias` [columns] (or NULL) added. */
void dw__amx_put(const float *tile, int64_t rows, int64_t columns, float *c, int64_t c_stride,
                 bool add, const float *bias);
static inline int64_t dw__amx_steps(int64_t k) { return (k + DW_AMX_STEP - 1) / DW_AMX_STEP; }
/* Bytes of one panel over k's [0, k). */
static inline size_t dw__amx_panel_bytes(int64_t k) {
    return (size_t)dw__amx_steps(k) * DW_AMX_STEP_BYTES;
}
static inline size_t dw__amx_panel_bytes_bf16(int64_t k) {
    return dw__amx_panel_bytes(k) / DW_AMX_PARTS;
}

#endif
