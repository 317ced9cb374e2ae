/* Any bytes are refused with a message, or are a configuration, whose parameters have sizes and, where it has not
 * too many layers, whose graph is whole. */
#include "base/base.h"
#include "deepwell/model.h"
#include "fuzz.h"

static void check_parameters(const dw_model_config *config, const dw_model_info *info) {
    int64_t elements = 0;
    for (uint32_t i = 0; i < dw_model_parameter_count(config); i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(config, i, &parameter);
        fuzz_require(parameter.count > 0 && parameter.name[0] != '\0', "a parameter");
        elements += parameter.count;
    }
    fuzz_require(elements == info->parameter_elements, "the sum of them");
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    enum { LAYERS_BUILT = 4 };
    dw_model_config *config = NULL;
    int64_t live = dw__memory_live();
    if (dw_model_config_parse((const char *)data, bytes, &config) == DW_OK) {
        dw_model_info info;
        dw_model_describe(config, &info);
        check_parameters(config, &info);
        if (info.layers <= LAYERS_BUILT) check_graph(config);
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_model_config_destroy(config);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
