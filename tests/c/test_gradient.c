/* Compares gradients with central differences in F64, computed by the reference interpreter: every rule, with the
 * gradient of each output alone and of all together; first dims are symbolic. Passes over the same graphs must then
 * give the same numbers. */
#include "graph/emit.h"
#include "kernel/reference/interpret.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define OK(call) assert_string_equal((call) == DW_OK ? "" : dw_last_error(), "")
#define MAX_LEAVES 24
/* Dims of cases: symbols and their sizes (primes, so that mix-ups show). */
#define B (-1)
#define S (-2)
static const int64_t sizes[] = {3, 5};

/* ---- cases ---------------------------------------------------------------------------------- */

typedef enum fill {
    ABSENT,   /* an optional operand */
    NORMAL,   /* about -2 .. 2 */
    POSITIVE, /* 0.2 .. 2 */
    HOLES,    /* like NORMAL, with some exact zeros */
    INDEX,    /* i64 0 .. limit-1 */
    TRUTH,    /* bool */
    SEED,     /* i64 */
    EVEN_ODD, /* NORMAL, no two elements equal, for sorting */
    SCORES    /* F64 additive mask, with some -inf */
} fill;

typedef struct leaf {
    fill fill;
    int rank;
    dw_dim shape[5];
    int64_t limit;
} leaf;

typedef struct op_case {
    const char *name;
    dw_op op;
    leaf leaves[8];
    dw_attr attrs[6];
    uint32_t no_gradient; /* bit i: leaf i is not differentiated by */
} op_case;

/* number = 1 distinguishes an integer attribute from the unused end of the list */
#define INT(key, value)                                                                            \
    { DW_ATTR_KEY_##key, 0, value, 1, NULL, NULL }
#define FLOAT(key, value)                                                                          \
    { DW_ATTR_KEY_##key, 0, 0, value, NULL, NULL }
#define STRING(key, value)                                                                         \
    { DW_ATTR_KEY_##key, 0, 0, 0, value, NULL }
#define LIST(key, ...)                                                                             \
    {                                                                                              \
        DW_ATTR_KEY_##key, sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), 0, 0, NULL,         \
            (const int64_t[]) {                                                                    \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
#define X(fill_, rank_, ...)                                                                       \
    {                                                                                              \
        .fill = fill_, .rank = rank_, .shape = { __VA_ARGS__ }                                     \
    }
#define I(fill_, limit_, rank_, ...)                                                               \
    { .fill = fill_, .rank = rank_, .shape = {__VA_ARGS__}, .limit = limit_ }
#define UNARY(op_, fill_)                                                                          \
    { #op_, DW_OP_##op_, {X(fill_, 2, B, 4) }, {{0 } }, 0 }
#define BINARY(op_, a, b)                                                                          \
    { #op_, DW_OP_##op_, {X(a, 2, B, 4), X(b, 2, B, 4) }, {{0 } }, 0 }

static const op_case cases[] = {
    UNARY(NEG, NORMAL),
    UNARY(ABS, NORMAL),
    UNARY(EXP, NORMAL),
    UNARY(LOG, POSITIVE),
    UNARY(LOG1P, POSITIVE),
    UNARY(SQRT, POSITIVE),
    UNARY(RSQRT, POSITIVE),
    UNARY(RECIPROCAL, POSITIVE),
    UNARY(SIN, NORMAL),
    UNARY(COS, NORMAL),
    UNARY(TANH, NORMAL),
    UNARY(ERF, NORMAL),
    UNARY(SIGMOID, NORMAL),
    UNARY(RELU, NORMAL),
    UNARY(SILU, NORMAL),
    BINARY(ADD, NORMAL, NORMAL),
    BINARY(SUB, NORMAL, NORMAL),
    BINARY(MUL, NORMAL, NORMAL),
    BINARY(DIV, NORMAL, POSITIVE),
    BINARY(POW, POSITIVE, NORMAL),
    BINARY(MAX, NORMAL, NORMAL),
    BINARY(MIN, NORMAL, NORMAL),
    BINARY(REM, NORMAL, POSITIVE),
    BINARY(SWIGLU, NORMAL, NORMAL),
    BINARY(SILU_BACKWARD, NORMAL, NORMAL),
    {"cast", DW_OP_CAST, {X(NORMAL, 2, B, 4)}, {INT(DTYPE, DW_F64)}, 0},
    {"select", DW_OP_SELECT, {X(TRUTH, 2, B, 4), X(NORMAL, 2, B, 4), X(NORMAL, 2, B, 4)}, {{0}}, 0},
    {"gelu", DW_OP_GELU, {X(NORMAL, 2, B, 4)}, {STRING(APPROXIMATE, "none")}, 0},
    {"gelu tanh", DW_OP_GELU, {X(NORMAL, 2, B, 4)}, {STRING(APPROXIMATE, "tanh")}, 0},
    {"gelu_backward",
     DW_OP_GELU_BACKWARD,
     {X(NORMAL, 1, 7), X(NORMAL, 1, 7)},
     {STRING(APPROXIMATE, "none")},
     0},
    {"gelu_backward tanh",
     DW_OP_GELU_BACKWARD,
     {X(NORMAL, 1, 7), X(NORMAL, 1, 7)},
     {STRING(APPROXIMATE, "tanh")},
     0},
    {"dropout",
     DW_OP_DROPOUT,
     {X(NORMAL, 2, B, 7), X(SEED, 1, 2)},
     {FLOAT(P, 0.4), INT(STREAM, 3)},
     0},
    {"reshape", DW_OP_RESHAPE, {X(NORMAL, 3, B, 4, 2)}, {LIST(SHAPE, 8, B)}, 0},
    {"permute", DW_OP_PERMUTE, {X(NORMAL, 3, B, 4, 2)}, {LIST(PERM, 2, 0, 1)}, 0},
    {"broadcast", DW_OP_BROADCAST, {X(NORMAL, 2, 4, 1)}, {LIST(SHAPE, B, 4, 2)}, 0},
    {"broadcast of one", DW_OP_BROADCAST, {X(NORMAL, 2, 1, 1)}, {LIST(SHAPE, 1, B, 1)}, 0},
    {"broadcast of a scalar", DW_OP_BROADCAST, {X(NORMAL, 0, 0)}, {LIST(SHAPE, B, 2)}, 0},
    {"slice", DW_OP_SLICE, {X(NORMAL, 2, B, 7)}, {LIST(START, 0, 2), LIST(LIMIT, B, 5)}, 0},
    {"slice step",
     DW_OP_SLICE,
     {X(NORMAL, 2, 7, 8)},
     {LIST(START, 1, 2), LIST(LIMIT, 7, 8), LIST(STEP, 2, 3)},
     0},
    {"pad", DW_OP_PAD, {X(NORMAL, 2, B, 3)}, {LIST(LOW, 0, 2), LIST(HIGH, 1, 0)}, 0},
    {"concat",
     DW_OP_CONCAT,
     {X(NORMAL, 2, B, 3), X(NORMAL, 2, B, 1), X(NORMAL, 2, B, 2)},
     {INT(AXIS, 1)},
     0},
    {"take", DW_OP_TAKE, {X(NORMAL, 3, B, 4, 2), I(INDEX, 4, 2, 3, 2)}, {INT(AXIS, 1)}, 0},
    {"take_along", DW_OP_TAKE_ALONG, {X(NORMAL, 2, B, 4), I(INDEX, 4, 2, B, 6)}, {INT(AXIS, 1)}, 0},
    {"scatter_add",
     DW_OP_SCATTER_ADD,
     {I(INDEX, 5, 1, 4), X(NORMAL, 3, B, 4, 2)},
     {INT(AXIS, 1), LIST(SIZE, 5)},
     0},
    {"put_along_add",
     DW_OP_PUT_ALONG_ADD,
     {I(INDEX, 5, 2, B, 6), X(NORMAL, 2, B, 6)},
     {INT(AXIS, 1), LIST(SIZE, B, 5)},
     0},
    {"reduce_sum", DW_OP_REDUCE_SUM, {X(NORMAL, 3, B, 4, 2)}, {LIST(AXES, 0, 2)}, 0},
    {"reduce_sum keep",
     DW_OP_REDUCE_SUM,
     {X(NORMAL, 3, B, 4, 2)},
     {LIST(AXES, 1), INT(KEEP, 1)},
     0},
    {"reduce_max", DW_OP_REDUCE_MAX, {X(EVEN_ODD, 2, B, 4)}, {LIST(AXES, 1)}, 0},
    {"reduce_min", DW_OP_REDUCE_MIN, {X(EVEN_ODD, 2, B, 4)}, {LIST(AXES, 0), INT(KEEP, 1)}, 0},
    {"reduce_prod", DW_OP_REDUCE_PROD, {X(HOLES, 2, 7, 4)}, {LIST(AXES, 1)}, 0},
    {"mean", DW_OP_MEAN, {X(NORMAL, 3, B, S, 2)}, {LIST(AXES, 0, 1)}, 0},
    {"mean keep", DW_OP_MEAN, {X(NORMAL, 2, B, S)}, {LIST(AXES, 1), INT(KEEP, 1)}, 0},
    {"cumsum", DW_OP_CUMSUM, {X(NORMAL, 2, B, 4)}, {INT(AXIS, 1)}, 0},
    {"cumsum reverse", DW_OP_CUMSUM, {X(NORMAL, 2, B, 4)}, {INT(AXIS, 0), INT(REVERSE, 1)}, 0},
    {"sort", DW_OP_SORT, {X(EVEN_ODD, 2, B, 5)}, {INT(AXIS, 1)}, 0},
    {"top_k", DW_OP_TOP_K, {X(EVEN_ODD, 2, B, 5)}, {INT(AXIS, 1), LIST(SIZE, 2)}, 0},
    {"matmul", DW_OP_MATMUL, {X(NORMAL, 3, B, 4, 2), X(NORMAL, 3, B, 2, 3)}, {{0}}, 0},
    {"matmul at",
     DW_OP_MATMUL,
     {X(NORMAL, 3, B, 2, 4), X(NORMAL, 3, B, 2, 3)},
     {INT(TRANSPOSE_A, 1)},
     0},
    {"matmul bt", DW_OP_MATMUL, {X(NORMAL, 2, 4, 2), X(NORMAL, 2, 3, 2)}, {INT(TRANSPOSE_B, 1)}, 0},
    {"matmul at bt",
     DW_OP_MATMUL,
     {X(NORMAL, 2, 2, 4), X(NORMAL, 2, 3, 2)},
     {INT(TRANSPOSE_A, 1), INT(TRANSPOSE_B, 1)},
     0},
    {"softmax", DW_OP_SOFTMAX, {X(NORMAL, 3, B, 4, 2)}, {INT(AXIS, 1)}, 0},
    {"log_softmax", DW_OP_LOG_SOFTMAX, {X(NORMAL, 2, B, 5)}, {INT(AXIS, 1)}, 0},
    {"softmax_backward",
     DW_OP_SOFTMAX_BACKWARD,
     {X(NORMAL, 2, B, 5), X(NORMAL, 2, B, 5)},
     {INT(AXIS, 0)},
     0},
    {"log_softmax_backward",
     DW_OP_LOG_SOFTMAX_BACKWARD,
     {X(NORMAL, 2, B, 5), X(NORMAL, 2, B, 5)},
     {INT(AXIS, 1)},
     0},
    {"linear",
     DW_OP_LINEAR,
     {X(NORMAL, 3, B, S, 4), X(NORMAL, 2, 3, 4), X(NORMAL, 1, 3)},
     {{0}},
     0},
    {"linear [K,N]",
     DW_OP_LINEAR,
     {X(NORMAL, 3, B, S, 4), X(NORMAL, 2, 4, 3), X(ABSENT, 0, 0)},
     {INT(TRANSPOSE_W, 0)},
     0},
    {"linear of a vector",
     DW_OP_LINEAR,
     {X(NORMAL, 1, 4), X(NORMAL, 2, 3, 4), X(NORMAL, 1, 3)},
     {{0}},
     0},
    {"embedding",
     DW_OP_EMBEDDING,
     {X(NORMAL, 2, 5, 3), I(INDEX, 5, 2, B, S)},
     {INT(PADDING_INDEX, -1)},
     0},
    {"embedding_backward",
     DW_OP_EMBEDDING_BACKWARD,
     {I(INDEX, 5, 2, B, S), X(NORMAL, 3, B, S, 2)},
     {LIST(SIZE, 5), INT(PADDING_INDEX, 1)},
     0},
    {"layer_norm",
     DW_OP_LAYER_NORM,
     {X(NORMAL, 3, B, 2, 7), X(NORMAL, 1, 7), X(NORMAL, 1, 7)},
     {FLOAT(EPS, 1e-2)},
     0},
    {"layer_norm plain",
     DW_OP_LAYER_NORM,
     {X(NORMAL, 2, B, 7), X(ABSENT, 0, 0), X(ABSENT, 0, 0)},
     {FLOAT(EPS, 1e-2)},
     0},
    {"layer_norm_backward",
     DW_OP_LAYER_NORM_BACKWARD,
     {X(NORMAL, 2, B, 5), X(NORMAL, 2, B, 5), X(NORMAL, 1, 5), X(NORMAL, 1, B), X(POSITIVE, 1, B)},
     {{0}},
     0},
    {"rms_norm", DW_OP_RMS_NORM, {X(NORMAL, 3, B, 2, 7), X(NORMAL, 1, 7)}, {FLOAT(EPS, 1e-2)}, 0},
    {"rms_norm plain",
     DW_OP_RMS_NORM,
     {X(NORMAL, 2, B, 7), X(ABSENT, 0, 0)},
     {FLOAT(EPS, 1e-2)},
     0},
    {"rms_norm_backward",
     DW_OP_RMS_NORM_BACKWARD,
     {X(NORMAL, 2, B, 5), X(NORMAL, 2, B, 5), X(NORMAL, 1, 5), X(POSITIVE, 1, B)},
     {{0}},
     0},
    {"rope",
     DW_OP_ROPE,
     {X(NORMAL, 4, B, 2, S, 6), X(NORMAL, 4, 1, 1, S, 4), X(NORMAL, 4, 1, 1, S, 4)},
     {{0}},
     6},
    {"rope interleaved",
     DW_OP_ROPE,
     {X(NORMAL, 4, B, 2, S, 4), X(NORMAL, 4, 1, 1, S, 4), X(NORMAL, 4, 1, 1, S, 4)},
     {INT(INTERLEAVED, 1)},
     6},
    {"rope transposed",
     DW_OP_ROPE,
     {X(NORMAL, 3, B, S, 6), X(NORMAL, 3, B, S, 4), X(NORMAL, 3, 1, 1, 4)},
     {INT(TRANSPOSED, 1)},
     0},
    {"rope, cos and sin too",
     DW_OP_ROPE,
     {X(NORMAL, 3, B, S, 4), X(NORMAL, 3, 1, S, 4), X(NORMAL, 3, 1, S, 4)},
     {INT(INTERLEAVED, 1)},
     0},
    {"attention",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, B, 4, S, 3), X(NORMAL, 4, B, 2, 7, 3), X(NORMAL, 4, B, 2, 7, 2), X(ABSENT, 0, 0),
      X(ABSENT, 0, 0)},
     {FLOAT(SCALE, 0.5)},
     0},
    {"attention causal",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, 2, 1, S, 3), X(NORMAL, 4, 2, 1, S, 3), X(NORMAL, 4, 2, 1, S, 3), X(ABSENT, 0, 0),
      X(ABSENT, 0, 0)},
     {FLOAT(SCALE, 0.5), INT(CAUSAL, 1)},
     0},
    {"attention window",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, 1, 2, S, 3), X(NORMAL, 4, 1, 1, 7, 3), X(NORMAL, 4, 1, 1, 7, 2), X(ABSENT, 0, 0),
      X(ABSENT, 0, 0)},
     {FLOAT(SCALE, 0.7), INT(CAUSAL, 2), INT(WINDOW, 2)},
     0},
    {"attention soft cap",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, B, 4, S, 3), X(NORMAL, 4, B, 2, 7, 3), X(NORMAL, 4, B, 2, 7, 2),
      X(NORMAL, 4, 1, 4, 1, 7), X(ABSENT, 0, 0)},
     {FLOAT(SCALE, 0.7), FLOAT(SOFTCAP, 0.9)},
     0},
    {"attention mask",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, B, 2, S, 3), X(NORMAL, 4, B, 2, 7, 3), X(NORMAL, 4, B, 2, 7, 2),
      X(TRUTH, 4, B, 1, S, 7), X(ABSENT, 0, 0)},
     {FLOAT(SCALE, 0.5)},
     0},
    {"attention float mask",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, B, 2, S, 3), X(NORMAL, 4, B, 2, 7, 3), X(NORMAL, 4, B, 2, 7, 2),
      X(NORMAL, 4, 1, 2, 1, 7), X(ABSENT, 0, 0)},
     {FLOAT(SCALE, 0.5)},
     0},
    {"attention -inf mask",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, B, 2, S, 3), X(NORMAL, 4, B, 2, 3, 3), X(NORMAL, 4, B, 2, 3, 2),
      X(SCORES, 4, B, 1, S, 3), X(ABSENT, 0, 0)},
     {FLOAT(SCALE, 0.5)},
     8},
    {"attention dropout",
     DW_OP_ATTENTION,
     {X(NORMAL, 4, B, 2, S, 3), X(NORMAL, 4, B, 2, 7, 3), X(NORMAL, 4, B, 2, 7, 2), X(ABSENT, 0, 0),
      X(SEED, 1, 2)},
     {FLOAT(SCALE, 0.5), FLOAT(P, 0.3), INT(STREAM, 1)},
     0},
    {"cross_entropy",
     DW_OP_CROSS_ENTROPY,
     {X(NORMAL, 2, B, 5), I(INDEX, 5, 1, B)},
     {STRING(REDUCTION, "mean"), INT(IGNORE_INDEX, 2)},
     0},
    {"cross_entropy sum",
     DW_OP_CROSS_ENTROPY,
     {X(NORMAL, 2, S, 4), I(INDEX, 4, 1, S)},
     {STRING(REDUCTION, "sum"), FLOAT(LABEL_SMOOTHING, 0.1)},
     0},
    {"cross_entropy none",
     DW_OP_CROSS_ENTROPY,
     {X(NORMAL, 2, S, 4), I(INDEX, 4, 1, S)},
     {STRING(REDUCTION, "none"), INT(IGNORE_INDEX, 1), FLOAT(LABEL_SMOOTHING, 0.2)},
     0},
    {"linear_cross_entropy",
     DW_OP_LINEAR_CROSS_ENTROPY,
     {X(NORMAL, 2, B, 5), X(NORMAL, 2, 7, 5), X(NORMAL, 1, 7), I(INDEX, 7, 1, B)},
     {STRING(REDUCTION, "mean"), INT(IGNORE_INDEX, 2)},
     0},
    {"linear_cross_entropy none",
     DW_OP_LINEAR_CROSS_ENTROPY,
     {X(NORMAL, 2, S, 4), X(NORMAL, 2, 4, 3), X(ABSENT, 0, 0), I(INDEX, 3, 1, S)},
     {STRING(REDUCTION, "none"), FLOAT(LABEL_SMOOTHING, 0.2), INT(TRANSPOSE_W, 0)},
     0},
    {"cross_entropy_backward",
     DW_OP_CROSS_ENTROPY_BACKWARD,
     {X(NORMAL, 2, B, 5), I(INDEX, 5, 1, B), X(NORMAL, 1, B), X(NORMAL, 0, 0)},
     {STRING(REDUCTION, "mean"), INT(IGNORE_INDEX, 2)},
     0},
    {"cross_entropy_backward none",
     DW_OP_CROSS_ENTROPY_BACKWARD,
     {X(NORMAL, 2, S, 4), I(INDEX, 4, 1, S), X(NORMAL, 1, S), X(NORMAL, 1, S)},
     {STRING(REDUCTION, "none"), FLOAT(LABEL_SMOOTHING, 0.1)},
     0},
};

/* ---- making a graph of a case --------------------------------------------------------------- */

static uint64_t random_state;

static double uniform(void) { /* [0,1): Steele, Lea, Flood 2014, SplitMix64 */
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

typedef struct problem {
    dw_graph *graph;
    dw_dim symbols[2];
    dw_value operands[8]; /* DW_NONE: absent */
    uint32_t operand_count;
    dw_node node;
    uint32_t output_count; /* floating-point outputs, the first ones of the graph */
    dw_value outputs[4], output_grads[4];
    dw_value wrt[8], grads[8];
    uint32_t wrt_count;
    dw__tensor leaves[MAX_LEAVES]; /* in the graph's order */
} problem;

static dw_dim real_dim(const problem *p, dw_dim dim) {
    return dim < 0 ? p->symbols[-1 - dim] : dim;
}

static dw_dtype dtype_of(fill f) {
    if (f == TRUTH) return DW_BOOL;
    return f == INDEX || f == SEED ? DW_I64 : DW_F64;
}

static void add_leaf(problem *p, const leaf *spec, uint32_t i) {
    dw_dim shape[5];
    char name[16];
    if (spec->fill == ABSENT) {
        p->operands[i] = DW_NONE;
        return;
    }
    for (int d = 0; d < spec->rank; d++) shape[d] = real_dim(p, spec->shape[d]);
    snprintf(name, sizeof name, "x%u", i);
    OK(dw_graph_leaf(p->graph, spec->fill == SEED ? DW_ROLE_SEED : DW_ROLE_INPUT, name,
                     dtype_of(spec->fill), spec->rank, shape, &p->operands[i]));
}

static uint32_t real_attrs(const problem *p, const op_case *c, dw_attr *attrs,
                           int64_t lists[6][8]) {
    uint32_t count = 0;
    for (; count < 6; count++) {
        attrs[count] = c->attrs[count];
        dw_attr *a = &attrs[count];
        if (a->number == 0 && !a->list && !a->string) break;
        if (dw_attr_kind_of(a->key) == DW_ATTR_INT || dw_attr_kind_of(a->key) == DW_ATTR_DTYPE)
            a->number = 0;
        for (uint32_t i = 0; i < a->count; i++)
            lists[count][i] =
                dw_attr_kind_of(a->key) == DW_ATTR_DIMS ? real_dim(p, a->list[i]) : a->list[i];
        if (a->count) a->list = lists[count];
    }
    return count;
}

static double element(const leaf *spec, int64_t index, bool grad) {
    if (grad) return 2 * uniform() - 1;
    switch (spec->fill) {
    case POSITIVE: return 0.2 + 1.8 * uniform();
    case HOLES: return uniform() < 0.2 ? 0.0 : 4 * uniform() - 2;
    case INDEX: return floor(uniform() * (double)spec->limit);
    case TRUTH: return uniform() < 0.6;
    case SEED: return index == 0 ? 1234 : 5;
    case SCORES: return uniform() < 0.5 ? -INFINITY : uniform();
    default: return 4 * uniform() - 2;
    }
}

static void fill_leaf(problem *p, const op_case *c, uint32_t position) {
    dw_value value = dw_graph_leaf_at(p->graph, position);
    dw__tensor *t = &p->leaves[position];
    const leaf *spec = NULL;
    OK(dw__value_tensor_at(p->graph, value, sizes, t));
    for (uint32_t i = 0; i < p->operand_count; i++)
        if (p->operands[i] == value) spec = &c->leaves[i];
    int64_t count = dw__tensor_count(t);
    t->data = dw__malloc_aligned((size_t)count * 8 + 8);
    for (int64_t i = 0; i < count; i++) {
        double x = element(spec, i, spec == NULL);
        if (t->dtype == DW_BOOL)
            ((uint8_t *)t->data)[i] = x != 0;
        else if (t->dtype == DW_I64)
            ((int64_t *)t->data)[i] = (int64_t)x;
        else
            ((double *)t->data)[i] = x;
    }
}

/* The node, a gradient leaf for each floating-point output, and the gradients as further outputs. `only` >= 0
 * differentiates that output alone. */
static void open_problem(problem *p, const op_case *c, int only) {
    memset(p, 0, sizeof *p);
    random_state = 7;
    OK(dw_graph_create(&p->graph));
    OK(dw_graph_symbol(p->graph, "B", &p->symbols[0]));
    OK(dw_graph_symbol(p->graph, "S", &p->symbols[1]));
    p->operand_count = dw__op_table[c->op].max_inputs;
    if (c->op == DW_OP_CONCAT) p->operand_count = 3;
    for (uint32_t i = 0; i < p->operand_count; i++) add_leaf(p, &c->leaves[i], i);
    dw_attr attrs[6];
    int64_t lists[6][8];
    uint32_t attr_count = real_attrs(p, c, attrs, lists);
    OK(dw_graph_append(p->graph, c->op, p->operand_count, p->operands, attr_count, attrs,
                       &p->node));
    for (uint32_t i = 0; i < dw_node_output_count(p->graph, p->node); i++) {
        dw_value y = dw_node_output(p->graph, p->node, i);
        char name[16];
        if (dw_value_dtype(p->graph, y) != DW_F64 || (only >= 0 && (int)i != only)) continue;
        snprintf(name, sizeof name, "dy%u", i);
        dw__type type = dw__type_of(p->graph, y);
        OK(dw_graph_leaf(p->graph, DW_ROLE_GRADIENT, name, type.dtype, type.rank, type.shape,
                         &p->output_grads[p->output_count]));
        p->outputs[p->output_count++] = y;
    }
    for (uint32_t i = 0; i < p->operand_count; i++)
        if (p->operands[i] != DW_NONE && dtype_of(c->leaves[i].fill) == DW_F64 &&
            !(c->no_gradient >> i & 1))
            p->wrt[p->wrt_count++] = p->operands[i];
    for (uint32_t i = 0; i < p->output_count; i++) OK(dw_graph_add_output(p->graph, p->outputs[i]));
    OK(dw_graph_gradient(p->graph, p->output_count, p->outputs, p->output_grads, p->wrt_count,
                         p->wrt, p->grads));
    for (uint32_t i = 0; i < p->wrt_count; i++)
        if (p->grads[i] != DW_NONE) OK(dw_graph_add_output(p->graph, p->grads[i]));
    OK(dw_graph_verify(p->graph));
    for (uint32_t i = 0; i < dw_graph_leaf_count(p->graph); i++) fill_leaf(p, c, i);
}

static void close_problem(problem *p) {
    for (uint32_t i = 0; i < dw_graph_leaf_count(p->graph); i++)
        dw__free_aligned(p->leaves[i].data);
    dw_graph_destroy(p->graph);
}

static void release(dw__tensor *tensors, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) dw__free_aligned(tensors[i].data);
}

/* ---- central differences -------------------------------------------------------------------- */

static dw__tensor *leaf_tensor(problem *p, dw_value value) {
    for (uint32_t i = 0; i < dw_graph_leaf_count(p->graph); i++)
        if (dw_graph_leaf_at(p->graph, i) == value) return &p->leaves[i];
    fail_msg("value %u is no leaf", value);
    return NULL;
}

/* Makes the forward half of a problem: the same leaves and only the outputs. */
static dw_graph *forward_graph(const problem *p) {
    dw_graph *forward;
    OK(dw_graph_clone(p->graph, &forward));
    forward->outputs.count = p->output_count;
    OK(dw_graph_run_pass(&forward, DW_PASS_DEAD_CODE));
    return forward;
}

/* Returns the sum over outputs of y * dy; y counts as 0 where it is not finite (lse of an empty row). */
static double loss(problem *p, const dw_graph *forward) {
    dw__tensor outputs[4] = {0};
    double sum = 0;
    OK(dw__interpret(forward, sizes, p->leaves, outputs, NULL));
    for (uint32_t i = 0; i < p->output_count; i++) {
        const double *y = outputs[i].data, *dy = leaf_tensor(p, p->output_grads[i])->data;
        for (int64_t k = 0; k < dw__tensor_count(&outputs[i]); k++)
            if (isfinite(y[k])) sum += y[k] * dy[k];
    }
    release(outputs, p->output_count);
    return sum;
}

/* The truncation error is h^2 times a third derivative (h = 1e-5 for operands of order 1), the rounding error
 * 1e-16/h for a loss of order 10: together 1e-9. 1e-7 allows for steep places. */
#define STEP 1e-5
#define TOLERANCE 1e-7

static void check_gradients(const op_case *c, int only) {
    problem p;
    dw__tensor results[16] = {0};
    open_problem(&p, c, only);
    dw_graph *forward = forward_graph(&p);
    OK(dw__interpret(p.graph, sizes, p.leaves, results, NULL));
    uint32_t position = p.output_count;
    for (uint32_t i = 0; i < p.wrt_count; i++) {
        dw__tensor *x = leaf_tensor(&p, p.wrt[i]);
        double *data = x->data;
        const double *gradient = NULL;
        if (p.grads[i] != DW_NONE) {
            assert_int_equal(dw__tensor_count(&results[position]), dw__tensor_count(x));
            gradient = results[position++].data;
        }
        for (int64_t k = 0; k < dw__tensor_count(x); k++) {
            double kept = data[k], high, low;
            data[k] = kept + STEP;
            high = loss(&p, forward);
            data[k] = kept - STEP;
            low = loss(&p, forward);
            data[k] = kept;
            double want = (high - low) / (2 * STEP), have = gradient ? gradient[k] : 0.0;
            if (!(fabs(have - want) <= TOLERANCE * (1 + fabs(want))))
                fail_msg("%s, output %d, operand %u, element %d: %.12g, differences give %.12g",
                         c->name, only, i, (int)k, have, want);
        }
    }
    release(results, position);
    dw_graph_destroy(forward);
    close_problem(&p);
}

static void every_rule_agrees_with_differences(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        problem p;
        open_problem(&p, &cases[i], -1);
        int outputs = (int)p.output_count;
        close_problem(&p);
        check_gradients(&cases[i], -1);
        for (int only = 0; outputs > 1 && only < outputs; only++) check_gradients(&cases[i], only);
    }
}

/* reduce_prod has separate cases for each number of zeros. pow at base 0 has no differences, but its rule
 * must give 0. */
static void pow_of_zero_has_a_finite_gradient(void **state) {
    (void)state;
    dw_graph *g;
    dw_value x, dy, grads[1];
    dw__tensor leaves[2] = {0}, results[1] = {0};
    double zero[2] = {0, 0}, one[2] = {1, 1};
    dw_dim two = 2;
    OK(dw_graph_create(&g));
    OK(dw_graph_leaf(g, DW_ROLE_INPUT, "x", DW_F64, 1, &two, &x));
    OK(dw_graph_leaf(g, DW_ROLE_GRADIENT, "dy", DW_F64, 1, &two, &dy));
    dw__emitter e = {g, DW_OK};
    dw_value y = dw__emit_with_number(&e, DW_OP_POW, x, 2.0);
    OK(e.status);
    OK(dw_graph_gradient(g, 1, &y, &dy, 1, &x, grads));
    OK(dw_graph_add_output(g, grads[0]));
    OK(dw__value_tensor_at(g, x, NULL, &leaves[0]));
    leaves[1] = leaves[0];
    leaves[0].data = zero;
    leaves[1].data = one;
    OK(dw__interpret(g, NULL, leaves, results, NULL));
    assert_true(((double *)results[0].data)[0] == 0.0);
    release(results, 1);
    dw_graph_destroy(g);
}

/* The padding row gets no gradient although results depend on it, by the rule and by the gradient of the
 * expansion. */
static void padding_gets_no_gradient(void **state) {
    (void)state;
    static const op_case padded = {"padding",
                                   DW_OP_EMBEDDING,
                                   {X(NORMAL, 2, 5, 3), I(INDEX, 5, 2, B, S)},
                                   {INT(PADDING_INDEX, 1)},
                                   0};
    for (int expanded = 0; expanded < 2; expanded++) {
        problem p;
        dw__tensor results[2] = {0};
        open_problem(&p, &padded, -1);
        dw_value dw = p.grads[0];
        if (expanded) {
            bool needed[2] = {true, false};
            dw_value grads[2];
            OK(dw__gradient_by_expansion(p.graph, p.node, p.output_grads, needed, grads));
            dw = grads[0];
        }
        p.graph->outputs.count = 0;
        OK(dw_graph_add_output(p.graph, dw));
        OK(dw__interpret(p.graph, sizes, p.leaves, results, NULL));
        const double *gradient = results[0].data;
        for (int row = 0; row < 5; row++) assert_int_equal(gradient[3 * row] == 0.0, row == 1);
        release(results, 1);
        close_problem(&p);
    }
}

/* ---- passes on the same graphs -------------------------------------------------------------- */

static void compare(const op_case *c, const char *what, const dw__tensor *a, const dw__tensor *b,
                    uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        const double *x = a[i].data, *y = b[i].data;
        assert_int_equal(dw__tensor_count(&a[i]), dw__tensor_count(&b[i]));
        for (int64_t k = 0; k < dw__tensor_count(&a[i]); k++)
            if (!(fabs(x[k] - y[k]) <= 1e-11 * (1 + fabs(x[k])) || x[k] == y[k]))
                fail_msg("%s after %s, output %u, element %d: %.17g was %.17g", c->name, what, i,
                         (int)k, y[k], x[k]);
    }
}

static void passes_keep_the_numbers(void **state) {
    (void)state;
    static const dw_pass order[] = {
        DW_PASS_DEAD_CODE, DW_PASS_COMMON,    DW_PASS_FOLD,      DW_PASS_RECOGNIZE, DW_PASS_EXPAND,
        DW_PASS_FOLD,      DW_PASS_RECOGNIZE, DW_PASS_DEAD_CODE, DW_PASS_COMMON,    DW_PASS_FUSE};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        problem p;
        dw__tensor want[16] = {0}, have[16] = {0};
        open_problem(&p, &cases[i], -1);
        uint32_t count = dw_graph_output_count(p.graph);
        OK(dw__interpret(p.graph, sizes, p.leaves, want, NULL));
        for (size_t k = 0; k < sizeof order / sizeof *order; k++) {
            OK(dw_graph_run_pass(&p.graph, order[k]));
            OK(dw__interpret(p.graph, sizes, p.leaves, have, NULL));
            compare(&cases[i], dw_pass_name(order[k]), want, have, count);
            release(have, count);
        }
        for (dw_node n = 0; n < dw_graph_node_count(p.graph); n++)
            assert_false(dw_op_is_elementwise(dw_node_op(p.graph, n)));
        release(want, count);
        close_problem(&p);
    }
}

/* ---- the order of the gradient pass ---------------------------------------------------------- */

static dw_graph *walk_graph(dw_value *x, dw_value *dy) {
    dw_graph *g;
    dw_dim two = 2;
    OK(dw_graph_create(&g));
    OK(dw_graph_leaf(g, DW_ROLE_INPUT, "x", DW_F32, 1, &two, x));
    OK(dw_graph_leaf(g, DW_ROLE_GRADIENT, "dy", DW_F32, 1, &two, dy));
    return g;
}

static void gradient_of_an_output_listed_twice_is_the_sum(void **state) {
    (void)state;
    dw_value x, dy, grad;
    dw_graph *g = walk_graph(&x, &dy);
    OK(dw_graph_gradient(g, 2, (dw_value[]){x, x}, (dw_value[]){dy, dy}, 1, &x, &grad));
    assert_int_equal(dw_node_op(g, dw_value_node(g, grad)), DW_OP_ADD);
    assert_int_equal(dw_node_input(g, dw_value_node(g, grad), 0), dy);
    assert_int_equal(dw_node_input(g, dw_value_node(g, grad), 1), dy);
    dw_graph_destroy(g);
}

static void an_input_that_is_an_output_gets_its_gradient(void **state) {
    (void)state;
    dw_value x, dy, grad;
    dw_graph *g = walk_graph(&x, &dy);
    OK(dw_graph_gradient(g, 1, &x, &dy, 1, &x, &grad));
    assert_int_equal(grad, dy);
    dw_graph_destroy(g);
}

static void stop_gradient_stops_gradients(void **state) {
    (void)state;
    static const dw_op stops[] = {DW_OP_STOP_GRADIENT, DW_OP_FLOOR, DW_OP_SIGN};
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        dw_value x, dy, grad = 0;
        dw_graph *g = walk_graph(&x, &dy);
        dw__emitter e = {g, DW_OK};
        dw_value y = dw__emit_unary(&e, DW_OP_EXP, dw__emit_unary(&e, stops[i], x));
        OK(e.status);
        OK(dw_graph_gradient(g, 1, &y, &dy, 1, &x, &grad));
        assert_int_equal(grad, DW_NONE);
        dw_graph_destroy(g);
    }
}

static void backward_nodes_keep_their_origin(void **state) {
    (void)state;
    dw_value x, dy, grad;
    dw_graph *g = walk_graph(&x, &dy);
    dw__emitter e = {g, DW_OK};
    OK(dw_graph_set_origin(g, DW_REGION_MLP, 3, "h.3.mlp"));
    dw_value y = dw__emit_unary(&e, DW_OP_EXP, x);
    OK(dw_graph_set_origin(g, DW_REGION_HEAD, -1, "head"));
    OK(dw_graph_gradient(g, 1, &y, &dy, 1, &x, &grad));
    dw_node made = dw_value_node(g, grad);
    assert_int_equal(dw_node_region(g, made), DW_REGION_MLP);
    assert_int_equal(dw_node_layer(g, made), 3);
    assert_string_equal(dw_node_module(g, made), "h.3.mlp");
    assert_true(dw_node_is_backward(g, made));
    dw_value z = dw__emit_unary(&e, DW_OP_EXP, x);
    assert_int_equal(dw_node_region(g, dw_value_node(g, z)), DW_REGION_HEAD);
    assert_false(dw_node_is_backward(g, dw_value_node(g, z)));
    dw_graph_destroy(g);
}

static void operations_without_gradient_are_named(void **state) {
    (void)state;
    dw_value x, dy, grad;
    dw_graph *g = walk_graph(&x, &dy);
    dw_attr body = dw_attr_string(DW_ATTR_KEY_BODY, "t0=exp(i0);out(t0)");
    dw_value y;
    OK(dw_graph_set_origin(g, DW_REGION_MLP, 0, "block.act"));
    OK(dw_graph_apply(g, DW_OP_FUSED, 1, &x, 1, &body, &y));
    assert_int_equal(dw_graph_gradient(g, 1, &y, &dy, 1, &x, &grad), DW_UNSUPPORTED);
    assert_non_null(strstr(dw_last_error(), "fused"));
    assert_non_null(strstr(dw_last_error(), "block.act"));
    dw_graph_destroy(g);
}

static void bad_arguments_are_rejected(void **state) {
    (void)state;
    dw_value x, dy, grad, i;
    dw_dim three = 3;
    dw_graph *g = walk_graph(&x, &dy);
    OK(dw_graph_leaf(g, DW_ROLE_INPUT, "i", DW_I64, 1, &three, &i));
    assert_int_equal(dw_graph_gradient(g, 1, &i, &dy, 1, &x, &grad), DW_TYPE);
    assert_int_equal(dw_graph_gradient(g, 1, &x, &i, 1, &x, &grad), DW_SHAPE);
    dw_value none = 99;
    assert_int_equal(dw_graph_gradient(g, 1, &x, &dy, 1, &none, &grad), DW_INVALID_ARGUMENT);
    dw_graph_destroy(g);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rule_agrees_with_differences),
        cmocka_unit_test(pow_of_zero_has_a_finite_gradient),
        cmocka_unit_test(padding_gets_no_gradient),
        cmocka_unit_test(passes_keep_the_numbers),
        cmocka_unit_test(gradient_of_an_output_listed_twice_is_the_sum),
        cmocka_unit_test(an_input_that_is_an_output_gets_its_gradient),
        cmocka_unit_test(stop_gradient_stops_gradients),
        cmocka_unit_test(backward_nodes_keep_their_origin),
        cmocka_unit_test(operations_without_gradient_are_named),
        cmocka_unit_test(bad_arguments_are_rejected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
