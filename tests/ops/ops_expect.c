/* Expected results of a case, and their tolerance (see ops_expect.h). */
#include "ops_expect.h"
#include "kernel/reference/interpret.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- expected results ------------------------------------------------------------------------- */

/* Operations whose result is discontinuous: its change under a perturbation does not show its condition. */
static bool is_discontinuous(dw_op op) {
    return op == DW_OP_FLOOR || op == DW_OP_CEIL || op == DW_OP_SIGN || op == DW_OP_REM ||
           op == DW_OP_QUANTIZE || op == DW_OP_QUANTIZE_BLOCKS || op == DW_OP_DEQUANTIZE_BLOCKS ||
           op == DW_OP_QUANTIZE_TENSOR || op == DW_OP_QUANTIZE_TILES ||
           op == DW_OP_QUANTIZATION_ERROR;
}

/* Operations whose result is one of a format's numbers: either right or wrong. */
static bool is_exact(dw_op op) {
    return op == DW_OP_QUANTIZE || op == DW_OP_QUANTIZE_BLOCKS || op == DW_OP_DEQUANTIZE_BLOCKS ||
           op == DW_OP_QUANTIZE_TENSOR || op == DW_OP_QUANTIZE_TILES;
}

static dw_status interpret(const dw_graph *graph, const ops_operands *operands,
                           dw__tensor *results) {
    dw__tensor leaves[OPS_MAX_INPUTS];
    dw__interpret_options high = {true};
    ops_operands_leaves(operands, leaves);
    return dw__interpret(graph, NULL, leaves, results, &high);
}

static void forget(dw__tensor *tensors, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) dw__free_aligned(tensors[i].data);
}

static dw_status measure_amplification(const dw_graph *graph, const ops_operands *operands,
                                       uint64_t seed, ops_expectation *expected) {
    const double relative = 0x1p-30;
    ops_operands moved = {0};
    dw__tensor results[OPS_MAX_OUTPUTS] = {{0}};
    dw_status status = DW_OK;
    DW_TRY(ops_operands_perturbed(operands, relative, seed, &moved));
    DW_TRY(interpret(graph, &moved, results));
    for (uint32_t i = 0; i < expected->count; i++) {
        if (!expected->changes[i]) continue;
        const double *was = expected->values[i].data, *is = results[i].data;
        for (int64_t j = 0; j < dw__tensor_count(&results[i]); j++) {
            double change = fabs(is[j] - was[j]) / relative, *most = &expected->changes[i][j];
            if (isfinite(change)) *most = fmax(*most, change);
            expected->amplification[i] = fmax(expected->amplification[i], *most);
        }
    }
cleanup:
    forget(results, OPS_MAX_OUTPUTS);
    ops_operands_destroy(&moved);
    return status;
}

/* Operations whose definition subtracts numbers that may be nearly equal (gelu: 1 and a number near -1; the slope of
 * silu has a root; rem). The error has the order of the operands' magnitude, however small the result. A fused body may
 * contain any of them. */
static bool cancels(dw_op op) {
    return op == DW_OP_GELU || op == DW_OP_GELU_BACKWARD || op == DW_OP_SILU_BACKWARD ||
           op == DW_OP_REM || op == DW_OP_FUSED;
}

static double largest_operand(const ops_operands *operands) {
    double largest = 0.0;
    for (uint32_t i = 0; i < operands->count; i++) {
        const dw__tensor *in = &operands->tensors[i];
        if (in->rank < 0 || !dw__dtype_is_float(in->dtype)) continue;
        for (int64_t j = 0; j < dw__tensor_count(in); j++)
            if (isfinite(ops_element(in, j))) largest = fmax(largest, fabs(ops_element(in, j)));
    }
    return largest;
}

dw_status ops_expect(const ops_case *c, const dw_graph *graph, const ops_operands *operands,
                     ops_expectation *out) {
    enum { PERTURBATIONS = 2 };
    memset(out, 0, sizeof *out);
    out->c = c;
    DW_RETURN_IF_FAILED(interpret(graph, operands, out->values));
    out->count = dw_graph_output_count(graph);
    for (uint32_t i = 0; i < out->count; i++) {
        size_t count = (size_t)dw__tensor_count(&out->values[i]);
        if (out->values[i].dtype == DW_F64) {
            out->changes[i] = dw__calloc(count, sizeof **out->changes);
            if (!out->changes[i]) return dw__fail_memory("changes", count * sizeof **out->changes);
        }
        if (cancels(c->op)) out->scale[i] = largest_operand(operands);
        for (int64_t j = 0; j < dw__tensor_count(&out->values[i]); j++) {
            double magnitude = fabs(ops_element(&out->values[i], j));
            if (isfinite(magnitude)) out->scale[i] = fmax(out->scale[i], magnitude);
        }
    }
    for (uint64_t i = 0; i < PERTURBATIONS && !is_discontinuous(c->op); i++)
        DW_RETURN_IF_FAILED(measure_amplification(graph, operands, i, out));
    return DW_OK;
}

void ops_expectation_destroy(ops_expectation *expected) {
    forget(expected->values, OPS_MAX_OUTPUTS);
    for (int i = 0; i < OPS_MAX_OUTPUTS; i++) dw__free(expected->changes[i]);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static const struct {
    double unit, tiny, largest;
} float_traits[DW_DTYPE_COUNT] = {
    [DW_BF16] = {0x1p-8, 0x1p-126, 0x1.fep127},
    [DW_F16] = {0x1p-11, 0x1p-24, 65504.0},
    [DW_F32] = {0x1p-24, 0x1p-126, 0x1.fffffep127},
    [DW_F64] = {0x1p-53, 0x1p-1022, 0x1.fffffffffffffp1023},
};

/* Returns the bound for an element with the expected value `wanted`. Elementwise operations have a bound per element.
 * Other operations mix elements, so their bound follows from the largest element. */
static double error_bound(const ops_expectation *expected, double factor, uint32_t output,
                          int64_t element, double wanted, dw_dtype dtype) {
    const dw_op op = expected->c->op;
    if (is_exact(op)) return 0.0;
    double n = ops_case_length(expected->c), scale = expected->scale[output];
    double unit = dtype == DW_F64 ? float_traits[DW_F64].unit : float_traits[DW_F32].unit;
    double half = dtype == DW_BF16 || dtype == DW_F16 ? float_traits[dtype].unit : 0.0;
    double change = 4.0 * expected->amplification[output];
    /* Each step of a fused body rounds to its type. Composites compute in F32. */
    if (op == DW_OP_FUSED && half > 0.0) unit = half;
    if (dw_op_is_elementwise(op)) {
        change = expected->changes[output][element];
        if (!cancels(op) && isfinite(wanted)) scale = fabs(wanted);
    }
    double spread = sqrt(n) * scale + change;
    return factor * unit * spread + half * (scale + expected->before[output]) +
           n * float_traits[dtype].tiny;
}

static bool agrees(double got, double wanted, double bound, dw_dtype dtype) {
    double largest = float_traits[dtype].largest;
    /* The problem is so ill-conditioned that no digit is determined. */
    if (bound >= largest) return true;
    if (isnan(wanted)) return isnan(got);
    if (isinf(got) && fabs(wanted) + bound >= largest) return (got > 0) == (wanted > 0);
    if (isinf(wanted)) return got == wanted;
    return fabs(got - wanted) <= bound;
}

bool ops_output_agrees(const ops_expectation *expected, double factor, const dw__tensor *got,
                       uint32_t i, double *worst, char *reason, size_t bytes) {
    const dw__tensor *wanted = &expected->values[i];
    bool is_float = dw__dtype_is_float(got->dtype);
    for (int64_t j = 0; j < dw__tensor_count(got); j++) {
        double a = ops_element(got, j), b = ops_element(wanted, j);
        double bound = is_float ? error_bound(expected, factor, i, j, b, got->dtype) : 0.0;
        bool good = is_float ? agrees(a, b, bound, got->dtype) : a == b;
        if (good && worst && bound > 0.0 && isfinite(a - b))
            *worst = fmax(*worst, fabs(a - b) / bound);
        if (got->dtype == DW_BOOL && ((const uint8_t *)got->data)[j] > 1) good = false;
        if (good) continue;
        snprintf(reason, bytes,
                 "output %u, element %lld: got %.9g, expected %.9g, may be off by %.3g", i,
                 (long long)j, a, b, bound);
        return false;
    }
    return true;
}
