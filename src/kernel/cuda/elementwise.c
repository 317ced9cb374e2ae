/* Elementwise operations and fused programs, by kernels whose source is made at run time (elementwise_source.c).
 *
 * A program is a body, the types of its tensors and the rank of its merged iteration. Programs with equal sources are
 * one entry of a table that lives as long as the process; a variant's parameter is the program's number there.
 */
#include "kernel/cuda/elementwise.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/iteration.h"
#include <pthread.h>
#include <stdio.h>

enum { MOST_WORDS = 500 }; /* 4,000 bytes of parameters */

typedef struct program {
    dw__elementwise_types types;
    char *source;
} program;

static struct {
    program **items;
    size_t count, capacity;
} programs;
static dw__map *numbers; /* by source */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static const program *program_at(uint64_t number) {
    pthread_mutex_lock(&lock);
    const program *found = programs.items[number];
    pthread_mutex_unlock(&lock);
    return found;
}

static dw_status add_program(const dw__elementwise_types *types, char *source, uint32_t *number) {
    program *made = dw__malloc(sizeof *made);
    if (!made) return dw__fail_memory("an elementwise program", sizeof *made);
    *made = (program){.types = *types, .source = source};
    *number = (uint32_t)programs.count;
    dw_status status = DW_PUSH(&programs, made);
    if (status == DW_OK) status = dw__map_set(numbers, source, *number);
    if (status != DW_OK) {
        if (programs.count > *number) programs.count--;
        dw__free(made);
    }
    return status;
}

/* Takes over the source. */
static dw_status number_of(const dw__elementwise_types *types, dw__text *source, uint32_t *number) {
    dw_status status = DW_OK;
    pthread_mutex_lock(&lock);
    if (!numbers) numbers = dw__map_create();
    if (!numbers) DW_TRY(dw__fail_memory("the elementwise programs", 0));
    if (!dw__map_get(numbers, source->text, number)) {
        DW_TRY(add_program(types, source->text, number));
        *source = (dw__text){0};
    }
cleanup:
    pthread_mutex_unlock(&lock);
    dw__text_free(source);
    return status;
}

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

/* The merged iteration; `types` has its marks. */
static void iterate(const dw__call *c, dw__elementwise_types *types, dw__iteration *it) {
    const dw__tensor *shape = &c->outputs[0];
    dw__iteration_begin(it, shape->rank, shape->shape);
    for (uint32_t i = 0; i < c->input_count; i++) {
        int64_t stride[DW_MAX_RANK];
        if (!types->is_read[i]) continue;
        dw__broadcast_strides(&c->inputs[i], shape, stride);
        dw__iteration_add(it, stride);
    }
    for (uint32_t o = 0; o < c->output_count; o++) dw__iteration_add(it, c->outputs[o].stride);
    dw__iteration_merge(it);
    types->rank = it->rank;
}

static void types_of(const dw__call *c, const dw__body *body, dw__elementwise_types *types) {
    types->input_count = c->input_count;
    types->output_count = c->output_count;
    for (uint32_t i = 0; i < c->input_count; i++) types->inputs[i] = c->inputs[i].dtype;
    for (uint32_t o = 0; o < c->output_count; o++) types->outputs[o] = c->outputs[o].dtype;
    dw__elementwise_mark(body, types);
}

static bool have_one_shape(const dw__tensor *a, const dw__tensor *b) {
    bool same = a->rank == b->rank;
    for (int axis = 0; same && axis < a->rank; axis++) same = a->shape[axis] == b->shape[axis];
    return same;
}

/* The parameters of a call must fit into a launch. Each operand that is read and each result has an address and, for each
 * merged axis, a stride. */
static dw_status check_words(const dw__kernel *kernel, const dw__call *c) {
    dw_status status = DW_OK;
    struct {
        dw__body body;
        dw__elementwise_types types;
        dw__iteration iteration;
    } *work = NULL;
    /* Most calls fit whatever their body reads, and however their axes merge. */
    if (3 + DW_MAX_RANK + (size_t)(c->input_count + c->output_count) * (1 + DW_MAX_RANK) <=
        MOST_WORDS)
        return DW_OK;
    work = dw__calloc(1, sizeof *work);
    if (!work) return dw__fail_memory("an elementwise program", sizeof *work);
    DW_TRY(body_of(c, &work->body));
    types_of(c, &work->body, &work->types);
    iterate(c, &work->types, &work->iteration);
    const size_t words = dw__elementwise_words(&work->types);
    if (words > MOST_WORDS)
        DW_TRY(dw__fail(DW_UNSUPPORTED,
                        "%s: %u operands and results with %d axes that do not merge need %zu words "
                        "of parameters; expected %d or fewer",
                        kernel->name, c->input_count + c->output_count, work->types.rank, words,
                        MOST_WORDS));
cleanup:
    dw__free(work);
    return status;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    for (uint32_t o = 1; o < c->output_count; o++)
        if (!have_one_shape(&c->outputs[0], &c->outputs[o]))
            return dw__fail(DW_UNSUPPORTED, "%s: expected results of one shape", kernel->name);
    return check_words(kernel, c);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw_status status = DW_OK;
    dw__text source = {0};
    uint32_t number = 0;
    struct {
        dw__body body;
        dw__elementwise_types types;
        dw__iteration iteration;
    } *work = dw__calloc(1, sizeof *work);
    if (!work) return dw__fail_memory("an elementwise program", sizeof *work);
    DW_TRY(body_of(c, &work->body));
    types_of(c, &work->body, &work->types);
    iterate(c, &work->types, &work->iteration);
    DW_TRY(dw__elementwise_source(&work->body, &work->types, &source));
    DW_TRY(number_of(&work->types, &source, &number));
    DW_TRY(dw__variant_of(context, kernel, number, variant));
cleanup:
    dw__text_free(&source);
    dw__free(work);
    return status;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    (void)kernel;
    points->code = (dw__jit_variant){.source = "elementwise",
                                     .text = program_at(params)->source,
                                     .entry = "elementwise",
                                     .arch = dw__gpu_arch(capability)};
    return DW_OK;
}

static int64_t *put(int64_t *word, const void *data, const int64_t *stride, int rank) {
    *word++ = (int64_t)(uintptr_t)data;
    for (int axis = 0; axis < rank; axis++) *word++ = stride[axis];
    return word;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *c = call;
    dw__elementwise_types types = program_at(variant->params)->types;
    dw__iteration it;
    int64_t words[MOST_WORDS], *word = words;
    iterate(&c->call, &types, &it);
    if (it.count == 0) return DW_OK;
    *word++ = it.count;
    *word++ = (int64_t)(uintptr_t)c->error.word;
    *word++ = c->error.mark;
    for (int axis = 0; axis < it.rank; axis++) *word++ = it.shape[axis];
    uint32_t tensor = 0;
    for (uint32_t i = 0; i < c->call.input_count; i++) {
        const dw__tensor *in = &c->call.inputs[i];
        const int64_t whole[DW_MAX_RANK] = {in->rank > 0 ? in->stride[0] : 0};
        if (types.is_read[i])
            word = put(word, in->data, it.stride[tensor++], it.rank);
        else if (types.is_seed[i])
            word = put(word, in->data, whole, it.rank);
    }
    for (uint32_t o = 0; o < c->call.output_count; o++)
        word = put(word, c->call.outputs[o].data, it.stride[tensor++], it.rank);
    return dw__gpu_launch_each(c, context, "elementwise", variant->functions[0], it.count, words);
}

const dw__kernel dw__gpu_elementwise = {
    .name = "elementwise",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__PROVEN_ON_EMULATOR,
    .operation = "elementwise operations and fused programs of them",
    .source = "src/kernel/cuda/elementwise_source.c, cuda/common/elementwise.cuh",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "every element type",
    .needs = "NVRTC: the source is made for each program",
    .supports = supports,
    .seconds = dw__gpu_seconds_of_bytes,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    /* No first-use check: random operands may lie on a step of a user's program, where both answers are right. */
    .tolerance = "each step rounds to its type; functions of F32 within 4 units in the last place",
};
