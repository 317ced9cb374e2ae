/* Seconds of single kernels: GEMMs, attention, and traffic through the GPU's memory. */
#include "graph/attention_work.h"
#include "plan/planner_internal.h"
#include <math.h>

double dw__reached(const dw_figure *figure, double part) {
    return figure->kind == DW_FIGURE_MEASURED ? figure->value : figure->value * part;
}

static double ceiling(double value, double step) { return ceil(value / step); }

double dw__gemm_bytes(const dw__planned *planned, double m, double n, double k, double groups,
                      int low) {
    double width = low ? planned->rate == DW_RATE_FP4 ? 0.5625 : 1 : 2;
    return groups * ((m * k + k * n) * width + 2 * m * n);
}

double dw__gemm_part(const dw__constants *c, int capability) {
    if (capability == 80) return c->gemm_sm80;
    if (capability == 90) return c->gemm_sm90;
    if (capability >= 100 && capability < 120) return c->gemm_sm100;
    return capability == 0 ? c->gemm_amd : c->gemm_other;
}

/* The model has three effects: waves of tiles over the SMs, a prologue that short inner dimensions cannot hide, and the
 * operands' traffic from memory. */
double dw__gemm_model(const dw__constants *c, const dw__gemm_machine *machine, double m, double n,
                      double k, double groups, double bytes) {
    double tile = machine->capability >= 90 ? 256 : 128;
    double tiles = groups * ceiling(m, 128) * ceiling(n, tile);
    double waves = tiles / machine->sm_count;
    /* A partial wave costs most in small GEMMs and vanishes in large ones. */
    double busy = waves / (waves + c->gemm_wave) * k / (k + machine->depth);
    double compute = 2 * groups * m * n * k / (machine->rate * busy);
    double traffic = bytes / machine->bandwidth;
    return sqrt(compute * compute + traffic * traffic) + c->gemm_gap;
}

double dw__gemm_seconds_of_bytes(const dw__planned *planned, double m, double n, double k,
                                 double groups, int low, double bytes) {
    if (m <= 0 || n <= 0 || k <= 0) return 0;
    const dw__constants *c = planned->constants;
    const dw_hardware *hardware = planned->hardware;
    double part = planned->gemm_part;
    if (low) part *= planned->rate == DW_RATE_FP4 ? c->gemm_fp4 : c->gemm_fp8;
    double rate = dw__reached(&hardware->rate[low ? planned->rate : DW_RATE_BF16], part);
    if (groups > 1) rate *= c->gemm_grouped;
    const dw__gemm_machine machine = {
        .capability = hardware->capability,
        .sm_count = hardware->sm_count.value,
        .rate = rate,
        .bandwidth = dw__reached(&hardware->memory_bandwidth, c->memory_efficiency),
        .depth = c->gemm_depth * (low ? 2 : 1)};
    return dw__gemm_model(c, &machine, m, n, k, groups, bytes);
}

double dw__gemm_seconds(const dw__planned *planned, double m, double n, double k, double groups,
                        int low) {
    return dw__gemm_seconds_of_bytes(planned, m, n, k, groups, low,
                                     dw__gemm_bytes(planned, m, n, k, groups, low));
}

double dw__own_grouped_seconds(const dw__planned *planned, const dw__tile_work *work,
                               double bytes) {
    if (work->m <= 0 || work->n <= 0 || work->k <= 0) return 0;
    const dw__constants *c = planned->constants;
    const dw_hardware *hardware = planned->hardware;
    const double sm_count = hardware->sm_count.value,
                 rate =
                     dw__reached(&hardware->rate[DW_RATE_BF16], c->gemm_own * planned->power_held),
                 clock = rate / (DW__SM90_FLOPS_PER_CLOCK * sm_count);
    const double compute = dw__sm90_tile_choice(work, sm_count).clocks / clock,
                 traffic = dw__traffic_seconds(planned, bytes);
    return sqrt(compute * compute + traffic * traffic) + c->gemm_gap;
}

double dw__traffic_seconds(const dw__planned *planned, double bytes) {
    return bytes /
           dw__reached(&planned->hardware->memory_bandwidth, planned->constants->memory_efficiency);
}

/* Forward of one layer's attention on one rank. */
double dw__attention_forward_seconds(const dw__planned *planned, int windowed) {
    const dw__constants *c = planned->constants;
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    double heads = (double)model->heads / layout->tp;
    double key = model->head_dim + model->rope_dim, value = dw__value_dim(model);
    double span = layout->seq_len;
    if (layout->unfused_attention) {
        double scores = planned->tokens * span * heads;
        double gemms =
            dw__attention_flops(scores, key, value, false) /
            (dw__reached(&planned->hardware->rate[DW_RATE_BF16], planned->gemm_part) * 0.5);
        return gemms + dw__traffic_seconds(planned, scores * c->attention_scores);
    }
    double pairs = planned->tokens * dw__seen_tokens(model, span, windowed) * heads;
    double part = planned->attention_part * span / (span + c->attention_length);
    /* Kernels with narrow heads are bound by the exponentials: at head size 64, half of the work takes as long. */
    double narrow = key + value < 256 ? sqrt((key + value) / 256) : 1;
    return dw__attention_flops(pairs, key, value, false) /
               (planned->attention_rate * part * narrow) +
           c->gemm_gap;
}
