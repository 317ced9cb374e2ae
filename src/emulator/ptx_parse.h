/* Between the halves of the parser: declarations (ptx_parse.c) and what a function does (ptx_code.c). */
#ifndef DW_PTX_PARSE_H
#define DW_PTX_PARSE_H

#include "emulator/ptx_lex.h"

/* A name means what the innermost block that declares it says; a label may be used before it stands. */
typedef struct dw__ptx_symbol {
    enum {
        DW__SYMBOL_RANGE,
        DW__SYMBOL_REGISTER,
        DW__SYMBOL_VARIABLE,
        DW__SYMBOL_LABEL,
        DW__SYMBOL_FUNCTION
    } kind;
    dw__ptx_type type;
    uint32_t number; /* register, instruction; how many registers a range has */
    const dw__ptx_variable *variable;
    int vector; /* of registers: how many from `number` on are one vector; 1: it is none */
} dw__ptx_symbol;

typedef struct dw__ptx_scope {
    struct dw__ptx_scope *parent;
    dw__map *names; /* index into the parser's symbols; made when first needed */
    size_t first_pending;
} dw__ptx_scope;

typedef struct dw__ptx_parser {
    dw__ptx_lexer lex;
    dw__ptx_module *module;
    dw__arena *arena;
    dw__ptx_function *function; /* whose body is read; NULL outside */
    dw__ptx_scope *scope;
    struct {
        dw__ptx_symbol *items;
        size_t count, capacity;
    } symbols;
    struct {
        dw__ptx_operand **items;
        size_t count, capacity;
    } pending;         /* operands that name what has not been declared yet */
    uint32_t location; /* by the last .loc of the function */
    int depth;         /* of blocks and of vectors within operands */
} dw__ptx_parser;

#define DW__PTX_MAX_DEPTH 64

dw_status dw__ptx_declare(dw__ptx_parser *p, const char *name, const dw__ptx_symbol *symbol);
/* NULL: not declared. A register of a range comes into being here, and *status may then be a failure. */
const dw__ptx_symbol *dw__ptx_lookup(dw__ptx_parser *p, const char *name, dw_status *status);
/* "." has been read: a space and what it declares, to the end of its ";". */
dw_status dw__ptx_declaration(dw__ptx_parser *p, dw__ptx_space space, bool external);
/* The word after a "." as a space. */
bool dw__ptx_space_named(const dw__ptx_lexer *lex, dw__ptx_space *space);
/* From "{" to its "}". */
dw_status dw__ptx_body(dw__ptx_parser *p);
void *dw__ptx_copy(dw__arena *arena, const void *items, size_t bytes);

#endif
