/* The graph interpreter (see interpret.h). A value lives from its node to its last use. The caller owns the
 * leaves, except copies made in F64. */
#include "kernel/reference/interpret.h"
#include "graph/internal.h"
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include <inttypes.h>
#include <string.h>

typedef struct interpreter {
    const dw_graph *graph;
    const int64_t *sizes;
    bool high_precision;
    dw__tensor *values; /* indexed by value */
    void **owned;       /* indexed by value: block to free at the last use, or NULL */
    uint32_t *uses;     /* indexed by value: remaining readers (nodes and outputs) */
    dw__call *call;     /* the current node's call; too large for a recursive stack */
    dw__arena *arena;   /* memory of attributes */
} interpreter;

static dw_status allocate(dw__tensor *tensor) {
    size_t bytes = dw__tensor_bytes(tensor);
    tensor->data = dw__malloc_aligned(bytes);
    return tensor->data ? DW_OK : dw__fail_memory("a value of the interpreted graph", bytes);
}

/* The dtype that holds a value of the graph. */
static dw_dtype held_dtype(const interpreter *self, dw_dtype dtype) {
    return self->high_precision && dw__dtype_is_float(dtype) ? DW_F64 : dtype;
}

/* ---- leaves ---------------------------------------------------------------------------------- */

static dw_status check_leaf(const interpreter *self, dw_value value, const dw__tensor *wanted,
                            const dw__tensor *given) {
    const char *name = dw_value_name(self->graph, value);
    bool as_f64 = held_dtype(self, wanted->dtype) == DW_F64 && given->dtype == DW_F64;
    if (given->dtype != wanted->dtype && !as_f64)
        return dw__fail(DW_TYPE, "leaf %s is %s in the graph but the tensor given is %s; pass %s",
                        name, dw_dtype_name(wanted->dtype), dw_dtype_name(given->dtype),
                        dw_dtype_name(wanted->dtype));
    if (given->rank != wanted->rank)
        return dw__fail(DW_SHAPE,
                        "leaf %s has rank %d in the graph but the tensor given has rank "
                        "%d; pass the leaf's shape",
                        name, wanted->rank, given->rank);
    for (int axis = 0; axis < wanted->rank; axis++)
        if (given->shape[axis] != wanted->shape[axis])
            return dw__fail(DW_SHAPE,
                            "leaf %s: axis %d is %" PRId64 " at these sizes but the tensor "
                            "given has %" PRId64 "; pass the leaf's shape",
                            name, axis, wanted->shape[axis], given->shape[axis]);
    if (!given->data && dw__tensor_count(given) > 0)
        return dw__fail(DW_INVALID_ARGUMENT, "leaf %s is used but its tensor has no data; bind it",
                        name);
    return DW_OK;
}

static dw_status bind_leaf(interpreter *self, dw_value value, const dw__tensor *given) {
    dw__tensor wanted;
    if (self->uses[value] == 0) return DW_OK;
    DW_RETURN_IF_FAILED(dw__value_tensor_at(self->graph, value, self->sizes, &wanted));
    DW_RETURN_IF_FAILED(check_leaf(self, value, &wanted, given));
    if (held_dtype(self, wanted.dtype) == given->dtype) {
        self->values[value] = *given;
        return DW_OK;
    }
    wanted.dtype = DW_F64;
    DW_RETURN_IF_FAILED(allocate(&wanted));
    self->owned[value] = wanted.data;
    self->values[value] = wanted;
    self->call->input_count = self->call->output_count = 1;
    self->call->inputs[0] = *given;
    self->call->outputs[0] = wanted;
    return dw__reference_cast(self->call, NULL);
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static void release_use(interpreter *self, dw_value value) {
    if (value == DW_NONE || --self->uses[value] > 0) return;
    dw__free_aligned(self->owned[value]);
    self->owned[value] = NULL;
    self->values[value].data = NULL;
}

static dw_status evaluate(const interpreter *self, const dw_dtype *input_dtypes) {
    const dw__call *call = self->call;
    if (call->op == DW_OP_FUSED)
        return dw__fused_evaluate(call, input_dtypes, self->high_precision);
    if (dw_op_is_composite(call->op))
        return dw__expansion_evaluate(call, input_dtypes, self->high_precision);
    for (const dw__kernel *const *kernel = dw__kernels_reference; *kernel; kernel++)
        if ((*kernel)->op == call->op) return (*kernel)->run(call, NULL);
    return dw__fail(DW_INTERNAL, "the reference has no entry for %s", dw_op_name(call->op));
}

static dw_status run_node(interpreter *self, dw_node node) {
    const dw_graph *graph = self->graph;
    const dw__node_record *record = &graph->nodes.items[node];
    dw_dtype input_dtypes[DW_MAX_INPUTS];
    dw__call *call = self->call;
    memset(call, 0, sizeof *call);
    call->op = record->op;
    call->attr_count = record->attr_count;
    DW_RETURN_IF_FAILED(dw__node_attrs_at(self->arena, graph, node, self->sizes, &call->attrs));
    call->input_count = record->input_count;
    for (uint32_t i = record->input_count; i < DW_MAX_INPUTS; i++) call->inputs[i].rank = -1;
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw_value value = record->inputs[i];
        input_dtypes[i] = value == DW_NONE ? DW_F32 : dw_value_dtype(graph, value);
        if (value == DW_NONE)
            call->inputs[i].rank = -1;
        else
            call->inputs[i] = self->values[value];
    }
    call->output_count = record->output_count;
    for (uint32_t i = 0; i < record->output_count; i++) {
        dw_value value = record->outputs[i];
        dw__tensor *out = &self->values[value];
        DW_RETURN_IF_FAILED(dw__value_tensor_at(graph, value, self->sizes, out));
        out->dtype = held_dtype(self, out->dtype);
        DW_RETURN_IF_FAILED(allocate(out));
        self->owned[value] = out->data;
        call->outputs[i] = *out;
    }
    dw_status status = evaluate(self, input_dtypes);
    if (status != DW_OK)
        return dw__fail_prefix(status, "node %" PRIu32 " (%s)", node, dw_op_name(record->op));
    for (uint32_t i = 0; i < record->input_count; i++) release_use(self, record->inputs[i]);
    for (uint32_t i = 0; i < record->output_count; i++) {
        self->uses[record->outputs[i]]++; /* results without readers are freed at once */
        release_use(self, record->outputs[i]);
    }
    return DW_OK;
}

/* ---- the whole graph ------------------------------------------------------------------------- */

static void count_uses(interpreter *self) {
    const dw_graph *graph = self->graph;
    for (dw_node node = 0; node < dw_graph_node_count(graph); node++)
        for (uint32_t i = 0; i < dw_node_input_count(graph, node); i++) {
            dw_value value = dw_node_input(graph, node, i);
            if (value != DW_NONE) self->uses[value]++;
        }
    for (uint32_t i = 0; i < dw_graph_output_count(graph); i++)
        self->uses[dw_graph_output(graph, i)]++;
}

/* Every output gets its own block, even if two outputs are one value or an output is a leaf. */
static dw_status copy_outputs(interpreter *self, dw__tensor *outputs) {
    for (uint32_t i = 0; i < dw_graph_output_count(self->graph); i++) {
        dw__tensor *value = &self->values[dw_graph_output(self->graph, i)];
        outputs[i] = *value;
        dw__tensor_set_contiguous(&outputs[i]);
        outputs[i].data = NULL;
        DW_RETURN_IF_FAILED(allocate(&outputs[i]));
        dw__tensor_copy(&outputs[i], value);
    }
    return DW_OK;
}

static void destroy(interpreter *self, uint32_t value_count) {
    for (uint32_t i = 0; self->owned && i < value_count; i++) dw__free_aligned(self->owned[i]);
    dw__free(self->values);
    dw__free(self->owned);
    dw__free(self->uses);
    dw__free(self->call);
    if (self->arena) dw__arena_destroy(self->arena);
}

dw_status dw__interpret(const dw_graph *graph, const int64_t *sizes, const dw__tensor *leaves,
                        dw__tensor *outputs, const dw__interpret_options *options) {
    uint32_t value_count = dw_graph_value_count(graph);
    uint32_t output_count = dw_graph_output_count(graph);
    interpreter self = {graph, sizes, options && options->high_precision, NULL, NULL, NULL,
                        NULL,  NULL};
    dw_status status = DW_OK;
    for (uint32_t i = 0; i < output_count; i++) outputs[i].data = NULL;
    self.values = dw__calloc(value_count, sizeof *self.values);
    self.owned = dw__calloc(value_count, sizeof *self.owned);
    self.uses = dw__calloc(value_count, sizeof *self.uses);
    self.call = dw__calloc(1, sizeof *self.call);
    self.arena = dw__arena_create();
    if (!self.values || !self.owned || !self.uses || !self.call || !self.arena)
        DW_TRY(dw__fail_memory("the interpreter's tables", value_count * sizeof *self.values));
    count_uses(&self);
    for (uint32_t i = 0; i < dw_graph_leaf_count(graph); i++)
        DW_TRY(bind_leaf(&self, dw_graph_leaf_at(graph, i), &leaves[i]));
    for (dw_node node = 0; node < dw_graph_node_count(graph); node++) DW_TRY(run_node(&self, node));
    DW_TRY(copy_outputs(&self, outputs));
cleanup:
    for (uint32_t i = 0; status != DW_OK && i < output_count; i++) {
        dw__free_aligned(outputs[i].data);
        outputs[i].data = NULL;
    }
    destroy(&self, value_count);
    return status;
}
