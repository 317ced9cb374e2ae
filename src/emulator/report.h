/* What was found, as a file for programs. */
#ifndef DW_EMULATOR_REPORT_H
#define DW_EMULATOR_REPORT_H

#include "deepwell/emulator.h"

/* See dw_emulator_report. `refused`: why kernels were not run. */
dw_status dw__emu_report(const dw_emulator *emulator, const char *architecture, uint64_t seed,
                         uint64_t launches, uint64_t instructions, const char *const *refused,
                         size_t refused_count, const char *path);

#endif
