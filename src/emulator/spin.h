/* Loops in which nothing changes: a warp whose registers and places in the program are what they were, while nothing
 * happened in its cluster, goes round for ever, unless somebody else changes what it reads. It is as good as waiting.
 */
#ifndef DW_EMULATOR_SPIN_H
#define DW_EMULATOR_SPIN_H

#include "emulator/machine.h"

typedef enum dw__emu_spinning {
    DW__SPINS_NOT,   /* or it is not known */
    DW__SPINS,       /* every warp that runs is where it was when this was first asked */
    DW__SPINS_FAULT, /* a finding was reported */
} dw__emu_spinning;

/* Runs each warp that can run for some hundred operations at most, until it is where it was when this was asked
 * before, since which nothing must have happened for DW__SPINS. Where memory is short, none spins. */
dw__emu_spinning dw__emu_spins(dw__emu_cluster *cluster);
void dw__emu_free_spin(dw__emu_warp *w);

#endif
