/* The text form, for people: one line for each leaf and node.
 *
 *     deepwell graph 1
 *     symbols B, S
 *
 *     input %ids: i64[B, S]
 *     parameter %wte: f32[256, 384]
 *
 *     %h: f32[B, S, 384] = embedding(%wte, %ids)  # embed - transformer.wte
 *     %5: f32[B, S, 384], %6: f32[B, S], %7: f32[B, S] = layer_norm(%h, _, _) {eps=0.1}  # norm 0 ln
 *
 *     return %5
 *
  * "_" is an absent operand. The text after "#" gives a node's origin: "backward" if the node belongs
  * to the backward pass, the region, the layer ("-" for none) and the module path up to the end of
  * the line. It is omitted if all of these are unknown. The types of results may be left out:
  * %h = embedding(%wte, %ids). Lines that begin with "#" are skipped.
  * Names with characters other than letters, digits, "_" and "." are quoted: %"a b". docs/graph.md
  * has the grammar.
  */
#include "graph/internal.h"
#include <ctype.h>
#include <string.h>

#define HEADER "deepwell graph 1"

/* ---- writing ------------------------------------------------------------------------------- */

static bool is_plain_name(const char *name) {
    if (!isalpha((unsigned char)name[0]) && name[0] != '_') return false;
    for (; *name; name++)
        if (!isalnum((unsigned char)*name) && *name != '_' && *name != '.') return false;
    return true;
}

static dw_status write_quoted(dw__text *out, const char *text) {
    DW_RETURN_IF_FAILED(dw__text_append(out, "\"", 1));
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') DW_RETURN_IF_FAILED(dw__text_append(out, "\\", 1));
        DW_RETURN_IF_FAILED(dw__text_append(out, text, 1));
    }
    return dw__text_append(out, "\"", 1);
}

static dw_status write_name(dw__text *out, const char *name) {
    if (dw__is_automatic_name(name)) return dw__text_append(out, name, strlen(name));
    DW_RETURN_IF_FAILED(dw__text_append(out, "%", 1));
    if (is_plain_name(name)) return dw__text_append(out, name, strlen(name));
    return write_quoted(out, name);
}

static dw_status write_typed_name(dw__text *out, const dw_graph *graph, dw_value value) {
    const dw__value_record *record = &graph->values.items[value];
    DW_RETURN_IF_FAILED(write_name(out, record->name));
    DW_RETURN_IF_FAILED(dw__text_printf(out, ": %s", dw_dtype_name(record->dtype)));
    return dw__write_list(out, graph, (uint32_t)record->rank, record->shape, "");
}

static dw_status write_attr(dw__text *out, const dw_graph *graph, const dw_attr *attr) {
    char number[DW__NUMBER_BYTES];
    DW_RETURN_IF_FAILED(dw__text_printf(out, "%s=", dw_attr_name(attr->key)));
    switch (dw_attr_kind_of(attr->key)) {
    case DW_ATTR_INT: return dw__text_printf(out, "%lld", (long long)attr->integer);
    case DW_ATTR_FLOAT:
        dw__number_text(attr->number, number);
        return dw__text_append(out, number, strlen(number));
    case DW_ATTR_DTYPE: return dw__text_printf(out, "%s", dw_dtype_name((dw_dtype)attr->integer));
    case DW_ATTR_STRING: return write_quoted(out, attr->string);
    case DW_ATTR_INTS: return dw__write_list(out, NULL, attr->count, attr->list, "");
    case DW_ATTR_DIMS: return dw__write_list(out, graph, attr->count, attr->list, "");
    }
    return DW_OK;
}

static dw_status write_attrs(dw__text *out, const dw_graph *graph, const dw__node_record *node) {
    for (uint32_t i = 0; i < node->attr_count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s", i == 0 ? " {" : ", "));
        DW_RETURN_IF_FAILED(write_attr(out, graph, &node->attrs[i]));
    }
    return node->attr_count > 0 ? dw__text_append(out, "}", 1) : DW_OK;
}

static dw_status write_origin(dw__text *out, const dw__node_record *node) {
    bool placed = node->layer >= 0 || *node->module;
    if (!placed && !node->backward && node->region == DW_REGION_NONE) return DW_OK;
    DW_RETURN_IF_FAILED(dw__text_printf(out, "  # %s%s", node->backward ? "backward " : "",
                                        dw_region_name(node->region)));
    if (!placed) return DW_OK;
    if (node->layer >= 0)
        DW_RETURN_IF_FAILED(dw__text_printf(out, " %d", node->layer));
    else
        DW_RETURN_IF_FAILED(dw__text_append(out, " -", 2));
    if (!*node->module) return DW_OK;
    DW_RETURN_IF_FAILED(dw__text_append(out, " ", 1));
    return dw__text_append(out, node->module, strlen(node->module));
}

static dw_status write_operands(dw__text *out, const dw_graph *graph, const dw__node_record *node) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, " = %s(", dw_op_name(node->op)));
    for (uint32_t i = 0; i < node->input_count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        if (node->inputs[i] == DW_NONE)
            DW_RETURN_IF_FAILED(dw__text_append(out, "_", 1));
        else
            DW_RETURN_IF_FAILED(write_name(out, graph->values.items[node->inputs[i]].name));
    }
    return dw__text_append(out, ")", 1);
}

static dw_status write_node(dw__text *out, const dw_graph *graph, const dw__node_record *node) {
    for (uint32_t i = 0; i < node->output_count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        DW_RETURN_IF_FAILED(write_typed_name(out, graph, node->outputs[i]));
    }
    DW_RETURN_IF_FAILED(write_operands(out, graph, node));
    DW_RETURN_IF_FAILED(write_attrs(out, graph, node));
    DW_RETURN_IF_FAILED(write_origin(out, node));
    return dw__text_append(out, "\n", 1);
}

static dw_status write_symbols(dw__text *out, const dw_graph *graph) {
    uint32_t count = dw_graph_symbol_count(graph);
    for (uint32_t i = 0; i < count; i++)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s%s", i == 0 ? "symbols " : ", ",
                                            dw_graph_symbol_name(graph, i)));
    return count > 0 ? dw__text_append(out, "\n", 1) : DW_OK;
}

static dw_status write_outputs(dw__text *out, const dw_graph *graph) {
    if (graph->outputs.count == 0) return DW_OK;
    DW_RETURN_IF_FAILED(dw__text_printf(out, "\nreturn "));
    for (size_t i = 0; i < graph->outputs.count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_append(out, ", ", 2));
        DW_RETURN_IF_FAILED(write_name(out, graph->values.items[graph->outputs.items[i]].name));
    }
    return dw__text_append(out, "\n", 1);
}

static dw_status write_graph(dw__text *out, const dw_graph *graph) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, HEADER "\n"));
    DW_RETURN_IF_FAILED(write_symbols(out, graph));
    for (size_t i = 0; i < graph->leaves.count; i++) {
        dw_value leaf = graph->leaves.items[i];
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s%s ", i == 0 ? "\n" : "",
                                            dw_role_name(graph->values.items[leaf].role)));
        DW_RETURN_IF_FAILED(write_typed_name(out, graph, leaf));
        DW_RETURN_IF_FAILED(dw__text_append(out, "\n", 1));
    }
    for (size_t i = 0; i < graph->nodes.count; i++) {
        if (i == 0) DW_RETURN_IF_FAILED(dw__text_append(out, "\n", 1));
        DW_RETURN_IF_FAILED(write_node(out, graph, &graph->nodes.items[i]));
    }
    return write_outputs(out, graph);
}

dw_status dw_graph_to_text(const dw_graph *graph, char **text) {
    dw__text out = {0};
    dw_status status = write_graph(&out, graph);
    if (status != DW_OK)
        dw__text_free(&out);
    else
        *text = out.text;
    return status;
}

void dw_text_free(char *text) { dw__free(text); }

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct reader {
    dw_graph *graph;
    const char *at;
    uint32_t line;
    dw__description node; /* of the line being read; too large for stack frames */
} reader;

static dw_status malformed(const reader *in, const char *expected) {
    size_t length = strcspn(in->at, "\n");
    return dw__fail(DW_PARSE, "expected %s before \"%.*s\"", expected,
                    (int)(length > 40 ? 40 : length), in->at);
}

static void skip_spaces(reader *in) {
    while (*in->at == ' ') in->at++;
}

static bool accept(reader *in, const char *token) {
    skip_spaces(in);
    size_t length = strlen(token);
    if (strncmp(in->at, token, length) != 0) return false;
    in->at += length;
    return true;
}

static dw_status expect(reader *in, const char *token) {
    return accept(in, token) ? DW_OK : malformed(in, token);
}

static bool at_end_of_line(reader *in) {
    skip_spaces(in);
    return *in->at == '\n' || *in->at == '\0';
}

static dw_status keep(reader *in, const char *bytes, size_t length, const char **text) {
    char *copy = dw__arena_alloc(in->graph->arena, length + 1);
    if (!copy) return dw__fail_memory("a name", length + 1);
    memcpy(copy, bytes, length);
    *text = copy;
    return DW_OK;
}

static dw_status read_quoted(reader *in, const char **text) {
    DW_RETURN_IF_FAILED(expect(in, "\""));
    size_t length = 0, kept = 0;
    for (; in->at[length] != '"'; length++) {
        if (in->at[length] == '\\') length++;
        if (in->at[length] == '\0' || in->at[length] == '\n')
            return malformed(in, "text that ends with \" on the same line,");
    }
    char *copy = dw__arena_alloc(in->graph->arena, length + 1);
    if (!copy) return dw__fail_memory("quoted text", length + 1);
    for (size_t i = 0; i < length; i++) {
        if (in->at[i] == '\\') i++;
        copy[kept++] = in->at[i];
    }
    in->at += length + 1;
    *text = copy;
    return DW_OK;
}

static size_t word_length(const char *text) {
    size_t length = 0;
    while (isalnum((unsigned char)text[length]) || text[length] == '_' || text[length] == '.')
        length++;
    return length;
}

static dw_status read_word(reader *in, const char *expected, const char **word) {
    skip_spaces(in);
    size_t length = word_length(in->at);
    if (length == 0) return malformed(in, expected);
    DW_RETURN_IF_FAILED(keep(in, in->at, length, word));
    in->at += length;
    return DW_OK;
}

/* Reads %name, %"any name", or %7. The name of the last form includes the percent sign. */
static dw_status read_name(reader *in, const char **name) {
    DW_RETURN_IF_FAILED(expect(in, "%"));
    if (*in->at == '"') return read_quoted(in, name);
    size_t length = word_length(in->at);
    if (length == 0) return malformed(in, "a name");
    bool automatic = isdigit((unsigned char)*in->at);
    DW_RETURN_IF_FAILED(keep(in, in->at - automatic, length + automatic, name));
    in->at += length;
    return DW_OK;
}

static dw_status read_value(reader *in, dw_value *value) {
    const char *name = NULL;
    DW_RETURN_IF_FAILED(read_name(in, &name));
    *value = dw_graph_find(in->graph, name);
    if (*value != DW_NONE) return DW_OK;
    return dw__fail(DW_PARSE, "there is no value \"%s\" above this line", name);
}

static dw_status read_integer(reader *in, int64_t *integer) {
    skip_spaces(in);
    bool negative = accept(in, "-");
    if (!isdigit((unsigned char)*in->at)) return malformed(in, "a whole number");
    int64_t value = 0;
    for (; isdigit((unsigned char)*in->at); in->at++) {
        int digit = negative ? -(*in->at - '0') : *in->at - '0';
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, digit, &value))
            return malformed(in, "a whole number within 64 bits");
    }
    *integer = value;
    return DW_OK;
}

static dw_status read_dim(reader *in, dw_dim *dim) {
    const char *text = NULL;
    skip_spaces(in);
    size_t length = strcspn(in->at, ",]\n");
    DW_RETURN_IF_FAILED(keep(in, in->at, length, &text));
    DW_RETURN_IF_FAILED(dw__parse_known_dim(in->graph, text, dim));
    in->at += length;
    return DW_OK;
}

/* Reads [..] with at most DW_MAX_RANK entries. */
static dw_status read_list(reader *in, bool dims, int64_t *list, uint32_t *count) {
    *count = 0;
    DW_RETURN_IF_FAILED(expect(in, "["));
    if (accept(in, "]")) return DW_OK;
    do {
        if (*count == DW_MAX_RANK) return malformed(in, "] after 8 entries");
        if (dims)
            DW_RETURN_IF_FAILED(read_dim(in, &list[*count]));
        else
            DW_RETURN_IF_FAILED(read_integer(in, &list[*count]));
        (*count)++;
    } while (accept(in, ","));
    return expect(in, "]");
}

static dw_status read_dtype(reader *in, dw_dtype *dtype) {
    const char *word = NULL;
    DW_RETURN_IF_FAILED(read_word(in, "an element type", &word));
    int found = dw__dtype_find(word);
    if (found < 0)
        return dw__fail(
            DW_PARSE,
            "\"%.64s\" is not an element type; expected one of bool, i32, i64, bf16, f16, "
            "f32, f64",
            word);
    *dtype = (dw_dtype)found;
    return DW_OK;
}

static dw_status read_type(reader *in, dw_dtype *dtype, int *rank, dw_dim *shape) {
    uint32_t count;
    DW_RETURN_IF_FAILED(expect(in, ":"));
    DW_RETURN_IF_FAILED(read_dtype(in, dtype));
    DW_RETURN_IF_FAILED(read_list(in, true, shape, &count));
    *rank = (int)count;
    return DW_OK;
}

static dw_status read_attr_list(reader *in, dw_attr *attr) {
    int64_t list[DW_MAX_RANK];
    bool dims = dw_attr_kind_of(attr->key) == DW_ATTR_DIMS;
    DW_RETURN_IF_FAILED(read_list(in, dims, list, &attr->count));
    int64_t *copy = dw__arena_alloc(in->graph->arena, attr->count * sizeof *copy);
    if (!copy) return dw__fail_memory("an attribute", attr->count * sizeof *copy);
    memcpy(copy, list, attr->count * sizeof *copy);
    attr->list = copy;
    return DW_OK;
}

static dw_status read_attr_value(reader *in, dw_attr *attr) {
    dw_dtype dtype;
    const char *end;
    switch (dw_attr_kind_of(attr->key)) {
    case DW_ATTR_INT: return read_integer(in, &attr->integer);
    case DW_ATTR_FLOAT:
        skip_spaces(in);
        end = dw__number_parse(in->at, &attr->number);
        if (!end) return malformed(in, "a number");
        in->at = end;
        return DW_OK;
    case DW_ATTR_DTYPE:
        DW_RETURN_IF_FAILED(read_dtype(in, &dtype));
        attr->integer = dtype;
        return DW_OK;
    case DW_ATTR_STRING: return read_quoted(in, &attr->string);
    case DW_ATTR_INTS:
    case DW_ATTR_DIMS: return read_attr_list(in, attr);
    }
    return DW_OK;
}

static dw_status read_attrs(reader *in) {
    dw__description *node = &in->node;
    if (!accept(in, "{")) return DW_OK;
    do {
        const char *word = NULL;
        if (node->attr_count == DW_ATTR_KEY_COUNT) return malformed(in, "}");
        DW_RETURN_IF_FAILED(read_word(in, "an attribute", &word));
        int key = dw__attr_find(word);
        if (key < 0) return dw__fail(DW_PARSE, "there is no attribute \"%.64s\"", word);
        dw_attr *attr = &node->attrs[node->attr_count++];
        *attr = (dw_attr){.key = (dw_attr_key)key};
        DW_RETURN_IF_FAILED(expect(in, "="));
        DW_RETURN_IF_FAILED(read_attr_value(in, attr));
    } while (accept(in, ","));
    return expect(in, "}");
}

static dw_status read_layer(reader *in, int *layer) {
    int64_t number;
    if (accept(in, "-")) return DW_OK;
    DW_RETURN_IF_FAILED(read_integer(in, &number));
    if (number > INT32_MAX) return malformed(in, "a layer below 2^31");
    *layer = (int)number;
    return DW_OK;
}

/* Reads "# backward attn 0 h.0.attn". The module path is the rest of the line. */
static dw_status read_origin(reader *in) {
    const char *word = NULL;
    if (!accept(in, "#")) return DW_OK;
    DW_RETURN_IF_FAILED(read_word(in, "a region", &word));
    in->node.backward = strcmp(word, "backward") == 0;
    if (in->node.backward) DW_RETURN_IF_FAILED(read_word(in, "a region", &word));
    int region = dw__region_find(word);
    if (region < 0) return dw__fail(DW_PARSE, "\"%.64s\" is not a region", word);
    in->node.region = (dw_region)region;
    if (at_end_of_line(in)) return DW_OK;
    DW_RETURN_IF_FAILED(read_layer(in, &in->node.layer));
    if (*in->at != ' ') return DW_OK;
    size_t length = strcspn(++in->at, "\n");
    DW_RETURN_IF_FAILED(keep(in, in->at, length, &in->node.module));
    in->at += length;
    return DW_OK;
}

static dw_status read_results(reader *in) {
    dw__description *node = &in->node;
    do {
        uint32_t at = node->output_count;
        if (at == DW_MAX_OUTPUTS) return malformed(in, "= after 64 outputs");
        DW_RETURN_IF_FAILED(read_name(in, &node->names[at]));
        skip_spaces(in);
        node->types[at].given = *in->at == ':';
        if (node->types[at].given)
            DW_RETURN_IF_FAILED(read_type(in, &node->types[at].dtype, &node->types[at].rank,
                                          node->types[at].shape));
        node->output_count++;
    } while (accept(in, ","));
    return expect(in, "=");
}

static dw_status read_operands(reader *in) {
    dw__description *node = &in->node;
    DW_RETURN_IF_FAILED(expect(in, "("));
    if (accept(in, ")")) return DW_OK;
    do {
        if (node->input_count == DW_MAX_INPUTS) return malformed(in, ") after 64 operands");
        dw_value *input = &node->inputs[node->input_count];
        *input = DW_NONE;
        if (!accept(in, "_")) DW_RETURN_IF_FAILED(read_value(in, input));
        node->input_count++;
    } while (accept(in, ","));
    return expect(in, ")");
}

static dw_status read_node(reader *in) {
    dw__description *node = &in->node;
    const char *op = NULL;
    node->input_count = node->output_count = node->attr_count = 0;
    node->region = DW_REGION_NONE;
    node->layer = -1;
    node->module = "";
    node->backward = false;
    DW_RETURN_IF_FAILED(read_results(in));
    DW_RETURN_IF_FAILED(read_word(in, "an operation", &op));
    DW_RETURN_IF_FAILED(dw_op_find(op, &node->op));
    DW_RETURN_IF_FAILED(read_operands(in));
    DW_RETURN_IF_FAILED(read_attrs(in));
    DW_RETURN_IF_FAILED(read_origin(in));
    if (!at_end_of_line(in)) return malformed(in, "the end of the line");
    dw_status status = dw__append_described(in->graph, node);
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "node %u (%s \"%s\"%s%s)", dw_graph_node_count(in->graph), op,
                           node->names[0], *node->module ? ", module " : "", node->module);
}

static dw_status read_leaf(reader *in) {
    const char *word = NULL, *name = NULL;
    dw_dtype dtype;
    int rank;
    dw_dim shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(read_word(in, "a role, a node or return", &word));
    int role = dw__role_find(word);
    if (role < 0)
        return dw__fail(DW_PARSE,
                        "\"%.64s\" is not a leaf's role; expected input, parameter, "
                        "constant, seed, statistics or gradient",
                        word);
    DW_RETURN_IF_FAILED(read_name(in, &name));
    DW_RETURN_IF_FAILED(read_type(in, &dtype, &rank, shape));
    return dw_graph_leaf(in->graph, (dw_role)role, name, dtype, rank, shape, NULL);
}

static dw_status read_outputs(reader *in) {
    do {
        dw_value value;
        DW_RETURN_IF_FAILED(read_value(in, &value));
        DW_RETURN_IF_FAILED(dw_graph_add_output(in->graph, value));
    } while (accept(in, ","));
    return DW_OK;
}

static dw_status read_symbols(reader *in) {
    do {
        const char *word = NULL;
        dw_dim dim;
        uint32_t before = dw_graph_symbol_count(in->graph);
        DW_RETURN_IF_FAILED(read_word(in, "a symbol", &word));
        DW_RETURN_IF_FAILED(dw_graph_symbol(in->graph, word, &dim));
        if (dw_graph_symbol_count(in->graph) == before)
            return dw__fail(DW_PARSE, "the symbol %.64s is listed twice", word);
    } while (accept(in, ","));
    return DW_OK;
}

static dw_status read_line(reader *in) {
    if (at_end_of_line(in)) return DW_OK;
    if (*in->at == '#') {
        in->at += strcspn(in->at, "\n");
        return DW_OK;
    }
    if (*in->at == '%') return read_node(in);
    if (accept(in, "symbols "))
        DW_RETURN_IF_FAILED(read_symbols(in));
    else if (accept(in, "return "))
        DW_RETURN_IF_FAILED(read_outputs(in));
    else
        DW_RETURN_IF_FAILED(read_leaf(in));
    return at_end_of_line(in) ? DW_OK : malformed(in, "the end of the line");
}

static dw_status read_graph(reader *in) {
    if (!accept(in, HEADER) || !at_end_of_line(in))
        return malformed(in, "the header \"" HEADER "\"");
    while (*in->at == '\n') {
        in->at++;
        in->line++;
        DW_RETURN_IF_FAILED(read_line(in));
    }
    return DW_OK;
}

dw_status dw_graph_from_text(const char *text, dw_graph **graph) {
    dw_status status = DW_OK;
    reader *in = NULL;
    dw_graph *made = NULL;
    if (!text || !graph) return dw__fail(DW_INVALID_ARGUMENT, "the text of a graph is NULL");
    DW_TRY(dw_graph_create(&made));
    in = dw__calloc(1, sizeof *in);
    if (!in) {
        status = dw__fail_memory("a reader of graphs", sizeof *in);
        goto cleanup;
    }
    in->graph = made;
    in->at = text;
    in->line = 1;
    status = read_graph(in);
    if (status != DW_OK) {
        status = dw__fail_prefix(dw__form_status(status), "line %u", in->line);
        goto cleanup;
    }
    dw_graph_set_backward(made, 0);
    DW_TRY(dw_graph_set_origin(made, DW_REGION_NONE, -1, NULL));
    *graph = made;
    made = NULL;
cleanup:
    dw__free(in);
    dw_graph_destroy(made);
    return status;
}
