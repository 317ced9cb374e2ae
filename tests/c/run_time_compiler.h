/* For tests of kernels that are compiled when they are first used. TEST_NVRTC: the compiler that the build found. */
#ifndef RUN_TIME_COMPILER_H
#define RUN_TIME_COMPILER_H

#include "deepwell/jit.h"
#include "emulated_call.h"
#include <stdlib.h>

static inline int find_compiler(void **state) {
    (void)state;
#ifdef TEST_NVRTC
    setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    setenv("DEEPWELL_FIRST_USE_CHECK", "off",
           1); /* except in children: the tests compare themselves */
    return 0;
}
static inline void need_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) != DW_OK) skip();
}

#endif
