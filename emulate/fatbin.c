#include "fatbin.h"
#include <ctype.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONTAINER_MARK 0xBA55ED50u
#define WRAPPER_MARK 0x466243B1u
#define PTX_KIND 1
#define COMPRESSED 0xA000u /* flags: compressed by LZ4, by Zstandard */

typedef struct container {
    uint32_t mark;
    uint16_t version, header_bytes;
    uint64_t bytes; /* bytes after the header */
} container;
typedef struct wrapper {
    uint32_t mark, version;
    const void *data;
    void *more;
} wrapper;
typedef struct entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes; /* bytes of the image, with its padding */
    uint32_t packed_bytes, options;
    uint16_t minor, major; /* version of the PTX ISA */
    uint32_t architecture;
    uint32_t name, name_bytes;
    uint64_t flags;
} entry;

bool fatbin_is(const void *image) {
    uint32_t mark;
    memcpy(&mark, image, sizeof mark);
    return mark == CONTAINER_MARK || mark == WRAPPER_MARK;
}

int fatbin_rank(const char *target, int capability) {
    char *rest;
    if (strncmp(target, "sm_", 3) != 0) return 0;
    const long number = strtol(target + 3, &rest, 10);
    if (*rest == 'a') return number == capability ? 3000 : 0;
    if (*rest == 'f')
        return number / 10 == capability / 10 && number <= capability ? 2000 + (int)number : 0;
    return number <= capability ? (int)number : 0;
}

/* Copies the word after .target. */
static void target_of(const char *text, size_t bytes, char *target, size_t room) {
    static const char mark[] = ".target";
    *target = '\0';
    for (size_t at = 0; at + sizeof mark < bytes; at++) {
        if (memcmp(text + at, mark, sizeof mark - 1) != 0) continue;
        at += sizeof mark - 1;
        while (at < bytes && (text[at] == ' ' || text[at] == '\t')) at++;
        size_t length = 0;
        while (at + length < bytes && length + 1 < room &&
               (text[at + length] == '_' || isalnum((unsigned char)text[at + length])))
            length++;
        memcpy(target, text + at, length);
        target[length] = '\0';
        return;
    }
}

/* Returns the bytes from here to the end of the segment that the program or a library has loaded here; SIZE_MAX for
 * other memory. */
typedef struct loaded {
    uintptr_t at;
    size_t left;
} loaded;
static int find_loaded(struct dl_phdr_info *object, size_t bytes, void *context) {
    loaded *l = context;
    (void)bytes;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const uintptr_t first = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
        if (object->dlpi_phdr[i].p_type != PT_LOAD || l->at < first ||
            l->at - first >= object->dlpi_phdr[i].p_memsz)
            continue;
        l->left = object->dlpi_phdr[i].p_memsz - (l->at - first);
        return 1;
    }
    return 0;
}
static size_t loaded_from(const void *at) {
    loaded l = {(uintptr_t)at, SIZE_MAX};
    dl_iterate_phdr(find_loaded, &l);
    return l.left;
}

fatbin_result fatbin_find(const void *image, int capability, const char **text, size_t *bytes,
                          char *others, size_t others_bytes) {
    container head;
    fatbin_result result = FATBIN_NO_PTX;
    int best = 0;
    *text = NULL, *bytes = 0;
    *others = '\0';
    wrapper around;
    memcpy(&head.mark, image, sizeof head.mark);
    if (head.mark == WRAPPER_MARK) {
        memcpy(&around, image, sizeof around);
        image = around.data;
    }
    memcpy(&head, image, sizeof head);
    if (head.mark != CONTAINER_MARK || head.header_bytes < sizeof head) return FATBIN_BROKEN;
    /* A damaged file may contain any values. */
    const size_t room = loaded_from(image);
    if (head.header_bytes > room || head.bytes > room - head.header_bytes) return FATBIN_BROKEN;
    const unsigned char *at = (const unsigned char *)image + head.header_bytes;
    for (uint64_t left = head.bytes; left >= sizeof(entry);) {
        entry e;
        char target[32];
        memcpy(&e, at, sizeof e);
        if (e.header_bytes < sizeof e || e.header_bytes > left || e.bytes > left - e.header_bytes)
            return FATBIN_BROKEN;
        if (e.kind == PTX_KIND && (e.flags & COMPRESSED)) {
            if (result == FATBIN_NO_PTX) result = FATBIN_COMPRESSED;
        } else if (e.kind == PTX_KIND) {
            const char *here = (const char *)at + e.header_bytes;
            const size_t length = strnlen(here, e.bytes);
            target_of(here, length, target, sizeof target);
            const int rank = fatbin_rank(target, capability);
            const size_t used = strlen(others);
            snprintf(others + used, others_bytes - used, "%s%s", used ? ", " : "", target);
            if (rank > best) best = rank, *text = here, *bytes = length, result = FATBIN_FOUND;
            if (rank == 0 && result != FATBIN_FOUND) result = FATBIN_OTHER;
        }
        at += e.header_bytes + e.bytes;
        left -= e.header_bytes + e.bytes;
    }
    return result;
}
