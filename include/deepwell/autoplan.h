/* Finds the layout of a training run: the fastest that fits, what it costs, and what alternatives would cost.
 *
 *     dw_autoplan_request request;
 *     dw_autoplan_request_default(&request);
 *     request.model = &model, request.hardware = hardware;
 *     request.seq_len = 8192, request.global_batch = 2048;
 *     dw_autoplan *plan;
 *     if (dw_autoplan_search(&request, &plan) == DW_OK) dw_autoplan_save(plan, "plan.json");
 *     dw_autoplan_destroy(plan);
 *
 * A plan owns everything that it points to: the model, the hardware, the layout and the prediction. Its file has the
 * same fields by the same names. docs/autoplan.md describes the file and the layouts that are considered.
 */
#ifndef DEEPWELL_AUTOPLAN_H
#define DEEPWELL_AUTOPLAN_H

#include "deepwell/hardware.h"
#include "deepwell/planner.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DW_AUTOPLAN_VERSION 1 /* version of the format of the plan's file */

/* An alternative to the plan's layout. */
typedef struct dw_autoplan_other {
    const char *name; /* "tp 4, pp 16, dp 256"; for a what-if its constraint, "tp=4" */
    /* The parts of the step that take longer, "+4.1% tensor, +1.0% bubble"; if found is 0, why nothing fits. */
    const char *why;
    const char *unmeasured; /* as dw_autoplan.unmeasured; "": all of its parts are measured */
    int found;   /* 0: no layout with this constraint fits, and only name and why are set */
    double loss; /* its seconds divided by the plan's, minus 1 */
    dw_layout layout;
    dw_prediction prediction;
} dw_autoplan_other;

/* The kernel for one operation of a layer on one GPU. */
typedef struct dw_autoplan_kernel {
    const char *operation; /* "attention forward", "MLP up" */
    const char *kernel;    /* Deepwell's kernel with its tiles, else the framework's library */
    double predicted;      /* FLOP/s within this plan */
    double measured;       /* FLOP/s of the kernel alone; 0: not measured */
    const char *source;    /* of the measurement, else of the planner's constant for such kernels */
} dw_autoplan_kernel;

typedef struct dw_autoplan_statistics {
    double meshes; /* all divisible combinations of axis sizes, micro-batch and precision */
    /* Combinations skipped because their computation alone is slower than whole steps of others. */
    double meshes_slow;
    /* Combinations skipped because their share of the parameters alone does not fit. */
    double meshes_large;
    double predicted; /* layouts passed to dw_predict */
    double seconds;   /* duration of the search; not in the file */
} dw_autoplan_statistics;

typedef struct dw_autoplan {
    const char *model_name; /* "llama3-405b"; "": the model has no name */
    dw_model_sizes model;
    const dw_hardware *hardware;
    dw_layout layout; /* `recompute` is resolved: never DW_RECOMPUTE_AUTO */
    dw_prediction prediction;
    double reserve; /* bytes of each GPU left free; prediction.capacity excludes them */
    dw_autoplan_statistics statistics;
    uint32_t runner_up_count, what_if_count;
    /* Sorted by seconds. Each one has other axis sizes than those before it. */
    const dw_autoplan_other *runners_up;
    /* One constraint each; the rest of the layout is chosen again. */
    const dw_autoplan_other *what_ifs;
    /* Layouts predicted to be faster that use unmeasured parts (`unmeasured` names them). */
    uint32_t bolder_count;
    const dw_autoplan_other *bolder;
    /* Parts of the layout that no published run covers among those that predictions are compared with, and what exists
     * instead: "dualpipe (...), activations on the host (...)". "": all parts are measured. docs/autoplan.md has the
     * table. */
    const char *unmeasured;
    uint32_t kernel_count; /* 0 before dw_autoplan_bind */
    const dw_autoplan_kernel *kernels;
    /* If nothing fits, prediction.fits is 0 and the layout is the one that needs the least memory. */
    /* "optimizer states, 61.2 GB on each GPU of stage 0 of 16"; "": the layout fits. */
    const char *tightest;
    int gpus_needed; /* least number of these GPUs on which a layout fits; 0: this layout fits, or
                           * DW_HARDWARE_MOST_GPUS are too few */
} dw_autoplan;

typedef struct dw_autoplan_request {
    size_t struct_size;     /* sizeof(dw_autoplan_request) */
    const char *model_name; /* may be NULL */
    const dw_model_sizes *model;
    const dw_hardware *hardware; /* the plan uses all of its GPUs */
    int64_t seq_len, global_batch;
    /* A scheme that dw_layout.precision may have. DW_SCHEME_COUNT: the search chooses the fastest of BF16, FP8_TENSOR,
     * MXFP8 and NVFP4 that the hardware supports. */
    dw_scheme precision;
    /* "FIELD=VALUE", "FIELD<=VALUE" or "FIELD>=VALUE". FIELD is a field of dw_layout, VALUE a number or a name: "tp=8",
     * "pp<=4", "recompute=full" (all layers), "schedule=1f1b", "framework=megatron" (default DW_FRAMEWORK_OWN). */
    const char *const *constraints;
    size_t constraint_count;
    /* Bytes of each GPU left free for errors of the prediction; negative: 5 % of its memory. */
    double reserve;
    int runners_up; /* at most this many */
    int what_ifs;   /* 1: also compute what-ifs, each by a search of its own */
    /* 0: choose a layout of measured parts if one fits, and list faster ones as `bolder`; constraints may still require
     * unmeasured parts. 1: choose the fastest, measured or not. */
    int bold;
} dw_autoplan_request;

/* Sets precision BF16, reserve 5 %, five runners-up, no what-ifs. Set model, hardware, seq_len and global_batch
 * yourself. */
DW_API void dw_autoplan_request_default(dw_autoplan_request *request);

/* The same request gives the same plan on any number of threads. If nothing fits, returns DW_OK with prediction.fits 0.
 * DW_INVALID_ARGUMENT names what no layout can satisfy: an unknown or contradicting constraint, a batch that no number
 * of replicas divides, a size out of range. DW_UNSUPPORTED: the GPUs do not have the precision. */
DW_API dw_status dw_autoplan_search(const dw_autoplan_request *request, dw_autoplan **plan);

/* Makes a plan from a given layout: predicts it and searches nothing. Fails as dw_layout_check does. */
DW_API dw_status dw_autoplan_of(const char *model_name, const dw_model_sizes *model,
                                const dw_hardware *hardware, const dw_layout *layout,
                                dw_autoplan **plan);

/* Fills `kernels` with the kernels of the plan's GEMMs and attention: Deepwell's, if there are any for the GPUs'
 * architecture (deepwell/explain.h), else the framework's library. Needs no GPU. */
DW_API dw_status dw_autoplan_bind(dw_autoplan *plan);

/* The plan's file. A plan that is written and read again is identical to the last bit. DW_PARSE: not JSON, or a field
 * is missing or of the wrong kind. DW_INVALID_ARGUMENT: sizes contradict each other. DW_UNSUPPORTED: the file has a
 * later version. The message names the field. */
DW_API dw_status dw_autoplan_parse(const char *json, size_t bytes, dw_autoplan **plan);
DW_API dw_status dw_autoplan_load(const char *path, dw_autoplan **plan);
DW_API dw_status dw_autoplan_json(const dw_autoplan *plan,
                                  char **text); /* free with dw_text_free */
DW_API dw_status dw_autoplan_save(const dw_autoplan *plan, const char *path);

/* Describes the plan for a reader. `explain` adds what-ifs and runners-up. Free *text with dw_text_free. */
DW_API dw_status dw_autoplan_text(const dw_autoplan *plan, int explain, char **text);

DW_API void dw_autoplan_destroy(dw_autoplan *plan); /* may be NULL */

#ifdef __cplusplus
}
#endif
#endif
