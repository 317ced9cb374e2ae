/* Reads JSON from untrusted sources with jansson, whose memory comes from dw__malloc. */
#ifndef DW_BASE_JSON_H
#define DW_BASE_JSON_H

#include "base/base.h"
#include <jansson.h>

/* Limits that are checked before a document is parsed: a megabyte of "[[[[" or "0,0,0," becomes many
 * megabytes of nodes. */
typedef struct dw__json_limits {
    int depth;     /* levels of nested arrays and objects */
    size_t values; /* elements and members of all of them */
} dw__json_limits;

/* Returns DW_PARSE for text that is not JSON (with line and column), a repeated key in one object, or an
 * exceeded limit. The message begins with `what`. The root is an object or an array; release it with
 * json_decref. */
dw_status dw__json_parse(const char *what, const char *text, size_t bytes, dw__json_limits limits,
                         json_t **root);
/* Returns "an object" ... "null", or "missing" for NULL. */
const char *dw__json_kind(const json_t *json);
/* Returns DW_PARSE with "WHAT is a string; expected EXPECTED". */
dw_status dw__json_wrong_kind(const char *what, const json_t *json, const char *expected);
#define dw__json_wrong_kind(...) dw__not_ok((dw__json_wrong_kind)(__VA_ARGS__))
/* True if the text has no control characters and may be shown. */
bool dw__json_is_plain(const char *text);

/* ---- fields of an object. DW_PARSE names the field, what it is, and what was expected. ------------------- */

/* Returns NULL if the member is absent or null. */
const json_t *dw__json_member(const json_t *object, const char *name);
/* `absent` is the value of a missing field. If it is negative, the field is required. */
dw_status dw__json_integer(const json_t *object, const char *name, int64_t low, int64_t high,
                           int64_t absent, int64_t *value);
/* As dw__json_integer. If `absent` is NaN, the field is required. */
dw_status dw__json_number(const json_t *object, const char *name, double low, double high,
                          double absent, double *value);
dw_status dw__json_flag(const json_t *object, const char *name, bool absent, bool *value);
/* Sets *value to the object's own string, which has no control characters, or to NULL if it is absent. */
dw_status dw__json_text(const json_t *object, const char *name, const char **value);

/* Appends the text of `json`, indented by two as by Python's json module. Numbers keep their value: reals get
 * as many digits as that needs. */
dw_status dw__json_write(const json_t *json, dw__text *out);
/* As dw__json_write, into a string that the caller frees with dw__free. */
dw_status dw__json_string(const json_t *json, char **text);

#endif
