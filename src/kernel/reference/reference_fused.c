/* Runs bodies of `fused` nodes element by element: all instructions for one element, then for the next. */
#include "graph/body.h"
#include "kernel/reference/index.h"
#include "kernel/reference/primitives.h"
#include "kernel/reference/scalar.h"
#include "number/philox.h"

typedef struct fused_run {
    const dw__call *call;
    const dw__body *body;
    bool high_precision;
    dw__tensor inputs[DW_MAX_INPUTS]; /* broadcast to the iteration shape; seeds are not */
    dw__scalar results[DW_BODY_MAX_CODE];
    int64_t index[DW_MAX_RANK];
    uint64_t element; /* row-major position of index */
} fused_run;

static dw__scalar operand_value(const fused_run *run, const dw__body_operand *operand,
                                dw_dtype dtype) {
    if (operand->source == DW_BODY_RESULT) return run->results[operand->index];
    if (operand->source == DW_BODY_CONSTANT) {
        dw__scalar constant = dw__scalar_of(operand->constant, dtype);
        bool keeps = run->high_precision && dw__dtype_is_float(dtype);
        return keeps ? constant : dw__scalar_round(constant, dtype);
    }
    const dw__tensor *in = &run->inputs[operand->index];
    return dw__scalar_load(in->data, in->dtype, dw__index_offset(in->rank, in->stride, run->index));
}

/* dropout(x, seed, p, stream): x/(1-p) where the element's random number is at least p, else 0. */
static dw__scalar dropout(const fused_run *run, const dw__body_code *code) {
    const dw__tensor *seed = &run->inputs[code->operands[1].index];
    const int64_t *words = seed->data;
    double p = code->operands[2].constant;
    int64_t stream = (int64_t)code->operands[3].constant;
    double uniform = dw__philox_uniform(words[0], words[seed->stride[0]], stream, run->element);
    dw__scalar x = operand_value(run, &code->operands[0], code->dtype);
    return (dw__scalar){.number = uniform >= p ? x.number / (1.0 - p) : 0.0};
}

static dw_status run_code(const fused_run *run, const dw__body_code *code, dw__scalar *result) {
    if (code->op == DW_OP_DROPOUT) {
        *result = dropout(run, code);
        return DW_OK;
    }
    bool is_select = code->op == DW_OP_SELECT;
    dw__scalar operands[4] = {{.integer = 0}};
    for (int i = 0; i < code->operand_count; i++) {
        dw_dtype dtype = !is_select ? code->operand_dtype : i == 0 ? DW_BOOL : code->dtype;
        operands[i] = operand_value(run, &code->operands[i], dtype);
    }
    if (code->op == DW_OP_CAST) {
        *result = dw__scalar_cast(operands[0], code->operand_dtype, code->dtype);
        return DW_OK;
    }
    return dw__scalar_apply(code->op, code->tanh_approximation, code->operand_dtype, operands,
                            result);
}

static dw_status run_element(fused_run *run) {
    const dw__body *body = run->body;
    for (int i = 0; i < body->code_count; i++) {
        const dw__body_code *code = &body->code[i];
        dw__scalar *result = &run->results[i];
        DW_RETURN_IF_FAILED(run_code(run, code, result));
        bool keeps = run->high_precision && dw__dtype_is_float(code->dtype);
        if (!keeps) *result = dw__scalar_round(*result, code->dtype);
    }
    for (int i = 0; i < body->output_count; i++) {
        const dw__tensor *out = &run->call->outputs[i];
        if (!out->data) continue;
        dw__scalar_store(out->data, out->dtype,
                         dw__index_offset(out->rank, out->stride, run->index),
                         operand_value(run, &body->outputs[i], out->dtype));
    }
    return DW_OK;
}

/* Marks inputs that are dropout seeds. A seed is read as a whole and does not broadcast. */
static void mark_seeds(const dw__body *body, bool *is_seed) {
    for (int i = 0; i < body->code_count; i++)
        if (body->code[i].op == DW_OP_DROPOUT) is_seed[body->code[i].operands[1].index] = true;
}

static dw_status run_body(const dw__call *call, const dw__body *body, bool high_precision) {
    const dw__tensor *out = &call->outputs[0];
    if (dw__tensor_count(out) == 0) return DW_OK;
    fused_run *run = dw__calloc(1, sizeof *run);
    if (!run) return dw__fail_memory("a fused body's registers", sizeof *run);
    dw_status status = DW_OK;
    bool is_seed[DW_MAX_INPUTS] = {false};
    mark_seeds(body, is_seed);
    run->call = call;
    run->body = body;
    run->high_precision = high_precision;
    for (uint32_t i = 0; i < call->input_count; i++)
        run->inputs[i] = is_seed[i] ? call->inputs[i]
                                    : dw__tensor_broadcast(&call->inputs[i], out->rank, out->shape);
    do {
        DW_TRY(run_element(run));
        run->element++;
    } while (dw__index_next(out->rank, out->shape, run->index));
cleanup:
    dw__free(run);
    return status;
}

static dw_status parse_body(const dw__call *call, const dw_dtype *input_dtypes, dw__body **out) {
    const dw_attr *text = dw__call_attr(call, DW_ATTR_KEY_BODY);
    if (!text)
        return dw__fail(DW_INVALID_ARGUMENT, "fused: the node has no body; give the attribute "
                                             "`body`, for example \"t0=exp(i0);out(t0)\"");
    dw__body *body = dw__malloc(sizeof *body);
    if (!body) return dw__fail_memory("a fused body", sizeof *body);
    dw_status status = dw__body_parse(text->string, call->input_count, input_dtypes, body);
    if (status != DW_OK)
        dw__free(body);
    else
        *out = body;
    return status;
}

static void tensor_dtypes(const dw__call *call, dw_dtype *dtypes) {
    for (uint32_t i = 0; i < call->input_count; i++) dtypes[i] = call->inputs[i].dtype;
}

dw_status dw__reference_fused_parse(const dw__call *call, void **prepared) {
    dw_dtype dtypes[DW_MAX_INPUTS];
    dw__body *body = NULL;
    tensor_dtypes(call, dtypes);
    DW_RETURN_IF_FAILED(parse_body(call, dtypes, &body));
    *prepared = body;
    return DW_OK;
}

dw_status dw__reference_fused(const dw__call *call, void *scratch) {
    (void)scratch;
    if (call->prepared) return run_body(call, call->prepared, false);
    dw_dtype dtypes[DW_MAX_INPUTS];
    tensor_dtypes(call, dtypes);
    return dw__fused_evaluate(call, dtypes, false);
}

dw_status dw__fused_evaluate(const dw__call *call, const dw_dtype *input_dtypes,
                             bool high_precision) {
    dw__body *body = NULL;
    DW_RETURN_IF_FAILED(parse_body(call, input_dtypes, &body));
    dw_status status = run_body(call, body, high_precision);
    dw__free(body);
    return status;
}
