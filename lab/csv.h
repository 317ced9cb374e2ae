/* Tables as RFC 4180 has them: commas, quotes around what holds commas or line breaks, a quote doubled inside. */
#ifndef LAB_CSV_H
#define LAB_CSV_H

#include "lab_base.h"

typedef struct lab_csv {
    lab_arena *arena;
    const char **names; /* of the columns */
    size_t columns, rows;
    struct {
        const char **items;
        size_t count, capacity;
    } cells; /* row by row; a row that ends early has empty cells */
} lab_csv;

/* A byte-order mark is skipped, lines end in LF or CRLF, empty lines are none. DW_PARSE names the line. */
dw_status lab_csv_parse(const char *text, size_t bytes, lab_csv *csv);
void lab_csv_free(lab_csv *csv);
/* "" where there is no such column. */
const char *lab_csv_cell(const lab_csv *csv, size_t row, const char *name);

#endif
