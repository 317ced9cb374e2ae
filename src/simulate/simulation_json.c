/* Figures as JSON: for programs, and for the page that people look at. */
#include "simulate/simulate_internal.h"
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

/* A ratio, or null where it is not to be had, and why. */
static dw_status put_speedup(dw__text *out, const char *name, double value, const char *reason) {
    if (value > 0) return dw__text_printf(out, "    \"%s\": %.6g,\n", name, value);
    return dw__text_printf(out, "    \"%s\": null,\n    \"%s_reason\": \"%s\",\n", name, name,
                           reason);
}

dw_status dw__simulation_write_json(const dw_simulation *simulation, dw__text *out) {
    const dw_simulation_figures *f = &simulation->figures;
    const dw_layout *l = &simulation->layout;
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "{\n  \"step_time_ms\": %.6g,\n  \"tokens_per_second_per_gpu\": %.6g,\n  \"mfu\": %.6g,\n"
        "  \"bubble_fraction\": %.6g,\n  \"idle_fraction\": %.6g,\n  \"overlap\": %.6g,\n"
        "  \"memory_gb\": %.6g,\n  \"memory_peak_ms\": %.6g,\n  \"memory_peak_stage\": %d,\n"
        "  \"capacity_gb\": %.6g,\n  \"fits\": %s,\n",
        1e3 * f->seconds, f->tokens_per_second, f->mfu, f->bubble_fraction, f->idle_fraction,
        f->overlap, f->peak_bytes / 1e9, 1e3 * f->peak_time, f->peak_rank, f->capacity / 1e9,
        f->fits ? "true" : "false"));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "  \"expected_speedup\": {\n"));
    DW_RETURN_IF_FAILED(put_speedup(out, "bf16", f->speedup_bf16, f->speedup_bf16_reason));
    DW_RETURN_IF_FAILED(
        put_speedup(out, "unplanned", f->speedup_unplanned, f->speedup_unplanned_reason));
    out->length -= 2; /* the last comma */
    DW_RETURN_IF_FAILED(dw__text_printf(out, "\n  },\n"));
    DW_RETURN_IF_FAILED(put_parts(out, &f->prediction));
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "  \"closed_form_bubble\": %.6g,\n  \"gpu\": ", f->closed_bubble));
    DW_RETURN_IF_FAILED(dw__simulation_write_string(simulation->hardware, out));
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        ",\n  \"layout\": {\"gpus\": %d, \"tp\": %d, \"cp\": %d, \"pp\": %d, \"dp\": %d, \"ep\": "
        "%d, "
        "\"virtual_stages\": %d, \"zero_stage\": %d, \"micro_batch\": %d, \"global_batch\": %d, "
        "\"seq_len\": %d, \"schedule\": \"%s\", \"recompute\": \"%s\", \"recompute_layers\": %d, "
        "\"precision\": \"%s\", \"framework\": \"%s\"},\n"
        "  \"micro_batches\": %d,\n  \"chunks\": %d,\n  \"events\": %zu,\n  \"stages\": [",
        l->gpus, l->tp, l->cp, l->pp, l->dp, l->ep, l->virtual_stages, l->zero_stage,
        l->micro_batch, l->global_batch, l->seq_len, dw_pipeline_schedule_name(l->schedule),
        dw_recompute_name(l->recompute), l->recompute_layers, dw_train_precision_name(l->precision),
        dw_framework_name(l->framework), f->micro_batches, f->chunks, f->events));
    for (int rank = 0; rank < f->ranks; rank++) {
        const dw_simulated_rank *r = &simulation->ranks[rank];
        DW_RETURN_IF_FAILED(dw__text_printf(
            out,
            "%s\n    {\"compute_ms\": %.6g, \"wait_ms\": %.6g, \"data_wait_ms\": %.6g, "
            "\"optimizer_ms\": %.6g, \"overlap\": %.6g, \"memory_gb\": %.6g, "
            "\"memory_peak_ms\": %.6g, \"memory_constant_gb\": %.6g, \"in_flight\": %d, "
            "\"busy\": {\"compute\": %.6g, \"send_next\": %.6g, \"send_previous\": %.6g, "
            "\"data\": %.6g}}",
            rank ? "," : "", 1e3 * r->compute, 1e3 * r->wait, 1e3 * r->data_wait,
            1e3 * r->optimizer, r->overlap, r->peak_bytes / 1e9, 1e3 * r->peak_time,
            r->constant_bytes / 1e9, r->peak_in_flight, r->busy[0] / f->seconds,
            r->busy[1] / f->seconds, r->busy[2] / f->seconds, r->busy[3] / f->seconds));
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
