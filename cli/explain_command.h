/* Declarations shared by the operations of `deepwell explain`. */
#ifndef DW_CLI_EXPLAIN_H
#define DW_CLI_EXPLAIN_H

#include <stdint.h>

int explain_gemm(int argc, char **argv);
int explain_kernels(int argc, char **argv);

/* Returns 0 if `text` is not an int32_t. */
int explain_read_integer(const char *text, int32_t *value);
/* Prints an explanation, as JSON or in words, and releases it. */
void explain_show(char *json, int as_json);

#endif
