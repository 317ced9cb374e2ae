/* Copying graphs: node by node for passes, and whole. */
#include "graph/internal.h"
#include <string.h>

/* ---- attributes ---------------------------------------------------------------------------- */

static dw_status import_dims(dw_graph *to, const dw_graph *from, dw_attr *attr) {
    dw_dim *list = dw__arena_alloc(to->arena, attr->count * sizeof *list);
    if (!list) return dw__fail_memory("an attribute", attr->count * sizeof *list);
    for (uint32_t i = 0; i < attr->count; i++)
        DW_RETURN_IF_FAILED(dw__import_dim(to, from, attr->list[i], &list[i]));
    attr->list = list;
    return DW_OK;
}

static dw_status import_plain(dw_graph *to, dw_attr *attr) {
    size_t bytes = attr->string ? strlen(attr->string) + 1 : attr->count * sizeof *attr->list;
    if (bytes == 0) return DW_OK;
    void *copy = dw__arena_alloc(to->arena, bytes);
    if (!copy) return dw__fail_memory("an attribute", bytes);
    if (attr->string)
        attr->string = memcpy(copy, attr->string, bytes);
    else
        attr->list = memcpy(copy, attr->list, bytes);
    return DW_OK;
}

dw_status dw__import_attrs(dw_graph *to, const dw_graph *from, dw_node node,
                           const dw_attr **attrs) {
    const dw__node_record *record = &from->nodes.items[node];
    size_t bytes = record->attr_count * sizeof(dw_attr);
    dw_attr *copy = dw__arena_alloc(to->arena, bytes);
    if (!copy) return dw__fail_memory("attributes", bytes);
    for (uint32_t i = 0; i < record->attr_count; i++) {
        copy[i] = record->attrs[i];
        if (dw_attr_kind_of(copy[i].key) == DW_ATTR_DIMS)
            DW_RETURN_IF_FAILED(import_dims(to, from, &copy[i]));
        else
            DW_RETURN_IF_FAILED(import_plain(to, &copy[i]));
    }
    *attrs = copy;
    return DW_OK;
}

/* ---- values and nodes ---------------------------------------------------------------------- */

static dw_status copy_leaf(dw_graph *to, const dw_graph *from, dw_value leaf, dw_value *made) {
    const dw__value_record *record = &from->values.items[leaf];
    dw_dim shape[DW_MAX_RANK];
    for (int i = 0; i < record->rank; i++)
        DW_RETURN_IF_FAILED(dw__import_dim(to, from, record->shape[i], &shape[i]));
    return dw_graph_leaf(to, record->role, record->name, record->dtype, record->rank, shape, made);
}

/* Names of the outputs in the copy: the original ones where they are free. Automatic names are kept
 * only in whole copies: in a rewritten graph they would say nothing. */
static void choose_names(const dw_graph *to, const dw_graph *from, const dw__node_record *record,
                         bool keep_automatic, const char **names) {
    for (uint32_t i = 0; i < record->output_count; i++) {
        const char *name = from->values.items[record->outputs[i]].name;
        bool kept = keep_automatic || !dw__is_automatic_name(name);
        names[i] = kept && dw_graph_find(to, name) == DW_NONE ? name : NULL;
    }
}

static dw_status copy_node(dw_graph *to, const dw_graph *from, dw_node node, dw_value *map,
                           bool keep_automatic) {
    const dw__node_record *record = &from->nodes.items[node];
    dw_value inputs[DW_MAX_INPUTS];
    const char *names[DW_MAX_OUTPUTS];
    const dw_attr *attrs;
    dw_node made;
    for (uint32_t i = 0; i < record->input_count; i++) {
        inputs[i] = record->inputs[i] == DW_NONE ? DW_NONE : map[record->inputs[i]];
        if (inputs[i] == DW_NONE && record->inputs[i] != DW_NONE)
            return dw__fail(DW_INTERNAL,
                            "node %u (%s) is copied before its operand \"%s\": please report this "
                            "with the graph",
                            node, dw_op_name(record->op),
                            from->values.items[record->inputs[i]].name);
    }
    choose_names(to, from, record, keep_automatic, names);
    DW_RETURN_IF_FAILED(dw__copy_origin(to, from, node));
    DW_RETURN_IF_FAILED(dw__import_attrs(to, from, node, &attrs));
    DW_RETURN_IF_FAILED(dw__append_named(to, record->op, record->input_count, inputs,
                                         record->attr_count, attrs, record->output_count, names,
                                         &made));
    for (uint32_t i = 0; i < record->output_count; i++)
        map[record->outputs[i]] = dw_node_output(to, made, i);
    return DW_OK;
}

static dw_status copy_outputs(dw_graph *to, const dw_graph *from, const dw_value *map) {
    for (size_t i = 0; i < from->outputs.count; i++) {
        dw_value value = from->outputs.items[i];
        if (map[value] == DW_NONE)
            return dw__fail(DW_INTERNAL,
                            "output %zu (\"%s\") was not made by the rewriting: please report this "
                            "with the graph",
                            i, from->values.items[value].name);
        DW_RETURN_IF_FAILED(dw_graph_add_output(to, map[value]));
    }
    return DW_OK;
}

static dw_status restore_origin(dw_graph *to, const dw_graph *from) {
    dw_graph_set_backward(to, from->backward);
    return dw_graph_set_origin(to, from->region, from->layer, from->module);
}

static dw_value *make_map(const dw_graph *from) {
    dw_value *map = dw__malloc(from->values.count * sizeof *map);
    for (size_t i = 0; map && i < from->values.count; i++) map[i] = DW_NONE;
    return map;
}

/* ---- passes -------------------------------------------------------------------------------- */

dw_status dw__rewriter_begin(dw__rewriter *rewriter, const dw_graph *from) {
    dw_status status = DW_OK;
    *rewriter = (dw__rewriter){.from = from};
    DW_TRY(dw_graph_create(&rewriter->to));
    rewriter->map = make_map(from);
    if (!rewriter->map) {
        status = dw__fail_memory("a rewriting", from->values.count * sizeof(dw_value));
        goto cleanup;
    }
    DW_TRY(dw__import_symbols(rewriter->to, from));
    for (size_t i = 0; i < from->leaves.count; i++) {
        dw_value leaf = from->leaves.items[i];
        DW_TRY(copy_leaf(rewriter->to, from, leaf, &rewriter->map[leaf]));
    }
cleanup:
    if (status != DW_OK) dw__rewriter_abort(rewriter);
    return status;
}

dw_status dw__rewriter_copy(dw__rewriter *rewriter, dw_node node) {
    return copy_node(rewriter->to, rewriter->from, node, rewriter->map, false);
}

dw_status dw__rewriter_end(dw__rewriter *rewriter, dw_graph **graph) {
    DW_RETURN_IF_FAILED(copy_outputs(rewriter->to, rewriter->from, rewriter->map));
    DW_RETURN_IF_FAILED(restore_origin(rewriter->to, rewriter->from));
    DW_RETURN_IF_FAILED(dw_graph_verify(rewriter->to));
    dw_graph_destroy(*graph);
    *graph = rewriter->to;
    rewriter->to = NULL;
    dw__rewriter_abort(rewriter);
    return DW_OK;
}

void dw__rewriter_abort(dw__rewriter *rewriter) {
    dw_graph_destroy(rewriter->to);
    dw__free(rewriter->map);
    *rewriter = (dw__rewriter){0};
}

/* ---- whole copies -------------------------------------------------------------------------- */

/* Values are copied in their order, leaves among nodes, so that every index stays what it was. */
dw_status dw_graph_clone(const dw_graph *graph, dw_graph **out) {
    dw_status status = DW_OK;
    dw_graph *copy = NULL;
    dw_value *map = make_map(graph);
    if (!map) return dw__fail_memory("a copy of a graph", graph->values.count * sizeof *map);
    DW_TRY(dw_graph_create(&copy));
    DW_TRY(dw__import_symbols(copy, graph));
    for (dw_value value = 0; value < graph->values.count; value++) {
        const dw__value_record *record = &graph->values.items[value];
        if (record->node == DW_NONE)
            DW_TRY(copy_leaf(copy, graph, value, &map[value]));
        else if (record->index == 0)
            DW_TRY(copy_node(copy, graph, record->node, map, true));
    }
    DW_TRY(copy_outputs(copy, graph, map));
    DW_TRY(restore_origin(copy, graph));
    copy->next_name = graph->next_name;
    *out = copy;
cleanup:
    dw__free(map);
    if (status != DW_OK) dw_graph_destroy(copy);
    return status;
}
