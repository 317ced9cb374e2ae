/* Mode `grad`: dw_graph_gradient of every differentiable case, all in FP64 through the
 * interpreter.
 *
 * 1. With L = sum over outputs of <w, y> for random weights w, the gradient's component along a
 *    random direction d of one operand is compared with the central difference of fourth order
 *        (8 (L(h) - L(-h)) - (L(2h) - L(-2h))) / 12h,   L(t) = L at x + t d.
 *    It may differ by 1e-6 of sum |g d|: rounding gives about 1e-16 / h = 1e-10 of L.
 * 2. A composite's own rule is compared, element by element, with the gradient of its expansion.
 * Both are done with the gradient of output 0 alone, as models use it, and with those of all
 * outputs. */
#include "kernel/reference/interpret.h"
#include "kernel/reference/scalar.h"
#include "ops_driver.h"
#include "ops_run_case.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static const double step = 1e-6, tolerance = 1e-6, rule_tolerance = 1e-9;

enum { MAX_LEAVES = OPS_MAX_INPUTS + OPS_MAX_OUTPUTS };

typedef struct grad_run {
    const ops_options *options;
    ops_tally *tally;
    ops_tally of_op;
    dw_op op;
    bool started;
} grad_run;

/* A case, and the data of its checks. */
typedef struct grad_case {
    const ops_case *c;
    dw_graph *forward; /* only the node */
    ops_operands operands;
    uint32_t leaf_count;
    /* The operands, followed by the weights of the outputs in `weighted`. */
    dw__tensor leaves[MAX_LEAVES];
    bool weighted[OPS_MAX_OUTPUTS];
    /* F64, contiguous; data is NULL for outputs without a weight. */
    dw__tensor weights[OPS_MAX_OUTPUTS];
    uint32_t output_count;
} grad_case;

static const dw__interpret_options high_precision = {true};

static void free_tensors(dw__tensor *tensors, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        dw__free_aligned(tensors[i].data);
        tensors[i].data = NULL;
    }
}

/* ---- L --------------------------------------------------------------------------------------- */

/* Returns the sum of <weight, output> over the finite elements. */
static dw_status weighted_sum(const grad_case *g, const dw__tensor *leaves, double *sum) {
    dw__tensor results[OPS_MAX_OUTPUTS] = {{0}};
    DW_RETURN_IF_FAILED(dw__interpret(g->forward, NULL, leaves, results, &high_precision));
    *sum = 0.0;
    for (uint32_t i = 0; i < g->output_count; i++) {
        if (!g->weighted[i]) continue;
        const double *y = results[i].data, *w = g->weights[i].data;
        for (int64_t j = 0; j < dw__tensor_count(&results[i]); j++)
            if (isfinite(y[j])) *sum += w[j] * y[j];
    }
    free_tensors(results, g->output_count);
    return DW_OK;
}

/* Draws random weights for the outputs; the weight is 0 where the output is not finite. */
static dw_status make_weights(grad_case *g, bool all, uint64_t seed) {
    ops_random random = ops_random_start(seed, "weights");
    dw__tensor results[OPS_MAX_OUTPUTS] = {{0}};
    dw_status status = DW_OK;
    DW_TRY(dw__interpret(g->forward, NULL, g->leaves, results, &high_precision));
    for (uint32_t i = 0; i < g->output_count; i++) {
        g->weighted[i] = results[i].dtype == DW_F64 && (i == 0 || all);
        if (!g->weighted[i]) continue;
        double *values = results[i].data;
        for (int64_t j = 0; j < dw__tensor_count(&results[i]); j++)
            values[j] = isfinite(values[j]) ? ops_random_normal(&random) : 0.0;
        g->weights[i] = results[i];
        results[i].data = NULL;
    }
cleanup:
    free_tensors(results, g->output_count);
    return status;
}

/* ---- gradients by the library ---------------------------------------------------------------- */

/* Adds the gradients of all float leaves of `graph` as outputs. has_grad[leaf] tells which gradients exist.
 * DW_UNSUPPORTED: the operation has no gradient. */
static dw_status differentiate(dw_graph *graph, const grad_case *g, bool *has_grad) {
    dw_value outputs[OPS_MAX_OUTPUTS], output_grads[OPS_MAX_OUTPUTS];
    dw_value wrt[OPS_MAX_INPUTS], grads[OPS_MAX_INPUTS];
    uint32_t from[OPS_MAX_INPUTS], wrt_count = 0, output_count = 0;
    for (uint32_t i = 0; i < g->leaf_count; i++) {
        has_grad[i] = false;
        if (!dw__dtype_is_float(g->leaves[i].dtype)) continue;
        from[wrt_count] = i;
        wrt[wrt_count++] = dw_graph_leaf_at(graph, i);
    }
    for (uint32_t i = 0; i < g->output_count; i++) {
        char name[] = {'w', (char)('a' + i), '\0'};
        if (!g->weighted[i]) continue;
        dw_value y = dw_graph_output(graph, i);
        dw_dim shape[DW_MAX_RANK];
        memcpy(shape, dw_value_shape(graph, y), sizeof(dw_dim) * (size_t)dw_value_rank(graph, y));
        outputs[output_count] = y;
        DW_RETURN_IF_FAILED(dw_graph_leaf(graph, DW_ROLE_GRADIENT, name, dw_value_dtype(graph, y),
                                          dw_value_rank(graph, y), shape,
                                          &output_grads[output_count++]));
    }
    DW_RETURN_IF_FAILED(
        dw_graph_gradient(graph, output_count, outputs, output_grads, wrt_count, wrt, grads));
    for (uint32_t i = 0; i < wrt_count; i++) {
        has_grad[from[i]] = grads[i] != DW_NONE;
        if (grads[i] != DW_NONE) DW_RETURN_IF_FAILED(dw_graph_add_output(graph, grads[i]));
    }
    return dw_graph_verify(graph);
}

/* gradients[leaf]: F64 and contiguous; data is NULL if there is no gradient. */
static dw_status evaluate_gradients(const dw_graph *graph, const grad_case *g, const bool *has_grad,
                                    dw__tensor *gradients) {
    dw__tensor results[OPS_MAX_OUTPUTS + OPS_MAX_INPUTS] = {{0}};
    dw__tensor leaves[MAX_LEAVES];
    uint32_t leaf_count = g->leaf_count, next = g->output_count;
    memcpy(leaves, g->leaves, leaf_count * sizeof *leaves);
    for (uint32_t i = 0; i < g->output_count; i++)
        if (g->weighted[i]) leaves[leaf_count++] = g->weights[i];
    DW_RETURN_IF_FAILED(dw__interpret(graph, NULL, leaves, results, &high_precision));
    for (uint32_t i = 0; i < g->leaf_count; i++) {
        gradients[i].data = NULL;
        if (has_grad[i]) gradients[i] = results[next++];
    }
    free_tensors(results, g->output_count);
    return DW_OK;
}

static dw_status library_gradients(const grad_case *g, bool expanded, bool *has_grad,
                                   dw__tensor *gradients) {
    dw_graph *graph = NULL;
    dw_status status = DW_OK;
    DW_TRY(dw_graph_clone(g->forward, &graph));
    if (expanded) DW_TRY(dw_graph_run_pass(&graph, DW_PASS_EXPAND));
    DW_TRY(differentiate(graph, g, has_grad));
    DW_TRY(evaluate_gradients(graph, g, has_grad, gradients));
cleanup:
    dw_graph_destroy(graph);
    return status;
}

/* Returns whether the gradient differs from the derivative by definition: that of stop_gradient, and of a padding
 * row. */
static bool differs_by_definition(const ops_case *c) {
    for (uint32_t i = 0; i < c->attr_count; i++)
        if (c->attrs[i].key == DW_ATTR_KEY_PADDING_INDEX && c->attrs[i].integer >= 0) return true;
    return c->op == DW_OP_STOP_GRADIENT;
}

/* Moves operands of elementwise operations away from kinks (max, relu, abs): two operands, or an operand and zero,
 * differ by at least 1/256. */
static void avoid_kinks(grad_case *g) {
    if (!dw_op_is_elementwise(g->c->op)) return;
    for (uint32_t i = 0; i < g->leaf_count; i++) {
        double *values = g->leaves[i].data;
        for (int64_t j = 0; g->leaves[i].dtype == DW_F64 && j < dw__tensor_count(&g->leaves[i]);
             j++)
            values[j] = round(values[j] * 64.0) / 64.0 + (i + 1) / 256.0;
    }
}

/* ---- checks ---------------------------------------------------------------------------------- */

static dw_status difference(const grad_case *g, uint32_t leaf, const double *direction,
                            double *slope) {
    static const struct { double at, weight; } stencil[] = {{1, 8}, {-1, -8}, {2, -1}, {-2, 1}};
    dw__tensor leaves[MAX_LEAVES], moved = g->leaves[leaf];
    int64_t count = dw__tensor_count(&moved);
    dw_status status = DW_OK;
    double *values = dw__malloc((size_t)count * sizeof *values);
    if (!values) return dw__fail_memory("a moved operand", (size_t)count * sizeof *values);
    memcpy(leaves, g->leaves, sizeof leaves);
    dw__tensor_set_contiguous(&moved);
    moved.dtype = DW_F64;
    moved.data = values;
    leaves[leaf] = moved;
    *slope = 0.0;
    for (size_t k = 0; k < DW_COUNT(stencil); k++) {
        double sum;
        for (int64_t i = 0; i < count; i++)
            values[i] = ops_element(&g->leaves[leaf], i) + stencil[k].at * step * direction[i];
        DW_TRY(weighted_sum(g, leaves, &sum));
        *slope += stencil[k].weight * sum / (12.0 * step);
    }
cleanup:
    dw__free(values);
    return status;
}

/* Checks one random direction of one leaf. Sets *good to false and fills *reason if the two disagree. */
static dw_status check_direction(const grad_case *g, uint32_t leaf, const dw__tensor *gradient,
                                 ops_random *random, char *reason, size_t bytes, bool *good) {
    int64_t count = dw__tensor_count(&g->leaves[leaf]);
    double slope = 0.0, sum = 0.0, magnitude = 0.0, level;
    dw_status status = DW_OK;
    double *direction = dw__malloc((size_t)count * sizeof *direction);
    if (!direction) return dw__fail_memory("a direction", (size_t)count * sizeof *direction);
    for (int64_t i = 0; i < count; i++) {
        double component = gradient->data ? ((const double *)gradient->data)[i] : 0.0;
        direction[i] = ops_random_normal(random);
        sum += component * direction[i];
        magnitude += fabs(component * direction[i]);
    }
    DW_TRY(difference(g, leaf, direction, &slope));
    DW_TRY(weighted_sum(g, g->leaves, &level));
    double bound = tolerance * magnitude + 100.0 * 0x1p-53 * (fabs(level) + 1.0) / step;
    *good = fabs(sum - slope) <= bound;
    if (!*good)
        snprintf(reason, bytes,
                 "operand leaf %u: gradient along a direction %.12g, difference %.12g, "
                 "may be off by %.3g",
                 leaf, sum, slope, bound);
cleanup:
    dw__free(direction);
    return status;
}

static bool same_gradients(const grad_case *g, const bool *has_a, const dw__tensor *a,
                           const bool *has_b, const dw__tensor *b, char *reason, size_t bytes) {
    for (uint32_t i = 0; i < g->leaf_count; i++) {
        double scale = 0.0;
        for (int64_t j = 0; has_b[i] && j < dw__tensor_count(&b[i]); j++)
            scale = fmax(scale, fabs(((const double *)b[i].data)[j]));
        if (!has_a[i] && !has_b[i]) continue;
        const dw__tensor *either = has_a[i] ? &a[i] : &b[i];
        for (int64_t j = 0; j < dw__tensor_count(either); j++) {
            double x = has_a[i] ? ((const double *)a[i].data)[j] : 0.0;
            double y = has_b[i] ? ((const double *)b[i].data)[j] : 0.0;
            if (fabs(x - y) <= rule_tolerance * (scale + 1e-3) || (isnan(x) && isnan(y))) continue;
            snprintf(reason, bytes,
                     "operand leaf %u, element %lld: the rule gives %.12g, the "
                     "expansion's gradient %.12g",
                     i, (long long)j, x, y);
            return false;
        }
    }
    return true;
}

/* Runs every check for the current weights. *supported is false if the operation has no gradient. */
static dw_status check_case(const grad_case *g, int directions, uint64_t seed, char *reason,
                            size_t bytes, bool *supported, bool *good) {
    bool has_grad[OPS_MAX_INPUTS], has_expanded[OPS_MAX_INPUTS];
    dw__tensor gradients[OPS_MAX_INPUTS] = {{0}}, expanded[OPS_MAX_INPUTS] = {{0}};
    ops_random random = ops_random_start(seed, "directions");
    dw_status status = library_gradients(g, false, has_grad, gradients);
    *supported = status != DW_UNSUPPORTED;
    *good = true;
    if (!*supported) return DW_OK;
    if (status != DW_OK) goto cleanup;
    if (differs_by_definition(g->c)) directions = 0;
    for (uint32_t i = 0; *good && i < g->leaf_count; i++)
        for (int k = 0; *good && dw__dtype_is_float(g->leaves[i].dtype) && k < directions; k++)
            DW_TRY(check_direction(g, i, &gradients[i], &random, reason, bytes, good));
    if (*good && dw_op_is_composite(g->c->op)) {
        DW_TRY(library_gradients(g, true, has_expanded, expanded));
        *good = same_gradients(g, has_grad, gradients, has_expanded, expanded, reason, bytes);
    }
cleanup:
    free_tensors(gradients, OPS_MAX_INPUTS);
    free_tensors(expanded, OPS_MAX_INPUTS);
    return status;
}

/* ---- the mode -------------------------------------------------------------------------------- */

static void check_weighting(grad_run *run, grad_case *g, bool all) {
    char name[OPS_TEXT_BYTES + 32], reason[1024] = "";
    bool supported = true, good = false;
    snprintf(name, sizeof name, "%s | %s", g->c->text, all ? "all outputs" : "output 0");
    if (!ops_wants_name(run->options, name)) return;
    if (run->options->list) {
        printf("%s\n", name);
        return;
    }
    dw_status status = make_weights(g, all, run->options->seed);
    if (status == DW_OK)
        status = check_case(g, run->options->quick ? 1 : 3, run->options->seed, reason,
                            sizeof reason, &supported, &good);
    free_tensors(g->weights, OPS_MAX_OUTPUTS);
    if (status != DW_OK) snprintf(reason, sizeof reason, "%s", dw_last_error());
    if (status != DW_OK || !good) {
        run->of_op.failed++;
        ops_report_failure(run->options, "grad", name, NULL, reason);
    } else if (!supported) {
        run->of_op.skipped++;
    } else {
        run->of_op.passed++;
    }
}

static void finish_op(grad_run *run) {
    const ops_tally *t = &run->of_op;
    if (run->started && !run->options->list && t->passed + t->failed + t->skipped > 0)
        printf("%-32s %6lld passed %4lld failed %4lld skipped\n", dw_op_name(run->op),
               (long long)t->passed, (long long)t->failed, (long long)t->skipped);
    fflush(stdout);
    run->tally->passed += t->passed;
    run->tally->failed += t->failed;
    run->tally->skipped += t->skipped;
    memset(&run->of_op, 0, sizeof run->of_op);
}

static bool has_float_output(const dw_graph *graph, bool *several) {
    uint32_t floats = 0;
    for (uint32_t i = 0; i < dw_graph_output_count(graph); i++)
        floats += dw__dtype_is_float(dw_value_dtype(graph, dw_graph_output(graph, i)));
    *several = floats > 1;
    return dw__dtype_is_float(dw_value_dtype(graph, dw_graph_output(graph, 0)));
}

static dw_status visit_parsed(grad_run *run, const ops_case *c) {
    grad_case *g = dw__calloc(1, sizeof *g);
    bool several = false;
    dw_status status = DW_OK;
    if (!g) return dw__fail_memory("a gradient case", sizeof *g);
    g->c = c;
    DW_TRY(ops_case_graph(c, &g->forward));
    if (!has_float_output(g->forward, &several)) goto cleanup;
    DW_TRY(ops_operands_create(c, OPS_CONTIGUOUS, OPS_NORMAL, run->options->seed, &g->operands));
    g->leaf_count = ops_operands_leaves(&g->operands, g->leaves);
    g->output_count = dw_graph_output_count(g->forward);
    avoid_kinks(g);
    check_weighting(run, g, false);
    if (several) check_weighting(run, g, true);
cleanup:
    if (g->operands.count) ops_operands_destroy(&g->operands);
    dw_graph_destroy(g->forward);
    dw__free(g);
    return status;
}

static dw_status visit(void *context, const char *text, dw_dtype dtype) {
    grad_run *run = context;
    ops_case *c = dw__malloc(sizeof *c);
    dw_status status = DW_OK;
    if (!c) return dw__fail_memory("a case", sizeof *c);
    DW_TRY(ops_case_parse(text, c));
    if (dtype != DW_F64 || c->must_fail || !ops_wants_op(run->options, c)) goto cleanup;
    if (!run->started || run->op != c->op) finish_op(run);
    run->op = c->op;
    run->started = true;
    status = visit_parsed(run, c);
    if (status != DW_OK) {
        run->of_op.failed++;
        ops_report_failure(run->options, "grad", text, NULL, dw_last_error());
        status = DW_OK;
    }
cleanup:
    dw__free(c);
    return status;
}

dw_status ops_mode_grad(const ops_options *options, ops_tally *tally) {
    grad_run run = {.options = options, .tally = tally};
    dw_status status =
        options->text ? visit(&run, options->text, DW_F64) : ops_each_case(visit, &run);
    finish_op(&run);
    return status;
}
