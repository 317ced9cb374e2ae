/* Predicts each source with constants that were fitted to the other sources. */
#include "evaluation.h"
#include <math.h>
#include <string.h>

typedef struct pool { /* the rows that are fitted, and the source of each */
    uint32_t *rows, *groups, *train;
    double *weights;
    size_t count;
    uint32_t group_count;
} pool;

static void pool_free(pool *p) {
    lab_free(p->rows);
    lab_free(p->groups);
    lab_free(p->train);
    lab_free(p->weights);
}

static dw_status pool_make(const lab_runs *runs, pool *p) {
    size_t most = runs->table.rows + 1;
    dw_status status = DW_OK;
    *p = (pool){.rows = lab_malloc(most * sizeof(uint32_t)),
                .groups = lab_malloc(most * sizeof(uint32_t)),
                .train = lab_malloc(most * sizeof(uint32_t)),
                .weights = lab_malloc(most * sizeof(double))};
    if (!p->rows || !p->groups || !p->train || !p->weights) {
        status = lab_fail_memory("rows to fit", most * 20);
        goto cleanup;
    }
    for (size_t at = 0; at < runs->table.rows; at++) {
        const lab_run *run = &runs->rows[at];
        if (!lab_counts(run)) continue;
        uint32_t group = p->group_count;
        for (size_t before = 0; before < p->count; before++)
            if (strcmp(runs->rows[p->rows[before]].group, run->group) == 0)
                group = p->groups[before];
        p->group_count += group == p->group_count;
        p->rows[p->count] = (uint32_t)at;
        p->groups[p->count++] = group;
    }
    if (p->group_count < 3)
        status = lab_fail(
            DW_INVALID_ARGUMENT,
            "the table has %zu rows of %u sources that can be fitted; expected at least 3 sources",
            p->count, p->group_count);
cleanup:
    if (status != DW_OK) pool_free(p);
    return status;
}

/* Fits the constants to all sources except for `without` (to all, if `without` >= group_count). Rows of one source
 * resemble each other, so a source has the weight of the root of its number of rows. */
static dw_status fit_without(const lab_runs *runs, const pool *p, uint32_t without,
                             lab_constants *constants) {
    size_t count = 0;
    for (size_t at = 0; at < p->count; at++) {
        if (p->groups[at] == without) continue;
        size_t alike = 0;
        for (size_t other = 0; other < p->count; other++)
            alike += p->groups[other] == p->groups[at];
        p->train[count] = p->rows[at];
        p->weights[count++] = 1 / sqrt((double)alike);
    }
    return lab_fit_constants(runs, p->train, p->weights, count, constants);
}

static void predict_group(const lab_runs *runs, const pool *p, uint32_t group,
                          const lab_constants *constants, double *predicted) {
    for (size_t at = 0; at < p->count; at++) {
        if (group < p->group_count && p->groups[at] != group) continue;
        const lab_run *run = &runs->rows[p->rows[at]];
        dw_prediction prediction;
        dw_predict_with(constants->value, &run->model, run->hardware, &run->layout, &prediction);
        predicted[p->rows[at]] = prediction.tokens_per_second;
    }
}

/* The baseline: predicts each row from the median share of the BF16 rate that the other sources reach on the same GPU,
 * or on any GPU if no other source uses it. */
static void predict_by_median(const lab_runs *runs, const pool *p, double *scratch,
                              double *predicted) {
    for (size_t at = 0; at < p->count; at++) {
        const lab_run *run = &runs->rows[p->rows[at]];
        size_t count = 0;
        for (int same = 1; same >= 0 && count == 0; same--) {
            for (size_t other = 0; other < p->count; other++) {
                const lab_run *source = &runs->rows[p->rows[other]];
                if (p->groups[other] == p->groups[at] ||
                    (same && strcmp(source->gpu, run->gpu) != 0))
                    continue;
                double flops = dw_planner_token_flops(&source->model, source->layout.seq_len);
                scratch[count++] =
                    source->tokens_per_second * flops / source->hardware->rate[DW_RATE_BF16].value;
            }
        }
        double part = lab_quantile(scratch, count, 0.5);
        predicted[p->rows[at]] = part * run->hardware->rate[DW_RATE_BF16].value /
                                 dw_planner_token_flops(&run->model, run->layout.seq_len);
    }
}

dw_status lab_calibrate(const lab_runs *runs, const lab_calibrate_options *options, char **json) {
    dw_status status = DW_OK;
    lab_text out = {0};
    pool p = {0};
    double *predicted = NULL, *scratch = NULL;
    lab_constants begin, fitted;
    *json = NULL;
    lab_constants_built_in(&begin);
    if (options && options->constants)
        LAB_RETURN_IF_FAILED(lab_constants_load(options->constants, &begin));
    LAB_RETURN_IF_FAILED(pool_make(runs, &p));
    predicted = lab_calloc(runs->table.rows + 1, sizeof(double));
    scratch = lab_calloc(runs->table.rows + 1, sizeof(double));
    if (!predicted || !scratch) {
        status = lab_fail_memory("predictions", runs->table.rows * sizeof(double));
        goto cleanup;
    }
    fitted = begin;
    LAB_TRY(fit_without(runs, &p, p.group_count, &fitted));
    LAB_TRY(lab_text_printf(&out, "{\n  \"constants\": "));
    LAB_TRY(lab_constants_json(&fitted, &out));
    predict_group(runs, &p, p.group_count, &fitted, predicted);
    LAB_TRY(lab_text_printf(&out, ",\n  \"fitted\": "));
    LAB_TRY(lab_write_errors(runs, predicted, &out));
    for (uint32_t group = 0; group < p.group_count; group++) {
        /* Starts from the priors, so that the starting point contains nothing of the left-out source. */
        lab_constants without;
        const dw_planner_constant *table;
        const int known = dw_planner_constants(&table);
        for (int at = 0; at < known; at++) without.value[at] = table[at].prior;
        LAB_TRY(fit_without(runs, &p, group, &without));
        predict_group(runs, &p, group, &without, predicted);
    }
    LAB_TRY(lab_text_printf(&out, ",\n  \"left_out\": "));
    LAB_TRY(lab_write_errors(runs, predicted, &out));
    predict_by_median(runs, &p, scratch, predicted);
    LAB_TRY(lab_text_printf(&out, ",\n  \"baseline\": "));
    LAB_TRY(lab_write_errors(runs, predicted, &out));
    LAB_TRY(lab_text_printf(&out, "\n}\n"));
    *json = out.text;
    out = (lab_text){0};
cleanup:
    lab_text_free(&out);
    pool_free(&p);
    lab_free(predicted);
    lab_free(scratch);
    return status;
}
