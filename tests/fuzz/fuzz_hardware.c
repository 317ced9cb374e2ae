/* Any bytes are rejected with a message, or are a description that is the same after writing and reading it. */
#include "base/base.h"
#include "deepwell/graph.h"
#include "deepwell/hardware.h"
#include "fuzz.h"
#include <string.h>

static void check_round_trip(const dw_hardware *hardware) {
    char *text = NULL, *again = NULL;
    dw_hardware *back = NULL;
    fuzz_require(dw_hardware_json(hardware, &text) == DW_OK, "its text");
    fuzz_require(dw_hardware_parse(text, strlen(text), &back) == DW_OK, "reading its text");
    fuzz_require(dw_hardware_json(back, &again) == DW_OK, "the text of that");
    fuzz_require(strcmp(text, again) == 0, "the same text");
    dw_text_free(text);
    dw_text_free(again);
    dw_hardware_destroy(back);
}

static void check_counts(const dw_hardware *hardware) {
    dw_hardware *more = NULL;
    if (dw_hardware_with_gpus(hardware, 64, &more) == DW_OK)
        fuzz_require(more->gpus == 64, "the number of GPUs");
    dw_hardware_destroy(more);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_hardware *hardware = NULL;
    int64_t live = dw__memory_live();
    if (dw_hardware_parse((const char *)data, bytes, &hardware) == DW_OK) {
        check_round_trip(hardware);
        check_counts(hardware);
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_hardware_destroy(hardware);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
