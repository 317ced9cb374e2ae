/* Bytes on one rank of a stage: what is held between steps, what a micro-batch keeps from forward to backward, and how
 * many micro-batches are in flight. Activations are counted tensor by tensor (Korthikanti et al. 2022, whose
 * s b h (34 + 5 a s / h) comes out for an unfused GPT with dropout). */
#include "plan/planner_internal.h"
#include <math.h>

typedef struct habit {
    double parameter, gradient, optimizer; /* bytes of one element */
    double
        logit; /* of one logit: the head's output, its FP32 copy, the loss's gradient, what is in flight between */
    int eager; /* every step of the MLP's gate is kept: two products, the activation, their product */
} habit;

/* Megatron: BF16 parameters, FP32 gradients, FP32 copy and AdamW's two averages. DeepSpeed: gradients of the
 * parameters' type, and so who builds on PyTorch with ZeRO-1. FSDP: everything in FP32, cast as it is used. The
 * loss of Megatron is fused and in place; PyTorch's keeps logits in BF16 and FP32, the logarithms of the softmax,
 * and the gradient. */
static const habit *habit_of(const dw_layout *layout) {
    static const habit habits[DW_FRAMEWORKS] = {
        [DW_FRAMEWORK_OWN] = {4, 4, 8, 1, 0},
        [DW_FRAMEWORK_MEGATRON] = {2, 4, 12, 6, 0},
        [DW_FRAMEWORK_MEGATRON_LM] = {2, 4, 12, 10, 0},
        [DW_FRAMEWORK_TORCHTITAN] = {4, 4, 8, 12, 0},
        [DW_FRAMEWORK_FSDP] = {4, 4, 8, 6, 1},
        [DW_FRAMEWORK_DEEPSPEED] = {2, 2, 12, 12, 1},
        [DW_FRAMEWORK_NANOTRON] = {2, 6, 12, 14, 1},
        [DW_FRAMEWORK_JAX] = {4, 4, 8, 8, 0},
        [DW_FRAMEWORK_PYTORCH] = {2, 2, 12, 12, 1},
    };
    return &habits[layout->framework];
}

/* What a layout says of an element, else the habit. */
dw__element_bytes dw__element_bytes_of(const dw_layout *layout) {
    const habit *bytes = habit_of(layout);
    return (dw__element_bytes){layout->parameter_bytes ? layout->parameter_bytes : bytes->parameter,
                               layout->gradient_bytes ? layout->gradient_bytes : bytes->gradient,
                               layout->optimizer_bytes ? layout->optimizer_bytes
                                                       : bytes->optimizer};
}

/* One token through one layer. */
double dw__layer_activation_bytes(const dw__planned *planned, dw_recompute recompute, int moe) {
    const dw_planner_model *model = planned->model;
    const dw_layout *layout = planned->layout;
    double h = model->hidden, tp = layout->tp, cut = layout->sequence_parallel ? tp : 1;
    double heads = model->heads / tp, d = model->head_dim + model->rope_dim;
    double v = model->value_dim ? model->value_dim : model->head_dim;
    double kv = model->kv_heads / tp < 1 ? 1 : model->kv_heads / tp;
    double operand = planned->low ? 1 : 2,
           up = model->gated ? 2 : 1; /* what a product keeps of its input */
    int old = layout->framework == DW_FRAMEWORK_MEGATRON_LM;
    if (recompute == DW_RECOMPUTE_FULL) return 2 * h / cut;
    int selective = recompute == DW_RECOMPUTE_SELECTIVE;

    double norms = (4 + (selective && !old ? 0 : 2 * operand) + (old ? 2 : 0)) * h / cut;
    /* Without a pipeline nanotron keeps what tensor parallelism gathered; Megatron gathers again. */
    if (layout->framework == DW_FRAMEWORK_NANOTRON && layout->pp == 1)
        norms += 4 * h * (1 - 1 / cut);
    double attention = 2 * heads * d + 2 * kv * (d + v) + 2 * heads * v + 4 * heads;
    if (planned->low) attention += heads * v;
    if (model->kv_rank) {
        double latent = (2 + operand) * (model->q_rank + model->kv_rank);
        /* Recomputed from the latent vectors: queries, keys and values. */
        attention = selective ? latent + 2 * heads * v + 4 * heads : attention + latent;
    }
    if (layout->unfused_attention && !selective) attention += 5 * heads * layout->seq_len;
    double inner = 2 * up + (selective && !old ? 0 : operand);
    if (habit_of(layout)->eager && model->gated && !selective) inner += 2;
    if (selective && layout->framework == DW_FRAMEWORK_TORCHTITAN) {
        /* The layer's input, attention's output, and the results of every second product. */
        double width = model->top_k
                           ? moe ? model->top_k * model->expert_ffn + model->shared_ffn : model->ffn
                           : model->ffn;
        double results = (heads * d + 2 * kv * d + 2 * h / cut) * 2 + 2 * up * width / tp;
        return 2 * h / cut + 2 * heads * v + 4 * heads + results / 2;
    }
    double mlp;
    if (moe) {
        double routed = model->top_k * planned->etp / tp;
        mlp = routed * (operand * h + inner * model->expert_ffn / planned->etp +
                        (selective ? 0 : 2 * h)) +
              inner * model->shared_ffn / tp + 4.0 * model->experts / tp;
    } else {
        mlp = inner * model->ffn / tp;
    }
    return norms + attention + mlp;
}

/* Micro-batches whose activations a stage holds at once, in units of all its layers. */
static double in_flight(const dw__planned *planned, int stage) {
    const dw_layout *layout = planned->layout;
    double p = layout->pp, v = layout->virtual_stages, m = planned->micro_batches, held = p - stage;
    if (p == 1) return 1;
    switch (layout->schedule) {
    case DW_SCHEDULE_GPIPE: held = m; break;
    case DW_SCHEDULE_ZB_H1: held = p; break;
    case DW_SCHEDULE_ZB_H2: held = 2 * p - 1; break;
    case DW_SCHEDULE_ZB_V: held = p; break;
    case DW_SCHEDULE_DUALPIPE: held = p + 1; break;
    default:
        if (v > 1) held = (2 * (p - stage - 1) + (v - 1) * p + 1) / v;
    }
    return held < m ? held : m;
}

/* Reserved by PyTorch's allocator and of no use to it: blocks of sizes that do not come again. */
double dw__fragments(const dw__planned *planned, const dw_memory_parts *memory) {
    double part = 0.05;
    if (planned->layout->framework == DW_FRAMEWORK_OWN) part = 0;
    if (planned->layout->framework == DW_FRAMEWORK_MEGATRON_LM)
        part = 0.10; /* PyTorch 1.x: no expandable blocks */
    return part * (memory->activations + memory->workspace);
}

/* Communicators, each with buffers of its own. */
static int groups_of(const dw_layout *layout) {
    return (layout->tp > 1) + (layout->pp > 1) + (layout->cp > 1) + (layout->ep > 1) +
           (layout->dp > 1);
}

void dw__activation_bytes_of(const dw__planned *planned, dw_recompute recompute,
                             int recompute_layers, int stage, dw__activation_bytes *bytes) {
    const dw_planner_model *model = planned->model;
    const dw_layout *layout = planned->layout;
    double layers = dw__stage_layers(planned, stage);
    double part = (double)dw__moe_layers(model) / model->layers, t = planned->tokens;
    double kept[2], full = dw__layer_activation_bytes(planned, DW_RECOMPUTE_FULL, 0);
    for (int mode = 0; mode < 2; mode++) {
        dw_recompute how = mode ? recompute : DW_RECOMPUTE_NONE;
        kept[mode] = (1 - part) * dw__layer_activation_bytes(planned, how, 0) +
                     (part > 0 ? part * dw__layer_activation_bytes(planned, how, 1) : 0);
    }
    double again =
        recompute == DW_RECOMPUTE_FULL ? (recompute_layers > 0 ? recompute_layers : layers) : 0;
    if (again > layers) again = layers;
    double rest = recompute == DW_RECOMPUTE_FULL ? kept[0] : kept[1];
    double offloaded = layout->offload_layers > layers ? layers : layout->offload_layers;
    *bytes = (dw__activation_bytes){.kept = t * (again * full + (layers - again) * rest),
                                    .again = again > 0 ? t * kept[0] : 0};
    if (layers > 0 && offloaded > 0) {
        double each = bytes->kept / layers;
        bytes->moved = offloaded * each;
        bytes->kept -= bytes->moved;
        /* The first layers leave; when the last ones are at work, these are gone. Where nothing else stays, the layer
         * at work and the one on its way do. */
        double both = offloaded > 2 ? 2 : offloaded, rest = layers - offloaded;
        bytes->staged = both > rest ? each * (both - rest) : 0;
    }
    if (stage == dw__head_stage(layout))
        bytes->logits =
            t * model->vocabulary / layout->tp * habit_of(layout)->logit + t * 4 * model->hidden;
}

void dw__memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers, int stage,
                dw_memory_parts *memory) {
    const dw_planner_model *model = planned->model;
    const dw_layout *layout = planned->layout;
    const double gib = 1024.0 * 1024.0 * 1024.0;
    dw__element_bytes bytes = dw__element_bytes_of(layout);
    double experts, dense = dw__stage_parameters(planned, stage, &experts);
    if (layout->schedule == DW_SCHEDULE_DUALPIPE && layout->pp > 1) dense *= 2, experts *= 2;
    double trained = dw__trained_part(model);
    double ranks = (double)layout->dp * layout->cp;
    double expert_ranks = ranks * layout->tp / (layout->ep * planned->etp);
    if (expert_ranks < 1) expert_ranks = 1;
    double shard = planned->shard;
    double expert_shard = shard < expert_ranks ? shard : expert_ranks;
    int zero = layout->zero_stage;
    if (zero < 1) shard = expert_shard = 1;
    double whole = dense + experts, cut = dense / shard + experts / expert_shard;
    memory->parameters = bytes.parameter * (zero >= 3 ? cut : whole);
    memory->gradients = bytes.gradient * (zero >= 2 ? cut : whole) * trained;
    memory->optimizer = bytes.optimizer * cut * trained;
    /* Frozen weights need no second copy, and are kept in the format that they are multiplied in. */
    if (model->lora_rank) memory->parameters = (planned->low ? 1 : 2) * (zero >= 3 ? cut : whole);
    if (layout->offload_optimizer) memory->optimizer = 0;

    dw__activation_bytes activations;
    dw__activation_bytes_of(planned, recompute, recompute_layers, stage, &activations);
    memory->activations =
        activations.kept * in_flight(planned, stage) + activations.staged + activations.again;
    /* What tensor parallelism gathers: a product's whole input, its gradient, and one on the way. */
    double gathered_inputs = layout->tp > 1 ? 3 * 2.0 * planned->tokens * model->hidden : 0;
    memory->workspace = gathered_inputs + activations.logits;
    double layers = dw__stage_layers(planned, stage),
           table = dw__embedding_parameters(model) / layout->tp;
    if (zero >= 3) { /* two layers gathered, one layer's gradients whole; the table by itself */
        double layer = (whole - (stage == 0 ? table : 0)) / (layers > 1 ? layers : 1);
        double gathered = layer * (2 * 2 + 4);
        if (!layout->reshard) gathered += 2 * (whole - layer);
        /* In a pipeline parameters stay gathered and gradients whole until the last micro-batch. */
        if (layout->pp > 1 && layout->reshard) gathered += (2 + 4) * (whole - layer);
        /* The root's tables stay gathered from forward on; one has its gradient whole. */
        double tables = table * ((model->tied || layout->pp > 1 ? 2 : 4) + 4);
        memory->workspace += gathered > tables ? gathered : tables;
    }
    memory->overhead = dw__fragments(planned, memory) + 1.0 * gib + 0.4 * gib * groups_of(layout);
}

void dw__host_memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers,
                     int stage, double *optimizer, double *activations) {
    const dw_layout *layout = planned->layout;
    dw__activation_bytes bytes;
    *optimizer = *activations = 0;
    if (layout->offload_optimizer) {
        /* States without an FP32 copy of the parameters need one there. */
        double states = dw__element_bytes_of(layout).optimizer;
        int twice = layout->schedule == DW_SCHEDULE_DUALPIPE && layout->pp > 1;
        *optimizer = dw__optimizer_elements(planned, stage) * (twice ? 2 : 1) *
                     (states < 12 ? states + 4 : states);
    }
    if (layout->offload_layers > 0) {
        dw__activation_bytes_of(planned, recompute, recompute_layers, stage, &bytes);
        *activations = bytes.moved * in_flight(planned, stage);
    }
}
