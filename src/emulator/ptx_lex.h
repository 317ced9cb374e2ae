/* Tokens of PTX text: words, numbers and punctuation, each with its line. */
#ifndef DW_PTX_LEX_H
#define DW_PTX_LEX_H

#include "emulator/ptx.h"

typedef enum dw__ptx_token {
    DW__PTX_END,
    DW__PTX_WORD,   /* name, %name, $name */
    DW__PTX_WHOLE,  /* an integer: `integer` */
    DW__PTX_REAL32, /* 0f...: `bits` */
    DW__PTX_REAL64, /* 0d..., 1.5: `bits` */
    DW__PTX_STRING, /* without its quotes */
    DW__PTX_MARK,   /* one character: `mark` */
} dw__ptx_token;

typedef struct dw__ptx_lexer {
    const char *begin, *at, *end;
    const char *name; /* of the module, for messages */
    int line, token_line;
    dw__ptx_token token;
    const char *text; /* of the token */
    size_t length;
    uint64_t integer, bits;
    char mark;
} dw__ptx_lexer;

dw_status dw__ptx_next(dw__ptx_lexer *lex);
/* Reads a modifier of an opcode (".modifier") if `mark` follows the current token immediately, and moves past it.
 * *text is the modifier with its "::" parts; *length is 0 if there is none. */
dw_status dw__ptx_modifier(dw__ptx_lexer *lex, const char **text, size_t *length);
/* Fails with DW_PARSE (or `status`) and a message that names the line of the token. */
dw_status dw__ptx_fail_at(const dw__ptx_lexer *lex, dw_status status, int line, const char *format,
                          ...) DW_PRINTF(4, 5);
#define dw__ptx_fail_at(...) dw__not_ok((dw__ptx_fail_at)(__VA_ARGS__))
#define dw__ptx_fail(lex, ...) dw__ptx_fail_at(lex, DW_PARSE, (lex)->token_line, __VA_ARGS__)

static inline bool dw__ptx_is_mark(const dw__ptx_lexer *lex, char mark) {
    return lex->token == DW__PTX_MARK && lex->mark == mark;
}
bool dw__ptx_is_word(const dw__ptx_lexer *lex, const char *word);
/* Fails unless the token is this mark; moves past it. */
dw_status dw__ptx_expect(dw__ptx_lexer *lex, char mark);
/* Copies a word into the arena and moves past it. */
dw_status dw__ptx_take_word(dw__ptx_lexer *lex, dw__arena *arena, const char *what,
                            const char **word);

#endif
