/* What the files of operations (ops_*.c) are given to turn one PTX instruction into one of the emulator's. A
 * translator takes the modifiers from left to right, in the order that the PTX ISA's syntax lines have them;
 * whatever it leaves makes the instruction unsupported.
 */
#ifndef DW_EMULATOR_TRANSLATE_H
#define DW_EMULATOR_TRANSLATE_H

#include "emulator/machine.h"

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
    dw__emu_op *op;     /* being filled in; see dw__emu_emit */
    uint32_t *places;   /* of the function's registers; UINT32_MAX: none yet */
    dw__map *constants; /* preset by bits and size */
    uint32_t at;        /* instruction of the function */
    uint32_t carry;     /* place of the condition code; UINT32_MAX: none yet */
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
    } reads;              /* places that instructions read, one after another */
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
/* Each ends with a name that is NULL. */
extern const dw__emu_opcode dw__emu_opcodes_arithmetic[], dw__emu_opcodes_float[],
    dw__emu_opcodes_convert[], dw__emu_opcodes_memory[], dw__emu_opcodes_control[],
    dw__emu_opcodes_warp[], dw__emu_opcodes_barrier[], dw__emu_opcodes_copy[],
    dw__emu_opcodes_integer[], dw__emu_opcodes_cluster[], dw__emu_opcodes_tensormap[],
    dw__emu_opcodes_matrix[], dw__emu_opcodes_mma[], dw__emu_opcodes_wgmma[],
    dw__emu_opcodes_wmma[], dw__emu_opcodes_tcgen05[], dw__emu_opcodes_call[];

/* ---- modifiers ----------------------------------------------------------------------------- */

bool dw__emu_take(dw__emu_translator *t, const char *modifier);
/* The next modifier, if it is a type. */
bool dw__emu_take_type(dw__emu_translator *t, dw__emu_type *type);
/* The index of the next modifier in a list that ends with NULL, -1 if it is none of them. */
int dw__emu_take_one_of(dw__emu_translator *t, const char *const *list);
/* DW_UNSUPPORTED: names the whole spelling. For what no translator understands. */
dw_status dw__emu_unsupported(dw__emu_translator *t);
/* DW_PARSE: the instruction is not as the ISA has it. */
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

/* Bytes of a lane's place in the register file for a value of so many bytes: 4, 8 or 16; 0 for predicates. */
static inline int dw__emu_place_bytes(int bytes) {
    return bytes <= 4 ? (bytes == 0 ? 0 : 4) : bytes <= 8 ? 8 : 16;
}

/* Where operand `index` is, as a value of `type`: registers, constants, special registers, addresses of variables. */
dw_status dw__emu_take_source(dw__emu_translator *t, const dw__ptx_operand *operand,
                              dw__emu_type type, uint32_t *place);
/* Where a result goes; "_" gets a place that nobody reads. */
dw_status dw__emu_take_result(dw__emu_translator *t, const dw__ptx_operand *operand,
                              dw__emu_type type, uint32_t *place);
/* A constant, in every lane. */
dw_status dw__emu_take_constant(dw__emu_translator *t, uint64_t bits, int bytes, uint32_t *place);
/* A place of its own. */
dw_status dw__emu_take_scratch(dw__emu_translator *t, int bytes, uint32_t *place);
/* The operand `index` of the instruction, or a failure that says how many there must be. */
dw_status dw__emu_take_operand(dw__emu_translator *t, int index, const dw__ptx_operand **operand);
static inline int dw__emu_operand_bytes(const dw__emu_translator *t, const dw__ptx_operand *o) {
    return o->kind == DW__PTX_REGISTER ? t->function->registers.items[o->number].type.bytes : -1;
}
/* [base + offset]: base as 8 bytes for each lane, or 4 (*wide is then false). */
typedef struct dw__emu_address {
    uint32_t place;
    bool wide;
    int64_t offset;
} dw__emu_address;
dw_status dw__emu_take_address(dw__emu_translator *t, const dw__ptx_operand *operand,
                               dw__emu_address *address);

/* ---- operations ---------------------------------------------------------------------------- */

/* Adds an operation with the instruction's guard and makes it t->op. */
dw_status dw__emu_emit(dw__emu_translator *t,
                       dw__emu_next (*run)(dw__emu_warp *, const dw__emu_op *, uint32_t mask));
/* For what the emulator has nothing to do for. */
dw__emu_next dw__emu_nothing(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask);
/* Memory for an operation's `detail`, zeroed. */
void *dw__emu_detail(dw__emu_translator *t, size_t bytes);

/* The address of a lane. */
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
