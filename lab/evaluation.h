/* Declarations shared by evaluation and calibration. */
#ifndef LAB_EVALUATION_H
#define LAB_EVALUATION_H

#include "calibrate.h"

/* Loads constants by name from a file of lab_calibrate's. Constants that the file does not name keep their built-in
 * values. */
dw_status lab_constants_load(const char *path, lab_constants *constants);
dw_status lab_constants_json(const lab_constants *constants, lab_text *out);

/* A JSON string with its quotes. */
dw_status lab_json_quote(lab_text *out, const char *text);

/* Returns whether a row counts for the errors of time: it is scored, it is predicted, and its group is not excluded
 * (sweeps of deliberately bad layouts are). */
bool lab_counts(const lab_run *run);
/* Returns a quantile; sorts `values`. Returns 0 if there are none. */
double lab_quantile(double *values, size_t count, double part);
/* {"all": {"rows", "median", "p90"}, "group": {...}, "gpu": {...}, "precision": {...}, "kind": {...}} over the rows
 * that count; predicted[row] is in tokens per second and GPU. */
dw_status lab_write_errors(const lab_runs *runs, const double *predicted, lab_text *out);

#endif
