/* explain: which backend computes attention, and how measurements decide, on a fake GPU and without one. */
#include "base/json.h"
#include "deepwell/explain.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/gpu_attention.h"
#include "kernel/tune.h"
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <sys/stat.h>

static dw_attention_tensor tensor(int64_t heads, int64_t rows, int64_t head_dim) {
    return (dw_attention_tensor){
        .batch = heads * rows * head_dim, .head = rows * head_dim, .row = head_dim};
}

static dw_attention plain_call(void) {
    dw_attention call = {.struct_size = sizeof call,
                         .dtype = DW_BF16,
                         .batch = 8,
                         .heads_q = 16,
                         .heads_kv = 4,
                         .seq_len_q = 2048,
                         .seq_len_kv = 2048,
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
    /* A backend that does not support the call says why. */
    assert_int_equal(yes, json_is_null(json_object_get(c, "reason")));
    assert_true(strlen(text_of(c, "source")) > 0 && strlen(text_of(c, "tolerance")) > 0);
    return yes;
}

/* ---- without a GPU ------------------------------------------------------------------------------------ */

static void test_without_gpu(void **state) {
    (void)state;
    dw_attention call = plain_call();
    char *text = NULL;
    if (dlopen("libcuda.so.1", RTLD_NOW)) skip(); /* this machine has a GPU */
    assert_int_equal(dw_attention_explain(&call, false, NULL, &text), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "name a target"));
    assert_int_equal(dw_attention_explain(&call, false, "sm_42", &text), DW_INVALID_ARGUMENT);
    json_t *root = explained(&call, false, "sm_90a");
    assert_true(json_is_null(json_object_get(root, "gpu")));
    assert_non_null(strstr(text_of(root, "gpu_error"), "there is no NVIDIA driver"));
    assert_string_equal(text_of(root, "chosen"), "deepwell");
    assert_string_equal(text_of(root, "target"), "sm_90a");
    json_decref(root);
}

/* Blackwell's own kernel is used only on request, and explain does not attribute another GPU's times to it. */
static void test_blackwell(void **state) {
    (void)state;
    dw_attention call = plain_call();
    unsetenv("DEEPWELL_BLACKWELL");
    json_t *root = explained(&call, false, "sm_100a");
    assert_false(runs(root, "deepwell"));
    assert_string_not_equal(text_of(root, "chosen"), "deepwell");
    assert_non_null(strstr(text_of(candidate(root, "deepwell"), "reason"),
                           "proven on the emulator, not run on hardware"));
    json_decref(root);
    setenv("DEEPWELL_BLACKWELL", "try", 1);
    root = explained(&call, false, "sm_100a");
    assert_true(runs(root, "deepwell"));
    assert_true(json_is_null(json_object_get(candidate(root, "deepwell"), "expected_seconds")));
    assert_non_null(strstr(text_of(candidate(root, "deepwell"), "expected_from"),
                           "proven on the emulator, not run on hardware"));
    json_decref(root);
    root = explained(&call, true, "sm_103a");
    assert_false(runs(root, "deepwell"));
    json_decref(root);
    unsetenv("DEEPWELL_BLACKWELL");
}

/* A table of the calls that each backend supports: deepwell, cudnn, flash, efficient, math. */
static void test_supported_calls_of_each_backend(void **state) {
    (void)state;
    static const char *const names[] = {"deepwell", "cudnn", "flash", "efficient", "math"};
    dw_attention calls[12];
    for (size_t i = 0; i < DW_COUNT(calls); i++) calls[i] = plain_call();
    calls[1].window_right = 0;
    /* the last query sees up to the last key */
    calls[2].window_right = 0, calls[2].seq_len_q = 100;
    calls[3] = calls[2], calls[3].bottom_right = false;
    calls[4].window_left = 100;
    calls[5].softcap = 30.0f;
    calls[6].offsets_q = calls[6].offsets_k = (int32_t *)64,
    calls[6].total_q = calls[6].total_k = 10000;
    calls[7].head_dim = 100;
    calls[8].head_dim = 264;
    calls[9].dropout = 0.1f;
    calls[10].dropout = 0.1f, calls[10].seed = 3;
    calls[11].k.head = 0; /* an expanded head: Deepwell's kernel requires it to be contiguous */
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
    call.head_dim = 0; /* an invalid call is still an error */
    assert_int_equal(dw_attention_explain(&call, false, "sm_90a", &text), DW_SHAPE);
}

/* Checks the number of operations against a count over all pairs. */
static void test_work(void **state) {
    (void)state;
    dw_attention call = plain_call();
    const int windows[] = {-1, 0, 5, 300};
    for (size_t l = 0; l < DW_COUNT(windows); l++)
        for (size_t r = 0; r < DW_COUNT(windows); r++)
            for (int corner = 0; corner < 2; corner++) {
                call.seq_len_q = 77, call.seq_len_kv = 130;
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
    call.seq_len_q = call.seq_len_kv = 1 << 20; /* the count is sampled */
    double causal = dw__attention_work_of(&call, false).flops,
           expected = 2.0 * 8 * 16 * 128 * 0x1p40;
    assert_true(fabs(causal - expected) < 1e-4 * expected);
}

/* At a measured shape the expected times are the measured rates. */
static void test_expected(void **state) {
    (void)state;
    for (size_t i = 0; i < dw__attention_rate_count; i++) {
        const dw__attention_rate *rate = &dw__attention_rates[i];
        dw_attention call = plain_call();
        call.seq_len_q = call.seq_len_kv = rate->rows, call.head_dim = rate->head_dim;
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

/* Reads the record that dw_tune_record has stored for the calling thread's GPU. */
static dw_status lookup(const char *shape_class, const char *name, double *seconds) {
    dw__tuned found;
    DW_RETURN_IF_FAILED(dw__tune_read("Fake GPU 0", shape_class, name, &found));
    *seconds = found.seconds;
    return DW_OK;
}

static void test_tune(void **state) {
    (void)state;
    double seconds = 0.0;
    assert_int_equal(lookup("a class", "deepwell", &seconds), DW_NOT_FOUND);
    assert_int_equal(dw_tune_record("a class", "deepwell", 1.5e-3), DW_OK);
    assert_int_equal(dw_tune_record("a class", "cudnn", 2.5e-3), DW_OK);
    assert_int_equal(dw_tune_record("b \"class\"", "cudnn", 3e-3), DW_OK);
    assert_int_equal(dw_tune_record("a class", "deepwell", 1.25e-3), DW_OK);
    assert_int_equal(lookup("a class", "deepwell", &seconds), DW_OK);
    assert_true(seconds == 1.25e-3);
    assert_int_equal(lookup("a class", "cudnn", &seconds), DW_OK);
    assert_true(seconds == 2.5e-3);
    assert_int_equal(lookup("b \"class\"", "cudnn", &seconds), DW_OK);
    const double wrong[] = {0.0, -1.0, NAN, INFINITY};
    for (size_t i = 0; i < DW_COUNT(wrong); i++)
        assert_int_equal(dw_tune_record("a class", "cudnn", wrong[i]), DW_INVALID_ARGUMENT);

    /* A damaged file counts as missing. */
    char path[512];
    snprintf(path, sizeof path, "%s/tune/Fake_GPU_0.json", folder);
    const char *const damaged[] = {
        "",
        "{",
        "[]",
        "{\"measured\": 3}",
        "{\"measured\": {\"a class\": 7}}",
        "{\"measured\": {\"a class\": {\"deepwell\": \"x\"}}}",
        "{\"measured\": {\"a class\": {\"deepwell\": 0.1}}}",
        "{\"measured\": {\"a class\": {\"deepwell\": {}}}}",
        "{\"measured\": {\"a class\": {\"deepwell\": {\"seconds\": -1}}}}",
        "{\"measured\": {\"a class\": {\"deepwell\": {\"failure\": 3}}}}",
        "\xff"};
    for (size_t i = 0; i < DW_COUNT(damaged); i++) {
        assert_int_equal(dw__file_write(path, damaged[i], strlen(damaged[i])), DW_OK);
        assert_int_equal(lookup("a class", "deepwell", &seconds), DW_NOT_FOUND);
        assert_int_equal(dw_tune_record("a class", "deepwell", 1e-3), DW_OK);
        assert_int_equal(lookup("a class", "deepwell", &seconds), DW_OK);
    }
}

/* Measurements choose the backend. Those in a folder that others can write to are neither read nor written,
 * and neither the file nor its lock is reached through a link. */
static void test_folder_writable_by_others(void **state) {
    (void)state;
    char own[512], tune[600], path[700], victim[700], *text = NULL;
    const dw_tune_time time = {.name = "deepwell", .seconds = 1e-3};
    dw__tuned found;
    size_t bytes;
    snprintf(own, sizeof own, "%s/others", folder);
    snprintf(tune, sizeof tune, "%s/tune", own);
    snprintf(victim, sizeof victim, "%s/victim", folder);
    setenv("DEEPWELL_CACHE", own, 1);
    assert_int_equal(dw__tune_read("GPU", "a class", "deepwell", &found), DW_NOT_FOUND);
    assert_int_equal(dw__tune_write("GPU", "a class", NULL, &time, 1), DW_OK);
    const char *const folders[] = {own, tune};
    for (size_t i = 0; i < DW_COUNT(folders); i++) {
        assert_int_equal(chmod(folders[i], 0777), 0);
        assert_int_equal(dw__tune_read("GPU", "a class", "deepwell", &found), DW_IO);
        assert_int_equal(dw__tune_write("GPU", "another", NULL, &time, 1), DW_IO);
        assert_non_null(strstr(dw_last_error(), "other users can write to it"));
        assert_int_equal(chmod(folders[i], 0700), 0);
        assert_int_equal(dw__tune_read("GPU", "a class", "deepwell", &found), DW_OK);
        assert_int_equal(dw__tune_read("GPU", "another", "deepwell", &found), DW_NOT_FOUND);
    }
    snprintf(path, sizeof path, "%s/GPU.json", tune);
    assert_int_equal(rename(path, victim), 0);
    assert_int_equal(symlink(victim, path), 0);
    assert_int_equal(dw__tune_read("GPU", "a class", "deepwell", &found), DW_NOT_FOUND);
    assert_int_equal(dw__tune_write("GPU", "another", NULL, &time, 1), DW_OK);
    assert_int_equal(dw__tune_read("GPU", "another", "deepwell", &found), DW_OK);
    assert_int_equal(dw__file_read(victim, &text, &bytes), DW_OK);
    assert_null(strstr(text, "another"));
    dw__free(text);
    strcat(path, ".lock");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink(victim, path), 0);
    assert_int_equal(dw__tune_write("GPU", "a third", NULL, &time, 1), DW_IO);
    assert_non_null(strstr(dw_last_error(), "GPU.json.lock"));
    setenv("DEEPWELL_CACHE", folder, 1);
}

static void record_many(void *number) {
    for (int i = 0; i < 20; i++) {
        char shape_class[64];
        snprintf(shape_class, sizeof shape_class, "process %d run %d", *(int *)number, i);
        const dw_tune_time time = {.name = "deepwell", .seconds = 1.0 + i};
        CHILD_REQUIRE(dw__tune_write("Shared GPU", shape_class, NULL, &time, 1) == DW_OK);
    }
}

/* Concurrent writers lose no measurement. */
static void test_processes(void **state) {
    (void)state;
    pid_t children[4];
    int numbers[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++) children[i] = start_child(record_many, &numbers[i]);
    for (int i = 0; i < 4; i++) expect_child(children[i]);
    for (int n = 0; n < 4; n++)
        for (int i = 0; i < 20; i++) {
            char shape_class[64];
            dw__tuned found;
            snprintf(shape_class, sizeof shape_class, "process %d run %d", n, i);
            assert_int_equal(dw__tune_read("Shared GPU", shape_class, "deepwell", &found), DW_OK);
            assert_true(found.seconds == 1.0 + i);
        }
}

/* Several processes measure at once: all of them read the first one's result. */
static void test_publish(void **state) {
    (void)state;
    dw__tuned found;
    const char gpu[] = "Published GPU", of[] = "a class", with[] = "torch 2";
    dw_tune_time first[] = {{"deepwell", 1e-3, 1e-6, NULL},
                            {"cudnn", 0.0, 0.0,
                             "\xc3\xa9"
                             "chec\nsecond line"}};
    dw_tune_time second[] = {{"deepwell", 2e-3, 0.0, NULL}, {"cudnn", 3e-3, 0.0, NULL}};
    assert_int_equal(dw__tune_write(gpu, of, with, first, 2), DW_OK);
    assert_int_equal(dw__tune_write(gpu, of, with, second, 2), DW_OK);
    assert_int_equal(dw__tune_read(gpu, of, "deepwell", &found), DW_OK);
    assert_true(found.seconds == 1e-3 && found.error == 1e-6);
    assert_string_equal(found.with, with);
    assert_int_equal(dw__tune_read(gpu, of, "cudnn", &found), DW_OK);
    assert_true(found.seconds == 0.0);
    assert_string_equal(found.failure, "\xc3\xa9"
                                       "chec");
    /* With one more candidate, or another version, everything is measured again. */
    dw_tune_time more[] = {second[0], second[1], {"flash", 4e-3, 0.0, NULL}};
    assert_int_equal(dw__tune_write(gpu, of, with, more, 3), DW_OK);
    assert_int_equal(dw__tune_read(gpu, of, "deepwell", &found), DW_OK);
    assert_true(found.seconds == 2e-3);
    assert_int_equal(dw__tune_write(gpu, of, "torch 3", first, 1), DW_OK);
    assert_int_equal(dw__tune_read(gpu, of, "deepwell", &found), DW_OK);
    assert_true(found.seconds == 1e-3);
    assert_string_equal(found.with, "torch 3");
    assert_int_equal(dw__tune_read(gpu, of, "flash", &found), DW_NOT_FOUND);
    /* Entries without content are removed. */
    char path[512];
    const char hollow[] = "{\"measured\": {\"a class\": {\"with\": \"torch 2\", \"deepwell\": {}, "
                          "\"cudnn\": {\"failure\": \"\"}}}}";
    snprintf(path, sizeof path, "%s/tune/Published_GPU.json", folder);
    assert_int_equal(dw__file_write(path, hollow, strlen(hollow)), DW_OK);
    assert_int_equal(dw__tune_write(gpu, of, with, first, 2), DW_OK);
    assert_int_equal(dw__tune_read(gpu, of, "deepwell", &found), DW_OK);
    assert_int_equal(dw__tune_read(gpu, of, "cudnn", &found), DW_OK);
    /* Reasons that are empty or too long are handled. */
    char lengthy[1000];
    memset(lengthy, 'x', sizeof lengthy - 1);
    lengthy[sizeof lengthy - 1] = '\0';
    const char *const reasons[] = {"", "\n", "\xff", lengthy};
    for (size_t i = 0; i < DW_COUNT(reasons); i++) {
        dw_tune_time failed = {"cudnn", 0.0, 0.0, reasons[i]};
        assert_int_equal(dw__tune_write(gpu, of, NULL, &failed, 1), DW_OK);
        assert_int_equal(dw__tune_read(gpu, of, "cudnn", &found), DW_OK);
        assert_true(strlen(found.failure) > 0);
    }
    dw_tune_time wrong = {"cudnn", 1.0, -1.0, NULL};
    assert_int_equal(dw__tune_write(gpu, of, NULL, &wrong, 1), DW_INVALID_ARGUMENT);
}

static const char with_this[] = "torch 2";

/* Writes the times of "deepwell", "cudnn" and "flash"; 0 means that the candidate failed. */
static void publish(const dw_attention *call, bool backward, const double *times, double error) {
    static const char *const names[] = {"deepwell", "cudnn", "flash"};
    char shape_class[256];
    dw_tune_time made[3];
    for (int i = 0; i < 3; i++)
        made[i] = (dw_tune_time){names[i], times[i], error, times[i] > 0.0 ? NULL : "it would not"};
    assert_int_equal(dw_attention_class(call, backward, shape_class, sizeof shape_class), DW_OK);
    /* Clears the stored measurements. */
    assert_int_equal(dw_tune_publish(shape_class, "nothing", made, 0), DW_OK);
    assert_int_equal(dw_tune_publish(shape_class, with_this, made, 3), DW_OK);
}

static dw_attention_decision decided(const dw_attention *call, bool gradients, const char *with) {
    dw_attention_decision made = {.struct_size = sizeof made};
    assert_int_equal(dw_attention_decide(call, gradients, with, false, &made), DW_OK);
    return made;
}

static const char *chosen(const dw_attention *call, bool gradients) {
    const dw_attention_decision made = decided(call, gradients, with_this);
    /* Explained alike. */
    json_t *root = explained(call, gradients, NULL);
    const json_t *own = candidate(root, "deepwell");
    assert_string_equal(text_of(root, "chosen"), made.name);
    assert_string_equal(text_of(root, "because"), made.because);
    assert_int_equal(made.verdict,
                     strcmp(made.name, "deepwell") == 0 ? DW_ATTENTION_OURS : DW_ATTENTION_OTHERS);
    assert_string_equal(made.refusal, runs(root, "deepwell") ? "" : text_of(own, "reason"));
    json_decref(root);
    return made.name;
}

/* Measured times decide once each counting backend has one; forward and backward count together. */
static void test_choice(void **state) {
    (void)state;
    dw_attention call = plain_call();
    char shape_class[256];
    call.head_dim = 64;
    assert_int_equal(dw_attention_class(&call, true, shape_class, sizeof shape_class), DW_OK);
    assert_string_equal(shape_class, "attention backward bf16 d64 group4 q2048 k2048 heads128");
    const double forward[] = {1e-3, 2e-3, 4e-3}, backward[] = {3e-3, 1.5e-3, 5e-3};
    for (int passes = 0; passes < 2; passes++) {
        json_t *root = explained(&call, true, NULL);
        assert_string_equal(text_of(root, "gpu"), "Fake GPU 0");
        assert_string_equal(text_of(root, "chosen"), "deepwell");
        assert_non_null(strstr(text_of(root, "because"), "not all have been measured"));
        json_decref(root);
        assert_int_equal(decided(&call, true, with_this).verdict, DW_ATTENTION_UNMEASURED);
        publish(&call, passes == 0, passes == 0 ? backward : forward, 0.0);
    }
    assert_string_equal(chosen(&call, true), "cudnn"); /* 3.5 ms compared with 4 ms */
    json_t *root = explained(&call, true, NULL);
    assert_string_equal(text_of(root, "because"),
                        "cuDNN is faster here: 3.5 ms against 4, forward and backward");
    assert_true(json_number_value(json_object_get(candidate(root, "flash"), "measured_seconds")) ==
                5e-3);
    json_decref(root);
    assert_string_equal(chosen(&call, false), "deepwell"); /* 1 ms against 2 */
    assert_int_equal(decided(&call, true, "torch 3").verdict, DW_ATTENTION_UNMEASURED);
    assert_int_equal(decided(&call, true, NULL).verdict, DW_ATTENTION_OTHERS);
    /* All shapes of a class share its measurement; other classes are unaffected. */
    call.seq_len_q = call.seq_len_kv = 2100;
    assert_string_equal(chosen(&call, true), "cudnn");
    call.deterministic = true;
    root = explained(&call, true, NULL);
    assert_string_equal(text_of(root, "chosen"), "deepwell");
    json_decref(root);
    /* A call that no other backend supports needs no measurement. */
    call.softcap = 3.0f;
    assert_string_equal(chosen(&call, true), "deepwell");
    call = plain_call(), call.head_dim = 100;
    assert_string_equal(chosen(&call, false), "math");
}

/* A call without an alternative is ours, however fast others were measured to be for its class, and explained so. */
static void test_calls_without_alternative(void **state) {
    (void)state;
    static const double others_faster[] = {5e-3, 1e-3, 1e-3};
    dw_attention calls[9];
    for (size_t i = 0; i < DW_COUNT(calls); i++) calls[i] = plain_call();
    calls[1].window_right = 0; /* causal, as many queries as keys */
    calls[2].dropout = 0.1f;
    calls[3].deterministic = true;
    calls[4].softcap = 30.0f;
    calls[5].window_left = 100;
    calls[6].window_right = 7;
    calls[7].window_right = 0, calls[7].seq_len_q = 100; /* the last query with the last key */
    calls[8].offsets_q = calls[8].offsets_k = (int32_t *)64,
    calls[8].total_q = calls[8].total_k = 10000;
    for (size_t i = 0; i < DW_COUNT(calls); i++) {
        calls[i].batch = 5;
        if (calls[i].offsets_q) calls[i].batch = 8;
        publish(&calls[i], false, others_faster, 0.0);
        publish(&calls[i], true, others_faster, 0.0);
        const char *expected = i < 2 ? "cudnn" : "deepwell";
        assert_int_equal(dw_attention_has_alternative(&calls[i]), i < 2);
        if (strcmp(chosen(&calls[i], true), expected) != 0) fail_msg("case %zu", i);
    }
    json_t *root = explained(&calls[2], true, NULL);
    assert_string_equal(text_of(root, "because"),
                        "the first in order; calls with dropout are not measured");
    json_decref(root);
    calls[2].k.head = 0; /* ours wants the heads contiguous */
    assert_string_equal(chosen(&calls[2], true), "cudnn");
}

/* A prepared decision refuses what could not be compiled or loaded; the others are then chosen among. */
static void test_prepared_decision(void **state) {
    (void)state;
    dw_attention call = plain_call();
    dw_attention_decision made = {.struct_size = sizeof made};
    call.softcap = 9.0f; /* no other test's variant */
    assert_int_equal(dw_attention_decide(&call, false, NULL, false, &made), DW_OK);
    assert_int_equal(made.verdict, DW_ATTENTION_OURS);
    fake->failing = "cuModuleLoadData";
    fake->result = 218;
    assert_int_equal(dw_attention_decide(&call, false, NULL, true, &made), DW_OK);
    fake->failing = NULL;
    assert_int_equal(made.verdict, DW_ATTENTION_OTHERS);
    assert_null(made.name); /* PyTorch's have no soft cap */
    assert_string_equal(made.because, "no candidate supports the call");
    assert_non_null(strstr(made.refusal, "attention (batch 8, 16 query heads on 4"));
    assert_int_equal(dw_attention_decide(&call, false, NULL, true, &made), DW_OK);
    assert_int_equal(made.verdict, DW_ATTENTION_OURS);
    assert_string_equal(made.refusal, "");
    call.dtype = DW_F32;
    assert_int_equal(dw_attention_decide(&call, false, NULL, true, &made), DW_TYPE);
    made.struct_size--;
    assert_int_equal(dw_attention_decide(&call, false, NULL, true, &made), DW_INVALID_ARGUMENT);
}

/* The first backend in order loses only to one that is clearly faster: by 3 %, and by three standard errors. */
static void test_ties(void **state) {
    (void)state;
    dw_attention call = plain_call();
    static const struct {
        double times[3], error;
        const char *name;
    } cases[] = {
        {{1.0, 0.98, 2.0}, 0.0, "deepwell"},  {{1.0, 0.971, 2.0}, 0.0, "deepwell"},
        {{1.0, 0.969, 2.0}, 0.0, "cudnn"},    {{1.0, 2.0, 0.5}, 0.0, "flash"},
        {{1.0, 0.9, 2.0}, 0.025, "deepwell"}, {{1.0, 0.9, 2.0}, 0.023, "cudnn"},
        {{1.0, 0.0, 2.0}, 0.0, "deepwell"},   {{0.0, 2.0, 1.0}, 0.0, "flash"},
        {{0.0, 1.0, 2.0}, 0.0, "cudnn"},      {{1.0, 0.0, 0.0}, 0.0, "deepwell"},
        {{0.0, 0.0, 1.0}, 0.0, "flash"},
    };
    for (size_t i = 0; i < DW_COUNT(cases); i++) {
        publish(&call, false, cases[i].times, cases[i].error);
        const char *name = chosen(&call, false);
        if (strcmp(name, cases[i].name) != 0) fail_msg("case %zu: %s", i, name);
    }
    json_t *root = explained(&call, false, NULL);
    assert_non_null(strstr(text_of(candidate(root, "cudnn"), "reason"), "it would not"));
    json_decref(root);
}

/* Two class numbers are equal exactly if their texts are. */
static void test_class_numbers(void **state) {
    (void)state;
    enum { COUNT = 4000 };
    static struct {
        char text[256];
        uint64_t number;
    } made[COUNT];
    uint64_t random = 7;
    for (int i = 0; i < COUNT; i++) {
        int draw[12];
        for (int j = 0; j < 12; j++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            draw[j] = (int)(random >> 33);
        }
        dw_attention call = plain_call();
        call.seq_len_q = 1 + draw[0] % 90,
        call.seq_len_kv = draw[1] % 3 ? call.seq_len_q : 1 + draw[1] % 90;
        call.batch = 1 + draw[2] % 5, call.heads_kv = 1 + draw[3] % 2;
        call.heads_q = call.heads_kv * (1 + draw[4] % 2);
        call.head_dim = draw[5] % 2 ? 64 : 128, call.dtype = draw[6] % 2 ? DW_F16 : DW_BF16;
        call.window_right = draw[7] % 3 - 1, call.window_left = draw[7] % 7 ? -1 : 5;
        call.bottom_right = draw[8] % 2, call.deterministic = draw[9] % 5 == 0;
        call.softcap = draw[10] % 7 ? 0.0f : 1.0f, call.dropout = draw[11] % 7 ? 0.0f : 0.5f;
        call.q = call.o = call.d_o = call.dq = tensor(call.heads_q, call.seq_len_q, call.head_dim);
        call.k = call.v = call.dk = call.dv = tensor(call.heads_kv, call.seq_len_kv, call.head_dim);
        bool backward = draw[3] % 4 < 2;
        assert_int_equal(dw_attention_class(&call, backward, made[i].text, sizeof made[i].text),
                         DW_OK);
        made[i].number = dw_attention_class_number(&call, backward);
        assert_true(made[i].number != 0);
    }
    int equal = 0;
    for (int i = 0; i < COUNT; i++)
        for (int j = 0; j < i; j++) {
            bool same = strcmp(made[i].text, made[j].text) == 0;
            if (same != (made[i].number == made[j].number))
                fail_msg("%s and %s", made[i].text, made[j].text);
            equal += same;
        }
    assert_true(equal > 1000);
    dw_attention call = plain_call();
    call.head_dim = 0;
    assert_true(dw_attention_class_number(&call, false) == 0);
}

static void test_classes(void **state) {
    (void)state;
    dw_attention call = plain_call();
    char text[256];
    call.dtype = DW_F16, call.window_right = 0, call.softcap = 1.0f, call.dropout = 0.5f,
    call.seq_len_q = 700;
    call.deterministic = true; /* the exception is backward's */
    assert_int_equal(dw_attention_class(&call, false, text, sizeof text), DW_OK);
    assert_string_equal(
        text, "attention forward f16 d128 group4 q512 k2048 heads128 causal softcap dropout");
    call.bottom_right = false;
    assert_int_equal(dw_attention_class(&call, true, text, sizeof text), DW_OK);
    assert_string_equal(text, "attention backward f16 d128 group4 q512 k2048 heads128 "
                              "causal-top-left softcap dropout deterministic");
    call.seq_len_q = call.seq_len_kv; /* the texts of the corners are equal */
    assert_int_equal(dw_attention_class(&call, false, text, sizeof text), DW_OK);
    assert_non_null(strstr(text, "heads128 causal softcap"));
    /* Rounded by ratio: 1448 is nearer to 1024, 1449 to 2048. */
    call.seq_len_q = 1448, call.seq_len_kv = 1449;
    assert_int_equal(dw_attention_class(&call, false, text, sizeof text), DW_OK);
    assert_non_null(strstr(text, "q1024 k2048"));
    call.window_left = 9;
    call.seq_len_kv = 0;
    assert_int_equal(dw_attention_class(&call, true, text, sizeof text), DW_OK);
    assert_non_null(strstr(text, "k0 heads128 window softcap"));
}

/* Each allocation fails in turn: the call fails or is right, nothing is lost, and the store stays valid. */
static void test_memory(void **state) {
    (void)state;
    dw_attention call = plain_call();
    char shape_class[256], own[512];
    dw_tune_time times[] = {{"deepwell", 2e-3, 0.0, NULL},
                            {"cudnn", 1e-3, 0.0, NULL},
                            {"flash", 0.0, 0.0, "it would not"}};
    call.batch = 3;
    snprintf(own, sizeof own, "%s/memory", folder);
    setenv("DEEPWELL_CACHE", own, 1);
    assert_int_equal(dw_attention_class(&call, false, shape_class, sizeof shape_class), DW_OK);
    int64_t live = dw__memory_live();
    for (int64_t after = 0, failures = 1; failures > 0; after++) {
        const char *text = NULL;
        dw_attention_decision made = {.struct_size = sizeof made};
        dw_status statuses[3];
        dw__memory_fail_once(after);
        statuses[0] = dw_tune_publish(shape_class, with_this, times, 3);
        statuses[1] = dw_attention_decide(&call, false, with_this, false, &made);
        statuses[2] = dw_attention_explain(&call, false, NULL, (char **)&text);
        failures = dw__memory_failures();
        dw__memory_fail_after(-1);
        for (int i = 0; i < 3; i++)
            if (statuses[i] != DW_OK && statuses[i] != DW_OUT_OF_MEMORY)
                fail_msg("allocation %d, step %d: %s", (int)after, i, dw_last_error());
        if (statuses[1] == DW_OK && made.verdict != DW_ATTENTION_UNMEASURED)
            assert_string_equal(made.name, "cudnn");
        if (statuses[2] == DW_OK) assert_non_null(strstr(text, "\"math\""));
        if (statuses[2] == DW_OK) dw_text_free((char *)(uintptr_t)text);
        assert_int_equal(dw__memory_live(), live);
        assert_int_equal(dw_tune_publish(shape_class, with_this, times, 3), DW_OK);
        assert_string_equal(chosen(&call, false), "cudnn");
        remove_folder(own);
    }
    setenv("DEEPWELL_CACHE", folder, 1);
}

/* Our kernels are measured with their own tensors, and the time is stored. */
static void test_measure(void **state) {
    (void)state;
    dw_attention call = plain_call();
    double seconds = 0.0, again = 0.0;
    char shape_class[256];
    call.batch = 1, call.seq_len_q = call.seq_len_kv = 300;
    for (int backward = 0; backward < 2; backward++) {
        int launches = fake->launch_count;
        assert_int_equal(dw_attention_measure(&call, backward, &seconds), DW_OK);
        /* The time that the fake driver's events report. */
        assert_true(fabs(seconds - 1.5e-3) < 1e-9);
        assert_int_equal(fake->launch_count - launches, backward ? 1 + 3 * 13 : 13);
        assert_int_equal(fake->memory, 0);
        assert_int_equal(dw_attention_class(&call, backward, shape_class, sizeof shape_class),
                         DW_OK);
        assert_int_equal(lookup(shape_class, "deepwell", &again), DW_OK);
        assert_true(again == seconds);
    }
    fake->failing = "cuEventElapsedTime";
    fake->result = 700;
    assert_int_equal(dw_attention_measure(&call, false, &seconds), DW_DEVICE);
    fake->failing = "cuMemAlloc_v2";
    fake->result = 2;
    assert_int_equal(dw_attention_measure(&call, true, &seconds), DW_OUT_OF_MEMORY);
    fake->failing = NULL;
    assert_int_equal(fake->memory, 0);
    call.seq_len_kv = 0;
    assert_int_equal(dw_attention_measure(&call, true, &seconds), DW_INVALID_ARGUMENT);
    call.offsets_q = call.offsets_k = (int32_t *)64;
    assert_int_equal(dw_attention_measure(&call, true, &seconds), DW_UNSUPPORTED);
}

static int setup(void **state) {
    (void)state;
    use_fake_compiler(folder, sizeof folder);
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    return 0;
}

static int load_driver(void **state) {
    (void)state;
    load_fake_driver();
    return 0;
}

static void without_gpu(void *unused) {
    (void)unused;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_gpu),
        cmocka_unit_test(test_supported_calls_of_each_backend),
        cmocka_unit_test(test_blackwell),
    };
    if (cmocka_run_group_tests(tests, NULL, NULL) != 0) _exit(1);
}

static void test_process_without_gpu(void **state) {
    (void)state;
    expect_child(start_child(without_gpu, NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_process_without_gpu),
        /* For all tests that follow, too. */
        cmocka_unit_test_setup(test_supported_calls_of_each_backend, load_driver),

        cmocka_unit_test(test_work),
        cmocka_unit_test(test_expected),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_tune),
        cmocka_unit_test(test_folder_writable_by_others),
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_publish),
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_calls_without_alternative),
        cmocka_unit_test(test_prepared_decision),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_class_numbers),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_measure),
    };
    return cmocka_run_group_tests(tests, setup, end_on_fake_gpu);
}
