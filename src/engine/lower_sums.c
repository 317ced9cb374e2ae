/* Lowering: a product and the sum of an operand's rows as one instruction.
 *
 * The gradient of a linear layer's weight is a product over the rows of dy, and the gradient of its bias is the sum of
 * these rows. A kernel that reads dy for the product may sum it, too. The pair is lowered where the first of the two
 * stands, with the reshapes that it reads. If the operands of a later product are not there yet, the sum waits for it,
 * and with it small elementwise programs that read the sum, such as a cast. Without such a kernel each is lowered by
 * itself.
 */
#include "engine/lowering.h"

dw_value dw__lower_source(const dw__lowering *l, dw_value value) {
    for (int depth = 0; depth < DW__LOWER_MOST_VIEWS; depth++) {
        const dw_node node = value_of(l, value)->node;
        if (node == DW_NONE || row_of(l, node)->view != DW__VIEW_RESHAPE) break;
        value = record_of(l, node)->inputs[0];
    }
    return value;
}

bool dw__lower_sums_rows(const dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    if (!dw__op_is_sum(record->op)) return false;
    const dw__value_record *x = value_of(l, record->inputs[0]);
    const dw_attr *axes = dw_node_attr(l->graph, node, DW_ATTR_KEY_AXES);
    if (!dw__dtype_is_float(x->dtype) || x->rank < 2 || (int)axes->count != x->rank - 1)
        return false;
    for (uint32_t i = 0; i < axes->count; i++)
        if (axes->list[i] == x->rank - 1) return false;
    return true;
}

/* True if operand `i` of the product, a matrix, is multiplied over its rows, and these are the rows of `x`. */
static bool multiplies_rows(const dw__lowering *l, dw_node product, uint32_t i, dw_value x) {
    const dw_attr_key turn = i == 0 ? DW_ATTR_KEY_TRANSPOSE_A : DW_ATTR_KEY_TRANSPOSE_B;
    const dw_value operand = record_of(l, product)->inputs[i];
    dw__tensor matrix, rows;
    if ((dw_node_int(l->graph, product, turn, 0) != 0) != (i == 0)) return false;
    if (value_of(l, operand)->rank != 2 || dw__lower_source(l, operand) != dw__lower_source(l, x))
        return false;
    if (dw__lower_type(l, operand, &matrix) != DW_OK || dw__lower_type(l, x, &rows) != DW_OK)
        return false;
    return matrix.shape[1] == rows.shape[rows.rank - 1];
}

/* The operand of the product whose rows the node `sum` sums. */
static dw__operand_sum operand_of(const dw__lowering *l, dw_node product, dw_node sum) {
    const dw__node_record *record = record_of(l, product);
    const dw_value x = record_of(l, sum)->inputs[0];
    const dw_node forward = l->engine->kept_nodes;
    if (!dw__op_is_matmul(record->op) || record->backward != record_of(l, sum)->backward ||
        (product < forward) != (sum < forward))
        return DW__SUMS_NOTHING;
    if (multiplies_rows(l, product, 0, x)) return DW__SUMS_A;
    return multiplies_rows(l, product, 1, x) ? DW__SUMS_B : DW__SUMS_NOTHING;
}

/* The first product that reads the rows of `sum`, among the readers of `value` and of reshapes of it. */
static dw_node product_among(const dw__lowering *l, dw_value value, dw_node sum, int depth) {
    dw_node first = DW_NONE;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        dw_node reader = l->engine->use_nodes[u];
        if (row_of(l, reader)->view == DW__VIEW_RESHAPE && depth < DW__LOWER_MOST_VIEWS)
            reader = product_among(l, record_of(l, reader)->outputs[0], sum, depth + 1);
        else if (operand_of(l, reader, sum) == DW__SUMS_NOTHING)
            continue;
        if (reader < first) first = reader;
    }
    return first;
}

/* The product that may compute the sum, or DW_NONE. */
static dw_node product_of(const dw__lowering *l, dw_node sum) {
    return product_among(l, dw__lower_source(l, record_of(l, sum)->inputs[0]), sum, 0);
}

/* The first sum that the product computes, among the readers of `value` and of reshapes of it. */
static dw_node sum_among(const dw__lowering *l, dw_value value, dw_node product, int depth) {
    dw_node first = DW_NONE;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        dw_node reader = l->engine->use_nodes[u];
        if (row_of(l, reader)->view == DW__VIEW_RESHAPE && depth < DW__LOWER_MOST_VIEWS)
            reader = sum_among(l, record_of(l, reader)->outputs[0], product, depth + 1);
        else if (!dw__lower_sums_rows(l, reader) || product_of(l, reader) != product)
            continue;
        if (reader < first) first = reader;
    }
    return first;
}

/* The sum that the product computes, or DW_NONE: one, if there are several. */
static dw_node sum_of(const dw__lowering *l, dw_node product) {
    const dw__node_record *record = record_of(l, product);
    const dw_node of_a = sum_among(l, dw__lower_source(l, record->inputs[0]), product, 0),
                  of_b = sum_among(l, dw__lower_source(l, record->inputs[1]), product, 0);
    return of_a < of_b ? of_a : of_b;
}

/* Also true of a value that is left out (lower_logits.c). */
static bool is_lowered(const dw__lowering *l, dw_value value) {
    return l->values[value].storage != DW_NONE || l->values[value].view.rank < 0;
}

/* True if all inputs are lowered, or reshapes of lowered values. */
static bool can_run(const dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t i = 0; i < record->input_count; i++)
        if (!is_lowered(l, record->inputs[i]) &&
            !is_lowered(l, dw__lower_source(l, record->inputs[i])))
            return false;
    return true;
}

dw_status dw__lower_reshapes(dw__lowering *l, dw_value value) {
    if (is_lowered(l, value)) return DW_OK;
    const dw_node node = value_of(l, value)->node;
    DW_RETURN_IF_FAILED(dw__lower_reshapes(l, record_of(l, node)->inputs[0]));
    return dw__lower_node(l, node);
}

static dw_status make_inputs(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t i = 0; i < record->input_count; i++)
        DW_RETURN_IF_FAILED(dw__lower_reshapes(l, record->inputs[i]));
    return dw__lower_deferred_inputs(l, node, DW_NONE);
}

/* True if what reads the value before the product can wait for it: elementwise programs of at most `count` elements and
 * reshapes, so that little memory waits with them. */
static bool readers_can_wait(const dw__lowering *l, dw_value value, dw_node product, int64_t count,
                             int depth) {
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        const dw_node reader = l->engine->use_nodes[u];
        const dw__node_record *record = record_of(l, reader);
        if (reader > product) continue;
        if (depth == DW__LOWER_MOST_VIEWS || record->output_count != 1 ||
            (!row_of(l, reader)->program && row_of(l, reader)->view != DW__VIEW_RESHAPE))
            return false;
        dw__tensor type;
        if (dw__lower_type(l, record->outputs[0], &type) != DW_OK ||
            dw__tensor_count(&type) > count ||
            !readers_can_wait(l, record->outputs[0], product, count, depth + 1))
            return false;
    }
    return true;
}

bool dw__lower_waits_for_sum(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (record->inputs[i] == DW_NONE || is_lowered(l, record->inputs[i])) continue;
        l->waiting[l->waiting_count++] = node;
        return true;
    }
    return false;
}

/* Lowers the nodes that have waited for a sum, in their order, now that it is lowered. */
static dw_status lower_waiting(dw__lowering *l) {
    const uint32_t count = l->waiting_count;
    l->waiting_count = 0; /* those that wait for another sum come again, at or before their place */
    for (uint32_t i = 0; i < count; i++) {
        const dw_node node = l->waiting[i];
        DW_RETURN_IF_FAILED(dw__lower_node(l, node));
        DW_RETURN_IF_FAILED(dw__lower_deliver_node(l, node));
    }
    return DW_OK;
}

/* Makes the product's step with one more output: the sums, a vector without a storage. */
static dw_status make_step(dw__lowering *l, dw_node product, dw_node sum, dw__step *step) {
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, product, step));
    dw__operand *outputs = allocate(l, 2 * sizeof *outputs);
    if (!outputs) return dw__fail_memory("operands", 2 * sizeof *outputs);
    dw__tensor *view = &outputs[1].view;
    outputs[0] = step->outputs[0];
    outputs[1] = (dw__operand){.storage = DW_NONE};
    DW_RETURN_IF_FAILED(dw__lower_type(l, record_of(l, sum)->outputs[0], view));
    view->shape[0] = view->shape[view->rank - 1];
    view->rank = 1;
    dw__tensor_set_contiguous(view);
    step->outputs = outputs;
    step->output_count = 2;
    step->sums = operand_of(l, product, sum);
    return DW_OK;
}

/* Tries to lower both as one instruction. */
static dw_status join(dw__lowering *l, dw_node product, dw_node sum, bool *done) {
    const dw__node_record *record = record_of(l, sum);
    dw__operand y = {.storage = DW_NONE};
    dw__step step;
    DW_RETURN_IF_FAILED(make_step(l, product, sum, &step));
    DW_RETURN_IF_FAILED(dw__lower_pad_rows(l, &step));
    dw__lower_select(l, &step, NULL);
    if (!step.kernel) return DW_OK;
    const dw_status status = dw__lower_prepare(l, &step);
    if (status == DW_UNSUPPORTED) return DW_OK;
    DW_RETURN_IF_FAILED(status);
    DW_RETURN_IF_FAILED(dw__lower_type(l, record->outputs[0], &y.view));
    const dw__tensor type = y.view;
    DW_RETURN_IF_FAILED(dw__lower_place_value(l, record->outputs[0], &type, &y));
    step.outputs[1].storage = y.storage;
    DW_RETURN_IF_FAILED(dw__lower_place_outputs(l, &step));
    DW_RETURN_IF_FAILED(dw__lower_add_step(l, &step));
    dw__lower_finish(l, &step);
    dw__lower_read_once(l, record->inputs[0]);
    dw__lower_define(l, record->outputs[0], &y);
    *done = true;
    return DW_OK;
}

static dw_status lower_at_product(dw__lowering *l, dw_node product, bool *done) {
    const dw_node sum = sum_of(l, product);
    if (sum == DW_NONE || is_lowered(l, record_of(l, sum)->outputs[0])) return DW_OK;
    if (can_run(l, sum)) {
        DW_RETURN_IF_FAILED(make_inputs(l, sum));
        DW_RETURN_IF_FAILED(join(l, product, sum, done));
    }
    if (sum > product) return DW_OK;
    if (!*done) DW_RETURN_IF_FAILED(dw__lower_plain(l, sum)); /* it has waited */
    DW_RETURN_IF_FAILED(dw__lower_deliver_node(l, sum));
    return lower_waiting(l);
}

static dw_status lower_at_sum(dw__lowering *l, dw_node sum, bool *done) {
    const dw_node product = product_of(l, sum);
    if (product == DW_NONE || product < sum || sum_of(l, product) != sum ||
        !dw__lower_sums_operands(l, record_of(l, product)->op))
        return DW_OK;
    if (!can_run(l, product)) {
        const dw_value y = record_of(l, sum)->outputs[0];
        dw__tensor type;
        DW_RETURN_IF_FAILED(dw__lower_type(l, y, &type));
        *done = readers_can_wait(l, y, product, dw__tensor_count(&type), 0);
        return DW_OK;
    }
    DW_RETURN_IF_FAILED(make_inputs(l, product));
    return join(l, product, sum, done);
}

dw_status dw__lower_product_and_sum(dw__lowering *l, dw_node node, bool *done) {
    *done = false;
    if (dw__op_is_matmul(record_of(l, node)->op) &&
        dw__lower_sums_operands(l, record_of(l, node)->op))
        return lower_at_product(l, node, done);
    return dw__lower_sums_rows(l, node) ? lower_at_sum(l, node, done) : DW_OK;
}
