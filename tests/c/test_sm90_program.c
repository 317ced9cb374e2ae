/* Products with an elementwise program behind them, on an emulated Hopper GPU with the checker on: the product beside
 * sums in double, the program's results bit by bit beside the elementwise kernel's on the same product, and sums of
 * results' rows beside sums in double. Kernels are compiled when they are first used. */
#include "emulated_call.h"
#include "hopper_product.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "run_time_compiler.h"
#include <math.h>

static const char gpu[] = "emulator:sm_90a";

enum { MOST_TENSORS = 4, MOST_GROUPS = 4 };

/* y = x w^T + bias, or x w if w is turned; the program's input `replaced` is y, or with `halves` its first half, and the
 * input before it the second. */
typedef struct problem {
    const char *body;
    int inputs, results, replaced;
    int m, n, k;
    int groups; /* 0: one product */
    bool turned, bias, f16, drops_y, halves;
    bool weighs;      /* the last input is a vector of an element for each row */
    bool draws;       /* the last input is the key of random numbers */
    unsigned summed;  /* a bit for each result whose rows are summed */
    unsigned dropped; /* those of them that nobody reads */
    int sms;
} problem;

typedef struct run {
    const problem *problem;
    const dw_device *device;
    dw__context context;
    matrix x, w, bias, y, inputs[MOST_TENSORS], results[MOST_TENSORS], expected[MOST_TENSORS];
    matrix sums[MOST_TENSORS];
    int offsets[MOST_GROUPS + 1];
    void *device_offsets, *device_key, *workspace;
    size_t workspace_bytes;
    dw_attr body;
} run;

static const int64_t random_key[2] = {0x123456789abcdef, 77};

static dw__tensor tensor_of(const matrix *m) {
    const dw_matrix view = matrix_of(m);
    return (dw__tensor){.data = view.data,
                        .dtype = m->type == MATRIX_F16 ? DW_F16 : DW_BF16,
                        .rank = 2,
                        .shape = {m->rows, m->columns},
                        .stride = {view.stride, 1}};
}

/* Columns of the product. */
static int wide(const problem *p) { return p->halves ? 2 * p->n : p->n; }

/* The matrices of all groups, one below the other. */
static dw__tensor groups_of(const matrix *m, int groups) {
    dw__tensor t = tensor_of(m);
    const int64_t rows = m->rows / groups;
    return (dw__tensor){.data = t.data,
                        .dtype = t.dtype,
                        .rank = 3,
                        .shape = {groups, rows, t.shape[1]},
                        .stride = {rows * t.stride[0], t.stride[0], 1}};
}

static void open_run(const problem *p, run *r) {
    const matrix_type type = p->f16 ? MATRIX_F16 : MATRIX_BF16;
    const int matrices = p->groups ? p->groups : 1;
    const dw__context *context;
    uint64_t state = (uint64_t)(p->m * 31 + p->n * 7 + p->k);
    *r = (run){.problem = p,
               .device = device_named(gpu),
               .body = dw_attr_string(DW_ATTR_KEY_BODY, p->body)};
    assert_int_equal(r->device->context(&context), DW_OK);
    r->context = *context;
    r->context.sm_count = p->sms;
    place_random(&r->x, r->device, p->m, p->k, type, &state, false);
    place_random(&r->w, r->device, matrices * (p->turned ? p->k : wide(p)),
                 p->turned ? wide(p) : p->k, type, &state, false);
    place_random(&r->bias, r->device, 1, wide(p), type, &state, false);
    place(&r->y, r->device, p->m, wide(p), type);
    send(&r->y, r->device);
    for (int i = 0; i < p->inputs; i++)
        place_random(&r->inputs[i], r->device, p->m, p->weighs && i == p->inputs - 1 ? 1 : p->n,
                     type, &state, false);
    for (int o = 0; o < p->results; o++) {
        place(&r->results[o], r->device, p->m, p->n, type);
        place(&r->expected[o], r->device, p->m, p->n, type);
        send(&r->results[o], r->device);
        send(&r->expected[o], r->device);
        place(&r->sums[o], r->device, 1, p->n, type);
        send(&r->sums[o], r->device);
    }
    /* Groups of uneven lengths, the second without rows; the last rows belong to none. */
    for (int g = 1; g <= p->groups; g++)
        r->offsets[g] = g == p->groups ? p->m - 5 : g == 1 ? 70 : 70 + (g - 2) * 150;
    const size_t bytes = sizeof r->offsets;
    assert_int_equal(dw_device_allocate(r->device, bytes, &r->device_offsets), DW_OK);
    assert_int_equal(r->device->copy_in(r->device_offsets, r->offsets, bytes, NULL), DW_OK);
    assert_int_equal(dw_device_allocate(r->device, sizeof random_key, &r->device_key), DW_OK);
    assert_int_equal(r->device->copy_in(r->device_key, random_key, sizeof random_key, NULL), DW_OK);
}

static void close_run(run *r) {
    matrix *const own[] = {&r->x, &r->w, &r->bias, &r->y};
    for (size_t i = 0; i < DW_COUNT(own); i++) take_away(own[i], r->device);
    for (int i = 0; i < r->problem->inputs; i++) take_away(&r->inputs[i], r->device);
    for (int o = 0; o < r->problem->results; o++) {
        take_away(&r->results[o], r->device);
        take_away(&r->expected[o], r->device);
        take_away(&r->sums[o], r->device);
    }
    dw_device_release(r->device, r->device_offsets, sizeof r->offsets);
    dw_device_release(r->device, r->workspace, r->workspace_bytes);
    dw_device_release(r->device, r->device_key, sizeof random_key);
}

static dw__call program_of(const run *r, const matrix *results) {
    const problem *p = r->problem;
    dw__call c = {.op = DW_OP_FUSED,
                  .attr_count = 1,
                  .attrs = &r->body,
                  .input_count = (uint32_t)p->inputs,
                  .output_count = (uint32_t)p->results};
    for (int i = 0; i < p->inputs; i++)
        c.inputs[i] = tensor_of(i == p->replaced ? &r->y : &r->inputs[i]);
    if (p->halves) {
        dw__tensor *first = &c.inputs[p->replaced], *second = &c.inputs[p->replaced - 1];
        first->shape[1] = p->n;
        *second = *first;
        second->data = (char *)first->data + 2 * p->n;
    }
    if (p->draws)
        c.inputs[p->inputs - 1] = (dw__tensor){
            .data = r->device_key, .dtype = DW_I64, .rank = 1, .shape = {2}, .stride = {1}};
    for (int o = 0; o < p->results; o++) c.outputs[o] = tensor_of(&results[o]);
    return c;
}

/* Adds the sums to the outputs of the program. */
static void ask_for_sums(const run *r, dw__call *program) {
    const problem *p = r->problem;
    program->summed = p->summed;
    for (int o = 0; o < p->results; o++) {
        if (!(p->summed >> o & 1)) continue;
        dw__tensor *sums = &program->outputs[program->output_count++];
        *sums = tensor_of(&r->sums[o]);
        sums->rank = 1;
        sums->shape[0] = p->n;
        sums->stride[0] = 1;
        if (p->dropped >> o & 1) sums->data = NULL;
    }
}

static dw__call product_of(const run *r) {
    static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    const problem *p = r->problem;
    const dw__tensor offsets = {.data = r->device_offsets,
                                .dtype = DW_I32,
                                .rank = 1,
                                .shape = {p->groups + 1},
                                .stride = {1}};
    dw__tensor bias = {.rank = -1};
    if (p->bias) {
        bias = tensor_of(&r->bias);
        bias.rank = 1;
        bias.shape[0] = wide(p);
        bias.stride[0] = 1;
    }
    dw__call c = {.op = p->groups ? DW_OP_SEGMENT_LINEAR : DW_OP_LINEAR,
                  .attr_count = p->turned,
                  .attrs = &plain,
                  .input_count = 3,
                  .output_count = 1,
                  .inputs = {tensor_of(&r->x), tensor_of(&r->w), bias},
                  .outputs = {tensor_of(&r->y)}};
    if (!p->groups) return c;
    c.inputs[1] = groups_of(&r->w, p->groups);
    c.inputs[2] = offsets;
    return c;
}

/* Gives the call a workspace of NaNs. */
static void place_workspace(run *r, const dw__kernel *kernel, dw__operation_call *call) {
    assert_int_equal(kernel->workspace_bytes(kernel, call, &r->context, &r->workspace_bytes),
                     DW_OK);
    if (r->workspace_bytes == 0) return;
    char *nans = malloc(r->workspace_bytes);
    assert_non_null(nans);
    memset(nans, 0xFF, r->workspace_bytes);
    assert_int_equal(dw_device_allocate(r->device, r->workspace_bytes, &r->workspace), DW_OK);
    assert_int_equal(r->device->copy_in(r->workspace, nans, r->workspace_bytes, NULL), DW_OK);
    free(nans);
    call->workspace = r->workspace;
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
static void check_element(const run *r, int group, int row, int column) {
    const problem *p = r->problem;
    const double rounding = p->f16 ? 0x1p-11 : 0x1p-8;
    double sum = p->bias ? get(&r->bias, 0, column) : 0.0, size = fabs(sum);
    for (int i = 0; i < p->k; i++) {
        const double term =
            get(&r->x, row, i) * (p->turned ? get(&r->w, group * p->k + i, column)
                                            : get(&r->w, group * wide(p) + column, i));
        sum += term, size += fabs(term);
    }
    const double error = (p->k + 2) * 0x1p-23 * size,
                 bound = error + (0x1p-23 + rounding) * (fabs(sum) + error) + 0x1p-25,
                 found = get(&r->y, row, column);
    if (!(fabs(found - sum) <= bound))
        fail_msg("row %d, column %d of the product is %.9g, not %.9g within %.3g", row, column,
                 found, sum, bound);
}

/* A thread adds at most 32 rows of a tile, then 32 threads' sums meet, then every 16th tile's, and then 16 sums
 * pairwise: so many additions in F32 are on the way of an element, and the sum is rounded. */
static void check_sums(const run *r, int o) {
    const problem *p = r->problem;
    const int additions = 32 + 32 + (p->m + 127) / 128 / 16 + 1 + 4;
    const double rounding = p->f16 ? 0x1p-11 : 0x1p-8;
    fetch(&r->sums[o], r->device);
    expect_untouched(&r->sums[o], 0);
    for (int column = 0; column < p->n; column++) {
        double sum = 0.0, size = 0.0;
        for (int row = 0; row < p->m; row++) {
            sum += get(&r->results[o], row, column);
            size += fabs(get(&r->results[o], row, column));
        }
        const double error = additions * 0x1p-24 * size,
                     bound = error + rounding * (fabs(sum) + error) + 0x1p-25,
                     found = get(&r->sums[o], 0, column);
        if (p->dropped >> o & 1)
            assert_true(isnan(found));
        else if (!(fabs(found - sum) <= bound))
            fail_msg("the sum of column %d of result %d is %.9g, not %.9g within %.3g", column, o,
                     found, sum, bound);
    }
}

static int group_of(const run *r, int row) {
    int group = 0;
    while (group < r->problem->groups && row >= r->offsets[group + 1]) group++;
    return group;
}

static void check(run *r) {
    const problem *p = r->problem;
    const int rows = p->groups ? r->offsets[p->groups] : p->m;
    fetch(&r->y, r->device);
    for (int row = 0; row < p->m; row++) {
        expect_untouched(&r->y, row);
        for (int column = 0; column < wide(p); column++)
            if (row < rows)
                check_element(r, group_of(r, row), row, column);
            else
                assert_true(get(&r->y, row, column) == 0);
    }
    for (int o = 0; o < p->results; o++) {
        fetch(&r->results[o], r->device);
        fetch(&r->expected[o], r->device);
        for (int row = 0; row < p->m; row++) {
            const size_t at = (size_t)row * r->results[o].pitch;
            expect_untouched(&r->results[o], row);
            assert_memory_equal((char *)r->results[o].host + at, (char *)r->expected[o].host + at,
                                row_bytes(&r->results[o]));
        }
        if (p->summed >> o & 1) check_sums(r, o);
    }
}

/* Runs the product and its program as one launch; then, where D was not wanted, the product alone; then the program
 * alone on the product. */
static void expect_right(const problem *p) {
    run r;
    open_run(p, &r);
    const dw__kernel *kernel = p->groups ? &dw__sm90_segment_program : &dw__sm90_linear_program;
    dw__call program = program_of(&r, r.results);
    const dw__call alone = program_of(&r, r.expected);
    dw__operation_call call = {.call = product_of(&r)};
    ask_for_sums(&r, &program);
    call.call.epilogue = &program;
    call.call.replaced = p->replaced;
    call.call.replaced_half = p->halves ? p->replaced - 1 : -1;
    if (p->drops_y) call.call.outputs[0].data = NULL;
    place_workspace(&r, kernel, &call);
    enqueue(&r, kernel, &call);
    if (p->drops_y) {
        call.call = product_of(&r);
        if (p->groups)
            enqueue(&r, &dw__sm90_segment, &call);
        else
            enqueue_product(&r.context, &call);
    }
    call.call = alone;
    enqueue(&r, &dw__gpu_elementwise, &call);
    check(&r);
    close_run(&r);
}

static void expect_all_right(const problem *problems, size_t count) {
    for (size_t i = 0; i < count; i++) expect_right(&problems[i]);
}

#define GELU "t0=gelu_tanh(i0);out(t0)"
#define SWIGLU "t0=swiglu(i0,i1);out(t0)"
/* From the gradient of the product of silu(i1) and i2: the gradients of both, and the product. */
#define SWIGLU_BACKWARD                                                                            \
    "t0=silu(i1);t1=mul(i0,t0);t2=mul(i0,i2);t3=silu_backward(i1,t2);t4=mul(t0,i2);out(t3,t1,t4)"

/* The two halves of a product's columns, in the order of the program's inputs: the second, the first, others. */
#define HALVES "t0=swiglu(i1,i0);out(t0)"
#define HALVES_AND_OPERAND "t0=swiglu(i1,i0);t1=add(t0,i2);out(t1,t0)"

/* The same with a weight for each row, i3, and the terms of the weights' gradients. */
#define WEIGHED_BACKWARD                                                                           \
    "t0=mul(i0,i3);t1=silu(i1);t2=mul(t0,t1);t3=mul(t0,i2);t4=silu_backward(i1,t3);t5=mul(t1,i2);" \
    "t6=mul(t5,i3);t7=mul(i0,t5);out(t7,t4,t2,t6)"

static const problem dense[] = {
    {GELU, 1, 1, 0, .m = 300, .n = 331, .k = 200, .bias = true, .sms = 2},
    {GELU, 1, 1, 0, .m = 67, .n = 40, .k = 1100, .f16 = true, .drops_y = true, .sms = 1},
    {SWIGLU, 2, 1, 1, .m = 300, .n = 280, .k = 1031, .sms = 2},
    {SWIGLU_BACKWARD, 3, 3, 0, .m = 450, .n = 203, .k = 130, .turned = true, .sms = 1},
    {SWIGLU_BACKWARD, 3, 3, 0, .m = 129, .n = 520, .k = 64, .turned = true, .drops_y = true,
     .sms = 3},
    {WEIGHED_BACKWARD, 4, 4, 0, .m = 333, .n = 200, .k = 70, .weighs = true, .drops_y = true,
     .sms = 2},
    {"t0=mul(i0,i1);t1=add(t0,i2);t2=sub(t1,i3);out(t2)", 4, 1, 2, .m = 200, .n = 260, .k = 320,
     .f16 = true, .sms = 1},
};

static void programs_are_right(void **state) {
    (void)state;
    expect_all_right(dense, DW_COUNT(dense));
}

static const problem of_halves[] = {
    {HALVES, 2, 1, 1, .m = 300, .n = 200, .k = 331, .halves = true, .bias = true, .sms = 2},
    {HALVES, 2, 1, 1, .m = 100, .n = 40, .k = 900, .halves = true, .f16 = true, .sms = 1},
    {HALVES_AND_OPERAND, 3, 2, 1, .m = 260, .n = 296, .k = 130, .halves = true, .turned = true,
     .sms = 2},
    {HALVES, 2, 1, 1, .groups = 4, .m = 440, .n = 136, .k = 230, .halves = true, .drops_y = true,
     .sms = 2},
    {"t0=swiglu(i1,i0);t1=mul(t0,i2);out(t1)", 3, 1, 1, .groups = 4, .m = 440, .n = 72, .k = 1100,
     .halves = true, .weighs = true, .sms = 1},
    {HALVES_AND_OPERAND, 3, 2, 1, .groups = 4, .m = 440, .n = 264, .k = 70, .halves = true,
     .turned = true, .sms = 1},
};

static void programs_of_halves_are_right(void **state) {
    (void)state;
    expect_all_right(of_halves, DW_COUNT(of_halves));
}

static const problem of_groups[] = {
    {SWIGLU, 2, 1, 1, .groups = 4, .m = 440, .n = 136, .k = 700, .sms = 2},
    {SWIGLU_BACKWARD, 3, 3, 0, .groups = 4, .m = 440, .n = 331, .k = 140, .turned = true,
     .drops_y = true, .sms = 1},
};

static void programs_of_groups_are_right(void **state) {
    (void)state;
    expect_all_right(of_groups, DW_COUNT(of_groups));
}

#define GELU_BACKWARD "t0=gelu_tanh_backward(i1,i0);out(t0)"

/* Tiles of 256 columns, of 192, whose rows are a multiple of 3 units, and of both with halves; several tiles for a
 * block; rows and columns that end within a tile. */
static const problem with_sums[] = {
    {GELU_BACKWARD, 2, 1, 0, .m = 300, .n = 331, .k = 200, .turned = true, .drops_y = true,
     .summed = 1, .sms = 2},
    {GELU_BACKWARD, 2, 1, 0, .m = 67, .n = 250, .k = 64, .turned = true, .drops_y = true,
     .f16 = true, .summed = 1, .sms = 1},
    {SWIGLU_BACKWARD, 3, 3, 0, .m = 450, .n = 520, .k = 64, .turned = true, .drops_y = true,
     .summed = 7, .dropped = 2, .sms = 3},
    {SWIGLU_BACKWARD, 3, 3, 0, .m = 129, .n = 184, .k = 130, .turned = true, .summed = 4, .sms = 1},
    {HALVES_AND_OPERAND, 3, 2, 1, .m = 260, .n = 120, .k = 130, .halves = true, .summed = 3,
     .sms = 2},
    {HALVES, 2, 1, 1, .m = 140, .n = 96, .k = 70, .halves = true, .bias = true, .summed = 1,
     .sms = 1},
};

static void sums_of_results_are_right(void **state) {
    (void)state;
    expect_all_right(with_sums, DW_COUNT(with_sums));
}

/* The order of additions does not depend on the number of blocks that share the tiles. */
static void sums_have_the_same_bits_in_every_run(void **state) {
    problem p = with_sums[0];
    matrix *const first = calloc(1, sizeof *first);
    (void)state;
    assert_non_null(first);
    for (int trial = 0; trial < 3; trial++) {
        run r;
        p.sms = trial == 2 ? 6 : 2;
        open_run(&p, &r);
        dw__call program = program_of(&r, r.results);
        dw__operation_call call = {.call = product_of(&r)};
        ask_for_sums(&r, &program);
        call.call.epilogue = &program;
        call.call.replaced_half = -1;
        call.call.outputs[0].data = NULL;
        place_workspace(&r, &dw__sm90_linear_program, &call);
        enqueue(&r, &dw__sm90_linear_program, &call);
        fetch(&r.sums[0], r.device);
        if (trial == 0) {
            *first = r.sums[0];
            first->host = malloc(r.sums[0].bytes);
            assert_non_null(first->host);
            memcpy(first->host, r.sums[0].host, r.sums[0].bytes);
        }
        assert_memory_equal(r.sums[0].host, first->host, r.sums[0].bytes);
        close_run(&r);
    }
    free(first->host);
    free(first);
}

#define DROPOUT_AND_RESIDUAL "t0=dropout(i0,i2,c0.1,c3);t1=add(t0,i1);out(t1)"

/* Elements are dropped by their numbers in the tensor. */
static const problem that_draw[] = {
    {"t0=dropout(i0,i1,c0.3,c5);out(t0)", 2, 1, 0, .m = 300, .n = 280, .k = 200, .draws = true,
     .bias = true, .drops_y = true, .sms = 2},
    {DROPOUT_AND_RESIDUAL, 3, 1, 0, .m = 260, .n = 331, .k = 130, .draws = true, .f16 = true,
     .sms = 1},
    {"t0=gelu_tanh_backward(i1,i0);t1=dropout(t0,i2,c0.5,c1);t2=dropout(t1,i2,c0.25,c2);out(t2)", 3,
     1, 0, .m = 140, .n = 520, .k = 70, .draws = true, .turned = true, .sms = 2},
    {"t0=swiglu(i1,i0);t1=dropout(t0,i2,c0.5,c9);out(t1,t0)", 3, 2, 1, .groups = 4, .m = 440,
     .n = 136, .k = 130, .halves = true, .draws = true, .drops_y = true, .sms = 1},
};

static void programs_draw_random_numbers(void **state) {
    (void)state;
    expect_all_right(that_draw, DW_COUNT(that_draw));
}

/* The engine writes a gradient over the value that it is the gradient of. */
static void results_may_lie_over_operands(void **state) {
    static const problem p = {SWIGLU_BACKWARD, 3,        3,        0,
                              .m = 260,        .n = 300, .k = 200, .turned = true,
                              .drops_y = true, .sms = 1};
    run r;
    (void)state;
    open_run(&p, &r);
    dw__call program = program_of(&r, r.results), alone = program_of(&r, r.expected);
    dw__operation_call call = {.call = product_of(&r)};
    enqueue(&r, &dw__graph_gemm_hopper, &call);
    call.call = alone;
    enqueue(&r, &dw__gpu_elementwise, &call);
    program.outputs[0] = program.inputs[1];
    program.outputs[1] = program.inputs[2];
    call.call = product_of(&r);
    call.call.epilogue = &program;
    call.call.replaced_half = -1;
    call.call.outputs[0].data = NULL;
    enqueue(&r, &dw__sm90_linear_program, &call);
    for (int o = 0; o < 2; o++) {
        fetch(&r.inputs[1 + o], r.device);
        fetch(&r.expected[o], r.device);
        for (int row = 0; row < p.m; row++)
            for (int column = 0; column < p.n; column++)
                assert_true(get(&r.inputs[1 + o], row, column) == get(&r.expected[o], row, column));
    }
    close_run(&r);
}

static void expect_refused(const run *r, const dw__call *program, int replaced) {
    dw__operation_call call = {.call = product_of(r)};
    call.call.epilogue = program;
    call.call.replaced = replaced;
    call.call.replaced_half = -1;
    assert_int_equal(dw__sm90_linear_program.supports(&dw__sm90_linear_program, &call, NULL),
                     DW_UNSUPPORTED);
}

static void other_programs_are_refused(void **state) {
    static const problem p = {SWIGLU, 2, 1, 1, .m = 40, .n = 48, .k = 64, .sms = 1};
    static const dw_attr draws = {.key = DW_ATTR_KEY_BODY,
                                  .string = "t0=dropout(i0,i1,c0.1,c3);out(t0)"},
                         counts = {.key = DW_ATTR_KEY_BODY,
                                   .string = "t0=cast_bf16(i1);t1=add(i0,t0);out(t1)"};
    run r;
    (void)state;
    open_run(&p, &r);
    dw__call program = program_of(&r, r.results);
    program.inputs[0].stride[0] = 0; /* a vector that is added to each row */
    expect_refused(&r, &program, 1);
    program = program_of(&r, r.results);
    program.inputs[0].data = (char *)program.inputs[0].data + 2;
    expect_refused(&r, &program, 1);
    program = program_of(&r, r.results);
    program.inputs[0].dtype = DW_F32;
    expect_refused(&r, &program, 1);
    program = program_of(&r, r.results);
    program.outputs[0].dtype = DW_F32;
    expect_refused(&r, &program, 1);
    program = program_of(&r, r.results);
    program.attrs = &draws;
    program.inputs[0] = program.inputs[1];
    program.inputs[1] = (dw__tensor){.data = r.device_key, .dtype = DW_I64};
    expect_refused(&r, &program, 0); /* a key has a seed and an offset */
    program.attrs = &counts;
    program.inputs[1].rank = 1;
    program.inputs[1].shape[0] = 2;
    program.inputs[1].stride[0] = 1;
    expect_refused(&r, &program, 0);
    program = program_of(&r, r.results);
    program.summed = 1;
    program.outputs[program.output_count++] = tensor_of(&r.sums[0]);
    program.outputs[1].dtype = DW_F32;
    expect_refused(&r, &program, 1);
    close_run(&r);
}

static void check_first_use(void) {
    const problem *const some[] = {&dense[0],     &dense[4],     &of_halves[0], &of_halves[3],
                                   &of_groups[1], &with_sums[0], &that_draw[0]};
    for (size_t i = 0; i < DW_COUNT(some); i++) expect_right(some[i]);
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
        cmocka_unit_test(programs_are_right),
        cmocka_unit_test(programs_of_halves_are_right),
        cmocka_unit_test(programs_of_groups_are_right),
        cmocka_unit_test(sums_of_results_are_right),
        cmocka_unit_test(sums_have_the_same_bits_in_every_run),
        cmocka_unit_test(programs_draw_random_numbers),
        cmocka_unit_test(results_may_lie_over_operands),
        cmocka_unit_test(other_programs_are_refused),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
