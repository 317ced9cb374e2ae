/* Compares predictions with papers and data sheets, and with plain properties: more work never costs less, and faster
 * hardware is never slower. */
#include "deepwell/planner.h"
#include "plan/planner_internal.h"
#include "planner_examples.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static const dw_model_sizes gpt3 = {.layers = 96,
                                    .hidden = 12288,
                                    .heads = 96,
                                    .kv_heads = 96,
                                    .head_dim = 128,
                                    .ffn = 49152,
                                    .vocabulary = 51200,
                                    .tied = 1,
                                    .positions = 2048};

static void assert_near(double value, double expected, double part) {
    if (fabs(value / expected - 1) <= part) return;
    fail_msg("%g is not within %g%% of %g", value, 100 * part, expected);
}

/* The numbers printed in the models' papers and cards. */
static void parameters_are_the_published_ones(void **state) {
    (void)state;
    assert_near(dw_model_sizes_parameters(&gpt3), 174.6e9, 0.002);
    assert_near(dw_model_sizes_parameters(&llama3_8b), 8.03e9, 0.001);
    assert_near(dw_model_sizes_parameters(&llama3_70b), 70.55e9, 0.001);
    assert_near(dw_model_sizes_parameters(&deepseek_v3), 671e9, 0.002);
    /* 37 billion active parameters including the embedding table, which is only looked up: 0.93 less. */
    assert_near(dw_model_sizes_active(&deepseek_v3), 37.5e9 - 0.93e9, 0.02);
    /* 6 N + 6 L h s for the attention under a causal mask. */
    double active = dw_model_sizes_active(&llama3_8b);
    assert_near(dw_planner_token_flops(&llama3_8b, 8192), 6 * active + 6.0 * 32 * 4096 * 8192,
                1e-12);
}

static dw_layout layout_of(int gpus, int tp, int pp, int micro_batch, int global_batch,
                           int seq_len) {
    dw_layout layout;
    dw_layout_default(&layout);
    layout.gpus = gpus;
    layout.tp = tp;
    layout.pp = pp;
    layout.dp = gpus / tp / pp;
    layout.micro_batch = micro_batch;
    layout.global_batch = global_batch;
    layout.seq_len = seq_len;
    layout.framework = DW_FRAMEWORK_MEGATRON;
    layout.zero_stage = 1;
    return layout;
}

/* Idle fraction for p stages, m micro-batches: (p - 1) / (m + p - 1), and related formulas. */
static void bubbles_are_the_closed_forms(void **state) {
    (void)state;
    for (int p = 2; p <= 16; p += 7) {
        for (int m = p; m <= 64; m *= 2) {
            double plain = (p - 1.0) / (m + p - 1);
            assert_near(dw_pipeline_bubble(DW_SCHEDULE_GPIPE, p, 1, m), plain, 1e-12);
            assert_near(dw_pipeline_bubble(DW_SCHEDULE_1F1B, p, 1, m), plain, 1e-12);
            assert_near(dw_pipeline_bubble(DW_SCHEDULE_INTERLEAVED, p, 4, m),
                        (p - 1.0) / (4 * m + p - 1), 1e-12);
            assert_near(dw_pipeline_bubble(DW_SCHEDULE_ZB_H1, p, 1, m), (p - 1.0) / (3 * m + p - 1),
                        1e-12);
            assert_true(dw_pipeline_bubble(DW_SCHEDULE_ZB_H2, p, 1, m) == 0);
            assert_true(dw_pipeline_bubble(DW_SCHEDULE_ZB_V, p, 2, m) == 0);
            assert_near(dw_pipeline_bubble(DW_SCHEDULE_DUALPIPE, 16, 2, m), 14 / (3.0 * m + 14),
                        1e-12);
        }
    }
    assert_true(dw_pipeline_bubble(DW_SCHEDULE_1F1B, 1, 1, 8) == 0);
}

static void begin(dw__planned *planned, const dw_model_sizes *model, const dw_hardware *hardware,
                  const dw_layout *layout) {
    dw__planned_begin(planned, &dw__constants_default, model, hardware, layout);
}

/* Korthikanti et al. 2022, table 2, in bytes of one layer: s b h (34 + 5 a s / h); with tensor parallelism s
 * b h (10 + 24 / t + 5 a s / (h t)); sequence parallelism divides all of it by t; recomputing the scores
 * leaves 34 / t; recomputing the layer 2. The paper's sums omit terms that are small beside h (one softmax
 * statistic per head). */
static void activations_equal_those_of_korthikanti_et_al(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("a100-80:64");
    double h = gpt3.hidden, a = gpt3.heads, s = 2048;
    dw_layout layout = layout_of(64, 8, 8, 1, 64, 2048);
    layout.framework = DW_FRAMEWORK_MEGATRON_LM;
    layout.unfused_attention = 1;
    dw__planned planned;
    begin(&planned, &gpt3, hardware, &layout);
    assert_near(dw__layer_activation_bytes(&planned, DW_RECOMPUTE_NONE, 0),
                h * (34 + 5 * a * s / h) / 8, 0.003);
    assert_near(dw__layer_activation_bytes(&planned, DW_RECOMPUTE_SELECTIVE, 0), h * 34 / 8, 0.003);
    layout.sequence_parallel = 0;
    assert_near(dw__layer_activation_bytes(&planned, DW_RECOMPUTE_NONE, 0),
                h * (10 + 24 / 8.0 + 5 * a * s / h / 8), 0.003);
    assert_near(dw__layer_activation_bytes(&planned, DW_RECOMPUTE_FULL, 0), 2 * h, 1e-12);
    dw_hardware_destroy(hardware);
}

/* Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 GPUs, FP16 and Adam. */
static void optimizer_states_equal_those_of_zero(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("v100:64");
    dw_model_sizes model = {.layers = 36,
                            .hidden = 4096,
                            .heads = 32,
                            .kv_heads = 32,
                            .head_dim = 128,
                            .ffn = 16384,
                            .vocabulary = 51200,
                            .tied = 1};
    dw_layout layout = layout_of(64, 1, 1, 1, 64, 1024);
    layout.framework = DW_FRAMEWORK_DEEPSPEED;
    const double expected[] = {120, 31.4, 16.6, 1.9}; /* GB */
    for (int stage = 0; stage <= 3; stage++) {
        layout.zero_stage = stage;
        dw__planned planned;
        begin(&planned, &model, hardware, &layout);
        dw_memory_parts memory;
        dw__memory(&planned, DW_RECOMPUTE_FULL, 0, 0, &memory);
        double sum = memory.parameters + memory.gradients + memory.optimizer;
        assert_near(sum / dw_model_sizes_parameters(&model) * 7.5, expected[stage], 0.015);
    }
    dw_hardware_destroy(hardware);
}

static double seconds_of(const dw_model_sizes *model, const dw_hardware *hardware,
                         const dw_layout *layout) {
    dw_prediction prediction;
    assert_int_equal(dw_predict(model, hardware, layout, &prediction), DW_OK);
    assert_true(isfinite(prediction.seconds) && prediction.seconds > 0);
    assert_near(dw__parts_sum(&prediction.time), prediction.seconds, 1e-9);
    return prediction.seconds;
}

/* Improving any figure of the hardware by half costs no time. */
static void better_hardware_is_no_slower(void **state) {
    (void)state;
    dw_layout layouts[] = {layout_of(64, 8, 1, 1, 64, 4096), layout_of(64, 2, 4, 1, 256, 8192),
                           layout_of(64, 1, 1, 1, 64, 2048), layout_of(64, 1, 8, 2, 256, 4096)};
    layouts[2].zero_stage = 3;
    layouts[3].virtual_stages = 2;
    for (size_t at = 0; at < DW_COUNT(layouts); at++) {
        dw_hardware *hardware = hardware_of("h100:64");
        double before = seconds_of(&llama3_8b, hardware, &layouts[at]);
        double *figures[] = {&hardware->rate[DW_RATE_BF16].value, &hardware->memory_bandwidth.value,
                             &hardware->link_bandwidth.value, &hardware->network_bandwidth.value};
        for (size_t figure = 0; figure < DW_COUNT(figures); figure++) {
            double kept = *figures[figure];
            *figures[figure] *= 1.5;
            assert_true(seconds_of(&llama3_8b, hardware, &layouts[at]) <= before);
            *figures[figure] = kept;
        }
        dw_hardware_destroy(hardware);
    }
}

static void more_work_takes_longer(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 2, 1, 128, 4096);
    double before = seconds_of(&llama3_70b, hardware, &layout);
    dw_layout more = layout;
    more.global_batch *= 2;
    double twice = seconds_of(&llama3_70b, hardware, &more);
    assert_true(twice > before * 1.5 && twice < before * 2);
    more = layout;
    more.seq_len *= 2;
    assert_true(seconds_of(&llama3_70b, hardware, &more) > 2 * before * 0.95);
    dw_model_sizes deeper = llama3_70b;
    deeper.layers *= 2;
    assert_true(seconds_of(&deeper, hardware, &layout) > before * 1.7);
    more = layout;
    more.recompute = DW_RECOMPUTE_FULL;
    double again = seconds_of(&llama3_70b, hardware, &more);
    assert_true(again > before * 1.15 &&
                again < before * 1.45); /* forward is a third of the work */
    dw_hardware_destroy(hardware);
}

static double allocated(const dw_model_sizes *model, const dw_hardware *hardware,
                        const dw_layout *layout) {
    dw_prediction prediction;
    assert_int_equal(dw_predict(model, hardware, layout, &prediction), DW_OK);
    return prediction.allocated;
}

static void memory_depends_on_the_layout_as_expected(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 2, 1, 128, 4096), other = layout;
    double before = allocated(&llama3_70b, hardware, &layout);
    other.micro_batch = 2;
    assert_true(allocated(&llama3_70b, hardware, &other) > before);
    other = layout;
    other.recompute = DW_RECOMPUTE_FULL;
    assert_true(allocated(&llama3_70b, hardware, &other) < before);
    layout = layout_of(64, 4, 1, 1, 128, 4096);
    layout.framework = DW_FRAMEWORK_OWN; /* Megatron's gradients gather in whole buffers */
    for (int stage = 0; stage < 3; stage++) {
        layout.zero_stage = stage;
        other = layout;
        other.zero_stage = stage + 1;
        assert_true(allocated(&llama3_70b, hardware, &other) <
                    allocated(&llama3_70b, hardware, &layout));
    }
    dw_hardware_destroy(hardware);
}

/* torchtitan's benchmarks of December 2024, Llama-3.1 on H100, in GiB reserved by the fullest GPU. */
static void memory_equals_that_of_torchtitan_s_benchmarks(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:512");
    static const struct {
        const dw_model_sizes *model;
        int gpus, tp, micro_batch, seq_len, compiled;
        dw_recompute recompute;
        double gib;
    } runs[] = {{&llama3_8b, 8, 1, 2, 8192, 0, DW_RECOMPUTE_SELECTIVE, 82.4},
                {&llama3_8b, 8, 1, 2, 8192, 1, DW_RECOMPUTE_SELECTIVE, 77.0},
                {&llama3_8b, 128, 1, 2, 8192, 1, DW_RECOMPUTE_SELECTIVE, 62.0},
                {&llama3_8b, 8, 1, 1, 32768, 1, DW_RECOMPUTE_FULL, 83.9},
                {&llama3_70b, 256, 8, 16, 8192, 1, DW_RECOMPUTE_FULL, 67.6}};
    for (size_t at = 0; at < DW_COUNT(runs); at++) {
        int ranks = runs[at].gpus / runs[at].tp;
        dw_layout layout = layout_of(runs[at].gpus, runs[at].tp, 1, runs[at].micro_batch,
                                     ranks * runs[at].micro_batch, runs[at].seq_len);
        layout.framework = DW_FRAMEWORK_TORCHTITAN;
        layout.zero_stage = 3;
        layout.compiled = runs[at].compiled;
        layout.recompute = runs[at].recompute;
        dw_prediction prediction;
        assert_int_equal(dw_predict(runs[at].model, hardware, &layout, &prediction), DW_OK);
        assert_near(prediction.reserved, runs[at].gib * 1024 * 1024 * 1024, 0.03);
        double reserved = prediction.reserved;
        layout.fused_loss = 1;
        assert_int_equal(dw_predict(runs[at].model, hardware, &layout, &prediction), DW_OK);
        assert_true(prediction.reserved < reserved);
    }
    dw_hardware_destroy(hardware);
}

/* Counted by hand, in BF16 bytes of 8 matmuls: input, attention's output and its log-sum-exp, and the 1st, 3rd, 5th
 * and, unless a compiler drops it, 7th result. */
static void every_second_matmul_result_is_saved(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:8");
    dw_layout layout = layout_of(8, 1, 1, 1, 8, 8192);
    layout.framework = DW_FRAMEWORK_TORCHTITAN;
    layout.compiled = 1;
    dw__planned planned;
    begin(&planned, &llama3_8b, hardware, &layout);
    double compiled = 2 * 4096 + 2 * 4096 + 4 * 32 + 2 * (4096 + 1024 + 14336);
    assert_near(dw__layer_activation_bytes(&planned, DW_RECOMPUTE_SELECTIVE, 0), compiled, 1e-12);
    layout.compiled = 0;
    assert_near(dw__layer_activation_bytes(&planned, DW_RECOMPUTE_SELECTIVE, 0),
                compiled + 2 * 4096, 1e-12);
    layout.framework = DW_FRAMEWORK_MEGATRON;
    double before = dw__layer_activation_bytes(&planned, DW_RECOMPUTE_NONE, 0);
    layout.dropout = 1;
    assert_near(dw__layer_activation_bytes(&planned, DW_RECOMPUTE_NONE, 0), before + 2 * 4096,
                1e-12);
    dw_hardware_destroy(hardware);
}

/* Sharded gradients cost their reduction in every micro-batch. In a pipeline they accumulate unsharded, and
 * parameters that stay are neither gathered twice nor omitted. */
static void sharded_gradients_are_reduced_in_every_micro_batch(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 1, 1, 1, 64 * 8, 4096);
    layout.framework = DW_FRAMEWORK_OWN;
    layout.overlap_data = 0;
    double data[3];
    dw_prediction prediction, kept;
    for (int stage = 0; stage < 3; stage++) {
        layout.zero_stage = stage;
        assert_int_equal(dw_predict(&llama3_8b, hardware, &layout, &prediction), DW_OK);
        data[stage] = prediction.time.data;
    }
    assert_near(data[1], data[0], 1e-9);
    assert_near(data[2], data[1] / 2 * (1 + 8), 1e-9);

    layout = layout_of(64, 1, 8, 1, 64, 4096);
    layout.framework = DW_FRAMEWORK_OWN;
    layout.zero_stage = 3;
    assert_int_equal(dw_predict(&llama3_8b, hardware, &layout, &prediction), DW_OK);
    layout.reshard = 0;
    assert_int_equal(dw_predict(&llama3_8b, hardware, &layout, &kept), DW_OK);
    assert_true(kept.allocated == prediction.allocated && kept.seconds == prediction.seconds);
    /* Whole gradients in FP32, and parameters in BF16, of an eighth of the model. */
    assert_true(kept.memory.workspace > 6.0 * 4 * 218e6);
    dw_hardware_destroy(hardware);
}

/* If a token has 8 copies among 8 ranks, 8 (1 - (7/8)^8) of them go to distinct ranks, by kernels other than NCCL's.
 * Ranks that share an expert gather what each of them received, within NVLink. */
static void tokens_are_sent_once_per_rank(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 1, 8, 1, 64, 4096);
    layout.ep = 8;
    dw_model_sizes model = deepseek_v3;
    dw__planned planned;
    begin(&planned, &model, hardware, &layout);
    double each = dw__exchange_seconds(&planned, 1e9, 8, 1, 8);
    layout.dispatch_once = 1;
    double once = dw__exchange_seconds(&planned, 1e9, 8, 1, 8);
    const double faster = dw__constants_default.dispatch_link / dw__constants_default.expert_link;
    assert_near(once / each * faster, 1 - pow(7.0 / 8, 8), 0.01);

    layout = layout_of(64, 4, 1, 1, 64, 4096);
    layout.ep = 8;
    layout.zero_stage = 1;
    dw__layer_time attention, whole, cut;
    begin(&planned, &model, hardware, &layout);
    dw__attention_part(&planned, &attention);
    dw__layer_seconds(&planned, DW__LAYER_MOE, &attention, &whole);
    layout.etp = 2;
    begin(&planned, &model, hardware, &layout);
    dw__attention_part(&planned, &attention);
    dw__layer_seconds(&planned, DW__LAYER_MOE, &attention, &cut);
    /* The exchange itself has the same tokens, between ranks twice as far apart; the gather is extra. */
    double gather = dw__gather_seconds(&planned, 2.0 * 4096 * 8 * 2 / 4 * 7168, 2, 1, 1);
    assert_true(cut.forward.expert > whole.forward.expert + gather);
    dw_hardware_destroy(hardware);
}

/* Scales of blocks and rows quantize each operand along both dimensions; a tensor scale quantizes it once.
 * Published runs of one model in FP8 and MXFP8 on Blackwell differ by 4 to 7%, in FP8 with tensor and with
 * row scales on H100 by 12%. */
static void quantization_costs_follow_the_recipe(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("gb200:64");
    dw_layout layout = layout_of(64, 1, 4, 1, 256, 8192);
    layout.zero_stage = 1;
    dw_prediction tensor, rows, blocks, mx;
    const struct {
        dw_scheme precision;
        dw_prediction *prediction;
    } cases[] = {{DW_SCHEME_FP8_TENSOR, &tensor},
                 {DW_SCHEME_FP8_ROW, &rows},
                 {DW_SCHEME_FP8_BLOCK, &blocks},
                 {DW_SCHEME_MXFP8, &mx}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        layout.precision = cases[at].precision;
        assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, cases[at].prediction), DW_OK);
    }
    assert_true(rows.time.quantize > blocks.time.quantize &&
                blocks.time.quantize > tensor.time.quantize);
    assert_near(mx.time.quantize, blocks.time.quantize, 1e-9);
    assert_near(rows.time.gemm, tensor.time.gemm, 0.02);
    assert_near(mx.seconds / tensor.seconds, 1.055, 0.025);
    assert_near(rows.seconds / tensor.seconds, 1.10, 0.05);
    dw_hardware_destroy(hardware);
}

/* DeepSeek-V3's published layout: 2.664 million hours of H800 for 14.8 trillion tokens are 1,543 tokens/s. */
static void deepseek_v3_s_run_is_predicted(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:2048");
    hardware->link_bandwidth.value = 200e9; /* H800 */
    dw_layout layout = layout_of(2048, 1, 16, 1, 15360, 4096), other;
    layout.ep = 64;
    layout.zero_stage = 1;
    layout.schedule = DW_SCHEDULE_DUALPIPE;
    layout.overlap_expert = 1;
    layout.precision = DW_SCHEME_FP8_BLOCK;
    layout.recompute = DW_RECOMPUTE_SELECTIVE;
    dw_prediction prediction, plain;
    assert_int_equal(dw_predict(&deepseek_v3, hardware, &layout, &prediction), DW_OK);
    assert_true(prediction.fits);
    assert_near(prediction.tokens_per_second, 1543, 0.15);
    /* Both copies of a stage share one set of optimizer states. */
    other = layout;
    other.schedule = DW_SCHEDULE_1F1B;
    assert_int_equal(dw_predict(&deepseek_v3, hardware, &other, &plain), DW_OK);
    assert_true(prediction.memory.parameters == 2 * plain.memory.parameters);
    assert_true(prediction.memory.optimizer == plain.memory.optimizer);
    dw_hardware_destroy(hardware);
}

/* The rank with the most loaded experts bounds time and memory. */
static void uneven_expert_load_costs_time_and_memory(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:256");
    dw_layout layout = layout_of(256, 1, 8, 1, 512, 4096);
    layout.ep = 32;
    layout.zero_stage = 1;
    dw_prediction even, uneven;
    /* Chance: 32,768 rows of each of 32 ranks, 1.4% more on the busiest. */
    assert_int_equal(dw_predict(&deepseek_v3, hardware, &layout, &uneven), DW_OK);
    layout.expert_load = 100;
    assert_int_equal(dw_predict(&deepseek_v3, hardware, &layout, &even), DW_OK);
    assert_near(uneven.time.expert / even.time.expert, 1 + sqrt(2 * log(32) * (31.0 / 32) / 32768),
                1e-3);
    assert_true(uneven.allocated > even.allocated && uneven.allocated < 1.02 * even.allocated);
    layout.expert_load = 150;
    assert_int_equal(dw_predict(&deepseek_v3, hardware, &layout, &uneven), DW_OK);
    assert_near(uneven.time.expert, 1.5 * even.time.expert, 0.1);
    assert_true(uneven.time.gemm > 1.15 * even.time.gemm);
    assert_true(uneven.memory.activations > 1.15 * even.memory.activations);
    assert_true(uneven.memory.parameters == even.memory.parameters);
    dw_hardware_destroy(hardware);
}

/* A published run: Llama-3 70B in FP8 on 64 H100, Megatron-Bridge 26.02 to 26.04: 1,602 to 1,664 tokens/s. */
static void published_run_is_predicted(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 8, 1, 256, 8192);
    layout.virtual_stages = 5;
    layout.precision = DW_SCHEME_FP8_TENSOR;
    dw_prediction prediction;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &prediction), DW_OK);
    assert_near(prediction.tokens_per_second, 1635, 0.2);
    assert_true(prediction.fits);
    assert_true(prediction.bubble_fraction < 0.05);
    dw_hardware_destroy(hardware);
}

/* Runs that no constant was fitted to: Llama-3 405B on 8,192 and 16,384 H100, 430 and 400 TFLOP/s
 * (Grattafiori et al. 2024, table 4). */
static void runs_outside_the_fit_are_predicted(void **state) {
    (void)state;
    const dw_model_sizes llama3_405b = {.layers = 126,
                                        .hidden = 16384,
                                        .heads = 128,
                                        .kv_heads = 8,
                                        .head_dim = 128,
                                        .ffn = 53248,
                                        .gated = 1,
                                        .vocabulary = 128256};
    for (int gpus = 8192; gpus <= 16384; gpus *= 2) {
        dw_hardware *hardware = hardware_of(gpus == 8192 ? "h100:8192" : "h100:16384");
        dw_layout layout = layout_of(gpus, 8, 16, 1, 2048, 8192);
        layout.virtual_stages = 7;
        layout.zero_stage = 3;
        dw_prediction prediction;
        assert_int_equal(dw_predict(&llama3_405b, hardware, &layout, &prediction), DW_OK);
        assert_near(prediction.model_flops, gpus == 8192 ? 430e12 : 400e12, 0.15);
        dw_hardware_destroy(hardware);
    }
}

static void refused(const dw_model_sizes *model, const dw_hardware *hardware,
                    const dw_layout *layout, const char *word) {
    dw_prediction prediction;
    assert_int_not_equal(dw_predict(model, hardware, layout, &prediction), DW_OK);
    if (!strstr(dw_last_error(), word))
        fail_msg("\"%s\" does not say \"%s\"", dw_last_error(), word);
}

static void invalid_layouts_are_rejected_by_name(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    const dw_layout good = layout_of(64, 4, 2, 1, 128, 4096);
    dw_layout bad = good;
    bad.tp = 3;
    refused(&llama3_8b, hardware, &bad, "tp 3");
    bad = good;
    bad.global_batch = 7;
    refused(&llama3_8b, hardware, &bad, "global_batch 7");
    bad = good;
    bad.seq_len = 0;
    refused(&llama3_8b, hardware, &bad, "seq_len is 0");
    bad = good;
    bad.ep = 2;
    refused(&llama3_8b, hardware, &bad, "no experts");
    bad = good;
    bad.virtual_stages = 100;
    refused(&llama3_8b, hardware, &bad, "virtual_stages 100");
    bad = good;
    bad.precision = DW_SCHEME_NVFP4;
    refused(&llama3_8b, hardware, &bad, "nvfp4");
    static const dw_scheme unpriced[] = {DW_SCHEME_FP16, DW_SCHEME_MXFP8_E5M2, DW_SCHEME_MXFP6,
                                         DW_SCHEME_MXFP6_E2M3, DW_SCHEME_MXFP4};
    for (size_t i = 0; i < sizeof unpriced / sizeof *unpriced; i++) {
        bad.precision = unpriced[i];
        refused(&llama3_8b, hardware, &bad,
                "is not supported: expected bf16, fp32, fp8-tensor, fp8-row, fp8-block, mxfp8 or "
                "nvfp4");
    }
    bad.precision = DW_SCHEME_COUNT;
    refused(&llama3_8b, hardware, &bad, "not a dw_scheme");
    dw_model_sizes model = llama3_8b;
    model.kv_heads = 5;
    refused(&model, hardware, &good, "key-value heads");
    model = llama3_8b;
    model.hidden = 0;
    refused(&model, hardware, &good, "hidden is 0");
    dw_hardware_destroy(hardware);
}

/* Attention on 2 of 8 ranks: its matmuls have the same work, its gathers carry a quarter among two ranks, it
 * has four times as many parameters and gradients, and the ranks with equal parameters share the optimizer's
 * states. */
static void attention_may_have_its_own_tensor_parallelism(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:8");
    hardware->memory.value = 1e13;
    dw_layout layout = layout_of(8, 8, 1, 4, 16, 4096);
    layout.zero_stage = 1;
    dw_prediction same, less;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &same), DW_OK);
    layout.attention_tp = 8;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &less), DW_OK);
    assert_true(same.seconds == less.seconds && same.used == less.used);
    layout.attention_tp = 2;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &less), DW_OK);
    double attention = 80.0 * 8192 * 128 * (2 * 64 + 2 * 8), excess = attention / 2 - attention / 8;
    dw__element_bytes bytes = dw__element_bytes_of(&layout);
    assert_near(less.memory.parameters - same.memory.parameters, bytes.parameter * excess, 1e-9);
    assert_near(less.memory.gradients - same.memory.gradients, bytes.gradient * excess, 1e-9);
    assert_near(less.memory.optimizer, same.memory.optimizer, 1e-9);
    assert_near(less.memory.activations, same.memory.activations, 1e-9);
    assert_near(less.time.attention, same.time.attention, 1e-3);
    /* Two of a layer's four gathers shrink from 7/8 to 1/4 x 1/2 of the tokens; the head's gather is unchanged. */
    assert_near(less.time.tensor, same.time.tensor * (0.5 + 0.5 / 7), 0.02);
    layout.micro_batch = 2;
    refused(&llama3_70b, hardware, &layout, "tp / attention_tp 4");
    layout.micro_batch = 4;
    layout.attention_tp = 3;
    refused(&llama3_70b, hardware, &layout, "attention_tp 3");
    layout.attention_tp = 2;
    layout.sequence_parallel = 0;
    refused(&llama3_70b, hardware, &layout, "sequence_parallel");
    dw_hardware_destroy(hardware);
}

/* A group of 16 does not divide a rack of 72: some groups span two racks, and everything beyond the network
 * waits. Racks that are not filled get 64 each, which 16 divides; likewise six of a node's eight GPUs. */
static void groups_that_straddle_a_domain_are_slower(void **state) {
    (void)state;
    static const struct {
        const char *hardware;
        int gpus, tp, slow;
    } cases[] = {{"gb200:288", 288, 16, 1}, {"gb200:256", 256, 16, 0}, {"gb200:288", 288, 8, 0},
                 {"gb200:72", 72, 8, 0},    {"h100:48", 48, 6, 1},     {"h100:6", 6, 6, 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_hardware *hardware = hardware_of(cases[at].hardware);
        dw_layout layout =
            layout_of(cases[at].gpus, cases[at].tp, 1, 1, cases[at].gpus / cases[at].tp, 8192);
        dw__planned planned;
        begin(&planned, &llama3_70b, hardware, &layout);
        double bytes = 1e9, tp = cases[at].tp;
        double seconds = dw__gather_seconds(&planned, bytes, cases[at].tp, 1, 0);
        double linked = bytes * (tp - 1) / tp /
                        (planned.constants->link_efficiency * hardware->link_bandwidth.value);
        if (cases[at].slow)
            assert_true(seconds > 1.2 * linked);
        else
            assert_near(seconds, linked, 1e-9);
        dw_hardware_destroy(hardware);
    }
}

/* Offloading to host memory: its bytes, the transfer beside computation, and the link that gradients use too. */
static void offloading_costs_transfers(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 8, 4, 1, 64, 8192);
    dw_prediction kept, moved, p;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &kept), DW_OK);
    assert_true(kept.host_activations == 0 && kept.host_optimizer == 0 && kept.time.offload == 0);
    /* Half of a stage's 20 layers are offloaded: a fraction of the heaviest stage's micro-batches in flight. */
    layout.offload_layers = 10;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &moved), DW_OK);
    assert_near(moved.memory.activations, kept.memory.activations / 2, 1e-9);
    assert_near(moved.host_activations, kept.memory.activations / 2, 1e-9);
    /* Hidden: only the GPU's own memory is read and written for it. One stage holds p micro-batches at once. */
    double each = moved.host_activations / 4, m = 64 / 2;
    dw__planned planned;
    begin(&planned, &llama3_70b, hardware, &layout);
    double own = 2 * m * dw__traffic_seconds(&planned, each);
    /* Those of the mean stage, not of the stage with the head. */
    assert_near(moved.time.offload, own, 0.05);
    /* A link that is a hundred times slower hides as much as before; the rest is exposed. */
    hardware->host_bandwidth.value /= 100;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &p), DW_OK);
    double compute = p.time.gemm + p.time.attention + p.time.elementwise + p.time.tensor;
    double way = each / (0.8 * hardware->host_bandwidth.value);
    assert_true(p.time.offload > 2 * m * way - 1.1 * compute + own);
    assert_true(p.time.offload < 2 * m * way - 0.9 * compute + own);
    /* Gradients between nodes use the same link; those within NVLink do not. */
    layout.zero_stage = 3, layout.pp = 1, layout.tp = 1, layout.dp = 64, layout.offload_layers = 40;
    hardware->host_bandwidth.value *= 20;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &moved), DW_OK);
    hardware->gpus_per_domain = 64;
    hardware->link_bandwidth.value = hardware->network_bandwidth.value;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &p), DW_OK);
    assert_true(moved.time.offload > p.time.offload * 1.05);
    /* A plan that needs more than the host's memory does not fit. */
    assert_true(hardware->memory.value < 1e12);
    hardware->memory.value = 1e12;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &p), DW_OK);
    assert_int_equal(p.fits, 1);
    hardware->host_memory.value = p.host_activations * 0.99;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &p), DW_OK);
    assert_int_equal(p.fits, 0);
    dw_hardware_destroy(hardware);
}

/* A billion elements on one GPU: 24 bytes of states and 2 x 4 + 2 x 2 of gradients and parameters pass
 * through host memory, which reaches 45% of its 76.8 GB/s. */
static void host_optimizer_is_bound_by_host_memory(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:1");
    dw_layout layout = layout_of(1, 1, 1, 1, 8, 2048);
    dw_prediction p;
    layout.framework = DW_FRAMEWORK_MEGATRON;
    double elements = dw_model_sizes_parameters(&llama3_8b);
    layout.offload_optimizer = 1;
    assert_int_equal(dw_predict(&llama3_8b, hardware, &layout, &p), DW_OK);
    assert_near(p.host_optimizer, 12 * elements, 0.001);
    assert_true(p.memory.optimizer == 0);
    assert_near(p.time.optimizer, elements * 36 / (0.45 * 76.8e9), 0.001);
    layout.overlap_data = 0; /* one after the other: gradients out, parameters back */
    assert_int_equal(dw_predict(&llama3_8b, hardware, &layout, &p), DW_OK);
    assert_near(p.time.optimizer, elements * (36 / (0.45 * 76.8e9) + 6 / (0.8 * 63e9)), 0.001);
    /* States offloaded without parameters need a copy of the parameters. */
    layout.framework = DW_FRAMEWORK_OWN;
    assert_int_equal(dw_predict(&llama3_8b, hardware, &layout, &p), DW_OK);
    assert_near(p.host_optimizer, 12 * elements, 0.001);
    hardware->host_bandwidth.value = 0;
    refused(&llama3_8b, hardware, &layout, "host_bandwidth");
    dw_hardware_destroy(hardware);
}

/* The total of a simulated schedule equals the prediction of a pipeline's work. */
static void stages_add_up_to_the_step(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 4, 1, 64, 4096);
    layout.virtual_stages = 2;
    dw_prediction prediction;
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &prediction), DW_OK);
    double most = 0;
    int layers = 0;
    for (int stage = 0; stage < 4; stage++) {
        double busy = 0;
        for (int chunk = 0; chunk < 2; chunk++) {
            dw_stage_cost cost;
            dw_predict_stage(&llama3_70b, hardware, &layout, stage, chunk, &cost);
            busy += cost.forward + cost.backward + cost.backward_weight;
            layers += cost.layers;
        }
        most = busy > most ? busy : most;
    }
    assert_int_equal(layers, llama3_70b.layers);
    const dw_time_parts *t = &prediction.time;
    double work = t->gemm + t->attention + t->elementwise + t->quantize + t->launch + t->tensor +
                  t->context + t->expert + t->imbalance;
    assert_near(16 * most, work, 1e-9); /* 64 sequences over 4 replicas */
    dw_hardware_destroy(hardware);
}

/* The kernels add up to the step's matmuls and attention, and their operations to those that MFU counts. */
static void kernels_add_up_to_the_step(void **state) {
    (void)state;
    dw_hardware *hardware = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 1, 1, 64, 4096);
    dw_prediction prediction;
    dw_operation_cost kernels[DW_OPERATIONS_MOST];
    assert_int_equal(dw_predict(&llama3_70b, hardware, &layout, &prediction), DW_OK);
    int count = dw_predict_operations(&llama3_70b, hardware, &layout, kernels);
    double gemm = 0, attention = 0, operations = 0;
    for (int at = 0; at < count; at++) {
        const dw_operation_cost *k = &kernels[at];
        double peak = hardware->rate[DW_RATE_BF16].value;
        assert_true(k->operations > 0 && k->bytes > 0 && k->seconds > 0 && k->times > 0);
        assert_true(k->operations <= k->seconds * peak);
        assert_true(k->bytes <= k->seconds * hardware->memory_bandwidth.value);
        int attends = strcmp(k->name, "attention") == 0;
        int product = strstr(k->pass, "of ") ||
                      (strcmp(k->pass, "forward") == 0 && !attends && k->operations > 2 * k->bytes);
        if (attends) attention += k->seconds * k->times;
        if (product) gemm += k->seconds * k->times;
        if (product || (attends && strcmp(k->pass, "forward") == 0))
            operations += (attends ? 3 : 1) * k->operations * k->times;
    }
    assert_near(gemm, prediction.time.gemm, 1e-9);
    assert_near(attention, prediction.time.attention, 1e-9);
    assert_near(operations, prediction.model_flops * prediction.seconds, 1e-3);
    dw_hardware_destroy(hardware);
}

/* Attention's kernels have the operations of dw_planner_model_work: with latent attention, whose backward is more than
 * 2.5 times forward, with a window, and where only some layers attend. */
static void attention_kernels_have_the_work_of_attention(void **state) {
    (void)state;
    static const char *const names[] = {"llama3-8b", "deepseek-v3", "mistral-7b", "gpt-oss-20b",
                                        "nemotron-h-8b"};
    dw_hardware *hardware = hardware_of("h100:8");
    for (size_t at = 0; at < DW_COUNT(names); at++) {
        dw_model_sizes model;
        dw_planner_work work;
        dw_operation_cost kernels[DW_OPERATIONS_MOST];
        dw_layout layout = layout_of(8, 1, 1, 1, 8, 16384);
        double forward = 0, backward = 0, seconds[2] = {0, 0};
        assert_int_equal(dw_model_sizes_named(names[at], &model), DW_OK);
        dw_planner_model_work(&model, 1, layout.seq_len, &work);
        int count = dw_predict_operations(&model, hardware, &layout, kernels);
        for (int k = 0; k < count; k++) {
            if (strcmp(kernels[k].name, "attention") != 0) continue;
            bool back = strcmp(kernels[k].pass, "backward") == 0;
            *(back ? &backward : &forward) += kernels[k].operations * kernels[k].times;
            seconds[back] += kernels[k].seconds * kernels[k].times;
        }
        assert_near(forward, work.attention, 1e-9);
        assert_near(backward, work.backward_attention, 1e-9);
        assert_near(seconds[1] / seconds[0], work.backward_attention / work.attention, 1e-9);
    }
    dw_hardware_destroy(hardware);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_are_the_published_ones),
        cmocka_unit_test(bubbles_are_the_closed_forms),
        cmocka_unit_test(activations_equal_those_of_korthikanti_et_al),
        cmocka_unit_test(optimizer_states_equal_those_of_zero),
        cmocka_unit_test(better_hardware_is_no_slower),
        cmocka_unit_test(more_work_takes_longer),
        cmocka_unit_test(memory_depends_on_the_layout_as_expected),
        cmocka_unit_test(memory_equals_that_of_torchtitan_s_benchmarks),
        cmocka_unit_test(every_second_matmul_result_is_saved),
        cmocka_unit_test(sharded_gradients_are_reduced_in_every_micro_batch),
        cmocka_unit_test(deepseek_v3_s_run_is_predicted),
        cmocka_unit_test(uneven_expert_load_costs_time_and_memory),
        cmocka_unit_test(quantization_costs_follow_the_recipe),
        cmocka_unit_test(tokens_are_sent_once_per_rank),
        cmocka_unit_test(published_run_is_predicted),
        cmocka_unit_test(runs_outside_the_fit_are_predicted),
        cmocka_unit_test(invalid_layouts_are_rejected_by_name),
        cmocka_unit_test(attention_may_have_its_own_tensor_parallelism),
        cmocka_unit_test(groups_that_straddle_a_domain_are_slower),
        cmocka_unit_test(offloading_costs_transfers),
        cmocka_unit_test(host_optimizer_is_bound_by_host_memory),
        cmocka_unit_test(stages_add_up_to_the_step),
        cmocka_unit_test(kernels_add_up_to_the_step),
        cmocka_unit_test(attention_kernels_have_the_work_of_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
