/* The instructions of Blackwell's tensor cores (PTX ISA, "TensorCore 5th Generation Family Instructions"). There is
 * one file for each kind of work; tcgen05.c dispatches to them. A block's tensor pipe performs MMAs, copies and
 * commits in issue order, some turns after their issue. The loads and stores of each quarter of the lanes have a
 * separate queue.
 */
#ifndef DW_EMULATOR_TCGEN05_H
#define DW_EMULATOR_TCGEN05_H

#include "emulator/lanes.h"
#include "emulator/matrix_operand.h"
#include "emulator/race.h"
#include "emulator/tensor_memory.h"

/* Returns 1 for .cta_group::1, 2 for .cta_group::2, 0 if there is neither. */
int dw__emu_take_cta_group(dw__emu_translator *t);

/* The queue of the tensor pipe that works for a block, or for both blocks of a pair. */
static inline uint32_t dw__emu_tensor_queue(const dw__emu_cta *cta, int cta_group) {
    return 0x10000 + (cta_group == 2 ? cta->rank & ~1u : cta->rank);
}
/* The queue of the loads and stores of a quarter of a block's lanes. They are performed in issue order, whichever
 * warps issued them: published kernels for B200 rely on that. */
static inline uint32_t dw__emu_quarter_queue(const dw__emu_cta *cta, uint32_t warp) {
    return 0x20000 + cta->rank * 4 + warp % 4;
}
/* Sets `pair` to the blocks of the pair, indexed by the parity of their ranks; for cta_group 1, pair[0] is the block
 * itself. Reports a finding and returns false if the block has no peer or has used the other cta_group before. */
bool dw__emu_tensor_pair(dw__emu_cta *cta, int cta_group, const dw__tensor_user *user,
                         dw__emu_cta *pair[2]);
static inline dw__tensor_user dw__tensor_user_of(const dw__emu_warp *w, int lane) {
    return (dw__tensor_user){w->cta, w->index, w->now.pc, lane};
}
static inline dw__tensor_user dw__tensor_user_of_work(const dw__emu_async *work) {
    return (dw__tensor_user){work->cta, work->warp, work->pc, (int)work->lane};
}

/* Decodes a shared-memory descriptor (PTX ISA, "Shared memory descriptor") into a matrix with elements of `bits`
 * bits. Reports a finding and returns false if the form is reserved or not supported. */
bool dw__emu_tensor_operand(const dw__tensor_user *user, uint64_t descriptor, bool mn_major,
                            int bits, dw__matrix_operand *operand);

/* Each translates the instruction after the word that follows "tcgen05.". */
dw_status dw__emu_translate_tensor_alloc(dw__emu_translator *t);
dw_status dw__emu_translate_tensor_dealloc(dw__emu_translator *t);
dw_status dw__emu_translate_tensor_relinquish(dw__emu_translator *t);
dw_status dw__emu_translate_tensor_load(dw__emu_translator *t, bool store);
dw_status dw__emu_translate_tensor_wait(dw__emu_translator *t, bool store);
dw_status dw__emu_translate_tensor_copy(dw__emu_translator *t);
dw_status dw__emu_translate_tensor_shift(dw__emu_translator *t);
dw_status dw__emu_translate_tensor_product(dw__emu_translator *t);
dw_status dw__emu_translate_tensor_commit(dw__emu_translator *t);

#endif
