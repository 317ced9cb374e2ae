/* The syntax tree of PTX text, which the parser makes and the translator reads (grammar: PTX ISA, "Syntax", "State
 * Spaces, Types, and Variables" and "Directives"). The tree lies in the module's arena; names point into the arena
 * and live as long as the module.
 */
#ifndef DW_PTX_H
#define DW_PTX_H

#include "base/base.h"

typedef enum dw__ptx_space {
    DW__PTX_REG,
    DW__PTX_PARAM,
    DW__PTX_LOCAL,
    DW__PTX_SHARED,
    DW__PTX_GLOBAL,
    DW__PTX_CONST,
} dw__ptx_space;

/* A fundamental type, reduced to its size. The name is kept for messages. */
typedef struct dw__ptx_type {
    const char *name; /* "b32" */
    int bytes;        /* of one element; a predicate has 0 */
} dw__ptx_type;

typedef struct dw__ptx_variable {
    const char *name;
    dw__ptx_space space;
    dw__ptx_type type;
    /* Size of the whole array; 0 for `name[]`, whose size the launch determines. */
    uint64_t bytes;
    uint32_t align;
    bool external; /* defined in another module */
    const unsigned char *initial;
    uint64_t initial_bytes; /* the rest is zero */
    struct dw__ptx_reference *references;
    int line;
} dw__ptx_variable;

/* A relocation in an initialiser: the 8 bytes at `offset` become the address of `name`, plus `addend`. */
typedef struct dw__ptx_reference {
    uint64_t offset;
    const char *name;
    int64_t addend;
    bool generic;
    struct dw__ptx_reference *next;
} dw__ptx_reference;

typedef enum dw__ptx_kind {
    DW__PTX_REGISTER,
    DW__PTX_SPECIAL,  /* %tid.x: name and component */
    DW__PTX_INTEGER,  /* 32, 0x10, -1 */
    DW__PTX_SINGLE,   /* 0f3F800000: bits */
    DW__PTX_DOUBLE,   /* 0d3FF0000000000000, 1.5: bits */
    DW__PTX_VARIABLE, /* its address */
    DW__PTX_LABEL,
    DW__PTX_FUNCTION, /* the callee of a call */
    DW__PTX_ADDRESS,  /* [items[0] + integer, items[1], ...] */
    DW__PTX_VECTOR,   /* {a, b}, and the (a, b) of a call */
    DW__PTX_SINK,     /* _ */
} dw__ptx_kind;

typedef struct dw__ptx_operand dw__ptx_operand;
struct dw__ptx_operand {
    dw__ptx_kind kind;
    bool negated;     /* !%p */
    uint32_t number;  /* number of the register, or of the instruction after a label */
    int64_t integer;  /* value of an integer, or offset of an address */
    uint64_t bits;    /* of a floating-point constant */
    const char *name; /* of a register, special register, symbol */
    char component;   /* of a special register: x, y, z, w or 0 */
    const dw__ptx_variable *variable;
    dw__ptx_operand *items;
    int count;
    const dw__ptx_operand *also; /* the b of a|b */
};

/* A line of the source (.loc) and, for an inlined function, the location of its call. */
typedef struct dw__ptx_location {
    int file, line, column;
    uint32_t caller; /* index of another location; 0: none */
} dw__ptx_location;

#define DW__PTX_NO_GUARD UINT32_MAX
typedef struct dw__ptx_instruction {
    const char *opcode;           /* "mul" */
    const char *spelling;         /* "mul.wide.u32" */
    const char *const *modifiers; /* "wide", "u32" */
    int modifier_count;
    uint32_t guard; /* register, or DW__PTX_NO_GUARD */
    bool guard_negated;
    dw__ptx_operand *operands;
    int operand_count;
    int line;          /* of the PTX */
    uint32_t location; /* index into the module's locations; 0: unknown */
} dw__ptx_instruction;

typedef struct dw__ptx_register {
    const char *name;
    dw__ptx_type type;
} dw__ptx_register;

typedef struct dw__ptx_function {
    const char *name;
    bool entry, declared_only;
    struct {
        dw__ptx_variable **items;
        size_t count, capacity;
        /* `variables` holds the .shared, .local and .param variables of the body. */
    } parameters, results, variables;
    struct {
        dw__ptx_register *items;
        size_t count, capacity;
    } registers;
    struct {
        dw__ptx_instruction *items;
        size_t count, capacity;
    } code;
    uint32_t max_threads[3], required_threads[3], required_cluster[3]; /* 0: not stated */
    int line;
} dw__ptx_function;

typedef struct dw__ptx_module {
    dw__arena *arena;
    const char *name;
    int version;        /* 90 for .version 9.0 */
    const char *target; /* "sm_100a" */
    struct {
        dw__ptx_variable **items;
        size_t count, capacity;
    } variables;
    struct {
        dw__ptx_function **items;
        size_t count, capacity;
    } functions;
    struct {
        const char **items; /* indexed by the number of .file; NULL: not given */
        size_t count, capacity;
    } files;
    struct {
        dw__ptx_location *items; /* items[0] is the unknown location */
        size_t count, capacity;
    } locations;
} dw__ptx_module;

/* Parses a module. `name` is for messages ("kernel.ptx"). Returns DW_PARSE ("NAME, PTX line 12: the error: the
 * line"), DW_UNSUPPORTED for a part of the language that is not emulated, or DW_OUT_OF_MEMORY. */
dw_status dw__ptx_parse(const char *text, size_t bytes, const char *name, dw__ptx_module **module);
void dw__ptx_destroy(dw__ptx_module *module);

#endif
