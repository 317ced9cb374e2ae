/* The graph: dims, shape rules and their messages, building, verification, text and JSON forms,
 * fused bodies, costs, and every allocation made to fail in turn. */
#include "base/base.h"
#include "deepwell/graph.h"
#include "graph/body.h"
#include "graph/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka requires the four headers above. */
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Operands of quantized_linear. */
#define LAYER(a, b, c, d, e, f)                                                                    \
    "forward_x=\"" a "\", forward_w=\"" b "\", dgrad_dy=\"" c "\", dgrad_w=\"" d                   \
    "\", wgrad_dy=\"" e "\", wgrad_x=\"" f "\""
#define LAYER_OF(scheme) LAYER(scheme, scheme, scheme, scheme, scheme, scheme)
#define MXFP8_LAYER LAYER_OF("mxfp8")
/* Operands of quantized_segment_linear. */
#define SEGMENTS_OF(scheme)                                                                        \
    "forward_x=\"" scheme "\", forward_w=\"" scheme "\", dgrad_dy=\"" scheme                       \
    "\", dgrad_w=\"" scheme "\""
#define NVFP4_LAYER                                                                                \
    LAYER("nvfp4", "nvfp4+square", "nvfp4+stochastic", "nvfp4+square",                             \
          "nvfp4+hadamard+stochastic", "nvfp4+hadamard")

/* ---- helpers ------------------------------------------------------------------------------- */

static void assert_ok(dw_status status) {
    if (status != DW_OK) fail_msg("%s: %s", dw_status_name(status), dw_last_error());
}

static void assert_message(const char *part) {
    if (!strstr(dw_last_error(), part))
        fail_msg("the message \"%s\" does not contain \"%s\"", dw_last_error(), part);
}

static void assert_fails(dw_status status, dw_status expected, const char *part) {
    if (status != expected)
        fail_msg("%s instead of %s (%s); expected \"%s\"", dw_status_name(status),
                 dw_status_name(expected), status == DW_OK ? "" : dw_last_error(), part);
    assert_message(part);
}

static dw_graph *new_graph(void) {
    dw_graph *graph = NULL;
    assert_ok(dw_graph_create(&graph));
    return graph;
}

static dw_dim parse(dw_graph *graph, const char *text) {
    dw_dim dim = 0;
    assert_ok(dw_dim_parse(graph, text, &dim));
    return dim;
}

static void assert_dim(const dw_graph *graph, dw_dim dim, const char *expected) {
    char text[256];
    size_t length = dw_dim_text(graph, dim, text, sizeof text);
    assert_string_equal(text, expected);
    assert_int_equal(length, strlen(expected));
}

/* "f32[B, 4] i64[B]" of a node's outputs */
static void describe_outputs(const dw_graph *graph, dw_node node, char *text, size_t bytes) {
    size_t length = 0;
    for (uint32_t i = 0; i < dw_node_output_count(graph, node); i++) {
        dw_value value = dw_node_output(graph, node, i);
        length += (size_t)snprintf(
            text + length, bytes - length, "%s%s%s", i > 0 ? " " : "",
            dw_dtype_name(dw_value_dtype(graph, value)),
            dw__shape_words(graph, dw_value_rank(graph, value), dw_value_shape(graph, value)).text);
    }
}

/* ---- dims ---------------------------------------------------------------------------------- */

static void dims_are_canonical(void **state) {
    (void)state;
    static const struct {
        const char *text, *canonical;
    } cases[] = {
        {"0", "0"},
        {"7", "7"},
        {"B", "B"},
        {" S * B ", "B*S"},
        {"1 + S*B", "B*S + 1"},
        {"2*3*B", "6*B"},
        {"B - B", "0"},
        {"B*S - S*B + 4", "4"},
        {"-B + S", "-B + S"},
        {"S*S + B*S + B*B", "B*B + B*S + S*S"},
        {"3 + 2*B - 1*B + 0*S", "B + 3"},
        {"B*0", "0"},
        {"9223372036854775807", "9223372036854775807"},
        {"ceil(B/32)", "ceil(B/32)"},
        {"ceil(64*B + 2/32)", "2*B + 1"},
        {"2*ceil( (S + 32*B)/32 )*S", "2*B*S + 2*S*ceil(S/32)"},
        {"ceil(48*B*S/64)", "ceil(3*B*S/4)"},
        {"ceil(32*ceil(B/32)/128)", "ceil(B/128)"},
        {"ceil(ceil(3*B/2)/3)", "ceil(B/2)"},
        {"ceil(ceil(3*ceil(2*B/5)/2)/3)", "ceil(B/5)"},
        {"ceil((S + 1)/4) - ceil((1 + S)/4)", "0"},
        {"ceil((ceil(B/3) + S)/2)", "ceil((S + ceil(B/3))/2)"},
    };
    dw_graph *graph = new_graph();
    dw_dim b, s;
    assert_ok(dw_graph_symbol(graph, "B", &b));
    assert_ok(dw_graph_symbol(graph, "S", &s));
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_dim dim = parse(graph, cases[i].text);
        assert_dim(graph, dim, cases[i].canonical);
        assert_true(parse(graph, cases[i].canonical) == dim);
    }
    assert_int_equal(dw_graph_symbol_count(graph), 2);
    assert_string_equal(dw_graph_symbol_name(graph, 1), "S");
    dw_graph_destroy(graph);
}

static void dims_reject_malformed_text(void **state) {
    (void)state;
    static const char *const cases[] = {
        "",          "+",          "B +",     "B B",     "2**B",
        "(B)",       "B^2",        "1.5",     "B*-1",    "9223372036854775808",
        "B*",        "é",          "B\n",     "ceil(B)", "ceil(B/0)",
        "ceil(B/S)", "ceil((B/2)", "ceil(B/2"};
    dw_graph *graph = new_graph();
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_dim dim;
        assert_int_not_equal(dw_dim_parse(graph, cases[i], &dim), DW_OK);
    }
    assert_int_equal(dw_graph_symbol_count(graph), 0); /* those of a failed text are forgotten */
    dw_dim dim;
    assert_fails(dw_graph_symbol(graph, "2B", &dim), DW_INVALID_ARGUMENT,
                 "\"2B\" is not a symbol name");
    assert_fails(dw_dim_parse(graph, "B + ?", &dim), DW_PARSE, "at byte 5");
    dw_graph_destroy(graph);
}

/* The value of a quotient is the dividend's divided and rounded up, in every graph that it is copied to. */
static void quotients_round_up(void **state) {
    (void)state;
    static const char *const dividends[] = {"B",         "3*B*S + 7",           "B - 5",
                                            "2*B - 3*S", "ceil(B/3)*S + 4*B*S", "0"};
    dw_graph *graph = new_graph(), *copy = new_graph();
    parse(graph, "B + S");
    parse(copy, "T");
    assert_ok(dw__import_symbols(copy, graph));
    for (size_t i = 0; i < DW_COUNT(dividends); i++)
        for (int64_t divisor = 1; divisor < 70; divisor += 3)
            for (int64_t b = 0; b < 200; b += 7) {
                const int64_t sizes[] = {b, 5}, moved[] = {-1, b, 5};
                int64_t expected, value;
                dw_dim dim, imported, dividend = parse(graph, dividends[i]);
                if (dw_dim_eval(graph, dividend, sizes, &expected) != DW_OK) continue;
                expected = (expected + divisor - 1) / divisor;
                assert_ok(dw__dim_ceil_div(graph, dividend, divisor, &dim));
                assert_ok(dw_dim_eval(graph, dim, sizes, &value));
                assert_int_equal(value, expected);
                assert_ok(dw__import_dim(copy, graph, dim, &imported));
                assert_ok(dw_dim_eval(copy, imported, moved, &value));
                assert_int_equal(value, expected);
            }
    dw_dim dim = parse(graph, "B");
    assert_fails(dw__dim_ceil_div(graph, dim, 0, &dim), DW_SHAPE, "expected a positive number");
    dw_status status = DW_OK;
    for (int i = 0; i < 9 && status == DW_OK; i++) {
        assert_ok(dw_dim_add(graph, dim, 1, &dim));
        status = dw__dim_ceil_div(graph, dim, 2, &dim);
    }
    assert_fails(status, DW_UNSUPPORTED, "nested");
    dw_graph_destroy(graph);
    dw_graph_destroy(copy);
}

/* Each level has 16 times the factors of the one before. Evaluating, writing and copying a dim takes as many steps as
 * it has factors, so that a dim with more than 4096 is refused where it is made. */
static void quotients_of_products_are_bounded(void **state) {
    static const int64_t size = 3;
    (void)state;
    dw_graph *graph = new_graph(), *copy = new_graph();
    dw_dim base = parse(graph, "B"), dim = 0, imported;
    dw_status status = DW_OK;
    int level = 0;
    while (status == DW_OK && level < 8) {
        dim = base;
        for (int i = 1; i < 16 && status == DW_OK; i++) status = dw_dim_mul(graph, dim, base, &dim);
        if (status == DW_OK) status = dw__dim_ceil_div(graph, dim, 43046720, &base);
        level += status == DW_OK;
    }
    assert_fails(status, DW_UNSUPPORTED, "more than 4096 factors");
    assert_int_equal(level, 2); /* 16 * (1 + 16 * (1 + 16)) are too many */
    int64_t value;
    assert_ok(dw_dim_eval(graph, base, &size,
                          &value)); /* the first level is 2, as 3^16 / (3^16 - 1) rounded up */
    assert_int_equal(value, 1);
    assert_ok(dw__import_dim(copy, graph, base, &imported));
    assert_ok(dw_dim_eval(copy, imported, &size, &value));
    assert_int_equal(value, 1);
    dw_graph_destroy(graph);
    dw_graph_destroy(copy);
}

/* (a + b) - b = a, (a * b) / b = a, and evaluation is a homomorphism: on random polynomials. */
static void dims_algebra_holds(void **state) {
    (void)state;
    const int64_t sizes[3] = {3, 7, 11};
    dw_graph *graph = new_graph();
    uint32_t random = 12345;
    dw_dim dims[40];
    parse(graph, "B + S + T");
    for (size_t i = 0; i < DW_COUNT(dims); i++) {
        static const char *const factors[] = {"B", "S", "T", "2", "5"};
        char text[128] = "1";
        for (int k = 0; k < 4; k++) {
            random = random * 1664525 + 1013904223;
            size_t length = strlen(text);
            snprintf(text + length, sizeof text - length, "%s%s", random >> 30 ? "*" : " + ",
                     factors[(random >> 16) % DW_COUNT(factors)]);
        }
        dims[i] = parse(graph, text);
    }
    for (size_t i = 0; i < DW_COUNT(dims); i++) {
        for (size_t k = 0; k < DW_COUNT(dims); k++) {
            dw_dim sum, product, back;
            int64_t a, b, value;
            assert_ok(dw_dim_eval(graph, dims[i], sizes, &a));
            assert_ok(dw_dim_eval(graph, dims[k], sizes, &b));
            assert_ok(dw_dim_add(graph, dims[i], dims[k], &sum));
            assert_ok(dw_dim_eval(graph, sum, sizes, &value));
            assert_true(value == a + b);
            assert_ok(dw_dim_sub(graph, sum, dims[k], &back));
            assert_true(back == dims[i]);
            assert_ok(dw_dim_mul(graph, dims[i], dims[k], &product));
            assert_ok(dw_dim_eval(graph, product, sizes, &value));
            assert_true(value == a * b);
            assert_ok(dw_dim_div(graph, product, dims[k], &back));
            assert_true(back == dims[i]);
        }
    }
    dw_graph_destroy(graph);
}

static void dims_fail_clearly(void **state) {
    (void)state;
    dw_graph *graph = new_graph();
    dw_dim b = parse(graph, "B"), dim;
    int64_t sizes[1] = {4}, value;
    assert_fails(dw_dim_div(graph, parse(graph, "B + 1"), b, &dim), DW_SHAPE,
                 "B + 1 is not divisible by B");
    assert_fails(dw_dim_div(graph, 7, 2, &dim), DW_SHAPE, "7 is not divisible by 2");
    assert_fails(dw_dim_div(graph, b, 0, &dim), DW_SHAPE, "divided by 0");
    assert_fails(dw_dim_mul(graph, INT64_MAX, 2, &dim), DW_SHAPE, "exceeds 2^63");
    assert_fails(dw_dim_add(graph, INT64_MAX, 1, &dim), DW_SHAPE, "exceeds 2^63");
    assert_ok(dw_dim_sub(graph, b, 5, &dim));
    assert_fails(dw_dim_eval(graph, dim, sizes, &value), DW_SHAPE, "B - 5 is negative");
    sizes[0] = INT64_MAX / 2;
    assert_fails(dw_dim_eval(graph, parse(graph, "4*B"), sizes, &value), DW_SHAPE, "larger");
    dim = b;
    dw_status status = DW_OK;
    for (int i = 0; i < 16 && status == DW_OK; i++) status = dw_dim_mul(graph, dim, b, &dim);
    assert_fails(status, DW_UNSUPPORTED, "more than 16 symbols");
    assert_fails(dw_dim_add(graph, b, -1000, &dim), DW_INVALID_ARGUMENT, "not of this graph");
    assert_ok(dw_dim_sub(graph, 3, 5, &dim));
    assert_dim(graph, dim, "-2");
    char text[4];
    assert_int_equal(dw_dim_text(graph, parse(graph, "1000*B"), text, sizeof text), 6);
    assert_string_equal(text, "100");
    dw_graph_destroy(graph);
}

/* ---- shape rules --------------------------------------------------------------------------- */

/* Parses one node in the text form over leaves "name: type; name: type". Checks the types of its results, or
 * the status and part of the message. */
typedef struct rule_case {
    const char *leaves, *node;
    dw_status status;
    const char *expected;
} rule_case;

static void write_rule(const rule_case *rule, char *text, size_t bytes) {
    size_t length = (size_t)snprintf(text, bytes, "deepwell graph 1\nsymbols B, S\n");
    for (const char *at = rule->leaves; *at;) {
        size_t span = strcspn(at, ";");
        length += (size_t)snprintf(text + length, bytes - length, "input %%%.*s\n", (int)span, at);
        at += span + (at[span] == ';');
        at += strspn(at, " ");
    }
    snprintf(text + length, bytes - length, "%s\n", rule->node);
}

static void check_rule(const rule_case *rule) {
    char text[2048], outputs[1024];
    dw_graph *graph = NULL;
    write_rule(rule, text, sizeof text);
    dw_status status = dw_graph_from_text(text, &graph);
    if (rule->status != DW_OK) {
        if (status == DW_OK) fail_msg("%s over %s is accepted", rule->node, rule->leaves);
        assert_null(graph);
        assert_fails(status, rule->status, rule->expected);
        return;
    }
    if (status != DW_OK) fail_msg("%s: %s", rule->node, dw_last_error());
    describe_outputs(graph, dw_graph_node_count(graph) - 1, outputs, sizeof outputs);
    if (strcmp(outputs, rule->expected) != 0)
        fail_msg("%s over %s gives %s; expected %s", rule->node, rule->leaves, outputs,
                 rule->expected);
    assert_ok(dw_graph_verify(graph));
    dw_graph_destroy(graph);
}

static void check_rules(const rule_case *rules, size_t count) {
    for (size_t i = 0; i < count; i++) check_rule(&rules[i]);
}
#define CHECK_RULES(rules) check_rules(rules, DW_COUNT(rules))

static void elementwise_rules(void **state) {
    (void)state;
    static const char *const floats[] = {"exp",        "log",   "log1p", "sqrt", "rsqrt",
                                         "reciprocal", "sin",   "cos",   "tanh", "erf",
                                         "sigmoid",    "floor", "ceil",  "relu", "silu"};
    static const char *const numbers[] = {"neg", "abs", "sign"};
    static const char *const binary[] = {"add", "sub", "mul", "div", "pow", "max", "min", "rem"};
    static const char *const orders[] = {"lt", "le", "gt", "ge"};
    char node[128], message[128];
    for (size_t i = 0; i < DW_COUNT(floats); i++) {
        snprintf(node, sizeof node, "%%y = %s(%%x)", floats[i]);
        snprintf(message, sizeof message, "%s: x is i32; expected a floating-point type",
                 floats[i]);
        check_rule(&(rule_case){"x: bf16[B, 4]", node, DW_OK, "bf16[B, 4]"});
        check_rule(&(rule_case){"x: i32[B, 4]", node, DW_TYPE, message});
    }
    for (size_t i = 0; i < DW_COUNT(numbers); i++) {
        snprintf(node, sizeof node, "%%y = %s(%%x)", numbers[i]);
        snprintf(message, sizeof message, "%s: x is bool; expected a number", numbers[i]);
        check_rule(&(rule_case){"x: i64[]", node, DW_OK, "i64[]"});
        check_rule(&(rule_case){"x: bool[]", node, DW_TYPE, message});
    }
    for (size_t i = 0; i < DW_COUNT(binary); i++) {
        snprintf(node, sizeof node, "%%z = %s(%%x, %%y)", binary[i]);
        snprintf(message, sizeof message, "%s: y is f64 but x is f32; expected one type",
                 binary[i]);
        check_rule(&(rule_case){"x: i32[3]; y: i32[3]", node, DW_OK, "i32[3]"});
        check_rule(&(rule_case){"x: f32[3]; y: f64[3]", node, DW_TYPE, message});
        snprintf(message, sizeof message, "%s: y [1, B] must be [B], which is x's shape",
                 binary[i]);
        check_rule(&(rule_case){"x: f32[B]; y: f32[1, B]", node, DW_SHAPE, message});
    }
    for (size_t i = 0; i < DW_COUNT(orders); i++) {
        snprintf(node, sizeof node, "%%z = %s(%%x, %%y)", orders[i]);
        check_rule(&(rule_case){"x: f16[3]; y: f16[3]", node, DW_OK, "bool[3]"});
        check_rule(&(rule_case){"x: bool[3]; y: bool[3]", node, DW_TYPE, "x is bool"});
    }
    static const rule_case others[] = {
        {"x: bool[3]", "%y = logical_not(%x)", DW_OK, "bool[3]"},
        {"x: f32[3]", "%y = logical_not(%x)", DW_TYPE, "logical_not: x is f32; expected bool"},
        {"x: f16[3]", "%y = is_finite(%x)", DW_OK, "bool[3]"},
        {"x: i32[3]", "%y = is_finite(%x)", DW_TYPE, "expected a floating-point type"},
        {"x: bool[3]; y: bool[3]", "%z = eq(%x, %y)", DW_OK, "bool[3]"},
        {"x: i32[3]; y: i32[3]", "%z = ne(%x, %y)", DW_OK, "bool[3]"},
        {"x: bool[3]; y: bool[3]", "%z = and(%x, %y)", DW_OK, "bool[3]"},
        {"x: i32[3]; y: i32[3]", "%z = or(%x, %y)", DW_TYPE, "or: x is i32; expected bool"},
        {"c: bool[S]; x: i64[S]; y: i64[S]", "%z = select(%c, %x, %y)", DW_OK, "i64[S]"},
        {"c: f32[S]; x: i64[S]; y: i64[S]", "%z = select(%c, %x, %y)", DW_TYPE,
         "select: c is f32; expected bool"},
        {"c: bool[S]; x: i64[S]; y: i32[S]", "%z = select(%c, %x, %y)", DW_TYPE,
         "y is i32 but x is i64"},
        {"c: bool[B]; x: i64[S]; y: i64[S]", "%z = select(%c, %x, %y)", DW_SHAPE,
         "x [S] must be [B], which is c's shape"},
        {"x: bool[S]", "%y = cast(%x) {dtype=f32}", DW_OK, "f32[S]"},
        {"x: bool[S]", "%y = cast(%x)", DW_PARSE, "cast: attribute dtype is required"},
        {"x: f32[S]", "%y = stop_gradient(%x)", DW_OK, "f32[S]"},
        {"x: f32[S]", "%y = gelu(%x) {approximate=\"tanh\"}", DW_OK, "f32[S]"},
        {"x: f32[S]", "%y = gelu(%x) {approximate=\"fast\"}", DW_PARSE,
         "approximate=\"fast\"; expected \"none\", \"tanh\""},
        {"x: f32[S]; d: f32[S]", "%y = gelu_backward(%x, %d) {approximate=\"none\"}", DW_OK,
         "f32[S]"},
        {"x: f32[S]; d: f32[S]", "%y = silu_backward(%x, %d)", DW_OK, "f32[S]"},
        {"x: f32[S]; d: f32[S]", "%y = swiglu(%x, %d)", DW_OK, "f32[S]"},
        {"x: f32[S]; d: f32[B]", "%y = swiglu(%x, %d)", DW_SHAPE,
         "up [B] must be [S], which is gate's shape"},
        {"x: f32[S]; s: i64[2]", "%y = dropout(%x, %s) {p=0.1, stream=3}", DW_OK, "f32[S]"},
        {"x: f32[S]; s: i64[3]", "%y = dropout(%x, %s) {p=0.1, stream=3}", DW_SHAPE,
         "seed [3] must be [2], which is Philox key and offset"},
        {"x: f32[S]; s: i64[2]", "%y = dropout(%x, %s) {p=1.5, stream=3}", DW_PARSE,
         "p=1.5; expected 0 to 1"},
        {"x: f32[S]; s: i64[2]", "%y = dropout(%x, %s) {p=0.1, stream=-1}", DW_PARSE, "stream=-1"},
        {"x: f32[S]", "%y = add(%x)", DW_PARSE, "add: 1 operands are given; expected at least 2"},
        {"x: f32[S]", "%y = add(%x, _)", DW_PARSE, "add: operand 1 (y) is absent"},
        {"x: f32[S]", "%y = exp(%x) {axis=0}", DW_PARSE, "axis is not one of its attributes"},
        {"x: f32[S]", "%y = softmax(%x) {axis=0, axis=0}", DW_PARSE, "axis is given twice"},
    };
    CHECK_RULES(others);
}

static void creation_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {"", "%y = constant() {shape=[B, 3], dtype=f32, value=-inf}", DW_OK, "f32[B, 3]"},
        {"", "%y = constant() {shape=[], dtype=bool, value=1}", DW_OK, "bool[]"},
        {"", "%y = constant() {shape=[], dtype=bool, value=2}", DW_TYPE,
         "value=2 is not a value of bool"},
        {"", "%y = constant() {shape=[], dtype=i32, value=0.5}", DW_TYPE, "not a value of i32"},
        {"", "%y = constant() {shape=[], dtype=i32, value=2147483648}", DW_TYPE,
         "not a value of i32"},
        {"", "%y = size() {dtype=i64, size=[B*S]}", DW_OK, "i64[]"},
        {"", "%y = size() {dtype=i64, size=[B, S]}", DW_PARSE, "size has 2 entries; expected 1"},
        {"", "%y = size() {dtype=bool, size=[B]}", DW_TYPE, "dtype is bool"},
        {"", "%y = iota() {dtype=i64, shape=[B, S], axis=1}", DW_OK, "i64[B, S]"},
        {"", "%y = iota() {dtype=i64, shape=[B, S], axis=2}", DW_PARSE, "axis=2; expected 0 to 1"},
        {"", "%y = iota() {dtype=i64, shape=[], axis=0}", DW_PARSE, "iota: axis=0"},
        {"s: i64[2]", "%y = random_uniform(%s) {shape=[S, 2], stream=0}", DW_OK, "f32[S, 2]"},
        {"s: i32[2]", "%y = random_uniform(%s) {shape=[S, 2], stream=0}", DW_TYPE,
         "seed is i32; expected i64"},
    };
    CHECK_RULES(rules);
}

static void moving_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {"x: f32[B, S, 6]", "%y = reshape(%x) {shape=[B*S, 2, 3]}", DW_OK, "f32[B*S, 2, 3]"},
        {"x: f32[]", "%y = reshape(%x) {shape=[1, 1]}", DW_OK, "f32[1, 1]"},
        {"x: f32[B, S + 1]", "%y = reshape(%x) {shape=[B*S + B]}", DW_OK, "f32[B*S + B]"},
        {"x: f32[B, S]", "%y = reshape(%x) {shape=[B, S, 2]}", DW_SHAPE,
         "reshape: x [B, S] has B*S elements, but shape=[B, S, 2] has 2*B*S"},
        {"x: f32[2, B, 3]", "%y = permute(%x) {perm=[2, 0, 1]}", DW_OK, "f32[3, 2, B]"},
        {"x: f32[2, B, 3]", "%y = permute(%x) {perm=[2, 0, 0]}", DW_PARSE, "perm[2] is 0"},
        {"x: f32[2, B, 3]", "%y = permute(%x) {perm=[0, 1]}", DW_PARSE,
         "perm has 2 entries; expected 3"},
        {"x: f32[1, 3]", "%y = broadcast(%x) {shape=[B, S, 3]}", DW_OK, "f32[B, S, 3]"},
        {"x: f32[2, 3]", "%y = broadcast(%x) {shape=[B, 3]}", DW_SHAPE,
         "broadcast: x [2, 3] does not broadcast to shape=[B, 3]"},
        {"x: f32[2, 3]", "%y = broadcast(%x) {shape=[3]}", DW_SHAPE, "does not broadcast"},
        {"x: f32[B, 10]", "%y = slice(%x) {start=[0, 1], limit=[B, 10], step=[1, 4]}", DW_OK,
         "f32[B, 3]"},
        {"x: f32[1024, 8]", "%y = slice(%x) {start=[0, 0], limit=[S, 8]}", DW_OK, "f32[S, 8]"},
        {"x: f32[S]", "%y = slice(%x) {start=[1], limit=[S]}", DW_OK, "f32[S - 1]"},
        {"x: f32[8]", "%y = slice(%x) {start=[0], limit=[9]}", DW_SHAPE,
         "slice: limit[0] is 9; expected at most x's dim 0, 8"},
        {"x: f32[8]", "%y = slice(%x) {start=[5], limit=[4]}", DW_SHAPE, "start[0] is 5"},
        {"x: f32[S]", "%y = slice(%x) {start=[0], limit=[S + 1]}", DW_SHAPE, "limit[0] is S + 1"},
        {"x: f32[S]", "%y = slice(%x) {start=[0], limit=[S], step=[2]}", DW_UNSUPPORTED,
         "step[0] is 2 over the symbolic length S"},
        {"x: f32[8]", "%y = slice(%x) {start=[0], limit=[8], step=[0]}", DW_PARSE, "step[0] is 0"},
        {"x: f32[S, 2]", "%y = pad(%x) {low=[1, 0], high=[S, 3], value=-inf}", DW_OK,
         "f32[2*S + 1, 5]"},
        {"x: i32[2]", "%y = pad(%x) {low=[1], high=[0], value=0.5}", DW_TYPE, "pad: value=0.5"},
        {"x: i32[2]", "%y = pad(%x) {low=[1, 1], high=[0]}", DW_PARSE, "low has 2 entries"},
        {"x: i32[2]", "%y = pad(%x) {low=[-1], high=[0]}", DW_SHAPE, "\"-1\" is negative"},
        {"x: f32[B, 2]; y: f32[S, 2]", "%z = concat(%x, %y, %x) {axis=0}", DW_OK,
         "f32[2*B + S, 2]"},
        {"x: f32[B, 2]; y: f32[B, 3]", "%z = concat(%x, %y) {axis=0}", DW_SHAPE,
         "all dims but axis 0 must be equal, and dim 1 is not"},
        {"x: f32[B, 2]; y: f32[2]", "%z = concat(%x, %y) {axis=0}", DW_SHAPE,
         "has rank 1; expected rank 2"},
        {"x: f32[B, 2]; y: f16[B, 2]", "%z = concat(%x, %y) {axis=0}", DW_TYPE,
         "x is f16 but x is f32"},
        {"x: f32[5, 7, 9]; i: i32[B, S]", "%y = take(%x, %i) {axis=1}", DW_OK, "f32[5, B, S, 9]"},
        {"x: f32[5]; i: i64[]", "%y = take(%x, %i) {axis=0}", DW_OK, "f32[]"},
        {"x: f32[5]; i: f32[2]", "%y = take(%x, %i) {axis=0}", DW_TYPE,
         "take: i is f32; expected i32 or i64"},
        {"x: f32[1,1,1,1,1]; i: i32[1,1,1,1,1]", "%y = take(%x, %i) {axis=0}", DW_SHAPE,
         "the result would have rank 9"},
        {"x: f32[B, 9]; i: i64[B, 1]", "%y = take_along(%x, %i) {axis=1}", DW_OK, "f32[B, 1]"},
        {"x: f32[3, 9]; i: i64[4, 1]", "%y = take_along(%x, %i) {axis=1}", DW_SHAPE,
         "i's dim 0 is 4; expected at most x's dim 0, 3"},
        {"x: f32[3, 9]; i: i64[4]", "%y = take_along(%x, %i) {axis=1}", DW_SHAPE,
         "i [4] has rank 1"},
        {"i: i32[B, S]; u: f32[5, B, S, 9]", "%y = scatter_add(%i, %u) {axis=1, size=[7]}", DW_OK,
         "f32[5, 7, 9]"},
        {"i: i32[B, S]; u: f32[5, S, B, 9]", "%y = scatter_add(%i, %u) {axis=1, size=[7]}",
         DW_SHAPE, "u [5, S, B, 9] must have i's dims [B, S] from axis 1 on"},
        {"i: i32[B, S]; u: f32[5]", "%y = scatter_add(%i, %u) {axis=0, size=[7]}", DW_SHAPE,
         "has fewer dims"},
        {"i: i32[B, 2]; u: f32[B, 2]", "%y = put_along_add(%i, %u) {axis=1, size=[B, 9]}", DW_OK,
         "f32[B, 9]"},
        {"i: i32[B, 2]; u: f32[B, 3]", "%y = put_along_add(%i, %u) {axis=1, size=[B, 9]}", DW_SHAPE,
         "i [B, 2] must be [B, 3], which is u's shape"},
        {"i: i32[4, 2]; u: f32[4, 2]", "%y = put_along_add(%i, %u) {axis=1, size=[3, 9]}", DW_SHAPE,
         "i's dim 0 is 4; expected at most size 0, 3"},
    };
    CHECK_RULES(rules);
}

static void reducing_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {"x: f32[B, S, 3]", "%y = reduce_sum(%x) {axes=[0, 2]}", DW_OK, "f32[S]"},
        {"x: f32[B, S, 3]", "%y = reduce_max(%x) {axes=[0, 2], keep=1}", DW_OK, "f32[1, S, 1]"},
        {"x: bool[B, S]", "%y = reduce_max(%x) {axes=[0]}", DW_OK, "bool[S]"},
        {"x: bool[B, S]", "%y = reduce_min(%x) {axes=[]}", DW_OK, "bool[B, S]"},
        {"x: bool[B, S]", "%y = reduce_sum(%x) {axes=[0]}", DW_TYPE, "reduce_sum: x is bool"},
        {"x: f32[B, S]", "%y = reduce_prod(%x) {axes=[1, 0]}", DW_PARSE, "axes[1] is 0"},
        {"x: f32[B, S]", "%y = reduce_prod(%x) {axes=[2]}", DW_PARSE, "axes[0] is 2"},
        {"x: f32[B, S]", "%y = reduce_prod(%x) {axes=[0], keep=2}", DW_PARSE,
         "keep=2; expected 0 or 1"},
        {"x: i32[B, S]", "%y = mean(%x) {axes=[0]}", DW_TYPE, "mean: x is i32"},
        {"x: bf16[B, S]", "%y = mean(%x) {axes=[0]}", DW_OK, "bf16[S]"},
        {"x: f32[B, S]", "%y = arg_max(%x) {axis=1}", DW_OK, "i64[B]"},
        {"x: f32[B, S]", "%y = arg_min(%x) {axis=1, keep=1}", DW_OK, "i64[B, 1]"},
        {"x: f32[B, S]", "%y = arg_min(%x) {axis=-1}", DW_PARSE, "negative axes are not accepted"},
        {"x: i32[B, S]", "%y = cumsum(%x) {axis=1, reverse=1}", DW_OK, "i32[B, S]"},
        {"x: f32[B, S]", "%v, %i = sort(%x) {axis=1, descending=1}", DW_OK, "f32[B, S] i64[B, S]"},
        {"x: f32[B, S]", "%v, %i = top_k(%x) {axis=1, size=[2]}", DW_OK, "f32[B, 2] i64[B, 2]"},
        {"x: f32[B, 8]", "%v, %i = top_k(%x) {axis=1, size=[9]}", DW_SHAPE,
         "size is 9; expected at most"},
        {"x: f32[B, 8]", "%v = top_k(%x) {axis=1, size=[2]}", DW_PARSE,
         "1 outputs are given; top_k has 2"},
        {"x: f32[B, 8]", "%y = softmax(%x) {axis=1}", DW_OK, "f32[B, 8]"},
        {"x: f32[B, 8]", "%y = log_softmax(%x) {axis=2}", DW_PARSE, "log_softmax: axis=2"},
        {"x: f32[B]; d: f32[B]", "%y = softmax_backward(%x, %d) {axis=0}", DW_OK, "f32[B]"},
        {"x: f32[B]; d: f32[S]", "%y = log_softmax_backward(%x, %d) {axis=0}", DW_SHAPE,
         "dy [S] must be [B], which is y's shape"},
    };
    CHECK_RULES(rules);
}

static void product_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {"a: f32[B, S, 3]; b: f32[B, 3, 5]", "%y = matmul(%a, %b)", DW_OK, "f32[B, S, 5]"},
        {"a: f32[B, 3, S]; b: f32[B, 5, 3]", "%y = matmul(%a, %b) {transpose_a=1, transpose_b=1}",
         DW_OK, "f32[B, S, 5]"},
        {"a: f32[2, 3]; b: f32[4, 5]", "%y = matmul(%a, %b)", DW_SHAPE,
         "the inner dims are 3 and 4, and must be equal"},
        {"a: f32[B, 2, 3]; b: f32[S, 3, 5]", "%y = matmul(%a, %b)", DW_SHAPE,
         "differ in batch dim 0"},
        {"a: f32[3]; b: f32[3]", "%y = matmul(%a, %b)", DW_SHAPE,
         "a [3] has rank 1; expected rank 2 or more"},
        {"a: i32[2, 3]; b: i32[3, 5]", "%y = matmul(%a, %b)", DW_TYPE, "matmul: a is i32"},
        {"x: f32[B, S, 7]; w: f32[5, 7]; b: f32[5]", "%y = linear(%x, %w, %b)", DW_OK,
         "f32[B, S, 5]"},
        {"x: f32[7]; w: f32[7, 5]", "%y = linear(%x, %w) {transpose_w=0}", DW_OK, "f32[5]"},
        {"x: f32[B, 7]; w: f32[4, 5]", "%y = linear(%x, %w, _) {transpose_w=1}", DW_SHAPE,
         "linear: w is [4, 5] with transpose_w=1, so its last dim must equal x's last dim 7"},
        {"x: f32[B, 7]; w: f32[4, 5]", "%y = linear(%x, %w) {transpose_w=0}", DW_SHAPE,
         "its first dim must equal x's last dim 7"},
        {"x: f32[B, 7]; w: f32[4, 7]; b: f32[7]", "%y = linear(%x, %w, %b)", DW_SHAPE,
         "b [7] must be [4], which is [N] of w"},
        {"x: f32[B, 7]; w: bf16[4, 7]", "%y = linear(%x, %w)", DW_TYPE, "w is bf16 but x is f32"},
        {"a: bf16[B, 3]; b: bf16[3, 5]", "%y = matmul(%a, %b) {dtype=f32}", DW_OK, "f32[B, 5]"},
        {"a: f16[B, 3]; b: f16[3, 5]", "%y = matmul(%a, %b) {dtype=bf16}", DW_TYPE,
         "dtype=bf16 for operands of f16; expected f16 or f32"},
        {"a: f32[B, 3]; b: f32[3, 5]", "%y = matmul(%a, %b) {dtype=f64}", DW_TYPE,
         "dtype=f64 for operands of f32; expected f32"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"mxfp8\", axis=0}", DW_OK,
         "bf16[B, S] f32[]"},
        {"x: bf16[B, S]", "%y, %s = quantize(%x, _) {scheme=\"nvfp4\", axis=1, square=1}", DW_OK,
         "bf16[B, S] f32[]"},
        {"x: f32[B, S]; e: i64[2]",
         "%y, %s = quantize(%x, %e) {scheme=\"nvfp4\", axis=1, hadamard=1, stochastic=1, stream=4}",
         DW_OK, "bf16[B, S] f32[]"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"fp8\", axis=0}", DW_PARSE,
         "quantize: there is no scheme \"fp8\": expected bf16, fp32"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"fp8-block\", axis=0}", DW_UNSUPPORTED,
         "quantize: the scheme fp8-block is not supported: expected bf16, fp8-tensor, "
         "mxfp8, mxfp8-e5m2, mxfp6, mxfp6-e2m3, mxfp4, nvfp4 or fp8-tensor-e5m2"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"fp8-tensor\", axis=0, square=1}",
         DW_PARSE, "square=1 with scheme=fp8-tensor, which has no blocks"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"nvfp4\", axis=0, scale_rule=\"ceil\"}",
         DW_PARSE, "scale_rule=ceil with scheme=nvfp4; only MX has rules"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"mxfp8\", axis=0, scale_rule=\"amax\"}",
         DW_PARSE, "scale_rule is \"amax\"; expected rceil, floor or ceil"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"mxfp8\", axis=2}", DW_PARSE, "axis=2"},
        {"x: f32[B, S, 2]", "%y, %s = quantize(%x) {scheme=\"mxfp8\", axis=2}", DW_SHAPE,
         "x [B, S, 2] has rank 3; expected rank 2"},
        {"x: f64[B, S]", "%y, %s = quantize(%x) {scheme=\"bf16\", axis=1}", DW_TYPE,
         "x is f64; expected f32, bf16 or f16"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"mxfp8\", axis=1, square=1}", DW_OK,
         "bf16[B, S] f32[]"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"bf16\", axis=1, square=1}", DW_PARSE,
         "square=1 with scheme=bf16, which has no blocks"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"nvfp4\", axis=1, square=1, hadamard=1}",
         DW_PARSE, "hadamard=1 with square=1"},
        {"x: f32[B, S]", "%y, %s = quantize(%x) {scheme=\"nvfp4\", axis=1, stochastic=1, stream=0}",
         DW_PARSE, "seed is absent; expected one, for stochastic rounding"},
        {"x: f32[B, S]; e: i64[2]",
         "%y, %s = quantize(%x, %e) {scheme=\"nvfp4\", axis=1, stochastic=1}", DW_PARSE,
         "stream is absent"},
        {"x: f32[B, 65]", "%c, %s, %t = quantize_blocks(%x) {scheme=\"mxfp8\", axis=1}", DW_OK,
         "e4m3[B, 65] e8m0[B, 3] f32[]"},
        {"x: f32[33, 65]", "%c, %s, %t = quantize_blocks(%x) {scheme=\"nvfp4\", axis=0}", DW_OK,
         "e2m1[65, 33] ue4m3[65, 3] f32[]"},
        {"x: f32[65, 33]",
         "%c, %s, %t = quantize_blocks(%x) {scheme=\"mxfp8-e5m2\", axis=1, square=1}", DW_OK,
         "e5m2[65, 33] e8m0[3, 2] f32[]"},
        {"x: f32[7, B]", "%c, %s, %t = quantize_blocks(%x) {scheme=\"mxfp8\", axis=1}", DW_OK,
         "e4m3[7, B] e8m0[7, ceil(B/32)] f32[]"},
        {"x: f32[B, 72]", "%c, %s, %d, %t = quantize_tiles(%x) {scheme=\"mxfp8\"}", DW_OK,
         "e4m3[B, 96] e8m0[ceil(B/128), 1, 512] e4m3[72, 32*ceil(B/32)] "
         "e8m0[1, ceil(B/128), 512]"},
        {"x: f32[B*S, 72]", "%c, %s, %d, %t, %u = quantize_tiles(%x) {scheme=\"nvfp4\"}", DW_OK,
         "e2m1[B*S, 96] ue4m3[ceil(B*S/128), 2, 512] e2m1[72, 32*ceil(B*S/32)] "
         "ue4m3[1, ceil(B*S/64), 512] f32[]"},
        {"x: f32[B, 72]", "%c, %s, %u = quantize_tiles(%x) {scheme=\"nvfp4\", axis=0, hadamard=1}",
         DW_OK, "e2m1[72, 32*ceil(B/32)] ue4m3[1, ceil(B/64), 512] f32[]"},
        {"x: f32[B, 72]", "%c, %s, %d, %t, %u = quantize_tiles(%x) {scheme=\"nvfp4\", hadamard=1}",
         DW_PARSE, "axis is absent, for codes along both; expected one with hadamard=1"},
        {"x: f32[B, 72]", "%c, %s, %d, %t = quantize_tiles(%x) {scheme=\"mxfp6\"}", DW_UNSUPPORTED,
         "quantize_tiles: the scheme mxfp6 is not supported: expected fp8-block, mxfp8"},
        {"x: bf16[B, 300]", "%c, %s, %d, %t = quantize_tiles(%x) {scheme=\"fp8-block\"}", DW_OK,
         "e4m3[B, 320] f32[3, B] e4m3[300, 32*ceil(B/32)] f32[ceil(B/128), 300]"},
        {"x: bf16[300, 70]", "%c, %s, %d, %t = quantize_tiles(%x) {scheme=\"fp8-block\", square=1}",
         DW_OK, "e4m3[300, 96] f32[3, 1, 4] e4m3[70, 320] f32[1, 1, 4]"},
        {"x: bf16[B, 300]",
         "%c, %s = quantize_tiles(%x) {scheme=\"fp8-block\", axis=1, hadamard=1}", DW_UNSUPPORTED,
         "scheme=fp8-block with hadamard=1 or stochastic=1"},
        {"a: e4m3[B, 160]; b: e4m3[40, 160]; s: f32[2, B]; t: f32[1, 1, 4]; v: bf16[40]",
         "%y = multiply_codes(%a, %b, _, _, %s, %t, %v) {dtype=bf16}", DW_OK, "bf16[B, 40]"},
        {"a: e4m3[B, 160]; b: e5m2[40, 160]; s: f32[2, B]; t: f32[1, 1, 4]",
         "%y = multiply_codes(%a, %b, _, _, %s, %t)", DW_TYPE, "is e5m2; expected e4m3"},
        {"a: e4m3[8, 160]; b: e4m3[40, 160]; s: f32[8, 2]; t: f32[1, 1, 4]",
         "%y = multiply_codes(%a, %b, _, _, %s, %t)", DW_SHAPE,
         "the scales of blocks of these codes"},
        {"a: e4m3[8, 160]; b: e4m3[40, 160]; s: f32[]; t: f32[1, 1, 4]; u: f32[2, 8]",
         "%y = multiply_codes(%a, %b, %s, _, %u, %t)", DW_PARSE, "with scales of blocks in f32"},
        {"a: e4m3[B, 96]; b: e5m2[40, 96]; s: e8m0[ceil(B/128), 1, 512]; t: e8m0[1, 1, 512]",
         "%y = multiply_codes(%a, %b, _, _, %s, %t) {dtype=bf16}", DW_OK, "bf16[B, 40]"},
        {"a: e4m3[B, 96]; b: e4m3[40, 96]; s: e8m0[1, 1, 512]",
         "%y = multiply_codes(%a, %b, _, _, %s, %s)", DW_SHAPE, "the tiles of the scales"},
        {"a: e2m1[8, 96]; s: ue4m3[1, 2, 512]", "%y = multiply_codes(%a, %a, _, _, %s, %s)",
         DW_PARSE, "scale_a is absent; expected one with scales of blocks in ue4m3"},
        {"a: e4m3[8, 96]", "%y = multiply_codes(%a, %a)", DW_PARSE,
         "scale_a is absent; expected one without scales of blocks"},
        {"x: f32[7, 64*B]", "%c, %s, %t = quantize_blocks(%x) {scheme=\"mxfp4\", axis=1}", DW_OK,
         "e2m1[7, 64*B] e8m0[7, 2*B] f32[]"},
        {"x: f32[7, 64]", "%c, %s, %t = quantize_blocks(%x) {scheme=\"bf16\", axis=1}",
         DW_UNSUPPORTED, "quantize_blocks: the scheme bf16 is not supported: expected mxfp8"},
        {"c: e4m3[B, 65]; s: e8m0[B, 3]",
         "%y = dequantize_blocks(%c, %s) {scheme=\"mxfp8\", axis=0}", DW_OK, "bf16[65, B]"},
        {"c: e4m3[B, 65]; s: e8m0[B, 3]",
         "%y = dequantize_blocks(%c, %s) {scheme=\"nvfp4\", axis=0}", DW_TYPE,
         "codes is e4m3; expected e2m1"},
        {"c: e2m1[B, 65]; s: e8m0[B, 5]",
         "%y = dequantize_blocks(%c, %s) {scheme=\"nvfp4\", axis=0}", DW_TYPE,
         "scales is e8m0; expected ue4m3"},
        {"c: e4m3[B, 65]; s: e8m0[B, 2]",
         "%y = dequantize_blocks(%c, %s) {scheme=\"mxfp8\", axis=1}", DW_SHAPE,
         "must be [B, 3], which is a scale for each block of codes"},
        {"c: e4m3[B, 65]", "%y = neg(%c)", DW_TYPE, "x is e4m3, which it does not support"},
        {"x: f32[B, S, 7]; w: f32[5, 7]; b: f32[5]",
         "%y = quantized_linear(%x, %w, %b) {" MXFP8_LAYER "}", DW_OK, "f32[B, S, 5]"},
        {"x: bf16[B, 7]; w: bf16[7, 5]; e: i64[2]",
         "%y = quantized_linear(%x, %w, _, %e) {" NVFP4_LAYER ", stream=1, transpose_w=0}", DW_OK,
         "bf16[B, 5]"},
        {"x: f32[B, 7]; w: f32[5, 7]", "%y = quantized_linear(%x, %w) {" NVFP4_LAYER ", stream=1}",
         DW_PARSE, "seed is absent; expected one, for stochastic rounding of gradients"},
        {"x: f32[B, 7]; w: f32[5, 7]", "%y = quantized_linear(%x, %w) {" LAYER_OF("fp32") "}",
         DW_UNSUPPORTED, "forward_x: the scheme fp32 is not supported: expected bf16, fp8-tensor"},
        {"x: f32[B, 7]; w: f32[5, 7]", "%y = quantized_linear(%x, %w) {" LAYER_OF("fp9") "}",
         DW_PARSE, "quantized_linear: forward_x: there is no scheme \"fp9\""},
        {"x: f32[B, 7]; w: f32[5, 7]",
         "%y = quantized_linear(%x, %w) {" LAYER_OF("mxfp8+round") "}", DW_PARSE,
         "\"mxfp8+round\": expected a scheme, then +square, +hadamard, +stochastic, "},
        {"x: f32[B, 7]; w: f32[5, 7]",
         "%y = quantized_linear(%x, %w) {" LAYER_OF("mxfp8+stochastic") ", stream=1}", DW_PARSE,
         "forward_x is rounded stochastically; only dgrad_dy and wgrad_dy can be"},
        {"x: f32[B, 7]; w: f32[5, 7]", "%y = quantized_linear(%x, %w) {forward_x=\"bf16\"}",
         DW_PARSE, "attribute forward_w is required"},
        {"x: f32[B, 7]; w: f32[5, 7]",
         "%y = quantized_linear(%x, %w) {" LAYER("mxfp4+hadamard", "mxfp4", "bf16", "bf16", "bf16",
                                                 "bf16") "}",
         DW_PARSE, "forward_x and the other operand of its GEMM differ in hadamard"},
        {"x: f32[B, 7]; w: f32[5, 8]", "%y = quantized_linear(%x, %w) {" LAYER_OF("bf16") "}",
         DW_SHAPE, "w is [5, 8] with transpose_w=1"},
        {"w: f32[9, 4]; i: i64[B, S]", "%y = embedding(%w, %i) {padding_index=8}", DW_OK,
         "f32[B, S, 4]"},
        {"w: f32[9, 4]; i: i64[B, S]", "%y = embedding(%w, %i) {padding_index=9}", DW_PARSE,
         "padding_index=9; expected -1 to 8"},
        {"w: f32[9, 4]; i: f32[B, S]", "%y = embedding(%w, %i)", DW_TYPE, "embedding: i is f32"},
        {"i: i64[2*B]", "%o, %p, %e = group_rows(%i) {size=[5]}", DW_OK,
         "i32[2*B] i32[2*B] i32[6]"},
        {"i: f32[B]", "%o, %p, %e = group_rows(%i) {size=[5]}", DW_TYPE, "expected i32 or i64"},
        {"i: i64[B, S]", "%o, %p, %e = group_rows(%i) {size=[5]}", DW_SHAPE, "rank 1"},
        {"i: i64[2147483648]", "%o, %p, %e = group_rows(%i) {size=[5]}", DW_SHAPE, "INT32_MAX"},
        {"x: bf16[B, 4]; w: bf16[5, 8, 4]; o: i32[6]", "%y = segment_linear(%x, %w, %o, _)", DW_OK,
         "bf16[B, 8]"},
        {"x: f32[B, 4]; w: f32[5, 4, 8]; o: i32[6]; b: f32[5, 8]",
         "%y = segment_linear(%x, %w, %o, %b) {transpose_w=0}", DW_OK, "f32[B, 8]"},
        {"a: e4m3[B, 32]; b: e5m2[40, 32]; o: i32[6]; s: f32[]; t: f32[5]",
         "%y = segment_multiply_codes(%a, %b, %o, %s, %t) {dtype=bf16}", DW_OK, "bf16[B, 8]"},
        {"a: e4m3[B, 32]; b: e4m3[8, 160]; o: i32[6]; s: f32[]",
         "%y = segment_multiply_codes(%a, %b, %o, %s, %s)", DW_OK, "f32[B, 8]"},
        {"a: e4m3[B, 32]; b: e4m3[8, 96]; o: i32[6]; s: f32[]",
         "%y = segment_multiply_codes(%a, %b, %o, %s, %s)", DW_SHAPE,
         "with 5 groups; expected [E*N, K] or [N, E*K]"},
        {"a: e4m3[B, 32]; b: e4m3[41, 32]; o: i32[6]; s: f32[]",
         "%y = segment_multiply_codes(%a, %b, %o, %s, %s)", DW_SHAPE, "segment_multiply_codes"},
        {"a: e4m3[B, 32]; b: e4m3[40, 32]; o: i32[6]; s: f32[]; t: f32[4]",
         "%y = segment_multiply_codes(%a, %b, %o, %s, %t)", DW_SHAPE, "one for each group"},
        {"a: e4m3[B, 32]; b: e4m3[40, 32]; o: i32[1]; s: f32[]",
         "%y = segment_multiply_codes(%a, %b, %o, %s, %s)", DW_SHAPE, "1 or more"},
        {"x: bf16[B, 4]; w: bf16[5, 8, 4]; o: i32[6]",
         "%y = quantized_segment_linear(%x, %w, %o, _) {" SEGMENTS_OF("fp8-tensor") "}", DW_OK,
         "bf16[B, 8]"},
        {"x: f32[B, 4]; w: f32[5, 8, 4]; o: i32[6]",
         "%y = quantized_segment_linear(%x, %w, %o, _) {" SEGMENTS_OF("mxfp8") "}", DW_UNSUPPORTED,
         "forward_x is \"mxfp8\"; expected fp8-tensor or fp8-tensor-e5m2"},
        {"x: f32[B, 4]; w: f32[5, 4, 8]; o: i32[6]", "%y = segment_linear(%x, %w, %o, _)", DW_SHAPE,
         "its last dim must equal x's last dim 4"},
        {"x: f32[B, 4]; w: f32[5, 8, 4]; o: i32[5]", "%y = segment_linear(%x, %w, %o, _)", DW_SHAPE,
         "[E + 1] of w"},
        {"x: f32[B, 4]; w: f32[5, 8, 4]; o: i64[6]", "%y = segment_linear(%x, %w, %o, _)", DW_TYPE,
         "offsets is i64; expected i32"},
        {"x: f32[B, 4]; w: f32[5, 8, 4]; o: i32[6]; b: f32[8]",
         "%y = segment_linear(%x, %w, %o, %b)", DW_SHAPE, "[E, N] of w"},
        {"x: f32[B, 4]; y: f32[B, 8]; o: i32[6]", "%w = segment_linear_backward_weight(%x, %y, %o)",
         DW_OK, "f32[5, 4, 8]"},
        {"x: f32[B, 4]; y: f32[S, 8]; o: i32[6]", "%w = segment_linear_backward_weight(%x, %y, %o)",
         DW_SHAPE, "number of rows"},
        {"x: f32[B, 4]; y: f32[B, 8]; o: i32[0]", "%w = segment_linear_backward_weight(%x, %y, %o)",
         DW_SHAPE, "has no element"},
        {"x: bf16[B, 4]; p: i32[B, 3]; w: f32[B, 3]", "%y = spread_rows(%x, %p, %w)", DW_OK,
         "bf16[3*B, 4]"},
        {"x: f32[B, 4]; p: i32[S, 3]", "%y = spread_rows(%x, %p, _)", DW_SHAPE, "[T, H] for place"},
        {"x: f32[B, 4]; p: i64[B, 3]", "%y = spread_rows(%x, %p, _)", DW_TYPE,
         "place is i64; expected i32"},
        {"x: f32[B, 4]; p: i32[B, 3]; w: f64[B, 3]", "%y = spread_rows(%x, %p, %w)", DW_TYPE,
         "w is f64 but x is f32"},
        {"x: bf16[3*B, 4]; p: i32[B, 3]; w: f32[B, 3]", "%y = combine_rows(%x, %p, %w) {dtype=f32}",
         DW_OK, "f32[B, 4]"},
        {"x: f32[3*B, 4]; p: i32[B, 3]", "%y = combine_rows(%x, %p, _) {dtype=bf16}", DW_TYPE,
         "dtype=bf16 for x of f32; expected f32"},
        {"x: f32[B, 4]; p: i32[B, 3]", "%y = combine_rows(%x, %p, _)", DW_SHAPE,
         "[T*k, H] for place"},
        {"x: bf16[3*B, 4]; p: i32[B, 3]; w: f32[B, 3]; d: bf16[B, 4]",
         "%dx, %dw = combine_rows_backward(%x, %p, %w, %d)", DW_OK, "bf16[3*B, 4] f32[B, 3]"},
        {"x: f32[3*B, 4]; p: i32[B, 3]; w: f32[B, 3]; d: f32[S, 4]",
         "%dx, %dw = combine_rows_backward(%x, %p, %w, %d)", DW_SHAPE, "[T, H] for place"},
        {"i: i64[B, S]; d: f32[B, S, 4]", "%y = embedding_backward(%i, %d) {size=[9]}", DW_OK,
         "f32[9, 4]"},
        {"i: i64[B, S]; d: f32[S, B, 4]", "%y = embedding_backward(%i, %d) {size=[9]}", DW_SHAPE,
         "dy [S, B, 4] must begin with the dims of i [B, S]"},
    };
    CHECK_RULES(rules);
}

static void norm_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {"x: f32[B, S, 8]; w: f32[8]; b: f32[8]", "%y, %m, %r = layer_norm(%x, %w, %b) {eps=1e-5}",
         DW_OK, "f32[B, S, 8] f32[B, S] f32[B, S]"},
        {"x: f32[B, 8]", "%y, %m, %r = layer_norm(%x) {eps=0}", DW_OK, "f32[B, 8] f32[B] f32[B]"},
        {"x: f32[B, 8]; w: f32[4]", "%y, %m, %r = layer_norm(%x, %w) {eps=0}", DW_SHAPE,
         "w [4] must be [8], which is x's last dim"},
        {"x: f32[B, 8]", "%y, %m, %r = layer_norm(%x) {eps=-1}", DW_PARSE, "eps=-1"},
        {"x: f32[B, 8]", "%y, %m, %r = layer_norm(%x) {eps=nan}", DW_PARSE,
         "eps=nan; expected a finite"},
        {"x: f32[]", "%y, %m, %r = layer_norm(%x) {eps=0}", DW_SHAPE, "expected rank 1 or more"},
        {"x: f32[B, 8]; w: f32[8]; m: f32[B]",
         "%dx, %dw, %db = layer_norm_backward(%x, %x, %w, %m, %m)", DW_OK,
         "f32[B, 8] f32[8] f32[8]"},
        {"x: f32[B, 8]; m: f32[S]", "%dx, %dw, %db = layer_norm_backward(%x, %x, _, %m, %m)",
         DW_SHAPE, "mean [S] must be [B], which is x's shape without the last dim"},
        {"x: f32[B, 8]; m: f32[S]", "%dx, %dw, %db = layer_norm_backward(%x, %x, _, %m)", DW_PARSE,
         "4 operands are given"},
        {"x: f32[B, 8]; w: f32[8]", "%y, %r = rms_norm(%x, %w) {eps=1e-6}", DW_OK,
         "f32[B, 8] f32[B]"},
        {"x: f32[B, 8]; w: f32[8]; r: f32[B]", "%dx, %dw = rms_norm_backward(%x, %x, %w, %r)",
         DW_OK, "f32[B, 8] f32[8]"},
        {"x: f32[B, 8]; d: f32[B, 7]; r: f32[B]", "%dx, %dw = rms_norm_backward(%d, %x, _, %r)",
         DW_SHAPE, "dy [B, 7] must be [B, 8], which is x's shape"},
    };
    CHECK_RULES(rules);
}

#define QKV "q: f32[B, 8, S, 16]; k: f32[B, 2, S, 16]; v: f32[B, 2, S, 12]"
#define HALF_QKV "q: bf16[B, 8, S, 16]; k: bf16[B, 2, S, 16]"

static void attention_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {"x: f32[B, 8, S, 16]; c: f32[1, 1, S, 8]", "%y = rope(%x, %c, %c) {interleaved=1}", DW_OK,
         "f32[B, 8, S, 16]"},
        {"x: f32[B, 8, S, 16]; c: f32[1, 1, S, 7]", "%y = rope(%x, %c, %c)", DW_SHAPE,
         "odd last dim"},
        {"x: f32[B, 8, S, 16]; c: f32[1, 1, S, 18]", "%y = rope(%x, %c, %c)", DW_SHAPE,
         "the tables' last dim is 18; expected at most x's last dim, 16"},
        {"x: f32[B, 8, S, 16]; c: f32[1, 4, S, 8]", "%y = rope(%x, %c, %c)", DW_SHAPE,
         "cos [1, 4, S, 8] must have in dim 1 either 1 or that of x"},
        {"x: f32[S, 8]; c: f32[S, 8]; s: f32[S, 4]", "%y = rope(%x, %c, %s)", DW_SHAPE,
         "differ in the last dim"},
        {QKV, "%o, %l = attention(%q, %k, %v) {scale=0.25, causal=1}", DW_OK,
         "f32[B, 8, S, 12] f32[B, 8, S]"},
        {QKV "; m: bool[1, 1, S, S]; s: i64[2]",
         "%o, %l = attention(%q, %k, %v, %m, %s) {scale=0.25, causal=2, window=4, p=0.1, stream=1}",
         DW_OK, "f32[B, 8, S, 12] f32[B, 8, S]"},
        {QKV "; m: f32[B, 1, 1, S]", "%o, %l = attention(%q, %k, %v, %m) {scale=0.25}", DW_OK,
         "f32[B, 8, S, 12] f32[B, 8, S]"},
        {QKV "; m: f32[B, 1, 1, B]", "%o, %l = attention(%q, %k, %v, %m) {scale=0.25}", DW_SHAPE,
         "mask [B, 1, 1, B] must have in each dim either 1 or that of [B, 8, S, S]"},
        {QKV "; m: f16[B, 1, 1, S]", "%o, %l = attention(%q, %k, %v, %m) {scale=0.25}", DW_TYPE,
         "mask is f16 but q is f32"},
        {QKV, "%o, %l = attention(%q, %k, %v) {scale=0.25, p=0.1, stream=0}", DW_PARSE,
         "p=0.1 needs the operand seed"},
        {QKV, "%o, %l = attention(%q, %k, %v) {scale=0.25, causal=3}", DW_PARSE,
         "causal=3; expected 0 to 2"},
        {QKV, "%o, %l = attention(%q, %k, %v) {scale=0.25, window=-2}", DW_PARSE, "window=-2"},
        {QKV, "%o, %l = attention(%q, %k, %v) {scale=0.25, softcap=50}", DW_OK,
         "f32[B, 8, S, 12] f32[B, 8, S]"},
        {QKV, "%o, %l = attention(%q, %k, %v) {scale=0.25, softcap=-1}", DW_PARSE,
         "softcap=-1; expected 0 (none) or a positive number"},
        {QKV, "%o, %l = attention(%q, %k, %v) {causal=1}", DW_PARSE, "attribute scale is required"},
        {QKV, "%o, %l = attention(%q, %v, %k) {scale=1}", DW_SHAPE,
         "must agree in dims 0 (batch) and 3 (head size)"},
        {"q: f32[B, 8, S, 16]; k: f32[B, 3, S, 16]", "%o, %l = attention(%q, %k, %k) {scale=1}",
         DW_SHAPE,
         "q [B, 8, S, 16] has 8 heads and k [B, 3, S, 16] has 3; the first must be a multiple"},
        {QKV "; o: f32[B, 8, S, 12]; l: f32[B, 8, S]",
         "%dq, %dk, %dv = attention_backward(%q, %k, %v, _, _, %o, %l, %o) {scale=0.25}", DW_OK,
         "f32[B, 8, S, 16] f32[B, 2, S, 16] f32[B, 2, S, 12]"},
        {QKV "; o: f32[B, 8, S, 16]; l: f32[B, 8, S]",
         "%dq, %dk, %dv = attention_backward(%q, %k, %v, _, _, %o, %l, %o) {scale=0.25}", DW_SHAPE,
         "o [B, 8, S, 16] must be [B, 8, S, 12], which is [B, H, Sq, Dv]"},
        {HALF_QKV, "%o, %l = attention(%q, %k, %k) {scale=1}", DW_OK,
         "bf16[B, 8, S, 16] f32[B, 8, S]"},
        {"q: f64[B, 8, S, 16]", "%o, %l = attention(%q, %q, %q) {scale=1}", DW_OK,
         "f64[B, 8, S, 16] f64[B, 8, S]"},
        {HALF_QKV "; l: f32[B, 8, S]",
         "%dq, %dk, %dv = attention_backward(%q, %k, %k, _, _, %q, %l, %q) {scale=1}", DW_OK,
         "bf16[B, 8, S, 16] bf16[B, 2, S, 16] bf16[B, 2, S, 16]"},
        {HALF_QKV "; l: bf16[B, 8, S]",
         "%dq, %dk, %dv = attention_backward(%q, %k, %k, _, _, %q, %l, %q) {scale=1}", DW_TYPE,
         "lse is bf16; expected f32"},
    };
    CHECK_RULES(rules);
}

#define LOSS "x: f32[B*S, 50]; t: i64[B*S]; l: f32[B*S]; d: f32[]"

static void loss_and_optimizer_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {LOSS, "%y, %z = cross_entropy(%x, %t) {reduction=\"mean\"}", DW_OK, "f32[] f32[B*S]"},
        {LOSS, "%y, %z = cross_entropy(%x, %t) {reduction=\"none\"}", DW_OK, "f32[B*S] f32[B*S]"},
        {LOSS, "%y, %z = cross_entropy(%x, %t) {reduction=\"max\"}", DW_PARSE,
         "reduction=\"max\"; expected \"mean\", \"sum\", \"none\""},
        {LOSS, "%y, %z = cross_entropy(%x, %t) {reduction=\"sum\", label_smoothing=2}", DW_PARSE,
         "label_smoothing=2"},
        {LOSS, "%y, %z = cross_entropy(%x, %l) {reduction=\"sum\"}", DW_TYPE,
         "target is f32; expected i64"},
        {"x: f32[B, 50]; t: i64[S]", "%y, %z = cross_entropy(%x, %t) {reduction=\"sum\"}", DW_SHAPE,
         "target [S] must be [B], which is [T], the rows of x"},
        {LOSS, "%y = cross_entropy_backward(%x, %t, %l, %d) {reduction=\"mean\"}", DW_OK,
         "f32[B*S, 50]"},
        {LOSS, "%y = cross_entropy_backward(%x, %t, %l, %d) {reduction=\"none\"}", DW_SHAPE,
         "dloss [] must be [B*S], which is [T], for reduction \"none\""},
        {LOSS "; h: f32[B*S, 8]; w: f32[50, 8]",
         "%y, %z, %u = linear_cross_entropy(%h, %w, _, %t) {reduction=\"mean\"}", DW_OK,
         "f32[] f32[B*S] f32[B*S, 50]"},
        {LOSS "; h: f32[B*S, 8]; w: f32[50, 9]",
         "%y, %z, %u = linear_cross_entropy(%h, %w, _, %t) {reduction=\"mean\"}", DW_SHAPE,
         "its last dim must equal x's last dim 8"},
        {LOSS "; h: f32[S, 8]; w: f32[50, 8]",
         "%y, %z, %u = linear_cross_entropy(%h, %w, _, %t) {reduction=\"mean\"}", DW_SHAPE,
         "target [B*S] must be [S], which is [T], the rows of x"},
        {LOSS "; h: f32[B*S, 8]; w: f32[50, 8]",
         "%a, %b, %c = linear_cross_entropy_backward(%h, %w, _, _, %t, %l, %d) "
         "{reduction=\"mean\"}",
         DW_OK, "f32[B*S, 8] f32[50, 8] f32[50]"},
        {LOSS "; h: f32[B*S, 8]; w: f32[50, 8]",
         "%a, %b, %c = linear_cross_entropy_backward(%h, %w, _, %x, %t, %l, %d) "
         "{reduction=\"mean\"}",
         DW_OK, "f32[B*S, 8] f32[50, 8] f32[50]"},
        {LOSS "; h: f32[B*S, 8]; w: f32[51, 8]",
         "%a, %b, %c = linear_cross_entropy_backward(%h, %w, _, %x, %t, %l, %d) "
         "{reduction=\"mean\"}",
         DW_SHAPE, "logits [B*S, 50] must be [B*S, 51], which is linear(x, w, b)"},
        {"p: f32[3, 4]; s: i64[]",
         "%a, %b, %c = adamw(%p, %p, %p, %p, %s) {lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, "
         "weight_decay=0.1}",
         DW_OK, "f32[3, 4] f32[3, 4] f32[3, 4]"},
        {"p: f32[3, 4]; s: i64[1]",
         "%a, %b, %c = adamw(%p, %p, %p, %p, %s) {lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, "
         "weight_decay=0.1}",
         DW_SHAPE, "step [1] must be [], which is a scalar"},
        {"p: f32[3, 4]; s: i64[]",
         "%a, %b, %c = adamw(%p, %p, %p, %p, %s) {lr=1e-3, beta1=1.9, beta2=0.95, eps=1e-8, "
         "weight_decay=0.1}",
         DW_PARSE, "beta1=1.9; expected 0 to 1"},
    };
    CHECK_RULES(rules);
}

static void fused_rules(void **state) {
    (void)state;
    static const rule_case rules[] = {
        {"x: f32[B, S, 4]; b: f32[4]",
         "%y, %z = fused(%x, %b) "
         "{body=\"t0=add(i0,i1);t1=gelu_tanh(t0);t2=lt(t1,c0.5);out(t1,t2)\"}",
         DW_OK, "f32[B, S, 4] bool[B, S, 4]"},
        {"x: f32[B, 1]; b: f32[1, S]", "%y = fused(%x, %b) {body=\"t0=mul(i0,i1);out(t0)\"}", DW_OK,
         "f32[B, S]"},
        {"x: f32[B, 4]; s: i64[2]",
         "%y = fused(%x, %s) {body=\"t0=dropout(i0,i1,c0.1,c3);t1=cast_bf16(t0);out(t1)\"}", DW_OK,
         "bf16[B, 4]"},
        {"x: f32[B]; y: f32[S]", "%z = fused(%x, %y) {body=\"t0=mul(i0,i1);out(t0)\"}", DW_SHAPE,
         "operand 1, x [S], does not broadcast"},
        {"x: f32[B]; y: f64[B]", "%z = fused(%x, %y) {body=\"t0=mul(i0,i1);out(t0)\"}", DW_TYPE,
         "fused: body: t0: mul: y is f64 but x is f32"},
        {"x: f32[B]", "%z = fused(%x) {body=\"t0=matmul(i0,i0);out(t0)\"}", DW_PARSE,
         "matmul is not allowed in a body"},
    };
    CHECK_RULES(rules);
}

/* ---- fused bodies -------------------------------------------------------------------------- */

static void bodies_read_back(void **state) {
    (void)state;
    static const dw_dtype inputs[] = {DW_F32, DW_F32, DW_I64, DW_BOOL};
    static const char *const texts[] = {
        "out(i0)",
        "t0=mul(i0,i1);t1=add(t0,c0.5);t2=tanh(t1);out(t2,t0)",
        "t0=gelu_tanh_backward(i0,i1);t1=gelu(t0);t2=cast_bf16(t1);out(t2,i3)",
        "t0=max(c-inf,i0);t1=eq(t0,cnan);t2=select(t1,c1e-300,t0);out(t2)",
        "t0=dropout(i1,i2,c0.10000000000000001,c7);out(t0)",
    };
    static const char *const printed[] = {
        NULL, NULL, NULL, NULL, "t0=dropout(i1,i2,c0.1,c7);out(t0)",
    };
    for (size_t i = 0; i < DW_COUNT(texts); i++) {
        dw__body body;
        dw__text out = {0};
        assert_ok(dw__body_parse(texts[i], DW_COUNT(inputs), inputs, &body));
        assert_ok(dw__body_print(&body, &out));
        assert_string_equal(out.text, printed[i] ? printed[i] : texts[i]);
        dw__text_free(&out);
    }
    dw__body body;
    assert_ok(dw__body_parse(texts[3], DW_COUNT(inputs), inputs, &body));
    assert_int_equal(body.code[1].dtype, DW_BOOL);
    assert_int_equal(body.code[1].operand_dtype, DW_F32);
    assert_int_equal(body.code[2].dtype, DW_F32);
    assert_true(isinf(body.code[0].operands[0].constant));
}

static void bodies_reject_malformed_text(void **state) {
    (void)state;
    static const dw_dtype inputs[] = {DW_F32, DW_I64};
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "expected tN=... or out(...) at byte 1"},
        {"out()", "expected iN, tN or c<number>"},
        {"out(i2)", "an input number 2"},
        {"out(t0)", "a result number 0"},
        {"out(c1)", "output 0 is a constant"},
        {"t1=exp(i0);out(t1)", "a result number 1 at byte 2 does not exist"},
        {"t0=exp(i0);t0=exp(i0);out(t0)", "numbered 0, 1, 2"},
        {"t0=exp(t0);out(t0)", "a result number 0"},
        {"t0=exp(i0,i0);out(t0)", "exp has 2 operands; expected 1"},
        {"t0=exp(c1);out(t0)", "only constants"},
        {"t0=expp(i0);out(t0)", "similar names: exp"},
        {"t0=cast(i0);out(t0)", "a cast names its type"},
        {"t0=cast_f8(i0);out(t0)", "no operation \"cast_f8\""},
        {"t0=exp(i0)out(t0)", "expected \";\""},
        {"t0=exp(i0);out(t0);", "expected the end of the text"},
        {"t0=add(i0,c0x1p3);out(t0)", "expected a number"},
        {"t0=add(i0,c1e999);out(t0)", "expected a number"},
        {"t0=dropout(i0,i1,c0.5);out(t0)", "dropout has 3 operands; expected 4"},
        {"t0=dropout(i0,i1,c2,c0);out(t0)", "dropout(x, i<seed>, c<p>, c<stream>)"},
        {"t0=dropout(i0,i1,c0.5,c0);out(i1)", "output 0 is a seed"},
        {"t0=dropout(i0,i1,c0.5,c0);t1=neg(i1);out(t1)", "as an element"},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw__body body;
        dw_status status = dw__body_parse(cases[i].text, DW_COUNT(inputs), inputs, &body);
        if (status == DW_OK) fail_msg("the body \"%s\" is accepted", cases[i].text);
        assert_message(cases[i].message);
    }
}

/* ---- building ------------------------------------------------------------------------------ */

/* A block of GPT-2's form: every kind of attribute, absent operands, several regions, odd names. */
static const char gpt_block[] =
    "deepwell graph 1\n"
    "symbols B, S\n"
    "\n"
    "input %ids: i64[B, S]\n"
    "input %targets: i64[B*S]\n"
    "seed %seed: i64[2]\n"
    "parameter %transformer.wte.weight: f32[257, 64]\n"
    "parameter %\"odd \\\"name\\\" \\\\ \xc3\xa9\": f32[64]\n"
    "parameter %h.0.attn.c_attn.weight: f32[64, 192]\n"
    "parameter %h.0.attn.c_attn.bias: f32[192]\n"
    "constant %\"0\": f32[S, 64]\n"
    "gradient %dloss: f32[]\n"
    "\n"
    "%h: f32[B, S, 64] = embedding(%transformer.wte.weight, %ids)  # embed - transformer.wte\n"
    "%0: f32[B, S, 64] = broadcast(%\"0\") {shape=[B, S, 64]}  # embed\n"
    "%1: f32[B, S, 64] = add(%h, %0)\n"
    "%2: f32[B, S, 64], %3: f32[B, S], %4: f32[B, S] = layer_norm(%1, %\"odd \\\"name\\\" \\\\ "
    "\xc3\xa9\", _) {eps=1e-05}  # norm 0 h.0.ln_1\n"
    "%5: f32[B, S, 192] = linear(%2, %h.0.attn.c_attn.weight, %h.0.attn.c_attn.bias) "
    "{transpose_w=0}  # attn 0 h.0.attn.c_attn\n"
    "%6: f32[B, S, 4, 48] = reshape(%5) {shape=[B, S, 4, 48]}  # attn 0\n"
    "%7: f32[B, 4, S, 48] = permute(%6) {perm=[0, 2, 1, 3]}  # attn 0\n"
    "%8: f32[B, 4, S, 16] = slice(%7) {start=[0, 0, 0, 0], limit=[B, 4, S, 16], "
    "step=[1, 1, 1, 1]}  # attn 0\n"
    "%o: f32[B, 4, S, 16], %lse: f32[B, 4, S] = attention(%8, %8, %8, _, %seed) {scale=0.25, "
    "p=0.1, stream=3, causal=1}  # attn 0 h.0.attn\n"
    "%9: f32[B, S, 4, 16] = permute(%o) {perm=[0, 2, 1, 3]}\n"
    "%10: f32[B*S, 64] = reshape(%9) {shape=[B*S, 64]}\n"
    "%11: bf16[B*S, 64] = cast(%10) {dtype=bf16}\n"
    "%12: f32[B*S, 64] = cast(%11) {dtype=f32}\n"
    "%13: f32[B*S, 64] = fused(%12) {body=\"t0=mul(i0,c0.3);t1=gelu_tanh(t0);out(t1)\"}  # mlp 0 "
    "0\n"
    "%logits: f32[B*S, 257] = linear(%13, %transformer.wte.weight, _)  # head - lm_head\n"
    "%loss: f32[], %14: f32[B*S] = cross_entropy(%logits, %targets) {reduction=\"mean\", "
    "ignore_index=-100}  # loss\n"
    "%15: f32[B*S, 257] = cross_entropy_backward(%logits, %targets, %14, %dloss) "
    "{reduction=\"mean\", ignore_index=-100}  # backward loss\n"
    "%16: f32[B*S, 257] = constant() {shape=[B*S, 257], dtype=f32, value=-inf}  # backward none - "
    "a b\n"
    "\n"
    "return %logits, %loss, %15, %logits\n";

static dw_graph *read_text(const char *text) {
    dw_graph *graph = NULL;
    assert_ok(dw_graph_from_text(text, &graph));
    return graph;
}

static void failures_leave_the_graph_unchanged(void **state) {
    (void)state;
    dw_graph *graph = read_text(gpt_block);
    char *before, *after;
    uint32_t values = dw_graph_value_count(graph), nodes = dw_graph_node_count(graph);
    dw_value inputs[2] = {dw_graph_find(graph, "h"), dw_graph_find(graph, "ids")};
    dw_attr twice[2] = {dw_attr_int(DW_ATTR_KEY_AXIS, 0), dw_attr_int(DW_ATTR_KEY_AXIS, 1)};
    dw_dim wrong[1] = {-999};
    assert_ok(dw_graph_to_text(graph, &before));

    assert_fails(dw_graph_append(graph, DW_OP_ADD, 2, inputs, 0, NULL, NULL), DW_TYPE,
                 "add: y is i64 but x is f32");
    assert_fails(dw_graph_append(graph, DW_OP_ADD, 2, (dw_value[]){0, 9999}, 0, NULL, NULL),
                 DW_INVALID_ARGUMENT, "add: operand 1 (y) is value 9999");
    assert_fails(dw_graph_append(graph, DW_OP_SOFTMAX, 1, inputs, 2, twice, NULL),
                 DW_INVALID_ARGUMENT, "axis is given twice");
    assert_fails(dw_graph_append(graph, DW_OP_ADD, 2, NULL, 0, NULL, NULL), DW_INVALID_ARGUMENT,
                 "add: the list of operands is NULL");
    assert_fails(dw_graph_append(graph, DW_OP_COUNT, 0, NULL, 0, NULL, NULL), DW_INVALID_ARGUMENT,
                 "does not exist");
    assert_fails(dw_graph_append(graph, DW_OP_RESHAPE, 1, inputs, 1,
                                 (dw_attr[]){dw_attr_list(DW_ATTR_KEY_SHAPE, 1, wrong)}, NULL),
                 DW_INVALID_ARGUMENT, "shape[0] is a dim of another graph");
    assert_fails(dw_graph_append(graph, DW_OP_GELU, 1, inputs, 1,
                                 (dw_attr[]){dw_attr_string(DW_ATTR_KEY_APPROXIMATE, NULL)}, NULL),
                 DW_INVALID_ARGUMENT, "the string approximate is NULL");
    assert_fails(dw_graph_append(graph, DW_OP_CAST, 1, inputs, 1,
                                 (dw_attr[]){dw_attr_int(DW_ATTR_KEY_DTYPE, 77)}, NULL),
                 DW_INVALID_ARGUMENT, "dtype is 77");
    assert_fails(dw_graph_leaf(graph, DW_ROLE_INPUT, "ids", DW_F32, 0, NULL, NULL),
                 DW_INVALID_ARGUMENT, "a value named \"ids\" already");
    assert_fails(dw_graph_leaf(graph, DW_ROLE_ACTIVATION, "n", DW_F32, 0, NULL, NULL),
                 DW_INVALID_ARGUMENT, "role");
    assert_fails(dw_graph_leaf(graph, DW_ROLE_SEED, "n", DW_I64, 0, NULL, NULL), DW_SHAPE,
                 "expected i64[2]");
    assert_fails(dw_graph_leaf(graph, DW_ROLE_INPUT, "n", DW_F32, 9, wrong, NULL), DW_SHAPE,
                 "rank 9");
    assert_fails(dw_graph_leaf(graph, DW_ROLE_INPUT, "", DW_F32, 0, NULL, NULL),
                 DW_INVALID_ARGUMENT, "is empty");
    assert_fails(dw_graph_leaf(graph, DW_ROLE_INPUT, "a\nb", DW_F32, 0, NULL, NULL),
                 DW_INVALID_ARGUMENT, "the byte 0x0a at position 2");
    assert_fails(dw_graph_leaf(graph, DW_ROLE_INPUT, "\xc0\xaf", DW_F32, 0, NULL, NULL),
                 DW_INVALID_ARGUMENT, "expected UTF-8");
    assert_fails(dw_graph_set_origin(graph, DW_REGION_ATTN, -2, NULL), DW_INVALID_ARGUMENT,
                 "layer is -2");
    assert_fails(dw_graph_add_output(graph, 9999), DW_INVALID_ARGUMENT, "value 9999");

    assert_int_equal(dw_graph_value_count(graph), values);
    assert_int_equal(dw_graph_node_count(graph), nodes);
    assert_ok(dw_graph_to_text(graph, &after));
    assert_string_equal(before, after);
    assert_ok(dw_graph_verify(graph));
    dw_text_free(before);
    dw_text_free(after);
    dw_graph_destroy(graph);
}

static void names_are_unique_and_found(void **state) {
    (void)state;
    dw_graph *graph = new_graph();
    dw_value x, y, z;
    assert_ok(dw_graph_leaf(graph, DW_ROLE_INPUT, "%1", DW_F32, 0, NULL, &x));
    assert_ok(dw_graph_apply(graph, DW_OP_NEG, 1, &x, 0, NULL, &y));
    assert_string_equal(dw_value_name(graph, y), "%2"); /* "%1" is already used */
    assert_ok(dw_graph_apply(graph, DW_OP_NEG, 1, &y, 0, NULL, &z));
    assert_string_equal(dw_value_name(graph, z), "%3");
    assert_int_equal(dw_graph_find(graph, "%2"), y);
    assert_int_equal(dw_graph_find(graph, "%9"), DW_NONE);
    assert_int_equal(dw_graph_find(graph, NULL), DW_NONE);
    assert_ok(dw_graph_verify(graph));
    dw_graph_destroy(graph);
}

static void queries_of_absent_things_are_neutral(void **state) {
    (void)state;
    dw_graph *graph = read_text(gpt_block);
    dw_value o = dw_graph_find(graph, "o");
    dw_node attention = dw_value_node(graph, o);
    assert_int_equal(dw_node_op(graph, attention), DW_OP_ATTENTION);
    assert_int_equal(dw_node_input_count(graph, attention), 5);
    assert_int_equal(dw_node_input(graph, attention, 3), DW_NONE);
    assert_int_equal(dw_node_input(graph, attention, 4), dw_graph_find(graph, "seed"));
    assert_int_equal(dw_node_output(graph, attention, 1), dw_graph_find(graph, "lse"));
    assert_int_equal(dw_node_int(graph, attention, DW_ATTR_KEY_CAUSAL, 7), 1);
    assert_int_equal(dw_node_int(graph, attention, DW_ATTR_KEY_WINDOW, -1), -1);
    assert_true(dw_node_float(graph, attention, DW_ATTR_KEY_P, 0) == 0.1);
    assert_null(dw_node_attr(graph, attention, DW_ATTR_KEY_AXIS));
    assert_int_equal(dw_node_region(graph, attention), DW_REGION_ATTN);
    assert_int_equal(dw_node_layer(graph, attention), 0);
    assert_string_equal(dw_node_module(graph, attention), "h.0.attn");
    assert_false(dw_node_is_backward(graph, attention));
    assert_int_equal(dw_value_role(graph, o), DW_ROLE_ACTIVATION);
    assert_int_equal(dw_value_node(graph, dw_graph_find(graph, "ids")), DW_NONE);
    assert_int_equal(dw_graph_leaf_count(graph), 9);
    assert_int_equal(dw_graph_leaf_at(graph, 1), dw_graph_find(graph, "targets"));
    assert_int_equal(dw_graph_output_count(graph), 4);
    assert_int_equal(dw_graph_output(graph, 3), dw_graph_find(graph, "logits"));
    /* Queries for things that do not exist return a neutral answer. */
    assert_int_equal(dw_graph_output(graph, 4), DW_NONE);
    assert_int_equal(dw_node_op(graph, 9999), DW_OP_COUNT);
    assert_int_equal(dw_value_rank(graph, DW_NONE), 0);
    assert_string_equal(dw_value_name(graph, DW_NONE), "?");
    dw_graph_destroy(graph);
}

static void operations_are_found_by_name(void **state) {
    (void)state;
    dw_op op;
    for (int i = 0; i < DW_OP_COUNT; i++) {
        assert_ok(dw_op_find(dw_op_name((dw_op)i), &op));
        assert_int_equal(op, i);
    }
    assert_string_equal(dw_op_name(DW_OP_COUNT), "?");
    assert_fails(dw_op_find("layernorm", &op), DW_NOT_FOUND, "layer_norm");
    assert_fails(dw_op_find("entropy", &op), DW_NOT_FOUND, "cross_entropy");
    assert_fails(dw_op_find("zzzzzzzzz", &op), DW_NOT_FOUND, "deepwell/ops.h");
    assert_true(dw_op_is_composite(DW_OP_LINEAR) && !dw_op_is_composite(DW_OP_MATMUL));
    assert_true(dw_op_is_elementwise(DW_OP_GELU) && !dw_op_is_elementwise(DW_OP_SOFTMAX));
}

/* Properties of each row that the rest of the library relies on. */
static void table_is_complete(void **state) {
    (void)state;
    for (int i = 0; i < DW_OP_COUNT; i++) {
        const dw__op_row *row = &dw__op_table[i];
        assert_non_null(row->name);
        assert_non_null(row->infer);
        assert_non_null(row->cost);
        assert_true(row->min_inputs <= row->max_inputs && row->max_inputs <= DW_MAX_INPUTS);
        assert_true(row->max_inputs == 0 || row->operands[0]);
        assert_true((row->required_attrs & ~row->allowed_attrs) == 0);
        assert_true(row->elementwise == (row->typing != DW__NOT_ELEMENTWISE));
        assert_true((row->expand != NULL) == (row->stratum == DW__COMPOSITE));
        assert_false(row->gradient && row->stops_gradient);
        if (row->stratum == DW__PRIMITIVE && i != DW_OP_FUSED)
            assert_true(row->gradient || row->stops_gradient);
    }
}

/* ---- copies -------------------------------------------------------------------------------- */

static void clone_keeps_everything(void **state) {
    (void)state;
    dw_graph *graph = read_text(gpt_block), *copy;
    /* A leaf made after nodes keeps its index in a clone. */
    dw_value late;
    assert_ok(dw_graph_leaf(graph, DW_ROLE_GRADIENT, "late", DW_F32, 0, NULL, &late));
    char *before, *after;
    assert_ok(dw_graph_clone(graph, &copy));
    assert_int_equal(dw_graph_find(copy, "late"), late);
    assert_ok(dw_graph_to_text(graph, &before));
    dw_graph_destroy(graph);
    assert_ok(dw_graph_to_text(copy, &after));
    assert_string_equal(before, after);
    assert_ok(dw_graph_verify(copy));
    dw_text_free(before);
    dw_text_free(after);
    dw_graph_destroy(copy);
}

static void rewriting_keeps_leaves_names_and_outputs(void **state) {
    (void)state;
    dw_graph *graph = read_text(gpt_block);
    dw__rewriter rewriter;
    dw_value leaf = dw_graph_find(graph, "dloss");
    uint32_t nodes = dw_graph_node_count(graph);
    assert_ok(dw__rewriter_begin(&rewriter, graph));
    /* Copies all nodes but the last, which no output needs. */
    for (dw_node node = 0; node + 1 < nodes; node++) assert_ok(dw__rewriter_copy(&rewriter, node));
    assert_ok(dw__rewriter_end(&rewriter, &graph));
    assert_int_equal(dw_graph_node_count(graph), nodes - 1);
    assert_int_equal(dw_graph_find(graph, "dloss"), leaf);
    assert_int_equal(dw_graph_output(graph, 0), dw_graph_find(graph, "logits"));
    assert_string_equal(dw_graph_symbol_name(graph, 1), "S");

    assert_ok(dw__rewriter_begin(&rewriter, graph));
    assert_fails(dw__rewriter_copy(&rewriter, 2), DW_INTERNAL, "is copied before its operand");
    assert_fails(dw__rewriter_end(&rewriter, &graph), DW_INTERNAL, "was not made by the pass");
    dw__rewriter_abort(&rewriter);
    assert_ok(dw_graph_verify(graph));
    dw_graph_destroy(graph);
}

/* Bounds that symbols leave open are decided by their sizes. */
static void sizes_are_checked(void **state) {
    (void)state;
    dw_graph *graph = read_text("deepwell graph 1\nsymbols B, S\n"
                                "constant %mask: bool[1024, B]\n"
                                "input %x: f32[S - 3, 4]\n"
                                "%y = slice(%mask) {start=[0, 0], limit=[S, B]}\n"
                                "%z, %i = top_k(%x) {axis=0, size=[B]}\n"
                                "return %y, %z\n");
    assert_ok(dw__graph_check_sizes(graph, (int64_t[]){2, 1024}));
    assert_fails(dw__graph_check_sizes(graph, (int64_t[]){2, 1025}), DW_SHAPE,
                 "at these sizes: node 0 (slice \"y\"): slice: limit[0] is 1025; expected at most "
                 "x's dim 0, 1024");
    assert_fails(dw__graph_check_sizes(graph, (int64_t[]){7, 9}), DW_SHAPE,
                 "top_k: size is 7; expected at most x's dim on the axis, 6");
    assert_fails(dw__graph_check_sizes(graph, (int64_t[]){7, 2}), DW_SHAPE,
                 "leaf \"x\": at these symbol sizes the dim S - 3 is negative");
    dw_graph_destroy(graph);
}

/* ---- verification -------------------------------------------------------------------------- */

typedef void corruption(dw_graph *graph, dw_node attention);

static void wrong_dtype(dw_graph *graph, dw_node attention) {
    graph->values.items[graph->nodes.items[attention].outputs[0]].dtype = DW_BF16;
}
static void wrong_rank(dw_graph *graph, dw_node attention) {
    graph->values.items[graph->nodes.items[attention].outputs[0]].rank = 3;
}
static void wrong_operation(dw_graph *graph, dw_node attention) {
    graph->nodes.items[attention].op = DW_OP_ADD;
}
static void no_operation(dw_graph *graph, dw_node attention) {
    graph->nodes.items[attention].op = (dw_op)999;
}
static void later_operand(dw_graph *graph, dw_node attention) {
    ((dw_value *)graph->nodes.items[attention].inputs)[0] = dw_graph_find(graph, "logits");
}
static void missing_operand(dw_graph *graph, dw_node attention) {
    ((dw_value *)graph->nodes.items[attention].inputs)[0] = 12345;
}
static void absent_operand(dw_graph *graph, dw_node attention) {
    ((dw_value *)graph->nodes.items[attention].inputs)[0] = DW_NONE;
}
static void lost_attribute(dw_graph *graph, dw_node attention) {
    graph->nodes.items[attention].attr_count = 0;
}
static void unsorted_attributes(dw_graph *graph, dw_node attention) {
    dw_attr *attrs = (dw_attr *)graph->nodes.items[attention].attrs, kept = attrs[0];
    attrs[0] = attrs[1];
    attrs[1] = kept;
}
static void stolen_output(dw_graph *graph, dw_node attention) {
    ((dw_value *)graph->nodes.items[attention].outputs)[1] = dw_graph_find(graph, "h");
}
static void wrong_layer(dw_graph *graph, dw_node attention) {
    graph->nodes.items[attention].layer = -5;
}
static void orphan(dw_graph *graph, dw_node attention) {
    graph->values.items[graph->nodes.items[attention].outputs[0]].node = DW_NONE;
}
static void wrong_name(dw_graph *graph, dw_node attention) {
    graph->values.items[graph->nodes.items[attention].outputs[0]].name = "other";
}
static void leaf_role(dw_graph *graph, dw_node attention) {
    graph->values.items[graph->nodes.items[attention].outputs[0]].role = DW_ROLE_INPUT;
}
static void negative_dim(dw_graph *graph, dw_node attention) {
    dw_dim *shape = (dw_dim *)graph->values.items[graph->nodes.items[attention].outputs[0]].shape;
    assert_ok(dw_dim_sub(graph, 0, 3, &shape[0]));
}
static void lost_leaf(dw_graph *graph, dw_node attention) {
    (void)attention;
    graph->leaves.count--;
}
static void wrong_output(dw_graph *graph, dw_node attention) {
    (void)attention;
    graph->outputs.items[0] = 9999;
}

static void verify_finds_corruption(void **state) {
    (void)state;
    static const struct {
        corruption *corrupt;
        const char *message;
    } cases[] = {
        {wrong_dtype, "(attention \"o\", module h.0.attn): its output 0 is bf16"},
        {wrong_rank, "(attention \"o\", module h.0.attn): its output 0 is f32[B, 4, S]; the rule"},
        {wrong_operation, "(add \"o\", module h.0.attn): add: 5 operands are given"},
        {no_operation, "\"o\", module h.0.attn): its operation 999 does not exist"},
        {later_operand, "operand 0 (q), \"logits\", is computed by the later node"},
        {missing_operand, "operand 0 (q) is value 12345, which does not exist"},
        {absent_operand, "attention: operand 0 (q) is absent"},
        {lost_attribute, "attention: attribute scale is required"},
        {unsorted_attributes, "its attributes are not sorted"},
        {stolen_output, "(\"lse\"): its node does not have it as that output"},
        {wrong_layer, "layer -5"},
        {orphan, "leaves are listed, but the graph has"},
        {wrong_name, "it is not found by its name"},
        {leaf_role, "its role is that of a leaf"},
        {negative_dim, "a dim is negative"},
        {lost_leaf, "8 leaves are listed, but the graph has 9"},
        {wrong_output, "output 0 is value 9999"},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_graph *graph = read_text(gpt_block);
        dw_node attention = dw_value_node(graph, dw_graph_find(graph, "o"));
        assert_ok(dw_graph_verify(graph));
        cases[i].corrupt(graph, attention);
        dw_status status = dw_graph_verify(graph);
        if (status == DW_OK) fail_msg("corruption %zu (%s) is not found", i, cases[i].message);
        assert_message(cases[i].message);
        dw_graph_destroy(graph);
    }
}

/* ---- forms --------------------------------------------------------------------------------- */

static void text_round_trips(void **state) {
    (void)state;
    dw_graph *graph = read_text(gpt_block);
    char *text;
    assert_ok(dw_graph_verify(graph));
    assert_ok(dw_graph_to_text(graph, &text));
    assert_string_equal(text, gpt_block);
    dw_text_free(text);
    dw_graph_destroy(graph);
}

static void json_round_trips(void **state) {
    (void)state;
    dw_graph *graph = read_text(gpt_block), *back;
    char *json, *again, *text;
    assert_ok(dw_graph_to_json(graph, &json));
    assert_ok(dw_graph_from_json(json, strlen(json), &back));
    assert_ok(dw_graph_verify(back));
    assert_ok(dw_graph_to_json(back, &again));
    assert_string_equal(json, again);
    assert_ok(dw_graph_to_text(back, &text));
    assert_string_equal(text, gpt_block);
    dw_text_free(json);
    dw_text_free(again);
    dw_text_free(text);
    dw_graph_destroy(graph);
    dw_graph_destroy(back);
}

static void empty_graph_round_trips(void **state) {
    (void)state;
    dw_graph *graph = new_graph(), *back;
    char *text;
    assert_ok(dw_graph_to_text(graph, &text));
    assert_string_equal(text, "deepwell graph 1\n");
    assert_ok(dw_graph_from_text(text, &back));
    dw_graph_destroy(back);
    dw_text_free(text);
    assert_ok(dw_graph_to_json(graph, &text));
    assert_ok(dw_graph_from_json(text, strlen(text), &back));
    dw_graph_destroy(back);
    dw_text_free(text);
    dw_graph_destroy(graph);
}

static void numbers_round_trip(void **state) {
    (void)state;
    static const double numbers[] = {0.0,
                                     -0.0,
                                     0.1,
                                     1.0 / 3,
                                     1e-5,
                                     5e-324,
                                     0x1.fffffffffffffp1023,
                                     1e22,
                                     -2.5,
                                     1e15,
                                     123456789012345680.0,
                                     INFINITY,
                                     -INFINITY};
    char text[DW__NUMBER_BYTES];
    double back;
    for (size_t i = 0; i < DW_COUNT(numbers); i++) {
        dw__number_text(numbers[i], text);
        const char *end = dw__number_parse(text, &back);
        assert_non_null(end);
        assert_true(*end == '\0');
        assert_memory_equal(&back, &numbers[i], sizeof back);
    }
    dw__number_text(0.1, text);
    assert_string_equal(text, "0.1");
    dw__number_text(-NAN, text);
    assert_string_equal(text, "nan");
    assert_null(dw__number_parse("0x10", &back));
    assert_null(dw__number_parse("1e999", &back));
}

static void text_errors_name_the_line(void **state) {
    (void)state;
    static const struct {
        const char *text, *message;
        dw_status status;
    } cases[] = {
        {"", "line 1: expected the header", DW_PARSE},
        {"deepwell graph 2\n", "expected the header", DW_PARSE},
        {"deepwell graph 1\nfoo %x: f32[]\n", "line 2: \"foo\" is not a leaf", DW_PARSE},
        {"deepwell graph 1\nactivation %x: f32[]\n", "which no leaf can have", DW_PARSE},
        {"deepwell graph 1\ninput %x: f33[]\n", "\"f33\" is not an element type", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[B]\n", "uses the symbol B, which the graph does not list",
         DW_PARSE},
        {"deepwell graph 1\nsymbols B, B\n", "B is listed twice", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[-1]\n", "negative", DW_SHAPE},
        {"deepwell graph 1\ninput %x: f32[]\ninput %x: f32[]\n", "line 3: the graph has a value",
         DW_PARSE},
        {"deepwell graph 1\ninput %\"x: f32[]\n", "expected text that ends with", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[1,1,1,1,1,1,1,1,1]\n", "8 entries", DW_PARSE},
        {"deepwell graph 1\n%y = neg(%x)\n", "line 2: there is no value \"x\" above", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[]\n\n%y = ngg(%x)\n",
         "line 4: there is no operation \"ngg\"; similar names: neg", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[]\n%y: f32[1] = neg(%x)\n",
         "line 3: node 1 (neg \"y\"): output 0 (\"y\") is declared f32[1], but neg gives f32[]",
         DW_SHAPE},
        {"deepwell graph 1\ninput %x: f32[]\n%y = neg(%x) {axos=1}\n", "no attribute \"axos\"",
         DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[2]\n%y = softmax(%x) {axis=99999999999999999999}\n",
         "64 bits", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[2]\n%y = neg(%x) # where\n", "\"where\" is not a region",
         DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[2]\n%y = neg(%x) x\n", "expected the end of the line",
         DW_PARSE},
        {"deepwell graph 1\nreturn %x\n", "there is no value \"x\"", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[2]\n%x = neg(%x)\n", "already", DW_PARSE},
        {"deepwell graph 1\ninput %x: f32[2]\n%y, %y = sort(%x) {axis=0}\n",
         "two outputs of one node", DW_PARSE},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_graph *graph = NULL;
        dw_status status = dw_graph_from_text(cases[i].text, &graph);
        assert_fails(status, cases[i].status, cases[i].message);
        assert_null(graph);
    }
}

#define JSON_HEAD "{\"format\":\"deepwell.graph\",\"version\":1,\"symbols\":[\"B\"],"
#define JSON_LEAF "{\"name\":\"x\",\"role\":\"input\",\"dtype\":\"f32\",\"shape\":[\"2*B\",4]}"
#define JSON_NODES(nodes)                                                                          \
    JSON_HEAD "\"leaves\":[" JSON_LEAF "],\"nodes\":[" nodes "],\"outputs\":[\"x\"]}"
#define JSON_LEAVES(leaves) JSON_HEAD "\"leaves\":[" leaves "],\"nodes\":[],\"outputs\":[]}"

static void json_errors_name_the_node(void **state) {
    (void)state;
    static const struct {
        const char *json, *message;
        dw_status status;
    } cases[] = {
        {"", "line 1, column 0", DW_PARSE},
        {"[]", "the graph is an array; expected an object", DW_PARSE},
        {"{\"a\":1,\"a\":2}", "duplicate object key", DW_PARSE},
        {"{\"format\":\"other\"}", "format is \"other\"", DW_PARSE},
        {"{\"format\":\"deepwell.graph\",\"version\":2}",
         "version is 2; this Deepwell reads version 1", DW_UNSUPPORTED},
        {"{\"format\":\"deepwell.graph\",\"version\":1,\"extra\":0}", "unknown key \"extra\"",
         DW_PARSE},
        {"{\"format\":\"deepwell.graph\",\"version\":1}", "symbols is missing", DW_PARSE},
        {"{\"format\":\"deepwell.graph\",\"version\":1,\"symbols\":[\"B\",\"B\"]}", "listed twice",
         DW_PARSE},
        {"{\"format\":\"deepwell.graph\",\"version\":1,\"symbols\":[\"2\"]}", "not a symbol name",
         DW_PARSE},
        {JSON_LEAVES("{\"name\":\"x\"}"), "leaf 0 (\"x\"): role is missing; expected a string",
         DW_PARSE},
        {JSON_LEAVES("{\"name\":\"x\",\"rule\":\"input\"}"), "unknown key \"rule\"", DW_PARSE},
        {JSON_LEAVES("{\"name\":\"x\",\"role\":\"input\",\"dtype\":\"float\",\"shape\":[]}"),
         "dtype is \"float\"", DW_PARSE},
        {JSON_LEAVES("{\"name\":\"x\",\"role\":\"input\",\"dtype\":\"f32\",\"shape\":[1.5]}"),
         "shape is a real number; expected an integer or a string", DW_PARSE},
        {JSON_LEAVES("{\"name\":\"x\",\"role\":\"input\",\"dtype\":\"f32\",\"shape\":[-1]}"),
         "dim -1", DW_SHAPE},
        {JSON_LEAVES("{\"name\":\"x\",\"role\":\"input\",\"dtype\":\"f32\",\"shape\":[\"T\"]}"),
         "the symbol T, which the graph does not list", DW_PARSE},
        {JSON_LEAVES("{\"name\":\"x\",\"role\":\"input\",\"dtype\":\"f32\",\"shape\":[1e400]}"),
         "real number overflow", DW_PARSE},
        {JSON_LEAVES("{\"name\":\"x\",\"role\":\"input\",\"dtype\":\"f32\",\"shape\":["
                     "99999999999999999999]}"),
         "too big integer", DW_PARSE},
        {JSON_LEAVES(JSON_LEAF "," JSON_LEAF), "leaf 1 (\"x\"): the graph has a value named",
         DW_PARSE},
        {JSON_NODES("7"), "node 0 (? \"\"): the node is an integer; expected an object", DW_PARSE},
        {JSON_NODES("{\"op\":\"negg\",\"inputs\":[\"x\"],\"outputs\":[\"y\"],\"module\":\"h.0\"}"),
         "node 0 (negg \"y\", module h.0): there is no operation \"negg\"; similar names: neg",
         DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"z\"],\"outputs\":[\"y\"]}"),
         "node 0 (neg \"y\"): an entry of inputs is \"z\"; there is no leaf", DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[null],\"outputs\":[\"y\"]}"),
         "operand 0 (x) is absent", DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[\"x\"]}"), "already",
         DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[\"y\",\"z\"]}"), "it has 1",
         DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[]}"),
         "0 outputs are given; neg has 1", DW_PARSE},
        {JSON_NODES("{\"op\":\"softmax\",\"inputs\":[\"x\"],\"outputs\":[\"y\"],\"attrs\":{"
                    "\"axis\":1.0}}"),
         "axis is a real number; expected an integer", DW_PARSE},
        {JSON_NODES(
             "{\"op\":\"softmax\",\"inputs\":[\"x\"],\"outputs\":[\"y\"],\"attrs\":{\"exis\":1}}"),
         "no attribute \"exis\"", DW_PARSE},
        {JSON_NODES("{\"op\":\"rms_norm\",\"inputs\":[\"x\"],\"outputs\":[\"y\",\"r\"],\"attrs\":{"
                    "\"eps\":\"big\"}}"),
         "eps is a string; expected a number", DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[{\"name\":\"y\",\"dtype\":"
                    "\"f32\",\"shape\":[\"B\",4]}]}"),
         "output 0 (\"y\") is declared f32[B, 4], but neg gives f32[2*B, 4]", DW_SHAPE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[\"y\"],\"region\":\"tail\"}"),
         "region is \"tail\"", DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[\"y\"],\"layer\":-2}"),
         "layer is -2", DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[\"y\"],\"backward\":1}"),
         "backward is an integer; expected true or false", DW_PARSE},
        {JSON_NODES("{\"op\":\"neg\",\"inputs\":[\"x\"],\"outputs\":[\"a\\u0001\"]}"),
         "the byte 0x01", DW_PARSE},
        {JSON_HEAD "\"leaves\":[],\"nodes\":[],\"outputs\":[\"q\"]}", "there is no leaf", DW_PARSE},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        dw_graph *graph = NULL;
        dw_status status = dw_graph_from_json(cases[i].json, strlen(cases[i].json), &graph);
        assert_fails(status, cases[i].status, cases[i].message);
        assert_null(graph);
    }
    enum { DEPTH = 100000 };
    char *deep = test_malloc(DEPTH);
    memset(deep, '[', DEPTH);
    dw_graph *graph = NULL;
    assert_fails(dw_graph_from_json(deep, DEPTH, &graph), DW_PARSE, "within one another");
    test_free(deep);
}

static void json_accepts_the_forms_of_front_ends(void **state) {
    (void)state;
    static const char json[] = JSON_NODES(
        "{\"op\":\"rms_norm\",\"inputs\":[\"x\",null],\"outputs\":[\"y\",{\"name\":\"r\","
        "\"dtype\":\"f32\",\"shape\":[\"B*2\"]}],\"attrs\":{\"eps\":1},\"region\":\"norm\","
        "\"layer\":3,\"module\":\"m\",\"backward\":true},"
        "{\"op\":\"pad\",\"inputs\":[\"y\"],\"outputs\":[\"z\"],\"attrs\":{\"low\":[0,\"B\"],"
        "\"high\":[0,1],\"value\":\"-inf\"}}");
    dw_graph *graph;
    assert_ok(dw_graph_from_json(json, sizeof json - 1, &graph));
    assert_true(dw_node_float(graph, 0, DW_ATTR_KEY_EPS, 0) == 1);
    assert_true(dw_node_float(graph, 1, DW_ATTR_KEY_VALUE, 0) == -INFINITY);
    assert_int_equal(dw_node_region(graph, 0), DW_REGION_NORM);
    assert_int_equal(dw_node_layer(graph, 0), 3);
    assert_true(dw_node_is_backward(graph, 0) && !dw_node_is_backward(graph, 1));
    assert_dim(graph, dw_value_shape(graph, dw_graph_find(graph, "z"))[1], "B + 5");
    dw_graph_destroy(graph);
}

/* ---- costs --------------------------------------------------------------------------------- */

static dw_cost cost_of(const char *leaves, const char *node, const int64_t *sizes) {
    char text[2048];
    dw_graph *graph;
    dw_cost cost = {0, 0};
    write_rule(&(rule_case){leaves, node, DW_OK, NULL}, text, sizeof text);
    assert_ok(dw_graph_from_text(text, &graph));
    assert_ok(dw_graph_cost(graph, sizes, &cost));
    dw_graph_destroy(graph);
    return cost;
}

static void assert_cost(dw_cost cost, double flops, double bytes) {
    if (cost.flops != flops || cost.bytes != bytes)
        fail_msg("%.17g flops and %.17g bytes; expected %.17g and %.17g", cost.flops, cost.bytes,
                 flops, bytes);
}

static void costs_follow_the_sizes(void **state) {
    (void)state;
    const int64_t sizes[2] = {3, 7};
    assert_cost(cost_of("x: f32[B, S]", "%y = mul(%x, %x)", sizes), 21, 2 * 21 * 4);
    assert_cost(cost_of("x: bf16[B, S]", "%y = reshape(%x) {shape=[B*S]}", sizes), 0, 0);
    assert_cost(cost_of("a: f32[B, S, 5]; b: f32[B, 5, 2]", "%y = matmul(%a, %b)", sizes),
                2.0 * 3 * 7 * 5 * 2, 4.0 * (105 + 30 + 42));
    assert_cost(cost_of("a: f32[5, S]; b: f32[5, 2]", "%y = matmul(%a, %b) {transpose_a=1}", sizes),
                2.0 * 7 * 5 * 2, 4.0 * (35 + 10 + 14));
    assert_cost(cost_of("x: f32[B, 5]; w: f32[2, 5]; b: f32[2]", "%y = linear(%x, %w, %b)", sizes),
                2.0 * 3 * 5 * 2 + 6, 4.0 * (15 + 10 + 2 + 6));
    assert_cost(cost_of("x: f32[B, 5]; w: f32[2, 5]",
                        "%y = quantized_linear(%x, %w) {" LAYER_OF("bf16") "}", sizes),
                2.0 * 3 * 5 * 2, 4.0 * (15 + 10 + 6));
    assert_cost(cost_of("x: f32[B, 5]", "%y, %s = quantize(%x) {scheme=\"mxfp8\", axis=0}", sizes),
                2.0 * 15, 4.0 * 15 + 2.0 * 15 + 4);
    assert_cost(cost_of("x: f32[4, 64]",
                        "%c, %s, %t = quantize_blocks(%x) {scheme=\"mxfp4\", axis=1}", sizes),
                2.0 * 256, 4.0 * 256 + 128 + 8 + 4);
    assert_cost(cost_of("w: f32[1000, 5]; i: i64[S]", "%y = embedding(%w, %i)", sizes), 0,
                7 * 8 + 2.0 * 35 * 4);
    assert_cost(cost_of("x: f32[B, S]",
                        "%y = fused(%x) {body=\"t0=exp(i0);t1=mul(t0,t0);out(t1)\"}", sizes),
                42, 2 * 21 * 4);
    assert_cost(cost_of("x: f32[8, S]", "%v, %i = sort(%x) {axis=0}", sizes), 56 * 3,
                56 * (4 + 4 + 8));
}

/* Compares the number of visible pairs with the definition, pair by pair. */
static void attention_costs_count_visible_pairs(void **state) {
    (void)state;
    static const int64_t windows[] = {-1, 0, 1, 3, 100};
    for (int64_t queries = 0; queries <= 9; queries += 3)
        for (int64_t keys = 0; keys <= 10; keys += 2)
            for (int causal = 0; causal <= 2; causal++)
                for (size_t w = 0; w < DW_COUNT(windows); w++) {
                    int64_t sizes[2] = {queries, keys}, pairs = 0;
                    int64_t shift = causal == 2 ? keys - queries : 0, window = windows[w];
                    for (int64_t q = 0; q < queries; q++)
                        for (int64_t k = 0; k < keys; k++)
                            pairs += (!causal || k <= q + shift) &&
                                     (window < 0 || k > q + shift - window);
                    char node[256];
                    snprintf(
                        node, sizeof node,
                        "%%o, %%l = attention(%%q, %%k, %%v) {scale=1, causal=%d, window=%lld}",
                        causal, (long long)window);
                    dw_cost cost = cost_of(
                        "q: f32[2, 4, B, 8]; k: f32[2, 2, S, 8]; v: f32[2, 2, S, 6]", node, sizes);
                    assert_true(cost.flops == 2.0 * 8 * (double)pairs * (8 + 6));
                }
}

static void costs_fail_clearly(void **state) {
    (void)state;
    dw_graph *graph = read_text(gpt_block);
    dw_cost cost;
    assert_fails(dw_graph_cost(graph, NULL, &cost), DW_INVALID_ARGUMENT, "symbol sizes are NULL");
    assert_fails(dw_graph_cost(graph, (int64_t[]){2, -1}, &cost), DW_INVALID_ARGUMENT,
                 "symbol S has size -1");
    assert_fails(dw_node_cost(graph, 999, (int64_t[]){2, 2}, &cost), DW_INVALID_ARGUMENT,
                 "node 999");
    assert_fails(dw_graph_cost(graph, (int64_t[]){INT64_MAX, 3}, &cost), DW_SHAPE, "cost of node");
    assert_ok(dw_graph_cost(graph, (int64_t[]){2, 5}, &cost));
    assert_true(cost.flops > 2.0 * 10 * 64 * 257 && cost.bytes > 0);
    dw_graph_destroy(graph);
}

/* ---- memory -------------------------------------------------------------------------------- */

/* Builds, clones, verifies, writes and reads in both forms. Returns true if everything succeeded. */
static bool run_everything(void) {
    dw_graph *graph = NULL, *copy = NULL, *from_json = NULL;
    char *text = NULL, *json = NULL;
    dw_status status = DW_OK;
    DW_TRY(dw_graph_from_text(gpt_block, &graph));
    DW_TRY(dw_graph_clone(graph, &copy));
    dw_value h = dw_graph_find(copy, "h"), y;
    uint32_t nodes = dw_graph_node_count(copy);
    status = dw_graph_apply(copy, DW_OP_NEG, 1, &h, 0, NULL, &y);
    if (status != DW_OK) assert_int_equal(dw_graph_node_count(copy), nodes);
    if (status != DW_OK) goto cleanup;
    DW_TRY(dw_graph_add_output(copy, y));
    DW_TRY(dw_graph_verify(copy));
    DW_TRY(dw_graph_to_text(copy, &text));
    DW_TRY(dw_graph_to_json(copy, &json));
    DW_TRY(dw_graph_from_json(json, strlen(json), &from_json));
cleanup:
    if (status != DW_OK) assert_int_equal(status, DW_OUT_OF_MEMORY);
    if (status != DW_OK) assert_true(strlen(dw_last_error()) > 0);
    dw__memory_fail_after(-1);
    if (copy) assert_ok(dw_graph_verify(copy)); /* the failed call left it unchanged */
    dw_text_free(text);
    dw_text_free(json);
    dw_graph_destroy(graph);
    dw_graph_destroy(copy);
    dw_graph_destroy(from_json);
    return status == DW_OK;
}

static void every_allocation_may_fail(void **state) {
    (void)state;
    enum { ENOUGH = 100000 };
    int64_t live = dw__memory_live(), count = 0;
    for (bool done = false; !done; count++) {
        assert_true(count < ENOUGH);
        dw__memory_fail_after(count);
        done = run_everything();
        assert_int_equal(dw__memory_live(), live);
    }
    assert_true(count > 50); /* the loop did go through the allocations */
}

/* ---- size ---------------------------------------------------------------------------------- */

static void large_graphs_read_back(void **state) {
    (void)state;
    enum { NODES = 3000 };
    dw_graph *graph = new_graph(), *back;
    dw_dim shape[2] = {parse(graph, "B*S"), 64};
    dw_value x, w;
    char *json, *again;
    assert_ok(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 2, shape, &x));
    assert_ok(dw_graph_leaf(graph, DW_ROLE_PARAMETER, "w", DW_F32, 2, (dw_dim[]){64, 64}, &w));
    for (int i = 0; i < NODES; i++) {
        char module[64];
        snprintf(module, sizeof module, "transformer.h.%d.mlp.c_fc", i);
        assert_ok(dw_graph_set_origin(graph, DW_REGION_MLP, i, module));
        assert_ok(dw_graph_apply(graph, DW_OP_LINEAR, 2, (dw_value[]){x, w}, 1,
                                 (dw_attr[]){dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, 1)}, &x));
    }
    assert_ok(dw_graph_add_output(graph, x));
    assert_ok(dw_graph_to_json(graph, &json));
    double start = dw__seconds();
    assert_ok(dw_graph_from_json(json, strlen(json), &back));
    print_message("3000 nodes from %zu bytes of JSON: %.1f ms\n", strlen(json),
                  1e3 * (dw__seconds() - start));
    assert_ok(dw_graph_to_json(back, &again));
    assert_string_equal(json, again);
    assert_int_equal(dw_graph_node_count(back), NODES);
    dw_text_free(json);
    dw_text_free(again);
    dw_graph_destroy(graph);
    dw_graph_destroy(back);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dims_are_canonical),
        cmocka_unit_test(dims_reject_malformed_text),
        cmocka_unit_test(quotients_round_up),
        cmocka_unit_test(quotients_of_products_are_bounded),
        cmocka_unit_test(dims_algebra_holds),
        cmocka_unit_test(dims_fail_clearly),
        cmocka_unit_test(elementwise_rules),
        cmocka_unit_test(creation_rules),
        cmocka_unit_test(moving_rules),
        cmocka_unit_test(reducing_rules),
        cmocka_unit_test(product_rules),
        cmocka_unit_test(norm_rules),
        cmocka_unit_test(attention_rules),
        cmocka_unit_test(loss_and_optimizer_rules),
        cmocka_unit_test(fused_rules),
        cmocka_unit_test(bodies_read_back),
        cmocka_unit_test(bodies_reject_malformed_text),
        cmocka_unit_test(failures_leave_the_graph_unchanged),
        cmocka_unit_test(names_are_unique_and_found),
        cmocka_unit_test(queries_of_absent_things_are_neutral),
        cmocka_unit_test(operations_are_found_by_name),
        cmocka_unit_test(table_is_complete),
        cmocka_unit_test(clone_keeps_everything),
        cmocka_unit_test(rewriting_keeps_leaves_names_and_outputs),
        cmocka_unit_test(sizes_are_checked),
        cmocka_unit_test(verify_finds_corruption),
        cmocka_unit_test(text_round_trips),
        cmocka_unit_test(json_round_trips),
        cmocka_unit_test(empty_graph_round_trips),
        cmocka_unit_test(numbers_round_trip),
        cmocka_unit_test(text_errors_name_the_line),
        cmocka_unit_test(json_errors_name_the_node),
        cmocka_unit_test(json_accepts_the_forms_of_front_ends),
        cmocka_unit_test(costs_follow_the_sizes),
        cmocka_unit_test(attention_costs_count_visible_pairs),
        cmocka_unit_test(costs_fail_clearly),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(large_graphs_read_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
