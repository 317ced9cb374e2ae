/* A whole training step with every allocation made to fail in turn, and calls that a trainer rejects.
 * tests/python/test_train_command.py checks its results. */
#include "base/base.h"
#include "train/trainer_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

static const char config[] =
    "{\"model_type\": \"gpt2\", \"architectures\": [\"GPT2LMHeadModel\"], \"vocab_size\": 53,"
    " \"n_positions\": 16, \"n_embd\": 8, \"n_layer\": 1, \"n_head\": 2,"
    " \"layer_norm_epsilon\": 1e-5, \"activation_function\": \"gelu_new\", \"resid_pdrop\": 0.1,"
    " \"embd_pdrop\": 0.1, \"attn_pdrop\": 0.1, \"initializer_range\": 0.02}";

/* Each allocation fails in turn; under the sanitizers, which are slow, every seventh one. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STRIDE = 7 };
#else
enum { STRIDE = 1 };
#endif

static char folder[64], model[128], data[128], checkpoints[128];

static int setup(void **state) {
    (void)state;
    /* In memory if possible, because thousands of checkpoints are written and synced. */
    strcpy(folder, "/dev/shm/deepwell-test-XXXXXX");
    if (!mkdtemp(folder)) strcpy(folder, "/tmp/deepwell-test-XXXXXX");
    if (strstr(folder, "XXXXXX") && !mkdtemp(folder)) return -1;
    char path[160];
    uint16_t tokens[100];
    for (int i = 0; i < 100; i++) tokens[i] = (uint16_t)(i * i % 53);
    snprintf(model, sizeof model, "%s", folder);
    snprintf(path, sizeof path, "%s/config.json", folder);
    snprintf(data, sizeof data, "%s/tokens.bin", folder);
    snprintf(checkpoints, sizeof checkpoints, "%s/checkpoints", folder);
    if (dw__file_write(path, config, strlen(config)) != DW_OK) return -1;
    return dw__file_write(data, tokens, sizeof tokens) == DW_OK ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    return dw__folder_remove(folder) == DW_OK ? 0 : -1;
}

static const char *const data_list[] = {data};

static const char *precision; /* NULL: the default */

static dw_trainer_options options(void) {
    dw_trainer_options o = DW_TRAINER_OPTIONS_DEFAULT;
    o.precision = precision;
    o.model = model;
    o.init = 1;
    o.data = o.validation = data_list;
    o.data_count = o.validation_count = 1;
    o.sequence = 7;
    o.batch = 4;
    o.micro_batch = 2;
    o.steps = 3;
    o.checkpoint = checkpoints;
    return o;
}

/* All calls after a trainer was made; `loss` is the last step's. */
static dw_status train_on(dw_trainer *trainer, int64_t steps, double *loss) {
    dw_status status = DW_OK;
    dw_train_report report;
    double validation = 0.0;
    DW_TRY(dw_trainer_begin(trainer, 1));
    while (dw_trainer_steps_done(trainer) < steps) {
        DW_TRY(dw_trainer_step(trainer, &report));
        *loss = report.loss;
    }
    DW_TRY(dw_trainer_validate(trainer, &validation));
    DW_TRY(dw_trainer_checkpoint(trainer));
cleanup:
    return status;
}

static dw_status train(int64_t steps, double *loss) {
    dw_trainer_options o = options();
    dw_trainer *trainer = NULL;
    dw_status status = dw_trainer_create(&o, &trainer);
    if (status == DW_OK) status = train_on(trainer, steps, loss);
    dw_trainer_destroy(trainer);
    return status;
}

static void check_failure(dw_status status, int64_t allowed, int64_t live) {
    dw__memory_fail_after(-1);
    if (status != DW_OK && status != DW_OUT_OF_MEMORY)
        fail_msg("with %lld allocations: %s", (long long)allowed, dw_last_error());
    assert_int_equal(dw__memory_live(), live);
}

/* Making a trainer mostly makes a graph and an engine, whose own tests fail each allocation. Here the distance between
 * positions grows, because each try costs as much as all before it. */
static void making_may_fail(void **state) {
    (void)state;
    dw_trainer_options o = options();
    double loss;
    OK(train(1, &loss)); /* allocations that the process makes once */
    OK(dw__folder_remove(checkpoints));
    int64_t live = dw__memory_live();
    dw_status status = DW_OUT_OF_MEMORY;
    for (int64_t allowed = 0; status != DW_OK; allowed += STRIDE + allowed / 32) {
        dw_trainer *trainer = NULL;
        dw__memory_fail_after(allowed);
        status = dw_trainer_create(&o, &trainer);
        dw_trainer_destroy(trainer);
        check_failure(status, allowed, live);
    }
}

/* Every allocation of loading, a step, validation and a checkpoint; then of resuming from it. */
static void training_may_fail(void **state) {
    (void)state;
    dw_trainer_options o = options();
    double loss = 0.0, wanted = 0.0;
    int64_t live = dw__memory_live();
    for (int resume = 0; resume < 2; resume++) {
        OK(dw__folder_remove(checkpoints));
        OK(train(1, &wanted));
        dw_status status = DW_OUT_OF_MEMORY;
        for (int64_t allowed = 0; status != DW_OK; allowed += STRIDE) {
            dw_trainer *trainer = NULL;
            if (!resume) OK(dw__folder_remove(checkpoints));
            OK(dw_trainer_create(&o, &trainer));
            dw__memory_fail_after(allowed);
            status = train_on(trainer, 1, &loss);
            dw_trainer_destroy(trainer);
            check_failure(status, allowed, live);
        }
        assert_true(loss == wanted);
    }
}

/* A run in which a layer falls back after the first step's sample, so that programs are planned again in front of the third
 * step. A step that failed may be tried again. */
static void a_guarded_run_may_fail(void **state) {
    static const char policy[] =
        "{\"format\": \"deepwell.precision\", \"version\": 1, \"default\": \"fp8\", "
        "\"sensitive_layers\": [], \"guard\": {\"every\": 1, \"snr_db\": 28, \"samples\": 1}}";
    char path[160];
    (void)state;
    snprintf(path, sizeof path, "%s/policy.json", folder);
    OK(dw__file_write(path, policy, sizeof policy - 1));
    precision = path;
    dw_trainer_options o = options();
    double loss = 0.0, wanted = 0.0;
    OK(dw__folder_remove(checkpoints));
    OK(train(3, &wanted));
    int64_t live = dw__memory_live();
    dw_status status = DW_OUT_OF_MEMORY;
    for (int64_t allowed = 0; status != DW_OK; allowed += STRIDE + allowed / 8) {
        dw_trainer *trainer = NULL;
        dw_train_report report;
        OK(dw__folder_remove(checkpoints));
        OK(dw_trainer_create(&o, &trainer));
        dw__memory_fail_after(allowed);
        status = train_on(trainer, 3, &loss);
        dw__memory_fail_after(-1);
        while (status != DW_OK && trainer->begun && dw_trainer_steps_done(trainer) < 3)
            OK(dw_trainer_step(trainer, &report));
        dw_trainer_destroy(trainer);
        check_failure(status, allowed, live);
    }
    assert_true(loss == wanted);
    precision = NULL;
}

static void resumes_to_the_same_loss(void **state) {
    (void)state;
    double whole = 0.0, resumed = 0.0;
    OK(dw__folder_remove(checkpoints));
    OK(train(3, &whole));
    OK(dw__folder_remove(checkpoints));
    OK(train(1, &resumed));
    OK(train(2, &resumed));
    OK(train(3, &resumed));
    assert_true(whole == resumed);
}

/* Checks of the options prevent such weights. If one appears nevertheless, no file is written. */
static void weights_that_are_not_finite_are_not_written(void **state) {
    (void)state;
    dw_trainer_options o = options();
    char output[160];
    snprintf(output, sizeof output, "%s/output", folder);
    OK(dw__folder_remove(checkpoints));
    for (int which = 0; which < 2; which++) {
        dw_trainer *trainer = NULL;
        OK(dw_trainer_create(&o, &trainer));
        OK(dw_trainer_begin(trainer, 0));
        uint32_t last = trainer->count - 1;
        ((float *)trainer->weight_pointers[last])[trainer->parameters[last].count - 1] =
            which ? INFINITY : NAN;
        assert_int_equal(dw_trainer_checkpoint(trainer), DW_STATE);
        assert_non_null(strstr(dw_last_error(), trainer->parameters[last].name));
        assert_int_equal(dw_trainer_save(trainer, output), DW_STATE);
        assert_non_null(strstr(dw_last_error(), trainer->parameters[last].name));
        assert_int_not_equal(access(output, F_OK), 0);
        assert_string_equal(dw_trainer_checkpoint_path(trainer), "");
        dw_trainer_destroy(trainer);
    }
}

static void calls_out_of_order(void **state) {
    (void)state;
    dw_trainer_options o = options();
    dw_trainer *trainer = NULL;
    dw_train_report report;
    double loss;
    OK(dw__folder_remove(checkpoints));
    OK(dw_trainer_create(&o, &trainer));
    assert_int_equal(dw_trainer_step(trainer, &report), DW_STATE);
    assert_int_equal(dw_trainer_validate(trainer, &loss), DW_STATE);
    assert_int_equal(dw_trainer_checkpoint(trainer), DW_STATE);
    assert_int_equal(dw_trainer_save(trainer, folder), DW_STATE);
    OK(dw_trainer_begin(trainer, 0));
    assert_int_equal(dw_trainer_begin(trainer, 0), DW_STATE);
    for (int step = 0; step < 3; step++) OK(dw_trainer_step(trainer, &report));
    assert_int_equal(dw_trainer_step(trainer, &report), DW_STATE);
    dw_trainer_destroy(trainer);
    dw_trainer_destroy(NULL);
}

static void wrong_options(void **state) {
    (void)state;
    dw_trainer *trainer = NULL;
    assert_int_equal(dw_trainer_create(NULL, &trainer), DW_INVALID_ARGUMENT);
    dw_trainer_options o = options();
    o.struct_size = 8;
    assert_int_equal(dw_trainer_create(&o, &trainer), DW_INVALID_ARGUMENT);
    o = options();
    o.seed = UINT64_MAX;
    assert_int_equal(dw_trainer_create(&o, &trainer), DW_INVALID_ARGUMENT);
    o = options();
    o.sequence = 17;
    assert_int_equal(dw_trainer_create(&o, &trainer), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "16 positions"));
    o = options();
    o.precision = "fp8-row";
    assert_int_equal(dw_trainer_create(&o, &trainer), DW_UNSUPPORTED);
    o = options();
    o.checkpoint = NULL;
    OK(dw_trainer_create(&o, &trainer));
    assert_int_equal(dw_trainer_begin(trainer, 1), DW_INVALID_ARGUMENT);
    dw_trainer_destroy(trainer);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(making_may_fail),
        cmocka_unit_test(training_may_fail),
        cmocka_unit_test(a_guarded_run_may_fail),
        cmocka_unit_test(resumes_to_the_same_loss),
        cmocka_unit_test(weights_that_are_not_finite_are_not_written),
        cmocka_unit_test(calls_out_of_order),
        cmocka_unit_test(wrong_options),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
