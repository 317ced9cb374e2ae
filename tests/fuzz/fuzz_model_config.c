/* Any bytes are rejected with a message, or are a configuration. Its parameters have sizes and, unless it has too many
 * layers, its graph is valid. */
#include "base/base.h"
#include "deepwell/planner.h"
#include "fuzz.h"
#include <math.h>
#include <string.h>

static void check_sizes(const dw_model_sizes *sizes) {
    fuzz_require(dw_model_sizes_check(sizes) == DW_OK, "sizes that can be planned");
    fuzz_require(isfinite(sizes->parameters) && sizes->parameters > 0, "its parameters");
    fuzz_require(sizes->active > 0 && sizes->active <= sizes->parameters, "what is active");
    double flops = dw_planner_token_flops(sizes, 4096);
    fuzz_require(isfinite(flops) && flops > 0, "its operations");
}

static void check_parameters(const dw_model_config *config, const dw_model_info *info) {
    int64_t elements = 0;
    for (uint32_t i = 0; i < dw_model_parameter_count(config); i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(config, i, &parameter);
        fuzz_require(parameter.count > 0 && parameter.name[0] != '\0', "a parameter");
        elements += parameter.count;
    }
    fuzz_require((double)elements == info->sizes.parameters, "the sum of them");
}

static void check_graph(const dw_model_config *config) {
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    dw_graph *graph = NULL;
    options.output = DW_MODEL_LOSS;
    options.dropout = 1;
    if (dw_model_graph(config, &options, &graph) == DW_OK)
        fuzz_require(dw_graph_verify(graph) == DW_OK, "verify");
    else
        fuzz_require(0, "a graph of what was accepted");
    dw_graph_destroy(graph);
}

static void check_config(const dw_model_config *config, const dw_model_sizes *sizes) {
    enum { LAYERS_BUILT = 4 };
    dw_model_info info;
    dw_model_describe(config, &info);
    fuzz_require(sizes && memcmp(&info.sizes, sizes, sizeof *sizes) == 0, "the same sizes");
    check_parameters(config, &info);
    if (info.sizes.layers <= LAYERS_BUILT) check_graph(config);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_model_sizes sizes;
    dw_model_config *config = NULL;
    int64_t live = dw__memory_live();
    int sized = dw_model_sizes_parse((const char *)data, bytes, &sizes) == DW_OK;
    if (sized)
        check_sizes(&sizes);
    else
        fuzz_require(dw_last_error()[0] != '\0', "message");
    if (dw_model_config_parse((const char *)data, bytes, &config) == DW_OK)
        check_config(config, sized ? &sizes : NULL);
    else
        fuzz_require(dw_last_error()[0] != '\0', "message");
    dw_model_config_destroy(config);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
