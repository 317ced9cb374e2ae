/* Detects loops in which nothing changes. A warp whose registers and program counters return to an earlier state,
 * while nothing happened in its cluster, loops for ever unless another cluster changes what it reads. The scheduler
 * treats it as waiting.
 */
#ifndef DW_EMULATOR_SPIN_H
#define DW_EMULATOR_SPIN_H

#include "emulator/running_grid.h"

typedef enum dw__emu_spinning {
    DW__SPINS_NOT,   /* no warp was found spinning, or the answer is not known */
    DW__SPINS,       /* every warp that can run is in the state of the first call */
    DW__SPINS_FAULT, /* a finding was reported */
} dw__emu_spinning;

/* Runs each warp that can run for at most a few hundred operations, until it returns to the state of the previous
 * call. Returns DW__SPINS only if nothing has happened in the cluster since then. Returns DW__SPINS_NOT if memory is
 * short. */
dw__emu_spinning dw__emu_spins(dw__emu_cluster *cluster);
void dw__emu_free_spin(dw__emu_warp *w);

#endif
