/* CUDA source of elementwise programs: one loop over the elements, one variable for each step of the body.
 *
 * Equal sources must be launched alike (elementwise.c), so each input that is used, seeds too, is named by its number.
 */
#include "graph/internal.h"
#include "kernel/cuda/elementwise.h"
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
/* The operand of an instruction that draws random numbers which is the seed. */
static int seed_operand(dw_op op) { return op == DW_OP_DROPOUT ? 1 : 0; }

static bool is_used(const dw__elementwise_types *types, uint32_t input) {
    return types->is_read[input] || types->is_seed[input];
}

void dw__elementwise_mark(const dw__body *body, dw__elementwise_types *types) {
    memset(types->is_read, 0, sizeof types->is_read);
    memset(types->is_seed, 0, sizeof types->is_seed);
    for (int i = 0; i < body->code_count; i++) {
        const dw__body_code *code = &body->code[i];
        for (int j = 0; j < code->operand_count; j++) {
            const dw__body_operand *operand = &code->operands[j];
            if (operand->source != DW_BODY_INPUT) continue;
            const bool is_seed = draws(code->op) && j == seed_operand(code->op);
            (is_seed ? types->is_seed : types->is_read)[operand->index] = true;
        }
    }
    for (int i = 0; i < body->output_count; i++)
        if (body->outputs[i].source == DW_BODY_INPUT) types->is_read[body->outputs[i].index] = true;
}

size_t dw__elementwise_words(const dw__elementwise_types *types) {
    size_t tensors = types->output_count;
    for (uint32_t i = 0; i < types->input_count; i++) tensors += is_used(types, i);
    return 3 + (size_t)types->rank + tensors * (1 + (size_t)types->rank);
}

/* ---- operands ------------------------------------------------------------------------------------- */

/* A number that has the same bits in CUDA: hexadecimal, or made from its bits. */
static dw_status print_constant(double number, dw_dtype dtype, dw__text *out) {
    if (dtype == DW_BOOL) return dw__text_printf(out, "%s", number != 0.0 ? "true" : "false");
    if (is_integer(dtype))
        return dw__text_printf(out, "(%s)%lldLL", type_of(dtype), (long long)number);
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    const char *rounding = dtype == DW_BF16 ? "round_bf16" : dtype == DW_F16 ? "round_f16" : "";
    return dw__text_printf(out, "%s((%s)__longlong_as_double(0x%llxLL))", rounding, type_of(dtype),
                           (unsigned long long)bits);
}

static dw_status print_operand(const dw__body_operand *operand, dw_dtype dtype, dw__text *out) {
    if (operand->source == DW_BODY_CONSTANT) return print_constant(operand->constant, dtype, out);
    return dw__text_printf(out, "%c%u", operand->source == DW_BODY_INPUT ? 'i' : 't',
                           operand->index);
}

/* Declares the element's offset in an input ('i') or output ('o'), whose words begin at *word, and goes on to the next. */
static dw_status print_place(char kind, uint32_t index, int rank, size_t *word, dw__text *out) {
    DW_RETURN_IF_FAILED(dw__text_printf(out, "        const long long at_%c%u = c0 * p.word[%zu]",
                                        kind, index, *word + 1));
    for (int axis = 1; axis < rank; axis++)
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, " + c%d * p.word[%zu]", axis, *word + 1 + (size_t)axis));
    *word += 1 + (size_t)rank;
    return dw__text_printf(out, ";\n");
}

/* ---- steps ----------------------------------------------------------------------------------------- */

static dw_status print_draw(const dw__body_code *code, const size_t *seed_words, dw__text *out) {
    const uint32_t seed = code->operands[seed_operand(code->op)].index;
    const double stream = code->operands[code->operand_count - 1].constant;
    char uniform[160];
    snprintf(uniform, sizeof uniform, "uniform(i%u, p.word[%zu], %lldLL, e)", seed,
             seed_words[seed] + 1, (long long)stream);
    if (code->op == DW_OP_RANDOM_UNIFORM) return dw__text_printf(out, "%s", uniform);
    const double p = code->operands[2].constant;
    uint64_t bits, kept;
    const double keeps = 1.0 - p;
    memcpy(&bits, &p, sizeof bits);
    memcpy(&kept, &keeps, sizeof kept);
    DW_RETURN_IF_FAILED(dw__text_printf(out, "(double)%s >= __longlong_as_double(0x%llxLL) ? (%s)(",
                                        uniform, (unsigned long long)bits, type_of(code->dtype)));
    DW_RETURN_IF_FAILED(print_operand(&code->operands[0], code->dtype, out));
    return dw__text_printf(out, " / __longlong_as_double(0x%llxLL)) : (%s)0",
                           (unsigned long long)kept, type_of(code->dtype));
}

static bool may_fail(const dw__body_code *code) {
    return is_integer(code->operand_dtype) &&
           (code->op == DW_OP_DIV || code->op == DW_OP_REM || code->op == DW_OP_POW);
}

static dw_status print_apply(const dw__body_code *code, dw__text *out) {
    const bool tanh = code->tanh_approximation && code->op != DW_OP_CAST;
    if (code->op == DW_OP_GELU || code->op == DW_OP_GELU_BACKWARD)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "op_gelu%s%s(", tanh ? "_tanh" : "",
                                            code->op == DW_OP_GELU ? "" : "_backward"));
    else if (code->op == DW_OP_CAST)
        DW_RETURN_IF_FAILED(dw__text_printf(out, "op_cast<%s>(", type_of(code->dtype)));
    else
        DW_RETURN_IF_FAILED(dw__text_printf(out, "%s_%s(", may_fail(code) ? "integer" : "op",
                                            dw_op_name(code->op)));
    for (int i = 0; i < code->operand_count; i++) {
        if (i > 0) DW_RETURN_IF_FAILED(dw__text_printf(out, ", "));
        DW_RETURN_IF_FAILED(
            print_operand(&code->operands[i], dw__body_operand_dtype(code, i), out));
    }
    return dw__text_printf(out, "%s)", may_fail(code) ? ", error" : "");
}

static dw_status print_step(const dw__body_code *code, int index, const size_t *seed_words,
                            dw__text *out) {
    const char *rounding = code->dtype == DW_BF16  ? "round_bf16"
                           : code->dtype == DW_F16 ? "round_f16"
                                                   : "";
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "        const %s t%d = %s(", type_of(code->dtype), index, rounding));
    DW_RETURN_IF_FAILED(draws(code->op) ? print_draw(code, seed_words, out)
                                        : print_apply(code, out));
    return dw__text_printf(out, ");\n");
}

/* ---- the kernel ------------------------------------------------------------------------------------ */

static dw_status print_coordinates(int rank, dw__text *out) {
    if (rank == 1) return dw__text_printf(out, "        const long long c0 = e;\n");
    DW_RETURN_IF_FAILED(
        dw__text_printf(out, "        unsigned long long rest = (unsigned long long)e;\n"));
    for (int axis = rank - 1; axis > 0; axis--)
        DW_RETURN_IF_FAILED(dw__text_printf(
            out,
            "        const long long c%d = (long long)(rest %% (unsigned long long)p.word[%d]);\n"
            "        rest /= (unsigned long long)p.word[%d];\n",
            axis, 3 + axis, 3 + axis));
    return dw__text_printf(out, "        const long long c0 = (long long)rest;\n");
}

static dw_status print_tensors(const dw__elementwise_types *types, size_t *seed_words,
                               size_t *output_words, dw__text *out) {
    size_t word = 3 + (size_t)types->rank;
    for (uint32_t i = 0; i < types->input_count; i++) {
        if (!is_used(types, i)) continue;
        seed_words[i] = word;
        if (types->is_seed[i]) {
            DW_RETURN_IF_FAILED(dw__text_printf(
                out, "        const long long *const i%u = (const long long *)p.word[%zu];\n", i,
                word));
            word += 1 + (size_t)types->rank;
            continue;
        }
        const size_t address = word;
        DW_RETURN_IF_FAILED(print_place('i', i, types->rank, &word, out));
        DW_RETURN_IF_FAILED(dw__text_printf(
            out, "        const %s i%u = %s::load((const void *)p.word[%zu], at_i%u);\n",
            type_of(types->inputs[i]), i, element_of(types->inputs[i]), address, i));
    }
    for (uint32_t o = 0; o < types->output_count; o++) {
        output_words[o] = word;
        DW_RETURN_IF_FAILED(print_place('o', o, types->rank, &word, out));
    }
    return DW_OK;
}

dw_status dw__elementwise_source(const dw__body *body, const dw__elementwise_types *types,
                                 dw__text *out) {
    size_t seed_words[DW_MAX_INPUTS], output_words[DW_MAX_OUTPUTS];
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "#include \"elementwise.cuh\"\n"
        "struct parameters {\n    long long word[%zu];\n};\n"
        "extern \"C\" __global__ void __launch_bounds__(256) elementwise(const __grid_constant__ "
        "parameters p) {\n"
        "    const dw_data_error error = {(unsigned *)p.word[1], (unsigned)p.word[2]};\n"
        "    for (long long e = blockIdx.x * 256LL + threadIdx.x; e < p.word[0]; e += gridDim.x * "
        "256LL) {\n",
        dw__elementwise_words(types)));
    DW_RETURN_IF_FAILED(print_coordinates(types->rank, out));
    DW_RETURN_IF_FAILED(print_tensors(types, seed_words, output_words, out));
    for (int i = 0; i < body->code_count; i++)
        DW_RETURN_IF_FAILED(print_step(&body->code[i], i, seed_words, out));
    for (uint32_t o = 0; o < types->output_count; o++) {
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "        if (p.word[%zu]) %s::store((void *)p.word[%zu], at_o%u, ",
                            output_words[o], element_of(types->outputs[o]), output_words[o], o));
        DW_RETURN_IF_FAILED(print_operand(&body->outputs[o], types->outputs[o], out));
        DW_RETURN_IF_FAILED(dw__text_printf(out, ");\n"));
    }
    return dw__text_printf(out, "    }\n    (void)error;\n}\n");
}
