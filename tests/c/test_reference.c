/* The registry, the reference kernels and the interpreter on small cases, computed by hand or by the textbook
 * formula written here. No test in this file compares with an expansion. */
#include "../ops/kernel_call.h"
#include "deepwell/graph.h"
#include "kernel/kernel.h"
#include "kernel/reference/interpret.h"
#include "number/half.h"
#include "number/philox.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka requires the four headers above. */
#include <cmocka.h>

#include <math.h>
#include <string.h>

/* ---- one call at a time ---------------------------------------------------------------------- */

static dw__call call;
static dw_attr attrs[8];
static int64_t lists[8][DW_MAX_RANK];

static void begin(dw_op op) {
    memset(&call, 0, sizeof call);
    for (int i = 0; i < DW_MAX_INPUTS; i++) call.inputs[i].rank = -1;
    call.op = op;
    call.attrs = attrs;
}

/* A contiguous tensor of `rank` dims, which follow as ints. */
static dw__tensor make_tensor(dw_dtype dtype, void *data, int rank, va_list dims) {
    dw__tensor t = {.data = data, .dtype = dtype, .rank = rank};
    for (int i = 0; i < rank; i++) t.shape[i] = va_arg(dims, int);
    dw__tensor_set_contiguous(&t);
    return t;
}

static void in(dw_dtype dtype, void *data, int rank, ...) {
    va_list dims;
    va_start(dims, rank);
    call.inputs[call.input_count++] = make_tensor(dtype, data, rank, dims);
    va_end(dims);
}

static void absent(void) { call.input_count++; }

static void out(dw_dtype dtype, void *data, int rank, ...) {
    va_list dims;
    va_start(dims, rank);
    call.outputs[call.output_count++] = make_tensor(dtype, data, rank, dims);
    va_end(dims);
}

static void attr(dw_attr value) { attrs[call.attr_count++] = value; }
static void attr_int(dw_attr_key key, int64_t value) { attr(dw_attr_int(key, value)); }
static void attr_float(dw_attr_key key, double value) { attr(dw_attr_float(key, value)); }

static void attr_list(dw_attr_key key, int count, ...) {
    va_list numbers;
    int64_t *list = lists[call.attr_count];
    va_start(numbers, count);
    for (int i = 0; i < count; i++) list[i] = va_arg(numbers, int);
    va_end(numbers);
    attr(dw_attr_list(key, (uint32_t)count, list));
}

static dw_status execute(void) {
    for (const dw__kernel *const *kernel = dw__kernels_reference; *kernel; kernel++)
        if ((*kernel)->op == call.op) return (*kernel)->run(&call, NULL);
    return DW_NOT_FOUND;
}

static void succeed(void) {
    if (execute() != DW_OK) fail_msg("%s", dw_last_error());
}

static void assert_near(double got, double wanted, double tolerance) {
    if (!(fabs(got - wanted) <= tolerance)) fail_msg("got %.9g, expected %.9g", got, wanted);
}

static void assert_floats(const float *got, const float *wanted, int count) {
    for (int i = 0; i < count; i++) {
        if (isnan(wanted[i]) ? !isnan(got[i]) : got[i] != wanted[i])
            fail_msg("element %d: got %.9g, expected %.9g", i, (double)got[i], (double)wanted[i]);
    }
}

static void assert_integers(const int64_t *got, const int64_t *wanted, int count) {
    for (int i = 0; i < count; i++)
        if (got[i] != wanted[i])
            fail_msg("element %d: got %lld, expected %lld", i, (long long)got[i],
                     (long long)wanted[i]);
}

/* ---- registry -------------------------------------------------------------------------------- */

static void every_operation_ends_with_its_reference(void **state) {
    (void)state;
    for (int op = 0; op < DW_OP_COUNT; op++) {
        const dw__kernel *const *kernel = dw__kernel_candidates((dw_op)op, false);
        const dw__kernel *last = NULL;
        for (; *kernel; kernel++) {
            last = *kernel;
            assert_true(last->computes ? last->computes((dw_op)op) : last->op == (dw_op)op);
        }
        assert_non_null(last);
        assert_memory_equal(last->name, "reference.", strlen("reference."));
        assert_string_equal(last->name + strlen("reference."), dw_op_name((dw_op)op));
    }
}

static void selection_is_the_first_that_supports(void **state) {
    double x[4] = {1, 2, 3, 4}, y[4];
    (void)state;
    begin(DW_OP_MATMUL);
    in(DW_F64, x, 2, 2, 2);
    in(DW_F64, x, 2, 2, 2);
    out(DW_F64, y, 2, 2, 2);
    const dw__operation_call whole = {.call = call};
    const dw__kernel *selected = dw__kernel_for(&whole, NULL, NULL);
    const dw__kernel *const *kernel = dw__kernel_candidates(DW_OP_MATMUL, false);
    assert_non_null(selected);
    assert_true(kernel_supports(selected, &call));
    assert_null(dw__kernel_for(&whole, NULL, selected)); /* the reference is last */
    for (; *kernel != selected; kernel++) assert_false(kernel_supports(*kernel, &call));
}

static void contiguity_ignores_axes_of_one(void **state) {
    dw__tensor t = {.rank = 3, .shape = {2, 1, 3}, .stride = {3, 77, 1}};
    (void)state;
    assert_true(dw__tensor_is_contiguous(&t));
    t.stride[0] = 4;
    assert_false(dw__tensor_is_contiguous(&t));
    t.shape[2] = 0;
    assert_true(dw__tensor_is_contiguous(&t));
}

/* ---- elementwise ----------------------------------------------------------------------------- */

static void integers_divide_as_python_does(void **state) {
    int64_t x[] = {7, -7, 7, -7, 6, INT64_MIN}, y[] = {2, 2, -2, -2, 3, -1}, z[6];
    (void)state;
    begin(DW_OP_DIV);
    in(DW_I64, x, 1, 6);
    in(DW_I64, y, 1, 6);
    out(DW_I64, z, 1, 6);
    succeed();
    assert_integers(z, (int64_t[]){3, -4, -4, 3, 2, INT64_MIN}, 6);
    call.op = DW_OP_REM;
    succeed();
    assert_integers(z, (int64_t[]){1, 1, -1, -1, 0, 0}, 6);
    y[3] = 0;
    assert_int_equal(execute(), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "rem"));
    assert_non_null(strstr(dw_last_error(), "zero"));
}

static void floats_take_the_remainder_of_their_divisor(void **state) {
    float x[] = {5, -5, 5, -5, -1}, y[] = {3, 3, -3, -3, INFINITY}, z[5];
    (void)state;
    begin(DW_OP_REM);
    in(DW_F32, x, 1, 5);
    in(DW_F32, y, 1, 5);
    out(DW_F32, z, 1, 5);
    succeed();
    assert_floats(z, (float[]){2, 1, -1, -2, INFINITY}, 5);
}

static void max_and_min_propagate_nan(void **state) {
    float x[] = {NAN, 1, 2, -INFINITY}, y[] = {1, NAN, 3, 0}, z[4];
    (void)state;
    begin(DW_OP_MAX);
    in(DW_F32, x, 1, 4);
    in(DW_F32, y, 1, 4);
    out(DW_F32, z, 1, 4);
    succeed();
    assert_floats(z, (float[]){NAN, NAN, 3, 0}, 4);
    call.op = DW_OP_MIN;
    succeed();
    assert_floats(z, (float[]){NAN, NAN, 2, -INFINITY}, 4);
}

static void casts_round_and_truncate(void **state) {
    float x[] = {1.00390625f, 1.01171875f, -2.9f, NAN, 0.0f};
    uint16_t half[5];
    int64_t whole[5];
    uint8_t truth[5];
    (void)state;
    begin(DW_OP_CAST);
    in(DW_F32, x, 1, 5);
    out(DW_BF16, half, 1, 5);
    succeed();
    assert_int_equal(half[0], 0x3F80); /* 1 + 2^-8: a tie, to even */
    assert_int_equal(half[1], 0x3F82); /* 1 + 3*2^-8: a tie, to even */
    begin(DW_OP_CAST);
    in(DW_F32, x, 1, 5);
    out(DW_I64, whole, 1, 5);
    succeed();
    assert_integers(whole, (int64_t[]){1, 1, -2, INT64_MIN, 0}, 5);
    begin(DW_OP_CAST);
    in(DW_F32, x, 1, 5);
    out(DW_BOOL, truth, 1, 5);
    succeed();
    assert_memory_equal(truth, ((uint8_t[]){1, 1, 1, 1, 0}), 5);
}

static void strides_are_followed(void **state) {
    float x[] = {1, 2, 3, 4, 5, 6}, y[] = {10, 20}, z[6];
    (void)state;
    begin(DW_OP_ADD);
    in(DW_F32, x, 2, 3, 2);
    in(DW_F32, y, 2, 3, 2);
    call.inputs[0].stride[0] = 1; /* x holds the transpose */
    call.inputs[0].stride[1] = 3;
    call.inputs[1].stride[0] = 0; /* y is broadcast down the rows */
    call.inputs[1].stride[1] = 1;
    out(DW_F32, z, 2, 3, 2);
    succeed();
    assert_floats(z, (float[]){11, 24, 12, 25, 13, 26}, 6);
}

/* ---- moving and indexing --------------------------------------------------------------------- */

static void elements_move_where_they_should(void **state) {
    float x[] = {1, 2, 3, 4, 5, 6}, y[15];
    (void)state;
    begin(DW_OP_PERMUTE);
    in(DW_F32, x, 2, 2, 3);
    out(DW_F32, y, 2, 3, 2);
    attr_list(DW_ATTR_KEY_PERM, 2, 1, 0);
    succeed();
    assert_floats(y, (float[]){1, 4, 2, 5, 3, 6}, 6);

    begin(DW_OP_SLICE);
    in(DW_F32, x, 1, 6);
    out(DW_F32, y, 1, 3);
    attr_list(DW_ATTR_KEY_START, 1, 1);
    attr_list(DW_ATTR_KEY_LIMIT, 1, 6);
    attr_list(DW_ATTR_KEY_STEP, 1, 2);
    succeed();
    assert_floats(y, (float[]){2, 4, 6}, 3);

    begin(DW_OP_PAD);
    in(DW_F32, x, 2, 1, 2);
    out(DW_F32, y, 2, 3, 3);
    attr_list(DW_ATTR_KEY_LOW, 2, 1, 0);
    attr_list(DW_ATTR_KEY_HIGH, 2, 1, 1);
    attr_float(DW_ATTR_KEY_VALUE, 9.0);
    succeed();
    assert_floats(y, (float[]){9, 9, 9, 1, 2, 9, 9, 9, 9}, 9);

    begin(DW_OP_CONCAT);
    in(DW_F32, x, 2, 2, 1);
    in(DW_F32, x + 2, 2, 2, 2);
    out(DW_F32, y, 2, 2, 3);
    attr_int(DW_ATTR_KEY_AXIS, 1);
    succeed();
    assert_floats(y, (float[]){1, 3, 4, 2, 5, 6}, 6);
}

static void indices_pick_and_scatter(void **state) {
    float x[] = {1, 2, 3, 4, 5, 6}, y[6];
    int64_t rows[] = {2, 0, 2}, columns[] = {1, 0, 0};
    (void)state;
    begin(DW_OP_TAKE);
    in(DW_F32, x, 2, 3, 2);
    in(DW_I64, rows, 1, 3);
    out(DW_F32, y, 2, 3, 2);
    attr_int(DW_ATTR_KEY_AXIS, 0);
    succeed();
    assert_floats(y, (float[]){5, 6, 1, 2, 5, 6}, 6);

    begin(DW_OP_TAKE_ALONG);
    in(DW_F32, x, 2, 3, 2);
    in(DW_I64, columns, 2, 3, 1);
    out(DW_F32, y, 2, 3, 1);
    attr_int(DW_ATTR_KEY_AXIS, 1);
    succeed();
    assert_floats(y, (float[]){2, 3, 5}, 3);

    begin(DW_OP_SCATTER_ADD);
    in(DW_I64, rows, 1, 3);
    in(DW_F32, x, 2, 3, 2);
    out(DW_F32, y, 2, 3, 2);
    attr_int(DW_ATTR_KEY_AXIS, 0);
    attr_list(DW_ATTR_KEY_SIZE, 1, 3);
    succeed();
    assert_floats(y, (float[]){3, 4, 0, 0, 6, 8}, 6);

    begin(DW_OP_PUT_ALONG_ADD);
    in(DW_I64, columns, 2, 1, 3);
    in(DW_F32, x, 2, 1, 3);
    out(DW_F32, y, 2, 1, 2);
    attr_int(DW_ATTR_KEY_AXIS, 1);
    attr_list(DW_ATTR_KEY_SIZE, 2, 1, 2);
    succeed();
    assert_floats(y, (float[]){5, 1}, 2);
}

static void an_index_outside_is_named(void **state) {
    float x[] = {1, 2, 3, 4, 5, 6}, y[6];
    int64_t rows[] = {2, 0, 17};
    (void)state;
    begin(DW_OP_TAKE);
    in(DW_F32, x, 2, 3, 2);
    in(DW_I64, rows, 1, 3);
    out(DW_F32, y, 2, 3, 2);
    attr_int(DW_ATTR_KEY_AXIS, 0);
    assert_int_equal(execute(), DW_INDEX);
    assert_non_null(strstr(dw_last_error(), "take: index 17 at position 2 is outside [0, 3)"));
    rows[2] = -1;
    assert_int_equal(execute(), DW_INDEX);
}

/* ---- reducing, sorting ----------------------------------------------------------------------- */

static void reductions_follow_their_axes(void **state) {
    float x[] = {1, 2, 3, 4, 5, 6}, y[3];
    uint8_t b[] = {0, 1, 0, 0}, any[2];
    (void)state;
    begin(DW_OP_REDUCE_SUM);
    in(DW_F32, x, 2, 2, 3);
    out(DW_F32, y, 1, 3);
    attr_list(DW_ATTR_KEY_AXES, 1, 0);
    succeed();
    assert_floats(y, (float[]){5, 7, 9}, 3);
    call.op = DW_OP_REDUCE_PROD;
    succeed();
    assert_floats(y, (float[]){4, 10, 18}, 3);

    begin(DW_OP_REDUCE_MAX);
    in(DW_BOOL, b, 2, 2, 2);
    out(DW_BOOL, any, 1, 2);
    attr_list(DW_ATTR_KEY_AXES, 1, 1);
    succeed();
    assert_memory_equal(any, ((uint8_t[]){1, 0}), 2);

    begin(DW_OP_REDUCE_MAX); /* the mean of nothing */
    in(DW_F32, x, 2, 0, 3);
    out(DW_F32, y, 1, 3);
    attr_list(DW_ATTR_KEY_AXES, 1, 0);
    succeed();
    assert_floats(y, (float[]){-INFINITY, -INFINITY, -INFINITY}, 3);
}

/* In BF16 the sum would stop at 256, whose next neighbour is 258. */
static void half_sums_accumulate_in_higher_precision(void **state) {
    uint16_t ones[300], sum;
    (void)state;
    for (int i = 0; i < 300; i++) ones[i] = dw__f32_to_bf16(1.0f);
    begin(DW_OP_REDUCE_SUM);
    in(DW_BF16, ones, 1, 300);
    out(DW_BF16, &sum, 0);
    attr_list(DW_ATTR_KEY_AXES, 1, 0);
    succeed();
    assert_true(dw__bf16_to_f32(sum) == 300.0f);
}

static void order_is_stable_and_nan_is_last(void **state) {
    float x[] = {2, NAN, 1, 2, 1}, sorted[5];
    int64_t where[5], best;
    (void)state;
    begin(DW_OP_SORT);
    in(DW_F32, x, 1, 5);
    out(DW_F32, sorted, 1, 5);
    out(DW_I64, where, 1, 5);
    attr_int(DW_ATTR_KEY_AXIS, 0);
    succeed();
    assert_floats(sorted, (float[]){1, 1, 2, 2, NAN}, 5);
    assert_integers(where, (int64_t[]){2, 4, 0, 3, 1}, 5);

    attr_int(DW_ATTR_KEY_DESCENDING, 1);
    succeed();
    assert_integers(where, (int64_t[]){1, 0, 3, 2, 4}, 5);

    begin(DW_OP_ARG_MAX);
    in(DW_F32, x, 1, 5);
    out(DW_I64, &best, 0);
    attr_int(DW_ATTR_KEY_AXIS, 0);
    succeed();
    assert_int_equal(best, 1); /* the NaN */
    x[1] = 0;
    succeed();
    assert_int_equal(best, 0); /* the first of two equal elements */
}

static void cumsum_runs_both_ways(void **state) {
    float x[] = {1, 2, 3, 4}, y[4];
    (void)state;
    begin(DW_OP_CUMSUM);
    in(DW_F32, x, 2, 2, 2);
    out(DW_F32, y, 2, 2, 2);
    attr_int(DW_ATTR_KEY_AXIS, 0);
    succeed();
    assert_floats(y, (float[]){1, 2, 4, 6}, 4);
    attr_int(DW_ATTR_KEY_REVERSE, 1);
    succeed();
    assert_floats(y, (float[]){4, 6, 3, 4}, 4);
}

static void matmul_supports_transposes(void **state) {
    float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, 2, 1, 0, 1}, y[4];
    const float expected[] = {5, 5, 14, 11}; /* [[1 2 3] [4 5 6]] [[1 0] [2 1] [0 1]] */
    (void)state;
    begin(DW_OP_MATMUL);
    in(DW_F32, a, 2, 2, 3);
    in(DW_F32, b, 2, 3, 2);
    out(DW_F32, y, 2, 2, 2);
    succeed();
    assert_floats(y, expected, 4);
    float at[] = {1, 4, 2, 5, 3, 6}, bt[] = {1, 2, 0, 0, 1, 1};
    begin(DW_OP_MATMUL);
    in(DW_F32, at, 2, 3, 2);
    in(DW_F32, bt, 2, 2, 3);
    out(DW_F32, y, 2, 2, 2);
    attr_int(DW_ATTR_KEY_TRANSPOSE_A, 1);
    attr_int(DW_ATTR_KEY_TRANSPOSE_B, 1);
    succeed();
    assert_floats(y, expected, 4);
}

/* ---- composites, by their formulas ----------------------------------------------------------- */

static void softmax_of_nothing_allowed_is_zero(void **state) {
    float x[] = {0, logf(3), -INFINITY, -INFINITY}, y[4];
    (void)state;
    begin(DW_OP_SOFTMAX);
    in(DW_F32, x, 2, 2, 2);
    out(DW_F32, y, 2, 2, 2);
    attr_int(DW_ATTR_KEY_AXIS, 1);
    succeed();
    assert_near(y[0], 0.25, 1e-7);
    assert_near(y[1], 0.75, 1e-7);
    assert_floats(y + 2, (float[]){0, 0}, 2);
}

static void norms_have_biased_variance(void **state) {
    float x[] = {1, 2, 3}, w[] = {1, 2, 1}, b[] = {0, 1, 0}, y[3], mean, rstd;
    (void)state;
    begin(DW_OP_LAYER_NORM);
    in(DW_F32, x, 2, 1, 3);
    in(DW_F32, w, 1, 3);
    in(DW_F32, b, 1, 3);
    out(DW_F32, y, 2, 1, 3);
    out(DW_F32, &mean, 1, 1);
    out(DW_F32, &rstd, 1, 1);
    attr_float(DW_ATTR_KEY_EPS, 0.25);
    succeed();
    double scale = 1.0 / sqrt(2.0 / 3.0 + 0.25);
    assert_near(mean, 2.0, 1e-6);
    assert_near(rstd, scale, 1e-6);
    assert_near(y[0], -scale, 1e-6);
    assert_near(y[1], 1.0, 1e-6);
    assert_near(y[2], scale, 1e-6);

    begin(DW_OP_RMS_NORM);
    in(DW_F32, x, 2, 1, 3);
    in(DW_F32, w, 1, 3);
    out(DW_F32, y, 2, 1, 3);
    out(DW_F32, &rstd, 1, 1);
    attr_float(DW_ATTR_KEY_EPS, 0.25);
    succeed();
    scale = 1.0 / sqrt(14.0 / 3.0 + 0.25);
    assert_near(y[0], scale, 1e-6);
    assert_near(y[1], 4.0 * scale, 1e-6);
    assert_near(rstd, scale, 1e-6);
}

static void activations_follow_their_formulas(void **state) {
    float x[] = {-1.5f, 0.0f, 2.0f}, y[3];
    (void)state;
    begin(DW_OP_GELU);
    in(DW_F32, x, 1, 3);
    out(DW_F32, y, 1, 3);
    attr(dw_attr_string(DW_ATTR_KEY_APPROXIMATE, "none"));
    succeed();
    for (int i = 0; i < 3; i++) assert_near(y[i], 0.5 * x[i] * erfc(-x[i] / sqrt(2.0)), 1e-6);
    begin(DW_OP_SILU);
    in(DW_F32, x, 1, 3);
    out(DW_F32, y, 1, 3);
    succeed();
    for (int i = 0; i < 3; i++) assert_near(y[i], x[i] / (1.0 + exp(-x[i])), 1e-6);
}

static void rope_rotates_halves_and_pairs(void **state) {
    float x[] = {1, 2, 3, 4, 5}, cosine[] = {0, 0.5f, 0, 0.5f}, sine[] = {1, 2, 1, 2}, y[5];
    (void)state;
    begin(DW_OP_ROPE);
    in(DW_F32, x, 2, 1, 5);
    in(DW_F32, cosine, 2, 1, 4);
    in(DW_F32, sine, 2, 1, 4);
    out(DW_F32, y, 2, 1, 5);
    succeed(); /* pairs (1,3) and (2,4); the fifth element stays */
    assert_floats(y, (float[]){-3, -7, 1, 6, 5}, 5);
    cosine[1] = 0, cosine[2] = cosine[3] = 0.5f; /* now one angle for each neighbouring pair */
    sine[1] = 1, sine[2] = sine[3] = 2;
    attr_int(DW_ATTR_KEY_INTERLEAVED, 1);
    succeed(); /* pairs (1,2) and (3,4) */
    assert_floats(y, (float[]){-2, 1, -6.5f, 8, 5}, 5);
}

static double log_sum_exp(const float *x, int count) {
    double sum = 0.0;
    for (int i = 0; i < count; i++) sum += exp(x[i]);
    return log(sum);
}

static void cross_entropy_smooths_and_ignores(void **state) {
    enum { T = 3, V = 4 };
    float x[T * V] = {0.1f, -2, 1, 0.5f, 3, 1, -1, 0, 2, 2, 0, -3}, loss, lse[T];
    int64_t target[T] = {2, -100, 1};
    const double smoothing = 0.2;
    double sum = 0.0;
    (void)state;
    for (int t = 0; t < T; t++) {
        if (target[t] < 0) continue;
        double log_total = log_sum_exp(x + t * V, V);
        for (int v = 0; v < V; v++) {
            double weight = smoothing / V + (v == target[t] ? 1.0 - smoothing : 0.0);
            sum += weight * (log_total - x[t * V + v]);
        }
    }
    begin(DW_OP_CROSS_ENTROPY);
    in(DW_F32, x, 2, T, V);
    in(DW_I64, target, 1, T);
    out(DW_F32, &loss, 0);
    out(DW_F32, lse, 1, T);
    attr(dw_attr_string(DW_ATTR_KEY_REDUCTION, "mean"));
    attr_float(DW_ATTR_KEY_LABEL_SMOOTHING, smoothing);
    succeed();
    assert_near(loss, sum / 2.0, 1e-6);
    assert_near(lse[0], log_sum_exp(x, V), 1e-6);
    target[0] = V;
    assert_int_equal(execute(), DW_INDEX);
}

static void a_padding_row_gets_no_gradient(void **state) {
    int64_t ids[] = {1, 0, 1};
    float dy[] = {1, 2, 3, 4, 5, 6}, dw[4];
    (void)state;
    begin(DW_OP_EMBEDDING_BACKWARD);
    in(DW_I64, ids, 1, 3);
    in(DW_F32, dy, 2, 3, 2);
    out(DW_F32, dw, 2, 2, 2);
    attr_list(DW_ATTR_KEY_SIZE, 1, 2);
    attr_int(DW_ATTR_KEY_PADDING_INDEX, 0);
    succeed();
    assert_floats(dw, (float[]){0, 0, 6, 8}, 4);
}

static void adamw_follows_its_paper(void **state) {
    float p = 0.5f, g = -2.0f, m = 0.25f, v = 0.125f, p1, m1, v1;
    int64_t step = 3;
    const double lr = 0.1, b1 = 0.9, b2 = 0.99, eps = 1e-3, decay = 0.01;
    (void)state;
    begin(DW_OP_ADAMW);
    in(DW_F32, &p, 1, 1);
    in(DW_F32, &g, 1, 1);
    in(DW_F32, &m, 1, 1);
    in(DW_F32, &v, 1, 1);
    in(DW_I64, &step, 0);
    out(DW_F32, &p1, 1, 1);
    out(DW_F32, &m1, 1, 1);
    out(DW_F32, &v1, 1, 1);
    attr_float(DW_ATTR_KEY_LR, lr);
    attr_float(DW_ATTR_KEY_BETA1, b1);
    attr_float(DW_ATTR_KEY_BETA2, b2);
    attr_float(DW_ATTR_KEY_EPS, eps);
    attr_float(DW_ATTR_KEY_WEIGHT_DECAY, decay);
    succeed();
    double m_new = b1 * m + (1 - b1) * g, v_new = b2 * v + (1 - b2) * g * g;
    double m_hat = m_new / (1 - pow(b1, 3)), v_hat = v_new / (1 - pow(b2, 3));
    assert_near(m1, m_new, 1e-6);
    assert_near(v1, v_new, 1e-6);
    assert_near(p1, p * (1 - lr * decay) - lr * m_hat / (sqrt(v_hat) + eps), 1e-6);
}

/* ---- attention, written out ------------------------------------------------------------------ */

enum { B = 2, H = 4, HK = 2, SQ = 3, SK = 5, D = 2, DV = 3 };

typedef struct attention_case {
    float q[B * H * SQ * D], k[B * HK * SK * D], v[B * HK * SK * DV];
    uint8_t mask[B * SK];
    int64_t seed[2];
    double scale, p, softcap;
    int64_t causal, window, stream;
} attention_case;

static bool may_attend(const attention_case *c, int b, int query, int key) {
    int shift = c->causal == 2 ? SK - SQ : 0;
    if (!c->mask[b * SK + key]) return false;
    if (c->causal && key > query + shift) return false;
    return c->window < 0 || key > query + shift - c->window;
}

/* One query of one head, in double, from the definition. */
static void attend(const attention_case *c, int b, int h, int query, double *o, double *lse) {
    int kv = b * HK + h / (H / HK), row = (b * H + h) * SQ + query;
    double total = 0.0, weights[SK];
    for (int key = 0; key < SK; key++) {
        double score = 0.0;
        for (int d = 0; d < D; d++)
            score += (double)c->q[row * D + d] * c->k[(kv * SK + key) * D + d];
        score *= c->scale;
        if (c->softcap > 0.0) score = c->softcap * tanh(score / c->softcap);
        weights[key] = may_attend(c, b, query, key) ? exp(score) : 0.0;
        total += weights[key];
    }
    *lse = log(total);
    for (int d = 0; d < DV; d++) {
        o[d] = 0.0;
        for (int key = 0; total > 0.0 && key < SK; key++) {
            uint64_t element = (uint64_t)(row * SK + key);
            float uniform = dw__philox_uniform(c->seed[0], c->seed[1], c->stream, element);
            double kept = uniform >= c->p ? 1.0 / (1.0 - c->p) : 0.0;
            o[d] += kept * weights[key] / total * c->v[(kv * SK + key) * DV + d];
        }
    }
}

static void check_attention(const attention_case *c) {
    static attention_case held;
    float o[B * H * SQ * DV], lse[B * H * SQ];
    held = *c;
    begin(DW_OP_ATTENTION);
    in(DW_F32, held.q, 4, B, H, SQ, D);
    in(DW_F32, held.k, 4, B, HK, SK, D);
    in(DW_F32, held.v, 4, B, HK, SK, DV);
    in(DW_BOOL, held.mask, 4, B, 1, 1, SK);
    if (c->p > 0.0)
        in(DW_I64, held.seed, 1, 2);
    else
        absent();
    out(DW_F32, o, 4, B, H, SQ, DV);
    out(DW_F32, lse, 3, B, H, SQ);
    attr_float(DW_ATTR_KEY_SCALE, c->scale);
    attr_float(DW_ATTR_KEY_P, c->p);
    attr_float(DW_ATTR_KEY_SOFTCAP, c->softcap);
    attr_int(DW_ATTR_KEY_STREAM, c->stream);
    attr_int(DW_ATTR_KEY_CAUSAL, c->causal);
    attr_int(DW_ATTR_KEY_WINDOW, c->window);
    succeed();
    for (int row = 0; row < B * H * SQ; row++) {
        double expected[DV], expected_lse;
        attend(c, row / (H * SQ), row / SQ % H, row % SQ, expected, &expected_lse);
        if (isinf(expected_lse))
            assert_true(lse[row] == -INFINITY);
        else
            assert_near(lse[row], expected_lse, 1e-5);
        for (int d = 0; d < DV; d++) assert_near(o[row * DV + d], expected[d], 1e-5);
    }
}

static attention_case random_attention(void) {
    attention_case c = {.seed = {77, 5}, .scale = 0.7, .window = -1, .stream = 3};
    uint32_t random = 1;
    float *parts[] = {c.q, c.k, c.v};
    size_t counts[] = {sizeof c.q / 4, sizeof c.k / 4, sizeof c.v / 4};
    for (int part = 0; part < 3; part++)
        for (size_t i = 0; i < counts[part]; i++) {
            random = random * 1664525u + 1013904223u;
            parts[part][i] = (float)(random >> 8) * 0x1p-22f - 2.0f;
        }
    memset(c.mask, 1, sizeof c.mask);
    return c;
}

static void attention_is_what_its_definition_says(void **state) {
    (void)state;
    for (int causal = 0; causal <= 2; causal++) {
        for (int window = -1; window <= 2; window++) {
            attention_case c = random_attention();
            c.causal = causal;
            c.window = window;
            check_attention(&c);
            c.mask[0] = c.mask[3] = c.mask[SK + 1] = 0;
            check_attention(&c);
            c.p = 0.4;
            check_attention(&c);
            c.softcap = 1.5;
            check_attention(&c);
        }
    }
    attention_case nothing = random_attention();
    memset(nothing.mask, 0, sizeof nothing.mask);
    check_attention(&nothing);
}

/* ---- fused ----------------------------------------------------------------------------------- */

static void fused_bodies_broadcast_and_drop(void **state) {
    enum { ROWS = 3, COLUMNS = 2 };
    float x[] = {1, -2, 3, -4, 5, -6}, bias[] = {10, 20}, y[6], kept[6];
    int64_t seed[] = {9, 1};
    (void)state;
    begin(DW_OP_FUSED);
    in(DW_F32, x, 2, ROWS, COLUMNS);
    in(DW_F32, bias, 1, COLUMNS);
    in(DW_I64, seed, 1, 2);
    out(DW_F32, y, 2, ROWS, COLUMNS);
    out(DW_F32, kept, 2, ROWS, COLUMNS);
    attr(dw_attr_string(DW_ATTR_KEY_BODY, "t0=relu(i0);t1=add(t0,i1);t2=mul(t1,c0.5);"
                                          "t3=dropout(t2,i2,c0.5,c4);out(t2,t3)"));
    succeed();
    assert_floats(y, (float[]){5.5f, 10, 6.5f, 10, 7.5f, 10}, 6);
    for (uint64_t i = 0; i < 6; i++) {
        bool keeps = dw__philox_uniform(9, 1, 4, i) >= 0.5f;
        assert_true(kept[i] == (keeps ? 2.0f * y[i] : 0.0f));
    }
}

/* ---- interpreter ----------------------------------------------------------------------------- */

/* y = sum over rows of softmax(x [B, 3]), with a symbolic batch. Returns x too. */
static dw_graph *symbolic_graph(void) {
    dw_graph *graph = NULL;
    dw_dim batch;
    dw_value x, y;
    int64_t rows = 0;
    dw_attr axis = dw_attr_int(DW_ATTR_KEY_AXIS, 1);
    dw_attr axes = dw_attr_list(DW_ATTR_KEY_AXES, 1, &rows);
    assert_int_equal(dw_graph_create(&graph), DW_OK);
    assert_int_equal(dw_graph_symbol(graph, "B", &batch), DW_OK);
    dw_dim shape[] = {batch, 3};
    assert_int_equal(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 2, shape, &x), DW_OK);
    assert_int_equal(dw_graph_apply(graph, DW_OP_SOFTMAX, 1, &x, 1, &axis, &y), DW_OK);
    assert_int_equal(dw_graph_apply(graph, DW_OP_REDUCE_SUM, 1, &y, 1, &axes, &y), DW_OK);
    assert_int_equal(dw_graph_add_output(graph, y), DW_OK);
    assert_int_equal(dw_graph_add_output(graph, x), DW_OK);
    return graph;
}

static dw__tensor matrix(float *data, int64_t rows) {
    dw__tensor t = {.data = data, .dtype = DW_F32, .rank = 2, .shape = {rows, 3}};
    dw__tensor_set_contiguous(&t);
    return t;
}

static void the_interpreter_follows_symbols_and_precision(void **state) {
    float x[] = {1, 2, 3, -1, 0, 1};
    int64_t batch = 2;
    dw__tensor leaf = matrix(x, 2), outputs[2];
    dw_graph *graph = symbolic_graph();
    (void)state;
    for (int high = 0; high <= 1; high++) {
        dw__interpret_options options = {high != 0};
        assert_int_equal(dw__interpret(graph, &batch, &leaf, outputs, &options), DW_OK);
        assert_int_equal(outputs[0].dtype, high ? DW_F64 : DW_F32);
        double total = exp(-2) + exp(-1) + 1, first = 2.0 * exp(-2) / total;
        double got = high ? ((double *)outputs[0].data)[0] : ((float *)outputs[0].data)[0];
        assert_near(got, first, high ? 1e-15 : 1e-6);
        assert_true(outputs[1].data != x);
        assert_int_equal(outputs[1].shape[0], 2);
        for (int i = 0; i < 2; i++) dw__free_aligned(outputs[i].data);
    }
    dw_graph_destroy(graph);
}

static void wrong_leaves_are_named(void **state) {
    float x[9] = {0};
    int64_t batch = 2;
    dw__tensor leaf = matrix(x, 3), outputs[2];
    dw_graph *graph = symbolic_graph();
    (void)state;
    assert_int_equal(dw__interpret(graph, &batch, &leaf, outputs, NULL), DW_SHAPE);
    assert_non_null(strstr(dw_last_error(), "leaf x: axis 0 is 2"));
    leaf = matrix(x, 2);
    leaf.dtype = DW_I32;
    assert_int_equal(dw__interpret(graph, &batch, &leaf, outputs, NULL), DW_TYPE);
    leaf = matrix(NULL, 2);
    assert_int_equal(dw__interpret(graph, &batch, &leaf, outputs, NULL), DW_INVALID_ARGUMENT);
    assert_null(outputs[0].data);
    dw_graph_destroy(graph);
}

static void every_failed_allocation_is_reported_and_leaks_nothing(void **state) {
    float x[] = {1, 2, 3, -1, 0, 1};
    int64_t batch = 2, count = 0;
    dw__tensor leaf = matrix(x, 2), outputs[2];
    dw__interpret_options options = {true};
    dw_graph *graph = symbolic_graph();
    (void)state;
    int64_t live = dw__memory_live();
    dw_status status = DW_OUT_OF_MEMORY;
    for (; status == DW_OUT_OF_MEMORY; count++) {
        dw__memory_fail_after(count);
        status = dw__interpret(graph, &batch, &leaf, outputs, &options);
        dw__memory_fail_after(-1);
        if (status == DW_OK)
            for (int i = 0; i < 2; i++) dw__free_aligned(outputs[i].data);
        assert_int_equal(dw__memory_live(), live);
    }
    assert_int_equal(status, DW_OK);
    assert_true(count > 20); /* the expansion of softmax alone makes more */
    dw_graph_destroy(graph);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_ends_with_its_reference),
        cmocka_unit_test(selection_is_the_first_that_supports),
        cmocka_unit_test(contiguity_ignores_axes_of_one),
        cmocka_unit_test(integers_divide_as_python_does),
        cmocka_unit_test(floats_take_the_remainder_of_their_divisor),
        cmocka_unit_test(max_and_min_propagate_nan),
        cmocka_unit_test(casts_round_and_truncate),
        cmocka_unit_test(strides_are_followed),
        cmocka_unit_test(elements_move_where_they_should),
        cmocka_unit_test(indices_pick_and_scatter),
        cmocka_unit_test(an_index_outside_is_named),
        cmocka_unit_test(reductions_follow_their_axes),
        cmocka_unit_test(half_sums_accumulate_in_higher_precision),
        cmocka_unit_test(order_is_stable_and_nan_is_last),
        cmocka_unit_test(cumsum_runs_both_ways),
        cmocka_unit_test(matmul_supports_transposes),
        cmocka_unit_test(softmax_of_nothing_allowed_is_zero),
        cmocka_unit_test(norms_have_biased_variance),
        cmocka_unit_test(activations_follow_their_formulas),
        cmocka_unit_test(rope_rotates_halves_and_pairs),
        cmocka_unit_test(cross_entropy_smooths_and_ignores),
        cmocka_unit_test(a_padding_row_gets_no_gradient),
        cmocka_unit_test(adamw_follows_its_paper),
        cmocka_unit_test(attention_is_what_its_definition_says),
        cmocka_unit_test(fused_bodies_broadcast_and_drop),
        cmocka_unit_test(the_interpreter_follows_symbols_and_precision),
        cmocka_unit_test(wrong_leaves_are_named),
        cmocka_unit_test(every_failed_allocation_is_reported_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
