/* Lowering: the operands of a concatenation are computed in their slices of its result.
 *
 * Before a step is made, the concatenations that read its results, directly or behind reshapes and permutes, get their
 * memory, and every operand that may lie there is requested in its slice. An operand may lie there if
 *
 *     its kernel     writes such a slice: any kernel a contiguous one, others as dw__kernel.results says
 *     its region     is that of the concatenation: forward would otherwise save room for the other operands
 *     its node       is near the concatenation: the room for the other operands would otherwise lie idle for long
 *     its readers    read the slice where it lies, and not long after what reads the concatenation last
 *     its rows       are long, and on a GPU multiples of 16 bytes apart, so that its kernel keeps its vectors
 *
 * The memory is alive from the first operand on. When the concatenation's turn comes, the operands that lie elsewhere
 * are copied into their slices: leaves, results of other kernels, and a value that is an operand for the second time.
 * If all operands lie in place, the concatenation has no instruction. An operand that is a concatenation itself gets
 * its memory in the slice, too, and so do its operands.
 */
#include "engine/lowering.h"
#include "engine/views.h"

bool dw__lower_rearranges(const dw__lowering *l, dw_node node) {
    return row_of(l, node)->view == DW__VIEW_RESHAPE || row_of(l, node)->view == DW__VIEW_PERMUTE;
}

bool dw__lower_operand_layout(dw__lowering *l, dw_node node, const dw__operand *result,
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

/* ---- whether an operand may lie in its slice ---------------------------------------------------- */

/* Returns the last node that reads the value, a view of it, or a concatenation in `storage` that it is a part of. */
static dw_node last_reader(const dw__lowering *l, dw_value value, uint32_t storage, int depth) {
    dw_node last = 0;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        const dw_node reader = l->engine->use_nodes[u];
        const bool goes_on =
            dw__op_is_view(record_of(l, reader)->op) ||
            (row_of(l, reader)->concatenates && l->concats[reader].storage == storage);
        if (reader > last) last = reader;
        if (!goes_on || depth == DW__LOWER_MOST_VIEWS) continue;
        const dw_node behind = last_reader(l, record_of(l, reader)->outputs[0], storage, depth + 1);
        if (behind > last) last = behind;
    }
    return last;
}

/* True if the kernels of the node read such a view as well as a contiguous tensor. */
static bool reads_slices(const dw__lowering *l, dw_node node, const dw__tensor *view) {
    int64_t stride;
    if (dw__tensor_is_contiguous(view) || row_of(l, node)->concatenates ||
        dw__op_is_pointwise(record_of(l, node)->op))
        return true;
    return dw__op_reads_spaced_rows(record_of(l, node)->op) && view->rank > 1 &&
           dw__tensor_row_stride(view, &stride);
}

/* True if few instructions lie between the two nodes. */
static bool is_near(const dw__lowering *l, dw_node node, dw_node later) {
    enum { NEAR = 8 };
    uint32_t between = 0;
    for (dw_node n = node + 1; n < later && between <= NEAR; n++)
        between += !dw__op_is_view(record_of(l, n)->op);
    return between <= NEAR;
}

/* True if a reader of an operand keeps the concatenation alive for little longer than node `last` does, which is the
 * last to read it, or if forward saves the concatenation for backward, too. */
static bool is_soon(const dw__lowering *l, dw_node concat, dw_node last, dw_node reader) {
    return reader <= last || record_of(l, last)->backward != record_of(l, concat)->backward ||
           (record_of(l, reader)->backward == record_of(l, last)->backward &&
            is_near(l, last, reader));
}

/* True if everything that reads the value or a view of it can do so where the value lies at `view`, and soon enough. */
static bool suits_readers(dw__lowering *l, dw_value value, const dw__tensor *view, dw_node concat,
                          dw_node last, int depth) {
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        const dw_node reader = l->engine->use_nodes[u];
        const dw__node_record *record = record_of(l, reader);
        const dw_attr *attrs = NULL;
        dw__tensor type, seen;
        int64_t offset;
        if (!dw__op_is_view(record->op)) {
            if (!is_soon(l, concat, last, reader) || !reads_slices(l, reader, view)) return false;
            continue;
        }
        if (depth == DW__LOWER_MOST_VIEWS || l->engine->direct[record->outputs[0]] != DW_NONE ||
            dw__lower_type(l, record->outputs[0], &type) != DW_OK ||
            dw__lower_attrs(l, reader, &attrs) != DW_OK ||
            !dw__view_apply(row_of(l, reader)->view, view, &type, record->attr_count, attrs, &seen,
                            &offset) ||
            !suits_readers(l, record->outputs[0], &seen, concat, last, depth + 1))
            return false;
    }
    return true;
}

/* True if a kernel that writes rows is as fast in this place as in memory of its own. */
static bool has_fast_rows(const dw__lowering *l, const dw__operand *place) {
    enum { VECTOR = 16, LEAST_ON_GPU = 64, LEAST_ON_CPU = 512 }; /* bytes */
    const dw__tensor *view = &place->view;
    const bool on_gpu = l->plan->target.context != NULL;
    const int64_t bytes = (int64_t)dw_dtype_bytes(view->dtype), run = dw__tensor_run(view);
    if (on_gpu && place->offset * bytes % VECTOR != 0) return false;
    if (dw__tensor_is_contiguous(view)) return true;
    if (run * bytes < (on_gpu ? LEAST_ON_GPU : LEAST_ON_CPU)) return false;
    for (int axis = 0; on_gpu && axis < view->rank; axis++)
        if (view->shape[axis] > 1 && view->stride[axis] >= run &&
            view->stride[axis] * bytes % VECTOR != 0)
            return false;
    return true;
}

static bool may_lie(dw__lowering *l, dw_node concat, dw_value source, const dw__operand *place) {
    const dw_node node = value_of(l, source)->node;
    const dw__node_record *record = record_of(l, node);
    const dw__result_layout results = dw__lower_results(l, record->op);
    if (l->values[source].storage != DW_NONE || l->requests[source].storage != DW_NONE ||
        dw__op_is_view(record->op) || node < l->engine->kept_nodes ||
        record->backward != record_of(l, concat)->backward || dw__tensor_count(&place->view) == 0)
        return false;
    const dw_node last = last_reader(l, record_of(l, concat)->outputs[0], place->storage, 0);
    if (!suits_readers(l, source, &place->view, concat, last > concat ? last : concat, 0))
        return false;
    if (results == DW__RESULTS_STRIDED) return true;
    return is_near(l, node, concat) && has_fast_rows(l, place) &&
           (results >= DW__RESULTS_IN_ROWS || dw__tensor_is_contiguous(&place->view));
}

/* ---- requests ------------------------------------------------------------------------------------ */

/* Asks the node that makes an operand to write it so that the operand lies at `place`, if it may. */
static void request_operand(dw__lowering *l, dw_node concat, dw_value value, dw__operand place) {
    for (;;) {
        const dw_node node = value_of(l, value)->node;
        dw__operand below;
        if (node == DW_NONE || l->engine->direct[value] != DW_NONE) return;
        if (!dw__lower_rearranges(l, node)) break;
        if (!dw__lower_operand_layout(l, node, &place, &below)) return;
        place = below;
        value = record_of(l, node)->inputs[0];
    }
    if (may_lie(l, concat, value, &place)) l->requests[value] = place;
}

static void slice_of(const dw__operand *whole, int axis, int64_t start, int64_t size,
                     dw__operand *part) {
    *part = *whole;
    part->view.shape[axis] = size;
    part->offset += start * whole->view.stride[axis];
}

static int axis_of(const dw__lowering *l, dw_node node) {
    return (int)dw_node_int(l->graph, node, DW_ATTR_KEY_AXIS, 0);
}

bool dw__lower_is_permuted_concat(const dw__lowering *l, dw_node node) {
    const dw_value result = record_of(l, node)->outputs[0];
    if (!row_of(l, node)->concatenates || use_count(l, result) != 1) return false;
    const dw_node reader = l->engine->use_nodes[l->engine->use_start[result]];
    if (row_of(l, reader)->view != DW__VIEW_PERMUTE) return false;
    const dw_attr *perm = dw_node_attr(l->graph, reader, DW_ATTR_KEY_PERM);
    return perm->list[perm->count - 1] == perm->count - 1;
}

/* The concatenation's memory: a slice of another one's, or in the order of a permute behind it. */
static dw_status place_concat(dw__lowering *l, dw_node node, const dw__tensor *type) {
    const dw_value result = record_of(l, node)->outputs[0];
    dw__operand *whole = &l->concats[node];
    DW_RETURN_IF_FAILED(dw__lower_request_by_concats(l, result));
    if (l->requests[result].storage == DW_NONE && dw__lower_is_permuted_concat(l, node))
        DW_RETURN_IF_FAILED(dw__lower_request_by_permutes(l, result));
    if (l->requests[result].storage != DW_NONE) {
        *whole = l->requests[result];
        return DW_OK;
    }
    whole->view = *type;
    whole->offset = 0;
    return dw__lower_add_storage(l, DW_HOME_ARENA, 0, dw__tensor_bytes(type), &whole->storage);
}

/* Makes the concatenation's memory and requests its operands there. */
static dw_status request_concat(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    dw__tensor type, each;
    if (l->concats[node].storage != DW_NONE || l->engine->direct[record->outputs[0]] != DW_NONE ||
        dw__dtype_is_code(value_of(l, record->outputs[0])->dtype) ||
        l->nested_concats == DW__LOWER_MOST_VIEWS)
        return DW_OK;
    DW_RETURN_IF_FAILED(dw__lower_type(l, record->outputs[0], &type));
    l->nested_concats++;
    const dw_status status = place_concat(l, node, &type);
    l->nested_concats--;
    DW_RETURN_IF_FAILED(status);
    const int axis = axis_of(l, node);
    int64_t start = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw__operand part;
        DW_RETURN_IF_FAILED(dw__lower_type(l, record->inputs[i], &each));
        slice_of(&l->concats[node], axis, start, each.shape[axis], &part);
        request_operand(l, node, record->inputs[i], part);
        start += each.shape[axis];
    }
    return DW_OK;
}

/* Requests by the readers of `value`, a view of `source`. */
static dw_status request_by_readers(dw__lowering *l, dw_value source, dw_value value, int depth) {
    enum { MANY_READERS = 8 }; /* later ones are not looked at */
    const dw_engine *engine = l->engine;
    uint32_t end = engine->use_start[value + 1];
    if (end > engine->use_start[value] + MANY_READERS)
        end = engine->use_start[value] + MANY_READERS;
    for (uint32_t u = engine->use_start[value]; u < end; u++) {
        const dw_node reader = engine->use_nodes[u];
        if (row_of(l, reader)->concatenates) DW_RETURN_IF_FAILED(request_concat(l, reader));
        if (dw__lower_rearranges(l, reader) && depth < DW__LOWER_MOST_VIEWS)
            DW_RETURN_IF_FAILED(
                request_by_readers(l, source, record_of(l, reader)->outputs[0], depth + 1));
        if (l->requests[source].storage != DW_NONE) return DW_OK;
    }
    return DW_OK;
}

dw_status dw__lower_request_by_concats(dw__lowering *l, dw_value source) {
    return request_by_readers(l, source, source, 0);
}

/* ---- the concatenation itself ------------------------------------------------------------------------ */

static bool lies_at(const dw__operand *operand, const dw__operand *place) {
    return operand->storage == place->storage && operand->offset == place->offset &&
           dw__view_same(&operand->view, &place->view);
}

/* Counts the operands that lie in their slices, or, with `copies`, copies the others there. */
static dw_status visit_operands(dw__lowering *l, dw_node node, bool copies, uint32_t *in_place) {
    const dw__node_record *record = record_of(l, node);
    const int axis = axis_of(l, node);
    int64_t start = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        const dw__operand operand = l->values[record->inputs[i]];
        const int64_t size = operand.view.shape[axis];
        dw__operand part;
        slice_of(&l->concats[node], axis, start, size, &part);
        start += size;
        if (lies_at(&operand, &part))
            ++*in_place;
        else if (copies)
            DW_RETURN_IF_FAILED(dw__lower_add_copy(l, node, &operand, &part));
    }
    return DW_OK;
}

dw_status dw__lower_concat(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    uint32_t in_place = 0;
    if (l->concats[node].storage == DW_NONE) return dw__lower_plain(l, node);
    DW_RETURN_IF_FAILED(visit_operands(l, node, false, &in_place));
    if (in_place == 0) return dw__lower_plain(l, node);
    DW_RETURN_IF_FAILED(visit_operands(l, node, true, &in_place));
    for (uint32_t i = 0; i < record->input_count; i++) dw__lower_read_once(l, record->inputs[i]);
    dw__lower_define(l, record->outputs[0], &l->concats[node]);
    return DW_OK;
}
