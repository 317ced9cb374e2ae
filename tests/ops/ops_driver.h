/* The driver's modes, and the declarations that they share. */
#ifndef DW_OPS_H
#define DW_OPS_H

#include "ops_case.h"
#include <regex.h>

typedef struct ops_options {
    const char *op;      /* exact name; NULL: all */
    const char *backend; /* part of a kernel's name; NULL: all */
    const char *text;    /* one case from the command line; NULL: the table */
    bool has_pattern;
    regex_t pattern; /* matches the printed name */
    uint64_t seed;
    bool list, quick;
} ops_options;

typedef struct ops_tally {
    int64_t passed, failed, skipped;
} ops_tally;

bool ops_wants_op(const ops_options *options, const ops_case *c);
bool ops_wants_name(const ops_options *options, const char *name);
bool ops_wants_kernel(const ops_options *options, const dw__kernel *kernel);
/* Prints a failure under the case's name, with the command line that repeats it. `kernel` is NULL if no kernel caused
 * the failure. */
void ops_report_failure(const ops_options *options, const char *mode, const char *name,
                        const char *kernel, const char *reason);

/* Each mode runs the cases that the options select, prints results and adds to the tally. */
dw_status ops_mode_test(const ops_options *options, ops_tally *tally);
dw_status ops_mode_grad(const ops_options *options, ops_tally *tally);
dw_status ops_mode_perf(const ops_options *options, ops_tally *tally);
dw_status ops_mode_support(const ops_options *options, ops_tally *tally);

#endif
