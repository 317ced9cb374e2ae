/* Any text is rejected with a message, or gives a valid graph. Writing and reading the graph gives the same text. */
#include "deepwell/graph.h"
#include "fuzz.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *text = malloc(bytes + 1), *first = NULL, *second = NULL;
    dw_graph *graph = NULL, *back = NULL;
    if (!text) return 0;
    if (bytes > 0) memcpy(text, data, bytes);
    text[bytes] = '\0';
    if (dw_graph_from_text(text, &graph) == DW_OK) {
        fuzz_require(dw_graph_verify(graph) == DW_OK, "verify");
        fuzz_require(dw_graph_to_text(graph, &first) == DW_OK, "write");
        fuzz_require(dw_graph_from_text(first, &back) == DW_OK, "read what was written");
        fuzz_require(dw_graph_to_text(back, &second) == DW_OK, "write again");
        fuzz_require(strcmp(first, second) == 0, "same text");
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_graph_destroy(graph);
    dw_graph_destroy(back);
    dw_text_free(first);
    dw_text_free(second);
    free(text);
    return 0;
}
