/* A plan's instructions: as text with one line for each, and as JSON for programs. */
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
    static const char *const home_names[] = {"arena", "leaf", "output", "grad", "kept"};
    DW_RETURN_IF_FAILED(dw__text_printf(out, " %s[", dw_dtype_name(operand->view.dtype)));
    for (int axis = 0; axis < operand->view.rank; axis++) {
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, axis ? ",%lld" : "%lld", (long long)operand->view.shape[axis]));
    }
    if (operand->storage == DW_NONE) return dw__text_printf(out, "]@none");
    const dw__storage *storage = &plan->storages.items[operand->storage];
    const bool placed = storage->home == DW_HOME_ARENA || storage->home == DW_HOME_KEPT;
    size_t where = placed ? storage->offset : storage->index;
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
    DW_RETURN_IF_FAILED(dw__text_printf(out, "%4u %c", index,
                                        index < plan->kept_end         ? 'K'
                                        : index < plan->first_backward ? 'F'
                                                                       : 'B'));
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
        DW_TRY(
            dw__text_printf(&out, "to part %u%s", segment->part, segment->kept ? " (kept)" : ""));
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

/* Appends tensors to a list, without those that no memory holds. `inputs_of`: NULL, or the epilogue whose inputs they
 * are, which are listed without the product. */
static dw_status write_operands(dw__text *out, const dw__operand *operands, uint32_t count,
                                const dw__step *inputs_of, bool *first) {
    for (uint32_t i = 0; i < count; i++) {
        const dw__tensor *view = &operands[i].view;
        if (operands[i].storage == DW_NONE || view->rank < 0 ||
            (inputs_of && dw__step_replaces(inputs_of, i)))
            continue;
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s{\"dtype\": \"%s\", \"shape\": ",
                                            *first ? "" : ", ", dw_dtype_name(view->dtype)));
        DW_RETURN_IF_FAILED(dw__write_list(out, NULL, (uint32_t)view->rank, view->shape, ""));
        DW_RETURN_IF_FAILED(dw__text_append(out, "}", 1));
        *first = false;
    }
    return DW_OK;
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

/* Returns the bytes that a step reads and writes, for an epilogue without those of the product. */
static double step_bytes(const dw__step *step, bool is_epilogue) {
    double bytes = step->accumulates == DW__ADDS_TO_ADDEND ? bytes_of(&step->addend) : 0.0;
    if (step->accumulates == DW__ADDS_TO_OUTPUT) bytes += bytes_of(&step->outputs[0]);
    for (uint32_t i = 0; i < step->input_count; i++)
        if (!is_epilogue || !dw__step_replaces(step, i)) bytes += bytes_of(&step->inputs[i]);
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
static void predict(const dw_plan *plan, const dw__instruction *instruction,
                    dw__kernel_seconds *result) {
    const dw__step *step = &instruction->step;
    *result = (dw__kernel_seconds){0};
    if (!step->kernel->seconds || !plan->target.context) return;
    dw__operation_call call;
    dw__call epilogue;
    memset(&call, 0, sizeof call);
    dw__step_shape(step, &call.call);
    if (instruction->epilogue) {
        dw__step_shape(instruction->epilogue, &epilogue);
        dw__step_attach(instruction->epilogue, &epilogue, &call.call);
        for (uint32_t o = 0; o < step->output_count; o++)
            if (step->outputs[o].storage != DW_NONE) /* the product is stored, too */
                call.call.outputs[o].data = (char *)0 + DW__GPU_ALIGNMENT;
    }
    step->kernel->seconds(step->kernel, &call, &plan->target.gpu, result);
}

/* "key": "text", or null if the text is NULL or empty */
static dw_status write_text(dw__text *out, const char *key, const char *text) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, ", \"%s\": ", key));
    return text && *text ? dw__write_string(out, text) : dw__text_append(out, "null", 4);
}

static dw_status write_number(dw__text *out, const char *key, double number) {
    char text[DW__NUMBER_BYTES];
    dw__number_text(number, text);
    return dw__text_printf(out, ", \"%s\": %s", key, text);
}

static dw_status write_origin(dw__text *out, const dw_graph *graph, dw_node node) {
    const dw__node_record *record = node == DW_NONE ? NULL : &graph->nodes.items[node];
    const bool region = record && record->region != DW_REGION_NONE;
    DW_RETURN_IF_FAILED(
        write_text(out, "name", record ? dw_value_name(graph, record->outputs[0]) : NULL));
    DW_RETURN_IF_FAILED(write_text(out, "module", record ? record->module : NULL));
    DW_RETURN_IF_FAILED(write_text(out, "region", region ? dw_region_name(record->region) : NULL));
    if (record && record->layer >= 0) return dw__text_printf(out, ", \"layer\": %d", record->layer);
    return dw__text_printf(out, ", \"layer\": null");
}

static dw_status write_tensors(dw__text *out, const dw__instruction *instruction) {
    const dw__step *step = &instruction->step, *epilogue = instruction->epilogue;
    bool first = true;
    DW_RETURN_IF_FAILED(dw__text_printf(out, ", \"inputs\": ["));
    DW_RETURN_IF_FAILED(write_operands(out, step->inputs, step->input_count, NULL, &first));
    if (epilogue)
        DW_RETURN_IF_FAILED(
            write_operands(out, epilogue->inputs, epilogue->input_count, epilogue, &first));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "], \"outputs\": ["));
    first = true;
    DW_RETURN_IF_FAILED(write_operands(out, step->outputs, step->output_count, NULL, &first));
    if (epilogue)
        DW_RETURN_IF_FAILED(
            write_operands(out, epilogue->outputs, epilogue->output_count, NULL, &first));
    return dw__text_append(out, "]", 1);
}

static dw_status write_costs(const dw_plan *plan, const dw__instruction *instruction,
                             dw__text *out) {
    const dw__step *step = &instruction->step, *epilogue = instruction->epilogue;
    double flops = node_flops(plan, step->node) * (step->paired ? 2.0 : 1.0),
           bytes = step_bytes(step, false);
    if (epilogue) {
        flops += node_flops(plan, epilogue->node);
        bytes += step_bytes(epilogue, true);
    }
    DW_RETURN_IF_FAILED(write_number(out, "flops", flops));
    DW_RETURN_IF_FAILED(write_number(out, "bytes", bytes));
    dw__kernel_seconds time;
    predict(plan, instruction, &time);
    if (time.seconds <= 0.0)
        return dw__text_printf(out, ", \"seconds\": null, \"seconds_from\": null");
    DW_RETURN_IF_FAILED(write_number(out, "seconds", time.seconds));
    return write_text(out, "seconds_from", time.from);
}

static dw_status write_instruction(const dw_plan *plan, uint32_t index, dw__text *out) {
    const dw__instruction *instruction = &plan->code.items[index];
    const dw__step *step = &instruction->step, *epilogue = instruction->epilogue;
    const dw_graph *graph = plan->engine->graph;
    const bool copy = step->node == DW_NONE;
    DW_RETURN_IF_FAILED(dw__text_printf(out, "{\"phase\": \"%s\", \"part\": %u",
                                        index < plan->first_backward ? "forward" : "backward",
                                        dw__plan_part_of(plan, index)));
    DW_RETURN_IF_FAILED(
        write_text(out, "op", copy ? "copy" : dw_op_name(graph->nodes.items[step->node].op)));
    DW_RETURN_IF_FAILED(write_origin(out, graph, step->node));
    DW_RETURN_IF_FAILED(write_text(out, "kernel", step->kernel->name));
    DW_RETURN_IF_FAILED(write_text(out, "source", step->kernel->source));
    DW_RETURN_IF_FAILED(write_text(out, "scheme", step_scheme(graph, step->node)));
    DW_RETURN_IF_FAILED(write_tensors(out, instruction));
    if (epilogue)
        DW_RETURN_IF_FAILED(dw__text_printf(out,
                                            ", \"epilogue\": {\"op\": \"%s\", \"kernel\": \"%s\"}",
                                            dw_op_name(epilogue->op), epilogue->kernel->name));
    else
        DW_RETURN_IF_FAILED(dw__text_printf(out, ", \"epilogue\": null"));
    DW_RETURN_IF_FAILED(write_costs(plan, instruction, out));
    return dw__text_append(out, "}", 1);
}

dw_status dw_plan_operations(const dw_plan *plan, char **json) {
    dw_status status = DW_OK;
    dw__text out = {0};
    DW_TRY(dw__text_append(&out, "[", 1));
    for (uint32_t i = 0; i < plan->code.count; i++) {
        if (i > 0) DW_TRY(dw__text_append(&out, ",\n ", 3));
        DW_TRY(write_instruction(plan, i, &out));
    }
    DW_TRY(dw__text_append(&out, "]\n", 2));
    *json = out.text;
    out.text = NULL;
cleanup:
    dw__text_free(&out);
    return status;
}
