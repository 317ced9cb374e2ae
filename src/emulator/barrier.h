/* mbarrier objects (PTX ISA 9.7.13.15): one in eight bytes of shared memory, in a form of our own, which
 * programs treat as opaque.
 *
 *     bits 0-19 pending arrivals, 20-39 arrivals of a phase, 40-60 transactions outstanding (biased by 2^20),
 *     61 the current phase's parity, 62-63 both set: this is a barrier
 */
#ifndef DW_EMULATOR_BARRIER_H
#define DW_EMULATOR_BARRIER_H

#include "emulator/race.h"

#define DW__MBARRIER_MOST ((1u << 20) - 1)

/* Arrivals and transactions of work that a unit beside the warps has done: `address` is shared::cluster, `pc` of the
 * instruction that asked for it. False: a finding has been reported. */
bool dw__emu_mbarrier_arrive(const dw__emu_async *work, dw__emu_side side, uint32_t address,
                             uint32_t count);
bool dw__emu_mbarrier_complete(dw__emu_cta *by, uint32_t warp, int lane, uint32_t pc,
                               uint32_t address, uint32_t bytes);
/* One arrival more is to come in the current phase. */
bool dw__emu_mbarrier_expect_arrival(dw__emu_cta *by, uint32_t warp, int lane, uint32_t pc,
                                     uint32_t address);
/* "pending 1 of 2 arrivals, 4096 bytes outstanding, parity 0", for messages. */
void dw__emu_mbarrier_describe(const dw__emu_cluster *cluster, uint32_t address, char *text,
                               size_t bytes);

#endif
