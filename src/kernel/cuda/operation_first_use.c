/* The first-use check of kernels that compute an operation of the graph: compares the kernel with the operation's
 * definition, which the interpreter evaluates in FP64 on the same operands. A family provides
 * only its example calls. */
#include "common/scale_layout.h"
#include "kernel/gpu_kernel.h"
#include "kernel/reference/interpret.h"
#include "kernel/reference/scalar.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct state {
    dw__operation_call call;
    dw__trial_part *inputs[DW_MAX_INPUTS], *outputs[DW_MAX_OUTPUTS], *addend;
    dw__tensor expected[DW_MAX_OUTPUTS]; /* F64, contiguous */
    const double
        *bias; /* of `linear`, if the kernel may round the product before it is added; else NULL */
} state;

static size_t span_of(const dw__tensor *t) {
    int64_t last = 0;
    if (dw__dtype_is_code(t->dtype)) return dw__tensor_bytes(t); /* codes are contiguous */
    for (int axis = 0; axis < t->rank; axis++) last += (t->shape[axis] - 1) * t->stride[axis];
    return (size_t)(last + 1) * dw_dtype_bytes(t->dtype);
}

/* Returns the offset, in elements, of element `index` in row-major order. */
static int64_t offset_of(const dw__tensor *t, int64_t index) {
    int64_t offset = 0;
    for (int axis = t->rank - 1; axis >= 0; axis--) {
        offset += index % t->shape[axis] * t->stride[axis];
        index /= t->shape[axis];
    }
    return offset;
}

/* Without the sums of an operand. */
static uint32_t results_of_operation(const dw__call *c) {
    return c->output_count - (c->sums != DW__SUMS_NOTHING);
}

/* ---- operands and expected results ------------------------------------------------------------------------------- */

/* Random floating-point numbers, or their magnitudes if `positive`, integers from 0 to 2, codes below 64, which are
 * finite in every format (E8M0: powers of two from 1/8 to 16), and both booleans. `wide` receives them contiguous: F64
 * for floating point, else their own type. */
static void fill_tensor(void *data, const dw__tensor *t, uint32_t stream, bool positive,
                        void *wide) {
    const int64_t count = dw__tensor_count(t);
    const bool is_float = dw__dtype_is_float(t->dtype);
    const int values = t->dtype == DW_BOOL           ? 2
                       : t->dtype == DW_E8M0         ? 8
                       : dw__dtype_is_code(t->dtype) ? 64
                                                     : 3;
    const double least = t->dtype == DW_E8M0 ? 124.0 : 0.0;
    for (int64_t i = 0; i < count; i++) {
        const double drawn = (double)dw__trial_normal(2024, stream, (size_t)i),
                     number = positive ? fabs(drawn) : drawn;
        const dw__scalar value =
            is_float ? (dw__scalar){.number = number}
                     : dw__scalar_of(least + fmod(floor(fabs(1e3 * number)), values), t->dtype);
        dw__scalar_store(data, t->dtype, offset_of(t, i), value);
        dw__scalar_store(wide, is_float ? DW_F64 : t->dtype, i,
                         dw__scalar_load(data, t->dtype, offset_of(t, i)));
    }
}

/* The rows of all groups together, of segment_linear and its gradient, whose operands may be read by an index. */
static int64_t rows_in_groups(const dw__call *c) {
    if (c->op == DW_OP_SEGMENT_LINEAR) return c->outputs[0].shape[0];
    for (uint32_t i = 3; dw__call_gathers(c) && i < c->input_count; i++)
        if (c->inputs[i].rank == 1) return c->inputs[i].shape[0];
    return c->inputs[0].shape[0];
}

/* Operands whose elements depend on one another: offsets of groups, of which some have no rows, with some rows in no
 * group, indexes of rows, and places, a permutation. Returns false for other operands. */
static bool fill_together(const dw__call *c, uint32_t input, int32_t *data, int32_t *wide) {
    const bool is_segments = c->op == DW_OP_SEGMENT_LINEAR ||
                             c->op == DW_OP_SEGMENT_MULTIPLY_CODES ||
                             c->op == DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT,
               is_rows = c->op == DW_OP_SPREAD_ROWS || c->op == DW_OP_COMBINE_ROWS ||
                         c->op == DW_OP_COMBINE_ROWS_BACKWARD;
    const int64_t count = dw__tensor_count(&c->inputs[input]);
    if (is_segments && input == 2) {
        const int64_t groups = count - 1, rows = rows_in_groups(c);
        for (int64_t i = 0; i < count; i++)
            wide[i] = (int32_t)(i == 2        ? wide[1]
                                : i == groups ? rows - rows / 16
                                              : i * rows / (groups + 1));
    } else if (dw__call_gathers(c) && input > 2 && c->inputs[input].dtype == DW_I32) {
        const bool of_y = c->op == DW_OP_SEGMENT_LINEAR_BACKWARD_WEIGHT && input == 4,
                   is_place = input == 5;
        for (int64_t i = 0; i < count; i++)
            wide[i] = (int32_t)(is_place ? count - 1 - i : 7 * i % c->inputs[of_y].shape[0]);
    } else if (is_rows && input == 1) {
        for (int64_t i = 0; i < count; i++) wide[i] = (int32_t)(i % 2 ? count - 1 - i / 2 : i / 2);
    } else {
        return false;
    }
    memcpy(data, wide, (size_t)count * sizeof *wide); /* contiguous */
    return true;
}

/* Makes a graph with only this operation. */
static dw_status make_graph(const dw__call *c, dw_graph **graph) {
    dw_value inputs[DW_MAX_INPUTS];
    dw_node node;
    DW_RETURN_IF_FAILED(dw_graph_create(graph));
    for (uint32_t i = 0; i < c->input_count; i++) {
        char name[16];
        dw_dim shape[DW_MAX_RANK];
        inputs[i] = DW_NONE;
        if (c->inputs[i].rank < 0) continue;
        for (int axis = 0; axis < c->inputs[i].rank; axis++) shape[axis] = c->inputs[i].shape[axis];
        snprintf(name, sizeof name, "x%u", i);
        DW_RETURN_IF_FAILED(dw_graph_leaf(*graph, DW_ROLE_INPUT, name, c->inputs[i].dtype,
                                          c->inputs[i].rank, shape, &inputs[i]));
    }
    DW_RETURN_IF_FAILED(
        dw_graph_append(*graph, c->op, c->input_count, inputs, c->attr_count, c->attrs, &node));
    for (uint32_t i = 0; i < results_of_operation(c); i++)
        DW_RETURN_IF_FAILED(dw_graph_add_output(*graph, dw_node_output(*graph, node, i)));
    return DW_OK;
}

/* Fills the addend and adds it to the first expected result. */
static dw_status expect_sum(dw__trial *t, state *s) {
    const dw__tensor *addend = &s->call.call.addend;
    const int64_t count = dw__tensor_count(addend);
    dw__trial_part *wide;
    if (s->call.call.accumulates == DW__ADDS_NOTHING) return DW_OK;
    DW_RETURN_IF_FAILED(dw__trial_scratch(t, (size_t)count * sizeof(double), &wide));
    fill_tensor(s->addend->host, addend, DW_MAX_INPUTS, false, wide->host);
    for (int64_t i = 0; i < count; i++)
        ((double *)s->expected[0].data)[i] += ((const double *)wide->host)[i];
    return DW_OK;
}

/* The sums of a matrix, the last two axes of `wide`, over k, its rows or its columns. */
static dw_status expect_operand_sums(dw__trial *t, state *s, const dw__tensor *wide) {
    const dw__call *c = &s->call.call;
    const bool of_a = c->sums == DW__SUMS_A;
    const bool turned =
        dw__call_int(c, of_a ? DW_ATTR_KEY_TRANSPOSE_A : DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    const int64_t rows = wide->shape[wide->rank - 2], columns = wide->shape[wide->rank - 1];
    dw__tensor *sums = &s->expected[c->output_count - 1];
    dw__trial_part *part;
    *sums = c->outputs[c->output_count - 1];
    sums->dtype = DW_F64;
    DW_RETURN_IF_FAILED(dw__trial_scratch(t, dw__tensor_bytes(sums), &part));
    sums->data = memset(part->host, 0, dw__tensor_bytes(sums));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns; column++)
            ((double *)sums->data)[of_a == turned ? column : row] +=
                ((const double *)wide->data)[row * columns + column];
    return DW_OK;
}

/* Scales of blocks are positive, so that no part of a product of codes is larger than the whole. */
static bool is_scale(const dw__call *c, uint32_t input) {
    enum { BIAS = 6 };
    return c->op == DW_OP_MULTIPLY_CODES && input < BIAS && dw__call_has_f32_scales(c);
}

/* Fills the operands. Evaluates the operation's definition. */
static dw_status expect(dw__trial *t, state *s) {
    const dw__call *c = &s->call.call;
    const dw__interpret_options precise = {.high_precision = true};
    dw__tensor leaves[DW_MAX_INPUTS] = {{0}}, found[DW_MAX_OUTPUTS] = {{0}};
    dw__trial_part *part;
    dw_graph *graph = NULL;
    dw_status status = DW_OK;
    uint32_t leaf_count = 0; /* operands that are there */
    const dw__tensor *bias = t->variant->kernel->rounds_before_bias ? dw__call_bias(c) : NULL;
    for (uint32_t i = 0; i < c->input_count; i++) {
        if (c->inputs[i].rank < 0) continue;
        dw__tensor *leaf = &leaves[leaf_count++];
        *leaf = c->inputs[i];
        if (dw__dtype_is_float(leaf->dtype)) leaf->dtype = DW_F64;
        dw__tensor_set_contiguous(leaf);
        DW_TRY(dw__trial_scratch(t, dw__tensor_bytes(leaf), &part));
        leaf->data = part->host;
        if (!fill_together(c, i, s->inputs[i]->host, leaf->data))
            fill_tensor(s->inputs[i]->host, &c->inputs[i], i, is_scale(c, i), leaf->data);
        if (&c->inputs[i] == bias) s->bias = leaf->data;
    }
    DW_TRY(make_graph(c, &graph));
    DW_TRY(dw__interpret(graph, NULL, leaves, found, &precise));
    for (uint32_t i = 0; i < results_of_operation(c); i++) {
        s->expected[i] = found[i];
        DW_TRY(dw__trial_scratch(t, dw__tensor_bytes(&found[i]), &part));
        s->expected[i].data = memcpy(part->host, found[i].data, dw__tensor_bytes(&found[i]));
    }
    DW_TRY(expect_sum(t, s));
    if (c->sums) DW_TRY(expect_operand_sums(t, s, &leaves[c->sums == DW__SUMS_A ? 0 : 1]));

cleanup:
    for (uint32_t i = 0; i < c->output_count; i++) dw__free_aligned(found[i].data);
    dw_graph_destroy(graph);
    return status;
}

static dw_status add_workspace(dw__trial *t, state *s) {
    const dw__kernel *kernel = t->variant->kernel;
    dw__trial_part *part;
    size_t bytes = 0;
    if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(kernel->workspace_bytes(kernel, &s->call, &t->context, &bytes));
    DW_RETURN_IF_FAILED(dw__trial_add(t, bytes, &part));
    s->call.workspace = part->device;
    return DW_OK;
}

static dw_status prepare(dw__trial *t) {
    state *s = t->state;
    dw__call *c = &s->call.call;
    const dw__kernel *kernel = t->variant->kernel;
    kernel->example(t->variant->params, t->index, c);
    if (kernel->example_sms) t->context.sm_count = kernel->example_sms;
    for (uint32_t i = 0; i < c->input_count; i++) {
        if (c->inputs[i].rank < 0) continue;
        DW_RETURN_IF_FAILED(dw__trial_add(t, span_of(&c->inputs[i]), &s->inputs[i]));
        c->inputs[i].data = s->inputs[i]->device;
    }
    for (uint32_t i = 0; i < c->output_count; i++) {
        DW_RETURN_IF_FAILED(dw__trial_add(t, span_of(&c->outputs[i]), &s->outputs[i]));
        c->outputs[i].data = s->outputs[i]->device;
    }
    if (c->accumulates == DW__ADDS_TO_ADDEND) {
        DW_RETURN_IF_FAILED(dw__trial_add(t, span_of(&c->addend), &s->addend));
        c->addend.data = s->addend->device;
    }
    DW_RETURN_IF_FAILED(add_workspace(t, s));
    s->call.stream = t->stream;
    t->call = &s->call;
    return expect(t, s);
}

/* ---- comparison --------------------------------------------------------------------------------------------------- */

static double unit_roundoff(dw_dtype dtype) {
    return dtype == DW_BF16 ? 0x1p-8 : dtype == DW_F16 ? 0x1p-11 : 0.0;
}

/* Of a product of normal numbers, relative to the largest result: TF32 operands are off by at most 2^-10, truncated,
 * and the products' errors add up like the products themselves. */
#define TF32_ERROR (2 * 0x1p-10)

/* The error of codes with scales of blocks, which Blackwell's tensor cores multiply. */
#define BLOCK_CODES_ERROR 0x1p-10

/* The error of the operands, relative to the largest result. Hopper's tensor cores add FP8 products in groups of 32
 * with the sum so far, and keep 14 bits of each addend relative to the largest one (DeepSeek-V3, arXiv 2412.19437,
 * section 3.3.2). The FP8 codes of a trial are positive, so no addend is above the largest result. With fp8-block they
 * add 128 products so, of which the error is relative to that sum; it is scaled and added in F32, and the scaled sums
 * are positive, so the errors add up to the same share of the result, however long K is. So it is with groups, unless
 * accumulation is fast. */
static double error_of_operands(const dw__call *c) {
    const bool segments = c->op == DW_OP_SEGMENT_MULTIPLY_CODES;
    if (c->op != DW_OP_MULTIPLY_CODES && !segments) return c->tf32 ? TF32_ERROR : 0.0;
    if (dw__call_has_tiles(c) && !dw__call_has_f32_scales(c)) return BLOCK_CODES_ERROR;
    const bool in_blocks =
        segments ? !dw__call_int(c, DW_ATTR_KEY_FAST_ACCUMULATION, 0) : dw__call_has_f32_scales(c);
    const int64_t k = c->inputs[0].shape[1], block = DW_FP8_BLOCK_SIDE,
                  terms = in_blocks && k > block ? block : k;
    return (double)(terms + (terms + 31) / 32) * 0x1p-13;
}

static double number_at(const void *data, dw_dtype dtype, int64_t offset) {
    const dw__scalar value = dw__scalar_load(data, dtype, offset);
    return dw__dtype_is_float(dtype) ? value.number : (double)value.integer;
}

/* The number of terms that make one result, as far as shapes tell it: the length of the result's last axis, or how many
 * operands there are for each result if that is more. */
static double terms_of(const dw__call *c, const dw__tensor *made) {
    const double row = made->rank > 0 ? (double)made->shape[made->rank - 1] : 1.0;
    double operands = 0.0;
    for (uint32_t i = 0; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0) operands += (double)dw__tensor_count(&c->inputs[i]);
    return fmax(row, operands / (double)dw__tensor_count(made));
}

/* How much more element `index` of a result may differ, because the product is rounded before the bias is added. */
static double rounding_of_product(const state *s, const dw__tensor *right, int64_t index,
                                  double unit) {
    if (!s->bias) return 0.0;
    const double sum = number_at(right->data, right->dtype, index);
    return unit * (1.0 + unit) * fabs(sum - s->bias[index % right->shape[right->rank - 1]]);
}

static bool output_agrees(const dw__trial *t, const state *s, uint32_t output, char *text,
                          size_t bytes) {
    const dw__tensor *made = &s->call.call.outputs[output], *right = &s->expected[output];
    const int64_t count = dw__tensor_count(made);
    const double unit = unit_roundoff(made->dtype), operands = error_of_operands(&s->call.call);
    double largest = 0.0;
    for (int64_t i = 0; i < count; i++)
        largest = fmax(largest, fabs(number_at(right->data, right->dtype, i)));
    const double once =
        (unit + operands +
         t->variant->kernel->tolerance_factor * sqrt(terms_of(&s->call.call, made)) * 0x1p-24) *
        largest;
    for (int64_t i = 0; i < count; i++) {
        const double x = number_at(s->outputs[output]->host, made->dtype, offset_of(made, i)),
                     expected = number_at(right->data, right->dtype, i),
                     bound = once + rounding_of_product(s, right, i, unit);
        if (fabs(x - expected) <= bound) continue; /* a NaN is beyond every bound */
        snprintf(text, bytes, "element %lld of result %u of %s is %g, expected %g within %.2g",
                 (long long)i, output, dw_op_name(s->call.call.op), x, expected, bound);
        return false;
    }
    return true;
}

static bool agrees(const dw__trial *t, char *text, size_t bytes) {
    const state *s = t->state;
    for (uint32_t i = 0; i < s->call.call.output_count; i++)
        if (!output_agrees(t, s, i, text, bytes)) return false;
    return true;
}

const dw__first_use dw__operation_first_use = {
    .against = "the operation's definition",
    .count = 2,
    .failure_refuses = true,
    .state_bytes = sizeof(state),
    .prepare = prepare,
    .agrees = agrees,
};
