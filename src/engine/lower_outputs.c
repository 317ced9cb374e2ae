/* Lowering: copies values into the caller's buffers where they were not computed there. */
#include "engine/lowering.h"

/* Copies `value` into the buffer of output `slot`, unless it was computed there. */
static dw_status deliver(dw__lowering *l, uint32_t slot, dw_value value) {
    bool grad = slot >= l->engine->output_count;
    uint32_t index = output_position(l, slot);
    dw__operand from = l->values[value];
    const dw__storage *storage = storage_of(l, from.storage);
    dw__home home = grad ? DW_HOME_GRAD : DW_HOME_OUTPUT;
    if (storage->home == home && storage->index == index && dw__lower_is_whole(l, &from))
        return DW_OK;
    if (dw__lower_waits(l, &from)) DW_RETURN_IF_FAILED(dw__lower_deferred(l, from.storage));
    dw__operand to;
    DW_RETURN_IF_FAILED(dw__lower_type(l, value, &to.view));
    to.offset = 0;
    DW_RETURN_IF_FAILED(
        dw__lower_add_storage(l, home, index, dw__tensor_bytes(&to.view), &to.storage));
    DW_RETURN_IF_FAILED(dw__lower_add_copy(l, value_of(l, value)->node, &from, &to));
    dw__lower_read_once(l, value);
    return DW_OK;
}

dw_status dw__lower_deliver_node(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw_value value = record->outputs[o];
        if (l->values[value].storage == DW_NONE) continue;
        for (uint32_t slot = l->first_slot[value]; slot != DW_NONE; slot = l->next_slot[slot]) {
            bool here = record->backward == (slot >= l->engine->output_count);
            if (here) DW_RETURN_IF_FAILED(deliver(l, slot, value));
        }
    }
    return DW_OK;
}

dw_status dw__lower_deliver_given(dw__lowering *l, bool backward) {
    uint32_t from = backward ? l->engine->output_count : 0;
    uint32_t to = backward ? (uint32_t)l->graph->outputs.count : l->engine->output_count;
    for (uint32_t slot = from; slot < to; slot++) {
        dw_value value = l->graph->outputs.items[slot];
        dw_node node = value_of(l, value)->node;
        if (node == DW_NONE || (backward && !record_of(l, node)->backward)) {
            DW_RETURN_IF_FAILED(deliver(l, slot, value));
        }
    }
    return DW_OK;
}
