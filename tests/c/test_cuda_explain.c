/* Who computes attention, as explained, and the measurements that decide: on a fake GPU, and without one. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/attention_candidates.h"
#include "kernel/tune.h"
#include <glob.h>
#include <limits.h>
#include <math.h>

static char folder[256];

static dw_attention_tensor tensor(int64_t heads, int64_t rows, int64_t head_dim) {
    return (dw_attention_tensor){
        .batch = heads * rows * head_dim, .head = rows * head_dim, .row = head_dim};
}

static dw_attention plain_call(void) {
    dw_attention call = {.size = sizeof call,
                         .dtype = DW_BF16,
                         .batch = 8,
                         .heads_q = 16,
                         .heads_kv = 4,
                         .rows_q = 2048,
                         .rows_k = 2048,
                         .head_dim = 128,
                         .scale = 0.1f,
                         .window_left = -1,
                         .window_right = -1,
                         .bottom_right = true};
    call.q = call.o = call.d_o = call.dq = tensor(16, 2048, 128);
    call.k = call.v = call.dk = call.dv = tensor(4, 2048, 128);
    return call;
}

static json_t *explained(const dw_attention *call, bool backward, const char *target) {
    char *text = NULL;
    json_error_t error;
    dw_status status = dw_attention_explain(call, backward, target, &text);
    if (status != DW_OK) fail_msg("%s", dw_last_error());
    json_t *root = json_loads(text, 0, &error);
    assert_non_null(root);
    dw_text_free(text);
    return root;
}

static const char *text_of(const json_t *object, const char *key) {
    return json_string_value(json_object_get(object, key));
}

static const json_t *candidate(const json_t *root, const char *name) {
    size_t index;
    const json_t *at;
    json_array_foreach(json_object_get(root, "candidates"), index, at) {
        if (strcmp(text_of(at, "name"), name) == 0) return at;
    }
    fail();
    return NULL;
}

static bool runs(const json_t *root, const char *name) {
    const json_t *c = candidate(root, name);
    bool yes = json_is_true(json_object_get(c, "runs"));
    assert_int_equal(yes, json_is_null(json_object_get(c, "reason"))); /* who does not says why */
    assert_true(strlen(text_of(c, "source")) > 0 && strlen(text_of(c, "tolerance")) > 0);
    return yes;
}

/* ---- without a GPU ------------------------------------------------------------------------------------ */

static void test_without_gpu(void **state) {
    (void)state;
    dw_attention call = plain_call();
    char *text = NULL;
    if (dlopen("libcuda.so.1", RTLD_NOW)) skip(); /* this machine has one */
    assert_int_equal(dw_attention_explain(&call, false, NULL, &text), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "name a target"));
    assert_int_equal(dw_attention_explain(&call, false, "sm_100a", &text), DW_INVALID_ARGUMENT);
    json_t *root = explained(&call, false, "sm_90a");
    assert_true(json_is_null(json_object_get(root, "gpu")));
    assert_non_null(strstr(text_of(root, "gpu_error"), "there is no NVIDIA driver"));
    assert_string_equal(text_of(root, "chosen"), "deepwell");
    assert_string_equal(text_of(root, "target"), "sm_90a");
    json_decref(root);
}

/* What each takes, as a table: deepwell, cudnn, flash, efficient, math. */
static void test_who_takes_what(void **state) {
    (void)state;
    static const char *const names[] = {"deepwell", "cudnn", "flash", "efficient", "math"};
    dw_attention calls[12];
    for (size_t i = 0; i < DW_COUNT(calls); i++) calls[i] = plain_call();
    calls[1].window_right = 0;
    calls[2].window_right = 0, calls[2].rows_q = 100; /* the last query with the last key */
    calls[3] = calls[2], calls[3].bottom_right = false;
    calls[4].window_left = 100;
    calls[5].softcap = 30.0f;
    calls[6].offsets_q = calls[6].offsets_k = (int32_t *)64,
    calls[6].total_q = calls[6].total_k = 10000;
    calls[7].head_dim = 100;
    calls[8].head_dim = 264;
    calls[9].dropout = 0.1f;
    calls[10].dropout = 0.1f, calls[10].seed = 3;
    calls[11].k.head = 0; /* an expanded head: ours wants it contiguous */
    static const char *const taken[] = {"+++++", "+++++", "+---+", "++-++", "+---+", "+----",
                                        "+----", "----+", "---++", "+++++", "+----", "-++++"};
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        json_t *root = explained(&calls[i], i % 2 == 1, "sm_90a");
        for (size_t n = 0; n < DW_COUNT(names); n++)
            if (runs(root, names[n]) != (taken[i][n] == '+'))
                fail_msg("call %zu: %s: %s", i, names[n], dw_last_error());
        const char *chosen = text_of(root, "chosen"), *first = strchr(taken[i], '+');
        assert_string_equal(chosen, names[first - taken[i]]);
        json_decref(root);
    }
    dw_attention call = plain_call();
    char *text = NULL;
    call.head_dim = 0; /* nonsense stays an error */
    assert_int_equal(dw_attention_explain(&call, false, "sm_90a", &text), DW_SHAPE);
}

/* Operations against a count over all pairs. */
static void test_work(void **state) {
    (void)state;
    dw_attention call = plain_call();
    const int windows[] = {-1, 0, 5, 300};
    for (size_t l = 0; l < DW_COUNT(windows); l++)
        for (size_t r = 0; r < DW_COUNT(windows); r++)
            for (int corner = 0; corner < 2; corner++) {
                call.rows_q = 77, call.rows_k = 130;
                call.window_left = windows[l], call.window_right = windows[r],
                call.bottom_right = corner;
                double pairs = 0.0;
                for (int i = 0; i < 77; i++)
                    for (int j = 0; j < 130; j++) {
                        int d = i + (corner ? 53 : 0);
                        pairs += (windows[l] < 0 || j >= d - windows[l]) &&
                                 (windows[r] < 0 || j <= d + windows[r]);
                    }
                dw__attention_work forward = dw__attention_work_of(&call, false);
                assert_true(fabs(forward.flops - 4.0 * 8 * 16 * 128 * pairs) <=
                            1e-9 * forward.flops);
                assert_true(dw__attention_work_of(&call, true).flops == 2.5 * forward.flops);
            }
    call = plain_call();
    call.window_right = 0;
    call.rows_q = call.rows_k = 1 << 20; /* counted by samples */
    double causal = dw__attention_work_of(&call, false).flops,
           expected = 2.0 * 8 * 16 * 128 * 0x1p40;
    assert_true(fabs(causal - expected) < 1e-4 * expected);
}

/* Expected times are the measured rates themselves at a measured shape. */
static void test_expected(void **state) {
    (void)state;
    for (size_t i = 0; i < dw__attention_rate_count; i++) {
        const dw__attention_rate *rate = &dw__attention_rates[i];
        dw_attention call = plain_call();
        call.rows_q = call.rows_k = rate->rows, call.head_dim = rate->head_dim;
        call.batch = 16384 / rate->rows;
        call.q = call.o = tensor(16, rate->rows, rate->head_dim),
        call.k = call.v = tensor(4, rate->rows, rate->head_dim);
        call.heads_kv = 4, call.window_right = rate->causal ? 0 : -1;
        json_t *root = explained(&call, false, "sm_90a");
        double seconds =
            json_number_value(json_object_get(candidate(root, "deepwell"), "expected_seconds"));
        double all = 4.0 * call.batch * 16 * rate->head_dim * (double)rate->rows * rate->rows;
        double flops = rate->causal ? 0.5 * all * (1.0 + 1.0 / rate->rows) : all;
        assert_true(fabs(seconds * rate->tflops[DW__RATE_DEEPWELL][0] * 1e12 - flops) <
                    1e-6 * flops);
        json_decref(root);
    }
}

/* ---- measurements ------------------------------------------------------------------------------------- */

static void test_tune(void **state) {
    (void)state;
    double seconds = 0.0;
    assert_int_equal(dw_tune_lookup("a class", "deepwell", &seconds), DW_NOT_FOUND);
    assert_int_equal(dw_tune_record("a class", "deepwell", 1.5e-3), DW_OK);
    assert_int_equal(dw_tune_record("a class", "cudnn", 2.5e-3), DW_OK);
    assert_int_equal(dw_tune_record("b \"class\"", "cudnn", 3e-3), DW_OK);
    assert_int_equal(dw_tune_record("a class", "deepwell", 1.25e-3), DW_OK);
    assert_int_equal(dw_tune_lookup("a class", "deepwell", &seconds), DW_OK);
    assert_true(seconds == 1.25e-3);
    assert_int_equal(dw_tune_lookup("a class", "cudnn", &seconds), DW_OK);
    assert_true(seconds == 2.5e-3);
    assert_int_equal(dw_tune_lookup("b \"class\"", "cudnn", &seconds), DW_OK);
    const double wrong[] = {0.0, -1.0, NAN, INFINITY};
    for (size_t i = 0; i < DW_COUNT(wrong); i++)
        assert_int_equal(dw_tune_record("a class", "cudnn", wrong[i]), DW_INVALID_ARGUMENT);

    /* A damaged file is as good as none. */
    char path[512];
    snprintf(path, sizeof path, "%s/tune/Fake_GPU_0.json", folder);
    const char *const damaged[] = {"",
                                   "{",
                                   "[]",
                                   "{\"measured\": 3}",
                                   "{\"measured\": {\"a class\": 7}}",
                                   "{\"measured\": {\"a class\": {\"deepwell\": \"x\"}}}",
                                   "\xff"};
    for (size_t i = 0; i < DW_COUNT(damaged); i++) {
        assert_int_equal(dw__file_write(path, damaged[i], strlen(damaged[i])), DW_OK);
        assert_int_equal(dw_tune_lookup("a class", "deepwell", &seconds), DW_NOT_FOUND);
        assert_int_equal(dw_tune_record("a class", "deepwell", 1e-3), DW_OK);
        assert_int_equal(dw_tune_lookup("a class", "deepwell", &seconds), DW_OK);
    }
}

static void record_many(void *number) {
    for (int i = 0; i < 20; i++) {
        char shape_class[64];
        snprintf(shape_class, sizeof shape_class, "process %d run %d", *(int *)number, i);
        CHILD_REQUIRE(dw__tune_write("Shared GPU", shape_class, "deepwell", 1.0 + i) == DW_OK);
    }
}

/* Nothing that one process writes is lost to another. */
static void test_processes(void **state) {
    (void)state;
    pid_t children[4];
    int numbers[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) children[i] = start_child(record_many, &numbers[i]);
    for (int i = 0; i < 4; i++) expect_child(children[i]);
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 20; i++) {
            char shape_class[64];
            double seconds;
            snprintf(shape_class, sizeof shape_class, "process %d run %d", n, i);
            assert_int_equal(dw__tune_read("Shared GPU", shape_class, "deepwell", &seconds), DW_OK);
            assert_true(seconds == 1.0 + i);
        }
}

/* Measured times decide once each of those that count has one. */
static void test_choice(void **state) {
    (void)state;
    dw_attention call = plain_call();
    char shape_class[256];
    call.head_dim = 64;
    assert_int_equal(dw_attention_class(&call, true, shape_class, sizeof shape_class), DW_OK);
    assert_string_equal(shape_class, "attention backward bf16 d64 group4 q2048 k2048 heads128");
    const char *const names[] = {"deepwell", "cudnn", "flash", "efficient"};
    const double times[] = {3e-3, 2e-3, 4e-3, 5e-3};
    for (int i = 0; i < 4; i++) {
        json_t *root = explained(&call, true, NULL);
        assert_string_equal(text_of(root, "gpu"), "Fake GPU 0");
        assert_string_equal(text_of(root, "chosen"), "deepwell");
        assert_non_null(strstr(text_of(root, "because"), "not all have been measured"));
        json_decref(root);
        assert_int_equal(dw_tune_record(shape_class, names[i], times[i]), DW_OK);
    }
    json_t *root = explained(&call, true, NULL);
    assert_string_equal(text_of(root, "chosen"), "cudnn");
    assert_non_null(strstr(text_of(root, "because"), "fastest"));
    assert_true(json_number_value(json_object_get(candidate(root, "flash"), "measured_seconds")) ==
                4e-3);
    json_decref(root);
    /* The shapes of a class share it; another class knows nothing. */
    call.rows_q = call.rows_k = 2100;
    root = explained(&call, true, NULL);
    assert_string_equal(text_of(root, "chosen"), "cudnn");
    json_decref(root);
    call.deterministic = true;
    root = explained(&call, true, NULL);
    assert_string_equal(text_of(root, "chosen"), "deepwell");
    json_decref(root);
}

static void test_classes(void **state) {
    (void)state;
    dw_attention call = plain_call();
    char text[256];
    call.dtype = DW_F16, call.window_right = 0, call.softcap = 1.0f, call.dropout = 0.5f,
    call.rows_q = 700;
    call.deterministic = true; /* which is backward's */
    assert_int_equal(dw_attention_class(&call, false, text, sizeof text), DW_OK);
    assert_string_equal(
        text, "attention forward f16 d128 group4 q512 k2048 heads128 causal softcap dropout");
    call.bottom_right = false;
    assert_int_equal(dw_attention_class(&call, true, text, sizeof text), DW_OK);
    assert_string_equal(text, "attention backward f16 d128 group4 q512 k2048 heads128 "
                              "causal-top-left softcap dropout deterministic");
    call.window_left = 9;
    call.rows_k = 0;
    assert_int_equal(dw_attention_class(&call, true, text, sizeof text), DW_OK);
    assert_non_null(strstr(text, "k0 heads128 window softcap"));
}

/* Our kernels are timed with tensors of their own, and the time is written down. */
static void test_measure(void **state) {
    (void)state;
    dw_attention call = plain_call();
    double seconds = 0.0, again = 0.0;
    char shape_class[256];
    call.batch = 1, call.rows_q = call.rows_k = 300;
    for (int backward = 0; backward < 2; backward++) {
        int launches = fake->launch_count;
        assert_int_equal(dw_attention_measure(&call, backward, &seconds), DW_OK);
        assert_true(fabs(seconds - 1.5e-3) < 1e-9); /* what the fake's events say */
        assert_int_equal(fake->launch_count - launches, backward ? 1 + 3 * 13 : 13);
        assert_int_equal(fake->memory, 0);
        assert_int_equal(dw_attention_class(&call, backward, shape_class, sizeof shape_class),
                         DW_OK);
        assert_int_equal(dw_tune_lookup(shape_class, "deepwell", &again), DW_OK);
        assert_true(again == seconds);
    }
    fake->failing = "cuEventElapsedTime";
    fake->result = 700;
    assert_int_equal(dw_attention_measure(&call, false, &seconds), DW_STATE);
    fake->failing = "cuMemAlloc_v2";
    fake->result = 2;
    assert_int_equal(dw_attention_measure(&call, true, &seconds), DW_OUT_OF_MEMORY);
    fake->failing = NULL;
    assert_int_equal(fake->memory, 0);
    call.rows_k = 0;
    assert_int_equal(dw_attention_measure(&call, true, &seconds), DW_INVALID_ARGUMENT);
    call.offsets_q = call.offsets_k = (int32_t *)64;
    assert_int_equal(dw_attention_measure(&call, true, &seconds), DW_UNSUPPORTED);
}

static int setup(void **state) {
    (void)state;
    use_fake_compiler(folder, sizeof folder);
    setenv("DEEPWELL_GUARD", "off", 1);
    return 0;
}

static int load_driver(void **state) {
    (void)state;
    load_fake_driver();
    return 0;
}

static int teardown(void **state) {
    (void)state;
    remove_folder(folder);
    return 0;
}

static void without_gpu(void *unused) {
    (void)unused;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_gpu),
        cmocka_unit_test(test_who_takes_what),
    };
    if (cmocka_run_group_tests(tests, NULL, NULL) != 0) _exit(1);
}

static void test_in_a_process_without_gpu(void **state) {
    (void)state;
    expect_child(start_child(without_gpu, NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_in_a_process_without_gpu),
        cmocka_unit_test_setup(test_who_takes_what, load_driver), /* for all that follow, too */

        cmocka_unit_test(test_work),
        cmocka_unit_test(test_expected),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_tune),
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_measure),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
