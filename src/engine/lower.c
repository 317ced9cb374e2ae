/* Nodes at concrete sizes become instructions on storages.
 *
 * The schedule is walked once. Dims become numbers; a view becomes a strided operand of the storage
 * below it; every other node becomes an instruction with the kernel that takes its operands as they
 * lie. Where only the reference kernel takes them, operands are first copied into a contiguous
 * storage if that finds a faster one. On the way:
 *
 *   outputs      a value that is an output, or a reshape of one, is computed in the caller's buffer
 *   epilogues    a product read by a `fused` node waits for it: both become one instruction, and
 * the product itself is not stored unless somebody else reads it layouts      attention writes its
 * result in the layout that the permute behind it asks for, and its gradients straight into the
 * concatenation that follows in place     a fused node writes over an operand that nobody reads
 * later
 */
#include "engine/engine_internal.h"
#include "engine/views.h"
#include "graph/body.h"
#include <string.h>

typedef struct lowering {
    dw_plan *plan;
    const dw_engine *engine;
    const dw_graph *graph;
    dw__operand *values;      /* by value: where it lies; storage DW_NONE: not lowered yet */
    dw__operand *hints;       /* by value: where it had better lie; storage DW_NONE: anywhere */
    uint32_t *concat_storage; /* by node: of a concat that its operands are written into */
    uint32_t *first_slot;     /* by value: the first output that is it, or DW_NONE */
    uint32_t *next_slot;      /* by output: the next one that is the same value */
    bool *claimed;            /* by output: its buffer holds a value already */
    dw__body *body;           /* scratch */
    dw__call call, second;    /* scratch */
} lowering;

static const dw__node_record *record_of(const lowering *l, dw_node node) {
    return &l->graph->nodes.items[node];
}
static const dw__value_record *value_of(const lowering *l, dw_value value) {
    return &l->graph->values.items[value];
}
static dw__storage *storage_of(const lowering *l, uint32_t storage) {
    return &l->plan->storages.items[storage];
}
static uint32_t use_count(const lowering *l, dw_value value) {
    return l->engine->use_start[value + 1] - l->engine->use_start[value];
}
static uint32_t output_position(const lowering *l, uint32_t slot) {
    return slot < l->engine->output_count ? slot
                                          : l->engine->wrt_of[slot - l->engine->output_count];
}

static dw__view_kind view_kind(const lowering *l, dw_node node) {
    return dw__op_table[record_of(l, node)->op].view;
}
static bool concatenates(const lowering *l, dw_node node) {
    return dw__op_table[record_of(l, node)->op].concatenates;
}
static bool is_program(const lowering *l, dw_node node) {
    return dw__op_table[record_of(l, node)->op].program;
}
/* The result has the operand's elements, each once. */
static bool rearranges(const lowering *l, dw_node node) {
    return view_kind(l, node) == DW__VIEW_RESHAPE || view_kind(l, node) == DW__VIEW_PERMUTE;
}

static void *allocate(lowering *l, size_t bytes) { return dw__arena_alloc(l->plan->memory, bytes); }

/* ---- concrete shapes and attributes ---------------------------------------------------------- */

/* dtype and shape of a value, with contiguous strides. */
static dw_status concrete_type(const lowering *l, dw_value value, dw__tensor *tensor) {
    const dw__value_record *record = value_of(l, value);
    memset(tensor, 0, sizeof *tensor);
    tensor->dtype = record->dtype;
    tensor->rank = record->rank;
    int64_t bytes = (int64_t)dw_dtype_bytes(record->dtype);
    for (int axis = 0; axis < record->rank; axis++) {
        dw_status status =
            dw_dim_eval(l->graph, record->shape[axis], l->plan->sizes, &tensor->shape[axis]);
        if (status != DW_OK) {
            return dw__fail_prefix(status, "axis %d of %s", axis, record->name);
        }
        /* A zero dim makes the tensor empty, but the others must still not overflow. */
        int64_t factor = tensor->shape[axis] ? tensor->shape[axis] : 1;
        if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes > INT64_MAX / 4) {
            return dw__fail(DW_SHAPE, "%s has more than 2^61 bytes at these sizes", record->name);
        }
    }
    dw__tensor_set_contiguous(tensor);
    return DW_OK;
}

/* The node's attributes with dims made numbers; the graph's own where there are none. */
static dw_status concrete_attrs(lowering *l, dw_node node, const dw_attr **attrs) {
    const dw__node_record *record = record_of(l, node);
    *attrs = record->attrs;
    bool has_dims = false;
    for (uint32_t i = 0; i < record->attr_count; i++) {
        has_dims |= dw_attr_kind_of(record->attrs[i].key) == DW_ATTR_DIMS;
    }
    if (!has_dims) return DW_OK;
    dw_attr *copy = allocate(l, record->attr_count * sizeof *copy);
    if (!copy) return dw__fail_memory("attributes", record->attr_count * sizeof *copy);
    for (uint32_t i = 0; i < record->attr_count; i++) {
        copy[i] = record->attrs[i];
        if (dw_attr_kind_of(copy[i].key) != DW_ATTR_DIMS) continue;
        int64_t *list = allocate(l, copy[i].count * sizeof *list);
        if (!list) return dw__fail_memory("attributes", copy[i].count * sizeof *list);
        for (uint32_t j = 0; j < copy[i].count; j++) {
            DW_RETURN_IF_FAILED(
                dw_dim_eval(l->graph, record->attrs[i].list[j], l->plan->sizes, &list[j]));
        }
        copy[i].list = list;
    }
    *attrs = copy;
    return DW_OK;
}

static const int64_t *list_attr(const dw__node_record *record, const dw_attr *attrs,
                                dw_attr_key key) {
    const dw_attr *attr = dw__find_attr(record->attr_count, attrs, key);
    return attr ? attr->list : NULL;
}

/* ---- storages -------------------------------------------------------------------------------- */

static size_t tensor_bytes(const dw__tensor *tensor) {
    return (size_t)dw__tensor_count(tensor) * dw_dtype_bytes(tensor->dtype);
}

static dw_status add_storage(lowering *l, dw__home home, uint32_t index, size_t bytes,
                             uint32_t *storage) {
    dw__storage fresh = {.home = home, .index = index, .bytes = bytes};
    fresh.deferred = DW_NONE;
    *storage = (uint32_t)l->plan->storages.count;
    return DW_PUSH(&l->plan->storages, fresh);
}

/* The value lies there: its readers become readers of the storage. */
static void define(lowering *l, dw_value value, const dw__operand *operand) {
    l->values[value] = *operand;
    if (operand->storage == DW_NONE) return;
    uint32_t reads = use_count(l, value) + l->engine->output_uses[value];
    storage_of(l, operand->storage)->reads_left += reads;
    storage_of(l, operand->storage)->reads += reads;
}

static void read_once(lowering *l, dw_value value) {
    if (value == DW_NONE || l->values[value].storage == DW_NONE) return;
    storage_of(l, l->values[value].storage)->reads_left--;
}

/* Contiguous storage for a value: the buffer of the output that it is, or the arena. */
static dw_status add_value_storage(lowering *l, dw_value value, const dw__tensor *type,
                                   dw__operand *operand) {
    uint32_t slot = l->engine->direct[value];
    dw__home home = DW_HOME_ARENA;
    uint32_t index = 0;
    if (slot != DW_NONE && !l->claimed[slot]) {
        l->claimed[slot] = true;
        home = slot < l->engine->output_count ? DW_HOME_OUTPUT : DW_HOME_GRAD;
        index = output_position(l, slot);
    }
    operand->view = *type;
    operand->offset = 0;
    return add_storage(l, home, index, tensor_bytes(type), &operand->storage);
}

/* True when the operand is its whole storage, in order. */
static bool is_whole(const lowering *l, const dw__operand *operand) {
    return operand->storage != DW_NONE && operand->offset == 0 &&
           dw__tensor_is_contiguous(&operand->view) &&
           tensor_bytes(&operand->view) == storage_of(l, operand->storage)->bytes;
}

/* ---- steps and kernels ----------------------------------------------------------------------- */

void dw__step_shape(const dw__step *step, dw__call *call) {
    call->op = step->op;
    call->attr_count = step->attr_count;
    call->attrs = step->attrs;
    call->input_count = step->input_count;
    call->output_count = step->output_count;
    call->prepared = step->prepared;
    for (uint32_t i = 0; i < step->input_count; i++) {
        call->inputs[i] = step->inputs[i].view;
        call->inputs[i].data = NULL;
    }
    for (uint32_t o = 0; o < step->output_count; o++) {
        call->outputs[o] = step->outputs[o].view;
        call->outputs[o].data = NULL;
    }
}

static const dw__kernel *select_kernel(lowering *l, const dw__step *step) {
    dw__step_shape(step, &l->call);
    return dw__kernel_select(&l->call);
}

static dw_status make_step(lowering *l, dw_node node, dw__step *step) {
    const dw__node_record *record = record_of(l, node);
    memset(step, 0, sizeof *step);
    step->node = node;
    step->op = record->op;
    step->attr_count = record->attr_count;
    step->input_count = record->input_count;
    step->output_count = record->output_count;
    DW_RETURN_IF_FAILED(concrete_attrs(l, node, &step->attrs));
    size_t bytes = ((size_t)record->input_count + record->output_count) * sizeof(dw__operand);
    step->inputs = allocate(l, bytes);
    if (!step->inputs) return dw__fail_memory("operands", bytes);
    step->outputs = step->inputs + record->input_count;
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw_value value = record->inputs[i];
        if (value == DW_NONE) {
            step->inputs[i].storage = DW_NONE;
            step->inputs[i].view.rank = -1;
        } else {
            step->inputs[i] = l->values[value];
        }
    }
    for (uint32_t o = 0; o < record->output_count; o++) {
        step->outputs[o].storage = DW_NONE;
        DW_RETURN_IF_FAILED(concrete_type(l, record->outputs[o], &step->outputs[o].view));
    }
    return DW_OK;
}

/* What tells prepared calls of one kernel apart: attributes in text form and element types. */
static dw_status prepared_key(const dw__step *step, dw__text *key) {
    DW_RETURN_IF_FAILED(dw__text_printf(key, "%s %d:", step->kernel->name, (int)step->op));
    for (uint32_t i = 0; i < step->input_count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d", (int)step->inputs[i].view.dtype));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(key, " ->"));
    for (uint32_t o = 0; o < step->output_count; o++) {
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d", (int)step->outputs[o].view.dtype));
    }
    for (uint32_t a = 0; a < step->attr_count; a++) {
        const dw_attr *attr = &step->attrs[a];
        DW_RETURN_IF_FAILED(dw__text_printf(key, " %d=%lld %.17g \"%s\"", (int)attr->key,
                                            (long long)attr->integer, attr->number,
                                            attr->string ? attr->string : ""));
        for (uint32_t i = 0; i < attr->count; i++) {
            DW_RETURN_IF_FAILED(dw__text_printf(key, ",%lld", (long long)attr->list[i]));
        }
    }
    return DW_OK;
}

static dw_status prepare_new(lowering *l, const dw__step *step, const char *key, uint32_t *index) {
    dw_engine *engine = l->plan->engine;
    void *prepared = NULL;
    dw__step_shape(step, &l->call);
    DW_RETURN_IF_FAILED(step->kernel->prepare(&l->call, &prepared));
    *index = (uint32_t)engine->prepared.count;
    dw_status status = DW_PUSH(&engine->prepared, prepared);
    if (status != DW_OK) {
        dw__free(prepared);
        return status;
    }
    return dw__map_set(engine->prepared_index, key, *index);
}

/* Layers repeat the same bodies, and so do plans: each is prepared once. */
static dw_status prepare(lowering *l, dw__step *step) {
    if (!step->kernel->prepare) return DW_OK;
    dw_status status = DW_OK;
    dw__text key = {0};
    uint32_t index = 0;
    DW_TRY(prepared_key(step, &key));
    if (!dw__map_get(l->engine->prepared_index, key.text, &index)) {
        DW_TRY(prepare_new(l, step, key.text, &index));
    }
    step->prepared = l->engine->prepared.items[index];
cleanup:
    dw__text_free(&key);
    return status;
}

static dw_status add_instruction(lowering *l, const dw__step *step, const dw__step *epilogue,
                                 int replaced, size_t scratch_bytes, size_t library) {
    dw__instruction fresh = {
        .step = *step, .replaced = replaced, .scratch = DW_NONE, .library = library};
    if (epilogue) fresh.with_epilogue = dw__kernel_with_epilogue(step->op);
    if (scratch_bytes) {
        DW_RETURN_IF_FAILED(add_storage(l, DW_HOME_ARENA, 0, scratch_bytes, &fresh.scratch));
    }
    if (epilogue) {
        fresh.epilogue = allocate(l, sizeof *epilogue);
        if (!fresh.epilogue) return dw__fail_memory("an epilogue", sizeof *epilogue);
        *fresh.epilogue = *epilogue;
    }
    return DW_PUSH(&l->plan->code, fresh);
}

static dw_status add_step(lowering *l, dw__step *step) {
    bool empty = true;
    for (uint32_t o = 0; o < step->output_count; o++) {
        empty &= dw__tensor_count(&step->outputs[o].view) == 0;
    }
    if (empty) return DW_OK; /* no element to compute */
    DW_RETURN_IF_FAILED(prepare(l, step));
    dw__step_shape(step, &l->call);
    size_t scratch = step->kernel->scratch_bytes ? step->kernel->scratch_bytes(&l->call) : 0;
    size_t library = step->kernel->library_bytes ? step->kernel->library_bytes(&l->call) : 0;
    return add_instruction(l, step, NULL, -1, scratch, library);
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* An instruction that copies `from` to `to` (same shape), on behalf of `node`. */
static dw_status add_copy(lowering *l, dw_node node, const dw__operand *from,
                          const dw__operand *to) {
    dw__step step = {.node = node, .attr_count = 1};
    step.input_count = step.output_count = 1;
    dw_attr *attr = allocate(l, sizeof *attr);
    step.inputs = allocate(l, 2 * sizeof *step.inputs);
    if (!attr || !step.inputs) return dw__fail_memory("a copy", sizeof *attr);
    step.outputs = step.inputs + 1;
    step.op = dw__kernel_copy_op(from->view.rank, attr);
    step.attrs = attr;
    step.inputs[0] = *from;
    step.outputs[0] = *to;
    step.kernel = select_kernel(l, &step);
    return add_step(l, &step);
}

static dw_status copy_to_arena(lowering *l, dw_node node, const dw__operand *from,
                               dw__operand *to) {
    *to = *from;
    to->offset = 0;
    dw__tensor_set_contiguous(&to->view);
    DW_RETURN_IF_FAILED(add_storage(l, DW_HOME_ARENA, 0, tensor_bytes(&to->view), &to->storage));
    return add_copy(l, node, from, to);
}

/* Returns the operands to copy so that a kernel other than the reference supports the step, as a bit mask by input: one
 * operand if that is enough, else all that are not contiguous, and 0 if that does not help either. */
static uint64_t operands_to_copy(lowering *l, dw__step *step) {
    uint64_t strided = 0;
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (step->inputs[i].view.rank >= 0 && !dw__tensor_is_contiguous(&step->inputs[i].view)) {
            strided |= (uint64_t)1 << i;
        }
    }
    if (!strided) return 0;
    dw__step_shape(step, &l->call);
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (!(strided >> i & 1)) continue;
        dw__tensor as_it_is = l->call.inputs[i];
        dw__tensor_set_contiguous(&l->call.inputs[i]);
        if (!dw__kernel_is_reference(dw__kernel_select(&l->call))) return (uint64_t)1 << i;
        l->call.inputs[i] = as_it_is;
    }
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (strided >> i & 1) dw__tensor_set_contiguous(&l->call.inputs[i]);
    }
    return dw__kernel_is_reference(dw__kernel_select(&l->call)) ? 0 : strided;
}

/* Chooses the step's kernel, copying operands where only the reference takes them as they lie. */
static dw_status choose_kernel(lowering *l, dw__step *step) {
    step->kernel = select_kernel(l, step);
    if (!dw__kernel_is_reference(step->kernel)) return DW_OK;
    uint64_t copies = operands_to_copy(l, step);
    if (!copies) return DW_OK;
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (!(copies >> i & 1)) continue;
        dw__operand from = step->inputs[i];
        DW_RETURN_IF_FAILED(copy_to_arena(l, step->node, &from, &step->inputs[i]));
    }
    step->kernel = select_kernel(l, step);
    return DW_OK;
}

/* ---- views ----------------------------------------------------------------------------------- */

static dw_status lower_view(lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    dw__operand from = l->values[record->inputs[0]], to = from;
    const dw_attr *attrs = NULL;
    DW_RETURN_IF_FAILED(concrete_attrs(l, node, &attrs));
    dw__tensor type;
    DW_RETURN_IF_FAILED(concrete_type(l, record->outputs[0], &type));
    int64_t offset = 0;
    if (!dw__view_apply(view_kind(l, node), &from.view, &type, record->attr_count, attrs, &to.view,
                        &offset)) {
        dw__operand packed = from;
        dw__tensor_set_contiguous(&packed.view);
        packed.offset = 0;
        dw__operand home;
        DW_RETURN_IF_FAILED(add_value_storage(l, record->outputs[0], &type, &home));
        packed.storage = home.storage;
        DW_RETURN_IF_FAILED(add_copy(l, node, &from, &packed));
        to = home;
    }
    to.offset += offset;
    read_once(l, record->inputs[0]);
    define(l, record->outputs[0], &to);
    return DW_OK;
}

/* ---- layouts that later nodes ask for -------------------------------------------------------- */

/* Given where the node's result (a reshape or a permute) should lie, where its operand should. */
static bool operand_layout(lowering *l, dw_node node, const dw__operand *result,
                           dw__operand *operand) {
    const dw__node_record *record = record_of(l, node);
    *operand = *result;
    if (view_kind(l, node) == DW__VIEW_PERMUTE) {
        const int64_t *perm = list_attr(record, record->attrs, DW_ATTR_KEY_PERM);
        dw__view_unpermute(&result->view, perm, &operand->view);
        return true;
    }
    dw__tensor type;
    if (concrete_type(l, record->inputs[0], &type) != DW_OK) return false;
    return dw__view_reshape(&result->view, type.rank, type.shape, &operand->view);
}

/* The value that dw__kernel_lays_out_results() computes and of which `value` is a reshape or a permute;
 * DW_NONE if there is none, or if it has a fixed place. */
static dw_value layout_source(const lowering *l, dw_value value) {
    for (;;) {
        dw_node node = value_of(l, value)->node;
        if (node == DW_NONE || l->engine->direct[value] != DW_NONE) return DW_NONE;
        if (dw__kernel_lays_out_results(record_of(l, node)->op)) return value;
        if (!rearranges(l, node)) return DW_NONE;
        value = record_of(l, node)->inputs[0];
    }
}

/* Operand `index` of the concat is the slice of its result that begins at `start`: asks the source
 * of the operand to lie there. */
static bool hint_concat_operand(lowering *l, dw_value value, dw__operand place) {
    dw_value source = layout_source(l, value);
    if (source == DW_NONE || l->values[source].storage != DW_NONE) return false;
    while (value != source) {
        dw_node node = value_of(l, value)->node;
        dw__operand operand;
        if (!operand_layout(l, node, &place, &operand)) return false;
        place = operand;
        value = record_of(l, node)->inputs[0];
    }
    l->hints[source] = place;
    return true;
}

static void concat_slice(const dw__tensor *whole, int axis, int64_t start, int64_t size,
                         dw__operand *part) {
    part->view = *whole;
    part->view.shape[axis] = size;
    part->offset = start * whole->stride[axis];
}

/* Asks the sources of the concat's operands to write into its result. */
static dw_status hint_concat(lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    dw_value result = record->outputs[0];
    if (l->concat_storage[node] != DW_NONE || l->engine->direct[result] != DW_NONE) return DW_OK;
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (layout_source(l, record->inputs[i]) == DW_NONE) return DW_OK;
    }
    dw__tensor type;
    DW_RETURN_IF_FAILED(concrete_type(l, result, &type));
    dw__operand part;
    DW_RETURN_IF_FAILED(add_storage(l, DW_HOME_ARENA, 0, tensor_bytes(&type), &part.storage));
    l->concat_storage[node] = part.storage;
    int axis = (int)dw_node_int(l->graph, node, DW_ATTR_KEY_AXIS, 0);
    int64_t start = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        dw__tensor each;
        DW_RETURN_IF_FAILED(concrete_type(l, record->inputs[i], &each));
        concat_slice(&type, axis, start, each.shape[axis], &part);
        hint_concat_operand(l, record->inputs[i], part);
        start += each.shape[axis];
    }
    return DW_OK;
}

/* One behind the other that are looked through: a bound for the stack, and for time. */
enum { MOST_VIEWS = 16 };

/* Looks through the readers of `value` for a concat (through reshapes and permutes), else for a
 * permute, and leaves a hint for `source`. */
static dw_status find_hint(lowering *l, dw_value source, dw_value value, int depth) {
    enum { MANY_READERS = 8 };
    const dw_engine *engine = l->engine;
    uint32_t end = engine->use_start[value + 1];
    if (end > engine->use_start[value] + MANY_READERS)
        end = engine->use_start[value] + MANY_READERS;
    for (uint32_t u = engine->use_start[value]; u < end; u++) {
        dw_node reader = engine->use_nodes[u];
        if (concatenates(l, reader)) DW_RETURN_IF_FAILED(hint_concat(l, reader));
        if (rearranges(l, reader) && depth < MOST_VIEWS) {
            DW_RETURN_IF_FAILED(find_hint(l, source, record_of(l, reader)->outputs[0], depth + 1));
        }
        if (l->hints[source].storage != DW_NONE) return DW_OK;
    }
    if (value != source) return DW_OK;
    for (uint32_t u = engine->use_start[value]; u < end; u++) {
        dw_node reader = engine->use_nodes[u];
        if (view_kind(l, reader) != DW__VIEW_PERMUTE) continue;
        dw__operand permuted;
        DW_RETURN_IF_FAILED(concrete_type(l, record_of(l, reader)->outputs[0], &permuted.view));
        permuted.offset = 0;
        DW_RETURN_IF_FAILED(
            add_storage(l, DW_HOME_ARENA, 0, tensor_bytes(&permuted.view), &permuted.storage));
        operand_layout(l, reader, &permuted, &l->hints[source]);
        return DW_OK;
    }
    return DW_OK;
}

/* ---- ordinary nodes -------------------------------------------------------------------------- */

static dw_status place_outputs(lowering *l, dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw_value value = record->outputs[o];
        if (use_count(l, value) + l->engine->output_uses[value] == 0) continue;
        if (step->outputs[o].storage != DW_NONE) continue;
        dw__tensor type = step->outputs[o].view;
        DW_RETURN_IF_FAILED(add_value_storage(l, value, &type, &step->outputs[o]));
    }
    return DW_OK;
}

/* With outputs laid out as later nodes want them, if a kernel does that. */
static dw_status try_hints(lowering *l, dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    if (!dw__kernel_lays_out_results(record->op)) return DW_OK;
    bool any = false;
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw_value value = record->outputs[o];
        if (l->engine->direct[value] != DW_NONE) continue;
        DW_RETURN_IF_FAILED(find_hint(l, value, value, 0));
        if (l->hints[value].storage == DW_NONE) continue;
        step->outputs[o] = l->hints[value];
        any = true;
    }
    if (!any || !dw__kernel_is_reference(select_kernel(l, step))) return DW_OK;
    for (uint32_t o = 0; o < record->output_count; o++) {
        step->outputs[o].storage = DW_NONE;
        step->outputs[o].offset = 0;
        dw__tensor_set_contiguous(&step->outputs[o].view);
    }
    return DW_OK;
}

static uint32_t reads_in(const dw__step *step, uint32_t storage) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < step->input_count; i++) count += step->inputs[i].storage == storage;
    return count;
}

/* A kernel may store an output as soon as the body has computed it: true when nothing in the body
 * reads input `i` after that. */
static bool read_before_written(const lowering *l, const dw__step *step, uint32_t i, uint32_t o) {
    const dw_attr *text = dw__find_attr(step->attr_count, step->attrs, DW_ATTR_KEY_BODY);
    if (!text) return true; /* a single operation */
    dw_dtype dtypes[DW_MAX_INPUTS];
    for (uint32_t j = 0; j < step->input_count; j++) dtypes[j] = step->inputs[j].view.dtype;
    if (dw__body_parse(text->string, step->input_count, dtypes, l->body) != DW_OK) return false;
    return dw__body_may_overwrite(l->body, i, o);
}

/* True when output `o` of the elementwise step may be written over input `i`: it dies here, and
 * every element is read where it is written. `product`: a second step in the same instruction, or
 * NULL. */
static bool may_overwrite(const lowering *l, const dw__step *step, const dw__step *product,
                          uint32_t i, uint32_t o) {
    const dw__operand *input = &step->inputs[i], *output = &step->outputs[o];
    if (!is_whole(l, input) || !dw__view_same(&input->view, &output->view)) return false;
    if (dw_dtype_bytes(input->view.dtype) != dw_dtype_bytes(output->view.dtype)) return false;
    const dw__storage *storage = storage_of(l, input->storage);
    if (storage->home != DW_HOME_ARENA || storage->deferred != DW_NONE) return false;
    if (storage->reads_left != reads_in(step, input->storage)) return false;
    for (uint32_t j = 0; j < step->input_count; j++) {
        if (step->inputs[j].storage != input->storage) continue;
        if (!dw__view_same(&step->inputs[j].view, &input->view)) return false;
        if (!read_before_written(l, step, j, o)) return false;
    }
    for (uint32_t j = 0; j < step->output_count; j++) {
        if (step->outputs[j].storage == input->storage) return false; /* taken */
    }
    return !product || reads_in(product, input->storage) == 0;
}

/* Lets output `o` of the elementwise step take over the storage of input `i`, if it may. Where the
 * output belongs in a caller's gradient buffer the input moves there instead. */
static bool take_over(lowering *l, dw__step *step, const dw__step *product, uint32_t i,
                      uint32_t o) {
    if (step->inputs[i].view.rank < 0 || !may_overwrite(l, step, product, i, o)) return false;
    uint32_t slot = l->engine->direct[record_of(l, step->node)->outputs[o]];
    if (slot != DW_NONE && !l->claimed[slot]) {
        /* Only what backward computed for this step alone may vanish with the gradient. */
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

/* Before place_outputs: lets outputs of an elementwise step take over the storages of inputs. */
static void reuse_inputs(lowering *l, dw__step *step, const dw__step *product) {
    const dw__node_record *record = record_of(l, step->node);
    if (!dw__op_is_pointwise(record->op)) return;
    for (uint32_t o = 0; o < step->output_count; o++) {
        dw_value value = record->outputs[o];
        if (use_count(l, value) + l->engine->output_uses[value] == 0) continue;
        uint32_t i = 0;
        while (i < step->input_count && !take_over(l, step, product, i, o)) i++;
    }
}

static void finish_node(lowering *l, const dw__step *step) {
    const dw__node_record *record = record_of(l, step->node);
    for (uint32_t i = 0; i < record->input_count; i++) read_once(l, record->inputs[i]);
    for (uint32_t o = 0; o < record->output_count; o++) {
        define(l, record->outputs[o], &step->outputs[o]);
    }
}

static dw_status lower_plain(lowering *l, dw_node node) {
    dw__step step;
    DW_RETURN_IF_FAILED(make_step(l, node, &step));
    DW_RETURN_IF_FAILED(try_hints(l, &step));
    DW_RETURN_IF_FAILED(choose_kernel(l, &step));
    if (!dw__kernel_is_reference(step.kernel)) reuse_inputs(l, &step, NULL);
    DW_RETURN_IF_FAILED(place_outputs(l, &step));
    DW_RETURN_IF_FAILED(add_step(l, &step));
    finish_node(l, &step);
    return DW_OK;
}

/* No instruction when every operand lies in its place already. */
static dw_status lower_concat(lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    uint32_t storage = l->concat_storage[node];
    if (storage == DW_NONE) return lower_plain(l, node);
    dw__operand whole = {.storage = storage};
    DW_RETURN_IF_FAILED(concrete_type(l, record->outputs[0], &whole.view));
    int axis = (int)dw_node_int(l->graph, node, DW_ATTR_KEY_AXIS, 0);
    int64_t start = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        const dw__operand *input = &l->values[record->inputs[i]];
        dw__operand part;
        concat_slice(&whole.view, axis, start, input->view.shape[axis], &part);
        if (input->storage != storage || input->offset != part.offset ||
            !dw__view_same(&input->view, &part.view)) {
            return lower_plain(l, node);
        }
        start += input->view.shape[axis];
    }
    for (uint32_t i = 0; i < record->input_count; i++) read_once(l, record->inputs[i]);
    define(l, record->outputs[0], &whole);
    return DW_OK;
}

/* ---- products with an epilogue --------------------------------------------------------------- */

/* First node that reads the value's elements, looking through reshapes. */
static dw_node first_reader(const lowering *l, dw_value value, int depth) {
    dw_node first = DW_NONE;
    for (uint32_t u = l->engine->use_start[value]; u < l->engine->use_start[value + 1]; u++) {
        dw_node reader = l->engine->use_nodes[u];
        if (view_kind(l, reader) == DW__VIEW_RESHAPE && depth < MOST_VIEWS) {
            reader = first_reader(l, record_of(l, reader)->outputs[0], depth + 1);
        }
        if (reader < first) first = reader;
    }
    return first;
}

/* Waiting keeps the product's operands alive: worth it only for a reader close by. */
static bool is_near(const lowering *l, dw_node node, dw_node reader) {
    enum { NEAR = 3 };
    uint32_t between = 0;
    for (dw_node n = node + 1; n < reader && between <= NEAR; n++) {
        between += !dw__op_is_view(record_of(l, n)->op);
    }
    return between <= NEAR;
}

static bool may_wait(const lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    if (!dw__kernel_with_epilogue(record->op) && !dw__kernel_accumulating(record->op)) return false;
    if (value_of(l, record->outputs[0])->dtype != DW_F32) return false;
    dw_node reader = first_reader(l, record->outputs[0], 0);
    return reader != DW_NONE && is_program(l, reader) &&
           record_of(l, reader)->backward == record->backward && is_near(l, node, reader);
}

/* The product gets a place, which stays unused if an epilogue takes its tiles. */
static dw_status defer(lowering *l, dw_node node) {
    dw_value value = record_of(l, node)->outputs[0];
    dw__tensor type;
    DW_RETURN_IF_FAILED(concrete_type(l, value, &type));
    dw__operand place;
    DW_RETURN_IF_FAILED(add_value_storage(l, value, &type, &place));
    storage_of(l, place.storage)->deferred = node;
    define(l, value, &place);
    return DW_OK;
}

/* Lowers a product that has waited, by itself. Its value has been defined. */
static dw_status lower_deferred(lowering *l, uint32_t storage) {
    dw_node node = storage_of(l, storage)->deferred;
    storage_of(l, storage)->deferred = DW_NONE;
    dw__step step;
    DW_RETURN_IF_FAILED(make_step(l, node, &step));
    step.outputs[0] = l->values[record_of(l, node)->outputs[0]];
    DW_RETURN_IF_FAILED(choose_kernel(l, &step));
    DW_RETURN_IF_FAILED(add_step(l, &step));
    for (uint32_t i = 0; i < step.input_count; i++) {
        read_once(l, record_of(l, node)->inputs[i]);
    }
    return DW_OK;
}

/* Tries to make one instruction of the fused step and the product that is its input `i`. */
static dw_status fuse_product(lowering *l, dw__step *fused, uint32_t i, bool *done) {
    *done = false;
    uint32_t storage = fused->inputs[i].storage;
    dw_node node = storage_of(l, storage)->deferred;
    if (reads_in(fused, storage) != 1 || !is_whole(l, &fused->inputs[i]) ||
        dw__tensor_count(&fused->inputs[i].view) != dw__tensor_count(&fused->outputs[0].view) ||
        dw__tensor_count(&fused->outputs[0].view) == 0) {
        return DW_OK;
    }
    dw__step product;
    DW_RETURN_IF_FAILED(make_step(l, node, &product));
    fused->kernel = select_kernel(l, fused);
    if (dw__kernel_is_reference(fused->kernel)) return DW_OK;
    DW_RETURN_IF_FAILED(prepare(l, fused));
    dw__step_shape(&product, &l->call);
    dw__step_shape(fused, &l->second);
    const dw__epilogue_kernel *kernel = dw__kernel_with_epilogue(product.op);
    if (!kernel || !kernel->fits(&l->call, &l->second, (int)i)) return DW_OK;
    size_t scratch = kernel->scratch_bytes(&l->call, &l->second, (int)i);
    size_t library = kernel->library_bytes(&l->call);
    dw__storage *place = storage_of(l, storage);
    if (place->reads_left > 1 || place->home != DW_HOME_ARENA) {
        product.outputs[0] = l->values[record_of(l, node)->outputs[0]];
    }
    place->deferred = DW_NONE;
    reuse_inputs(l, fused, &product);
    DW_RETURN_IF_FAILED(place_outputs(l, fused));
    DW_RETURN_IF_FAILED(add_instruction(l, &product, fused, (int)i, scratch, library));
    for (uint32_t j = 0; j < product.input_count; j++) {
        read_once(l, record_of(l, node)->inputs[j]);
    }
    *done = true;
    return DW_OK;
}

/* True when the fused step is the sum of its two inputs and nothing else. */
static bool is_sum(const lowering *l, const dw__step *fused) {
    const dw_attr *text = dw__find_attr(fused->attr_count, fused->attrs, DW_ATTR_KEY_BODY);
    const dw_dtype dtypes[2] = {DW_F32, DW_F32};
    if (fused->input_count != 2 || fused->output_count != 1 || !text ||
        fused->inputs[0].view.dtype != DW_F32 || fused->inputs[1].view.dtype != DW_F32 ||
        dw__body_parse(text->string, 2, dtypes, l->body) != DW_OK) {
        return false;
    }
    return dw__body_is_sum(l->body);
}

/* The gradient of a table that is used twice (tied embeddings) is a sum, one operand of which is
 * embedding_backward's, input `i`: its rows are added to the other operand where that lies. */
static dw_status accumulate_rows(lowering *l, dw__step *fused, uint32_t i, bool *done) {
    *done = false;
    if (!is_sum(l, fused)) return DW_OK;
    uint32_t storage = fused->inputs[i].storage;
    dw_node node = storage_of(l, storage)->deferred;
    const dw__kernel *kernel = dw__kernel_accumulating(record_of(l, node)->op);
    dw__step rows;
    DW_RETURN_IF_FAILED(make_step(l, node, &rows));
    dw__step_shape(&rows, &l->call);
    if (storage_of(l, storage)->reads_left != 1 || !is_whole(l, &fused->inputs[i]) ||
        !kernel->fits(&l->call) || !take_over(l, fused, &rows, 1 - i, 0)) {
        return DW_OK;
    }
    storage_of(l, storage)->deferred = DW_NONE;
    rows.kernel = kernel;
    rows.outputs[0].storage = fused->outputs[0].storage;
    DW_RETURN_IF_FAILED(add_step(l, &rows));
    for (uint32_t j = 0; j < rows.input_count; j++) {
        read_once(l, record_of(l, node)->inputs[j]);
    }
    *done = true;
    return DW_OK;
}

static bool waits(const lowering *l, const dw__operand *operand) {
    return operand->storage != DW_NONE && storage_of(l, operand->storage)->deferred != DW_NONE;
}

/* Products that no epilogue takes are computed before their reader. */
static dw_status lower_deferred_inputs(lowering *l, dw_node node, uint32_t except) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (record->inputs[i] == DW_NONE) continue;
        const dw__operand *operand = &l->values[record->inputs[i]];
        if (waits(l, operand) && operand->storage != except) {
            DW_RETURN_IF_FAILED(lower_deferred(l, operand->storage));
        }
    }
    return DW_OK;
}

static dw_status lower_fused(lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    dw__step step;
    DW_RETURN_IF_FAILED(make_step(l, node, &step));
    for (uint32_t i = 0; i < record->input_count; i++) {
        if (!waits(l, &step.inputs[i])) continue;
        /* Other waiting products are operands of the epilogue: they come first. */
        DW_RETURN_IF_FAILED(lower_deferred_inputs(l, node, step.inputs[i].storage));
        bool done = false;
        dw_node waiting = storage_of(l, step.inputs[i].storage)->deferred;
        if (dw__kernel_accumulating(record_of(l, waiting)->op)) {
            DW_RETURN_IF_FAILED(accumulate_rows(l, &step, i, &done));
        } else {
            DW_RETURN_IF_FAILED(fuse_product(l, &step, i, &done));
        }
        if (done) {
            finish_node(l, &step);
            return DW_OK;
        }
        break;
    }
    DW_RETURN_IF_FAILED(lower_deferred_inputs(l, node, DW_NONE));
    return lower_plain(l, node);
}

/* ---- outputs --------------------------------------------------------------------------------- */

/* Copies `value` into the buffer of output `slot`, unless it was computed there. */
static dw_status deliver(lowering *l, uint32_t slot, dw_value value) {
    bool grad = slot >= l->engine->output_count;
    uint32_t index = output_position(l, slot);
    dw__operand from = l->values[value];
    const dw__storage *storage = storage_of(l, from.storage);
    dw__home home = grad ? DW_HOME_GRAD : DW_HOME_OUTPUT;
    if (storage->home == home && storage->index == index && is_whole(l, &from)) return DW_OK;
    if (waits(l, &from)) DW_RETURN_IF_FAILED(lower_deferred(l, from.storage));
    dw__operand to;
    DW_RETURN_IF_FAILED(concrete_type(l, value, &to.view));
    to.offset = 0;
    DW_RETURN_IF_FAILED(add_storage(l, home, index, tensor_bytes(&to.view), &to.storage));
    DW_RETURN_IF_FAILED(add_copy(l, value_of(l, value)->node, &from, &to));
    read_once(l, value);
    return DW_OK;
}

static dw_status deliver_node(lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    for (uint32_t o = 0; o < record->output_count; o++) {
        dw_value value = record->outputs[o];
        for (uint32_t slot = l->first_slot[value]; slot != DW_NONE; slot = l->next_slot[slot]) {
            bool here = record->backward == (slot >= l->engine->output_count);
            if (here) DW_RETURN_IF_FAILED(deliver(l, slot, value));
        }
    }
    return DW_OK;
}

/* Outputs of the region that its nodes do not compute: leaves, and gradients known in forward. */
static dw_status deliver_given(lowering *l, bool backward) {
    uint32_t from = backward ? l->engine->output_count : 0;
    uint32_t to = backward ? (uint32_t)l->graph->outputs.count : l->engine->output_count;
    for (uint32_t slot = from; slot < to; slot++) {
        dw_value value = l->graph->outputs.items[slot];
        dw_node node = value_of(l, value)->node;
        if (node == DW_NONE || (backward && !record_of(l, node)->backward)) {
            DW_RETURN_IF_FAILED(deliver(l, slot, value));
        }
    }
    return DW_OK;
}

/* ---- the walk -------------------------------------------------------------------------------- */

static dw_status lower_node(lowering *l, dw_node node) {
    const dw__node_record *record = record_of(l, node);
    if (is_program(l, node)) return lower_fused(l, node);
    if (view_kind(l, node) == DW__VIEW_RESHAPE) {
        dw__tensor type, view;
        const dw__operand *from = &l->values[record->inputs[0]];
        DW_RETURN_IF_FAILED(concrete_type(l, record->outputs[0], &type));
        if (dw__view_reshape(&from->view, type.rank, type.shape, &view)) {
            return lower_view(l, node); /* a product may wait below a reshape */
        }
    }
    DW_RETURN_IF_FAILED(lower_deferred_inputs(l, node, DW_NONE));
    if (dw__op_is_view(record->op)) return lower_view(l, node);
    if (concatenates(l, node)) return lower_concat(l, node);
    if (may_wait(l, node)) return defer(l, node);
    return lower_plain(l, node);
}

static dw_status lower_leaves(lowering *l) {
    const dw_graph *graph = l->graph;
    l->plan->leaves = allocate(l, (graph->leaves.count + 1) * sizeof(dw__tensor));
    if (!l->plan->leaves) return dw__fail_memory("shapes of leaves", graph->leaves.count);
    for (uint32_t i = 0; i < graph->leaves.count; i++) {
        dw__operand operand = {.offset = 0};
        DW_RETURN_IF_FAILED(concrete_type(l, graph->leaves.items[i], &operand.view));
        l->plan->leaves[i] = operand.view;
        DW_RETURN_IF_FAILED(
            add_storage(l, DW_HOME_LEAF, i, tensor_bytes(&operand.view), &operand.storage));
        define(l, graph->leaves.items[i], &operand);
    }
    return DW_OK;
}

static dw_status lower_outputs(lowering *l) {
    uint32_t count = l->engine->output_count;
    l->plan->outputs = allocate(l, (count + 1) * sizeof(dw__tensor));
    if (!l->plan->outputs) return dw__fail_memory("shapes of outputs", count);
    for (uint32_t i = 0; i < count; i++) {
        DW_RETURN_IF_FAILED(concrete_type(l, l->graph->outputs.items[i], &l->plan->outputs[i]));
    }
    return DW_OK;
}

/* What is alive now was written by forward. */
static void begin_backward(lowering *l) {
    l->plan->first_backward = (uint32_t)l->plan->code.count;
    for (size_t i = 0; i < l->plan->storages.count; i++) l->plan->storages.items[i].saved = true;
}

static dw_status lower_all(lowering *l) {
    DW_RETURN_IF_FAILED(lower_leaves(l));
    DW_RETURN_IF_FAILED(lower_outputs(l));
    DW_RETURN_IF_FAILED(deliver_given(l, false));
    uint32_t count = (uint32_t)l->graph->nodes.count;
    for (dw_node node = 0; node <= count; node++) {
        if (node == l->engine->first_backward) {
            begin_backward(l);
            DW_RETURN_IF_FAILED(deliver_given(l, true));
        }
        if (node == count) break;
        dw_status status = lower_node(l, node);
        if (status == DW_OK) status = deliver_node(l, node);
        if (status != DW_OK) {
            char label[160];
            dw__node_label(l->graph, node, label, sizeof label);
            return dw__fail_prefix(status, "%s", label);
        }
    }
    return DW_OK;
}

dw_status dw__lower(dw_plan *plan) {
    dw_status status = DW_OK;
    const dw_engine *engine = plan->engine;
    size_t values = dw_graph_value_count(engine->graph) + 1;
    size_t nodes = dw_graph_node_count(engine->graph) + 1;
    lowering *l = dw__calloc(1, sizeof *l);
    if (!l) return dw__fail_memory("a plan in the making", sizeof *l);
    l->plan = plan;
    l->engine = engine;
    l->graph = engine->graph;
    l->values = dw__malloc(values * sizeof *l->values);
    l->hints = dw__malloc(values * sizeof *l->hints);
    l->concat_storage = dw__malloc(nodes * sizeof *l->concat_storage);
    l->claimed = dw__calloc(dw_graph_output_count(engine->graph) + 1, sizeof *l->claimed);
    l->body = dw__malloc(sizeof *l->body);
    l->first_slot = dw__malloc(values * sizeof *l->first_slot);
    l->next_slot = dw__malloc((dw_graph_output_count(engine->graph) + 1) * sizeof *l->next_slot);
    if (!l->values || !l->hints || !l->concat_storage || !l->claimed || !l->body ||
        !l->first_slot || !l->next_slot) {
        DW_TRY(dw__fail_memory("a plan in the making", values * sizeof *l->values));
    }
    for (size_t i = 0; i < values; i++) l->values[i].storage = l->hints[i].storage = DW_NONE;
    for (size_t i = 0; i < nodes; i++) l->concat_storage[i] = DW_NONE;
    for (size_t i = 0; i < values; i++) l->first_slot[i] = DW_NONE;
    for (uint32_t slot = dw_graph_output_count(engine->graph); slot-- > 0;) {
        dw_value value = dw_graph_output(engine->graph, slot);
        l->next_slot[slot] = l->first_slot[value];
        l->first_slot[value] = slot;
    }
    DW_TRY(lower_all(l));
cleanup:
    dw__free(l->values);
    dw__free(l->hints);
    dw__free(l->concat_storage);
    dw__free(l->first_slot);
    dw__free(l->next_slot);
    dw__free(l->claimed);
    dw__free(l->body);
    dw__free(l);
    return status;
}
