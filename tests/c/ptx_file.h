/* Reads kernels of tests/ptx as text, and makes changed copies of them. */
#ifndef DW_PTX_FILE_H
#define DW_PTX_FILE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Returns the text of tests/ptx/`name`. The caller frees it. */
static inline char *read_ptx(const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", PTX_FOLDER, name);
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("cannot open %s", path);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    const long bytes = ftell(file);
    assert_true(bytes >= 0);
    rewind(file);
    char *text = malloc((size_t)bytes + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)bytes, file), bytes);
    fclose(file);
    text[bytes] = '\0';
    return text;
}

/* Returns `text` with the first `from` replaced by `to`; fails if there is none. Frees `text`. */
static inline char *replace_in_ptx(char *text, const char *from, const char *to) {
    const char *at = strstr(text, from);
    if (!at) fail_msg("the kernel has no \"%s\":\n%s", from, text);
    const size_t room = strlen(text) - strlen(from) + strlen(to) + 1;
    char *changed = malloc(room);
    assert_non_null(changed);
    snprintf(changed, room, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    free(text);
    return changed;
}

/* Returns a kernel f for `target` that contains only `body`. The caller frees it. */
static inline char *one_instruction_ptx(const char *target, const char *body) {
    char *text = replace_in_ptx(read_ptx("one_instruction.ptx"), "@TARGET@", target);
    return replace_in_ptx(text, "@BODY@", body);
}

#endif
