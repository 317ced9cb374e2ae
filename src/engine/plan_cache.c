/* The cache of an engine's plans, by target and sizes. Evicts the least recently used plans. */
#include "engine/engine_internal.h"
#include <string.h>

static void unlink_plan(dw_engine *engine, dw_plan *plan) {
    if (plan->newer) plan->newer->older = plan->older;
    if (plan->older) plan->older->newer = plan->newer;
    if (engine->plans == plan) engine->plans = plan->older;
    plan->newer = plan->older = NULL;
}

static void link_newest(dw_engine *engine, dw_plan *plan) {
    plan->older = engine->plans;
    if (plan->older) plan->older->newer = plan;
    engine->plans = plan;
}

static dw_plan *find_plan(const dw_engine *engine, const dw__target *target, const int64_t *sizes) {
    size_t bytes = dw_graph_symbol_count(engine->graph) * sizeof *sizes;
    for (dw_plan *plan = engine->plans; plan; plan = plan->older) {
        if (!dw__target_serves(&plan->target, target)) continue;
        if (bytes == 0 || memcmp(plan->sizes, sizes, bytes) == 0) return plan;
    }
    return NULL;
}

/* Destroys the least recently used plans beyond DW_PLAN_CACHE, but never one that is in use. */
static void evict(dw_engine *engine) {
    dw_plan *oldest = engine->plans;
    while (oldest && oldest->older) oldest = oldest->older;
    while (oldest && engine->plan_count > DW_PLAN_CACHE) {
        dw_plan *newer = oldest->newer;
        if (oldest->references == 0) {
            unlink_plan(engine, oldest);
            dw__plan_destroy(oldest);
            engine->plan_count--;
        }
        oldest = newer;
    }
}

dw_status dw_engine_plan(dw_engine *engine, const int64_t *sizes, dw_plan **out) {
    return dw_engine_plan_with(engine, sizes, NULL, out);
}

dw_status dw_engine_plan_with(dw_engine *engine, const int64_t *sizes, const dw_plan_options *given,
                              dw_plan **out) {
    static const dw__struct known = {"dw_plan_options", sizeof(dw_plan_options), {0}};
    dw_plan_options options = DW_PLAN_OPTIONS_DEFAULT;
    if (given) DW_RETURN_IF_FAILED(dw__struct_read(&known, given, &options));
    for (uint32_t i = 0; i < dw_graph_symbol_count(engine->graph); i++) {
        if (sizes[i] < 0) {
            return dw__fail(DW_INVALID_ARGUMENT, "size %s is %lld: sizes must not be negative",
                            dw_graph_symbol_name(engine->graph, i), (long long)sizes[i]);
        }
    }
    dw__target target;
    dw_status status = DW_OK;
    DW_RETURN_IF_FAILED(dw__target_of(engine->device, engine->cuda_graphs, &target));
    target.tf32 = options.tf32 && target.context;
    pthread_mutex_lock(&engine->lock);
    dw_plan *plan = find_plan(engine, &target, sizes);
    if (plan) {
        unlink_plan(engine, plan);
    } else {
        DW_TRY(dw__plan_create(engine, &target, sizes, &plan));
        engine->plan_count++;
    }
    link_newest(engine, plan);
    plan->references++;
    evict(engine);
    *out = plan;
cleanup:
    pthread_mutex_unlock(&engine->lock);
    return status;
}

void dw_plan_release(dw_plan *plan) {
    if (!plan) return;
    dw_engine *engine = plan->engine;
    pthread_mutex_lock(&engine->lock);
    plan->references--;
    evict(engine);
    pthread_mutex_unlock(&engine->lock);
}
