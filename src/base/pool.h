/* One thread pool for the whole library.
 *
 * A loop of `count` tasks is handed out one index at a time by an atomic counter, so uneven tasks balance. A
 * task's result may depend on its index, but never on the thread that runs it or on the number of threads:
 * the same seed then gives the same bits on any number of threads. The calling thread works too. Idle workers
 * spin for some tens of microseconds, then sleep. A task that calls dw__pool_run itself runs its inner loop
 * serially, under its own worker number. After fork() a child's first call starts new workers. Calls from
 * several threads take turns. */
#ifndef DW_POOL_H
#define DW_POOL_H

#include "base/base.h"
#include "deepwell/threads.h"

typedef void (*dw__task)(void *context, int64_t index, int worker);

/* `worker` is in [0, dw__pool_threads()). It selects per-thread scratch; it must never select work. */
void dw__pool_run(int64_t count, dw__task task, void *context);
/* The most threads that dw__pool_run uses; see deepwell/threads.h. */
int dw__pool_threads(void);
/* Limits the calling thread's loops to `threads` threads from now on. dw__pool_threads() returns the limit to
 * this thread, whatever other callers set meanwhile, so scratch sized for it suffices. 0 lifts the limit.
 * Returns the previous limit. */
int dw__pool_limit(int threads);
dw_status dw__pool_set_threads(int threads);
#define DW_POOL_MAX_THREADS DW_MAX_THREADS

#endif
