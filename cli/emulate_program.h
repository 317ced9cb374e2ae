/* Checks that `deepwell emulate` makes before it runs a program. */
#ifndef DW_CLI_EMULATE_PROGRAM_H
#define DW_CLI_EMULATE_PROGRAM_H

#include <stddef.h>

/* Finds the folder of the emulated libcuda.so.1 and libcudart. Returns a cli_exit; prints a message on failure. */
int program_find_libraries(char *folder, size_t bytes);
/* Checks from the program's file whether it can be emulated. Prints one message if it links the CUDA runtime statically
 * or has no readable PTX. Scripts and programs that load their libraries at run time pass. Returns a cli_exit. */
int program_check(const char *name, const char *architecture);

#endif
