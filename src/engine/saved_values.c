/* Scheduling: which forward values are saved for backward, and which are computed again.
 *
 * Matmuls and attention are never repeated. Nodes that the operation table calls cheap may be. The choice that saves
 * the fewest bytes is a minimum cut (the formulation of Chen et al. 2016, "Training deep nets with sublinear memory
 * cost", as a cut):
 *
 *     source -> nodes that may not be repeated
 *     node -> its results; each result is an edge whose capacity is its size; result -> nodes that read it
 *     values that backward reads -> sink
 *
 * Among equal cuts, the one nearest to backward is chosen, because it repeats the fewest nodes. Leaves and outputs
 * belong to the caller and cost nothing. A view costs what its base costs.
 */
#include "engine/min_cut.h"
#include "engine/training_schedule.h"

/* The links of a chain of repeated nodes are alive at once: a longer chain than this is cut. */
enum { LONGEST_CHAIN = 4 };

/* Vertices: nodes, two for each value (at the ends of its edge), source, sink. */
static uint32_t source_of(const dw__scheduling *s) { return s->node_count + 2 * s->value_count; }
static uint32_t sink_of(const dw__scheduling *s) { return source_of(s) + 1; }

static uint32_t before(const dw__scheduling *s, dw_value v) { return s->node_count + 2 * v; }

static uint32_t behind(const dw__scheduling *s, dw_value v) { return s->node_count + 2 * v + 1; }

static int64_t capacity(const dw__scheduling *s, dw_value value) {
    if (s->root[value] != value) return DW__CUT_INFINITE; /* saving a view saves its base */
    if (s->free_root[value]) return 0;
    return s->bytes[value] > 0 ? s->bytes[value] : 1;
}

static dw_status build_cut(const dw__scheduling *s, const bool *kept, dw__cut *c) {
    for (dw_node node = 0; node < s->node_count; node++) {
        const dw__node_record *record = record_of(s, node);
        if (s->in_forward[node]) {
            bool repeatable = dw__op_is_cheap(record->op) && !kept[node];
            if (!repeatable)
                DW_RETURN_IF_FAILED(dw__cut_add_edge(c, c->source, node, DW__CUT_INFINITE));
            for (uint32_t o = 0; o < record->output_count; o++) {
                dw_value value = record->outputs[o];
                DW_RETURN_IF_FAILED(dw__cut_add_edge(c, node, before(s, value), DW__CUT_INFINITE));
                DW_RETURN_IF_FAILED(
                    dw__cut_add_edge(c, before(s, value), behind(s, value), capacity(s, value)));
            }
        }
        for (uint32_t i = 0; i < record->input_count; i++) {
            dw_value input = record->inputs[i];
            if (input == DW_NONE || producer(s, input) == DW_NONE) continue;
            if (!s->in_forward[producer(s, input)]) continue;
            uint32_t to = s->in_forward[node] ? node : c->sink;
            DW_RETURN_IF_FAILED(dw__cut_add_edge(c, behind(s, input), to, DW__CUT_INFINITE));
        }
    }
    return DW_OK;
}

static dw_status cut_once(dw__scheduling *s, const bool *kept, dw__cut *c) {
    dw__cut_clear(c);
    DW_RETURN_IF_FAILED(build_cut(s, kept, c));
    dw__cut_solve(c);
    for (dw_value value = 0; value < s->value_count; value++) {
        dw_node node = producer(s, value);
        s->recomputed[value] =
            node != DW_NONE && s->in_forward[node] && dw__cut_is_behind(c, before(s, value));
    }
    return DW_OK;
}

/* Marks the nodes that end a chain of more than LONGEST_CHAIN repeated nodes; returns false if there are none. */
static bool keep_ends_of_chains(const dw__scheduling *s, uint32_t *length, bool *kept) {
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

dw_status dw__choose_recomputed(dw__scheduling *s) {
    /* Each round keeps more nodes. Most models have no long chain and need one round. */
    enum { MOST_ROUNDS = 8 };
    dw_status status = DW_OK;
    dw__cut c = {0};
    uint32_t *length = dw__calloc(s->node_count + 1, sizeof *length);
    bool *kept = dw__calloc(s->node_count + 1, sizeof *kept);
    if (!length || !kept) DW_TRY(dw__fail_memory("chains of nodes", s->node_count));
    DW_TRY(dw__cut_open(sink_of(s) + 1, source_of(s), sink_of(s), &c));
    for (int round = 0; round < MOST_ROUNDS; round++) {
        DW_TRY(cut_once(s, kept, &c));
        if (!keep_ends_of_chains(s, length, kept)) break;
    }
cleanup:
    dw__free(length);
    dw__free(kept);
    dw__cut_close(&c);
    return status;
}
