/* How several GEMMs share a launch. Plain C, read by the host and by device code. */
#ifndef DW_GEMM_GROUPS_H
#define DW_GEMM_GROUPS_H

/* GROUPS.
 * Batch: A, B and D are tensors of as many matrices as there are groups. One group is a single GEMM.
 * Rows: the rows offsets[g] to offsets[g + 1] of A, times matrix g of B, give the same rows of D.
 * Contraction: D's matrix g is the sum over the same rows of A (stored as k x m) and B (k x n). */
#define DW_GROUPS_BATCH 0
#define DW_GROUPS_ROWS 1
#define DW_GROUPS_CONTRACTION 2

#endif
