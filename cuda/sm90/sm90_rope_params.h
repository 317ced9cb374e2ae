/* Rotary position embedding behind a GEMM of sm_90a (sm90_program_rope.cuh). Plain C, read by the host and by device code.
 */
#ifndef DW_SM90_ROPE_PARAMS_H
#define DW_SM90_ROPE_PARAMS_H

/* Rows of D are tokens, `tokens` of each batch; its columns are heads. Strides are in elements, [0] from batch to batch,
 * [1] from token to token; all are multiples of 8. */
typedef struct dw_sm90_rope {
    const void *cosine, *sine;
    void *y;                  /* NULL: not wanted */
    long long inverse_tokens; /* for quotient() of common/elementwise.cuh */
    int cosine_strides[2], sine_strides[2], y_strides[2];
    int y_head_stride;
    int tokens;
} dw_sm90_rope;

#endif
