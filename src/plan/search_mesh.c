/* One choice of sizes: the lower bound of its layouts, and its best layout.
 *
 * Computation depends on the sizes alone. Sharding, schedule and recomputation add to it. More recomputation never
 * makes a step shorter. Therefore the first level of recomputation that fits is the best of its kind, and a layout
 * that exceeds the limit without recomputation is not tried with it. */
#include "plan/planner_internal.h"
#include "plan/search.h"
#include <limits.h>
#include <math.h>
#include <string.h>

static void predict(const dw__problem *problem, const dw_layout *layout, dw__layer_memo *memo,
                    dw_prediction *prediction) {
    dw__predict_again(&dw__constants_default, problem->model, problem->hardware, layout, memo,
                      prediction);
}

/* Lower bound in bytes for every recomputation and schedule: the first stage's states, and the fewest activations of
 * the micro-batches that every schedule holds there at once. */
static double least_memory(const dw__problem *problem, const dw_layout *layout, double *optimizer) {
    dw_layout plain = *layout;
    dw__planned planned;
    dw_memory_parts memory = {0};
    double activations = HUGE_VAL;
    if (plain.schedule != DW_SCHEDULE_DUALPIPE) plain.schedule = DW_SCHEDULE_1F1B;
    plain.virtual_stages = 1;
    plain.offload_optimizer = 0;
    dw__planned_begin(&planned, &dw__constants_default, problem->model, problem->hardware, &plain);
    for (int how = DW_RECOMPUTE_NONE; how <= DW_RECOMPUTE_FULL; how++) {
        plain.offload_layers =
            dw__space_offloads_layers(problem, (dw_recompute)how) ? problem->model->layers : 0;
        if (!DW__ALLOWS(&problem->limits, recompute, how)) continue;
        dw__memory(&planned, (dw_recompute)how, 0, 0, &memory);
        activations = fmin(activations, memory.activations);
    }
    *optimizer = memory.optimizer;
    return memory.parameters + memory.gradients +
           (layout->offload_optimizer ? 0 : memory.optimizer) + activations;
}

int dw__mesh_may_fit(const dw__problem *problem, const dw__mesh *mesh) {
    dw_layout layout;
    double optimizer;
    dw__mesh_layout(problem, mesh, &layout);
    layout.zero_stage = 3;
    layout.offload_optimizer = dw__space_offloads_optimizer(problem);
    return least_memory(problem, &layout, &optimizer) <= problem->hardware->memory.value;
}

static int same_layers(const dw__mesh *a, const dw__mesh *b) {
    return a->tp == b->tp && a->cp == b->cp && a->ep == b->ep && a->etp == b->etp &&
           a->atp == b->atp && a->micro_batch == b->micro_batch && a->precision == b->precision;
}

void dw__meshes_bound(const dw__problem *problem, dw__mesh *meshes, size_t count) {
    double layers = 0;
    dw__step_rest rest = {0};
    dw_layout layout;
    for (size_t at = 0; at < count; at++) {
        dw__mesh *mesh = &meshes[at];
        int same = at > 0 && same_layers(mesh, mesh - 1);
        if (!same) dw__mesh_layout(problem, mesh, &layout);
        /* DualPipe may hide the expert exchange, so the bound assumes it. */
        if (!same)
            layers = dw__least_layers(&dw__constants_default, problem->model, problem->hardware,
                                      &layout, DW__OVERLAP_DUALPIPE);
        double m = problem->global_batch / ((double)mesh->dp * mesh->micro_batch);
        if (at == 0)
            rest = dw__step_rest_of(&dw__constants_default, problem->model, problem->hardware,
                                    &layout);
        mesh->bound = dw__step_least(&rest, m, m * layers / mesh->pp);
    }
}

static int bits(int value) {
    int count = 0;
    while (value >>= 1) count++;
    return count;
}

/* Complexity of a layout: features in use count by weights, sizes by their logarithm. */
static int complexity(const dw_layout *layout) {
    static const int schedules[DW_SCHEDULES] = {
        [DW_SCHEDULE_1F1B] = 0,     [DW_SCHEDULE_GPIPE] = 5,  [DW_SCHEDULE_INTERLEAVED] = 10,
        [DW_SCHEDULE_ZB_H1] = 30,   [DW_SCHEDULE_ZB_H2] = 40, [DW_SCHEDULE_ZB_V] = 40,
        [DW_SCHEDULE_DUALPIPE] = 50};
    static const int recomputes[DW_RECOMPUTES] = {0, 10, 20, 0};
    static const int precisions[DW_SCHEME_COUNT] = {
        [DW_SCHEME_BF16] = 0,     [DW_SCHEME_FP32] = 0,       [DW_SCHEME_FP8_TENSOR] = 30,
        [DW_SCHEME_FP8_ROW] = 31, [DW_SCHEME_FP8_BLOCK] = 32, [DW_SCHEME_MXFP8] = 33,
        [DW_SCHEME_NVFP4] = 50};
    int sum =
        schedules[layout->schedule] + recomputes[layout->recompute] + precisions[layout->precision];
    int sizes[4] = {layout->tp, layout->cp, layout->pp, layout->ep};
    for (int at = 0; at < 4; at++) sum += sizes[at] > 1 ? 30 + bits(sizes[at]) : 0;
    sum += bits(layout->virtual_stages) + (layout->recompute_layers > 0 ? 5 : 0);
    sum += 10 * layout->zero_stage + (layout->shard > 0 ? 20 : 0) + (layout->reshard ? 0 : 5);
    sum += (layout->offload_optimizer ? 50 : 0) + (layout->offload_layers ? 40 : 0) +
           (layout->ep > 1 && layout->etp > 1 ? 20 + bits(layout->etp) : 0) +
           (layout->attention_tp && layout->attention_tp != layout->tp ? 25 : 0) +
           (layout->first_stage_layers > 0 || layout->last_stage_layers > 0 ? 8 : 0);
    return sum;
}

typedef struct trial {
    const dw__problem *problem;
    double most;
    int simplest;
    dw__found *found;
    dw__layer_memo *memo;
    dw__stage_memo *stages;
    const dw__ends *ends; /* NULL: an even split */
    dw__step_rest rest;
    double micro_batches;
} trial;

/* Lower bound of a step whose computation and traffic take at least `seconds`. */
static double least_step(const trial *t, double seconds) {
    return dw__step_least(&t->rest, t->micro_batches, seconds);
}

/* Returns 1 if the layout fits, even if it is not better. */
static int try_layout(const trial *t, dw_layout *layout, dw_prediction *p) {
    dw__found *found = t->found;
    predict(t->problem, layout, t->memo, p);
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

/* Returns the fewest recomputed layers per stage with which the layout fits, at most `most`, which must fit. */
static int try_fewest(const trial *t, dw_layout *layout, int most) {
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
    return most;
}

/* Bytes missing on the GPU; the host's memory is ignored. */
static double shortage(const dw_prediction *p) {
    return p->used - (p->reserved - p->allocated) - p->capacity;
}
static int fits_gpu(const dw_prediction *p) { return shortage(p) <= 0; }

/* Layers of the largest stage, or of the smallest with `least`. */
static int stage_layers(const trial *t, const dw_layout *layout, int least) {
    int layers = t->problem->model->layers, p = layout->pp;
    if (!t->ends) return least ? layers / p : (layers + p - 1) / p;
    const int numbers[3] = {t->ends->first, p > 2 ? t->ends->between : t->ends->last,
                            t->ends->last};
    int found = numbers[0];
    for (int at = 1; at < 3; at++)
        if (least ? numbers[at] < found : numbers[at] > found) found = numbers[at];
    return found;
}

/* Range of layers that may be offloaded with this recomputation. Returns 0 if it does not support as many as the
 * constraints require. */
static int offload_range(const trial *t, const dw_layout *layout, int *least, int *most) {
    const dw__limits *limits = &t->problem->limits;
    int layers = stage_layers(t, layout, 0);
    *least = limits->low.offload_layers;
    *most = 0;
    if (dw__space_offloads_layers(t->problem, layout->recompute))
        *most = limits->high.offload_layers < layers ? limits->high.offload_layers : layers;
    return *least <= *most;
}

/* Lower bound of the additional layers to offload: all layers of the heaviest stage keep the same bytes. */
static int layers_lacking(const trial *t, const dw_layout *layout, const dw_prediction *p) {
    int stay = stage_layers(t, layout, 1) - layout->offload_layers;
    double count = stay > 0 ? ceil(shortage(p) / p->memory.activations * stay * (1 - 1e-9)) : 1;
    return count < 1 ? 1 : count < INT_MAX / 2 ? (int)count : INT_MAX / 2;
}

/* Offloads as few layers as needed, since each one frees memory of the GPU and takes time. Returns 1 if the layout
 * fits with only the layers that constraints require. */
static int try_offloads(const trial *t, dw_layout *layout, dw_prediction *p) {
    int least, most;
    if (!offload_range(t, layout, &least, &most)) return 0;
    layout->offload_layers = least;
    int fits = try_layout(t, layout, p);
    if (fits || least == most || fits_gpu(p) || p->seconds > ceiling_of(t)) return fits;
    dw_prediction other = *p;
    while (!fits_gpu(&other)) {
        layout->offload_layers += layers_lacking(t, layout, &other);
        if (layout->offload_layers > most || other.seconds > ceiling_of(t)) return 0;
        try_layout(t, layout, &other);
    }
    return 0;
}

/* Recomputes some layers and offloads others. For each count of recomputed layers, finds the fewest offloaded layers
 * that fit. Recomputing all layers takes `again` seconds more than recomputing none. */
static void try_mixtures(const trial *t, dw_layout *layout, int recomputed, double again) {
    int most, layers = stage_layers(t, layout, 1);
    dw_prediction p;
    /* A framework that offloads only the inputs of recomputed layers has no mixtures. */
    if (!dw__space_offloads_layers(t->problem, DW_RECOMPUTE_NONE) ||
        !offload_range(t, layout, &layout->offload_layers, &most))
        return;
    layout->offload_layers++;
    while (recomputed > 0 && layout->offload_layers <= most) {
        do {
            layout->recompute_layers = recomputed;
            try_layout(t, layout, &p);
        } while (fits_gpu(&p) && --recomputed > 0);
        /* Offloading more layers that keep more can save at most the time of recomputation. */
        double saved = again * (recomputed < layers ? (double)recomputed / layers : 1);
        if (p.seconds - saved > ceiling_of(t)) return;
        layout->offload_layers += layers_lacking(t, layout, &p);
    }
}

/* Returns 1 if the layout fits without recomputation and offloading, which could only slow it down. */
static int try_recomputation(const trial *t, dw_layout *layout) {
    const dw__limits *limits = &t->problem->limits;
    dw_prediction p = {0};
    int free_layers = !limits->set.recompute_layers, layers = stage_layers(t, layout, 0);
    layout->recompute = DW_RECOMPUTE_NONE;
    layout->recompute_layers = 0;
    if (DW__ALLOWS(limits, recompute, DW_RECOMPUTE_NONE) && free_layers) {
        if (try_offloads(t, layout, &p)) return 1;
        if (p.seconds > ceiling_of(t)) return 0;
    }
    double without = p.seconds;
    layout->recompute = DW_RECOMPUTE_SELECTIVE;
    if (DW__ALLOWS(limits, recompute, DW_RECOMPUTE_SELECTIVE) && free_layers)
        try_offloads(t, layout, &p);
    if (!DW__ALLOWS(limits, recompute, DW_RECOMPUTE_FULL)) return 0;
    layout->recompute = DW_RECOMPUTE_FULL;
    if (!free_layers) {
        for (int some = 0; some <= layers; some++) {
            layout->recompute_layers = some;
            if (DW__ALLOWS(limits, recompute_layers, some)) try_offloads(t, layout, &p);
        }
        return 0;
    }
    int fits = try_offloads(t, layout, &p);
    if (limits->set.recompute) return 0;
    layout->offload_layers = limits->low.offload_layers;
    if (fits) layers = try_fewest(t, layout, layers) - 1;
    try_mixtures(t, layout, layers, p.seconds - without);
    return 0;
}

/* DualPipe overlaps one micro-batch's expert exchange with another's computation. */
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

/* Offloaded states must fit the host's memory. */
static int sharding_may_fit(const dw__problem *problem, const dw_layout *layout) {
    double optimizer, host = problem->hardware->host_memory.value;
    double least = least_memory(problem, layout, &optimizer);
    if (layout->offload_optimizer &&
        (problem->hardware->host_bandwidth.value <= 0 || (host > 0 && optimizer > host)))
        return 0;
    return least <= problem->hardware->memory.value;
}

/* Sets the least recomputation allowed. More never makes a step shorter. */
static void set_least_recomputation(const trial *t, dw_layout *layout) {
    const dw__limits *limits = &t->problem->limits;
    layout->recompute = limits->set.recompute && !limits->set.recompute_layers
                            ? limits->low.recompute
                            : DW_RECOMPUTE_NONE;
    layout->recompute_layers = 0;
}

/* Keeps the schedules that can be within `most` seconds for any sharding. `least` receives each one's seconds without
 * data parallel traffic and the optimizer. */
static int keep_turns(const trial *t, dw_layout *layout, dw__turns *turns, int count,
                      double *least) {
    int kept = 0;
    set_least_recomputation(t, layout);
    for (int at = 0; at < count; at++) {
        set_turns(t->problem, &turns[at], layout);
        double seconds = dw__turns_seconds(&dw__constants_default, t->problem->model,
                                           t->problem->hardware, layout, t->stages);
        if (least_step(t, seconds) > t->most) continue;
        least[kept] = seconds;
        turns[kept++] = turns[at];
    }
    t->found->predicted += count;
    return kept;
}

/* Sorts the schedules, fastest first. */
static void order_turns(dw__turns *turns, double *least, int count) {
    for (int at = 1; at < count; at++) {
        dw__turns held = turns[at];
        double seconds = least[at];
        int to = at;
        for (; to > 0 && least[to - 1] > seconds; to--) {
            turns[to] = turns[to - 1];
            least[to] = least[to - 1];
        }
        turns[to] = held;
        least[to] = seconds;
    }
}

/* Lower bound of a sharding's seconds. Recomputation hides more of its traffic, but takes longer than what it hides.
 * overlaps[o]: some schedule overlaps the expert exchange as by o of dw__overlap. Returns HUGE_VAL if no schedule is
 * fast enough. */
static double sharding_seconds(const trial *t, dw_layout *layout, const int *overlaps) {
    const dw_model_sizes *model = t->problem->model;
    double computing;
    set_least_recomputation(t, layout);
    /* The most overlap has the least computation; the least overlap leaves the most time to hide traffic. */
    dw__overlap most = DW__OVERLAPS - 1, least = DW__OVERLAP_NONE;
    while (most > 0 && !overlaps[most]) most--;
    while (least < most && !overlaps[least]) least++;
    double seconds = dw__sharding_seconds(&dw__constants_default, model, t->problem->hardware,
                                          layout, most, t->stages, &computing);
    t->found->predicted++;
    if (least_step(t, computing + seconds) > ceiling_of(t)) return HUGE_VAL;
    if (least == most || !model->experts) return seconds;
    t->found->predicted++;
    return dw__sharding_seconds(&dw__constants_default, model, t->problem->hardware, layout, least,
                                t->stages, &computing);
}

/* Tries all shardings with these schedules for the layout's split of layers. The trial's `stages` must belong to that
 * split. */
static void try_split(trial *t, const dw__mesh *mesh, dw_layout *layout, dw__turns *turns,
                      double *least, int turn_count) {
    const dw__problem *problem = t->problem;
    dw__sharding shardings[DW__SHARDINGS_MOST];
    int plain[DW__TURNS_MOST] = {
        /* 1: a schedule needs neither recomputation nor offloading with this sharding */
        0};
    int sharding_count = dw__space_shardings(problem, mesh, shardings);
    dw__turns plainest = turns[0];
    int overlaps[DW__OVERLAPS] = {0};
    order_turns(turns, least, turn_count);
    for (int at = 0; at < turn_count; at++) {
        set_turns(problem, &turns[at], layout);
        overlaps[dw__overlap_of(layout)] = 1;
    }
    for (int s = 0; s < sharding_count; s++) {
        set_sharding(&shardings[s], layout);
        set_turns(problem, &plainest, layout);
        if (!shardings[s].offload) memset(plain, 0, sizeof plain);
        double own = sharding_seconds(t, layout, overlaps);
        if (own == HUGE_VAL || !sharding_may_fit(problem, layout)) continue;
        for (int at = 0; at < turn_count; at++) {
            if (plain[at] || least_step(t, least[at] + own) > ceiling_of(t)) continue;
            set_turns(problem, &turns[at], layout);
            plain[at] = try_recomputation(t, layout);
            layout->offload_layers = 0;
        }
    }
}

/* Tries stages with different numbers of layers, which help if the head is heavy or the layers do not divide. */
static void try_uneven(trial *t, const dw__mesh *mesh, dw_layout *layout) {
    const dw__turns plainest = {DW_SCHEDULE_1F1B, 1};
    dw__ends ends[DW__ENDS_MOST];
    set_least_recomputation(t, layout);
    set_turns(t->problem, &plainest, layout);
    dw__turns_seconds(&dw__constants_default, t->problem->model, t->problem->hardware, layout,
                      t->stages);
    double head = dw__head_layers(t->problem->model, layout, t->stages);
    int count = dw__space_ends(t->problem, mesh, head, ends);
    for (int at = 0; at < count; at++) {
        dw__turns turns[DW__TURNS_MOST];
        double least[DW__TURNS_MOST];
        dw__stage_memo stages = {.layers = t->memo};
        trial split = *t;
        split.stages = &stages;
        split.ends = &ends[at];
        split.most = ceiling_of(t);
        layout->first_stage_layers = ends[at].first;
        layout->last_stage_layers = ends[at].last;
        int turn_count = dw__space_turns(t->problem, mesh, &ends[at], turns);
        turn_count = keep_turns(&split, layout, turns, turn_count, least);
        if (turn_count) try_split(&split, mesh, layout, turns, least, turn_count);
    }
}

void dw__mesh_best(const dw__problem *problem, const dw__mesh *mesh, double most, int simplest,
                   dw__stage_memo *stages, dw__found *found) {
    *found = (dw__found){0};
    dw__turns turns[DW__TURNS_MOST];
    double least[DW__TURNS_MOST];
    dw__layer_memo memo = {0};
    dw__stage_memo own_stages = {0};
    dw_layout layout;
    dw__mesh_layout(problem, mesh, &layout);
    /* The memo of stage times holds for one recomputation only. */
    trial t = {.problem = problem,
               .most = most,
               .simplest = simplest,
               .found = found,
               .memo = &memo,
               .stages = stages && !problem->limits.set.recompute ? stages : &own_stages,
               .rest = dw__step_rest_of(&dw__constants_default, problem->model, problem->hardware,
                                        &layout),
               .micro_batches = problem->global_batch / ((double)mesh->dp * mesh->micro_batch)};
    t.stages->layers = &memo;
    found->too_large = mesh->too_large;
    if (found->too_large) return;
    int uneven = mesh->pp > 1 && dw__space_may_be_uneven(problem);
    int turn_count = dw__space_turns(problem, mesh, NULL, turns);
    turn_count = keep_turns(&t, &layout, turns, turn_count, least);
    if (!turn_count && !uneven) return;
    int fits = dw__mesh_may_fit(problem, mesh);
    found->too_large = !fits && !uneven;
    if (turn_count && fits) try_split(&t, mesh, &layout, turns, least, turn_count);
    if (uneven) try_uneven(&t, mesh, &layout);
}

static int fits_host(const dw_prediction *p) {
    return p->host_capacity <= 0 || p->host_optimizer + p->host_activations <= p->host_capacity;
}

int dw__needs_less(const dw_prediction *a, const dw_prediction *b) {
    int host[2] = {fits_host(a), fits_host(b)};
    if (a->fits != b->fits) return a->fits;
    if (host[0] != host[1]) return host[0];
    return a->allocated < b->allocated;
}

/* Tries every level of recomputation, with the fewest and the most layers offloaded. */
static void try_smallest(const trial *t, dw_layout *layout, dw__found *found) {
    for (int r = DW_RECOMPUTE_NONE; r <= DW_RECOMPUTE_FULL; r++) {
        int layers[2];
        if (!DW__ALLOWS(&t->problem->limits, recompute, r)) continue;
        layout->recompute = (dw_recompute)r;
        layout->recompute_layers = 0;
        if (!offload_range(t, layout, &layers[0], &layers[1])) continue;
        for (int at = 0; at < 2 && (at == 0 || layers[1] > layers[0]); at++) {
            dw_prediction p;
            layout->offload_layers = layers[at];
            predict(t->problem, layout, t->memo, &p);
            found->predicted++;
            if (found->found && !dw__needs_less(&p, &found->prediction)) continue;
            found->found = 1;
            found->layout = *layout;
            found->prediction = p;
        }
    }
}

void dw__mesh_smallest(const dw__problem *problem, const dw__mesh *mesh, dw__found *found) {
    *found = (dw__found){0};
    dw__sharding shardings[DW__SHARDINGS_MOST];
    dw__turns turns[DW__TURNS_MOST];
    int sharding_count = dw__space_shardings(problem, mesh, shardings),
        turn_count = dw__space_turns(problem, mesh, NULL, turns);
    dw__layer_memo memo = {0};
    trial t = {.problem = problem, .found = found, .memo = &memo};
    dw_layout layout;
    dw__mesh_layout(problem, mesh, &layout);
    for (int s = 0; s < sharding_count; s++) {
        if (shardings[s].shard && !problem->limits.set.shard)
            continue; /* sharding over fewer ranks never needs less memory */
        set_sharding(&shardings[s], &layout);
        for (int at = 0; at < turn_count; at++) {
            set_turns(problem, &turns[at], &layout);
            try_smallest(&t, &layout, found);
        }
    }
}
