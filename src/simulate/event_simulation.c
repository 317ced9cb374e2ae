/* Plays the lists of all ranks. A rank does its operations in their order, each as soon as what it needs has
 * arrived; what has arrived is known, because each list waits for nothing that waits for it. So no queue of
 * events is needed: a rank runs until it lacks something, and is taken up again when that has been sent. */
#include "simulate/simulate_internal.h"
#include <math.h>
#include <stdlib.h>

/* Points of memory that are drawn layer by layer; larger steps have one for each operation. */
enum { LAYERED_MOST = 1 << 18 };

typedef struct rank_state {
    size_t next; /* operation */
    double free_at[DW_STREAMS];
    double bytes;     /* of activations */
    double mixed_end; /* of operations that run mixed */
    double began;     /* its first operation */
    int in_flight;
    int queued;
} rank_state;

typedef struct chunk_state {
    int started, left; /* operations that add to its gradients */
    double gathered;
} chunk_state;

typedef struct player {
    dw_simulation *simulation;
    const dw__schedule *schedule;
    rank_state *ranks;
    chunk_state *chunks;
    double *arrived
        [2]; /* activations and gradients: [micro_batch * positions + position]; NaN: not yet */
    int *queue, queued;
    int positions;
} player;

static dw_status record(player *p, int rank, dw_stream stream, dw_event_kind kind, int chunk,
                        int micro_batch, double start, double end) {
    dw_event event = {start,           end,          micro_batch, (int16_t)rank, (int16_t)chunk,
                      (uint8_t)stream, (uint8_t)kind};
    p->simulation->ranks[rank].busy[stream] += end - start;
    return DW_PUSH(&p->simulation->events, event);
}

/* What the rank holds from `time` on. */
static dw_status hold(player *p, int rank, double time, double bytes) {
    dw__memory_line *line = &p->simulation->memory[rank];
    dw_simulated_rank *summary = &p->simulation->ranks[rank];
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

static void wake(player *p, int rank) {
    if (p->ranks[rank].queued) return;
    p->ranks[rank].queued = 1;
    p->queue[p->queued++] = rank;
}

/* The result of an operation at `position` goes to the next one: 0 forward, 1 backward. */
static dw_status pass_on(player *p, int rank, int chunk, int micro_batch, int position,
                         int backward, double time) {
    int to = backward ? position - 1 : position + 1, to_rank, to_chunk;
    size_t at = (size_t)micro_batch * (size_t)p->positions;
    if (to == p->positions) { /* the loss: its gradient is here */
        p->arrived[1][at + (size_t)position] = time;
        return DW_OK;
    }
    if (to < 0) return DW_OK;
    dw__schedule_place(p->schedule, micro_batch, to, &to_rank, &to_chunk);
    double send = p->simulation->costs.ranks[rank].send, start = time;
    if (to_rank != rank) {
        int next = to_rank == (rank + 1) % p->schedule->stages;
        dw_stream stream = next ? DW_STREAM_SEND_NEXT : DW_STREAM_SEND_PREVIOUS;
        double *free_at = &p->ranks[rank].free_at[stream];
        if (*free_at > start) start = *free_at;
        time = start + send;
        *free_at = time;
        if (send > 0)
            DW_RETURN_IF_FAILED(record(p, rank, stream,
                                       backward ? DW_EVENT_SEND_GRADIENT : DW_EVENT_SEND_ACTIVATION,
                                       chunk, micro_batch, start, time));
    }
    p->arrived[backward][at + (size_t)to] = time;
    wake(p, to_rank);
    return DW_OK;
}

/* On a stream of communication, as soon after `start` as it is free. */
static dw_status put(player *p, int rank, dw_stream stream, dw_event_kind kind,
                     const dw__operation *operation, double start, double end) {
    double *free_at = &p->ranks[rank].free_at[stream];
    if (*free_at > start) start = *free_at;
    if (end <= start) return DW_OK;
    *free_at = end;
    return record(p, rank, stream, kind, operation->chunk, operation->micro_batch, start, end);
}

/* An operation and what runs beside it. Traffic among its layers is drawn once for each kind, not for each
 * layer: a piece of the computation with what it hides below it, then what nothing hides. Parameters are
 * gathered from its beginning, gradients reduced up to its end. */
static dw_status play_operation(player *p, int rank, const dw__operation *operation,
                                const dw__beside_cost *first, const dw__beside_cost *second,
                                double start, double seconds) {
    dw_simulated_rank *summary = &p->simulation->ranks[rank];
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
        DW_RETURN_IF_FAILED(record(p, rank, DW_STREAM_COMPUTE, kind, operation->chunk,
                                   operation->micro_batch, time, end));
        time = end + traffic->exposed;
        DW_RETURN_IF_FAILED(put(p, rank, stream, (dw_event_kind)(DW_EVENT_TENSOR + at), operation,
                                fmax(start, end - below), time));
        summary->exposed[stream] += traffic->exposed;
    }
    double end = start + seconds;
    if (!kinds)
        DW_RETURN_IF_FAILED(record(p, rank, DW_STREAM_COMPUTE, kind, operation->chunk,
                                   operation->micro_batch, time, time + compute));
    DW_RETURN_IF_FAILED(
        put(p, rank, DW_STREAM_DATA, DW_EVENT_GATHER, operation, start, start + gather->wire));
    DW_RETURN_IF_FAILED(put(p, rank, DW_STREAM_DATA, DW_EVENT_REDUCE, operation,
                            fmax(start, end - reduce->wire), reduce->wire > 0 ? end : start));
    dw_event_kind copy = kind == DW_EVENT_FORWARD ? DW_EVENT_TO_HOST : DW_EVENT_FROM_HOST;
    DW_RETURN_IF_FAILED(put(p, rank, DW_STREAM_HOST, copy, operation, fmax(start, end - host->wire),
                            host->wire > 0 ? end : start));
    summary->exposed[DW_STREAM_DATA] += gather->exposed + reduce->exposed;
    summary->exposed[DW_STREAM_HOST] += host->exposed;
    summary->compute += compute;
    summary->occupied += seconds;
    return DW_OK;
}

/* Parameters of a step, chunk after chunk as they are needed; just in time for the first operation, whose input
 * is there at `ready`: a rank that begins late would have nothing of gathering early, but a step that seems
 * longer. */
static dw_status gather(player *p, int rank, double ready) {
    int chunks = p->schedule->chunks, first = p->schedule->ranks[rank].items[0].chunk;
    const dw__chunk_cost *costs = &p->simulation->costs.chunks[rank * chunks];
    double start = ready > costs[first].gather_exposed ? ready - costs[first].gather_exposed : 0;
    p->simulation->ranks[rank].start = start;
    p->simulation->ranks[rank].exposed[DW_STREAM_DATA] += costs[first].gather_exposed;
    for (int at = 0; at < chunks; at++) {
        int chunk = (first + at) % chunks;
        if (costs[chunk].gather <= 0) continue;
        double end = start + costs[chunk].gather;
        p->chunks[rank * chunks + chunk].gathered = start + costs[chunk].gather_exposed;
        DW_RETURN_IF_FAILED(
            record(p, rank, DW_STREAM_DATA, DW_EVENT_GATHER, chunk, -1, start, end));
        p->ranks[rank].free_at[DW_STREAM_DATA] = start = end;
    }
    return DW_OK;
}

/* ZeRO-3, layer by layer: its parameters and the next one's are gathered (2 bytes an element), in backward its
 * gradients are whole (4 bytes). Forward adds a layer's activations, backward frees them; the loss stands between.
 * `bytes` is held before a forward, or at the start of a backward. */
static dw_status hold_layers(player *p, int rank, const dw__chunk_cost *cost, int forward,
                             double bytes, double start, double seconds) {
    const double layer = cost->layer_elements,
                 rest = fmax(0, p->simulation->costs.ranks[rank].busy_bytes - 8 * layer);
    for (int at = 0; at < cost->layers; at++) {
        const int last = at == cost->layers - 1, at_loss = forward ? last : at == 0;
        double held =
            bytes + rest + 2 * layer * (last ? 1 : 2) + (at_loss ? cost->logits_bytes : 0);
        held += cost->kept_bytes * (forward ? at + 1 : -at) / cost->layers;
        if (!forward) held += 4 * layer + cost->again_bytes;
        DW_RETURN_IF_FAILED(hold(p, rank, start + seconds * at / cost->layers, held));
    }
    return DW_OK;
}

static dw_status run_operation(player *p, int rank, const dw__operation *operation, double ready) {
    rank_state *state = &p->ranks[rank];
    size_t slot = (size_t)rank * (size_t)p->schedule->chunks + (size_t)operation->chunk;
    const dw__chunk_cost *cost = &p->simulation->costs.chunks[slot];
    dw_simulated_rank *summary = &p->simulation->ranks[rank];
    chunk_state *chunk = &p->chunks[slot];
    const dw__beside_cost *first = &cost->beside_input, *second = &cost->beside_weight;
    double start = state->free_at[DW_STREAM_COMPUTE], seconds, transient;
    if (ready > start) start = ready;
    int forward = operation->kind == DW_EVENT_FORWARD, done = 0;
    transient = cost->logits_bytes + p->simulation->costs.ranks[rank].busy_bytes;
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
    DW_RETURN_IF_FAILED(play_operation(p, rank, operation, first, second, start, seconds));
    if (state->next == 0) state->began = start;
    if (cost->layers && p->schedule->ranks[rank].count <= LAYERED_MOST / (size_t)cost->layers)
        DW_RETURN_IF_FAILED(hold_layers(p, rank, cost, forward,
                                        state->bytes - (forward ? cost->kept_bytes : 0), start,
                                        seconds));
    else
        DW_RETURN_IF_FAILED(hold(p, rank, start, state->bytes + transient));
    double frees = p->simulation->costs.input_frees;
    if (operation->kind == DW_EVENT_BACKWARD_INPUT) state->bytes -= frees * cost->kept_bytes;
    if (done) {
        state->bytes -=
            cost->kept_bytes * (operation->kind == DW_EVENT_BACKWARD_WEIGHT ? 1 - frees : 1);
        if (--state->in_flight == 0) state->bytes = 0; /* what rounding left */
    }
    DW_RETURN_IF_FAILED(hold(p, rank, end, state->bytes));
    state->free_at[DW_STREAM_COMPUTE] =
        end + p->simulation->costs.ranks[rank].sync * seconds; /* for a neighbour: no work */
    double out = end;
    if (operation->mixed == 1) {
        const dw__chunk_cost *with = cost - operation->chunk + operation[1].chunk;
        state->mixed_end = end + with->input + with->weight;
    }
    if (operation->mixed) out = fmax(end, state->mixed_end);
    if (operation->kind != DW_EVENT_BACKWARD_WEIGHT) {
        int position = dw__schedule_position(p->schedule, rank, operation->chunk);
        DW_RETURN_IF_FAILED(
            pass_on(p, rank, operation->chunk, operation->micro_batch, position, !forward, out));
    }
    summary->pipeline = state->free_at[DW_STREAM_COMPUTE] - state->began;
    if (!done || --chunk->left > 0 || cost->reduce <= 0) return DW_OK;
    double *free_at = &state->free_at[DW_STREAM_DATA], begin = end + cost->reduce_exposed;
    begin -= cost->reduce;
    if (*free_at > begin) begin = *free_at;
    *free_at = begin + cost->reduce;
    return record(p, rank, DW_STREAM_DATA, DW_EVENT_REDUCE, operation->chunk, -1, begin, *free_at);
}

/* When what an operation needs has arrived; NaN: not yet known. */
static double ready_at(const player *p, int rank, const dw__operation *operation) {
    if (operation->kind == DW_EVENT_BACKWARD_WEIGHT) return 0;
    int position = dw__schedule_position(p->schedule, rank, operation->chunk);
    size_t at = (size_t)operation->micro_batch * (size_t)p->positions + (size_t)position;
    return p->arrived[operation->kind != DW_EVENT_FORWARD][at];
}

/* Until the rank lacks something. */
static dw_status run_rank(player *p, int rank) {
    rank_state *state = &p->ranks[rank];
    const dw__operations *list = &p->schedule->ranks[rank];
    for (; state->next < list->count; state->next++) {
        const dw__operation *operation = &list->items[state->next];
        double ready = ready_at(p, rank, operation);
        double with = operation->mixed == 1 ? ready_at(p, rank, operation + 1) : ready;
        if (isnan(ready) || isnan(with)) return DW_OK;
        if (state->next == 0) DW_RETURN_IF_FAILED(gather(p, rank, ready));
        DW_RETURN_IF_FAILED(run_operation(p, rank, operation, ready > with ? ready : with));
    }
    return DW_OK;
}

static dw_status begin_rank(player *p, int rank) {
    int chunks = p->schedule->chunks;
    p->simulation->ranks[rank].constant_bytes = p->simulation->costs.ranks[rank].constant_bytes;
    DW_RETURN_IF_FAILED(hold(p, rank, 0, 0));
    const dw__operations *list = &p->schedule->ranks[rank];
    for (size_t at = 0; at < list->count; at++)
        if (list->items[at].kind == DW_EVENT_BACKWARD ||
            list->items[at].kind == DW_EVENT_BACKWARD_WEIGHT)
            p->chunks[rank * chunks + list->items[at].chunk].left++;
    wake(p, rank);
    return DW_OK;
}

static dw_status finish_rank(player *p, int rank) {
    rank_state *state = &p->ranks[rank];
    const dw__rank_cost *cost = &p->simulation->costs.ranks[rank];
    dw_simulated_rank *summary = &p->simulation->ranks[rank];
    if (state->next < p->schedule->ranks[rank].count)
        return dw__fail(DW_INTERNAL, "the schedule %s stops: rank %d waits for ever",
                        dw_pipeline_schedule_name(p->schedule->schedule), rank);
    double last = state->free_at[DW_STREAM_COMPUTE], start = last;
    if (state->free_at[DW_STREAM_DATA] > start) start = state->free_at[DW_STREAM_DATA];
    summary->exposed[DW_STREAM_DATA] += start - last;
    double end = start + cost->optimizer;
    summary->optimizer = cost->optimizer + cost->fixed;
    summary->end = end + cost->fixed;
    if (cost->optimizer > 0)
        DW_RETURN_IF_FAILED(record(p, rank, cost->optimizer_stream, DW_EVENT_OPTIMIZER, -1, -1,
                                   fmax(start, state->free_at[cost->optimizer_stream]), end));
    if (cost->fixed > 0)
        DW_RETURN_IF_FAILED(
            record(p, rank, DW_STREAM_COMPUTE, DW_EVENT_FIXED, -1, -1, end, summary->end));
    summary->wait = summary->end - summary->start - summary->compute - summary->optimizer;
    for (int stream = 0; stream < DW_STREAMS; stream++) summary->wait -= summary->exposed[stream];
    if (summary->wait < 1e-12 * summary->end) summary->wait = 0; /* rounding of sums */
    return hold(p, rank, summary->end, 0);
}

static int compare_events(const void *left, const void *right) {
    const dw_event *a = left, *b = right;
    if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
    if (a->stream != b->stream) return a->stream < b->stream ? -1 : 1;
    if (a->start != b->start) return a->start < b->start ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

/* Seconds of [start, end] while the rank computes; *from is the first event on its compute stream that may
 * still matter, for intervals that come in order. */
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
            if (events[at].kind == DW_EVENT_OPTIMIZER) continue; /* the host's */
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
        /* A step is over for a rank when it can begin the next one. */
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
    if (f->bubble_fraction < 1e-12) f->bubble_fraction = 0; /* rounding of sums */
    f->idle_fraction = longest > 0 ? 1 - busy / ranks / longest : 0;
    f->overlap = communication_sum > 0 ? covered_sum / communication_sum : 1;
}

dw_status dw__simulate_events(dw_simulation *simulation) {
    const dw__schedule *schedule = &simulation->schedule;
    dw_status status = DW_OK;
    int ranks = schedule->stages;
    player p = {.simulation = simulation, .schedule = schedule};
    p.positions = dw__schedule_positions(schedule);
    size_t arrivals = (size_t)schedule->micro_batches * (size_t)p.positions;
    p.ranks = dw__calloc((size_t)ranks, sizeof *p.ranks);
    p.chunks = dw__calloc((size_t)ranks * (size_t)schedule->chunks, sizeof *p.chunks);
    p.queue = dw__calloc((size_t)ranks, sizeof *p.queue);
    for (int way = 0; way < 2; way++) p.arrived[way] = dw__malloc(arrivals * sizeof(double));
    if (!p.ranks || !p.chunks || !p.queue || !p.arrived[0] || !p.arrived[1]) {
        status = dw__fail_memory("a simulated step", arrivals * 2 * sizeof(double));
        goto cleanup;
    }
    for (size_t at = 0; at < arrivals; at++)
        p.arrived[0][at] = at % (size_t)p.positions ? NAN : 0, p.arrived[1][at] = NAN;
    for (int rank = ranks - 1; rank >= 0; rank--) DW_TRY(begin_rank(&p, rank));
    while (p.queued) {
        int rank = p.queue[--p.queued];
        p.ranks[rank].queued = 0;
        DW_TRY(run_rank(&p, rank));
    }
    for (int rank = 0; rank < ranks; rank++) DW_TRY(finish_rank(&p, rank));
    qsort(simulation->events.items, simulation->events.count, sizeof *simulation->events.items,
          compare_events);
    summarize(simulation);
cleanup:
    dw__free(p.ranks);
    dw__free(p.chunks);
    dw__free(p.queue);
    dw__free(p.arrived[0]);
    dw__free(p.arrived[1]);
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
