/* Writes the report page: report.html with the step's data in place of @DATA@. */
#include "simulate/simulate_internal.h"
#include <math.h>
#include <string.h>

/* The text of report.html; the build embeds it (src/CMakeLists.txt). */
extern const unsigned char *const dw__report_page, *const dw__report_page_end;

enum { PIECE = 1 << 16, TICKS = 10000000 }; /* TICKS of one step: coordinates are integers */

typedef struct page {
    const dw_simulation *simulation;
    dw__file_writer *writer;
    dw__text text;
    double end; /* in seconds */
} page;

static dw_status put_piece(page *out, size_t least) {
    if (out->text.length < least) return DW_OK;
    DW_RETURN_IF_FAILED(dw__file_writer_put(out->writer, out->text.text, out->text.length));
    out->text.length = 0;
    return DW_OK;
}

static long ticks(const page *out, double time) { return lround(time / out->end * TICKS); }

/* Events are sorted by rank and stream; each lane is one array. */
static dw_status put_lanes(page *out) {
    const dw__event_list *events = &out->simulation->events;
    size_t at = 0;
    for (int rank = 0; rank < out->simulation->schedule.stages; rank++) {
        for (int stream = 0; stream < DW_STREAMS; stream++) {
            DW_RETURN_IF_FAILED(dw__text_printf(&out->text, rank + stream ? "],\n[" : "["));
            for (int first = 1; at < events->count; at++, first = 0) {
                const dw_event *e = &events->items[at];
                if (e->rank != rank || e->stream != stream) break;
                long start = ticks(out, e->start);
                DW_RETURN_IF_FAILED(
                    dw__text_printf(&out->text, "%s%ld,%ld,%d,%d,%d", first ? "" : ",", start,
                                    ticks(out, e->end) - start, e->kind, e->micro_batch, e->chunk));
                DW_RETURN_IF_FAILED(put_piece(out, PIECE));
            }
        }
    }
    return dw__text_printf(&out->text, "]");
}

static dw_status put_memory(page *out) {
    for (int rank = 0; rank < out->simulation->schedule.stages; rank++) {
        const dw__memory_line *line = &out->simulation->memory[rank];
        DW_RETURN_IF_FAILED(dw__text_printf(&out->text, rank ? "],\n[" : "["));
        for (size_t at = 0; at < line->count; at++) {
            DW_RETURN_IF_FAILED(dw__text_printf(&out->text, "%s%ld,%.0f", at ? "," : "",
                                                ticks(out, line->items[at].time),
                                                line->items[at].bytes / 1e6));
            DW_RETURN_IF_FAILED(put_piece(out, PIECE));
        }
    }
    return dw__text_printf(&out->text, "]");
}

static dw_status put_data(page *out, const char *title) {
    DW_RETURN_IF_FAILED(dw__text_printf(&out->text, "{\"title\": "));
    DW_RETURN_IF_FAILED(dw__simulation_write_string(title, &out->text));
    DW_RETURN_IF_FAILED(
        dw__text_printf(&out->text, ", \"end\": %d, \"unit\": %.9g, \"streams\": %d, \"kinds\": [",
                        TICKS, out->end / TICKS, DW_STREAMS));
    for (int kind = 0; kind < DW_EVENT_KINDS; kind++)
        DW_RETURN_IF_FAILED(dw__text_printf(&out->text, "%s\"%s\"", kind ? ", " : "",
                                            dw_event_kind_name((dw_event_kind)kind)));
    DW_RETURN_IF_FAILED(dw__text_printf(&out->text, "], \"streamNames\": ["));
    for (int stream = 0; stream < DW_STREAMS; stream++)
        DW_RETURN_IF_FAILED(dw__text_printf(&out->text, "%s\"%s\"", stream ? ", " : "",
                                            dw_stream_name((dw_stream)stream)));
    DW_RETURN_IF_FAILED(dw__text_printf(&out->text, "],\n\"figures\": "));
    DW_RETURN_IF_FAILED(dw__simulation_write_json(out->simulation, &out->text));
    DW_RETURN_IF_FAILED(dw__text_printf(&out->text, ",\n\"lanes\": ["));
    DW_RETURN_IF_FAILED(put_lanes(out));
    DW_RETURN_IF_FAILED(dw__text_printf(&out->text, "],\n\"memory\": ["));
    DW_RETURN_IF_FAILED(put_memory(out));
    return dw__text_printf(&out->text, "]}");
}

dw_status dw_simulation_report(const dw_simulation *simulation, const char *title,
                               const char *path) {
    static const char mark[] = "@DATA@";
    const char *text = (const char *)dw__report_page, *place = strstr(text, mark);
    size_t before = (size_t)(place - text), after = before + sizeof mark - 1;
    page out = {.simulation = simulation};
    dw_status status = DW_OK;
    for (int rank = 0; rank < simulation->schedule.stages; rank++)
        out.end = fmax(out.end, simulation->ranks[rank].end);
    DW_TRY(dw__file_writer_create(path, &out.writer));
    DW_TRY(dw__text_append(&out.text, text, before));
    DW_TRY(put_data(&out, title && *title ? title : "A model"));
    DW_TRY(dw__text_append(&out.text, text + after,
                           (size_t)(dw__report_page_end - dw__report_page) - after));
    DW_TRY(put_piece(&out, 1));
    DW_TRY(dw__file_writer_commit(out.writer));
cleanup:
    dw__text_free(&out.text);
    dw__file_writer_destroy(out.writer);
    return status;
}
