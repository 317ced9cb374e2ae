/* The graph: a program over tensors in static single assignment form.
 *
 *     dw_graph *graph;
 *     dw_dim batch;
 *     dw_value x, w, y;
 *     dw_graph_create(&graph);
 *     dw_graph_symbol(graph, "B", &batch);
 *     dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 2, (dw_dim[]){batch, 64}, &x);
 *     dw_graph_leaf(graph, DW_ROLE_PARAMETER, "w", DW_F32, 2, (dw_dim[]){32, 64}, &w);
 *     dw_graph_apply(graph, DW_OP_LINEAR, 2, (dw_value[]){x, w}, 0, NULL, &y); // y is [B, 32]
 *     dw_graph_add_output(graph, y);
 *     dw_graph_destroy(graph);
 *
 * A graph owns values (dtype, shape, role) and nodes (operation, inputs, outputs, attributes, region, layer, module
 * path). Nodes are in topological order. An operation is a primitive, or a composite that is defined by its expansion
 * into primitives (ops.h).
 *
 * A dimension (dw_dim) is a non-negative number, or a negative handle of a polynomial with integer coefficients over
 * the graph's symbols ("B", "S") and over quotients that are rounded up ("ceil(B*S/32)"). Polynomials are unique per
 * graph, so two dims of one graph are the same polynomial exactly if their handles are equal.
 *
 * A graph must not be changed by one thread while another uses it; any number of threads may read it. Returned strings
 * belong to the graph. The result of passing a dim, value or node of another graph is undefined.
 */
#ifndef DEEPWELL_GRAPH_H
#define DEEPWELL_GRAPH_H

#include "deepwell/dtype.h"
#include "deepwell/ops.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_graph dw_graph;
typedef uint32_t dw_value; /* index of a value */
typedef uint32_t dw_node;  /* index of a node, in topological order */
typedef int64_t dw_dim;
#define DW_NONE UINT32_MAX /* no value: an absent optional input */
#define DW_MAX_RANK 8
#define DW_MAX_INPUTS 64 /* of one node: concat and fused have the most */
#define DW_MAX_OUTPUTS 64

/* Numbers of `quantization_error` for one operand, and for the six operands of a quantized layer. */
enum { DW_OPERAND_STATISTICS = 5, DW_LAYER_STATISTICS = 30 };

typedef enum dw_role {
    DW_ROLE_INPUT,     /* bound at each call */
    DW_ROLE_PARAMETER, /* trained */
    DW_ROLE_CONSTANT,  /* a buffer of the model: bound, not trained */
    DW_ROLE_SEED,      /* i64[2]: Philox key and offset of this call */
    DW_ROLE_STATISTICS, /* f64[30]: its gradient is the rounding of a layer's operands (deepwell/precision.h) */
    DW_ROLE_GRADIENT,   /* gradient of an output, bound at backward */
    DW_ROLE_ACTIVATION, /* result of a node */
    DW_ROLE_COUNT
} dw_role;
DW_API const char *dw_role_name(dw_role role); /* "input" "parameter" ... */

typedef enum dw_region {
    DW_REGION_NONE,
    DW_REGION_EMBED,
    DW_REGION_ATTN,
    DW_REGION_MLP,
    DW_REGION_NORM,
    DW_REGION_ROUTER,
    DW_REGION_EXPERTS,
    DW_REGION_HEAD,
    DW_REGION_LOSS,
    DW_REGION_COUNT
} dw_region;
DW_API const char *dw_region_name(dw_region region); /* "none" "embed" ... */

/* ---- attributes ---------------------------------------------------------------------------- */

typedef enum dw_attr_kind {
    DW_ATTR_INT,    /* .integer (flags are 0 or 1) */
    DW_ATTR_FLOAT,  /* .number */
    DW_ATTR_DTYPE,  /* .integer is a dw_dtype */
    DW_ATTR_STRING, /* .string */
    DW_ATTR_INTS,   /* .list, .count */
    DW_ATTR_DIMS    /* .list of dw_dim, .count */
} dw_attr_kind;

/* key, name in text and JSON, kind */
#define DW_ATTR_MAP(X)                                                                             \
    X(AXIS, "axis", INT)                                                                           \
    X(AXES, "axes", INTS)                                                                          \
    X(KEEP, "keep", INT)                                                                           \
    X(SHAPE, "shape", DIMS)                                                                        \
    X(PERM, "perm", INTS)                                                                          \
    X(START, "start", DIMS)                                                                        \
    X(LIMIT, "limit", DIMS)                                                                        \
    X(STEP, "step", INTS)                                                                          \
    X(LOW, "low", DIMS)                                                                            \
    X(HIGH, "high", DIMS)                                                                          \
    X(SIZE, "size", DIMS)                                                                          \
    X(DTYPE, "dtype", DTYPE)                                                                       \
    X(VALUE, "value", FLOAT)                                                                       \
    X(EPS, "eps", FLOAT)                                                                           \
    X(SCALE, "scale", FLOAT)                                                                       \
    X(P, "p", FLOAT)                                                                               \
    X(STREAM, "stream", INT)                                                                       \
    X(CAUSAL, "causal", INT)                                                                       \
    X(WINDOW, "window", INT)                                                                       \
    X(SOFTCAP, "softcap", FLOAT)                                                                   \
    X(MASK_GRADIENT, "mask_gradient", INT)                                                         \
    X(TRANSPOSE_A, "transpose_a", INT)                                                             \
    X(TRANSPOSE_B, "transpose_b", INT)                                                             \
    X(TRANSPOSE_W, "transpose_w", INT)                                                             \
    X(APPROXIMATE, "approximate", STRING)                                                          \
    X(REDUCTION, "reduction", STRING)                                                              \
    X(IGNORE_INDEX, "ignore_index", INT)                                                           \
    X(LABEL_SMOOTHING, "label_smoothing", FLOAT)                                                   \
    X(PADDING_INDEX, "padding_index", INT)                                                         \
    X(INTERLEAVED, "interleaved", INT)                                                             \
    X(TRANSPOSED, "transposed", INT)                                                               \
    X(DESCENDING, "descending", INT)                                                               \
    X(REVERSE, "reverse", INT)                                                                     \
    X(LR, "lr", FLOAT)                                                                             \
    X(BETA1, "beta1", FLOAT)                                                                       \
    X(BETA2, "beta2", FLOAT)                                                                       \
    X(WEIGHT_DECAY, "weight_decay", FLOAT)                                                         \
    X(BODY, "body", STRING)                                                                        \
    X(SCHEME, "scheme", STRING)                                                                    \
    X(FORWARD_X, "forward_x", STRING)                                                              \
    X(FORWARD_W, "forward_w", STRING)                                                              \
    X(DGRAD_DY, "dgrad_dy", STRING)                                                                \
    X(DGRAD_W, "dgrad_w", STRING)                                                                  \
    X(WGRAD_DY, "wgrad_dy", STRING)                                                                \
    X(WGRAD_X, "wgrad_x", STRING)                                                                  \
    X(SQUARE, "square", INT)                                                                       \
    X(HADAMARD, "hadamard", INT)                                                                   \
    X(STOCHASTIC, "stochastic", INT)                                                               \
    X(SCALE_RULE, "scale_rule", STRING)                                                            \
    X(FAST_ACCUMULATION, "fast_accumulation", INT)

typedef enum dw_attr_key {
#define DW_ATTR_ENUM(key, name, kind) DW_ATTR_KEY_##key,
    DW_ATTR_MAP(DW_ATTR_ENUM)
#undef DW_ATTR_ENUM
        DW_ATTR_KEY_COUNT
} dw_attr_key;
DW_API const char *dw_attr_name(dw_attr_key key);
DW_API dw_attr_kind dw_attr_kind_of(dw_attr_key key);

typedef struct dw_attr {
    dw_attr_key key;
    uint32_t count; /* of list */
    int64_t integer;
    double number;
    const char *string;
    const int64_t *list;
} dw_attr;
/* Attributes for calls: dw_graph_append(g, DW_OP_PERMUTE, 1, &x, 1, (dw_attr[]){dw_attr_list(...)}, &node).
 * Strings and lists are copied by the graph. */
static inline dw_attr dw_attr_int(dw_attr_key key, int64_t integer) {
    dw_attr attr = {key, 0, integer, 0.0, NULL, NULL};
    return attr;
}
static inline dw_attr dw_attr_float(dw_attr_key key, double number) {
    dw_attr attr = {key, 0, 0, number, NULL, NULL};
    return attr;
}
static inline dw_attr dw_attr_string(dw_attr_key key, const char *string) {
    dw_attr attr = {key, 0, 0, 0.0, string, NULL};
    return attr;
}
static inline dw_attr dw_attr_list(dw_attr_key key, uint32_t count, const int64_t *list) {
    dw_attr attr = {key, count, 0, 0.0, NULL, list};
    return attr;
}

/* ---- lifecycle ----------------------------------------------------------------------------- */

DW_API dw_status dw_graph_create(dw_graph **graph);
/* Makes a copy, which the caller destroys. */
DW_API dw_status dw_graph_clone(const dw_graph *graph, dw_graph **copy);
DW_API void dw_graph_destroy(dw_graph *graph); /* may be NULL */

/* ---- dimensions ---------------------------------------------------------------------------- */

/* The symbol called `name` ([A-Za-z_][A-Za-z0-9_]*). It is created on first use. DW_INVALID_ARGUMENT: not such a
 * name. DW_UNSUPPORTED: the graph has too many symbols. */
DW_API dw_status dw_graph_symbol(dw_graph *graph, const char *name, dw_dim *dim);
DW_API uint32_t dw_graph_symbol_count(const dw_graph *graph);
DW_API const char *dw_graph_symbol_name(const dw_graph *graph, uint32_t index);
/* Arithmetic of dims. DW_INVALID_ARGUMENT: a dim is of another graph. DW_SHAPE: a coefficient exceeds 2^63.
 * DW_UNSUPPORTED: there are too many terms. */
DW_API dw_status dw_dim_add(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *sum);
DW_API dw_status dw_dim_sub(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *difference);
DW_API dw_status dw_dim_mul(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *product);
/* Exact polynomial quotient. DW_SHAPE: the division leaves a remainder. */
DW_API dw_status dw_dim_div(dw_graph *graph, dw_dim a, dw_dim b, dw_dim *quotient);
/* Value at symbol sizes (one per symbol, in order). DW_SHAPE: it is negative or over 2^62. */
DW_API dw_status dw_dim_eval(const dw_graph *graph, dw_dim dim, const int64_t *sizes,
                             int64_t *value);
/* Writes "B*S + 1" into buffer. Returns the full length and truncates, like snprintf. */
DW_API size_t dw_dim_text(const dw_graph *graph, dw_dim dim, char *buffer, size_t bytes);
/* Reads what dw_dim_text writes: sums of products of integers, symbols and quotients. Creates new symbols. DW_PARSE. */
DW_API dw_status dw_dim_parse(dw_graph *graph, const char *text, dw_dim *dim);

/* ---- building ------------------------------------------------------------------------------ */

/* Adds a value that no node computes. `name` must be new in the graph. DW_INVALID_ARGUMENT: the name or role is not
 * valid, or a dim is of another graph. DW_TYPE: there is no such dtype. DW_SHAPE: the rank is out of range, a dim is
 * negative, or a seed is not i64[2]. */
DW_API dw_status dw_graph_leaf(dw_graph *graph, dw_role role, const char *name, dw_dtype dtype,
                               int rank, const dw_dim *shape, dw_value *value);
/* Appends a node. The operation table (ops.h) gives shapes and dtypes of its outputs. If a rule of the table is broken,
 * the call fails with DW_INVALID_ARGUMENT, DW_SHAPE, DW_TYPE or DW_UNSUPPORTED, and the graph is unchanged. `node` may
 * be NULL. */
DW_API dw_status dw_graph_append(dw_graph *graph, dw_op op, uint32_t input_count,
                                 const dw_value *inputs, uint32_t attr_count, const dw_attr *attrs,
                                 dw_node *node);
/* Appends a node and returns its output 0. Fails as dw_graph_append does. */
DW_API dw_status dw_graph_apply(dw_graph *graph, dw_op op, uint32_t input_count,
                                const dw_value *inputs, uint32_t attr_count, const dw_attr *attrs,
                                dw_value *output);
/* Sets the origin of nodes that are appended from now on. `layer` -1: none. `module` may be NULL.
 * DW_INVALID_ARGUMENT: an unknown region, or a layer below -1. */
DW_API dw_status dw_graph_set_origin(dw_graph *graph, dw_region region, int layer,
                                     const char *module);
/* Nodes that are appended from now on belong to the backward pass (nonzero) or to the forward pass (0). */
DW_API void dw_graph_set_backward(dw_graph *graph, int backward);
/* Appends `value` to the graph's outputs. The same value may be an output more than once. DW_INVALID_ARGUMENT: there is
 * no such value. */
DW_API dw_status dw_graph_add_output(dw_graph *graph, dw_value value);

/* ---- queries ------------------------------------------------------------------------------- */

DW_API uint32_t dw_graph_value_count(const dw_graph *graph);
DW_API uint32_t dw_graph_node_count(const dw_graph *graph);
DW_API uint32_t dw_graph_output_count(const dw_graph *graph);
DW_API dw_value dw_graph_output(const dw_graph *graph, uint32_t index);
DW_API uint32_t dw_graph_leaf_count(const dw_graph *graph);
DW_API dw_value dw_graph_leaf_at(const dw_graph *graph, uint32_t index); /* in order of creation */
DW_API dw_value dw_graph_find(const dw_graph *graph, const char *name);  /* DW_NONE if absent */

DW_API const char *dw_value_name(const dw_graph *graph, dw_value value);
DW_API dw_dtype dw_value_dtype(const dw_graph *graph, dw_value value);
DW_API dw_role dw_value_role(const dw_graph *graph, dw_value value);
DW_API int dw_value_rank(const dw_graph *graph, dw_value value);
DW_API const dw_dim *dw_value_shape(const dw_graph *graph, dw_value value);
DW_API dw_node dw_value_node(const dw_graph *graph, dw_value value); /* DW_NONE for a leaf */

DW_API dw_op dw_node_op(const dw_graph *graph, dw_node node);
DW_API uint32_t dw_node_input_count(const dw_graph *graph, dw_node node);
DW_API dw_value dw_node_input(const dw_graph *graph, dw_node node, uint32_t index);
DW_API uint32_t dw_node_output_count(const dw_graph *graph, dw_node node);
DW_API dw_value dw_node_output(const dw_graph *graph, dw_node node, uint32_t index);
/* Returns the attribute, or NULL if the node does not have the key. */
DW_API const dw_attr *dw_node_attr(const dw_graph *graph, dw_node node, dw_attr_key key);
DW_API int64_t dw_node_int(const dw_graph *graph, dw_node node, dw_attr_key key, int64_t absent);
DW_API double dw_node_float(const dw_graph *graph, dw_node node, dw_attr_key key, double absent);
DW_API dw_region dw_node_region(const dw_graph *graph, dw_node node);
DW_API int dw_node_layer(const dw_graph *graph, dw_node node); /* -1: none */
DW_API const char *dw_node_module(const dw_graph *graph, dw_node node);
DW_API int dw_node_is_backward(const dw_graph *graph, dw_node node);

/* Work of one node at given symbol sizes. `flops`: floating-point operations; a multiply-add counts as two. `bytes`:
 * the least that must move, with each distinct input and output counted once. Fails as dw_dim_eval does, and with
 * DW_INVALID_ARGUMENT for an unknown node. */
typedef struct dw_cost {
    double flops;
    double bytes;
} dw_cost;
DW_API dw_status dw_node_cost(const dw_graph *graph, dw_node node, const int64_t *sizes,
                              dw_cost *cost);
DW_API dw_status dw_graph_cost(const dw_graph *graph, const int64_t *sizes, dw_cost *cost);

/* Checks every rule of the operation table, of SSA and of the graph's own data. The message names the node.
 * DW_INTERNAL: the graph's data contradict each other. A broken rule of the table has the status of dw_graph_append. */
DW_API dw_status dw_graph_verify(const dw_graph *graph);

/* ---- text and JSON: both formats read back exactly what was written --------------------------- */

/* Free *text with dw_text_free. Reading: DW_PARSE names line or member; an operation, shape or dtype that the table
 * does not allow fails as dw_graph_append does. */
DW_API dw_status dw_graph_to_text(const dw_graph *graph, char **text);
DW_API dw_status dw_graph_from_text(const char *text, dw_graph **graph);
DW_API dw_status dw_graph_to_json(const dw_graph *graph, char **text);
DW_API dw_status dw_graph_from_json(const char *text, size_t bytes, dw_graph **graph);
DW_API void dw_text_free(char *text);

/* ---- transformations ------------------------------------------------------------------------- */

/* Reverse-mode differentiation: appends backward nodes. `output_grads[i]` is the gradient of `outputs[i]`, a value of
 * the same shape and dtype; make it with dw_graph_leaf(..., DW_ROLE_GRADIENT, ...). `grads[j]` becomes the gradient of
 * wrt[j], or DW_NONE if no output depends on it through a differentiable path. DW_UNSUPPORTED names a node that has no
 * gradient. */
DW_API dw_status dw_graph_gradient(dw_graph *graph, uint32_t output_count, const dw_value *outputs,
                                   const dw_value *output_grads, uint32_t wrt_count,
                                   const dw_value *wrt, dw_value *grads);

typedef enum dw_pass {
    DW_PASS_DEAD_CODE, /* removes nodes that no output needs; leaves stay */
    DW_PASS_COMMON,    /* merges nodes with equal operation, inputs and attributes */
    DW_PASS_FOLD,      /* folds constants and identities (x+0, x*1, reshape of reshape, ...) */
    DW_PASS_RECOGNIZE, /* replaces chains of primitives by the composite that they form */
    DW_PASS_EXPAND,    /* replaces every composite by primitives */
    DW_PASS_FUSE,      /* replaces chains of elementwise nodes by `fused` nodes */
    DW_PASS_COUNT
} dw_pass;
DW_API const char *dw_pass_name(dw_pass pass);
/* Replaces *graph by the transformed graph, which is verified. On failure *graph is unchanged. The order of leaves and
 * outputs and the names of leaves are kept; values and nodes are renumbered. DW_INVALID_ARGUMENT: an unknown pass.
 * DW_INTERNAL: the result does not pass dw_graph_verify. */
DW_API dw_status dw_graph_run_pass(dw_graph **graph, dw_pass pass);

#ifdef __cplusplus
}
#endif
#endif
