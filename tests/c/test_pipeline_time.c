/* Compares the formula of a pipeline's time with the simulation of its schedule, over grids of unequal times, and the
 * simulated bubbles with those that Qi et al. 2024 print for their own profiles. */
#include "deepwell/graph.h"
#include "plan/planner_internal.h"
#include "simulate/simulate_internal.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* `head`: extra time of the loss's stage, as a fraction of each operation. `frees`: fraction of the
 * activations that the backward of inputs frees. */
typedef struct shape {
    dw_pipeline_schedule schedule;
    int stages, chunks, micro_batches;
    double forward, input, weight, send, head, frees;
} shape;

static int has_head(const shape *s, int chunks, int rank, int chunk) {
    if (s->schedule == DW_SCHEDULE_ZB_V) return rank == 0 && chunk == 1;
    if (s->schedule == DW_SCHEDULE_DUALPIPE) return rank == (chunk ? 0 : s->stages - 1);
    return rank == s->stages - 1 && chunk == chunks - 1;
}

static double play(const shape *s, double *bubble) {
    dw_simulation *simulation = NULL;
    assert_int_equal(
        dw__simulation_begin(s->schedule, s->stages, s->chunks, s->micro_batches, &simulation),
        DW_OK);
    int chunks = simulation->schedule.chunks;
    double part = s->schedule == DW_SCHEDULE_DUALPIPE ? 1 : chunks;
    simulation->costs.input_frees = s->frees;
    for (int rank = 0; rank < s->stages; rank++) {
        simulation->costs.ranks[rank] = (dw__rank_cost){.send = s->send};
        for (int chunk = 0; chunk < chunks; chunk++) {
            double head = has_head(s, chunks, rank, chunk) ? s->head : 0;
            simulation->costs.chunks[rank * chunks + chunk] =
                (dw__chunk_cost){.forward = s->forward / part + head,
                                 .input = s->input / part + head,
                                 .weight = s->weight / part + head,
                                 .kept_bytes = 1 / part};
        }
    }
    assert_int_equal(dw__schedule_order(simulation), DW_OK);
    assert_int_equal(dw__simulate_events(simulation), DW_OK);
    double seconds = simulation->figures.seconds, limit = 0;
    if (bubble) *bubble = simulation->figures.bubble_fraction;
    /* A rank never holds more activations than the schedule's own rule allows, whatever the order. */
    if (s->schedule == DW_SCHEDULE_ZB_H1 || s->schedule == DW_SCHEDULE_ZB_V) limit = s->stages;
    if (s->schedule == DW_SCHEDULE_ZB_H2) limit = 2 * s->stages - 1;
    for (int rank = 0; rank < s->stages && limit > 0; rank++)
        assert_true(simulation->ranks[rank].peak_bytes <= limit + 1e-6);
    dw_simulation_destroy(simulation);
    return seconds;
}

static double formula(const shape *s) {
    dw__turn turn = {s->forward, s->input, s->weight};
    dw__turn loss = {s->forward + s->head, s->input + s->head, s->weight + s->head};
    int first = s->schedule == DW_SCHEDULE_ZB_V;
    dw__pipeline pipeline = {.schedule = s->schedule,
                             .stages = s->stages,
                             .chunks = s->chunks,
                             .micro_batches = s->micro_batches,
                             .first = first ? loss : turn,
                             .middle = turn,
                             .mean = turn,
                             .last = first ? turn : loss,
                             .heaviest = s->stages > 2 ? s->stages - 2 : 0,
                             .send = s->send,
                             .weight_kept = 1 - s->frees};
    return dw__pipeline_seconds(&pipeline);
}

static int is_possible(const shape *s) {
    int p = s->stages, m = s->micro_batches;
    switch (s->schedule) {
    case DW_SCHEDULE_INTERLEAVED: return m % p == 0;
    case DW_SCHEDULE_ZB_H2:
    case DW_SCHEDULE_ZB_V: return m >= 2 * p;
    case DW_SCHEDULE_DUALPIPE: return m >= 2 * p && m % 2 == 0;
    default: return m >= p;
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* GPipe, 1F1B and interleaved follow their rule to the end, so the formula equals the simulation. The other
 * schedules' orders come from a search, and the formula is a bound: 19 of 20 cases are within a point of the
 * pipeline's time, all within `most`. */
static void formula_equals_the_simulation(void **state) {
    (void)state;
    static const struct {
        dw_pipeline_schedule schedule;
        double most, mostly;
    } bounds[] = {{DW_SCHEDULE_1F1B, 1e-9, 1e-9},        {DW_SCHEDULE_GPIPE, 1e-9, 1e-9},
                  {DW_SCHEDULE_INTERLEAVED, 2e-3, 1e-9}, {DW_SCHEDULE_ZB_H1, 0.05, 0.015},
                  {DW_SCHEDULE_ZB_H2, 0.05, 0.01},       {DW_SCHEDULE_ZB_V, 0.05, 0.015},
                  {DW_SCHEDULE_DUALPIPE, 0.05, 0.015}};
    static const int stages[] = {2, 4, 8, 16}, rounds[] = {2, 4, 5, 8, 16}; /* halves of p */
    static const double inputs[] = {0.8, 1, 1.3, 2}, weights[] = {0.5, 0.8, 1, 1.3},
                        sends[] = {0, 0.02, 0.1}, heads[] = {0, 0.05, 0.3}, frees[] = {0, 0.5};
    enum { MOST = 4 * 5 * 4 * 4 * 3 * 3 * 2 };
    double *errors = calloc(MOST, sizeof *errors);
    assert_non_null(errors);
    for (size_t b = 0; b < DW_COUNT(bounds); b++) {
        size_t count = 0;
        for (size_t at = 0; at < MOST; at++) {
            size_t i = at;
#define NEXT(list) list[i % DW_COUNT(list)]
            shape s = {.schedule = bounds[b].schedule, .forward = 1, .chunks = 1};
            s.stages = NEXT(stages), i /= DW_COUNT(stages);
            s.micro_batches = s.stages * NEXT(rounds) / 2, i /= DW_COUNT(rounds);
            s.input = NEXT(inputs), i /= DW_COUNT(inputs);
            s.weight = NEXT(weights), i /= DW_COUNT(weights);
            s.send = NEXT(sends), i /= DW_COUNT(sends);
            s.head = NEXT(heads), i /= DW_COUNT(heads);
            s.frees = NEXT(frees);
#undef NEXT
            int split = s.schedule >= DW_SCHEDULE_ZB_H1 && s.schedule <= DW_SCHEDULE_ZB_V;
            if (!is_possible(&s) || (s.frees > 0 && !split)) continue;
            if (split && at % 11) continue; /* only some cases, because these take longer */
            if (s.schedule == DW_SCHEDULE_INTERLEAVED) s.chunks = 2 + (int)(at % 3);
            double played = play(&s, NULL);
            errors[count++] = fabs(formula(&s) / played - 1);
            if (errors[count - 1] > bounds[b].most)
                fail_msg("%s, p %d, m %d, F 1, B %g, W %g, send %g, head %g, frees %g: %.4f "
                         "played, %.4f by the formula",
                         dw_pipeline_schedule_name(s.schedule), s.stages, s.micro_batches, s.input,
                         s.weight, s.send, s.head, s.frees, played, formula(&s));
        }
        qsort(errors, count, sizeof *errors, ascending);
        size_t within = 0;
        while (within < count && errors[within] <= 0.01) within++;
        printf("  %-12s %5zu cases, %.1f%% within a point, 95th percentile %.2f%%, most %.2f%%\n",
               dw_pipeline_schedule_name(bounds[b].schedule), count,
               100.0 * (double)within / (double)count, 100 * errors[count * 95 / 100],
               100 * errors[count - 1]);
        assert_true(count > 200);
        assert_true(errors[count * 95 / 100] <= bounds[b].mostly);
    }
    free(errors);
}

/* Times in milliseconds of four models' profiles, and the bubbles that the paper computes for them. `frees`:
 * attention's scores, 5 a s of 34 h + 5 a s bytes. A solver finds ZB-1p and ZB-2p within the memory of ZB-H1
 * and ZB-H2. */
static void simulated_bubbles_equal_published_ones(void **state) {
    (void)state;
    static const struct {
        int stages, chunks, heads, hidden, micro_batches[3];
        double forward, input, weight, send;
        double one[3], interleaved[3], h1[3], h2[3];
    } models[] = {
        {8,
         3,
         24,
         2304,
         {24, 32, 64},
         18.522,
         18.086,
         9.337,
         0.601,
         {0.2431, 0.1985, 0.1240},
         {0.1055, 0.0818, 0.0443},
         {0.1585, 0.1242, 0.0674},
         {0.0433, 0.0039, 0.0026}},
        {8,
         4,
         32,
         4096,
         {24, 32, 64},
         29.718,
         29.444,
         19.927,
         0.527,
         {0.2347, 0.1898, 0.1091},
         {0.0808, 0.0628, 0.0320},
         {0.1323, 0.1045, 0.0554},
         {0.0029, 0.0022, 0.0010}},
        {16,
         3,
         40,
         5120,
         {48, 64, 128},
         11.347,
         11.248,
         8.132,
         0.377,
         {0.2552, 0.2082, 0.1251},
         {0.1104, 0.0852, 0.0445},
         {0.1397, 0.1088, 0.0576},
         {0.0066, 0.0054, 0.0028}},
        {32,
         2,
         48,
         6144,
         {96, 128, 256},
         10.419,
         10.207,
         7.715,
         0.408,
         {0.2646, 0.2168, 0.1352},
         {0.1493, 0.1164, 0.0624},
         {0.1421, 0.1106, 0.0594},
         {0.0038, 0.0029, 0.0018}},
    };
    double most[2] = {0};
    for (size_t at = 0; at < DW_COUNT(models); at++) {
        for (int i = 0; i < 3; i++) {
            const struct {
                dw_pipeline_schedule schedule;
                double printed;
            } cases[] = {{DW_SCHEDULE_1F1B, models[at].one[i]},
                         {DW_SCHEDULE_INTERLEAVED, models[at].interleaved[i]},
                         {DW_SCHEDULE_ZB_H1, models[at].h1[i]},
                         {DW_SCHEDULE_ZB_H2, models[at].h2[i]}};
            for (size_t c = 0; c < DW_COUNT(cases); c++) {
                double scores = 5.0 * models[at].heads * 1024 / models[at].hidden, bubble;
                int interleaved = cases[c].schedule == DW_SCHEDULE_INTERLEAVED;
                shape s = {.schedule = cases[c].schedule,
                           .stages = models[at].stages,
                           .chunks = interleaved ? models[at].chunks : 1,
                           .micro_batches = models[at].micro_batches[i],
                           .forward = models[at].forward,
                           .input = models[at].input,
                           .weight = models[at].weight,
                           .send = models[at].send,
                           .frees = scores / (34 + scores)};
                play(&s, &bubble);
                double of_formula =
                    1 - s.micro_batches * (s.forward + s.input + s.weight) / formula(&s);
                double off[2] = {fabs(bubble - cases[c].printed),
                                 fabs(of_formula - cases[c].printed)};
                for (int way = 0; way < 2; way++) most[way] = fmax(most[way], off[way]);
                if (off[0] > 0.01 || off[1] > 0.01)
                    fail_msg("%s, p %d, m %d: %.4f played, %.4f by the formula, %.4f printed",
                             dw_pipeline_schedule_name(s.schedule), s.stages, s.micro_batches,
                             bubble, of_formula, cases[c].printed);
            }
        }
    }
    printf("  48 printed bubbles: played within %.2f points, the formula within %.2f\n",
           100 * most[0], 100 * most[1]);
}

/* With F = B = W and no sends the formula is the papers' closed form. */
static void formula_is_the_closed_form(void **state) {
    (void)state;
    for (int schedule = 0; schedule < DW_SCHEDULES; schedule++) {
        for (int stages = 2; stages <= 32; stages += 2) {
            for (int rounds = 2; rounds <= 6; rounds++) {
                shape s = {.schedule = (dw_pipeline_schedule)schedule,
                           .stages = stages,
                           .chunks = schedule == DW_SCHEDULE_INTERLEAVED ? 3 : 1,
                           .micro_batches = rounds * stages,
                           .forward = 1,
                           .input = 1,
                           .weight = 1};
                double bubble = 1 - 3.0 * s.micro_batches / formula(&s);
                double closed = dw_pipeline_bubble(s.schedule, stages, s.chunks, s.micro_batches);
                if (fabs(bubble - closed) > 1e-9)
                    fail_msg("%s, p %d, m %d: %.6f, closed form %.6f",
                             dw_pipeline_schedule_name(s.schedule), stages, s.micro_batches, bubble,
                             closed);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formula_equals_the_simulation),
        cmocka_unit_test(simulated_bubbles_equal_published_ones),
        cmocka_unit_test(formula_is_the_closed_form),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
