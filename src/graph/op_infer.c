/* Types of results: for every operation, the requirements on its operands and the types of its results.
 *
 * The rules are those of deepwell/ops.h. They hold symbolically: two dims agree if they are the same
 * polynomial. A bound (a slice within its dim, an index within a table) that is broken for numbers fails
 * here. A bound with symbols is checked when the sizes of the symbols are known (dw__graph_check_sizes). */
#include "common/scale_layout.h"
#include "graph/body.h"
#include "graph/emit.h"
#include "graph/layer_precision.h"
#include "graph/op_rules.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MESSAGE_BYTES = 1536 };

/* ---- looking at the draft ------------------------------------------------------------------ */

static const char *op_name(const dw__draft *draft) { return dw_op_name(draft->op); }

static const char *operand_name(const dw__draft *draft, uint32_t index) {
    return dw__operand_name(draft->op, index);
}

static bool has(const dw__draft *draft, uint32_t index) {
    return index < draft->input_count && draft->inputs[index] != DW_NONE;
}

static const dw__value_record *operand(const dw__draft *draft, uint32_t index) {
    return &draft->graph->values.items[draft->inputs[index]];
}

static int rank_of(const dw__draft *draft, uint32_t index) { return operand(draft, index)->rank; }
static dw_dtype dtype_of(const dw__draft *draft, uint32_t index) {
    return operand(draft, index)->dtype;
}
static const dw_dim *shape_of(const dw__draft *draft, uint32_t index) {
    return operand(draft, index)->shape;
}
/* Dim counted from the end: `back` = 1 is the last. */
static dw_dim dim_from_end(const dw__draft *draft, uint32_t index, int back) {
    return shape_of(draft, index)[rank_of(draft, index) - back];
}

/* "x [B, 4]" */
static dw__words show(const dw__draft *draft, uint32_t index) {
    dw__words shape = dw__shape_words(draft->graph, rank_of(draft, index), shape_of(draft, index));
    dw__words words;
    snprintf(words.text, sizeof words.text, "%s %.200s", operand_name(draft, index), shape.text);
    return words;
}

static dw__words show_dim(const dw__draft *draft, dw_dim dim) {
    return dw__dim_words(draft->graph, dim);
}

static const dw_attr *attr_of(const dw__draft *draft, dw_attr_key key) {
    return dw__find_attr(draft->attr_count, draft->attrs, key);
}

static int64_t int_of(const dw__draft *draft, dw_attr_key key, int64_t absent) {
    const dw_attr *attr = attr_of(draft, key);
    return attr ? attr->integer : absent;
}

static double float_of(const dw__draft *draft, dw_attr_key key, double absent) {
    const dw_attr *attr = attr_of(draft, key);
    return attr ? attr->number : absent;
}

/* ---- failing ------------------------------------------------------------------------------- */

DW_PRINTF(3, 4)
static dw_status refuse(const dw__draft *draft, dw_status status, const char *format, ...) {
    char message[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return dw__fail(status, "%s: %s", op_name(draft), message);
}

#define refuse(...) dw__not_ok((refuse)(__VA_ARGS__))

/* Prefixes the message of a failure in dim arithmetic with the name of this operation. */
static dw_status named(const dw__draft *draft, dw_status status) {
    return status == DW_OK ? DW_OK : dw__fail_prefix(status, "%s", op_name(draft));
}

/* ---- checks -------------------------------------------------------------------------------- */

static dw_status want_float(const dw__draft *draft, uint32_t index) {
    if (dw__dtype_is_float(dtype_of(draft, index))) return DW_OK;
    return refuse(draft, DW_TYPE, "%s is %s; expected a floating-point type: cast it first",
                  operand_name(draft, index), dw_dtype_name(dtype_of(draft, index)));
}

static dw_status want_integer(const dw__draft *draft, uint32_t index) {
    if (dw__dtype_is_integer(dtype_of(draft, index))) return DW_OK;
    return refuse(draft, DW_TYPE, "%s is %s; expected i32 or i64", operand_name(draft, index),
                  dw_dtype_name(dtype_of(draft, index)));
}

static dw_status want_number(const dw__draft *draft, uint32_t index) {
    if (dtype_of(draft, index) != DW_BOOL) return DW_OK;
    return refuse(draft, DW_TYPE, "%s is bool; expected a number: cast it first",
                  operand_name(draft, index));
}

static dw_status want_dtype(const dw__draft *draft, uint32_t index, dw_dtype dtype) {
    if (dtype_of(draft, index) == dtype) return DW_OK;
    return refuse(draft, DW_TYPE, "%s is %s; expected %s", operand_name(draft, index),
                  dw_dtype_name(dtype_of(draft, index)), dw_dtype_name(dtype));
}

/* Checks that operands `first` to `last`, if present, have the dtype of operand `like`. */
static dw_status want_same_dtype(const dw__draft *draft, uint32_t like, uint32_t first,
                                 uint32_t last) {
    for (uint32_t i = first; i <= last && i < draft->input_count; i++)
        if (has(draft, i) && dtype_of(draft, i) != dtype_of(draft, like))
            return refuse(draft, DW_TYPE,
                          "%s is %s but %s is %s; expected one type: cast one of them",
                          operand_name(draft, i), dw_dtype_name(dtype_of(draft, i)),
                          operand_name(draft, like), dw_dtype_name(dtype_of(draft, like)));
    return DW_OK;
}

static dw_status want_rank(const dw__draft *draft, uint32_t index, int rank) {
    if (rank_of(draft, index) == rank) return DW_OK;
    return refuse(draft, DW_SHAPE, "%s has rank %d; expected rank %d", show(draft, index).text,
                  rank_of(draft, index), rank);
}

static dw_status want_rank_at_least(const dw__draft *draft, uint32_t index, int rank) {
    if (rank_of(draft, index) >= rank) return DW_OK;
    return refuse(draft, DW_SHAPE, "%s has rank %d; expected rank %d or more",
                  show(draft, index).text, rank_of(draft, index), rank);
}

static dw_status want_result_rank(const dw__draft *draft, int rank) {
    if (rank <= DW_MAX_RANK) return DW_OK;
    return refuse(draft, DW_SHAPE, "the result would have rank %d; at most %d is supported", rank,
                  DW_MAX_RANK);
}

/* `why` names the origin of the shape: "x's shape", "[N] of x". */
static dw_status want_shape(const dw__draft *draft, uint32_t index, int rank, const dw_dim *shape,
                            const char *why) {
    bool same = rank_of(draft, index) == rank;
    for (int i = 0; same && i < rank; i++) same = shape_of(draft, index)[i] == shape[i];
    if (same) return DW_OK;
    return refuse(draft, DW_SHAPE, "%s must be %s, which is %s", show(draft, index).text,
                  dw__shape_words(draft->graph, rank, shape).text, why);
}

static dw_status want_shape_of(const dw__draft *draft, uint32_t index, uint32_t like) {
    char why[64];
    snprintf(why, sizeof why, "%s's shape", operand_name(draft, like));
    return want_shape(draft, index, rank_of(draft, like), shape_of(draft, like), why);
}

static dw_status want_scalar(const dw__draft *draft, uint32_t index) {
    return want_shape(draft, index, 0, NULL, "a scalar (rank 0)");
}

static dw_status want_seed(const dw__draft *draft, uint32_t index) {
    static const dw_dim two = 2;
    DW_RETURN_IF_FAILED(want_dtype(draft, index, DW_I64));
    return want_shape(draft, index, 1, &two, "Philox key and offset");
}

static dw_status want_flag(const dw__draft *draft, dw_attr_key key) {
    int64_t flag = int_of(draft, key, 0);
    if (flag == 0 || flag == 1) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "%s=%lld; expected 0 or 1", dw_attr_name(key),
                  (long long)flag);
}

static dw_status want_int_between(const dw__draft *draft, dw_attr_key key, int64_t value,
                                  int64_t least, int64_t most) {
    if (value >= least && value <= most) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "%s=%lld; expected %lld to %lld", dw_attr_name(key),
                  (long long)value, (long long)least, (long long)most);
}

static dw_status want_float_between(const dw__draft *draft, dw_attr_key key, double least,
                                    double most) {
    double value = float_of(draft, key, least);
    if (value >= least && value <= most) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "%s=%g; expected %g to %g", dw_attr_name(key), value,
                  least, most);
}

static dw_status want_finite(const dw__draft *draft, dw_attr_key key) {
    double value = float_of(draft, key, 0);
    if (isfinite(value)) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "%s=%g; expected a finite number", dw_attr_name(key),
                  value);
}

static dw_status want_word(const dw__draft *draft, dw_attr_key key, const char *const *words,
                           size_t count) {
    const char *given = attr_of(draft, key)->string;
    for (size_t i = 0; i < count; i++)
        if (strcmp(given, words[i]) == 0) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "%s=\"%.64s\"; expected \"%s\", \"%s\"%s%s%s",
                  dw_attr_name(key), given, words[0], words[1], count > 2 ? ", \"" : "",
                  count > 2 ? words[2] : "", count > 2 ? "\"" : "");
}

/* Reads the axis attribute and checks it against a rank (of operand x or of the result). */
static dw_status read_axis(const dw__draft *draft, int rank, int *axis) {
    int64_t given = int_of(draft, DW_ATTR_KEY_AXIS, 0);
    if (given < 0 || given >= rank)
        return refuse(draft, DW_INVALID_ARGUMENT,
                      "axis=%lld; expected 0 to %d, for rank %d (negative axes are not accepted)",
                      (long long)given, rank - 1, rank);
    *axis = (int)given;
    return DW_OK;
}

static dw_status want_entries(const dw__draft *draft, dw_attr_key key, uint32_t count) {
    const dw_attr *attr = attr_of(draft, key);
    if (!attr || attr->count == count) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "%s has %u entries; expected %u", dw_attr_name(key),
                  attr->count, count);
}

/* Fails if smaller > larger is known from the numbers. A comparison with symbols passes here. */
static dw_status want_at_most(const dw__draft *draft, const char *what, dw_dim smaller,
                              const char *limit, dw_dim larger) {
    dw_dim difference;
    DW_RETURN_IF_FAILED(named(draft, dw_dim_sub(draft->graph, larger, smaller, &difference)));
    if (!dw__dim_is_negative(draft->graph, difference)) return DW_OK;
    return refuse(draft, DW_SHAPE, "%s is %s; expected at most %s, %s", what,
                  show_dim(draft, smaller).text, limit, show_dim(draft, larger).text);
}

/* ---- results ------------------------------------------------------------------------------- */

static dw_status give(dw__inferred *out, dw_dtype dtype, int rank, const dw_dim *shape) {
    uint32_t at = out->count++;
    out->outputs[at].dtype = dtype;
    out->outputs[at].rank = rank;
    if (rank > 0) memcpy(out->outputs[at].shape, shape, (size_t)rank * sizeof *shape);
    return DW_OK;
}

static dw_status give_like(const dw__draft *draft, dw__inferred *out, uint32_t index) {
    return give(out, dtype_of(draft, index), rank_of(draft, index), shape_of(draft, index));
}

static dw_status product_of(dw_graph *graph, int rank, const dw_dim *shape, dw_dim *product) {
    *product = 1;
    for (int i = 0; i < rank; i++)
        DW_RETURN_IF_FAILED(dw_dim_mul(graph, *product, shape[i], product));
    return DW_OK;
}

/* ---- elementwise --------------------------------------------------------------------------- */

static bool accepts(dw__typing typing, dw_dtype dtype) {
    switch (typing) {
    case DW__FLOAT_TO_SAME:
    case DW__FLOAT_TO_BOOL:
    case DW__WITH_SEED: return dw__dtype_is_float(dtype);
    case DW__NUMBER_TO_SAME:
    case DW__NUMBER_TO_BOOL: return dtype != DW_BOOL;
    case DW__BOOL_TO_SAME: return dtype == DW_BOOL;
    default: return true;
    }
}

static const char *accepted_words(dw__typing typing) {
    switch (typing) {
    case DW__FLOAT_TO_SAME:
    case DW__FLOAT_TO_BOOL:
    case DW__WITH_SEED: return "a floating-point type";
    case DW__NUMBER_TO_SAME:
    case DW__NUMBER_TO_BOOL: return "a number";
    default: return "bool";
    }
}

dw_status dw__elementwise_dtype(dw_op op, uint32_t input_count, const dw_dtype *inputs,
                                dw_dtype typed_attr, dw_dtype *result) {
    const dw__op_row *row = &dw__op_table[op];
    uint32_t first = row->typing == DW__CHOICE;
    uint32_t last = row->typing == DW__WITH_SEED ? 1 : input_count;
    if (first && inputs[0] != DW_BOOL)
        return dw__fail(DW_TYPE, "%s is %s; expected bool", row->operands[0],
                        dw_dtype_name(inputs[0]));
    for (uint32_t i = first; i < last; i++) {
        if (!accepts(row->typing, inputs[i]))
            return dw__fail(DW_TYPE, "%s is %s; expected %s: cast it first", row->operands[i],
                            dw_dtype_name(inputs[i]), accepted_words(row->typing));
        if (inputs[i] != inputs[first])
            return dw__fail(DW_TYPE, "%s is %s but %s is %s; expected one type: cast one of them",
                            row->operands[i], dw_dtype_name(inputs[i]), row->operands[first],
                            dw_dtype_name(inputs[first]));
    }
    bool to_bool = row->typing == DW__FLOAT_TO_BOOL || row->typing == DW__NUMBER_TO_BOOL ||
                   row->typing == DW__ANY_TO_BOOL;
    *result = to_bool ? DW_BOOL : row->typing == DW__CONVERSION ? typed_attr : inputs[first];
    return DW_OK;
}

dw_status dw__infer_elementwise(const dw__draft *draft, dw__inferred *out) {
    dw_dtype inputs[3] = {DW_BOOL}, result;
    dw_dtype typed_attr = (dw_dtype)int_of(draft, DW_ATTR_KEY_DTYPE, DW_F32);
    for (uint32_t i = 0; i < draft->input_count; i++) inputs[i] = dtype_of(draft, i);
    dw_status status =
        dw__elementwise_dtype(draft->op, draft->input_count, inputs, typed_attr, &result);
    DW_RETURN_IF_FAILED(named(draft, status));
    for (uint32_t i = 1; i < draft->input_count; i++)
        DW_RETURN_IF_FAILED(want_shape_of(draft, i, 0));
    return give(out, result, rank_of(draft, 0), shape_of(draft, 0));
}

dw_status dw__infer_gelu(const dw__draft *draft, dw__inferred *out) {
    static const char *const words[] = {"none", "tanh"};
    DW_RETURN_IF_FAILED(want_word(draft, DW_ATTR_KEY_APPROXIMATE, words, DW_COUNT(words)));
    return dw__infer_elementwise(draft, out);
}

static dw_status want_stream(const dw__draft *draft) {
    return want_int_between(draft, DW_ATTR_KEY_STREAM, int_of(draft, DW_ATTR_KEY_STREAM, 0), 0,
                            INT64_MAX);
}

dw_status dw__infer_dropout(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(want_seed(draft, 1));
    DW_RETURN_IF_FAILED(want_float_between(draft, DW_ATTR_KEY_P, 0, 1));
    DW_RETURN_IF_FAILED(want_stream(draft));
    return give_like(draft, out, 0);
}

/* ---- no operands --------------------------------------------------------------------------- */

static bool holds(dw_dtype dtype, double value) {
    const double i32_limit = 2147483648.0, i64_limit = 9223372036854775808.0;
    if (dw__dtype_is_float(dtype)) return true;
    if (dtype == DW_BOOL) return value == 0 || value == 1;
    double limit = dtype == DW_I32 ? i32_limit : i64_limit;
    return value >= -limit && value < limit && value == floor(value);
}

dw_status dw__infer_constant(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *shape = attr_of(draft, DW_ATTR_KEY_SHAPE);
    dw_dtype dtype = (dw_dtype)int_of(draft, DW_ATTR_KEY_DTYPE, DW_F32);
    double value = float_of(draft, DW_ATTR_KEY_VALUE, 0);
    if (!holds(dtype, value))
        return refuse(draft, DW_TYPE, "value=%g is not a value of %s", value, dw_dtype_name(dtype));
    return give(out, dtype, (int)shape->count, shape->list);
}

static dw_status want_number_attr(const dw__draft *draft) {
    if (int_of(draft, DW_ATTR_KEY_DTYPE, DW_F32) != DW_BOOL) return DW_OK;
    return refuse(draft, DW_TYPE, "dtype is bool; expected a number type");
}

dw_status dw__infer_size(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(want_number_attr(draft));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_SIZE, 1));
    return give(out, (dw_dtype)int_of(draft, DW_ATTR_KEY_DTYPE, DW_I64), 0, NULL);
}

dw_status dw__infer_iota(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *shape = attr_of(draft, DW_ATTR_KEY_SHAPE);
    int axis;
    DW_RETURN_IF_FAILED(want_number_attr(draft));
    DW_RETURN_IF_FAILED(read_axis(draft, (int)shape->count, &axis));
    return give(out, (dw_dtype)int_of(draft, DW_ATTR_KEY_DTYPE, DW_I64), (int)shape->count,
                shape->list);
}

dw_status dw__infer_random_uniform(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *shape = attr_of(draft, DW_ATTR_KEY_SHAPE);
    DW_RETURN_IF_FAILED(want_seed(draft, 0));
    DW_RETURN_IF_FAILED(want_stream(draft));
    return give(out, DW_F32, (int)shape->count, shape->list);
}

/* ---- data movement ------------------------------------------------------------------------- */

dw_status dw__infer_reshape(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *shape = attr_of(draft, DW_ATTR_KEY_SHAPE);
    dw_dim before, after;
    DW_RETURN_IF_FAILED(
        named(draft, product_of(draft->graph, rank_of(draft, 0), shape_of(draft, 0), &before)));
    DW_RETURN_IF_FAILED(
        named(draft, product_of(draft->graph, (int)shape->count, shape->list, &after)));
    if (before != after)
        return refuse(draft, DW_SHAPE, "%s has %s elements, but shape=%s has %s",
                      show(draft, 0).text, show_dim(draft, before).text,
                      dw__shape_words(draft->graph, (int)shape->count, shape->list).text,
                      show_dim(draft, after).text);
    return give(out, dtype_of(draft, 0), (int)shape->count, shape->list);
}

dw_status dw__infer_permute(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *perm = attr_of(draft, DW_ATTR_KEY_PERM);
    int rank = rank_of(draft, 0);
    dw_dim shape[DW_MAX_RANK];
    uint32_t seen = 0;
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_PERM, (uint32_t)rank));
    for (int i = 0; i < rank; i++) {
        int64_t from = perm->list[i];
        if (from < 0 || from >= rank || seen >> from & 1)
            return refuse(draft, DW_INVALID_ARGUMENT,
                          "perm[%d] is %lld; expected each of 0 to %d once", i, (long long)from,
                          rank - 1);
        seen |= 1u << from;
        shape[i] = shape_of(draft, 0)[from];
    }
    return give(out, dtype_of(draft, 0), rank, shape);
}

dw_status dw__infer_broadcast(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *shape = attr_of(draft, DW_ATTR_KEY_SHAPE);
    int rank = rank_of(draft, 0), added = (int)shape->count - rank;
    bool fits = added >= 0;
    for (int i = 0; fits && i < rank; i++)
        fits = shape_of(draft, 0)[i] == 1 || shape_of(draft, 0)[i] == shape->list[added + i];
    if (!fits)
        return refuse(
            draft, DW_SHAPE,
            "%s does not broadcast to shape=%s: dims are aligned at the right, each dim must be 1 "
            "or equal",
            show(draft, 0).text,
            dw__shape_words(draft->graph, (int)shape->count, shape->list).text);
    return give(out, dtype_of(draft, 0), (int)shape->count, shape->list);
}

/* Number of elements from start to limit with this step. */
static dw_status sliced_dim(const dw__draft *draft, int axis, dw_dim start, dw_dim limit,
                            int64_t step, dw_dim *length) {
    if (step < 1)
        return refuse(draft, DW_INVALID_ARGUMENT, "step[%d] is %lld; expected 1 or more", axis,
                      (long long)step);
    DW_RETURN_IF_FAILED(named(draft, dw_dim_sub(draft->graph, limit, start, length)));
    if (step == 1) return DW_OK;
    if (*length < 0)
        return refuse(draft, DW_UNSUPPORTED,
                      "step[%d] is %lld over the symbolic length %s; a step other than 1 needs a "
                      "number: reshape the axis into [%s / step, step] and slice that",
                      axis, (long long)step, show_dim(draft, *length).text,
                      show_dim(draft, *length).text);
    *length = *length / step + (*length % step != 0);
    return DW_OK;
}

dw_status dw__infer_slice(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *start = attr_of(draft, DW_ATTR_KEY_START);
    const dw_attr *limit = attr_of(draft, DW_ATTR_KEY_LIMIT);
    const dw_attr *step = attr_of(draft, DW_ATTR_KEY_STEP);
    int rank = rank_of(draft, 0);
    dw_dim shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_START, (uint32_t)rank));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_LIMIT, (uint32_t)rank));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_STEP, (uint32_t)rank));
    for (int i = 0; i < rank; i++) {
        char what[32], of[32];
        snprintf(what, sizeof what, "limit[%d]", i);
        snprintf(of, sizeof of, "x's dim %d", i);
        DW_RETURN_IF_FAILED(want_at_most(draft, what, limit->list[i], of, shape_of(draft, 0)[i]));
        snprintf(what, sizeof what, "start[%d]", i);
        snprintf(of, sizeof of, "limit[%d]", i);
        DW_RETURN_IF_FAILED(want_at_most(draft, what, start->list[i], of, limit->list[i]));
        DW_RETURN_IF_FAILED(sliced_dim(draft, i, start->list[i], limit->list[i],
                                       step ? step->list[i] : 1, &shape[i]));
    }
    return give(out, dtype_of(draft, 0), rank, shape);
}

dw_status dw__infer_pad(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *low = attr_of(draft, DW_ATTR_KEY_LOW), *high = attr_of(draft, DW_ATTR_KEY_HIGH);
    double value = float_of(draft, DW_ATTR_KEY_VALUE, 0);
    int rank = rank_of(draft, 0);
    dw_dim shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_LOW, (uint32_t)rank));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_HIGH, (uint32_t)rank));
    if (!holds(dtype_of(draft, 0), value))
        return refuse(draft, DW_TYPE, "value=%g is not a value of %s", value,
                      dw_dtype_name(dtype_of(draft, 0)));
    for (int i = 0; i < rank; i++) {
        DW_RETURN_IF_FAILED(
            named(draft, dw_dim_add(draft->graph, shape_of(draft, 0)[i], low->list[i], &shape[i])));
        DW_RETURN_IF_FAILED(
            named(draft, dw_dim_add(draft->graph, shape[i], high->list[i], &shape[i])));
    }
    return give(out, dtype_of(draft, 0), rank, shape);
}

dw_status dw__infer_concat(const dw__draft *draft, dw__inferred *out) {
    int axis, rank = rank_of(draft, 0);
    dw_dim shape[DW_MAX_RANK] = {0};
    DW_RETURN_IF_FAILED(read_axis(draft, rank, &axis));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, 1, draft->input_count));
    memcpy(shape, shape_of(draft, 0), (size_t)rank * sizeof *shape);
    for (uint32_t i = 1; i < draft->input_count; i++) {
        DW_RETURN_IF_FAILED(want_rank(draft, i, rank));
        for (int k = 0; k < rank; k++)
            if (k != axis && shape_of(draft, i)[k] != shape[k])
                return refuse(draft, DW_SHAPE,
                              "operand %u is %s and operand 0 is %s; all dims but axis %d must be "
                              "equal, and dim %d is not",
                              i, show(draft, i).text, show(draft, 0).text, axis, k);
        DW_RETURN_IF_FAILED(named(
            draft, dw_dim_add(draft->graph, shape[axis], shape_of(draft, i)[axis], &shape[axis])));
    }
    return give(out, dtype_of(draft, 0), rank, shape);
}

/* Replaces `removed` dims of `shape`, from `axis` on, by `count` others. */
static dw_status splice(const dw__draft *draft, int rank, const dw_dim *shape, int axis,
                        int removed, int count, const dw_dim *inserted, int *out_rank,
                        dw_dim *out_shape) {
    *out_rank = rank - removed + count;
    DW_RETURN_IF_FAILED(want_result_rank(draft, *out_rank));
    for (int i = 0; i < axis; i++) out_shape[i] = shape[i];
    for (int i = 0; i < count; i++) out_shape[axis + i] = inserted[i];
    for (int i = axis + removed; i < rank; i++) out_shape[i - removed + count] = shape[i];
    return DW_OK;
}

dw_status dw__infer_take(const dw__draft *draft, dw__inferred *out) {
    int axis, rank;
    dw_dim shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(want_integer(draft, 1));
    DW_RETURN_IF_FAILED(read_axis(draft, rank_of(draft, 0), &axis));
    DW_RETURN_IF_FAILED(splice(draft, rank_of(draft, 0), shape_of(draft, 0), axis, 1,
                               rank_of(draft, 1), shape_of(draft, 1), &rank, shape));
    return give(out, dtype_of(draft, 0), rank, shape);
}

/* Checks an index tensor: it has x's rank, and apart from the axis no dim is larger than in `shape`. */
static dw_status want_index_within(const dw__draft *draft, uint32_t index, int rank,
                                   const dw_dim *shape, int axis, const char *of) {
    DW_RETURN_IF_FAILED(want_integer(draft, index));
    DW_RETURN_IF_FAILED(want_rank(draft, index, rank));
    for (int k = 0; k < rank; k++) {
        char what[48], limit[48];
        snprintf(what, sizeof what, "%s's dim %d", operand_name(draft, index), k);
        snprintf(limit, sizeof limit, "%s %d", of, k);
        if (k != axis)
            DW_RETURN_IF_FAILED(
                want_at_most(draft, what, shape_of(draft, index)[k], limit, shape[k]));
    }
    return DW_OK;
}

dw_status dw__infer_take_along(const dw__draft *draft, dw__inferred *out) {
    int axis, rank = rank_of(draft, 0);
    DW_RETURN_IF_FAILED(read_axis(draft, rank, &axis));
    DW_RETURN_IF_FAILED(want_index_within(draft, 1, rank, shape_of(draft, 0), axis, "x's dim"));
    return give(out, dtype_of(draft, 0), rank, shape_of(draft, 1));
}

dw_status dw__infer_scatter_add(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *size = attr_of(draft, DW_ATTR_KEY_SIZE);
    int axis, rank, index_rank = rank_of(draft, 0), update_rank = rank_of(draft, 1);
    dw_dim shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(want_integer(draft, 0));
    DW_RETURN_IF_FAILED(want_number(draft, 1));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_SIZE, 1));
    if (update_rank < index_rank)
        return refuse(draft, DW_SHAPE, "%s has fewer dims than %s, whose dims it must contain",
                      show(draft, 1).text, show(draft, 0).text);
    DW_RETURN_IF_FAILED(read_axis(draft, update_rank - index_rank + 1, &axis));
    for (int k = 0; k < index_rank; k++)
        if (shape_of(draft, 1)[axis + k] != shape_of(draft, 0)[k])
            return refuse(draft, DW_SHAPE, "%s must have i's dims %s from axis %d on",
                          show(draft, 1).text,
                          dw__shape_words(draft->graph, index_rank, shape_of(draft, 0)).text, axis);
    DW_RETURN_IF_FAILED(splice(draft, update_rank, shape_of(draft, 1), axis, index_rank, 1,
                               size->list, &rank, shape));
    return give(out, dtype_of(draft, 1), rank, shape);
}

dw_status dw__infer_put_along_add(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *size = attr_of(draft, DW_ATTR_KEY_SIZE);
    int axis, rank = rank_of(draft, 1);
    DW_RETURN_IF_FAILED(want_number(draft, 1));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_SIZE, (uint32_t)rank));
    DW_RETURN_IF_FAILED(read_axis(draft, rank, &axis));
    DW_RETURN_IF_FAILED(want_index_within(draft, 0, rank, size->list, axis, "size"));
    DW_RETURN_IF_FAILED(want_shape_of(draft, 0, 1));
    return give(out, dtype_of(draft, 1), rank, size->list);
}

/* ---- reducing ------------------------------------------------------------------------------ */

static dw_status read_axes(const dw__draft *draft, int rank, uint32_t *mask) {
    const dw_attr *axes = attr_of(draft, DW_ATTR_KEY_AXES);
    int64_t before = -1;
    *mask = 0;
    for (uint32_t i = 0; i < axes->count; i++) {
        if (axes->list[i] <= before || axes->list[i] >= rank)
            return refuse(draft, DW_INVALID_ARGUMENT,
                          "axes[%u] is %lld; expected axes of %s, ascending and each once", i,
                          (long long)axes->list[i], show(draft, 0).text);
        before = axes->list[i];
        *mask |= 1u << before;
    }
    return DW_OK;
}

static dw_status give_reduced(const dw__draft *draft, dw__inferred *out, dw_dtype dtype,
                              uint32_t mask) {
    dw_dim shape[DW_MAX_RANK];
    int rank = 0;
    bool keep = int_of(draft, DW_ATTR_KEY_KEEP, 0) == 1;
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_KEEP));
    for (int k = 0; k < rank_of(draft, 0); k++) {
        bool reduced = mask >> k & 1;
        if (!reduced) shape[rank++] = shape_of(draft, 0)[k];
        if (reduced && keep) shape[rank++] = 1;
    }
    return give(out, dtype, rank, shape);
}

dw_status dw__infer_reduce(const dw__draft *draft, dw__inferred *out) {
    uint32_t mask;
    bool bool_allowed = draft->op == DW_OP_REDUCE_MAX || draft->op == DW_OP_REDUCE_MIN;
    if (!bool_allowed) DW_RETURN_IF_FAILED(want_number(draft, 0));
    if (draft->op == DW_OP_MEAN) DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(read_axes(draft, rank_of(draft, 0), &mask));
    return give_reduced(draft, out, dtype_of(draft, 0), mask);
}

dw_status dw__infer_arg_reduce(const dw__draft *draft, dw__inferred *out) {
    int axis;
    DW_RETURN_IF_FAILED(want_number(draft, 0));
    DW_RETURN_IF_FAILED(read_axis(draft, rank_of(draft, 0), &axis));
    return give_reduced(draft, out, DW_I64, 1u << axis);
}

dw_status dw__infer_cumsum(const dw__draft *draft, dw__inferred *out) {
    int axis;
    DW_RETURN_IF_FAILED(want_number(draft, 0));
    DW_RETURN_IF_FAILED(read_axis(draft, rank_of(draft, 0), &axis));
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_REVERSE));
    return give_like(draft, out, 0);
}

dw_status dw__infer_sort(const dw__draft *draft, dw__inferred *out) {
    int axis;
    DW_RETURN_IF_FAILED(want_number(draft, 0));
    DW_RETURN_IF_FAILED(read_axis(draft, rank_of(draft, 0), &axis));
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_DESCENDING));
    give_like(draft, out, 0);
    return give(out, DW_I64, rank_of(draft, 0), shape_of(draft, 0));
}

dw_status dw__infer_top_k(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *size = attr_of(draft, DW_ATTR_KEY_SIZE);
    int axis, rank = rank_of(draft, 0);
    dw_dim shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(want_number(draft, 0));
    DW_RETURN_IF_FAILED(read_axis(draft, rank, &axis));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_SIZE, 1));
    DW_RETURN_IF_FAILED(want_at_most(draft, "size", size->list[0], "x's dim on the axis",
                                     shape_of(draft, 0)[axis]));
    memcpy(shape, shape_of(draft, 0), (size_t)rank * sizeof *shape);
    shape[axis] = size->list[0];
    give(out, dtype_of(draft, 0), rank, shape);
    return give(out, DW_I64, rank, shape);
}

dw_status dw__infer_softmax(const dw__draft *draft, dw__inferred *out) {
    int axis;
    DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(read_axis(draft, rank_of(draft, 0), &axis));
    return give_like(draft, out, 0);
}

dw_status dw__infer_softmax_backward(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, 1, 1));
    DW_RETURN_IF_FAILED(want_shape_of(draft, 1, 0));
    return dw__infer_softmax(draft, out);
}

/* ---- matmuls ------------------------------------------------------------------------------- */

dw_status dw__infer_matmul(const dw__draft *draft, dw__inferred *out) {
    int rank = rank_of(draft, 0);
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_TRANSPOSE_A));
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_TRANSPOSE_B));
    DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, 1, 1));
    DW_RETURN_IF_FAILED(want_rank_at_least(draft, 0, 2));
    DW_RETURN_IF_FAILED(want_rank(draft, 1, rank));
    bool transpose_a = int_of(draft, DW_ATTR_KEY_TRANSPOSE_A, 0) != 0;
    bool transpose_b = int_of(draft, DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    dw_dim shape[DW_MAX_RANK];
    for (int k = 0; k < rank - 2; k++) {
        if (shape_of(draft, 0)[k] != shape_of(draft, 1)[k])
            return refuse(draft, DW_SHAPE, "%s and %s differ in batch dim %d; expected equal ones",
                          show(draft, 0).text, show(draft, 1).text, k);
        shape[k] = shape_of(draft, 0)[k];
    }
    dw_dim inner_a = dim_from_end(draft, 0, transpose_a ? 2 : 1);
    dw_dim inner_b = dim_from_end(draft, 1, transpose_b ? 1 : 2);
    if (inner_a != inner_b)
        return refuse(
            draft, DW_SHAPE,
            "%s with transpose_a=%d and %s with transpose_b=%d: the inner dims are %s and "
            "%s, and must be equal",
            show(draft, 0).text, transpose_a, show(draft, 1).text, transpose_b,
            show_dim(draft, inner_a).text, show_dim(draft, inner_b).text);
    shape[rank - 2] = dim_from_end(draft, 0, transpose_a ? 1 : 2);
    shape[rank - 1] = dim_from_end(draft, 1, transpose_b ? 2 : 1);
    dw_dtype operands = dtype_of(draft, 0);
    dw_dtype result = (dw_dtype)int_of(draft, DW_ATTR_KEY_DTYPE, operands);
    bool half = operands == DW_BF16 || operands == DW_F16;
    if (result != operands && !(half && result == DW_F32))
        return refuse(draft, DW_TYPE, "dtype=%s for operands of %s; expected %s%s",
                      dw_dtype_name(result), dw_dtype_name(operands), dw_dtype_name(operands),
                      half ? " or f32" : "");
    return give(out, result, rank, shape);
}

/* Checks that the codecs support the operand's dtype. F64 has more digits than they can round. */
static dw_status want_quantizable(const dw__draft *draft, uint32_t index) {
    DW_RETURN_IF_FAILED(want_float(draft, index));
    if (dtype_of(draft, index) != DW_F64) return DW_OK;
    return refuse(draft, DW_TYPE, "%s is f64; expected f32, bf16 or f16: cast it first",
                  operand_name(draft, index));
}

static dw_status want_seed_and_stream(const dw__draft *draft, uint32_t index, const char *why) {
    if (!has(draft, index))
        return refuse(draft, DW_INVALID_ARGUMENT, "%s is absent; expected one, for %s",
                      operand_name(draft, index), why);
    if (!attr_of(draft, DW_ATTR_KEY_STREAM))
        return refuse(draft, DW_INVALID_ARGUMENT, "stream is absent; expected one, for %s", why);
    return DW_OK;
}

static dw_status read_scheme(const dw__draft *draft, dw__scheme_set set, dw_scheme *scheme) {
    DW_RETURN_IF_FAILED(
        named(draft, dw_scheme_find(attr_of(draft, DW_ATTR_KEY_SCHEME)->string, scheme)));
    return dw__scheme_check(op_name(draft), *scheme, set);
}

/* Checks what the operations that quantize blocks have in common. `set`: the schemes that the operation has. */
static dw_status check_quantize(const dw__draft *draft, dw__scheme_set set, dw_scheme *scheme,
                                int *axis) {
    static const dw_attr_key of_blocks[] = {DW_ATTR_KEY_SQUARE, DW_ATTR_KEY_HADAMARD,
                                            DW_ATTR_KEY_STOCHASTIC};
    DW_RETURN_IF_FAILED(want_quantizable(draft, 0));
    DW_RETURN_IF_FAILED(want_rank(draft, 0, 2));
    DW_RETURN_IF_FAILED(read_scheme(draft, set, scheme));
    DW_RETURN_IF_FAILED(read_axis(draft, 2, axis));
    DW_RETURN_IF_FAILED(want_stream(draft));
    if (has(draft, 1)) DW_RETURN_IF_FAILED(want_seed(draft, 1));
    for (size_t i = 0; i < DW_COUNT(of_blocks); i++) {
        DW_RETURN_IF_FAILED(want_flag(draft, of_blocks[i]));
        if (int_of(draft, of_blocks[i], 0) && !dw__scheme_in(*scheme, dw__block_schemes))
            return refuse(draft, DW_INVALID_ARGUMENT, "%s=1 with scheme=%s, which has no blocks",
                          dw_attr_name(of_blocks[i]), dw_scheme_name(*scheme));
    }
    const dw_attr *rule = attr_of(draft, DW_ATTR_KEY_SCALE_RULE);
    dw_scale_rule ignored;
    if (rule)
        DW_RETURN_IF_FAILED(named(draft, dw__rule_find("scale_rule", rule->string, &ignored)));
    if (rule && !dw__scheme_in(*scheme, dw__mx_schemes))
        return refuse(draft, DW_INVALID_ARGUMENT, "scale_rule=%s with scheme=%s; only MX has rules",
                      rule->string, dw_scheme_name(*scheme));
    if (int_of(draft, DW_ATTR_KEY_SQUARE, 0) && int_of(draft, DW_ATTR_KEY_HADAMARD, 0))
        return refuse(draft, DW_INVALID_ARGUMENT,
                      "hadamard=1 with square=1; a rotation is for blocks along one axis");
    if (int_of(draft, DW_ATTR_KEY_STOCHASTIC, 0))
        DW_RETURN_IF_FAILED(want_seed_and_stream(draft, 1, "stochastic rounding"));
    return DW_OK;
}

dw_status dw__infer_quantize(const dw__draft *draft, dw__inferred *out) {
    int axis;
    dw_scheme scheme;
    DW_RETURN_IF_FAILED(check_quantize(draft, DW__QUANTIZED_SCHEMES, &scheme, &axis));
    give(out, DW_BF16, 2, shape_of(draft, 0));
    return give(out, DW_F32, 0, NULL);
}

/* Number of blocks of `size` along a dim, of which the last may be shorter. */
static dw_status count_blocks(const dw__draft *draft, dw_dim dim, int size, dw_dim *count) {
    return named(draft, dw__dim_ceil_div(draft->graph, dim, size, count));
}

/* Shape of the scales of codes [outer, inner]. */
static dw_status shape_of_scales(const dw__draft *draft, const dw_scheme_info *scheme,
                                 const dw_dim *codes, dw_dim *scales) {
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_SQUARE));
    scales[0] = codes[0];
    if (int_of(draft, DW_ATTR_KEY_SQUARE, 0))
        DW_RETURN_IF_FAILED(count_blocks(draft, codes[0], scheme->block, &scales[0]));
    return count_blocks(draft, codes[1], scheme->block, &scales[1]);
}

dw_status dw__infer_quantize_blocks(const dw__draft *draft, dw__inferred *out) {
    int axis;
    dw_scheme scheme;
    dw_dim scales[2];
    DW_RETURN_IF_FAILED(check_quantize(draft, dw__exact_in_bf16, &scheme, &axis));
    const dw_scheme_info *info = dw_scheme_describe(scheme);
    const dw_dim *x = shape_of(draft, 0), codes[2] = {x[1 - axis], x[axis]};
    DW_RETURN_IF_FAILED(shape_of_scales(draft, info, codes, scales));
    give(out, info->element, 2, codes);
    give(out, info->scale, 2, scales);
    return give(out, DW_F32, 0, NULL);
}

dw_status dw__infer_dequantize_blocks(const dw__draft *draft, dw__inferred *out) {
    int axis;
    dw_scheme scheme;
    dw_dim scales[2];
    DW_RETURN_IF_FAILED(read_scheme(draft, dw__exact_in_bf16, &scheme));
    const dw_scheme_info *info = dw_scheme_describe(scheme);
    DW_RETURN_IF_FAILED(read_axis(draft, 2, &axis));
    DW_RETURN_IF_FAILED(want_dtype(draft, 0, info->element));
    DW_RETURN_IF_FAILED(want_dtype(draft, 1, info->scale));
    DW_RETURN_IF_FAILED(want_rank(draft, 0, 2));
    DW_RETURN_IF_FAILED(shape_of_scales(draft, info, shape_of(draft, 0), scales));
    DW_RETURN_IF_FAILED(want_shape(draft, 1, 2, scales, "a scale for each block of codes"));
    const dw_dim *codes = shape_of(draft, 0);
    return give(out, DW_BF16, 2, (dw_dim[]){codes[1 - axis], codes[axis]});
}

dw_status dw__infer_quantize_tensor(const dw__draft *draft, dw__inferred *out) {
    dw_scheme scheme;
    DW_RETURN_IF_FAILED(want_quantizable(draft, 0));
    DW_RETURN_IF_FAILED(want_rank(draft, 0, 2));
    DW_RETURN_IF_FAILED(read_scheme(draft, dw__fp8_tensor_schemes, &scheme));
    const dw_dtype element = dw_scheme_describe(scheme)->element;
    const dw_dim *x = shape_of(draft, 0);
    give(out, element, 2, x);
    give(out, element, 2, (dw_dim[]){x[1], x[0]});
    return give(out, DW_F32, 0, NULL);
}

/* Shape of the scales of codes [outer, inner] in tiles. */
static dw_status shape_of_tiles(const dw__draft *draft, int block, const dw_dim *codes,
                                dw_dim *tiles) {
    tiles[2] = DW_SCALE_TILE_BYTES;
    DW_RETURN_IF_FAILED(count_blocks(draft, codes[0], DW_SCALE_TILE_ROWS, &tiles[0]));
    return count_blocks(draft, codes[1], DW_SCALE_TILE_COLUMNS * block, &tiles[1]);
}

/* Shape of fp8-block's F32 scales of codes [outer, inner]: the scales of all rows for one block of columns after those for
 * another, or, of square blocks, the scales of a row of blocks one after the other, in whole fours. Returns the rank. */
static int shape_of_f32_scales(const dw__draft *draft, bool square, const dw_dim *codes,
                               dw_dim *scales, dw_status *status) {
    const int block = dw_scheme_describe(DW_SCHEME_FP8_BLOCK)->block;
    if (!square) {
        *status = count_blocks(draft, codes[1], block, &scales[0]);
        scales[1] = codes[0];
        return 2;
    }
    *status = count_blocks(draft, codes[0], block, &scales[0]);
    if (*status == DW_OK)
        *status = count_blocks(draft, codes[1], DW_SQUARE_SCALES * block, &scales[1]);
    scales[2] = DW_SQUARE_SCALES;
    return 3;
}

/* The codes and the tiles of one orientation. */
static dw_status give_tiles(const dw__draft *draft, const dw_scheme_info *scheme, int axis,
                            dw__inferred *out) {
    const dw_dim *x = shape_of(draft, 0);
    dw_dim codes[2] = {x[1 - axis]}, tiles[3];
    dw_status status = DW_OK;
    int rank = 3;
    DW_RETURN_IF_FAILED(count_blocks(draft, x[axis], DW_CODE_ROW, &codes[1]));
    DW_RETURN_IF_FAILED(named(draft, dw_dim_mul(draft->graph, codes[1], DW_CODE_ROW, &codes[1])));
    if (scheme->scale == DW_F32)
        rank = shape_of_f32_scales(draft, int_of(draft, DW_ATTR_KEY_SQUARE, 0) != 0, codes, tiles,
                                   &status);
    else
        status = shape_of_tiles(draft, scheme->block, codes, tiles);
    DW_RETURN_IF_FAILED(status);
    give(out, scheme->element, 2, codes);
    return give(out, scheme->scale, rank, tiles);
}

dw_status dw__infer_quantize_tiles(const dw__draft *draft, dw__inferred *out) {
    int axis;
    dw_scheme scheme;
    DW_RETURN_IF_FAILED(
        check_quantize(draft, dw__tile_schemes | DW__SCHEME(FP8_BLOCK), &scheme, &axis));
    const dw_scheme_info *info = dw_scheme_describe(scheme);
    if (scheme == DW_SCHEME_FP8_BLOCK &&
        (int_of(draft, DW_ATTR_KEY_HADAMARD, 0) || int_of(draft, DW_ATTR_KEY_STOCHASTIC, 0)))
        return refuse(draft, DW_UNSUPPORTED,
                      "scheme=fp8-block with hadamard=1 or stochastic=1, which it does not have");
    if (attr_of(draft, DW_ATTR_KEY_AXIS)) {
        DW_RETURN_IF_FAILED(give_tiles(draft, info, axis, out));
    } else {
        if (int_of(draft, DW_ATTR_KEY_HADAMARD, 0) || int_of(draft, DW_ATTR_KEY_STOCHASTIC, 0))
            return refuse(draft, DW_INVALID_ARGUMENT,
                          "axis is absent, for codes along both; expected one with hadamard=1 or "
                          "stochastic=1");
        DW_RETURN_IF_FAILED(give_tiles(draft, info, 1, out));
        DW_RETURN_IF_FAILED(give_tiles(draft, info, 0, out));
    }
    return info->tensor_scale ? give(out, DW_F32, 0, NULL) : DW_OK;
}

enum {
    CODES_A,
    CODES_B,
    SCALE_A,
    SCALE_B,
    TILES_A,
    TILES_B,
    BIAS
}; /* operands of multiply_codes */

static dw_status want_all(const dw__draft *draft, uint32_t first, bool wanted, const char *when) {
    for (uint32_t i = first; i < first + 2; i++)
        if (has(draft, i) != wanted)
            return refuse(draft, DW_INVALID_ARGUMENT, "%s is %s; expected %s %s",
                          operand_name(draft, i), wanted ? "absent" : "there",
                          wanted ? "one" : "none", when);
    return DW_OK;
}

/* The scales of fp8-block. Their rank says whether blocks are square. */
static dw_status check_f32_scales(const dw__draft *draft) {
    DW_RETURN_IF_FAILED(want_all(draft, SCALE_A, false, "with scales of blocks in f32"));
    for (uint32_t i = CODES_A; i <= CODES_B; i++) {
        const uint32_t tiles = TILES_A + i;
        dw_dim expected[3];
        dw_status status;
        DW_RETURN_IF_FAILED(want_dtype(draft, i, DW_E4M3));
        DW_RETURN_IF_FAILED(want_dtype(draft, tiles, DW_F32));
        const int rank = shape_of_f32_scales(draft, rank_of(draft, tiles) == 3, shape_of(draft, i),
                                             expected, &status);
        DW_RETURN_IF_FAILED(status);
        DW_RETURN_IF_FAILED(
            want_shape(draft, tiles, rank, expected, "the scales of blocks of these codes"));
    }
    return DW_OK;
}

/* Checks the scales of blocks. The types of codes and scales say which scheme they have. */
static dw_status check_tiles(const dw__draft *draft) {
    const bool paired = dtype_of(draft, CODES_A) == DW_E2M1,
               tensor = has(draft, TILES_A) && dtype_of(draft, TILES_A) == DW_UE4M3;
    DW_RETURN_IF_FAILED(want_all(draft, TILES_A, true, "for each operand, or for neither"));
    if (dtype_of(draft, TILES_A) == DW_F32) return check_f32_scales(draft);
    DW_RETURN_IF_FAILED(
        want_all(draft, SCALE_A, tensor,
                 tensor ? "with scales of blocks in ue4m3" : "with scales of blocks in e8m0"));
    for (uint32_t i = CODES_A; i <= CODES_B; i++) {
        const uint32_t tiles = TILES_A + i;
        const dw_dtype codes = dtype_of(draft, i);
        dw_dim expected[3];
        if (paired || tensor)
            DW_RETURN_IF_FAILED(want_dtype(draft, i, DW_E2M1));
        else if (codes != DW_E4M3 && codes != DW_E5M2)
            return refuse(draft, DW_TYPE, "%s is %s; expected e4m3 or e5m2", operand_name(draft, i),
                          dw_dtype_name(codes));
        DW_RETURN_IF_FAILED(want_dtype(draft, tiles, tensor ? DW_UE4M3 : DW_E8M0));
        DW_RETURN_IF_FAILED(shape_of_tiles(draft, tensor ? 16 : 32, shape_of(draft, i), expected));
        DW_RETURN_IF_FAILED(
            want_shape(draft, tiles, 3, expected, "the tiles of the scales of these codes"));
    }
    return DW_OK;
}

dw_status dw__infer_quantization_error(const dw__draft *draft, dw__inferred *out) {
    int axis;
    dw_scheme scheme;
    const dw_dim numbers = DW_OPERAND_STATISTICS;
    DW_RETURN_IF_FAILED(
        check_quantize(draft, DW__LAYER_SCHEMES & ~DW__SCHEME(BF16), &scheme, &axis));
    return give(out, DW_F64, 1, &numbers);
}

/* The matrices a and b, whose codes are checked with their tiles if they have these. */
static dw_status check_codes(const dw__draft *draft, bool in_blocks) {
    for (uint32_t i = CODES_A; i <= CODES_B; i++) {
        if (!in_blocks && dtype_of(draft, i) != DW_E4M3 && dtype_of(draft, i) != DW_E5M2)
            return refuse(draft, DW_TYPE, "%s is %s; expected e4m3 or e5m2", operand_name(draft, i),
                          dw_dtype_name(dtype_of(draft, i)));
        DW_RETURN_IF_FAILED(want_rank(draft, i, 2));
    }
    return DW_OK;
}

/* Reads the type of a product of codes. */
static dw_status read_product_dtype(const dw__draft *draft, dw_dtype *result) {
    *result = (dw_dtype)int_of(draft, DW_ATTR_KEY_DTYPE, DW_F32);
    if (*result == DW_F32 || *result == DW_BF16 || *result == DW_F16) return DW_OK;
    return refuse(draft, DW_TYPE, "dtype=%s; expected f32, bf16 or f16", dw_dtype_name(*result));
}

dw_status dw__infer_multiply_codes(const dw__draft *draft, dw__inferred *out) {
    dw_dtype result;
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_FAST_ACCUMULATION));
    const bool in_blocks = has(draft, TILES_A) || has(draft, TILES_B);
    DW_RETURN_IF_FAILED(check_codes(draft, in_blocks));
    if (in_blocks)
        DW_RETURN_IF_FAILED(check_tiles(draft));
    else
        DW_RETURN_IF_FAILED(want_all(draft, SCALE_A, true, "without scales of blocks"));
    const bool of_rows =
        !in_blocks && (rank_of(draft, SCALE_A) == 1 || rank_of(draft, SCALE_B) == 1);
    for (uint32_t i = SCALE_A; i <= SCALE_B; i++) {
        if (!has(draft, i)) continue;
        DW_RETURN_IF_FAILED(want_dtype(draft, i, DW_F32));
        if (of_rows)
            DW_RETURN_IF_FAILED(want_shape(draft, i, 1, shape_of(draft, i - SCALE_A),
                                           "one for each row of these codes, as of the others"));
        else
            DW_RETURN_IF_FAILED(want_rank(draft, i, 0));
    }
    if (shape_of(draft, CODES_A)[1] != shape_of(draft, CODES_B)[1])
        return refuse(draft, DW_SHAPE,
                      "the last dims of a and b are %s and %s; expected equal ones",
                      show_dim(draft, shape_of(draft, CODES_A)[1]).text,
                      show_dim(draft, shape_of(draft, CODES_B)[1]).text);
    DW_RETURN_IF_FAILED(read_product_dtype(draft, &result));
    if (has(draft, BIAS)) {
        DW_RETURN_IF_FAILED(want_dtype(draft, BIAS, result));
        DW_RETURN_IF_FAILED(want_shape(draft, BIAS, 1, shape_of(draft, CODES_B), "[N] of b"));
    }
    return give(out, result, 2,
                (dw_dim[]){shape_of(draft, CODES_A)[0], shape_of(draft, CODES_B)[0]});
}

/* Checks that x's rows have length K and that weight `w` and bias `b` agree. Returns the number N of results. */
static dw_status check_linear(const dw__draft *draft, uint32_t x, uint32_t w, uint32_t b,
                              dw_dim *results) {
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_TRANSPOSE_W));
    DW_RETURN_IF_FAILED(want_float(draft, x));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, x, w, w));
    DW_RETURN_IF_FAILED(want_rank_at_least(draft, x, 1));
    DW_RETURN_IF_FAILED(want_rank(draft, w, 2));
    bool transposed = int_of(draft, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw_dim length = dim_from_end(draft, x, 1), inner = shape_of(draft, w)[transposed ? 1 : 0];
    if (inner != length)
        return refuse(draft, DW_SHAPE,
                      "w is %s with transpose_w=%d, so its %s dim must equal x's last dim %s",
                      dw__shape_words(draft->graph, 2, shape_of(draft, w)).text, transposed,
                      transposed ? "last" : "first", show_dim(draft, length).text);
    *results = shape_of(draft, w)[transposed ? 0 : 1];
    if (!has(draft, b)) return DW_OK;
    DW_RETURN_IF_FAILED(want_same_dtype(draft, x, b, b));
    return want_shape(draft, b, 1, results, "[N] of w");
}

dw_status dw__infer_linear(const dw__draft *draft, dw__inferred *out) {
    dw_dim results, shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(check_linear(draft, 0, 1, 2, &results));
    int rank = rank_of(draft, 0);
    memcpy(shape, shape_of(draft, 0), (size_t)rank * sizeof *shape);
    shape[rank - 1] = results;
    return give(out, dtype_of(draft, 0), rank, shape);
}

dw_status dw__infer_quantized_linear(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(want_quantizable(draft, 0));
    dw_layer_precision layer;
    for (int i = 0; i < DW_LINEAR_OPERANDS; i++) {
        dw_attr_key key = dw__operand_key((dw_linear_operand)i);
        dw_status status = dw__operand_read(attr_of(draft, key)->string, &layer.operand[i]);
        if (status != DW_OK)
            return dw__fail_prefix(status, "%s: %s", op_name(draft), dw_attr_name(key));
    }
    DW_RETURN_IF_FAILED(named(draft, dw__layer_check(&layer)));
    DW_RETURN_IF_FAILED(want_stream(draft));
    if (has(draft, 3)) DW_RETURN_IF_FAILED(want_seed(draft, 3));
    if (dw__layer_is_stochastic(&layer))
        DW_RETURN_IF_FAILED(want_seed_and_stream(draft, 3, "stochastic rounding of gradients"));
    if (has(draft, 4)) {
        const dw_dim numbers = DW_LAYER_STATISTICS;
        DW_RETURN_IF_FAILED(want_dtype(draft, 4, DW_F64));
        DW_RETURN_IF_FAILED(want_shape(draft, 4, 1, &numbers, "the statistics of six operands"));
    }
    return dw__infer_linear(draft, out);
}

/* Row t of operand `x` [T, ..] has index i[t], so i must be integers [T]. */
static dw_status want_group_index(const dw__draft *draft, uint32_t x, uint32_t i) {
    DW_RETURN_IF_FAILED(want_float(draft, x));
    DW_RETURN_IF_FAILED(want_rank(draft, x, 2));
    DW_RETURN_IF_FAILED(want_integer(draft, i));
    return want_shape(draft, i, 1, shape_of(draft, x), "[T] of x's rows");
}

/* The matrices w [E, N, K] (or [E, K, N]) and biases b [E, N] of rows x [.., K]; `results` receives N. */
static dw_status check_group_matrices(const dw__draft *draft, dw_dim *results) {
    enum { X, W, INDEX, B };
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_TRANSPOSE_W));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, X, W, W));
    DW_RETURN_IF_FAILED(want_rank(draft, W, 3));
    bool transposed = int_of(draft, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0;
    dw_dim length = shape_of(draft, X)[1], inner = shape_of(draft, W)[transposed ? 2 : 1];
    if (inner != length)
        return refuse(draft, DW_SHAPE,
                      "w is %s with transpose_w=%d, so its %s dim must equal x's last dim %s",
                      show(draft, W).text, transposed, transposed ? "last" : "middle",
                      show_dim(draft, length).text);
    *results = shape_of(draft, W)[transposed ? 1 : 2];
    if (!has(draft, B)) return DW_OK;
    DW_RETURN_IF_FAILED(want_same_dtype(draft, X, B, B));
    dw_dim bias[2] = {shape_of(draft, W)[0], *results};
    return want_shape(draft, B, 2, bias, "[E, N] of w");
}

dw_status dw__infer_grouped_linear(const dw__draft *draft, dw__inferred *out) {
    enum { X, W, I };
    dw_dim results;
    DW_RETURN_IF_FAILED(want_group_index(draft, X, I));
    DW_RETURN_IF_FAILED(check_group_matrices(draft, &results));
    const dw_attr *ignored = attr_of(draft, DW_ATTR_KEY_IGNORE_INDEX);
    if (ignored && ignored->integer != shape_of(draft, W)[0])
        return refuse(draft, DW_INVALID_ARGUMENT,
                      "ignore_index is %lld; expected the number of matrices, %s",
                      (long long)ignored->integer, show_dim(draft, shape_of(draft, W)[0]).text);
    return give(out, dtype_of(draft, X), 2, (dw_dim[]){shape_of(draft, X)[0], results});
}

/* ---- rows sorted by group ------------------------------------------------------------------ */

dw_status dw__infer_group_rows(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *size = attr_of(draft, DW_ATTR_KEY_SIZE);
    dw_dim offsets;
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_SIZE, 1));
    DW_RETURN_IF_FAILED(want_integer(draft, 0));
    DW_RETURN_IF_FAILED(want_rank(draft, 0, 1));
    DW_RETURN_IF_FAILED(
        want_at_most(draft, "the number of rows", shape_of(draft, 0)[0], "INT32_MAX", INT32_MAX));
    DW_RETURN_IF_FAILED(named(draft, dw_dim_add(draft->graph, size->list[0], 1, &offsets)));
    give(out, DW_I32, 1, shape_of(draft, 0));
    give(out, DW_I32, 1, shape_of(draft, 0));
    return give(out, DW_I32, 1, &offsets);
}

static dw_status want_offsets(const dw__draft *draft, uint32_t index) {
    DW_RETURN_IF_FAILED(want_dtype(draft, index, DW_I32));
    return want_rank(draft, index, 1);
}

/* The rows of operand `x`, or those of the index of its rows in operand `index`, if there is one. */
static dw_status gathered_rows(const dw__draft *draft, uint32_t x, uint32_t index, dw_dim *rows) {
    *rows = shape_of(draft, x)[0];
    if (!has(draft, index)) return DW_OK;
    DW_RETURN_IF_FAILED(want_dtype(draft, index, DW_I32));
    DW_RETURN_IF_FAILED(want_rank(draft, index, 1));
    *rows = shape_of(draft, index)[0];
    return DW_OK;
}

dw_status dw__infer_segment_linear(const dw__draft *draft, dw__inferred *out) {
    enum { X, W, OFFSETS, B, ROWS, PLACES, WEIGHTS };
    dw_dim results, offsets, rows;
    DW_RETURN_IF_FAILED(want_float(draft, X));
    DW_RETURN_IF_FAILED(want_rank(draft, X, 2));
    DW_RETURN_IF_FAILED(want_offsets(draft, OFFSETS));
    DW_RETURN_IF_FAILED(check_group_matrices(draft, &results));
    DW_RETURN_IF_FAILED(named(draft, dw_dim_add(draft->graph, shape_of(draft, W)[0], 1, &offsets)));
    DW_RETURN_IF_FAILED(want_shape(draft, OFFSETS, 1, &offsets, "[E + 1] of w"));
    DW_RETURN_IF_FAILED(gathered_rows(draft, X, ROWS, &rows));
    if (has(draft, PLACES)) {
        DW_RETURN_IF_FAILED(want_dtype(draft, PLACES, DW_I32));
        DW_RETURN_IF_FAILED(want_shape(draft, PLACES, 1, &rows, "one for each row"));
    }
    if (has(draft, WEIGHTS)) {
        DW_RETURN_IF_FAILED(want_same_dtype(draft, X, WEIGHTS, WEIGHTS));
        DW_RETURN_IF_FAILED(want_shape(draft, WEIGHTS, 1, &rows, "one for each row"));
    }
    return give(out, dtype_of(draft, X), 2, (dw_dim[]){rows, results});
}

dw_status dw__infer_quantized_segment_linear(const dw__draft *draft, dw__inferred *out) {
    static const dw_linear_operand rounded[] = {DW_FORWARD_X, DW_FORWARD_W, DW_DGRAD_DY,
                                                DW_DGRAD_W};
    DW_RETURN_IF_FAILED(want_quantizable(draft, 0));
    for (size_t i = 0; i < DW_COUNT(rounded); i++) {
        const dw_attr_key key = dw__operand_key(rounded[i]);
        const char *text = attr_of(draft, key)->string;
        dw_operand_precision operand;
        const dw_status status = dw__operand_read(text, &operand);
        if (status != DW_OK)
            return dw__fail_prefix(status, "%s: %s", op_name(draft), dw_attr_name(key));
        /* The name of such a scheme alone: they take no suffix. */
        if (!dw__scheme_in(operand.scheme, dw__fp8_tensor_schemes) ||
            strcmp(text, dw_scheme_name(operand.scheme)) != 0)
            return refuse(draft, DW_UNSUPPORTED, "%s is \"%.64s\"; expected %s", dw_attr_name(key),
                          text, dw__scheme_list(dw__fp8_tensor_schemes).text);
    }
    return dw__infer_segment_linear(draft, out);
}

/* The matrices of b are taken to lie one below the other if its rows are as long as a's. */
dw_status dw__infer_segment_multiply_codes(const dw__draft *draft, dw__inferred *out) {
    enum { A, B, OFFSETS, SCALE_FIRST, SCALE_SECOND };
    dw_dtype result;
    dw_dim groups, results, whole;
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_FAST_ACCUMULATION));
    DW_RETURN_IF_FAILED(read_product_dtype(draft, &result));
    DW_RETURN_IF_FAILED(check_codes(draft, false));
    DW_RETURN_IF_FAILED(want_offsets(draft, OFFSETS));
    DW_RETURN_IF_FAILED(
        named(draft, dw_dim_sub(draft->graph, shape_of(draft, OFFSETS)[0], 1, &groups)));
    DW_RETURN_IF_FAILED(want_dtype(draft, SCALE_FIRST, DW_F32));
    DW_RETURN_IF_FAILED(want_rank(draft, SCALE_FIRST, 0));
    DW_RETURN_IF_FAILED(want_dtype(draft, SCALE_SECOND, DW_F32));
    if (rank_of(draft, SCALE_SECOND) != 0)
        DW_RETURN_IF_FAILED(
            want_shape(draft, SCALE_SECOND, 1, &groups, "one scale, or one for each group"));
    const dw_dim *a = shape_of(draft, A), *b = shape_of(draft, B);
    const bool below = b[1] == a[1];
    if (dw__dim_is_negative(draft->graph, groups) || groups == 0)
        return refuse(draft, DW_SHAPE,
                      "%s: expected one more offset than there are groups, 1 or more",
                      show(draft, OFFSETS).text);
    results = b[0];
    if (below) DW_RETURN_IF_FAILED(named(draft, dw_dim_div(draft->graph, b[0], groups, &results)));
    DW_RETURN_IF_FAILED(
        named(draft, dw_dim_mul(draft->graph, groups, below ? results : a[1], &whole)));
    if (whole != b[below ? 0 : 1])
        return refuse(draft, DW_SHAPE,
                      "%s and %s with %s groups; expected [E*N, K] or [N, E*K] for [R, K]",
                      show(draft, A).text, show(draft, B).text, show_dim(draft, groups).text);
    return give(out, result, 2, (dw_dim[]){a[0], results});
}

dw_status dw__infer_segment_linear_backward_weight(const dw__draft *draft, dw__inferred *out) {
    enum { X, Y, OFFSETS, X_ROWS, Y_ROWS };
    dw_dim groups, x_rows, y_rows;
    DW_RETURN_IF_FAILED(want_float(draft, X));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, X, Y, Y));
    DW_RETURN_IF_FAILED(want_rank(draft, X, 2));
    DW_RETURN_IF_FAILED(want_rank(draft, Y, 2));
    DW_RETURN_IF_FAILED(gathered_rows(draft, X, X_ROWS, &x_rows));
    DW_RETURN_IF_FAILED(gathered_rows(draft, Y, Y_ROWS, &y_rows));
    if (x_rows != y_rows)
        return refuse(draft, DW_SHAPE,
                      "%s and %s differ in the number of rows; expected equal ones",
                      show(draft, X).text, show(draft, Y).text);
    DW_RETURN_IF_FAILED(want_offsets(draft, OFFSETS));
    DW_RETURN_IF_FAILED(
        named(draft, dw_dim_sub(draft->graph, shape_of(draft, OFFSETS)[0], 1, &groups)));
    if (dw__dim_is_negative(draft->graph, groups))
        return refuse(draft, DW_SHAPE, "%s has no element; expected one more than there are groups",
                      show(draft, OFFSETS).text);
    dw_dim shape[3] = {groups, shape_of(draft, X)[1], shape_of(draft, Y)[1]};
    return give(out, dtype_of(draft, X), 3, shape);
}

/* Checks that operand `index` has x's dtype or the dtype in which sums of x are computed. */
static dw_status want_dtype_or_wide(const dw__draft *draft, uint32_t x, uint32_t index) {
    const dw_dtype own = dtype_of(draft, x), wide = dw__compute_dtype(own);
    if (dtype_of(draft, index) == own || dtype_of(draft, index) == wide) return DW_OK;
    return refuse(draft, DW_TYPE, "%s is %s but %s is %s; expected %s%s: cast it first",
                  operand_name(draft, index), dw_dtype_name(dtype_of(draft, index)),
                  operand_name(draft, x), dw_dtype_name(own), dw_dtype_name(own),
                  own == wide ? "" : " or f32");
}

/* Checks rows x [.., H], their places [T, k] and the weights [T, k]; `rows` receives T*k. */
static dw_status check_rows(const dw__draft *draft, dw_dim *rows) {
    enum { X, PLACE, WEIGHT };
    DW_RETURN_IF_FAILED(want_float(draft, X));
    DW_RETURN_IF_FAILED(want_rank(draft, X, 2));
    DW_RETURN_IF_FAILED(want_dtype(draft, PLACE, DW_I32));
    DW_RETURN_IF_FAILED(want_rank(draft, PLACE, 2));
    if (has(draft, WEIGHT)) {
        DW_RETURN_IF_FAILED(want_dtype_or_wide(draft, X, WEIGHT));
        DW_RETURN_IF_FAILED(want_shape_of(draft, WEIGHT, PLACE));
    }
    const dw_dim *place = shape_of(draft, PLACE);
    return named(draft, dw_dim_mul(draft->graph, place[0], place[1], rows));
}

/* The shape [rows, H] of `index`, where H is x's. */
static dw_status want_rows(const dw__draft *draft, uint32_t index, dw_dim rows, const char *why) {
    const dw_dim shape[2] = {rows, shape_of(draft, 0)[1]};
    return want_shape(draft, index, 2, shape, why);
}

dw_status dw__infer_spread_rows(const dw__draft *draft, dw__inferred *out) {
    enum { X, PLACE };
    dw_dim rows;
    DW_RETURN_IF_FAILED(check_rows(draft, &rows));
    DW_RETURN_IF_FAILED(want_rows(draft, X, shape_of(draft, PLACE)[0], "[T, H] for place [T, k]"));
    return give(out, dtype_of(draft, X), 2, (dw_dim[]){rows, shape_of(draft, X)[1]});
}

dw_status dw__infer_combine_rows(const dw__draft *draft, dw__inferred *out) {
    enum { X, PLACE };
    dw_dim rows;
    DW_RETURN_IF_FAILED(check_rows(draft, &rows));
    DW_RETURN_IF_FAILED(want_rows(draft, X, rows, "[T*k, H] for place [T, k]"));
    const dw_dtype own = dtype_of(draft, X), wide = dw__compute_dtype(own);
    const dw_dtype result = (dw_dtype)int_of(draft, DW_ATTR_KEY_DTYPE, own);
    if (result != own && result != wide)
        return refuse(draft, DW_TYPE, "dtype=%s for x of %s; expected %s%s", dw_dtype_name(result),
                      dw_dtype_name(own), dw_dtype_name(own), own == wide ? "" : " or f32");
    return give(out, result, 2, (dw_dim[]){shape_of(draft, PLACE)[0], shape_of(draft, X)[1]});
}

dw_status dw__infer_combine_rows_backward(const dw__draft *draft, dw__inferred *out) {
    enum { X, PLACE, WEIGHT, DY };
    dw_dim rows;
    DW_RETURN_IF_FAILED(check_rows(draft, &rows));
    DW_RETURN_IF_FAILED(want_rows(draft, X, rows, "[T*k, H] for place [T, k]"));
    DW_RETURN_IF_FAILED(want_dtype_or_wide(draft, X, DY));
    DW_RETURN_IF_FAILED(want_rank(draft, DY, 2));
    DW_RETURN_IF_FAILED(want_rows(draft, DY, shape_of(draft, PLACE)[0], "[T, H] for place [T, k]"));
    give_like(draft, out, X);
    return give_like(draft, out, WEIGHT);
}

static dw_status want_padding_index(const dw__draft *draft, dw_dim rows) {
    int64_t index = int_of(draft, DW_ATTR_KEY_PADDING_INDEX, -1);
    return want_int_between(draft, DW_ATTR_KEY_PADDING_INDEX, index, -1,
                            rows < 0 ? INT64_MAX : rows - 1);
}

dw_status dw__infer_embedding(const dw__draft *draft, dw__inferred *out) {
    dw_dim shape[DW_MAX_RANK];
    DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(want_rank(draft, 0, 2));
    DW_RETURN_IF_FAILED(want_integer(draft, 1));
    DW_RETURN_IF_FAILED(want_padding_index(draft, shape_of(draft, 0)[0]));
    int rank = rank_of(draft, 1);
    DW_RETURN_IF_FAILED(want_result_rank(draft, rank + 1));
    memcpy(shape, shape_of(draft, 1), (size_t)rank * sizeof *shape);
    shape[rank] = shape_of(draft, 0)[1];
    return give(out, dtype_of(draft, 0), rank + 1, shape);
}

dw_status dw__infer_embedding_backward(const dw__draft *draft, dw__inferred *out) {
    const dw_attr *size = attr_of(draft, DW_ATTR_KEY_SIZE);
    int rank = rank_of(draft, 0);
    DW_RETURN_IF_FAILED(want_integer(draft, 0));
    DW_RETURN_IF_FAILED(want_float(draft, 1));
    DW_RETURN_IF_FAILED(want_entries(draft, DW_ATTR_KEY_SIZE, 1));
    DW_RETURN_IF_FAILED(want_padding_index(draft, size->list[0]));
    DW_RETURN_IF_FAILED(want_rank(draft, 1, rank + 1));
    for (int k = 0; k < rank; k++)
        if (shape_of(draft, 1)[k] != shape_of(draft, 0)[k])
            return refuse(draft, DW_SHAPE, "%s must begin with the dims of %s", show(draft, 1).text,
                          show(draft, 0).text);
    dw_dim shape[2] = {size->list[0], shape_of(draft, 1)[rank]};
    return give(out, dtype_of(draft, 1), 2, shape);
}

/* ---- normalization ------------------------------------------------------------------------- */

/* Checks x [.., N] and the vectors `first` to `last` of length N. */
static dw_status check_norm(const dw__draft *draft, uint32_t x, uint32_t first, uint32_t last) {
    DW_RETURN_IF_FAILED(want_float(draft, x));
    DW_RETURN_IF_FAILED(want_rank_at_least(draft, x, 1));
    dw_dim length = dim_from_end(draft, x, 1);
    for (uint32_t i = first; i <= last; i++) {
        if (!has(draft, i)) continue;
        DW_RETURN_IF_FAILED(want_same_dtype(draft, x, i, i));
        DW_RETURN_IF_FAILED(want_shape(draft, i, 1, &length, "x's last dim"));
    }
    return DW_OK;
}

static dw_status want_epsilon(const dw__draft *draft) {
    DW_RETURN_IF_FAILED(want_finite(draft, DW_ATTR_KEY_EPS));
    return want_float_between(draft, DW_ATTR_KEY_EPS, 0, HUGE_VAL);
}

/* Checks a row statistic: one number for each row, so x's shape without the last dim. */
static dw_status want_row_statistic(const dw__draft *draft, uint32_t index, uint32_t x) {
    DW_RETURN_IF_FAILED(want_dtype(draft, index, dw__compute_dtype(dtype_of(draft, x))));
    return want_shape(draft, index, rank_of(draft, x) - 1, shape_of(draft, x),
                      "x's shape without the last dim");
}

static dw_status give_rows(const dw__draft *draft, dw__inferred *out, uint32_t x) {
    return give(out, dtype_of(draft, x), rank_of(draft, x) - 1, shape_of(draft, x));
}

/* A statistic of each row, in the type that norms compute in. */
static dw_status give_statistic(const dw__draft *draft, dw__inferred *out, uint32_t x) {
    return give(out, dw__compute_dtype(dtype_of(draft, x)), rank_of(draft, x) - 1,
                shape_of(draft, x));
}

static dw_status give_last_dim(const dw__draft *draft, dw__inferred *out, uint32_t x) {
    return give(out, dtype_of(draft, x), 1, &shape_of(draft, x)[rank_of(draft, x) - 1]);
}

dw_status dw__infer_layer_norm(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(check_norm(draft, 0, 1, 2));
    DW_RETURN_IF_FAILED(want_epsilon(draft));
    give_like(draft, out, 0);
    give_statistic(draft, out, 0);
    return give_statistic(draft, out, 0);
}

dw_status dw__infer_rms_norm(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(check_norm(draft, 0, 1, 1));
    DW_RETURN_IF_FAILED(want_epsilon(draft));
    give_like(draft, out, 0);
    return give_statistic(draft, out, 0);
}

/* Operands: dy, x, w?, then the row statistics. */
static dw_status check_norm_backward(const dw__draft *draft) {
    DW_RETURN_IF_FAILED(check_norm(draft, 1, 2, 2));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 1, 0, 0));
    DW_RETURN_IF_FAILED(want_shape_of(draft, 0, 1));
    for (uint32_t i = 3; i < draft->input_count; i++)
        DW_RETURN_IF_FAILED(want_row_statistic(draft, i, 1));
    return DW_OK;
}

dw_status dw__infer_layer_norm_backward(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(check_norm_backward(draft));
    give_like(draft, out, 1);
    give_last_dim(draft, out, 1);
    return give_last_dim(draft, out, 1);
}

dw_status dw__infer_rms_norm_backward(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(check_norm_backward(draft));
    give_like(draft, out, 1);
    return give_last_dim(draft, out, 1);
}

/* ---- attention and positions --------------------------------------------------------------- */

static dw_status want_rotation_table(const dw__draft *draft, uint32_t index) {
    int rank = rank_of(draft, 0);
    DW_RETURN_IF_FAILED(want_rank(draft, index, rank));
    for (int k = 0; k < rank - 1; k++)
        if (shape_of(draft, index)[k] != 1 && shape_of(draft, index)[k] != shape_of(draft, 0)[k])
            return refuse(draft, DW_SHAPE, "%s must have in dim %d either 1 or that of %s",
                          show(draft, index).text, k, show(draft, 0).text);
    dw_dim rotated = dim_from_end(draft, index, 1);
    if (rotated >= 0 && rotated % 2 != 0)
        return refuse(draft, DW_SHAPE, "%s has the odd last dim; expected an even one, for pairs",
                      show(draft, index).text);
    return want_at_most(draft, "the tables' last dim", rotated, "x's last dim",
                        dim_from_end(draft, 0, 1));
}

dw_status dw__infer_rope(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, 1, 2));
    DW_RETURN_IF_FAILED(want_rank_at_least(draft, 0, 2));
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_INTERLEAVED));
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_TRANSPOSED));
    DW_RETURN_IF_FAILED(want_rotation_table(draft, 1));
    DW_RETURN_IF_FAILED(want_rotation_table(draft, 2));
    if (dim_from_end(draft, 1, 1) != dim_from_end(draft, 2, 1))
        return refuse(draft, DW_SHAPE, "%s and %s differ in the last dim; expected equal ones",
                      show(draft, 1).text, show(draft, 2).text);
    return give_like(draft, out, 0);
}

/* The number of query heads must be a multiple of the number of key heads. */
static dw_status want_head_groups(const dw__draft *draft) {
    dw_dim query_heads = shape_of(draft, 0)[1], key_heads = shape_of(draft, 1)[1], groups;
    if (dw_dim_div(draft->graph, query_heads, key_heads, &groups) == DW_OK) return DW_OK;
    return refuse(draft, DW_SHAPE, "%s has %s heads and %s has %s; the first must be a multiple",
                  show(draft, 0).text, show_dim(draft, query_heads).text, show(draft, 1).text,
                  show_dim(draft, key_heads).text);
}

static dw_status want_attention_mask(const dw__draft *draft) {
    if (!has(draft, 3)) return DW_OK;
    const dw_dim scores[4] = {shape_of(draft, 0)[0], shape_of(draft, 0)[1], shape_of(draft, 0)[2],
                              shape_of(draft, 1)[2]};
    if (dtype_of(draft, 3) != DW_BOOL) DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, 3, 3));
    DW_RETURN_IF_FAILED(want_rank(draft, 3, 4));
    for (int k = 0; k < 4; k++)
        if (shape_of(draft, 3)[k] != 1 && shape_of(draft, 3)[k] != scores[k])
            return refuse(draft, DW_SHAPE,
                          "%s must have in each dim either 1 or that of %s, which "
                          "is [B, H, Sq, Sk] of q and k",
                          show(draft, 3).text, dw__shape_words(draft->graph, 4, scores).text);
    return DW_OK;
}

static dw_status want_attention_dropout(const dw__draft *draft) {
    DW_RETURN_IF_FAILED(want_float_between(draft, DW_ATTR_KEY_P, 0, 1));
    DW_RETURN_IF_FAILED(want_stream(draft));
    if (has(draft, 4)) return want_seed(draft, 4);
    if (float_of(draft, DW_ATTR_KEY_P, 0) == 0) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "p=%g needs the operand seed, which is absent",
                  float_of(draft, DW_ATTR_KEY_P, 0));
}

static dw_status want_softcap(const dw__draft *draft) {
    double cap = float_of(draft, DW_ATTR_KEY_SOFTCAP, 0.0);
    if (cap >= 0.0 && isfinite(cap)) return DW_OK;
    return refuse(draft, DW_INVALID_ARGUMENT, "softcap=%g; expected 0 (none) or a positive number",
                  cap);
}

static dw_status check_attention_shapes(const dw__draft *draft) {
    const dw_dim *query = shape_of(draft, 0), *key = shape_of(draft, 1);
    if (key[0] != query[0] || key[3] != query[3])
        return refuse(draft, DW_SHAPE, "%s and %s must agree in dims 0 (batch) and 3 (head size)",
                      show(draft, 0).text, show(draft, 1).text);
    const dw_dim value[4] = {key[0], key[1], key[2], shape_of(draft, 2)[3]};
    DW_RETURN_IF_FAILED(want_shape(draft, 2, 4, value, "k's shape with v's own last dim"));
    return want_head_groups(draft);
}

static dw_status check_attention(const dw__draft *draft) {
    DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, 1, 2));
    for (uint32_t i = 0; i < 3; i++) DW_RETURN_IF_FAILED(want_rank(draft, i, 4));
    DW_RETURN_IF_FAILED(check_attention_shapes(draft));
    DW_RETURN_IF_FAILED(want_attention_mask(draft));
    DW_RETURN_IF_FAILED(want_attention_dropout(draft));
    DW_RETURN_IF_FAILED(want_finite(draft, DW_ATTR_KEY_SCALE));
    DW_RETURN_IF_FAILED(want_softcap(draft));
    DW_RETURN_IF_FAILED(
        want_int_between(draft, DW_ATTR_KEY_CAUSAL, int_of(draft, DW_ATTR_KEY_CAUSAL, 0), 0, 2));
    return want_int_between(draft, DW_ATTR_KEY_WINDOW, int_of(draft, DW_ATTR_KEY_WINDOW, -1), -1,
                            INT64_MAX);
}

dw_status dw__infer_attention(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(check_attention(draft));
    const dw_dim *query = shape_of(draft, 0);
    const dw_dim result[4] = {query[0], query[1], query[2], shape_of(draft, 2)[3]};
    give(out, dtype_of(draft, 0), 4, result);
    return give(out, dw__compute_dtype(dtype_of(draft, 0)), 3, query);
}

dw_status dw__infer_attention_backward(const dw__draft *draft, dw__inferred *out) {
    enum { MASK = 3, O = 5, LSE = 6, DO = 7 };
    DW_RETURN_IF_FAILED(check_attention(draft));
    const dw_dim *query = shape_of(draft, 0);
    const dw_dim result[4] = {query[0], query[1], query[2], shape_of(draft, 2)[3]};
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, O, O));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, DO, DO));
    DW_RETURN_IF_FAILED(want_dtype(draft, LSE, dw__compute_dtype(dtype_of(draft, 0))));
    DW_RETURN_IF_FAILED(want_shape(draft, O, 4, result, "[B, H, Sq, Dv]"));
    DW_RETURN_IF_FAILED(want_shape(draft, LSE, 3, query, "[B, H, Sq]"));
    DW_RETURN_IF_FAILED(want_shape(draft, DO, 4, result, "[B, H, Sq, Dv]"));
    for (uint32_t i = 0; i < 3; i++) give_like(draft, out, i);
    DW_RETURN_IF_FAILED(want_flag(draft, DW_ATTR_KEY_MASK_GRADIENT));
    if (int_of(draft, DW_ATTR_KEY_MASK_GRADIENT, 0) == 0) return DW_OK;
    if (!has(draft, MASK) || dtype_of(draft, MASK) == DW_BOOL)
        return refuse(draft, DW_INVALID_ARGUMENT,
                      "mask_gradient=1 needs a mask of a float type, which is absent");
    return give_like(draft, out, MASK);
}

/* ---- loss and optimizer -------------------------------------------------------------------- */

static bool reduces_to_scalar(const dw__draft *draft) {
    return strcmp(attr_of(draft, DW_ATTR_KEY_REDUCTION)->string, "none") != 0;
}

/* Checks x [T, V] and its targets [T]. */
static dw_status check_loss(const dw__draft *draft, uint32_t x, uint32_t target) {
    static const char *const words[] = {"mean", "sum", "none"};
    DW_RETURN_IF_FAILED(want_float(draft, x));
    DW_RETURN_IF_FAILED(want_rank(draft, x, 2));
    DW_RETURN_IF_FAILED(want_dtype(draft, target, DW_I64));
    DW_RETURN_IF_FAILED(want_shape(draft, target, 1, shape_of(draft, x), "[T], the rows of x"));
    DW_RETURN_IF_FAILED(want_word(draft, DW_ATTR_KEY_REDUCTION, words, DW_COUNT(words)));
    return want_float_between(draft, DW_ATTR_KEY_LABEL_SMOOTHING, 0, 1);
}

/* Checks lse [T] and the gradient of the loss, which follow x and its targets and have type `dtype`. */
static dw_status check_loss_backward(const dw__draft *draft, uint32_t x, uint32_t lse,
                                     dw_dtype dtype) {
    uint32_t gradient = lse + 1;
    DW_RETURN_IF_FAILED(want_dtype(draft, lse, dtype));
    DW_RETURN_IF_FAILED(want_dtype(draft, gradient, dtype));
    DW_RETURN_IF_FAILED(want_shape(draft, lse, 1, shape_of(draft, x), "[T], the rows of x"));
    if (reduces_to_scalar(draft)) return want_scalar(draft, gradient);
    return want_shape(draft, gradient, 1, shape_of(draft, x), "[T], for reduction \"none\"");
}

dw_status dw__infer_cross_entropy(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(check_loss(draft, 0, 1));
    give(out, dtype_of(draft, 0), reduces_to_scalar(draft) ? 0 : 1, shape_of(draft, 0));
    return give_rows(draft, out, 0);
}

dw_status dw__infer_cross_entropy_backward(const dw__draft *draft, dw__inferred *out) {
    DW_RETURN_IF_FAILED(check_loss(draft, 0, 1));
    DW_RETURN_IF_FAILED(check_loss_backward(draft, 0, 2, dtype_of(draft, 0)));
    return give_like(draft, out, 0);
}

dw_status dw__infer_linear_cross_entropy(const dw__draft *draft, dw__inferred *out) {
    enum { X, W, B, TARGET };
    dw_dim results;
    DW_RETURN_IF_FAILED(check_linear(draft, X, W, B, &results));
    DW_RETURN_IF_FAILED(check_loss(draft, X, TARGET));
    const dw_dtype dtype = dw__compute_dtype(dtype_of(draft, X));
    give(out, dtype, reduces_to_scalar(draft) ? 0 : 1, shape_of(draft, X));
    give(out, dtype, 1, shape_of(draft, X));
    return give(out, dtype_of(draft, X), 2, (dw_dim[]){shape_of(draft, X)[0], results});
}

dw_status dw__infer_linear_cross_entropy_backward(const dw__draft *draft, dw__inferred *out) {
    enum { X, W, B, LOGITS, TARGET, LSE };
    dw_dim results;
    DW_RETURN_IF_FAILED(check_linear(draft, X, W, B, &results));
    DW_RETURN_IF_FAILED(check_loss(draft, X, TARGET));
    if (has(draft, LOGITS)) {
        const dw_dim logits[2] = {shape_of(draft, X)[0], results};
        DW_RETURN_IF_FAILED(want_same_dtype(draft, X, LOGITS, LOGITS));
        DW_RETURN_IF_FAILED(want_shape(draft, LOGITS, 2, logits, "linear(x, w, b)"));
    }
    DW_RETURN_IF_FAILED(check_loss_backward(draft, X, LSE, dw__compute_dtype(dtype_of(draft, X))));
    give_like(draft, out, X);
    give_like(draft, out, W);
    return give(out, dtype_of(draft, X), 1, &results);
}

dw_status dw__infer_adamw(const dw__draft *draft, dw__inferred *out) {
    static const dw_attr_key finite[] = {DW_ATTR_KEY_LR, DW_ATTR_KEY_EPS, DW_ATTR_KEY_WEIGHT_DECAY};
    enum { STEP = 4 };
    DW_RETURN_IF_FAILED(want_float(draft, 0));
    DW_RETURN_IF_FAILED(want_same_dtype(draft, 0, 1, 3));
    for (uint32_t i = 1; i < STEP; i++) DW_RETURN_IF_FAILED(want_shape_of(draft, i, 0));
    DW_RETURN_IF_FAILED(want_dtype(draft, STEP, DW_I64));
    DW_RETURN_IF_FAILED(want_scalar(draft, STEP));
    for (size_t i = 0; i < DW_COUNT(finite); i++)
        DW_RETURN_IF_FAILED(want_finite(draft, finite[i]));
    DW_RETURN_IF_FAILED(want_float_between(draft, DW_ATTR_KEY_BETA1, 0, 1));
    DW_RETURN_IF_FAILED(want_float_between(draft, DW_ATTR_KEY_BETA2, 0, 1));
    give_like(draft, out, 0);
    give_like(draft, out, 2);
    return give_like(draft, out, 3);
}

/* ---- fused --------------------------------------------------------------------------------- */

/* Broadcasts `shape` with the shape of operand `index`. */
static dw_status merge_broadcast(const dw__draft *draft, uint32_t index, int *rank, dw_dim *shape) {
    int given = rank_of(draft, index);
    if (given > *rank) {
        memmove(shape + (given - *rank), shape, (size_t)*rank * sizeof *shape);
        for (int k = 0; k < given - *rank; k++) shape[k] = 1;
        *rank = given;
    }
    for (int k = 0; k < given; k++) {
        dw_dim dim = shape_of(draft, index)[k], *merged = &shape[*rank - given + k];
        if (dim != 1 && *merged != 1 && dim != *merged)
            return refuse(draft, DW_SHAPE,
                          "operand %u, %s, does not broadcast with the operands before it, %s",
                          index, show(draft, index).text,
                          dw__shape_words(draft->graph, *rank, shape).text);
        if (dim != 1) *merged = dim;
    }
    return DW_OK;
}

/* Bit i is set if operand i is a dropout seed, which is read as a whole. */
static uint64_t seeds_of(const dw__body *body) {
    uint64_t seeds = 0;
    for (uint32_t i = 0; i < body->code_count; i++)
        if (body->code[i].op == DW_OP_DROPOUT)
            seeds |= UINT64_C(1) << body->code[i].operands[1].index;
    return seeds;
}

static dw_dtype body_dtype(const dw__draft *draft, const dw__body *body,
                           const dw__body_operand *from) {
    return from->source == DW_BODY_INPUT ? dtype_of(draft, from->index)
                                         : body->code[from->index].dtype;
}

dw_status dw__infer_fused(const dw__draft *draft, dw__inferred *out) {
    dw_dtype dtypes[DW_MAX_INPUTS] = {DW_BOOL};
    dw_dim shape[DW_MAX_RANK];
    int rank = 0;
    dw__body body;
    for (uint32_t i = 0; i < draft->input_count; i++) dtypes[i] = dtype_of(draft, i);
    const char *text = attr_of(draft, DW_ATTR_KEY_BODY)->string;
    dw_status status = dw__body_parse(text, draft->input_count, dtypes, &body);
    DW_RETURN_IF_FAILED(named(draft, status));
    uint64_t seeds = seeds_of(&body);
    for (uint32_t i = 0; i < draft->input_count; i++) {
        if (seeds >> i & 1)
            DW_RETURN_IF_FAILED(want_seed(draft, i));
        else
            DW_RETURN_IF_FAILED(merge_broadcast(draft, i, &rank, shape));
    }
    for (uint32_t i = 0; i < body.output_count; i++)
        give(out, body_dtype(draft, &body, &body.outputs[i]), rank, shape);
    return DW_OK;
}
