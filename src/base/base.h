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

/* Record a message for this thread and return `status`: `return dw__fail(DW_SHAPE, "...", ...)`.
 * A message names the thing, the value, what was expected, and the next step. It is one line of UTF-8: what
 * a file or a name brings into it besides (control characters, broken or cut sequences) becomes "?". */
dw_status dw__fail(dw_status status, const char *format, ...) DW_PRINTF(2, 3);
/* Put "prefix: " before the message already recorded; returns `status`. */
dw_status dw__fail_prefix(dw_status status, const char *format, ...) DW_PRINTF(2, 3);
/* Out of memory while making `what`, `bytes` long. */
dw_status dw__fail_memory(const char *what, size_t bytes);
/* DW_IO: `ACTION "PATH": reason; what to do`, from an errno. */
dw_status dw__fail_io(const char *action, const char *path, int error);
/* A failure is never DW_OK. Told to the compiler, which would else see paths where a function has failed,
 * its out-parameters are not set, and its caller goes on. */
static inline dw_status dw__not_ok(dw_status status) {
    if (status == DW_OK) __builtin_unreachable();
    return status;
}
#define dw__fail(...) dw__not_ok((dw__fail)(__VA_ARGS__))
#define dw__fail_prefix(...) dw__not_ok((dw__fail_prefix)(__VA_ARGS__))
#define dw__fail_memory(...) dw__not_ok((dw__fail_memory)(__VA_ARGS__))
#define dw__fail_io(...) dw__not_ok((dw__fail_io)(__VA_ARGS__))

/* Inside a function that has `dw_status status = DW_OK;` and a label `cleanup:` */
#define DW_TRY(call)                                                                               \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != DW_OK) goto cleanup;                                                         \
    } while (0)
/* Inside a function that owns nothing yet. */
#define DW_RETURN_IF_FAILED(call)                                                                  \
    do {                                                                                           \
        dw_status status_ = (call);                                                                \
        if (status_ != DW_OK) return status_;                                                      \
    } while (0)

/* ---- memory -------------------------------------------------------------------------------- */

/* All host memory of the library comes through these three, so that tests can make each
 * allocation fail in turn (dw__memory_fail_after, _once). NULL on failure; size 0 is valid. */
void *dw__malloc(size_t bytes);
void *dw__calloc(size_t count, size_t bytes);
void *dw__realloc(void *pointer, size_t bytes);
void dw__free(void *pointer);
/* Tests only: `count` more allocations succeed, every later one fails. Negative: no limit. */
void dw__memory_fail_after(int64_t count);
/* Tests only: the allocation after the next `count` fails, and it alone: what goes on as if it had not
 * failed is seen by its result. */
void dw__memory_fail_once(int64_t count);
/* How many allocations one of these two has made fail since it was called. */
int64_t dw__memory_failures(void);
/* Asked by what takes memory from the system itself (mapped blocks, a thread's stack): false when a test
 * makes it fail. */
bool dw__memory_allowed(void);
/* Number of live allocations made through dw__malloc and friends. */
int64_t dw__memory_live(void);

/* 64-byte aligned block for tensors; released with dw__free_aligned. */
void *dw__malloc_aligned(size_t bytes);
void dw__free_aligned(void *pointer);

/* Bump allocator: everything allocated from it is released at once. Redzones under ASan. */
typedef struct dw__arena dw__arena;
dw__arena *dw__arena_create(void);
void dw__arena_destroy(dw__arena *arena);
/* Zeroed, 16-byte aligned; NULL when memory is out. */
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

/* Length of the UTF-8 sequence at `text` (RFC 3629), 0 when malformed or a control character. `text` ends
 * with a NUL, which is a control character. */
int dw__utf8_length(const char *text);
/* Puts "?" for what is malformed or a control character, so that it may go to any terminal, log or language. */
void dw__make_plain(char *text);
/* Growing text buffer. `text` is NUL-terminated after any successful call. */
typedef struct dw__text {
    char *text;
    size_t length, capacity;
} dw__text;
dw_status dw__text_printf(dw__text *out, const char *format, ...) DW_PRINTF(2, 3);
dw_status dw__text_append(dw__text *out, const char *bytes, size_t count);
void dw__text_free(dw__text *out);

/* String to uint32 map, keys copied. */
typedef struct dw__map dw__map;
dw__map *dw__map_create(void);
void dw__map_destroy(dw__map *map);
bool dw__map_get(const dw__map *map, const char *key, uint32_t *value);
dw_status dw__map_set(dw__map *map, const char *key, uint32_t value);

/* ---- files --------------------------------------------------------------------------------- */

/* Whole file into a malloc'ed, NUL-terminated buffer (dw__free). DW_IO: path and reason. */
dw_status dw__file_read(const char *path, char **bytes, size_t *count);
/* The same of a regular file of at most `most` bytes (DW_PARSE if it has more). */
dw_status dw__file_read_at_most(const char *path, size_t most, char **bytes, size_t *count);
/* A regular file, opened for reading, and its size now. */
dw_status dw__file_open(const char *path, int *file, uint64_t *bytes);
/* All of an open file, at most `most` bytes (DW_PARSE if it has more), as dw__file_read gives it; and the counterpart.
 * `path` is for messages. */
dw_status dw__read_all(int file, const char *path, size_t most, char **bytes, size_t *count);
dw_status dw__write_all(int file, const char *path, const char *bytes, size_t count);
/* Written to a temporary beside it, fsynced, renamed over `path`, folder fsynced: readers see the
 * old file or the new one, whole. A device or a pipe is written in place. DW_IO as above. */
dw_status dw__file_write(const char *path, const void *bytes, size_t count);

/* The same for a file that is written in pieces. */
typedef struct dw__file_writer dw__file_writer;
dw_status dw__file_writer_create(const char *path, dw__file_writer **writer);
dw_status dw__file_writer_put(dw__file_writer *writer, const void *bytes, size_t count);
/* Synced and renamed; at most once, after which only destroy may follow. */
dw_status dw__file_writer_commit(dw__file_writer *writer);
void dw__file_writer_destroy(dw__file_writer *writer); /* uncommitted: `path` is what it was */

/* A folder that appears whole. begin makes an empty temporary beside `path`; what is written into it with the
 * functions above is on disk; commit syncs it and puts it in the place of `path`, which may exist (its files are then
 * removed). Where the file system can exchange two names (Linux's own can) `path` is the old folder or the new one at
 * every moment; elsewhere it is for an instant neither, and the old one is PATH.old. */
typedef struct dw__folder_writer {
    char *temporary;
    int lock; /* held on the temporary: nobody takes it for one that a killed process left; -1: none */
} dw__folder_writer;
dw_status dw__folder_begin(const char *path, dw__folder_writer *writer);
dw_status dw__folder_commit(dw__folder_writer *writer, const char *path);
/* After begin has succeeded. Uncommitted: the temporary is removed. */
void dw__folder_end(dw__folder_writer *writer);
/* Removes the temporaries of `path` that killed processes left, as begin does; what cannot be removed stays. */
void dw__folder_remove_stale(const char *path);
/* With all that is in it; links are removed, not followed. Absent is no failure. */
dw_status dw__folder_remove(const char *path);
/* Makes the folders above the file `path` that are not there. `path` is as it was afterwards. */
dw_status dw__folder_make_above(char *path);
/* A folder's list of names is on disk: of a folder, and of the folder that holds `path`. */
dw_status dw__folder_sync(const char *folder);
dw_status dw__folder_sync_of(const char *path);

/* A folder that only this process's user can write, for files that are trusted: caches. open: the folder `part` in the
 * folder `path`, both made with mode 0700 if `create`. DW_NOT_FOUND: not there, and not to be made. DW_IO: one of them
 * belongs to somebody else, or the mode lets others write; the message says so. */
typedef struct dw__private {
    int file; /* -1: closed */
    char path[4096];
} dw__private;
dw_status dw__private_open(const char *path, const char *part, bool create, dw__private *folder);
void dw__private_close(dw__private *folder); /* also after a failed open */
/* As dw__file_read_at_most, of the file `name` in the folder. DW_NOT_FOUND: it does not exist. DW_IO also where it is a
 * link, no regular file, or one that others own or can write. */
dw_status dw__private_read(const dw__private *folder, const char *name, size_t most, char **bytes,
                           size_t *count);
/* As dw__file_write; what stood under `name` is replaced and never followed. */
dw_status dw__private_write(const dw__private *folder, const char *name, const void *bytes,
                            size_t count);
void dw__private_remove(const dw__private *folder, const char *name);
/* Waits for the lock that the file `name` stands for; close(*lock) releases it. */
dw_status dw__private_lock(const dw__private *folder, const char *name, int *lock);

/* ---- log ----------------------------------------------------------------------------------- */

typedef enum dw__log_level { DW_LOG_DEBUG, DW_LOG_INFO, DW_LOG_WARNING } dw__log_level;
/* Goes to the sink set with dw_log_set_sink (deepwell/log.h); nowhere when there is none. */
void dw__log(dw__log_level level, const char *format, ...) DW_PRINTF(2, 3);

/* ---- time ---------------------------------------------------------------------------------- */

double dw__seconds(void);     /* CLOCK_MONOTONIC */
double dw__cpu_seconds(void); /* CLOCK_PROCESS_CPUTIME_ID: of all threads */

#endif
