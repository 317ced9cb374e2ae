/* Expected results of a case, by the FP64 interpretation of the node's definition, and their tolerance.
 *
 * The tolerance of a result follows from the arithmetic (docs/testing.md):
 *
 *     bound = factor * u * (sqrt(n) * scale + 4 * A) + half * (scale + before) + tiny
 *
 * factor: the kernel's tolerance_factor; u: unit roundoff of the type of the computation (F32 for BF16 and F16, except
 * in bodies of `fused`, where each step rounds); n: terms per element; scale: largest magnitude of the result; A:
 * change of the result per relative change of the operands, measured by random perturbation (the problem's condition,
 * which no kernel can improve); half: unit roundoff of a BF16 or F16 result; before: largest magnitude of a sum that is
 * rounded to the result's type on the way to it, usually none; tiny: the type's smallest normal number, n times.
 * For elementwise operations the same bound applies with scale and A of the single element (and 1 * A). Bools and
 * integers must be equal. */
#ifndef DW_OPS_EXPECT_H
#define DW_OPS_EXPECT_H

#include "ops_run_case.h"

typedef struct ops_expectation {
    const ops_case *c;
    uint32_t count;
    dw__tensor values[OPS_MAX_OUTPUTS];    /* F64 for every float */
    double scale[OPS_MAX_OUTPUTS];         /* largest finite magnitude */
    double amplification[OPS_MAX_OUTPUTS]; /* the largest A of any element */
    double before[OPS_MAX_OUTPUTS];        /* ops_expect() leaves it 0 */
    /* A of every element; NULL if the output is not a float. */
    double *changes[OPS_MAX_OUTPUTS];
} ops_expectation;

/* `graph` is the case's graph. Destroy the result also after a failure. */
dw_status ops_expect(const ops_case *c, const dw_graph *graph, const ops_operands *operands,
                     ops_expectation *out);
void ops_expectation_destroy(ops_expectation *expected);

/* Returns false, and writes the reason into `reason`, if output `i` exceeds its bound for a kernel of tolerance
 * `factor`. *worst becomes the largest error as a fraction of its bound, if that is more; it may be NULL. */
bool ops_output_agrees(const ops_expectation *expected, double factor, const dw__tensor *got,
                       uint32_t i, double *worst, char *reason, size_t bytes);

#endif
