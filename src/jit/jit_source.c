/* Expands device sources for the compiler: one text with all included files. */
#include "jit/jit_internal.h"
#include <string.h>

enum { MOST_INCLUDED = 64 };

typedef struct expansion {
    dw__text *out;
    const dw__jit_file *done[MOST_INCLUDED];
    size_t count;
} expansion;

static const dw__jit_file *find_file(const char *name) {
    for (const dw__jit_file *file = dw__jit_sources; file->name; file++)
        if (strcmp(file->name, name) == 0) return file;
    return NULL;
}

/* Resolves the include `name` (of `length` bytes) of the file `from`. */
static const dw__jit_file *find_include(const dw__jit_file *from, const char *name, size_t length) {
    const char *slash = strrchr(from->name, '/');
    const char *const folders[] = {from->name, "common/", ""};
    const size_t folder_bytes[] = {slash ? (size_t)(slash + 1 - from->name) : 0, 7, 0};
    char path[256];
    for (size_t i = 0; i < DW_COUNT(folders); i++) {
        if (folder_bytes[i] + length >= sizeof path) continue;
        memcpy(path, folders[i], folder_bytes[i]);
        memcpy(path + folder_bytes[i], name, length);
        path[folder_bytes[i] + length] = '\0';
        const dw__jit_file *found = find_file(path);
        if (found) return found;
    }
    return NULL;
}

/* Returns the name in a line `#include "name"`; NULL for any other line. */
static const char *included_name(const char *line, const char *end, size_t *length) {
    static const char word[] = "include";
    while (line < end && (*line == ' ' || *line == '\t')) line++;
    if (line == end || *line++ != '#') return NULL;
    while (line < end && (*line == ' ' || *line == '\t')) line++;
    if ((size_t)(end - line) < sizeof word || memcmp(line, word, sizeof word - 1) != 0) return NULL;
    line += sizeof word - 1;
    while (line < end && (*line == ' ' || *line == '\t')) line++;
    if (line == end || *line++ != '"') return NULL;
    const char *quote = memchr(line, '"', (size_t)(end - line));
    *length = quote ? (size_t)(quote - line) : 0;
    return quote ? line : NULL;
}

static dw_status expand_file(expansion *e, const dw__jit_file *file) {
    for (size_t i = 0; i < e->count; i++) /* Included files, each once, as with include guards. */
        if (e->done[i] == file) return DW_OK;
    if (e->count == MOST_INCLUDED)
        return dw__fail(DW_INTERNAL, "\"%s\" is included beyond %d files", file->name,
                        MOST_INCLUDED);
    e->done[e->count++] = file;
    DW_RETURN_IF_FAILED(dw__text_printf(e->out, "#line 1 \"%s\"\n", file->name));
    int number = 1;
    for (const char *line = (const char *)file->begin, *end = (const char *)file->end; line < end;
         number++) {
        const char *newline = memchr(line, '\n', (size_t)(end - line));
        const char *next = newline ? newline + 1 : end;
        size_t length = 0;
        const char *name = included_name(line, next, &length);
        if (name) {
            const dw__jit_file *wanted = find_include(file, name, length);
            if (!wanted)
                return dw__fail(DW_INTERNAL,
                                "%s:%d includes \"%.*s\", which is no device source of Deepwell",
                                file->name, number, (int)length, name);
            DW_RETURN_IF_FAILED(expand_file(e, wanted));
            DW_RETURN_IF_FAILED(
                dw__text_printf(e->out, "#line %d \"%s\"\n", number + 1, file->name));
        } else {
            DW_RETURN_IF_FAILED(dw__text_append(e->out, line, (size_t)(next - line)));
        }
        line = next;
    }
    return dw__text_append(e->out, "\n", 1);
}

dw_status dw__jit_expand(const char *source, dw__text *expanded) {
    expansion e = {.out = expanded};
    const dw__jit_file *file = find_file(source);
    if (!file) return dw__fail(DW_UNSUPPORTED, "the library has no device source \"%s\"", source);
    return expand_file(&e, file);
}

dw_status dw__jit_expand_variant(const dw__jit_variant *variant, dw__text *expanded) {
    expansion e = {.out = expanded};
    if (!variant->text) return dw__jit_expand(variant->source, expanded);
    const unsigned char *text = (const unsigned char *)variant->text;
    const dw__jit_file made = {variant->source, text, text + strlen(variant->text)};
    return expand_file(&e, &made);
}
