/* Looks up which GPUs have an instruction. */
#ifndef DW_EMULATOR_TARGETS_H
#define DW_EMULATOR_TARGETS_H

#include "emulator/ptx.h"

/* Returns NULL if the architecture (90, 100, 103, 120) has the instruction, else the list of those that do: "sm_100a,
 * sm_103a". */
const char *dw__emu_only_on(const dw__ptx_instruction *in, int architecture);

#endif
