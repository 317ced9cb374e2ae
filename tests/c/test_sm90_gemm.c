/* The GEMM of Hopper (cuda/sm90/sm90_gemm.cu) through the library on an emulated one, with the checker on, compared
 * with sums in double. Kernels are compiled when they are first used. */
#include "kernel/cuda/gpu_kernels.h"
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
    int made[DW__SM90_TILES] = {0};
    for (int tile = 0; tile < DW__SM90_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(forms); i++) {
            const dw__variant *variant;
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
            if (dw__sm90_exists(&shape)) {
                if (dw__variant_of(&few, &dw__sm90_gemm, shape.params, &variant) != DW_OK ||
                    dw__sm90_gemm.enqueue(&r.call, &few, variant) != DW_OK)
                    fail_msg("%s", dw_last_error());
                check(&p, &r);
                made[tile]++;
            }
            close_run(&r);
        }
    for (int tile = 0; tile < DW__SM90_TILES; tile++) assert_true(made[tile] >= 2);
}

/* Tiles that clusters compute: parts of no step, of unequal lengths, of no whole step; strips without columns, and half of
 * a tile without rows. Results have the same bits in each run. */
static void clusters_share_tiles(void **state) {
    static const problem cases[] = {
        {.m = 3, .n = 5, .k = 7, .bias = true},
        {.m = 64, .n = 96, .k = 64, .residual = true, .integers = true},
        {.m = 130, .n = 200, .k = 459, .f32_output = true, .residual = true, .bias = true},
        {.m = 70, .n = 129, .k = 1000, .turned_a = true, .turned_b = true, .residual = true}};
    const dw_device *device = device_named(gpu);
    dw__context few = few_sms();
    (void)state;
    need_compiler();
    for (int tile = 0; tile < DW__SM90_TILES; tile++)
        for (size_t i = 0; i < DW_COUNT(cases); i++) {
            const dw__variant *variant;
            problem p = cases[i];
            run r;
            if (dw__sm90_tiles[tile].cluster < 1 ||
                (p.turned_b && dw__sm90_tiles[tile].n % 64 != 0))
                continue;
            p.seed = 110 + i;
            open_run(&p, device, &r);
            dw__gemm_groups_call call = {
                .gemm = r.call, .turned = {p.turned_a, p.turned_b}, .groups = {.count = 1}};
            assert_int_equal(dw__gemm_check_turned(&r.call, call.turned, true), DW_OK);
            dw__sm90_shape shape = dw__sm90_shape_of(&call, few.sm_count);
            shape.tile = (uint64_t)tile;
            assert_true(dw__sm90_exists(&shape));
            if (dw__variant_of(&few, &dw__sm90_gemm, shape.params, &variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            void *first = malloc(r.d.bytes);
            assert_non_null(first);
            for (int launch = 0; launch < 2; launch++) {
                memset(r.d.host, 0xFF, r.d.bytes);
                send(&r.d, device);
                if (dw__sm90_enqueue(&call, &few, variant) != DW_OK)
                    fail_msg("%s", dw_last_error());
                check(&p, &r);
                if (launch == 0) memcpy(first, r.d.host, r.d.bytes);
            }
            assert_memory_equal(first, r.d.host, r.d.bytes);
            free(first);
            close_run(&r);
        }
}

static const problem few_tiles = {.m = 70, .n = 72, .k = 32000, .bias = true, .seed = 90};

/* ---- tiles whose contraction blocks share ------------------------------------------------------------- */

/* Enqueues a variant with `split` on a GPU of `sm_count` SMs. The workspace has any contents. */
static size_t run_split(run *r, const dw__context *on, int tile, void **workspace) {
    const problem *p = r->problem;
    const dw__variant *variant;
    dw__gemm_groups_call call = {
        .gemm = r->call, .turned = {p->turned_a, p->turned_b}, .groups = {.count = 1}};
    assert_int_equal(dw__gemm_check_turned(&r->call, call.turned, true), DW_OK);
    dw__sm90_shape shape = dw__sm90_shape_of(&call, on->sm_count);
    shape.tile = (uint64_t)tile;
    shape.split = true;
    const dw__sm90_split split = dw__sm90_split_of(&call, &shape, on->sm_count);
    assert_true(split.blocks > 1 && split.blocks <= on->sm_count);
    if (!*workspace) {
        assert_int_equal(r->device->allocate(split.bytes, workspace), DW_OK);
        assert_int_equal(r->device->fill(*workspace, 0xa5, split.bytes), DW_OK);
    }
    if (dw__variant_of(on, &dw__sm90_gemm, shape.params, &variant) != DW_OK)
        fail_msg("%s", dw_last_error());
    call.gemm.workspace = *workspace;
    call.gemm.workspace_bytes = split.bytes;
    if (dw__sm90_enqueue(&call, on, variant) != DW_OK) fail_msg("%s", dw_last_error());
    return split.bytes;
}

static void blocks_share_tiles(void **state) {
    static const struct {
        problem p;
        int sm_count, tile; /* its columns */
    } cases[] = {
        /* one tile: more blocks than steps, and parts of unequal lengths, the last of no whole step */
        {{.m = 70, .n = 90, .k = 130}, 16, 128},
        {{.m = 128, .n = 128, .k = 999, .integers = true}, 7, 128},
        /* three tiles for five blocks, with every kind of epilogue */
        {{.m = 300, .n = 100, .k = 459, .residual = true, .bias = true}, 5, 256},
        {{.m = 300, .n = 100, .k = 459, .f32_output = true, .residual = true, .bias = true},
         5,
         192},
        {{.m = 300,
          .n = 100,
          .k = 459,
          .f16 = true,
          .bias = true,
          .residual = true,
          .activation = DW_ACTIVATION_SWIGLU},
         5,
         256},
        /* a whole round of tiles, and one tile that all blocks share */
        {{.m = 140, .n = 300, .k = 330, .turned_a = true, .turned_b = true}, 3, 192},
        {{.m = 140, .n = 300, .k = 330, .f32_output = true, .activation = DW_ACTIVATION_GELU},
         3,
         256},
        /* two blocks for each tile; half of a tile has no rows */
        {{.m = 60, .n = 200, .k = 512, .turned_b = true, .residual = true, .integers = true},
         5,
         128},
    };
    (void)state;
    need_compiler();
    const dw_device *device = device_named(gpu);
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        problem p = cases[i].p;
        dw__context some = few_sms();
        void *workspace = NULL;
        int tile = 0;
        run r;
        p.seed = 70 + i;
        some.sm_count = cases[i].sm_count;
        while (dw__sm90_tiles[tile].m != 128 || dw__sm90_tiles[tile].n != cases[i].tile) tile++;
        open_run(&p, device, &r);
        const size_t workspace_bytes = run_split(&r, &some, tile, &workspace);
        check(&p, &r);
        void *first = malloc(r.d.bytes), *stream, *graph = NULL;
        assert_non_null(first);
        memcpy(first, r.d.host, r.d.bytes);
        /* The same bits again, from a graph, which finds the workspace as the launch before has left it. */
        assert_int_equal(device->stream_create(&stream), DW_OK);
        r.call.stream = stream;
        assert_int_equal(device->graph_begin(stream), DW_OK);
        (void)run_split(&r, &some, tile, &workspace);
        assert_int_equal(device->graph_end(stream, &graph), DW_OK);
        for (int launch = 0; launch < 2; launch++) {
            memset(r.d.host, 0xFF, r.d.bytes);
            send(&r.d, device);
            assert_int_equal(device->graph_launch(graph, stream), DW_OK);
            assert_int_equal(device->stream_synchronize(stream), DW_OK);
            fetch(&r.d, device);
            assert_memory_equal(first, r.d.host, r.d.bytes);
        }
        device->graph_destroy(graph);
        device->stream_destroy(stream);
        device->release(workspace, workspace_bytes);
        free(first);
        close_run(&r);
    }
}

/* The public call shares tiles if it is given the workspace that it asks for. */
static void workspace_is_optional(void **state) {
    static const problem many_tiles = {.m = 4096, .n = 8192, .k = 512};
    (void)state;
    need_compiler();
    const dw_device *device = device_named(gpu);
    size_t bytes = 1;
    const dw_gemm many = {.struct_size = sizeof many,
                          .device = device,
                          .dtype = DW_BF16,
                          .output = DW_BF16,
                          .m = many_tiles.m,
                          .n = many_tiles.n,
                          .k = many_tiles.k,
                          .alpha = 1,
                          .a = {NULL, 512},
                          .b = {NULL, 512},
                          .d = {NULL, 8192}};
    assert_int_equal(dw_gemm_workspace(&many, &bytes), DW_OK);
    assert_int_equal(bytes, 0);
    run r;
    open_run(&few_tiles, device, &r);
    assert_int_equal(dw_gemm_workspace(&r.call, &bytes), DW_OK);
    assert_true(bytes > 0);
    for (int given = 0; given < 3; given++) { /* none, too little, enough */
        void *workspace = NULL;
        if (given > 0) assert_int_equal(device->allocate(bytes, &workspace), DW_OK);
        if (given > 0) assert_int_equal(device->fill(workspace, 0, bytes), DW_OK);
        r.call.workspace = workspace;
        r.call.workspace_bytes = given == 1 ? bytes - 1 : bytes;
        send(&r.d, device);
        if (dw_gemm_run(&r.call) != DW_OK) fail_msg("%s", dw_last_error());
        check(&few_tiles, &r);
        if (given == 0) continue;
        /* Sums of parts are left in it by a split alone. */
        char *used = malloc(bytes);
        assert_non_null(used);
        assert_int_equal(device->copy_out(used, workspace, bytes, NULL), DW_OK);
        bool wrote = false;
        for (size_t i = 0; i < bytes; i++) wrote |= used[i] != 0;
        assert_int_equal(wrote, given == 2);
        free(used);
        device->release(workspace, bytes);
    }
    close_run(&r);
}

/* A matmul of a plan gets the workspace, and its rows may run across the contraction. */
static void plans_share_tiles(void **state) {
    const problem p = {
        .m = 72, .n = 64, .k = 32100, .turned_a = true, .turned_b = true, .seed = 91};
    static const dw_attr across = {.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = 1};
    const dw__context *context;
    const dw__variant *variant;
    const dw_device *device = device_named(gpu);
    size_t bytes = 0;
    run r;
    (void)state;
    need_compiler();
    assert_int_equal(device->context(&context), DW_OK);
    open_run(&p, device, &r);
    const dw__kernel *kernel = &dw__graph_gemm_hopper;
    dw__operation_call call = {.call = {.op = DW_OP_MATMUL,
                                        .attr_count = 1,
                                        .attrs = &across,
                                        .input_count = 2,
                                        .output_count = 1,
                                        .inputs = {{.dtype = DW_BF16,
                                                    .rank = 2,
                                                    .data = r.a.device,
                                                    .shape = {p.k, p.m},
                                                    .stride = {r.call.a.stride, 1}},
                                                   {.dtype = DW_BF16,
                                                    .rank = 2,
                                                    .data = r.b.device,
                                                    .shape = {p.k, p.n},
                                                    .stride = {r.call.b.stride, 1}}},
                                        .outputs = {{.dtype = DW_BF16,
                                                     .rank = 2,
                                                     .data = r.d.device,
                                                     .shape = {p.m, p.n},
                                                     .stride = {r.call.d.stride, 1}}}}};
    assert_int_equal(kernel->workspace_bytes(kernel, &call, context, &bytes), DW_OK);
    assert_true(bytes > 0);
    assert_int_equal(device->allocate(bytes, &call.workspace), DW_OK);
    if (kernel->prepare(kernel, &call, context, &variant) != DW_OK) fail_msg("%s", dw_last_error());
    const dw__sm90_shape shape = {.params = variant->params};
    assert_true(shape.split && shape.turned_a && shape.turned_b);
    if (kernel->enqueue(&call, context, variant) != DW_OK) fail_msg("%s", dw_last_error());
    r.call.alpha = 1;
    check(&p, &r);
    device->release(call.workspace, bytes);
    close_run(&r);
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
            if (dw__sm90_tiles[tile].cluster > 0 ||
                (dw__sm90_tiles[tile].together && forms[i].f32_output))
                continue;
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

/* ---- codes of D --------------------------------------------------------------------------------------- */

/* Codes of fp8-block of D's rows or, if `turned`, of its columns, with every byte of their memory. */
typedef struct block_codes {
    int lines, count, row, blocks; /* codes of a line, bytes with zeros, scales */
    matrix codes, scales;
} block_codes;

static void place_block_codes(block_codes *b, const dw_device *device, int lines, int count) {
    *b = (block_codes){.lines = lines, .count = count, .row = (int)dw__gemm_code_row(count)};
    b->blocks = (count + DW_FP8_BLOCK_SIDE - 1) / DW_FP8_BLOCK_SIDE;
    place(&b->codes, device, lines, b->row, MATRIX_E4M3);
    place(&b->scales, device, 1, b->blocks * lines, MATRIX_F32);
    send(&b->codes, device);
    send(&b->scales, device);
}
static void take_block_codes(block_codes *b, const dw_device *device) {
    take_away(&b->codes, device);
    take_away(&b->scales, device);
}

/* Compares every byte with those that dw_block_quantize makes of the numbers of D. */
static void check_block_codes(block_codes *b, const dw_device *device, const matrix *d, int axis) {
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    dw_block_layout layout = {0};
    const size_t count = (size_t)d->rows * (size_t)d->columns;
    float *numbers = calloc(count, sizeof *numbers);
    unsigned char *codes, *found = b->codes.host;
    float *scales;
    options.scheme = DW_SCHEME_FP8_BLOCK;
    options.axis = axis;
    assert_int_equal(dw_block_layout_of(&options, d->rows, d->columns, &layout), DW_OK);
    codes = calloc(1, layout.code_bytes);
    scales = calloc(1, layout.scale_bytes);
    assert_true(numbers && codes && scales);
    for (int i = 0; i < d->rows; i++)
        for (int j = 0; j < d->columns; j++)
            numbers[(size_t)i * (size_t)d->columns + (size_t)j] = (float)get(d, i, j);
    assert_int_equal(
        dw_block_quantize(&options, d->rows, d->columns, numbers, d->columns, codes, 0, scales),
        DW_OK);
    fetch(&b->codes, device);
    fetch(&b->scales, device);
    for (int line = 0; line < b->lines; line++) {
        for (int j = 0; j < b->row; j++) {
            const int at = (int)((size_t)line * b->codes.pitch) + j,
                      expected = j < b->count
                                     ? codes[(size_t)line * (size_t)layout.row_bytes + (size_t)j]
                                     : 0;
            if (found[at] != expected)
                fail_msg("%s %d of %d x %d, code %d is %d, not %d", axis ? "row" : "column", line,
                         d->rows, d->columns, j, found[at], expected);
        }
        for (int block = 0; block < b->blocks; block++) {
            float scale = (float)get(&b->scales, 0, block * b->lines + line),
                  expected = scales[(size_t)line * (size_t)layout.scale_cols + (size_t)block];
            if (memcmp(&scale, &expected, sizeof scale) != 0 && !(isnan(scale) && isnan(expected)))
                fail_msg("%s %d of %d x %d, block %d has the scale %g, not %g",
                         axis ? "row" : "column", line, d->rows, d->columns, block, (double)scale,
                         (double)expected);
        }
        expect_untouched(&b->codes, line);
    }
    expect_untouched(&b->scales, 0);
    free(numbers), free(codes), free(scales);
}

/* Makes some blocks special, by zeros, an infinity, a NaN, and magnitudes whose codes need division. F16 has no such
 * magnitudes. */
static void set_special_rows(run *r) {
    const int m = r->a.rows, k = r->a.columns;
    for (int j = 0; j < k; j++) {
        set(&r->a, 1, j, 0.0f);
        if (r->problem->f16) continue;
        set(&r->a, 4, j, 1e-36f * (float)get(&r->a, 4, j));
        set(&r->a, 5, j, 3e-38f * (float)get(&r->a, 5, j));
        set(&r->a, 6, j, 1e36f * (float)get(&r->a, 6, j));
        for (int i = 128; i < 250 && i < m; i++) set(&r->a, i, j, 1e-30f * (float)get(&r->a, i, j));
        for (int i = 256; i < 384 && i < m; i++) set(&r->a, i, j, 0.0f);
    }
    if (m > 384) return; /* the columns of the last rows are special by size alone */
    set(&r->a, 2, 0, INFINITY);
    set(&r->a, 3, k / 2, NAN);
}

/* The run's call with codes of D's rows, and, if they are wanted, of its columns and D itself. */
static dw_gemm coded_call(const run *r, const dw_device *device, block_codes *rows,
                          block_codes *columns, bool turned, bool plain) {
    const problem *p = r->problem;
    dw_gemm call = r->call;
    place_block_codes(rows, device, p->m, p->n);
    place_block_codes(columns, device, p->n, p->m);
    call.quantized_d = 1;
    call.scheme_d = DW_SCHEME_FP8_BLOCK;
    call.d = matrix_of(&rows->codes);
    call.scales_d = rows->scales.device;
    if (turned) call.turned_d = matrix_of(&columns->codes);
    if (turned) call.turned_scales_d = columns->scales.device;
    if (plain) call.plain_d = r->call.d;
    return call;
}

static void codes_of_d_are_those_of_a_pass(void **state) {
    static const struct {
        problem p;
        bool special;
    } cases[] = {
        {{.m = 300, .n = 290, .k = 200}, false}, /* two SMs: blocks compute several tiles */
        {{.m = 129, .n = 33, .k = 64, .f16 = true, .bias = true}, false},
        {{.m = 300, .n = 135, .k = 72, .bias = true, .activation = DW_ACTIVATION_SWIGLU}, false},
        {{.m = 7, .n = 257, .k = 459, .bias = true, .activation = DW_ACTIVATION_GELU}, false},
        {{.m = 300, .n = 513, .k = 72, .row_scale = true}, true},
        {{.m = 400, .n = 300, .k = 72}, true},
        {{.m = 20, .n = 40, .k = 72, .f16 = true, .activation = DW_ACTIVATION_GELU_TANH}, true},
        {{.m = 70, .n = 9, .k = 0, .bias = true}, false},
    };
    const dw_device *device = device_named(gpu);
    (void)state;
    need_compiler();
    dw__context few = few_sms();
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        problem p = cases[i].p;
        p.seed = 120 + i;
        run r;
        open_run(&p, device, &r);
        if (cases[i].special) set_special_rows(&r);
        send(&r.a, device);
        for (int form = 3; form >= 0; form--) { /* 1: turned, 2: D itself, whose bits come first */
            block_codes rows, columns;
            const dw__variant *variant;
            const dw_gemm call = coded_call(&r, device, &rows, &columns, form & 1, form & 2);
            assert_int_equal(dw__gemm_check(&call, true), DW_OK);
            if (dw__sm90_gemm.prepare(&dw__sm90_gemm, &call, &few, &variant) != DW_OK ||
                dw__sm90_gemm.enqueue(&call, &few, variant) != DW_OK)
                fail_msg("%s", dw_last_error());
            if (form == 3 && !cases[i].special) check(&p, &r);
            fetch(&r.d, device);
            check_block_codes(&rows, device, &r.d, 1);
            if (form & 1) check_block_codes(&columns, device, &r.d, 0);
            take_block_codes(&rows, device);
            take_block_codes(&columns, device);
        }
        close_run(&r);
    }
}

static void mistakes_with_codes_are_reported(void **state) {
    static const problem p = {.m = 30, .n = 40, .k = 64, .seed = 3};
    run r;
    (void)state;
    need_compiler();
    open_run(&p, device_named(gpu), &r);
    dw_gemm good = r.call;
    good.row_squares = NULL;
    good.quantized_d = 1;
    good.scheme_d = DW_SCHEME_FP8_BLOCK;
    good.d.stride = 64;
    assert_int_equal(dw_gemm_supported(&good), DW_OK);
    dw_gemm call = good;
    assert_int_equal(dw_gemm_run(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "scales_d is NULL"));
    call.d.stride = 48; /* rows of 40 codes end with zeros up to 64 */
    expect_failure(&r, &call, DW_INVALID_ARGUMENT, "the rows of D are 48 bytes apart and 64 long");
    call = good;
    call.scheme_d = DW_SCHEME_NVFP4;
    expect_failure(&r, &call, DW_UNSUPPORTED, "scheme_d is nvfp4; expected mxfp8 or fp8-block");
    call = good;
    call.scheme_d = DW_SCHEME_MXFP8;
    expect_failure(&r, &call, DW_UNSUPPORTED, "D of BF16, F16, F32 or fp8-block");
    call.plain_d = call.d;
    expect_failure(&r, &call, DW_INVALID_ARGUMENT, "plain_d is not NULL");
    call = good;
    call.residual = r.call.d;
    expect_failure(&r, &call, DW_UNSUPPORTED, "D is quantized, and there is a residual");
    call = good;
    call.row_squares = r.row_squares.device;
    expect_failure(&r, &call, DW_UNSUPPORTED, "row_squares");
    call = good;
    call.turned_d = (dw_matrix){r.d.device, 16};
    expect_failure(&r, &call, DW_INVALID_ARGUMENT, "turned_d are 16 bytes apart and 32 long");
    call = good;
    call.device = device_named("emulator:sm_100a");
    expect_failure(&r, &call, DW_UNSUPPORTED, "scheme_d fp8-block is for sm90_gemm");
    /* The members before came first. */
    call = r.call;
    call.struct_size = offsetof(dw_gemm, scheme_d);
    call.scheme_d = DW_SCHEME_NVFP4;
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
    close_run(&r);
    /* With a workspace blocks share the tile. */
    open_run(&few_tiles, device_named(gpu), &r);
    REQUIRE(dw_gemm_workspace(&r.call, &r.call.workspace_bytes) == DW_OK);
    REQUIRE(r.device->allocate(r.call.workspace_bytes, &r.call.workspace) == DW_OK);
    REQUIRE(dw_gemm_run(&r.call) == DW_OK);
    check(&few_tiles, &r);
    const dw__gemm_groups_call shared = {.gemm = r.call, .groups = {.count = 1}};
    const dw__sm90_shape shape = dw__sm90_shape_of(&shared, 132);
    REQUIRE(shape.split && dw__variant_of(&few, &dw__sm90_gemm, shape.params, &variant) == DW_OK);
    REQUIRE(!variant->disabled && lines == 0);
    r.device->release(r.call.workspace, r.call.workspace_bytes);
    close_run(&r);
}
/* D becomes codes in both directions, and is stored. */
static void keep_correct_codes(void) {
    const dw_device *device = device_named(gpu);
    block_codes rows, columns;
    run r;
    open_run(&small_one, device, &r);
    dw_gemm call = coded_call(&r, device, &rows, &columns, true, true);
    if (dw_gemm_run(&call) != DW_OK) fail_msg("%s", dw_last_error());
    REQUIRE(lines == 0);
    check(&small_one, &r);
    check_block_codes(&rows, device, &r.d, 1);
    check_block_codes(&columns, device, &r.d, 0);
    close_run(&r);
}

static void correct_kernels_pass(void **state) {
    (void)state;
    need_compiler();
    in_child(keep_correct);
    in_child(keep_correct_codes);
}

/* A wrong kernel of codes is refused: nothing else makes them. */
static void keep_wrong_codes(const char *right, const char *wrong) {
    const dw_device *device = device_named(gpu);
    block_codes rows, columns;
    run r;
    dw__text source = {0};
    void *image;
    size_t bytes;
    open_run(&small_one, device, &r);
    dw_gemm made = coded_call(&r, device, &rows, &columns, true, true);
    const dw__gemm_groups_call call = {.gemm = made, .groups = {.count = 1}};
    const dw__sm90_shape shape = dw__sm90_shape_of(&call, 132);
    const dw__jit_variant variant = dw__sm90_variant(&shape);
    REQUIRE(dw__jit_expand(variant.source, &source) == DW_OK);
    char *const at = strstr(source.text, right);
    REQUIRE(at && strlen(right) == strlen(wrong));
    memcpy(at, wrong, strlen(wrong));
    REQUIRE(dw__jit_compile(&variant, &source, DW__JIT_PTX, NULL, &image, &bytes, NULL) == DW_OK);
    dw__text_free(&source);
    carry(name_of(&variant), image);
    REQUIRE(dw_gemm_run(&made) == DW_UNSUPPORTED && lines == 1);
    REQUIRE(strstr(logged, "its GEMMs are refused"));
    close_run(&r);
}
/* Words in another order; codes of columns 8 rows lower; the divisor of another row. */
static void keep_wrong_order(void) { keep_wrong_codes("0x5410), __byte", "0x1054), __byte"); }
static void keep_wrong_columns(void) {
    keep_wrong_codes("upper, lower, 0x6420", "lower, upper, 0x6420");
}
static void keep_wrong_rows(void) { keep_wrong_codes("2 * block + half;", "2 * block + 0000;"); }

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
    in_child(keep_wrong_order);
    in_child(keep_wrong_columns);
    in_child(keep_wrong_rows);
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

/* The blocks that share tiles: 0 if there are none. */
static int sharing_blocks(int64_t m, int64_t n, int64_t k, int *alone) {
    const dw__gemm_groups_call call = {.gemm = {.dtype = DW_BF16,
                                                .output = DW_BF16,
                                                .m = m,
                                                .n = n,
                                                .k = k,
                                                .workspace_bytes = SIZE_MAX},
                                       .groups = {.count = 1}};
    const dw__sm90_shape shape = dw__sm90_shape_of(&call, 132);
    const dw__sm90_split split = dw__sm90_split_of(&call, &shape, 132);
    *alone = split.alone;
    return shape.split ? split.blocks : 0;
}

/* The rows and columns of the tiles of a product without a workspace, and the blocks of a cluster that compute one. */
static void expect_tiles(int64_t m, int64_t n, int64_t k, bool across, int rows, int columns,
                         int cluster) {
    const dw__gemm_groups_call call = {
        .gemm = {.dtype = DW_BF16, .output = DW_BF16, .m = m, .n = n, .k = k},
        .turned = {across, across},
        .groups = {.count = 1}};
    const dw__sm90_tile *tile = &dw__sm90_tiles[dw__sm90_shape_of(&call, 132).tile];
    if (tile->m != rows || tile->n != columns || tile->cluster != cluster)
        fail_msg("%lld x %lld x %lld: %d x %d, clusters of %d", (long long)m, (long long)n,
                 (long long)k, tile->m, tile->n, tile->cluster);
}

/* As measured on an H200. */
static void few_tiles_are_shared(void **state) {
    int alone;
    (void)state;
    /* Tiles of 128 x 128: a whole round and 12 more. */
    assert_true(sharing_blocks(768, 3072, 16384, &alone) >= 96);
    assert_int_equal(alone, 132);
    /* Clusters need no workspace, and take less time. */
    expect_tiles(64, 4096, 4096, false, 64, 64, 2);
    expect_tiles(768, 768, 16384, true, 128, 128, 3);
    expect_tiles(512, 2048, 8192, true, 128, 128, 2);
    assert_int_equal(sharing_blocks(64, 4096, 4096, &alone), 0);
    assert_int_equal(sharing_blocks(768, 768, 16384, &alone), 0);
    assert_int_equal(sharing_blocks(512, 2048, 8192, &alone), 0);
    /* One block for each tile. */
    expect_tiles(2048, 768, 768, false, 128, 96, 1);
    expect_tiles(512, 4096, 4096, false, 128, 128, 1);
    expect_tiles(2048, 3072, 768, false, 128, 192, 0);
    /* The exchange of sums would take longer than what it saves. */
    assert_int_equal(sharing_blocks(512, 4096, 4096, &alone), 0);
    assert_int_equal(sharing_blocks(2048, 768, 768, &alone), 0);
    assert_int_equal(sharing_blocks(16384, 768, 768, &alone), 0);
    assert_int_equal(sharing_blocks(8192, 8192, 8192, &alone), 0);
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
        cmocka_unit_test(codes_of_d_are_those_of_a_pass),
        cmocka_unit_test(mistakes_with_codes_are_reported),
        cmocka_unit_test(blocks_share_tiles),
        cmocka_unit_test(clusters_share_tiles),
        cmocka_unit_test(workspace_is_optional),
        cmocka_unit_test(plans_share_tiles),
        cmocka_unit_test(few_tiles_are_shared),
        cmocka_unit_test(rows_have_factors_and_squares),
        cmocka_unit_test(a_norm_lies_between_two_products),
        cmocka_unit_test(mistakes_with_rows_are_reported),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
