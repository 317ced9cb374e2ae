/* AdamW on an emulated Hopper GPU, its checker on, against the formula in FP64. DEEPWELL_TEST_DEVICE=cuda runs the same
 * on a GPU. The tests are skipped where there is no NVRTC, which compiles the kernels. */
#include "common/adamw_params.h"
#include "deepwell/adamw.h"
#include "deepwell/jit.h"
#include "kernel/gpu_kernel.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define OK(call)                                                                                   \
    do {                                                                                           \
        dw_status ok_status = (call);                                                              \
        if (ok_status != DW_OK) fail_msg("%s: %s", #call, dw_last_error());                        \
    } while (0)

static const dw_device *device;

static int setup(void **state) {
    (void)state;
    const char *name = getenv("DEEPWELL_TEST_DEVICE");
#ifdef TEST_NVRTC
    if (!name) setenv("DEEPWELL_NVRTC", TEST_NVRTC, 0);
#endif
    if (dw_device_find(name ? name : "emulator:sm_90a", &device) != DW_OK)
        fail_msg("%s", dw_last_error());
    return 0;
}

static void need_compiler(void) {
    const char *compiler;
    if (dw_jit_compiler(&compiler) == DW_OK) return;
    print_message("%s\n", dw_last_error());
    skip();
}

static uint32_t random_bits = 1;
/* In [-1, 1). */
static float draw(void) {
    random_bits = random_bits * 1664525u + 1013904223u;
    return (float)((double)random_bits / 2147483648.0 - 1.0);
}

/* ---- tensors ----------------------------------------------------------------------------------- */

/* C: the copies, which are there if the group has a copy_dtype. */
enum { P, G, M, V, C, BLOCKS, MOST = 300 };

typedef struct group {
    dw_adamw_gpu_group call;
    dw_adamw_gpu_tensor tensors[MOST];
    void *memory[BLOCKS][MOST]; /* the device's; a tensor begins `offset` elements later */
    float *host[BLOCKS][MOST];  /* what the device's memory held before the step */
    float *steps;
    int offset[MOST];
} group;

static dw_dtype type_of(const group *g, int block) {
    if (block == G && g->call.grad_dtype) return g->call.grad_dtype;
    if (block == C && g->call.copy_dtype) return g->call.copy_dtype;
    return block == M || block == V ? g->call.state_dtype : g->call.param_dtype;
}

static size_t bytes_of(const group *g, int block, int tensor) {
    return (size_t)(g->tensors[tensor].count + g->offset[tensor]) *
           dw_dtype_bytes(type_of(g, block));
}

/* Copies a block between the device and floats. */
static void move(group *g, int block, int tensor, float *host, bool in) {
    const dw_dtype type = type_of(g, block);
    const size_t count = (size_t)g->tensors[tensor].count, shift = (size_t)g->offset[tensor];
    char *raw = calloc(1, bytes_of(g, block, tensor) + 1);
    if (!in)
        OK(dw_device_copy_out(device, raw, g->memory[block][tensor], bytes_of(g, block, tensor)));
    for (size_t i = 0; i < count; i++)
        if (in)
            dw__trial_set(raw, type, shift + i, host[i]);
        else
            host[i] = dw__trial_get(raw, type, shift + i);
    if (in)
        OK(dw_device_copy_in(device, g->memory[block][tensor], raw, bytes_of(g, block, tensor)));
    free(raw);
}

static void make_tensor(group *g, int tensor, int64_t count, int offset, double scale) {
    void *at[BLOCKS];
    g->tensors[tensor].count = count;
    g->offset[tensor] = offset;
    for (int b = 0; b < BLOCKS; b++) {
        g->host[b][tensor] = calloc((size_t)count + 1, sizeof(float));
        OK(dw_device_allocate(device, bytes_of(g, b, tensor) + 1, &g->memory[b][tensor]));
        for (int64_t i = 0; i < count; i++) {
            const float x = draw();
            g->host[b][tensor][i] = b == V ? 0.01f * x * x : b == G ? x * (float)scale : x;
        }
        move(g, b, tensor, g->host[b][tensor], true);
        move(g, b, tensor, g->host[b][tensor], false); /* rounded */
        at[b] = (char *)g->memory[b][tensor] + (size_t)offset * dw_dtype_bytes(type_of(g, b));
    }
    g->tensors[tensor] = (dw_adamw_gpu_tensor){.param = at[P],
                                               .grad = at[G],
                                               .exp_avg = at[M],
                                               .exp_avg_sq = at[V],
                                               .step = g->steps + tensor,
                                               .count = count,
                                               .copy = g->call.copy_dtype ? at[C] : NULL};
}

/* grad and copy may be 0, as in dw_adamw_gpu_group. */
static group *make_mixed_group(dw_dtype param, dw_dtype grad, dw_dtype state, dw_dtype copy,
                               int tensors, double scale) {
    static const int64_t counts[] = {1, 7, 8, 1023, 0, 4096, 4097, 8200, 513};
    group *g = calloc(1, sizeof *g);
    float steps[MOST];
    g->call = (dw_adamw_gpu_group){.param_dtype = param,
                                   .state_dtype = state,
                                   .grad_dtype = grad,
                                   .copy_dtype = copy,
                                   .tensors = g->tensors,
                                   .count = (uint32_t)tensors,
                                   .lr = 0.01,
                                   .beta1 = 0.9,
                                   .beta2 = 0.999,
                                   .eps = 1e-6,
                                   .weight_decay = 0.1};
    for (int i = 0; i < tensors; i++) steps[i] = (float)(i % 5 * 10);
    OK(dw_device_allocate(device, sizeof steps, (void **)&g->steps));
    OK(dw_device_copy_in(device, g->steps, steps, (size_t)tensors * sizeof *steps));
    for (int i = 0; i < tensors; i++) {
        const int64_t count = tensors > 20 ? 1 + i % 40 : counts[i % 9];
        make_tensor(g, i, count, i % 3 == 1 ? 1 + i % 7 : 0, scale);
    }
    return g;
}

static group *make_group(dw_dtype param, dw_dtype state, int tensors, double scale) {
    return make_mixed_group(param, 0, state, 0, tensors, scale);
}

static void release(group *g) {
    for (int b = 0; b < BLOCKS; b++)
        for (uint32_t i = 0; i < g->call.count; i++) {
            dw_device_release(device, g->memory[b][i], bytes_of(g, b, (int)i) + 1);
            free(g->host[b][i]);
        }
    dw_device_release(device, g->steps, MOST * sizeof(float));
    free(g);
}

/* ---- steps -------------------------------------------------------------------------------------- */

/* Device memory for a call's numbers: grad_scale, found_inf, norm, lr. */
enum { SCALE, INF, NORM, LR, NUMBERS };

typedef struct step {
    group *groups[3];
    int count;
    double max_norm, scale; /* scale 0: no grad_scale */
    bool found_inf, lr_on_device, finite_only;
    float *numbers;
    float norm;                   /* result */
    dw_adamw_gpu_outcome outcome; /* result */
} step;

static double norm_of(const step *s) {
    double sum = 0.0;
    for (int k = 0; k < s->count; k++)
        for (uint32_t i = 0; i < s->groups[k]->call.count; i++)
            for (int64_t j = 0; j < s->groups[k]->tensors[i].count; j++)
                sum += pow((double)s->groups[k]->host[G][i][j], 2);
    return sqrt(sum) / (s->scale != 0.0 ? s->scale : 1.0);
}

static void run_step(step *s, int times) {
    dw_adamw_gpu_group groups[3];
    float numbers[NUMBERS] = {(float)s->scale, s->found_inf ? 1.0f : 0.0f, -1.0f, 0.0f};
    for (int k = 0; k < s->count; k++) groups[k] = s->groups[k]->call;
    OK(dw_device_allocate(device, sizeof numbers, (void **)&s->numbers));
    if (s->lr_on_device)
        numbers[LR] = (float)groups[0].lr, groups[0].lr = 7.0, groups[0].lr_at = s->numbers + LR;
    OK(dw_device_copy_in(device, s->numbers, numbers, sizeof numbers));
    dw_adamw_gpu call = {.struct_size = sizeof call,
                         .device = device,
                         .groups = groups,
                         .group_count = (uint32_t)s->count,
                         .max_norm = s->max_norm,
                         .grad_scale = s->scale != 0.0 ? s->numbers + SCALE : NULL,
                         .found_inf = s->numbers + INF,
                         .norm = s->numbers + NORM,
                         .finite_only = s->finite_only};
    OK(dw_device_allocate(device, sizeof s->outcome, (void **)&call.outcome));
    OK(dw_adamw_gpu_workspace(&call, &call.workspace_bytes));
    OK(dw_device_allocate(device, call.workspace_bytes, &call.workspace));
    if (times == 1) {
        OK(dw_adamw_gpu_run(&call));
    } else { /* recorded once and replayed */
        void *stream, *graph = NULL;
        OK(device->stream_create(&stream));
        call.stream = stream;
        OK(device->graph_begin(stream));
        OK(dw_adamw_gpu_run(&call));
        OK(device->graph_end(stream, &graph));
        for (int i = 0; i < times; i++) OK(device->graph_launch(graph, stream));
        OK(device->stream_synchronize(stream));
        device->graph_destroy(graph);
        device->stream_destroy(stream);
    }
    OK(dw_device_copy_out(device, numbers, s->numbers, sizeof numbers));
    s->norm = numbers[NORM];
    OK(dw_device_copy_out(device, &s->outcome, call.outcome, sizeof s->outcome));
    dw_device_release(device, call.outcome, sizeof s->outcome);
    dw_device_release(device, call.workspace, call.workspace_bytes);
    dw_device_release(device, s->numbers, sizeof numbers);
}

typedef struct element {
    double x[BLOCKS], size[BLOCKS];
} element;

/* The step of Loshchilov and Hutter; `size` has the magnitudes of the terms that make each result. beta1 and beta2 are
 * FP32 numbers, as in PyTorch's kernel, and so are the corrections that belong to them. */
static element define(const dw_adamw_gpu_group *o, element e, double t, double scale, double clip) {
    const double b1 = (double)(float)o->beta1, b2 = (double)(float)o->beta2;
    e.x[G] /= scale;
    const double g = e.x[G] * clip * (o->maximize ? -1.0 : 1.0);
    e.size[G] = fabs(e.x[G]);
    e.size[M] = b1 * fabs(e.x[M]) + (1 - b1) * fabs(g);
    e.x[M] = b1 * e.x[M] + (1 - b1) * g;
    e.x[V] = e.size[V] = b2 * e.x[V] + (1 - b2) * g * g;
    const double m_hat = e.x[M] / (1 - pow(b1, t)), v_hat = e.x[V] / (1 - pow(b2, t));
    const double rate = o->lr / (sqrt(v_hat) + o->eps);
    e.size[P] = fabs(e.x[P]) + rate * e.size[M] / (1 - pow(b1, t));
    e.x[P] = e.x[P] * (1 - o->lr * o->weight_decay) - rate * m_hat;
    e.x[C] = e.x[P], e.size[C] = e.size[P];
    return e;
}

/* Half a unit of the stored type, and 16 roundings in FP32 of the terms. */
static void agree(dw_dtype type, double got, double right, double size, const char *what) {
    const double unit = type == DW_BF16  ? 0x1p-8
                        : type == DW_F16 ? 0x1p-11
                                         : 0x1p-24,
                 least = type == DW_F16 ? 0x1p-25 : 0x1p-149;
    if (isnan(right) ? isnan(got)
                     : fabs(got - right) <= unit * fabs(right) + 16 * 0x1p-24 * size + least)
        return;
    fail_msg("%s is %.9g; expected %.9g", what, got, right);
}

static void check_group(const step *s, group *g, double clip, bool applied) {
    static const char *const names[BLOCKS] = {"p", "g", "m", "v", "the copy"};
    float steps[MOST];
    OK(dw_device_copy_out(device, steps, g->steps, g->call.count * sizeof *steps));
    for (int i = 0; i < (int)g->call.count; i++) {
        const int64_t count = g->tensors[i].count;
        float *got[BLOCKS];
        assert_true(steps[i] == (float)(i % 5 * 10 + applied));
        for (int b = 0; b < BLOCKS; b++) {
            got[b] = calloc((size_t)count + 1, sizeof(float));
            move(g, b, i, got[b], false);
        }
        for (int64_t j = 0; j < count; j++) {
            element e = {{0}, {0}};
            for (int b = 0; b < BLOCKS; b++) e.x[b] = (double)g->host[b][i][j];
            if (applied)
                e = define(&g->call, e, (double)steps[i], s->scale != 0.0 ? s->scale : 1.0, clip);
            for (int b = 0; b < BLOCKS; b++) {
                if (!applied || (b == G && s->scale == 0.0) || (b == C && !g->call.copy_dtype))
                    assert_memory_equal(&got[b][j], &g->host[b][i][j], sizeof(float));
                else
                    agree(type_of(g, b), (double)got[b][j], e.x[b], e.size[b], names[b]);
            }
        }
        for (int b = 0; b < BLOCKS; b++) free(got[b]);
    }
}

static void check_step(step *s) {
    const double norm = norm_of(s);
    run_step(s, 1);
    const bool applied = !s->found_inf && !(s->finite_only && s->max_norm > 0.0 && !isfinite(norm));
    double clip = 1.0;
    if (s->max_norm > 0.0) {
        clip = s->max_norm / (norm + 1e-6);
        if (clip > 1.0) clip = 1.0;
        if (isfinite(norm))
            agree(DW_F32, (double)s->norm, norm, norm, "the norm");
        else
            assert_true(isnan(norm) ? isnan(s->norm) : isinf(s->norm));
    } else {
        assert_true(s->norm == 0.0f);
    }
    assert_int_equal(s->outcome.applied, applied);
    if (s->max_norm > 0.0 && isfinite(norm))
        assert_true(fabs(s->outcome.norm - norm) <= 8 * 0x1p-24 * norm);
    for (int k = 0; k < s->count; k++) check_group(s, s->groups[k], clip, applied);
    for (int k = 0; k < s->count; k++) release(s->groups[k]);
}

/* ---- tests -------------------------------------------------------------------------------------- */

static void types_agree(void **state) {
    static const dw_dtype types[][2] = {{DW_BF16, DW_BF16},
                                        {DW_F32, DW_F32},
                                        {DW_F16, DW_F16},
                                        {DW_BF16, DW_F32},
                                        {DW_F32, DW_BF16}};
    (void)state;
    need_compiler();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        step s = {.groups = {make_group(types[i][0], types[i][1], 9, 1.0)}, .count = 1};
        check_step(&s);
        step clipped = {.groups = {make_group(types[i][0], types[i][1], 9, 100.0)},
                        .count = 1,
                        .max_norm = 2.0,
                        .scale = 100.0,
                        .lr_on_device = i % 2 == 0};
        clipped.groups[0]->call.maximize = i % 2 != 0;
        check_step(&clipped);
    }
}

/* FP32 parameters behind a model in 16 bits. More tensors than one launch with copies has. */
static void copies_agree(void **state) {
    static const dw_dtype types[][4] = {{DW_F32, DW_BF16, DW_F32, DW_BF16},
                                        {DW_F32, DW_F32, DW_F32, DW_BF16},
                                        {DW_F32, DW_F16, DW_BF16, DW_F16}};
    (void)state;
    need_compiler();
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (int clips = 0; clips < 2; clips++) {
            const dw_dtype *t = types[i];
            step s = {.groups = {make_mixed_group(t[0], t[1], t[2], t[3], 9 + 2 * clips, 1.0),
                                 make_mixed_group(t[0], t[1], t[2], t[3], 2, 1.0)},
                      .count = 2,
                      .max_norm = clips ? 2.0 : 0.0,
                      .scale = clips ? 4.0 : 0.0,
                      .lr_on_device = clips != 0};
            s.groups[1]->call.weight_decay = 0.0;
            check_step(&s);
        }
}

static void groups_share_a_norm(void **state) {
    (void)state;
    need_compiler();
    for (int clips = 0; clips < 2; clips++) {
        step s = {.groups = {make_group(DW_BF16, DW_BF16, 5, 1.0),
                             make_group(DW_F32, DW_F32, 9, 0.5),
                             make_group(DW_BF16, DW_BF16, 3, 2.0)},
                  .count = 3,
                  .max_norm = clips ? 1.5 : 1e6};
        s.groups[1]->call.weight_decay = 0.0;
        s.groups[2]->call.lr = 0.1;
        check_step(&s);
    }
}

/* More tensors than one launch of adamw_begin, and than the smaller table. */
static void many_tensors(void **state) {
    (void)state;
    need_compiler();
    for (int clips = 0; clips < 2; clips++) {
        step s = {.groups = {make_group(DW_BF16, DW_BF16, MOST, 1.0)},
                  .count = 1,
                  .max_norm = clips ? 0.7 : 0.0};
        check_step(&s);
    }
}

static void found_inf_changes_nothing(void **state) {
    (void)state;
    need_compiler();
    step s = {.groups = {make_group(DW_BF16, DW_BF16, 9, 1.0)},
              .count = 1,
              .scale = 8.0,
              .found_inf = true};
    check_step(&s);
}

static void put_gradient(group *g, int tensor, float x) {
    g->host[G][tensor][0] = x;
    move(g, G, tensor, g->host[G][tensor], true);
}

/* As clip_grad_norm_ followed by a step: finite gradients become 0 if the norm is infinite, and NaN if it is NaN. */
static void infinite_gradients(void **state) {
    (void)state;
    need_compiler();
    const float values[] = {INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 3; i++) {
        step s = {.groups = {make_group(DW_F32, DW_F32, 9, 1.0)}, .count = 1, .max_norm = 1.0};
        put_gradient(s.groups[0], 3, values[i]);
        check_step(&s);
    }
}

/* With finite_only such a step is left out. The square of 1e30 is no FP32 number, but the norm of such gradients is
 * finite, so they are clipped. */
static void only_finite_steps(void **state) {
    (void)state;
    need_compiler();
    const float values[] = {INFINITY, NAN, 1e30f, 1.0f};
    for (int i = 0; i < 4; i++) {
        /* More tensors than threads of the warp that computes the norm. */
        step s = {
            .groups = {make_group(DW_F32, DW_F32, 40, 1.0), make_group(DW_F32, DW_F32, 3, 1.0)},
            .count = 2,
            .max_norm = 1.0,
            .finite_only = true};
        put_gradient(s.groups[0], 3, values[i]);
        check_step(&s);
    }
}

/* Equal steps give equal bits, and a recorded graph advances its own steps. */
static void bits_repeat_and_graphs_advance(void **state) {
    (void)state;
    need_compiler();
    float *kept[3] = {NULL};
    for (int run = 0; run < 3; run++) {
        random_bits = 77;
        step s = {.groups = {make_group(DW_F32, DW_F32, 9, 1.0)}, .count = 1, .max_norm = 0.5};
        run_step(&s, run == 0 ? 1 : 3);
        if (run == 0) run_step(&s, 1), run_step(&s, 1);
        kept[run] = calloc(8200, sizeof(float));
        move(s.groups[0], P, 7, kept[run], false);
        float steps[9];
        OK(dw_device_copy_out(device, steps, s.groups[0]->steps, sizeof steps));
        assert_true(steps[0] == 3.0f && steps[1] == 13.0f);
        release(s.groups[0]);
    }
    assert_memory_equal(kept[0], kept[1], 8200 * sizeof(float));
    assert_memory_equal(kept[0], kept[2], 8200 * sizeof(float));
    for (int run = 0; run < 3; run++) free(kept[run]);
}

/* ---- formats ------------------------------------------------------------------------------------- */

enum { FORMAT_PARTS = 7, PART_SCALES = 5, PART_STEP = 6 };

/* A tensor of a call with states of any format: host memory, and the device's. */
typedef struct coded {
    int64_t count;
    size_t bytes[FORMAT_PARTS], shift[FORMAT_PARTS];
    char *host[FORMAT_PARTS];
    void *memory[FORMAT_PARTS];
} coded;

static void make_coded(coded *c, const dw_adamw_gpu_group *g, int64_t count, int offset) {
    const dw_dtype types[FORMAT_PARTS] = {g->param_dtype,
                                          g->grad_dtype,
                                          g->state_dtype ? g->state_dtype : DW_F32,
                                          g->state_dtype ? g->state_dtype : DW_F32,
                                          g->copy_dtype ? g->copy_dtype : DW_F32,
                                          DW_F32,
                                          DW_F32};
    c->count = count;
    for (int b = 0; b < FORMAT_PARTS; b++) {
        const int64_t numbers =
            b == PART_SCALES ? DW_ADAMW_SCALES(count) : (b == PART_STEP ? 1 : count);
        c->shift[b] = (size_t)(b == PART_STEP ? 0 : offset) * dw_dtype_bytes(types[b]);
        c->bytes[b] = c->shift[b] + (size_t)numbers * dw_dtype_bytes(types[b]);
        c->host[b] = calloc(1, c->bytes[b] + 1);
        for (int64_t i = 0; i < numbers; i++) {
            const float x = draw(), size = draw();
            char *at = c->host[b] + c->shift[b];
            if (types[b] == DW_E4M3) /* not NaN; without a sign where it is a square */
                at[i] = (char)((random_bits >> 20) % (b == M ? 127 : 255));
            else
                dw__trial_set(at, types[b], (size_t)i,
                              b == PART_STEP     ? 3.0f
                              : b == PART_SCALES ? fabsf(x)
                              : b == V           ? x * x
                                                 : x * expf(6.0f * size));
        }
        OK(dw_device_allocate(device, c->bytes[b] + 1, &c->memory[b]));
        OK(dw_device_copy_in(device, c->memory[b], c->host[b], c->bytes[b]));
    }
}

static dw_adamw_gpu_tensor tensor_at(const coded *c, void *const memory[FORMAT_PARTS],
                                     uint32_t stream) {
    char *at[FORMAT_PARTS];
    for (int b = 0; b < FORMAT_PARTS; b++) at[b] = (char *)memory[b] + c->shift[b];
    return (dw_adamw_gpu_tensor){.param = at[P],
                                 .grad = at[G],
                                 .exp_avg = at[M],
                                 .exp_avg_sq = at[V],
                                 .copy = at[C],
                                 .scales = (float *)at[PART_SCALES],
                                 .step = (float *)at[PART_STEP],
                                 .count = c->count,
                                 .stream = stream};
}

static void run_formats(dw_adamw_gpu_group *g, const dw_device *where) {
    dw_adamw_gpu call = {
        .struct_size = sizeof call, .device = where, .groups = g, .group_count = 1};
    OK(dw_adamw_gpu_workspace(&call, &call.workspace_bytes));
    if (call.workspace_bytes > 0)
        OK(dw_device_allocate(device, call.workspace_bytes, &call.workspace));
    OK(dw_adamw_gpu_run(&call));
    if (call.workspace) dw_device_release(device, call.workspace, call.workspace_bytes);
}

/* Codes and stochastic rounding give the bits of the CPU, also for tensors that are not aligned, and for more tensors
 * than the smaller table has. */
static void formats_have_the_bits_of_the_cpu(void **state) {
    static const struct {
        dw_dtype param, grad, state, copy;
        int stochastic, tensors;
    } cases[] = {{DW_BF16, DW_BF16, DW_E4M3, 0, 1, 60}, {DW_F32, DW_BF16, DW_E4M3, DW_BF16, 1, 9},
                 {DW_BF16, DW_BF16, DW_BF16, 0, 1, 9},  {DW_F32, DW_F32, DW_BF16, 0, 1, 9},
                 {DW_F32, DW_F32, DW_E4M3, 0, 0, 60},   {DW_BF16, DW_BF16, 0, 0, 1, 9},
                 {DW_F32, DW_BF16, 0, DW_BF16, 0, 9}};
    static const int64_t counts[] = {1, 7, 129, 1023, 0, 4096, 4097, 8200, 513};
    static coded all[60];
    static dw_adamw_gpu_tensor tensors[60];
    const dw_device *cpu;
    (void)state;
    need_compiler();
    OK(dw_device_find("cpu", &cpu));
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        dw_adamw_gpu_group g = {.param_dtype = cases[k].param,
                                .grad_dtype = cases[k].grad,
                                .state_dtype = cases[k].state,
                                .copy_dtype = cases[k].copy,
                                .tensors = tensors,
                                .count = (uint32_t)cases[k].tensors,
                                .lr = 0.01,
                                .beta1 = cases[k].state ? 0.9 : 0.0,
                                .beta2 = cases[k].state ? 0.999 : 0.0,
                                .eps = 1e-8,
                                .weight_decay = 0.1,
                                .maximize = k == 1,
                                .stochastic = cases[k].stochastic,
                                .seed = 1234567890123ull};
        for (int i = 0; i < cases[k].tensors; i++) {
            make_coded(&all[i], &g, i < 9 ? counts[i] : 1 + i, i % 3 == 1 ? 1 + i % 7 : 0);
            tensors[i] = tensor_at(&all[i], all[i].memory, (uint32_t)(1000 * i));
        }
        run_formats(&g, device);
        for (int i = 0; i < cases[k].tensors; i++)
            tensors[i] = tensor_at(&all[i], (void *const *)all[i].host, (uint32_t)(1000 * i));
        run_formats(&g, cpu);
        for (int i = 0; i < cases[k].tensors; i++)
            for (int b = 0; b < FORMAT_PARTS; b++) {
                char *got = calloc(1, all[i].bytes[b] + 1);
                OK(dw_device_copy_out(device, got, all[i].memory[b], all[i].bytes[b]));
                assert_memory_equal(got, all[i].host[b], all[i].bytes[b]);
                dw_device_release(device, all[i].memory[b], all[i].bytes[b] + 1);
                free(got);
                free(all[i].host[b]);
            }
    }
}

static void wrong_calls(void **state) {
    float number;
    (void)state;
    dw_adamw_gpu_tensor tensor = {.param = &number,
                                  .grad = &number,
                                  .exp_avg = &number,
                                  .exp_avg_sq = &number,
                                  .step = &number,
                                  .count = 1};
    dw_adamw_gpu_group g = {.param_dtype = DW_F32,
                            .state_dtype = DW_F32,
                            .tensors = &tensor,
                            .count = 1,
                            .beta1 = 0.9,
                            .beta2 = 0.9};
    dw_adamw_gpu call = {
        .struct_size = sizeof call, .device = device, .groups = &g, .group_count = 1};
    assert_int_equal(dw_adamw_gpu_run(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "dw_adamw_gpu_workspace"));
    tensor.grad = NULL;
    assert_int_equal(dw_adamw_gpu_run(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "tensor 0 of group 0"));
    tensor.grad = &number;
    g.copy_dtype = DW_BF16;
    assert_int_equal(dw_adamw_gpu_run(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "copy"));
    tensor.copy = &number, g.state_dtype = DW_E4M3;
    assert_int_equal(dw_adamw_gpu_run(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "scales"));
    g.state_dtype = DW_F32, tensor.stream = 1 << 20;
    assert_int_equal(dw_adamw_gpu_run(&call), DW_INVALID_ARGUMENT);
    assert_non_null(strstr(dw_last_error(), "stream"));
    tensor.stream = 0;
    g.copy_dtype = DW_I32;
    assert_int_equal(dw_adamw_gpu_run(&call), DW_TYPE);
    g.param_dtype = DW_I32;
    assert_int_equal(dw_adamw_gpu_run(&call), DW_TYPE);
    call.max_norm = NAN;
    assert_int_equal(dw_adamw_gpu_run(&call), DW_INVALID_ARGUMENT);
    call.max_norm = 0.0, call.group_count = 0;
    OK(dw_adamw_gpu_run(&call));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(types_agree),
        cmocka_unit_test(groups_share_a_norm),
        cmocka_unit_test(many_tensors),
        cmocka_unit_test(found_inf_changes_nothing),
        cmocka_unit_test(infinite_gradients),
        cmocka_unit_test(bits_repeat_and_graphs_advance),
        cmocka_unit_test(copies_agree),
        cmocka_unit_test(only_finite_steps),
        cmocka_unit_test(formats_have_the_bits_of_the_cpu),
        cmocka_unit_test(wrong_calls),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
