/* Base layer: failure messages, arenas, growing arrays, files, log. Calls nothing above it. */
#ifndef DW_BASE_H
#define DW_BASE_H

#include "deepwell/status.h"
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DW_PRINTF(text, first) __attribute__((format(printf, text, first)))
#define DW_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- failure ------------------------------------------------------------------------------- */

/* Records a message for this thread and returns `status`: `return dw__fail(DW_SHAPE, "...", ...)`. A message
 * names the thing, the value, what was expected, and the next step. It is one line of UTF-8: control
 * characters and malformed or truncated sequences in the arguments become "?". */
dw_status dw__fail(dw_status status, const char *format, ...) DW_PRINTF(2, 3);
/* The same for a message of three parts that need no formatting, in code that often fails and goes on. */
dw_status dw__fail_join(dw_status status, const char *first, const char *second, const char *third);
/* Puts "prefix: " before the message already recorded. Returns `status`. */
dw_status dw__fail_prefix(dw_status status, const char *format, ...) DW_PRINTF(2, 3);
/* Records that `bytes` bytes for `what` could not be allocated. Returns DW_OUT_OF_MEMORY. */
dw_status dw__fail_memory(const char *what, size_t bytes);
/* Records DW_IO from an errno: `ACTION "PATH": reason; next step`. */
dw_status dw__fail_io(const char *action, const char *path, int error);
/* Tells the compiler that a failure is never DW_OK. Without this the compiler assumes that a failed function
 * may return DW_OK, and warns that its out-parameters are used unset. */
static inline dw_status dw__not_ok(dw_status status) {
    if (status == DW_OK) __builtin_unreachable();
    return status;
}
#define dw__fail(...) dw__not_ok((dw__fail)(__VA_ARGS__))
#define dw__fail_join(...) dw__not_ok((dw__fail_join)(__VA_ARGS__))
#define dw__fail_prefix(...) dw__not_ok((dw__fail_prefix)(__VA_ARGS__))
#define dw__fail_memory(...) dw__not_ok((dw__fail_memory)(__VA_ARGS__))
#define dw__fail_io(...) dw__not_ok((dw__fail_io)(__VA_ARGS__))

/* Use inside a function that has `dw_status status = DW_OK;` and a label `cleanup:`. */
#define DW_TRY(call)                                                                               \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != DW_OK) goto cleanup;                                                         \
    } while (0)
/* Use inside a function that owns nothing yet. */
#define DW_RETURN_IF_FAILED(call)                                                                  \
    do {                                                                                           \
        dw_status status_ = (call);                                                                \
        if (status_ != DW_OK) return status_;                                                      \
    } while (0)

/* ---- structures of callers ------------------------------------------------------------------- */

/* A public structure of options or of a call. Its first member is `size_t struct_size`. */
typedef struct dw__struct {
    const char *name; /* "dw_gemm" */
    size_t bytes;
    /* Sizes that it had in earlier versions and that are still accepted; 0: none. Members are only ever appended. */
    size_t older[4];
} dw__struct;
/* Copies the caller's structure to `copy`, with zeros for members that an older one lacks. `copy` may be NULL if there
 * are no older sizes. DW_INVALID_ARGUMENT: `given` is NULL, or its struct_size is none of these. */
dw_status dw__struct_read(const dw__struct *known, const void *given, void *copy);

/* ---- memory -------------------------------------------------------------------------------- */

/* All host memory of the library comes from these three functions, so that tests can make each allocation
 * fail in turn (dw__memory_fail_after, _once). They return NULL on failure. Size 0 is valid. */
void *dw__malloc(size_t bytes);
void *dw__calloc(size_t count, size_t bytes);
void *dw__realloc(void *pointer, size_t bytes);
void dw__free(void *pointer);
/* Tests only: the next `count` allocations succeed and every later one fails. A negative count lifts the limit. */
void dw__memory_fail_after(int64_t count);
/* Tests only: the next `count` allocations succeed, the one after them fails, and later ones succeed again.
 * A caller that ignores the failure shows it by a wrong result. */
void dw__memory_fail_once(int64_t count);
/* Number of allocations that one of these two functions has made fail since it was called. */
int64_t dw__memory_failures(void);
/* For code that takes memory from the system directly (mapped blocks, a thread's stack): returns false if a
 * test makes this allocation fail. */
bool dw__memory_allowed(void);
/* Number of live allocations made through dw__malloc and friends. */
int64_t dw__memory_live(void);

/* A 64-byte aligned block for tensors. Release it with dw__free_aligned. */
void *dw__malloc_aligned(size_t bytes);
void dw__free_aligned(void *pointer);

/* Bump allocator: everything allocated from it is released at once. It has redzones under ASan. */
typedef struct dw__arena dw__arena;
dw__arena *dw__arena_create(void);
void dw__arena_destroy(dw__arena *arena);
/* The block is zeroed and 16-byte aligned. Returns NULL if memory is exhausted. */
void *dw__arena_alloc(dw__arena *arena, size_t bytes);
char *dw__arena_strdup(dw__arena *arena, const char *text);
char *dw__arena_printf(dw__arena *arena, const char *format, ...) DW_PRINTF(2, 3);

/* Growing array: declare `struct { T *items; size_t count, capacity; } list = {0};` */
dw_status dw__grow(void **items, size_t *capacity, size_t needed, size_t item_bytes);
#define DW_PUSH(list, item)                                                                        \
    (dw__grow((void **)&(list)->items, &(list)->capacity, (list)->count + 1,                       \
              sizeof *(list)->items) == DW_OK                                                      \
         ? ((list)->items[(list)->count++] = (item), DW_OK)                                        \
         : DW_OUT_OF_MEMORY)

/* Length of the UTF-8 sequence at `text` (RFC 3629); 0 if it is malformed or a control character. `text` ends
 * with a NUL, which is a control character. */
int dw__utf8_length(const char *text);
/* Replaces malformed sequences and control characters by "?". The text is then safe for any terminal, log or
 * language. */
void dw__make_plain(char *text);
/* Growing text buffer. `text` is NUL-terminated after any successful call. */
typedef struct dw__text {
    char *text;
    size_t length, capacity;
} dw__text;
dw_status dw__text_printf(dw__text *out, const char *format, ...) DW_PRINTF(2, 3);
dw_status dw__text_append(dw__text *out, const char *bytes, size_t count);
void dw__text_free(dw__text *out);

/* Map from strings to uint32. It copies its keys. */
typedef struct dw__map dw__map;
dw__map *dw__map_create(void);
void dw__map_destroy(dw__map *map);
bool dw__map_get(const dw__map *map, const char *key, uint32_t *value);
dw_status dw__map_set(dw__map *map, const char *key, uint32_t value);

/* ---- files --------------------------------------------------------------------------------- */

/* Reads a whole file into a NUL-terminated buffer (release with dw__free). DW_IO names the path and the reason. */
dw_status dw__file_read(const char *path, char **bytes, size_t *count);
/* As dw__file_read, for a regular file of at most `most` bytes. Returns DW_PARSE if it has more. */
dw_status dw__file_read_at_most(const char *path, size_t most, char **bytes, size_t *count);
/* Opens a regular file for reading and returns its current size. */
dw_status dw__file_open(const char *path, int *file, uint64_t *bytes);
/* dw__read_all reads an open file like dw__file_read, up to `most` bytes (DW_PARSE if it has more).
 * dw__write_all writes all bytes. `path` is for messages. */
dw_status dw__read_all(int file, const char *path, size_t most, char **bytes, size_t *count);
dw_status dw__write_all(int file, const char *path, const char *bytes, size_t count);
/* Writes a temporary beside `path`, syncs it, renames it over `path` and syncs the folder. Readers see the
 * old file or the new one, whole. A device or a pipe is written in place. DW_IO names the path and the
 * reason. */
dw_status dw__file_write(const char *path, const void *bytes, size_t count);

/* As dw__file_write, for a file that is written in pieces. */
typedef struct dw__file_writer dw__file_writer;
dw_status dw__file_writer_create(const char *path, dw__file_writer **writer);
dw_status dw__file_writer_put(dw__file_writer *writer, const void *bytes, size_t count);
/* Syncs and renames. Call it at most once; afterwards only destroy may follow. */
dw_status dw__file_writer_commit(dw__file_writer *writer);
void dw__file_writer_destroy(dw__file_writer *writer); /* without a commit `path` is unchanged */

/* A folder that appears whole. begin makes an empty temporary beside `path`. Files written into it with the
 * functions above are synced. commit syncs the folder and puts it in the place of `path`, which may exist;
 * its old files are then removed. If the file system can exchange two names (Linux's own can), `path` is the
 * old folder or the new one at every moment. Otherwise `path` is absent for an instant, and the old folder is
 * PATH.old. */
typedef struct dw__folder_writer {
    char *temporary;
    int lock; /* lock on the temporary, so that no other process removes it as stale; -1: none */
} dw__folder_writer;
dw_status dw__folder_begin(const char *path, dw__folder_writer *writer);
dw_status dw__folder_commit(dw__folder_writer *writer, const char *path);
/* Call it after begin has succeeded. Removes the temporary if there was no commit. */
void dw__folder_end(dw__folder_writer *writer);
/* Removes the temporaries of `path` that killed processes left, as begin does. Ignores what it cannot remove. */
void dw__folder_remove_stale(const char *path);
/* Removes a folder and its contents. Links are removed, not followed. An absent folder is no failure. */
dw_status dw__folder_remove(const char *path);
/* Makes the missing folders above the file `path`. `path` is modified during the call and restored. */
dw_status dw__folder_make_above(char *path);
/* Sync a folder's list of names: of the folder `folder`, and of the folder that holds `path`. */
dw_status dw__folder_sync(const char *folder);
dw_status dw__folder_sync_of(const char *path);

/* A folder that only this process's user can write, for trusted files: caches. open opens the folder `part`
 * in the folder `path`, and makes both with mode 0700 if `create` is set. DW_NOT_FOUND: it does not exist and
 * `create` is not set. DW_IO: one of them belongs to another user, or others may write to it; the message
 * says which. */
typedef struct dw__private {
    int file; /* -1: closed */
    char path[4096];
} dw__private;
dw_status dw__private_open(const char *path, const char *part, bool create, dw__private *folder);
void dw__private_close(dw__private *folder); /* safe after a failed open */
/* As dw__file_read_at_most for the file `name` in the folder. DW_NOT_FOUND: it does not exist. DW_IO also if
 * it is a link, not a regular file, or a file that other users own or can write. */
dw_status dw__private_read(const dw__private *folder, const char *name, size_t most, char **bytes,
                           size_t *count);
/* As dw__file_write. Replaces whatever has that name and never follows a link. */
dw_status dw__private_write(const dw__private *folder, const char *name, const void *bytes,
                            size_t count);
void dw__private_remove(const dw__private *folder, const char *name);
/* Waits for the lock of the file `name`. close(*lock) releases it. */
dw_status dw__private_lock(const dw__private *folder, const char *name, int *lock);

/* ---- log ----------------------------------------------------------------------------------- */

typedef enum dw__log_level { DW_LOG_DEBUG, DW_LOG_INFO, DW_LOG_WARNING } dw__log_level;
/* Sends a line to the sink of dw_log_set_sink (deepwell/log.h), if there is one. */
void dw__log(dw__log_level level, const char *format, ...) DW_PRINTF(2, 3);

/* ---- time ---------------------------------------------------------------------------------- */

double dw__seconds(void);     /* CLOCK_MONOTONIC */
double dw__cpu_seconds(void); /* CLOCK_PROCESS_CPUTIME_ID: all threads */

#endif
