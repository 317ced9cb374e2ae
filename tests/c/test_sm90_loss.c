/* Logits with cross-entropy behind each tile, on an emulated Hopper GPU with the checker on: stored logits beside sums in
 * double; losses, log-sum-exps and gradients beside their definition in double on the rounded logits. Kernels are compiled
 * when they are first used. */
#include "emulated_call.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_loss.h"
#include "run_time_compiler.h"
#include <math.h>

static const char gpu[] = "emulator:sm_90a";

/* logits = scale (x w^T) + bias, or x w if w is turned. */
typedef struct problem {
    int rows, classes, size;
    bool f16, bias, turned;
    bool keeps;  /* forward stores the logits */
    int extra;   /* columns between the rows of stored logits */
    bool closes; /* the bias of the second tile's classes is -infinity */
    double smoothing;
    float scale;
    int sms;
} problem;

/* Memory on the host and the device. */
typedef struct block {
    size_t bytes;
    void *host, *device;
} block;

typedef struct run {
    const problem *problem;
    const dw_device *device;
    dw__context context;
    matrix x, w, bias;
    block target, loss, lse, logits, error;
    int pitch;
    dw_attr attrs[4];
} run;

enum { IGNORED = -100, MARK = 7 };

static block block_of(const dw_device *device, size_t bytes) {
    block b = {.bytes = bytes, .host = malloc(bytes)};
    assert_non_null(b.host);
    memset(b.host, 0xFF, bytes);
    assert_int_equal(dw_device_allocate(device, bytes, &b.device), DW_OK);
    assert_int_equal(device->copy_in(b.device, b.host, bytes, NULL), DW_OK);
    return b;
}
static void send_block(const run *r, const block *b) {
    assert_int_equal(r->device->copy_in(b->device, b->host, b->bytes, NULL), DW_OK);
}
static void fetch_block(const run *r, const block *b) {
    assert_int_equal(r->device->copy_out(b->host, b->device, b->bytes, NULL), DW_OK);
}
static void drop_block(const run *r, block *b) {
    dw_device_release(r->device, b->device, b->bytes);
    free(b->host);
}

static matrix_type type_of(const problem *p) { return p->f16 ? MATRIX_F16 : MATRIX_BF16; }
static dw_dtype dtype_of(const problem *p) { return p->f16 ? DW_F16 : DW_BF16; }

/* Every seventh row is ignored; others have classes at the edges of strips and tiles, and any. */
static void draw_targets(const problem *p, int64_t *target) {
    const int edges[] = {0, p->classes - 1, 255, 256, 31, 32, 39, 40, 257};
    for (int row = 0; row < p->rows; row++) {
        const int any = row < (int)DW_COUNT(edges) ? edges[row] : row * 37;
        target[row] = row % 7 == 3 ? IGNORED : any % p->classes;
        if (p->closes && target[row] >= 256 && target[row] < 512) target[row] -= 256;
    }
}

static void open_run(const problem *p, run *r) {
    const dw__context *context;
    uint64_t state = (uint64_t)(p->rows * 31 + p->classes * 7 + p->size);
    *r = (run){.problem = p,
               .device = device_named(gpu),
               .pitch = p->classes + p->extra,
               .attrs = {dw_attr_string(DW_ATTR_KEY_REDUCTION, "none"),
                         dw_attr_float(DW_ATTR_KEY_LABEL_SMOOTHING, p->smoothing),
                         dw_attr_int(DW_ATTR_KEY_TRANSPOSE_W, !p->turned),
                         dw_attr_int(DW_ATTR_KEY_IGNORE_INDEX, IGNORED)}};
    assert_int_equal(r->device->context(&context), DW_OK);
    r->context = *context;
    r->context.sm_count = p->sms;
    place(&r->x, r->device, p->rows, p->size, type_of(p));
    for (int i = 0; i < p->rows; i++)
        for (int j = 0; j < p->size; j++) set(&r->x, i, j, p->scale * random_value(&state, false));
    send(&r->x, r->device);
    place_random(&r->w, r->device, p->turned ? p->size : p->classes,
                 p->turned ? p->classes : p->size, type_of(p), &state, false);
    place_random(&r->bias, r->device, 1, p->classes, type_of(p), &state, false);
    for (int j = 256; p->closes && j < 512; j++) set(&r->bias, 0, j, -INFINITY);
    send(&r->bias, r->device);
    const size_t rows = (size_t)p->rows;
    r->target = block_of(r->device, rows * sizeof(int64_t));
    draw_targets(p, r->target.host);
    send_block(r, &r->target);
    r->loss = block_of(r->device, rows * sizeof(float));
    r->lse = block_of(r->device, rows * sizeof(float));
    r->logits = block_of(r->device, rows * (size_t)r->pitch * 2);
    r->error = block_of(r->device, sizeof(unsigned));
    memset(r->error.host, 0, r->error.bytes);
    send_block(r, &r->error);
}

static void close_run(run *r) {
    block *const blocks[] = {&r->target, &r->loss, &r->lse, &r->logits, &r->error};
    matrix *const matrices[] = {&r->x, &r->w, &r->bias};
    for (size_t i = 0; i < DW_COUNT(blocks); i++) drop_block(r, blocks[i]);
    for (size_t i = 0; i < DW_COUNT(matrices); i++) take_away(matrices[i], r->device);
}

static dw__tensor tensor_of(const matrix *m) {
    const dw_matrix view = matrix_of(m);
    return (dw__tensor){.data = view.data,
                        .dtype = m->type == MATRIX_F16 ? DW_F16 : DW_BF16,
                        .rank = 2,
                        .shape = {m->rows, m->columns},
                        .stride = {view.stride, 1}};
}

static dw__tensor vector_of(void *data, dw_dtype dtype, int64_t count) {
    return (dw__tensor){.data = data, .dtype = dtype, .rank = 1, .shape = {count}, .stride = {1}};
}

static dw__operation_call forward_of(const run *r) {
    const problem *p = r->problem;
    dw__operation_call call = {.call = {.op = DW_OP_LINEAR_CROSS_ENTROPY,
                                        .attr_count = 4,
                                        .attrs = r->attrs,
                                        .input_count = 4,
                                        .output_count = 3,
                                        .inputs = {tensor_of(&r->x),
                                                   tensor_of(&r->w),
                                                   {.rank = -1},
                                                   vector_of(r->target.device, DW_I64, p->rows)},
                                        .outputs = {vector_of(r->loss.device, DW_F32, p->rows),
                                                    vector_of(r->lse.device, DW_F32, p->rows),
                                                    {.data = p->keeps ? r->logits.device : NULL,
                                                     .dtype = dtype_of(p),
                                                     .rank = p->keeps ? 2 : -1,
                                                     .shape = {p->rows, p->classes},
                                                     .stride = {r->pitch, 1}}}},
                               .error = {.word = r->error.device, .mark = MARK}};
    if (p->bias) call.call.inputs[2] = vector_of(r->bias.device, dtype_of(p), p->classes);
    return call;
}

static void run_forward(const run *r) {
    const dw__kernel *kernel = &dw__sm90_linear_cross_entropy;
    const dw__variant *variant;
    size_t bytes = 0;
    dw__operation_call call = forward_of(r);
    if (kernel->supports(kernel, &call, NULL) != DW_OK ||
        kernel->workspace_bytes(kernel, &call, &r->context, &bytes) != DW_OK ||
        kernel->prepare(kernel, &call, &r->context, &variant) != DW_OK ||
        dw__variant_status(variant) != DW_OK)
        fail_msg("%s", dw_last_error());
    block workspace = block_of(r->device, bytes);
    call.workspace = workspace.device;
    if (kernel->enqueue(&call, &r->context, variant) != DW_OK) fail_msg("%s", dw_last_error());
    fetch_block(r, &r->loss);
    fetch_block(r, &r->lse);
    fetch_block(r, &r->logits);
    drop_block(r, &workspace);
}

/* ---- definitions --------------------------------------------------------------------------------------- */

static double unit_of(const problem *p) { return p->f16 ? 0x1p-11 : 0x1p-8; }

static double stored(const run *r, int row, int column) {
    const uint16_t *at = (const uint16_t *)r->logits.host + (size_t)row * (size_t)r->pitch + column;
    return r->problem->f16 ? dw__f16_to_f32(*at) : dw__bf16_to_f32(*at);
}

/* 2^-23 of the magnitudes for each operation of the sum, even if the accumulator is truncated, and the rounding. */
static void check_logit(const run *r, int row, int column) {
    const problem *p = r->problem;
    double sum = p->bias ? get(&r->bias, 0, column) : 0.0, size = fabs(sum);
    for (int i = 0; i < p->size; i++) {
        const double term = (double)get(&r->x, row, i) *
                            (p->turned ? get(&r->w, i, column) : get(&r->w, column, i));
        sum += term, size += fabs(term);
    }
    const double error = (p->size + 2) * 0x1p-23 * size,
                 bound = error + (0x1p-23 + unit_of(p)) * (fabs(sum) + error) + 0x1p-25,
                 found = stored(r, row, column);
    if (isinf(sum) ? found != sum : !(fabs(found - sum) <= bound))
        fail_msg("row %d, column %d of the logits is %.9g, not %.9g within %.3g", row, column,
                 found, sum, bound);
}

/* A row's statistics by the stored logits. `error`: of the sum of exponentials, relative. An exponential has 2^-22, and what
 * the rounding of its argument and of the largest logit's product with log2 e change, 2^-24 of each; tiles are scaled
 * once more. A thread adds 64 exponentials at most, then there are 2 exchanges and the tiles. */
typedef struct statistics {
    double largest, lse, mean, magnitude, error;
} statistics;

static statistics statistics_of(const run *r, int row) {
    const problem *p = r->problem;
    const int tiles = (p->classes + DW__SM90_LOSS_COLUMNS - 1) / DW__SM90_LOSS_COLUMNS;
    statistics s = {.largest = -INFINITY};
    double sum = 0.0;
    for (int i = 0; i < p->classes; i++) {
        const double x = stored(r, row, i);
        s.largest = fmax(s.largest, x);
        if (isfinite(x)) s.magnitude = fmax(s.magnitude, fabs(x));
        s.mean += x / p->classes;
    }
    for (int i = 0; i < p->classes; i++) sum += exp(stored(r, row, i) - s.largest);
    s.lse = s.largest + log(sum);
    s.error = 2.0 * (0x1p-22 + 4.0 * s.magnitude * 0x1p-24) + (70 + 2 * tiles) * 0x1p-24;
    return s;
}

static void check_number(double found, double expected, double bound, const char *what, int row) {
    if (!(fabs(found - expected) <= bound))
        fail_msg("%s of row %d is %.9g, not %.9g within %.3g", what, row, found, expected, bound);
}

static void check_row(const run *r, int row) {
    const problem *p = r->problem;
    const statistics s = statistics_of(r, row);
    const int64_t target = ((const int64_t *)r->target.host)[row];
    const double bound = s.error + 4.0 * 0x1p-24 * (s.magnitude + fabs(s.lse) + 1.0);
    double loss = target < 0 ? 0.0 : s.lse - stored(r, row, (int)target);
    if (target >= 0) loss = (1.0 - p->smoothing) * loss + p->smoothing * (s.lse - s.mean);
    if (p->smoothing == 0.0 && target >= 0) loss = s.lse - stored(r, row, (int)target);
    check_number(((const float *)r->lse.host)[row], s.lse, bound, "log-sum-exp", row);
    check_number(((const float *)r->loss.host)[row], loss,
                 2.0 * bound + p->smoothing * (70 + 2) * 0x1p-24 * s.magnitude, "loss", row);
}

static void check_padding(const run *r) {
    const problem *p = r->problem;
    for (int row = 0; row < p->rows; row++)
        for (int i = p->classes; i < r->pitch; i++)
            assert_int_equal(((const uint16_t *)r->logits.host)[row * r->pitch + i], 0xFFFF);
}

/* ---- gradients ------------------------------------------------------------------------------------------ */

/* `s`: of the row's logits. The log-sum-exp that the kernel is given has an error, and its product with log2 e another. */
static void check_gradient_of(const run *r, const statistics *s, int row, int class, double logit,
                              double weight, double found) {
    const problem *p = r->problem;
    const int64_t target = ((const int64_t *)r->target.host)[row];
    const double share = exp(logit - s->lse),
                 less = p->smoothing / p->classes + (target == class ? 1.0 - p->smoothing : 0.0),
                 expected = target < 0 ? 0.0 : weight * (share - less),
                 error = fabs(weight) *
                         (share * (2.0 * s->error +
                                   16.0 * 0x1p-24 * (s->magnitude + fabs(s->lse) + 1.0)) +
                          4.0 * 0x1p-24 * (share + less));
    if (target < 0 && found != 0.0)
        fail_msg("the gradient of row %d, which is ignored, is %.9g", row, found);
    check_number(found, expected, error + unit_of(p) * (fabs(expected) + error) + 0x1p-25,
                 "a gradient", row);
}

static float weight_of(int row) { return (float)(1 + row % 5) / 64.0f - 0.03f; }

/* Those of `count` classes from `first` on, whose logits are computed again, with a weight of its own for each row. */
static void check_gradient(const run *r, int first, int count) {
    const problem *p = r->problem;
    const int pitch = (count + 63) / 64 * 64, w_row = p->turned ? 0 : first;
    const dw__loss_variant v = {.type = dtype_of(p),
                                .statistics = DW_F32,
                                .lanes = 32,
                                .backward = true,
                                .tiles = true,
                                .bias = p->bias,
                                .turned = p->turned};
    const dw__variant *variant;
    block rows = block_of(r->device, (size_t)p->rows * sizeof(dw_sm90_loss_row)),
          d = block_of(r->device, (size_t)p->rows * (size_t)pitch * 2);
    dw_sm90_loss_row *row = rows.host;
    for (int i = 0; i < p->rows; i++) {
        const int64_t target = ((const int64_t *)r->target.host)[i];
        const float weight = weight_of(i);
        row[i] = (dw_sm90_loss_row){.lse = ((const float *)r->lse.host)[i] * 1.44269504f,
                                    .weight = weight,
                                    .even = (float)(p->smoothing / p->classes) * weight,
                                    .target = target < 0 ? DW_SM90_LOSS_IGNORED : (int)target};
    }
    send_block(r, &rows);
    const dw_matrix x = matrix_of(&r->x), w = matrix_of(&r->w);
    const dw_gemm gemm = {
        .struct_size = sizeof gemm,
        .dtype = dtype_of(p),
        .output = dtype_of(p),
        .m = p->rows,
        .n = count,
        .k = p->size,
        .alpha = 1.0f,
        .a = x,
        .b = {(char *)w.data + 2 * (w_row * w.stride + (p->turned ? first : 0)), w.stride},
        .d = {d.device, pitch},
        .bias = p->bias ? (char *)r->bias.device + 2 * first : NULL};
    const dw__gemm_groups_call call = dw__gemm_single(&gemm, (dw__gemm_turned){.b = p->turned});
    const dw_sm90_loss loss = {
        .rows = rows.device, .hit = (float)(1.0 - p->smoothing), .first = first};
    if (dw__variant_of(&r->context, &dw__sm90_linear_cross_entropy, dw__loss_pack(v), &variant) !=
            DW_OK ||
        dw__sm90_loss_enqueue(&call, &loss, &r->context, variant) != DW_OK)
        fail_msg("%s", dw_last_error());
    fetch_block(r, &d);
    for (int i = 0; i < p->rows; i++) {
        const statistics s = statistics_of(r, i);
        for (int j = 0; j < count; j++) {
            const uint16_t bits = ((const uint16_t *)d.host)[i * pitch + j];
            check_gradient_of(r, &s, i, first + j, stored(r, i, first + j), row[i].weight,
                              p->f16 ? dw__f16_to_f32(bits) : dw__bf16_to_f32(bits));
        }
        for (int j = count; j < pitch; j++)
            assert_int_equal(((const uint16_t *)d.host)[i * pitch + j], 0xFFFF);
    }
    drop_block(r, &rows);
    drop_block(r, &d);
}

/* ---- given logits ---------------------------------------------------------------------------------------- */

/* Any logits, and their log-sum-exps. */
static void draw_logits(const run *r) {
    const problem *p = r->problem;
    uint64_t state = 5;
    for (int i = 0; i < p->rows; i++) {
        uint16_t *row = (uint16_t *)r->logits.host + (size_t)i * (size_t)r->pitch;
        for (int j = 0; j < p->classes; j++) {
            const float x = 8.0f * random_value(&state, false);
            row[j] = p->f16 ? dw__f32_to_f16(x) : dw__f32_to_bf16(x);
        }
        ((float *)r->lse.host)[i] = (float)statistics_of(r, i).lse;
    }
    send_block(r, &r->logits);
    send_block(r, &r->lse);
}

typedef struct gradients {
    block dloss, dx, dw;
} gradients;

/* `given`: with the logits that forward has stored, which may be overwritten if they are `disposable`. */
static void run_backward(run *r, bool given, bool disposable, gradients *g) {
    const problem *p = r->problem;
    const dw__kernel *kernel = &dw__sm90_linear_cross_entropy;
    const dw__variant *variant;
    size_t bytes = 0;
    dw__operation_call call = forward_of(r);
    const dw__tensor logits = call.call.outputs[2], w = call.call.inputs[1],
                     target = call.call.inputs[3];
    *g = (gradients){.dloss = block_of(r->device, (size_t)p->rows * sizeof(float)),
                     .dx = block_of(r->device, (size_t)(p->rows * p->size) * 2),
                     .dw = block_of(r->device, (size_t)(p->classes * p->size) * 2)};
    for (int i = 0; i < p->rows; i++) ((float *)g->dloss.host)[i] = weight_of(i);
    send_block(r, &g->dloss);
    call.call.op = DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
    call.call.input_count = 7;
    call.call.inputs[3] = given ? logits : (dw__tensor){.rank = -1};
    call.call.inputs[4] = target;
    call.call.inputs[5] = vector_of(r->lse.device, DW_F32, p->rows);
    call.call.inputs[6] = vector_of(g->dloss.device, DW_F32, p->rows);
    call.call.outputs[0] = call.call.inputs[0];
    call.call.outputs[0].data = g->dx.device;
    call.call.outputs[1] = w;
    call.call.outputs[1].data = g->dw.device;
    call.call.outputs[2] = (dw__tensor){.rank = -1};
    for (int o = 0; o < 2; o++) dw__tensor_set_contiguous(&call.call.outputs[o]);
    call.call.disposable = disposable ? 1 << 3 : 0;
    if (kernel->supports(kernel, &call, NULL) != DW_OK ||
        kernel->workspace_bytes(kernel, &call, &r->context, &bytes) != DW_OK ||
        kernel->prepare(kernel, &call, &r->context, &variant) != DW_OK ||
        dw__variant_status(variant) != DW_OK)
        fail_msg("%s", dw_last_error());
    block workspace = block_of(r->device, bytes);
    call.workspace = workspace.device;
    if (kernel->enqueue(&call, &r->context, variant) != DW_OK) fail_msg("%s", dw_last_error());
    fetch_block(r, &g->dx);
    fetch_block(r, &g->dw);
    fetch_block(r, &r->logits);
    drop_block(r, &workspace);
}

static void drop_gradients(const run *r, gradients *g) {
    drop_block(r, &g->dloss);
    drop_block(r, &g->dx);
    drop_block(r, &g->dw);
}

static double number_at(const run *r, const block *b, int at) {
    const uint16_t bits = ((const uint16_t *)b->host)[at];
    return r->problem->f16 ? dw__f16_to_f32(bits) : dw__bf16_to_f32(bits);
}

static void check_sum(const run *r, double found, double sum, double size, int terms,
                      const char *what, int row) {
    const double error = (terms + 2) * 0x1p-23 * size;
    check_number(found, sum,
                 error + (0x1p-23 + unit_of(r->problem)) * (fabs(sum) + error) + 0x1p-25, what,
                 row);
}

/* Some elements of both products of the gradients of logits, which have the logits' place in `r`. */
static void check_products(const run *r, const gradients *g) {
    const problem *p = r->problem;
    for (int i = 0; i < p->rows; i += 7)
        for (int e = 0; e < p->size; e += 11) {
            double sum = 0.0, size = 0.0;
            for (int j = 0; j < p->classes; j++) {
                const double term =
                    stored(r, i, j) * (p->turned ? get(&r->w, e, j) : get(&r->w, j, e));
                sum += term, size += fabs(term);
            }
            check_sum(r, number_at(r, &g->dx, i * p->size + e), sum, size, p->classes, "dx", i);
        }
    for (int j = 0; j < p->classes; j++)
        for (int e = j % 17; e < p->size; e += 17) {
            double sum = 0.0, size = 0.0;
            for (int i = 0; i < p->rows; i++) {
                const double term = stored(r, i, j) * get(&r->x, i, e);
                sum += term, size += fabs(term);
            }
            const int at = p->turned ? e * p->classes + j : j * p->size + e;
            check_sum(r, number_at(r, &g->dw, at), sum, size, p->rows, "dw", j);
        }
}

/* In place, the logits become their gradients. Otherwise they stay, and results differ by the order of sums at most. */
static void expect_right_given(const problem *p) {
    run r;
    gradients g, other;
    open_run(p, &r);
    draw_logits(&r);
    run given = r; /* with the logits as they are now */
    given.logits.host = memcpy(malloc(r.logits.bytes), r.logits.host, r.logits.bytes);
    run_backward(&r, true, true, &g);
    for (int i = 0; i < p->rows; i++) {
        const statistics s = statistics_of(&given, i);
        for (int j = 0; j < p->classes; j++)
            check_gradient_of(&r, &s, i, j, stored(&given, i, j), weight_of(i), stored(&r, i, j));
    }
    check_padding(&r);
    check_products(&r, &g);
    send_block(&r, &given.logits);
    run_backward(&given, true, false, &other);
    check_products(&r, &other);
    fetch_block(&r, &r.logits);
    assert_memory_equal(r.logits.host, given.logits.host, r.logits.bytes);
    free(given.logits.host);
    drop_gradients(&r, &g);
    drop_gradients(&r, &other);
    close_run(&r);
}

/* The first has blocks of 256 classes, each a piece of a row; in one block, rows have several pieces. */
static const problem of_given[] = {
    {.rows = 26,
     .classes = 3421,
     .size = 1032,
     .keeps = true,
     .extra = 3,
     .smoothing = 0.1,
     .scale = 1,
     .sms = 1},
    {.rows = 135,
     .classes = 520,
     .size = 1032,
     .turned = true,
     .f16 = true,
     .keeps = true,
     .extra = 8,
     .scale = 1,
     .sms = 3},
};

static void given_logits_become_gradients(void **state) {
    (void)state;
    for (size_t i = 0; i < DW_COUNT(of_given); i++) expect_right_given(&of_given[i]);
}

/* ---- blocks of classes ---------------------------------------------------------------------------------- */

/* Rounds of tiles that the products of dw take in blocks of classes. */
static int64_t rounds_in_blocks(int64_t size, int64_t classes, int64_t block, int sms) {
    int64_t rounds = 0;
    for (int64_t first = 0; first < classes; first += block) {
        const int64_t left = classes - first, count = left < block ? left : block,
                      tiles = ((count + 127) / 128) * ((size + 255) / 256);
        rounds += (tiles + sms - 1) / sms;
    }
    return rounds;
}

/* GPT-2's best blocks fill rounds of 44 tiles of 128 classes. Those of Llama 1B take at most 4 % more rounds than the
 * fewest. */
static void blocks_fill_rounds(void **state) {
    (void)state;
    assert_int_equal(dw__sm90_loss_block(16384, 768, 50257, 8192, 132), 44 * 128);
    assert_int_equal(dw__sm90_loss_block(16384, 768, 50257, 256, 132), 256);
    const int64_t block = dw__sm90_loss_block(8192, 2048, 128256, 16384, 132);
    assert_true(block % 256 == 0 && block <= 16384);
    assert_true((double)rounds_in_blocks(2048, 128256, block, 132) <= 1.04 * 8 * 1002 / 132.0);
}

/* Several blocks, the last of an odd number of classes. Gradients of logits that are computed again have the bits of those
 * that are made from stored logits, whose products are known then. */
static void check_blocks(void) {
    const problem p = {.rows = 40,
                       .classes = 1291,
                       .size = 1032,
                       .keeps = true,
                       .extra = 5,
                       .smoothing = 0.1,
                       .scale = 0.5,
                       .sms = 2};
    run r;
    gradients stored_ones, again;
    setenv("DEEPWELL_LOGITS_BYTES", "41000", 1); /* 512 classes of 40 rows */
    open_run(&p, &r);
    run_forward(&r);
    run_backward(&r, false, false, &again);
    run_backward(&r, true, true, &stored_ones);
    check_products(&r, &again);
    check_products(&r, &stored_ones);
    drop_gradients(&r, &stored_ones);
    drop_gradients(&r, &again);
    close_run(&r);
}
static void logits_are_computed_again_in_blocks(void **state) {
    (void)state;
    in_child(check_blocks);
}

/* ---- tests ---------------------------------------------------------------------------------------------- */

static const problem problems[] = {
    {.rows = 300,
     .classes = 331,
     .size = 200,
     .bias = true,
     .keeps = true,
     .extra = 5,
     .scale = 1,
     .sms = 2},
    {.rows = 67,
     .classes = 1031,
     .size = 1100,
     .f16 = true,
     .keeps = true,
     .smoothing = 0.1,
     .extra = 1,
     .scale = 0.25,
     .sms = 1},
    {.rows = 130,
     .classes = 520,
     .size = 64,
     .turned = true,
     .keeps = true,
     .bias = true,
     .closes = true,
     .scale = 6,
     .sms = 3},
    {.rows = 1, .classes = 257, .size = 8, .keeps = true, .extra = 7, .scale = 1, .sms = 1},
    {.rows = 129,
     .classes = 5,
     .size = 72,
     .turned = true,
     .f16 = true,
     .keeps = true,
     .smoothing = 0.2,
     .extra = 3,
     .scale = 1,
     .sms = 2},
};

static void expect_right(const problem *p) {
    run r;
    open_run(p, &r);
    run_forward(&r);
    for (int row = 0; row < p->rows; row++) {
        for (int i = 0; i < p->classes; i++) check_logit(&r, row, i);
        check_row(&r, row);
    }
    check_padding(&r);
    check_gradient(&r, 0, p->classes);
    if (p->classes > 192) check_gradient(&r, 64, p->classes - 101);
    close_run(&r);
}

static void losses_and_gradients_are_right(void **state) {
    (void)state;
    for (size_t i = 0; i < DW_COUNT(problems); i++) expect_right(&problems[i]);
}

static void expect_same_bits(const block *a, const block *b) {
    assert_memory_equal(a->host, b->host, a->bytes);
}

/* Losses have the same bits whether the logits are stored or not, and on any number of SMs. */
static void logits_need_not_be_stored(void **state) {
    problem p = problems[0], other = p;
    run r, s;
    (void)state;
    other.keeps = false;
    other.sms = 5;
    open_run(&p, &r);
    open_run(&other, &s);
    run_forward(&r);
    run_forward(&s);
    expect_same_bits(&r.loss, &s.loss);
    expect_same_bits(&r.lse, &s.lse);
    for (size_t i = 0; i < s.logits.bytes; i++)
        assert_int_equal(((const unsigned char *)s.logits.host)[i], 0xFF);
    close_run(&r);
    close_run(&s);
}

static unsigned error_with_target(int row, int64_t target) {
    run r;
    open_run(&problems[0], &r);
    ((int64_t *)r.target.host)[row] = target;
    send_block(&r, &r.target);
    run_forward(&r);
    fetch_block(&r, &r.error);
    const unsigned word = *(const unsigned *)r.error.host;
    assert_true(((const float *)r.loss.host)[row] == 0.0f || word == 0);
    close_run(&r);
    return word;
}

/* A target whose lower 32 bits are a class is reported, too. */
static void targets_outside_of_the_classes_are_reported(void **state) {
    (void)state;
    assert_int_equal(error_with_target(299, 330), 0);
    assert_int_equal(error_with_target(299, 331), DW_DATA_INDEX | MARK << 8);
    assert_int_equal(error_with_target(17, -1), DW_DATA_INDEX | MARK << 8);
    assert_int_equal(error_with_target(5, ((int64_t)1 << 32) + 4), DW_DATA_INDEX | MARK << 8);
}

static void other_calls_are_refused(void **state) {
    const dw__kernel *kernel = &dw__sm90_linear_cross_entropy;
    run r;
    (void)state;
    open_run(&problems[0], &r);
    dw__operation_call call = forward_of(&r);
    assert_int_equal(kernel->supports(kernel, &call, NULL), DW_OK);
    call.call.inputs[0].stride[0]++; /* rows of no multiple of 16 bytes */
    assert_int_equal(kernel->supports(kernel, &call, NULL), DW_UNSUPPORTED);
    call = forward_of(&r);
    call.call.outputs[2].stride[0]++;
    assert_int_equal(kernel->supports(kernel, &call, NULL), DW_UNSUPPORTED);
    call = forward_of(&r);
    for (int i = 0; i < 2; i++) call.call.inputs[i].dtype = DW_F32;
    assert_int_equal(kernel->supports(kernel, &call, NULL), DW_UNSUPPORTED);
    call = forward_of(&r);
    call.call.inputs[3].stride[0] = 2;
    assert_int_equal(kernel->supports(kernel, &call, NULL), DW_UNSUPPORTED);
    close_run(&r);
}

static void check_first_use(void) {
    expect_right(&problems[0]);
    expect_right(&problems[2]);
    expect_right_given(&of_given[1]);
    REQUIRE(lines == 0);
}
static void the_first_use_check_passes(void **state) {
    (void)state;
    in_child(check_first_use);
}

int main(void) {
    /* Children come first, because a process keeps variants that were loaded without a check. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_use_check_passes),
        cmocka_unit_test(logits_are_computed_again_in_blocks),
        cmocka_unit_test(blocks_fill_rounds),
        cmocka_unit_test(losses_and_gradients_are_right),
        cmocka_unit_test(given_logits_become_gradients),
        cmocka_unit_test(logits_need_not_be_stored),
        cmocka_unit_test(targets_outside_of_the_classes_are_reported),
        cmocka_unit_test(other_calls_are_refused),
    };
    return cmocka_run_group_tests(tests, find_compiler, NULL);
}
