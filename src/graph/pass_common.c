/* Common subexpressions: drops a node that repeats an earlier one (same operation, operands and attributes).
 * Forward nodes precede backward ones, so a value that both compute is computed forward. A random operation
 * is a function of seed, stream and shape, so equal nodes have equal results.
 *
 * Results in BF16 and F16 are not merged until the gradient has been taken. The gradients of two values are
 * added after the operations that computed them; the gradients of one value are added before, and their sum
 * is rounded to the 16-bit dtype. Merging would therefore change the bits. */
#include "graph/passes.h"
#include <string.h>

/* Hash set with open addressing: slot = node of the new graph + 1, 0 if free. */
typedef struct node_set {
    uint32_t *slots;
    size_t mask;
    bool differentiated; /* the graph has backward nodes */
} node_set;

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

static uint64_t bits_of(double number) {
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static uint64_t hash_attr(uint64_t hash, const dw_attr *attr) {
    hash = mix(mix(hash, attr->key), (uint64_t)attr->integer);
    hash = mix(hash, bits_of(attr->number));
    for (uint32_t i = 0; i < attr->count; i++) hash = mix(hash, (uint64_t)attr->list[i]);
    for (const char *c = attr->string; c && *c; c++) hash = mix(hash, (unsigned char)*c);
    return hash;
}

static uint64_t hash_node(const dw__node_record *node) {
    uint64_t hash = mix(0, node->op);
    for (uint32_t i = 0; i < node->input_count; i++) hash = mix(hash, node->inputs[i]);
    for (uint32_t i = 0; i < node->attr_count; i++) hash = hash_attr(hash, &node->attrs[i]);
    return hash;
}

static bool attr_equal(const dw_attr *a, const dw_attr *b) {
    if (a->key != b->key || a->integer != b->integer || a->count != b->count) return false;
    /* compares bits: 0 and -0 differ, a NaN equals itself */
    if (bits_of(a->number) != bits_of(b->number)) return false;
    if ((a->string == NULL) != (b->string == NULL)) return false;
    if (a->string && strcmp(a->string, b->string) != 0) return false;
    return a->count == 0 || memcmp(a->list, b->list, a->count * sizeof *a->list) == 0;
}

static bool node_equal(const dw__node_record *a, const dw__node_record *b) {
    if (a->op != b->op || a->input_count != b->input_count || a->attr_count != b->attr_count ||
        a->output_count != b->output_count)
        return false;
    if (a->input_count && memcmp(a->inputs, b->inputs, a->input_count * sizeof *a->inputs) != 0)
        return false;
    for (uint32_t i = 0; i < a->attr_count; i++)
        if (!attr_equal(&a->attrs[i], &b->attrs[i])) return false;
    return true;
}

static dw_status set_open(node_set *set, size_t nodes) {
    size_t size = 16;
    while (size < 2 * nodes) size *= 2;
    set->mask = size - 1;
    set->differentiated = false;
    set->slots = dw__calloc(size, sizeof *set->slots);
    return set->slots ? DW_OK : dw__fail_memory("the set of nodes", size * sizeof *set->slots);
}

/* Returns the node that equals `node`. Adds `node` if there is none. */
static dw_node set_find(node_set *set, const dw_graph *graph, dw_node node) {
    const dw__node_record *record = &graph->nodes.items[node];
    size_t slot = hash_node(record) & set->mask;
    for (; set->slots[slot]; slot = (slot + 1) & set->mask)
        if (node_equal(&graph->nodes.items[set->slots[slot] - 1], record))
            return set->slots[slot] - 1;
    set->slots[slot] = node + 1;
    return node;
}

static bool stays_apart(const node_set *set, const dw_graph *graph, dw_node node) {
    dw_dtype dtype = dw_value_dtype(graph, dw_node_output(graph, node, 0));
    return !set->differentiated && (dtype == DW_BF16 || dtype == DW_F16);
}

/* A forward node may only reuse a forward one, because backward results do not exist yet when it runs. */
static dw_status merge_node(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    node_set *set = rewrite->context;
    const dw_graph *graph = rewrite->graph;
    if (stays_apart(set, graph, node)) return DW_OK;
    dw_node same = set_find(set, graph, node);
    const dw__node_record *record = &graph->nodes.items[same];
    if (same == node || (record->backward && !graph->nodes.items[node].backward)) return DW_OK;
    for (uint32_t i = 0; i < record->output_count; i++) replacements[i] = record->outputs[i];
    return DW_OK;
}

dw_status dw__pass_common(dw_graph **graph) {
    node_set set;
    DW_RETURN_IF_FAILED(set_open(&set, (*graph)->nodes.count));
    for (dw_node n = 0; n < (*graph)->nodes.count; n++)
        set.differentiated |= (*graph)->nodes.items[n].backward;
    dw_status status = dw__rewrite_each(graph, merge_node, &set);
    dw__free(set.slots);
    return status;
}
