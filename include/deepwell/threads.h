/* How many threads the CPU engine uses: one pool for the whole process. */
#ifndef DEEPWELL_THREADS_H
#define DEEPWELL_THREADS_H

#include "deepwell/status.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DW_MAX_THREADS 256

/* DW_INVALID_ARGUMENT outside 1..DW_MAX_THREADS. Waits for work in progress; DW_STATE when called
 * from inside that work. Results do not depend on the number of threads. */
DW_API dw_status dw_set_threads(int threads);
/* Until it is set: the environment's DEEPWELL_THREADS, else the CPUs that this process may use. */
DW_API int dw_get_threads(void);

#ifdef __cplusplus
}
#endif
#endif
