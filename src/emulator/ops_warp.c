/* Communication between the lanes of a warp: PTX ISA, "shfl.sync", "bar.warp.sync", "vote.sync", "match.sync",
 * "redux.sync", "elect.sync", "activemask".
 */
#include "emulator/lanes.h"
#include <math.h>
#include <string.h>

/* Waits for lanes of the member mask that have not arrived. A lane outside of the mask must not execute the
 * operation. */
static dw__emu_next gathered(dw__emu_warp *w, uint32_t mask, uint32_t members) {
    uint32_t strangers = mask & ~members;
    if (strangers) {
        dw__emu_found(w, __builtin_ctz(strangers), DW__FOUND_DIVERGENCE,
                      "is not in the member mask 0x%08x of the operation that it executes",
                      members);
        return DW__FAULT;
    }
    return (members & w->live & ~mask) ? DW__APART : DW__NEXT;
}

/* Returns the lanes of `mask` with the same member mask as the first one. */
static uint32_t alike(const uint32_t *members, uint32_t mask) {
    const uint32_t first = members[__builtin_ctz(mask)];
    uint32_t same = 0;
    DW__EACH_LANE(lane, mask) same |= (uint32_t)(members[lane] == first) << lane;
    return same;
}

/* Runs an operation for subgroups of the warp, such as halves that reduce separately. Each subgroup has its own member
 * mask. `run` is called for each subgroup whose lanes have all arrived; the other lanes wait. */
static dw__emu_next run_parts(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask,
                              const uint32_t *members, dw__emu_run run) {
    uint32_t done = 0, waiting = 0;
    for (uint32_t rest = mask, part; rest; rest &= ~part) {
        part = alike(members, rest);
        switch (run(w, op, part)) {
        case DW__NEXT: done |= part; break;
        case DW__APART: waiting |= part; break;
        default: return DW__FAULT;
        }
    }
    if (!waiting) return DW__NEXT;
    if (!done) return DW__APART;
    dw__emu_leave_behind(w, waiting);
    return DW__NEXT;
}
/* Operations call this first in `run`: all lanes of the subgroup, whose member masks lie at `place`, have arrived. */
#define GATHER(w, op, mask, place, run)                                                            \
    do {                                                                                           \
        const uint32_t *members_ = DW__REGISTER(w, uint32_t, place);                               \
        const uint32_t first_ = members_[__builtin_ctz(mask)];                                     \
        if (((mask) & ~first_) && alike(members_, mask) != (mask))                                 \
            return run_parts(w, op, mask, members_, run);                                          \
        const dw__emu_next gathered_ = gathered(w, mask, first_);                                  \
        if (gathered_ != DW__NEXT) return gathered_;                                               \
    } while (0)

/* ---- shfl ---------------------------------------------------------------------------------- */

typedef struct shuffle {
    enum { UP, DOWN, BUTTERFLY, INDEX } mode;
    uint32_t members, valid;
    bool has_valid;
} shuffle;

static dw__emu_next shfl_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const shuffle *k = op->detail;
    GATHER(w, op, mask, k->members, shfl_run);
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a), *b = DW__REGISTER(w, uint32_t, op->b);
    const uint32_t *c = DW__REGISTER(w, uint32_t, op->c);
    uint32_t result[DW__LANES], valid = 0;
    DW__EACH_LANE(lane, mask) {
        const uint32_t value = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
        const uint32_t most = (lane & segment) | (clamp & ~segment), least = lane & segment;
        uint32_t from = 0;
        bool inside = false;
        switch (k->mode) {
        case UP: from = lane - value, inside = (int)from >= (int)most; break;
        case DOWN: from = lane + value, inside = from <= most; break;
        case BUTTERFLY: from = lane ^ value, inside = from <= most; break;
        case INDEX: from = least | (value & ~segment), inside = from <= most; break;
        }
        if (!inside) from = lane;
        valid |= (uint32_t)inside << lane;
        result[lane] = a[from & 31];
    }
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    DW__EACH_LANE(lane, mask) d[lane] = result[lane];
    if (k->has_valid) {
        uint32_t *p = DW__REGISTER(w, uint32_t, k->valid);
        *p = (*p & ~mask) | valid;
    }
    return DW__NEXT;
}

static dw_status translate_shfl(dw__emu_translator *t) {
    static const char *const modes[] = {"up", "down", "bfly", "idx", NULL};
    shuffle *k = dw__emu_detail(t, sizeof *k);
    uint32_t a, b, c, d;
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    if (!dw__emu_take(t, "sync")) return dw__emu_unsupported(t);
    int mode = dw__emu_take_one_of(t, modes);
    if (mode < 0 || !dw__emu_take(t, "b32") || t->in->operand_count != 5)
        return dw__emu_unsupported(t);
    dw__ptx_operand first = t->in->operands[0];
    k->mode = (__typeof__(k->mode))mode;
    k->has_valid = first.also != NULL;
    if (k->has_valid)
        DW_RETURN_IF_FAILED(dw__emu_take_result(t, first.also, DW__T_PRED, &k->valid));
    first.also = NULL;
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &first, DW__T_B32, &d));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B32, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], DW__T_B32, &b));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[3], DW__T_B32, &c));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[4], DW__T_B32, &k->members));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, shfl_run));
    t->op->a = a, t->op->b = b, t->op->c = c, t->op->d = d;
    t->op->detail = k;
    return DW_OK;
}

/* ---- votes --------------------------------------------------------------------------------- */

enum { ALL, ANY, UNI, BALLOT };

static dw__emu_next vote_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    GATHER(w, op, mask, op->b, vote_run);
    const uint32_t p = *DW__REGISTER(w, uint32_t, op->a) & mask;
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    if (op->immediate == BALLOT) {
        DW__EACH_LANE(lane, mask) d[lane] = p;
        return DW__NEXT;
    }
    bool yes = op->immediate == ALL   ? p == mask
               : op->immediate == ANY ? p != 0
                                      : p == mask || p == 0;
    *d = (*d & ~mask) | (yes ? mask : 0);
    return DW__NEXT;
}
static dw_status translate_vote(dw__emu_translator *t) {
    static const char *const kinds[] = {"all", "any", "uni", "ballot", NULL};
    uint32_t a, b, d;
    /* The ISA's text has .sync first. ptxas also accepts it after the mode, and CUB uses that form. */
    bool sync = dw__emu_take(t, "sync");
    int kind = dw__emu_take_one_of(t, kinds);
    if (!sync && !dw__emu_take(t, "sync")) return dw__emu_unsupported(t);
    if (kind < 0 || !dw__emu_take(t, kind == BALLOT ? "b32" : "pred") || t->in->operand_count != 3)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_PRED, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], DW__T_B32, &b));
    DW_RETURN_IF_FAILED(
        dw__emu_take_result(t, &t->in->operands[0], kind == BALLOT ? DW__T_B32 : DW__T_PRED, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, vote_run));
    t->op->a = a, t->op->b = b, t->op->d = d;
    t->op->immediate = kind;
    return DW_OK;
}

static dw__emu_next match_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    GATHER(w, op, mask, op->b, match_run);
    const bool wide = op->immediate & 1;
    const uint32_t *other = op->detail; /* the predicate of match.all */
    uint64_t values[DW__LANES];
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d),
             *p = other ? DW__REGISTER(w, uint32_t, *other) : NULL;
    DW__EACH_LANE(lane, mask)
    values[lane] =
        wide ? DW__REGISTER(w, uint64_t, op->a)[lane] : DW__REGISTER(w, uint32_t, op->a)[lane];
    DW__EACH_LANE(lane, mask) {
        uint32_t same = 0;
        DW__EACH_LANE(k, mask) same |= (uint32_t)(values[k] == values[lane]) << k;
        d[lane] = op->immediate & 2 ? (same == mask ? mask : 0) : same;
        if (p) *p = (*p & ~((uint32_t)1 << lane)) | (uint32_t)(same == mask) << lane;
    }
    return DW__NEXT;
}
static dw_status translate_match(dw__emu_translator *t) {
    bool any = dw__emu_take(t, "any"), all = !any && dw__emu_take(t, "all");
    uint32_t a, b, d, *other = NULL;
    dw__emu_type type;
    if (!(any || all) || !dw__emu_take(t, "sync") || !dw__emu_take_type(t, &type) ||
        t->in->operand_count != 3)
        return dw__emu_unsupported(t);
    dw__ptx_operand first = t->in->operands[0];
    if (first.also) {
        other = dw__emu_detail(t, sizeof *other);
        if (!other) return dw__fail_memory("an operation", sizeof *other);
        DW_RETURN_IF_FAILED(dw__emu_take_result(t, first.also, DW__T_PRED, other));
        first.also = NULL;
    }
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &first, DW__T_B32, &d));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], DW__T_B32, &b));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, match_run));
    t->op->a = a, t->op->b = b, t->op->d = d;
    t->op->immediate = (dw__emu_type_bytes(type) == 8) + 2 * all;
    t->op->detail = other;
    return DW_OK;
}

/* ---- reductions ---------------------------------------------------------------------------- */

enum { SUM, LEAST, GREATEST, BITS_AND, BITS_OR, BITS_XOR };
static dw__emu_next redux_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    GATHER(w, op, mask, op->b, redux_run);
    const uint32_t *a = DW__REGISTER(w, uint32_t, op->a);
    const bool is_signed = op->immediate & 8, is_real = op->immediate & 16,
               magnitude = op->immediate & 32;
    const bool keep_nan = op->immediate & 64;
    uint32_t r = a[__builtin_ctz(mask)];
    if (magnitude) r &= 0x7FFFFFFF;
    DW__EACH_LANE(lane, mask & (mask - 1)) {
        uint32_t x = magnitude ? a[lane] & 0x7FFFFFFF : a[lane];
        if (is_real) {
            float p, q;
            memcpy(&p, &r, 4), memcpy(&q, &x, 4);
            bool nan = isnan(p) || isnan(q);
            bool take_x = isnan(p)                       ? true
                          : isnan(q)                     ? false
                          : (op->immediate & 7) == LEAST ? q < p
                                                         : q > p;
            r = nan && keep_nan ? 0x7FFFFFFF : take_x ? x : r;
            continue;
        }
        switch (op->immediate & 7) {
        case SUM: r += x; break;
        case LEAST: r = is_signed ? ((int32_t)x < (int32_t)r ? x : r) : x < r ? x : r; break;
        case GREATEST: r = is_signed ? ((int32_t)x > (int32_t)r ? x : r) : x > r ? x : r; break;
        case BITS_AND: r &= x; break;
        case BITS_OR: r |= x; break;
        default: r ^= x; break;
        }
    }
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    DW__EACH_LANE(lane, mask) d[lane] = r;
    return DW__NEXT;
}
static dw_status translate_redux(dw__emu_translator *t) {
    static const char *const kinds[] = {"add", "min", "max", "and", "or", "xor", NULL};
    dw__emu_type type;
    uint32_t a, b, d;
    if (!dw__emu_take(t, "sync")) return dw__emu_unsupported(t);
    int kind = dw__emu_take_one_of(t, kinds);
    bool magnitude = dw__emu_take(t, "abs"), keep_nan = dw__emu_take(t, "NaN");
    if (kind < 0 || !dw__emu_take_type(t, &type) || dw__emu_type_bytes(type) != 4 ||
        t->in->operand_count != 3)
        return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], type, &a));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[2], DW__T_B32, &b));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], type, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, redux_run));
    t->op->a = a, t->op->b = b, t->op->d = d;
    t->op->immediate = kind + 8 * dw__emu_type_signed(type) + 16 * (type == DW__T_F32) +
                       32 * magnitude + 64 * keep_nan;
    return DW_OK;
}

/* ---- active lanes -------------------------------------------------------------------------- */

static dw__emu_next elect_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    GATHER(w, op, mask, op->b, elect_run);
    const uint32_t leader = (uint32_t)__builtin_ctz(mask);
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d), *p = DW__REGISTER(w, uint32_t, op->c);
    DW__EACH_LANE(lane, mask) d[lane] = leader;
    *p = (*p & ~mask) | (uint32_t)1 << leader;
    return DW__NEXT;
}
static dw_status translate_elect(dw__emu_translator *t) {
    uint32_t b, c, d;
    if (!dw__emu_take(t, "sync") || t->in->operand_count != 2 || !t->in->operands[0].also)
        return dw__emu_unsupported(t);
    dw__ptx_operand first = t->in->operands[0];
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, first.also, DW__T_PRED, &c));
    first.also = NULL;
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &first, DW__T_B32, &d));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B32, &b));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, elect_run));
    t->op->b = b, t->op->c = c, t->op->d = d;
    return DW_OK;
}

static dw__emu_next activemask_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    uint32_t *d = DW__REGISTER(w, uint32_t, op->d);
    DW__EACH_LANE(lane, mask) d[lane] = mask;
    return DW__NEXT;
}
static dw_status translate_activemask(dw__emu_translator *t) {
    const dw__ptx_operand *result;
    uint32_t d;
    if (!dw__emu_take(t, "b32")) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, 0, &result));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, result, DW__T_B32, &d));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, activemask_run));
    t->op->d = d;
    return DW_OK;
}

/* Lanes may arrive at different instructions; it is sufficient that all lanes of the mask are at one, with the same
 * mask. */
static dw__emu_next bar_warp_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const uint32_t *members = DW__REGISTER(w, uint32_t, op->a);
    const uint32_t first = members[__builtin_ctz(mask)];
    if (alike(members, mask) != mask) return run_parts(w, op, mask, members, bar_warp_run);
    const uint32_t missing = first & w->live & ~mask;
    if ((mask & ~first) || !missing) return gathered(w, mask, first);
    const dw__emu_op *code = w->cta->cluster->grid->kernel->code;
    uint32_t elsewhere = 0;
    for (int i = 0; i < w->other_count; i++) {
        const dw__emu_group *g = &w->others[i];
        const dw__emu_op *at = &code[g->pc];
        if (g->wait != DW__WAIT_LANES || at->run != bar_warp_run || g->pc == w->now.pc ||
            at->guard != DW__PTX_NO_GUARD)
            continue;
        const uint32_t *theirs = DW__REGISTER(w, uint32_t, at->a);
        if (theirs[__builtin_ctz(g->mask)] == first && alike(theirs, g->mask) == g->mask)
            elsewhere |= g->mask;
    }
    if (missing & ~elsewhere) return DW__APART;
    dw__emu_let_pass(w, first & ~mask);
    return DW__NEXT;
}
static dw_status translate_bar_warp(dw__emu_translator *t) {
    const dw__ptx_operand *members;
    uint32_t a;
    if (!dw__emu_take(t, "warp")) return dw__emu_unsupported(t);
    if (!dw__emu_take(t, "sync")) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_take_operand(t, 0, &members));
    DW_RETURN_IF_FAILED(dw__emu_take_source(t, members, DW__T_B32, &a));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, bar_warp_run));
    t->op->a = a;
    return DW_OK;
}

const dw__emu_opcode dw__emu_opcodes_warp[] = {
    {"shfl", translate_shfl},    {"vote", translate_vote},
    {"match", translate_match},  {"redux", translate_redux},
    {"elect", translate_elect},  {"activemask", translate_activemask},
    {"bar", translate_bar_warp}, {NULL, NULL},
};
