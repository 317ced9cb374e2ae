/* Measured times on disk. Each GPU model has one file, which is read whole, changed under a lock and replaced
 * whole. */
#ifndef DW_TUNE_H
#define DW_TUNE_H

#include "base/base.h"

#include "deepwell/explain.h"

/* Record of one candidate of a shape class. */
typedef struct dw__tuned {
    double seconds, error; /* seconds is 0 if it failed */
    char failure[256];     /* reason of the failure */
    char with[256];        /* software that the class was measured with; empty if unknown */
    char detail[160];      /* text of the record, such as an algorithm; empty if it has none */
} dw__tuned;

/* Returns DW_NOT_FOUND if nothing was measured or the file is damaged. The next measurement then starts a new
 * file. */
dw_status dw__tune_read(const char *gpu, const char *shape_class, const char *name,
                        dw__tuned *found);
/* Calls `visit` with each class that has a sound record of the candidate, until one fails. DW_OK if there is no file. */
dw_status dw__tune_each(const char *gpu, const char *name,
                        dw_status (*visit)(void *state, const char *shape_class,
                                           const dw__tuned *found),
                        void *state);
/* If `with` is NULL, replaces the entries of the named candidates; else works like dw_tune_publish. */
dw_status dw__tune_write(const char *gpu, const char *shape_class, const char *with,
                         const dw_tune_time *times, size_t count);

/* The same for one candidate and a text that dw__tune_read returns with its time: at most 159 bytes, ASCII. A record
 * whose text has changed on disk counts as missing. */
dw_status dw__tune_write_detail(const char *gpu, const char *shape_class, const char *with,
                                const dw_tune_time *time, const char *detail);

#endif
