/* The base layer: failure messages, memory, arenas, text, maps, files, log. */
#include "base/base.h"
#include "deepwell/log.h"
#include "deepwell/version.h"
#include "test_folder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka requires the four headers above. */
#include <cmocka.h>

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- failure ------------------------------------------------------------------------------- */

static void status_names_and_texts(void **state) {
    (void)state;
    assert_string_equal(dw_status_name(DW_OK), "OK");
    assert_string_equal(dw_status_name(DW_INTERNAL), "INTERNAL");
    assert_string_equal(dw_status_text(DW_SHAPE), "shapes disagree");
    assert_string_equal(dw_status_name((dw_status)99), "UNKNOWN");
    assert_string_equal(dw_version(), DW_VERSION);
}

static void fail_records_message_and_prefix(void **state) {
    (void)state;
    assert_int_equal(dw__fail(DW_SHAPE, "rank is %d", 7), DW_SHAPE);
    assert_string_equal(dw_last_error(), "rank is 7");
    /* The old message may be an argument of the new one. */
    dw__fail(DW_SHAPE, "(%s)", dw_last_error());
    assert_string_equal(dw_last_error(), "(rank is 7)");
    assert_int_equal(dw__fail_prefix(DW_TYPE, "node %d", 3), DW_TYPE);
    assert_string_equal(dw_last_error(), "node 3: (rank is 7)");
}

static void fail_truncates_long_messages(void **state) {
    (void)state;
    enum { LENGTH = 10000 };
    char *text = malloc(LENGTH + 1);
    memset(text, 'a', LENGTH);
    text[LENGTH] = '\0';
    dw__fail(DW_PARSE, "%s", text);
    size_t kept = strlen(dw_last_error());
    assert_true(kept > 1000 && kept < LENGTH);
    dw__fail_prefix(DW_PARSE, "line %d", 1);
    assert_memory_equal(dw_last_error(), "line 1: aaa", 11);
    assert_int_equal(strlen(dw_last_error()), kept);
    dw__fail_prefix(DW_PARSE, "%s", text); /* a prefix that leaves no room for the message */
    assert_int_equal(strlen(dw_last_error()), kept);
    free(text);
}

static void *fail_elsewhere(void *unused) {
    (void)unused;
    assert_string_equal(dw_last_error(), "");
    dw__fail(DW_IO, "elsewhere");
    return NULL;
}

static void messages_are_per_thread(void **state) {
    (void)state;
    dw__fail(DW_IO, "here");
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    pthread_join(thread, NULL);
    assert_string_equal(dw_last_error(), "here");
}

/* ---- structures of callers ------------------------------------------------------------------- */

typedef struct options {
    size_t struct_size;
    int first, second, third;
} options;

static void struct_of_each_version_is_read(void **state) {
    static const dw__struct known = {"options", sizeof(options), {offsetof(options, third)}};
    options given = {sizeof given, 1, 2, 3}, copy;
    (void)state;
    assert_int_equal(dw__struct_read(&known, &given, &copy), DW_OK);
    assert_memory_equal(&given, &copy, sizeof given);
    given.struct_size = offsetof(options, third); /* an older caller's ends there */
    memset(&copy, 0xff, sizeof copy);
    assert_int_equal(dw__struct_read(&known, &given, &copy), DW_OK);
    assert_int_equal(copy.struct_size, offsetof(options, third));
    assert_int_equal(copy.second, 2);
    assert_int_equal(copy.third, 0);
}

static void struct_of_no_version_is_refused(void **state) {
    static const dw__struct known = {"options", sizeof(options), {offsetof(options, third)}};
    static const size_t sizes[] = {0,
                                   1,
                                   offsetof(options, second),
                                   offsetof(options, third) - 1,
                                   sizeof(options) - 1,
                                   sizeof(options) + 1,
                                   SIZE_MAX};
    options given = {0, 1, 2, 3}, copy = {0};
    (void)state;
    for (size_t i = 0; i < DW_COUNT(sizes); i++) {
        given.struct_size = sizes[i];
        assert_int_equal(dw__struct_read(&known, &given, &copy), DW_INVALID_ARGUMENT);
        assert_non_null(strstr(dw_last_error(), "options.struct_size is "));
        assert_non_null(strstr(dw_last_error(), "expected 24: set it to sizeof(options)"));
        assert_int_equal(copy.first, 0);
    }
    assert_int_equal(dw__struct_read(&known, NULL, &copy), DW_INVALID_ARGUMENT);
    assert_string_equal(dw_last_error(),
                        "options is NULL; expected a structure with struct_size = sizeof(options)");
}

/* ---- memory -------------------------------------------------------------------------------- */

static void memory_counts_live_blocks(void **state) {
    (void)state;
    int64_t before = dw__memory_live();
    void *a = dw__malloc(0), *b = dw__calloc(0, 8), *c = dw__realloc(NULL, 5);
    void *d = dw__malloc_aligned(0), *e = dw__malloc_aligned(65);
    assert_non_null(a);
    assert_non_null(b);
    assert_non_null(c);
    assert_int_equal((uintptr_t)d % 64, 0);
    assert_int_equal((uintptr_t)e % 64, 0);
    assert_int_equal(dw__memory_live() - before, 5);
    c = dw__realloc(c, 5000);
    assert_int_equal(dw__memory_live() - before, 5);
    dw__free(a);
    dw__free(b);
    dw__free(c);
    dw__free_aligned(d);
    dw__free_aligned(e);
    dw__free(NULL);
    assert_int_equal(dw__memory_live(), before);
    assert_null(dw__malloc_aligned(SIZE_MAX));
    assert_null(dw__calloc(SIZE_MAX, 2));
}

static void memory_fails_on_request(void **state) {
    (void)state;
    dw__memory_fail_after(1);
    void *first = dw__malloc(1);
    void *second = dw__malloc(1);
    void *third = dw__malloc_aligned(1);
    void *moved = dw__realloc(first, 100);
    dw__memory_fail_after(-1);
    assert_non_null(first);
    assert_null(second);
    assert_null(third);
    assert_null(moved);
    dw__free(first);
}

static void grow_doubles_and_refuses_overflow(void **state) {
    (void)state;
    struct {
        int *items;
        size_t count, capacity;
    } list = {0};
    for (int value = 0; value < 1000; value++) assert_int_equal(DW_PUSH(&list, value), DW_OK);
    for (int value = 0; value < 1000; value++) assert_int_equal(list.items[value], value);
    assert_true(list.capacity >= 1000 && list.capacity < 2001);

    size_t capacity = list.capacity;
    int *items = list.items;
    assert_int_equal(dw__grow((void **)&list.items, &list.capacity, SIZE_MAX / 2, sizeof(int)),
                     DW_OUT_OF_MEMORY);
    assert_ptr_equal(list.items, items);
    assert_int_equal(list.capacity, capacity);

    dw__memory_fail_after(0);
    dw_status status = dw__grow((void **)&list.items, &list.capacity, capacity + 1, sizeof(int));
    dw__memory_fail_after(-1);
    assert_int_equal(status, DW_OUT_OF_MEMORY);
    assert_int_equal(list.items[999], 999);
    dw__free(list.items);
}

/* ---- arena --------------------------------------------------------------------------------- */

static void arena_blocks_are_zeroed_aligned_and_apart(void **state) {
    (void)state;
    enum { BLOCKS = 500 };
    static const size_t sizes[] = {0, 1, 15, 16, 17, 4095, 4096, 4097, 100003, (1 << 20) + 1};
    unsigned char *blocks[BLOCKS];
    int64_t before = dw__memory_live();
    dw__arena *arena = dw__arena_create();
    assert_non_null(arena);
    for (int at = 0; at < BLOCKS; at++) {
        size_t bytes = sizes[at % (int)DW_COUNT(sizes)];
        blocks[at] = dw__arena_alloc(arena, bytes);
        assert_non_null(blocks[at]);
        assert_int_equal((uintptr_t)blocks[at] % 16, 0);
        for (size_t byte = 0; byte < bytes; byte++) {
            if (blocks[at][byte] != 0) fail_msg("block %d, byte %zu is not zero", at, byte);
        }
        memset(blocks[at], at % 251 + 1, bytes);
    }
    for (int at = 0; at < BLOCKS; at++) {
        size_t bytes = sizes[at % (int)DW_COUNT(sizes)];
        for (size_t byte = 0; byte < bytes; byte++) {
            if (blocks[at][byte] != at % 251 + 1) fail_msg("block %d was overwritten", at);
        }
        if (at > 0) assert_ptr_not_equal(blocks[at], blocks[at - 1]);
    }
    assert_null(dw__arena_alloc(arena, SIZE_MAX));
    dw__arena_destroy(arena);
    dw__arena_destroy(NULL);
    assert_int_equal(dw__memory_live(), before);
}

static void arena_text(void **state) {
    (void)state;
    dw__arena *arena = dw__arena_create();
    char source[] = "name";
    char *copy = dw__arena_strdup(arena, source);
    source[0] = 'g';
    assert_string_equal(copy, "name");
    assert_string_equal(dw__arena_printf(arena, "%s.%d", source, 12), "game.12");
    char *longer = dw__arena_printf(arena, "%9000d", 1);
    assert_int_equal(strlen(longer), 9000);
    assert_string_equal(copy, "name");
    dw__arena_destroy(arena);
}

static void arena_survives_failed_allocation(void **state) {
    (void)state;
    dw__memory_fail_after(0);
    dw__arena *none = dw__arena_create();
    dw__memory_fail_after(-1);
    assert_null(none);
    dw__arena *arena = dw__arena_create();
    dw__memory_fail_after(0);
    void *block = dw__arena_alloc(arena, 10);
    char *text = dw__arena_strdup(arena, "text");
    char *printed = dw__arena_printf(arena, "%d", 1);
    dw__memory_fail_after(-1);
    assert_null(block);
    assert_null(text);
    assert_null(printed);
    assert_non_null(dw__arena_alloc(arena, 10));
    dw__arena_destroy(arena);
}

/* ---- text ---------------------------------------------------------------------------------- */

static void text_grows(void **state) {
    (void)state;
    dw__text text = {0};
    size_t expected = 0;
    for (int line = 0; line < 1000; line++) {
        assert_int_equal(dw__text_printf(&text, "%d\n", line), DW_OK);
        expected += line < 10 ? 2 : line < 100 ? 3 : 4;
    }
    assert_int_equal(text.length, expected);
    assert_int_equal(strlen(text.text), expected);
    assert_memory_equal(text.text, "0\n1\n2\n", 6);
    assert_int_equal(dw__text_append(&text, "a\0b", 3), DW_OK);
    assert_memory_equal(text.text + expected, "a\0b", 4);
    assert_int_equal(dw__text_append(&text, NULL, 0), DW_OK);

    dw__memory_fail_after(0);
    dw_status status = dw__text_printf(&text, "%99999d", 1);
    dw__memory_fail_after(-1);
    assert_int_equal(status, DW_OUT_OF_MEMORY);
    assert_int_equal(text.length, expected + 3);
    dw__text_free(&text);
    assert_null(text.text);
}

static void empty_text_is_terminated(void **state) {
    (void)state;
    dw__text text = {0};
    assert_int_equal(dw__text_append(&text, "", 0), DW_OK);
    assert_string_equal(text.text, "");
    dw__text_free(&text);
}

/* ---- map ----------------------------------------------------------------------------------- */

static void map_holds_many_names(void **state) {
    (void)state;
    enum { NAMES = 20011 };
    dw__map *map = dw__map_create();
    char name[32];
    uint32_t value = 77;
    assert_false(dw__map_get(map, "", &value));
    assert_int_equal(value, 77);
    for (uint32_t at = 0; at < NAMES; at++) {
        snprintf(name, sizeof name, "layers.%u.weight", at);
        assert_int_equal(dw__map_set(map, name, at), DW_OK);
    }
    assert_int_equal(dw__map_set(map, "layers.5.weight", 500), DW_OK);
    assert_int_equal(dw__map_set(map, "", 9), DW_OK);
    for (uint32_t at = 0; at < NAMES; at++) {
        snprintf(name, sizeof name, "layers.%u.weight", at);
        assert_true(dw__map_get(map, name, &value));
        assert_int_equal(value, at == 5 ? 500 : at);
    }
    assert_true(dw__map_get(map, "", &value));
    assert_int_equal(value, 9);
    assert_false(dw__map_get(map, "layers.20011.weight", &value));
    dw__map_destroy(map);
    dw__map_destroy(NULL);
}

/* Every allocation fails in turn; existing entries stay and nothing leaks. */
static void map_survives_each_failed_allocation(void **state) {
    (void)state;
    int64_t before = dw__memory_live();
    int finished = 0;
    for (int64_t allowed = 0; !finished; allowed++) {
        assert_true(allowed < 1000);
        dw__memory_fail_after(allowed);
        dw__map *map = dw__map_create();
        uint32_t stored = 0;
        char name[16];
        for (; map && stored < 40; stored++) {
            snprintf(name, sizeof name, "n%u", stored);
            if (dw__map_set(map, name, stored) != DW_OK) break;
        }
        dw__memory_fail_after(-1);
        finished = stored == 40;
        for (uint32_t at = 0, value = 0; at < stored; at++) {
            snprintf(name, sizeof name, "n%u", at);
            assert_true(dw__map_get(map, name, &value));
            assert_int_equal(value, at);
        }
        dw__map_destroy(map);
        assert_int_equal(dw__memory_live(), before);
    }
}

/* ---- files --------------------------------------------------------------------------------- */

static void file_round_trip(void **state) {
    (void)state;
    enum { BYTES = 300007 };
    char *data = malloc(BYTES), *back = NULL;
    size_t count = 0;
    for (int at = 0; at < BYTES; at++) data[at] = (char)(at * 7919u >> 3);
    const char *path = in_folder("data");
    static const size_t sizes[] = {0, 1, 65536, BYTES};
    for (size_t at = 0; at < DW_COUNT(sizes); at++) {
        assert_int_equal(dw__file_write(path, data, sizes[at]), DW_OK);
        assert_int_equal(dw__file_read(path, &back, &count), DW_OK);
        assert_int_equal(count, sizes[at]);
        assert_memory_equal(back, data, count);
        assert_int_equal(back[count], '\0');
        dw__free(back);
    }
    free(data);
    unlink(path);
}

static void file_write_keeps_mode_and_link(void **state) {
    (void)state;
    char target[128], link[128];
    snprintf(target, sizeof target, "%s", in_folder("target"));
    snprintf(link, sizeof link, "%s", in_folder("link"));
    assert_int_equal(dw__file_write(target, "old", 3), DW_OK);
    assert_int_equal(chmod(target, 0640), 0);
    assert_int_equal(symlink("target", link), 0);
    assert_int_equal(dw__file_write(link, "new", 3), DW_OK);
    struct stat info;
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    assert_int_equal(stat(target, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0640);
    char *back = NULL;
    size_t count = 0;
    assert_int_equal(dw__file_read(target, &back, &count), DW_OK);
    assert_string_equal(back, "new");
    dw__free(back);
    unlink(link);
    unlink(target);
}

static void expect_io(dw_status status, const char *path, const char *reason) {
    assert_int_equal(status, DW_IO);
    if (!strstr(dw_last_error(), path) || !strstr(dw_last_error(), reason)) {
        fail_msg("\"%s\" names not \"%s\" and \"%s\"", dw_last_error(), path, reason);
    }
}

static void file_failures_name_path_and_reason(void **state) {
    (void)state;
    char *bytes = NULL;
    size_t count = 0;
    expect_io(dw__file_read(in_folder("absent"), &bytes, &count), "/absent", "No such file");
    expect_io(dw__file_read(folder, &bytes, &count), folder, "directory");
    expect_io(dw__file_write(folder, "x", 1), folder, "directory");
    expect_io(dw__file_write(in_folder("absent/file"), "x", 1), "/absent/file", "No such file");
    expect_io(dw__file_write("/dev/full", "x", 1), "/dev/full", "No space left");
    assert_null(bytes);
    if (geteuid() != 0) { /* root can read everything */
        const char *path = in_folder("secret");
        assert_int_equal(dw__file_write(path, "x", 1), DW_OK);
        assert_int_equal(chmod(path, 0), 0);
        expect_io(dw__file_read(path, &bytes, &count), "/secret", "Permission denied");
        unlink(path);
    }
    struct stat info;
    assert_int_equal(stat("/dev/full", &info), 0);
    assert_true(S_ISCHR(info.st_mode));
}

/* The disk becomes full in the middle: the old file stays and the temporary is removed. */
static void file_write_failure_keeps_the_old_file(void **state) {
    (void)state;
    enum { LIMIT = 4096 };
    char large[3 * LIMIT] = {0};
    const char *path = in_folder("kept");
    assert_int_equal(dw__file_write(path, "old", 3), DW_OK);
    struct rlimit before, tight;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    tight = before;
    tight.rlim_cur = LIMIT;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    dw_status status = dw__file_write(path, large, sizeof large);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_DFL);
    expect_io(status, "/kept", "File too large");
    char *back = NULL;
    size_t count = 0;
    assert_int_equal(dw__file_read(path, &back, &count), DW_OK);
    assert_string_equal(back, "old");
    dw__free(back);
    unlink(path);
}

static void file_reads_pipes_and_survives_failed_allocations(void **state) {
    (void)state;
    enum { BYTES = 60000 }; /* fits into a pipe's buffer */
    char *data = calloc(1, BYTES), *back = NULL;
    size_t count = 0;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], data, BYTES), BYTES);
    close(ends[1]);
    char path[64];
    snprintf(path, sizeof path, "/dev/fd/%d", ends[0]);
    assert_int_equal(dw__file_read(path, &back, &count), DW_OK);
    assert_int_equal(count, BYTES);
    dw__free(back);
    close(ends[0]);

    const char *file = in_folder("large");
    assert_int_equal(dw__file_write(file, data, BYTES), DW_OK);
    int64_t before = dw__memory_live();
    dw__memory_fail_after(0);
    dw_status status = dw__file_read(file, &back, &count);
    dw__memory_fail_after(-1);
    assert_int_equal(status, DW_OUT_OF_MEMORY);
    assert_int_equal(dw__memory_live(), before);
    unlink(file);
    free(data);
}

static void expect_content(const char *path, const char *content) {
    char *back = NULL;
    size_t count = 0;
    assert_int_equal(dw__file_read(path, &back, &count), DW_OK);
    assert_string_equal(back, content);
    dw__free(back);
}

static void file_written_in_pieces_appears_whole(void **state) {
    (void)state;
    char path[128];
    strcpy(path, in_folder("pieces"));
    dw__file_writer *writer = NULL;
    assert_int_equal(dw__file_writer_create(path, &writer), DW_OK);
    assert_int_equal(dw__file_writer_put(writer, "one ", 4), DW_OK);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(dw__file_writer_put(writer, "two", 3), DW_OK);
    assert_int_equal(dw__file_writer_commit(writer), DW_OK);
    dw__file_writer_destroy(writer);
    expect_content(path, "one two");

    assert_int_equal(dw__file_writer_create(path, &writer), DW_OK);
    assert_int_equal(dw__file_writer_put(writer, "lost", 4), DW_OK);
    dw__file_writer_destroy(writer);
    expect_content(path, "one two");

    int64_t before = dw__memory_live();
    dw__memory_fail_after(0);
    dw_status status = dw__file_writer_create(path, &writer);
    dw__memory_fail_after(-1);
    assert_int_equal(status, DW_OUT_OF_MEMORY);
    assert_int_equal(dw__memory_live(), before);
    unlink(path);
}

/* Files that are not regular, or too long, are rejected before they are read; reading a pipe would block forever. */
static void file_open_accepts_only_regular_files(void **state) {
    (void)state;
    char path[128], *bytes;
    size_t count;
    uint64_t size = 0;
    int file = -1;
    strcpy(path, in_folder("kind"));
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_io(dw__file_open(path, &file, &size), "/kind", "a device or a pipe");
    expect_io(dw__file_read_at_most(path, 10, &bytes, &count), "/kind", "a device or a pipe");
    unlink(path);
    expect_io(dw__file_open("/dev/zero", &file, &size), "/dev/zero", "a device or a pipe");
    expect_io(dw__file_open(folder, &file, &size), folder, "directory");
    assert_int_equal(symlink("kind", path), 0);
    expect_io(dw__file_open(path, &file, &size), "/kind", "symbolic links");
    unlink(path);
    assert_int_equal(dw__file_write(path, "12345", 5), DW_OK);
    assert_int_equal(dw__file_open(path, &file, &size), DW_OK);
    assert_int_equal(size, 5);
    close(file);
    assert_int_equal(dw__file_read_at_most(path, 5, &bytes, &count), DW_OK);
    dw__free(bytes);
    assert_int_equal(dw__file_read_at_most(path, 4, &bytes, &count), DW_PARSE);
    assert_non_null(strstr(dw_last_error(), "more than 4 bytes"));
    unlink(path);
}

/* A new folder with one file replaces `path`. */
static void publish(const char *path, const char *name) {
    dw__folder_writer writer;
    char file[512], temporary[256];
    assert_int_equal(dw__folder_begin(path, &writer), DW_OK);
    snprintf(temporary, sizeof temporary, "%s", writer.temporary);
    snprintf(file, sizeof file, "%s/%s", temporary, name);
    assert_int_equal(dw__file_write(file, name, strlen(name)), DW_OK);
    snprintf(file, sizeof file, "%s/inside", temporary);
    assert_int_equal(mkdir(file, 0777), 0);
    assert_int_equal(dw__folder_commit(&writer, path), DW_OK);
    dw__folder_end(&writer);
    assert_int_not_equal(access(temporary, F_OK), 0);
}

static void folder_appears_whole_and_replaces(void **state) {
    (void)state;
    char path[128], slashed[132], link[128], file[160];
    strcpy(path, in_folder("whole"));
    strcpy(link, in_folder("link"));
    snprintf(slashed, sizeof slashed, "%s//", path);
    snprintf(file, sizeof file, "%s/second", path);
    publish(path, "first");
    publish(slashed, "second");
    expect_content(file, "second");
    snprintf(file, sizeof file, "%s/first", path);
    assert_int_not_equal(access(file, F_OK), 0);

    assert_int_equal(symlink("whole", link), 0);
    publish(link, "third");
    struct stat info;
    assert_int_equal(lstat(link, &info), 0);
    assert_true(S_ISLNK(info.st_mode));
    snprintf(file, sizeof file, "%s/third", path);
    expect_content(file, "third");
    unlink(link);

    /* Removal does not follow links. */
    char outside[128];
    strcpy(outside, in_folder("outside"));
    assert_int_equal(dw__file_write(outside, "stays", 5), DW_OK);
    snprintf(file, sizeof file, "%s/inside/link", path);
    assert_int_equal(symlink(outside, file), 0);
    assert_int_equal(dw__folder_remove(path), DW_OK);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(dw__folder_remove(path), DW_OK);
    expect_content(outside, "stays");

    dw__folder_writer writer;
    expect_io(dw__folder_begin(outside, &writer), "/outside", "Not a directory");
    expect_io(dw__folder_begin(in_folder("absent/folder"), &writer), "/absent/folder",
              "No such file");
    unlink(outside);
    for (int64_t allowed = 0; allowed < 3; allowed++) {
        int64_t before = dw__memory_live();
        dw__memory_fail_after(allowed);
        dw_status status = dw__folder_begin(path, &writer);
        dw__memory_fail_after(-1);
        if (status == DW_OK)
            dw__folder_end(&writer);
        else
            assert_int_equal(status, DW_OUT_OF_MEMORY);
        assert_int_equal(dw__memory_live(), before);
    }
}

/* Writing the same folder again removes leftovers of killed processes. A folder that is being written stays,
 * whatever its process number, and so do names that only look similar. */
static void folder_temporaries_of_dead_processes_are_removed(void **state) {
    (void)state;
    static const char *const stale[] = {"out.1-0.tmp", "out.999999999-7.tmp"};
    static const char *const others[] = {"out.1-0.tmpx", "out.1.tmp", "out2.1-0.tmp",
                                         "out.a-0.tmp"};
    char path[128], file[256];
    dw__folder_writer writer;
    strcpy(path, in_folder("out"));
    for (size_t i = 0; i < DW_COUNT(stale); i++) {
        assert_int_equal(mkdir(in_folder(stale[i]), 0777), 0);
        snprintf(file, sizeof file, "%s/model.safetensors", in_folder(stale[i]));
        assert_int_equal(dw__file_write(file, "x", 1), DW_OK);
    }
    for (size_t i = 0; i < DW_COUNT(others); i++)
        assert_int_equal(mkdir(in_folder(others[i]), 0777), 0);
    assert_int_equal(dw__file_write(in_folder("out.2-0.tmp"), "a file", 6), DW_OK);
    assert_int_equal(dw__folder_begin(path, &writer), DW_OK);
    for (size_t i = 0; i < DW_COUNT(stale); i++)
        assert_int_not_equal(access(in_folder(stale[i]), F_OK), 0);
    dw__folder_remove_stale(path);
    assert_int_equal(access(writer.temporary, F_OK), 0);
    dw__folder_end(&writer);
    for (size_t i = 0; i < DW_COUNT(others); i++)
        assert_int_equal(dw__folder_remove(in_folder(others[i])), DW_OK);
    assert_int_equal(unlink(in_folder("out.2-0.tmp")), 0);
}

/* ---- log and time -------------------------------------------------------------------------- */

typedef struct heard {
    int lines, level;
    char last[64];
} heard;

static void hear(void *context, int level, const char *line) {
    heard *to = context;
    to->lines++;
    to->level = level;
    snprintf(to->last, sizeof to->last, "%s", line);
    if (to->lines > 3) dw_log_set_sink(NULL, NULL, 0); /* a sink may call Deepwell */
}

static void log_reaches_the_sink(void **state) {
    (void)state;
    heard to = {0};
    dw__log(DW_LOG_WARNING, "nobody listens");
    dw_log_set_sink(hear, &to, DW_LOG_INFO);
    dw__log(DW_LOG_DEBUG, "dropped");
    assert_int_equal(to.lines, 0);
    dw__log(DW_LOG_INFO, "kernel %s", "gemm");
    assert_int_equal(to.lines, 1);
    assert_int_equal(to.level, DW_LOG_INFO);
    assert_string_equal(to.last, "kernel gemm");
    for (int line = 0; line < 10; line++) dw__log(DW_LOG_WARNING, "%d", line);
    assert_int_equal(to.lines, 4);
    dw_log_set_sink(NULL, NULL, 0);
}

static void clock_runs_forward(void **state) {
    (void)state;
    double start = dw__seconds();
    usleep(2000);
    double passed = dw__seconds() - start;
    assert_true(passed >= 0.002 && passed < 60.0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_names_and_texts),
        cmocka_unit_test(fail_records_message_and_prefix),
        cmocka_unit_test(fail_truncates_long_messages),
        cmocka_unit_test(messages_are_per_thread),
        cmocka_unit_test(struct_of_each_version_is_read),
        cmocka_unit_test(struct_of_no_version_is_refused),
        cmocka_unit_test(memory_counts_live_blocks),
        cmocka_unit_test(memory_fails_on_request),
        cmocka_unit_test(grow_doubles_and_refuses_overflow),
        cmocka_unit_test(arena_blocks_are_zeroed_aligned_and_apart),
        cmocka_unit_test(arena_text),
        cmocka_unit_test(arena_survives_failed_allocation),
        cmocka_unit_test(text_grows),
        cmocka_unit_test(empty_text_is_terminated),
        cmocka_unit_test(map_holds_many_names),
        cmocka_unit_test(map_survives_each_failed_allocation),
        cmocka_unit_test(file_round_trip),
        cmocka_unit_test(file_write_keeps_mode_and_link),
        cmocka_unit_test(file_failures_name_path_and_reason),
        cmocka_unit_test(file_write_failure_keeps_the_old_file),
        cmocka_unit_test(file_reads_pipes_and_survives_failed_allocations),
        cmocka_unit_test(file_written_in_pieces_appears_whole),
        cmocka_unit_test(file_open_accepts_only_regular_files),
        cmocka_unit_test(folder_appears_whole_and_replaces),
        cmocka_unit_test(folder_temporaries_of_dead_processes_are_removed),
        cmocka_unit_test(log_reaches_the_sink),
        cmocka_unit_test(clock_runs_forward),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
