/* Tests the softmax kernels, found through the registry of GPU kernels, on an emulated Hopper GPU with the checker on.
 * Results are compared with the operation's definition in FP64: awkward shapes, rows that are partly or wholly masked,
 * infinities and NaN. A wrong kernel must be rejected at its first use. */
#include "emulated_call.h"
#include "emulated_softmax.h"
#include "kernel/cuda/gpu_kernels.h"
#include "number/half.h"
#include <math.h>

typedef struct row {
    int type, logarithm, lanes, vectors, aligned;
} row;
#define ROW(...) {__VA_ARGS__},
static const row rows[] = {EMULATED_SOFTMAX(ROW)};

static dw__jit_variant variant_of(const row *r) {
    dw__jit_variant v = {.source = "common/softmax.cu", .entry = "", .arch = "sm_90a"};
    dw__jit_add_define(&v, "TYPE", r->type);
    dw__jit_add_define(&v, "LOGARITHM", r->logarithm);
    dw__jit_add_define(&v, "LANES", r->lanes);
    dw__jit_add_define(&v, "VECTORS", r->vectors);
    dw__jit_add_define(&v, "ALIGNED", r->aligned);
    return v;
}

static const dw_device *device;
static const dw__context *context;

static void need_compiler(void) {
    const dw__jit_variant v = variant_of(&rows[0]);
    need_ptx(&v);
}

static void begin(void) {
    need_compiler();
    if (device) return;
    for (size_t i = 0; i < DW_COUNT(rows); i++) {
        const dw__jit_variant v = variant_of(&rows[i]);
        carry_variant(&v);
    }
    device = device_named("emulator:sm_90a");
    assert_int_equal(device->context(&context), DW_OK);
}

/* ---- one call ------------------------------------------------------------------------------------- */

/* Tensors of [rows][columns] with `pitch` elements from row to row; the padding after a row is 0xFF. */
typedef struct problem {
    dw_op op;
    matrix_type type;
    int rows, columns, pitch;
    /* The number of elements, of each 4, that are -infinity; the first row is wholly masked. */
    int masked;
    float shift; /* added to every logit */
} problem;

static dw__tensor tensor_of(const problem *p, const matrix *m) {
    const dw_dtype dtype = p->type == MATRIX_F32   ? DW_F32
                           : p->type == MATRIX_F16 ? DW_F16
                                                   : DW_BF16;
    return (dw__tensor){.data = m->device,
                        .dtype = dtype,
                        .rank = 3,
                        .shape = {1, p->rows, p->columns},
                        .stride = {0, p->pitch, 1}};
}

static void place_rows(const problem *p, matrix *m) {
    *m = (matrix){.rows = p->rows, .columns = p->columns, .type = p->type};
    m->pitch = (size_t)p->pitch * (size_t)bits_of(p->type) / 8;
    m->bytes = (size_t)p->rows * m->pitch;
    m->host = malloc(m->bytes + 1);
    assert_non_null(m->host);
    memset(m->host, 0xFF, m->bytes);
    assert_int_equal(dw_device_allocate(device, m->bytes, &m->device), DW_OK);
}

static bool is_backward(const problem *p) {
    return p->op == DW_OP_SOFTMAX_BACKWARD || p->op == DW_OP_LOG_SOFTMAX_BACKWARD;
}

/* Computes one row by definition, in double. */
static void expected_row(const problem *p, const double *x, const double *dy, double *y) {
    double largest = -INFINITY, sum = 0.0;
    const bool logarithm = p->op == DW_OP_LOG_SOFTMAX || p->op == DW_OP_LOG_SOFTMAX_BACKWARD;
    for (int j = 0; j < p->columns; j++) largest = fmax(largest, x[j]);
    for (int j = 0; j < p->columns; j++)
        sum += is_backward(p) ? (logarithm ? dy[j] : x[j] * dy[j]) : exp(x[j] - largest);
    for (int j = 0; j < p->columns; j++) {
        if (is_backward(p))
            y[j] = logarithm ? dy[j] - exp(x[j]) * sum : x[j] * (dy[j] - sum);
        else if (largest == -INFINITY && !logarithm)
            y[j] = 0.0;
        else
            y[j] = logarithm ? x[j] - largest - log(sum) : exp(x[j] - largest) / sum;
    }
}

/* The bound: a sum of n terms in F32 and one rounding to the result's type, relative to the row's largest result. */
static void compare_row(const problem *p, const matrix *made, int i, const double *expected) {
    const double u = p->type == MATRIX_F32 ? 0.0 : p->type == MATRIX_F16 ? 0x1p-11 : 0x1p-8;
    double largest = 0.0;
    for (int j = 0; j < p->columns; j++)
        if (isfinite(expected[j])) largest = fmax(largest, fabs(expected[j]));
    const double bound = (u + 8.0 * sqrt((double)p->columns) * 0x1p-24) * largest;
    for (int j = 0; j < p->columns; j++) {
        const double x = get(made, i, j);
        if (x == expected[j] || (isnan(x) && isnan(expected[j]))) continue;
        if (!(fabs(x - expected[j]) <= bound))
            fail_msg("op %d, %d x %d: [%d][%d] is %g, expected %g within %g", (int)p->op, p->rows,
                     p->columns, i, j, x, expected[j], bound);
    }
}

static void fill(const problem *p, matrix *m, uint64_t *state) {
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < p->columns; j++) {
            const bool masked = p->masked && (i == 0 || (int)(random_word(state) % 4) < p->masked);
            set(m, i, j, masked ? -INFINITY : (float)random_value(state, false) + p->shift);
        }
    send(m, device);
}

/* Runs the call through the registry and compares every element, and the bytes after the rows. */
static void run(const problem *p) {
    uint64_t state = 17;
    matrix x, dy, result;
    place_rows(p, &x);
    place_rows(p, &dy);
    place_rows(p, &result);
    fill(p, &x, &state);
    fill(p, &dy, &state);
    send(&result, device);
    const dw_attr axis = {.key = DW_ATTR_KEY_AXIS, .integer = 2};
    const dw__operation_call call = {.call = {.op = p->op,
                                              .attr_count = 1,
                                              .attrs = &axis,
                                              .input_count = is_backward(p) ? 2 : 1,
                                              .output_count = 1,
                                              .inputs = {tensor_of(p, &x), tensor_of(p, &dy)},
                                              .outputs = {tensor_of(p, &result)}}};
    char name[DW__TARGET_NAME];
    const dw__gpu_target gpu = dw__gpu_target_of(context, name);
    const dw__kernel *kernel = dw__kernel_for(&call, &gpu, NULL);
    const dw__variant *variant;
    assert_non_null(kernel);
    assert_string_equal(kernel->name, "softmax");
    if (kernel->prepare(kernel, &call, context, &variant) != DW_OK) fail_msg("%s", dw_last_error());
    if (variant->disabled) fail_msg("%s", variant->reason);
    if (kernel->enqueue(&call, context, variant) != DW_OK) fail_msg("%s", dw_last_error());
    fetch(&result, device);
    double *numbers = malloc(sizeof(double) * 3 * (size_t)p->columns);
    assert_non_null(numbers);
    for (int i = 0; i < p->rows; i++) {
        double *a = numbers, *b = a + p->columns, *expected = b + p->columns;
        for (int j = 0; j < p->columns; j++) a[j] = get(&x, i, j), b[j] = get(&dy, i, j);
        expected_row(p, a, b, expected);
        compare_row(p, &result, i, expected);
        const uint8_t *behind =
            (const uint8_t *)result.host + (size_t)i * result.pitch + row_bytes(&result);
        for (size_t k = 0; k < result.pitch - row_bytes(&result); k++)
            assert_int_equal(behind[k], 0xFF);
    }
    free(numbers);
    take_away(&x, device);
    take_away(&dy, device);
    take_away(&result, device);
}

/* ---- tests ---------------------------------------------------------------------------------------- */

static void test_awkward_shapes(void **state) {
    (void)state;
    begin();
    static const problem problems[] = {
        {DW_OP_SOFTMAX, MATRIX_BF16, 11, 1, 3, 0, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_BF16, 9, 131, 131, 0, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_BF16, 8, 256, 256, 0, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_BF16, 3, 1016, 1024, 0, 0.0f},
        {DW_OP_SOFTMAX_BACKWARD, MATRIX_BF16, 9, 131, 133, 0, 0.0f},
        {DW_OP_LOG_SOFTMAX, MATRIX_BF16, 9, 67, 67, 0, 0.0f},
        {DW_OP_LOG_SOFTMAX_BACKWARD, MATRIX_BF16, 2, 67, 67, 0, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_F16, 2, 2048, 2048, 0, 0.0f},
        {DW_OP_LOG_SOFTMAX, MATRIX_F16, 5, 997, 999, 0, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_F32, 2, 1999, 2001, 0, 0.0f},
        {DW_OP_LOG_SOFTMAX, MATRIX_F32, 3, 1024, 1028, 0, 0.0f},
        {DW_OP_LOG_SOFTMAX_BACKWARD, MATRIX_F32, 3, 1024, 1028, 0, 0.0f},
        {DW_OP_LOG_SOFTMAX, MATRIX_F32, 2, 8192, 8192, 0, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_F32, 2, 8195, 8195, 0, 0.0f},
        {DW_OP_SOFTMAX_BACKWARD, MATRIX_F32, 2, 8195, 8195, 0, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_BF16, 0, 256, 256, 0, 0.0f},
    };
    for (size_t i = 0; i < DW_COUNT(problems); i++) run(&problems[i]);
}

static void test_masks_and_large_logits(void **state) {
    (void)state;
    begin();
    static const problem problems[] = {
        {DW_OP_SOFTMAX, MATRIX_BF16, 9, 131, 131, 2, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_F32, 3, 8195, 8195, 3, 0.0f},
        {DW_OP_SOFTMAX, MATRIX_F32, 2, 1999, 2001, 0, 3e38f},
        {DW_OP_SOFTMAX, MATRIX_BF16, 2, 256, 256, 0, -1e30f},
        {DW_OP_LOG_SOFTMAX, MATRIX_F32, 3, 1024, 1028, 2, 100.0f},
    };
    for (size_t i = 0; i < DW_COUNT(problems); i++) run(&problems[i]);
}

static void test_unsupported_calls(void **state) {
    (void)state;
    const dw_attr axis = {.key = DW_ATTR_KEY_AXIS, .integer = 0};
    dw__tensor x = {.dtype = DW_BF16, .rank = 2, .shape = {4, 8}, .stride = {8, 1}};
    dw__operation_call call = {.call = {.op = DW_OP_SOFTMAX,
                                        .attr_count = 1,
                                        .attrs = &axis,
                                        .input_count = 1,
                                        .output_count = 1,
                                        .inputs = {x},
                                        .outputs = {x}}};
    dw__gpu_target hopper, old = {.name = "sm_80", .capability = 80};
    assert_int_equal(dw__gpu_target_named("sm_90a", &hopper), DW_OK);
    assert_null(dw__kernel_for(&call, &hopper, NULL));
    assert_int_equal(dw__kernel_fail_none(&call, &hopper), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "no kernel for sm_90a supports this call of softmax; "
                                            "softmax: expected the last axis"));
    assert_int_equal(dw__softmax.supports(&dw__softmax, &call, &hopper), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "expected the last axis"));
    const dw_attr last = {.key = DW_ATTR_KEY_AXIS, .integer = 1};
    call.call.attrs = &last;
    assert_int_equal(dw__softmax.supports(&dw__softmax, &call, &hopper), DW_OK);
    assert_int_equal(dw__softmax.supports(&dw__softmax, &call, &old), DW_TYPE);
    call.call.inputs[0].stride[1] = 2;
    assert_int_equal(dw__softmax.supports(&dw__softmax, &call, &hopper), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "contiguous rows"));
    call.call.op = DW_OP_ROPE;
    assert_int_equal(dw__kernel_fail_none(&call, &hopper), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "there is no kernel of rope for sm_90a"));
}

/* ---- first use ------------------------------------------------------------------------------------ */

/* Makes a call that the aligned variant for a warp computes. */
static void prepare_first(const dw__variant **variant) {
    static const dw_attr axis = {.key = DW_ATTR_KEY_AXIS, .integer = 1};
    const dw__tensor x = {.dtype = DW_BF16, .rank = 2, .shape = {4, 256}, .stride = {256, 1}};
    const dw__operation_call call = {.call = {.op = DW_OP_SOFTMAX,
                                              .attr_count = 1,
                                              .attrs = &axis,
                                              .input_count = 1,
                                              .output_count = 1,
                                              .inputs = {x},
                                              .outputs = {x}}};
    device = device_named("emulator:sm_90a");
    REQUIRE(device->context(&context) == DW_OK);
    REQUIRE(dw__softmax.prepare(&dw__softmax, &call, context, variant) == DW_OK);
}

static void keep_right(void) {
    const dw__variant *variant;
    const dw__jit_variant v = variant_of(&rows[1]);
    carry_variant(&v);
    prepare_first(&variant);
    REQUIRE(!variant->disabled && lines == 0);
}

/* Without the exchange between lanes, each thread has its own sum. */
static void keep_wrong(void) {
    const dw__variant *variant;
    const dw__jit_variant v = variant_of(&rows[1]);
    char *text;
    size_t bytes;
    REQUIRE(read_ptx(&v, &text, &bytes));
    take_out(text, "shfl.sync.bfly");
    carry(name_of(&v), text);
    prepare_first(&variant);
    REQUIRE(variant->disabled && lines == 1);
    REQUIRE(strstr(variant->reason, "softmax.sm_90a.ALIGNED=1"));
    REQUIRE(strstr(variant->reason, "disagrees with the operation's definition"));
    REQUIRE(strstr(variant->reason, "of result 0 of softmax is"));
}

static void test_first_use(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_right);
    in_child(keep_wrong);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_use), /* before this process loads kernels */
        cmocka_unit_test(test_awkward_shapes),
        cmocka_unit_test(test_masks_and_large_logits),
        cmocka_unit_test(test_unsupported_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
