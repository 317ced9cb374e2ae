/* The schedules against their own rules and closed forms, played steps against what must hold for any of them. */
#include "simulate/simulate_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const dw_planner_model llama3_70b = {.layers = 80,
                                            .hidden = 8192,
                                            .heads = 64,
                                            .kv_heads = 8,
                                            .head_dim = 128,
                                            .ffn = 28672,
                                            .gated = 1,
                                            .vocabulary = 128256};

static int chunks_of(dw_pipeline_schedule schedule, int stages) {
    if (stages == 1) return 1;
    return schedule == DW_SCHEDULE_INTERLEAVED ? 3 : 1;
}

/* Stages that are alike: forward, backward of inputs and of weights as given, one unit of memory for each chunk. */
static dw_simulation *play(dw_pipeline_schedule schedule, int stages, int chunks, int micro_batches,
                           double forward, double input, double weight, double send) {
    dw_simulation *simulation = NULL;
    assert_int_equal(
        dw__simulation_begin(schedule, stages, chunks, micro_batches, &simulation), DW_OK);
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
                        /* Forward, then backward: whole, or of inputs and then of weights. */
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

/* What an event may not begin before, looked up in a table of ends; and nothing on a stream runs twice at once. */
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

/* Enough micro-batches to reach the steady state: what each paper's formula is for. */
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

/* Chunks of micro-batches held at most, in units of a whole rank's: tables of the schedules' papers. */
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

static void in_flight_is_what_was_published(void **state) {
    (void)state;
    for (int s = 0; s < DW_SCHEDULES; s++) {
        dw_pipeline_schedule schedule = (dw_pipeline_schedule)s;
        for (int stages = 2; stages <= 12; stages += 2) {
            int chunks = schedule == DW_SCHEDULE_INTERLEAVED ? 3 : 1, count = 4 * stages;
            dw_simulation *simulation = play(schedule, stages, chunks, count, 1, 1, 1, 0);
            double part = schedule == DW_SCHEDULE_DUALPIPE ? 1 : simulation->schedule.chunks, most = 0;
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

static dw_hardware *hardware_of(const char *name) {
    dw_hardware *hardware = NULL;
    assert_int_equal(dw_hardware_named(name, &hardware), DW_OK);
    return hardware;
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
        assert_true(fabs(f.seconds / f.prediction.seconds - 1) < 0.08);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_once),
        cmocka_unit_test(dependencies_hold_and_memory_returns),
        cmocka_unit_test(bubbles_are_the_closed_forms),
        cmocka_unit_test(in_flight_is_what_was_published),
        cmocka_unit_test(steps_agree_with_predictions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
