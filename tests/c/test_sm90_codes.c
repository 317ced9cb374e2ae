/* FP8 codes in Hopper's GEMM (cuda/sm90/sm90_gemm.cu, src/kernel/cuda/sm90_codes.c) on an emulated GPU, which adds FP8
 * products as an H200 does (src/emulator/wgmma_sum.h), with the checker on. Results are compared with sums in double.
 */
#include "kernel/cuda/gpu_kernels.h"
#include "library_gemm.h"

static const char gpu[] = "emulator:sm_90a";
enum { GROUPS = 5, STEP = 128, PRODUCT_K = 32 };

typedef enum arrangement { DENSE, BELOW, BESIDE } arrangement; /* of the matrices of B */

typedef struct form {
    matrix_type a, b, d;
    bool f16, bias, residual, fast, scale_each;
    arrangement matrices;
    bool blocks, square_a, square_b; /* scales of blocks; not in groups */
    bool row_scales;                 /* not in groups */
} form;

typedef struct call {
    const form *form;
    const dw_device *device;
    int m, n, k, groups;
    int offsets[GROUPS + 1];
    float scales[1 + GROUPS]; /* of A, then of B */
    matrix a, b, bias, residual, d;
    float *blocks[2];      /* scales of blocks of A and B */
    int wide[2];           /* from a row of square blocks to the next */
    size_t block_bytes[2]; /* or those of rows */
    void *device_offsets, *device_scales, *device_blocks[2];
    dw__gemm_groups_call made;
} call;

static dw_dtype code_of(matrix_type type) { return type == MATRIX_E4M3 ? DW_E4M3 : DW_E5M2; }

static void *put(const dw_device *device, const void *data, size_t bytes) {
    void *at;
    assert_int_equal(dw_device_allocate(device, bytes, &at), DW_OK);
    assert_int_equal(device->copy_in(at, data, bytes, NULL), DW_OK);
    return at;
}

/* Fills a matrix with random numbers, or positive ones near 1. */
static void fill(matrix *x, const dw_device *device, int rows, int columns, matrix_type type,
                 uint64_t *state, bool positive) {
    place(x, device, rows, columns, type);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            const float value = random_value(state, false);
            set(x, i, j, positive ? 1.0f + 0.5f * value : 2.0f * value);
        }
    send(x, device);
}

static bool is_square(const form *f, int operand) { return operand ? f->square_b : f->square_a; }

static bool has_scales(const form *f) { return f->blocks || f->row_scales; } /* in `blocks` */

static float block_scale(const call *c, int operand, int row, int block) {
    if (c->form->row_scales) return c->blocks[operand][row];
    const int rows = operand ? c->n : c->m;
    return c->blocks[operand][is_square(c->form, operand) ? row / STEP * c->wide[operand] + block
                                                          : block * rows + row];
}

/* Scales from 1/4 to 4 in the layouts of fp8-block. */
static void put_blocks(call *c, int operand, uint64_t *state) {
    const int rows = operand ? c->n : c->m, along = (c->k + STEP - 1) / STEP,
              wide = (along + 3) / 4 * 4,
              count = c->form->row_scales           ? rows
                      : is_square(c->form, operand) ? (rows + STEP - 1) / STEP * wide
                                                    : along * rows;
    c->wide[operand] = wide;
    c->block_bytes[operand] = (size_t)count * sizeof(float);
    c->blocks[operand] = malloc(c->block_bytes[operand]);
    assert_non_null(c->blocks[operand]);
    for (int i = 0; i < count; i++)
        c->blocks[operand][i] = exp2f(2.0f * random_value(state, false));
    c->device_blocks[operand] = put(c->device, c->blocks[operand], c->block_bytes[operand]);
}

static void open_call(const form *f, int m, int n, int k, bool positive, uint64_t seed, call *c) {
    const dw_device *device = device_named(gpu);
    const matrix_type narrow = f->f16 ? MATRIX_F16 : MATRIX_BF16;
    const int groups = f->matrices == DENSE ? 1 : GROUPS, below = f->matrices == BELOW ? GROUPS : 1,
              beside = f->matrices == BESIDE ? GROUPS : 1;
    uint64_t state = seed;
    *c = (call){.form = f, .device = device, .m = m, .n = n, .k = k, .groups = groups};
    /* Two groups without rows, and one that ends within a tile. */
    const int ends[] = {0, 0, m / 7, m - m / 3, m - m / 3, m};
    memcpy(c->offsets, ends, sizeof ends);
    if (groups == 1) c->offsets[1] = m;
    for (int i = 0; i <= GROUPS; i++) c->scales[i] = 0.25f + 0.5f * (float)i;
    fill(&c->a, device, m, k, f->a, &state, positive);
    fill(&c->b, device, below * n, beside * k, f->b, &state, positive);
    fill(&c->bias, device, groups, n, narrow, &state, false);
    fill(&c->residual, device, m, n, f->d, &state, false);
    place(&c->d, device, m, n, f->d);
    send(&c->d, device);
    c->device_offsets = put(device, c->offsets, sizeof c->offsets);
    c->device_scales = put(device, c->scales, sizeof c->scales);
    c->made = (dw__gemm_groups_call){.gemm = {.struct_size = sizeof(dw_gemm),
                                              .device = device,
                                              .dtype = f->f16 ? DW_F16 : DW_BF16,
                                              .output = f->d == MATRIX_F32 ? DW_F32
                                                        : f->f16           ? DW_F16
                                                                           : DW_BF16,
                                              .m = m,
                                              .n = n,
                                              .k = k,
                                              .alpha = 0.75f,
                                              .a = matrix_of(&c->a),
                                              .b = matrix_of(&c->b),
                                              .d = matrix_of(&c->d)},
                                     .groups = {.count = groups},
                                     .codes = {.a = code_of(f->a),
                                               .b = code_of(f->b),
                                               .fast = f->fast,
                                               .scale_a = c->device_scales,
                                               .scale_b = (float *)c->device_scales + 1,
                                               .scale_b_each = f->scale_each,
                                               .side_by_side = f->matrices == BESIDE}};
    if (f->bias) c->made.gemm.bias = c->bias.device;
    if (f->residual) c->made.gemm.residual = matrix_of(&c->residual);
    if (has_scales(f)) {
        for (int i = 0; i < 2; i++) put_blocks(c, i, &state);
        c->made.codes.blocks = f->blocks;
        c->made.codes.row_scales = f->row_scales;
        c->made.codes.square_a = f->square_a;
        c->made.codes.square_b = f->square_b;
        c->made.codes.wide_a = c->wide[0];
        c->made.codes.wide_b = c->wide[1];
        c->made.codes.scale_a = c->device_blocks[0];
        c->made.codes.scale_b = c->device_blocks[1];
    }
    if (groups == 1) return;
    c->made.groups.kind = DW_GROUPS_ROWS;
    c->made.groups.offsets = c->device_offsets;
}

static void close_call(call *c) {
    matrix *all[] = {&c->a, &c->b, &c->bias, &c->residual, &c->d};
    for (size_t i = 0; i < DW_COUNT(all); i++) take_away(all[i], c->device);
    dw_device_release(c->device, c->device_offsets, sizeof c->offsets);
    dw_device_release(c->device, c->device_scales, sizeof c->scales);
    for (int i = 0; i < 2 && has_scales(c->form); i++) {
        dw_device_release(c->device, c->device_blocks[i], c->block_bytes[i]);
        free(c->blocks[i]);
    }
}

/* False: there is no such tile for codes. */
static bool run_tile(const call *c, int tile) {
    const dw__context *context;
    const dw__variant *variant;
    assert_int_equal(c->device->context(&context), DW_OK);
    dw__context few = *context;
    few.sm_count = 2; /* blocks compute several tiles */
    dw__sm90_shape shape = dw__sm90_shape_of(&c->made, few.sm_count);
    assert_int_equal(shape.promote, !c->form->fast);
    shape.tile = (uint64_t)tile;
    if (!dw__sm90_exists(&shape)) return false;
    if (dw__variant_of(&few, &dw__sm90_codes, shape.params, &variant) != DW_OK ||
        dw__sm90_enqueue(&c->made, &few, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
    fetch(&c->d, c->device);
    return true;
}

/* ---- expected results ------------------------------------------------------------------------------- */

static int group_of(const call *c, int row) {
    int group = 0;
    while (row >= c->offsets[group + 1]) group++;
    return group;
}

/* The sum of products in double, and a bound of the error of the tensor cores' sum. One instruction adds 32 products to
 * the old sum: each of the 33 terms is truncated to 13 bits below the greatest exponent, and so is the result to 14
 * bits, so the error is below 34 2^-13 times the largest magnitude among products, the old sum and the new one. Sums
 * are themselves off by the errors before, which `off` counts. Sums of a step are added in F32, times the scales of
 * blocks if there are any. */
static expected sum_of(const call *c, int row, int column) {
    const int group = c->groups == 1 ? 0 : group_of(c, row), beside = c->form->matrices == BESIDE;
    double sum = 0, error = 0, part = 0, off = 0, scale = 1;
    if (c->form->row_scales)
        scale = (double)block_scale(c, 0, row, 0) * block_scale(c, 1, column, 0);
    for (int k = 0; k < c->k; k += PRODUCT_K) {
        if (!c->form->fast && k % STEP == 0) {
            error += off * scale;
            part = off = 0;
            if (c->form->blocks)
                scale =
                    (double)block_scale(c, 0, row, k / STEP) * block_scale(c, 1, column, k / STEP);
        }
        double largest = fabs(part) + off;
        for (int i = k; i < k + PRODUCT_K && i < c->k; i++) {
            const double x =
                (double)get(&c->a, row, i) *
                get(&c->b, beside ? column : group * c->n + column, beside ? group * c->k + i : i);
            part += x, sum += x * scale;
            largest = fmax(largest, fabs(x));
        }
        largest = fmax(largest, fabs(part) + off);
        off += 34 * 0x1p-13 * largest;
        error += 0x1p-23 * (fabs(sum) + (fabs(part) + off) * scale);
    }
    return (expected){sum, error + off * scale};
}

static double
    worst_share; /* of the bound, in all elements checked: shows that bounds are not idle */

static void check_call(const call *c) {
    static const double rounding[] = {0x1p-8, 0x1p-11, 0x1p-24};
    for (int i = 0; i < c->m; i++) {
        const int group = c->groups == 1 ? 0 : group_of(c, i);
        const double of_tensors =
            (double)c->scales[0] * c->scales[1 + (c->form->scale_each ? group : 0)];
        const double factor = 0.75 * (has_scales(c->form) ? 1 : of_tensors);
        for (int j = 0; j < c->n; j++) {
            expected x = sum_of(c, i, j);
            x.value *= factor, x.error *= factor;
            if (c->form->bias) x.value += get(&c->bias, group, j);
            if (c->form->residual) x.value += get(&c->residual, i, j);
            x.error += (4 * 0x1p-23 + rounding[c->d.type]) * (fabs(x.value) + 4 + x.error);
            const double off = fabs(get(&c->d, i, j) - x.value);
            if (!(off <= x.error))
                fail_msg("D[%d][%d] of %d x %d x %d is %.9g, not %.9g within %.3g", i, j, c->m,
                         c->n, c->k, get(&c->d, i, j), x.value, x.error);
            worst_share = fmax(worst_share, off / x.error);
        }
        expect_untouched(&c->d, i);
    }
}

/* ---- tests -------------------------------------------------------------------------------------------- */

/* Every tile with every pair of formats, both ways of accumulation, both arrangements of matrices, all blocks. */
static void each_form_is_right(void **state) {
    static const form forms[] = {
        {MATRIX_E4M3, MATRIX_E4M3, MATRIX_BF16, .bias = true},
        {MATRIX_E5M2, MATRIX_E4M3, MATRIX_F32, .residual = true},
        {MATRIX_E4M3, MATRIX_E5M2, MATRIX_F16, .f16 = true, .fast = true},
        {MATRIX_E5M2, MATRIX_E5M2, MATRIX_F32, .fast = true},
        {MATRIX_E4M3, MATRIX_E4M3, MATRIX_BF16, .matrices = BELOW},
        {MATRIX_E5M2, MATRIX_E4M3, MATRIX_F32, .matrices = BESIDE, .scale_each = true},
        {MATRIX_E4M3, MATRIX_E4M3, MATRIX_BF16, .matrices = BELOW, .fast = true,
         .scale_each = true},
        {MATRIX_E5M2, MATRIX_E5M2, MATRIX_F16, .f16 = true, .matrices = BESIDE},
        {MATRIX_E4M3, MATRIX_E4M3, MATRIX_BF16, .bias = true, .blocks = true, .square_b = true},
        {MATRIX_E4M3, MATRIX_E4M3, MATRIX_F32, .blocks = true},
        {MATRIX_E4M3, MATRIX_E4M3, MATRIX_F16, .f16 = true, .blocks = true, .square_a = true},
        {MATRIX_E5M2, MATRIX_E4M3, MATRIX_BF16, .bias = true, .row_scales = true, .fast = true},
        {MATRIX_E4M3, MATRIX_E5M2, MATRIX_BF16, .row_scales = true},
        {MATRIX_E4M3, MATRIX_E4M3, MATRIX_F32, .residual = true, .row_scales = true, .fast = true},
    };
    (void)state;
    need_compiler();
    for (int tile = 0; tile < DW__SM90_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(forms); i++) {
            call c;
            open_call(&forms[i], dw__sm90_tiles[tile].m + 61,
                      dw__sm90_tiles[tile].n + (i % 2 ? 37 : 40), 400, false, 70 + i, &c);
            if (run_tile(&c, tile)) check_call(&c);
            close_call(&c);
        }
    print_message("largest error: %.3f of its bound\n", worst_share);
}

/* One row, one column, a contraction within a step, no row at all. */
static void small_calls_are_right(void **state) {
    static const form dense = {.a = MATRIX_E4M3, .b = MATRIX_E5M2, .d = MATRIX_F32},
                      groups = {MATRIX_E4M3, MATRIX_E4M3, MATRIX_BF16, .matrices = BELOW};
    static const struct { int m, n, k; } sizes[] = {{1, 1, 16}, {7, 33, 128}, {65, 8, 144}};
    (void)state;
    need_compiler();
    for (size_t i = 0; i < DW_COUNT(sizes); i++)
        for (int grouped = 0; grouped < 2; grouped++) {
            call c;
            open_call(grouped ? &groups : &dense, sizes[i].m, sizes[i].n, sizes[i].k, false, 3 + i,
                      &c);
            assert_true(run_tile(&c, 0));
            check_call(&c);
            close_call(&c);
        }
}

/* Returns the largest relative error of products of positive numbers, whose truncations all have one sign. */
static double error_of_long_sums(bool fast) {
    const form f = {MATRIX_E4M3, MATRIX_E4M3, MATRIX_F32, .fast = fast};
    double worst = 0;
    call c;
    open_call(&f, 16, 24, 4096, true, 11, &c);
    run_tile(&c, 1);
    check_call(&c);
    for (int i = 0; i < c.m; i++)
        for (int j = 0; j < c.n; j++) {
            const double right = 0.75 * (double)c.scales[0] * c.scales[1] * sum_of(&c, i, j).value;
            worst = fmax(worst, fabs(get(&c.d, i, j) - right) / right);
        }
    close_call(&c);
    return worst;
}

/* The sums of 128 products lose 2^-13 of themselves in each of 4 instructions and less in most terms; a sum of 4096 in
 * the tensor cores loses it in each of 128. */
static void two_levels_are_more_exact(void **state) {
    (void)state;
    need_compiler();
    const double fast = error_of_long_sums(true), two_levels = error_of_long_sums(false);
    print_message("K = 4096, largest relative error: %.2e in two levels, %.2e fast\n", two_levels,
                  fast);
    assert_true(two_levels < 0x1p-10);
    assert_true(fast > 4 * two_levels);
}

/* ---- the first-use check and the entry --------------------------------------------------------------- */

static dw__operation_call segments_call(bool side_by_side, dw_dtype result, dw_attr *dtype) {
    enum { R = 40, E = 3, N = 24, K = 48 };
    *dtype = (dw_attr){.key = DW_ATTR_KEY_DTYPE, .integer = result};
    dw__operation_call call = {
        .call = {.op = DW_OP_SEGMENT_MULTIPLY_CODES,
                 .attr_count = 1,
                 .attrs = dtype,
                 .input_count = 5,
                 .output_count = 1,
                 .inputs = {{.dtype = DW_E4M3, .rank = 2, .shape = {R, K}},
                            {.dtype = DW_E4M3,
                             .rank = 2,
                             .shape = {side_by_side ? N : E * N, side_by_side ? E * K : K}},
                            {.dtype = DW_I32, .rank = 1, .shape = {E + 1}},
                            {.dtype = DW_F32},
                            {.dtype = DW_F32}},
                 .outputs = {{.dtype = result, .rank = 2, .shape = {R, N}}}}};
    for (int i = 0; i < 5; i++) dw__tensor_set_contiguous(&call.call.inputs[i]);
    dw__tensor_set_contiguous(&call.call.outputs[0]);
    return call;
}

static void keep_correct(void) {
    const dw__context *context;
    dw_attr dtype;
    REQUIRE(device_named(gpu)->context(&context) == DW_OK);
    dw__operation_call call = segments_call(true, DW_BF16, &dtype);
    REQUIRE(dw__sm90_codes.supports(&dw__sm90_codes, &call, NULL) == DW_OK);
    REQUIRE(dw__gpu_kernel_runs(&dw__sm90_codes, &call, context) == DW_OK);
    REQUIRE(lines == 0);
}
static void correct_kernels_pass(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_correct);
}

/* The sums of all steps but the last are lost. */
static void keep_last_step(void) {
    static const char added[] = "sums_of[i] += products[i];", lost[] = "sums_of[i]  = products[i];";
    const dw__context *context;
    dw__text source = {0};
    dw_attr dtype;
    void *image;
    size_t bytes;
    REQUIRE(device_named(gpu)->context(&context) == DW_OK);
    dw__operation_call call = segments_call(false, DW_F32, &dtype);
    const dw__gemm_groups_call made = {
        .gemm = {.dtype = DW_BF16, .output = DW_F32, .m = 40, .n = 24, .k = 48},
        .groups = {.kind = DW_GROUPS_ROWS, .count = 3},
        .codes = {.a = DW_E4M3, .b = DW_E4M3}};
    const dw__sm90_shape shape = dw__sm90_shape_of(&made, context->sm_count);
    const dw__jit_variant variant = dw__sm90_variant(&shape);
    REQUIRE(dw__jit_expand(variant.source, &source) == DW_OK);
    char *const at = strstr(source.text, added);
    REQUIRE(at);
    memcpy(at, lost, strlen(lost));
    REQUIRE(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL) == DW_OK);
    dw__text_free(&source);
    carry(name_of(&variant), image);
    REQUIRE(dw__gpu_kernel_runs(&dw__sm90_codes, &call, context) == DW_UNSUPPORTED);
    REQUIRE(strstr(dw_last_error(), "is not used"));
}
static void wrong_kernels_are_rejected(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_last_step);
}

static void expect_refused(dw__operation_call *call, const char *why) {
    assert_int_equal(dw__sm90_codes.supports(&dw__sm90_codes, call, NULL), DW_UNSUPPORTED);
    if (!strstr(dw_last_error(), why)) fail_msg("%s: expected %s", dw_last_error(), why);
}

static void other_layouts_are_refused(void **state) {
    (void)state;
    dw_attr dtype;
    dw__operation_call call = segments_call(false, DW_BF16, &dtype);
    assert_int_equal(dw__sm90_codes.supports(&dw__sm90_codes, &call, NULL), DW_OK);
    call.call.inputs[0].shape[1] = call.call.inputs[1].shape[1] = 40;
    expect_refused(&call, "rows of 40 codes; expected multiples of 16");
    call = segments_call(false, DW_BF16, &dtype);
    call.call.outputs[0].shape[1] = call.call.outputs[0].stride[0] = 23;
    expect_refused(&call, "rows of 46 bytes of the result");
    call = segments_call(false, DW_F32, &dtype);
    dw__multiply_codes_example(DW_E4M3, DW_E5M2, DW_F32, 8, 8, 32, &call.call);
    assert_int_equal(dw__sm90_codes.supports(&dw__sm90_codes, &call, NULL), DW_OK);
    dw__multiply_codes_add_bias(&call.call);
    expect_refused(&call, "a contiguous bias in 16 bits");
}

/* The entry before cuBLASLt is for fast accumulation, a result in 16 bits, and tiles for all SMs. */
static void fast_calls_come_first(void **state) {
    const dw__kernel *const *each = dw__kernel_candidates(DW_OP_MULTIPLY_CODES, true);
    const dw__gpu_target gpu = {.capability = 90, .sm_count = 132, .name = "an H200"};
    const dw__kernel *kernel = &dw__sm90_codes_fast;
    dw_attr attrs[] = {{.key = DW_ATTR_KEY_DTYPE, .integer = DW_BF16},
                       {.key = DW_ATTR_KEY_FAST_ACCUMULATION, .integer = 1}};
    dw__operation_call call = {0};
    (void)state;
    while (*each != kernel && *each != &dw__graph_cublaslt) each++;
    assert_ptr_equal(*each, kernel);
    dw__multiply_codes_example(DW_E4M3, DW_E5M2, DW_BF16, 4096, 2048, 512, &call.call);
    assert_int_equal(kernel->supports(kernel, &call, &gpu), DW_TYPE); /* not fast */
    call.call.attrs = attrs;
    call.call.attr_count = 2;
    assert_int_equal(kernel->supports(kernel, &call, &gpu), DW_OK);
    dw__multiply_codes_add_bias(&call.call);
    assert_int_equal(kernel->supports(kernel, &call, &gpu), DW_TYPE);
    dw__multiply_codes_example(DW_E4M3, DW_E5M2, DW_F32, 4096, 2048, 512, &call.call);
    attrs[0].integer = DW_F32;
    call.call.attrs = attrs;
    call.call.attr_count = 2;
    assert_int_equal(kernel->supports(kernel, &call, &gpu), DW_TYPE);
    dw__multiply_codes_example(DW_E4M3, DW_E5M2, DW_BF16, 512, 512, 512, &call.call);
    attrs[0].integer = DW_BF16;
    call.call.attrs = attrs;
    call.call.attr_count = 2;
    assert_int_equal(kernel->supports(kernel, &call, &gpu), DW_UNSUPPORTED);
    if (!strstr(dw_last_error(), "expected at least 132")) fail_msg("%s", dw_last_error());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_pass),      cmocka_unit_test(wrong_kernels_are_rejected),
        cmocka_unit_test(each_form_is_right),        cmocka_unit_test(small_calls_are_right),
        cmocka_unit_test(two_levels_are_more_exact), cmocka_unit_test(other_layouts_are_refused),
        cmocka_unit_test(fast_calls_come_first),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
