/* Builds the operation lists of pipeline schedules. Each rule assumes a suitable number of micro-batches. Any other
 * number is rounded up, and operations of the added micro-batches are left out. The rest keeps its order and so
 * remains valid. */
#include "simulate/pipeline_schedule.h"

typedef struct maker {
    dw__schedule *schedule;
    dw__operations *list;
    dw_status status;
} maker;

static void put(maker *m, dw_event_kind kind, int chunk, int micro_batch) {
    if (m->status != DW_OK || micro_batch >= m->schedule->micro_batches) return;
    dw__operation operation = {micro_batch, (int16_t)chunk, (uint8_t)kind, 0};
    m->status = DW_PUSH(m->list, operation);
}

static int smaller(int a, int b) { return a < b ? a : b; }

/* GPipe: every forward, then every backward, last micro-batch first (Huang et al. 2019). */
static void gpipe(maker *m) {
    int count = m->schedule->micro_batches, chunks = m->schedule->chunks;
    for (int chunk = 0; chunk < chunks; chunk++)
        for (int at = 0; at < count; at++) put(m, DW_EVENT_FORWARD, chunk, at);
    for (int chunk = chunks - 1; chunk >= 0; chunk--)
        for (int at = count - 1; at >= 0; at--) put(m, DW_EVENT_BACKWARD, chunk, at);
}

/* Interleaved: returns the at-th forward or backward of a rank. Groups of as many micro-batches as stages pass through
 * all chunks (Narayanan et al. 2021). */
static void put_interleaved(maker *m, dw_event_kind kind, int at) {
    int stages = m->schedule->stages, chunks = m->schedule->chunks, group = stages * chunks;
    int chunk = at % group / stages;
    put(m, kind, kind == DW_EVENT_FORWARD ? chunk : chunks - 1 - chunk,
        at / group * stages + at % stages);
}

/* 1F1B: first as many forwards as keep all stages busy, then one forward and one backward in turn. */
static void one_forward_one_backward(maker *m, int rank) {
    int stages = m->schedule->stages, chunks = m->schedule->chunks;
    int rounded = (m->schedule->micro_batches + stages - 1) / stages * stages;
    int all = (chunks > 1 ? rounded : m->schedule->micro_batches) * chunks;
    int before = chunks > 1 ? 2 * (stages - rank - 1) + (chunks - 1) * stages : stages - rank - 1;
    before = smaller(before, all);
    for (int at = 0; at < before; at++) put_interleaved(m, DW_EVENT_FORWARD, at);
    for (int at = before; at < all; at++) {
        put_interleaved(m, DW_EVENT_FORWARD, at);
        put_interleaved(m, DW_EVENT_BACKWARD, at - before);
    }
    for (int at = all - before; at < all; at++) put_interleaved(m, DW_EVENT_BACKWARD, at);
}

/* ZB-H1 and ZB-H2 (Qi et al. 2024): 1F1B with `before` forwards first, and weight gradients `late` backwards after
 * those of the inputs. A rank holds the activations of both. */
static void zero_bubble_h(maker *m, int before, int late) {
    int count = m->schedule->micro_batches, weights = 0;
    before = smaller(before, count);
    for (int at = 0; at < before; at++) put(m, DW_EVENT_FORWARD, 0, at);
    for (int at = 0; at < count; at++) {
        put(m, DW_EVENT_BACKWARD_INPUT, 0, at);
        if (at >= late) put(m, DW_EVENT_BACKWARD_WEIGHT, 0, weights++);
        if (before + at < count) put(m, DW_EVENT_FORWARD, 0, before + at);
    }
    while (weights < count) put(m, DW_EVENT_BACKWARD_WEIGHT, 0, weights++);
}

/* ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"): a rank has the rank-th chunk from the front
 * and the rank-th from the back, so the first rank has the loss. */
static void zero_bubble_v(maker *m, int rank) {
    int stages = m->schedule->stages;
    int count = m->schedule->micro_batches, forwards[2] = {0}, inputs[2] = {0}, weights[2] = {0};
    if (count < 2 * stages - 1) count = 2 * stages - 1;
#define FORWARD(chunk) put(m, DW_EVENT_FORWARD, chunk, forwards[chunk]++)
#define INPUT(chunk) put(m, DW_EVENT_BACKWARD_INPUT, chunk, inputs[chunk]++)
#define WEIGHT(chunk) put(m, DW_EVENT_BACKWARD_WEIGHT, chunk, weights[chunk]++)
    for (int at = 0; at < 2 * (stages - rank) - 1; at++) FORWARD(0);
    for (int at = 0; at < rank; at++) {
        FORWARD(1);
        FORWARD(0);
    }
    for (int at = 0; at < stages - rank; at++) {
        FORWARD(1);
        INPUT(1);
        WEIGHT(1);
    }
    while (forwards[1] < forwards[0] || forwards[0] < count) {
        if (forwards[0] < count) FORWARD(0);
        INPUT(0);
        WEIGHT(0);
        FORWARD(1);
        INPUT(1);
        WEIGHT(1);
    }
    for (int at = 0; at < rank; at++) {
        INPUT(0);
        INPUT(1);
    }
    while (inputs[0] < count) {
        INPUT(0);
        WEIGHT(0);
    }
    while (weights[1] < count) WEIGHT(1);
    while (weights[0] < count) WEIGHT(0);
#undef FORWARD
#undef INPUT
#undef WEIGHT
}

/* DualPipe (DeepSeek-V3, 2024): half of the micro-batches enter at each end. A rank holds the chunks of both
 * directions. It computes a forward of one direction while it communicates for a backward of the other. Seen from its
 * own end, each half of the ranks does the same. */
typedef struct directions {
    maker *m;
    int mirrored, half;
    int forwards[2], inputs[2], weights[2];
    struct {
        int direction, micro_batch;
    } * waiting; /* pending weight gradients, in the order of their inputs' */
    int first, last;
} directions;

static void put_direction(directions *d, dw_event_kind kind, int side, int at) {
    int direction = side ^ d->mirrored;
    if (at < d->half) put(d->m, kind, direction, 2 * at + direction);
}
static void forward(directions *d, int side) {
    put_direction(d, DW_EVENT_FORWARD, side, d->forwards[side]++);
}
static void backward(directions *d, int side, int weight_later) {
    int at = d->inputs[side]++;
    put_direction(d, DW_EVENT_BACKWARD_INPUT, side, at);
    if (!weight_later) {
        put_direction(d, DW_EVENT_BACKWARD_WEIGHT, side, at);
        return;
    }
    d->waiting[d->last].direction = side;
    d->waiting[d->last++].micro_batch = at;
}
static void weight(directions *d) {
    if (d->first == d->last) return;
    int at = d->first++;
    put_direction(d, DW_EVENT_BACKWARD_WEIGHT, d->waiting[at].direction,
                  d->waiting[at].micro_batch);
}

/* Runs a forward of one side mixed with a backward of the other. */
static void both(directions *d, int side) {
    size_t first = d->m->list->count;
    forward(d, side);
    size_t second = d->m->list->count;
    backward(d, 1 - side, 0);
    if (d->m->status != DW_OK || second == first || d->m->list->count == second) return;
    for (size_t at = first; at < d->m->list->count; at++)
        d->m->list->items[at].mixed = at == first ? 1 : 2;
}

static void dualpipe(maker *m, int rank) {
    int stages = m->schedule->stages, half = (m->schedule->micro_batches + 1) / 2;
    if (half < stages) half = stages;
    directions d = {.m = m, .half = half, .mirrored = rank >= stages / 2};
    int from_end = d.mirrored ? stages - 1 - rank : rank, to_middle = stages / 2 - from_end - 1;
    d.waiting = dw__calloc((size_t)half * 2, sizeof *d.waiting);
    if (!d.waiting) {
        m->status = dw__fail_memory("a pipeline's schedule", (size_t)half * 2 * sizeof *d.waiting);
        return;
    }
    for (int at = 0; at < 2 * to_middle; at++) forward(&d, 0);
    for (int at = 0; at < from_end + 1; at++) {
        forward(&d, 0);
        forward(&d, 1);
    }
    for (int at = 0; at < to_middle; at++) {
        backward(&d, 1, 1);
        weight(&d);
        forward(&d, 1);
    }
    for (int at = 0; at < half - stages + from_end + 1; at++) {
        if (at == 0 && to_middle == 0) { /* the first loss has no backward to mix with */
            forward(&d, 0);
            backward(&d, 1, 0);
        } else {
            both(&d, 0);
        }
        both(&d, 1);
    }
    for (int at = 0; at < to_middle; at++) {
        backward(&d, 1, 0);
        both(&d, 1);
    }
    /* Weight gradients are deferred from the middle of this phase on. */
    int later = 0;
    for (int at = 0; at < from_end + 1; at++) {
        if (at == (from_end + 1) / 2 && from_end % 2 == 1) later = 1;
        backward(&d, 1, later);
        if (at == (from_end + 1) / 2 && from_end % 2 == 0) later = 1;
        backward(&d, 0, later);
    }
    for (int at = 0; at < to_middle; at++) {
        weight(&d);
        backward(&d, 0, 1);
    }
    while (d.first < d.last) weight(&d);
    dw__free(d.waiting);
}

static void make(maker *m, int rank) {
    int stages = m->schedule->stages;
    switch (m->schedule->schedule) {
    case DW_SCHEDULE_GPIPE: gpipe(m); break;
    case DW_SCHEDULE_ZB_H1: zero_bubble_h(m, stages - rank, rank); break;
    case DW_SCHEDULE_ZB_H2: zero_bubble_h(m, 2 * (stages - rank) - 1, 2 * rank); break;
    case DW_SCHEDULE_ZB_V: zero_bubble_v(m, rank); break;
    case DW_SCHEDULE_DUALPIPE: dualpipe(m, rank); break;
    default: one_forward_one_backward(m, rank); break;
    }
}

dw_status dw__schedule_create(dw_pipeline_schedule schedule, int stages, int chunks,
                              int micro_batches, dw__schedule *made) {
    if (stages == 1) schedule = DW_SCHEDULE_1F1B; /* one stage needs no schedule */
    int two = schedule == DW_SCHEDULE_ZB_V || schedule == DW_SCHEDULE_DUALPIPE;
    int whole = schedule == DW_SCHEDULE_ZB_H1 || schedule == DW_SCHEDULE_ZB_H2;
    *made = (dw__schedule){schedule,      stages,       two ? 2 : whole || stages == 1 ? 1 : chunks,
                           micro_batches, two || whole, NULL};
    if (schedule == DW_SCHEDULE_DUALPIPE && stages % 2)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "pp is %d; dualpipe pairs stages from both ends and needs an even number",
                        stages);
    made->ranks = dw__calloc((size_t)stages, sizeof *made->ranks);
    if (!made->ranks)
        return dw__fail_memory("a pipeline's schedule", (size_t)stages * sizeof *made->ranks);
    for (int rank = 0; rank < stages; rank++) {
        maker m = {made, &made->ranks[rank], DW_OK};
        make(&m, rank);
        if (m.status != DW_OK) {
            dw__schedule_free(made);
            return m.status;
        }
    }
    return DW_OK;
}

void dw__schedule_free(dw__schedule *schedule) {
    for (int rank = 0; schedule->ranks && rank < schedule->stages; rank++)
        dw__free(schedule->ranks[rank].items);
    dw__free(schedule->ranks);
    schedule->ranks = NULL;
}

int dw__schedule_positions(const dw__schedule *schedule) {
    return schedule->schedule == DW_SCHEDULE_DUALPIPE ? schedule->stages
                                                      : schedule->stages * schedule->chunks;
}

int dw__schedule_position(const dw__schedule *schedule, int rank, int chunk) {
    int stages = schedule->stages;
    switch (schedule->schedule) {
    case DW_SCHEDULE_ZB_V: return chunk ? 2 * stages - 1 - rank : rank;
    case DW_SCHEDULE_DUALPIPE: return chunk ? stages - 1 - rank : rank;
    default: return chunk * stages + rank;
    }
}

void dw__schedule_place(const dw__schedule *schedule, int micro_batch, int position, int *rank,
                        int *chunk) {
    int stages = schedule->stages;
    switch (schedule->schedule) {
    case DW_SCHEDULE_ZB_V:
        *chunk = position >= stages;
        *rank = *chunk ? 2 * stages - 1 - position : position;
        return;
    case DW_SCHEDULE_DUALPIPE:
        *chunk = micro_batch % 2;
        *rank = *chunk ? stages - 1 - position : position;
        return;
    default: *chunk = position / stages; *rank = position % stages;
    }
}
