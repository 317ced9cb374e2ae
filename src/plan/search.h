/* The search for a layout, in its parts: limits (what the request fixes) -> space (what divides) -> mesh (the
 * best within one choice of sizes) -> search (best first, over all of them) -> fit (what to say where nothing
 * fits). */
#ifndef DW_SEARCH_H
#define DW_SEARCH_H

#include "base/base.h"
#include "deepwell/autoplan.h"
#include "plan/planner_internal.h"

/* ---- limits --------------------------------------------------------------------------------- */

/* Of each member of a layout, from where to where; `set` is not 0 where the request said so. */
typedef struct dw__limits {
    dw_layout low, high, set;
    dw_layout
        base; /* what the search does not vary: as the framework does it, or as the request says */
    int whole_attention; /* attention_tp is tp */
} dw__limits;
#define DW__ALLOWS(limits, member, value)                                                          \
    ((int)(value) >= (int)(limits)->low.member && (int)(value) <= (int)(limits)->high.member)

void dw__limits_begin(dw__limits *limits);
/* "offload=none", "=optimizer", "=activations" or "=all" stand for both of offload_layers and offload_optimizer. */
dw_status dw__limits_add(dw__limits *limits, const char *constraint);
/* All that is fixed is so in the layout. */
int dw__limits_allow(const dw__limits *limits, const dw_layout *layout);
/* After all constraints: the framework's habits in `base`. */
void dw__limits_finish(dw__limits *limits);

/* ---- space ---------------------------------------------------------------------------------- */

/* The problem; hardware's memory is without the reserve. */
typedef struct dw__problem {
    const dw_planner_model *model;
    const dw_hardware *hardware;
    dw__limits limits;
    int seq_len, global_batch;
} dw__problem;
/* Whether the framework has the ZeRO stage, the schedule, and, where `parallel`, more than data parallelism. */
int dw__framework_has(dw_framework framework, int zero_stage, dw_pipeline_schedule schedule,
                      int parallel);
/* What of a layout may wait in the host's memory: the framework can, the hardware has a way there, the limits
 * allow. */
int dw__space_offloads_optimizer(const dw__problem *problem);
int dw__space_offloads_layers(const dw__problem *problem, dw_recompute recompute);
/* DW_INVALID_ARGUMENT: what the framework or the hardware cannot do is asked for. */
dw_status dw__space_check(const dw__problem *problem);

/* What computation depends on. */
typedef struct dw__mesh {
    int tp, cp, pp, dp, ep, etp, micro_batch, precision;
    int atp;       /* of attention: tp, or a divisor of it */
    int too_large; /* known to be */
    double bound;  /* seconds that no layout of it is below */
} dw__mesh;

enum { DW__REMEMBERED = 1 << 15 };
typedef struct dw__meshes {
    dw__mesh *items;
    size_t count, capacity;
    size_t sorted;          /* so many of the least bounds come first, in order */
    dw__stage_memo *stages; /* of the first DW__REMEMBERED of them */
} dw__meshes;

/* All that divide, bounds not set; `smallest`: of the micro-batches the smallest alone. */
dw_status dw__space_meshes(const dw__problem *problem, int gpus, int smallest, dw__meshes *meshes);
void dw__mesh_layout(const dw__problem *problem, const dw__mesh *mesh, dw_layout *layout);

/* How a mesh's replicas share their states. */
typedef struct dw__sharding {
    int zero_stage, shard, reshard, offload;
} dw__sharding;
/* How its stages take turns. */
typedef struct dw__turns {
    dw_pipeline_schedule schedule;
    int virtual_stages;
} dw__turns;
/* Stages of other than equally many layers: of the first, of each between, of the last. */
typedef struct dw__ends {
    int first, between, last;
} dw__ends;
enum {
    DW__SHARDINGS_MOST = 1024,
    DW__TURNS_MOST = 64,
    DW__ENDS_MOST = 4,
    DW__DIVISORS_MOST = 1344 /* of any number below 2^30 */
};
int dw__space_shardings(const dw__problem *problem, const dw__mesh *mesh, dw__sharding *shardings);
/* `ends`, or NULL: as many layers on each stage, or one more on some between. */
int dw__space_turns(const dw__problem *problem, const dw__mesh *mesh, const dw__ends *ends,
                    dw__turns *turns);
/* Splits whose heaviest stage is lighter than that of an even one, the lightest first, where the head takes as
 * long as `head` layers. */
int dw__space_ends(const dw__problem *problem, const dw__mesh *mesh, double head, dw__ends *ends);
/* The search may choose them. */
int dw__space_may_be_uneven(const dw__problem *problem);

/* ---- mesh ----------------------------------------------------------------------------------- */

typedef struct dw__found {
    int found;
    int rank; /* of simplicity; less is simpler */
    dw_layout layout;
    dw_prediction prediction;
    double predicted; /* how many layouts were asked for */
    int too_large;    /* the states and the fewest activations alone are more than the memory */
} dw__found;

/* 0: the states and the fewest activations alone are more than the memory. */
int dw__mesh_may_fit(const dw__problem *problem, const dw__mesh *mesh);
void dw__meshes_bound(const dw__problem *problem, dw__mesh *meshes, size_t count);
/* The fastest layout that fits, of those that take at most `most` seconds; with `simplest` the simplest of them.
 * `stages`, or NULL: zeros, or what an earlier search of this mesh left there. */
void dw__mesh_best(const dw__problem *problem, const dw__mesh *mesh, double most, int simplest,
                   dw__stage_memo *stages, dw__found *found);
/* The layout that needs the least memory, whether it fits or not. */
void dw__mesh_smallest(const dw__problem *problem, const dw__mesh *mesh, dw__found *found);

/* Fits rather than not; fits the host rather than not; else less of the GPU. */
int dw__needs_less(const dw_prediction *a, const dw_prediction *b);

/* ---- fit ------------------------------------------------------------------------------------ */

/* Over all meshes; found->found is 0 where there are none. */
dw_status dw__fit_smallest(const dw__problem *problem, int gpus, dw__found *found);
/* The smallest number of GPUs on which something fits; 0: none up to the most there can be. */
dw_status dw__fit_gpus(const dw__problem *problem, int *gpus);

#endif
