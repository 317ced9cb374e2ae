/* Any bytes are rejected with a message, or are a plan that is the same after writing and reading it. */
#include "base/base.h"
#include "deepwell/autoplan.h"
#include "deepwell/graph.h"
#include "fuzz.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_autoplan *plan = NULL, *back = NULL;
    char *text = NULL, *again = NULL;
    int64_t live = dw__memory_live();
    if (dw_autoplan_parse((const char *)data, bytes, &plan) == DW_OK) {
        fuzz_require(dw_autoplan_json(plan, &text) == DW_OK, "its text");
        fuzz_require(dw_autoplan_parse(text, strlen(text), &back) == DW_OK, "reading its text");
        fuzz_require(dw_autoplan_json(back, &again) == DW_OK, "the text of that");
        fuzz_require(strcmp(text, again) == 0, "the same text");
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_text_free(text);
    dw_text_free(again);
    dw_autoplan_destroy(plan);
    dw_autoplan_destroy(back);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
