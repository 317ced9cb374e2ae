/* The instructions of Blackwell's tensor cores, tcgen05 (PTX ISA 9.7.16), one file for each kind of work; tcgen05.c
 * tells them apart. What a block's tensor pipe does (products, copies, commits) is done in the order in which it was
 * asked for, some turns later; beside it, in an order of their own, the loads and stores of each quarter of the lanes.
 */
#ifndef DW_EMULATOR_TCGEN05_H
#define DW_EMULATOR_TCGEN05_H

#include "emulator/lanes.h"
#include "emulator/matrix_operand.h"
#include "emulator/race.h"
#include "emulator/tensor_memory.h"

/* .cta_group::1 or ::2 as 1 or 2; 0: neither is there. */
int dw__emu_take_cta_group(dw__emu_translator *t);

/* The queue of the tensor pipe that works for a block, or for both of a pair. */
static inline uint32_t dw__emu_tensor_queue(const dw__emu_cta *cta, int cta_group) {
    return 0x10000 + (cta_group == 2 ? cta->rank & ~1u : cta->rank);
}
/* The queue of the loads and stores of a quarter of a block's lanes: whatever warps they are from, they are done in the
 * order in which they were asked for (kernels of others for B200 count on that). */
static inline uint32_t dw__emu_quarter_queue(const dw__emu_cta *cta, uint32_t warp) {
    return 0x20000 + cta->rank * 4 + warp % 4;
}
/* The blocks of the pair, by the parity of their ranks; without a peer, or where the block has named the other group
 * before, a finding and false. For a group of 1 pair[0] is the block alone. */
bool dw__emu_tensor_pair(dw__emu_cta *cta, int cta_group, const dw__tensor_user *user,
                         dw__emu_cta *pair[2]);
static inline dw__tensor_user dw__tensor_user_of(const dw__emu_warp *w, int lane) {
    return (dw__tensor_user){w->cta, w->index, w->now.pc, lane};
}
static inline dw__tensor_user dw__tensor_user_of_work(const dw__emu_async *work) {
    return (dw__tensor_user){work->cta, work->warp, work->pc, (int)work->lane};
}

/* A shared-memory descriptor (PTX ISA 9.7.16.4.1) as a matrix of elements of so many bits; false after a finding:
 * a form that is reserved or not supported. */
bool dw__emu_tensor_operand(const dw__tensor_user *user, uint64_t descriptor, bool mn_major,
                            int bits, dw__matrix_operand *operand);

/* After the word that follows "tcgen05.". */
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
