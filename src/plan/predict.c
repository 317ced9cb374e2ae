/* Assembles the seconds and bytes of a training step. */
#include "plan/planner_internal.h"
#include <math.h>
#include <string.h>

/* PyTorch's own attention is FlashAttention-2, which uses Ampere's instructions: 2,048 FLOP per SM and clock, however
 * fast the tensor cores are. */
int dw__attends_as_ampere(const dw_layout *layout) {
    switch (layout->framework) {
    case DW_FRAMEWORK_TORCHTITAN:
    case DW_FRAMEWORK_FSDP:
    case DW_FRAMEWORK_DEEPSPEED:
    case DW_FRAMEWORK_NANOTRON:
    case DW_FRAMEWORK_PYTORCH: return 1;
    default: return 0;
    }
}

/* Sets the parts of their peak rates that GEMMs and attention reach on these GPUs under this framework. */
static void reached_parts(dw__planned *planned) {
    const dw__constants *c = planned->constants;
    const dw_hardware *hardware = planned->hardware;
    const dw_figure *bf16 = &hardware->rate[DW_RATE_BF16];
    int capability = hardware->capability;
    planned->gemm_part = dw__gemm_part(c, capability);
    planned->power_held = 1;
    planned->attention_part = c->attention_sm80;
    if (capability == 90) planned->attention_part = c->attention_sm90;
    if (capability >= 100 && capability < 120) planned->attention_part = c->attention_sm100;
    const dw_model_sizes *model = planned->model;
    if (capability == 90 && planned->layout->framework == DW_FRAMEWORK_OWN &&
        model->head_dim + model->rope_dim <= 256)
        planned->attention_part *= c->attention_own;
    /* GEMMs reach a measured rate in full. attention_part is relative to the peak, so the peak is computed from it. */
    planned->attention_rate = dw__reached(bf16, planned->gemm_part) / planned->gemm_part;
    if (capability == 0) planned->attention_rate *= c->gemm_amd / c->gemm_sm80;
    double ampere = 2048 * hardware->sm_count.value * hardware->clock.value;
    if (capability >= 90 && dw__attends_as_ampere(planned->layout) && ampere > 0) {
        planned->attention_part = c->attention_sm80;
        planned->attention_rate = fmin(planned->attention_rate, ampere);
    }
    /* A Hopper GPU limited to less than 700 W lowers its clock in GEMMs. */
    if (capability == 90 && hardware->power.value > 300 && hardware->power.value < 700) {
        double held = pow(hardware->power.value / 700, c->power_exponent);
        planned->gemm_part *= held;
        planned->attention_rate *= held;
        planned->power_held = held;
    }
    /* Power limits Blackwell at any clock: GB300 has the rated speed of GB200, but 1,400 W instead of 1,200 W. */
    if (capability >= 100 && capability < 120 && hardware->power.value > 1200) {
        double more = pow(hardware->power.value / 1200, c->power_exponent);
        planned->gemm_part *= more;
        planned->attention_rate *= more;
    }
}

dw__overlap dw__overlap_of(const dw_layout *layout) {
    if (!layout->overlap_expert) return DW__OVERLAP_NONE;
    return layout->schedule == DW_SCHEDULE_DUALPIPE ? DW__OVERLAP_DUALPIPE : DW__OVERLAP_MERGED;
}

void dw__planned_begin(dw__planned *planned, const dw__constants *c, const dw_model_sizes *model,
                       const dw_hardware *hardware, const dw_layout *layout) {
    *planned = (dw__planned){
        .constants = c,
        .model = model,
        .hardware = hardware,
        .layout = layout,
        .domain = dw__domain_of(hardware, layout->gpus),
        .tokens = (double)layout->micro_batch * layout->seq_len / layout->cp,
        .etp = layout->etp      ? layout->etp
               : layout->ep > 1 ? 1
                                : layout->tp,
        .atp = layout->attention_tp ? layout->attention_tp : layout->tp,
        .attended = layout->attention_tp ? (double)layout->attention_tp / layout->tp : 1,
        .shard = layout->shard ? layout->shard : layout->dp * layout->cp,
        .low = dw_scheme_describe(layout->precision)->block != DW_BLOCK_NONE,
        .rate = dw__rate_of(layout->precision),
        .linear_scale = 1,
        .overlap = dw__overlap_of(layout),
        .own_on_hopper = layout->framework == DW_FRAMEWORK_OWN && hardware->capability == 90,
    };
    planned->expert_load = dw__expert_load(planned);
    double sequences = (double)layout->dp * layout->micro_batch;
    planned->micro_batches = (int)(layout->global_batch / sequences + 0.5);
    if (planned->micro_batches < 1) planned->micro_batches = 1;
    reached_parts(planned);
    switch (layout->framework) {
    case DW_FRAMEWORK_MEGATRON: planned->elementwise = 1; break;
    case DW_FRAMEWORK_OWN:
    case DW_FRAMEWORK_JAX: planned->elementwise = c->elementwise_compiled; break;
    default: planned->elementwise = c->elementwise_eager; break;
    }
    if (layout->compiled) planned->elementwise = c->elementwise_compiled;
    /* Hybrids with state-space blocks state active parameters far from the number that follows from the widths. The
     * work of linear layers is scaled to the stated number. */
    if (model->active > 0) {
        double table = dw__embedding_parameters(model), counted = dw__counted_active(model);
        double least = counted - table, most = counted + table;
        if (model->active < 0.93 * least || model->active > 1.07 * most)
            planned->linear_scale = fmax(0.2, fmin(5, (model->active - table) / (counted - table)));
    }
}

static void add(dw_time_parts *sum, const dw_time_parts *parts, double times) {
    double *to = (double *)sum;
    const double *from = (const double *)parts;
    for (size_t at = 0; at < sizeof *sum / sizeof(double); at++) to[at] += from[at] * times;
}

typedef struct stage_time {
    dw_time_parts forward, backward;
    double weight, send;
} stage_time;

static void time_layers(const dw__planned *planned, dw__layer_times *times) {
    int mixtures = dw__moe_layers(planned->model);
    *times = (dw__layer_times){0};
    dw__layer_time attention;
    dw__attention_part(planned, &attention);
    if (mixtures < planned->model->layers)
        dw__layer_seconds(planned, DW__LAYER_DENSE, &attention, &times->dense);
    if (mixtures) dw__layer_seconds(planned, DW__LAYER_MOE, &attention, &times->moe);
    dw__head_seconds(planned, &times->head);
}

/* Computes the part of forward that backward repeats. Selective recomputation repeats the cheap half of the
 * elementwise work, and unfused attention. */
static void recomputed(const dw__planned *planned, dw_recompute recompute, double part,
                       const dw_time_parts *forward, dw_time_parts *again) {
    *again = (dw_time_parts){0};
    if (recompute == DW_RECOMPUTE_FULL) add(again, forward, part);
    if (recompute == DW_RECOMPUTE_SELECTIVE) {
        again->elementwise = 0.5 * forward->elementwise;
        /* torchtitan keeps the result of every second GEMM. */
        if (planned->layout->framework == DW_FRAMEWORK_TORCHTITAN)
            again->gemm = 0.5 * forward->gemm;
        if (planned->layout->unfused_attention) again->attention = forward->attention;
    }
}

/* Tensor parallel ranks send one part each (Narayanan et al. 2021, section 4.1). DeepSpeed's pipelines send whole
 * activations. */
static int sends_parts(const dw_layout *layout) {
    return layout->tp > 1 && layout->framework == DW_FRAMEWORK_MEGATRON_LM &&
           !dw__is_deepspeed(layout);
}

/* Bytes that one rank sends to the next stage. */
static double sent_bytes(const dw__planned *planned) {
    const dw_layout *layout = planned->layout;
    double cut = layout->sequence_parallel || sends_parts(layout) ? layout->tp : 1;
    return layout->pp > 1 ? planned->tokens * planned->model->hidden * 2 / cut : 0;
}

static void time_stage(const dw__planned *planned, const dw__layer_times *times, int stage,
                       dw_recompute recompute, int recompute_layers, stage_time *time) {
    const dw_layout *layout = planned->layout;
    *time = (stage_time){0};
    double layers = dw__stage_layers(planned, stage);
    double mixtures = layers * dw__moe_layers(planned->model) / planned->model->layers;
    add(&time->forward, &times->dense.forward, layers - mixtures);
    add(&time->backward, &times->dense.backward, layers - mixtures);
    add(&time->forward, &times->moe.forward, mixtures);
    add(&time->backward, &times->moe.backward, mixtures);
    time->weight = times->dense.weight * (layers - mixtures) + times->moe.weight * mixtures;
    double part = recompute_layers > 0 && recompute_layers < layers ? recompute_layers / layers : 1;
    dw_time_parts again;
    recomputed(planned, recompute, part, &time->forward, &again);
    add(&time->backward, &again, 1);
    if (stage == dw__head_stage(layout)) {
        add(&time->forward, &times->head.forward, 1);
        add(&time->backward, &times->head.backward, 1);
        time->weight += times->head.weight;
    }
    if (layout->offload_layers > 0) {
        dw__activation_bytes bytes;
        double exposed[2];
        dw__activation_bytes_of(planned, recompute, recompute_layers, stage, &bytes);
        dw__offload_seconds(planned, stage, bytes.moved, dw__parts_sum(&time->forward),
                            dw__parts_sum(&time->backward), exposed);
        time->forward.offload = exposed[0];
        time->backward.offload = exposed[1];
    }
    if (layout->pp > 1) {
        time->send = dw__send_seconds(planned, sent_bytes(planned), layout->gpus / layout->pp);
        /* Megatron's ranks each send a part of the common activations, and gather it on the receiving stage. */
        if (!layout->sequence_parallel && sends_parts(layout))
            time->send +=
                dw__gather_seconds(planned, sent_bytes(planned) * layout->tp, layout->tp, 1, 1);
    }
}

static dw__turn turn_of(const stage_time *stage) {
    double backward = dw__parts_sum(&stage->backward);
    return (dw__turn){dw__parts_sum(&stage->forward), backward - stage->weight, stage->weight};
}

/* Describes the pipeline by the times of the first stage, the one after it (the heaviest between the ends) and the
 * last. */
static void pipeline_of(const dw__planned *planned, dw_recompute recompute,
                        const stage_time stage[3], dw__pipeline *pipeline) {
    const dw_layout *layout = planned->layout;
    *pipeline = (dw__pipeline){.schedule = layout->schedule,
                               .stages = layout->pp,
                               .chunks = layout->virtual_stages > 1 ? layout->virtual_stages : 1,
                               .micro_batches = planned->micro_batches,
                               .first = turn_of(&stage[0]),
                               .middle = turn_of(&stage[1]),
                               .last = turn_of(&stage[2]),
                               .send = stage[0].send,
                               .weight_kept = dw__weight_kept(planned, recompute)};
    dw__pipeline_finish(planned, pipeline);
}

/* Traffic of attention's parameters, or gradients, between the ranks of a tensor parallel group that hold the same
 * ones. */
static double attention_seconds(const dw__planned *planned, int stage, double bytes,
                                double messages) {
    double excess;
    if (planned->attended >= 1) return 0;
    return dw__gather_seconds(planned, bytes * dw__stage_attention(planned, stage, &excess),
                              (int)(planned->layout->tp / planned->atp), (int)planned->atp,
                              messages);
}

void dw__data_traffic_of(const dw__planned *planned, int stage, dw__data_traffic *traffic) {
    const dw_layout *layout = planned->layout;
    double ranks = (double)layout->dp * layout->cp;
    double experts, dense = dw__stage_parameters(planned, stage, &experts);
    double trained = dw__trained_part(planned->model);
    double expert_ranks = ranks * layout->tp / (layout->ep * planned->etp);
    int expert_stride = (int)(layout->ep * planned->etp);
    double layers = dw__stage_layers(planned, stage);
    *traffic = (dw__data_traffic){0};
    if (layout->zero_stage >= 3) {
        /* In a pipeline, parameters are gathered and gradients reduced once a step. */
        traffic->each = traffic->reduce_each = layout->pp == 1;
        int shard = planned->shard, expert_shard = expert_ranks < shard ? (int)expert_ranks : shard;
        traffic->gather =
            dw__gather_seconds(planned, 2 * dense, shard, layout->tp, layers) +
            dw__gather_seconds(planned, 2 * experts, expert_shard, expert_stride, layers) +
            attention_seconds(planned, stage, 2, layers);
        traffic->again = layout->reshard && layout->pp == 1 ? traffic->gather : 0;
        traffic->reduce = traffic->gather * trained * (layout->gradient_bytes == 2 ? 1 : 2);
        if (ranks > shard)
            traffic->across =
                2 * dw__gather_seconds(planned, 4 * (dense + experts) * trained / shard,
                                       (int)(ranks / shard), layout->tp * shard, layers);
        return;
    }
    double gradient =
        layout->gradient_bytes ? layout->gradient_bytes
        : layout->framework == DW_FRAMEWORK_MEGATRON || layout->framework == DW_FRAMEWORK_NANOTRON
            ? 4
            : 2;
    if (gradient > 4) gradient = 4; /* of two copies of the gradients, only their sum travels */
    /* Megatron reduces buckets; nanotron reduces each parameter separately. */
    double buckets = ceil(dense / fmax(40e6, 1e6 * ranks));
    if (layout->framework == DW_FRAMEWORK_NANOTRON) buckets = 9 * layers;
    traffic->reduce =
        dw__gather_seconds(planned, gradient * dense * trained, (int)ranks, layout->tp, buckets) +
        dw__gather_seconds(planned, gradient * experts * trained, (int)expert_ranks, expert_stride,
                           buckets) +
        attention_seconds(planned, stage, gradient * trained, layers);
    traffic->gather = traffic->reduce * (layout->zero_stage ? 2 / gradient : 1);
    traffic->reduce_each = dw__gradients_are_cut(layout) && layout->zero_stage == 2;
}

double dw__data_exposed(const dw__planned *planned, double traffic, double room) {
    const dw__constants *c = planned->constants;
    double hidden = traffic < room ? traffic : room;
    if (!planned->layout->overlap_data) hidden = 0;
    double part =
        planned->layout->zero_stage >= 3 ? c->shard_exposed + c->shard_contention : c->data_exposed;
    return traffic - hidden * (1 - part);
}

/* Exposed seconds of the reduction of gradients and the gathering of parameters, per step of one stage. */
static double data_seconds(const dw__planned *planned, int stage, double forward, double backward) {
    dw__data_traffic traffic;
    dw__data_traffic_of(planned, stage, &traffic);
    double m = planned->micro_batches;
    return dw__data_exposed(planned, traffic.gather, forward) * (traffic.each ? m : 1) +
           dw__data_exposed(planned, traffic.again + traffic.reduce, backward) *
               (traffic.reduce_each ? m : 1) +
           planned->constants->data_exposed * traffic.across;
}

/* Work on parameters once a step, on the rank that takes longest. The first stage has the embedding and the last the
 * head; if the layers do not divide, the other stages have the remaining ones. Each rank of DualPipe has two stages. */
static void once_a_step(const dw__planned *planned, double forward, double backward,
                        dw_time_parts *time) {
    int stages = planned->layout->pp, candidates[3] = {0, stages > 2 ? 1 : 0, stages - 1};
    int both = planned->layout->schedule == DW_SCHEDULE_DUALPIPE && stages > 1;
    double most = -1;
    for (int at = 0; at < 3; at++) {
        int stage = candidates[at], opposite = stages - 1 - stage;
        if (at > 0 && stage == candidates[at - 1]) continue;
        double data = data_seconds(planned, stage, forward, backward);
        double optimizer = dw__optimizer_seconds(planned, stage);
        if (both) {
            data += data_seconds(planned, opposite, forward, backward);
            optimizer += dw__optimizer_seconds(planned, opposite);
        }
        if (data + optimizer <= most) continue;
        most = data + optimizer;
        time->data = data;
        time->optimizer = optimizer;
    }
}

double dw__optimizer_elements(const dw__planned *planned, int stage) {
    const dw_layout *layout = planned->layout;
    double experts, dense = dw__stage_parameters(planned, stage, &experts);
    double shard = layout->zero_stage ? planned->shard : 1;
    double ranks = (double)layout->dp * layout->cp * layout->tp / (layout->ep * planned->etp);
    double expert_shard = shard < ranks ? shard : ranks < 1 ? 1 : ranks;
    double excess = 0;
    if (!layout->zero_stage) dw__stage_attention(planned, stage, &excess);
    return (dense / shard + excess + experts / expert_shard) * dw__trained_part(planned->model);
}

/* Bytes per element. AdamW reads parameter, gradient and states, and writes parameter and states. If the layout states
 * their sizes, the constant, which is for the framework's usual ones and has what else a framework reads, is scaled; the
 * engine of this library reads nothing else. */
static double optimizer_bytes(const dw__planned *planned) {
    const dw_layout *layout = planned->layout;
    dw_layout usual = *layout;
    usual.parameter_bytes = usual.gradient_bytes = usual.optimizer_bytes = 0;
    const dw__element_bytes now = dw__element_bytes_of(layout), then = dw__element_bytes_of(&usual);
    const double moved = 2 * now.parameter + now.gradient + 2 * now.optimizer,
                 before = 2 * then.parameter + then.gradient + 2 * then.optimizer;
    if (layout->framework == DW_FRAMEWORK_OWN) return moved;
    return planned->constants->optimizer_bytes * moved / before;
}

double dw__optimizer_seconds(const dw__planned *planned, int stage) {
    if (planned->layout->offload_optimizer) return dw__optimizer_host_seconds(planned, stage);
    return dw__traffic_seconds(planned,
                               dw__optimizer_elements(planned, stage) * optimizer_bytes(planned));
}

double dw__pipeline_sync(const dw__constants *constants, const dw_layout *layout) {
    dw_pipeline_schedule schedule = layout->schedule;
    int paired = schedule == DW_SCHEDULE_1F1B || schedule == DW_SCHEDULE_GPIPE;
    return paired && layout->pp > 1 ? constants->pipeline_sync : 0;
}

static void host_memory(const dw__planned *planned, const int *stages, dw_prediction *prediction) {
    const dw_layout *layout = planned->layout;
    double most = 0;
    prediction->host_optimizer = prediction->host_activations = 0;
    prediction->host_capacity = planned->hardware->host_memory.value;
    if (!layout->offload_optimizer && layout->offload_layers <= 0) return;
    for (int at = 0; at < 3; at++) {
        double optimizer, activations;
        if (at > 0 && stages[at] == stages[at - 1]) continue;
        dw__host_memory(planned, prediction->recompute, prediction->recompute_layers, stages[at],
                        &optimizer, &activations);
        if (optimizer + activations <= most) continue;
        most = optimizer + activations;
        prediction->host_optimizer = optimizer;
        prediction->host_activations = activations;
    }
    if (prediction->host_capacity > 0 && most > prediction->host_capacity) prediction->fits = 0;
}

static void heaviest_memory(const dw__planned *planned, dw_recompute recompute, int layers,
                            dw_prediction *prediction) {
    int stages = planned->layout->pp;
    double most = -1;
    int candidates[3] = {0, stages > 2 ? 1 : 0, stages - 1};
    for (int at = 0; at < 3; at++) {
        dw_memory_parts memory;
        if (at > 0 && candidates[at] == candidates[at - 1]) continue;
        dw__memory(planned, recompute, layers, candidates[at], &memory);
        double sum = memory.parameters + memory.gradients + memory.optimizer + memory.activations +
                     memory.workspace;
        if (sum <= most) continue;
        most = sum;
        prediction->memory = memory;
        prediction->heaviest_stage = candidates[at];
    }
    prediction->allocated = most;
    prediction->reserved = most + dw__fragments(planned, &prediction->memory);
    prediction->used = most + prediction->memory.overhead;
    prediction->capacity = planned->hardware->memory.value;
    double needed = prediction->used - dw__given_back(planned, &prediction->memory);
    prediction->fits = needed <= prediction->capacity;
    prediction->recompute = recompute;
    prediction->recompute_layers = layers;
    host_memory(planned, candidates, prediction);
}

static void memory_of(const dw__planned *planned, dw_prediction *prediction) {
    const dw_layout *layout = planned->layout;
    if (layout->recompute != DW_RECOMPUTE_AUTO) {
        heaviest_memory(planned, layout->recompute, layout->recompute_layers, prediction);
        return;
    }
    heaviest_memory(planned, DW_RECOMPUTE_NONE, 0, prediction);
    if (prediction->fits) return;
    heaviest_memory(planned, DW_RECOMPUTE_SELECTIVE, 0, prediction);
    if (prediction->fits) return;
    int most = (int)ceil((double)planned->model->layers / layout->pp), least = 1;
    while (least < most) { /* the fewest recomputed layers that fit; all layers if no number fits */
        int middle = (least + most) / 2;
        heaviest_memory(planned, DW_RECOMPUTE_FULL, middle, prediction);
        if (prediction->fits)
            most = middle;
        else
            least = middle + 1;
    }
    heaviest_memory(planned, DW_RECOMPUTE_FULL, most, prediction);
}

double dw__slowdown(const dw__planned *planned) {
    const dw__constants *c = planned->constants;
    int gpus = planned->layout->gpus;
    double doublings = gpus > 8 ? log2(gpus / 8.0) : 0;
    return (1 + c->jitter) * (1 + c->straggler * doublings);
}

/* The host's work with CUDA graphs, as a part of its work without: those of the layout, or of this library's engine. */
static double host_part(const dw__planned *planned) {
    const dw__constants *c = planned->constants;
    if (planned->own_on_hopper) return c->host_own * c->host_graphs;
    return planned->layout->cuda_graphs ? c->host_graphs : 1;
}

/* A single GPU has no norms and losses to reduce: what remains is the host's. */
double dw__step_fixed(const dw__planned *planned) {
    const double fixed = planned->constants->step_fixed;
    if (planned->layout->gpus > 1) return fixed;
    return 0.25 * fixed * (planned->own_on_hopper ? host_part(planned) : 1);
}

double dw__micro_batch_fixed(const dw__planned *planned) {
    return planned->constants->micro_fixed * host_part(planned);
}

static const dw__layer_times *remembered(const dw__planned *planned, dw__layer_memo *memo) {
    const dw__overlap overlap = planned->overlap;
    if (!memo->known[overlap]) time_layers(planned, &memo->times[overlap]);
    memo->known[overlap] = 1;
    return &memo->times[overlap];
}

void dw__predict(const dw__constants *constants, const dw_model_sizes *model,
                 const dw_hardware *hardware, const dw_layout *layout, dw_prediction *prediction) {
    dw__layer_memo memo = {0};
    dw__predict_again(constants, model, hardware, layout, &memo, prediction);
}

/* Quantized weights are reused by the step's other micro-batches. Their number is at most the number of sequences,
 * which makes this a lower bound. */
double dw__least_layers(const dw__constants *constants, const dw_model_sizes *model,
                        const dw_hardware *hardware, const dw_layout *layout, dw__overlap overlap) {
    dw__planned planned;
    dw__layer_times times;
    dw__planned_begin(&planned, constants, model, hardware, layout);
    planned.overlap = overlap;
    planned.micro_batches = layout->global_batch;
    time_layers(&planned, &times);
    int mixtures = dw__moe_layers(model);
    double sum = dw__parts_sum(&times.head.forward) + dw__parts_sum(&times.head.backward);
    sum += (model->layers - mixtures) *
           (dw__parts_sum(&times.dense.forward) + dw__parts_sum(&times.dense.backward));
    sum += mixtures * (dw__parts_sum(&times.moe.forward) + dw__parts_sum(&times.moe.backward));
    return sum;
}

dw__step_rest dw__step_rest_of(const dw__constants *constants, const dw_model_sizes *model,
                               const dw_hardware *hardware, const dw_layout *layout) {
    dw__planned planned;
    dw__planned_begin(&planned, constants, model, hardware, layout);
    return (dw__step_rest){dw__slowdown(&planned), dw__step_fixed(&planned),
                           dw__micro_batch_fixed(&planned)};
}

/* The margin covers rounding: a bound is summed in another order than a prediction. */
double dw__step_least(const dw__step_rest *rest, double micro_batches, double seconds) {
    return (seconds * rest->slow + rest->step + micro_batches * rest->micro_batch) * (1 - 1e-12);
}

/* Times of the first stage, the one after it and the last. */
typedef struct stage_times {
    stage_time stage[3];
    double total[3], forward, backward; /* forward, backward: of the heaviest stage */
    int heaviest;
} stage_times;

static void time_stages(const dw__planned *planned, dw__layer_memo *memo, dw_recompute recompute,
                        int recompute_layers, stage_times *times) {
    int stages = planned->layout->pp, candidates[3] = {0, stages > 2 ? 1 : 0, stages - 1};
    const dw__layer_times *layers = remembered(planned, memo);
    times->heaviest = 0;
    for (int at = 0; at < 3; at++) {
        stage_time *stage = &times->stage[at];
        if (at > 0 && candidates[at] == candidates[at - 1]) {
            *stage = times->stage[at - 1];
            times->total[at] = times->total[at - 1];
            continue;
        }
        time_stage(planned, layers, candidates[at], recompute, recompute_layers, stage);
        times->total[at] = dw__parts_sum(&stage->forward) + dw__parts_sum(&stage->backward);
        if (times->total[at] > times->total[times->heaviest]) times->heaviest = at;
    }
    times->forward = dw__parts_sum(&times->stage[times->heaviest].forward);
    times->backward = dw__parts_sum(&times->stage[times->heaviest].backward);
}

static struct dw__stage_sums *sums_place(const dw_layout *layout, dw__overlap overlap,
                                         dw__stage_memo *memo, int **known) {
    const int turned = dw__head_stage(layout) == 0;
    *known = &memo->known[overlap][turned];
    return &memo->sums[overlap][turned];
}

static const struct dw__stage_sums *stage_sums(const dw__planned *planned, dw__stage_memo *memo) {
    const dw_layout *layout = planned->layout;
    int *known;
    struct dw__stage_sums *sums = sums_place(layout, planned->overlap, memo, &known);
    stage_times times;
    if (*known) return sums;
    time_stages(planned, memo->layers, layout->recompute, layout->recompute_layers, &times);
    if (layout->pp > 1) pipeline_of(planned, layout->recompute, times.stage, &sums->pipeline);
    sums->total = planned->micro_batches * times.total[0];
    sums->forward = times.forward;
    sums->backward = times.backward;
    *known = 1;
    return sums;
}

double dw__turns_seconds(const dw__constants *constants, const dw_model_sizes *model,
                         const dw_hardware *hardware, const dw_layout *layout,
                         dw__stage_memo *memo) {
    int *known;
    const struct dw__stage_sums *sums = sums_place(layout, dw__overlap_of(layout), memo, &known);
    if (!*known) {
        dw__planned planned;
        dw__planned_begin(&planned, constants, model, hardware, layout);
        stage_sums(&planned, memo);
    }
    if (layout->pp == 1) return sums->total;
    dw__pipeline pipeline = sums->pipeline;
    pipeline.schedule = layout->schedule;
    pipeline.chunks = layout->virtual_stages > 1 ? layout->virtual_stages : 1;
    return dw__pipeline_seconds(&pipeline) * (1 + dw__pipeline_sync(constants, layout));
}

double dw__head_layers(const dw_model_sizes *model, const dw_layout *layout, dw__stage_memo *memo) {
    int *known;
    const dw__pipeline *p = &sums_place(layout, dw__overlap_of(layout), memo, &known)->pipeline;
    double first = p->first.forward + p->first.input + p->first.weight,
           last = p->last.forward + p->last.input + p->last.weight;
    const int layers = model->layers / layout->pp; /* per stage */
    return (last - first) / first * layers;
}

double dw__sharding_seconds(const dw__constants *constants, const dw_model_sizes *model,
                            const dw_hardware *hardware, const dw_layout *layout,
                            dw__overlap overlap, dw__stage_memo *memo, double *computing) {
    dw__planned planned;
    dw_time_parts time = {0};
    dw__planned_begin(&planned, constants, model, hardware, layout);
    planned.overlap = overlap;
    const struct dw__stage_sums *sums = stage_sums(&planned, memo);
    *computing =
        layout->pp > 1 ? planned.micro_batches * dw__pipeline_mean(&sums->pipeline) : sums->total;
    once_a_step(&planned, sums->forward, sums->backward, &time);
    return time.data + time.optimizer;
}

static void predict_time(const dw__planned *given, dw__layer_memo *memo,
                         dw_prediction *prediction) {
    const dw__planned planned = *given;
    const dw_model_sizes *model = planned.model;
    const dw_hardware *hardware = planned.hardware;
    const dw_layout *layout = planned.layout;
    stage_times times;
    time_stages(&planned, memo, prediction->recompute, prediction->recompute_layers, &times);
    const stage_time *heaviest_stage = &times.stage[times.heaviest];
    double m = planned.micro_batches, most = times.total[times.heaviest];
    dw_time_parts *time = &prediction->time;
    add(time, &heaviest_stage->forward, m);
    add(time, &heaviest_stage->backward, m);
    if (layout->pp > 1) {
        dw__pipeline pipeline;
        pipeline_of(&planned, prediction->recompute, times.stage, &pipeline);
        double heaviest = dw__pipeline_heaviest(&pipeline), mean = dw__pipeline_mean(&pipeline);
        double whole = dw__pipeline_seconds(&pipeline);
        pipeline.send = 0;
        double unsent = dw__pipeline_seconds(&pipeline);
        double sync = dw__pipeline_sync(planned.constants, layout);
        prediction->bubble_fraction = 1 - m * heaviest / (whole * (1 + sync));
        /* Scales all parts of the heaviest rank to the mean rank. The difference is `imbalance`. */
        double *parts = (double *)time, part = mean / most;
        for (size_t at = 0; at < sizeof *time / sizeof(double); at++) parts[at] *= part;
        time->bubble = unsent - m * heaviest;
        time->pipeline = whole - unsent + sync * whole;
        time->imbalance = m * (heaviest - mean);
    }
    once_a_step(&planned, times.forward, times.backward, time);
    double seconds = dw__parts_sum(time);
    time->other = seconds * (dw__slowdown(&planned) - 1) + dw__step_fixed(&planned) +
                  m * dw__micro_batch_fixed(&planned);
    seconds += time->other;

    prediction->seconds = seconds;
    prediction->tokens_per_second =
        (double)layout->global_batch * layout->seq_len / seconds / layout->gpus;
    /* Hybrids: counts the linear work that is done, not the widths' work. */
    double other = (planned.linear_scale - 1) *
                   (dw_model_sizes_active(model) - dw__embedding_parameters(model));
    prediction->model_flops =
        prediction->tokens_per_second *
        (dw_planner_token_flops(model, layout->seq_len) + (model->lora_rank ? 4 : 6) * other);
    prediction->mfu = prediction->model_flops / hardware->rate[DW_RATE_BF16].value;
    double first = times.total[0],
           forward_part = dw__parts_sum(&times.stage[0].forward) / (first > 0 ? first : 1);
    prediction->overhead_fraction = prediction->recompute == DW_RECOMPUTE_FULL ? forward_part : 0;
}

void dw__predict_again(const dw__constants *constants, const dw_model_sizes *model,
                       const dw_hardware *hardware, const dw_layout *layout, dw__layer_memo *memo,
                       dw_prediction *prediction) {
    dw__planned planned;
    dw__planned_begin(&planned, constants, model, hardware, layout);
    *prediction = (dw_prediction){0};
    memory_of(&planned, prediction);
    predict_time(&planned, memo, prediction);
}

static const dw__constants *constants_of(const double *values) {
    return values ? (const dw__constants *)values : &dw__constants_default;
}

void dw_predict_with(const double *constants, const dw_model_sizes *model,
                     const dw_hardware *hardware, const dw_layout *layout,
                     dw_prediction *prediction) {
    dw__predict(constants_of(constants), model, hardware, layout, prediction);
}

void dw_predict_memory_with(const double *constants, const dw_model_sizes *model,
                            const dw_hardware *hardware, const dw_layout *layout, int stage,
                            dw_memory_parts *memory) {
    dw__planned planned;
    dw_prediction prediction;
    dw__planned_begin(&planned, constants_of(constants), model, hardware, layout);
    memory_of(&planned, &prediction);
    dw__memory(&planned, prediction.recompute, prediction.recompute_layers, stage, memory);
}

double dw_predict_bubble_with(const double *constants, const dw_model_sizes *model,
                              const dw_hardware *hardware, const dw_layout *layout) {
    dw__planned planned;
    dw__planned_begin(&planned, constants_of(constants), model, hardware, layout);
    dw_prediction prediction;
    memory_of(&planned, &prediction);
    dw__layer_memo memo = {0};
    stage_times times;
    time_stages(&planned, &memo, prediction.recompute, prediction.recompute_layers, &times);
    dw__pipeline pipeline;
    pipeline_of(&planned, prediction.recompute, times.stage, &pipeline);
    dw__pipeline_equal(&pipeline);
    return 1 -
           pipeline.micro_batches * dw__pipeline_mean(&pipeline) / dw__pipeline_seconds(&pipeline);
}

void dw_predict_unchecked(const dw_model_sizes *model, const dw_hardware *hardware,
                          const dw_layout *layout, dw_prediction *prediction) {
    dw__predict(&dw__constants_default, model, hardware, layout, prediction);
}

dw_status dw_predict(const dw_model_sizes *model, const dw_hardware *hardware,
                     const dw_layout *layout, dw_prediction *prediction) {
    DW_RETURN_IF_FAILED(dw_model_sizes_check(model));
    DW_RETURN_IF_FAILED(dw_layout_check(model, hardware, layout));
    dw_predict_unchecked(model, hardware, layout, prediction);
    return DW_OK;
}

int dw_predict_operations(const dw_model_sizes *model, const dw_hardware *hardware,
                          const dw_layout *layout, dw_operation_cost *operations) {
    static const char *const kinds[] = {"layer", "mixture", "head"};
    dw__operation_costs list = {.items = operations};
    dw__planned planned;
    dw__planned_begin(&planned, &dw__constants_default, model, hardware, layout);
    planned.operations = &list;
    double mixtures = dw__moe_layers(model);
    double count[] = {model->layers - mixtures, mixtures, 1};
    for (int kind = DW__LAYER_DENSE; kind <= DW__LAYER_HEAD; kind++) {
        int first = list.count;
        dw__layer_time attention, time;
        if (kind == DW__LAYER_HEAD) dw__head_seconds(&planned, &time);
        if (kind != DW__LAYER_HEAD && count[kind] > 0) {
            dw__attention_part(&planned, &attention);
            dw__layer_seconds(&planned, (dw__layer_kind)kind, &attention, &time);
        }
        for (int at = first; at < list.count; at++) {
            operations[at].layer = kinds[kind];
            operations[at].times =
                count[kind] * planned.micro_batches / (kind == DW__LAYER_HEAD ? 1 : layout->pp);
        }
    }
    return list.count;
}

/* Traffic of one chunk of a stage. Only one chunk has the head. */
static dw_stage_traffic chunk_traffic(const dw__planned *planned, const dw_time_parts *whole,
                                      const dw_time_parts *head, double moved, double chunks,
                                      int has_head) {
    dw__exposed_parts parts = dw__exposed_parts_of(planned);
    double tensor = (whole->tensor - head->tensor) / chunks + (has_head ? head->tensor : 0);
    double context = whole->context / chunks, expert = whole->expert / chunks;
    return (dw_stage_traffic){
        .tensor_exposed = tensor,
        .context_exposed = context,
        .expert_exposed = expert,
        .host_exposed = whole->offload / chunks,
        .tensor = tensor / parts.tensor,
        .context = context / parts.context,
        .expert = expert / parts.expert,
        .host = dw__host_copy_seconds(planned, moved) / chunks,
    };
}

void dw_predict_stage(const dw_model_sizes *model, const dw_hardware *hardware,
                      const dw_layout *layout, int stage, int chunk, dw_stage_cost *cost) {
    dw__planned planned;
    dw__planned_begin(&planned, &dw__constants_default, model, hardware, layout);
    dw__layer_times times;
    time_layers(&planned, &times);
    stage_time whole;
    time_stage(&planned, &times, stage, layout->recompute, layout->recompute_layers, &whole);
    double v = layout->virtual_stages > 1 ? layout->virtual_stages : 1,
           layers = dw__stage_layers(&planned, stage);
    /* The head is in the last chunk of its stage. */
    double head_forward = 0, head_backward = 0, head_weight = 0;
    const dw_time_parts nothing = {0}, *head[2] = {&nothing, &nothing};
    if (stage == dw__head_stage(layout)) {
        head[0] = &times.head.forward;
        head[1] = &times.head.backward;
        head_forward = dw__parts_sum(&times.head.forward);
        head_backward = dw__parts_sum(&times.head.backward);
        head_weight = times.head.weight;
    }
    int has_head = stage == dw__head_stage(layout) && chunk == v - 1;
    double experts, excess, dense = dw__stage_parameters(&planned, stage, &experts);
    dw__stage_attention(&planned, stage, &excess);
    dw__activation_bytes bytes;
    dw__activation_bytes_of(&planned, layout->recompute, layout->recompute_layers, stage, &bytes);
    *cost = (dw_stage_cost){
        .layers = (int)(layers / v + (chunk < fmod(layers, v) ? 1 : 0)),
        .forward =
            (dw__parts_sum(&whole.forward) - head_forward) / v + (has_head ? head_forward : 0),
        .backward_weight = (whole.weight - head_weight) / v + (has_head ? head_weight : 0),
        .forward_traffic =
            chunk_traffic(&planned, &whole.forward, head[0], bytes.moved, v, has_head),
        .backward_traffic =
            chunk_traffic(&planned, &whole.backward, head[1], bytes.moved, v, has_head),
        .send = whole.send,
        .send_bytes = sent_bytes(&planned),
        .parameters = dense + experts + excess,
        .activation_bytes = bytes.kept / v,
        .transient_bytes = (has_head ? bytes.logits : 0) + bytes.staged + bytes.again,
    };
    cost->backward = (dw__parts_sum(&whole.backward) - head_backward) / v +
                     (has_head ? head_backward : 0) - cost->backward_weight;
}
