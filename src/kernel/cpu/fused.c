/* Elementwise programs on the CPU: the `fused` node, and every elementwise operation by itself.
 *
 * parse() turns the body into steps over chunk buffers: registers of up to DW_LANE_CHUNK elements,
 * allocated by liveness, on the worker's stack and thus in its L1 cache. run() walks the iteration shape in
 * chunks, after merging its axes as far as all operands allow; each step is one vector loop over the chunk.
 * Inputs whose layout suits the loops are read in place, constant inputs are one vector, and others are
 * gathered into a buffer. A step whose result is an output writes it in place. If an output has gaps between
 * its rows, each chunk lies in one row.
 *
 * BF16 and F16 are held as F32. A step whose result has such a dtype rounds it to that dtype, so that a chain
 * gives the same bits as its operations run one by one.
 *
 * An element's value does not depend on the division into chunks and tasks, and neither do the bits. */
#include "kernel/cpu/fused.h"
#include "base/pool.h"
#include "kernel/cpu/cpu.h"
#include "kernel/elementwise_body.h"
#include "kernel/reference/scalar.h"
#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <string.h>

DW_ISA_TABLE(dw__fused_loops)

enum {
    TASK_ELEMENTS = 16 * 1024, /* one task of the pool: 64 KiB of F32 */
    BUFFER_BYTES = 64 * 1024,  /* all chunk buffers of a task */
    SHORT_ROW = 128,           /* shorter rows are gathered, several per chunk */
    /* Added to each buffer, so that no two buffers are a multiple of 4 KiB apart: a load would wait for a
     * store whose address differs only in the upper bits. */
    BUFFER_SKEW = 192
};

/* ---- the program ----------------------------------------------------------------------------- */

typedef struct program_operand {
    dw__body_source source;
    uint16_t index; /* number of the input, step or constant */
} program_operand;

typedef struct program_step {
    dw__lane_loop loop;     /* NULL for dropout and if this kind has no loop */
    dw__lane_loop rounding; /* rounds an F32 result to BF16 or F16; NULL if it is exact */
    bool is_dropout;
    uint8_t operand_count;
    program_operand operands[DW_LANE_OPERANDS];
    uint16_t slot;  /* buffer of the result, unless it is written in place */
    int16_t output; /* output that can be written in place, or -1 */
} program_step;

typedef struct program {
    dw__body body;
    program_step steps[DW_BODY_MAX_CODE];
    program_operand outputs[DW_MAX_OUTPUTS];
    bool in_place[DW_MAX_OUTPUTS];
    bool used[DW_MAX_INPUTS]; /* Read element by element, so neither unused nor a seed. */
    uint16_t slot_count;
    uint16_t constant_count;
    uint8_t element_bytes; /* widest element of all buffers: 4 or 8 */
    alignas(DW_LANE_SPLAT_BYTES) uint8_t constants[][DW_LANE_SPLAT_BYTES];
} program;

static const dw_dtype kind_dtype[DW_LANE_KINDS] = {DW_BOOL, DW_I32, DW_I64, DW_F32, DW_F64};

static dw__lane_kind kind_of(dw_dtype dtype) {
    switch (dtype) {
    case DW_BOOL: return DW_LANE_BOOL;
    case DW_I32: return DW_LANE_I32;
    case DW_I64: return DW_LANE_I64;
    case DW_F64: return DW_LANE_F64;
    default: return DW_LANE_F32;
    }
}

static bool is_half(dw_dtype dtype) { return dtype == DW_BF16 || dtype == DW_F16; }

static dw__lane_kind operand_kind(const dw__body_code *code, int i) {
    return kind_of(dw__body_operand_dtype(code, i));
}

static void splat(uint8_t *bytes, const void *value, size_t size) {
    for (size_t at = 0; at < DW_LANE_SPLAT_BYTES; at += size) memcpy(bytes + at, value, size);
}

/* `type` is the operand's dtype. A constant is rounded to it and held in the type's kind. */
static program_operand make_operand(program *p, const dw__body_operand *operand, dw_dtype type) {
    program_operand made = {operand->source, operand->index};
    if (operand->source == DW_BODY_CONSTANT) {
        uint64_t value = 0;
        dw_dtype dtype = kind_dtype[kind_of(type)];
        dw__scalar constant = dw__scalar_round(dw__scalar_of(operand->constant, type), type);
        dw__scalar_store(&value, dtype, 0, constant);
        made.index = p->constant_count++;
        splat(p->constants[made.index], &value, dw_dtype_bytes(dtype));
    }
    if (operand->source == DW_BODY_INPUT) p->used[operand->index] = true;
    return made;
}

/* pow with the exponents that models use for squares and cubes has loops of its own. */
static int lane_op(const dw__body_code *code) {
    if (code->op == DW_OP_GELU && code->tanh_approximation) return DW_LANE_GELU_TANH;
    if (code->op == DW_OP_GELU_BACKWARD && code->tanh_approximation)
        return DW_LANE_GELU_TANH_BACKWARD;
    if (code->op == DW_OP_POW && code->operands[1].source == DW_BODY_CONSTANT) {
        if (code->operands[1].constant == 2.0) return DW_LANE_SQUARE;
        if (code->operands[1].constant == 3.0) return DW_LANE_CUBE;
    }
    return (int)code->op;
}

static dw__lane_loop find_loop(const dw__body_code *code) {
    const dw__fused_loops *loops = dw__fused_loops_now();
    dw__lane_kind kind = operand_kind(code, code->op == DW_OP_SELECT ? 1 : 0);
    if (code->op == DW_OP_CAST) return loops->cast[kind][code->dtype];
    int op = lane_op(code);
    dw__lane_loop loop = loops->apply[kind][op];
    return loop ? loop : loops->apply[kind][code->op];
}

/* True if the result is an operand, possibly with another sign, or the result of a cast, whose loop rounds. */
static bool is_exact(dw_op op) {
    switch (op) {
    case DW_OP_CAST:
    case DW_OP_SELECT:
    case DW_OP_MAX:
    case DW_OP_MIN:
    case DW_OP_RELU:
    case DW_OP_NEG:
    case DW_OP_ABS:
    case DW_OP_SIGN:
    case DW_OP_STOP_GRADIENT: return true;
    default: return false;
    }
}

static dw__lane_loop find_rounding(const dw__body_code *code) {
    if (!is_half(code->dtype) || is_exact(code->op)) return NULL;
    return dw__fused_loops_now()->cast[DW_LANE_F32][code->dtype];
}

static void make_step(program *p, int at) {
    const dw__body_code *code = &p->body.code[at];
    program_step *step = &p->steps[at];
    step->is_dropout = code->op == DW_OP_DROPOUT;
    step->operand_count = step->is_dropout ? 1 : code->operand_count;
    step->loop = step->is_dropout ? NULL : find_loop(code);
    step->rounding = find_rounding(code);
    step->output = -1;
    for (int i = 0; i < step->operand_count; i++)
        step->operands[i] = make_operand(p, &code->operands[i], dw__body_operand_dtype(code, i));
}

/* Selects the outputs that a step can write directly: the dtype in memory equals that of the chunk. */
static void place_outputs(program *p, const dw__call *call) {
    for (int i = 0; i < p->body.output_count; i++) {
        const dw__body_operand *from = &p->body.outputs[i];
        p->outputs[i] = make_operand(p, from, call->outputs[i].dtype);
        if (from->source != DW_BODY_RESULT || is_half(call->outputs[i].dtype)) continue;
        program_step *step = &p->steps[from->index];
        if (step->output >= 0) continue;
        step->output = (int16_t)i;
        p->in_place[i] = true;
    }
}

/* Frees a buffer after the last step that reads it. A result that is an output stays live. */
static void allocate_slots(program *p) {
    int last_use[DW_BODY_MAX_CODE], count = p->body.code_count;
    for (int i = 0; i < count; i++) {
        last_use[i] = i;
        for (int j = 0; j < p->steps[i].operand_count; j++)
            if (p->steps[i].operands[j].source == DW_BODY_RESULT)
                last_use[p->steps[i].operands[j].index] = i;
    }
    for (int i = 0; i < p->body.output_count; i++)
        if (p->outputs[i].source == DW_BODY_RESULT) last_use[p->outputs[i].index] = count;
    int busy_until[DW_BODY_MAX_CODE];
    p->slot_count = 0;
    for (int i = 0; i < count; i++) {
        int slot = 0;
        while (slot < p->slot_count && busy_until[slot] >= i) slot++;
        if (slot == p->slot_count) p->slot_count++;
        busy_until[slot] = last_use[i];
        p->steps[i].slot = (uint16_t)slot;
    }
}

static uint8_t widest_element(const dw__body *body, const dw__call *call) {
    size_t widest = 4;
    for (uint32_t i = 0; i < call->input_count; i++)
        if (dw_dtype_bytes(call->inputs[i].dtype) > widest) widest = 8;
    for (int i = 0; i < body->code_count; i++)
        if (dw_dtype_bytes(body->code[i].dtype) > widest) widest = 8;
    return (uint8_t)widest;
}

static size_t constants_in(const dw__body *body) {
    size_t count = 0;
    for (int i = 0; i < body->code_count; i++)
        for (int j = 0; j < body->code[i].operand_count; j++)
            count += body->code[i].operands[j].source == DW_BODY_CONSTANT;
    for (int i = 0; i < body->output_count; i++)
        count += body->outputs[i].source == DW_BODY_CONSTANT;
    return count;
}

static dw_status parse(const dw__call *call, void **prepared) {
    dw_status status = DW_OK;
    program *p = NULL;
    dw__body *body = dw__calloc(1, sizeof *body);
    if (!body) return dw__fail_memory("the body of an elementwise program", sizeof *body);
    DW_TRY(dw__elementwise_body(call, body));
    size_t bytes = sizeof *p + constants_in(body) * DW_LANE_SPLAT_BYTES;
    p = dw__calloc(1, bytes);
    if (!p) {
        status = dw__fail_memory("an elementwise program", bytes);
        goto cleanup;
    }
    p->body = *body;
    p->element_bytes = widest_element(body, call);
    for (int i = 0; i < body->code_count; i++) make_step(p, i);
    place_outputs(p, call);
    allocate_slots(p);
    *prepared = p;
cleanup:
    dw__free(body);
    return status;
}

/* ---- the iteration --------------------------------------------------------------------------- */

typedef struct iteration {
    const dw__call *call;
    const program *program;
    int rank; /* rank after merging; at least 1 */
    int64_t shape[DW_MAX_RANK];
    int64_t stride[DW_MAX_INPUTS][DW_MAX_RANK];
    int64_t output_stride[DW_MAX_OUTPUTS][DW_MAX_RANK]; /* of those with gaps */
    bool has_gaps[DW_MAX_OUTPUTS], some_have_gaps;
    int64_t total;
    bool crosses_rows; /* a chunk may span several rows */
    int64_t chunk;     /* elements per chunk */
    size_t spacing;    /* bytes between the starts of two buffers */
    int replaced;      /* input that is read from a tile, or -1 */
    _Atomic int failed;
} iteration;

/* True if axis `inner` continues axis `outer` in every input and output. */
static bool axes_merge(const iteration *it, int outer, int64_t inner_size,
                       int64_t strides[][DW_MAX_RANK], int inner) {
    for (uint32_t i = 0; i < it->call->input_count; i++)
        if (it->program->used[i] && (int)i != it->replaced &&
            it->stride[i][outer] != strides[i][inner] * inner_size)
            return false;
    for (uint32_t o = 0; o < it->call->output_count; o++)
        if (it->has_gaps[o] &&
            it->output_stride[o][outer] != it->call->outputs[o].stride[inner] * inner_size)
            return false;
    return true;
}

/* Drops axes of one element and merges neighbours. `keep_last` keeps the last axis separate. */
static void merge_axes(iteration *it, bool keep_last) {
    const dw__tensor *shape = &it->call->outputs[0];
    uint32_t inputs = it->call->input_count;
    int64_t strides[DW_MAX_INPUTS][DW_MAX_RANK];
    for (uint32_t i = 0; i < inputs; i++)
        if (it->program->used[i] && (int)i != it->replaced)
            dw__broadcast_strides(&it->call->inputs[i], shape, strides[i]);
        else
            memset(strides[i], 0, sizeof strides[i]);
    it->rank = 0;
    for (int axis = 0; axis < shape->rank; axis++) {
        int64_t size = shape->shape[axis];
        bool is_last = keep_last && axis == shape->rank - 1;
        if (size == 1 && !is_last) continue;
        int at = it->rank;
        if (at > 0 && !is_last && axes_merge(it, at - 1, size, strides, axis))
            it->shape[--at] *= size;
        else
            it->shape[at] = size;
        for (uint32_t i = 0; i < inputs; i++) it->stride[i][at] = strides[i][axis];
        for (uint32_t o = 0; o < it->call->output_count; o++)
            it->output_stride[o][at] = it->call->outputs[o].stride[axis];
        it->rank = at + 1;
    }
    if (it->rank == 0) {
        it->rank = 1;
        it->shape[0] = 1;
        for (uint32_t i = 0; i < inputs; i++) it->stride[i][0] = 0;
        for (uint32_t o = 0; o < it->call->output_count; o++) it->output_stride[o][0] = 0;
    }
}

static void begin(iteration *it, const dw__call *call, const program *p, int replaced,
                  bool keep_last) {
    it->call = call;
    it->program = p;
    it->replaced = replaced;
    it->total = dw__tensor_count(&call->outputs[0]);
    it->some_have_gaps = false;
    for (uint32_t o = 0; o < call->output_count; o++) {
        it->has_gaps[o] = !dw__tensor_is_contiguous(&call->outputs[o]);
        it->some_have_gaps |= it->has_gaps[o];
    }
    merge_axes(it, keep_last);
    it->crosses_rows =
        it->rank > 1 && it->shape[it->rank - 1] < SHORT_ROW && !keep_last && !it->some_have_gaps;
    /* Every input may need a buffer, in addition to the program's own buffers and one for storing BF16 and F16. */
    size_t count = (size_t)p->slot_count + call->input_count + 1;
    size_t most = (size_t)DW_LANE_CHUNK * p->element_bytes + BUFFER_SKEW;
    size_t share = BUFFER_BYTES / count / 64 * 64;
    it->spacing = share < most ? share : most;
    int64_t elements = (int64_t)(it->spacing / p->element_bytes) / 16 * 16;
    it->chunk = elements < DW_LANE_CHUNK ? elements : DW_LANE_CHUNK;
    atomic_init(&it->failed, 0);
}

/* ---- one chunk ------------------------------------------------------------------------------- */

typedef struct lane {
    const void *data;
    int64_t step;
} lane;

/* A worker's buffers, and the location of each value of the current chunk. */
typedef struct chunk_state {
    const iteration *it;
    int64_t position, count;    /* position in the flattened iteration shape */
    int64_t index[DW_MAX_RANK]; /* index of `position` */
    const float *tile;          /* elements of the replaced input */
    lane inputs[DW_MAX_INPUTS];
    void *results[DW_BODY_MAX_CODE];
    uint8_t splats[DW_MAX_INPUTS][DW_LANE_SPLAT_BYTES];
    alignas(64) uint8_t buffers[BUFFER_BYTES];
} chunk_state;

static void *buffer(chunk_state *s, size_t number) { return s->buffers + number * s->it->spacing; }

static int64_t input_offset(const iteration *it, uint32_t input, const int64_t *index) {
    int64_t offset = 0;
    for (int axis = 0; axis < it->rank; axis++) offset += index[axis] * it->stride[input][axis];
    return offset;
}

static void copy_strided(void *to, const void *from, int64_t count, int64_t stride, size_t size) {
    if (stride == 1) {
        memcpy(to, from, (size_t)count * size);
        return;
    }
#define STRIDED(type)                                                                              \
    {                                                                                              \
        const type *x = from;                                                                      \
        type *y = to;                                                                              \
        for (int64_t i = 0; i < count; i++) y[i] = x[i * stride];                                  \
    }                                                                                              \
    break
    switch (size) {
    case 1: STRIDED(uint8_t);
    case 2: STRIDED(uint16_t);
    case 4: STRIDED(uint32_t);
    default: STRIDED(uint64_t);
    }
#undef STRIDED
}

/* Gathers the chunk's elements of an input. */
static void gather(const chunk_state *s, uint32_t input, void *out) {
    const iteration *it = s->it;
    const dw__tensor *in = &it->call->inputs[input];
    size_t size = dw_dtype_bytes(in->dtype);
    int last = it->rank - 1;
    int64_t index[DW_MAX_RANK], left = s->count;
    memcpy(index, s->index, sizeof index);
    for (uint8_t *to = out; left > 0;) {
        int64_t run = it->shape[last] - index[last];
        if (run > left) run = left;
        const uint8_t *from =
            (const uint8_t *)in->data + input_offset(it, input, index) * (int64_t)size;
        copy_strided(to, from, run, it->stride[input][last], size);
        to += (size_t)run * size;
        left -= run;
        index[last] += run;
        for (int axis = last; axis > 0 && index[axis] == it->shape[axis]; axis--) {
            index[axis] = 0;
            index[axis - 1]++;
        }
    }
}

/* Returns 0 if all elements of the input in this chunk are one element, 1 if they are contiguous, and -1
 * otherwise. */
static int input_step(const chunk_state *s, uint32_t input) {
    const iteration *it = s->it;
    bool one_row = s->index[it->rank - 1] + s->count <= it->shape[it->rank - 1];
    int64_t expected = 1;
    bool linear = true, constant = true;
    for (int axis = it->rank - 1; axis >= 0; axis--) {
        if (one_row && axis < it->rank - 1) break;
        linear &= it->stride[input][axis] == expected;
        constant &= it->stride[input][axis] == 0;
        expected *= it->shape[axis];
    }
    return constant ? 0 : linear ? 1 : -1;
}

static void convert_half(const chunk_state *s, dw_dtype dtype, const void *from, float *to) {
    const dw__fused_loops *loops = dw__fused_loops_now();
    dw__lane_args args = {s->count, to, {from}, {1}};
    (dtype == DW_BF16 ? loops->load_bf16 : loops->load_f16)(&args);
}

/* Converts an element of any dtype to the program's kind and repeats it to a vector. */
static void splat_input(dw_dtype dtype, const void *element, uint8_t *out) {
    uint64_t value = 0;
    dw_dtype held = kind_dtype[kind_of(dtype)];
    dw__scalar_store(&value, held, 0, dw__scalar_load(element, dtype, 0));
    splat(out, &value, dw_dtype_bytes(held));
}

static void locate_input(chunk_state *s, uint32_t input) {
    const iteration *it = s->it;
    const dw__tensor *in = &it->call->inputs[input];
    if ((int)input == it->replaced) {
        s->inputs[input] = (lane){s->tile, 1};
        return;
    }
    const uint8_t *at = (const uint8_t *)in->data +
                        input_offset(it, input, s->index) * (int64_t)dw_dtype_bytes(in->dtype);
    int step = input_step(s, input);
    void *own = buffer(s, it->program->slot_count + input);
    if (step == 0) {
        splat_input(in->dtype, at, s->splats[input]);
        s->inputs[input] = (lane){s->splats[input], 0};
        return;
    }
    if (step == 1 && !is_half(in->dtype)) {
        s->inputs[input] = (lane){at, 1};
        return;
    }
    if (!is_half(in->dtype)) {
        gather(s, input, own);
    } else if (step == 1) {
        convert_half(s, in->dtype, at, own);
    } else {
        uint16_t raw[DW_LANE_CHUNK];
        gather(s, input, raw);
        convert_half(s, in->dtype, raw, own);
    }
    s->inputs[input] = (lane){own, 1};
}

static lane locate(const chunk_state *s, program_operand operand) {
    switch (operand.source) {
    case DW_BODY_INPUT: return s->inputs[operand.index];
    case DW_BODY_RESULT: return (lane){s->results[operand.index], 1};
    default: return (lane){s->it->program->constants[operand.index], 0};
    }
}

static uint8_t *output_at(const chunk_state *s, int output) {
    const iteration *it = s->it;
    const dw__tensor *out = &it->call->outputs[output];
    int64_t offset = s->position;
    if (it->has_gaps[output]) {
        offset = 0;
        for (int axis = 0; axis < it->rank; axis++)
            offset += s->index[axis] * it->output_stride[output][axis];
    }
    return (uint8_t *)out->data + offset * (int64_t)dw_dtype_bytes(out->dtype);
}

static void run_dropout(const chunk_state *s, const dw__body_code *code,
                        const dw__lane_args *args) {
    const dw__tensor *seed = &s->it->call->inputs[code->operands[1].index];
    const int64_t *words = seed->data;
    dw__lane_dropout dropout = {{words[0], words[seed->stride[0]]},
                                (int64_t)code->operands[3].constant,
                                (uint64_t)s->position,
                                code->operands[2].constant};
    if (code->dtype != DW_F64) {
        dw__fused_loops_now()->dropout(args, &dropout);
        return;
    }
    /* F64: the F32 loop decides which elements are kept; the scaling is in double. */
    float kept[DW_LANE_CHUNK];
    uint8_t ones[DW_LANE_SPLAT_BYTES];
    float one = 1.0f;
    splat(ones, &one, sizeof one);
    dw__lane_args decide = {args->count, kept, {ones}, {0}};
    dw__fused_loops_now()->dropout(&decide, &dropout);
    const double *x = args->in[0];
    double *out = args->out;
    assert(x); /* dropout has an operand */
    for (int64_t i = 0; i < args->count; i++)
        out[i] = kept[i] != 0.0f ? x[i * args->step[0]] / (1.0 - dropout.p) : 0.0;
}

/* Runs operations without a loop element by element: integer division and powers, functions in F64. */
static dw_status run_scalars(const dw__body_code *code, const dw__lane_args *args, int operands) {
    dw_dtype of_result = kind_dtype[kind_of(code->dtype)];
    for (int64_t i = 0; i < args->count; i++) {
        dw__scalar x[DW_LANE_OPERANDS] = {{.integer = 0}}, y;
        for (int j = 0; j < operands; j++)
            x[j] =
                dw__scalar_load(args->in[j], kind_dtype[operand_kind(code, j)], i * args->step[j]);
        DW_RETURN_IF_FAILED(dw__scalar_apply(code->op, code->tanh_approximation,
                                             kind_dtype[operand_kind(code, 0)], x, &y));
        dw__scalar_store(args->out, of_result, i, y);
    }
    return DW_OK;
}

static dw_status run_step(chunk_state *s, int at) {
    const program_step *step = &s->it->program->steps[at];
    const dw__body_code *code = &s->it->program->body.code[at];
    bool in_place = step->output >= 0 && s->it->call->outputs[step->output].data;
    s->results[at] = in_place ? (void *)output_at(s, step->output) : buffer(s, step->slot);
    dw__lane_args args = {.count = s->count, .out = s->results[at]};
    for (int i = 0; i < step->operand_count; i++) {
        lane from = locate(s, step->operands[i]);
        args.in[i] = from.data;
        args.step[i] = from.step;
    }
    if (step->loop)
        step->loop(&args);
    else if (step->is_dropout)
        run_dropout(s, code, &args);
    else
        DW_RETURN_IF_FAILED(run_scalars(code, &args, step->operand_count));
    if (step->rounding) {
        dw__lane_args rounded = {s->count, args.out, {args.out}, {1}};
        step->rounding(&rounded);
    }
    return DW_OK;
}

static void store_output(chunk_state *s, int output) {
    const program *p = s->it->program;
    const dw__tensor *out = &s->it->call->outputs[output];
    const dw__fused_loops *loops = dw__fused_loops_now();
    if (!out->data || p->in_place[output]) return;
    lane from = locate(s, p->outputs[output]);
    dw__lane_args args = {s->count, output_at(s, output), {from.data}, {from.step}};
    if (out->dtype == DW_BF16)
        loops->store_bf16(&args);
    else if (out->dtype == DW_F16)
        loops->store_f16(&args);
    else
        loops->copy[kind_of(out->dtype)](&args);
}

static dw_status run_chunk(chunk_state *s, int64_t position, int64_t count) {
    const iteration *it = s->it;
    s->position = position;
    s->count = count;
    int64_t rest = position;
    for (int axis = it->rank - 1; axis > 0; axis--) {
        s->index[axis] = rest % it->shape[axis];
        rest /= it->shape[axis];
    }
    s->index[0] = rest;
    for (uint32_t i = 0; i < it->call->input_count; i++)
        if (it->program->used[i]) locate_input(s, i);
    for (int i = 0; i < it->program->body.code_count; i++) DW_RETURN_IF_FAILED(run_step(s, i));
    for (int i = 0; i < it->program->body.output_count; i++) store_output(s, i);
    return DW_OK;
}

/* Runs elements [first, limit). If rows are long, every chunk ends at the end of its row or before. */
static dw_status run_range(const iteration *it, int64_t first, int64_t limit) {
    chunk_state s;
    s.it = it;
    int64_t row = it->shape[it->rank - 1];
    bool by_row = it->rank > 1 && !it->crosses_rows;
    /* Rows slightly longer than a chunk are divided evenly. */
    int64_t pieces = (row + it->chunk - 1) / it->chunk;
    int64_t piece = by_row ? ((row + pieces - 1) / pieces + 15) / 16 * 16 : it->chunk;
    for (int64_t at = first; at < limit;) {
        int64_t count = limit - at;
        if (count > piece) count = piece;
        if (by_row && count > row - at % row) count = row - at % row;
        DW_RETURN_IF_FAILED(run_chunk(&s, at, count));
        at += count;
    }
    return DW_OK;
}

static dw_status run_task(const iteration *it, int64_t index) {
    int64_t first = index * TASK_ELEMENTS, limit = first + TASK_ELEMENTS;
    return run_range(it, first, limit < it->total ? limit : it->total);
}

static void pool_task(void *context, int64_t index, int worker) {
    (void)worker;
    iteration *it = context;
    if (run_task(it, index) != DW_OK) atomic_store_explicit(&it->failed, 1, memory_order_relaxed);
}

static dw_status run_program(const dw__call *call, const program *p) {
    iteration it;
    begin(&it, call, p, -1, false);
    if (it.total == 0) return DW_OK;
    int64_t tasks = (it.total + TASK_ELEMENTS - 1) / TASK_ELEMENTS;
    if (tasks == 1) return run_task(&it, 0);
    dw__pool_run(tasks, pool_task, &it);
    if (!atomic_load_explicit(&it.failed, memory_order_relaxed)) return DW_OK;
    /* A failure's message belongs to the thread that fails, so the first failure is repeated on this thread. */
    for (int64_t i = 0; i < tasks; i++) DW_RETURN_IF_FAILED(run_task(&it, i));
    return dw__fail(DW_INTERNAL, "%s: a failure did not repeat", dw_op_name(call->op));
}

static dw_status run(const dw__call *call, void *scratch) {
    (void)scratch;
    if (call->prepared) return run_program(call, call->prepared);
    void *p = NULL;
    DW_RETURN_IF_FAILED(parse(call, &p));
    dw_status status = run_program(call, p);
    dw__free(p);
    return status;
}

static bool writes_rows(const dw__call *call) {
    for (uint32_t o = 0; o < call->output_count; o++) {
        const dw__tensor *y = &call->outputs[o];
        if (!dw__tensor_is_contiguous(y) && dw__tensor_run(y) == 1) return false;
    }
    return call->input_count > 0 && call->output_count > 0;
}

static dw_status supports(const dw__kernel *kernel, const void *given, const dw__gpu_target *gpu) {
    (void)gpu;
    return writes_rows(given) ? DW_OK : dw__kernel_refuse(kernel);
}

/* ---- tiles of a GEMM ------------------------------------------------------------------------- */

bool dw__fused_fits_tile(const dw__call *fused, int replaced) {
    const dw__tensor *out = &fused->outputs[0];
    if (fused->op != DW_OP_FUSED || !writes_rows(fused) || out->rank < 1) return false;
    if (replaced < 0) return true;
    const dw__tensor *in = &fused->inputs[replaced];
    if (in->dtype != DW_F32 || in->rank != out->rank) return false;
    for (int axis = 0; axis < out->rank; axis++)
        if (in->shape[axis] != out->shape[axis]) return false;
    return true;
}

dw_status dw__fused_run_tile(const dw__call *fused, int64_t row, int64_t rows, int64_t column,
                             int64_t columns, int replaced, const float *tile,
                             int64_t tile_stride) {
    if (!fused->prepared)
        return dw__fail(DW_STATE,
                        "fused: dw__fused_run_tile was called before parse(); parse the epilogue");
    iteration it;
    begin(&it, fused, fused->prepared, replaced, true);
    chunk_state s;
    s.it = &it;
    int64_t width = it.shape[it.rank - 1];
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c += it.chunk) {
            int64_t count = columns - c < it.chunk ? columns - c : it.chunk;
            s.tile = tile ? tile + r * tile_stride + c : NULL;
            DW_RETURN_IF_FAILED(run_chunk(&s, (row + r) * width + column + c, count));
        }
    }
    return DW_OK;
}

/* ---- the entry ------------------------------------------------------------------------------- */

static bool computes(dw_op op) { return op == DW_OP_FUSED || dw_op_is_elementwise(op); }

/* Tolerance: 2 ulp for a function, more if a composite cancels (gelu near its zero, slopes). */
static const dw__kernel elementwise = {.name = "cpu.elementwise",
                                       .computes = computes,
                                       .source = "ours, vector loops over L1 chunks",
                                       .needs = "operands, and results with contiguous rows",
                                       .supports = supports,
                                       .parse = parse,
                                       .run = run,
                                       .results = DW__RESULTS_IN_ROWS,
                                       .tolerance_factor = 8.0};

const dw__kernel *const dw__kernels_cpu_elementwise[] = {&elementwise, NULL};
