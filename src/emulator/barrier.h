/* mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier"). Programs treat the
 * eight bytes as opaque, so the emulator packs the whole state into them:
 *
 *       bits 0-19 pending arrivals, 20-39 arrivals of a phase, 40-60 outstanding transaction bytes (biased by 2^20),
 *       61 parity of the current phase, 62-63 both set to mark the bytes as an mbarrier
 */
#ifndef DW_EMULATOR_BARRIER_H
#define DW_EMULATOR_BARRIER_H

#include "emulator/race.h"

#define DW__MBARRIER_MOST ((1u << 20) - 1)

/* Arrive on an mbarrier, or complete transaction bytes, on behalf of asynchronous work that has finished. `address`
 * is a shared::cluster address; `pc` is that of the instruction that issued the work. Return false after reporting a
 * finding. */
bool dw__emu_mbarrier_arrive(const dw__emu_async *work, dw__emu_side side, uint32_t address,
                             uint32_t count);
bool dw__emu_mbarrier_complete(dw__emu_cta *by, uint32_t warp, int lane, uint32_t pc,
                               uint32_t address, uint32_t bytes);
/* Adds one pending arrival to the current phase. */
bool dw__emu_mbarrier_expect_arrival(dw__emu_cta *by, uint32_t warp, int lane, uint32_t pc,
                                     uint32_t address);
/* "pending 1 of 2 arrivals, 4096 bytes outstanding, parity 0", for messages. */
void dw__emu_mbarrier_describe(const dw__emu_cluster *cluster, uint32_t address, char *text,
                               size_t bytes);

#endif
