/* Any text is rejected with a message, or is a module. Each of its kernels is translated, or rejected by name. No
 * kernel is run. */
#include "base/base.h"
#include "deepwell/emulator.h"
#include "fuzz.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    dw_emulator *emulator = NULL;
    dw_emulator_module *module = NULL;
    int64_t live = dw__memory_live();
    fuzz_require(dw_emulator_create("sm_100a", NULL, &emulator) == DW_OK, "an emulator");
    dw_status status = dw_emulator_load(emulator, (const char *)data, bytes, "fuzz", &module);
    if (status == DW_OK) status = dw_emulator_has_kernel(module, "f");
    if (status != DW_OK) fuzz_require(dw_last_error()[0] != '\0', "a message");
    dw_emulator_destroy(emulator);
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
