/* Building and querying a graph: values, nodes, names, outputs.
 *
 * Every change first checks, then allocates and finally commits by raising counts, so that a failure at any
 * point leaves the graph unchanged. The map of names may hold entries for values that were never made:
 * find_name() uses an entry only if the value has that name. */
#include "graph/internal.h"
#include <stdio.h>
#include <string.h>

enum { AUTOMATIC_NAME_BYTES = 16, MAX_VALUES = 1 << 30 };

/* ---- lifecycle ----------------------------------------------------------------------------- */

dw_status dw_graph_create(dw_graph **out) {
    if (!out) return dw__fail(DW_INVALID_ARGUMENT, "the pointer for the new graph is NULL");
    dw_status status = DW_OK;
    dw_graph *graph = dw__calloc(1, sizeof *graph);
    if (!graph) return dw__fail_memory("a graph", sizeof *graph);
    graph->layer = -1;
    graph->module = "";
    graph->arena = dw__arena_create();
    graph->names = dw__map_create();
    if (!graph->arena || !graph->names) {
        status = dw__fail_memory("a graph", sizeof *graph);
        goto cleanup;
    }
    DW_TRY(dw__dims_create(&graph->dims));
    *out = graph;
cleanup:
    if (status != DW_OK) dw_graph_destroy(graph);
    return status;
}

void dw_graph_destroy(dw_graph *graph) {
    if (!graph) return;
    dw__arena_destroy(graph->arena);
    dw__dims_destroy(graph->dims);
    dw__map_destroy(graph->names);
    dw__free(graph->values.items);
    dw__free(graph->nodes.items);
    dw__free(graph->outputs.items);
    dw__free(graph->leaves.items);
    dw__free(graph);
}

/* ---- names --------------------------------------------------------------------------------- */

static dw_status check_characters(const char *what, const char *text) {
    for (const char *at = text; *at;) {
        int length = dw__utf8_length(at);
        if (length == 0)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "%s has the byte 0x%02x at position %zu; expected UTF-8 text without "
                            "control characters",
                            what, (unsigned char)*at, (size_t)(at - text) + 1);
        at += length;
    }
    return DW_OK;
}

dw_status dw__check_name(const char *what, const char *name) {
    if (!name || !*name) return dw__fail(DW_INVALID_ARGUMENT, "%s is empty; expected a name", what);
    return check_characters(what, name);
}

bool dw__is_automatic_name(const char *name) {
    return name[0] == '%' && name[1] != '\0' && strspn(name + 1, "0123456789") == strlen(name + 1);
}

static dw_value find_name(const dw_graph *graph, const char *name) {
    uint32_t value;
    if (!dw__map_get(graph->names, name, &value)) return DW_NONE;
    if (value >= graph->values.count) return DW_NONE;
    return strcmp(graph->values.items[value].name, name) == 0 ? value : DW_NONE;
}

static dw_status check_new_name(const dw_graph *graph, const char *name) {
    DW_RETURN_IF_FAILED(dw__check_name("the name of a value", name));
    if (find_name(graph, name) == DW_NONE) return DW_OK;
    return dw__fail(DW_INVALID_ARGUMENT,
                    "the graph has a value named \"%s\" already: use another name", name);
}

/* Finds the next free "%7" name. The counter only grows, so all searches together take linear time. */
static dw_status make_name(dw_graph *graph, uint32_t index, uint32_t *next, const char **name) {
    char text[AUTOMATIC_NAME_BYTES];
    if (*next < index) *next = index;
    do snprintf(text, sizeof text, "%%%u", (*next)++);
    while (find_name(graph, text) != DW_NONE);
    *name = dw__arena_strdup(graph->arena, text);
    return *name ? DW_OK : dw__fail_memory("the name of a value", sizeof text);
}

dw_value dw_graph_find(const dw_graph *graph, const char *name) {
    return name ? find_name(graph, name) : DW_NONE;
}

/* ---- leaves -------------------------------------------------------------------------------- */

static dw_status check_leaf_shape(const dw_graph *graph, const char *name, int rank,
                                  const dw_dim *shape) {
    if (rank < 0 || rank > DW_MAX_RANK || (rank > 0 && !shape))
        return dw__fail(DW_SHAPE, "leaf \"%s\" has rank %d; expected 0 to %d dims", name, rank,
                        DW_MAX_RANK);
    for (int i = 0; i < rank; i++) {
        if (!dw__dim_exists(graph, shape[i]))
            return dw__fail(DW_INVALID_ARGUMENT, "leaf \"%s\": dim %d is of another graph", name,
                            i);
        if (dw__dim_is_negative(graph, shape[i]))
            return dw__fail(DW_SHAPE, "leaf \"%s\": dim %d is %s; expected 0 or more", name, i,
                            dw__dim_words(graph, shape[i]).text);
    }
    return DW_OK;
}

static dw_status check_leaf(const dw_graph *graph, dw_role role, const char *name, dw_dtype dtype,
                            int rank, const dw_dim *shape) {
    DW_RETURN_IF_FAILED(check_new_name(graph, name));
    if ((unsigned)role >= DW_ROLE_ACTIVATION)
        return dw__fail(DW_INVALID_ARGUMENT, "leaf \"%s\" has role %d (%s), which no leaf can have",
                        name, (int)role, dw_role_name(role));
    if ((unsigned)dtype >= DW_DTYPE_COUNT)
        return dw__fail(DW_TYPE, "leaf \"%s\" has element type %d, which does not exist", name,
                        (int)dtype);
    DW_RETURN_IF_FAILED(check_leaf_shape(graph, name, rank, shape));
    if (role == DW_ROLE_SEED && (dtype != DW_I64 || rank != 1 || shape[0] != 2))
        return dw__fail(DW_SHAPE, "seed \"%s\" is %s%s; expected i64[2]: Philox key and offset",
                        name, dw_dtype_name(dtype), dw__shape_words(graph, rank, shape).text);
    if (role == DW_ROLE_STATISTICS &&
        (dtype != DW_F64 || rank != 1 || shape[0] != DW_LAYER_STATISTICS))
        return dw__fail(DW_SHAPE, "statistics \"%s\" are %s%s; expected f64[%d]", name,
                        dw_dtype_name(dtype), dw__shape_words(graph, rank, shape).text,
                        (int)DW_LAYER_STATISTICS);
    return DW_OK;
}

static dw_status reserve_values(dw_graph *graph, size_t more) {
    size_t needed = graph->values.count + more;
    if (needed > MAX_VALUES)
        return dw__fail(DW_UNSUPPORTED, "a graph has at most %d values", MAX_VALUES);
    return dw__grow((void **)&graph->values.items, &graph->values.capacity, needed,
                    sizeof *graph->values.items);
}

static dw_status store_shape(dw_graph *graph, int rank, const dw_dim *shape,
                             const dw_dim **stored) {
    dw_dim *copy = dw__arena_alloc(graph->arena, (size_t)rank * sizeof *copy);
    if (!copy) return dw__fail_memory("a shape", (size_t)rank * sizeof *copy);
    if (rank > 0) memcpy(copy, shape, (size_t)rank * sizeof *copy);
    *stored = copy;
    return DW_OK;
}

dw_status dw_graph_leaf(dw_graph *graph, dw_role role, const char *name, dw_dtype dtype, int rank,
                        const dw_dim *shape, dw_value *value) {
    DW_RETURN_IF_FAILED(check_leaf(graph, role, name, dtype, rank, shape));
    DW_RETURN_IF_FAILED(reserve_values(graph, 1));
    DW_RETURN_IF_FAILED(dw__grow((void **)&graph->leaves.items, &graph->leaves.capacity,
                                 graph->leaves.count + 1, sizeof *graph->leaves.items));
    dw__value_record record = {.dtype = dtype, .role = role, .rank = rank, .node = DW_NONE};
    DW_RETURN_IF_FAILED(store_shape(graph, rank, shape, &record.shape));
    record.name = dw__arena_strdup(graph->arena, name);
    if (!record.name) return dw__fail_memory("the name of a leaf", strlen(name) + 1);
    dw_value index = (dw_value)graph->values.count;
    DW_RETURN_IF_FAILED(dw__map_set(graph->names, name, index));
    graph->values.items[graph->values.count++] = record;
    graph->leaves.items[graph->leaves.count++] = index;
    if (value) *value = index;
    return DW_OK;
}

/* ---- nodes --------------------------------------------------------------------------------- */

static dw_status check_operands(const dw__draft *draft, const dw__op_row *row) {
    if (draft->input_count < row->min_inputs || draft->input_count > row->max_inputs)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: %u operands are given; expected at least %u and at most %u", row->name,
                        draft->input_count, row->min_inputs, row->max_inputs);
    for (uint32_t i = 0; i < draft->input_count; i++) {
        dw_value input = draft->inputs[i];
        bool optional = row->optional_inputs >> i & 1;
        if (input == DW_NONE && !optional)
            return dw__fail(DW_INVALID_ARGUMENT, "%s: operand %u (%s) is absent, but is required",
                            row->name, i, dw__operand_name(draft->op, i));
        if (input != DW_NONE && input >= draft->graph->values.count)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "%s: operand %u (%s) is value %u; the graph has %zu values", row->name,
                            i, dw__operand_name(draft->op, i), input, draft->graph->values.count);
    }
    return DW_OK;
}

static dw_status check_attr_keys(const dw__draft *draft, const dw__op_row *row) {
    uint64_t given = 0;
    for (uint32_t i = 0; i < draft->attr_count; i++) {
        given |= UINT64_C(1) << draft->attrs[i].key;
        if (!(row->allowed_attrs >> draft->attrs[i].key & 1))
            return dw__fail(DW_INVALID_ARGUMENT, "%s: attribute %s is not one of its attributes",
                            row->name, dw_attr_name(draft->attrs[i].key));
    }
    for (int key = 0; key < DW_ATTR_KEY_COUNT; key++)
        if ((row->required_attrs & ~given) >> key & 1)
            return dw__fail(DW_INVALID_ARGUMENT, "%s: attribute %s is required, but is not given",
                            row->name, dw_attr_name((dw_attr_key)key));
    return DW_OK;
}

/* Operations compute in types that hold numbers; codes mean nothing without their scales. */
static dw_status check_dtypes(const dw__draft *draft, const dw__op_row *row) {
    for (uint32_t i = 0; i < draft->input_count; i++) {
        if (draft->inputs[i] == DW_NONE) continue;
        dw_dtype dtype = draft->graph->values.items[draft->inputs[i]].dtype;
        if (dw__dtype_is_code(dtype) && !row->reads_codes)
            return dw__fail(DW_TYPE,
                            "%s: %s is %s, which it does not support; expected bool, an integer or "
                            "a floating-point type of 16 bits or more",
                            row->name, dw__operand_name(draft->op, i), dw_dtype_name(dtype));
    }
    for (uint32_t i = 0; i < draft->attr_count; i++)
        if (dw_attr_kind_of(draft->attrs[i].key) == DW_ATTR_DTYPE &&
            dw__dtype_is_code((dw_dtype)draft->attrs[i].integer))
            return dw__fail(DW_TYPE,
                            "%s: %s is %s, which it does not give; expected bool, an integer or a "
                            "floating-point type of 16 bits or more",
                            row->name, dw_attr_name(draft->attrs[i].key),
                            dw_dtype_name((dw_dtype)draft->attrs[i].integer));
    return DW_OK;
}

dw_status dw__draft_infer(const dw__draft *draft, dw__inferred *out) {
    const dw__op_row *row = &dw__op_table[draft->op];
    out->count = 0;
    DW_RETURN_IF_FAILED(check_operands(draft, row));
    DW_RETURN_IF_FAILED(check_attr_keys(draft, row));
    DW_RETURN_IF_FAILED(check_dtypes(draft, row));
    DW_RETURN_IF_FAILED(row->infer(draft, out));
    for (uint32_t i = 0; i < out->count; i++)
        for (int axis = 0; axis < out->outputs[i].rank; axis++)
            if (dw__dim_is_negative(draft->graph, out->outputs[i].shape[axis]))
                return dw__fail(DW_SHAPE,
                                "%s: dim %d of its result %u would be %s; expected 0 or more",
                                row->name, axis, i,
                                dw__dim_words(draft->graph, out->outputs[i].shape[axis]).text);
    return DW_OK;
}

/* Copies the memory that the draft's attributes point to into the graph's arena. */
static dw_status store_attrs(dw_graph *graph, uint32_t count, const dw_attr *attrs,
                             const dw_attr **stored) {
    dw_attr *copy = dw__arena_alloc(graph->arena, count * sizeof *copy);
    if (!copy) return dw__fail_memory("attributes", count * sizeof *copy);
    for (uint32_t i = 0; i < count; i++) {
        copy[i] = attrs[i];
        size_t bytes = attrs[i].count * sizeof *attrs[i].list;
        if (attrs[i].string) bytes = strlen(attrs[i].string) + 1;
        if (bytes == 0) continue;
        void *moved = dw__arena_alloc(graph->arena, bytes);
        if (!moved) return dw__fail_memory("an attribute", bytes);
        if (attrs[i].string)
            copy[i].string = memcpy(moved, attrs[i].string, bytes);
        else
            copy[i].list = memcpy(moved, attrs[i].list, bytes);
    }
    *stored = copy;
    return DW_OK;
}

static dw_status store_values(dw_graph *graph, uint32_t count, const dw_value *values,
                              const dw_value **stored) {
    dw_value *copy = dw__arena_alloc(graph->arena, count * sizeof *copy);
    if (!copy) return dw__fail_memory("a node's values", count * sizeof *copy);
    if (count > 0) memcpy(copy, values, count * sizeof *copy);
    *stored = copy;
    return DW_OK;
}

/* Stores the names of the new outputs: the given ones, and automatic ones for the rest. */
static dw_status store_names(dw_graph *graph, uint32_t count, uint32_t name_count,
                             const char *const *names, uint32_t *next, const char **stored) {
    for (uint32_t i = 0; i < count; i++) {
        const char *given = i < name_count ? names[i] : NULL;
        if (given) {
            DW_RETURN_IF_FAILED(check_new_name(graph, given));
            for (uint32_t k = 0; k < i; k++)
                if (strcmp(stored[k], given) == 0)
                    return dw__fail(DW_INVALID_ARGUMENT, "two outputs of one node are named \"%s\"",
                                    given);
            stored[i] = dw__arena_strdup(graph->arena, given);
            if (!stored[i]) return dw__fail_memory("the name of a value", strlen(given) + 1);
        } else {
            DW_RETURN_IF_FAILED(
                make_name(graph, (uint32_t)graph->values.count + i, next, &stored[i]));
        }
    }
    return DW_OK;
}

static void commit_node(dw_graph *graph, const dw__node_record *node, const dw__inferred *types,
                        const char *const *names, const dw_dim *const *shapes) {
    for (uint32_t i = 0; i < types->count; i++) {
        graph->values.items[graph->values.count++] =
            (dw__value_record){.name = names[i],
                               .dtype = types->outputs[i].dtype,
                               .role = DW_ROLE_ACTIVATION,
                               .rank = types->outputs[i].rank,
                               .shape = shapes[i],
                               .node = (dw_node)graph->nodes.count,
                               .index = i};
    }
    graph->nodes.items[graph->nodes.count++] = *node;
}

static dw_status insert_node(dw_graph *graph, const dw__draft *draft, const dw__inferred *types,
                             uint32_t name_count, const char *const *given_names) {
    const char *names[DW_MAX_OUTPUTS];
    const dw_dim *shapes[DW_MAX_OUTPUTS];
    dw_value outputs[DW_MAX_OUTPUTS];
    uint32_t next_name = graph->next_name;
    dw__node_record node = {.op = draft->op,
                            .input_count = draft->input_count,
                            .output_count = types->count,
                            .attr_count = draft->attr_count,
                            .region = graph->region,
                            .layer = graph->layer,
                            .module = graph->module,
                            .backward = graph->backward};
    if (name_count > types->count)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: %u outputs are named; it has %u",
                        dw_op_name(draft->op), name_count, types->count);
    DW_RETURN_IF_FAILED(reserve_values(graph, types->count));
    DW_RETURN_IF_FAILED(dw__grow((void **)&graph->nodes.items, &graph->nodes.capacity,
                                 graph->nodes.count + 1, sizeof *graph->nodes.items));
    DW_RETURN_IF_FAILED(
        store_names(graph, types->count, name_count, given_names, &next_name, names));
    DW_RETURN_IF_FAILED(store_attrs(graph, draft->attr_count, draft->attrs, &node.attrs));
    DW_RETURN_IF_FAILED(store_values(graph, draft->input_count, draft->inputs, &node.inputs));
    for (uint32_t i = 0; i < types->count; i++) {
        outputs[i] = (dw_value)graph->values.count + i;
        DW_RETURN_IF_FAILED(
            store_shape(graph, types->outputs[i].rank, types->outputs[i].shape, &shapes[i]));
    }
    DW_RETURN_IF_FAILED(store_values(graph, types->count, outputs, &node.outputs));
    for (uint32_t i = 0; i < types->count; i++)
        DW_RETURN_IF_FAILED(dw__map_set(graph->names, names[i], outputs[i]));
    commit_node(graph, &node, types, names, shapes);
    graph->next_name = next_name;
    return DW_OK;
}

dw_status dw__append_named(dw_graph *graph, dw_op op, uint32_t input_count, const dw_value *inputs,
                           uint32_t attr_count, const dw_attr *attrs, uint32_t name_count,
                           const char *const *names, dw_node *node) {
    dw_attr sorted[DW_ATTR_KEY_COUNT];
    dw_value padded[DW_MAX_INPUTS];
    dw__inferred types;
    if ((unsigned)op >= DW_OP_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT, "operation %d does not exist", (int)op);
    const dw__op_row *row = &dw__op_table[op];
    if (input_count > DW_MAX_INPUTS || attr_count > DW_ATTR_KEY_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: %u operands and %u attributes are given; expected at most %d and %d",
                        row->name, input_count, attr_count, DW_MAX_INPUTS, DW_ATTR_KEY_COUNT);
    if ((input_count > 0 && !inputs) || (attr_count > 0 && !attrs))
        return dw__fail(DW_INVALID_ARGUMENT, "%s: the list of %s is NULL", row->name,
                        inputs ? "attributes" : "operands");
    DW_RETURN_IF_FAILED(dw__sort_attrs(graph, op, attr_count, attrs, sorted));
    if (input_count > 0) memcpy(padded, inputs, input_count * sizeof *inputs);
    while (row->optional_inputs && input_count >= row->min_inputs && input_count < row->max_inputs)
        padded[input_count++] = DW_NONE;
    dw__draft draft = {graph, op, input_count, padded, attr_count, sorted};
    DW_RETURN_IF_FAILED(dw__draft_infer(&draft, &types));
    DW_RETURN_IF_FAILED(insert_node(graph, &draft, &types, name_count, names));
    if (node) *node = (dw_node)graph->nodes.count - 1;
    return DW_OK;
}

dw_status dw_graph_append(dw_graph *graph, dw_op op, uint32_t input_count, const dw_value *inputs,
                          uint32_t attr_count, const dw_attr *attrs, dw_node *node) {
    return dw__append_named(graph, op, input_count, inputs, attr_count, attrs, 0, NULL, node);
}

dw_status dw_graph_apply(dw_graph *graph, dw_op op, uint32_t input_count, const dw_value *inputs,
                         uint32_t attr_count, const dw_attr *attrs, dw_value *output) {
    dw_node node;
    DW_RETURN_IF_FAILED(dw_graph_append(graph, op, input_count, inputs, attr_count, attrs, &node));
    *output = graph->nodes.items[node].outputs[0];
    return DW_OK;
}

/* ---- origin and outputs -------------------------------------------------------------------- */

dw_status dw_graph_set_origin(dw_graph *graph, dw_region region, int layer, const char *module) {
    if ((unsigned)region >= DW_REGION_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT, "region %d does not exist", (int)region);
    if (layer < -1)
        return dw__fail(DW_INVALID_ARGUMENT, "layer is %d; expected 0 or more, or -1 for none",
                        layer);
    if (!module) module = "";
    DW_RETURN_IF_FAILED(check_characters("the module path of a node", module));
    if (strcmp(graph->module, module) != 0) {
        const char *copy = dw__arena_strdup(graph->arena, module);
        if (!copy) return dw__fail_memory("a module path", strlen(module) + 1);
        graph->module = copy;
    }
    graph->region = region;
    graph->layer = layer;
    return DW_OK;
}

void dw_graph_set_backward(dw_graph *graph, int backward) { graph->backward = backward != 0; }

dw_status dw__copy_origin(dw_graph *to, const dw_graph *from, dw_node node) {
    const dw__node_record *record = &from->nodes.items[node];
    dw_graph_set_backward(to, record->backward);
    return dw_graph_set_origin(to, record->region, record->layer, record->module);
}

dw_status dw_graph_add_output(dw_graph *graph, dw_value value) {
    if (value >= graph->values.count)
        return dw__fail(DW_INVALID_ARGUMENT, "output %zu is value %u; the graph has %zu values",
                        graph->outputs.count, value, graph->values.count);
    return DW_PUSH(&graph->outputs, value);
}

/* ---- queries ------------------------------------------------------------------------------- */

/* A query with an index that does not exist returns a neutral answer. Queries never fail and never crash. */
static const dw__value_record *value_at(const dw_graph *graph, dw_value value) {
    static const dw_dim no_dims[1];
    static const dw__value_record nothing = {.name = "?", .shape = no_dims, .node = DW_NONE};
    return value < graph->values.count ? &graph->values.items[value] : &nothing;
}

static const dw__node_record *node_at(const dw_graph *graph, dw_node node) {
    static const dw__node_record nothing = {.op = DW_OP_COUNT, .layer = -1, .module = ""};
    return node < graph->nodes.count ? &graph->nodes.items[node] : &nothing;
}

uint32_t dw_graph_value_count(const dw_graph *graph) { return (uint32_t)graph->values.count; }
uint32_t dw_graph_node_count(const dw_graph *graph) { return (uint32_t)graph->nodes.count; }
uint32_t dw_graph_output_count(const dw_graph *graph) { return (uint32_t)graph->outputs.count; }
uint32_t dw_graph_leaf_count(const dw_graph *graph) { return (uint32_t)graph->leaves.count; }

dw_value dw_graph_output(const dw_graph *graph, uint32_t index) {
    return index < graph->outputs.count ? graph->outputs.items[index] : DW_NONE;
}

dw_value dw_graph_leaf_at(const dw_graph *graph, uint32_t index) {
    return index < graph->leaves.count ? graph->leaves.items[index] : DW_NONE;
}

const char *dw_value_name(const dw_graph *graph, dw_value value) {
    return value_at(graph, value)->name;
}
dw_dtype dw_value_dtype(const dw_graph *graph, dw_value value) {
    return value_at(graph, value)->dtype;
}
dw_role dw_value_role(const dw_graph *graph, dw_value value) {
    return value_at(graph, value)->role;
}
int dw_value_rank(const dw_graph *graph, dw_value value) { return value_at(graph, value)->rank; }
const dw_dim *dw_value_shape(const dw_graph *graph, dw_value value) {
    return value_at(graph, value)->shape;
}
dw_node dw_value_node(const dw_graph *graph, dw_value value) {
    return value_at(graph, value)->node;
}

dw_op dw_node_op(const dw_graph *graph, dw_node node) { return node_at(graph, node)->op; }
uint32_t dw_node_input_count(const dw_graph *graph, dw_node node) {
    return node_at(graph, node)->input_count;
}
dw_value dw_node_input(const dw_graph *graph, dw_node node, uint32_t index) {
    const dw__node_record *record = node_at(graph, node);
    return index < record->input_count ? record->inputs[index] : DW_NONE;
}
uint32_t dw_node_output_count(const dw_graph *graph, dw_node node) {
    return node_at(graph, node)->output_count;
}
dw_value dw_node_output(const dw_graph *graph, dw_node node, uint32_t index) {
    const dw__node_record *record = node_at(graph, node);
    return index < record->output_count ? record->outputs[index] : DW_NONE;
}
dw_region dw_node_region(const dw_graph *graph, dw_node node) {
    return node_at(graph, node)->region;
}
int dw_node_layer(const dw_graph *graph, dw_node node) { return node_at(graph, node)->layer; }
const char *dw_node_module(const dw_graph *graph, dw_node node) {
    return node_at(graph, node)->module;
}
int dw_node_is_backward(const dw_graph *graph, dw_node node) {
    return node_at(graph, node)->backward;
}
