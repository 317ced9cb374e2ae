/* The second half of the parser: function bodies, that is blocks, labels, instructions and their operands. */
#include "emulator/ptx_parse.h"
#include <string.h>

#define MAX_OPERANDS 600
#define MAX_MODIFIERS 32

static dw_status read_operand(dw__ptx_parser *p, dw__ptx_operand *operand);

/* ---- operands ------------------------------------------------------------------------------ */

static dw_status read_items(dw__ptx_parser *p, char close, dw__ptx_operand *list) {
    struct {
        dw__ptx_operand *items;
        size_t count, capacity;
    } items = {0};
    dw_status status = DW_OK;
    if (++p->depth > DW__PTX_MAX_DEPTH) return dw__ptx_fail(&p->lex, "operands nested too deeply");
    while (!dw__ptx_is_mark(&p->lex, close)) {
        dw__ptx_operand item;
        DW_TRY(read_operand(p, &item));
        DW_TRY(DW_PUSH(&items, item));
        if (items.count > MAX_OPERANDS)
            DW_TRY(dw__ptx_fail(&p->lex, "more than %d operands", MAX_OPERANDS));
        if (!dw__ptx_is_mark(&p->lex, ',')) break;
        DW_TRY(dw__ptx_next(&p->lex));
    }
    DW_TRY(dw__ptx_expect(&p->lex, close));
    list->items = dw__ptx_copy(p->arena, items.items, items.count * sizeof *items.items);
    list->count = (int)items.count;
    if (!list->items)
        DW_TRY(dw__fail_memory("operands of a PTX module", items.count * sizeof *items.items));
    p->depth--;
cleanup:
    dw__free(items.items);
    return status;
}

/* Reads %tid.x or %clock64: a special register, or a register that is not declared yet. */
static dw_status read_special(dw__ptx_parser *p, dw__ptx_operand *operand) {
    operand->kind = DW__PTX_SPECIAL;
    if (!dw__ptx_is_mark(&p->lex, '.')) return DW_OK;
    DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    if (p->lex.token != DW__PTX_WORD || p->lex.length != 1 || !strchr("xyzw", p->lex.text[0]))
        return dw__ptx_fail(&p->lex, "expected a component of %s", operand->name);
    operand->component = p->lex.text[0];
    return dw__ptx_next(&p->lex);
}

/* Returns the component, of `count`, that the letter after a "." names; -1 if there is none. */
static int component_named(const dw__ptx_parser *p, int count) {
    static const char *const letters[] = {"xyzw", "rgba"};
    if (p->lex.token != DW__PTX_WORD || p->lex.length != 1) return -1;
    for (int i = 0; i < 2; i++) {
        const char *at = strchr(letters[i], p->lex.text[0]);
        if (at && at - letters[i] < count) return (int)(at - letters[i]);
    }
    return -1;
}

/* v.y is a register, v the vector of all components. */
static dw_status read_register(dw__ptx_parser *p, const dw__ptx_symbol *symbol,
                               dw__ptx_operand *operand) {
    const uint32_t first = symbol->number;
    const int count = symbol->vector;
    operand->kind = DW__PTX_REGISTER;
    operand->number = first;
    if (count == 1) return DW_OK;
    if (dw__ptx_is_mark(&p->lex, '.')) {
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        const int component = component_named(p, count);
        if (component < 0)
            return dw__ptx_fail(&p->lex, "expected a component of %s, a vector of %d",
                                operand->name, count);
        operand->number += (uint32_t)component;
        return dw__ptx_next(&p->lex);
    }
    operand->kind = DW__PTX_VECTOR;
    operand->count = count;
    operand->items = dw__arena_alloc(p->arena, (size_t)count * sizeof *operand->items);
    if (!operand->items) return dw__fail_memory("operands of a PTX module", (size_t)count);
    for (int i = 0; i < count; i++)
        operand->items[i] = (dw__ptx_operand){
            .kind = DW__PTX_REGISTER, .number = first + (uint32_t)i, .name = operand->name};
    return DW_OK;
}

static dw_status read_offset(dw__ptx_parser *p, int64_t *offset) {
    if (!dw__ptx_is_mark(&p->lex, '+') && !dw__ptx_is_mark(&p->lex, '-')) return DW_OK;
    bool negative = dw__ptx_is_mark(&p->lex, '-');
    DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    if (dw__ptx_is_mark(&p->lex, '-')) {
        negative = !negative;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    if (p->lex.token != DW__PTX_WHOLE) return dw__ptx_fail(&p->lex, "expected an offset");
    *offset = (int64_t)(negative ? 0 - p->lex.integer : p->lex.integer);
    return dw__ptx_next(&p->lex);
}

static dw_status read_name(dw__ptx_parser *p, dw__ptx_operand *operand) {
    dw_status status;
    DW_RETURN_IF_FAILED(dw__ptx_take_word(&p->lex, p->arena, "an operand", &operand->name));
    if (strcmp(operand->name, "_") == 0) {
        operand->kind = DW__PTX_SINK;
        return DW_OK;
    }
    const dw__ptx_symbol *symbol = dw__ptx_lookup(p, operand->name, &status);
    DW_RETURN_IF_FAILED(status);
    if (!symbol) {
        if (operand->name[0] == '%') return read_special(p, operand);
        operand->kind = DW__PTX_LABEL; /* not declared yet */
        operand->number = UINT32_MAX;
        return DW_OK;
    }
    switch (symbol->kind) {
    case DW__SYMBOL_REGISTER: return read_register(p, symbol, operand);
    case DW__SYMBOL_VARIABLE:
        operand->kind = DW__PTX_VARIABLE;
        operand->variable = symbol->variable;
        return read_offset(p, &operand->integer);
    case DW__SYMBOL_LABEL:
        operand->kind = DW__PTX_LABEL;
        operand->number = symbol->number;
        return DW_OK;
    case DW__SYMBOL_FUNCTION: operand->kind = DW__PTX_FUNCTION; return DW_OK;
    case DW__SYMBOL_RANGE: break;
    }
    return dw__ptx_fail(&p->lex, "\"%s\" cannot be an operand", operand->name);
}

static dw_status read_number(dw__ptx_parser *p, dw__ptx_operand *operand) {
    bool negative = dw__ptx_is_mark(&p->lex, '-');
    if (negative) DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    switch (p->lex.token) {
    case DW__PTX_WHOLE:
        operand->kind = DW__PTX_INTEGER;
        operand->integer = (int64_t)(negative ? 0 - p->lex.integer : p->lex.integer);
        break;
    case DW__PTX_REAL32:
        operand->kind = DW__PTX_SINGLE;
        operand->bits = p->lex.bits ^ (negative ? 0x80000000u : 0);
        break;
    case DW__PTX_REAL64:
        operand->kind = DW__PTX_DOUBLE;
        operand->bits = p->lex.bits ^ (negative ? (uint64_t)1 << 63 : 0);
        break;
    default: return dw__ptx_fail(&p->lex, "expected an operand");
    }
    return dw__ptx_next(&p->lex);
}

/* [%rd1+16], [name], [%rd1, {%r2, %r3}] */
static dw_status read_address(dw__ptx_parser *p, dw__ptx_operand *operand) {
    operand->kind = DW__PTX_ADDRESS;
    DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    dw__ptx_operand base = {0};
    if (p->lex.token == DW__PTX_WORD)
        DW_RETURN_IF_FAILED(read_name(p, &base));
    else
        DW_RETURN_IF_FAILED(read_number(p, &base));
    DW_RETURN_IF_FAILED(read_offset(p, &operand->integer));
    if (dw__ptx_is_mark(&p->lex, ',')) {
        dw__ptx_operand rest = {0};
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(read_items(p, ']', &rest));
        operand->count = rest.count + 1;
        operand->items = dw__arena_alloc(p->arena, (size_t)operand->count * sizeof *operand->items);
        if (!operand->items) return dw__fail_memory("operands of a PTX module", 0);
        memcpy(operand->items + 1, rest.items, (size_t)rest.count * sizeof *rest.items);
    } else {
        DW_RETURN_IF_FAILED(dw__ptx_expect(&p->lex, ']'));
        operand->count = 1;
        operand->items = dw__arena_alloc(p->arena, sizeof *operand->items);
        if (!operand->items) return dw__fail_memory("operands of a PTX module", 0);
    }
    operand->items[0] = base;
    return DW_OK;
}

static dw_status read_operand(dw__ptx_parser *p, dw__ptx_operand *operand) {
    *operand = (dw__ptx_operand){0};
    if (dw__ptx_is_mark(&p->lex, '!')) {
        operand->negated = true;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    if (dw__ptx_is_mark(&p->lex, '[')) return read_address(p, operand);
    if (dw__ptx_is_mark(&p->lex, '{') || dw__ptx_is_mark(&p->lex, '(')) {
        char close = p->lex.mark == '{' ? '}' : ')';
        operand->kind = DW__PTX_VECTOR;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        return read_items(p, close, operand);
    }
    if (p->lex.token != DW__PTX_WORD) return read_number(p, operand);
    DW_RETURN_IF_FAILED(read_name(p, operand));
    if (dw__ptx_is_mark(&p->lex, '|')) {
        dw__ptx_operand *also = dw__arena_alloc(p->arena, sizeof *also);
        if (!also) return dw__fail_memory("operands of a PTX module", sizeof *also);
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(read_name(p, also));
        operand->also = also;
    }
    return DW_OK;
}

/* ---- instructions -------------------------------------------------------------------------- */

static dw_status note_pending(dw__ptx_parser *p, dw__ptx_operand *operand) {
    if (operand->kind == DW__PTX_LABEL && operand->number == UINT32_MAX)
        return DW_PUSH(&p->pending, operand);
    for (int i = 0; i < operand->count; i++)
        DW_RETURN_IF_FAILED(note_pending(p, &operand->items[i]));
    return DW_OK;
}

static dw_status read_guard(dw__ptx_parser *p, dw__ptx_instruction *made) {
    dw__ptx_operand guard = {0};
    DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    DW_RETURN_IF_FAILED(read_operand(p, &guard));
    if (guard.kind != DW__PTX_REGISTER ||
        p->function->registers.items[guard.number].type.bytes != 0)
        return dw__ptx_fail(&p->lex, "the guard must be a predicate");
    made->guard = guard.number;
    made->guard_negated = guard.negated;
    return DW_OK;
}

/* The current token is the opcode's first word; modifiers follow without blanks. */
static dw_status read_opcode(dw__ptx_parser *p, dw__ptx_instruction *made) {
    const char *modifiers[MAX_MODIFIERS], *text, *first = p->lex.text;
    size_t length, opcode_length = p->lex.length;
    for (;;) {
        DW_RETURN_IF_FAILED(dw__ptx_modifier(&p->lex, &text, &length));
        if (length == 0) break;
        if (made->modifier_count == MAX_MODIFIERS)
            return dw__ptx_fail(&p->lex, "more than %d modifiers", MAX_MODIFIERS);
        char *copy = dw__arena_alloc(p->arena, length + 1);
        if (!copy) return dw__fail_memory("an opcode", length);
        memcpy(copy, text, length);
        modifiers[made->modifier_count++] = copy;
    }
    char *opcode = dw__arena_alloc(p->arena, opcode_length + 1);
    char *spelling = dw__arena_alloc(p->arena, (size_t)(p->lex.at - first) + 1);
    made->modifiers =
        dw__ptx_copy(p->arena, modifiers, (size_t)made->modifier_count * sizeof *modifiers);
    if (!opcode || !spelling || !made->modifiers)
        return dw__fail_memory("an opcode", opcode_length);
    memcpy(opcode, first, opcode_length);
    memcpy(spelling, first, (size_t)(p->lex.at - first));
    made->opcode = opcode;
    made->spelling = spelling;
    return dw__ptx_next(&p->lex);
}

static dw_status read_instruction(dw__ptx_parser *p) {
    dw__ptx_instruction made = {
        .guard = DW__PTX_NO_GUARD, .line = p->lex.token_line, .location = p->location};
    dw__ptx_operand operands = {0};
    if (dw__ptx_is_mark(&p->lex, '@')) DW_RETURN_IF_FAILED(read_guard(p, &made));
    if (p->lex.token != DW__PTX_WORD) return dw__ptx_fail(&p->lex, "expected an instruction");
    DW_RETURN_IF_FAILED(read_opcode(p, &made));
    DW_RETURN_IF_FAILED(read_items(p, ';', &operands));
    made.operands = operands.items;
    made.operand_count = operands.count;
    for (int i = 0; i < made.operand_count; i++)
        DW_RETURN_IF_FAILED(note_pending(p, &made.operands[i]));
    return DW_PUSH(&p->function->code, made);
}

/* ---- blocks -------------------------------------------------------------------------------- */

/* Returns the number of a location that an `inlined_at` names. If it was named several times, the newest one counts,
 * as in the ISA. */
#define MOST_SEARCHED 10000
static uint32_t location_named(const dw__ptx_module *module, const dw__ptx_location *named) {
    const size_t count = module->locations.count;
    for (size_t i = count; i > 1 && count - i < MOST_SEARCHED; i--) {
        const dw__ptx_location *other = &module->locations.items[i - 1];
        if (other->file == named->file && other->line == named->line &&
            other->column == named->column)
            return (uint32_t)(i - 1);
    }
    return 0;
}

static dw_status add_location(dw__ptx_module *module, const dw__ptx_location *location,
                              uint32_t *index) {
    if (module->locations.count == 0)
        DW_RETURN_IF_FAILED(DW_PUSH(&module->locations, (dw__ptx_location){0}));
    *index = (uint32_t)module->locations.count;
    return DW_PUSH(&module->locations, *location);
}

/* Reads FILE LINE COLUMN and moves past them. */
static dw_status read_position(dw__ptx_parser *p, dw__ptx_location *position) {
    int *const numbers[3] = {&position->file, &position->line, &position->column};
    for (int i = 0; i < 3; i++) {
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        if (p->lex.token != DW__PTX_WHOLE || p->lex.integer > INT32_MAX)
            return dw__ptx_fail(&p->lex, "expected FILE LINE COLUMN");
        *numbers[i] = (int)p->lex.integer;
    }
    return dw__ptx_next(&p->lex);
}

/* .loc 1 23 5 [, function_name LABEL[+4], inlined_at 1 20 3] */
static dw_status read_loc(dw__ptx_parser *p) {
    dw__ptx_location here = {0}, caller;
    DW_RETURN_IF_FAILED(read_position(p, &here));
    while (dw__ptx_is_mark(&p->lex, ',')) {
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        if (dw__ptx_is_word(&p->lex, "inlined_at")) {
            DW_RETURN_IF_FAILED(read_position(p, &caller));
            here.caller = location_named(p->module, &caller);
            if (here.caller == 0 && caller.line > 0)
                DW_RETURN_IF_FAILED(add_location(p->module, &caller, &here.caller));
        } else if (dw__ptx_is_word(&p->lex, "function_name")) {
            do DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
            while (!dw__ptx_is_mark(&p->lex, ',') && p->lex.token != DW__PTX_END);
        } else {
            return dw__ptx_fail(&p->lex, "expected function_name or inlined_at");
        }
    }
    return add_location(p->module, &here, &p->location);
}

static dw_status skip_statement(dw__ptx_parser *p) {
    while (!dw__ptx_is_mark(&p->lex, ';') && p->lex.token != DW__PTX_END)
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    return dw__ptx_expect(&p->lex, ';');
}

static dw_status read_directive(dw__ptx_parser *p) {
    dw__ptx_space space;
    DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    if (dw__ptx_is_word(&p->lex, "loc")) return read_loc(p);
    /* The latter two belong to indirect calls and branches, which are rejected at the call or branch. */
    if (dw__ptx_is_word(&p->lex, "pragma") || dw__ptx_is_word(&p->lex, "callprototype") ||
        dw__ptx_is_word(&p->lex, "calltargets"))
        return skip_statement(p);
    if (dw__ptx_space_named(&p->lex, &space)) return dw__ptx_declaration(p, space, false);
    return dw__ptx_fail_at(&p->lex, DW_UNSUPPORTED, p->lex.token_line,
                           "directive \".%.*s\" is not supported", (int)p->lex.length, p->lex.text);
}

/* Resolves the pending labels of this block; leaves the others to the enclosing block. */
static dw_status close_scope(dw__ptx_parser *p, dw__ptx_scope *scope) {
    size_t kept = scope->first_pending;
    for (size_t i = kept; i < p->pending.count; i++) {
        dw__ptx_operand *operand = p->pending.items[i];
        uint32_t index;
        if (scope->names && dw__map_get(scope->names, operand->name, &index) &&
            p->symbols.items[index].kind == DW__SYMBOL_LABEL)
            operand->number = p->symbols.items[index].number;
        else
            p->pending.items[kept++] = operand;
    }
    p->pending.count = kept;
    return DW_OK;
}

static dw_status read_block(dw__ptx_parser *p);

/* Compilers put a space between the name of a prototype and its colon. */
static bool before_colon(const dw__ptx_lexer *lex) {
    const char *at = lex->at;
    while (at < lex->end && (*at == ' ' || *at == '\t')) at++;
    return at < lex->end && *at == ':';
}

static dw_status read_statement(dw__ptx_parser *p) {
    if (dw__ptx_is_mark(&p->lex, '{')) return read_block(p);
    if (dw__ptx_is_mark(&p->lex, '.')) return read_directive(p);
    if (dw__ptx_is_mark(&p->lex, ';')) return dw__ptx_next(&p->lex);
    if (p->lex.token == DW__PTX_WORD && before_colon(&p->lex)) {
        const char *name;
        DW_RETURN_IF_FAILED(dw__ptx_take_word(&p->lex, p->arena, "a label", &name));
        uint32_t index;
        if (p->scope->names && dw__map_get(p->scope->names, name, &index))
            return dw__ptx_fail(&p->lex, "label \"%s\" is declared twice", name);
        DW_RETURN_IF_FAILED(
            dw__ptx_declare(p, name,
                            &(dw__ptx_symbol){.kind = DW__SYMBOL_LABEL,
                                              .number = (uint32_t)p->function->code.count}));
        return dw__ptx_next(&p->lex);
    }
    return read_instruction(p);
}

static dw_status read_block(dw__ptx_parser *p) {
    dw__ptx_scope scope = {.parent = p->scope, .first_pending = p->pending.count};
    dw_status status = DW_OK;
    int first = p->lex.token_line;
    if (++p->depth > DW__PTX_MAX_DEPTH) return dw__ptx_fail(&p->lex, "blocks nested too deeply");
    p->scope = &scope;
    DW_TRY(dw__ptx_expect(&p->lex, '{'));
    while (!dw__ptx_is_mark(&p->lex, '}')) {
        if (p->lex.token == DW__PTX_END)
            DW_TRY(dw__ptx_fail_at(&p->lex, DW_PARSE, first, "a block without \"}\""));
        DW_TRY(read_statement(p));
    }
    DW_TRY(dw__ptx_next(&p->lex));
    DW_TRY(close_scope(p, &scope));
    p->depth--;
cleanup:
    dw__map_destroy(scope.names);
    p->scope = scope.parent;
    return status;
}

dw_status dw__ptx_body(dw__ptx_parser *p) {
    p->pending.count = 0;
    DW_RETURN_IF_FAILED(read_block(p));
    if (p->pending.count > 0)
        return dw__fail(DW_PARSE, "%s, function %s: \"%s\" is not declared", p->lex.name,
                        p->function->name, p->pending.items[0]->name);
    /* A label at the very end needs an instruction to point at. */
    dw__ptx_instruction ret = {
        .opcode = "ret", .spelling = "ret", .guard = DW__PTX_NO_GUARD, .line = p->lex.line};
    return DW_PUSH(&p->function->code, ret);
}
