/* Finds an order for schedules with split backward (ZB-H1, ZB-H2, ZB-V) and given times. The handcrafted orders have
 * the idle time that their papers state only if forward and both backwards take equally long; otherwise stages wait.
 * Here a free rank takes the operation that is ready: backward of inputs first, because other ranks wait for it; then
 * a forward, if its activations have room; else weight gradients. It waits only if nothing is ready. The rule follows
 * Qi et al. 2024, section 3.1, which weighs bubbles one by one. Several variants are tried beside the handcrafted
 * order, and the shortest result is kept. The schedule's memory limit does not change. */
#include "simulate/simulate_internal.h"
#include <math.h>

enum { KINDS = 3 }; /* forward, backward of inputs, backward of weights */

typedef struct variant {
    /* 1: before its first backward a rank takes no more forwards than the handcrafted order has */
    int ramp;
    /* 1: forwards and backwards of inputs in the handcrafted order, weight gradients in gaps */
    int rule;
    /* Weight gradients wait for an input that arrives within this part of their own time. */
    double patience;
} variant;

typedef struct rank_state {
    double free_at, start, decide_at;
    double sent[2];     /* when the links to the next and to the previous rank are free */
    double held;        /* activations, in chunks of one micro-batch */
    int done[2][KINDS]; /* counts for each chunk */
    int backwards;
    size_t next; /* index in the handcrafted order */
} rank_state;

typedef struct orderer {
    const dw_simulation *simulation;
    const dw__schedule *schedule;
    const dw__operations *rule; /* the handcrafted order */
    int as_it_is;               /* 1: uses that order, including weight gradients */
    variant how;
    rank_state *ranks;
    /* Arrival of activations and gradients: [position * micro_batches + micro_batch]. */
    double *arrived[2];
    dw__operations *lists, *best;
    double limit, weight_kept;
    int positions;
} orderer;

static const dw__chunk_cost *cost_of(const orderer *o, int rank, int chunk) {
    return &o->simulation->costs.chunks[rank * o->schedule->chunks + chunk];
}

/* Returns the number of forwards before a rank's first backward: those that fill its waiting time if F = B. */
static int ramp_of(const orderer *o, int rank) {
    int stages = o->schedule->stages;
    switch (o->schedule->schedule) {
    case DW_SCHEDULE_ZB_H1: return stages - rank;
    case DW_SCHEDULE_ZB_H2: return 2 * (stages - rank) - 1;
    default: return 2 * stages;
    }
}

/* Returns when the input of the next operation of this kind arrives, or HUGE_VAL if that is unknown or none is
 * left. */
static double ready_at(const orderer *o, int rank, int chunk, int kind) {
    const rank_state *state = &o->ranks[rank];
    int at = state->done[chunk][kind], count = o->schedule->micro_batches;
    if (at == count) return HUGE_VAL;
    if (kind == 2) return at < state->done[chunk][1] ? state->free_at : HUGE_VAL;
    if (kind == 1 && at >= state->done[chunk][0]) return HUGE_VAL;
    int position = dw__schedule_position(o->schedule, rank, chunk);
    return o->arrived[kind][(size_t)position * (size_t)count + (size_t)at];
}

static int has_room(const orderer *o, int rank, int chunk) {
    const rank_state *state = &o->ranks[rank];
    /* Reserves room for the second chunk, so that a micro-batch on the rank can always continue. */
    double limit = o->limit - (o->schedule->chunks == 2 && chunk == 0 && !o->how.rule);
    if (state->held + 1 > limit + 1e-9) return 0;
    if (!o->how.ramp || state->backwards) return 1;
    return state->done[0][0] + state->done[1][0] < ramp_of(o, rank);
}

typedef struct choice {
    double start;
    int chunk, kind;
} choice;

static choice next_of_rule(const orderer *o, int rank) {
    size_t at = o->ranks[rank].next;
    if (at == o->rule[rank].count) return (choice){HUGE_VAL, 0, 0};
    const dw__operation *operation = &o->rule[rank].items[at];
    int kind = operation->kind == DW_EVENT_FORWARD          ? 0
               : operation->kind == DW_EVENT_BACKWARD_INPUT ? 1
                                                            : 2;
    double ready = fmax(o->ranks[rank].free_at, ready_at(o, rank, operation->chunk, kind));
    return (choice){ready, operation->chunk, kind};
}

/* Chooses the rank's next operation, and the time of that decision. */
static choice choose(const orderer *o, int rank) {
    if (o->as_it_is) return next_of_rule(o, rank);
    const rank_state *state = &o->ranks[rank];
    double now = state->free_at;
    choice soonest = {HUGE_VAL, 0, 0}, weight = {HUGE_VAL, 0, 2};
    if (o->how.rule) {
        soonest = next_of_rule(o, rank);
        if (soonest.kind == 0 && !has_room(o, rank, soonest.chunk)) soonest.start = HUGE_VAL;
    }
    for (int kind = 1; kind >= 0 && !o->how.rule; kind--) {
        for (int chunk = o->schedule->chunks - 1; chunk >= 0; chunk--) {
            if (kind == 0 && !has_room(o, rank, chunk)) continue;
            double ready = fmax(now, ready_at(o, rank, chunk, kind));
            if (ready < soonest.start) soonest = (choice){ready, chunk, kind};
        }
    }
    for (int chunk = o->schedule->chunks - 1; chunk >= 0; chunk--) {
        if (ready_at(o, rank, chunk, 2) > now) continue;
        if (weight.start <= now && state->done[chunk][2] >= state->done[weight.chunk][2]) continue;
        weight = (choice){now, chunk, 2};
    }
    if (weight.start > now) return soonest;
    double wait = o->how.patience * cost_of(o, rank, weight.chunk)->weight;
    return soonest.start <= now + wait ? soonest : weight;
}

static void arrive(orderer *o, int rank, int chunk, int micro_batch, int backward, double time) {
    int position = dw__schedule_position(o->schedule, rank, chunk), to_rank, to_chunk;
    int to = backward ? position - 1 : position + 1, count = o->schedule->micro_batches;
    if (to < 0) return;
    if (to == o->positions) { /* the loss */
        o->arrived[1][(size_t)position * (size_t)count + (size_t)micro_batch] = time;
        return;
    }
    dw__schedule_place(o->schedule, micro_batch, to, &to_rank, &to_chunk);
    if (to_rank != rank) {
        double *way = &o->ranks[rank].sent[to_rank != (rank + 1) % o->schedule->stages];
        if (*way > time) time = *way;
        time += o->simulation->costs.ranks[rank].send;
        *way = time;
    }
    o->arrived[backward][(size_t)to * (size_t)count + (size_t)micro_batch] = time;
    o->ranks[to_rank].decide_at = choose(o, to_rank).start;
}

static dw_status take(orderer *o, int rank, choice chosen) {
    static const uint8_t kinds[KINDS] = {DW_EVENT_FORWARD, DW_EVENT_BACKWARD_INPUT,
                                         DW_EVENT_BACKWARD_WEIGHT};
    rank_state *state = &o->ranks[rank];
    const dw__chunk_cost *cost = cost_of(o, rank, chosen.chunk);
    const double seconds[KINDS] = {cost->forward, cost->input, cost->weight},
                 holds[KINDS] = {1, o->weight_kept - 1, -o->weight_kept};
    int micro_batch = state->done[chosen.chunk][chosen.kind]++;
    dw__operation operation = {micro_batch, (int16_t)chosen.chunk, kinds[chosen.kind], 0};
    if (state->start < 0) state->start = chosen.start;
    state->free_at = chosen.start + seconds[chosen.kind];
    state->held += holds[chosen.kind];
    state->backwards += chosen.kind == 1;
    const dw__operations *rule = &o->rule[rank];
    if (o->as_it_is || chosen.kind < 2) state->next++;
    while (!o->as_it_is && state->next < rule->count &&
           rule->items[state->next].kind == DW_EVENT_BACKWARD_WEIGHT)
        state->next++;
    DW_RETURN_IF_FAILED(DW_PUSH(&o->lists[rank], operation));
    if (chosen.kind < 2)
        arrive(o, rank, chosen.chunk, micro_batch, chosen.kind == 1, state->free_at);
    state->decide_at = choose(o, rank).start;
    return DW_OK;
}

/* Orders all operations. `span` receives the longest time of any rank, or 0 if the variant deadlocks; the lists then
 * end early. */
static dw_status order(orderer *o, double *span) {
    int stages = o->schedule->stages, count = o->schedule->micro_batches;
    size_t left = (size_t)stages * (size_t)o->schedule->chunks * (size_t)count * KINDS;
    for (size_t at = 0; at < (size_t)o->positions * (size_t)count; at++)
        o->arrived[0][at] = at < (size_t)count ? 0 : HUGE_VAL, o->arrived[1][at] = HUGE_VAL;
    for (int rank = 0; rank < stages; rank++) {
        o->ranks[rank] = (rank_state){.start = -1};
        o->lists[rank].count = 0;
    }
    for (int rank = 0; rank < stages; rank++) o->ranks[rank].decide_at = choose(o, rank).start;
    for (*span = 0; left > 0; left--) {
        int next = 0;
        for (int rank = 1; rank < stages; rank++)
            if (o->ranks[rank].decide_at < o->ranks[next].decide_at) next = rank;
        if (o->ranks[next].decide_at == HUGE_VAL) return DW_OK;
        DW_RETURN_IF_FAILED(take(o, next, choose(o, next)));
    }
    for (int rank = 0; rank < stages; rank++)
        *span = fmax(*span, o->ranks[rank].free_at - o->ranks[rank].start);
    return DW_OK;
}

/* Keeps the variant's lists if they are shorter than the shortest so far. */
static dw_status try_variant(orderer *o, double *shortest) {
    double span;
    DW_RETURN_IF_FAILED(order(o, &span));
    if (span <= 0 || span >= *shortest * (1 - 1e-9)) return DW_OK;
    *shortest = span;
    for (int rank = 0; rank < o->schedule->stages; rank++) {
        dw__operations kept = o->best[rank];
        o->best[rank] = o->lists[rank];
        o->lists[rank] = kept;
    }
    return DW_OK;
}

dw_status dw__schedule_order(dw_simulation *simulation) {
    static const variant variants[] = {{1, 0, 0},    {1, 0, 0.25}, {1, 0, 0.5},  {1, 0, 0.75},
                                       {1, 0, 1},    {0, 0, 0},    {0, 0, 0.25}, {0, 0, 0.5},
                                       {0, 0, 0.75}, {0, 0, 1},    {0, 1, 0},    {0, 1, 0.25},
                                       {0, 1, 0.5},  {0, 1, 0.75}, {0, 1, 1}};
    dw__schedule *schedule = &simulation->schedule;
    dw_status status = DW_OK;
    int stages = schedule->stages;
    if (!schedule->split || schedule->schedule == DW_SCHEDULE_DUALPIPE || stages == 1) return DW_OK;
    orderer o = {.simulation = simulation, .schedule = schedule, .rule = schedule->ranks};
    o.positions = dw__schedule_positions(schedule);
    o.limit = schedule->schedule == DW_SCHEDULE_ZB_H1   ? stages
              : schedule->schedule == DW_SCHEDULE_ZB_H2 ? 2 * stages - 1
                                                        : 2 * stages;
    o.weight_kept = 1 - simulation->costs.input_frees;
    size_t arrivals = (size_t)o.positions * (size_t)schedule->micro_batches;
    o.ranks = dw__calloc((size_t)stages, sizeof *o.ranks);
    o.lists = dw__calloc((size_t)stages, sizeof *o.lists);
    o.best = dw__calloc((size_t)stages, sizeof *o.best);
    for (int way = 0; way < 2; way++) o.arrived[way] = dw__malloc(arrivals * sizeof(double));
    if (!o.ranks || !o.lists || !o.best || !o.arrived[0] || !o.arrived[1]) {
        status = dw__fail_memory("a pipeline's order", arrivals * 2 * sizeof(double));
        goto cleanup;
    }
    double shortest = HUGE_VAL;
    o.as_it_is = 1;
    DW_TRY(try_variant(&o, &shortest));
    o.as_it_is = 0;
    for (size_t at = 0; at < DW_COUNT(variants); at++) {
        o.how = variants[at];
        DW_TRY(try_variant(&o, &shortest));
    }
    for (int rank = 0; rank < stages; rank++) {
        dw__operations kept = schedule->ranks[rank];
        schedule->ranks[rank] = o.best[rank];
        o.best[rank] = kept;
    }
cleanup:
    for (int rank = 0; o.lists && o.best && rank < stages; rank++) {
        dw__free(o.lists[rank].items);
        dw__free(o.best[rank].items);
    }
    dw__free(o.lists);
    dw__free(o.best);
    dw__free(o.ranks);
    dw__free(o.arrived[0]);
    dw__free(o.arrived[1]);
    return status;
}
