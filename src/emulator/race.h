/* The race checker: detects races in shared and tensor memory, and generic writes that asynchronous work cannot see
 * yet.
 *
 * It computes happens-before with vector clocks (Flanagan and Freund, FastTrack, PLDI 2009). The agents are the warps
 * of a cluster and their asynchronous work: each warp's mbarrier.init, its cp.async, its bulk groups, its MMAs
 * (wgmma, tcgen05), and the copies that complete on each mbarrier. A warp's clock holds, for each agent, the time up
 * to which the warp knows everything the agent did (`seen`), and the time up to which the asynchronous proxy sees
 * those generic writes (`shown`; fence.proxy.async sets it to `seen`). Barriers, mbarriers and waits pass on both.
 * Asynchronous work takes a copy of its issuer's clock, and its accesses are checked against that copy.
 *
 * In kernels that contain a tcgen05.fence, clocks have two more vectors. `released` is the time up to which
 * fence::before_thread_sync released the tensor work of other agents; barriers and mbarriers pass it on, and
 * tcgen05.commit implies it. `ordered` is the time up to which the warp's own tensor work is ordered after that work;
 * fence::after_thread_sync sets it to `released`. Kernels without these fences, such as CUTLASS's, rely on the
 * hardware's behaviour and are not checked for them.
 *
 * The bargain: the checker reports no false races but does not find all races. The lanes of a warp count as one
 * agent; strong accesses (atomic, volatile, acquire, release) of places that share a slot acquire from one another;
 * fences have every scope.
 */
#ifndef DW_EMULATOR_RACE_H
#define DW_EMULATOR_RACE_H

#include "emulator/running_grid.h"

typedef struct dw__emu_clock {
    uint32_t agents, vectors; /* 2 or 4 of the vectors below, each with an entry per agent */
    uint32_t times[];         /* seen, shown, released, ordered */
} dw__emu_clock;
static inline uint32_t *dw__emu_seen(dw__emu_clock *c) { return c->times; }
static inline uint32_t *dw__emu_shown(dw__emu_clock *c) { return c->times + c->agents; }
static inline uint32_t *dw__emu_released(dw__emu_clock *c) { return c->times + 2 * c->agents; }
static inline uint32_t *dw__emu_ordered(dw__emu_clock *c) { return c->times + 3 * c->agents; }

typedef struct dw__emu_race dw__emu_race;

/* The agents of each warp; see above. */
typedef enum dw__emu_side {
    DW__SIDE_GENERIC,
    DW__SIDE_INIT,        /* mbarrier.init */
    DW__SIDE_COPY,        /* cp.async, which uses the generic proxy */
    DW__SIDE_BULK,        /* cp.async.bulk with groups */
    DW__SIDE_WGMMA,       /* wgmma; recorded for the first of the four warps */
    DW__SIDE_TENSOR,      /* tcgen05 MMAs, copies and commits, in issue order */
    DW__SIDE_TENSOR_LOAD, /* tcgen05.ld and st, ordered within a quarter of the lanes */
    DW__SIDE_TENSOR_STORE,
    DW__SIDES,
} dw__emu_side;

/* Starts checking a cluster whose warps are in place. Returns false if memory is out. All other functions below do
 * nothing if the checker is off. */
bool dw__emu_race_begin(dw__emu_cluster *cluster);
void dw__emu_race_end(dw__emu_cluster *cluster);

/* ---- warps --------------------------------------------------------------------------------- */

/* Checks a lane's access to a block's shared memory; `access` as in dw__emu_reach. */
void dw__emu_race_touch(dw__emu_warp *w, int lane, dw__emu_cta *owner, uint32_t offset,
                        uint32_t bytes, int access);
/* Call when a warp has ended. After a block's last warp, no other block of the cluster may access the block's shared
 * memory, and the block must know of all earlier accesses by others. */
void dw__emu_race_ended(dw__emu_warp *w);
/* Call after a strong access that may be to global memory; such accesses can order the cluster's warps. `orders`: the
 * access is not relaxed. */
void dw__emu_race_strong(dw__emu_warp *w, bool acquires, bool releases, bool orders);
/* fence.proxy.async; fence.mbarrier_init; fence and membar with a scope wider than the block. */
void dw__emu_race_fence_proxy(dw__emu_warp *w);
void dw__emu_race_fence_init(dw__emu_warp *w);
void dw__emu_race_fence(dw__emu_warp *w);
/* tcgen05.fence::before_thread_sync and ::after_thread_sync. */
void dw__emu_race_tensor_fence(dw__emu_warp *w, bool after);

/* bar and barrier: a warp arrives, the barrier completes, a warp leaves. */
void dw__emu_race_arrive(dw__emu_warp *w, uint32_t barrier);
void dw__emu_race_complete(dw__emu_cta *cta, uint32_t barrier);
void dw__emu_race_leave(dw__emu_warp *w, uint32_t barrier);
/* barrier.cluster */
void dw__emu_race_cluster_arrive(dw__emu_warp *w, bool relaxed);
void dw__emu_race_cluster_complete(dw__emu_cluster *cluster);
void dw__emu_race_cluster_leave(dw__emu_warp *w);

/* ---- mbarriers ----------------------------------------------------------------------------- */

/* `address` is a shared::cluster address within a block, as in barrier.h. */
void dw__emu_race_mbarrier_init(dw__emu_warp *w, int lane, uint32_t address, bool valid);
void dw__emu_race_mbarrier_arrive(dw__emu_warp *w, int lane, uint32_t address);
/* Asynchronous work arrives on an mbarrier for everything that its side did up to its time. */
void dw__emu_race_mbarrier_signal(const dw__emu_async *work, dw__emu_side side, uint32_t address);
void dw__emu_race_mbarrier_complete(dw__emu_cluster *cluster, uint32_t address);
void dw__emu_race_mbarrier_passed(dw__emu_warp *w, int lane, uint32_t address);
/* Returns the number of the current phase, counted by the checker; 0 if it is not known. */
uint32_t dw__emu_race_mbarrier_phase(const dw__emu_cluster *cluster, uint32_t address);
/* A copy completes bytes on the mbarrier. `phase` is the phase at the copy's issue; 0 disables the check. */
void dw__emu_race_mbarrier_bytes(const dw__emu_async *work, uint32_t address, uint32_t phase);

/* ---- work beside the warps ------------------------------------------------------------------ */

/* Gives work its issuer's clock. For work of several warps, the clock is what all of them know. Returns false if
 * memory is out. */
bool dw__emu_race_issue(dw__emu_warp *w, dw__emu_async *work);
/* Marks work that needs no proxy fence because its issuer's generic writes are visible to it. */
void dw__emu_race_generic(dw__emu_async *work);
/* Numbers work: `next` gives it the next time of a warp's side, `last` the latest time, for work without a time of
 * its own. */
void dw__emu_race_next_time(dw__emu_async *work, uint32_t warp, dw__emu_side side);
void dw__emu_race_last_time(dw__emu_async *work, dw__emu_side side);
/* Numbers work by its issuer's clock, so that its completion also covers work issued later. */
void dw__emu_race_issued(dw__emu_async *work);
/* Checks an access of such work; `warp` of its block as above. */
void dw__emu_race_work(dw__emu_async *work, uint32_t warp, dw__emu_side side, dw__emu_cta *owner,
                       uint32_t offset, uint32_t bytes, bool write);
/* Checks an access of such work to a block's tensor memory; `side` is one of DW__SIDE_TENSOR*. The history has a
 * granularity of sixteen lanes. dw__emu_race_tensor_allocated clears the history of newly allocated columns. */
void dw__emu_race_tensor(dw__emu_async *work, dw__emu_side side, dw__emu_cta *owner, uint32_t lane,
                         uint32_t lanes, uint32_t column, uint32_t columns, bool write);
void dw__emu_race_tensor_allocated(dw__emu_cta *owner, uint32_t column, uint32_t columns);
/* Checks the writes of a copy that completes on the mbarrier. */
void dw__emu_race_copied(dw__emu_async *work, uint32_t mbarrier, dw__emu_cta *owner,
                         uint32_t offset, uint32_t bytes, bool write);
/* A warp has waited for the work of a warp of its block up to a time. */
void dw__emu_race_waited(dw__emu_warp *w, uint32_t warp, dw__emu_side side, uint32_t time);
/* A warp has waited for all of its own work of a side, numbered by its clock. */
void dw__emu_race_waited_all(dw__emu_warp *w, dw__emu_side side);

#endif
