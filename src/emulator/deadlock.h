/* Describes a deadlocked cluster. */
#ifndef DW_EMULATOR_DEADLOCK_H
#define DW_EMULATOR_DEADLOCK_H

#include "emulator/running_grid.h"

/* Reports one finding: `why`, then what each warp waits for. Warps in the same state are listed together. */
void dw__emu_report_deadlock(dw__emu_cluster *cluster, const char *why);

#endif
