/* Scheduling: which programs that backward repeats run together with a program of backward.
 *
 * An activation function is an example. Its result is computed again for the weight's gradient, and its gradient reads
 * the same inputs: one program that computes both reads them once. The repeated program `from` joins the program `with`
 * if
 *
 *     both have one shape, and share an input of at least half the bytes of a result;
 *     `with` needs nothing that is computed from the repeated result, which is read nearby.
 *
 * Whatever reads the repeated result in backward then waits for the joint program.
 */
#include "engine/training_schedule.h"
#include "graph/body.h"
#include "graph/emit.h"

enum {
    NEAR = 16
}; /* in nodes of the given order; the result of a distant program would be alive for long */

static bool is_program(const dw__scheduling *s, dw_node node) {
    return dw__op_table[record_of(s, node)->op].program;
}

static bool same_shape(const dw__scheduling *s, dw_value a, dw_value b) {
    const dw__type x = dw__type_of(s->graph, a), y = dw__type_of(s->graph, b);
    return dw__shape_equal(&x, &y);
}

static uint32_t position_of(const dw__node_record *record, dw_value input) {
    uint32_t i = 0;
    while (i < record->input_count && record->inputs[i] != input) i++;
    return i;
}

/* Bytes that both programs read. */
static int64_t shared_bytes(const dw__scheduling *s, dw_node a, dw_node b) {
    const dw__node_record *x = record_of(s, a), *y = record_of(s, b);
    int64_t bytes = 0;
    for (uint32_t i = 0; i < x->input_count; i++)
        if (x->inputs[i] != DW_NONE && position_of(x, x->inputs[i]) == i &&
            position_of(y, x->inputs[i]) < y->input_count)
            bytes += s->bytes[x->inputs[i]];
    return bytes;
}

static uint32_t code_count(const dw__scheduling *s, dw_node node) {
    uint32_t count = 0;
    for (const char *at = dw_node_attr(s->graph, node, DW_ATTR_KEY_BODY)->string; *at; at++)
        count += *at == ';';
    return count;
}

/* True if one program can compute both. */
static bool fits(const dw__scheduling *s, dw_node a, dw_node b) {
    const dw__node_record *x = record_of(s, a), *y = record_of(s, b);
    uint32_t inputs = x->input_count;
    for (uint32_t i = 0; i < y->input_count; i++)
        inputs += position_of(x, y->inputs[i]) == x->input_count;
    return inputs <= DW_MAX_INPUTS && x->output_count + y->output_count <= DW_MAX_OUTPUTS &&
           code_count(s, a) + code_count(s, b) <= DW_BODY_MAX_CODE;
}

/* True if a node of backward near `with` reads the value's elements, perhaps through views. */
static bool is_read_near(const dw__scheduling *s, dw_value value, dw_node with) {
    for (uint32_t r = s->reader_start[value]; r < s->reader_start[value + 1]; r++) {
        const dw_node reader = s->readers[r];
        if (dw__op_is_view(record_of(s, reader)->op)) {
            if (is_read_near(s, record_of(s, reader)->outputs[0], with)) return true;
        } else if (!s->in_forward[reader]) {
            if (reader < with + NEAR && with < reader + NEAR) return true;
        }
    }
    return false;
}

/* The program of backward that shares the most bytes with `from`, DW_NONE if none shares enough. */
static dw_node find_partner(const dw__scheduling *s, dw_node from) {
    const dw__node_record *record = record_of(s, from);
    const int64_t enough = s->bytes[record->outputs[0]] / 2;
    dw_node best = DW_NONE;
    int64_t most = 0;
    for (uint32_t i = 0; i < record->input_count; i++) {
        const dw_value input = record->inputs[i];
        if (input == DW_NONE) continue;
        for (uint32_t r = s->reader_start[input]; r < s->reader_start[input + 1]; r++) {
            const dw_node with = s->readers[r];
            if (s->in_forward[with] || !is_program(s, with) || s->repeats[with] != DW_NONE ||
                !same_shape(s, record_of(s, with)->outputs[0], record->outputs[0]) ||
                !fits(s, with, from) || !is_read_near(s, record->outputs[0], with))
                continue;
            const int64_t bytes = shared_bytes(s, from, with);
            if (bytes < enough || bytes <= most) continue;
            most = bytes;
            best = with;
        }
    }
    return best;
}

/* Pushes the nodes that backward runs for the node's operands and that have not been seen. */
static uint32_t push_producers(dw__scheduling *s, dw_node node, uint32_t height) {
    for (uint32_t i = 0; i < dw__operand_count(s, node); i++) {
        const dw_value input = dw__operand_at(s, node, i);
        if (input == DW_NONE || !dw__computed_in_backward(s, input)) continue;
        const dw_node from = dw__runs_in(s, producer(s, input));
        if (s->emitted[from]) continue;
        s->emitted[from] = true;
        s->stack[height++] = from;
    }
    return height;
}

/* True if the node needs its own result. */
static bool waits_for_itself(dw__scheduling *s, dw_node node) {
    for (dw_node n = 0; n < s->node_count; n++) s->emitted[n] = false;
    uint32_t height = push_producers(s, node, 0);
    while (height > 0 && !s->emitted[node])
        height = push_producers(s, s->stack[height - 1], height - 1);
    const bool found = s->emitted[node];
    for (dw_node n = 0; n < s->node_count; n++) s->emitted[n] = false;
    return found;
}

void dw__join_repeated(dw__scheduling *s) {
    for (dw_node from = 0; from < s->node_count; from++) {
        const dw__node_record *record = record_of(s, from);
        if (!s->in_forward[from] || !is_program(s, from) || record->output_count != 1 ||
            !s->recomputed[record->outputs[0]])
            continue;
        const dw_node with = find_partner(s, from);
        if (with == DW_NONE) continue;
        s->runs_in[from] = with;
        s->repeats[with] = from;
        if (!waits_for_itself(s, with)) continue;
        s->runs_in[from] = s->repeats[with] = DW_NONE;
    }
}
