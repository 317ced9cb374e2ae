/* Runs tasks in the default floating-point mode. */
#include "number/number_run.h"
#include <fenv.h>

typedef struct wrapped {
    dw__task task;
    void *context;
} wrapped;

static void run_in_default_mode(void *context, int64_t index, int worker) {
    const wrapped *inner = context;
    fenv_t before;
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    inner->task(inner->context, index, worker);
    fesetenv(&before);
}

void dw__number_run(int64_t count, dw__task task, void *context) {
    wrapped inner = {task, context};
    dw__pool_run(count, run_in_default_mode, &inner);
}
