/* Which forward values backward finds saved, which it computes again, and in which order it runs.
 *
 * Recomputation. A forward value that backward reads is saved, or computed again from values that
 * are. Matrix products and attention are never repeated; elementwise results, norms, gathers and
 * copies are cheap. The choice with the fewest saved bytes is a minimum cut: each value is an edge
 * whose capacity is its size, the results of expensive nodes hang on the source, the values that
 * backward reads on the sink (the formulation of Chen et al. 2016, "Training deep nets with
 * sublinear memory cost", as a cut). Of equal cuts the one nearest to backward is taken: it repeats
 * least. Leaves and outputs belong to the caller and cost nothing; views cost what their base
 * costs.
 *
 * Order. Backward nodes are taken greedily: of those that are ready, the one after which the fewest
 * bytes are alive; ties keep the given order. Views, constants and recomputed nodes are emitted
 * just before their first reader, so that they live briefly.
 *
 * Sizes are not known yet: every symbol counts as NOMINAL_SIZE.
 */
#include "engine/engine_internal.h"
#include <stdlib.h>
#include <string.h>

enum {
    NOMINAL_SIZE = 128,
    /* A chain of cheap nodes longer than this is not repeated: all of its links would live at once. */
    LONGEST_CHAIN = 4
};

static const int64_t INFINITE = (int64_t)1 << 60;

/* ---- what the graph looks like --------------------------------------------------------------- */

typedef struct schedule {
    const dw_graph *graph;
    uint32_t node_count, value_count, forward_outputs;
    int64_t *sizes;   /* nominal, by symbol */
    int64_t *bytes;   /* nominal, by value */
    dw_value *root;   /* by value: what it is a view of (itself, if of nothing) */
    bool *in_forward; /* by node */
    bool *free_root;  /* by value: memory of the caller (leaf or output) */
    bool *recomputed; /* by value: backward computes it again */
    /* Order of backward. */
    dw_node *order; /* nodes of the new graph, as nodes of the old */
    size_t order_count;
    bool *emitted;        /* by node: in backward's part of the order */
    bool *real;           /* by node: chosen by the scheduler, not emitted on demand */
    uint32_t *reads;      /* by root: reads by real nodes not yet emitted */
    bool *live;           /* by root: in memory now */
    bool *ready;          /* by node emitted on demand: all that it needs is there, and stays so */
    uint32_t *first_view; /* by node: the first output of backward that shows its result */
    uint32_t *next_view;  /* by output: the next one that shows the same node's */
    dw_node *stack;       /* a path of nodes, each an operand of the one below */
    dw__rewriter rewriter;
} schedule;

static const dw__node_record *record_of(const schedule *s, dw_node node) {
    return &s->graph->nodes.items[node];
}
static dw_node producer(const schedule *s, dw_value value) {
    return s->graph->values.items[value].node;
}

static dw_status allocate(schedule *s) {
    size_t nodes = s->node_count + 1, values = s->value_count + 1;
    size_t symbols = dw_graph_symbol_count(s->graph) + 1;
    s->sizes = dw__malloc(symbols * sizeof *s->sizes);
    s->bytes = dw__calloc(values, sizeof *s->bytes);
    s->root = dw__calloc(values, sizeof *s->root);
    s->in_forward = dw__calloc(nodes, sizeof *s->in_forward);
    s->free_root = dw__calloc(values, sizeof *s->free_root);
    s->recomputed = dw__calloc(values, sizeof *s->recomputed);
    /* A forward node may be emitted twice: in forward, and again in backward. */
    s->order = dw__calloc(2 * nodes, sizeof *s->order);
    s->emitted = dw__calloc(nodes, sizeof *s->emitted);
    s->real = dw__calloc(nodes, sizeof *s->real);
    s->reads = dw__calloc(values, sizeof *s->reads);
    s->live = dw__calloc(values, sizeof *s->live);
    s->ready = dw__calloc(nodes, sizeof *s->ready);
    s->stack = dw__calloc(nodes, sizeof *s->stack);
    s->first_view = dw__calloc(nodes, sizeof *s->first_view);
    s->next_view = dw__calloc(s->graph->outputs.count + 1, sizeof *s->next_view);
    if (!s->sizes || !s->bytes || !s->root || !s->in_forward || !s->free_root || !s->recomputed ||
        !s->order || !s->emitted || !s->real || !s->reads || !s->live || !s->ready || !s->stack ||
        !s->first_view || !s->next_view) {
        return dw__fail_memory("the schedule", values * sizeof *s->bytes);
    }
    for (size_t i = 0; i < symbols; i++) s->sizes[i] = NOMINAL_SIZE;
    return DW_OK;
}

static void release(schedule *s) {
    dw__free(s->sizes);
    dw__free(s->bytes);
    dw__free(s->root);
    dw__free(s->in_forward);
    dw__free(s->free_root);
    dw__free(s->recomputed);
    dw__free(s->order);
    dw__free(s->emitted);
    dw__free(s->real);
    dw__free(s->reads);
    dw__free(s->live);
    dw__free(s->ready);
    dw__free(s->stack);
    dw__free(s->first_view);
    dw__free(s->next_view);
}

/* Bytes at nominal sizes; a dim that has no value there ("S - 1000") counts as one element. */
static int64_t nominal_bytes(const schedule *s, dw_value value) {
    const dw__value_record *record = &s->graph->values.items[value];
    double count = (double)dw_dtype_bytes(record->dtype);
    for (int axis = 0; axis < record->rank; axis++) {
        int64_t dim = 1;
        if (dw_dim_eval(s->graph, record->shape[axis], s->sizes, &dim) != DW_OK) dim = 1;
        count *= (double)dim;
    }
    const double most = (double)((int64_t)1 << 50);
    return (int64_t)(count < most ? count : most);
}

/* Nodes that an output of forward depends on run there. They may not depend on a gradient. */
static dw_status find_forward(schedule *s) {
    const dw_graph *graph = s->graph;
    for (uint32_t i = 0; i < s->forward_outputs; i++) {
        dw_node node = producer(s, graph->outputs.items[i]);
        if (node != DW_NONE) s->in_forward[node] = true;
    }
    for (dw_node node = s->node_count; node-- > 0;) {
        if (!s->in_forward[node]) continue;
        const dw__node_record *record = record_of(s, node);
        for (uint32_t i = 0; i < record->input_count; i++) {
            dw_value input = record->inputs[i];
            if (input == DW_NONE) continue;
            if (graph->values.items[input].role == DW_ROLE_GRADIENT) {
                return dw__fail(DW_INTERNAL,
                                "node %u (%s) computes an output of forward from the gradient %s",
                                node, dw_op_name(record->op), graph->values.items[input].name);
            }
            if (producer(s, input) != DW_NONE) s->in_forward[producer(s, input)] = true;
        }
    }
    return DW_OK;
}

static void find_roots(schedule *s) {
    for (dw_value value = 0; value < s->value_count; value++) {
        s->root[value] = value;
        s->bytes[value] = nominal_bytes(s, value);
        if (producer(s, value) == DW_NONE) s->free_root[value] = true;
    }
    for (dw_node node = 0; node < s->node_count; node++) {
        const dw__node_record *record = record_of(s, node);
        if (dw__op_is_view(record->op)) s->root[record->outputs[0]] = s->root[record->inputs[0]];
    }
    for (size_t i = 0; i < s->graph->outputs.count; i++) {
        /* Through reshapes alone the output's buffer holds the root itself. */
        dw_value value = s->graph->outputs.items[i];
        dw_node node = producer(s, value);
        while (node != DW_NONE && dw__op_keeps_order(record_of(s, node)->op)) {
            value = record_of(s, node)->inputs[0];
            node = producer(s, value);
        }
        if (s->root[value] == value) s->free_root[value] = true;
    }
}

/* ---- minimum cut ----------------------------------------------------------------------------- */

typedef struct cut_edge {
    uint32_t to, next; /* next edge of the same vertex; the reverse edge is index ^ 1 */
    int64_t room;
} cut_edge;

typedef struct cut {
    uint32_t vertex_count, source, sink;
    uint32_t *first, *queue; /* by vertex; `queue` is the path in push_flow */
    uint32_t *distance; /* by vertex: edges with room to the sink, DW_NONE: it cannot be reached */
    uint32_t *next;     /* by vertex: the first edge that push_flow has not found useless */
    struct {
        cut_edge *items;
        size_t count, capacity;
    } edges;
} cut;

static dw_status add_edge(cut *c, uint32_t from, uint32_t to, int64_t room) {
    cut_edge forward = {to, c->first[from], room}, backward = {from, c->first[to], 0};
    DW_RETURN_IF_FAILED(DW_PUSH(&c->edges, forward));
    c->first[from] = (uint32_t)c->edges.count - 1;
    DW_RETURN_IF_FAILED(DW_PUSH(&c->edges, backward));
    c->first[to] = (uint32_t)c->edges.count - 1;
    return DW_OK;
}

/* Breadth-first from the sink against the edges. True if the source is reached. */
static bool find_distances(cut *c) {
    for (uint32_t v = 0; v < c->vertex_count; v++) c->distance[v] = DW_NONE;
    uint32_t head = 0, tail = 0;
    c->distance[c->sink] = 0;
    c->queue[tail++] = c->sink;
    while (head < tail) {
        uint32_t at = c->queue[head++];
        for (uint32_t e = c->first[at]; e != DW_NONE; e = c->edges.items[e].next) {
            uint32_t from = c->edges.items[e].to; /* the edge e ^ 1 leads from there to `at` */
            if (c->distance[from] != DW_NONE || c->edges.items[e ^ 1].room == 0) continue;
            c->distance[from] = c->distance[at] + 1;
            c->queue[tail++] = from;
        }
    }
    return c->distance[c->source] != DW_NONE;
}

/* The next edge of `at` towards the sink; edges that lead nowhere are passed for good. */
static uint32_t useful_edge(cut *c, uint32_t at) {
    for (; c->next[at] != DW_NONE; c->next[at] = c->edges.items[c->next[at]].next) {
        const cut_edge *edge = &c->edges.items[c->next[at]];
        if (edge->room > 0 && c->distance[edge->to] != DW_NONE &&
            c->distance[edge->to] + 1 == c->distance[at])
            return c->next[at];
    }
    return DW_NONE;
}

/* Takes the flow along the path of `length` edges, and returns how many of them lie before the first full one. */
static uint32_t push_path(cut *c, const uint32_t *path, uint32_t length) {
    int64_t flow = INFINITE;
    uint32_t full = 0;
    for (uint32_t i = 0; i < length; i++)
        if (c->edges.items[path[i]].room < flow) flow = c->edges.items[path[i]].room;
    for (uint32_t i = length; i-- > 0;) {
        c->edges.items[path[i]].room -= flow;
        c->edges.items[path[i] ^ 1].room += flow;
        if (c->edges.items[path[i]].room == 0) full = i;
    }
    return full;
}

/* A blocking flow (Dinitz 1970): along shortest paths, until each has a full edge. A search from the start for every
 * path would take time quadratic in the number of layers; there are few lengths, so there are few rounds of these. */
static void push_flow(cut *c) {
    uint32_t *path = c->queue, length = 0, at = c->source;
    memcpy(c->next, c->first, c->vertex_count * sizeof *c->next);
    for (;;) {
        uint32_t e = at == c->sink ? DW_NONE : useful_edge(c, at);
        if (e != DW_NONE) {
            path[length++] = e;
            at = c->edges.items[e].to;
        } else if (at == c->sink) {
            length = push_path(c, path, length);
            at = c->edges.items[path[length] ^ 1].to;
        } else if (length > 0) { /* nothing leads on from here */
            c->distance[at] = DW_NONE;
            at = c->edges.items[path[--length] ^ 1].to;
        } else {
            return;
        }
    }
}

/* Vertices: nodes, then a pair for each value (before and behind its capacity), source, sink. */
static uint32_t before(const schedule *s, dw_value v) { return s->node_count + 2 * v; }
static uint32_t behind(const schedule *s, dw_value v) { return s->node_count + 2 * v + 1; }

static int64_t capacity(const schedule *s, dw_value value) {
    if (s->root[value] != value) return INFINITE; /* the base is what would be saved */
    if (s->free_root[value]) return 0;
    return s->bytes[value] > 0 ? s->bytes[value] : 1;
}

static dw_status build_cut(const schedule *s, const bool *kept, cut *c) {
    for (dw_node node = 0; node < s->node_count; node++) {
        const dw__node_record *record = record_of(s, node);
        if (s->in_forward[node]) {
            bool repeatable = dw__op_is_cheap(record->op) && !kept[node];
            if (!repeatable) DW_RETURN_IF_FAILED(add_edge(c, c->source, node, INFINITE));
            for (uint32_t o = 0; o < record->output_count; o++) {
                dw_value value = record->outputs[o];
                DW_RETURN_IF_FAILED(add_edge(c, node, before(s, value), INFINITE));
                DW_RETURN_IF_FAILED(
                    add_edge(c, before(s, value), behind(s, value), capacity(s, value)));
            }
        }
        for (uint32_t i = 0; i < record->input_count; i++) {
            dw_value input = record->inputs[i];
            if (input == DW_NONE || producer(s, input) == DW_NONE) continue;
            if (!s->in_forward[producer(s, input)]) continue;
            uint32_t to = s->in_forward[node] ? node : c->sink;
            DW_RETURN_IF_FAILED(add_edge(c, behind(s, input), to, INFINITE));
        }
    }
    return DW_OK;
}

static dw_status open_cut(const schedule *s, cut *c) {
    c->source = s->node_count + 2 * s->value_count;
    c->sink = c->source + 1;
    c->vertex_count = c->sink + 1;
    c->first = dw__malloc(c->vertex_count * sizeof *c->first);
    c->distance = dw__malloc(c->vertex_count * sizeof *c->distance);
    c->next = dw__malloc(c->vertex_count * sizeof *c->next);
    c->queue = dw__malloc(c->vertex_count * sizeof *c->queue);
    if (c->first && c->distance && c->next && c->queue) return DW_OK;
    return dw__fail_memory("the choice of saved values", c->vertex_count * sizeof *c->first);
}

static void close_cut(cut *c) {
    dw__free(c->first);
    dw__free(c->distance);
    dw__free(c->next);
    dw__free(c->queue);
    dw__free(c->edges.items);
}

static dw_status cut_once(schedule *s, const bool *kept, cut *c) {
    c->edges.count = 0;
    for (uint32_t v = 0; v < c->vertex_count; v++) c->first[v] = DW_NONE;
    DW_RETURN_IF_FAILED(build_cut(s, kept, c));
    while (find_distances(c)) push_flow(c);
    /* After the last, failed search the vertices that reach the sink are its side of the nearest cut. */
    for (dw_value value = 0; value < s->value_count; value++) {
        dw_node node = producer(s, value);
        s->recomputed[value] =
            node != DW_NONE && s->in_forward[node] && c->distance[before(s, value)] != DW_NONE;
    }
    return DW_OK;
}

/* Marks nodes whose results end a chain that is too long to be repeated at once; false if none. */
static bool keep_ends_of_chains(const schedule *s, uint32_t *length, bool *kept) {
    bool any = false;
    for (dw_node node = 0; node < s->node_count; node++) {
        const dw__node_record *record = record_of(s, node);
        length[node] = 0;
        if (!s->in_forward[node] || !s->recomputed[record->outputs[0]]) continue;
        for (uint32_t i = 0; i < record->input_count; i++) {
            dw_node from = record->inputs[i] == DW_NONE ? DW_NONE : producer(s, record->inputs[i]);
            if (from != DW_NONE && length[from] > length[node]) length[node] = length[from];
        }
        if (dw__op_is_view(record->op)) continue;
        if (++length[node] > LONGEST_CHAIN) {
            length[node] = 0;
            kept[node] = true;
            any = true;
        }
    }
    return any;
}

static dw_status choose_recomputed(schedule *s) {
    /* Each round keeps more; it ends earlier where no chain is long, as in most models. */
    enum { MOST_ROUNDS = 8 };
    dw_status status = DW_OK;
    cut c = {0};
    uint32_t *length = dw__calloc(s->node_count + 1, sizeof *length);
    bool *kept = dw__calloc(s->node_count + 1, sizeof *kept);
    if (!length || !kept) DW_TRY(dw__fail_memory("chains of nodes", s->node_count));
    DW_TRY(open_cut(s, &c));
    for (int round = 0; round < MOST_ROUNDS; round++) {
        DW_TRY(cut_once(s, kept, &c));
        if (!keep_ends_of_chains(s, length, kept)) break;
    }
cleanup:
    dw__free(length);
    dw__free(kept);
    close_cut(&c);
    return status;
}

/* ---- order of backward ----------------------------------------------------------------------- */

/* True when backward has to run the value's node itself before it can read the value. */
static bool computed_in_backward(const schedule *s, dw_value value) {
    dw_node node = producer(s, value);
    if (node == DW_NONE) return false;
    return s->in_forward[node] ? s->recomputed[value] : true;
}

/* Emitted when a reader needs it. */
static bool on_demand(const schedule *s, dw_node node) {
    const dw__node_record *record = record_of(s, node);
    return s->in_forward[node] || dw__op_is_view(record->op) || record->input_count == 0;
}

/* A node that makes an operand of `node` and has not been emitted, or DW_NONE. What has been found ready is
 * missing only where it has to be emitted. */
static dw_node missing_producer(const schedule *s, dw_node node, bool ready_is_missing) {
    const dw__node_record *record = record_of(s, node);
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw_value input = record->inputs[i];
        if (input == DW_NONE || !computed_in_backward(s, input)) continue;
        dw_node from = producer(s, input);
        if (!s->emitted[from] && (ready_is_missing || !s->ready[from])) return from;
    }
    return DW_NONE;
}

/* Emits the node after all that it needs. */
static void emit(schedule *s, dw_node node) {
    uint32_t height = 0;
    if (s->emitted[node]) return;
    s->stack[height++] = node;
    while (height > 0) {
        dw_node top = s->stack[height - 1], missing = missing_producer(s, top, true);
        if (missing != DW_NONE) {
            s->stack[height++] = missing;
            continue;
        }
        s->emitted[top] = true;
        s->order[s->order_count++] = top;
        const dw__node_record *record = record_of(s, top);
        for (uint32_t o = 0; o < record->output_count; o++) s->live[record->outputs[o]] = true;
        height--;
    }
}

/* Ready: every real node that it depends on, directly or through on-demand nodes, has been emitted. */
static bool is_ready(schedule *s, dw_node node) {
    uint32_t height = 0;
    s->stack[height++] = node;
    while (height > 0) {
        dw_node top = s->stack[height - 1], missing = missing_producer(s, top, false);
        if (missing == DW_NONE) {
            if (!s->real[top]) s->ready[top] = true;
            height--;
        } else {
            if (s->real[missing]) return false;
            s->stack[height++] = missing;
        }
    }
    return true;
}

static uint32_t reads_by(const schedule *s, const dw__node_record *record, dw_value root) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        count += record->inputs[i] != DW_NONE && s->root[record->inputs[i]] == root;
    }
    return count;
}

/* Bytes alive after the node less bytes alive before it. */
static int64_t growth(const schedule *s, dw_node node) {
    const dw__node_record *record = record_of(s, node);
    int64_t bytes = 0;
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw_value value = record->outputs[o];
        if (!s->free_root[value] && s->reads[value] > 0) bytes += s->bytes[value];
    }
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (record->inputs[i] == DW_NONE) continue;
        dw_value root = s->root[record->inputs[i]];
        if (s->free_root[root]) continue;
        bool again = false;
        for (uint32_t j = 0; j < i; j++) {
            again |= record->inputs[j] != DW_NONE && s->root[record->inputs[j]] == root;
        }
        if (again) continue;
        bool dies = s->reads[root] == reads_by(s, record, root);
        if (s->live[root] && dies) bytes -= s->bytes[root];
        if (!s->live[root] && !dies) bytes += s->bytes[root];
    }
    return bytes;
}

static void count_reads(schedule *s) {
    for (dw_node node = 0; node < s->node_count; node++) {
        s->real[node] = !on_demand(s, node);
        if (!s->real[node]) continue;
        const dw__node_record *record = record_of(s, node);
        for (uint32_t i = 0; i < record->input_count; i++) {
            if (record->inputs[i] != DW_NONE) s->reads[s->root[record->inputs[i]]]++;
        }
    }
    /* What forward saved is in memory when backward begins. */
    for (dw_value value = 0; value < s->value_count; value++) {
        dw_node node = producer(s, value);
        s->live[value] = node != DW_NONE && s->in_forward[node] && !s->recomputed[value];
    }
}

/* Lists the outputs of backward by the node that makes their root, in order. */
static void list_output_views(schedule *s) {
    for (dw_node node = 0; node < s->node_count; node++) s->first_view[node] = DW_NONE;
    for (size_t i = s->graph->outputs.count; i-- > s->forward_outputs;) {
        dw_node node = producer(s, s->root[s->graph->outputs.items[i]]);
        if (node == DW_NONE) continue;
        s->next_view[i] = s->first_view[node];
        s->first_view[node] = (uint32_t)i;
    }
}

static void emit_output_views(schedule *s, dw_node node) {
    for (uint32_t i = s->first_view[node]; i != DW_NONE; i = s->next_view[i]) {
        dw_node from = producer(s, s->graph->outputs.items[i]);
        if (from == DW_NONE || s->in_forward[from] || s->emitted[from]) continue;
        if (is_ready(s, from)) emit(s, from);
    }
}

/* Ready nodes are looked for among the first WINDOW that wait, so that the time stays linear; a
 * graph seldom has as many that are ready at once. */
static dw_status order_backward(schedule *s) {
    enum { WINDOW = 256 };
    dw_status status = DW_OK;
    dw_node *waiting = dw__malloc((s->node_count + 1) * sizeof *waiting);
    if (!waiting) return dw__fail_memory("the order of backward", s->node_count * sizeof *waiting);
    uint32_t count = 0;
    for (dw_node node = 0; node < s->node_count; node++) {
        if (s->real[node]) waiting[count++] = node;
    }
    uint32_t begin = 0;
    while (begin < count) {
        uint32_t best = DW_NONE;
        int64_t best_growth = 0;
        for (uint32_t i = begin; i < count && i < begin + WINDOW; i++) {
            if (!is_ready(s, waiting[i])) continue;
            int64_t bytes = growth(s, waiting[i]);
            if (best == DW_NONE || bytes < best_growth) {
                best = i;
                best_growth = bytes;
            }
        }
        if (best == DW_NONE) {
            DW_TRY(dw__fail(DW_INTERNAL, "node %u (%s) waits for a node behind it", waiting[begin],
                            dw_op_name(record_of(s, waiting[begin])->op)));
        }
        dw_node node = waiting[best];
        emit(s, node);
        emit_output_views(s, node);
        const dw__node_record *record = record_of(s, node);
        for (uint32_t i = 0; i < record->input_count; i++) {
            if (record->inputs[i] == DW_NONE) continue;
            dw_value root = s->root[record->inputs[i]];
            if (--s->reads[root] == 0) s->live[root] = false;
        }
        memmove(waiting + begin + 1, waiting + begin, (best - begin) * sizeof *waiting);
        begin++;
    }
    /* Outputs that are constants, or views of the caller's memory: nobody has demanded them. */
    for (size_t i = s->forward_outputs; i < s->graph->outputs.count; i++) {
        dw_value value = s->graph->outputs.items[i];
        dw_node node = producer(s, value);
        if (node != DW_NONE && !s->in_forward[node]) emit(s, node);
    }
cleanup:
    dw__free(waiting);
    return status;
}

/* ---- the new graph --------------------------------------------------------------------------- */

/* Copies the node into the new graph as a node of backward. */
static dw_status copy_backward(schedule *s, dw_node node) {
    dw_graph *to = s->rewriter.to;
    const dw__node_record record = *record_of(s, node);
    const dw_attr *attrs = NULL;
    DW_RETURN_IF_FAILED(dw__import_attrs(to, s->graph, node, &attrs));
    dw_value inputs[DW_MAX_INPUTS];
    for (uint32_t i = 0; i < record.input_count; i++) {
        inputs[i] = record.inputs[i] == DW_NONE ? DW_NONE : s->rewriter.map[record.inputs[i]];
    }
    DW_RETURN_IF_FAILED(dw_graph_set_origin(to, record.region, record.layer, record.module));
    dw_graph_set_backward(to, 1);
    dw_node copy = DW_NONE;
    DW_RETURN_IF_FAILED(dw_graph_append(to, record.op, record.input_count, inputs,
                                        record.attr_count, attrs, &copy));
    for (uint32_t o = 0; o < record.output_count; o++) {
        bool saved = s->in_forward[node] && !s->recomputed[record.outputs[o]];
        if (!saved) s->rewriter.map[record.outputs[o]] = to->nodes.items[copy].outputs[o];
    }
    return DW_OK;
}

static dw_status write_graph(schedule *s, dw_graph **graph) {
    dw_status status = DW_OK;
    dw_value *forward_map = NULL;
    DW_TRY(dw__rewriter_begin(&s->rewriter, s->graph));
    for (dw_node node = 0; node < s->node_count; node++) {
        if (!s->in_forward[node]) continue;
        DW_TRY(dw__rewriter_copy(&s->rewriter, node));
        dw_value output = s->rewriter.map[record_of(s, node)->outputs[0]];
        s->rewriter.to->nodes.items[s->rewriter.to->values.items[output].node].backward = false;
    }
    size_t bytes = s->value_count * sizeof *forward_map;
    forward_map = dw__malloc(bytes);
    if (!forward_map) DW_TRY(dw__fail_memory("a map of values", bytes));
    if (bytes) memcpy(forward_map, s->rewriter.map, bytes);
    for (size_t i = 0; i < s->order_count; i++) DW_TRY(copy_backward(s, s->order[i]));
    /* Outputs of forward are forward's values, not their copies. */
    for (dw_value value = 0; value < s->value_count; value++) {
        dw_node node = producer(s, value);
        if (node != DW_NONE && s->in_forward[node]) s->rewriter.map[value] = forward_map[value];
    }
    DW_TRY(dw__rewriter_end(&s->rewriter, graph));
cleanup:
    if (status != DW_OK && s->rewriter.to) dw__rewriter_abort(&s->rewriter);
    dw__free(forward_map);
    return status;
}

dw_status dw__schedule(dw_graph **graph, uint32_t forward_outputs, bool recompute) {
    dw_status status = DW_OK;
    schedule s = {.graph = *graph, .forward_outputs = forward_outputs};
    s.node_count = dw_graph_node_count(*graph);
    s.value_count = dw_graph_value_count(*graph);
    DW_TRY(allocate(&s));
    find_roots(&s);
    DW_TRY(find_forward(&s));
    if (recompute) DW_TRY(choose_recomputed(&s));
    count_reads(&s);
    list_output_views(&s);
    DW_TRY(order_backward(&s));
    DW_TRY(write_graph(&s, graph));
cleanup:
    release(&s);
    return status;
}
