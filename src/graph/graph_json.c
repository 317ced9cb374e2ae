/* The JSON form of a graph, for programs. Front ends write it, and every mistake in it gives one clear
 * message.
 *
 *     {"format": "deepwell.graph", "version": 1, "symbols": ["B", "S"],
 *      "leaves": [{"name": "w", "role": "parameter", "dtype": "f32", "shape": [384, "B*S + 1"]}],
 *      "nodes": [{"op": "linear", "inputs": ["x", "w", null], "outputs": ["y"],
 *                 "attrs": {"transpose_w": 1}, "region": "attn", "layer": 0, "module": "h.0.attn",
 *                 "backward": false}],
 *      "outputs": ["y"]}
 *
 * The writer prints it directly, one line for each leaf and node; the reader uses jansson. docs/graph.md has
 * the rules. */
#include "base/json.h"
#include "graph/internal.h"
#include <math.h>
#include <string.h>

#define FORMAT "deepwell.graph"
enum { VERSION = 1 };

/* ---- writing ------------------------------------------------------------------------------- */

dw_status dw__write_string(dw__text *out, const char *text) {
    DW_RETURN_IF_FAILED(dw__text_append(out, "\"", 1));
    while (*text) {
        size_t plain = strcspn(text, "\"\\");
        DW_RETURN_IF_FAILED(dw__text_append(out, text, plain));
        text += plain;
        if (*text) DW_RETURN_IF_FAILED(dw__text_printf(out, "\\%c", *text++));
    }
    return dw__text_append(out, "\"", 1);
}

/* "name": .., ["role": ..,] "dtype": .., "shape": [..] */
static dw_status write_value(dw__text *out, const dw_graph *graph, dw_value value) {
    const dw__value_record *record = &graph->values.items[value];
    DW_RETURN_IF_FAILED(dw__text_printf(out, "{\"name\": "));
    DW_RETURN_IF_FAILED(dw__write_string(out, record->name));
    if (record->node == DW_NONE)
        DW_RETURN_IF_FAILED(dw__text_printf(out, ", \"role\": \"%s\"", dw_role_name(record->role)));
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, ", \"dtype\": \"%s\", \"shape\": ", dw_dtype_name(record->dtype)));
    DW_RETURN_IF_FAILED(dw__write_list(out, graph, (uint32_t)record->rank, record->shape, "\""));
    return dw__text_append(out, "}", 1);
}

static dw_status write_number(dw__text *out, double number) {
    char text[DW__NUMBER_BYTES];
    dw__number_text(number, text);
    return dw__text_printf(out, isfinite(number) ? "%s" : "\"%s\"", text);
}

static dw_status write_attr(dw__text *out, const dw_graph *graph, const dw_attr *attr) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "\"%s\": ", dw_attr_name(attr->key)));
    switch (dw_attr_kind_of(attr->key)) {
    case DW_ATTR_INT: return dw__text_printf(out, "%lld", (long long)attr->integer);
    case DW_ATTR_FLOAT: return write_number(out, attr->number);
    case DW_ATTR_DTYPE: return dw__write_string(out, dw_dtype_name((dw_dtype)attr->integer));
    case DW_ATTR_STRING: return dw__write_string(out, attr->string);
    case DW_ATTR_INTS: return dw__write_list(out, NULL, attr->count, attr->list, "");
    case DW_ATTR_DIMS: return dw__write_list(out, graph, attr->count, attr->list, "\"");
    }
    return DW_OK;
}

static dw_status write_origin(dw__text *out, const dw__node_record *node) {
    if (node->region != DW_REGION_NONE)
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, ", \"region\": \"%s\"", dw_region_name(node->region)));
    if (node->layer >= 0) DW_RETURN_IF_FAILED(dw__text_printf(out, ", \"layer\": %d", node->layer));
    if (*node->module) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, ", \"module\": "));
        DW_RETURN_IF_FAILED(dw__write_string(out, node->module));
    }
    return node->backward ? dw__text_printf(out, ", \"backward\": true") : DW_OK;
}

static dw_status write_node(dw__text *out, const dw_graph *graph, const dw__node_record *node) {
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "{\"op\": \"%s\", \"inputs\": [", dw_op_name(node->op)));
    for (uint32_t i = 0; i < node->input_count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        if (node->inputs[i] == DW_NONE)
            DW_RETURN_IF_FAILED(dw__text_append(out, "null", 4));
        else
            DW_RETURN_IF_FAILED(dw__write_string(out, graph->values.items[node->inputs[i]].name));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "], \"outputs\": ["));
    for (uint32_t i = 0; i < node->output_count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        DW_RETURN_IF_FAILED(write_value(out, graph, node->outputs[i]));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "], \"attrs\": {"));
    for (uint32_t i = 0; i < node->attr_count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        DW_RETURN_IF_FAILED(write_attr(out, graph, &node->attrs[i]));
    }
    DW_RETURN_IF_FAILED(dw__text_append(out, "}", 1));
    DW_RETURN_IF_FAILED(write_origin(out, node));
    return dw__text_append(out, "}", 1);
}

static dw_status write_graph(dw__text *out, const dw_graph *graph) {
    uint32_t symbols = dw_graph_symbol_count(graph);
    DW_RETURN_IF_FAILED(dw__text_printf(
        out, "{\"format\": \"" FORMAT "\", \"version\": %d, \"symbols\": [", VERSION));
    for (uint32_t i = 0; i < symbols; i++)
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "%s\"%s\"", i > 0 ? ", " : "", dw_graph_symbol_name(graph, i)));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "],\n \"leaves\": ["));
    for (size_t i = 0; i < graph->leaves.count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s\n  ", i > 0 ? "," : ""));
        DW_RETURN_IF_FAILED(write_value(out, graph, graph->leaves.items[i]));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "],\n \"nodes\": ["));
    for (size_t i = 0; i < graph->nodes.count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s\n  ", i > 0 ? "," : ""));
        DW_RETURN_IF_FAILED(write_node(out, graph, &graph->nodes.items[i]));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "],\n \"outputs\": ["));
    for (size_t i = 0; i < graph->outputs.count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        DW_RETURN_IF_FAILED(
            dw__write_string(out, graph->values.items[graph->outputs.items[i]].name));
    }
    return dw__text_printf(out, "]}\n");
}

dw_status dw_graph_to_json(const dw_graph *graph, char **text) {
    dw__text out = {0};
    dw_status status = write_graph(&out, graph);
    if (status != DW_OK)
        dw__text_free(&out);
    else
        *text = out.text;
    return status;
}

/* ---- reading: kinds ------------------------------------------------------------------------ */

static dw_status read_string(const json_t *json, const char *what, const char **text) {
    *text = json_string_value(json); /* NULL for every other kind of JSON value */
    return *text ? DW_OK : dw__json_wrong_kind(what, json, "a string");
}

static dw_status read_integer(const json_t *json, const char *what, int64_t *integer) {
    *integer = json_integer_value(json); /* 0 for every other kind of JSON value */
    return json_is_integer(json) ? DW_OK : dw__json_wrong_kind(what, json, "an integer");
}

static dw_status read_array(const json_t *json, const char *what, size_t limit, size_t *count) {
    if (!json_is_array(json)) return dw__json_wrong_kind(what, json, "an array");
    *count = json_array_size(json);
    if (*count <= limit) return DW_OK;
    return dw__fail(DW_PARSE, "%s has %zu entries; expected at most %zu", what, *count, limit);
}

/* Fails if the object has a key that is not among `keys`. NULL ends `keys`. */
static dw_status check_keys(json_t *object, const char *what, const char *const *keys) {
    const char *key;
    json_t *member;
    if (!json_is_object(object)) return dw__json_wrong_kind(what, object, "an object");
    json_object_foreach(object, key, member) {
        size_t i = 0;
        while (keys[i] && strcmp(keys[i], key) != 0) i++;
        if (!keys[i]) return dw__fail(DW_PARSE, "%s has the unknown key \"%.64s\"", what, key);
    }
    return DW_OK;
}

static dw_status read_number(const json_t *json, const char *what, double *number) {
    if (json_is_number(json)) {
        *number = json_number_value(json);
        return DW_OK;
    }
    const char *text = json_string_value(json);
    if (text) {
        const char *end = dw__number_parse(text, number);
        if (end && *end == '\0' && !isfinite(*number)) return DW_OK;
    }
    return dw__json_wrong_kind(what, json, "a number, \"inf\", \"-inf\" or \"nan\"");
}

static dw_status read_dtype(const json_t *json, const char *what, dw_dtype *dtype) {
    const char *name;
    DW_RETURN_IF_FAILED(read_string(json, what, &name));
    int found = dw__dtype_find(name);
    if (found < 0)
        return dw__fail(DW_PARSE, "%s is \"%.64s\"; expected bool, i32, i64, bf16, f16, f32 or f64",
                        what, name);
    *dtype = (dw_dtype)found;
    return DW_OK;
}

static dw_status read_dim(dw_graph *graph, const json_t *json, const char *what, dw_dim *dim) {
    if (json_is_string(json)) return dw__parse_known_dim(graph, json_string_value(json), dim);
    if (!json_is_integer(json))
        return dw__json_wrong_kind(what, json,
                                   "an integer or a string such as \"B*S\" for each dim");
    *dim = json_integer_value(json);
    if (*dim >= 0) return DW_OK;
    return dw__fail(DW_SHAPE, "%s has the dim %lld; expected 0 or more", what, (long long)*dim);
}

static dw_status read_dims(dw_graph *graph, const json_t *json, const char *what, dw_dim *dims,
                           size_t *count) {
    DW_RETURN_IF_FAILED(read_array(json, what, DW_MAX_RANK, count));
    for (size_t i = 0; i < *count; i++)
        DW_RETURN_IF_FAILED(read_dim(graph, json_array_get(json, i), what, &dims[i]));
    return DW_OK;
}

static dw_status read_value(const dw_graph *graph, const json_t *json, const char *what,
                            dw_value *value) {
    const char *name;
    DW_RETURN_IF_FAILED(read_string(json, what, &name));
    *value = dw_graph_find(graph, name);
    if (*value != DW_NONE) return DW_OK;
    return dw__fail(DW_PARSE,
                    "%s is \"%.200s\"; there is no leaf and no earlier output of that name", what,
                    name);
}

/* ---- reading: leaves ----------------------------------------------------------------------- */

static dw_status read_leaf_members(dw_graph *graph, json_t *json) {
    static const char *const keys[] = {"name", "role", "dtype", "shape", NULL};
    const char *name, *role_name;
    dw_dtype dtype;
    dw_dim shape[DW_MAX_RANK];
    size_t rank;
    DW_RETURN_IF_FAILED(check_keys(json, "the leaf", keys));
    DW_RETURN_IF_FAILED(read_string(json_object_get(json, "name"), "name", &name));
    DW_RETURN_IF_FAILED(read_string(json_object_get(json, "role"), "role", &role_name));
    int role = dw__role_find(role_name);
    if (role < 0)
        return dw__fail(DW_PARSE,
                        "role is \"%.64s\"; expected input, parameter, constant, seed, "
                        "statistics or gradient",
                        role_name);
    DW_RETURN_IF_FAILED(read_dtype(json_object_get(json, "dtype"), "dtype", &dtype));
    DW_RETURN_IF_FAILED(read_dims(graph, json_object_get(json, "shape"), "shape", shape, &rank));
    return dw_graph_leaf(graph, (dw_role)role, name, dtype, (int)rank, shape, NULL);
}

static dw_status read_leaf(dw_graph *graph, json_t *json, size_t index) {
    dw_status status = read_leaf_members(graph, json);
    if (status == DW_OK) return DW_OK;
    const char *name = json_string_value(json_object_get(json, "name"));
    return dw__fail_prefix(status, "leaf %zu (\"%.200s\")", index, name ? name : "");
}

/* ---- reading: nodes ------------------------------------------------------------------------ */

/* Memory for the lists of one node's attributes while the node is read. */
typedef struct lists {
    int64_t items[DW_ATTR_KEY_COUNT][DW_MAX_RANK];
} lists;

static dw_status read_ints(const json_t *json, const char *what, int64_t *ints, size_t *count) {
    DW_RETURN_IF_FAILED(read_array(json, what, DW_MAX_RANK, count));
    for (size_t i = 0; i < *count; i++)
        DW_RETURN_IF_FAILED(read_integer(json_array_get(json, i), what, &ints[i]));
    return DW_OK;
}

static dw_status read_attr(dw_graph *graph, const json_t *json, int64_t *list, dw_attr *attr) {
    const char *what = dw_attr_name(attr->key);
    dw_dtype dtype = DW_F32;
    size_t count = 0;
    switch (dw_attr_kind_of(attr->key)) {
    case DW_ATTR_INT: return read_integer(json, what, &attr->integer);
    case DW_ATTR_FLOAT: return read_number(json, what, &attr->number);
    case DW_ATTR_STRING: return read_string(json, what, &attr->string);
    case DW_ATTR_DTYPE:
        DW_RETURN_IF_FAILED(read_dtype(json, what, &dtype));
        attr->integer = dtype;
        return DW_OK;
    case DW_ATTR_INTS: DW_RETURN_IF_FAILED(read_ints(json, what, list, &count)); break;
    case DW_ATTR_DIMS: DW_RETURN_IF_FAILED(read_dims(graph, json, what, list, &count)); break;
    }
    attr->list = list;
    attr->count = (uint32_t)count;
    return DW_OK;
}

static dw_status read_attrs(dw_graph *graph, json_t *json, lists *lists, dw__description *node) {
    const char *name;
    json_t *member;
    if (!json) return DW_OK;
    if (!json_is_object(json)) return dw__json_wrong_kind("attrs", json, "an object");
    json_object_foreach(json, name, member) {
        int key = dw__attr_find(name);
        if (key < 0) return dw__fail(DW_PARSE, "there is no attribute \"%.64s\"", name);
        dw_attr *attr = &node->attrs[node->attr_count++]; /* keys are distinct, so there is room */
        *attr = (dw_attr){.key = (dw_attr_key)key};
        DW_RETURN_IF_FAILED(read_attr(graph, member, lists->items[key], attr));
    }
    return DW_OK;
}

static dw_status read_inputs(const dw_graph *graph, const json_t *json, dw__description *node) {
    size_t count;
    DW_RETURN_IF_FAILED(read_array(json, "inputs", DW_MAX_INPUTS, &count));
    for (size_t i = 0; i < count; i++) {
        const json_t *entry = json_array_get(json, i);
        node->inputs[i] = DW_NONE;
        if (!json_is_null(entry))
            DW_RETURN_IF_FAILED(read_value(graph, entry, "an entry of inputs", &node->inputs[i]));
    }
    node->input_count = (uint32_t)count;
    return DW_OK;
}

/* Reads an output: a name, or an object with the name and the type. The type must be the one that the table gives. */
static dw_status read_output(dw_graph *graph, json_t *json, dw__description *node, size_t index) {
    static const char *const keys[] = {"name", "dtype", "shape", NULL};
    size_t rank;
    node->types[index].given = json_is_object(json);
    if (json_is_string(json)) return read_string(json, "an output", &node->names[index]);
    if (!json_is_object(json))
        return dw__json_wrong_kind("an entry of outputs", json, "a name or an object");
    DW_RETURN_IF_FAILED(check_keys(json, "an entry of outputs", keys));
    DW_RETURN_IF_FAILED(
        read_string(json_object_get(json, "name"), "an output's name", &node->names[index]));
    DW_RETURN_IF_FAILED(
        read_dtype(json_object_get(json, "dtype"), "an output's dtype", &node->types[index].dtype));
    DW_RETURN_IF_FAILED(read_dims(graph, json_object_get(json, "shape"), "an output's shape",
                                  node->types[index].shape, &rank));
    node->types[index].rank = (int)rank;
    return DW_OK;
}

static dw_status read_outputs(dw_graph *graph, json_t *json, dw__description *node) {
    size_t count;
    DW_RETURN_IF_FAILED(read_array(json, "outputs", DW_MAX_OUTPUTS, &count));
    for (size_t i = 0; i < count; i++)
        DW_RETURN_IF_FAILED(read_output(graph, json_array_get(json, i), node, i));
    node->output_count = (uint32_t)count;
    return DW_OK;
}

static dw_status read_origin(const json_t *json, dw__description *node) {
    const json_t *region = json_object_get(json, "region"), *layer = json_object_get(json, "layer");
    const json_t *module = json_object_get(json, "module");
    const json_t *backward = json_object_get(json, "backward");
    if (module) DW_RETURN_IF_FAILED(read_string(module, "module", &node->module));
    if (region) {
        const char *name;
        DW_RETURN_IF_FAILED(read_string(region, "region", &name));
        int found = dw__region_find(name);
        if (found < 0) return dw__fail(DW_PARSE, "region is \"%.64s\", which does not exist", name);
        node->region = (dw_region)found;
    }
    if (layer) {
        int64_t number;
        DW_RETURN_IF_FAILED(read_integer(layer, "layer", &number));
        if (number < -1 || number > INT32_MAX)
            return dw__fail(DW_PARSE, "layer is %lld; expected 0 or more, or -1 for none",
                            (long long)number);
        node->layer = (int)number;
    }
    if (backward && !json_is_boolean(backward))
        return dw__json_wrong_kind("backward", backward, "true or false");
    node->backward = json_is_true(backward);
    return DW_OK;
}

static dw_status read_node_members(dw_graph *graph, json_t *json, lists *lists,
                                   dw__description *node) {
    static const char *const keys[] = {"op",    "inputs", "outputs",  "attrs", "region",
                                       "layer", "module", "backward", NULL};
    const char *op;
    node->input_count = node->output_count = node->attr_count = 0;
    node->region = DW_REGION_NONE;
    node->layer = -1;
    node->module = "";
    node->backward = false;
    DW_RETURN_IF_FAILED(check_keys(json, "the node", keys));
    DW_RETURN_IF_FAILED(read_string(json_object_get(json, "op"), "op", &op));
    DW_RETURN_IF_FAILED(dw_op_find(op, &node->op));
    DW_RETURN_IF_FAILED(read_origin(json, node));
    DW_RETURN_IF_FAILED(read_inputs(graph, json_object_get(json, "inputs"), node));
    DW_RETURN_IF_FAILED(read_outputs(graph, json_object_get(json, "outputs"), node));
    DW_RETURN_IF_FAILED(read_attrs(graph, json_object_get(json, "attrs"), lists, node));
    return dw__append_described(graph, node);
}

/* Prefixes the message with the node that it is about, as far as the JSON names it. */
static dw_status blame_node(const json_t *json, size_t index, dw_status status) {
    const json_t *output = json_array_get(json_object_get(json, "outputs"), 0);
    if (json_is_object(output)) output = json_object_get(output, "name");
    const char *op = json_string_value(json_object_get(json, "op"));
    const char *name = json_string_value(output);
    const char *module = json_string_value(json_object_get(json, "module"));
    return dw__fail_prefix(status, "node %zu (%.64s \"%.200s\"%s%.200s)", index, op ? op : "?",
                           name ? name : "", module ? ", module " : "", module ? module : "");
}

/* ---- reading: the whole -------------------------------------------------------------------- */

static dw_status read_header(dw_graph *graph, json_t *root) {
    static const char *const keys[] = {"format", "version", "symbols", "leaves",
                                       "nodes",  "outputs", NULL};
    const char *format;
    int64_t version;
    DW_RETURN_IF_FAILED(check_keys(root, "the graph", keys));
    DW_RETURN_IF_FAILED(read_string(json_object_get(root, "format"), "format", &format));
    if (strcmp(format, FORMAT) != 0)
        return dw__fail(DW_PARSE, "format is \"%.64s\"; expected \"" FORMAT "\"", format);
    DW_RETURN_IF_FAILED(read_integer(json_object_get(root, "version"), "version", &version));
    if (version != VERSION)
        return dw__fail(DW_UNSUPPORTED, "version is %lld; this Deepwell reads version %d",
                        (long long)version, VERSION);
    const json_t *symbols = json_object_get(root, "symbols");
    if (!json_is_array(symbols)) return dw__json_wrong_kind("symbols", symbols, "an array");
    for (size_t i = 0; i < json_array_size(symbols); i++) {
        const char *name;
        dw_dim dim;
        DW_RETURN_IF_FAILED(read_string(json_array_get(symbols, i), "a symbol", &name));
        DW_RETURN_IF_FAILED(dw_graph_symbol(graph, name, &dim));
        if (dw_graph_symbol_count(graph) != i + 1)
            return dw__fail(DW_PARSE, "the symbol \"%.64s\" is listed twice", name);
    }
    return DW_OK;
}

static dw_status read_leaves(dw_graph *graph, const json_t *leaves) {
    if (!json_is_array(leaves)) return dw__json_wrong_kind("leaves", leaves, "an array");
    for (size_t i = 0; i < json_array_size(leaves); i++)
        DW_RETURN_IF_FAILED(read_leaf(graph, json_array_get(leaves, i), i));
    return DW_OK;
}

static dw_status read_nodes(dw_graph *graph, const json_t *nodes) {
    dw_status status = DW_OK;
    if (!json_is_array(nodes)) return dw__json_wrong_kind("nodes", nodes, "an array");
    dw__description *node = dw__calloc(1, sizeof *node);
    lists *lists = dw__calloc(1, sizeof *lists);
    if (!node || !lists) {
        status = dw__fail_memory("a reader of graphs", sizeof *node + sizeof *lists);
        goto cleanup;
    }
    for (size_t i = 0; i < json_array_size(nodes); i++) {
        json_t *json = json_array_get(nodes, i);
        status = read_node_members(graph, json, lists, node);
        if (status != DW_OK) {
            blame_node(json, i, status);
            goto cleanup;
        }
    }
cleanup:
    dw__free(node);
    dw__free(lists);
    return status;
}

static dw_status read_graph_outputs(dw_graph *graph, const json_t *outputs) {
    if (!json_is_array(outputs)) return dw__json_wrong_kind("outputs", outputs, "an array");
    for (size_t i = 0; i < json_array_size(outputs); i++) {
        dw_value value;
        DW_RETURN_IF_FAILED(
            read_value(graph, json_array_get(outputs, i), "an entry of outputs", &value));
        DW_RETURN_IF_FAILED(dw_graph_add_output(graph, value));
    }
    return DW_OK;
}

static dw_status read_graph(dw_graph *graph, json_t *root) {
    DW_RETURN_IF_FAILED(read_header(graph, root));
    DW_RETURN_IF_FAILED(read_leaves(graph, json_object_get(root, "leaves")));
    DW_RETURN_IF_FAILED(read_nodes(graph, json_object_get(root, "nodes")));
    DW_RETURN_IF_FAILED(read_graph_outputs(graph, json_object_get(root, "outputs")));
    dw_graph_set_backward(graph, 0);
    return dw_graph_set_origin(graph, DW_REGION_NONE, -1, NULL);
}

dw_status dw_graph_from_json(const char *text, size_t bytes, dw_graph **graph) {
    dw_status status = DW_OK;
    static const dw__json_limits limits = {64, SIZE_MAX}; /* a graph may be of any size */
    dw_graph *made = NULL;
    json_t *root = NULL;
    if (!text || !graph) return dw__fail(DW_INVALID_ARGUMENT, "the JSON of a graph is NULL");
    DW_TRY(dw__json_parse("JSON of a graph", text, bytes, limits, &root));
    DW_TRY(dw_graph_create(&made));
    status = read_graph(made, root);
    if (status != DW_OK) {
        status = dw__fail_prefix(dw__form_status(status), "JSON of a graph");
        goto cleanup;
    }
    *graph = made;
    made = NULL;
cleanup:
    json_decref(root);
    dw_graph_destroy(made);
    return status;
}
