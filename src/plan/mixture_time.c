/* A mixture of experts in one layer and one micro-batch: router, order of the tokens, experts' GEMMs, exchange between
 * ranks, and the host's launches. docs/planner.md has the formulas and their sources. */
#include "common/gemm_groups.h"
#include "plan/planner_internal.h"
#include <math.h>

/* The experts of one rank. */
typedef struct experts {
    double own;    /* experts on the rank */
    double rows;   /* tokens times chosen experts that the busiest rank multiplies */
    double hidden; /* width of the model */
    double width;  /* inner width of an expert on the rank */
    double up;     /* matrices of that width before the activation: 2 with a gate */
    int low;       /* 1: operands are quantized */
} experts;

double dw__expert_load(const dw__planned *planned) {
    const dw_layout *layout = planned->layout;
    const double ranks = layout->ep;
    if (layout->expert_load > 0) return layout->expert_load / 100.0;
    if (!planned->model->experts || ranks < 2 || layout->padded_experts) return 1;
    const double rows = planned->tokens * planned->model->top_k * planned->etp / layout->tp;
    return 1 + sqrt(2 * log(ranks) * (1 - 1 / ranks) / rows);
}

/* This library's engine multiplies experts in 16 bits. Their codes of FP8, which no GPU has multiplied yet, are planned
 * as if they were 16 bits. */
static experts experts_of(const dw__planned *planned) {
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    return (experts){
        .own = (double)model->experts / layout->ep,
        .rows = planned->tokens * model->top_k * planned->etp / layout->tp * planned->expert_load,
        .hidden = model->hidden,
        .width = model->expert_ffn / planned->etp,
        .up = model->gated ? 2 : 1,
        .low = planned->low && layout->framework != DW_FRAMEWORK_OWN,
    };
}

/* ---- grouped GEMMs ---- */

/* Bytes of each expert's gradient: it is written, and with several micro-batches also read to be added to. The other
 * operands are read once. */
static double weight_gradient_bytes(const dw__planned *planned, const experts *e, double in,
                                    double out) {
    double each = dw__element_bytes_of(planned->layout).gradient, width = e->low ? 1 : 2;
    if (planned->layout->framework == DW_FRAMEWORK_OWN && planned->layout->parameter_bytes != 2)
        each = 2; /* of parameters cast to 16 bits; the cast back is the optimizer's */
    if (each > 4) each = 4;
    double passes = planned->micro_batches > 1 ? 2 : 1;
    return e->rows * (in + out) * width + passes * each * e->own * in * out;
}

static double rows_seconds(const dw__planned *planned, const experts *e, double in, double out) {
    if (planned->own_on_hopper) {
        const dw__tile_work work = {.groups_kind = DW_GROUPS_ROWS,
                                    .m = e->rows,
                                    .n = out,
                                    .k = in,
                                    .groups = e->own,
                                    .element_bytes = 2};
        return dw__own_grouped_seconds(
            planned, &work, dw__gemm_bytes(planned, e->rows / e->own, out, in, e->own, 0));
    }
    return dw__gemm_seconds(planned, e->rows / e->own, out, in, e->own, e->low);
}

static double weights_seconds(const dw__planned *planned, const experts *e, double in, double out) {
    const double bytes = weight_gradient_bytes(planned, e, in, out);
    if (planned->own_on_hopper) {
        const dw__tile_work work = {.groups_kind = DW_GROUPS_CONTRACTION,
                                    .m = out,
                                    .n = in,
                                    .k = e->rows,
                                    .groups = e->own,
                                    .element_bytes = 2};
        return dw__own_grouped_seconds(planned, &work, bytes);
    }
    return dw__gemm_seconds_of_bytes(planned, out, in, e->rows / e->own, e->own, e->low, bytes);
}

static void add_experts_linear(const dw__planned *planned, const experts *e, const char *name,
                               double in, double out, dw__layer_time *time) {
    const double forward = rows_seconds(planned, e, in, out),
                 input = rows_seconds(planned, e, out, in),
                 weight = planned->model->lora_rank ? 0 : weights_seconds(planned, e, in, out);
    if (planned->operations) {
        const double operations = 2 * e->rows * in * out, each = e->rows / e->own;
        dw__note_kernel(planned, name, "forward", operations,
                        dw__gemm_bytes(planned, each, out, in, e->own, e->low), forward, e->low);
        dw__note_kernel(planned, name, "of inputs", operations,
                        dw__gemm_bytes(planned, each, in, out, e->own, e->low), input, e->low);
        dw__note_kernel(planned, name, "of weights", operations,
                        weight_gradient_bytes(planned, e, in, out), weight, e->low);
    }
    time->forward.gemm += forward;
    time->backward.gemm += input + weight;
    time->weight += weight;
    if (e->low) dw__add_quantization(planned, e->rows / e->own, in, out, e->own, time);
}

/* ---- traffic around the GEMMs ---- */

static void add_traffic(const dw__planned *planned, const char *name, double forward,
                        double backward, double kernels, dw__layer_time *time) {
    const double gaps = kernels * planned->constants->gemm_gap,
                 seconds[2] = {dw__traffic_seconds(planned, forward) + gaps,
                               dw__traffic_seconds(planned, backward) + gaps};
    dw__note_kernel(planned, name, "forward", forward / 2, forward, seconds[0], 0);
    dw__note_kernel(planned, name, "backward", backward / 2, backward, seconds[1], 0);
    time->forward.elementwise += seconds[0];
    time->backward.elementwise += seconds[1];
}

/* This library's engine, whose kernels are known: bytes as their operations in the graph have them
 * (op_expand_groups.c). A token's row is read or written once; the row of each choice once. */
static void add_own_traffic(const dw__planned *planned, const experts *e, dw__layer_time *time) {
    const double row = 2 * e->rows * e->hidden, token = row / planned->model->top_k;
    /* Forward spreads rows and combines them. Backward combines the gradients of spread rows; the gradient of combined
     * rows reads the rows too, for the gradient of the weights. */
    add_traffic(planned, "order of tokens", 2 * (row + token), (row + token) + (2 * row + token), 2,
                time);
    /* The activation reads gate and up and writes one product. Backward reads these and writes two gradients, which a
     * copy joins into one matrix. */
    const double inner = 2 * e->rows * e->width, joined = e->up > 1 ? 2 * e->up * inner : 0;
    add_traffic(planned, "activation", (e->up + 1) * inner, (2 * e->up + 1) * inner + joined, 1,
                time);
    /* Scores in FP32 from 16 bits, top-k, and the sort of choices by expert: 4-byte keys, places and weights, each
     * written and read. */
    const double scores = planned->tokens * planned->model->experts, choices = 24 * e->rows;
    add_traffic(planned, "router's choice", 10 * scores + choices, 14 * scores + choices, 6, time);
}

/* Transformer Engine and Megatron launch kernels for each expert; others have grouped GEMMs. */
static int launches_each_expert(const dw_layout *layout) {
    return layout->framework == DW_FRAMEWORK_MEGATRON ||
           layout->framework == DW_FRAMEWORK_MEGATRON_LM;
}

/* Other frameworks: bytes of each element of a row that they permute. A dispatcher that sends a token once to each rank
 * spreads it there while it is received, and adds the experts' results before they are sent back: of the passes to sort
 * rows by rank and then by expert, and back, only those by expert remain. */
static void add_traffic_of_framework(const dw__planned *planned, const experts *e,
                                     dw__layer_time *time) {
    const dw__constants *c = planned->constants;
    const double permuted = c->permute_bytes * (planned->layout->dispatch_once ? 0.5 : 1);
    dw__add_elementwise(planned, "activation and order of tokens",
                        c->elementwise_ffn * e->rows * (e->up + 1) / 2 * e->width +
                            permuted * e->rows * e->hidden,
                        time);
    if (!planned->model->expert_bias || !launches_each_expert(planned->layout)) return;
    /* Megatron adds the second matrix's bias, times the router's weight in FP32, expert by expert: a product, a sum, a
     * concatenation and a cast in forward; a cast to FP32 and back, and a product and a sum each for the gradients of
     * bias and weight. The first bias is part of its GEMM, and its gradient reads the GEMM's gradient once more. */
    const double forward = 4 + (2 + 4 + 4) + (4 + 4) + (4 + 2),
                 backward = (2 + 4) + (4 + 2) + (2 + 2) + 2 * (4 + 4 + 4);
    add_traffic(planned, "experts' biases", forward * e->rows * e->hidden,
                e->rows * (backward * e->hidden + 2 * e->up * e->width), 0, time);
}

/* Each rank sends the tokens that it routed. Ranks that share an expert then gather them from each other. */
static void add_exchange(const dw__planned *planned, const experts *e, dw__layer_time *time) {
    const dw_layout *layout = planned->layout;
    const double exposed = dw__exposed_parts_of(planned).expert, bytes = e->rows * e->hidden * 2;
    double exchange = 2 * exposed *
                      dw__exchange_seconds(planned, bytes / planned->etp, layout->ep,
                                           (int)planned->etp, planned->model->top_k);
    if (layout->ep > 1)
        exchange += 2 * exposed * dw__gather_seconds(planned, bytes, (int)planned->etp, 1, 1);
    time->forward.expert += exchange;
    time->backward.expert += exchange;
}

void dw__add_mixture(const dw__planned *planned, dw__layer_time *time) {
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    const experts e = experts_of(planned);
    add_experts_linear(planned, &e, "experts up", e.hidden, e.up * e.width, time);
    add_experts_linear(planned, &e, "experts down", e.width, e.hidden, time);
    if (planned->own_on_hopper)
        add_own_traffic(planned, &e, time);
    else
        add_traffic_of_framework(planned, &e, time);
    dw__add_linear(planned, "router", planned->tokens / layout->tp, e.hidden, model->experts, 0,
                   time);
    if (model->shared_ffn) dw__add_dense_mlp(planned, model->shared_ffn, layout->tp, time);
    add_exchange(planned, &e, time);
}

/* ---- the host ---- */

int dw__runs_as_graphs(const dw__planned *planned) {
    const dw_layout *layout = planned->layout;
    return layout->cuda_graphs || layout->framework == DW_FRAMEWORK_JAX || planned->own_on_hopper;
}

/* Transformer Engine launches a GEMM for each expert, and rounds each expert's operands by launches of their own. CUDA
 * graphs need sizes that do not change from step to step: they leave out experts unless these are padded to a capacity,
 * or their sizes stay on the GPU as in this library's engine and in XLA's program. */
double dw__mixture_host_seconds(const dw__planned *planned) {
    const dw__constants *c = planned->constants;
    const dw_layout *layout = planned->layout;
    const experts e = experts_of(planned);
    double host = c->host_experts;
    if (launches_each_expert(layout)) host += e.own * (e.low ? c->host_expert_low : c->host_expert);
    const int inside =
        layout->padded_experts || layout->framework == DW_FRAMEWORK_JAX || planned->own_on_hopper;
    return inside && dw__runs_as_graphs(planned) ? host * c->host_graphs : host;
}
