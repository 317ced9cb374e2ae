#ifndef LAB_CALIBRATE_H
#define LAB_CALIBRATE_H
#include "runs.h"

/* The planner's constants, in the order of dw_planner_constants. */
enum { LAB_CONSTANTS_MOST = 128 };
typedef struct lab_constants {
    double value[LAB_CONSTANTS_MOST];
} lab_constants;
void lab_constants_built_in(lab_constants *constants);
int lab_constant_index(const char *name); /* -1: there is none */

/* Fits the constants, starting from *constants, to `count` rows of the runs, each with a weight. */
dw_status lab_fit_constants(const lab_runs *runs, const uint32_t *rows, const double *weights,
                            size_t count, lab_constants *constants);
#endif
