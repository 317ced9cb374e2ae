/* xxHash is compiled in from its header, so nothing is linked and nothing is exported. */
#define XXH_INLINE_ALL
#include "train/file_hash.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

/* XXH3's state requires 64-byte alignment. */
struct dw__hasher {
    XXH3_state_t state;
};

dw__hasher *dw__hasher_create(void) {
    dw__hasher *hasher = dw__malloc_aligned(sizeof *hasher);
    if (hasher) XXH3_64bits_reset(&hasher->state);
    return hasher;
}

void dw__hasher_update(dw__hasher *hasher, const void *bytes, size_t count) {
    XXH3_64bits_update(&hasher->state, bytes, count);
}

uint64_t dw__hasher_value(const dw__hasher *hasher) { return XXH3_64bits_digest(&hasher->state); }

void dw__hasher_destroy(dw__hasher *hasher) { dw__free_aligned(hasher); }

dw_status dw__read_at(int file, const char *path, uint64_t offset, void *to, size_t count) {
    char *at = to;
    while (count > 0) {
        ssize_t got = pread(file, at, count, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return dw__fail_io("cannot read", path, errno);
        if (got == 0)
            return dw__fail(
                DW_IO,
                "\"%s\" ends at byte %llu, before what is to be read; it was changed while in "
                "use",
                path, (unsigned long long)offset);
        at += got;
        offset += (uint64_t)got;
        count -= (size_t)got;
    }
    return DW_OK;
}

dw_status dw__file_hash(const char *path, uint64_t *bytes, uint64_t *hash) {
    dw_status status = DW_OK;
    char *block = NULL;
    dw__hasher *hasher = NULL;
    int file;
    DW_RETURN_IF_FAILED(dw__file_open(path, &file, bytes));
    block = dw__malloc(DW_HASH_BLOCK);
    hasher = dw__hasher_create();
    if (!block || !hasher) DW_TRY(dw__fail_memory("reading a file", DW_HASH_BLOCK));
    for (uint64_t at = 0; at < *bytes;) {
        size_t piece = *bytes - at < DW_HASH_BLOCK ? (size_t)(*bytes - at) : DW_HASH_BLOCK;
        DW_TRY(dw__read_at(file, path, at, block, piece));
        dw__hasher_update(hasher, block, piece);
        at += piece;
    }
    *hash = dw__hasher_value(hasher);
cleanup:
    dw__hasher_destroy(hasher);
    dw__free(block);
    close(file);
    return status;
}
