/* Launch parameters of the rope kernel (rope.cu). Plain C, read by the host and by device code. */
#ifndef DW_ROPE_PARAMS_H
#define DW_ROPE_PARAMS_H

enum { DW_ROPE_RANK = 7 }; /* axes outside of the rows */

enum { DW_ROPE_X, DW_ROPE_COS, DW_ROPE_SIN, DW_ROPE_Y, DW_ROPE_TENSORS };

enum { DW_ROPE_HEADS = 4 }; /* of a thread, at most */

/* `rows` rows of `columns` elements, of which the first `turned` (even) are rotated, for each of `heads`, which have the
 * same cosines and sines. Strides are in elements. */
typedef struct dw_rope_params {
    void *data[DW_ROPE_TENSORS];
    long long stride[DW_ROPE_TENSORS][DW_ROPE_RANK]; /* along the outer axes */
    long long step[DW_ROPE_TENSORS]; /* from element to element; 1 if VECTOR is above 1 */
    unsigned shape[DW_ROPE_RANK];
    unsigned rows, heads;
    long long head_stride[DW_ROPE_TENSORS]; /* of x and y */
    int rank;                               /* of the rows' axes */
    int columns, turned;
    int transposed; /* rotates back: the gradient */
} dw_rope_params;

#endif
