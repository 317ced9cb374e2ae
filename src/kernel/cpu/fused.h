/* Inner loops of elementwise programs: fused.c calls them, isa/fused_loops.c defines them.
 *
 * A loop computes one instruction over up to a chunk of elements. Inside a program every value has one of
 * five kinds. BF16 and F16 are held as F32 and rounded to their dtype after each instruction (fused.c calls
 * the cast for that). */
#ifndef DW_CPU_FUSED_H
#define DW_CPU_FUSED_H

#include "kernel/kernel.h"

typedef enum dw__lane_kind {
    DW_LANE_BOOL, /* uint8_t, 0 or 1 */
    DW_LANE_I32,
    DW_LANE_I64,
    DW_LANE_F32,
    DW_LANE_F64,
    DW_LANE_KINDS
} dw__lane_kind;

/* Rows of the loop table: the operations, and variants with a loop of their own. */
enum {
    DW_LANE_GELU_TANH = DW_OP_COUNT,
    DW_LANE_GELU_TANH_BACKWARD,
    DW_LANE_SQUARE, /* x^2 and x^3, which models write as pow */
    DW_LANE_CUBE,
    DW_LANE_OPS
};

enum {
    DW_LANE_OPERANDS = 3,
    DW_LANE_SPLAT_BYTES = 64 /* one value repeated to the widest vector */
};

typedef struct dw__lane_args {
    int64_t count;
    void *out;
    const void *in[DW_LANE_OPERANDS];
    /* 1: `count` contiguous elements. 0: DW_LANE_SPLAT_BYTES filled with one value. */
    int64_t step[DW_LANE_OPERANDS];
} dw__lane_args;

typedef void (*dw__lane_loop)(const dw__lane_args *args);

typedef struct dw__lane_dropout {
    int64_t seed[2], stream;
    uint64_t first; /* position of the chunk's first element in the iteration shape */
    double p;
} dw__lane_dropout;

typedef struct dw__fused_loops {
    /* Indexed by the kind of the operands (for select: of the second). NULL: no loop; fused.c then computes
     * element by element with dw__scalar_apply. */
    dw__lane_loop apply[DW_LANE_KINDS][DW_LANE_OPS];
    /* From a kind to a dtype. For BF16 and F16 the result is rounded to the dtype but held as F32. */
    dw__lane_loop cast[DW_LANE_KINDS][DW_DTYPE_COUNT];
    dw__lane_loop copy[DW_LANE_KINDS];
    /* Between memory and a chunk of F32. */
    dw__lane_loop load_bf16, load_f16, store_bf16, store_f16;
    /* in[0] is F32; up to DW_LANE_CHUNK elements. */
    void (*dropout)(const dw__lane_args *args, const dw__lane_dropout *dropout);
} dw__fused_loops;

enum { DW_LANE_CHUNK = 1024 };

#endif
