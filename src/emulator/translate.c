/* Translates PTX to operations: assigns places to registers, constants and variables, then passes each instruction to
 * its opcode's translator. The bargain: an unsupported instruction makes its kernel unsupported but not the module,
 * so that other kernels of the module run.
 */
#include "emulator/translate.h"
#include "emulator/inline.h"
#include "emulator/load_uses.h"
#include "emulator/ptx_parse.h"
#include "emulator/targets.h"
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- types and modifiers ------------------------------------------------------------------- */

static const struct {
    const char *name;
    int bytes;
} types[DW__T_COUNT] = {
    [DW__T_NONE] = {"", 0},         [DW__T_PRED] = {"pred", 0},
    [DW__T_B8] = {"b8", 1},         [DW__T_B16] = {"b16", 2},
    [DW__T_B32] = {"b32", 4},       [DW__T_B64] = {"b64", 8},
    [DW__T_B128] = {"b128", 16},    [DW__T_U8] = {"u8", 1},
    [DW__T_U16] = {"u16", 2},       [DW__T_U32] = {"u32", 4},
    [DW__T_U64] = {"u64", 8},       [DW__T_S8] = {"s8", 1},
    [DW__T_S16] = {"s16", 2},       [DW__T_S32] = {"s32", 4},
    [DW__T_S64] = {"s64", 8},       [DW__T_F16] = {"f16", 2},
    [DW__T_BF16] = {"bf16", 2},     [DW__T_TF32] = {"tf32", 4},
    [DW__T_F32] = {"f32", 4},       [DW__T_F64] = {"f64", 8},
    [DW__T_F16X2] = {"f16x2", 4},   [DW__T_BF16X2] = {"bf16x2", 4},
    [DW__T_F32X2] = {"f32x2", 8},   [DW__T_U16X2] = {"u16x2", 4},
    [DW__T_S16X2] = {"s16x2", 4},   [DW__T_E4M3] = {"e4m3", 1},
    [DW__T_E5M2] = {"e5m2", 1},     [DW__T_E2M3] = {"e2m3", 1},
    [DW__T_E3M2] = {"e3m2", 1},     [DW__T_E2M1] = {"e2m1", 1},
    [DW__T_UE8M0] = {"ue8m0", 1},   [DW__T_UE4M3] = {"ue4m3", 1},
    [DW__T_E4M3X2] = {"e4m3x2", 2}, [DW__T_E5M2X2] = {"e5m2x2", 2},
    [DW__T_E2M3X2] = {"e2m3x2", 2}, [DW__T_E3M2X2] = {"e3m2x2", 2},
    [DW__T_E2M1X2] = {"e2m1x2", 1}, [DW__T_UE8M0X2] = {"ue8m0x2", 2},
    [DW__T_E4M3X4] = {"e4m3x4", 4}, [DW__T_E5M2X4] = {"e5m2x4", 4},
    [DW__T_E2M3X4] = {"e2m3x4", 4}, [DW__T_E3M2X4] = {"e3m2x4", 4},
    [DW__T_E2M1X4] = {"e2m1x4", 2},
};

int dw__emu_type_bytes(dw__emu_type type) { return types[type].bytes; }
bool dw__emu_type_signed(dw__emu_type type) { return type >= DW__T_S8 && type <= DW__T_S64; }
bool dw__emu_type_float(dw__emu_type type) {
    return type == DW__T_F16 || type == DW__T_BF16 || type == DW__T_F32 || type == DW__T_F64;
}

bool dw__emu_take(dw__emu_translator *t, const char *modifier) {
    if (dw__emu_all_taken(t) || strcmp(t->in->modifiers[t->cursor], modifier) != 0) return false;
    t->cursor++;
    return true;
}

bool dw__emu_take_type(dw__emu_translator *t, dw__emu_type *type) {
    for (int i = DW__T_PRED; i < DW__T_COUNT; i++) {
        if (!dw__emu_take(t, types[i].name)) continue;
        *type = (dw__emu_type)i;
        return true;
    }
    return false;
}

int dw__emu_take_one_of(dw__emu_translator *t, const char *const *list) {
    for (int i = 0; list[i]; i++)
        if (dw__emu_take(t, list[i])) return i;
    return -1;
}

static dw_status fail_here(dw__emu_translator *t, dw_status status, const char *what) {
    return dw__fail(status, "%s, kernel %s, PTX line %d: %s: %s", t->program->module->name,
                    t->function->name, t->in->line, t->in->spelling, what);
}
dw_status(dw__emu_unsupported)(dw__emu_translator *t) {
    return fail_here(t, DW_UNSUPPORTED,
                     "the emulator does not support this instruction or this form of it");
}
dw_status(dw__emu_malformed)(dw__emu_translator *t, const char *why) {
    return fail_here(t, DW_PARSE, why);
}

/* ---- places -------------------------------------------------------------------------------- */

/* Returns a new place. A cache line holds sixteen lanes, so places are aligned to cache lines, except for predicates,
 * which are one word. */
dw_status dw__emu_take_scratch(dw__emu_translator *t, int bytes, uint32_t *place) {
    uint32_t size = bytes == 0 ? 4 : (uint32_t)dw__emu_place_bytes(bytes) * DW__LANES;
    uint32_t first =
        bytes == 0 ? t->kernel->register_bytes : (t->kernel->register_bytes + 63) / 64 * 64;
    if (first > (1u << 28))
        return dw__emu_malformed(t, "more registers than the emulator supports");
    *place = first;
    t->kernel->register_bytes = first + size;
    return DW_OK;
}

static dw_status preset(dw__emu_translator *t, const dw__emu_preset *wanted, uint32_t *place) {
    char key[64];
    uint32_t index;
    snprintf(key, sizeof key, "%d %u %llx %d %d", wanted->source, wanted->bytes,
             (unsigned long long)wanted->bits, wanted->special, wanted->axis);
    if (dw__map_get(t->constants, key, &index)) {
        *place = t->presets.items[index].place;
        return DW_OK;
    }
    dw__emu_preset made = *wanted;
    DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, (int)made.bytes, &made.place));
    DW_RETURN_IF_FAILED(dw__map_set(t->constants, key, (uint32_t)t->presets.count));
    DW_RETURN_IF_FAILED(DW_PUSH(&t->presets, made));
    *place = made.place;
    return DW_OK;
}

dw_status dw__emu_take_constant(dw__emu_translator *t, uint64_t bits, int bytes, uint32_t *place) {
    return preset(t,
                  &(dw__emu_preset){.source = DW__SOURCE_BITS,
                                    .bytes = (uint32_t)dw__emu_place_bytes(bytes),
                                    .bits = bits},
                  place);
}

static const struct {
    const char *name;
    dw__emu_special special;
    bool vector;
    int bytes;
} specials[] = {
    {"%tid", DW__SPECIAL_TID, true, 4},
    {"%ntid", DW__SPECIAL_NTID, true, 4},
    {"%ctaid", DW__SPECIAL_CTAID, true, 4},
    {"%nctaid", DW__SPECIAL_NCTAID, true, 4},
    {"%laneid", DW__SPECIAL_LANEID, false, 4},
    {"%warpid", DW__SPECIAL_WARPID, false, 4},
    {"%nwarpid", DW__SPECIAL_NWARPID, false, 4},
    {"%smid", DW__SPECIAL_SMID, false, 4},
    {"%nsmid", DW__SPECIAL_NSMID, false, 4},
    {"%gridid", DW__SPECIAL_GRIDID, false, 8},
    {"%clusterid", DW__SPECIAL_CLUSTERID, true, 4},
    {"%nclusterid", DW__SPECIAL_NCLUSTERID, true, 4},
    {"%cluster_ctaid", DW__SPECIAL_CLUSTER_CTAID, true, 4},
    {"%cluster_nctaid", DW__SPECIAL_CLUSTER_NCTAID, true, 4},
    {"%cluster_ctarank", DW__SPECIAL_CLUSTER_CTARANK, false, 4},
    {"%cluster_nctarank", DW__SPECIAL_CLUSTER_NCTARANK, false, 4},
    {"%is_explicit_cluster", DW__SPECIAL_IS_EXPLICIT_CLUSTER, false, 0},
    {"%lanemask_eq", DW__SPECIAL_LANEMASK_EQ, false, 4},
    {"%lanemask_le", DW__SPECIAL_LANEMASK_LE, false, 4},
    {"%lanemask_lt", DW__SPECIAL_LANEMASK_LT, false, 4},
    {"%lanemask_ge", DW__SPECIAL_LANEMASK_GE, false, 4},
    {"%lanemask_gt", DW__SPECIAL_LANEMASK_GT, false, 4},
    {"%dynamic_smem_size", DW__SPECIAL_DYNAMIC_SMEM_SIZE, false, 4},
    {"%total_smem_size", DW__SPECIAL_TOTAL_SMEM_SIZE, false, 4},
    /* Drivers put the workspace of cooperative_groups::this_grid() there. */
    {"%envreg1", DW__SPECIAL_WORKSPACE, false, 4},
    {"%envreg2", DW__SPECIAL_WORKSPACE, false, 4},
};

/* Clocks count operations and advance whether the warp runs or waits. */
static dw__emu_next run_clock(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint64_t now = (w->cta->cluster->turn << 10) + w->executed;
    (void)mask;
    for (int lane = 0; lane < DW__LANES; lane++) {
        if (op->immediate & 1)
            DW__REGISTER(w, uint64_t, op->d)[lane] = now;
        else
            DW__REGISTER(w, uint32_t, op->d)
        [lane] = (uint32_t)(op->immediate & 2 ? now >> 32 : now);
    }
    return DW__NEXT;
}

static dw_status clock_place(dw__emu_translator *t, const char *name, uint32_t *place,
                             bool *is_clock) {
    static const struct {
        const char *name;
        int64_t part;
    } clocks[] = {{"%clock", 0},       {"%clock_hi", 2},       {"%clock64", 1},
                  {"%globaltimer", 1}, {"%globaltimer_lo", 0}, {"%globaltimer_hi", 2}};
    *is_clock = false;
    for (size_t i = 0; i < DW_COUNT(clocks); i++) {
        if (strcmp(clocks[i].name, name) != 0) continue;
        *is_clock = true;
        DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, clocks[i].part & 1 ? 8 : 4, place));
        dw__emu_op op = {
            .run = run_clock, .d = *place, .guard = DW__PTX_NO_GUARD, .immediate = clocks[i].part};
        DW_RETURN_IF_FAILED(DW_PUSH(&t->code, op));
        return DW_PUSH(&t->from, t->at);
    }
    return DW_OK;
}

static dw_status special_place(dw__emu_translator *t, const dw__ptx_operand *operand,
                               uint32_t *place) {
    bool is_clock;
    DW_RETURN_IF_FAILED(clock_place(t, operand->name, place, &is_clock));
    if (is_clock) return DW_OK;
    for (size_t i = 0; i < DW_COUNT(specials); i++) {
        if (strcmp(specials[i].name, operand->name) != 0) continue;
        if (specials[i].vector != (operand->component != 0))
            return dw__emu_malformed(t, "a component is missing or not allowed");
        int axis = operand->component == 0     ? 0
                   : operand->component == 'w' ? 3
                                               : operand->component - 'x';
        if (axis == 3) return dw__emu_take_constant(t, 0, 4, place);
        if (specials[i].special == DW__SPECIAL_WORKSPACE) axis = operand->name[7] - '1';
        return preset(t,
                      &(dw__emu_preset){.source = DW__SOURCE_SPECIAL,
                                        .bytes = (uint32_t)specials[i].bytes,
                                        .special = specials[i].special,
                                        .axis = axis},
                      place);
    }
    return dw__fail(DW_UNSUPPORTED, "%s, kernel %s, PTX line %d: %s: %s, %s",
                    t->program->module->name, t->function->name, t->in->line, t->in->spelling,
                    operand->name,
                    operand->name[0] == '%'
                        ? "this register is not declared, or is an unsupported special register"
                        : "this operand is not declared");
}

static dw_status laid_place(dw__emu_translator *t, const dw__ptx_variable *variable,
                            uint64_t *address) {
    for (size_t i = 0; i < t->laid_names.count; i++) {
        if (t->laid_names.items[i] != variable) continue;
        *address = t->laid_places.items[i];
        return DW_OK;
    }
    for (uint32_t i = 0; i < t->program->symbol_count; i++) {
        if (t->program->symbols[i].variable != variable) continue;
        *address = (uint64_t)(uintptr_t)t->program->symbols[i].address;
        return DW_OK;
    }
    return dw__emu_malformed(t, "the variable is defined in another module");
}

/* Returns the address of a variable within its space, as `bytes` bytes. */
static dw_status variable_place(dw__emu_translator *t, const dw__ptx_operand *operand, int bytes,
                                uint32_t *place) {
    uint64_t address;
    DW_RETURN_IF_FAILED(laid_place(t, operand->variable, &address));
    address += (uint64_t)operand->integer;
    dw__emu_preset wanted = {
        .source = operand->variable->space == DW__PTX_SHARED ? DW__SOURCE_SHARED : DW__SOURCE_BITS,
        .bytes = (uint32_t)dw__emu_place_bytes(bytes),
        .bits = address};
    return preset(t, &wanted, place);
}

static uint64_t real_bits(const dw__ptx_operand *operand, dw__emu_type type) {
    double wide;
    float narrow;
    uint32_t word;
    if (operand->kind == DW__PTX_SINGLE) {
        if (type != DW__T_F64) return operand->bits;
        word = (uint32_t)operand->bits;
        memcpy(&narrow, &word, sizeof narrow);
        wide = (double)narrow;
    } else {
        memcpy(&wide, &operand->bits, sizeof wide);
        if (type == DW__T_F32) {
            narrow = (float)wide;
            memcpy(&word, &narrow, sizeof word);
            return word;
        }
    }
    uint64_t bits;
    memcpy(&bits, &wide, sizeof bits);
    return bits;
}

static dw__emu_next run_not_predicate(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)mask;
    *DW__REGISTER(w, uint32_t, op->d) = ~*DW__REGISTER(w, uint32_t, op->a);
    return DW__NEXT;
}

static dw_status register_place(dw__emu_translator *t, const dw__ptx_operand *operand,
                                dw__emu_type type, uint32_t *place) {
    int has = t->function->registers.items[operand->number].type.bytes, wants = types[type].bytes;
    bool fits = type == DW__T_PRED
                    ? has == 0
                    : has != 0 && dw__emu_place_bytes(has) == dw__emu_place_bytes(wants);
    if (!fits) {
        char what[200];
        snprintf(what, sizeof what, "register %.60s (%s) must have type %s", operand->name,
                 t->function->registers.items[operand->number].type.name, types[type].name);
        return dw__emu_malformed(t, what);
    }
    uint32_t *own = &t->places[operand->number];
    if (*own == UINT32_MAX) DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, has, own));
    *place = *own;
    return DW_OK;
}

dw_status dw__emu_take_source(dw__emu_translator *t, const dw__ptx_operand *operand,
                              dw__emu_type type, uint32_t *place) {
    int bytes = types[type].bytes;
    if (operand->also) return dw__emu_malformed(t, "an operand must not be a pair of registers");
    switch (operand->kind) {
    case DW__PTX_REGISTER: {
        DW_RETURN_IF_FAILED(register_place(t, operand, type, place));
        if (type != DW__T_PRED) DW_RETURN_IF_FAILED(DW_PUSH(&t->reads, *place));
        if (!operand->negated) return DW_OK;
        if (type != DW__T_PRED) return dw__emu_malformed(t, "\"!\" must precede a predicate");
        uint32_t from = *place;
        DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, 0, place));
        dw__emu_op op = {
            .run = run_not_predicate, .d = *place, .a = from, .guard = DW__PTX_NO_GUARD};
        DW_RETURN_IF_FAILED(DW_PUSH(&t->code, op));
        return DW_PUSH(&t->from, t->at);
    }
    case DW__PTX_INTEGER: {
        uint64_t bits = (uint64_t)operand->integer;
        if (type == DW__T_PRED)
            return dw__emu_take_constant(t, operand->integer ? UINT32_MAX : 0, 0, place);
        if (type == DW__T_F32 || type == DW__T_F64)
            return dw__emu_malformed(t, "an operand must be a real number, not an integer");
        if (bytes < 8) bits &= ((uint64_t)1 << 8 * bytes) - 1;
        return dw__emu_take_constant(t, bits, bytes, place);
    }
    case DW__PTX_SINGLE:
    case DW__PTX_DOUBLE: return dw__emu_take_constant(t, real_bits(operand, type), bytes, place);
    case DW__PTX_SPECIAL: return special_place(t, operand, place);
    case DW__PTX_VARIABLE: return variable_place(t, operand, bytes, place);
    case DW__PTX_SINK: return dw__emu_take_constant(t, 0, bytes, place);
    default: return dw__emu_malformed(t, "an operand has the wrong kind");
    }
}

dw_status dw__emu_take_result(dw__emu_translator *t, const dw__ptx_operand *operand,
                              dw__emu_type type, uint32_t *place) {
    if (operand->kind == DW__PTX_SINK) return dw__emu_take_scratch(t, types[type].bytes, place);
    if (operand->kind != DW__PTX_REGISTER || operand->negated)
        return dw__emu_malformed(t, "a result must be a register");
    return register_place(t, operand, type, place);
}

dw_status dw__emu_take_operand(dw__emu_translator *t, int index, const dw__ptx_operand **operand) {
    if (index >= t->in->operand_count) return dw__emu_malformed(t, "an operand is missing");
    *operand = &t->in->operands[index];
    return DW_OK;
}

dw_status dw__emu_take_address(dw__emu_translator *t, const dw__ptx_operand *operand,
                               dw__emu_address *address) {
    if (operand->kind != DW__PTX_ADDRESS)
        return dw__emu_malformed(t, "an operand must be an address such as [%rd1+8]");
    const dw__ptx_operand *base = &operand->items[0];
    address->offset = operand->integer;
    switch (base->kind) {
    case DW__PTX_REGISTER: address->wide = dw__emu_operand_bytes(t, base) == 8; break;
    case DW__PTX_VARIABLE:
        address->wide =
            base->variable->space != DW__PTX_SHARED && base->variable->space != DW__PTX_LOCAL;
        break;
    case DW__PTX_INTEGER: address->wide = true; break;
    default: return dw__emu_malformed(t, "an address must be a register or a variable");
    }
    return dw__emu_take_source(t, base, address->wide ? DW__T_B64 : DW__T_B32, &address->place);
}

/* ---- operations ---------------------------------------------------------------------------- */

dw__emu_next dw__emu_nothing(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)w, (void)op, (void)mask;
    return DW__NEXT;
}

dw_status dw__emu_emit(dw__emu_translator *t,
                       dw__emu_next (*run)(dw__emu_warp *, const dw__emu_op *, uint32_t)) {
    dw__emu_op op = {.run = run, .guard = DW__PTX_NO_GUARD};
    if (t->in->guard != DW__PTX_NO_GUARD) {
        uint32_t *own = &t->places[t->in->guard];
        if (*own == UINT32_MAX) DW_RETURN_IF_FAILED(dw__emu_take_scratch(t, 0, own));
        op.guard = *own;
        op.guard_negated = t->in->guard_negated;
    }
    DW_RETURN_IF_FAILED(DW_PUSH(&t->code, op));
    DW_RETURN_IF_FAILED(DW_PUSH(&t->from, t->at));
    t->op = &t->code.items[t->code.count - 1];
    return DW_OK;
}

void *dw__emu_detail(dw__emu_translator *t, size_t bytes) {
    return dw__arena_alloc(t->arena, bytes);
}

static const dw__emu_opcode *const tables[] = {
    dw__emu_opcodes_arithmetic, dw__emu_opcodes_float,   dw__emu_opcodes_convert,
    dw__emu_opcodes_memory,     dw__emu_opcodes_control, dw__emu_opcodes_warp,
    dw__emu_opcodes_barrier,    dw__emu_opcodes_copy,    dw__emu_opcodes_matrix,
    dw__emu_opcodes_integer,    dw__emu_opcodes_cluster, dw__emu_opcodes_tensormap,
    dw__emu_opcodes_mma,        dw__emu_opcodes_wgmma,   dw__emu_opcodes_tcgen05,
    dw__emu_opcodes_call,       dw__emu_opcodes_wmma,
};

static dw_status translate_instruction(dw__emu_translator *t) {
    const char *only = dw__emu_only_on(t->in, t->program->architecture);
    if (only)
        return dw__fail(DW_UNSUPPORTED,
                        "%s, kernel %s, PTX line %d: %s is an instruction of %s, not of sm_%d",
                        t->program->module->name, t->function->name, t->in->line, t->in->spelling,
                        only, t->program->architecture);
    for (size_t i = 0; i < DW_COUNT(tables); i++) {
        for (const dw__emu_opcode *opcode = tables[i]; opcode->name; opcode++) {
            if (strcmp(opcode->name, t->in->opcode) != 0) continue;
            t->cursor = 0;
            size_t before = t->code.count;
            dw_status status = opcode->translate(t);
            if (status == DW_UNSUPPORTED && before == t->code.count && t->cursor == 0)
                continue; /* the form may belong to another table */
            DW_RETURN_IF_FAILED(status);
            return dw__emu_all_taken(t) ? DW_OK : dw__emu_unsupported(t);
        }
    }
    return dw__emu_unsupported(t);
}

/* ---- variables ----------------------------------------------------------------------------- */

static uint64_t round_up(uint64_t value, uint64_t align) {
    return (value + align - 1) / align * align;
}

static dw_status lay(dw__emu_translator *t, const dw__ptx_variable *variable, uint64_t *next) {
    *next = round_up(*next, variable->align);
    DW_RETURN_IF_FAILED(DW_PUSH(&t->laid_names, variable));
    DW_RETURN_IF_FAILED(DW_PUSH(&t->laid_places, *next));
    *next += variable->bytes;
    return DW_OK;
}

/* Lays out shared variables after the system's KiB; the launch's dynamic memory follows at a multiple of 1,024 bytes.
 * Swizzles apply to absolute addresses, and compiled programs rely on this alignment. */
static dw_status lay_variables(dw__emu_translator *t) {
    uint64_t shared = DW__SHARED_FIRST, local = 0, parameters = 0;
    const dw__ptx_module *module = t->program->module;
    const size_t most = module->variables.count + t->function->variables.count;
    struct dw__emu_shared_variable *named = dw__arena_alloc(t->arena, (most + 1) * sizeof *named);
    if (!named) return dw__fail_memory("variables of a kernel", most * sizeof *named);
    t->kernel->shared_variables = named;
    for (size_t pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < most; i++) {
            const dw__ptx_variable *variable =
                i < module->variables.count
                    ? module->variables.items[i]
                    : t->function->variables.items[i - module->variables.count];
            bool dynamic = variable->bytes == 0;
            if (variable->space == DW__PTX_SHARED && dynamic == (pass == 1)) {
                DW_RETURN_IF_FAILED(lay(t, variable, &shared));
                if (!dynamic)
                    named[t->kernel->shared_variable_count++] = (struct dw__emu_shared_variable){
                        variable->name, (uint32_t)(shared - variable->bytes),
                        (uint32_t)variable->bytes};
            }
            if (variable->space == DW__PTX_LOCAL && pass == 0)
                DW_RETURN_IF_FAILED(lay(t, variable, &local));
            if (variable->space == DW__PTX_PARAM && pass == 0)
                DW_RETURN_IF_FAILED(lay(t, variable, &local));
        }
        if (pass == 0) {
            t->kernel->shared_bytes = (uint32_t)shared;
            shared = t->kernel->dynamic_first = (uint32_t)round_up(shared, 1024);
        }
    }
    if (shared > (1 << 20) || local > (1 << 20))
        return dw__fail(
            DW_UNSUPPORTED,
            "%s, kernel %s: more than 1 MiB of shared or local variables is not supported",
            module->name, t->function->name);
    t->kernel->local_bytes = (uint32_t)local;

    size_t count = t->function->parameters.count;
    uint32_t *places = dw__arena_alloc(t->arena, (count + 1) * sizeof *places);
    uint32_t *sizes = dw__arena_alloc(t->arena, (count + 1) * sizeof *sizes);
    if (!places || !sizes) return dw__fail_memory("parameters of a kernel", count * sizeof *places);
    for (size_t i = 0; i < count; i++) {
        const dw__ptx_variable *parameter = t->function->parameters.items[i];
        DW_RETURN_IF_FAILED(lay(t, parameter, &parameters));
        places[i] = (uint32_t)(parameters - parameter->bytes);
        sizes[i] = (uint32_t)parameter->bytes;
        if (parameters > (1 << 16))
            return dw__fail(DW_UNSUPPORTED,
                            "%s, kernel %s: more than 64 KiB of parameters is not supported",
                            module->name, t->function->name);
    }
    t->kernel->parameter_places = places;
    t->kernel->parameter_sizes = sizes;
    t->kernel->parameter_count = (uint32_t)count;
    t->kernel->parameter_bytes = (uint32_t)parameters;
    return DW_OK;
}

/* Returns the address of a variable or function; 0 if the name is neither. Each module with a virtual function
 * contains its table, even if no kernel calls one. So functions have addresses, outside of all memory; a call through
 * one is rejected at the call. */
static uint64_t address_of(const dw__emu_program *program, const char *name) {
    static const uint64_t first_function = (uint64_t)0xFFF0 << 48;
    const dw__ptx_module *module = program->module;
    for (uint32_t i = 0; i < program->symbol_count; i++)
        if (strcmp(program->symbols[i].variable->name, name) == 0)
            return (uint64_t)(uintptr_t)program->symbols[i].address;
    for (size_t i = 0; i < module->functions.count; i++)
        if (strcmp(module->functions.items[i]->name, name) == 0) return first_function + 16 * i;
    return 0;
}

static dw_status place_symbols(dw__emu_program *program, dw__emu_memory *memory) {
    const dw__ptx_module *module = program->module;
    program->symbols =
        dw__arena_alloc(program->arena, (module->variables.count + 1) * sizeof *program->symbols);
    if (!program->symbols) return dw__fail_memory("variables of a PTX module", 0);
    for (size_t i = 0; i < module->variables.count; i++) {
        const dw__ptx_variable *variable = module->variables.items[i];
        if (variable->space != DW__PTX_GLOBAL && variable->space != DW__PTX_CONST) continue;
        if (variable->external)
            return dw__fail(
                DW_UNSUPPORTED,
                "%s, PTX line %d: variable \"%s\" is defined in another module: link them first",
                module->name, variable->line, variable->name);
        void *address;
        DW_RETURN_IF_FAILED(
            dw__emu_memory_allocate(memory, variable->bytes ? variable->bytes : 1, &address));
        program->symbols[program->symbol_count].variable = variable;
        program->symbols[program->symbol_count++].address = address;
        if (variable->initial_bytes) memcpy(address, variable->initial, variable->initial_bytes);
        if (variable->bytes > variable->initial_bytes)
            memset((char *)address + variable->initial_bytes, 0,
                   variable->bytes - variable->initial_bytes);
        dw__emu_memory_mark(memory, address, variable->bytes, true);
    }
    for (uint32_t i = 0; i < program->symbol_count; i++) {
        for (const dw__ptx_reference *r = program->symbols[i].variable->references; r;
             r = r->next) {
            uint64_t value = address_of(program, r->name);
            if (!value)
                return dw__fail(DW_UNSUPPORTED,
                                "%s: variable \"%s\" begins with the address of \"%s\", which is "
                                "neither a variable nor a function",
                                module->name, program->symbols[i].variable->name, r->name);
            value += (uint64_t)r->addend;
            memcpy((char *)program->symbols[i].address + r->offset, &value, sizeof value);
        }
    }
    return DW_OK;
}

/* ---- kernels ------------------------------------------------------------------------------- */

/* Changes the targets of branches from instructions to operations. */
static void aim_branches(dw__emu_translator *t, const uint32_t *first_op) {
    for (size_t i = 0; i < t->code.count; i++) {
        dw__emu_op *op = &t->code.items[i];
        if (op->c == UINT32_MAX) op->c = first_op[op->immediate];
    }
}

static dw_status translate_kernel(dw__emu_program *program, dw__emu_memory *memory,
                                  const dw__ptx_function *function, dw__emu_kernel *kernel) {
    dw_status status = dw__emu_inline(program->module, function, &function);
    if (status == DW_UNSUPPORTED) {
        *kernel =
            (dw__emu_kernel){.name = function->name,
                             .function = function,
                             .module = program->module,
                             .unsupported = dw__arena_strdup(program->arena, dw_last_error())};
        return kernel->unsupported ? DW_OK : dw__fail_memory("a message", 0);
    }
    DW_RETURN_IF_FAILED(status);
    dw__emu_translator t = {.program = program,
                            .memory = memory,
                            .function = function,
                            .kernel = kernel,
                            .arena = program->arena,
                            .carry = UINT32_MAX};
    uint32_t *first_op = NULL;
    *kernel =
        (dw__emu_kernel){.name = function->name, .function = function, .module = program->module};
    size_t registers = function->registers.count, instructions = function->code.count;
    t.constants = dw__map_create();
    t.places = dw__malloc((registers + 1) * sizeof *t.places);
    first_op = dw__malloc((instructions + 1) * sizeof *first_op);
    t.first_read = dw__malloc((instructions + 1) * sizeof *t.first_read);
    if (!t.constants || !t.places || !first_op || !t.first_read)
        DW_TRY(dw__fail_memory("a kernel's registers", registers));
    memset(t.places, 0xFF, (registers + 1) * sizeof *t.places);
    DW_TRY(lay_variables(&t));

    for (t.at = 0; t.at < instructions; t.at++) {
        t.in = &function->code.items[t.at];
        first_op[t.at] = (uint32_t)t.code.count;
        t.first_read[t.at] = (uint32_t)t.reads.count;
        status = translate_instruction(&t);
        /* Reported when the kernel is launched; other kernels of the module run. */
        if (status == DW_UNSUPPORTED) {
            kernel->unsupported = dw__arena_strdup(t.arena, dw_last_error());
            status = kernel->unsupported ? DW_OK : dw__fail_memory("a message", 0);
            goto cleanup;
        }
        DW_TRY(status);
    }
    first_op[instructions] = (uint32_t)t.code.count;
    t.first_read[instructions] = (uint32_t)t.reads.count;
    aim_branches(&t, first_op);
    kernel->code = dw__arena_alloc(t.arena, t.code.count * sizeof *kernel->code);
    kernel->presets = dw__arena_alloc(t.arena, (t.presets.count + 1) * sizeof *kernel->presets);
    uint32_t *from = dw__arena_alloc(t.arena, t.from.count * sizeof *from);
    if (!kernel->code || !kernel->presets || !from)
        DW_TRY(dw__fail_memory("a kernel's operations", t.code.count));
    assert(t.code.items && t.from.items);
    memcpy(kernel->code, t.code.items, t.code.count * sizeof *kernel->code);
    if (t.presets.count)
        memcpy(kernel->presets, t.presets.items, t.presets.count * sizeof *kernel->presets);
    memcpy(from, t.from.items, t.from.count * sizeof *from);
    kernel->first_read =
        dw__ptx_copy(t.arena, t.first_read, (instructions + 1) * sizeof *t.first_read);
    kernel->reads = dw__ptx_copy(t.arena, t.reads.items, t.reads.count * sizeof *t.reads.items);
    if (!kernel->first_read || !kernel->reads)
        DW_TRY(dw__fail_memory("a kernel's operations", t.reads.count));
    if (kernel->local_bytes > 0) {
        kernel->load_uses = dw__emu_load_uses(function, t.arena);
        if (!kernel->load_uses) DW_TRY(dw__fail_memory("the uses of loads", instructions));
    }
    kernel->from = from;
    kernel->code_count = (uint32_t)t.code.count;
    kernel->preset_count = (uint32_t)t.presets.count;
cleanup:
    dw__map_destroy(t.constants);
    dw__free(t.places);
    dw__free(first_op);
    dw__free(t.first_read);
    dw__free(t.reads.items);
    dw__free(t.code.items);
    dw__free(t.from.items);
    dw__free(t.presets.items);
    dw__free(t.laid_names.items);
    dw__free(t.laid_places.items);
    return status;
}

dw_status dw__emu_translate(dw__ptx_module *module, int architecture, dw__emu_memory *memory,
                            dw__emu_program **out) {
    dw_status status = DW_OK;
    dw__emu_program *program = dw__calloc(1, sizeof *program);
    if (!program) return dw__fail_memory("a PTX module", sizeof *program);
    program->module = module;
    program->architecture = architecture;
    program->arena = dw__arena_create();
    if (!program->arena) DW_TRY(dw__fail_memory("a PTX module", 0));
    DW_TRY(place_symbols(program, memory));
    program->kernels =
        dw__arena_alloc(program->arena, (module->functions.count + 1) * sizeof *program->kernels);
    if (!program->kernels) DW_TRY(dw__fail_memory("a PTX module", 0));
    for (size_t i = 0; i < module->functions.count; i++) {
        const dw__ptx_function *function = module->functions.items[i];
        if (!function->entry || function->declared_only) continue;
        DW_TRY(
            translate_kernel(program, memory, function, &program->kernels[program->kernel_count]));
        program->kernel_count++;
    }
    *out = program;
    program = NULL;
cleanup:
    if (program) {
        program->module = NULL;
        dw__emu_program_destroy(program, memory);
    }
    return status;
}

void dw__emu_program_destroy(dw__emu_program *program, dw__emu_memory *memory) {
    if (!program) return;
    for (uint32_t i = 0; i < program->symbol_count; i++)
        dw__emu_memory_release(memory, program->symbols[i].address);
    dw__ptx_destroy(program->module);
    if (program->arena) dw__arena_destroy(program->arena);
    dw__free(program);
}
