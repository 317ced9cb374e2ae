/* Tables as RFC 4180 has them: commas, quotes around what holds commas or line breaks, a quote doubled inside. */
#ifndef DW_CSV_H
#define DW_CSV_H

#include "base/base.h"

typedef struct dw__csv {
    dw__arena *arena;
    const char **names; /* of the columns */
    size_t columns, rows;
    struct {
        const char **items;
        size_t count, capacity;
    } cells; /* row by row; a row that ends early has empty cells */
} dw__csv;

/* A byte-order mark is skipped, lines end in LF or CRLF, empty lines are none. DW_PARSE names the line. */
dw_status dw__csv_parse(const char *text, size_t bytes, dw__csv *csv);
void dw__csv_free(dw__csv *csv);
/* "" where there is no such column. */
const char *dw__csv_cell(const dw__csv *csv, size_t row, const char *name);

#endif
