/* One thread pool for the whole library.
 *
 * A loop of `count` tasks is handed out one index at a time (an atomic counter), so uneven tasks
 * balance. A task's result may depend on its index, never on the thread that runs it or on how many
 * there are: that is what makes the same seed give the same bits on any number of threads. The
 * calling thread works too. Idle workers spin for some tens of microseconds, then sleep.
 * A task that itself calls dw__pool_run runs its inner loop serially, under its own worker number.
 * After fork() a child's first call starts fresh workers. Calls from several threads at once take
 * turns.
 */
#ifndef DW_POOL_H
#define DW_POOL_H

#include "base/base.h"
#include "deepwell/threads.h"

typedef void (*dw__task)(void *context, int64_t index, int worker);

/* `worker` is in [0, dw__pool_threads()): use it to pick per-thread scratch, never to pick work. */
void dw__pool_run(int64_t count, dw__task task, void *context);
/* Threads that dw__pool_run uses at most; see deepwell/threads.h. */
int dw__pool_threads(void);
/* From here on the calling thread's loops use at most `threads` threads, and dw__pool_threads() says so to
 * it, whatever other callers set meanwhile: scratch that was measured for that many suffices. 0 lifts the
 * limit. Returns the limit before. */
int dw__pool_limit(int threads);
dw_status dw__pool_set_threads(int threads);
#define DW_POOL_MAX_THREADS DW_MAX_THREADS

#endif
