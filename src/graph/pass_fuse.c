/* Elementwise fusion: chooses the nodes that run together.
 *
 * Greedily, in topological order, the pass first joins nodes of one shape and one direction (forward or
 * backward) that feed each other into units, and then nearby units that read the same full-shape value. Two
 * units may join only if no path leads from one to the other through a third unit; otherwise the joint unit
 * would wait for itself. Each node stays in exactly one unit, so nothing is computed twice. */
#include "graph/pass_fuse.h"
#include <string.h>

#define SEARCH_LIMIT 4096   /* units that a search visits before it assumes a path */
#define SIBLING_DISTANCE 16 /* in nodes; joining distant units would keep values alive for long */

bool dw__fuse_is_elementwise(const dw_graph *graph, dw_node node) {
    const dw__node_record *record = &graph->nodes.items[node];
    if (!dw__op_table[record->op].elementwise || record->output_count != 1) return false;
    if (record->op != DW_OP_DROPOUT) return true;
    /* the body stores the stream as a double */
    return dw_node_int(graph, node, DW_ATTR_KEY_STREAM, 0) <= INT64_C(1) << 53;
}

/* ---- units ---------------------------------------------------------------------------------- */

static dw_status units_open(dw__units *u, const dw_graph *graph) {
    size_t count = graph->nodes.count;
    *u = (dw__units){.graph = graph};
    uint32_t **arrays[] = {&u->unit_of, &u->next, &u->first, &u->last,
                           &u->size,    &u->seen, &u->stack};
    for (size_t i = 0; i < DW_COUNT(arrays); i++) {
        *arrays[i] = dw__calloc(count, sizeof **arrays[i]);
        if (!*arrays[i]) return dw__fail_memory("fusion", count * sizeof **arrays[i]);
    }
    u->wanted = dw__calloc(graph->values.count, sizeof *u->wanted);
    u->sums = dw__calloc(count, sizeof *u->sums);
    if (!u->wanted || !u->sums) return dw__fail_memory("fusion", graph->values.count + count);
    for (uint32_t n = 0; n < count; n++) {
        u->unit_of[n] = u->first[n] = u->last[n] = n;
        u->next[n] = DW_NONE;
        u->size[n] = 1;
    }
    return DW_OK;
}

static void units_close(dw__units *u) {
    dw__free(u->unit_of);
    dw__free(u->next);
    dw__free(u->first);
    dw__free(u->last);
    dw__free(u->size);
    dw__free(u->seen);
    dw__free(u->stack);
    dw__free(u->wanted);
    dw__free(u->sums);
}

static uint32_t producer_unit(const dw__units *u, dw_value value) {
    if (value == DW_NONE) return DW_NONE;
    dw_node node = u->graph->values.items[value].node;
    return node == DW_NONE ? DW_NONE : u->unit_of[node];
}

/* Pushes the units that make operands of `unit` and have not been seen. Returns the new stack height. */
static uint32_t push_producers(dw__units *u, uint32_t unit, uint32_t height, dw_node floor) {
    for (dw_node n = u->first[unit]; n != DW_NONE; n = u->next[n]) {
        const dw__node_record *node = &u->graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++) {
            uint32_t from = producer_unit(u, node->inputs[i]);
            if (from == DW_NONE || u->seen[from] == u->stamp || u->last[from] < floor) continue;
            u->seen[from] = u->stamp;
            u->stack[height++] = from;
        }
    }
    return height;
}

/* True if some path from `from` to `to` passes through another unit, or if the search exceeds its limit. A
 * unit that ends before `from` begins cannot be on such a path. */
static bool path_outside(dw__units *u, uint32_t from, uint32_t to) {
    dw_node floor = u->first[from];
    u->stamp++;
    u->seen[to] = u->seen[from] = u->stamp;
    uint32_t height = push_producers(u, to, 0, floor), passed = 0;
    while (height > 0) {
        uint32_t unit = u->stack[--height];
        if (++passed > SEARCH_LIMIT) return true;
        for (dw_node n = u->first[unit]; n != DW_NONE; n = u->next[n]) {
            const dw__node_record *node = &u->graph->nodes.items[n];
            for (uint32_t i = 0; i < node->input_count; i++)
                if (producer_unit(u, node->inputs[i]) == from) return true;
        }
        height = push_producers(u, unit, height, floor);
    }
    return false;
}

/* Counts the distinct operands that both units together read from outside. Returns DW_MAX_INPUTS + 1 if there
 * are more than DW_MAX_INPUTS. */
static uint32_t joint_inputs(const dw__units *u, uint32_t a, uint32_t b) {
    dw_value inputs[DW_MAX_INPUTS + 1];
    uint32_t count = 0, both[] = {a, b};
    for (int side = 0; side < 2; side++)
        for (dw_node n = u->first[both[side]]; n != DW_NONE; n = u->next[n]) {
            const dw__node_record *node = &u->graph->nodes.items[n];
            for (uint32_t i = 0; i < node->input_count; i++) {
                dw_value x = node->inputs[i];
                uint32_t from = producer_unit(u, x), known = 0;
                if (from != DW_NONE && (from == a || from == b)) continue;
                while (known < count && inputs[known] != x) known++;
                if (known < count) continue;
                if (count == DW_MAX_INPUTS) return count + 1;
                inputs[count++] = x;
            }
        }
    return count;
}

static bool compatible(const dw__units *u, uint32_t a, uint32_t b) {
    const dw_graph *graph = u->graph;
    const dw__node_record *x = &graph->nodes.items[u->first[a]];
    const dw__node_record *y = &graph->nodes.items[u->first[b]];
    if (!dw__fuse_is_elementwise(graph, u->first[a]) ||
        !dw__fuse_is_elementwise(graph, u->first[b]) || x->backward != y->backward ||
        u->size[a] + u->size[b] > DW__FUSE_MAX_MEMBERS ||
        (u->sums[u->last[a]] && u->sums[u->last[b]] && u->size[a] == 1 && u->size[b] == 1))
        return false;
    dw__type p = dw__type_of(graph, x->outputs[0]), q = dw__type_of(graph, y->outputs[0]);
    return dw__shape_equal(&p, &q) && joint_inputs(u, a, b) <= DW_MAX_INPUTS;
}

/* Moves the members of `b` to `a`, in order. */
static void join(dw__units *u, uint32_t a, uint32_t b) {
    dw_node x = u->first[a], y = u->first[b], tail = DW_NONE;
    for (dw_node n = y; n != DW_NONE; n = u->next[n]) u->unit_of[n] = a;
    u->first[a] = x < y ? x : y;
    u->last[a] = u->last[a] > u->last[b] ? u->last[a] : u->last[b];
    u->size[a] += u->size[b];
    while (x != DW_NONE || y != DW_NONE) {
        bool take_x = y == DW_NONE || (x != DW_NONE && x < y);
        dw_node taken = take_x ? x : y;
        if (take_x)
            x = u->next[x];
        else
            y = u->next[y];
        if (tail != DW_NONE) u->next[tail] = taken;
        tail = taken;
    }
    u->next[tail] = DW_NONE;
}

static void try_join(dw__units *u, uint32_t a, uint32_t b) {
    if (a == b || a == DW_NONE || b == DW_NONE || !compatible(u, a, b)) return;
    if (path_outside(u, a, b) || path_outside(u, b, a)) return;
    join(u, a, b);
}

/* Marks the additions whose operands are read by nothing else and are products of matrices or other marked additions:
 * the gradient of what several linear layers read. Engines let the products add to each other. */
static dw_status find_sums(dw__units *u) {
    const dw_graph *graph = u->graph;
    uint32_t *uses = dw__calloc(graph->values.count, sizeof *uses);
    if (!uses) return dw__fail_memory("fusion", graph->values.count * sizeof *uses);
    for (size_t i = 0; i < graph->outputs.count; i++) uses[graph->outputs.items[i]]++;
    for (dw_node n = 0; n < graph->nodes.count; n++)
        for (uint32_t i = 0; i < graph->nodes.items[n].input_count; i++)
            if (graph->nodes.items[n].inputs[i] != DW_NONE) uses[graph->nodes.items[n].inputs[i]]++;
    for (dw_node n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        u->sums[n] = node->op == DW_OP_ADD;
        for (uint32_t i = 0; u->sums[n] && i < node->input_count; i++) {
            dw_value operand = node->inputs[i];
            dw_node from = graph->values.items[operand].node;
            u->sums[n] = uses[operand] == 1 && from != DW_NONE;
            if (!u->sums[n] || u->sums[from]) continue;
            if (graph->nodes.items[from].op == DW_OP_RESHAPE)
                from = graph->values.items[graph->nodes.items[from].inputs[0]].node;
            u->sums[n] = from != DW_NONE && (graph->nodes.items[from].op == DW_OP_LINEAR ||
                                             graph->nodes.items[from].op == DW_OP_MATMUL);
        }
    }
    dw__free(uses);
    return DW_OK;
}

/* ---- choice of units to join ---------------------------------------------------------------- */

static void join_producers(dw__units *u, dw_node n) {
    const dw__node_record *node = &u->graph->nodes.items[n];
    if (!dw__fuse_is_elementwise(u->graph, n)) return;
    for (uint32_t i = 0; i < node->input_count; i++)
        try_join(u, producer_unit(u, node->inputs[i]), u->unit_of[n]);
}

/* `reader[value]` is the last elementwise node seen that reads the value. */
static void join_siblings(dw__units *u, dw_node n, dw_node *reader) {
    const dw__node_record *node = &u->graph->nodes.items[n];
    if (!dw__fuse_is_elementwise(u->graph, n)) return;
    for (uint32_t i = 0; i < node->input_count; i++) {
        dw_value x = node->inputs[i];
        dw_node other = reader[x];
        reader[x] = n;
        double number;
        if (other == DW_NONE || dw__is_splat(u->graph, x, &number) ||
            dw__made_by(u->graph, x, DW_OP_BROADCAST) != DW_NONE)
            continue;
        uint32_t a = u->unit_of[other], b = u->unit_of[n];
        dw_node low = u->first[a] < u->first[b] ? u->first[a] : u->first[b];
        dw_node high = u->last[a] > u->last[b] ? u->last[a] : u->last[b];
        if (high - low <= SIBLING_DISTANCE) try_join(u, a, b);
    }
}

static void mark_wanted(dw__units *u) {
    const dw_graph *graph = u->graph;
    for (size_t i = 0; i < graph->outputs.count; i++) u->wanted[graph->outputs.items[i]] = true;
    for (dw_node n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++)
            if (producer_unit(u, node->inputs[i]) != u->unit_of[n] && node->inputs[i] != DW_NONE)
                u->wanted[node->inputs[i]] = true;
    }
}

static dw_status form_units(dw__units *u) {
    const dw_graph *graph = u->graph;
    DW_RETURN_IF_FAILED(find_sums(u));
    for (dw_node n = 0; n < graph->nodes.count; n++) join_producers(u, n);
    dw_node *reader = dw__malloc(graph->values.count * sizeof *reader);
    if (!reader) return dw__fail_memory("fusion", graph->values.count * sizeof *reader);
    for (size_t i = 0; i < graph->values.count; i++) reader[i] = DW_NONE;
    for (dw_node n = 0; n < graph->nodes.count; n++) join_siblings(u, n, reader);
    dw__free(reader);
    mark_wanted(u);
    return DW_OK;
}

/* ---- the new graph -------------------------------------------------------------------------- */

/* While emitting, `seen` holds the state of each unit. */
enum { WAITING, STACKED, MADE };

/* Returns a unit that makes an operand of `unit` and is not emitted yet, or DW_NONE. */
static uint32_t missing_producer(const dw__units *u, uint32_t unit) {
    for (dw_node n = u->first[unit]; n != DW_NONE; n = u->next[n]) {
        const dw__node_record *node = &u->graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++) {
            uint32_t from = producer_unit(u, node->inputs[i]);
            if (from != DW_NONE && from != unit && u->seen[from] != MADE) return from;
        }
    }
    return DW_NONE;
}

/* Emits `unit` after all units that it needs. */
static dw_status emit_unit(dw__rewriter *rewriter, dw__units *u, uint32_t unit) {
    uint32_t height = 0;
    u->stack[height++] = unit;
    u->seen[unit] = STACKED;
    while (height > 0) {
        uint32_t top = u->stack[height - 1], missing = missing_producer(u, top);
        if (missing != DW_NONE) {
            if (u->seen[missing] == STACKED)
                return dw__fail(DW_INTERNAL,
                                "the units of nodes %u and %u depend on each other: please report "
                                "this with the graph",
                                u->first[top], u->first[missing]);
            u->seen[missing] = STACKED;
            u->stack[height++] = missing;
            continue;
        }
        if (dw__fuse_is_elementwise(u->graph, u->first[top]))
            DW_RETURN_IF_FAILED(dw__fuse_emit(rewriter, u, top));
        else
            DW_RETURN_IF_FAILED(dw__rewriter_copy(rewriter, u->first[top]));
        u->seen[top] = MADE;
        height--;
    }
    return DW_OK;
}

/* Emits each unit at its last member's position, or earlier if another unit needs its results. */
static dw_status emit_units(dw__rewriter *rewriter, dw__units *u) {
    size_t count = u->graph->nodes.count;
    memset(u->seen, 0, count * sizeof *u->seen);
    for (dw_node n = 0; n < count; n++) {
        uint32_t unit = u->unit_of[n];
        if (u->last[unit] == n && u->seen[unit] != MADE)
            DW_RETURN_IF_FAILED(emit_unit(rewriter, u, unit));
    }
    return DW_OK;
}

static dw_status fuse(const dw_graph *from, dw_graph **made) {
    dw_status status = DW_OK;
    dw__rewriter rewriter;
    dw__units units = {0};
    DW_RETURN_IF_FAILED(dw__rewriter_begin(&rewriter, from));
    DW_TRY(units_open(&units, from));
    DW_TRY(form_units(&units));
    DW_TRY(emit_units(&rewriter, &units));
    DW_TRY(dw__rewriter_end(&rewriter, made));
cleanup:
    units_close(&units);
    dw__rewriter_abort(&rewriter);
    return status;
}

/* stop_gradient has no effect after the gradients have been taken. */
static dw_status drop_stop_gradient(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    const dw__node_record *record = &rewrite->graph->nodes.items[node];
    if (record->op == DW_OP_STOP_GRADIENT) replacements[0] = record->inputs[0];
    return DW_OK;
}

dw_status dw__pass_fuse(dw_graph **graph) {
    dw_status status = DW_OK;
    dw_graph *work = NULL, *made = NULL;
    DW_TRY(dw_graph_clone(*graph, &work));
    DW_TRY(dw__rewrite_each(&work, drop_stop_gradient, NULL));
    DW_TRY(fuse(work, &made));
    /* drops broadcasts and constants that only fused nodes read */
    DW_TRY(dw__pass_dead_code(&made));
    dw__replace_graph(graph, &made);
cleanup:
    dw_graph_destroy(work);
    dw_graph_destroy(made);
    return status;
}
