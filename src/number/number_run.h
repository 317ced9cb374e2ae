/* Runs tasks of number formats on the thread pool in the default floating-point mode. The calling thread's
 * mode may flush subnormals or round upwards, which would change bits. */
#ifndef DW_RUN_H
#define DW_RUN_H

#include "base/pool.h"

void dw__number_run(int64_t count, dw__task task, void *context);

#endif
