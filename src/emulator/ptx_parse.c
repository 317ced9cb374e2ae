/* The first half of the parser: modules, directives, variables and the heads of functions. */
#include "emulator/ptx_parse.h"
#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define MAX_BYTES ((uint64_t)1 << 32) /* of one variable */

void *dw__ptx_copy(dw__arena *arena, const void *items, size_t bytes) {
    void *copy = dw__arena_alloc(arena, bytes ? bytes : 1);
    if (copy && bytes) memcpy(copy, items, bytes);
    return copy;
}

/* ---- names --------------------------------------------------------------------------------- */

dw_status dw__ptx_declare(dw__ptx_parser *p, const char *name, const dw__ptx_symbol *symbol) {
    if (!p->scope->names && !(p->scope->names = dw__map_create()))
        return dw__fail_memory("names of a PTX module", 0);
    DW_RETURN_IF_FAILED(dw__map_set(p->scope->names, name, (uint32_t)p->symbols.count));
    return DW_PUSH(&p->symbols, *symbol);
}

/* The components of a vector are separate registers. */
static dw_status new_register(dw__ptx_parser *p, dw__ptx_scope *scope, const char *name,
                              dw__ptx_type type, int vector) {
    dw__ptx_symbol symbol = {DW__SYMBOL_REGISTER, type, (uint32_t)p->function->registers.count,
                             NULL, vector};
    for (int i = 0; i < vector; i++) {
        dw__ptx_register made = {vector == 1 ? dw__arena_strdup(p->arena, name)
                                             : dw__arena_printf(p->arena, "%s.%c", name, "xyzw"[i]),
                                 type};
        if (!made.name) return dw__fail_memory("a name of a PTX module", strlen(name));
        DW_RETURN_IF_FAILED(DW_PUSH(&p->function->registers, made));
    }
    dw__ptx_scope *inner = p->scope;
    p->scope = scope;
    dw_status status = dw__ptx_declare(p, name, &symbol);
    p->scope = inner;
    return status;
}

/* Looks up "%r12" in a range "%r" with more than 12 registers. The scope holds the range under the name "%r<". */
static bool of_range(const dw__ptx_parser *p, const dw__ptx_scope *scope, const char *name,
                     dw__ptx_type *type, int *vector) {
    char prefix[128];
    size_t length = strlen(name), digits = 0;
    while (digits < length && isdigit((unsigned char)name[length - 1 - digits])) digits++;
    if (digits == 0 || digits > 9 || length - digits + 2 > sizeof prefix) return false;
    if (digits > 1 && name[length - digits] == '0') return false;
    memcpy(prefix, name, length - digits);
    memcpy(prefix + length - digits, "<", 2);
    uint32_t index, number = 0;
    if (!dw__map_get(scope->names, prefix, &index)) return false;
    for (size_t at = length - digits; at < length; at++)
        number = number * 10 + (uint32_t)(name[at] - '0');
    *type = p->symbols.items[index].type;
    *vector = p->symbols.items[index].vector;
    return number < p->symbols.items[index].number;
}

const dw__ptx_symbol *dw__ptx_lookup(dw__ptx_parser *p, const char *name, dw_status *status) {
    *status = DW_OK;
    for (dw__ptx_scope *scope = p->scope; scope; scope = scope->parent) {
        uint32_t index;
        dw__ptx_type type;
        int vector;
        if (!scope->names) continue;
        if (dw__map_get(scope->names, name, &index)) return &p->symbols.items[index];
        if (p->function && of_range(p, scope, name, &type, &vector)) {
            *status = new_register(p, scope, name, type, vector);
            return *status == DW_OK ? &p->symbols.items[p->symbols.count - 1] : NULL;
        }
    }
    return NULL;
}

/* ---- declarations -------------------------------------------------------------------------- */

static const dw__ptx_type types[] = {
    {"pred", 0}, {"b8", 1},    {"u8", 1},     {"s8", 1},    {"b16", 2}, {"u16", 2},
    {"s16", 2},  {"f16", 2},   {"bf16", 2},   {"b32", 4},   {"u32", 4}, {"s32", 4},
    {"f32", 4},  {"f16x2", 4}, {"bf16x2", 4}, {"tf32", 4},  {"b64", 8}, {"u64", 8},
    {"s64", 8},  {"f64", 8},   {"b128", 16},  {"f32x2", 8},
};

bool dw__ptx_space_named(const dw__ptx_lexer *lex, dw__ptx_space *space) {
    static const char *const names[] = {"reg", "param", "local", "shared", "global", "const"};
    for (size_t i = 0; i < DW_COUNT(names); i++) {
        if (!dw__ptx_is_word(lex, names[i])) continue;
        *space = (dw__ptx_space)i;
        return true;
    }
    return false;
}

static dw_status read_whole(dw__ptx_parser *p, uint64_t most, const char *what, uint64_t *value) {
    if (p->lex.token != DW__PTX_WHOLE) return dw__ptx_fail(&p->lex, "expected %s", what);
    if (p->lex.integer > most)
        return dw__ptx_fail(&p->lex, "%s is %llu: expected at most %llu", what,
                            (unsigned long long)p->lex.integer, (unsigned long long)most);
    *value = p->lex.integer;
    return dw__ptx_next(&p->lex);
}

typedef struct declarator {
    dw__ptx_type type;
    uint32_t align;
    int vector;
} declarator;

/* Reads ".align 16 .v4 .b32 .ptr .global .align 1", the text between the space and the name. */
static dw_status read_declarator(dw__ptx_parser *p, declarator *d) {
    *d = (declarator){.vector = 1};
    while (dw__ptx_is_mark(&p->lex, '.')) {
        dw__ptx_space space;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        bool known = false;
        for (size_t i = 0; i < DW_COUNT(types) && !known; i++)
            if (dw__ptx_is_word(&p->lex, types[i].name)) d->type = types[i], known = true;
        if (dw__ptx_is_word(&p->lex, "align")) {
            uint64_t align = 0;
            DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
            DW_RETURN_IF_FAILED(read_whole(p, 1 << 20, "an alignment", &align));
            if (align == 0 || (align & (align - 1)))
                return dw__ptx_fail(&p->lex, "an alignment must be a power of two");
            /* An alignment after the type is that of the memory that a .ptr points to. */
            if (!d->type.name) d->align = (uint32_t)align;
            continue;
        }
        if (dw__ptx_is_word(&p->lex, "attribute")) {
            do DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
            while (!dw__ptx_is_mark(&p->lex, ')') && p->lex.token != DW__PTX_END);
            known = true;
        }
        if (dw__ptx_is_word(&p->lex, "v2")) d->vector = 2, known = true;
        if (dw__ptx_is_word(&p->lex, "v4")) d->vector = 4, known = true;
        if (dw__ptx_is_word(&p->lex, "ptr") || dw__ptx_space_named(&p->lex, &space)) known = true;
        if (!known)
            return dw__ptx_fail_at(&p->lex, DW_UNSUPPORTED, p->lex.token_line,
                                   "\".%.*s\" of a variable is not supported", (int)p->lex.length,
                                   p->lex.text);
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    return d->type.name ? DW_OK : dw__ptx_fail(&p->lex, "a variable without a type");
}

static dw_status read_registers(dw__ptx_parser *p, const declarator *d) {
    if (!p->function || p->function->declared_only)
        return dw__ptx_fail(&p->lex, "a register outside a function");
    if (d->vector != 1 && (d->type.bytes == 0 || d->type.bytes * d->vector > 16))
        return dw__ptx_fail(&p->lex, "a vector of %d registers of %s: must have at most 16 bytes",
                            d->vector, d->type.name);
    for (;;) {
        const char *name;
        DW_RETURN_IF_FAILED(dw__ptx_take_word(&p->lex, p->arena, "the name of a register", &name));
        if (dw__ptx_is_mark(&p->lex, '<')) {
            uint64_t count;
            DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
            DW_RETURN_IF_FAILED(read_whole(p, 100000000, "a number of registers", &count));
            DW_RETURN_IF_FAILED(dw__ptx_expect(&p->lex, '>'));
            char *key = dw__arena_printf(p->arena, "%s<", name);
            if (!key) return dw__fail_memory("a name of a PTX module", strlen(name));
            DW_RETURN_IF_FAILED(dw__ptx_declare(
                p, key,
                &(dw__ptx_symbol){DW__SYMBOL_RANGE, d->type, (uint32_t)count, NULL, d->vector}));
        } else {
            DW_RETURN_IF_FAILED(new_register(p, p->scope, name, d->type, d->vector));
        }
        if (!dw__ptx_is_mark(&p->lex, ',')) return DW_OK;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
}

typedef struct initial {
    dw__text bytes;
    dw__ptx_reference *references;
} initial;

/* Reads NAME, generic(NAME) or NAME+4. */
static dw_status read_reference(dw__ptx_parser *p, const dw__ptx_type *type, initial *value) {
    dw__ptx_reference *reference = dw__arena_alloc(p->arena, sizeof *reference);
    if (!reference) return dw__fail_memory("an address in a PTX module", sizeof *reference);
    if (type->bytes != 8)
        return dw__ptx_fail_at(&p->lex, DW_UNSUPPORTED, p->lex.token_line,
                               "an address must have 8 bytes; other sizes are not supported");
    reference->offset = value->bytes.length;
    bool generic = dw__ptx_is_word(&p->lex, "generic");
    DW_RETURN_IF_FAILED(dw__ptx_take_word(&p->lex, p->arena, "a value", &reference->name));
    if (generic && dw__ptx_is_mark(&p->lex, '(')) {
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(
            dw__ptx_take_word(&p->lex, p->arena, "the name of a variable", &reference->name));
        DW_RETURN_IF_FAILED(dw__ptx_expect(&p->lex, ')'));
        reference->generic = true;
    }
    if (dw__ptx_is_mark(&p->lex, '+')) {
        uint64_t addend = 0;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(read_whole(p, MAX_BYTES, "an offset", &addend));
        reference->addend = (int64_t)addend;
    }
    reference->next = value->references;
    value->references = reference;
    return dw__text_append(&value->bytes, "\0\0\0\0\0\0\0", 8);
}

static dw_status read_values(dw__ptx_parser *p, const dw__ptx_type *type, initial *value) {
    if (dw__ptx_is_mark(&p->lex, '{')) {
        if (++p->depth > DW__PTX_MAX_DEPTH)
            return dw__ptx_fail(&p->lex, "values nested too deeply");
        do {
            DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
            DW_RETURN_IF_FAILED(read_values(p, type, value));
        } while (dw__ptx_is_mark(&p->lex, ','));
        p->depth--;
        return dw__ptx_expect(&p->lex, '}');
    }
    if (p->lex.token == DW__PTX_WORD) return read_reference(p, type, value);
    bool negative = dw__ptx_is_mark(&p->lex, '-');
    if (negative) DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    uint64_t bits = p->lex.bits;
    switch (p->lex.token) {
    case DW__PTX_WHOLE: bits = negative ? 0 - p->lex.integer : p->lex.integer; break;
    case DW__PTX_REAL64:
        if (strcmp(type->name, "f32") == 0) {
            double wide;
            memcpy(&wide, &bits, sizeof wide);
            float narrow = (float)wide;
            uint32_t word;
            memcpy(&word, &narrow, sizeof word);
            bits = word;
        } /* fall through */
    case DW__PTX_REAL32:
        if (negative) bits ^= (uint64_t)1 << (8 * type->bytes - 1);
        break;
    default: return dw__ptx_fail(&p->lex, "expected a value");
    }
    DW_RETURN_IF_FAILED(dw__text_append(&value->bytes, (const char *)&bits,
                                        (size_t)(type->bytes < 8 ? type->bytes : 8)));
    return dw__ptx_next(&p->lex);
}

static dw_status read_extent(dw__ptx_parser *p, const declarator *d, dw__ptx_variable *variable) {
    uint64_t count = (uint64_t)d->vector;
    bool open = false;
    while (dw__ptx_is_mark(&p->lex, '[')) {
        uint64_t size = 0;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        if (dw__ptx_is_mark(&p->lex, ']'))
            open = true;
        else
            DW_RETURN_IF_FAILED(read_whole(p, MAX_BYTES, "the size of an array", &size));
        DW_RETURN_IF_FAILED(dw__ptx_expect(&p->lex, ']'));
        count *= open ? 0 : size;
        if (count > MAX_BYTES / 16) return dw__ptx_fail(&p->lex, "an array of more than 4 GiB");
    }
    variable->bytes = count * (uint64_t)d->type.bytes;
    return DW_OK;
}

static dw_status read_variable(dw__ptx_parser *p, const declarator *d, dw__ptx_space space,
                               dw__ptx_variable **made) {
    dw__ptx_variable *variable = dw__arena_alloc(p->arena, sizeof *variable);
    initial value = {0};
    dw_status status = DW_OK;
    if (!variable) return dw__fail_memory("a variable of a PTX module", sizeof *variable);
    *variable = (dw__ptx_variable){.space = space, .type = d->type, .line = p->lex.token_line};
    if (d->type.bytes == 0) return dw__ptx_fail(&p->lex, "a predicate must be a register");
    DW_RETURN_IF_FAILED(
        dw__ptx_take_word(&p->lex, p->arena, "the name of a variable", &variable->name));
    DW_RETURN_IF_FAILED(read_extent(p, d, variable));
    variable->align = d->align ? d->align : (uint32_t)(d->type.bytes * d->vector);
    if (dw__ptx_is_mark(&p->lex, '=')) {
        DW_TRY(dw__ptx_next(&p->lex));
        DW_TRY(read_values(p, &d->type, &value));
        if (variable->bytes == 0) variable->bytes = value.bytes.length;
        if (value.bytes.length > variable->bytes)
            DW_TRY(dw__ptx_fail(&p->lex, "more values than the array \"%s\" has elements",
                                variable->name));
        variable->initial = dw__ptx_copy(p->arena, value.bytes.text, value.bytes.length);
        if (!variable->initial)
            DW_TRY(dw__fail_memory("values of a PTX module", value.bytes.length));
        variable->initial_bytes = value.bytes.length;
        variable->references = value.references;
    }
    *made = variable;
cleanup:
    dw__text_free(&value.bytes);
    return status;
}

dw_status dw__ptx_declaration(dw__ptx_parser *p, dw__ptx_space space, bool external) {
    declarator d;
    DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    DW_RETURN_IF_FAILED(read_declarator(p, &d));
    if (space == DW__PTX_REG) {
        DW_RETURN_IF_FAILED(read_registers(p, &d));
        return dw__ptx_expect(&p->lex, ';');
    }
    for (;;) {
        dw__ptx_variable *variable = NULL;
        DW_RETURN_IF_FAILED(read_variable(p, &d, space, &variable));
        variable->external = external;
        DW_RETURN_IF_FAILED(dw__ptx_declare(
            p, variable->name, &(dw__ptx_symbol){DW__SYMBOL_VARIABLE, d.type, 0, variable, 1}));
        if (p->function)
            DW_RETURN_IF_FAILED(DW_PUSH(&p->function->variables, variable));
        else
            DW_RETURN_IF_FAILED(DW_PUSH(&p->module->variables, variable));
        if (!dw__ptx_is_mark(&p->lex, ',')) return dw__ptx_expect(&p->lex, ';');
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
}

/* ---- functions ----------------------------------------------------------------------------- */

static dw_status read_parameters(dw__ptx_parser *p, bool results) {
    DW_RETURN_IF_FAILED(dw__ptx_expect(&p->lex, '('));
    while (!dw__ptx_is_mark(&p->lex, ')')) {
        dw__ptx_space space;
        declarator d;
        dw__ptx_variable *variable = NULL;
        DW_RETURN_IF_FAILED(dw__ptx_expect(&p->lex, '.'));
        if (!dw__ptx_space_named(&p->lex, &space) || space != DW__PTX_PARAM)
            return dw__ptx_fail_at(&p->lex, DW_UNSUPPORTED, p->lex.token_line,
                                   "a parameter that is not .param is not supported");
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(read_declarator(p, &d));
        DW_RETURN_IF_FAILED(read_variable(p, &d, space, &variable));
        assert(variable);
        DW_RETURN_IF_FAILED(dw__ptx_declare(
            p, variable->name, &(dw__ptx_symbol){DW__SYMBOL_VARIABLE, d.type, 0, variable, 1}));
        if (results)
            DW_RETURN_IF_FAILED(DW_PUSH(&p->function->results, variable));
        else
            DW_RETURN_IF_FAILED(DW_PUSH(&p->function->parameters, variable));
        if (dw__ptx_is_mark(&p->lex, ',')) DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    return dw__ptx_next(&p->lex);
}

static dw_status read_triple(dw__ptx_parser *p, uint32_t triple[3]) {
    triple[0] = triple[1] = triple[2] = 1;
    for (int axis = 0; axis < 3; axis++) {
        uint64_t value;
        DW_RETURN_IF_FAILED(read_whole(p, UINT32_MAX, "a number of threads or blocks", &value));
        triple[axis] = (uint32_t)value;
        if (!dw__ptx_is_mark(&p->lex, ',')) break;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    return DW_OK;
}

/* Reads .maxntid 384, 1, 1 and the like, between a function's head and its body. */
static dw_status read_bounds(dw__ptx_parser *p) {
    while (dw__ptx_is_mark(&p->lex, '.')) {
        uint32_t ignored[3], *triple = ignored;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        bool bare =
            dw__ptx_is_word(&p->lex, "noreturn") || dw__ptx_is_word(&p->lex, "explicitcluster") ||
            dw__ptx_is_word(&p->lex, "blocksareclusters") || dw__ptx_is_word(&p->lex, "unified");
        bool text = dw__ptx_is_word(&p->lex, "pragma");
        if (dw__ptx_is_word(&p->lex, "maxntid")) triple = p->function->max_threads;
        if (dw__ptx_is_word(&p->lex, "reqntid")) triple = p->function->required_threads;
        if (dw__ptx_is_word(&p->lex, "reqnctapercluster")) triple = p->function->required_cluster;
        bool known =
            bare || text || triple != ignored || dw__ptx_is_word(&p->lex, "minnctapersm") ||
            dw__ptx_is_word(&p->lex, "maxnreg") || dw__ptx_is_word(&p->lex, "maxnctapersm") ||
            dw__ptx_is_word(&p->lex, "maxclusterrank") ||
            dw__ptx_is_word(&p->lex, "abi_preserve") ||
            dw__ptx_is_word(&p->lex, "abi_preserve_control");
        if (!known)
            return dw__ptx_fail_at(&p->lex, DW_UNSUPPORTED, p->lex.token_line,
                                   "\".%.*s\" of a function is not supported", (int)p->lex.length,
                                   p->lex.text);
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        if (text) {
            DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
            DW_RETURN_IF_FAILED(dw__ptx_expect(&p->lex, ';'));
        } else if (!bare) {
            DW_RETURN_IF_FAILED(read_triple(p, triple));
        }
    }
    return DW_OK;
}

static dw_status read_function(dw__ptx_parser *p, bool entry) {
    dw__ptx_scope scope = {.parent = p->scope};
    dw_status status = DW_OK;
    dw__ptx_function *function = dw__calloc(1, sizeof *function);
    if (!function) return dw__fail_memory("a function of a PTX module", sizeof *function);
    *function = (dw__ptx_function){.entry = entry, .line = p->lex.token_line};
    status = DW_PUSH(&p->module->functions, function);
    if (status != DW_OK) {
        dw__free(function);
        return dw__fail_memory("a function of a PTX module", sizeof *function);
    }
    p->function = function;
    p->scope = &scope;
    p->location = 0;

    DW_TRY(dw__ptx_next(&p->lex));
    if (dw__ptx_is_mark(&p->lex, '(')) DW_TRY(read_parameters(p, true));
    DW_TRY(dw__ptx_take_word(&p->lex, p->arena, "the name of a function", &function->name));
    p->scope = scope.parent;
    DW_TRY(dw__ptx_declare(p, function->name, &(dw__ptx_symbol){.kind = DW__SYMBOL_FUNCTION}));
    p->scope = &scope;
    if (dw__ptx_is_mark(&p->lex, '(')) DW_TRY(read_parameters(p, false));
    DW_TRY(read_bounds(p));
    if (dw__ptx_is_mark(&p->lex, ';')) {
        function->declared_only = true;
        DW_TRY(dw__ptx_next(&p->lex));
    } else {
        DW_TRY(dw__ptx_body(p));
    }
cleanup:
    dw__map_destroy(scope.names);
    p->scope = scope.parent;
    p->function = NULL;
    return status;
}

/* ---- modules ------------------------------------------------------------------------------- */

static dw_status read_file_name(dw__ptx_parser *p) {
    uint64_t number;
    DW_RETURN_IF_FAILED(read_whole(p, 100000, "the number of a file", &number));
    if (p->lex.token != DW__PTX_STRING) return dw__ptx_fail(&p->lex, "expected the name of a file");
    char *name = dw__arena_alloc(p->arena, p->lex.length + 1);
    if (!name) return dw__fail_memory("the name of a file", p->lex.length);
    memcpy(name, p->lex.text, p->lex.length);
    while (p->module->files.count <= number) DW_RETURN_IF_FAILED(DW_PUSH(&p->module->files, NULL));
    p->module->files.items[number] = name;
    DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    while (dw__ptx_is_mark(&p->lex, ',')) { /* time and size */
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    return DW_OK;
}

/* Skips a debug section up to the closing brace. */
static dw_status skip_section(dw__ptx_parser *p) {
    int first = p->lex.token_line, depth = 0;
    for (;;) {
        if (p->lex.token == DW__PTX_END)
            return dw__ptx_fail_at(&p->lex, DW_PARSE, first, "a section without \"}\"");
        if (dw__ptx_is_mark(&p->lex, '{')) depth++;
        if (dw__ptx_is_mark(&p->lex, '}') && --depth == 0) return dw__ptx_next(&p->lex);
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
}

static dw_status read_target(dw__ptx_parser *p) {
    DW_RETURN_IF_FAILED(
        dw__ptx_take_word(&p->lex, p->arena, "an architecture", &p->module->target));
    while (dw__ptx_is_mark(&p->lex, ',')) {
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    return DW_OK;
}

static dw_status read_version(dw__ptx_parser *p) {
    int major = 0, minor = 0;
    char text[16] = "";
    if (p->lex.length < sizeof text) memcpy(text, p->lex.text, p->lex.length);
    if (sscanf(text, "%2d.%2d", &major, &minor) != 2)
        return dw__ptx_fail(&p->lex, "expected a version such as 9.0");
    p->module->version = 10 * major + minor;
    return dw__ptx_next(&p->lex);
}

static dw_status read_top(dw__ptx_parser *p) {
    bool external = false;
    dw__ptx_space space;
    for (;;) {
        if (!dw__ptx_is_mark(&p->lex, '.')) return dw__ptx_fail(&p->lex, "expected a directive");
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        bool linkage = dw__ptx_is_word(&p->lex, "visible") || dw__ptx_is_word(&p->lex, "weak") ||
                       dw__ptx_is_word(&p->lex, "common");
        if (dw__ptx_is_word(&p->lex, "extern")) external = linkage = true;
        if (!linkage) break;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
    }
    if (dw__ptx_is_word(&p->lex, "entry") || dw__ptx_is_word(&p->lex, "func"))
        return read_function(p, dw__ptx_is_word(&p->lex, "entry"));
    if (dw__ptx_space_named(&p->lex, &space)) return dw__ptx_declaration(p, space, external);
    if (dw__ptx_is_word(&p->lex, "section")) return skip_section(p);
    dw_status (*read)(dw__ptx_parser *) = dw__ptx_is_word(&p->lex, "version")  ? read_version
                                          : dw__ptx_is_word(&p->lex, "target") ? read_target
                                          : dw__ptx_is_word(&p->lex, "file")   ? read_file_name
                                                                               : NULL;
    if (read) {
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        return read(p);
    }
    if (dw__ptx_is_word(&p->lex, "address_size")) {
        uint64_t bits;
        DW_RETURN_IF_FAILED(dw__ptx_next(&p->lex));
        DW_RETURN_IF_FAILED(read_whole(p, 64, "the size of an address", &bits));
        return bits == 64 ? DW_OK
                          : dw__ptx_fail_at(&p->lex, DW_UNSUPPORTED, p->lex.token_line,
                                            "addresses of %d bits are not supported", (int)bits);
    }
    return dw__ptx_fail_at(&p->lex, DW_UNSUPPORTED, p->lex.token_line,
                           "directive \".%.*s\" is not supported", (int)p->lex.length, p->lex.text);
}

dw_status dw__ptx_parse(const char *text, size_t bytes, const char *name, dw__ptx_module **out) {
    dw_status status = DW_OK;
    dw__ptx_scope scope = {0};
    dw__ptx_parser p = {.lex = {.begin = text, .at = text, .end = text + bytes, .line = 1},
                        .scope = &scope};
    dw__ptx_module *module = dw__calloc(1, sizeof *module);
    if (!module) return dw__fail_memory("a PTX module", sizeof *module);
    module->arena = p.arena = dw__arena_create();
    p.module = module;
    if (!module->arena) DW_TRY(dw__fail_memory("a PTX module", 0));
    module->name = p.lex.name = dw__arena_strdup(p.arena, name);
    if (!module->name) DW_TRY(dw__fail_memory("a PTX module", 0));

    DW_TRY(dw__ptx_next(&p.lex));
    if (p.lex.token == DW__PTX_END) DW_TRY(dw__fail(DW_PARSE, "%s contains no PTX", name));
    while (p.lex.token != DW__PTX_END) DW_TRY(read_top(&p));
    if (!module->version || !module->target)
        DW_TRY(dw__fail(DW_PARSE, "%s: PTX without %s", name,
                        module->version ? ".target" : ".version"));
    *out = module;
    module = NULL;
cleanup:
    if (status == DW_OUT_OF_MEMORY) dw__fail_memory("a PTX module", bytes);
    dw__map_destroy(scope.names);
    dw__free(p.symbols.items);
    dw__free(p.pending.items);
    dw__ptx_destroy(module);
    return status;
}

void dw__ptx_destroy(dw__ptx_module *module) {
    if (!module) return;
    for (size_t i = 0; i < module->functions.count; i++) {
        dw__ptx_function *function = module->functions.items[i];
        dw__free(function->parameters.items);
        dw__free(function->results.items);
        dw__free(function->variables.items);
        dw__free(function->registers.items);
        dw__free(function->code.items);
        dw__free(function);
    }
    dw__free(module->functions.items);
    dw__free(module->variables.items);
    dw__free(module->files.items);
    dw__free(module->locations.items);
    if (module->arena) dw__arena_destroy(module->arena);
    dw__free(module);
}
