/* Passes: what each one recognises, folds and fuses, what it must leave unchanged, and that results stay the
 * same. The reference interpreter in F64 computes the results before and after. */
#include "graph/emit.h"
#include "graph/passes.h"
#include "kernel/reference/interpret.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define OK(call) assert_string_equal((call) == DW_OK ? "" : dw_last_error(), "")
#define MAX_LEAVES 16
#define MAX_OUTPUTS 24

/* ---- a graph under construction ------------------------------------------------------------- */

static dw__emitter e;
static dw_dim B, S;
static const int64_t sizes[] = {3, 5};

static int open_graph(void **state) {
    (void)state;
    e.status = dw_graph_create(&e.graph);
    OK(dw_graph_symbol(e.graph, "B", &B));
    OK(dw_graph_symbol(e.graph, "S", &S));
    return 0;
}

static int close_graph(void **state) {
    (void)state;
    dw_graph_destroy(e.graph);
    e.graph = NULL;
    return 0;
}

static dw_value leaf(const char *name, dw_dtype dtype, int rank, ...) {
    dw_dim shape[DW_MAX_RANK];
    dw_value value;
    va_list dims;
    va_start(dims, rank);
    for (int i = 0; i < rank; i++) shape[i] = va_arg(dims, dw_dim);
    va_end(dims);
    OK(dw_graph_leaf(e.graph, strcmp(name, "seed") ? DW_ROLE_INPUT : DW_ROLE_SEED, name, dtype,
                     rank, shape, &value));
    return value;
}

#define D(n) ((dw_dim)(n))
static dw_value op1(dw_op op, dw_value x) { return dw__emit_unary(&e, op, x); }
static dw_value op2(dw_op op, dw_value x, dw_value y) { return dw__emit_binary(&e, op, x, y); }
static dw_value mul(dw_value x, dw_value y) { return op2(DW_OP_MUL, x, y); }
static dw_value add(dw_value x, dw_value y) { return op2(DW_OP_ADD, x, y); }
static dw_value number(dw_op op, dw_value x, double c) {
    return dw__emit_with_number(&e, op, x, c);
}
/* A broadcast scalar constant, as a front end may write it. */
static dw_value spread(dw_value like, double c) {
    dw_value scalar = dw__emit_constant(&e, dw_value_dtype(e.graph, like), 0, NULL, c);
    return dw__emit_broadcast_like(&e, scalar, like);
}
static dw_value like(dw_value x, dw_value y) { return dw__emit_broadcast_like(&e, x, y); }
static dw_value reshape(dw_value x, int rank, ...) {
    dw_dim shape[DW_MAX_RANK];
    va_list dims;
    va_start(dims, rank);
    for (int i = 0; i < rank; i++) shape[i] = va_arg(dims, dw_dim);
    va_end(dims);
    return dw__emit_reshape(&e, x, rank, shape);
}
static dw_value broadcast(dw_value x, int rank, ...) {
    dw_dim shape[DW_MAX_RANK];
    va_list dims;
    va_start(dims, rank);
    for (int i = 0; i < rank; i++) shape[i] = va_arg(dims, dw_dim);
    va_end(dims);
    return dw__emit_broadcast(&e, x, rank, shape);
}
static dw_value mean_last(dw_value x, bool keep) {
    int64_t last = e.status == DW_OK ? dw_value_rank(e.graph, x) - 1 : 0;
    return dw__emit_reduce(&e, DW_OP_MEAN, x, (int)last, keep);
}
static void output(dw_value x) {
    OK(e.status);
    OK(dw_graph_add_output(e.graph, x));
}

/* ---- running -------------------------------------------------------------------------------- */

typedef struct run {
    dw__tensor leaves[MAX_LEAVES], outputs[MAX_OUTPUTS];
    uint32_t leaf_count, output_count;
} run;

static double uniform(uint64_t *s) { /* [0,1): SplitMix64 (Steele, Lea, Flood 2014) */
    uint64_t z = *s += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* Floating-point leaves are in F64 whatever their type, because the interpreter runs in high precision. */
static void fill(dw__tensor *t, uint64_t seed) {
    if (dw__dtype_is_float(t->dtype)) t->dtype = DW_F64;
    int64_t count = dw__tensor_count(t);
    t->data = dw__malloc_aligned((size_t)count * 8 + 8);
    for (int64_t i = 0; i < count; i++) {
        double u = uniform(&seed);
        if (t->dtype == DW_BOOL)
            ((uint8_t *)t->data)[i] = u < 0.7;
        else if (t->dtype == DW_I64)
            ((int64_t *)t->data)[i] = (int64_t)(u * 5);
        else
            ((double *)t->data)[i] = 4 * u - 2;
    }
}

static run evaluate(const dw_graph *graph) {
    run r = {0};
    dw__interpret_options options = {.high_precision = true};
    r.leaf_count = dw_graph_leaf_count(graph);
    r.output_count = dw_graph_output_count(graph);
    for (uint32_t i = 0; i < r.leaf_count; i++) {
        OK(dw__value_tensor_at(graph, dw_graph_leaf_at(graph, i), sizes, &r.leaves[i]));
        fill(&r.leaves[i], 77 + i);
    }
    OK(dw__interpret(graph, sizes, r.leaves, r.outputs, &options));
    return r;
}

static void release(run *r) {
    for (uint32_t i = 0; i < r->leaf_count; i++) dw__free_aligned(r->leaves[i].data);
    for (uint32_t i = 0; i < r->output_count; i++) dw__free_aligned(r->outputs[i].data);
}

static double element(const dw__tensor *t, int64_t i) {
    if (t->dtype == DW_BOOL) return ((const uint8_t *)t->data)[i];
    if (t->dtype == DW_I64) return (double)((const int64_t *)t->data)[i];
    if (t->dtype == DW_I32) return ((const int32_t *)t->data)[i];
    return ((const double *)t->data)[i];
}

static void same_results(const run *a, const run *b) {
    assert_int_equal(a->output_count, b->output_count);
    for (uint32_t i = 0; i < a->output_count; i++) {
        assert_int_equal(dw__tensor_count(&a->outputs[i]), dw__tensor_count(&b->outputs[i]));
        for (int64_t k = 0; k < dw__tensor_count(&a->outputs[i]); k++) {
            double x = element(&a->outputs[i], k), y = element(&b->outputs[i], k);
            if (!(x == y || (isnan(x) && isnan(y)) || fabs(x - y) <= 1e-11 * (1 + fabs(x))))
                fail_msg("output %u, element %d: %.17g, was %.17g", i, (int)k, y, x);
        }
    }
}

/* Runs passes on the graph and checks that its results stay the same. */
static void run_passes(uint32_t count, const dw_pass *passes) {
    OK(e.status);
    run before = evaluate(e.graph);
    for (uint32_t i = 0; i < count; i++) {
        OK(dw_graph_run_pass(&e.graph, passes[i]));
        OK(dw_graph_verify(e.graph));
        run after = evaluate(e.graph);
        same_results(&before, &after);
        release(&after);
    }
    release(&before);
}

static uint32_t count_op(dw_op op) {
    uint32_t count = 0;
    for (dw_node n = 0; n < dw_graph_node_count(e.graph); n++)
        count += dw_node_op(e.graph, n) == op;
    return count;
}

static dw_node find_op(dw_op op) {
    for (dw_node n = 0; n < dw_graph_node_count(e.graph); n++)
        if (dw_node_op(e.graph, n) == op) return n;
    fail_msg("the graph has no %s", dw_op_name(op));
    return DW_NONE;
}

#define RUN(...)                                                                                   \
    run_passes(sizeof((dw_pass[]){__VA_ARGS__}) / sizeof(dw_pass), (dw_pass[]){__VA_ARGS__})
#define RECOGNIZE() RUN(DW_PASS_FOLD, DW_PASS_RECOGNIZE, DW_PASS_FOLD, DW_PASS_COMMON)

/* ---- recognise: activations ----------------------------------------------------------------- */

static dw_value gelu_tanh(dw_value x, double scale, double cubic, int variant) {
    dw_value cube = variant & 1 ? number(DW_OP_POW, x, 3.0) : mul(mul(x, x), x);
    dw_value term = variant & 2 ? mul(spread(x, cubic), cube) : number(DW_OP_MUL, cube, cubic);
    dw_value inner = variant & 4 ? add(term, x) : add(x, term);
    dw_value t = op1(DW_OP_TANH, number(DW_OP_MUL, inner, scale));
    dw_value chance = variant & 8 ? add(spread(x, 1.0), t) : number(DW_OP_ADD, t, 1.0);
    dw_value half = number(DW_OP_MUL, x, 0.5);
    return variant & 16 ? mul(chance, half) : mul(half, chance);
}

static void gelu_is_recognised_in_every_order(void **state) {
    for (int variant = 0; variant < 32; variant++) {
        dw_value x = leaf("x", DW_F32, 3, B, S, D(7));
        output(gelu_tanh(x, sqrt(2.0 / M_PI), 0.044715, variant));
        RECOGNIZE();
        assert_int_equal(count_op(DW_OP_GELU), 1);
        assert_int_equal(dw_graph_node_count(e.graph), 1);
        assert_string_equal(dw_node_attr(e.graph, 0, DW_ATTR_KEY_APPROXIMATE)->string, "tanh");
        close_graph(state);
        open_graph(state);
    }
}

static void gelu_with_another_constant_is_none(void **state) {
    static const double wrong[][2] = {{0.7979, 0.044715}, {0.7978845608028654, 0.0447}};
    for (int i = 0; i < 2; i++) {
        dw_value x = leaf("x", DW_F32, 1, D(7));
        output(gelu_tanh(x, wrong[i][0], wrong[i][1], 0));
        RECOGNIZE();
        assert_int_equal(count_op(DW_OP_GELU), 0);
        close_graph(state);
        open_graph(state);
    }
}

static void gelu_whose_inside_is_read_is_left_alone(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 1, D(7));
    dw_value t = op1(DW_OP_ERF, number(DW_OP_MUL, x, sqrt(0.5)));
    output(mul(number(DW_OP_MUL, x, 0.5), number(DW_OP_ADD, t, 1.0)));
    output(t);
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_GELU), 0);
}

/* x * number as a chain in BF16 has it: the product is in F32 if BF16 does not represent the number. */
static dw_value rounded_product(dw_value x, double factor) {
    dw_value product = number(DW_OP_MUL, dw__emit_cast(&e, x, DW_F32), factor);
    return dw__emit_cast(&e, product, DW_BF16);
}

static void gelu_in_bf16_is_recognised_through_casts(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_BF16, 2, B, D(7));
    dw_value inner = add(x, rounded_product(number(DW_OP_POW, x, 3.0), 0.044715));
    dw_value t = op1(DW_OP_TANH, rounded_product(inner, sqrt(2.0 / M_PI)));
    output(mul(number(DW_OP_MUL, x, 0.5), number(DW_OP_ADD, t, 1.0)));
    RECOGNIZE();
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_string_equal(dw_node_attr(e.graph, 0, DW_ATTR_KEY_APPROXIMATE)->string, "tanh");
    assert_int_equal(dw_value_dtype(e.graph, dw_node_output(e.graph, 0, 0)), DW_BF16);
}

/* The product is in F32 and x in BF16: a GELU of x would round. */
static void gelu_of_another_type_is_left_alone(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_BF16, 2, B, D(7)), wide = dw__emit_cast(&e, x, DW_F32);
    dw_value narrow = dw__emit_cast(&e, number(DW_OP_MUL, wide, sqrt(0.5)), DW_BF16);
    dw_value chance = number(DW_OP_ADD, op1(DW_OP_ERF, narrow), 1.0);
    output(number(DW_OP_MUL, mul(dw__emit_cast(&e, x, DW_F32), dw__emit_cast(&e, chance, DW_F32)),
                  0.5));
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_GELU), 0);
}

static void gelu_by_erf_is_recognised(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 1, D(7));
    dw_value t = op1(DW_OP_ERF, number(DW_OP_DIV, x, sqrt(2.0)));
    output(number(DW_OP_MUL, mul(x, number(DW_OP_ADD, t, 1.0)), 0.5));
    RECOGNIZE();
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_string_equal(dw_node_attr(e.graph, 0, DW_ATTR_KEY_APPROXIMATE)->string, "none");
}

static void silu_and_swiglu_are_recognised(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, B, D(7)), up = leaf("up", DW_F32, 2, B, D(7));
    output(mul(mul(op1(DW_OP_SIGMOID, x), x), up));
    output(mul(up, op1(DW_OP_SIGMOID, up)));
    output(mul(up, op1(DW_OP_SIGMOID, x))); /* not the same operand */
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_SWIGLU), 1);
    assert_int_equal(count_op(DW_OP_SILU), 1);
    assert_int_equal(count_op(DW_OP_SIGMOID), 1);
}

/* ---- recognise: norms ----------------------------------------------------------------------- */

/* Builds Hugging Face's LlamaRMSNorm; `axis` is that of the mean. */
static dw_value llama_norm(dw_value x, dw_value w, int axis, bool weight_first, bool by_pow) {
    dw_dtype dtype = dw_value_dtype(e.graph, x);
    dw_value wide = dw__emit_cast(&e, x, DW_F32);
    dw_value square = by_pow ? number(DW_OP_POW, wide, 2.0) : mul(wide, wide);
    dw_value variance = dw__emit_reduce(&e, DW_OP_MEAN, square, axis, true);
    dw_value rstd = op1(DW_OP_RSQRT, number(DW_OP_ADD, variance, 1e-6));
    dw_value y = dw__emit_cast(&e, mul(wide, like(rstd, wide)), dtype);
    if (w == DW_NONE) return y;
    return weight_first ? mul(like(w, y), y) : mul(y, like(w, y));
}

static void rms_norm_is_recognised(void **state) {
    for (int i = 0; i < 4; i++) {
        dw_value x = leaf("x", DW_F32, 3, B, S, D(7)), w = leaf("w", DW_F32, 1, D(7));
        output(llama_norm(x, w, 2, i & 1, i & 2));
        RECOGNIZE();
        assert_int_equal(dw_graph_node_count(e.graph), 1);
        assert_int_equal(count_op(DW_OP_RMS_NORM), 1);
        assert_int_equal(dw_node_input(e.graph, 0, 1), dw_graph_find(e.graph, "w"));
        assert_true(dw_node_float(e.graph, 0, DW_ATTR_KEY_EPS, 0) == 1e-6);
        close_graph(state);
        open_graph(state);
    }
}

/* Composites round once, where a chain in BF16 or F16 rounds after every step. Llama's norm is computed in F32 between
 * two casts, and its weight is multiplied in the half type: all of it is one norm in that type. */
static void chains_of_half_types_are_recognised(void **state) {
    static const dw_dtype dtypes[] = {DW_BF16, DW_F16};
    for (int i = 0; i < 2; i++) {
        dw_value x = leaf("x", dtypes[i], 2, B, D(7)), w = leaf("w", dtypes[i], 1, D(7));
        dw_value a = leaf("a", dtypes[i], 2, D(5), D(7)), b = leaf("b", dtypes[i], 2, D(7), D(7));
        output(llama_norm(x, w, 1, false, false));
        output(mul(op1(DW_OP_SIGMOID, x), x));
        output(add(dw__emit_matmul(&e, a, b, false, false), like(w, a)));
        RECOGNIZE();
        dw_node norm = find_op(DW_OP_RMS_NORM), linear = find_op(DW_OP_LINEAR);
        assert_int_equal(dw_value_dtype(e.graph, dw_node_output(e.graph, norm, 0)), dtypes[i]);
        assert_int_equal(dw_node_input(e.graph, norm, 0), dw_graph_find(e.graph, "x"));
        assert_int_equal(dw_node_input(e.graph, norm, 1), dw_graph_find(e.graph, "w"));
        assert_int_equal(dw_node_input(e.graph, linear, 2), dw_graph_find(e.graph, "w"));
        assert_int_equal(count_op(DW_OP_SILU), 1);
        assert_int_equal(dw_graph_node_count(e.graph), 3);
        close_graph(state);
        open_graph(state);
    }
}

static void rms_norm_without_weight_is_recognised(void **state) {
    (void)state;
    output(llama_norm(leaf("x", DW_F32, 2, B, D(7)), DW_NONE, 1, false, false));
    RECOGNIZE();
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_int_equal(count_op(DW_OP_RMS_NORM), 1);
}

static void rms_norm_over_another_axis_is_none(void **state) {
    (void)state;
    output(llama_norm(leaf("x", DW_F32, 2, B, D(7)), DW_NONE, 0, false, false));
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_RMS_NORM), 0);
}

static void rms_norm_whose_mean_is_read_is_left_alone(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, B, D(7));
    dw_value variance = mean_last(mul(x, x), true);
    dw_value rstd = op1(DW_OP_RSQRT, number(DW_OP_ADD, variance, 1e-6));
    output(mul(x, like(rstd, x)));
    output(variance);
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_RMS_NORM), 0);
}

static void rms_norm_of_something_else_is_none(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, B, D(7)), z = leaf("z", DW_F32, 2, B, D(7));
    dw_value rstd = op1(DW_OP_RSQRT, number(DW_OP_ADD, mean_last(mul(x, x), true), 1e-6));
    output(mul(z, like(rstd, z)));
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_RMS_NORM), 0);
}

/* form 0: (x - mean) / sqrt(var + eps); 1: times rsqrt; 2: the difference written twice */
static void layer_norm_is_recognised(void **state) {
    for (int form = 0; form < 3; form++) {
        dw_value x = leaf("x", DW_F32, 3, B, S, D(7));
        dw_value w = leaf("w", DW_F32, 1, D(7)), b = leaf("b", DW_F32, 1, D(7));
        dw_value centred = op2(DW_OP_SUB, x, like(mean_last(x, true), x));
        dw_value again = centred;
        if (form == 2) again = op2(DW_OP_SUB, x, like(mean_last(x, true), x));
        dw_value variance = number(DW_OP_ADD, mean_last(mul(again, again), true), 1e-5);
        dw_value y = form == 0 ? op2(DW_OP_DIV, centred, like(op1(DW_OP_SQRT, variance), x))
                               : mul(centred, like(op1(DW_OP_RSQRT, variance), x));
        output(add(mul(like(w, y), y), like(b, y)));
        RECOGNIZE();
        assert_int_equal(dw_graph_node_count(e.graph), 1);
        assert_int_equal(count_op(DW_OP_LAYER_NORM), 1);
        close_graph(state);
        open_graph(state);
    }
}

static void softmax_is_recognised(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 3, B, S, D(7));
    dw_value w =
        op1(DW_OP_EXP, op2(DW_OP_SUB, x, dw__emit_reduce_spread(&e, DW_OP_REDUCE_MAX, x, 1)));
    output(op2(DW_OP_DIV, w, dw__emit_reduce_spread(&e, DW_OP_REDUCE_SUM, w, 1)));
    RECOGNIZE();
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_int_equal(dw_node_int(e.graph, find_op(DW_OP_SOFTMAX), DW_ATTR_KEY_AXIS, 0), 1);
}

static void softmax_over_two_axes_is_none(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 3, B, S, D(7));
    dw_value w =
        op1(DW_OP_EXP, op2(DW_OP_SUB, x, dw__emit_reduce_spread(&e, DW_OP_REDUCE_MAX, x, 2)));
    output(op2(DW_OP_DIV, w, dw__emit_reduce_spread(&e, DW_OP_REDUCE_SUM, w, 1)));
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_SOFTMAX), 0);
}

/* ---- recognise: rotary embedding, attention ------------------------------------------------- */

static dw_value rotate_half(dw_value x, dw_dim whole, dw_dim half) {
    dw_value low = dw__emit_slice(&e, x, 3, 0, half), high = dw__emit_slice(&e, x, 3, half, whole);
    return dw__emit_concat(&e, op1(DW_OP_NEG, high), low, 3);
}

static void rope_is_recognised(void **state) {
    for (int swapped = 0; swapped < 2; swapped++) {
        dw_value x = leaf("x", DW_F32, 4, B, D(2), S, D(6));
        dw_value cosine = leaf("cos", DW_F32, 3, D(1), S, D(6));
        dw_value sine = leaf("sin", DW_F32, 3, B, S, D(6));
        dw_value c = like(reshape(cosine, 4, D(1), D(1), S, D(6)), x);
        dw_value s = like(reshape(sine, 4, B, D(1), S, D(6)), x);
        dw_value turned = mul(rotate_half(x, 6, 3), s);
        output(swapped ? add(turned, mul(c, x)) : add(mul(x, c), turned));
        RECOGNIZE();
        assert_int_equal(count_op(DW_OP_ROPE), 1);
        dw_node rope = find_op(DW_OP_ROPE);
        assert_int_equal(dw_value_rank(e.graph, dw_node_input(e.graph, rope, 1)), 4);
        assert_int_equal(dw_value_shape(e.graph, dw_node_input(e.graph, rope, 2))[1], 1);
        assert_int_equal(count_op(DW_OP_CONCAT), 0);
        close_graph(state);
        open_graph(state);
    }
}

static void partial_rope_is_recognised(void **state) {
    (void)state;
    dw_value whole = leaf("x", DW_F32, 4, B, D(2), S, D(10));
    dw_value x = dw__emit_slice(&e, whole, 3, 0, 6), rest = dw__emit_slice(&e, whole, 3, 6, 10);
    dw_value c = like(leaf("cos", DW_F32, 2, S, D(6)), x);
    dw_value s = like(leaf("sin", DW_F32, 2, S, D(6)), x);
    dw_value y = add(mul(x, c), mul(rotate_half(x, 6, 3), s));
    output(dw__emit_concat(&e, y, rest, 3));
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_ROPE), 1);
    assert_int_equal(count_op(DW_OP_CONCAT) + count_op(DW_OP_SLICE), 0);
}

static void another_rotation_is_no_rope(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 4, B, D(2), S, D(6));
    dw_value c = like(leaf("cos", DW_F32, 2, S, D(6)), x);
    dw_value s = like(leaf("sin", DW_F32, 2, S, D(6)), x);
    dw_value low = dw__emit_slice(&e, x, 3, 0, 3), high = dw__emit_slice(&e, x, 3, 3, 6);
    dw_value turned = dw__emit_concat(&e, high, op1(DW_OP_NEG, low), 3); /* the opposite rotation */
    output(add(mul(x, c), mul(turned, s)));
    output(add(mul(x, c), mul(rotate_half(x, 6, 2), s))); /* not split in the middle */
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_ROPE), 0);
}

static dw_value positions(int axis, bool shifted) {
    dw_value p = dw__emit_iota(&e, DW_I64, 1, &S, 0);
    if (shifted) p = number(DW_OP_ADD, p, 0.0);
    return axis ? reshape(p, 4, D(1), D(1), D(1), S) : reshape(p, 4, D(1), D(1), S, D(1));
}

static dw_value attend(dw_value mask, int64_t causal) {
    dw_value q = leaf("q", DW_F32, 4, B, D(2), S, D(3)), k = leaf("k", DW_F32, 4, B, D(2), S, D(3));
    dw_value operands[] = {q, k, leaf("v", DW_F32, 4, B, D(2), S, D(3)), mask};
    dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_SCALE, 0.5),
                       dw_attr_int(DW_ATTR_KEY_CAUSAL, causal)};
    return dw__emit(&e, DW_OP_ATTENTION, 4, operands, 2, attrs);
}

/* Compares key and query positions, broadcast over [B, 1, S, S]. `form` selects the spelling. */
static dw_value causal_condition(int form) {
    static const dw_op ops[] = {DW_OP_LE, DW_OP_GE, DW_OP_LT, DW_OP_GT};
    dw_value key = broadcast(positions(1, true), 4, D(1), D(1), S, S);
    dw_value query = broadcast(positions(0, false), 4, D(1), D(1), S, S);
    if (form >= 2) query = number(DW_OP_ADD, query, 1.0);
    return form & 1 ? op2(ops[form], query, key) : op2(ops[form], key, query);
}

static void causal_masks_are_recognised(void **state) {
    for (int form = 0; form < 4; form++) {
        output(attend(broadcast(causal_condition(form), 4, B, D(2), S, S), 0));
        RECOGNIZE();
        assert_int_equal(dw_graph_node_count(e.graph), 1);
        assert_int_equal(dw_node_int(e.graph, 0, DW_ATTR_KEY_CAUSAL, 0), 1);
        assert_int_equal(dw_node_input(e.graph, 0, 3), DW_NONE);
        close_graph(state);
        open_graph(state);
    }
}

static void causal_and_padding_leaves_the_padding(void **state) {
    (void)state;
    dw_value padding = reshape(leaf("padding", DW_BOOL, 2, B, S), 4, B, D(1), D(1), S);
    dw_value both = op2(DW_OP_AND, broadcast(causal_condition(0), 4, B, D(1), S, S),
                        broadcast(padding, 4, B, D(1), S, S));
    output(attend(broadcast(both, 4, B, D(2), S, S), 0));
    RECOGNIZE();
    dw_node attention = find_op(DW_OP_ATTENTION);
    assert_int_equal(dw_node_int(e.graph, attention, DW_ATTR_KEY_CAUSAL, 0), 1);
    dw_value mask = dw_node_input(e.graph, attention, 3);
    assert_int_equal(dw_value_shape(e.graph, mask)[1], 1);
    assert_int_equal(dw_value_shape(e.graph, mask)[2], 1);
    assert_int_equal(count_op(DW_OP_AND), 0);
}

static void other_masks_are_not_causal(void **state) {
    for (int which = 0; which < 4; which++) {
        dw_value key = broadcast(positions(1, false), 4, D(1), D(1), S, S);
        dw_value query = broadcast(positions(0, false), 4, D(1), D(1), S, S), mask;
        switch (which) {
        case 0: mask = op2(DW_OP_LT, key, query); break; /* strictly before */
        case 1: mask = op2(DW_OP_LE, query, key); break; /* the future */
        case 2: mask = op2(DW_OP_LE, key, number(DW_OP_ADD, query, 2.0)); break;
        default: mask = op2(DW_OP_OR, op2(DW_OP_LE, key, query), op2(DW_OP_EQ, key, query)); break;
        }
        output(attend(mask, 0));
        RECOGNIZE();
        assert_int_equal(dw_node_int(e.graph, find_op(DW_OP_ATTENTION), DW_ATTR_KEY_CAUSAL, 0), 0);
        close_graph(state);
        open_graph(state);
    }
}

static void masks_are_passed_unbroadcast(void **state) {
    (void)state;
    dw_value mask = leaf("mask", DW_F32, 2, S, S);
    output(attend(broadcast(mask, 4, B, D(2), S, S), 0));
    RECOGNIZE();
    dw_value passed = dw_node_input(e.graph, find_op(DW_OP_ATTENTION), 3);
    assert_int_equal(dw_value_shape(e.graph, passed)[0], 1);
    assert_int_equal(dw_value_shape(e.graph, passed)[1], 1);
}

static void masks_that_change_nothing_are_left_out(void **state) {
    for (int form = 0; form < 4; form++) {
        const dw_dtype dtype = form & 1 ? DW_BOOL : DW_F32;
        const double value = (form & 1) != (form >> 1); /* forms 0 and 1 change nothing */
        output(attend(dw__emit_constant(&e, dtype, 4, (dw_dim[]){B, D(2), S, S}, value), 0));
        RECOGNIZE();
        const dw_value mask = dw_node_input(e.graph, find_op(DW_OP_ATTENTION), 3);
        assert_int_equal(mask == DW_NONE, form < 2);
        close_graph(state);
        open_graph(state);
    }
}

static dw_value repeat_heads(dw_value x, dw_dim heads, dw_dim times, dw_dim width) {
    dw_value five = reshape(x, 5, B, heads, D(1), S, width);
    return reshape(broadcast(five, 5, B, heads, times, S, width), 4, B, heads * times, S, width);
}

static void repeated_heads_are_shared(void **state) {
    (void)state;
    dw_value q = leaf("q", DW_F32, 4, B, D(6), S, D(3));
    dw_value k = repeat_heads(leaf("k", DW_F32, 4, B, D(2), S, D(3)), 2, 3, 3);
    dw_value v = repeat_heads(leaf("v", DW_F32, 4, B, D(2), S, D(4)), 2, 3, 4);
    dw_attr scale = dw_attr_float(DW_ATTR_KEY_SCALE, 0.5);
    output(dw__emit(&e, DW_OP_ATTENTION, 3, (dw_value[]){q, k, v}, 1, &scale));
    RECOGNIZE();
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_int_equal(dw_node_input(e.graph, 0, 1), dw_graph_find(e.graph, "k"));
}

/* The order of torch.Tensor.repeat, [0, 1, 0, 1, ..], differs from the order of grouped heads. */
static void heads_repeated_in_another_order_are_not(void **state) {
    (void)state;
    dw_value q = leaf("q", DW_F32, 4, B, D(6), S, D(3)), x = leaf("k", DW_F32, 4, B, D(2), S, D(3));
    dw_value five = reshape(x, 5, B, D(1), D(2), S, D(3));
    dw_value k = reshape(broadcast(five, 5, B, D(3), D(2), S, D(3)), 4, B, D(6), S, D(3));
    dw_attr scale = dw_attr_float(DW_ATTR_KEY_SCALE, 0.5);
    output(dw__emit(&e, DW_OP_ATTENTION, 3, (dw_value[]){q, k, k}, 1, &scale));
    RECOGNIZE();
    assert_int_equal(
        dw_value_shape(e.graph, dw_node_input(e.graph, find_op(DW_OP_ATTENTION), 1))[1], 6);
}

/* ---- recognise: attention written out ------------------------------------------------------- */

#define LEAST (-3.4028234663852886e38) /* F32's least number, which models write for "never" */

static dw_value product_of_heads(void) {
    dw_value q = leaf("q", DW_F32, 4, B, D(2), S, D(3)), k = leaf("k", DW_F32, 4, B, D(2), S, D(3));
    return dw__emit_matmul(&e, q, k, false, true);
}

static dw_value softmax_last(dw_value x) {
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 3);
    return dw__emit(&e, DW_OP_SOFTMAX, 1, &x, 1, &axis);
}

static dw_value times_values(dw_value weights) {
    return dw__emit_matmul(&e, weights, leaf("v", DW_F32, 4, B, D(2), S, D(4)), false, false);
}

/* 0 where the condition holds, else `low` */
static dw_value bias_where(dw_value condition, double low) {
    dw_value zero = dw__emit_cast(&e, condition, DW_F32);
    return dw__emit_select(&e, condition, dw__emit_like(&e, zero, 0.0),
                           dw__emit_like(&e, zero, low));
}

static dw_node the_attention(void) {
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_ATTENTION), 1);
    assert_int_equal(count_op(DW_OP_SOFTMAX), 0);
    return find_op(DW_OP_ATTENTION);
}

static void written_attention_is_recognised(void **state) {
    for (int form = 0; form < 4; form++) {
        dw_value scores = product_of_heads();
        double scale = 1.0;
        if (form == 1) scores = number(DW_OP_MUL, scores, scale = 0.25);
        if (form == 2) scores = op2(DW_OP_DIV, scores, spread(scores, 8.0)), scale = 0.125;
        if (form == 3) { /* soft cap 5, scale 0.7 */
            scores = number(DW_OP_DIV, number(DW_OP_MUL, scores, 0.7), 5.0);
            scores = number(DW_OP_MUL, op1(DW_OP_TANH, scores), 5.0);
            scale = 0.7;
        }
        if (form > 0) scores = add(scores, spread(scores, 0.0)); /* a mask that hides nothing */
        output(times_values(softmax_last(scores)));
        dw_node node = the_attention();
        assert_true(fabs(dw_node_float(e.graph, node, DW_ATTR_KEY_SCALE, 0) - scale) < 1e-12);
        assert_true(dw_node_float(e.graph, node, DW_ATTR_KEY_SOFTCAP, 0) == (form == 3 ? 5 : 0));
        assert_int_equal(dw_node_input(e.graph, node, 3), DW_NONE);
        close_graph(state);
        open_graph(state);
    }
}

static void written_dropout_keeps_its_mask(void **state) {
    (void)state;
    dw_value seed = leaf("seed", DW_I64, 1, D(2));
    dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_P, 0.4), dw_attr_int(DW_ATTR_KEY_STREAM, 3)};
    dw_value weights = softmax_last(product_of_heads());
    weights = dw__emit(&e, DW_OP_DROPOUT, 2, (dw_value[]){weights, seed}, 2, attrs);
    output(times_values(weights));
    dw_node node = the_attention();
    assert_true(dw_node_float(e.graph, node, DW_ATTR_KEY_P, 0) == 0.4);
    assert_int_equal(count_op(DW_OP_DROPOUT), 0);
}

/* key > query - 2 */
static dw_value window_condition(void) {
    dw_value key = broadcast(positions(1, false), 4, D(1), D(1), S, S);
    dw_value query = broadcast(positions(0, false), 4, D(1), D(1), S, S);
    return op2(DW_OP_GT, key, number(DW_OP_SUB, query, 2.0));
}

static void low_biases_out_of_reach_are_positions(void **state) {
    for (int form = 0; form < 3; form++) {
        dw_value allowed = causal_condition(0);
        if (form > 0) allowed = op2(DW_OP_AND, window_condition(), allowed);
        dw_value bias = bias_where(allowed, form == 2 ? (double)-INFINITY : LEAST);
        output(
            times_values(softmax_last(add(product_of_heads(), broadcast(bias, 4, B, D(2), S, S)))));
        dw_node node = the_attention();
        assert_int_equal(dw_node_int(e.graph, node, DW_ATTR_KEY_CAUSAL, 0), 1);
        assert_int_equal(dw_node_int(e.graph, node, DW_ATTR_KEY_WINDOW, -1), form > 0 ? 2 : -1);
        assert_int_equal(dw_node_input(e.graph, node, 3), DW_NONE);
        close_graph(state);
        open_graph(state);
    }
}

static void windows_of_bool_masks_are_recognised(void **state) {
    (void)state;
    dw_value allowed = op2(DW_OP_AND, window_condition(), causal_condition(3));
    output(attend(broadcast(allowed, 4, B, D(2), S, S), 0));
    dw_node node = the_attention();
    assert_int_equal(dw_node_int(e.graph, node, DW_ATTR_KEY_WINDOW, -1), 2);
    assert_int_equal(dw_node_int(e.graph, node, DW_ATTR_KEY_CAUSAL, 0), 1);
    assert_int_equal(dw_node_input(e.graph, node, 3), DW_NONE);
}

/* A padded query sees no key; a finite bias then gives it uniform weights over all keys. */
static void low_biases_with_padding_stay(void **state) {
    (void)state;
    dw_value padding = reshape(leaf("padding", DW_BOOL, 2, B, S), 4, B, D(1), D(1), S);
    dw_value allowed = op2(DW_OP_AND, broadcast(causal_condition(0), 4, B, D(1), S, S),
                           broadcast(padding, 4, B, D(1), S, S));
    dw_value bias = broadcast(bias_where(allowed, LEAST), 4, B, D(2), S, S);
    output(times_values(softmax_last(add(product_of_heads(), bias))));
    dw_node node = the_attention();
    assert_int_equal(dw_node_int(e.graph, node, DW_ATTR_KEY_CAUSAL, 0), 0);
    dw_value mask = dw_node_input(e.graph, node, 3);
    assert_int_equal(dw_value_dtype(e.graph, mask), DW_F32);
    assert_int_equal(dw_value_shape(e.graph, mask)[1], 1);
}

/* Two biases: the bias made of positions becomes an attribute only if the other one cannot be as low. */
static void a_learned_bias_stays_beside_positions(void **state) {
    for (int learned = 0; learned < 2; learned++) {
        dw_value table, other = DW_NONE;
        OK(dw_graph_leaf(e.graph, DW_ROLE_PARAMETER, "table", DW_F32, 2, (dw_dim[]){5, 2}, &table));
        if (learned) {
            dw_value index = leaf("index", DW_I64, 2, S, S);
            other = dw__emit(&e, DW_OP_EMBEDDING, 2, (dw_value[]){table, index}, 0, NULL);
            other = dw__emit_permute(&e, other, 3, (int64_t[]){2, 0, 1});
        } else {
            other = leaf("other", DW_F32, 3, D(2), S, S);
        }
        dw_value causal = broadcast(bias_where(causal_condition(0), LEAST), 4, B, D(2), S, S);
        dw_value scores = add(product_of_heads(), broadcast(other, 4, B, D(2), S, S));
        output(times_values(softmax_last(add(scores, causal))));
        dw_node node = the_attention();
        assert_int_equal(dw_node_int(e.graph, node, DW_ATTR_KEY_CAUSAL, 0), learned);
        assert_int_equal(dw_value_shape(e.graph, dw_node_input(e.graph, node, 3))[0], 1);
        close_graph(state);
        open_graph(state);
    }
}

static void hidden_scores_are_a_mask(void **state) {
    (void)state;
    dw_value scores = product_of_heads(), allowed = leaf("allowed", DW_BOOL, 2, S, S);
    dw_value other = leaf("other", DW_F32, 3, D(2), S, S);
    scores = add(scores, broadcast(other, 4, B, D(2), S, S));
    scores = dw__emit_select(&e, broadcast(allowed, 4, B, D(2), S, S), scores,
                             dw__emit_like(&e, scores, -INFINITY));
    output(times_values(softmax_last(scores)));
    dw_value mask = dw_node_input(e.graph, the_attention(), 3);
    assert_int_equal(dw_value_dtype(e.graph, mask), DW_F32);
}

static void weights_that_are_read_stay(void **state) {
    for (int form = 0; form < 3; form++) {
        dw_value scores = product_of_heads(), weights = softmax_last(scores);
        if (form == 0) output(weights);
        if (form == 1) output(scores);
        if (form == 2) weights = softmax_last(op1(DW_OP_ABS, scores)); /* not a matmul */
        output(times_values(weights));
        RECOGNIZE();
        assert_int_equal(count_op(DW_OP_ATTENTION), 0);
        close_graph(state);
        open_graph(state);
    }
}

/* ---- recognise: linear, loss ---------------------------------------------------------------- */

static dw_dim rows(void) {
    dw_dim product;
    OK(dw_dim_mul(e.graph, B, S, &product));
    return product;
}

static void conv1d_of_gpt2_is_linear(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 3, B, S, D(4)), w = leaf("w", DW_F32, 2, D(4), D(7));
    dw_value y = dw__emit_matmul(&e, reshape(x, 2, rows(), D(4)), w, false, false);
    y = add(like(leaf("b", DW_F32, 1, D(7)), y), y);
    output(reshape(y, 3, B, S, D(7)));
    RECOGNIZE();
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_int_equal(dw_node_int(e.graph, find_op(DW_OP_LINEAR), DW_ATTR_KEY_TRANSPOSE_W, 1), 0);
    assert_int_equal(dw_node_input(e.graph, 0, 2), dw_graph_find(e.graph, "b"));
}

static void a_sum_with_more_than_a_row_is_no_bias(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, B, D(4)), w = leaf("w", DW_F32, 2, D(7), D(4));
    dw_value y = dw__emit_matmul(&e, x, w, false, true);
    output(add(y, like(leaf("b", DW_F32, 2, B, D(1)), y)));
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_ADD), 1);
}

/* The head and loss of a language model, and their gradients. With `shared`, dlogits has another reader. */
static void language_model_head(bool transpose_w, bool bias, bool shared) {
    dw_value x = leaf("x", DW_F64, 3, B, S, D(4));
    dw_value w = transpose_w ? leaf("w", DW_F64, 2, D(5), D(4)) : leaf("w", DW_F64, 2, D(4), D(5));
    dw_value b = bias ? leaf("b", DW_F64, 1, D(5)) : DW_NONE;
    dw_value target = leaf("target", DW_I64, 1, rows());
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, transpose_w);
    dw_value logits = dw__emit(&e, DW_OP_LINEAR, 3, (dw_value[]){x, w, b}, 1, &attr);
    dw_attr mean[] = {dw_attr_string(DW_ATTR_KEY_REDUCTION, "mean"),
                      dw_attr_int(DW_ATTR_KEY_IGNORE_INDEX, 2)};
    dw_value loss = dw__emit(&e, DW_OP_CROSS_ENTROPY, 2,
                             (dw_value[]){reshape(logits, 2, rows(), D(5)), target}, 2, mean);
    output(loss);
    output(logits);
    dw_value dloss = leaf("dloss", DW_F64, 0), wrt[] = {x, w, b, logits}, grads[4];
    if (!bias) wrt[2] = x;
    OK(dw_graph_gradient(e.graph, 1, &loss, &dloss, shared ? 4 : 3, wrt, grads));
    for (int i = 0; i < (shared ? 4 : 3); i++) output(grads[i]);
}

static void the_loss_goes_back_through_its_head(void **state) {
    for (int form = 0; form < 4; form++) {
        language_model_head(form & 1, form & 2, false);
        RUN(DW_PASS_FOLD, DW_PASS_RECOGNIZE, DW_PASS_FOLD, DW_PASS_COMMON, DW_PASS_DEAD_CODE);
        assert_int_equal(count_op(DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD), 1);
        assert_int_equal(count_op(DW_OP_CROSS_ENTROPY_BACKWARD), 0);
        assert_int_equal(count_op(DW_OP_LINEAR), 1);
        assert_int_equal(count_op(DW_OP_MATMUL), 0);
        RUN(DW_PASS_EXPAND, DW_PASS_FUSE);
        close_graph(state);
        open_graph(state);
    }
}

static void dlogits_that_others_read_stay(void **state) {
    (void)state;
    language_model_head(true, true, true);
    RUN(DW_PASS_FOLD, DW_PASS_RECOGNIZE);
    assert_int_equal(count_op(DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD), 0);
}

/* A layer in BF16 whose logits are cast to F32 for the loss, and its gradients. */
static void language_model_head_in_bf16(bool read, bool gradients) {
    dw_value x = leaf("x", DW_BF16, 3, B, S, D(4)), w = leaf("w", DW_BF16, 2, D(5), D(4));
    dw_value target = leaf("target", DW_I64, 1, rows());
    dw_value logits = dw__emit(&e, DW_OP_LINEAR, 2, (dw_value[]){x, w}, 0, NULL);
    logits = dw__emit_cast(&e, logits, DW_F32);
    dw_attr mean = dw_attr_string(DW_ATTR_KEY_REDUCTION, "mean");
    dw_value loss = dw__emit(&e, DW_OP_CROSS_ENTROPY, 2,
                             (dw_value[]){reshape(logits, 2, rows(), D(5)), target}, 1, &mean);
    output(loss);
    if (read) output(logits);
    if (!gradients) return;
    dw_value dloss = leaf("dloss", DW_F32, 0), wrt[] = {x, w}, grads[2];
    OK(dw_graph_gradient(e.graph, 1, &loss, &dloss, 2, wrt, grads));
    for (int i = 0; i < 2; i++) output(grads[i]);
}

static void gpus_look_through_casts_of_logits(void **state) {
    for (int casts = 0; casts < 2; casts++) {
        language_model_head_in_bf16(true, true);
        RUN(DW_PASS_FOLD, DW_PASS_RECOGNIZE, DW_PASS_FOLD, DW_PASS_COMMON, DW_PASS_DEAD_CODE);
        OK(dw__recognize_loss(&e.graph, casts));
        RUN(DW_PASS_COMMON, DW_PASS_DEAD_CODE);
        assert_int_equal(count_op(DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD), casts);
        assert_int_equal(count_op(DW_OP_CROSS_ENTROPY_BACKWARD), !casts);
        assert_int_equal(count_op(DW_OP_LINEAR), casts ? 1 : 2);
        assert_int_equal(count_op(DW_OP_MATMUL), !casts);
        close_graph(state);
        open_graph(state);
    }
}

static void logits_that_are_read_stay_whole(void **state) {
    for (int read = 0; read < 2; read++) {
        language_model_head_in_bf16(read, false);
        OK(dw__recognize_head(&e.graph));
        RUN(DW_PASS_DEAD_CODE);
        assert_int_equal(count_op(DW_OP_LINEAR_CROSS_ENTROPY), !read);
        assert_int_equal(count_op(DW_OP_LINEAR), read);
        assert_int_equal(dw_value_dtype(e.graph, dw_graph_output(e.graph, 0)), DW_F32);
        close_graph(state);
        open_graph(state);
    }
}

/* ---- mixtures of experts ----------------------------------------------------------------------- */

enum { WEIGHTS_OF_ROWS, WEIGHTS_OF_TOKENS, NO_WEIGHTS, WEIGHTS_IN_F32, MIXTURES };

/* How wide the last GEMM's operand is beside its 9 results. */
enum { NARROW = 6, WIDE = 10 };

static dw_value grouped(dw_value x, dw_value w, dw_value index) {
    return dw__emit(&e, DW_OP_GROUPED_LINEAR, 4, (dw_value[]){x, w, index, DW_NONE}, 0, NULL);
}

/* Rows of the tokens [B*S, 7], each repeated for its two experts of 5, which have one hidden layer of `inner`. Returns the
 * rows that the experts have made. */
static dw_value mixture_of(int kind, int inner, bool bias) {
    const bool half = kind == WEIGHTS_IN_F32;
    const dw_dtype dtype = half ? DW_BF16 : DW_F32;
    dw_dim tokens = dw__emit_dim_mul(&e, B, S), rows = dw__emit_dim_mul(&e, tokens, 2);
    dw_value x = leaf("x", dtype, 2, tokens, D(7)), index = leaf("index", DW_I64, 1, rows);
    dw_value first = leaf("first", dtype, 3, D(5), D(2 * inner), D(7)),
             second = leaf("second", dtype, 3, D(5), D(9), D(inner)),
             weight = leaf("weight", DW_F32, 2, tokens, D(2));
    dw_value each = broadcast(reshape(x, 3, tokens, D(1), D(7)), 3, tokens, D(2), D(7));
    dw_value gate_up = grouped(reshape(each, 2, rows, D(7)), first, index);
    dw_value hidden = op2(DW_OP_SWIGLU, dw__emit_slice(&e, gate_up, 1, 0, D(inner)),
                          dw__emit_slice(&e, gate_up, 1, D(inner), D(2 * inner)));
    dw_value y =
        bias ? dw__emit(&e, DW_OP_GROUPED_LINEAR, 4,
                        (dw_value[]){hidden, second, index, leaf("bias", dtype, 2, D(5), D(9))}, 0,
                        NULL)
             : grouped(hidden, second, index);
    const dw_value made = y;
    if (half) y = dw__emit_cast(&e, y, DW_F32);
    if (kind == WEIGHTS_OF_ROWS || half)
        y = mul(y, broadcast(reshape(weight, 2, rows, D(1)), 2, rows, D(9)));
    y = reshape(y, 3, tokens, D(2), D(9));
    if (kind == WEIGHTS_OF_TOKENS)
        y = mul(broadcast(reshape(weight, 3, tokens, D(2), D(1)), 3, tokens, D(2), D(9)), y);
    y = dw__emit_reduce(&e, DW_OP_REDUCE_SUM, y, 1, false);
    output(half ? dw__emit_cast(&e, y, DW_BF16) : y);
    return made;
}

static void mixture(int kind) { mixture_of(kind, NARROW, false); }

/* Adds the gradients of all floating-point leaves for a gradient of output 0 that is its square. */
static void differentiate(void) {
    dw_value out = dw_graph_output(e.graph, 0), dy = mul(out, out);
    dw_value wrt[MAX_LEAVES], found[MAX_LEAVES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < dw_graph_leaf_count(e.graph); i++) {
        wrt[count] = dw_graph_leaf_at(e.graph, i);
        count += dw__dtype_is_float(dw_value_dtype(e.graph, wrt[count]));
    }
    OK(e.status);
    OK(dw_graph_gradient(e.graph, 1, &out, &dy, count, wrt, found));
    for (uint32_t i = 0; i < count; i++)
        if (found[i] != DW_NONE) output(found[i]);
}

static void mixtures_compute_on_sorted_rows(void **state) {
    for (int kind = 0; kind < MIXTURES; kind++) {
        mixture(kind);
        run before = evaluate(e.graph);
        OK(dw__sort_rows(&e.graph));
        OK(dw_graph_verify(e.graph));
        run after = evaluate(e.graph);
        same_results(&before, &after);
        assert_int_equal(count_op(DW_OP_GROUPED_LINEAR), 0);
        assert_int_equal(count_op(DW_OP_GROUP_ROWS), 1);
        assert_int_equal(count_op(DW_OP_SPREAD_ROWS), 1);
        assert_int_equal(count_op(DW_OP_SEGMENT_LINEAR), 2);
        assert_int_equal(count_op(DW_OP_COMBINE_ROWS), 1);
        assert_int_equal(count_op(DW_OP_TAKE) + count_op(DW_OP_REDUCE_SUM) + count_op(DW_OP_CAST),
                         0);
        dw_node combine = find_op(DW_OP_COMBINE_ROWS);
        assert_int_equal(dw_node_input(e.graph, combine, 2) == DW_NONE, kind == NO_WEIGHTS);
        release(&before);
        release(&after);
        close_graph(state);
        open_graph(state);
    }
}

/* Backward is sorted too, and its gradients are those of the rows as they were. */
static void backward_of_mixtures_is_sorted(void **state) {
    for (int kind = 0; kind < MIXTURES; kind++) {
        mixture(kind);
        differentiate();
        run before = evaluate(e.graph);
        close_graph(state);
        open_graph(state);
        mixture(kind);
        OK(dw__sort_rows(&e.graph));
        e.status = DW_OK;
        differentiate();
        RUN(DW_PASS_COMMON, DW_PASS_DEAD_CODE);
        run after = evaluate(e.graph);
        same_results(&before, &after);
        assert_int_equal(count_op(DW_OP_GROUP_ROWS), 1);
        assert_int_equal(count_op(DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT), 2);
        assert_int_equal(count_op(DW_OP_SCATTER_ADD), 0);
        assert_int_equal(count_op(DW_OP_COMBINE_ROWS_BACKWARD), kind != NO_WEIGHTS);
        release(&before);
        release(&after);
        close_graph(state);
        open_graph(state);
    }
}

/* Weights multiply what the last GEMM reads, and backward needs none of its results. Outputs and gradients are those of
 * weights behind it. */
static void weights_multiply_rows_before_the_last_gemm(void **state) {
    for (int kind = 0; kind < MIXTURES; kind++) {
        mixture(kind);
        differentiate();
        run before = evaluate(e.graph);
        close_graph(state);
        open_graph(state);
        mixture(kind);
        OK(dw__sort_rows(&e.graph));
        OK(dw__weigh_rows_early(&e.graph));
        OK(dw_graph_verify(e.graph));
        e.status = DW_OK;
        assert_int_equal(count_op(DW_OP_SEGMENT_LINEAR), 2);
        assert_int_equal(count_op(DW_OP_SPREAD_ROWS), kind == NO_WEIGHTS ? 1 : 2);
        assert_int_equal(dw_node_input(e.graph, find_op(DW_OP_COMBINE_ROWS), 2), DW_NONE);
        differentiate();
        RUN(DW_PASS_COMMON, DW_PASS_DEAD_CODE);
        assert_int_equal(count_op(DW_OP_COMBINE_ROWS_BACKWARD), 0);
        const dw_value rows = dw_node_input(e.graph, find_op(DW_OP_COMBINE_ROWS), 0);
        for (dw_node n = 0; n < dw_graph_node_count(e.graph); n++)
            for (uint32_t i = 0; i < dw_node_input_count(e.graph, n); i++)
                if (dw_node_input(e.graph, n, i) == rows)
                    assert_int_equal(dw_node_op(e.graph, n), DW_OP_COMBINE_ROWS);
        run after = evaluate(e.graph);
        same_results(&before, &after);
        release(&before);
        release(&after);
        close_graph(state);
        open_graph(state);
    }
}

/* A wide operand, a bias, rows that something else reads. */
static void other_weights_stay_behind_the_last_gemm(void **state) {
    for (int kind = 0; kind < 3; kind++) {
        char *before, *after;
        const dw_value rows = mixture_of(WEIGHTS_OF_ROWS, kind == 0 ? WIDE : NARROW, kind == 1);
        if (kind == 2) output(op1(DW_OP_EXP, rows));
        OK(dw__sort_rows(&e.graph));
        OK(dw_graph_to_text(e.graph, &before));
        OK(dw__weigh_rows_early(&e.graph));
        OK(dw_graph_to_text(e.graph, &after));
        assert_string_equal(before, after);
        dw_text_free(before);
        dw_text_free(after);
        close_graph(state);
        open_graph(state);
    }
}

/* The gradient of w reads silu(g) * u, which forward has made, and that of g reads g and u anyway. */
static void backward_computes_values_of_forward_itself(void **state) {
    for (int other = 0; other < 2; other++) {
        dw_value g = leaf("g", DW_BF16, 2, B, D(3)), u = leaf("u", DW_BF16, 2, B, D(3)),
                 w = leaf("w", DW_BF16, 2, B, D(3));
        dw_value h = mul(op1(DW_OP_SILU, g), u);
        output(mul(h, w));
        if (other) output(dw__emit_permute(&e, h, 2, (int64_t[]){1, 0}));
        differentiate();
        RUN(DW_PASS_COMMON, DW_PASS_FUSE);
        run before = evaluate(e.graph);
        OK(dw__inline_programs(&e.graph));
        OK(dw_graph_verify(e.graph));
        run after = evaluate(e.graph);
        same_results(&before, &after);
        for (dw_node n = 0; n < dw_graph_node_count(e.graph); n++) {
            const bool backward = e.graph->nodes.items[n].backward;
            if (dw_node_op(e.graph, n) != DW_OP_FUSED) continue;
            /* forward still makes what it returns itself, and h if something else reads it */
            if (!backward) assert_int_equal(dw_node_output_count(e.graph, n), 1 + other);
            for (uint32_t i = 0; backward && i < dw_node_input_count(e.graph, n); i++) {
                const dw_node from = dw_value_node(e.graph, dw_node_input(e.graph, n, i));
                assert_true(from == DW_NONE || e.graph->nodes.items[from].backward ||
                            dw_node_input(e.graph, n, i) == dw_graph_output(e.graph, 0));
            }
        }
        release(&before);
        release(&after);
        close_graph(state);
        open_graph(state);
    }
}

/* Rows that are no repeated tokens, values that others read in their own order, operands that are the same for all rows
 * or taken by the index, and operations that mix rows or depend on their place. */
static void other_readers_of_grouped_rows_get_them_back(void **state) {
    (void)state;
    dw_dim rows = dw__emit_dim_mul(&e, B, S);
    dw_value x = leaf("x", DW_F32, 2, rows, D(7)), index = leaf("index", DW_I64, 1, rows),
             other = leaf("other", DW_I64, 1, rows), row = leaf("row", DW_F32, 1, D(7)),
             w = leaf("w", DW_F32, 3, D(5), D(7), D(7)),
             table = leaf("table", DW_F32, 2, D(5), D(7)), seed = leaf("seed", DW_I64, 1, D(2));
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 0),
            chance[] = {dw_attr_float(DW_ATTR_KEY_P, 0.5), dw_attr_int(DW_ATTR_KEY_STREAM, 1)};
    dw_value bias = dw__emit(&e, DW_OP_TAKE, 2, (dw_value[]){table, index}, 1, &axis);
    dw_value y = add(add(grouped(x, w, index), bias), broadcast(row, 2, rows, D(7)));
    output(y);
    output(mul(grouped(y, w, other), y));
    output(dw__emit_reduce(&e, DW_OP_REDUCE_SUM, y, 0, false));
    output(grouped(dw__emit(&e, DW_OP_DROPOUT, 2, (dw_value[]){y, seed}, 2, chance), w, index));
    output(op2(DW_OP_GT, y, x));
    output(reshape(y, 3, B, S, D(7)));
    OK(e.status);
    run before = evaluate(e.graph);
    OK(dw__sort_rows(&e.graph));
    OK(dw_graph_verify(e.graph));
    run after = evaluate(e.graph);
    same_results(&before, &after);
    assert_int_equal(count_op(DW_OP_GROUPED_LINEAR), 0);
    assert_int_equal(count_op(DW_OP_GROUP_ROWS), 2); /* one for each index */
    assert_int_equal(count_op(DW_OP_SEGMENT_LINEAR), 3);
    release(&before);
    release(&after);
}

static void rows_that_cannot_be_sorted_for_memory_stay(void **state) {
    (void)state;
    char *before, *after;
    mixture(WEIGHTS_IN_F32);
    OK(dw_graph_to_text(e.graph, &before));
    dw_status status = DW_OUT_OF_MEMORY;
    for (int64_t allowed = 0; status != DW_OK; allowed += allowed < 40 ? 1 : allowed / 8) {
        dw__memory_fail_after(allowed);
        status = dw__sort_rows(&e.graph);
        dw__memory_fail_after(-1);
        if (status == DW_OK) break;
        assert_int_equal(status, DW_OUT_OF_MEMORY);
        OK(dw_graph_to_text(e.graph, &after));
        assert_string_equal(before, after);
        dw_text_free(after);
    }
    dw_text_free(before);
}

/* Gradients of slices that divide one matmul's result: disjoint pads, added in any order. */
static dw_value pad_at(dw_value x, dw_dim low, dw_dim high) {
    dw_dim lows[2] = {0, low}, highs[2] = {0, high};
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_LOW, 2, lows),
                       dw_attr_list(DW_ATTR_KEY_HIGH, 2, highs)};
    return dw__emit(&e, DW_OP_PAD, 1, &x, 2, attrs);
}

static void pads_side_by_side_are_concat(void **state) {
    (void)state;
    dw_value a = leaf("a", DW_F32, 2, B, D(2)), b = leaf("b", DW_F32, 2, B, D(3));
    dw_value c = leaf("c", DW_F32, 2, B, D(4));
    output(add(add(pad_at(c, 5, 0), pad_at(a, 0, 7)), pad_at(b, 2, 4)));
    RECOGNIZE();
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_int_equal(count_op(DW_OP_CONCAT), 1);
}

/* Gradients of slices that take every second element. */
static void interleaved_pads_are_concat(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, B, D(6)), halves[2];
    for (int i = 0; i < 2; i++) {
        dw_dim start[2] = {0, i}, limit[2] = {B, 6}, step[2] = {1, 2};
        dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_START, 2, start),
                           dw_attr_list(DW_ATTR_KEY_LIMIT, 2, limit),
                           dw_attr_list(DW_ATTR_KEY_STEP, 2, step)};
        halves[i] = dw__emit(&e, DW_OP_SLICE, 1, &x, 3, attrs);
    }
    output(op2(DW_OP_SWIGLU, halves[0], halves[1]));
    differentiate();
    run before = evaluate(e.graph);
    OK(dw__join_pads(&e.graph));
    RUN(DW_PASS_DEAD_CODE);
    run after = evaluate(e.graph);
    same_results(&before, &after);
    assert_int_equal(count_op(DW_OP_CONCAT), 1);
    assert_int_equal(count_op(DW_OP_PAD) + count_op(DW_OP_SCATTER_ADD) + count_op(DW_OP_ADD), 0);
    release(&before);
    release(&after);
}

static void pads_with_gaps_or_overlap_are_added(void **state) {
    (void)state;
    dw_value a = leaf("a", DW_F32, 2, B, D(2)), b = leaf("b", DW_F32, 2, B, D(3));
    output(add(pad_at(a, 0, 4), pad_at(b, 3, 0))); /* no slice covers index 2 */
    output(add(pad_at(a, 0, 2), pad_at(b, 1, 0))); /* both slices cover index 1 */
    output(add(pad_at(a, 0, 3), number(DW_OP_ADD, pad_at(b, 2, 0), 1.0)));
    RECOGNIZE();
    assert_int_equal(count_op(DW_OP_CONCAT), 0);
}

/* ---- fold ----------------------------------------------------------------------------------- */

static dw_value folded(void) { return dw_graph_output(e.graph, 0); }

/* Folds one expression over x f32[B,4], n i64[4], c bool[4]. */
typedef struct fold_case {
    const char *name;
    dw_value (*build)(dw_value x, dw_value n, dw_value c);
    const char *becomes; /* the name of a leaf, or the operation that remains */
} fold_case;

static dw_value cast(dw_value x, dw_dtype dtype) { return dw__emit_cast(&e, x, dtype); }
static dw_value cast_always(dw_value x, dw_dtype dtype) {
    dw_attr attr = dw_attr_int(DW_ATTR_KEY_DTYPE, dtype);
    return dw__emit(&e, DW_OP_CAST, 1, &x, 1, &attr);
}
static dw_value permute(dw_value x) { return dw__emit_permute(&e, x, 2, (int64_t[]){1, 0}); }
static dw_value pad(dw_value x, dw_dim high, double value) {
    dw_dim lows[2] = {0, 0}, highs[2] = {0, high};
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_LOW, 2, lows),
                       dw_attr_list(DW_ATTR_KEY_HIGH, 2, highs),
                       dw_attr_float(DW_ATTR_KEY_VALUE, value)};
    return dw__emit(&e, DW_OP_PAD, 1, &x, 3, attrs);
}

#define FOLD(name_, expression, becomes_)                                                          \
    static dw_value name_(dw_value x, dw_value n, dw_value c) {                                    \
        (void)x, (void)n, (void)c;                                                                 \
        return expression;                                                                         \
    }
#define FOLDS(X)                                                                                   \
    X(x_plus_zero, number(DW_OP_ADD, x, 0.0), "add") /* -0 + 0 is 0 */                             \
    X(x_plus_minus_zero, add(spread(x, -0.0), x), "x")                                             \
    X(n_plus_zero, number(DW_OP_ADD, n, 0.0), "n")                                                 \
    X(x_minus_zero, number(DW_OP_SUB, x, 0.0), "x")                                                \
    X(x_minus_minus_zero, number(DW_OP_SUB, x, -0.0), "sub")                                       \
    X(x_times_one, mul(spread(x, 1.0), x), "x")                                                    \
    X(x_times_zero, number(DW_OP_MUL, x, 0.0), "mul") /* NaN, infinity */                          \
    X(x_times_minus_one, number(DW_OP_MUL, x, -1.0), "neg")                                        \
    X(x_over_one, number(DW_OP_DIV, x, 1.0), "x")                                                  \
    X(x_over_eight, number(DW_OP_DIV, x, 8.0), "mul")                                              \
    X(x_over_three, number(DW_OP_DIV, x, 3.0), "div")                                              \
    X(n_over_eight, number(DW_OP_DIV, n, 8.0), "div")                                              \
    X(x_to_one, number(DW_OP_POW, x, 1.0), "x")                                                    \
    X(x_to_two, number(DW_OP_POW, x, 2.0), "mul")                                                  \
    X(x_to_half, number(DW_OP_POW, x, 0.5), "sqrt")                                                \
    X(neg_neg, op1(DW_OP_NEG, op1(DW_OP_NEG, x)), "x")                                             \
    X(not_not, op1(DW_OP_LOGICAL_NOT, op1(DW_OP_LOGICAL_NOT, c)), "c")                             \
    X(cast_same, cast_always(x, DW_F32), "x")                                                      \
    X(cast_there_and_back, cast(cast(x, DW_F64), DW_F32), "x")                                     \
    X(cast_through_narrow, cast(cast(x, DW_BF16), DW_F64), "cast")                                 \
    X(max_of_same, op2(DW_OP_MAX, x, x), "x")                                                      \
    X(stop_stop, op1(DW_OP_STOP_GRADIENT, op1(DW_OP_STOP_GRADIENT, x)), "stop_gradient")           \
    X(and_true, number(DW_OP_AND, c, 1.0), "c")                                                    \
    X(and_false, number(DW_OP_AND, c, 0.0), "constant")                                            \
    X(or_false, number(DW_OP_OR, c, 0.0), "c")                                                     \
    X(or_same, op2(DW_OP_OR, c, c), "c")                                                           \
    X(eq_true, number(DW_OP_EQ, c, 1.0), "c")                                                      \
    X(ne_true, number(DW_OP_NE, c, 1.0), "logical_not")                                            \
    X(n_eq_n, op2(DW_OP_EQ, n, n), "constant")                                                     \
    X(x_eq_x, op2(DW_OP_EQ, x, x), "eq") /* false for NaN */                                       \
    X(select_same, dw__emit_select(&e, c, n, n), "n")                                              \
    X(select_known, dw__emit_select(&e, spread(c, 1.0), n, number(DW_OP_ADD, n, 1.0)), "n")        \
    X(reshape_reshape, reshape(reshape(x, 2, D(4), B), 2, B, D(4)), "x")                           \
    X(permute_permute, permute(permute(x)), "x")                                                   \
    X(broadcast_broadcast, broadcast(broadcast(n, 2, B, D(4)), 3, S, B, D(4)), "broadcast")        \
    X(slice_slice, dw__emit_slice(&e, dw__emit_slice(&e, x, 1, 1, 4), 1, 1, 2), "slice")           \
    X(pad_nothing, pad(x, 0, 0.0), "x")                                                            \
    X(pad_something, pad(x, 1, 0.0), "pad")                                                        \
    X(concat_empty,                                                                                \
      dw__emit_concat(&e, x, dw__emit_constant(&e, DW_F32, 2, (dw_dim[]){B, 0}, 1), 1), "x")       \
    X(constant_exp, op1(DW_OP_EXP, spread(x, 1.0)), "exp") /* libraries round differently */       \
    X(constant_moves, permute(spread(x, 2.0)), "constant")                                         \
    X(constant_compares, op2(DW_OP_LT, spread(n, 1.0), spread(n, 2.0)), "constant")                \
    X(constant_pad, pad(spread(x, 2.0), 2, 2.0), "constant")                                       \
    X(known_size, dw__emit_constant(&e, DW_I64, 0, NULL, 4), "constant")
#define DEFINE(name, expression, becomes) FOLD(fold_##name, expression, becomes)
FOLDS(DEFINE)
#define ROW(name, expression, becomes) {#name, fold_##name, becomes},
static const fold_case fold_cases[] = {FOLDS(ROW)};

static void identities_fold_and_others_stay(void **state) {
    for (size_t i = 0; i < sizeof fold_cases / sizeof *fold_cases; i++) {
        const fold_case *c = &fold_cases[i];
        dw_value x = leaf("x", DW_F32, 2, B, D(4)), n = leaf("n", DW_I64, 1, D(4));
        output(c->build(x, n, leaf("c", DW_BOOL, 1, D(4))));
        RUN(DW_PASS_FOLD);
        dw_node node = dw_value_node(e.graph, folded());
        const char *left = node == DW_NONE ? dw_value_name(e.graph, folded())
                                           : dw_op_name(dw_node_op(e.graph, node));
        if (strcmp(left, c->becomes) != 0)
            fail_msg("%s: left with %s, not %s", c->name, left, c->becomes);
        if (strcmp(left, "broadcast") == 0 || strcmp(left, "slice") == 0)
            assert_int_equal(dw_graph_node_count(e.graph), 1);
        close_graph(state);
        open_graph(state);
    }
}

/* 0.1f + 0.2f in F32, and the bits of -0, in the interpreter's default precision. */
static void folded_constants_have_the_bits_of_run_time(void **state) {
    (void)state;
    static const dw_op ops[] = {DW_OP_ADD, DW_OP_SUB, DW_OP_MUL, DW_OP_DIV, DW_OP_MAX};
    static const dw_dtype dtypes[] = {DW_F32, DW_F16, DW_BF16};
    dw__tensor want[15] = {0}, have[15] = {0};
    for (int i = 0; i < 15; i++) {
        dw_value a = dw__emit_constant(&e, dtypes[i / 5], 0, NULL, 0.1);
        dw_value b = dw__emit_constant(&e, dtypes[i / 5], 0, NULL, -0.3);
        output(op2(ops[i % 5], a, b));
    }
    OK(dw__interpret(e.graph, sizes, NULL, want, NULL));
    OK(dw_graph_run_pass(&e.graph, DW_PASS_FOLD));
    assert_int_equal(count_op(DW_OP_ADD) + count_op(DW_OP_DIV), 0);
    OK(dw__interpret(e.graph, sizes, NULL, have, NULL));
    for (int i = 0; i < 15; i++) {
        assert_memory_equal(want[i].data, have[i].data, dw_dtype_bytes(want[i].dtype));
        dw__free_aligned(want[i].data);
        dw__free_aligned(have[i].data);
    }
}

/* ---- common, dead code ---------------------------------------------------------------------- */

static void equal_nodes_are_made_once(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 1, S), seed = leaf("seed", DW_I64, 1, D(2));
    dw_attr draws[3][2];
    dw_value drawn[3];
    for (int i = 0; i < 3; i++) {
        draws[i][0] = dw_attr_list(DW_ATTR_KEY_SHAPE, 1, &S);
        draws[i][1] = dw_attr_int(DW_ATTR_KEY_STREAM, i / 2);
        drawn[i] = dw__emit(&e, DW_OP_RANDOM_UNIFORM, 1, &seed, 2, draws[i]);
    }
    output(add(op1(DW_OP_EXP, x), drawn[0]));
    dw_graph_set_backward(e.graph, 1);
    output(add(op1(DW_OP_EXP, x), drawn[1]));
    output(add(op1(DW_OP_EXP, x), drawn[2]));
    RUN(DW_PASS_COMMON);
    assert_int_equal(count_op(DW_OP_EXP), 1);
    assert_int_equal(count_op(DW_OP_RANDOM_UNIFORM), 2);
    assert_int_equal(count_op(DW_OP_ADD), 2);
    assert_false(dw_node_is_backward(e.graph, find_op(DW_OP_EXP)));
    assert_int_equal(dw_graph_output(e.graph, 0), dw_graph_output(e.graph, 1));
}

/* Gradients at two casts of one value are rounded before they are added, so the casts must not be merged. */
static void half_results_stay_apart_until_the_gradient(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 1, S);
    output(op1(DW_OP_EXP, dw__emit_cast(&e, x, DW_BF16)));
    output(op1(DW_OP_NEG, dw__emit_cast(&e, x, DW_BF16)));
    RUN(DW_PASS_COMMON);
    assert_int_equal(count_op(DW_OP_CAST), 2);
    dw_graph_set_backward(e.graph, 1);
    output(op1(DW_OP_NEG, x));
    RUN(DW_PASS_COMMON);
    assert_int_equal(count_op(DW_OP_CAST), 1);
}

static void dead_nodes_go_and_leaves_stay(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 1, S);
    leaf("unused", DW_F32, 1, S);
    op1(DW_OP_EXP, op1(DW_OP_NEG, x));
    output(op1(DW_OP_TANH, x));
    RUN(DW_PASS_DEAD_CODE);
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_int_equal(dw_graph_leaf_count(e.graph), 2);
    assert_int_not_equal(dw_graph_find(e.graph, "unused"), DW_NONE);
}

/* ---- fuse ----------------------------------------------------------------------------------- */

static const char *body_of(dw_node node) {
    return dw_node_attr(e.graph, node, DW_ATTR_KEY_BODY)->string;
}

static void a_chain_becomes_one_node(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 3, B, S, D(7));
    dw_value bias = like(reshape(leaf("b", DW_F32, 1, D(7)), 3, D(1), D(1), D(7)), x);
    dw_value y = add(number(DW_OP_MUL, x, 0.5), bias);
    output(op1(DW_OP_TANH, y));
    output(y);
    RUN(DW_PASS_FUSE);
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_string_equal(body_of(0), "t0=mul(i0,c0.5);t1=add(t0,i1);t2=tanh(t1);out(t1,t2)");
    assert_int_equal(dw_value_rank(e.graph, dw_node_input(e.graph, 0, 1)), 1);
}

/* The gradient of what three linear layers read: an engine lets each product add to the one before. */
static void sums_of_products_stay_apart(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, S, S), products[6];
    for (int i = 0; i < 6; i++) products[i] = dw__emit_matmul(&e, x, x, i & 1, i & 2);
    output(add(add(products[0], products[1]), products[2]));
    /* Another operation, and a product that something else reads, are joined. */
    output(op1(DW_OP_NEG, add(products[3], products[4])));
    output(add(add(products[5], x), x));
    RUN(DW_PASS_FUSE);
    assert_int_equal(count_op(DW_OP_FUSED), 4);
}

/* x feeds both ends of a path that leaves the group: the joined group would wait for itself. */
static void a_detour_keeps_groups_apart(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, S, S);
    dw_value a = op1(DW_OP_EXP, x);
    dw_value b = dw__emit_matmul(&e, a, x, false, false);
    dw_value c = op1(DW_OP_TANH, b);
    output(add(a, mul(c, a)));
    RUN(DW_PASS_FUSE);
    assert_int_equal(count_op(DW_OP_FUSED), 2);
    assert_int_equal(dw_graph_node_count(e.graph), 3);
}

static void forward_and_backward_stay_apart(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 1, S);
    dw_value y = op1(DW_OP_EXP, x);
    output(y);
    dw_graph_set_backward(e.graph, 1);
    output(op1(DW_OP_NEG, y));
    RUN(DW_PASS_FUSE);
    assert_int_equal(count_op(DW_OP_FUSED), 2);
}

static void other_shapes_stay_apart(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, B, S);
    dw_value row = op1(DW_OP_EXP, leaf("r", DW_F32, 1, S));
    output(mul(op1(DW_OP_NEG, x), like(row, x)));
    RUN(DW_PASS_FUSE);
    assert_int_equal(count_op(DW_OP_FUSED), 2);
    assert_int_equal(count_op(DW_OP_BROADCAST), 0);
}

/* No operand without its broadcast spans [B, S]: one must stay broadcast. */
static void the_iteration_shape_is_kept(void **state) {
    (void)state;
    dw_value row = leaf("r", DW_F32, 1, S), x = broadcast(row, 2, B, S);
    output(number(DW_OP_MUL, x, 3.0));
    dw_value one = leaf("one", DW_F32, 0);
    output(op1(DW_OP_EXP, broadcast(one, 2, B, S)));
    RUN(DW_PASS_FUSE);
    assert_int_equal(count_op(DW_OP_FUSED), 2);
}

static void two_constants_are_typed(void **state) {
    (void)state;
    dw_value c = leaf("c", DW_BOOL, 1, S);
    dw_value one = dw__emit_constant(&e, DW_F32, 1, &S, 1.0);
    dw_value two = dw__emit_constant(&e, DW_F32, 1, &S, 2.0);
    output(dw__emit_select(&e, c, one, two));
    output(op1(DW_OP_EXP, one));
    RUN(DW_PASS_FUSE);
    assert_int_equal(count_op(DW_OP_SELECT), 0);
}

static void dropout_and_casts_fuse(void **state) {
    (void)state;
    dw_value x = leaf("x", DW_F32, 2, B, S), seed = leaf("seed", DW_I64, 1, D(2));
    dw_attr attrs[] = {dw_attr_float(DW_ATTR_KEY_P, 0.25), dw_attr_int(DW_ATTR_KEY_STREAM, 9)};
    dw_value y = dw__emit(&e, DW_OP_DROPOUT, 2, (dw_value[]){x, seed}, 2, attrs);
    dw_value tanh_form = y;
    dw_attr attr = dw_attr_string(DW_ATTR_KEY_APPROXIMATE, "tanh");
    tanh_form = dw__emit(&e, DW_OP_GELU, 1, &y, 1, &attr);
    output(cast(add(x, tanh_form), DW_F64));
    RUN(DW_PASS_FUSE);
    assert_int_equal(dw_graph_node_count(e.graph), 1);
    assert_string_equal(body_of(0), "t0=dropout(i0,i1,c0.25,c9);t1=gelu_tanh(t0);t2=add(i0,t1);"
                                    "t3=cast_f64(t2);out(t3)");
}

static void siblings_share_a_pass(void **state) {
    (void)state;
    dw_value dy = leaf("dy", DW_F32, 2, B, S), gate = leaf("gate", DW_F32, 2, B, S);
    dw_value up = leaf("up", DW_F32, 2, B, S);
    output(op2(DW_OP_SILU_BACKWARD, gate, mul(dy, up)));
    output(mul(dy, op1(DW_OP_SILU, gate)));
    RUN(DW_PASS_FUSE);
    assert_int_equal(dw_graph_node_count(e.graph), 1);
}

/* Many values and random operands: groups of every form, never a cycle, the same results. */
static void random_graphs_fuse_without_cycles(void **state) {
    for (uint64_t seed = 1; seed <= 40; seed++) {
        static const dw_op binary[] = {DW_OP_ADD, DW_OP_SUB, DW_OP_MUL, DW_OP_MAX};
        static const dw_op unary[] = {DW_OP_TANH, DW_OP_SIGMOID, DW_OP_NEG, DW_OP_SIN};
        dw_value values[64];
        uint32_t count = 0;
        uint64_t s = seed;
        values[count++] = leaf("a", DW_F64, 2, S, S);
        values[count++] = leaf("b", DW_F64, 2, S, S);
        while (count < 60) {
            dw_value x = values[(uint32_t)(uniform(&s) * count)];
            dw_value y = values[(uint32_t)(uniform(&s) * count)];
            uint32_t pick = (uint32_t)(uniform(&s) * 4);
            double kind = uniform(&s);
            if (count == 40) dw_graph_set_backward(e.graph, 1);
            if (kind < 0.5)
                values[count++] = op2(binary[pick], x, y);
            else if (kind < 0.75)
                values[count++] = op1(unary[pick], x);
            else if (kind < 0.85)
                values[count++] = op1(DW_OP_TANH, permute(x));
            else if (kind < 0.95)
                values[count++] = op1(DW_OP_TANH, dw__emit_matmul(&e, x, y, false, false));
            else
                values[count++] = dw__emit_reduce_spread(&e, DW_OP_REDUCE_MAX, x, 1);
        }
        for (uint32_t i = 0; i < 6; i++) output(values[count - 1 - 3 * i]);
        RUN(DW_PASS_FOLD, DW_PASS_COMMON, DW_PASS_FUSE);
        close_graph(state);
        open_graph(state);
    }
}

/* ---- failure -------------------------------------------------------------------------------- */

/* Every allocation of every pass fails in turn: the graph stays unchanged. */
static void a_failed_pass_changes_nothing(void **state) {
    (void)state;
    language_model_head(true, true, false);
    dw_value x = dw_graph_find(e.graph, "x");
    output(gelu_tanh(x, sqrt(2.0 / M_PI), 0.044715, 0));
    for (int pass = 0; pass < DW_PASS_COUNT; pass++) {
        char *before, *after;
        OK(dw_graph_to_text(e.graph, &before));
        dw_status status = DW_OUT_OF_MEMORY;
        for (int64_t allowed = 0; status != DW_OK; allowed += allowed < 40 ? 1 : allowed / 8) {
            dw__memory_fail_after(allowed);
            status = dw_graph_run_pass(&e.graph, (dw_pass)pass);
            dw__memory_fail_after(-1);
            if (status == DW_OK) break;
            assert_int_equal(status, DW_OUT_OF_MEMORY);
            OK(dw_graph_to_text(e.graph, &after));
            assert_string_equal(before, after);
            dw_text_free(after);
        }
        dw_text_free(before);
    }
}

static void passes_have_names(void **state) {
    (void)state;
    assert_string_equal(dw_pass_name(DW_PASS_FUSE), "fuse");
    assert_string_equal(dw_pass_name(DW_PASS_COUNT), "?");
    assert_int_equal(dw_graph_run_pass(&e.graph, DW_PASS_COUNT), DW_INVALID_ARGUMENT);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_graph, close_graph)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(gelu_is_recognised_in_every_order),
        TEST(gelu_with_another_constant_is_none),
        TEST(gelu_whose_inside_is_read_is_left_alone),
        TEST(gelu_in_bf16_is_recognised_through_casts),
        TEST(gelu_of_another_type_is_left_alone),
        TEST(gelu_by_erf_is_recognised),
        TEST(silu_and_swiglu_are_recognised),
        TEST(rms_norm_is_recognised),
        TEST(chains_of_half_types_are_recognised),
        TEST(rms_norm_without_weight_is_recognised),
        TEST(rms_norm_over_another_axis_is_none),
        TEST(rms_norm_whose_mean_is_read_is_left_alone),
        TEST(rms_norm_of_something_else_is_none),
        TEST(layer_norm_is_recognised),
        TEST(softmax_is_recognised),
        TEST(softmax_over_two_axes_is_none),
        TEST(rope_is_recognised),
        TEST(partial_rope_is_recognised),
        TEST(another_rotation_is_no_rope),
        TEST(causal_masks_are_recognised),
        TEST(written_attention_is_recognised),
        TEST(written_dropout_keeps_its_mask),
        TEST(low_biases_out_of_reach_are_positions),
        TEST(windows_of_bool_masks_are_recognised),
        TEST(low_biases_with_padding_stay),
        TEST(a_learned_bias_stays_beside_positions),
        TEST(hidden_scores_are_a_mask),
        TEST(weights_that_are_read_stay),
        TEST(causal_and_padding_leaves_the_padding),
        TEST(other_masks_are_not_causal),
        TEST(masks_are_passed_unbroadcast),
        TEST(masks_that_change_nothing_are_left_out),
        TEST(repeated_heads_are_shared),
        TEST(heads_repeated_in_another_order_are_not),
        TEST(conv1d_of_gpt2_is_linear),
        TEST(a_sum_with_more_than_a_row_is_no_bias),
        TEST(the_loss_goes_back_through_its_head),
        TEST(dlogits_that_others_read_stay),
        TEST(gpus_look_through_casts_of_logits),
        TEST(logits_that_are_read_stay_whole),
        TEST(mixtures_compute_on_sorted_rows),
        TEST(backward_of_mixtures_is_sorted),
        TEST(other_readers_of_grouped_rows_get_them_back),
        TEST(rows_that_cannot_be_sorted_for_memory_stay),
        TEST(weights_multiply_rows_before_the_last_gemm),
        TEST(other_weights_stay_behind_the_last_gemm),
        TEST(backward_computes_values_of_forward_itself),
        TEST(pads_side_by_side_are_concat),
        TEST(interleaved_pads_are_concat),
        TEST(pads_with_gaps_or_overlap_are_added),
        TEST(identities_fold_and_others_stay),
        TEST(folded_constants_have_the_bits_of_run_time),
        TEST(equal_nodes_are_made_once),
        TEST(half_results_stay_apart_until_the_gradient),
        TEST(dead_nodes_go_and_leaves_stay),
        TEST(a_chain_becomes_one_node),
        TEST(sums_of_products_stay_apart),
        TEST(a_detour_keeps_groups_apart),
        TEST(forward_and_backward_stay_apart),
        TEST(other_shapes_stay_apart),
        TEST(the_iteration_shape_is_kept),
        TEST(two_constants_are_typed),
        TEST(dropout_and_casts_fuse),
        TEST(siblings_share_a_pass),
        TEST(random_graphs_fuse_without_cycles),
        TEST(a_failed_pass_changes_nothing),
        TEST(passes_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
