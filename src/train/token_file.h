/* Layout of token files, read from their first bytes. */
#ifndef DW_TOKEN_FILE_H
#define DW_TOKEN_FILE_H

#include "base/base.h"

typedef enum dw__token_store {
    DW_TOKEN_STORE_U16,
    DW_TOKEN_STORE_U32,
    DW_TOKEN_STORE_I32,
    DW_TOKEN_STORE_I64
} dw__token_store;
size_t dw__token_store_bytes(dw__token_store store);

typedef struct dw__token_layout {
    dw__token_store store;
    uint64_t offset; /* byte offset of the first token */
    int64_t count;   /* number of tokens */
} dw__token_layout;

enum { DW_TOKEN_HEAD_BYTES = 64 * 1024 }; /* enough bytes to determine the layout of any file */

/* Returns DW_UNSUPPORTED, with how to make tokens from text, unless the name ends in .bin or .npy. */
dw_status dw__token_check_name(const char *path);
/* Reads the layout from `head`, the first DW_TOKEN_HEAD_BYTES bytes of the file, or all bytes if there are
 * fewer. The name decides: *.npy is NumPy's format; *.bin is llm.c's format if it has its header, else plain
 * tokens of type `raw`. DW_PARSE names what is malformed. */
dw_status dw__token_layout_of(const char *path, const void *head, size_t head_bytes,
                              uint64_t file_bytes, dw__token_store raw, dw__token_layout *layout);
/* NumPy's format, versions 1 to 3: uint16, uint32, int32 or int64, little-endian, one dimension
 * (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). */
dw_status dw__npy_layout(const char *path, const void *head, size_t head_bytes, uint64_t file_bytes,
                         dw__token_layout *layout);

/* Widens `count` stored tokens to int64. */
void dw__token_widen(dw__token_store store, const void *stored, int64_t count, int64_t *tokens);

#endif
