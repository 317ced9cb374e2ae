/* Any file of measurements is read as times and texts that were measured, or counts as missing. What is written then is
 * found again. */
#include "kernel/tune.h"
#include "scratch_folder.h"
#include <math.h>
#include <sys/stat.h>

static const char gpu[] = "GPU", of[] = "a class", with[] = "cuBLASLt 1";

/* The corpus has this file. The check shows that the program still writes files like it. */
static void make_folder(void) {
    const dw_tune_time time = {.name = "cublaslt", .seconds = 1e-3};
    char path[128];
    dw__tuned found;
    scratch_make();
    setenv("DEEPWELL_CACHE", scratch_folder, 1);
    snprintf(path, sizeof path, "%s/tune", scratch_folder);
    fuzz_require(mkdir(path, 0700) == 0, "a folder");
    fuzz_require(dw__tune_write_detail(gpu, of, with, &time, "0123") == DW_OK, "write");
    fuzz_require(dw__tune_read(gpu, of, "cublaslt", &found) == DW_OK &&
                     strcmp(found.detail, "0123") == 0 && found.seconds == 1e-3,
                 "read what was written");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    static int made;
    const dw_tune_time time = {.name = "cublaslt", .seconds = 2e-3};
    char path[256];
    dw__tuned found;
    if (!made++) make_folder();
    const int64_t live = dw__memory_live();
    scratch_write("tune/GPU.json", bytes, count, path);
    const dw_status status = dw__tune_read(gpu, of, "cublaslt", &found);
    fuzz_require(status == DW_OK || status == DW_NOT_FOUND, "read, or missing");
    if (status == DW_OK) {
        fuzz_require(found.failure[0] || (found.seconds > 0.0 && isfinite(found.seconds)),
                     "a time or a reason");
        /* A text that was changed would contradict its checksum. */
        fuzz_require(!found.detail[0] || strcmp(found.detail, "0123") == 0, "the text as written");
    }
    const int kept = status == DW_OK && strcmp(found.with, with) == 0;
    fuzz_require(dw__tune_write_detail(gpu, of, with, &time, "4567") == DW_OK, "write");
    fuzz_require(dw__tune_read(gpu, of, "cublaslt", &found) == DW_OK, "read again");
    fuzz_require(kept || strcmp(found.detail, "4567") == 0, "the first that was kept, or ours");
    fuzz_require(dw__memory_live() == live, "all memory given back");
    return 0;
}
