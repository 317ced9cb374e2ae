/* Every operation of the graph on an emulated Hopper GPU, its checker on: the cases of deepwell-ops (tests/ops), each
 * as a graph of one node that an engine for the GPU runs, against the node's definition in FP64. Composites that have
 * no kernel are expanded by the engine. An operation without a case that runs fails the test, so that the table of
 * operations and the kernels cannot drift apart. DEEPWELL_TEST_DEVICE=cuda runs the same on a GPU; an argument runs the
 * cases that contain it. */
#include "deepwell/engine.h"
#include "deepwell/jit.h"
#include "engine/engine_internal.h"
#include "graph/internal.h"
#include "kernel/cuda/elementwise.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_target.h"
#include "kernel/reference/interpret.h"
#include "kernel/reference/scalar.h"
#include "ops/ops_expect.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

/* A kernel's own factor is not known here, because several may compute one node. The kernels of attention round the
 * probabilities and their gradients to the type of their operands before they multiply them, so that in 16 bits each
 * term has that type's unit roundoff instead of F32's. So do those of linear_cross_entropy with the logits and their
 * gradients. */
static bool is_head(dw_op op) {
    return op == DW_OP_LINEAR_CROSS_ENTROPY || op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
}
/* Tensor cores add FP8 products in 14 bits: each of 128 products, and four sums, may lose 2^-13. Rows of other lengths
 * than whole pieces of 16 codes are multiplied by FMA units. */
#define CODES_ERROR (132 * 0x1p-13)
static double tolerance_factor(const ops_case *c, dw_dtype type) {
    if (c->op == DW_OP_SEGMENT_MULTIPLY_CODES || c->op == DW_OP_QUANTIZED_SEGMENT_LINEAR ||
        (c->op == DW_OP_MULTIPLY_CODES && c->inputs[0].shape[1] % 16 == 0))
        return CODES_ERROR / 0x1p-24;
    if (c->op != DW_OP_ATTENTION && c->op != DW_OP_ATTENTION_BACKWARD && !is_head(c->op))
        return 16.0;
    return type == DW_BF16 ? 0x1p-8 / 0x1p-24 : type == DW_F16 ? 0x1p-11 / 0x1p-24 : 16.0;
}

static const dw_device *device;
static const char *only; /* part of the cases' text; NULL: all */

/* On the emulator all cases take nearly three minutes, and five under AddressSanitizer, so that one of so many runs: all
 * of those that are asked for, or with DEEPWELL_TEST_EVERY_CASE. */
static int one_of(void) {
#ifdef __SANITIZE_ADDRESS__
    return 45;
#else
    return only || getenv("DEEPWELL_TEST_EVERY_CASE") ? 1 : 3;
#endif
}

typedef struct tally {
    bool seen[DW_OP_COUNT];
    int visited, passed, failed;
} tally;

/* ---- one case on the device -------------------------------------------------------------------- */

typedef struct on_device {
    uint32_t count;
    size_t bytes[OPS_MAX_INPUTS];
    dw_binding bindings[OPS_MAX_INPUTS];
} on_device;

static void place(on_device *d, const void *data, size_t bytes) {
    dw_binding *binding = &d->bindings[d->count];
    *binding = (dw_binding){.data = NULL};
    d->bytes[d->count++] = bytes;
    OK(dw_device_allocate(device, bytes + 1, &binding->data));
    OK(dw_device_copy_in(device, binding->data, data, bytes));
}

static void release(on_device *d) {
    for (uint32_t i = 0; i < d->count; i++)
        dw_device_release(device, d->bindings[i].data, d->bytes[i] + 1);
    d->count = 0;
}

typedef struct attempt {
    const ops_case *c;
    const ops_operands *operands;
    bool graphs; /* by a recorded graph */
    int single;  /* -1: all results are read; else this one alone */
    ops_block outputs[OPS_MAX_OUTPUTS];
    dw__tensor results[OPS_MAX_OUTPUTS];
    uint32_t result_count;
} attempt;

/* Plans and runs the graph, and brings the results back. */
static dw_status run_graph(const dw_graph *graph, attempt *a) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    void *arena = NULL;
    on_device leaves = {0}, outputs = {0};
    dw_status status = DW_OK;
    size_t arena_bytes = 0;
    options.device = device;
    options.cuda_graphs = a->graphs;
    DW_TRY(dw_engine_create(graph, 0, NULL, 0, NULL, &options, &engine));
    DW_TRY(dw_engine_plan(engine, NULL, &plan));
    arena_bytes = dw_plan_arena_bytes(plan);
    OK(dw_device_allocate(device, arena_bytes + 1, &arena));
    OK(dw_device_fill(device, arena, 0xFF, arena_bytes));
    for (uint32_t i = 0; i < a->operands->count; i++)
        if (a->operands->tensors[i].rank >= 0)
            place(&leaves, a->operands->blocks[i].data, a->operands->blocks[i].bytes);
    for (uint32_t i = 0; i < a->result_count; i++)
        place(&outputs, a->outputs[i].data, a->outputs[i].bytes);
    DW_TRY(dw_plan_forward(plan, arena, leaves.bindings, outputs.bindings, NULL));
    DW_TRY(dw_plan_synchronize(plan, NULL));
    for (uint32_t i = 0; i < a->result_count; i++)
        OK(dw_device_copy_out(device, a->outputs[i].data, outputs.bindings[i].data,
                              outputs.bytes[i]));
cleanup:
    release(&leaves);
    release(&outputs);
    if (arena) dw_device_release(device, arena, arena_bytes + 1);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    return status;
}

static uint32_t output_of(const attempt *a, uint32_t result) {
    return a->single < 0 ? result : (uint32_t)a->single;
}

static void make_results(const dw_graph *graph, attempt *a) {
    a->result_count = a->single < 0 ? dw_graph_output_count(graph) : 1;
    for (uint32_t i = 0; i < a->result_count; i++) {
        dw__tensor *t = &a->results[i];
        OK(dw__value_tensor_at(graph, dw_graph_output(graph, output_of(a, i)), NULL, t));
        OK(ops_block_create(dw__tensor_bytes(t), &a->outputs[i]));
        t->data = a->outputs[i].data;
    }
}

static double largest_of(const dw__tensor *t) {
    double largest = 0.0;
    for (int64_t i = 0; i < dw__tensor_count(t); i++)
        if (isfinite(ops_element(t, i))) largest = fmax(largest, fabs(ops_element(t, i)));
    return largest;
}

/* cuBLASLt's kernels may round the product p of `linear` before they add the bias b: y = p + b is off by half |p| more,
 * and the rounding of the sum by half of half |p|. |p| is at most |y| + |b|. The engine's own programs round once. */
static void expect_rounded_product(const attempt *a, ops_expectation *expected) {
    const ops_operands *operands = a->operands;
    const dw_dtype type = operands->tensors[0].dtype;
    const double half = type == DW_BF16 ? 0x1p-8 : 0x1p-11;
    if (a->c->op != DW_OP_LINEAR || operands->count < 3 || operands->tensors[2].rank < 0 ||
        !dw__dtype_is_half(type) || strncmp(dw_device_name(device), "emulator", 8) == 0)
        return;
    expected->before[0] = (1.0 + half) * (expected->scale[0] + largest_of(&operands->tensors[2]));
}

/* Returns false with the reason. */
static bool check(const dw_graph *graph, const dw_graph *strided, attempt *a, char *reason,
                  size_t bytes) {
    ops_expectation expected = {0};
    bool good = true;
    const dw_status status = run_graph(strided, a);
    if (a->c->must_fail) {
        if (status == DW_INVALID_ARGUMENT || status == DW_INDEX) return true;
        snprintf(reason, bytes, "expected INVALID_ARGUMENT or INDEX, got %s",
                 dw_status_name(status));
        return false;
    }
    if (status != DW_OK) {
        snprintf(reason, bytes, "%s", dw_last_error());
        return false;
    }
    OK(ops_expect(a->c, graph, a->operands, &expected));
    expect_rounded_product(a, &expected);
    for (uint32_t i = 0; good && i < a->result_count; i++)
        good = ops_output_agrees(&expected, tolerance_factor(a->c, a->operands->tensors[0].dtype),
                                 &a->results[i], output_of(a, i), NULL, reason, bytes);
    ops_expectation_destroy(&expected);
    return good;
}

/* ---- operands with strides ----------------------------------------------------------------------- */

/* An operand whose last two axes are exchanged in memory is a permuted leaf: a view, so its kernel gets strides. */
static dw_value permuted_leaf(dw_graph *graph, const char *name, const dw__tensor *t) {
    int64_t shape[DW_MAX_RANK], perm[DW_MAX_RANK];
    const int last = t->rank - 1;
    dw_value leaf, view;
    for (int axis = 0; axis < t->rank; axis++) {
        perm[axis] = axis < last - 1 ? axis : 2 * last - 1 - axis;
        shape[perm[axis]] = t->shape[axis];
    }
    const dw_attr attr = dw_attr_list(DW_ATTR_KEY_PERM, (uint32_t)t->rank, perm);
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, name, t->dtype, t->rank, shape, &leaf));
    OK(dw_graph_apply(graph, DW_OP_PERMUTE, 1, &leaf, 1, &attr, &view));
    return view;
}

/* The case's graph with operands as they lie in memory. `single`: as in attempt. */
static dw_graph *strided_graph(const ops_case *c, const ops_operands *operands, int single) {
    dw_graph *graph = NULL;
    dw_value inputs[OPS_MAX_INPUTS];
    dw_node node;
    OK(dw_graph_create(&graph));
    for (uint32_t i = 0; i < c->input_count; i++) {
        const dw__tensor *t = &operands->tensors[i];
        const dw_role role = c->inputs[i].fill == OPS_FILL_SEED ? DW_ROLE_SEED : DW_ROLE_INPUT;
        const char name[] = {'x', (char)('a' + i), '\0'};
        inputs[i] = DW_NONE;
        if (t->rank < 0) continue;
        if (dw__tensor_is_contiguous(t))
            OK(dw_graph_leaf(graph, role, name, t->dtype, t->rank, t->shape, &inputs[i]));
        else
            inputs[i] = permuted_leaf(graph, name, t);
    }
    OK(dw_graph_append(graph, c->op, c->input_count, inputs, c->attr_count, c->attrs, &node));
    for (uint32_t i = 0; i < dw_node_output_count(graph, node); i++)
        if (single < 0 || (uint32_t)single == i)
            OK(dw_graph_add_output(graph, dw_node_output(graph, node, i)));
    return graph;
}

/* ---- the cases --------------------------------------------------------------------------------- */

/* The emulator takes about a second for as many operations. */
static bool is_long(const dw_graph *graph) {
    const double most_flops = 3e6, most_bytes = 1e6;
    dw_cost cost;
    OK(dw_graph_cost(graph, NULL, &cost));
    return cost.flops > most_flops || cost.bytes > most_bytes;
}

/* An elementwise operation visits the elements of a contiguous tensor in one loop, whatever its shape. */
static bool repeats_another(const ops_case *c, dw_dtype dtype) {
    static const char *const shapes[] = {"[1] ", "[257]", "[2,1,33]", "[63,65]", "[1,129,2]"};
    for (size_t i = 0; i < DW_COUNT(shapes); i++)
        if (dw_op_is_elementwise(c->op) && dtype != DW_F32 && strstr(c->text, shapes[i]))
            return true;
    return false;
}

/* A kernel of these leaves out results that nobody reads. */
static bool omits_results(dw_op op) {
    return op == DW_OP_LAYER_NORM || op == DW_OP_LAYER_NORM_BACKWARD || op == DW_OP_RMS_NORM ||
           op == DW_OP_RMS_NORM_BACKWARD || op == DW_OP_CROSS_ENTROPY || is_head(op) ||
           op == DW_OP_QUANTIZE_TILES;
}

static void run_case(const ops_case *c, const dw_graph *graph, ops_layout layout, int single,
                     tally *t) {
    char reason[1200] = "";
    ops_operands operands;
    attempt a = {
        .c = c, .operands = &operands, .graphs = layout == OPS_CONTIGUOUS, .single = single};
    OK(ops_operands_create(c, layout, OPS_NORMAL, 1, &operands));
    dw_graph *strided = strided_graph(c, &operands, single);
    make_results(graph, &a);
    if (check(graph, strided, &a, reason, sizeof reason)) {
        t->passed++;
        if (!c->must_fail) t->seen[c->op] = true;
    } else {
        t->failed++;
        print_error("%s, %s%s: %s\n", c->text, ops_layout_name(layout),
                    single < 0 ? "" : ", a single result", reason);
    }
    for (uint32_t i = 0; i < a.result_count; i++) ops_block_destroy(&a.outputs[i]);
    dw_graph_destroy(strided);
    ops_operands_destroy(&operands);
}

/* Calls that are long for every kernel of a CPU: many indexes, and rows of whole pieces of 16 bytes. */
static const char *const more_cases[] = {
    "scatter_add i32[4500]:index9 f32[4500,8] axis=0 size=[9]",
    "scatter_add i64[700]:index300 bf16[3,700,64] axis=1 size=[300]",
    "embedding_backward i64[9,700]:index1000 f32[9,700,4] size=[1000] padding_index=7",
    "embedding_backward i64[40]:index5 f16[40,520] size=[5]",
    "embedding_backward i64[1300]:index900 bf16[1300,64] size=[900] padding_index=3",
    "embedding_backward i32[600]:index9000 bf16[600,1024] size=[9000]", /* zeros beside sums */
    "cumsum f32[3,2500] axis=1",
    "cumsum bf16[3,70,40] axis=1 reverse=1",
    "reduce_sum f32[2,5000] axes=[1]",
    "reduce_sum f32[2,40001] axes=[1]",
    "reduce_sum bf16[1,768] axes=[0]",
    "reduce_sum bf16[700,1] axes=[0]",
    "reduce_sum bf16[200,776] axes=[0]",
    "reduce_sum f16[500,33] axes=[0]",
    "reduce_sum bf16[65537,3] axes=[0]",
    "reduce_sum f64[300,6] axes=[0]",
    "reduce_sum f64[0,8] axes=[0]",
    "reduce_sum f32[0,8] axes=[1]",
    "reduce_sum bf16[20,3,40,8] axes=[0,2]",
    "reduce_sum bf16[9,3,40,24] axes=[1,3]",
    "reduce_sum i64[300,7] axes=[0]",
    "reduce_max bool[300,16] axes=[0]",
    "reduce_prod f32[3,40] axes=[0]",
    "layer_norm f32[3,4099] f32[4099] f32[4099] eps=1e-5",
    "layer_norm bf16[2,3,520] bf16[520] bf16[520] eps=1e-5",
    "layer_norm bf16[70,768] bf16[768] bf16[768] eps=1e-5",
    "layer_norm f16[2,9000] f16[9000] - eps=1e-5",
    "layer_norm f64[3,4099] f64[4099] f64[4099] eps=1e-5",
    "layer_norm f32[1,33000] f32[33000] f32[33000] eps=1e-5",
    "layer_norm_backward bf16[3,4099] bf16[3,4099] bf16[4099] f32[3] f32[3]",
    "layer_norm_backward f32[13,520] f32[13,520] f32[520] f32[13] f32[13]",
    "layer_norm_backward f32[6,9001] f32[6,9001] f32[9001] f32[6] f32[6]",
    "layer_norm_backward bf16[70,768] bf16[70,768] bf16[768] f32[70] f32[70]",
    "layer_norm_backward f64[9,4600] f64[9,4600] f64[4600] f64[9] f64[9]",
    "layer_norm_backward f32[2900,7] f32[2900,7] f32[7] f32[2900] f32[2900]",
    "layer_norm bf16[5,2048] bf16[2048] bf16[2048] eps=1e-5",
    "layer_norm f32[3,1000] f32[1000] - eps=1e-5",
    "layer_norm_backward bf16[9,2048] bf16[9,2048] bf16[2048] f32[9] f32[9]",
    "layer_norm_backward bf16[8000,24] bf16[8000,24] bf16[24] f32[8000] f32[8000]",
    "layer_norm_backward f16[5,4096] f16[5,4096] - f32[5] f32[5]",
    "rope bf16[2,5,7,64] bf16[1,1,7,64] bf16[1,1,7,64] interleaved=0 transposed=0",
    "rope f16[2,9,3,80] f16[2,1,3,32] f16[2,1,3,32] interleaved=0 transposed=1",
    "rope f32[3,6,10] f32[3,1,6] f32[3,1,6] interleaved=1 transposed=0",
    "rope bf16[4,3,16] bf16[4,3,16] bf16[4,3,16] interleaved=1 transposed=1",
    "rms_norm bf16[6,1640] - eps=1e-5",
    "rms_norm_backward bf16[9,1608] bf16[9,1608] bf16[1608] f32[9]",
    "rms_norm bf16[2,4099] bf16[4099] eps=1e-5",
    "rms_norm f32[2,40000] f32[40000] eps=1e-5",
    "rms_norm_backward bf16[7,1024] bf16[7,1024] bf16[1024] f32[7]",
    "rms_norm_backward f32[5,8200] f32[5,8200] f32[8200] f32[5]",
    "cross_entropy f32[5,4099] i64[5]:target4099 reduction=mean label_smoothing=0.1",
    "cross_entropy bf16[3,20000] i64[3]:target20000 reduction=mean",
    "cross_entropy f16[3,17003] i64[3]:target17003 reduction=none",
    "cross_entropy f64[3,4099] i64[3]:target4099 reduction=sum label_smoothing=0.1",
    "cross_entropy f32[2900,7] i64[2900]:target7 reduction=mean",
    "cross_entropy_backward f32[5,4099] i64[5]:target4099 f32[5] f32[] reduction=mean",
    "cross_entropy_backward bf16[3,20000] i64[3]:target20000 bf16[3] bf16[3] reduction=none",
    "cross_entropy_backward f64[3,1500] i64[3]:target1500 f64[3] f64[] reduction=mean",
    "cross_entropy_backward f32[2900,7] i64[2900]:target7 f32[2900] f32[] reduction=mean",
    "!cross_entropy_backward f32[3,5] i64[3]:outside5 f32[3] f32[] reduction=mean",
    "linear_cross_entropy f32[37,24] f32[101,24] f32[101] i64[37]:target101 reduction=mean "
    "label_smoothing=0.1",
    "linear_cross_entropy bf16[37,24] bf16[101,24] - i64[37]:target101 reduction=mean",
    "linear_cross_entropy f64[21,9] f64[9,203] f64[203] i64[21]:target203 reduction=sum "
    "ignore_index=3 transpose_w=0",
    "linear_cross_entropy_backward f32[37,24] f32[203,24] f32[203] - i64[37]:target203 f32[37] "
    "f32[] reduction=mean label_smoothing=0.1",
    "linear_cross_entropy_backward bf16[37,24] bf16[203,24] - - i64[37]:target203 f32[37] f32[] "
    "reduction=mean",
    "linear_cross_entropy_backward f16[21,9] f16[9,203] f16[203] - i64[21]:target203 f32[21] "
    "f32[21] reduction=none ignore_index=3 transpose_w=0",
    "linear_cross_entropy_backward bf16[19,8] bf16[203,8] - bf16[19,203] i64[19]:target203 "
    "f32[19] f32[] reduction=sum",
    "linear_cross_entropy_backward bf16[5,9] bf16[203,9] bf16[203] - i64[5]:ignored f32[5] f32[] "
    "reduction=sum",
    "!linear_cross_entropy_backward f32[3,7] f32[5,7] - - i64[3]:outside5 f32[3] f32[] "
    "reduction=mean",
};

static bool is_hopper(void) {
    const dw__context *context;
    OK(device->context(&context));
    return context->capability == 90;
}

/* Only Blackwell's tensor cores multiply codes with scales of blocks of one byte; those of fp8-block are F32. Codes of
 * rows in groups are multiplied by Hopper's alone, in whole pieces of 16 bytes. */
static bool lacks_tensor_cores(const ops_case *c) {
    enum { TILES_A = 4 };
    const dw__context *context;
    OK(device->context(&context));
    if (c->op == DW_OP_SEGMENT_MULTIPLY_CODES)
        return !is_hopper() || c->inputs[0].shape[1] % 16 != 0;
    return c->op == DW_OP_MULTIPLY_CODES && c->input_count > TILES_A &&
           c->inputs[TILES_A].dtype != DW_F32 && !dw__gpu_is_blackwell(context->capability);
}

static dw_status visit(void *context, const char *text, dw_dtype dtype) {
    tally *t = context;
    ops_case c;
    dw_graph *graph = NULL;
    if (only && !strstr(text, only)) return DW_OK;
    if (t->visited++ % one_of() != 0) return DW_OK;
    OK(ops_case_parse(text, &c));
    if (lacks_tensor_cores(&c)) return DW_OK;
    const dw_status status = ops_case_graph(&c, &graph);
    if (status == DW_TYPE) return DW_OK; /* the operation does not support this type */
    if (status != DW_OK) fail_msg("%s: %s", text, dw_last_error());
    if (!is_long(graph) && !repeats_another(&c, dtype)) {
        /* The emulator takes minutes for the first-use checks of attention, which have a test of their own. */
        if (strncmp(dw_device_name(device), "emulator", 8) == 0 &&
            (c.op == DW_OP_ATTENTION || c.op == DW_OP_ATTENTION_BACKWARD))
            setenv("DEEPWELL_FIRST_USE_CHECK", "off", 0);
        else
            unsetenv("DEEPWELL_FIRST_USE_CHECK");
        run_case(&c, graph, OPS_CONTIGUOUS, -1, t);
        if (dtype == DW_F32 && !c.must_fail && c.input_count)
            run_case(&c, graph, OPS_PERMUTED, -1, t);
        for (int i = 0; i < (int)dw_graph_output_count(graph) && omits_results(c.op); i++)
            if (dtype == DW_F32 && !c.must_fail) run_case(&c, graph, OPS_CONTIGUOUS, i, t);
    }
    dw_graph_destroy(graph);
    return DW_OK;
}

static void every_operation_agrees_with_its_definition(void **state) {
    (void)state;
    tally t = {0};
    OK(ops_each_case(visit, &t));
    for (size_t i = 0; i < DW_COUNT(more_cases); i++) OK(visit(&t, more_cases[i], DW_F32));
    print_message("%d calls agree, %d do not\n", t.passed, t.failed);
    for (int op = 0; op < DW_OP_COUNT && !only && one_of() == 1; op++)
        if (!t.seen[op] && !(op == DW_OP_SEGMENT_MULTIPLY_CODES && !is_hopper())) {
            print_error("%s: no case runs on the GPU; add one to tests/ops/ops_table.c\n",
                        dw_op_name((dw_op)op));
            t.failed++;
        }
    assert_int_equal(t.failed, 0);
}

/* ---- chosen elements, by their bits ----------------------------------------------------------------------- */

/* Elements of a few values, so that most are equal to others: NaN, infinities and both zeros among them. */
static void fill_ties(const dw__tensor *t) {
    static const double numbers[] = {NAN, INFINITY, -INFINITY, 0.0,  -0.0,
                                     1.0, -1.0,     2.5,       -NAN, 3.0};
    ops_random random = ops_random_start(3, "ties");
    for (int64_t i = 0; i < dw__tensor_count(t); i++) {
        const uint64_t bits = ops_random_bits(&random);
        dw__scalar value = {.integer = (int64_t)(bits % 7) - 3};
        if (dw__dtype_is_float(t->dtype)) value.number = numbers[bits % DW_COUNT(numbers)];
        dw__scalar_store(t->data, t->dtype, i, value);
    }
}

/* Any bits: NaNs, infinities, numbers of every magnitude. */
static void fill_bits(const dw__tensor *t) {
    ops_random random = ops_random_start(4, "bits");
    uint16_t *words = t->data;
    for (size_t i = 0; i < dw__tensor_bytes(t) / sizeof *words; i++)
        words[i] = (uint16_t)ops_random_bits(&random);
}

/* Compares the GPU's results with the interpreter's, which must be the same but for the signs of NaNs, and frees
 * them. */
static void expect_exactly(const dw_graph *graph, const dw__tensor *leaves, attempt *a,
                           const char *text) {
    dw__tensor expected[OPS_MAX_OUTPUTS];
    OK(dw__interpret(graph, NULL, leaves, expected, NULL));
    for (uint32_t i = 0; i < a->result_count; i++) {
        for (int64_t j = 0; j < dw__tensor_count(&expected[i]); j++) {
            const double got = ops_element(&a->results[i], j),
                         wanted = ops_element(&expected[i], j);
            if (got == wanted && signbit(got) == signbit(wanted)) continue;
            if (!(isnan(got) && isnan(wanted)))
                fail_msg("%s: element %lld of result %u is %g, expected %g", text, (long long)j, i,
                         got, wanted);
        }
        ops_block_destroy(&a->outputs[i]);
        dw__free_aligned(expected[i].data);
    }
}

static void check_exactly(const char *text, void (*fill)(const dw__tensor *t)) {
    ops_case c;
    dw_graph *graph = NULL;
    ops_operands operands;
    attempt a = {.c = &c, .operands = &operands, .single = -1};
    OK(ops_case_parse(text, &c));
    OK(ops_case_graph(&c, &graph));
    OK(ops_operands_create(&c, OPS_CONTIGUOUS, OPS_NORMAL, 1, &operands));
    fill(&operands.tensors[0]);
    make_results(graph, &a);
    OK(run_graph(graph, &a));
    dw__tensor leaves[OPS_MAX_INPUTS];
    ops_operands_leaves(&operands, leaves);
    expect_exactly(graph, leaves, &a, text);
    ops_operands_destroy(&operands);
    dw_graph_destroy(graph);
}

/* NaN above all numbers, the first of equal elements first; also rows of several tiles, the last of which is short. */
static void equal_elements_keep_their_order(void **state) {
    (void)state;
    static const char *const calls[] = {
        "arg_max f32[7,300] axis=1",
        "arg_min f32[7,300] axis=1",
        "arg_max i64[300,40] axis=0",
        "arg_min bf16[5,2000] axis=1",
        "arg_min bf16[300,40] axis=0",
        "arg_max f64[2,9001] axis=1",
        "reduce_max bf16[300,24] axes=[0]",
        "reduce_min f32[2,9001] axes=[1]",
        "reduce_sum i64[300,9] axes=[0]",
        "sort f32[37,33] axis=1",
        "sort f32[3,5000] axis=1 descending=1",
        "sort f64[2,2500] axis=1",
        "sort i64[2049,2] axis=0 descending=1",
        "sort bf16[300,9] axis=0",
        "top_k f32[9,64] axis=1 size=[7]",
        "top_k f32[300,128] axis=1 size=[8]",
        "top_k bf16[512,19] axis=0 size=[32]",
        "top_k i64[5,3,33] axis=1 size=[2]",
        "top_k f64[3,300] axis=1 size=[33]",
        "top_k f16[2,9000] axis=1 size=[50]",
        "top_k i32[3,130] axis=1 size=[130]",
    };
    for (size_t i = 0; i < DW_COUNT(calls); i++)
        if (!only || strstr(calls[i], only)) check_exactly(calls[i], fill_ties);
}

/* Sums in F32 of many parts and rows have the same bits in every run. */
static void sums_have_the_same_bits_again(void **state) {
    (void)state;
    static const char *const calls[] = {
        "reduce_sum bf16[300,776] axes=[0]",
        "reduce_sum f32[2,20000] axes=[1]",
        "layer_norm_backward bf16[70,768] bf16[70,768] bf16[768] f32[70] f32[70]",
        "quantization_error f32[129,257] - scheme=mxfp8 axis=0",
        "group_rows i64[5003]:index13 size=[13]",
        "segment_linear_backward_weight bf16[300,72] bf16[300,40] i32[6]:offsets300",
        "combine_rows_backward bf16[104,72] i32[13,8]:places f32[13,8] bf16[13,72]",
        "put_along_add i64[2500]:index7 f32[2500] axis=0 size=[9]",
    };
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        ops_case c;
        dw_graph *graph = NULL;
        ops_operands operands;
        attempt runs[2];
        if (only && !strstr(calls[i], only)) continue;
        OK(ops_case_parse(calls[i], &c));
        OK(ops_case_graph(&c, &graph));
        OK(ops_operands_create(&c, OPS_CONTIGUOUS, OPS_NORMAL, 1, &operands));
        for (int run = 0; run < 2; run++) {
            runs[run] = (attempt){.c = &c, .operands = &operands, .single = -1};
            make_results(graph, &runs[run]);
            OK(run_graph(graph, &runs[run]));
        }
        for (uint32_t o = 0; o < runs[0].result_count; o++) {
            assert_memory_equal(runs[0].outputs[o].data, runs[1].outputs[o].data,
                                runs[0].outputs[o].bytes);
            for (int run = 0; run < 2; run++) ops_block_destroy(&runs[run].outputs[o]);
        }
        ops_operands_destroy(&operands);
        dw_graph_destroy(graph);
    }
}

static void quantization_of_any_bits_is_the_definitions(void **state) {
    (void)state;
    static const char *const calls[] = {
        "quantize f32[70,131] - scheme=mxfp8 axis=1",
        "quantize f32[70,131] - scheme=mxfp8-e5m2 axis=0",
        "quantize f32[70,131] - scheme=mxfp6 axis=0 square=1",
        "quantize f32[70,131] i64[2]:seed scheme=mxfp6-e2m3 axis=1 stochastic=1 stream=3",
        "quantize bf16[70,131] - scheme=mxfp4 axis=1 hadamard=1",
        "quantize f16[70,131] - scheme=nvfp4 axis=1",
        "quantize f32[70,131] i64[2]:seed scheme=nvfp4 axis=0 stochastic=1 stream=3",
        "quantize_blocks f32[70,131] - scheme=nvfp4 axis=1 square=1",
        "quantize_blocks bf16[70,131] - scheme=mxfp8 axis=0",
        "quantize_tiles bf16[70,131] - scheme=mxfp8",
        "quantize_tiles f32[70,80] - scheme=nvfp4",
        "quantize_tiles f16[144,72] - scheme=mxfp4 square=1",
        "quantize_tiles f32[0,72] - scheme=nvfp4",
        "quantize_tiles f32[70,131] - scheme=mxfp8-e5m2 axis=0 scale_rule=ceil",
        "quantize_tiles bf16[70,131] - scheme=nvfp4 axis=0 hadamard=1",
        "quantize_tiles f32[70,131] i64[2]:seed scheme=nvfp4 axis=1 stochastic=1 stream=3",
        "quantize_tensor bf16[70,131] scheme=fp8-tensor",
        "quantize_tensor f16[144,272] scheme=fp8-tensor-e5m2",
        "quantize_tensor f32[150,264] scheme=fp8-tensor",
        "quantize_tiles bf16[70,131] - scheme=fp8-block",
        "quantize_tiles f32[150,264] - scheme=fp8-block",
        "quantize_tiles f16[144,270] - scheme=fp8-block square=1",
        "quantize_tiles f32[0,72] - scheme=fp8-block",
        "dequantize_blocks e5m2[70,131] e8m0[70,5] scheme=mxfp8-e5m2 axis=1",
        "dequantize_blocks e2m1[70,132] ue4m3[70,9] scheme=nvfp4 axis=0",
    };
    for (size_t i = 0; i < DW_COUNT(calls); i++)
        if (!only || strstr(calls[i], only)) check_exactly(calls[i], fill_bits);
}

/* Finite numbers of many magnitudes, a seventh of them 0 of either sign. */
static void fill_finite(const dw__tensor *t) {
    ops_random random = ops_random_start(6, "finite");
    for (int64_t i = 0; i < dw__tensor_count(t); i++) {
        const uint64_t bits = ops_random_bits(&random);
        const double mantissa = (double)(int64_t)(bits >> 40) - 0x1p23;
        dw__scalar_store(t->data, t->dtype, i,
                         (dw__scalar){.number = bits % 7 ? ldexp(mantissa, (int)(bits % 13) - 29)
                                                         : copysign(0.0, mantissa)});
    }
}

static void quantization_of_finite_numbers_is_the_definitions(void **state) {
    (void)state;
    static const char *const calls[] = {
        "quantize f32[70,131] - scheme=fp8-tensor axis=1",
        "quantize bf16[70,131] - scheme=fp8-tensor-e5m2 axis=0",
        "quantize_tensor bf16[70,131] scheme=fp8-tensor",
        "quantize_tensor bf16[136,272] scheme=fp8-tensor",
        "quantize_tensor bf16[133,272] scheme=fp8-tensor",
        "quantize_tensor f16[144,272] scheme=fp8-tensor-e5m2",
        "quantize_tensor f32[150,264] scheme=fp8-tensor",
        "quantize_tensor f32[16,136] scheme=fp8-tensor-e5m2",
        "quantize_tiles f32[150,264] - scheme=fp8-block",
        "quantize_tiles f16[200,136] - scheme=fp8-block",
        "quantize_tiles bf16[133,259] - scheme=fp8-block",
        "quantize_tiles bf16[300,136] - scheme=fp8-block square=1",
        "quantize_tiles f32[130,67] - scheme=fp8-block square=1",
        /* more tiles than blocks, and more vectors than threads in flight */
        "quantize_tensor bf16[8,102408] scheme=fp8-tensor",
        "quantize_tiles bf16[8,34056] - scheme=fp8-block",
        "quantize_tiles f32[34056,5] - scheme=fp8-block square=1",
    };
    for (size_t i = 0; i < DW_COUNT(calls); i++)
        if (!only || strstr(calls[i], only)) check_exactly(calls[i], fill_finite);
}

/* Quotients by the scale of fp8-block that lie in the middle of two codes or next to it, 21 2^n and 7 2^-10, since the
 * scale is a rounded 448th of the block's largest magnitude. Each row and column of a tile has that one. */
static void fill_middles(const dw__tensor *t) {
    ops_random random = ops_random_start(7, "middles");
    for (int64_t i = 0; i < dw__tensor_count(t); i++) {
        const int64_t row = i / t->shape[1], column = i % t->shape[1];
        const uint64_t bits = ops_random_bits(&random);
        const double largest = (double)(128 + (row / 128 * 26 + column / 128 * 10 + 2) % 128);
        double x =
            bits & 2 ? ldexp(3.0 * largest, (int)(bits >> 8 & 15) - 17) : ldexp(largest, -16);
        if (row % 128 == column % 128) x = largest;
        dw__scalar_store(t->data, t->dtype, i, (dw__scalar){.number = bits & 1 ? x : -x});
    }
}

static void quotients_in_the_middle_of_codes_are_the_definitions(void **state) {
    (void)state;
    static const char *const calls[] = {
        "quantize_tiles bf16[256,640] - scheme=fp8-block",
        "quantize_tiles f16[384,264] - scheme=fp8-block",
        "quantize_tiles f32[136,264] - scheme=fp8-block",
        "quantize_tiles bf16[136,384] - scheme=fp8-block square=1",
    };
    for (size_t i = 0; i < DW_COUNT(calls); i++)
        if (!only || strstr(calls[i], only)) check_exactly(calls[i], fill_middles);
}

/* ---- elementwise programs ------------------------------------------------------------------------------------ */

/* Small whole numbers, with which the programs below are exact in every type. */
static void fill_numbers(const dw__tensor *t) {
    ops_random random = ops_random_start(5, "numbers");
    for (int64_t i = 0; i < dw__tensor_count(t); i++) {
        const int64_t number = (int64_t)(ops_random_bits(&random) % 9) - 4;
        dw__scalar value = {.integer = t->dtype == DW_BOOL ? number > 0 : number};
        if (dw__dtype_is_float(t->dtype)) value.number = (double)number;
        dw__scalar_store(t->data, t->dtype, i, value);
    }
}

/* An instruction by itself has operands of its own, with which it is measured. A sign among the magnitudes would say
 * that a number is not finite, for which the kernel looks at each element again. */
static void expect_magnitudes(dw_plan *plan, uint32_t index) {
    dw_instruction *alone = NULL;
    OK(dw_instruction_create(plan, index, &alone));
    const dw__tensor *given = &dw__instruction_call(alone)->inputs[1];
    float *magnitudes = malloc(dw__tensor_bytes(given));
    assert_non_null(magnitudes);
    OK(dw_device_copy_out(device, magnitudes, given->data, dw__tensor_bytes(given)));
    for (int64_t i = 0; i < given->shape[0]; i++)
        assert_true(!signbit(magnitudes[i]) && magnitudes[i] <= 1.0f);
    free(magnitudes);
    dw_instruction_destroy(alone);
}

/* The operations of the plan that are told the magnitudes of what they quantize. */
static uint32_t count_told(const dw_graph *graph) {
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    uint32_t told = 0;
    options.device = device;
    OK(dw_engine_create(graph, 0, NULL, 0, NULL, &options, &engine));
    OK(dw_engine_plan(engine, NULL, &plan));
    for (size_t i = 0; i < plan->code.count; i++) {
        const dw__step *step = &plan->code.items[i].step;
        if (step->op != DW_OP_QUANTIZE_TENSOR || step->input_count != 2) continue;
        expect_magnitudes(plan, (uint32_t)i);
        told++;
    }
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    return told;
}

/* Compares the results of a graph with the interpreter's, which must be the same. */
static void check_graph(const char *body, void (*fill)(const dw__tensor *), uint32_t told) {
    dw__text text = {0};
    dw_graph *graph = NULL;
    ops_operands operands = {0};
    OK(dw__text_printf(&text, "deepwell graph 1\n%s", body));
    if (only && !strstr(text.text, only)) {
        dw__text_free(&text);
        return;
    }
    OK(dw_graph_from_text(text.text, &graph));
    operands.count = dw_graph_leaf_count(graph);
    for (uint32_t j = 0; j < operands.count; j++) {
        dw__tensor *t = &operands.tensors[j];
        OK(dw__value_tensor_at(graph, dw_graph_leaf_at(graph, j), NULL, t));
        OK(ops_block_create(dw__tensor_bytes(t), &operands.blocks[j]));
        t->data = operands.blocks[j].data;
        fill(t);
    }
    attempt a = {.operands = &operands, .single = -1};
    make_results(graph, &a);
    OK(run_graph(graph, &a));
    expect_exactly(graph, operands.tensors, &a, text.text);
    if (strstr(body, "quantize_tensor")) assert_int_equal(count_told(graph), told);
    ops_operands_destroy(&operands);
    dw_graph_destroy(graph);
    dw__text_free(&text);
}

/* Vectors of every length, tensors that are broadcast, sliced and permuted, and types of several sizes. */
static void programs_of_every_form_are_exact(void **state) {
    (void)state;
    static const char *const graphs[] = {
        /* whole vectors, alone, and with a row and a column that are broadcast */
        "input %x: bf16[24, 40]\n%y = fused(%x) "
        "{body=\"t0=mul(i0,c3);t1=sub(t0,c7);out(t1)\"}\nreturn %y\n",
        "input %x: bf16[24, 40]\ninput %b: bf16[40]\ninput %c: bf16[24, 1]\n"
        "%y, %t = fused(%x, %b, %c) {body=\"t0=add(i0,i1);t1=mul(t0,i2);out(t1,t0)\"}\nreturn %y, "
        "%t\n",
        "input %x: f16[3, 5, 6]\ninput %b: f16[5, 1]\ninput %c: f16[3, 1, 6]\n"
        "%y = fused(%x, %b, %c) "
        "{body=\"t0=sub(i0,i1);t1=abs(t0);t2=neg(i2);t3=add(t1,t2);out(t3)\"}\n"
        "return %y\n",
        /* sizes that vectors do not divide */
        "input %x: bf16[7, 37]\ninput %b: bf16[37]\n"
        "%y = fused(%x, %b) {body=\"t0=sub(i0,i1);out(t0)\"}\nreturn %y\n",
        "input %x: f32[5, 6]\ninput %b: f32[6]\n"
        "%y = fused(%x, %b) {body=\"t0=mul(i0,i1);out(t0)\"}\nreturn %y\n",
        /* views that begin at an odd element, at the second, fourth and eighth */
        "input %x: bf16[6, 48]\n%s = slice(%x) {start=[1, 1], limit=[5, 33], step=[1, 1]}\n"
        "%y = fused(%s) {body=\"t0=add(i0,c1);out(t0)\"}\nreturn %y\n",
        "input %x: bf16[6, 48]\n%s = slice(%x) {start=[1, 2], limit=[5, 34], step=[1, 1]}\n"
        "%y = fused(%s) {body=\"t0=add(i0,c1);out(t0)\"}\nreturn %y\n",
        "input %x: bf16[6, 48]\n%s = slice(%x) {start=[1, 4], limit=[5, 36], step=[1, 1]}\n"
        "%t = slice(%x) {start=[0, 8], limit=[4, 40], step=[1, 1]}\n"
        "%y = fused(%s, %t) {body=\"t0=mul(i0,i1);out(t0)\"}\nreturn %y\n",
        "input %x: bf16[6, 48]\n%s = slice(%x) {start=[0, 0], limit=[6, 48], step=[1, 3]}\n"
        "%y = fused(%s) {body=\"t0=add(i0,c1);out(t0)\"}\nreturn %y\n",
        /* heads ahead of positions, as in rotary embeddings */
        "input %x: bf16[2, 5, 3, 16]\ninput %c: f32[5, 16]\n"
        "%p = permute(%x) {perm=[0, 2, 1, 3]}\n"
        "%y = fused(%p, %c) {body=\"t0=cast_f32(i0);t1=mul(t0,i1);t2=cast_bf16(t1);out(t2)\"}\n"
        "return %y\n",
        "input %x: f32[4, 6, 10]\n%p = permute(%x) {perm=[2, 1, 0]}\n"
        "%y = fused(%p) {body=\"t0=neg(i0);out(t0)\"}\nreturn %y\n",
        /* types of several sizes, results of several types, a constant result */
        "input %m: bool[9, 16]\ninput %x: bf16[9, 16]\ninput %z: f32[9, 16]\ninput %k: i64[16]\n"
        "%y, %u, %v = fused(%m, %x, %z, %k) "
        "{body=\"t0=select(i0,i1,c2);t1=cast_f32(t0);t2=add(t1,i2);"
        "t3=cast_f32(i3);t4=gt(t2,t3);out(t2,t4,t0)\"}\nreturn %y, %u, %v\n",
        "input %m: bool[64, 3]\n%y = fused(%m) {body=\"t0=logical_not(i0);out(t0)\"}\nreturn %y\n",
        "input %x: i32[30]\n%y = fused(%x) {body=\"t0=mul(i0,i0);t1=sub(t0,c5);out(t1)\"}\nreturn "
        "%y\n",
        "input %x: f64[3, 4]\n%y = fused(%x) "
        "{body=\"t0=pow(i0,c3);t1=pow(i0,c2);t2=add(t0,t1);out(t2)\"}\n"
        "return %y\n",
        /* no elements; several vectors of a thread, the last block of which is short */
        "input %x: f32[0, 8]\ninput %b: f32[8]\n"
        "%y = fused(%x, %b) {body=\"t0=mul(i0,i1);out(t0)\"}\nreturn %y\n",
        "input %x: bf16[1031, 1024]\ninput %b: bf16[1024]\n"
        "%y = fused(%x, %b) {body=\"t0=add(i0,i1);out(t0)\"}\nreturn %y\n",
        "input %x: bf16[1051, 1001]\n%y = fused(%x) {body=\"t0=neg(i0);out(t0)\"}\nreturn %y\n",
    };
    for (size_t i = 0; i < DW_COUNT(graphs); i++) check_graph(graphs[i], fill_numbers, 0);
}

/* Programs whose results are quantized with one scale find the largest magnitude on the way. Elements of one block and
 * of several, of whole vectors and of single ones, behind a reshape, of two results, in every type. */
static void programs_find_magnitudes(void **state) {
    (void)state;
#define QUANTIZED(x, c)                                                                            \
    "%" c ", %" c "t, %" c "s = quantize_tensor(%" x ") {scheme=\"fp8-tensor\"}\n"
    static const struct {
        const char *text;
        uint32_t told;
    } graphs[] = {
        {"input %x: bf16[24, 40]\ninput %b: bf16[40]\n"
         "%y = fused(%x, %b) {body=\"t0=sub(i0,i1);out(t0)\"}\n" QUANTIZED(
             "y", "c") "return %y, %c, %ct, %cs\n",
         1},
        {"input %x: f16[7, 37]\n%y = fused(%x) {body=\"t0=neg(i0);out(t0)\"}\n" QUANTIZED(
             "y", "c") "return %c, %ct, %cs\n",
         1},
        {"input %x: f32[9, 41]\n%y = fused(%x) {body=\"t0=neg(i0);out(t0)\"}\n" QUANTIZED(
             "y", "c") "return %c, %cs\n",
         1},
        {"input %x: bf16[3, 40, 136]\n%y = fused(%x) {body=\"t0=abs(i0);out(t0)\"}\n"
         "%r = reshape(%y) {shape=[120, 136]}\n" QUANTIZED("r", "c") "return %ct, %cs\n",
         1},
        {"input %x: f32[40, 64]\n%y, %z = fused(%x) "
         "{body=\"t0=neg(i0);t1=cast_bf16(t0);t2=abs(i0);out(t1,t2)\"}\n" QUANTIZED("y", "c")
             QUANTIZED("z", "d") "return %c, %cs, %dt, %ds\n",
         2},
        {"input %x: bf16[1040, 1016]\n%y = fused(%x) {body=\"t0=neg(i0);out(t0)\"}\n" QUANTIZED(
             "y", "c") "return %c, %ct, %cs\n",
         1},
        /* more blocks than quantize_tensor reads vectors of */
        {"input %x: bf16[300, 1001]\n%y = fused(%x) {body=\"t0=neg(i0);out(t0)\"}\n" QUANTIZED(
             "y", "c") "return %c, %cs\n",
         1},
        /* not of a program */
        {"input %x: bf16[24, 40]\n" QUANTIZED("x", "c") "return %c, %cs\n", 0},
    };
#undef QUANTIZED
    for (size_t i = 0; i < DW_COUNT(graphs); i++) {
        check_graph(graphs[i].text, fill_finite, graphs[i].told);
        if (i == 1 || i == 3) /* which keep the signs of NaNs */
            check_graph(graphs[i].text, fill_bits, graphs[i].told);
    }
}

/* A program with more results than a word has bits, of which two are quantized. */
static void programs_of_many_results_find_magnitudes(void **state) {
    enum { RESULTS = 40 };
    dw__text text = {0};
    (void)state;
    OK(dw__text_printf(&text, "input %%x: f32[9, 40]\n"));
    for (int i = 0; i < RESULTS; i++) OK(dw__text_printf(&text, "%s%%y%d", i ? ", " : "", i));
    OK(dw__text_printf(&text, " = fused(%%x) {body=\"t0=neg(i0)"));
    for (int i = 1; i < RESULTS; i++) OK(dw__text_printf(&text, ";t%d=add(t%d,i0)", i, i - 1));
    for (int i = 0; i < RESULTS; i++) OK(dw__text_printf(&text, "%st%d", i ? "," : ";out(", i));
    OK(dw__text_printf(&text, ")\"}\n%%k = concat("));
    for (int i = 0; i < RESULTS; i++) OK(dw__text_printf(&text, "%s%%y%d", i ? ", " : "", i));
    OK(dw__text_printf(&text, ") {axis=0}\n"
                              "%%c, %%ct, %%cs = quantize_tensor(%%y3) {scheme=\"fp8-tensor\"}\n"
                              "%%d, %%dt, %%ds = quantize_tensor(%%y37) {scheme=\"fp8-tensor\"}\n"
                              "return %%k, %%c, %%cs, %%d, %%ds\n"));
    check_graph(text.text, fill_numbers, 2);
    dw__text_free(&text);
}

#ifndef __SANITIZE_ADDRESS__

static double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
static double silu(double x) { return x / (1.0 + exp(-x)); }
static double gelu(double x) { return 0.5 * x * erfc(-x / sqrt(2.0)); }
static double gelu_tanh(double x) {
    return x * sigmoid(2.0 * sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x));
}
static double rsqrt(double x) { return 1.0 / sqrt(x); }
static double reciprocal(double x) { return 1.0 / x; }

static void fill_every(const dw__tensor *t) {
    for (int64_t i = 0; i < dw__tensor_count(t); i++) ((uint16_t *)t->data)[i] = (uint16_t)i;
}

/* The functions of F32 that programs compute for results of BF16 and F16, for every operand: little more than the one
 * rounding of the exact result. Sigmoids below 2^-126 are zero. */
static void short_functions_round_nearly_once(void **state) {
    (void)state;
    static const struct {
        const char *text;
        double (*exact)(double);
        double margin; /* more than the rounding, relative to it */
    } functions[] = {
        {"exp %s[65536]", exp, 0.01},
        {"tanh %s[65536]", tanh, 0.01},
        {"sigmoid %s[65536]", sigmoid, 0.01},
        {"silu %s[65536]", silu, 0.01},
        {"gelu %s[65536] approximate=none", gelu, 0.02},
        {"gelu %s[65536] approximate=tanh", gelu_tanh, 0.02},
        {"sqrt %s[65536]", sqrt, 0.01},
        {"rsqrt %s[65536]", rsqrt, 0.01},
        {"reciprocal %s[65536]", reciprocal, 0.01},
    };
    for (size_t i = 0; i < 2 * DW_COUNT(functions); i++) {
        const bool brain = i % 2;
        const double unit = brain ? 0x1p-8 : 0x1p-11, tiny = brain ? 0x1p-118 : 0x1p-25;
        const double largest = brain ? 0x1.fep127 : 65504.0;
        const double margin = 1.0 + functions[i / 2].margin;
        double worst = 0.0;
        char text[80];
        ops_case c;
        dw_graph *graph = NULL;
        ops_operands operands;
        attempt a = {.c = &c, .operands = &operands, .single = -1};
        snprintf(text, sizeof text, functions[i / 2].text, brain ? "bf16" : "f16");
        if (only && !strstr(text, only)) continue;
        OK(ops_case_parse(text, &c));
        OK(ops_case_graph(&c, &graph));
        OK(ops_operands_create(&c, OPS_CONTIGUOUS, OPS_NORMAL, 1, &operands));
        fill_every(&operands.tensors[0]);
        make_results(graph, &a);
        OK(run_graph(graph, &a));
        for (int64_t j = 0; j < 65536; j++) {
            const double x = ops_element(&operands.tensors[0], j);
            const double got = ops_element(&a.results[0], j), exact = functions[i / 2].exact(x);
            if (isnan(exact) ? isnan(got) : got == exact) continue;
            if (fabs(exact) > largest && fabs(got) >= largest) continue;
            const double error = fabs(got - exact) / (unit * fabs(exact) + tiny);
            if (!(error <= margin)) fail_msg("%s of %g is %g, expected %g", text, x, got, exact);
            if (error > worst) worst = error;
        }
        if (only) print_message("%s: %.4f of the rounding\n", text, worst);
        ops_block_destroy(&a.outputs[0]);
        ops_operands_destroy(&operands);
        dw_graph_destroy(graph);
    }
}
#endif

static const char *kernel_of_put(int64_t lines, int64_t indexes, int64_t places, bool all_lines) {
    const int64_t size[] = {lines, places};
    const dw_attr attrs[] = {{.key = DW_ATTR_KEY_AXIS, .integer = 1},
                             {.key = DW_ATTR_KEY_SIZE, .count = 2, .list = size}};
    const dw__tensor index = {NULL, DW_I64, 2, {lines - !all_lines, indexes}, {indexes, 1}},
                     addends = {NULL, DW_F32, 2, {lines - !all_lines, indexes}, {indexes, 1}},
                     sums = {NULL, DW_F32, 2, {lines, places}, {places, 1}};
    const dw__operation_call call = {.call = {.op = DW_OP_PUT_ALONG_ADD,
                                              .attr_count = 2,
                                              .attrs = attrs,
                                              .input_count = 2,
                                              .output_count = 1,
                                              .inputs = {index, addends},
                                              .outputs = {sums}}};
    dw__gpu_target gpu;
    OK(dw__gpu_target_named("sm_90a", &gpu));
    return dw__kernel_for(&call, &gpu, NULL)->name;
}

/* One thread would read all indexes of a line for each place; the router of a token has few. */
static void many_indexes_are_sorted(void **state) {
    (void)state;
    assert_string_equal(kernel_of_put(8192, 8, 64, true), "gather");   /* a router's gradient */
    assert_string_equal(kernel_of_put(1, 65536, 64, true), "scatter"); /* a histogram of choices */
    assert_string_equal(kernel_of_put(64, 4096, 4096, true), "scatter"); /* the gradient of sort */
    assert_string_equal(kernel_of_put(64, 4096, 4096, false), "gather");
    assert_string_equal(kernel_of_put(1, 300, 70, true), "gather");
}

/* Tensors whose offsets need 64 bits are too large for a test, so that a small program is compiled as if they did. */
static void offsets_of_64_bits_give_the_same_elements(void **state) {
    (void)state;
    enum { ROWS = 5, COLUMNS = 24, COUNT = ROWS * COLUMNS };
    const int64_t row = COLUMNS, one = 1;
    float x[COUNT], b[COLUMNS], y[COUNT];
    dw__operation_call c = {.call = {.op = DW_OP_ADD, .input_count = 2, .output_count = 1}};
    dw__tensor *tensors[] = {&c.call.inputs[0], &c.call.inputs[1], &c.call.outputs[0]};
    float *data[] = {x, b, y};
    const dw__context *context;
    static dw__body body; /* large */
    dw__elementwise_form form;
    dw__iteration it;
    dw__text source = {0};
    int64_t words[64];
    void *function, *arguments[] = {words};
    for (int i = 0; i < COUNT; i++) x[i] = (float)i, b[i % COLUMNS] = (float)(1000 * (i % COLUMNS));
    for (int i = 0; i < 3; i++) {
        *tensors[i] = i == 1 ? (dw__tensor){.dtype = DW_F32, .rank = 1, .shape = {COLUMNS}}
                             : (dw__tensor){.dtype = DW_F32, .rank = 2, .shape = {ROWS, COLUMNS}};
        tensors[i]->stride[0] = i == 1 ? one : row, tensors[i]->stride[1] = i == 1 ? 0 : one;
        OK(dw_device_allocate(device, dw__tensor_bytes(tensors[i]), &tensors[i]->data));
        OK(dw_device_copy_in(device, tensors[i]->data, data[i], dw__tensor_bytes(tensors[i])));
    }
    OK(dw__elementwise_body(&c.call, &body));
    dw__elementwise_form_of(&c.call, &body, &form, &it);
    assert_int_equal(form.vector, 4);
    assert_true(form.divides && !form.is_wide);
    form.is_wide = true;
    OK(dw__elementwise_source(&body, &form, &source));
    assert_true(dw__elementwise_words(&form) <= DW_COUNT(words));
    dw__elementwise_fill(&form, &it, &c, words);
    OK(dw__gpu_context(device, "elementwise", &context));
    OK(dw__jit_load(context,
                    &(dw__jit_variant){.source = "elementwise",
                                       .text = source.text,
                                       .entry = "elementwise",
                                       .arch = dw__gpu_arch(context->capability)},
                    0, &function));
    OK(context->device->launch(&(dw__launch){.name = "elementwise",
                                             .function = function,
                                             .grid = {1, 1, 1},
                                             .block = {DW__ELEMENTWISE_THREADS, 1, 1},
                                             .arguments = arguments}));
    OK(dw_device_copy_out(device, y, tensors[2]->data, sizeof y));
    for (int i = 0; i < COUNT; i++) assert_true(y[i] == x[i] + b[i % COLUMNS]);
    for (int i = 0; i < 3; i++)
        dw_device_release(device, tensors[i]->data, dw__tensor_bytes(tensors[i]));
    dw__text_free(&source);
}

/* -1, 0 and 1. */
static void fill_small(const dw__tensor *t, ops_random *random) {
    for (int64_t i = 0; t->rank >= 0 && i < dw__tensor_count(t); i++)
        dw__scalar_store(t->data, t->dtype, i,
                         (dw__scalar){.number = (double)(ops_random_bits(random) % 3) - 1.0});
}

/* Small integers, whose logits BF16 and F16 hold exactly: the statistics of forward then are as exact as F32's.
 * Backward rounds each element of dlogits by at most 2^-9 of its magnitude; the sum of so many, with random signs, is
 * rounded by less than 2^-12 sqrt(n) of the largest result. */
static void exact_logits_give_exact_statistics(void **state) {
    (void)state;
    static const char *const calls[] = {
        "linear_cross_entropy bf16[37,24] bf16[101,24] bf16[101] i64[37]:target101 reduction=mean "
        "label_smoothing=0.1",
        "linear_cross_entropy f16[37,24] f16[24,203] - i64[37]:target203 reduction=none "
        "ignore_index=3 transpose_w=0",
        "linear_cross_entropy bf16[3,5] bf16[1500,5] - i64[3]:target1500 reduction=sum",
        "linear_cross_entropy_backward bf16[37,24] bf16[203,24] bf16[203] - i64[37]:target203 "
        "f32[37] f32[] reduction=mean label_smoothing=0.1",
        "linear_cross_entropy_backward f16[37,24] f16[24,203] - - i64[37]:target203 f32[37] "
        "f32[37] reduction=none ignore_index=3 transpose_w=0",
    };
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        char reason[1200] = "";
        ops_case c;
        dw_graph *graph = NULL;
        ops_operands operands;
        ops_expectation expected = {0};
        attempt a = {.c = &c, .operands = &operands, .single = -1}, again = a;
        if (only && !strstr(calls[i], only)) continue;
        OK(ops_case_parse(calls[i], &c));
        OK(ops_case_graph(&c, &graph));
        OK(ops_operands_create(&c, OPS_CONTIGUOUS, OPS_NORMAL, 1, &operands));
        ops_random random = ops_random_start(5, "integers");
        for (uint32_t t = 0; t < 3; t++) fill_small(&operands.tensors[t], &random);
        make_results(graph, &a);
        make_results(graph, &again);
        OK(run_graph(graph, &a));
        OK(run_graph(graph, &again));
        OK(ops_expect(&c, graph, &operands, &expected));
        const bool backward = c.op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
        for (uint32_t o = 0; o < a.result_count; o++) {
            if (!ops_output_agrees(&expected, backward ? 0x1p12 : 16.0, &a.results[o], o, NULL,
                                   reason, sizeof reason))
                fail_msg("%s: result %u: %s", calls[i], o, reason);
            assert_memory_equal(a.outputs[o].data, again.outputs[o].data, a.outputs[o].bytes);
            ops_block_destroy(&a.outputs[o]);
            ops_block_destroy(&again.outputs[o]);
        }
        ops_expectation_destroy(&expected);
        ops_operands_destroy(&operands);
        dw_graph_destroy(graph);
    }
}

static int find_device(void **state) {
    (void)state;
    const char *name = getenv("DEEPWELL_TEST_DEVICE"), *compiler;
    if (dw_device_find(name ? name : "emulator:sm_90a", &device) != DW_OK)
        fail_msg("%s", dw_last_error());
#ifdef TEST_NVRTC
    if (!getenv("DEEPWELL_TEST_DEVICE")) setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    if (dw_jit_compiler(&compiler) == DW_OK) return 0;
    print_message("%s\n", dw_last_error());
    exit(0); /* the tests are skipped where there is no NVRTC */
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_elements_keep_their_order),
        cmocka_unit_test(sums_have_the_same_bits_again),
        cmocka_unit_test(quantization_of_any_bits_is_the_definitions),
        cmocka_unit_test(quantization_of_finite_numbers_is_the_definitions),
        cmocka_unit_test(quotients_in_the_middle_of_codes_are_the_definitions),
        cmocka_unit_test(programs_of_every_form_are_exact),
        cmocka_unit_test(programs_find_magnitudes),
        cmocka_unit_test(programs_of_many_results_find_magnitudes),
#ifndef __SANITIZE_ADDRESS__ /* results of 18 sources, the host's part of which the other tests run */
        cmocka_unit_test(short_functions_round_nearly_once),
#endif
        cmocka_unit_test(offsets_of_64_bits_give_the_same_elements),
        cmocka_unit_test(many_indexes_are_sorted),
        cmocka_unit_test(exact_logits_give_exact_statistics),
        cmocka_unit_test(every_operation_agrees_with_its_definition),
    };
    /* The calls of linear_cross_entropy have several blocks of rows or of classes. */
    setenv("DEEPWELL_LOGITS_BYTES", "5000", 0);
    only = argc > 1 ? argv[1] : NULL;
    return cmocka_run_group_tests(tests, find_device, NULL);
}
