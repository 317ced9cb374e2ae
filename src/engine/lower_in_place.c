/* Lowering: a pointwise step writes its result over an operand that nothing reads later. (Other steps learn which
 * operands those are, and may use their memory: dw__lower_find_disposable.)
 *
 * The operand must be a whole buffer of the arena with the result's layout and element size, and the step must read
 * each of its elements before it stores the result there. If the result belongs in a gradient of the caller, the
 * operand is computed there instead.
 */
#include "engine/lowering.h"
#include "engine/views.h"

uint32_t dw__lower_reads_in(const dw__step *step, uint32_t storage) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < step->input_count; i++) count += step->inputs[i].storage == storage;
    return count;
}

/* True if the storage is the arena's, is filled, and nothing reads it after the step, nor in a later run. */
static bool is_read_last(const dw__lowering *l, const dw__step *step, uint32_t index) {
    const dw__storage *storage = storage_of(l, index);
    return storage->home == DW_HOME_ARENA &&
           !(storage->fixed && step->node >= l->engine->kept_nodes) &&
           storage->deferred == DW_NONE && storage->reads_left == dw__lower_reads_in(step, index);
}

void dw__lower_find_disposable(const dw__lowering *l, dw__step *step) {
    step->disposable = 0;
    for (uint32_t i = 0; i < step->input_count; i++) {
        const uint32_t storage = step->inputs[i].storage;
        if (storage != DW_NONE && dw__lower_reads_in(step, storage) == 1 &&
            is_read_last(l, step, storage))
            step->disposable |= (uint64_t)1 << i;
    }
}

/* A CPU's kernel may store result `o` as soon as the body has computed it. Returns true if nothing in the body reads
 * input `i` after that. On a GPU each thread loads all of its elements before it stores any. */
static bool read_before_written(const dw__lowering *l, const dw__step *step, uint32_t i,
                                uint32_t o) {
    const dw_attr *text = dw__find_attr(step->attr_count, step->attrs, DW_ATTR_KEY_BODY);
    if (!text || l->plan->target.context) return true;
    dw_dtype dtypes[DW_MAX_INPUTS];
    for (uint32_t j = 0; j < step->input_count; j++) dtypes[j] = step->inputs[j].view.dtype;
    if (dw__body_parse(text->string, step->input_count, dtypes, l->body) != DW_OK) return false;
    return dw__body_may_overwrite(l->body, i, o);
}

static bool may_overwrite(const dw__lowering *l, const dw__step *step, const dw__step *first,
                          uint32_t i, uint32_t o) {
    const dw__operand *input = &step->inputs[i], *output = &step->outputs[o];
    if (!dw__lower_is_whole(l, input) || !dw__view_same(&input->view, &output->view)) return false;
    if (dw_dtype_bits(input->view.dtype) != dw_dtype_bits(output->view.dtype)) return false;
    if (!is_read_last(l, step, input->storage)) return false;
    for (uint32_t j = 0; j < step->input_count; j++) {
        if (step->inputs[j].storage != input->storage) continue;
        if (!dw__view_same(&step->inputs[j].view, &input->view)) return false;
        if (!read_before_written(l, step, j, o)) return false;
    }
    for (uint32_t j = 0; j < step->output_count; j++) {
        if (step->outputs[j].storage == input->storage) return false; /* taken */
    }
    return !first || dw__lower_reads_in(first, input->storage) == 0;
}

bool dw__lower_take_over(dw__lowering *l, dw__step *step, const dw__step *first, uint32_t i,
                         uint32_t o) {
    if (step->inputs[i].view.rank < 0 || !may_overwrite(l, step, first, i, o)) return false;
    uint32_t slot = l->engine->direct[record_of(l, step->node)->outputs[o]];
    if (slot != DW_NONE && !l->claimed[slot]) {
        /* The caller may leave the gradient out. The instruction that computes the input is then not
         * run, so that nothing else may need its result. */
        dw__storage *storage = storage_of(l, step->inputs[i].storage);
        if (slot < l->engine->output_count || storage->reads != 1 || storage->saved ||
            step->output_count != 1) {
            return false;
        }
        storage->home = DW_HOME_GRAD;
        storage->index = output_position(l, slot);
        l->claimed[slot] = true;
    }
    step->outputs[o].storage = step->inputs[i].storage;
    step->outputs[o].offset = 0;
    return true;
}

/* ---- slices of a concatenation ------------------------------------------------------------------ */

/* True if no value lies in the storage yet and the step's results fill it. */
static bool is_filled_by(const dw__lowering *l, const dw__step *step, uint32_t storage) {
    size_t bytes = 0;
    for (uint32_t o = 0; o < step->output_count; o++)
        if (step->outputs[o].storage == storage) bytes += dw__tensor_bytes(&step->outputs[o].view);
    return storage_of(l, storage)->reads == 0 && storage_of(l, storage)->bytes == bytes;
}

/* True if all that the step reads in the storage of input `i` lies where one of its results lies in `concat`, and is
 * read before that result is stored. */
static bool may_overwrite_slices(const dw__lowering *l, const dw__step *step, const dw__step *first,
                                 uint32_t i, uint32_t concat) {
    const uint32_t storage = step->inputs[i].storage;
    if (storage == DW_NONE || storage_of(l, storage)->bytes != storage_of(l, concat)->bytes ||
        !is_read_last(l, step, storage) || (first && dw__lower_reads_in(first, storage) > 0))
        return false;
    for (uint32_t j = 0; j < step->input_count; j++) {
        const dw__operand *input = &step->inputs[j];
        uint32_t o = 0;
        if (input->storage != storage) continue;
        while (o < step->output_count &&
               !(step->outputs[o].storage == concat && step->outputs[o].offset == input->offset &&
                 step->outputs[o].view.dtype == input->view.dtype &&
                 dw__view_same(&step->outputs[o].view, &input->view)))
            o++;
        if (o == step->output_count || !read_before_written(l, step, j, o)) return false;
    }
    return true;
}

static void replace_storage(dw__lowering *l, dw__step *step, uint32_t from, uint32_t to) {
    for (uint32_t o = 0; o < step->output_count; o++) {
        if (step->outputs[o].storage != from) continue;
        step->outputs[o].storage = to;
        l->requests[record_of(l, step->node)->outputs[o]].storage = to;
    }
    for (size_t node = 0; node < l->graph->nodes.count; node++)
        if (l->concats[node].storage == from) l->concats[node].storage = to;
}

void dw__lower_take_over_concat(dw__lowering *l, dw__step *step, const dw__step *first) {
    if (!dw__op_is_pointwise(step->op)) return;
    for (uint32_t o = 0; o < step->output_count; o++) {
        const uint32_t concat = step->outputs[o].storage;
        uint32_t i = 0;
        if (concat == DW_NONE || !is_filled_by(l, step, concat)) continue;
        while (i < step->input_count && !may_overwrite_slices(l, step, first, i, concat)) i++;
        if (i < step->input_count) replace_storage(l, step, concat, step->inputs[i].storage);
    }
}

void dw__lower_reuse_inputs(dw__lowering *l, dw__step *step, const dw__step *first) {
    const dw__node_record *record = record_of(l, step->node);
    if (!dw__op_is_pointwise(record->op)) return;
    for (uint32_t o = 0; o < record->output_count; o++) { /* a step may have more than its node */
        dw_value value = record->outputs[o];
        if (use_count(l, value) + l->engine->output_uses[value] == 0) continue;
        if (step->outputs[o].storage != DW_NONE) continue; /* placed already */
        uint32_t i = 0;
        while (i < step->input_count && !dw__lower_take_over(l, step, first, i, o)) i++;
    }
}
