/* Lowering: a view becomes a strided operand of the storage below it, without an instruction. */
#include "engine/lowering.h"
#include "engine/views.h"

dw_status dw__lower_view(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    dw__operand from = l->values[record->inputs[0]], to = from;
    const dw_attr *attrs = NULL;
    DW_RETURN_IF_FAILED(dw__lower_attrs(l, node, &attrs));
    dw__tensor type;
    DW_RETURN_IF_FAILED(dw__lower_type(l, record->outputs[0], &type));
    int64_t offset = 0;
    if (!dw__view_apply(row_of(l, node)->view, &from.view, &type, record->attr_count, attrs,
                        &to.view, &offset)) {
        dw__operand packed = from;
        dw__tensor_set_contiguous(&packed.view);
        packed.offset = 0;
        dw__operand home;
        DW_RETURN_IF_FAILED(dw__lower_place_value(l, record->outputs[0], &type, &home));
        packed.storage = home.storage;
        DW_RETURN_IF_FAILED(dw__lower_add_copy(l, node, &from, &packed));
        to = home;
    }
    to.offset += offset;
    dw__lower_read_once(l, record->inputs[0]);
    dw__lower_define(l, record->outputs[0], &to);
    return DW_OK;
}
