/* An elementwise program whose results become codes of fp8-block: the parameters of its kernel (program_codes.cuh). Plain C,
 * read by the host and by device code alike. */
#ifndef DW_PROGRAM_CODES_PARAMS_H
#define DW_PROGRAM_CODES_PARAMS_H

#include "fp8_block_codes_params.h"

#define DW_PROGRAM_CODES_MOST_OPERANDS 4
#define DW_PROGRAM_CODES_MOST_RESULTS 4
/* Shared memory of a block: the room of a tile's codes, and for each operand 16 bytes of each thread for each row that
 * is staged. Two blocks share an SM's 228 KiB, of which each takes one KiB by itself. */
#define DW_PROGRAM_CODES_ROOM 20992
#define DW_PROGRAM_CODES_ROW_BYTES (DW_FP8_BLOCK_THREADS * 16)
#define DW_PROGRAM_CODES_FIT(operands)                                                             \
    ((113 * 1024 - DW_PROGRAM_CODES_ROOM) / (DW_PROGRAM_CODES_ROW_BYTES * (operands)))
/* Rows of a thread, of 8, whose operands are loaded ahead. */
#define DW_PROGRAM_CODES_STAGED(operands)                                                          \
    (DW_PROGRAM_CODES_FIT(operands) < 8 ? DW_PROGRAM_CODES_FIT(operands) : 8)
#define DW_PROGRAM_CODES_SHARED_BYTES(operands)                                                    \
    (DW_PROGRAM_CODES_ROOM +                                                                       \
     DW_PROGRAM_CODES_ROW_BYTES * DW_PROGRAM_CODES_STAGED(operands) * (operands))

/* Elements of 16 bits in rows that begin at multiples of 16 bytes. */
typedef struct dw_program_matrix {
    void *data;
    long long row_stride;
} dw_program_matrix;

typedef struct dw_program_codes_params {
    dw_program_matrix operands[DW_PROGRAM_CODES_MOST_OPERANDS];
    /* data NULL: not stored. Those that become codes come first. */
    dw_program_matrix results[DW_PROGRAM_CODES_MOST_RESULTS];
    /* Codes of a result; x and strides are unused, and the sizes are those of every operand and result. */
    dw_fp8_block_codes_params codes[DW_PROGRAM_CODES_MOST_RESULTS];
} dw_program_codes_params;

#endif
