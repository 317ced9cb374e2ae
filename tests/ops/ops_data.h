/* Operands for cases: random data in chosen memory layouts, and guarded blocks that detect overruns. */
#ifndef DW_OPS_DATA_H
#define DW_OPS_DATA_H

#include "ops_case.h"

/* ---- random numbers (not Philox: the driver must not share code with the library under test) -- */

typedef struct ops_random {
    uint64_t state;
} ops_random;
/* Returns a separate random stream for each pair of seed and text. */
ops_random ops_random_start(uint64_t seed, const char *text);
uint64_t ops_random_bits(ops_random *random);
double ops_random_uniform(ops_random *random); /* [0, 1) */
double ops_random_normal(ops_random *random);

/* ---- guarded blocks -------------------------------------------------------------------------- */

/* A block of `bytes` bytes between two guard zones of a known pattern. The block is filled with a pattern that is NaN
 * in every floating-point type. */
typedef struct ops_block {
    unsigned char *base;
    void *data;
    size_t bytes;
} ops_block;
dw_status ops_block_create(size_t bytes, ops_block *block);
void ops_block_destroy(ops_block *block);
/* Returns NULL, or which guard zone was overwritten: "before" or "after". */
const char *ops_block_damage(const ops_block *block);

/* ---- operands -------------------------------------------------------------------------------- */

typedef enum ops_layout {
    OPS_CONTIGUOUS,
    OPS_PERMUTED,  /* the last two axes swapped in memory */
    OPS_PADDED,    /* gaps between rows; a vector has stride 2 */
    OPS_BROADCAST, /* the first axis with stride 0 */
    OPS_LAYOUT_COUNT
} ops_layout;
const char *ops_layout_name(ops_layout layout);

typedef enum ops_data {
    OPS_NORMAL, /* mean 0, variance 1 */
    OPS_LARGE,  /* times 1000 */
    OPS_TINY,   /* times 1e-20 */
    OPS_MIXED,  /* times a power of two from 2^-12 to 2^12, element by element */
    OPS_DATA_COUNT
} ops_data;
const char *ops_data_name(ops_data data);

/* The operands of one case. tensors[i].rank is -1 if operand i is absent. */
typedef struct ops_operands {
    uint32_t count;
    dw__tensor tensors[OPS_MAX_INPUTS];
    ops_block blocks[OPS_MAX_INPUTS];
} ops_operands;

/* Allocates and fills the operands. Operands that depend on others (the lse of a backward, for example) are computed
 * from them with the interpreter. On failure nothing stays allocated. */
dw_status ops_operands_create(const ops_case *c, ops_layout layout, ops_data data, uint64_t seed,
                              ops_operands *out);
void ops_operands_destroy(ops_operands *operands);
/* Makes contiguous copies. Floats become F64 and are multiplied by 1 + `relative` * (a random number in [-1, 1]). */
dw_status ops_operands_perturbed(const ops_operands *from, double relative, uint64_t seed,
                                 ops_operands *out);
/* Returns the operands that are present, in order: the leaves of the case's graph. */
uint32_t ops_operands_leaves(const ops_operands *operands, dw__tensor *leaves);

/* Returns the element at row-major position `index`; a bool or integer becomes a number. */
double ops_element(const dw__tensor *tensor, int64_t index);

#endif
