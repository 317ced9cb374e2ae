/* Two linear layers of the same x and the elementwise program that reads both results, such as gate, up and SwiGLU of an
 * MLP, as one launch on Hopper (sm90/sm90_pair.cuh): calls of linear that are paired. Both results are rounded to their
 * type before the program reads them, so that all results have the bits of three launches.
 *
 * The source is made from the program's body, as that of elementwise programs is, and includes the GEMM.
 */
#include "kernel/cuda/elementwise.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/program_table.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* A variant is determined by these and by its body. */
typedef struct form {
    dw__sm90_shape shape;
    int result_count;
} form;

enum { X, W, BIAS, OTHER_W, OTHER_BIAS, INPUTS }; /* of a paired call */
enum { VECTOR = 8 };                              /* elements of 16 bytes, as in the source */

static bool computes(dw_op op) { return op == DW_OP_LINEAR; }

/* The two GEMMs of a paired call. */
typedef struct pair {
    dw__gemm_groups_call first, second;
} pair;

/* False: the operands lie in a way that the kernel does not read. */
static bool pair_of(const dw__operation_call *given, pair *p) {
    dw__operation_call other = *given;
    other.call.inputs[W] = given->call.inputs[OTHER_W];
    other.call.inputs[BIAS] = given->call.inputs[OTHER_BIAS];
    other.call.outputs[0] = given->call.outputs[1];
    return dw__graph_gemm_call(given, &p->first) && dw__graph_gemm_call(&other, &p->second);
}

/* Without an epilogue, as in the first-use check, the matrices are the halves of one. */
static bool halves_of(const dw__operation_call *given, pair *p) {
    if (!dw__graph_gemm_call(given, &p->first) || p->first.gemm.n % (2 * VECTOR) != 0) return false;
    p->first.gemm.n /= 2;
    p->second = p->first;
    dw_gemm *const g = &p->second.gemm;
    const int64_t n = g->n, row = p->first.turned.b ? 1 : g->b.stride;
    g->b.data = (char *)g->b.data + 2 * n * row;
    g->d.data = (char *)g->d.data + 2 * n;
    if (g->bias) g->bias = (const char *)g->bias + 2 * n;
    return true;
}

/* Whether the two are alike in all but addresses. */
static bool is_alike(const pair *p) {
    const dw_gemm *a = &p->first.gemm, *b = &p->second.gemm;
    return a->m == b->m && a->n == b->n && a->k == b->k && a->dtype == b->dtype &&
           a->output == b->output && p->first.turned.a == p->second.turned.a &&
           p->first.turned.b == p->second.turned.b && !a->bias == !b->bias;
}

/* A result of the program, with D's elements in rows that vectors store. */
static bool result_of(const dw__tensor *t, const dw_gemm *g, dw_matrix *m) {
    m->data = t->data;
    return t->rank > 0 && t->dtype == g->dtype && t->shape[t->rank - 1] == g->n &&
           dw__tensor_count(t) == g->m * g->n && dw__tensor_row_stride(t, &m->stride) &&
           (g->m == 1 || (m->stride >= g->n && m->stride % VECTOR == 0)) &&
           (uintptr_t)t->data % 16 == 0;
}

/* Fills the program of a call: its results, and the second GEMM. */
static bool program_of(const dw__call *c, const pair *p, dw__sm90_program *made) {
    const dw__call *program = c->epilogue;
    *made = (dw__sm90_program){.second = &p->second.gemm};
    if (program->input_count != 2 || program->output_count > DW_SM90_MOST_RESULTS ||
        program->magnitudes || program->codes || program->summed || program->op == DW_OP_ROPE)
        return false;
    for (uint32_t o = 0; o < program->output_count; o++)
        if (!result_of(&program->outputs[o], &p->first.gemm, &made->results[made->result_count++]))
            return false;
    return true;
}

/* ---- tiles ------------------------------------------------------------------------------------------ */

/* Chooses the tile with the fewest clocks of those that two warpgroups compute together. A GEMM of halves has as many
 * tiles and takes as long. */
static dw__sm90_shape shape_of(const dw__gemm_groups_call *first, int sm_count) {
    enum { BOX_COLUMNS = 64 }; /* of a turned B */
    dw__gemm_groups_call g = *first;
    g.halves = true;
    dw__sm90_shape trial = dw__sm90_shape_of(&g, sm_count), best = trial;
    double least = INFINITY;
    for (int tile = 0; tile < DW__SM90_TILES; tile++) {
        trial.tile = (uint64_t)tile;
        if (!dw__sm90_tiles[tile].together || dw__sm90_tiles[tile].cluster > 0 ||
            !dw__sm90_exists(&trial) ||
            (trial.turned_b && dw__sm90_tile_columns(&trial) % BOX_COLUMNS != 0))
            continue;
        const dw__gemm_cost cost = dw__sm90_cost_of(&g, &trial, sm_count);
        if (cost.clocks * DW__SM90_CLOSE_CLOCKS >= least) continue;
        least = cost.clocks;
        best = trial;
    }
    return best;
}

static unsigned shared_bytes_of(const form *f) {
    const dw__sm90_tile *t = &dw__sm90_tiles[f->shape.tile];
    return DW_SM90_GEMM_SHARED_BYTES(t->m, t->n, t->stages);
}

/* ---- the source ------------------------------------------------------------------------------------- */

/* The shape's defines are part of the source, so that it names the variant. */
static dw_status print_source(const dw__call *c, const dw__body *body, const form *f,
                              dw__text *out) {
    const dw__call *program = c->epilogue;
    const char *const element = dw__elementwise_element(c->outputs[0].dtype);
    const dw__jit_variant v = dw__sm90_variant(&f->shape);
    dw_dtype types[DW_MAX_OUTPUTS];
    for (uint32_t i = 0; i < v.define_count; i++)
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "#define %s %d\n", v.defines[i].name, v.defines[i].value));
    DW_RETURN_IF_FAILED(
        dw__text_printf(out,
                        "#define VECTOR 8\n#define INDEX int\n#include \"elementwise.cuh\"\n"
                        "#define PAIR 1\n#define PAIR_RESULTS %d\ntypedef %s pair_element;\n"
                        "DEVICE void run_program(const vector<%s> *in, vector<%s> *out) {\n",
                        f->result_count, element, element, element));
    for (uint32_t o = 0; o < program->output_count; o++) {
        types[o] = program->outputs[o].dtype;
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "    vector<%s> &out%u = out[%u];\n", element, o, o));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "    EACH(group, LANE_GROUPS) {\n"));
    for (uint32_t i = 0; i < program->input_count; i++)
        DW_RETURN_IF_FAILED(dw__text_printf(
            out, "        const lanes<%s> i%u = in[%d].at[group];\n        (void)i%u;\n", element,
            i, (int)i != c->replaced, i));
    DW_RETURN_IF_FAILED(dw__elementwise_print_steps(body, types, out));
    return dw__text_printf(out, "    }\n}\n#include \"sm90/sm90_gemm.cu\"\n");
}

/* ---- the entry -------------------------------------------------------------------------------------- */

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    const dw__call *c = &given->call;
    pair p;
    dw__sm90_program program;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (dw__epilogues_wanted() == DW__EPILOGUES_OFF)
        return dw__fail(DW_UNSUPPORTED, "%s: DEEPWELL_EPILOGUES is \"off\"", kernel->name);
    if (!c->paired || !c->epilogue || c->input_count != INPUTS || c->output_count != 2 ||
        !pair_of(given, &p) || !is_alike(&p) || p.first.gemm.output != p.first.gemm.dtype ||
        p.first.gemm.n % VECTOR != 0 || p.first.turned.a || !program_of(c, &p, &program))
        return dw__kernel_refuse(kernel);
    DW_RETURN_IF_FAILED(dw__sm90_supports(&p.first.gemm, p.first.turned, gpu));
    DW_RETURN_IF_FAILED(dw__sm90_supports(&p.second.gemm, p.second.turned, gpu));
    return dw__elementwise_check(kernel, c->epilogue, "computes with integers");
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__operation_call *given = call;
    const dw__call *c = &given->call;
    dw_status status = DW_OK;
    dw__text source = {0};
    pair p;
    dw__body *body = dw__calloc(1, sizeof *body);
    if (!body) return dw__fail_memory("an elementwise program", sizeof *body);
    (void)pair_of(given, &p);
    const form f = {.shape = shape_of(&p.first, context->sm_count),
                    .result_count = (int)c->epilogue->output_count};
    DW_TRY(dw__elementwise_body(c->epilogue, body));
    DW_TRY(print_source(c, body, &f, &source));
    DW_TRY(dw__program_variant(context, kernel, &source, &f, sizeof f, variant));
cleanup:
    dw__text_free(&source);
    dw__free(body);
    return status;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *given = call;
    const form *f = dw__program_at(variant->params)->form;
    pair p;
    dw__sm90_program program = {.second = &p.second.gemm, .result_count = f->result_count};
    (void)(given->call.epilogue ? pair_of(given, &p) : halves_of(given, &p));
    if (dw__gemm_is_empty(&p.first.gemm)) return DW_OK;
    if (given->call.epilogue) (void)program_of(&given->call, &p, &program);
    program.shared_bytes = shared_bytes_of(f);
    return dw__sm90_launch(&p.first, &program, f->shape, context, variant);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const dw__program *program = dw__program_at(params);
    (void)kernel;
    points->code = (dw__jit_variant){.source = "sm90_pair",
                                     .text = program->source,
                                     .entry = "sm90_gemm",
                                     .arch = dw__gpu_arch(capability)};
    points->shared_bytes = shared_bytes_of(program->form);
    return DW_OK;
}

/* Bytes that the launch reads and writes: A, both matrices B, and all results. */
static double bytes_of(const dw__call *c, const dw_gemm *g) {
    enum { WIDTH = 2 };
    const double m = (double)g->m, n = (double)g->n, k = (double)g->k,
                 stored = (c->outputs[0].data != NULL) + (c->outputs[1].data != NULL) +
                          (double)c->epilogue->output_count;
    return WIDTH * (m * k + 2.0 * n * k + stored * m * n);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__operation_call *given = call;
    pair p;
    (void)kernel;
    snprintf(result->from, sizeof result->from, "the least by counted work, nothing measured");
    if (!given->call.paired || !given->call.epilogue || !pair_of(given, &p)) return;
    const dw__sm90_shape shape = shape_of(&p.first, gpu->sm_count);
    dw__gemm_groups_call both = p.first;
    both.halves = true;
    const dw__gemm_cost cost = dw__sm90_cost_of(&both, &shape, gpu->sm_count);
    both.gemm.n *= 2;
    result->seconds = fmax(dw__gemm_least_seconds(&both.gemm, gpu, &cost, DW__SM90_FLOPS_PER_CLOCK),
                           bytes_of(&given->call, &p.first.gemm) / gpu->bytes);
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

/* One layer whose halves stand for two: edges in every direction, more steps than a ring has stages, and several tiles
 * for a block. */
static void example(uint64_t params, int index, dw__call *c) {
    const dw__sm90_shape s = ((const form *)dw__program_at(params)->form)->shape;
    dw__sm90_example_linear(&s, index, 2 * (72 + 128 * index), c);
}

const dw__kernel dw__sm90_linear_pair = {
    .name = "sm90_linear_pair",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .operation = "two linear layers of the same input with the elementwise program behind them",
    .proof = DW__MEASURED_ON_HARDWARE,
    .source = "src/kernel/cuda/sm90_pair.c, cuda/sm90/sm90_pair.cuh",
    .architectures = "sm_90a (H100, H200)",
    .elements = "BF16, F16",
    .needs =
        "NVRTC: the source is made for each program; two linear layers of one input and shape, "
        "both with a bias or both without, rows of 16-byte multiples, and a program that reads "
        "their results alone and has at most 4 results of their type",
    .supports = supports,
    .seconds = seconds,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = entry_points,
    .first_use = &dw__operation_first_use,
    .example = example,
    .example_sms = 3,
    .with_epilogue = true,
    .results = DW__RESULTS_IN_ROWS,
    .tolerance =
        "sums in F32, then each product's rounding, against FP64; the program as elementwise "
        "programs",
    .tolerance_factor = 8.0,
};
