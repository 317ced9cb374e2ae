/* The form of an elementwise program: which vectors of elements its threads load and store, and its parameters.
 *
 * The widest type read or written with stride 1 fills 16 bytes, so that each access of a warp is contiguous. Types that
 * are narrower take 8 or 4 bytes at a time.
 */
#include "kernel/cuda/elementwise.h"
#include <string.h>

static bool draws(dw_op op) { return op == DW_OP_DROPOUT || op == DW_OP_RANDOM_UNIFORM; }

/* Sets is_read and is_seed. */
static void mark(const dw__body *body, dw__elementwise_form *form) {
    for (int i = 0; i < body->code_count; i++) {
        const dw__body_code *code = &body->code[i];
        for (int j = 0; j < code->operand_count; j++) {
            const dw__body_operand *operand = &code->operands[j];
            if (operand->source != DW_BODY_INPUT) continue;
            dw__elementwise_place *place = &form->in[operand->index];
            if (draws(code->op) && j == (code->op == DW_OP_DROPOUT ? 1 : 0))
                place->is_seed = true;
            else
                place->is_read = true;
        }
    }
    for (int i = 0; i < body->output_count; i++)
        if (body->outputs[i].source == DW_BODY_INPUT)
            form->in[body->outputs[i].index].is_read = true;
    for (uint32_t o = 0; o < form->output_count; o++) form->out[o].is_read = true;
}

void dw__elementwise_iterate(const dw__call *c, const dw__elementwise_form *form,
                             dw__iteration *it) {
    const dw__tensor *shape = &c->outputs[0];
    dw__iteration_begin(it, shape->rank, shape->shape);
    for (uint32_t i = 0; i < c->input_count; i++) {
        int64_t stride[DW_MAX_RANK];
        if (!form->in[i].is_read) continue;
        dw__broadcast_strides(&c->inputs[i], shape, stride);
        dw__iteration_add(it, stride);
    }
    for (uint32_t o = 0; o < form->output_count; o++) dw__iteration_add(it, c->outputs[o].stride);
    dw__iteration_merge(it);
}

/* ---- tensors of the iteration ----------------------------------------------------------------------- */

typedef struct visited {
    const dw__tensor *tensor;
    dw__elementwise_place *place;
    const int64_t *stride;
} visited;

/* Sets the next tensor of the iteration, inputs that are read and then outputs; false after the last. `index` begins
 * at 0, and `it->stride` advances with `row`. */
static bool next(const dw__call *c, dw__elementwise_form *form, const dw__iteration *it,
                 uint32_t *index, uint32_t *row, visited *v) {
    while (*index < c->input_count && !form->in[*index].is_read) ++*index;
    if (*index >= c->input_count + form->output_count) return false;
    const uint32_t o = *index - c->input_count;
    const bool is_input = *index < c->input_count;
    *v = (visited){.tensor = is_input ? &c->inputs[*index] : &c->outputs[o],
                   .place = is_input ? &form->in[*index] : &form->out[o],
                   .stride = it->stride[(*row)++]};
    ++*index;
    return true;
}
#define EACH_TENSOR(v) for (uint32_t index = 0, row = 0; next(c, form, it, &index, &row, &(v));)

/* ---- vectors ---------------------------------------------------------------------------------------- */

/* True if every access of `vector` elements is aligned to its bytes and the last axis has whole vectors. */
static bool vectors_fit(const dw__call *c, dw__elementwise_form *form, const dw__iteration *it,
                        int vector) {
    const int last = it->rank - 1;
    visited v;
    if (it->shape[last] % vector != 0) return false;
    EACH_TENSOR(v) {
        if (v.stride[last] == 0) continue;
        if (v.stride[last] != 1) return false;
        const size_t bytes = (size_t)vector * dw_dtype_bytes(v.tensor->dtype);
        if (bytes > 16 || (uintptr_t)v.tensor->data % bytes != 0) return false;
        for (int axis = 0; axis < last; axis++)
            if (v.stride[axis] % vector != 0) return false;
    }
    return true;
}

static bool is_whole(const dw__iteration *it, const int64_t *stride) {
    int64_t whole = 1;
    for (int axis = it->rank - 1; axis >= 0; whole *= it->shape[axis--])
        if (stride[axis] != whole) return false;
    return true;
}

static void place_tensors(const dw__call *c, dw__elementwise_form *form, const dw__iteration *it) {
    const int last = it->rank - 1;
    int64_t reach = it->count;
    visited v;
    form->divides = false;
    EACH_TENSOR(v) {
        int64_t own = 0;
        v.place->is_vector = v.stride[last] == 1;
        v.place->is_whole = is_whole(it, v.stride);
        v.place->strides = 0;
        for (int axis = 0; axis < it->rank; axis++) {
            const int64_t stride = v.stride[axis];
            own += (it->shape[axis] - 1) * (stride < 0 ? -stride : stride);
            if (stride != 0 && !v.place->is_whole && !(axis == last && stride == 1))
                v.place->strides |= (uint8_t)(1u << axis);
        }
        if (own > reach) reach = own;
        if (!v.place->is_whole && (v.place->strides || v.place->is_vector)) form->divides = true;
    }
    /* A block may begin below the count and end above it. */
    form->is_wide = reach > INT32_MAX - 65536;
}

/* More than one vector of a thread, where the tensors are large, a vector loads few bytes and the program is short. The
 * loads of all its vectors are in flight at once. */
static int turns_of(const dw__call *c, const dw__body *body, dw__elementwise_form *form,
                    const dw__iteration *it) {
    const int64_t large = 1 << 20;
    const int most_steps = 192, most_loads = 16; /* of a thread */
    int loaded = 0, loads = 0, turns = 4;
    if (it->count < large) return 1;
    for (uint32_t i = 0; i < c->input_count; i++) {
        if (!form->in[i].is_read) continue;
        loaded +=
            (form->in[i].is_vector ? form->vector : 1) * (int)dw_dtype_bytes(c->inputs[i].dtype);
        loads++;
    }
    while (turns > 1 && (turns * loaded > 32 || turns * loads > most_loads ||
                         turns * form->vector * body->code_count > most_steps))
        turns /= 2;
    return turns;
}

void dw__elementwise_form_of(const dw__call *c, const dw__body *body, dw__elementwise_form *form,
                             dw__iteration *it) {
    memset(form, 0, sizeof *form);
    form->input_count = c->input_count;
    form->output_count = dw__call_own_outputs(c);
    form->magnitudes = c->magnitudes;
    for (uint32_t i = 0; i < c->input_count; i++) form->inputs[i] = c->inputs[i].dtype;
    for (uint32_t o = 0; o < form->output_count; o++) form->outputs[o] = c->outputs[o].dtype;
    mark(body, form);
    dw__elementwise_iterate(c, form, it);
    form->rank = it->rank;
    for (form->vector = 16; form->vector > 1; form->vector /= 2)
        if (vectors_fit(c, form, it, form->vector)) break;
    place_tensors(c, form, it);
    form->turns = turns_of(c, body, form, it);
}

/* ---- parameters ------------------------------------------------------------------------------------- */

static int bits_in(uint8_t set) {
    int count = 0;
    for (; set; set &= (uint8_t)(set - 1)) count++;
    return count;
}

static size_t words_of(const dw__elementwise_place *place) {
    if (place->is_read) return 1 + (size_t)bits_in(place->strides);
    return place->is_seed ? 2 : 0;
}

size_t dw__elementwise_words(const dw__elementwise_form *form) {
    size_t words = 3 + (form->divides ? 2 * (size_t)(form->rank - 1) : 0);
    for (uint32_t i = 0; i < form->input_count; i++) words += words_of(&form->in[i]);
    for (uint32_t o = 0; o < form->output_count; o++)
        words += words_of(&form->out[o]) + (form->magnitudes >> o & 1);
    return words;
}

int64_t dw__elementwise_inverse(int64_t size) {
    int shift = 0;
    while ((INT64_C(1) << shift) < size) shift++;
    const uint64_t excess = (UINT64_C(1) << shift) - (uint64_t)size;
    const uint64_t multiplier = (excess << 32) / (uint64_t)size + 1;
    return (int64_t)((uint64_t)shift << 32 | (multiplier & 0xFFFFFFFFu));
}

static int64_t *put(int64_t *word, const void *data, const int64_t *stride, uint8_t strides) {
    *word++ = (int64_t)(uintptr_t)data;
    for (int axis = 0; axis < DW_MAX_RANK; axis++)
        if (strides >> axis & 1) *word++ = stride[axis];
    return word;
}

void dw__elementwise_fill(const dw__elementwise_form *form, const dw__iteration *it,
                          const dw__operation_call *call, int64_t *word) {
    const dw__call *c = &call->call;
    uint32_t row = 0;
    *word++ = it->count / form->vector;
    *word++ = (int64_t)(uintptr_t)call->error.word;
    *word++ = call->error.mark;
    for (int axis = 1; form->divides && axis < it->rank; axis++) {
        const int64_t size = it->shape[axis] / (axis == it->rank - 1 ? form->vector : 1);
        *word++ = size;
        *word++ = form->is_wide ? 0 : dw__elementwise_inverse(size);
    }
    for (uint32_t i = 0; i < c->input_count; i++) {
        const dw__tensor *in = &c->inputs[i];
        if (form->in[i].is_read) {
            word = put(word, in->data, it->stride[row++], form->in[i].strides);
        } else if (form->in[i].is_seed) {
            *word++ = (int64_t)(uintptr_t)in->data;
            *word++ = in->rank > 0 ? in->stride[0] : 0;
        }
    }
    for (uint32_t o = 0; o < form->output_count; o++)
        word = put(word, c->outputs[o].data, it->stride[row++], form->out[o].strides);
    for (uint32_t o = form->output_count; o < c->output_count; o++)
        *word++ = (int64_t)(uintptr_t)c->outputs[o].data;
}
