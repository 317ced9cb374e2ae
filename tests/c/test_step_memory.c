/* Compares the memory of a step with a sum computed from the graph's shapes. tests/python/test_step_memory.py measures
 * the memory of real steps. */
#include "deepwell/step_memory.h"
#include "engine_models.h"
#include "kernel/reference/interpret.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

enum { MOST_MOMENTS = 32, MOST_LEAVES = 64 };
static const int64_t SIZES[2] = {2, 13};

typedef struct step {
    dw_graph *graph;
    dw_engine *engine;
    dw_plan *plan;
    uint32_t wrt_count, moments;
    dw_step_moment moment[MOST_MOMENTS];
    uint32_t peak;
} step;

/* Gradients of output 0 with respect to all parameters, or none. */
static void begin(step *s, bool training) {
    const uint32_t first = 0;
    dw_value wrt[MOST_LEAVES];
    model m = {0};
    memset(s, 0, sizeof *s);
    OK(model_gpt(&m));
    s->graph = m.graph;
    for (uint32_t i = 0; i < dw_graph_leaf_count(s->graph); i++) {
        dw_value leaf = dw_graph_leaf_at(s->graph, i);
        if (training && dw_value_role(s->graph, leaf) == DW_ROLE_PARAMETER)
            wrt[s->wrt_count++] = leaf;
    }
    OK(dw_engine_create(s->graph, training, &first, s->wrt_count, wrt, NULL, &s->engine));
    OK(dw_engine_plan(s->engine, SIZES, &s->plan));
    s->moments = dw_plan_step_moments(s->plan);
    assert_true(s->moments <= MOST_MOMENTS);
}

static void end(step *s) {
    dw_plan_release(s->plan);
    dw_engine_destroy(s->engine);
    dw_graph_destroy(s->graph);
}

static size_t bytes_of(const step *s, dw_value value) {
    dw__tensor tensor;
    OK(dw__value_tensor_at(s->graph, value, SIZES, &tensor));
    return dw__tensor_bytes(&tensor);
}

static size_t leaf_bytes(const step *s, dw_role role) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < dw_graph_leaf_count(s->graph); i++) {
        dw_value leaf = dw_graph_leaf_at(s->graph, i);
        if (dw_value_role(s->graph, leaf) == role) bytes += bytes_of(s, leaf);
    }
    return bytes;
}

static size_t output_bytes(const step *s) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < dw_graph_output_count(s->graph); i++)
        bytes += bytes_of(s, dw_graph_output(s->graph, i));
    return bytes;
}

static void test_training(void **state) {
    (void)state;
    step s;
    begin(&s, true);
    dw_step_options options = DW_STEP_OPTIONS_DEFAULT;
    options.resident = 1000;
    OK(dw_plan_step_memory(s.plan, &options, s.moment, &s.peak));
    size_t parameters = leaf_bytes(&s, DW_ROLE_PARAMETER);
    assert_int_equal(s.moments, dw_plan_part_count(s.plan) + 2);
    for (uint32_t i = 0; i < s.moments; i++) {
        const dw_step_moment *m = &s.moment[i];
        assert_int_equal(m->phase, i == 0              ? DW_STEP_FORWARD
                                   : i < s.moments - 1 ? DW_STEP_BACKWARD
                                                       : DW_STEP_UPDATE);
        assert_int_equal(m->parameters, parameters);
        assert_int_equal(m->constants, leaf_bytes(&s, DW_ROLE_CONSTANT));
        assert_int_equal(m->inputs, leaf_bytes(&s, DW_ROLE_INPUT) + leaf_bytes(&s, DW_ROLE_SEED));
        assert_int_equal(m->optimizer, 2 * parameters + 4 * s.wrt_count);
        assert_int_equal(m->arena, dw_plan_arena_bytes(s.plan));
        assert_int_equal(m->resident, 1000);
        assert_int_equal(m->total, m->parameters + m->constants + m->inputs + m->optimizer +
                                       m->arena + m->outputs + m->output_gradients + m->gradients +
                                       m->temporaries + m->library + m->resident);
        assert_true(m->total <= s.moment[s.peak].total);
    }
    const dw_step_moment *last = &s.moment[s.moments - 1];
    assert_int_equal(s.moment[0].outputs, output_bytes(&s));
    assert_int_equal(s.moment[0].gradients, 0);
    assert_int_equal(s.moment[s.moments - 2].gradients, parameters);
    assert_int_equal(last->gradients, parameters);
    assert_int_equal(last->outputs, 0);
    assert_int_equal(s.moment[1].output_gradients, bytes_of(&s, dw_graph_output(s.graph, 0)));
    end(&s);
}

static void test_options(void **state) {
    (void)state;
    step s;
    begin(&s, true);
    size_t parameters = leaf_bytes(&s, DW_ROLE_PARAMETER), largest = 0;
    for (uint32_t i = 0; i < dw_graph_leaf_count(s.graph); i++) {
        dw_value leaf = dw_graph_leaf_at(s.graph, i);
        if (dw_value_role(s.graph, leaf) == DW_ROLE_PARAMETER && bytes_of(&s, leaf) > largest)
            largest = bytes_of(&s, leaf);
    }
    uint8_t kept[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    dw_step_options options = {.struct_size = sizeof options,
                               .optimizer = DW_STEP_ADAMW_TORCH,
                               .add_gradients = 1,
                               .outputs_kept = kept};
    OK(dw_plan_step_memory(s.plan, &options, s.moment, &s.peak));
    const dw_step_moment *last = &s.moment[s.moments - 1];
    assert_int_equal(s.moment[0].gradients, parameters);
    /* A single part: as many bytes again. */
    assert_int_equal(s.moment[1].gradients, 2 * parameters);
    assert_int_equal(last->gradients, parameters);
    assert_int_equal(last->outputs, output_bytes(&s));
    assert_int_equal(last->temporaries, 2 * largest);
    options.optimizer = DW_STEP_NO_OPTIMIZER;
    OK(dw_plan_step_memory(s.plan, &options, s.moment, &s.peak));
    assert_int_equal(last->optimizer + last->temporaries, 0);

    options.optimizer = DW_STEP_OPTIMIZERS;
    assert_int_equal(dw_plan_step_memory(s.plan, &options, s.moment, &s.peak), DW_INVALID_ARGUMENT);
    options = (dw_step_options)DW_STEP_OPTIONS_DEFAULT;
    options.struct_size--;
    assert_int_equal(dw_plan_step_memory(s.plan, &options, s.moment, &s.peak), DW_INVALID_ARGUMENT);
    options = (dw_step_options)DW_STEP_OPTIONS_DEFAULT;
    options.resident = SIZE_MAX - 5;
    assert_int_equal(dw_plan_step_memory(s.plan, &options, s.moment, &s.peak), DW_SHAPE);
    end(&s);
}

static void test_inference(void **state) {
    (void)state;
    step s;
    begin(&s, false);
    assert_int_equal(s.moments, 1);
    OK(dw_plan_step_memory(s.plan, NULL, s.moment, &s.peak));
    assert_int_equal(s.moment[0].gradients + s.moment[0].optimizer, 0);
    assert_int_equal(s.moment[0].outputs, output_bytes(&s));
    end(&s);
}

/* The largest figure is the bound in the plan's listing, and at most the arena, up to padding. */
static void test_inside_the_arena(void **state) {
    (void)state;
    step s;
    size_t alive[512], most = 0;
    begin(&s, true);
    uint32_t count = dw_plan_arena_alive(s.plan, 0, NULL);
    assert_true(count > 10 && count <= 512 && dw_plan_first_backward(s.plan) < count);
    assert_int_equal(dw_plan_arena_alive(s.plan, 512, alive), count);
    for (uint32_t i = 0; i < count; i++)
        if (alive[i] > most) most = alive[i];
    char *text = NULL, bound[64];
    OK(dw_plan_describe(s.plan, &text));
    snprintf(bound, sizeof bound, "lower bound %zu\n", most);
    assert_non_null(strstr(text, bound));
    dw_text_free(text);
    assert_true(most < dw_plan_arena_bytes(s.plan) + 64);
    end(&s);
}

/* Capacities are just below and just above the need of each divisor of a batch of 12. */
static void test_fit(void **state) {
    (void)state;
    static const int64_t divisors[] = {12, 6, 4, 3, 2, 1};
    const int64_t whole[2] = {12, 13};
    step s;
    dw_step_fit fit;
    begin(&s, true);
    size_t before = SIZE_MAX;
    for (size_t i = 0; i < sizeof divisors / sizeof *divisors; i++) {
        const int64_t sizes[2] = {divisors[i], 13};
        dw_step_options options = DW_STEP_OPTIONS_DEFAULT;
        dw_plan *plan = NULL;
        options.add_gradients = i > 0;
        OK(dw_engine_plan(s.engine, sizes, &plan));
        OK(dw_plan_step_memory(plan, &options, s.moment, &s.peak));
        dw_plan_release(plan);
        size_t needed = s.moment[s.peak].total;
        OK(dw_engine_fit_step(s.engine, whole, 0, 1, NULL, needed, &fit));
        if (needed < before) { /* otherwise a larger divisor would not need more */
            assert_int_equal(fit.micro_batch, divisors[i]);
            assert_int_equal(fit.peak.total, needed);
            before = needed;
        }
        assert_true(fit.fits && fit.micro_batch >= divisors[i]);
    }
    OK(dw_engine_fit_step(s.engine, whole, 0, 1, NULL, 0, &fit));
    assert_true(!fit.fits && fit.micro_batch == 1);
    OK(dw_engine_fit_step(s.engine, whole, 0, 3, NULL, 0, &fit));
    assert_int_equal(fit.micro_batch, 3);
    assert_int_equal(dw_engine_fit_step(s.engine, whole, 2, 1, NULL, 0, &fit), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_engine_fit_step(s.engine, whole, 0, 13, NULL, 0, &fit),
                     DW_INVALID_ARGUMENT);
    const int64_t absurd[2] = {INT64_MAX, 13};
    assert_int_equal(dw_engine_fit_step(s.engine, absurd, 0, 1, NULL, 0, &fit),
                     DW_INVALID_ARGUMENT);
    end(&s);
}

static void test_names(void **state) {
    (void)state;
    assert_string_equal(dw_step_optimizer_name(DW_STEP_ADAMW), "adamw_dw");
    assert_string_equal(dw_step_optimizer_name(DW_STEP_OPTIMIZERS), "?");
    assert_string_equal(dw_step_phase_name(DW_STEP_UPDATE), "update");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_training),  cmocka_unit_test(test_options),
        cmocka_unit_test(test_inference), cmocka_unit_test(test_inside_the_arena),
        cmocka_unit_test(test_fit),       cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
