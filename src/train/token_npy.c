/* The header of NumPy's files: the literal of a Python dictionary with exactly three keys,
 *
 *     {'descr': '<u2', 'fortran_order': False, 'shape': (1000,), }
 *
 * padded with spaces and ended by a newline. It is not JSON, and a parser of Python literals would accept
 * more than any writer produces, so this file parses it directly. */
#include "train/token_file.h"
#include <string.h>

typedef struct cursor {
    const char *path;
    const char *at, *end;
} cursor;

static void skip_spaces(cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\n')) c->at++;
}

static bool take(cursor *c, char wanted) {
    skip_spaces(c);
    if (c->at == c->end || *c->at != wanted) return false;
    c->at++;
    return true;
}

static bool take_word(cursor *c, const char *word) {
    size_t length = strlen(word);
    skip_spaces(c);
    if ((size_t)(c->end - c->at) < length || memcmp(c->at, word, length) != 0) return false;
    c->at += length;
    return true;
}

/* Reads the inside of a quoted string without escapes. */
static bool take_string(cursor *c, const char **text, size_t *length) {
    skip_spaces(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"')) return false;
    char quote = *c->at++;
    const char *close = memchr(c->at, quote, (size_t)(c->end - c->at));
    if (!close) return false;
    *text = c->at;
    *length = (size_t)(close - c->at);
    c->at = close + 1;
    return memchr(*text, '\\', *length) == NULL;
}

static bool take_number(cursor *c, int64_t *number) {
    skip_spaces(c);
    const char *first = c->at;
    int64_t value = 0;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++) {
        if (value > (INT64_MAX - 9) / 10) return false;
        value = 10 * value + (*c->at - '0');
    }
    *number = value;
    return c->at > first;
}

static dw_status fail_syntax(const cursor *c, const char *expected) {
    return dw__fail(
        DW_PARSE,
        "\"%s\": the header of this .npy file is malformed: expected %s; write the file "
        "again with numpy.save",
        c->path, expected);
}

static dw_status read_type(cursor *c, dw__token_store *store) {
    static const struct {
        const char *descr;
        dw__token_store store;
    } types[] = {{"<u2", DW_TOKEN_STORE_U16},
                 {"<u4", DW_TOKEN_STORE_U32},
                 {"<i4", DW_TOKEN_STORE_I32},
                 {"<i8", DW_TOKEN_STORE_I64}};
    const char *text = NULL;
    size_t length = 0;
    if (!take_string(c, &text, &length)) return fail_syntax(c, "a string for 'descr'");
    for (size_t i = 0; i < DW_COUNT(types); i++) {
        if (strlen(types[i].descr) == length && memcmp(types[i].descr, text, length) == 0) {
            *store = types[i].store;
            return DW_OK;
        }
    }
    return dw__fail(
        DW_UNSUPPORTED,
        "\"%s\": its elements are '%.*s'; tokens are uint16 ('<u2'), uint32 ('<u4'), int32 "
        "('<i4') or int64 ('<i8'): convert with array.astype",
        c->path, length < 64 ? (int)length : 64, text);
}

static dw_status read_shape(cursor *c, int64_t *count) {
    if (!take(c, '(')) return fail_syntax(c, "a tuple for 'shape'");
    int rank = 0;
    while (!take(c, ')')) {
        if (rank > 0 && !take(c, ',')) return fail_syntax(c, "a comma in 'shape'");
        if (rank > 0 && take(c, ')')) break;
        if (!take_number(c, count)) return fail_syntax(c, "a number below 2^63 in 'shape'");
        rank++;
    }
    if (rank == 1) return DW_OK;
    return dw__fail(DW_SHAPE,
                    "\"%s\": the array has %d dimensions; tokens are one long row: save "
                    "array.reshape(-1)",
                    c->path, rank);
}

static dw_status read_dictionary(cursor *c, dw__token_layout *layout) {
    enum { DESCR = 1, ORDER = 2, SHAPE = 4, ALL = 7 };
    int seen = 0;
    if (!take(c, '{')) return fail_syntax(c, "'{'");
    while (!take(c, '}')) {
        const char *key = NULL;
        size_t length = 0;
        if (seen && !take(c, ',')) return fail_syntax(c, "a comma between its entries");
        if (seen && take(c, '}')) break;
        if (!take_string(c, &key, &length) || !take(c, ':')) return fail_syntax(c, "a key and ':'");
        int bit = length == 5 && memcmp(key, "descr", 5) == 0             ? DESCR
                  : length == 13 && memcmp(key, "fortran_order", 13) == 0 ? ORDER
                  : length == 5 && memcmp(key, "shape", 5) == 0           ? SHAPE
                                                                          : 0;
        if (bit == 0 || (seen & bit))
            return fail_syntax(c, "the keys 'descr', 'fortran_order' and 'shape', each once");
        seen |= bit;
        if (bit == DESCR) DW_RETURN_IF_FAILED(read_type(c, &layout->store));
        if (bit == SHAPE) DW_RETURN_IF_FAILED(read_shape(c, &layout->count));
        /* An array of one dimension has the same order in both cases. */
        if (bit == ORDER && !take_word(c, "False") && !take_word(c, "True"))
            return fail_syntax(c, "True or False for 'fortran_order'");
    }
    skip_spaces(c);
    if (seen != ALL) return fail_syntax(c, "the keys 'descr', 'fortran_order' and 'shape'");
    if (c->at != c->end) return fail_syntax(c, "nothing after '}'");
    return DW_OK;
}

dw_status dw__npy_layout(const char *path, const void *head, size_t head_bytes, uint64_t file_bytes,
                         dw__token_layout *layout) {
    static const char magic[6] = "\x93NUMPY";
    enum { SHORT_PREFIX = 10, LONG_PREFIX = 12 };
    const unsigned char *bytes = head;
    cursor c = {.path = path};
    if (head_bytes < SHORT_PREFIX || memcmp(bytes, magic, sizeof magic) != 0)
        return dw__fail(
            DW_PARSE,
            "\"%s\" is named .npy but does not begin as NumPy's files do; write it with "
            "numpy.save",
            path);
    int version = bytes[6];
    if (version < 1 || version > 3)
        return dw__fail(DW_UNSUPPORTED,
                        "\"%s\": version %d.%d of NumPy's format; versions 1 to 3 are read", path,
                        version, bytes[7]);
    size_t prefix = version == 1 ? SHORT_PREFIX : LONG_PREFIX;
    size_t length = bytes[8] | (size_t)bytes[9] << 8;
    if (version > 1 && head_bytes >= LONG_PREFIX)
        length |= (size_t)bytes[10] << 16 | (size_t)bytes[11] << 24;
    if (head_bytes < prefix || length > head_bytes - prefix)
        return dw__fail(
            DW_PARSE,
            "\"%s\": its header should be %zu bytes long, but only %zu follow (at most %d are "
            "read); the file is truncated or not of tokens",
            path, length, head_bytes - (head_bytes < prefix ? head_bytes : prefix),
            DW_TOKEN_HEAD_BYTES);
    c.at = (const char *)bytes + prefix;
    c.end = c.at + length;
    dw__token_layout found = {.offset = prefix + length};
    DW_RETURN_IF_FAILED(read_dictionary(&c, &found));
    uint64_t room = file_bytes > found.offset ? file_bytes - found.offset : 0;
    uint64_t element = dw__token_store_bytes(found.store);
    if ((uint64_t)found.count > room / element || (uint64_t)found.count * element != room)
        return dw__fail(
            DW_PARSE,
            "\"%s\": its header says %lld tokens of %llu bytes, but %llu bytes follow it; "
            "the file is truncated or was written over",
            path, (long long)found.count, (unsigned long long)element, (unsigned long long)room);
    *layout = found;
    return DW_OK;
}
