/* Values that depend on parameters alone, and outlive a run.
 *
 * The codes of a weight change when an optimizer changes the weight, not with each micro-batch of a step. With
 * dw_engine_options.keep_values the nodes that compute such values come first in the schedule, those of backward too, and
 * run only when the caller says so (dw_plan_keep). What they compute for later instructions lies in a segment of its own,
 * which every run reads and none writes.
 *
 * A node depends on parameters alone if all of its operands do. Its sizes and attributes must be numbers, since a value
 * serves runs at other sizes of the symbols. Codes and products are kept (dw__op_is_worth_keeping), and the nodes that
 * they need run with them. Results that are outputs are not kept: each run has
 * buffers of its own for these.
 */
#include "engine/training_schedule.h"
#include <string.h>

/* ---- schedule -------------------------------------------------------------------------------------- */

static bool has_fixed_attrs(const dw__node_record *record) {
    for (uint32_t i = 0; i < record->attr_count; i++) {
        const dw_attr *attr = &record->attrs[i];
        if (dw_attr_kind_of(attr->key) != DW_ATTR_DIMS) continue;
        for (uint32_t d = 0; d < attr->count; d++)
            if (attr->list[d] < 0) return false; /* a polynomial of symbols */
    }
    return true;
}

static bool has_fixed_results(const dw__scheduling *s, const dw__node_record *record) {
    for (uint32_t o = 0; o < record->output_count; o++) {
        const dw__value_record *value = &s->graph->values.items[record->outputs[o]];
        for (int axis = 0; axis < value->rank; axis++)
            if (value->shape[axis] < 0) return false;
    }
    return true;
}

static bool is_output(const dw__scheduling *s, dw_value value) {
    for (size_t i = 0; i < s->graph->outputs.count; i++)
        if (s->graph->outputs.items[i] == value) return true;
    return false;
}

/* `derived`: by node of which all operands are known. */
static bool depends_on_parameters(const dw__scheduling *s, dw_node node, const bool *derived) {
    const dw__node_record *record = record_of(s, node);
    bool any = false;
    for (uint32_t i = 0; i < record->input_count; i++) {
        const dw_value input = record->inputs[i];
        if (input == DW_NONE) continue;
        const dw_node from = producer(s, input);
        const bool parameter = s->graph->values.items[input].role == DW_ROLE_PARAMETER;
        if (from == DW_NONE ? !parameter : !derived[from]) return false;
        any = true;
    }
    if (!any || !has_fixed_attrs(record) || !has_fixed_results(s, record)) return false;
    for (uint32_t o = 0; o < record->output_count; o++) {
        const dw_value value = record->outputs[o];
        if ((s->root[value] == value && s->free_root[value]) || is_output(s, value)) return false;
    }
    return true;
}

/* s->kept has the nodes that depend on parameters first, and is then reduced to those that are worth it and the nodes
 * that these need. */
void dw__choose_kept(dw__scheduling *s) {
    for (dw_node node = 0; node < s->node_count; node++)
        s->kept[node] = depends_on_parameters(s, node, s->kept);
    /* in_forward marks the nodes that a kept one needs. */
    for (dw_node node = s->node_count; node-- > 0;) {
        const dw__node_record *record = record_of(s, node);
        s->kept[node] =
            s->kept[node] && (s->in_forward[node] || dw__op_is_worth_keeping(record->op));
        if (!s->kept[node]) continue;
        s->in_forward[node] = true;
        for (uint32_t i = 0; i < record->input_count; i++)
            if (record->inputs[i] != DW_NONE && producer(s, record->inputs[i]) != DW_NONE)
                s->in_forward[producer(s, record->inputs[i])] = true;
        for (uint32_t o = 0; o < record->output_count; o++)
            if (s->root[record->outputs[o]] == record->outputs[o])
                s->free_root[record->outputs[o]] = true;
    }
}

/* ---- plan ------------------------------------------------------------------------------------------ */

/* The nodes of an instruction of dw_plan_keep are kept ones, and no other instruction writes what they have filled, nor
 * uses its memory otherwise. */
static bool is_sound(const dw_plan *plan, const dw__step *step, uint32_t instruction) {
    const bool kept = instruction < plan->kept_end;
    if (kept && step->node >= plan->engine->kept_nodes) return false;
    for (uint32_t i = 0; i < step->input_count; i++) {
        if (step->inputs[i].storage == DW_NONE || !(step->disposable >> i & 1)) continue;
        if (plan->storages.items[step->inputs[i].storage].home == DW_HOME_KEPT) return false;
    }
    for (uint32_t o = 0; o < step->output_count; o++) {
        if (step->outputs[o].storage == DW_NONE) continue;
        const dw__home home = plan->storages.items[step->outputs[o].storage].home;
        if (kept ? home != DW_HOME_KEPT && home != DW_HOME_ARENA : home == DW_HOME_KEPT)
            return false;
    }
    return true;
}

dw_status dw__plan_find_kept(dw_plan *plan) {
    for (size_t s = 0; s < plan->storages.count; s++) {
        dw__storage *storage = &plan->storages.items[s];
        if (storage->home == DW_HOME_ARENA && storage->first < plan->kept_end &&
            storage->last >= plan->kept_end)
            storage->home = DW_HOME_KEPT;
    }
    for (uint32_t i = 0; i < plan->code.count && plan->kept_end > 0; i++) {
        const dw__instruction *instruction = &plan->code.items[i];
        if (is_sound(plan, &instruction->step, i) &&
            (!instruction->epilogue || is_sound(plan, instruction->epilogue, i)))
            continue;
        return dw__fail(DW_INTERNAL,
                        "instruction %u, of %u that compute kept values, writes what does not "
                        "depend on parameters alone, or the other way round",
                        i, plan->kept_end);
    }
    return DW_OK;
}

static uint64_t mix(uint64_t hash, uint64_t number) { /* FNV-1a */
    for (int byte = 0; byte < 8; byte++)
        hash = (hash ^ (number >> (8 * byte) & 0xFF)) * 0x100000001B3u;
    return hash;
}

/* Adds what a kept instruction writes, and where, to the layout. */
static void add_to_layout(dw_plan *plan, const dw__step *step) {
    uint64_t hash = plan->kept_layout;
    for (uint32_t o = 0; o < step->output_count; o++) {
        const dw__operand *result = &step->outputs[o];
        if (result->storage == DW_NONE) continue;
        const dw__storage *storage = &plan->storages.items[result->storage];
        if (storage->home != DW_HOME_KEPT) continue;
        const uint64_t place[] = {step->node, o, storage->offset, (uint64_t)result->offset,
                                  result->view.dtype};
        for (size_t i = 0; i < DW_COUNT(place); i++) hash = mix(hash, place[i]);
        for (int axis = 0; axis < result->view.rank; axis++) {
            hash = mix(hash, (uint64_t)result->view.shape[axis]);
            hash = mix(hash, (uint64_t)result->view.stride[axis]);
        }
    }
    plan->kept_layout = hash;
}

dw_status dw__plan_place_kept(dw_plan *plan) {
    const size_t alignment = plan->target.alignment;
    const size_t begin = (plan->arena_bytes + alignment - 1) / alignment * alignment;
    size_t end = begin;
    for (size_t s = 0; s < plan->storages.count; s++) {
        dw__storage *storage = &plan->storages.items[s];
        if (storage->home != DW_HOME_KEPT) continue;
        storage->segment = plan->segment_count;
        storage->offset = end - begin;
        if (storage->bytes > DW_PLACEMENT_MOST - end - alignment)
            return dw__fail(DW_SHAPE, "the kept values need more than 2^62 bytes together");
        end += (storage->bytes + alignment - 1) / alignment * alignment;
    }
    if (end == begin) return DW_OK;
    plan->kept_layout = 0xCBF29CE484222325u;
    for (uint32_t i = 0; i < plan->kept_end; i++) {
        add_to_layout(plan, &plan->code.items[i].step);
        if (plan->code.items[i].epilogue) add_to_layout(plan, plan->code.items[i].epilogue);
    }
    for (size_t s = 0; s < plan->storages.count; s++)
        if (plan->storages.items[s].home == DW_HOME_KEPT) plan->storages.items[s].offset += begin;
    plan->kept_bytes = end - begin;
    plan->segments[plan->segment_count++] = (dw_segment){.offset = begin,
                                                         .bytes = plan->kept_bytes,
                                                         .saved_bytes = plan->kept_bytes,
                                                         .part = plan->part_count - 1,
                                                         .kept = 1};
    plan->arena_bytes = plan->saved_bytes = end;
    return DW_OK;
}
