/* Training on an emulated Hopper GPU: the update against dw_adamw_step, steps in F32 against the same steps on the CPU,
 * steps in BF16 against steps in F32, and resumed runs against whole ones. DEEPWELL_TEST_DEVICE=cuda runs the same on a
 * GPU. The tests are skipped where there is no NVRTC, which compiles elementwise programs. */
#include "base/base.h"
#include "deepwell/jit.h"
#include "kernel/gpu_kernel.h"
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

enum { TOKENS = 60, STEPS = 4, WIDTH = 8 };

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

/* Ranges with and without decay and one that is not updated; more than one chunk of AdamW. */
enum { DECAYED = 4224, UPDATED = 4608, ELEMENTS = 4736, UPDATES = 3, PARTS = 2 };
enum { WEIGHTS, AVERAGE, SQUARES, SUM, BLOCKS };

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

static void *on_device(size_t bytes) {
    void *made = NULL;
    OK(dw_device_allocate(device, bytes, &made));
    OK(dw_device_fill(device, made, 0, bytes));
    return made;
}

static float rounded(float x, dw_dtype type) {
    uint32_t stored = 0;
    dw__trial_set(&stored, type, 0, x);
    return dw__trial_get(&stored, type, 0);
}

/* Gradients of `parts` micro-batches are added in F32, as on the host; their rounding, and that of the weights, is
 * exact. */
static void check_updates(dw_dtype model, int parts, double clip) {
    const dw__gpu_update_options options = {.device = device,
                                            .decayed = DECAYED,
                                            .updated = UPDATED,
                                            .elements = ELEMENTS,
                                            .model = model,
                                            .adds = parts > 1,
                                            .beta1 = 0.9,
                                            .beta2 = 0.95,
                                            .eps = 1e-8,
                                            .weight_decay = 0.1,
                                            .clip = clip};
    const size_t width = dw_dtype_bytes(model);
    static float host[BLOCKS][ELEMENTS], magnitude[BLOCKS][ELEMENTS], got[ELEMENTS];
    char *narrow = malloc(ELEMENTS * sizeof(float));
    void *stream, *blocks[BLOCKS], *part = on_device(ELEMENTS * width);
    void *copy = model == DW_F32 ? NULL : on_device(ELEMENTS * width);
    float *loss = on_device(sizeof *loss);
    unsigned *no_error = on_device(sizeof *no_error);
    dw__gpu_update *update = NULL;
    OK(device->stream_create(&stream));
    OK(dw__gpu_update_create(&options, &update));
    memset(host, 0, sizeof host);
    memset(magnitude, 0, sizeof magnitude);
    for (int i = 0; i < ELEMENTS; i++) host[WEIGHTS][i] = draw();
    for (int b = 0; b < BLOCKS; b++) blocks[b] = on_device(sizeof host[b]);
    OK(dw_device_copy_in(device, blocks[WEIGHTS], host[WEIGHTS], sizeof host[WEIGHTS]));
    const dw__gpu_blocks all = {blocks[WEIGHTS],
                                blocks[AVERAGE],
                                blocks[SQUARES],
                                copy,
                                part,
                                parts > 1 ? blocks[SUM] : NULL};
    OK(dw__gpu_update_begin(update, &all));
    OK(dw__gpu_update_restart(update, 0, stream));
    for (int step = 1; step <= UPDATES; step++) {
        const dw_train_numbers *numbers;
        double sum = 0.0, losses = 0.0;
        OK(dw__gpu_update_send(update, 0.01 * step, INFINITY, stream));
        for (int k = 0; k < parts; k++) {
            const float micro_loss = draw();
            for (int i = 0; i < ELEMENTS; i++) {
                const float g = rounded(draw(), model);
                dw__trial_set(narrow, model, (size_t)i, g);
                host[SUM][i] = k == 0 ? g : host[SUM][i] + g;
            }
            losses += (double)micro_loss / parts;
            OK(dw_device_copy_in(device, part, narrow, ELEMENTS * width));
            OK(dw_device_copy_in(device, loss, &micro_loss, sizeof micro_loss));
            OK(dw__gpu_update_add(update, loss, no_error, parts, stream));
        }
        for (int i = 0; i < UPDATED; i++) sum += (double)host[SUM][i] * (double)host[SUM][i];
        OK(dw__gpu_update_run(update, stream));
        OK(dw__gpu_update_receive(update, stream, &numbers));
        OK(device->stream_synchronize(stream));
        assert_true(numbers->loss == losses);
        assert_int_equal(numbers->told.applied, 1);
        /* Squares are added in FP32 within a vector of four. */
        assert_true(fabs(numbers->told.norm - sqrt(sum)) <= 4 * 0x1p-24 * sqrt(sum));
        dw_adamw_options adamw = {.struct_size = sizeof adamw,
                                  .lr = 0.01 * step,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-8,
                                  .weight_decay = 0.1,
                                  .grad_scale = clip > 0.0 ? clip / (sqrt(sum) + 1e-6) : 1.0,
                                  .step = step};
        assert_true(adamw.grad_scale <= 1.0);
        const dw_adamw_tensor tensors[2] = {
            {host[WEIGHTS], host[SUM], host[AVERAGE], host[SQUARES], DECAYED},
            {host[WEIGHTS] + DECAYED, host[SUM] + DECAYED, host[AVERAGE] + DECAYED,
             host[SQUARES] + DECAYED, UPDATED - DECAYED}};
        OK(dw_adamw_step(&tensors[0], 1, &adamw));
        adamw.weight_decay = 0.0;
        OK(dw_adamw_step(&tensors[1], 1, &adamw));
        /* A step is at most lr / sqrt(1 - beta2), and averages are at most the largest gradient so far. */
        for (int i = 0; i < ELEMENTS; i++) {
            const float g = host[SUM][i] * (float)adamw.grad_scale;
            magnitude[WEIGHTS][i] += fabsf(host[WEIGHTS][i]) + 5.0f * (float)adamw.lr;
            magnitude[AVERAGE][i] += fabsf(g);
            magnitude[SQUARES][i] += g * g;
        }
    }
    for (int b = 0; b < SUM; b++) {
        OK(dw_device_copy_out(device, got, blocks[b], sizeof got));
        agree(got, host[b], magnitude[b], UPDATED);
        assert_memory_equal(got + UPDATED, host[b] + UPDATED, (ELEMENTS - UPDATED) * sizeof(float));
        if (b > WEIGHTS || !copy) continue;
        OK(dw_device_copy_out(device, narrow, copy, ELEMENTS * width));
        for (int i = 0; i < ELEMENTS; i++)
            assert_true(dw__trial_get(narrow, model, (size_t)i) == rounded(got[i], model));
    }
    for (int b = 0; b < BLOCKS; b++) dw_device_release(device, blocks[b], sizeof host[b]);
    dw_device_release(device, part, ELEMENTS * width);
    if (copy) dw_device_release(device, copy, ELEMENTS * width);
    dw_device_release(device, loss, sizeof *loss);
    dw_device_release(device, no_error, sizeof *no_error);
    device->stream_destroy(stream);
    dw__gpu_update_destroy(update);
    free(narrow);
}

static void updates_agree(void **state) {
    (void)state;
    need_compiler();
    check_updates(DW_F32, 1, 0.0);
    check_updates(DW_F32, PARTS, 3.0);
    check_updates(DW_BF16, 1, 3.0);
    check_updates(DW_BF16, PARTS, 0.0);
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* Precisions of runs on a GPU, with sequences for each forward and backward. */
static const struct {
    const char *precision;
    int64_t micro_batch;
} ways[] = {{"fp32", 2}, {"fp32", 4}, {"bf16", 2}, {"bf16", 4}};

static dw_trainer_options options(const char *on, const char *precision) {
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
    o.precision = precision;
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
static void train(const char *on, const char *precision, int64_t micro_batch, int64_t steps,
                  result *r) {
    dw_trainer_options o = options(on, precision);
    o.micro_batch = micro_batch;
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
    for (int64_t micro_batch = 2; micro_batch <= 4; micro_batch += 2) {
        result cpu, gpu;
        OK(dw__folder_remove(checkpoints));
        train("cpu", "fp32", micro_batch, STEPS, &cpu);
        OK(dw__folder_remove(checkpoints));
        train(device_name, "fp32", micro_batch, STEPS, &gpu);
        /* Each element of a gradient differs by some units of FP32 of the largest one, at most the norm: a few hundred
         * operations lie between a weight and the loss. AdamW divides by the gradient's size, so an element whose
         * gradient is mostly error may move by lr in the other direction; it changes the loss by 2 lr times that
         * error. */
        const double error = 256 * 0x1p-24;
        for (int i = 0; i < STEPS; i++) {
            double norm = cpu.norms[i], moved = 2 * 1e-3 * i * (double)cpu.elements;
            assert_true(fabs(gpu.losses[i] - cpu.losses[i]) <=
                        error * (cpu.losses[i] + moved * norm));
            assert_true(fabs(gpu.norms[i] - norm) <= error * norm * (1 + moved));
        }
        assert_true(fabs(gpu.validation - cpu.validation) <= 1e-4 * cpu.validation);
        assert_true(gpu.losses[STEPS - 1] != gpu.losses[0]);
        result_end(&cpu);
        result_end(&gpu);
    }
}

/* The largest magnitude of a logit: the last norm's results are at most sqrt(WIDTH) long. */
static double most_logit(const result *r, const dw_trainer *t) {
    const float *rows = r->weights + t->offsets[0];
    double most = 0.0;
    assert_string_equal(t->parameters[0].name, "transformer.wte.weight");
    for (int row = 0; row < 53; row++) {
        double sum = 0.0;
        for (int i = 0; i < WIDTH; i++) sum += pow((double)rows[row * WIDTH + i], 2);
        most = fmax(most, sqrt(sum) * sqrt(WIDTH));
    }
    return most;
}

/* Some 24 roundings lie between a token and its logits in this model: those of its weights, of each result, and of the
 * products of attention. Each changes the hidden state by up to 2^-8 of itself, and so the logits by as much of the
 * largest; the loss changes by up to twice the change of a logit. Steps differ too: a weight moves by up to lr sqrt(1 /
 * (1 - beta2)) in each, in the one run as in the other, which changes the loss by up to that times the sum of the
 * gradient's magnitudes, at most sqrt(elements) times its norm. */
static void bf16_follows_fp32(void **state) {
    (void)state;
    need_compiler();
    for (int64_t micro_batch = 2; micro_batch <= 4; micro_batch += 2) {
        result full, half;
        dw_trainer *t = NULL;
        dw_trainer_options o = options(device_name, "fp32");
        OK(dw_trainer_create(&o, &t));
        OK(dw__folder_remove(checkpoints));
        train(device_name, "fp32", micro_batch, STEPS, &full);
        OK(dw__folder_remove(checkpoints));
        train(device_name, "bf16", micro_batch, STEPS, &half);
        const double rounding = 2 * 24 * 0x1p-8 * most_logit(&full, t);
        for (int i = 0; i < STEPS; i++) {
            const double moved = 2 * 1e-3 * i * sqrt(1 / 0.05) * full.norms[i];
            assert_true(half.losses[i] != full.losses[i]);
            assert_true(fabs(half.losses[i] - full.losses[i]) <=
                        rounding + moved * sqrt((double)full.elements));
        }
        /* Without steps that differ, the first loss and norm agree much better. */
        assert_true(fabs(half.losses[0] - full.losses[0]) <= 0.1 * rounding);
        assert_true(fabs(half.norms[0] - full.norms[0]) <= 24 * 0x1p-8 * full.norms[0]);
        dw_trainer_destroy(t);
        result_end(&full);
        result_end(&half);
    }
}

static void first_step_of(const char *model, const char *on, const char *precision,
                          dw_train_report *report) {
    dw_trainer_options o = options(on, precision);
    dw_trainer *t = NULL;
    o.model = model;
    o.checkpoint = NULL;
    OK(dw_trainer_create(&o, &t));
    OK(dw_trainer_begin(t, 0));
    OK(dw_trainer_step(t, report));
    dw_trainer_destroy(t);
}

static void first_step(const char *on, const char *precision, dw_train_report *report) {
    first_step_of(folder, on, precision, report);
}

/* The other kinds of models compute in BF16 as well: rotary embeddings, norms of heads, gates, grouped heads. The
 * roundings between a token and its logits are as many as in GPT-2, and the head's weights as large. */
static void other_families_compute_in_bf16(void **state) {
    (void)state;
    need_compiler();
    static const char form[] =
        "{\"model_type\": \"%s\", \"architectures\": [\"%s\"], \"vocab_size\": 53,"
        " \"max_position_embeddings\": 16, \"hidden_size\": 8, \"intermediate_size\": 24,"
        " \"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"num_key_value_heads\": 1,"
        " \"head_dim\": 4, \"rms_norm_eps\": 1e-6, \"hidden_act\": \"silu\","
        " \"rope_theta\": 10000.0, \"tie_word_embeddings\": true,"
        " \"initializer_range\": 0.1}";
    static const char *const families[][2] = {{"llama", "LlamaForCausalLM"},
                                              {"qwen3", "Qwen3ForCausalLM"}};
    char path[128], text[1024];
    snprintf(path, sizeof path, "%s/other.json", folder);
    for (size_t i = 0; i < DW_COUNT(families); i++) {
        dw_train_report full, half;
        const int length = snprintf(text, sizeof text, form, families[i][0], families[i][1]);
        OK(dw__file_write(path, text, (size_t)length));
        first_step_of(path, device_name, "fp32", &full);
        first_step_of(path, device_name, "bf16", &half);
        /* As in bf16_follows_fp32, for logits of at most sqrt(8) times weights of length 0.1 sqrt(8) on average. */
        assert_true(half.applied && half.loss != full.loss);
        assert_true(fabs(half.loss - full.loss) <= 0.1 * 2 * 24 * 0x1p-8 * 0.8);
        assert_true(fabs(half.gradient_norm - full.gradient_norm) <=
                    24 * 0x1p-8 * full.gradient_norm);
    }
}

/* Two devices round an operand differently only where its distance to the middle of two numbers is an error of FP32. So
 * few operands are that they change a loss by much less than rounding all of them does. */
static void precisions_agree_with_the_cpu(void **state) {
    (void)state;
    need_compiler();
    static const char *const names[] = {"mxfp8", "nvfp4"};
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
    for (size_t way = 0; way < DW_COUNT(ways); way++) {
        const char *precision = ways[way].precision;
        const int64_t micro_batch = ways[way].micro_batch;
        result whole, first, resumed;
        OK(dw__folder_remove(checkpoints));
        train(device_name, precision, micro_batch, STEPS, &whole);
        OK(dw__folder_remove(checkpoints));
        const int64_t live = dw__memory_live();
        train(device_name, precision, micro_batch, 2, &first);
        train(device_name, precision, micro_batch, STEPS, &resumed);
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
    }
}

static void refuse(const char *on, const char *precision, const char *why) {
    dw_trainer_options o = options(on, precision);
    dw_trainer *t = NULL;
    OK(dw_trainer_create(&o, &t));
    assert_int_equal(dw_trainer_begin(t, 1), DW_STATE);
    assert_non_null(strstr(dw_last_error(), why));
    dw_trainer_destroy(t);
}

/* Another device or precision would give other bits. */
static void other_runs_are_not_resumed(void **state) {
    (void)state;
    need_compiler();
    result made;
    OK(dw__folder_remove(checkpoints));
    train(device_name, "fp32", 2, 1, &made);
    result_end(&made);
    refuse("cpu", "fp32", "device is \"cpu\" (checkpoint: \"");
    refuse(device_name, "bf16", "precision is \"bf16\" (checkpoint: \"fp32\")");
    refuse(device_name, NULL, "precision is \"bf16\" (checkpoint: \"fp32\")");
}

/* ---- failures -------------------------------------------------------------------------------- */

/* The trainer checks tokens when it reads them, so the test raises the limit of that check. */
static void an_index_outside_fails_the_step(void **state) {
    (void)state;
    need_compiler();
    static const uint16_t bad[16] = {1, 2, 3, 60, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8};
    char path[160];
    const char *const list[] = {path};
    dw_trainer_options o = options(device_name, NULL);
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

/* Sets the first `count` elements of a parameter, as the model reads it. */
static void put(const dw_trainer *t, uint32_t parameter, size_t count, float number) {
    char stored[64 * sizeof(float)];
    assert_true(count <= 64);
    for (size_t i = 0; i < count; i++) dw__trial_set(stored, t->gpu->model, i, number);
    OK(dw_device_copy_in(t->device, t->weight_pointers[parameter], stored,
                         count * dw_dtype_bytes(t->gpu->model)));
}

/* Either the loss is not finite, or gradients alone: a hidden unit of 1e38 has a weight of 0 behind it, and its
 * activation's gradient overflows. */
static void spoil(const dw_trainer *t, bool loss) {
    enum { HIDDEN_BIAS = 11, BEHIND = 12, LAST_BIAS = 15 };
    assert_string_equal(t->parameters[HIDDEN_BIAS].name, "transformer.h.0.mlp.c_fc.bias");
    assert_string_equal(t->parameters[BEHIND].name, "transformer.h.0.mlp.c_proj.weight");
    assert_string_equal(t->parameters[LAST_BIAS].name, "transformer.ln_f.bias");
    if (loss) {
        put(t, LAST_BIAS, 1, INFINITY);
    } else {
        put(t, HIDDEN_BIAS, 1, 1e38f);
        put(t, BEHIND, WIDTH, 0.0f);
    }
}

/* Runs a step that must not change anything. */
static void bad_step(size_t way, bool bad_loss) {
    dw_trainer_options o = options(device_name, ways[way].precision);
    dw_trainer *t = NULL;
    dw_train_report report;
    o.micro_batch = ways[way].micro_batch;
    o.checkpoint = NULL;
    OK(dw_trainer_create(&o, &t));
    OK(dw_trainer_begin(t, 0));
    OK(dw_trainer_step(t, &report));
    assert_true(report.applied);
    spoil(t, bad_loss);
    float *before[3] = {copy_block(t, &t->weights), copy_block(t, &t->exp_avg),
                        copy_block(t, &t->exp_avg_sq)};
    OK(dw_trainer_step(t, &report));
    assert_false(report.applied);
    assert_int_equal(dw_trainer_steps_done(t), 2);
    assert_int_equal(t->updates, 1);
    assert_int_equal(isfinite(report.loss), !bad_loss);
    if (bad_loss)
        assert_string_equal(report.culprit, "the loss");
    else
        assert_ptr_equal(strstr(report.culprit, "transformer."), report.culprit);
    float *after[3] = {copy_block(t, &t->weights), copy_block(t, &t->exp_avg),
                       copy_block(t, &t->exp_avg_sq)};
    for (int i = 0; i < 3; i++) {
        assert_memory_equal(before[i], after[i], t->weights.bytes);
        free(before[i]);
        free(after[i]);
    }
    if (t->gpu->model == DW_BF16) { /* the weights behind the model's are as they were */
        OK(dw__trainer_gpu_restart(t));
        OK(dw_trainer_step(t, &report));
        assert_true(report.applied);
    } else if (bad_loss) {
        assert_int_equal(dw_trainer_save(t, folder), DW_STATE);
        assert_non_null(strstr(dw_last_error(), "transformer.ln_f.bias"));
    }
    dw_trainer_destroy(t);
}

/* Runs a step whose loss is above the limit, which must not change anything, and one behind it. */
static void spike(size_t way) {
    dw_trainer_options o = options(device_name, ways[way].precision);
    dw_trainer *t = NULL;
    dw_train_report report;
    o.micro_batch = ways[way].micro_batch;
    o.checkpoint = NULL;
    o.steps = 5;
    o.spike_factor = 1.5;
    o.spike_window = 1;
    OK(dw_trainer_create(&o, &t));
    OK(dw_trainer_begin(t, 0));
    for (int i = 0; i < 2; i++) {
        OK(dw_trainer_step(t, &report));
        assert_true(report.applied && report.spike_limit == (double)INFINITY);
    }
    t->recent.losses[0] *= 0.5; /* of step 1, the only one that counts for step 3 */
    float *before = copy_block(t, &t->weights), *average = copy_block(t, &t->exp_avg);
    OK(dw_trainer_step(t, &report));
    float *after = copy_block(t, &t->weights), *average_after = copy_block(t, &t->exp_avg);
    assert_false(report.applied);
    assert_string_equal(report.culprit, "");
    assert_true(isfinite(report.loss) && isfinite(report.gradient_norm));
    assert_true(report.loss > report.spike_limit);
    assert_int_equal(t->updates, 2);
    assert_memory_equal(before, after, t->weights.bytes);
    assert_memory_equal(average, average_after, t->exp_avg.bytes);
    OK(dw_trainer_step(t, &report));
    assert_true(report.applied && isfinite(report.spike_limit));
    free(before), free(after), free(average), free(average_after);
    dw_trainer_destroy(t);
}

static void a_spike_changes_nothing(void **state) {
    (void)state;
    need_compiler();
    for (size_t way = 0; way < DW_COUNT(ways); way++) spike(way);
}

static void a_step_that_is_not_finite_changes_nothing(void **state) {
    (void)state;
    need_compiler();
    for (size_t way = 0; way < DW_COUNT(ways); way++) {
        bad_step(way, true);
        bad_step(way, false);
    }
}

static void other_options(void **state) {
    (void)state;
    dw_trainer *t = NULL;
    dw_trainer_options o = options("cuda:7", NULL);
    assert_int_equal(dw_trainer_create(&o, &t), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "cuda:7"));
    /* A program that was built before the option. */
    o = options(device_name, NULL);
    o.struct_size = offsetof(dw_trainer_options, device);
    OK(dw_trainer_create(&o, &t));
    dw_trainer_info info;
    dw_trainer_describe(t, &info);
    assert_string_equal(info.device, "cpu");
    assert_string_equal(info.precision, "fp32");
    dw_trainer_destroy(t);
}

static void memory_is_predicted(void **state) {
    (void)state;
    need_compiler();
    for (size_t way = 0; way < DW_COUNT(ways); way++) {
        size_t before = 0, now = 0, most = 0;
        dw_trainer_options o = options(device_name, ways[way].precision);
        dw_trainer *t = NULL;
        dw_trainer_info info;
        dw_train_report report;
        double loss;
        o.micro_batch = ways[way].micro_batch;
        o.checkpoint = NULL;
        OK(dw_trainer_create(&o, &t));
        dw_trainer_describe(t, &info);
        assert_string_equal(info.precision, ways[way].precision);
        dw_device_memory(device, &before, NULL);
        dw_device_memory_restart(device);
        OK(dw_trainer_begin(t, 0));
        dw_device_memory(device, &now, NULL);
        assert_int_equal(now - before, info.predicted_bytes);
        OK(dw_trainer_step(t, &report));
        OK(dw_trainer_validate(t, &loss));
        dw_device_memory(device, &now, &most);
        assert_int_equal(now - before, info.predicted_bytes);
        assert_int_equal(most - before, info.predicted_bytes);
        dw_trainer_destroy(t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_agree),
        cmocka_unit_test(steps_agree_with_the_cpu),
        cmocka_unit_test(precisions_agree_with_the_cpu),
        cmocka_unit_test(bf16_follows_fp32),
        cmocka_unit_test(other_families_compute_in_bf16),
        cmocka_unit_test(a_resumed_run_has_the_same_bits),
        cmocka_unit_test(other_runs_are_not_resumed),
        cmocka_unit_test(an_index_outside_fails_the_step),
        cmocka_unit_test(a_step_that_is_not_finite_changes_nothing),
        cmocka_unit_test(a_spike_changes_nothing),
        cmocka_unit_test(other_options),
        cmocka_unit_test(memory_is_predicted),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
