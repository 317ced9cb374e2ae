/* Copies graphs: node by node for passes, and whole. */
#include "graph/internal.h"
#include <string.h>

/* ---- dims and attributes ------------------------------------------------------------------- */

/* Source and destination of a copy. If `sizes` is given, every dim becomes its value at these symbol sizes. */
typedef struct copier {
    dw_graph *to;
    const dw_graph *from;
    dw_value *map;
    const int64_t *sizes;
    bool keep_automatic; /* if false, automatic names are made anew */
} copier;

static dw_status copy_dims(const copier *c, uint32_t count, const dw_dim *dims, dw_dim *copies) {
    for (uint32_t i = 0; i < count; i++)
        DW_RETURN_IF_FAILED(c->sizes ? dw_dim_eval(c->from, dims[i], c->sizes, &copies[i])
                                     : dw__import_dim(c->to, c->from, dims[i], &copies[i]));
    return DW_OK;
}

static dw_status copy_dims_attr(const copier *c, dw_attr *attr) {
    dw_dim *list = dw__arena_alloc(c->to->arena, attr->count * sizeof *list);
    if (!list) return dw__fail_memory("an attribute", attr->count * sizeof *list);
    DW_RETURN_IF_FAILED(copy_dims(c, attr->count, attr->list, list));
    attr->list = list;
    return DW_OK;
}

static dw_status copy_plain_attr(const copier *c, dw_attr *attr) {
    size_t bytes = attr->string ? strlen(attr->string) + 1 : attr->count * sizeof *attr->list;
    if (bytes == 0) return DW_OK;
    void *copy = dw__arena_alloc(c->to->arena, bytes);
    if (!copy) return dw__fail_memory("an attribute", bytes);
    if (attr->string)
        attr->string = memcpy(copy, attr->string, bytes);
    else
        attr->list = memcpy(copy, attr->list, bytes);
    return DW_OK;
}

static dw_status copy_attrs(const copier *c, dw_node node, const dw_attr **attrs) {
    const dw__node_record *record = &c->from->nodes.items[node];
    size_t bytes = record->attr_count * sizeof(dw_attr);
    dw_attr *copy = dw__arena_alloc(c->to->arena, bytes);
    if (!copy) return dw__fail_memory("attributes", bytes);
    for (uint32_t i = 0; i < record->attr_count; i++) {
        copy[i] = record->attrs[i];
        if (dw_attr_kind_of(copy[i].key) == DW_ATTR_DIMS)
            DW_RETURN_IF_FAILED(copy_dims_attr(c, &copy[i]));
        else
            DW_RETURN_IF_FAILED(copy_plain_attr(c, &copy[i]));
    }
    *attrs = copy;
    return DW_OK;
}

dw_status dw__import_attrs(dw_graph *to, const dw_graph *from, dw_node node,
                           const dw_attr **attrs) {
    const copier c = {.to = to, .from = from};
    return copy_attrs(&c, node, attrs);
}

/* ---- values and nodes ---------------------------------------------------------------------- */

static dw_status copy_leaf(const copier *c, dw_value leaf) {
    const dw__value_record *record = &c->from->values.items[leaf];
    dw_dim shape[DW_MAX_RANK];
    dw_status status = copy_dims(c, (uint32_t)record->rank, record->shape, shape);
    if (status != DW_OK) return dw__fail_prefix(status, "leaf \"%s\"", record->name);
    return dw_graph_leaf(c->to, record->role, record->name, record->dtype, record->rank, shape,
                         &c->map[leaf]);
}

/* Chooses the names of the outputs in the copy: the original ones if they are free. */
static void choose_names(const copier *c, const dw__node_record *record, const char **names) {
    for (uint32_t i = 0; i < record->output_count; i++) {
        const char *name = c->from->values.items[record->outputs[i]].name;
        bool kept = c->keep_automatic || !dw__is_automatic_name(name);
        names[i] = kept && dw_graph_find(c->to, name) == DW_NONE ? name : NULL;
    }
}

static dw_status map_operands(const copier *c, dw_node node, dw_value *inputs) {
    const dw__node_record *record = &c->from->nodes.items[node];
    for (uint32_t i = 0; i < record->input_count; i++) {
        inputs[i] = record->inputs[i] == DW_NONE ? DW_NONE : c->map[record->inputs[i]];
        if (inputs[i] == DW_NONE && record->inputs[i] != DW_NONE)
            return dw__fail(DW_INTERNAL,
                            "node %u (%s) is copied before its operand \"%s\": please report this "
                            "with the graph",
                            node, dw_op_name(record->op),
                            c->from->values.items[record->inputs[i]].name);
    }
    return DW_OK;
}

static dw_status copy_node(const copier *c, dw_node node) {
    const dw__node_record *record = &c->from->nodes.items[node];
    dw_value inputs[DW_MAX_INPUTS];
    const char *names[DW_MAX_OUTPUTS];
    const dw_attr *attrs = NULL;
    dw_node made;
    DW_RETURN_IF_FAILED(map_operands(c, node, inputs));
    choose_names(c, record, names);
    DW_RETURN_IF_FAILED(dw__copy_origin(c->to, c->from, node));
    DW_RETURN_IF_FAILED(copy_attrs(c, node, &attrs));
    DW_RETURN_IF_FAILED(dw__append_named(c->to, record->op, record->input_count, inputs,
                                         record->attr_count, attrs, record->output_count, names,
                                         &made));
    for (uint32_t i = 0; i < record->output_count; i++)
        c->map[record->outputs[i]] = dw_node_output(c->to, made, i);
    return DW_OK;
}

static dw_status copy_outputs(dw_graph *to, const dw_graph *from, const dw_value *map) {
    for (size_t i = 0; i < from->outputs.count; i++) {
        dw_value value = from->outputs.items[i];
        if (map[value] == DW_NONE)
            return dw__fail(DW_INTERNAL,
                            "output %zu (\"%s\") was not made by the pass: please report this "
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

/* Makes a map in which every value is DW_NONE. */
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
    const copier c = {.to = rewriter->to, .from = from, .map = rewriter->map};
    for (size_t i = 0; i < from->leaves.count; i++) {
        dw_value leaf = from->leaves.items[i];
        DW_TRY(copy_leaf(&c, leaf));
    }
cleanup:
    if (status != DW_OK) dw__rewriter_abort(rewriter);
    return status;
}

dw_status dw__rewriter_copy(dw__rewriter *rewriter, dw_node node) {
    const copier c = {.to = rewriter->to, .from = rewriter->from, .map = rewriter->map};
    return copy_node(&c, node);
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

/* Copies values in order, leaves between nodes, so that every index stays the same. */
static dw_status copy_values(const copier *c) {
    for (dw_value value = 0; value < c->from->values.count; value++) {
        const dw__value_record *record = &c->from->values.items[value];
        dw_status status = DW_OK;
        if (record->node == DW_NONE)
            status = copy_leaf(c, value);
        else if (record->index == 0)
            status = copy_node(c, record->node);
        if (status != DW_OK && record->node != DW_NONE)
            return dw__fail_prefix(status, "node %u (%s \"%s\")", record->node,
                                   dw_op_name(c->from->nodes.items[record->node].op), record->name);
        if (status != DW_OK) return status;
    }
    return DW_OK;
}

/* Copies the whole graph. If `sizes` is given, its dims become numbers. */
static dw_status copy_graph(const dw_graph *graph, const int64_t *sizes, dw_graph **out) {
    dw_status status = DW_OK;
    copier c = {.from = graph, .map = make_map(graph), .sizes = sizes, .keep_automatic = true};
    if (!c.map) return dw__fail_memory("a copy of a graph", graph->values.count * sizeof *c.map);
    DW_TRY(dw_graph_create(&c.to));
    DW_TRY(dw__import_symbols(c.to, graph));
    DW_TRY(copy_values(&c));
    DW_TRY(copy_outputs(c.to, graph, c.map));
    DW_TRY(restore_origin(c.to, graph));
    c.to->next_name = graph->next_name;
    *out = c.to;
cleanup:
    dw__free(c.map);
    if (status != DW_OK) dw_graph_destroy(c.to);
    return status;
}

dw_status dw_graph_clone(const dw_graph *graph, dw_graph **copy) {
    return copy_graph(graph, NULL, copy);
}

/* In a graph without symbols the shape rules check every bound. */
dw_status dw__graph_check_sizes(const dw_graph *graph, const int64_t *sizes) {
    dw_graph *copy;
    if (dw_graph_symbol_count(graph) == 0) return DW_OK; /* checked when it was built */
    dw_status status = copy_graph(graph, sizes, &copy);
    if (status == DW_OK) dw_graph_destroy(copy);
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "at these sizes");
}
