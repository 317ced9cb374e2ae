/* The passes over a graph that depend on the kernels of its target.
 *
 * Composites that no kernel of the target computes become primitives before the graph is scheduled. So do those in BF16
 * and F16 for which a CPU has only the reference kernel: their primitives are in F32, which has fast kernels. On a CPU
 * that includes attention_backward with the gradient of the mask, in every type.
 *
 * A plan's sizes are not known yet. Kernels are asked about two calls, in which every symbol is an even number and an
 * odd one, and a composite stays only if a kernel supports both. Kernels answer by element types, ranks and the sizes
 * that models fix, such as head dimensions; one that depends on a symbol (rows of whole 16 bytes, say) would leave some
 * plans without a kernel.
 *
 * Products of quantized operands are products of codes if kernels support them in the same sense.
 */
#include "engine/engine_internal.h"
#include <stdio.h>
#include <string.h>

static const int64_t typical_sizes[] = {128, 127};

typedef struct question {
    const dw__target *target;
    uint32_t symbols;
    int64_t *sizes; /* one for each symbol */
    dw__arena *memory;
    dw__operation_call call;
    dw__code_products *products; /* for the reason */
} question;

static dw_status describe(const dw_graph *graph, dw_node node, question *q) {
    const dw__node_record *record = &graph->nodes.items[node];
    dw__call *call = &q->call.call;
    call->op = record->op;
    call->attr_count = record->attr_count;
    call->input_count = record->input_count;
    call->output_count = record->output_count;
    DW_RETURN_IF_FAILED(dw__node_attrs_at(q->memory, graph, node, q->sizes, &call->attrs));
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (record->inputs[i] == DW_NONE)
            call->inputs[i] = (dw__tensor){.rank = -1};
        else
            DW_RETURN_IF_FAILED(
                dw__value_tensor_at(graph, record->inputs[i], q->sizes, &call->inputs[i]));
    }
    for (uint32_t o = 0; o < record->output_count; o++)
        DW_RETURN_IF_FAILED(
            dw__value_tensor_at(graph, record->outputs[o], q->sizes, &call->outputs[o]));
    return DW_OK;
}

static bool has_mask_gradient(const dw_graph *graph) {
    for (size_t n = 0; n < graph->nodes.count; n++)
        if (dw_node_int(graph, (dw_node)n, DW_ATTR_KEY_MASK_GRADIENT, 0)) return true;
    return false;
}

static bool has_kernel(const question *q) {
    const bool on_gpu = q->target->context != NULL;
    const dw__kernel *kernel = dw__kernel_for(&q->call, on_gpu ? &q->target->gpu : NULL, NULL);
    if (!kernel || on_gpu) return kernel != NULL;
    /* The result of a product in 16 bits may be F32. */
    const dw__call *c = &q->call.call;
    const dw_dtype type = dw__op_is_matmul(c->op) ? c->inputs[0].dtype : c->outputs[0].dtype;
    const bool summed = dw__call_int(c, DW_ATTR_KEY_MASK_GRADIENT, 0) != 0;
    return (!summed && !dw__dtype_is_half(type)) || !dw__kernel_is_reference(kernel);
}

/* Copies the reason of the first kernel that is for such operands and for this target, but not for the call. */
static void explain(const question *q, char *reason, size_t bytes) {
    const dw__gpu_target *gpu = &q->target->gpu;
    const dw__kernel *const *kernel = dw__kernel_candidates(q->call.call.op, true);
    for (; *kernel && reason[0] == '\0'; kernel++) {
        const dw_status status = (*kernel)->supports(*kernel, &q->call, gpu);
        if (status != DW_OK && status != DW_TYPE) snprintf(reason, bytes, "%s", dw_last_error());
    }
}

/* A node that cannot be described at these sizes stays as it is. */
static bool lacks_kernel(const dw_graph *graph, dw_node node, void *context) {
    question *q = context;
    for (size_t t = 0; t < DW_COUNT(typical_sizes); t++) {
        for (uint32_t i = 0; i < q->symbols; i++) q->sizes[i] = typical_sizes[t];
        if (describe(graph, node, q) != DW_OK) continue;
        if (!has_kernel(q)) return true;
    }
    return false;
}

static bool has_half(const dw_graph *graph) {
    for (size_t v = 0; v < graph->values.count; v++)
        if (dw__dtype_is_half(graph->values.items[v].dtype)) return true;
    return false;
}

static dw_status ask(const dw_graph *graph, const dw__target *target, question **made) {
    const uint32_t symbols = dw_graph_symbol_count(graph);
    question *q = dw__calloc(1, sizeof *q);
    if (q) q->sizes = dw__malloc((symbols + 1) * sizeof *q->sizes);
    if (q) q->memory = dw__arena_create();
    *made = q;
    if (!q || !q->sizes || !q->memory)
        return dw__fail_memory("the operations of a target", sizeof *q);
    q->symbols = symbols;
    q->target = target;
    return DW_OK;
}

static void forget(question *q) {
    if (!q) return;
    dw__arena_destroy(q->memory);
    dw__free(q->sizes);
    dw__free(q);
}

dw_status dw__expand_for_target(dw_graph **graph, const dw__target *target, bool *tried) {
    dw_status status = DW_OK;
    question *q = NULL;
    *tried = target->context || has_half(*graph) || has_mask_gradient(*graph);
    if (!*tried) return DW_OK;
    DW_TRY(ask(*graph, target, &q));
    DW_TRY(dw__expand_where(graph, lacks_kernel, q));
    if (!target->context) DW_TRY(dw__widen_products(graph, lacks_kernel, q));
cleanup:
    forget(q);
    return status;
}

/* Returns whether a kernel for the call is there and passes its first-use check. Otherwise the product is simulated, so
 * that no plan fails later, and `reason` has the first kernel's failure. The sizes of a plan may want another variant,
 * which is checked when the plan is made. */
static bool passes_check(const question *q, char *reason, size_t bytes) {
    const dw__target *target = q->target;
    const dw__kernel *kernel = NULL;
    if (!dw__call_has_few_kernels(&q->call.call)) return true;
    while ((kernel = dw__kernel_for(&q->call, &target->gpu, kernel)))
        if (dw__gpu_kernel_runs(kernel, &q->call, target->context) == DW_OK)
            return true;
        else if (reason[0] == '\0')
            snprintf(reason, bytes, "%s", dw_last_error());
    return false;
}

/* Whether FP8 tensor cores multiply a product of fp8-block, whose scales are in F32. Every target has a kernel for it,
 * which says nothing. The rows of a batch that are known only to a plan are taken to be a multiple of 128 here. */
static bool multiplies_fp8_block(const question *q, char *reason, size_t bytes) {
    const dw__target *target = q->target;
    for (const dw__kernel *const *each = dw__kernels_of_fp8_blocks(); *each; each++) {
        const dw__kernel *kernel = *each;
        if (kernel->supports(kernel, &q->call, &target->gpu) == DW_OK &&
            dw__gpu_kernel_runs(kernel, &q->call, target->context) == DW_OK)
            return true;
        if (reason[0] == '\0') snprintf(reason, bytes, "%s", dw_last_error());
    }
    return false;
}

static bool computes_codes(const dw_graph *graph, dw_node node, void *context) {
    question *q = context;
    char reason[sizeof q->products->reason] = "";
    for (uint32_t i = 0; i < q->symbols; i++) q->sizes[i] = typical_sizes[0];
    if (describe(graph, node, q) == DW_OK && dw__call_has_f32_scales(&q->call.call)) {
        if (multiplies_fp8_block(q, reason, sizeof reason)) return true;
    } else if (lacks_kernel(graph, node, q)) {
        explain(q, reason, sizeof reason);
    } else if (passes_check(q, reason, sizeof reason)) {
        return true;
    }
    if (q->products->reason[0] == '\0' && dw__call_decides_product(&q->call.call))
        memcpy(q->products->reason, reason, sizeof reason);
    return false;
}

dw_status dw__multiply_codes_for_target(dw_graph **graph, const dw__target *target,
                                        bool fast_accumulation, dw__code_products *products,
                                        bool *changed) {
    dw_status status = DW_OK;
    question *q = NULL;
    *changed = false;
    if (!target->context) return DW_OK;
    DW_TRY(ask(*graph, target, &q));
    q->products = products;
    DW_TRY(dw__multiply_codes(graph, computes_codes, q, fast_accumulation, products, changed));
cleanup:
    forget(q);
    return status;
}
