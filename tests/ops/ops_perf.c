/* Modes `perf` (how fast each kernel is) and `support` (which calls each kernel supports). */
#include "kernel/reference/scalar.h"
#include "ops_driver.h"
#include "ops_run_case.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- perf ------------------------------------------------------------------------------------ */

enum { LEAST_RUNS = 5, MOST_RUNS = 1000 };
static const double seconds_per_kernel = 0.3;

typedef struct perf_run {
    const ops_options *options;
    ops_tally *tally;
} perf_run;

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* Returns the median time of single runs, after one run that is not counted. */
static dw_status median_time(const dw__kernel *kernel, ops_call *c, double *median, int *runs) {
    double times[MOST_RUNS], total = 0.0;
    int count = 0;
    DW_RETURN_IF_FAILED(ops_call_bind(c, kernel));
    DW_RETURN_IF_FAILED(kernel->run(&c->call, c->scratch.data));
    while (count < MOST_RUNS && (count < LEAST_RUNS || total < seconds_per_kernel)) {
        double start = dw__seconds();
        DW_RETURN_IF_FAILED(kernel->run(&c->call, c->scratch.data));
        times[count] = dw__seconds() - start;
        total += times[count++];
    }
    qsort(times, (size_t)count, sizeof *times, ascending);
    *median = times[count / 2];
    *runs = count;
    return DW_OK;
}

static dw_status time_kernels(perf_run *run, const ops_case *c, const dw_graph *graph,
                              const ops_operands *operands) {
    dw_cost cost;
    ops_call *call = NULL;
    dw_status status = DW_OK;
    DW_TRY(dw_node_cost(graph, 0, NULL, &cost));
    DW_TRY(ops_call_create(graph, operands, &call));
    for (const dw__kernel *const *kernel = dw__kernel_candidates(c->op, false); *kernel; kernel++) {
        double median;
        int runs;
        /* The reference is timed only on request. */
        bool reference = strncmp((*kernel)->name, "reference", 9) == 0;
        if (reference && !run->options->backend) continue;
        if (!ops_wants_kernel(run->options, *kernel) || !kernel_supports(*kernel, &call->call))
            continue;
        DW_TRY(median_time(*kernel, call, &median, &runs));
        printf("  %-36s %10.1f us %9.2f GFLOP/s %8.2f GB/s  (median of %d)\n", (*kernel)->name,
               median * 1e6, cost.flops / median * 1e-9, cost.bytes / median * 1e-9, runs);
        run->tally->passed++;
    }
cleanup:
    ops_call_destroy(call);
    return status;
}

static dw_status visit_perf(void *context, const char *text, dw_dtype dtype) {
    perf_run *run = context;
    ops_case *c = dw__malloc(sizeof *c);
    dw_graph *graph = NULL;
    ops_operands operands = {0};
    dw_status status = DW_OK;
    (void)dtype;
    if (!c) return dw__fail_memory("a case", sizeof *c);
    DW_TRY(ops_case_parse(text, c));
    if (!ops_wants_op(run->options, c) || !ops_wants_name(run->options, text)) goto cleanup;
    printf("%s\n", text);
    if (run->options->list) goto cleanup;
    DW_TRY(ops_case_graph(c, &graph));
    DW_TRY(ops_operands_create(c, OPS_CONTIGUOUS, OPS_NORMAL, run->options->seed, &operands));
    DW_TRY(time_kernels(run, c, graph, &operands));
    fflush(stdout);
cleanup:
    ops_operands_destroy(&operands);
    dw_graph_destroy(graph);
    dw__free(c);
    return status;
}

dw_status ops_mode_perf(const ops_options *options, ops_tally *tally) {
    perf_run run = {options, tally};
    return options->text ? visit_perf(&run, options->text, DW_F32)
                         : ops_each_perf_case(visit_perf, &run);
}

/* ---- support --------------------------------------------------------------------------------- */

enum { MAX_KERNELS = 16 };

typedef struct support_run {
    const ops_options *options;
    ops_tally *tally;
    dw_op op;
    bool started;
    int fitting[MAX_KERNELS]
               /* Number of cases that a kernel of the operation supports, by element type. */
               [DW_DTYPE_COUNT];
    int cases[DW_DTYPE_COUNT];
} support_run;

static void print_op(support_run *run) {
    const dw__kernel *const *kernels = dw__kernel_candidates(run->op, false);
    for (int k = 0; run->started && kernels[k] && k < MAX_KERNELS; k++) {
        if (!ops_wants_kernel(run->options, kernels[k])) continue;
        printf("%-30s %-36s", dw_op_name(run->op), kernels[k]->name);
        for (int type = 0; type < DW_DTYPE_COUNT; type++)
            if (run->cases[type])
                printf(" %s %d/%d", dw_dtype_name((dw_dtype)type), run->fitting[k][type],
                       run->cases[type]);
        printf("\n");
        run->tally->passed++;
    }
    memset(run->fitting, 0, sizeof run->fitting);
    memset(run->cases, 0, sizeof run->cases);
}

/* Returns the type of the case's first float operand, or of its result if there is none. */
static dw_dtype case_dtype(const dw__call *call) {
    for (uint32_t i = 0; i < call->input_count; i++)
        if (call->inputs[i].rank >= 0 && dw__dtype_is_float(call->inputs[i].dtype))
            return call->inputs[i].dtype;
    return call->outputs[0].dtype;
}

static dw_status count_support(support_run *run, const ops_case *c) {
    dw_graph *graph = NULL;
    ops_operands operands = {0};
    ops_call *call = NULL;
    dw_status status = ops_case_graph(c, &graph);
    if (status == DW_TYPE) return DW_OK; /* the operation does not support this type */
    if (status != DW_OK) return status;
    DW_TRY(ops_operands_create(c, OPS_CONTIGUOUS, OPS_NORMAL, run->options->seed, &operands));
    DW_TRY(ops_call_create(graph, &operands, &call));
    dw_dtype dtype = case_dtype(&call->call);
    const dw__kernel *const *kernels = dw__kernel_candidates(c->op, false);
    run->cases[dtype]++;
    for (int k = 0; kernels[k] && k < MAX_KERNELS; k++)
        run->fitting[k][dtype] += kernel_supports(kernels[k], &call->call);
cleanup:
    ops_call_destroy(call);
    ops_operands_destroy(&operands);
    dw_graph_destroy(graph);
    return status;
}

static dw_status visit_support(void *context, const char *text, dw_dtype dtype) {
    support_run *run = context;
    ops_case *c = dw__malloc(sizeof *c);
    dw_status status = DW_OK;
    (void)dtype;
    if (!c) return dw__fail_memory("a case", sizeof *c);
    DW_TRY(ops_case_parse(text, c));
    if (c->must_fail || !ops_wants_op(run->options, c) || !ops_wants_name(run->options, text))
        goto cleanup;
    if (run->options->list) {
        printf("%s\n", text);
        goto cleanup;
    }
    if (run->started && run->op != c->op) print_op(run);
    run->op = c->op;
    run->started = true;
    DW_TRY(count_support(run, c));
cleanup:
    dw__free(c);
    return status;
}

dw_status ops_mode_support(const ops_options *options, ops_tally *tally) {
    support_run run = {.options = options, .tally = tally};
    dw_status status = options->text ? visit_support(&run, options->text, DW_F32)
                                     : ops_each_case(visit_support, &run);
    print_op(&run);
    return status;
}
