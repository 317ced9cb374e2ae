/* Times that were measured, on disk: one file per GPU model, read whole, changed under a lock, replaced whole. */
#ifndef DW_TUNE_H
#define DW_TUNE_H

#include "base/base.h"

/* DW_NOT_FOUND: nothing was measured, or the file is damaged (the next measurement begins a new one). */
dw_status dw__tune_read(const char *gpu, const char *shape_class, const char *name,
                        double *seconds);
dw_status dw__tune_write(const char *gpu, const char *shape_class, const char *name,
                         double seconds);

#endif
