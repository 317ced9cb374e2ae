#include "emulator/load_uses.h"
#include <string.h>

/* The use of each register's value with the highest rank. */
typedef struct uses {
    uint8_t *of;
    bool changed;
} uses;

static void raise_register(uses *u, uint32_t number, uint8_t use) {
    if (u->of[number] >= use) return;
    u->of[number] = use;
    u->changed = true;
}
static void raise_operand(uses *u, const dw__ptx_operand *o, uint8_t use) {
    if (o->kind == DW__PTX_REGISTER) raise_register(u, o->number, use);
    for (int i = 0; i < o->count; i++) raise_operand(u, &o->items[i], use);
    if (o->also) raise_operand(u, o->also, use);
}
static uint8_t use_of(const uses *u, const dw__ptx_operand *o) {
    uint8_t most = o->kind == DW__PTX_REGISTER ? u->of[o->number] : DW__USE_COPIED;
    for (int i = 0; i < o->count; i++) {
        const uint8_t use = use_of(u, &o->items[i]);
        if (use > most) most = use;
    }
    return most;
}

static bool is_one_of(const char *word, const char *const *words) {
    for (; *words; words++)
        if (strcmp(word, *words) == 0) return true;
    return false;
}

static bool has_modifier(const dw__ptx_instruction *in, const char *const *words) {
    for (int i = 0; i < in->modifier_count; i++)
        if (is_one_of(in->modifiers[i], words)) return true;
    return false;
}

static void look_at(uses *u, const dw__ptx_instruction *in) {
    static const char *const outside[] = {"global", "shared", "shared::cta", "shared::cluster",
                                          "async",  "bulk",   NULL};
    /* Compilers use these to assemble bytes and take them apart. */
    static const char *const moves[] = {"mov", "or",  "and",  "shl", "shr",
                                        "bfi", "bfe", "prmt", "cvt", NULL};
    if (in->guard != DW__PTX_NO_GUARD) raise_register(u, in->guard, DW__USE_COMPUTED);
    if (in->operand_count == 0) return;
    const dw__ptx_operand *o = in->operands;
    uint8_t use = DW__USE_COMPUTED;
    int first = 0;
    if (strcmp(in->opcode, "ld") == 0) {
        first = 1;
    } else if (strcmp(in->opcode, "st") == 0) {
        raise_operand(u, &o[0], DW__USE_COMPUTED);
        use = has_modifier(in, outside) ? DW__USE_PUBLISHED : DW__USE_COPIED, first = 1;
    } else if (is_one_of(in->opcode, moves)) {
        use = use_of(u, &o[0]), first = 1;
    }
    for (int i = first; i < in->operand_count; i++) raise_operand(u, &o[i], use);
}

uint8_t *dw__emu_load_uses(const dw__ptx_function *function, dw__arena *arena) {
    const size_t count = function->code.count, registers = function->registers.count;
    uint8_t *of_instructions = dw__arena_alloc(arena, count + 1);
    uses u = {.of = dw__calloc(registers + 1, 1), .changed = true};
    if (of_instructions && u.of) {
        /* At most twice for each register, and rarely more than twice in all. */
        while (u.changed) {
            u.changed = false;
            for (size_t i = count; i-- > 0;) look_at(&u, &function->code.items[i]);
        }
        for (size_t i = 0; i < count; i++) {
            const dw__ptx_instruction *in = &function->code.items[i];
            of_instructions[i] = strcmp(in->opcode, "ld") == 0 && in->operand_count > 0
                                     ? use_of(&u, &in->operands[0])
                                     : DW__USE_COMPUTED;
        }
    }
    const bool good = u.of != NULL;
    dw__free(u.of);
    return good ? of_instructions : NULL;
}
