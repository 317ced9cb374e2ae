/* Any bytes are rejected with a message, or are a policy that is the same after writing and reading it and that can be
 * applied to a graph. */
#include "base/base.h"
#include "deepwell/graph.h"
#include "deepwell/precision.h"
#include "fuzz.h"
#include <string.h>

static const char *const layers = "deepwell graph 1\n\ninput %x: f32[2, 3]\nseed %s: i64[2]\n"
                                  "parameter %w: f32[3, 3]\n\n"
                                  "%y = linear(%x, %w)  # mlp 0 h.0.mlp.c_fc\n"
                                  "%z = linear(%y, %w)  # head - lm_head\n\nreturn %z\n";

static void check_round_trip(const dw_precision_policy *policy) {
    char *text = NULL, *again = NULL;
    dw_precision_policy *back = NULL;
    fuzz_require(dw_precision_policy_json(policy, &text) == DW_OK, "its text");
    fuzz_require(dw_precision_policy_parse(text, strlen(text), &back) == DW_OK, "reading its text");
    fuzz_require(dw_precision_policy_json(back, &again) == DW_OK, "the text of that");
    fuzz_require(strcmp(text, again) == 0, "the same text");
    dw_text_free(text);
    dw_text_free(again);
    dw_precision_policy_destroy(back);
}

static void check_use(const dw_precision_policy *policy) {
    dw_graph *graph = NULL;
    char *text = NULL;
    uint32_t count = 9;
    fuzz_require(dw_graph_from_text(layers, &graph) == DW_OK, "a graph");
    fuzz_require(dw_precision_layers_json(graph, policy, &text) == DW_OK, "a list of layers");
    fuzz_require(dw_graph_apply_precision(&graph, policy, &count) == DW_OK && count <= 2,
                 "quantized layers");
    dw_text_free(text);
    dw_graph_destroy(graph);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_precision_policy *policy = NULL;
    int64_t live = dw__memory_live();
    if (dw_precision_policy_parse((const char *)data, bytes, &policy) == DW_OK) {
        check_round_trip(policy);
        check_use(policy);
    } else {
        fuzz_require(policy == NULL && dw_last_error()[0] != '\0', "message");
    }
    dw_precision_policy_destroy(policy);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
