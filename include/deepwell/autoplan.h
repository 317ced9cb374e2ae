/* The layout of a training run, found: the fastest that fits, what it costs, and what others would cost.
 *
 *     dw_autoplan_search   every layout that divides, predicted by dw_predict, the best and its runners-up
 *     dw_autoplan_load     a plan from its file; dw_autoplan_json writes it
 *     dw_autoplan_of       a layout of one's own as a plan
 *
 * A plan is a structure that owns all that it points to: the model, the hardware, the layout, the prediction. Its file
 * has the same fields by the same names. docs/autoplan.md says which layouts are considered, and has the file.
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

#define DW_AUTOPLAN_VERSION 1 /* of the file */

/* Another layout beside the plan's own. */
typedef struct dw_autoplan_other {
    const char *name;       /* "tp 4, pp 16, dp 256", or the question: "tp=4" */
    const char *why;        /* "+4.1% tensor, +1.0% bubble": where it loses; or why there is none */
    const char *unmeasured; /* as of the plan; "": all parts are measured */
    int found;   /* 0: nothing that answers the question fits; only name and why are set */
    double loss; /* seconds over the plan's, less 1 */
    dw_layout layout;
    dw_prediction prediction;
} dw_autoplan_other;

/* Who is to compute an operation of a layer on one GPU. */
typedef struct dw_autoplan_kernel {
    const char *operation; /* "attention forward", "MLP up" */
    const char *kernel;    /* ours, with its tiles; else the framework's library */
    double predicted;      /* operations a second, in this plan */
    double measured;       /* of that kernel alone; 0: no measurement */
    const char *source;    /* of the measurement, else of the planner's constant for such kernels */
} dw_autoplan_kernel;

typedef struct dw_autoplan_statistics {
    double meshes; /* sizes of axes, micro-batches and precisions that divide: all of them */
    double
        meshes_slow; /* of these, not looked into: their computation alone takes longer than others' steps */
    double meshes_large; /* not looked into: their share of the parameters alone does not fit */
    double predicted;    /* layouts that dw_predict was asked for */
    double seconds;      /* the search took; not in the file */
} dw_autoplan_statistics;

typedef struct dw_autoplan {
    const char *model_name; /* "llama3-405b"; "" where it has none */
    dw_planner_model model;
    const dw_hardware *hardware;
    dw_layout layout; /* recompute is resolved: never DW_RECOMPUTE_AUTO */
    dw_prediction prediction;
    double
        reserve; /* bytes of each GPU that the plan leaves free; prediction.capacity is without them */
    dw_autoplan_statistics statistics;
    uint32_t runner_up_count, what_if_count;
    const dw_autoplan_other
        *runners_up; /* by seconds; each of other sizes of axes than those before */
    const dw_autoplan_other *what_ifs; /* one thing otherwise, the rest chosen again */
    /* Faster by prediction, of parts that nobody is known to have measured (unmeasured says which). */
    uint32_t bolder_count;
    const dw_autoplan_other *bolder;
    /* The layout's parts of which no published run is among those that predictions are compared with, and what there
     * is: "dualpipe (...), activations on the host (...)"; "": all are measured. docs/autoplan.md has the table. */
    const char *unmeasured;
    uint32_t kernel_count; /* 0 before dw_autoplan_bind */
    const dw_autoplan_kernel *kernels;
    /* Where nothing fits, prediction.fits is 0 and the layout is the one that needs the least memory. */
    const char
        *tightest; /* "optimizer states, 61.2 GB on each GPU of stage 0 of 16"; "" where it fits */
    int gpus_needed; /* the smallest number of these GPUs on which something fits; 0: not up to
                             DW_HARDWARE_MOST_GPUS, or it fits */
} dw_autoplan;

typedef struct dw_autoplan_request {
    size_t size;            /* sizeof this structure */
    const char *model_name; /* NULL: none */
    const dw_planner_model *model;
    const dw_hardware *hardware; /* all of its GPUs are used */
    int64_t seq_len, global_batch;
    dw_train_precision
        precision; /* DW_TRAIN_PRECISIONS: the fastest of BF16, FP8, MXFP8 and NVFP4 that the
                                     hardware has */
    /* "FIELD=VALUE", "FIELD<=VALUE" or "FIELD>=VALUE", FIELD one of dw_layout's, VALUE a number or a name: "tp=8",
     * "pp<=4", "recompute=full" (of all layers), "schedule=1f1b", "framework=megatron" (else DW_FRAMEWORK_OWN). */
    const char *const *constraints;
    size_t constraint_count;
    double
        reserve; /* bytes of each GPU that are left free; below 0: a twentieth, as predictions err */
    int runners_up; /* at most so many */
    int what_ifs;   /* 1: with them, some searches more */
    int bold; /* 0: a layout of measured parts, where one fits, and faster ones of others as `bolder`; what a
                     * constraint asks for is taken as it is. 1: the fastest, whatever was measured */
} dw_autoplan_request;

/* Precision BF16, five runners-up, no what-ifs. */
DW_API void dw_autoplan_request_default(dw_autoplan_request *request);

/* The same request has the same answer, on any number of threads. DW_INVALID_ARGUMENT names what no layout can have:
 * a constraint that is none or that contradicts another, a batch that no number of replicas divides, a size outside
 * of what is possible. DW_UNSUPPORTED: the GPUs have no such precision. Nothing fits: DW_OK, and prediction.fits is
 * 0. */
DW_API dw_status dw_autoplan_search(const dw_autoplan_request *request, dw_autoplan **plan);

/* A plan of your own: `layout` as it is, predicted. As dw_layout_check fails. */
DW_API dw_status dw_autoplan_of(const char *model_name, const dw_planner_model *model,
                                const dw_hardware *hardware, const dw_layout *layout,
                                dw_autoplan **plan);

/* Names the kernels of the plan's products and of its attention: of Deepwell's registry, where that has some for the
 * GPUs' architecture (deepwell/explain.h), else of the framework's library. No GPU is needed. */
DW_API dw_status dw_autoplan_bind(dw_autoplan *plan);

/* The file. DW_PARSE: no JSON, or a field missing or of the wrong kind; DW_INVALID_ARGUMENT: sizes that contradict
 * each other; DW_UNSUPPORTED where it is of a later version: each named. Written and read again it is the same to
 * the last bit. */
DW_API dw_status dw_autoplan_parse(const char *json, size_t bytes, dw_autoplan **plan);
DW_API dw_status dw_autoplan_load(const char *path, dw_autoplan **plan);
DW_API dw_status dw_autoplan_json(const dw_autoplan *plan, char **text); /* dw_text_free */
DW_API dw_status dw_autoplan_save(const dw_autoplan *plan, const char *path);

/* The plan in words for a person, without what-ifs and runners-up unless `explain`. dw_text_free. */
DW_API dw_status dw_autoplan_text(const dw_autoplan *plan, int explain, char **text);

DW_API void dw_autoplan_destroy(dw_autoplan *plan); /* NULL allowed */

#ifdef __cplusplus
}
#endif
#endif
