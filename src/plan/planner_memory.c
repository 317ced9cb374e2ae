/* Bytes on one rank of a stage: what it holds between steps, what a micro-batch keeps from forward to backward, and
 * how many micro-batches are in flight. Activations are counted tensor by tensor. For an unfused GPT with dropout the
 * count equals s b h (34 + 5 a s / h) of Korthikanti et al. 2022. */
#include "plan/planner_internal.h"
#include <math.h>

typedef struct habit {
    double parameter, gradient, optimizer; /* bytes per element */
    /* Bytes per logit: the head's output, its FP32 copy, the loss's gradient, temporaries. */
    double logit;
    /* Eager MLPs keep every intermediate: two GEMM results, the activation, their product. */
    int eager;
    /* Bytes per logit where tensor parallelism splits the logits and the loss differs; 0: as `logit`. */
    double logit_cut;
    /* Bytes per logit in freed blocks that are too small to be reused. */
    double logit_held;
} habit;

/* Defaults of the frameworks. Megatron: BF16 parameters, FP32 gradients, an FP32 copy and AdamW's two averages; its
 * loss is fused and in place. DeepSpeed, and PyTorch with ZeRO-1: gradients in the parameters' type. FSDP: everything
 * in FP32, cast when used. PyTorch's loss keeps logits in BF16 and FP32, the logarithm of the softmax, and the
 * gradient. Under torchtitan with split logits, backward of DTensor's loss holds four FP32 arrays at once
 * (logarithms, zeros with the targets, exponentials, their sum); none of them fits into the freed block of BF16
 * logits. */
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

/* ZeRO-1 and ZeRO-2 of DeepSpeed. Megatron before 2024 used DeepSpeed's. */
int dw__is_deepspeed(const dw_layout *layout) {
    return (layout->zero_stage == 1 || layout->zero_stage == 2) &&
           (layout->framework == DW_FRAMEWORK_DEEPSPEED ||
            layout->framework == DW_FRAMEWORK_MEGATRON_LM);
}

/* Bytes stated by the layout, else the framework's default. */
dw__element_bytes dw__element_bytes_of(const dw_layout *layout) {
    const habit *bytes = habit_of(layout);
    return (dw__element_bytes){layout->parameter_bytes ? layout->parameter_bytes : bytes->parameter,
                               layout->gradient_bytes ? layout->gradient_bytes : bytes->gradient,
                               layout->optimizer_bytes ? layout->optimizer_bytes
                                                       : bytes->optimizer};
}

/* Bytes that one token keeps in one layer. */
double dw__layer_activation_bytes(const dw__planned *planned, dw_recompute recompute, int moe) {
    const dw_model_sizes *model = planned->model;
    const dw_layout *layout = planned->layout;
    double h = model->hidden, tp = layout->tp, cut = layout->sequence_parallel ? tp : 1;
    double heads = model->heads / tp, d = model->head_dim + model->rope_dim;
    double v = dw__value_dim(model);
    double kv = (model->kv_heads / planned->atp < 1 ? 1 : model->kv_heads / planned->atp) *
                planned->attended;
    double operand = planned->low ? 1 : 2,
           up = model->gated ? 2 : 1; /* input of a GEMM, kept for backward */
    int old = layout->framework == DW_FRAMEWORK_MEGATRON_LM;
    if (recompute == DW_RECOMPUTE_FULL) return 2 * h / cut;
    int selective = recompute == DW_RECOMPUTE_SELECTIVE;

    double masks = old || layout->dropout ? 2 : 0;
    double norms = (4 + (selective && !old ? 0 : 2 * operand) + masks) * h / cut;
    /* Without a pipeline, nanotron keeps what tensor parallelism gathered. Megatron gathers again. */
    if (layout->framework == DW_FRAMEWORK_NANOTRON && layout->pp == 1)
        norms += 4 * h * (1 - 1 / cut);
    double attention = 2 * heads * d + 2 * kv * (d + v) + 2 * heads * v + 4 * heads;
    if (planned->low) attention += heads * v;
    if (model->kv_rank) {
        double latent = (2 + operand) * (model->q_rank + model->kv_rank) * planned->attended;
        /* Queries, keys and values are recomputed from the latent vectors. */
        attention = selective ? latent + 2 * heads * v + 4 * heads : attention + latent;
    }
    if (layout->unfused_attention && !selective) attention += 5 * heads * layout->seq_len;
    double inner = 2 * up + (selective && !old ? 0 : operand);
    if (habit_of(layout)->eager && model->gated && !selective) inner += 2;
    if (selective && layout->framework == DW_FRAMEWORK_TORCHTITAN) {
        /* torchtitan keeps the layer's input, attention's output, the results of every second GEMM (queries, values,
         * the first and last of the MLP), and what tensor parallelism reduced. A compiled graph does not keep the
         * MLP's last result, because its backward does not use it. */
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

/* Returns how many micro-batches' activations a stage holds at once, in units of all its layers. */
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

/* Waste of PyTorch's allocator. The source is published runs that state allocated and reserved memory, or that ran
 * out of memory (docs/planner.md). */
static const struct {
    double fragments;       /* of activations and workspace, with expandable segments */
    double fixed_fragments; /* without them: PyTorch 1.x under Megatron, and for AMD */
    double given_back;      /* part of the fragments freed when memory is short */
} allocator = {0.05, 0.10, 0.8};

/* Memory reserved by PyTorch's allocator that it cannot use: freed blocks of sizes that do not recur. */
double dw__fragments(const dw__planned *planned, const dw_memory_parts *memory) {
    double part = allocator.fragments;
    if (planned->layout->framework == DW_FRAMEWORK_OWN) part = 0;
    if (planned->layout->framework == DW_FRAMEWORK_MEGATRON_LM) part = allocator.fixed_fragments;
    /* PyTorch for AMD has no expandable segments. */
    if (planned->hardware->capability == 0 && part > 0) part = allocator.fixed_fragments;
    const dw_layout *layout = planned->layout;
    double held = part * (memory->activations + memory->workspace);
    if (dw__is_deepspeed(layout))
        held += part * memory->gradients; /* gradients are allocated and freed too */
    if (layout->pp == 1 && !layout->fused_loss)
        held += habit_of(layout)->logit_held * planned->tokens * planned->model->vocabulary /
                layout->tp;
    return held;
}

/* Short of memory, PyTorch's allocator frees segments that are wholly free and keeps those with a block in use. About
 * one in five is kept: this value separates runs that fit from runs that failed best. */
double dw__given_back(const dw__planned *planned, const dw_memory_parts *memory) {
    return allocator.given_back * dw__fragments(planned, memory);
}

/* Without buffers, ZeRO-2 drops the other ranks' shards before the next micro-batch adds gradients. In a pipeline,
 * and under Megatron, gradients accumulate in whole buffers and are reduced once a step. */
int dw__gradients_are_cut(const dw_layout *layout) {
    if (layout->zero_stage >= 3) return 1;
    int buffers =
        layout->framework == DW_FRAMEWORK_MEGATRON || layout->framework == DW_FRAMEWORK_MEGATRON_LM;
    return layout->zero_stage == 2 && layout->pp == 1 && !buffers;
}

/* Returns the number of communicators, each of which has buffers. Under Megatron-DeepSpeed both libraries create
 * theirs. */
static int groups_of(const dw_layout *layout) {
    int groups = (layout->tp > 1) + (layout->pp > 1) + (layout->cp > 1) + (layout->ep > 1) +
                 (layout->dp > 1);
    return layout->framework == DW_FRAMEWORK_MEGATRON_LM && dw__is_deepspeed(layout)
               ? 2 * groups + 1
               : groups;
}

/* Buffers of tensor parallelism: a GEMM's gathered input, its gradient, and one in transfer. */
static double gathered_inputs(const dw__planned *planned) {
    return planned->layout->tp > 1 ? 3 * 2.0 * planned->tokens * planned->model->hidden : 0;
}

void dw__activation_bytes_of(const dw__planned *planned, dw_recompute recompute,
                             int recompute_layers, int stage, dw__activation_bytes *bytes) {
    const dw_model_sizes *model = planned->model;
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
    /* The layer in backward also needs what selective recomputation restores. */
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
        /* The first layers are offloaded; their copies have left when the last layers run. If nothing else stays on
         * the GPU, the running layer and the layer in transfer do. */
        double both = offloaded > 2 ? 2 : offloaded, rest = layers - offloaded;
        bytes->staged = both > rest ? each * (both - rest) : 0;
    }
    /* Backward of unfused attention holds the gradients of probabilities and of scores. */
    if (layout->unfused_attention && bytes->again > 0)
        bytes->again += t * 2 * 2 * layout->seq_len * model->heads / layout->tp;
    /* Older Megatron kept a stage's output for its backward. */
    if (layout->framework == DW_FRAMEWORK_MEGATRON_LM && layout->pp > 1 && stage < layout->pp - 1)
        bytes->kept += t * full;
    if (stage == dw__head_stage(layout)) {
        const habit *habit = habit_of(layout);
        double each = layout->tp > 1 && habit->logit_cut > 0 ? habit->logit_cut : habit->logit;
        if (layout->fused_loss && each > 4) each = 4; /* logits and gradient in BF16 */
        bytes->logits = t * model->vocabulary / layout->tp * each + t * 4 * model->hidden;
        /* The loss ends before the last layer is recomputed, so only the larger of the two counts. */
        double gathered = gathered_inputs(planned);
        bytes->logits = fmax(0, bytes->logits - gathered);
        bytes->again = fmax(0, bytes->again - bytes->logits);
    }
}

void dw__memory(const dw__planned *planned, dw_recompute recompute, int recompute_layers, int stage,
                dw_memory_parts *memory) {
    const dw_model_sizes *model = planned->model;
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
    /* DualPipe puts each stage on two ranks. These are replicas and share the optimizer states. */
    memory->optimizer = bytes.optimizer * cut * trained / (twice && zero >= 1 ? 2 : 1);
    /* Frozen weights need no FP32 copy. They stay in the format of their GEMMs. */
    if (model->lora_rank) memory->parameters = (planned->low ? 1 : 2) * (zero >= 3 ? cut : whole);
    if (layout->offload_optimizer) memory->optimizer = 0;

    dw__activation_bytes activations;
    dw__activation_bytes_of(planned, recompute, recompute_layers, stage, &activations);
    memory->activations =
        activations.kept * in_flight(planned, stage) + activations.staged + activations.again;
    memory->workspace = gathered_inputs(planned) + activations.logits;
    /* DeepSpeed reduces gradients through a bucket of 500 million elements, or of the largest parameter. */
    if (dw__is_deepspeed(layout)) {
        double bucket = fmax(5e8, dw__embedding_parameters(model) / layout->tp);
        memory->workspace += fmin(bytes.gradient, 4) * trained * fmin(bucket, whole);
    }
    /* PyTorch's pipelines allocate receive buffers for every micro-batch of a step in both directions, and keep
     * outputs. */
    if (layout->framework == DW_FRAMEWORK_TORCHTITAN && layout->pp > 1) {
        double each =
            planned->tokens * 2 * model->hidden / (layout->sequence_parallel ? layout->tp : 1);
        memory->workspace += (2.0 * planned->micro_batches + in_flight(planned, stage)) * each;
    }
    double layers = dw__stage_layers(planned, stage),
           table = dw__embedding_parameters(model) / layout->tp;
    if (zero == 2 && dw__gradients_are_cut(layout))
        memory->workspace += bytes.gradient * trained * (whole / (layers > 1 ? layers : 1));
    if (zero >= 3) { /* two gathered layers, one layer's full gradients; the table separately */
        double layer = (whole - (stage == 0 ? table : 0)) / (layers > 1 ? layers : 1);
        double gathered = layer * (2 * 2 + 4);
        /* In a pipeline, parameters stay gathered and gradients stay whole until the last micro-batch. */
        if (layout->pp > 1)
            gathered += (2 + 4 * trained) * (whole - layer);
        else if (!layout->reshard)
            gathered += 2 * (whole - layer);
        /* The root module's tables stay gathered from forward on; one of them has its full gradient. */
        double tables = table * ((model->tied || layout->pp > 1 ? 2 : 4) + 4);
        memory->workspace += gathered > tables ? gathered : tables;
    }
    /* CUDA context. Before CUDA 11.7, all of PyTorch's kernels were loaded at the start. */
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
        /* The host also holds an FP32 copy of the parameters if the optimizer's states have none. */
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
