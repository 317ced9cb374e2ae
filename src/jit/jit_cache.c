/* Compiled kernels on disk.
 *
 * An entry is a file named by its key: a header, then the image. It appears whole (dw__file_write), so that processes
 * that compile the same kernel at once replace each other's entry with an equal one. What does not hold what its
 * header says is removed and made again, never loaded. A folder that cannot be written only costs time.
 */
#define XXH_INLINE_ALL
#include "jit/jit.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* Little-endian machines only, as the GPUs' hosts are. */
typedef struct entry_header {
    char magic[8];
    unsigned char key[16], checksum[16]; /* checksum: of the image */
    uint64_t image_bytes;
} entry_header;

static const char magic[8] = "DWJIT 1";
enum { MOST_BYTES = 1 << 28 };

static void digest(XXH128_hash_t hash, unsigned char *bytes) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    memcpy(bytes, canonical.digest, sizeof canonical.digest);
}

dw_status dw__jit_key_of(const dw__jit_variant *variant, const dw__text *expanded,
                         const char *compiler, dw__jit_key *key) {
    dw__text text = {0};
    dw_status status = DW_OK;
    DW_TRY(dw__jit_variant_name(variant, &text));
    DW_TRY(dw__text_printf(&text, "\n%s\n%s\n", compiler, magic));
    DW_TRY(dw__text_append(&text, expanded->text, expanded->length));
    digest(XXH3_128bits(text.text, text.length), key->bytes);

cleanup:
    dw__text_free(&text);
    return status;
}

/* ---- where ------------------------------------------------------------------------------------- */

dw_status dw__jit_cache_folder(dw__text *folder) {
    const char *named = getenv("DEEPWELL_CACHE"), *xdg = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (named && *named) return dw__text_printf(folder, "%s", named);
    /* The XDG specification has relative paths ignored. */
    if (xdg && *xdg == '/') return dw__text_printf(folder, "%s/deepwell", xdg);
    if (home && *home == '/') return dw__text_printf(folder, "%s/.cache/deepwell", home);
    return dw__fail(DW_NOT_FOUND, "there is no folder for compiled kernels: set DEEPWELL_CACHE");
}

static dw_status entry_path(const dw__jit_key *key, dw__text *path) {
    DW_RETURN_IF_FAILED(dw__jit_cache_folder(path));
    DW_RETURN_IF_FAILED(dw__text_printf(path, "/kernels/"));
    for (size_t i = 0; i < sizeof key->bytes; i++)
        DW_RETURN_IF_FAILED(dw__text_printf(path, "%02x", key->bytes[i]));
    return dw__text_printf(path, ".cubin");
}

/* ---- entries ----------------------------------------------------------------------------------- */

static bool is_sound(const dw__jit_key *key, const char *bytes, size_t count) {
    entry_header header;
    unsigned char checksum[16];
    if (count < sizeof header) return false;
    memcpy(&header, bytes, sizeof header);
    if (memcmp(header.magic, magic, sizeof magic) != 0) return false;
    if (memcmp(header.key, key->bytes, sizeof header.key) != 0) return false;
    if (header.image_bytes == 0 || header.image_bytes != count - sizeof header) return false;
    digest(XXH3_128bits(bytes + sizeof header, count - sizeof header), checksum);
    return memcmp(header.checksum, checksum, sizeof checksum) == 0;
}

dw_status dw__jit_cache_read(const dw__jit_key *key, void **image, size_t *bytes) {
    dw_status status = DW_OK;
    dw__text path = {0};
    char *entry = NULL;
    size_t count = 0;
    DW_TRY(entry_path(key, &path));
    if (access(path.text, F_OK) != 0)
        DW_TRY(dw__fail(DW_NOT_FOUND, "\"%s\" is not there", path.text));
    status = dw__file_read_at_most(path.text, MOST_BYTES, &entry, &count);
    if (status == DW_OUT_OF_MEMORY) goto cleanup;
    if (status != DW_OK || !is_sound(key, entry, count)) {
        unlink(path.text);
        atomic_fetch_add(&dw__jit_statistics_now.corrupt, 1);
        DW_TRY(dw__fail(DW_NOT_FOUND, "\"%s\" was damaged and has been removed", path.text));
    }
    *bytes = count - sizeof(entry_header);
    memmove(entry, entry + sizeof(entry_header), *bytes);
    *image = entry;
    entry = NULL;

cleanup:
    dw__free(entry);
    dw__text_free(&path);
    return status;
}

dw_status dw__jit_cache_write(const dw__jit_key *key, const void *image, size_t bytes) {
    dw_status status = DW_OK;
    dw__text path = {0};
    entry_header header = {.image_bytes = bytes};
    dw__file_writer *writer = NULL;
    memcpy(header.magic, magic, sizeof magic);
    memcpy(header.key, key->bytes, sizeof header.key);
    digest(XXH3_128bits(image, bytes), header.checksum);
    DW_TRY(entry_path(key, &path));
    DW_TRY(dw__folder_make_above(path.text));
    DW_TRY(dw__file_writer_create(path.text, &writer));
    DW_TRY(dw__file_writer_put(writer, &header, sizeof header));
    DW_TRY(dw__file_writer_put(writer, image, bytes));
    DW_TRY(dw__file_writer_commit(writer));

cleanup:
    dw__file_writer_destroy(writer);
    dw__text_free(&path);
    return status;
}
