/* CSV tables (RFC 4180): fields are separated by commas; a field with commas or line breaks is quoted, and a quote
 * inside it is doubled. */
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
    } cells; /* row by row; missing fields at the end of a row are empty */
} lab_csv;

/* Skips a byte-order mark and empty lines; lines end in LF or CRLF. DW_PARSE names the line. */
dw_status lab_csv_parse(const char *text, size_t bytes, lab_csv *csv);
void lab_csv_free(lab_csv *csv);
/* Returns "" if there is no such column. */
const char *lab_csv_cell(const lab_csv *csv, size_t row, const char *name);

#endif
