/* Sources of kernels that are made at run time, each with its number, which is the parameter of its variants. */
#ifndef DW_PROGRAM_TABLE_H
#define DW_PROGRAM_TABLE_H

#include "base/base.h"

/* A source, and what else its kernel knows of it. It lives as long as the process. */
typedef struct dw__program {
    char *source;
    void *form;
} dw__program;

/* Returns the number of a source; equal sources have one. Takes over the text. The table has a copy of the form that
 * came with a source first. */
dw_status dw__program_number(dw__text *source, const void *form, size_t form_bytes,
                             uint32_t *number);
const dw__program *dw__program_at(uint64_t number);

#endif
