/* Work of each operation at given symbol sizes.
 *
 * flops: a multiply-add counts as two. An elementwise primitive counts one per element, whether it is an
 * addition or a logarithm; a composite counts the operations of its formula (the tables below). Attention
 * counts only its matmuls, as the literature does, over the (query, key) pairs that causality and window
 * leave. A mask operand does not reduce the count, because its content is unknown.
 *
 * bytes: the minimum traffic between memory and processor: each distinct operand and each result once. Views
 * move nothing. A gather reads only the rows that it selects. grouped_linear and segment_linear read at
 * most one matrix per row, and at most all of them. */
#include "graph/attention_work.h"
#include "graph/body.h"
#include "graph/op_rules.h"
#include <math.h>

/* ---- sizes --------------------------------------------------------------------------------- */

/* Inputs of a cost rule. The first failure sticks. */
typedef struct measure {
    const dw_graph *graph;
    const dw__node_record *node;
    const int64_t *sizes;
    dw_status status;
} measure;

static measure measure_of(const dw_graph *graph, dw_node node, const int64_t *sizes) {
    return (measure){graph, &graph->nodes.items[node], sizes, DW_OK};
}

static double size_of_dim(measure *m, dw_dim dim) {
    int64_t size = 0;
    if (m->status == DW_OK) m->status = dw_dim_eval(m->graph, dim, m->sizes, &size);
    return (double)size;
}

static double elements(measure *m, dw_value value) {
    double product = 1;
    const dw__value_record *record = &m->graph->values.items[value];
    for (int i = 0; i < record->rank; i++) product *= size_of_dim(m, record->shape[i]);
    return product;
}

static double bytes_of(measure *m, dw_value value) {
    return elements(m, value) * dw_dtype_bits(m->graph->values.items[value].dtype) / 8.0;
}

static dw_value input(const measure *m, uint32_t index) { return m->node->inputs[index]; }
static dw_value output(const measure *m, uint32_t index) { return m->node->outputs[index]; }

static double dim_of(measure *m, dw_value value, int axis) {
    return size_of_dim(m, m->graph->values.items[value].shape[axis]);
}

static double last_dim(measure *m, dw_value value) {
    int rank = m->graph->values.items[value].rank;
    return rank > 0 ? dim_of(m, value, rank - 1) : 1;
}

static double bytes_of_outputs(measure *m) {
    double bytes = 0;
    for (uint32_t i = 0; i < m->node->output_count; i++) bytes += bytes_of(m, output(m, i));
    return bytes;
}

/* Counts each distinct operand and each result once. */
static double bytes_once(measure *m) {
    double bytes = bytes_of_outputs(m);
    for (uint32_t i = 0; i < m->node->input_count; i++) {
        bool counted = input(m, i) == DW_NONE;
        for (uint32_t k = 0; k < i; k++) counted |= input(m, k) == input(m, i);
        if (!counted) bytes += bytes_of(m, input(m, i));
    }
    return bytes;
}

static dw_status give(const measure *m, double flops, double bytes, dw_cost *cost) {
    if (m->status != DW_OK) return m->status;
    *cost = (dw_cost){flops, bytes};
    return DW_OK;
}

static int64_t int_of(const measure *m, dw_attr_key key, int64_t absent) {
    const dw_attr *attr = dw__find_attr(m->node->attr_count, m->node->attrs, key);
    return attr ? attr->integer : absent;
}

/* ---- elementwise and data movement --------------------------------------------------------- */

/* Arithmetic operations per element. */
static double elementwise_flops(dw_op op) {
    switch (op) {
    case DW_OP_STOP_GRADIENT: return 0;
    case DW_OP_SILU: return 2;          /* sigmoid, multiply */
    case DW_OP_SWIGLU: return 3;        /* as silu, and multiply by up */
    case DW_OP_GELU: return 5;          /* scale, erf, add 1, halve, multiply */
    case DW_OP_SILU_BACKWARD: return 6; /* s, 1 - s, * x, + 1, * s, * dy */
    case DW_OP_GELU_BACKWARD:
        return 12;                /* distribution 4, density 4, x * density, sum, * dy, ... */
    case DW_OP_DROPOUT: return 2; /* compare, scale; Philox is integer work */
    default: return 1;
    }
}

dw_status dw__cost_elementwise(const dw_graph *graph, dw_node node, const int64_t *sizes,
                               dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    double flops = elementwise_flops(m.node->op) * elements(&m, output(&m, 0));
    return give(&m, flops, bytes_once(&m), cost);
}

dw_status dw__cost_fused(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    dw_dtype dtypes[DW_MAX_INPUTS];
    dw__body body;
    double flops = 0;
    for (uint32_t i = 0; i < m.node->input_count; i++)
        dtypes[i] = graph->values.items[input(&m, i)].dtype;
    const char *text = dw_node_attr(graph, node, DW_ATTR_KEY_BODY)->string;
    DW_RETURN_IF_FAILED(dw__body_parse(text, m.node->input_count, dtypes, &body));
    for (uint32_t i = 0; i < body.code_count; i++) flops += elementwise_flops(body.code[i].op);
    return give(&m, flops * elements(&m, output(&m, 0)), bytes_once(&m), cost);
}

dw_status dw__cost_move(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    bool view = dw__op_is_view(m.node->op);
    return give(&m, 0, view ? 0 : bytes_once(&m), cost);
}

/* Operand 0 is x, operand 1 the indices. A take reads as much of x as it has results. */
dw_status dw__cost_take(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    double bytes = bytes_of(&m, input(&m, 1)) + 2 * bytes_of_outputs(&m);
    return give(&m, 0, bytes, cost);
}

dw_status dw__cost_embedding(const dw_graph *graph, dw_node node, const int64_t *sizes,
                             dw_cost *cost) {
    return dw__cost_take(graph, node, sizes, cost);
}

/* Operand 1 holds the updates; each is one addition. */
dw_status dw__cost_scatter(const dw_graph *graph, dw_node node, const int64_t *sizes,
                           dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    return give(&m, elements(&m, input(&m, 1)), bytes_once(&m), cost);
}

/* ---- reducing ------------------------------------------------------------------------------ */

dw_status dw__cost_reduce(const dw_graph *graph, dw_node node, const int64_t *sizes,
                          dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    double flops = elements(&m, input(&m, 0));
    if (m.node->op == DW_OP_MEAN) flops += elements(&m, output(&m, 0));
    return give(&m, flops, bytes_once(&m), cost);
}

/* A merge sort compares log2(length) times per element. */
dw_status dw__cost_sort(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    double length = dim_of(&m, input(&m, 0), (int)int_of(&m, DW_ATTR_KEY_AXIS, 0));
    double flops = elements(&m, input(&m, 0)) * (length > 1 ? log2(length) : 0);
    return give(&m, flops, bytes_once(&m), cost);
}

dw_status dw__cost_softmax(const dw_graph *graph, dw_node node, const int64_t *sizes,
                           dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    bool forward = m.node->op == DW_OP_SOFTMAX || m.node->op == DW_OP_LOG_SOFTMAX;
    /* maximum, subtract, exponential, sum, divide; backward: multiply, sum, subtract, multiply */
    double flops = (forward ? 5 : 4) * elements(&m, input(&m, 0));
    return give(&m, flops, bytes_once(&m), cost);
}

/* ---- matmuls ------------------------------------------------------------------------------- */

dw_status dw__cost_matmul(const dw_graph *graph, dw_node node, const int64_t *sizes,
                          dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    int rank = graph->values.items[input(&m, 0)].rank;
    int inner = int_of(&m, DW_ATTR_KEY_TRANSPOSE_A, 0) ? rank - 2 : rank - 1;
    double flops = 2 * elements(&m, output(&m, 0)) * dim_of(&m, input(&m, 0), inner);
    return give(&m, flops, bytes_once(&m), cost);
}

/* Each element takes one scaling and one rounding. */
dw_status dw__cost_quantize(const dw_graph *graph, dw_node node, const int64_t *sizes,
                            dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    return give(&m, 2 * elements(&m, input(&m, 0)), bytes_once(&m), cost);
}

/* The same, and the sums over elements and their errors. */
dw_status dw__cost_quantization_error(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                      dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    return give(&m, 8 * elements(&m, input(&m, 0)), bytes_once(&m), cost);
}

dw_status dw__cost_linear(const dw_graph *graph, dw_node node, const int64_t *sizes,
                          dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    double results = elements(&m, output(&m, 0));
    double flops = 2 * results * last_dim(&m, input(&m, 0));
    if (input(&m, 2) != DW_NONE) flops += results;
    return give(&m, flops, bytes_once(&m), cost);
}

/* The data decide how many matrices the rows use: at most one for each row. Each used matrix is read once. */
dw_status dw__cost_grouped_linear(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                  dw_cost *cost) {
    enum { X, W, I, B }; /* I: indexes, or offsets of segment_linear */
    measure m = measure_of(graph, node, sizes);
    double results = elements(&m, output(&m, 0));
    double rows = dim_of(&m, output(&m, 0), 0), experts = dim_of(&m, input(&m, W), 0);
    double used = experts > 0 ? fmin(rows, experts) / experts : 0;
    double flops = 2 * results * last_dim(&m, input(&m, X));
    double bytes = bytes_of(&m, input(&m, X)) + used * bytes_of(&m, input(&m, W)) +
                   bytes_of(&m, input(&m, I)) + bytes_of_outputs(&m);
    if (input(&m, B) != DW_NONE) {
        flops += results;
        bytes += used * bytes_of(&m, input(&m, B));
    }
    return give(&m, flops, bytes, cost);
}

/* An outer product for each row. Matrices of groups without rows are written too, as zeros. */
dw_status dw__cost_segment_linear_backward_weight(const dw_graph *graph, dw_node node,
                                                  const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    /* Rows that an index repeats are multiplied as often. */
    const dw_value rows =
        m.node->input_count > 3 && input(&m, 3) != DW_NONE ? input(&m, 3) : input(&m, 0);
    double flops =
        2 * dim_of(&m, rows, 0) * last_dim(&m, input(&m, 0)) * last_dim(&m, input(&m, 1));
    return give(&m, flops, bytes_once(&m), cost);
}

/* Of each element of the T*k rows: one multiplication with a weight if there are any, one addition unless it is spread.
 * The backward multiplies for dx, and multiplies and adds for dw. */
dw_status dw__cost_rows(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    enum { X, PLACE, WEIGHT };
    measure m = measure_of(graph, node, sizes);
    const double rows = elements(&m, input(&m, PLACE)) * last_dim(&m, input(&m, X));
    double flops = 0;
    if (m.node->op == DW_OP_COMBINE_ROWS_BACKWARD)
        flops = 3;
    else
        flops = (input(&m, WEIGHT) != DW_NONE) + (m.node->op == DW_OP_COMBINE_ROWS);
    return give(&m, flops * rows, bytes_once(&m), cost);
}

/* ---- normalization, positions -------------------------------------------------------------- */

dw_status dw__cost_norm(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    /* layer: mean 1, variance 3, normalize 2; root mean square: 2, normalize 1; w and b: 1 each */
    double flops = m.node->op == DW_OP_LAYER_NORM ? 6 : 3;
    for (uint32_t i = 1; i < m.node->input_count; i++) flops += input(&m, i) != DW_NONE;
    return give(&m, flops * elements(&m, input(&m, 0)), bytes_once(&m), cost);
}

dw_status dw__cost_norm_backward(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                 dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    /* layer: normalized x 2, dw 2, db 1, two row sums 3, dx 5, times w 1; root mean square:
     * normalized x 1, dw 2, row sum 2, dx 3, times w 1 */
    double flops = m.node->op == DW_OP_LAYER_NORM_BACKWARD ? 13 : 8;
    if (input(&m, 2) != DW_NONE) flops += 1;
    return give(&m, flops * elements(&m, input(&m, 1)), bytes_once(&m), cost);
}

dw_status dw__cost_rope(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    double length = last_dim(&m, input(&m, 0));
    double rows = length > 0 ? elements(&m, input(&m, 0)) / length : 0;
    double rotated = rows * last_dim(&m, input(&m, 1));
    return give(&m, 3 * rotated, bytes_once(&m), cost); /* two multiplications and an addition */
}

/* ---- attention ----------------------------------------------------------------------------- */

/* (query, key) pairs of one head that causality and window allow (deepwell/ops.h). */
static double visible_pairs(measure *m) {
    double queries = dim_of(m, input(m, 0), 2), keys = dim_of(m, input(m, 1), 2);
    int64_t causal = int_of(m, DW_ATTR_KEY_CAUSAL, 0);
    int64_t window = int_of(m, DW_ATTR_KEY_WINDOW, -1);
    double shift = causal == 2 ? keys - queries : 0;
    double left = window < 0 ? INFINITY : (double)window - 1, right = causal ? 0 : INFINITY;
    return dw__attention_pairs(queries, keys, shift, left, right);
}

static dw_status attention_cost(measure *m, bool backward, dw_cost *cost) {
    double heads = dim_of(m, input(m, 0), 0) * dim_of(m, input(m, 0), 1);
    double flops = dw__attention_flops(heads * visible_pairs(m), dim_of(m, input(m, 0), 3),
                                       dim_of(m, input(m, 2), 3), backward);
    return give(m, flops, bytes_once(m), cost);
}

dw_status dw__cost_attention(const dw_graph *graph, dw_node node, const int64_t *sizes,
                             dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    return attention_cost(&m, false, cost);
}

dw_status dw__cost_attention_backward(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                      dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    return attention_cost(&m, true, cost);
}

/* ---- loss and optimizer -------------------------------------------------------------------- */

dw_status dw__cost_cross_entropy(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                 dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    /* forward: maximum, subtract, exponential, sum; backward: subtract, exponential, scale */
    double flops = m.node->op == DW_OP_CROSS_ENTROPY ? 4 : 3;
    return give(&m, flops * elements(&m, input(&m, 0)), bytes_once(&m), cost);
}

/* Number of logits of the head with operands x [T, K], w and b?: T * V. */
static double head_logits(measure *m) {
    enum { X, W };
    double size = last_dim(m, input(m, X));
    double vocabulary = size > 0 ? elements(m, input(m, W)) / size : 0;
    return elements(m, input(m, X)) / (size > 0 ? size : 1) * vocabulary;
}

/* Flops of linear(x, w, b). */
static double head_flops(measure *m) {
    enum { X = 0, B = 2 };
    return head_logits(m) * (2 * last_dim(m, input(m, X)) + (input(m, B) != DW_NONE));
}

dw_status dw__cost_linear_cross_entropy(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                        dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    return give(&m, head_flops(&m) + 4 * head_logits(&m), bytes_once(&m), cost);
}

/* Counts the gradient of the logits, its two matmuls and the sum for the bias. If the logits are not given,
 * it counts their recomputation too. */
dw_status dw__cost_linear_cross_entropy_backward(const dw_graph *graph, dw_node node,
                                                 const int64_t *sizes, dw_cost *cost) {
    enum { X = 0, LOGITS = 3 };
    measure m = measure_of(graph, node, sizes);
    double flops = head_logits(&m) * (3 + 4 * last_dim(&m, input(&m, X)) + 1);
    if (input(&m, LOGITS) == DW_NONE) flops += head_flops(&m);
    return give(&m, flops, bytes_once(&m), cost);
}

dw_status dw__cost_adamw(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    measure m = measure_of(graph, node, sizes);
    /* decay 1, first moment 3, second 4, root and its correction 3, update 3 */
    return give(&m, 14 * elements(&m, input(&m, 0)), bytes_once(&m), cost);
}

/* ---- public -------------------------------------------------------------------------------- */

static dw_status check_sizes(const dw_graph *graph, const int64_t *sizes) {
    uint32_t count = dw_graph_symbol_count(graph);
    if (count > 0 && !sizes)
        return dw__fail(DW_INVALID_ARGUMENT, "symbol sizes are NULL; the graph has %u symbols",
                        count);
    for (uint32_t i = 0; i < count; i++)
        if (sizes[i] < 0)
            return dw__fail(DW_INVALID_ARGUMENT, "symbol %s has size %lld; expected 0 or more",
                            dw_graph_symbol_name(graph, i), (long long)sizes[i]);
    return DW_OK;
}

dw_status dw_node_cost(const dw_graph *graph, dw_node node, const int64_t *sizes, dw_cost *cost) {
    DW_RETURN_IF_FAILED(check_sizes(graph, sizes));
    if (node >= graph->nodes.count)
        return dw__fail(DW_INVALID_ARGUMENT, "node %u does not exist; the graph has %zu", node,
                        graph->nodes.count);
    dw_status status = dw__op_table[graph->nodes.items[node].op].cost(graph, node, sizes, cost);
    if (status == DW_OK) return DW_OK;
    return dw__fail_prefix(status, "cost of node %u (%s \"%s\")", node,
                           dw_op_name(graph->nodes.items[node].op),
                           dw_value_name(graph, dw_node_output(graph, node, 0)));
}

dw_status dw_graph_cost(const dw_graph *graph, const int64_t *sizes, dw_cost *cost) {
    dw_cost sum = {0, 0};
    for (dw_node node = 0; node < graph->nodes.count; node++) {
        dw_cost one;
        DW_RETURN_IF_FAILED(dw_node_cost(graph, node, sizes, &one));
        sum.flops += one.flops;
        sum.bytes += one.bytes;
    }
    *cost = sum;
    return DW_OK;
}
