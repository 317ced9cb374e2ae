/* The search for a layout. Each part calls the one before it: limits (what the request fixes), space (which sizes
 * divide), mesh (the best layout of one choice of sizes), search (best-first over all choices), fit (what to report
 * if nothing fits). */
#ifndef DW_SEARCH_H
#define DW_SEARCH_H

#include "base/base.h"
#include "deepwell/autoplan.h"
#include "plan/planner_internal.h"

/* ---- limits --------------------------------------------------------------------------------- */

/* Ranges of the layout's members. A member of `set` is not 0 if the request constrains it. */
typedef struct dw__limits {
    dw_layout low, high, set;
    /* Values of members that the search does not vary: the framework's default or the request's. */
    dw_layout base;
    int whole_attention; /* 1: attention_tp equals tp */
} dw__limits;
#define DW__ALLOWS(limits, member, value)                                                          \
    ((int)(value) >= (int)(limits)->low.member && (int)(value) <= (int)(limits)->high.member)

void dw__limits_begin(dw__limits *limits);
/* Adds one constraint. "offload=none", "=optimizer", "=activations" or "=all" sets offload_layers and
 * offload_optimizer. */
dw_status dw__limits_add(dw__limits *limits, const char *constraint);
/* Returns 1 if the layout satisfies all constraints. */
int dw__limits_allow(const dw__limits *limits, const dw_layout *layout);
/* Sets the framework's defaults in `base`. Call it after all constraints. */
void dw__limits_finish(dw__limits *limits);

/* ---- space ---------------------------------------------------------------------------------- */

/* Part of a GPU's memory that plans leave free by default. Predictions are off by some percent, and a run that exceeds
 * the memory fails. */
#define DW__PLAN_RESERVE 0.05

/* The inputs of a search. The hardware's memory excludes the reserve. */
typedef struct dw__problem {
    const dw_model_sizes *model;
    const dw_hardware *hardware;
    dw__limits limits;
    int seq_len, global_batch;
} dw__problem;
/* Returns 1 if the framework supports the ZeRO stage and the schedule and, if `parallel`, more than data
 * parallelism. */
int dw__framework_has(dw_framework framework, int zero_stage, dw_pipeline_schedule schedule,
                      int parallel);
/* Return 1 if the framework supports the offload, the hardware has a link to the host, and the limits allow it. */
int dw__space_offloads_optimizer(const dw__problem *problem);
int dw__space_offloads_layers(const dw__problem *problem, dw_recompute recompute);
/* DW_INVALID_ARGUMENT: the request asks for what the framework or the hardware cannot do. */
dw_status dw__space_check(const dw__problem *problem);

/* One choice of sizes: all that the seconds of computation depend on. */
typedef struct dw__mesh {
    int tp, cp, pp, dp, ep, etp, micro_batch, precision;
    int atp;       /* tensor parallelism of attention: tp, or a divisor of it */
    int too_large; /* 1: no layout of these sizes fits */
    double bound;  /* lower bound of its layouts' seconds */
} dw__mesh;

enum { DW__REMEMBERED = 1 << 15 };
typedef struct dw__meshes {
    dw__mesh *items;
    size_t count, capacity;
    size_t sorted;          /* this many of the least bounds come first, in order */
    dw__stage_memo *stages; /* for the first DW__REMEMBERED of them */
} dw__meshes;

/* Appends all choices of sizes that divide, without bounds. With `smallest` only the smallest micro-batch of each. */
dw_status dw__space_meshes(const dw__problem *problem, int gpus, int smallest, dw__meshes *meshes);
void dw__mesh_layout(const dw__problem *problem, const dw__mesh *mesh, dw_layout *layout);

/* Sharding of the states over a mesh's replicas. */
typedef struct dw__sharding {
    int zero_stage, shard, reshard, offload;
} dw__sharding;
/* The schedule of its stages. */
typedef struct dw__turns {
    dw_pipeline_schedule schedule;
    int virtual_stages;
} dw__turns;
/* Layers of the first stage, of each stage between, and of the last, where these differ. */
typedef struct dw__ends {
    int first, between, last;
} dw__ends;
enum {
    DW__SHARDINGS_MOST = 1024,
    DW__TURNS_MOST = 64,
    DW__ENDS_MOST = 4,
    DW__DIVISORS_MOST = 1344 /* for any number below 2^30 */
};
int dw__space_shardings(const dw__problem *problem, const dw__mesh *mesh, dw__sharding *shardings);
/* `ends` is NULL if every stage has the same number of layers, or some between the ends have one more. */
int dw__space_turns(const dw__problem *problem, const dw__mesh *mesh, const dw__ends *ends,
                    dw__turns *turns);
/* Lists splits whose heaviest stage is lighter than an even split's, lightest first. The head takes as long as `head`
 * layers. */
int dw__space_ends(const dw__problem *problem, const dw__mesh *mesh, double head, dw__ends *ends);
/* Returns 1 if the search may choose stages with different numbers of layers. */
int dw__space_may_be_uneven(const dw__problem *problem);

/* ---- mesh ----------------------------------------------------------------------------------- */

typedef struct dw__found {
    int found;
    int rank; /* complexity; less is simpler */
    dw_layout layout;
    dw_prediction prediction;
    double predicted; /* number of layouts predicted */
    int too_large;    /* states and the fewest activations exceed the memory */
} dw__found;

/* Returns 0 if states and the fewest activations exceed the memory. */
int dw__mesh_may_fit(const dw__problem *problem, const dw__mesh *mesh);
void dw__meshes_bound(const dw__problem *problem, dw__mesh *meshes, size_t count);
/* Finds the fastest layout that fits and takes at most `most` seconds; with `simplest`, the simplest of these.
 * `stages` is NULL, zeros, or the memo of an earlier search of this mesh. */
void dw__mesh_best(const dw__problem *problem, const dw__mesh *mesh, double most, int simplest,
                   dw__stage_memo *stages, dw__found *found);
/* Finds the layout that needs the least memory, whether it fits or not. */
void dw__mesh_smallest(const dw__problem *problem, const dw__mesh *mesh, dw__found *found);

/* Returns 1 if `a` needs less memory: it fits and `b` does not, else it fits the host and `b` does not, else it takes
 * less of the GPU. */
int dw__needs_less(const dw_prediction *a, const dw_prediction *b);

/* ---- fit ------------------------------------------------------------------------------------ */

/* Searches all meshes. found->found is 0 if there are none. */
dw_status dw__fit_smallest(const dw__problem *problem, int gpus, dw__found *found);
/* Finds the smallest number of GPUs on which a layout fits. 0: none up to DW_HARDWARE_MOST_GPUS. */
dw_status dw__fit_gpus(const dw__problem *problem, int *gpus);

#endif
