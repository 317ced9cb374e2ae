/* Bump allocator over a chain of chunks.
 *
 *     chunk:  [ header | block | block | block | ... free ... ]      chunks double, 4 KiB to 1 MiB
 *
 * Chunks arrive zeroed and no byte is returned twice, so blocks need no clearing. Under
 * AddressSanitizer the free part and a redzone after each block are poisoned.
 */
#include "base/base.h"
#include <stdio.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_ASAN 1
#endif
#endif

#ifdef HAVE_ASAN
#include <sanitizer/asan_interface.h>
enum { REDZONE_BYTES = 16 };
#define POISON(address, bytes) ASAN_POISON_MEMORY_REGION(address, bytes)
#define UNPOISON(address, bytes) ASAN_UNPOISON_MEMORY_REGION(address, bytes)
#else
enum { REDZONE_BYTES = 0 };
#define POISON(address, bytes) ((void)(address), (void)(bytes))
#define UNPOISON(address, bytes) ((void)(address), (void)(bytes))
#endif

enum { ALIGNMENT = 16, FIRST_CHUNK = 4096, LARGEST_CHUNK = 1 << 20 };

typedef struct chunk {
    _Alignas(ALIGNMENT) struct chunk *next;
    size_t used, capacity; /* bytes of data[] */
    _Alignas(ALIGNMENT) unsigned char data[];
} chunk;

struct dw__arena {
    chunk *newest;
};

dw__arena *dw__arena_create(void) { return dw__calloc(1, sizeof(dw__arena)); }

void dw__arena_destroy(dw__arena *arena) {
    if (!arena) return;
    chunk *next = NULL;
    for (chunk *at = arena->newest; at; at = next) {
        next = at->next;
        UNPOISON(at->data, at->capacity);
        dw__free(at);
    }
    dw__free(arena);
}

static chunk *add_chunk(dw__arena *arena, size_t least) {
    size_t capacity = arena->newest ? 2 * arena->newest->capacity : FIRST_CHUNK;
    if (capacity > LARGEST_CHUNK) capacity = LARGEST_CHUNK;
    if (capacity < least) capacity = least;
    chunk *fresh = dw__calloc(1, sizeof *fresh + capacity);
    if (!fresh) return NULL;
    fresh->next = arena->newest;
    fresh->capacity = capacity;
    arena->newest = fresh;
    POISON(fresh->data, capacity);
    return fresh;
}

void *dw__arena_alloc(dw__arena *arena, size_t bytes) {
    if (bytes > SIZE_MAX / 2) return NULL;
    size_t padded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + REDZONE_BYTES;
    if (padded == 0) padded = ALIGNMENT; /* distinct blocks have distinct addresses */
    chunk *at = arena->newest;
    if (!at || padded > at->capacity - at->used) at = add_chunk(arena, padded);
    if (!at) return NULL;
    void *block = at->data + at->used;
    at->used += padded;
    UNPOISON(block, bytes);
    return block;
}

char *dw__arena_strdup(dw__arena *arena, const char *text) {
    size_t bytes = strlen(text) + 1;
    char *copy = dw__arena_alloc(arena, bytes);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

char *dw__arena_printf(dw__arena *arena, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = length < 0 ? NULL : dw__arena_alloc(arena, (size_t)length + 1);
    if (text) vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}
