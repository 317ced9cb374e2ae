/* Tests the schedules against their own rules and closed forms, and simulated steps against properties that hold for
 * all of them. */
#include "deepwell/graph.h"
#include "plan/planner_internal.h"
#include "planner_examples.h"
#include "simulate/simulate_internal.h"
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static int chunks_of(dw_pipeline_schedule schedule, int stages) {
    if (stages == 1) return 1;
    return schedule == DW_SCHEDULE_INTERLEAVED ? 3 : 1;
}

/* Equal stages: the given times for forward, backward of inputs and of weights; one unit of memory per chunk. */
static dw_simulation *play(dw_pipeline_schedule schedule, int stages, int chunks, int micro_batches,
                           double forward, double input, double weight, double send) {
    dw_simulation *simulation = NULL;
    assert_int_equal(dw__simulation_begin(schedule, stages, chunks, micro_batches, &simulation),
                     DW_OK);
    for (int rank = 0; rank < stages; rank++) {
        simulation->costs.ranks[rank] = (dw__rank_cost){.send = send, .constant_bytes = 100};
        for (int chunk = 0; chunk < simulation->schedule.chunks; chunk++) {
            double part = schedule == DW_SCHEDULE_DUALPIPE ? 1 : simulation->schedule.chunks;
            simulation->costs.chunks[rank * simulation->schedule.chunks + chunk] =
                (dw__chunk_cost){.forward = forward / part,
                                 .input = input / part,
                                 .weight = weight / part,
                                 .kept_bytes = 1 / part};
        }
    }
    assert_int_equal(dw__simulate_events(simulation), DW_OK);
    return simulation;
}

static const int stage_counts[] = {1, 2, 3, 4, 5, 8, 12};

static void every_operation_once(void **state) {
    (void)state;
    for (int s = 0; s < DW_SCHEDULES; s++) {
        for (size_t p = 0; p < DW_COUNT(stage_counts); p++) {
            int stages = stage_counts[p];
            if (s == DW_SCHEDULE_DUALPIPE && stages > 1 && stages % 2) continue;
            for (int count = 1; count < 30; count += count < 10 ? 1 : 5) {
                dw__schedule schedule;
                assert_int_equal(dw__schedule_create((dw_pipeline_schedule)s, stages,
                                                     chunks_of((dw_pipeline_schedule)s, stages),
                                                     count, &schedule),
                                 DW_OK);
                size_t slots = (size_t)count * (size_t)schedule.chunks;
                for (int rank = 0; rank < stages; rank++) {
                    int *seen = calloc(slots * 4, sizeof *seen);
                    assert_non_null(seen);
                    for (size_t at = 0; at < schedule.ranks[rank].count; at++) {
                        const dw__operation *o = &schedule.ranks[rank].items[at];
                        assert_in_range(o->micro_batch, 0, count - 1);
                        assert_in_range(o->chunk, 0, schedule.chunks - 1);
                        int *mine = seen + 4 * (o->micro_batch * schedule.chunks + o->chunk);
                        /* Forward comes before backward, and backward of inputs before backward of weights. */
                        if (o->kind != DW_EVENT_FORWARD) assert_int_equal(mine[0], 1);
                        if (o->kind == DW_EVENT_BACKWARD_WEIGHT) assert_int_equal(mine[2], 1);
                        mine[o->kind]++;
                    }
                    for (size_t at = 0; at < slots; at++) {
                        int there = 1;
                        if (schedule.schedule == DW_SCHEDULE_DUALPIPE)
                            there = (int)(at % 2) == (int)(at / 2 % 2);
                        assert_int_equal(seen[4 * at], there);
                        assert_int_equal(seen[4 * at + 1], there && !schedule.split);
                        assert_int_equal(seen[4 * at + 2], there && schedule.split);
                        assert_int_equal(seen[4 * at + 3], there && schedule.split);
                    }
                    free(seen);
                }
                dw__schedule_free(&schedule);
            }
        }
    }
}

/* Checks that no event begins before its dependencies (looked up in a table of ends), and that a stream runs
 * one event at a time. */
static void check_dependencies(const dw_simulation *simulation, double send) {
    const dw__schedule *schedule = &simulation->schedule;
    size_t count = simulation->events.count, positions = (size_t)dw__schedule_positions(schedule);
    size_t slots = (size_t)schedule->micro_batches * positions;
    double *end = calloc(slots * 3, sizeof *end), *start = calloc(slots * 3, sizeof *start);
    assert_non_null(end);
    assert_non_null(start);
    for (size_t at = 0; at < count; at++) {
        const dw_event *e = &simulation->events.items[at];
        assert_true(e->start >= 0 && e->end >= e->start);
        if (at && e[-1].rank == e->rank && e[-1].stream == e->stream)
            assert_true(e->start >= e[-1].end);
        if (e->kind > DW_EVENT_BACKWARD_WEIGHT) continue;
        int kind = e->kind == DW_EVENT_FORWARD ? 0 : e->kind == DW_EVENT_BACKWARD_WEIGHT ? 2 : 1;
        int position = dw__schedule_position(schedule, e->rank, e->chunk);
        size_t slot = ((size_t)e->micro_batch * positions + (size_t)position) * 3 + (size_t)kind;
        start[slot] = e->start;
        end[slot] = e->end;
    }
    for (int micro = 0; micro < schedule->micro_batches; micro++) {
        for (int position = 0; position < (int)positions; position++) {
            size_t slot = ((size_t)micro * positions + (size_t)position) * 3;
            int rank, chunk, before = -1;
            dw__schedule_place(schedule, micro, position, &rank, &chunk);
            assert_int_equal(dw__schedule_position(schedule, rank, chunk), position);
            assert_true(end[slot] > 0 && end[slot + 1] > 0);
            assert_true(start[slot + 1] >= end[slot]);
            if (schedule->split) assert_true(start[slot + 2] >= end[slot + 1]);
            if (position == 0) continue;
            dw__schedule_place(schedule, micro, position - 1, &before, &chunk);
            double way = before == rank ? 0 : send;
            assert_true(start[slot] >= end[slot - 3] + way - 1e-9);
            assert_true(start[slot - 3 + 1] >= end[slot + 1] + way - 1e-9);
        }
    }
    free(start);
    free(end);
}

static void check_memory(const dw_simulation *simulation) {
    for (int rank = 0; rank < simulation->schedule.stages; rank++) {
        size_t count;
        const dw_memory_point *points = dw_simulation_memory(simulation, rank, &count);
        double peak = 0;
        assert_true(points[0].time == 0 && points[0].bytes >= 100);
        for (size_t at = 0; at < count; at++) {
            if (at) assert_true(points[at].time > points[at - 1].time);
            assert_true(points[at].bytes >= 100 - 1e-9);
            if (points[at].bytes > peak) peak = points[at].bytes;
        }
        assert_true(points[count - 1].bytes == 100);
        assert_true(simulation->ranks[rank].peak_bytes >= peak);
    }
}

static void dependencies_hold_and_memory_returns(void **state) {
    (void)state;
    srand(7);
    for (int s = 0; s < DW_SCHEDULES; s++) {
        for (size_t p = 0; p < DW_COUNT(stage_counts); p++) {
            int stages = stage_counts[p];
            dw_pipeline_schedule schedule = (dw_pipeline_schedule)s;
            if (s == DW_SCHEDULE_DUALPIPE && stages > 1 && stages % 2) continue;
            for (int count = 1; count < 40; count += count < 10 ? 1 : 7) {
                double cost[4];
                for (int at = 0; at < 4; at++) cost[at] = 0.1 + rand() / (double)RAND_MAX;
                dw_simulation *simulation = play(schedule, stages, chunks_of(schedule, stages),
                                                 count, cost[0], cost[1], cost[2], cost[3]);
                check_dependencies(simulation, cost[3]);
                check_memory(simulation);
                double busy = count * (cost[0] + cost[1] + cost[2]);
                for (int rank = 0; rank < stages; rank++)
                    assert_true(fabs(simulation->ranks[rank].compute - busy) < 1e-9 * busy);
                assert_true(simulation->figures.seconds >= busy * (1 - 1e-12));
                dw_simulation_destroy(simulation);
            }
        }
    }
}

/* Enough micro-batches for the steady state, which each paper's formula describes. */
static int suits(dw_pipeline_schedule schedule, int stages, int count) {
    switch (schedule) {
    case DW_SCHEDULE_INTERLEAVED: return count % stages == 0;
    case DW_SCHEDULE_ZB_H1: return count >= stages;
    case DW_SCHEDULE_ZB_H2:
    case DW_SCHEDULE_ZB_V: return count >= 2 * stages - 1;
    case DW_SCHEDULE_DUALPIPE: return count % 2 == 0 && count >= 2 * stages && stages % 2 == 0;
    default: return 1;
    }
}

static void bubbles_are_the_closed_forms(void **state) {
    (void)state;
    int compared[DW_SCHEDULES] = {0};
    for (int s = 0; s < DW_SCHEDULES; s++) {
        dw_pipeline_schedule schedule = (dw_pipeline_schedule)s;
        for (int stages = 2; stages <= 16; stages++) {
            for (int count = 1; count <= 70; count++) {
                int chunks = schedule == DW_SCHEDULE_INTERLEAVED ? 2 + count % 3 : 1;
                if (!suits(schedule, stages, count)) continue;
                dw_simulation *simulation = play(schedule, stages, chunks, count, 1, 1, 1, 0);
                double closed = dw_pipeline_bubble(schedule, stages, chunks, count);
                if (fabs(simulation->figures.bubble_fraction - closed) > 1e-9)
                    fail_msg("%s, %d stages, %d micro-batches: %.9f played, %.9f in closed form",
                             dw_pipeline_schedule_name(schedule), stages, count,
                             simulation->figures.bubble_fraction, closed);
                compared[s]++;
                dw_simulation_destroy(simulation);
            }
        }
        assert_true(compared[s] > 50);
    }
}

/* The most chunks of micro-batches that a rank holds, in units of a whole rank's: tables of the schedules' papers. */
static double published_in_flight(dw_pipeline_schedule schedule, int stages, int chunks, int rank,
                                  int count) {
    double held;
    switch (schedule) {
    case DW_SCHEDULE_GPIPE: held = count; break;
    case DW_SCHEDULE_ZB_H1:
    case DW_SCHEDULE_ZB_V: held = stages; break;
    case DW_SCHEDULE_ZB_H2: held = 2 * stages - 1; break;
    case DW_SCHEDULE_DUALPIPE: held = stages + 1; break;
    default:
        held = chunks > 1 ? (2.0 * (stages - rank - 1) + (chunks - 1.0) * stages + 1) / chunks
                          : stages - rank;
    }
    return held < count ? held : count;
}

static void micro_batches_in_flight_equal_published_ones(void **state) {
    (void)state;
    for (int s = 0; s < DW_SCHEDULES; s++) {
        dw_pipeline_schedule schedule = (dw_pipeline_schedule)s;
        for (int stages = 2; stages <= 12; stages += 2) {
            int chunks = schedule == DW_SCHEDULE_INTERLEAVED ? 3 : 1, count = 4 * stages;
            dw_simulation *simulation = play(schedule, stages, chunks, count, 1, 1, 1, 0);
            double part = schedule == DW_SCHEDULE_DUALPIPE ? 1 : simulation->schedule.chunks,
                   most = 0;
            for (int rank = 0; rank < stages; rank++) {
                double held = simulation->ranks[rank].peak_in_flight / part;
                double published = published_in_flight(schedule, stages, chunks, rank, count);
                if (held > published + 1e-9)
                    fail_msg("%s, %d stages, rank %d holds %g; %g published",
                             dw_pipeline_schedule_name(schedule), stages, rank, held, published);
                if (held / published > most) most = held / published;
                if (!simulation->schedule.split) assert_true(held == published);
                assert_true(fabs(simulation->ranks[rank].peak_bytes - 100 - held) < 1e-9);
            }
            assert_true(most > 0.999); /* and some rank does hold so much */
            dw_simulation_destroy(simulation);
        }
    }
}

static dw_layout layout_of(int gpus, int tp, int pp, int global_batch) {
    dw_layout layout;
    dw_layout_default(&layout);
    layout.gpus = gpus;
    layout.tp = tp;
    layout.pp = pp;
    layout.dp = gpus / tp / pp;
    layout.zero_stage = 1;
    layout.global_batch = global_batch;
    layout.seq_len = 4096;
    layout.recompute = DW_RECOMPUTE_AUTO;
    layout.framework = DW_FRAMEWORK_MEGATRON;
    return layout;
}

static void steps_agree_with_predictions(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:64");
    for (int s = 0; s < DW_SCHEDULES; s++) {
        dw_layout layout = layout_of(64, 4, 8, 128);
        layout.schedule = (dw_pipeline_schedule)s;
        if (s == DW_SCHEDULE_INTERLEAVED) layout.virtual_stages = 5;
        if (s == DW_SCHEDULE_ZB_V) layout.virtual_stages = 2;
        dw_simulation *simulation = NULL;
        assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_OK);
        dw_simulation_figures f;
        dw_simulation_figures_of(simulation, &f);
        printf("  %-12s step %.3f s played, %.3f predicted; bubble %.2f%%, %.2f%%, %.2f%% closed; "
               "memory %.2f GB, %.2f\n",
               dw_pipeline_schedule_name(layout.schedule), f.seconds, f.prediction.seconds,
               100 * f.bubble_fraction, 100 * f.prediction.bubble_fraction, 100 * f.closed_bubble,
               f.peak_bytes / 1e9, f.prediction.used / 1e9);
        assert_true(fabs(f.seconds / f.prediction.seconds - 1) < 0.01);
        assert_true(f.overlap >= 0 && f.overlap <= 1);
        assert_true(f.mfu > 0.1 && f.mfu < 1);
        assert_true(f.bubble_fraction >= 0 && f.bubble_fraction < f.idle_fraction + 0.05);
        size_t count;
        const dw_memory_point *points = dw_simulation_memory(simulation, f.peak_rank, &count);
        assert_true(points[count - 1].bytes == points[0].bytes);
        dw_simulation_destroy(simulation);
    }
    dw_hardware_destroy(h100);
}

/* Plain data parallelism, with and without sharding, with and without overlap. Without a pipeline the
 * simulated step equals the formula's, except for the optimizer of a stage other than the first. */
static void without_a_pipeline_simulation_equals_prediction(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:64");
    for (int zero = 0; zero <= 3; zero++) {
        for (int overlap = 0; overlap < 2; overlap++) {
            dw_layout layout = layout_of(64, 8, 1, 64);
            layout.zero_stage = zero;
            layout.overlap_data = overlap;
            layout.framework = DW_FRAMEWORK_TORCHTITAN;
            dw_simulation *simulation = NULL;
            assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_OK);
            dw_simulation_figures f;
            dw_simulation_figures_of(simulation, &f);
            /* Without sharding the formula overlaps half of the all-reduce with forward. */
            double part = zero ? 1e-9 : 0.05;
            if (fabs(f.seconds / f.prediction.seconds - 1) > part)
                fail_msg("ZeRO %d, overlap %d: %.6f s played, %.6f predicted", zero, overlap,
                         f.seconds, f.prediction.seconds);
            assert_true(f.bubble_fraction == 0);
            const dw_simulated_rank *rank = dw_simulation_rank(simulation, 0);
            double exposed = rank->exposed[DW_STREAM_DATA] / rank->busy[DW_STREAM_DATA];
            if (overlap ? exposed > 0.9 : exposed < 1 - 1e-9)
                fail_msg("ZeRO %d, overlap %d: %g exposed", zero, overlap, exposed);
            if (!overlap && zero < 3) assert_true(rank->hidden[DW_STREAM_DATA] == 0);
            double needed = f.prediction.memory.parameters + f.prediction.memory.gradients +
                            f.prediction.memory.optimizer + f.prediction.memory.activations +
                            f.prediction.memory.workspace;
            assert_true(f.peak_bytes >= needed && f.peak_bytes <= f.prediction.used);
            assert_int_equal(f.fits, f.prediction.fits);
            dw_simulation_destroy(simulation);
        }
    }
    dw_hardware_destroy(h100);
}

static double all_exposed(const dw_simulated_rank *rank) {
    double sum = 0;
    for (int stream = 0; stream < DW_STREAMS; stream++) sum += rank->exposed[stream];
    return sum;
}

static void check_totals(const dw_simulation *simulation) {
    for (int rank = 0; rank < simulation->schedule.stages; rank++) {
        const dw_simulated_rank *r = dw_simulation_rank(simulation, rank);
        double parts = r->compute + r->optimizer + r->wait + all_exposed(r),
               whole = r->end - r->start;
        if (fabs(parts - whole) > 1e-9 * whole)
            fail_msg("rank %d: %.9f s in parts, %.9f in all", rank, parts, whole);
        assert_true(r->wait >= 0 && r->occupied <= r->pipeline * (1 + 1e-12));
        for (int stream = DW_STREAM_TENSOR; stream < DW_STREAMS; stream++) {
            assert_true(r->hidden[stream] >= 0 && r->exposed[stream] >= 0);
            assert_true(r->hidden[stream] <= r->busy[stream] * (1 + 1e-9));
        }
        /* Tensor, context and expert traffic that is not exposed overlaps with computation. */
        for (int stream = DW_STREAM_TENSOR; stream <= DW_STREAM_EXPERT; stream++) {
            double exposed = r->busy[stream] - r->hidden[stream];
            if (fabs(exposed - r->exposed[stream]) > 1e-9 * whole)
                fail_msg("rank %d, %s: %.9f s without computation, %.9f exposed", rank,
                         dw_stream_name((dw_stream)stream), exposed, r->exposed[stream]);
        }
    }
}

/* Limits on the difference of simulated and predicted steps. Without a pipeline, and with sharded states,
 * both are sums of the same terms. With a pipeline the formula adds the longest pipeline and the longest
 * gradient exchange, which may belong to different stages, and hides the exchange behind a whole micro-batch.
 * The simulation hides it behind its chunk, which matters most for small chunks. Schedules with split
 * backward get their order from a search, and the formula is their bound. */
static double may_differ(const dw_layout *layout) {
    static const double pipelines[DW_SCHEDULES] = {
        [DW_SCHEDULE_1F1B] = 0.03,     [DW_SCHEDULE_GPIPE] = 0.03, [DW_SCHEDULE_INTERLEAVED] = 0.09,
        [DW_SCHEDULE_ZB_H1] = 0.06,    [DW_SCHEDULE_ZB_H2] = 0.05, [DW_SCHEDULE_ZB_V] = 0.05,
        [DW_SCHEDULE_DUALPIPE] = 0.06,
    };
    /* Without sharding the formula overlaps half of the all-reduce with forward. */
    double reduced = layout->zero_stage ? 1e-9 : 0.02;
    return layout->pp > 1 ? pipelines[layout->schedule] + reduced : reduced;
}

/* Makes layout number `number` on 64 GPUs, with 32 micro-batches. Returns 0 if it does not exist. */
static int layout_by_number(const dw_model_sizes *model, int number, dw_layout *layout) {
    static const int tps[] = {1, 8}, cps[] = {1, 2}, zeros[] = {0, 1, 3};
    int schedule = number % DW_SCHEDULES, rest = number / DW_SCHEDULES;
    int pp = 1 << rest % 4, tp = tps[rest / 4 % 2], cp = cps[rest / 8 % 2];
    if (tp * cp * pp > 64 || rest >= 48) return 0;
    *layout = layout_of(64, tp, pp, 1);
    layout->cp = cp;
    layout->dp /= cp;
    layout->global_batch = 32 * layout->dp;
    layout->zero_stage = zeros[rest / 16];
    layout->schedule = (dw_pipeline_schedule)schedule;
    if (schedule == DW_SCHEDULE_INTERLEAVED || schedule == DW_SCHEDULE_ZB_V)
        layout->virtual_stages = 2;
    if (pp == 1 && layout->virtual_stages > 1) return 0;
    int expert_ranks = layout->dp * cp * tp;
    if (model->experts) layout->ep = expert_ranks < 8 ? expert_ranks : 8;
    if (rest % 5 == 4) layout->offload_layers = 2;
    if (rest % 7 == 6) layout->offload_optimizer = 1;
    return 1;
}

/* Under AddressSanitizer one layout of so many is simulated, because all take half a minute. The number has no factor in
 * common with the numbers of choices, so that every choice occurs. */
static int one_layout_of(void) {
#ifdef __SANITIZE_ADDRESS__
    return 5;
#else
    return 1;
#endif
}

static void many_layouts_agree(void **state) {
    (void)state;
    const int step = one_layout_of();
    static const char *const models[] = {"llama3-8b", "llama3-70b", "deepseek-v3"};
    static const char *const gpus[] = {"h100:64", "b200:64"};
    int played = 0, used[DW_STREAMS] = {0};
    for (size_t at = 0; at < DW_COUNT(models) * DW_COUNT(gpus); at++) {
        const char *name = models[at / DW_COUNT(gpus)];
        dw_hardware *hardware = hardware_of(gpus[at % DW_COUNT(gpus)]);
        dw_model_sizes model;
        assert_int_equal(dw_model_sizes_named(name, &model), DW_OK);
        for (int number = 0; number < 48 * DW_SCHEDULES; number += step) {
            dw_layout layout;
            if (!layout_by_number(&model, number, &layout)) continue;
            dw_simulation *simulation = NULL;
            dw_simulation_figures f;
            assert_int_equal(dw_simulate(&model, hardware, &layout, &simulation), DW_OK);
            dw_simulation_figures_of(simulation, &f);
            check_totals(simulation);
            if (fabs(f.seconds / f.prediction.seconds - 1) > may_differ(&layout))
                fail_msg("%s on %s, %s, pp %d, tp %d, cp %d, ZeRO %d, ep %d: %.6f s played, %.6f "
                         "predicted",
                         name, hardware->name, dw_pipeline_schedule_name(layout.schedule),
                         layout.pp, layout.tp, layout.cp, layout.zero_stage, layout.ep, f.seconds,
                         f.prediction.seconds);
            const dw_simulated_rank *r = dw_simulation_rank(simulation, 0);
            for (int stream = 0; stream < DW_STREAMS; stream++) used[stream] += r->busy[stream] > 0;
            if (layout.pp == 1) { /* each part is the formula's, scaled like the whole step */
                dw__planned planned;
                dw__planned_begin(&planned, &dw__constants_default, &model, hardware, &layout);
                const dw_time_parts *t = &f.prediction.time;
                const double parts[] = {t->tensor, t->context, t->expert};
                for (int kind = 0; kind < 3; kind++) {
                    double exposed = r->exposed[DW_STREAM_TENSOR + kind];
                    assert_true(fabs(exposed - parts[kind] * dw__slowdown(&planned)) <=
                                1e-9 * f.seconds);
                }
                assert_true(fabs(r->exposed[DW_STREAM_HOST] -
                                 t->offload * dw__slowdown(&planned)) <= 1e-9 * f.seconds);
            }
            played++;
            dw_simulation_destroy(simulation);
        }
        dw_hardware_destroy(hardware);
    }
    printf("  %d layouts\n", played);
    assert_true(played > 1000 / step);
    for (int stream = 0; stream < DW_STREAMS; stream++) assert_true(used[stream] > 20);
}

/* ZeRO-3 gathers and frees layer by layer: in each micro-batch memory grows through forward, peaks at the
 * loss, and falls through backward. */
static void zero_3_gathers_layer_by_layer(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 1, 1, 128);
    layout.zero_stage = 3;
    layout.micro_batch = 1;
    dw_simulation *simulation = NULL;
    dw_simulation_figures f;
    assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_OK);
    dw_simulation_figures_of(simulation, &f);
    assert_int_equal(f.micro_batches, 2);
    size_t count, at = 0;
    const dw_memory_point *points = dw_simulation_memory(simulation, 0, &count);
    const dw__chunk_cost *cost = &simulation->costs.chunks[0];
    const int layers = llama3_70b.layers;
    assert_int_equal(cost->layers, layers);
    assert_true(count >= (size_t)(4 * layers));
    while (points[at].time <= 0 && points[at + 1].time <= 0) at++;
    double step = cost->kept_bytes / layers;
    for (int layer = 1; layer < layers - 1; layer++) { /* the last stage also has the loss */
        double grown = points[at + (size_t)layer].bytes - points[at + (size_t)layer - 1].bytes;
        assert_true(fabs(grown - step) < 1e-6 * step);
    }
    assert_true(f.peak_time > 0 && f.peak_time < f.seconds / 2);
    double middle = points[at + (size_t)layers / 2].bytes;
    assert_true(f.peak_bytes > middle + 0.4 * cost->kept_bytes);
    /* A layer's activations and gathered parameters are freed in backward. */
    const dw_memory_point *backward = points + at + layers;
    for (int layer = 2; layer < layers; layer++)
        assert_true(backward[layer].bytes < backward[layer - 1].bytes);
    double needed = f.prediction.memory.parameters + f.prediction.memory.gradients +
                    f.prediction.memory.optimizer + f.prediction.memory.activations +
                    f.prediction.memory.workspace;
    assert_true(f.peak_bytes >= needed * (1 - 1e-12) && f.peak_bytes <= f.prediction.used);
    dw_simulation_destroy(simulation);
    dw_hardware_destroy(h100);
}

static void speedups_are_ratios_of_predictions(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 8, 128);
    layout.precision = DW_SCHEME_FP8_TENSOR;
    dw_simulation *simulation = NULL;
    dw_simulation_figures f;
    assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_OK);
    dw_simulation_figures_of(simulation, &f);
    dw_layout other = layout;
    dw_prediction prediction;
    other.precision = DW_SCHEME_BF16;
    assert_int_equal(dw_predict(&llama3_70b, h100, &other, &prediction), DW_OK);
    assert_true(fabs(f.speedup_bf16 - prediction.seconds / f.prediction.seconds) < 1e-12);
    assert_true(f.speedup_bf16 > 1);
    /* The baseline is a valid layout that fits, and its time agrees with the reported ratio; no simpler layout is
     * faster. */
    assert_int_equal(dw_predict(&llama3_70b, h100, &f.baseline_layout, &prediction), DW_OK);
    assert_true(prediction.fits && f.baseline_layout.precision == DW_SCHEME_FP8_TENSOR);
    assert_true(fabs(f.speedup - prediction.seconds / f.prediction.seconds) < 1e-12);
    double seconds = prediction.seconds;
    int compared = 0;
    other = layout;
    other.zero_stage = 3;
    other.pp = 1;
    other.recompute = DW_RECOMPUTE_AUTO;
    for (other.tp = 1; other.tp <= 8; other.tp *= 2) {
        other.dp = 64 / other.tp;
        assert_int_equal(dw_predict(&llama3_70b, h100, &other, &prediction), DW_OK);
        compared += prediction.fits;
        if (prediction.fits) assert_true(seconds <= prediction.seconds * (1 + 1e-12));
    }
    assert_true(compared > 0);
    dw_simulation_destroy(simulation);

    layout.global_batch = 96; /* the batch does not divide among 64 ranks, but among 32 pairs */
    assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_OK);
    dw_simulation_figures_of(simulation, &f);
    assert_true(f.speedup > 0 && f.baseline_layout.dp < 64);
    dw_simulation_destroy(simulation);

    layout.global_batch = 8; /* no number of stages makes the model small enough for its GPUs */
    layout.gpus = layout.tp = 8;
    layout.pp = layout.dp = 1;
    dw_hardware *one = hardware_of("h100:8");
    one->memory.value /= 4;
    assert_int_equal(dw_simulate(&llama3_70b, one, &layout, &simulation), DW_OK);
    dw_simulation_figures_of(simulation, &f);
    assert_true(f.speedup == 0 && f.baseline[0] == 0);
    assert_non_null(strstr(f.speedup_reason, "usual layouts fits"));
    dw_simulation_destroy(simulation);
    dw_hardware_destroy(one);
    dw_hardware_destroy(h100);
}

static void layouts_that_cannot_be_simulated_are_rejected(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:64");
    dw_simulation *simulation = NULL;
    dw_layout layout = layout_of(64, 4, 8, 127);
    assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "global_batch 127"));
    layout = layout_of(40, 8, 5, 64);
    layout.schedule = DW_SCHEDULE_DUALPIPE;
    assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "pp is 5"));
    layout = layout_of(64, 4, 16, 1 << 24);
    assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "smaller batch"));
    dw_hardware_destroy(h100);
}

static char *text_of(const char *path) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    long bytes = ftell(file);
    rewind(file);
    char *text = calloc(1, (size_t)bytes + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)bytes, file), bytes);
    fclose(file);
    return text;
}

static void files_hold_every_event(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 8, 128);
    layout.virtual_stages = 2;
    dw_simulation *simulation = NULL;
    assert_int_equal(dw_simulate(&llama3_70b, h100, &layout, &simulation), DW_OK);
    char path[] = "/tmp/test_simulate_XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    close(file);

    assert_int_equal(dw_simulation_trace(simulation, path), DW_OK);
    char *text = text_of(path);
    json_t *trace = json_loads(text, 0, NULL), *event;
    assert_non_null(trace);
    size_t index, events, seen = 0, counters = 0;
    const dw_event *all = dw_simulation_events(simulation, &events);
    json_array_foreach(trace, index, event) {
        const char *kind = json_string_value(json_object_get(event, "ph"));
        if (*kind == 'C') counters++;
        if (*kind != 'X') continue;
        assert_int_equal(json_integer_value(json_object_get(event, "pid")), all[seen].rank);
        double start = json_real_value(json_object_get(event, "ts"));
        assert_true(fabs(start - 1e6 * all[seen].start) < 1e-3);
        if (seen++ == 0)
            assert_string_equal(json_string_value(json_object_get(event, "name")), "F0.0");
    }
    assert_int_equal(seen, events);
    size_t points = 0, count;
    for (int rank = 0; rank < 8; rank++) {
        dw_simulation_memory(simulation, rank, &count);
        points += count;
    }
    assert_int_equal(counters, points);
    json_decref(trace);
    free(text);

    /* The page's data are JSON for any title, and nothing on the page requests another file. */
    assert_int_equal(dw_simulation_report(simulation, "</script><b>\"\\ \xff", path), DW_OK);
    text = text_of(path);
    char *begin = strstr(text, "id=\"data\">"), *end = begin ? strstr(begin, "</script>") : NULL;
    assert_non_null(end);
    begin += strlen("id=\"data\">");
    json_t *data = json_loadb(begin, (size_t)(end - begin), 0, NULL);
    assert_non_null(data);
    assert_string_equal(json_string_value(json_object_get(data, "title")), "</script><b>\"\\ ?");
    seen = 0;
    json_t *lane;
    json_array_foreach(json_object_get(data, "lanes"), index, lane) seen += json_array_size(lane);
    assert_int_equal(seen, 5 * events);
    json_decref(data);
    assert_null(strstr(text, "http"));
    assert_null(strstr(text, "src="));
    assert_non_null(strstr(end, "</html>"));
    free(text);
    unlink(path);

    assert_int_equal(dw_simulation_trace(simulation, "/nowhere/trace.json"), DW_IO);
    assert_int_equal(dw_simulation_report(simulation, NULL, "/nowhere/report.html"), DW_IO);
    dw_simulation_destroy(simulation);
    dw_hardware_destroy(h100);
}

/* A failed allocation is an error and leaks nothing. */
static void lack_of_memory_is_an_error(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:64");
    dw_layout layout = layout_of(64, 4, 8, 128);
    layout.schedule = DW_SCHEDULE_DUALPIPE;
    int64_t live = dw__memory_live();
    int failures = 0;
    for (int64_t allowed = 0;; allowed++) {
        dw_simulation *simulation = NULL;
        char *text = NULL;
        dw__memory_fail_after(allowed);
        dw_status status = dw_simulate(&llama3_70b, h100, &layout, &simulation);
        if (status == DW_OK) status = dw_simulation_json(simulation, &text);
        if (status == DW_OK) status = dw_simulation_trace(simulation, "/dev/null");
        if (status == DW_OK) status = dw_simulation_report(simulation, "", "/dev/null");
        dw__memory_fail_after(-1);
        dw_text_free(text);
        dw_simulation_destroy(simulation);
        assert_int_equal(dw__memory_live(), live);
        if (status == DW_OK) break;
        assert_int_equal(status, DW_OUT_OF_MEMORY);
        failures++;
    }
    assert_true(failures > 20);
    dw_hardware_destroy(h100);
}

/* 128 micro-batches on 64 stages; the design promises one second. */
static void large_pipelines_are_quick(void **state) {
    (void)state;
    dw_hardware *h100 = hardware_of("h100:4096");
    dw_model_sizes model = llama3_70b;
    model.layers = 128;
    dw_layout layout = layout_of(4096, 8, 64, 1024);
    dw_simulation *simulation = NULL;
    double began = dw__seconds();
    assert_int_equal(dw_simulate(&model, h100, &layout, &simulation), DW_OK);
    double seconds = dw__seconds() - began;
    dw_simulation_figures f;
    dw_simulation_figures_of(simulation, &f);
    assert_int_equal(f.micro_batches, 128);
    printf("  %zu events in %.0f ms\n", f.events, 1e3 * seconds);
    assert_true(seconds < 10); /* the machine may have other work, and sanitizers are slow */
    dw_simulation_destroy(simulation);
    dw_hardware_destroy(h100);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_once),
        cmocka_unit_test(dependencies_hold_and_memory_returns),
        cmocka_unit_test(bubbles_are_the_closed_forms),
        cmocka_unit_test(micro_batches_in_flight_equal_published_ones),
        cmocka_unit_test(steps_agree_with_predictions),
        cmocka_unit_test(without_a_pipeline_simulation_equals_prediction),
        cmocka_unit_test(many_layouts_agree),
        cmocka_unit_test(zero_3_gathers_layer_by_layer),
        cmocka_unit_test(speedups_are_ratios_of_predictions),
        cmocka_unit_test(layouts_that_cannot_be_simulated_are_rejected),
        cmocka_unit_test(files_hold_every_event),
        cmocka_unit_test(lack_of_memory_is_an_error),
        cmocka_unit_test(large_pipelines_are_quick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
