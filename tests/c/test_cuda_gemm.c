/* GEMMs up to the driver, which is a fake: the grid, cluster, tensor maps and parameters of each launch, and the
 * first-use check's result for kernels that are right, wrong, or fail. */
#include "common/gemm_reference_params.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/gpu_gemm.h"
#include "number/half.h"

/* The launch queries this before the parameters are read. */
static int maps_of(const char *name) {
    const bool scaled = strcmp(name, "sm100_gemm_scaled") == 0,
               fast = scaled || strcmp(name, "sm100_gemm") == 0;
    fake->params_bytes = fast ? sizeof(dw_gemm_params) : sizeof(dw_gemm_reference_params);
    return scaled ? 6 : fast ? 4 : 0;
}

static dw_gemm plain_call(void) {
    return (dw_gemm){
        .struct_size = sizeof(dw_gemm),
        .dtype = DW_BF16,
        .output = DW_F32,
        .m = 9000,
        .n = 3000,
        .k = 700,
        .alpha = 0.5f,
        .activation = DW_ACTIVATION_GELU,
        .a = {(void *)((uintptr_t)1 << 32), 704},
        .b = {(void *)((uintptr_t)2 << 32), 720},
        .d = {(void *)((uintptr_t)3 << 32), 3004},
        .bias = (void *)((uintptr_t)4 << 32),
        .residual = {(void *)((uintptr_t)5 << 32), 3008},
        .stream = folder,
    };
}

static void expect_map(int number, uint64_t data, int type, uint64_t columns, uint64_t rows,
                       uint64_t stride_bytes, uint32_t box_columns, uint32_t box_rows) {
    const fake_map *map = &fake->maps[number - 1];
    assert_int_equal((uintptr_t)map->address, data << 32);
    assert_int_equal(map->type, type);
    assert_int_equal(map->rank, 2);
    assert_int_equal(map->swizzle, 3); /* 128 bytes */
    assert_int_equal(map->sizes[0], columns);
    assert_int_equal(map->sizes[1], rows);
    assert_int_equal(map->strides[0], stride_bytes);
    assert_int_equal(map->box[0], box_columns);
    assert_int_equal(map->box[1], box_rows);
}

static void test_launch(void **state) {
    (void)state;
    dw_gemm call = plain_call();
    fake->launch_count = 0;
    assert_int_equal(dw_gemm_run(&call), DW_OK);
    assert_int_equal(fake->launch_count, 1);
    const fake_launch *launch = &fake->launches[0];
    dw_gemm_params p;
    memcpy(&p, launch->params, sizeof p);
    assert_string_equal(launch->name, "sm100_gemm");
    assert_ptr_equal(launch->stream, folder);
    /* There are 36 x 12 tiles of 256 x 256 on 74 pairs. */
    assert_int_equal(launch->grid[0], 148);
    assert_int_equal(launch->block[0], DW_GEMM_THREADS);
    assert_int_equal(launch->attribute_count, 1);
    assert_int_equal(launch->cluster[0], 2);
    assert_int_equal(launch->cluster[1], 1);
    assert_int_equal(launch->shared_bytes, DW_GEMM_SHARED_BYTES(2, 256, 6));
    assert_int_equal(launch->largest_shared, launch->shared_bytes);
    assert_int_equal(p.m, 9000);
    assert_int_equal(p.n, 3000);
    assert_int_equal(p.k, 700);
    assert_int_equal(p.tiles_m, 36);
    assert_int_equal(p.tiles_n, 12);
    assert_ptr_equal(p.bias, call.bias);
    expect_map(launch->maps[0], 1, 9, 700, 9000, 1408, 64, 128);
    expect_map(launch->maps[1], 2, 9, 700, 3000, 1440, 64, 128);
    expect_map(launch->maps[2], 3, 7, 3000, 9000, 12016, 32, 32);
    expect_map(launch->maps[3], 5, 7, 3000, 9000, 12032, 32, 32);

    /* With one row the stride does not matter. Without a residual its map is D's map, and no kernel reads it. */
    call.m = 1, call.a.stride = -3, call.d.stride = 0, call.residual.data = NULL;
    call.activation = DW_ACTIVATION_SWIGLU;
    assert_int_equal(dw_gemm_run(&call), DW_OK);
    launch = &fake->launches[1];
    assert_int_equal(launch->attribute_count, 0); /* no cluster */
    memcpy(&p, launch->params, sizeof p);
    assert_int_equal(launch->grid[0], p.tiles_n);
    expect_map(launch->maps[0], 1, 9, 700, 1, 1408, 64, 128);
    expect_map(launch->maps[1], 2, 9, 700, 6000, 1440, 64, 32);
    expect_map(launch->maps[3], 3, 7, 3000, 1, 12000, 32, 32);
}

/* Tiles of scales as 64-bit words, in boxes of one step. */
static void expect_scale_map(int number, uint64_t data, uint64_t tiles_wide, uint64_t tiles_high,
                             uint32_t box_tiles) {
    const fake_map *map = &fake->maps[number - 1];
    assert_int_equal((uintptr_t)map->address, data << 32);
    assert_int_equal(map->type, 4);
    assert_int_equal(map->swizzle, 0);
    assert_int_equal(map->sizes[0], 64 * tiles_wide);
    assert_int_equal(map->sizes[1], tiles_high);
    assert_int_equal(map->strides[0], 512 * tiles_wide);
    assert_int_equal(map->box[0], 64 * box_tiles);
    assert_int_equal(map->box[1], 1);
}

/* NVFP4 with SwiGLU to MXFP8: codes are bytes, B has two parts of scales. */
static void test_scaled_launch(void **state) {
    (void)state;
    dw_gemm call = plain_call();
    fake->launch_count = 0;
    call.quantized = call.quantized_d = 1;
    call.scheme_a = call.scheme_b = DW_SCHEME_NVFP4;
    call.k = 701, call.activation = DW_ACTIVATION_SWIGLU, call.residual.data = NULL;
    call.a.stride = 352, call.b.stride = 368, call.d.stride = 3008;
    call.scales_a = (void *)((uintptr_t)6 << 32), call.scales_b = (void *)((uintptr_t)7 << 32);
    call.scales_d = (void *)((uintptr_t)8 << 32);
    call.factor_a = (void *)((uintptr_t)9 << 32), call.factor_b = (void *)((uintptr_t)10 << 32);
    assert_int_equal(dw_gemm_run(&call), DW_OK);
    assert_int_equal(fake->launch_count, 1);
    const fake_launch *launch = &fake->launches[0];
    dw_gemm_params p;
    memcpy(&p, launch->params, sizeof p);
    assert_string_equal(launch->name, "sm100_gemm_scaled");
    assert_int_equal(launch->cluster[0], 2);
    assert_int_equal(launch->shared_bytes, DW_SCALED_SHARED_BYTES(DW_CODES_NVFP4, 2, 256, 5));
    assert_int_equal(p.tiles_m, 36);
    assert_int_equal(p.tiles_n, 24); /* 128 columns of D per tile */
    assert_ptr_equal(p.scales_d, call.scales_d);
    assert_ptr_equal(p.factor_a, call.factor_a);
    assert_ptr_equal(p.factor_b, call.factor_b);
    expect_map(launch->maps[0], 1, 0, 351, 9000, 352, 128, 128);
    expect_map(launch->maps[1], 2, 0, 351, 6000, 368, 128, 128);
    expect_scale_map(launch->maps[2], 6, 11, 71, 4); /* 44 scales of a row */
    expect_scale_map(launch->maps[3], 7, 11, 48, 4);
    expect_map(launch->maps[4], 3, 0, 3000, 9000, 3008, 128, 32);
}

static void use_other_gpu(void *capability) {
    dw_gemm call = plain_call();
    fake->capability = *(int *)capability;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "these kernels are for 9.0 (H100, H200), 10.0"));
    CHILD_REQUIRE(fake->launch_count == 0 && fake->loads == 0);
}

/* Each call is rejected with its reason before anything is compiled. */
static void test_other_gpus(void **state) {
    int capabilities[] = {80, 110, 121};
    (void)state;
    for (size_t i = 0; i < DW_COUNT(capabilities); i++)
        expect_child(start_child(use_other_gpu, &capabilities[i]));
}

/* ---- the first-use check ------------------------------------------------------------------------- */

static float wrong_by; /* the amount that a wrong kernel adds to D[0][0] */

/* Replaces both kernels, without an epilogue. alpha is a power of 2 or small; sums are in double. */
static float read_element(const void *base, int64_t at) {
    return dw__bf16_to_f32(((const uint16_t *)base)[at]);
}
static void run_kernel(const fake_launch *launch) {
    dw_gemm_reference_params p = {0};
    bool fast = launch->maps[0] > 0;
    if (fast) {
        dw_gemm_params g;
        memcpy(&g, launch->params, sizeof g);
        const fake_map *a = &fake->maps[launch->maps[0] - 1], *b = &fake->maps[launch->maps[1] - 1],
                       *d = &fake->maps[launch->maps[2] - 1];
        p = (dw_gemm_reference_params){.m = g.m,
                                       .n = g.n,
                                       .k = g.k,
                                       .stride_a = (long long)a->strides[0] / 2,
                                       .stride_b = (long long)b->strides[0] / 2,
                                       .stride_d = (long long)d->strides[0] / 4,
                                       .a = a->address,
                                       .b = b->address,
                                       .d = d->address,
                                       .alpha = g.alpha};
    } else {
        memcpy(&p, launch->params, sizeof p);
    }
    for (long long i = 0; i < p.m; i++)
        for (long long j = 0; j < p.n; j++) {
            double sum = 0;
            for (long long k = 0; k < p.k; k++)
                sum += (double)read_element(p.a, i * p.stride_a + k) *
                       (double)read_element(p.b, j * p.stride_b + k);
            ((float *)p.d)[i * p.stride_d + j] = (float)((double)p.alpha * sum);
        }
    if (fast) ((float *)p.d)[0] += wrong_by;
}

/* D has 3 x 2 elements, in memory that the test owns. */
static uint16_t a[3 * 8] __attribute__((aligned(16))), b[2 * 8] __attribute__((aligned(16)));
static float d[3 * 4] __attribute__((aligned(16)));
static dw_gemm tiny_call(void) {
    for (int i = 0; i < 24; i++) a[i] = dw__f32_to_bf16((float)(i % 7) - 3);
    for (int i = 0; i < 16; i++) b[i] = dw__f32_to_bf16((float)(i % 5) - 2);
    memset(d, 0xff, sizeof d);
    return (dw_gemm){.struct_size = sizeof(dw_gemm),
                     .dtype = DW_BF16,
                     .output = DW_F32,
                     .m = 3,
                     .n = 2,
                     .k = 5,
                     .alpha = 2,
                     .a = {a, 8},
                     .b = {b, 8},
                     .d = {d, 4}};
}
static void require_right(void) {
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 2; j++) {
            int sum = 0;
            for (int k = 0; k < 5; k++) sum += ((8 * i + k) % 7 - 3) * ((8 * j + k) % 5 - 2);
            CHILD_REQUIRE(d[4 * i + j] == (float)(2 * sum));
        }
}
static void check_first_uses(void) {
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    fake->kernel = run_kernel;
    fake->launch_count = fake->relaxed = 0;
}

static void correct_kernel_passes(void *unused) {
    (void)unused;
    check_first_uses();
    dw_gemm call = tiny_call();
    wrong_by = 1e-5f; /* within the tolerance: it changes the eighth digit of D */
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_OK);
    CHILD_REQUIRE(fake->memory == 0 && fake->relaxed > 0 && fake->launch_count == 1);
    CHILD_REQUIRE(fake->launches[0].grid[0] == 2); /* few blocks, which process tile after tile */
    wrong_by = 0;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && fake->launch_count == 2);
    require_right();
}

static void wrong_kernel_is_rejected(void *unused) {
    (void)unused;
    check_first_uses();
    dw_gemm call = tiny_call();
    wrong_by = 1e-2f;
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "disagrees with the reference on Fake GPU 0: D[0][0]"));
    CHILD_REQUIRE(strstr(dw_last_error(), "TILE_N=64") && strstr(dw_last_error(), "by definition"));
    wrong_by = 0;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK); /* the result is kept */
    CHILD_REQUIRE(strcmp(fake->launches[fake->launch_count - 1].name, "reference_gemm") == 0);
    require_right();
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_UNSUPPORTED && fake->memory == 0);
}

static void kernel_fails(void *unused) {
    (void)unused;
    check_first_uses();
    dw_gemm call = tiny_call();
    fake->failing = "cuLaunchKernelEx";
    fake->result = 700; /* CUDA_ERROR_ILLEGAL_ADDRESS */
    CHILD_REQUIRE(dw_gemm_supported(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "failed on Fake GPU 0"));
    fake->failing = NULL;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
    require_right();
}

/* A failure that prevents the first-use check is an error, not a verdict. */
static void failed_check_is_an_error(void *unused) {
    static const char *const calls[] = {
        "cuModuleLoadData",     "cuMemAlloc_v2",
        "cuStreamCreate",       "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize",
        "cuLaunchKernelEx",     "cuThreadExchangeStreamCaptureMode"};
    (void)unused;
    check_first_uses();
    dw_gemm call = tiny_call();
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        fake->failing = calls[i];
        fake->result = 2;
        CHILD_REQUIRE(dw_gemm_run(&call) == DW_OUT_OF_MEMORY);
        CHILD_REQUIRE(strstr(dw_last_error(), "m 3, n 2, k 5, bf16 to f32"));
        fake->failing = NULL;
        CHILD_REQUIRE(fake->memory == 0);
    }
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
    require_right();
}

/* Each allocation of a first use fails in turn: the call fails with an error, nothing is half loaded, and a
 * retry works. */
static void memory_fails(void *unused) {
    (void)unused;
    check_first_uses();
    dw_gemm call = tiny_call();
    int refused = 0;
    for (int64_t after = 0;; after++) {
        dw__memory_fail_once(after);
        dw_status status = dw_gemm_supported(&call);
        int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        CHILD_REQUIRE(fake->memory == 0);
        if (status != DW_OK) CHILD_REQUIRE(status == DW_OUT_OF_MEMORY);
        refused += status != DW_OK;
        if (failures == 0) break;
    }
    CHILD_REQUIRE(refused > 3);
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
    require_right();
}

static void test_first_use(void **state) {
    (void)state;
    expect_child(start_child(correct_kernel_passes, NULL));
    expect_child(start_child(wrong_kernel_is_rejected, NULL));
    expect_child(start_child(kernel_fails, NULL));
    expect_child(start_child(failed_check_is_an_error, NULL));
    expect_child(start_child(memory_fails, NULL));
}

static int setup(void **state) {
    begin_on_fake_gpu(state);
    fake->capability = 100;
    fake->sm_count = 148;
    fake->maps_of = maps_of;
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_gpus),
        cmocka_unit_test(test_launch),
        cmocka_unit_test(test_scaled_launch),
        cmocka_unit_test(test_first_use),
    };
    return cmocka_run_group_tests(tests, setup, end_on_fake_gpu);
}
