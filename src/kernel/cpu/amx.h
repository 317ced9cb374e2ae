/* F32 and BF16 GEMMs on AMX: the inner loops (isa/amx_loops.c) for the strategy in matmul_amx.c.
 *
 * AMX multiplies BF16 and accumulates F32. An F32 number equals, except for its last bit or two, the sum of
 * three BF16 numbers x = x0 + x1 + x2, where each rounds the rest that the previous ones leave; so
 *
 *     a*b = a0*b0 + (a0*b1 + a1*b0) + (a0*b2 + a1*b1 + a2*b0) + terms below 2^-25 |a*b|
 *
 * Six BF16 GEMMs therefore replace one F32 GEMM, as accurately as F32 rounds it (Henry, Tang and Heinecke
 * 2019, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations"). On a
 * core whose BF16 rate is about fourteen times its F32 rate this is twice as fast. pack() reports numbers
 * that the split cannot represent (NaN, infinities, magnitudes from 2^127), and the caller then uses the F32
 * loops. Below 2^-110 the lower parts flush to zero; the lost digits are below 2^-126 in absolute terms.
 *
 * A panel is 32 rows of A, or 32 columns of B, over one block of K, in steps of 32:
 *
 *     step | part 0: tile, tile | part 1: tile, tile | part 2: tile, tile | next step
 *
 * A BF16 operand has only part 0. A tile has 16 x 64 bytes: for A, row i holds a(i, k..k+31); for B, row p
 * holds the pairs b(k+2p, j), b(k+2p+1, j) for 16 columns j (Intel SDM, TDPBF16PS). Missing rows, columns and
 * values of k are 0. */
#ifndef DW_AMX_H
#define DW_AMX_H

#include "kernel/cpu/cpu.h"

enum {
    DW_AMX_PANEL = 32, /* rows or columns of a panel */
    DW_AMX_STEP = 32,  /* values of k in a step */
    DW_AMX_PARTS = 3,
    DW_AMX_STEP_BYTES = 6144, /* one step of a panel; a third of it for BF16 */
};

/* True if this CPU and the Linux kernel support AMX. The first call requests permission from the Linux kernel. */
bool dw__amx_available(void);
/* Call these before and after a thread's multiplications. */
void dw__amx_begin(void);
void dw__amx_end(void);
/* Packs `count` <= 32 rows of A (as_a) or columns of B for k in [0, k). Element (i, k) is x[i*stride +
 * k*k_stride]; one of the two strides is 1. Returns true if every number could be split. */
bool dw__amx_pack(bool as_a, int64_t count, int64_t k, const float *x, int64_t stride,
                  int64_t k_stride, void *panel);
/* The same for any number of rows or columns: panel i of 32 begins at panels + i * panel_bytes. Reads memory
 * along its rows as far as possible. */
bool dw__amx_pack_panels(bool as_a, int64_t extent, int64_t k, const float *x, int64_t stride,
                         int64_t k_stride, void *panels, size_t panel_bytes);
/* The same for a BF16 operand, which has a single part. */
void dw__amx_pack_bf16_panels(bool as_a, int64_t extent, int64_t k, const uint16_t *x,
                              int64_t stride, int64_t k_stride, void *panels, size_t panel_bytes);
/* tile[32][32] (row stride in elements) = panel of A times panel of B over `steps` steps. */
void dw__amx_multiply(int64_t steps, const void *a, const void *b, float *tile, int64_t stride);
void dw__amx_multiply_bf16(int64_t steps, const void *a, const void *b, float *tile,
                           int64_t stride);
/* Writes tile[32][32] to c[rows][columns] (row stride c_stride): adds it to c, or replaces c by it plus
 * `bias` [columns] (NULL for none). */
void dw__amx_put(const float *tile, int64_t rows, int64_t columns, float *c, int64_t c_stride,
                 bool add, const float *bias);
static inline int64_t dw__amx_steps(int64_t k) { return (k + DW_AMX_STEP - 1) / DW_AMX_STEP; }
/* Bytes of one panel for k in [0, k). */
static inline size_t dw__amx_panel_bytes(int64_t k) {
    return (size_t)dw__amx_steps(k) * DW_AMX_STEP_BYTES;
}
static inline size_t dw__amx_panel_bytes_bf16(int64_t k) {
    return dw__amx_panel_bytes(k) / DW_AMX_PARTS;
}

#endif
