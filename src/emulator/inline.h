/* Calls: the bodies of called functions put where they are called, before anything is translated. */
#ifndef DW_EMULATOR_INLINE_H
#define DW_EMULATOR_INLINE_H

#include "emulator/ptx.h"

/* The kernel's registers, variables and code with those of every function that it calls, of the module's arena; the
 * kernel itself where it calls none. Calls of vprintf and the like stay: they are the system's. DW_UNSUPPORTED:
 * recursion, calls through an address, of what is defined elsewhere; DW_PARSE: a call that does not fit its
 * function. */
dw_status dw__emu_inline(const dw__ptx_module *module, const dw__ptx_function *kernel,
                         const dw__ptx_function **made);

#endif
