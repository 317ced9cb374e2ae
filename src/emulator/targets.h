/* Which GPUs have an instruction. */
#ifndef DW_EMULATOR_TARGETS_H
#define DW_EMULATOR_TARGETS_H

#include "emulator/ptx.h"

/* NULL where a GPU of this architecture (90, 100, 103, 120) has the instruction; else those that do: "sm_100a,
 * sm_103a". */
const char *dw__emu_only_on(const dw__ptx_instruction *in, int architecture);

#endif
