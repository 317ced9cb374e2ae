/* A case of the driver: one node, written as one line of text that is also its printed name.
 *
 *     attention f32[2,4,5,8] f32[2,2,7,8] f32[2,2,7,8] bool[1,1,5,7] i64[2]:seed scale=0.35 p=0.1
 *
 * The line has the operation, its operands in order, and its attributes. An operand is dtype[shape]:fill, or "-" if it
 * is absent. Without a fill, floats are normally distributed, integers are small, and bools are fair coins. A leading
 * "!" means that the node must fail at run time with DW_INVALID_ARGUMENT. */
#ifndef DW_OPS_CASE_H
#define DW_OPS_CASE_H

#include "base/base.h"
#include "deepwell/graph.h"
#include "kernel/kernel.h"

enum { OPS_MAX_INPUTS = 12, OPS_MAX_ATTRS = 12, OPS_TEXT_BYTES = 320, OPS_STRING_BYTES = 160 };

typedef enum ops_fill {
    OPS_FILL_DEFAULT,
    OPS_FILL_POSITIVE, /* |normal| + 0.1 */
    OPS_FILL_UNIT,     /* uniform in (-1, 1), away from the ends */
    OPS_FILL_MASK,     /* 0, or -infinity with probability 1/4 */
    OPS_FILL_MASKED,   /* -infinity everywhere; false for bool */
    OPS_FILL_INDEX,    /* index<N>: integers in [0, N) */
    OPS_FILL_TARGET,   /* target<N>: like index, but ignore_index with probability 1/4 */
    OPS_FILL_IGNORED,  /* ignore_index everywhere */
    OPS_FILL_OUTSIDE,  /* outside<N>: like index, but the last one is N */
    OPS_FILL_NONZERO,  /* small integers other than 0 */
    OPS_FILL_COUNT,    /* integers from 1 to 9 */
    OPS_FILL_OFFSETS,  /* offsets<N>: integers that ascend from 0 to N, some equal */
    OPS_FILL_PLACES,   /* a permutation of the integers from 0 on */
    OPS_FILL_SEED
} ops_fill;

typedef struct ops_operand {
    bool absent;
    dw_dtype dtype;
    int rank;
    int64_t shape[DW_MAX_RANK];
    ops_fill fill;
    int64_t bound; /* the N of the fill */
} ops_operand;

/* A case must be passed by pointer and never copied, because its attributes point into it. */
typedef struct ops_case {
    char text[OPS_TEXT_BYTES];
    bool must_fail;
    dw_op op;
    uint32_t input_count;
    ops_operand inputs[OPS_MAX_INPUTS];
    uint32_t attr_count;
    dw_attr attrs[OPS_MAX_ATTRS];
    int64_t lists[OPS_MAX_ATTRS][DW_MAX_RANK];
    char strings[OPS_MAX_ATTRS][OPS_STRING_BYTES];
} ops_case;

/* DW_PARSE names the word that could not be parsed. */
dw_status ops_case_parse(const char *text, ops_case *out);

/* Makes a graph with only this node; its operands are the leaves and its results the outputs. */
dw_status ops_case_graph(const ops_case *c, dw_graph **graph);
/* Returns the number of terms that are summed for one element of a result; rounding errors add up over them. */
double ops_case_length(const ops_case *c);

/* ---- the table ------------------------------------------------------------------------------- */

/* Calls `visit` with the text of every case: the rows of the table with their placeholders filled
 * in (F: each floating-point type, I: each integer type, $: each of a list of awkward shapes).
 * Stops at the first status that is not DW_OK. */
typedef dw_status (*ops_visit)(void *context, const char *text, dw_dtype placeholder);
dw_status ops_each_case(ops_visit visit, void *context);
/* Calls `visit` with the text of each F32 case that is large enough to time. */
dw_status ops_each_perf_case(ops_visit visit, void *context);

#endif
