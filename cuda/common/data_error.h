/* Errors that only data can show: an index outside of its axis, an integer divided by zero. A kernel writes one word in
 * device memory, and the caller reads it when it waits for the work. Plain C, read by the host and by device code. */
#ifndef DW_DATA_ERROR_H
#define DW_DATA_ERROR_H

/* The word: 0, or the kind of the first error in the low byte and the caller's mark above it. */
#define DW_DATA_INDEX 1    /* an index outside of its axis */
#define DW_DATA_DIVISION 2 /* integer division by zero */
#define DW_DATA_POWER 3    /* an integer to a negative power */

typedef struct dw_data_error {
    unsigned *word; /* NULL: errors are not reported */
    unsigned mark;  /* which call it is: below 2^24 */
} dw_data_error;

#ifdef __CUDACC__
static __device__ __forceinline__ void report(dw_data_error error, unsigned kind) {
    if (error.word) atomicCAS(error.word, 0u, kind | error.mark << 8);
}
#endif
#endif
