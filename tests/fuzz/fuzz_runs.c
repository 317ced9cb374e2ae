/* Any bytes are refused with a message, or are a table of runs, each of which has a finite prediction or a reason. */
#include "base/base.h"
#include "deepwell/evaluate.h"
#include "deepwell/graph.h"
#include "fuzz.h"
#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_runs *runs = NULL;
    char *json = NULL;
    int64_t live = dw__memory_live();
    if (dw_runs_parse((const char *)data, bytes, &runs) == DW_OK) {
        for (size_t at = 0; at < dw_runs_count(runs); at++) {
            dw_run run;
            dw_prediction prediction;
            dw_run_at(runs, at, &run);
            if (run.reason) {
                fuzz_require(run.reason[0] != '\0', "a reason");
                continue;
            }
            fuzz_require(dw_predict(&run.model, run.hardware, &run.layout, &prediction) == DW_OK,
                         "a prediction");
            fuzz_require(isfinite(prediction.seconds) && prediction.seconds > 0, "a finite time");
            fuzz_require(isfinite(prediction.used) && prediction.used > 0, "finite memory");
        }
        fuzz_require(dw_evaluate(runs, NULL, &json) == DW_OK, "an evaluation");
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    dw_text_free(json);
    dw_runs_destroy(runs);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
