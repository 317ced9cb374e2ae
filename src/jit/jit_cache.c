/* Compiled kernels on disk.
 *
 * An entry is a file named by its key: a header, then the image. It appears whole (dw__private_write), so that
 * processes that compile the same kernel at once replace each other's entry with an equal one. An entry that
 * contradicts its header is removed and compiled again, and never loaded. If the folder cannot be written, kernels are
 * compiled each time. A folder that others can write to is not used, because they could write entries with valid
 * checksums.
 */
#define XXH_INLINE_ALL
#include "jit/jit_internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* GPUs' hosts are little-endian, so this reads headers on little-endian machines only. */
typedef struct entry_header {
    char magic[8];
    unsigned char key[16], checksum[16]; /* checksum of the image */
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

dw__jit_digest dw__jit_digest_of(const char *text) {
    unsigned char bytes[16];
    dw__jit_digest made;
    digest(XXH3_128bits(text, strlen(text)), bytes);
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(made.text + 2 * i, 3, "%02x", bytes[i]);
    return made;
}

/* ---- the folder ---------------------------------------------------------------------------------- */

dw_status dw__jit_cache_folder(dw__text *folder) {
    const char *named = getenv("DEEPWELL_CACHE"), *xdg = getenv("XDG_CACHE_HOME");
    const char *home = getenv("HOME");
    if (named && *named) return dw__text_printf(folder, "%s", named);
    /* The XDG specification tells programs to ignore relative paths. */
    if (xdg && *xdg == '/') return dw__text_printf(folder, "%s/deepwell", xdg);
    if (home && *home == '/') return dw__text_printf(folder, "%s/.cache/deepwell", home);
    return dw__fail(DW_NOT_FOUND, "there is no folder for compiled kernels: set DEEPWELL_CACHE");
}

dw_status dw__cache_open(const char *part, bool create, dw__private *folder) {
    dw__text path = {0};
    folder->file = -1;
    dw_status status = dw__jit_cache_folder(&path);
    if (status == DW_OK) status = dw__private_open(path.text, part, create, folder);
    dw__text_free(&path);
    return status;
}

typedef struct entry_name {
    char text[2 * sizeof(dw__jit_key) + sizeof ".cubin"];
} entry_name;

static entry_name name_of(const dw__jit_key *key) {
    entry_name name;
    for (size_t i = 0; i < sizeof key->bytes; i++)
        snprintf(name.text + 2 * i, sizeof name.text - 2 * i, "%02x", key->bytes[i]);
    memcpy(name.text + 2 * sizeof key->bytes, ".cubin", sizeof ".cubin");
    return name;
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
    dw__private folder;
    const entry_name name = name_of(key);
    char *entry = NULL;
    size_t count = 0;
    DW_TRY(dw__cache_open("kernels", false, &folder));
    status = dw__private_read(&folder, name.text, MOST_BYTES, &entry, &count);
    if (status == DW_OUT_OF_MEMORY || status == DW_NOT_FOUND) goto cleanup;
    if (status != DW_OK || !is_sound(key, entry, count)) {
        dw__private_remove(&folder, name.text);
        atomic_fetch_add(&dw__jit_statistics_now.corrupt, 1);
        DW_TRY(dw__fail(DW_NOT_FOUND, "\"%s/%s\" was damaged and has been removed", folder.path,
                        name.text));
    }
    *bytes = count - sizeof(entry_header);
    memmove(entry, entry + sizeof(entry_header), *bytes);
    *image = entry;
    entry = NULL;

cleanup:
    dw__free(entry);
    dw__private_close(&folder);
    return status;
}

dw_status dw__jit_cache_write(const dw__jit_key *key, const void *image, size_t bytes) {
    dw_status status = DW_OK;
    dw__private folder;
    entry_header header = {.image_bytes = bytes};
    char *entry = NULL;
    memcpy(header.magic, magic, sizeof magic);
    memcpy(header.key, key->bytes, sizeof header.key);
    digest(XXH3_128bits(image, bytes), header.checksum);
    DW_TRY(dw__cache_open("kernels", true, &folder));
    entry = dw__malloc(sizeof header + bytes);
    if (!entry) DW_TRY(dw__fail_memory("an entry of the cache", sizeof header + bytes));
    memcpy(entry, &header, sizeof header);
    memcpy(entry + sizeof header, image, bytes);
    DW_TRY(dw__private_write(&folder, name_of(key).text, entry, sizeof header + bytes));

cleanup:
    dw__free(entry);
    dw__private_close(&folder);
    return status;
}
