/* Times that were measured, on disk: one file per GPU model, read whole, changed under a lock, replaced whole. */
#ifndef DW_TUNE_H
#define DW_TUNE_H

#include "base/base.h"

#include "deepwell/explain.h"

/* What is written down of one candidate of a class. */
typedef struct dw__tuned {
    double seconds, error; /* seconds 0: it failed */
    char failure[256];     /* why */
    char with[256];        /* what the class was measured with; empty: not said */
} dw__tuned;

/* DW_NOT_FOUND: nothing was measured, or the file is damaged (the next measurement begins a new one). */
dw_status dw__tune_read(const char *gpu, const char *shape_class, const char *name,
                        dw__tuned *found);
/* `with` NULL: replaces what there is of the named ones; else as dw_tune_publish. */
dw_status dw__tune_write(const char *gpu, const char *shape_class, const char *with,
                         const dw_tune_time *times, size_t count);

#endif
