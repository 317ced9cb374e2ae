/* Element types: sizes in memory, and codes as leaves and outputs of a graph. */
#include "deepwell/engine.h"
#include "kernel/reference/interpret.h"
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
        if ((call) != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                           \
    } while (0)

static void names_and_sizes(void **state) {
    static const struct {
        dw_dtype dtype;
        const char *name;
        int bits;
        size_t bytes;
        float most;
    } rows[] = {{DW_BOOL, "bool", 8, 1, 0},        {DW_I32, "i32", 32, 4, 0},
                {DW_I64, "i64", 64, 8, 0},         {DW_BF16, "bf16", 16, 2, 0x1.FEp127f},
                {DW_F16, "f16", 16, 2, 65504},     {DW_F32, "f32", 32, 4, 0},
                {DW_F64, "f64", 64, 8, 0},         {DW_E4M3, "e4m3", 8, 1, 448},
                {DW_E5M2, "e5m2", 8, 1, 57344},    {DW_E3M2, "e3m2", 8, 1, 28},
                {DW_E2M3, "e2m3", 8, 1, 7.5f},     {DW_E2M1, "e2m1", 4, 0, 6},
                {DW_E8M0, "e8m0", 8, 1, 0x1p127f}, {DW_UE4M3, "ue4m3", 8, 1, 448}};
    (void)state;
    assert_int_equal(DW_COUNT(rows), DW_DTYPE_COUNT);
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        assert_string_equal(dw_dtype_name(rows[i].dtype), rows[i].name);
        assert_int_equal(dw__dtype_find(rows[i].name), rows[i].dtype);
        assert_int_equal(dw_dtype_bits(rows[i].dtype), rows[i].bits);
        assert_int_equal(dw_dtype_bytes(rows[i].dtype), rows[i].bytes);
        assert_true(dw_dtype_max(rows[i].dtype) == rows[i].most);
    }
    assert_string_equal(dw_dtype_name(DW_DTYPE_COUNT), "?");
    assert_int_equal(dw_dtype_bits((dw_dtype)-1), 0);
    assert_int_equal(dw__dtype_find("fp8"), -1);
}

/* A row of E2M1 ends with its byte, whatever the rows before it have. */
static void bytes_of_tensors(void **state) {
    static const struct {
        dw_dtype dtype;
        int rank;
        int64_t shape[3], bytes;
    } rows[] = {
        {DW_E2M1, 0, {0}, 1},
        {DW_E2M1, 1, {0}, 0},
        {DW_E2M1, 1, {1}, 1},
        {DW_E2M1, 1, {5}, 3},
        {DW_E2M1, 2, {3, 5}, 9},
        {DW_E2M1, 3, {2, 3, 5}, 18},
        {DW_E2M1, 2, {5, 4}, 10},
        {DW_E2M1, 2, {0, 5}, 0},
        {DW_E2M1, 2, {5, 0}, 0},
        {DW_E4M3, 2, {3, 5}, 15},
        {DW_E3M2, 2, {3, 5}, 15},
        {DW_F64, 0, {0}, 8},
        {DW_F32, 3, {2, 3, 5}, 120},
        {DW_BF16, 2, {-1, 5}, -1},
        {DW_BF16, 2, {5, -1}, -1},
        {DW_F32, 2, {INT64_MAX / 8, INT64_MAX / 8}, -1},
        {DW_F64, 1, {INT64_MAX / 16}, -1},
        {DW_DTYPE_COUNT, 1, {5}, -1},
    };
    (void)state;
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        int64_t bytes = dw_tensor_bytes(rows[i].dtype, rows[i].rank, rows[i].shape);
        if (bytes != rows[i].bytes) fail_msg("row %zu has %lld bytes", i, (long long)bytes);
    }
}

static void strides_of_codes(void **state) {
    dw__tensor t = {.dtype = DW_E2M1, .rank = 3, .shape = {2, 3, 5}};
    (void)state;
    dw__tensor_set_contiguous(&t);
    assert_int_equal(t.stride[2], 1);
    assert_int_equal(t.stride[1], 6);
    assert_int_equal(t.stride[0], 18);
    assert_true(dw__tensor_is_contiguous(&t));
    assert_int_equal(dw__tensor_bytes(&t), 18);
    t.stride[1] = 5;
    assert_false(dw__tensor_is_contiguous(&t));
    t.dtype = DW_E4M3;
    t.stride[0] = 15;
    assert_true(dw__tensor_is_contiguous(&t));
}

static void operations_refuse_codes(void **state) {
    dw_graph *graph, *back;
    dw_value x, s, y;
    char *text;
    (void)state;
    OK(dw_graph_create(&graph));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_E2M1, 2, (dw_dim[]){3, 5}, &x));
    OK(dw_graph_leaf(graph, DW_ROLE_PARAMETER, "s", DW_E8M0, 2, (dw_dim[]){3, 1}, &s));
    static const dw_op ops[] = {DW_OP_NEG, DW_OP_EXP, DW_OP_IS_FINITE, DW_OP_STOP_GRADIENT,
                                DW_OP_RELU};
    for (size_t i = 0; i < DW_COUNT(ops); i++) {
        assert_int_equal(dw_graph_apply(graph, ops[i], 1, &x, 0, NULL, &y), DW_TYPE);
        assert_non_null(strstr(dw_last_error(), "x is e2m1, which it does not support"));
    }
    dw_attr perm = dw_attr_list(DW_ATTR_KEY_PERM, 2, (int64_t[]){1, 0});
    assert_int_equal(dw_graph_apply(graph, DW_OP_PERMUTE, 1, &s, 1, &perm, &y), DW_TYPE);
    assert_non_null(strstr(dw_last_error(), "permute: x is e8m0"));
    assert_int_equal(dw_graph_apply(graph, DW_OP_MATMUL, 2, (dw_value[]){x, s}, 0, NULL, &y),
                     DW_TYPE);
    dw_attr to = {.key = DW_ATTR_KEY_DTYPE, .integer = DW_E5M2};
    dw_value f;
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "f", DW_F32, 2, (dw_dim[]){3, 5}, &f));
    assert_int_equal(dw_graph_apply(graph, DW_OP_CAST, 1, &f, 1, &to, &y), DW_TYPE);
    assert_non_null(strstr(dw_last_error(), "cast: dtype is e5m2, which it does not give"));
    dw_attr body = dw_attr_string(DW_ATTR_KEY_BODY, "t0=cast_e4m3(i0);out(t0)");
    assert_int_equal(dw_graph_apply(graph, DW_OP_FUSED, 1, &f, 1, &body, &y), DW_PARSE);
    assert_int_equal(dw_graph_node_count(graph), 0);

    OK(dw_graph_add_output(graph, x));
    OK(dw_graph_verify(graph));
    OK(dw_graph_to_text(graph, &text));
    assert_non_null(strstr(text, "e2m1"));
    OK(dw_graph_from_text(text, &back));
    assert_int_equal(dw_value_dtype(back, dw_graph_find(back, "s")), DW_E8M0);
    dw_text_free(text);
    dw_graph_destroy(back);
    OK(dw_graph_to_json(graph, &text));
    OK(dw_graph_from_json(text, strlen(text), &back));
    assert_int_equal(dw_value_dtype(back, dw_graph_find(back, "x")), DW_E2M1);
    dw_text_free(text);
    dw_graph_destroy(back);
    dw_graph_destroy(graph);
}

/* A leaf of odd rows as an output, twice: whole bytes are placed and copied, and nothing behind them. */
static void codes_are_copied_whole(void **state) {
    dw_graph *graph;
    dw_dim rows;
    dw_value x;
    dw_engine *engine;
    dw_plan *plan;
    uint8_t from[9], to[2][10];
    (void)state;
    OK(dw_graph_create(&graph));
    OK(dw_graph_symbol(graph, "B", &rows));
    OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_E2M1, 2, (dw_dim[]){rows, 5}, &x));
    for (int i = 0; i < 2; i++) OK(dw_graph_add_output(graph, x));
    OK(dw_engine_create(graph, 0, NULL, 0, NULL, NULL, &engine));
    OK(dw_engine_plan(engine, (int64_t[]){3}, &plan));
    for (int i = 0; i < 9; i++) from[i] = (uint8_t)(17 * i + 3);
    memset(to, 0xA5, sizeof to);
    dw_binding leaf = {.data = from}, outputs[2] = {{.data = to[0]}, {.data = to[1]}};
    OK(dw_plan_forward(plan, NULL, &leaf, outputs, NULL));
    for (int i = 0; i < 2; i++) {
        assert_memory_equal(to[i], from, sizeof from);
        assert_int_equal(to[i][9], 0xA5);
    }
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* ---- codes and scales of a graph ------------------------------------------------------------- */

enum { ROWS = 37, COLS = 65, OUTPUTS = 5 };

/* quantize, and quantize_blocks with dequantize_blocks: y, scale; y, scale, and the codes as an output. */
static dw_graph *make_both(const char *scheme, int axis, const char *how) {
    char text[1024];
    dw_graph *graph;
    snprintf(text, sizeof text,
             "deepwell graph 1\n\ninput %%x: f32[%d, %d]\nseed %%seed: i64[2]\n\n"
             "%%y, %%t = quantize(%%x, %%seed) {scheme=\"%s\", axis=%d%s}\n"
             "%%c, %%s, %%u = quantize_blocks(%%x, %%seed) {scheme=\"%s\", axis=%d%s}\n"
             "%%z = dequantize_blocks(%%c, %%s) {scheme=\"%s\", axis=%d%s}\n\n"
             "return %%y, %%t, %%z, %%u, %%c\n",
             ROWS, COLS, scheme, axis, how, scheme, axis, how, scheme, axis,
             strstr(how, "square") ? ", square=1" : "");
    OK(dw_graph_from_text(text, &graph));
    return graph;
}

static void expect_equal(const dw__tensor *results, const char *scheme, int axis, const char *how) {
    for (int i = 0; i < 2; i++)
        if (memcmp(results[i].data, results[i + 2].data, dw__tensor_bytes(&results[i])) != 0)
            fail_msg("%s, axis %d%s: result %d differs", scheme, axis, how, i);
}

/* The values of codes and scales are quantize's, bit for bit, by the reference and by the engine's kernels; the
 * engine's codes are the reference's. Rows of codes of E2M1 are odd. */
static void codes_mean_what_quantize_gives(void **state) {
    static const char *const schemes[] = {"mxfp8",      "mxfp8-e5m2", "mxfp6",
                                          "mxfp6-e2m3", "mxfp4",      "nvfp4"};
    static const char *const hows[] = {"", ", square=1", ", hadamard=1",
                                       ", stochastic=1, stream=3"};
    static float x[ROWS * COLS];
    int64_t seed[2] = {7, 11};
    (void)state;
    for (int i = 0; i < ROWS * COLS; i++)
        x[i] = ldexpf((float)(i * 2654435761u % 1999) - 999.0f, i / 32 % 40 - 20);
    x[3] = NAN, x[200] = INFINITY, x[500] = -0.0f, x[700] = 0x1p-140f;
    for (size_t which = 0; which < DW_COUNT(schemes) * 2 * DW_COUNT(hows); which++) {
        const char *scheme = schemes[which / 8], *how = hows[which % 4];
        const int axis = (int)(which / 4 % 2);
        dw_graph *graph = make_both(scheme, axis, how);
        dw__tensor leaves[2] = {
            {.data = x, .dtype = DW_F32, .rank = 2, .shape = {ROWS, COLS}, .stride = {COLS, 1}},
            {.data = seed, .dtype = DW_I64, .rank = 1, .shape = {2}, .stride = {1}}};
        dw__tensor reference[OUTPUTS], results[OUTPUTS];
        dw__interpret_options plain = {false};
        OK(dw__interpret(graph, NULL, leaves, reference, &plain));
        expect_equal(reference, scheme, axis, how);

        dw_engine *engine;
        dw_plan *plan;
        dw_binding bound[2] = {{.data = x}, {.data = seed}}, outputs[OUTPUTS];
        OK(dw_engine_create(graph, 0, NULL, 0, NULL, NULL, &engine));
        OK(dw_engine_plan(engine, NULL, &plan));
        for (int i = 0; i < OUTPUTS; i++) {
            results[i] = reference[i];
            results[i].data = malloc(dw__tensor_bytes(&reference[i]) + 1);
            assert_non_null(results[i].data);
            ((uint8_t *)results[i].data)[dw__tensor_bytes(&reference[i])] = 0xA5;
            outputs[i] = (dw_binding){.data = results[i].data};
        }
        void *arena = dw__malloc_aligned(dw_plan_arena_bytes(plan) + 1);
        assert_non_null(arena);
        OK(dw_plan_forward(plan, arena, bound, outputs, NULL));
        expect_equal(results, scheme, axis, how);
        for (int i = 0; i < OUTPUTS; i++) {
            size_t bytes = dw__tensor_bytes(&reference[i]);
            if (memcmp(results[i].data, reference[i].data, bytes) != 0)
                fail_msg("%s, axis %d%s: the engine's result %d", scheme, axis, how, i);
            assert_int_equal(((uint8_t *)results[i].data)[bytes], 0xA5);
            free(results[i].data);
            dw__free_aligned(reference[i].data);
        }
        dw__free_aligned(arena);
        dw_plan_release(plan);
        dw_engine_destroy(engine);
        dw_graph_destroy(graph);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_sizes),        cmocka_unit_test(bytes_of_tensors),
        cmocka_unit_test(strides_of_codes),       cmocka_unit_test(operations_refuse_codes),
        cmocka_unit_test(codes_are_copied_whole), cmocka_unit_test(codes_mean_what_quantize_gives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
