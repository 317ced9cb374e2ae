/* A plan's instructions: as text with one line for each, and as JSON for programs. */
#include "base/json.h"
#include "engine/engine_internal.h"
#include <stdio.h>
#include <string.h>

void dw__node_label(const dw_graph *graph, dw_node node, char *buffer, size_t bytes) {
    if (node == DW_NONE) {
        snprintf(buffer, bytes, "copy of a leaf");
        return;
    }
    const dw__node_record *record = &graph->nodes.items[node];
    const char *module = record->module ? record->module : "";
    snprintf(buffer, bytes, "%s %s%s%s%s", dw_op_name(record->op),
             dw_value_name(graph, record->outputs[0]), *module ? " (" : "", module,
             *module ? ")" : "");
}

static dw_status list_operand(const dw_plan *plan, const dw__operand *operand, dw__text *out) {
    static const char *const home_names[] = {"arena", "leaf", "output", "grad"};
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s[", dw_dtype_name(operand->view.dtype)));
    for (int axis = 0; axis < operand->view.rank; axis++) {
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, axis ? ",%lld" : "%lld", (long long)operand->view.shape[axis]));
    }
    if (operand->storage == DW_NONE) return dw__text_printf(out, "]@none");
    const dw__storage *storage = &plan->storages.items[operand->storage];
    size_t where = storage->home == DW_HOME_ARENA ? storage->offset : storage->index;
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "]@%s:%zu%s", home_names[storage->home], where,
                        storage->home == DW_HOME_ARENA && storage->saved ? "s" : ""));
    if (operand->offset) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "+%lld", (long long)operand->offset));
    }
    if (dw__tensor_is_contiguous(&operand->view)) return DW_OK;
    return dw__text_printf(out, "~"); /* strided */
}

static dw_status list_step(const dw_plan *plan, const dw__step *step, dw__text *out) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s", step->kernel->name));
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (step->inputs[i].view.rank < 0) continue;
        DW_RETURN_IF_FAILED(list_operand(plan, &step->inputs[i], out));
    }
    if (step->accumulates == DW__ADDS_TO_ADDEND) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, " +"));
        DW_RETURN_IF_FAILED(list_operand(plan, &step->addend, out));
    }
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, step->accumulates == DW__ADDS_TO_OUTPUT ? " +->" : " ->"));
    for (uint32_t o = 0; o < step->output_count; o++) {
        DW_RETURN_IF_FAILED(list_operand(plan, &step->outputs[o], out));
    }
    return DW_OK;
}

static dw_status list_instruction(const dw_plan *plan, uint32_t index, dw__text *out) {
    const dw__instruction *instruction = &plan->code.items[index];
    char label[160];
    dw__node_label(plan->engine->graph, instruction->step.node, label, sizeof label);
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "%4u %c", index, index < plan->first_backward ? 'F' : 'B'));
    const uint64_t runs = atomic_load(&instruction->runs);
    if (runs) {
        double seconds = 1e-9 * (double)atomic_load(&instruction->nanoseconds);
        DW_RETURN_IF_FAILED(dw__text_printf(out, " %9.3f ms", 1e3 * seconds / (double)runs));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s:", label));
    const dw__step *step = &instruction->step, *epilogue = instruction->epilogue;
    DW_RETURN_IF_FAILED(list_step(plan, step, out));
    if (epilogue) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, " | epilogue"));
        DW_RETURN_IF_FAILED(list_step(plan, epilogue, out));
    }
    if (instruction->scratch != DW_NONE) {
        const dw__storage *scratch = &plan->storages.items[instruction->scratch];
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, " scratch %zu@%zu", scratch->bytes, scratch->offset));
    }
    return dw__text_printf(out, "\n");
}

dw_status dw_plan_describe(const dw_plan *plan, char **text) {
    dw_status status = DW_OK;
    dw__text out = {0};
    const dw_graph *graph = plan->engine->graph;
    DW_TRY(dw__text_printf(&out, "plan"));
    for (uint32_t i = 0; i < dw_graph_symbol_count(graph); i++) {
        DW_TRY(dw__text_printf(&out, " %s=%lld", dw_graph_symbol_name(graph, i),
                               (long long)plan->sizes[i]));
    }
    DW_TRY(dw__text_printf(&out,
                           ": %zu instructions, %u of them forward; arena %zu bytes, "
                           "of which saved %zu; lower bound %zu",
                           plan->code.count, plan->first_backward, plan->arena_bytes,
                           plan->saved_bytes, plan->bound_bytes));
    for (uint32_t s = 0; s < plan->segment_count && plan->segment_count > 1; s++) {
        const dw_segment *segment = &plan->segments[s];
        DW_TRY(dw__text_printf(&out, "%s %zu bytes ", s ? "," : "; segments:", segment->bytes));
        if (segment->first_part)
            DW_TRY(dw__text_printf(&out, "from part %u ", segment->first_part));
        DW_TRY(dw__text_printf(&out, "to part %u", segment->part));
    }
    DW_TRY(dw__text_printf(&out, "%s", "\n"));
    for (uint32_t i = 0; i < plan->code.count; i++) DW_TRY(list_instruction(plan, i, &out));
    *text = out.text;
    out.text = NULL;
cleanup:
    dw__text_free(&out);
    return status;
}

/* ---- as JSON --------------------------------------------------------------------------------------- */

static json_t *tensor_json(const dw__tensor *view) {
    json_t *shape = json_array();
    for (int axis = 0; axis < view->rank; axis++)
        json_array_append_new(shape, json_integer((json_int_t)view->shape[axis]));
    return json_pack("{s:s,s:o}", "dtype", dw_dtype_name(view->dtype), "shape", shape);
}

static void append_operands(json_t *list, const dw__operand *operands, uint32_t count, int but) {
    for (uint32_t i = 0; i < count; i++) {
        const bool held = operands[i].storage != DW_NONE && operands[i].view.rank >= 0;
        if (held && (int)i != but) json_array_append_new(list, tensor_json(&operands[i].view));
    }
}

/* Bytes that the operand's elements take in memory. */
static double bytes_of(const dw__operand *operand) {
    const dw__tensor *view = &operand->view;
    double elements = 1.0;
    if (operand->storage == DW_NONE || view->rank < 0) return 0.0;
    for (int axis = 0; axis < view->rank; axis++)
        if (view->stride[axis] != 0 || view->shape[axis] == 0)
            elements *= (double)view->shape[axis];
    return elements * dw_dtype_bits(view->dtype) / 8.0;
}

/* Without input `but`. */
static double step_bytes(const dw__step *step, int but) {
    double bytes = step->accumulates == DW__ADDS_TO_ADDEND ? bytes_of(&step->addend) : 0.0;
    if (step->accumulates == DW__ADDS_TO_OUTPUT) bytes += bytes_of(&step->outputs[0]);
    for (uint32_t i = 0; i < step->input_count; i++)
        if ((int)i != but) bytes += bytes_of(&step->inputs[i]);
    for (uint32_t o = 0; o < step->output_count; o++) bytes += bytes_of(&step->outputs[o]);
    return bytes;
}

/* Returns how the value is quantized, looking through views, or NULL. */
static const char *scheme_of(const dw_graph *graph, dw_value value) {
    for (;;) {
        if (value == DW_NONE) return NULL;
        const dw_node node = graph->values.items[value].node;
        if (node == DW_NONE) return NULL;
        const dw__node_record *record = &graph->nodes.items[node];
        const dw_attr *scheme = dw_node_attr(graph, node, DW_ATTR_KEY_SCHEME);
        if (scheme) return scheme->string;
        if (!dw__op_is_view(record->op)) return NULL;
        value = record->inputs[0];
    }
}

static const char *step_scheme(const dw_graph *graph, dw_node node) {
    if (node == DW_NONE) return NULL;
    const dw__node_record *record = &graph->nodes.items[node];
    const char *scheme = scheme_of(graph, record->outputs[0]);
    if (scheme || !dw__op_is_product(record->op)) return scheme;
    return scheme_of(graph, record->inputs[0]);
}

static double node_flops(const dw_plan *plan, dw_node node) {
    dw_cost cost = {0};
    if (node == DW_NONE || dw_node_cost(plan->engine->graph, node, plan->sizes, &cost) != DW_OK)
        return 0.0;
    return cost.flops;
}

/* The cost model's time of an instruction. */
static void predict(const dw_plan *plan, const dw__step *step, dw__kernel_seconds *result) {
    *result = (dw__kernel_seconds){0};
    if (!step->kernel->seconds || !plan->target.context) return;
    dw__operation_call call;
    memset(&call, 0, sizeof call);
    dw__step_shape(step, &call.call);
    step->kernel->seconds(step->kernel, &call, &plan->target.gpu, result);
}

static json_t *text_or_null(const char *text) {
    return text && *text ? json_string(text) : json_null();
}

static json_t *instruction_json(const dw_plan *plan, uint32_t index) {
    static const char *const copy = "copy";
    const dw__instruction *instruction = &plan->code.items[index];
    const dw__step *step = &instruction->step, *epilogue = instruction->epilogue;
    const dw_graph *graph = plan->engine->graph;
    const dw__node_record *record = step->node == DW_NONE ? NULL : &graph->nodes.items[step->node];
    const bool backward = index >= plan->first_backward;
    json_t *inputs = json_array(), *outputs = json_array();
    double flops = node_flops(plan, step->node), bytes = step_bytes(step, -1);
    append_operands(inputs, step->inputs, step->input_count, -1);
    append_operands(outputs, step->outputs, step->output_count, -1);
    json_t *behind = json_null();
    if (epilogue) {
        append_operands(inputs, epilogue->inputs, epilogue->input_count, instruction->replaced);
        append_operands(outputs, epilogue->outputs, epilogue->output_count, -1);
        flops += node_flops(plan, epilogue->node);
        bytes += step_bytes(epilogue, instruction->replaced);
        behind = json_pack("{s:s,s:s}", "op", dw_op_name(epilogue->op), "kernel",
                           epilogue->kernel->name);
    }
    dw__kernel_seconds time;
    predict(plan, step, &time);
    const bool known = time.seconds > 0.0;
    json_t *json = json_pack(
        "{s:s,s:i,s:s,s:o,s:s,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:f,s:f,s:o,s:o}", "phase",
        backward ? "backward" : "forward", "part", (int)dw__plan_part_of(plan, index), "op",
        record ? dw_op_name(record->op) : copy, "name",
        record ? text_or_null(dw_value_name(graph, record->outputs[0])) : json_null(), "kernel",
        step->kernel->name, "source", text_or_null(step->kernel->source), "module",
        text_or_null(record ? record->module : NULL), "layer",
        record && record->layer >= 0 ? json_integer(record->layer) : json_null(), "region",
        record && record->region != DW_REGION_NONE ? json_string(dw_region_name(record->region))
                                                   : json_null(),
        "scheme", text_or_null(step_scheme(graph, step->node)), "inputs", inputs, "outputs",
        outputs, "epilogue", behind, "flops", flops, "bytes", bytes, "seconds",
        known ? json_real(time.seconds) : json_null(), "seconds_from",
        known ? text_or_null(time.from) : json_null());
    return json;
}

dw_status dw_plan_operations(const dw_plan *plan, char **json) {
    dw_status status = DW_OK;
    json_t *list = json_array();
    if (!list) return dw__fail_memory("the list of a plan's instructions", plan->code.count);
    for (uint32_t i = 0; i < plan->code.count; i++) {
        json_t *one = instruction_json(plan, i);
        if (!one || json_array_append_new(list, one) != 0)
            DW_TRY(dw__fail_memory("the list of a plan's instructions", plan->code.count));
    }
    DW_TRY(dw__json_string(list, json));
cleanup:
    json_decref(list);
    return status;
}
