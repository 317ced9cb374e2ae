/* The search against every layout tried in turn, its answer if nothing fits, and plans as files. */
#include "base/base.h"
#include "deepwell/autoplan.h"
#include "deepwell/graph.h"
#include "deepwell/simulate.h"
#include "deepwell/threads.h"
#include "plan/plan_fields.h"
#include "plan/search.h"
#include "planner_examples.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static dw_autoplan_request request_of(const dw_model_sizes *model, const dw_hardware *hardware,
                                      int seq_len, int global_batch) {
    dw_autoplan_request request;
    dw_autoplan_request_default(&request);
    request.model_name = "tested";
    request.model = model;
    request.hardware = hardware;
    request.seq_len = seq_len;
    request.global_batch = global_batch;
    request.bold =
        1; /* all layouts; only layouts_with_measured_parts_are_preferred tests the default */
    return request;
}

static dw_autoplan *plan_of(const dw_autoplan_request *request) {
    dw_autoplan *plan = NULL;
    if (dw_autoplan_search(request, &plan) != DW_OK) fail_msg("%s", dw_last_error());
    return plan;
}

/* ---- every layout, one by one ---------------------------------------------------------------- */

typedef struct every {
    const dw_model_sizes *model;
    const dw_hardware *hardware;
    int fits;
    double seconds; /* the fastest layout that fits */
    dw_layout layout;
} every;

static void consider(every *e, const dw_layout *layout) {
    dw_prediction p;
    if (dw_predict(e->model, e->hardware, layout, &p) != DW_OK) return;
    if (!p.fits || (e->fits && p.seconds >= e->seconds)) return;
    e->fits = 1;
    e->seconds = p.seconds;
    e->layout = *layout;
}

static void every_placement(every *e, dw_layout layout) {
    int most = (e->model->layers + layout.pp - 1) / layout.pp;
    int host = e->hardware->host_bandwidth.value > 0;
    for (layout.offload_optimizer = 0; layout.offload_optimizer <= host; layout.offload_optimizer++)
        for (layout.offload_layers = 0; layout.offload_layers <= (host ? most : 0);
             layout.offload_layers++)
            consider(e, &layout);
}

static void every_recomputation(every *e, dw_layout layout) {
    int most = (e->model->layers + layout.pp - 1) / layout.pp;
    layout.recompute = DW_RECOMPUTE_NONE;
    every_placement(e, layout);
    layout.recompute = DW_RECOMPUTE_SELECTIVE;
    every_placement(e, layout);
    layout.recompute = DW_RECOMPUTE_FULL;
    for (layout.recompute_layers = 0; layout.recompute_layers <= most; layout.recompute_layers++)
        every_placement(e, layout);
}

static void every_sharding(every *e, dw_layout layout) {
    int ranks = layout.dp * layout.cp;
    for (layout.zero_stage = 0; layout.zero_stage <= 3; layout.zero_stage++) {
        if (layout.zero_stage == 2 && layout.pp > 1) continue;
        for (layout.shard = 1; layout.shard <= ranks; layout.shard++)
            for (layout.reshard = layout.pp > 1; layout.reshard <= 1; layout.reshard++)
                if (ranks % layout.shard == 0 && (layout.shard > 1 || ranks == 1))
                    every_recomputation(e, layout);
    }
}

static void every_schedule(every *e, dw_layout layout) {
    int p = layout.pp, m = layout.global_batch / (layout.dp * layout.micro_batch);
    int most = (e->model->layers + p - 1) / p;
    layout.sequence_parallel = layout.tp > 1;
    for (int schedule = 0; schedule < DW_SCHEDULES; schedule++) {
        int low = 1, high = 1, possible = p > 1;
        if (schedule == DW_SCHEDULE_INTERLEAVED) low = 2, high = most, possible &= m % p == 0;
        if (schedule == DW_SCHEDULE_ZB_V) low = high = 2, possible &= m >= 2 * p && most >= 2;
        if (schedule == DW_SCHEDULE_ZB_H1) possible &= m >= p;
        if (schedule == DW_SCHEDULE_ZB_H2) possible &= m >= 2 * p;
        if (schedule == DW_SCHEDULE_DUALPIPE) possible &= p % 2 == 0 && m % 2 == 0 && m >= 2 * p;
        if (!possible && schedule != DW_SCHEDULE_1F1B) continue;
        layout.schedule = (dw_pipeline_schedule)schedule;
        layout.overlap_expert = schedule == DW_SCHEDULE_DUALPIPE;
        for (int v = low; v <= high; v++) {
            if (schedule == DW_SCHEDULE_INTERLEAVED && most % v) continue;
            layout.virtual_stages = v;
            every_sharding(e, layout);
        }
    }
}

/* Attention on some of the tensor-parallel ranks, each group with its own sequences. */
static void every_attention(every *e, dw_layout layout) {
    for (int atp = 1; atp <= layout.tp; atp++) {
        if (layout.tp % atp || layout.micro_batch % (layout.tp / atp) || e->model->heads % atp)
            continue;
        if (e->model->kv_heads % atp && atp % e->model->kv_heads) continue;
        if (atp < layout.tp && layout.tp > e->hardware->gpus_per_domain) continue;
        layout.attention_tp = atp < layout.tp ? atp : 0;
        every_schedule(e, layout);
    }
}

static void every_layout(every *e, dw_layout layout) {
    int gpus = layout.gpus, batch = layout.global_batch;
    for (int tp = 1; tp <= gpus; tp++)
        for (int cp = 1; cp <= gpus / tp; cp++)
            for (int pp = 1; pp <= gpus / tp / cp && pp <= e->model->layers; pp++) {
                if (gpus % (tp * cp * pp) || e->model->ffn % tp) continue;
                if (cp > 1 && layout.seq_len % (2 * cp)) continue;
                layout.tp = tp;
                layout.cp = cp;
                layout.pp = pp;
                layout.dp = gpus / tp / cp / pp;
                for (int ep = 1; ep <= (e->model->experts ? e->model->experts : 1); ep++)
                    for (int etp = 1; etp <= (e->model->experts ? tp : 1); etp++)
                        for (int b = 1; b <= batch; b++) {
                            if (tp % etp || (e->model->experts && e->model->expert_ffn % etp))
                                continue;
                            layout.ep = ep;
                            layout.etp = e->model->experts ? etp : 0;
                            layout.micro_batch = b;
                            if (batch % (layout.dp * b)) continue;
                            every_attention(e, layout);
                        }
            }
}

/* The bounds are below everything that fits, and the best over meshes is the best of all, bit for bit. */
static void meshes_agree(const every *e, int length, int batch) {
    dw__problem problem = {
        .model = e->model, .hardware = e->hardware, .seq_len = length, .global_batch = batch};
    dw__meshes meshes = {0};
    double fastest = HUGE_VAL;
    dw__limits_begin(&problem.limits);
    assert_int_equal(dw__limits_add(&problem.limits, "precision=bf16"), DW_OK);
    assert_int_equal(dw__limits_add(&problem.limits, "last_stage_layers=0"), DW_OK);
    dw__limits_finish(&problem.limits);
    assert_int_equal(dw__space_meshes(&problem, e->hardware->gpus, 0, &meshes), DW_OK);
    for (size_t at = 0; at < meshes.count; at++) {
        dw__found found;
        dw__meshes_bound(&problem, &meshes.items[at], 1);
        dw__mesh_best(&problem, &meshes.items[at], HUGE_VAL, 0, NULL, &found);
        if (!found.found) continue;
        assert_true(meshes.items[at].bound <= found.prediction.seconds * (1 + 1e-12));
        fastest = fmin(fastest, found.prediction.seconds);
    }
    assert_true(e->fits ? fastest == e->seconds : fastest == HUGE_VAL);
    dw__free(meshes.items);
}

static uint32_t state = 12345;
static int drawn(int low, int high) {
    state = state * 1664525u + 1013904223u;
    return low + (int)((state >> 8) % (uint32_t)(high - low + 1));
}

/* Under the sanitizers, which are slow, only a few problems run, and their totals are not checked. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { ROUNDS = 4, LARGE = 0 };
#else
enum { ROUNDS = 40, LARGE = 1 };
#endif

static void search_finds_the_best_of_all_layouts(void **unused) {
    (void)unused;
    int fitting = 0, recomputed = 0, pipelined = 0, layers = 0, optimizers = 0, attentions = 0;
    for (int round = 0; round < ROUNDS; round++) {
        int heads = 1 << drawn(1, 3), mixture = round % 3 == 0;
        dw_model_sizes model = {.layers = drawn(2, 7),
                                .hidden = 64 * drawn(8, 64),
                                .heads = heads,
                                .kv_heads = heads / (drawn(0, 1) ? 2 : 1),
                                .head_dim = 64,
                                .ffn = 96 * drawn(4, 60),
                                .gated = drawn(0, 1),
                                .vocabulary = drawn(1000, 60000),
                                .experts = mixture ? 4 : 0,
                                .top_k = mixture ? 2 : 0,
                                .expert_ffn = mixture ? 64 * drawn(2, 9) : 0,
                                .moe_every = mixture ? 1 : 0};
        static const char *const clusters[] = {"h100:1", "h100:2", "h100:6", "h100:8",
                                               "a100-80:16"};
        dw_hardware *hardware = hardware_of(clusters[drawn(0, mixture ? 3 : 4)]);
        static const int batches[] = {12, 18, 24, 48};
        int batch = batches[drawn(0, 3)], length = 256 * drawn(1, 24);
        every e = {.model = &model, .hardware = hardware};
        /* Memory is so small that recomputation or offloading is necessary. */
        hardware->memory.value = (1 << 26) * (double)drawn(22, 60);
        static const double ways[] = {0, 1e9, 63e9, 63e9, 450e9};
        hardware->host_bandwidth.value = ways[drawn(0, 4)];
        hardware->host_memory_bandwidth.value *= drawn(0, 2);
        hardware->host_memory.value = (1 << 26) * (double)drawn(0, 60); /* 0: no limit */
        if (round % 2) hardware->link_bandwidth.value /= 32; /* without it there are no pipelines */
        dw_layout layout;
        dw_layout_default(&layout);
        layout.gpus = hardware->gpus;
        layout.global_batch = batch;
        layout.seq_len = length;
        every_layout(&e, layout);
        meshes_agree(&e, length, batch);
        dw_autoplan_request request = request_of(&model, hardware, length, batch);
        request.reserve = 0;
        request.constraints = (const char *const[]){"last_stage_layers=0"};
        request.constraint_count = 1;
        dw_autoplan *plan = plan_of(&request);
        assert_int_equal(plan->prediction.fits, e.fits);
        fitting += e.fits;
        if (e.fits) {
            recomputed += e.layout.recompute != DW_RECOMPUTE_NONE;
            pipelined += e.layout.pp > 1;
            layers += e.layout.offload_layers > 0;
            optimizers += e.layout.offload_optimizer;
            attentions += e.layout.attention_tp > 0;
            assert_true(plan->prediction.seconds <= e.seconds * 1.005);
            assert_true(plan->prediction.seconds >= e.seconds * (1 - 1e-12));
            assert_int_equal(dw_layout_check(&model, hardware, &plan->layout), DW_OK);
        }
        dw_autoplan_destroy(plan);
        dw_hardware_destroy(hardware);
    }
    if (ROUNDS < 40) return;
    assert_true(fitting >= 15 && fitting < 40);
    assert_true(recomputed >= 3 && pipelined >= 1);
    assert_true(layers >= 3 && optimizers >= 1 && attentions >= 1);
}

/* One GPU with less and less memory and a link that hides some layers' transfer to the host: the fastest plan
 * recomputes some layers and offloads others. */
static void some_layers_are_recomputed_and_others_offloaded(void **unused) {
    (void)unused;
    static const dw_model_sizes model = {.layers = 12,
                                         .hidden = 2048,
                                         .heads = 16,
                                         .kv_heads = 16,
                                         .head_dim = 128,
                                         .ffn = 8192,
                                         .vocabulary = 32000};
    int mixed = 0, fitting = 0;
    dw_hardware *hardware = hardware_of("h100:1");
    dw_autoplan_request request = request_of(&model, hardware, 4096, 8);
    request.constraints =
        (const char *const[]){"micro_batch=4", "zero_stage=0", "offload_layers<=9"};
    request.constraint_count = 3;
    request.reserve = 0;
    for (int gib = 40; gib >= 14; gib--) {
        hardware->memory.value = gib * 1073741824.0;
        every e = {.model = &model, .hardware = hardware};
        dw_layout layout;
        dw_layout_default(&layout);
        layout.global_batch = 8;
        layout.micro_batch = 4;
        layout.seq_len = 4096;
        layout.sequence_parallel = 0;
        for (layout.offload_layers = 0; layout.offload_layers <= 9; layout.offload_layers++)
            for (layout.offload_optimizer = 0; layout.offload_optimizer <= 1;
                 layout.offload_optimizer++) {
                for (int how = 0; how <= DW_RECOMPUTE_FULL; how++) {
                    layout.recompute = (dw_recompute)how;
                    layout.recompute_layers = 0;
                    consider(&e, &layout);
                    for (int k = 1; how == DW_RECOMPUTE_FULL && k <= 12; k++) {
                        layout.recompute_layers = k;
                        consider(&e, &layout);
                    }
                }
            }
        dw_autoplan *plan = plan_of(&request);
        assert_int_equal(plan->prediction.fits, e.fits);
        if (e.fits) {
            assert_true(plan->prediction.seconds <= e.seconds * 1.005);
            assert_true(plan->prediction.seconds >= e.seconds * (1 - 1e-12));
            assert_true(plan->layout.offload_layers <= 9);
        }
        fitting += e.fits;
        mixed += e.layout.offload_layers > 0 && e.layout.recompute == DW_RECOMPUTE_FULL;
        dw_autoplan_destroy(plan);
    }
    assert_true(fitting >= 10 && mixed >= 1);
    dw_hardware_destroy(hardware);
}

/* The first choice has only measured parts and is the fastest of those; faster plans with unmeasured parts
 * are listed too. */
static void layouts_with_measured_parts_are_preferred(void **unused) {
    (void)unused;
    static const struct {
        const dw_model_sizes *model;
        const char *hardware;
        int batch, unmeasured; /* the fastest of all has parts without a measurement */
    } cases[] = {{&llama3_70b, "h100:64", 256, 1}, {&llama3_8b, "gb200:8", 64, 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_hardware *hardware = hardware_of(cases[at].hardware);
        dw_autoplan_request request = request_of(cases[at].model, hardware, 8192, cases[at].batch);
        dw_autoplan *bold = plan_of(&request);
        request.bold = 0;
        dw_autoplan *plan = plan_of(&request);
        assert_int_equal(*bold->unmeasured != 0, cases[at].unmeasured);
        assert_string_equal(plan->unmeasured, "");
        assert_true(plan->prediction.fits && !plan->layout.offload_optimizer);
        assert_true(plan->layout.schedule <= DW_SCHEDULE_ZB_H2);
        assert_true(plan->prediction.seconds >= bold->prediction.seconds * (1 - 0.005));
        if (cases[at].unmeasured) {
            assert_int_equal(bold->bolder_count, 0);
            assert_true(plan->bolder_count > 0 && plan->bolder[0].loss < 0);
            assert_non_null(strstr(plan->bolder[0].unmeasured, "PCI Express"));
            assert_int_equal(plan->layout.offload_layers, 0);
        }
        dw_autoplan_destroy(plan);
        dw_autoplan_destroy(bold);
        dw_hardware_destroy(hardware);
    }
    /* A layout with unmeasured parts is chosen if it is requested or if no other fits; the plan names both
     * reasons. */
    dw_hardware *hardware = hardware_of("h100:64");
    dw_autoplan_request request = request_of(&llama3_70b, hardware, 8192, 256);
    request.bold = 0;
    request.constraints = (const char *const[]){"offload=all"};
    request.constraint_count = 1;
    dw_autoplan *plan = plan_of(&request);
    assert_true(plan->layout.offload_optimizer && plan->layout.offload_layers > 0);
    assert_non_null(strstr(plan->unmeasured, "optimizer on the host"));
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(hardware);
    hardware = hardware_of("h100:1"); /* 16 bytes for each of 8 billion parameters */
    request = request_of(&llama3_8b, hardware, 8192, 8);
    request.bold = 0;
    plan = plan_of(&request);
    assert_true(plan->prediction.fits && plan->layout.offload_optimizer && *plan->unmeasured);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(hardware);
}

/* ---- the result ------------------------------------------------------------------------------ */

static void published_configurations_are_planned(void **unused) {
    (void)unused;
    dw_hardware *h100s = hardware_of("h100:64");
    dw_autoplan_request request = request_of(&llama3_70b, h100s, 8192, 256);
    request.what_ifs = 1;
    dw_autoplan *plan = plan_of(&request);
    assert_int_equal(plan->prediction.fits, 1);
    assert_true(plan->prediction.bubble_fraction < 0.05);
    assert_true(plan->layout.tp <= 8);
    assert_true(plan->prediction.mfu > 0.35 && plan->prediction.mfu < 0.65);
    assert_true(plan->runner_up_count > 0 && plan->what_if_count > 5);
    for (uint32_t at = 0; at < plan->runner_up_count; at++) {
        assert_true(plan->runners_up[at].loss > -0.005);
        assert_true(plan->runners_up[at].prediction.fits);
        assert_int_equal(dw_layout_check(&llama3_70b, h100s, &plan->runners_up[at].layout), DW_OK);
        if (at) assert_true(plan->runners_up[at].loss >= plan->runners_up[at - 1].loss);
    }
    char *text = NULL;
    assert_int_equal(dw_autoplan_text(plan, 1, &text), DW_OK);
    assert_non_null(strstr(text, "Runners-up"));
    assert_non_null(strstr(text, "What if"));
    dw_text_free(text);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(h100s);
}

/* 8 billion parameters and 128 thousand words on 8 stages: the head costs more than two layers. The search
 * finds the best split into whole layers, the gain is the difference of the heaviest stages, and the split is
 * simulated. */
static void stage_with_the_head_gets_fewer_layers(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("h100:8");
    dw_autoplan_request request = request_of(&llama3_8b, hardware, 4096, 64);
    request.constraints =
        (const char *const[]){"pp=8",           "schedule=1f1b", "micro_batch=1",
                              "recompute=none", "offload=none",  "last_stage_layers=0"};
    request.constraint_count = 6;
    dw_autoplan *even = plan_of(&request);
    request.constraint_count = 5;
    dw_autoplan *plan = plan_of(&request);
    assert_true(even->layout.last_stage_layers == 0 && plan->layout.last_stage_layers > 0);
    double best = HUGE_VAL;
    for (int first = 1; first < 30; first++)
        for (int last = 1; first + last < 32; last++) {
            dw_layout layout = even->layout;
            dw_prediction p;
            layout.first_stage_layers = first;
            layout.last_stage_layers = last;
            if ((32 - first - last) % 6) continue;
            assert_int_equal(dw_predict(&llama3_8b, hardware, &layout, &p), DW_OK);
            if (p.fits) best = fmin(best, p.seconds);
        }
    assert_true(plan->prediction.seconds <= best * 1.005);
    double heaviest[2] = {0, 0};
    for (int stage = 0; stage < 8; stage++)
        for (int at = 0; at < 2; at++) {
            dw_stage_cost cost;
            dw_predict_stage(&llama3_8b, hardware, at ? &plan->layout : &even->layout, stage, 0,
                             &cost);
            heaviest[at] = fmax(heaviest[at], cost.forward + cost.backward + cost.backward_weight);
        }
    double gain = even->prediction.seconds / plan->prediction.seconds;
    assert_true(gain > 1.1 && fabs(gain / (heaviest[0] / heaviest[1]) - 1) < 0.08);
    dw_simulation *simulation = NULL;
    dw_simulation_figures simulated;
    assert_int_equal(dw_simulate(&llama3_8b, hardware, &plan->layout, &simulation), DW_OK);
    dw_simulation_figures_of(simulation, &simulated);
    assert_true(fabs(simulated.seconds / plan->prediction.seconds - 1) < 0.02);
    dw_simulation_destroy(simulation);
    dw_autoplan_destroy(even);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(hardware);
}

/* Llama-3 70B on 64 H100s in a pipeline: planned and simulated with a bubble below 5%, within the memory. */
static void planned_pipeline_is_simulated(void **unused) {
    (void)unused;
    dw_hardware *h100s = hardware_of("h100:64");
    dw_autoplan_request request = request_of(&llama3_70b, h100s, 8192, 256);
    request.constraints = (const char *const[]){"pp>=4", "offload=none"};
    request.constraint_count = 2;
    dw_autoplan *plan = plan_of(&request);
    dw_simulation *simulation = NULL;
    dw_simulation_figures simulated;
    assert_int_equal(plan->prediction.fits, 1);
    assert_true(plan->prediction.bubble_fraction < 0.05);
    assert_int_equal(dw_simulate(&llama3_70b, h100s, &plan->layout, &simulation), DW_OK);
    dw_simulation_figures_of(simulation, &simulated);
    assert_true(simulated.fits && simulated.bubble_fraction < 0.05);
    assert_true(fabs(simulated.bubble_fraction - plan->prediction.bubble_fraction) < 0.01);
    assert_true(fabs(simulated.seconds / plan->prediction.seconds - 1) < 0.02);
    dw_simulation_destroy(simulation);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(h100s);
}

/* An idle machine of two cores needs one second; the limit is for a busy one. */
static void largest_search_takes_seconds(void **unused) {
    (void)unused;
    if (!LARGE) skip();
    dw_hardware *h100s = hardware_of("h100:16384"), *fewer = hardware_of("h100:2048");
    dw_autoplan_request dense = request_of(&llama3_405b, h100s, 8192, 2048);
    dw_autoplan_request mixture = request_of(&deepseek_v3, fewer, 4096, 15360);
    dw_autoplan *plan = plan_of(&dense);
    assert_true(plan->prediction.fits && plan->layout.tp <= 8);
    assert_true(plan->prediction.mfu > 0.35 && plan->prediction.mfu < 0.65);
    assert_true(plan->statistics.seconds < 20);
    dw_autoplan_destroy(plan);
    plan = plan_of(&mixture);
    assert_true(plan->prediction.fits && plan->layout.ep >= 8);
    assert_true(plan->statistics.seconds < 40);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(h100s);
    dw_hardware_destroy(fewer);
}

static char *json_of(const dw_autoplan *plan) {
    char *text = NULL;
    if (dw_autoplan_json(plan, &text) != DW_OK) fail_msg("%s", dw_last_error());
    return text;
}

static void threads_do_not_change_the_plan(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("h200:32");
    dw_autoplan_request request = request_of(&llama3_70b, hardware, 4096, 96);
    request.what_ifs = 1;
    char *texts[3];
    int before = dw_get_threads();
    static const int threads[3] = {1, 2, 5};
    for (int at = 0; at < 3; at++) {
        assert_int_equal(dw_set_threads(threads[at]), DW_OK);
        dw_autoplan *plan = plan_of(&request);
        texts[at] = json_of(plan);
        dw_autoplan_destroy(plan);
    }
    assert_string_equal(texts[0], texts[1]);
    assert_string_equal(texts[0], texts[2]);
    for (int at = 0; at < 3; at++) dw_text_free(texts[at]);
    assert_int_equal(dw_set_threads(before), DW_OK);
    dw_hardware_destroy(hardware);
}

static void constraints_are_kept(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("h100:64");
    static const char *const constraints[] = {
        "tp=8",          "pp<=4",          "pp>=2",          "zero_stage=1",
        "schedule=1f1b", "micro_batch<=2", "recompute=full", "framework=megatron",
        "cuda_graphs=1"};
    dw_autoplan_request request = request_of(&llama3_70b, hardware, 4096, 128);
    request.constraints = constraints;
    request.constraint_count = DW_COUNT(constraints);
    dw_autoplan *plan = plan_of(&request);
    assert_int_equal(plan->prediction.fits, 1);
    assert_int_equal(plan->layout.tp, 8);
    assert_true(plan->layout.pp >= 2 && plan->layout.pp <= 4);
    assert_int_equal(plan->layout.zero_stage, 1);
    assert_int_equal(plan->layout.schedule, DW_SCHEDULE_1F1B);
    assert_true(plan->layout.micro_batch <= 2);
    assert_int_equal(plan->layout.recompute, DW_RECOMPUTE_FULL);
    assert_int_equal(plan->layout.recompute_layers, 0);
    assert_int_equal(plan->layout.framework, DW_FRAMEWORK_MEGATRON);
    assert_int_equal(plan->layout.cuda_graphs, 1);
    /* A fixed choice costs time and never saves it, and so does memory that must stay free. */
    request.constraint_count = 0;
    dw_autoplan *freely = plan_of(&request);
    assert_true(freely->prediction.seconds <= plan->prediction.seconds * 1.005);
    request.reserve = 40e9;
    dw_autoplan *narrow = plan_of(&request);
    assert_true(narrow->prediction.seconds * 1.005 >= freely->prediction.seconds);
    assert_true(narrow->prediction.used -
                    (narrow->prediction.reserved - narrow->prediction.allocated) <=
                hardware->memory.value - 40e9);
    dw_autoplan_destroy(narrow);
    dw_autoplan_destroy(freely);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(hardware);
}

/* Fixes every field of a layout by its name; the plan then has the value. */
static void every_field_can_be_fixed_by_name(void **unused) {
    (void)unused;
    static const char *const one_by_one[] = {
        "tp=4",
        "cp=2",
        "pp=4",
        "dp=8",
        "ep=8",
        "etp=1",
        "attention_tp=1",
        "virtual_stages=2",
        "sequence_parallel=0",
        "zero_stage=3",
        "shard=8",
        "reshard=1",
        "micro_batch=2",
        "schedule=zb-h1",
        "recompute=full",
        "recompute_layers=2",
        "framework=megatron",
        "unfused_attention=1",
        "overlap_tensor=0",
        "overlap_data=0",
        "overlap_expert=1",
        "cuda_graphs=1",
        "compiled=1",
        "dispatch_once=1",
        "fused_loss=1",
        "dropout=1",
        "expert_load=125",
        "padded_experts=1",
        "offload_layers=3",
        "offload_optimizer=1",
        "parameter_bytes=2",
        "gradient_bytes=4",
        "optimizer_bytes=12",
    };
    static const dw_model_sizes mixture = {.layers = 16,
                                           .hidden = 2048,
                                           .heads = 16,
                                           .kv_heads = 8,
                                           .head_dim = 128,
                                           .ffn = 8192,
                                           .gated = 1,
                                           .vocabulary = 32000,
                                           .experts = 16,
                                           .top_k = 2,
                                           .expert_ffn = 4096,
                                           .moe_every = 1};
    dw_hardware *hardware = hardware_of("h100:64");
    dw_autoplan_request request = request_of(&mixture, hardware, 4096, 256);
    size_t fields = 0;
    for (size_t at = 0; at < DW_COUNT(one_by_one); at++) {
        request.constraints = &one_by_one[at];
        request.constraint_count = 1;
        dw_autoplan *plan = plan_of(&request);
        size_t length = strcspn(one_by_one[at], "=");
        const dw__field *field = dw__field_named(dw__layout_fields, one_by_one[at], length);
        assert_non_null(field);
        int value = dw__field_get(&plan->layout, field);
        const char *name = dw__field_value_name(field->kind, value),
                   *asked = one_by_one[at] + length + 1;
        if (name ? strcmp(name, asked) != 0 : value != atoi(asked))
            fail_msg("\"%s\": the plan has %d", one_by_one[at], value);
        assert_int_equal(plan->prediction.fits, 1);
        assert_int_equal(dw_layout_check(&mixture, hardware, &plan->layout), DW_OK);
        fields++;
        dw_autoplan_destroy(plan);
    }
    /* Checks that no field is missing. gpus, global_batch and seq_len belong to the request, precision is
     * separate, and the stages' layers are not integers. */
    assert_int_equal(fields + 3 + 1 + 2, dw__layout_fields.count);
    static const struct {
        const char *word;
        int layers, optimizer;
    } offloads[] = {{"offload=none", 0, 0},
                    {"offload=activations", 1, 0},
                    {"offload=optimizer", 0, 1},
                    {"offload=all", 1, 1}};
    for (size_t at = 0; at < DW_COUNT(offloads); at++) {
        request.constraints = &offloads[at].word;
        dw_autoplan *plan = plan_of(&request);
        assert_int_equal(plan->layout.offload_layers > 0, offloads[at].layers);
        assert_int_equal(plan->layout.offload_optimizer, offloads[at].optimizer);
        assert_int_equal(plan->prediction.host_activations > 0, offloads[at].layers);
        assert_int_equal(plan->prediction.host_optimizer > 0, offloads[at].optimizer);
        dw_autoplan_destroy(plan);
    }
    static const char *const ends[] = {"pp=4", "first_stage_layers=3", "last_stage_layers=3"};
    request.constraints = ends;
    request.constraint_count = 3;
    dw_autoplan *plan = plan_of(&request);
    assert_true(plan->layout.first_stage_layers == 3 && plan->layout.last_stage_layers == 3);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(hardware);
}

/* The host's memory can be the limit too. */
static void host_memory_can_be_too_small(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("h100:8"), *enough = NULL;
    static const char *const constraints[] = {"offload=optimizer"};
    hardware->host_memory.value = 20e9;
    dw_autoplan_request request = request_of(&llama3_70b, hardware, 4096, 1024);
    request.constraints = constraints;
    request.constraint_count = 1;
    dw_autoplan *plan = plan_of(&request);
    assert_int_equal(plan->prediction.fits, 0);
    if (!strstr(plan->tightest, "the host's memory: ")) fail_msg("%s", plan->tightest);
    assert_true(plan->gpus_needed > 8);
    assert_int_equal(dw_hardware_with_gpus(hardware, plan->gpus_needed, &enough), DW_OK);
    request.hardware = enough;
    dw_autoplan *more = plan_of(&request);
    assert_int_equal(more->prediction.fits, 1);
    assert_true(more->prediction.host_optimizer > 0 && more->prediction.host_optimizer <= 20e9);
    dw_autoplan_destroy(more);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(enough);
    dw_hardware_destroy(hardware);
}

static void requests_that_do_not_fit_get_an_explanation(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("h100:16"), *enough = NULL;
    dw_autoplan_request request = request_of(&llama3_405b, hardware, 8192, 2048);
    dw_autoplan *plan = plan_of(&request);
    assert_int_equal(plan->prediction.fits, 0);
    assert_non_null(strstr(plan->tightest, "optimizer: "));
    assert_true(plan->gpus_needed > 16 && plan->gpus_needed % 8 == 0);
    assert_int_equal(dw_hardware_with_gpus(hardware, plan->gpus_needed, &enough), DW_OK);
    request.hardware = enough;
    dw_autoplan *more = plan_of(&request);
    assert_int_equal(more->prediction.fits, 1);
    char *text = json_of(plan);
    dw_autoplan *back = NULL;
    assert_int_equal(dw_autoplan_parse(text, strlen(text), &back), DW_OK);
    assert_string_equal(back->tightest, plan->tightest);
    assert_int_equal(back->gpus_needed, plan->gpus_needed);
    dw_text_free(text);
    dw_autoplan_destroy(back);
    dw_autoplan_destroy(more);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(enough);
    dw_hardware_destroy(hardware);
}

static void refused(dw_autoplan_request request, const char *constraint, dw_status expected,
                    const char *says) {
    dw_autoplan *plan = NULL;
    const char *const constraints[] = {"tp=8", constraint};
    request.constraints = constraints;
    request.constraint_count = constraint ? 2 : 0;
    dw_status status = dw_autoplan_search(&request, &plan);
    if (status != expected || !strstr(dw_last_error(), says))
        fail_msg("status %d, \"%s\"; expected \"%s\"", (int)status, dw_last_error(), says);
    assert_null(plan);
}

/* Requests that a framework or the GPUs cannot satisfy, and contradictory requests. */
static void contradictory_requests_are_rejected(void **unused) {
    (void)unused;
    static const struct {
        const char *one, *other, *says;
    } cases[] = {
        {"framework=megatron", "zero_stage=3",
         "framework megatron does not support this zero_stage"},
        {"framework=nanotron", "schedule=zb-v",
         "framework nanotron does not support this schedule"},
        {"framework=torchtitan", "offload=optimizer",
         "cannot keep the optimizer in the host's memory"},
        {"framework=jax", "offload_layers>=2", "cannot keep activations in the host's memory"},
        {"offload=activations", "offload_layers=0", "contradicts"},
        {"offload=none", "offload_optimizer=1", "contradicts"},
        {"tp=8", "dp=3", "no layout of 64 GPUs"},
        {"tp=2", "attention_tp=4", "no layout of 64 GPUs"},
        {"cp=64", "pp=2", "no layout of 64 GPUs"},
        {"pp=8", "virtual_stages=64", "no schedule and sharding satisfy \"virtual_stages=64\""},
    };
    dw_hardware *hardware = hardware_of("h100:64");
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        const char *const constraints[] = {cases[at].one, cases[at].other};
        dw_autoplan_request request = request_of(&llama3_70b, hardware, 4096, 256);
        dw_autoplan *plan = NULL;
        request.constraints = constraints;
        request.constraint_count = 2;
        dw_status status = dw_autoplan_search(&request, &plan);
        if (status != DW_INVALID_ARGUMENT || !strstr(dw_last_error(), cases[at].says))
            fail_msg("%s %s: %d \"%s\"", cases[at].one, cases[at].other, (int)status,
                     dw_last_error());
        dw_autoplan_destroy(plan);
    }
    dw_hardware_destroy(hardware);
}

static void invalid_requests_are_rejected(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("h100:16384");
    dw_autoplan_request good = request_of(&llama3_405b, hardware, 8192, 2048), request = good;
    refused(good, "tp<=4", DW_INVALID_ARGUMENT, "\"tp<=4\" contradicts");
    refused(good, "tp", DW_INVALID_ARGUMENT, "\"tp\" has no field or no value");
    refused(good, "pp=x", DW_INVALID_ARGUMENT, "\"pp=x\" has a value that is not a number");
    refused(good, "pp=3", DW_INVALID_ARGUMENT, "\"pp=3\"");
    refused(good, "ep=8", DW_INVALID_ARGUMENT, "\"ep=8\"");
    refused(good, "width=3", DW_INVALID_ARGUMENT, "\"width=3\" names no field");
    refused(good, "recompute=some", DW_INVALID_ARGUMENT, "none, selective, full");
    refused(good, "recompute<=full", DW_INVALID_ARGUMENT, "a range");
    refused(good, "gpus=8", DW_INVALID_ARGUMENT, "the request itself");
    refused(good, "offload=some", DW_INVALID_ARGUMENT, "none, activations, optimizer, all");
    refused(good, "offload<=all", DW_INVALID_ARGUMENT, "names no field");
    refused(good, "cuda_graphs=2", DW_INVALID_ARGUMENT, "other than 0 and 1");
    request.seq_len = 8191;
    request.global_batch = 7;
    refused(request, NULL, DW_INVALID_ARGUMENT, "a batch of 7 sequences");
    refused(request, NULL, DW_INVALID_ARGUMENT, "the next larger batch that divides is 8");
    request = good;
    request.global_batch = 0;
    refused(request, NULL, DW_INVALID_ARGUMENT, "global_batch is 0");
    request = good;
    request.seq_len = (int64_t)1 << 40;
    refused(request, NULL, DW_INVALID_ARGUMENT, "seq_len is 1099511627776");
    request = good;
    request.precision = DW_SCHEME_NVFP4;
    refused(request, NULL, DW_UNSUPPORTED, "nvfp4");
    request = good;
    request.reserve = 1e12;
    refused(request, NULL, DW_INVALID_ARGUMENT, "reserve is 1e+12");
    dw_hardware none = *hardware;
    none.gpus = 0;
    request = good;
    request.hardware = &none;
    refused(request, NULL, DW_INVALID_ARGUMENT, "has 0 GPUs");
    none.gpus = 10000000;
    refused(request, NULL, DW_INVALID_ARGUMENT, "has 10000000 GPUs");
    request = good;
    request.struct_size = 3;
    refused(request, NULL, DW_INVALID_ARGUMENT, "dw_autoplan_request.struct_size is 3");
    dw_hardware_destroy(hardware);
}

/* ---- files ----------------------------------------------------------------------------------- */

static void plan_files_round_trip_exactly(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("b200:64");
    dw_autoplan_request request = request_of(&deepseek_v3, hardware, 4096, 1024);
    request.precision = DW_SCHEME_COUNT;
    request.what_ifs = 1;
    dw_autoplan *plan = plan_of(&request), *back = NULL;
    assert_int_equal(dw_autoplan_bind(plan), DW_OK);
    char *text = json_of(plan);
    if (dw_autoplan_parse(text, strlen(text), &back) != DW_OK) fail_msg("%s", dw_last_error());
    char *again = json_of(back);
    assert_string_equal(text, again);
    assert_memory_equal(&plan->layout, &back->layout, sizeof plan->layout);
    assert_memory_equal(&plan->model, &back->model, sizeof plan->model);
    assert_true(plan->prediction.seconds == back->prediction.seconds);
    assert_int_equal(plan->runner_up_count, back->runner_up_count);
    assert_string_equal(back->model_name, "tested");
    /* A plan read from its file and predicted again has the search's values. */
    dw_prediction p;
    assert_int_equal(dw_predict(&back->model, back->hardware, &back->layout, &p), DW_OK);
    assert_true(p.seconds == plan->prediction.seconds);
    dw_text_free(text);
    dw_text_free(again);
    dw_autoplan_destroy(plan);
    dw_autoplan_destroy(back);
    dw_hardware_destroy(hardware);
}

#define MODEL                                                                                      \
    "\"model\": {\"layers\": 4, \"hidden\": 256, \"heads\": 4, \"kv_heads\": 4, \"head_dim\": "    \
    "64, "                                                                                         \
    "\"ffn\": 1024, \"vocabulary\": 1000}"
#define HARDWARE "\"hardware\": {\"profile\": \"h100\", \"gpus\": 4}"
#define LAYOUT                                                                                     \
    "\"layout\": {\"gpus\": 4, \"tp\": 2, \"dp\": 2, \"global_batch\": 4, \"seq_len\": 128}"

static const dw_autoplan_kernel *kernel_of(const dw_autoplan *plan, const char *operation) {
    for (uint32_t at = 0; at < plan->kernel_count; at++)
        if (strcmp(plan->kernels[at].operation, operation) == 0) return &plan->kernels[at];
    fail_msg("the plan has no kernel for %s", operation);
    return NULL;
}

/* Deepwell's kernels are listed if they exist, with tiles and measurements; otherwise the library's, without a
 * measurement. */
static void plans_name_their_kernels(void **unused) {
    (void)unused;
    static const struct {
        const char *hardware, *framework, *kernel;
        int measured;
    } cases[] = {{"h100:64", "framework=deepwell", "deepwell, sm_90a: tiles of ", 1},
                 {"h100:64", "framework=torchtitan", "FlashAttention-2", 1},
                 {"h100:64", "framework=megatron", "cuDNN", 1},
                 {"b200:64", "framework=deepwell", "no kernel registered for sm_100a", 0},
                 {"a100-80:64", "framework=deepwell", "no kernel registered for sm_80", 0}};
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_hardware *hardware = hardware_of(cases[at].hardware);
        dw_autoplan_request request = request_of(&llama3_70b, hardware, 8192, 64);
        const char *const constraints[] = {cases[at].framework};
        request.constraints = constraints;
        request.constraint_count = 1;
        dw_autoplan *plan = plan_of(&request);
        assert_int_equal(plan->kernel_count, 0);
        assert_int_equal(dw_autoplan_bind(plan), DW_OK);
        for (int backward = 0; backward < 2; backward++) {
            const dw_autoplan_kernel *kernel =
                kernel_of(plan, backward ? "attention backward" : "attention forward");
            if (!strstr(kernel->kernel, cases[at].kernel))
                fail_msg("%s on %s: \"%s\"", cases[at].framework, cases[at].hardware,
                         kernel->kernel);
            assert_int_equal(kernel->measured > 0, cases[at].measured);
            assert_true(kernel->measured < hardware->rate[DW_RATE_BF16].value);
            assert_true(kernel->predicted > 0 && kernel->source[0]);
        }
        assert_non_null(strstr(kernel_of(plan, "MLP up")->kernel, "none registered"));
        /* Kernels that no hardware has run are reported as such. */
        const char *const unproven = "proven on the emulator, not run on hardware";
        const int blackwell = strncmp(cases[at].hardware, "b200", 4) == 0;
        assert_int_equal(strstr(kernel_of(plan, "MLP up")->kernel, unproven) != NULL, blackwell);
        assert_int_equal(strstr(kernel_of(plan, "attention forward")->kernel, unproven) != NULL,
                         blackwell);
        assert_null(strstr(kernel_of(plan, "attention backward")->kernel, unproven));
        assert_true(kernel_of(plan, "MLP up")->predicted < hardware->rate[DW_RATE_BF16].value);
        char *text = NULL;
        assert_int_equal(dw_autoplan_text(plan, 1, &text), DW_OK);
        assert_non_null(strstr(text, cases[at].kernel));
        dw_text_free(text);
        dw_autoplan_destroy(plan);
        dw_hardware_destroy(hardware);
    }
}

/* Tensor, context, data and pipeline ranks from the inside out, experts across the first three; domains are
 * filled equally. */
static void ranks_are_placed_on_the_network(void **unused) {
    (void)unused;
    static const struct {
        const char *hardware;
        dw_layout layout;
        const char *says;
    } cases[] = {
        {"h100:64",
         {.tp = 8, .cp = 1, .pp = 2, .dp = 4},
         "8 tensor within NVLink, 4 data across the network, 2 pipeline across the network; tensor "
         "innermost, "
         "8 GPUs of each domain of 8, 8 rails of each node"},
        {"h100:16",
         {.tp = 2, .cp = 2, .pp = 1, .dp = 4},
         "2 tensor within NVLink, 2 context within NVLink, 4 data across NVLink and network; "
         "tensor"},
        {"h100:16", {.tp = 16, .cp = 1, .pp = 1, .dp = 1}, "16 tensor across NVLink and network;"},
        {"gb200:72",
         {.tp = 8, .cp = 1, .pp = 1, .dp = 9},
         "8 tensor within NVLink, 9 data within NVLink; tensor innermost\n"},
        {"gb200:256",
         {.tp = 16, .cp = 1, .pp = 4, .dp = 4},
         "16 tensor within NVLink, 4 data within NVLink, 4 pipeline across the network; tensor "
         "innermost, "
         "64 GPUs of each domain of 72"},
        {"gb200:288", /* 16 of 72: some lie in two racks */
         {.tp = 16, .cp = 1, .pp = 2, .dp = 9},
         "16 tensor across NVLink and network,"},
    };
    for (size_t at = 0; at < DW_COUNT(cases); at++) {
        dw_hardware *hardware = hardware_of(cases[at].hardware);
        dw_autoplan *plan = NULL;
        dw_layout layout = cases[at].layout;
        char *text = NULL;
        layout.gpus = hardware->gpus;
        layout.ep = layout.virtual_stages = layout.micro_batch = layout.sequence_parallel = 1;
        layout.global_batch = 36;
        layout.seq_len = 128;
        layout.precision = DW_SCHEME_BF16;
        static const dw_model_sizes small = {.layers = 4,
                                             .hidden = 2048,
                                             .heads = 16,
                                             .kv_heads = 16,
                                             .head_dim = 128,
                                             .ffn = 8192,
                                             .vocabulary = 32000};
        if (dw_autoplan_of("small", &small, hardware, &layout, &plan) != DW_OK)
            fail_msg("%s", dw_last_error());
        assert_int_equal(dw_autoplan_text(plan, 0, &text), DW_OK);
        if (!strstr(text, cases[at].says)) fail_msg("\"%s\" is not in\n%s", cases[at].says, text);
        dw_text_free(text);
        dw_autoplan_destroy(plan);
        dw_hardware_destroy(hardware);
    }
    /* Experts across rails, and sizes that divide a rack. */
    dw_hardware *rack = hardware_of("gb200:288");
    dw_autoplan_request request = request_of(&deepseek_v3, rack, 4096, 2304);
    request.precision = DW_SCHEME_MXFP8;
    dw_autoplan *plan = plan_of(&request);
    assert_int_equal(plan->prediction.fits, 1);
    assert_int_equal(72 % plan->layout.tp, 0);
    assert_true(plan->layout.ep <= 72);
    dw_autoplan_destroy(plan);
    dw_hardware_destroy(rack);
}

static void bad_file(const char *text, dw_status expected, const char *says) {
    dw_autoplan *plan = NULL;
    dw_status status = dw_autoplan_parse(text, strlen(text), &plan);
    if (status != expected || !strstr(dw_last_error(), says))
        fail_msg("status %d, \"%s\"; expected \"%s\"", (int)status, dw_last_error(), says);
    assert_null(plan);
}

static void malformed_plan_files_are_rejected(void **unused) {
    (void)unused;
    static const char good[] = "{\"version\": 1, " MODEL ", " HARDWARE ", " LAYOUT "}";
    dw_autoplan *plan = NULL;
    if (dw_autoplan_parse(good, strlen(good), &plan) != DW_OK) fail_msg("%s", dw_last_error());
    assert_true(plan->prediction.seconds > 0 && plan->prediction.fits);
    dw_autoplan_destroy(plan);
    bad_file("{", DW_PARSE, "plan");
    bad_file("[]", DW_PARSE, "an object");
    bad_file("{\"version\": 9, " MODEL ", " HARDWARE ", " LAYOUT "}", DW_UNSUPPORTED,
             "version is 9");
    bad_file("{" MODEL ", " HARDWARE ", " LAYOUT "}", DW_PARSE, "version");
    bad_file("{\"version\": 1, " HARDWARE ", " LAYOUT "}", DW_PARSE, "model");
    bad_file("{\"version\": 1, " MODEL ", " LAYOUT "}", DW_PARSE, "hardware");
    bad_file("{\"version\": 1, " MODEL ", " HARDWARE "}", DW_PARSE, "layout");
    bad_file("{\"version\": 1, \"color\": 2}", DW_PARSE, "\"color\"");
    bad_file("{\"version\": 1, " MODEL ", " HARDWARE ", \"layout\": {\"gpus\": 4, \"tp\": 3}}",
             DW_INVALID_ARGUMENT, "tp 3");
    bad_file("{\"version\": 1, " MODEL ", " HARDWARE ", \"layout\": {\"tp\": \"two\"}}", DW_PARSE,
             "layout: tp");
    bad_file("{\"version\": 1, " MODEL ", " HARDWARE
             ", \"layout\": {\"gpus\": 1, \"schedule\": \"round\"}}",
             DW_PARSE, "schedule is \"round\"");
    bad_file("{\"version\": 1, " MODEL ", " HARDWARE ", \"layout\": {\"gpus\": 1}}",
             DW_INVALID_ARGUMENT, "the layout has 1 GPUs and the hardware 4");
    bad_file("{\"version\": 1, " MODEL ", " HARDWARE ", " LAYOUT ", \"prediction\": {}}", DW_PARSE,
             "prediction: seconds is missing");
}

/* ---- memory that runs out -------------------------------------------------------------------- */

static void every_allocation_can_fail(void **unused) {
    (void)unused;
    dw_hardware *hardware = hardware_of("h100:8");
    static const dw_model_sizes small = {.layers = 4,
                                         .hidden = 512,
                                         .heads = 8,
                                         .kv_heads = 8,
                                         .head_dim = 64,
                                         .ffn = 2048,
                                         .vocabulary = 5000};
    dw_autoplan_request request = request_of(&small, hardware, 512, 16);
    request.what_ifs = 1;
    int failures = 0;
    for (int64_t after = 0;; after += 1 + after / 16) {
        int64_t live = dw__memory_live();
        dw_autoplan *plan = NULL, *back = NULL;
        char *text = NULL;
        dw__memory_fail_after(after);
        dw_status status = dw_autoplan_search(&request, &plan);
        if (status == DW_OK) status = dw_autoplan_bind(plan);
        if (status == DW_OK) status = dw_autoplan_json(plan, &text);
        if (status == DW_OK) status = dw_autoplan_parse(text, strlen(text), &back);
        dw__memory_fail_after(-1);
        dw_text_free(text);
        dw_autoplan_destroy(plan);
        dw_autoplan_destroy(back);
        assert_int_equal(dw__memory_live(), live);
        if (status == DW_OK) break;
        assert_int_equal(status, DW_OUT_OF_MEMORY);
        failures++;
    }
    assert_true(failures > 20);
    dw_hardware_destroy(hardware);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(search_finds_the_best_of_all_layouts),
        cmocka_unit_test(some_layers_are_recomputed_and_others_offloaded),
        cmocka_unit_test(layouts_with_measured_parts_are_preferred),
        cmocka_unit_test(published_configurations_are_planned),
        cmocka_unit_test(stage_with_the_head_gets_fewer_layers),
        cmocka_unit_test(planned_pipeline_is_simulated),
        cmocka_unit_test(largest_search_takes_seconds),
        cmocka_unit_test(threads_do_not_change_the_plan),
        cmocka_unit_test(constraints_are_kept),
        cmocka_unit_test(every_field_can_be_fixed_by_name),
        cmocka_unit_test(host_memory_can_be_too_small),
        cmocka_unit_test(requests_that_do_not_fit_get_an_explanation),
        cmocka_unit_test(contradictory_requests_are_rejected),
        cmocka_unit_test(invalid_requests_are_rejected),
        cmocka_unit_test(plan_files_round_trip_exactly),
        cmocka_unit_test(plans_name_their_kernels),
        cmocka_unit_test(ranks_are_placed_on_the_network),
        cmocka_unit_test(malformed_plan_files_are_rejected),
        cmocka_unit_test(every_allocation_can_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
