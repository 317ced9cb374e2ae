/* Lowering: the nodes of the schedule at concrete sizes become instructions on storages.
 *
 * The schedule is walked once. Each node takes one of these ways:
 *
 *     view             lower_views.c      no instruction
 *     concatenation    lower_concats.c    no instruction if the operands were written in place
 *     program          lower_epilogues.c  perhaps one instruction together with the node in front of it
 *                      lower_codes.c      perhaps one instruction together with the nodes that quantize its results
 *     rope             lower_epilogues.c  perhaps one instruction together with the node in front of it, or waits for
 *                                         the attention that reads its result
 *     attention        lower_epilogues.c  perhaps one instruction together with the rope of its queries
 *     deferred         lower_epilogues.c  waits for such a program, or for rope
 *     sum of rows      lower_sums.c       perhaps one instruction with a product of the same rows
 *     any other        here               an instruction, by the first kernel that supports it
 *
 * lower_copies.c, lower_layouts.c and lower_in_place.c decide where its operands and results lie.
 */
#include "engine/lowering.h"
#include "engine/views.h"
#include <string.h>

dw_status dw__lower_plain(dw__lowering *l, dw_node node) {
    dw__step step;
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, node, &step));
    DW_RETURN_IF_FAILED(dw__lower_lay_out_results(l, &step, NULL));
    DW_RETURN_IF_FAILED(dw__lower_pad_rows(l, &step));
    DW_RETURN_IF_FAILED(dw__lower_logits(l, &step));
    DW_RETURN_IF_FAILED(dw__lower_use_magnitudes(l, &step));
    DW_RETURN_IF_FAILED(dw__lower_choose_kernel(l, &step));
    if (dw__step_is_fast(&step)) dw__lower_reuse_inputs(l, &step, NULL);
    DW_RETURN_IF_FAILED(dw__lower_place_outputs(l, &step));
    DW_RETURN_IF_FAILED(dw__lower_find_magnitudes(l, &step));
    dw__lower_find_disposable(l, &step);
    DW_RETURN_IF_FAILED(dw__lower_add_step(l, &step));
    dw__lower_finish(l, &step);
    return DW_OK;
}

dw_status dw__lower_node(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    const dw__operand *first = &l->values[record->outputs[0]];
    if (first->storage != DW_NONE || first->view.rank < 0) return DW_OK; /* with an earlier node */
    if (dw__lower_waits_for_sum(l, node)) return DW_OK;
    if (row_of(l, node)->program) return dw__lower_program(l, node);
    if (row_of(l, node)->view == DW__VIEW_RESHAPE) {
        dw__tensor type, view;
        const dw__operand *from = &l->values[record->inputs[0]];
        DW_RETURN_IF_FAILED(dw__lower_type(l, record->outputs[0], &type));
        if (dw__view_reshape(&from->view, type.rank, type.shape, &view)) {
            return dw__lower_view(l, node); /* a deferred node may go on waiting below it */
        }
    }
    if (row_of(l, node)->view == DW__VIEW_SLICE || row_of(l, node)->view == DW__VIEW_PERMUTE)
        return dw__lower_view(l, node); /* the same */
    if (row_of(l, node)->rotates) return dw__lower_rope(l, node);
    if (row_of(l, node)->rotated) return dw__lower_attention(l, node);
    DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, DW_NONE));
    if (dw__op_is_view(record->op)) return dw__lower_view(l, node);
    if (row_of(l, node)->concatenates) return dw__lower_concat(l, node);
    bool done = false;
    DW_RETURN_IF_FAILED(dw__lower_product_and_sum(l, node, &done));
    if (done) return DW_OK;
    if (dw__lower_may_wait(l, node)) return dw__lower_defer(l, node);
    return dw__lower_plain(l, node);
}

static dw_status lower_leaves(dw__lowering *l) {
    const dw_graph *graph = l->graph;
    l->plan->leaves = allocate(l, (graph->leaves.count + 1) * sizeof(dw__tensor));
    if (!l->plan->leaves) return dw__fail_memory("shapes of leaves", graph->leaves.count);
    for (uint32_t i = 0; i < graph->leaves.count; i++) {
        dw__operand operand = {.offset = 0};
        DW_RETURN_IF_FAILED(dw__lower_type(l, graph->leaves.items[i], &operand.view));
        l->plan->leaves[i] = operand.view;
        DW_RETURN_IF_FAILED(dw__lower_add_storage(
            l, DW_HOME_LEAF, i, dw__tensor_bytes(&operand.view), &operand.storage));
        dw__lower_define(l, graph->leaves.items[i], &operand);
    }
    return DW_OK;
}

static dw_status shape_outputs(dw__lowering *l) {
    uint32_t count = l->engine->output_count;
    l->plan->outputs = allocate(l, (count + 1) * sizeof(dw__tensor));
    if (!l->plan->outputs) return dw__fail_memory("shapes of outputs", count);
    for (uint32_t i = 0; i < count; i++) {
        DW_RETURN_IF_FAILED(dw__lower_type(l, l->graph->outputs.items[i], &l->plan->outputs[i]));
    }
    return DW_OK;
}

/* Marks the storages that exist now: forward has written them. */
static void begin_backward(dw__lowering *l) {
    l->plan->first_backward = (uint32_t)l->plan->code.count;
    for (size_t i = 0; i < l->plan->storages.count; i++) l->plan->storages.items[i].saved = true;
}

/* Ends the instructions of dw_plan_keep: what waits is lowered, and what they have filled stays as it is. */
static dw_status begin_forward(dw__lowering *l) {
    const dw_plan *plan = l->plan;
    for (uint32_t i = 0; i < plan->storages.count; i++)
        if (plan->storages.items[i].deferred != DW_NONE)
            DW_RETURN_IF_FAILED(dw__lower_deferred(l, i));
    for (size_t i = 0; i < plan->storages.count; i++) plan->storages.items[i].fixed = true;
    l->plan->kept_end = (uint32_t)plan->code.count;
    return dw__lower_deliver_given(l, false);
}

static dw_status lower_all(dw__lowering *l) {
    DW_RETURN_IF_FAILED(lower_leaves(l));
    DW_RETURN_IF_FAILED(shape_outputs(l));
    uint32_t count = (uint32_t)l->graph->nodes.count;
    for (dw_node node = 0; node <= count; node++) {
        if (node == l->engine->kept_nodes) DW_RETURN_IF_FAILED(begin_forward(l));
        if (node == l->engine->first_backward) {
            begin_backward(l);
            DW_RETURN_IF_FAILED(dw__lower_deliver_given(l, true));
        }
        if (node == count) break;
        dw_status status = dw__lower_node(l, node);
        if (status == DW_OK) status = dw__lower_deliver_node(l, node);
        if (status != DW_OK) {
            char label[160];
            dw__node_label(l->graph, node, label, sizeof label);
            return dw__fail_prefix(status, "%s", label);
        }
    }
    if (l->waiting_count > 0)
        return dw__fail(DW_INTERNAL, "node %u waits for a sum that was not lowered", l->waiting[0]);
    return DW_OK;
}

/* Lists for each value the outputs that it is. */
static void list_slots(dw__lowering *l) {
    for (size_t v = 0; v < l->graph->values.count; v++) l->first_slot[v] = DW_NONE;
    for (uint32_t slot = (uint32_t)l->graph->outputs.count; slot-- > 0;) {
        dw_value value = l->graph->outputs.items[slot];
        l->next_slot[slot] = l->first_slot[value];
        l->first_slot[value] = slot;
    }
}

static dw_status open_lowering(dw_plan *plan, dw__lowering *l) {
    const dw_graph *graph = plan->engine->graph;
    size_t values = graph->values.count + 1, nodes = graph->nodes.count + 1;
    size_t outputs = graph->outputs.count + 1;
    l->plan = plan;
    l->engine = plan->engine;
    l->graph = graph;
    l->values = dw__malloc(values * sizeof *l->values);
    l->magnitudes = dw__malloc(values * sizeof *l->magnitudes);
    l->requests = dw__malloc(values * sizeof *l->requests);
    l->concats = dw__malloc(nodes * sizeof *l->concats);
    l->first_slot = dw__malloc(values * sizeof *l->first_slot);
    l->next_slot = dw__malloc(outputs * sizeof *l->next_slot);
    l->claimed = dw__calloc(outputs, sizeof *l->claimed);
    l->waiting = dw__malloc(nodes * sizeof *l->waiting);
    l->body = dw__malloc(sizeof *l->body);
    if (!l->values || !l->magnitudes || !l->requests || !l->concats || !l->first_slot ||
        !l->next_slot || !l->claimed || !l->waiting || !l->body) {
        return dw__fail_memory("a plan that is being made", values * sizeof *l->values);
    }
    for (size_t v = 0; v < values; v++) {
        l->values[v].storage = l->requests[v].storage = l->magnitudes[v].storage = DW_NONE;
        l->values[v].view.rank = 0;
    }
    for (size_t n = 0; n < nodes; n++) l->concats[n].storage = DW_NONE;
    list_slots(l);
    return DW_OK;
}

static void close_lowering(dw__lowering *l) {
    dw__free(l->values);
    dw__free(l->magnitudes);
    dw__free(l->requests);
    dw__free(l->concats);
    dw__free(l->first_slot);
    dw__free(l->next_slot);
    dw__free(l->claimed);
    dw__free(l->waiting);
    dw__free(l->body);
    dw__free(l);
}

dw_status dw__lower(dw_plan *plan) {
    DW_RETURN_IF_FAILED(dw__check_choices());
    dw__lowering *l = dw__calloc(1, sizeof *l);
    if (!l) return dw__fail_memory("a plan that is being made", sizeof *l);
    dw_status status = open_lowering(plan, l);
    if (status == DW_OK) status = lower_all(l);
    close_lowering(l);
    return status;
}
