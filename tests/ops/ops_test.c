/* Mode `test`: every kernel of every case against the FP64 interpretation of the node's definition (ops_expect.h). */
#include "base/pool.h"
#include "ops_driver.h"
#include "ops_expect.h"
#include "ops_run_case.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct test_run {
    const ops_options *options;
    ops_tally *tally;
    ops_tally of_op; /* of the current operation */
    double worst;    /* the operation's largest error, as a fraction of its bound */
    dw_op op;
    bool started;
} test_run;

typedef struct variant {
    test_run *run;
    const ops_case *c;
    const dw_graph *graph;
    const ops_operands *operands;
    const ops_expectation *expected;
    const char *name;
} variant;

/* The definition of attention rounds the probabilities and the gradients of the scores to the type of the operands
 * before it multiplies them: in 16 bits each term has that type's unit roundoff instead of F32's. The CPU's kernels do
 * not. */
static double tolerance_factor(const variant *v, const dw__kernel *kernel, const dw__tensor *got) {
    const bool rounds = (v->c->op == DW_OP_ATTENTION || v->c->op == DW_OP_ATTENTION_BACKWARD) &&
                        dw__kernel_is_reference(kernel);
    const double half = got->dtype == DW_BF16  ? 0x1p-8 / 0x1p-24
                        : got->dtype == DW_F16 ? 0x1p-11 / 0x1p-24
                                               : 0.0;
    return rounds && half > 0.0 ? half : kernel->tolerance_factor;
}

static bool check_outputs(const variant *v, const dw__kernel *kernel, const ops_call *c,
                          char *reason, size_t bytes) {
    const char *damage = ops_call_damage(c);
    if (damage) {
        snprintf(reason, bytes, "%s", damage);
        return false;
    }
    for (uint32_t i = 0; i < v->expected->count; i++)
        if (c->call.outputs[i].data &&
            !ops_output_agrees(v->expected, tolerance_factor(v, kernel, &c->call.outputs[i]),
                               &c->call.outputs[i], i, &v->run->worst, reason, bytes))
            return false;
    return true;
}

/* ---- running a kernel ------------------------------------------------------------------------ */

static uint64_t operands_hash(const ops_operands *operands) {
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (uint32_t i = 0; i < operands->count; i++)
        for (size_t j = 0; operands->blocks[i].base && j < operands->blocks[i].bytes; j++)
            hash = (hash ^ ((const unsigned char *)operands->blocks[i].data)[j]) * 0x100000001B3u;
    return hash;
}

static bool same_bytes(const ops_call *a, const ops_call *b) {
    for (int i = 0; i < OPS_MAX_OUTPUTS; i++)
        if (a->outputs[i].base &&
            memcmp(a->outputs[i].data, b->outputs[i].data, a->outputs[i].bytes))
            return false;
    return true;
}

/* Repeats the call with other memory on one thread; the bits must not change. The scratch is sized for the number of
 * threads that uses it. */
static bool check_repeats(const variant *v, const dw__kernel *kernel, const ops_call *first,
                          char *reason, size_t bytes) {
    ops_call *again = NULL;
    int threads = dw__pool_threads();
    bool good = false;
    dw_status status = ops_call_create(v->graph, v->operands, &again);
    if (status == DW_OK) status = dw__pool_set_threads(1);
    if (status == DW_OK) status = ops_call_bind(again, kernel);
    if (status == DW_OK) status = kernel->run(&again->call, again->scratch.data);
    if (status != DW_OK)
        snprintf(reason, bytes, "on one thread: %s", dw_last_error());
    else if (ops_call_damage(again))
        snprintf(reason, bytes, "on one thread: %s", ops_call_damage(again));
    else if (!same_bytes(first, again))
        snprintf(reason, bytes, "a run on one thread gives other bits than one on %d", threads);
    else
        good = true;
    if (dw__pool_set_threads(threads) != DW_OK) good = false;
    ops_call_destroy(again);
    return good;
}

/* Runs the call without output `skipped`; the other outputs must still be right. */
static bool check_without(const variant *v, const dw__kernel *kernel, ops_call *c, uint32_t skipped,
                          char *reason, size_t bytes) {
    void *data = c->call.outputs[skipped].data;
    c->call.outputs[skipped].data = NULL;
    bool good = false;
    if (!kernel_supports(kernel, &c->call))
        good = true; /* the kernel may not support that; then another one is selected */
    else {
        ops_call_clear(c);
        dw_status status = ops_call_bind(c, kernel);
        if (status == DW_OK) status = kernel->run(&c->call, c->scratch.data);
        if (status != DW_OK)
            snprintf(reason, bytes, "%s", dw_last_error());
        else
            good = check_outputs(v, kernel, c, reason, bytes);
        size_t length = strlen(reason);
        if (!good) snprintf(reason + length, bytes - length, " (output %u not wanted)", skipped);
    }
    c->call.outputs[skipped].data = data;
    return good;
}

static bool check_must_fail(const dw__kernel *kernel, ops_call *c, char *reason, size_t bytes) {
    dw_status status = kernel->run(&c->call, c->scratch.data);
    const char *damage = ops_call_damage(c);
    bool refused = status == DW_INVALID_ARGUMENT || status == DW_INDEX;
    if (refused && *dw_last_error() && !damage) return true;
    snprintf(reason, bytes, "expected INVALID_ARGUMENT or INDEX, got %s%s%s",
             dw_status_name(status), damage ? ", " : "", damage ? damage : "");
    return false;
}

static bool run_checks(const variant *v, const dw__kernel *kernel, ops_call *c, bool thorough,
                       char *reason, size_t bytes) {
    uint64_t before = operands_hash(v->operands);
    if (ops_call_bind(c, kernel) != DW_OK) {
        snprintf(reason, bytes, "prepare: %s", dw_last_error());
        return false;
    }
    if (v->c->must_fail) return check_must_fail(kernel, c, reason, bytes);
    if (kernel->run(&c->call, c->scratch.data) != DW_OK) {
        snprintf(reason, bytes, "%s: %s", "run", dw_last_error());
        return false;
    }
    if (operands_hash(v->operands) != before) {
        snprintf(reason, bytes, "wrote to an operand");
        return false;
    }
    if (!check_outputs(v, kernel, c, reason, bytes)) return false;
    bool ours = strncmp(kernel->name, "reference", 9) != 0;
    if (ours && thorough && !check_repeats(v, kernel, c, reason, bytes)) return false;
    for (uint32_t i = 0; thorough && c->call.output_count > 1 && i < c->call.output_count; i++)
        if (!check_without(v, kernel, c, i, reason, bytes)) return false;
    return true;
}

static dw_status test_kernel(const variant *v, const dw__kernel *kernel, bool thorough) {
    char reason[1024] = "";
    ops_call *c = NULL;
    DW_RETURN_IF_FAILED(ops_call_create(v->graph, v->operands, &c));
    if (kernel_supports(kernel, &c->call)) {
        bool good = run_checks(v, kernel, c, thorough, reason, sizeof reason);
        if (good)
            v->run->of_op.passed++;
        else {
            v->run->of_op.failed++;
            ops_report_failure(v->run->options, "test", v->name, kernel->name, reason);
        }
    }
    ops_call_destroy(c);
    return DW_OK;
}

/* ---- variants of a case ---------------------------------------------------------------------- */

static dw_status test_variant(test_run *run, const ops_case *c, const dw_graph *graph,
                              ops_layout layout, ops_data data) {
    char name[OPS_TEXT_BYTES + 32];
    snprintf(name, sizeof name, "%s | %s %s", c->text, ops_layout_name(layout),
             ops_data_name(data));
    if (!ops_wants_name(run->options, name)) return DW_OK;
    if (run->options->list) {
        printf("%s\n", name);
        return DW_OK;
    }
    ops_operands operands;
    ops_expectation expected = {0};
    dw_status status = DW_OK;
    variant v = {run, c, graph, &operands, &expected, name};
    bool thorough = layout == OPS_CONTIGUOUS && data == OPS_NORMAL;
    DW_RETURN_IF_FAILED(ops_operands_create(c, layout, data, run->options->seed, &operands));
    if (!c->must_fail) DW_TRY(ops_expect(c, graph, &operands, &expected));
    for (const dw__kernel *const *kernel = dw__kernel_candidates(c->op, false); *kernel; kernel++)
        if (ops_wants_kernel(run->options, *kernel)) DW_TRY(test_kernel(&v, *kernel, thorough));
cleanup:
    ops_expectation_destroy(&expected);
    ops_operands_destroy(&operands);
    if (status != DW_OK) {
        run->of_op.failed++;
        ops_report_failure(run->options, "test", name, NULL, dw_last_error());
    }
    return DW_OK;
}

/* Skips a backward whose lse was rounded to a half type, or belongs to other logits than the recomputed ones. With
 * scores in the thousands, exp(score - lse) then exceeds any range, and there is nothing to compare. */
static bool lse_is_rounded(const ops_case *c, dw_dtype dtype) {
    enum { LOGITS = 3 };
    if (c->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD && c->inputs[LOGITS].absent) return true;
    bool reads_lse =
        c->op == DW_OP_CROSS_ENTROPY_BACKWARD || c->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
    return reads_lse && (dtype == DW_BF16 || dtype == DW_F16);
}

static dw_status test_variants(test_run *run, const ops_case *c, const dw_graph *graph,
                               dw_dtype dtype) {
    bool plain = c->must_fail || c->input_count == 0 || (run->options->quick && dtype != DW_F32);
    for (int layout = 0; layout < OPS_LAYOUT_COUNT; layout++)
        if (layout == OPS_CONTIGUOUS || !plain)
            DW_RETURN_IF_FAILED(test_variant(run, c, graph, (ops_layout)layout, OPS_NORMAL));
    if (lse_is_rounded(c, dtype)) return DW_OK;
    for (int data = OPS_NORMAL + 1; data < OPS_DATA_COUNT; data++)
        if (!plain && dw__dtype_is_float(dtype))
            DW_RETURN_IF_FAILED(test_variant(run, c, graph, OPS_CONTIGUOUS, (ops_data)data));
    return DW_OK;
}

/* ---- the mode -------------------------------------------------------------------------------- */

static void finish_op(test_run *run) {
    const ops_tally *t = &run->of_op;
    if (run->started && !run->options->list && t->passed + t->failed + t->skipped > 0)
        printf("%-32s %6lld passed %4lld failed %4lld skipped; largest error %.2f of its bound\n",
               dw_op_name(run->op), (long long)t->passed, (long long)t->failed,
               (long long)t->skipped, run->worst);
    run->worst = 0.0;
    fflush(stdout);
    run->tally->passed += t->passed;
    run->tally->failed += t->failed;
    run->tally->skipped += t->skipped;
    memset(&run->of_op, 0, sizeof run->of_op);
}

static dw_status visit(void *context, const char *text, dw_dtype dtype) {
    test_run *run = context;
    ops_case *c = dw__malloc(sizeof *c);
    dw_graph *graph = NULL;
    dw_status status = DW_OK;
    if (!c) return dw__fail_memory("a case", sizeof *c);
    DW_TRY(ops_case_parse(text, c));
    if (!ops_wants_op(run->options, c)) goto cleanup;
    if (!run->started || run->op != c->op) finish_op(run);
    run->op = c->op;
    run->started = true;
    status = ops_case_graph(c, &graph);
    if (status == DW_TYPE && dtype != DW_F32) { /* the operation does not support this type */
        run->of_op.skipped++;
        status = DW_OK;
    } else if (status != DW_OK) {
        run->of_op.failed++;
        ops_report_failure(run->options, "test", text, NULL, dw_last_error());
        status = DW_OK;
    } else {
        DW_TRY(test_variants(run, c, graph, dtype));
    }
cleanup:
    dw_graph_destroy(graph);
    dw__free(c);
    return status;
}

dw_status ops_mode_test(const ops_options *options, ops_tally *tally) {
    test_run run = {.options = options, .tally = tally};
    dw_status status =
        options->text ? visit(&run, options->text, DW_F32) : ops_each_case(visit, &run);
    finish_op(&run);
    return status;
}
