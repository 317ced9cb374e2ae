/* Tables of runs: what CSV means, what the texts of published tables say, and predictions of rows beside figures. */
#include "deepwell/evaluate.h"
#include "deepwell/graph.h"
#include "plan/evaluation.h"
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
    dw__csv csv;
    assert_int_equal(dw__csv_parse(text, strlen(text), &csv), DW_OK);
    assert_int_equal(csv.columns, 3);
    assert_int_equal(csv.rows, 2);
    assert_string_equal(dw__csv_cell(&csv, 0, "a"), "1");
    assert_string_equal(dw__csv_cell(&csv, 0, "b"), "x, \"y\"\nz");
    assert_string_equal(dw__csv_cell(&csv, 0, "c"), "");
    assert_string_equal(dw__csv_cell(&csv, 1, "a"), "");
    assert_string_equal(dw__csv_cell(&csv, 1, "b"), "2");
    assert_string_equal(dw__csv_cell(&csv, 1, "c"), ""); /* the row ends early */
    assert_string_equal(dw__csv_cell(&csv, 1, "no such column"), "");
    dw__csv_free(&csv);
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
        dw__csv csv;
        assert_int_equal(dw__csv_parse(cases[at].text, strlen(cases[at].text), &csv), DW_PARSE);
        if (!strstr(dw_last_error(), cases[at].word))
            fail_msg("\"%s\" lacks \"%s\"", dw_last_error(), cases[at].word);
    }
}

static void networks_are_read_as_they_are_written(void **state) {
    (void)state;
    const struct {
        const char *text;
        double gigabits; /* for each GPU of a node of eight */
    } cases[] = {{"NVLink3 x8; 4x Omni-Path 100 Gb/s per node", 50},
                 {"NVLink x8; 1600 Gbps/node RoCE", 200},
                 {"NVLink3 x8; 800 Gb/s IB per node", 100},
                 {"NVLink4 x8; RDMA 400 Gb/s per GPU", 400},
                 {"NVLink3 x8; 8x200 Gb HDR IB (Selene)", 200},
                 {"NVLINK Gen4 900 GB/s | Storage: 2x ConnectX-7 400Gb/s, Compute: 8x ConnectX-7 "
                  "IB NDR 400Gb/s",
                  400},
                 {"NVLink4 x8 + IB NDR", 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        double rate = dw__network_rate(cases[at].text, 8) * 8 / 1e9;
        if (fabs(rate - cases[at].gigabits) > 1e-6) fail_msg("%s: %g Gb/s", cases[at].text, rate);
    }
}

static void precisions_and_sharding_are_words(void **state) {
    (void)state;
    assert_int_equal(dw__precision_of("FP8 (float8 linear) + BF16"), DW_TRAIN_FP8);
    assert_int_equal(dw__precision_of("FP8-MX"), DW_TRAIN_MXFP8);
    assert_int_equal(dw__precision_of("FP8 rowwise (bf16 all-gather)"), DW_TRAIN_FP8_ROW);
    assert_int_equal(dw__precision_of("NVFP4"), DW_TRAIN_NVFP4);
    assert_int_equal(dw__precision_of("BF16/FP16"), DW_TRAIN_BF16);
    dw_layout layout;
    dw_layout_default(&layout);
    layout.dp = 64;
    dw__sharding_of("ZeRO-1 within groups of 8", 8, &layout);
    assert_int_equal(layout.zero_stage, 1);
    assert_int_equal(layout.shard, 8);
    layout.shard = 0;
    dw__sharding_of("HSDP", 8, &layout);
    assert_int_equal(layout.zero_stage, 3);
    assert_int_equal(layout.shard, 8);
    layout.shard = 0;
    dw__sharding_of("FSDP(shard=64)", 8, &layout);
    assert_int_equal(layout.zero_stage, 3);
    assert_int_equal(layout.shard, 0); /* all of them */
    dw__recompute_of("full:5 layers/stage", 80, &layout);
    assert_int_equal(layout.recompute, DW_RECOMPUTE_FULL);
    assert_int_equal(layout.recompute_layers, 5);
    dw__recompute_of("", 80, &layout);
    assert_int_equal(layout.recompute, DW_RECOMPUTE_AUTO);
    assert_int_equal(dw__framework_of("Megatron-LM README", "", "none", 2020, 8, 1),
                     DW_FRAMEWORK_MEGATRON_LM);
    assert_int_equal(dw__framework_of("NVIDIA NeMo performance docs", "", "", 2024, 8, 1),
                     DW_FRAMEWORK_MEGATRON);
    assert_int_equal(dw__framework_of("a blog", "", "FSDP2", 2025, 1, 1), DW_FRAMEWORK_TORCHTITAN);
}

#define HEADER                                                                                     \
    "id,source,group,tier,model,params_total_b,params_active_b,layers,hidden,ffn_hidden,heads,"    \
    "kv_heads,head_dim,vocab,experts,topk,seq_len,global_batch_seqs,micro_batch,gpus,gpu_type,"    \
    "interconnect,tp,pp,vpp,cp,ep,dp,recompute,precision,tokens_per_s_per_gpu,peak_mem_gb,notes\n"

static dw_runs *parse(const char *text) {
    dw_runs *runs = NULL;
    if (dw_runs_parse(text, strlen(text), &runs) != DW_OK) fail_msg("%s", dw_last_error());
    return runs;
}

static void rows_become_models_and_layouts(void **state) {
    (void)state;
    dw_runs *runs = parse(
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
    dw_run run;
    assert_int_equal(dw_runs_count(runs), 5);
    dw_run_at(runs, 0, &run);
    assert_null(run.reason);
    assert_true(run.model.gated && !run.model.tied && run.scored);
    assert_int_equal(run.layout.virtual_stages, 5);
    assert_int_equal(run.layout.framework, DW_FRAMEWORK_MEGATRON);
    assert_int_equal(run.hardware->capability, 90);
    dw_run_at(runs, 1, &run);
    assert_null(run.reason);
    assert_int_equal(run.model.expert_ffn, 2048);
    assert_int_equal(run.model.dense_layers, 3);
    assert_int_equal(run.model.shared_ffn, 2048);
    assert_int_equal(run.model.kv_rank, 512);
    dw_planner_model counted = run.model;
    counted.parameters = 0;
    assert_close(dw_planner_parameters(&counted), 671e9, 0.002);
    dw_run_at(runs, 2, &run);
    assert_non_null(strstr(run.reason, "TPU-v5"));
    dw_run_at(runs, 3, &run);
    assert_string_equal(run.reason, "layers is missing");
    dw_run_at(runs, 4, &run);
    assert_null(run.reason);
    assert_int_equal(run.layout.global_batch,
                     64); /* 60 over 4 replicas of 8: two micro-batches each */
    assert_false(run.scored);

    char *json = NULL;
    assert_int_equal(dw_evaluate(runs, NULL, &json), DW_OK);
    assert_non_null(strstr(json, "{\"id\": \"d\", \"reason\": \"layers is missing\"}"));
    assert_non_null(strstr(json, "\"all\": {\"rows\": 2,"));
    dw_text_free(json);
    dw_runs_destroy(runs);
}

/* A result never changes a prediction. */
static void results_are_no_inputs(void **state) {
    (void)state;
    const char *format = HEADER "a,x,g,A,m,,,24,2048,8192,16,16,128,51200,,,2048,64,1,8,A100-80GB,,"
                                "2,1,,1,1,4,,BF16,%s,%s,\n";
    double predicted[2];
    for (int at = 0; at < 2; at++) {
        char text[2000];
        snprintf(text, sizeof text, format, at ? "90000" : "100", at ? "79" : "");
        dw_runs *runs = parse(text);
        dw_run run;
        dw_prediction prediction;
        dw_run_at(runs, 0, &run);
        assert_int_equal(dw_predict(&run.model, run.hardware, &run.layout, &prediction), DW_OK);
        predicted[at] = prediction.tokens_per_second;
        dw_runs_destroy(runs);
    }
    assert_true(predicted[0] == predicted[1]);
}

/* Runs made with constants of our own: the fit finds the way back to them from elsewhere. */
static void a_fit_recovers_what_made_the_runs(void **state) {
    (void)state;
    dw__text text = {0};
    assert_int_equal(dw__text_printf(&text, HEADER), DW_OK);
    for (int at = 0; at < 48; at++) {
        int tp = 1 << at % 3, hidden = 1024 * (1 + at % 5), micro = 1 + at % 4;
        assert_int_equal(dw__text_printf(&text,
                                         "r%d,s%d,s%d,A,m,,,24,%d,%d,%d,%d,128,51200,,,2048,%d,%d,"
                                         "8,H100-80GB,,%d,1,,1,1,%d,none,BF16,1,,\n",
                                         at, at % 4, at % 4, hidden, 4 * hidden, hidden / 128,
                                         hidden / 128, 8 / tp * micro * 2, micro, tp, 8 / tp),
                         DW_OK);
    }
    dw_runs *runs = parse(text.text);
    dw__text_free(&text);
    dw__constants truth = dw__constants_default, fitted = dw__constants_default;
    truth.gemm_sm90 *= 1.10;
    uint32_t rows[48];
    double weights[48];
    for (uint32_t at = 0; at < 48; at++) {
        dw_run *run = &runs->rows[at];
        dw_prediction prediction;
        assert_null(run->reason);
        dw__predict(&truth, &run->model, run->hardware, &run->layout, &prediction);
        run->tokens_per_second = prediction.tokens_per_second;
        rows[at] = at;
        weights[at] = 100; /* far above the priors */
    }
    assert_int_equal(dw__fit_constants(runs, rows, weights, 48, &fitted), DW_OK);
    for (uint32_t at = 0; at < 48; at++) {
        dw_run *run = &runs->rows[at];
        dw_prediction prediction;
        dw__predict(&fitted, &run->model, run->hardware, &run->layout, &prediction);
        assert_close(prediction.tokens_per_second, run->tokens_per_second, 0.005);
    }
    char *json = NULL;
    assert_int_equal(dw_calibrate(runs, NULL, &json), DW_OK);
    assert_non_null(strstr(json, "\"all\": {\"rows\": 48,"));
    dw_text_free(json);
    dw_runs_destroy(runs);
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
        dw__constants constants;
        assert_int_equal(dw__constants_load(path, &constants), cases[at].status);
        if (cases[at].status == DW_OK) assert_true(constants.gemm_sm90 == 0.5);
    }
    remove(path);
}

/* Every allocation fails in turn. */
static void nothing_is_lost_when_memory_is_out(void **state) {
    (void)state;
    const char *text = HEADER
        "a,x,g,A,m,,,24,2048,8192,16,16,128,51200,,,2048,64,1,8,A100-80GB,,2,1,,1,1,4,,BF16,9,50,"
        "\"q\"\"\"\n"
        "b,x,g,A,m,,,24,2048,8192,16,16,128,51200,,,2048,64,1,8,nothing,,2,1,,1,1,4,,BF16,9,50,\n";
    for (int64_t allowed = 0;; allowed++) {
        int64_t live = dw__memory_live();
        dw_runs *runs = NULL;
        char *json = NULL;
        dw__memory_fail_after(allowed);
        dw_status status = dw_runs_parse(text, strlen(text), &runs);
        if (status == DW_OK) status = dw_evaluate(runs, NULL, &json);
        dw__memory_fail_after(-1);
        dw_text_free(json);
        dw_runs_destroy(runs);
        assert_int_equal(dw__memory_live(), live);
        if (status == DW_OK) break;
        assert_int_equal(status, DW_OUT_OF_MEMORY);
        assert_true(allowed < 10000);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quotes_commas_and_line_breaks),
        cmocka_unit_test(broken_tables_name_the_line),
        cmocka_unit_test(networks_are_read_as_they_are_written),
        cmocka_unit_test(precisions_and_sharding_are_words),
        cmocka_unit_test(rows_become_models_and_layouts),
        cmocka_unit_test(results_are_no_inputs),
        cmocka_unit_test(a_fit_recovers_what_made_the_runs),
        cmocka_unit_test(constants_files_are_checked),
        cmocka_unit_test(nothing_is_lost_when_memory_is_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
