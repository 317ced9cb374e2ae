/* Writes trace events for Chromium's tracing and Perfetto: complete events ("X") in microseconds, names of processes
 * and threads ("M"), arrows from a send to the operation that waits for it ("s", "f"), counters ("C"). Writes piece
 * by piece, so that a long trace needs no memory. */
#include "simulate/simulate_internal.h"
#include <inttypes.h>
#include <stdio.h>

enum { PIECE = 1 << 16 };

static dw_status put_piece(dw__file_writer *writer, dw__text *text, size_t least) {
    if (text->length < least) return DW_OK;
    DW_RETURN_IF_FAILED(dw__file_writer_put(writer, text->text, text->length));
    text->length = 0;
    return DW_OK;
}

static void name_of(const dw_simulation *simulation, const dw_event *event, char *name,
                    size_t size) {
    static const char *const letters[DW_EVENT_KINDS] = {
        "F",      "B",       "B",      "W",       "send F",    "send B",    "gather",     "reduce",
        "tensor", "context", "expert", "to host", "from host", "optimizer", "once a step"};
    int used = snprintf(name, size, "%s", letters[event->kind]);
    if (event->micro_batch >= 0)
        used += snprintf(name + used, size - (size_t)used, "%d", event->micro_batch);
    if (event->chunk >= 0 && simulation->schedule.chunks > 1)
        snprintf(name + used, size - (size_t)used, event->micro_batch >= 0 ? ".%d" : " chunk %d",
                 event->chunk);
}

static dw_status write_names(const dw_simulation *simulation, dw__text *text) {
    int used[DW_STREAMS] = {0};
    for (int rank = 0; rank < simulation->schedule.stages; rank++)
        for (int stream = 0; stream < DW_STREAMS; stream++)
            used[stream] |= simulation->ranks[rank].busy[stream] > 0;
    for (int rank = 0; rank < simulation->schedule.stages; rank++) {
        DW_RETURN_IF_FAILED(dw__text_printf(text,
                                            "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,"
                                            "\"args\":{\"name\":\"stage %d\"}},\n"
                                            "{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":"
                                            "%d,\"args\":{\"sort_index\":%d}},"
                                            "\n",
                                            rank, rank, rank, rank));
        for (int stream = 0; stream < DW_STREAMS; stream++) {
            if (!used[stream]) continue;
            DW_RETURN_IF_FAILED(dw__text_printf(
                text,
                "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,"
                "\"args\":{\"name\":\"%s\"}},\n"
                "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%d,"
                "\"args\":{\"sort_index\":%d}},\n",
                rank, stream, dw_stream_name((dw_stream)stream), rank, stream, stream));
        }
    }
    return DW_OK;
}

/* Finds the first event of each operation: [((rank * chunks + chunk) * micro_batches + micro_batch) * 2 + backward];
 * -1 if there is none. Backward of weights waits for no send. */
static int64_t *first_events(const dw_simulation *simulation) {
    const dw__schedule *schedule = &simulation->schedule;
    size_t chunks = (size_t)schedule->chunks, micro_batches = (size_t)schedule->micro_batches;
    size_t slots = (size_t)schedule->stages * chunks * micro_batches * 2;
    int64_t *first = dw__malloc(slots * sizeof *first);
    if (!first) return NULL;
    for (size_t at = 0; at < slots; at++) first[at] = -1;
    for (size_t at = simulation->events.count; at-- > 0;) {
        const dw_event *e = &simulation->events.items[at];
        if (e->kind >= DW_EVENT_BACKWARD_WEIGHT) continue;
        size_t slot = ((size_t)e->rank * chunks + (size_t)e->chunk) * micro_batches;
        first[(slot + (size_t)e->micro_batch) * 2 + (e->kind != DW_EVENT_FORWARD)] = (int64_t)at;
    }
    return first;
}

/* Writes an arrow from a send to the operation that uses its data. */
static dw_status write_flow(const dw_simulation *simulation, const int64_t *first, size_t id,
                            const dw_event *send, dw__text *text) {
    const dw__schedule *schedule = &simulation->schedule;
    int backward = send->kind == DW_EVENT_SEND_GRADIENT, rank, chunk;
    if (!backward && send->kind != DW_EVENT_SEND_ACTIVATION) return DW_OK;
    int position = dw__schedule_position(schedule, send->rank, send->chunk);
    dw__schedule_place(schedule, send->micro_batch, position + (backward ? -1 : 1), &rank, &chunk);
    size_t slot = ((size_t)rank * (size_t)schedule->chunks + (size_t)chunk) *
                      (size_t)schedule->micro_batches +
                  (size_t)send->micro_batch;
    int64_t at = first[slot * 2 + (size_t)backward];
    if (at < 0) return DW_OK;
    const dw_event *to = &simulation->events.items[at];
    const char *name = backward ? "gradients" : "activations";
    return dw__text_printf(text,
                           "{\"ph\":\"s\",\"id\":%zu,\"name\":\"%s\",\"cat\":\"send\",\"pid\":%d,"
                           "\"tid\":%d,\"ts\":%.3f},\n"
                           "{\"ph\":\"f\",\"bp\":\"e\",\"id\":%zu,\"name\":\"%s\",\"cat\":\"send\","
                           "\"pid\":%d,\"tid\":%d,"
                           "\"ts\":%.3f},\n",
                           id, name, send->rank, send->stream, 1e6 * send->start, id, name,
                           to->rank, to->stream, 1e6 * to->start);
}

dw_status dw_simulation_trace(const dw_simulation *simulation, const char *path) {
    dw__file_writer *writer = NULL;
    dw__text text = {0};
    dw_status status = DW_OK;
    int64_t *first_event = first_events(simulation);
    if (!first_event) {
        status = dw__fail_memory("a trace", simulation->events.count * sizeof *first_event);
        goto cleanup;
    }
    DW_TRY(dw__file_writer_create(path, &writer));
    DW_TRY(dw__text_printf(&text, "[\n"));
    DW_TRY(write_names(simulation, &text));
    for (size_t at = 0; at < simulation->events.count; at++) {
        const dw_event *event = &simulation->events.items[at];
        char name[64];
        name_of(simulation, event, name, sizeof name);
        DW_TRY(dw__text_printf(&text,
                               "{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,"
                               "\"ts\":%.3f,\"dur\":%.3f",
                               name, dw_event_kind_name((dw_event_kind)event->kind), event->rank,
                               event->stream, 1e6 * event->start,
                               1e6 * (event->end - event->start)));
        if (event->micro_batch >= 0)
            DW_TRY(dw__text_printf(&text, ",\"args\":{\"micro_batch\":%" PRId32 ",\"chunk\":%d}",
                                   event->micro_batch, event->chunk));
        DW_TRY(dw__text_printf(&text, "},\n"));
        DW_TRY(write_flow(simulation, first_event, at, event, &text));
        DW_TRY(put_piece(writer, &text, PIECE));
    }
    int first = 1;
    for (int rank = 0; rank < simulation->schedule.stages; rank++) {
        const dw__memory_line *line = &simulation->memory[rank];
        for (size_t at = 0; at < line->count; at++, first = 0) {
            DW_TRY(dw__text_printf(&text,
                                   "%s{\"ph\":\"C\",\"name\":\"memory\",\"pid\":%d,\"ts\":%.3f,"
                                   "\"args\":{\"bytes\":%.0f}}",
                                   first ? "" : ",\n", rank, 1e6 * line->items[at].time,
                                   line->items[at].bytes));
            DW_TRY(put_piece(writer, &text, PIECE));
        }
    }
    DW_TRY(dw__text_printf(&text, "\n]\n"));
    DW_TRY(put_piece(writer, &text, 1));
    DW_TRY(dw__file_writer_commit(writer));
cleanup:
    dw__free(first_event);
    dw__text_free(&text);
    dw__file_writer_destroy(writer);
    return status;
}
