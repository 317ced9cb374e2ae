/* What evaluation and calibration share. */
#ifndef DW_EVALUATION_H
#define DW_EVALUATION_H

#include "plan/calibrate.h"

/* Constants by name from a file of dw_calibrate's; what it does not name keeps its built-in value. */
dw_status dw__constants_load(const char *path, dw__constants *constants);
dw_status dw__constants_json(const dw__constants *constants, dw__text *out);

/* A JSON string with its quotes. */
dw_status dw__json_quote(dw__text *out, const char *text);

/* Whether a row counts for the errors of time: scored, predicted, and of no group that stands apart (sweeps of
 * deliberately bad layouts). */
bool dw__counts(const dw_run *run);
/* Sorts `values`; 0 of none. */
double dw__quantile(double *values, size_t count, double part);
/* {"all": {"rows", "median", "p90"}, "group": {...}, "gpu": {...}, "precision": {...}, "kind": {...}} of the rows that
 * count; predicted[row] is tokens a second of one GPU. */
dw_status dw__write_errors(const dw_runs *runs, const double *predicted, dw__text *out);

#endif
