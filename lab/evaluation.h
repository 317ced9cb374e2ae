/* What evaluation and calibration share. */
#ifndef LAB_EVALUATION_H
#define LAB_EVALUATION_H

#include "calibrate.h"

/* Constants by name from a file of lab_calibrate's; what it does not name keeps its built-in value. */
dw_status lab_constants_load(const char *path, lab_constants *constants);
dw_status lab_constants_json(const lab_constants *constants, lab_text *out);

/* A JSON string with its quotes. */
dw_status lab_json_quote(lab_text *out, const char *text);

/* Whether a row counts for the errors of time: scored, predicted, and of no group that stands apart (sweeps of
 * deliberately bad layouts). */
bool lab_counts(const lab_run *run);
/* Sorts `values`; 0 of none. */
double lab_quantile(double *values, size_t count, double part);
/* {"all": {"rows", "median", "p90"}, "group": {...}, "gpu": {...}, "precision": {...}, "kind": {...}} of the rows that
 * count; predicted[row] is tokens a second of one GPU. */
dw_status lab_write_errors(const lab_runs *runs, const double *predicted, lab_text *out);

#endif
