/* A linear layer followed by cross-entropy, forward and backward, by blocks of logits: the head of a language model.
 *
 * The GEMMs are calls of the registry's kernels, the rest is cuda/common/cross_entropy.cu. The logits of a block have
 * the type of x, and their rows begin at multiples of 64 elements, whatever the number of classes: GEMMs are several
 * times slower if rows begin at no multiple of 16 bytes. They are as slow if a row does not end at one (cuBLASLt 13 on
 * an H200: 1.9 ms instead of 0.26 for GPT-2's 50257 classes), so the last few classes have products of their own.
 *
 * Forward has blocks of rows:      logits = x[rows] w^T; lse and losses of these rows.
 * Backward has blocks of classes:  logits = x w[classes]^T, unless they are given; dlogits in their place, by lse;
 *                                  dw[classes] = dlogits^T x; db[classes] = column sums; dx += dlogits w[classes].
 *
 * Forward stores all logits if they are asked for, and then has one block. So has backward if it may overwrite the
 * logits that it is given.
 *
 * On Hopper the GEMM of logits in 16 bits does what follows it (sm90/sm90_loss.cuh): forward finds the statistics of its
 * tiles, so that nothing reads the logits, which are stored only if they are asked for; backward without given logits
 * stores dlogits in their place. Of given logits that may be overwritten, those of the first classes become dlogits; those
 * of the next classes follow while the GEMM of dw[classes] runs (sm90/sm90_beside.cuh), and dx is one GEMM of all classes.
 *
 * With blocks of classes each element of dw and db is the result of one GEMM, or one sum, and is rounded once. Blocks
 * of rows would add to an F32 copy of dw for each block: [V, K] is 1 GB for 128256 classes of 2048 features, where the
 * F32 sums of dx, [T, K], are 67 MB for 8192 rows.
 *
 * A block of logits has at most DEEPWELL_LOGITS_BYTES bytes, 256 MiB by default. On Hopper blocks of classes are chosen by
 * the rounds of tiles that their three products take: 8192 classes of 16384 rows fit, but dw of 768 features has 192 tiles
 * of 128 x 256 then, two rounds of an H200's 132 SMs; 5632 classes have 132. */
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/cuda/gpu_loss.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* Blocks are multiples of LARGE_UNIT, a tile's sides, if that leaves at least eight of them; smaller ones keep
 * addresses at multiples of 16 bytes. */
enum { PITCH = 64, ALIGNMENT = 256, ROW_UNIT = 8, CLASS_UNIT = 64, LARGE_UNIT = 256 };

/* ---- blocks --------------------------------------------------------------------------------------- */

static size_t given_bound; /* 0: none */

static void read_bound(void) {
    const char *text = getenv("DEEPWELL_LOGITS_BYTES");
    const long long given = text ? atoll(text) : 0;
    if (given > 0) given_bound = (size_t)given;
}

bool dw__logits_bound(size_t *bytes) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_bound);
    *bytes = given_bound;
    return given_bound > 0;
}

static int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

/* The most rows or classes of a block, of which each one takes `bytes` bytes: a multiple of `unit`. */
static int64_t most_of(size_t bytes, int64_t unit) {
    size_t bound;
    if (!dw__logits_bound(&bound)) bound = (size_t)256 << 20;
    const int64_t most = (int64_t)(bound / (bytes > 0 ? bytes : 1));
    if (most >= 8 * LARGE_UNIT) unit = LARGE_UNIT;
    return most < unit ? unit : most / unit * unit;
}

/* Divides `total` rows or classes into blocks of about one size. */
static int64_t block_of(int64_t total, size_t bytes, int64_t unit) {
    const int64_t most = most_of(bytes, unit), blocks = (total + most - 1) / most;
    if (blocks <= 1) return total;
    if (most >= 8 * LARGE_UNIT) unit = LARGE_UNIT;
    return round_up((total + blocks - 1) / blocks, unit);
}

/* The number of classes, of those left, that one product computes: in 16 bits whole vectors of 16 bytes, then what
 * remains. */
static int64_t classes_at_once(int64_t left, dw_dtype type) {
    enum { VECTOR = 8 };
    return dw_dtype_bytes(type) == 2 && left > VECTOR ? left / VECTOR * VECTOR : left;
}

/* A call's tensors and the parts of its workspace. */
typedef struct head {
    const dw__call *c;
    const dw__tensor *x, *w, *bias, *target; /* bias: NULL if absent */
    const dw__tensor
        *logits; /* backward: those given; forward: where to store all; NULL: neither */
    bool backward, transpose_w;
    bool tiles;    /* Hopper: statistics or gradients of tiles, by the GEMM */
    bool in_place; /* the logits, or dlogits, lie in `logits` and not in the workspace */
    int64_t rows, size, classes;
    int64_t block, pitch; /* rows or classes of a block; elements from row to row of its logits */
    size_t sums, partials, weights, gemm; /* offsets: the logits or statistics are first */
} head;

static int64_t tiles_of(int64_t classes) {
    return (classes + DW__SM90_LOSS_COLUMNS - 1) / DW__SM90_LOSS_COLUMNS;
}

static double smoothing_of(const dw__call *c) {
    return dw__call_float(c, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0);
}

/* `sm_count`: 1 if the blocks of classes do not matter. */
static void head_of(const dw__kernel *kernel, const dw__call *c, int sm_count, head *h) {
    enum { X, W, B, LOGITS, BACKWARD_TARGET, MADE = 2 };
    *h = (head){.c = c,
                .x = &c->inputs[X],
                .w = &c->inputs[W],
                .bias = c->inputs[B].rank >= 0 ? &c->inputs[B] : NULL,
                .backward = c->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
                .tiles = kernel == &dw__sm90_linear_cross_entropy,
                .transpose_w = dw__call_int(c, DW_ATTR_KEY_TRANSPOSE_W, 1) != 0};
    h->target = &c->inputs[h->backward ? BACKWARD_TARGET : LOGITS];
    if (h->backward && c->inputs[LOGITS].rank >= 0) h->logits = &c->inputs[LOGITS];
    if (!h->backward && c->outputs[MADE].data) h->logits = &c->outputs[MADE];
    h->in_place = h->logits && (!h->backward || c->disposable >> LOGITS & 1);
    h->rows = h->x->shape[0];
    h->size = h->x->shape[1];
    h->classes = h->w->shape[h->transpose_w ? 0 : 1];
    const size_t width = dw_dtype_bytes(h->x->dtype);
    size_t logits = 0;
    if (h->in_place) {
        h->block = h->backward ? h->classes : h->rows;
        (void)dw__tensor_row_stride(h->logits, &h->pitch);
    } else if (h->backward) {
        const size_t class = (size_t)h->rows * width;
        const int64_t most = most_of(class, CLASS_UNIT);
        h->block = block_of(h->classes, class, CLASS_UNIT);
        if (h->tiles && h->block < h->classes && most >= LARGE_UNIT)
            h->block = dw__sm90_loss_block(h->rows, h->size, h->classes, most, sm_count);
        h->pitch = round_up(h->block, PITCH);
        logits = (size_t)(h->rows * h->pitch) * width;
    } else if (!h->tiles) {
        h->pitch = round_up(h->classes, PITCH);
        h->block = block_of(h->rows, (size_t)h->pitch * width, ROW_UNIT);
        logits = (size_t)(h->block * h->pitch) * width;
    }
    if (h->tiles && !h->backward) {
        const int64_t each = tiles_of(h->classes) * (smoothing_of(c) != 0.0 ? 3 : 2) + 1;
        const size_t row = (size_t)each * sizeof(float);
        if (!h->in_place) h->pitch = round_up(h->classes, PITCH); /* of logits without an address */
        h->block = block_of(h->rows, row, ROW_UNIT);
        logits = (size_t)h->block * row;
    }
    /* F32 sums of dx, if it has 16 bits and several blocks */
    const int64_t together = h->tiles ? h->block : classes_at_once(h->block, h->x->dtype);
    const bool sums =
        h->backward && !(h->tiles && h->in_place) && width < 4 && together < h->classes;
    h->sums = (size_t)round_up((int64_t)logits, ALIGNMENT);
    h->partials = h->sums + (size_t)round_up(sums ? h->rows * h->size * (int64_t)sizeof(float) : 0,
                                             ALIGNMENT);
    h->weights = h->partials +
                 (size_t)round_up((h->backward ? 1 : h->rows) * (int64_t)sizeof(double), ALIGNMENT);
    h->gemm = h->weights;
    if (h->tiles && h->backward)
        h->gemm += (size_t)round_up(h->rows * (int64_t)sizeof(dw_sm90_loss_row), ALIGNMENT);
}

/* ---- calls of other kernels ----------------------------------------------------------------------- */

typedef struct run {
    const head *h;
    const dw__operation_call *given;
    const dw__context *context;
    const dw__variant *variant; /* NULL: kernels are prepared, nothing runs */
    dw__gpu_target gpu;
    char name[DW__TARGET_NAME];
    size_t gemm_bytes; /* most workspace of a call, if nothing runs */
} run;

/* `kernel`: NULL, or the one to begin with. */
static dw_status call_kernel(run *r, dw__operation_call *made, const dw__kernel *kernel) {
    const dw__variant *variant;
    dw_status status = DW_UNSUPPORTED;
    size_t bytes = 0;
    made->stream = r->given->stream;
    if (kernel && kernel->supports(kernel, made, &r->gpu) == DW_OK) {
        status = kernel->prepare(kernel, made, r->context, &variant);
        if (status == DW_OK) status = dw__variant_status(variant);
    }
    if (status == DW_UNSUPPORTED) kernel = NULL;
    while (status == DW_UNSUPPORTED) {
        kernel = dw__kernel_for(made, &r->gpu, kernel);
        if (!kernel) return dw__kernel_fail_none(made, &r->gpu);
        status = kernel->prepare(kernel, made, r->context, &variant);
        if (status == DW_OK) status = dw__variant_status(variant);
    }
    DW_RETURN_IF_FAILED(status);
    if (r->variant) {
        made->workspace = (char *)r->given->workspace + r->h->gemm;
        return kernel->enqueue(made, r->context, variant);
    }
    if (kernel->workspace_bytes)
        DW_RETURN_IF_FAILED(kernel->workspace_bytes(kernel, made, r->context, &bytes));
    if (bytes > r->gemm_bytes) r->gemm_bytes = bytes;
    return DW_OK;
}

typedef struct factor {
    dw__tensor matrix;
    bool transposed;
} factor;

static dw_status multiply_by(run *r, const dw__kernel *kernel, factor a, factor b,
                             dw__tensor result, bool accumulates) {
    const dw_attr attrs[] = {{.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = a.transposed},
                             {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = b.transposed}};
    dw__operation_call made = {
        .call = {.op = DW_OP_MATMUL,
                 .attr_count = 2,
                 .attrs = attrs,
                 .input_count = 2,
                 .output_count = 1,
                 .inputs = {a.matrix, b.matrix},
                 .outputs = {result},
                 .accumulates = accumulates ? DW__ADDS_TO_OUTPUT : DW__ADDS_NOTHING,
                 .tf32 = r->h->c->tf32}};
    return call_kernel(r, &made, kernel);
}

static dw_status multiply(run *r, factor a, factor b, dw__tensor result, bool accumulates) {
    return multiply_by(r, NULL, a, b, result, accumulates);
}

static dw_status add_rows(run *r, dw__tensor x, dw__tensor result) {
    static const int64_t first[] = {0};
    const dw_attr axes = {.key = DW_ATTR_KEY_AXES, .count = 1, .list = first};
    dw__operation_call made = {.call = {.op = DW_OP_REDUCE_SUM,
                                        .attr_count = 1,
                                        .attrs = &axes,
                                        .input_count = 1,
                                        .output_count = 1,
                                        .inputs = {x},
                                        .outputs = {result}}};
    return call_kernel(r, &made, NULL);
}

static void *offset(void *data, int64_t elements, dw_dtype dtype) {
    return data ? (char *)data + elements * (int64_t)dw_dtype_bytes(dtype) : NULL;
}

static dw__tensor part(const dw__tensor *t, int axis, int64_t first, int64_t count) {
    dw__tensor result = *t;
    result.shape[axis] = count;
    result.data = offset(t->data, first * t->stride[axis], t->dtype);
    return result;
}

static factor classes_of_w(const head *h, int64_t first, int64_t count, bool transposed) {
    return (factor){part(h->w, h->transpose_w ? 0 : 1, first, count), transposed};
}

/* The logits of a block, or dlogits. */
static dw__tensor block_at(const run *r, int64_t row, int64_t rows, int64_t column,
                           int64_t columns) {
    if (r->h->in_place) {
        const dw__tensor of_rows = part(r->h->logits, 0, row, rows);
        return part(&of_rows, 1, column, columns);
    }
    return (dw__tensor){.data = r->variant ? r->given->workspace : NULL,
                        .dtype = r->h->x->dtype,
                        .rank = 2,
                        .shape = {rows, columns},
                        .stride = {r->h->pitch, 1}};
}

/* ---- forward -------------------------------------------------------------------------------------- */

enum { DX, DW, DB }; /* results of backward */

static dw_cross_entropy_params params_of(const run *r) {
    const head *h = r->h;
    return (dw_cross_entropy_params){
        .bias = h->bias && !(h->backward && h->logits) ? h->bias->data : NULL,
        .target = h->target->data,
        .partials = r->variant ? (char *)r->given->workspace + h->partials : NULL,
        .rows = h->rows,
        .ignored = dw__call_int(h->c, DW_ATTR_KEY_IGNORE_INDEX, -100),
        .smoothing = smoothing_of(h->c),
        .classes = (int)h->classes,
        .reduction = dw__loss_reduction(h->c),
        .error = r->given->error};
}

/* The product of rows of x with classes of w, and its bias. */
static dw__gemm_groups_call product_of(const head *h, const dw__tensor *x, const dw__tensor *w,
                                       const void *bias, const dw__tensor *d, void *stream) {
    dw_gemm gemm = {.struct_size = sizeof gemm,
                    .dtype = x->dtype,
                    .output = x->dtype,
                    .m = d->shape[0],
                    .n = d->shape[1],
                    .k = h->size,
                    .alpha = 1.0f,
                    .a = {x->data, x->stride[0]},
                    .b = {w->data, w->stride[0]},
                    .d = {d->data, d->stride[0]},
                    .bias = bias,
                    .stream = stream};
    return dw__gemm_single(&gemm, (dw__gemm_turned){.b = !h->transpose_w});
}

static const void *bias_from(const head *h, int64_t first, int64_t count) {
    return h->bias ? part(h->bias, 0, first, count).data : NULL;
}

/* The statistics of a block's rows: floats [tile][row], then those of the targets. */
static dw_sm90_loss statistics_at(const run *r, int64_t first, int64_t count) {
    const head *h = r->h;
    float *const at = r->given->workspace;
    const int64_t each = tiles_of(h->classes) * count;
    const bool sums = smoothing_of(h->c) != 0.0;
    return (dw_sm90_loss){
        .target = (const long long *)h->target->data + first,
        .largest = at,
        .sums = at + each,
        .logit_sums = sums ? at + 2 * each : NULL,
        .at_target = at + (sums ? 3 : 2) * each,
    };
}

static dw_status forward_tiles(run *r, int64_t first, int64_t count) {
    const head *h = r->h;
    const dw__tensor x = part(h->x, 0, first, count), *loss = &h->c->outputs[0],
                     *lse = &h->c->outputs[1];
    dw__tensor logits = {
        .dtype = x.dtype, .rank = 2, .shape = {count, h->classes}, .stride = {h->pitch, 1}};
    if (!r->variant) return DW_OK;
    if (h->logits) logits = part(h->logits, 0, first, count);
    const dw__gemm_groups_call product =
        product_of(h, &x, h->w, bias_from(h, 0, h->classes), &logits, r->given->stream);
    dw_cross_entropy_tile_params p = {.row = params_of(r),
                                      .loss = statistics_at(r, first, count),
                                      .tiles = (int)tiles_of(h->classes)};
    DW_RETURN_IF_FAILED(dw__sm90_loss_enqueue(&product, &p.loss, r->context, r->variant));
    p.row.columns = p.row.classes;
    p.row.rows = count;
    p.row.target += first;
    p.row.lse = offset(lse->data, first, lse->dtype);
    p.row.loss = offset(loss->data, first, loss->dtype);
    p.row.partials = (float *)p.row.partials + first;
    return dw__loss_tiles(r->given, r->context, r->variant, &p);
}

static dw_status forward_rows(run *r, int64_t first, int64_t count) {
    const head *h = r->h;
    const dw__tensor logits = block_at(r, first, count, 0, h->classes), *loss = &h->c->outputs[0],
                     *lse = &h->c->outputs[1];
    for (int64_t from = 0, together; from < h->classes; from += together) {
        together = classes_at_once(h->classes - from, h->x->dtype);
        DW_RETURN_IF_FAILED(multiply(r, (factor){part(h->x, 0, first, count), false},
                                     classes_of_w(h, from, together, h->transpose_w),
                                     part(&logits, 1, from, together), false));
    }
    if (!r->variant) return DW_OK;
    dw_cross_entropy_params p = params_of(r);
    p.x = logits.data;
    p.x_stride = h->pitch;
    if (h->in_place && p.bias) p.dx = logits.data;
    p.columns = p.classes;
    p.rows = count;
    p.target += first;
    p.lse = offset(lse->data, first, lse->dtype);
    p.loss = offset(loss->data, first, loss->dtype);
    p.partials = (char *)p.partials + (size_t)first * (h->x->dtype == DW_F64 ? 8 : 4);
    return dw__loss_rows(r->given, r->context, r->variant, &p);
}

static dw_status forward(run *r) {
    const head *h = r->h;
    for (int64_t first = 0; first < h->rows; first += h->block) {
        const int64_t left = h->rows - first, count = left < h->block ? left : h->block;
        DW_RETURN_IF_FAILED(h->tiles ? forward_tiles(r, first, count)
                                     : forward_rows(r, first, count));
    }
    if (!r->variant || !h->c->outputs[0].data) return DW_OK;
    dw_cross_entropy_params p = params_of(r);
    p.loss = h->c->outputs[0].data;
    return p.reduction == DW_LOSS_NONE ? DW_OK
                                       : dw__loss_total(r->given, r->context, r->variant, &p);
}

/* ---- backward ------------------------------------------------------------------------------------- */

static bool wants(const run *r, int result) {
    return !r->variant || r->h->c->outputs[result].data != NULL;
}

/* The gradients of a block by the GEMM of its logits. */
static dw_status dlogits_by_tiles(run *r, const dw_cross_entropy_params *p, int64_t first,
                                  const dw__tensor *dlogits) {
    const head *h = r->h;
    const int64_t count = dlogits->shape[1];
    const factor w = classes_of_w(h, first, count, h->transpose_w);
    if (!r->variant) return DW_OK;
    const dw__gemm_groups_call product =
        product_of(h, h->x, &w.matrix, bias_from(h, first, count), dlogits, r->given->stream);
    const dw_sm90_loss loss = {
        .rows = (const void *)((char *)r->given->workspace + h->weights),
        .hit = (float)(1.0 - p->smoothing),
        .first = (int)first,
    };
    return dw__sm90_loss_enqueue(&product, &loss, r->context, r->variant);
}

/* How to make dlogits of given logits. */
static dw_sm90_loss gradients_beside(const run *r, const dw_cross_entropy_params *p, int64_t first,
                                     const dw__tensor *dlogits) {
    const head *h = r->h;
    const dw__tensor logits = part(h->logits, 1, first, dlogits->shape[1]);
    return (dw_sm90_loss){
        .rows = (const void *)((char *)r->given->workspace + h->weights),
        .hit = (float)(1.0 - p->smoothing),
        .first = (int)first,
        .logits = logits.data,
        .gradients = dlogits->data,
        .logits_stride = logits.stride[0],
        .gradients_stride = dlogits->stride[0],
        .count = (int)h->rows,
        .columns = (int)dlogits->shape[1],
    };
}

/* The product that makes dw of classes. */
static dw__gemm_groups_call product_of_dw(const head *h, int64_t first, const dw__tensor *dlogits,
                                          void *stream) {
    const dw__tensor dw =
        part(&h->c->outputs[DW], h->transpose_w ? 0 : 1, first, dlogits->shape[1]);
    const dw_matrix x = {h->x->data, h->x->stride[0]}, y = {dlogits->data, dlogits->stride[0]};
    const dw_gemm gemm = {.struct_size = sizeof gemm,
                          .dtype = h->x->dtype,
                          .output = h->x->dtype,
                          .m = dw.shape[0],
                          .n = dw.shape[1],
                          .k = h->rows,
                          .alpha = 1.0f,
                          .a = h->transpose_w ? y : x,
                          .b = h->transpose_w ? x : y,
                          .d = {dw.data, dw.stride[0]},
                          .stream = stream};
    return dw__gemm_single(&gemm, (dw__gemm_turned){true, true});
}

static dw_status dlogits_of_classes(run *r, dw_cross_entropy_params p, int64_t first,
                                    dw__tensor dlogits) {
    const head *h = r->h;
    const int64_t count = dlogits.shape[1];
    int64_t stride;
    dw__tensor logits = dlogits;
    if (h->tiles && h->logits) {
        const dw_sm90_loss loss = gradients_beside(r, &p, first, &dlogits);
        return r->variant ? dw__sm90_loss_alone(&loss, r->given->stream, r->context, r->variant)
                          : DW_OK;
    }
    if (h->tiles) return dlogits_by_tiles(r, &p, first, &dlogits);
    if (h->logits) logits = part(h->logits, 1, first, count);
    for (int64_t from = 0, together; !h->logits && from < count; from += together) {
        together = classes_at_once(count - from, h->x->dtype);
        DW_RETURN_IF_FAILED(multiply(r, (factor){*h->x, false},
                                     classes_of_w(h, first + from, together, h->transpose_w),
                                     part(&logits, 1, from, together), false));
    }
    if (!r->variant) return DW_OK;
    (void)dw__tensor_row_stride(&logits, &stride);
    p.x = logits.data;
    p.x_stride = stride;
    if (p.bias) p.bias = part(h->bias, 0, first, count).data;
    p.dx = dlogits.data;
    p.dx_stride = h->pitch;
    p.first = (int)first;
    p.columns = (int)count;
    return dw__loss_rows(r->given, r->context, r->variant, &p);
}

/* The kernel that multiplies dlogits of so many classes: NULL if any will do. */
static const dw__kernel *kernel_of(const head *h, int64_t classes) {
    const bool even = classes_at_once(classes, h->x->dtype) == classes;
    return h->tiles && !even ? &dw__graph_gemm_hopper : NULL;
}

static dw_status gradients_of_classes(run *r, int64_t first, dw__tensor dlogits, dw__tensor dx) {
    const head *h = r->h;
    const int64_t count = dlogits.shape[1];
    const dw__kernel *const kernel = kernel_of(h, count);
    const factor x = {*h->x, !h->transpose_w}, from = {dlogits, h->transpose_w};
    if (wants(r, DW)) {
        const dw__tensor dw = part(&h->c->outputs[DW], h->transpose_w ? 0 : 1, first, count);
        DW_RETURN_IF_FAILED(multiply_by(r, kernel, h->transpose_w ? from : x,
                                        h->transpose_w ? x : from, dw, false));
    }
    if (wants(r, DB))
        DW_RETURN_IF_FAILED(add_rows(r, dlogits, part(&h->c->outputs[DB], 0, first, count)));
    if (!wants(r, DX)) return DW_OK;
    return multiply_by(r, kernel, (factor){dlogits, false},
                       classes_of_w(h, first, count, !h->transpose_w), dx, first > 0);
}

/* dlogits in the place of the logits, each block while dw of the block before it is computed; then all else. */
static dw_status backward_in_place(run *r, const dw_cross_entropy_params *p) {
    const head *h = r->h;
    const dw__tensor all = block_at(r, 0, h->rows, 0, h->classes);
    const int64_t block = dw__sm90_loss_classes(h->size, !h->transpose_w, r->context->sm_count);
    int64_t count = block < h->classes ? block : h->classes;
    dw__tensor dlogits = part(&all, 1, 0, count);
    dw_sm90_loss loss = gradients_beside(r, p, 0, &dlogits);
    if (r->variant)
        DW_RETURN_IF_FAILED(dw__sm90_loss_alone(&loss, r->given->stream, r->context, r->variant));
    for (int64_t first = 0, next; r->variant && first < h->classes; first = next) {
        const dw__gemm_groups_call product = product_of_dw(h, first, &dlogits, r->given->stream);
        next = first + count;
        count = block < h->classes - next ? block : h->classes - next;
        dlogits = part(&all, 1, next, count);
        loss = gradients_beside(r, p, next, &dlogits);
        if (count == 0) loss.count = 0;
        DW_RETURN_IF_FAILED(
            wants(r, DW) ? dw__sm90_loss_enqueue(&product, &loss, r->context, r->variant)
                         : dw__sm90_loss_alone(&loss, r->given->stream, r->context, r->variant));
    }
    if (wants(r, DB)) DW_RETURN_IF_FAILED(add_rows(r, all, h->c->outputs[DB]));
    if (!wants(r, DX)) return DW_OK;
    return multiply_by(r, kernel_of(h, h->classes), (factor){all, false},
                       (factor){*h->w, !h->transpose_w}, h->c->outputs[DX], false);
}

static dw_status backward(run *r) {
    enum { LSE = 5, DLOSS = 6 };
    const head *h = r->h;
    dw_cross_entropy_params p = params_of(r);
    dw__tensor dx = h->c->outputs[DX];
    p.lse = h->c->inputs[LSE].data;
    p.dloss = h->c->inputs[DLOSS].data;
    const bool sums = h->partials > h->sums;
    if (sums) {
        dx.dtype = DW_F32;
        dx.data = r->variant ? (char *)r->given->workspace + h->sums : NULL;
    }
    if (r->variant && p.reduction == DW_LOSS_MEAN)
        DW_RETURN_IF_FAILED(dw__loss_total(r->given, r->context, r->variant, &p));
    if (r->variant && h->tiles) {
        dw_cross_entropy_tile_params q = {
            .row = p, .weights = (void *)((char *)r->given->workspace + h->weights)};
        DW_RETURN_IF_FAILED(dw__loss_tiles(r->given, r->context, r->variant, &q));
    }
    if (h->tiles && h->in_place) return backward_in_place(r, &p);
    for (int64_t first = 0; first < h->classes; first += h->block) {
        const int64_t left = h->classes - first, count = left < h->block ? left : h->block;
        const dw__tensor dlogits = block_at(r, 0, h->rows, first, count);
        DW_RETURN_IF_FAILED(dlogits_of_classes(r, p, first, dlogits));
        for (int64_t from = 0, together; from < count; from += together) {
            together = h->tiles ? count : classes_at_once(count - from, h->x->dtype);
            DW_RETURN_IF_FAILED(
                gradients_of_classes(r, first + from, part(&dlogits, 1, from, together), dx));
        }
    }
    if (!sums || !r->variant || !wants(r, DX)) return DW_OK;
    dw_cross_entropy_round_params rounded = {
        .sums = dx.data, .result = h->c->outputs[DX].data, .count = h->rows * h->size};
    return dw__loss_round(r->given, r->context, r->variant, &rounded);
}

/* ---- the entry ------------------------------------------------------------------------------------ */

static bool computes(dw_op op) {
    return op == DW_OP_LINEAR_CROSS_ENTROPY || op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD;
}

/* Logits are read by bulk copies and stored by TMA. */
static bool rows_are_aligned(const head *h, const dw__tensor *logits) {
    int64_t stride;
    return dw__tensor_row_stride(logits, &stride) && (h->rows == 1 || stride % 8 == 0) &&
           (uintptr_t)logits->data % 16 == 0;
}

/* The product of all logits. */
static dw__gemm_groups_call whole_product(const head *h) {
    const dw__tensor logits = {.shape = {h->rows, h->classes},
                               .stride = {round_up(h->classes, PITCH), 1}};
    return product_of(h, h->x, h->w, h->bias ? h->bias->data : NULL, &logits, NULL);
}

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    enum { B = 2, MADE = 2 };
    /* With 768 features dw and dlogits beside it take 2.03 ms by themselves on an H200, one after the other 2.3. In a step of
     * GPT-2 they draw so much power that the GEMMs behind them take 5 % longer, and the step 1 %. */
    enum { LEAST_SIZE = 1024 };
    int64_t stride;
    head h;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    head_of(kernel, c, 1, &h);
    bool fits = h.classes > 0 && h.classes <= INT32_MAX / 2;
    if (h.logits) fits &= dw__tensor_row_stride(h.logits, &stride);
    for (uint32_t i = B; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0 && &c->inputs[i] != h.logits)
            fits &= dw__tensor_is_contiguous(&c->inputs[i]);
    for (uint32_t o = 0; o < c->output_count; o++)
        if (&c->outputs[o] != h.logits) fits &= dw__tensor_is_contiguous(&c->outputs[o]);
    if (h.tiles) fits &= h.x->stride[1] == 1 && h.w->stride[1] == 1;
    if (h.tiles && h.logits) fits &= rows_are_aligned(&h, h.logits);
    /* A plan has strides before it has addresses; a result that nothing reads has a rank of -1. */
    if (h.tiles && !h.backward && c->output_count > MADE && c->outputs[MADE].rank >= 0)
        fits &= rows_are_aligned(&h, &c->outputs[MADE]);
    if (h.tiles && h.backward && h.logits) fits &= h.size >= LEAST_SIZE;
    if (!fits) return dw__kernel_refuse(kernel);
    if (!h.tiles) return DW_OK;
    const dw__gemm_groups_call product =
        h.backward && h.logits ? product_of_dw(&h, 0, h.logits, NULL) : whole_product(&h);
    return dw__sm90_loss_supports(&product, gpu);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    head h;
    head_of(kernel, c, 1, &h);
    const double products = !h.backward ? 1.0
                            : h.logits  ? 2.0
                                        : 3.0,
                 logits = (double)h.rows * (double)h.classes,
                 rate = dw_dtype_bytes(h.x->dtype) < 4 ? gpu->flops : gpu->flops / 16.0,
                 product = 2.0 * logits * (double)h.size / rate;
    result->seconds = 4e-6 + products * product;
    if (h.tiles) {
        const dw__gemm_groups_call whole = whole_product(&h);
        result->seconds += dw__sm90_loss_seconds(&whole, gpu) - product;
    } else {
        result->seconds += 2.0 * logits * (double)dw_dtype_bytes(h.x->dtype) / gpu->bytes;
    }
    snprintf(result->from, sizeof result->from, "estimate: GEMMs and bytes of the logits");
}

static dw_status visit(const dw__kernel *kernel, const dw__operation_call *call,
                       const dw__context *context, const dw__variant *variant, size_t *bytes) {
    head h;
    head_of(kernel, &call->call, context->sm_count, &h);
    run r = {.h = &h, .given = call, .context = context, .variant = variant};
    r.gpu = dw__gpu_target_of(context, r.name);
    DW_RETURN_IF_FAILED(h.backward ? backward(&r) : forward(&r));
    *bytes = h.gemm + r.gemm_bytes;
    return DW_OK;
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    return visit(kernel, call, context, NULL, bytes);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    enum { LANES_OF_TILES = 32 }; /* not used */
    const dw__tensor *lse;
    size_t bytes;
    head h;
    DW_RETURN_IF_FAILED(visit(kernel, call, context, NULL, &bytes));
    head_of(kernel, &((const dw__operation_call *)call)->call, context->sm_count, &h);
    lse = h.backward ? &h.c->inputs[5] : &h.c->outputs[1];
    const bool given = h.tiles && h.backward && h.logits;
    const dw__loss_variant v = {.type = h.x->dtype,
                                .statistics = lse->dtype,
                                .lanes = h.tiles ? LANES_OF_TILES
                                                 : dw__loss_lanes(h.backward ? h.block : h.classes),
                                .backward = h.backward,
                                .tiles = h.tiles,
                                .bias = h.tiles && h.bias && !given,
                                .turned = h.tiles && !h.transpose_w && !given,
                                .given = given};
    return dw__variant_of(context, kernel, dw__loss_pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    size_t bytes;
    return visit(variant->kernel, call, context, variant, &bytes);
}

/* Targets are from 0 to 2; in the second trial those of 1 are ignored. */
static const dw_attr example_attrs[] = {{.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = 0},
                                        {.key = DW_ATTR_KEY_REDUCTION, .string = "mean"},
                                        {.key = DW_ATTR_KEY_IGNORE_INDEX, .integer = 1},
                                        {.key = DW_ATTR_KEY_LABEL_SMOOTHING, .number = 0.1}},
                     none = {.key = DW_ATTR_KEY_REDUCTION, .string = "none"};

static void example_of(dw__loss_variant v, int index, int64_t rows, int64_t size, int64_t classes,
                       dw__call *c) {
    const int64_t pitch = v.tiles ? round_up(classes, PITCH) : classes,
                  row = v.tiles ? round_up(size, 8) : size;
    const dw__tensor
        x = {.dtype = v.type, .rank = 2, .shape = {rows, size}, .stride = {row, 1}},
        w = {.dtype = v.type, .rank = 2, .shape = {classes, size}, .stride = {row, 1}},
        turned = {.dtype = v.type, .rank = 2, .shape = {size, classes}, .stride = {classes, 1}},
        b = {.dtype = v.type,
             .rank = v.tiles && !v.bias ? -1 : 1,
             .shape = {classes},
             .stride = {1}},
        each = {.dtype = v.statistics, .rank = 1, .shape = {rows}, .stride = {1}},
        target = {.dtype = DW_I64, .rank = 1, .shape = {rows}, .stride = {1}},
        logits = {.dtype = v.type, .rank = 2, .shape = {rows, classes}, .stride = {pitch, 1}};
    dw__tensor loss = each;
    if (index || v.turned) loss.rank = 0; /* the mean */
    *c = (dw__call){.op = v.backward ? DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD
                                     : DW_OP_LINEAR_CROSS_ENTROPY,
                    .attr_count = (index ? 3 : 1) + v.turned,
                    .attrs = v.turned ? example_attrs
                             : index  ? &example_attrs[1]
                                      : &none,
                    .input_count = v.backward ? 7 : 4,
                    .output_count = 3,
                    .inputs = {x, v.turned ? turned : w, b, target},
                    .outputs = {loss, each, logits}};
    if (!v.backward) return;
    c->inputs[3] = v.tiles && !v.given ? (dw__tensor){.rank = -1} : logits;
    c->inputs[4] = target;
    c->inputs[5] = each;
    c->inputs[6] = loss;
    c->outputs[0] = x;
    c->outputs[1] = c->inputs[1];
    c->outputs[2] = b;
    c->outputs[2].rank = 1;
    dw__tensor_set_contiguous(&c->outputs[0]);
    dw__tensor_set_contiguous(&c->outputs[1]);
}

static void example(uint64_t params, int index, dw__call *c) {
    const dw__loss_variant v = dw__loss_unpack(params);
    const int64_t classes = v.lanes == 32 ? 1023 : v.lanes == 256 ? 9001 : 17407;
    example_of(v, index, index ? 11 : 3, 5, classes, c);
}

/* Rows and columns of incomplete tiles, several tiles for a block of the few SMs. Logits are small: in backward lse is any
 * number, and a result is mostly the largest exponential, whose logit, up to 16, is rounded by up to 2^-5. */
static void example_of_tiles(uint64_t params, int index, dw__call *c) {
    const dw__loss_variant v = dw__loss_unpack(params);
    const int64_t rows = index ? 131 : 70, size = v.given ? 1032 : v.backward ? 5 : index ? 72 : 8;
    example_of(v, index, rows, size, v.turned ? 1032 : v.given ? 267 : 1027, c);
    if (v.given && index) c->disposable = 1 << 3; /* the logits */
}

/* ---- the entries ---------------------------------------------------------------------------------- */

#define LINEAR_CROSS_ENTROPY                                                                       \
    .backend = "deepwell", .kind = DW__CALL_OPERATION, .computes = computes, .supports = supports, \
    .seconds = seconds, .workspace_bytes = workspace_bytes, .results = DW__RESULTS_IN_ROWS,        \
    .prepare = prepare, .enqueue = enqueue, .entry_points = dw__loss_entry_points,                 \
    .first_use = &dw__operation_first_use,                                                         \
    .tolerance =                                                                                   \
        "logits and dlogits rounded to the type of x; all else as matmul and cross_entropy"
const dw__kernel dw__gpu_linear_cross_entropy = {
    LINEAR_CROSS_ENTROPY,
    .name = "linear_cross_entropy",
    .proof = DW__RUN_ON_HOPPER,
    .operation = "cross_entropy of linear, and its gradient",
    .source = "src/kernel/cuda/linear_cross_entropy.c, cuda/common/cross_entropy.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs =
        "1 to 2^30 classes; rows of logits at one distance; targets, lse, dloss, bias and other "
        "results contiguous",
    .example = example,
    /* A logit of magnitude 10 that is rounded to BF16 changes its exponential by 2 percent. */
    .tolerance_factor = 0x1p15,
};
const dw__kernel dw__sm90_linear_cross_entropy = {
    LINEAR_CROSS_ENTROPY,
    .name = "sm90_linear_cross_entropy",
    .proof = DW__MEASURED_ON_HARDWARE,
    .operation = "cross_entropy of linear, and its gradient",
    .source = "src/kernel/cuda/sm90_loss.c, cuda/sm90/sm90_loss.cuh, cuda/sm90/sm90_beside.cuh",
    .architectures = "sm_90a (H100, H200)",
    .elements = "BF16, F16",
    .needs =
        "as linear_cross_entropy; rows of x, w and logits of 16-byte multiples; of given logits "
        "1024 features",
    .example = example_of_tiles,
    .example_sms = 2,
    .tolerance_factor = 0x1p18,
};
