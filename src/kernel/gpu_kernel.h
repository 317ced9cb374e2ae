/* The contract of a GPU kernel, and what all of them share.
 *
 * Every kernel, of every origin (ours, CUTLASS's, those behind PyTorch's operators), is one entry of the registry: which
 * calls it supports and why not others, how long a call takes, how much workspace it needs, how it is prepared and
 * enqueued, and where it has been shown to be right. Explanations, the support table and the public calls read the same
 * entry.
 *
 * A family of kernels (attention, GEMM, quantization) has its variants, supports(), workspace_bytes() and enqueue() in
 * one host file. Here is what exists once: the cache of loaded variants, the first-use check, measurement, explanation.
 */
#ifndef DW_GPU_KERNEL_H
#define DW_GPU_KERNEL_H

#include "base/base.h"
#include "device/device.h"
#include "jit/jit.h"
#include "kernel/cuda/gpu_target.h"
#include "kernel/kernel.h"

/* The operation, and with it the type of a call. */
typedef enum dw__gpu_op {
    DW__GPU_ATTENTION_FORWARD,  /* dw_attention */
    DW__GPU_ATTENTION_BACKWARD, /* dw_attention */
    DW__GPU_GEMM,               /* dw_product */
    DW__GPU_GROUPED_GEMM,       /* dw_grouped_product */
    DW__GPU_QUANTIZE,           /* dw_quantize */
    DW__GPU_OPERATION           /* dw__operation_call: operations of the graph's table */
} dw__gpu_op;

/* A call of one of the graph's operations: tensors in device memory, and the stream. */
typedef struct dw__operation_call {
    dw__call call;
    void *stream;
} dw__operation_call;

typedef enum dw__gpu_proof {
    DW__MEASURED_ON_HARDWARE,
    DW__PROVEN_ON_EMULATOR, /* tested there; no hardware has run it */
    DW__PROOF_OF_PROVIDER   /* a library or PyTorch vouches for it */
} dw__gpu_proof;

typedef struct dw__gpu_kernel dw__gpu_kernel;
typedef struct dw__first_use dw__first_use;

/* ---- variants (variants.c) --------------------------------------------------------------------- */

enum { DW__ENTRY_POINTS = 3 };

/* One entry point of a variant's code and the dynamic shared memory that its launch asks for. */
typedef struct dw__entry_point {
    dw__jit_variant code;
    unsigned shared_bytes;
} dw__entry_point;

/* A kernel compiled for one set of parameters and loaded in one context. It lives until the process ends and never
 * changes once it is published. */
typedef struct dw__variant {
    struct dw__variant *next; /* in its bucket of the cache */
    const dw__gpu_kernel *kernel;
    uint64_t
        params;    /* the family's compile-time parameters, packed; equal numbers mean equal code */
    int context;   /* dw__context.index */
    bool disabled; /* the first-use check refused it on this GPU; `reason` says why */
    void *functions[DW__ENTRY_POINTS];
    char reason[1024];
} dw__variant;

/* Returns the kernel's variant in a context. The first call compiles it if need be, loads it and runs its first-use
 * check, under a lock. Later calls find it without a lock and without allocating. A failure is not kept: the next call
 * tries again. */
dw_status dw__variant_of(const dw__context *context, const dw__gpu_kernel *kernel, uint64_t params,
                         const dw__variant **variant);
/* DW_UNSUPPORTED with the reason if the first-use check refused the variant. */
static inline dw_status dw__variant_status(const dw__variant *variant) {
    return variant->disabled ? dw__fail(DW_UNSUPPORTED, "%s", variant->reason) : DW_OK;
}

/* ---- the first-use check (first_use.c) ----------------------------------------------------------- */

/* One small call with random operands. The shared frame has a stream, device memory and a copy of it on the host; the
 * family lays out the call and judges the results. */
typedef struct dw__trial {
    dw__context context;        /* a copy: a family may pretend to have fewer SMs */
    const dw__variant *variant; /* the one under test */
    int index;                  /* 0 to dw__first_use.count - 1 */
    const char *consequence;    /* ", its calls are refused": for the message of a refusal */
    char detail[64];            /* follows the kernel's name in messages, if it is needed */
    size_t bytes;               /* of device memory */
    size_t
        host_bytes; /* the leading part, which `host` mirrors; the rest is workspace, filled with 0xFF */
    char *device, *host;
    void *stream;
    void *state;      /* the family's, state_bytes of zeros before place() */
    const void *call; /* what enqueue() gets, on `stream`; set by bind() */
} dw__trial;

/* A family's part of the check. Functions that may be NULL are marked. */
struct dw__first_use {
    const char *against; /* what results are compared with: "the reference" */
    int count;           /* trials; the first refusal ends them */
    bool
        failure_refuses; /* true: a launch that fails refuses the kernel; false: the check fails, the next call
                             repeats it. Out of memory never refuses. */
    size_t state_bytes;
    /* Lays out device memory with dw__trial_place and sets host_bytes. */
    dw_status (*place)(dw__trial *t);
    /* Writes the operands into `host`, which begins as bytes of 0xFF: what no kernel writes stays a NaN. */
    dw_status (*fill)(dw__trial *t);
    /* Sets `call`; `device` and `stream` exist. */
    void (*bind)(dw__trial *t);
    /* Enqueues the reference, ahead of the kernel; may be NULL. */
    dw_status (*reference)(dw__trial *t);
    /* Whether `host` holds the right results; otherwise `text` says what differs. */
    bool (*agrees)(const dw__trial *t, char *text, size_t bytes);
    void (*release)(dw__trial *t); /* frees what `state` owns; may be NULL */
};

/* Reserves device memory, a multiple of 256 bytes from the beginning. */
size_t dw__trial_place(dw__trial *t, size_t bytes);

/* Runs the trials of the variant's kernel. Sets `disabled` and `reason` if the kernel is wrong. A failure means that
 * nothing was learnt. Runs on a stream and in memory of its own, so that it is legal while the caller captures a graph.
 */
dw_status dw__first_use_check(const dw__context *context, dw__variant *variant);
/* DEEPWELL_GUARD=off turns first-use checks off, for tools that watch one kernel. */
bool dw__first_use_is_on(void);

/* The check of every kernel with op DW__GPU_OPERATION: random operands for the kernel's own example(), and the operation's
 * definition, evaluated in FP64 by the interpreter, as the reference. Operands and results are floating-point. Each result
 * may differ by (u + tolerance_factor sqrt(n) 2^-24) times the largest magnitude of the expected result, where u is the
 * unit roundoff of the result's type if it has 16 bits, and n is the length of the last axis. */
extern const dw__first_use dw__operation_first_use;

/* ---- entries ---------------------------------------------------------------------------------------- */

struct dw__gpu_kernel {
    const char *name; /* "sm90_attention_forward"; unique */
    const char
        *backend; /* "deepwell", "cutlass", "cudnn": names it in explanations and measurements */
    dw__gpu_op op;
    dw__gpu_proof proof;
    /* A row of the support table (`deepwell explain kernels`). `shown`: where it has been shown to be right. */
    const char *operation, *source, *architectures, *elements, *needs, *shown, *use;

    /* DW_OK, or DW_UNSUPPORTED and why not. Looks at types, shapes, strides and alignment, never at data. `gpu` need
     * not be there. May be NULL where nothing asks. */
    dw_status (*supports)(const dw__gpu_kernel *kernel, const void *call,
                          const dw__gpu_target *gpu);
    /* Expected seconds and where the figure comes from; 0: not known. May be NULL. */
    double (*seconds)(const dw__gpu_kernel *kernel, const void *call, const dw__gpu_target *gpu,
                      const char **from);
    /* May be NULL for none. */
    dw_status (*workspace_bytes)(const dw__gpu_kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes);
    /* Finds, or compiles, loads and checks, the variant for a supported call; it may be disabled. NULL: PyTorch runs
     * the kernel. */
    dw_status (*prepare)(const dw__gpu_kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant);
    /* Launches on the call's stream. Allocates nothing and waits for nothing. */
    dw_status (*enqueue)(const void *call, const dw__context *context, const dw__variant *variant);
    /* The entry points of a variant; the first names it. May be NULL: a library loads its own. */
    dw_status (*entry_points)(int capability, uint64_t params,
                              dw__entry_point points[DW__ENTRY_POINTS], unsigned *count);
    const dw__first_use *first_use; /* NULL: a reference, which nothing checks */
    const char *tolerance;          /* of results, in words; docs/cuda.md */
    /* DW__GPU_OPERATION: a small call of trial `index` that the variant computes: operation, attributes, types, shapes and
     * strides, without data. */
    void (*example)(uint64_t params, int index, dw__call *call);
    double tolerance_factor; /* DW__GPU_OPERATION: as in dw__kernel */
    const void *provided;    /* the library's own description of its kernel, or NULL */
};

#endif
