#include "train/gpu_update.h"
#include "graph/emit.h"
#include <math.h>

typedef struct program {
    dw_graph *graph;
    dw_engine *engine;
} program;

/* The scalars of an AdamW step, in the order of the graph's leaves after p, g, m and v. */
enum { GRAD_SCALE, DECAY, INVERSE_ROOT, STEP_SIZE, SCALARS };

struct dw__gpu_update {
    const dw_device *device;
    dw__gpu_update_sizes sizes;
    program add, square, adamw;
    size_t arena_bytes;
    /* One block: the results of a piece (three of them), then sums of squares, then scalars with and without decay. */
    char *memory;
    size_t memory_bytes, sums_at, scalars_at;
    int64_t pieces; /* of a whole block */
    double *sums;   /* the host's copy */
};

static int64_t result_count(const dw__gpu_update *u) {
    return u->sizes.piece < u->sizes.elements ? u->sizes.piece : u->sizes.elements;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static dw_value leaf(dw__emitter *e, const char *name, int rank, const dw_dim *shape) {
    dw_value value = DW_NONE;
    if (e->status == DW_OK)
        e->status = dw_graph_leaf(e->graph, DW_ROLE_INPUT, name, DW_F32, rank, shape, &value);
    return value;
}

static void output(dw__emitter *e, dw_value value) {
    if (e->status == DW_OK) e->status = dw_graph_add_output(e->graph, value);
}

static void emit_add(dw__emitter *e, dw_dim n, const dw_adamw_options *o) {
    (void)o;
    dw_value to = leaf(e, "to", 1, &n), from = leaf(e, "from", 1, &n);
    output(e, dw__emit_binary(e, DW_OP_ADD, to, from));
}

/* In F64 no sum of squares of finite F32 numbers overflows. */
static void emit_square(dw__emitter *e, dw_dim n, const dw_adamw_options *o) {
    (void)o;
    dw_value x = dw__emit_cast(e, leaf(e, "x", 1, &n), DW_F64);
    output(e, dw__emit_reduce(e, DW_OP_REDUCE_SUM, dw__emit_binary(e, DW_OP_MUL, x, x), 0, false));
}

/* The formula of src/kernel/cpu/isa/loss_loops.c. */
static void emit_adamw(dw__emitter *e, dw_dim n, const dw_adamw_options *o) {
    static const char *const names[SCALARS] = {"grad_scale", "decay", "inverse_root", "step_size"};
    dw_value scalars[SCALARS];
    dw_value p = leaf(e, "p", 1, &n), g = leaf(e, "g", 1, &n);
    dw_value m = leaf(e, "m", 1, &n), v = leaf(e, "v", 1, &n);
    for (int i = 0; i < SCALARS; i++)
        scalars[i] = dw__emit_broadcast_like(e, leaf(e, names[i], 0, NULL), p);
    g = dw__emit_binary(e, DW_OP_MUL, g, scalars[GRAD_SCALE]);
    dw_value change = dw__emit_binary(e, DW_OP_SUB, g, m);
    m = dw__emit_binary(e, DW_OP_ADD, m,
                        dw__emit_with_number(e, DW_OP_MUL, change, 1.0 - o->beta1));
    dw_value square =
        dw__emit_binary(e, DW_OP_MUL, dw__emit_with_number(e, DW_OP_MUL, g, 1.0 - o->beta2), g);
    v = dw__emit_binary(e, DW_OP_ADD, dw__emit_with_number(e, DW_OP_MUL, v, o->beta2), square);
    dw_value root =
        dw__emit_binary(e, DW_OP_MUL, dw__emit_unary(e, DW_OP_SQRT, v), scalars[INVERSE_ROOT]);
    dw_value quotient =
        dw__emit_binary(e, DW_OP_DIV, m, dw__emit_with_number(e, DW_OP_ADD, root, o->eps));
    p = dw__emit_binary(e, DW_OP_SUB, dw__emit_binary(e, DW_OP_MUL, p, scalars[DECAY]),
                        dw__emit_binary(e, DW_OP_MUL, quotient, scalars[STEP_SIZE]));
    output(e, p);
    output(e, m);
    output(e, v);
}

typedef void (*emitter)(dw__emitter *e, dw_dim n, const dw_adamw_options *o);

static dw_status make_program(const dw__gpu_update *u, emitter emit, const dw_adamw_options *o,
                              program *p) {
    dw_dim n;
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    options.device = u->device;
    DW_RETURN_IF_FAILED(dw_graph_create(&p->graph));
    DW_RETURN_IF_FAILED(dw_graph_symbol(p->graph, "N", &n));
    dw__emitter e = {p->graph, DW_OK};
    emit(&e, n, o);
    DW_RETURN_IF_FAILED(e.status);
    return dw_engine_create(p->graph, 0, NULL, 0, NULL, &options, &p->engine);
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static int64_t piece_count(const dw__gpu_update *u, int64_t count) {
    return (count + u->sizes.piece - 1) / u->sizes.piece;
}

/* Elements of the piece that begins at `at` of a range that ends at `end`. */
static int64_t piece_at(const dw__gpu_update *u, int64_t at, int64_t end) {
    return end - at < u->sizes.piece ? end - at : u->sizes.piece;
}

/* Makes the plans for the pieces of a range, which the engine keeps. */
static dw_status prepare(dw__gpu_update *u, program *p, int64_t from, int64_t to) {
    for (int64_t at = from, count; at < to; at += count) {
        dw_plan *plan;
        count = piece_at(u, at, to);
        if (at > from && count == u->sizes.piece) continue;
        DW_RETURN_IF_FAILED(dw_engine_plan(p->engine, &count, &plan));
        const size_t bytes = dw_plan_arena_bytes(plan);
        if (bytes > u->arena_bytes) u->arena_bytes = bytes;
        dw_plan_release(plan);
    }
    return DW_OK;
}

static dw_status run(program *p, int64_t count, void *arena, const dw_binding *leaves,
                     const dw_binding *outputs) {
    dw_plan *plan;
    DW_RETURN_IF_FAILED(dw_engine_plan(p->engine, &count, &plan));
    dw_status status = dw_plan_forward(plan, arena, leaves, outputs, NULL);
    dw_plan_release(plan);
    return status;
}

/* ---- create ---------------------------------------------------------------------------------- */

static dw_status create(dw__gpu_update *u, const dw_adamw_options *adamw) {
    const dw__gpu_update_sizes *s = &u->sizes;
    u->pieces = piece_count(u, s->elements);
    u->sums_at = 3 * (size_t)result_count(u) * sizeof(float);
    u->scalars_at = u->sums_at + (size_t)u->pieces * sizeof(double);
    u->memory_bytes = u->scalars_at + 2 * SCALARS * sizeof(float);
    u->sums = dw__malloc((size_t)u->pieces * sizeof *u->sums);
    if (!u->sums) return dw__fail_memory("sums of squares", (size_t)u->pieces * sizeof *u->sums);
    if (s->adds) {
        DW_RETURN_IF_FAILED(make_program(u, emit_add, adamw, &u->add));
        DW_RETURN_IF_FAILED(prepare(u, &u->add, 0, s->elements));
    }
    DW_RETURN_IF_FAILED(make_program(u, emit_square, adamw, &u->square));
    DW_RETURN_IF_FAILED(prepare(u, &u->square, 0, s->elements));
    DW_RETURN_IF_FAILED(make_program(u, emit_adamw, adamw, &u->adamw));
    DW_RETURN_IF_FAILED(prepare(u, &u->adamw, 0, s->decayed));
    return prepare(u, &u->adamw, s->decayed, s->updated);
}

dw_status dw__gpu_update_create(const dw_device *device, const dw__gpu_update_sizes *sizes,
                                const dw_adamw_options *adamw, dw__gpu_update **update) {
    dw__gpu_update *u = dw__calloc(1, sizeof *u);
    if (!u) return dw__fail_memory("an optimizer on a GPU", sizeof *u);
    u->device = device;
    u->sizes = *sizes;
    dw_status status = create(u, adamw);
    if (status == DW_OK)
        *update = u;
    else
        dw__gpu_update_destroy(u);
    return status;
}

void dw__gpu_update_destroy(dw__gpu_update *u) {
    if (!u) return;
    program *programs[] = {&u->add, &u->square, &u->adamw};
    for (size_t i = 0; i < DW_COUNT(programs); i++) {
        dw_engine_destroy(programs[i]->engine);
        dw_graph_destroy(programs[i]->graph);
    }
    if (u->memory) dw_device_release(u->device, u->memory, u->memory_bytes);
    dw__free(u->sums);
    dw__free(u);
}

size_t dw__gpu_update_arena_bytes(const dw__gpu_update *u) { return u->arena_bytes; }
size_t dw__gpu_update_bytes(const dw__gpu_update *u) { return u->memory_bytes; }

dw_status dw__gpu_update_begin(dw__gpu_update *u) {
    void *memory = NULL;
    DW_RETURN_IF_FAILED(dw_device_allocate(u->device, u->memory_bytes, &memory));
    u->memory = memory;
    return DW_OK;
}

/* ---- work ------------------------------------------------------------------------------------ */

static float *result_at(const dw__gpu_update *u, int which) {
    return (float *)u->memory + which * result_count(u);
}

dw_status dw__gpu_add(dw__gpu_update *u, void *arena, float *to, const float *from) {
    const int64_t end = u->sizes.elements;
    for (int64_t at = 0, count; at < end; at += count) {
        count = piece_at(u, at, end);
        const dw_binding leaves[] = {{to + at, NULL}, {(void *)(from + at), NULL}};
        const dw_binding sum = {result_at(u, 0), NULL};
        DW_RETURN_IF_FAILED(run(&u->add, count, arena, leaves, &sum));
        DW_RETURN_IF_FAILED(
            dw_device_copy(u->device, to + at, sum.data, (size_t)count * sizeof(float)));
    }
    return DW_OK;
}

dw_status dw__gpu_square(dw__gpu_update *u, void *arena, const float *block) {
    const int64_t end = u->sizes.elements;
    double *sum = (double *)(u->memory + u->sums_at);
    for (int64_t at = 0, count; at < end; at += count) {
        count = piece_at(u, at, end);
        const dw_binding x = {(void *)(block + at), NULL}, out = {sum++, NULL};
        DW_RETURN_IF_FAILED(run(&u->square, count, arena, &x, &out));
    }
    return DW_OK;
}

dw_status dw__gpu_gradient_norm(dw__gpu_update *u, double *norm) {
    DW_RETURN_IF_FAILED(dw_device_copy_out(u->device, u->sums, u->memory + u->sums_at,
                                           (size_t)u->pieces * sizeof *u->sums));
    double sum = 0.0;
    for (int64_t i = 0; i < u->pieces; i++) sum += u->sums[i];
    *norm = sqrt(sum);
    return DW_OK;
}

/* Updates the elements of a range; `scalars` are the device's. */
static dw_status update_range(dw__gpu_update *u, void *arena, const dw__gpu_blocks *b, int64_t from,
                              int64_t to, float *scalars) {
    for (int64_t at = from, count; at < to; at += count) {
        count = piece_at(u, at, to);
        float *const updated[3] = {b->weights + at, b->exp_avg + at, b->exp_avg_sq + at};
        dw_binding leaves[4 + SCALARS] = {
            {updated[0], NULL}, {b->gradients + at, NULL}, {updated[1], NULL}, {updated[2], NULL}};
        dw_binding results[3];
        for (int i = 0; i < SCALARS; i++) leaves[4 + i] = (dw_binding){scalars + i, NULL};
        for (int i = 0; i < 3; i++) results[i] = (dw_binding){result_at(u, i), NULL};
        DW_RETURN_IF_FAILED(run(&u->adamw, count, arena, leaves, results));
        for (int i = 0; i < 3; i++)
            DW_RETURN_IF_FAILED(dw_device_copy(u->device, updated[i], results[i].data,
                                               (size_t)count * sizeof(float)));
    }
    return DW_OK;
}

dw_status dw__gpu_adamw(dw__gpu_update *u, void *arena, const dw__gpu_blocks *b,
                        const dw_adamw_options *o) {
    float host[2][SCALARS], *scalars = (float *)(u->memory + u->scalars_at);
    for (int decays = 0; decays < 2; decays++) {
        host[decays][GRAD_SCALE] = (float)o->grad_scale;
        host[decays][DECAY] = decays ? (float)(1.0 - o->lr * o->weight_decay) : 1.0f;
        host[decays][INVERSE_ROOT] = (float)(1.0 / sqrt(1.0 - pow(o->beta2, (double)o->step)));
        host[decays][STEP_SIZE] = (float)(o->lr / (1.0 - pow(o->beta1, (double)o->step)));
    }
    DW_RETURN_IF_FAILED(dw_device_copy_in(u->device, scalars, host, sizeof host));
    DW_RETURN_IF_FAILED(update_range(u, arena, b, 0, u->sizes.decayed, scalars + SCALARS));
    return update_range(u, arena, b, u->sizes.decayed, u->sizes.updated, scalars);
}
