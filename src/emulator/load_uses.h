/* What becomes of the values that instructions load. Compilers copy structures word by word, with the padding that
 * nobody wrote; that is no mistake where the word is only put elsewhere.
 */
#ifndef DW_EMULATOR_LOAD_USES_H
#define DW_EMULATOR_LOAD_USES_H

#include "emulator/ptx.h"

/* Each includes those before it. */
typedef enum dw__emu_use {
    DW__USE_COPIED,    /* stored to local memory, or to a generic address */
    DW__USE_PUBLISHED, /* stored where other threads see it */
    DW__USE_COMPUTED,
} dw__emu_use;

/* One for each instruction of the function, of the arena; of what is no load they say nothing. NULL: no memory. */
uint8_t *dw__emu_load_uses(const dw__ptx_function *function, dw__arena *arena);

#endif
