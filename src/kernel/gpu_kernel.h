/* The machinery that GPU kernels share, each part of which exists once: the cache of loaded variants, the first-use
 * check, measurement, choice and explanation. A family of kernels (attention, GEMM, quantization) has its variants,
 * supports(), workspace_bytes() and enqueue() in one host file. kernel.h describes the entries. */
#ifndef DW_GPU_KERNEL_H
#define DW_GPU_KERNEL_H

#include "base/base.h"
#include "device/device_table.h"
#include "jit/jit_internal.h"
#include "kernel/cuda/gpu_target.h"
#include "kernel/kernel.h"
#include <string.h>

/* ---- variants (variants.c) --------------------------------------------------------------------- */

enum { DW__ENTRY_POINTS = 4 };

/* One entry point of a variant's code and the dynamic shared memory that its launch asks for. */
struct dw__entry_point {
    dw__jit_variant code;
    unsigned shared_bytes;
};

/* A kernel compiled for one set of parameters and loaded in one context. It lives until the process ends and never
 * changes once it is published. */
struct dw__variant {
    struct dw__variant *next; /* in its bucket of the cache */
    const dw__kernel *kernel;
    uint64_t params; /* the compile-time parameters, packed; equal numbers mean equal code */
    int context;     /* dw__context.index */
    bool disabled;   /* the first-use check refused it on this GPU; `reason` says why */
    void *functions[DW__ENTRY_POINTS];
    char reason[1024];
};

/* Returns the kernel's variant in a context. The first call compiles it if necessary, loads it and runs its first-use
 * check, under a lock. Later calls find it without a lock and without allocating. A failure is not recorded, so the
 * next call tries again. */
dw_status dw__variant_of(const dw__context *context, const dw__kernel *kernel, uint64_t params,
                         const dw__variant **variant);
/* DW_UNSUPPORTED with the reason if the first-use check refused the variant. */
static inline dw_status dw__variant_status(const dw__variant *variant) {
    return variant->disabled ? dw__fail(DW_UNSUPPORTED, "%s", variant->reason) : DW_OK;
}

/* The hash of a key of whole 64-bit words, none of which is padding, for tables of calls. */
static inline uint64_t dw__key_hash(const void *key, size_t bytes) {
    const char *at = key;
    uint64_t hash = 0, word;
    for (size_t i = 0; i < bytes / sizeof word; i++) {
        memcpy(&word, at + i * sizeof word, sizeof word);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

/* ---- the first-use check (first_use.c) ----------------------------------------------------------- */

/* A part of a trial's memory: on the host, and with a copy on the device if it is more than the host's scratch. It
 * starts as bytes of 0xFF, so that elements that no kernel writes are NaNs. */
typedef struct dw__trial_part {
    struct dw__trial_part *next; /* of the same trial */
    size_t bytes, padded;        /* padded: up to the next multiple of 256 */
    void *host, *device;
} dw__trial_part;

/* One small call with random operands. The family lays out the call and checks the results. The common code copies all
 * parts to the device, runs the kernel, and copies them back. */
typedef struct dw__trial {
    dw__context context;        /* a copy, so that a family can pretend to have fewer SMs */
    const dw__variant *variant; /* the one under test */
    int index;                  /* 0 to dw__first_use.count - 1 */
    const char *consequence;    /* ", its calls are refused": completes the message of a refusal */
    char detail[64];            /* follows the kernel's name in messages, if it is needed */
    void *stream;
    dw__trial_part *parts;
    void *state;      /* the family's data, state_bytes of zeros before prepare() */
    const void *call; /* the argument of enqueue(), on `stream`; set by prepare() */
} dw__trial;

/* A family's part of the check. */
struct dw__first_use {
    const char *against; /* names the expected results in messages: "the reference" */
    int count;           /* number of trials; the first refusal ends them */
    /* True: a failed launch refuses the kernel. False: the check itself fails, and the next call repeats it. Lack of
     * memory never refuses a kernel. */
    bool failure_refuses;
    size_t state_bytes;
    /* Adds the parts of the call with dw__trial_add, writes the operands into the host's memory, and sets `call`. */
    dw_status (*prepare)(dw__trial *t);
    /* Enqueues the reference before the kernel; may be NULL. */
    dw_status (*reference)(dw__trial *t);
    /* Returns whether the host's memory holds the right results; otherwise `text` receives the difference. */
    bool (*agrees)(const dw__trial *t, char *text, size_t bytes);
};

/* Adds memory that lives until the trial ends: on the host and on the device, or scratch on the host alone. */
dw_status dw__trial_add(dw__trial *t, size_t bytes, dw__trial_part **part);
dw_status dw__trial_scratch(dw__trial *t, size_t bytes, dw__trial_part **part);
/* Reads element `at` of numbers in memory: DW_F32, DW_F16 or DW_BF16. */
float dw__trial_get(const void *numbers, dw_dtype type, size_t at);
void dw__trial_set(void *numbers, dw_dtype type, size_t at, float value);
/* Returns nearly normal numbers of variance 1: the sum of four uniform numbers. */
float dw__trial_normal(uint64_t seed, uint32_t stream, size_t at);

/* Runs the trials of the variant's kernel. Sets `disabled` and `reason` if the kernel is wrong. A failure means that
 * the check could not run. It uses its own stream and memory, so it may run while the caller captures a graph. */
dw_status dw__first_use_check(const dw__context *context, dw__variant *variant);
/* DEEPWELL_FIRST_USE_CHECK=off turns first-use checks off, for tools that watch one kernel. */
bool dw__first_use_is_on(void);

/* The check of every kernel with op DW__CALL_OPERATION: random operands for the kernel's own example(), and the
 * operation's definition, evaluated in FP64 by the interpreter, as the reference. Integer operands are from 0 to 2,
 * codes below 64 (E8M0: from 1/8 to 16).
 * Each result may differ by (u + tolerance_factor sqrt(n) 2^-24) times the largest magnitude of the expected result,
 * where u is the unit roundoff of the result's type if it has 16 bits, and n is the number of terms that make a result:
 * the length of the last axis, or the operands' elements for each result if that is more. A kernel that rounds the
 * product p of `linear` before it adds the bias may differ by (u + u^2) |p| more: the sum of the rounded product and
 * the bias, whose magnitude is at most u |p| above the exact one's, is rounded by u of its own. Products of TF32
 * operands may differ by 2^-9 times the largest magnitude more. */
extern const dw__first_use dw__operation_first_use;

/* DW_OK if the kernel would run a supported call: its variant is there, and the first-use check did not refuse it. */
static inline dw_status dw__gpu_kernel_runs(const dw__kernel *kernel, const void *call,
                                            const dw__context *context) {
    const dw__variant *variant;
    DW_RETURN_IF_FAILED(kernel->prepare(kernel, call, context, &variant));
    return dw__variant_status(variant);
}

/* Runs a supported call. If the first-use check refused the kernel, `reference` computes the call instead;
 * DW_UNSUPPORTED if that is NULL. */
static inline dw_status dw__gpu_run(const dw__kernel *kernel, const dw__kernel *reference,
                                    const void *call, const dw__context *context) {
    const dw__variant *variant;
    DW_RETURN_IF_FAILED(kernel->prepare(kernel, call, context, &variant));
    if (!variant->disabled) return kernel->enqueue(call, context, variant);
    return reference ? dw__gpu_run(reference, NULL, call, context) : dw__variant_status(variant);
}

/* Makes a tensor map; `name`, the tensor's, is for the message of a failure. */
static inline dw_status dw__gpu_map(const dw__context *context, const dw__tensor_map_shape *shape,
                                    const char *name, dw__tensor_map *map) {
    const dw_status status = context->device->tensor_map(shape, map);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "the tensor map of %s", name);
}

/* ---- the public calls (gpu_job.c) ------------------------------------------------------------------- */

/* Checks of a call's members; `title` begins the messages. */

typedef struct dw__size_range {
    const char *name;
    int64_t value, least, most;
} dw__size_range;
dw_status dw__check_sizes(const char *title, const dw__size_range *sizes, size_t count);

typedef struct dw__address {
    const char *name;
    const void *at;   /* device memory */
    size_t alignment; /* in bytes */
    bool needed;      /* must not be NULL */
} dw__address;
dw_status dw__check_addresses(const char *title, const dw__address *addresses, size_t count);
/* The same for a tensor that TMA reads or writes. DW_UNSUPPORTED: it does not lie at a multiple of 16 bytes. */
dw_status dw__check_tensor(const char *title, const char *name, const void *at, bool needed);
/* DW_TYPE: the elements are neither BF16 nor F16. */
dw_status dw__check_half(const char *title, dw_dtype dtype);

enum { DW__OWN_KERNELS = 6 };

/* How the public calls of a family find and run their kernel. */
typedef struct dw__gpu_family {
    const char *title;  /* "GEMM": begins the messages */
    dw__call_kind kind; /* of kernels that a call may name */
    /* Deepwell's kernels, up to the first NULL. */
    const dw__kernel *own[DW__OWN_KERNELS];
    /* Finds Deepwell's kernel for a call and a compute capability. DW_UNSUPPORTED says why there is none. */
    dw_status (*choose)(const void *call, int capability, const dw__kernel **kernel);
    const char *(*describe)(const void *call, char *text, size_t bytes);
    const char *workspace_query; /* the public function that returns the workspace's bytes */
} dw__gpu_family;

typedef struct dw__gpu_job {
    const void *call; /* checked */
    const dw_device *device;
    const char *named; /* the kernel that the call names; NULL: Deepwell chooses */
    bool empty;        /* the kernel has nothing to compute, and need not support the call */
    const void *workspace;
    size_t workspace_bytes;
    const dw__kernel *reference; /* as for dw__gpu_run */
    const dw__kernel *kernel;    /* found by dw__job_find */
    const dw__context *context;
} dw__gpu_job;

/* Puts the call's description in front of the message of a failure. */
dw_status dw__job_name(const dw__gpu_family *family, const dw__gpu_job *job, dw_status status);
/* Finds the kernel and the context of the device. Messages of these functions begin with the call's description. */
dw_status dw__job_find(const dw__gpu_family *family, dw__gpu_job *job);
/* Checks the workspace and enqueues. */
dw_status dw__job_run(const dw__gpu_family *family, const dw__gpu_job *job);
/* DW_OK if the job would run, unless its workspace is too small. An empty job does. */
dw_status dw__job_would_run(const dw__gpu_family *family, const dw__gpu_job *job);
/* Returns the bytes of workspace, 0 for an empty job. */
dw_status dw__job_workspace(const dw__gpu_family *family, const dw__gpu_job *job, size_t *bytes);

/* ---- measurement (gpu_measure.c) ------------------------------------------------------------------- */

enum { DW__TIMING_PARTS = 16 };

/* A call to measure, and the device memory that it gets. */
typedef struct dw__timing {
    const dw_device *device;
    dw_dtype dtype; /* of the random operands: DW_BF16 or DW_F16 */
    struct {
        void *member; /* the pointer in the call that receives the address */
        size_t bytes;
        bool random; /* filled with random numbers; otherwise not initialized */
    } parts[DW__TIMING_PARTS];
    size_t count;
    const void *call;
    void **stream;                         /* the call's; set before the runs */
    dw_status (*before)(const void *call); /* enqueued once before the measurement; may be NULL */
    dw_status (*run)(const void *call);
} dw__timing;

/* Adds a part. */
void dw__timing_add(dw__timing *timing, void *member, size_t bytes, bool random);
/* Returns the median seconds of several runs, on its own stream and memory. */
dw_status dw__gpu_measure(const dw__timing *timing, double *seconds);

/* ---- choice and explanation (gpu_explain.c) ---------------------------------------------------------- */

enum { DW__GPU_PASSES = 2, DW__GPU_CANDIDATES = 8 };

/* The kernels for an operation, one of each backend, in order of preference for calls that were not measured. */
typedef struct dw__gpu_candidates {
    const dw__kernel *kernels[DW__GPU_CANDIDATES];
    size_t count;
} dw__gpu_candidates;

typedef struct dw__gpu_query {
    const void *call;
    int passes; /* 2: with gradients; backends are compared by the sum of both passes */
    dw__call_kind kind[DW__GPU_PASSES]; /* the pass in question, then the other pass */
    /* shape classes of measurements; NULL: no measurements are kept */
    const char *shape_class[DW__GPU_PASSES];
    const dw__gpu_target *target;
    const char *gpu;  /* the GPU model whose measurements count; NULL: none */
    const char *with; /* versions that measurements must have been made with; NULL: any */
    /* Why Deepwell runs the call, if it supports it, whatever was measured; NULL: measurements count. */
    const char *unmeasured;
    const char *
        refused; /* why Deepwell's kernels cannot run the call, beyond what they support; NULL: nothing */
} dw__gpu_query;

typedef struct dw__gpu_choice {
    const dw__kernel *kernel; /* NULL: none supports the call */
    bool measured;            /* all competing kernels have been measured */
    char because[512];
    char refusal[1024]; /* why Deepwell's kernels do not run the call; "": they do */
} dw__gpu_choice;
/* Chooses the first kernel that supports the call, unless all competing kernels have been measured and another is
 * faster. */
void dw__gpu_choose(const dw__gpu_query *query, dw__gpu_choice *choice);

typedef struct dw__gpu_explanation {
    const char *operation, *shape;
    double flops, bytes;
    const char *because; /* NULL: the choice of dw__gpu_choose; otherwise `chosen`, and why */
    const dw__kernel *chosen;
    const dw__kernel
        /* the entry of the optional library's family, which gets its own row; NULL: none */
        *provided;
    const char *operands; /* "attention": calls for which the library has no kernel */
} dw__gpu_explanation;
/* deepwell/explain.h describes the JSON. */
dw_status dw__gpu_explain(const dw__gpu_query *query, const dw__gpu_explanation *explanation,
                          const dw__gpu_subject *subject, char **json);

#endif
