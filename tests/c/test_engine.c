/* Compares the engine with the interpreter in FP64, on whole models.
 *
 * Tolerance: the interpreter also runs the same graph in FP32. Its distance from FP64 is the cost of rounding
 * alone on these data. The engine adds in another order; its distance may be SLACK times as
 * large, plus a few units in the last place of the tensor's norm. */
#include "base/pool.h"
#include "deepwell/step_memory.h"
#include "engine/executor.h"
#include "engine_concats.h"
#include "engine_segments.h"
#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

/* One engine per choice of options serves all sizes. */
static void agrees(model_builder builder, double dropout) {
    static const int64_t sizes[][2] = {{1, 1}, {2, 7}, {3, 17}, {1, 33}};
    dw_graph *graph = build(builder, dropout);
    dw_engine *engines[4] = {NULL};
    for (size_t s = 0; s < DW_COUNT(sizes); s++) {
        problem p;
        results f32, f64;
        problem_begin(&p, graph, sizes[s][0], sizes[s][1]);
        interpret(&p, false, &f32);
        interpret(&p, true, &f64);
        for (int o = 0; o < 4; o++) {
            if (!engines[o]) engines[o] = make_engine(&p, o & 1, o >> 1);
            results got;
            run_both(engines[o], &p, &got);
            expect_results(&p, &got, &f32, &f64);
            results_end(&got);
        }
        results_end(&f32);
        results_end(&f64);
        problem_end(&p);
    }
    for (int o = 0; o < 4; o++) dw_engine_destroy(engines[o]);
    dw_graph_destroy(graph);
}

static void gpt_agrees(void **state) {
    (void)state;
    agrees(model_gpt, 0.0);
}
static void gpt_with_dropout_agrees(void **state) {
    (void)state;
    agrees(model_gpt, 0.25);
}
static void llama_agrees(void **state) {
    (void)state;
    agrees(model_llama, 0.0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct fixture {
    dw_graph *graph;
    problem p;
    dw_engine *engine;
    dw_plan *plan;
} fixture;

static void fixture_begin(fixture *f, model_builder builder, double dropout, int recompute) {
    f->graph = build(builder, dropout);
    problem_begin(&f->p, f->graph, 2, 13);
    f->engine = make_engine(&f->p, recompute, 1);
    OK(dw_engine_plan(f->engine, f->p.sizes, &f->plan));
}

static void fixture_end(fixture *f) {
    dw_plan_release(f->plan);
    dw_engine_destroy(f->engine);
    problem_end(&f->p);
    dw_graph_destroy(f->graph);
}

/* Fills the arena and a guard after it with `pattern`, and marks the bytes that a run changes. */
static void mark_touched(const fixture *f, uint8_t pattern, uint8_t *touched, size_t bytes) {
    results r;
    uint8_t *arena = dw__malloc_aligned(bytes);
    memset(arena, pattern, bytes);
    results_begin(&f->p, f->engine, &r);
    OK(forward(f->plan, arena, &f->p, &r));
    OK(backward(f->plan, arena, &f->p, &r));
    for (size_t i = 0; i < bytes; i++) touched[i] |= arena[i] != pattern;
    results_end(&r);
    dw__free_aligned(arena);
}

static void predicted_peak_equals_the_real_peak(void **state) {
    (void)state;
    enum { GUARD = 4096 };
    for (int o = 0; o < 4; o++) {
        fixture f;
        fixture_begin(&f, o & 1 ? model_llama : model_gpt, 0.0, o >> 1);
        size_t arena_bytes = dw_plan_arena_bytes(f.plan);
        uint8_t *touched = dw__calloc(arena_bytes + GUARD, 1);
        /* A run may write the value that a byte already has, so two patterns are used. */
        mark_touched(&f, 0xa5, touched, arena_bytes + GUARD);
        mark_touched(&f, 0x3c, touched, arena_bytes + GUARD);
        size_t highest = 0;
        for (size_t i = 0; i < arena_bytes + GUARD; i++) {
            if (touched[i]) highest = i + 1;
        }
        assert_int_equal(highest, arena_bytes);
        dw__free(touched);
        fixture_end(&f);
    }
}

static void recomputation_saves_memory(void **state) {
    (void)state;
    fixture all, few;
    fixture_begin(&all, model_gpt, 0.0, 0);
    fixture_begin(&few, model_gpt, 0.0, 1);
    assert_true(dw_plan_saved_bytes(few.plan) < dw_plan_saved_bytes(all.plan));
    assert_true(dw_plan_saved_bytes(few.plan) <= dw_plan_arena_bytes(few.plan));
    /* Per layer and token: the residual stream twice, q k v, the attention's result, the hidden
     * layer before GELU; norms' statistics and logsumexp are scalars per token (and head). */
    size_t tokens = (size_t)(few.p.sizes[0] * few.p.sizes[1]);
    size_t floats =
        2 * MODEL_WIDTH + 3 * MODEL_WIDTH + MODEL_WIDTH + MODEL_HIDDEN + 4 + MODEL_HEADS;
    size_t expected = MODEL_LAYERS * floats * tokens * sizeof(float);
    size_t last = (MODEL_WIDTH + 3) * tokens * sizeof(float);
    size_t padding = 64 * 16 * MODEL_LAYERS;
    assert_true(dw_plan_saved_bytes(few.plan) <= expected + last + padding);
    fixture_end(&all);
    fixture_end(&few);
}

/* The activation of each layer is computed again by the program of its gradient. */
static void repeated_activations_share_a_program(void **state) {
    (void)state;
    fixture f;
    fixture_begin(&f, model_gpt, 0.0, 1);
    int joint = 0, alone = 0;
    for (dw_node n = 0; n < dw_graph_node_count(f.engine->graph); n++) {
        const dw__node_record *node = &f.engine->graph->nodes.items[n];
        if (node->op != DW_OP_FUSED || !node->backward) continue;
        const char *body = dw_node_attr(f.engine->graph, n, DW_ATTR_KEY_BODY)->string;
        if (!strstr(body, "=gelu_tanh(")) continue;
        if (strstr(body, "=gelu_tanh_backward("))
            joint++;
        else
            alone++;
    }
    assert_int_equal(joint, MODEL_LAYERS);
    assert_int_equal(alone, 0);
    fixture_end(&f);
}

static void backward_needs_only_the_saved_prefix(void **state) {
    (void)state;
    fixture f;
    results once, again;
    fixture_begin(&f, model_gpt, 0.25, 1);
    results_begin(&f.p, f.engine, &once);
    results_begin(&f.p, f.engine, &again);
    void *arena = make_arena(f.plan), *copy = make_arena(f.plan);
    OK(forward(f.plan, arena, &f.p, &once));
    memset(copy, 0xff, dw_plan_arena_bytes(f.plan));
    memcpy(copy, arena, dw_plan_saved_bytes(f.plan));
    OK(backward(f.plan, arena, &f.p, &once));
    for (uint32_t i = 0; i < f.p.output_count; i++) {
        memcpy(again.outputs[i].data, once.outputs[i].data, bytes_of(&once.outputs[i]));
    }
    OK(backward(f.plan, copy, &f.p, &again));
    expect_same_bits(&f.p, &once, &again);
    dw__free_aligned(arena);
    dw__free_aligned(copy);
    results_end(&once);
    results_end(&again);
    fixture_end(&f);
}

static void two_forwards_may_come_before_a_backward(void **state) {
    (void)state;
    fixture f;
    results alone, first, second;
    fixture_begin(&f, model_llama, 0.0, 1);
    run_both(f.engine, &f.p, &alone);
    results_begin(&f.p, f.engine, &first);
    results_begin(&f.p, f.engine, &second);
    void *arenas[2] = {make_arena(f.plan), make_arena(f.plan)};
    OK(forward(f.plan, arenas[0], &f.p, &first));
    OK(forward(f.plan, arenas[1], &f.p, &second));
    OK(backward(f.plan, arenas[0], &f.p, &first));
    OK(backward(f.plan, arenas[1], &f.p, &second));
    expect_same_bits(&f.p, &alone, &first);
    expect_same_bits(&f.p, &alone, &second);
    dw__free_aligned(arenas[0]);
    dw__free_aligned(arenas[1]);
    results_end(&alone);
    results_end(&first);
    results_end(&second);
    fixture_end(&f);
}

static void unwanted_gradients_may_be_left_out(void **state) {
    (void)state;
    fixture f;
    results all, some;
    fixture_begin(&f, model_gpt, 0.0, 1);
    run_both(f.engine, &f.p, &all);
    for (uint32_t keep = 0; keep < f.p.wrt_count; keep++) {
        results_begin(&f.p, f.engine, &some);
        for (uint32_t j = 0; j < f.p.wrt_count; j++) {
            if (j % f.p.wrt_count == keep || (j + keep) % 3 == 0) continue;
            dw__free_aligned(some.grads[j].data);
            some.grads[j].data = NULL;
        }
        void *arena = make_arena(f.plan);
        OK(forward(f.plan, arena, &f.p, &some));
        OK(backward(f.plan, arena, &f.p, &some));
        expect_same_bits(&f.p, &all, &some);
        dw__free_aligned(arena);
        results_end(&some);
    }
    results_end(&all);
    fixture_end(&f);
}

static void an_output_gradient_that_is_null_is_zero(void **state) {
    (void)state;
    fixture f;
    results zeros, nulls;
    fixture_begin(&f, model_gpt, 0.0, 1);
    memset(f.p.output_grads[0].data, 0, bytes_of(&f.p.output_grads[0]));
    run_both(f.engine, &f.p, &zeros);
    f.p.output_grad_bindings[0].data = NULL;
    run_both(f.engine, &f.p, &nulls);
    expect_same_bits(&f.p, &zeros, &nulls);
    results_end(&zeros);
    results_end(&nulls);
    fixture_end(&f);
}

static void leaves_that_backward_does_not_read_may_be_freed(void **state) {
    (void)state;
    fixture f;
    results all, less;
    fixture_begin(&f, model_gpt, 0.0, 1);
    run_both(f.engine, &f.p, &all);
    results_begin(&f.p, f.engine, &less);
    void *arena = make_arena(f.plan);
    OK(forward(f.plan, arena, &f.p, &less));
    uint32_t gone = 0;
    for (uint32_t i = 0; i < f.p.leaf_count; i++) {
        if (dw_engine_backward_reads_leaf(f.engine, i)) continue;
        f.p.leaf_bindings[i].data = NULL;
        gone++;
    }
    assert_true(gone > 0); /* at least the biases */
    OK(backward(f.plan, arena, &f.p, &less));
    expect_same_bits(&f.p, &all, &less);
    dw__free_aligned(arena);
    results_end(&all);
    results_end(&less);
    fixture_end(&f);
}

/* ---- threads --------------------------------------------------------------------------------- */

static void bits_do_not_depend_on_threads(void **state) {
    (void)state;
    fixture f;
    results one, many;
    int before = dw_get_threads();
    fixture_begin(&f, model_gpt, 0.25, 1);
    OK(dw_set_threads(1));
    run_both(f.engine, &f.p, &one);
    for (int threads = 2; threads <= 5; threads++) {
        OK(dw_set_threads(threads));
        run_both(f.engine, &f.p, &many);
        expect_same_bits(&f.p, &one, &many);
        results_end(&many);
    }
    OK(dw_set_threads(before));
    results_end(&one);
    fixture_end(&f);
}

typedef struct worker {
    fixture *f;
    const results *expected;
    bool same;
} worker;

static void *work(void *argument) {
    worker *w = argument;
    w->same = true;
    for (int round = 0; round < 8; round++) {
        results r;
        dw_plan *plan = NULL;
        if (dw_engine_plan(w->f->engine, w->f->p.sizes, &plan) != DW_OK) {
            w->same = false;
            break;
        }
        results_begin(&w->f->p, w->f->engine, &r);
        void *arena = dw__malloc_aligned(dw_plan_arena_bytes(plan));
        w->same &= forward(plan, arena, &w->f->p, &r) == DW_OK;
        w->same &= backward(plan, arena, &w->f->p, &r) == DW_OK;
        for (uint32_t j = 0; j < r.grad_count; j++) {
            w->same &=
                memcmp(r.grads[j].data, w->expected->grads[j].data, bytes_of(&r.grads[j])) == 0;
        }
        dw__free_aligned(arena);
        results_end(&r);
        dw_plan_release(plan);
    }
    return NULL;
}

static void threads_may_share_a_plan(void **state) {
    (void)state;
    fixture f;
    results alone;
    fixture_begin(&f, model_llama, 0.0, 1);
    run_both(f.engine, &f.p, &alone);
    int before = dw_get_threads();
    pthread_t threads[3];
    worker workers[3];
    for (int t = 0; t < 3; t++) {
        workers[t] = (worker){.f = &f, .expected = &alone};
        assert_int_equal(pthread_create(&threads[t], NULL, work, &workers[t]), 0);
    }
    /* The number of threads changes during the runs too. */
    for (int i = 0; i < 200; i++) {
        OK(dw_set_threads(1 + i % 5));
        usleep(200);
    }
    for (int t = 0; t < 3; t++) pthread_join(threads[t], NULL);
    for (int t = 0; t < 3; t++) assert_true(workers[t].same);
    OK(dw_set_threads(before));
    results_end(&alone);
    fixture_end(&f);
}

/* ---- plans ----------------------------------------------------------------------------------- */

static void plans_are_cached_and_kept_while_in_use(void **state) {
    (void)state;
    fixture f;
    fixture_begin(&f, model_gpt, 0.0, 1);
    dw_plan *again = NULL, *other = NULL;
    OK(dw_engine_plan(f.engine, f.p.sizes, &again));
    assert_ptr_equal(again, f.plan);
    dw_plan_release(again);
    dw_plan_options options = DW_PLAN_OPTIONS_DEFAULT;
    options.tf32 = 1; /* for GPUs */
    OK(dw_engine_plan_with(f.engine, f.p.sizes, &options, &again));
    assert_ptr_equal(again, f.plan);
    dw_plan_release(again);
    options.struct_size = 1;
    assert_int_equal(dw_engine_plan_with(f.engine, f.p.sizes, &options, &again),
                     DW_INVALID_ARGUMENT);
    int64_t live = 0;
    for (int64_t s = 1; s <= 60; s++) {
        OK(dw_engine_plan(f.engine, (int64_t[]){1, s}, &other));
        dw_plan_release(other);
        if (s == 40) live = dw__memory_live();
    }
    /* From the 32nd plan on, every new plan evicts an old one; the plan in use stays. */
    assert_in_range(dw__memory_live(), live - live / 4, live + live / 4);
    OK(dw_engine_plan(f.engine, f.p.sizes, &again));
    assert_ptr_equal(again, f.plan);
    dw_plan_release(again);
    fixture_end(&f);
}

static void a_plan_describes_itself(void **state) {
    (void)state;
    fixture f;
    char *text = NULL;
    fixture_begin(&f, model_gpt, 0.0, 1);
    OK(dw_plan_describe(f.plan, &text));
    assert_non_null(strstr(text, "B=2 S=13"));
    assert_non_null(strstr(text, "attention"));
    if (getenv("DEEPWELL_TEST_PRINT")) printf("%s", text);
    dw_text_free(text);
    int64_t shape[DW_MAX_RANK];
    assert_int_equal(dw_plan_output_count(f.plan), 2);
    assert_int_equal(dw_plan_output_shape(f.plan, 0, shape), 3);
    assert_int_equal(shape[0], 2);
    assert_int_equal(shape[1], 13);
    assert_int_equal(shape[2], MODEL_VOCABULARY);
    assert_int_equal(dw_plan_output_shape(f.plan, 1, shape), 0);
    assert_int_equal(dw_plan_output_dtype(f.plan, 1), DW_F32);
    fixture_end(&f);
}

/* One step of a fixture, forward and backward, with gradients of all parameters. */
static void step_of(fixture *f) {
    results r;
    run_both(f->engine, &f->p, &r);
    results_end(&r);
}

static uint64_t runs_of(const dw_plan *plan, double *seconds) {
    enum { MOST = 256 };
    dw_instruction_time times[MOST];
    const uint32_t count = dw_plan_times(plan, MOST, times);
    uint64_t runs = 0;
    double end = 0.0;
    assert_in_range(count, 10, MOST);
    *seconds = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        runs += times[i].runs;
        *seconds += times[i].seconds;
        if (times[i].runs == 0) continue;
        assert_true(times[i].start >= end); /* in order, one after the other */
        end = times[i].start;
    }
    return runs;
}

typedef struct instructions_seen {
    uint32_t instructions, count; /* how many began; how many the plan has */
    int inside;                   /* between the calls in front of an instruction and behind it */
} instructions_seen;

static void watch(void *context, uint32_t instruction, int begins) {
    instructions_seen *seen = context;
    assert_int_equal(seen->inside, !begins);
    if (begins)
        assert_int_equal(instruction, seen->instructions++ % seen->count);
    else
        assert_int_equal(instruction, (seen->instructions - 1) % seen->count);
    seen->inside = begins;
}

static void timed_runs_are_watched(void **state) {
    (void)state;
    fixture f;
    fixture_begin(&f, model_gpt, 0.0, 1);
    const uint32_t count = dw_plan_times(f.plan, 0, NULL);
    instructions_seen seen = {.count = count};
    dw_plan_watch(f.plan, watch, &seen);
    step_of(&f); /* not timed */
    assert_int_equal(seen.instructions, 0);
    dw_plan_profile(f.plan, 1);
    step_of(&f);
    step_of(&f);
    assert_int_equal(seen.instructions, 2 * count);
    assert_int_equal(seen.inside, 0);
    dw_plan_watch(f.plan, NULL, NULL);
    step_of(&f);
    assert_int_equal(seen.instructions, 2 * count);
    fixture_end(&f);
}

static void instructions_are_timed_on_request(void **state) {
    (void)state;
    fixture f;
    double seconds;
    fixture_begin(&f, model_gpt, 0.0, 1);
    const uint32_t count = dw_plan_times(f.plan, 0, NULL);
    step_of(&f);
    assert_int_equal(runs_of(f.plan, &seconds), 0);
    dw_plan_profile(f.plan, 1);
    const double before = dw__seconds();
    step_of(&f);
    step_of(&f);
    dw_plan_profile(f.plan, 0);
    step_of(&f);
    assert_int_equal(runs_of(f.plan, &seconds), 2 * count);
    assert_true(seconds > 0.0 && seconds < dw__seconds() - before);
    dw_plan_profile(f.plan, 1); /* forgets */
    assert_int_equal(runs_of(f.plan, &seconds), 0);
    fixture_end(&f);
}

static void instructions_are_listed_and_run_by_themselves(void **state) {
    (void)state;
    for (int o = 0; o < 2; o++) {
        fixture f;
        char *text = NULL;
        json_error_t error;
        int backward = 0;
        fixture_begin(&f, o ? model_llama : model_gpt, 0.25 * (1 - o), 1);
        OK(dw_plan_operations(f.plan, &text));
        json_t *list = json_loads(text, 0, &error);
        assert_non_null(list);
        const uint32_t count = (uint32_t)json_array_size(list);
        assert_int_equal(count, dw_plan_times(f.plan, 0, NULL));
        for (uint32_t i = 0; i < count; i++) {
            json_t *one = json_array_get(list, i);
            const char *op = json_string_value(json_object_get(one, "op"));
            const bool product = strcmp(op, "matmul") == 0 || strcmp(op, "linear") == 0;
            const double flops = json_number_value(json_object_get(one, "flops"));
            dw_instruction *instruction = NULL;
            assert_true(json_number_value(json_object_get(one, "bytes")) > 0.0);
            assert_true(json_is_null(json_object_get(one, "seconds"))); /* no model of a CPU */
            if (product) {
                json_t *a = json_array_get(json_object_get(one, "inputs"), 0);
                json_t *shape = json_object_get(a, "shape");
                /* Two for each element of an operand and each column of the result. */
                double elements = 2.0;
                for (size_t k = 0; k < json_array_size(shape); k++)
                    elements *= json_number_value(json_array_get(shape, k));
                assert_true(flops >= elements);
            }
            backward += strcmp(json_string_value(json_object_get(one, "phase")), "backward") == 0;
            OK(dw_instruction_create(f.plan, i, &instruction));
            OK(dw_instruction_run(instruction, NULL));
            OK(dw_instruction_run(instruction, NULL));
            dw_instruction_destroy(instruction);
        }
        assert_in_range(backward, 1, count - 1);
        dw_instruction *none = NULL;
        assert_int_equal(dw_instruction_create(f.plan, count, &none), DW_NOT_FOUND);
        assert_null(none);
        json_decref(list);
        dw_text_free(text);
        fixture_end(&f);
    }
}

/* Heads are split and merged by views: no instruction of the plans only moves elements. */
static void heads_are_never_copied(void **state) {
    (void)state;
    static const char *const moves[] = {"permute", "pad", "concat", "reshape"};
    for (int o = 0; o < 2; o++) {
        fixture f;
        char *text = NULL;
        fixture_begin(&f, o ? model_llama : model_gpt, 0.0, 1);
        OK(dw_plan_describe(f.plan, &text));
        for (size_t i = 0; i < DW_COUNT(moves); i++) {
            const char *found = strstr(text, moves[i]);
            if (found) fail_msg("a plan has %.80s", found);
        }
        dw_text_free(text);
        fixture_end(&f);
    }
}

/* Results are computed in their slices of a concatenation if their kernels write rows there: this CPU's GEMMs do not.
 * The bits are those of a plan that copies. */
static void concatenations_of_results_are_not_copied(void **state) {
    (void)state;
    static const int copies[CONCAT_KINDS] = {
        [CONCAT_OF_SAME] = 1,  [CONCAT_OF_LEAF] = 1,   [CONCAT_OF_PRODUCT] = 1,
        [CONCAT_OF_HEADS] = 1, [CONCAT_OF_NARROW] = 1, [CONCAT_OF_COLUMNS] = 1};
    for (int kind = 0; kind < CONCAT_KINDS; kind++) {
        for (int recompute = 0; recompute < 2; recompute++) {
            fixture observed;
            results expected, got;
            concat_choose((concat_kind)kind, true, DW_F32);
            fixture_begin(&observed, model_concat, 0.0, recompute);
            run_both(observed.engine, &observed.p, &expected);
            concat_choose((concat_kind)kind, false, DW_F32);
            fixture f;
            char *text = NULL;
            fixture_begin(&f, model_concat, 0.0, recompute);
            run_both(f.engine, &f.p, &got);
            concat_expect_same(&got, &expected);
            OK(dw_plan_describe(f.plan, &text));
            if (!recompute && concat_copies(text) != copies[kind])
                fail_msg("kind %d: %s", kind, text);
            dw_text_free(text);
            results_end(&got);
            results_end(&expected);
            fixture_end(&f);
            fixture_end(&observed);
        }
        concat_choose((concat_kind)kind, false, DW_F32);
        agrees(model_concat, 0.0);
    }
}

/* The gradient of a tied table is summed in the caller's buffer: no second table in the arena. */
static void a_tied_table_needs_no_second_gradient(void **state) {
    (void)state;
    fixture f;
    char *text = NULL;
    fixture_begin(&f, model_gpt, 0.0, 1);
    OK(dw_plan_describe(f.plan, &text));
    assert_non_null(strstr(text, "+-> f32"));
    dw_text_free(text);
    fixture_end(&f);
}

static void the_machine_describes_itself(void **state) {
    (void)state;
    char *text = NULL;
    OK(dw_machine_describe(&text));
    json_t *machine = json_loads(text, 0, NULL);
    assert_non_null(machine);
    assert_true(json_is_string(json_object_get(machine, "isa")));
    assert_int_equal(json_integer_value(json_object_get(machine, "threads")), dw_get_threads());
    const json_t *kernels = json_object_get(machine, "kernels");
    assert_int_equal(json_object_size(kernels), DW_OP_COUNT);
    /* The last candidate of every operation is the reference. */
    const char *op;
    json_t *list;
    json_object_foreach((json_t *)kernels, op, list) {
        const json_t *last = json_array_get(list, json_array_size(list) - 1);
        const char *name = json_string_value(json_object_get(last, "name"));
        if (!name || strncmp(name, "reference.", 10) != 0) fail_msg("%s: %s", op, name);
    }
    json_decref(machine);
    dw_text_free(text);
}

static void inference_saves_no_values(void **state) {
    (void)state;
    fixture f;
    results trained, inferred;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    fixture_begin(&f, model_gpt, 0.0, 1);
    run_both(f.engine, &f.p, &trained);
    OK(dw_engine_create(f.graph, 0, NULL, 0, NULL, NULL, &engine));
    OK(dw_engine_plan(engine, f.p.sizes, &plan));
    assert_int_equal(dw_plan_saved_bytes(plan), 0);
    assert_true(dw_plan_arena_bytes(plan) < dw_plan_arena_bytes(f.plan));
    results_begin(&f.p, f.engine, &inferred);
    void *arena = make_arena(plan);
    OK(forward(plan, arena, &f.p, &inferred));
    for (uint32_t i = 0; i < f.p.output_count; i++) {
        assert_memory_equal(inferred.outputs[i].data, trained.outputs[i].data,
                            bytes_of(&trained.outputs[i]));
    }
    assert_int_equal(backward(plan, arena, &f.p, &inferred), DW_STATE);
    dw__free_aligned(arena);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    results_end(&trained);
    results_end(&inferred);
    fixture_end(&f);
}

/* ---- targets and executors ------------------------------------------------------------------- */

/* The CPU's executor, which counts its calls and can fail. */
static struct {
    uint32_t begun, ended, ranges, from, to;
    bool begin_fails;
} watched;

static dw_status watched_begin(dw__run *run) {
    watched.begun++;
    return watched.begin_fails ? dw__fail(DW_UNSUPPORTED, "no begin") : dw__executor_cpu.begin(run);
}

static dw_status watched_range(dw__run *run, uint32_t from, uint32_t to) {
    watched.ranges++;
    watched.from = from;
    watched.to = to;
    return dw__executor_cpu.run_range(run, from, to);
}

static dw_status watched_end(dw__run *run) {
    watched.ended++;
    return dw__executor_cpu.end(run);
}

static void watched_forget(dw_plan *plan) { dw__executor_cpu.forget(plan); }

static void a_plan_is_run_by_the_executor_of_its_target(void **state) {
    (void)state;
    static const dw__executor watch = {.name = "watched",
                                       .begin = watched_begin,
                                       .run_range = watched_range,
                                       .end = watched_end,
                                       .forget = watched_forget};
    fixture f;
    results expected, got;
    dw_plan *plan = NULL;
    dw__target target;
    dw__target_cpu(&target);
    assert_ptr_equal(target.executor, &dw__executor_cpu);
    assert_null(target.context);
    target.executor = &watch;
    target.alignment = 256;
    fixture_begin(&f, model_gpt, 0.1, 1);
    run_both(f.engine, &f.p, &expected);
    OK(dw__plan_create(f.engine, &target, f.p.sizes, &plan));
    for (size_t i = 0; i < plan->storages.count; i++)
        assert_int_equal(plan->storages.items[i].offset % 256, 0);
    results_begin(&f.p, f.engine, &got);
    size_t bytes = dw_plan_arena_bytes(plan);
    char *block = dw__malloc_aligned(bytes + 512);
    char *arena = block + (256 - (uintptr_t)block % 256) % 256;
    OK(forward(plan, arena, &f.p, &got));
    assert_true(watched.from == 0 && watched.to == dw_plan_first_backward(plan));
    OK(backward(plan, arena, &f.p, &got));
    assert_true(watched.from == dw_plan_first_backward(plan) && watched.to == plan->code.count);
    expect_same_bits(&f.p, &got, &expected);
    assert_true(watched.begun == 2 && watched.ranges == 2 && watched.ended == 2);
    assert_int_equal(forward(plan, arena + 64, &f.p, &got), DW_INVALID_ARGUMENT);
    assert_int_equal(watched.begun, 2);
    watched.begin_fails = true;
    assert_int_equal(forward(plan, arena, &f.p, &got), DW_UNSUPPORTED);
    assert_true(watched.begun == 3 && watched.ranges == 2 && watched.ended == 3);
    dw__free_aligned(block);
    dw__plan_destroy(plan);
    results_end(&expected);
    results_end(&got);
    fixture_end(&f);
}

static void plan_of_a_target_serves_smaller_targets(void **state) {
    (void)state;
    dw__target target, other;
    dw__target_cpu(&target);
    other = target;
    assert_true(dw__target_serves(&target, &other));
    other.threads++;
    assert_true(dw__target_serves(&other, &target));
    assert_false(dw__target_serves(&target, &other));
    other = target;
    other.alignment *= 2;
    assert_false(dw__target_serves(&target, &other));
    other = target;
    other.device = NULL;
    assert_false(dw__target_serves(&target, &other));
}

/* ---- outputs and gradients that are views, leaves, or each other ----------------------------- */

static dw_status odd_outputs(model *m) {
    model_begin(m);
    dw__emitter *e = &m->e;
    dw_value a = model_parameter(m, "a", -1, 2, m->batch, m->sequence);
    dw_value b = model_parameter(m, "b", -1, 2, m->batch, m->sequence);
    dw_value unused = model_parameter(m, "unused", -1, 1, m->batch, 0);
    (void)unused;
    dw_value sum = dw__emit_binary(e, DW_OP_ADD, a, b);
    dw_value product = dw__emit_binary(e, DW_OP_MUL, sum, b);
    int64_t swap[2] = {1, 0};
    dw_dim flat = dw__emit_dim_mul(e, m->batch, m->sequence);
    dw_value outputs[7] = {
        a,                               /* a leaf */
        dw__emit_permute(e, b, 2, swap), /* a view of a leaf */
        sum,
        sum,                                                              /* twice */
        dw__emit_permute(e, product, 2, swap),                            /* a strided view */
        dw__emit_reshape(e, product, 1, &flat),                           /* a view in order */
        dw__emit_reshape(e, dw__emit_permute(e, sum, 2, swap), 1, &flat), /* a copy */
    };
    for (int i = 0; i < 7 && e->status == DW_OK; i++) {
        e->status = dw_graph_add_output(m->graph, outputs[i]);
    }
    return e->status;
}

static void outputs_may_be_leaves_views_or_twice_the_same(void **state) {
    (void)state;
    agrees(odd_outputs, 0.0);
}

/* The gradients of a and b are one value, the output's gradient itself. */
static dw_status plain_sum(model *m) {
    model_begin(m);
    dw_value a = model_parameter(m, "a", -1, 2, m->batch, m->sequence);
    dw_value b = model_parameter(m, "b", -1, 2, m->batch, m->sequence);
    dw_value sum = dw__emit_binary(&m->e, DW_OP_ADD, a, b);
    if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, sum);
    return m->e.status;
}

static void gradients_may_be_given_values(void **state) {
    (void)state;
    agrees(plain_sum, 0.0);
}

/* ---- misuse ---------------------------------------------------------------------------------- */

static void expect_message(const char *part) {
    if (!strstr(dw_last_error(), part)) fail_msg("\"%s\" lacks \"%s\"", dw_last_error(), part);
}

static void misuse_is_rejected(void **state) {
    (void)state;
    fixture f;
    results r;
    fixture_begin(&f, model_gpt, 0.0, 1);
    results_begin(&f.p, f.engine, &r);
    char *arena = make_arena(f.plan);
    dw_plan *plan = NULL;
    dw_engine *engine = NULL;
    uint32_t output = 99;
    assert_int_equal(dw_engine_plan(f.engine, (int64_t[]){-1, 3}, &plan), DW_INVALID_ARGUMENT);
    expect_message("B is -1");
    assert_int_equal(dw_engine_create(f.graph, 1, &output, 1, f.p.wrt, NULL, &engine),
                     DW_INVALID_ARGUMENT);
    expect_message("99");
    dw_value logits = dw_graph_output(f.graph, 0);
    output = 0;
    assert_int_equal(dw_engine_create(f.graph, 1, &output, 1, &logits, NULL, &engine),
                     DW_INVALID_ARGUMENT);
    expect_message("leaf");
    assert_int_equal(forward(f.plan, arena + 8, &f.p, &r), DW_INVALID_ARGUMENT);
    expect_message("aligned to 64");
    int64_t strides[2] = {1, MODEL_VOCABULARY};
    f.p.leaf_bindings[0].strides = strides;
    assert_int_equal(forward(f.plan, arena, &f.p, &r), DW_INVALID_ARGUMENT);
    expect_message("wte");
    expect_message("contiguous");
    f.p.leaf_bindings[0].strides = (int64_t[]){MODEL_WIDTH, 1};
    OK(forward(f.plan, arena, &f.p, &r));
    void *data = f.p.leaf_bindings[0].data;
    f.p.leaf_bindings[0].data = NULL;
    assert_int_equal(forward(f.plan, arena, &f.p, &r), DW_INVALID_ARGUMENT);
    expect_message("wte is NULL");
    f.p.leaf_bindings[0].data = data;
    ((int64_t *)f.p.leaves[2].data)[1] = MODEL_VOCABULARY; /* tokens */
    assert_int_equal(forward(f.plan, arena, &f.p, &r), DW_INDEX);
    expect_message("embedding");
    results_end(&r);
    dw__free_aligned(arena);
    fixture_end(&f);
}

static void every_failing_allocation_is_survived(void **state) {
    (void)state;
    dw_graph *graph = build(model_llama, 0.0);
    problem p;
    problem_begin(&p, graph, 2, 5);
    int64_t live = dw__memory_live();
    bool done = false;
    for (int64_t allowed = 0; !done; allowed += 1 + allowed / 64) {
        dw_engine *engine = NULL;
        dw_plan *plan = NULL;
        dw__memory_fail_after(allowed);
        dw_status status = dw_engine_create(graph, p.grad_output_count, p.grad_outputs, p.wrt_count,
                                            p.wrt, NULL, &engine);
        if (status == DW_OK) status = dw_engine_plan(engine, p.sizes, &plan);
        dw__memory_fail_after(-1);
        done = status == DW_OK;
        if (!done) assert_int_equal(status, DW_OUT_OF_MEMORY);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        assert_int_equal(dw__memory_live(), live);
    }
    problem_end(&p);
    dw_graph_destroy(graph);
}

static void failing_allocations_beside_a_plan_are_survived(void **state) {
    (void)state;
    fixture f;
    fixture_begin(&f, model_gpt, 0.0, 1);
    const int64_t live = dw__memory_live();
    bool done = false;
    for (int64_t allowed = 0; !done; allowed++) {
        char *text = NULL;
        dw_instruction *instruction = NULL;
        dw__memory_fail_after(allowed);
        dw_status status = dw_plan_operations(f.plan, &text);
        if (status == DW_OK) status = dw_instruction_create(f.plan, 8, &instruction);
        dw__memory_fail_after(-1);
        done = status == DW_OK;
        if (!done) assert_int_equal(status, DW_OUT_OF_MEMORY);
        dw_text_free(text);
        dw_instruction_destroy(instruction);
        assert_int_equal(dw__memory_live(), live);
    }
    fixture_end(&f);
}

/* ---- segments --------------------------------------------------------------------------------- */

/* A plan of the chain with segments, and the results of one whose arena has one segment. */
typedef struct chain {
    dw_graph *graph;
    problem p;
    dw_engine *engine;
    dw_plan *plan, *whole;
    dw_engine *of_whole;
    results expected;
} chain;

/* A longer chain with wide buffers in each layer, forward and backward: h = tanh(a slice of two copies of h) * p. */
static dw_status model_wide_chain(model *m) {
    enum { LAYERS = 3 * CHAIN_LAYERS, COUNT = CHAIN_COUNT / 2 };
    model_begin(m);
    const dw_dim count = COUNT;
    dw_value h = model_leaf(m, DW_ROLE_INPUT, "x", DW_F32, 1, &count);
    for (int layer = 0; layer < LAYERS; layer++) {
        char name[16];
        snprintf(name, sizeof name, "p.%d", layer);
        const dw_value p = model_leaf(m, DW_ROLE_PARAMETER, name, DW_F32, 1, &count),
                       two = dw__emit_concat(&m->e, h, h, 0),
                       cut = dw__emit_slice(&m->e, two, 0, 5, COUNT + 5);
        h = dw__emit_binary(&m->e, DW_OP_MUL, dw__emit_unary(&m->e, DW_OP_TANH, cut), p);
    }
    if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, h);
    return m->e.status;
}

static void chain_begin_of(chain *c, model_builder of) {
    c->graph = build(of, 0.0);
    problem_begin(&c->p, c->graph, 1, 1);
    c->of_whole = make_segmented_engine(&c->p, NULL, 0, 1);
    c->engine = make_segmented_engine(&c->p, NULL, 0, DW_MOST_SEGMENTS);
    OK(dw_engine_plan(c->of_whole, c->p.sizes, &c->whole));
    OK(dw_engine_plan(c->engine, c->p.sizes, &c->plan));
    run_both(c->of_whole, &c->p, &c->expected);
}

static void chain_begin(chain *c) { chain_begin_of(c, model_chain); }

static void chain_end(chain *c) {
    results_end(&c->expected);
    dw_plan_release(c->plan);
    dw_plan_release(c->whole);
    dw_engine_destroy(c->engine);
    dw_engine_destroy(c->of_whole);
    problem_end(&c->p);
    dw_graph_destroy(c->graph);
}

/* Storages that live at the same time share no byte, and each lies in one segment that lasts as long. */
static void check_places(const dw_plan *plan) {
    for (size_t i = 0; i < plan->storages.count; i++) {
        const dw__storage *a = &plan->storages.items[i];
        if (a->home != DW_HOME_ARENA || a->first > a->last || a->bytes == 0) continue;
        const dw_segment in = dw_plan_segment(plan, a->segment);
        assert_true(a->offset >= in.offset);
        assert_true(a->offset + a->bytes <= in.offset + in.bytes);
        assert_true(dw__plan_part_of(plan, a->last) <= in.part);
        if (in.first_part > 0) assert_true(a->first >= plan->part_ends[in.first_part - 1]);
        if (a->saved) assert_true(a->offset + a->bytes <= in.offset + in.saved_bytes);
        for (size_t j = 0; j < i; j++) {
            const dw__storage *b = &plan->storages.items[j];
            if (b->home != DW_HOME_ARENA || b->bytes == 0) continue;
            if (a->first > b->last || b->first > a->last) continue;
            assert_true(a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
        }
    }
}

static void segments_lie_one_after_another(void **state) {
    (void)state;
    chain c;
    chain_begin(&c);
    const uint32_t count = dw_plan_segment_count(c.plan);
    assert_true(count > 1 && count <= DW_MOST_SEGMENTS);
    size_t end = 0;
    for (uint32_t s = 0; s < count; s++) {
        const dw_segment segment = dw_plan_segment(c.plan, s);
        const uint32_t after = s ? dw_plan_segment(c.plan, s - 1).part : dw_plan_part_count(c.plan);
        assert_true(segment.part < after);
        if (s == 0) assert_int_equal(segment.part, dw_plan_part_count(c.plan) - 1);
        assert_true(segment.offset >= end && segment.offset < end + 64);
        assert_int_equal(segment.offset % 64, 0);
        assert_true(segment.saved_bytes <= segment.bytes);
        end = segment.offset + segment.bytes;
    }
    assert_int_equal(end, dw_plan_arena_bytes(c.plan));
    assert_int_equal(dw_plan_segment(c.plan, count).bytes, 0);
    check_places(c.plan);
    /* A caller of one segment pays nothing for them, and the others pay little. */
    assert_int_equal(dw_plan_segment_count(c.whole), 1);
    assert_int_equal(dw_plan_segment(c.whole, 0).bytes, dw_plan_arena_bytes(c.whole));
    assert_int_equal(dw_plan_segment(c.whole, 0).saved_bytes, dw_plan_saved_bytes(c.whole));
    check_places(c.whole);
    const size_t whole = dw_plan_arena_bytes(c.whole);
    assert_true(dw_plan_arena_bytes(c.plan) <= whole + whole / 32);
    chain_end(&c);
}

static bound bind_chain(const chain *c, const results *r, dw_binding *outputs, dw_binding *grads) {
    bind_all(r->output_count, r->outputs, outputs);
    bind_all(r->grad_count, r->grads, grads);
    return (bound){.leaves = c->p.leaf_bindings,
                   .outputs = outputs,
                   .output_grads = c->p.output_grad_bindings,
                   .grads = grads};
}

/* With memory that is given back, and in one block of which nothing is. */
static void run_with_released_segments(model_builder of, bool late) {
    chain c;
    chain_begin_of(&c, of);
    bool found = false;
    for (uint32_t s = 0; s < dw_plan_segment_count(c.plan); s++)
        found |= dw_plan_segment(c.plan, s).first_part > 0;
    assert_int_equal(found, late);
    check_places(c.plan);
    const dw_device *cpu = NULL;
    dw_binding outputs[MOST_OUTPUTS], grads[MOST_LEAVES];
    results apart, block;
    OK(dw_device_find("cpu", &cpu));
    results_begin(&c.p, c.engine, &apart);
    const bound b = bind_chain(&c, &apart, outputs, grads);
    run_in_segments(cpu, c.plan, &b);
    expect_same_bits(&c.p, &c.expected, &apart);
    run_both(c.engine, &c.p, &block);
    expect_same_bits(&c.p, &c.expected, &block);
    results_end(&block);
    results_end(&apart);
    chain_end(&c);
}

static void segments_may_be_released_early(void **state) {
    (void)state;
    run_with_released_segments(model_chain, false);
}

static void segments_may_begin_late(void **state) {
    (void)state;
    run_with_released_segments(model_wide_chain, true);
}

/* Every segment is overwritten after its last part: no later part reads it or writes there. A copy of the saved parts
 * then gives the same gradients again. */
static void overwrite_released_segments(model_builder of) {
    chain c;
    chain_begin_of(&c, of);
    dw_binding outputs[MOST_OUTPUTS], grads[MOST_LEAVES];
    results r;
    results_begin(&c.p, c.engine, &r);
    const bound b = bind_chain(&c, &r, outputs, grads);
    const uint32_t count = dw_plan_segment_count(c.plan);
    char *memory[2] = {make_arena(c.plan), make_arena(c.plan)};
    void *segments[2][DW_MOST_SEGMENTS];
    memset(memory[1], 0xFF, dw_plan_arena_bytes(c.plan));
    for (int k = 0; k < 2; k++)
        for (uint32_t s = 0; s < count; s++)
            segments[k][s] = memory[k] + dw_plan_segment(c.plan, s).offset;
    OK(dw_plan_forward_segments(c.plan, segments[0], b.leaves, b.outputs, NULL));
    for (uint32_t s = 0; s < count; s++)
        memcpy(segments[1][s], segments[0][s], dw_plan_segment(c.plan, s).saved_bytes);
    for (int k = 0; k < 2; k++) {
        for (uint32_t part = 0; part < dw_plan_part_count(c.plan); part++) {
            OK(dw_plan_backward_part_segments(c.plan, part, segments[k], b.leaves, b.outputs,
                                              b.output_grads, b.grads, NULL));
            for (uint32_t s = 0; s < count; s++) {
                const dw_segment segment = dw_plan_segment(c.plan, s);
                if (segment.part == part) memset(segments[k][s], 0xFF, segment.bytes);
            }
        }
        const unsigned char *bytes = (const unsigned char *)memory[k];
        for (uint32_t s = 0; s < count; s++) {
            const dw_segment segment = dw_plan_segment(c.plan, s);
            for (size_t i = 0; i < segment.bytes; i++)
                if (bytes[segment.offset + i] != 0xFF) fail_msg("segment %u, byte %zu", s, i);
        }
        expect_same_bits(&c.p, &c.expected, &r);
        for (uint32_t j = 0; j < r.grad_count; j++)
            memset(r.grads[j].data, 0x5A, bytes_of(&r.grads[j]));
    }
    dw__free_aligned(memory[0]);
    dw__free_aligned(memory[1]);
    results_end(&r);
    chain_end(&c);
}

static void released_segments_are_not_touched(void **state) {
    (void)state;
    overwrite_released_segments(model_chain);
    overwrite_released_segments(model_wide_chain);
}

static void a_step_counts_live_segments(void **state) {
    (void)state;
    enum { MOST_MOMENTS = 32 };
    chain c;
    chain_begin(&c);
    dw_step_moment moments[MOST_MOMENTS], before[MOST_MOMENTS];
    uint32_t peak, peak_before;
    const uint32_t count = dw_plan_step_moments(c.plan);
    assert_true(count <= MOST_MOMENTS && count == dw_plan_step_moments(c.whole));
    OK(dw_plan_step_memory(c.plan, NULL, moments, &peak));
    OK(dw_plan_step_memory(c.whole, NULL, before, &peak_before));
    for (uint32_t i = 0; i < count; i++) {
        size_t live = 0;
        uint32_t part = i == 0 ? 0 : i - 1;
        for (uint32_t s = 0; s < dw_plan_segment_count(c.plan); s++) {
            const dw_segment segment = dw_plan_segment(c.plan, s);
            if (s == 0 || segment.part >= part) live += segment.bytes;
        }
        assert_int_equal(moments[i].arena, live);
        assert_int_equal(before[i].arena, dw_plan_arena_bytes(c.whole));
        assert_int_equal(moments[i].total - moments[i].arena, before[i].total - before[i].arena);
    }
    assert_true(moments[peak].total + dw_plan_arena_bytes(c.whole) / 16 <=
                before[peak_before].total);
    char *text = NULL;
    OK(dw_plan_describe(c.plan, &text));
    assert_non_null(strstr(text, "; segments: "));
    dw_text_free(text);
    chain_end(&c);
}

static void segments_that_are_needed_must_be_bound(void **state) {
    (void)state;
    chain c;
    chain_begin(&c);
    dw_binding outputs[MOST_OUTPUTS], grads[MOST_LEAVES];
    const bound b = bind_chain(&c, &c.expected, outputs, grads);
    const uint32_t count = dw_plan_segment_count(c.plan), parts = dw_plan_part_count(c.plan);
    char *memory = make_arena(c.plan);
    void *segments[DW_MOST_SEGMENTS] = {NULL};
    for (uint32_t s = 0; s < count; s++) segments[s] = memory + dw_plan_segment(c.plan, s).offset;
    segments[count - 1] = NULL;
    assert_int_equal(dw_plan_forward_segments(c.plan, segments, b.leaves, b.outputs, NULL),
                     DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "segment"));
    segments[count - 1] = memory + 1;
    assert_int_equal(dw_plan_backward_part_segments(c.plan, 0, segments, b.leaves, b.outputs,
                                                    b.output_grads, b.grads, NULL),
                     DW_INVALID_ARGUMENT);
    assert_int_equal(dw_plan_backward_part_segments(c.plan, parts, segments, b.leaves, b.outputs,
                                                    b.output_grads, b.grads, NULL),
                     DW_INVALID_ARGUMENT);
    dw__free_aligned(memory);
    chain_end(&c);
}

/* One segment: without gradients, with a backward of one part, and at any number that makes no sense. */
static void most_plans_have_one_segment(void **state) {
    (void)state;
    fixture f;
    fixture_begin(&f, model_gpt, 0.0, 1);
    for (int wanted = -1; wanted <= 4; wanted += 5) {
        dw_plan *plan = NULL;
        dw_engine *engine = make_segmented_engine(&f.p, NULL, 0, wanted);
        OK(dw_engine_plan(engine, f.p.sizes, &plan));
        assert_int_equal(dw_plan_segment_count(plan), 1);
        assert_int_equal(dw_plan_segment(plan, 0).bytes, dw_plan_arena_bytes(plan));
        dw_plan_release(plan);
        dw_engine_destroy(engine);
    }
    fixture_end(&f);
    problem none;
    dw_plan *plan = NULL;
    dw_graph *graph = build(model_chain, 0.0);
    problem_begin(&none, graph, 1, 1);
    none.wrt_count = none.grad_output_count = 0;
    dw_engine *engine = make_segmented_engine(&none, NULL, 0, DW_MOST_SEGMENTS);
    OK(dw_engine_plan(engine, none.sizes, &plan));
    assert_int_equal(dw_plan_segment_count(plan), 1);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    problem_end(&none);
    dw_graph_destroy(graph);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_may_be_given_values),
        cmocka_unit_test(outputs_may_be_leaves_views_or_twice_the_same),
        cmocka_unit_test(gpt_agrees),
        cmocka_unit_test(gpt_with_dropout_agrees),
        cmocka_unit_test(llama_agrees),
        cmocka_unit_test(predicted_peak_equals_the_real_peak),
        cmocka_unit_test(recomputation_saves_memory),
        cmocka_unit_test(repeated_activations_share_a_program),
        cmocka_unit_test(backward_needs_only_the_saved_prefix),
        cmocka_unit_test(two_forwards_may_come_before_a_backward),
        cmocka_unit_test(unwanted_gradients_may_be_left_out),
        cmocka_unit_test(an_output_gradient_that_is_null_is_zero),
        cmocka_unit_test(leaves_that_backward_does_not_read_may_be_freed),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(threads_may_share_a_plan),
        cmocka_unit_test(plans_are_cached_and_kept_while_in_use),
        cmocka_unit_test(a_plan_describes_itself),
        cmocka_unit_test(instructions_are_timed_on_request),
        cmocka_unit_test(timed_runs_are_watched),
        cmocka_unit_test(instructions_are_listed_and_run_by_themselves),
        cmocka_unit_test(heads_are_never_copied),
        cmocka_unit_test(concatenations_of_results_are_not_copied),
        cmocka_unit_test(a_tied_table_needs_no_second_gradient),
        cmocka_unit_test(the_machine_describes_itself),
        cmocka_unit_test(inference_saves_no_values),
        cmocka_unit_test(a_plan_is_run_by_the_executor_of_its_target),
        cmocka_unit_test(plan_of_a_target_serves_smaller_targets),
        cmocka_unit_test(segments_lie_one_after_another),
        cmocka_unit_test(segments_may_be_released_early),
        cmocka_unit_test(segments_may_begin_late),
        cmocka_unit_test(released_segments_are_not_touched),
        cmocka_unit_test(a_step_counts_live_segments),
        cmocka_unit_test(segments_that_are_needed_must_be_bound),
        cmocka_unit_test(most_plans_have_one_segment),
        cmocka_unit_test(misuse_is_rejected),
        cmocka_unit_test(every_failing_allocation_is_survived),
        cmocka_unit_test(failing_allocations_beside_a_plan_are_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
