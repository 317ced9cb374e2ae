/* A fuzz target: one function that must survive any bytes. Targets are written to libFuzzer's entry
 * point, so that both libFuzzer and our replay program (replay.c) can drive them. */
#ifndef DW_FUZZ_H
#define DW_FUZZ_H

#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* Ends the program if a condition that must hold for every input does not. A fuzzer detects this as a crash. */
static inline void fuzz_require(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "broken: %s (last message: %s)\n", what, dw_last_error());
    abort();
}

#endif
