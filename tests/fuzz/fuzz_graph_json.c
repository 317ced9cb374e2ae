/* Any JSON is rejected with a message, or gives a valid graph. The graph has a cost or a message why not, and writing
 * and reading it gives the same JSON. */
#include "deepwell/graph.h"
#include "fuzz.h"
#include <stdlib.h>
#include <string.h>

static void check_cost(const dw_graph *graph) {
    enum { SYMBOLS = 64 };
    int64_t sizes[SYMBOLS];
    dw_cost cost;
    if (dw_graph_symbol_count(graph) > SYMBOLS) return;
    for (int i = 0; i < SYMBOLS; i++) sizes[i] = i + 2;
    if (dw_graph_cost(graph, sizes, &cost) == DW_OK)
        fuzz_require(cost.flops >= 0 && cost.bytes >= 0, "cost of 0 or more");
    else
        fuzz_require(dw_last_error()[0] != '\0', "message");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_graph *graph = NULL, *back = NULL;
    char *first = NULL, *second = NULL;
    if (dw_graph_from_json((const char *)data, bytes, &graph) == DW_OK) {
        fuzz_require(dw_graph_verify(graph) == DW_OK, "verify");
        check_cost(graph);
        fuzz_require(dw_graph_to_json(graph, &first) == DW_OK, "write");
        fuzz_require(dw_graph_from_json(first, strlen(first), &back) == DW_OK,
                     "read what was written");
        fuzz_require(dw_graph_to_json(back, &second) == DW_OK, "write again");
        fuzz_require(strcmp(first, second) == 0, "same JSON");
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_graph_destroy(graph);
    dw_graph_destroy(back);
    dw_text_free(first);
    dw_text_free(second);
    return 0;
}
