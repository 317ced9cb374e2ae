/* Parses a case from its text, and makes its graph. */
#include "ops_case.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    ops_fill fill;
} fills[] = {
    {"positive", OPS_FILL_POSITIVE}, {"unit", OPS_FILL_UNIT},       {"masked", OPS_FILL_MASKED},
    {"mask", OPS_FILL_MASK},         {"index", OPS_FILL_INDEX},     {"target", OPS_FILL_TARGET},
    {"ignored", OPS_FILL_IGNORED},   {"outside", OPS_FILL_OUTSIDE}, {"nonzero", OPS_FILL_NONZERO},
    {"count", OPS_FILL_COUNT},       {"seed", OPS_FILL_SEED},       {"offsets", OPS_FILL_OFFSETS},
    {"places", OPS_FILL_PLACES},
};

static dw_status malformed(const char *token, const char *expected) {
    return dw__fail(DW_PARSE, "case: \"%s\" is not %s", token, expected);
}

static bool dtype_by_name(const char *name, size_t length, dw_dtype *dtype) {
    for (int i = 0; i < DW_DTYPE_COUNT; i++) {
        const char *known = dw_dtype_name((dw_dtype)i);
        if (strlen(known) != length || strncmp(known, name, length) != 0) continue;
        *dtype = (dw_dtype)i;
        return true;
    }
    return false;
}

/* Parses "[2,3]" at *text and moves *text past it. */
static dw_status parse_list(const char **text, int64_t list[DW_MAX_RANK], uint32_t *count) {
    const char *at = *text;
    *count = 0;
    if (*at++ != '[') return malformed(*text, "a list such as [2,3]");
    while (*at != ']') {
        char *end;
        if (*count == DW_MAX_RANK) return malformed(*text, "a list of at most 8 numbers");
        list[(*count)++] = strtoll(at, &end, 10);
        if (end == at || (*end != ',' && *end != ']'))
            return malformed(*text, "a list such as [2,3]");
        at = *end == ',' ? end + 1 : end;
    }
    *text = at + 1;
    return DW_OK;
}

static dw_status parse_operand(const char *token, ops_operand *out) {
    const char *at = token + strcspn(token, "[");
    uint32_t rank;
    if (strcmp(token, "-") == 0) {
        out->absent = true;
        return DW_OK;
    }
    if (!dtype_by_name(token, (size_t)(at - token), &out->dtype))
        return malformed(token, "an operand such as f32[2,3]");
    DW_RETURN_IF_FAILED(parse_list(&at, out->shape, &rank));
    out->rank = (int)rank;
    if (*at == '\0') return DW_OK;
    for (size_t i = 0; i < DW_COUNT(fills) && *at == ':'; i++) {
        size_t length = strlen(fills[i].name);
        if (strncmp(at + 1, fills[i].name, length) != 0) continue;
        out->fill = fills[i].fill;
        out->bound = strtoll(at + 1 + length, NULL, 10);
        return DW_OK;
    }
    return malformed(token, "an operand whose fill is known");
}

static bool attr_by_name(const char *name, size_t length, dw_attr_key *key) {
    for (int i = 0; i < DW_ATTR_KEY_COUNT; i++) {
        const char *known = dw_attr_name((dw_attr_key)i);
        if (strlen(known) != length || strncmp(known, name, length) != 0) continue;
        *key = (dw_attr_key)i;
        return true;
    }
    return false;
}

static dw_status parse_attr(const char *token, ops_case *c) {
    const char *value = strchr(token, '=') + 1;
    dw_attr_key key;
    dw_dtype dtype;
    uint32_t slot = c->attr_count;
    if (slot == OPS_MAX_ATTRS) return malformed(token, "expected: too many attributes");
    if (!attr_by_name(token, (size_t)(value - 1 - token), &key))
        return malformed(token, "a known attribute");
    dw_attr *attr = &c->attrs[slot];
    *attr = dw_attr_int(key, 0);
    switch (dw_attr_kind_of(key)) {
    case DW_ATTR_INT: attr->integer = strtoll(value, NULL, 10); break;
    case DW_ATTR_FLOAT: attr->number = strtod(value, NULL); break;
    case DW_ATTR_DTYPE:
        if (!dtype_by_name(value, strlen(value), &dtype)) return malformed(value, "a dtype");
        attr->integer = dtype;
        break;
    case DW_ATTR_STRING:
        if (strlen(value) >= OPS_STRING_BYTES) return malformed(value, "a short string");
        memcpy(c->strings[slot], value, strlen(value) + 1);
        attr->string = c->strings[slot];
        break;
    case DW_ATTR_INTS:
    case DW_ATTR_DIMS:
        attr->list = c->lists[slot];
        DW_RETURN_IF_FAILED(parse_list(&value, c->lists[slot], &attr->count));
        break;
    }
    c->attr_count++;
    return DW_OK;
}

static dw_status parse_token(const char *token, bool first, ops_case *c) {
    if (first) return dw_op_find(token, &c->op);
    if (strchr(token, '=')) return parse_attr(token, c);
    if (c->input_count == OPS_MAX_INPUTS) return malformed(token, "expected: too many operands");
    return parse_operand(token, &c->inputs[c->input_count++]);
}

dw_status ops_case_parse(const char *text, ops_case *out) {
    char token[OPS_TEXT_BYTES];
    bool first = true;
    memset(out, 0, sizeof *out);
    if (strlen(text) >= OPS_TEXT_BYTES) return malformed(text, "a short line");
    memcpy(out->text, text, strlen(text) + 1);
    out->must_fail = *text == '!';
    if (out->must_fail) text++;
    for (;;) {
        text += strspn(text, " ");
        size_t length = strcspn(text, " ");
        if (length == 0) break;
        memcpy(token, text, length);
        token[length] = '\0';
        DW_RETURN_IF_FAILED(parse_token(token, first, out));
        first = false;
        text += length;
    }
    return first ? malformed(text, "a case") : DW_OK;
}

dw_status ops_case_graph(const ops_case *c, dw_graph **out) {
    dw_graph *graph = NULL;
    dw_value inputs[OPS_MAX_INPUTS];
    dw_node node;
    dw_status status = DW_OK;
    DW_TRY(dw_graph_create(&graph));
    for (uint32_t i = 0; i < c->input_count; i++) {
        const ops_operand *in = &c->inputs[i];
        char name[] = {'x', (char)('a' + i), '\0'};
        dw_role role = in->fill == OPS_FILL_SEED ? DW_ROLE_SEED : DW_ROLE_INPUT;
        inputs[i] = DW_NONE;
        if (!in->absent)
            DW_TRY(dw_graph_leaf(graph, role, name, in->dtype, in->rank, in->shape, &inputs[i]));
    }
    DW_TRY(dw_graph_append(graph, c->op, c->input_count, inputs, c->attr_count, c->attrs, &node));
    for (uint32_t i = 0; i < dw_node_output_count(graph, node); i++)
        DW_TRY(dw_graph_add_output(graph, dw_node_output(graph, node, i)));
    *out = graph;
    graph = NULL;
cleanup:
    dw_graph_destroy(graph);
    return status;
}

static int64_t case_int(const ops_case *c, dw_attr_key key, int64_t absent) {
    for (uint32_t i = 0; i < c->attr_count; i++)
        if (c->attrs[i].key == key) return c->attrs[i].integer;
    return absent;
}

static int64_t operand_count(const ops_operand *operand) {
    int64_t count = 1;
    for (int axis = 0; axis < operand->rank; axis++) count *= operand->shape[axis];
    return count;
}

double ops_case_length(const ops_case *c) {
    const ops_operand *x = &c->inputs[0];
    int64_t last = c->input_count && x->rank ? x->shape[x->rank - 1] : 1, length = 1;
    switch (c->op) {
    case DW_OP_MATMUL:
        length = x->shape[x->rank - (case_int(c, DW_ATTR_KEY_TRANSPOSE_A, 0) ? 2 : 1)];
        break;
    case DW_OP_LINEAR:
    case DW_OP_QUANTIZED_LINEAR:
    case DW_OP_GROUPED_LINEAR:
    case DW_OP_SEGMENT_LINEAR:
    case DW_OP_QUANTIZED_SEGMENT_LINEAR:
    case DW_OP_RMS_NORM:
    case DW_OP_LAYER_NORM: length = last; break;
    case DW_OP_SOFTMAX:
    case DW_OP_LOG_SOFTMAX:
    case DW_OP_SOFTMAX_BACKWARD:
    case DW_OP_LOG_SOFTMAX_BACKWARD:
    case DW_OP_CUMSUM: length = x->shape[case_int(c, DW_ATTR_KEY_AXIS, 0)]; break;
    case DW_OP_ATTENTION:
    /* Terms of a score, which sums over D, and of sums over keys, or over the queries of a group. */
    case DW_OP_ATTENTION_BACKWARD:
        length = last + c->inputs[1].shape[2] + x->shape[2] * (x->shape[1] / c->inputs[1].shape[1]);
        break;
    /* The case in which one group has all rows. */
    case DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT: length = x->shape[0]; break;
    case DW_OP_COMBINE_ROWS: length = c->inputs[1].shape[1]; break;
    case DW_OP_COMBINE_ROWS_BACKWARD: length = last; break;
    case DW_OP_QUANTIZATION_ERROR:
    case DW_OP_MEAN:
    case DW_OP_REDUCE_SUM:
    case DW_OP_REDUCE_PROD:
    case DW_OP_CROSS_ENTROPY:
    case DW_OP_CROSS_ENTROPY_BACKWARD:
    case DW_OP_LAYER_NORM_BACKWARD:
    case DW_OP_RMS_NORM_BACKWARD: length = operand_count(x); break;
    case DW_OP_LINEAR_CROSS_ENTROPY:
    case DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD:
        length = operand_count(x) + operand_count(&c->inputs[1]);
        break;
    case DW_OP_EMBEDDING_BACKWARD:
    case DW_OP_SCATTER_ADD:
    /* The case in which all indices are equal. */
    case DW_OP_PUT_ALONG_ADD: length = operand_count(x); break;
    default: break;
    }
    return length > 1 ? (double)length : 1.0;
}
