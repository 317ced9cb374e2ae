/* Lowering: whether forward keeps the logits of linear_cross_entropy for backward.
 *
 * Kept logits save backward one of its three matrix multiplications. They are alive from the loss to the first
 * gradient, together with all that forward has saved, but before the gradients of parameters, which take the place of
 * what was saved. They are kept if they take no more memory than these gradients and the saved values together, and if
 * the user has not set a bound below their size (dw__logits_bound). Where activations are computed again in backward and
 * the model is small, the logits of long sequences would be most of a step's memory. The user may decide (dw__logits_wanted).
 *
 * Logits that are left out are an absent operand of backward. A CPU's kernels never keep them.
 */
#include "engine/lowering.h"

/* Bytes in the arena that later nodes read. */
static size_t saved_bytes(const dw__lowering *l) {
    size_t bytes = 0;
    for (size_t i = 0; i < l->plan->storages.count; i++) {
        const dw__storage *storage = &l->plan->storages.items[i];
        if (storage->home == DW_HOME_ARENA && storage->reads_left > 0) bytes += storage->bytes;
    }
    return bytes;
}

static size_t gradient_bytes(const dw__lowering *l) {
    const dw_engine *engine = l->engine;
    size_t bytes = 0;
    for (uint32_t i = 0; i < engine->wrt_count; i++)
        if (engine->grad_slot[i] != DW_NONE)
            bytes += dw__tensor_bytes(&l->plan->leaves[engine->wrt_leaf[i]]);
    return bytes;
}

static bool keeps(const dw__lowering *l, size_t bytes) {
    const dw__logits wanted = dw__logits_wanted();
    size_t bound;
    if (!l->plan->target.context || wanted == DW__LOGITS_IN_BLOCKS) return false;
    if (wanted == DW__LOGITS_KEPT) return true;
    if (bytes > saved_bytes(l) + gradient_bytes(l)) return false;
    return !dw__logits_bound(&bound) || bytes <= bound;
}

dw_status dw__lower_logits(dw__lowering *l, dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    const uint32_t result = dw__op_dispensable_result(record->op);
    if (result == DW_NONE) return DW_OK;
    const dw_value value = record->outputs[result];
    dw__operand *logits = &step->outputs[result];
    if (l->engine->output_uses[value] > 0) return DW_OK;
    if (use_count(l, value) > 0 && keeps(l, dw__tensor_bytes(&logits->view)))
        return dw__lower_pad(l, logits);
    logits->view.rank = -1;
    return DW_OK;
}
