/* Pipelines: how layers are dealt to stages, and how long stages wait for each other. */
#include "plan/planner_internal.h"
#include <math.h>

/* Idle part with F = Bx = W = 1: forward, backward of inputs, backward of weights. 1F1B and GPipe: Huang et al. 2019;
 * interleaved: Narayanan et al. 2021; ZB: Qi et al. 2024, table 2; DualPipe: DeepSeek-V3 report, table 2. */
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

/* Remainders go to the stages after the first: the ends have the vocabulary. */
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
        /* Blocks are dealt by their cost, the head's among them, and the first stages are filled to the brim. */
        double head =
            dw__embedding_parameters(planned->model) /
            (dw__attention_parameters(planned->model) + dw__dense_mlp_parameters(planned->model));
        double each = ceil((layers + head) / stages), left = layers - stage * each;
        return left < 0 ? 0 : left < each ? left : each;
    }
    int even = layers / stages, rest = layers % stages;
    return even + (stage >= 1 && stage <= rest ? 1 : 0);
}

/* Elements on one rank, experts apart: they have ranks of their own. */
double dw__stage_parameters(const dw__planned *planned, int stage, double *experts) {
    const dw_planner_model *model = planned->model;
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
