/* Finds the largest micro-batch whose training step fits: tries the divisors of the batch, largest first. */
#include "deepwell/step_memory.h"
#include "engine/engine_internal.h"
#include <inttypes.h>
#include <string.h>

enum { BATCH_MOST = 1 << 24 };

static dw_status peak_of(const dw_plan *plan, const dw_step_options *options,
                         dw_step_moment *peak) {
    dw_status status = DW_OK;
    uint32_t count = dw_plan_step_moments(plan), at = 0;
    dw_step_moment *moments = dw__calloc(count, sizeof *moments);
    if (!moments) return dw__fail_memory("the moments of a step", count * sizeof *moments);
    DW_TRY(dw_plan_step_memory(plan, options, moments, &at));
    *peak = moments[at];
cleanup:
    dw__free(moments);
    return status;
}

static dw_status try_size(dw_engine *engine, const int64_t *sizes, const dw_step_options *options,
                          dw_step_moment *peak) {
    dw_plan *plan = NULL;
    DW_RETURN_IF_FAILED(dw_engine_plan(engine, sizes, &plan));
    dw_status status = peak_of(plan, options, peak);
    dw_plan_release(plan);
    return status;
}

dw_status dw_engine_fit_step(dw_engine *engine, const int64_t *given, uint32_t symbol,
                             int64_t least, const dw_step_options *step, size_t capacity,
                             dw_step_fit *fit) {
    uint32_t symbols = dw_graph_symbol_count(engine->graph);
    if (symbol >= symbols)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the batch is symbol %u of the graph, which has %u symbols", symbol,
                        symbols);
    int64_t batch = given[symbol];
    if (least < 1 || batch < least || batch > BATCH_MOST)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the batch is %" PRId64 " and its smallest micro-batch %" PRId64
                        "; expected 1 <= smallest micro-batch <= batch <= %d",
                        batch, least, BATCH_MOST);
    dw_status status = DW_OK;
    dw_step_options options = DW_STEP_OPTIONS_DEFAULT;
    int64_t *sizes = dw__malloc(symbols * sizeof *sizes);
    if (!sizes) return dw__fail_memory("sizes of a step", symbols * sizeof *sizes);
    memcpy(sizes, given, symbols * sizeof *sizes);
    if (step) memcpy(&options, step, sizeof options);
    *fit = (dw_step_fit){0};
    for (int64_t micro = batch; micro >= least && !fit->fits; micro--) {
        if (batch % micro != 0) continue;
        sizes[symbol] = micro;
        options.add_gradients = micro < batch;
        DW_TRY(try_size(engine, sizes, &options, &fit->peak));
        fit->micro_batch = micro;
        fit->fits = fit->peak.total <= capacity;
    }
cleanup:
    dw__free(sizes);
    return status;
}
