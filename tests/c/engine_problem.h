/* A model with its data, and the results of an engine beside those of the interpreter in FP64.
 *
 * Tolerance: the interpreter also runs the same graph in FP32. Its distance from FP64 is the cost of rounding
 * alone on these data. The engine adds in another order and may be SLACK times as far, plus a few units in
 * the last place of the tensor's norm. */
#ifndef DW_ENGINE_PROBLEM_H
#define DW_ENGINE_PROBLEM_H

#include "deepwell/engine.h"
#include "engine_models.h"
#include "kernel/reference/interpret.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const double SLACK = 8.0;
static const double FLOOR = 1e-6;

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

enum { MOST_LEAVES = 64, MOST_OUTPUTS = 8 };

/* ---- one model at one size ------------------------------------------------------------------- */

typedef struct problem {
    dw_graph *graph;
    int64_t sizes[2];
    uint32_t leaf_count, output_count, wrt_count;
    dw_value wrt[MOST_LEAVES];
    uint32_t grad_outputs[MOST_OUTPUTS], grad_output_count;
    dw__tensor leaves[MOST_LEAVES];        /* owned */
    dw__tensor output_grads[MOST_OUTPUTS]; /* owned */
    dw_binding leaf_bindings[MOST_LEAVES], output_grad_bindings[MOST_OUTPUTS];
} problem;

static inline size_t bytes_of(const dw__tensor *tensor) { return dw__tensor_bytes(tensor); }

/* Differentiates every output with respect to every parameter. */
static inline void problem_begin(problem *p, dw_graph *graph, int64_t batch, int64_t sequence) {
    memset(p, 0, sizeof *p);
    p->graph = graph;
    p->sizes[0] = batch;
    p->sizes[1] = sequence;
    p->leaf_count = dw_graph_leaf_count(graph);
    p->output_count = dw_graph_output_count(graph);
    assert_true(p->leaf_count <= MOST_LEAVES && p->output_count <= MOST_OUTPUTS);
    for (uint32_t i = 0; i < p->leaf_count; i++) {
        dw_value leaf = dw_graph_leaf_at(graph, i);
        OK(dw__value_tensor_at(graph, leaf, p->sizes, &p->leaves[i]));
        p->leaves[i].data = dw__malloc_aligned(bytes_of(&p->leaves[i]));
        model_fill(graph, leaf, dw__tensor_count(&p->leaves[i]), 7, p->leaves[i].data);
        p->leaf_bindings[i].data = p->leaves[i].data;
        if (dw_value_role(graph, leaf) == DW_ROLE_PARAMETER) p->wrt[p->wrt_count++] = leaf;
    }
    for (uint32_t i = 0; i < p->output_count; i++) {
        p->grad_outputs[p->grad_output_count++] = i;
        dw_value output = dw_graph_output(graph, i);
        OK(dw__value_tensor_at(graph, output, p->sizes, &p->output_grads[i]));
        p->output_grads[i].data = dw__malloc_aligned(bytes_of(&p->output_grads[i]));
        model_fill(graph, output, dw__tensor_count(&p->output_grads[i]), 11,
                   p->output_grads[i].data);
        p->output_grad_bindings[i].data = p->output_grads[i].data;
    }
}

static inline void problem_end(problem *p) {
    for (uint32_t i = 0; i < p->leaf_count; i++) dw__free_aligned(p->leaves[i].data);
    for (uint32_t i = 0; i < p->output_count; i++) dw__free_aligned(p->output_grads[i].data);
}

/* ---- results --------------------------------------------------------------------------------- */

typedef struct results {
    uint32_t output_count, grad_count;
    dw__tensor outputs[MOST_OUTPUTS];
    dw__tensor grads[MOST_LEAVES]; /* data NULL: no gradient */
} results;

static inline void results_end(results *r) {
    for (uint32_t i = 0; i < r->output_count; i++) dw__free_aligned(r->outputs[i].data);
    for (uint32_t i = 0; i < r->grad_count; i++) dw__free_aligned(r->grads[i].data);
}

/* Memory for the engine's results. */
static inline void results_begin(const problem *p, const dw_engine *engine, results *r) {
    memset(r, 0, sizeof *r);
    r->output_count = p->output_count;
    r->grad_count = p->wrt_count;
    for (uint32_t i = 0; i < p->output_count; i++) {
        OK(dw__value_tensor_at(p->graph, dw_graph_output(p->graph, i), p->sizes, &r->outputs[i]));
        r->outputs[i].data = dw__malloc_aligned(bytes_of(&r->outputs[i]));
        memset(r->outputs[i].data, 0x5a, bytes_of(&r->outputs[i]));
    }
    for (uint32_t j = 0; j < p->wrt_count; j++) {
        OK(dw__value_tensor_at(p->graph, p->wrt[j], p->sizes, &r->grads[j]));
        if (!dw_engine_has_grad(engine, j)) continue;
        r->grads[j].data = dw__malloc_aligned(bytes_of(&r->grads[j]));
        memset(r->grads[j].data, 0x5a, bytes_of(&r->grads[j]));
    }
}

static inline void bind_all(uint32_t count, const dw__tensor *tensors, dw_binding *bindings) {
    for (uint32_t i = 0; i < count; i++) bindings[i] = (dw_binding){.data = tensors[i].data};
}

static inline void *make_arena(const dw_plan *plan) {
    void *arena = dw__malloc_aligned(dw_plan_arena_bytes(plan));
    assert_non_null(arena);
    return arena;
}

static inline dw_status forward(dw_plan *plan, void *arena, const problem *p, const results *r) {
    dw_binding outputs[MOST_OUTPUTS];
    bind_all(r->output_count, r->outputs, outputs);
    return dw_plan_forward(plan, arena, p->leaf_bindings, outputs, NULL);
}

static inline dw_status backward(dw_plan *plan, void *arena, const problem *p, const results *r) {
    dw_binding outputs[MOST_OUTPUTS], grads[MOST_LEAVES];
    bind_all(r->output_count, r->outputs, outputs);
    bind_all(r->grad_count, r->grads, grads);
    return dw_plan_backward(plan, arena, p->leaf_bindings, outputs, p->output_grad_bindings, grads,
                            NULL);
}

static inline void run_both(dw_engine *engine, const problem *p, results *r) {
    dw_plan *plan = NULL;
    OK(dw_engine_plan(engine, p->sizes, &plan));
    results_begin(p, engine, r);
    void *arena = make_arena(plan);
    memset(arena, 0xff, dw_plan_arena_bytes(plan)); /* NaNs, if read before they are written */
    OK(forward(plan, arena, p, r));
    OK(backward(plan, arena, p, r));
    dw__free_aligned(arena);
    dw_plan_release(plan);
}

static inline dw_engine *make_engine_with(const problem *p, const dw_engine_options *options) {
    dw_engine *engine = NULL;
    OK(dw_engine_create(p->graph, p->grad_output_count, p->grad_outputs, p->wrt_count, p->wrt,
                        options, &engine));
    return engine;
}

static inline dw_engine *make_engine(const problem *p, int recompute, int fuse) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.recompute = recompute;
    options.fuse = fuse;
    return make_engine_with(p, &options);
}

/* ---- the oracle ------------------------------------------------------------------------------ */

static inline dw__tensor as_f64(const dw__tensor *tensor) {
    dw__tensor wide = *tensor;
    int64_t count = dw__tensor_count(tensor);
    wide.dtype = DW_F64;
    double *data = dw__malloc_aligned((size_t)count * sizeof *data);
    for (int64_t i = 0; i < count; i++) data[i] = (double)((const float *)tensor->data)[i];
    wide.data = data;
    return wide;
}

/* Interprets the given graph with its gradients; the engine takes no part. */
static inline void interpret(const problem *p, bool high_precision, results *r) {
    dw_graph *graph = NULL;
    dw_value outputs[MOST_OUTPUTS], output_grads[MOST_OUTPUTS], grads[MOST_LEAVES];
    OK(dw_graph_clone(p->graph, &graph));
    for (uint32_t i = 0; i < p->grad_output_count; i++) {
        char name[32];
        snprintf(name, sizeof name, "test.gradient.%u", i);
        outputs[i] = dw_graph_output(graph, p->grad_outputs[i]);
        dw_dim shape[DW_MAX_RANK];
        int rank = dw_value_rank(graph, outputs[i]);
        for (int a = 0; a < rank; a++) shape[a] = dw_value_shape(graph, outputs[i])[a];
        OK(dw_graph_leaf(graph, DW_ROLE_GRADIENT, name, dw_value_dtype(graph, outputs[i]), rank,
                         shape, &output_grads[i]));
    }
    OK(dw_graph_gradient(graph, p->grad_output_count, outputs, output_grads, p->wrt_count, p->wrt,
                         grads));
    for (uint32_t j = 0; j < p->wrt_count; j++) {
        if (grads[j] != DW_NONE) OK(dw_graph_add_output(graph, grads[j]));
    }
    dw__tensor leaves[MOST_LEAVES + MOST_OUTPUTS], computed[MOST_OUTPUTS + MOST_LEAVES];
    uint32_t leaf_count = p->leaf_count + p->grad_output_count;
    for (uint32_t i = 0; i < leaf_count; i++) {
        leaves[i] =
            i < p->leaf_count ? p->leaves[i] : p->output_grads[p->grad_outputs[i - p->leaf_count]];
        if (high_precision && leaves[i].dtype == DW_F32) leaves[i] = as_f64(&leaves[i]);
    }
    dw__interpret_options options = {.high_precision = high_precision};
    OK(dw__interpret(graph, p->sizes, leaves, computed, &options));
    memset(r, 0, sizeof *r);
    r->output_count = p->output_count;
    r->grad_count = p->wrt_count;
    uint32_t at = 0;
    for (uint32_t i = 0; i < p->output_count; i++) r->outputs[i] = computed[at++];
    for (uint32_t j = 0; j < p->wrt_count; j++) {
        if (grads[j] != DW_NONE) r->grads[j] = computed[at++];
    }
    for (uint32_t i = 0; i < leaf_count; i++) {
        if (leaves[i].dtype == DW_F64) dw__free_aligned(leaves[i].data);
    }
    dw_graph_destroy(graph);
}

static inline double element(const dw__tensor *tensor, int64_t i) {
    return tensor->dtype == DW_F64 ? ((const double *)tensor->data)[i]
                                   : (double)((const float *)tensor->data)[i];
}

/* Euclidean norm of x - y, or of x if y is NULL. */
static inline double distance(const dw__tensor *x, const dw__tensor *y) {
    double sum = 0.0;
    for (int64_t i = 0; i < dw__tensor_count(x); i++) {
        double d = element(x, i) - (y ? element(y, i) : 0.0);
        sum += d * d;
    }
    return sqrt(sum);
}

static inline void expect_close(const char *name, const dw__tensor *got, const dw__tensor *f32,
                                const dw__tensor *f64, double scale) {
    double error = distance(got, f64), allowed = SLACK * distance(f32, f64);
    allowed += FLOOR * fmax(distance(f64, NULL), scale);
    if (!(error <= allowed)) fail_msg("%s: error %g, allowed %g", name, error, allowed);
}

/* A tenth of the mean norm: a gradient that cancels (of a query that sees one key) has the error of the terms
 * of its sum. */
static inline double cancelling_scale(const results *f64) {
    double sum = 0.0;
    for (uint32_t j = 0; j < f64->grad_count; j++) {
        if (f64->grads[j].data) sum += distance(&f64->grads[j], NULL);
    }
    return 0.1 * sum / (f64->grad_count ? f64->grad_count : 1);
}

static inline void expect_results(const problem *p, const results *got, const results *f32,
                                  const results *f64) {
    for (uint32_t i = 0; i < p->output_count; i++) {
        expect_close(dw_value_name(p->graph, dw_graph_output(p->graph, i)), &got->outputs[i],
                     &f32->outputs[i], &f64->outputs[i], 0.0);
    }
    double scale = cancelling_scale(f64);
    for (uint32_t j = 0; j < p->wrt_count; j++) {
        const char *name = dw_value_name(p->graph, p->wrt[j]);
        if (!got->grads[j].data != !f64->grads[j].data) fail_msg("%s: whether it has one", name);
        if (!got->grads[j].data) continue;
        expect_close(name, &got->grads[j], &f32->grads[j], &f64->grads[j], scale);
    }
}

static inline void expect_same(const dw_graph *graph, dw_value value, const dw__tensor *a,
                               const dw__tensor *b) {
    if (!a->data || !b->data || memcmp(a->data, b->data, bytes_of(a)) == 0) return;
    int64_t at = 0;
    while (element(a, at) == element(b, at)) at++;
    fail_msg("%s: element %lld is %.9g, not %.9g", dw_value_name(graph, value), (long long)at,
             element(b, at), element(a, at));
}

/* Gradients that either of the two lacks are not compared. */
static inline void expect_same_bits(const problem *p, const results *a, const results *b) {
    for (uint32_t i = 0; i < a->output_count; i++) {
        expect_same(p->graph, dw_graph_output(p->graph, i), &a->outputs[i], &b->outputs[i]);
    }
    for (uint32_t j = 0; j < a->grad_count; j++) {
        expect_same(p->graph, p->wrt[j], &a->grads[j], &b->grads[j]);
    }
}

/* ---- models ---------------------------------------------------------------------------------- */

typedef dw_status (*model_builder)(model *m);

static inline dw_graph *build(model_builder builder, double dropout) {
    model m = {.dropout = dropout};
    OK(builder(&m));
    return m.graph;
}

#endif
