/* Fused bodies: reading and writing the text form of a scalar program (body.h). */
#include "graph/body.h"
#include "graph/internal.h"
#include <ctype.h>
#include <math.h>
#include <string.h>

enum { NAME_BYTES = 32, MAX_OPERANDS = 4, SEED = 1 };

typedef struct reader {
    const char *text, *at;
    uint32_t input_count;
    const dw_dtype *input_dtypes;
    dw__body *body;
} reader;

/* ---- reading ------------------------------------------------------------------------------- */

static dw_status malformed(const reader *in, const char *expected) {
    return dw__fail(DW_PARSE, "body: expected %s at byte %zu, before \"%.24s\"", expected,
                    (size_t)(in->at - in->text) + 1, in->at);
}

static bool accept(reader *in, char c) {
    if (*in->at != c) return false;
    in->at++;
    return true;
}

static dw_status read_index(reader *in, uint32_t limit, const char *what, uint16_t *index) {
    uint32_t number = 0;
    const char *start = in->at;
    while (isdigit((unsigned char)*in->at) && number < UINT16_MAX)
        number = 10 * number + (uint32_t)(*in->at++ - '0');
    if (in->at == start) return malformed(in, what);
    if (number >= limit) {
        in->at = start;
        return dw__fail(DW_PARSE, "body: %s number %u at byte %zu does not exist; there are %u",
                        what, number, (size_t)(in->at - in->text) + 1, limit);
    }
    *index = (uint16_t)number;
    return DW_OK;
}

static dw_status read_number(reader *in, double *number) {
    const char *end = dw__number_parse(in->at, number);
    if (!end) return malformed(in, "a number");
    in->at = end;
    return DW_OK;
}

static dw_status read_operand(reader *in, dw__body_operand *operand) {
    *operand = (dw__body_operand){.source = DW_BODY_INPUT};
    if (accept(in, 'i')) return read_index(in, in->input_count, "an input", &operand->index);
    if (accept(in, 't')) {
        operand->source = DW_BODY_RESULT;
        return read_index(in, in->body->code_count, "a result", &operand->index);
    }
    if (!accept(in, 'c')) return malformed(in, "iN, tN or c<number>");
    operand->source = DW_BODY_CONSTANT;
    return read_number(in, &operand->constant);
}

static dw_status read_operands(reader *in, uint32_t limit, dw__body_operand *operands,
                               uint32_t *count) {
    *count = 0;
    if (!accept(in, '(')) return malformed(in, "\"(\"");
    do {
        if (*count == limit) return malformed(in, "\")\": there are too many operands");
        DW_RETURN_IF_FAILED(read_operand(in, &operands[(*count)++]));
    } while (accept(in, ','));
    return accept(in, ')') ? DW_OK : malformed(in, "\",\" or \")\"");
}

static dw_dtype dtype_of(const reader *in, const dw__body_operand *operand) {
    return operand->source == DW_BODY_INPUT ? in->input_dtypes[operand->index]
                                            : in->body->code[operand->index].dtype;
}

/* ---- operations ---------------------------------------------------------------------------- */

/* Finds the operation of a written name. "gelu_tanh" is gelu with an approximation, "cast_f32" a cast with a
 * dtype. */
static dw_status find_operation(const char *name, dw__body_code *code) {
    code->tanh_approximation = true;
    if (strcmp(name, "gelu_tanh") == 0) return code->op = DW_OP_GELU, DW_OK;
    if (strcmp(name, "gelu_tanh_backward") == 0) return code->op = DW_OP_GELU_BACKWARD, DW_OK;
    code->tanh_approximation = false;
    int cast = strncmp(name, "cast_", 5) == 0 ? dw__dtype_find(name + 5) : -1;
    if (cast >= 0 && !dw__dtype_is_code((dw_dtype)cast)) {
        code->dtype = (dw_dtype)cast;
        return code->op = DW_OP_CAST, DW_OK;
    }
    DW_RETURN_IF_FAILED(dw_op_find(name, &code->op));
    if (dw_op_is_elementwise(code->op) && code->op != DW_OP_CAST) return DW_OK;
    return dw__fail(DW_PARSE, "%s is not allowed in a body; expected an elementwise operation%s",
                    name, code->op == DW_OP_CAST ? " (a cast names its type: cast_f32)" : "");
}

static dw_status read_operation(reader *in, dw__body_code *code) {
    char name[NAME_BYTES];
    size_t length = strspn(in->at, "abcdefghijklmnopqrstuvwxyz_0123456789");
    if (length == 0 || length >= sizeof name) return malformed(in, "the name of an operation");
    memcpy(name, in->at, length);
    name[length] = '\0';
    dw_status status = find_operation(name, code);
    if (status != DW_OK)
        return dw__fail_prefix(DW_PARSE, "body: at byte %zu", (size_t)(in->at - in->text) + 1);
    in->at += length;
    return DW_OK;
}

/* Number of operands written in the text. Dropout writes its p and stream as constants after its two
 * operands. */
static uint32_t written_operands(dw_op op) {
    return op == DW_OP_DROPOUT ? 4 : dw__op_table[op].max_inputs;
}

static bool is_constant(const dw__body_operand *operand) {
    return operand->source == DW_BODY_CONSTANT;
}

static dw_status check_dropout(const dw__body_code *code) {
    const dw__body_operand *operands = code->operands;
    double p = operands[2].constant, stream = operands[3].constant;
    bool well_formed = operands[SEED].source == DW_BODY_INPUT && is_constant(&operands[2]) &&
                       is_constant(&operands[3]) && p >= 0 && p <= 1 && stream >= 0 &&
                       stream <= 0x1p53 && stream == floor(stream);
    if (well_formed) return DW_OK;
    return dw__fail(DW_PARSE, "dropout must be dropout(x, i<seed>, c<p>, c<stream>) with p from 0 "
                              "to 1 and a whole stream of 0 or more");
}

/* A constant has the type of its partner: for select the other branch, for other operations any other
 * operand. */
static dw_status type_operands(const reader *in, const dw__body_code *code, dw_dtype *dtypes) {
    uint32_t first = code->op == DW_OP_SELECT, count = dw__op_table[code->op].max_inputs;
    int partner = -1;
    for (uint32_t i = 0; i < count; i++) {
        if (is_constant(&code->operands[i])) continue;
        dtypes[i] = dtype_of(in, &code->operands[i]);
        if (i >= first) partner = (int)i;
    }
    if (partner < 0 || (first && is_constant(&code->operands[0])))
        return dw__fail(
            DW_PARSE, "%s has only constants; one operand must not be a constant, to give the type",
            dw_op_name(code->op));
    for (uint32_t i = first; i < count; i++)
        if (is_constant(&code->operands[i])) dtypes[i] = dtypes[partner];
    return DW_OK;
}

static dw_status check_code(const reader *in, dw__body_code *code) {
    dw_dtype dtypes[MAX_OPERANDS] = {DW_BOOL};
    uint32_t count = dw__op_table[code->op].max_inputs;
    if (code->operand_count != written_operands(code->op))
        return dw__fail(DW_PARSE, "%s has %u operands; expected %u", dw_op_name(code->op),
                        code->operand_count, written_operands(code->op));
    if (code->op == DW_OP_DROPOUT) DW_RETURN_IF_FAILED(check_dropout(code));
    DW_RETURN_IF_FAILED(type_operands(in, code, dtypes));
    dw_status status = dw__elementwise_dtype(code->op, count, dtypes, code->dtype, &code->dtype);
    if (status != DW_OK) return dw__fail_prefix(status, "%s", dw_op_name(code->op));
    code->operand_dtype = dtypes[code->op == DW_OP_SELECT];
    return DW_OK;
}

/* ---- statements ---------------------------------------------------------------------------- */

/* "t3=mul(i0,t2)", after the "t" */
static dw_status read_code(reader *in) {
    dw__body *body = in->body;
    uint16_t index;
    uint32_t count;
    if (body->code_count == DW_BODY_MAX_CODE) return malformed(in, "\"out\": the body is too long");
    dw__body_code *code = &body->code[body->code_count];
    *code = (dw__body_code){.op = DW_OP_COUNT};
    DW_RETURN_IF_FAILED(read_index(in, body->code_count + 1u, "a result", &index));
    if (index != body->code_count) return malformed(in, "results numbered 0, 1, 2, ... in order");
    if (!accept(in, '=')) return malformed(in, "\"=\"");
    DW_RETURN_IF_FAILED(read_operation(in, code));
    DW_RETURN_IF_FAILED(read_operands(in, MAX_OPERANDS, code->operands, &count));
    code->operand_count = (uint8_t)count;
    dw_status status = check_code(in, code);
    if (status != DW_OK) return dw__fail_prefix(status, "body: t%u", index);
    body->code_count++;
    return accept(in, ';') ? DW_OK : malformed(in, "\";\"");
}

/* A seed is read as a whole, so an instruction or an output may not use it as an element. */
static dw_status check_seeds(const dw__body *body) {
    bool seed[DW_MAX_INPUTS] = {false};
    for (uint32_t i = 0; i < body->code_count; i++)
        if (body->code[i].op == DW_OP_DROPOUT) seed[body->code[i].operands[SEED].index] = true;
    for (uint32_t i = 0; i < body->code_count; i++) {
        const dw__body_code *code = &body->code[i];
        for (uint32_t k = 0; k < code->operand_count; k++) {
            bool as_seed = code->op == DW_OP_DROPOUT && k == SEED;
            if (code->operands[k].source == DW_BODY_INPUT && !as_seed &&
                seed[code->operands[k].index])
                return dw__fail(DW_PARSE,
                                "body: t%u reads input %u, a seed of dropout, as an element", i,
                                code->operands[k].index);
        }
    }
    for (uint32_t i = 0; i < body->output_count; i++)
        if (body->outputs[i].source == DW_BODY_INPUT && seed[body->outputs[i].index])
            return dw__fail(DW_PARSE, "body: output %u is a seed of dropout", i);
    return DW_OK;
}

dw_status dw__body_parse(const char *text, uint32_t input_count, const dw_dtype *input_dtypes,
                         dw__body *body) {
    reader in = {text, text, input_count, input_dtypes, body};
    uint32_t outputs;
    body->input_count = (uint16_t)input_count;
    body->code_count = body->output_count = 0;
    while (accept(&in, 't')) DW_RETURN_IF_FAILED(read_code(&in));
    if (strncmp(in.at, "out", 3) != 0) return malformed(&in, "tN=... or out(...)");
    in.at += 3;
    DW_RETURN_IF_FAILED(read_operands(&in, DW_MAX_OUTPUTS, body->outputs, &outputs));
    if (*in.at) return malformed(&in, "the end of the text");
    body->output_count = (uint16_t)outputs;
    for (uint32_t i = 0; i < outputs; i++)
        if (is_constant(&body->outputs[i]))
            return dw__fail(DW_PARSE, "body: output %u is a constant, which has no type", i);
    return check_seeds(body);
}

/* ---- writing ------------------------------------------------------------------------------- */

static dw_status print_constant(double number, dw__text *out) {
    char text[DW__NUMBER_BYTES];
    dw__number_text(number, text);
    return dw__text_printf(out, "c%s", text);
}

static dw_status print_operands(uint32_t count, const dw__body_operand *operands, dw__text *out) {
    for (uint32_t i = 0; i < count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s", i == 0 ? "(" : ","));
        if (is_constant(&operands[i]))
            DW_RETURN_IF_FAILED(print_constant(operands[i].constant, out));
        else
            DW_RETURN_IF_FAILED(dw__text_printf(
                out, "%c%u", operands[i].source == DW_BODY_INPUT ? 'i' : 't', operands[i].index));
    }
    return dw__text_printf(out, ")");
}

static dw_status print_operation(const dw__body_code *code, dw__text *out) {
    if (code->op == DW_OP_CAST) return dw__text_printf(out, "cast_%s", dw_dtype_name(code->dtype));
    if (!code->tanh_approximation) return dw__text_printf(out, "%s", dw_op_name(code->op));
    return dw__text_printf(out, "%s", code->op == DW_OP_GELU ? "gelu_tanh" : "gelu_tanh_backward");
}

dw_status dw__body_print(const dw__body *body, dw__text *out) {
    for (uint32_t i = 0; i < body->code_count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "t%u=", i));
        DW_RETURN_IF_FAILED(print_operation(&body->code[i], out));
        DW_RETURN_IF_FAILED(
            print_operands(body->code[i].operand_count, body->code[i].operands, out));
        DW_RETURN_IF_FAILED(dw__text_printf(out, ";"));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "out"));
    return print_operands(body->output_count, body->outputs, out);
}

/* ---- joining ------------------------------------------------------------------------------- */

static bool same_operand(const dw__body_operand *a, const dw__body_operand *b) {
    if (a->source != b->source) return false;
    return is_constant(a) ? memcmp(&a->constant, &b->constant, sizeof a->constant) == 0
                          : a->index == b->index;
}

static bool same_code(const dw__body_code *a, const dw__body_code *b) {
    if (a->op != b->op || a->tanh_approximation != b->tanh_approximation || a->dtype != b->dtype ||
        a->operand_dtype != b->operand_dtype || a->operand_count != b->operand_count)
        return false;
    for (uint32_t k = 0; k < a->operand_count; k++)
        if (!same_operand(&a->operands[k], &b->operands[k])) return false;
    return true;
}

/* Appends an instruction, unless the body has one that computes the same. Returns its number, or DW_BODY_MAX_CODE if
 * the body is full. */
static uint16_t add_code(dw__body *body, const dw__body_code *code) {
    uint16_t i = 0;
    while (i < body->code_count && !same_code(&body->code[i], code)) i++;
    if (i < body->code_count || i == DW_BODY_MAX_CODE) return i;
    body->code[body->code_count] = *code;
    return body->code_count++;
}

/* Gives an operand its numbers in another body. */
static void renumber(dw__body_operand *operand, const uint16_t *inputs, const uint16_t *results) {
    if (operand->source == DW_BODY_INPUT && inputs) operand->index = inputs[operand->index];
    if (operand->source == DW_BODY_RESULT) operand->index = results[operand->index];
}

/* Appends the instructions of `from`, whose inputs have the given numbers (NULL: their own), unless `body` has their
 * like. results[i]: the number of instruction i in `body`. */
static bool append_code(dw__body *body, const dw__body *from, const uint16_t *inputs,
                        uint16_t *results) {
    for (uint16_t i = 0; i < from->code_count; i++) {
        dw__body_code code = from->code[i];
        for (uint32_t k = 0; k < code.operand_count; k++)
            renumber(&code.operands[k], inputs, results);
        results[i] = add_code(body, &code);
        if (results[i] == DW_BODY_MAX_CODE) return false;
    }
    return true;
}

/* Appends `from`, whose inputs have the given numbers (NULL: their own). */
static bool append_body(dw__body *body, const dw__body *from, const uint16_t *inputs) {
    uint16_t results[DW_BODY_MAX_CODE];
    if (!append_code(body, from, inputs, results)) return false;
    if (body->output_count + from->output_count > DW_MAX_OUTPUTS) return false;
    for (uint16_t i = 0; i < from->output_count; i++) {
        body->outputs[body->output_count] = from->outputs[i];
        renumber(&body->outputs[body->output_count++], inputs, results);
    }
    return true;
}

/* Marks the instructions whose results are outputs alone. */
static void find_ends(const dw__body *body, bool *ends) {
    for (uint16_t i = 0; i < body->code_count; i++) ends[i] = false;
    for (uint16_t i = 0; i < body->output_count; i++)
        if (body->outputs[i].source == DW_BODY_RESULT) ends[body->outputs[i].index] = true;
    for (uint16_t i = 0; i < body->code_count; i++)
        for (uint32_t k = 0; k < body->code[i].operand_count; k++)
            if (body->code[i].operands[k].source == DW_BODY_RESULT)
                ends[body->code[i].operands[k].index] = false;
}

static void put_ends_last(dw__body *body) {
    dw__body_code old[DW_BODY_MAX_CODE];
    uint16_t place[DW_BODY_MAX_CODE], next = 0;
    bool ends[DW_BODY_MAX_CODE];
    find_ends(body, ends);
    for (int end = 0; end < 2; end++)
        for (uint16_t i = 0; i < body->code_count; i++)
            if (ends[i] == (bool)end) place[i] = next++;
    memcpy(old, body->code, body->code_count * sizeof *old);
    for (uint16_t i = 0; i < body->code_count; i++) {
        for (uint32_t k = 0; k < old[i].operand_count; k++)
            renumber(&old[i].operands[k], NULL, place);
        body->code[place[i]] = old[i];
    }
    for (uint16_t i = 0; i < body->output_count; i++) renumber(&body->outputs[i], NULL, place);
}

bool dw__body_join(const dw__body *a, const dw__body *b, const uint16_t *b_inputs,
                   uint16_t input_count, dw__body *joint) {
    joint->input_count = input_count;
    joint->code_count = joint->output_count = 0;
    if (!append_body(joint, a, NULL) || !append_body(joint, b, b_inputs)) return false;
    put_ends_last(joint);
    return true;
}

/* ---- parts --------------------------------------------------------------------------------- */

static void mark(const dw__body_operand *operand, bool *inputs, bool *results) {
    if (operand->source == DW_BODY_INPUT) inputs[operand->index] = true;
    if (operand->source == DW_BODY_RESULT) results[operand->index] = true;
}

void dw__body_select(const dw__body *from, const bool *wanted, dw__body *made, uint16_t *inputs) {
    bool read[DW_MAX_INPUTS] = {false}, needed[DW_BODY_MAX_CODE] = {false};
    uint16_t places[DW_MAX_INPUTS], results[DW_BODY_MAX_CODE];
    made->input_count = made->code_count = made->output_count = 0;
    for (uint16_t i = 0; i < from->output_count; i++)
        if (wanted[i]) mark(&from->outputs[i], read, needed);
    for (uint16_t i = from->code_count; i-- > 0;)
        for (uint32_t k = 0; needed[i] && k < from->code[i].operand_count; k++)
            mark(&from->code[i].operands[k], read, needed);
    for (uint16_t i = 0; i < from->input_count; i++) {
        if (!read[i]) continue;
        places[i] = made->input_count;
        inputs[made->input_count++] = i;
    }
    for (uint16_t i = 0; i < from->code_count; i++) {
        if (!needed[i]) continue;
        dw__body_code code = from->code[i];
        for (uint32_t k = 0; k < code.operand_count; k++)
            renumber(&code.operands[k], places, results);
        results[i] = made->code_count;
        made->code[made->code_count++] = code;
    }
    for (uint16_t i = 0; i < from->output_count; i++) {
        if (!wanted[i]) continue;
        made->outputs[made->output_count] = from->outputs[i];
        renumber(&made->outputs[made->output_count++], places, results);
    }
}

/* Gives an operand of `body` its place in the program in which `value` stands for input `input`. */
static void substitute(dw__body_operand *operand, uint16_t input, const dw__body_operand *value,
                       const uint16_t *results) {
    if (operand->source == DW_BODY_RESULT)
        operand->index = results[operand->index];
    else if (operand->source == DW_BODY_INPUT && operand->index == input)
        *operand = *value;
    else if (operand->source == DW_BODY_INPUT && operand->index > input)
        operand->index--;
}

bool dw__body_inline(const dw__body *body, uint16_t input, const dw__body *maker,
                     const uint16_t *maker_inputs, dw__body *made) {
    uint16_t inputs[DW_MAX_INPUTS], of_maker[DW_BODY_MAX_CODE], results[DW_BODY_MAX_CODE];
    for (uint16_t i = 0; i < maker->input_count; i++)
        inputs[i] = (uint16_t)(maker_inputs[i] - (maker_inputs[i] > input));
    made->input_count = (uint16_t)(body->input_count - 1);
    made->code_count = 0;
    made->output_count = body->output_count;
    if (!append_code(made, maker, inputs, of_maker)) return false;
    dw__body_operand value = maker->outputs[0];
    renumber(&value, inputs, of_maker);
    for (uint16_t i = 0; i < body->code_count; i++) {
        dw__body_code code = body->code[i];
        for (uint32_t k = 0; k < code.operand_count; k++)
            substitute(&code.operands[k], input, &value, results);
        results[i] = add_code(made, &code);
        if (results[i] == DW_BODY_MAX_CODE) return false;
    }
    for (uint16_t i = 0; i < body->output_count; i++) {
        made->outputs[i] = body->outputs[i];
        substitute(&made->outputs[i], input, &value, results);
    }
    put_ends_last(made);
    return true;
}

/* ---- what a body does ---------------------------------------------------------------------- */

static bool is_input(const dw__body_operand *operand, uint32_t input) {
    return operand->source == DW_BODY_INPUT && operand->index == input;
}

bool dw__body_may_overwrite(const dw__body *body, uint32_t input, uint32_t output) {
    const dw__body_operand *result = &body->outputs[output];
    if (result->source != DW_BODY_RESULT) return false;
    for (uint32_t c = result->index + 1u; c < body->code_count; c++)
        for (uint32_t k = 0; k < body->code[c].operand_count; k++)
            if (is_input(&body->code[c].operands[k], input)) return false;
    for (uint32_t other = 0; other < body->output_count; other++)
        if (is_input(&body->outputs[other], input)) return false;
    return true;
}

bool dw__body_is_sum(const dw__body *body) {
    const dw__body_code *code = &body->code[0];
    if (body->input_count != 2 || body->output_count != 1 || body->code_count != 1) return false;
    return code->op == DW_OP_ADD && body->outputs[0].source == DW_BODY_RESULT &&
           ((is_input(&code->operands[0], 0) && is_input(&code->operands[1], 1)) ||
            (is_input(&code->operands[0], 1) && is_input(&code->operands[1], 0)));
}
