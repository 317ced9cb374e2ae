/* Declarations shared by the files of the graph layer: the graph's internals, the operation table, rewriting. */
#ifndef DW_GRAPH_INTERNAL_H
#define DW_GRAPH_INTERNAL_H

#include "base/base.h"
#include "deepwell/graph.h"
#include "number/dtype_kinds.h"

typedef struct dw__value_record {
    const char *name; /* never NULL; "%7" style for unnamed activations */
    dw_dtype dtype;
    dw_role role;
    int rank;
    const dw_dim *shape; /* in the graph's arena; stays valid while values are added */
    dw_node node;        /* DW_NONE for a leaf */
    uint32_t index;      /* number of the output of that node */
} dw__value_record;

typedef struct dw__node_record {
    dw_op op;
    uint32_t input_count, output_count, attr_count;
    const dw_value *inputs; /* DW_NONE if an optional operand is absent */
    const dw_value *outputs;
    const dw_attr *attrs; /* sorted by key; memory in the graph's arena */
    dw_region region;
    int layer;          /* -1 for none */
    const char *module; /* "" if unknown */
    bool backward;
} dw__node_record;

struct dw__dims; /* dims.c: symbols and interned polynomials */
dw_status dw__dims_create(struct dw__dims **dims);
/* Every handle keeps its meaning in the copy. */
dw_status dw__dims_clone(const struct dw__dims *from, struct dw__dims **copy);
void dw__dims_destroy(struct dw__dims *dims);

/* True for a number and for a handle of this graph. */
bool dw__dim_exists(const dw_graph *graph, dw_dim dim);
/* True for a negative constant. Arithmetic can produce one, but no shape may have it. */
bool dw__dim_is_negative(const dw_graph *graph, dw_dim dim);
/* The quotient rounded up; `divisor` is positive. DW_UNSUPPORTED: too many quotients, or nested too deep. */
dw_status dw__dim_ceil_div(dw_graph *graph, dw_dim a, int64_t divisor, dw_dim *quotient);

/* Text for messages, truncated to fit. It is returned by value so that it can be an argument of printf. */
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
    dw_region region; /* origin of the nodes appended next: region, layer, module, backward */
    int layer;
    const char *module;
    bool backward;
    uint32_t next_name; /* number of the next automatic value name */
};

/* ---- the table ------------------------------------------------------------------------------- */

/* Output types of a node under construction, filled in by infer() of its row. */
typedef struct dw__inferred {
    uint32_t count;
    struct {
        dw_dtype dtype;
        int rank;
        dw_dim shape[DW_MAX_RANK];
    } outputs[DW_MAX_OUTPUTS];
} dw__inferred;

/* A node before it is in the graph; infer() reads it. */
typedef struct dw__draft {
    dw_graph *graph; /* for values and dim arithmetic */
    dw_op op;
    uint32_t input_count;
    const dw_value *inputs;
    uint32_t attr_count;
    const dw_attr *attrs; /* sorted by key */
} dw__draft;

/* Gradient of one node. Given the gradients of its outputs (DW_NONE: zero), the rule appends nodes to `graph`
 * and fills input_grads (DW_NONE: no gradient), but only where needed[i] is true. */
typedef dw_status (*dw__gradient_rule)(dw_graph *graph, dw_node node, const dw_value *output_grads,
                                       const bool *needed, dw_value *input_grads);
/* Expansion of one node: appends to `graph` primitives that compute the node of `source`. `inputs` are the
 * node's operands as values of `graph`. The node's dims have been imported already; read attributes and
 * shapes through dw__import. `outputs` receives one value per output. */
typedef dw_status (*dw__expansion)(dw_graph *graph, const dw_graph *source, dw_node node,
                                   const dw_value *inputs, dw_value *outputs);
typedef dw_status (*dw__cost_rule)(const dw_graph *graph, dw_node node, const int64_t *sizes,
                                   dw_cost *cost);

typedef enum dw__op_class { DW__PRIMITIVE, DW__COMPOSITE } dw__op_class;

/* Typing of an elementwise operation: allowed dtypes of its operands -> dtype of its result. Shape inference
 * and fused bodies both read it. */
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
    DW__CONVERSION, /* cast: any dtype to the dtype attribute */
    DW__WITH_SEED   /* dropout: float; the second operand is the seed, read as a whole */
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
    const char *operands[DW__NAMED_OPERANDS]; /* for messages; the last name serves the others */
    dw__op_class stratum;
    bool elementwise;  /* fusable: one iteration shape, no reduction */
    dw__typing typing; /* of an elementwise row */
    dw__view_kind view;
    bool program;      /* attribute body is a program of elementwise operations (body.h) */
    bool concatenates; /* the result is the operands side by side along attribute axis */
    bool cheap;        /* takes about one pass over operands and results: worth repeating in
                          backward instead of saving; elementwise rows and views always are */
    bool quantizes;    /* rounds its first operand to a scheme */
    bool tile_codes;   /* its results are codes and scales as tensor cores read them, in tiles */
    bool rotates; /* pairs of elements of its first operand's rows: a product's kernel may do it */
    bool rotated; /* its kernel may rotate its first operand, which a row that rotates makes */
    bool paired;  /* a program's kernel may compute two with the same first operand */
    bool reads_codes; /* operands may be codes (number/dtype_kinds.h) */
    bool commutative;
    bool stops_gradient; /* the derivative is zero or undefined, so operands get no gradient */
    uint8_t min_inputs, max_inputs; /* optional operands count too; a node of a row with optional
                                       operands always has max_inputs operands, some DW_NONE */
    uint64_t optional_inputs;       /* bit i: operand i may be DW_NONE */
    uint64_t required_attrs, allowed_attrs; /* bit i: attribute with dw_attr_key i */
    dw_status (*infer)(const dw__draft *draft, dw__inferred *out);
    dw__gradient_rule gradient; /* NULL: a composite uses the gradient of its expansion; a primitive
                                   has none, which is an error unless `stops_gradient` */
    dw__expansion expand;       /* only for composites */
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
/* A result that depends on parameters alone is worth its memory for as long as they do not change. */
bool dw__op_is_worth_keeping(dw_op op);
/* True for a matmul or a linear layer. */
bool dw__op_is_product(dw_op op);
/* True for the product of matrices whose operands transpose_a and transpose_b turn. */
bool dw__op_is_matmul(dw_op op);
/* True for the sum over axes. */
bool dw__op_is_sum(dw_op op);
/* The result that the operation's gradient computes again if a plan leaves it out, or DW_NONE. */
uint32_t dw__op_dispensable_result(dw_op op);
/* True for operations whose kernels on a GPU read rows at any one distance about as fast as contiguous ones. */
bool dw__op_reads_spaced_rows(dw_op op);
/* "mask" for operand 3 of attention */
const char *dw__operand_name(dw_op op, uint32_t index);

/* ---- rewriting ------------------------------------------------------------------------------- */

/* A pass copies a graph node by node into a new one. dw__rewriter_begin creates the destination with all
 * leaves, dw__rewriter_copy copies one node unchanged, dw__rewriter_end adds the outputs and verifies.
 * map[old value] is the new value (DW_NONE: not made yet). A pass that emits other nodes appends them to `to`
 * with dw_graph_append and sets map itself. */
typedef struct dw__rewriter {
    const dw_graph *from;
    dw_graph *to;
    dw_value *map;
} dw__rewriter;
dw_status dw__rewriter_begin(dw__rewriter *rewriter, const dw_graph *from);
dw_status dw__rewriter_copy(dw__rewriter *rewriter, dw_node node);
/* On success replaces *graph and destroys the old one. */
dw_status dw__rewriter_end(dw__rewriter *rewriter, dw_graph **graph);
void dw__rewriter_abort(dw__rewriter *rewriter);

/* Imports all symbols of `from` in order, so that one array of symbol sizes fits both graphs. */
dw_status dw__import_symbols(dw_graph *to, const dw_graph *from);
/* Converts a dim of `from` to a dim of `to`. Symbols are matched by name. */
dw_status dw__import_dim(dw_graph *to, const dw_graph *from, dw_dim dim, dw_dim *out);
/* Copies all attributes of a node and imports the dims in DIMS lists. Memory comes from to's arena. */
dw_status dw__import_attrs(dw_graph *to, const dw_graph *from, dw_node node, const dw_attr **attrs);

/* Replaces every node of one composite operation by its expansion. */
dw_status dw__expand_op(dw_graph **graph, dw_op op);
/* Replaces each composite node that `wanted` names by its expansion, and those of its expansion likewise. A failure
 * leaves the graph as it was. */
typedef bool (*dw__expand_rule)(const dw_graph *graph, dw_node node, void *context);
dw_status dw__expand_where(dw_graph **graph, dw__expand_rule wanted, void *context);
/* Lets each matmul in BF16 or F16 that `wanted` names give F32, which is then rounded. If `wanted` names that one too,
 * its operands become F32. */
dw_status dw__widen_products(dw_graph **graph, dw__expand_rule wanted, void *context);
/* Folds, recognizes, and merges and removes nodes: an engine does this to a graph before it looks at its layers, and to
 * a backward that it has appended. */
dw_status dw__simplify_graph(dw_graph **graph);
/* Expands the layers that dw_graph_apply_precision has quantized; `changed` says whether there are any.
 * Call it after the gradient, for which these layers have rules of their own. */
dw_status dw__expand_quantized(dw_graph **graph, bool *changed);
/* Products, forward and backward, of operands with scales of blocks: how many a target multiplies as codes, and how
 * many it simulates or, of fp8-block, multiplies without FP8 tensor cores. `reason`: why kernels of the target do
 * not support the first of these; "" if it has no such kernels. */
typedef struct dw__code_products {
    uint32_t multiplied, simulated;
    char reason[512];
} dw__code_products;
/* Replaces products of quantized values, as dw__expand_quantized leaves them, by products of codes, where `computed`
 * says that the target has kernels for the nodes that this takes (of fp8-block, on FP8 tensor cores), and counts;
 * `changed` says whether there are any. With `fast_accumulation` GEMMs of forward may sum in fewer bits. */
dw_status dw__multiply_codes(dw_graph **graph, dw__expand_rule computed, void *context,
                             bool fast_accumulation, dw__code_products *products, bool *changed);
/* Replaces sums of pads that fill one tensor side by side by a concatenation. */
dw_status dw__join_pads(dw_graph **graph);
/* Replaces each grouped_linear by a segment_linear of rows that are sorted by group, and lets the operations around it
 * work on sorted rows too. Call it before the gradient is taken. */
dw_status dw__sort_rows(dw_graph **graph);
/* Multiplies the router's weights into the rows that the experts' last GEMM reads, if they multiply its result and
 * these rows are at most as wide: the gradient of the weights then needs no result of the GEMM. Call it after
 * dw__sort_rows, before the gradient is taken. */
dw_status dw__weigh_rows_early(dw_graph **graph);
/* Lets programs of backward compute values of forward that they read, if they read all that these are computed from.
 * Call it when elementwise nodes are fused. */
dw_status dw__inline_programs(dw_graph **graph);
/* Replaces each cross_entropy_backward whose result only its linear layer's own gradients read, and these, by
 * linear_cross_entropy_backward. A part of the pass `recognize`. `casts`: also if there are casts between a layer in 16
 * bits and a loss in F32; for GPUs, whose kernel then computes in F32 as well. */
dw_status dw__recognize_loss(dw_graph **graph, bool casts);
/* Replaces each linear layer and the cross-entropy of its logits, with casts and reshapes between them, by
 * linear_cross_entropy, if nothing else reads the logits. For GPUs, which round its logits to the layer's type; call it
 * before the gradient is taken. */
dw_status dw__recognize_head(dw_graph **graph);

/* Gives the nodes appended to `to` from now on the origin of `node` of `from`: region, layer, module, backward. */
dw_status dw__copy_origin(dw_graph *to, const dw_graph *from, dw_node node);
/* dw_graph_append with names for the outputs. `names` is NULL or has one entry per output. An entry is NULL
 * or a name that is new in the graph. */
dw_status dw__append_named(dw_graph *graph, dw_op op, uint32_t input_count, const dw_value *inputs,
                           uint32_t attr_count, const dw_attr *attrs, uint32_t name_count,
                           const char *const *names, dw_node *node);
/* Checks every rule of the table at these symbol sizes, including the bounds that symbols leave open (a
 * slice's limit within its dim). Call it once for each new set of sizes, before anything runs. */
dw_status dw__graph_check_sizes(const dw_graph *graph, const int64_t *sizes);
/* True for automatic names ("%7") made by dw__append_named. */
bool dw__is_automatic_name(const char *name);

/* ---- checks and look-ups shared by building, parsing and verifying -------------------------- */

/* Checks a draft against its row (operand count and existence, attributes), then calls the row's infer(). */
dw_status dw__draft_infer(const dw__draft *draft, dw__inferred *out);
/* Fails unless the name is nonempty valid UTF-8 without control characters. `what` names it in the message. */
dw_status dw__check_name(const char *what, const char *name);
/* Result dtype of an elementwise operation. `typed_attr` is cast's dtype attribute. The message of a failure
 * begins with the operand's name. */
dw_status dw__elementwise_dtype(dw_op op, uint32_t input_count, const dw_dtype *inputs,
                                dw_dtype typed_attr, dw_dtype *result);
/* Copies the attributes to `sorted` by key and checks their kinds. `sorted` has room for DW_ATTR_KEY_COUNT. */
dw_status dw__sort_attrs(const dw_graph *graph, dw_op op, uint32_t attr_count, const dw_attr *attrs,
                         dw_attr *sorted);

/* ---- reading and writing forms -------------------------------------------------------------- */

/* Shortest decimal that reads back as the same double in any locale; "inf", "-inf" and "nan" otherwise. */
enum { DW__NUMBER_BYTES = 32 };
void dw__number_text(double number, char text[DW__NUMBER_BYTES]);
/* Parses the output of dw__number_text. Returns the end of the number, or NULL if `text` begins with none. */
const char *dw__number_parse(const char *text, double *number);
/* Writes a JSON string. A graph's text holds no control characters, so only two characters need escaping. */
dw_status dw__write_string(dw__text *out, const char *text);
/* Writes "[1, 2]". With `dims_of` the entries are dims of that graph, and `quote` encloses symbolic ones. */
dw_status dw__write_list(dw__text *out, const dw_graph *dims_of, uint32_t count,
                         const int64_t *list, const char *quote);
/* A node as a text or JSON form describes it. */
typedef struct dw__description {
    dw_op op;
    dw_region region;
    int layer;
    const char *module;
    bool backward;
    uint32_t input_count, output_count, attr_count;
    dw_value inputs[DW_MAX_INPUTS];
    dw_attr attrs[DW_ATTR_KEY_COUNT];
    const char *names[DW_MAX_OUTPUTS]; /* NULL for an automatic name */
    struct {
        bool given; /* if false, the table gives the type */
        dw_dtype dtype;
        int rank;
        dw_dim shape[DW_MAX_RANK];
    } types[DW_MAX_OUTPUTS];
} dw__description;
/* Appends the node. Fails if its number of outputs or their types differ from the description. */
dw_status dw__append_described(dw_graph *graph, const dw__description *node);
/* Parses a dim. Fails if it uses a symbol that the graph does not have. */
dw_status dw__parse_known_dim(dw_graph *graph, const char *text, dw_dim *dim);
/* Converts the status of a failure on a malformed form: misuse of our own functions becomes DW_PARSE. */
dw_status dw__form_status(dw_status status);
/* Find an enumeration value by name. Return -1 if there is none. */
int dw__role_find(const char *name);
int dw__region_find(const char *name);
int dw__attr_find(const char *name);

/* Finds an attribute of a draft or a node record by key. Returns NULL if it is absent. */
const dw_attr *dw__find_attr(uint32_t attr_count, const dw_attr *attrs, dw_attr_key key);

#endif
