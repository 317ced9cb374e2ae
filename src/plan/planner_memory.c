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
    double
        logit_cut; /* of one logit that tensor parallelism cuts, where that is another loss; 0: logit */
    double logit_held; /* of one logit: freed blocks that are too small for what comes after */
} habit;

/* Megatron: BF16 parameters, FP32 gradients, FP32 copy and AdamW's two averages. DeepSpeed: gradients of the
 * parameters' type, and so who builds on PyTorch with ZeRO-1. FSDP: everything in FP32, cast as it is used. The
 * loss of Megatron is fused and in place; PyTorch's keeps logits in BF16 and FP32, the logarithms of the softmax,
 * and the gradient. Cut logits have DTensor's loss under torchtitan, whose backward holds four FP32 arrays at once
 * (logarithms, zeros with the targets, exponentials, their sum); the block of BF16 logits serves none of them. */
static const habit *habit_of(const dw_layout *layout) {
    static const habit habits[DW_FRAMEWORKS] = {
        [DW_FRAMEWORK_OWN] = {4, 4, 8, 1, 0, 0, 0},
        [DW_FRAMEWORK_MEGATRON] = {2, 4, 12, 6, 0, 0, 0},
        [DW_FRAMEWORK_MEGATRON_LM] = {2, 4, 12, 10, 0, 0, 0},
        [DW_FRAMEWORK_TORCHTITAN] = {4, 4, 8, 12, 0, 16, 2},
        [DW_FRAMEWORK_FSDP] = {4, 4, 8, 6, 1, 0, 0},
        [DW_FRAMEWORK_DEEPSPEED] = {2, 2, 12, 12, 1, 0, 0},
        [DW_FRAMEWORK_NANOTRON] = {2, 6, 12, 14, 1, 0, 0},
        [DW_FRAMEWORK_JAX] = {4, 4, 8, 8, 0, 0, 0},
        [DW_FRAMEWORK_PYTORCH] = {2, 2, 12, 12, 1, 0, 0},
    };
    return &habits[layout->framework];
}

/* ZeRO 1 and 2 of DeepSpeed; Megatron's before 2024 was DeepSpeed's. */
int dw__is_deepspeed(const dw_layout *layout) {
    return (layout->zero_stage == 1 || layout->zero_stage == 2) &&
           (layout->framework == DW_FRAMEWORK_DEEPSPEED ||
            layout->framework == DW_FRAMEWORK_MEGATRON_LM);
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
    double kv = (model->kv_heads / planned->atp < 1 ? 1 : model->kv_heads / planned->atp) *
                planned->attended;
    double operand = planned->low ? 1 : 2,
           up = model->gated ? 2 : 1; /* what a product keeps of its input */
    int old = layout->framework == DW_FRAMEWORK_MEGATRON_LM;
    if (recompute == DW_RECOMPUTE_FULL) return 2 * h / cut;
    int selective = recompute == DW_RECOMPUTE_SELECTIVE;

    double masks = old || layout->dropout ? 2 : 0;
    double norms = (4 + (selective && !old ? 0 : 2 * operand) + masks) * h / cut;
    /* Without a pipeline nanotron keeps what tensor parallelism gathered; Megatron gathers again. */
    if (layout->framework == DW_FRAMEWORK_NANOTRON && layout->pp == 1)
        norms += 4 * h * (1 - 1 / cut);
    double attention = 2 * heads * d + 2 * kv * (d + v) + 2 * heads * v + 4 * heads;
    if (planned->low) attention += heads * v;
    if (model->kv_rank) {
        double latent = (2 + operand) * (model->q_rank + model->kv_rank) * planned->attended;
        /* Recomputed from the latent vectors: queries, keys and values. */
        attention = selective ? latent + 2 * heads * v + 4 * heads : attention + latent;
    }
    if (layout->unfused_attention && !selective) attention += 5 * heads * layout->seq_len;
    double inner = 2 * up + (selective && !old ? 0 : operand);
    if (habit_of(layout)->eager && model->gated && !selective) inner += 2;
    if (selective && layout->framework == DW_FRAMEWORK_TORCHTITAN) {
        /* The layer's input, attention's output, the results of every second product (queries, values, the
         * MLP's first and last), and what tensor parallelism reduced. No compiled graph keeps the last: its
         * backward has no use for it. */
        double width = model->top_k
                           ? moe ? model->top_k * model->expert_ffn + model->shared_ffn : model->ffn
                           : model->ffn;
        double results = heads * d + kv * v + width / tp + (tp > 1 ? 2 * h / cut : 0);
        if (model->gated && !layout->compiled) results += h / (cut > 1 ? tp : 1);
        return 2 * h / cut + 2 * heads * v + 4 * heads + 2 * results;
    }
    double mlp;
    if (moe) {
        double routed = model->top_k * planned->etp / tp * planned->expert_load;
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

/* PyTorch's allocator, as runs show it whose memory was published with what was reserved, or that failed
 * (docs/planner.md). */
static const struct {
    double fragments;       /* of activations and workspace, where segments are expandable */
    double fixed_fragments; /* where they are not: PyTorch 1.x under Megatron, and for AMD */
    double given_back;      /* of the fragments, when memory is short */
} allocator = {0.05, 0.10, 0.8};

/* Reserved by PyTorch's allocator and of no use to it: blocks of sizes that do not come again. */
double dw__fragments(const dw__planned *planned, const dw_memory_parts *memory) {
    double part = allocator.fragments;
    if (planned->layout->framework == DW_FRAMEWORK_OWN) part = 0;
    if (planned->layout->framework == DW_FRAMEWORK_MEGATRON_LM) part = allocator.fixed_fragments;
    /* PyTorch for AMD has no expandable segments. */
    if (planned->hardware->capability == 0 && part > 0) part = allocator.fixed_fragments;
    const dw_layout *layout = planned->layout;
    double held = part * (memory->activations + memory->workspace);
    if (dw__is_deepspeed(layout))
        held += part * memory->gradients; /* tensors that come and go, too */
    if (layout->pp == 1 && !layout->fused_loss)
        held += habit_of(layout)->logit_held * planned->tokens * planned->model->vocabulary /
                layout->tp;
    return held;
}

/* Short of memory, PyTorch's allocator gives back segments that are wholly free, and keeps those of which a block is in
 * use: about one in five, from which configurations that ran and that failed are told apart best. */
double dw__given_back(const dw__planned *planned, const dw_memory_parts *memory) {
    return allocator.given_back * dw__fragments(planned, memory);
}

/* ZeRO-2 gives the rest away before the next micro-batch adds to it. In a pipeline, and under Megatron, gradients
 * gather in whole buffers and are reduced once a step. */
int dw__gradients_are_cut(const dw_layout *layout) {
    if (layout->zero_stage >= 3) return 1;
    int buffers =
        layout->framework == DW_FRAMEWORK_MEGATRON || layout->framework == DW_FRAMEWORK_MEGATRON_LM;
    return layout->zero_stage == 2 && layout->pp == 1 && !buffers;
}

/* Communicators, each with buffers of its own. Under Megatron-DeepSpeed both make theirs. */
static int groups_of(const dw_layout *layout) {
    int groups = (layout->tp > 1) + (layout->pp > 1) + (layout->cp > 1) + (layout->ep > 1) +
                 (layout->dp > 1);
    return layout->framework == DW_FRAMEWORK_MEGATRON_LM && dw__is_deepspeed(layout)
               ? 2 * groups + 1
               : groups;
}

/* What tensor parallelism gathers: a product's whole input, its gradient, and one on the way. */
static double gathered_inputs(const dw__planned *planned) {
    return planned->layout->tp > 1 ? 3 * 2.0 * planned->tokens * planned->model->hidden : 0;
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
        if (mode && how == DW_RECOMPUTE_NONE)
            kept[mode] = kept[0];
        else if (mode && how == DW_RECOMPUTE_FULL)
            kept[mode] = full;
        else
            kept[mode] = (part < 1 ? (1 - part) * dw__layer_activation_bytes(planned, how, 0) : 0) +
                         (part > 0 ? part * dw__layer_activation_bytes(planned, how, 1) : 0);
    }
    double again =
        recompute == DW_RECOMPUTE_FULL ? (recompute_layers > 0 ? recompute_layers : layers) : 0;
    /* Of the layer that backward is in, also what selective recomputation makes anew. */
    double anew = recompute == DW_RECOMPUTE_FULL ? kept[0] : kept[0] - kept[1];
    if (again > layers) again = layers;
    double rest = recompute == DW_RECOMPUTE_FULL ? kept[0] : kept[1];
    double offloaded = layout->offload_layers > layers ? layers : layout->offload_layers;
    *bytes = (dw__activation_bytes){.kept = t * (again * full + (layers - again) * rest),
                                    .again = again > 0 || anew > 0 ? t * anew : 0};
    if (recompute == DW_RECOMPUTE_FULL && again <= 0) bytes->again = 0;
    if (layers > 0 && offloaded > 0) {
        double each = bytes->kept / layers;
        bytes->moved = offloaded * each;
        bytes->kept -= bytes->moved;
        /* The first layers leave; when the last ones are at work, these are gone. Where nothing else stays, the layer
         * at work and the one on its way do. */
        double both = offloaded > 2 ? 2 : offloaded, rest = layers - offloaded;
        bytes->staged = both > rest ? each * (both - rest) : 0;
    }
    /* Backward of scores in memory: gradients of probabilities and of scores. */
    if (layout->unfused_attention && bytes->again > 0)
        bytes->again += t * 2 * 2 * layout->seq_len * model->heads / layout->tp;
    /* A stage's output was kept for its backward, before Megatron learned to free it. */
    if (layout->framework == DW_FRAMEWORK_MEGATRON_LM && layout->pp > 1 && stage < layout->pp - 1)
        bytes->kept += t * full;
    if (stage == dw__head_stage(layout)) {
        const habit *habit = habit_of(layout);
        double each = layout->tp > 1 && habit->logit_cut > 0 ? habit->logit_cut : habit->logit;
        if (layout->fused_loss && each > 4) each = 4; /* logits and their gradient, both BF16 */
        bytes->logits = t * model->vocabulary / layout->tp * each + t * 4 * model->hidden;
        /* The loss is over when the last layer is computed again: whichever needs more. */
        double gathered = gathered_inputs(planned);
        bytes->logits = fmax(0, bytes->logits - gathered);
        bytes->again = fmax(0, bytes->again - bytes->logits);
    }
}

void dw__memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers, int stage,
                dw_memory_parts *memory) {
    const dw_planner_model *model = planned->model;
    const dw_layout *layout = planned->layout;
    const double gib = 1024.0 * 1024.0 * 1024.0;
    dw__element_bytes bytes = dw__element_bytes_of(layout);
    double experts, dense = dw__stage_parameters(planned, stage, &experts);
    int twice = layout->schedule == DW_SCHEDULE_DUALPIPE && layout->pp > 1;
    if (twice) dense *= 2, experts *= 2;
    double trained = dw__trained_part(model);
    double ranks = (double)layout->dp * layout->cp;
    double expert_ranks = ranks * layout->tp / (layout->ep * planned->etp);
    if (expert_ranks < 1) expert_ranks = 1;
    double shard = planned->shard;
    double expert_shard = shard < expert_ranks ? shard : expert_ranks;
    int zero = layout->zero_stage;
    if (zero < 1) shard = expert_shard = 1;
    double excess, whole = dense + experts, cut = dense / shard + experts / expert_shard;
    dw__stage_attention(planned, stage, &excess);
    if (layout->schedule == DW_SCHEDULE_DUALPIPE && layout->pp > 1) excess *= 2;
    whole += excess;
    if (zero < 1) cut += excess;
    memory->parameters = bytes.parameter * (zero >= 3 ? cut : whole);
    memory->gradients = bytes.gradient * (dw__gradients_are_cut(layout) ? cut : whole) * trained;
    /* Two ranks have each stage of DualPipe: replicas, which share the states as the others do. */
    memory->optimizer = bytes.optimizer * cut * trained / (twice && zero >= 1 ? 2 : 1);
    /* Frozen weights need no second copy, and are kept in the format that they are multiplied in. */
    if (model->lora_rank) memory->parameters = (planned->low ? 1 : 2) * (zero >= 3 ? cut : whole);
    if (layout->offload_optimizer) memory->optimizer = 0;

    dw__activation_bytes activations;
    dw__activation_bytes_of(planned, recompute, recompute_layers, stage, &activations);
    memory->activations =
        activations.kept * in_flight(planned, stage) + activations.staged + activations.again;
    memory->workspace = gathered_inputs(planned) + activations.logits;
    /* Gradients are reduced through a bucket of 500 million elements, or of the largest of them. */
    if (dw__is_deepspeed(layout)) {
        double bucket = fmax(5e8, dw__embedding_parameters(model) / layout->tp);
        memory->workspace += fmin(bytes.gradient, 4) * trained * fmin(bucket, whole);
    }
    /* PyTorch's pipelines receive every micro-batch of a step into buffers of its own, both ways, and keep outputs. */
    if (layout->framework == DW_FRAMEWORK_TORCHTITAN && layout->pp > 1) {
        double each =
            planned->tokens * 2 * model->hidden / (layout->sequence_parallel ? layout->tp : 1);
        memory->workspace += (2.0 * planned->micro_batches + in_flight(planned, stage)) * each;
    }
    double layers = dw__stage_layers(planned, stage),
           table = dw__embedding_parameters(model) / layout->tp;
    if (zero == 2 && dw__gradients_are_cut(layout))
        memory->workspace += bytes.gradient * trained * (whole / (layers > 1 ? layers : 1));
    if (zero >= 3) { /* two layers gathered, one layer's gradients whole; the table by itself */
        double layer = (whole - (stage == 0 ? table : 0)) / (layers > 1 ? layers : 1);
        double gathered = layer * (2 * 2 + 4);
        /* In a pipeline parameters stay gathered, and gradients whole until the last micro-batch. */
        if (layout->pp > 1)
            gathered += (2 + 4 * trained) * (whole - layer);
        else if (!layout->reshard)
            gathered += 2 * (whole - layer);
        /* The root's tables stay gathered from forward on; one has its gradient whole. */
        double tables = table * ((model->tied || layout->pp > 1 ? 2 : 4) + 4);
        memory->workspace += gathered > tables ? gathered : tables;
    }
    /* The context: before CUDA 11.7 every kernel of PyTorch was loaded at the start. */
    double context = layout->framework == DW_FRAMEWORK_MEGATRON_LM ? 2 : 1;
    memory->overhead =
        dw__fragments(planned, memory) + context * gib + 0.4 * gib * groups_of(layout);
}

void dw__host_memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers,
                     int stage, double *optimizer, double *activations) {
    const dw_layout *layout = planned->layout;
    dw__activation_bytes bytes;
    *optimizer = *activations = 0;
    if (layout->offload_optimizer) {
        /* States without an FP32 copy of the parameters need one there. */
        double states = dw__element_bytes_of(layout).optimizer;
        int twice =
            layout->schedule == DW_SCHEDULE_DUALPIPE && layout->pp > 1 && layout->zero_stage < 1;
        *optimizer = dw__optimizer_elements(planned, stage) * (twice ? 2 : 1) *
                     (states < 12 ? states + 4 : states);
    }
    if (layout->offload_layers > 0) {
        dw__activation_bytes_of(planned, recompute, recompute_layers, stage, &bytes);
        *activations = bytes.moved * in_flight(planned, stage);
    }
}
