/* One layer and one micro-batch, forward and backward: kernels, host overhead, and communication inside the layer. */
#include "graph/attention_work.h"
#include "plan/planner_internal.h"
#include <math.h>

double dw__parts_sum(const dw_time_parts *p) {
    return p->gemm + p->attention + p->elementwise + p->quantize + p->launch + p->tensor +
           p->context + p->expert + p->data + p->pipeline + p->offload + p->bubble + p->imbalance +
           p->optimizer + p->other;
}

/* The exchange's kernels take DW__EXCHANGE_SMS of a GPU's SMs. Without overlap all others wait. With overlap, the part
 * that is hidden still takes its SMs from computation. */
static double expert_exposed(const dw__planned *planned) {
    if (planned->overlap == DW__OVERLAP_NONE) return 1;
    const double sm_count = planned->hardware->sm_count.value,
                 taken = sm_count > 0 ? fmin(1, DW__EXCHANGE_SMS / sm_count) : 0,
                 exposed = planned->overlap == DW__OVERLAP_DUALPIPE
                               ? 0
                               : planned->constants->expert_overlapped;
    return exposed + (1 - fmin(1, exposed)) * taken;
}

dw__exposed_parts dw__exposed_parts_of(const dw__planned *planned) {
    const dw__constants *c = planned->constants;
    const dw_layout *layout = planned->layout;
    return (dw__exposed_parts){
        .tensor = layout->overlap_tensor ? c->tensor_exposed : c->tensor_exposed_plain,
        .context = c->context_exposed,
        .expert = expert_exposed(planned),
    };
}

void dw__note_kernel(const dw__planned *planned, const char *name, const char *pass,
                     double operations, double bytes, double seconds, int low) {
    dw__operation_costs *list = planned->operations;
    if (!list || seconds <= 0 || list->count == DW_OPERATIONS_MOST) return;
    list->items[list->count++] = (dw_operation_cost){
        .name = name,
        .pass = pass,
        .low = low,
        .operations = operations,
        .bytes = bytes,
        .seconds = seconds,
    };
}

/* Cost of rounding an operand, relative to one scale per tensor. */
static double quantize_factor(const dw__planned *planned) {
    switch (planned->layout->precision) {
    case DW_SCHEME_FP8_ROW: return planned->constants->quantize_rows;
    case DW_SCHEME_FP8_BLOCK:
    case DW_SCHEME_MXFP8: return planned->constants->quantize_blocks;
    case DW_SCHEME_NVFP4: return planned->constants->quantize_fp4;
    default: return 1;
    }
}

void dw__add_quantization(const dw__planned *planned, double tokens, double in, double out,
                          double groups, dw__layer_time *time) {
    double bytes = planned->constants->quantize_bytes * quantize_factor(planned) * groups;
    double weights =
        bytes * in * out / planned->micro_batches; /* reused by the step's other micro-batches */
    time->forward.quantize += dw__traffic_seconds(planned, bytes * tokens * in + weights);
    time->backward.quantize += dw__traffic_seconds(planned, bytes * tokens * out);
}

void dw__add_linear(const dw__planned *planned, const char *name, double tokens, double in,
                    double out, int low, dw__layer_time *time) {
    double forward = dw__gemm_seconds(planned, tokens, out, in, 1, low);
    double input = dw__gemm_seconds(planned, tokens, in, out, 1, low);
    double weight =
        planned->model->lora_rank ? 0 : dw__gemm_seconds(planned, out, in, tokens, 1, low);
    if (planned->operations) {
        double operations = 2 * tokens * in * out;
        dw__note_kernel(planned, name, "forward", operations,
                        dw__gemm_bytes(planned, tokens, out, in, 1, low), forward, low);
        dw__note_kernel(planned, name, "of inputs", operations,
                        dw__gemm_bytes(planned, tokens, in, out, 1, low), input, low);
        dw__note_kernel(planned, name, "of weights", operations,
                        dw__gemm_bytes(planned, out, in, tokens, 1, low), weight, low);
    }
    time->forward.gemm += forward;
    time->backward.gemm += input + weight;
    time->weight += weight;
    if (low) dw__add_quantization(planned, tokens, in, out, 1, time);
}

/* Elementwise kernels appear in a roofline chart with one operation per BF16 number moved. */
void dw__add_elementwise(const dw__planned *planned, const char *name, double bytes,
                         dw__layer_time *time) {
    double moved = bytes * planned->elementwise, seconds = dw__traffic_seconds(planned, moved);
    dw__note_kernel(planned, name, "forward", moved / 2, moved, seconds, 0);
    time->forward.elementwise += seconds;
    time->backward.elementwise += seconds * planned->constants->elementwise_backward;
}

/* FLOPs of attention's backward relative to its forward. Fused attention recomputes the scores, unfused attention has
 * kept them. */
static double attention_backward(const dw__planned *planned) {
    const dw_model_sizes *model = planned->model;
    double key = model->head_dim + model->rope_dim, value = dw__value_dim(model);
    if (planned->layout->unfused_attention) return 2;
    return dw__attention_flops(1, key, value, true) / dw__attention_flops(1, key, value, false);
}

/* Records the average over all layers: with and without a window, and without attention. */
static void note_attention(const dw__planned *planned, double seconds) {
    if (!planned->operations) return;
    const dw_model_sizes *model = planned->model;
    double heads = (double)model->heads / planned->layout->tp;
    double kv_heads = fmax(model->kv_heads / (double)planned->layout->tp, 1);
    double key = model->head_dim + model->rope_dim, value = dw__value_dim(model);
    double windowed = dw__window_layers(model) / model->layers, span = planned->layout->seq_len;
    double part = dw__attention_part_of_layers(model), tokens = planned->tokens * part;
    double seen = (1 - windowed) * dw__seen_tokens(model, span, 0) +
                  windowed * dw__seen_tokens(model, span, 1);
    double operations = dw__attention_flops(tokens * seen * heads, key, value, false);
    double bytes = 2 * dw__attention_traffic(tokens * heads, tokens * kv_heads, key, value, false);
    if (planned->layout->unfused_attention)
        bytes += planned->constants->attention_scores * tokens * span * heads;
    double more = attention_backward(planned);
    dw__note_kernel(planned, "attention", "forward", operations, bytes, seconds, 0);
    dw__note_kernel(planned, "attention", "backward", more * operations, 2 * bytes, more * seconds,
                    0);
}

static void attention(const dw__planned *planned, dw__layer_time *time) {
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    double t = planned->tokens * planned->attended, h = model->hidden, tp = planned->atp;
    double heads = model->heads / tp, d = model->head_dim, v = dw__value_dim(model);
    double kv_heads = model->kv_heads / tp < 1 ? 1 : model->kv_heads / tp;
    if (model->kv_rank) {
        double query = heads * (d + model->rope_dim);
        if (model->q_rank)
            dw__add_linear(planned, "query down", t, h, model->q_rank, planned->low, time);
        dw__add_linear(planned, "query up", t, model->q_rank ? model->q_rank : h, query,
                       planned->low, time);
        dw__add_linear(planned, "key, value down", t, h, model->kv_rank + model->rope_dim,
                       planned->low, time);
        dw__add_linear(planned, "key, value up", t, model->kv_rank, heads * (d + v), planned->low,
                       time);
    } else {
        dw__add_linear(planned, "query, key, value", t, h, heads * d + kv_heads * (d + v),
                       planned->low, time);
    }
    dw__add_linear(planned, "attention output", t, heads * v, h, planned->low, time);
    dw__add_elementwise(planned, "positions", 4 * t * (heads * d + kv_heads * d), time);

    double windowed = dw__window_layers(model) / model->layers;
    double seconds = (1 - windowed) * dw__attention_forward_seconds(planned, 0) +
                     (windowed > 0 ? windowed * dw__attention_forward_seconds(planned, 1) : 0);
    seconds *= dw__attention_part_of_layers(model);
    note_attention(planned, seconds);
    time->forward.attention += seconds;
    time->backward.attention += seconds * attention_backward(planned);

    if (layout->cp > 1) {
        double bytes = t * layout->cp * kv_heads * (d + v) * 2;
        double gather = dw__gather_seconds(planned, bytes, layout->cp, layout->tp, 1);
        double exposed = dw__exposed_parts_of(planned).context;
        time->forward.context += gather * exposed;
        time->backward.context += 2 * gather * exposed;
    }
}

void dw__add_dense_mlp(const dw__planned *planned, double width, double tp, dw__layer_time *time) {
    double t = planned->tokens, h = planned->model->hidden, up = planned->model->gated ? 2 : 1;
    dw__add_linear(planned, "MLP up", t, h, up * width / tp, planned->low, time);
    dw__add_linear(planned, "MLP down", t, width / tp, h, planned->low, time);
    dw__add_elementwise(planned, "activation",
                        planned->constants->elementwise_ffn * t * (up + 1) / 2 * width / tp, time);
}

/* Adds `gathers` gathers or reductions of `tokens` over `ranks`, in forward and as many in backward. */
static void tensor_traffic(const dw__planned *planned, double gathers, double tokens, int ranks,
                           dw__layer_time *time) {
    if (ranks <= 1) return;
    double exposed = dw__exposed_parts_of(planned).tensor;
    double bytes = tokens * planned->model->hidden * 2;
    double seconds = gathers * exposed * dw__gather_seconds(planned, bytes, ranks, 1, 1);
    time->forward.tensor += seconds;
    time->backward.tensor += seconds;
}

/* The GPU waits if the host needs longer to launch a layer than the GPU to compute it. Near equality both effects
 * occur, so the excess is the 4-norm of the two times minus the GPU's. */
static void launches(double host, dw__layer_time *time) {
    double part[2] = {dw__parts_sum(&time->forward), dw__parts_sum(&time->backward)};
    double hosts[2] = {host / 3, host * 2 / 3};
    double excess[2];
    for (int at = 0; at < 2; at++) {
        double high = part[at] > hosts[at] ? part[at] : hosts[at], a = part[at] / high,
               b = hosts[at] / high;
        excess[at] = high * sqrt(sqrt(a * a * a * a + b * b * b * b)) - part[at];
    }
    time->forward.launch += excess[0];
    time->backward.launch += excess[1];
}

static double host_seconds(const dw__planned *planned, dw__layer_kind kind) {
    const dw__constants *c = planned->constants;
    const dw_layout *layout = planned->layout;
    double host = c->host_eager;
    if (layout->framework == DW_FRAMEWORK_MEGATRON || layout->framework == DW_FRAMEWORK_MEGATRON_LM)
        host = c->host_fused;
    if (layout->compiled) host = c->host_compiled;
    if (dw__runs_as_graphs(planned)) host *= c->host_graphs;
    if (kind == DW__LAYER_MOE) host += dw__mixture_host_seconds(planned);
    return layout->framework == DW_FRAMEWORK_OWN ? host * c->host_own : host;
}

static void scale(dw_time_parts *parts, double linear) {
    parts->gemm *= linear;
    parts->quantize *= linear;
}

void dw__attention_part(const dw__planned *planned, dw__layer_time *time) {
    const dw_layout *layout = planned->layout;
    double t = planned->tokens, h = planned->model->hidden;
    *time = (dw__layer_time){0};
    attention(planned, time);
    tensor_traffic(planned, 2, t * planned->attended, (int)planned->atp, time);
    double cut = layout->sequence_parallel ? layout->tp : 1;
    dw__add_elementwise(planned, "norms, residuals",
                        planned->constants->elementwise_hidden * t * h / cut, time);
}

void dw__head_seconds(const dw__planned *planned, dw__layer_time *time) {
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    double t = planned->tokens, h = model->hidden;
    *time = (dw__layer_time){0};
    /* The head's GEMMs run in BF16 in every precision. */
    dw__add_linear(planned, "head", t, h, (double)model->vocabulary / layout->tp, 0, time);
    /* This library's engine reads the logits once for the loss, and in backward reads them and writes their gradients in
     * their place (linear_cross_entropy.c), all in 16 bits. */
    enum { OWN_BYTES = 6 };
    double each =
        layout->framework == DW_FRAMEWORK_OWN ? OWN_BYTES : planned->constants->logit_bytes;
    double bytes = each * t * model->vocabulary / layout->tp;
    double seconds = dw__traffic_seconds(planned, bytes);
    dw__note_kernel(planned, "loss", "both", bytes / 2, bytes, seconds, 0);
    time->forward.elementwise += seconds / 3;
    time->backward.elementwise += seconds * 2 / 3;
    tensor_traffic(planned, 1, t, layout->tp, time);
}

void dw__layer_seconds(const dw__planned *planned, dw__layer_kind kind,
                       const dw__layer_time *attention_part, dw__layer_time *time) {
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    *time = *attention_part;
    if (kind == DW__LAYER_MOE) {
        dw__add_mixture(planned, time);
        int whole = (planned->etp > 1 && layout->ep == 1) || model->shared_ffn;
        if (whole) tensor_traffic(planned, 2, planned->tokens, layout->tp, time);
    } else {
        dw__add_dense_mlp(planned, model->ffn, layout->tp, time);
        tensor_traffic(planned, 2, planned->tokens, layout->tp, time);
    }
    scale(&time->forward, planned->linear_scale);
    scale(&time->backward, planned->linear_scale);
    time->weight *= planned->linear_scale;
    launches(host_seconds(planned, kind), time);
}
