/* Scheduling: the order of backward.
 *
 * The order is greedy: the next node is the ready one that leaves the fewest bytes alive; ties keep the given order.
 * Views, nodes without operands and repeated forward nodes are emitted just before their first reader, so that their
 * results live briefly. All others are called real nodes here.
 */
#include "engine/training_schedule.h"
#include <string.h>

/* True if the node is emitted when a reader needs it. */
static bool on_demand(const dw__scheduling *s, dw_node node) {
    const dw__node_record *record = record_of(s, node);
    return s->in_forward[node] || dw__op_is_view(record->op) || record->input_count == 0;
}

/* Returns a node that computes an operand of `node` and has not been emitted, or DW_NONE. Nodes that were
 * found ready count as missing only with `ready_is_missing`. */
static dw_node missing_producer(const dw__scheduling *s, dw_node node, bool ready_is_missing) {
    for (uint32_t i = 0; i < dw__operand_count(s, node); i++) {
        const dw_value input = dw__operand_at(s, node, i);
        if (input == DW_NONE || !dw__computed_in_backward(s, input)) continue;
        const dw_node from = dw__runs_in(s, producer(s, input));
        if (!s->emitted[from] && (ready_is_missing || !s->ready[from])) return from;
    }
    return DW_NONE;
}

/* Emits the node, and before it the nodes on demand that it needs. */
static void emit(dw__scheduling *s, dw_node node) {
    uint32_t height = 0;
    if (s->emitted[node]) return;
    s->stack[height++] = node;
    while (height > 0) {
        dw_node top = s->stack[height - 1], missing = missing_producer(s, top, true);
        if (missing != DW_NONE) {
            s->stack[height++] = missing;
            continue;
        }
        s->emitted[top] = true;
        s->order[s->order_count++] = top;
        for (uint32_t o = 0; o < dw__result_count(s, top); o++)
            s->live[dw__result_at(s, top, o)] = true;
        height--;
    }
}

/* True if every real node that it depends on, directly or through nodes on demand, has been emitted. */
static bool is_ready(dw__scheduling *s, dw_node node) {
    uint32_t height = 0;
    s->stack[height++] = node;
    while (height > 0) {
        dw_node top = s->stack[height - 1], missing = missing_producer(s, top, false);
        if (missing == DW_NONE) {
            if (!s->real[top]) s->ready[top] = true;
            height--;
        } else {
            if (s->real[missing]) return false;
            s->stack[height++] = missing;
        }
    }
    return true;
}

/* The root of an operand, DW_NONE if it is absent. */
static dw_value operand_root(const dw__scheduling *s, dw_node node, uint32_t index) {
    const dw_value input = dw__operand_at(s, node, index);
    return input == DW_NONE ? DW_NONE : s->root[input];
}

static uint32_t reads_by(const dw__scheduling *s, dw_node node, dw_value root) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < dw__operand_count(s, node); i++)
        count += operand_root(s, node, i) == root;
    return count;
}

/* Bytes alive after the node minus bytes alive before it. */
static int64_t growth(const dw__scheduling *s, dw_node node) {
    int64_t bytes = 0;
    for (uint32_t o = 0; o < dw__result_count(s, node); o++) {
        const dw_value value = dw__result_at(s, node, o);
        if (!s->free_root[value] && s->reads[value] > 0) bytes += s->bytes[value];
    }
    for (uint32_t i = 0; i < dw__operand_count(s, node); i++) {
        const dw_value root = operand_root(s, node, i);
        if (root == DW_NONE || s->free_root[root]) continue;
        bool again = false;
        for (uint32_t j = 0; j < i; j++) again |= operand_root(s, node, j) == root;
        if (again) continue;
        bool dies = s->reads[root] == reads_by(s, node, root);
        if (s->live[root] && dies) bytes -= s->bytes[root];
        if (!s->live[root] && !dies) bytes += s->bytes[root];
    }
    return bytes;
}

static void count_reads(dw__scheduling *s) {
    for (dw_node node = 0; node < s->node_count; node++) {
        s->real[node] = !on_demand(s, node);
        for (uint32_t i = 0; s->real[node] && i < dw__operand_count(s, node); i++) {
            const dw_value root = operand_root(s, node, i);
            if (root != DW_NONE) s->reads[root]++;
        }
    }
    /* Saved values are in memory when backward begins. */
    for (dw_value value = 0; value < s->value_count; value++) {
        dw_node node = producer(s, value);
        s->live[value] = node != DW_NONE && s->in_forward[node] && !s->recomputed[value];
    }
}

/* Lists the outputs of backward by the node that computes their root, in order. */
static void list_output_views(dw__scheduling *s) {
    for (dw_node node = 0; node < s->node_count; node++) s->first_view[node] = DW_NONE;
    for (size_t i = s->graph->outputs.count; i-- > s->forward_outputs;) {
        dw_node node = producer(s, s->root[s->graph->outputs.items[i]]);
        if (node == DW_NONE) continue;
        s->next_view[i] = s->first_view[node];
        s->first_view[node] = (uint32_t)i;
    }
}

static void emit_output_views(dw__scheduling *s, dw_node node) {
    for (uint32_t i = s->first_view[node]; i != DW_NONE; i = s->next_view[i]) {
        dw_node from = producer(s, s->graph->outputs.items[i]);
        if (from == DW_NONE || s->in_forward[from] || s->emitted[from]) continue;
        if (is_ready(s, from)) emit(s, from);
    }
}

/* Returns the position in waiting[begin .. count) of the ready node with the least growth, or DW_NONE. Only
 * the first WINDOW nodes are tried, so that the time stays linear; a graph seldom has as many that are ready. */
static uint32_t find_best(dw__scheduling *s, const dw_node *waiting, uint32_t begin,
                          uint32_t count) {
    enum { WINDOW = 256 };
    uint32_t best = DW_NONE;
    int64_t best_growth = 0;
    for (uint32_t i = begin; i < count && i < begin + WINDOW; i++) {
        if (!is_ready(s, waiting[i])) continue;
        int64_t bytes = growth(s, waiting[i]);
        if (best == DW_NONE || bytes < best_growth) {
            best = i;
            best_growth = bytes;
        }
    }
    return best;
}

static void finish_reads(dw__scheduling *s, dw_node node) {
    for (uint32_t i = 0; i < dw__operand_count(s, node); i++) {
        const dw_value root = operand_root(s, node, i);
        if (root != DW_NONE && --s->reads[root] == 0) s->live[root] = false;
    }
}

static dw_status order_real_nodes(dw__scheduling *s) {
    dw_status status = DW_OK;
    uint32_t count = 0;
    dw_node *waiting = dw__malloc((s->node_count + 1) * sizeof *waiting);
    if (!waiting) return dw__fail_memory("the order of backward", s->node_count * sizeof *waiting);
    for (dw_node node = 0; node < s->node_count; node++)
        if (s->real[node]) waiting[count++] = node;
    for (uint32_t begin = 0; begin < count; begin++) {
        uint32_t best = find_best(s, waiting, begin, count);
        if (best == DW_NONE)
            DW_TRY(dw__fail(DW_INTERNAL, "node %u (%s) waits for a node behind it", waiting[begin],
                            dw_op_name(record_of(s, waiting[begin])->op)));
        dw_node node = waiting[best];
        emit(s, node);
        emit_output_views(s, node);
        finish_reads(s, node);
        memmove(waiting + begin + 1, waiting + begin, (best - begin) * sizeof *waiting);
    }
cleanup:
    dw__free(waiting);
    return status;
}

/* Emits outputs that are constants, or views of the caller's memory: no real node reads them. */
static void emit_remaining_outputs(dw__scheduling *s) {
    for (size_t i = s->forward_outputs; i < s->graph->outputs.count; i++) {
        dw_node node = producer(s, s->graph->outputs.items[i]);
        if (node != DW_NONE && !s->in_forward[node]) emit(s, node);
    }
}

dw_status dw__order_backward(dw__scheduling *s) {
    count_reads(s);
    list_output_views(s);
    DW_RETURN_IF_FAILED(order_real_nodes(s));
    emit_remaining_outputs(s);
    return DW_OK;
}
