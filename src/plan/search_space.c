/* Enumerates the sizes of layouts. Every size is a divisor of the number of GPUs, of the batch or of the model.
 * docs/autoplan.md gives the reason for each further restriction. */
#include "plan/planner_internal.h"
#include "plan/search.h"

/* Lists the divisors in ascending order. */
static int divisors(int of, int *list) {
    int count = 0;
    for (int64_t at = 1; at * at <= of; at++)
        if (of % at == 0) list[count++] = (int)at;
    for (int at = count - 1; at >= 0; at--) {
        int other = of / list[at];
        if (other != list[at]) list[count++] = other;
    }
    return count;
}

/* The features that a framework supports. */
typedef struct ability {
    unsigned schedules, zero_stages; /* bit sets */
    int parallel;                    /* 1: tensor, context, pipeline and expert parallelism, too */
    int attention_tp;                /* attention may use less tensor parallelism than the rest */
    int offload_optimizer;
    /* The first and the last stage may have other numbers of layers than those between. */
    int uneven;
    /* Bit set: the levels of recomputation that combine with offloaded activations. */
    unsigned offload_recompute;
} ability;

static const ability *ability_of(dw_framework framework) {
    enum {
        PLAIN = 1 << DW_SCHEDULE_1F1B | 1 << DW_SCHEDULE_GPIPE,
        CHUNKS = PLAIN | 1 << DW_SCHEDULE_INTERLEAVED,
        ALL = (1 << DW_SCHEDULES) - 1,
        /* KEPT: Megatron-Core's fine-grained offloading. INPUTS: DeepSpeed's cpu_checkpointing, which offloads only
         * the inputs of layers. */
        KEPT = 1 << DW_RECOMPUTE_NONE | 1 << DW_RECOMPUTE_SELECTIVE,
        INPUTS = 1 << DW_RECOMPUTE_FULL
    };
    static const ability abilities[DW_FRAMEWORKS] = {
        [DW_FRAMEWORK_OWN] = {ALL, 15, 1, 1, 1, 1, KEPT | INPUTS},
        [DW_FRAMEWORK_MEGATRON] = {CHUNKS, 1 | 2, 1, 0, 1, 1, KEPT},
        [DW_FRAMEWORK_MEGATRON_LM] = {CHUNKS, 1 | 2, 1, 0, 0, 0, 0},
        [DW_FRAMEWORK_TORCHTITAN] = {CHUNKS | 1 << DW_SCHEDULE_ZB_V, 1 | 8, 1, 0, 0, 1, 0},
        [DW_FRAMEWORK_FSDP] = {PLAIN, 4 | 8, 0, 0, 0, 0, 0},
        [DW_FRAMEWORK_DEEPSPEED] = {PLAIN, 15, 1, 0, 1, 0, INPUTS},
        [DW_FRAMEWORK_NANOTRON] = {PLAIN, 1 | 2, 1, 0, 0, 0, 0},
        [DW_FRAMEWORK_JAX] = {CHUNKS, 1 | 2 | 8, 1, 0, 0, 0, 0},
        [DW_FRAMEWORK_PYTORCH] = {PLAIN, 1 | 2, 0, 0, 0, 0, 0},
    };
    return &abilities[framework];
}

int dw__framework_has(dw_framework framework, int zero_stage, dw_pipeline_schedule schedule,
                      int parallel) {
    const ability *can = ability_of(framework);
    return can->zero_stages >> zero_stage & 1 && can->schedules >> schedule & 1 &&
           (!parallel || can->parallel);
}

int dw__space_offloads_optimizer(const dw__problem *problem) {
    return ability_of(problem->limits.base.framework)->offload_optimizer &&
           problem->hardware->host_bandwidth.value > 0 &&
           DW__ALLOWS(&problem->limits, offload_optimizer, 1);
}

int dw__space_offloads_layers(const dw__problem *problem, dw_recompute recompute) {
    return ability_of(problem->limits.base.framework)->offload_recompute >> recompute & 1 &&
           problem->hardware->host_bandwidth.value > 0 && problem->limits.high.offload_layers > 0;
}

static dw_status fail_ability(const dw__problem *problem, const char *what, const char *instead) {
    return dw__fail(DW_INVALID_ARGUMENT, "framework %s %s; %s, or choose another framework",
                    dw_framework_name(problem->limits.base.framework), what, instead);
}

dw_status dw__space_check(const dw__problem *problem) {
    const dw__limits *limits = &problem->limits;
    const ability *can = ability_of(limits->base.framework);
    int stages = 0, schedules = 0, moved = limits->low.offload_layers > 0;
    for (int at = 0; at <= 3; at++)
        stages += can->zero_stages >> at & 1 && DW__ALLOWS(limits, zero_stage, at);
    for (int at = 0; at < DW_SCHEDULES; at++)
        schedules += can->schedules >> at & 1 && DW__ALLOWS(limits, schedule, at);
    if (!stages)
        return fail_ability(problem, "does not support this zero_stage", "leave zero_stage out");
    if (!schedules)
        return fail_ability(problem, "does not support this schedule", "leave schedule out");
    if (limits->low.offload_optimizer && !can->offload_optimizer)
        return fail_ability(problem, "cannot keep the optimizer in the host's memory",
                            "leave offload_optimizer out");
    if (moved && !can->offload_recompute)
        return fail_ability(problem, "cannot keep activations in the host's memory",
                            "leave offload_layers out");
    for (int at = 0; at < DW_RECOMPUTE_AUTO && moved; at++)
        if (can->offload_recompute >> at & 1 && DW__ALLOWS(limits, recompute, at)) moved = 0;
    if (moved)
        return fail_ability(problem, "does not combine offload_layers with this recompute",
                            "leave one of them out");
    if ((limits->low.offload_layers > 0 || limits->low.offload_optimizer) &&
        problem->hardware->host_bandwidth.value <= 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the hardware \"%s\" lacks host_bandwidth, which offload needs; give it, "
                        "or leave the constraint out",
                        problem->hardware->name);
    return DW_OK;
}

static int micro_batches(const dw__problem *problem, const dw__mesh *mesh) {
    return problem->global_batch / (mesh->dp * mesh->micro_batch);
}

/* ---- meshes --------------------------------------------------------------------------------- */

static int precision_is_there(const dw__problem *problem, int precision) {
    if (!dw__scheme_in((dw_scheme)precision, dw__planned_schemes)) return 0;
    /* FP32 is never faster, and all kinds of FP8 have the same rate. They are planned only on request. */
    if (!problem->limits.set.precision &&
        (precision == DW_SCHEME_FP32 || precision == DW_SCHEME_FP8_ROW ||
         precision == DW_SCHEME_FP8_BLOCK))
        return 0;
    return DW__ALLOWS(&problem->limits, precision, precision) &&
           problem->hardware->rate[dw__rate_of((dw_scheme)precision)].value > 0;
}

/* For one choice of tensor and context parallelism: the possible pipeline stages and the divisors of the batch. */
typedef struct division {
    int smallest; /* only the smallest micro-batch for each number of stages */
    int stage_count, batch_count;
    int pp[DW__DIVISORS_MOST], dp[DW__DIVISORS_MOST], taken[DW__DIVISORS_MOST];
    int batches[DW__DIVISORS_MOST];
} division;

/* The number of stages is the innermost loop, because a layer's time does not depend on it (dw__meshes_bound). */
static dw_status push_stages(const dw__problem *problem, dw__mesh mesh, division *d,
                             dw__meshes *meshes) {
    int64_t expert_ranks = problem->model->experts ? (int64_t)mesh.ep * mesh.etp : 1;
    for (int at = 0; at < d->stage_count; at++) {
        mesh.pp = d->pp[at];
        mesh.dp = d->dp[at];
        if (problem->global_batch % ((int64_t)mesh.dp * mesh.micro_batch) ||
            (int64_t)mesh.dp * mesh.cp * mesh.tp % expert_ranks)
            continue;
        if (d->smallest && d->taken[at] && d->taken[at] != mesh.micro_batch) continue;
        d->taken[at] = mesh.micro_batch;
        DW_RETURN_IF_FAILED(DW_PUSH(meshes, mesh));
    }
    return DW_OK;
}

static dw_status push_precisions(const dw__problem *problem, dw__mesh mesh, division *d,
                                 dw__meshes *meshes) {
    for (int at = 0; at < DW_SCHEME_COUNT; at++) {
        if (!precision_is_there(problem, at)) continue;
        mesh.precision = at;
        DW_RETURN_IF_FAILED(push_stages(problem, mesh, d, meshes));
    }
    return DW_OK;
}

static int attention_divides(const dw_model_sizes *model, int tp) {
    return model->heads % tp == 0 && (model->kv_heads % tp == 0 || tp % model->kv_heads == 0);
}

/* Attention may use fewer ranks only within an NVLink domain: gathering all tokens for the MLP over the network is
 * too slow. */
static int may_split(const dw__problem *problem, int gpus, int tp) {
    const dw__limits *limits = &problem->limits;
    return tp > 1 && !limits->whole_attention && tp <= dw__domain_of(problem->hardware, gpus) &&
           ability_of(limits->base.framework)->attention_tp &&
           (!limits->set.sequence_parallel || limits->base.sequence_parallel);
}

/* Tries attention on fewer ranks than the rest. The other ranks then have sequences of their own. */
static dw_status push_attention(const dw__problem *problem, dw__mesh mesh, int less, division *d,
                                dw__meshes *meshes) {
    const dw__limits *limits = &problem->limits;
    for (int parts = 1; parts <= (less ? mesh.tp : 1); parts++) {
        if (mesh.tp % parts || mesh.micro_batch % parts) continue;
        mesh.atp = mesh.tp / parts;
        if (!attention_divides(problem->model, mesh.atp) ||
            !DW__ALLOWS(limits, attention_tp, mesh.atp))
            continue;
        DW_RETURN_IF_FAILED(push_precisions(problem, mesh, d, meshes));
    }
    return DW_OK;
}

static dw_status push_batches(const dw__problem *problem, dw__mesh mesh, int less, division *d,
                              dw__meshes *meshes) {
    for (int at = 0; at < d->stage_count; at++) d->taken[at] = 0;
    for (int at = 0; at < d->batch_count; at++) {
        if (!DW__ALLOWS(&problem->limits, micro_batch, d->batches[at])) continue;
        mesh.micro_batch = d->batches[at];
        DW_RETURN_IF_FAILED(push_attention(problem, mesh, less, d, meshes));
    }
    return DW_OK;
}

static dw_status push_experts(const dw__problem *problem, dw__mesh mesh, int less, division *d,
                              dw__meshes *meshes) {
    const dw_model_sizes *model = problem->model;
    if (!model->experts) {
        mesh.ep = 1;
        if (problem->limits.set.ep && !DW__ALLOWS(&problem->limits, ep, 1)) return DW_OK;
        return push_batches(problem, mesh, less, d, meshes);
    }
    int experts[DW__DIVISORS_MOST], tensors[DW__DIVISORS_MOST];
    int count = divisors(model->experts, experts), splits = divisors(mesh.tp, tensors);
    for (int at = 0; at < count; at++) {
        if (!DW__ALLOWS(&problem->limits, ep, experts[at])) continue;
        for (int split = 0; split < splits; split++) {
            mesh.ep = experts[at];
            mesh.etp = tensors[split];
            if (model->expert_ffn % mesh.etp || !DW__ALLOWS(&problem->limits, etp, mesh.etp))
                continue;
            DW_RETURN_IF_FAILED(push_batches(problem, mesh, less, d, meshes));
        }
    }
    return DW_OK;
}

static int tensor_divides(const dw__problem *problem, int gpus, int tp) {
    const dw_model_sizes *model = problem->model;
    return model->ffn % tp == 0 && model->shared_ffn % tp == 0 &&
           (attention_divides(model, tp) || may_split(problem, gpus, tp));
}

static void divide_stages(const dw__problem *problem, int gpus, int rest, division *d) {
    const dw__limits *limits = &problem->limits;
    int stages[DW__DIVISORS_MOST], count = divisors(rest, stages);
    int parallel = ability_of(limits->base.framework)->parallel;
    d->stage_count = 0;
    for (int p = 0; p < count && stages[p] <= problem->model->layers; p++) {
        int dp = rest / stages[p];
        if (!DW__ALLOWS(limits, pp, stages[p]) || !DW__ALLOWS(limits, dp, dp) ||
            problem->global_batch % dp || (!parallel && dp != gpus))
            continue;
        d->pp[d->stage_count] = stages[p];
        d->dp[d->stage_count++] = dp;
    }
}

dw_status dw__space_meshes(const dw__problem *problem, int gpus, int smallest, dw__meshes *meshes) {
    const dw__limits *limits = &problem->limits;
    int tensors[DW__DIVISORS_MOST], contexts[DW__DIVISORS_MOST];
    int tensor_count = divisors(gpus, tensors);
    division d = {.smallest = smallest};
    d.batch_count = divisors(problem->global_batch, d.batches);
    for (int t = 0; t < tensor_count; t++) {
        dw__mesh mesh = {.tp = tensors[t]};
        if (!DW__ALLOWS(limits, tp, mesh.tp) || !tensor_divides(problem, gpus, mesh.tp)) continue;
        int context_count = divisors(gpus / mesh.tp, contexts),
            less = may_split(problem, gpus, mesh.tp);
        for (int c = 0; c < context_count; c++) {
            mesh.cp = contexts[c];
            /* Causal attention is balanced by giving each rank one chunk from each end of the sequence. */
            if (!DW__ALLOWS(limits, cp, mesh.cp) ||
                (mesh.cp > 1 && problem->seq_len % (2 * (int64_t)mesh.cp)))
                continue;
            divide_stages(problem, gpus, gpus / mesh.tp / mesh.cp, &d);
            if (d.stage_count) DW_RETURN_IF_FAILED(push_experts(problem, mesh, less, &d, meshes));
        }
    }
    return DW_OK;
}

void dw__mesh_layout(const dw__problem *problem, const dw__mesh *mesh, dw_layout *layout) {
    *layout = problem->limits.base;
    layout->gpus = mesh->tp * mesh->cp * mesh->pp * mesh->dp;
    layout->tp = mesh->tp;
    layout->cp = mesh->cp;
    layout->pp = mesh->pp;
    layout->dp = mesh->dp;
    layout->ep = mesh->ep;
    layout->etp = mesh->etp;
    layout->micro_batch = mesh->micro_batch;
    layout->attention_tp = mesh->atp < mesh->tp || problem->limits.set.attention_tp ? mesh->atp : 0;
    layout->precision = (dw_scheme)mesh->precision;
    layout->seq_len = problem->seq_len;
    layout->global_batch = problem->global_batch;
    if (!problem->limits.set.sequence_parallel) layout->sequence_parallel = mesh->tp > 1;
}

/* ---- within a mesh -------------------------------------------------------------------------- */

static int shard_stage(const dw__problem *problem, const dw__mesh *mesh, dw__sharding *list,
                       int count, int stage) {
    const dw__limits *limits = &problem->limits;
    int ranks = mesh->dp * mesh->cp, parts[DW__DIVISORS_MOST], pieces = divisors(ranks, parts);
    for (int at = pieces - 1; at >= 0; at--) {
        /* Without ZeRO nothing is sharded. Sharding over a subset of the ranks saves time only if parameters are
         * gathered. Below stage 3 the traffic is the same and the memory larger. */
        int whole = parts[at] == ranks;
        if (!whole && (stage == 0 || (stage < 3 && !limits->set.shard))) break;
        if (ranks > 1 && parts[at] == 1) break;
        if (stage > 0 && limits->set.shard && !DW__ALLOWS(limits, shard, parts[at])) continue;
        /* In a pipeline, parameters stay gathered for all micro-batches of a step. */
        int vary = stage == 3 && (mesh->pp == 1 || limits->set.reshard);
        for (int reshard = 1; reshard >= !vary; reshard--) {
            if (vary && !DW__ALLOWS(limits, reshard, reshard)) continue;
            for (int offload = 0; offload <= dw__space_offloads_optimizer(problem); offload++) {
                if (!DW__ALLOWS(limits, offload_optimizer, offload) || count == DW__SHARDINGS_MOST)
                    continue;
                list[count++] = (dw__sharding){stage, whole ? 0 : parts[at], reshard, offload};
            }
        }
    }
    return count;
}

int dw__space_shardings(const dw__problem *problem, const dw__mesh *mesh, dw__sharding *list) {
    const ability *can = ability_of(problem->limits.base.framework);
    int count = 0;
    for (int stage = 0; stage <= 3; stage++) {
        if (!(can->zero_stages >> stage & 1) || !DW__ALLOWS(&problem->limits, zero_stage, stage))
            continue;
        if (problem->limits.set.shard && stage == 0) continue;
        /* In a pipeline, gradients accumulate whole, as in stage 1. */
        if (stage == 2 && !problem->limits.set.zero_stage && mesh->pp > 1) continue;
        if (problem->limits.base.framework == DW_FRAMEWORK_DEEPSPEED && mesh->pp > 1 && stage > 1)
            continue;
        count = shard_stage(problem, mesh, list, count, stage);
        if (mesh->dp * mesh->cp == 1 && mesh->atp == mesh->tp && count > 0)
            break; /* one rank has nothing to shard */
    }
    return count;
}

int dw__space_may_be_uneven(const dw__problem *problem) {
    const dw__limits *limits = &problem->limits;
    return ability_of(limits->base.framework)->uneven && limits->set.first_stage_layers <= 0 &&
           limits->set.last_stage_layers <= 0;
}

static double heaviest_of(const dw__mesh *mesh, const dw__ends *ends, double head) {
    double most = ends->first > ends->last + head ? ends->first : ends->last + head;
    return mesh->pp > 2 && ends->between > most ? ends->between : most;
}

/* Each stage between the ends has k layers, and the ends share the rest: the two whole-number splits nearest to equal
 * times, and one in which only the last stage is shorter. A k above the mean of layers and head exceeds what any
 * stage needs. */
int dw__space_ends(const dw__problem *problem, const dw__mesh *mesh, double head, dw__ends *list) {
    int layers = problem->model->layers, p = mesh->pp, even = layers / p, count = 0;
    const dw__ends plain = {even, even + (layers % p > 0), even};
    double most = heaviest_of(mesh, &plain, head) - 1e-6;
    for (int k = even; p > 1 && k <= (layers + head) / p + 1; k++) {
        int both = layers - k * (p - 2);
        int lasts[3] = {(int)((both - head) / 2), (int)((both - head) / 2) + 1, both - k};
        for (int at = 0; at < 3; at++) {
            int last = lasts[at] < 1 ? 1 : lasts[at];
            dw__ends ends = {both - last, k, last};
            int to = 0, known = ends.first < 1 || heaviest_of(mesh, &ends, head) >= most;
            for (int i = 0; i < count && !known; i++)
                known = list[i].first == ends.first && list[i].last == ends.last;
            if (known) continue;
            while (to < count &&
                   heaviest_of(mesh, &list[to], head) <= heaviest_of(mesh, &ends, head))
                to++;
            if (to == DW__ENDS_MOST) continue;
            if (count < DW__ENDS_MOST) count++;
            for (int i = count - 1; i > to; i--) list[i] = list[i - 1];
            list[to] = ends;
        }
        if (p == 2) break;
    }
    return count;
}

int dw__space_turns(const dw__problem *problem, const dw__mesh *mesh, const dw__ends *ends,
                    dw__turns *list) {
    const dw__limits *limits = &problem->limits;
    const ability *can = ability_of(limits->base.framework);
    int count = 0, p = mesh->pp, m = micro_batches(problem, mesh);
    int layers = problem->model->layers, most = (layers + p - 1) / p;
    for (int schedule = 0; schedule < DW_SCHEDULES; schedule++) {
        if (!(can->schedules >> schedule & 1) || !DW__ALLOWS(limits, schedule, schedule)) continue;
        if (p == 1 && schedule != DW_SCHEDULE_1F1B) continue;
        int low = 1, high = 1;
        switch ((dw_pipeline_schedule)schedule) {
        case DW_SCHEDULE_INTERLEAVED: /* micro-batches come in groups of p */
            if (m % p) continue;
            low = 2;
            high = ends ? ends->last : most;
            break;
        case DW_SCHEDULE_ZB_H1:
            if (m < p) continue;
            break;
        case DW_SCHEDULE_ZB_H2:
            if (m < 2 * p) continue;
            break;
        case DW_SCHEDULE_ZB_V:
            if (m < 2 * p || most < 2 || ends) continue;
            low = high = 2;
            break;
        /* micro-batches enter at both ends: needs an even number of stages and of micro-batches */
        case DW_SCHEDULE_DUALPIPE:
            if (p % 2 || m % 2 || m < 2 * p || ends) continue;
            break;
        default: break;
        }
        /* Chunks have the same number of layers, which must divide the largest stage. Smaller stages lack some. */
        for (int v = low; v <= high && count < DW__TURNS_MOST; v++) {
            int chunks = v > 1 && schedule == DW_SCHEDULE_INTERLEAVED;
            if (chunks && !ends && most % v) continue;
            if (chunks && ends &&
                (ends->first % v || ends->last % v || (p > 2 && ends->between % v)))
                continue;
            if (!DW__ALLOWS(limits, virtual_stages, v) || (int64_t)p * v > layers + 2) continue;
            list[count++] = (dw__turns){(dw_pipeline_schedule)schedule, v};
        }
    }
    return count;
}
