/* Random operands, layouts and guards (see ops_data.h). */
#include "ops_data.h"
#include "graph/internal.h"
#include "kernel/reference/index.h"
#include "kernel/reference/interpret.h"
#include "kernel/reference/scalar.h"
#include <math.h>
#include <string.h>

/* ---- random numbers -------------------------------------------------------------------------- */

/* splitmix64 (Steele, Lea, Flood 2014) */
uint64_t ops_random_bits(ops_random *random) {
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

ops_random ops_random_start(uint64_t seed, const char *text) {
    ops_random random = {seed};
    for (; *text; text++) {
        random.state ^= (unsigned char)*text;
        random.state = ops_random_bits(&random);
    }
    return random;
}

double ops_random_uniform(ops_random *random) {
    return (double)(ops_random_bits(random) >> 11) * 0x1p-53;
}

/* Box and Muller 1958 */
double ops_random_normal(ops_random *random) {
    const double tau = 6.28318530717958647692;
    double radius = sqrt(-2.0 * log(1.0 - ops_random_uniform(random)));
    return radius * cos(tau * ops_random_uniform(random));
}

/* ---- guarded blocks -------------------------------------------------------------------------- */

enum { GUARD_BYTES = 4096, GUARD_PATTERN = 0xA5, NAN_PATTERN = 0xFF };

dw_status ops_block_create(size_t bytes, ops_block *block) {
    block->bytes = bytes;
    block->base = dw__malloc_aligned(bytes + 2 * GUARD_BYTES);
    if (!block->base) return dw__fail_memory("a guarded block", bytes);
    block->data = block->base + GUARD_BYTES;
    memset(block->base, GUARD_PATTERN, GUARD_BYTES);
    memset(block->data, NAN_PATTERN, bytes);
    memset(block->base + GUARD_BYTES + bytes, GUARD_PATTERN, GUARD_BYTES);
    return DW_OK;
}

void ops_block_destroy(ops_block *block) {
    dw__free_aligned(block->base);
    block->base = NULL;
}

static bool is_guard(const unsigned char *zone) {
    for (int i = 0; i < GUARD_BYTES; i++)
        if (zone[i] != GUARD_PATTERN) return false;
    return true;
}

const char *ops_block_damage(const ops_block *block) {
    if (!is_guard(block->base)) return "before";
    return is_guard(block->base + GUARD_BYTES + block->bytes) ? NULL : "after";
}

/* ---- layouts --------------------------------------------------------------------------------- */

const char *ops_layout_name(ops_layout layout) {
    static const char *const names[] = {"contiguous", "permuted", "padded", "broadcast"};
    return names[layout];
}

const char *ops_data_name(ops_data data) {
    static const char *const names[] = {"normal", "large", "tiny", "mixed"};
    return names[data];
}

static void swap(int64_t *a, int64_t *b) {
    int64_t t = *a;
    *a = *b;
    *b = t;
}

/* Sets the strides. Returns the number of elements of storage that they span. */
static int64_t lay_out(dw__tensor *tensor, ops_layout layout) {
    enum { GAP = 3, VECTOR_STRIDE = 2 };
    int rank = tensor->rank, last = rank - 1;
    dw__tensor storage = *tensor;
    if (layout == OPS_PERMUTED && rank >= 2) swap(&storage.shape[last], &storage.shape[last - 1]);
    if (layout == OPS_PADDED && rank >= 2) storage.shape[last] += GAP;
    if (layout == OPS_BROADCAST && rank >= 2) storage.shape[0] = 1;
    dw__tensor_set_contiguous(&storage);
    int64_t elements = dw__tensor_count(&storage);
    memcpy(tensor->stride, storage.stride, sizeof tensor->stride);
    if (layout == OPS_PERMUTED && rank >= 2) swap(&tensor->stride[last], &tensor->stride[last - 1]);
    if (layout == OPS_BROADCAST && rank >= 2) tensor->stride[0] = 0;
    if (layout == OPS_PADDED && rank == 1) {
        tensor->stride[0] = VECTOR_STRIDE;
        elements *= VECTOR_STRIDE;
    }
    return elements;
}

/* ---- filling --------------------------------------------------------------------------------- */

static double scaled(double value, ops_data data, ops_random *random) {
    switch (data) {
    case OPS_LARGE: return value * 1e3;
    case OPS_TINY: return value * 1e-20;
    case OPS_MIXED: return ldexp(value, (int)(ops_random_bits(random) % 25) - 12);
    default: return value;
    }
}

static int64_t ignore_index(const ops_case *c) {
    for (uint32_t i = 0; i < c->attr_count; i++)
        if (c->attrs[i].key == DW_ATTR_KEY_IGNORE_INDEX) return c->attrs[i].integer;
    return -100;
}

static double float_element(const ops_operand *spec, ops_data data, ops_random *random) {
    double normal = ops_random_normal(random);
    switch (spec->fill) {
    case OPS_FILL_POSITIVE: return scaled(fabs(normal) + 0.1, data, random);
    case OPS_FILL_UNIT: return 1.9 * ops_random_uniform(random) - 0.95;
    case OPS_FILL_MASKED: return -INFINITY;
    case OPS_FILL_MASK: return ops_random_bits(random) % 4 == 0 ? -INFINITY : 0.0;
    default: return scaled(normal, data, random);
    }
}

static int64_t integer_element(const ops_case *c, const ops_operand *spec, ops_random *random,
                               bool last) {
    uint64_t bits = ops_random_bits(random);
    int64_t bound = spec->bound > 0 ? spec->bound : 1;
    int64_t index = (int64_t)((bits >> 8) % (uint64_t)bound);
    int64_t small = (int64_t)(bits % 19) - 9;
    switch (spec->fill) {
    case OPS_FILL_INDEX: return index;
    case OPS_FILL_TARGET: return bits % 4 == 0 ? ignore_index(c) : index;
    case OPS_FILL_IGNORED: return ignore_index(c);
    case OPS_FILL_OUTSIDE: return last ? bound : index;
    case OPS_FILL_NONZERO: return small ? small : 5;
    case OPS_FILL_COUNT: return 1 + (int64_t)(bits % 9);
    case OPS_FILL_SEED: return (int64_t)bits;
    default: return small;
    }
}

static void fill(const ops_case *c, const ops_operand *spec, ops_data data, ops_random *random,
                 const dw__tensor *tensor, int64_t elements) {
    for (int64_t i = 0; i < elements; i++) {
        dw__scalar value;
        if (dw__dtype_is_float(spec->dtype))
            value.number = float_element(spec, data, random);
        else if (spec->dtype == DW_BOOL)
            value.integer = spec->fill != OPS_FILL_MASKED && ops_random_bits(random) % 2;
        else
            value.integer = integer_element(c, spec, random, i == elements - 1);
        dw__scalar_store(tensor->data, spec->dtype, i, value);
    }
}

/* Integers of a contiguous tensor that depend on one another: offsets in [0, N], sorted by insertion, with 0 first and N
 * last; or a permutation by Fisher and Yates. */
static void fill_together(const ops_operand *spec, ops_random *random, const dw__tensor *tensor,
                          int64_t elements) {
    int32_t *numbers = tensor->data;
    for (int64_t i = 0; i < elements; i++) {
        if (spec->fill == OPS_FILL_PLACES) {
            const int64_t at = (int64_t)(ops_random_bits(random) % (uint64_t)(i + 1));
            numbers[i] = numbers[at];
            numbers[at] = (int32_t)i;
            continue;
        }
        int64_t at = i;
        int32_t number = i == 0 ? 0
                         : i == elements - 1
                             ? (int32_t)spec->bound
                             : (int32_t)(ops_random_bits(random) % (uint64_t)(spec->bound + 1));
        for (; at > 0 && numbers[at - 1] > number; at--) numbers[at] = numbers[at - 1];
        numbers[at] = number;
    }
}

static bool is_filled_together(const ops_operand *spec) {
    return spec->fill == OPS_FILL_OFFSETS || spec->fill == OPS_FILL_PLACES;
}

double ops_element(const dw__tensor *tensor, int64_t index) {
    int64_t offset = 0;
    for (int axis = tensor->rank - 1; axis >= 0; axis--) {
        offset += index % tensor->shape[axis] * tensor->stride[axis];
        index /= tensor->shape[axis];
    }
    dw__scalar value = dw__scalar_load(tensor->data, tensor->dtype, offset);
    return dw__dtype_is_float(tensor->dtype) ? value.number : (double)value.integer;
}

/* ---- operands that depend on others ----------------------------------------------------------- */

enum { MAP_END = -1 };

/* Operands of a backward that its forward computes: the forward, the backward's operands that are its inputs (up to
 * MAP_END), and the backward's operand for each result of the forward (MAP_END: none). */
static const struct derivation {
    dw_op backward, forward;
    int from[6], to[3];
} derivations[] = {
    {DW_OP_SOFTMAX_BACKWARD, DW_OP_SOFTMAX, {0, MAP_END}, {0, MAP_END}},
    {DW_OP_LOG_SOFTMAX_BACKWARD, DW_OP_LOG_SOFTMAX, {0, MAP_END}, {0, MAP_END}},
    {DW_OP_LAYER_NORM_BACKWARD, DW_OP_LAYER_NORM, {1, MAP_END}, {MAP_END, 3, 4}},
    {DW_OP_RMS_NORM_BACKWARD, DW_OP_RMS_NORM, {1, MAP_END}, {MAP_END, 3}},
    {DW_OP_ATTENTION_BACKWARD, DW_OP_ATTENTION, {0, 1, 2, 3, 4, MAP_END}, {5, 6}},
    {DW_OP_CROSS_ENTROPY_BACKWARD, DW_OP_CROSS_ENTROPY, {0, 1, MAP_END}, {MAP_END, 2}},
    {DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD, DW_OP_LINEAR, {0, 1, 2, MAP_END}, {3, MAP_END}},
    {DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
     DW_OP_LINEAR_CROSS_ENTROPY,
     {0, 1, 2, 4, MAP_END},
     {MAP_END, 5, MAP_END}},
};

/* Makes the forward node as a case: the types of its operands, and the attributes that it accepts. */
static void derived_case(const struct derivation *d, const ops_case *c, ops_case *forward) {
    uint64_t allowed = dw__op_table[d->forward].allowed_attrs;
    uint64_t required = dw__op_table[d->forward].required_attrs;
    uint64_t given = 0;
    memset(forward, 0, sizeof *forward);
    forward->op = d->forward;
    for (int i = 0; d->from[i] != MAP_END && i < 6; i++)
        forward->inputs[forward->input_count++] = c->inputs[d->from[i]];
    for (uint32_t i = 0; i < c->attr_count; i++) {
        uint64_t bit = (uint64_t)1 << c->attrs[i].key;
        if (!((allowed | required) & bit)) continue;
        forward->attrs[forward->attr_count++] = c->attrs[i];
        given |= bit;
    }
    if (required & ~given & (uint64_t)1 << DW_ATTR_KEY_EPS)
        forward->attrs[forward->attr_count++] = dw_attr_float(DW_ATTR_KEY_EPS, 1e-5);
}

static void store_rounded(const dw__tensor *to, const dw__tensor *from) {
    int64_t index[DW_MAX_RANK] = {0};
    for (int64_t i = 0; i < dw__tensor_count(from); i++) {
        dw__scalar value = {.number = ops_element(from, i)};
        dw__scalar_store(to->data, to->dtype, dw__index_offset(to->rank, to->stride, index), value);
        dw__index_next(to->rank, to->shape, index);
    }
}

static dw_status derive(const struct derivation *d, const ops_case *c, ops_operands *operands) {
    ops_case *forward = dw__malloc(sizeof *forward);
    dw_graph *graph = NULL;
    dw__tensor leaves[OPS_MAX_INPUTS], results[3] = {{0}};
    dw__interpret_options high = {true};
    uint32_t leaf_count = 0;
    dw_status status = DW_OK;
    if (!forward) return dw__fail_memory("a case", sizeof *forward);
    derived_case(d, c, forward);
    DW_TRY(ops_case_graph(forward, &graph));
    for (int i = 0; d->from[i] != MAP_END; i++)
        if (operands->tensors[d->from[i]].rank >= 0)
            leaves[leaf_count++] = operands->tensors[d->from[i]];
    DW_TRY(dw__interpret(graph, NULL, leaves, results, &high));
    for (uint32_t i = 0; i < dw_graph_output_count(graph); i++)
        if (d->to[i] != MAP_END && operands->tensors[d->to[i]].rank >= 0)
            store_rounded(&operands->tensors[d->to[i]], &results[i]);
cleanup:
    for (size_t i = 0; i < DW_COUNT(results); i++) dw__free_aligned(results[i].data);
    dw_graph_destroy(graph);
    dw__free(forward);
    return status;
}

/* Returns which operands are results of a forward. They are contiguous, because each of their elements must be
 * distinct. */
static bool is_derived(dw_op op, uint32_t operand) {
    for (size_t i = 0; i < DW_COUNT(derivations); i++)
        for (int j = 0; j < 3 && derivations[i].backward == op; j++)
            if (derivations[i].to[j] == (int)operand && operand > 0) return true;
    return false;
}

/* ---- all operands of a case ------------------------------------------------------------------ */

void ops_operands_destroy(ops_operands *operands) {
    for (uint32_t i = 0; i < operands->count; i++) ops_block_destroy(&operands->blocks[i]);
    operands->count = 0;
}

dw_status ops_operands_create(const ops_case *c, ops_layout layout, ops_data data, uint64_t seed,
                              ops_operands *out) {
    ops_random random = ops_random_start(seed, c->text);
    dw_status status = DW_OK;
    memset(out, 0, sizeof *out);
    out->count = c->input_count;
    for (uint32_t i = 0; i < c->input_count; i++) {
        const ops_operand *spec = &c->inputs[i];
        dw__tensor *tensor = &out->tensors[i];
        tensor->rank = -1;
        if (spec->absent) continue;
        tensor->dtype = spec->dtype;
        tensor->rank = spec->rank;
        memcpy(tensor->shape, spec->shape, sizeof tensor->shape);
        bool plain = spec->fill == OPS_FILL_SEED || is_derived(c->op, i) ||
                     is_filled_together(spec) ||
                     dw__dtype_is_code(spec->dtype) || /* codes have no views */
                     (i == 0 && c->op == DW_OP_SOFTMAX_BACKWARD) ||
                     (i == 0 && c->op == DW_OP_LOG_SOFTMAX_BACKWARD);
        int64_t elements = lay_out(tensor, plain ? OPS_CONTIGUOUS : layout);
        DW_TRY(ops_block_create((size_t)(elements * dw_dtype_bits(spec->dtype) + 7) / 8,
                                &out->blocks[i]));
        tensor->data = out->blocks[i].data;
        if (is_filled_together(spec))
            fill_together(spec, &random, tensor, elements);
        else
            fill(c, spec, data, &random, tensor, elements);
    }
    for (size_t i = 0; i < DW_COUNT(derivations) && !c->must_fail; i++)
        if (derivations[i].backward == c->op) DW_TRY(derive(&derivations[i], c, out));
cleanup:
    if (status != DW_OK) ops_operands_destroy(out);
    return status;
}

dw_status ops_operands_perturbed(const ops_operands *from, double relative, uint64_t seed,
                                 ops_operands *out) {
    ops_random random = ops_random_start(seed, "perturbed");
    dw_status status = DW_OK;
    memset(out, 0, sizeof *out);
    out->count = from->count;
    for (uint32_t i = 0; i < from->count; i++) {
        const dw__tensor *source = &from->tensors[i];
        dw__tensor *copy = &out->tensors[i];
        *copy = *source;
        if (source->rank < 0) continue;
        bool is_float = dw__dtype_is_float(source->dtype);
        if (is_float) copy->dtype = DW_F64;
        dw__tensor_set_contiguous(copy);
        int64_t count = dw__tensor_count(copy);
        DW_TRY(ops_block_create(dw__tensor_bytes(copy), &out->blocks[i]));
        copy->data = out->blocks[i].data;
        if (!is_float) dw__tensor_copy(copy, source);
        for (int64_t j = 0; is_float && j < count; j++) {
            double factor = 1.0 + relative * (2.0 * ops_random_uniform(&random) - 1.0);
            ((double *)copy->data)[j] = ops_element(source, j) * factor;
        }
    }
cleanup:
    if (status != DW_OK) ops_operands_destroy(out);
    return status;
}

uint32_t ops_operands_leaves(const ops_operands *operands, dw__tensor *leaves) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < operands->count; i++)
        if (operands->tensors[i].rank >= 0) leaves[count++] = operands->tensors[i];
    return count;
}
