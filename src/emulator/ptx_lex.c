#include "emulator/ptx_lex.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXCERPT_BYTES 100

dw_status(dw__ptx_fail_at)(const dw__ptx_lexer *lex, dw_status status, int line, const char *format,
                           ...) {
    char what[256], excerpt[EXCERPT_BYTES + 4] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);

    const char *from = lex->begin;
    for (int at = 1; at < line && from < lex->end; from++)
        if (*from == '\n') at++;
    while (from < lex->end && (*from == ' ' || *from == '\t')) from++;
    size_t length = 0;
    while (from + length < lex->end && from[length] != '\n' && from[length] != '\r') length++;
    bool cut = length > EXCERPT_BYTES;
    if (cut) length = EXCERPT_BYTES;
    memcpy(excerpt, from, length);
    memcpy(excerpt + length, cut ? "..." : "", cut ? 4 : 1);
    return dw__fail(status, "%s, PTX line %d: %s: %s", lex->name, line, what, excerpt);
}

static bool is_name_start(char c) {
    return isalpha((unsigned char)c) || c == '_' || c == '$' || c == '%';
}
static bool is_name_part(char c) { return isalnum((unsigned char)c) || c == '_' || c == '$'; }

static dw_status skip_blanks(dw__ptx_lexer *lex) {
    while (lex->at < lex->end) {
        char c = *lex->at, next = lex->at + 1 < lex->end ? lex->at[1] : '\0';
        if (c == '\n') lex->line++;
        if (isspace((unsigned char)c)) {
            lex->at++;
        } else if (c == '/' && next == '/') {
            while (lex->at < lex->end && *lex->at != '\n') lex->at++;
        } else if (c == '/' && next == '*') {
            int first = lex->line;
            for (lex->at += 2;; lex->at++) {
                if (lex->at + 1 >= lex->end)
                    return dw__ptx_fail_at(lex, DW_PARSE, first, "unterminated comment");
                if (*lex->at == '\n') lex->line++;
                if (lex->at[0] == '*' && lex->at[1] == '/') break;
            }
            lex->at += 2;
        } else {
            break;
        }
    }
    return DW_OK;
}

/* Reads digits of `base` from `at` on; *rest points past the last one. */
static dw_status read_digits(dw__ptx_lexer *lex, const char *at, unsigned base, uint64_t *value,
                             const char **rest) {
    const char *first = at;
    *value = 0;
    for (; at < lex->end; at++) {
        int c = tolower((unsigned char)*at);
        unsigned digit = c >= '0' && c <= '9'   ? (unsigned)(c - '0')
                         : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a' + 10)
                                                : 99;
        if (digit >= base) break;
        if (*value > (UINT64_MAX - digit) / base)
            return dw__ptx_fail(lex, "number exceeds 64 bits");
        *value = *value * base + digit;
    }
    if (at == first) return dw__ptx_fail(lex, "a number without digits");
    *rest = at;
    return DW_OK;
}

static dw_status read_decimal_real(dw__ptx_lexer *lex, const char *first) {
    char copy[64];
    size_t length = 0;
    while (
        first + length < lex->end && length < sizeof copy - 1 &&
        (isdigit((unsigned char)first[length]) || (length > 0 && strchr(".eE+-", first[length])))) {
        copy[length] = first[length];
        length++;
    }
    copy[length] = '\0';
    char *rest;
    double value = strtod(copy, &rest);
    if (rest == copy) return dw__ptx_fail(lex, "not a number");
    memcpy(&lex->bits, &value, sizeof value);
    lex->at = first + (rest - copy);
    lex->token = DW__PTX_REAL64;
    return DW_OK;
}

static dw_status read_number(dw__ptx_lexer *lex) {
    const char *first = lex->at, *rest = first;
    char second = first + 1 < lex->end ? (char)tolower((unsigned char)first[1]) : '\0';
    lex->token = DW__PTX_WHOLE;
    if (*first == '0' && (second == 'f' || second == 'd')) {
        DW_RETURN_IF_FAILED(read_digits(lex, first + 2, 16, &lex->bits, &rest));
        if (rest - first != (second == 'f' ? 10 : 18))
            return dw__ptx_fail(lex, "0%c must have %d hexadecimal digits", second,
                                second == 'f' ? 8 : 16);
        lex->token = second == 'f' ? DW__PTX_REAL32 : DW__PTX_REAL64;
        lex->at = rest;
        return DW_OK;
    }
    if (*first == '0' && (second == 'x' || second == 'b'))
        DW_RETURN_IF_FAILED(
            read_digits(lex, first + 2, second == 'x' ? 16 : 2, &lex->integer, &rest));
    else
        DW_RETURN_IF_FAILED(read_digits(lex, first, 10, &lex->integer, &rest));
    if (rest + 1 < lex->end &&
        ((*rest == '.' && isdigit((unsigned char)rest[1])) || *rest == 'e' || *rest == 'E'))
        return read_decimal_real(lex, first);
    if (*first == '0' && rest - first > 1 && isdigit((unsigned char)second)) /* octal, as in C */
        DW_RETURN_IF_FAILED(read_digits(lex, first, 8, &lex->integer, &rest));
    if (rest < lex->end && *rest == 'U') rest++;
    lex->at = rest;
    return DW_OK;
}

dw_status dw__ptx_next(dw__ptx_lexer *lex) {
    DW_RETURN_IF_FAILED(skip_blanks(lex));
    lex->token_line = lex->line;
    lex->text = lex->at;
    lex->length = 0;
    if (lex->at >= lex->end) {
        lex->token = DW__PTX_END;
        return DW_OK;
    }
    char c = *lex->at;
    if (is_name_start(c)) {
        lex->token = DW__PTX_WORD;
        do lex->at++;
        while (lex->at < lex->end && is_name_part(*lex->at));
    } else if (isdigit((unsigned char)c)) {
        DW_RETURN_IF_FAILED(read_number(lex));
    } else if (c == '"') {
        lex->token = DW__PTX_STRING;
        lex->text = ++lex->at;
        while (lex->at < lex->end && *lex->at != '"' && *lex->at != '\n') lex->at++;
        if (lex->at >= lex->end || *lex->at != '"') return dw__ptx_fail(lex, "unterminated string");
        lex->length = (size_t)(lex->at++ - lex->text);
        return DW_OK;
    } else {
        lex->token = DW__PTX_MARK;
        lex->mark = c;
        lex->at++;
    }
    lex->length = (size_t)(lex->at - lex->text);
    return DW_OK;
}

dw_status dw__ptx_modifier(dw__ptx_lexer *lex, const char **text, size_t *length) {
    *length = 0;
    if (lex->at >= lex->end || *lex->at != '.') return DW_OK;
    const char *first = ++lex->at;
    while (lex->at < lex->end) {
        if (is_name_part(*lex->at))
            lex->at++;
        else if (lex->at + 2 < lex->end && lex->at[0] == ':' && lex->at[1] == ':' &&
                 is_name_part(lex->at[2]))
            lex->at += 2;
        else
            break;
    }
    *text = first;
    *length = (size_t)(lex->at - first);
    return *length > 0 ? DW_OK : dw__ptx_fail(lex, "an opcode must not end in \".\"");
}

bool dw__ptx_is_word(const dw__ptx_lexer *lex, const char *word) {
    return lex->token == DW__PTX_WORD && lex->length == strlen(word) &&
           memcmp(lex->text, word, lex->length) == 0;
}

dw_status dw__ptx_expect(dw__ptx_lexer *lex, char mark) {
    if (!dw__ptx_is_mark(lex, mark)) return dw__ptx_fail(lex, "expected \"%c\"", mark);
    return dw__ptx_next(lex);
}

dw_status dw__ptx_take_word(dw__ptx_lexer *lex, dw__arena *arena, const char *what,
                            const char **word) {
    if (lex->token != DW__PTX_WORD) return dw__ptx_fail(lex, "expected %s", what);
    char *copy = dw__arena_alloc(arena, lex->length + 1);
    if (!copy) return dw__fail_memory("a name of a PTX module", lex->length + 1);
    memcpy(copy, lex->text, lex->length);
    *word = copy;
    return dw__ptx_next(lex);
}
