/* XXH3 (64 bits) of files, by xxHash. It detects a changed or damaged file. */
#ifndef DW_FILE_HASH_H
#define DW_FILE_HASH_H

#include "base/base.h"

enum { DW_HASH_BLOCK = 1 << 16 };

typedef struct dw__hasher dw__hasher;
dw__hasher *dw__hasher_create(void); /* NULL if memory is exhausted */
void dw__hasher_update(dw__hasher *hasher, const void *bytes, size_t count);
uint64_t dw__hasher_value(const dw__hasher *hasher);
void dw__hasher_destroy(dw__hasher *hasher);

/* Reads `count` bytes at `offset`. DW_IO also if the file ends before. */
dw_status dw__read_at(int file, const char *path, uint64_t offset, void *to, size_t count);
/* Computes size and hash of a whole file. */
dw_status dw__file_hash(const char *path, uint64_t *bytes, uint64_t *hash);

#endif
