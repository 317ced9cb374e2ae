/* Computes a layout's costs, simulates its step, and compares the figures with dw_predict. */
#include "plan/plan_text.h"
#include "plan/planner_internal.h"
#include "plan/search.h"
#include "simulate/simulate_internal.h"
#include <math.h>
#include <stdio.h>

const char *dw_stream_name(dw_stream stream) {
    static const char *const names[DW_STREAMS] = {
        "compute",
        "tensor parallel",
        "context parallel",
        "expert parallel",
        "send to the next rank",
        "send to the previous rank",
        "data parallel",
        "host: copies and its optimizer",
    };
    return (unsigned)stream < DW_STREAMS ? names[stream] : "unknown";
}
const char *dw_event_kind_name(dw_event_kind kind) {
    static const char *const names[DW_EVENT_KINDS] = {"forward",
                                                      "backward",
                                                      "backward of inputs",
                                                      "backward of weights",
                                                      "send activations",
                                                      "send gradients",
                                                      "gather parameters",
                                                      "reduce gradients",
                                                      "tensor parallel",
                                                      "context parallel",
                                                      "expert parallel",
                                                      "copy to the host",
                                                      "copy from the host",
                                                      "optimizer",
                                                      "once a step"};
    return (unsigned)kind < DW_EVENT_KINDS ? names[kind] : "unknown";
}

/* ZeRO-3: traffic beside an operation. Its exposed part is added to the operation's seconds. */
static dw__traffic_cost beside(const dw__planned *planned, double *seconds, double traffic) {
    dw__traffic_cost cost = {traffic, dw__data_exposed(planned, traffic, *seconds)};
    *seconds += cost.exposed;
    return cost;
}

static void each_micro_batch(const dw__planned *planned, int split, int chunks,
                             const dw__data_traffic *traffic, dw__chunk_cost *cost) {
    double again = traffic->again / chunks, reduce = traffic->reduce / chunks;
    cost->beside_forward.gather = beside(planned, &cost->forward, traffic->gather / chunks);
    if (split) {
        cost->beside_input.gather = beside(planned, &cost->input, again);
        cost->beside_weight.reduce = beside(planned, &cost->weight, reduce);
        return;
    }
    double backward = cost->input + cost->weight;
    dw__traffic_cost both = beside(planned, &backward, again + reduce);
    double part = both.wire > 0 ? again / both.wire : 0;
    cost->input = backward - cost->weight;
    cost->beside_input.gather = (dw__traffic_cost){again, part * both.exposed};
    cost->beside_weight.reduce = (dw__traffic_cost){reduce, (1 - part) * both.exposed};
}

static void once_a_step(const dw__planned *planned, int split, int chunks,
                        const dw__data_traffic *traffic, dw__chunk_cost *cost) {
    /* Without sharding, gradients are reduced to all ranks at the end. With it each rank updates its shard, and the
     * next step gathers the shards. */
    int sharded = planned->layout->zero_stage > 0;
    cost->gather = sharded ? traffic->gather / chunks : 0;
    cost->reduce = (traffic->reduce + traffic->again + (sharded ? 0 : traffic->gather)) / chunks;
    double last = split ? cost->weight : cost->input + cost->weight;
    cost->gather_exposed = dw__data_exposed(planned, cost->gather, cost->forward);
    cost->reduce_exposed = dw__data_exposed(planned, cost->reduce, last);
}

static dw__beside_cost inside(const dw_stage_traffic *t) {
    return (dw__beside_cost){.inside = {{t->tensor, t->tensor_exposed},
                                        {t->context, t->context_exposed},
                                        {t->expert, t->expert_exposed}},
                             .host = {t->host, t->host_exposed}};
}

static void slow_down(dw__beside_cost *cost, double slow) {
    dw__traffic_cost *all[] = {&cost->inside[0], &cost->inside[1], &cost->inside[2],
                               &cost->gather,    &cost->reduce,    &cost->host};
    for (size_t at = 0; at < DW_COUNT(all); at++) all[at]->wire *= slow, all[at]->exposed *= slow;
}

static void chunk_cost(const dw__planned *planned, const dw__schedule *schedule, int rank,
                       int chunk, dw__chunk_cost *cost) {
    const dw_layout *layout = planned->layout;
    /* The second direction of DualPipe runs the opposite stage. */
    int opposite = schedule->schedule == DW_SCHEDULE_DUALPIPE && chunk;
    int stage = opposite ? schedule->stages - 1 - rank : rank, chunks = layout->virtual_stages;
    dw_stage_cost stage_cost;
    dw_predict_stage(planned->model, planned->hardware, layout, stage, opposite ? 0 : chunk,
                     &stage_cost);
    double slow = dw__slowdown(planned);
    *cost = (dw__chunk_cost){.forward = stage_cost.forward,
                             .input = stage_cost.backward,
                             .weight = stage_cost.backward_weight,
                             .beside_forward = inside(&stage_cost.forward_traffic),
                             .beside_input = inside(&stage_cost.backward_traffic),
                             .kept_bytes = stage_cost.activation_bytes};
    dw__activation_bytes bytes;
    dw__activation_bytes_of(planned, layout->recompute, layout->recompute_layers, stage, &bytes);
    cost->again_bytes = bytes.again;
    cost->logits_bytes = stage_cost.transient_bytes - bytes.again;

    if (layout->zero_stage == 3 && layout->pp == 1 && layout->dp * layout->cp > 1) {
        double experts, dense = dw__stage_parameters(planned, stage, &experts);
        double table = dw__embedding_parameters(planned->model) / layout->tp;
        cost->layers = stage_cost.layers;
        cost->layer_elements = fmax(0, dense + experts - table) / stage_cost.layers;
    }

    dw__data_traffic traffic;
    dw__data_traffic_of(planned, stage, &traffic);
    /* ZeRO-2: `each` has the reduction, `once` the gather */
    dw__data_traffic each = traffic, once = traffic;
    if (traffic.each)
        once.gather = 0;
    else
        each.gather = 0;
    if (traffic.reduce_each)
        once.again = once.reduce = 0;
    else
        each.again = each.reduce = 0;
    each_micro_batch(planned, schedule->split, chunks, &each, cost);
    once_a_step(planned, schedule->split, chunks, &once, cost);
    cost->reduce += traffic.across / chunks;
    cost->reduce_exposed += planned->constants->data_exposed * traffic.across / chunks;
    double *seconds[] = {&cost->forward,        &cost->input,  &cost->weight,        &cost->gather,
                         &cost->gather_exposed, &cost->reduce, &cost->reduce_exposed};
    for (size_t at = 0; at < DW_COUNT(seconds); at++) *seconds[at] *= slow;
    slow_down(&cost->beside_forward, slow);
    slow_down(&cost->beside_input, slow);
    slow_down(&cost->beside_weight, slow);
    cost->forward += dw__micro_batch_fixed(planned) / schedule->chunks *
                     (schedule->schedule == DW_SCHEDULE_DUALPIPE ? schedule->chunks : 1);
}

static void add_memory(dw_memory_parts *sum, const dw_memory_parts *parts, double part) {
    double *to = (double *)sum;
    const double *from = (const double *)parts;
    for (size_t at = 0; at < sizeof *sum / sizeof(double); at++) to[at] += part * from[at];
}

static void rank_cost(const dw__planned *planned, const dw__schedule *schedule, int rank,
                      dw__rank_cost *cost) {
    const dw_layout *layout = planned->layout;
    int dualpipe = schedule->schedule == DW_SCHEDULE_DUALPIPE;
    int stages[2] = {rank, dualpipe ? schedule->stages - 1 - rank : rank};
    double slow = dw__slowdown(planned);
    dw_stage_cost stage_cost;
    dw_predict_stage(planned->model, planned->hardware, layout, rank, 0, &stage_cost);
    *cost = (dw__rank_cost){
        .send = stage_cost.send * slow,
        .sync = dw__pipeline_sync(planned->constants, planned->layout),
        .fixed = dw__step_fixed(planned),
        .optimizer_stream =
            dw__optimizer_host_seconds(planned, rank) > 0 ? DW_STREAM_HOST : DW_STREAM_COMPUTE,
    };
    for (int at = 0; at < 2; at++) {
        dw_memory_parts memory;
        dw__activation_bytes bytes;
        dw__memory(planned, layout->recompute, layout->recompute_layers, stages[at], &memory);
        dw__activation_bytes_of(planned, layout->recompute, layout->recompute_layers, stages[at],
                                &bytes);
        /* Short of memory, the allocator frees its unused blocks. dw_predict uses the same rule for what fits. */
        double overhead = memory.overhead - dw__given_back(planned, &memory);
        cost->constant_bytes +=
            (memory.parameters + memory.gradients + memory.optimizer + overhead) / 2;
        cost->busy_bytes = fmax(cost->busy_bytes, memory.workspace - bytes.logits);
        cost->optimizer += dw__optimizer_seconds(planned, stages[at]) * slow / (dualpipe ? 1 : 2);
        add_memory(&cost->memory, &memory, 0.5);
    }
    cost->memory.overhead = cost->constant_bytes - cost->memory.parameters -
                            cost->memory.gradients - cost->memory.optimizer;
}

static const char *const no_answer = "";

/* Returns the predicted seconds of `layout`, or 0 with the reason why there are none. */
static double seconds_of(const dw_model_sizes *model, const dw_hardware *hardware,
                         const dw_layout *layout, const char **reason) {
    dw_prediction prediction;
    if (dw_predict(model, hardware, layout, &prediction) != DW_OK) {
        *reason = "the layout is not possible: its sizes do not divide, or the GPU does not "
                  "support its precision";
        return 0;
    }
    if (!prediction.fits) {
        *reason = "does not fit into the GPUs' memory";
        return 0;
    }
    *reason = no_answer;
    return prediction.seconds;
}

/* ---- the baseline: the fastest of the usual layouts ---- */

typedef struct baseline {
    const dw_model_sizes *model;
    const dw_hardware *hardware;
    int divides; /* some layout has whole numbers, even if it does not fit */
    double seconds;
    dw_layout layout; /* the fastest layout so far that fits */
} baseline;

static void try_usual(baseline *b, const dw_layout *layout) {
    dw_prediction prediction;
    if (dw_predict(b->model, b->hardware, layout, &prediction) != DW_OK) return;
    b->divides = 1;
    if (!prediction.fits || (b->seconds > 0 && prediction.seconds >= b->seconds)) return;
    b->seconds = prediction.seconds;
    b->layout = *layout;
    b->layout.recompute = prediction.recompute;
    b->layout.recompute_layers = prediction.recompute_layers;
}

/* Tries micro-batches of 1 to 8 sequences, and expert parallelism in powers of two. */
static void try_batches(baseline *b, dw_layout layout) {
    enum { MICRO_BATCH_MOST = 8 };
    int64_t ranks = (int64_t)layout.dp * layout.cp * layout.tp;
    int experts = b->model->experts > 0 ? b->model->experts : 1;
    for (layout.ep = 1; layout.ep <= experts && layout.ep <= ranks; layout.ep *= 2) {
        if (experts % layout.ep || ranks % layout.ep) continue;
        for (layout.micro_batch = 1; layout.micro_batch <= MICRO_BATCH_MOST;
             layout.micro_batch *= 2)
            if (layout.global_batch % ((int64_t)layout.dp * layout.micro_batch) == 0 &&
                (layout.virtual_stages == 1 ||
                 layout.global_batch / layout.dp / layout.micro_batch % layout.pp == 0))
                try_usual(b, &layout);
    }
}

/* Tries 1F1B, and interleaved chunks with equal numbers of layers. */
static void try_schedules(baseline *b, dw_layout layout) {
    int most = (b->model->layers + layout.pp - 1) / layout.pp;
    for (int chunks = 1; chunks <= (layout.pp > 1 ? most : 1); chunks *= 2) {
        if (most % chunks) continue;
        layout.virtual_stages = chunks;
        layout.schedule = chunks > 1 ? DW_SCHEDULE_INTERLEAVED : DW_SCHEDULE_1F1B;
        int parallel = layout.tp * layout.cp * layout.pp > 1;
        if (dw__framework_has(layout.framework, layout.zero_stage, layout.schedule, parallel))
            try_batches(b, layout);
    }
}

/* Tries FSDP over all GPUs, with and without tensor parallelism within a node, and ZeRO-1 with a pipeline. All sizes
 * are powers of two. Framework, kernels and precision are those of the given layout; recomputation is the least that
 * fits. */
static void try_sizes(baseline *b, dw_layout layout) {
    int gpus = layout.gpus / layout.cp;
    for (layout.tp = 1; layout.tp <= b->hardware->gpus_per_node && gpus % layout.tp == 0;
         layout.tp *= 2) {
        int rest = gpus / layout.tp;
        layout.sequence_parallel = layout.tp > 1;
        for (layout.pp = 1; rest % layout.pp == 0 && layout.pp <= b->model->layers;
             layout.pp *= 2) {
            layout.dp = rest / layout.pp;
            for (layout.zero_stage = 0; layout.zero_stage <= 3; layout.zero_stage++) {
                int alone = layout.dp * layout.cp == 1;
                if (layout.zero_stage == 2 || alone != (layout.zero_stage == 0)) continue;
                if (layout.zero_stage == 3 && layout.pp > 1) continue;
                try_schedules(b, layout);
            }
        }
    }
}

static dw_status compare_usual(const dw_model_sizes *model, const dw_hardware *hardware,
                               dw_simulation_figures *f, const dw_layout *layout) {
    baseline b = {.model = model};
    /* Usual layouts leave memory free as plans do. Only if none fits so may they use all of it. */
    dw_hardware reduced = *hardware;
    reduced.memory.value *= 1 - DW__PLAN_RESERVE;
    const dw_hardware *const hardwares[] = {&reduced, hardware};
    dw_layout other = *layout;
    dw__text words = {0};
    other.attention_tp = other.etp = other.shard = other.offload_layers = 0;
    other.offload_optimizer = other.recompute_layers = other.overlap_expert = 0;
    other.first_stage_layers = other.last_stage_layers = 0;
    other.reshard = 1;
    other.recompute = DW_RECOMPUTE_AUTO;
    f->speedup = 0;
    f->speedup_reason = no_answer;
    /* Uses the least context parallelism with which a layout fits, for long sequences only. */
    for (int at = 0; at < 2 && b.seconds <= 0; at++) {
        b.hardware = hardwares[at];
        for (other.cp = 1; b.seconds <= 0 && layout->gpus % other.cp == 0; other.cp *= 2)
            if (other.cp == 1 || layout->seq_len % (2 * other.cp) == 0) try_sizes(&b, other);
    }
    if (b.seconds <= 0) {
        f->speedup_reason = b.divides ? "none of the usual layouts fits into the GPUs' memory"
                                      : "no usual layout divides the batch into whole sequences";
        return DW_OK;
    }
    f->speedup = b.seconds / f->prediction.seconds;
    f->baseline_layout = b.layout;
    dw_status status = dw__layout_words(&b.layout, &words);
    if (status == DW_OK) snprintf(f->baseline, sizeof f->baseline, "%s", words.text);
    dw__text_free(&words);
    return status;
}

static dw_status compare(const dw_model_sizes *model, const dw_hardware *hardware,
                         dw_simulation_figures *f, const dw_layout *layout) {
    dw_layout other = *layout;
    other.precision = DW_SCHEME_BF16;
    double seconds;
    if (layout->precision == DW_SCHEME_BF16) {
        f->speedup_bf16 = 1;
        f->speedup_bf16_reason = no_answer;
    } else {
        other.recompute = DW_RECOMPUTE_AUTO;
        other.recompute_layers = 0;
        seconds = seconds_of(model, hardware, &other, &f->speedup_bf16_reason);
        f->speedup_bf16 = seconds / f->prediction.seconds;
    }
    return compare_usual(model, hardware, f, layout);
}

dw_status dw_simulate(const dw_model_sizes *model, const dw_hardware *hardware,
                      const dw_layout *given, dw_simulation **simulation) {
    double began = dw__seconds();
    dw_prediction prediction;
    DW_RETURN_IF_FAILED(dw_predict(model, hardware, given, &prediction));
    dw_layout layout = *given;
    layout.recompute = prediction.recompute;
    layout.recompute_layers = prediction.recompute_layers;
    int micro_batches = layout.global_batch / (layout.dp * layout.micro_batch);
    double most = (double)micro_batches * layout.pp * (layout.virtual_stages + 1) * 8;
    if (most > DW_SIMULATE_MOST_EVENTS)
        return dw__fail(DW_UNSUPPORTED,
                        "%d micro-batches on %d stages of %d chunks exceed %d events; simulate a "
                        "smaller batch, which shows the same schedule",
                        micro_batches, layout.pp, layout.virtual_stages, DW_SIMULATE_MOST_EVENTS);
    dw_simulation *made = NULL;
    DW_RETURN_IF_FAILED(dw__simulation_begin(layout.schedule, layout.pp, layout.virtual_stages,
                                             micro_batches, &made));
    const dw__schedule *schedule = &made->schedule;
    made->model = *model;
    made->layout = layout;
    dw_status status = dw_hardware_with_gpus(hardware, layout.gpus, &made->hardware);
    if (status != DW_OK) {
        dw_simulation_destroy(made);
        return status;
    }
    made->operation_count = dw_predict_operations(model, hardware, &layout, made->operations);
    /* Uses the schedule's own number of chunks. */
    layout.virtual_stages = schedule->schedule == DW_SCHEDULE_DUALPIPE ? 1 : schedule->chunks;
    dw__planned planned;
    dw__planned_begin(&planned, &dw__constants_default, model, hardware, &layout);
    for (int rank = 0; rank < schedule->stages; rank++) {
        rank_cost(&planned, schedule, rank, &made->costs.ranks[rank]);
        for (int chunk = 0; chunk < schedule->chunks; chunk++)
            chunk_cost(&planned, schedule, rank, chunk,
                       &made->costs.chunks[rank * schedule->chunks + chunk]);
    }
    made->costs.input_frees = 1 - dw__weight_kept(&planned, layout.recompute);
    status = dw__schedule_order(made);
    if (status == DW_OK) status = dw__simulate_events(made);
    if (status != DW_OK) {
        dw_simulation_destroy(made);
        return status;
    }
    dw_simulation_figures *f = &made->figures;
    f->prediction = prediction;
    f->closed_bubble =
        dw_pipeline_bubble(given->schedule, given->pp, given->virtual_stages, micro_batches);
    f->tokens_per_second = (double)given->global_batch * given->seq_len / f->seconds / given->gpus;
    f->mfu = f->tokens_per_second * dw_planner_token_flops(model, given->seq_len) /
             hardware->rate[DW_RATE_BF16].value;
    f->peak_rate = dw__rate_of(given->precision);
    f->peak_utilization =
        f->mfu * hardware->rate[DW_RATE_BF16].value / hardware->rate[f->peak_rate].value;
    f->capacity = prediction.capacity;
    double host = prediction.host_optimizer + prediction.host_activations;
    int host_fits = prediction.host_capacity <= 0 || host <= prediction.host_capacity;
    f->fits = f->peak_bytes <= f->capacity && host_fits;
    status = compare(model, hardware, f, given);
    if (status != DW_OK) {
        dw_simulation_destroy(made);
        return status;
    }
    made->seconds_to_simulate = dw__seconds() - began;
    *simulation = made;
    return DW_OK;
}

void dw_simulation_figures_of(const dw_simulation *simulation, dw_simulation_figures *figures) {
    *figures = simulation->figures;
}
const dw_simulated_rank *dw_simulation_rank(const dw_simulation *simulation, int rank) {
    return &simulation->ranks[rank];
}
const dw_event *dw_simulation_events(const dw_simulation *simulation, size_t *count) {
    *count = simulation->events.count;
    return simulation->events.items;
}
const dw_memory_point *dw_simulation_memory(const dw_simulation *simulation, int rank,
                                            size_t *count) {
    *count = simulation->memory[rank].count;
    return simulation->memory[rank].items;
}
