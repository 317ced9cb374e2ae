/* A product and the elementwise program or the rope behind it as one launch on Hopper (sm90/sm90_program.cuh): linear
 * layers, matmul and segment_linear whose call has an epilogue. The product is rounded to its type before the program reads it, so that
 * results have the bits of two launches.
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
    int stages, operand_count, vector_count, result_count;
    uint64_t summed; /* as in dw__call */
    bool whole;      /* rows of whole vectors */
    bool draws;      /* random numbers */
    dw__sm90_rope_form rope;
    unsigned shared_bytes;
} form;

enum { VECTOR = 8 };      /* elements of 16 bytes, as in the source */
enum { TILE_ROWS = 128 }; /* of each tile that two warpgroups compute together */

static uint32_t results_of(const dw__call *program) { return dw__call_own_outputs(program); }

static bool computes_linear(dw_op op) { return op == DW_OP_LINEAR || op == DW_OP_MATMUL; }
static bool computes_segments(dw_op op) { return op == DW_OP_SEGMENT_LINEAR; }

/* The GEMM of a call; its n is that of the program. False: the operands lie in a way that the kernel does not read. */
static bool gemm_of(const dw__operation_call *given, bool halves, dw__gemm_groups_call *g) {
    if (given->call.op == DW_OP_SEGMENT_LINEAR ? !dw__segment_gemm_call(given, g)
                                               : !dw__graph_gemm_call(given, g))
        return false;
    g->halves = halves;
    if (!halves) return true;
    if (g->gemm.n % (2 * VECTOR) != 0) return false;
    g->gemm.n /= 2;
    return true;
}

static bool call_of(const dw__operation_call *given, dw__gemm_groups_call *g) {
    return gemm_of(given, given->call.replaced_half >= 0, g);
}

/* ---- tensors of the program ------------------------------------------------------------------------ */

/* A tensor with D's elements, in rows that TMA loads and vectors store. */
static bool matrix_of(const dw__tensor *t, const dw_gemm *g, dw_matrix *m) {
    m->data = t->data;
    return t->rank > 0 && t->dtype == g->dtype && t->shape[t->rank - 1] == g->n &&
           dw__tensor_count(t) == g->m * g->n && dw__tensor_row_stride(t, &m->stride) &&
           (g->m == 1 ||
            (m->stride >= g->n && m->stride <= INT32_MAX && m->stride % VECTOR == 0)) &&
           (uintptr_t)t->data % 16 == 0;
}

/* An element for each row of D. */
static bool vector_of(const dw__tensor *t, const dw_gemm *g, dw_matrix *m) {
    m->data = t->data;
    return t->rank > 0 && t->dtype == g->dtype && t->shape[t->rank - 1] == 1 && g->n > 1 &&
           dw__tensor_count(t) == g->m && dw__tensor_row_stride(t, &m->stride);
}

/* Whether input `i` of the program is neither the product nor one of its halves. */
static bool is_other(const dw__call *c, uint32_t i) {
    return (int)i != c->replaced && (int)i != c->replaced_half && c->epilogue->inputs[i].rank >= 0;
}

/* Seed and offset of random numbers, which a program reads as a whole. */
static bool is_random_key(const dw__tensor *t) {
    return t->dtype == DW_I64 && t->rank == 1 && t->shape[0] == 2;
}

/* Adds one of the program's inputs but the product. */
static bool add_input(const dw__tensor *t, const dw_gemm *g, dw__sm90_program *p) {
    if (!p->draws && is_random_key(t)) {
        p->draws = true;
        p->random_key = t->data;
        p->random_key_stride = t->stride[0];
        return true;
    }
    if (p->vector_count < DW_SM90_MOST_VECTORS && vector_of(t, g, &p->vectors[p->vector_count])) {
        p->vector_count++;
        return true;
    }
    return p->operand_count < DW_SM90_MOST_OPERANDS &&
           matrix_of(t, g, &p->operands[p->operand_count++]);
}

/* Fills the program's operands and vectors, which are its inputs but the product, in order, and its results. */
static bool matrices_of(const dw__call *c, const dw_gemm *g, dw__sm90_program *p) {
    const dw__call *program = c->epilogue;
    *p = (dw__sm90_program){0};
    if (program->op == DW_OP_ROPE) {
        p->result_count = 1;
        return c->op != DW_OP_SEGMENT_LINEAR && c->replaced_half < 0 && program->summed == 0 &&
               dw__sm90_rope_of(program, g, &p->rope_form, &p->rope);
    }
    if (program->magnitudes || program->codes || results_of(program) > DW_SM90_MOST_RESULTS)
        return false;
    for (uint32_t i = 0; i < program->input_count; i++)
        if (is_other(c, i) && !add_input(&program->inputs[i], g, p)) return false;
    for (uint32_t o = 0; o < results_of(program); o++)
        if (!matrix_of(&program->outputs[o], g, &p->results[p->result_count++])) return false;
    return true;
}

/* ---- sums of results' columns ----------------------------------------------------------------------- */

static int64_t tile_rows_of(const dw_gemm *g) { return (g->m + TILE_ROWS - 1) / TILE_ROWS; }

/* Whether the sums that a call asks for are those of one product, in vectors of its type. */
static bool can_sum(const dw__call *c, const dw__gemm_groups_call *g) {
    const dw__call *program = c->epilogue;
    if (program->summed == 0) return true;
    for (uint32_t o = results_of(program); o < program->output_count; o++) {
        const dw__tensor *sums = &program->outputs[o];
        if (sums->dtype != g->gemm.dtype || dw__tensor_count(sums) != g->gemm.n ||
            !dw__tensor_is_contiguous(sums))
            return false;
    }
    return c->op != DW_OP_SEGMENT_LINEAR && g->groups.count == 1;
}

/* The workspace has the partial sums of one result after the other. */
static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    const dw__operation_call *given = call;
    const dw__call *program = given->call.epilogue;
    dw__gemm_groups_call g;
    (void)kernel;
    (void)context;
    *bytes = 0;
    if (!program || !program->summed || !call_of(given, &g)) return DW_OK;
    *bytes = (program->output_count - results_of(program)) * sizeof(float) *
             (size_t)(tile_rows_of(&g.gemm) * g.gemm.n);
    return DW_OK;
}

/* Places the partial sums that are wanted. */
static void place_sums(const dw__operation_call *given, const dw_gemm *g, dw__sm90_program *p) {
    const dw__call *program = given->call.epilogue;
    float *next = given->workspace;
    uint32_t sums = results_of(program);
    for (int o = 0; program->summed >> o; o++) {
        if (!(program->summed >> o & 1)) continue;
        if (program->outputs[sums++].data) p->sums[o] = next;
        next += tile_rows_of(g) * g->n;
    }
}

/* Adds the partial sums, which the product's launch has written. */
static dw_status add_sums(const dw__operation_call *given, const dw_gemm *g,
                          const dw__sm90_program *p, const dw__context *context,
                          const dw__variant *variant) {
    const dw__call *program = given->call.epilogue;
    uint32_t sums = results_of(program);
    for (int o = 0; program->summed >> o; o++) {
        if (!(program->summed >> o & 1)) continue;
        const dw__tensor *to = &program->outputs[sums++];
        if (p->sums[o])
            DW_RETURN_IF_FAILED(dw__gpu_sum_parts(given, context, variant->functions[1], p->sums[o],
                                                  tile_rows_of(g), to));
    }
    return DW_OK;
}

/* ---- bodies ------------------------------------------------------------------------------------------ */

/* True if the body's results have no data errors, and tensors of integers are keys of random numbers alone. */
static bool is_computed(const dw__body *body, const dw__call *program) {
    for (uint32_t i = 0; i < program->input_count; i++)
        if (program->inputs[i].dtype == DW_I64 && !dw__elementwise_is_random_key(body, i))
            return false;
    return !dw__elementwise_may_fail(body);
}

static dw_status check_body(const dw__kernel *kernel, const dw__call *program) {
    if (program->op == DW_OP_ROPE) return DW_OK;
    dw__body *body = dw__calloc(1, sizeof *body);
    if (!body) return dw__fail_memory("an elementwise program", sizeof *body);
    dw_status status = dw__elementwise_body(program, body);
    if (status == DW_OK && !is_computed(body, program))
        status = dw__fail(DW_UNSUPPORTED, "%s: the program computes with integers", kernel->name);
    dw__free(body);
    return status;
}

/* ---- tiles ------------------------------------------------------------------------------------------ */

static unsigned shared_bytes_of(const dw__sm90_tile *t, const form *f) {
    const int columns = dw__sm90_tile_columns(&f->shape);
    return DW_SM90_PROGRAM_SHARED_BYTES(t->m, t->n, f->stages, f->shape.bias) +
           (f->summed ? DW_SM90_SUM_BYTES(columns) : 0);
}

/* Whether a thread has registers for the sums of its columns. */
static bool holds_sums(const form *f) {
    const int columns = dw__sm90_tile_columns(&f->shape);
    int sums = 0;
    for (uint64_t left = f->summed; left; left &= left - 1) sums++;
    return sums * DW_SM90_SUM_PHASES(columns) <= 3;
}

/* As many stages of a tile as there is room for beside its rows. */
static bool fits(form *f) {
    enum { LEAST_STAGES = 3 };
    const dw__sm90_tile *t = &dw__sm90_tiles[f->shape.tile];
    if (f->shape.halves && t->n % 128 != 0 && f->shape.turned_b)
        return false; /* no whole boxes of half a tile's columns */
    if (!holds_sums(f) || !dw__sm90_rope_fits(&f->rope, t->n)) return false;
    f->stages = t->stages;
    while (f->stages > LEAST_STAGES && shared_bytes_of(t, f) > DW_SM90_MOST_SHARED) f->stages--;
    f->shared_bytes = shared_bytes_of(t, f);
    return f->shared_bytes <= DW_SM90_MOST_SHARED;
}

/* Chooses the tile with the fewest clocks of those that two warpgroups compute together. Three stages do not bridge the
 * time that loads take beside a program's traffic: products took 1.02 to 1.10 times as long as with four. Each tile
 * takes some 2500 clocks more, in which its rows are rounded and handed over. Where a thread's columns change, sums
 * over rows took some 600 clocks of a tile, and else none (bench/NOTES.md). */
static form form_of(const dw__gemm_groups_call *g, const dw__sm90_program *p, uint64_t summed,
                    int sm_count) {
    form best = {0}, trial = {.shape = dw__sm90_shape_of(g, sm_count),
                              .operand_count = p->operand_count,
                              .vector_count = p->vector_count,
                              .result_count = p->result_count,
                              .summed = summed,
                              .whole = g->gemm.n % VECTOR == 0,
                              .draws = p->draws,
                              .rope = p->rope_form};
    const double few_stages = 1.06, hand_over = 2500.0, sum_clocks = 600.0;
    double least = INFINITY;
    for (int tile = 0; tile < DW__SM90_TILES; tile++) {
        trial.shape.tile = (uint64_t)tile;
        if (!dw__sm90_tiles[tile].together || dw__sm90_tiles[tile].cluster > 0 ||
            !dw__sm90_exists(&trial.shape) || !fits(&trial))
            continue;
        const dw__gemm_cost cost = dw__sm90_cost_of(g, &trial.shape, sm_count);
        const bool moves = summed && DW_SM90_SUM_PHASES(dw__sm90_tile_columns(&trial.shape)) > 1;
        const double clocks = cost.clocks * (trial.stages < 4 ? few_stages : 1.0) +
                              (hand_over + (moves ? sum_clocks : 0.0)) * (double)cost.rounds;
        if (clocks * DW__SM90_CLOSE_CLOCKS >= least) continue;
        least = clocks;
        best = trial;
    }
    return best;
}

static bool finds_tile(const dw__gemm_groups_call *g, const dw__sm90_program *p, uint64_t summed) {
    return form_of(g, p, summed, 1).stages > 0;
}

/* ---- the source ------------------------------------------------------------------------------------- */

/* Prints the variable of input `i` of the program. `operands` and `vectors` count those in front of it. */
static dw_status print_input(const dw__call *c, uint32_t i, const char *element, int *operands,
                             int *vectors, dw__text *out) {
    const dw__tensor *t = &c->epilogue->inputs[i];
    const int parts = c->replaced_half < 0 ? 1 : 2; /* of the product */
    if (t->rank < 0) return DW_OK;
    if (is_other(c, i) && is_random_key(t))
        return dw__text_printf(out, "        const random_key key%u = key;\n", i);
    if (is_other(c, i) && t->shape[t->rank - 1] == 1)
        return dw__text_printf(out, "        const lanes<%s> i%u = lanes<%s>::same(vectors[%d]);\n",
                               element, i, element, (*vectors)++);
    const int at = is_other(c, i) ? parts + (*operands)++ : (int)i != c->replaced;
    return dw__text_printf(out, "        const lanes<%s> i%u = in[%d].at[group];\n", element, i,
                           at);
}

/* The elements' numbers: the unit's first one is `number`. Where rows have whole vectors it is a multiple of 8, so that
 * four elements share a block of random numbers. */
static dw_status print_numbers(const form *f, dw__text *out) {
    if (f->whole)
        return dw__text_printf(out, "    const unsigned long long v = number / VECTOR;\n");
    return dw__text_printf(out, "#undef ELEMENT_NUMBER\n"
                                "#define ELEMENT_NUMBER (number + group * LANES + j)\n");
}

static dw_status print_program(const dw__call *c, const dw__body *body, const form *f,
                               dw__text *out) {
    const dw__call *program = c->epilogue;
    const char *const element = dw__elementwise_element(c->outputs[0].dtype);
    dw_dtype types[DW_MAX_OUTPUTS];
    int operands = 0, vectors = 0;
    if (program->op == DW_OP_ROPE) return dw__sm90_rope_source(&f->rope, c->outputs[0].dtype, out);
    DW_RETURN_IF_FAILED(dw__text_printf(
        out,
        "#define VECTOR 8\n#define INDEX int\n#include \"elementwise.cuh\"\n%s"
        "#define PROGRAM 1\n#define PROGRAM_OPERANDS %d\n#define PROGRAM_RESULTS %d\n"
        "#define PROGRAM_VECTORS %d\n#define PROGRAM_HALVES %d\n#define PROGRAM_WHOLE %d\n"
        "#define PROGRAM_SUMS %d\n"
        "typedef %s program_element;\n"
        "DEVICE void run_program(const vector<%s> *in, const unsigned short *vectors, "
        "vector<%s> *out%s) {\n    (void)vectors;\n",
        f->draws ? "#define PROGRAM_DRAWS 1\n" : "", f->operand_count, f->result_count,
        f->vector_count, f->shape.halves, f->whole, (int)f->summed, element, element, element,
        f->draws ? ", random_key key, unsigned long long number" : ""));
    if (f->draws) DW_RETURN_IF_FAILED(print_numbers(f, out));
    for (uint32_t o = 0; o < results_of(program); o++) {
        types[o] = program->outputs[o].dtype;
        DW_RETURN_IF_FAILED(
            dw__text_printf(out, "    vector<%s> &out%u = out[%u];\n", element, o, o));
    }
    DW_RETURN_IF_FAILED(dw__text_printf(out, "    EACH(group, LANE_GROUPS) {\n"));
    for (uint32_t i = 0; i < program->input_count; i++)
        DW_RETURN_IF_FAILED(print_input(c, i, element, &operands, &vectors, out));
    DW_RETURN_IF_FAILED(dw__elementwise_print_steps(body, types, out));
    return dw__text_printf(out, "    }\n}\n#include \"sm90/sm90_gemm.cu\"\n");
}

/* The shape's defines are part of the source, so that it names the variant. */
static dw_status print_source(const dw__call *c, const dw__body *body, const form *f,
                              dw__text *out) {
    const dw__jit_variant v = dw__sm90_variant(&f->shape);
    for (uint32_t i = 0; i < v.define_count; i++) {
        const bool stages = strcmp(v.defines[i].name, "STAGES") == 0;
        DW_RETURN_IF_FAILED(dw__text_printf(out, "#define %s %d\n", v.defines[i].name,
                                            stages ? f->stages : v.defines[i].value));
    }
    return print_program(c, body, f, out);
}

/* ---- the entry -------------------------------------------------------------------------------------- */

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__operation_call *given = call;
    const dw__call *c = &given->call;
    dw__gemm_groups_call g;
    dw__sm90_program p;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    if (dw__epilogues_wanted() == DW__EPILOGUES_OFF)
        return dw__fail(DW_UNSUPPORTED, "%s: DEEPWELL_EPILOGUES is \"off\"", kernel->name);
    if (!c->epilogue || c->paired || dw__call_gathers(c) || !call_of(given, &g) ||
        g.gemm.output != g.gemm.dtype || g.gemm.d.stride > INT32_MAX ||
        !matrices_of(c, &g.gemm, &p) || !can_sum(c, &g) || !finds_tile(&g, &p, c->epilogue->summed))
        return dw__kernel_refuse(kernel);
    DW_RETURN_IF_FAILED(dw__sm90_supports(&g.gemm, g.turned, gpu));
    return check_body(kernel, c->epilogue);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__operation_call *given = call;
    const dw__call *c = &given->call;
    dw_status status = DW_OK;
    dw__gemm_groups_call g;
    dw__sm90_program p;
    dw__text source = {0};
    dw__body *body = dw__calloc(1, sizeof *body);
    if (!body) return dw__fail_memory("an elementwise program", sizeof *body);
    (void)call_of(given, &g);
    (void)matrices_of(c, &g.gemm, &p);
    const form f = form_of(&g, &p, c->epilogue->summed, context->sm_count);
    if (c->epilogue->op != DW_OP_ROPE) DW_TRY(dw__elementwise_body(c->epilogue, body));
    DW_TRY(print_source(c, body, &f, &source));
    DW_TRY(dw__program_variant(context, kernel, &source, &f, sizeof f, variant));
cleanup:
    dw__text_free(&source);
    dw__free(body);
    return status;
}

/* The first-use check has no program: D alone is stored, and A stands for the operands. */
static void stand_in(const dw_gemm *g, const form *f, dw__sm90_program *p) {
    *p = (dw__sm90_program){.operand_count = f->operand_count,
                            .vector_count = f->vector_count,
                            .result_count = f->result_count,
                            .random_key = g->a.data,
                            .rope = {.cosine = g->a.data,
                                     .sine = g->a.data,
                                     .tokens = 1,
                                     .inverse_tokens = dw__elementwise_inverse(1)}};
    for (int i = 0; i < f->operand_count; i++) p->operands[i] = g->a;
    for (int i = 0; i < f->vector_count; i++) p->vectors[i] = g->a;
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    const dw__operation_call *given = call;
    const form *f = dw__program_at(variant->params)->form;
    dw__gemm_groups_call g;
    dw__sm90_program p;
    (void)gemm_of(given, f->shape.halves, &g);
    if (dw__gemm_is_empty(&g.gemm)) return DW_OK;
    if (!given->call.epilogue) {
        stand_in(&g.gemm, f, &p);
        p.shared_bytes = f->shared_bytes;
        return dw__sm90_launch(&g, &p, f->shape, context, variant);
    }
    (void)matrices_of(&given->call, &g.gemm, &p);
    place_sums(given, &g.gemm, &p);
    p.shared_bytes = f->shared_bytes;
    DW_RETURN_IF_FAILED(dw__sm90_launch(&g, &p, f->shape, context, variant));
    return add_sums(given, &g.gemm, &p, context, variant);
}

static dw_status entry_points(const dw__kernel *kernel, int capability, uint64_t params,
                              dw__entry_point *points) {
    const dw__program *program = dw__program_at(params);
    const form *f = program->form;
    (void)kernel;
    points->code = (dw__jit_variant){.source = "sm90_program",
                                     .text = program->source,
                                     .entry = "sm90_gemm",
                                     .arch = dw__gpu_arch(capability)};
    points->shared_bytes = f->shared_bytes;
    if (f->summed)
        points[1].code = dw__gpu_sum_parts_code(f->shape.f16 ? DW_F16 : DW_BF16, capability);
    return DW_OK;
}

/* Bytes that the launch reads and writes: A, all matrices of B, D if it is stored, the program's operands and results. */
static double bytes_of(const dw__gemm_groups_call *g, const dw__sm90_program *p, bool stores_d) {
    enum { WIDTH = 2 };
    const double m = (double)g->gemm.m, n = (double)g->gemm.n, k = (double)g->gemm.k,
                 parts = g->halves ? 2.0 : 1.0;
    const double elements = m * k + (double)g->groups.count * parts * n * k +
                            m * n * (p->operand_count + p->result_count + (stores_d ? parts : 0.0));
    return WIDTH * elements;
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__operation_call *given = call;
    dw__gemm_groups_call g;
    dw__sm90_program p;
    (void)kernel;
    snprintf(result->from, sizeof result->from, "the least by counted work, nothing measured");
    if (!given->call.epilogue || !call_of(given, &g) || dw__gemm_is_empty(&g.gemm) ||
        !matrices_of(&given->call, &g.gemm, &p))
        return;
    const form f = form_of(&g, &p, given->call.epilogue->summed, gpu->sm_count);
    const dw__gemm_cost cost = dw__sm90_cost_of(&g, &f.shape, gpu->sm_count);
    result->seconds = fmax(dw__gemm_least_seconds(&g.gemm, gpu, &cost, DW__SM90_FLOPS_PER_CLOCK),
                           bytes_of(&g, &p, given->call.outputs[0].data != NULL) / gpu->bytes);
}

/* ---- the first-use check ----------------------------------------------------------------------------- */

void dw__sm90_example_linear(const dw__sm90_shape *shape, int index, int64_t n, dw__call *c) {
    static const dw_attr plain = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0};
    const dw__sm90_shape s = *shape;
    const dw_dtype type = s.f16 ? DW_F16 : DW_BF16;
    const int64_t m = 300 + 64 * index, k = 456;
    *c = (dw__call){
        .op = DW_OP_LINEAR,
        .attr_count = s.turned_b,
        .attrs = &plain,
        .input_count = 3,
        .output_count = 1,
        .inputs = {{.dtype = type, .rank = 2, .shape = {m, k}},
                   {.dtype = type, .rank = 2, .shape = {s.turned_b ? k : n, s.turned_b ? n : k}},
                   {.dtype = type, .rank = s.bias ? 1 : -1, .shape = {n}}},
        .outputs = {{.dtype = type, .rank = 2, .shape = {m, n}}}};
    for (uint32_t i = 0; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0) dw__tensor_set_contiguous(&c->inputs[i]);
    dw__tensor_set_contiguous(&c->outputs[0]);
}

/* A product with edges in every direction, more steps than a ring has stages, and several tiles for a block; A's rows
 * are as long as D's or longer, because they stand for operands. */
static void example_linear(uint64_t params, int index, dw__call *c) {
    const dw__sm90_shape s = ((const form *)dw__program_at(params)->form)->shape;
    dw__sm90_example_linear(&s, index, s.halves ? 144 + 256 * index : 136 + 128 * index, c);
}

/* Rows of whole vectors; with halves, each of them begins at a multiple of 16 bytes. */
static void example_segments(uint64_t params, int index, dw__call *c) {
    const form *f = dw__program_at(params)->form;
    dw__tensor *const with_n[] = {&c->inputs[1], &c->inputs[3], &c->outputs[0]};
    dw__sm90_segment.example(f->shape.params, index, c);
    for (int i = 0; f->whole && i < (int)DW_COUNT(with_n); i++) {
        if (with_n[i]->rank < 0) continue;
        with_n[i]->shape[i == 0 && !f->shape.turned_b ? 1 : with_n[i]->rank - 1] =
            144 + 256 * index;
        dw__tensor_set_contiguous(with_n[i]);
    }
}

#define SM90_PROGRAM                                                                               \
    .backend = "deepwell", .kind = DW__CALL_OPERATION, .proof = DW__MEASURED_ON_HARDWARE,          \
    .shown = "tested on the emulator; whole models were trained with it on an H100",               \
    .source = "src/kernel/cuda/sm90_program.c, cuda/sm90/sm90_program.cuh",                        \
    .architectures = "sm_90a (H100, H200)", .elements = "BF16, F16",                               \
    .needs =                                                                                       \
        "NVRTC: the source is made for each program; a program of at most 3 more operands, "       \
        "2 vectors of an element for each row, and 4 results, of the product's type, in rows of "  \
        "16-byte multiples, or rope of heads that a tile has as a whole; sums of the rows of 3 "   \
        "results of one product at most",                                                          \
    .supports = supports, .seconds = seconds, .workspace_bytes = workspace_bytes,                  \
    .prepare = prepare, .enqueue = enqueue, .entry_points = entry_points,                          \
    .first_use = &dw__operation_first_use, .example_sms = 3, .with_epilogue = true,                \
    .results = DW__RESULTS_IN_ROWS,                                                                \
    .tolerance = "sums in F32, then the product's rounding, against FP64; the program as "         \
                 "elementwise programs",                                                           \
    .tolerance_factor = 8.0
const dw__kernel dw__sm90_linear_program = {
    SM90_PROGRAM,
    .name = "sm90_linear_program",
    .computes = computes_linear,
    .operation = "linear and matmul with the elementwise program behind them",
    .example = example_linear,
};
const dw__kernel dw__sm90_segment_program = {
    SM90_PROGRAM,
    .name = "sm90_segment_program",
    .computes = computes_segments,
    .operation = "segment_linear with the elementwise program behind it",
    .example = example_segments,
};
