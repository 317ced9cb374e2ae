/* Simulates the operation lists of all ranks. A rank runs its operations in order, each as soon as its input has
 * arrived. No list waits for a list that waits for it, so arrival times are always known and no queue of events is
 * needed: a rank runs until an input is missing, and continues when that input has been sent. */
#include "simulate/simulate_internal.h"
#include <math.h>
#include <stdlib.h>

/* Up to this number of points, memory is recorded layer by layer; above it, with one point per operation. */
enum { LAYERED_MOST = 1 << 18 };

typedef struct rank_state {
    size_t next; /* index of its next operation */
    double free_at[DW_STREAMS];
    double bytes;     /* of activations */
    double mixed_end; /* end of the operations that run mixed */
    double began;     /* start of its first operation */
    int in_flight;
    int queued;
} rank_state;

typedef struct chunk_state {
    int started, left; /* left: operations that still add to its gradients */
    double gathered;
} chunk_state;

typedef struct simulator {
    dw_simulation *simulation;
    const dw__schedule *schedule;
    rank_state *ranks;
    chunk_state *chunks;
    /* Arrival of activations and gradients: [micro_batch * positions + position]; NaN until it is known. */
    double *arrived[2];
    int *queue, queued;
    int positions;
} simulator;

static dw_status record(simulator *s, int rank, dw_stream stream, dw_event_kind kind, int chunk,
                        int micro_batch, double start, double end) {
    dw_event event = {start,           end,          micro_batch, (int16_t)rank, (int16_t)chunk,
                      (uint8_t)stream, (uint8_t)kind};
    s->simulation->ranks[rank].busy[stream] += end - start;
    return DW_PUSH(&s->simulation->events, event);
}

/* Records the bytes that the rank holds from `time` on. */
static dw_status hold(simulator *s, int rank, double time, double bytes) {
    dw__memory_line *line = &s->simulation->memory[rank];
    dw_simulated_rank *summary = &s->simulation->ranks[rank];
    bytes += summary->constant_bytes;
    if (bytes > summary->peak_bytes) {
        summary->peak_bytes = bytes;
        summary->peak_time = time;
    }
    if (line->count && line->items[line->count - 1].time >= time) {
        line->items[line->count - 1].bytes = bytes;
        return DW_OK;
    }
    return DW_PUSH(line, ((dw_memory_point){time, bytes}));
}

static void wake(simulator *s, int rank) {
    if (s->ranks[rank].queued) return;
    s->ranks[rank].queued = 1;
    s->queue[s->queued++] = rank;
}

/* Sends the result of an operation at `position` to the next position: forward if `backward` is 0. */
static dw_status pass_on(simulator *s, int rank, int chunk, int micro_batch, int position,
                         int backward, double time) {
    int to = backward ? position - 1 : position + 1, to_rank, to_chunk;
    size_t at = (size_t)micro_batch * (size_t)s->positions;
    if (to == s->positions) { /* the last position computes the loss, so the gradient is here */
        s->arrived[1][at + (size_t)position] = time;
        return DW_OK;
    }
    if (to < 0) return DW_OK;
    dw__schedule_place(s->schedule, micro_batch, to, &to_rank, &to_chunk);
    double send = s->simulation->costs.ranks[rank].send, start = time;
    if (to_rank != rank) {
        int next = to_rank == (rank + 1) % s->schedule->stages;
        dw_stream stream = next ? DW_STREAM_SEND_NEXT : DW_STREAM_SEND_PREVIOUS;
        double *free_at = &s->ranks[rank].free_at[stream];
        if (*free_at > start) start = *free_at;
        time = start + send;
        *free_at = time;
        if (send > 0)
            DW_RETURN_IF_FAILED(record(s, rank, stream,
                                       backward ? DW_EVENT_SEND_GRADIENT : DW_EVENT_SEND_ACTIVATION,
                                       chunk, micro_batch, start, time));
    }
    s->arrived[backward][at + (size_t)to] = time;
    wake(s, to_rank);
    return DW_OK;
}

/* Records communication on its stream at `start`, or as soon after as the stream is free. */
static dw_status put(simulator *s, int rank, dw_stream stream, dw_event_kind kind,
                     const dw__operation *operation, double start, double end) {
    double *free_at = &s->ranks[rank].free_at[stream];
    if (*free_at > start) start = *free_at;
    if (end <= start) return DW_OK;
    *free_at = end;
    return record(s, rank, stream, kind, operation->chunk, operation->micro_batch, start, end);
}

/* Records an operation and the traffic beside it. Traffic inside layers is recorded once per kind, not per layer: a
 * piece of the computation with the traffic that it hides, then the exposed rest. Gathering starts with the
 * operation, and the reduction ends with it. */
static dw_status simulate_operation(simulator *s, int rank, const dw__operation *operation,
                                    const dw__beside_cost *first, const dw__beside_cost *second,
                                    double start, double seconds) {
    dw_simulated_rank *summary = &s->simulation->ranks[rank];
    const dw__traffic_cost *gather = &first->gather, *reduce = &second->reduce,
                           *host = &first->host;
    dw_event_kind kind = (dw_event_kind)operation->kind;
    double compute = seconds - gather->exposed - reduce->exposed - host->exposed, hidden = 0;
    int kinds = 0;
    for (int at = 0; at < DW__INSIDE; at++) {
        const dw__traffic_cost *traffic = &first->inside[at];
        if (traffic->wire <= 0) continue;
        compute -= traffic->exposed;
        hidden += traffic->wire - traffic->exposed;
        kinds++;
    }
    double time = start + gather->exposed;
    for (int at = 0; at < DW__INSIDE; at++) {
        const dw__traffic_cost *traffic = &first->inside[at];
        dw_stream stream = (dw_stream)(DW_STREAM_TENSOR + at);
        if (traffic->wire <= 0) continue;
        double below = traffic->wire - traffic->exposed;
        double piece = compute * (hidden > 0 ? below / hidden : 1.0 / kinds), end = time + piece;
        DW_RETURN_IF_FAILED(record(s, rank, DW_STREAM_COMPUTE, kind, operation->chunk,
                                   operation->micro_batch, time, end));
        time = end + traffic->exposed;
        DW_RETURN_IF_FAILED(put(s, rank, stream, (dw_event_kind)(DW_EVENT_TENSOR + at), operation,
                                fmax(start, end - below), time));
        summary->exposed[stream] += traffic->exposed;
    }
    double end = start + seconds;
    if (!kinds)
        DW_RETURN_IF_FAILED(record(s, rank, DW_STREAM_COMPUTE, kind, operation->chunk,
                                   operation->micro_batch, time, time + compute));
    DW_RETURN_IF_FAILED(
        put(s, rank, DW_STREAM_DATA, DW_EVENT_GATHER, operation, start, start + gather->wire));
    DW_RETURN_IF_FAILED(put(s, rank, DW_STREAM_DATA, DW_EVENT_REDUCE, operation,
                            fmax(start, end - reduce->wire), reduce->wire > 0 ? end : start));
    dw_event_kind copy = kind == DW_EVENT_FORWARD ? DW_EVENT_TO_HOST : DW_EVENT_FROM_HOST;
    DW_RETURN_IF_FAILED(put(s, rank, DW_STREAM_HOST, copy, operation, fmax(start, end - host->wire),
                            host->wire > 0 ? end : start));
    summary->exposed[DW_STREAM_DATA] += gather->exposed + reduce->exposed;
    summary->exposed[DW_STREAM_HOST] += host->exposed;
    summary->compute += compute;
    summary->occupied += seconds;
    return DW_OK;
}

/* Gathers the parameters of a step, chunk after chunk in the order of their use. The first gather is timed so that it
 * ends when the first input is `ready`: an earlier start would only make the step look longer. */
static dw_status gather(simulator *s, int rank, double ready) {
    int chunks = s->schedule->chunks, first = s->schedule->ranks[rank].items[0].chunk;
    const dw__chunk_cost *costs = &s->simulation->costs.chunks[rank * chunks];
    double start = ready > costs[first].gather_exposed ? ready - costs[first].gather_exposed : 0;
    s->simulation->ranks[rank].start = start;
    s->simulation->ranks[rank].exposed[DW_STREAM_DATA] += costs[first].gather_exposed;
    for (int at = 0; at < chunks; at++) {
        int chunk = (first + at) % chunks;
        if (costs[chunk].gather <= 0) continue;
        double end = start + costs[chunk].gather;
        s->chunks[rank * chunks + chunk].gathered = start + costs[chunk].gather_exposed;
        DW_RETURN_IF_FAILED(
            record(s, rank, DW_STREAM_DATA, DW_EVENT_GATHER, chunk, -1, start, end));
        s->ranks[rank].free_at[DW_STREAM_DATA] = start = end;
    }
    return DW_OK;
}

/* Memory of ZeRO-3, layer by layer: the parameters of this layer and the next are gathered (2 bytes per element), and
 * in backward a layer's gradients are whole (4 bytes). Forward adds each layer's activations, backward frees them;
 * logits exist at the loss. `bytes` is held before a forward, or at the start of a backward. */
static dw_status hold_layers(simulator *s, int rank, const dw__chunk_cost *cost, int forward,
                             double bytes, double start, double seconds) {
    const double layer = cost->layer_elements,
                 rest = fmax(0, s->simulation->costs.ranks[rank].busy_bytes - 8 * layer);
    for (int at = 0; at < cost->layers; at++) {
        const int last = at == cost->layers - 1, at_loss = forward ? last : at == 0;
        double held =
            bytes + rest + 2 * layer * (last ? 1 : 2) + (at_loss ? cost->logits_bytes : 0);
        held += cost->kept_bytes * (forward ? at + 1 : -at) / cost->layers;
        if (!forward) held += 4 * layer + cost->again_bytes;
        DW_RETURN_IF_FAILED(hold(s, rank, start + seconds * at / cost->layers, held));
    }
    return DW_OK;
}

static dw_status run_operation(simulator *s, int rank, const dw__operation *operation,
                               double ready) {
    rank_state *state = &s->ranks[rank];
    size_t slot = (size_t)rank * (size_t)s->schedule->chunks + (size_t)operation->chunk;
    const dw__chunk_cost *cost = &s->simulation->costs.chunks[slot];
    dw_simulated_rank *summary = &s->simulation->ranks[rank];
    chunk_state *chunk = &s->chunks[slot];
    const dw__beside_cost *first = &cost->beside_input, *second = &cost->beside_weight;
    double start = state->free_at[DW_STREAM_COMPUTE], seconds, transient;
    if (ready > start) start = ready;
    int forward = operation->kind == DW_EVENT_FORWARD, done = 0;
    transient = cost->logits_bytes + s->simulation->costs.ranks[rank].busy_bytes;
    switch (operation->kind) {
    case DW_EVENT_FORWARD:
        seconds = cost->forward;
        first = second = &cost->beside_forward;
        if (!chunk->started && chunk->gathered > start) {
            if (state->next > 0) summary->exposed[DW_STREAM_DATA] += chunk->gathered - start;
            start = chunk->gathered;
        }
        chunk->started = 1;
        state->bytes += cost->kept_bytes;
        if (++state->in_flight > summary->peak_in_flight)
            summary->peak_in_flight = state->in_flight;
        break;
    case DW_EVENT_BACKWARD_INPUT:
        seconds = cost->input;
        second = first;
        transient += cost->again_bytes;
        break;
    case DW_EVENT_BACKWARD_WEIGHT:
        seconds = cost->weight;
        first = second;
        done = 1;
        break;
    default:
        seconds = cost->input + cost->weight;
        transient += cost->again_bytes;
        done = 1;
    }
    double end = start + seconds;
    DW_RETURN_IF_FAILED(simulate_operation(s, rank, operation, first, second, start, seconds));
    if (state->next == 0) state->began = start;
    if (cost->layers && s->schedule->ranks[rank].count <= LAYERED_MOST / (size_t)cost->layers)
        DW_RETURN_IF_FAILED(hold_layers(s, rank, cost, forward,
                                        state->bytes - (forward ? cost->kept_bytes : 0), start,
                                        seconds));
    else
        DW_RETURN_IF_FAILED(hold(s, rank, start, state->bytes + transient));
    double frees = s->simulation->costs.input_frees;
    if (operation->kind == DW_EVENT_BACKWARD_INPUT) state->bytes -= frees * cost->kept_bytes;
    if (done) {
        state->bytes -=
            cost->kept_bytes * (operation->kind == DW_EVENT_BACKWARD_WEIGHT ? 1 - frees : 1);
        if (--state->in_flight == 0) state->bytes = 0; /* removes rounding errors */
    }
    DW_RETURN_IF_FAILED(hold(s, rank, end, state->bytes));
    /* adds the wait for a neighbour, which does not count as computation */
    state->free_at[DW_STREAM_COMPUTE] = end + s->simulation->costs.ranks[rank].sync * seconds;
    double out = end;
    if (operation->mixed == 1) {
        const dw__chunk_cost *with = cost - operation->chunk + operation[1].chunk;
        state->mixed_end = end + with->input + with->weight;
    }
    if (operation->mixed) out = fmax(end, state->mixed_end);
    if (operation->kind != DW_EVENT_BACKWARD_WEIGHT) {
        int position = dw__schedule_position(s->schedule, rank, operation->chunk);
        DW_RETURN_IF_FAILED(
            pass_on(s, rank, operation->chunk, operation->micro_batch, position, !forward, out));
    }
    summary->pipeline = state->free_at[DW_STREAM_COMPUTE] - state->began;
    if (!done || --chunk->left > 0 || cost->reduce <= 0) return DW_OK;
    double *free_at = &state->free_at[DW_STREAM_DATA], begin = end + cost->reduce_exposed;
    begin -= cost->reduce;
    if (*free_at > begin) begin = *free_at;
    *free_at = begin + cost->reduce;
    return record(s, rank, DW_STREAM_DATA, DW_EVENT_REDUCE, operation->chunk, -1, begin, *free_at);
}

/* Returns when the input of an operation arrives, or NaN if that is not known yet. */
static double ready_at(const simulator *s, int rank, const dw__operation *operation) {
    if (operation->kind == DW_EVENT_BACKWARD_WEIGHT) return 0;
    int position = dw__schedule_position(s->schedule, rank, operation->chunk);
    size_t at = (size_t)operation->micro_batch * (size_t)s->positions + (size_t)position;
    return s->arrived[operation->kind != DW_EVENT_FORWARD][at];
}

/* Runs the rank until an input is missing. */
static dw_status run_rank(simulator *s, int rank) {
    rank_state *state = &s->ranks[rank];
    const dw__operations *list = &s->schedule->ranks[rank];
    for (; state->next < list->count; state->next++) {
        const dw__operation *operation = &list->items[state->next];
        double ready = ready_at(s, rank, operation);
        double with = operation->mixed == 1 ? ready_at(s, rank, operation + 1) : ready;
        if (isnan(ready) || isnan(with)) return DW_OK;
        if (state->next == 0) DW_RETURN_IF_FAILED(gather(s, rank, ready));
        DW_RETURN_IF_FAILED(run_operation(s, rank, operation, ready > with ? ready : with));
    }
    return DW_OK;
}

static dw_status begin_rank(simulator *s, int rank) {
    int chunks = s->schedule->chunks;
    s->simulation->ranks[rank].constant_bytes = s->simulation->costs.ranks[rank].constant_bytes;
    DW_RETURN_IF_FAILED(hold(s, rank, 0, 0));
    const dw__operations *list = &s->schedule->ranks[rank];
    for (size_t at = 0; at < list->count; at++)
        if (list->items[at].kind == DW_EVENT_BACKWARD ||
            list->items[at].kind == DW_EVENT_BACKWARD_WEIGHT)
            s->chunks[rank * chunks + list->items[at].chunk].left++;
    wake(s, rank);
    return DW_OK;
}

static dw_status finish_rank(simulator *s, int rank) {
    rank_state *state = &s->ranks[rank];
    const dw__rank_cost *cost = &s->simulation->costs.ranks[rank];
    dw_simulated_rank *summary = &s->simulation->ranks[rank];
    if (state->next < s->schedule->ranks[rank].count)
        return dw__fail(DW_INTERNAL, "the schedule %s deadlocked: rank %d waits forever",
                        dw_pipeline_schedule_name(s->schedule->schedule), rank);
    double last = state->free_at[DW_STREAM_COMPUTE], start = last;
    if (state->free_at[DW_STREAM_DATA] > start) start = state->free_at[DW_STREAM_DATA];
    summary->exposed[DW_STREAM_DATA] += start - last;
    double end = start + cost->optimizer;
    summary->optimizer = cost->optimizer + cost->fixed;
    summary->end = end + cost->fixed;
    if (cost->optimizer > 0)
        DW_RETURN_IF_FAILED(record(s, rank, cost->optimizer_stream, DW_EVENT_OPTIMIZER, -1, -1,
                                   fmax(start, state->free_at[cost->optimizer_stream]), end));
    if (cost->fixed > 0)
        DW_RETURN_IF_FAILED(
            record(s, rank, DW_STREAM_COMPUTE, DW_EVENT_FIXED, -1, -1, end, summary->end));
    summary->wait = summary->end - summary->start - summary->compute - summary->optimizer;
    for (int stream = 0; stream < DW_STREAMS; stream++) summary->wait -= summary->exposed[stream];
    if (summary->wait < 1e-12 * summary->end) summary->wait = 0; /* removes rounding errors */
    return hold(s, rank, summary->end, 0);
}

static int compare_events(const void *left, const void *right) {
    const dw_event *a = left, *b = right;
    if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
    if (a->stream != b->stream) return a->stream < b->stream ? -1 : 1;
    if (a->start != b->start) return a->start < b->start ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

/* Returns the seconds of [start, end] during which the rank computes. *from is the first event on its compute stream
 * that can still overlap, provided that intervals come in order. */
static double covered(const dw_event *compute, size_t count, size_t *from, double start,
                      double end) {
    double sum = 0;
    while (*from < count && compute[*from].end <= start) ++*from;
    for (size_t at = *from; at < count && compute[at].start < end; at++) {
        double a = compute[at].start > start ? compute[at].start : start;
        double b = compute[at].end < end ? compute[at].end : end;
        if (b > a) sum += b - a;
    }
    return sum;
}

static void summarize(dw_simulation *simulation) {
    const dw_event *events = simulation->events.items;
    size_t count = simulation->events.count, at = 0;
    dw_simulation_figures *f = &simulation->figures;
    double covered_sum = 0, communication_sum = 0, busiest = 0, span = 0, longest = 0, busy = 0;
    int ranks = simulation->schedule.stages;
    for (int rank = 0; rank < ranks; rank++) {
        dw_simulated_rank *summary = &simulation->ranks[rank];
        size_t first = at, compute, from = 0;
        while (at < count && events[at].rank == rank && events[at].stream == DW_STREAM_COMPUTE)
            at++;
        compute = at - first;
        double hidden = 0, communication = 0;
        for (int stream = -1; at < count && events[at].rank == rank; at++) {
            if (events[at].stream != stream) from = 0;
            stream = events[at].stream;
            if (events[at].kind == DW_EVENT_OPTIMIZER) continue; /* runs on the host */
            communication += events[at].end - events[at].start;
            double part = covered(events + first, compute, &from, events[at].start, events[at].end);
            summary->hidden[stream] += part;
            hidden += part;
        }
        summary->overlap = communication > 0 ? hidden / communication : 1;
        covered_sum += hidden;
        communication_sum += communication;
        if (summary->pipeline > span) span = summary->pipeline;
        if (summary->occupied > busiest) busiest = summary->occupied;
        busy += summary->compute + summary->optimizer;
        /* A rank's step ends when it can begin the next one. */
        if (summary->end - summary->start > longest) longest = summary->end - summary->start;
        if (summary->peak_bytes > f->peak_bytes) {
            f->peak_bytes = summary->peak_bytes;
            f->peak_time = summary->peak_time;
            f->peak_rank = rank;
        }
    }
    f->ranks = ranks;
    f->chunks = simulation->schedule.chunks;
    f->micro_batches = simulation->schedule.micro_batches;
    f->events = count;
    f->seconds = longest;
    f->bubble_fraction = span > 0 ? 1 - busiest / span : 0;
    if (f->bubble_fraction < 1e-12) f->bubble_fraction = 0; /* removes rounding errors */
    f->idle_fraction = longest > 0 ? 1 - busy / ranks / longest : 0;
    f->overlap = communication_sum > 0 ? covered_sum / communication_sum : 1;
}

dw_status dw__simulate_events(dw_simulation *simulation) {
    const dw__schedule *schedule = &simulation->schedule;
    dw_status status = DW_OK;
    int ranks = schedule->stages;
    simulator s = {.simulation = simulation, .schedule = schedule};
    s.positions = dw__schedule_positions(schedule);
    size_t arrivals = (size_t)schedule->micro_batches * (size_t)s.positions;
    s.ranks = dw__calloc((size_t)ranks, sizeof *s.ranks);
    s.chunks = dw__calloc((size_t)ranks * (size_t)schedule->chunks, sizeof *s.chunks);
    s.queue = dw__calloc((size_t)ranks, sizeof *s.queue);
    for (int way = 0; way < 2; way++) s.arrived[way] = dw__malloc(arrivals * sizeof(double));
    if (!s.ranks || !s.chunks || !s.queue || !s.arrived[0] || !s.arrived[1]) {
        status = dw__fail_memory("a simulated step", arrivals * 2 * sizeof(double));
        goto cleanup;
    }
    for (size_t at = 0; at < arrivals; at++)
        s.arrived[0][at] = at % (size_t)s.positions ? NAN : 0, s.arrived[1][at] = NAN;
    for (int rank = ranks - 1; rank >= 0; rank--) DW_TRY(begin_rank(&s, rank));
    while (s.queued) {
        int rank = s.queue[--s.queued];
        s.ranks[rank].queued = 0;
        DW_TRY(run_rank(&s, rank));
    }
    for (int rank = 0; rank < ranks; rank++) DW_TRY(finish_rank(&s, rank));
    qsort(simulation->events.items, simulation->events.count, sizeof *simulation->events.items,
          compare_events);
    summarize(simulation);
cleanup:
    dw__free(s.ranks);
    dw__free(s.chunks);
    dw__free(s.queue);
    dw__free(s.arrived[0]);
    dw__free(s.arrived[1]);
    return status;
}

dw_status dw__simulation_begin(dw_pipeline_schedule schedule, int stages, int chunks,
                               int micro_batches, dw_simulation **simulation) {
    dw_simulation *made = dw__calloc(1, sizeof *made);
    if (!made) return dw__fail_memory("a simulation", sizeof *made);
    dw_status status =
        dw__schedule_create(schedule, stages, chunks, micro_batches, &made->schedule);
    if (status != DW_OK) goto cleanup;
    size_t ranks = (size_t)stages, slots = ranks * (size_t)made->schedule.chunks;
    made->costs.chunks = dw__calloc(slots, sizeof *made->costs.chunks);
    made->costs.ranks = dw__calloc(ranks, sizeof *made->costs.ranks);
    made->memory = dw__calloc(ranks, sizeof *made->memory);
    made->ranks = dw__calloc(ranks, sizeof *made->ranks);
    if (!made->costs.chunks || !made->costs.ranks || !made->memory || !made->ranks)
        status = dw__fail_memory("a simulation", slots * sizeof *made->costs.chunks);
cleanup:
    if (status != DW_OK) {
        dw_simulation_destroy(made);
        return status;
    }
    *simulation = made;
    return DW_OK;
}

void dw_simulation_destroy(dw_simulation *simulation) {
    if (!simulation) return;
    for (int rank = 0; simulation->memory && rank < simulation->schedule.stages; rank++)
        dw__free(simulation->memory[rank].items);
    dw__free(simulation->memory);
    dw_hardware_destroy(simulation->hardware);
    dw__free(simulation->ranks);
    dw__free(simulation->costs.chunks);
    dw__free(simulation->costs.ranks);
    dw__free(simulation->events.items);
    dw__schedule_free(&simulation->schedule);
    dw__free(simulation);
}
