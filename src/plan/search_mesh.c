/* One choice of sizes: what no layout of it can beat, and its best one.
 *
 * Computation depends on the sizes alone. Sharding, schedule and recomputation add to it, and more recomputation never
 * makes a step shorter: so the first level that fits is the best of its kind, and whatever exceeds the limit without
 * recomputation need not be tried with it.
 */
#include "plan/search.h"
#include <math.h>

static double computing(const dw_prediction *p) {
    const dw_time_parts *t = &p->time;
    return t->gemm + t->attention + t->elementwise + t->quantize + t->launch + t->tensor +
           t->context + t->expert + t->imbalance;
}

static void predict(const dw__problem *problem, const dw_layout *layout,
                    dw_prediction *prediction) {
    dw_predict_unchecked(problem->model, problem->hardware, layout, prediction);
}

/* Nothing recomputed, no bubble; states shared by all. What is slower in proportion to the rest (stragglers) is so for
 * this part too. */
void dw__mesh_bound(const dw__problem *problem, dw__mesh *mesh) {
    dw_layout layout;
    dw_prediction p;
    dw__mesh_layout(problem, mesh, &layout);
    layout.recompute = DW_RECOMPUTE_NONE;
    layout.overlap_expert = 1; /* as a schedule may have it */
    layout.zero_stage = 3;
    predict(problem, &layout, &p);
    double work = computing(&p);
    mesh->bound = work + p.time.other * (p.seconds > 0 ? work / p.seconds : 0);
    mesh->memory = p.memory.parameters + p.memory.gradients;
    if (!problem->offload) mesh->memory += p.memory.optimizer;
}

static int bits(int value) {
    int count = 0;
    while (value >>= 1) count++;
    return count;
}

/* How much there is to understand and to go wrong. What is off costs nothing; sizes count by their doublings. */
static int complexity(const dw_layout *layout) {
    static const int schedules[DW_SCHEDULES] = {
        [DW_SCHEDULE_1F1B] = 0,     [DW_SCHEDULE_GPIPE] = 0,  [DW_SCHEDULE_INTERLEAVED] = 10,
        [DW_SCHEDULE_ZB_H1] = 30,   [DW_SCHEDULE_ZB_H2] = 40, [DW_SCHEDULE_ZB_V] = 40,
        [DW_SCHEDULE_DUALPIPE] = 50};
    static const int recomputes[DW_RECOMPUTES] = {0, 10, 20, 0};
    static const int precisions[DW_TRAIN_PRECISIONS] = {
        [DW_TRAIN_BF16] = 0,     [DW_TRAIN_FP32] = 0,       [DW_TRAIN_FP8] = 30,
        [DW_TRAIN_FP8_ROW] = 31, [DW_TRAIN_FP8_BLOCK] = 32, [DW_TRAIN_MXFP8] = 33,
        [DW_TRAIN_NVFP4] = 50};
    int sum =
        schedules[layout->schedule] + recomputes[layout->recompute] + precisions[layout->precision];
    int sizes[4] = {layout->tp, layout->cp, layout->pp, layout->ep};
    for (int at = 0; at < 4; at++) sum += sizes[at] > 1 ? 30 + bits(sizes[at]) : 0;
    sum += bits(layout->virtual_stages) + (layout->recompute_layers > 0 ? 5 : 0);
    sum += 10 * layout->zero_stage + (layout->shard > 0 ? 20 : 0) + (layout->reshard ? 0 : 5);
    sum += (layout->offload_optimizer ? 50 : 0) +
           (layout->ep > 1 && layout->etp > 1 ? 20 + bits(layout->etp) : 0);
    return sum;
}

typedef struct trial {
    const dw__problem *problem;
    double most;
    int simplest;
    dw__found *found;
} trial;

/* 1: fits, whatever became of it. */
static int try_layout(const trial *t, dw_layout *layout, dw_prediction *p) {
    dw__found *found = t->found;
    predict(t->problem, layout, p);
    found->predicted++;
    if (!p->fits) return 0;
    if (!(p->seconds <= t->most)) return 1;
    int rank = complexity(layout);
    int better = !found->found;
    if (!better && t->simplest)
        better = rank != found->rank ? rank < found->rank : p->seconds < found->prediction.seconds;
    if (!better && !t->simplest)
        better = p->seconds != found->prediction.seconds ? p->seconds < found->prediction.seconds
                                                         : rank < found->rank;
    if (!better) return 1;
    found->found = 1;
    found->rank = rank;
    found->layout = *layout;
    found->prediction = *p;
    return 1;
}

static double ceiling_of(const trial *t) {
    if (t->simplest || !t->found->found) return t->most;
    return t->found->prediction.seconds < t->most ? t->found->prediction.seconds : t->most;
}

/* The fewest recomputed layers of a stage with which it fits, `most` of them at least known to fit. */
static void try_fewest(const trial *t, dw_layout *layout, int most) {
    dw_prediction p;
    int least = 1;
    while (least < most) {
        int middle = (least + most) / 2;
        layout->recompute_layers = middle;
        if (try_layout(t, layout, &p))
            most = middle;
        else
            least = middle + 1;
    }
}

static void try_recomputation(const trial *t, dw_layout *layout) {
    const dw__limits *limits = &t->problem->limits;
    dw_prediction p;
    int free_layers = !limits->set.recompute_layers;
    layout->recompute = DW_RECOMPUTE_NONE;
    layout->recompute_layers = 0;
    if (DW__ALLOWS(limits, recompute, DW_RECOMPUTE_NONE) && free_layers) {
        if (try_layout(t, layout, &p) || p.seconds > ceiling_of(t)) return;
    }
    layout->recompute = DW_RECOMPUTE_SELECTIVE;
    if (DW__ALLOWS(limits, recompute, DW_RECOMPUTE_SELECTIVE) && free_layers)
        try_layout(t, layout, &p);
    if (!DW__ALLOWS(limits, recompute, DW_RECOMPUTE_FULL)) return;
    layout->recompute = DW_RECOMPUTE_FULL;
    if (!free_layers) {
        int most = (int)ceil((double)t->problem->model->layers / layout->pp);
        for (int layers = 0; layers <= most; layers++) {
            layout->recompute_layers = layers;
            if (DW__ALLOWS(limits, recompute_layers, layers)) try_layout(t, layout, &p);
        }
        return;
    }
    if (!try_layout(t, layout, &p) || limits->set.recompute) return;
    try_fewest(t, layout, (int)ceil((double)t->problem->model->layers / layout->pp));
}

/* DualPipe runs one micro-batch's exchange of tokens beside another's computation. */
static void set_turns(const dw__problem *problem, const dw__turns *turns, dw_layout *layout) {
    layout->schedule = turns->schedule;
    layout->virtual_stages = turns->virtual_stages;
    layout->overlap_expert = problem->limits.set.overlap_expert
                                 ? problem->limits.base.overlap_expert
                                 : turns->schedule == DW_SCHEDULE_DUALPIPE;
}

static void set_sharding(const dw__sharding *sharding, dw_layout *layout) {
    layout->zero_stage = sharding->zero_stage;
    layout->shard = sharding->shard;
    layout->reshard = sharding->reshard;
    layout->offload_optimizer = sharding->offload;
}

/* States alone, without activations. Where they are moved to the host it must have room for them. */
static int states_fit(const dw__problem *problem, dw_layout *layout, dw__found *found) {
    dw_prediction p;
    int offload = layout->offload_optimizer;
    double host = problem->hardware->host_memory.value;
    layout->recompute = DW_RECOMPUTE_FULL;
    layout->recompute_layers = 0;
    layout->offload_optimizer = 0;
    predict(problem, layout, &p);
    layout->offload_optimizer = offload;
    found->predicted++;
    if (offload &&
        (problem->hardware->host_bandwidth.value <= 0 || (host > 0 && p.memory.optimizer > host)))
        return 0;
    double states = p.memory.parameters + p.memory.gradients + (offload ? 0 : p.memory.optimizer);
    return states <= problem->hardware->memory.value;
}

void dw__mesh_best(const dw__problem *problem, const dw__mesh *mesh, double most, int simplest,
                   dw__found *found) {
    *found = (dw__found){0};
    dw__sharding shardings[DW__SHARDINGS_MOST];
    dw__turns turns[DW__TURNS_MOST];
    int sharding_count = dw__space_shardings(problem, mesh, shardings),
        turn_count = dw__space_turns(problem, mesh, turns);
    trial t = {problem, most, simplest, found};
    dw_layout layout;
    dw__mesh_layout(problem, mesh, &layout);
    for (int s = 0; s < sharding_count; s++) {
        set_sharding(&shardings[s], &layout);
        if (turn_count == 0) break;
        set_turns(problem, &turns[0], &layout);
        if (!states_fit(problem, &layout, found)) continue;
        for (int at = 0; at < turn_count; at++) {
            set_turns(problem, &turns[at], &layout);
            try_recomputation(&t, &layout);
        }
    }
}

void dw__mesh_smallest(const dw__problem *problem, const dw__mesh *mesh, dw__found *found) {
    *found = (dw__found){0};
    dw__sharding shardings[DW__SHARDINGS_MOST];
    dw__turns turns[DW__TURNS_MOST];
    int sharding_count = dw__space_shardings(problem, mesh, shardings),
        turn_count = dw__space_turns(problem, mesh, turns);
    dw_layout layout;
    dw__mesh_layout(problem, mesh, &layout);
    for (int s = 0; s < sharding_count; s++) {
        if (shardings[s].shard && !problem->limits.set.shard)
            continue; /* a part of the ranks never needs less than all */
        set_sharding(&shardings[s], &layout);
        for (int at = 0; at < turn_count; at++) {
            set_turns(problem, &turns[at], &layout);
            for (int r = DW_RECOMPUTE_NONE; r <= DW_RECOMPUTE_FULL; r++) {
                dw_prediction p;
                if (!DW__ALLOWS(&problem->limits, recompute, r)) continue;
                layout.recompute = (dw_recompute)r;
                layout.recompute_layers = 0;
                predict(problem, &layout, &p);
                found->predicted++;
                int better = !found->found || p.fits > found->prediction.fits;
                if (!better && p.fits == found->prediction.fits)
                    better = p.allocated < found->prediction.allocated;
                if (!better) continue;
                found->found = 1;
                found->layout = layout;
                found->prediction = p;
            }
        }
    }
}
