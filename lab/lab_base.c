#include "lab_base.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- failures ------------------------------------------------------------------------------ */

static char last_error[2048];

dw_status lab_fail(dw_status status, const char *format, ...) {
    char message[sizeof last_error]; /* an argument may be the old message */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    memcpy(last_error, message, sizeof message);
    return status;
}

dw_status lab_fail_prefix(dw_status status, const char *format, ...) {
    char prefix[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(prefix, sizeof prefix, format, arguments);
    va_end(arguments);
    return lab_fail(status, "%s: %s", prefix, last_error);
}

dw_status lab_fail_memory(const char *what, size_t bytes) {
    return lab_fail(DW_OUT_OF_MEMORY, "%zu bytes for %s could not be allocated", bytes, what);
}

dw_status lab_fail_library(dw_status status) { return lab_fail(status, "%s", dw_last_error()); }
const char *lab_error(void) { return last_error; }

/* ---- memory -------------------------------------------------------------------------------- */

static int64_t allowed = -1, live;

static bool may_allocate(void) {
    if (allowed == 0) return false;
    if (allowed > 0) allowed--;
    return true;
}
void lab_memory_fail_after(int64_t count) { allowed = count; }
int64_t lab_memory_live(void) { return live; }

void *lab_calloc(size_t count, size_t bytes) {
    void *made = may_allocate() ? calloc(count ? count : 1, bytes ? bytes : 1) : NULL;
    live += made != NULL;
    return made;
}
void *lab_malloc(size_t bytes) { return lab_calloc(1, bytes); }
void *lab_realloc(void *pointer, size_t bytes) {
    if (!pointer) return lab_malloc(bytes);
    return may_allocate() ? realloc(pointer, bytes ? bytes : 1) : NULL;
}
void lab_free(void *pointer) {
    live -= pointer != NULL;
    free(pointer);
}

dw_status lab_grow(void **items, size_t *capacity, size_t needed, size_t item_bytes) {
    if (needed <= *capacity) return DW_OK;
    size_t wanted = 2 * *capacity;
    if (wanted < 8) wanted = 8;
    if (wanted < needed) wanted = needed;
    void *moved =
        wanted > SIZE_MAX / 2 / item_bytes ? NULL : lab_realloc(*items, wanted * item_bytes);
    if (!moved) return lab_fail_memory("a growing array", needed);
    *items = moved;
    *capacity = wanted;
    return DW_OK;
}

/* A chain of blocks, the newest first; small blocks share one. */
typedef struct chunk {
    struct chunk *next;
    size_t used, capacity;
    _Alignas(16) unsigned char bytes[];
} chunk;
struct lab_arena {
    chunk *newest;
};

lab_arena *lab_arena_create(void) { return lab_calloc(1, sizeof(lab_arena)); }

void lab_arena_destroy(lab_arena *arena) {
    while (arena && arena->newest) {
        chunk *next = arena->newest->next;
        lab_free(arena->newest);
        arena->newest = next;
    }
    lab_free(arena);
}

void *lab_arena_alloc(lab_arena *arena, size_t bytes) {
    enum { CHUNK = 1 << 16 };
    if (bytes > SIZE_MAX / 2) return NULL;
    const size_t padded = (bytes + 15) / 16 * 16;
    if (!arena->newest || arena->newest->capacity - arena->newest->used < padded) {
        const size_t capacity = padded > CHUNK ? padded : CHUNK;
        chunk *made = lab_calloc(1, sizeof *made + capacity);
        if (!made) return NULL;
        made->next = arena->newest;
        made->capacity = capacity;
        arena->newest = made;
    }
    void *block = arena->newest->bytes + arena->newest->used;
    arena->newest->used += padded;
    return block;
}

char *lab_arena_strdup(lab_arena *arena, const char *text) {
    return lab_arena_printf(arena, "%s", text);
}

char *lab_arena_printf(lab_arena *arena, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = length < 0 ? NULL : lab_arena_alloc(arena, (size_t)length + 1);
    if (text) vsnprintf(text, (size_t)length + 1, format, again);
    va_end(again);
    return text;
}

/* ---- texts and files ----------------------------------------------------------------------- */

dw_status lab_text_append(lab_text *out, const char *bytes, size_t count) {
    LAB_RETURN_IF_FAILED(lab_grow((void **)&out->text, &out->capacity, out->length + count + 1, 1));
    memcpy(out->text + out->length, bytes, count);
    out->length += count;
    out->text[out->length] = '\0';
    return DW_OK;
}

dw_status lab_text_printf(lab_text *out, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    const int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    dw_status status = lab_grow((void **)&out->text, &out->capacity,
                                out->length + (size_t)(length < 0 ? 0 : length) + 1, 1);
    if (status == DW_OK && length >= 0) {
        vsnprintf(out->text + out->length, (size_t)length + 1, format, again);
        out->length += (size_t)length;
    }
    va_end(again);
    return status;
}

void lab_text_free(lab_text *out) {
    lab_free(out->text);
    *out = (lab_text){0};
}

dw_status lab_file_read(const char *path, size_t most, char **bytes, size_t *count) {
    dw_status status = DW_OK;
    lab_text text = {0};
    char block[1 << 16];
    FILE *file = fopen(path, "rb");
    *bytes = NULL;
    if (!file) return lab_fail(DW_IO, "cannot open \"%s\": %s", path, strerror(errno));
    LAB_TRY(lab_text_append(&text, "", 0));
    for (size_t got; (got = fread(block, 1, sizeof block, file)) > 0;) {
        if (text.length + got > most) {
            status = lab_fail(DW_PARSE, "\"%s\" has more than %zu bytes", path, most);
            goto cleanup;
        }
        LAB_TRY(lab_text_append(&text, block, got));
    }
    if (ferror(file)) {
        status = lab_fail(DW_IO, "cannot read \"%s\": %s", path, strerror(errno));
        goto cleanup;
    }
    *bytes = text.text;
    *count = text.length;
    text = (lab_text){0};
cleanup:
    fclose(file);
    lab_text_free(&text);
    return status;
}
