/* Mode `test`: every kernel of every case against the FP64 interpretation of the node's
 * definition.
 *
 * The tolerance of a result follows from the arithmetic (docs/testing.md):
 *
 *     bound = factor * u * (sqrt(n) * scale + 4 * A) + half * scale + tiny
 *
 * factor: the kernel's tolerance_factor; u: unit roundoff of the type of the computation (F32 for BF16 and F16, except
 * in bodies of `fused`, where each step rounds); n: terms per element; scale: largest magnitude of the result; A:
 * change of the result per relative change of the operands, measured by random perturbation (the problem's condition,
 * which no kernel can improve); half: unit roundoff of a BF16 or F16 result; tiny: its smallest normal number, n times.
 * For elementwise operations the same bound applies with scale and A of the single element (and 1 * A). Bools and
 * integers must be equal. */
#include "base/pool.h"
#include "kernel/reference/interpret.h"
#include "kernel/reference/scalar.h"
#include "ops_driver.h"
#include "ops_run_case.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct expectation {
    uint32_t count;
    dw__tensor values[OPS_MAX_OUTPUTS];    /* F64 for every float */
    double scale[OPS_MAX_OUTPUTS];         /* largest finite magnitude */
    double amplification[OPS_MAX_OUTPUTS]; /* the largest A of any element */
    /* A of every element; NULL if the output is not a float. */
    double *changes[OPS_MAX_OUTPUTS];
} expectation;

typedef struct test_run {
    const ops_options *options;
    ops_tally *tally;
    ops_tally of_op; /* of the current operation */
    double worst;    /* the operation's largest error, as a fraction of its bound */
    dw_op op;
    bool started;
} test_run;

typedef struct variant {
    test_run *run;
    const ops_case *c;
    const dw_graph *graph;
    const ops_operands *operands;
    const expectation *expected;
    const char *name;
} variant;

/* ---- expected results ------------------------------------------------------------------------- */

static void forget(dw__tensor *tensors, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) dw__free_aligned(tensors[i].data);
}

/* Operations whose result is discontinuous: its change under a perturbation does not show its condition. */
static bool is_discontinuous(dw_op op) {
    return op == DW_OP_FLOOR || op == DW_OP_CEIL || op == DW_OP_SIGN || op == DW_OP_REM ||
           op == DW_OP_QUANTIZE || op == DW_OP_QUANTIZE_BLOCKS || op == DW_OP_DEQUANTIZE_BLOCKS;
}

/* Operations whose result is one of a format's numbers: either right or wrong. */
static bool is_exact(dw_op op) {
    return op == DW_OP_QUANTIZE || op == DW_OP_QUANTIZE_BLOCKS || op == DW_OP_DEQUANTIZE_BLOCKS;
}

static dw_status interpret(const dw_graph *graph, const ops_operands *operands,
                           dw__tensor *results) {
    dw__tensor leaves[OPS_MAX_INPUTS];
    dw__interpret_options high = {true};
    ops_operands_leaves(operands, leaves);
    return dw__interpret(graph, NULL, leaves, results, &high);
}

static dw_status measure_amplification(const variant *v, expectation *expected, uint64_t seed) {
    const double relative = 0x1p-30;
    ops_operands moved = {0};
    dw__tensor results[OPS_MAX_OUTPUTS] = {{0}};
    dw_status status = DW_OK;
    DW_TRY(ops_operands_perturbed(v->operands, relative, seed, &moved));
    DW_TRY(interpret(v->graph, &moved, results));
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

static dw_status expect(const variant *v, expectation *out) {
    enum { PERTURBATIONS = 2 };
    memset(out, 0, sizeof *out);
    DW_RETURN_IF_FAILED(interpret(v->graph, v->operands, out->values));
    out->count = dw_graph_output_count(v->graph);
    for (uint32_t i = 0; i < out->count; i++) {
        size_t count = (size_t)dw__tensor_count(&out->values[i]);
        if (out->values[i].dtype == DW_F64) {
            out->changes[i] = dw__calloc(count, sizeof **out->changes);
            if (!out->changes[i]) return dw__fail_memory("changes", count * sizeof **out->changes);
        }
        if (cancels(v->c->op)) out->scale[i] = largest_operand(v->operands);
        for (int64_t j = 0; j < dw__tensor_count(&out->values[i]); j++) {
            double magnitude = fabs(ops_element(&out->values[i], j));
            if (isfinite(magnitude)) out->scale[i] = fmax(out->scale[i], magnitude);
        }
    }
    for (uint64_t i = 0; i < PERTURBATIONS && !is_discontinuous(v->c->op); i++)
        DW_RETURN_IF_FAILED(measure_amplification(v, out, i));
    return DW_OK;
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
static double error_bound(const variant *v, const dw__kernel *kernel, uint32_t output,
                          int64_t element, double wanted, dw_dtype dtype) {
    if (is_exact(v->c->op)) return 0.0;
    double n = ops_case_length(v->c), scale = v->expected->scale[output];
    double unit = dtype == DW_F64 ? float_traits[DW_F64].unit : float_traits[DW_F32].unit;
    double half = dtype == DW_BF16 || dtype == DW_F16 ? float_traits[dtype].unit : 0.0;
    double change = 4.0 * v->expected->amplification[output];
    /* Each step of a fused body rounds to its type. Composites compute in F32. */
    if (v->c->op == DW_OP_FUSED && half > 0.0) unit = half;
    if (dw_op_is_elementwise(v->c->op)) {
        change = v->expected->changes[output][element];
        if (!cancels(v->c->op) && isfinite(wanted)) scale = fabs(wanted);
    }
    double spread = sqrt(n) * scale + change;
    return kernel->tolerance_factor * unit * spread + half * scale + n * float_traits[dtype].tiny;
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

/* Returns false, and writes the reason into `reason`, if output `i` exceeds its bound. */
static bool check_output(const variant *v, const dw__kernel *kernel, const dw__tensor *got,
                         uint32_t i, char *reason, size_t bytes) {
    const dw__tensor *wanted = &v->expected->values[i];
    bool is_float = dw__dtype_is_float(got->dtype);
    for (int64_t j = 0; j < dw__tensor_count(got); j++) {
        double a = ops_element(got, j), b = ops_element(wanted, j);
        double bound = is_float ? error_bound(v, kernel, i, j, b, got->dtype) : 0.0;
        bool good = is_float ? agrees(a, b, bound, got->dtype) : a == b;
        if (good && bound > 0.0 && isfinite(a - b))
            v->run->worst = fmax(v->run->worst, fabs(a - b) / bound);
        if (got->dtype == DW_BOOL && ((const uint8_t *)got->data)[j] > 1) good = false;
        if (good) continue;
        snprintf(reason, bytes,
                 "output %u, element %lld: got %.9g, expected %.9g, may be off by %.3g", i,
                 (long long)j, a, b, bound);
        return false;
    }
    return true;
}

static bool check_outputs(const variant *v, const dw__kernel *kernel, const ops_call *c,
                          char *reason, size_t bytes) {
    const char *damage = ops_call_damage(c);
    if (damage) {
        snprintf(reason, bytes, "%s", damage);
        return false;
    }
    for (uint32_t i = 0; i < v->expected->count; i++)
        if (c->call.outputs[i].data &&
            !check_output(v, kernel, &c->call.outputs[i], i, reason, bytes))
            return false;
    return true;
}

/* ---- running a kernel ------------------------------------------------------------------------ */

static uint64_t operands_hash(const ops_operands *operands) {
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a */
    for (uint32_t i = 0; i < operands->count; i++)
        for (size_t j = 0; operands->blocks[i].base && j < operands->blocks[i].bytes; j++)
            hash = (hash ^ ((const unsigned char *)operands->blocks[i].data)[j]) * 0x100000001B3u;
    return hash;
}

static bool same_bytes(const ops_call *a, const ops_call *b) {
    for (int i = 0; i < OPS_MAX_OUTPUTS; i++)
        if (a->outputs[i].base &&
            memcmp(a->outputs[i].data, b->outputs[i].data, a->outputs[i].bytes))
            return false;
    return true;
}

/* Repeats the call with other memory on one thread; the bits must not change. The scratch is sized for the number of
 * threads that uses it. */
static bool check_repeats(const variant *v, const dw__kernel *kernel, const ops_call *first,
                          char *reason, size_t bytes) {
    ops_call *again = NULL;
    int threads = dw__pool_threads();
    bool good = false;
    dw_status status = ops_call_create(v->graph, v->operands, &again);
    if (status == DW_OK) status = dw__pool_set_threads(1);
    if (status == DW_OK) status = ops_call_bind(again, kernel);
    if (status == DW_OK) status = kernel->run(&again->call, again->scratch.data);
    if (status != DW_OK)
        snprintf(reason, bytes, "on one thread: %s", dw_last_error());
    else if (ops_call_damage(again))
        snprintf(reason, bytes, "on one thread: %s", ops_call_damage(again));
    else if (!same_bytes(first, again))
        snprintf(reason, bytes, "a run on one thread gives other bits than one on %d", threads);
    else
        good = true;
    if (dw__pool_set_threads(threads) != DW_OK) good = false;
    ops_call_destroy(again);
    return good;
}

/* Runs the call without output `skipped`; the other outputs must still be right. */
static bool check_without(const variant *v, const dw__kernel *kernel, ops_call *c, uint32_t skipped,
                          char *reason, size_t bytes) {
    void *data = c->call.outputs[skipped].data;
    c->call.outputs[skipped].data = NULL;
    bool good = false;
    if (!kernel_supports(kernel, &c->call))
        good = true; /* the kernel may not support that; then another one is selected */
    else {
        ops_call_clear(c);
        dw_status status = ops_call_bind(c, kernel);
        if (status == DW_OK) status = kernel->run(&c->call, c->scratch.data);
        if (status != DW_OK)
            snprintf(reason, bytes, "%s", dw_last_error());
        else
            good = check_outputs(v, kernel, c, reason, bytes);
        size_t length = strlen(reason);
        if (!good) snprintf(reason + length, bytes - length, " (output %u not wanted)", skipped);
    }
    c->call.outputs[skipped].data = data;
    return good;
}

static bool check_must_fail(const dw__kernel *kernel, ops_call *c, char *reason, size_t bytes) {
    dw_status status = kernel->run(&c->call, c->scratch.data);
    const char *damage = ops_call_damage(c);
    bool refused = status == DW_INVALID_ARGUMENT || status == DW_INDEX;
    if (refused && *dw_last_error() && !damage) return true;
    snprintf(reason, bytes, "expected INVALID_ARGUMENT or INDEX, got %s%s%s",
             dw_status_name(status), damage ? ", " : "", damage ? damage : "");
    return false;
}

static bool run_checks(const variant *v, const dw__kernel *kernel, ops_call *c, bool thorough,
                       char *reason, size_t bytes) {
    uint64_t before = operands_hash(v->operands);
    if (ops_call_bind(c, kernel) != DW_OK) {
        snprintf(reason, bytes, "prepare: %s", dw_last_error());
        return false;
    }
    if (v->c->must_fail) return check_must_fail(kernel, c, reason, bytes);
    if (kernel->run(&c->call, c->scratch.data) != DW_OK) {
        snprintf(reason, bytes, "%s: %s", "run", dw_last_error());
        return false;
    }
    if (operands_hash(v->operands) != before) {
        snprintf(reason, bytes, "wrote to an operand");
        return false;
    }
    if (!check_outputs(v, kernel, c, reason, bytes)) return false;
    bool ours = strncmp(kernel->name, "reference", 9) != 0;
    if (ours && thorough && !check_repeats(v, kernel, c, reason, bytes)) return false;
    for (uint32_t i = 0; thorough && c->call.output_count > 1 && i < c->call.output_count; i++)
        if (!check_without(v, kernel, c, i, reason, bytes)) return false;
    return true;
}

static dw_status test_kernel(const variant *v, const dw__kernel *kernel, bool thorough) {
    char reason[1024] = "";
    ops_call *c = NULL;
    DW_RETURN_IF_FAILED(ops_call_create(v->graph, v->operands, &c));
    if (kernel_supports(kernel, &c->call)) {
        bool good = run_checks(v, kernel, c, thorough, reason, sizeof reason);
        if (good)
            v->run->of_op.passed++;
        else {
            v->run->of_op.failed++;
            ops_report_failure(v->run->options, "test", v->name, kernel->name, reason);
        }
    }
    ops_call_destroy(c);
    return DW_OK;
}

/* ---- variants of a case ---------------------------------------------------------------------- */

static dw_status test_variant(test_run *run, const ops_case *c, const dw_graph *graph,
                              ops_layout layout, ops_data data) {
    char name[OPS_TEXT_BYTES + 32];
    snprintf(name, sizeof name, "%s | %s %s", c->text, ops_layout_name(layout),
             ops_data_name(data));
    if (!ops_wants_name(run->options, name)) return DW_OK;
    if (run->options->list) {
        printf("%s\n", name);
        return DW_OK;
    }
    ops_operands operands;
    expectation expected = {0};
    dw_status status = DW_OK;
    variant v = {run, c, graph, &operands, &expected, name};
    bool thorough = layout == OPS_CONTIGUOUS && data == OPS_NORMAL;
    DW_RETURN_IF_FAILED(ops_operands_create(c, layout, data, run->options->seed, &operands));
    if (!c->must_fail) DW_TRY(expect(&v, &expected));
    for (const dw__kernel *const *kernel = dw__kernel_candidates(c->op, false); *kernel; kernel++)
        if (ops_wants_kernel(run->options, *kernel)) DW_TRY(test_kernel(&v, *kernel, thorough));
cleanup:
    forget(expected.values, OPS_MAX_OUTPUTS);
    for (int i = 0; i < OPS_MAX_OUTPUTS; i++) dw__free(expected.changes[i]);
    ops_operands_destroy(&operands);
    if (status != DW_OK) {
        run->of_op.failed++;
        ops_report_failure(run->options, "test", name, NULL, dw_last_error());
    }
    return DW_OK;
}

/* Skips a backward whose lse was rounded to a half type, or belongs to other logits than the recomputed ones. With
 * scores in the thousands, exp(score - lse) then exceeds any range, and there is nothing to compare. */
static bool lse_is_rounded(const ops_case *c, dw_dtype dtype) {
    enum { LOGITS = 3 };
    if (c->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD && c->inputs[LOGITS].absent) return true;
    bool reads_lse =
        c->op == DW_OP_CROSS_ENTROPY_BACKWARD || c->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
    return reads_lse && (dtype == DW_BF16 || dtype == DW_F16);
}

static dw_status test_variants(test_run *run, const ops_case *c, const dw_graph *graph,
                               dw_dtype dtype) {
    bool plain = c->must_fail || c->input_count == 0 || (run->options->quick && dtype != DW_F32);
    for (int layout = 0; layout < OPS_LAYOUT_COUNT; layout++)
        if (layout == OPS_CONTIGUOUS || !plain)
            DW_RETURN_IF_FAILED(test_variant(run, c, graph, (ops_layout)layout, OPS_NORMAL));
    if (lse_is_rounded(c, dtype)) return DW_OK;
    for (int data = OPS_NORMAL + 1; data < OPS_DATA_COUNT; data++)
        if (!plain && dw__dtype_is_float(dtype))
            DW_RETURN_IF_FAILED(test_variant(run, c, graph, OPS_CONTIGUOUS, (ops_data)data));
    return DW_OK;
}

/* ---- the mode -------------------------------------------------------------------------------- */

static void finish_op(test_run *run) {
    const ops_tally *t = &run->of_op;
    if (run->started && !run->options->list && t->passed + t->failed + t->skipped > 0)
        printf("%-32s %6lld passed %4lld failed %4lld skipped; largest error %.2f of its bound\n",
               dw_op_name(run->op), (long long)t->passed, (long long)t->failed,
               (long long)t->skipped, run->worst);
    run->worst = 0.0;
    fflush(stdout);
    run->tally->passed += t->passed;
    run->tally->failed += t->failed;
    run->tally->skipped += t->skipped;
    memset(&run->of_op, 0, sizeof run->of_op);
}

static dw_status visit(void *context, const char *text, dw_dtype dtype) {
    test_run *run = context;
    ops_case *c = dw__malloc(sizeof *c);
    dw_graph *graph = NULL;
    dw_status status = DW_OK;
    if (!c) return dw__fail_memory("a case", sizeof *c);
    DW_TRY(ops_case_parse(text, c));
    if (!ops_wants_op(run->options, c)) goto cleanup;
    if (!run->started || run->op != c->op) finish_op(run);
    run->op = c->op;
    run->started = true;
    status = ops_case_graph(c, &graph);
    if (status == DW_TYPE && dtype != DW_F32) { /* the operation does not support this type */
        run->of_op.skipped++;
        status = DW_OK;
    } else if (status != DW_OK) {
        run->of_op.failed++;
        ops_report_failure(run->options, "test", text, NULL, dw_last_error());
        status = DW_OK;
    } else {
        DW_TRY(test_variants(run, c, graph, dtype));
    }
cleanup:
    dw_graph_destroy(graph);
    dw__free(c);
    return status;
}

dw_status ops_mode_test(const ops_options *options, ops_tally *tally) {
    test_run run = {.options = options, .tally = tally};
    dw_status status =
        options->text ? visit(&run, options->text, DW_F32) : ops_each_case(visit, &run);
    finish_op(&run);
    return status;
}
