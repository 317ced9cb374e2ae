/* Writes the figures as JSON, for programs and for the report page. */
#include "hardware/hardware_internal.h"
#include "plan/planner_internal.h"
#include "simulate/simulate_internal.h"
#include <stdio.h>
#include <string.h>

dw_status dw__simulation_write_string(const char *string, dw__text *out) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "\""));
    for (int length; *string; string += length) {
        length = dw__utf8_length(string);
        if (length == 0)
            DW_RETURN_IF_FAILED(dw__text_printf(out, "?"));
        else if (strchr("\"\\<", *string))
            DW_RETURN_IF_FAILED(dw__text_printf(out, "\\u%04x", (unsigned)*string));
        else
            DW_RETURN_IF_FAILED(dw__text_append(out, string, (size_t)length));
        if (length == 0) length = 1;
    }
    return dw__text_printf(out, "\"");
}

static dw_status put_parts(dw__text *out, const dw_prediction *p) {
    const dw_time_parts *t = &p->time;
    const dw_memory_parts *m = &p->memory;
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "  \"predicted\": {\n    \"step_time_ms\": %.6g,\n    \"bubble_fraction\": %.6g,\n"
        "    \"mfu\": %.6g,\n    \"memory_gb\": %.6g,\n    \"fits\": %s,\n"
        "    \"time_ms\": {\"gemm\": %.6g, \"attention\": %.6g, \"elementwise\": %.6g, "
        "\"quantize\": %.6g, \"launch\": %.6g, \"tensor\": %.6g, \"context\": %.6g, "
        "\"expert\": %.6g, \"data\": %.6g, \"pipeline\": %.6g, \"offload\": %.6g, "
        "\"bubble\": %.6g, "
        "\"imbalance\": %.6g, \"optimizer\": %.6g, \"other\": %.6g},\n",
        1e3 * p->seconds, p->bubble_fraction, p->mfu, p->used / 1e9, p->fits ? "true" : "false",
        1e3 * t->gemm, 1e3 * t->attention, 1e3 * t->elementwise, 1e3 * t->quantize, 1e3 * t->launch,
        1e3 * t->tensor, 1e3 * t->context, 1e3 * t->expert, 1e3 * t->data, 1e3 * t->pipeline,
        1e3 * t->offload, 1e3 * t->bubble, 1e3 * t->imbalance, 1e3 * t->optimizer, 1e3 * t->other));
    return dw__text_printf(out,
                           "    \"memory_parts_gb\": {\"parameters\": %.6g, \"gradients\": %.6g, "
                           "\"optimizer\": %.6g, \"activations\": %.6g, \"workspace\": %.6g, "
                           "\"overhead\": %.6g}\n  },\n",
                           m->parameters / 1e9, m->gradients / 1e9, m->optimizer / 1e9,
                           m->activations / 1e9, m->workspace / 1e9, m->overhead / 1e9);
}

const char *dw__stream_key(dw_stream stream) {
    static const char *const keys[DW_STREAMS] = {"compute",   "tensor",        "context", "expert",
                                                 "send_next", "send_previous", "data",    "host"};
    return keys[stream];
}

/* Writes one figure per stream, times `unit`: {"compute": 1.5, ...}. */
static dw_status put_streams(dw__text *out, const char *name, const double *values, double unit) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "\"%s\": {", name));
    for (int stream = 0; stream < DW_STREAMS; stream++)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s\"%s\": %.6g", stream ? ", " : "",
                                            dw__stream_key((dw_stream)stream),
                                            values[stream] * unit));
    return dw__text_printf(out, "}");
}

/* Writes averages over the stages. */
static dw_status put_mean_streams(dw__text *out, const dw_simulation *simulation) {
    int ranks = simulation->schedule.stages;
    double busy[DW_STREAMS] = {0}, exposed[DW_STREAMS] = {0}, hidden[DW_STREAMS] = {0};
    for (int rank = 0; rank < ranks; rank++) {
        const dw_simulated_rank *r = &simulation->ranks[rank];
        for (int stream = 0; stream < DW_STREAMS; stream++) {
            busy[stream] += r->busy[stream] / ranks;
            exposed[stream] += r->exposed[stream] / ranks;
            hidden[stream] += r->hidden[stream] / ranks;
        }
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "  \"streams\": {\n    "));
    DW_RETURN_IF_FAILED(put_streams(out, "busy_ms", busy, 1e3));
    DW_RETURN_IF_FAILED(dw__text_printf(out, ",\n    "));
    DW_RETURN_IF_FAILED(put_streams(out, "exposed_ms", exposed, 1e3));
    DW_RETURN_IF_FAILED(dw__text_printf(out, ",\n    "));
    DW_RETURN_IF_FAILED(put_streams(out, "beside_computation_ms", hidden, 1e3));
    return dw__text_printf(out, "\n  },\n");
}

static dw_status put_figure(dw__text *out, const char *name, const dw_figure *figure) {
    if (figure->kind == DW_FIGURE_UNKNOWN) return DW_OK;
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "\n    \"%s\": {\"value\": %.6g, \"kind\": \"%s\", \"source\": ", name,
                        figure->value, dw__figure_kind_name(figure->kind)));
    DW_RETURN_IF_FAILED(dw__simulation_write_string(figure->source, out));
    return dw__text_printf(out, "},");
}

/* Writes the hardware that the prediction uses. Each figure has its kind, so that an estimate is not mistaken for a
 * measurement. */
static dw_status put_hardware(dw__text *out, const dw_hardware *hardware) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "  \"gpu\": "));
    DW_RETURN_IF_FAILED(dw__simulation_write_string(hardware->name, out));
    DW_RETURN_IF_FAILED(dw__text_printf(out, ",\n  \"architecture\": "));
    DW_RETURN_IF_FAILED(dw__simulation_write_string(hardware->architecture, out));
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, ",\n  \"capability\": %d,\n  \"hardware\": {", hardware->capability));
    size_t before = out->length;
    for (int rate = 0; rate < DW_RATES; rate++) {
        char name[32];
        snprintf(name, sizeof name, "rate_%s", dw_rate_name((dw_rate)rate));
        DW_RETURN_IF_FAILED(put_figure(out, name, &hardware->rate[rate]));
    }
#define PUT(name) DW_RETURN_IF_FAILED(put_figure(out, #name, &hardware->name));
    DW_HARDWARE_FIGURES(PUT)
#undef PUT
    if (out->length > before) out->length--; /* removes the last comma */
    return dw__text_printf(out, "\n  },\n");
}

/* Writes the points of the roofline chart. */
static dw_status put_operations(dw__text *out, const dw_simulation *simulation) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "  \"operations\": ["));
    for (int at = 0; at < simulation->operation_count; at++) {
        const dw_operation_cost *o = &simulation->operations[at];
        DW_RETURN_IF_FAILED(dw__text_printf(
            out,
            "%s\n    {\"name\": \"%s\", \"pass\": \"%s\", \"layer\": \"%s\", \"rate\": \"%s\", "
            "\"operations\": %.6g, \"bytes\": %.6g, \"seconds\": %.6g, \"times\": %.6g}",
            at ? "," : "", o->name, o->pass, o->layer,
            dw_rate_name(dw__rate_of(o->low ? simulation->layout.precision : DW_SCHEME_BF16)),
            o->operations, o->bytes, o->seconds, o->times));
    }
    return dw__text_printf(out, "\n  ],\n");
}

/* Writes a ratio, or null with the reason. */
static dw_status put_speedup(dw__text *out, const char *name, double value, const char *reason) {
    if (value > 0) return dw__text_printf(out, "  \"%s\": %.6g,\n", name, value);
    return dw__text_printf(out, "  \"%s\": null,\n  \"%s_reason\": \"%s\",\n", name, name, reason);
}

dw_status dw__simulation_write_json(const dw_simulation *simulation, dw__text *out) {
    const dw_simulation_figures *f = &simulation->figures;
    const dw_layout *l = &simulation->layout;
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "{\n  \"basis\": \"predicted\",\n  \"step_time_ms\": %.6g,\n  "
        "\"tokens_per_second_per_gpu\": %.6g,\n  \"mfu\": %.6g,\n"
        "  \"bubble_fraction\": %.6g,\n  \"idle_fraction\": %.6g,\n  \"overlap\": %.6g,\n"
        "  \"memory_gb\": %.6g,\n  \"memory_peak_ms\": %.6g,\n  \"memory_peak_stage\": %d,\n"
        "  \"capacity_gb\": %.6g,\n  \"fits\": %s,\n",
        1e3 * f->seconds, f->tokens_per_second, f->mfu, f->bubble_fraction, f->idle_fraction,
        f->overlap, f->peak_bytes / 1e9, 1e3 * f->peak_time, f->peak_rank, f->capacity / 1e9,
        f->fits ? "true" : "false"));
    DW_RETURN_IF_FAILED(dw__text_printf(out,
                                        "  \"peak_rate\": \"%s\",\n  \"peak_utilization\": %.6g,\n",
                                        dw_rate_name(f->peak_rate), f->peak_utilization));
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "  \"host_memory_gb\": %.6g,\n  \"host_capacity_gb\": %.6g,\n",
                        (f->prediction.host_optimizer + f->prediction.host_activations) / 1e9,
                        f->prediction.host_capacity / 1e9));
    DW_RETURN_IF_FAILED(put_speedup(out, "expected_speedup", f->speedup, f->speedup_reason));
    if (f->speedup > 0)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "  \"baseline\": \"%s\",\n", f->baseline));
    else
        DW_RETURN_IF_FAILED(dw__text_printf(out, "  \"baseline\": null,\n"));
    DW_RETURN_IF_FAILED(
        put_speedup(out, "speedup_over_bf16", f->speedup_bf16, f->speedup_bf16_reason));
    DW_RETURN_IF_FAILED(put_parts(out, &f->prediction));
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "  \"closed_form_bubble\": %.6g,\n", f->closed_bubble));
    DW_RETURN_IF_FAILED(put_mean_streams(out, simulation));
    DW_RETURN_IF_FAILED(put_hardware(out, simulation->hardware));
    DW_RETURN_IF_FAILED(put_operations(out, simulation));
    dw__planned planned;
    dw__planned_begin(&planned, &dw__constants_default, &simulation->model, simulation->hardware,
                      l);
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "  \"model\": {\"layers\": %d, \"hidden\": %d, \"experts\": %d, \"parameters\": %.6g},\n"
        "  \"layout\": {\"gpus\": %d, \"tp\": %d, \"cp\": %d, \"pp\": %d, \"dp\": %d, \"ep\": "
        "%d, "
        "\"virtual_stages\": %d, \"zero_stage\": %d, \"micro_batch\": %d, \"global_batch\": %d, "
        "\"seq_len\": %d, \"schedule\": \"%s\", \"recompute\": \"%s\", \"recompute_layers\": %d, "
        "\"precision\": \"%s\", \"framework\": \"%s\", \"offload_layers\": %d, "
        "\"offload_optimizer\": %s},\n"
        "  \"planned_expert_load\": %.6g,\n"
        "  \"micro_batches\": %d,\n  \"chunks\": %d,\n  \"events\": %zu,\n  \"stages\": [",
        simulation->model.layers, simulation->model.hidden, simulation->model.experts,
        dw_model_sizes_parameters(&simulation->model), l->gpus, l->tp, l->cp, l->pp, l->dp, l->ep,
        l->virtual_stages, l->zero_stage, l->micro_batch, l->global_batch, l->seq_len,
        dw_pipeline_schedule_name(l->schedule), dw_recompute_name(l->recompute),
        l->recompute_layers, dw_scheme_name(l->precision), dw_framework_name(l->framework),
        l->offload_layers, l->offload_optimizer ? "true" : "false", planned.expert_load,
        f->micro_batches, f->chunks, f->events));
    for (int rank = 0; rank < f->ranks; rank++) {
        const dw_simulated_rank *r = &simulation->ranks[rank];
        const dw_memory_parts *m = &simulation->costs.ranks[rank].memory;
        DW_RETURN_IF_FAILED(dw__text_printf(
            out,
            "%s\n    {\"compute_ms\": %.6g, \"wait_ms\": %.6g, \"data_wait_ms\": %.6g, "
            "\"optimizer_ms\": %.6g, \"overlap\": %.6g, \"memory_gb\": %.6g, "
            "\"memory_peak_ms\": %.6g, \"memory_constant_gb\": %.6g, \"in_flight\": %d,\n     ",
            rank ? "," : "", 1e3 * r->compute, 1e3 * r->wait, 1e3 * r->exposed[DW_STREAM_DATA],
            1e3 * r->optimizer, r->overlap, r->peak_bytes / 1e9, 1e3 * r->peak_time,
            r->constant_bytes / 1e9, r->peak_in_flight));
        DW_RETURN_IF_FAILED(dw__text_printf(
            out,
            "\"memory_parts_gb\": {\"parameters\": %.6g, \"gradients\": %.6g, "
            "\"optimizer\": %.6g, \"activations\": %.6g, \"overhead\": %.6g},\n     ",
            m->parameters / 1e9, m->gradients / 1e9, m->optimizer / 1e9,
            (r->peak_bytes - r->constant_bytes) / 1e9, m->overhead / 1e9));
        DW_RETURN_IF_FAILED(put_streams(out, "busy", r->busy, 1 / f->seconds));
        DW_RETURN_IF_FAILED(dw__text_printf(out, ",\n     "));
        DW_RETURN_IF_FAILED(put_streams(out, "exposed_ms", r->exposed, 1e3));
        DW_RETURN_IF_FAILED(dw__text_printf(out, "}"));
    }
    return dw__text_printf(out, "\n  ]\n}\n");
}

dw_status dw_simulation_json(const dw_simulation *simulation, char **text) {
    dw__text out = {0};
    dw_status status = dw__simulation_write_json(simulation, &out);
    if (status != DW_OK) {
        dw__text_free(&out);
        return status;
    }
    *text = out.text;
    return DW_OK;
}
