/* The engine on an emulated Hopper GPU, its checker on: whole models, forward and backward, against the interpreter in
 * FP64 (engine_problem.h); by single launches and by recorded graphs. DEEPWELL_TEST_DEVICE=cuda runs the same on a GPU.
 * The tests are skipped where there is no NVRTC, which compiles elementwise programs. */
#include "deepwell/jit.h"
#include "engine/executor.h"
#include "engine_concats.h"
#include "engine_epilogues.h"
#include "engine_segments.h"

static const dw_device *device;

/* ---- memory of the device ---------------------------------------------------------------------------- */

typedef struct on_device {
    uint32_t count;
    size_t bytes[MOST_LEAVES];
    dw_binding bindings[MOST_LEAVES];
} on_device;

/* Copies of tensors; a tensor without data has none there. */
static void send_all(uint32_t count, const dw__tensor *tensors, on_device *d) {
    d->count = count;
    for (uint32_t i = 0; i < count; i++) {
        d->bytes[i] = bytes_of(&tensors[i]);
        d->bindings[i] = (dw_binding){.data = NULL};
        if (!tensors[i].data) continue;
        OK(dw_device_allocate(device, d->bytes[i], &d->bindings[i].data));
        OK(dw_device_copy_in(device, d->bindings[i].data, tensors[i].data, d->bytes[i]));
    }
}

static void fetch_all(const on_device *d, const dw__tensor *tensors) {
    for (uint32_t i = 0; i < d->count; i++)
        if (tensors[i].data)
            OK(dw_device_copy_out(device, tensors[i].data, d->bindings[i].data, d->bytes[i]));
}

static void release_all(on_device *d) {
    for (uint32_t i = 0; i < d->count; i++)
        dw_device_release(device, d->bindings[i].data, d->bytes[i]);
}

/* ---- one problem ---------------------------------------------------------------------------------------- */

static dw_engine *make_gpu_engine(const problem *p, int fuse, int graphs) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.fuse = fuse;
    options.device = device;
    options.cuda_graphs = graphs;
    return make_engine_with(p, &options);
}

static dw_status plan_on_device(const dw_graph *graph, dw_engine **engine, dw_plan **plan) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.device = device;
    OK(dw_engine_create(graph, 0, NULL, 0, NULL, &options, engine));
    return dw_engine_plan(*engine, NULL, plan);
}

/* Forward, and backward if it has gradients, `times` times, on a stream. */
static void run_on_device(dw_engine *engine, const problem *p, int times, results *r) {
    on_device leaves, outputs, output_grads, grads;
    dw_plan *plan = NULL;
    void *arena = NULL, *stream = NULL;
    results_begin(p, engine, r);
    OK(dw_engine_plan(engine, p->sizes, &plan));
    const size_t arena_bytes = dw_plan_arena_bytes(plan);
    OK(dw_device_allocate(device, arena_bytes, &arena));
    OK(dw_device_fill(device, arena, 0xFF,
                      arena_bytes)); /* NaNs, if read before they are written */
    OK(device->stream_create(&stream));
    send_all(p->leaf_count, p->leaves, &leaves);
    send_all(p->output_count, p->output_grads, &output_grads);
    send_all(r->output_count, r->outputs, &outputs);
    send_all(r->grad_count, r->grads, &grads);
    for (int i = 0; i < times; i++) {
        OK(dw_plan_forward(plan, arena, leaves.bindings, outputs.bindings, stream));
        if (p->wrt_count > 0)
            OK(dw_plan_backward(plan, arena, leaves.bindings, outputs.bindings,
                                output_grads.bindings, grads.bindings, stream));
    }
    OK(dw_plan_synchronize(plan, stream));
    fetch_all(&outputs, r->outputs);
    fetch_all(&grads, r->grads);
    release_all(&leaves);
    release_all(&output_grads);
    release_all(&outputs);
    release_all(&grads);
    device->stream_destroy(stream);
    dw_device_release(device, arena, arena_bytes);
    dw_plan_release(plan);
}

static void agrees(model_builder builder, double dropout, int64_t batch, int64_t sequence) {
    dw_graph *graph = build(builder, dropout);
    problem p;
    results f32, f64, replayed, got;
    problem_begin(&p, graph, batch, sequence);
    interpret(&p, false, &f32);
    interpret(&p, true, &f64);
    dw_engine *engine = make_gpu_engine(&p, 1, 0), *graphs = make_gpu_engine(&p, 1, 1);
    run_on_device(engine, &p, 1, &got);
    expect_results(&p, &got, &f32, &f64);
    run_on_device(graphs, &p, 2, &replayed);
    expect_same_bits(&p, &got, &replayed);
    results_end(&replayed);
    results_end(&got);
    results_end(&f32);
    results_end(&f64);
    dw_engine_destroy(graphs);
    dw_engine_destroy(engine);
    problem_end(&p);
    dw_graph_destroy(graph);
}

static void need_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) == DW_OK) return;
    print_message("%s\n", dw_last_error());
    skip();
}

static void gpt_agrees(void **state) {
    (void)state;
    need_compiler();
    agrees(model_gpt, 0.0, 2, 7);
}
static void gpt_with_dropout_agrees(void **state) {
    (void)state;
    need_compiler();
    agrees(model_gpt, 0.25, 1, 9);
}
static void llama_agrees(void **state) {
    (void)state;
    need_compiler();
    agrees(model_llama, 0.0, 2, 17);
}

/* ---- plans for a GPU that is not there ---------------------------------------------------------------- */

/* A plan as text (dw_plan_describe): an instruction is listed by its kernel, with the type and shape of its first
 * operand. `arena`: may be NULL. */
static char *described_on(const char *name, model_builder builder, double dropout, int64_t sequence,
                          size_t *arena) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_graph *graph = build(builder, dropout);
    dw_plan *plan = NULL;
    char *text = NULL;
    problem p;
    problem_begin(&p, graph, 2, sequence);
    OK(dw_device_find(name, &options.device));
    dw_engine *engine = make_engine_with(&p, &options);
    OK(dw_engine_plan(engine, p.sizes, &plan));
    OK(dw_plan_describe(plan, &text));
    if (arena) *arena = dw_plan_arena_bytes(plan);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    problem_end(&p);
    dw_graph_destroy(graph);
    return text;
}

/* Without cuBLASLt both choose the same kernels and places. With it, a planned GPU reserves the most workspace. */
static void a_planned_gpu_has_the_plan_of_an_emulated_one(void **state) {
    static const model_builder builders[] = {model_gpt, model_llama};
    const char *set = getenv("DEEPWELL_CUBLASLT");
    char before[512];
    size_t emulated, planned, with_library;
    (void)state;
    if (strcmp(device->name, "emulator:sm_90a") != 0) skip();
    need_compiler();
    snprintf(before, sizeof before, "%s", set ? set : "");
    for (size_t i = 0; i < DW_COUNT(builders); i++) {
        setenv("DEEPWELL_CUBLASLT", "off", 1);
        char *expected = described_on("emulator:sm_90a", builders[i], 0.0, 17, &emulated),
             *found = described_on("plan:sm_90a", builders[i], 0.0, 17, &planned);
        assert_string_equal(found, expected);
        assert_int_equal(planned, emulated);
        dw_text_free(found);
        dw_text_free(expected);
        unsetenv("DEEPWELL_CUBLASLT");
        found = described_on("plan:sm_90a", builders[i], 0.0, 17, &with_library);
        assert_non_null(strstr(found, "cublaslt"));
        assert_true(with_library >= (size_t)32 << 20);
        dw_text_free(found);
    }
    if (set) setenv("DEEPWELL_CUBLASLT", before, 1);
}

static void a_planned_gpu_runs_nothing(void **state) {
    const dw_device *planned = NULL;
    void *memory = NULL;
    (void)state;
    OK(dw_device_find("plan:sm_90a", &planned));
    assert_string_equal(dw_device_name(planned), "plan:sm_90a");
    assert_int_equal(dw_device_allocate(planned, 64, &memory), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "runs nothing"));
    assert_int_equal(planned->launch(&(dw__launch){.name = "any"}), DW_UNSUPPORTED);
}

/* ---- the head of a language model ------------------------------------------------------------------------ */

enum { HEAD_WIDTH = 24, PRODUCT_COLUMNS = 1100 };

/* The hidden state behind two products in F32. Backward reads the first one's result. */
static dw_value behind_products(model *m) {
    const dw_dim tokens = dw__emit_dim_mul(&m->e, m->batch, m->sequence), first[] = {tokens, 5},
                 second[] = {5, PRODUCT_COLUMNS}, third[] = {PRODUCT_COLUMNS, HEAD_WIDTH};
    const dw_value a = model_leaf(m, DW_ROLE_PARAMETER, "a", DW_F32, 2, first),
                   b = model_leaf(m, DW_ROLE_PARAMETER, "b", DW_F32, 2, second),
                   c = model_leaf(m, DW_ROLE_PARAMETER, "c", DW_F32, 2, third);
    const dw_value x =
        dw__emit_matmul(&m->e, dw__emit_matmul(&m->e, a, b, false, false), c, false, false);
    return dw__emit_reshape(&m->e, x, 3, (dw_dim[]){m->batch, m->sequence, HEAD_WIDTH});
}

/* As Hugging Face's models under autocast: a linear layer in BF16, the loss of its logits in F32. With `read`, the
 * logits are an output, too; with `deep`, the head has products in front of it. */
static dw_status add_head(model *m, bool read, bool deep) {
    enum { WIDTH = HEAD_WIDTH };
    const dw_dim classes = deep ? 1031 : 331;
    model_begin(m);
    dw__emitter *e = &m->e;
    const dw_dim hidden[] = {m->batch, m->sequence, WIDTH}, weight[] = {classes, WIDTH};
    const dw_dim tokens = dw__emit_dim_mul(e, m->batch, m->sequence), flat[] = {tokens, classes};
    const dw_value x = deep ? behind_products(m)
                            : model_leaf(m, DW_ROLE_PARAMETER, "x", DW_F32, 3, hidden),
                   w = model_leaf(m, DW_ROLE_PARAMETER, "w", DW_F32, 2, weight),
                   target = model_leaf(m, DW_ROLE_INPUT, "target", DW_I64, 1, &tokens);
    const dw_value operands[] = {dw__emit_cast(e, x, DW_BF16), dw__emit_cast(e, w, DW_BF16)};
    dw_value logits = dw__emit(e, DW_OP_LINEAR, 2, operands, 0, NULL);
    logits = dw__emit_cast(e, logits, DW_F32);
    const dw_attr attrs[] = {dw_attr_string(DW_ATTR_KEY_REDUCTION, "mean"),
                             dw_attr_int(DW_ATTR_KEY_IGNORE_INDEX, -100)};
    const dw_value loss =
        dw__emit(e, DW_OP_CROSS_ENTROPY, 2,
                 (dw_value[]){dw__emit_reshape(e, logits, 2, flat), target}, 2, attrs);
    if (e->status == DW_OK) e->status = dw_graph_add_output(m->graph, loss);
    if (e->status == DW_OK && read) e->status = dw_graph_add_output(m->graph, logits);
    return e->status;
}
static dw_status head_alone(model *m) { return add_head(m, false, false); }
static dw_status head_with_logits(model *m) { return add_head(m, true, false); }
static dw_status head_of_a_model(model *m) { return add_head(m, false, true); }

static char *listing_of(model_builder builder, double dropout) {
    return described_on(device->name, builder, dropout, 77, NULL);
}
static void expect_kernel(model_builder builder, double dropout, const char *kernel);

/* Whether backward has the logits in front of the targets, of `classes` classes. Long rows are then padded, which a listing
 * shows by "~". */
static bool keeps_logits(model_builder builder, int classes) {
    static const char backward[] = " linear_cross_entropy_backward ";
    char given[32], *text = listing_of(builder, 0.0), *from = strstr(text, backward);
    snprintf(given, sizeof given, "bf16[154,%d]", classes);
    if (!from) fail_msg("no gradient of the head in %s", text);
    const char *target = strstr(from, "i64[154]"), *logits = strstr(from, given);
    const bool keeps = logits && logits < target;
    if (keeps) assert_int_equal(strcspn(logits, "~") < strcspn(logits, " "), classes > 1024);
    dw_text_free(text);
    return keeps;
}

/* Logits are kept for backward if they take no more memory than what is saved besides and gradients, unless the user
 * decides. */
static void logits_are_kept_if_more_is_saved(void **state) {
    (void)state;
    need_compiler();
    agrees(head_of_a_model, 0.0, 2, 9);
    assert_false(keeps_logits(head_alone, 331));
    assert_true(keeps_logits(head_of_a_model, 1031));
    setenv("DEEPWELL_LOGITS", "kept", 1);
    assert_true(keeps_logits(head_alone, 331));
    setenv("DEEPWELL_LOGITS", "blocks", 1);
    assert_false(keeps_logits(head_of_a_model, 1031));
    unsetenv("DEEPWELL_LOGITS");
}

/* Logits that are an output are computed whole. */
static void logits_that_nobody_reads_stay_in_blocks(void **state) {
    (void)state;
    need_compiler();
    agrees(head_alone, 0.0, 2, 9);
    expect_kernel(head_alone, 0.0, " linear_cross_entropy ");
    expect_kernel(head_alone, 0.0, " linear_cross_entropy_backward ");
    agrees(head_with_logits, 0.0, 2, 9);
    char *text = listing_of(head_with_logits, 0.0);
    assert_null(strstr(text, " linear_cross_entropy "));
    dw_text_free(text);
}

/* Batches of products, read by a program, a product and a reshape. A plan's listing marks padded tensors by "~". */
static dw_status padded_products(model *m) {
    enum { WIDTH = 3, COLUMNS = 1031 };
    model_begin(m);
    dw__emitter *e = &m->e;
    const dw_dim left[] = {m->batch, m->sequence, WIDTH}, right[] = {m->batch, WIDTH, COLUMNS};
    const dw_value a = model_leaf(m, DW_ROLE_PARAMETER, "a", DW_F32, 3, left),
                   b = model_leaf(m, DW_ROLE_PARAMETER, "b", DW_F32, 3, right);
    const dw_value y = dw__emit_matmul(e, dw__emit_cast(e, a, DW_BF16),
                                       dw__emit_cast(e, b, DW_BF16), false, false);
    const dw_dim flat[] = {dw__emit_dim_mul(e, m->batch, m->sequence), COLUMNS};
    const dw_value results[] = {
        dw__emit_cast(e, dw__emit_matmul(e, y, y, false, true), DW_F32),
        dw__emit_unary(e, DW_OP_TANH, dw__emit_cast(e, dw__emit_reshape(e, y, 2, flat), DW_F32))};
    for (size_t i = 0; i < DW_COUNT(results) && e->status == DW_OK; i++)
        e->status = dw_graph_add_output(m->graph, results[i]);
    return e->status;
}

static void rows_of_products_are_padded(void **state) {
    (void)state;
    need_compiler();
    agrees(padded_products, 0.0, 2, 3);
    expect_kernel(padded_products, 0.0, "~");
}

/* ---- concatenations ------------------------------------------------------------------------------------- */

/* Runs model_concat with everything saved, and returns its plan's listing. */
static char *run_concat(bool observed, concat_kind kind, results *r) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    concat_choose(kind, observed, DW_BF16);
    dw_graph *graph = build(model_concat, 0.0);
    dw_plan *plan = NULL;
    char *text = NULL;
    problem p;
    problem_begin(&p, graph, 2, 13);
    options.device = device;
    options.recompute = 0;
    dw_engine *engine = make_engine_with(&p, &options);
    run_on_device(engine, &p, 1, r);
    OK(dw_engine_plan(engine, p.sizes, &plan));
    OK(dw_plan_describe(plan, &text));
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    problem_end(&p);
    dw_graph_destroy(graph);
    return text;
}

/* Results of elementwise programs, softmax and GEMMs are written into their slices, with the bits of a plan that copies
 * them. Copied are an operand that lies in another slice already, rows that heads divide or that are no multiple of 16
 * bytes apart, and columns that alternate. */
static void concatenations_of_results_are_not_copied(void **state) {
    static const int copies[CONCAT_KINDS] = {[CONCAT_OF_SAME] = 1,
                                             [CONCAT_OF_HEADS] = 1,
                                             [CONCAT_OF_NARROW] = 1,
                                             [CONCAT_OF_COLUMNS] = 1};
    (void)state;
    need_compiler();
    for (int kind = 0; kind < CONCAT_KINDS; kind++) {
        results expected, got;
        dw_text_free(run_concat(true, (concat_kind)kind, &expected));
        char *text = run_concat(false, (concat_kind)kind, &got);
        if (concat_copies(text) != copies[kind]) fail_msg("kind %d: %s", kind, text);
        concat_expect_same(&got, &expected);
        dw_text_free(text);
        results_end(&got);
        results_end(&expected);
        agrees(model_concat, 0.0, 2, 13); /* with values computed again */
    }
}

/* ---- attention in BF16 and F16, by the kernels of wgmma and TMA ----------------------------------------- */

/* The tolerance is that of engine_problem.h. The interpreter in FP32 rounds operands and results to 16 bits, so its
 * distance from FP64 is some units of that type. The kernels round the weights P and their derivatives dS too: each
 * adds about as much again, which 8 times that distance covers. */

enum { HEADS = 4, KEY_HEADS = 2 };

/* Attention of grouped heads between casts. */
typedef struct attention_case {
    dw_dtype type;
    int64_t head_dim;
    double scale, softcap;
    int64_t causal, window;
    int64_t more_keys;   /* than queries */
    bool mask;           /* additive, of the operands' type */
    bool learned_mask;   /* it has a gradient */
    bool constant_keys;  /* k and v have no gradient */
    int64_t stream;      /* of dropout */
    uint32_t first, end; /* results of attention that are the graph's outputs: o, lse */
} attention_case;

static dw_value rounded_leaf(model *m, const attention_case *c, const char *name, int heads,
                             dw_dim rows) {
    const dw_dim shape[4] = {m->batch, heads, rows, c->head_dim};
    const dw_role role = c->constant_keys && heads == KEY_HEADS ? DW_ROLE_INPUT : DW_ROLE_PARAMETER;
    return dw__emit_cast(&m->e, model_leaf(m, role, name, DW_F32, 4, shape), c->type);
}

static dw_status add_attention(model *m, const attention_case *c) {
    model_begin(m);
    dw_attr attrs[] = {
        dw_attr_float(DW_ATTR_KEY_SCALE, c->scale), dw_attr_float(DW_ATTR_KEY_SOFTCAP, c->softcap),
        dw_attr_int(DW_ATTR_KEY_CAUSAL, c->causal), dw_attr_int(DW_ATTR_KEY_WINDOW, c->window),
        dw_attr_float(DW_ATTR_KEY_P, m->dropout),   dw_attr_int(DW_ATTR_KEY_STREAM, c->stream)};
    dw_dim keys = m->sequence;
    dw_node node = DW_NONE;
    if (m->e.status == DW_OK && c->more_keys)
        m->e.status = dw_dim_add(m->graph, m->sequence, c->more_keys, &keys);
    dw_value operands[5] = {rounded_leaf(m, c, "q", HEADS, m->sequence),
                            rounded_leaf(m, c, "k", KEY_HEADS, keys),
                            rounded_leaf(m, c, "v", KEY_HEADS, keys), DW_NONE, m->seed};
    if (c->mask) {
        const dw_dim shape[4] = {1, c->learned_mask ? HEADS : 1, m->sequence, keys};
        dw_value mask = model_leaf(m, c->learned_mask ? DW_ROLE_PARAMETER : DW_ROLE_INPUT, "mask",
                                   DW_F32, 4, shape);
        operands[3] = dw__emit_cast(&m->e, mask, c->type);
    }
    if (m->e.status == DW_OK)
        m->e.status =
            dw_graph_append(m->graph, DW_OP_ATTENTION, 5, operands, DW_COUNT(attrs), attrs, &node);
    if (m->e.status != DW_OK) return m->e.status;
    for (uint32_t i = c->first; i < c->end; i++) {
        dw_value result = dw__emit_cast(&m->e, dw_node_output(m->graph, node, i), DW_F32);
        if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, result);
    }
    return m->e.status;
}

/* Outputs o and lse: the gradient of lse is that of the definition. */
static dw_status bf16_window(model *m, int64_t window, uint32_t first, uint32_t end) {
    return add_attention(m, &(attention_case){.type = DW_BF16,
                                              .head_dim = 64,
                                              .scale = 0.125,
                                              .causal = 1,
                                              .window = window,
                                              .first = first,
                                              .end = end});
}
static dw_status both_outputs(model *m) { return bf16_window(m, -1, 0, 2); }
static dw_status statistics_alone(model *m) { return bf16_window(m, -1, 1, 2); }
static dw_status window_of_5(model *m) { return bf16_window(m, 5, 0, 2); }
static dw_status long_window(model *m) { return bf16_window(m, ((int64_t)1 << 32) + 5, 0, 2); }
static dw_status window_of_0(model *m) { return bf16_window(m, 0, 0, 1); }

/* Output o: backward is by the kernel. The scale makes weights of a row differ by factors of 10 and more. */
static dw_status causal_training(model *m) {
    return add_attention(
        m, &(attention_case){
               .type = DW_BF16, .head_dim = 64, .scale = 4.0, .causal = 1, .window = -1, .end = 1});
}
static dw_status window_training(model *m) {
    return add_attention(
        m, &(attention_case){
               .type = DW_BF16, .head_dim = 64, .scale = 4.0, .causal = 1, .window = 5, .end = 1});
}
/* Streams of dropout; of the second the low 32 bits count. */
static dw_status third_stream_training(model *m) {
    return add_attention(m, &(attention_case){.type = DW_BF16,
                                              .head_dim = 64,
                                              .scale = 4.0,
                                              .causal = 1,
                                              .window = -1,
                                              .end = 1,
                                              .stream = 3});
}
static dw_status far_stream_training(model *m) {
    return add_attention(m, &(attention_case){.type = DW_F16,
                                              .head_dim = 40,
                                              .scale = 4.0,
                                              .causal = 2,
                                              .window = -1,
                                              .more_keys = 230,
                                              .end = 1,
                                              .stream = ((int64_t)1 << 33) + 5});
}
/* Narrow heads, and more keys than a tile has: several thread blocks add to the same rows of dQ. */
static dw_status capped_training(model *m) {
    return add_attention(m, &(attention_case){.type = DW_F16,
                                              .head_dim = 40,
                                              .scale = 4.0,
                                              .softcap = 3.0,
                                              .causal = 2,
                                              .window = -1,
                                              .more_keys = 230,
                                              .end = 1});
}
static dw_status cross_training(model *m) {
    return add_attention(m, &(attention_case){.type = DW_BF16,
                                              .head_dim = 64,
                                              .scale = 4.0,
                                              .window = -1,
                                              .more_keys = 230,
                                              .constant_keys = true,
                                              .end = 1});
}
static dw_status masked_training(model *m) {
    return add_attention(
        m,
        &(attention_case){
            .type = DW_BF16, .head_dim = 64, .scale = 4.0, .window = -1, .mask = true, .end = 1});
}
static dw_status learned_mask_training(model *m) {
    return add_attention(m, &(attention_case){.type = DW_BF16,
                                              .head_dim = 64,
                                              .scale = 4.0,
                                              .causal = 1,
                                              .window = -1,
                                              .mask = true,
                                              .learned_mask = true,
                                              .end = 1});
}
static dw_status capped_mask_training(model *m) {
    return add_attention(m, &(attention_case){.type = DW_BF16,
                                              .head_dim = 64,
                                              .scale = 4.0,
                                              .softcap = 8.0,
                                              .window = -1,
                                              .mask = true,
                                              .end = 1});
}

/* Self-attention from one tensor [B, S, 3 * HEADS * 64]: views of it are q, k and v, and the output is [B, S, ..]. */
static dw_status packed_training(model *m) {
    enum { SIZE = 64, WIDTH = HEADS * SIZE };
    static const int64_t heads_first[4] = {0, 2, 1, 3};
    model_begin(m);
    const dw_attr scale = dw_attr_float(DW_ATTR_KEY_SCALE, 4.0);
    const dw_dim shape[3] = {m->batch, m->sequence, 3 * WIDTH};
    const dw_dim split[4] = {m->batch, m->sequence, HEADS, SIZE};
    const dw_dim joined[3] = {m->batch, m->sequence, WIDTH};
    dw_value x = model_leaf(m, DW_ROLE_PARAMETER, "x", DW_F32, 3, shape), parts[3];
    x = dw__emit_cast(&m->e, x, DW_BF16);
    for (int i = 0; i < 3; i++) {
        parts[i] = dw__emit_slice(&m->e, x, 2, i * WIDTH, (i + 1) * WIDTH);
        parts[i] = dw__emit_reshape(&m->e, parts[i], 4, split);
        parts[i] = dw__emit_permute(&m->e, parts[i], 4, heads_first);
    }
    dw_value o = dw__emit(&m->e, DW_OP_ATTENTION, 3, parts, 1, &scale);
    o = dw__emit_reshape(&m->e, dw__emit_permute(&m->e, o, 4, heads_first), 3, joined);
    o = dw__emit_cast(&m->e, o, DW_F32);
    if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, o);
    return m->e.status;
}

/* Two layers of a GPT's attention in BF16, each of whose dropouts has a stream of its own. */
static dw_status two_layers(model *m) {
    enum { LAYERS = 2, SIZE = 16, WIDTH = HEADS * SIZE };
    static const int64_t heads_first[4] = {0, 2, 1, 3};
    model_begin(m);
    dw__emitter *e = &m->e;
    const dw_dim joined[3] = {m->batch, m->sequence, WIDTH};
    const dw_dim split[4] = {m->batch, m->sequence, HEADS, SIZE};
    dw_value x = model_leaf(m, DW_ROLE_PARAMETER, "x", DW_F32, 3, joined);
    for (int layer = 0; layer < LAYERS; layer++) {
        dw_value qkv = model_linear(m, x, "qkv", layer, 3 * WIDTH, WIDTH, true);
        dw_value operands[5] = {DW_NONE, DW_NONE, DW_NONE, DW_NONE, m->seed};
        qkv = dw__emit_cast(e, qkv, DW_BF16);
        for (int i = 0; i < 3; i++) {
            operands[i] = dw__emit_slice(e, qkv, 2, i * WIDTH, (i + 1) * WIDTH);
            operands[i] = dw__emit_reshape(e, operands[i], 4, split);
            operands[i] = dw__emit_permute(e, operands[i], 4, heads_first);
        }
        const dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_SCALE, 0.25),
                                 dw_attr_int(DW_ATTR_KEY_CAUSAL, 1),
                                 dw_attr_float(DW_ATTR_KEY_P, m->dropout),
                                 dw_attr_int(DW_ATTR_KEY_STREAM, m->streams++)};
        dw_value o = dw__emit(e, DW_OP_ATTENTION, 5, operands, DW_COUNT(attrs), attrs);
        o = dw__emit_reshape(e, dw__emit_permute(e, o, 4, heads_first), 3, joined);
        o = model_linear(m, dw__emit_cast(e, o, DW_F32), "out", layer, WIDTH, WIDTH, true);
        x = dw__emit_binary(e, DW_OP_ADD, x, model_dropout(m, o));
    }
    if (e->status == DW_OK) e->status = dw_graph_add_output(m->graph, x);
    return e->status;
}

static void products_in_tf32_are_another_plan(void **state) {
    dw_graph *graph = build(model_gpt, 0.0);
    dw_plan_options options = DW_PLAN_OPTIONS_DEFAULT;
    dw_plan *plans[4] = {NULL};
    problem p;
    (void)state;
    need_compiler();
    problem_begin(&p, graph, 2, 17);
    dw_engine *engine = make_gpu_engine(&p, 1, 0);
    for (int i = 0; i < 4; i++) {
        options.tf32 = i % 2;
        OK(dw_engine_plan_with(engine, p.sizes, &options, &plans[i]));
    }
    assert_ptr_equal(plans[0], plans[2]);
    assert_ptr_equal(plans[1], plans[3]);
    assert_ptr_not_equal(plans[0], plans[1]);
    for (int i = 0; i < 4; i++) dw_plan_release(plans[i]);
    dw_engine_destroy(engine);
    problem_end(&p);
    dw_graph_destroy(graph);
}

/* The gradient of the embedding is added to that of the head, where it lies. */
static void gradients_of_a_tied_embedding_are_added_in_place(void **state) {
    (void)state;
    need_compiler();
    char *text = listing_of(model_gpt, 0.0), *scatter = text;
    bool adds = false;
    while (!adds && (scatter = strstr(scatter + 1, ": scatter ")))
        adds = strncmp(strstr(scatter, "->") - 2, " +->", 4) == 0;
    if (!adds) fail_msg("no accumulation in %s", text);
    dw_text_free(text);
}

/* Two branches, whose results are added to the residual, and a last norm. A branch is a norm and, in F32, a product:
 * products of 16 bits would be expanded on an emulated Hopper. */
static dw_status add_residuals(model *m, dw_op norm, dw_dtype type) {
    enum { WIDTH = 96 };
    model_begin(m);
    const dw_dim shape[3] = {m->batch, m->sequence, WIDTH}, square[2] = {WIDTH, WIDTH},
                 row[1] = {WIDTH};
    const dw_attr eps = dw_attr_float(DW_ATTR_KEY_EPS, 1e-5);
    const uint32_t inputs = norm == DW_OP_LAYER_NORM ? 3 : 2;
    dw_value x = model_leaf(m, DW_ROLE_PARAMETER, "x", DW_F32, 3, shape);
    x = dw__emit_cast(&m->e, x, type);
    for (int i = 0; i < 2; i++) {
        dw_value scale = DW_NONE;
        if (type == DW_F32)
            scale = model_leaf(m, DW_ROLE_PARAMETER, i ? "g1" : "g0", DW_F32, 1, row);
        const dw_value operands[3] = {x, scale, DW_NONE};
        dw_value h = dw__emit(&m->e, norm, inputs, operands, 1, &eps);
        if (type == DW_F32) {
            dw_value w = model_leaf(m, DW_ROLE_PARAMETER, i ? "w1" : "w0", DW_F32, 2, square);
            h = dw__emit_matmul(&m->e, dw__emit_flatten_rows(&m->e, h), w, false, true);
            h = dw__emit_reshape(&m->e, h, 3, shape);
        }
        x = dw__emit_binary(&m->e, DW_OP_ADD, x, h);
    }
    x = dw__emit(&m->e, norm, inputs, (dw_value[]){x, DW_NONE, DW_NONE}, 1, &eps);
    x = dw__emit_cast(&m->e, x, DW_F32);
    if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, x);
    return m->e.status;
}

static dw_status residuals_f32(model *m) { return add_residuals(m, DW_OP_LAYER_NORM, DW_F32); }
static dw_status residuals_bf16(model *m) { return add_residuals(m, DW_OP_LAYER_NORM, DW_BF16); }
static dw_status rms_residuals_bf16(model *m) { return add_residuals(m, DW_OP_RMS_NORM, DW_BF16); }

static int count_of(const char *text, const char *word) {
    int count = 0;
    for (; (text = strstr(text, word)); text++) count++;
    return count;
}

/* Forward, each branch is added to the residual, which backward still reads; backward, the gradient of each norm is
 * added to the residual's. */
static void residuals_are_added_by_other_steps(void **state) {
    static const model_builder builders[] = {residuals_f32, residuals_bf16, rms_residuals_bf16};
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(builders); i++) {
        char *text = listing_of(builders[i], 0.0);
        if (count_of(text, " + ") + count_of(text, " +-> ") != 4) fail_msg("in %s", text);
        if (i == 0) assert_null(strstr(text, ": elementwise"));
        dw_text_free(text);
        agrees(builders[i], 0.0, 2, 7);
    }
}

static void expect_kernel(model_builder builder, double dropout, const char *kernel) {
    char *text = listing_of(builder, dropout);
    if (!strstr(text, kernel)) fail_msg("no \"%s\" in %s", kernel, text);
    dw_text_free(text);
}

static void attention_runs_by_its_kernels(void **state) {
    (void)state;
    need_compiler();
    agrees(both_outputs, 0.0, 2, 77);
    expect_kernel(both_outputs, 0.0, ": attention bf16[2,4,77,64]");
}

static void statistics_of_attention_need_no_output(void **state) {
    (void)state;
    need_compiler();
    agrees(statistics_alone, 0.0, 2, 77);
    expect_kernel(statistics_alone, 0.0, ": attention bf16[2,4,77,64]");
}

static void windows_of_attention_agree(void **state) {
    (void)state;
    need_compiler();
    agrees(window_of_5, 0.0, 2, 77);
    agrees(long_window, 0.0, 1, 33);
    agrees(window_of_0, 0.0, 1, 33);
    expect_kernel(window_of_5, 0.0, ": attention bf16[2,4,77,64]");
}

/* test_attention_first_use runs the kernels' first-use checks on the emulator, where they take most of the time. */
static int without_first_use_check(void **state) {
    (void)state;
    return strncmp(device->name, "emulator", 8) == 0 ? setenv("DEEPWELL_FIRST_USE_CHECK", "off", 0)
                                                     : 0;
}

/* Forward and backward by the kernels, the statistics in F32 between them. */
static void expect_training(model_builder builder, double dropout, const char *operand) {
    static const char *const kernels[] = {": attention", ": attention_backward"};
    for (size_t i = 0; i < DW_COUNT(kernels); i++) {
        char kernel[64];
        snprintf(kernel, sizeof kernel, "%s %s", kernels[i], operand);
        expect_kernel(builder, dropout, kernel);
    }
}

/* On sm_120a the backward of a soft cap and of a mask is computed by primitives. */
static bool is_rtx(void) { return strcmp(device->name, "emulator:sm_120a") == 0; }

static void attention_trains_by_its_kernels(void **state) {
    (void)state;
    need_compiler();
    agrees(causal_training, 0.0, 2, 77);
    expect_training(causal_training, 0.0, "bf16[2,4,77,64]");
    agrees(window_training, 0.0, 1, 131);
    expect_training(window_training, 0.0, "bf16[2,4,77,64]");
}

static void attention_trains_on_more_keys_than_queries(void **state) {
    (void)state;
    need_compiler();
    agrees(capped_training, 0.0, 1, 65);
    if (!is_rtx()) expect_training(capped_training, 0.0, "f16[2,4,77,40]");
    agrees(cross_training, 0.0, 2, 33);
    expect_training(cross_training, 0.0, "bf16[2,4,77,64]");
}

static void attention_trains_with_dropout(void **state) {
    (void)state;
    need_compiler();
    agrees(causal_training, 0.25, 1, 77);
    expect_training(causal_training, 0.25, "bf16[2,4,77,64]");
    agrees(third_stream_training, 0.25, 1, 77);
    expect_training(third_stream_training, 0.25, "bf16[2,4,77,64]");
    agrees(far_stream_training, 0.25, 1, 33);
    expect_training(far_stream_training, 0.25, "f16[2,4,77,40]");
}

static int times_in(const char *text, const char *part) {
    int times = 0;
    while ((text = strstr(text, part))) times++, text++;
    return times;
}

/* Every layer has a stream of its own, and no layer stores its scores. */
static void layers_train_with_dropout(void **state) {
    (void)state;
    need_compiler();
    agrees(two_layers, 0.25, 2, 19);
    char *text = listing_of(two_layers, 0.25);
    if (times_in(text, ": attention bf16[2,4,77,16]") != 2 ||
        times_in(text, ": attention_backward bf16[2,4,77,16]") != 2 || strstr(text, "softmax") ||
        strstr(text, "[2,4,77,77]"))
        fail_msg("expected the kernels of attention alone in %s", text);
    dw_text_free(text);
}

/* The kernels read and write the layouts of the neighbours, so that nothing is copied. */
static void attention_trains_in_place(void **state) {
    (void)state;
    need_compiler();
    agrees(packed_training, 0.0, 2, 37);
    expect_training(packed_training, 0.0, "bf16[2,4,77,64]");
    char *text = listing_of(packed_training, 0.0);
    if (strstr(text, ": move ")) fail_msg("a copy in %s", text);
    dw_text_free(text);
}

static void masked_attention_trains(void **state) {
    (void)state;
    need_compiler();
    /* the kernels' checks at their first use are several times as long; test_attention_bias compares them */
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    agrees(masked_training, 0.0, 2, 19);
    if (!is_rtx()) expect_training(masked_training, 0.0, "bf16[2,4,77,64]");
    agrees(learned_mask_training, 0.0, 2, 77);
    if (!is_rtx()) expect_training(learned_mask_training, 0.0, "bf16[2,4,77,64]");
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
}

/* No kernel has a mask and a soft cap: such attention becomes primitives. */
static void capped_attention_with_a_mask_trains_by_primitives(void **state) {
    (void)state;
    need_compiler();
    agrees(capped_mask_training, 0.0, 2, 19);
    char *text = listing_of(capped_mask_training, 0.0);
    if (strstr(text, ": attention")) fail_msg("a kernel of attention in %s", text);
    dw_text_free(text);
}

/* ---- a linear layer in BF16 on Blackwell, by the GEMM kernel of tcgen05 --------------------------------- */

static dw_value rounded_parameter(model *m, const char *name, dw_dim rows, dw_dim columns) {
    const int rank = columns ? 2 : 1;
    return dw__emit_cast(&m->e, model_parameter(m, name, -1, rank, rows, columns), DW_BF16);
}

static dw_status bf16_linear(model *m) {
    model_begin(m);
    enum { INPUTS = 72, OUTPUTS = 136 };
    const dw_dim shape[3] = {m->batch, m->sequence, INPUTS};
    dw_value x = model_leaf(m, DW_ROLE_PARAMETER, "x", DW_F32, 3, shape);
    dw_value operands[3] = {dw__emit_cast(&m->e, x, DW_BF16),
                            rounded_parameter(m, "w", OUTPUTS, INPUTS),
                            rounded_parameter(m, "b", OUTPUTS, 0)};
    dw_value y = dw__emit(&m->e, DW_OP_LINEAR, 3, operands, 0, NULL);
    y = dw__emit_cast(&m->e, y, DW_F32);
    if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, y);
    return m->e.status;
}

/* x w^T with w [8, K] and K a symbol: rows of whole 16 bytes at some sizes only. */
static dw_status bf16_wide_linear(model *m) {
    model_begin(m);
    const dw_dim shape[2] = {m->batch, m->sequence}, weight[2] = {8, m->sequence};
    dw_value x = model_leaf(m, DW_ROLE_PARAMETER, "x", DW_F32, 2, shape),
             w = model_leaf(m, DW_ROLE_PARAMETER, "w", DW_F32, 2, weight);
    dw_value operands[3] = {dw__emit_cast(&m->e, x, DW_BF16), dw__emit_cast(&m->e, w, DW_BF16),
                            DW_NONE};
    dw_value y = dw__emit(&m->e, DW_OP_LINEAR, 3, operands, 0, NULL);
    y = dw__emit_cast(&m->e, y, DW_F32);
    if (m->e.status == DW_OK) m->e.status = dw_graph_add_output(m->graph, y);
    return m->e.status;
}

static void a_composite_whose_kernel_depends_on_a_size_runs_at_every_size(void **state) {
    (void)state;
    need_compiler();
    const dw_device *before = device;
    OK(dw_device_find("emulator:sm_100a", &device));
    agrees(bf16_wide_linear, 0.0, 3, 77);
    agrees(bf16_wide_linear, 0.0, 3, 64);
    device = before;
}

/* The first-use check refused the GEMM's variant: the matmul is left to the next kernel. */
static void a_refused_kernel_leaves_the_call_to_the_next(void **state) {
    (void)state;
    need_compiler();
    const dw_device *before = device;
    OK(dw_device_find("emulator:sm_100a", &device));
    const dw_dim shape[2] = {16, 8};
    /* A result of another type than the operands: the matmul does not become a linear layer. */
    const dw_attr attrs[] = {dw_attr_int(DW_ATTR_KEY_TRANSPOSE_B, 1),
                             dw_attr_int(DW_ATTR_KEY_DTYPE, DW_F32)};
    const char *const expected[] = {": gemm bf16[16,8]", ": matmul bf16[16,8]"};
    dw_graph *graph = NULL;
    dw_value inputs[2], y;
    OK(dw_graph_create(&graph));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "a", DW_BF16, 2, shape, &inputs[0]));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "b", DW_BF16, 2, shape, &inputs[1]));
    OK(dw_graph_apply(graph, DW_OP_MATMUL, 2, inputs, DW_COUNT(attrs), attrs, &y));
    OK(dw_graph_add_output(graph, y));
    for (int refused = 0; refused < 2; refused++) {
        dw_engine *engine = NULL;
        dw_plan *plan = NULL;
        char *text = NULL;
        if (plan_on_device(graph, &engine, &plan) != DW_OK) fail_msg("%s", dw_last_error());
        OK(dw_plan_describe(plan, &text));
        if (!strstr(text, expected[refused])) fail_msg("no \"%s\" in %s", expected[refused], text);
        /* The cache of variants has it until the process ends. */
        ((dw__variant *)plan->code.items[0].step.variant)->disabled = !refused;
        dw_text_free(text);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
    }
    dw_graph_destroy(graph);
    device = before;
}

static void a_linear_layer_runs_by_its_kernel(void **state) {
    (void)state;
    need_compiler();
    const dw_device *before = device;
    OK(dw_device_find("emulator:sm_100a", &device));
    agrees(bf16_linear, 0.0, 2, 77);
    expect_kernel(bf16_linear, 0.0, ": gemm bf16[2,77,72]");
    device = before;
}

/* ---- programs behind products ------------------------------------------------------------------------------ */

/* Marks the variants that run a program behind a product, which the cache of variants has, as refused by their first-use
 * check, or as not refused. */
static void refuse_epilogues(const dw_plan *plan, bool refused) {
    for (uint32_t i = 0; i < plan->code.count; i++)
        if (plan->code.items[i].epilogue)
            ((dw__variant *)plan->code.items[i].step.variant)->disabled = refused;
}

/* Runs each instruction with an epilogue by itself. */
static void run_alone(dw_plan *plan) {
    for (uint32_t i = 0; i < plan->code.count; i++) {
        dw_instruction *alone = NULL;
        void *stream = NULL;
        if (!plan->code.items[i].epilogue) continue;
        OK(dw_instruction_create(plan, i, &alone));
        OK(device->stream_create(&stream));
        OK(dw_instruction_run(alone, stream));
        OK(device->stream_synchronize(stream));
        device->stream_destroy(stream);
        dw_instruction_destroy(alone);
    }
}

/* Returns the plan of model_epilogue as text, and its results. `apart`: without epilogues. */
static char *run_epilogue_of(int64_t batch, int64_t sequence, bool apart, bool trains, results *r) {
    dw_graph *graph = build(model_epilogue, epilogue_dropout());
    enum { ROUNDS = 2 }; /* a program that has lost one kernel may find another */
    dw_plan *plans[ROUNDS], *used = NULL;
    char *text = NULL;
    problem p;
    problem_begin(&p, graph, batch, sequence);
    if (!trains) p.wrt_count = p.grad_output_count = 0;
    dw_engine *engine = make_gpu_engine(&p, 1, 0), *others[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        others[i] = make_gpu_engine(&p, 1, 0);
        OK(dw_engine_plan(others[i], p.sizes, &plans[i]));
        refuse_epilogues(plans[i], apart);
    }
    OK(dw_engine_plan(engine, p.sizes, &used));
    for (int i = 0; i < ROUNDS; i++) refuse_epilogues(plans[i], false);
    run_on_device(engine, &p, 1, r);
    run_alone(used);
    OK(dw_plan_describe(used, &text));
    dw_plan_release(used);
    for (int i = 0; i < ROUNDS; i++) {
        dw_plan_release(plans[i]);
        dw_engine_destroy(others[i]);
    }
    dw_engine_destroy(engine);
    problem_end(&p);
    dw_graph_destroy(graph);
    return text;
}

static char *run_epilogue(bool apart, bool trains, results *r) {
    return run_epilogue_of(2, 77, apart, trains, r);
}

static void set_or_unset(const char *name, const char *value) {
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
}

/* The bias's gradient is the sum of 154 rows, whose order of additions differs: both sums are off by at most
 * 154 2^-24 of the sum of magnitudes, which is below 13 times the largest sum where signs are random, and then
 * rounded to 16 bits. */
static void expect_close_sums(const dw__tensor *got, const dw__tensor *expected) {
    const float *a = got->data, *b = expected->data;
    float largest = 0.0f;
    for (int64_t i = 0; i < expected->shape[0]; i++) largest = fmaxf(largest, fabsf(b[i]));
    for (int64_t i = 0; i < expected->shape[0]; i++)
        if (!(fabsf(a[i] - b[i]) <= 0x1p-7f * fmaxf(fabsf(a[i]), fabsf(b[i])) + 0x1p-12f * largest))
            fail_msg("the gradient of bias %d is %.9g, not %.9g", (int)i, (double)a[i],
                     (double)b[i]);
}

/* Results and gradients have the bits of the plan without epilogues, but for sums over rows, which are in the
 * program's instruction. Products whose rows are no multiples of 16 bytes have none. */
static void programs_run_behind_products(void **state) {
    enum { FORWARD, TRAINING, COMPARED /* with FP64, too */ };
    static const struct {
        epilogue_kind kind;
        dw_dim hidden;
        dw_dtype type;
        int use, epilogues; /* epilogues: on Hopper without cuBLASLt */
    } cases[] = {
        {EPILOGUE_GELU, 136, DW_BF16, COMPARED, 2},
        {EPILOGUE_GELU, 132, DW_BF16, TRAINING, 0},
        {EPILOGUE_OBSERVED, 136, DW_BF16, TRAINING, 2},
        {EPILOGUE_RESIDUAL, 136, DW_BF16, TRAINING, 2},
        {EPILOGUE_DROPOUT, EPILOGUE_WIDTH, DW_BF16, COMPARED, 2},
        {EPILOGUE_ROPE, 192, DW_BF16, COMPARED, 2},
        {EPILOGUE_GATED, 200, DW_F16, COMPARED, 2},
        {EPILOGUE_GATED, 136, DW_BF16, FORWARD, 1}, /* which stores neither product */
        {EPILOGUE_HALVES, 136, DW_BF16, COMPARED, 2},
        {EPILOGUE_EXPERTS, 136, DW_BF16, COMPARED, 2},
        {EPILOGUE_EXPERTS, 132, DW_F16, FORWARD, 0},
        {EPILOGUE_HALVES_OF_EXPERTS, 136, DW_BF16, COMPARED, 2},
        {EPILOGUE_HALVES_OF_EXPERTS, 136, DW_BF16, FORWARD, 1}, /* which stores neither half */
    };
    const bool counted = strcmp(device->name, "emulator:sm_90a") == 0;
    char *before = getenv("DEEPWELL_EPILOGUES") ? strdup(getenv("DEEPWELL_EPILOGUES")) : NULL;
    (void)state;
    need_compiler();
    setenv("DEEPWELL_EPILOGUES", "all", 1); /* dropout and rope, too */
#ifdef __SANITIZE_ADDRESS__
    const size_t step = 4; /* the sources of all cases take minutes to compile */
#else
    const size_t step = 1;
#endif
    for (size_t i = 0; i < DW_COUNT(cases); i += step) {
        results expected, got;
        epilogue_choose(cases[i].kind, cases[i].hidden, cases[i].type);
        const bool trains = cases[i].use != FORWARD;
        char *text = run_epilogue(false, trains, &got),
             *apart = run_epilogue(true, trains, &expected);
        if (counted && count_of(text, " | epilogue ") != cases[i].epilogues)
            fail_msg("case %zu: %s", i, text);
        if (counted && count_of(text, ": sm90_linear_pair ") != (cases[i].kind == EPILOGUE_GATED))
            fail_msg("case %zu: %s", i, text);
        const bool has_sum = trains && cases[i].kind <= EPILOGUE_DROPOUT;
        assert_null(strstr(apart, " | epilogue "));
        if (counted) { /* elsewhere a library may sum beside a product */
            assert_int_equal(count_of(apart, " reduce_sum "), has_sum);
            assert_int_equal(count_of(text, " reduce_sum "), has_sum && cases[i].epilogues == 0);
        }
        for (uint32_t o = 0; o < got.output_count; o++)
            assert_memory_equal(got.outputs[o].data, expected.outputs[o].data,
                                bytes_of(&got.outputs[o]));
        for (uint32_t g = 0; g < got.grad_count; g++)
            if (expected.grads[g].rank == 1)
                expect_close_sums(&got.grads[g], &expected.grads[g]);
            else
                assert_memory_equal(got.grads[g].data, expected.grads[g].data,
                                    bytes_of(&got.grads[g]));
        dw_text_free(apart);
        dw_text_free(text);
        results_end(&got);
        results_end(&expected);
        if (cases[i].use == COMPARED) agrees(model_epilogue, epilogue_dropout(), 2, 77);
    }
    set_or_unset("DEEPWELL_EPILOGUES", before);
    free(before);
}

/* Attention rotates its queries where there are enough of them. Results and gradients have the bits of rope and attention
 * apart. */
static void attention_rotates_its_queries(void **state) {
    enum { QUERIES = 1024 };
    results expected, got;
    char *before = getenv("DEEPWELL_EPILOGUES") ? strdup(getenv("DEEPWELL_EPILOGUES")) : NULL;
    (void)state;
    need_compiler();
    setenv("DEEPWELL_EPILOGUES", "all", 1);
    epilogue_choose(EPILOGUE_ROPE, EPILOGUE_HEAD, DW_BF16);
    char *text = run_epilogue_of(1, QUERIES, false, true, &got),
         *apart = run_epilogue_of(1, QUERIES, true, true, &expected);
    if (strcmp(device->name, "emulator:sm_90a") == 0) {
        assert_int_equal(count_of(text, " | epilogue "),
                         2); /* and that of keys behind their product */
        assert_non_null(strstr(text, "rope_attention"));
    }
    assert_null(strstr(apart, " | epilogue "));
    for (uint32_t o = 0; o < got.output_count; o++)
        assert_memory_equal(got.outputs[o].data, expected.outputs[o].data,
                            bytes_of(&got.outputs[o]));
    for (uint32_t g = 0; g < got.grad_count; g++)
        assert_memory_equal(got.grads[g].data, expected.grads[g].data, bytes_of(&got.grads[g]));
    dw_text_free(apart);
    dw_text_free(text);
    results_end(&got);
    results_end(&expected);
    set_or_unset("DEEPWELL_EPILOGUES", before);
    free(before);
}

/* A library's product keeps its place, and the program behind it is an instruction of its own, unless the user wants
 * another plan. Experts have no kernel of a library. Dropout and rope are instructions of their own without a library, too. */
static void products_of_a_library_have_no_epilogue(void **state) {
    static const struct {
        epilogue_kind kind;
        const char *library, *wanted;
        bool has_epilogue;
        dw_dim hidden;
    } cases[] = {
        {EPILOGUE_GELU, "off", NULL, true, 136},
        {EPILOGUE_GELU, NULL, NULL, false, 136},
        {EPILOGUE_GELU, NULL, "all", true, 136},
        {EPILOGUE_GATED, NULL, NULL, false, 136},
        {EPILOGUE_EXPERTS, NULL, NULL, true, 136},
        {EPILOGUE_EXPERTS, NULL, "off", false, 136},
        {EPILOGUE_DROPOUT, "off", NULL, false, EPILOGUE_WIDTH},
        {EPILOGUE_DROPOUT, "off", "all", true, EPILOGUE_WIDTH},
        {EPILOGUE_ROPE, "off", NULL, false, 2 * EPILOGUE_HEAD},
        {EPILOGUE_ROPE, NULL, "all", true, 2 * EPILOGUE_HEAD},
    };
    static const char *const names[] = {"DEEPWELL_CUBLASLT", "DEEPWELL_EPILOGUES"};
    char *before[DW_COUNT(names)];
    (void)state;
    need_compiler();
    for (size_t n = 0; n < DW_COUNT(names); n++)
        before[n] = getenv(names[n]) ? strdup(getenv(names[n])) : NULL;
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        set_or_unset(names[0], cases[i].library);
        set_or_unset(names[1], cases[i].wanted);
        epilogue_choose(cases[i].kind, cases[i].hidden, DW_BF16);
        char *text = described_on("plan:sm_90a", model_epilogue, epilogue_dropout(), 77, NULL);
        if ((strstr(text, " | epilogue ") != NULL) != cases[i].has_epilogue)
            fail_msg("case %zu: %s", i, text);
        dw_text_free(text);
    }
    for (size_t n = 0; n < DW_COUNT(names); n++) {
        set_or_unset(names[n], before[n]);
        free(before[n]);
    }
}

/* A word that the engine does not know is no plan, and the message names those that it knows. */
static void unknown_choices_are_refused(void **state) {
    static const struct {
        const char *name, *value, *message;
    } cases[] = {
        {"DEEPWELL_EPILOGUES", "al",
         "the environment variable DEEPWELL_EPILOGUES is \"al\"; expected \"off\" or \"all\"; "
         "unset it "
         "for the default"},
        {"DEEPWELL_LOGITS", "block",
         "the environment variable DEEPWELL_LOGITS is \"block\"; expected \"kept\" or \"blocks\"; "
         "unset "
         "it for the default"},
    };
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        char *before = getenv(cases[i].name) ? strdup(getenv(cases[i].name)) : NULL;
        dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
        dw_graph *graph = build(model_gpt, 0.0);
        dw_plan *plan = NULL;
        problem p;
        problem_begin(&p, graph, 2, 7);
        OK(dw_device_find("plan:sm_90a", &options.device));
        dw_engine *engine = make_engine_with(&p, &options);
        setenv(cases[i].name, cases[i].value, 1);
        assert_int_equal(dw_engine_plan(engine, p.sizes, &plan), DW_INVALID_ARGUMENT);
        assert_non_null(strstr(dw_last_error(), cases[i].message));
        setenv(cases[i].name, "", 1); /* the default */
        OK(dw_engine_plan(engine, p.sizes, &plan));
        set_or_unset(cases[i].name, before);
        free(before);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        problem_end(&p);
        dw_graph_destroy(graph);
    }
}

/* A program whose result is quantized with one scale finds the largest magnitude on the way, which the product's kernel
 * does not. */
static void programs_that_find_magnitudes_stay_alone(void **state) {
    static const char *const ends[] = {
        "return %h\n", "%c, %s, %n = quantize_tensor(%h) {scheme=\"fp8-tensor\"}\nreturn %c, %s\n"};
    const dw_device *before = device;
    (void)state;
    need_compiler();
    OK(dw_device_find("plan:sm_90a", &device));
    for (size_t i = 0; i < DW_COUNT(ends); i++) {
        char *listing = NULL, text[512];
        dw_graph *graph = NULL;
        dw_engine *engine = NULL;
        dw_plan *plan = NULL;
        snprintf(text, sizeof text,
                 "deepwell graph 1\ninput %%x: bf16[2, 24, 72]\ninput %%w: bf16[3, 136, 72]\n"
                 "input %%o: i32[4]\n%%r = reshape(%%x) {shape=[48, 72]}\n"
                 "%%y = segment_linear(%%r, %%w, %%o)\n"
                 "%%h = fused(%%y) {body=\"t0=tanh(i0);out(t0)\"}\n%s",
                 ends[i]);
        OK(dw_graph_from_text(text, &graph));
        OK(plan_on_device(graph, &engine, &plan));
        OK(dw_plan_describe(plan, &listing));
        if ((strstr(listing, " | epilogue ") != NULL) != (i == 0)) fail_msg("in %s", listing);
        dw_text_free(listing);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        dw_graph_destroy(graph);
    }
    device = before;
}

/* ---- errors -------------------------------------------------------------------------------------------- */

/* y = x[i], with x [5, 3]. */
static dw_graph *lookup_graph(void) {
    const dw_dim table[] = {5, 3}, count[] = {4};
    const dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    dw_value inputs[2], y;
    dw_graph *graph = NULL;
    OK(dw_graph_create(&graph));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 2, table, &inputs[0]));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "i", DW_I64, 1, count, &inputs[1]));
    OK(dw_graph_apply(graph, DW_OP_TAKE, 2, inputs, 1, &axis, &y));
    OK(dw_graph_add_output(graph, y));
    return graph;
}

static void an_index_outside_is_reported_when_the_caller_waits(void **state) {
    (void)state;
    need_compiler();
    static const float x[15] = {1.0f, 2.0f, 3.0f};
    static const int64_t right[4] = {0, 4, 2, 1}, wrong[4] = {0, 4, 5, 1};
    const size_t bytes[3] = {sizeof x, sizeof right, 4 * 3 * sizeof(float)};
    dw_graph *graph = lookup_graph();
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    dw_binding b[3] = {{0}};
    float y[12];
    OK(plan_on_device(graph, &engine, &plan));
    for (int i = 0; i < 3; i++) OK(dw_device_allocate(device, bytes[i], &b[i].data));
    OK(dw_device_copy_in(device, b[0].data, x, sizeof x));
    OK(dw_device_copy_in(device, b[1].data, wrong, sizeof wrong));
    OK(dw_plan_forward(plan, NULL, b, &b[2], NULL));
    assert_int_equal(dw_plan_synchronize(plan, NULL), DW_INDEX);
    assert_non_null(strstr(dw_last_error(), "take"));
    assert_non_null(strstr(dw_last_error(), "an index lies outside of its axis"));
    OK(dw_plan_synchronize(plan, NULL)); /* reported once */
    OK(dw_plan_forward(plan, NULL, b, &b[2], NULL));
    OK(device->stream_synchronize(NULL));
    assert_int_equal(dw_plan_forward(plan, NULL, b, &b[2], NULL), DW_INDEX); /* by the next run */
    assert_non_null(strstr(dw_last_error(), "in an earlier run"));
    OK(dw_device_copy_in(device, b[1].data, right, sizeof right));
    OK(dw_plan_forward(plan, NULL, b, &b[2], NULL));
    OK(dw_plan_synchronize(plan, NULL));
    OK(dw_device_copy_out(device, y, b[2].data, sizeof y));
    assert_true(y[0] == 1.0f && y[2] == 3.0f && y[3] == 0.0f);
    for (int i = 0; i < 3; i++) dw_device_release(device, b[i].data, bytes[i]);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

static void a_tensor_that_is_not_aligned_is_refused(void **state) {
    (void)state;
    need_compiler();
    dw_graph *graph = lookup_graph();
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    char *memory = NULL;
    OK(plan_on_device(graph, &engine, &plan));
    OK(dw_device_allocate(device, 512, (void **)&memory));
    dw_binding leaves[2] = {{.data = memory + 4}, {.data = memory + 256}}, y = {.data = memory};
    assert_int_equal(dw_plan_forward(plan, NULL, leaves, &y, NULL), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "leaf x"));
    assert_non_null(strstr(dw_last_error(), "expected a multiple of 16 bytes"));
    dw_device_release(device, memory, 512);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* y = exp(x), with x [8] and its gradient. */
static void exp_on_device(int graphs, dw_graph **graph, dw_engine **engine, dw_plan **plan) {
    static const uint32_t outputs[] = {0};
    const dw_dim shape[] = {8};
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_value x, y;
    options.device = device;
    options.cuda_graphs = graphs;
    OK(dw_graph_create(graph));
    OK(dw_graph_leaf(*graph, DW_ROLE_PARAMETER, "x", DW_F32, 1, shape, &x));
    OK(dw_graph_apply(*graph, DW_OP_EXP, 1, &x, 0, NULL, &y));
    OK(dw_graph_add_output(*graph, y));
    OK(dw_engine_create(*graph, 1, outputs, 1, &x, &options, engine));
    OK(dw_engine_plan(*engine, NULL, plan));
}

static void a_gradient_that_is_not_aligned_is_refused(void **state) {
    (void)state;
    need_compiler();
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    char *memory = NULL, *arena = NULL;
    exp_on_device(0, &graph, &engine, &plan);
    OK(dw_device_allocate(device, 1024, (void **)&memory));
    OK(dw_device_fill(device, memory, 0, 1024));
    const size_t bytes = dw_plan_arena_bytes(plan);
    OK(dw_device_allocate(device, bytes, (void **)&arena));
    dw_binding leaf = {.data = memory}, output = {.data = memory + 256},
               output_grad = {.data = memory + 512}, grad = {.data = memory + 772};
    OK(dw_plan_forward(plan, arena, &leaf, &output, NULL));
    assert_int_equal(dw_plan_backward(plan, arena, &leaf, &output, &output_grad, &grad, NULL),
                     DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "the gradient of leaf x"));
    assert_non_null(strstr(dw_last_error(), "expected a multiple of 16 bytes"));
    grad.data = memory + 768;
    OK(dw_plan_backward(plan, arena, &leaf, &output, &output_grad, &grad, NULL));
    OK(dw_plan_synchronize(plan, NULL));
    dw_device_release(device, arena, bytes);
    dw_device_release(device, memory, 1024);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* y = exp(x) without a gradient of y: the gradient of x is 0. */
static void an_output_gradient_that_is_left_out_is_zero(void **state) {
    (void)state;
    need_compiler();
    static const float ones[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    static const float zeros[8];
    float result[8];
    for (int graphs = 0; graphs < 2; graphs++) {
        dw_graph *graph = NULL;
        dw_engine *engine = NULL;
        dw_plan *plan = NULL;
        char *memory = NULL, *arena = NULL;
        exp_on_device(graphs, &graph, &engine, &plan);
        const size_t bytes = dw_plan_arena_bytes(plan);
        OK(dw_device_allocate(device, 768, (void **)&memory));
        OK(dw_device_allocate(device, bytes, (void **)&arena));
        OK(dw_device_copy_in(device, memory, ones, sizeof ones));
        OK(dw_device_copy_in(device, memory + 512, ones, sizeof ones));
        dw_binding leaf = {.data = memory}, output = {.data = memory + 256},
                   output_grad = {.data = NULL}, grad = {.data = memory + 512};
        OK(dw_plan_forward(plan, arena, &leaf, &output, NULL));
        OK(dw_plan_backward(plan, arena, &leaf, &output, &output_grad, &grad, NULL));
        OK(dw_plan_synchronize(plan, NULL));
        OK(dw_device_copy_out(device, result, grad.data, sizeof result));
        assert_memory_equal(result, zeros, sizeof zeros);
        dw_device_release(device, arena, bytes);
        dw_device_release(device, memory, 768);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        dw_graph_destroy(graph);
    }
}

/* y = exp(x) at the addresses of `set`, by a replayed graph, on a stream. */
static void exp_at(dw_plan *plan, char *memory, char *arena, int set, void *stream) {
    float x[8];
    char *at = memory + 1024 * set;
    dw_binding leaf = {.data = at}, output = {.data = at + 256}, output_grad = {.data = NULL},
               grad = {.data = at + 768};
    for (int i = 0; i < 8; i++) x[i] = (float)(set + i) / 16.0f;
    OK(dw_device_copy_in(device, at, x, sizeof x));
    OK(dw_plan_forward(plan, arena, &leaf, &output, stream));
    OK(dw_plan_backward(plan, arena, &leaf, &output, &output_grad, &grad, stream));
}

static void expect_exp_at(char *memory, int set) {
    float y[8];
    OK(dw_device_copy_out(device, y, memory + 1024 * set + 256, sizeof y));
    for (int i = 0; i < 8; i++)
        assert_true(fabs((double)y[i] - exp((set + i) / 16.0)) <= 4 * 0x1p-23 * (double)y[i]);
}

/* More sets of addresses than graphs are kept, in an order that repeats some at once and others after all. */
static void graphs_follow_their_addresses(void **state) {
    (void)state;
    need_compiler();
    static const int order[] = {0, 1, 0, 2, 3, 4, 5, 0, 5, 1, 6, 2, 2, 4};
    enum { SETS = 7 };
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    char *memory = NULL, *arena = NULL;
    void *stream = NULL;
    exp_on_device(1, &graph, &engine, &plan);
    const size_t bytes = dw_plan_arena_bytes(plan);
    OK(dw_device_allocate(device, 1024 * SETS, (void **)&memory));
    OK(dw_device_allocate(device, bytes, (void **)&arena));
    OK(device->stream_create(&stream));
    for (size_t i = 0; i < DW_COUNT(order); i++) {
        OK(dw_device_fill(device, memory, 0, 1024 * SETS));
        exp_at(plan, memory, arena, order[i], stream);
        OK(dw_plan_synchronize(plan, stream));
        expect_exp_at(memory, order[i]);
    }
    device->stream_destroy(stream);
    dw_device_release(device, arena, bytes);
    dw_device_release(device, memory, 1024 * SETS);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* A timed run computes the same, with recorded graphs and without, and its times lie in the host's. */
static void instructions_are_timed_on_request(void **state) {
    (void)state;
    need_compiler();
    for (int graphs = 0; graphs < 2; graphs++) {
        dw_graph *graph = NULL;
        dw_engine *engine = NULL;
        dw_plan *plan = NULL;
        char *memory = NULL, *arena = NULL;
        void *stream = NULL;
        dw_instruction_time times[2];
        dw_instruction *alone = NULL;
        exp_on_device(graphs, &graph, &engine, &plan);
        const size_t bytes = dw_plan_arena_bytes(plan);
        OK(dw_device_allocate(device, 1024, (void **)&memory));
        OK(dw_device_allocate(device, bytes, (void **)&arena));
        OK(dw_device_fill(device, memory, 0, 1024));
        OK(device->stream_create(&stream));
        exp_at(plan, memory, arena, 0, stream);
        assert_int_equal(dw_plan_times(plan, 2, times), 2); /* exp, and its gradient */
        assert_int_equal(times[0].runs + times[1].runs, 0);
        dw_plan_profile(plan, 1);
        const double before = dw__seconds();
        exp_at(plan, memory, arena, 0, stream);
        exp_at(plan, memory, arena, 0, stream);
        const double after = dw__seconds();
        dw_plan_profile(plan, 0);
        expect_exp_at(memory, 0);
        dw_plan_times(plan, 2, times);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(times[i].runs, 2);
            assert_true(times[i].seconds > 0.0 && times[i].seconds < after - before);
            assert_true(times[i].start > before && times[i].start < after);
        }
        OK(dw_instruction_create(plan, 0, &alone));
        OK(dw_instruction_run(alone, stream));
        OK(dw_plan_synchronize(plan, stream));
        dw_instruction_destroy(alone);
        device->stream_destroy(stream);
        dw_device_release(device, arena, bytes);
        dw_device_release(device, memory, 1024);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        dw_graph_destroy(graph);
    }
}

static void a_run_becomes_part_of_the_callers_graph(void **state) {
    (void)state;
    need_compiler();
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    char *memory = NULL, *arena = NULL;
    void *stream = NULL, *recorded = NULL;
    float y[8];
    exp_on_device(1, &graph, &engine, &plan);
    const size_t bytes = dw_plan_arena_bytes(plan);
    OK(dw_device_allocate(device, 1024, (void **)&memory));
    OK(dw_device_allocate(device, bytes, (void **)&arena));
    OK(dw_device_fill(device, memory, 0, 1024));
    OK(device->stream_create(&stream));
    OK(device->graph_begin(stream));
    exp_at(plan, memory, arena, 0, stream);
    OK(device->graph_end(stream, &recorded));
    OK(dw_device_copy_out(device, y, memory + 256, sizeof y));
    assert_true(y[0] == 0.0f); /* recorded, not run */
    OK(device->graph_launch(recorded, stream));
    OK(dw_plan_synchronize(plan, stream));
    expect_exp_at(memory, 0);
    device->graph_destroy(recorded);
    device->stream_destroy(stream);
    dw_device_release(device, arena, bytes);
    dw_device_release(device, memory, 1024);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

static void an_operation_without_a_kernel_is_named(void **state) {
    (void)state;
    const dw_dim shape[] = {(int64_t)1 << 32}; /* too long a row */
    const dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0);
    dw_value x;
    dw_node node;
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    OK(dw_graph_create(&graph));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 1, shape, &x));
    OK(dw_graph_append(graph, DW_OP_SORT, 1, &x, 1, &axis, &node));
    OK(dw_graph_add_output(graph, dw_node_output(graph, node, 0)));
    assert_int_equal(plan_on_device(graph, &engine, &plan), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "sort"));
    assert_non_null(strstr(dw_last_error(), "run it on the CPU"));
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* A leaf of E2M1 codes with odd rows, as an output: its bytes are copied, and none behind them. */
static void codes_are_copied_as_bytes(void **state) {
    (void)state;
    need_compiler();
    enum { BYTES = 9 };
    const dw_dim shape[] = {3, 5};
    uint8_t codes[BYTES], copy[BYTES + 1];
    dw_value x;
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    dw_binding leaf, output;
    OK(dw_graph_create(&graph));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_E2M1, 2, shape, &x));
    OK(dw_graph_add_output(graph, x));
    OK(plan_on_device(graph, &engine, &plan));
    for (int i = 0; i < BYTES; i++) codes[i] = (uint8_t)(37 * i + 130);
    memset(copy, 0xA5, sizeof copy);
    OK(dw_device_allocate(device, sizeof codes, &leaf.data));
    OK(dw_device_allocate(device, sizeof copy, &output.data));
    leaf.strides = output.strides = NULL;
    OK(dw_device_copy_in(device, leaf.data, codes, sizeof codes));
    OK(dw_device_copy_in(device, output.data, copy, sizeof copy));
    OK(dw_plan_forward(plan, NULL, &leaf, &output, NULL));
    OK(dw_plan_synchronize(plan, NULL));
    OK(dw_device_copy_out(device, copy, output.data, sizeof copy));
    assert_memory_equal(copy, codes, sizeof codes);
    assert_int_equal(copy[BYTES], 0xA5);
    dw_device_release(device, leaf.data, sizeof codes);
    dw_device_release(device, output.data, sizeof copy);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* Two programs that differ only in an input that nothing reads, and so in which input is the seed. */
static void programs_with_an_unused_input_keep_their_seeds(void **state) {
    (void)state;
    need_compiler();
    static const char text[] =
        "deepwell graph 1\n"
        "input %x: f32[64]\n"
        "input %unused: f32[64]\n"
        "input %seed: i64[2]\n"
        "%y: f32[64] = fused(%x, %unused, %seed) "
        "{body=\"t0=dropout(i0,i2,c0.5,c3);out(t0)\"}\n"
        "%z: f32[64] = fused(%x, %seed) {body=\"t0=dropout(i0,i1,c0.5,c3);out(t0)\"}\n"
        "return %y, %z\n";
    static const int64_t seed[2] = {7, 1};
    float x[64], y[64], z[64];
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    dw_binding b[5] = {{0}};
    for (int i = 0; i < 64; i++) x[i] = 1.0f;
    OK(dw_graph_from_text(text, &graph));
    OK(plan_on_device(graph, &engine, &plan));
    for (int i = 0; i < 5; i++) OK(dw_device_allocate(device, sizeof x, &b[i].data));
    OK(dw_device_copy_in(device, b[0].data, x, sizeof x));
    OK(dw_device_copy_in(device, b[1].data, x, sizeof x));
    OK(dw_device_copy_in(device, b[2].data, seed, sizeof seed));
    OK(dw_plan_forward(plan, NULL, b, b + 3, NULL));
    OK(dw_plan_synchronize(plan, NULL));
    OK(dw_device_copy_out(device, y, b[3].data, sizeof y));
    OK(dw_device_copy_out(device, z, b[4].data, sizeof z));
    assert_memory_equal(y, z, sizeof y);
    for (int i = 0; i < 5; i++) dw_device_release(device, b[i].data, sizeof x);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* A program of 60 operands of rank 8: their strides fit into the parameters of a launch, because the axes merge. */
static void a_program_of_many_operands_runs(void **state) {
    (void)state;
    need_compiler();
    enum { OPERANDS = 60, COUNT = 24 };
    dw__text text = {0};
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    dw_binding b[OPERANDS + 1] = {{0}};
    float x[COUNT], y[COUNT];
    OK(dw__text_printf(&text, "deepwell graph 1\n"));
    for (int i = 0; i < OPERANDS; i++)
        OK(dw__text_printf(&text, "input %%x%d: f32[1,2,1,2,1,2,1,3]\n", i));
    OK(dw__text_printf(&text, "%%y: f32[1,2,1,2,1,2,1,3] = fused("));
    for (int i = 0; i < OPERANDS; i++) OK(dw__text_printf(&text, "%s%%x%d", i ? ", " : "", i));
    OK(dw__text_printf(&text, ") {body=\"t0=add(i0,i1)"));
    for (int i = 2; i < OPERANDS; i++)
        OK(dw__text_printf(&text, ";t%d=add(t%d,i%d)", i - 1, i - 2, i));
    OK(dw__text_printf(&text, ";out(t%d)\"}\nreturn %%y\n", OPERANDS - 2));
    OK(dw_graph_from_text(text.text, &graph));
    OK(plan_on_device(graph, &engine, &plan));
    for (int i = 0; i <= OPERANDS; i++) {
        for (int j = 0; j < COUNT; j++) x[j] = (float)(i * j);
        OK(dw_device_allocate(device, sizeof x, &b[i].data));
        OK(dw_device_copy_in(device, b[i].data, x, sizeof x));
    }
    OK(dw_plan_forward(plan, NULL, b, &b[OPERANDS], NULL));
    OK(dw_plan_synchronize(plan, NULL));
    OK(dw_device_copy_out(device, y, b[OPERANDS].data, sizeof y));
    for (int j = 0; j < COUNT; j++) assert_true(y[j] == (float)(j * OPERANDS * (OPERANDS - 1) / 2));
    for (int i = 0; i <= OPERANDS; i++) dw_device_release(device, b[i].data, sizeof x);
    dw__text_free(&text);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* Gradients with segments that are given back while backward runs have the bits that one block gives. The second step
 * has new memory, so the graphs are recorded again. */
static void segments_may_be_released_early(void **state) {
    (void)state;
    need_compiler();
    dw_graph *graph = build(model_chain, 0.0);
    problem p;
    results expected, got;
    on_device leaves, outputs, output_grads, grads;
    dw_plan *plan = NULL;
    problem_begin(&p, graph, 1, 1);
    dw_engine *whole = make_segmented_engine(&p, device, 0, 1);
    dw_engine *engine = make_segmented_engine(&p, device, 1, DW_MOST_SEGMENTS);
    run_on_device(whole, &p, 1, &expected);
    OK(dw_engine_plan(engine, p.sizes, &plan));
    assert_true(dw_plan_segment_count(plan) > 1);
    results_begin(&p, engine, &got);
    send_all(p.leaf_count, p.leaves, &leaves);
    send_all(p.output_count, p.output_grads, &output_grads);
    send_all(got.output_count, got.outputs, &outputs);
    send_all(got.grad_count, got.grads, &grads);
    bound b = {leaves.bindings, outputs.bindings, output_grads.bindings, grads.bindings, NULL};
    OK(device->stream_create(&b.stream));
    for (int step = 0; step < 2; step++) run_in_segments(device, plan, &b);
    device->stream_destroy(b.stream);
    fetch_all(&outputs, got.outputs);
    fetch_all(&grads, got.grads);
    expect_same_bits(&p, &expected, &got);
    release_all(&leaves);
    release_all(&output_grads);
    release_all(&outputs);
    release_all(&grads);
    results_end(&got);
    results_end(&expected);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_engine_destroy(whole);
    problem_end(&p);
    dw_graph_destroy(graph);
}

static int find_device(void **state) {
    (void)state;
    const char *name = getenv("DEEPWELL_TEST_DEVICE");
    if (dw_device_find(name ? name : "emulator:sm_90a", &device) != DW_OK)
        fail_msg("%s", dw_last_error());
#ifdef TEST_NVRTC
    if (!getenv("DEEPWELL_TEST_DEVICE")) setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gpt_agrees),
        cmocka_unit_test(products_in_tf32_are_another_plan),
        cmocka_unit_test(gradients_of_a_tied_embedding_are_added_in_place),
        cmocka_unit_test(residuals_are_added_by_other_steps),
        cmocka_unit_test(gpt_with_dropout_agrees),
        cmocka_unit_test(llama_agrees),
        cmocka_unit_test(a_planned_gpu_has_the_plan_of_an_emulated_one),
        cmocka_unit_test(a_planned_gpu_runs_nothing),
        cmocka_unit_test(logits_are_kept_if_more_is_saved),
        cmocka_unit_test(logits_that_nobody_reads_stay_in_blocks),
        cmocka_unit_test(rows_of_products_are_padded),
        cmocka_unit_test(concatenations_of_results_are_not_copied),
        cmocka_unit_test(attention_runs_by_its_kernels),
        cmocka_unit_test(masked_attention_trains),
        cmocka_unit_test(capped_attention_with_a_mask_trains_by_primitives),
        cmocka_unit_test(a_linear_layer_runs_by_its_kernel),
        cmocka_unit_test(a_composite_whose_kernel_depends_on_a_size_runs_at_every_size),
        cmocka_unit_test(a_refused_kernel_leaves_the_call_to_the_next),
        cmocka_unit_test(products_of_a_library_have_no_epilogue),
        cmocka_unit_test(unknown_choices_are_refused),
        cmocka_unit_test(programs_that_find_magnitudes_stay_alone),
        cmocka_unit_test(an_index_outside_is_reported_when_the_caller_waits),
        cmocka_unit_test(a_tensor_that_is_not_aligned_is_refused),
        cmocka_unit_test(a_gradient_that_is_not_aligned_is_refused),
        cmocka_unit_test(an_output_gradient_that_is_left_out_is_zero),
        cmocka_unit_test(graphs_follow_their_addresses),
        cmocka_unit_test(instructions_are_timed_on_request),
        cmocka_unit_test(a_run_becomes_part_of_the_callers_graph),
        cmocka_unit_test(an_operation_without_a_kernel_is_named),
        cmocka_unit_test(codes_are_copied_as_bytes),
        cmocka_unit_test(programs_with_an_unused_input_keep_their_seeds),
        cmocka_unit_test_setup(statistics_of_attention_need_no_output, without_first_use_check),
        cmocka_unit_test_setup(windows_of_attention_agree, without_first_use_check),
        cmocka_unit_test_setup(attention_trains_by_its_kernels, without_first_use_check),
        cmocka_unit_test_setup(attention_trains_on_more_keys_than_queries, without_first_use_check),
        cmocka_unit_test_setup(attention_trains_with_dropout, without_first_use_check),
        cmocka_unit_test_setup(layers_train_with_dropout, without_first_use_check),
        cmocka_unit_test_setup(attention_trains_in_place, without_first_use_check),
        cmocka_unit_test_setup(programs_run_behind_products, without_first_use_check),
        cmocka_unit_test_setup(attention_rotates_its_queries, without_first_use_check),
        cmocka_unit_test(segments_may_be_released_early),
        cmocka_unit_test(a_program_of_many_operands_runs),
    };
    return cmocka_run_group_tests(tests, find_device, NULL);
}
