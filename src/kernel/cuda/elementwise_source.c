/* CUDA source of elementwise programs: each thread loads its vectors, computes them and stores them, with one variable
 * for each step of the body.
 *
 * Equal sources must be launched alike (elementwise.c), so each input that is used, seeds too, is named by its number.
 */
#include "graph/internal.h"
#include "kernel/cuda/elementwise.h"
#include "number/half.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static bool is_integer(dw_dtype dtype) { return dtype == DW_I32 || dtype == DW_I64; }

static const char *element_of(dw_dtype dtype) {
    static const char *const names[DW_DTYPE_COUNT] = {
        [DW_BOOL] = "bool_element", [DW_I32] = "i32_element", [DW_I64] = "i64_element",
        [DW_BF16] = "bf16_element", [DW_F16] = "f16_element", [DW_F32] = "f32_element",
        [DW_F64] = "f64_element"};
    return names[dtype];
}

static const char *type_of(dw_dtype dtype) {
    static const char *const names[DW_DTYPE_COUNT] = {
        [DW_BOOL] = "bool", [DW_I32] = "int",   [DW_I64] = "long long", [DW_BF16] = "float",
        [DW_F16] = "float", [DW_F32] = "float", [DW_F64] = "double"};
    return names[dtype];
}

static bool draws(dw_op op) { return op == DW_OP_DROPOUT || op == DW_OP_RANDOM_UNIFORM; }

const char *dw__elementwise_element(dw_dtype dtype) { return element_of(dtype); }

/* ---- operands ------------------------------------------------------------------------------------- */

static const char *rounding_of(dw_dtype dtype) {
    return dtype == DW_BF16 ? "round_bf16" : dtype == DW_F16 ? "round_f16" : "";
}

/* A number that has the same bits in CUDA: hexadecimal, or made from its bits. */
static dw_status print_constant(double number, dw_dtype dtype, dw__text *out) {
    if (dtype == DW_BOOL) return dw__text_printf(out, "%s", number != 0.0 ? "true" : "false");
    if (is_integer(dtype))
        return dw__text_printf(out, "(%s)%lldLL", type_of(dtype), (long long)number);
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return dw__text_printf(out, "%s((%s)__longlong_as_double(0x%llxLL))", rounding_of(dtype),
                           type_of(dtype), (unsigned long long)bits);
}

/* The expression of an operand's number in lane j. */
static dw_status print_operand(const dw__body_operand *operand, dw_dtype dtype, dw__text *out) {
    if (operand->source == DW_BODY_CONSTANT) return print_constant(operand->constant, dtype, out);
    return dw__text_printf(out, "%c%u.get(j)", operand->source == DW_BODY_INPUT ? 'i' : 't',
                           operand->index);
}

/* The expression of an operand of BF16 or F16 as lanes. */
static dw_status print_half_lanes(const dw__body_operand *operand, dw_dtype dtype, dw__text *out) {
    const float number = (float)operand->constant;
    if (operand->source == DW_BODY_CONSTANT)
        return dw__text_printf(out, "lanes<%s>::same(0x%x)", element_of(dtype),
                               dtype == DW_BF16 ? dw__f32_to_bf16(number) : dw__f32_to_f16(number));
    return dw__text_printf(out, "%c%u", operand->source == DW_BODY_INPUT ? 'i' : 't',
                           operand->index);
}

/* ---- steps ----------------------------------------------------------------------------------------- */

/* A uniform number is 24 bits times 2^-24. It is compared as an integer, which is exact. */
static dw_status print_draw(const dw__body_code *code, dw__text *out) {
    const bool drops = code->op == DW_OP_DROPOUT;
    const double stream = code->operands[code->operand_count - 1].constant;
    char bits[120];
    snprintf(bits, sizeof bits, "random_bits(key%u, %lldLL, ELEMENT_NUMBER)",
             code->operands[drops].index, (long long)stream);
    if (!drops) return dw__text_printf(out, "(float)%s * 0x1p-24f", bits);
    const double p = code->operands[2].constant, keeps = 1.0 - p;
    DW_RETURN_IF_FAILED(dw__text_printf(out, "%s >= %uu ? ", bits, (unsigned)ceil(p * 0x1p24)));
    DW_RETURN_IF_FAILED(print_operand(&code->operands[0], code->dtype, out));
    DW_RETURN_IF_FAILED(dw__text_printf(out, code->dtype == DW_F64 ? " / " : " * "));
    DW_RETURN_IF_FAILED(print_constant(code->dtype == DW_F64 ? keeps : 1.0 / keeps,
                                       code->dtype == DW_F64 ? DW_F64 : DW_F32, out));
    return dw__text_printf(out, " : 0");
}

static bool may_fail(const dw__body_code *code) {
    return is_integer(code->operand_dtype) &&
           (code->op == DW_OP_DIV || code->op == DW_OP_REM || code->op == DW_OP_POW);
}

/* Functions that have a shorter form for results that are rounded to BF16 or F16. */
static bool has_half_form(dw_op op) {
    switch (op) {
    case DW_OP_EXP:
    case DW_OP_SQRT:
    case DW_OP_RSQRT:
    case DW_OP_RECIPROCAL:
    case DW_OP_DIV:
    case DW_OP_TANH:
    case DW_OP_SIGMOID:
    case DW_OP_SILU:
    case DW_OP_SILU_BACKWARD:
    case DW_OP_SWIGLU:
    case DW_OP_GELU:
    case DW_OP_GELU_BACKWARD: return true;
    default: return false;
    }
}

/* pow with the exponents of squares and cubes; NULL for other calls. */
static const char *power_of(const dw__body_code *code) {
    if (code->op != DW_OP_POW || !dw__dtype_is_float(code->dtype) ||
        code->operands[1].source != DW_BODY_CONSTANT)
        return NULL;
    return code->operands[1].constant == 2.0   ? "square"
           : code->operands[1].constant == 3.0 ? "cube"
                                               : NULL;
}

static dw_status print_name(const dw__body_code *code, dw__text *out) {
    const char *const power = power_of(code);
    if (code->op == DW_OP_CAST) return dw__text_printf(out, "op_cast<%s>", type_of(code->dtype));
    if (power) return dw__text_printf(out, "op_%s", power);
    DW_RETURN_IF_FAILED(dw__text_printf(out, "%s_",
                                        may_fail(code) ? "integer"
                                        : dw__dtype_is_half(code->dtype) && has_half_form(code->op)
                                            ? "half"
                                            : "op"));
    if (code->op == DW_OP_GELU || code->op == DW_OP_GELU_BACKWARD)
        return dw__text_printf(out, "gelu%s%s", code->tanh_approximation ? "_tanh" : "",
                               code->op == DW_OP_GELU ? "" : "_backward");
    return dw__text_printf(out, "%s", dw_op_name(code->op));
}

static dw_status print_apply(const dw__body_code *code, dw__text *out) {
    const int count = power_of(code) ? 1 : code->operand_count;
    DW_RETURN_IF_FAILED(print_name(code, out));
    for (int i = 0; i < count; i++) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, i > 0 ? ", " : "("));
        DW_RETURN_IF_FAILED(
            print_operand(&code->operands[i], dw__body_operand_dtype(code, i), out));
    }
    return dw__text_printf(out, "%s)", may_fail(code) ? ", error" : "");
}

bool dw__elementwise_may_fail(const dw__body *body) {
    for (int i = 0; i < body->code_count; i++)
        if (may_fail(&body->code[i])) return true;
    return false;
}

dw_status dw__elementwise_check(const dw__kernel *kernel, const dw__call *program,
                                const char *what) {
    dw__body *body = dw__calloc(1, sizeof *body);
    if (!body) return dw__fail_memory("an elementwise program", sizeof *body);
    dw_status status = dw__elementwise_body(program, body);
    if (status == DW_OK && dw__elementwise_may_fail(body))
        status = dw__fail(DW_UNSUPPORTED, "%s: the program %s", kernel->name, what);
    dw__free(body);
    return status;
}

bool dw__elementwise_is_random_key(const dw__body *body, uint32_t input) {
    bool is_key = false;
    for (int i = 0; i < body->code_count; i++) {
        const dw__body_code *code = &body->code[i];
        for (int j = 0; j < code->operand_count; j++) {
            const dw__body_operand *operand = &code->operands[j];
            if (operand->source != DW_BODY_INPUT || operand->index != input) continue;
            if (!draws(code->op) || j != (code->op == DW_OP_DROPOUT)) return false;
            is_key = true;
        }
    }
    for (int o = 0; o < body->output_count; o++)
        if (body->outputs[o].source == DW_BODY_INPUT && body->outputs[o].index == input)
            return false;
    return is_key;
}

/* Operations of BF16 and F16 that have instructions for lanes (HALF_OPERATIONS in cuda/common/elementwise.cuh). */
static bool has_lanes(const dw__body_code *code) {
    return dw__dtype_is_half(code->dtype) &&
           (code->op == DW_OP_ADD || code->op == DW_OP_SUB || code->op == DW_OP_MUL ||
            code->op == DW_OP_NEG || code->op == DW_OP_ABS);
}

static dw_status print_step(const dw__body_code *code, int index, dw__text *out) {
    const char *const element = element_of(code->dtype);
    if (!has_lanes(code)) {
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "                LANES_STEP(%s, t%d, ", element, index));
        DW_RETURN_IF_FAILED(draws(code->op) ? print_draw(code, out) : print_apply(code, out));
        return dw__text_printf(out, ")\n");
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "                const lanes<%s> t%d = lanes_%s(",
                                        element, index, dw_op_name(code->op)));
    for (int i = 0; i < code->operand_count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_printf(out, ", "));
        DW_RETURN_IF_FAILED(print_half_lanes(&code->operands[i], code->dtype, out));
    }
    return dw__text_printf(out, ");\n");
}

/* ---- tensors --------------------------------------------------------------------------------------- */

/* Coordinates c0, c1, ... of vector v; that of the last axis counts vectors. */
static dw_status print_coordinates(const dw__elementwise_form *form, dw__text *out) {
    if (!form->divides) return DW_OK;
    DW_RETURN_IF_FAILED(dw__text_printf(out, "            const INDEX r%d = v;\n", form->rank - 1));
    for (int axis = form->rank - 1; axis > 0; axis--) {
        const int word = 3 + 2 * (axis - 1);
        DW_RETURN_IF_FAILED(
            dw__text_printf(out,
                            "            const INDEX r%d = quotient(r%d, p.word[%d], p.word[%d]);\n"
                            "            const INDEX c%d = r%d - r%d * (INDEX)p.word[%d];\n",
                            axis - 1, axis, word, word + 1, axis, axis, axis - 1, word));
    }
    return dw__text_printf(out, "            const INDEX c0 = r0;\n");
}

/* The offset of vector v in a tensor whose words begin at `word`. */
static dw_status print_offset(const dw__elementwise_form *form, const dw__elementwise_place *place,
                              size_t word, dw__text *out) {
    const char *plus = "";
    if (place->is_whole) return dw__text_printf(out, "v * VECTOR");
    if (place->is_vector) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "c%d * VECTOR", form->rank - 1));
        plus = " + ";
    }
    for (int axis = 0; axis < form->rank; axis++) {
        if (!(place->strides >> axis & 1)) continue;
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%sc%d * (INDEX)p.word[%zu]", plus, axis, ++word));
        plus = " + ";
    }
    return *plus ? DW_OK : dw__text_printf(out, "0");
}

static size_t words_of(const dw__elementwise_place *place) {
    size_t words = 1;
    if (!place->is_read) return place->is_seed ? 2 : 0;
    for (int axis = 0; axis < DW_MAX_RANK; axis++) words += place->strides >> axis & 1;
    return words;
}

/* The variables that last from one loop over the turns to the next: what has been loaded, and the outputs' offsets. */
static dw_status print_variables(const dw__elementwise_form *form, size_t word, dw__text *out) {
    for (uint32_t i = 0; i < form->input_count; word += words_of(&form->in[i++])) {
        const dw__elementwise_place *place = &form->in[i];
        if (place->is_read)
            DW_RETURN_IF_FAILED(dw__text_printf(out, "    %s<%s> in%u[TURNS];\n",
                                                place->is_vector ? "vector" : "lanes",
                                                element_of(form->inputs[i]), i));
        else if (place->is_seed)
            DW_RETURN_IF_FAILED(dw__text_printf(
                out, "    const random_key key%u = load_key(p.word[%zu], p.word[%zu]);\n", i, word,
                word + 1));
    }
    for (uint32_t o = 0; o < form->output_count; o++)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "    INDEX at%u[TURNS];\n", o));
    for (uint32_t o = 0; o < form->output_count; o++)
        if (form->magnitudes >> o & 1)
            DW_RETURN_IF_FAILED(
                dw__text_printf(out, "    magnitude<%d> most%u = magnitude<%d>::none();\n",
                                (int)form->outputs[o], o, (int)form->outputs[o]));
    return DW_OK;
}

static dw_status print_loads(const dw__elementwise_form *form, size_t word, dw__text *out) {
    for (uint32_t i = 0; i < form->input_count; word += words_of(&form->in[i++])) {
        const dw__elementwise_place *place = &form->in[i];
        if (!place->is_read) continue;
        DW_RETURN_IF_FAILED(dw__text_printf(
            out, "            in%u[turn] = load_%s<%s>(p.word[%zu], ", i,
            place->is_vector ? "vector" : "same", element_of(form->inputs[i]), word));
        DW_RETURN_IF_FAILED(print_offset(form, place, word, out));
        DW_RETURN_IF_FAILED(dw__text_printf(out, ");\n"));
    }
    for (uint32_t o = 0; o < form->output_count; word += words_of(&form->out[o++])) {
        DW_RETURN_IF_FAILED(dw__text_printf(out, "            at%u[turn] = ", o));
        DW_RETURN_IF_FAILED(print_offset(form, &form->out[o], word, out));
        DW_RETURN_IF_FAILED(dw__text_printf(out, ";\n"));
    }
    return DW_OK;
}

/* ---- the kernel ------------------------------------------------------------------------------------ */

dw_status dw__elementwise_print_steps(const dw__body *body, const dw_dtype *outputs,
                                      dw__text *out) {
    for (int i = 0; i < body->code_count; i++)
        DW_RETURN_IF_FAILED(print_step(&body->code[i], i, out));
    for (uint32_t o = 0; o < body->output_count; o++) {
        const dw__body_operand *result = &body->outputs[o];
        if (result->source != DW_BODY_CONSTANT) {
            DW_RETURN_IF_FAILED(dw__text_printf(out, "                out%u.at[group] = %c%u;\n", o,
                                                result->source == DW_BODY_INPUT ? 'i' : 't',
                                                result->index));
            continue;
        }
        DW_RETURN_IF_FAILED(dw__text_printf(out, "                LANES_STEP(%s, constant%u, ",
                                            element_of(outputs[o]), o));
        DW_RETURN_IF_FAILED(print_operand(result, outputs[o], out));
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, ")\n                out%u.at[group] = constant%u;\n", o, o));
    }
    return DW_OK;
}

/* The elements of `LANES` lanes, from the inputs to the outputs. */
static dw_status print_group(const dw__body *body, const dw__elementwise_form *form,
                             dw__text *out) {
    for (uint32_t i = 0; i < form->input_count; i++)
        if (form->in[i].is_read)
            DW_RETURN_IF_FAILED(dw__text_printf(
                out, "                const lanes<%s> i%u = in%u[turn]%s;\n",
                element_of(form->inputs[i]), i, i, form->in[i].is_vector ? ".at[group]" : ""));
    return dw__elementwise_print_steps(body, form->outputs, out);
}

static dw_status print_stores(const dw__elementwise_form *form, size_t word, dw__text *out) {
    for (uint32_t i = 0; i < form->input_count; i++) word += words_of(&form->in[i]);
    for (uint32_t o = 0; o < form->output_count; word += words_of(&form->out[o++])) {
        DW_RETURN_IF_FAILED(dw__text_printf(
            out, "            if (p.word[%zu]) store_vector(p.word[%zu], at%u[turn], out%u);\n",
            word, word, o, o));
        if (form->magnitudes >> o & 1)
            DW_RETURN_IF_FAILED(
                dw__text_printf(out, "            observe(most%u, out%u);\n", o, o));
    }
    return DW_OK;
}

/* The addresses of magnitudes are the last words. */
static dw_status print_magnitudes(const dw__elementwise_form *form, dw__text *out) {
    size_t word = dw__elementwise_words(form);
    for (uint32_t o = form->output_count; o-- > 0;)
        if (form->magnitudes >> o & 1)
            DW_RETURN_IF_FAILED(dw__text_printf(
                out, "    store_magnitude(p.word[%zu], most%u.found());\n", --word, o));
    return DW_OK;
}

dw_status dw__elementwise_source(const dw__body *body, const dw__elementwise_form *form,
                                 dw__text *out) {
    const size_t words = 3 + (form->divides ? 2 * (size_t)(form->rank - 1) : 0);
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "#define VECTOR %d\n#define TURNS %d\n#define INDEX %s\n#include \"elementwise.cuh\"\n"
        "struct parameters {\n    long long word[%zu];\n};\n"
        "extern \"C\" __global__ void __launch_bounds__(THREADS) elementwise(const "
        "__grid_constant__ parameters p) {\n"
        "    const dw_data_error error = {(unsigned *)p.word[1], (unsigned)p.word[2]};\n"
        "    const INDEX count = (INDEX)p.word[0];\n"
        "    const INDEX first = (INDEX)blockIdx.x * (THREADS * TURNS) + (INDEX)threadIdx.x;\n",
        form->vector, form->turns, form->is_wide ? "long long" : "int",
        dw__elementwise_words(form)));
    DW_RETURN_IF_FAILED(print_variables(form, words, out));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "    EACH(turn, TURNS) {\n"
                                             "        const INDEX v = first + turn * THREADS;\n"
                                             "        if (v < count) {\n"));
    DW_RETURN_IF_FAILED(print_coordinates(form, out));
    DW_RETURN_IF_FAILED(print_loads(form, words, out));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "        }\n    }\n    EACH(turn, TURNS) {\n"
                                             "        const INDEX v = first + turn * THREADS;\n"
                                             "        if (v < count) {\n"));
    for (uint32_t o = 0; o < form->output_count; o++)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "            vector<%s> out%u;\n",
                                            element_of(form->outputs[o]), o));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "            EACH(group, LANE_GROUPS) {\n"));
    DW_RETURN_IF_FAILED(print_group(body, form, out));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "            }\n"));
    DW_RETURN_IF_FAILED(print_stores(form, words, out));
    DW_RETURN_IF_FAILED(dw__text_printf(out, "        }\n    }\n"));
    DW_RETURN_IF_FAILED(print_magnitudes(form, out));
    return dw__text_printf(out, "    (void)error;\n}\n");
}
