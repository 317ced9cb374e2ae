/* Loops over the lanes of a warp. */
#ifndef DW_EMULATOR_LANES_H
#define DW_EMULATOR_LANES_H

#include "emulator/translate.h"

#if defined(__clang__)
#define DW__LANES_APART
#else
#define DW__LANES_APART _Pragma("GCC ivdep")
#endif
/* Executes `statement` for each lane `i` of the mask, without a test per lane if the mask is full. Lanes are
 * independent of one another, so a result may overwrite its operand. */
#define DW__LANEWISE(mask, statement)                                                              \
    do {                                                                                           \
        if ((mask) == DW__ALL_LANES) {                                                             \
            DW__LANES_APART for (int i = 0; i < DW__LANES; i++) { statement; }                     \
        } else {                                                                                   \
            for (int i = 0; i < DW__LANES; i++)                                                    \
                if ((mask) >> i & 1) {                                                             \
                    statement;                                                                     \
                }                                                                                  \
        }                                                                                          \
    } while (0)

/* Values of 8 and 16 bits are zero-extended to words. RESULT is an expression of x, y and z, which have type T. */
#define DW__UNARY(name, T, SLOT, RESULT)                                                           \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a);                                        \
        SLOT *d = DW__REGISTER(w, SLOT, op->d);                                                    \
        DW__LANEWISE(mask, const T x = (T)a[i]; d[i] = (SLOT)(RESULT));                            \
        return DW__NEXT;                                                                           \
    }
#define DW__BINARY(name, T, SLOT, RESULT)                                                          \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a),                                        \
                   *b = DW__REGISTER(w, const SLOT, op->b);                                        \
        SLOT *d = DW__REGISTER(w, SLOT, op->d);                                                    \
        DW__LANEWISE(mask, const T x = (T)a[i]; const T y = (T)b[i]; d[i] = (SLOT)(RESULT));       \
        return DW__NEXT;                                                                           \
    }
#define DW__TERNARY(name, T, SLOT, RESULT)                                                         \
    static dw__emu_next name(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {               \
        const SLOT *a = DW__REGISTER(w, const SLOT, op->a),                                        \
                   *b = DW__REGISTER(w, const SLOT, op->b);                                        \
        const SLOT *c = DW__REGISTER(w, const SLOT, op->c);                                        \
        SLOT *d = DW__REGISTER(w, SLOT, op->d);                                                    \
        DW__LANEWISE(mask, const T x = (T)a[i]; const T y = (T)b[i]; const T z = (T)c[i];          \
                     d[i] = (SLOT)(RESULT));                                                       \
        return DW__NEXT;                                                                           \
    }

/* Emits an operation whose operands d, a, b, c all have one type; `count` is the number of sources. */
static inline dw_status dw__emu_emit_same(dw__emu_translator *t, dw__emu_type type, int count,
                                          dw__emu_next (*run)(dw__emu_warp *, const dw__emu_op *,
                                                              uint32_t)) {
    uint32_t places[4] = {0};
    if (t->in->operand_count != count + 1) return dw__emu_malformed(t, "wrong number of operands");
    for (int i = 1; i <= count; i++)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[i], type, &places[i]));
    DW_RETURN_IF_FAILED(dw__emu_take_result(t, &t->in->operands[0], type, &places[0]));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, run));
    t->op->d = places[0], t->op->a = places[1], t->op->b = places[2], t->op->c = places[3];
    return DW_OK;
}

typedef dw__emu_next (*dw__emu_run)(dw__emu_warp *, const dw__emu_op *, uint32_t);

#endif
