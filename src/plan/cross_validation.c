/* Constants fitted without a source predict it: each in turn. */
#include "plan/evaluation.h"
#include <math.h>
#include <string.h>

typedef struct pool { /* the rows that count, and the group of each */
    uint32_t *rows, *groups, *train;
    double *weights;
    size_t count;
    uint32_t group_count;
} pool;

static void pool_free(pool *p) {
    dw__free(p->rows);
    dw__free(p->groups);
    dw__free(p->train);
    dw__free(p->weights);
}

static dw_status pool_make(const dw_runs *runs, pool *p) {
    size_t most = runs->table.rows + 1;
    dw_status status = DW_OK;
    dw__map *names = dw__map_create();
    *p = (pool){.rows = dw__malloc(most * sizeof(uint32_t)),
                .groups = dw__malloc(most * sizeof(uint32_t)),
                .train = dw__malloc(most * sizeof(uint32_t)),
                .weights = dw__malloc(most * sizeof(double))};
    if (!names || !p->rows || !p->groups || !p->train || !p->weights) {
        status = dw__fail_memory("rows to fit", most * 20);
        goto cleanup;
    }
    for (size_t at = 0; at < runs->table.rows; at++) {
        const dw_run *run = &runs->rows[at];
        if (!dw__counts(run)) continue;
        uint32_t group = p->group_count;
        if (!dw__map_get(names, run->group, &group)) {
            DW_TRY(dw__map_set(names, run->group, group));
            p->group_count++;
        }
        p->rows[p->count] = (uint32_t)at;
        p->groups[p->count++] = group;
    }
    if (p->group_count < 3)
        status = dw__fail(
            DW_INVALID_ARGUMENT,
            "the table has %zu rows of %u sources that can be fitted; expected at least 3 sources",
            p->count, p->group_count);
cleanup:
    dw__map_destroy(names);
    if (status != DW_OK) pool_free(p);
    return status;
}

/* Rows of one source are alike: it weighs by the root of their number. `without` >= group_count: all. */
static dw_status fit_without(const dw_runs *runs, const pool *p, uint32_t without,
                             dw__constants *constants) {
    size_t count = 0;
    for (size_t at = 0; at < p->count; at++) {
        if (p->groups[at] == without) continue;
        size_t alike = 0;
        for (size_t other = 0; other < p->count; other++)
            alike += p->groups[other] == p->groups[at];
        p->train[count] = p->rows[at];
        p->weights[count++] = 1 / sqrt((double)alike);
    }
    return dw__fit_constants(runs, p->train, p->weights, count, constants);
}

static void predict_group(const dw_runs *runs, const pool *p, uint32_t group,
                          const dw__constants *constants, double *predicted) {
    for (size_t at = 0; at < p->count; at++) {
        if (group < p->group_count && p->groups[at] != group) continue;
        const dw_run *run = &runs->rows[p->rows[at]];
        dw_prediction prediction;
        dw__predict(constants, &run->model, run->hardware, &run->layout, &prediction);
        predicted[p->rows[at]] = prediction.tokens_per_second;
    }
}

/* The median rate of the other sources on such a GPU, or on any, as a part of its BF16 rate, for want of one. */
static void predict_by_median(const dw_runs *runs, const pool *p, double *scratch,
                              double *predicted) {
    for (size_t at = 0; at < p->count; at++) {
        const dw_run *run = &runs->rows[p->rows[at]];
        size_t count = 0;
        for (int same = 1; same >= 0 && count == 0; same--) {
            for (size_t other = 0; other < p->count; other++) {
                const dw_run *source = &runs->rows[p->rows[other]];
                if (p->groups[other] == p->groups[at] ||
                    (same && strcmp(source->gpu, run->gpu) != 0))
                    continue;
                double flops = dw_planner_token_flops(&source->model, source->layout.seq_len);
                scratch[count++] =
                    source->tokens_per_second * flops / source->hardware->rate[DW_RATE_BF16].value;
            }
        }
        double part = dw__quantile(scratch, count, 0.5);
        predicted[p->rows[at]] = part * run->hardware->rate[DW_RATE_BF16].value /
                                 dw_planner_token_flops(&run->model, run->layout.seq_len);
    }
}

dw_status dw_calibrate(const dw_runs *runs, const dw_calibrate_options *options, char **json) {
    dw_status status = DW_OK;
    dw__text out = {0};
    pool p = {0};
    double *predicted = NULL, *scratch = NULL;
    dw__constants begin = dw__constants_default, fitted;
    *json = NULL;
    if (options && options->constants)
        DW_RETURN_IF_FAILED(dw__constants_load(options->constants, &begin));
    DW_RETURN_IF_FAILED(pool_make(runs, &p));
    predicted = dw__calloc(runs->table.rows + 1, sizeof(double));
    scratch = dw__calloc(runs->table.rows + 1, sizeof(double));
    if (!predicted || !scratch) {
        status = dw__fail_memory("predictions", runs->table.rows * sizeof(double));
        goto cleanup;
    }
    fitted = begin;
    DW_TRY(fit_without(runs, &p, p.group_count, &fitted));
    DW_TRY(dw__text_printf(&out, "{\n  \"constants\": "));
    DW_TRY(dw__constants_json(&fitted, &out));
    predict_group(runs, &p, p.group_count, &fitted, predicted);
    DW_TRY(dw__text_printf(&out, ",\n  \"fitted\": "));
    DW_TRY(dw__write_errors(runs, predicted, &out));
    for (uint32_t group = 0; group < p.group_count; group++) {
        /* From the priors, so that nothing of the source is in where the search begins. */
        dw__constants without;
        for (int at = 0; at < DW__CONSTANT_COUNT; at++)
            ((double *)&without)[at] = dw__constant_table[at].prior;
        DW_TRY(fit_without(runs, &p, group, &without));
        predict_group(runs, &p, group, &without, predicted);
    }
    DW_TRY(dw__text_printf(&out, ",\n  \"left_out\": "));
    DW_TRY(dw__write_errors(runs, predicted, &out));
    predict_by_median(runs, &p, scratch, predicted);
    DW_TRY(dw__text_printf(&out, ",\n  \"baseline\": "));
    DW_TRY(dw__write_errors(runs, predicted, &out));
    DW_TRY(dw__text_printf(&out, "\n}\n"));
    *json = out.text;
    out = (dw__text){0};
cleanup:
    dw__text_free(&out);
    pool_free(&p);
    dw__free(predicted);
    dw__free(scratch);
    return status;
}
