/* Tables of runs: CSV, the texts of published tables, and predictions of rows compared with figures. */
#include "base/base.h"
#include "lab/evaluation.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void assert_close(double value, double expected, double part) {
    if (fabs(value / expected - 1) <= part) return;
    fail_msg("%g is not within %g%% of %g", value, 100 * part, expected);
}

static void quotes_commas_and_line_breaks(void **state) {
    (void)state;
    const char *text = "\xEF\xBB\xBF"
                       "a,b,c\r\n\r\n1,\"x, \"\"y\"\"\nz\",\r\n\"\",2\n";
    lab_csv csv;
    assert_int_equal(lab_csv_parse(text, strlen(text), &csv), DW_OK);
    assert_int_equal(csv.columns, 3);
    assert_int_equal(csv.rows, 2);
    assert_string_equal(lab_csv_cell(&csv, 0, "a"), "1");
    assert_string_equal(lab_csv_cell(&csv, 0, "b"), "x, \"y\"\nz");
    assert_string_equal(lab_csv_cell(&csv, 0, "c"), "");
    assert_string_equal(lab_csv_cell(&csv, 1, "a"), "");
    assert_string_equal(lab_csv_cell(&csv, 1, "b"), "2");
    assert_string_equal(lab_csv_cell(&csv, 1, "c"), ""); /* the row ends early */
    assert_string_equal(lab_csv_cell(&csv, 1, "no such column"), "");
    lab_csv_free(&csv);
}

static void broken_tables_name_the_line(void **state) {
    (void)state;
    const struct {
        const char *text, *word;
    } cases[] = {{"", "empty"},
                 {"a,b\n1,\"2", "line 2: a quoted field does not end"},
                 {"a,b\n1,2\n\n1,2,3\n", "line 4 has more fields"},
                 {"a,b\n\"1\"x,2\n", "line 2: text after the quote"}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        lab_csv csv;
        assert_int_equal(lab_csv_parse(cases[at].text, strlen(cases[at].text), &csv), DW_PARSE);
        if (!strstr(lab_error(), cases[at].word))
            fail_msg("\"%s\" lacks \"%s\"", lab_error(), cases[at].word);
    }
}

static void networks_are_read_as_they_are_written(void **state) {
    (void)state;
    const struct {
        const char *text;
        double gigabits; /* for each GPU of a node with eight */
    } cases[] = {{"NVLink3 x8; 4x Omni-Path 100 Gb/s per node", 50},
                 {"NVLink x8; 1600 Gbps/node RoCE", 200},
                 {"NVLink3 x8; 800 Gb/s IB per node", 100},
                 {"NVLink4 x8; RDMA 400 Gb/s per GPU", 400},
                 {"NVLink3 x8; 8x200 Gb HDR IB (Selene)", 200},
                 {"NVLINK Gen4 900 GB/s | Storage: 2x ConnectX-7 400Gb/s, Compute: 8x ConnectX-7 "
                  "IB NDR 400Gb/s",
                  400},
                 {"NVLink4 x8 + IB NDR", 0},
                 {"NVLink 400 GB/s; 8x IB NDR 400 Gb/s", 400},
                 {"EFA 50 Gbps per GPU", 50},
                 {"3.2Tbps RDMA", 400},
                 {"EFA v2 3200Gbps", 400},
                 {"Slingshot 4x200 Gb/s", 100},
                 {"NVLink; 25 Gbps", 3.125},
                 {"Gb/s Tb", 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        double rate = lab_network_rate(cases[at].text, 8) * 8 / 1e9;
        if (fabs(rate - cases[at].gigabits) > 1e-6) fail_msg("%s: %g Gb/s", cases[at].text, rate);
    }
}

static void precisions_and_sharding_are_recognised(void **state) {
    (void)state;
    assert_int_equal(lab_precision_of("FP8 (float8 linear) + BF16"), DW_SCHEME_FP8_TENSOR);
    assert_int_equal(lab_precision_of("FP8-MX"), DW_SCHEME_MXFP8);
    assert_int_equal(lab_precision_of("FP8 rowwise (bf16 all-gather)"), DW_SCHEME_FP8_ROW);
    assert_int_equal(lab_precision_of("NVFP4"), DW_SCHEME_NVFP4);
    assert_int_equal(lab_precision_of("BF16/FP16"), DW_SCHEME_BF16);
    dw_layout layout;
    dw_layout_default(&layout);
    layout.dp = 64;
    lab_sharding_of("ZeRO-1 within groups of 8", 8, &layout);
    assert_int_equal(layout.zero_stage, 1);
    assert_int_equal(layout.shard, 8);
    layout.shard = 0;
    lab_sharding_of("HSDP", 8, &layout);
    assert_int_equal(layout.zero_stage, 3);
    assert_int_equal(layout.shard, 8);
    layout.shard = 0;
    lab_sharding_of("FSDP(shard=64)", 8, &layout);
    assert_int_equal(layout.zero_stage, 3);
    assert_int_equal(layout.shard, 0); /* all layers */
    lab_recompute_of("full:5 layers/stage", 80, &layout);
    assert_int_equal(layout.recompute, DW_RECOMPUTE_FULL);
    assert_int_equal(layout.recompute_layers, 5);
    lab_recompute_of("", 80, &layout);
    assert_int_equal(layout.recompute, DW_RECOMPUTE_AUTO);
    assert_int_equal(lab_framework_of("Megatron-LM README", "", "none", 2020, 8, 1),
                     DW_FRAMEWORK_MEGATRON_LM);
    assert_int_equal(lab_framework_of("NVIDIA NeMo performance docs", "", "", 2024, 8, 1),
                     DW_FRAMEWORK_MEGATRON);
    assert_int_equal(lab_framework_of("a blog", "", "FSDP2", 2025, 1, 1), DW_FRAMEWORK_TORCHTITAN);
}

/* Texts as in papers, blogs, configuration files and command lines. */
static void sharding_has_many_spellings(void **state) {
    (void)state;
    static const struct {
        const char *text;
        dw_framework framework;
        int stage, shard, reshard, offload;
    } cases[] = {
        {"Distributed Optimizer", DW_FRAMEWORK_MEGATRON, 1, 0, 1, 0},
        {"DistOpt", DW_FRAMEWORK_MEGATRON_LM, 1, 0, 1, 0},
        {"dist. optim.", DW_FRAMEWORK_MEGATRON_LM, 1, 0, 1, 0},
        {"optimizer state sharding", DW_FRAMEWORK_MEGATRON_LM, 1, 0, 1, 0},
        {"ZeRO-1 (sharded optimizer)", DW_FRAMEWORK_MEGATRON_LM, 1, 0, 1, 0},
        {"ZeRO", DW_FRAMEWORK_MEGATRON_LM, 1, 0, 1, 0},
        {"DeepSpeed ZeRO stage 3", DW_FRAMEWORK_DEEPSPEED, 3, 0, 1, 0},
        {"ZeRO stage-3 + offload", DW_FRAMEWORK_DEEPSPEED, 3, 0, 1, 1},
        {"ZeRO-3 CPU offload", DW_FRAMEWORK_DEEPSPEED, 3, 0, 1, 1},
        {"zero stage: 1", DW_FRAMEWORK_DEEPSPEED, 1, 0, 1, 0},
        {"zero2", DW_FRAMEWORK_DEEPSPEED, 2, 0, 1, 0},
        {"zero3_bf16", DW_FRAMEWORK_DEEPSPEED, 3, 0, 1, 0},
        {"ds_z2", DW_FRAMEWORK_DEEPSPEED, 2, 0, 1, 0},
        {"DeepSpeed-Z3", DW_FRAMEWORK_DEEPSPEED, 3, 0, 1, 0},
        {"stage3", DW_FRAMEWORK_DEEPSPEED, 3, 0, 1, 0},
        {"os+g", DW_FRAMEWORK_DEEPSPEED, 2, 0, 1, 0},
        {"P_os (stage 1)", DW_FRAMEWORK_PYTORCH, 1, 0, 1, 0},
        {"no sharding", DW_FRAMEWORK_PYTORCH, 0, 0, 1, 0},
        {"DDP", DW_FRAMEWORK_PYTORCH, 0, 0, 1, 0},
        {"data parallel", DW_FRAMEWORK_PYTORCH, 0, 0, 1, 0},
        {"DDP+dist-optimizer (ZeRO-1)", DW_FRAMEWORK_MEGATRON, 1, 0, 1, 0},
        {"none (single device)", DW_FRAMEWORK_TORCHTITAN, 0, 0, 1, 0},
        {"Fully Sharded Data Parallel", DW_FRAMEWORK_FSDP, 3, 0, 1, 0},
        {"PyTorch FSDP full shard", DW_FRAMEWORK_FSDP, 3, 0, 1, 0},
        {"FSDP2 (fully_shard)", DW_FRAMEWORK_TORCHTITAN, 3, 0, 1, 0},
        {"fully-sharded via pjit", DW_FRAMEWORK_JAX, 3, 0, 1, 0},
        {"FSDP-8", DW_FRAMEWORK_JAX, 3, 8, 1, 0},
        {"Gemini (auto)", DW_FRAMEWORK_DEEPSPEED, 3, 0, 1, 0},
        {"FSDP (SHARD_GRAD_OP)", DW_FRAMEWORK_FSDP, 3, 0, 0, 0},
        {"fsdp_version 2, reshard_after_forward=False", DW_FRAMEWORK_TORCHTITAN, 3, 0, 0, 0},
        {"HYBRID_SHARD", DW_FRAMEWORK_FSDP, 3, 8, 1, 0},
        {"HSDP (shard degree 32)", DW_FRAMEWORK_TORCHTITAN, 3, 32, 1, 0},
        {"HSDP 4x16", DW_FRAMEWORK_FSDP, 3, 16, 1, 0},
        {"", DW_FRAMEWORK_MEGATRON, 1, 0, 1, 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_layout layout;
        dw_layout_default(&layout);
        layout.dp = 64;
        layout.framework = cases[at].framework;
        lab_sharding_of(cases[at].text, 8, &layout);
        if (layout.zero_stage != cases[at].stage || layout.shard != cases[at].shard ||
            layout.reshard != cases[at].reshard || layout.offload_optimizer != cases[at].offload)
            fail_msg("\"%s\": stage %d, shard %d, reshard %d, offload %d", cases[at].text,
                     layout.zero_stage, layout.shard, layout.reshard, layout.offload_optimizer);
    }
}

static void recomputation_has_many_spellings(void **state) {
    (void)state;
    static const struct {
        const char *text;
        dw_recompute recompute;
        int layers; /* of a stage's 20 layers */
    } cases[] = {{"", DW_RECOMPUTE_AUTO, 0},
                 {"-", DW_RECOMPUTE_AUTO, 0},
                 {"N/A", DW_RECOMPUTE_AUTO, 0},
                 {"not stated", DW_RECOMPUTE_AUTO, 0},
                 {"partial", DW_RECOMPUTE_AUTO, 0},
                 {"none", DW_RECOMPUTE_NONE, 0},
                 {"No", DW_RECOMPUTE_NONE, 0},
                 {"False", DW_RECOMPUTE_NONE, 0},
                 {"0", DW_RECOMPUTE_NONE, 0},
                 {"disabled", DW_RECOMPUTE_NONE, 0},
                 {"no activation checkpointing", DW_RECOMPUTE_NONE, 0},
                 {"activation_checkpointing=false", DW_RECOMPUTE_NONE, 0},
                 {"without gradient checkpointing", DW_RECOMPUTE_NONE, 0},
                 {"full", DW_RECOMPUTE_FULL, 0},
                 {"TRUE", DW_RECOMPUTE_FULL, 0},
                 {"yes (layer remat)", DW_RECOMPUTE_FULL, 0},
                 {"enabled", DW_RECOMPUTE_FULL, 0},
                 {"full remat", DW_RECOMPUTE_FULL, 0},
                 {"full, uniform, 1 layer", DW_RECOMPUTE_FULL, 0},
                 {"gradient_checkpointing=True", DW_RECOMPUTE_FULL, 0},
                 {"checkpoint-activations", DW_RECOMPUTE_FULL, 0},
                 {"activation checkpointing on all layers", DW_RECOMPUTE_FULL, 0},
                 {"every layer", DW_RECOMPUTE_FULL, 0},
                 {"nothing_saveable", DW_RECOMPUTE_FULL, 0},
                 {"full (per-layer activation checkpointing)", DW_RECOMPUTE_FULL, 0},
                 {"full:5 layers/stage", DW_RECOMPUTE_FULL, 5},
                 {"50% of layers", DW_RECOMPUTE_FULL, 10},
                 {"block (1 of 4 layers)", DW_RECOMPUTE_FULL, 5},
                 {"selective layer (every 2nd)", DW_RECOMPUTE_FULL, 10},
                 {"selective", DW_RECOMPUTE_SELECTIVE, 0},
                 {"selective activation checkpointing", DW_RECOMPUTE_SELECTIVE, 0},
                 {"selective op-level (per-op SAC)", DW_RECOMPUTE_SELECTIVE, 0},
                 {"selective:mla_up_proj", DW_RECOMPUTE_SELECTIVE, 0},
                 {"RMSNorm and MLA up-projections", DW_RECOMPUTE_SELECTIVE, 0},
                 {"recompute gelu (-r 1)", DW_RECOMPUTE_SELECTIVE, 0},
                 {"attn core", DW_RECOMPUTE_SELECTIVE, 0},
                 {"save_dot_except_mlp", DW_RECOMPUTE_SELECTIVE, 0},
                 {"fine-grained", DW_RECOMPUTE_SELECTIVE, 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_layout layout;
        dw_layout_default(&layout);
        layout.pp = 4;
        lab_recompute_of(cases[at].text, 80, &layout);
        if (layout.recompute != cases[at].recompute || layout.recompute_layers != cases[at].layers)
            fail_msg("\"%s\": %s, %d layers", cases[at].text, dw_recompute_name(layout.recompute),
                     layout.recompute_layers);
    }
}

static void precisions_have_many_spellings(void **state) {
    (void)state;
    static const struct {
        const char *text;
        dw_scheme precision;
    } cases[] = {{"bf16-mixed", DW_SCHEME_BF16},
                 {"BFloat16", DW_SCHEME_BF16},
                 {"fp16 w/ dynamic loss scaling", DW_SCHEME_BF16},
                 {"bf16; FP8 activation storage", DW_SCHEME_BF16},
                 {"amp_fp8", DW_SCHEME_FP8_TENSOR},
                 {"FP8 hybrid (delayed scaling)", DW_SCHEME_FP8_TENSOR},
                 {"FP8 current scaling", DW_SCHEME_FP8_TENSOR},
                 {"FP8-E4M3 per-tensor", DW_SCHEME_FP8_TENSOR},
                 {"float8 tensorwise", DW_SCHEME_FP8_TENSOR},
                 {"float8 (rowwise scaling)", DW_SCHEME_FP8_ROW},
                 {"FP8 blockwise (128x128)", DW_SCHEME_FP8_BLOCK},
                 {"fp8 subchannel", DW_SCHEME_FP8_BLOCK},
                 {"FP8 mxfp8 (BF16 params)", DW_SCHEME_MXFP8},
                 {"nvfp4", DW_SCHEME_NVFP4},
                 {"TF32", DW_SCHEME_FP32}};
    for (size_t at = 0; at < DW_COUNT(cases); at++)
        if (lab_precision_of(cases[at].text) != cases[at].precision)
            fail_msg("\"%s\" is %s", cases[at].text,
                     dw_scheme_name(lab_precision_of(cases[at].text)));
}

static void frameworks_are_known_by_name(void **state) {
    (void)state;
    static const struct {
        const char *source, *notes, *sharding;
        int year, tp;
        dw_framework framework;
    } cases[] = {
        {"NVIDIA Megatron-Bridge docs", "", "", 2025, 4, DW_FRAMEWORK_MEGATRON},
        {"a paper", "MLPerf Training 3.0", "", 2023, 4, DW_FRAMEWORK_MEGATRON},
        {"a paper", "GPT-NeoX (Megatron + DeepSpeed)", "ZeRO 1", 2022, 2, DW_FRAMEWORK_MEGATRON_LM},
        {"Falcon", "Gigatron, FlashAttention", "ZeRO-1", 2024, 8, DW_FRAMEWORK_MEGATRON},
        {"DeepSeek", "HAI-LLM", "ZeRO-1", 2024, 1, DW_FRAMEWORK_MEGATRON},
        {"OPT", "metaseq", "FSDP", 2022, 8, DW_FRAMEWORK_FSDP},
        {"torchtune", "full finetune", "FSDP", 2025, 1, DW_FRAMEWORK_TORCHTITAN},
        {"Levanter", "Haliax", "FSDP", 2023, 1, DW_FRAMEWORK_JAX},
        {"x", "Alpa auto inter-op", "", 2022, 4, DW_FRAMEWORK_JAX},
        {"LLaMA-Factory", "", "DeepSpeed ZeRO stage 3", 2024, 1, DW_FRAMEWORK_DEEPSPEED},
        {"LLaMA-Factory", "", "ds_z2", 2024, 1, DW_FRAMEWORK_DEEPSPEED},
        {"x", "composer, MosaicML", "full shard", 2023, 1, DW_FRAMEWORK_FSDP},
        {"x", "", "Fully Sharded Data Parallel", 2024, 1, DW_FRAMEWORK_FSDP},
        {"llm.c", "", "zero-1", 2024, 1, DW_FRAMEWORK_PYTORCH}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_framework found = lab_framework_of(cases[at].source, cases[at].notes, cases[at].sharding,
                                              cases[at].year, cases[at].tp, 1);
        if (found != cases[at].framework)
            fail_msg("%s, %s, %s: %s", cases[at].source, cases[at].notes, cases[at].sharding,
                     dw_framework_name(found));
    }
}

#define HEADER                                                                                     \
    "id,source,group,tier,model,params_total_b,params_active_b,layers,hidden,ffn_hidden,heads,"    \
    "kv_heads,head_dim,vocab,experts,topk,seq_len,global_batch_seqs,micro_batch,gpus,gpu_type,"    \
    "interconnect,tp,pp,vpp,cp,ep,dp,recompute,precision,tokens_per_s_per_gpu,peak_mem_gb,notes\n"

static lab_runs *parse(const char *text) {
    lab_runs *runs = NULL;
    if (lab_runs_parse(text, strlen(text), &runs) != DW_OK) fail_msg("%s", lab_error());
    return runs;
}

static void rows_become_models_and_layouts(void **state) {
    (void)state;
    lab_runs *runs = parse(
        HEADER
        "a,NVIDIA "
        "Megatron-Bridge,g,A,Llama-3-70B,70.55,70.55,80,8192,28672,64,8,128,128256,,,8192,256,1,64,"
        "H100-80GB,"
        "NVLink4 x8 + IB NDR,4,8,5,1,1,2,none,FP8,1664,,NeMo container\n"
        "b,NVIDIA "
        "Megatron-Bridge,g,A,DeepSeek-V3,671.0,37.6,61,7168,18432,128,128,,129280,256,8,4096,4096,"
        "1,256,GB200,"
        "NVL72,1,4,4,1,64,64,,FP8-MX,4256,,\"NeMo; MLA (q_lora 1536, kv_lora 512, qk 128+64, v "
        "128); 3 dense layers ffn "
        "18432; moe_ffn 2048; 1 shared expert\"\n"
        "c,somebody,h,A,GPT,,,24,1024,,16,,,,,,2048,64,1,8,TPU-v5,,1,1,,1,1,8,none,BF16,100,,\n"
        "d,somebody,h,A,GPT,,,,1024,,16,,,,,,2048,64,1,8,H100-80GB,,1,1,,1,1,8,none,BF16,100,,\n"
        "e,somebody,h,C,GPT,,,24,1024,,16,,,,,,2048,60,8,8,H100-80GB,,2,1,,1,1,4,none,BF16,100,,"
        "\n");
    lab_run run;
    assert_int_equal(lab_runs_count(runs), 5);
    lab_run_at(runs, 0, &run);
    assert_null(run.reason);
    assert_true(run.model.gated && !run.model.tied && run.scored);
    assert_int_equal(run.layout.virtual_stages, 5);
    assert_int_equal(run.layout.framework, DW_FRAMEWORK_MEGATRON);
    assert_int_equal(run.hardware->capability, 90);
    lab_run_at(runs, 1, &run);
    assert_null(run.reason);
    assert_int_equal(run.model.expert_ffn, 2048);
    assert_int_equal(run.model.dense_layers, 3);
    assert_int_equal(run.model.shared_ffn, 2048);
    assert_int_equal(run.model.kv_rank, 512);
    dw_model_sizes counted = run.model;
    counted.parameters = 0;
    assert_close(dw_model_sizes_parameters(&counted), 671e9, 0.002);
    lab_run_at(runs, 2, &run);
    assert_non_null(strstr(run.reason, "TPU-v5"));
    lab_run_at(runs, 3, &run);
    assert_string_equal(run.reason, "layers is missing");
    lab_run_at(runs, 4, &run);
    assert_null(run.reason);
    assert_int_equal(run.layout.global_batch,
                     64); /* 60 over 4 replicas of 8: two micro-batches each */
    assert_false(run.scored);

    char *json = NULL;
    assert_int_equal(lab_evaluate(runs, NULL, &json), DW_OK);
    assert_non_null(strstr(json, "{\"id\": \"d\", \"reason\": \"layers is missing\"}"));
    assert_non_null(strstr(json, "\"all\": {\"rows\": 2,"));
    lab_free(json);
    lab_runs_destroy(runs);
}

/* Vendors' names, marketing names, sockets, memory in the name, PCI Express cards, export versions. */
static void gpus_have_many_names(void **state) {
    (void)state;
    static const struct {
        const char *gpu, *name;
        double gib, bf16, link;
        int domain;
    } cases[] = {{"H100-80GB", "h100", 79.6, 989.4, 450, 8},
                 {"NVIDIA H100 80GB HBM3", "h100", 79.6, 989.4, 450, 8},
                 {"8xH100", "h100", 79.6, 989.4, 450, 8},
                 {"H100-SXM5-80GB", "h100", 79.6, 989.4, 450, 8},
                 {"H100-96GB", "h100-96", 95, 989.4, 450, 8},
                 {"H100 PCIe 80GB", "h100-pcie", 79.6, 756.5, 63, 1},
                 {"H100 NVL", "h100-nvl", 93.6, 835.5, 300, 2},
                 {"H800-80G", "h800", 79.6, 989.4, 200, 8},
                 {"H20-96GB", "h20", 95.6, 148, 450, 8},
                 {"A100", "a100-80", 80, 312, 300, 8},
                 {"A100_80GB", "a100-80", 80, 312, 300, 8},
                 {"a100-sxm4-80gb", "a100-80", 80, 312, 300, 8},
                 {"A100-SXM-40GB", "a100-40", 40, 312, 300, 8},
                 {"A100 80GB PCIe", "a100-pcie", 80, 312, 31.5, 1},
                 {"A800", "a800", 80, 312, 200, 8},
                 {"Tesla V100-SXM2-16GB", "v100", 16, 125, 150, 16},
                 {"V100-32GB", "v100", 31.7, 125, 150, 16},
                 {"NVIDIA GeForce RTX 4090 24GB", "rtx-4090", 24, 165.2, 15.75, 1},
                 {"NVIDIA RTX A6000 (48GB)", "rtx-a6000", 48, 154.8, 31.5, 1},
                 {"4090", "rtx-4090", 24, 165.2, 15.75, 1},
                 {"NVIDIA L40S", "l40s", 45, 362.05, 31.5, 1},
                 {"L40", "l40", 45, 181, 31.5, 1},
                 {"NVIDIA B200 SXM 180GB", "b200", 179, 2250, 900, 8},
                 {"GB200 NVL72", "gb200", 185, 2500, 900, 72},
                 {"AMD Instinct MI300X", "mi300x", 192, 1307.4, 448, 8},
                 {"MI250X", "mi250x", 64, 191.5, 100, 8},
                 {"GH200-96GB", "gh200", 95.6, 989.4, 50, 1},
                 {"TPU v5p", NULL, 0, 0, 0, 0},
                 {"Gaudi2", NULL, 0, 0, 0, 0},
                 {"H1000", NULL, 0, 0, 0, 0},
                 {"", NULL, 0, 0, 0, 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        char text[2000];
        snprintf(
            text, sizeof text,
            HEADER
            "a,x,g,A,m,,,24,2048,8192,16,16,128,51200,,,2048,64,1,8,%s,,1,1,,1,1,8,none,BF16,9,,\n",
            cases[at].gpu);
        lab_runs *runs = parse(text);
        lab_run run;
        lab_run_at(runs, 0, &run);
        if (!cases[at].name) {
            assert_true(run.reason && strstr(run.reason, "there is no profile of the GPU"));
        } else {
            if (run.reason) fail_msg("%s: %s", cases[at].gpu, run.reason);
            assert_string_equal(run.hardware->name, cases[at].name);
            assert_close(run.hardware->memory.value / (1 << 30), cases[at].gib, 0.01);
            assert_close(run.hardware->rate[DW_RATE_BF16].value / 1e12, cases[at].bf16, 1e-6);
            assert_close(run.hardware->link_bandwidth.value / 1e9, cases[at].link, 1e-6);
            assert_int_equal(run.hardware->gpus_per_domain, cases[at].domain);
            dw_prediction prediction;
            assert_int_equal(dw_predict(&run.model, run.hardware, &run.layout, &prediction), DW_OK);
            assert_true(prediction.mfu > 0.05 && prediction.mfu < 0.75);
        }
        lab_runs_destroy(runs);
    }
}

/* Megatron shards experts like the rest unless the row says otherwise. */
static void experts_are_sharded_by_default(void **state) {
    (void)state;
    static const struct {
        const char *source, *notes;
        int hidden, ffn, etp;
    } cases[] = {{"a recipe", "NeMo", 6144, 32768, 4},
                 {"a recipe", "NeMo; ETP=1", 6144, 32768, 1},
                 {"NVIDIA Megatron-Bridge", "NeMo", 6144, 32768, 0},
                 {"a recipe", "NeMo", 4096, 1536, 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        char text[2000];
        snprintf(text, sizeof text,
                 HEADER "a,%s,g,A,m,,,64,%d,%d,48,8,128,131072,8,2,8192,1024,1,512,H100-80GB,,4,8,"
                        "8,2,8,8,none,BF16,9,,%s\n",
                 cases[at].source, cases[at].hidden, cases[at].ffn, cases[at].notes);
        lab_runs *runs = parse(text);
        lab_run run;
        lab_run_at(runs, 0, &run);
        if (run.reason) fail_msg("%s", run.reason);
        assert_int_equal(run.layout.etp, cases[at].etp);
        lab_runs_destroy(runs);
    }
}

/* The rows of Megatron-Bridge's tables leave out settings of its recipes, which are read from the recipes. */
static void recipes_of_mixtures_are_completed(void **state) {
    (void)state;
    static const struct {
        const char *notes, *model, *gpu;
        int once, overlap, graphs, padded;
    } cases[] = {
        {"NeMo container 25.09; MoE token-drop", "Qwen3-30B-A3B", "B200-180GB", 0, 0, 1, 1},
        {"NeMo container 25.09; MoE token-drop", "Qwen3-235B-A22B", "B200-180GB", 0, 0, 0, 1},
        {"NeMo container 25.09; MoE token-drop", "DeepSeek-V3", "GB200", 0, 0, 0, 1},
        {"NeMo container 25.09; MoE dropless", "DeepSeek-V3", "H100-80GB", 1, 1, 0, 0},
        {"NeMo container 25.11", "Qwen3-235B-A22B", "GB300", 1, 0, 0, 0},
        {"NeMo container 25.11", "Qwen3-30B-A3B", "H100-80GB", 0, 1, 0, 0},
        {"NeMo container 25.11", "GPT-OSS-120B", "B200-180GB", 0, 0, 0, 0},
        {"NeMo container 26.04.01", "DeepSeek-V3", "B200-180GB", 1, 0, 0, 0},
        {"a container", "DeepSeek-V3", "GB200", 0, 0, 0, 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_layout layout;
        dw_layout_default(&layout);
        layout.overlap_expert = 0;
        lab_bridge_mixture(cases[at].notes, cases[at].model, cases[at].gpu, &layout);
        if (layout.dispatch_once != cases[at].once || layout.overlap_expert != cases[at].overlap ||
            layout.cuda_graphs != cases[at].graphs || layout.padded_experts != cases[at].padded)
            fail_msg("%s, %s, %s", cases[at].notes, cases[at].model, cases[at].gpu);
    }
}

/* Published runs of mixtures: one of each model, GPU and software. Of all of them half are within a tenth; these, which
 * leave out releases that differ by a factor of two with one layout, are each within a quarter. */
static void published_mixtures_are_predicted(void **state) {
    (void)state;
    lab_runs *runs = parse(
        HEADER
        "nvbridge-0070,NVIDIA "
        "Megatron-Bridge,nvbridge,A,DeepSeek-V3,671.0,37.6,61,7168,18432,128,128,,129280,256,8,"
        "4096,4096,2,256,GB300,,1,2,8,1,32,128,selective:mla_up_proj,MXFP8,4992,,\"NeMo container "
        "26.04.01; MoE dropless, force-balanced routing; MLA (q_lora 1536, kv_lora 512, qk 128+64, "
        "v 128); 3 dense layers ffn 18432; moe_ffn 2048; 1 shared expert; recompute from recipe "
        "DEEPSEEK_V3_PRETRAIN_CONFIG_GB300_FP8_MX_V2@v0.4.1, moe_flex_dispatcher_backend=hybridep, "
        "pp_layout=Et*4|(t*4|)*14tmL, expert_tensor_parallel_size=1\"\n"
        "nvbridge-0071,NVIDIA "
        "Megatron-Bridge,nvbridge,A,DeepSeek-V3,671.0,37.6,61,7168,18432,128,128,,129280,256,8,"
        "4096,4096,1,256,GB200,,1,4,4,1,64,64,selective:mlp,MXFP8,4256,,\"NeMo container 26.04.01; "
        "MoE dropless, force-balanced routing; MLA (q_lora 1536, kv_lora 512, qk 128+64, v 128); 3 "
        "dense layers ffn 18432; moe_ffn 2048; 1 shared expert; recompute from recipe "
        "DEEPSEEK_V3_PRETRAIN_CONFIG_GB200_FP8_MX_V2@v0.4.1, cuda_graph_impl=transformer_engine, "
        "cuda_graph_scope=['attn', 'moe_router', 'moe_preprocess'], "
        "moe_flex_dispatcher_backend=hybridep, expert_tensor_parallel_size=1\"\n"
        "nvbridge-0077,NVIDIA "
        "Megatron-Bridge,nvbridge,A,GPT-OSS-120B,116.8,5.1,36,2880,2880,64,8,64,201088,128,4,4096,"
        "1280,4,64,B200-180GB,,1,1,,1,8,64,selective:layernorm+moe_act,BF16,13568,,\"NeMo "
        "container 26.04.01; MoE dropless, force-balanced routing; alternating sliding-window 128 "
        "/ full attention; recompute from recipe GPT_OSS_120B_PRETRAIN_CONFIG_B200_BF16_V2@v0.4.1, "
        "moe_flex_dispatcher_backend=hybridep, expert_tensor_parallel_size=1\"\n"
        "nvbridge-0082,NVIDIA "
        "Megatron-Bridge,nvbridge,A,Qwen3-30B-A3B,30.5,3.3,48,2048,768,32,4,128,151936,128,8,4096,"
        "512,4,8,B200-180GB,,1,1,,1,8,8,none,MXFP8,27136,,\"NeMo container 26.04.01; MoE dropless, "
        "force-balanced routing; ffn_hidden is per-expert; recompute from recipe "
        "QWEN3_30B_A3B_PRETRAIN_CONFIG_B200_FP8_MX_V1@v0.4.1, cuda_graph_impl=transformer_engine, "
        "cuda_graph_scope=['attn', 'moe_router', 'moe_preprocess'], "
        "moe_flex_dispatcher_backend=hybridep, expert_tensor_parallel_size=1\"\n"
        "nvbridge-0087,NVIDIA "
        "Megatron-Bridge,nvbridge,A,Qwen3-235B-A22B,235.1,22.2,94,4096,1536,64,4,128,151936,128,8,"
        "4096,8192,1,256,B200-180GB,,1,8,,1,8,32,none,MXFP8,3776,,\"NeMo container 26.04.01; MoE "
        "dropless, force-balanced routing; ffn_hidden is per-expert; recompute from recipe "
        "QWEN3_235B_A22B_PRETRAIN_CONFIG_B200_FP8_MX_V2@v0.4.1, expert_tensor_parallel_size=1\"\n"
        "nvbridge-0088,NVIDIA "
        "Megatron-Bridge,nvbridge,A,Qwen3-235B-A22B,235.1,22.2,94,4096,1536,64,4,128,151936,128,8,"
        "4096,8192,1,256,H100-80GB,,2,8,4,1,32,16,none,FP8,1712,,\"NeMo container 26.04.01; MoE "
        "dropless, force-balanced routing; ffn_hidden is per-expert; recompute from recipe "
        "QWEN3_235B_A22B_PRETRAIN_CONFIG_H100_FP8_CS_V2@v0.4.1, moe_a2a_overlap=True, "
        "expert_tensor_parallel_size=1\"\n"
        "nvbridge-0209,NVIDIA "
        "Megatron-Bridge,nvbridge,A,Qwen3-30B-A3B,30.5,3.3,48,2048,768,32,4,128,151936,128,8,4096,"
        "512,1,8,B200-180GB,,1,1,,1,8,8,none,MXFP8,9691,,\"NeMo container 26.02; MoE dropless, "
        "force-balanced routing; ffn_hidden is per-expert; recompute from recipe "
        "QWEN3_30B_A3B_PRETRAIN_CONFIG_B200_FP8_MX_V1@v0.3.0, cuda_graph_impl=transformer_engine, "
        "cuda_graph_scope=['moe_router', 'moe_preprocess'], expert_tensor_parallel_size=1\"\n"
        "nvbridge-0229,NVIDIA "
        "Megatron-Bridge,nvbridge,A,DeepSeek-V3,671.0,37.6,61,7168,18432,128,128,,129280,256,8,"
        "4096,4096,1,256,GB200,,1,4,4,1,64,64,selective:mla_up_proj,BF16,3139,,\"NeMo container "
        "25.11; MoE dropless, force-balanced routing; without MTP; MLA (q_lora 1536, kv_lora 512, "
        "qk 128+64, v 128); 3 dense layers ffn 18432; moe_ffn 2048; 1 shared expert; recompute "
        "from recipe DEEPSEEK_V3_GB200_BF16_BASE_CONFIG@v0.2.0, "
        "cuda_graph_impl=transformer_engine, cuda_graph_scope=['moe_router', 'moe_preprocess'], "
        "moe_flex_dispatcher_backend=hybridep, expert_tensor_parallel_size=1\"\n"
        "nvbridge-0266,NVIDIA "
        "Megatron-Bridge,nvbridge,B,Qwen3-30B-A3B,30.5,3.3,48,2048,768,32,4,128,151936,128,8,4096,"
        "512,1,8,B200-180GB,,1,1,1,1,8,8,,FP8-CS,18066,,NeMo container 25.09; MoE token-drop; "
        "ffn_hidden is per-expert\n"
        "nvbridge-0272,NVIDIA "
        "Megatron-Bridge,nvbridge,B,DeepSeek-V3,671.0,37.6,61,7168,18432,128,128,,129280,256,8,"
        "4096,8192,1,1024,H100-80GB,,2,8,4,1,64,64,,FP8-CS,1297,,\"NeMo container 25.09; MoE "
        "dropless, force-balanced routing; MLA (q_lora 1536, kv_lora 512, qk 128+64, v 128); 3 "
        "dense layers ffn 18432; moe_ffn 2048; 1 shared expert\"\n"
        "nvnemo-0034,NVIDIA "
        "NeMo,nvnemo,B,Mixtral-8x7B,46.7,12.9,32,4096,14336,32,8,128,32000,8,2,4096,256,2,64,GB200,"
        ",1,1,1,1,8,64,none,FP8 (per-tensor current scaling),19275,,\"NeMo container 25.04; "
        "recompute from NeMo recommended_model_configs@305d1a8e14, cuda graphs\"\n"
        "nvnemo-0042,NVIDIA "
        "NeMo,nvnemo,B,Llama-4-Scout,107.8,17.2,48,5120,8192,40,8,128,202048,16,1,8192,1024,1,64,"
        "GB200,,1,1,1,1,16,64,none,FP8 (per-tensor current scaling),13783,,\"NeMo container 25.07; "
        "recompute from NeMo recommended_model_configs@99e5dac685, cuda graphs; 1 shared expert; "
        "every layer MoE\"\n"
        "dgxc-0004,NVIDIA DGX "
        "Cloud,dgxc,B,DeepSeek-V3,671.0,37.6,61,7168,18432,128,128,,129280,256,8,4096,4096,1,512,"
        "H100-80GB,,2,8,1,1,64,32,,BF16,669.45,,\"recipe v25.05.04; NeMo/Megatron-Core; MLA "
        "(q_lora 1536, kv_lora 512, qk 128+64, v 128); 3 dense layers ffn 18432; moe_ffn 2048; 1 "
        "shared expert; ETP=1\"\n"
        "dgxc-0063,NVIDIA DGX "
        "Cloud,dgxc,B,Grok-1-314B,314.0,86.0,64,6144,32768,48,8,128,131072,8,2,8192,1024,1,512,"
        "H100-80GB,,4,8,8,2,8,8,,BF16,779.67,,recipe v25.04; NeMo/Megatron-Core\n"
        "dgxc-0077,NVIDIA DGX "
        "Cloud,dgxc,B,Grok-1-314B,314.0,86.0,64,6144,32768,48,8,128,131072,8,2,8192,256,1,128,"
        "GB200,,4,1,1,1,8,32,,BF16,2236.72,,recipe v25.05.04; NeMo/Megatron-Core; ETP=4\n"
        "dgxc-0231,NVIDIA DGX "
        "Cloud,dgxc,B,Llama-4-Maverick,400.7,17.2,48,5120,8192,40,8,128,202048,128,1,8192,1024,1,"
        "128,GB200,,1,2,12,1,64,64,,BF16,8419.91,,recipe v25.05.04; NeMo/Megatron-Core; 1 shared "
        "expert; alternating dense(16384)/MoE layers; ETP=1\n"
        "dgxc-0234,NVIDIA DGX "
        "Cloud,dgxc,B,Llama-4-Maverick,400.7,17.2,48,5120,8192,40,8,128,202048,128,1,8192,1024,1,"
        "512,H100-80GB,,4,1,12,1,128,128,,BF16,3702.83,,recipe v25.05.04; NeMo/Megatron-Core; 1 "
        "shared expert; alternating dense(16384)/MoE layers; ETP=4\n");
    double errors[32];
    const size_t count = lab_runs_count(runs);
    for (size_t at = 0; at < count; at++) {
        lab_run run;
        dw_prediction prediction;
        lab_run_at(runs, at, &run);
        if (run.reason) fail_msg("%s: %s", run.id, run.reason);
        assert_int_equal(dw_predict(&run.model, run.hardware, &run.layout, &prediction), DW_OK);
        errors[at] = fabs(prediction.tokens_per_second / run.tokens_per_second - 1);
        if (errors[at] > 0.25) fail_msg("%s: off by %.0f%%", run.id, 100 * errors[at]);
    }
    assert_true(lab_quantile(errors, count, 0.5) < 0.11);
    lab_runs_destroy(runs);
}

/* A measured result never changes a prediction. */
static void results_do_not_affect_predictions(void **state) {
    (void)state;
    const char *format = HEADER "a,x,g,A,m,,,24,2048,8192,16,16,128,51200,,,2048,64,1,8,A100-80GB,,"
                                "2,1,,1,1,4,,BF16,%s,%s,\n";
    double predicted[2];
    for (int at = 0; at < 2; at++) {
        char text[2000];
        snprintf(text, sizeof text, format, at ? "90000" : "100", at ? "79" : "");
        lab_runs *runs = parse(text);
        lab_run run;
        dw_prediction prediction;
        lab_run_at(runs, 0, &run);
        assert_int_equal(dw_predict(&run.model, run.hardware, &run.layout, &prediction), DW_OK);
        predicted[at] = prediction.tokens_per_second;
        lab_runs_destroy(runs);
    }
    assert_true(predicted[0] == predicted[1]);
}

/* The runs were made with known constants, and the fit finds these constants from another start. */
static void fit_recovers_the_constants_of_synthetic_runs(void **state) {
    (void)state;
    lab_text text = {0};
    assert_int_equal(lab_text_printf(&text, HEADER), DW_OK);
    for (int at = 0; at < 48; at++) {
        int tp = 1 << at % 3, hidden = 1024 * (1 + at % 5), micro = 1 + at % 4;
        assert_int_equal(lab_text_printf(&text,
                                         "r%d,s%d,s%d,A,m,,,24,%d,%d,%d,%d,128,51200,,,2048,%d,%d,"
                                         "8,H100-80GB,,%d,1,,1,1,%d,none,BF16,1,,\n",
                                         at, at % 4, at % 4, hidden, 4 * hidden, hidden / 128,
                                         hidden / 128, 8 / tp * micro * 2, micro, tp, 8 / tp),
                         DW_OK);
    }
    lab_runs *runs = parse(text.text);
    lab_text_free(&text);
    lab_constants truth, fitted;
    lab_constants_built_in(&truth);
    lab_constants_built_in(&fitted);
    truth.value[lab_constant_index("gemm_sm90")] *= 1.10;
    uint32_t rows[48];
    double weights[48];
    for (uint32_t at = 0; at < 48; at++) {
        lab_run *run = &runs->rows[at];
        dw_prediction prediction;
        assert_null(run->reason);
        dw_predict_with(truth.value, &run->model, run->hardware, &run->layout, &prediction);
        run->tokens_per_second = prediction.tokens_per_second;
        rows[at] = at;
        weights[at] = 100; /* far above the priors */
    }
    assert_int_equal(lab_fit_constants(runs, rows, weights, 48, &fitted), DW_OK);
    for (uint32_t at = 0; at < 48; at++) {
        lab_run *run = &runs->rows[at];
        dw_prediction prediction;
        dw_predict_with(fitted.value, &run->model, run->hardware, &run->layout, &prediction);
        assert_close(prediction.tokens_per_second, run->tokens_per_second, 0.005);
    }
    char *json = NULL;
    assert_int_equal(lab_calibrate(runs, NULL, &json), DW_OK);
    assert_non_null(strstr(json, "\"all\": {\"rows\": 48,"));
    lab_free(json);
    lab_runs_destroy(runs);
}

static void constants_files_are_checked(void **state) {
    (void)state;
    const struct {
        const char *text;
        dw_status status;
    } cases[] = {{"{\"constants\": {\"gemm_sm90\": 0.5}}", DW_OK},
                 {"{\"constants\": {\"gemm_sm91\": 0.5}}", DW_NOT_FOUND},
                 {"{\"constants\": {\"gemm_sm90\": -1}}", DW_INVALID_ARGUMENT},
                 {"{\"constants\": {\"gemm_sm90\": \"x\"}}", DW_INVALID_ARGUMENT},
                 {"{}", DW_PARSE},
                 {"[", DW_PARSE}};
    char path[] = "/tmp/deepwell_constants_XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        assert_int_equal(dw__file_write(path, cases[at].text, strlen(cases[at].text)), DW_OK);
        lab_constants constants;
        assert_int_equal(lab_constants_load(path, &constants), cases[at].status);
        if (cases[at].status == DW_OK)
            assert_true(constants.value[lab_constant_index("gemm_sm90")] == 0.5);
    }
    remove(path);
}

/* Every allocation fails in turn, the lab's and the library's. */
static void lack_of_memory_leaks_nothing(void **state) {
    (void)state;
    const char *text = HEADER
        "a,x,g,A,m,,,24,2048,8192,16,16,128,51200,,,2048,64,1,8,A100-80GB,,2,1,,1,1,4,,BF16,9,50,"
        "\"q\"\"\"\n"
        "b,x,g,A,m,,,24,2048,8192,16,16,128,51200,,,2048,64,1,8,nothing,,2,1,,1,1,4,,BF16,9,50,\n";
    for (int library = 0; library < 2; library++) {
        void (*fail_after)(int64_t) = library ? dw__memory_fail_after : lab_memory_fail_after;
        for (int64_t allowed = 0;; allowed++) {
            const int64_t live = dw__memory_live() + lab_memory_live();
            lab_runs *runs = NULL;
            char *json = NULL;
            fail_after(allowed);
            dw_status status = lab_runs_parse(text, strlen(text), &runs);
            if (status == DW_OK) status = lab_evaluate(runs, NULL, &json);
            fail_after(-1);
            lab_free(json);
            lab_runs_destroy(runs);
            assert_int_equal(dw__memory_live() + lab_memory_live(), live);
            if (status == DW_OK) break;
            assert_int_equal(status, DW_OUT_OF_MEMORY);
            assert_true(allowed < 10000);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quotes_commas_and_line_breaks),
        cmocka_unit_test(broken_tables_name_the_line),
        cmocka_unit_test(networks_are_read_as_they_are_written),
        cmocka_unit_test(precisions_and_sharding_are_recognised),
        cmocka_unit_test(sharding_has_many_spellings),
        cmocka_unit_test(recomputation_has_many_spellings),
        cmocka_unit_test(precisions_have_many_spellings),
        cmocka_unit_test(frameworks_are_known_by_name),
        cmocka_unit_test(gpus_have_many_names),
        cmocka_unit_test(experts_are_sharded_by_default),
        cmocka_unit_test(rows_become_models_and_layouts),
        cmocka_unit_test(recipes_of_mixtures_are_completed),
        cmocka_unit_test(published_mixtures_are_predicted),
        cmocka_unit_test(results_do_not_affect_predictions),
        cmocka_unit_test(fit_recovers_the_constants_of_synthetic_runs),
        cmocka_unit_test(constants_files_are_checked),
        cmocka_unit_test(lack_of_memory_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
