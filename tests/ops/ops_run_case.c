/* Runs one kernel on one case (see ops_run_case.h). */
#include "ops_run_case.h"
#include "graph/internal.h"
#include "kernel/reference/interpret.h"
#include <string.h>

void ops_call_destroy(ops_call *c) {
    if (!c) return;
    for (int i = 0; i < OPS_MAX_OUTPUTS; i++) ops_block_destroy(&c->outputs[i]);
    ops_block_destroy(&c->scratch);
    dw__free(c->prepared);
    if (c->arena) dw__arena_destroy(c->arena);
    dw__free(c);
}

dw_status ops_call_create(const dw_graph *graph, const ops_operands *operands, ops_call **out) {
    ops_call *c = dw__calloc(1, sizeof *c);
    dw_status status = DW_OK;
    const dw_node node = 0;
    if (!c) return dw__fail_memory("a call", sizeof *c);
    c->arena = dw__arena_create();
    if (!c->arena) DW_TRY(dw__fail_memory("a call's arena", 0));
    dw__call *call = &c->call;
    call->op = dw_node_op(graph, node);
    DW_TRY(dw__node_attrs_at(c->arena, graph, node, NULL, &call->attrs));
    call->attr_count = graph->nodes.items[node].attr_count;
    call->input_count = dw_node_input_count(graph, node);
    for (uint32_t i = 0; i < DW_MAX_INPUTS; i++) call->inputs[i].rank = -1;
    for (uint32_t i = 0; i < operands->count; i++) call->inputs[i] = operands->tensors[i];
    call->output_count = dw_node_output_count(graph, node);
    for (uint32_t i = 0; i < call->output_count; i++) {
        dw__tensor *tensor = &call->outputs[i];
        DW_TRY(dw__value_tensor_at(graph, dw_node_output(graph, node, i), NULL, tensor));
        size_t bytes = dw__tensor_bytes(tensor);
        DW_TRY(ops_block_create(bytes, &c->outputs[i]));
        tensor->data = c->outputs[i].data;
    }
    *out = c;
    c = NULL;
cleanup:
    ops_call_destroy(c);
    return status;
}

dw_status ops_call_bind(ops_call *c, const dw__kernel *kernel) {
    ops_block_destroy(&c->scratch);
    dw__free(c->prepared);
    c->prepared = NULL;
    c->call.prepared = NULL;
    size_t bytes = kernel_workspace(kernel, &c->call);
    DW_RETURN_IF_FAILED(ops_block_create(bytes, &c->scratch));
    if (kernel->parse) DW_RETURN_IF_FAILED(kernel->parse(&c->call, &c->prepared));
    c->call.prepared = c->prepared;
    return DW_OK;
}

void ops_call_clear(ops_call *c) {
    for (int i = 0; i < OPS_MAX_OUTPUTS; i++)
        if (c->outputs[i].base) memset(c->outputs[i].data, 0xFF, c->outputs[i].bytes);
}

const char *ops_call_damage(const ops_call *c) {
    for (int i = 0; i < OPS_MAX_OUTPUTS; i++)
        if (c->outputs[i].base && ops_block_damage(&c->outputs[i]))
            return "wrote outside of an output";
    return c->scratch.base && ops_block_damage(&c->scratch) ? "wrote outside of its scratch" : NULL;
}
