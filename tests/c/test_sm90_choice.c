/* The tile of a GEMM on Hopper: which ones the cost model proposes, that the fastest of them is kept, for all processes,
 * and what happens if it cannot be measured. The driver is a fake, whose kernels take the time that a test sets for their
 * tile. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/gpu_gemm.h"
#include <pthread.h>

enum { TILES = DW__SM90_TILES, M = 16384, N = 768, K = 768 };

static char kept_path[300];
static const dw__context *context;

/* ---- launches of the fake --------------------------------------------------------------------------------------- */

static float milliseconds[TILES]; /* of each tile's kernels; 0: 9 */
static float shared_milliseconds; /* of kernels whose blocks share tiles */
static int launched[TILES], launched_shared;

/* The launch queries this before the parameters are read; those of other kernels are not. */
static int maps_of(const char *name) {
    const bool is_ours = strcmp(name, "sm90_gemm") == 0;
    fake->params_bytes = is_ours ? sizeof(dw_sm90_gemm_params) : 0;
    return is_ours ? 2 : 0;
}

/* The tile is known by the shared memory that its launch asks for. */
static int tile_of(const fake_launch *launch) {
    for (int i = 0; i < TILES; i++) {
        const dw__sm90_tile *t = &dw__sm90_tiles[i];
        unsigned bytes = DW_SM90_GEMM_SHARED_BYTES(t->m, t->n, t->stages);
        if (t->cluster > 1)
            bytes += DW_SM90_CLUSTER_BYTES(t->m, t->n, t->cluster) + 8 * DW_SM90_MULTIPLIERS;
        /* Tiles 0 and 5 have as much. A cluster has a block for each tile, others at most one on each SM. */
        if (i == 0 && launch->grid[0] > (unsigned)context->sm_count) continue;
        if (bytes == launch->shared_bytes) return i;
    }
    return -1;
}

static void take_time(const fake_launch *launch) {
    dw_sm90_gemm_params params;
    if (strcmp(launch->name, "sm90_gemm") != 0) return;
    const int tile = tile_of(launch);
    CHILD_REQUIRE(tile >= 0);
    memcpy(&params, launch->params, sizeof params);
    const bool is_shared = params.split.blocks > 0;
    const float time = is_shared ? shared_milliseconds : milliseconds[tile];
    launched[tile]++;
    launched_shared += is_shared;
    fake->event_milliseconds = time > 0.0f ? time : 9.0f;
}

static void begin_on_hopper(void) {
    fake->capability = 90;
    fake->sm_count = 132;
    fake->l2_bytes = 1 << 16;
    fake->kernel = take_time;
    fake->maps_of = maps_of;
    CHILD_REQUIRE(dw__device_cuda.context(&context) == DW_OK);
}

/* ---- one process ------------------------------------------------------------------------------------------------ */

typedef struct process {
    float times[TILES];
    int64_t m, n, k;
    dw_activation activation;
    int fastest;   /* the tile that computes the call; -1: the cost model's */
    bool measures; /* whether it measures */
    bool has_all;  /* an epilogue of each kind of operand */
    bool is_kept;  /* explained as measured */
    const char *autotune, *cache, *failing;
} process;

static dw_gemm call_of(const process *p) {
    dw_gemm call = {.struct_size = sizeof call,
                    .dtype = DW_BF16,
                    .output = DW_BF16,
                    .m = p->m ? p->m : M,
                    .n = p->n ? p->n : N,
                    .k = p->k ? p->k : K,
                    .alpha = 1.0f,
                    .activation = p->activation,
                    .a = {(void *)((uintptr_t)1 << 32), 0},
                    .b = {(void *)((uintptr_t)2 << 32), 0},
                    .d = {(void *)((uintptr_t)3 << 32), 0}};
    call.a.stride = call.b.stride = call.k;
    call.d.stride = call.n;
    if (p->has_all) {
        call.bias = (void *)((uintptr_t)5 << 32);
        call.residual = (dw_matrix){(void *)((uintptr_t)6 << 32), call.n};
        call.row_scale = (void *)((uintptr_t)7 << 32);
    }
    return call;
}

static void expect_explained(const dw_gemm *call, const process *p) {
    char *json = NULL;
    CHILD_REQUIRE(dw_gemm_explain(call, NULL, &json) == DW_OK);
    json_t *root = json_loads(json, 0, NULL);
    const json_t *rows = json_object_get(root, "candidates"),
                 *tile = json_object_get(json_array_get(rows, 0), "tile");
    const char *by = json_string_value(json_object_get(tile, "chosen_by"));
    CHILD_REQUIRE(by && strcmp(by, p->is_kept ? "measurement" : "cost model") == 0);
    if (p->is_kept && p->fastest >= 0) {
        const dw__sm90_tile *t = &dw__sm90_tiles[p->fastest];
        CHILD_REQUIRE(json_integer_value(json_object_get(tile, "tile_m")) == t->m);
        CHILD_REQUIRE(json_integer_value(json_object_get(tile, "tile_n")) == t->n);
        CHILD_REQUIRE(json_number_value(json_object_get(tile, "measured_seconds")) > 0.0);
    }
    json_decref(root);
    dw_text_free(json);
}

static void run(void *argument) {
    const process *p = argument;
    memcpy(milliseconds, p->times, sizeof milliseconds);
    if (p->autotune) setenv("DEEPWELL_AUTOTUNE", p->autotune, 1);
    if (p->cache) setenv("DEEPWELL_CACHE", p->cache, 1);
    begin_on_hopper();
    const dw_gemm call = call_of(p);
    const dw__gemm_groups_call single = dw__gemm_single(&call, (dw__gemm_turned){false, false});
    const int model = (int)dw__sm90_shape_of(&single, 132).tile;
    const int expected = p->fastest < 0 ? model : p->fastest;
    const int64_t memory = fake->memory;
    fake->failing = p->failing;
    fake->result = 2;
    const dw__sm90_shape shape = dw__sm90_choose(&single, context);
    fake->failing = NULL;
    CHILD_REQUIRE((int)shape.tile == expected);
    CHILD_REQUIRE(fake->memory == memory);
    int total = 0;
    for (int i = 0; i < TILES; i++) total += launched[i];
    CHILD_REQUIRE((total > 0) == p->measures);
    memset(launched, 0, sizeof launched);
    for (int i = 0; i < 2; i++) CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
    for (int i = 0; i < TILES; i++) CHILD_REQUIRE(launched[i] == (i == expected ? 2 : 0));
    expect_explained(&call, p);
}

/* With an activation, tiles that the cost model counts within 5 % are candidates. */
static void run_process(process p) {
    p.activation = DW_ACTIVATION_GELU_TANH;
    expect_child(start_child(run, &p));
}

/* ---- tests ------------------------------------------------------------------------------------------------------ */

/* All that compute a call, in the order of the tiles, with the clocks of the cost model. */
static void test_proposals(void **state) {
    const process plain = {.m = M}, large = {.m = 8192, .n = 8192, .k = 8192};
    dw__sm90_proposal all[DW__SM90_MOST_PROPOSALS];
    int best = -1;
    (void)state;
    for (int with_room = 0; with_room < 2; with_room++) {
        dw_gemm call = call_of(with_room ? &large : &plain);
        if (with_room) call.workspace_bytes = SIZE_MAX;
        const dw__gemm_groups_call c = dw__gemm_single(&call, (dw__gemm_turned){false, false});
        const int count = dw__sm90_proposals(&c, 132, all, &best);
        int shared = 0;
        assert_true(count >= TILES && best >= 0 && best < count);
        for (int i = 0; i < count; i++) {
            assert_true(all[i].clocks > 0.0);
            assert_true(all[best].clocks <= all[i].clocks * DW__SM90_CLOSE_CLOCKS);
            assert_true(i == 0 || all[i].shape.split || all[i - 1].shape.tile < all[i].shape.tile);
            assert_true(dw__sm90_exists(&all[i].shape));
            shared += all[i].shape.split;
        }
        assert_int_equal(shared > 0, with_room);
        assert_int_equal(all[best].shape.params, dw__sm90_shape_of(&c, 132).params);
    }
}

/* Returns the candidates' tiles in the file, which follow the chosen one. */
static int candidates_in_file(int tiles[4]) {
    char *text = NULL, name[32];
    size_t bytes = 0;
    int count = 0;
    assert_int_equal(dw__file_read(kept_path, &text, &bytes), DW_OK);
    const char *detail = strstr(text, "\"detail\"");
    assert_non_null(detail);
    const char *list = strchr(detail + 8, '"'), *end = strchr(list + 1, '"');
    for (int i = 0; i < TILES; i++) {
        const dw__sm90_tile *t = &dw__sm90_tiles[i];
        int used = snprintf(name, sizeof name, "%dx%dx%d", t->m, t->n, t->stages);
        if (t->cluster) used += snprintf(name + used, sizeof name - used, "c%d", t->cluster);
        snprintf(name + used, sizeof name - used, " ");
        const char *at = strstr(list, name);
        if (at && at < end) tiles[count++] = i;
    }
    dw__free(text);
    return count;
}

/* The fastest of the proposals is kept: later processes measure nothing, whatever is faster now. */
static void test_fastest(void **state) {
    int tiles[4];
    (void)state;
    run_process((process){.fastest = -1, .measures = true, .is_kept = true}); /* equal times */
    const int count = candidates_in_file(tiles);
    assert_true(count >= 2);
    for (int i = 0; i < count; i++) {
        process p = {.fastest = tiles[i], .measures = true, .is_kept = true};
        p.times[tiles[i]] = 5.0f;
        assert_int_equal(unlink(kept_path), 0);
        run_process(p);
        p.measures = false;
        memset(p.times, 0, sizeof p.times);
        for (int other = 0; other < count; other++)
            if (other != i) p.times[tiles[other]] = 1.0f;
        run_process(p);
    }
    /* Another product is measured by itself. */
    run_process((process){.k = 2 * K, .fastest = -1, .measures = true, .is_kept = true});
    /* One with a bias, a residual and factors of rows, too. */
    run_process((process){.has_all = true, .fastest = -1, .measures = true, .is_kept = true});
}

/* The cost model's tile is kept unless another one is faster by 2 %. */
static void test_small_gain(void **state) {
    int tiles[4];
    (void)state;
    (void)unlink(kept_path);
    run_process((process){.fastest = -1, .measures = true, .is_kept = true});
    const int count = candidates_in_file(tiles);
    process p = {.fastest = -1, .measures = true, .is_kept = true};
    for (int i = 0; i < count; i++) p.times[tiles[i]] = 5.0f;
    for (int i = 0; i < count; i++) {
        p.times[tiles[i]] = 4.95f;
        assert_int_equal(unlink(kept_path), 0);
        run_process(p);
        p.times[tiles[i]] = 5.0f;
    }
}

/* Where blocks share tiles, the call has a workspace for their sums; without one it runs another tile. */
static void run_shared(void *argument) {
    const process *wanted = argument;
    const process p = {.m = 768, .n = 3072, .k = 16384};
    const bool shares = wanted->fastest > 0;
    dw_gemm call = call_of(&p);
    size_t bytes = 0;
    shared_milliseconds = shares ? 5.0f : 20.0f;
    begin_on_hopper();
    const dw__gemm_groups_call single = dw__gemm_single(&call, (dw__gemm_turned){false, false});
    dw__gemm_groups_call with_room = single;
    with_room.gemm.workspace_bytes = SIZE_MAX;
    CHILD_REQUIRE(dw__sm90_shape_of(&with_room, 132).split);
    CHILD_REQUIRE(dw_gemm_workspace(&call, &bytes) == DW_OK && (bytes > 0) == shares);
    CHILD_REQUIRE((launched_shared > 0) == wanted->measures);
    for (int room = 0; room < 2; room++) {
        launched_shared = 0;
        call.workspace = room ? (void *)((uintptr_t)4 << 32) : NULL;
        call.workspace_bytes = room ? (size_t)1 << 30 : 0;
        CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK);
        CHILD_REQUIRE(launched_shared == (room && shares));
    }
}

static void test_shared_tiles(void **state) {
    (void)state;
    for (int shares = 0; shares < 2; shares++) {
        (void)unlink(kept_path);
        for (int i = 0; i < 2; i++) {
            process p = {.fastest = shares, .measures = i == 0};
            expect_child(start_child(run_shared, &p));
        }
    }
}

/* Products by themselves have the tiles that the cost model counts as no slower than its own. */
static void test_no_candidate(void **state) {
    (void)state;
    (void)unlink(kept_path);
    process p = {.m = 8192, .n = 2048, .k = 2048, .fastest = -1};
    for (int i = 0; i < TILES; i++) p.times[i] = (float)(1 + i);
    expect_child(start_child(run, &p));
    assert_int_equal(access(kept_path, F_OK), -1);
}

/* Nothing is measured that is not worth it, that cannot be kept, or that the user does not want to be. */
static void test_not_measured(void **state) {
    (void)state;
    (void)unlink(kept_path);
    run_process((process){.m = 512, .fastest = -1}); /* 6e8 FLOPs */
    run_process((process){.autotune = "0", .fastest = -1});
    run_process((process){.autotune = "off", .fastest = -1});
    run_process((process){.cache = "/proc/none", .fastest = -1});
    assert_int_equal(access(kept_path, F_OK), -1);
}

typedef struct chooser {
    dw_gemm call;
    dw__sm90_shape shape;
} chooser;

static void *choose(void *argument) {
    chooser *c = argument;
    const dw__gemm_groups_call single = dw__gemm_single(&c->call, (dw__gemm_turned){false, false});
    c->shape = dw__sm90_choose(&single, context);
    return NULL;
}

/* Threads that choose at the same time choose the same, and each product is measured once. */
static void run_threads(void *argument) {
    enum { THREADS = 8, PRODUCTS = 2, FASTEST = 1 };
    const process *p = argument;
    chooser choosers[THREADS];
    pthread_t threads[THREADS];
    memcpy(milliseconds, p->times, sizeof milliseconds);
    begin_on_hopper();
    for (int i = 0; i < THREADS; i++) {
        process one = *p;
        one.k = K * (1 + i % PRODUCTS);
        choosers[i].call = call_of(&one);
        CHILD_REQUIRE(pthread_create(&threads[i], NULL, choose, &choosers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) CHILD_REQUIRE(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        CHILD_REQUIRE(choosers[i].shape.params == choosers[i % PRODUCTS].shape.params);
    CHILD_REQUIRE(choosers[0].shape.tile == FASTEST);
    const int by_threads = launched[FASTEST];
    choose(&choosers[0]);
    CHILD_REQUIRE(by_threads > 0 && launched[FASTEST] == by_threads);
}

static void test_threads(void **state) {
    (void)state;
    (void)unlink(kept_path);
    process p = {.activation = DW_ACTIVATION_GELU_TANH};
    p.times[1] = 1.0f;
    expect_child(start_child(run_threads, &p));
}

/* The first-use check, which calls kernels of the family, refuses the tiles: the reference computes the product. */
static void run_refused(void *unused) {
    const process p = {.m = M, .activation = DW_ACTIVATION_GELU_TANH};
    const dw_gemm call = call_of(&p);
    size_t bytes;
    (void)unused;
    alarm(60);
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    begin_on_hopper();
    CHILD_REQUIRE(dw_gemm_workspace(&call, &bytes) == DW_OK && bytes == 0);
    fake->launch_count = 0;
    CHILD_REQUIRE(dw_gemm_run(&call) == DW_OK && fake->launch_count == 1);
    CHILD_REQUIRE(strstr(fake->launches[0].name, "reference"));
}

static void test_refused(void **state) {
    (void)state;
    (void)unlink(kept_path);
    expect_child(start_child(run_refused, NULL));
}

/* Without memory for a measurement the cost model's tile runs, also later. */
static void test_no_memory(void **state) {
    process p = {.failing = "cuMemAlloc_v2", .fastest = -1};
    (void)state;
    (void)unlink(kept_path);
    run_process(p);
    for (int i = 0; i < TILES; i++) p.times[i] = (float)(1 + i);
    p.failing = NULL;
    run_process(p);
}

/* Whatever the file holds, a tile computes the product. */
static void test_damaged(void **state) {
    char *text = NULL, *changed = NULL;
    size_t bytes = 0;
    (void)state;
    (void)unlink(kept_path);
    run_process((process){.fastest = -1, .measures = true, .is_kept = true});
    assert_int_equal(dw__file_read(kept_path, &text, &bytes), DW_OK);
    changed = dw__malloc(bytes);
    assert_non_null(changed);
    const size_t detail = (size_t)(strstr(text, "\"detail\"") + 11 - text);
    for (size_t i = 0; i < 40; i += 3) {
        memcpy(changed, text, bytes);
        changed[detail + i] = changed[detail + i] == '1' ? '0' : '1';
        assert_int_equal(dw__file_write(kept_path, changed, bytes), DW_OK);
        run_process((process){.fastest = -1, .measures = true, .is_kept = true});
    }
    for (size_t cut = 0; cut < bytes; cut += 1 + bytes / 40) {
        assert_int_equal(dw__file_write(kept_path, text, cut), DW_OK);
        run_process((process){.fastest = -1, .measures = true, .is_kept = true});
    }
    dw__free(changed);
    dw__free(text);
}

static int set_up(void **state) {
    if (begin_on_fake_gpu(state) != 0) return -1;
    unsetenv("DEEPWELL_AUTOTUNE");
    snprintf(kept_path, sizeof kept_path, "%s/tune/Fake_GPU_0.json", folder);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_proposals),    cmocka_unit_test(test_fastest),
        cmocka_unit_test(test_small_gain),   cmocka_unit_test(test_shared_tiles),
        cmocka_unit_test(test_no_candidate), cmocka_unit_test(test_not_measured),
        cmocka_unit_test(test_threads),      cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_memory),    cmocka_unit_test(test_damaged),
    };
    return cmocka_run_group_tests(tests, set_up, end_on_fake_gpu);
}
