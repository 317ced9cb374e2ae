/* Any bytes are rejected with a message, or are a model with sizes that a prediction can use. */
#include "base/base.h"
#include "deepwell/planner.h"
#include "fuzz.h"
#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_planner_model model;
    int64_t live = dw__memory_live();
    if (dw_planner_model_parse((const char *)data, bytes, &model) == DW_OK) {
        fuzz_require(dw_planner_model_check(&model) == DW_OK, "a model that can be planned");
        fuzz_require(isfinite(model.parameters) && model.parameters > 0, "its parameters");
        fuzz_require(model.active > 0 && model.active <= model.parameters, "what is active");
        double flops = dw_planner_token_flops(&model, 4096);
        fuzz_require(isfinite(flops) && flops > 0, "its operations");
    } else {
        fuzz_require(dw_last_error()[0] != '\0', "message");
    }
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
