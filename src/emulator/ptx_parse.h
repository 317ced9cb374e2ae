/* State shared by the two halves of the parser: declarations (ptx_parse.c) and function bodies (ptx_code.c). */
#ifndef DW_PTX_PARSE_H
#define DW_PTX_PARSE_H

#include "emulator/ptx_lex.h"

/* A name refers to the declaration in the innermost enclosing block. A label may be used before its declaration. */
typedef struct dw__ptx_symbol {
    enum {
        DW__SYMBOL_RANGE,
        DW__SYMBOL_REGISTER,
        DW__SYMBOL_VARIABLE,
        DW__SYMBOL_LABEL,
        DW__SYMBOL_FUNCTION
    } kind;
    dw__ptx_type type;
    uint32_t number; /* register, instruction, or the number of registers in a range */
    const dw__ptx_variable *variable;
    /* Number of registers, from `number` on, that form one vector; 1 if it is no vector. */
    int vector;
} dw__ptx_symbol;

typedef struct dw__ptx_scope {
    struct dw__ptx_scope *parent;
    dw__map *names; /* indexes into the parser's symbols; created on first use */
    size_t first_pending;
} dw__ptx_scope;

typedef struct dw__ptx_parser {
    dw__ptx_lexer lex;
    dw__ptx_module *module;
    dw__arena *arena;
    /* The function whose body is being read; NULL outside of functions. */
    dw__ptx_function *function;
    dw__ptx_scope *scope;
    struct {
        dw__ptx_symbol *items;
        size_t count, capacity;
    } symbols;
    struct {
        dw__ptx_operand **items;
        size_t count, capacity;
    } pending;         /* operands with names that are not declared yet */
    uint32_t location; /* from the function's last .loc */
    int depth;         /* nesting of blocks, and of vectors within operands */
} dw__ptx_parser;

#define DW__PTX_MAX_DEPTH 64

dw_status dw__ptx_declare(dw__ptx_parser *p, const char *name, const dw__ptx_symbol *symbol);
/* Returns NULL if the name is not declared. Creates a register of a range on first use, which can fail: see *status. */
const dw__ptx_symbol *dw__ptx_lookup(dw__ptx_parser *p, const char *name, dw_status *status);
/* Reads a declaration after its ".", to the end of its ";". */
dw_status dw__ptx_declaration(dw__ptx_parser *p, dw__ptx_space space, bool external);
/* Interprets the word after a "." as a state space. */
bool dw__ptx_space_named(const dw__ptx_lexer *lex, dw__ptx_space *space);
/* Reads a body from "{" to the matching "}". */
dw_status dw__ptx_body(dw__ptx_parser *p);
void *dw__ptx_copy(dw__arena *arena, const void *items, size_t bytes);

#endif
