/* The GEMM of Hopper (cuda/sm90/sm90_gemm.cu) through the library on an emulated one, with the checker on, compared
 * with sums in double. Kernels are compiled when they are first used. */
#include "library_gemm.h"

static const char gpu[] = "emulator:sm_90a";

/* A GPU with so few SMs that blocks compute several tiles. */
static dw__context few_sms(void) {
    const dw__context *context;
    assert_int_equal(device_named(gpu)->context(&context), DW_OK);
    dw__context few = *context;
    few.sm_count = 2;
    return few;
}

static void small_calls_are_right(void **state) {
    (void)state;
    expect_small_calls_right(gpu);
}

/* Every tile with every form of its epilogue and operands. */
static void each_tile_is_right(void **state) {
    static const struct {
        int f16, f32_output, bias, residual, turned_a, turned_b;
        dw_activation activation;
    } forms[] = {
        {0, 0, 0, 0, 0, 0, DW_ACTIVATION_NONE},      {1, 0, 1, 1, 0, 0, DW_ACTIVATION_SWIGLU},
        {0, 1, 1, 1, 0, 0, DW_ACTIVATION_GELU_TANH}, {0, 1, 0, 1, 0, 0, DW_ACTIVATION_SWIGLU},
        {0, 0, 0, 0, 0, 1, DW_ACTIVATION_NONE},      {1, 1, 0, 0, 1, 1, DW_ACTIVATION_NONE},
        {0, 0, 1, 1, 1, 0, DW_ACTIVATION_NONE},      {1, 0, 0, 0, 1, 1, DW_ACTIVATION_GELU}};
    const dw_device *device = device_named(gpu);
    (void)state;
    need_compiler();
    dw__context few = few_sms();
    for (int tile = 0; tile < DW__SM90_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(forms); i++) {
            const dw__variant *variant;
            if (dw__sm90_tiles[tile].together && forms[i].f32_output) continue;
            problem p = {.m = dw__sm90_tiles[tile].m + 61,
                         .n = dw__sm90_tiles[tile].n + 37,
                         .k = 459,
                         .f16 = forms[i].f16,
                         .f32_output = forms[i].f32_output,
                         .bias = forms[i].bias,
                         .residual = forms[i].residual,
                         .turned_a = forms[i].turned_a,
                         .turned_b = forms[i].turned_b,
                         .integers = i % 2,
                         .activation = forms[i].activation,
                         .seed = 40 + i};
            run r;
            open_run(&p, device, &r);
            const dw__gemm_groups_call call = {
                .gemm = r.call, .turned = {p.turned_a, p.turned_b}, .groups = {.count = 1}};
            assert_int_equal(dw__gemm_check_turned(&r.call, call.turned, true), DW_OK);
            dw__sm90_shape shape = dw__sm90_shape_of(&call, few.sm_count);
            shape.tile = (uint64_t)tile;
            if (dw__variant_of(&few, &dw__sm90_gemm, shape.params, &variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            if (dw__sm90_gemm.enqueue(&r.call, &few, variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            check(&p, &r);
            close_run(&r);
        }
}

static void residual_may_be_d(void **state) {
    (void)state;
    expect_residual_may_be_d(gpu);
}

/* ---- norms of rows ------------------------------------------------------------------------------------- */

/* Each of the n additions in F32 has an error of at most 2^-24 of the sum. `norm`: 1 / sqrt(sum / n + epsilon), in
 * which four more operations are rounded. */
static void check_squares(run *r) {
    const int n = r->d.columns;
    fetch(&r->row_squares, r->device);
    for (int row = 0; row < r->d.rows; row++) {
        const double found = get(&r->row_squares, 0, row);
        double sum = 0.0;
        for (int j = 0; j < n; j++) sum += (double)get(&r->d, row, j) * (double)get(&r->d, row, j);
        const double expected =
            r->call.row_norm ? 1.0 / sqrt(sum / n + (double)r->call.row_epsilon) : sum;
        if (!(fabs(found - expected) <= (n + 6) * 0x1p-24 * expected))
            fail_msg("row %d of %d columns: %.9g, not %.9g", row, n, found, expected);
    }
    expect_untouched(&r->row_squares, 0);
}

static void give_workspace(run *r, size_t bytes) {
    r->call.workspace_bytes = bytes;
    assert_int_equal(dw_device_allocate(r->device, bytes, &r->call.workspace), DW_OK);
}

static void run_call(run *r) {
    if (dw_gemm_run(&r->call) != DW_OK) fail_msg("%s", dw_last_error());
}

/* Every tile, with factors, with squares, and with both; blocks that compute several tiles. */
static void rows_have_factors_and_squares(void **state) {
    static const struct {
        int f16, f32_output, bias, residual, scale, squares;
        dw_activation activation;
    } forms[] = {{0, 0, 0, 1, 0, 1, DW_ACTIVATION_NONE},
                 {1, 0, 1, 1, 1, 1, DW_ACTIVATION_NONE},
                 {0, 0, 1, 0, 1, 1, DW_ACTIVATION_SWIGLU},
                 {0, 1, 1, 0, 1, 0, DW_ACTIVATION_GELU}};
    const dw_device *device = device_named(gpu);
    (void)state;
    need_compiler();
    dw__context few = few_sms();
    for (int tile = 0; tile < DW__SM90_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(forms); i++) {
            const dw__variant *variant;
            if (dw__sm90_tiles[tile].together && forms[i].f32_output) continue;
            problem p = {.m = 2 * dw__sm90_tiles[tile].m + 61,
                         .n = dw__sm90_tiles[tile].n + 37,
                         .k = 200,
                         .f16 = forms[i].f16,
                         .f32_output = forms[i].f32_output,
                         .bias = forms[i].bias,
                         .residual = forms[i].residual,
                         .row_scale = forms[i].scale,
                         .row_squares = forms[i].squares,
                         .activation = forms[i].activation,
                         .seed = 70 + i};
            run r;
            size_t bytes;
            open_run(&p, device, &r);
            assert_int_equal(dw__sm90_gemm.workspace_bytes(&dw__sm90_gemm, &r.call, &few, &bytes),
                             DW_OK);
            assert_true((bytes > 0) == p.row_squares);
            if (bytes > 0) give_workspace(&r, bytes);
            const dw__gemm_groups_call call = {.gemm = r.call, .groups = {.count = 1}};
            dw__sm90_shape shape = dw__sm90_shape_of(&call, few.sm_count);
            shape.tile = (uint64_t)tile;
            if (dw__variant_of(&few, &dw__sm90_gemm, shape.params, &variant) != DW_OK ||
                dw__sm90_gemm.enqueue(&r.call, &few, variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            check(&p, &r);
            if (p.row_squares) check_squares(&r);
            if (bytes > 0) dw_device_release(device, r.call.workspace, bytes);
            close_run(&r);
        }
}

/* An RMSNorm between two products without a pass of its own. The sums have the same bits in every run. */
static void a_norm_lies_between_two_products(void **state) {
    static const problem first = {.m = 150,
                                  .n = 264,
                                  .k = 72,
                                  .residual = true,
                                  .row_squares = true,
                                  .seed = 3},
                         second = {.m = 150, .n = 40, .k = 264, .row_scale = true, .seed = 5};
    run a, b;
    char before[600];
    size_t bytes = 0;
    (void)state;
    need_compiler();
    open_run(&first, device_named(gpu), &a);
    open_run(&second, device_named(gpu), &b);
    a.call.row_norm = 1;
    a.call.row_epsilon = 1e-5f;
    assert_int_equal(dw_gemm_workspace(&a.call, &bytes), DW_OK);
    assert_int_equal(dw_gemm_run(&a.call), DW_INVALID_ARGUMENT); /* no workspace */
    give_workspace(&a, bytes);
    run_call(&a);
    check(&first, &a);
    check_squares(&a);
    assert_true(sizeof before >= 150 * sizeof(float));
    memcpy(before, a.row_squares.host, 150 * sizeof(float));
    run_call(&a);
    check_squares(&a);
    assert_memory_equal(before, a.row_squares.host, 150 * sizeof(float));
    b.call.a = a.call.d;
    b.call.row_scale = a.call.row_squares;
    run_call(&b);
    for (int i = 0; i < 150; i++) set(&b.row_scale, 0, i, get(&a.row_squares, 0, i));
    for (int i = 0; i < 150; i++)
        for (int j = 0; j < 264; j++) set(&b.a, i, j, get(&a.d, i, j));
    check(&second, &b);
    dw_device_release(a.device, a.call.workspace, bytes);
    close_run(&a);
    close_run(&b);
}

static void expect_failure(const run *r, const dw_gemm *call, dw_status status, const char *part) {
    (void)r;
    assert_int_equal(dw_gemm_supported(call), status);
    if (!strstr(dw_last_error(), part)) fail_msg("%s", dw_last_error());
}

static void mistakes_with_rows_are_reported(void **state) {
    static const problem p = {.m = 30, .n = 40, .k = 64, .row_squares = true, .seed = 3};
    run r;
    (void)state;
    need_compiler();
    open_run(&p, device_named(gpu), &r);
    dw_gemm call = r.call;
    call.row_norm = 2;
    expect_failure(&r, &call, DW_INVALID_ARGUMENT, "row_norm is 2");
    call = r.call;
    call.row_epsilon = -1.0f;
    expect_failure(&r, &call, DW_INVALID_ARGUMENT, "row_epsilon is -1");
    call = r.call;
    call.output = DW_F32;
    expect_failure(&r, &call, DW_UNSUPPORTED, "row_squares");
    call = r.call;
    call.device = device_named("emulator:sm_100a");
    expect_failure(&r, &call, DW_UNSUPPORTED, "row_squares is for sm90_gemm");
    /* The members before came first: a program that was built for these alone has no norms. */
    call.device = r.device;
    call.struct_size = offsetof(dw_gemm, row_scale);
    call.row_norm = 2;
    assert_int_equal(dw_gemm_supported(&call), DW_OK);
    close_run(&r);
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

static const problem small_one = {.m = 67, .n = 41, .k = 129, .bias = true, .seed = 4};

static void keep_correct(void) {
    static const problem others[] = {
        {.m = 5, .n = 9, .k = 70, .f16 = true, .activation = DW_ACTIVATION_SWIGLU, .seed = 9},
        {.m = 5, .n = 9, .k = 70, .f32_output = true, .residual = true, .seed = 9},
        {.m = 5, .n = 9, .k = 70, .row_scale = true, .residual = true, .seed = 9}};
    dw__context few = few_sms();
    const dw__variant *variant;
    run r;
    open_run(&small_one, device_named(gpu), &r);
    REQUIRE(dw_gemm_supported(&r.call) == DW_OK && dw_gemm_run(&r.call) == DW_OK);
    check(&small_one, &r);
    for (size_t i = 0; i < DW_COUNT(others); i++) expect_right(&others[i], gpu);
    const dw__gemm_turned turned = {true, true};
    r.call.a.stride = r.call.b.stride = 72;
    REQUIRE(dw__sm90_prepare(&r.call, turned, &few, &variant) == DW_OK && !variant->disabled);
    REQUIRE(lines == 0);
    close_run(&r);
}
static void correct_kernels_pass(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_correct);
}

/* Stages are read before they have arrived: the kernel is refused, the reference computes the call, and the log says so
 * once. */
static void keep_without_wait(void) {
    run r;
    dw__text source = {0};
    void *image;
    size_t bytes;
    open_run(&small_one, device_named(gpu), &r);
    const dw__gemm_groups_call call = {.gemm = r.call, .groups = {.count = 1}};
    const dw__sm90_shape shape = dw__sm90_shape_of(&call, 132);
    const dw__jit_variant variant = dw__sm90_variant(&shape);
    REQUIRE(dw__jit_expand(variant.source, &source) == DW_OK);
    char *const wait = strstr(source.text, "barrier_wait(s.full + 8 * r.stage, r.phase);");
    REQUIRE(wait);
    memset(wait, ' ', strlen("barrier_wait(s.full + 8 * r.stage, r.phase);"));
    REQUIRE(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL) == DW_OK);
    dw__text_free(&source);
    carry(name_of(&variant), image);
    REQUIRE(dw_gemm_supported(&r.call) == DW_UNSUPPORTED);
    REQUIRE(strstr(dw_last_error(), "is not used"));
    for (int i = 0; i < 2; i++) {
        REQUIRE(dw_gemm_run(&r.call) == DW_OK);
        check(&small_one, &r);
    }
    REQUIRE(lines == 1 && strstr(logged, "failed on Deepwell emulator of sm_90a"));
    close_run(&r);
}
static void wrong_kernels_are_rejected(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_without_wait);
}

/* ---- selection ------------------------------------------------------------------------------------------- */

static int columns_of_tile(int kind, int64_t m, int64_t n, int64_t k, int64_t groups,
                           dw_activation activation) {
    const dw__gemm_groups_call call = {
        .gemm =
            {.dtype = DW_BF16, .output = DW_BF16, .m = m, .n = n, .k = k, .activation = activation},
        .groups = {.kind = kind, .count = groups}};
    const dw__sm90_shape shape = dw__sm90_shape_of(&call, 132);
    return dw__sm90_tiles[shape.tile].n * (dw__sm90_tiles[shape.tile].m == 64 ? -1 : 1);
}

static void tile_fits_the_call(void **state) {
    const dw_activation none = DW_ACTIVATION_NONE;
    (void)state;
    assert_int_equal(columns_of_tile(DW_GROUPS_BATCH, 8192, 8192, 8192, 1, none), 256);
    assert_int_equal(columns_of_tile(DW_GROUPS_BATCH, 16384, 768, 768, 1, none), 256);
    assert_int_equal(columns_of_tile(DW_GROUPS_CONTRACTION, 2048, 2048, 65536, 64, none), 256);
    assert_int_equal(columns_of_tile(DW_GROUPS_ROWS, 16384, 14336, 4096, 8, none), 256);
    /* 72 tiles of 256 columns leave 60 of 132 SMs idle. */
    assert_int_equal(columns_of_tile(DW_GROUPS_BATCH, 768, 3072, 16384, 1, none), 192);
    /* An activation of many instructions takes less time while the other warpgroup multiplies. */
    assert_int_equal(columns_of_tile(DW_GROUPS_BATCH, 8192, 8192, 2048, 1, DW_ACTIVATION_GELU),
                     128);
    /* A warpgroup without rows leaves the tensor cores to the other one. */
    assert_int_equal(columns_of_tile(DW_GROUPS_ROWS, 4096, 2048, 2048, 64, none), 256);
    /* In turn, tiles of 128 rows would be half empty. */
    assert_int_equal(columns_of_tile(DW_GROUPS_ROWS, 4096, 2048, 2048, 64, DW_ACTIVATION_GELU),
                     -256);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(correct_kernels_pass),
        cmocka_unit_test(wrong_kernels_are_rejected),
        cmocka_unit_test(small_calls_are_right),
        cmocka_unit_test(each_tile_is_right),
        cmocka_unit_test(residual_may_be_d),
        cmocka_unit_test(tile_fits_the_call),
        cmocka_unit_test(rows_have_factors_and_squares),
        cmocka_unit_test(a_norm_lies_between_two_products),
        cmocka_unit_test(mistakes_with_rows_are_reported),

    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
