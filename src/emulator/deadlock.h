/* What is said of a cluster in which nothing can go on. */
#ifndef DW_EMULATOR_DEADLOCK_H
#define DW_EMULATOR_DEADLOCK_H

#include "emulator/machine.h"

/* Who waits on what, as one finding: warps that wait alike are told of together. */
void dw__emu_report_deadlock(dw__emu_cluster *cluster);

#endif
