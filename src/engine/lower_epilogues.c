/* Lowering: a step that waits for the elementwise program, the rotary position embedding (rope) or the attention that reads
 * its result.
 *
 * A node is deferred if some kernel can compute it together with a program behind it, or add another tensor to its
 * first result, and if a program or rope soon reads that result. When that program is lowered:
 *
 *     accumulation    a program that is the sum of two inputs becomes the deferred step alone, which adds its
 *                     first result to the other input: where that lies, if nothing reads it later (gradients of
 *                     residuals and of tied embeddings), or else out of place (residuals)
 *     pair            on a GPU, a program that reads the results of two deferred linear layers of the same input, such as
 *                     gate and up, becomes one instruction with both
 *     epilogue        both become one instruction; the deferred result is stored only if something else reads it. On
 *                     a GPU the program may read the halves of the result's columns instead (gated activations), and
 *                     the sums of its results' rows (gradients of biases) are part of the instruction
 *                     (lower_result_sums.c)
 *     otherwise       the deferred step runs just before the program
 *
 * They are tried in this order. A node with several results is lowered before anything reads one of the others. Rope is
 * an epilogue on GPUs alone, of a product whose elements it reads once each, also through permutes. Attention is one of
 * the rope of its queries.
 */
#include "engine/lowering.h"
#include "engine/views.h"
#include <string.h>

/* Sets of views. */
enum {
    RESHAPES = 1 << DW__VIEW_RESHAPE,
    SLICES = 1 << DW__VIEW_SLICE,
    PERMUTES = 1 << DW__VIEW_PERMUTE
};

/* Returns the first node that reads the value's elements; looks through the views of a set. */
static dw_node first_reader(const dw__lowering *l, dw_value value, int views, int depth) {
    dw_node first = DW_NONE;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        dw_node reader = l->engine->use_nodes[u];
        const dw__view_kind view = row_of(l, reader)->view;
        if ((1 << view & views) && depth < DW__LOWER_MOST_VIEWS) {
            reader = first_reader(l, record_of(l, reader)->outputs[0], views, depth + 1);
        }
        if (reader < first) first = reader;
    }
    return first;
}

/* A waiting node keeps its operands alive, which is worth it only if the reader is close. Between a projection and its
 * rope are those of keys and values, which read the same operands, and perhaps casts of their weights; between the rope of
 * queries and attention is that of keys. */
static bool is_near(const dw__lowering *l, dw_node node, dw_node reader) {
    enum { NEAR = 3, NEAR_ROPE = 8 };
    const uint32_t most = row_of(l, reader)->rotates || row_of(l, node)->rotates ? NEAR_ROPE : NEAR;
    uint32_t between = 0;
    for (dw_node n = node + 1; n < reader && between <= most; n++) {
        between += !dw__op_is_view(record_of(l, n)->op);
    }
    return between <= most;
}

/* True if the node's result may be added to another tensor. */
static bool may_accumulate(const dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    return dw__lower_accumulates(l, record->op) &&
           dw__dtype_is_float(value_of(l, record->outputs[0])->dtype);
}

/* True if the node may have an epilogue: on a CPU if its result is F32, on a GPU if it has 16 bits. */
static bool may_have_epilogue(const dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    const dw_dtype dtype = value_of(l, record->outputs[0])->dtype;
    return dw__lower_has_epilogues(l, record->op) &&
           (l->plan->target.context ? dw__dtype_is_half(dtype) : dtype == DW_F32);
}

/* True if the view, `offset` elements behind the tensor's first, is one of the halves of its columns. */
static bool is_half(const dw__tensor *whole, const dw__tensor *view, int64_t offset) {
    const int last = whole->rank - 1;
    if (last < 0 || view->rank < 1 || whole->shape[last] % 2 != 0) return false;
    const int64_t columns = whole->shape[last] / 2;
    int64_t stride;
    return view->shape[view->rank - 1] == columns && (offset == 0 || offset == columns) &&
           2 * dw__tensor_count(view) == dw__tensor_count(whole) &&
           dw__tensor_row_stride(view, &stride) &&
           (stride == 2 * columns || dw__tensor_count(view) == columns);
}

/* True if an epilogue may read the halves of the node's result, as those of a GPU do, and nothing reads anything else of
 * it. Rows that lower_layouts.c might place at multiples of 16 bytes are left to it. */
static bool may_be_halved(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    const dw_value value = record->outputs[0];
    dw__tensor whole, type, view;
    if (!may_have_epilogue(l, node) || !l->plan->target.context ||
        dw__lower_type(l, value, &whole) != DW_OK || whole.shape[whole.rank - 1] % 8 != 0)
        return false;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        const dw_node reader = l->engine->use_nodes[u];
        const dw_attr *attrs = NULL;
        int64_t offset;
        if (row_of(l, reader)->view != DW__VIEW_SLICE ||
            dw__lower_type(l, record_of(l, reader)->outputs[0], &type) != DW_OK ||
            dw__lower_attrs(l, reader, &attrs) != DW_OK ||
            !dw__view_apply(DW__VIEW_SLICE, &whole, &type, record_of(l, reader)->attr_count, attrs,
                            &view, &offset) ||
            !is_half(&whole, &view, offset))
            return false;
    }
    return true;
}

/* True if rope may be the node's epilogue. Both together take as long as one after the other, or longer where the product
 * is small (bench/NOTES.md), so that the user must want it. */
static bool may_be_rotated(const dw__lowering *l, dw_node node) {
    return may_have_epilogue(l, node) && l->plan->target.context &&
           dw__epilogues_wanted() == DW__EPILOGUES_ALL;
}

/* True if attention soon reads the result of a rope as its queries, and a kernel may compute both. */
static bool may_wait_for_attention(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    dw__tensor q;
    if (!l->plan->target.context || dw__lower_type(l, record->outputs[0], &q) != DW_OK ||
        !dw__may_rotate_queries(&q, &l->plan->target.gpu))
        return false;
    const dw_node reader = first_reader(l, record->outputs[0], 0, 0);
    return reader != DW_NONE && row_of(l, reader)->rotated &&
           record_of(l, reader)->inputs[0] == record->outputs[0] &&
           record_of(l, reader)->backward == record->backward && is_near(l, node, reader);
}

bool dw__lower_may_wait(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    if (!may_accumulate(l, node) && !may_have_epilogue(l, node)) return false;
    const int views = RESHAPES | (may_be_halved(l, node) ? SLICES : 0);
    dw_node reader = first_reader(l, record->outputs[0], views, 0);
    if (reader == DW_NONE) return false;
    if (!row_of(l, reader)->program) {
        reader = first_reader(l, record->outputs[0], RESHAPES | PERMUTES, 0);
        if (reader == DW_NONE || !row_of(l, reader)->rotates || !may_be_rotated(l, node))
            return false;
    }
    return record_of(l, reader)->backward == record->backward && is_near(l, node, reader);
}

bool dw__lower_waits(const dw__lowering *l, const dw__operand *operand) {
    return operand->storage != DW_NONE && storage_of(l, operand->storage)->deferred != DW_NONE;
}

dw_status dw__lower_defer(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t o = 0; o < record->output_count; o++) {
        const dw_value value = record->outputs[o];
        dw__operand place = {.storage = DW_NONE};
        dw__tensor type;
        DW_RETURN_IF_FAILED(dw__lower_type(l, value, &type));
        place.view = type;
        if (use_count(l, value) + l->engine->output_uses[value] > 0) {
            DW_RETURN_IF_FAILED(dw__lower_place_value(l, value, &type, &place));
            storage_of(l, place.storage)->deferred = node;
        }
        dw__lower_define(l, value, &place);
    }
    return DW_OK;
}

/* The step of a deferred node, with its results where dw__lower_defer has placed them. */
static dw_status make_deferred(dw__lowering *l, dw_node node, dw__step *step) {
    const dw__node_record *record = record_of(l, node);
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, node, step));
    for (uint32_t o = 0; o < record->output_count; o++)
        step->outputs[o] = l->values[record->outputs[o]];
    return DW_OK;
}

/* The node's results are no longer waited for. */
static void undefer(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t o = 0; o < record->output_count; o++) {
        const uint32_t storage = l->values[record->outputs[o]].storage;
        if (storage != DW_NONE) storage_of(l, storage)->deferred = DW_NONE;
    }
}

static void read_operands(dw__lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t i = 0; i < record->input_count; i++) dw__lower_read_once(l, record->inputs[i]);
}

dw_status dw__lower_deferred(dw__lowering *l, uint32_t storage) {
    dw_node node = storage_of(l, storage)->deferred;
    dw__step step;
    undefer(l, node);
    DW_RETURN_IF_FAILED(make_deferred(l, node, &step));
    DW_RETURN_IF_FAILED(dw__lower_choose_kernel(l, &step));
    DW_RETURN_IF_FAILED(dw__lower_add_step(l, &step));
    read_operands(l, node);
    return DW_OK;
}

dw_status dw__lower_deferred_inputs(dw__lowering *l, dw_node node, uint32_t except) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (record->inputs[i] == DW_NONE) continue;
        const dw__operand *operand = &l->values[record->inputs[i]];
        if (dw__lower_waits(l, operand) && operand->storage != except) {
            DW_RETURN_IF_FAILED(dw__lower_deferred(l, operand->storage));
        }
    }
    return DW_OK;
}

/* True if the program reads the result of the deferred node `node`, its input `i`, element by element as it writes its
 * own results: the whole result, or each half once. Says which inputs these are. */
static bool reads_as_it_writes(const dw__lowering *l, dw__step *program, uint32_t i, dw_node node) {
    const dw__operand *input = &program->inputs[i],
                      *result = &l->values[record_of(l, node)->outputs[0]];
    const int64_t count = dw__tensor_count(&program->outputs[0].view);
    const uint32_t reads = dw__lower_reads_in(program, input->storage);
    if (count <= 0 || dw__tensor_count(&input->view) != count) return false;
    program->replaced = (int)i;
    if (dw__op_table[program->op].rotates ||
        dw__op_table[program->op].rotated) /* its kernel looks at the order of the elements */
        return reads == 1 && input->offset == 0 && dw__lower_is_whole(l, result) &&
               dw__tensor_count(&result->view) == count;
    if (reads == 1) return dw__lower_is_whole(l, input);
    uint32_t other = i + 1;
    while (other < program->input_count && program->inputs[other].storage != input->storage)
        other++;
    if (reads != 2 || other == program->input_count || !dw__lower_is_whole(l, result) ||
        input->offset == program->inputs[other].offset ||
        !is_half(&result->view, &input->view, input->offset) ||
        !is_half(&result->view, &program->inputs[other].view, program->inputs[other].offset))
        return false;
    program->replaced = (int)(input->offset == 0 ? i : other);
    program->replaced_half = (int)(input->offset == 0 ? other : i);
    return true;
}

/* True if the program draws random numbers: it has the key, a tensor of integers. */
static bool draws(const dw__step *program) {
    for (uint32_t i = 0; i < program->input_count; i++)
        if (program->inputs[i].view.dtype == DW_I64) return true;
    return false;
}

/* Whether the kernel that computes both is worth its use. A CPU's always is. A GPU's is if the product alone would have
 * a kernel of the same provider: the program's pass over memory is then saved, and the product itself costs about the
 * same. Beside a library's product, which may be the faster one, half of the pass was saved or more (bench/NOTES.md)
 * where tiles of 128 x 256 occupy all SMs; for smaller results libraries have smaller tiles. Random numbers take longer in
 * the program's warpgroup than the pass over memory by itself. */
static bool is_worth_fusing(dw__lowering *l, const dw__step *both, const dw__step *program) {
    enum { TILE = 128 * 256 };
    dw__step alone = *both;
    if (alone.paired) {
        alone.paired = false;
        alone.input_count = record_of(l, alone.node)->input_count;
        alone.output_count = record_of(l, alone.node)->output_count;
    }
    if (!l->plan->target.context || dw__epilogues_wanted() == DW__EPILOGUES_ALL) return true;
    if (draws(program)) return false;
    if (dw__tensor_count(&program->outputs[0].view) >= (int64_t)TILE * l->plan->target.gpu.sm_count)
        return true;
    dw__lower_select(l, &alone, NULL);
    return alone.kernel && strcmp(alone.kernel->backend, both->kernel->backend) == 0;
}

/* Sets `can` if a kernel computes the step and the program behind it, and should. It is then prepared. */
static dw_status find_fused(dw__lowering *l, dw__step *step, dw__step *program, bool *can) {
    *can = false;
    dw__lower_select(l, program, NULL);
    if (!dw__step_is_fast(program) || dw__lower_may_find_magnitudes(l, program)) return DW_OK;
    DW_RETURN_IF_FAILED(dw__lower_want_sums(l, program));
    dw__lower_select(l, step, program);
    if (!step->kernel && program->summed) {
        dw__lower_forget_sums(program);
        dw__lower_select(l, step, program);
    }
    if (!step->kernel || !is_worth_fusing(l, step, program)) return DW_OK;
    const dw_status status = dw__lower_prepare_both(l, step, program);
    *can = status == DW_OK;
    return status == DW_UNSUPPORTED ? DW_OK : status;
}

/* The deferred node of the program's input `i`. */
static dw_node deferred_node(const dw__lowering *l, const dw__step *program, uint32_t i) {
    return storage_of(l, program->inputs[i].storage)->deferred;
}

/* Makes the step of the deferred node of the program's input `i`. Its result is stored if the program is not all that
 * reads it. */
static dw_status make_product(dw__lowering *l, const dw__step *program, uint32_t i,
                              dw__step *step) {
    const uint32_t storage = program->inputs[i].storage;
    const dw__storage *place = storage_of(l, storage);
    const dw_node node = place->deferred;
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, node, step));
    if (place->reads_left > dw__lower_reads_in(program, storage) || place->home != DW_HOME_ARENA)
        step->outputs[0] = l->values[record_of(l, node)->outputs[0]];
    return DW_OK;
}

static bool stores(const dw__step *step, uint32_t storage) {
    uint32_t o = 0;
    while (o < step->output_count && step->outputs[o].storage != storage) o++;
    return o < step->output_count;
}

/* Tries to make one instruction of the program and the step of `count` deferred nodes whose results it reads. */
static dw_status fuse(dw__lowering *l, dw__step *program, dw__step *step, const dw_node *nodes,
                      int count, bool *done) {
    DW_RETURN_IF_FAILED(dw__lower_lay_out_results(l, program, step));
    DW_RETURN_IF_FAILED(find_fused(l, step, program, done));
    if (!*done) return DW_OK;
    for (int n = 0; n < count; n++) undefer(l, nodes[n]);
    dw__lower_reuse_inputs(l, program, step);
    DW_RETURN_IF_FAILED(dw__lower_place_outputs(l, program));
    DW_RETURN_IF_FAILED(dw__lower_place_sums(l, program));
    for (uint32_t j = 0; j < program->input_count; j++)
        if (dw__step_replaces(program, j) && !stores(step, program->inputs[j].storage))
            program->inputs[j].storage = DW_NONE; /* no memory */
    DW_RETURN_IF_FAILED(dw__lower_add_instruction(l, step, program));
    for (int n = 0; n < count; n++) read_operands(l, nodes[n]);
    return DW_OK;
}

/* Tries to make one instruction of the program and the deferred node that computes its input `i`. */
static dw_status fuse_epilogue(dw__lowering *l, dw__step *program, uint32_t i, bool *done) {
    const dw_node node = deferred_node(l, program, i);
    dw__step step;
    *done = false;
    if (!reads_as_it_writes(l, program, i, node)) return DW_OK;
    DW_RETURN_IF_FAILED(make_product(l, program, i, &step));
    return fuse(l, program, &step, &node, 1, done);
}

/* ---- pairs ----------------------------------------------------------------------------------- */

static bool transposes(const dw__step *linear) {
    const dw_attr *attr = dw__find_attr(linear->attr_count, linear->attrs, DW_ATTR_KEY_TRANSPOSE_W);
    return !attr || attr->integer == 1;
}

static bool same_type(const dw__tensor *a, const dw__tensor *b) {
    if (a->rank != b->rank) return false;
    return a->rank < 0 || (a->dtype == b->dtype && dw__view_same(a, b));
}

/* True if the two linear layers read the same x, and are alike in all but their parameters' addresses. */
static bool are_alike(const dw__lowering *l, const dw__step *a, const dw__step *b) {
    enum { X, W, BIAS, INPUTS };
    return a->input_count == INPUTS && b->input_count == INPUTS &&
           record_of(l, a->node)->inputs[X] == record_of(l, b->node)->inputs[X] &&
           same_type(&a->inputs[W].view, &b->inputs[W].view) &&
           same_type(&a->inputs[BIAS].view, &b->inputs[BIAS].view) &&
           transposes(a) == transposes(b);
}

/* True if both inputs of the program are whole results of two linear layers that wait. */
static bool may_be_paired(const dw__lowering *l, const dw__step *program) {
    const int64_t count = dw__tensor_count(&program->outputs[0].view);
    if (!l->plan->target.context || program->input_count != 2 || count == 0) return false;
    for (uint32_t i = 0; i < 2; i++) {
        const dw__operand *input = &program->inputs[i];
        if (!dw__lower_waits(l, input)) return false;
        const dw_node node = deferred_node(l, program, i);
        if (!row_of(l, node)->paired || !may_have_epilogue(l, node) ||
            !dw__lower_is_whole(l, input) || dw__tensor_count(&input->view) != count)
            return false;
    }
    return program->inputs[0].storage != program->inputs[1].storage;
}

/* Puts the operands and the result of `other` behind those of `step`. */
static dw_status add_other(dw__lowering *l, dw__step *step, const dw__step *other) {
    const uint32_t inputs = step->input_count + other->input_count - 1;
    const size_t bytes = (inputs + 2) * sizeof(dw__operand);
    dw__operand *operands = allocate(l, bytes);
    if (!operands) return dw__fail_memory("operands", bytes);
    memcpy(operands, step->inputs, step->input_count * sizeof *operands);
    memcpy(operands + step->input_count, other->inputs + 1,
           (other->input_count - 1) * sizeof *operands);
    step->inputs = operands;
    operands[inputs] = step->outputs[0];
    operands[inputs + 1] = other->outputs[0];
    step->outputs = operands + inputs;
    step->input_count = inputs;
    step->output_count = 2;
    step->paired = true;
    return DW_OK;
}

/* Tries to make one instruction of the program and the two linear layers that compute its inputs. */
static dw_status fuse_pair(dw__lowering *l, dw__step *program, bool *done) {
    *done = false;
    if (!may_be_paired(l, program)) return DW_OK;
    dw_node nodes[2] = {deferred_node(l, program, 0), deferred_node(l, program, 1)};
    const int first = nodes[0] < nodes[1] ? 0 : 1;
    dw__step step, other;
    DW_RETURN_IF_FAILED(make_product(l, program, (uint32_t)first, &step));
    DW_RETURN_IF_FAILED(make_product(l, program, (uint32_t)(1 - first), &other));
    if (!are_alike(l, &step, &other)) return DW_OK;
    DW_RETURN_IF_FAILED(add_other(l, &step, &other));
    program->replaced = first;
    program->replaced_half = 1 - first;
    DW_RETURN_IF_FAILED(fuse(l, program, &step, nodes, 2, done));
    return *done ? DW_OK : dw__lower_make_step(l, program->node, program); /* as it was */
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* True if the program is the sum of its two inputs, in their floating-point type, and nothing else. */
static bool is_sum(const dw__lowering *l, const dw__step *program) {
    const dw_attr *text = dw__find_attr(program->attr_count, program->attrs, DW_ATTR_KEY_BODY);
    const dw_dtype dtype = program->outputs[0].view.dtype, dtypes[2] = {dtype, dtype};
    return program->input_count == 2 && program->output_count == 1 && text &&
           dw__dtype_is_float(dtype) && program->inputs[0].view.dtype == dtype &&
           program->inputs[1].view.dtype == dtype &&
           dw__body_parse(text->string, 2, dtypes, l->body) == DW_OK && dw__body_is_sum(l->body);
}

/* Sets `can` if a kernel of the target adds to the step's first result in this way. */
static dw_status find_adder(dw__lowering *l, dw__step *step, dw__accumulation way, bool *can) {
    step->accumulates = way;
    step->outputs[0].storage = DW_NONE;
    *can = false;
    dw__lower_select(l, step, NULL);
    if (!step->kernel) return DW_OK;
    const dw_status status = dw__lower_prepare(l, step);
    *can = status == DW_OK;
    return status == DW_UNSUPPORTED ? DW_OK : status;
}

/* Tries to let the deferred step write the sum over the program's input `other`. */
static dw_status add_in_place(dw__lowering *l, dw__step *program, dw__step *step, uint32_t other,
                              bool *done) {
    DW_RETURN_IF_FAILED(find_adder(l, step, DW__ADDS_TO_OUTPUT, done));
    *done = *done && dw__lower_take_over(l, program, step, other, 0);
    return DW_OK;
}

static bool is_broadcast(const dw__tensor *view) {
    for (int axis = 0; axis < view->rank; axis++)
        if (view->shape[axis] > 1 && view->stride[axis] == 0) return true;
    return false;
}

/* Tries to let the deferred step read the program's input `other` and write the sum elsewhere. */
static dw_status add_out_of_place(dw__lowering *l, dw__step *program, dw__step *step,
                                  uint32_t other, bool *done) {
    const dw__operand *input = &program->inputs[other];
    const dw__tensor *y = &step->outputs[0].view;
    *done = false;
    step->addend = *input;
    if (dw__tensor_count(&input->view) != dw__tensor_count(y) || is_broadcast(&input->view) ||
        !dw__view_reshape(&input->view, y->rank, y->shape, &step->addend.view))
        return DW_OK;
    DW_RETURN_IF_FAILED(find_adder(l, step, DW__ADDS_TO_ADDEND, done));
    return *done ? dw__lower_place_outputs(l, program) : DW_OK;
}

/* Tries to replace a program that adds its two inputs by the deferred node that computes input `i`: its
 * first result is added to the other input. */
static dw_status accumulate(dw__lowering *l, dw__step *program, uint32_t i, bool *done) {
    *done = false;
    if (!is_sum(l, program)) return DW_OK;
    uint32_t storage = program->inputs[i].storage;
    dw_node node = storage_of(l, storage)->deferred;
    dw__step step;
    DW_RETURN_IF_FAILED(make_deferred(l, node, &step));
    if (storage != step.outputs[0].storage || storage_of(l, storage)->reads_left != 1 ||
        !dw__lower_is_whole(l, &program->inputs[i]) ||
        dw__tensor_count(&program->outputs[0].view) != dw__tensor_count(&step.outputs[0].view))
        return DW_OK;
    DW_RETURN_IF_FAILED(add_in_place(l, program, &step, 1 - i, done));
    if (!*done) DW_RETURN_IF_FAILED(add_out_of_place(l, program, &step, 1 - i, done));
    if (!*done) return DW_OK;
    undefer(l, node);
    step.outputs[0].storage = program->outputs[0].storage;
    step.outputs[0].offset = program->outputs[0].offset;
    DW_RETURN_IF_FAILED(dw__lower_add_step(l, &step));
    read_operands(l, node);
    return DW_OK;
}

/* Returns the program's input whose deferred node is tried: the first that may have an epilogue, or else the first. A
 * sum may be an accumulation of any of its inputs. DW_NONE: no input is deferred. */
static uint32_t waiting_input(dw__lowering *l, const dw__step *program) {
    uint32_t first = DW_NONE;
    for (uint32_t i = 0; i < program->input_count; i++) {
        if (!dw__lower_waits(l, &program->inputs[i])) continue;
        if (first == DW_NONE) first = i;
        if (may_have_epilogue(l, storage_of(l, program->inputs[i].storage)->deferred)) return i;
        if (is_sum(l, program)) break;
    }
    return first;
}

/* Tries to make one instruction of the program and the deferred node of its input `i`. */
static dw_status join(dw__lowering *l, dw__step *program, uint32_t i, bool *done) {
    const dw_node node = storage_of(l, program->inputs[i].storage)->deferred;
    *done = false;
    if (may_accumulate(l, node)) DW_RETURN_IF_FAILED(accumulate(l, program, i, done));
    if (!*done && may_have_epilogue(l, node))
        DW_RETURN_IF_FAILED(fuse_epilogue(l, program, i, done));
    return DW_OK;
}

dw_status dw__lower_program(dw__lowering *l, dw_node node) {
    dw__step program;
    bool done = false;
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, node, &program));
    const uint32_t i = waiting_input(l, &program);
    if (!is_sum(l, &program)) DW_RETURN_IF_FAILED(fuse_pair(l, &program, &done));
    if (i != DW_NONE && !done) {
        /* The program reads the results of other deferred nodes, too, so they come first. */
        DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, program.inputs[i].storage));
        if (dw__lower_waits(l, &program.inputs[i])) /* unless the same node made both */
            DW_RETURN_IF_FAILED(join(l, &program, i, &done));
    }
    if (done) {
        dw__lower_finish(l, &program);
        return dw__lower_finish_sums(l, &program);
    }
    DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, DW_NONE));
    DW_RETURN_IF_FAILED(dw__lower_program_codes(l, node, &done));
    return done ? DW_OK : dw__lower_plain(l, node);
}

dw_status dw__lower_rope(dw__lowering *l, dw_node node) {
    dw__step rope;
    bool done = false;
    if (may_wait_for_attention(l, node)) {
        DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, DW_NONE));
        return dw__lower_defer(l, node);
    }
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, node, &rope));
    if (dw__lower_waits(l, &rope.inputs[0])) {
        const uint32_t storage = rope.inputs[0].storage;
        DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, storage));
        if (dw__lower_waits(l, &rope.inputs[0]) &&
            may_be_rotated(l, storage_of(l, storage)->deferred))
            DW_RETURN_IF_FAILED(fuse_epilogue(l, &rope, 0, &done));
    }
    if (done) {
        dw__lower_finish(l, &rope);
        return DW_OK;
    }
    DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, DW_NONE));
    return dw__lower_plain(l, node);
}

dw_status dw__lower_attention(dw__lowering *l, dw_node node) {
    enum { Q = 0 };
    dw__step attention;
    bool done = false;
    DW_RETURN_IF_FAILED(dw__lower_make_step(l, node, &attention));
    if (dw__lower_waits(l, &attention.inputs[Q])) {
        const uint32_t storage = attention.inputs[Q].storage;
        DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, storage));
        if (dw__lower_waits(l, &attention.inputs[Q]) &&
            row_of(l, storage_of(l, storage)->deferred)->rotates)
            DW_RETURN_IF_FAILED(fuse_epilogue(l, &attention, Q, &done));
    }
    if (done) {
        dw__lower_finish(l, &attention);
        return DW_OK;
    }
    DW_RETURN_IF_FAILED(dw__lower_deferred_inputs(l, node, DW_NONE));
    return dw__lower_plain(l, node);
}
