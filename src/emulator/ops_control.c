/* Branches, exits, fences and scheduling hints: PTX ISA, "Control Flow Instructions", "membar/fence", "Miscellaneous
 * Instructions".
 */
#include "emulator/lanes.h"
#include "emulator/race.h"
#include <stdio.h>
#include <string.h>

/* ---- branches ------------------------------------------------------------------------------ */

/* Lanes whose guard is true go to the target, the others continue; dw__emu_run_warp splits the group. */
static dw__emu_next bra_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    uint32_t stay = w->now.mask & ~mask;
    if (stay) {
        dw__emu_group rest = {.pc = w->now.pc + 1, .mask = stay};
        w->others[w->other_count++] = rest;
        if (rest.pc < w->soonest) w->soonest = rest.pc;
    }
    w->now.mask = mask;
    w->now.pc = op->c;
    return DW__JUMPED;
}

static dw_status translate_bra(dw__emu_translator *t) {
    const dw__ptx_operand *target;
    (void)dw__emu_take(t, "uni");
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, 0, &target));
    if (target->kind != DW__PTX_LABEL) return dw__emu_malformed(t, "the branch target is no label");
    DW_RETURN_IF_FAILED(dw__emu_emit(t, bra_run));
    t->op->c = UINT32_MAX; /* resolved when all operations are numbered */
    t->op->immediate = target->number;
    return DW_OK;
}

static dw__emu_next exit_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)op;
    w->live &= ~mask;
    w->now.mask &= ~mask;
    w->cta->cluster->progress++;
    return w->now.mask ? DW__NEXT : DW__ENDED;
}
static dw_status translate_exit(dw__emu_translator *t) {
    (void)dw__emu_take(t, "uni");
    return dw__emu_emit(t, exit_run);
}

static dw__emu_next trap_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    dw__emu_found(w, __builtin_ctz(mask), DW__FOUND_TRAP, "executes %s",
                  op->immediate ? "brkpt" : "trap");
    return DW__FAULT;
}
static dw_status translate_trap(dw__emu_translator *t) { return dw__emu_emit(t, trap_run); }
static dw_status translate_brkpt(dw__emu_translator *t) {
    DW_RETURN_IF_FAILED(dw__emu_emit(t, trap_run));
    t->op->immediate = 1;
    return DW_OK;
}

/* ---- giving way ---------------------------------------------------------------------------- */

static dw__emu_next give_way_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)w, (void)op, (void)mask;
    return DW__GAVE_WAY;
}
static dw_status translate_nanosleep(dw__emu_translator *t) {
    return dw__emu_take(t, "u32") ? dw__emu_emit(t, give_way_run) : dw__emu_unsupported(t);
}

/* The emulator needs no register allocation, and a launch starts after the previous one has ended. */
static dw_status translate_setmaxnreg(dw__emu_translator *t) {
    if (!(dw__emu_take(t, "inc") || dw__emu_take(t, "dec")) || !dw__emu_take(t, "sync") ||
        !dw__emu_take(t, "aligned") || !dw__emu_take(t, "u32"))
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_emit(t, dw__emu_nothing));
    t->op->aligned = true;
    return DW_OK;
}
static dw_status translate_pmevent(dw__emu_translator *t) {
    (void)dw__emu_take(t, "mask");
    return dw__emu_emit(t, dw__emu_nothing);
}
static dw_status translate_griddepcontrol(dw__emu_translator *t) {
    if (!dw__emu_take(t, "launch_dependents") && !dw__emu_take(t, "wait"))
        return dw__emu_unsupported(t);
    return dw__emu_emit(t, dw__emu_nothing);
}

/* ---- fences -------------------------------------------------------------------------------- */

/* fence.proxy.async: makes the generic writes that the warp has seen visible to asynchronous work. */
static dw__emu_next proxy_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)op, (void)mask;
    dw__emu_race_fence_proxy(w);
    return DW__NEXT;
}
static dw__emu_next init_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)op, (void)mask;
    dw__emu_race_fence_init(w);
    return DW__NEXT;
}
static dw__emu_next fence_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)op, (void)mask;
    dw__emu_race_fence(w);
    return DW__NEXT;
}

static dw_status translate_membar(dw__emu_translator *t) {
    static const char *const levels[] = {"cta", "gl", "sys", NULL};
    return dw__emu_take_one_of(t, levels) >= 0 ? dw__emu_emit(t, fence_run)
                                               : dw__emu_unsupported(t);
}

static dw_status translate_fence(dw__emu_translator *t) {
    static const char *const senses[] = {"sc", "acq_rel", "acquire", "release", NULL};
    static const char *const scopes[] = {"cta", "cluster", "gpu", "sys", NULL};
    if (dw__emu_take(t, "mbarrier_init"))
        return dw__emu_take(t, "release") && dw__emu_take(t, "cluster") ? dw__emu_emit(t, init_run)
                                                                        : dw__emu_unsupported(t);
    if (dw__emu_take(t, "proxy")) {
        if (dw__emu_take(t, "alias")) return dw__emu_emit(t, dw__emu_nothing);
        if (dw__emu_take(t, "tensormap::generic")) {
            (void)dw__emu_take_one_of(t, senses);
            (void)dw__emu_take_one_of(t, scopes);
            return dw__emu_emit(t, dw__emu_nothing);
        }
        if (dw__emu_take(t, "async")) {
            static const char *const spaces[] = {"shared::cta", "shared::cluster", NULL};
            const bool global = dw__emu_take(t, "global");
            if (!global) (void)dw__emu_take_one_of(t, spaces);
            return dw__emu_emit(t, global ? dw__emu_nothing : proxy_run);
        }
        return dw__emu_unsupported(t);
    }
    (void)dw__emu_take_one_of(t, senses);
    (void)dw__emu_take(t, "sync_restrict::shared::cta");
    (void)dw__emu_take(t, "sync_restrict::shared::cluster");
    (void)dw__emu_take_one_of(t, scopes);
    return dw__emu_emit(t, fence_run);
}

const dw__emu_opcode dw__emu_opcodes_control[] = {
    {"bra", translate_bra},
    {"exit", translate_exit},
    {"ret", translate_exit},
    {"trap", translate_trap},
    {"brkpt", translate_brkpt},
    {"pmevent", translate_pmevent},
    {"nanosleep", translate_nanosleep},
    {"setmaxnreg", translate_setmaxnreg},
    {"griddepcontrol", translate_griddepcontrol},
    {"membar", translate_membar},
    {"fence", translate_fence},
    {NULL, NULL},
};
