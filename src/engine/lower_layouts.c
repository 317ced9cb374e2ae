/* Lowering: results are written in the layout that later nodes read.
 *
 * A result that a concatenation reads is written into its slice (lower_concats.c). Kernels that write any strides write
 * other results so that a permute behind them is contiguous, and so do concatenations that nothing else reads.
 *
 * On a GPU the rows of a matrix multiplication's result in 16 bits begin at multiples of 16 bytes, also if the result
 * has no multiple of 8 columns: GEMMs that write and read other rows are several times slower.
 */
#include "engine/lowering.h"
#include "engine/views.h"
#include <string.h>

dw_status dw__lower_request_by_permutes(dw__lowering *l, dw_value value) {
    const dw_engine *engine = l->engine;
    for (uint32_t u = engine->use_start[value]; u < engine->use_start[value + 1]; u++) {
        const dw_node reader = engine->use_nodes[u];
        if (row_of(l, reader)->view != DW__VIEW_PERMUTE) continue;
        dw__operand permuted;
        DW_RETURN_IF_FAILED(dw__lower_type(l, record_of(l, reader)->outputs[0], &permuted.view));
        permuted.offset = 0;
        DW_RETURN_IF_FAILED(dw__lower_add_storage(
            l, DW_HOME_ARENA, 0, dw__tensor_bytes(&permuted.view), &permuted.storage));
        dw__lower_operand_layout(l, reader, &permuted, &l->requests[value]);
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

dw_status dw__lower_lay_out_results(dw__lowering *l, dw__step *step, const dw__step *first) {
    const dw__node_record *record = record_of(l, step->node);
    bool any = false;
    if (step->node < l->engine->kept_nodes) return DW_OK;
    for (uint32_t o = 0; o < record->output_count; o++) {
        const dw_value value = record->outputs[o];
        if (l->engine->direct[value] != DW_NONE) continue;
        DW_RETURN_IF_FAILED(dw__lower_request_by_concats(l, value));
        if (l->requests[value].storage == DW_NONE &&
            (dw__lower_results(l, record->op) == DW__RESULTS_STRIDED ||
             dw__lower_is_permuted_concat(l, step->node)))
            DW_RETURN_IF_FAILED(dw__lower_request_by_permutes(l, value));
        if (l->requests[value].storage == DW_NONE) continue;
        step->outputs[o] = l->requests[value];
        any = true;
    }
    if (!any) return DW_OK;
    dw__lower_select(l, step, NULL);
    if (dw__step_is_fast(step)) {
        dw__lower_take_over_concat(l, step, first);
        return DW_OK;
    }
    for (uint32_t o = 0; o < record->output_count; o++) {
        step->outputs[o].storage = DW_NONE;
        step->outputs[o].offset = 0;
        dw__tensor_set_contiguous(&step->outputs[o].view);
    }
    return DW_OK;
}
