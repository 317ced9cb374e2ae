/* What `deepwell emulate` asks of a program before it runs it. */
#ifndef DW_CLI_EMULATE_PROGRAM_H
#define DW_CLI_EMULATE_PROGRAM_H

#include <stddef.h>

/* The folder of the emulated libcuda.so.1 and libcudart. A cli_exit, with a message. */
int program_find_libraries(char *folder, size_t bytes);
/* Whether the program can be emulated, as far as its file tells: one message where it links the runtime statically
 * or has no PTX that can be read. Scripts and programs that load what they need pass. A cli_exit. */
int program_check(const char *name, const char *architecture);

#endif
