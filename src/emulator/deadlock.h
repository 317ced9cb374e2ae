/* Describes a cluster that is stopped because its warps would never end. */
#ifndef DW_EMULATOR_DEADLOCK_H
#define DW_EMULATOR_DEADLOCK_H

#include "emulator/machine.h"

/* One finding: `why`, then what each warp waits for; warps that wait alike are listed together. */
void dw__emu_report_deadlock(dw__emu_cluster *cluster, const char *why);

#endif
