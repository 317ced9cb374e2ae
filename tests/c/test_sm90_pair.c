/* Two linear layers of the same x with an elementwise program behind them in one launch, on an emulated Hopper GPU with
 * the checker on: both products beside those of launches of their own, bit by bit, and beside sums in double; the
 * program's results bit by bit beside the elementwise kernel's. Kernels are compiled when they are first used. */
#include "emulated_call.h"
#include "hopper_product.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "run_time_compiler.h"
#include <math.h>

static const char gpu[] = "emulator:sm_90a";

enum { MOST_RESULTS = 2 };

/* y = x w^T + bias, or x w if w is turned, twice; the program's input `replaced` is the first y. */
typedef struct problem {
    const char *body;
    int results, replaced;
    int m, n, k;
    bool turned, bias, f16;
    unsigned dropped; /* a bit for each y that nobody reads */
    int sms;
} problem;

typedef struct run {
    const problem *problem;
    const dw_device *device;
    dw__context context;
    matrix x, w[2], bias[2], y[2], expected_y[2], results[MOST_RESULTS], expected[MOST_RESULTS];
    dw_attr body;
} run;

static dw__tensor tensor_of(const matrix *m) {
    const dw_matrix view = matrix_of(m);
    return (dw__tensor){.data = view.data,
                        .dtype = m->type == MATRIX_F16 ? DW_F16 : DW_BF16,
                        .rank = 2,
                        .shape = {m->rows, m->columns},
                        .stride = {view.stride, 1}};
}

static void place_empty(matrix *m, const run *r, matrix_type type) {
    place(m, r->device, r->problem->m, r->problem->n, type);
    send(m, r->device);
}

static void open_run(const problem *p, run *r) {
    const matrix_type type = p->f16 ? MATRIX_F16 : MATRIX_BF16;
    const dw__context *context;
    uint64_t state = (uint64_t)(p->m * 31 + p->n * 7 + p->k);
    *r = (run){.problem = p,
               .device = device_named(gpu),
               .body = dw_attr_string(DW_ATTR_KEY_BODY, p->body)};
    assert_int_equal(r->device->context(&context), DW_OK);
    r->context = *context;
    r->context.sm_count = p->sms;
    place_random(&r->x, r->device, p->m, p->k, type, &state, false);
    for (int i = 0; i < 2; i++) {
        place_random(&r->w[i], r->device, p->turned ? p->k : p->n, p->turned ? p->n : p->k, type,
                     &state, false);
        place_random(&r->bias[i], r->device, 1, p->n, type, &state, false);
        place_empty(&r->y[i], r, type);
        place_empty(&r->expected_y[i], r, type);
    }
    for (int o = 0; o < p->results; o++) {
        place_empty(&r->results[o], r, type);
        place_empty(&r->expected[o], r, type);
    }
}

static void close_run(run *r) {
    take_away(&r->x, r->device);
    for (int i = 0; i < 2; i++) {
        matrix *const own[] = {&r->w[i], &r->bias[i], &r->y[i], &r->expected_y[i]};
        for (size_t j = 0; j < DW_COUNT(own); j++) take_away(own[j], r->device);
    }
    for (int o = 0; o < r->problem->results; o++) {
        take_away(&r->results[o], r->device);
        take_away(&r->expected[o], r->device);
    }
}

static dw__call program_of(const run *r, const matrix *y, const matrix *results) {
    const problem *p = r->problem;
    dw__call c = {.op = DW_OP_FUSED,
                  .attr_count = 1,
                  .attrs = &r->body,
                  .input_count = 2,
                  .output_count = (uint32_t)p->results};
    for (int i = 0; i < 2; i++) c.inputs[i] = tensor_of(&y[i != p->replaced]);
    for (int o = 0; o < p->results; o++) c.outputs[o] = tensor_of(&results[o]);
    return c;
}

static dw__tensor bias_of(const run *r, int i) {
    dw__tensor bias = {.rank = -1};
    if (!r->problem->bias) return bias;
    bias = tensor_of(&r->bias[i]);
    bias.rank = 1;
    bias.shape[0] = r->problem->n;
    bias.stride[0] = 1;
    return bias;
}

static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};

/* Both layers: their program is still to be attached. */
static dw__call pair_of(const run *r) {
    const problem *p = r->problem;
    dw__call c = {.op = DW_OP_LINEAR,
                  .attr_count = p->turned,
                  .attrs = &plain,
                  .input_count = 5,
                  .output_count = 2,
                  .paired = true,
                  .replaced = p->replaced,
                  .replaced_half = 1 - p->replaced,
                  .inputs = {tensor_of(&r->x), tensor_of(&r->w[0]), bias_of(r, 0),
                             tensor_of(&r->w[1]), bias_of(r, 1)},
                  .outputs = {tensor_of(&r->y[0]), tensor_of(&r->y[1])}};
    for (int i = 0; i < 2; i++)
        if (p->dropped >> i & 1) c.outputs[i].data = NULL;
    return c;
}

/* One of them. */
static dw__call layer_of(const run *r, int i) {
    return (dw__call){.op = DW_OP_LINEAR,
                      .attr_count = r->problem->turned,
                      .attrs = &plain,
                      .input_count = 3,
                      .output_count = 1,
                      .inputs = {tensor_of(&r->x), tensor_of(&r->w[i]), bias_of(r, i)},
                      .outputs = {tensor_of(&r->expected_y[i])}};
}

static void enqueue(const run *r, const dw__kernel *kernel, const dw__operation_call *call) {
    const dw__variant *variant;
    if (kernel->supports(kernel, call, NULL) != DW_OK ||
        kernel->prepare(kernel, call, &r->context, &variant) != DW_OK ||
        dw__variant_status(variant) != DW_OK ||
        kernel->enqueue(call, &r->context, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
}

/* 2^-23 of the magnitudes for each operation of the sum, even if the accumulator is truncated, and D's rounding. */
static void check_element(const run *r, int i, int row, int column) {
    const problem *p = r->problem;
    const double rounding = p->f16 ? 0x1p-11 : 0x1p-8;
    double sum = p->bias ? get(&r->bias[i], 0, column) : 0.0, size = fabs(sum);
    for (int at = 0; at < p->k; at++) {
        const double term = get(&r->x, row, at) *
                            (p->turned ? get(&r->w[i], at, column) : get(&r->w[i], column, at));
        sum += term, size += fabs(term);
    }
    const double error = (p->k + 2) * 0x1p-23 * size,
                 bound = error + (0x1p-23 + rounding) * (fabs(sum) + error) + 0x1p-25,
                 found = get(&r->expected_y[i], row, column);
    if (!(fabs(found - sum) <= bound))
        fail_msg("row %d, column %d of product %d is %.9g, not %.9g within %.3g", row, column, i,
                 found, sum, bound);
}

static void expect_same(const run *r, const matrix *found, const matrix *right) {
    fetch(found, r->device);
    fetch(right, r->device);
    for (int row = 0; row < found->rows; row++) {
        const size_t at = (size_t)row * found->pitch;
        expect_untouched(found, row);
        assert_memory_equal((char *)found->host + at, (char *)right->host + at, row_bytes(found));
    }
}

static void expect_right(const problem *p) {
    run r;
    open_run(p, &r);
    const dw__call program = program_of(&r, r.y, r.results);
    dw__operation_call call = {.call = pair_of(&r)};
    call.call.epilogue = &program;
    enqueue(&r, &dw__sm90_linear_pair, &call);
    for (int i = 0; i < 2; i++) {
        call.call = layer_of(&r, i);
        enqueue_product(&r.context, &call);
    }
    call.call = program_of(&r, r.expected_y, r.expected);
    enqueue(&r, &dw__gpu_elementwise, &call);
    for (int i = 0; i < 2; i++) {
        fetch(&r.expected_y[i], r.device);
        for (int row = 0; row < p->m; row++)
            for (int column = 0; column < p->n; column++) check_element(&r, i, row, column);
        if (p->dropped >> i & 1) {
            fetch(&r.y[i], r.device);
            for (int row = 0; row < p->m; row++)
                for (int column = 0; column < p->n; column++)
                    assert_true(isnan(get(&r.y[i], row, column)));
        } else
            expect_same(&r, &r.y[i], &r.expected_y[i]);
    }
    for (int o = 0; o < p->results; o++) expect_same(&r, &r.results[o], &r.expected[o]);
    close_run(&r);
}

#define SWIGLU "t0=swiglu(i0,i1);out(t0)"
#define TWO_RESULTS "t0=gelu_tanh(i1);t1=mul(t0,i0);out(t1,t0)"

/* Tiles of 256 and of 192 columns, several for a block; rows of which the last tile has less than half, and columns that
 * end within a strip; more and fewer steps than strips, and fewer than stages. */
static const problem problems[] = {
    {SWIGLU, 1, 0, .m = 300, .n = 200, .k = 1031, .bias = true, .sms = 2},
    {SWIGLU, 1, 1, .m = 180, .n = 40, .k = 900, .f16 = true, .dropped = 3, .sms = 1},
    {TWO_RESULTS, 2, 0, .m = 260, .n = 296, .k = 130, .turned = true, .dropped = 1, .sms = 2},
    {TWO_RESULTS, 2, 1, .m = 67, .n = 72, .k = 64, .turned = true, .bias = true, .f16 = true,
     .dropped = 2, .sms = 1},
    {SWIGLU, 1, 0, .m = 450, .n = 520, .k = 200, .sms = 3},
};

static void pairs_are_right(void **state) {
    (void)state;
    for (size_t i = 0; i < DW_COUNT(problems); i++) expect_right(&problems[i]);
}

static dw_status supports(const dw__call *pair, const dw__call *program) {
    dw__operation_call call = {.call = *pair};
    call.call.epilogue = program;
    return dw__sm90_linear_pair.supports(&dw__sm90_linear_pair, &call, NULL);
}

static void other_pairs_are_refused(void **state) {
    static const problem p = {SWIGLU, 1, 0, .m = 40, .n = 48, .k = 64, .bias = true, .sms = 1};
    static const dw_attr turned = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    run r;
    (void)state;
    open_run(&p, &r);
    const dw__call right = pair_of(&r), program = program_of(&r, r.y, r.results);
    dw__call pair = right, other = program;
    assert_int_equal(supports(&right, &program), DW_OK);
    pair.paired = false;
    assert_int_equal(supports(&pair, &program), DW_UNSUPPORTED);
    pair = right;
    pair.inputs[4].rank = -1; /* only one has a bias */
    assert_int_equal(supports(&pair, &program), DW_UNSUPPORTED);
    pair = right;
    pair.inputs[3].shape[1] = 56; /* another k */
    assert_int_equal(supports(&pair, &program), DW_UNSUPPORTED);
    pair = right;
    pair.inputs[3].data = (char *)pair.inputs[3].data + 2;
    assert_true(supports(&pair, &program) != DW_OK);
    pair = right;
    pair.inputs[3].stride[0] = 1; /* only one is turned */
    pair.inputs[3].stride[1] = 48;
    assert_int_equal(supports(&pair, &program), DW_UNSUPPORTED);
    pair = right;
    pair.attr_count = 1;
    pair.attrs = &turned; /* matrices of k rows have another k */
    assert_int_equal(supports(&pair, &program), DW_UNSUPPORTED);
    other.inputs[other.input_count++] = other.inputs[0];
    assert_int_equal(supports(&right, &other), DW_UNSUPPORTED);
    other = program;
    other.outputs[0].dtype = DW_F32;
    assert_int_equal(supports(&right, &other), DW_UNSUPPORTED);
    other = program;
    other.outputs[0].stride[0] += 4;
    assert_int_equal(supports(&right, &other), DW_UNSUPPORTED);
    other = program;
    other.summed = 1;
    assert_int_equal(supports(&right, &other), DW_UNSUPPORTED);
    /* the kernel of one product and its program */
    dw__operation_call call = {.call = right};
    call.call.epilogue = &program;
    assert_int_equal(dw__sm90_linear_program.supports(&dw__sm90_linear_program, &call, NULL),
                     DW_UNSUPPORTED);
    close_run(&r);
}

static void check_first_use(void) {
    expect_right(&problems[0]);
    expect_right(&problems[3]);
    REQUIRE(lines == 0);
}
static void the_first_use_check_passes(void **state) {
    (void)state;
    in_child(check_first_use);
}

int main(void) {
    /* Children come first, because a process keeps variants that were loaded without a check. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_use_check_passes),
        cmocka_unit_test(pairs_are_right),
        cmocka_unit_test(other_pairs_are_refused),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
