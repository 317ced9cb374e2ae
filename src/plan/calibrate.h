#ifndef DW_CALIBRATE_H
#define DW_CALIBRATE_H
#include "plan/runs.h"

/* From *constants on, over `count` rows of the runs, each with its weight. */
dw_status dw__fit_constants(const dw_runs *runs, const uint32_t *rows, const double *weights,
                            size_t count, dw__constants *constants);
#endif
