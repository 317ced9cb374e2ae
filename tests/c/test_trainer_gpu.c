/* Training on an emulated Hopper GPU: the update against dw_adamw_step, steps against the same steps on the CPU, and
 * resumed runs against whole ones. DEEPWELL_TEST_DEVICE=cuda runs the same on a GPU. The tests are skipped where there
 * is no NVRTC, which compiles elementwise programs. */
#include "base/base.h"
#include "deepwell/jit.h"
#include "train/trainer_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

static const char config[] =
    "{\"model_type\": \"gpt2\", \"architectures\": [\"GPT2LMHeadModel\"], \"vocab_size\": 53,"
    " \"n_positions\": 8, \"n_embd\": 8, \"n_layer\": 1, \"n_head\": 2,"
    " \"layer_norm_epsilon\": 1e-5, \"activation_function\": \"gelu_new\", \"resid_pdrop\": 0.1,"
    " \"embd_pdrop\": 0.1, \"attn_pdrop\": 0.1, \"initializer_range\": 0.1}";

enum { TOKENS = 60, STEPS = 4 };

static const char *device_name = "emulator:sm_90a";
static const dw_device *device;
static char folder[64], data[128], checkpoints[128];
static const char *const data_list[] = {data};

static int setup(void **state) {
    (void)state;
    if (getenv("DEEPWELL_TEST_DEVICE")) device_name = getenv("DEEPWELL_TEST_DEVICE");
    if (dw_device_find(device_name, &device) != DW_OK) fail_msg("%s", dw_last_error());
#ifdef TEST_NVRTC
    if (!getenv("DEEPWELL_TEST_DEVICE")) setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    strcpy(folder, "/tmp/deepwell-test-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    char path[160];
    uint16_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = (uint16_t)(i * i % 53);
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

static void need_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) == DW_OK) return;
    print_message("%s\n", dw_last_error());
    skip();
}

/* ---- the update ------------------------------------------------------------------------------ */

/* Ranges with and without decay and one that is not updated, none of them a whole number of pieces. */
enum { PIECE = 64, DECAYED = 144, UPDATED = 240, ELEMENTS = 272, BLOCKS = 4, UPDATES = 3 };

static uint32_t random_bits = 1;
/* In [-1, 1). */
static float draw(void) {
    random_bits = random_bits * 1664525u + 1013904223u;
    return (float)((double)random_bits / 2147483648.0 - 1.0);
}

static void agree(const float *got, const float *wanted, const float *sizes, int count) {
    /* The update has fewer than 16 operations in FP32. A GPU may join a product and a sum, and so may round each of
     * them differently: half a unit of the value, or of an operand of a sum (`sizes`: its magnitude). */
    for (int i = 0; i < count; i++)
        if (!(fabs((double)got[i] - (double)wanted[i]) <= 16 * 0x1p-24 * (double)sizes[i]))
            fail_msg("element %d is %.9g; expected %.9g", i, (double)got[i], (double)wanted[i]);
}

static void updates_agree(void **state) {
    (void)state;
    need_compiler();
    const dw__gpu_update_sizes sizes = {DECAYED, UPDATED, ELEMENTS, PIECE, true};
    dw_adamw_options options = {
        .struct_size = sizeof options, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    float host[BLOCKS][ELEMENTS], got[BLOCKS][ELEMENTS], magnitude[BLOCKS][ELEMENTS] = {{0}};
    float more[ELEMENTS];
    void *blocks[BLOCKS], *added = NULL, *arena = NULL;
    dw__gpu_update *update = NULL;
    OK(dw__gpu_update_create(device, &sizes, &options, &update));
    const size_t arena_bytes = dw__gpu_update_arena_bytes(update);
    OK(dw_device_allocate(device, arena_bytes, &arena));
    OK(dw_device_allocate(device, sizeof more, &added));
    OK(dw__gpu_update_begin(update));
    for (int b = 0; b < BLOCKS; b++) {
        for (int i = 0; i < ELEMENTS; i++) host[b][i] = b < 2 ? draw() : 0.0f;
        OK(dw_device_allocate(device, sizeof host[b], &blocks[b]));
        OK(dw_device_copy_in(device, blocks[b], host[b], sizeof host[b]));
    }
    const dw__gpu_blocks flat = {blocks[0], blocks[1], blocks[2], blocks[3]};
    for (int step = 1; step <= UPDATES; step++) {
        double norm = 0.0, sum = 0.0;
        for (int i = 0; i < ELEMENTS; i++) {
            more[i] = draw();
            host[1][i] += more[i];
            sum += (double)host[1][i] * (double)host[1][i];
        }
        OK(dw_device_copy_in(device, added, more, sizeof more));
        OK(dw__gpu_add(update, arena, blocks[1], added));
        OK(dw__gpu_square(update, arena, blocks[1]));
        OK(dw__gpu_gradient_norm(update, &norm));
        assert_true(fabs(norm - sqrt(sum)) <= ELEMENTS * 0x1p-53 * sqrt(sum));
        options.lr = 0.01 * step;
        options.weight_decay = 0.1;
        options.grad_scale = 1.0 / (1 + step);
        options.step = step;
        OK(dw__gpu_adamw(update, arena, &flat, &options));
        const dw_adamw_tensor tensors[2] = {{host[0], host[1], host[2], host[3], DECAYED},
                                            {host[0] + DECAYED, host[1] + DECAYED,
                                             host[2] + DECAYED, host[3] + DECAYED,
                                             UPDATED - DECAYED}};
        OK(dw_adamw_step(&tensors[0], 1, &options));
        options.weight_decay = 0.0;
        OK(dw_adamw_step(&tensors[1], 1, &options));
        /* A step is at most lr / sqrt(1 - beta2), and averages are at most the largest gradient so far. */
        for (int i = 0; i < ELEMENTS; i++) {
            magnitude[0][i] += fabsf(host[0][i]) + 5.0f * (float)options.lr;
            magnitude[2][i] += fabsf(host[1][i]);
            magnitude[3][i] += host[1][i] * host[1][i];
        }
    }
    for (int b = 0; b < BLOCKS; b++) {
        OK(dw_device_copy_out(device, got[b], blocks[b], sizeof got[b]));
        agree(got[b], host[b], magnitude[b], UPDATED);
        assert_memory_equal(got[b] + UPDATED, host[b] + UPDATED,
                            (ELEMENTS - UPDATED) * sizeof(float));
        dw_device_release(device, blocks[b], sizeof host[b]);
    }
    dw_device_release(device, added, sizeof more);
    dw_device_release(device, arena, arena_bytes);
    dw__gpu_update_destroy(update);
}

/* ---- runs ------------------------------------------------------------------------------------ */

static dw_trainer_options options(const char *on) {
    dw_trainer_options o = DW_TRAINER_OPTIONS_DEFAULT;
    o.model = folder;
    o.init = 1;
    o.data = o.validation = data_list;
    o.data_count = o.validation_count = 1;
    o.validation_batches = 2;
    o.sequence = 7;
    o.batch = 4;
    o.micro_batch = 2;
    o.steps = STEPS;
    o.lr = 1e-3;
    o.checkpoint = checkpoints;
    o.device = on;
    return o;
}

typedef struct result {
    double losses[STEPS], norms[STEPS], validation;
    double largest_gradient; /* of any step, from the norms */
    int64_t elements;
    float *weights, *exp_avg;
} result;

static void result_end(result *r) {
    free(r->weights);
    free(r->exp_avg);
}

static float *copy_block(const dw_trainer *t, const dw__block *block) {
    float *floats = NULL, *copy = malloc(block->bytes);
    OK(dw__trainer_host_block(t, block, &floats));
    memcpy(copy, floats, block->bytes);
    dw__trainer_release_host(t, floats);
    return copy;
}

/* Trains up to step `steps` and writes a checkpoint. */
static void train(const char *on, int64_t steps, result *r) {
    dw_trainer_options o = options(on);
    dw_trainer *t = NULL;
    dw_train_report report;
    OK(dw_trainer_create(&o, &t));
    OK(dw_trainer_begin(t, 1));
    while (dw_trainer_steps_done(t) < steps) {
        OK(dw_trainer_step(t, &report));
        assert_true(report.applied);
        r->losses[report.step - 1] = report.loss;
        r->norms[report.step - 1] = report.gradient_norm;
    }
    OK(dw_trainer_validate(t, &r->validation));
    OK(dw_trainer_checkpoint(t));
    r->elements = t->elements;
    r->weights = copy_block(t, &t->weights);
    r->exp_avg = copy_block(t, &t->exp_avg);
    dw_trainer_destroy(t);
}

static void steps_agree_with_the_cpu(void **state) {
    (void)state;
    need_compiler();
    result cpu, gpu;
    OK(dw__folder_remove(checkpoints));
    train("cpu", STEPS, &cpu);
    OK(dw__folder_remove(checkpoints));
    train(device_name, STEPS, &gpu);
    /* Each element of a gradient differs by some units of FP32 of the largest one, at most the norm: a few hundred
     * operations lie between a weight and the loss. AdamW divides by the gradient's size, so an element whose gradient
     * is mostly error may move by lr in the other direction; it changes the loss by 2 lr times that error. */
    const double error = 256 * 0x1p-24;
    for (int i = 0; i < STEPS; i++) {
        double norm = cpu.norms[i], moved = 2 * 1e-3 * i * (double)cpu.elements;
        assert_true(fabs(gpu.losses[i] - cpu.losses[i]) <= error * (cpu.losses[i] + moved * norm));
        assert_true(fabs(gpu.norms[i] - norm) <= error * norm * (1 + moved));
    }
    assert_true(fabs(gpu.validation - cpu.validation) <= 1e-4 * cpu.validation);
    assert_true(gpu.losses[STEPS - 1] != gpu.losses[0]);
    result_end(&cpu);
    result_end(&gpu);
}

static void first_step(const char *on, const char *precision, dw_train_report *report) {
    dw_trainer_options o = options(on);
    dw_trainer *t = NULL;
    o.precision = precision;
    o.checkpoint = NULL;
    OK(dw_trainer_create(&o, &t));
    OK(dw_trainer_begin(t, 0));
    OK(dw_trainer_step(t, report));
    dw_trainer_destroy(t);
}

/* Two devices round an operand differently only where its distance to the middle of two numbers is an error of FP32. So
 * few operands are that they change a loss by much less than rounding all of them does. */
static void precisions_agree_with_the_cpu(void **state) {
    (void)state;
    need_compiler();
    static const char *const names[] = {"bf16", "mxfp8", "nvfp4"};
    dw_train_report fp32, cpu, gpu;
    first_step("cpu", "fp32", &fp32);
    for (size_t i = 0; i < DW_COUNT(names); i++) {
        first_step("cpu", names[i], &cpu);
        first_step(device_name, names[i], &gpu);
        assert_true(gpu.applied);
        assert_true(fabs(gpu.loss - cpu.loss) <= 0.25 * fabs(cpu.loss - fp32.loss));
        assert_true(fabs(gpu.gradient_norm - cpu.gradient_norm) <=
                    0.25 * fabs(cpu.gradient_norm - fp32.gradient_norm));
    }
}

static void a_resumed_run_has_the_same_bits(void **state) {
    (void)state;
    need_compiler();
    result whole, first, resumed;
    OK(dw__folder_remove(checkpoints));
    train(device_name, STEPS, &whole);
    OK(dw__folder_remove(checkpoints));
    const int64_t live = dw__memory_live();
    train(device_name, 2, &first);
    train(device_name, STEPS, &resumed);
    assert_int_equal(dw__memory_live(), live);
    const size_t bytes = (size_t)whole.elements * sizeof(float);
    assert_memory_equal(whole.weights, resumed.weights, bytes);
    assert_memory_equal(whole.exp_avg, resumed.exp_avg, bytes);
    assert_memory_equal(whole.losses, first.losses, 2 * sizeof(double));
    assert_memory_equal(whole.losses + 2, resumed.losses + 2, (STEPS - 2) * sizeof(double));
    assert_true(whole.validation == resumed.validation);
    result_end(&whole);
    result_end(&first);
    result_end(&resumed);
    /* Another device would give other bits. */
    dw_trainer_options o = options("cpu");
    dw_trainer *t = NULL;
    OK(dw_trainer_create(&o, &t));
    assert_int_equal(dw_trainer_begin(t, 1), DW_STATE);
    assert_non_null(strstr(dw_last_error(), "device is \"cpu\" (checkpoint: \""));
    dw_trainer_destroy(t);
}

/* ---- failures -------------------------------------------------------------------------------- */

/* The trainer checks tokens when it reads them, so the test raises the limit of that check. */
static void an_index_outside_fails_the_step(void **state) {
    (void)state;
    need_compiler();
    static const uint16_t bad[16] = {1, 2, 3, 60, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8};
    char path[160];
    const char *const list[] = {path};
    dw_trainer_options o = options(device_name);
    dw_trainer *t = NULL;
    dw_train_report report;
    snprintf(path, sizeof path, "%s/bad.bin", folder);
    OK(dw__file_write(path, bad, sizeof bad));
    o.data = o.validation = list;
    o.batch = o.micro_batch = 1;
    o.shuffle = 0;
    o.checkpoint = NULL;
    OK(dw_trainer_create(&o, &t));
    t->model.sizes.vocabulary = 64;
    OK(dw_trainer_begin(t, 0));
    float *before = copy_block(t, &t->weights);
    assert_int_equal(dw_trainer_step(t, &report), DW_INDEX);
    assert_ptr_equal(strstr(dw_last_error(), "step 1: "), dw_last_error());
    assert_int_equal(dw_trainer_steps_done(t), 0);
    assert_int_equal(report.step, 0);
    float *after = copy_block(t, &t->weights);
    assert_memory_equal(before, after, t->weights.bytes);
    free(before);
    free(after);
    dw_trainer_destroy(t);
}

static void a_step_that_is_not_finite_changes_nothing(void **state) {
    (void)state;
    need_compiler();
    dw_trainer_options o = options(device_name);
    dw_trainer *t = NULL;
    dw_train_report report;
    const float infinite = INFINITY;
    o.checkpoint = NULL;
    OK(dw_trainer_create(&o, &t));
    OK(dw_trainer_begin(t, 0));
    OK(dw_device_copy_in(t->device, t->weight_pointers[t->count - 1], &infinite, sizeof infinite));
    float *before = copy_block(t, &t->weights);
    OK(dw_trainer_step(t, &report));
    assert_false(report.applied);
    assert_string_equal(report.culprit, "the loss");
    float *after = copy_block(t, &t->weights);
    assert_memory_equal(before, after, t->weights.bytes);
    assert_int_equal(dw_trainer_save(t, folder), DW_STATE);
    assert_non_null(strstr(dw_last_error(), t->parameters[t->count - 1].name));
    free(before);
    free(after);
    dw_trainer_destroy(t);
}

static void other_options(void **state) {
    (void)state;
    dw_trainer *t = NULL;
    dw_trainer_options o = options("cuda:7");
    assert_int_equal(dw_trainer_create(&o, &t), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "cuda:7"));
    /* A program that was built before the option. */
    o = options(device_name);
    o.struct_size = offsetof(dw_trainer_options, device);
    OK(dw_trainer_create(&o, &t));
    dw_trainer_info info;
    dw_trainer_describe(t, &info);
    assert_string_equal(info.device, "cpu");
    dw_trainer_destroy(t);
}

static void memory_is_predicted(void **state) {
    (void)state;
    need_compiler();
    size_t before = 0, now = 0;
    dw_trainer_options o = options(device_name);
    dw_trainer *t = NULL;
    dw_trainer_info info;
    o.checkpoint = NULL;
    OK(dw_trainer_create(&o, &t));
    dw_trainer_describe(t, &info);
    dw_device_memory(device, &before, NULL);
    OK(dw_trainer_begin(t, 0));
    dw_device_memory(device, &now, NULL);
    assert_int_equal(now - before, info.predicted_bytes);
    dw_trainer_destroy(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_agree),
        cmocka_unit_test(steps_agree_with_the_cpu),
        cmocka_unit_test(precisions_agree_with_the_cpu),
        cmocka_unit_test(a_resumed_run_has_the_same_bits),
        cmocka_unit_test(an_index_outside_fails_the_step),
        cmocka_unit_test(a_step_that_is_not_finite_changes_nothing),
        cmocka_unit_test(other_options),
        cmocka_unit_test(memory_is_predicted),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
