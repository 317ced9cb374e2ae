/* Attributes of nodes, and the names of the graph's small enumerations. */
#include "graph/internal.h"
#include <string.h>

/* ---- names --------------------------------------------------------------------------------- */

static const char *const role_names[DW_ROLE_COUNT] = {
    [DW_ROLE_INPUT] = "input",           [DW_ROLE_PARAMETER] = "parameter",
    [DW_ROLE_CONSTANT] = "constant",     [DW_ROLE_SEED] = "seed",
    [DW_ROLE_GRADIENT] = "gradient",     [DW_ROLE_ACTIVATION] = "activation",
    [DW_ROLE_STATISTICS] = "statistics",
};

static const char *const region_names[DW_REGION_COUNT] = {
    [DW_REGION_NONE] = "none",       [DW_REGION_EMBED] = "embed", [DW_REGION_ATTN] = "attn",
    [DW_REGION_MLP] = "mlp",         [DW_REGION_NORM] = "norm",   [DW_REGION_ROUTER] = "router",
    [DW_REGION_EXPERTS] = "experts", [DW_REGION_HEAD] = "head",   [DW_REGION_LOSS] = "loss",
};

static const struct {
    const char *name;
    dw_attr_kind kind;
} keys[DW_ATTR_KEY_COUNT] = {
#define ROW(key, text, kind_of_key) [DW_ATTR_KEY_##key] = {text, DW_ATTR_##kind_of_key},
    DW_ATTR_MAP(ROW)
#undef ROW
};

const char *dw_role_name(dw_role role) {
    return (unsigned)role < DW_ROLE_COUNT ? role_names[role] : "?";
}

const char *dw_region_name(dw_region region) {
    return (unsigned)region < DW_REGION_COUNT ? region_names[region] : "?";
}

const char *dw_attr_name(dw_attr_key key) {
    return (unsigned)key < DW_ATTR_KEY_COUNT ? keys[key].name : "?";
}

dw_attr_kind dw_attr_kind_of(dw_attr_key key) {
    return (unsigned)key < DW_ATTR_KEY_COUNT ? keys[key].kind : DW_ATTR_INT;
}

int dw__role_find(const char *name) {
    for (int i = 0; i < DW_ROLE_COUNT; i++)
        if (strcmp(name, role_names[i]) == 0) return i;
    return -1;
}

int dw__region_find(const char *name) {
    for (int i = 0; i < DW_REGION_COUNT; i++)
        if (strcmp(name, region_names[i]) == 0) return i;
    return -1;
}

int dw__attr_find(const char *name) {
    for (int i = 0; i < DW_ATTR_KEY_COUNT; i++)
        if (strcmp(name, keys[i].name) == 0) return i;
    return -1;
}

/* ---- checks -------------------------------------------------------------------------------- */

static dw_status check_list(const dw_graph *graph, const char *op, const dw_attr *attr) {
    const char *name = dw_attr_name(attr->key);
    if (attr->count > DW_MAX_RANK)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: %s has %u entries; expected at most %d", op, name,
                        attr->count, DW_MAX_RANK);
    if (attr->count > 0 && !attr->list)
        return dw__fail(DW_INVALID_ARGUMENT, "%s: the list %s is NULL", op, name);
    for (uint32_t i = 0; dw_attr_kind_of(attr->key) == DW_ATTR_DIMS && i < attr->count; i++) {
        if (!dw__dim_exists(graph, attr->list[i]))
            return dw__fail(DW_INVALID_ARGUMENT, "%s: %s[%u] is a dim of another graph", op, name,
                            i);
        if (dw__dim_is_negative(graph, attr->list[i]))
            return dw__fail(DW_SHAPE, "%s: %s[%u] is %s; expected a dim of 0 or more", op, name, i,
                            dw__dim_words(graph, attr->list[i]).text);
    }
    return DW_OK;
}

static dw_status check_value(const dw_graph *graph, const char *op, const dw_attr *attr) {
    const char *name = dw_attr_name(attr->key);
    switch (dw_attr_kind_of(attr->key)) {
    case DW_ATTR_INTS:
    case DW_ATTR_DIMS: return check_list(graph, op, attr);
    case DW_ATTR_STRING:
        if (attr->string) return DW_OK;
        return dw__fail(DW_INVALID_ARGUMENT, "%s: the string %s is NULL", op, name);
    case DW_ATTR_DTYPE:
        if (attr->integer >= 0 && attr->integer < DW_DTYPE_COUNT) return DW_OK;
        return dw__fail(DW_INVALID_ARGUMENT, "%s: %s is %lld, which is not an element type", op,
                        name, (long long)attr->integer);
    case DW_ATTR_INT:
    case DW_ATTR_FLOAT: break;
    }
    return DW_OK;
}

/* Returns the attribute with only the fields that its kind uses, so that records compare field by field. */
static dw_attr canonical(const dw_attr *attr) {
    dw_attr kept = {.key = attr->key};
    switch (dw_attr_kind_of(attr->key)) {
    case DW_ATTR_INT:
    case DW_ATTR_DTYPE: kept.integer = attr->integer; break;
    case DW_ATTR_FLOAT: kept.number = attr->number; break;
    case DW_ATTR_STRING: kept.string = attr->string; break;
    case DW_ATTR_INTS:
    case DW_ATTR_DIMS:
        kept.count = attr->count;
        kept.list = attr->list;
        break;
    }
    return kept;
}

dw_status dw__sort_attrs(const dw_graph *graph, dw_op op, uint32_t attr_count, const dw_attr *attrs,
                         dw_attr *sorted) {
    const char *op_name = dw_op_name(op);
    uint64_t seen = 0;
    for (uint32_t i = 0; i < attr_count; i++) {
        if ((unsigned)attrs[i].key >= DW_ATTR_KEY_COUNT)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "%s: attribute %u has key %d, which does not exist", op_name, i,
                            (int)attrs[i].key);
        uint64_t bit = UINT64_C(1) << attrs[i].key;
        if (seen & bit)
            return dw__fail(DW_INVALID_ARGUMENT, "%s: attribute %s is given twice", op_name,
                            dw_attr_name(attrs[i].key));
        seen |= bit;
        DW_RETURN_IF_FAILED(check_value(graph, op_name, &attrs[i]));
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1].key > attrs[i].key; at--) sorted[at] = sorted[at - 1];
        sorted[at] = canonical(&attrs[i]);
    }
    return DW_OK;
}

/* ---- look-up ------------------------------------------------------------------------------- */

const dw_attr *dw__find_attr(uint32_t attr_count, const dw_attr *attrs, dw_attr_key key) {
    for (uint32_t i = 0; i < attr_count; i++)
        if (attrs[i].key == key) return &attrs[i];
    return NULL;
}

const dw_attr *dw_node_attr(const dw_graph *graph, dw_node node, dw_attr_key key) {
    if (node >= graph->nodes.count) return NULL;
    const dw__node_record *record = &graph->nodes.items[node];
    return dw__find_attr(record->attr_count, record->attrs, key);
}

int64_t dw_node_int(const dw_graph *graph, dw_node node, dw_attr_key key, int64_t absent) {
    const dw_attr *attr = dw_node_attr(graph, node, key);
    return attr ? attr->integer : absent;
}

double dw_node_float(const dw_graph *graph, dw_node node, dw_attr_key key, double absent) {
    const dw_attr *attr = dw_node_attr(graph, node, key);
    return attr ? attr->number : absent;
}
