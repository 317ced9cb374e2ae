/* Folding of constants and identities.
 *
 * A result never changes by a bit, apart from NaN payloads. Hence x+0 stays (it turns -0 into 0) but x-0 is
 * dropped, and x*0 stays (NaN and infinity). Constants are combined only by operations that every machine
 * rounds correctly. There is one deliberate exception: pow with exponent 2 or 0.5 becomes x*x or sqrt(x), as
 * in PyTorch and more precise than pow. They differ at pow(-0, 0.5) = 0 and pow(-inf, 0.5) = inf. */
#include "graph/pass_fold.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FOLD_ROUNDS 16 /* most times that a result is folded again; never reached */

typedef struct fold {
    dw__emitter e;
    const dw__rewrite *rewrite;
    dw_node node;
    dw_op op;
    uint32_t input_count;
    dw_value inputs[DW_MAX_INPUTS];
    dw__type out, in; /* of output 0 and of operand 0 (when there is one) */
} fold;

static const dw_attr *attr(const fold *f, dw_attr_key key) {
    return dw_node_attr(f->e.graph, f->node, key);
}

/* True if the value is a known number. `number` is rounded to the value's dtype. */
static bool known(const fold *f, dw_value value, double *number) {
    if (!dw__is_splat(f->e.graph, value, number)) return false;
    *number = dw__round_to(dw_value_dtype(f->e.graph, value), *number);
    return true;
}

static bool is_number(const fold *f, dw_value value, double number) {
    double have;
    return known(f, value, &have) && have == number && signbit(have) == signbit(number);
}

static bool is_any_zero(const fold *f, dw_value value) {
    double have;
    return known(f, value, &have) && have == 0.0;
}

static dw_value emit_output_constant(fold *f, double number) {
    return dw__emit_constant(&f->e, f->out.dtype, f->out.rank, f->out.shape, number);
}

static bool is_shared(const fold *f, dw_value value) {
    return value < f->rewrite->uses.count && f->rewrite->uses.items[value] > 1;
}

static bool same_type(const dw__type *a, const dw__type *b) {
    return a->dtype == b->dtype && dw__shape_equal(a, b);
}

/* ---- constants ------------------------------------------------------------------------------ */

static dw_value fold_elementwise_constant(fold *f) {
    double operands[DW_MAX_INPUTS], result;
    if (f->input_count == 0 || f->input_count > 2) return DW_NONE;
    for (uint32_t i = 0; i < f->input_count; i++)
        if (!known(f, f->inputs[i], &operands[i])) return DW_NONE;
    if (!dw__fold_evaluate(f->op, f->out.dtype, f->in.dtype, f->input_count, operands, &result))
        return DW_NONE;
    return emit_output_constant(f, result);
}

/* Moving a constant gives a constant. */
static dw_value fold_moved_constant(fold *f) {
    double number = 0.0;
    for (uint32_t i = 0; i < f->input_count; i++) {
        double other;
        if (!dw__is_splat(f->e.graph, f->inputs[i], &other)) return DW_NONE;
        if (i > 0 && (other != number || signbit(other) != signbit(number))) return DW_NONE;
        number = other;
    }
    if (f->op == DW_OP_PAD) {
        double around = dw_node_float(f->e.graph, f->node, DW_ATTR_KEY_VALUE, 0.0);
        if (around != number || signbit(around) != signbit(number)) return DW_NONE;
    }
    return emit_output_constant(f, number);
}

/* BF16 has no blocks, so the rounding is a cast, which elementwise fusion can absorb. */
static dw_value fold_quantize(fold *f) {
    if (strcmp(attr(f, DW_ATTR_KEY_SCHEME)->string, "bf16") != 0) return DW_NONE;
    return dw__emit_cast(&f->e, f->inputs[0], DW_BF16);
}

static dw_value fold_size(fold *f) {
    dw_dim dim = attr(f, DW_ATTR_KEY_SIZE)->list[0];
    if (dim < 0 || dim >= INT64_C(1) << 53 || (f->out.dtype == DW_I32 && dim > INT32_MAX) ||
        dw__round_to(f->out.dtype, (double)dim) != (double)dim)
        return DW_NONE;
    return emit_output_constant(f, (double)dim);
}

static dw_value fold_iota(fold *f) {
    int64_t axis = dw_node_int(f->e.graph, f->node, DW_ATTR_KEY_AXIS, 0);
    return f->out.shape[axis] == 1 ? emit_output_constant(f, 0.0) : DW_NONE;
}

/* ---- arithmetic identities ------------------------------------------------------------------ */

/* Folds x + c for the c that changes no bit: -0 for floating point. */
static dw_value fold_add(fold *f) {
    for (int i = 0; i < 2; i++) {
        dw_value x = f->inputs[i], c = f->inputs[1 - i];
        if (is_number(f, c, -0.0) || (!dw__dtype_is_float(f->out.dtype) && is_any_zero(f, c)))
            return x;
    }
    return DW_NONE;
}

static dw_value fold_mul(fold *f) {
    for (int i = 0; i < 2; i++) {
        dw_value x = f->inputs[i], c = f->inputs[1 - i];
        if (is_number(f, c, 1.0)) return x;
        if (is_number(f, c, -1.0)) return dw__emit_unary(&f->e, DW_OP_NEG, x);
    }
    return DW_NONE;
}

/* Largest k for which 2^k and 2^-k are both normal numbers of the dtype. */
static int exponent_bound(dw_dtype dtype) {
    if (dtype == DW_F64) return 1022;
    return dtype == DW_F16 ? 14 : 126;
}

/* Folds x/1 and x/-1. x/2^k becomes x*2^-k, which has the same bits. */
static dw_value fold_div(fold *f) {
    double c;
    int exponent;
    if (!known(f, f->inputs[1], &c)) return DW_NONE;
    if (c == 1.0) return f->inputs[0];
    if (!dw__dtype_is_float(f->out.dtype) || !isfinite(c) || c == 0.0) return DW_NONE;
    if (fabs(frexp(c, &exponent)) != 0.5 || abs(exponent - 1) > exponent_bound(f->out.dtype))
        return DW_NONE;
    return dw__emit_with_number(&f->e, DW_OP_MUL, f->inputs[0], 1.0 / c);
}

static dw_value fold_pow(fold *f) {
    dw_value x = f->inputs[0], exponent = f->inputs[1];
    if (is_number(f, exponent, 1.0)) return x;
    /* In BF16 and F16 the gradient of x*x would round differently from that of pow. */
    bool half = f->out.dtype == DW_BF16 || f->out.dtype == DW_F16;
    if (!half && is_number(f, exponent, 2.0)) return dw__emit_binary(&f->e, DW_OP_MUL, x, x);
    if (is_number(f, exponent, 0.5) && dw__dtype_is_float(f->out.dtype))
        return dw__emit_unary(&f->e, DW_OP_SQRT, x);
    return DW_NONE;
}

/* Folds op(op(x)) to x. */
static dw_value fold_involution(fold *f) {
    dw_node inner = dw__made_by(f->e.graph, f->inputs[0], f->op);
    return inner == DW_NONE ? DW_NONE : dw_node_input(f->e.graph, inner, 0);
}

/* Folds `and` with true and `or` with false to x. With the other constant the result is that constant. */
static dw_value fold_logic(fold *f) {
    double neutral = f->op == DW_OP_AND ? 1.0 : 0.0, have;
    if (f->inputs[0] == f->inputs[1]) return f->inputs[0];
    for (int i = 0; i < 2; i++) {
        if (!known(f, f->inputs[1 - i], &have)) continue;
        return (have != 0.0) == (neutral != 0.0) ? f->inputs[i] : f->inputs[1 - i];
    }
    return DW_NONE;
}

/* Folds a value compared with itself (not in floating point, because of NaN) and a bool compared with a constant. */
static dw_value fold_compare(fold *f) {
    bool reflexive = f->op == DW_OP_EQ || f->op == DW_OP_LE || f->op == DW_OP_GE;
    double have;
    if (f->inputs[0] == f->inputs[1] && !dw__dtype_is_float(f->in.dtype))
        return emit_output_constant(f, reflexive);
    if (f->in.dtype != DW_BOOL || (f->op != DW_OP_EQ && f->op != DW_OP_NE)) return DW_NONE;
    for (int i = 0; i < 2; i++) {
        if (!known(f, f->inputs[1 - i], &have)) continue;
        bool same = (have != 0.0) == (f->op == DW_OP_EQ);
        return same ? f->inputs[i] : dw__emit_unary(&f->e, DW_OP_LOGICAL_NOT, f->inputs[i]);
    }
    return DW_NONE;
}

static dw_value fold_select(fold *f) {
    double have;
    if (f->inputs[1] == f->inputs[2]) return f->inputs[1];
    if (known(f, f->inputs[0], &have)) return f->inputs[have != 0.0 ? 1 : 2];
    return DW_NONE;
}

/* True when every value of `from` is a value of `to`. */
static bool widens(dw_dtype from, dw_dtype to) {
    if (from == DW_BOOL || from == to) return true;
    if (from == DW_I32) return to == DW_I64 || to == DW_F64;
    if (from == DW_BF16 || from == DW_F16) return to == DW_F32 || to == DW_F64;
    return from == DW_F32 && to == DW_F64;
}

/* Drops a cast to the operand's own dtype, and the first of two casts if it is to a wider dtype. */
static dw_value fold_cast(fold *f) {
    if (f->in.dtype == f->out.dtype) return f->inputs[0];
    dw_node inner = dw__made_by(f->e.graph, f->inputs[0], DW_OP_CAST);
    if (inner == DW_NONE) return DW_NONE;
    dw_value x = dw_node_input(f->e.graph, inner, 0);
    if (!widens(dw_value_dtype(f->e.graph, x), f->in.dtype)) return DW_NONE;
    return dw__emit_cast(&f->e, x, f->out.dtype);
}

/* ---- data movement -------------------------------------------------------------------------- */

static dw_value fold_reshape(fold *f) {
    if (same_type(&f->in, &f->out)) return f->inputs[0];
    dw_node inner = dw__made_by(f->e.graph, f->inputs[0], DW_OP_RESHAPE);
    if (inner == DW_NONE) return DW_NONE;
    dw_value x = dw_node_input(f->e.graph, inner, 0);
    dw__type first = dw__type_of(f->e.graph, x);
    /* If other nodes read the inner reshape it stays anyway, perhaps as the copy of a permuted x. */
    if (is_shared(f, f->inputs[0]) && !dw__shape_equal(&first, &f->out)) return DW_NONE;
    return dw__emit_reshape(&f->e, x, f->out.rank, f->out.shape);
}

static dw_value fold_permute(fold *f) {
    const dw_attr *perm = attr(f, DW_ATTR_KEY_PERM);
    int64_t joint[DW_MAX_RANK];
    bool identity = true;
    for (uint32_t i = 0; i < perm->count; i++) identity = identity && perm->list[i] == i;
    if (identity) return f->inputs[0];
    dw_node inner = dw__made_by(f->e.graph, f->inputs[0], DW_OP_PERMUTE);
    if (inner == DW_NONE) return DW_NONE;
    const dw_attr *first = dw_node_attr(f->e.graph, inner, DW_ATTR_KEY_PERM);
    for (uint32_t i = 0; i < perm->count; i++) joint[i] = first->list[perm->list[i]];
    return dw__emit_permute(&f->e, dw_node_input(f->e.graph, inner, 0), (int)perm->count, joint);
}

static dw_value fold_broadcast(fold *f) {
    if (same_type(&f->in, &f->out)) return f->inputs[0];
    dw_node inner = dw__made_by(f->e.graph, f->inputs[0], DW_OP_BROADCAST);
    if (inner == DW_NONE) {
        inner = dw__made_by(f->e.graph, f->inputs[0], DW_OP_RESHAPE);
        if (inner == DW_NONE || !dw__prepends_ones(f->e.graph, inner)) return DW_NONE;
    }
    return dw__emit_broadcast(&f->e, dw_node_input(f->e.graph, inner, 0), f->out.rank,
                              f->out.shape);
}

static bool has_steps(const dw_attr *step) {
    for (uint32_t i = 0; step && i < step->count; i++)
        if (step->list[i] != 1) return true;
    return false;
}

static dw_value fold_slice(fold *f) {
    if (has_steps(attr(f, DW_ATTR_KEY_STEP))) return DW_NONE;
    if (same_type(&f->in, &f->out)) return f->inputs[0]; /* whole, as start <= limit <= dim */
    dw_node inner = dw__made_by(f->e.graph, f->inputs[0], DW_OP_SLICE);
    if (inner == DW_NONE || has_steps(dw_node_attr(f->e.graph, inner, DW_ATTR_KEY_STEP)))
        return DW_NONE;
    /* If other nodes read the inner slice it stays anyway, and recognisers match it: x[:R] of partial rope, say. */
    if (is_shared(f, f->inputs[0])) return DW_NONE;
    const dw_attr *start = attr(f, DW_ATTR_KEY_START), *limit = attr(f, DW_ATTR_KEY_LIMIT);
    const dw_attr *base = dw_node_attr(f->e.graph, inner, DW_ATTR_KEY_START);
    dw_dim starts[DW_MAX_RANK], limits[DW_MAX_RANK];
    for (uint32_t i = 0; i < start->count; i++) {
        starts[i] = dw__emit_dim_add(&f->e, base->list[i], start->list[i]);
        limits[i] = dw__emit_dim_add(&f->e, base->list[i], limit->list[i]);
    }
    dw_value x = dw_node_input(f->e.graph, inner, 0);
    dw_attr attrs[] = {dw_attr_list(DW_ATTR_KEY_START, start->count, starts),
                       dw_attr_list(DW_ATTR_KEY_LIMIT, start->count, limits)};
    return dw__emit(&f->e, DW_OP_SLICE, 1, &x, DW_COUNT(attrs), attrs);
}

static dw_value fold_pad(fold *f) {
    const dw_attr *low = attr(f, DW_ATTR_KEY_LOW), *high = attr(f, DW_ATTR_KEY_HIGH);
    for (uint32_t i = 0; i < low->count; i++)
        if (low->list[i] != 0 || high->list[i] != 0) return DW_NONE;
    return f->inputs[0];
}

/* Drops operands without elements. A single remaining operand is the result. */
static dw_value fold_concat(fold *f) {
    int64_t axis = dw_node_int(f->e.graph, f->node, DW_ATTR_KEY_AXIS, 0);
    dw_value kept[DW_MAX_INPUTS];
    uint32_t count = 0;
    for (uint32_t i = 0; i < f->input_count; i++)
        if (dw_value_shape(f->e.graph, f->inputs[i])[axis] != 0) kept[count++] = f->inputs[i];
    if (count == 0) kept[count++] = f->inputs[0];
    if (count == 1) return kept[0];
    if (count == f->input_count) return DW_NONE;
    dw_attr attrs = dw_attr_int(DW_ATTR_KEY_AXIS, axis);
    return dw__emit(&f->e, DW_OP_CONCAT, count, kept, 1, &attrs);
}

static dw_value fold_dropout(fold *f) {
    double p = dw_node_float(f->e.graph, f->node, DW_ATTR_KEY_P, 1.0);
    return p == 0.0 ? f->inputs[0] : DW_NONE;
}

/* ---- the pass ------------------------------------------------------------------------------- */

static dw_value fold_identity(fold *f) {
    switch (f->op) {
    case DW_OP_ADD: return fold_add(f);
    case DW_OP_SUB: return is_number(f, f->inputs[1], 0.0) ? f->inputs[0] : DW_NONE;
    case DW_OP_MUL: return fold_mul(f);
    case DW_OP_DIV: return fold_div(f);
    case DW_OP_POW: return fold_pow(f);
    case DW_OP_MAX:
    case DW_OP_MIN: return f->inputs[0] == f->inputs[1] ? f->inputs[0] : DW_NONE;
    case DW_OP_NEG:
    case DW_OP_LOGICAL_NOT: return fold_involution(f);
    case DW_OP_STOP_GRADIENT:
        return dw__made_by(f->e.graph, f->inputs[0], f->op) == DW_NONE ? DW_NONE : f->inputs[0];
    case DW_OP_AND:
    case DW_OP_OR: return fold_logic(f);
    case DW_OP_EQ:
    case DW_OP_NE:
    case DW_OP_LT:
    case DW_OP_LE:
    case DW_OP_GT:
    case DW_OP_GE: return fold_compare(f);
    case DW_OP_SELECT: return fold_select(f);
    case DW_OP_CAST: return fold_cast(f);
    case DW_OP_RESHAPE: return fold_reshape(f);
    case DW_OP_PERMUTE: return fold_permute(f);
    case DW_OP_BROADCAST: return fold_broadcast(f);
    case DW_OP_SLICE: return fold_slice(f);
    case DW_OP_PAD: return fold_pad(f);
    case DW_OP_CONCAT: return fold_concat(f);
    case DW_OP_DROPOUT: return fold_dropout(f);
    case DW_OP_QUANTIZE: return fold_quantize(f);
    case DW_OP_SIZE: return fold_size(f);
    case DW_OP_IOTA: return fold_iota(f);
    default: return DW_NONE;
    }
}

static dw_value fold_constant(fold *f) {
    switch (f->op) {
    case DW_OP_RESHAPE:
    case DW_OP_PERMUTE:
    case DW_OP_BROADCAST:
    case DW_OP_SLICE:
    case DW_OP_PAD:
    case DW_OP_CONCAT: return fold_moved_constant(f);
    default: return dw__op_table[f->op].elementwise ? fold_elementwise_constant(f) : DW_NONE;
    }
}

static fold open_fold(const dw__rewrite *rewrite, dw_node node) {
    dw_graph *graph = rewrite->graph;
    const dw__node_record *record = &graph->nodes.items[node];
    fold f = {.e = {graph, DW_OK},
              .rewrite = rewrite,
              .node = node,
              .op = record->op,
              .input_count = record->input_count};
    if (f.input_count > 0) memcpy(f.inputs, record->inputs, f.input_count * sizeof *f.inputs);
    f.out = dw__type_of(graph, record->outputs[0]);
    if (f.input_count > 0) f.in = dw__type_of(graph, f.inputs[0]);
    return f;
}

static dw_status fold_node(dw__rewrite *rewrite, dw_node node, dw_value *replacements) {
    dw_graph *graph = rewrite->graph;
    for (int round = 0; round < FOLD_ROUNDS; round++) {
        const dw__node_record *record = &graph->nodes.items[node];
        if (record->output_count != 1 && record->op != DW_OP_QUANTIZE) return DW_OK;
        fold f = open_fold(rewrite, node);
        dw_value made = fold_constant(&f);
        if (made == DW_NONE && f.e.status == DW_OK) made = fold_identity(&f);
        if (f.e.status != DW_OK) return f.e.status;
        if (made == DW_NONE) return DW_OK;
        bool fresh = made >= rewrite->uses.count;
        replacements[0] = made;
        if (!fresh) return DW_OK; /* it was folded when it was made */
        node = dw_value_node(graph, made);
    }
    return DW_OK;
}

dw_status dw__pass_fold(dw_graph **graph) { return dw__rewrite_each(graph, fold_node, NULL); }
