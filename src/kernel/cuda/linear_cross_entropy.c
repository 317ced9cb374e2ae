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
 * With blocks of classes each element of dw and db is the result of one GEMM, or one sum, and is rounded once. Blocks
 * of rows would add to an F32 copy of dw for each block: [V, K] is 1 GB for 128256 classes of 2048 features, where the
 * F32 sums of dx, [T, K], are 67 MB for 8192 rows.
 *
 * A block of logits has at most DEEPWELL_LOGITS_BYTES bytes. With the default, 256 MiB, and BF16, the product of 16384
 * rows with 8192 classes has 4096 tiles of 128 x 256, which is 31 rounds of an H200's 132 SMs; the last round, partly
 * idle, costs at most 3 percent. */
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

/* Divides `total` rows or classes, of which each one takes `bytes` bytes, into blocks of about one size, a multiple of
 * `unit`. */
static int64_t block_of(int64_t total, size_t bytes, int64_t unit) {
    size_t bound;
    if (!dw__logits_bound(&bound)) bound = (size_t)256 << 20;
    int64_t most = bytes > 0 ? (int64_t)(bound / bytes) : total;
    if (total <= most) return total;
    if (most >= 8 * LARGE_UNIT) unit = LARGE_UNIT;
    most = most < unit ? unit : most / unit * unit;
    const int64_t blocks = (total + most - 1) / most;
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
    bool in_place; /* the logits, or dlogits, lie in `logits` and not in the workspace */
    int64_t rows, size, classes;
    int64_t block, pitch; /* rows or classes of a block; elements from row to row of its logits */
    size_t sums, partials, gemm; /* offsets: the logits are first */
} head;

static void head_of(const dw__call *c, head *h) {
    enum { X, W, B, LOGITS, BACKWARD_TARGET, MADE = 2 };
    *h = (head){.c = c,
                .x = &c->inputs[X],
                .w = &c->inputs[W],
                .bias = c->inputs[B].rank >= 0 ? &c->inputs[B] : NULL,
                .backward = c->op == DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD,
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
        h->block = block_of(h->classes, (size_t)h->rows * width, CLASS_UNIT);
        h->pitch = round_up(h->block, PITCH);
        logits = (size_t)(h->rows * h->pitch) * width;
    } else {
        h->pitch = round_up(h->classes, PITCH);
        h->block = block_of(h->rows, (size_t)h->pitch * width, ROW_UNIT);
        logits = (size_t)(h->block * h->pitch) * width;
    }
    /* F32 sums of dx, if it has 16 bits and several blocks */
    const bool sums =
        h->backward && width < 4 && classes_at_once(h->block, h->x->dtype) < h->classes;
    h->sums = (size_t)round_up((int64_t)logits, ALIGNMENT);
    h->partials = h->sums + (size_t)round_up(sums ? h->rows * h->size * (int64_t)sizeof(float) : 0,
                                             ALIGNMENT);
    h->gemm = h->partials +
              (size_t)round_up((h->backward ? 1 : h->rows) * (int64_t)sizeof(double), ALIGNMENT);
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

static dw_status call_kernel(run *r, dw__operation_call *made) {
    const dw__kernel *kernel = NULL;
    const dw__variant *variant;
    dw_status status = DW_UNSUPPORTED;
    size_t bytes = 0;
    made->stream = r->given->stream;
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

static dw_status multiply(run *r, factor a, factor b, dw__tensor result, bool accumulates) {
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
    return call_kernel(r, &made);
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
    return call_kernel(r, &made);
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

static dw_cross_entropy_params params_of(const run *r) {
    const head *h = r->h;
    return (dw_cross_entropy_params){
        .bias = h->bias && !(h->backward && h->logits) ? h->bias->data : NULL,
        .target = h->target->data,
        .partials = r->variant ? (char *)r->given->workspace + h->partials : NULL,
        .rows = h->rows,
        .ignored = dw__call_int(h->c, DW_ATTR_KEY_IGNORE_INDEX, -100),
        .smoothing = dw__call_float(h->c, DW_ATTR_KEY_LABEL_SMOOTHING, 0.0),
        .classes = (int)h->classes,
        .reduction = dw__loss_reduction(h->c),
        .error = r->given->error};
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
    for (int64_t first = 0; first < h->rows; first += h->block)
        DW_RETURN_IF_FAILED(
            forward_rows(r, first, h->rows - first < h->block ? h->rows - first : h->block));
    if (!r->variant || !h->c->outputs[0].data) return DW_OK;
    dw_cross_entropy_params p = params_of(r);
    p.loss = h->c->outputs[0].data;
    return p.reduction == DW_LOSS_NONE ? DW_OK
                                       : dw__loss_total(r->given, r->context, r->variant, &p);
}

/* ---- backward ------------------------------------------------------------------------------------- */

enum { DX, DW, DB };

static bool wants(const run *r, int result) {
    return !r->variant || r->h->c->outputs[result].data != NULL;
}

static dw_status dlogits_of_classes(run *r, dw_cross_entropy_params p, int64_t first,
                                    dw__tensor dlogits) {
    const head *h = r->h;
    const int64_t count = dlogits.shape[1];
    int64_t stride;
    dw__tensor logits = dlogits;
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

static dw_status gradients_of_classes(run *r, int64_t first, dw__tensor dlogits, dw__tensor dx) {
    const head *h = r->h;
    const int64_t count = dlogits.shape[1];
    const factor x = {*h->x, !h->transpose_w}, from = {dlogits, h->transpose_w};
    if (wants(r, DW)) {
        const dw__tensor dw = part(&h->c->outputs[DW], h->transpose_w ? 0 : 1, first, count);
        DW_RETURN_IF_FAILED(h->transpose_w ? multiply(r, from, x, dw, false)
                                           : multiply(r, x, from, dw, false));
    }
    if (wants(r, DB))
        DW_RETURN_IF_FAILED(add_rows(r, dlogits, part(&h->c->outputs[DB], 0, first, count)));
    if (!wants(r, DX)) return DW_OK;
    return multiply(r, (factor){dlogits, false}, classes_of_w(h, first, count, !h->transpose_w), dx,
                    first > 0);
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
    for (int64_t first = 0; first < h->classes; first += h->block) {
        const int64_t left = h->classes - first, count = left < h->block ? left : h->block;
        const dw__tensor dlogits = block_at(r, 0, h->rows, first, count);
        DW_RETURN_IF_FAILED(dlogits_of_classes(r, p, first, dlogits));
        for (int64_t from = 0, together; from < count; from += together) {
            together = classes_at_once(count - from, h->x->dtype);
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

static dw_status supports(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    enum { B = 2 };
    int64_t stride;
    head h;
    DW_RETURN_IF_FAILED(dw__gpu_kernel_computes(kernel, c, gpu));
    head_of(c, &h);
    bool fits = h.classes > 0 && h.classes <= INT32_MAX / 2;
    if (h.logits) fits &= dw__tensor_row_stride(h.logits, &stride);
    for (uint32_t i = B; i < c->input_count; i++)
        if (c->inputs[i].rank >= 0 && &c->inputs[i] != h.logits)
            fits &= dw__tensor_is_contiguous(&c->inputs[i]);
    for (uint32_t o = 0; o < c->output_count; o++)
        if (&c->outputs[o] != h.logits) fits &= dw__tensor_is_contiguous(&c->outputs[o]);
    return fits ? DW_OK : dw__kernel_refuse(kernel);
}

static void seconds(const dw__kernel *kernel, const void *call, const dw__gpu_target *gpu,
                    dw__kernel_seconds *result) {
    const dw__call *c = &((const dw__operation_call *)call)->call;
    head h;
    head_of(c, &h);
    const double products = !h.backward ? 1.0
                            : h.logits  ? 2.0
                                        : 3.0,
                 logits = (double)h.rows * (double)h.classes,
                 rate = dw_dtype_bytes(h.x->dtype) < 4 ? gpu->flops : gpu->flops / 16.0;
    (void)kernel;
    result->seconds = 4e-6 + products * 2.0 * logits * (double)h.size / rate +
                      2.0 * logits * (double)dw_dtype_bytes(h.x->dtype) / gpu->bytes;
    snprintf(result->from, sizeof result->from, "estimate: GEMMs and bytes of the logits");
}

static dw_status visit(const dw__operation_call *call, const dw__context *context,
                       const dw__variant *variant, size_t *bytes) {
    head h;
    head_of(&call->call, &h);
    run r = {.h = &h, .given = call, .context = context, .variant = variant};
    r.gpu = dw__gpu_target_of(context, r.name);
    DW_RETURN_IF_FAILED(h.backward ? backward(&r) : forward(&r));
    *bytes = h.gemm + r.gemm_bytes;
    return DW_OK;
}

static dw_status workspace_bytes(const dw__kernel *kernel, const void *call,
                                 const dw__context *context, size_t *bytes) {
    (void)kernel;
    return visit(call, context, NULL, bytes);
}

static dw_status prepare(const dw__kernel *kernel, const void *call, const dw__context *context,
                         const dw__variant **variant) {
    const dw__tensor *lse;
    size_t bytes;
    head h;
    DW_RETURN_IF_FAILED(visit(call, context, NULL, &bytes));
    head_of(&((const dw__operation_call *)call)->call, &h);
    lse = h.backward ? &h.c->inputs[5] : &h.c->outputs[1];
    const dw__loss_variant v = {h.x->dtype, lse->dtype,
                                dw__loss_lanes(h.backward ? h.block : h.classes), h.backward};
    return dw__variant_of(context, kernel, dw__loss_pack(v), variant);
}

static dw_status enqueue(const void *call, const dw__context *context, const dw__variant *variant) {
    size_t bytes;
    return visit(call, context, variant, &bytes);
}

/* Targets are from 0 to 2; in the second trial those of 1 are ignored. */
static void example(uint64_t params, int index, dw__call *c) {
    static const dw_attr attrs[] = {{.key = DW_ATTR_KEY_REDUCTION, .string = "mean"},
                                    {.key = DW_ATTR_KEY_IGNORE_INDEX, .integer = 1},
                                    {.key = DW_ATTR_KEY_LABEL_SMOOTHING, .number = 0.1}},
                         none = {.key = DW_ATTR_KEY_REDUCTION, .string = "none"};
    const dw__loss_variant v = dw__loss_unpack(params);
    const int64_t classes = v.lanes == 32    ? 1023
                            : v.lanes == 256 ? 9001
                                             : 17407,
                  size = 5, rows = index ? 11 : 3;
    const dw__tensor
        x = {.dtype = v.type, .rank = 2, .shape = {rows, size}, .stride = {size, 1}},
        w = {.dtype = v.type, .rank = 2, .shape = {classes, size}, .stride = {size, 1}},
        b = {.dtype = v.type, .rank = 1, .shape = {classes}, .stride = {1}},
        each = {.dtype = v.statistics, .rank = 1, .shape = {rows}, .stride = {1}},
        target = {.dtype = DW_I64, .rank = 1, .shape = {rows}, .stride = {1}},
        logits = {.dtype = v.type, .rank = 2, .shape = {rows, classes}, .stride = {classes, 1}};
    dw__tensor loss = each;
    if (index) loss.rank = 0; /* the mean */
    *c = (dw__call){.op = v.backward ? DW_OP_LINEAR_CROSS_ENTROPY_BACKWARD
                                     : DW_OP_LINEAR_CROSS_ENTROPY,
                    .attr_count = index ? 3 : 1,
                    .attrs = index ? attrs : &none,
                    .input_count = v.backward ? 7 : 4,
                    .output_count = 3,
                    .inputs = {x, w, b, target},
                    .outputs = {loss, each, logits}};
    if (!v.backward) return;
    c->inputs[3] = logits;
    c->inputs[4] = target;
    c->inputs[5] = each;
    c->inputs[6] = loss;
    c->outputs[0] = x;
    c->outputs[1] = w;
    c->outputs[2] = b;
}

const dw__kernel dw__gpu_linear_cross_entropy = {
    .name = "linear_cross_entropy",
    .backend = "deepwell",
    .kind = DW__CALL_OPERATION,
    .computes = computes,
    .proof = DW__RUN_ON_HOPPER,
    .operation = "cross_entropy of linear, and its gradient",
    .source = "src/kernel/cuda/linear_cross_entropy.c, cuda/common/cross_entropy.cu",
    .architectures = DW__GPU_ARCHITECTURES,
    .elements = "BF16, F16, F32, F64",
    .needs =
        "1 to 2^30 classes; rows of logits at one distance; targets, lse, dloss, bias and other "
        "results contiguous",
    .supports = supports,
    .seconds = seconds,
    .workspace_bytes = workspace_bytes,
    .results = DW__RESULTS_IN_ROWS,
    .prepare = prepare,
    .enqueue = enqueue,
    .entry_points = dw__loss_entry_points,
    .first_use = &dw__operation_first_use,
    .tolerance =
        "logits and dlogits rounded to the type of x; all else as matmul and cross_entropy",
    .example = example,
    /* A logit of magnitude 10 that is rounded to BF16 changes its exponential by 2 percent. */
    .tolerance_factor = 0x1p15,
};
