/* Values that depend on parameters alone: computed by dw_plan_keep, read by all runs, changed by none. */
#include "engine_segments.h"

#include "deepwell/step_memory.h"
#include "engine/engine_internal.h"

/* Two layers of which a policy quantizes the weights, forward and backward; the first one's x needs no gradient. */
static const char LAYERS[] =
    "deepwell graph 1\nsymbols B\ninput %x: f32[B, 48]\nseed %seed: i64[2]\n"
    "parameter %w: f32[40, 48]\nparameter %v: f32[24, 40]\n"
    "%h: f32[B, 40] = linear(%x, %w, _)\n%t: f32[B, 40] = tanh(%h)\n"
    "%y: f32[B, 24] = linear(%t, %v, _)\nreturn %y\n";
/* A weight with a correction of low rank. */
static const char LOW_RANK[] = "deepwell graph 1\nsymbols B\ninput %x: f32[B, 37]\n"
                               "parameter %w: f32[37, 29]\nparameter %a: f32[37, 5]\n"
                               "parameter %b: f32[5, 29]\nparameter %c: f32[31, 37]\n"
                               "%ab: f32[37, 29] = matmul(%a, %b)\n"
                               "%m: f32[37, 29] = add(%w, %ab)\n"
                               "%cm: f32[31, 29] = matmul(%c, %m)\n"
                               "%s: f32[29] = reduce_sum(%m) {axes=[0]}\n"
                               "%y: f32[B, 29] = matmul(%x, %m)\n"
                               "%r: f32[B, 29] = broadcast(%s) {shape=[B, 29]}\n"
                               "%z: f32[B, 29] = mul(%y, %r)\n"
                               "%u: f32[B, 31] = matmul(%z, %cm) {transpose_b=1}\n"
                               "return %u\n";
/* A product of x and w may sum the rows of w beside, but the sum is needed for all runs. */
static const char SUMS[] = "deepwell graph 1\nsymbols B\ninput %x: f32[B, 37]\n"
                           "parameter %w: f32[37, 29]\nparameter %d: f32[29, 29]\n"
                           "%s: f32[29] = reduce_sum(%w) {axes=[0]}\n"
                           "%row: f32[1, 29] = reshape(%s) {shape=[1, 29]}\n"
                           "%k: f32[1, 29] = matmul(%row, %d)\n"
                           "%y: f32[B, 29] = matmul(%x, %w)\n"
                           "%b: f32[B, 29] = broadcast(%k) {shape=[B, 29]}\n"
                           "%z: f32[B, 29] = mul(%y, %b)\nreturn %z\n";

typedef struct fixture {
    dw_graph *graph;
    problem p;
    dw_precision_policy policy;
    dw_engine_options options;
} fixture;

static void begin(fixture *f, const char *text, const char *policy, int64_t batch) {
    f->options = (dw_engine_options)DW_ENGINE_OPTIONS_DEFAULT;
    OK(dw_graph_from_text(text, &f->graph));
    problem_begin(&f->p, f->graph, batch, 0);
    if (!policy) return;
    OK(dw_precision_policy_init(&f->policy, policy));
    f->options.precision = &f->policy;
}

static void end(fixture *f) {
    problem_end(&f->p);
    dw_graph_destroy(f->graph);
}

static void fill_parameters(fixture *f, uint64_t seed) {
    for (uint32_t i = 0; i < f->p.leaf_count; i++) {
        const dw_value leaf = dw_graph_leaf_at(f->graph, i);
        if (dw_value_role(f->graph, leaf) == DW_ROLE_PARAMETER)
            model_fill(f->graph, leaf, dw__tensor_count(&f->p.leaves[i]), seed,
                       f->p.leaves[i].data);
    }
}

/* Binds NaNs in place of the leaves that only kept values depend on: runs do not read them. */
static void hide(const dw_engine *engine, problem *p) {
    for (uint32_t i = 0; i < p->leaf_count; i++) {
        if (engine->leaf_reads[i] != DW_READ_KEPT) continue;
        p->leaf_bindings[i].data = dw__malloc_aligned(bytes_of(&p->leaves[i]));
        memset(p->leaf_bindings[i].data, 0xff, bytes_of(&p->leaves[i]));
    }
}

static void reveal(problem *p) {
    for (uint32_t i = 0; i < p->leaf_count; i++) {
        if (p->leaf_bindings[i].data == p->leaves[i].data) continue;
        dw__free_aligned(p->leaf_bindings[i].data);
        p->leaf_bindings[i].data = p->leaves[i].data;
    }
}

/* Runs three micro-batches on values that are computed once, and compares each with `expected`. */
static void run_three(fixture *f, dw_engine *engine, dw_plan *plan, void *arena,
                      const results *expected) {
    const dw_segment kept = dw_plan_segment(plan, dw_plan_segment_count(plan) - 1);
    void *before = dw__malloc(kept.bytes);
    assert_true(kept.kept && kept.bytes == dw_plan_kept_bytes(plan) && kept.bytes > 0);
    memset(arena, 0xff, dw_plan_arena_bytes(plan));
    OK(dw_plan_keep(plan, arena, f->p.leaf_bindings, NULL));
    memcpy(before, (char *)arena + kept.offset, kept.bytes);
    hide(engine, &f->p);
    for (int run = 0; run < 3; run++) {
        results r;
        memset(arena, 0xff, kept.offset);
        results_begin(&f->p, engine, &r);
        OK(forward(plan, arena, &f->p, &r));
        OK(backward(plan, arena, &f->p, &r));
        expect_same_bits(&f->p, &r, expected);
        results_end(&r);
    }
    assert_memory_equal(before, (char *)arena + kept.offset, kept.bytes);
    reveal(&f->p);
    dw__free(before);
}

/* Two steps with other parameters, each of three runs. Returns the number of instructions that run once in a step. */
static uint32_t check(const char *text, const char *policy) {
    fixture f;
    begin(&f, text, policy, 19);
    dw_engine *plain = make_engine_with(&f.p, &f.options);
    f.options.keep_values = 1;
    dw_engine *engine = make_engine_with(&f.p, &f.options);
    dw_plan *plan = NULL;
    OK(dw_engine_plan(engine, f.p.sizes, &plan));
    void *arena = make_arena(plan);
    dw_plan_profile(plan, 1);
    for (uint64_t step = 0; step < 2; step++) {
        results expected;
        fill_parameters(&f, 100 + step);
        run_both(plain, &f.p, &expected);
        run_three(&f, engine, plan, arena, &expected);
        results_end(&expected);
    }
    const uint32_t once = plan->kept_end;
    for (uint32_t i = 0; i < plan->code.count; i++)
        assert_int_equal(plan->code.items[i].runs, i < once ? 2 : 6);
    dw__free_aligned(arena);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_engine_destroy(plain);
    end(&f);
    return once;
}

static void codes_of_weights_are_computed_once(void **state) {
    (void)state;
    /* MXFP8 has its blocks along other axes in backward; FP8 has the same values in both. The first layer has no
     * product with w in backward. */
    assert_int_equal(check(LAYERS, "mxfp8"), 3);
    assert_int_equal(check(LAYERS, "fp8"), 2);
    assert_int_equal(check(LAYERS, "fp8-block"), 2);
    assert_int_equal(check(LAYERS, "nvfp4"), 2);
}

static void products_of_parameters_are_computed_once(void **state) {
    (void)state;
    const uint32_t once = check(LOW_RANK, NULL); /* a b, perhaps w + a b by itself, and c m */
    assert_true(once == 2 || once == 3);
    assert_int_equal(check(SUMS, NULL), 2);
}

/* A plan for other sizes reads the values that the first one has computed. */
static void plans_share_kept_values(void **state) {
    (void)state;
    fixture f;
    begin(&f, LAYERS, "mxfp8", 7);
    dw_engine *plain = make_engine_with(&f.p, &f.options);
    f.options.keep_values = 1;
    f.options.struct_size = sizeof f.options;
    dw_engine *engine = make_engine_with(&f.p, &f.options);
    dw_plan *plan = NULL, *other = NULL;
    OK(dw_engine_plan(engine, f.p.sizes, &plan));
    OK(dw_engine_plan(engine, (int64_t[]){131, 0}, &other));
    assert_true(plan != other && dw_plan_kept_layout(plan) == dw_plan_kept_layout(other));
    assert_int_equal(dw_plan_kept_bytes(plan), dw_plan_kept_bytes(other));
    void *segments[DW_MOST_SEGMENTS] = {make_arena(plan)}, *wide = make_arena(other);
    segments[1] = (char *)wide + dw_plan_segment(other, 1).offset;
    OK(dw_plan_keep(other, wide, f.p.leaf_bindings, NULL));
    results expected, r;
    dw_binding outputs[MOST_OUTPUTS];
    run_both(plain, &f.p, &expected);
    results_begin(&f.p, engine, &r);
    bind_all(r.output_count, r.outputs, outputs);
    OK(dw_plan_forward_segments(plan, segments, f.p.leaf_bindings, outputs, NULL));
    assert_memory_equal(r.outputs[0].data, expected.outputs[0].data, bytes_of(&r.outputs[0]));
    segments[1] = NULL;
    assert_int_equal(dw_plan_forward_segments(plan, segments, f.p.leaf_bindings, outputs, NULL),
                     DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "segment 1 of the arena"));
    results_end(&expected);
    results_end(&r);
    dw__free_aligned(segments[0]);
    dw__free_aligned(wide);
    dw_plan_release(plan);
    dw_plan_release(other);
    dw_engine_destroy(engine);
    dw_engine_destroy(plain);
    end(&f);
}

/* Segments of the arena are released while backward runs; the one of kept values stays for the next run. */
static void segments_come_and_go_beside_kept_values(void **state) {
    (void)state;
    enum { LAYERS_IN_ALL = 8 };
    fixture f;
    char text[2048] = "deepwell graph 1\nsymbols B\ninput %h0: f32[B, 96]\n";
    for (int i = 1; i <= LAYERS_IN_ALL; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "parameter %%w%d: f32[96, 96]\n",
                 i);
    for (int i = 1; i <= LAYERS_IN_ALL; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text),
                 "%%a%d: f32[B, 96] = linear(%%h%d, %%w%d, _)\n%%h%d: f32[B, 96] = tanh(%%a%d)\n",
                 i, i - 1, i, i, i);
    snprintf(text + strlen(text), sizeof text - strlen(text), "return %%h%d\n", LAYERS_IN_ALL);
    begin(&f, text, "mxfp8", 61);
    dw_engine *plain = make_engine_with(&f.p, &f.options);
    f.options.keep_values = 1;
    f.options.arena_segments = 4;
    f.options.part_bytes = 1;
    dw_engine *engine = make_engine_with(&f.p, &f.options);
    dw_plan *plan = NULL;
    OK(dw_engine_plan(engine, f.p.sizes, &plan));
    const uint32_t last = dw_plan_segment_count(plan) - 1, parts = dw_plan_part_count(plan);
    assert_true(last >= 2 && last < DW_MOST_SEGMENTS && dw_plan_segment(plan, last).kept);
    assert_int_equal(dw_plan_segment(plan, last).part, parts - 1);
    void *kept = NULL;
    for (uint64_t run = 0; run < 4; run++) {
        void *segments[DW_MOST_SEGMENTS] = {NULL};
        dw_binding outputs[MOST_OUTPUTS], grads[MOST_LEAVES];
        results expected, r;
        if (run == 2) fill_parameters(&f, 200);
        run_both(plain, &f.p, &expected);
        results_begin(&f.p, engine, &r);
        bind_all(r.output_count, r.outputs, outputs);
        bind_all(r.grad_count, r.grads, grads);
        for (uint32_t s = 0; s < last; s++)
            if (dw_plan_segment(plan, s).first_part == 0)
                segments[s] = new_segment(&dw__device_cpu, dw_plan_segment(plan, s).bytes);
        if (!kept) kept = new_segment(&dw__device_cpu, dw_plan_segment(plan, last).bytes);
        segments[last] = kept;
        if (run % 2 == 0) OK(dw_plan_keep_segments(plan, segments, f.p.leaf_bindings, NULL));
        OK(dw_plan_forward_segments(plan, segments, f.p.leaf_bindings, outputs, NULL));
        for (uint32_t part = 0; part < parts; part++) {
            for (uint32_t s = 0; s < last; s++)
                if (part > 0 && dw_plan_segment(plan, s).first_part == part)
                    segments[s] = new_segment(&dw__device_cpu, dw_plan_segment(plan, s).bytes);
            OK(dw_plan_backward_part_segments(plan, part, segments, f.p.leaf_bindings, outputs,
                                              f.p.output_grad_bindings, grads, NULL));
            for (uint32_t s = 0; s < last; s++) {
                if (dw_plan_segment(plan, s).part != part) continue;
                dw_device_release(&dw__device_cpu, segments[s], dw_plan_segment(plan, s).bytes);
                segments[s] = NULL;
            }
        }
        expect_same_bits(&f.p, &r, &expected);
        results_end(&r);
        results_end(&expected);
    }
    dw_device_release(&dw__device_cpu, kept, dw_plan_kept_bytes(plan));
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_engine_destroy(plain);
    end(&f);
}

/* What depends on a symbol or on a constant is computed in each run, and so are outputs and elementwise programs. */
static void other_values_are_not_kept(void **state) {
    (void)state;
    static const struct {
        const char *name, *text;
    } rows[] = {
        {"a slice by a symbol",
         "deepwell graph 1\nsymbols B\ninput %x: f32[B, 8]\nparameter %w: f32[64, 8]\n"
         "parameter %v: f32[8, 8]\n%s: f32[B, 8] = slice(%w) {start=[0, 0], limit=[B, 8]}\n"
         "%m: f32[B, 8] = matmul(%s, %v)\n%y: f32[B, 8] = add(%x, %m)\nreturn %y\n"},
        {"a slice that begins at a symbol",
         "deepwell graph 1\nsymbols B\ninput %x: f32[B, 8]\nparameter %w: f32[64, 8]\n"
         "parameter %v: f32[8, 8]\n%s: f32[1, 8] = slice(%w) {start=[B, 0], limit=[B + 1, 8]}\n"
         "%m: f32[1, 8] = matmul(%s, %v)\n%b: f32[B, 8] = broadcast(%m) {shape=[B, 8]}\n"
         "%y: f32[B, 8] = add(%x, %b)\nreturn %y\n"},
        {"a constant", "deepwell graph 1\nsymbols B\ninput %x: f32[B, 8]\nparameter %w: f32[8, 8]\n"
                       "constant %v: f32[8, 8]\n%m: f32[8, 8] = matmul(%w, %v)\n"
                       "%y: f32[B, 8] = matmul(%x, %m)\nreturn %y\n"},
        {"an output",
         "deepwell graph 1\nsymbols B\ninput %x: f32[B, 8]\nparameter %w: f32[8, 8]\n"
         "parameter %v: f32[8, 8]\n%m: f32[8, 8] = matmul(%w, %v)\n"
         "%f: f32[64] = reshape(%m) {shape=[64]}\n%y: f32[B, 8] = matmul(%x, %m)\nreturn %y, %f\n"},
        {"an elementwise program",
         "deepwell graph 1\nsymbols B\ninput %x: f32[B, 8]\nparameter %w: f32[8, 8]\n"
         "%m: f32[8, 8] = tanh(%w)\n%y: f32[B, 8] = matmul(%x, %m)\nreturn %y\n"},
    };
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        fixture f;
        results expected, r;
        begin(&f, rows[i].text, NULL, 19);
        dw_engine *plain = make_engine_with(&f.p, &f.options);
        f.options.keep_values = 1;
        dw_engine *engine = make_engine_with(&f.p, &f.options);
        dw_plan *plan = NULL;
        OK(dw_engine_plan(engine, f.p.sizes, &plan));
        if (dw_plan_kept_bytes(plan) || plan->kept_end) fail_msg("%s is kept", rows[i].name);
        assert_int_equal(dw_plan_kept_layout(plan), 0);
        OK(dw_plan_keep(plan, NULL, NULL, NULL));
        run_both(plain, &f.p, &expected);
        run_both(engine, &f.p, &r);
        expect_same_bits(&f.p, &r, &expected);
        results_end(&expected);
        results_end(&r);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        dw_engine_destroy(plain);
        end(&f);
    }
}

/* The memory of a step: kept values are held in every moment, and an older structure has none. */
static void kept_values_are_counted(void **state) {
    (void)state;
    fixture f;
    begin(&f, LAYERS, "mxfp8", 19);
    f.options.keep_values = 1;
    dw_plan *plans[2];
    dw_engine *engines[2];
    for (int i = 0; i < 2; i++) {
        f.options.struct_size = i ? sizeof f.options : offsetof(dw_engine_options, keep_values);
        engines[i] = make_engine_with(&f.p, &f.options);
        OK(dw_engine_plan(engines[i], f.p.sizes, &plans[i]));
    }
    assert_int_equal(dw_plan_kept_bytes(plans[0]), 0);
    /* BF16 values of w along one axis, and of v along both. */
    const size_t kept = dw_plan_kept_bytes(plans[1]);
    assert_int_equal(kept, 2 * (40 * 48 + 2 * 24 * 40));
    dw_step_moment moments[8];
    uint32_t peak, count = dw_plan_step_moments(plans[1]);
    assert_true(count <= DW_COUNT(moments));
    OK(dw_plan_step_memory(plans[1], NULL, moments, &peak));
    size_t arena = dw_plan_segment(plans[1], 0).bytes;
    for (uint32_t i = 0; i < count; i++) assert_int_equal(moments[i].arena, arena + kept);
    assert_true(dw_engine_kept_values_read_leaf(engines[1], 2) &&
                !dw_engine_kept_values_read_leaf(engines[1], 0) &&
                !dw_engine_kept_values_read_leaf(engines[0], 2));
    for (int i = 0; i < 2; i++) {
        dw_plan_release(plans[i]);
        dw_engine_destroy(engines[i]);
    }
    end(&f);
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    fixture f;
    begin(&f, LAYERS, "mxfp8", 5);
    f.options.keep_values = 1;
    const int64_t live = dw__memory_live();
    dw_status status = DW_OUT_OF_MEMORY;
    for (int64_t allowed = 0; status == DW_OUT_OF_MEMORY; allowed += 1 + allowed / 16) {
        dw_engine *engine = NULL;
        dw_plan *plan = NULL;
        dw__memory_fail_after(allowed);
        status = dw_engine_create(f.graph, f.p.grad_output_count, f.p.grad_outputs, f.p.wrt_count,
                                  f.p.wrt, &f.options, &engine);
        if (status == DW_OK) status = dw_engine_plan(engine, f.p.sizes, &plan);
        dw__memory_fail_after(-1);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        assert_int_equal(dw__memory_live(), live);
    }
    assert_int_equal(status, DW_OK);
    end(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(codes_of_weights_are_computed_once),
        cmocka_unit_test(products_of_parameters_are_computed_once),
        cmocka_unit_test(plans_share_kept_values),
        cmocka_unit_test(segments_come_and_go_beside_kept_values),
        cmocka_unit_test(other_values_are_not_kept),
        cmocka_unit_test(kept_values_are_counted),
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
