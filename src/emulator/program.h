/* Kernels in the form that the emulator runs: one operation for each PTX instruction, whose operands are places in a
 * warp's register file. The bargain: constants, special registers that never change and addresses of variables are
 * registers too, filled in when a warp starts. They take memory in each warp, and no operation has to distinguish
 * kinds of operands.
 */
#ifndef DW_EMULATOR_PROGRAM_H
#define DW_EMULATOR_PROGRAM_H

#include "emulator/ptx.h"

typedef struct dw__emu_warp dw__emu_warp;
typedef struct dw__emu_op dw__emu_op;

typedef enum dw__emu_next {
    DW__NEXT,     /* the next operation */
    DW__JUMPED,   /* the operation has set pc */
    DW__GAVE_WAY, /* the next operation, in another turn */
    DW__AGAIN,    /* not complete: run it again in another turn */
    DW__APART,    /* needs lanes that are elsewhere: run it again when they have arrived */
    DW__ENDED,    /* no lane of the group is left */
    DW__FAULT,    /* a finding was reported; the grid ends */
} dw__emu_next;

struct dw__emu_op {
    /* `mask`: the lanes of the group whose guard is true; never 0. */
    dw__emu_next (*run)(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask);
    uint32_t d, a, b, c; /* byte offsets into the register file */
    uint32_t guard;      /* byte offset of a predicate, or DW__PTX_NO_GUARD */
    bool guard_negated;
    bool aligned; /* every lane of the warp must arrive */
    /* May read registers that asynchronous work fills, so they are not checked. */
    bool reads_pending;
    int64_t immediate;
    const void *detail; /* further operands, in the kernel's arena */
};

/* The initial value of a place when a warp starts. */
typedef enum dw__emu_source {
    DW__SOURCE_BITS,    /* `bits` in every lane */
    DW__SOURCE_SHARED,  /* address `bits` in this block's shared memory */
    DW__SOURCE_SPECIAL, /* special register `special`, component `axis` */
} dw__emu_source;
typedef enum dw__emu_special {
    DW__SPECIAL_TID,
    DW__SPECIAL_NTID,
    DW__SPECIAL_CTAID,
    DW__SPECIAL_NCTAID,
    DW__SPECIAL_LANEID,
    DW__SPECIAL_WARPID,
    DW__SPECIAL_NWARPID,
    DW__SPECIAL_SMID,
    DW__SPECIAL_NSMID,
    DW__SPECIAL_GRIDID,
    DW__SPECIAL_CLUSTERID,
    DW__SPECIAL_NCLUSTERID,
    DW__SPECIAL_CLUSTER_CTAID,
    DW__SPECIAL_CLUSTER_NCTAID,
    DW__SPECIAL_CLUSTER_CTARANK,
    DW__SPECIAL_CLUSTER_NCTARANK,
    DW__SPECIAL_IS_EXPLICIT_CLUSTER,
    DW__SPECIAL_LANEMASK_EQ,
    DW__SPECIAL_LANEMASK_LE,
    DW__SPECIAL_LANEMASK_LT,
    DW__SPECIAL_LANEMASK_GE,
    DW__SPECIAL_LANEMASK_GT,
    DW__SPECIAL_DYNAMIC_SMEM_SIZE,
    DW__SPECIAL_TOTAL_SMEM_SIZE,
    /* The address of a cooperative grid's workspace: axis 0 is its upper half, axis 1 its lower half. */
    DW__SPECIAL_WORKSPACE,
    DW__SPECIAL_COUNT,
} dw__emu_special;
typedef struct dw__emu_preset {
    dw__emu_source source;
    uint32_t place, bytes; /* 4 or 8 for each lane; 0: a predicate */
    uint64_t bits;
    dw__emu_special special;
    int axis;
} dw__emu_preset;

typedef struct dw__emu_kernel {
    const char *name;
    const char *unsupported; /* the reason why it cannot be launched; NULL: it can */
    dw__emu_op *code;
    uint32_t code_count;
    const dw__ptx_function *function; /* lines, register names */
    const dw__ptx_module *module;
    /* For each operation, the instruction of the function that it comes from. */
    const uint32_t *from;
    const uint32_t *first_read,
        /* The register places that instruction i reads: reads[first_read[i]] to reads[first_read[i + 1]], without
         * predicates. */
        *reads;
    /* The dw__emu_use of each instruction; NULL: there is no local memory. */
    const uint8_t *load_uses;
    dw__emu_preset *presets;
    uint32_t preset_count;
    bool tensor_fences; /* the kernel contains a tcgen05.fence */
    uint32_t register_bytes, local_bytes;
    uint32_t shared_bytes;  /* static variables and the system's KiB */
    uint32_t dynamic_first; /* offset of the launch's dynamic shared memory */
    const struct dw__emu_shared_variable {
        const char *name;
        uint32_t first, bytes;
    } * shared_variables; /* static variables */
    uint32_t shared_variable_count;
    uint32_t parameter_bytes;
    const uint32_t *parameter_places, *parameter_sizes; /* of each parameter */
    uint32_t parameter_count;
} dw__emu_kernel;

typedef struct dw__emu_program {
    dw__ptx_module *module;
    dw__arena *arena;
    int architecture; /* 90, 100, 103, 120 */
    dw__emu_kernel *kernels;
    uint32_t kernel_count;
    struct dw__emu_symbol {
        const dw__ptx_variable *variable;
        void *address; /* of .global and .const variables */
    } * symbols;
    uint32_t symbol_count;
} dw__emu_program;

/* Allocates global and constant variables in `memory` and translates every kernel. An unsupported kernel does not
 * fail the call: its `unsupported` says "kernel NAME, PTX line 12: ... is not supported: the line". */
typedef struct dw__emu_memory dw__emu_memory;
dw_status dw__emu_translate(dw__ptx_module *module, int architecture, dw__emu_memory *memory,
                            dw__emu_program **program);
/* Destroys the program and its module. */
void dw__emu_program_destroy(dw__emu_program *program, dw__emu_memory *memory);

#endif
