/* A graph from any JSON is rejected with a message, or is a model with sizes that a prediction can use. Its operations
 * are counted, or a message says why not. */
#include "base/base.h"
#include "deepwell/planner.h"
#include "fuzz.h"
#include <math.h>

static void check_model(const dw_graph *graph) {
    dw_model_sizes model;
    if (dw_model_sizes_of_graph(graph, &model) != DW_OK) {
        fuzz_require(dw_last_error()[0] != '\0', "message");
        return;
    }
    fuzz_require(dw_model_sizes_check(&model) == DW_OK, "a model that can be planned");
    fuzz_require(isfinite(model.parameters) && model.parameters > 0, "its parameters");
    fuzz_require(isfinite(model.active) && model.active > 0, "what is active");
    double flops = dw_planner_token_flops(&model, 4096);
    fuzz_require(isfinite(flops) && flops > 0, "its operations");
}

static void check_work(const dw_graph *graph) {
    enum { SYMBOLS = 8 };
    int64_t sizes[SYMBOLS];
    dw_planner_work work;
    if (dw_graph_symbol_count(graph) > SYMBOLS) return;
    for (int at = 0; at < SYMBOLS; at++) sizes[at] = at + 2;
    for (int backward = 0; backward < 2; backward++)
        if (dw_planner_graph_work(graph, sizes, backward, &work) == DW_OK)
            fuzz_require(work.gemm >= 0 && work.attention >= 0 && work.bytes >= 0 &&
                             work.backward_gemm >= 0 && work.backward_attention >= 0,
                         "operations of 0 or more");
        else
            fuzz_require(dw_last_error()[0] != '\0', "message");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_graph *graph = NULL;
    int64_t live = dw__memory_live();
    if (dw_graph_from_json((const char *)data, bytes, &graph) == DW_OK) {
        check_model(graph);
        check_work(graph);
    }
    dw_graph_destroy(graph);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
