/* Elementwise operations and fused programs, by kernels whose source is made at run time (elementwise_source.c).
 *
 * A program is a body and the form of its tensors (elementwise_form.c). A variant's parameter is the number of its source
 * (program_table.h).
 */
#include "kernel/cuda/elementwise.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/program_table.h"
#include <stdio.h>

enum { MOST_WORDS = 500 }; /* 4,000 bytes of parameters */

/* ---- calls ---------------------------------------------------------------------------------------- */

static bool computes(dw_op op) {
    return op == DW_OP_FUSED || op == DW_OP_RANDOM_UNIFORM || dw_op_is_elementwise(op);
}

/* One instruction without an operand but the seed. */
static void body_of_uniform(const dw__call *c, dw__body *body) {
    const double stream = (double)dw__call_int(c, DW_ATTR_KEY_STREAM, 0);
    body->input_count = body->code_count = body->output_count = 1;
    body->code[0] =
        (dw__body_code){.op = c->op,
                        .dtype = DW_F32,
                        .operand_dtype = DW_I64,
                        .operand_count = 2,
                        .operands = {{DW_BODY_INPUT, 0, 0.0}, {DW_BODY_CONSTANT, 0, stream}}};
    body->outputs[0] = (dw__body_operand){DW_BODY_RESULT, 0, 0.0};
}

/* `body` begins as zeros. */
static dw_status body_of(const dw__call *c, dw__body *body) {
    if (c->op != DW_OP_RANDOM_UNIFORM) return dw__elementwise_body(c, body);
    body_of_uniform(c, body);
    return DW_OK;
}

static bool have_one_shape(const dw__tensor *a, const dw__tensor *b) {
    bool same = a->rank == b->rank;
    for (int axis = 0; same && axis < a->rank; axis++) same = a->shape[axis] == b->shape[axis];
    return same;
}

/* The parts of a call, which are too large for the stack of a thread. */
typedef struct analysis {
    dw__body body;
    dw__elementwise_form form;
    dw__iteration iteration;
} analysis;

/* Free *made with dw__free. */
static dw_status analyse(const dw__call *c, analysis **made) {
    dw_status status = DW_OK;
    analysis *a = dw__calloc(1, sizeof *a);
    if (!a) return dw__fail_memory("an elementwise program", sizeof *a);
    DW_TRY(body_of(c, &a->body));
    dw__elementwise_form_of(c, &a->body, &a->form, &a->iteration);
    *made = a;
    return DW_OK;
cleanup:
    dw__free(a);
    return status;
}

/* The parameters of a call must fit into a launch. */
static dw_status check_words(const dw__kernel *kernel, const dw__call *c) {
    analysis *a;
    /* Most calls fit whatever their body reads, and however their axes merge. */
    if (3 + 2 * DW_MAX_RANK + (size_t)(c->input_count + c->output_count) * (1 + DW_MAX_RANK) <=
        MOST_WORDS)
        return DW_OK;
    DW_RETURN_IF_FAILED(analyse(c, &a));
    const size_t words = dw__elementwise_words(&a->form);
    const int rank = a->form.rank;
    dw__free(a);
    if (words <= MOST_WORDS) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "%s: %u operands and results with %d axes that do not merge need %zu words of "
                    "parameters; expected %d or fewer",
                    kernel->name, c->input_count + c->output_count, rank, words, MOST_WORDS);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    for (uint32_t o = 1; o < dw__call_own_outputs(c); o++)
        if (!have_one_shape(&c->outputs[0], &c->outputs[o]))
            return dw__fail(DW_UNSUPPORTED, "%s: expected results of one shape", kernel->name);
    return check_words(kernel, c);
}

static int64_t blocks_of(const dw__elementwise_form *form, int64_t count) {
    const int64_t of_block = (int64_t)DW__ELEMENTWISE_THREADS * form->turns;
    return (count / form->vector + of_block - 1) / of_block;
}

/* Each block stores the largest magnitude that it has seen. A vector of them takes one more word of parameters. */
static int64_t magnitude_parts(const dw__call *c, uint32_t o) {
    const dw_dtype dtype = c->outputs[o].dtype;
    analysis *a;
    if ((!dw__dtype_is_half(dtype) && dtype != DW_F32) || analyse(c, &a) != DW_OK) return 0;
    const bool fits = dw__elementwise_words(&a->form) + DW_MAX_OUTPUTS <= MOST_WORDS;
    const int64_t parts = fits ? blocks_of(&a->form, a->iteration.count) : 0;
    dw__free(a);
    return parts;
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw_status status = DW_OK;
    dw__text source = {0};
    analysis *a = NULL;
    DW_TRY(analyse(c, &a));
    DW_TRY(dw__elementwise_source(&a->body, &a->form, &source));
    DW_TRY(dw__program_variant(context, kernel, &source, &a->form, sizeof a->form, variant));
cleanup:
    dw__text_free(&source);
    dw__free(a);
    return status;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){.source = "elementwise",
                                     .text = dw__program_at(params)->source,
                                     .entry = "elementwise",
                                     .arch = dw__gpu_arch(capability)};
    return DW_OK;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    const dw__elementwise_form *form = dw__program_at(variant->params)->form;
    dw__iteration it;
    int64_t words[MOST_WORDS];
    void *arguments[] = {words};
    dw__elementwise_iterate(&c->call, form, &it);
    if (it.count == 0) return DW_OK;
    dw__elementwise_fill(form, &it, c, words);
    return context->device->launch(&(dw__launch){
        .name = "elementwise",
        .function = variant->functions[0],
        .grid = {(unsigned)blocks_of(form, it.count), 1, 1},
        .block = {DW__ELEMENTWISE_THREADS, 1, 1},
        .stream = c->stream,
        .arguments = arguments,
    });
}

const dw__kernel dw__gpu_elementwise = {
    .name = "elementwise",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "elementwise operations and fused programs of them",
    .source = "src/kernel/cuda/elementwise_source.c, cuda/common/elementwise.cuh",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type",
    .needs = "NVRTC: the source is made for each program",
    .supports = supports,
    .magnitude_parts = magnitude_parts,
    .seconds = dw__gpu_seconds_of_bytes,
    .results = DW__RESULTS_SCATTERED,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    /* No first-use check: random operands may lie on a step of a user's program, where both answers are right. */
    .tolerance = "each step rounds to its type; functions of F32 within 4 units in the last place, "
                 "of one BF16 or F16 within 1.02 of its rounding",
};
