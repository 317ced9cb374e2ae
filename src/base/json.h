/* JSON that may come from anywhere, read with jansson, whose memory is ours (dw__malloc). */
#ifndef DW_BASE_JSON_H
#define DW_BASE_JSON_H

#include "base/base.h"
#include <jansson.h>

/* What a document may cost, seen before it is parsed: a megabyte of "[[[[" or "0,0,0," becomes many megabytes
 * of nodes. */
typedef struct dw__json_limits {
    int depth;     /* of nested arrays and objects */
    size_t values; /* elements and members in all of them */
} dw__json_limits;

/* DW_PARSE: not JSON (with line and column), a key that is twice in one object, or over the limits; the
 * message begins with `what`. The root is an object or an array; release it with json_decref. */
dw_status dw__json_parse(const char *what, const char *text, size_t bytes, dw__json_limits limits,
                         json_t **root);
/* "an object" ... "null"; "missing" for NULL. */
const char *dw__json_kind(const json_t *json);
/* DW_PARSE: "WHAT is a string; expected EXPECTED". */
dw_status dw__json_wrong_kind(const char *what, const json_t *json, const char *expected);
#define dw__json_wrong_kind(...) dw__not_ok((dw__json_wrong_kind)(__VA_ARGS__))
/* Whether the text may be shown: it has no control characters. */
bool dw__json_is_plain(const char *text);

/* ---- fields of an object. DW_PARSE names the field, what it is, and what was expected. ------------------- */

/* NULL when it is absent; null counts as absent. */
const json_t *dw__json_member(const json_t *object, const char *name);
/* `absent` is the value of a field that is not there; negative: it must be there. */
dw_status dw__json_integer(const json_t *object, const char *name, int64_t low, int64_t high,
                           int64_t absent, int64_t *value);
/* The same; NaN: it must be there. */
dw_status dw__json_number(const json_t *object, const char *name, double low, double high,
                          double absent, double *value);
dw_status dw__json_flag(const json_t *object, const char *name, bool absent, bool *value);
/* *value NULL when absent; the object's own string, without control characters. */
dw_status dw__json_text(const json_t *object, const char *name, const char **value);

/* Appends the text of `json`, indented by two as Python's json module does it. Numbers keep their value: reals have
 * as many digits as that takes. */
dw_status dw__json_write(const json_t *json, dw__text *out);
/* The same as a string of the caller's, to be freed with dw__free. */
dw_status dw__json_string(const json_t *json, char **text);

#endif
