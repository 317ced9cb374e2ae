/* Classifies how the values that load instructions read are used. Compilers copy structures word by word, including
 * padding that was never written. Reading such a word is an error only if the value is used for more than a copy.
 */
#ifndef DW_EMULATOR_LOAD_USES_H
#define DW_EMULATOR_LOAD_USES_H

#include "emulator/ptx.h"

/* Each value includes those before it. */
typedef enum dw__emu_use {
    DW__USE_COPIED,    /* stored to local memory, or to a generic address */
    DW__USE_PUBLISHED, /* stored where other threads see it */
    DW__USE_COMPUTED,
} dw__emu_use;

/* Returns one dw__emu_use for each instruction of the function, allocated in the arena; entries of instructions that
 * are not loads have no meaning. Returns NULL if memory is out. */
uint8_t *dw__emu_load_uses(const dw__ptx_function *function, dw__arena *arena);

#endif
