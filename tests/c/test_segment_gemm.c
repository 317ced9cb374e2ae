/* segment_linear and the gradient of its matrices by the grouped forms of the GEMMs of sm_90a and sm_100f, on emulated
 * GPUs with the checker on, compared with sums in double. Kernels are compiled when they are first used. */
#include "emulated_call.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "run_time_compiler.h"
#include <math.h>

static const char blackwell[] = "emulator:sm_100a", hopper[] = "emulator:sm_90a";

/* ---- one call ------------------------------------------------------------------------------------ */

enum { MOST_GROUPS = 96, MOST_ROWS = 1024, X = 0, OPERAND = 1, OFFSETS = 2, BIAS = 3 };

/* The rows of x in groups, by the number of rows of each. */
typedef struct groups {
    int count, rows[MOST_GROUPS];
    int poison; /* the rows of this group are infinite, none if it is negative */
    int spare;  /* rows of x behind the last group, which belong to none */
} groups;

typedef struct problem {
    const char *gpu;
    bool
        is_weight; /* segment_linear_backward_weight: x [R, width]; else x times w [groups, n, width] */
    int width, n;
    bool f16, f32_result, bias, addend, in_place, turned; /* turned: w is [groups, width, n] */
    int tile, sms;
    uint64_t seed;
    int gather; /* GATHER of sm90_gather_params.h: rows of x, or of the other operand, are given by an index */
    bool placed; /* rows of the result are multiplied by weights, and stored by an index */
} problem;

typedef struct run {
    const problem *problem;
    const groups *groups;
    const dw_device *device;
    int rows, offsets[MOST_GROUPS + 1];
    int tokens, index[MOST_ROWS]; /* the rows of the operand that has an index, and the index */
    int places[MOST_ROWS];        /* of the result's rows: a permutation */
    void *device_index, *device_places;
    matrix weights;
    matrix x, operand, bias, addend, result;
    void *device_offsets;
    dw__operation_call call;
} run;

/* A tensor of `groups` matrices of all of the matrix's rows, or of rank 2. */
static dw__tensor tensor_of(const matrix *m, int64_t matrices) {
    const dw_matrix view = matrix_of(m);
    const dw_dtype type = m->type == MATRIX_F32 ? DW_F32 : m->type == MATRIX_F16 ? DW_F16 : DW_BF16;
    dw__tensor t = {.data = view.data, .dtype = type, .rank = 2};
    if (matrices > 0) {
        t.rank = 3;
        t.shape[0] = matrices;
        t.shape[1] = m->rows / matrices;
        t.stride[0] = t.shape[1] * view.stride;
    } else {
        t.shape[0] = m->rows;
    }
    t.shape[t.rank - 1] = m->columns;
    t.stride[t.rank - 2] = view.stride;
    t.stride[t.rank - 1] = 1;
    return t;
}

static const matrix *gathered_of(const run *r) {
    const int gather = r->problem->gather;
    return gather == DW_SM90_GATHER_NONE ? NULL : gather == DW_SM90_GATHER_A ? &r->x : &r->operand;
}

/* The last token is in this group alone, and in rows of no group. */
static void poison(const run *r, matrix *m) {
    const groups *g = r->groups;
    const bool gathered = m == gathered_of(r);
    if (g->poison < 0) return;
    for (int i = gathered ? r->tokens - 1 : r->offsets[g->poison];
         i < (gathered ? r->tokens : r->offsets[g->poison + 1]); i++)
        for (int j = 0; j < m->columns; j++) set(m, i, j, (i + j) % 2 ? INFINITY : -INFINITY);
    send(m, r->device);
}

/* Draws the rows that the index names, so that some repeat and some are missing. */
static void draw_index(run *r, uint64_t *state) {
    const groups *g = r->groups;
    assert_true(r->rows <= MOST_ROWS);
    for (int i = 0; i < r->rows; i++) {
        const bool last =
            i >= r->offsets[g->count] ||
            (g->poison >= 0 && i >= r->offsets[g->poison] && i < r->offsets[g->poison + 1]);
        r->index[i] = last ? r->tokens - 1 : (int)(random_word(state) % (uint64_t)(r->tokens - 1));
    }
    const size_t bytes = (size_t)r->rows * sizeof(int);
    assert_int_equal(dw_device_allocate(r->device, bytes, &r->device_index), DW_OK);
    if (bytes) assert_int_equal(r->device->copy_in(r->device_index, r->index, bytes, NULL), DW_OK);
}

/* Draws the places of the result's rows, and their weights. */
static void draw_places(run *r, matrix_type type, uint64_t *state) {
    const size_t bytes = (size_t)r->rows * sizeof(int);
    for (int i = 0; i < r->rows; i++) {
        const int other = (int)(random_word(state) % (uint64_t)(i + 1));
        r->places[i] = r->places[other];
        r->places[other] = i;
    }
    r->weights = (matrix){.rows = 1, .columns = r->rows, .type = type};
    r->weights.bytes = r->weights.pitch = row_bytes(&r->weights);
    r->weights.host = malloc(r->weights.bytes + 1);
    assert_non_null(r->weights.host);
    for (int i = 0; i < r->rows; i++) set(&r->weights, 0, i, random_value(state, false));
    assert_int_equal(dw_device_allocate(r->device, r->weights.bytes, &r->weights.device), DW_OK);
    send(&r->weights, r->device);
    assert_int_equal(dw_device_allocate(r->device, bytes, &r->device_places), DW_OK);
    if (bytes)
        assert_int_equal(r->device->copy_in(r->device_places, r->places, bytes, NULL), DW_OK);
}

/* The row at which row `row` of the result is stored. */
static int place_of(const run *r, int row) { return r->problem->placed ? r->places[row] : row; }

/* Row `row` of the sorted rows of an operand. */
static int row_of(const run *r, const matrix *m, int row) {
    return m == gathered_of(r) ? r->index[row] : row;
}

static void open_run(const problem *p, const groups *g, run *r) {
    static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    const matrix_type type = p->f16 ? MATRIX_F16 : MATRIX_BF16,
                      result = p->f32_result ? MATRIX_F32 : type;
    uint64_t state = p->seed;
    *r = (run){.problem = p, .groups = g, .device = device_named(p->gpu)};
    for (int i = 0; i < g->count; i++) r->offsets[i + 1] = r->offsets[i] + g->rows[i];
    r->rows = r->offsets[g->count] + g->spare;
    r->tokens = r->rows / 3 + 2;
    const int result_rows = p->is_weight ? g->count * p->width : r->rows;
    place_random(&r->x, r->device, p->gather == DW_SM90_GATHER_A ? r->tokens : r->rows, p->width,
                 type, &state, false);
    if (p->is_weight)
        place_random(&r->operand, r->device, p->gather == DW_SM90_GATHER_B ? r->tokens : r->rows,
                     p->n, type, &state, false);
    else
        place_random(&r->operand, r->device, g->count * (p->turned ? p->width : p->n),
                     p->turned ? p->n : p->width, type, &state, false);
    if (p->gather) draw_index(r, &state);
    if (p->placed) draw_places(r, type, &state);
    poison(r, &r->x);
    if (p->is_weight) poison(r, &r->operand);
    /* The bias is contiguous. */
    r->bias = (matrix){.rows = g->count, .columns = p->n, .type = type};
    r->bias.pitch = row_bytes(&r->bias);
    r->bias.bytes = (size_t)r->bias.rows * r->bias.pitch;
    r->bias.host = malloc(r->bias.bytes);
    assert_non_null(r->bias.host);
    for (int i = 0; i < g->count; i++)
        for (int j = 0; j < p->n; j++) set(&r->bias, i, j, random_value(&state, false));
    assert_int_equal(dw_device_allocate(r->device, r->bias.bytes, &r->bias.device), DW_OK);
    send(&r->bias, r->device);
    place_random(&r->addend, r->device, result_rows, p->n, result, &state, false);
    place(&r->result, r->device, result_rows, p->n, result);
    if (p->in_place) memcpy(r->result.host, r->addend.host, r->addend.bytes);
    send(&r->result, r->device);
    const size_t bytes = ((size_t)g->count + 1) * sizeof(int);
    assert_int_equal(dw_device_allocate(r->device, bytes, &r->device_offsets), DW_OK);
    assert_int_equal(r->device->copy_in(r->device_offsets, r->offsets, bytes, NULL), DW_OK);
    const dw__tensor offsets = {.data = r->device_offsets,
                                .dtype = DW_I32,
                                .rank = 1,
                                .shape = {g->count + 1},
                                .stride = {1}};
    dw__call *c = &r->call.call;
    *c =
        (dw__call){.op = p->is_weight ? DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT : DW_OP_SEGMENT_LINEAR,
                   .attr_count = !p->is_weight && p->turned,
                   .attrs = &plain,
                   .input_count = p->is_weight ? 3 : 4,
                   .output_count = 1,
                   .inputs = {tensor_of(&r->x, 0),
                              tensor_of(&r->operand, p->is_weight ? 0 : g->count), offsets},
                   .outputs = {tensor_of(&r->result, p->is_weight ? g->count : 0)}};
    if (!p->is_weight) c->inputs[BIAS] = (dw__tensor){.rank = -1};
    if (p->bias) c->inputs[BIAS] = tensor_of(&r->bias, 0);
    dw__tensor each = {.dtype = DW_I32, .rank = 1, .shape = {r->rows}, .stride = {1}};
    if (p->gather || p->placed)
        for (; c->input_count < 7; c->input_count++)
            c->inputs[c->input_count] = (dw__tensor){.rank = -1};
    each.data = r->device_index;
    if (p->gather) c->inputs[p->is_weight && p->gather == DW_SM90_GATHER_A ? 3 : 4] = each;
    each.data = r->device_places;
    if (p->placed) c->inputs[5] = each;
    each.data = r->weights.device;
    each.dtype = p->f16 ? DW_F16 : DW_BF16;
    if (p->placed) c->inputs[6] = each;
    if (p->addend) {
        c->accumulates = DW__ADDS_TO_ADDEND;
        c->addend =
            p->in_place ? c->outputs[0] : tensor_of(&r->addend, p->is_weight ? g->count : 0);
    }
}

static void close_run(run *r) {
    matrix *all[] = {&r->x, &r->operand, &r->bias, &r->addend, &r->result};
    for (size_t i = 0; i < DW_COUNT(all); i++) take_away(all[i], r->device);
    if (r->problem->placed) {
        take_away(&r->weights, r->device);
        dw_device_release(r->device, r->device_places, (size_t)r->rows * sizeof(int));
    }
    if (r->problem->gather)
        dw_device_release(r->device, r->device_index, (size_t)r->rows * sizeof(int));
    dw_device_release(r->device, r->device_offsets, ((size_t)r->groups->count + 1) * sizeof(int));
}

static const dw__kernel *kernel_of(const problem *p) {
    return p->gpu == hopper ? &dw__sm90_segment : &dw__sm100_segment;
}

/* The variant of a tile that the cost model need not choose. */
static uint64_t params_of(const problem *p) {
    const int kind = p->is_weight ? DW_GROUPS_CONTRACTION : DW_GROUPS_ROWS,
              output = p->f32_result ? DW_GEMM_OUTPUT_F32 : DW_GEMM_OUTPUT_ELEMENT;
    const dw__sm90_shape on_hopper = {.tile = (uint64_t)p->tile,
                                      .groups = (uint64_t)kind,
                                      .output = (uint64_t)output,
                                      .f16 = p->f16,
                                      .bias = p->bias,
                                      .residual = p->addend,
                                      .turned_a = p->is_weight,
                                      .turned_b = p->is_weight || p->turned,
                                      .gather = (uint64_t)p->gather,
                                      .scatter = p->placed,
                                      .weighted = p->placed};
    const dw__gemm_shape shape = {.tile = (uint64_t)p->tile,
                                  .scheme_a = DW_SCHEME_BF16,
                                  .scheme_b = DW_SCHEME_BF16,
                                  .groups = (uint64_t)kind,
                                  .output = (uint64_t)output,
                                  .f16 = p->f16,
                                  .bias = p->bias,
                                  .residual = p->addend,
                                  .turned_a = p->is_weight,
                                  .turned_b = p->is_weight || p->turned};
    return p->gpu == hopper ? on_hopper.params : shape.params;
}

/* Runs the call on a GPU of few SMs, so that blocks compute several tiles. */
static void launch(const run *r) {
    const problem *p = r->problem;
    const dw__kernel *kernel = kernel_of(p);
    const dw__context *context;
    const dw__variant *variant;
    assert_int_equal(r->device->context(&context), DW_OK);
    dw__context few = *context;
    few.sm_count = p->sms;
    if (kernel->supports(kernel, &r->call, NULL) != DW_OK) fail_msg("%s", dw_last_error());
    if (dw__variant_of(&few, kernel, params_of(p), &variant) != DW_OK ||
        kernel->enqueue(&r->call, &few, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
}

/* ---- expected results ------------------------------------------------------------------------------- */

typedef struct expected {
    double value, error;
} expected;

/* Elements of x and of the other operand in the sum for row `row` of the group's result: at `k` of the contraction. */
static double left_of(const run *r, int group, int row, int k) {
    return r->problem->is_weight ? get(&r->x, row_of(r, &r->x, r->offsets[group] + k), row)
                                 : get(&r->x, row_of(r, &r->x, r->offsets[group] + row), k);
}
static double right_of(const run *r, int group, int column, int k) {
    const problem *p = r->problem;
    if (p->is_weight)
        return get(&r->operand, row_of(r, &r->operand, r->offsets[group] + k), column);
    return p->turned ? get(&r->operand, group * p->width + k, column)
                     : get(&r->operand, group * p->n + column, k);
}

/* The sum and the bias, and the bound of their F32 error: 2^-23 of the magnitudes for each of k + 2 operations, even if
 * the accumulator is truncated. */
static expected sum_of(const run *r, int group, int row, int column, int k) {
    const double bias = r->problem->bias ? get(&r->bias, group, column) : 0;
    double sum = 0, size = 0;
    for (int i = 0; i < k; i++) {
        const double x = left_of(r, group, row, i) * right_of(r, group, column, i);
        sum += x, size += fabs(x);
    }
    const double weight = r->problem->placed ? get(&r->weights, 0, r->offsets[group] + row) : 1;
    return (expected){weight * (sum + bias),
                      fabs(weight) * (k + 3) * 0x1p-23 * (size + fabs(bias))};
}

static void check_element(const run *r, int group, int row, int column, int k, int at) {
    static const double rounding[] = {0x1p-8, 0x1p-11, 0x1p-24};
    const problem *p = r->problem;
    const double value = get(&r->result, at, column);
    if (group == r->groups->poison && k > 0) {
        assert_false(isfinite(value));
        return;
    }
    expected x = sum_of(r, group, row, column, k);
    if (p->addend) x.value += get(&r->addend, at, column);
    x.error += (0x1p-23 + rounding[r->result.type]) * (fabs(x.value) + x.error);
    if (r->result.type == MATRIX_F16) x.error += 0x1p-25; /* subnormal */
    if (!(fabs(value - x.value) <= x.error))
        fail_msg("%s, tile %d%s, group %d of %d, row %d, column %d is %.9g, not %.9g within %.3g",
                 p->gpu, p->tile, p->is_weight ? ", the gradient of matrices" : "", group,
                 r->groups->count, row, column, value, x.value, x.error);
}

static void check(run *r) {
    const problem *p = r->problem;
    const groups *g = r->groups;
    fetch(&r->result, r->device);
    for (int group = 0; group < g->count; group++) {
        const int rows = p->is_weight ? p->width : g->rows[group],
                  k = p->is_weight ? g->rows[group] : p->width,
                  first = p->is_weight ? group * p->width : r->offsets[group];
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < p->n; column++)
                check_element(r, group, row, column, k, place_of(r, first + row));
    }
    for (int row = 0; row < r->result.rows; row++) expect_untouched(&r->result, row);
    /* Rows of no group are 0, or the addend. */
    for (int row = p->is_weight ? r->result.rows : r->offsets[g->count]; row < r->result.rows;
         row++)
        for (int column = 0; column < p->n; column++)
            assert_true(get(&r->result, place_of(r, row), column) ==
                        (p->addend ? get(&r->addend, place_of(r, row), column) : 0));
}

static void expect_right(const problem *p, const groups *g) {
    run r;
    open_run(p, g, &r);
    launch(&r);
    check(&r);
    close_run(&r);
}

/* ---- tests ------------------------------------------------------------------------------------------ */

/* Groups without rows at the beginning, in between and at the end, groups of one row, one row more than a tile, of
 * several tiles, and of which the end lies one element before and after multiples of 16. */
static const groups mixed = {
    .count = 12, .rows = {0, 1, 129, 0, 64, 17, 300, 31, 0, 48, 95, 0}, .poison = 6, .spare = 9};
static const groups one = {.count = 1, .rows = {197}, .poison = -1};
static const groups without_rows = {.count = 3, .poison = -1, .spare = 5};

static groups many_of_one_row(void) {
    groups g = {.count = MOST_GROUPS, .poison = 11};
    for (int i = 0; i < g.count; i++) g.rows[i] = i % 7 == 3 ? 0 : 1;
    return g;
}

static void each_form_is_right(void **state) {
    const problem forms[] = {
        {.gpu = blackwell, .width = 331, .n = 199, .tile = 1},
        {.gpu = blackwell,
         .width = 64,
         .n = 70,
         .tile = 0,
         .f16 = true,
         .bias = true,
         .addend = true},
        {.gpu = blackwell, .width = 450, .n = 300, .tile = 2, .turned = true},
        {.gpu = blackwell,
         .width = 70,
         .n = 131,
         .tile = 1,
         .turned = true,
         .f32_result = true,
         .bias = true,
         .addend = true,
         .in_place = true},
        {.gpu = blackwell, .is_weight = true, .width = 139, .n = 77, .tile = 1},
        {.gpu = blackwell,
         .is_weight = true,
         .width = 130,
         .n = 300,
         .tile = 2,
         .f16 = true,
         .addend = true,
         .in_place = true},
        {.gpu = blackwell,
         .is_weight = true,
         .width = 72,
         .n = 67,
         .tile = 0,
         .f32_result = true,
         .addend = true},
        {.gpu = hopper, .width = 331, .n = 199, .tile = 2, .f16 = true, .bias = true},
        {.gpu = hopper,
         .width = 70,
         .n = 131,
         .tile = 1,
         .turned = true,
         .addend = true,
         .in_place = true},
        {.gpu = hopper,
         .is_weight = true,
         .width = 139,
         .n = 77,
         .tile = 0,
         .f32_result = true,
         .addend = true},
        {.gpu = hopper,
         .is_weight = true,
         .width = 139,
         .n = 199,
         .tile = 3,
         .addend = true,
         .in_place = true},
        {.gpu = hopper, .width = 328, .n = 199, .tile = 2, .gather = DW_SM90_GATHER_A},
        {.gpu = hopper,
         .width = 72,
         .n = 131,
         .tile = 1,
         .turned = true,
         .f16 = true,
         .bias = true,
         .addend = true,
         .gather = DW_SM90_GATHER_A},
        {.gpu = hopper,
         .width = 136,
         .n = 139,
         .tile = 2,
         .bias = true,
         .addend = true,
         .gather = DW_SM90_GATHER_A,
         .placed = true},
        {.gpu = hopper, .width = 139, .n = 70, .tile = 1, .f32_result = true, .placed = true},
        {.gpu = hopper,
         .is_weight = true,
         .width = 136,
         .n = 77,
         .tile = 0,
         .f32_result = true,
         .gather = DW_SM90_GATHER_A},
        {.gpu = hopper,
         .is_weight = true,
         .width = 139,
         .n = 264,
         .tile = 2,
         .addend = true,
         .gather = DW_SM90_GATHER_B},
    };
    const groups many = many_of_one_row();
    const groups *all[] = {&mixed, &one, &without_rows, &many};
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(forms); i++)
        for (size_t j = 0; j < DW_COUNT(all); j++) {
            problem p = forms[i];
            p.sms = 1 + (int)(i + j) % 4;
            p.seed = 10 * i + j;
            expect_right(&p, all[j]);
        }
}

/* Sizes of 1, and contractions of no elements. */
static void smallest_calls_are_right(void **state) {
    static const groups few = {.count = 4, .rows = {2, 0, 1, 3}, .poison = -1};
    (void)state;
    need_compiler();
    for (int is_weight = 0; is_weight < 2; is_weight++) {
        const problem p = {.gpu = blackwell,
                           .is_weight = is_weight,
                           .width = 1,
                           .n = 1,
                           .tile = 1,
                           .sms = 2,
                           .seed = 3};
        expect_right(&p, &few);
    }
}

/* Offsets that lead beyond the rows, and one that does not ascend, are reported. Nothing outside of the result is
 * stored, which the emulator would find. */
static void wrong_offsets_are_reported(void **state) {
    static const int wrong[][5] = {
        {0, 30, 60, 90, 261}, {-64, 30, 60, 90, 120}, {0, 90, 30, 90, 120}};
    static const groups four = {.count = 4, .rows = {30, 30, 30, 30}, .poison = -1};
    (void)state;
    need_compiler();
    for (size_t i = 0; i < 2 * DW_COUNT(wrong); i++) {
        const problem p = {.gpu = blackwell,
                           .is_weight = i % 2,
                           .width = i % 2 ? 139 : 331,
                           .n = i % 2 ? 77 : 199,
                           .tile = 1,
                           .sms = 2};
        unsigned error = 0;
        run r;
        open_run(&p, &four, &r);
        assert_int_equal(r.device->copy_in(r.device_offsets, wrong[i / 2], sizeof wrong[0], NULL),
                         DW_OK);
        r.call.error.mark = 5;
        assert_int_equal(dw_device_allocate(r.device, sizeof error, (void **)&r.call.error.word),
                         DW_OK);
        assert_int_equal(r.device->copy_in(r.call.error.word, &error, sizeof error, NULL), DW_OK);
        launch(&r);
        assert_int_equal(r.device->copy_out(&error, r.call.error.word, sizeof error, NULL), DW_OK);
        assert_int_equal(error, 5 << 8 | DW_DATA_INDEX);
        dw_device_release(r.device, r.call.error.word, sizeof error);
        close_run(&r);
    }
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

static const problem rows_form = {.gpu = blackwell, .width = 331, .n = 199, .tile = 1, .sms = 2},
                     weight_form = {
                         .gpu = blackwell, .is_weight = true, .width = 139, .n = 77, .tile = 1};

static const dw__variant *checked_variant(const problem *p) {
    const dw__context *context;
    const dw__variant *variant;
    REQUIRE(device_named(p->gpu)->context(&context) == DW_OK);
    REQUIRE(dw__variant_of(context, kernel_of(p), params_of(p), &variant) == DW_OK);
    return variant;
}

static void keep_correct(void) {
    problem p = rows_form;
    REQUIRE(!checked_variant(&weight_form)->disabled && !checked_variant(&p)->disabled);
    p.turned = p.bias = p.addend = true;
    REQUIRE(!checked_variant(&p)->disabled);
    REQUIRE(lines == 0);
}
static void correct_kernels_pass(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_correct);
}

/* Compiles the kernel without the text `what`, which stands behind `after`. */
static void carry_without(const problem *p, const char *after, const char *what) {
    const dw__gemm_shape shape = {.params = params_of(p)};
    const dw__jit_variant variant = dw__gemm_variant(&shape);
    dw__text source = {0};
    void *image;
    size_t bytes;
    REQUIRE(dw__jit_expand(variant.source, &source) == DW_OK);
    char *at = strstr(source.text, after);
    REQUIRE(at);
    at = strstr(at, what);
    REQUIRE(at);
    memset(at, ' ', strlen(what));
    REQUIRE(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL) == DW_OK);
    dw__text_free(&source);
    carry(name_of(&variant), image);
}

/* Rows of the next group are multiplied into the sums. */
static void reject_rows_of_the_next_group(void) {
    carry_without(&weight_form, "if (left < count)", "clear_rows(a, left, count)");
    const dw__variant *variant = checked_variant(&weight_form);
    REQUIRE(variant->disabled && strstr(variant->reason, "disagrees"));
    REQUIRE(lines == 1);
}
/* MMAs may read what was there before the zeros. */
static void reject_zeros_without_a_fence(void) {
    carry_without(&weight_form, "void clear_rows(", "fence_async_shared();");
    const dw__variant *variant = checked_variant(&weight_form);
    REQUIRE(variant->disabled && strstr(variant->reason, "missing fence"));
}
/* Each row gets the bias of the first group. */
static void reject_another_bias(void) {
    problem p = rows_form;
    p.bias = true;
    carry_without(&p, "void load_bias(", "bias += (uint64)t.group * p.n * (SWIGLU ? 2 : 1)");
    const dw__variant *variant = checked_variant(&p);
    REQUIRE(variant->disabled && strstr(variant->reason, "disagrees"));
}
static void wrong_kernels_are_rejected(void **state) {
    (void)state;
    need_compiler();
    in_child(reject_rows_of_the_next_group);
    in_child(reject_zeros_without_a_fence);
    in_child(reject_another_bias);
}

/* ---- selection --------------------------------------------------------------------------------------- */

static const char *chosen(const problem *p, const groups *g, const char *target) {
    dw__gpu_target gpu;
    run r;
    assert_int_equal(dw__gpu_target_named(target, &gpu), DW_OK);
    open_run(p, g, &r);
    const dw__kernel *kernel = dw__kernel_for(&r.call, &gpu, NULL);
    assert_non_null(kernel);
    close_run(&r);
    return kernel->name;
}

static void engine_takes_them(void **state) {
    problem p = rows_form;
    (void)state;
    assert_string_equal(chosen(&p, &mixed, "sm_100a"), "sm100_segment");
    assert_string_equal(chosen(&p, &mixed, "sm_103a"), "sm100_segment");
    assert_string_equal(chosen(&p, &mixed, "sm_90a"), "sm90_segment");
    assert_string_equal(chosen(&p, &mixed, "sm_120a"), "segment_linear");
    assert_string_equal(chosen(&weight_form, &mixed, "sm_100a"), "sm100_segment");
    p.f32_result = p.turned = p.addend = true;
    assert_string_equal(chosen(&p, &mixed, "sm_100a"), "sm100_segment");
}

/* The rows of an operand that is not aligned, and columns that are not contiguous, are another kernel's. */
static void other_layouts_are_left_alone(void **state) {
    static const int axes[][2] = {{X, 0}, {X, 1}, {OPERAND, 0}, {OPERAND, 1}};
    (void)state;
    for (size_t i = 0; i < DW_COUNT(axes); i++) {
        run r;
        open_run(&rows_form, &mixed, &r);
        r.call.call.inputs[axes[i][0]].stride[axes[i][1]] += 1;
        assert_int_not_equal(dw__sm100_segment.supports(&dw__sm100_segment, &r.call, NULL), DW_OK);
        close_run(&r);
    }
}

static int columns_of_tile(int kind, int64_t m, int64_t n, int64_t k, int64_t count) {
    const dw__gemm_groups_call call = {
        .gemm = {.dtype = DW_BF16, .output = DW_BF16, .m = m, .n = n, .k = k},
        .groups = {.kind = kind, .count = count}};
    const dw__gemm_shape shape = dw__gemm_groups_shape_of(&call, 148);
    assert_int_equal(dw__gemm_tiles[shape.tile].ctas, 1);
    return dw__gemm_tiles[shape.tile].n;
}

static void tile_fits_the_call(void **state) {
    (void)state;
    assert_int_equal(columns_of_tile(DW_GROUPS_ROWS, 16384, 14336, 4096, 8), 256);
    assert_int_equal(columns_of_tile(DW_GROUPS_CONTRACTION, 4096, 14336, 65536, 16), 256);
    /* 128 x 256 would leave SMs without a tile. */
    assert_int_equal(columns_of_tile(DW_GROUPS_ROWS, 256, 2048, 2048, 2), 64);
}

int main(void) {
    /* Children come first, because a process keeps variants that were loaded without a check. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_pass),
        cmocka_unit_test(wrong_kernels_are_rejected),
        cmocka_unit_test(each_form_is_right),
        cmocka_unit_test(smallest_calls_are_right),
        cmocka_unit_test(wrong_offsets_are_reported),
        cmocka_unit_test(engine_takes_them),
        cmocka_unit_test(other_layouts_are_left_alone),
        cmocka_unit_test(tile_fits_the_call),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
