/* Attention's launcher up to the driver: calls that it rejects and their messages; for supported calls the
 * kernels, grids, shared memory, tensor maps and parameters that it launches. The driver is a fake; tests/gpu
 * checks results. */
#include "common/attention_backward_layout.h"
#include "fake/fake_attention.h"
#include "kernel/cuda/gpu_attention.h"
#include <float.h>
#include <math.h>
#include <pthread.h>

static void forget(void) { fake->launch_count = 0; }

static void expect_map(int number, uint64_t data, int rows, int heads, int batch, int head_dim,
                       int box_rows, uint64_t row, uint64_t head, uint64_t batch_stride) {
    const fake_map *map = &fake->maps[number - 1];
    assert_int_equal((uintptr_t)map->address, data << 32);
    assert_int_equal(map->rank, 4);
    assert_int_equal(map->swizzle, 3); /* 128 bytes */
    assert_int_equal(map->interleave, 0);
    assert_int_equal(map->fill, 0);
    const uint64_t sizes[] = {(uint64_t)head_dim, (uint64_t)rows, (uint64_t)heads, (uint64_t)batch};
    const uint32_t box[] = {64, (uint32_t)box_rows, 1, 1};
    const uint64_t strides[] = {2 * row, 2 * head, 2 * batch_stride};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(map->sizes[i], sizes[i]);
        assert_int_equal(map->box[i], box[i]);
        assert_int_equal(map->steps[i], 1);
        if (i < 3) assert_int_equal(map->strides[i], strides[i]);
    }
}

static void test_forward(void **state) {
    (void)state;
    dw_attention call = plain_call();
    dw__attention_shape shape = dw__attention_shape_of(&call, DW__ATTENTION_FORWARD, 132);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_FORWARD);
    forget();
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(fake->launch_count, 1);
    const fake_launch *launch = &fake->launches[0];
    assert_string_equal(launch->name, "sm90_attention_forward");
    assert_ptr_equal(launch->stream, call.stream);
    assert_int_equal(launch->grid[0], 12 * ((1000 + tile->m - 1) / tile->m));
    assert_int_equal(launch->block[0], 128 * (1 + tile->consumers));
    assert_int_equal(launch->shared_bytes, tile->shared_bytes);
    assert_true(tile->shared_bytes <= 232448);
    expect_map(launch->maps[0], 1, 1000, 4, 3, 128, tile->m, 512, 128, 512000);
    expect_map(launch->maps[1], 2, 900, 2, 3, 128, tile->n, 256, 128, 230400);
    expect_map(launch->maps[2], 3, 900, 2, 3, 128, tile->n, 256, 128, 230400);
    assert_int_equal(fake->maps[launch->maps[0] - 1].type, 9); /* BF16 */
    dw_attention_params p = params_of(launch);
    assert_int_equal(p.batch, 3);
    assert_int_equal(p.group, 2);
    assert_int_equal(p.rows_q, 1000);
    assert_int_equal(p.rows_k, 900);
    assert_int_equal(p.head_dim, 128);
    assert_int_equal(p.tiles, 12 * ((1000 + tile->m - 1) / tile->m));
    assert_true(p.scale == 0.125f && fabsf(p.scale_log2 - 0.18033688f) < 1e-7f &&
                p.cap_scale == 0.0f);
    assert_int_equal(p.window_left, 1 << 30);
    assert_int_equal(p.window_right, 1 << 30);
    assert_int_equal(p.keep_threshold, 0);
    assert_true(p.keep_scale == 1.0f);
    assert_ptr_equal(p.o.data, call.o.data);
    assert_int_equal(p.o.row, 512);
    assert_int_equal(p.o.head, 128);

    /* Maps of the same tensors are reused; maps of other tensors are new. */
    int maps = fake->map_count;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(fake->map_count, maps);
    assert_memory_equal(fake->launches[1].maps, launch->maps, 3 * sizeof launch->maps[0]);
    call.k.row += 8;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(fake->map_count, maps + 1);
    assert_int_equal(fake->maps[fake->launches[2].maps[1] - 1].strides[0], 2 * 264);
    call.k.row -= 8;

    /* The GPU has fewer SMs than there are tiles, so blocks are persistent. The kernel is not loaded again. */
    int loads = fake->loads, functions = fake->functions;
    call.batch = 300;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(fake->launches[3].grid[0], 132);
    assert_int_equal(fake->loads, loads);
    assert_int_equal(fake->functions, functions);
}

static void test_parameters(void **state) {
    (void)state;
    dw_attention call = plain_call();
    dw_attention_params p;
    call.scale = 0.0f;
    call.softcap = 30.0f; /* every score is 0, with or without a cap */
    dw__attention_set_params(&call, &p);
    assert_true(p.scale_log2 > 0.0f && p.scale == 0.0f && p.cap_scale == 0.0f);
    assert_false(dw__attention_shape_of(&call, DW__ATTENTION_FORWARD, 132).softcap);
    call.scale = 0.25f;
    dw__attention_set_params(&call, &p);
    assert_true(dw__attention_shape_of(&call, DW__ATTENTION_FORWARD, 132).softcap);
    assert_true(fabsf(p.scale_log2 - 43.280851f) < 1e-5f && p.cap_scale == 0.25f / 30.0f);
    /* An element is kept if u >= p: the smallest kept word corresponds to the smallest such u of 24 bits. */
    const struct {
        float dropout;
        unsigned threshold;
    } cases[] = {{0.5f, 1u << 23},
                 {0.1f, 1677722},
                 {0x1p-24f, 1},
                 {0x1p-30f, 1},
                 {1.0f - 0x1p-24f, 16777215}};
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        call.dropout = cases[i].dropout;
        dw__attention_set_params(&call, &p);
        assert_int_equal(p.keep_threshold, cases[i].threshold);
        assert_true((double)p.keep_threshold * 0x1p-24 >= (double)call.dropout);
        assert_true(((double)p.keep_threshold - 1) * 0x1p-24 < (double)call.dropout);
        assert_int_equal(p.dropout_stream, 0);
    }
    call.dropout_stream = ((int64_t)1 << 33) + 5;
    dw__attention_set_params(&call, &p);
    assert_int_equal(p.dropout_stream, 5); /* Philox's counter takes the low 32 bits */
}

/* A window is compiled in only if it hides a key from a row. */
static void test_windows(void **state) {
    (void)state;
    const int rows[] = {1, 2, 5, 9}, reach[] = {-1, 0, 1, 3, 8, 20, INT32_MAX};
    dw_attention call = plain_call();
    for (size_t q = 0; q < DW_COUNT(rows); q++)
        for (size_t k = 0; k < DW_COUNT(rows); k++)
            for (size_t l = 0; l < DW_COUNT(reach); l++)
                for (size_t r = 0; r < DW_COUNT(reach); r++)
                    for (int corner = 0; corner < 2; corner++) {
                        call.seq_len_q = rows[q], call.seq_len_kv = rows[k];
                        call.window_left = reach[l], call.window_right = reach[r];
                        call.bottom_right = corner;
                        bool hidden = false;
                        dw_attention_params p;
                        dw__attention_set_params(&call, &p);
                        for (int64_t i = 0; i < rows[q]; i++)
                            for (int64_t j = 0; j < rows[k]; j++) {
                                int64_t d = i + (corner ? rows[k] - rows[q] : 0);
                                bool seen = (reach[l] < 0 || j >= d - reach[l]) &&
                                            (reach[r] < 0 || j <= d + (int64_t)reach[r]);
                                bool kernel = j >= d - p.window_left && j <= d + p.window_right;
                                assert_int_equal(seen, kernel);
                                hidden |= !seen;
                            }
                        bool window =
                            dw__attention_shape_of(&call, DW__ATTENTION_FORWARD, 132).window;
                        if (hidden) assert_true(window);
                        /* Only one side is limited, and it alone determines the result. */
                        if (reach[l] < 0 || reach[r] < 0) assert_int_equal(window, hidden);
                    }
}

static void test_packed(void **state) {
    (void)state;
    dw_attention call = plain_call();
    call.offsets_q = call.offsets_k = (const int32_t *)((uintptr_t)11 << 32);
    call.total_q = 2500, call.total_k = 1700;
    forget();
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    const fake_launch *launch = &fake->launches[0];
    int m = fake->maps[launch->maps[0] - 1].box[1], n = (int)fake->maps[launch->maps[1] - 1].box[1];
    expect_map(launch->maps[0], 1, 2500, 4, 1, 128, m, 512, 128,
               128); /* any valid stride: there is only one batch */
    expect_map(launch->maps[1], 2, 1700, 2, 1, 128, n, 256, 128, 128);
    dw_attention_params p = params_of(launch);
    assert_int_equal(p.total_q, 2500);
    assert_ptr_equal(p.offsets_q, call.offsets_q);
    assert_int_equal(p.tiles, 12 * ((1000 + m - 1) / m));
    assert_non_null(strstr(launch->image, "ELF"));
}

/* PyTorch gives axes of length 1 any stride. */
static void test_lengths_of_one(void **state) {
    (void)state;
    dw_attention call = plain_call();
    call.batch = call.heads_q = call.heads_kv = call.seq_len_q = 1;
    call.q.batch = 3, call.q.head = -1, call.q.row = 0;
    call.k.batch = 7, call.k.head = 1;
    call.head_dim = 40;
    call.dtype = DW_F16;
    forget();
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    const fake_launch *launch = &fake->launches[0];
    int m = fake->maps[launch->maps[0] - 1].box[1], n = (int)fake->maps[launch->maps[1] - 1].box[1];
    expect_map(launch->maps[0], 1, 1, 1, 1, 40, m, 64, 64, 64);
    expect_map(launch->maps[1], 2, 900, 1, 1, 40, n, 256, 64, 64);
    assert_int_equal(fake->maps[launch->maps[0] - 1].type, 6); /* F16 */
}

/* Checks the bytes that the workspace needs for the given number of query tiles. */
static size_t statistics(size_t tiles, const dw__attention_tile *tile) {
    return (tiles * DW_BACKWARD_STATISTICS((size_t)tile->m) * sizeof(float) + 127) / 128 * 128;
}

static void test_backward(void **state) {
    (void)state;
    dw_attention call = plain_call();
    call.deterministic = true;
    call.dropout = 0.1f;
    size_t bytes = 0;
    assert_int_equal(dw_attention_backward_workspace(&call, &bytes), DW_OK);
    dw__attention_shape shape = dw__attention_shape_of(&call, DW__ATTENTION_BACKWARD, 132);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_BACKWARD);
    int row_tiles = 12 * ((1000 + tile->m - 1) / tile->m),
        tiles = 6 * ((900 + tile->n - 1) / tile->n);
    size_t rows = (size_t)row_tiles * (size_t)tile->m, kept = statistics((size_t)row_tiles, tile);
    size_t turns = ((size_t)row_tiles * (size_t)tile->consumers * 4 + 127) / 128 * 128;
    assert_int_equal(bytes, rows * 128 * 4 + kept + turns);
    call.workspace_bytes = bytes;
    forget();
    assert_int_equal(dw_attention_backward(&call), DW_OK);
    assert_int_equal(fake->launch_count, 3);
    const char *const names[] = {"sm90_attention_backward_prepare", "sm90_attention_backward",
                                 "sm90_attention_backward_finish"};
    for (int i = 0; i < 3; i++) {
        const fake_launch *launch = &fake->launches[i];
        dw_attention_params p = params_of(launch);
        assert_string_equal(launch->name, names[i]);
        assert_ptr_equal(launch->stream, call.stream);
        assert_int_equal(launch->grid[0], i == 1 ? tiles : row_tiles);
        assert_int_equal(launch->block[0], i == 1 ? 128 * (1 + tile->consumers) : 256);
        assert_int_equal(launch->shared_bytes, i == 1 ? tile->shared_bytes : 0);
        assert_ptr_equal(p.dq_sum, call.workspace);
        assert_ptr_equal(p.delta, (char *)call.workspace + rows * 128 * 4);
        assert_ptr_equal(p.turn, (char *)call.workspace + rows * 128 * 4 + kept);
        assert_int_equal(p.tiles, tiles);
        assert_ptr_equal(p.dk.data, call.dk.data);
    }
    const fake_launch *main_launch = &fake->launches[1];
    expect_map(main_launch->maps[0], 1, 1000, 4, 3, 128, tile->m, 512, 128, 512000);
    expect_map(main_launch->maps[1], 2, 900, 2, 3, 128, tile->n, 256, 128, 230400);
    expect_map(main_launch->maps[2], 3, 900, 2, 3, 128, tile->n, 256, 128, 230400);
    expect_map(main_launch->maps[3], 5, 1000, 4, 3, 128, tile->m, 512, 128, 512000);
    /* The three entry points lie in one module. */
    assert_memory_equal(fake->launches[0].image, fake->launches[2].image,
                        sizeof main_launch->image);

    call.workspace_bytes = bytes - 1;
    assert_int_equal(dw_attention_backward(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "dw_attention_backward_workspace"));
    call.workspace_bytes = bytes;
    call.workspace = (char *)call.workspace + 8;
    assert_int_equal(dw_attention_backward(&call), DW_INVALID_ARGUMENT);

    call = plain_call();
    call.offsets_q = call.offsets_k = (const int32_t *)((uintptr_t)11 << 32);
    call.total_q = 2500, call.total_k = 1700;
    assert_int_equal(dw_attention_backward_workspace(&call, &bytes), DW_OK);
    size_t most = 4 * (2500 / (size_t)tile->m + 3);
    assert_int_equal(bytes, most * (size_t)tile->m * 128 * 4 + statistics(most, tile));
}

/* If heads fill the GPU and have few rows, one thread block processes all keys of a head. */
static void test_serial(void **state) {
    (void)state;
    dw_attention call = plain_call();
    size_t bytes = 0;
    call.batch = 64; /* 128 key-value heads on 132 SMs */
    call.seq_len_q = call.seq_len_kv = 200;
    call.window_right = 0;
    call.deterministic = true;
    dw__attention_shape shape = dw__attention_shape_of(&call, DW__ATTENTION_BACKWARD, 132);
    const dw__attention_tile *tile = dw__attention_tile_of(&shape, DW__ATTENTION_BACKWARD);
    assert_true(shape.serial && !shape.deterministic);
    assert_int_equal(dw_attention_backward_workspace(&call, &bytes), DW_OK);
    size_t of_head = (200 + (size_t)tile->m - 1) / (size_t)tile->m;
    size_t sums = 128 * 2 * of_head * (size_t)tile->m * 128 * 4;
    assert_int_equal(bytes, sums + statistics(64 * 4 * of_head, tile));
    forget();
    assert_int_equal(dw_attention_backward(&call), DW_OK);
    assert_int_equal(fake->launch_count, 2);
    assert_string_equal(fake->launches[0].name, "sm90_attention_backward_prepare");
    assert_string_equal(fake->launches[1].name, "sm90_attention_backward");
    assert_int_equal(fake->launches[1].grid[0], 128);
    dw_attention_params p = params_of(&fake->launches[1]);
    assert_int_equal(p.tiles, 128 * ((200 + tile->n - 1) / tile->n));
    assert_null(p.turn);
    assert_ptr_equal(p.delta, (char *)call.workspace + sums);
    assert_non_null(strstr(fake->launches[1].image, "ELF"));
    /* The serial kernel is not used for heads that leave a fifth of the GPU idle, for many rows, or without a GPU. */
    call.batch = 67; /* 134 heads: two rounds */
    assert_false(dw__attention_shape_of(&call, DW__ATTENTION_BACKWARD, 132).serial);
    call.batch = 64;
    call.seq_len_q = 4096;
    assert_false(dw__attention_shape_of(&call, DW__ATTENTION_BACKWARD, 132).serial);
    call.seq_len_q = 200;
    assert_false(dw__attention_shape_of(&call, DW__ATTENTION_BACKWARD, 0).serial);
    assert_false(dw__attention_shape_of(&call, DW__ATTENTION_FORWARD, 132).serial);
}

static void test_empty(void **state) {
    (void)state;
    size_t bytes = 1;
    dw_attention call = plain_call();
    call.seq_len_q = 0;
    call.q.data = call.o.data = NULL;
    forget();
    int maps = fake->map_count;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(fake->launch_count, 0);
    call.d_o.data = call.dq.data = NULL;
    call.lse = NULL;
    assert_int_equal(dw_attention_backward(&call), DW_OK); /* writes zeros into dk and dv */
    assert_int_equal(fake->launch_count, 1);
    assert_string_equal(fake->launches[0].name, "reference_attention_backward");
    assert_int_equal(dw_attention_backward_workspace(&call, &bytes), DW_OK);
    assert_int_equal(bytes, 0);
    call = plain_call();
    call.seq_len_kv = 0;
    call.k.data = call.v.data = NULL;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_string_equal(fake->launches[1].name, "reference_attention_forward");
    assert_int_equal(fake->map_count, maps);
    call.batch = 0;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(fake->launch_count, 2);
}

/* ---- rejected calls ---------------------------------------------------------------------------- */

static void refuse(const dw_attention *call, dw_status status, const char *part) {
    size_t bytes;
    int launches = fake->launch_count;
    assert_int_equal(dw_attention_forward(call), status);
    if (!strstr(dw_last_error(), part)) fail_msg("\"%s\" is not in \"%s\"", part, dw_last_error());
    assert_int_equal(dw_attention_backward(call), status);
    assert_int_equal(dw_attention_supported(call, false), status);
    assert_int_equal(dw_attention_supported(call, true), status);
    assert_int_equal(dw_attention_backward_workspace(call, &bytes), status);
    assert_int_equal(fake->launch_count, launches);
}

static void test_refusals(void **state) {
    (void)state;
#define REFUSE(change, status, part)                                                               \
    do {                                                                                           \
        dw_attention call = plain_call();                                                          \
        change;                                                                                    \
        refuse(&call, status, part);                                                               \
    } while (0)
    REFUSE(call.struct_size = 8, DW_INVALID_ARGUMENT, "struct_size is 8");
    REFUSE(call.dtype = (dw_dtype)99, DW_TYPE, "expected bf16 or f16");
    REFUSE(call.dtype = DW_F32, DW_TYPE, "the element type is f32; expected bf16 or f16");
    REFUSE(call.batch = -1, DW_SHAPE, "batch is -1");
    REFUSE(call.heads_q = 0, DW_SHAPE, "heads_q is 0");
    REFUSE(call.heads_kv = 3, DW_SHAPE, "heads_q is 4 and heads_kv is 3");
    REFUSE(call.seq_len_kv = -5, DW_SHAPE, "seq_len_kv is -5");
    REFUSE(call.seq_len_q = INT32_MAX, DW_SHAPE, "seq_len_q is 2147483647");
    REFUSE(call.head_dim = 0, DW_SHAPE, "head_dim is 0");
    REFUSE(call.head_dim = 100, DW_UNSUPPORTED,
           "head_dim is 100; expected a multiple of 8 up to 256");
    REFUSE(call.head_dim = 264, DW_UNSUPPORTED, "head_dim is 264");
    REFUSE(call.offsets_q = (int32_t *)16, DW_INVALID_ARGUMENT,
           "offsets_q is given and offsets_k is NULL");
    REFUSE(call.offsets_k = (int32_t *)16, DW_INVALID_ARGUMENT,
           "offsets_k is given and offsets_q is NULL");
    REFUSE(
        (call.offsets_q = call.offsets_k = (int32_t *)16, call.total_q = 900, call.total_k = 900),
        DW_SHAPE, "total_q is 900 and seq_len_q is 1000");
    REFUSE(
        (call.offsets_q = call.offsets_k = (int32_t *)16, call.total_q = 3001, call.total_k = 900),
        DW_SHAPE, "total_q is 3001");
    REFUSE((call.offsets_q = call.offsets_k = (int32_t *)16, call.total_q = -1), DW_SHAPE,
           "total_q is -1");
    REFUSE((call.offsets_q = call.offsets_k = (int32_t *)18, call.total_q = call.total_k = 1500),
           DW_INVALID_ARGUMENT, "offsets_q lies at");
    REFUSE(call.scale = NAN, DW_INVALID_ARGUMENT, "scale is nan");
    REFUSE(call.scale = INFINITY, DW_INVALID_ARGUMENT, "scale is inf");
    REFUSE(call.scale = -0.5f, DW_UNSUPPORTED, "negate q");
    REFUSE(call.softcap = -1.0f, DW_INVALID_ARGUMENT, "softcap is -1");
    REFUSE(call.softcap = NAN, DW_INVALID_ARGUMENT, "softcap is nan");
    REFUSE(call.dropout = 1.0f, DW_INVALID_ARGUMENT, "dropout is 1");
    REFUSE(call.dropout = NAN, DW_INVALID_ARGUMENT, "dropout is nan");
    REFUSE(call.dropout = -0.1f, DW_INVALID_ARGUMENT, "dropout is -0.1");
    REFUSE(call.seed_memory = (int64_t *)20, DW_INVALID_ARGUMENT, "seed_memory");
    REFUSE(call.q.data = (char *)call.q.data + 8, DW_UNSUPPORTED,
           "q lies at 0x100000008; expected a multiple of 16");
    REFUSE(call.k.row = 260, DW_UNSUPPORTED,
           "the row stride of k is 260 elements; expected a multiple of 8");
    REFUSE(call.v.head = 0, DW_UNSUPPORTED, "the head stride of v is 0 (an expanded tensor)");
    REFUSE(call.v.batch = -8, DW_UNSUPPORTED, "the batch stride of v is -8");
    REFUSE(call.k.batch = (int64_t)1 << 39, DW_UNSUPPORTED,
           "the batch stride of k is 549755813888");
    REFUSE(call.lse = (float *)6, DW_INVALID_ARGUMENT, "lse lies at 0x6");
#undef REFUSE
    /* Only forward writes o; only backward writes its gradients. */
    dw_attention call = plain_call();
    call.o.row = 64;
    assert_int_equal(dw_attention_forward(&call), DW_INVALID_ARGUMENT);
    assert_non_null(
        strstr(dw_last_error(), "the row stride of o is 64 elements, less than head_dim (128)"));
    call = plain_call();
    call.dk.head = 120;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(dw_attention_backward(&call), DW_INVALID_ARGUMENT);
    call = plain_call();
    call.v.data = NULL;
    assert_int_equal(dw_attention_forward(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "v is NULL"));
    assert_int_equal(dw_attention_supported(&call, true), DW_OK);
    call = plain_call();
    call.lse = NULL;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    assert_int_equal(dw_attention_backward(&call), DW_INVALID_ARGUMENT);
    assert_int_equal(dw_attention_forward(NULL), DW_INVALID_ARGUMENT);
    /* There is so much work that the number of tiles overflows. */
    call = plain_call();
    call.batch = 1 << 24, call.heads_q = call.heads_kv = 1 << 16;
    assert_int_equal(dw_attention_forward(&call), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "split the batch"));
}

/* The message of a failed driver call names the attention call. */
static void test_driver_failures(void **state) {
    (void)state;
    const struct {
        const char *call, *part;
    } cases[] = {{"cuTensorMapEncodeTiled", "the tensor map of q"},
                 {"cuLaunchKernelEx", "launching sm90_attention_forward"}};
    dw_attention call = plain_call();
    call.window_right = 0;
    assert_int_equal(dw_attention_forward(&call), DW_OK);
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        fake->failing = cases[i].call;
        fake->result = 1;
        call.q.data = (char *)call.q.data + 16; /* no map of it is kept */
        assert_int_equal(dw_attention_forward(&call), DW_STATE);
        assert_non_null(strstr(dw_last_error(), cases[i].part));
        assert_non_null(
            strstr(dw_last_error(),
                   "batch 3, 4 query heads on 2, seq_len 1000 x 900, head_dim 128, bf16, causal"));
        fake->failing = NULL;
    }
    const char *const loading[] = {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"};
    call.softcap = 7.0f;
    for (size_t i = 0; i < DW_COUNT(loading); i++) {
        fake->failing = loading[i];
        fake->result = 209;
        assert_int_equal(dw_attention_forward(&call), DW_UNSUPPORTED);
        assert_non_null(strstr(dw_last_error(), loading[i]));
        fake->failing = NULL;
    }
    assert_int_equal(dw_attention_forward(&call), DW_OK); /* no state of the failure remains */
}

/* Modules compiled at build time have the names that the launcher looks up; each serves one specialization. */
static void test_embedded(void **state) {
    (void)state;
    size_t served = 0, count = 0;
    for (const dw__jit_file *module = dw__jit_modules; module->name; module++) {
        assert_memory_equal(module->begin, "\177ELF", 4);
        assert_string_equal(dw__jit_ptx[count].name, module->name);
        const char *ptx = (const char *)dw__jit_ptx[count].begin;
        const bool blackwell = strstr(module->name, ".sm_100f.") != NULL; /* not attention */
        assert_non_null(strstr(ptx, blackwell ? ".target sm_100f" : ".target sm_90a"));
        assert_int_equal(strlen(ptx), dw__jit_ptx[count].end - dw__jit_ptx[count].begin);
        count++;
    }
    assert_null(dw__jit_ptx[count].name);
    if (count == 0) skip();
    for (int dim = 64; dim <= 128; dim += 64)
        for (int bits = 0; bits < 8; bits++) {
            dw__attention_pass pass = bits & 1 ? DW__ATTENTION_BACKWARD : DW__ATTENTION_FORWARD;
            dw__attention_shape shape = {
                .head_dim = dim, .window = bits & 2, .many_keys = bits & 4};
            dw__jit_variant variant = dw__attention_variant(&shape, pass, "", "sm_90a");
            dw__text name = {0};
            bool found = false;
            assert_int_equal(dw__jit_variant_name(&variant, &name), DW_OK);
            for (const dw__jit_file *module = dw__jit_modules; module->name; module++)
                found |= strcmp(module->name, name.text) == 0;
            if (!found) fail_msg("%s is not embedded", name.text);
            dw__text_free(&name);
            served++;
        }
    assert_int_equal(served, 16);
}

/* A driver older than the modules' compiler rejects both; NVRTC then compiles the kernel. */
static void old_driver(void *unused) {
    (void)unused;
    dw_attention call = plain_call();
    call.head_dim = 64;
    call.window_right = 0;
    fake->refuse_real = fake->refuse_ptx = 1;
    const uint32_t before = dw__jit_statistics_now.compiled;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK);
    CHILD_REQUIRE(dw__jit_statistics_now.compiled - before == 1);
    CHILD_REQUIRE(memcmp(fake->launches[fake->launch_count - 1].image, "\177ELF\n", 5) == 0);
}

static void test_old_driver(void **state) {
    (void)state;
    expect_child(start_child(old_driver, NULL));
}

static void other_gpu(void *unused) {
    (void)unused;
    dw_attention call = plain_call();
    fake->current = 1001;
    fake->capability = 80;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "GPU 1 is a Fake GPU 1 (compute capability 8.0)"));
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_UNSUPPORTED);
}

/* This kernel has run only on the emulator: it is used only on request, and only forward. */
static void blackwell(void *unused) {
    (void)unused;
    dw_attention call = plain_call();
    fake->current = 1001;
    fake->capability = 100;
    forget();
    const int loads = fake->loads;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "GPU 1 is a Fake GPU 1 (compute capability 10.0)"));
    CHILD_REQUIRE(strstr(dw_last_error(), "is proven on the emulator, not run on hardware: it is "
                                          "used only with DEEPWELL_BLACKWELL=try"));
    CHILD_REQUIRE(fake->launch_count == 0 && fake->loads == loads);
    setenv("DEEPWELL_BLACKWELL", "try", 1);
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_OK);
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && fake->launch_count == 1);
    const fake_launch *launch = &fake->launches[0];
    CHILD_REQUIRE(strcmp(launch->name, "sm100_attention_forward") == 0);
    CHILD_REQUIRE(launch->grid[0] == 12 * 4 && launch->block[0] == 512); /* tiles of 256 */
    const struct {
        uint64_t data;
        uint32_t rows;
    } maps[] = {{1, 128}, {2, 128}, {3, 128}, {4, 32}}; /* maps of Q, K, V, O */
    for (size_t i = 0; i < DW_COUNT(maps); i++) {
        const fake_map *map = &fake->maps[launch->maps[i] - 1];
        CHILD_REQUIRE((uintptr_t)map->address == maps[i].data << 32);
        CHILD_REQUIRE(map->box[0] == 64 && map->box[1] == maps[i].rows);
    }
    CHILD_REQUIRE(params_of(launch).tiles == 48);
    CHILD_REQUIRE(dw_attention_backward(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "there is no kernel for backward on 10.0 and 10.3"));
    CHILD_REQUIRE(dw_attention_supported(&call, true) == DW_UNSUPPORTED);
    call.dropout = 0.1f;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "no kernel for dropout"));
    call.dropout = 0.0f, call.softcap = 3.0f;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED);
    call.softcap = 0.0f, call.head_dim = 136;
    call.q = call.o = tensor(1, 4, 1000, 136);
    call.k = call.v = tensor(2, 2, 900, 136);
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "no kernel for head dimensions above 128"));
}

static void test_blackwell(void **state) {
    (void)state;
    expect_child(start_child(blackwell, NULL));
}

static void test_other_gpu(void **state) {
    (void)state;
    expect_child(start_child(other_gpu, NULL));
}

static void test_bridge(void **state) {
    (void)state;
    void *q = (void *)((uintptr_t)1 << 32);
    forget();
    assert_int_equal(dw_fmha_bf16_forward(q, q, q, q, 2, 3, 100, 200, 64, 1), DW_OK);
    dw_attention_params p = params_of(&fake->launches[0]);
    assert_null(fake->launches[0].stream);
    assert_int_equal(p.o.head, 6400);
    assert_int_equal(p.o.batch, 19200);
    assert_int_equal(p.q.row, 64);
    assert_int_equal(p.k.head, 12800);
    assert_true(p.scale == 0.125f && p.bottom_right && p.window_right == 0);
    assert_null(p.lse);
    assert_int_equal(dw_fmha_bf16_forward(q, q, q, q, 2, 3, 100, 200, 0, 1), DW_SHAPE);
}

/* ---- the first-use check ------------------------------------------------------------------------- */

/* Replaces kernels: outputs are zeros and LSE is 1, but with `wrong_kernel` it writes ones into o, dq, dk and dv. */
static const char *wrong_kernel;
static _Atomic int compared;

static void write_tensor(const dw_strided *t, const dw_attention_params *p, int heads, int rows,
                         uint16_t value) {
    int batch = p->offsets_q ? 1 : p->batch;
    for (int b = 0; b < batch; b++)
        for (int h = 0; h < heads; h++)
            for (int r = 0; r < rows; r++)
                for (int d = 0; d < p->head_dim; d++)
                    ((uint16_t *)t->data)[b * t->batch + h * t->head + r * t->row + d] = value;
}

static void run_kernel(const fake_launch *launch) {
    dw_attention_params p = params_of(launch);
    uint16_t value = wrong_kernel && strcmp(launch->name, wrong_kernel) == 0 ? 0x3c00 : 0;
    if ((uintptr_t)p.q.data % ((uintptr_t)1 << 32) == 0)
        return; /* a test's own call: no memory there */
    int seq_len_q = p.offsets_q ? p.offsets_q[p.batch] : p.rows_q,
        seq_len_kv = p.offsets_q ? p.offsets_k[p.batch] : p.rows_k;
    compared++;
    if (strstr(launch->name, "forward")) {
        write_tensor(&p.o, &p, p.heads_q, seq_len_q, value);
        for (int i = 0; i < (p.offsets_q ? 1 : p.batch) * p.heads_q * seq_len_q; i++)
            p.lse[i] = 1.0f;
    } else {
        write_tensor(&p.dq, &p, p.heads_q, seq_len_q, value);
        write_tensor(&p.dk, &p, p.heads_kv, seq_len_kv, value);
        write_tensor(&p.dv, &p, p.heads_kv, seq_len_kv, value);
    }
}

static void check_first_uses(void) {
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    fake->kernel = run_kernel;
    fake->relaxed = 0;
}

static void *call_often(void *failed) {
    dw_attention call = plain_call();
    call.dtype = DW_F16;
    call.head_dim = 96;
    for (int i = 0; i < 64; i++) {
        call.softcap = i & 1 ? 5.0f : 0.0f;
        call.window_right = i & 2 ? 0 : -1;
        call.q.data = (void *)((uintptr_t)(1 + i % 7) << 32);
        if (dw_attention_forward(&call) != DW_OK || dw_attention_backward(&call) != DW_OK)
            return failed;
    }
    return NULL;
}

/* Threads that need the same kernels for the first time at once: each kernel is loaded and compared once. */
static void threads_call(void *unused) {
    pthread_t threads[4];
    (void)unused;
    check_first_uses();
    int functions = fake->functions;
    for (int i = 0; i < 4; i++)
        CHILD_REQUIRE(pthread_create(&threads[i], NULL, call_often, &threads) == 0);
    for (int i = 0; i < 4; i++) {
        void *failed = NULL;
        CHILD_REQUIRE(pthread_join(threads[i], &failed) == 0 && !failed);
    }
    /* There are four specializations, with one function in forward and three in backward each, and at most two of the
     * reference. */
    CHILD_REQUIRE(fake->functions - functions >= 16 && fake->functions - functions <= 18);
}

static void test_threads(void **state) {
    (void)state;
    expect_child(start_child(threads_call, NULL));
}

static void correct_kernel_passes(void *unused) {
    (void)unused;
    check_first_uses();
    dw_attention call = plain_call();
    call.dtype = DW_F16;
    for (int variant = 0; variant < 8; variant++) {
        call.softcap = variant & 1 ? 5.0f : 0.0f;
        call.dropout = variant & 2 ? 0.5f : 0.0f;
        call.offsets_q = call.offsets_k = variant & 4 ? (int32_t *)((uintptr_t)11 << 32) : NULL;
        call.total_q = call.total_k = variant & 4 ? 1000 : 0;
        compared = 0;
        CHILD_REQUIRE(dw_attention_supported(&call, true) == DW_OK);
        /* There are two trials per pass, each with the reference and our kernel. Backward also runs the reference's
         * forward and has three kernels. */
        CHILD_REQUIRE(compared == 2 * 2 + 2 * (2 + 3));
        CHILD_REQUIRE(fake->memory == 0);
        forget();
        CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK && fake->launch_count == 1);
        CHILD_REQUIRE(dw_attention_backward(&call) == DW_OK && fake->launch_count == 4);
    }
    CHILD_REQUIRE(fake->relaxed > 0);
}

static void wrong_kernel_is_rejected(void *unused) {
    (void)unused;
    check_first_uses();
    dw_attention call = plain_call();
    call.dtype = DW_F16; /* kernels that no earlier test has loaded */
    wrong_kernel = "sm90_attention_forward";
    call.window_right = 0;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED);
    CHILD_REQUIRE(
        strstr(dw_last_error(), "disagrees with the reference on Fake GPU 0: element 0 of o is"));
    CHILD_REQUIRE(strstr(dw_last_error(), "HEAD_DIM=128"));
    CHILD_REQUIRE(dw_attention_supported(&call, false) == DW_UNSUPPORTED);
    wrong_kernel = NULL;
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_UNSUPPORTED); /* the result is kept */
    call.dropout = 0.5f;                                          /* another kernel */
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK);

    /* Backward continues with the reference. */
    wrong_kernel = "sm90_attention_backward_finish";
    CHILD_REQUIRE(dw_attention_supported(&call, true) == DW_UNSUPPORTED);
    forget();
    CHILD_REQUIRE(dw_attention_backward(&call) == DW_OK);
    CHILD_REQUIRE(fake->launch_count == 1 &&
                  strcmp(fake->launches[0].name, "reference_attention_backward") == 0);
}

/* A failure that prevents the first-use check is an error, not a verdict. */
static void failed_check_is_an_error(void *unused) {
    static const char *const calls[] = {"cuMemAlloc_v2",        "cuStreamCreate",
                                        "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2",
                                        "cuStreamSynchronize",  "cuThreadExchangeStreamCaptureMode",
                                        "cuLaunchKernelEx"};
    (void)unused;
    check_first_uses();
    dw_attention call = plain_call();
    call.dtype = DW_F16;
    call.window_left = 3;
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        fake->failing = calls[i];
        fake->result = 2;
        CHILD_REQUIRE(dw_attention_forward(&call) == DW_OUT_OF_MEMORY);
        CHILD_REQUIRE(strstr(dw_last_error(), "CUDA_ERROR_OUT_OF_MEMORY"));
        fake->failing = NULL;
        CHILD_REQUIRE(fake->memory == 0);
    }
    CHILD_REQUIRE(dw_attention_forward(&call) == DW_OK);
}

/* Each allocation of a first use fails in turn: the call fails with an error, nothing is half loaded, and a
 * retry works. */
static void memory_fails(void *unused) {
    (void)unused;
    check_first_uses();
    dw_attention call = plain_call();
    call.dtype = DW_F16;
    call.head_dim = 72;
    int refused = 0;
    for (int64_t after = 0;; after++) {
        dw__memory_fail_once(after);
        dw_status status = dw_attention_supported(&call, true);
        int64_t failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        CHILD_REQUIRE(fake->memory == 0);
        if (status != DW_OK) CHILD_REQUIRE(status == DW_OUT_OF_MEMORY);
        refused += status != DW_OK;
        if (failures == 0) break;
        call.softcap = after % 2 ? 5.0f : 0.0f;
    }
    CHILD_REQUIRE(refused > 10);
    CHILD_REQUIRE(dw_attention_backward(&call) == DW_OK);
}

static void test_first_use(void **state) {
    (void)state;
    expect_child(start_child(correct_kernel_passes, NULL));
    expect_child(start_child(wrong_kernel_is_rejected, NULL));
    expect_child(start_child(failed_check_is_an_error, NULL));
    expect_child(start_child(memory_fails, NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_windows),        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_lengths_of_one), cmocka_unit_test(test_backward),
        cmocka_unit_test(test_serial),         cmocka_unit_test(test_empty),
        cmocka_unit_test(test_refusals),       cmocka_unit_test(test_driver_failures),
        cmocka_unit_test(test_other_gpu),      cmocka_unit_test(test_blackwell),
        cmocka_unit_test(test_embedded),       cmocka_unit_test(test_old_driver),
        cmocka_unit_test(test_bridge),         cmocka_unit_test(test_first_use),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, begin_attention, end_on_fake_gpu);
}
