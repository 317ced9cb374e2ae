/* Predicts every row and compares the prediction with the measurement. */
#include "evaluation.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Median difference between published runs whose layouts agree in every column. Smaller regrets are noise. */
static const double repeat_spread = 0.045;

static double memory_as(const dw_prediction *prediction, lab_memory_meaning meaning) {
    switch (meaning) {
    case LAB_MEMORY_RESERVED: return prediction->reserved;
    case LAB_MEMORY_USED: return prediction->used;
    default: return prediction->allocated;
    }
}

static double predicted_memory(const lab_run *run, const lab_constants *constants,
                               const dw_prediction *prediction) {
    if (run->memory_meaning != LAB_MEMORY_ALLOCATED_LAST)
        return memory_as(prediction, run->memory_meaning);
    dw_memory_parts m;
    dw_predict_memory_with(constants->value, &run->model, run->hardware, &run->layout,
                           run->layout.pp - 1, &m);
    return m.parameters + m.gradients + m.optimizer + m.activations + m.workspace;
}

static dw_status write_row(lab_text *out, const lab_run *run, const dw_prediction *p,
                           double memory) {
    LAB_RETURN_IF_FAILED(lab_text_printf(out, "\n    {\"id\": "));
    LAB_RETURN_IF_FAILED(lab_json_quote(out, run->id));
    LAB_RETURN_IF_FAILED(lab_text_printf(out, ", \"group\": "));
    LAB_RETURN_IF_FAILED(lab_json_quote(out, run->group));
    LAB_RETURN_IF_FAILED(lab_text_printf(
        out, ", \"scored\": %s, \"predicted\": %.6g, \"step_s\": %.6g, \"mfu\": %.4f",
        lab_counts(run) ? "true" : "false", p->tokens_per_second, p->seconds, p->mfu));
    if (run->tokens_per_second > 0)
        LAB_RETURN_IF_FAILED(
            lab_text_printf(out, ", \"measured\": %.6g, \"error\": %.4f", run->tokens_per_second,
                            fabs(p->tokens_per_second / run->tokens_per_second - 1)));
    const dw_time_parts *t = &p->time;
    LAB_RETURN_IF_FAILED(lab_text_printf(
        out,
        ", \"parts\": {\"gemm\": %.3g, \"attention\": %.3g, \"elementwise\": %.3g, \"quantize\": "
        "%.3g, "
        "\"launch\": %.3g, \"tensor\": %.3g, \"context\": %.3g, \"expert\": %.3g, \"data\": %.3g, "
        "\"pipeline\": %.3g, \"offload\": %.3g, \"bubble\": %.3g, \"imbalance\": %.3g, "
        "\"optimizer\": %.3g, "
        "\"other\": %.3g}",
        t->gemm, t->attention, t->elementwise, t->quantize, t->launch, t->tensor, t->context,
        t->expert, t->data, t->pipeline, t->offload, t->bubble, t->imbalance, t->optimizer,
        t->other));
    const double gib = 1024.0 * 1024.0 * 1024.0;
    LAB_RETURN_IF_FAILED(lab_text_printf(
        out,
        ", \"memory_gib\": {\"predicted\": %.2f, \"parameters\": %.2f, \"gradients\": %.2f, "
        "\"optimizer\": %.2f, "
        "\"activations\": %.2f, \"workspace\": %.2f, \"overhead\": %.2f}, \"fits\": %s, "
        "\"recompute\": \"%s\"",
        memory / gib, p->memory.parameters / gib, p->memory.gradients / gib,
        p->memory.optimizer / gib, p->memory.activations / gib, p->memory.workspace / gib,
        p->memory.overhead / gib, p->fits ? "true" : "false", dw_recompute_name(p->recompute)));
    if (run->memory > 0)
        LAB_RETURN_IF_FAILED(
            lab_text_printf(out, ", \"memory_measured_gib\": %.2f", run->memory / gib));
    return lab_text_printf(out, "}");
}

static dw_status write_reasons(const lab_runs *runs, lab_text *out) {
    int written = 0;
    LAB_RETURN_IF_FAILED(lab_text_printf(out, "["));
    for (size_t at = 0; at < runs->table.rows; at++) {
        const lab_run *run = &runs->rows[at];
        if (!run->reason) continue;
        LAB_RETURN_IF_FAILED(lab_text_printf(out, "%s\n    {\"id\": ", written++ ? "," : ""));
        LAB_RETURN_IF_FAILED(lab_json_quote(out, run->id));
        LAB_RETURN_IF_FAILED(lab_text_printf(out, ", \"reason\": "));
        LAB_RETURN_IF_FAILED(lab_json_quote(out, run->reason));
        LAB_RETURN_IF_FAILED(lab_text_printf(out, "}"));
    }
    return lab_text_printf(out, "]");
}

static dw_status write_memory(const lab_runs *runs, const double *memory, double *errors,
                              lab_text *out) {
    static const char *const names[] = {"unstated", "allocated", "allocated, last rank", "reserved",
                                        "used"};
    int written = 0;
    LAB_RETURN_IF_FAILED(lab_text_printf(out, "{"));
    for (size_t first = 0; first < runs->table.rows; first++) {
        const lab_run *run = &runs->rows[first];
        if (run->reason || run->memory <= 0) continue;
        size_t count = 0, before = 0;
        double sum = 0;
        for (size_t at = 0; at < runs->table.rows; at++) {
            const lab_run *other = &runs->rows[at];
            if (other->reason || other->memory <= 0 || strcmp(other->group, run->group) != 0)
                continue;
            if (at < first) before = 1;
            errors[count++] = fabs(memory[at] / other->memory - 1);
            sum += log(memory[at] / other->memory);
        }
        if (before) continue;
        LAB_RETURN_IF_FAILED(lab_text_printf(out, "%s\n    ", written++ ? "," : ""));
        LAB_RETURN_IF_FAILED(lab_json_quote(out, run->group));
        double median = lab_quantile(errors, count, 0.5), high = lab_quantile(errors, count, 0.9);
        LAB_RETURN_IF_FAILED(lab_text_printf(out,
                                             ": {\"meaning\": \"%s\", \"rows\": %zu, \"median\": "
                                             "%.4f, \"p90\": %.4f, \"bias\": %.4f}",
                                             names[run->memory_meaning], count, median, high,
                                             exp(sum / (double)count) - 1));
    }
    return lab_text_printf(out, "}");
}

/* The difference, in points, between the predicted and the measured idle share of the pipeline. The measured share is
 * computed from profiled times of stages, as if all stages were equal. */
static dw_status write_bubbles(const lab_runs *runs, const lab_constants *constants, double *errors,
                               lab_text *out) {
    size_t count = 0, within = 0;
    for (size_t at = 0; at < runs->table.rows; at++) {
        const lab_run *run = &runs->rows[at];
        if (run->reason || run->bubble < 0 || run->layout.pp < 2) continue;
        double bubble =
            dw_predict_bubble_with(constants->value, &run->model, run->hardware, &run->layout);

        errors[count] = fabs(bubble - run->bubble);
        within += errors[count++] <= 0.02;
    }
    double median = lab_quantile(errors, count, 0.5), high = lab_quantile(errors, count, 0.9);
    return lab_text_printf(
        out, "{\"rows\": %zu, \"within_2_points\": %zu, \"median\": %.4f, \"p90\": %.4f}", count,
        within, median, high);
}

/* ---- choice: the layout that the planner ranks first among measured ones ---- */

static int same_task(const lab_run *a, const lab_run *b) {
    return a->layout.gpus == b->layout.gpus && a->layout.seq_len == b->layout.seq_len &&
           a->layout.global_batch == b->layout.global_batch &&
           a->layout.precision == b->layout.precision && a->hardware == b->hardware &&
           strcmp(a->group, b->group) == 0 && strcmp(a->model_name, b->model_name) == 0;
}

static bool competes(const lab_run *run, int apart) {
    return run->scored + apart > 0 && !run->reason && run->tokens_per_second > 0 &&
           (strcmp(run->group, "ultrascale") == 0) == apart;
}

/* Writes the regret of each task with several layouts. Layouts with equal predictions count as one, with the mean of
 * their measurements. */
static size_t regrets(const lab_runs *runs, const double *predicted, int apart, char *done,
                      double *found) {
    size_t tasks = 0, rows = runs->table.rows;
    memset(done, 0, rows);
    for (size_t first = 0; first < rows; first++) {
        const lab_run *run = &runs->rows[first];
        if (done[first] || !competes(run, apart)) continue;
        double most = 0, best = 0, sum = 0;
        size_t alike = 0, layouts = 0;
        double last = 0;
        for (size_t at = first; at < rows; at++) {
            const lab_run *other = &runs->rows[at];
            if (done[at] || !competes(other, apart) || !same_task(run, other)) continue;
            done[at] = 1;
            if (predicted[at] != last) layouts++;
            last = predicted[at];
            if (other->tokens_per_second > best) best = other->tokens_per_second;
            if (predicted[at] > most * (1 + 1e-9)) most = predicted[at], sum = 0, alike = 0;
            if (predicted[at] >= most * (1 - 1e-9)) sum += other->tokens_per_second, alike++;
        }
        if (layouts < 2) continue;
        double regret = best / (sum / (double)alike) - 1;
        found[tasks++] = regret <= repeat_spread ? 0 : regret;
    }
    return tasks;
}

static dw_status write_choice(const lab_runs *runs, const double *predicted, double *found,
                              lab_text *out) {
    char *done = lab_malloc(runs->table.rows + 1);
    if (!done) return lab_fail_memory("choices", runs->table.rows);
    static const char *const names[] = {"published", "ultrascale"};
    dw_status status = DW_OK;
    LAB_TRY(lab_text_printf(out, "{"));
    for (int apart = 0; apart < 2; apart++) {
        size_t tasks = regrets(runs, predicted, apart, done, found);
        double median = lab_quantile(found, tasks, 0.5), high = lab_quantile(found, tasks, 0.9);
        LAB_TRY(lab_text_printf(out, "%s\"%s\": {\"tasks\": %zu, \"median\": %.4f, \"p90\": %.4f}",
                                apart ? ", " : "", names[apart], tasks, median, high));
    }
    LAB_TRY(lab_text_printf(out, "}"));
cleanup:
    lab_free(done);
    return status;
}

static void count_fits(const lab_runs *runs, const lab_constants *constants, size_t *rows,
                       size_t *rejected) {
    *rows = *rejected = 0;
    for (size_t at = 0; at < runs->table.rows; at++) {
        const lab_run *run = &runs->rows[at];
        if (run->reason || !run->layout_known) continue;
        dw_prediction prediction;
        dw_predict_with(constants->value, &run->model, run->hardware, &run->layout, &prediction);
        ++*rows;
        *rejected += !prediction.fits;
    }
}

dw_status lab_evaluate(const lab_runs *runs, const lab_evaluate_options *options, char **json) {
    lab_evaluate_options defaults = LAB_EVALUATE_OPTIONS_DEFAULT;
    if (!options) options = &defaults;
    *json = NULL;
    lab_constants constants;
    lab_constants_built_in(&constants);
    if (options->constants)
        LAB_RETURN_IF_FAILED(lab_constants_load(options->constants, &constants));
    dw_status status = DW_OK;
    size_t rows = runs->table.rows;
    lab_text out = {0};
    double *predicted = lab_calloc(rows + 1, sizeof(double)),
           *memory = lab_calloc(rows + 1, sizeof(double));
    double *scratch = lab_calloc(rows + 1, sizeof(double));
    if (!predicted || !memory || !scratch) {
        status = lab_fail_memory("predictions", 3 * rows * sizeof(double));
        goto cleanup;
    }
    LAB_TRY(lab_text_printf(&out, "{\n  \"rows\": ["));
    int written = 0;
    for (size_t at = 0; at < rows; at++) {
        const lab_run *run = &runs->rows[at];
        if (run->reason) continue;
        dw_prediction prediction;
        dw_predict_with(constants.value, &run->model, run->hardware, &run->layout, &prediction);
        predicted[at] = prediction.tokens_per_second;
        memory[at] = predicted_memory(run, &constants, &prediction);
        if (written++) LAB_TRY(lab_text_append(&out, ",", 1));
        LAB_TRY(write_row(&out, run, &prediction, memory[at]));
    }
    LAB_TRY(lab_text_printf(&out, "],\n  \"not_predicted\": "));
    LAB_TRY(write_reasons(runs, &out));
    LAB_TRY(lab_text_printf(&out, ",\n  \"errors\": "));
    LAB_TRY(lab_write_errors(runs, predicted, &out));
    LAB_TRY(lab_text_printf(&out, ",\n  \"memory\": "));
    LAB_TRY(write_memory(runs, memory, scratch, &out));
    LAB_TRY(lab_text_printf(&out, ",\n  \"bubble\": "));
    LAB_TRY(write_bubbles(runs, &constants, scratch, &out));
    LAB_TRY(lab_text_printf(&out, ",\n  \"choice\": "));
    LAB_TRY(write_choice(runs, predicted, scratch, &out));
    size_t ran, refused;
    count_fits(runs, &constants, &ran, &refused);
    LAB_TRY(
        lab_text_printf(&out, ",\n  \"fits\": {\"ran\": %zu, \"ran_rejected\": %zu", ran, refused));
    if (options->failures) {
        size_t failed;
        count_fits(options->failures, &constants, &failed, &refused);
        LAB_TRY(
            lab_text_printf(&out, ", \"failed\": %zu, \"failed_rejected\": %zu", failed, refused));
    }
    LAB_TRY(lab_text_printf(&out, "}\n}\n"));
    *json = out.text;
    out = (lab_text){0};
cleanup:
    lab_text_free(&out);
    lab_free(predicted);
    lab_free(memory);
    lab_free(scratch);
    return status;
}
