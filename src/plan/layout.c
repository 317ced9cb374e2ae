/* Layouts: names, defaults, and whether sizes divide. */
#include "plan/planner_internal.h"

const char *dw_pipeline_schedule_name(dw_pipeline_schedule schedule) {
    static const char *const names[DW_SCHEDULES] = {"1f1b",  "gpipe", "interleaved", "zb-h1",
                                                    "zb-h2", "zb-v",  "dualpipe"};
    return (unsigned)schedule < DW_SCHEDULES ? names[schedule] : "unknown";
}
const char *dw_recompute_name(dw_recompute recompute) {
    static const char *const names[DW_RECOMPUTES] = {"none", "selective", "full", "auto"};
    return (unsigned)recompute < DW_RECOMPUTES ? names[recompute] : "unknown";
}
const char *dw_framework_name(dw_framework framework) {
    static const char *const names[DW_FRAMEWORKS] = {"deepwell",   "megatron", "megatron-lm",
                                                     "torchtitan", "fsdp",     "deepspeed",
                                                     "nanotron",   "jax",      "pytorch"};
    return (unsigned)framework < DW_FRAMEWORKS ? names[framework] : "unknown";
}

void dw_layout_default(dw_layout *layout) {
    *layout = (dw_layout){
        .gpus = 1,
        .tp = 1,
        .cp = 1,
        .pp = 1,
        .dp = 1,
        .ep = 1,
        .virtual_stages = 1,
        .sequence_parallel = 1,
        .reshard = 1,
        .micro_batch = 1,
        .global_batch = 1,
        .seq_len = 1,
        .overlap_tensor = 1,
        .overlap_data = 1,
    };
}

static dw_status divides(const char *what, int64_t value, const char *by, int64_t divisor) {
    if (value % divisor == 0) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "%s %lld is not a multiple of %s %lld; choose sizes that divide", what,
                    (long long)value, by, (long long)divisor);
}

const dw__scheme_set dw__planned_schemes =
    DW__SCHEME(BF16) | DW__SCHEME(FP32) | DW__SCHEME(FP8_TENSOR) | DW__SCHEME(FP8_ROW) |
    DW__SCHEME(FP8_BLOCK) | DW__SCHEME(MXFP8) | DW__SCHEME(NVFP4);

dw_rate dw__rate_of(dw_scheme precision) {
    switch (precision) {
    case DW_SCHEME_FP32: return DW_RATE_TF32;
    case DW_SCHEME_FP8_TENSOR:
    case DW_SCHEME_FP8_ROW:
    case DW_SCHEME_FP8_BLOCK: return DW_RATE_FP8;
    case DW_SCHEME_MXFP8: return DW_RATE_MXFP8;
    case DW_SCHEME_NVFP4: return DW_RATE_FP4;
    default: return DW_RATE_BF16;
    }
}

dw_status dw_layout_check(const dw_model_sizes *model, const dw_hardware *hardware,
                          const dw_layout *layout) {
    const struct {
        const char *name;
        int value;
    } sizes[] = {{"gpus", layout->gpus},
                 {"tp", layout->tp},
                 {"cp", layout->cp},
                 {"pp", layout->pp},
                 {"dp", layout->dp},
                 {"ep", layout->ep},
                 {"virtual_stages", layout->virtual_stages},
                 {"micro_batch", layout->micro_batch},
                 {"global_batch", layout->global_batch},
                 {"seq_len", layout->seq_len}};
    for (size_t at = 0; at < DW_COUNT(sizes); at++) {
        if (sizes[at].value < 1 || sizes[at].value > 1 << 28)
            return dw__fail(DW_INVALID_ARGUMENT, "%s is %d; expected 1 to %d", sizes[at].name,
                            sizes[at].value, 1 << 28);
    }
    double ranks = (double)layout->tp * layout->cp * layout->pp * layout->dp;
    if (ranks != layout->gpus)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "tp %d x cp %d x pp %d x dp %d makes %.0f ranks; expected as many as the %d GPUs",
            layout->tp, layout->cp, layout->pp, layout->dp, ranks, layout->gpus);
    if ((unsigned)layout->schedule >= DW_SCHEDULES ||
        (unsigned)layout->recompute >= DW_RECOMPUTES ||
        (unsigned)layout->framework >= DW_FRAMEWORKS || layout->zero_stage < 0 ||
        layout->zero_stage > 3)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the layout's schedule, recompute, framework or zero_stage has an unknown "
                        "value; see planner.h");
    DW_RETURN_IF_FAILED(
        dw__scheme_check("the layout's precision", layout->precision, dw__planned_schemes));
    int ranks_of_experts = layout->gpus / layout->pp, etp = layout->etp      ? layout->etp
                                                            : layout->ep > 1 ? 1
                                                                             : layout->tp;
    if (layout->etp < 0 || layout->shard < 0)
        return dw__fail(DW_INVALID_ARGUMENT, "etp is %d and shard %d; expected 0 or more",
                        layout->etp, layout->shard);
    if (layout->expert_load < 0 || layout->expert_load > 100000)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "expert_load is %d; expected a percentage of an even share, 100 to 100000, or 0",
            layout->expert_load);
    int attention_tp = layout->attention_tp ? layout->attention_tp : layout->tp;
    if (attention_tp < 1)
        return dw__fail(DW_INVALID_ARGUMENT, "attention_tp is %d; expected 0 or more",
                        attention_tp);
    DW_RETURN_IF_FAILED(divides("tp", layout->tp, "attention_tp", attention_tp));
    DW_RETURN_IF_FAILED(divides("micro_batch", layout->micro_batch, "tp / attention_tp",
                                layout->tp / attention_tp));
    if (attention_tp < layout->tp && !layout->sequence_parallel)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "attention_tp %d below tp %d needs sequence_parallel, which distributes the sequences",
            attention_tp, layout->tp);
    DW_RETURN_IF_FAILED(divides("heads", model->heads,
                                attention_tp < layout->tp ? "attention_tp" : "tp", attention_tp));
    if (layout->ep > 1 && !model->experts)
        return dw__fail(DW_INVALID_ARGUMENT, "ep is %d and the model has no experts; use ep 1",
                        layout->ep);
    if (model->experts) {
        DW_RETURN_IF_FAILED(divides("experts", model->experts, "ep", layout->ep));
        DW_RETURN_IF_FAILED(
            divides("a stage's ranks,", ranks_of_experts, "ep x etp", (int64_t)layout->ep * etp));
    }
    DW_RETURN_IF_FAILED(divides("global_batch", layout->global_batch, "dp x micro_batch",
                                (int64_t)layout->dp * layout->micro_batch));
    if (layout->shard)
        DW_RETURN_IF_FAILED(
            divides("dp x cp", (int64_t)layout->dp * layout->cp, "shard", layout->shard));
    if ((int64_t)layout->pp * layout->virtual_stages >
        model->layers + 2) /* one chunk may hold only the embedding, another only the head */
        return dw__fail(DW_INVALID_ARGUMENT,
                        "pp %d x virtual_stages %d is more than the model's %d layers", layout->pp,
                        layout->virtual_stages, model->layers);
    if (layout->virtual_stages > 1 && layout->pp == 1)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "virtual_stages is %d without a pipeline; use pp above 1",
                        layout->virtual_stages);
    if (hardware->rate[DW_RATE_BF16].value <= 0 || hardware->memory_bandwidth.value <= 0 ||
        hardware->sm_count.value <= 0 || hardware->memory.value <= 0)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "the hardware \"%s\" lacks its BF16 rate, memory, memory_bandwidth or sm_count",
            hardware->name);
    if (layout->gpus > 1 &&
        (hardware->link_bandwidth.value <= 0 || hardware->network_bandwidth.value <= 0))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the hardware \"%s\" lacks link_bandwidth or network_bandwidth, which %d "
                        "GPUs need",
                        hardware->name, layout->gpus);
    if ((layout->offload_layers || layout->offload_optimizer) &&
        hardware->host_bandwidth.value <= 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the hardware \"%s\" lacks host_bandwidth, which offload_layers and "
                        "offload_optimizer need",
                        hardware->name);
    if (hardware->rate[dw__rate_of(layout->precision)].value <= 0)
        return dw__fail(DW_UNSUPPORTED, "%s has no %s rate, which the precision %s needs",
                        hardware->name, dw_rate_name(dw__rate_of(layout->precision)),
                        dw_scheme_name(layout->precision));
    return DW_OK;
}
