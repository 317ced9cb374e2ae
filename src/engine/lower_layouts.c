/* Lowering: results are written in the layout that later nodes read.
 *
 * Some kernels write results with any strides. Before such a step is made, the readers of its results are followed
 * through reshapes and permutes:
 *
 *     a concatenation    the result is written into its slice, if all operands can be
 *     a permute          the result is written so that the permuted view is contiguous
 *
 * On a GPU the rows of a matrix multiplication's result in 16 bits begin at multiples of 16 bytes, also if the result
 * has no multiple of 8 columns: GEMMs that write and read other rows are several times slower.
 */
#include "engine/lowering.h"
#include "engine/views.h"
#include <string.h>

/* True for a view that shows each element of its operand once. */
static bool rearranges(const dw__lowering *l, dw_node node) {
    return row_of(l, node)->view == DW__VIEW_RESHAPE || row_of(l, node)->view == DW__VIEW_PERMUTE;
}

/* Returns where the operand of a reshape or permute must lie so that its result lies at `result`; false
 * if strides cannot express it. */
static bool operand_layout(dw__lowering *l, dw_node node, const dw__operand *result,
                           dw__operand *operand) {
    const dw__node_record *record = record_of(l, node);
    *operand = *result;
    if (row_of(l, node)->view == DW__VIEW_PERMUTE) {
        const dw_attr *perm = dw_node_attr(l->graph, node, DW_ATTR_KEY_PERM);
        dw__view_unpermute(&result->view, perm->list, &operand->view);
        return true;
    }
    dw__tensor type;
    if (dw__lower_type(l, record->inputs[0], &type) != DW_OK) return false;
    return dw__view_reshape(&result->view, type.rank, type.shape, &operand->view);
}

/* Follows reshapes and permutes from `value` down to a result of a kernel that chooses its layout.
 * DW_NONE if there is none, or if it lies in a buffer of the caller. */
static dw_value layout_source(const dw__lowering *l, dw_value value) {
    for (;;) {
        dw_node node = value_of(l, value)->node;
        if (node == DW_NONE || l->engine->direct[value] != DW_NONE) return DW_NONE;
        if (dw__lower_lays_out(l, record_of(l, node)->op)) return value;
        if (!rearranges(l, node)) return DW_NONE;
        value = record_of(l, node)->inputs[0];
    }
}

/* Asks the source of a concatenation's operand to lie so that the operand is at `place`. */
static bool request_operand(dw__lowering *l, dw_value value, dw__operand place) {
    dw_value source = layout_source(l, value);
    if (source == DW_NONE || l->values[source].storage != DW_NONE) return false;
    while (value != source) {
        dw_node node = value_of(l, value)->node;
        dw__operand operand;
        if (!operand_layout(l, node, &place, &operand)) return false;
        place = operand;
        value = record_of(l, node)->inputs[0];
    }
    l->requests[source] = place;
    return true;
}

static void concat_slice(const dw__tensor *whole, int axis, int64_t start, int64_t size,
                         dw__operand *part) {
    part->view = *whole;
    part->view.shape[axis] = size;
    part->offset = start * whole->stride[axis];
}

/* Makes the concatenation's storage and asks the sources of its operands to lie in their slices. */
static dw_status request_concat(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    dw_value result = record->outputs[0];
    if (l->concat_storage[node] != DW_NONE || l->engine->direct[result] != DW_NONE) return DW_OK;
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (layout_source(l, record->inputs[i]) == DW_NONE) return DW_OK;
    }
    dw__tensor type;
    DW_RETURN_IF_FAILED(dw__lower_type(l, result, &type));
    dw__operand part;
    DW_RETURN_IF_FAILED(
        dw__lower_add_storage(l, DW_HOME_ARENA, 0, dw__tensor_bytes(&type), &part.storage));
    l->concat_storage[node] = part.storage;
    int axis = (int)dw_node_int(l->graph, node, DW_ATTR_KEY_AXIS, 0);
    int64_t start = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw__tensor each;
        DW_RETURN_IF_FAILED(dw__lower_type(l, record->inputs[i], &each));
        concat_slice(&type, axis, start, each.shape[axis], &part);
        request_operand(l, record->inputs[i], part);
        start += each.shape[axis];
    }
    return DW_OK;
}

/* Asks for a layout of `source` that the readers of `value`, a view of it, want. A concatenation comes
 * before a permute. */
static dw_status find_request(dw__lowering *l, dw_value source, dw_value value, int depth) {
    enum { MANY_READERS = 8 }; /* later ones are not looked at */
    const dw_engine *engine = l->engine;
    uint32_t end = engine->use_start[value + 1];
    if (end > engine->use_start[value] + MANY_READERS)
        end = engine->use_start[value] + MANY_READERS;
    for (uint32_t u = engine->use_start[value]; u < end; u++) {
        dw_node reader = engine->use_nodes[u];
        if (row_of(l, reader)->concatenates) DW_RETURN_IF_FAILED(request_concat(l, reader));
        if (rearranges(l, reader) && depth < DW__LOWER_MOST_VIEWS) {
            DW_RETURN_IF_FAILED(
                find_request(l, source, record_of(l, reader)->outputs[0], depth + 1));
        }
        if (l->requests[source].storage != DW_NONE) return DW_OK;
    }
    if (value != source) return DW_OK;
    for (uint32_t u = engine->use_start[value]; u < end; u++) {
        dw_node reader = engine->use_nodes[u];
        if (row_of(l, reader)->view != DW__VIEW_PERMUTE) continue;
        dw__operand permuted;
        DW_RETURN_IF_FAILED(dw__lower_type(l, record_of(l, reader)->outputs[0], &permuted.view));
        permuted.offset = 0;
        DW_RETURN_IF_FAILED(dw__lower_add_storage(
            l, DW_HOME_ARENA, 0, dw__tensor_bytes(&permuted.view), &permuted.storage));
        operand_layout(l, reader, &permuted, &l->requests[source]);
        return DW_OK;
    }
    return DW_OK;
}

/* ---- rows at multiples of 16 bytes ------------------------------------------------------------ */

/* True if all readers of `value`, also behind reshapes that keep its last axis, read rows. */
static bool is_read_by_rows(dw__lowering *l, dw_value value, int64_t columns, int depth) {
    const dw_engine *engine = l->engine;
    for (uint32_t u = engine->use_start[value]; u < engine->use_start[value + 1]; u++) {
        const dw_node reader = engine->use_nodes[u];
        if (dw__op_reads_spaced_rows(record_of(l, reader)->op)) continue;
        dw__tensor type;
        const dw_value result = record_of(l, reader)->outputs[0];
        if (row_of(l, reader)->view != DW__VIEW_RESHAPE || depth == DW__LOWER_MOST_VIEWS ||
            engine->direct[result] != DW_NONE || dw__lower_type(l, result, &type) != DW_OK ||
            type.rank < 2 || type.shape[type.rank - 1] != columns ||
            !is_read_by_rows(l, result, columns, depth + 1))
            return false;
    }
    return true;
}

enum { ROW_MULTIPLE = 64, LEAST_COLUMNS = 1024 }; /* padding adds little to longer rows */

dw_status dw__lower_pad(dw__lowering *l, dw__operand *result) {
    dw__tensor padded = result->view;
    int64_t *columns = &padded.shape[padded.rank - 1];
    if (*columns % 8 != 0 && *columns >= LEAST_COLUMNS)
        *columns = (*columns + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
    dw__tensor_set_contiguous(&padded);
    memcpy(result->view.stride, padded.stride, sizeof padded.stride);
    result->offset = 0;
    return dw__lower_add_storage(l, DW_HOME_ARENA, 0, dw__tensor_bytes(&padded), &result->storage);
}

dw_status dw__lower_pad_rows(dw__lowering *l, dw__step *step) {
    const dw_op op = record_of(l, step->node)->op;
    dw__tensor *y = &step->outputs[0].view;
    const dw_value value = record_of(l, step->node)->outputs[0];
    if (!l->plan->target.context || !dw__op_is_product(op) || y->rank < 2 ||
        dw_dtype_bytes(y->dtype) != 2 || dw__tensor_count(y) == 0)
        return DW_OK;
    const int64_t columns = y->shape[y->rank - 1];
    if (columns % 8 == 0 || columns < LEAST_COLUMNS || step->outputs[0].storage != DW_NONE ||
        l->engine->direct[value] != DW_NONE || l->engine->output_uses[value] > 0 ||
        !is_read_by_rows(l, value, columns, 0))
        return DW_OK;
    return dw__lower_pad(l, &step->outputs[0]);
}

dw_status dw__lower_lay_out_results(dw__lowering *l, dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    if (!dw__lower_lays_out(l, record->op)) return DW_OK;
    bool any = false;
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw_value value = record->outputs[o];
        if (l->engine->direct[value] != DW_NONE) continue;
        DW_RETURN_IF_FAILED(find_request(l, value, value, 0));
        if (l->requests[value].storage == DW_NONE) continue;
        step->outputs[o] = l->requests[value];
        any = true;
    }
    if (!any) return DW_OK;
    dw__lower_select(l, step, NULL, -1);
    if (dw__step_is_fast(step)) return DW_OK;
    for (uint32_t o = 0; o < record->output_count; o++) {
        step->outputs[o].storage = DW_NONE;
        step->outputs[o].offset = 0;
        dw__tensor_set_contiguous(&step->outputs[o].view);
    }
    return DW_OK;
}

dw_status dw__lower_concat(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    uint32_t storage = l->concat_storage[node];
    if (storage == DW_NONE) return dw__lower_plain(l, node);
    dw__operand whole = {.storage = storage};
    DW_RETURN_IF_FAILED(dw__lower_type(l, record->outputs[0], &whole.view));
    int axis = (int)dw_node_int(l->graph, node, DW_ATTR_KEY_AXIS, 0);
    int64_t start = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        const dw__operand *input = &l->values[record->inputs[i]];
        dw__operand part;
        concat_slice(&whole.view, axis, start, input->view.shape[axis], &part);
        if (input->storage != storage || input->offset != part.offset ||
            !dw__view_same(&input->view, &part.view)) {
            return dw__lower_plain(l, node);
        }
        start += input->view.shape[axis];
    }
    for (uint32_t i = 0; i < record->input_count; i++) dw__lower_read_once(l, record->inputs[i]);
    dw__lower_define(l, record->outputs[0], &whole);
    return DW_OK;
}
