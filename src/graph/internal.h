/* What the graph layer's files share: the graph's insides, the operation table, rewriting. */
#ifndef DW_GRAPH_INTERNAL_H
#define DW_GRAPH_INTERNAL_H

#include "base/base.h"
#include "deepwell/graph.h"

typedef struct dw__value_record {
    const char *name; /* never NULL; "%7" style for unnamed activations */
    dw_dtype dtype;
    dw_role role;
    int rank;
    const dw_dim *shape; /* in the graph's arena: stays valid while values are added */
    dw_node node;        /* DW_NONE for a leaf */
    uint32_t index;      /* which output of that node */
} dw__value_record;

typedef struct dw__node_record {
    dw_op op;
    uint32_t input_count, output_count, attr_count;
    const dw_value *inputs; /* DW_NONE where an optional operand is absent */
    const dw_value *outputs;
    const dw_attr *attrs; /* sorted by key; memory in the graph's arena */
    dw_region region;
    int layer;          /* -1: none */
    const char *module; /* "" when unknown */
    bool backward;
} dw__node_record;

struct dw__dims; /* dims.c: symbols and interned polynomials */
dw_status dw__dims_create(struct dw__dims **dims);
/* Every handle means in the copy what it means in the original. */
dw_status dw__dims_clone(const struct dw__dims *from, struct dw__dims **copy);
void dw__dims_destroy(struct dw__dims *dims);

/* A number or a handle of this graph. */
bool dw__dim_exists(const dw_graph *graph, dw_dim dim);
/* A constant below zero (arithmetic can make one; no shape may have it). */
bool dw__dim_is_negative(const dw_graph *graph, dw_dim dim);

/* Text for messages, by value so that it can stand among printf's arguments. Truncated. */
typedef struct dw__words {
    char text[256];
} dw__words;
dw__words dw__dim_words(const dw_graph *graph, dw_dim dim);                      /* B*S + 1 */
dw__words dw__shape_words(const dw_graph *graph, int rank, const dw_dim *shape); /* [B, 4] */

struct dw_graph {
    dw__arena *arena; /* names, inputs, attrs: freed with the graph */
    struct dw__dims *dims;
    dw__map *names;
    struct {
        dw__value_record *items;
        size_t count, capacity;
    } values;
    struct {
        dw__node_record *items;
        size_t count, capacity;
    } nodes;
    struct {
        dw_value *items;
        size_t count, capacity;
    } outputs;
    struct {
        dw_value *items;
        size_t count, capacity;
    } leaves;
    dw_region region; /* origin of the nodes appended next */
    int layer;
    const char *module;
    bool backward;
    uint32_t next_name; /* number of the next automatic value name */
};

/* ---- the table ------------------------------------------------------------------------------- */

/* Output types of a node being built, filled by its row's infer(). */
typedef struct dw__inferred {
    uint32_t count;
    struct {
        dw_dtype dtype;
        int rank;
        dw_dim shape[DW_MAX_RANK];
    } outputs[DW_MAX_OUTPUTS];
} dw__inferred;

/* A node not yet in the graph: what infer() looks at. */
typedef struct dw__draft {
    dw_graph *graph; /* for values and dim arithmetic */
    dw_op op;
    uint32_t input_count;
    const dw_value *inputs;
    uint32_t attr_count;
    const dw_attr *attrs; /* sorted by key */
} dw__draft;

/* Adjoint of one node: given gradients of its outputs (DW_NONE: zero), appends nodes to `graph` and
 * fills input_grads (DW_NONE: no gradient), only where needed[i]. */
typedef dw_status (*dw__gradient_rule)(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                       const bool *needed, dw_value *input_grads);
/* Appends to `graph` primitives that compute what the node of `source` computes. `inputs` are the
 * node's operands as values of `graph`. The node's dims have been imported (attrs and shapes are
 * read through dw__import). `outputs` receives one value per output. */
typedef dw_status (*dw__expansion)(dw_graph *graph, const dw_graph *source, dw_node node,
                                   const dw_value *inputs, dw_value *outputs);
typedef dw_status (*dw__cost_rule)(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                   dw_cost *cost);

typedef enum dw__op_class { DW__PRIMITIVE, DW__COMPOSITE } dw__op_class;

/* Element types of an elementwise operation: what its operands may be -> what its result is.
 * Shape inference and fused bodies both read it. */
typedef enum dw__typing {
    DW__NOT_ELEMENTWISE,
    DW__FLOAT_TO_SAME,
    DW__NUMBER_TO_SAME, /* float or integer */
    DW__ANY_TO_SAME,
    DW__BOOL_TO_SAME,
    DW__FLOAT_TO_BOOL,
    DW__NUMBER_TO_BOOL,
    DW__ANY_TO_BOOL,
    DW__CHOICE,     /* select: bool, then two of one dtype */
    DW__CONVERSION, /* cast: anything to the dtype attribute */
    DW__WITH_SEED   /* dropout: float; the second operand is the seed, read whole */
} dw__typing;

/* A view shows elements of its one operand through strides of its own. It computes nothing and needs
 * no memory. */
typedef enum dw__view_kind {
    DW__NO_VIEW,
    DW__VIEW_SAME,      /* the operand as it is */
    DW__VIEW_RESHAPE,   /* same elements, row-major order; a copy where strides cannot express it */
    DW__VIEW_PERMUTE,   /* same elements, axes in the order of attribute perm */
    DW__VIEW_BROADCAST, /* elements repeated along axes */
    DW__VIEW_SLICE      /* elements from start to limit by step */
} dw__view_kind;

enum { DW__NAMED_OPERANDS = 8 };

typedef struct dw__op_row {
    const char *name;
    const char *operands[DW__NAMED_OPERANDS]; /* for messages; the last name serves the rest */
    dw__op_class stratum;
    bool elementwise;  /* fusable: one iteration shape, no reduction */
    dw__typing typing; /* of an elementwise row */
    dw__view_kind view;
    bool program;      /* attribute body is a program of elementwise operations (body.h) */
    bool concatenates; /* the result is the operands side by side along attribute axis */
    bool cheap;        /* takes about one pass over operands and results: worth repeating in
                          backward instead of saving; elementwise rows and views always are */
    bool commutative;
    bool stops_gradient; /* derivative zero or undefined: no gradient flows to its operands */
    uint8_t min_inputs, max_inputs; /* counting optional ones, which may be DW_NONE; a node of a row
                                       with optional operands always has max_inputs operands */
    uint64_t optional_inputs;       /* bit i: operand i may be DW_NONE */
    uint64_t required_attrs, allowed_attrs; /* bits by dw_attr_key */
    dw_status (*infer)(const dw__draft *draft, dw__inferred *out);
    dw__gradient_rule gradient; /* NULL for a composite: gradient of its expansion; for a primitive:
                                   gradient flow ends when `stops_gradient`, else unsupported */
    dw__expansion expand;       /* composites */
    dw__cost_rule cost;
} dw__op_row;

extern const dw__op_row dw__op_table[DW_OP_COUNT];
bool dw__op_is_view(dw_op op);
/* The row-major order of the result's elements is that of the operand's. */
bool dw__op_keeps_order(dw_op op);
/* Element i of each result depends on element i of the operands alone (except for a dropout's seed,
 * which is read whole): a result may overwrite an operand, and a tile of it needs only that tile. */
bool dw__op_is_pointwise(dw_op op);
bool dw__op_is_cheap(dw_op op);
/* "mask" for operand 3 of attention */
const char *dw__operand_name(dw_op op, uint32_t index);

/* ---- rewriting ------------------------------------------------------------------------------- */

/* A pass copies a graph node by node into a new one: dw__rewriter_begin makes the destination with
 * all leaves, map[old value] gives the new value (DW_NONE: not made), dw__rewriter_copy copies one
 * node as it is, dw__rewriter_end adds the outputs and verifies. Nodes emitted by other means go
 * through dw_graph_append on `to` and set map themselves. */
typedef struct dw__rewriter {
    const dw_graph *from;
    dw_graph *to;
    dw_value *map;
} dw__rewriter;
dw_status dw__rewriter_begin(dw__rewriter *rewriter, const dw_graph *from);
dw_status dw__rewriter_copy(dw__rewriter *rewriter, dw_node node);
/* On success *graph is replaced and the old one destroyed. */
dw_status dw__rewriter_end(dw__rewriter *rewriter, dw_graph **graph);
void dw__rewriter_abort(dw__rewriter *rewriter);

/* All symbols of `from`, in order, so that arrays of symbol sizes serve both graphs. */
dw_status dw__import_symbols(dw_graph *to, const dw_graph *from);
/* A dim of `from` as a dim of `to` (symbols matched by name). */
dw_status dw__import_dim(dw_graph *to, const dw_graph *from, dw_dim dim, dw_dim *out);
/* All attributes of a node, DIMS lists imported; memory in to's arena. */
dw_status dw__import_attrs(dw_graph *to, const dw_graph *from, dw_node node, const dw_attr **attrs);

/* Every node of one composite operation becomes its expansion (DW_OP_COUNT: of all of them). */
dw_status dw__expand_op(dw_graph **graph, dw_op op);
/* Expands the layers that dw_graph_apply_precision has quantized; `changed` says whether there are any.
 * Call it after the gradient, for which these layers have rules of their own. */
dw_status dw__expand_quantized(dw_graph **graph, bool *changed);
/* Replaces sums of pads that fill one tensor side by side by a concatenation. */
dw_status dw__join_pads(dw_graph **graph);

/* Later nodes of `to` come from where `node` of `from` comes from (region, layer, module, pass). */
dw_status dw__copy_origin(dw_graph *to, const dw_graph *from, dw_node node);
/* dw_graph_append with names for the outputs: `names` NULL or one per output, entries NULL or names
 * that are new in the graph. */
dw_status dw__append_named(dw_graph *graph, dw_op op, uint32_t input_count, const dw_value *inputs,
                           uint32_t attr_count, const dw_attr *attrs, uint32_t name_count,
                           const char *const *names, dw_node *node);
/* Every rule of the table at these symbol sizes, among them the bounds that symbols alone leave
 * open (a slice's limit within its dim). Once for each new set of sizes, before anything runs. */
dw_status dw__graph_check_sizes(const dw_graph *graph, const int64_t *sizes);
/* True for names that dw__append_named made up ("%7"). */
bool dw__is_automatic_name(const char *name);

/* ---- checks and look-ups shared by building, parsing and verifying -------------------------- */

/* A draft against its row (operand count and existence, attributes), then the row's infer(). */
dw_status dw__draft_infer(const dw__draft *draft, dw__inferred *out);
/* Not empty, valid UTF-8, no control characters. `what` names it in the message. */
dw_status dw__check_name(const char *what, const char *name);
/* Element types of an elementwise operation; `typed_attr` is cast's dtype. The message of a failure
 * begins with the operand's name. */
dw_status dw__elementwise_dtype(dw_op op, uint32_t input_count, const dw_dtype *inputs,
                                dw_dtype typed_attr, dw_dtype *result);
/* Sorted by key and checked for kinds; `sorted` has room for DW_ATTR_KEY_COUNT. */
dw_status dw__sort_attrs(const dw_graph *graph, dw_op op, uint32_t attr_count, const dw_attr *attrs,
                         dw_attr *sorted);
bool dw__is_float(dw_dtype dtype);
bool dw__is_integer(dw_dtype dtype);

/* ---- reading and writing forms -------------------------------------------------------------- */

/* Shortest decimal that reads back as the same double, whatever the locale; "inf" "-inf" "nan". */
enum { DW__NUMBER_BYTES = 32 };
void dw__number_text(double number, char text[DW__NUMBER_BYTES]);
/* What dw__number_text writes; NULL when `text` begins with no number, else where it ends. */
const char *dw__number_parse(const char *text, double *number);
/* "[1, 2]": numbers, or with `dims_of` dims of that graph, symbolic ones between two of `quote`. */
dw_status dw__write_list(dw__text *out, const dw_graph *dims_of, uint32_t count,
                         const int64_t *list, const char *quote);
/* A node as a form describes it. */
typedef struct dw__description {
    dw_op op;
    dw_region region;
    int layer;
    const char *module;
    bool backward;
    uint32_t input_count, output_count, attr_count;
    dw_value inputs[DW_MAX_INPUTS];
    dw_attr attrs[DW_ATTR_KEY_COUNT];
    const char *names[DW_MAX_OUTPUTS]; /* NULL: automatic */
    struct {
        bool given; /* else it follows from the table */
        dw_dtype dtype;
        int rank;
        dw_dim shape[DW_MAX_RANK];
    } types[DW_MAX_OUTPUTS];
} dw__description;
/* Appends the node and checks that its outputs are as many and of the types described. */
dw_status dw__append_described(dw_graph *graph, const dw__description *node);
/* A dim whose symbols must be known already. */
dw_status dw__parse_known_dim(dw_graph *graph, const char *text, dw_dim *dim);
/* What a wrong form is called: misuse of our own functions becomes DW_PARSE. */
dw_status dw__form_status(dw_status status);
/* Enumerations by name; -1: there is none. */
int dw__dtype_find(const char *name);
int dw__role_find(const char *name);
int dw__region_find(const char *name);
int dw__attr_find(const char *name);

/* Attribute of a draft or a node record by key; NULL when absent. */
const dw_attr *dw__find_attr(uint32_t attr_count, const dw_attr *attrs, dw_attr_key key);

#endif
