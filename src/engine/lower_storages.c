/* Lowering: storages, and where values lie in them.
 *
 * reads_left of a storage counts the reads that are still to come, by nodes and as outputs. When it is as large as
 * the reads of one step, that step is the last reader and may overwrite the storage.
 */
#include "engine/lowering.h"

dw_status dw__lower_add_storage(dw__lowering *l, dw__home home, uint32_t index, size_t bytes,
                                uint32_t *storage) {
    dw__storage fresh = {.home = home, .index = index, .bytes = bytes};
    fresh.deferred = DW_NONE;
    *storage = (uint32_t)l->plan->storages.count;
    return DW_PUSH(&l->plan->storages, fresh);
}

void dw__lower_define(dw__lowering *l, dw_value value, const dw__operand *operand) {
    l->values[value] = *operand;
    if (operand->storage == DW_NONE) return;
    uint32_t reads = use_count(l, value) + l->engine->output_uses[value];
    storage_of(l, operand->storage)->reads_left += reads;
    storage_of(l, operand->storage)->reads += reads;
}

void dw__lower_read_once(dw__lowering *l, dw_value value) {
    if (value == DW_NONE || l->values[value].storage == DW_NONE) return;
    storage_of(l, l->values[value].storage)->reads_left--;
}

dw_status dw__lower_place_value(dw__lowering *l, dw_value value, const dw__tensor *type,
                                dw__operand *operand) {
    uint32_t slot = l->engine->direct[value];
    dw__home home = DW_HOME_ARENA;
    uint32_t index = 0;
    if (slot != DW_NONE && !l->claimed[slot]) {
        l->claimed[slot] = true;
        home = slot < l->engine->output_count ? DW_HOME_OUTPUT : DW_HOME_GRAD;
        index = output_position(l, slot);
    }
    operand->view = *type;
    operand->offset = 0;
    return dw__lower_add_storage(l, home, index, dw__tensor_bytes(type), &operand->storage);
}

bool dw__lower_is_whole(const dw__lowering *l, const dw__operand *operand) {
    return operand->storage != DW_NONE && operand->offset == 0 &&
           dw__tensor_is_contiguous(&operand->view) &&
           dw__tensor_bytes(&operand->view) == storage_of(l, operand->storage)->bytes;
}
