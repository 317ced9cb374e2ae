/* tcgen05 (PTX ISA, "TensorCore 5th Generation Family Instructions"): shared functions, fences, and commit, which
 * arrives on an mbarrier when the tensor pipe has completed the preceding work.
 */
#include "emulator/tcgen05.h"
#include "emulator/barrier.h"

int dw__emu_take_cta_group(dw__emu_translator *t) {
    return dw__emu_take(t, "cta_group::1") ? 1 : dw__emu_take(t, "cta_group::2") ? 2 : 0;
}

bool dw__emu_tensor_pair(dw__emu_cta *cta, int cta_group, const dw__tensor_user *user,
                         dw__emu_cta *pair[2]) {
    struct dw__emu_tensor *tensor = dw__emu_tensor_of(cta, user);
    if (!tensor) return false;
    if (tensor->cta_group == 0) tensor->cta_group = cta_group;
    if (tensor->cta_group != cta_group) {
        dw__emu_found_at(user->cta, user->warp, user->lane, user->pc, DW__FOUND_INVALID,
                         ".cta_group::%d in a kernel that uses .cta_group::%d elsewhere", cta_group,
                         tensor->cta_group);
        return false;
    }
    pair[0] = cta, pair[1] = NULL;
    if (cta_group == 1) return true;
    const uint32_t first = cta->rank & ~1u;
    if (first + 1 >= cta->cluster->cta_count) {
        dw__emu_found_at(user->cta, user->warp, user->lane, user->pc, DW__FOUND_INVALID,
                         ".cta_group::2 in block %u of a cluster of %u: it has no peer", cta->rank,
                         cta->cluster->cta_count);
        return false;
    }
    pair[0] = &cta->cluster->ctas[first], pair[1] = &cta->cluster->ctas[first + 1];
    return true;
}

bool dw__emu_tensor_operand(const dw__tensor_user *user, uint64_t descriptor, bool mn_major,
                            int bits, dw__matrix_operand *operand) {
    static const int swizzles[8] = {DW__SWIZZLE_NONE, DW__SWIZZLE_128_ATOM_32,
                                    DW__SWIZZLE_128,  -1,
                                    DW__SWIZZLE_64,   -1,
                                    DW__SWIZZLE_32,   -1};
    const int swizzle = swizzles[descriptor >> 61];
    const uint32_t version = (uint32_t)(descriptor >> 46) & 7,
                   base = (uint32_t)(descriptor >> 49) & 7;
    const bool absolute = descriptor >> 52 & 1;
    const char *why =
        version != 1  ? "bits 46 to 48 must be 1"
        : swizzle < 0 ? "its swizzling mode is not defined"
        : base        ? "a base offset is not supported by the emulator"
        : absolute    ? "absolute leading addresses are not supported by the emulator"
        : swizzle == DW__SWIZZLE_128_ATOM_32 && !mn_major
            ? "128-byte swizzling of 32-byte atoms is for matrices whose rows are not "
              "contiguous along K"
            : NULL;
    if (why) {
        dw__emu_found_at(user->cta, user->warp, user->lane, user->pc, DW__FOUND_INVALID,
                         "the shared-memory descriptor 0x%016llx: %s",
                         (unsigned long long)descriptor, why);
        return false;
    }
    *operand = (dw__matrix_operand){(uint32_t)(descriptor & 0x3FFF) << 4,
                                    (uint32_t)(descriptor >> 16 & 0x3FFF) << 4,
                                    (uint32_t)(descriptor >> 32 & 0x3FFF) << 4,
                                    swizzle,
                                    mn_major,
                                    bits};
    return true;
}

/* ---- commit -------------------------------------------------------------------------------- */

typedef struct commit_op {
    dw__emu_address address;
    bool generic, multicast;
    int cta_group;
    uint32_t mask;
} commit_op;

typedef struct commit {
    dw__emu_async work;
    uint32_t address, targets; /* blocks of the multicast; 0: the block of the address */
} commit;

static bool commit_done(dw__emu_cluster *cluster, dw__emu_async *work) {
    const commit *c = (const commit *)(const void *)work;
    (void)cluster;
    if (!c->targets) return dw__emu_mbarrier_arrive(work, DW__SIDE_TENSOR, c->address, 1);
    for (uint32_t rank = 0; rank < 16; rank++)
        if (c->targets >> rank & 1 &&
            !dw__emu_mbarrier_arrive(work, DW__SIDE_TENSOR,
                                     (c->address & DW__OFFSET_MASK) | rank << DW__RANK_SHIFT, 1))
            return false;
    return true;
}

static dw__emu_next commit_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    const commit_op *k = op->detail;
    DW__EACH_LANE(lane, mask) {
        dw__tensor_user user = dw__tensor_user_of(w, (int)lane);
        dw__emu_cta *pair[2];
        if (!dw__emu_tensor_pair(w->cta, k->cta_group, &user, pair)) return DW__FAULT;
        uint64_t address = dw__emu_lane_address(w, &k->address, (int)lane);
        if ((address & DW__WINDOW_MASK) == DW__SHARED_WINDOW)
            address &= ~DW__WINDOW_MASK;
        else if (k->generic || address > UINT32_MAX) {
            dw__emu_found(w, (int)lane, DW__FOUND_BOUNDS,
                          "mbarrier at 0x%llx, which is not in shared memory",
                          (unsigned long long)address);
            return DW__FAULT;
        }
        commit *c = dw__calloc(1, sizeof *c);
        if (!c) return dw__emu_no_memory(w, -1);
        c->work = (dw__emu_async){.done = commit_done,
                                  .cta = w->cta,
                                  .warp = w->index,
                                  .lane = lane,
                                  .pc = w->now.pc,
                                  .queue = dw__emu_tensor_queue(w->cta, k->cta_group)};
        c->address = (uint32_t)address;
        if (k->multicast) {
            c->targets = DW__REGISTER(w, uint32_t, k->mask)[lane] & 0xFFFF;
            if (c->targets == 0) {
                dw__free(c);
                continue;
            }
        }
        if (!dw__emu_race_issue(w, &c->work)) {
            dw__free(c);
            return dw__emu_no_memory(w, -1);
        }
        dw__emu_race_last_time(&c->work, DW__SIDE_TENSOR);
        dw__emu_later(w->cta->cluster, &c->work);
    }
    return DW__NEXT;
}

dw_status dw__emu_translate_tensor_commit(dw__emu_translator *t) {
    commit_op *k = dw__emu_detail(t, sizeof *k);
    if (!k) return dw__fail_memory("an operation", sizeof *k);
    k->cta_group = dw__emu_take_cta_group(t);
    if (!k->cta_group || !dw__emu_take(t, "mbarrier::arrive::one")) return dw__emu_unsupported(t);
    k->generic = !dw__emu_take(t, "shared::cluster");
    k->multicast = dw__emu_take(t, "multicast::cluster");
    if (!dw__emu_take(t, "b64")) return dw__emu_unsupported(t);
    if (t->in->operand_count != 1 + k->multicast)
        return dw__emu_malformed(t, "wrong number of operands");
    DW_RETURN_IF_FAILED(dw__emu_take_address(t, &t->in->operands[0], &k->address));
    if (k->multicast)
        DW_RETURN_IF_FAILED(dw__emu_take_source(t, &t->in->operands[1], DW__T_B16, &k->mask));
    DW_RETURN_IF_FAILED(dw__emu_emit(t, commit_run));
    t->op->detail = k;
    return DW_OK;
}

/* ---- fences -------------------------------------------------------------------------------- */

static dw__emu_next fence_run(dw__emu_warp *w, const dw__emu_op *op, uint32_t mask) {
    (void)mask;
    dw__emu_race_tensor_fence(w, op->immediate != 0);
    return DW__NEXT;
}
static dw_status translate_fence(dw__emu_translator *t, bool after) {
    if (!dw__emu_all_taken(t)) return dw__emu_unsupported(t);
    DW_RETURN_IF_FAILED(dw__emu_emit(t, fence_run));
    t->op->immediate = after;
    t->kernel->tensor_fences = true;
    return DW_OK;
}

/* ---- which instruction it is --------------------------------------------------------------- */

static dw_status translate_tcgen05(dw__emu_translator *t) {
    const int architecture = t->program->architecture;
    if (architecture < 100 || architecture >= 120) return dw__emu_unsupported(t);
    if (dw__emu_take(t, "alloc")) return dw__emu_translate_tensor_alloc(t);
    if (dw__emu_take(t, "dealloc")) return dw__emu_translate_tensor_dealloc(t);
    if (dw__emu_take(t, "relinquish_alloc_permit")) return dw__emu_translate_tensor_relinquish(t);
    if (dw__emu_take(t, "ld")) return dw__emu_translate_tensor_load(t, false);
    if (dw__emu_take(t, "st")) return dw__emu_translate_tensor_load(t, true);
    if (dw__emu_take(t, "wait::ld")) return dw__emu_translate_tensor_wait(t, false);
    if (dw__emu_take(t, "wait::st")) return dw__emu_translate_tensor_wait(t, true);
    if (dw__emu_take(t, "cp")) return dw__emu_translate_tensor_copy(t);
    if (dw__emu_take(t, "shift")) return dw__emu_translate_tensor_shift(t);
    if (dw__emu_take(t, "mma")) return dw__emu_translate_tensor_product(t);
    if (dw__emu_take(t, "commit")) return dw__emu_translate_tensor_commit(t);
    if (dw__emu_take(t, "fence::before_thread_sync")) return translate_fence(t, false);
    if (dw__emu_take(t, "fence::after_thread_sync")) return translate_fence(t, true);
    return dw__emu_unsupported(t);
}

const dw__emu_opcode dw__emu_opcodes_tcgen05[] = {{"tcgen05", translate_tcgen05}, {NULL, NULL}};
