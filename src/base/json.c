#include "base/json.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory -------------------------------------------------------------------------------- */

/* jansson (2.14) does not survive every failed allocation: if its buffer for a token's text cannot grow, it
 * continues with the shorter text and reads past its end. While it parses, a reserve therefore serves its
 * requests once memory is exhausted, and its input ends at the next block, so that it stops by itself. The
 * result is discarded before the reserve is freed. */
enum { RESERVE_BYTES = 512 << 10, RESERVE_TOKENS = 6, RESERVE_ALIGNMENT = 16 };

typedef struct reserve {
    char *bytes;
    size_t size, used;
    bool needed; /* memory was exhausted */
} reserve;

static _Thread_local reserve *current;

static void *allocate(size_t bytes) {
    void *memory = current && current->needed ? NULL : dw__malloc(bytes);
    if (memory || !current) return memory;
    current->needed = true;
    if (bytes > current->size - current->used - RESERVE_ALIGNMENT) return NULL;
    memory = current->bytes + current->used;
    current->used += (bytes + RESERVE_ALIGNMENT - 1) / RESERVE_ALIGNMENT * RESERVE_ALIGNMENT;
    return memory;
}

static void release(void *memory) {
    uintptr_t at = (uintptr_t)memory, from = current ? (uintptr_t)current->bytes : 0;
    if (!current || at < from || at >= from + current->size) dw__free(memory);
}

/* jansson's allocation functions belong to the whole process. If a program has set its own, they stay. Blocks
 * from jansson's defaults (malloc and free) may be released with our functions. */
static void use_our_memory(void) {
    json_malloc_t its_malloc;
    json_free_t its_free;
    json_get_alloc_funcs(&its_malloc, &its_free);
    if (its_malloc == malloc && its_free == free) json_set_alloc_funcs(allocate, release);
}

/* ---- reading ------------------------------------------------------------------------------- */

const char *dw__json_kind(const json_t *json) {
    if (!json) return "missing";
    switch (json_typeof(json)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a real number";
    case JSON_TRUE:
    case JSON_FALSE: return "a boolean";
    case JSON_NULL: return "null";
    }
    return "of no kind";
}

dw_status(dw__json_wrong_kind)(const char *what, const json_t *json, const char *expected) {
    return dw__fail(DW_PARSE, "%.64s is %s; expected %s", what, dw__json_kind(json), expected);
}

bool dw__json_is_plain(const char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7F) return false;
    return true;
}

/* Checks depth, number of values and the length of the longest token without building anything. Text that is
 * not JSON passes; jansson reports it. */
static dw_status check_limits(const char *what, const char *text, size_t bytes,
                              dw__json_limits limits, size_t *longest) {
    int depth = 0;
    size_t values = 1, token = 0;
    bool in_string = false;
    *longest = 0;
    for (size_t i = 0; i < bytes; i++) {
        char at = text[i];
        /* The text between two of these characters is at least one token, so its length bounds the longest token. */
        token = !in_string && strchr(" \t\r\n[]{},:", at) ? 0 : token + 1;
        if (token > *longest) *longest = token;
        if (in_string) {
            if (at == '\\')
                i++;
            else if (at == '"')
                in_string = false;
            continue;
        }
        switch (at) {
        case '"': in_string = true; break;
        case '[':
        case '{':
            values++;
            if (++depth > limits.depth)
                return dw__fail(DW_PARSE,
                                "%s: byte %zu opens array or object number %d within one "
                                "another; expected at most %d",
                                what, i, depth, limits.depth);
            break;
        case ']':
        case '}': depth--; break;
        case ',':
            if (++values > limits.values)
                return dw__fail(DW_PARSE, "%s has more than %zu values; expected fewer", what,
                                limits.values);
            break;
        default: break;
        }
    }
    return DW_OK;
}

typedef struct input {
    const char *text;
    size_t left;
} input;

static size_t next_block(void *buffer, size_t room, void *context) {
    input *in = context;
    if (current->needed) return (size_t)-1;
    size_t bytes = in->left < room ? in->left : room;
    memcpy(buffer, in->text, bytes);
    in->text += bytes;
    in->left -= bytes;
    return bytes;
}

dw_status dw__json_parse(const char *what, const char *text, size_t bytes, dw__json_limits limits,
                         json_t **root) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    json_error_t error;
    size_t longest = 0;
    dw_status status = DW_OK;
    pthread_once(&once, use_our_memory);
    DW_RETURN_IF_FAILED(check_limits(what, text, bytes, limits, &longest));
    reserve kept = {.size = RESERVE_BYTES + RESERVE_TOKENS * longest};
    kept.bytes = dw__malloc(kept.size);
    if (!kept.bytes) return dw__fail_memory(what, kept.size);
    current = &kept;
    input in = {text, bytes};
    json_t *read = json_load_callback(next_block, &in, JSON_REJECT_DUPLICATES, &error);
    if (kept.needed) {
        json_decref(read);
        read = NULL;
        status = dw__fail_memory(what, bytes);
    } else if (!read) {
        status = dw__fail(DW_PARSE, "%s: line %d, column %d: %s", what, error.line, error.column,
                          error.text);
    }
    current = NULL;
    dw__free(kept.bytes);
    if (status == DW_OK) *root = read;
    return status;
}

/* ---- fields -------------------------------------------------------------------------------- */

const json_t *dw__json_member(const json_t *object, const char *name) {
    const json_t *found = json_object_get(object, name);
    return json_is_null(found) ? NULL : found;
}

dw_status dw__json_integer(const json_t *object, const char *name, int64_t low, int64_t high,
                           int64_t absent, int64_t *value) {
    const json_t *found = dw__json_member(object, name);
    *value = absent;
    if (!found && absent >= 0) return DW_OK;
    if (!json_is_integer(found)) return dw__json_wrong_kind(name, found, "an integer");
    *value = json_integer_value(found);
    if (*value >= low && *value <= high) return DW_OK;
    return dw__fail(DW_PARSE, "%s is %lld; expected %lld to %lld", name, (long long)*value,
                    (long long)low, (long long)high);
}

dw_status dw__json_number(const json_t *object, const char *name, double low, double high,
                          double absent, double *value) {
    const json_t *found = dw__json_member(object, name);
    *value = absent;
    if (!found && !isnan(absent)) return DW_OK;
    if (!json_is_number(found)) return dw__json_wrong_kind(name, found, "a number");
    *value = json_number_value(found);
    if (*value >= low && *value <= high) return DW_OK;
    return dw__fail(DW_PARSE, "%s is %g; expected %g to %g", name, *value, low, high);
}

dw_status dw__json_flag(const json_t *object, const char *name, bool absent, bool *value) {
    const json_t *found = dw__json_member(object, name);
    *value = absent;
    if (!found) return DW_OK;
    if (!json_is_boolean(found)) return dw__json_wrong_kind(name, found, "true or false");
    *value = json_is_true(found);
    return DW_OK;
}

dw_status dw__json_text(const json_t *object, const char *name, const char **value) {
    const json_t *found = dw__json_member(object, name);
    *value = NULL;
    if (!found) return DW_OK;
    if (!json_is_string(found)) return dw__json_wrong_kind(name, found, "a string");
    *value = json_string_value(found);
    if (dw__json_is_plain(*value)) return DW_OK;
    return dw__fail(DW_PARSE, "%s has control characters; expected plain text", name);
}

/* ---- writing ------------------------------------------------------------------------------- */

static dw_status write_value(const json_t *json, int indent, dw__text *out);

static dw_status new_line(int indent, dw__text *out) {
    return dw__text_printf(out, "\n%*s", indent, "");
}

static dw_status write_string(const char *text, size_t bytes, dw__text *out) {
    DW_RETURN_IF_FAILED(dw__text_append(out, "\"", 1));
    for (size_t i = 0; i < bytes; i++) {
        unsigned char at = (unsigned char)text[i];
        if (at == '"' || at == '\\')
            DW_RETURN_IF_FAILED(dw__text_printf(out, "\\%c", at));
        else if (at < 0x20)
            DW_RETURN_IF_FAILED(dw__text_printf(out, "\\u%04x", at));
        else
            DW_RETURN_IF_FAILED(dw__text_append(out, text + i, 1));
    }
    return dw__text_append(out, "\"", 1);
}

static dw_status write_real(double value, dw__text *out) {
    char text[40];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    char *comma = strchr(text, ','); /* in locales with a decimal comma */
    if (comma) *comma = '.';
    bool is_real = strpbrk(text, ".e") != NULL;
    return dw__text_printf(out, is_real ? "%s" : "%s.0", text);
}

static dw_status write_array(const json_t *json, int indent, dw__text *out) {
    size_t count = json_array_size(json);
    DW_RETURN_IF_FAILED(dw__text_append(out, "[", 1));
    for (size_t i = 0; i < count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ",", 1));
        DW_RETURN_IF_FAILED(new_line(indent + 2, out));
        DW_RETURN_IF_FAILED(write_value(json_array_get(json, i), indent + 2, out));
    }
    if (count > 0) DW_RETURN_IF_FAILED(new_line(indent, out));
    return dw__text_append(out, "]", 1);
}

static dw_status write_object(const json_t *json, int indent, dw__text *out) {
    json_t *object = (json_t *)json; /* jansson's iterators are not const; nothing is modified */
    bool first = true;
    DW_RETURN_IF_FAILED(dw__text_append(out, "{", 1));
    for (void *at = json_object_iter(object); at; at = json_object_iter_next(object, at)) {
        const char *key = json_object_iter_key(at);
        if (!first) DW_RETURN_IF_FAILED(dw__text_append(out, ",", 1));
        first = false;
        DW_RETURN_IF_FAILED(new_line(indent + 2, out));
        DW_RETURN_IF_FAILED(write_string(key, strlen(key), out));
        DW_RETURN_IF_FAILED(dw__text_append(out, ": ", 2));
        DW_RETURN_IF_FAILED(write_value(json_object_iter_value(at), indent + 2, out));
    }
    if (!first) DW_RETURN_IF_FAILED(new_line(indent, out));
    return dw__text_append(out, "}", 1);
}

static dw_status write_value(const json_t *json, int indent, dw__text *out) {
    switch (json_typeof(json)) {
    case JSON_OBJECT: return write_object(json, indent, out);
    case JSON_ARRAY: return write_array(json, indent, out);
    case JSON_STRING: return write_string(json_string_value(json), json_string_length(json), out);
    case JSON_INTEGER:
        return dw__text_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(json));
    case JSON_REAL: return write_real(json_real_value(json), out);
    case JSON_TRUE: return dw__text_append(out, "true", 4);
    case JSON_FALSE: return dw__text_append(out, "false", 5);
    case JSON_NULL: return dw__text_append(out, "null", 4);
    }
    return dw__fail(DW_INTERNAL, "JSON of no kind");
}

dw_status dw__json_write(const json_t *json, dw__text *out) { return write_value(json, 0, out); }

dw_status dw__json_string(const json_t *json, char **text) {
    dw__text made = {0};
    dw_status status = dw__json_write(json, &made);
    if (status == DW_OK)
        *text = made.text;
    else
        dw__text_free(&made);
    return status;
}
