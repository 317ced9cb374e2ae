/* Any bytes are rejected with a message, or are a table of runs. Each run has a finite prediction or a reason. */
#include "base/base.h"
#include "deepwell/graph.h"
#include "fuzz.h"
#include "lab/evaluate.h"
#include "lab/lab_base.h"
#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    lab_runs *runs = NULL;
    char *json = NULL;
    const int64_t live = dw__memory_live() + lab_memory_live();
    if (lab_runs_parse((const char *)data, bytes, &runs) == DW_OK) {
        for (size_t at = 0; at < lab_runs_count(runs); at++) {
            lab_run run;
            dw_prediction prediction;
            lab_run_at(runs, at, &run);
            if (run.reason) {
                fuzz_require(run.reason[0] != '\0', "a reason");
                continue;
            }
            fuzz_require(dw_predict(&run.model, run.hardware, &run.layout, &prediction) == DW_OK,
                         "a prediction");
            fuzz_require(isfinite(prediction.seconds) && prediction.seconds > 0, "a finite time");
            fuzz_require(isfinite(prediction.used) && prediction.used > 0, "finite memory");
        }
        fuzz_require(lab_evaluate(runs, NULL, &json) == DW_OK, "an evaluation");
    } else {
        fuzz_require(lab_error()[0] != '\0', "message");
    }
    lab_free(json);
    lab_runs_destroy(runs);
    fuzz_require(dw__memory_live() + lab_memory_live() == live, "all memory given back");
    return 0;
}
