#include "graph/passes.h"
#include "number/half.h"
#include <assert.h>

static const struct {
    const char *name;
    dw__pass_function *run;
} passes[DW_PASS_COUNT] = {
    [DW_PASS_DEAD_CODE] = {"dead_code", dw__pass_dead_code},
    [DW_PASS_COMMON] = {"common", dw__pass_common},
    [DW_PASS_FOLD] = {"fold", dw__pass_fold},
    [DW_PASS_RECOGNIZE] = {"recognize", dw__pass_recognize},
    [DW_PASS_EXPAND] = {"expand", dw__pass_expand},
    [DW_PASS_FUSE] = {"fuse", dw__pass_fuse},
};

const char *dw_pass_name(dw_pass pass) {
    return (unsigned)pass < DW_PASS_COUNT ? passes[pass].name : "?";
}

dw_status dw_graph_run_pass(dw_graph **graph, dw_pass pass) {
    if ((unsigned)pass >= DW_PASS_COUNT)
        return dw__fail(DW_INVALID_ARGUMENT, "pass %d does not exist; there are %d", (int)pass,
                        DW_PASS_COUNT);
    if (!graph || !*graph)
        return dw__fail(DW_INVALID_ARGUMENT, "pass %s was given no graph", passes[pass].name);
    dw_status status = passes[pass].run(graph);
    return status == DW_OK ? status : dw__fail_prefix(status, "pass %s", passes[pass].name);
}

dw_status dw__simplify_graph(dw_graph **graph) {
    static const dw_pass run[] = {DW_PASS_FOLD, DW_PASS_RECOGNIZE, DW_PASS_FOLD, DW_PASS_COMMON,
                                  DW_PASS_DEAD_CODE};
    for (size_t i = 0; i < DW_COUNT(run); i++)
        DW_RETURN_IF_FAILED(dw_graph_run_pass(graph, run[i]));
    return DW_OK;
}

dw_status dw__count_uses(const dw_graph *graph, uint32_t **uses) {
    uint32_t *count = dw__calloc(graph->values.count, sizeof *count);
    if (!count) return dw__fail_memory("use counts", graph->values.count * sizeof *count);
    for (size_t n = 0; n < graph->nodes.count; n++) {
        const dw__node_record *node = &graph->nodes.items[n];
        for (uint32_t i = 0; i < node->input_count; i++)
            if (node->inputs[i] != DW_NONE) count[node->inputs[i]]++;
    }
    for (size_t i = 0; i < graph->outputs.count; i++) count[graph->outputs.items[i]]++;
    *uses = count;
    return DW_OK;
}

/* ---- local rewriting ------------------------------------------------------------------------ */

/* Appends use counts for values that were made since the last call. */
static dw_status extend_uses(dw__rewrite *rewrite, uint32_t count) {
    while (rewrite->uses.count < rewrite->graph->values.count)
        if (DW_PUSH(&rewrite->uses, count) != DW_OK)
            return dw__fail_memory("use counts", rewrite->uses.count * sizeof(uint32_t));
    return DW_OK;
}

static dw_status rewrite_node(dw__rewriter *rewriter, dw__rewrite *rewrite, const uint32_t *uses,
                              dw__rewrite_rule *rule, dw_node old) {
    dw_graph *to = rewriter->to;
    const dw__node_record *record = &rewriter->from->nodes.items[old];
    dw_value replacements[DW_MAX_OUTPUTS];
    DW_RETURN_IF_FAILED(dw__rewriter_copy(rewriter, old));
    DW_RETURN_IF_FAILED(extend_uses(rewrite, 0));
    assert(rewrite->uses.items); /* not NULL, because every node has an output */
    for (uint32_t i = 0; i < record->output_count; i++) {
        dw_value made = rewriter->map[record->outputs[i]];
        replacements[i] = made;
        rewrite->uses.items[made] = uses[record->outputs[i]];
    }
    size_t before = to->values.count;
    DW_RETURN_IF_FAILED(dw__copy_origin(to, rewriter->from, old));
    DW_RETURN_IF_FAILED(rule(rewrite, (dw_node)(to->nodes.count - 1), replacements));
    DW_RETURN_IF_FAILED(extend_uses(rewrite, 1));
    for (uint32_t i = 0; i < record->output_count; i++) {
        dw_value by = replacements[i];
        if (by == rewriter->map[record->outputs[i]]) continue;
        uint32_t others = by < before ? rewrite->uses.items[by] : 0;
        rewrite->uses.items[by] = others + uses[record->outputs[i]];
        rewriter->map[record->outputs[i]] = by;
    }
    return DW_OK;
}

/* Rewrites into a new graph and leaves the old one unchanged. */
static dw_status rewrite_into(dw__rewriter *rewriter, dw__rewrite_rule *rule, void *context,
                              dw_graph **made) {
    dw_status status = DW_OK;
    const dw_graph *from = rewriter->from;
    uint32_t *uses = NULL;
    dw__rewrite rewrite = {.graph = rewriter->to, .context = context};
    DW_TRY(dw__count_uses(from, &uses));
    DW_TRY(extend_uses(&rewrite, 0));
    for (size_t i = 0; i < from->leaves.count; i++) {
        dw_value leaf = from->leaves.items[i];
        rewrite.uses.items[rewriter->map[leaf]] = uses[leaf];
    }
    for (dw_node n = 0; n < dw_graph_node_count(from); n++)
        DW_TRY(rewrite_node(rewriter, &rewrite, uses, rule, n));
    DW_TRY(dw__rewriter_end(rewriter, made));
cleanup:
    dw__free(uses);
    dw__free(rewrite.uses.items);
    return status;
}

dw_status dw__rewrite_each(dw_graph **graph, dw__rewrite_rule *rule, void *context) {
    dw_status status = DW_OK;
    dw_graph *made = NULL;
    dw__rewriter rewriter;
    DW_RETURN_IF_FAILED(dw__rewriter_begin(&rewriter, *graph));
    DW_TRY(rewrite_into(&rewriter, rule, context, &made));
    DW_TRY(dw__pass_dead_code(&made));
    dw__replace_graph(graph, &made);
cleanup:
    dw__rewriter_abort(&rewriter);
    dw_graph_destroy(made);
    return status;
}

void dw__replace_graph(dw_graph **graph, dw_graph **by) {
    dw_graph_destroy(*graph);
    *graph = *by;
    *by = NULL;
}

/* ---- queries for rules ---------------------------------------------------------------------- */

dw_node dw__made_by(const dw_graph *graph, dw_value value, dw_op op) {
    if (value == DW_NONE) return DW_NONE;
    const dw__value_record *record = &graph->values.items[value];
    if (record->node == DW_NONE || record->index != 0) return DW_NONE;
    return graph->nodes.items[record->node].op == op ? record->node : DW_NONE;
}

bool dw__prepends_ones(const dw_graph *graph, dw_node reshape) {
    dw__type in = dw__type_of(graph, dw_node_input(graph, reshape, 0));
    dw__type out = dw__type_of(graph, dw_node_output(graph, reshape, 0));
    int lead = out.rank - in.rank;
    if (lead < 0) return false;
    for (int i = 0; i < out.rank; i++)
        if (out.shape[i] != (i < lead ? 1 : in.shape[i - lead])) return false;
    return true;
}

double dw__round_to(dw_dtype dtype, double number) {
    switch (dtype) {
    case DW_F32: return (double)(float)number;
    case DW_BF16: return (double)dw__bf16_to_f32(dw__f32_to_bf16((float)number));
    case DW_F16: return (double)dw__f16_to_f32(dw__f32_to_f16((float)number));
    default: return number;
    }
}

bool dw__is_splat(const dw_graph *graph, dw_value value, double *number) {
    dw_dtype casts[DW__LOOK_THROUGH]; /* from the outermost cast to the innermost */
    int cast_count = 0;
    for (int looked = 0; looked < DW__LOOK_THROUGH && value != DW_NONE; looked++) {
        const dw__value_record *record = &graph->values.items[value];
        if (record->node == DW_NONE) return false;
        const dw__node_record *node = &graph->nodes.items[record->node];
        switch (node->op) {
        case DW_OP_CONSTANT:
            *number = dw_node_float(graph, record->node, DW_ATTR_KEY_VALUE, 0.0);
            while (cast_count > 0) *number = dw__round_to(casts[--cast_count], *number);
            return true;
        case DW_OP_CAST:
            if (!dw__dtype_is_float(record->dtype) ||
                !dw__dtype_is_float(graph->values.items[node->inputs[0]].dtype))
                return false;
            casts[cast_count++] = record->dtype;
            break;
        case DW_OP_RESHAPE:
        case DW_OP_BROADCAST:
        case DW_OP_PERMUTE:
        case DW_OP_STOP_GRADIENT: break;
        default: return false;
        }
        value = node->inputs[0];
    }
    return false;
}
