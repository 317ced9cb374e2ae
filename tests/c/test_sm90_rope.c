/* Products whose result is rotated in the same launch, on an emulated Hopper GPU with the checker on: the bits of the rope
 * kernel on the same product. Kernels are compiled when they are first used. */
#include "emulated_call.h"
#include "hopper_product.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "run_time_compiler.h"
#include <math.h>

static const char gpu[] = "emulator:sm_90a";

/* q = x w^T + bias of `batch` sequences of `tokens`, rotated and stored as [batch, heads, tokens, columns]. */
typedef struct problem {
    int batch, tokens, heads, columns, turned, k;
    bool interleaved, f16, bias;
    bool keeps_q;      /* stores q itself, too */
    bool each_batch;   /* a batch has tables of its own */
    bool tokens_first; /* x and y are [batch, tokens, heads, columns] */
    int sms;
} problem;

typedef struct run {
    const problem *problem;
    const dw_device *device;
    dw__context context;
    matrix x, w, bias, q, cosine, sine, y, expected;
    dw_attr attrs[2];
} run;

static int rows_of(const problem *p) { return p->batch * p->tokens; }

static dw__tensor tensor_of(const matrix *m) {
    const dw_matrix view = matrix_of(m);
    return (dw__tensor){.data = view.data,
                        .dtype = m->type == MATRIX_F16 ? DW_F16 : DW_BF16,
                        .rank = 2,
                        .shape = {m->rows, m->columns},
                        .stride = {view.stride, 1}};
}

static void open_run(const problem *p, run *r) {
    const matrix_type type = p->f16 ? MATRIX_F16 : MATRIX_BF16;
    const int m = rows_of(p), n = p->heads * p->columns,
              tables = (p->each_batch ? p->batch : 1) * p->tokens;
    const dw__context *context;
    uint64_t state = (uint64_t)(m * 31 + n * 7 + p->k);
    *r = (run){.problem = p,
               .device = device_named(gpu),
               .attrs = {dw_attr_int(DW_ATTR_KEY_INTERLEAVED, p->interleaved),
                         dw_attr_int(DW_ATTR_KEY_TRANSPOSED, 0)}};
    assert_int_equal(r->device->context(&context), DW_OK);
    r->context = *context;
    r->context.sm_count = p->sms;
    place_random(&r->x, r->device, m, p->k, type, &state, false);
    place_random(&r->w, r->device, n, p->k, type, &state, false);
    place_random(&r->bias, r->device, 1, n, type, &state, false);
    place_random(&r->cosine, r->device, tables, p->turned, type, &state, false);
    place_random(&r->sine, r->device, tables, p->turned, type, &state, false);
    place(&r->q, r->device, m, n, type);
    place(&r->y, r->device, m * p->heads, p->columns, type);
    place(&r->expected, r->device, m * p->heads, p->columns, type);
    send(&r->q, r->device);
    send(&r->y, r->device);
    send(&r->expected, r->device);
}

static void close_run(run *r) {
    matrix *const own[] = {&r->x,      &r->w,    &r->bias, &r->q,
                           &r->cosine, &r->sine, &r->y,    &r->expected};
    for (size_t i = 0; i < DW_COUNT(own); i++) take_away(own[i], r->device);
}

static dw__call product_of(const run *r) {
    dw__tensor bias = {.rank = -1};
    if (r->problem->bias) {
        bias = tensor_of(&r->bias);
        bias.rank = 1;
        bias.shape[0] = r->bias.columns;
        bias.stride[0] = 1;
    }
    return (dw__call){.op = DW_OP_LINEAR,
                      .input_count = 3,
                      .output_count = 1,
                      .inputs = {tensor_of(&r->x), tensor_of(&r->w), bias},
                      .outputs = {tensor_of(&r->q)}};
}

static void exchange(int64_t *a, int64_t *b) {
    const int64_t first = *a;
    *a = *b;
    *b = first;
}

/* Exchanges the axes of heads and tokens. */
static void put_tokens_first(dw__tensor *t) {
    exchange(&t->shape[1], &t->shape[2]);
    exchange(&t->stride[1], &t->stride[2]);
}

static dw__call rope_of(const run *r, const matrix *result) {
    const problem *p = r->problem;
    const dw__tensor q = tensor_of(&r->q), table = tensor_of(&r->cosine), y = tensor_of(result);
    const int64_t row = q.stride[0], line = table.stride[0], each = y.stride[0];
    dw__call c = {
        .op = DW_OP_ROPE,
        .attr_count = 2,
        .attrs = r->attrs,
        .input_count = 3,
        .output_count = 1,
        .inputs = {{.rank = 4,
                    .shape = {p->batch, p->heads, p->tokens, p->columns},
                    .stride = {p->tokens * row, p->columns, row, 1}},
                   {.rank = 4,
                    .shape = {p->each_batch ? p->batch : 1, 1, p->tokens, p->turned},
                    .stride = {p->tokens * line, p->tokens * line, line, 1}}},
        .outputs = {{.rank = 4,
                     .shape = {p->batch, p->heads, p->tokens, p->columns},
                     .stride = {p->heads * p->tokens * each, p->tokens * each, each, 1}}}};
    if (p->tokens_first) {
        put_tokens_first(&c.inputs[0]);
        put_tokens_first(&c.inputs[1]);
        c.outputs[0].shape[1] = p->tokens;
        c.outputs[0].shape[2] = p->heads;
        c.outputs[0].stride[1] = p->heads * each;
        c.outputs[0].stride[2] = each;
    }
    c.inputs[2] = c.inputs[1];
    c.inputs[0].dtype = c.inputs[1].dtype = c.inputs[2].dtype = c.outputs[0].dtype = q.dtype;
    c.inputs[0].data = q.data;
    c.inputs[1].data = table.data;
    c.inputs[2].data = tensor_of(&r->sine).data;
    c.outputs[0].data = y.data;
    return c;
}

static void enqueue(const run *r, const dw__kernel *kernel, const dw__operation_call *call) {
    const dw__variant *variant;
    if (kernel->supports(kernel, call, NULL) != DW_OK ||
        kernel->prepare(kernel, call, &r->context, &variant) != DW_OK ||
        dw__variant_status(variant) != DW_OK ||
        kernel->enqueue(call, &r->context, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
}

/* Each product of BF16 or F16 elements is exact in F32, whose rounding adds 2^-24 to that of the result. */
static void check_row(const run *r, int batch, int token, int head) {
    const problem *p = r->problem;
    const int table = (p->each_batch ? batch * p->tokens : 0) + token, half = p->turned / 2,
              line = p->tokens_first ? (batch * p->tokens + token) * p->heads + head
                                     : (batch * p->heads + head) * p->tokens + token;
    for (int i = 0; i < p->columns; i++) {
        const bool first = p->interleaved ? i % 2 == 0 : i < half;
        const int other = p->interleaved ? i ^ 1
                          : first        ? i + half
                                         : i - half,
                  row = batch * p->tokens + token, column = head * p->columns;
        const double x = get(&r->q, row, column + i), found = get(&r->expected, line, i);
        double right = x, size = fabs(x);
        if (i < p->turned) {
            const double along = x * get(&r->cosine, table, i),
                         across = get(&r->q, row, column + other) * get(&r->sine, table, i);
            right = first ? along - across : along + across;
            size = fabs(along) + fabs(across);
        }
        const double bound = (p->f16 ? 0x1p-11 : 0x1p-8) * fabs(right) + 0x1p-22 * size + 0x1p-25;
        if (!(fabs(found - right) <= bound))
            fail_msg("batch %d, token %d, head %d, column %d is %.9g, not %.9g within %.3g", batch,
                     token, head, i, found, right, bound);
    }
}

static void check(run *r) {
    const problem *p = r->problem;
    fetch(&r->q, r->device);
    fetch(&r->y, r->device);
    fetch(&r->expected, r->device);
    for (int row = 0; row < r->y.rows; row++) {
        const size_t at = (size_t)row * r->y.pitch;
        expect_untouched(&r->y, row);
        assert_memory_equal((char *)r->y.host + at, (char *)r->expected.host + at,
                            row_bytes(&r->y));
    }
    for (int batch = 0; batch < p->batch; batch++)
        for (int token = 0; token < p->tokens; token++)
            for (int head = 0; head < p->heads; head++) check_row(r, batch, token, head);
}

/* Runs both as one launch; then, where q was not wanted, the product alone; then rope alone on the product. */
static void expect_right(const problem *p) {
    run r;
    open_run(p, &r);
    const dw__call rope = rope_of(&r, &r.y);
    dw__operation_call call = {.call = product_of(&r)};
    call.call.epilogue = &rope;
    call.call.replaced_half = -1;
    if (!p->keeps_q) call.call.outputs[0].data = NULL;
    enqueue(&r, &dw__sm90_linear_program, &call);
    if (!p->keeps_q) {
        call.call = product_of(&r);
        enqueue_product(&r.context, &call);
    }
    call.call = rope_of(&r, &r.expected);
    enqueue(&r, &dw__gpu_rope, &call);
    check(&r);
    close_run(&r);
}

static const problem problems[] = {
    {.batch = 2, .tokens = 77, .heads = 3, .columns = 64, .turned = 64, .k = 200, .sms = 1},
    {.batch = 3,
     .tokens = 45,
     .heads = 5,
     .columns = 128,
     .turned = 64,
     .k = 70,
     .bias = true,
     .f16 = true,
     .each_batch = true,
     .keeps_q = true,
     .sms = 2},
    {.batch = 1, .tokens = 300, .heads = 1, .columns = 32, .turned = 32, .k = 330, .sms = 1},
    {.batch = 2, .tokens = 70, .heads = 4, .columns = 96, .turned = 96, .k = 64, .sms = 3},
    {.batch = 2,
     .tokens = 67,
     .heads = 13,
     .columns = 24,
     .turned = 8,
     .k = 136,
     .interleaved = true,
     .sms = 2},
    {.batch = 2,
     .tokens = 131,
     .heads = 3,
     .columns = 64,
     .turned = 64,
     .k = 96,
     .interleaved = true,
     .f16 = true,
     .tokens_first = true,
     .keeps_q = true,
     .sms = 1},
};

static void products_are_rotated(void **state) {
    (void)state;
    for (size_t i = 0; i < DW_COUNT(problems); i++) expect_right(&problems[i]);
}

static dw_status supports(const run *r, const dw__call *rope) {
    dw__operation_call call = {.call = product_of(r)};
    call.call.epilogue = rope;
    call.call.replaced_half = -1;
    return dw__sm90_linear_program.supports(&dw__sm90_linear_program, &call, NULL);
}

static void other_rotations_are_refused(void **state) {
    static const problem
        right =
            {.batch = 2, .tokens = 20, .heads = 2, .columns = 64, .turned = 64, .k = 64, .sms = 1},
        others[] = {
            /* heads that no tile has as a whole */
            {.batch = 1, .tokens = 20, .heads = 2, .columns = 80, .turned = 80},
            /* pairs that lie in one vector of 16 bytes, or in three */
            {.batch = 1, .tokens = 20, .heads = 2, .columns = 64, .turned = 8},
            {.batch = 1, .tokens = 20, .heads = 2, .columns = 64, .turned = 24},
            {.batch = 1, .tokens = 20, .heads = 2, .columns = 32, .turned = 4, .interleaved = true},
            /* rows that are no whole vectors */
            {.batch = 1, .tokens = 20, .heads = 2, .columns = 36, .turned = 32},
        };
    run r;
    (void)state;
    for (size_t i = 0; i < DW_COUNT(others); i++) {
        problem p = others[i];
        p.k = 64;
        open_run(&p, &r);
        const dw__call rope = rope_of(&r, &r.y);
        if (supports(&r, &rope) != DW_UNSUPPORTED) fail_msg("problem %zu is not refused", i);
        close_run(&r);
    }
    open_run(&right, &r);
    dw__call rope = rope_of(&r, &r.y);
    assert_int_equal(supports(&r, &rope), DW_OK);
    r.attrs[1] = dw_attr_int(DW_ATTR_KEY_TRANSPOSED, 1);
    assert_int_equal(supports(&r, &rope), DW_UNSUPPORTED);
    r.attrs[1] = dw_attr_int(DW_ATTR_KEY_TRANSPOSED, 0);
    exchange(&rope.inputs[0].stride[0], &rope.inputs[0].stride[2]); /* other tokens */
    assert_int_equal(supports(&r, &rope), DW_UNSUPPORTED);
    rope = rope_of(&r, &r.y);
    rope.inputs[2].data = (char *)rope.inputs[2].data + 2;
    assert_int_equal(supports(&r, &rope), DW_UNSUPPORTED);
    rope = rope_of(&r, &r.y);
    rope.outputs[0].stride[1] += 4;
    assert_int_equal(supports(&r, &rope), DW_UNSUPPORTED);
    rope = rope_of(&r, &r.y);
    rope.inputs[1].shape[1] = 2; /* heads have tables of their own */
    rope.inputs[1].stride[1] = 8;
    assert_int_equal(supports(&r, &rope), DW_UNSUPPORTED);
    close_run(&r);
}

static void check_first_use(void) {
    expect_right(&problems[0]);
    expect_right(&problems[4]);
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
        cmocka_unit_test(products_are_rotated),
        cmocka_unit_test(other_rotations_are_refused),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
