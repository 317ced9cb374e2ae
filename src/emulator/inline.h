/* Inlines every call of a device function before a kernel is translated, so that the emulator needs no call stack.
 * The bargain: recursion and indirect calls are not supported.
 */
#ifndef DW_EMULATOR_INLINE_H
#define DW_EMULATOR_INLINE_H

#include "emulator/ptx.h"

/* Sets *made to a copy of the kernel, in the module's arena, that contains the registers, variables and code of every
 * function that it calls; to the kernel itself if it calls none. Calls of vprintf and other system functions remain.
 * Returns DW_UNSUPPORTED for recursion, indirect calls and calls of functions defined elsewhere, and DW_PARSE for a
 * call whose arguments do not match the function. */
dw_status dw__emu_inline(const dw__ptx_module *module, const dw__ptx_function *kernel,
                         const dw__ptx_function **made);

#endif
