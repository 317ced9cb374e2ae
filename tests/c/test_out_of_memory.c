/* Every allocation fails in turn.
 *
 * Each row of the table is a scenario: a complete use of the library, from nothing to cleaned up. It runs
 * with its first and all later allocations failing, then from its second on, and so on until none fails. It
 * runs again with only that one allocation failing, which shows code that ignores the failure. Each run must
 * return DW_OUT_OF_MEMORY with a message, leave nothing allocated, leave its inputs unchanged, and succeed
 * when repeated: in the last run of every loop nothing fails.
 *
 * jansson's allocations are ours. If there are many allocations, not every position is tried: the distance
 * grows with the position, unless DEEPWELL_TEST_LONG is set. */
#include "base/json.h"
#include "base/pool.h"
#include "deepwell/deepwell.h"
#include "engine_models.h"
#include "kernel/reference/interpret.h"
#include "ops/ops_case.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

enum { MOST_LEAVES = 64, MOST_OUTPUTS = 8, MOST_ALLOCATIONS = 1000000 };

/* ---- inputs of the scenarios ----------------------------------------------------------------- */

/* Made once; no scenario changes it. */
static struct {
    dw_graph *gpt, *llama, *small, *planned;
    char *gpt_text, *gpt_json;
    const ops_case *op_case;
    char long_key[3001];
    const char *path; /* path of a file that contains gpt_text */
} given;

static dw_graph *build(dw_status (*make)(model *m), double dropout) {
    model m = {.dropout = dropout};
    OK(make(&m));
    return m.graph;
}

/* With layers, which a plan requires. */
static dw_graph *build_planned(void) {
    static const char text[] =
        "{\"model_type\": \"llama\", \"vocab_size\": 32, \"hidden_size\": 16, "
        "\"intermediate_size\": 24, "
        "\"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "
        "\"max_position_embeddings\": 32}";
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    dw_model_config *config = NULL;
    dw_graph *graph = NULL;
    OK(dw_model_config_parse(text, strlen(text), &config));
    OK(dw_model_graph(config, &options, &graph));
    dw_model_config_destroy(config);
    return graph;
}

/* A linear layer, a GELU, another linear layer, and cross-entropy: few nodes, but a training step. */
static dw_status make_small(model *m) {
    model_begin(m);
    dw__emitter *e = &m->e;
    dw_value table = model_parameter(m, "wte", -1, 2, MODEL_VOCABULARY, MODEL_WIDTH);
    dw_value h = model_embedding(m, table, model_tokens(m));
    h = model_linear(m, h, "up", -1, MODEL_HIDDEN, MODEL_WIDTH, true);
    dw_attr tanh_form = dw_attr_string(DW_ATTR_KEY_APPROXIMATE, "tanh");
    h = dw__emit(e, DW_OP_GELU, 1, &h, 1, &tanh_form);
    model_head(m, model_linear(m, h, "head", -1, MODEL_VOCABULARY, MODEL_HIDDEN, false));
    return e->status;
}

/* ---- the loop -------------------------------------------------------------------------------- */

typedef struct scenario {
    const char *name;
    dw_status (*run)(void);
    bool graceful; /* may succeed without some of its memory; its result is then right */
} scenario;

static int64_t next_position(int64_t position, int64_t density) {
    return getenv("DEEPWELL_TEST_LONG") ? position + 1 : position + 1 + position / density;
}

static void try_position(const scenario *s, int64_t position, bool once, int64_t *failures) {
    int64_t live = dw__memory_live();
    char *before = NULL, *after = NULL;
    OK(dw_graph_to_text(given.gpt, &before));
    if (once)
        dw__memory_fail_once(position);
    else
        dw__memory_fail_after(position);
    dw_status status = s->run();
    *failures = dw__memory_failures();
    dw__memory_fail_after(-1);
    bool expected = *failures == 0 ? status == DW_OK : status == DW_OUT_OF_MEMORY;
    if (!expected && !(s->graceful && status == DW_OK)) {
        fail_msg("%s, allocation %lld%s: %lld failed, and it returned %s (\"%s\")", s->name,
                 (long long)position, once ? " alone" : "", (long long)*failures,
                 dw_status_name(status), dw_last_error());
    }
    if (status != DW_OK && !strstr(dw_last_error(), "could not be allocated")) {
        fail_msg("%s, allocation %lld: the message is \"%s\"", s->name, (long long)position,
                 dw_last_error());
    }
    OK(dw_graph_to_text(given.gpt, &after));
    assert_string_equal(before, after);
    dw_text_free(before);
    dw_text_free(after);
    if (dw__memory_live() != live) {
        fail_msg("%s, allocation %lld%s: %lld allocations are left", s->name, (long long)position,
                 once ? " alone" : "", (long long)(dw__memory_live() - live));
    }
}

/* `density`: the number of positions tried is about this times the logarithm of the number of allocations. */
static int64_t exhaust(const scenario *s, int64_t density) {
    int64_t last = 0;
    for (int once = 0; once < 2; once++) {
        int64_t failures = 1;
        /* The second loop starts at another position, so that both together try more positions. */
        for (int64_t position = 0; failures > 0; position = next_position(position, density)) {
            assert_true(position < MOST_ALLOCATIONS);
            try_position(s, position, once, &failures);
            last = position;
        }
    }
    return last;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static dw_status from_text(void) {
    dw_graph *graph = NULL;
    dw_status status = dw_graph_from_text(given.gpt_text, &graph);
    dw_graph_destroy(graph);
    return status;
}

static dw_status from_json(void) {
    dw_graph *graph = NULL;
    dw_status status = dw_graph_from_json(given.gpt_json, strlen(given.gpt_json), &graph);
    dw_graph_destroy(graph);
    return status;
}

/* Long tokens and escapes, on which jansson itself does not survive a failed allocation. */
static dw_status json(void) {
    enum { ESCAPES = 1500 };
    static char text[16 * ESCAPES];
    size_t length = (size_t)sprintf(text, "{\"a\": [1, 2.5, null, {\"b\": true}], \"c\": \"");
    for (int i = 0; i < ESCAPES; i++) length += (size_t)sprintf(text + length, "\\u00e9\\\\ \\\"x");
    length += (size_t)sprintf(text + length, "\", \"%.3000s\": 1}", given.long_key);
    json_t *root = NULL;
    dw__json_limits limits = {8, 100};
    dw_status status = dw__json_parse("JSON", text, length, limits, &root);
    assert_true((status == DW_OK) == (root != NULL));
    json_decref(root);
    return status;
}

static dw_status to_text(void) {
    char *text = NULL;
    dw_status status = dw_graph_to_text(given.gpt, &text);
    dw_text_free(text);
    return status;
}

static dw_status to_json(void) {
    char *text = NULL;
    dw_status status = dw_graph_to_json(given.gpt, &text);
    dw_text_free(text);
    return status;
}

static dw_status clone(void) {
    dw_graph *copy = NULL;
    dw_status status = dw_graph_clone(given.gpt, &copy);
    dw_graph_destroy(copy);
    return status;
}

static dw_status verify(void) { return dw_graph_verify(given.gpt); }

static dw_status cost(void) {
    dw_cost cost;
    return dw_graph_cost(given.gpt, (int64_t[]){2, 5}, &cost);
}

/* Calls every function that builds a graph. */
static dw_status build_by_hand(void) {
    dw_status status = DW_OK;
    dw_graph *graph = NULL;
    dw_dim b, s, sum, product, quotient, parsed;
    dw_value x, y;
    DW_TRY(dw_graph_create(&graph));
    DW_TRY(dw_graph_symbol(graph, "B", &b));
    DW_TRY(dw_graph_symbol(graph, "S", &s));
    DW_TRY(dw_dim_add(graph, b, s, &sum));
    DW_TRY(dw_dim_mul(graph, sum, s, &product));
    DW_TRY(dw_dim_div(graph, product, s, &quotient));
    DW_TRY(dw_dim_sub(graph, product, s, &quotient));
    DW_TRY(dw_dim_parse(graph, "3*B*S + C", &parsed));
    DW_TRY(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 1, &product, &x));
    DW_TRY(dw_graph_set_origin(graph, DW_REGION_MLP, 3, "h.3.mlp"));
    DW_TRY(dw_graph_apply(graph, DW_OP_EXP, 1, &x, 0, NULL, &y));
    DW_TRY(dw_graph_add_output(graph, y));
cleanup:
    dw_graph_destroy(graph);
    return status;
}

/* The gradient of output 1 (the loss) with respect to every parameter. */
static dw_status gradient_of(const dw_graph *forward) {
    dw_status status = DW_OK;
    dw_graph *graph = NULL;
    dw_value wrt[MOST_LEAVES], grads[MOST_LEAVES], grad;
    uint32_t count = 0;
    DW_TRY(dw_graph_clone(forward, &graph));
    for (uint32_t i = 0; i < dw_graph_leaf_count(graph); i++) {
        dw_value leaf = dw_graph_leaf_at(graph, i);
        if (dw_value_role(graph, leaf) == DW_ROLE_PARAMETER) wrt[count++] = leaf;
    }
    dw_value loss = dw_graph_output(graph, 1);
    DW_TRY(dw_graph_leaf(graph, DW_ROLE_GRADIENT, "dloss", DW_F32, 0, NULL, &grad));
    DW_TRY(dw_graph_gradient(graph, 1, &loss, &grad, count, wrt, grads));
cleanup:
    dw_graph_destroy(graph);
    return status;
}

static dw_status gradient_of_gpt(void) { return gradient_of(given.gpt); }
static dw_status gradient_of_llama(void) { return gradient_of(given.llama); }

/* A pass that fails leaves its graph unchanged. */
static dw_status run_pass(dw_pass pass) {
    dw_status status = DW_OK;
    dw_graph *graph = NULL;
    DW_TRY(dw_graph_clone(given.gpt, &graph));
    uint32_t nodes = dw_graph_node_count(graph);
    dw_graph *same = graph;
    status = dw_graph_run_pass(&graph, pass);
    if (status != DW_OK) {
        assert_ptr_equal(graph, same);
        assert_int_equal(dw_graph_node_count(graph), nodes);
    }
cleanup:
    dw_graph_destroy(graph);
    return status;
}

static dw_status pass_dead_code(void) { return run_pass(DW_PASS_DEAD_CODE); }
static dw_status pass_common(void) { return run_pass(DW_PASS_COMMON); }
static dw_status pass_fold(void) { return run_pass(DW_PASS_FOLD); }
static dw_status pass_recognize(void) { return run_pass(DW_PASS_RECOGNIZE); }
static dw_status pass_expand(void) { return run_pass(DW_PASS_EXPAND); }
static dw_status pass_fuse(void) { return run_pass(DW_PASS_FUSE); }

/* ---- the engine ------------------------------------------------------------------------------ */

static dw_status make_engine(const dw_graph *graph, dw_engine **engine) {
    dw_value wrt[MOST_LEAVES];
    uint32_t count = 0, loss = 1;
    for (uint32_t i = 0; i < dw_graph_leaf_count(graph); i++) {
        dw_value leaf = dw_graph_leaf_at(graph, i);
        if (dw_value_role(graph, leaf) == DW_ROLE_PARAMETER) wrt[count++] = leaf;
    }
    return dw_engine_create(graph, 1, &loss, count, wrt, NULL, engine);
}

static dw_status plan_and_describe(const dw_graph *graph) {
    dw_status status = DW_OK;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    char *text = NULL;
    DW_TRY(make_engine(graph, &engine));
    DW_TRY(dw_engine_plan(engine, (int64_t[]){2, 5}, &plan));
    DW_TRY(dw_plan_describe(plan, &text));
cleanup:
    dw_text_free(text);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    return status;
}

static dw_status engine_of_gpt(void) { return plan_and_describe(given.gpt); }
static dw_status engine_of_llama(void) { return plan_and_describe(given.llama); }

/* More plans than an engine keeps: each new one evicts an old one. */
static dw_status many_plans(void) {
    dw_status status = DW_OK;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    DW_TRY(dw_engine_create(given.small, 0, NULL, 0, NULL, NULL, &engine));
    for (int64_t batch = 1; batch < 40; batch++) {
        DW_TRY(dw_engine_plan(engine, (int64_t[]){batch, 3}, &plan));
        dw_plan_release(plan);
    }
cleanup:
    dw_engine_destroy(engine);
    return status;
}

/* No divisor fits, so all divisors of the batch are tried. */
static dw_status fit_a_step(void) {
    dw_status status = DW_OK;
    dw_engine *engine = NULL;
    dw_step_fit fit;
    DW_TRY(make_engine(given.small, &engine));
    DW_TRY(dw_engine_fit_step(engine, (int64_t[]){6, 5}, 0, 1, NULL, 0, &fit));
    assert_true(!fit.fits && fit.micro_batch == 1);
cleanup:
    dw_engine_destroy(engine);
    return status;
}

/* Memory of a step. Outputs and gradients come from the device, as in a program. */
typedef struct step {
    const dw_device *device;
    dw_engine *engine;
    dw_plan *plan;
    void *arena;
    uint32_t leaf_count, wrt_count;
    dw_binding leaves[MOST_LEAVES], outputs[MOST_OUTPUTS], grads[MOST_LEAVES];
    size_t leaf_bytes[MOST_LEAVES], output_bytes[MOST_OUTPUTS], grad_bytes[MOST_LEAVES];
} step;

static dw_status allocate(step *s, const dw_graph *graph, dw_value value, dw_binding *binding,
                          size_t *bytes) {
    dw__tensor tensor;
    DW_RETURN_IF_FAILED(dw__value_tensor_at(graph, value, (int64_t[]){2, 5}, &tensor));
    *bytes = dw__tensor_bytes(&tensor);
    return dw_device_allocate(s->device, *bytes, &binding->data);
}

static dw_status begin_step(step *s, const dw_graph *graph) {
    DW_RETURN_IF_FAILED(dw_device_find("cpu", &s->device));
    DW_RETURN_IF_FAILED(make_engine(graph, &s->engine));
    DW_RETURN_IF_FAILED(dw_engine_plan(s->engine, (int64_t[]){2, 5}, &s->plan));
    DW_RETURN_IF_FAILED(dw_device_allocate(s->device, dw_plan_arena_bytes(s->plan), &s->arena));
    s->leaf_count = dw_graph_leaf_count(graph);
    for (uint32_t i = 0; i < s->leaf_count; i++) {
        dw_value leaf = dw_graph_leaf_at(graph, i);
        DW_RETURN_IF_FAILED(allocate(s, graph, leaf, &s->leaves[i], &s->leaf_bytes[i]));
        int64_t count = (int64_t)(s->leaf_bytes[i] / dw_dtype_bytes(dw_value_dtype(graph, leaf)));
        model_fill(graph, leaf, count, 3, s->leaves[i].data);
        if (dw_value_role(graph, leaf) != DW_ROLE_PARAMETER) continue;
        uint32_t j = s->wrt_count++;
        DW_RETURN_IF_FAILED(allocate(s, graph, leaf, &s->grads[j], &s->grad_bytes[j]));
    }
    for (uint32_t i = 0; i < 2; i++) {
        dw_value output = dw_graph_output(graph, i);
        DW_RETURN_IF_FAILED(allocate(s, graph, output, &s->outputs[i], &s->output_bytes[i]));
    }
    return DW_OK;
}

static void end_step(step *s) {
    for (uint32_t i = 0; i < MOST_LEAVES; i++) {
        dw_device_release(s->device, s->leaves[i].data, s->leaf_bytes[i]);
        dw_device_release(s->device, s->grads[i].data, s->grad_bytes[i]);
    }
    for (uint32_t i = 0; i < 2; i++)
        dw_device_release(s->device, s->outputs[i].data, s->output_bytes[i]);
    if (s->plan) dw_device_release(s->device, s->arena, dw_plan_arena_bytes(s->plan));
    dw_plan_release(s->plan);
    dw_engine_destroy(s->engine);
}

/* Forward, backward in parts and whole (with an output gradient that is NULL: zeros), AdamW. */
static dw_status training_step(void) {
    dw_status status = DW_OK;
    step s = {0};
    float one = 1.0F, moments[2][2] = {{0}}, param[2] = {1, 2}, slope[2] = {3, 4};
    dw_binding ones = {.data = &one}, none = {0};
    DW_TRY(begin_step(&s, given.small));
    DW_TRY(dw_plan_forward(s.plan, s.arena, s.leaves, s.outputs, NULL));
    DW_TRY(dw_plan_backward(s.plan, s.arena, s.leaves, s.outputs, &ones, s.grads, NULL));
    DW_TRY(dw_plan_forward(s.plan, s.arena, s.leaves, s.outputs, NULL));
    for (uint32_t part = 0; part < dw_plan_part_count(s.plan); part++)
        DW_TRY(dw_plan_backward_part(s.plan, part, s.arena, s.leaves, s.outputs, &none, s.grads,
                                     NULL));
    dw_adamw_options options = {sizeof options, 0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 1, 0};
    dw_adamw_tensor tensor = {param, slope, moments[0], moments[1], 2};
    status = dw_adamw_step(&tensor, 1, &options);
    /* A failed update has changed nothing. */
    assert_true(status == DW_OK ? param[0] < 1.0F && param[1] < 2.0F
                                : param[0] == 1.0F && param[1] == 2.0F);
cleanup:
    end_step(&s);
    return status;
}

/* ---- other scenarios ------------------------------------------------------------------------- */

static dw_status interpret(void) {
    float x[6] = {1, 2, 3, -1, 0, 1}, w[6] = {1, 0, 2, 0, 1, 1};
    dw_status status = DW_OK;
    dw_graph *graph = NULL;
    dw_value values[2], y;
    dw__tensor leaves[2], outputs[1] = {{0}};
    dw_dim shape[2] = {2, 3};
    DW_TRY(dw_graph_create(&graph));
    DW_TRY(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 2, shape, &values[0]));
    DW_TRY(dw_graph_leaf(graph, DW_ROLE_INPUT, "w", DW_F32, 2, shape, &values[1]));
    DW_TRY(dw_graph_apply(graph, DW_OP_LINEAR, 2, values, 0, NULL, &y));
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
    DW_TRY(dw_graph_apply(graph, DW_OP_SOFTMAX, 1, &y, 1, &axis, &y));
    DW_TRY(dw_graph_add_output(graph, y));
    DW_TRY(dw__value_tensor_at(graph, values[0], NULL, &leaves[0]));
    DW_TRY(dw__value_tensor_at(graph, values[1], NULL, &leaves[1]));
    leaves[0].data = x;
    leaves[1].data = w;
    DW_TRY(dw__interpret(graph, NULL, leaves, outputs, &(dw__interpret_options){true}));
cleanup:
    dw__free_aligned(outputs[0].data);
    dw_graph_destroy(graph);
    return status;
}

static dw_status describe_machine(void) {
    char *json = NULL;
    dw_status status = dw_machine_describe(&json);
    dw_text_free(json);
    return status;
}

/* A small block comes from malloc, a large one from mmap. */
static dw_status device_blocks(void) {
    dw_status status = DW_OK;
    enum { SMALL = 100, LARGE = 5 << 20 };
    void *small = NULL, *large = NULL;
    const dw_device *device;
    DW_TRY(dw_device_find("cpu", &device));
    DW_TRY(dw_device_allocate(device, SMALL, &small));
    DW_TRY(dw_device_allocate(device, LARGE, &large));
    DW_TRY(dw_device_fill(device, large, 7, LARGE));
    DW_TRY(dw_device_copy(device, small, large, SMALL));
cleanup:
    dw_device_release(device, small, SMALL);
    dw_device_release(device, large, LARGE);
    return status;
}

static dw_status read_file(void) {
    char *bytes = NULL;
    size_t count = 0;
    dw_status status = dw__file_read(given.path, &bytes, &count);
    if (status == DW_OK) assert_string_equal(bytes, given.gpt_text);
    dw__free(bytes);
    return status;
}

static void add_index(void *context, int64_t index, int worker) {
    (void)worker;
    atomic_fetch_add((_Atomic int64_t *)context, index);
}

/* If threads cannot be started, the loop runs on those that exist. */
static dw_status start_threads(void) {
    enum { THREADS = 5, TASKS = 100 };
    _Atomic int64_t sum = 0;
    DW_RETURN_IF_FAILED(dw_set_threads(1));
    DW_RETURN_IF_FAILED(dw_set_threads(THREADS));
    dw__pool_run(TASKS, add_index, &sum);
    assert_int_equal(atomic_load(&sum), TASKS * (TASKS - 1) / 2);
    int threads = dw_get_threads();
    assert_true(threads == THREADS || (dw__memory_failures() > 0 && threads >= 1));
    return DW_OK;
}

/* The planner's model of a graph, and its operations, forward and backward. */
static dw_status planned_graph(void) {
    dw_model_sizes model;
    dw_planner_work work;
    int64_t sizes[8] = {2, 3, 4, 5, 6, 7, 8, 9};
    DW_RETURN_IF_FAILED(dw_model_sizes_of_graph(given.planned, &model));
    return dw_planner_graph_work(given.planned, sizes, 1, &work);
}

static const scenario scenarios[] = {
    {"planner's graph", planned_graph, false},
    {"a graph from text", from_text, false},
    {"a graph from JSON", from_json, false},
    {"JSON", json, false},
    {"a graph as text", to_text, false},
    {"a graph as JSON", to_json, false},
    {"a clone", clone, false},
    {"verification", verify, false},
    {"the cost", cost, false},
    {"building by hand", build_by_hand, false},
    {"the gradient of GPT", gradient_of_gpt, false},
    {"the gradient of Llama", gradient_of_llama, false},
    {"pass dead_code", pass_dead_code, false},
    {"pass common", pass_common, false},
    {"pass fold", pass_fold, false},
    {"pass recognize", pass_recognize, false},
    {"pass expand", pass_expand, false},
    {"pass fuse", pass_fuse, false},
    {"the engine of GPT", engine_of_gpt, false},
    {"the engine of Llama", engine_of_llama, false},
    {"many plans", many_plans, false},
    {"a step that fits", fit_a_step, false},
    {"a step of training", training_step, false},
    {"the interpreter", interpret, false},
    {"the machine", describe_machine, false},
    {"blocks of the device", device_blocks, false},
    {"reading a file", read_file, false},
    {"threads", start_threads, true},
};

static void every_scenario_survives(void **state) {
    (void)state;
    for (size_t i = 0; i < DW_COUNT(scenarios); i++) {
        double start = dw__seconds();
        int64_t last = exhaust(&scenarios[i], 12);
        print_message("%-24s about %lld allocations, %.2f s\n", scenarios[i].name, (long long)last,
                      dw__seconds() - start);
    }
}

/* ---- every operation ------------------------------------------------------------------------- */

/* Finds the first case of the table with the most operands and attributes, in F32 if possible. */
typedef struct op_choice {
    char text[DW_OP_COUNT][OPS_TEXT_BYTES];
    uint32_t score[DW_OP_COUNT];
} op_choice;

static dw_status choose_case(void *context, const char *text, dw_dtype placeholder) {
    op_choice *choice = context;
    static ops_case c;
    (void)placeholder;
    DW_RETURN_IF_FAILED(ops_case_parse(text, &c));
    uint32_t score = 1 + 2 * (c.input_count + c.attr_count) + (strstr(text, " f32[") != NULL);
    if (c.must_fail || score <= choice->score[c.op]) return DW_OK;
    choice->score[c.op] = score;
    snprintf(choice->text[c.op], OPS_TEXT_BYTES, "%s", text);
    return DW_OK;
}

/* Gradients of every floating-point output with respect to every floating-point operand, if there are any. */
static dw_status differentiate(const dw_graph *graph, dw_engine **engine) {
    dw_value wrt[OPS_MAX_INPUTS];
    uint32_t outputs[DW_MAX_OUTPUTS], wrt_count = 0, output_count = 0;
    for (uint32_t i = 0; i < dw_graph_leaf_count(graph); i++) {
        dw_value leaf = dw_graph_leaf_at(graph, i);
        if (dw_value_dtype(graph, leaf) == DW_F32) wrt[wrt_count++] = leaf;
    }
    for (uint32_t i = 0; i < dw_graph_output_count(graph); i++)
        if (dw_value_dtype(graph, dw_graph_output(graph, i)) == DW_F32) outputs[output_count++] = i;
    bool none = wrt_count == 0 || output_count == 0;
    dw_status status = dw_engine_create(graph, none ? 0 : output_count, outputs,
                                        none ? 0 : wrt_count, wrt, NULL, engine);
    if (status != DW_UNSUPPORTED) return status; /* DW_UNSUPPORTED: the operation has no gradient */
    return dw_engine_create(graph, 0, NULL, 0, NULL, NULL, engine);
}

/* Expands, fuses and plans the operation and its gradient. */
static dw_status operation(void) {
    dw_status status = DW_OK;
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    dw_cost work;
    DW_TRY(ops_case_graph(given.op_case, &graph));
    DW_TRY(dw_graph_cost(graph, NULL, &work));
    DW_TRY(differentiate(graph, &engine));
    DW_TRY(dw_engine_plan(engine, NULL, &plan));
    DW_TRY(dw_graph_run_pass(&graph, DW_PASS_EXPAND));
cleanup:
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
    return status;
}

static void every_operation_survives(void **state) {
    (void)state;
    static op_choice choice;
    static ops_case c;
    OK(ops_each_case(choose_case, &choice));
    for (int op = 0; op < DW_OP_COUNT; op++) {
        if (choice.score[op] == 0) fail_msg("%s has no case", dw_op_name((dw_op)op));
        OK(ops_case_parse(choice.text[op], &c));
        given.op_case = &c;
        exhaust(&(scenario){choice.text[op], operation, false}, 4);
    }
}

/* ---- set-up and checks ----------------------------------------------------------------------- */

static char file_name[] = "/tmp/deepwell_out_of_memory_XXXXXX";

static int begin(void **state) {
    (void)state;
    memset(given.long_key, 'k', sizeof given.long_key - 1);
    given.gpt = build(model_gpt, 0.1);
    given.llama = build(model_llama, 0.0);
    given.planned = build_planned();
    given.small = build(make_small, 0.0);
    OK(dw_graph_to_text(given.gpt, &given.gpt_text));
    OK(dw_graph_to_json(given.gpt, &given.gpt_json));
    int file = mkstemp(file_name);
    assert_true(file >= 0);
    size_t count = strlen(given.gpt_text);
    assert_int_equal(write(file, given.gpt_text, count), count);
    close(file);
    given.path = file_name;
    return 0;
}

static int end(void **state) {
    (void)state;
    unlink(file_name);
    dw_text_free(given.gpt_text);
    dw_text_free(given.gpt_json);
    dw_graph_destroy(given.gpt);
    dw_graph_destroy(given.llama);
    dw_graph_destroy(given.planned);
    dw_graph_destroy(given.small);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_scenario_survives),
        cmocka_unit_test(every_operation_survives),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
