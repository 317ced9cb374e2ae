/* Elementwise programs whose results become codes of fp8-block as they are computed (cuda/common/program_codes.cuh): calls
 * with `codes` (dw__call). Codes and scales have the bits of the program and quantize_tiles behind it.
 *
 * The source is made from the program's body, as that of elementwise programs is.
 */
#include "common/program_codes_params.h"
#include "kernel/cuda/elementwise.h"
#include "kernel/cuda/fp8_block_codes.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/program_table.h"

enum { VECTOR = 8 };

/* A variant is determined by these and by its body. Results that become codes come first in `order`. */
typedef struct form {
    uint32_t operands, results, coded;
    uint32_t order[DW_PROGRAM_CODES_MOST_RESULTS]; /* the call's outputs */
    unsigned shared_bytes;
} form;

static bool computes(dw_op op) { return op == DW_OP_FUSED || dw_op_is_elementwise(op); }

/* ---- tensors --------------------------------------------------------------------------------------- */

/* A tensor of `rows` x `columns` elements in rows of whole vectors. */
static bool matrix_of(const dw__tensor *t, dw_dtype dtype, int64_t rows, int64_t columns,
                      dw_program_matrix *m) {
    int64_t stride = 0;
    if (t->rank < 1 || t->dtype != dtype || t->shape[t->rank - 1] != columns ||
        dw__tensor_count(t) != rows * columns || !dw__tensor_row_stride(t, &stride) ||
        (uintptr_t)t->data % 16 != 0)
        return false;
    *m = (dw_program_matrix){t->data, stride};
    return rows == 1 || (stride >= columns && stride % VECTOR == 0);
}

static bool form_of(const dw__call *c, form *f) {
    *f = (form){.operands = c->input_count, .results = dw__call_own_outputs(c)};
    if (f->operands < 1 || f->operands > DW_PROGRAM_CODES_MOST_OPERANDS ||
        f->results > DW_PROGRAM_CODES_MOST_RESULTS)
        return false;
    uint32_t count = 0;
    for (int coded = 1; coded >= 0; coded--)
        for (uint32_t o = 0; o < f->results; o++)
            if ((int)(c->codes >> o & 1) == coded)
                f->order[count++] = o, f->coded += (uint32_t)coded;
    f->shared_bytes = DW_PROGRAM_CODES_SHARED_BYTES(f->operands);
    return f->coded >= 1 && f->coded - 1 <= f->operands;
}

/* Fills the parameters; false: the tensors lie in a way that the kernel does not read. */
static bool params_of(const dw__call *c, const form *f, dw_program_codes_params *p) {
    const dw__tensor *y = &c->outputs[0];
    *p = (dw_program_codes_params){0};
    if (y->rank < 1 || !dw__dtype_is_half(y->dtype)) return false;
    const int64_t columns = y->shape[y->rank - 1], count = dw__tensor_count(y),
                  rows = columns ? count / columns : 0, most = INT32_MAX - 1024;
    if (count == 0 || columns % VECTOR != 0 || rows > most || columns > most ||
        dw__fp8_block_tiles(rows) * dw__fp8_block_tiles(columns) > most)
        return false;
    for (uint32_t i = 0; i < f->operands; i++)
        if (!matrix_of(&c->inputs[i], y->dtype, rows, columns, &p->operands[i])) return false;
    for (uint32_t r = 0; r < f->results; r++)
        if (!matrix_of(&c->outputs[f->order[r]], y->dtype, rows, columns, &p->results[r]))
            return false;
    for (uint32_t r = 0; r < f->coded; r++) {
        const dw__tensor *out = &c->outputs[f->results + 4 * r];
        if (out[DW__FP8_CODES].shape[0] != rows || out[DW__FP8_TURNED].shape[0] != columns)
            return false;
        p->codes[r] = dw__fp8_block_results(rows, columns, out);
    }
    return true;
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw_program_codes_params p;
    form f;
    if (gpu && gpu->capability != 90)
        return dw__fail(DW_TYPE, "%s is for %s, not for %s", kernel->name, kernel->architectures,
                        gpu->name);
    if (dw__epilogues_wanted() == DW__EPILOGUES_OFF)
        return dw__fail(DW_UNSUPPORTED, "%s: DEEPWELL_EPILOGUES is \"off\"", kernel->name);
    if (!form_of(c, &f) || !params_of(c, &f, &p)) return dw__kernel_refuse(kernel);
    /* Keys of random numbers are no operands in 16 bits, so that no program draws any. */
    return dw__elementwise_check(kernel, c, "divides integers");
}

/* ---- the source ------------------------------------------------------------------------------------- */

static dw_status print_source(const dw__call *c, const dw__body *body, const form *f,
                              dw__text *out) {
    const char *const element = dw__elementwise_element(c->outputs[0].dtype);
    dw_dtype types[DW_MAX_OUTPUTS];
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "#define VECTOR 8\n#define INDEX int\n#include \"elementwise.cuh\"\n"
        "#define TYPE %d\n#define OPERANDS %u\n#define RESULTS %u\n#define CODED %u\n"
        "typedef %s program_element;\n"
        "DEVICE void run_program(const vector<%s> *in, vector<%s> *out) {\n",
        dw__gpu_element(c->outputs[0].dtype), f->operands, f->results, f->coded, element, element,
        element));
    for (uint32_t r = 0; r < f->results; r++) {
        types[r] = c->outputs[0].dtype;
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "    vector<%s> &out%u = out[%u];\n", element, f->order[r], r));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "    EACH(group, LANE_GROUPS) {\n"));
    for (uint32_t i = 0; i < f->operands; i++)
        DW_RETURN_IF_FAILED(dw__text_printf(
            out, "        const lanes<%s> i%u = in[%u].at[group];\n", element, i, i));
    DW_RETURN_IF_FAILED(dw__elementwise_print_steps(body, types, out));
    return dw__text_printf(out, "    }\n}\n#include \"program_codes.cuh\"\n");
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw_status status = DW_OK;
    dw__text source = {0};
    form f;
    dw__body *body = dw__calloc(1, sizeof *body);
    if (!body) return dw__fail_memory("an elementwise program", sizeof *body);
    (void)form_of(c, &f);
    DW_TRY(dw__elementwise_body(c, body));
    DW_TRY(print_source(c, body, &f, &source));
    DW_TRY(dw__program_variant(context, kernel, &source, &f, sizeof f, variant));
cleanup:
    dw__text_free(&source);
    dw__free(body);
    return status;
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const dw__program *program = dw__program_at(params);
    (void)kernel;
    points->code = (dw__jit_variant){.source = "program_codes",
                                     .text = program->source,
                                     .entry = "program_codes",
                                     .arch = dw__gpu_arch(capability)};
    points->shared_bytes = ((const form *)program->form)->shared_bytes;
    return DW_OK;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *given = call;
    const form *f = dw__program_at(variant->params)->form;
    const int64_t resident = (int64_t)context->sm_count * DW_FP8_BLOCK_RESIDENT;
    dw_program_codes_params p;
    void *arguments[] = {&p};
    (void)params_of(&given->call, f, &p);
    const int64_t tiles = p.codes[0].tiles;
    return context->device->launch(&(dw__launch){
        .name = "program_codes",
        .function = variant->functions[0],
        .grid = {(unsigned)(tiles < resident ? tiles : resident), 1, 1},
        .block = {DW_FP8_BLOCK_THREADS, 1, 1},
        .shared_bytes = f->shared_bytes,
        .stream = given->stream,
        .arguments = arguments,
    });
}

/* The bytes of operands, codes and scales, and of results that are stored. */
static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    dw__gpu_seconds_of_bytes(kernel, call, gpu, result);
    for (uint32_t o = 0; o < dw__call_own_outputs(c); o++)
        if (!c->outputs[o].data)
            result->seconds -= (double)dw__tensor_bytes(&c->outputs[o]) / gpu->bytes;
}

const dw__kernel dw__gpu_program_codes = {
    .name = "sm90_program_codes",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__MEASURED_ON_HARDWARE,
    .operation = "elementwise programs whose results become codes of fp8-block",
    .source = "src/kernel/cuda/program_codes.c, cuda/common/program_codes.cuh",
    .architectures = "sm_90a (H100, H200)",
    .elements = "BF16, F16; codes of fp8-block",
    .needs = "NVRTC: the source is made for each program; at most 4 operands and 4 results of one "
             "type and shape, in rows of 16-byte multiples",
    .makes_codes = true,
    .supports = supports,
    .seconds = seconds,
    .results = DW__RESULTS_IN_ROWS,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    /* No first-use check, as elementwise programs have none (elementwise.c). */
    .tolerance = "every byte is that of the elementwise program and quantize_tiles",
};
