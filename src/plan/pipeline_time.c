/* Pipelines: how layers are distributed over stages, and how long stages wait for each other. */
#include "plan/planner_internal.h"
#include <math.h>

/* Idle fraction where forward, backward of inputs and backward of weights take the same time (F = B = W = 1).
 * Sources: Huang et al. 2019 for 1F1B and GPipe; Narayanan et al. 2021 for the interleaved schedule; Qi et al. 2024,
 * table 2, for zero bubble; DeepSeek-V3 technical report, table 2, for DualPipe. */
double dw_pipeline_bubble(dw_pipeline_schedule schedule, int stages, int virtual_stages,
                          int micro_batches) {
    double p = stages, v = virtual_stages > 1 ? virtual_stages : 1, m = micro_batches, idle = 0;
    if (stages <= 1 || micro_batches < 1) return 0;
    switch (schedule) {
    case DW_SCHEDULE_GPIPE: idle = 3 * (p - 1); break;
    case DW_SCHEDULE_ZB_H1: idle = p - 1; break;
    case DW_SCHEDULE_ZB_H2:
    case DW_SCHEDULE_ZB_V: idle = 0; break;
    case DW_SCHEDULE_DUALPIPE: idle = 2 * (p / 2 - 1); break;
    case DW_SCHEDULE_1F1B:
    case DW_SCHEDULE_INTERLEAVED:
    default: idle = 3 * (p - 1) / v; break;
    }
    return idle / (3 * m + idle);
}

int dw__head_stage(const dw_layout *layout) {
    return layout->schedule == DW_SCHEDULE_ZB_V ? 0 : layout->pp - 1;
}

/* Remaining layers go to the stages after the first, because the ends hold the vocabulary. */
double dw__stage_layers(const dw__planned *planned, int stage) {
    const dw_layout *layout = planned->layout;
    int stages = layout->pp, layers = planned->model->layers;
    if (stages == 1) return layers;
    double first = layout->first_stage_layers, last = layout->last_stage_layers;
    if (first > 0 && stage == 0) return first;
    if (last > 0 && stage == stages - 1) return last;
    if (first > 0 || last > 0) {
        int ends = (first > 0) + (last > 0);
        return stages > ends ? (layers - first - last) / (stages - ends) : layers;
    }
    if (layout->framework == DW_FRAMEWORK_NANOTRON) {
        /* nanotron distributes blocks by cost, with the head as one of them, and fills the first stages first. */
        double head =
            dw__embedding_parameters(planned->model) /
            (dw__attention_parameters(planned->model) + dw__dense_mlp_parameters(planned->model));
        double each = ceil((layers + head) / stages), left = layers - stage * each;
        return left < 0 ? 0 : left < each ? left : each;
    }
    int even = layers / stages, rest = layers % stages;
    return even + (stage >= 1 && stage <= rest ? 1 : 0);
}

double dw__stage_attention(const dw__planned *planned, int stage, double *excess) {
    double whole = dw__stage_layers(planned, stage) * dw__attention_parameters(planned->model) *
                   planned->linear_scale;
    *excess = whole / planned->atp - whole / planned->layout->tp;
    return whole / planned->atp;
}

/* Elements on one rank without the experts, which are distributed over other ranks. */
double dw__stage_parameters(const dw__planned *planned, int stage, double *experts) {
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    double layers = dw__stage_layers(planned, stage);
    double mixtures = layers * dw__moe_layers(model) / model->layers;
    double dense =
        layers * (dw__attention_parameters(model) / layout->tp + 2.0 * model->hidden) +
        (layers - mixtures) * dw__dense_mlp_parameters(model) / layout->tp +
        mixtures * (dw__shared_parameters(model) / layout->tp + dw__router_parameters(model));
    *experts =
        mixtures * model->experts * dw__expert_parameters(model) / (layout->ep * planned->etp);
    double scale = planned->linear_scale;
    dense *= scale;
    *experts *= scale;
    double table = dw__embedding_parameters(model) / layout->tp;
    int head = dw__head_stage(layout);
    if (stage == 0) dense += table + (double)model->positions * model->hidden;
    if (stage == head && (!model->tied || head > 0)) dense += table;
    return dense;
}

/* ---- the longest time of any rank ---------------------------------------------------------------------------------
 *
 * Each formula is the length of a path through the graph of operations, and so a lower bound. The largest bound
 * equals the simulated time of the schedule (src/simulate). `round` is the time of a micro-batch from a stage to the
 * last one and back. */

static double turn_sum(const dw__turn *t) { return t->forward + t->input + t->weight; }
static double way(const dw__turn *t) { return t->forward + t->input; }
static double excess(double seconds) { return seconds > 0 ? seconds : 0; }

/* Sums stages `from` to the last but one, with a send after each. With `weights` 0 it counts forward and backward of
 * inputs; with 1 also backward of weights. */
static double ways_from(const dw__pipeline *p, int from, int weights) {
    double all = 0;
    const dw__turn *turns[2] = {&p->first, &p->mean};
    int counts[2] = {from == 0, p->stages - 2 - (from > 1 ? from - 1 : 0)};
    for (int at = 0; at < 2; at++)
        if (counts[at] > 0)
            all += counts[at] * (way(turns[at]) + (weights ? turns[at]->weight : 0) + 2 * p->send);
    return all;
}

/* 1F1B. Stage r has p - r micro-batches in flight; s - r + 1 of them go round from stage r to s and back in turn.
 * Either some stage is never idle between its first and last round, or all stages wait for complete rounds through
 * the pipeline. */
static double one_forward_one_backward(const dw__pipeline *p) {
    double m = p->micro_batches, stages = p->stages, last = turn_sum(&p->last);
    double round = ways_from(p, 0, 1) + last, span = round + (m - 1) * last;
    const dw__turn *turns[2] = {&p->first, &p->middle};
    const int places[2] = {0, p->heaviest};
    for (int at = 0; at < 2; at++) {
        double after = stages - places[at] - 1, rest = ways_from(p, places[at] + 1, 1) + last;
        if (m > after) span = fmax(span, round + (m - 1 - after) * turn_sum(turns[at]) + rest);
    }
    double rounds = floor((m - 1) / stages), left = m - 1 - rounds * stages;
    double rest = left > 0 ? last + (left - 1) * (turn_sum(&p->mean) + 2 * p->send) : 0;
    span = fmax(span, round * (1 + rounds) + rest);
    double between = stages - 2; /* rounds among these alone: the ends do not hide their sends */
    if (between < 2) return span;
    double part = between * turn_sum(&p->mean) + 2 * (between - 1) * p->send;
    rounds = floor((m - 1) / between), left = m - 1 - rounds * between;
    rest = left > 0 ? turn_sum(&p->mean) + (left - 1) * (turn_sum(&p->mean) + 2 * p->send) : 0;
    return fmax(span, round + rounds * part + rest);
}

/* GPipe: every forward, then every backward. */
static double all_forward_all_backward(const dw__pipeline *p) {
    double forward = fmax(fmax(p->first.forward, p->last.forward), p->middle.forward);
    double backward =
        fmax(fmax(turn_sum(&p->first) - p->first.forward, turn_sum(&p->last) - p->last.forward),
             turn_sum(&p->middle) - p->middle.forward);
    return ways_from(p, 0, 1) + turn_sum(&p->last) + (p->micro_batches - 1) * (forward + backward);
}

/* Interleaved: groups of p micro-batches pass v chunks. A rank begins and ends up to p - 1 chunks late. While the
 * first and the last group pass, each further chunk waits for p sends. */
static double interleaved(const dw__pipeline *p) {
    double most = fmax(fmax(turn_sum(&p->first), turn_sum(&p->middle)), turn_sum(&p->last)),
           v = p->chunks;
    double ramp = (p->stages - 1) * (turn_sum(&p->mean) / v + 2 * p->send);
    return p->micro_batches * most + ramp + 2 * (v - 1) * p->stages * p->send;
}

/* Zero bubble, one stage alone. It has `held` forwards to do before its first backward, and after its last forward
 * the remaining work of as many micro-batches. It waits when that work is not enough. */
static double zero_bubble_own(const dw__pipeline *p, const dw__turn *turn, int place, double held) {
    double m = p->micro_batches, sum = turn_sum(turn), kept = p->weight_kept;
    double round =
        ways_from(p, place + 1, 0) + (place < p->stages - 1 ? way(&p->last) + 2 * p->send : 0);
    double count = fmin(held, m), under_way = fmin(count, round / sum + 1);
    double least = fmax(count * (turn->input + turn->weight),
                        under_way * (turn->input + turn->weight) +
                            fmin((count - under_way) / kept, m - under_way) * turn->weight);
    double ramp = excess(round - (count - 1) * turn->forward),
           tail = excess(round + turn->input + turn->weight - least);
    double steady = m * (round + way(turn) + kept * turn->weight) / held;
    /* with fewer micro-batches, both waits fall into the same gap */
    double waits = m > held ? ramp + tail : fmax(ramp, tail);
    return fmax(m * sum + waits, steady);
}

/* Zero bubble, from the first stage to another and back. By then the other stage has done everything except the
 * weight gradients that it may defer. */
static double zero_bubble_pair(const dw__pipeline *p, const dw__turn *turn, int place,
                               double held) {
    double m = p->micro_batches, there = ways_from(p, 0, 0) - ways_from(p, place, 0);
    return there + m * way(turn) + excess(m - held / p->weight_kept) * turn->weight +
           p->first.weight;
}

static double zero_bubble_h(const dw__pipeline *p, double held) {
    double span =
        fmax(zero_bubble_own(p, &p->first, 0, held), zero_bubble_own(p, &p->middle, 1, held));
    span = fmax(span, zero_bubble_own(p, &p->last, p->stages - 1, held));
    span = fmax(span, zero_bubble_pair(p, &p->middle, p->heaviest, held));
    return fmax(span, zero_bubble_pair(p, &p->last, p->stages - 1, held));
}

/* Idle seconds along one path through a fixed order, beyond the rank's own work. Each member counts forwards,
 * backwards or sends as a p + b, with p stages. */
typedef struct idle_path {
    double forward[2], input[2], weight[2], send[2];
    /* Counts the seconds by which a micro-batch takes longer on the heaviest rank than on the mean one. */
    double excess[2];
} idle_path;

static double longest_of(const idle_path *paths, int count, double stages, const dw__turn *t,
                         double send, double excess_seconds) {
    double longest = 0;
    for (int at = 0; at < count; at++) {
        const idle_path *i = &paths[at];
#define TIMES(member) (i->member[0] * stages + i->member[1])
        double sum = TIMES(forward) * t->forward + TIMES(input) * t->input +
                     TIMES(weight) * t->weight + TIMES(send) * send +
                     TIMES(excess) * excess_seconds;
#undef TIMES
        if (sum > longest || at == 0) longest = sum;
    }
    return longest;
}

/* ZB-V in the order of pipeline_schedule.c, with no gap between a rank's chunks. In the first list all ranks run in
 * step. In the second the first rank, which also has the loss, sets the pace. */
static double zero_bubble_v(const dw__pipeline *p) {
    static const idle_path in_step[] = {
        {{0, 0}, {1, -1}, {-1, 1}, {6, -8}, {0, 0}},
        {{0, 0}, {1, -1}, {-1, 0.5}, {6, -6}, {0, 0}},
        {{0.5, -1}, {0.5, 0}, {-1, 1}, {6, -8}, {0, 0}},
        {{0.5, -0.5}, {0.5, -0.5}, {-1, 0.5}, {6, -6}, {0, 0}},
        {{1, -1.5}, {0, 0.5}, {-1, 1}, {4, -6}, {0, 0}},
        {{-0.5, 0.5}, {0.5, -0.5}, {0, 0}, {4, -6}, {0, 0}},
        {{-0.5, 0.5}, {0, 0.5}, {0.5, -1}, {2, -2}, {0, 0}},
        {{1, -1}, {-0.5, 0.5}, {-0.5, 0.5}, {2, -2}, {0, 0}},
        {{0.5, -1}, {-0.5, 1}, {0, 0}, {2, -4}, {0, 0}},
        {{-0.5, 1}, {0, 0}, {0.5, -1}, {2, -4}, {0, 0}},
        {{0.5, -0.5}, {0, 0}, {-0.5, 0.5}, {4, -4}, {0, 0}},
    };
    static const idle_path paced[] = {
        {{0, 0}, {0, 0}, {0, 0}, {2, -2}, {0, 0}},
    };
    double m = p->micro_batches,
           most = fmax(turn_sum(&p->first), fmax(turn_sum(&p->middle), turn_sum(&p->last)));
    double step = m * turn_sum(&p->mean) +
                  longest_of(in_step, DW_COUNT(in_step), p->stages, &p->mean, p->send, 0);
    double pace = m * most + longest_of(paced, DW_COUNT(paced), p->stages, &p->mean, p->send, 0);
    return fmax(step, pace);
}

/* DualPipe. A rank has two opposite stages, and half of the micro-batches pass it in each direction. In the first
 * list ranks alternate without waiting. In the second each round through all stages waits for its sends. */
static double dualpipe(const dw__pipeline *p) {
    static const idle_path busy[] = {
        {{0.5, -1}, {1, -3}, {-0.5, 0}, {5.5, -10}, {-1, 7.0 / 3}},
        {{1, -2}, {0, 0}, {0, 0}, {4, -5}, {-1, 1}},
        {{0.5, -2}, {1, -2}, {-0.5, 0}, {5.5, -7}, {-1, 4.0 / 3}},
        {{1, -2}, {0.5, -1}, {-0.5, 0}, {5, -6}, {-1, 2.0 / 3}},
        {{0.5, -1}, {0.5, -2}, {0, 0}, {4.5, -9}, {-1, 8.0 / 3}},
        {{0.5, -2}, {0.5, -1}, {0, 0}, {4.5, -6}, {-1, 5.0 / 3}},
        {{0.5, -1}, {0.5, -1}, {-0.5, 0}, {4, -4}, {-0.5, 2.0 / 3}},
        {{0.5, -3}, {1, -2}, {-0.5, 1}, {5.5, -10}, {-1, 2.0 / 3}},
        {{0.5, -1}, {0, 0}, {0, 0}, {3, -3}, {-0.5, 1}},
    };
    static const idle_path waiting[] = {
        {{0.5, -2}, {1, -2}, {-0.5, 0}, {1.5, -7}, {0, -2.0 / 3}},
        {{1, -2}, {0.5, -1}, {-0.5, 0}, {1, -6}, {0, -4.0 / 3}},
        {{0.5, -3}, {1, -2}, {-0.5, 1}, {1.5, -10}, {0, -4.0 / 3}},
        {{1, -2}, {0, 0}, {0, 0}, {0, -5}, {0, -1}},
        {{0.5, -2}, {0.5, -1}, {0, 0}, {0.5, -6}, {0, -1}},
    };
    double m = p->micro_batches, stages = p->stages, between = 2 * turn_sum(&p->middle);
    double mean = turn_sum(&p->mean), pair = turn_sum(&p->first) + turn_sum(&p->last);
    double more = excess(fmax(pair, stages > 2 ? between : 0) - 2 * mean);
    double all = m * mean + m / 2 * more;
    double step = all + longest_of(busy, DW_COUNT(busy), stages, &p->mean, p->send, more);
    double wait = m * mean + 2 * m * (stages - 1) / stages * p->send + m / stages * more +
                  longest_of(waiting, DW_COUNT(waiting), stages, &p->mean, p->send, more);
    return fmax(all, fmax(step, wait));
}

double dw__pipeline_heaviest(const dw__pipeline *p) {
    double ends[2] = {turn_sum(&p->first), turn_sum(&p->last)}, most = fmax(ends[0], ends[1]);
    if (p->schedule == DW_SCHEDULE_DUALPIPE) most = (ends[0] + ends[1]) / 2;
    return p->stages > 2 ? fmax(most, turn_sum(&p->middle)) : most;
}

double dw__pipeline_mean(const dw__pipeline *p) {
    return (turn_sum(&p->first) + turn_sum(&p->last) + (p->stages - 2) * turn_sum(&p->mean)) /
           p->stages;
}

void dw__pipeline_equal(dw__pipeline *p) {
    double n = p->stages, between = n - 2;
#define MEAN(member) ((p->first.member + p->last.member + between * p->mean.member) / n)
    dw__turn mean = {MEAN(forward), MEAN(input), MEAN(weight)};
#undef MEAN
    p->first = p->middle = p->mean = p->last = mean;
    p->heaviest = p->stages > 2 ? p->stages - 2 : 0;
}

/* Backward of inputs releases only attention's scores. All other activations are operands of the weight gradients, or
 * are replaced by the gradient that is the other operand, and stay until these run (Qi et al. 2024, table 1). */
double dw__weight_kept(const dw__planned *planned, dw_recompute recompute) {
    const dw_layout *layout = planned->layout;
    if (!layout->unfused_attention || recompute != DW_RECOMPUTE_NONE) return 1;
    double scores = 5.0 * planned->model->heads / layout->tp * layout->seq_len;
    return 1 - scores / dw__layer_activation_bytes(planned, recompute, 0);
}

void dw__pipeline_finish(const dw__planned *planned, dw__pipeline *p) {
    int stages = p->stages, rest = planned->model->layers % stages;
    const dw_layout *layout = planned->layout;
    int even = layout->first_stage_layers <= 0 && layout->last_stage_layers <= 0;
    p->heaviest = even && rest > 0 && rest < stages - 2 ? rest : stages - 2;
    if (stages == 2) { /* no stage between the ends: use the stage without the head */
        p->middle = p->mean = dw__head_stage(layout) == 0 ? p->last : p->first;
        p->heaviest = 0;
        return;
    }
    double first = dw__stage_layers(planned, 0), last = dw__stage_layers(planned, stages - 1);
    double between = (planned->model->layers - first - last) / (stages - 2);
    double part = between / fmax(1, dw__stage_layers(planned, 1));
    p->mean = (dw__turn){part * p->middle.forward, part * p->middle.input, part * p->middle.weight};
}

double dw__pipeline_seconds(const dw__pipeline *p) {
    if (p->stages == 1) return p->micro_batches * turn_sum(&p->first);
    switch (p->schedule) {
    case DW_SCHEDULE_GPIPE: return all_forward_all_backward(p);
    case DW_SCHEDULE_ZB_H1: return zero_bubble_h(p, p->stages);
    case DW_SCHEDULE_ZB_H2: return zero_bubble_h(p, 2 * p->stages - 1);
    case DW_SCHEDULE_ZB_V: return zero_bubble_v(p);
    case DW_SCHEDULE_DUALPIPE: return dualpipe(p);
    case DW_SCHEDULE_INTERLEAVED:
    default: return p->chunks > 1 ? interleaved(p) : one_forward_one_backward(p);
    }
}
