/* The interface with which the files of operations (ops_*.c and others) translate one PTX instruction into one
 * operation. A translator takes the modifiers from left to right, in the order of the PTX ISA's syntax lines. An
 * instruction with modifiers left over is unsupported, so that no modifier is silently ignored.
 */
#ifndef DW_EMULATOR_TRANSLATE_H
#define DW_EMULATOR_TRANSLATE_H

#include "emulator/running_grid.h"

typedef enum dw__emu_type {
    DW__T_NONE,
    DW__T_PRED,
    DW__T_B8,
    DW__T_B16,
    DW__T_B32,
    DW__T_B64,
    DW__T_B128,
    DW__T_U8,
    DW__T_U16,
    DW__T_U32,
    DW__T_U64,
    DW__T_S8,
    DW__T_S16,
    DW__T_S32,
    DW__T_S64,
    DW__T_F16,
    DW__T_BF16,
    DW__T_TF32,
    DW__T_F32,
    DW__T_F64,
    DW__T_F16X2,
    DW__T_BF16X2,
    DW__T_F32X2,
    DW__T_U16X2,
    DW__T_S16X2,
    DW__T_E4M3,
    DW__T_E5M2,
    DW__T_E2M3,
    DW__T_E3M2,
    DW__T_E2M1,
    DW__T_UE8M0,
    DW__T_UE4M3,
    DW__T_E4M3X2,
    DW__T_E5M2X2,
    DW__T_E2M3X2,
    DW__T_E3M2X2,
    DW__T_E2M1X2,
    DW__T_UE8M0X2,
    DW__T_E4M3X4,
    DW__T_E5M2X4,
    DW__T_E2M3X4,
    DW__T_E3M2X4,
    DW__T_E2M1X4,
    DW__T_COUNT,
} dw__emu_type;

typedef struct dw__emu_translator {
    dw__emu_program *program;
    dw__emu_memory *memory;
    const dw__ptx_function *function;
    dw__emu_kernel *kernel;
    dw__arena *arena;
    const dw__ptx_instruction *in;
    int cursor;         /* the next modifier */
    dw__emu_op *op;     /* the operation being filled in; see dw__emu_emit */
    uint32_t *places;   /* places of the function's registers; UINT32_MAX: not assigned yet */
    dw__map *constants; /* presets by value and size */
    uint32_t at;        /* index of the current instruction in the function */
    uint32_t carry;     /* place of the condition code; UINT32_MAX: not assigned yet */
    struct {
        dw__emu_op *items;
        size_t count, capacity;
    } code;
    struct {
        uint32_t *items;
        size_t count, capacity;
    } from;
    struct {
        dw__emu_preset *items;
        size_t count, capacity;
    } presets;
    struct {
        uint32_t *items;
        size_t count, capacity;
    } reads;              /* the places that each instruction reads, concatenated */
    uint32_t *first_read; /* of each instruction */
    struct {
        const dw__ptx_variable **items;
        size_t count, capacity;
    } laid_names;
    struct {
        uint64_t *items;
        size_t count, capacity;
    } laid_places;
} dw__emu_translator;

typedef dw_status (*dw__emu_opcode_translate)(dw__emu_translator *t);
typedef struct dw__emu_opcode {
    const char *name;
    dw__emu_opcode_translate translate;
} dw__emu_opcode;
/* Each list ends with a NULL name. */
extern const dw__emu_opcode dw__emu_opcodes_arithmetic[], dw__emu_opcodes_float[],
    dw__emu_opcodes_convert[], dw__emu_opcodes_memory[], dw__emu_opcodes_control[],
    dw__emu_opcodes_warp[], dw__emu_opcodes_barrier[], dw__emu_opcodes_copy[],
    dw__emu_opcodes_integer[], dw__emu_opcodes_cluster[], dw__emu_opcodes_tensormap[],
    dw__emu_opcodes_matrix[], dw__emu_opcodes_mma[], dw__emu_opcodes_wgmma[],
    dw__emu_opcodes_wmma[], dw__emu_opcodes_tcgen05[], dw__emu_opcodes_call[];

/* ---- modifiers ----------------------------------------------------------------------------- */

bool dw__emu_take(dw__emu_translator *t, const char *modifier);
/* Takes the next modifier if it is a type. */
bool dw__emu_take_type(dw__emu_translator *t, dw__emu_type *type);
/* Takes the next modifier if it is in the list, which ends with NULL, and returns its index there; else -1. */
int dw__emu_take_one_of(dw__emu_translator *t, const char *const *list);
/* Returns DW_UNSUPPORTED with the whole spelling, for instructions that no translator supports. */
dw_status dw__emu_unsupported(dw__emu_translator *t);
/* Returns DW_PARSE, for instructions that violate the ISA. */
dw_status dw__emu_malformed(dw__emu_translator *t, const char *why);
#define dw__emu_unsupported(t) dw__not_ok((dw__emu_unsupported)(t))
#define dw__emu_malformed(t, why) dw__not_ok((dw__emu_malformed)(t, why))
static inline bool dw__emu_all_taken(const dw__emu_translator *t) {
    return t->cursor == t->in->modifier_count;
}

int dw__emu_type_bytes(dw__emu_type type);
bool dw__emu_type_signed(dw__emu_type type);
bool dw__emu_type_float(dw__emu_type type); /* of 16, 32 or 64 bits */

/* ---- operands ------------------------------------------------------------------------------ */

/* Returns the size of a lane's place in the register file for a value of `bytes`: 4, 8 or 16; 0 for predicates. */
static inline int dw__emu_place_bytes(int bytes) {
    return bytes <= 4 ? (bytes == 0 ? 0 : 4) : bytes <= 8 ? 8 : 16;
}

/* Sets *place to the operand as a value of `type`: a register, constant, special register or address of a variable. */
dw_status dw__emu_take_source(dw__emu_translator *t, const dw__ptx_operand *operand,
                              dw__emu_type type, uint32_t *place);
/* Sets *place to the destination of a result; "_" gets a place that is never read. */
dw_status dw__emu_take_result(dw__emu_translator *t, const dw__ptx_operand *operand,
                              dw__emu_type type, uint32_t *place);
/* A place that holds a constant in every lane. */
dw_status dw__emu_take_constant(dw__emu_translator *t, uint64_t bits, int bytes, uint32_t *place);
/* A new place for intermediate values. */
dw_status dw__emu_take_scratch(dw__emu_translator *t, int bytes, uint32_t *place);
/* Sets *operand to operand `index` of the instruction; fails if there are fewer operands. */
dw_status dw__emu_take_operand(dw__emu_translator *t, int index, const dw__ptx_operand **operand);
static inline int dw__emu_operand_bytes(const dw__emu_translator *t, const dw__ptx_operand *o) {
    return o->kind == DW__PTX_REGISTER ? t->function->registers.items[o->number].type.bytes : -1;
}
/* [base + offset]; `wide`: the base has 8 bytes in each lane, else 4. */
typedef struct dw__emu_address {
    uint32_t place;
    bool wide;
    int64_t offset;
} dw__emu_address;
dw_status dw__emu_take_address(dw__emu_translator *t, const dw__ptx_operand *operand,
                               dw__emu_address *address);

/* ---- operations ---------------------------------------------------------------------------- */

/* Appends an operation with the instruction's guard and makes it t->op. */
dw_status dw__emu_emit(dw__emu_translator *t,
                       dw__emu_next (*run)(dw__emu_warp *, const dw__emu_op *, uint32_t mask));
/* Does nothing; for instructions without an effect in the emulator. */
dw__emu_next dw__emu_nothing(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask);
/* Allocates an operation's `detail`, zeroed. */
void *dw__emu_detail(dw__emu_translator *t, size_t bytes);

/* Returns the address of a lane. */
static inline uint64_t dw__emu_lane_address(const dw__emu_warp *w, const dw__emu_address *a,
                                            int lane) {
    uint64_t base = a->wide ? DW__REGISTER(w, uint64_t, a->place)[lane]
                            : DW__REGISTER(w, uint32_t, a->place)[lane];
    return base + (uint64_t)a->offset;
}
#define DW__EACH_LANE(lane, mask)                                                                  \
    for (uint32_t rest_ = (mask), lane = 0; rest_ && (lane = (uint32_t)__builtin_ctz(rest_), 1);   \
         rest_ &= rest_ - 1)

#endif
