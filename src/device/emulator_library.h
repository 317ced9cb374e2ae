/* The emulator's library, opened when the first emulated GPU is asked for. */
#ifndef DW_EMULATOR_LIBRARY_H
#define DW_EMULATOR_LIBRARY_H

#include "emulator/emulator_interface.h"

/* Opens the library, once. DW_UNSUPPORTED: there is none, or it is of another version; the message says how to get
 * it. */
dw_status dw__emulator_library(const dw__emulator_interface **functions);

#endif
