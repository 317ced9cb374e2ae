/* The number of threads of the CPU engine: one pool for the whole process.
 *
 *     dw_set_threads(8);
 */
#ifndef DEEPWELL_THREADS_H
#define DEEPWELL_THREADS_H

#include "deepwell/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DW_MAX_THREADS 256
/* Sets the number of threads, after waiting for work in progress. Results do not depend on it. DW_INVALID_ARGUMENT: not
 * in 1..DW_MAX_THREADS. DW_STATE: called from inside the pool's work. */
DW_API dw_status dw_set_threads(int threads);
/* Returns the number that was set. The default is DEEPWELL_THREADS of the environment, else the number of CPUs that
 * this process may use. */
DW_API int dw_get_threads(void);

#ifdef __cplusplus
}
#endif
#endif
