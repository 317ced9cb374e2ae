/* The facts from which the engine plans, on every case of the driver's table: compares the flags of the operation table
 * with results of the reference kernels, and tests the kernels that choose the layout of their results or add to
 * them. */
#include "engine/views.h"
#include "graph/body.h"
#include "graph/internal.h"
#include "ops/ops_run_case.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

/* One case and its results. */
typedef struct computed {
    ops_case c;
    dw_graph *graph;
    ops_operands operands;
    ops_call *run;
    const dw__kernel *kernel;
} computed;

static const dw__kernel *reference_of(dw_op op) {
    const dw__kernel *const *kernel = dw__kernel_candidates(op, false);
    while (kernel[1]) kernel++;
    return *kernel;
}

static void compute(const char *text, computed *it) {
    OK(ops_case_parse(text, &it->c));
    OK(ops_case_graph(&it->c, &it->graph));
    OK(ops_operands_create(&it->c, OPS_CONTIGUOUS, OPS_NORMAL, 1, &it->operands));
    OK(ops_call_create(it->graph, &it->operands, &it->run));
    it->kernel = reference_of(it->c.op);
    OK(ops_call_bind(it->run, it->kernel));
    OK(it->kernel->run(&it->run->call, it->run->scratch.data));
}

static void forget(computed *it) {
    ops_call_destroy(it->run);
    ops_operands_destroy(&it->operands);
    dw_graph_destroy(it->graph);
}

static bool same_element(const dw__tensor *a, const dw__tensor *b, int64_t index) {
    double x = ops_element(a, index), y = ops_element(b, index);
    return x == y || (x != x && y != y);
}

static void expect_same(const char *text, const dw__tensor *a, const dw__tensor *b) {
    assert_int_equal(dw__tensor_count(a), dw__tensor_count(b));
    for (int64_t i = 0; i < dw__tensor_count(a); i++)
        if (!same_element(a, b, i)) fail_msg("%s: element %lld", text, (long long)i);
}

static dw__tensor moved(dw__tensor view, int64_t elements) {
    view.data = (char *)view.data + elements * (int64_t)dw_dtype_bytes(view.dtype);
    return view;
}

/* ---- views ----------------------------------------------------------------------------------- */

static dw_status check_view(void *context, const char *text, dw_dtype placeholder) {
    bool *seen = context;
    computed it;
    (void)placeholder;
    OK(ops_case_parse(text, &it.c));
    const dw__op_row *row = &dw__op_table[it.c.op];
    if (it.c.must_fail || row->view == DW__NO_VIEW) return DW_OK;
    compute(text, &it);
    const dw__call *call = &it.run->call;
    const dw__tensor *x = &call->inputs[0], *y = &call->outputs[0];
    dw__tensor view;
    int64_t offset;
    assert_true(dw__view_apply(row->view, x, y, call->attr_count, call->attrs, &view, &offset));
    view = moved(view, offset);
    expect_same(text, &view, y);
    if (dw__op_keeps_order(it.c.op)) expect_same(text, x, y);
    seen[it.c.op] = true;
    forget(&it);
    return DW_OK;
}

static void views_equal_the_results_of_their_operations(void **state) {
    (void)state;
    bool seen[DW_OP_COUNT] = {0};
    OK(ops_each_case(check_view, seen));
    for (int op = 0; op < DW_OP_COUNT; op++) {
        const dw__op_row *row = &dw__op_table[op];
        assert_int_equal(seen[op], row->view != DW__NO_VIEW);
        if (seen[op]) assert_true(row->min_inputs == 1 && row->max_inputs == 1);
    }
}

/* ---- concatenation --------------------------------------------------------------------------- */

static dw_status check_concatenation(void *context, const char *text, dw_dtype placeholder) {
    bool *seen = context;
    computed it;
    (void)placeholder;
    OK(ops_case_parse(text, &it.c));
    if (it.c.must_fail || !dw__op_table[it.c.op].concatenates) return DW_OK;
    compute(text, &it);
    const dw__call *call = &it.run->call;
    int axis = (int)dw__call_int(call, DW_ATTR_KEY_AXIS, 0);
    int64_t start = 0;
    for (uint32_t i = 0; i < call->input_count; i++) {
        dw__tensor slice = call->outputs[0];
        slice.shape[axis] = call->inputs[i].shape[axis];
        slice = moved(slice, start * slice.stride[axis]);
        expect_same(text, &slice, &call->inputs[i]);
        start += call->inputs[i].shape[axis];
    }
    assert_int_equal(start, call->outputs[0].shape[axis]);
    seen[it.c.op] = true;
    forget(&it);
    return DW_OK;
}

static void a_concatenation_holds_its_operands_side_by_side(void **state) {
    (void)state;
    bool seen[DW_OP_COUNT] = {0};
    OK(ops_each_case(check_concatenation, seen));
    for (int op = 0; op < DW_OP_COUNT; op++)
        assert_int_equal(seen[op], dw__op_table[op].concatenates);
}

/* ---- pointwise operations -------------------------------------------------------------------- */

static bool same_shape(const dw__tensor *a, const dw__tensor *b) {
    if (a->rank != b->rank) return false;
    return memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape) == 0;
}

/* Changes element `index` of operand `i`: results may differ at `index` alone. */
static void change_one(computed *it, const char *text, uint32_t i, int64_t index) {
    dw__call *call = &it->run->call;
    size_t size = dw_dtype_bytes(call->inputs[i].dtype);
    char *element = (char *)call->inputs[i].data + (size_t)index * size, kept[8];
    dw__tensor before[OPS_MAX_OUTPUTS];
    for (uint32_t o = 0; o < call->output_count; o++) {
        before[o] = call->outputs[o];
        before[o].data = test_malloc(it->run->outputs[o].bytes + 1);
        memcpy(before[o].data, call->outputs[o].data, it->run->outputs[o].bytes);
    }
    memcpy(kept, element, size);
    if (call->inputs[i].dtype == DW_BOOL)
        element[0] = !element[0];
    else
        memcpy(element, (char *)call->inputs[i].data + (index ? 0 : size), size);
    OK(it->kernel->run(call, it->run->scratch.data));
    for (uint32_t o = 0; o < call->output_count; o++) {
        for (int64_t at = 0; at < dw__tensor_count(&before[o]); at++)
            if (at != index && !same_element(&before[o], &call->outputs[o], at))
                fail_msg("%s: operand %u at %lld changes result %u at %lld", text, i,
                         (long long)index, o, (long long)at);
        test_free(before[o].data);
    }
    memcpy(element, kept, size);
    OK(it->kernel->run(call, it->run->scratch.data));
}

static dw_status check_pointwise(void *context, const char *text, dw_dtype placeholder) {
    bool *seen = context;
    computed it;
    (void)placeholder;
    OK(ops_case_parse(text, &it.c));
    if (it.c.must_fail || !dw__op_is_pointwise(it.c.op)) return DW_OK;
    compute(text, &it);
    const dw__call *call = &it.run->call;
    for (uint32_t i = 0; i < call->input_count; i++) {
        int64_t count = dw__tensor_count(&call->inputs[i]);
        if (it.c.inputs[i].fill == OPS_FILL_SEED || count < 2) continue;
        /* A program broadcasts it. */
        if (!same_shape(&call->inputs[i], &call->outputs[0])) continue;
        for (uint32_t o = 0; o < call->output_count; o++)
            assert_true(same_shape(&call->outputs[o], &call->outputs[0]));
        change_one(&it, text, i, 0);
        change_one(&it, text, i, count / 2);
        change_one(&it, text, i, count - 1);
        seen[it.c.op] = true;
    }
    forget(&it);
    return DW_OK;
}

static void a_pointwise_result_depends_on_one_element_of_each_operand(void **state) {
    (void)state;
    bool seen[DW_OP_COUNT] = {0};
    OK(ops_each_case(check_pointwise, seen));
    for (int op = 0; op < DW_OP_COUNT; op++)
        assert_int_equal(seen[op], dw__op_is_pointwise((dw_op)op));
}

/* ---- cost ------------------------------------------------------------------------------------ */

/* A cheap operation does a bounded number of floating-point operations for each byte that it has to
 * move, whatever the sizes. A matmul does not. */
static dw_status check_cost(void *context, const char *text, dw_dtype placeholder) {
    enum { MOST_PER_BYTE = 40 };
    double *most = context;
    ops_case c;
    dw_graph *graph = NULL;
    dw_cost cost;
    (void)placeholder;
    OK(ops_case_parse(text, &c));
    if (c.must_fail) return DW_OK;
    OK(ops_case_graph(&c, &graph));
    OK(dw_graph_cost(graph, NULL, &cost));
    double each = cost.bytes > 0 ? cost.flops / cost.bytes : 0;
    if (each > most[c.op]) most[c.op] = each;
    if (dw__op_is_cheap(c.op) && each > MOST_PER_BYTE) fail_msg("%s: %g for each byte", text, each);
    dw_graph_destroy(graph);
    return DW_OK;
}

static void cheap_operations_do_little_arithmetic_per_byte(void **state) {
    (void)state;
    static const dw_op products[] = {DW_OP_MATMUL, DW_OP_LINEAR, DW_OP_ATTENTION};
    double most[DW_OP_COUNT] = {0};
    OK(ops_each_case(check_cost, most));
    OK(ops_each_perf_case(check_cost, most));
    for (size_t i = 0; i < DW_COUNT(products); i++) {
        assert_false(dw__op_is_cheap(products[i]));
        assert_true(most[products[i]] > 40);
    }
}

/* ---- kernels --------------------------------------------------------------------------------- */

enum { NOT_TRIED, TRIED, WRITTEN }; /* results that are not contiguous */

/* The result lies in memory as if its axes before the last were exchanged, as a following permute requests it. */
static void exchange_axes(dw__tensor *result) {
    int a = result->rank - 3, b = result->rank - 2;
    result->stride[b] = result->shape[a] * result->shape[a + 2];
    result->stride[a] = result->shape[a + 2];
}

static dw_status check_layout(void *context, const char *text, dw_dtype placeholder) {
    char *seen = context;
    computed it;
    (void)placeholder;
    OK(ops_case_parse(text, &it.c));
    const dw__kernel *const *kernel = dw__kernel_candidates(it.c.op, false);
    while (*kernel && (*kernel)->results == DW__RESULTS_CONTIGUOUS) kernel++;
    if (it.c.must_fail || !*kernel) return DW_OK;
    compute(text, &it);
    dw__call *call = &it.run->call;
    dw__tensor contiguous[OPS_MAX_OUTPUTS];
    bool strided = false;
    it.kernel = *kernel;
    if (kernel_supports(it.kernel, call)) {
        OK(ops_call_bind(it.run, it.kernel));
        OK(it.kernel->run(call, it.run->scratch.data));
        for (uint32_t o = 0; o < call->output_count; o++) {
            contiguous[o] = call->outputs[o];
            contiguous[o].data = test_malloc(it.run->outputs[o].bytes + 1);
            memcpy(contiguous[o].data, call->outputs[o].data, it.run->outputs[o].bytes);
            if (call->outputs[o].rank < 3) continue;
            exchange_axes(&call->outputs[o]);
            strided |= !dw__tensor_is_contiguous(&call->outputs[o]);
        }
        if (strided && seen[it.c.op] == NOT_TRIED) seen[it.c.op] = TRIED;
        if (kernel_supports(it.kernel, call)) {
            ops_call_clear(it.run);
            OK(ops_call_bind(it.run, it.kernel));
            OK(it.kernel->run(call, it.run->scratch.data));
            for (uint32_t o = 0; o < call->output_count; o++)
                expect_same(text, &call->outputs[o], &contiguous[o]);
            if (strided) seen[it.c.op] = WRITTEN;
        }
        for (uint32_t o = 0; o < call->output_count; o++) test_free(contiguous[o].data);
    }
    assert_null(ops_call_damage(it.run));
    forget(&it);
    return DW_OK;
}

static void strided_results_have_the_bits_of_contiguous_ones(void **state) {
    (void)state;
    char seen[DW_OP_COUNT] = {0};
    OK(ops_each_case(check_layout, seen));
    for (int op = 0; op < DW_OP_COUNT; op++)
        if (seen[op] != NOT_TRIED)
            assert_int_equal(seen[op] == WRITTEN,
                             dw__kernel_results((dw_op)op, false) != DW__RESULTS_CONTIGUOUS);
    assert_int_equal(seen[DW_OP_FUSED], WRITTEN);
    assert_int_equal(seen[DW_OP_ATTENTION_BACKWARD], WRITTEN);
    assert_int_equal(seen[DW_OP_CONCAT], WRITTEN);
}

static dw_status check_accumulation(void *context, const char *text, dw_dtype placeholder) {
    bool *seen = context;
    computed it;
    (void)placeholder;
    OK(ops_case_parse(text, &it.c));
    if (it.c.must_fail || !dw__kernel_accumulates(it.c.op, false)) return DW_OK;
    compute(text, &it);
    dw__call *call = &it.run->call;
    float *result = call->outputs[0].data;
    int64_t count = dw__tensor_count(&call->outputs[0]);
    call->accumulates = true;
    const dw__operation_call whole = {.call = *call};
    const dw__kernel *kernel = dw__kernel_for(&whole, NULL, NULL);
    if (kernel) {
        float *sum = test_malloc(it.run->outputs[0].bytes + 1);
        for (int64_t i = 0; i < count; i++) {
            sum[i] = result[i] + (float)(i % 7);
            result[i] = (float)(i % 7);
        }
        OK(ops_call_bind(it.run, kernel));
        OK(kernel->run(call, it.run->scratch.data));
        /* The order of the sum differs. */
        for (int64_t i = 0; i < count; i++) assert_float_equal(result[i], sum[i], 1e-4f);
        test_free(sum);
        seen[it.c.op] = true;
    }
    forget(&it);
    return DW_OK;
}

static void an_accumulating_kernel_adds_to_its_output(void **state) {
    (void)state;
    bool seen[DW_OP_COUNT] = {0};
    OK(ops_each_case(check_accumulation, seen));
    for (int op = 0; op < DW_OP_COUNT; op++)
        assert_int_equal(seen[op], dw__kernel_accumulates((dw_op)op, false));
}

static void copy_operation_is_a_permute(void **state) {
    (void)state;
    float x[6] = {1, 2, 3, 4, 5, 6}, y[6] = {0};
    const float expected[6] = {1, 4, 2, 5, 3, 6};
    dw_attr attr;
    dw__call call = {.attr_count = 1, .attrs = &attr, .input_count = 1, .output_count = 1};
    call.op = dw__kernel_copy_op(2, &attr);
    call.inputs[0] = (dw__tensor){x, DW_F32, 2, {2, 3}, {3, 1}};
    call.outputs[0] = (dw__tensor){y, DW_F32, 2, {2, 3}, {1, 2}};
    OK(reference_of(call.op)->run(&call, NULL));
    assert_memory_equal(y, expected, sizeof y);
}

/* ---- bodies ---------------------------------------------------------------------------------- */

static void parse(const char *text, dw__body *body) {
    const dw_dtype dtypes[2] = {DW_F32, DW_F32};
    OK(dw__body_parse(text, 2, dtypes, body));
}

static void bodies_that_are_a_sum_are_recognised(void **state) {
    (void)state;
    static dw__body body;
    static const char *const sums[] = {"t0=add(i0,i1);out(t0)", "t0=add(i1,i0);out(t0)"};
    static const char *const others[] = {
        "t0=add(i0,i0);out(t0)",    "t0=sub(i0,i1);out(t0)",
        "t0=add(i0,c1);out(t0)",    "t0=add(i0,i1);t1=neg(t0);out(t1)",
        "t0=add(i0,i1);out(t0,t0)", "t0=add(i0,i1);out(i0)",
    };
    for (size_t i = 0; i < DW_COUNT(sums); i++) {
        parse(sums[i], &body);
        assert_true(dw__body_is_sum(&body));
    }
    for (size_t i = 0; i < DW_COUNT(others); i++) {
        parse(others[i], &body);
        if (dw__body_is_sum(&body)) fail_msg("%s", others[i]);
    }
}

static void bodies_know_which_inputs_results_may_overwrite(void **state) {
    (void)state;
    static dw__body body;
    parse("t0=mul(i0,i1);t1=add(t0,i1);out(t0,t1)", &body);
    assert_true(dw__body_may_overwrite(&body, 0, 0));
    assert_false(dw__body_may_overwrite(&body, 1, 0)); /* t1 reads it later */
    assert_true(dw__body_may_overwrite(&body, 0, 1) && dw__body_may_overwrite(&body, 1, 1));
    parse("t0=neg(i0);out(t0,i1)", &body);
    assert_true(dw__body_may_overwrite(&body, 0, 0));
    assert_false(dw__body_may_overwrite(&body, 1, 0)); /* it is a result */
    assert_false(dw__body_may_overwrite(&body, 0, 1)); /* a copied operand is not computed */
}

/* An activation's gradient with respect to both inputs, and its result. */
static void joint_bodies_compute_both_and_overwrite_inputs(void **state) {
    (void)state;
    static dw__body a, b, joint;
    static const uint16_t inputs[2] = {1, 2};
    const dw_dtype dtypes[3] = {DW_F32, DW_F32, DW_F32};
    dw__text text = {0};
    OK(dw__body_parse("t0=silu(i1);t1=mul(t0,i0);t2=exp(i2);t3=add(t2,t1);out(t3,t1,i2)", 3, dtypes,
                      &a));
    parse("t0=silu(i0);t1=mul(t0,i1);out(t1)", &b);
    assert_true(dw__body_join(&a, &b, inputs, 3, &joint));
    OK(dw__body_print(&joint, &text));
    /* silu is computed once; what other instructions read comes first. */
    assert_string_equal(text.text, "t0=silu(i1);t1=mul(t0,i0);t2=exp(i2);t3=add(t2,t1);"
                                   "t4=mul(t0,i2);out(t3,t1,i2,t4)");
    dw__text_free(&text);
    parse("t0=neg(i0);t1=exp(i1);t2=mul(t1,i0);out(t0,t2)", &a);
    assert_false(dw__body_may_overwrite(&a, 0, 0));
    parse("t0=abs(i1);out(t0)", &b);
    assert_true(dw__body_join(&a, &b, (const uint16_t[2]){0, 1}, 2, &joint));
    OK(dw__body_print(&joint, &text));
    assert_string_equal(text.text, "t0=exp(i1);t1=neg(i0);t2=mul(t0,i0);t3=abs(i1);out(t1,t2,t3)");
    dw__text_free(&text);
    /* 200 and 100 instructions are too many. */
    static dw__body longest;
    longest = (dw__body){.input_count = 1, .code_count = 200};
    for (uint16_t i = 0; i < 200; i++)
        longest.code[i] =
            (dw__body_code){.op = DW_OP_ADD,
                            .dtype = DW_F32,
                            .operand_dtype = DW_F32,
                            .operand_count = 2,
                            .operands = {{.source = DW_BODY_INPUT}, {DW_BODY_CONSTANT, 0, i}}};
    b = longest;
    for (uint16_t i = 0; i < 200; i++) b.code[i].operands[1].constant += 100;
    b.code_count = 100;
    assert_true(dw__body_join(&longest, &b, (const uint16_t[1]){0}, 1, &joint)); /* all alike */
    assert_int_equal(joint.code_count, 200);
    b.code_count = 200;
    assert_false(dw__body_join(&longest, &b, (const uint16_t[1]){0}, 1, &joint));
}

static void bodies_of_some_outputs_and_with_an_input_computed(void **state) {
    (void)state;
    static dw__body all, part, reader, made;
    const dw_dtype dtypes[4] = {DW_BF16, DW_F32, DW_F32, DW_F32};
    const bool second[3] = {false, true, false};
    uint16_t inputs[DW_MAX_INPUTS];
    dw__text text = {0};
    OK(dw__body_parse("t0=exp(i0);t1=silu(i1);t2=mul(t1,i3);t3=add(t2,c2);out(t0,t2,i2)", 4, dtypes,
                      &all));
    dw__body_select(&all, second, &part, inputs);
    OK(dw__body_print(&part, &text));
    assert_string_equal(text.text, "t0=silu(i0);t1=mul(t0,i1);out(t1)");
    assert_int_equal(part.input_count, 2);
    assert_int_equal(inputs[0], 1);
    assert_int_equal(inputs[1], 3);
    dw__text_free(&text);
    /* Input 1 is silu(i2) * i0; silu(i2) is computed once, and input 2 becomes input 1. */
    OK(dw__body_parse("t0=mul(i1,i0);t1=silu(i2);t2=add(t1,i1);out(t0,t2,i1)", 3, dtypes + 1,
                      &reader));
    assert_true(dw__body_inline(&reader, 1, &part, (const uint16_t[2]){2, 0}, &made));
    OK(dw__body_print(&made, &text));
    assert_string_equal(text.text, "t0=silu(i1);t1=mul(t0,i0);t2=mul(t1,i0);t3=add(t0,t1);"
                                   "out(t2,t3,t1)");
    assert_int_equal(made.input_count, 2);
    dw__text_free(&text);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void flags_agree_with_the_other_columns(void **state) {
    (void)state;
    const uint64_t body = UINT64_C(1) << DW_ATTR_KEY_BODY, axis = UINT64_C(1) << DW_ATTR_KEY_AXIS;
    for (int op = 0; op < DW_OP_COUNT; op++) {
        const dw__op_row *row = &dw__op_table[op];
        assert_int_equal(row->program, (row->required_attrs & body) != 0);
        if (row->concatenates) assert_true((row->required_attrs & axis) != 0);
        /* Elementwise rows and views are cheap without the flag. */
        if (row->cheap) assert_false(row->elementwise || row->view != DW__NO_VIEW);
        assert_false(row->program && row->elementwise);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(views_equal_the_results_of_their_operations),
        cmocka_unit_test(a_concatenation_holds_its_operands_side_by_side),
        cmocka_unit_test(a_pointwise_result_depends_on_one_element_of_each_operand),
        cmocka_unit_test(cheap_operations_do_little_arithmetic_per_byte),
        cmocka_unit_test(strided_results_have_the_bits_of_contiguous_ones),
        cmocka_unit_test(an_accumulating_kernel_adds_to_its_output),
        cmocka_unit_test(copy_operation_is_a_permute),
        cmocka_unit_test(bodies_that_are_a_sum_are_recognised),
        cmocka_unit_test(bodies_know_which_inputs_results_may_overwrite),
        cmocka_unit_test(joint_bodies_compute_both_and_overwrite_inputs),
        cmocka_unit_test(bodies_of_some_outputs_and_with_an_input_computed),
        cmocka_unit_test(flags_agree_with_the_other_columns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
