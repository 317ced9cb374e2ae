/* Composites: writes the node to a graph of its own with concrete shapes, expands it with its row of the
 * operation table, and interprets the primitives. Nothing is kept between calls, because prepare() may return
 * only one block and a graph has many. Only calls that no kernel supports come here. */
#include "graph/internal.h"
#include "kernel/reference/index.h"
#include "kernel/reference/interpret.h"
#include "kernel/reference/primitives.h"
#include <string.h>

/* Adds one leaf "i0", "i1", ... per present operand; values of absent operands are DW_NONE. */
static dw_status add_leaves(dw_graph *graph, const dw__call *call, const dw_dtype *dtypes,
                            dw_value *values) {
    for (uint32_t i = 0; i < DW_MAX_INPUTS; i++) values[i] = DW_NONE; /* also trailing ones */
    for (uint32_t i = 0; i < call->input_count; i++) {
        const dw__tensor *in = &call->inputs[i];
        char name[] = {'i', (char)('0' + i / 10), (char)('0' + i % 10), '\0'};
        if (in->rank < 0) continue;
        DW_RETURN_IF_FAILED(
            dw_graph_leaf(graph, DW_ROLE_INPUT, name, dtypes[i], in->rank, in->shape, &values[i]));
    }
    return DW_OK;
}

static dw_status build_expansion(const dw__call *call, const dw_dtype *dtypes, dw_graph *source,
                                 dw_graph *expansion) {
    dw_value inputs[DW_MAX_INPUTS], outputs[DW_MAX_OUTPUTS];
    dw_node node;
    DW_RETURN_IF_FAILED(add_leaves(source, call, dtypes, inputs));
    DW_RETURN_IF_FAILED(dw_graph_append(source, call->op, call->input_count, inputs,
                                        call->attr_count, call->attrs, &node));
    DW_RETURN_IF_FAILED(add_leaves(expansion, call, dtypes, inputs));
    DW_RETURN_IF_FAILED(dw__op_table[call->op].expand(expansion, source, node, inputs, outputs));
    for (uint32_t i = 0; i < call->output_count; i++)
        DW_RETURN_IF_FAILED(dw_graph_add_output(expansion, outputs[i]));
    return DW_OK;
}

dw_status dw__expansion_evaluate(const dw__call *call, const dw_dtype *input_dtypes,
                                 bool high_precision) {
    dw_graph *source = NULL, *expansion = NULL;
    dw__interpret_options options = {high_precision};
    dw__tensor results[DW_MAX_OUTPUTS], *leaves = NULL;
    uint32_t leaf_count = 0, result_count = 0;
    dw_status status = DW_OK;
    DW_TRY(dw_graph_create(&source));
    DW_TRY(dw_graph_create(&expansion));
    DW_TRY(build_expansion(call, input_dtypes, source, expansion));
    leaves = dw__calloc(call->input_count, sizeof *leaves);
    if (!leaves) DW_TRY(dw__fail_memory("operands", call->input_count * sizeof *leaves));
    for (uint32_t i = 0; i < call->input_count; i++)
        if (call->inputs[i].rank >= 0) leaves[leaf_count++] = call->inputs[i];
    DW_TRY(dw__interpret(expansion, NULL, leaves, results, &options));
    result_count = call->output_count;
    for (uint32_t i = 0; i < result_count; i++) {
        dw__tensor out = call->outputs[i];
        if (out.data) dw__tensor_copy(&out, &results[i]);
    }
cleanup:
    for (uint32_t i = 0; i < result_count; i++) dw__free_aligned(results[i].data);
    dw__free(leaves);
    dw_graph_destroy(expansion);
    dw_graph_destroy(source);
    return status;
}

dw_status dw__reference_expand(const dw__call *call, void *scratch) {
    (void)scratch;
    dw_dtype dtypes[DW_MAX_INPUTS];
    for (uint32_t i = 0; i < call->input_count; i++) dtypes[i] = call->inputs[i].dtype;
    return dw__expansion_evaluate(call, dtypes, false);
}
