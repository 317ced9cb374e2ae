#include "csv.h"
#include <string.h>

typedef struct reader {
    const char *at, *end;
    size_t line;
    lab_csv *csv;
} reader;

/* Reads one field into the arena. *last: the field is the line's last. */
static dw_status read_field(reader *r, const char **field, bool *last) {
    const char *begin = r->at;
    size_t length = 0, opened = r->line;
    bool quoted = r->at < r->end && *r->at == '"';
    char *out;
    if (quoted) {
        const char *scan = ++begin;
        for (;; scan++) { /* scans to the closing quote */
            if (scan == r->end)
                return lab_fail(DW_PARSE, "line %zu: a quoted field does not end", opened);
            if (*scan == '\n') r->line++;
            if (*scan != '"') continue;
            if (scan + 1 < r->end && scan[1] == '"')
                scan++;
            else
                break;
        }
        r->at = scan + 1;
        out = lab_arena_alloc(r->csv->arena, (size_t)(scan - begin) + 1);
        if (!out) return lab_fail_memory("a field of a table", (size_t)(scan - begin) + 1);
        for (const char *from = begin; from < scan; from++) {
            out[length++] = *from;
            if (*from == '"') from++;
        }
        if (r->at < r->end && *r->at != ',' && *r->at != '\n' && *r->at != '\r')
            return lab_fail(DW_PARSE,
                            "line %zu: text after the quote that ends a field; expected a comma",
                            r->line);
    } else {
        while (r->at < r->end && *r->at != ',' && *r->at != '\n') r->at++;
        length = (size_t)(r->at - begin);
        if (length && begin[length - 1] == '\r' && (r->at == r->end || *r->at == '\n')) length--;
        out = lab_arena_alloc(r->csv->arena, length + 1);
        if (!out) return lab_fail_memory("a field of a table", length + 1);
        memcpy(out, begin, length);
    }
    if (memchr(out, '\0', length))
        return lab_fail(DW_PARSE, "line %zu: a NUL byte; expected text", r->line);
    if (quoted && r->at < r->end && *r->at == '\r') r->at++;
    *last = r->at == r->end || *r->at == '\n';
    if (r->at < r->end) {
        if (*r->at == '\n') r->line++;
        r->at++;
    }
    *field = out;
    return DW_OK;
}

dw_status lab_csv_parse(const char *text, size_t bytes, lab_csv *csv) {
    dw_status status = DW_OK;
    reader r = {text, text + bytes, 1, csv};
    *csv = (lab_csv){.arena = lab_arena_create()};
    if (!csv->arena) return lab_fail_memory("a table", bytes);
    if (bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) r.at += 3;
    struct {
        const char **items;
        size_t count, capacity;
    } names = {0};
    while (r.at < r.end) {
        if (*r.at == '\n' || (*r.at == '\r' && r.at + 1 < r.end && r.at[1] == '\n')) {
            r.at += *r.at == '\r' ? 2 : 1;
            r.line++;
            continue;
        }
        size_t line = r.line, fields = 0;
        bool last = false;
        while (!last) {
            const char *field = "";
            LAB_TRY(read_field(&r, &field, &last));
            fields++;
            if (!csv->columns) {
                LAB_TRY(LAB_PUSH(&names, field));
            } else if (fields > csv->columns) {
                status = lab_fail(DW_PARSE, "line %zu has more fields than the header's %zu", line,
                                  csv->columns);
                goto cleanup;
            } else {
                LAB_TRY(LAB_PUSH(&csv->cells, field));
            }
        }
        if (!csv->columns) {
            csv->columns = names.count;
            continue;
        }
        for (; fields < csv->columns; fields++) LAB_TRY(LAB_PUSH(&csv->cells, ""));
        csv->rows++;
    }
    if (!csv->columns)
        status = lab_fail(DW_PARSE, "the table is empty; expected a line of column names");
cleanup:
    csv->names = names.items;
    if (status != DW_OK) lab_csv_free(csv);
    return status;
}

void lab_csv_free(lab_csv *csv) {
    lab_arena_destroy(csv->arena);
    lab_free(csv->names);
    lab_free(csv->cells.items);
    *csv = (lab_csv){0};
}

const char *lab_csv_cell(const lab_csv *csv, size_t row, const char *name) {
    for (size_t at = 0; at < csv->columns; at++)
        if (strcmp(csv->names[at], name) == 0) return csv->cells.items[row * csv->columns + at];
    return "";
}
