/* Failures, memory and texts for the lab's files. The lab uses only Deepwell's public headers, so it has small
 * counterparts of the library's internal helpers. */
#ifndef LAB_BASE_H
#define LAB_BASE_H

#include "deepwell/deepwell.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LAB_PRINTF(text, first) __attribute__((format(printf, text, first)))
#define LAB_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Records a message, which lab_error() returns until the next failure, and returns `status`. */
dw_status lab_fail(dw_status status, const char *format, ...) LAB_PRINTF(2, 3);
/* Puts "prefix: " before the message. */
dw_status lab_fail_prefix(dw_status status, const char *format, ...) LAB_PRINTF(2, 3);
dw_status lab_fail_memory(const char *what, size_t bytes);
/* Copies the message of a library call that failed. */
dw_status lab_fail_library(dw_status status);
const char *lab_error(void);

/* Use inside a function that has `dw_status status = DW_OK;` and a label `cleanup:`. */
#define LAB_TRY(call)                                                                              \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != DW_OK) goto cleanup;                                                         \
    } while (0)
#define LAB_RETURN_IF_FAILED(call)                                                                 \
    do {                                                                                           \
        const dw_status status_ = (call);                                                          \
        if (status_ != DW_OK) return status_;                                                      \
    } while (0)

/* These return NULL if memory is exhausted, or if a test makes the allocation fail. */
void *lab_malloc(size_t bytes);
void *lab_calloc(size_t count, size_t bytes);
void *lab_realloc(void *pointer, size_t bytes);
void lab_free(void *pointer);
/* Tests only: the next `count` allocations succeed, and every later one fails. A negative count lifts the limit. */
void lab_memory_fail_after(int64_t count);
/* Number of allocations that have not been freed. */
int64_t lab_memory_live(void);

/* Growing arrays: struct { T *items; size_t count, capacity; }. */
dw_status lab_grow(void **items, size_t *capacity, size_t needed, size_t item_bytes);
#define LAB_PUSH(list, item)                                                                       \
    (lab_grow((void **)&(list)->items, &(list)->capacity, (list)->count + 1,                       \
              sizeof *(list)->items) == DW_OK                                                      \
         ? ((list)->items[(list)->count++] = (item), DW_OK)                                        \
         : DW_OUT_OF_MEMORY)

/* Blocks that are freed together. Functions return NULL if memory is exhausted. */
typedef struct lab_arena lab_arena;
lab_arena *lab_arena_create(void);
void lab_arena_destroy(lab_arena *arena); /* NULL allowed */
void *lab_arena_alloc(lab_arena *arena, size_t bytes);
char *lab_arena_strdup(lab_arena *arena, const char *text);
char *lab_arena_printf(lab_arena *arena, const char *format, ...) LAB_PRINTF(2, 3);

/* A growing text, which ends with a NUL after any successful call. */
typedef struct lab_text {
    char *text;
    size_t length, capacity;
} lab_text;
dw_status lab_text_append(lab_text *out, const char *bytes, size_t count);
dw_status lab_text_printf(lab_text *out, const char *format, ...) LAB_PRINTF(2, 3);
void lab_text_free(lab_text *out);

/* Reads a file of at most `most` bytes and appends a NUL; release with lab_free. DW_IO names the reason. DW_PARSE: the
 * file is longer. */
dw_status lab_file_read(const char *path, size_t most, char **bytes, size_t *count);

#endif
