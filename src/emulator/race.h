/* Who touched shared and tensor memory when, and what orders it: races, and generic writes that asynchronous
 * work cannot see yet.
 *
 * Happens-before by vector clocks (Flanagan and Freund, FastTrack, PLDI 2009). Agents are the warps of a
 * cluster and what works beside them: each warp's mbarrier.init, its cp.async, its bulk groups, its products
 * (wgmma, tcgen05), and the copies that complete on each mbarrier. A warp's clock says up to which time of each
 * agent it knows everything done (`seen`), and of what so known the asynchronous proxy sees what was written
 * through the generic one (`shown`: fence.proxy.async makes it `seen`). Both go with barriers, mbarriers and
 * waits. Asynchronous work takes a copy of its issuer's clock, and its accesses are held to that copy.
 *
 * In kernels that have tcgen05.fence, clocks also say up to which time the tensor work of others was released by
 * fence::before_thread_sync (`released`, which goes with barriers and mbarriers; tcgen05.commit does it by itself), and
 * up to which a warp's own such work is ordered after it (`ordered`, which stays: fence::after_thread_sync makes it
 * `released`). Kernels without these fences, as NVIDIA's CUTLASS has them, count on the hardware.
 *
 * Lanes of a warp count as one agent, and an order may be assumed where there is none: strong accesses (atomic,
 * volatile, acquire, release) of places that share a slot acquire from one another, fences are of every scope.
 * So what is reported is a mistake; not every one is found.
 */
#ifndef DW_EMULATOR_RACE_H
#define DW_EMULATOR_RACE_H

#include "emulator/machine.h"

typedef struct dw__emu_clock {
    uint32_t agents, vectors; /* 2 or 4 of the below, each of all agents */
    uint32_t times[];         /* seen, shown, released, ordered */
} dw__emu_clock;
static inline uint32_t *dw__emu_seen(dw__emu_clock *c) { return c->times; }
static inline uint32_t *dw__emu_shown(dw__emu_clock *c) { return c->times + c->agents; }
static inline uint32_t *dw__emu_released(dw__emu_clock *c) { return c->times + 2 * c->agents; }
static inline uint32_t *dw__emu_ordered(dw__emu_clock *c) { return c->times + 3 * c->agents; }

typedef struct dw__emu_race dw__emu_race;

/* Of each warp; see above. */
typedef enum dw__emu_side {
    DW__SIDE_GENERIC,
    DW__SIDE_INIT,        /* mbarrier.init */
    DW__SIDE_COPY,        /* cp.async: generic as well */
    DW__SIDE_BULK,        /* cp.async.bulk with groups */
    DW__SIDE_WGMMA,       /* of the first of four warps */
    DW__SIDE_TENSOR,      /* tcgen05: products, copies, commits, each after the other */
    DW__SIDE_TENSOR_LOAD, /* tcgen05.ld and st, in order among those of a quarter of the lanes */
    DW__SIDE_TENSOR_STORE,
    DW__SIDES,
} dw__emu_side;

/* Of a cluster whose warps are in place. False: no memory. All others below do nothing where the checker is off. */
bool dw__emu_race_begin(dw__emu_cluster *cluster);
void dw__emu_race_end(dw__emu_cluster *cluster);

/* ---- warps --------------------------------------------------------------------------------- */

/* An access of a lane to a block's shared memory, `access` as dw__emu_reach has it. */
void dw__emu_race_touch(dw__emu_warp *w, int lane, dw__emu_cta *owner, uint32_t offset,
                        uint32_t bytes, int access);
/* A warp has ended. Of a block whose last it was, no other block of the cluster may use the shared memory any
 * more, nor have done so without that block's knowing. */
void dw__emu_race_ended(dw__emu_warp *w);
/* After a strong access that may have been to global memory: it takes part in an order of the cluster's warps.
 * `orders`: it is no relaxed one. */
void dw__emu_race_strong(dw__emu_warp *w, bool acquires, bool releases, bool orders);
/* fence.proxy.async; fence.mbarrier_init; fence and membar of a scope beyond the block. */
void dw__emu_race_fence_proxy(dw__emu_warp *w);
void dw__emu_race_fence_init(dw__emu_warp *w);
void dw__emu_race_fence(dw__emu_warp *w);
/* tcgen05.fence::before_thread_sync and ::after_thread_sync. */
void dw__emu_race_tensor_fence(dw__emu_warp *w, bool after);

/* bar and barrier: a warp comes, the last has come, a warp goes on. */
void dw__emu_race_arrive(dw__emu_warp *w, uint32_t barrier);
void dw__emu_race_complete(dw__emu_cta *cta, uint32_t barrier);
void dw__emu_race_leave(dw__emu_warp *w, uint32_t barrier);
/* barrier.cluster */
void dw__emu_race_cluster_arrive(dw__emu_warp *w, bool relaxed);
void dw__emu_race_cluster_complete(dw__emu_cluster *cluster);
void dw__emu_race_cluster_leave(dw__emu_warp *w);

/* ---- mbarriers ----------------------------------------------------------------------------- */

/* `address` is shared::cluster and lies within a block, as barrier.h has it. */
void dw__emu_race_mbarrier_init(dw__emu_warp *w, int lane, uint32_t address, bool valid);
void dw__emu_race_mbarrier_arrive(dw__emu_warp *w, int lane, uint32_t address);
/* Work that arrives for all of its side up to its time. */
void dw__emu_race_mbarrier_told(const dw__emu_async *work, dw__emu_side side, uint32_t address);
void dw__emu_race_mbarrier_complete(dw__emu_cluster *cluster, uint32_t address);
void dw__emu_race_mbarrier_passed(dw__emu_warp *w, int lane, uint32_t address);
/* The number of the phase that is under way, counted by the checker; 0: none is known. */
uint32_t dw__emu_race_mbarrier_phase(const dw__emu_cluster *cluster, uint32_t address);
/* A copy is about to tell the barrier of its bytes; `phase` as it was when the copy was issued, 0: do not ask. */
void dw__emu_race_mbarrier_bytes(const dw__emu_async *work, uint32_t address, uint32_t phase);

/* ---- work beside the warps ------------------------------------------------------------------ */

/* Gives work its issuer's clock. The work of several warps: what all of them know. False: no memory. */
bool dw__emu_race_issue(dw__emu_warp *w, dw__emu_async *work);
/* Work that needs no proxy fence: its issuer's generic writes are visible to it. */
void dw__emu_race_generic(dw__emu_async *work);
/* Numbers work: the next time of a warp's side, or, of `work` that has none of its own, the last. */
void dw__emu_race_next_time(dw__emu_async *work, uint32_t warp, dw__emu_side side);
void dw__emu_race_last_time(dw__emu_async *work, dw__emu_side side);
/* Numbers work by its issuer's clock, so that it tells as well what was issued later. */
void dw__emu_race_issued(dw__emu_async *work);
/* Accesses of such work; `warp` of its block as above. */
void dw__emu_race_work(dw__emu_async *work, uint32_t warp, dw__emu_side side, dw__emu_cta *owner,
                       uint32_t offset, uint32_t bytes, bool write);
/* Accesses of such work, of a side that begins with DW__SIDE_TENSOR, to a block's tensor memory. What is
 * remembered is of sixteen lanes together. Columns that are allocated were never used. */
void dw__emu_race_tensor(dw__emu_async *work, dw__emu_side side, dw__emu_cta *owner, uint32_t lane,
                         uint32_t lanes, uint32_t column, uint32_t columns, bool write);
void dw__emu_race_tensor_allocated(dw__emu_cta *owner, uint32_t column, uint32_t columns);
/* Writes of a copy that completes on the mbarrier. */
void dw__emu_race_copied(dw__emu_async *work, uint32_t mbarrier, dw__emu_cta *owner,
                         uint32_t offset, uint32_t bytes, bool write);
/* A warp has waited for work of a warp of its block up to a time. */
void dw__emu_race_waited(dw__emu_warp *w, uint32_t warp, dw__emu_side side, uint32_t time);
/* A warp has waited for all of its own work, numbered by its clock, of a side. */
void dw__emu_race_waited_all(dw__emu_warp *w, dw__emu_side side);

#endif
