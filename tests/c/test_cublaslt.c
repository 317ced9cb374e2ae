/* Matrix multiplications and linear layers by cuBLASLt, up to a fake of that library which computes on the host: single
 * calls of every layout, and plans of the engine, against the operation's definition in FP64. */
#include "base/json.h"
#include "common/scale_tiles_params.h"
#include "deepwell/engine.h"
#include "deepwell/explain.h"
#include "device/cublaslt.h"
#include "fake/fake_gpu.h"
#include "kernel/cuda/gpu_gemm.h"
#include "kernel/cuda/gpu_kernels.h"
#include "kernel/reference/interpret.h"
#include "kernel/reference/scalar.h"
#include <math.h>

#define REQUIRE_OK(call) CHILD_REQUIRE((call) == DW_OK)

static const dw__context *context;
static dw__gpu_target gpu;
static char gpu_name[DW__TARGET_NAME];

static void begin(const char *library) {
    setenv("DEEPWELL_CUBLASLT", library, 1);
    REQUIRE_OK(dw__device_cuda.context(&context));
    gpu = dw__gpu_target_of(context, gpu_name);
}

static int asked_of_library(const char *name, int argument) {
    void *library = dlopen(FAKE_CUBLASLT, RTLD_NOW | RTLD_NOLOAD);
    int (*ask)(int) = NULL;
    if (library) *(void **)&ask = dlsym(library, name);
    return ask ? ask(argument) : -1;
}

/* ---- one call ---------------------------------------------------------------------------------------------- */

enum { GUARD = 64, OPERANDS = 3 };

typedef struct operand {
    dw__tensor tensor, wide; /* wide: F64, contiguous */
    char *block;
    size_t bytes; /* between the guards */
} operand;

typedef struct problem {
    dw__operation_call call;
    operand inputs[OPERANDS], result, addend, sums;
    dw_attr attrs[3];
} problem;

static int64_t offset_of(const dw__tensor *t, int64_t index) {
    int64_t offset = 0;
    for (int axis = t->rank - 1; axis >= 0; axis--) {
        offset += index % t->shape[axis] * t->stride[axis];
        index /= t->shape[axis];
    }
    return offset;
}

/* Memory of the device, which is the host's here, `shift` elements from a multiple of 256 bytes, between guards. */
static void place(operand *o, int shift, uint32_t stream) {
    dw__tensor *t = &o->tensor;
    const size_t width = dw_dtype_bytes(t->dtype);
    int64_t last = 0;
    for (int axis = 0; axis < t->rank; axis++) last += (t->shape[axis] - 1) * t->stride[axis];
    o->bytes = (size_t)(last + 1) * width;
    o->block =
        aligned_alloc(256, (o->bytes + 256 + (size_t)shift * width + GUARD + 255) / 256 * 256);
    CHILD_REQUIRE(o->block);
    t->data = o->block + 256 + (size_t)shift * width;
    memset((char *)t->data - GUARD, 0x5A, o->bytes + 2 * GUARD);
    o->wide = *t;
    o->wide.dtype = DW_F64;
    dw__tensor_set_contiguous(&o->wide);
    o->wide.data = dw__malloc(dw__tensor_bytes(&o->wide));
    CHILD_REQUIRE(o->wide.data);
    for (int64_t i = 0; i < dw__tensor_count(t); i++) {
        const double number = (double)dw__trial_normal(7, stream, (size_t)i);
        dw__scalar_store(t->data, t->dtype, offset_of(t, i), (dw__scalar){.number = number});
    }
    /* Broadcast elements have been stored several times. */
    for (int64_t i = 0; i < dw__tensor_count(t); i++)
        dw__scalar_store(o->wide.data, DW_F64, i,
                         dw__scalar_load(t->data, t->dtype, offset_of(t, i)));
}

static void check_guards(const operand *o) {
    const unsigned char *data = o->tensor.data;
    for (int i = 1; i <= GUARD; i++) {
        CHILD_REQUIRE(data[-i] == 0x5A);
        CHILD_REQUIRE(data[o->bytes + (size_t)i - 1] == 0x5A);
    }
}

static void expect_result(const problem *p) {
    const dw__call *c = &p->call.call;
    const dw__interpret_options precise = {.high_precision = true};
    dw_graph *graph = NULL;
    dw_value inputs[OPERANDS];
    dw_node node;
    dw__tensor leaves[OPERANDS], found;
    double largest = 0.0;
    const double *added = c->accumulates == DW__ADDS_TO_ADDEND   ? p->addend.wide.data
                          : c->accumulates == DW__ADDS_TO_OUTPUT ? p->result.wide.data
                                                                 : NULL;
    REQUIRE_OK(dw_graph_create(&graph));
    for (uint32_t i = 0; i < c->input_count; i++) {
        const char name[] = {'x', (char)('a' + i), '\0'};
        leaves[i] = p->inputs[i].wide;
        REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_INPUT, name, c->inputs[i].dtype, c->inputs[i].rank,
                                 c->inputs[i].shape, &inputs[i]));
    }
    REQUIRE_OK(
        dw_graph_append(graph, c->op, c->input_count, inputs, c->attr_count, c->attrs, &node));
    REQUIRE_OK(dw_graph_add_output(graph, dw_node_output(graph, node, 0)));
    REQUIRE_OK(dw__interpret(graph, NULL, leaves, &found, &precise));
    const dw__tensor *y = &c->outputs[0];
    const int64_t count = dw__tensor_count(y), k = c->inputs[0].shape[c->inputs[0].rank - 1];
    for (int64_t i = 0; i < count; i++) {
        const double before = added ? fabs(added[i]) : 0.0;
        largest = fmax(largest, fabs(((double *)found.data)[i]) + before);
    }
    const double unit = y->dtype == DW_BF16  ? 0x1p-8
                        : y->dtype == DW_F16 ? 0x1p-11
                        : y->dtype == DW_F64 ? 0x1p-52
                                             : 0x1p-23,
                 bound = unit * largest * (y->dtype == DW_F64 ? 8.0 * sqrt((double)k) : 1.0);
    for (int64_t i = 0; i < count; i++) {
        const double got = dw__scalar_load(y->data, y->dtype, offset_of(y, i)).number;
        if (added) ((double *)found.data)[i] += added[i];
        if (!(fabs(got - ((double *)found.data)[i]) <= bound))
            fprintf(stderr, "element %lld: %g, expected %g\n", (long long)i, got,
                    ((double *)found.data)[i]);
        CHILD_REQUIRE(fabs(got - ((double *)found.data)[i]) <= bound);
    }
    dw__free_aligned(found.data);
    dw_graph_destroy(graph);
}

/* The sums of an operand over k, of a matrix that lies as `turned` says: with k rows, or with k columns. */
static void expect_sums(const problem *p) {
    const dw__call *c = &p->call.call;
    const bool of_a = c->sums == DW__SUMS_A;
    const dw__tensor *wide = &p->inputs[of_a ? 0 : 1].wide, *sums = &c->outputs[1];
    const bool turned =
        dw__call_int(c, of_a ? DW_ATTR_KEY_TRANSPOSE_A : DW_ATTR_KEY_TRANSPOSE_B, 0) != 0;
    const bool down = of_a == turned; /* sums columns */
    const int64_t rows = wide->shape[0], columns = wide->shape[1], k = down ? rows : columns;
    const double unit = sums->dtype == DW_BF16 ? 0x1p-8 : sums->dtype == DW_F16 ? 0x1p-11 : 0x1p-23;
    CHILD_REQUIRE(sums->shape[0] == (down ? columns : rows));
    for (int64_t i = 0; i < sums->shape[0]; i++) {
        double sum = 0.0, magnitude = 0.0;
        for (int64_t j = 0; j < k; j++) {
            const double x = ((const double *)wide->data)[down ? j * columns + i : i * columns + j];
            sum += x;
            magnitude += fabs(x);
        }
        const double got = dw__scalar_load(sums->data, sums->dtype, i).number;
        CHILD_REQUIRE(fabs(got - sum) <= unit * magnitude);
    }
}

static void finish(problem *p) {
    for (uint32_t i = 0; i < p->call.call.input_count; i++) {
        free(p->inputs[i].block);
        dw__free(p->inputs[i].wide.data);
    }
    free(p->result.block);
    dw__free(p->result.wide.data);
    free(p->addend.block);
    dw__free(p->addend.wide.data);
    free(p->sums.block);
    dw__free(p->sums.wide.data);
}

/* The call's kernel runs it, and is the named one. `shift`: elements from an aligned address, of all tensors but the
 * bias. Takes over the memory. */
static void run(problem *p, int shift) {
    dw__call *c = &p->call.call;
    const dw__variant *variant = NULL;
    size_t bytes = 0;
    c->attrs = p->attrs;
    c->output_count = 1;
    for (uint32_t i = 0; i < c->input_count; i++) {
        place(&p->inputs[i], i == 2 ? 0 : shift, i);
        c->inputs[i] = p->inputs[i].tensor;
    }
    place(&p->result, shift, 9);
    if (c->accumulates == DW__ADDS_TO_ADDEND) {
        place(&p->addend, shift, 10);
        c->addend = p->addend.tensor;
    }
    if (c->accumulates != DW__ADDS_TO_OUTPUT) memset(p->result.tensor.data, 0xFF, p->result.bytes);
    c->outputs[0] = p->result.tensor;
    if (c->sums) {
        c->output_count = 2;
        place(&p->sums, 0, 11);
        memset(p->sums.tensor.data, 0xFF, p->sums.bytes);
        c->outputs[1] = p->sums.tensor;
    }
    const dw__kernel *kernel = dw__kernel_for(&p->call, &gpu, NULL);
    CHILD_REQUIRE(kernel == &dw__graph_cublaslt);
    REQUIRE_OK(kernel->prepare(kernel, &p->call, context, &variant));
    REQUIRE_OK(dw__variant_status(variant));
    REQUIRE_OK(kernel->workspace_bytes(kernel, &p->call, context, &bytes));
    CHILD_REQUIRE(c->sums ? bytes > 4096 : bytes == 4096);
    p->call.workspace = aligned_alloc(256, bytes);
    const int chosen = asked_of_library("fake_cublaslt_chosen", 0),
              live = asked_of_library("fake_cublaslt_live", 0);
    REQUIRE_OK(kernel->enqueue(&p->call, context, variant));
    CHILD_REQUIRE(asked_of_library("fake_cublaslt_chosen", 0) == chosen);
    CHILD_REQUIRE(asked_of_library("fake_cublaslt_live", 0) == live);
    expect_result(p);
    check_guards(&p->result);
    if (c->sums) {
        expect_sums(p);
        check_guards(&p->sums);
    }
    if (c->accumulates == DW__ADDS_TO_ADDEND) check_guards(&p->addend);
    dw__kernel_seconds time = {0};
    kernel->seconds(kernel, &p->call, &gpu, &time);
    CHILD_REQUIRE(time.seconds > 0.0);
    free(p->call.workspace);
    finish(p);
}

/* ---- layouts --------------------------------------------------------------------------------------------------- */

typedef enum layout {
    CONTIGUOUS,
    PADDED,    /* gaps between the rows of the last two axes */
    PERMUTED,  /* columns are contiguous */
    BROADCAST, /* the batches are one matrix */
    HEADS, /* the last axis of batches lies between rows and columns: batches at two distances */
    LAYOUTS
} layout;

static void set_layout(dw__tensor *t, layout how) {
    dw__tensor_set_contiguous(t);
    if (t->rank < 2) return;
    const int last = t->rank - 1;
    const int64_t rows = t->shape[last - 1], columns = t->shape[last];
    int64_t step = rows * columns;
    if (how == PADDED) {
        t->stride[last - 1] = columns + 3;
        step = rows * (columns + 3) + 5;
    } else if (how == PERMUTED) {
        t->stride[last - 1] = 1;
        t->stride[last] = rows;
    } else if (how == HEADS && t->rank > 2) {
        t->stride[last - 2] = columns;
        t->stride[last - 1] = t->shape[last - 2] * columns;
        if (t->rank > 3) t->stride[0] = t->shape[1] * rows * columns;
        return;
    } else if (how == BROADCAST)
        step = 0;
    for (int axis = last - 2; axis >= 0; axis--) {
        t->stride[axis] = step;
        step *= t->shape[axis];
    }
}

static dw__tensor make(dw_dtype dtype, int rank, const int64_t *batch, int64_t rows,
                       int64_t columns) {
    dw__tensor t = {.dtype = dtype, .rank = rank};
    for (int axis = 0; axis < rank - 2; axis++) t.shape[axis] = batch[axis];
    t.shape[rank - 2] = rows;
    t.shape[rank - 1] = columns;
    dw__tensor_set_contiguous(&t);
    return t;
}

static const int64_t sizes[][3] = {{1, 1, 1},   {1, 5, 9},   {7, 1, 3},    {3, 5, 1},
                                   {17, 33, 9}, {5, 13, 67}, {64, 48, 32}, {16, 24, 5}};
static const int64_t batches[][2] = {{3, 2}, {1, 1}, {1, 4}};

static void multiply(dw_dtype type, dw_dtype result, const int64_t *size, int rank,
                     const int64_t *batch, int turned, layout a, layout b, int shift) {
    const int64_t m = size[0], n = size[1], k = size[2];
    problem p = {.call = {.call = {.op = DW_OP_MATMUL, .input_count = 2}}};
    if (result != type)
        p.attrs[p.call.call.attr_count++] =
            (dw_attr){.key = DW_ATTR_KEY_DTYPE, .integer = (int64_t)result};
    p.attrs[p.call.call.attr_count++] =
        (dw_attr){.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = turned & 1};
    p.attrs[p.call.call.attr_count++] =
        (dw_attr){.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = turned >> 1};
    p.inputs[0].tensor = turned & 1 ? make(type, rank, batch, k, m) : make(type, rank, batch, m, k);
    p.inputs[1].tensor =
        turned >> 1 ? make(type, rank, batch, n, k) : make(type, rank, batch, k, n);
    p.result.tensor = make(result, rank, batch, m, n);
    set_layout(&p.inputs[0].tensor, a);
    set_layout(&p.inputs[1].tensor, b);
    p.call.call.accumulates = (dw__accumulation)((turned + shift) % 3);
    p.addend.tensor = p.result.tensor;
    set_layout(&p.addend.tensor, (a + b) % 2 ? PADDED : CONTIGUOUS);
    run(&p, shift);
}

static void matmuls(void *unused) {
    static const dw_dtype types[][2] = {{DW_F32, DW_F32},  {DW_F64, DW_F64}, {DW_BF16, DW_BF16},
                                        {DW_BF16, DW_F32}, {DW_F16, DW_F16}, {DW_F16, DW_F32}};
    (void)unused;
    begin(FAKE_CUBLASLT);
    for (size_t t = 0; t < DW_COUNT(types); t++)
        for (size_t s = 0; s < DW_COUNT(sizes); s++)
            for (int turned = 0; turned < 4; turned++)
                for (int pair = 0; pair < LAYOUTS * LAYOUTS; pair++) {
                    const int rank = 2 + (pair + turned) % 3;
                    multiply(types[t][0], types[t][1], sizes[s], rank,
                             batches[(s + (size_t)pair) % DW_COUNT(batches)], turned,
                             (layout)(pair / LAYOUTS), (layout)(pair % LAYOUTS), pair % 3);
                }
    CHILD_REQUIRE(asked_of_library("fake_cublaslt_multiplied", DW_LT_BF16) > 100);
}

/* The layouts in which the library sums an operand, and then those in which it does not. */
static void sums_of_operands(void *unused) {
    static const dw_dtype types[][2] = {{DW_F32, DW_F32},
                                        {DW_BF16, DW_BF16},
                                        {DW_BF16, DW_F32},
                                        {DW_F16, DW_F16},
                                        {DW_F16, DW_F32}};
    (void)unused;
    begin(FAKE_CUBLASLT);
    for (size_t t = 0; t < DW_COUNT(types); t++)
        for (size_t s = 0; s < DW_COUNT(sizes); s++)
            for (int of_b = 0; of_b < 2; of_b++)
                for (int turned = 0; turned < 4; turned++)
                    for (int padded = 0; padded < 4; padded++) {
                        const int64_t m = sizes[s][0], n = sizes[s][1], k = sizes[s][2];
                        problem p = {.call = {.call = {.op = DW_OP_MATMUL, .input_count = 2}}};
                        dw__call *c = &p.call.call;
                        if ((of_b ? n : m) == 1) continue;
                        if (k == 1) continue; /* then either layout is the other */
                        if (types[t][0] != types[t][1])
                            p.attrs[c->attr_count++] = (dw_attr){.key = DW_ATTR_KEY_DTYPE,
                                                                 .integer = (int64_t)types[t][1]};
                        p.attrs[c->attr_count++] =
                            (dw_attr){.key = DW_ATTR_KEY_TRANSPOSE_A, .integer = turned & 1};
                        p.attrs[c->attr_count++] =
                            (dw_attr){.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = turned >> 1};
                        p.inputs[0].tensor = turned & 1 ? make(types[t][0], 2, NULL, k, m)
                                                        : make(types[t][0], 2, NULL, m, k);
                        p.inputs[1].tensor = turned >> 1 ? make(types[t][0], 2, NULL, n, k)
                                                         : make(types[t][0], 2, NULL, k, n);
                        p.result.tensor = make(types[t][1], 2, NULL, m, n);
                        set_layout(&p.inputs[0].tensor, padded & 1 ? PADDED : CONTIGUOUS);
                        set_layout(&p.inputs[1].tensor, padded >> 1 ? PADDED : CONTIGUOUS);
                        c->sums = of_b ? DW__SUMS_B : DW__SUMS_A;
                        p.sums.tensor = (dw__tensor){.dtype = types[t][1],
                                                     .rank = 1,
                                                     .shape = {of_b ? n : m},
                                                     .stride = {1}};
                        const bool whole = types[t][0] == DW_F32 || (m % 8 == 0 && n % 8 == 0);
                        if (whole && (of_b ? !(turned >> 1) : turned & 1)) {
                            run(&p, padded % 3);
                            continue;
                        }
                        const dw__variant *variant = NULL;
                        c->attrs = p.attrs;
                        c->output_count = 2;
                        for (int i = 0; i < 2; i++) c->inputs[i] = p.inputs[i].tensor;
                        c->outputs[0] = p.result.tensor;
                        c->outputs[1] = p.sums.tensor;
                        if (!whole) {
                            CHILD_REQUIRE(dw__kernel_for(&p.call, &gpu, NULL) == NULL);
                            continue;
                        }
                        const dw_status status = dw__graph_cublaslt.prepare(
                            &dw__graph_cublaslt, &p.call, context, &variant);
                        CHILD_REQUIRE(status == DW_UNSUPPORTED || variant->disabled);
                    }
}

static void layer(dw_dtype type, const int64_t *size, int rank, int turned, bool bias, layout x,
                  layout w, int shift) {
    const int64_t m = size[0], n = size[1], k = size[2];
    problem p = {
        .call = {.call = {.op = DW_OP_LINEAR, .input_count = bias ? 3 : 2, .attr_count = 1}}};
    p.attrs[0] = (dw_attr){.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = turned};
    p.inputs[0].tensor = make(type, rank < 2 ? 2 : rank, batches[0], m, k);
    p.inputs[1].tensor = turned ? make(type, 2, NULL, n, k) : make(type, 2, NULL, k, n);
    p.inputs[2].tensor = (dw__tensor){.dtype = type, .rank = 1, .shape = {n}, .stride = {1}};
    p.result.tensor = make(type, rank < 2 ? 2 : rank, batches[0], m, n);
    set_layout(&p.inputs[0].tensor, x);
    set_layout(&p.inputs[1].tensor, w);
    p.call.call.accumulates = (dw__accumulation)((x + shift) % 3);
    p.addend.tensor = p.result.tensor;
    if (w != PERMUTED) set_layout(&p.addend.tensor, PADDED);
    if (rank == 1) { /* one row */
        p.inputs[0].tensor = (dw__tensor){.dtype = type, .rank = 1, .shape = {k}, .stride = {1}};
        p.result.tensor = (dw__tensor){.dtype = type, .rank = 1, .shape = {n}, .stride = {1}};
        p.addend.tensor = p.result.tensor;
    }
    run(&p, shift);
}

static void linears(void *unused) {
    static const dw_dtype types[] = {DW_F32, DW_F64, DW_BF16, DW_F16};
    (void)unused;
    begin(FAKE_CUBLASLT);
    for (size_t t = 0; t < DW_COUNT(types); t++)
        for (size_t s = 0; s < DW_COUNT(sizes); s++)
            for (int turned = 0; turned < 2; turned++)
                for (int bias = 0; bias < (types[t] == DW_F64 || sizes[s][1] == 1 ? 1 : 2); bias++)
                    for (int pair = 0; pair < 9; pair++)
                        for (int rank = 1; rank <= 4; rank++)
                            layer(types[t], sizes[s], rank, turned, bias, (layout)(pair / 3),
                                  (layout)(pair % 3), pair % 2);
}

/* ---- FP8 codes --------------------------------------------------------------------------------------------------- */

/* Random codes of numbers below 2, and these numbers. */
static void *fill_codes(dw_dtype type, int64_t count, uint32_t stream, float *numbers) {
    uint8_t *codes = aligned_alloc(256, ((size_t)count + 255) / 256 * 256);
    CHILD_REQUIRE(codes);
    for (int64_t i = 0; i < count; i++) {
        const int32_t bits = (int32_t)(1e3f * dw__trial_normal(9, stream, (size_t)i));
        codes[i] = (uint8_t)bits & 0xbf;
    }
    REQUIRE_OK(dw_decode(type, count, codes, numbers));
    return codes;
}

static void multiply_codes(dw_dtype type_a, dw_dtype type_b, dw_dtype result, bool fast,
                           bool has_bias) {
    enum { M = 32, N = 48, K = 64, BIAS = 6 };
    const dw_attr attrs[] = {
        {.key = DW_ATTR_KEY_DTYPE, .integer = result},
        {.key = DW_ATTR_KEY_FAST_ACCUMULATION, .integer = fast},
    };
    float a[M * K], b[N * K], bias[N], scales[] = {0.75f, 0x1.8p-3f};
    dw__operation_call call = {0};
    dw__call *c = &call.call;
    const dw__variant *variant = NULL;
    size_t bytes = 0;
    dw__multiply_codes_example(type_a, type_b, result, M, N, K, c);
    c->attrs = attrs, c->attr_count = 2;
    c->inputs[0].data = fill_codes(type_a, M * K, 1, a);
    c->inputs[1].data = fill_codes(type_b, N * K, 2, b);
    c->inputs[2].data = &scales[0], c->inputs[3].data = &scales[1];
    c->outputs[0].data = aligned_alloc(256, M * N * 4);
    if (has_bias) {
        dw__multiply_codes_add_bias(c);
        c->inputs[BIAS].data = aligned_alloc(256, 256);
    }
    for (int j = 0; j < N; j++) {
        bias[j] = has_bias ? 0.375f * (float)(j - 20) : 0.0f; /* exact in every type */
        if (has_bias)
            dw__scalar_store(c->inputs[BIAS].data, result, j, (dw__scalar){.number = bias[j]});
    }
    const dw__kernel *kernel = dw__kernel_for(&call, &gpu, NULL);
    CHILD_REQUIRE(kernel == &dw__graph_cublaslt && c->outputs[0].data);
    REQUIRE_OK(kernel->prepare(kernel, &call, context, &variant));
    REQUIRE_OK(dw__variant_status(variant));
    /* The first-use check ran the algorithms of fast accumulation, too. */
    CHILD_REQUIRE(!fast || asked_of_library("fake_cublaslt_fast", 0) > 0);
    REQUIRE_OK(kernel->workspace_bytes(kernel, &call, context, &bytes));
    call.workspace = aligned_alloc(256, bytes);
    const int before = asked_of_library("fake_cublaslt_fast", 0);
    REQUIRE_OK(kernel->enqueue(&call, context, variant));
    CHILD_REQUIRE(asked_of_library("fake_cublaslt_fast", 0) == before + fast);
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0.0;
            for (int l = 0; l < K; l++) sum += (double)a[i * K + l] * (double)b[j * K + l];
            sum = sum * (double)scales[0] * (double)scales[1] + (double)bias[j];
            const double got =
                             dw__scalar_load(c->outputs[0].data, result, i * (int64_t)N + j).number,
                         unit = result == DW_BF16  ? 0x1p-8
                                : result == DW_F16 ? 0x1p-11
                                                   : 0x1p-24;
            CHILD_REQUIRE(fabs(got - sum) <= unit * fabs(sum) + 0x1p-25); /* F16's least numbers */
        }
    free(call.workspace);
    free(c->inputs[0].data);
    free(c->inputs[1].data);
    free(c->inputs[BIAS].data);
    free(c->outputs[0].data);
}

/* Only a call that allows it accumulates fast. */
static void codes(void *unused) {
    static const dw_dtype results[] = {DW_BF16, DW_F16, DW_F32};
    (void)unused;
    begin(FAKE_CUBLASLT);
    for (int fast = 0; fast < 2; fast++)
        for (size_t i = 0; i < DW_COUNT(results); i++) {
            multiply_codes(DW_E4M3, DW_E4M3, results[i], fast != 0, false);
            multiply_codes(DW_E5M2, DW_E4M3, results[i], fast != 0, false);
            multiply_codes(DW_E4M3, DW_E5M2, results[i], fast != 0, false);
            if (results[i] != DW_F32) multiply_codes(DW_E4M3, DW_E4M3, results[i], fast != 0, true);
        }
}

/* The first-use check accepts products of a GPU whose tensor cores keep 14 bits of each addend, in every type of
 * result. */
static void codes_in_14_bits(void *unused) {
    static const dw_dtype results[] = {DW_BF16, DW_F16, DW_F32};
    (void)unused;
    begin(FAKE_CUBLASLT);
    setenv("FAKE_CUBLASLT_14_BITS", "1", 1);
    for (size_t i = 0; i < DW_COUNT(results); i++) {
        const dw__variant *variant = NULL;
        dw__operation_call call = {0};
        dw__multiply_codes_example(DW_E4M3, DW_E4M3, results[i], 32, 48, 64, &call.call);
        const dw__kernel *kernel = dw__kernel_for(&call, &gpu, NULL);
        CHILD_REQUIRE(kernel == &dw__graph_cublaslt);
        REQUIRE_OK(kernel->prepare(kernel, &call, context, &variant));
        REQUIRE_OK(dw__variant_status(variant));
    }
}

/* ---- calls that it leaves to others ----------------------------------------------------------------------------- */

static const dw__kernel *kernel_of(const dw__operation_call *call) {
    return dw__kernel_for(call, &gpu, NULL);
}

static void refusals(void *unused) {
    (void)unused;
    begin(FAKE_CUBLASLT);
    const int64_t batch[] = {3, 2};
    dw__operation_call call = {.call = {.op = DW_OP_MATMUL, .input_count = 2, .output_count = 1}};
    dw__call *c = &call.call;
    c->inputs[0] = make(DW_F32, 4, batch, 5, 7);
    c->inputs[1] = make(DW_F32, 4, batch, 7, 9);
    c->outputs[0] = make(DW_F32, 4, batch, 5, 9);
    CHILD_REQUIRE(kernel_of(&call) == &dw__graph_cublaslt);
    const dw__call good = *c;
    /* Batches at two distances, the second with a gap; more of them than there should be calls; three distances. */
    c->inputs[0].stride[0] += 1;
    CHILD_REQUIRE(kernel_of(&call) == &dw__graph_cublaslt);
    c->inputs[0].shape[0] = c->inputs[1].shape[0] = c->outputs[0].shape[0] = 65;
    c->inputs[0].shape[1] = c->inputs[1].shape[1] = c->outputs[0].shape[1] = 66;
    CHILD_REQUIRE(kernel_of(&call) == &dw__gpu_matmul);
    const int64_t three[] = {2, 2, 2};
    c->inputs[0] = make(DW_F32, 5, three, 5, 7);
    c->inputs[1] = make(DW_F32, 5, three, 7, 9);
    c->outputs[0] = make(DW_F32, 5, three, 5, 9);
    CHILD_REQUIRE(kernel_of(&call) == &dw__graph_cublaslt);
    c->inputs[0].stride[0] += 1, c->inputs[1].stride[1] += 1;
    CHILD_REQUIRE(kernel_of(&call) == &dw__gpu_matmul);
    /* Neither rows nor columns are contiguous. */
    *c = good;
    c->inputs[1].stride[3] = 2, c->inputs[1].stride[2] = 18;
    CHILD_REQUIRE(kernel_of(&call) == &dw__gpu_matmul);
    /* All rows are one. */
    *c = good;
    c->inputs[0].stride[2] = 0;
    CHILD_REQUIRE(kernel_of(&call) == &dw__gpu_matmul);
    CHILD_REQUIRE(dw__graph_cublaslt.supports(&dw__graph_cublaslt, &call, &gpu) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "cublaslt: expected matrices with contiguous rows"));
    /* Results are sums of nothing. */
    *c = good;
    c->inputs[0].shape[3] = c->inputs[1].shape[2] = 0;
    CHILD_REQUIRE(kernel_of(&call) == &dw__gpu_matmul);
    /* An architecture may be asked about without a GPU; an emulated GPU has no library. */
    *c = good;
    dw__gpu_target other = gpu;
    other.context = NULL;
    CHILD_REQUIRE(dw__graph_cublaslt.supports(&dw__graph_cublaslt, &call, &other) == DW_OK);
    dw__context emulated = *context;
    emulated.device = &dw__device_emulator_sm_90a;
    other.context = &emulated;
    CHILD_REQUIRE(dw__graph_cublaslt.supports(&dw__graph_cublaslt, &call, &other) == DW_TYPE);

    c->op = DW_OP_LINEAR;
    c->input_count = 3;
    c->inputs[0] = make(DW_F64, 2, NULL, 5, 7);
    c->inputs[1] = make(DW_F64, 2, NULL, 9, 7);
    c->inputs[2] = (dw__tensor){.dtype = DW_F64, .rank = 1, .shape = {9}, .stride = {1}};
    c->outputs[0] = make(DW_F64, 2, NULL, 5, 9);
    CHILD_REQUIRE(kernel_of(&call) == NULL);
    CHILD_REQUIRE(dw__kernel_fail_none(&call, &gpu) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "cublaslt: expected no bias in f64"));
    for (int i = 0; i < 3; i++) c->inputs[i].dtype = DW_F16;
    c->outputs[0].dtype = DW_F16;
    CHILD_REQUIRE(kernel_of(&call) == &dw__graph_cublaslt);
    c->inputs[2].stride[0] = 2;
    CHILD_REQUIRE(kernel_of(&call) == NULL);
    c->inputs[2].stride[0] = 1;
    c->inputs[2].data = (void *)(uintptr_t)258;
    CHILD_REQUIRE(kernel_of(&call) == NULL);
    c->inputs[2].data = NULL;
    c->inputs[1].shape[0] = c->inputs[2].shape[0] = c->outputs[0].shape[1] = 1;
    CHILD_REQUIRE(kernel_of(&call) == NULL);
    c->inputs[1].shape[0] = c->inputs[2].shape[0] = c->outputs[0].shape[1] = 9;
    /* No row: nothing is launched. */
    const dw__variant *variant = NULL;
    size_t bytes = 1;
    c->inputs[0].shape[0] = c->outputs[0].shape[0] = 0;
    CHILD_REQUIRE(kernel_of(&call) == &dw__graph_cublaslt);
    REQUIRE_OK(dw__graph_cublaslt.prepare(&dw__graph_cublaslt, &call, context, &variant));
    REQUIRE_OK(dw__graph_cublaslt.workspace_bytes(&dw__graph_cublaslt, &call, context, &bytes));
    CHILD_REQUIRE(bytes == 0);
    const int before = asked_of_library("fake_cublaslt_multiplied", DW_LT_F16);
    REQUIRE_OK(dw__graph_cublaslt.enqueue(&call, context, variant));
    CHILD_REQUIRE(asked_of_library("fake_cublaslt_multiplied", DW_LT_F16) == before);
}

/* ---- plans of the engine --------------------------------------------------------------------------------------------- */

enum { WIDTH = 24, INNER = 19 };

/* h = x w^T + b, y = h h^T in batches; the gradient of w needs a matmul with transpose_a. */
static void plan_layer(dw_engine **engine, dw_plan **plan, dw_status expected) {
    dw_graph *graph = NULL;
    dw_value x, w, b, h, y;
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_dim rows;
    const dw_attr turned = {.key = DW_ATTR_KEY_TRANSPOSE_B, .integer = 1};
    options.device = &dw__device_cuda;
    REQUIRE_OK(dw_graph_create(&graph));
    REQUIRE_OK(dw_graph_symbol(graph, "S", &rows));
    REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_F32, 3, (dw_dim[]){2, rows, INNER}, &x));
    REQUIRE_OK(
        dw_graph_leaf(graph, DW_ROLE_PARAMETER, "w", DW_F32, 2, (dw_dim[]){WIDTH, INNER}, &w));
    REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_PARAMETER, "b", DW_F32, 1, (dw_dim[]){WIDTH}, &b));
    REQUIRE_OK(dw_graph_apply(graph, DW_OP_LINEAR, 3, (dw_value[]){x, w, b}, 0, NULL, &h));
    REQUIRE_OK(dw_graph_apply(graph, DW_OP_MATMUL, 2, (dw_value[]){h, h}, 1, &turned, &y));
    REQUIRE_OK(dw_graph_add_output(graph, y));
    REQUIRE_OK(dw_engine_create(graph, 1, (uint32_t[]){0}, 1, (dw_value[]){w}, &options, engine));
    CHILD_REQUIRE(dw_engine_plan(*engine, (int64_t[]){5}, plan) == expected);
    dw_graph_destroy(graph);
}

static bool lists(const dw_plan *plan, const char *word) {
    char *text = NULL;
    REQUIRE_OK(dw_plan_describe(plan, &text));
    const bool has = strstr(text, word) != NULL;
    if (getenv("TEST_VERBOSE")) fprintf(stderr, "%s\n", text);
    dw_text_free(text);
    return has;
}

static void by_cublaslt(void *unused) {
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    float *x, *w, *b, *y;
    void *arena = NULL, *stream = NULL;
    (void)unused;
    begin(FAKE_CUBLASLT);
    plan_layer(&engine, &plan, DW_OK);
    CHILD_REQUIRE(lists(plan, "cublaslt") && lists(plan, "linear") && !lists(plan, " matmul 0"));
    REQUIRE_OK(dw_device_allocate(&dw__device_cuda, dw_plan_arena_bytes(plan), &arena));
    REQUIRE_OK(dw_device_allocate(&dw__device_cuda, 2 * 5 * INNER * sizeof *x, (void **)&x));
    REQUIRE_OK(dw_device_allocate(&dw__device_cuda, WIDTH * INNER * sizeof *w, (void **)&w));
    REQUIRE_OK(dw_device_allocate(&dw__device_cuda, WIDTH * sizeof *b, (void **)&b));
    REQUIRE_OK(dw_device_allocate(&dw__device_cuda, 2 * 5 * 5 * sizeof *y, (void **)&y));
    for (size_t i = 0; i < 2 * 5 * INNER; i++) x[i] = dw__trial_normal(1, 0, i);
    for (size_t i = 0; i < WIDTH * INNER; i++) w[i] = dw__trial_normal(1, 1, i);
    for (size_t i = 0; i < WIDTH; i++) b[i] = dw__trial_normal(1, 2, i);
    REQUIRE_OK(dw__device_cuda.stream_create(&stream));
    REQUIRE_OK(dw_plan_forward(plan, arena, (dw_binding[]){{x, NULL}, {w, NULL}, {b, NULL}},
                               (dw_binding[]){{y, NULL}}, stream));
    REQUIRE_OK(dw_plan_synchronize(plan, stream));
    for (int batch = 0; batch < 2; batch++)
        for (int row = 0; row < 5; row++)
            for (int column = 0; column < 5; column++) {
                double sum = 0.0;
                for (int i = 0; i < WIDTH; i++) {
                    double left = (double)b[i], right = (double)b[i];
                    for (int k = 0; k < INNER; k++) {
                        left += (double)x[(batch * 5 + row) * INNER + k] * (double)w[i * INNER + k];
                        right +=
                            (double)x[(batch * 5 + column) * INNER + k] * (double)w[i * INNER + k];
                    }
                    sum += left * right;
                }
                /* h is rounded once, then y: units of F32 of sums of magnitude up to 24 * 20^2. */
                CHILD_REQUIRE(fabs((double)y[(batch * 5 + row) * 5 + column] - sum) < 2e-3);
            }
    dw_device_release(&dw__device_cuda, x, 0);
    dw_device_release(&dw__device_cuda, w, 0);
    dw_device_release(&dw__device_cuda, b, 0);
    dw_device_release(&dw__device_cuda, y, 0);
    dw_device_release(&dw__device_cuda, arena, 0);
    dw__device_cuda.stream_destroy(stream);
    dw_plan_release(plan);
    dw_engine_destroy(engine);
}

/* The library adds no bias to a single column. The layer becomes a product of its 16-bit operands, which are not
 * cast. */
static void expands_in_16_bits(void *unused) {
    dw_graph *graph = NULL;
    dw_value x, w, b, h;
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    (void)unused;
    setenv("DEEPWELL_FIRST_USE_CHECK", "off",
           1); /* the fake compiler's programs cannot be checked */
    begin(FAKE_CUBLASLT);
    options.device = &dw__device_cuda;
    REQUIRE_OK(dw_graph_create(&graph));
    REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", DW_BF16, 3, (dw_dim[]){2, 5, INNER}, &x));
    REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_PARAMETER, "w", DW_BF16, 2, (dw_dim[]){1, INNER}, &w));
    REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_PARAMETER, "b", DW_BF16, 1, (dw_dim[]){1}, &b));
    REQUIRE_OK(dw_graph_apply(graph, DW_OP_LINEAR, 3, (dw_value[]){x, w, b}, 0, NULL, &h));
    REQUIRE_OK(dw_graph_add_output(graph, h));
    REQUIRE_OK(dw_engine_create(graph, 1, (uint32_t[]){0}, 1, (dw_value[]){w}, &options, &engine));
    REQUIRE_OK(dw_engine_plan(engine, NULL, &plan));
    CHILD_REQUIRE(lists(plan, "cublaslt bf16[10,19]") && !lists(plan, "f32[10,19]") &&
                  !lists(plan, "f32[1,19]"));
    dw_plan_release(plan);
    dw_engine_destroy(engine);
    dw_graph_destroy(graph);
}

/* ---- gradients of biases ----------------------------------------------------------------------------------------- */

enum { ROWS = 2 * 5 };

typedef struct bias_case {
    dw_dtype type;
    int turned;
    bool apart; /* the library does not sum */
    bool
        cast; /* parameters are F32 and cast to the type, and the layer reads a SiLU that backward repeats */
} bias_case;

/* In 16 bits the library is asked for sums beside multiples of 8 columns only. */
static int64_t inner_of(const bias_case *c) { return c->type == DW_F32 ? INNER : 16; }

static dw_value parameter(dw_graph *graph, const bias_case *at, const char *name, int rank,
                          const dw_dim *shape, dw_value *used) {
    const dw_attr type = {.key = DW_ATTR_KEY_DTYPE, .integer = at->type};
    dw_value made;
    REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_PARAMETER, name, at->cast ? DW_F32 : at->type, rank,
                             shape, &made));
    *used = made;
    if (at->cast) REQUIRE_OK(dw_graph_apply(graph, DW_OP_CAST, 1, &made, 1, &type, used));
    return made;
}

static void plan_bias(const bias_case *at, dw_engine **engine, dw_plan **plan) {
    const int64_t inner = inner_of(at);
    dw_graph *graph = NULL;
    dw_value x, w, b, h;
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    const dw_attr turned = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = at->turned};
    options.device = &dw__device_cuda;
    REQUIRE_OK(dw_graph_create(&graph));
    REQUIRE_OK(dw_graph_leaf(graph, DW_ROLE_INPUT, "x", at->type, 3, (dw_dim[]){2, 5, inner}, &x));
    const dw_value wrt[] = {
        parameter(graph, at, "w", 2,
                  at->turned ? (dw_dim[]){WIDTH, inner} : (dw_dim[]){inner, WIDTH}, &w),
        parameter(graph, at, "b", 1, (dw_dim[]){WIDTH}, &b), x};
    if (at->cast) REQUIRE_OK(dw_graph_apply(graph, DW_OP_SILU, 1, &x, 0, NULL, &x));
    REQUIRE_OK(dw_graph_apply(graph, DW_OP_LINEAR, 3, (dw_value[]){x, w, b}, 1, &turned, &h));
    REQUIRE_OK(dw_graph_add_output(graph, h));
    REQUIRE_OK(dw_engine_create(graph, 1, (uint32_t[]){0}, 3, wrt, &options, engine));
    REQUIRE_OK(dw_engine_plan(*engine, NULL, plan));
    dw_graph_destroy(graph);
}

static void *numbers(dw_dtype type, size_t count, uint32_t stream) {
    void *made = NULL;
    REQUIRE_OK(dw_device_allocate(&dw__device_cuda, count * dw_dtype_bytes(type), &made));
    for (size_t i = 0; i < count; i++)
        dw__scalar_store(made, type, (int64_t)i,
                         (dw__scalar){.number = (double)dw__trial_normal(3, stream, i)});
    return made;
}

static double at(const void *data, dw_dtype type, int64_t i) {
    return dw__scalar_load(data, type, i).number;
}

static void expect_near(double got, double expected, double magnitude, dw_dtype type) {
    CHILD_REQUIRE(fabs(got - expected) <= (type == DW_BF16 ? 0x1p-8 : 0x1p-20) * magnitude);
}

/* Backward with each gradient wanted or left out. */
static void bias_gradient(void *argument) {
    const bias_case *c = argument;
    const dw_dtype type = c->type;
    const int64_t inner = inner_of(c);
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    void *arena = NULL, *stream = NULL;
    if (c->apart) setenv("FAKE_CUBLASLT_NO_SUMS", "1", 1);
    /* The fake compiler's kernels are empty. */
    if (c->apart || c->cast) setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    begin(FAKE_CUBLASLT);
    plan_bias(c, &engine, &plan);
    CHILD_REQUIRE(lists(plan, ": reduce ") == c->apart);
    if (c->apart || c->cast) goto done;
    void *x = numbers(type, (size_t)(ROWS * inner), 0),
         *w = numbers(type, (size_t)(WIDTH * inner), 1), *b = numbers(type, WIDTH, 2),
         *y = numbers(type, ROWS * WIDTH, 3), *dy = numbers(type, ROWS * WIDTH, 4);
    REQUIRE_OK(dw_device_allocate(&dw__device_cuda, dw_plan_arena_bytes(plan), &arena));
    REQUIRE_OK(dw__device_cuda.stream_create(&stream));
    for (int wanted = 0; wanted < 4; wanted++) {
        void *dw = numbers(type, (size_t)(WIDTH * inner), 5), *db = numbers(type, WIDTH, 6);
        const dw_binding leaves[] = {{x, NULL}, {w, NULL}, {b, NULL}};
        REQUIRE_OK(dw_plan_forward(plan, arena, leaves, (dw_binding[]){{y, NULL}}, stream));
        REQUIRE_OK(dw_plan_backward(
            plan, arena, leaves, (dw_binding[]){{y, NULL}}, (dw_binding[]){{dy, NULL}},
            (dw_binding[]){
                {wanted & 1 ? dw : NULL, NULL}, {wanted & 2 ? db : NULL, NULL}, {NULL, NULL}},
            stream));
        REQUIRE_OK(dw_plan_synchronize(plan, stream));
        for (int64_t n = 0; n < WIDTH; n++) {
            double sum = 0.0, magnitude = 0.0;
            for (int64_t row = 0; row < ROWS; row++) {
                sum += at(dy, type, row * WIDTH + n);
                magnitude += fabs(at(dy, type, row * WIDTH + n));
            }
            if (wanted & 2) expect_near(at(db, type, n), sum, magnitude, type);
            for (int64_t k = 0; wanted & 1 && k < inner; k++) {
                sum = magnitude = 0.0;
                for (int64_t row = 0; row < ROWS; row++) {
                    const double product =
                        at(dy, type, row * WIDTH + n) * at(x, type, row * inner + k);
                    sum += product;
                    magnitude += fabs(product);
                }
                expect_near(at(dw, type, c->turned ? n * inner + k : k * WIDTH + n), sum, magnitude,
                            type);
            }
        }
        dw_device_release(&dw__device_cuda, dw, 0);
        dw_device_release(&dw__device_cuda, db, 0);
    }
    for (int i = 0; i < 6; i++)
        dw_device_release(&dw__device_cuda, (void *[]){x, w, b, y, dy, arena}[i], 0);
    dw__device_cuda.stream_destroy(stream);
done:
    dw_plan_release(plan);
    dw_engine_destroy(engine);
}

/* The plan has Deepwell's own kernels, of which the fake compiler makes none that could be checked. */
static void expect_own_kernels(void) {
    dw_engine *engine = NULL;
    dw_plan *plan = NULL;
    plan_layer(&engine, &plan, DW_OK);
    CHILD_REQUIRE(lists(plan, "matmul") && !lists(plan, "cublaslt") && !lists(plan, "linear"));
    dw_plan_release(plan);
    dw_engine_destroy(engine);
}

static void turned_off(void *unused) {
    const dw__cublaslt *library;
    (void)unused;
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    begin("off");
    expect_own_kernels();
    CHILD_REQUIRE(dw__cublaslt_load(&library) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "cuBLASLt is off (DEEPWELL_CUBLASLT=off)"));
}

static void missing(void *unused) {
    const dw__cublaslt *library;
    (void)unused;
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    begin("/nowhere/libcublasLt.so.13");
    expect_own_kernels();
    CHILD_REQUIRE(dw__cublaslt_load(&library) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "was not found: DEEPWELL_CUBLASLT=/nowhere/libcublasLt"));
}

static void another_library(void *unused) {
    const dw__cublaslt *library;
    (void)unused;
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    begin(FAKE_CUDA);
    expect_own_kernels();
    CHILD_REQUIRE(dw__cublaslt_load(&library) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "cuBLASLt has no function cublasLtCreate"));
}

static void without_algorithm(void *status) {
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    setenv("FAKE_CUBLASLT_FAIL", status, 1);
    begin(FAKE_CUBLASLT);
    expect_own_kernels();
    const int64_t batch[] = {3};
    const dw__variant *variant = NULL;
    dw__operation_call call = {.call = {.op = DW_OP_MATMUL, .input_count = 2, .output_count = 1}};
    call.call.inputs[0] = make(DW_BF16, 3, batch, 5, 7);
    call.call.inputs[1] = make(DW_BF16, 3, batch, 7, 9);
    call.call.outputs[0] = make(DW_BF16, 3, batch, 5, 9);
    const int live = asked_of_library("fake_cublaslt_live", 0);
    CHILD_REQUIRE(dw__graph_cublaslt.prepare(&dw__graph_cublaslt, &call, context, &variant) ==
                  DW_UNSUPPORTED);
    CHILD_REQUIRE(asked_of_library("fake_cublaslt_live", 0) == live);
    CHILD_REQUIRE(strstr(dw_last_error(), "a matmul of m 5, n 9, k 7 in 3 batches, bf16: "
                                          "cublasLtMatmulAlgoGetHeuristic: "));
    CHILD_REQUIRE(strstr(dw_last_error(), strcmp(status, "15") == 0 ? "cuBLASLt's status is 15"
                                                                    : "none of 0 algorithms"));
}

/* The first-use check refuses a library that computes wrong results; the call's next kernel is tried. */
static void wrong(void *unused) {
    (void)unused;
    setenv("FAKE_CUBLASLT_WRONG", "1", 1);
    begin(FAKE_CUBLASLT);
    const dw__variant *variant = NULL;
    dw__operation_call call = {.call = {.op = DW_OP_MATMUL, .input_count = 2, .output_count = 1}};
    call.call.inputs[0] = make(DW_F32, 2, NULL, 5, 7);
    call.call.inputs[1] = make(DW_F32, 2, NULL, 7, 9);
    call.call.outputs[0] = make(DW_F32, 2, NULL, 5, 9);
    REQUIRE_OK(dw__graph_cublaslt.prepare(&dw__graph_cublaslt, &call, context, &variant));
    CHILD_REQUIRE(variant->disabled);
    CHILD_REQUIRE(strstr(variant->reason, "kernel cublaslt disagrees with the operation's"));
    call.call.op = DW_OP_LINEAR;
    call.call.inputs[1] = make(DW_F32, 2, NULL, 9, 7);
    CHILD_REQUIRE(kernel_of(&call) == NULL); /* so it is expanded */
}

/* A library that rounds a product before it adds the bias keeps its layers, and one with wrong results does not. */
static void rounds_before_bias(void *is_wrong) {
    static const dw_dtype types[] = {DW_BF16, DW_F16};
    setenv("FAKE_CUBLASLT_ROUNDS", "1", 1);
    if (is_wrong) setenv("FAKE_CUBLASLT_WRONG", "1", 1);
    begin(FAKE_CUBLASLT);
    for (int i = 0; i < 4; i++) {
        const dw_dtype type = types[i / 2];
        const dw_attr turned = {.key = DW_ATTR_KEY_TRANSPOSE_W, .integer = i % 2};
        const dw__variant *variant = NULL;
        dw__operation_call call = {.call = {.op = DW_OP_LINEAR,
                                            .attr_count = 1,
                                            .attrs = &turned,
                                            .input_count = 3,
                                            .output_count = 1}};
        dw__call *c = &call.call;
        c->inputs[0] = make(type, 2, NULL, 5, 7);
        c->inputs[1] = i % 2 ? make(type, 2, NULL, 9, 7) : make(type, 2, NULL, 7, 9);
        c->inputs[2] = (dw__tensor){.dtype = type, .rank = 1, .shape = {9}, .stride = {1}};
        c->outputs[0] = make(type, 2, NULL, 5, 9);
        REQUIRE_OK(dw__graph_cublaslt.prepare(&dw__graph_cublaslt, &call, context, &variant));
        if (variant->disabled != (is_wrong != NULL)) fprintf(stderr, "%s\n", variant->reason);
        CHILD_REQUIRE(variant->disabled == (is_wrong != NULL));
    }
}

/* ---- codes with scales of blocks --------------------------------------------------------------------------------- */

/* One operand, [rows, k]: its codes and tiles, in memory of the device, and its values. */
typedef struct factor {
    dw__tensor codes, tiles, scale; /* scale: rank -1 for MX */
    float *values;
} factor;

static factor make_factor(dw_scheme scheme, int64_t rows, int64_t k, uint32_t stream) {
    const dw_scheme_info *info = dw_scheme_describe(scheme);
    const int64_t wide = k / info->block;
    dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;
    factor f = {.codes = make(info->element, 2, NULL, rows, k),
                .tiles = {.dtype = info->scale,
                          .rank = 3,
                          .shape = {(rows + 127) / 128, (wide + 3) / 4, 512}},
                .scale = {.dtype = DW_F32, .rank = info->tensor_scale ? 0 : -1}};
    dw__tensor_set_contiguous(&f.tiles);
    options.scheme = scheme;
    options.tensor_scale = info->tensor_scale ? 0.375f : 1.0f;
    const size_t count = (size_t)(rows * k);
    float *scale = f.scale.data = malloc(sizeof *scale);
    f.values = malloc(count * sizeof *f.values);
    f.codes.data = aligned_alloc(256, (count + 255) / 256 * 256);
    f.tiles.data = aligned_alloc(256, (dw__tensor_bytes(&f.tiles) + 255) / 256 * 256);
    uint8_t *scales = malloc((size_t)(rows * wide));
    CHILD_REQUIRE(f.values && f.codes.data && f.tiles.data && scales && scale);
    *scale = options.tensor_scale;
    for (size_t i = 0; i < count; i++)
        f.values[i] = ldexpf(dw__trial_normal(5, stream, i), (int)(i / 32 % 9) - 4);
    REQUIRE_OK(dw_block_quantize(&options, rows, k, f.values, k, f.codes.data, 0, scales));
    REQUIRE_OK(dw_scales_swizzle(rows, wide, 1, scales, f.tiles.data));
    REQUIRE_OK(dw_block_dequantize(&options, rows, k, f.codes.data, 0, scales, f.values, k));
    free(scales);
    return f;
}

static void forget(factor *f) {
    free(f->values);
    free(f->codes.data);
    free(f->tiles.data);
    free(f->scale.data);
}

static void multiply_block_codes(dw_scheme a_scheme, dw_scheme b_scheme, dw_dtype result, int64_t m,
                                 int64_t n, int64_t k) {
    const dw_attr type = {.key = DW_ATTR_KEY_DTYPE, .integer = (int64_t)result};
    factor a = make_factor(a_scheme, m, k, 1), b = make_factor(b_scheme, n, k, 2);
    dw__operation_call call = {
        .call = {.op = DW_OP_MULTIPLY_CODES,
                 .attr_count = 1,
                 .attrs = &type,
                 .input_count = 6,
                 .output_count = 1,
                 .inputs = {a.codes, b.codes, a.scale, b.scale, a.tiles, b.tiles},
                 .outputs = {make(result, 2, NULL, m, n)}}};
    const dw__kernel *kernel = &dw__graph_cublaslt_scaled;
    const dw__variant *variant = NULL;
    dw__tensor *y = &call.call.outputs[0];
    size_t bytes = 0;
    y->data = aligned_alloc(256, (dw__tensor_bytes(y) + 255) / 256 * 256);
    /* Ours comes first. */
    CHILD_REQUIRE(dw__kernel_for(&call, &gpu, NULL) == &dw__graph_gemm_scaled);
    CHILD_REQUIRE(dw__kernel_for(&call, &gpu, &dw__graph_gemm_scaled) == kernel);
    REQUIRE_OK(kernel->prepare(kernel, &call, context, &variant));
    REQUIRE_OK(dw__variant_status(variant));
    REQUIRE_OK(kernel->workspace_bytes(kernel, &call, context, &bytes));
    call.workspace = aligned_alloc(256, (bytes + 255) / 256 * 256);
    REQUIRE_OK(kernel->enqueue(&call, context, variant));
    /* NVFP4: alpha is rounded to F32, and so are the operands' values. */
    const double unit = result == DW_BF16 ? 0x1p-8 : result == DW_F16 ? 0x1p-11 : 0x1p-24;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0, magnitude = 0.0;
            for (int64_t l = 0; l < k; l++) {
                const double term = (double)a.values[i * k + l] * (double)b.values[j * k + l];
                sum += term;
                magnitude += fabs(term);
            }
            const double got = dw__scalar_load(y->data, result, i * n + j).number;
            CHILD_REQUIRE(fabs(got - sum) <= unit * fabs(sum) + 0x1p-22 * magnitude + 0x1p-24);
        }
    free(y->data);
    free(call.workspace);
    forget(&a);
    forget(&b);
}

/* Runs instead of scale_product. */
static void multiply_scales(const fake_launch *launch) {
    dw_scale_product_params p;
    CHILD_REQUIRE(strcmp(launch->name, "scale_product") == 0);
    memcpy(&p, launch->params, sizeof p);
    p.factors[0] = *p.a * *p.b;
    p.factors[1] = 0.0f;
}

static void codes_in_blocks(void *unused) {
    (void)unused;
    fake->capability = 100;
    fake->params_bytes = sizeof(dw_scale_product_params);
    fake->kernel = multiply_scales;
    begin(FAKE_CUBLASLT);
    multiply_block_codes(DW_SCHEME_MXFP8, DW_SCHEME_MXFP8, DW_BF16, 33, 48, 160);
    multiply_block_codes(DW_SCHEME_MXFP8_E5M2, DW_SCHEME_MXFP8, DW_F32, 150, 144, 64);
    multiply_block_codes(DW_SCHEME_MXFP8, DW_SCHEME_MXFP8_E5M2, DW_F16, 1, 16, 288);
    multiply_block_codes(DW_SCHEME_NVFP4, DW_SCHEME_NVFP4, DW_BF16, 33, 48, 160);
    multiply_block_codes(DW_SCHEME_NVFP4, DW_SCHEME_NVFP4, DW_F32, 130, 144, 64);
    CHILD_REQUIRE(asked_of_library("fake_cublaslt_multiplied", DW_LT_E4M3) >= 3);
    /* A library that computes wrong results is refused, and so are other calls. */
    setenv("FAKE_CUBLASLT_WRONG", "1", 1);
    dw__operation_call call = {.call = {.op = DW_OP_MULTIPLY_CODES}};
    dw__graph_cublaslt_scaled.example((uint64_t)DW_E4M3 | (uint64_t)DW_F32 << 4 |
                                          (uint64_t)DW_E4M3 << 19 |
                                          (uint64_t)DW_LT_SCALES_OF_32 << 23,
                                      0, &call.call);
    const dw__variant *variant = NULL;
    REQUIRE_OK(
        dw__graph_cublaslt_scaled.prepare(&dw__graph_cublaslt_scaled, &call, context, &variant));
    CHILD_REQUIRE(variant->disabled);
    gpu.capability = 90;
    CHILD_REQUIRE(dw__graph_cublaslt_scaled.supports(&dw__graph_cublaslt_scaled, &call, &gpu) ==
                  DW_TYPE);
    gpu.capability = 100;
    call.call.inputs[4].dtype = call.call.inputs[5].dtype = DW_UE4M3;
    CHILD_REQUIRE(dw__graph_cublaslt_scaled.supports(&dw__graph_cublaslt_scaled, &call, &gpu) ==
                  DW_TYPE);
}

/* ---- fp8-block --------------------------------------------------------------------------------------------------- */

/* One orientation of quantize_tiles by the definition: codes and scales of a random matrix, and its block of scales. */
typedef struct fp8_factor {
    dw__tensor codes, scales;
    float *numbers; /* of the codes */
    bool square;
} fp8_factor;

static fp8_factor make_fp8_factor(int64_t rows, int64_t k, bool square, uint32_t stream) {
    const int64_t blocks = (k + 127) / 128, wide = (blocks + 3) / 4;
    fp8_factor f = {.codes = make(DW_E4M3, 2, NULL, rows, k),
                    .scales = {.dtype = DW_F32, .rank = 2, .shape = {blocks, rows}},
                    .square = square};
    if (square)
        f.scales = (dw__tensor){.dtype = DW_F32, .rank = 3, .shape = {(rows + 127) / 128, wide, 4}};
    dw__tensor_set_contiguous(&f.scales);
    f.numbers = malloc((size_t)(rows * k) * sizeof *f.numbers);
    f.codes.data = fill_codes(DW_E4M3, rows * k, stream, f.numbers);
    float *scales = aligned_alloc(256, (dw__tensor_bytes(&f.scales) + 255) / 256 * 256);
    CHILD_REQUIRE(f.numbers && scales);
    for (int64_t i = 0; i < dw__tensor_count(&f.scales); i++)
        scales[i] = ldexpf(1.0f + 0.9f * fabsf(sinf((float)i)), (int)(i % 9) - 4);
    f.scales.data = scales;
    return f;
}

/* By the recipe: blocks of 1 x 128 or 128 x 128. */
static double fp8_scale(const fp8_factor *f, int64_t row, int64_t block) {
    const float *scales = f->scales.data;
    return f->square ? (double)scales[row / 128 * f->scales.shape[1] * 4 + block]
                     : (double)scales[block * f->scales.shape[1] + row];
}

static void forget_fp8_factor(fp8_factor *f) {
    free(f->numbers);
    free(f->codes.data);
    free(f->scales.data);
}

static void multiply_fp8_blocks(bool square_a, bool square_b, dw_dtype result, bool has_bias,
                                int64_t m, int64_t n, int64_t k) {
    const dw_attr type = {.key = DW_ATTR_KEY_DTYPE, .integer = (int64_t)result};
    const dw__tensor none = {.rank = -1};
    fp8_factor a = make_fp8_factor(m, k, square_a, 11), b = make_fp8_factor(n, k, square_b, 12);
    dw__operation_call call = {
        .call = {.op = DW_OP_MULTIPLY_CODES,
                 .attr_count = 1,
                 .attrs = &type,
                 .input_count = 7,
                 .output_count = 1,
                 .inputs = {a.codes, b.codes, none, none, a.scales, b.scales, none},
                 .outputs = {make(result, 2, NULL, m, n)}}};
    const dw__kernel *kernel = &dw__graph_cublaslt_fp8_block;
    const dw__variant *variant = NULL;
    dw__tensor *y = &call.call.outputs[0], *bias = &call.call.inputs[6];
    size_t bytes = 0;
    y->data = aligned_alloc(256, (dw__tensor_bytes(y) + 255) / 256 * 256);
    if (has_bias) {
        *bias = (dw__tensor){.dtype = result, .rank = 1, .shape = {n}, .stride = {1}};
        bias->data = aligned_alloc(256, (dw__tensor_bytes(bias) + 255) / 256 * 256);
        for (int64_t j = 0; j < n; j++)
            dw__scalar_store(bias->data, result, j,
                             (dw__scalar){.number = 0.375 * (double)(j - 20)});
    }
    CHILD_REQUIRE(dw__kernel_for(&call, &gpu, NULL) == kernel);
    CHILD_REQUIRE(dw__kernel_for(&call, &gpu, kernel) == &dw__sm90_codes);
    CHILD_REQUIRE(dw__kernel_for(&call, &gpu, &dw__sm90_codes) == &dw__gpu_fp8_block_gemm);
    REQUIRE_OK(kernel->prepare(kernel, &call, context, &variant));
    REQUIRE_OK(dw__variant_status(variant));
    REQUIRE_OK(kernel->workspace_bytes(kernel, &call, context, &bytes));
    call.workspace = aligned_alloc(256, (bytes + 255) / 256 * 256);
    REQUIRE_OK(kernel->enqueue(&call, context, variant));
    const double unit = result == DW_BF16 ? 0x1p-8 : result == DW_F16 ? 0x1p-11 : 0x1p-24;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0;
            for (int64_t l = 0; l < k; l++)
                sum += (double)a.numbers[i * k + l] * fp8_scale(&a, i, l / 128) *
                       (double)b.numbers[j * k + l] * fp8_scale(&b, j, l / 128);
            if (has_bias) sum += 0.375 * (double)(j - 20);
            const double got = dw__scalar_load(y->data, result, i * n + j).number;
            CHILD_REQUIRE(fabs(got - sum) <= 1.01 * unit * fabs(sum) + 0x1p-24);
        }
    free(y->data);
    free(bias->data);
    free(call.workspace);
    forget_fp8_factor(&a);
    forget_fp8_factor(&b);
}

/* A call that the variant's example makes, and what the kernel says to it. */
static dw_status fp8_block_answer(int64_t m, int64_t n, int64_t k, bool square_a, bool square_b) {
    dw__operation_call call = {0};
    dw__multiply_codes_example(DW_E4M3, DW_E4M3, DW_BF16, m, n, k, &call.call);
    dw__multiply_codes_add_blocks(&call.call, square_a, square_b);
    return dw__graph_cublaslt_fp8_block.supports(&dw__graph_cublaslt_fp8_block, &call, &gpu);
}

static void fp8_blocks(void *unused) {
    (void)unused;
    begin(FAKE_CUBLASLT);
    multiply_fp8_blocks(false, true, DW_BF16, false, 24, 144, 160); /* forward and dgrad */
    multiply_fp8_blocks(false, true, DW_F16, true, 40, 272, 544);
    multiply_fp8_blocks(true, false, DW_F32, false, 136, 32, 96);
    multiply_fp8_blocks(false, false, DW_F32, false, 144, 160, 288); /* wgrad */
    CHILD_REQUIRE(fp8_block_answer(32, 48, 64, false, true) == DW_OK);
    /* Rows in eights, columns in sixteens, square blocks on one side, Hopper, CUDA 12.9. */
    CHILD_REQUIRE(fp8_block_answer(36, 48, 64, false, true) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "a multiple of 8 rows"));
    CHILD_REQUIRE(fp8_block_answer(32, 40, 64, false, true) == DW_UNSUPPORTED);
    CHILD_REQUIRE(fp8_block_answer(32, 48, 64, true, true) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "one operand at most"));
    gpu.capability = 100;
    CHILD_REQUIRE(fp8_block_answer(32, 48, 64, false, true) == DW_UNSUPPORTED);
    gpu.capability = 90;
    setenv("FAKE_CUBLASLT_VERSION", "120805", 1);
    CHILD_REQUIRE(fp8_block_answer(32, 48, 64, false, true) == DW_UNSUPPORTED);
    CHILD_REQUIRE(strstr(dw_last_error(), "cuBLASLt is version 120805; expected 120900"));
}

static const dw__variant *first_use_of_fp8_blocks(void) {
    dw__operation_call call = {0};
    const dw__variant *variant = NULL;
    dw__multiply_codes_example(DW_E4M3, DW_E4M3, DW_BF16, 32, 48, 256, &call.call);
    dw__multiply_codes_add_blocks(&call.call, false, true);
    REQUIRE_OK(dw__graph_cublaslt_fp8_block.prepare(&dw__graph_cublaslt_fp8_block, &call, context,
                                                    &variant));
    return variant;
}

/* A linear layer in BF16 with a bias, and the gradients of x and w. */
static dw_engine *fp8_block_engine(void) {
    static const char text[] = "deepwell graph 1\n"
                               "symbols S\n"
                               "input %x: bf16[S, 160]\n"
                               "parameter %w: bf16[48, 160]\n"
                               "parameter %b: bf16[48]\n"
                               "%h = linear(%x, %w, %b)  # mlp 0 h.0.mlp.c_fc\n"
                               "return %h\n";
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_precision_policy policy;
    dw_graph *graph = NULL;
    dw_engine *engine = NULL;
    dw_value wrt[2];
    REQUIRE_OK(dw_graph_from_text(text, &graph));
    REQUIRE_OK(dw_precision_policy_init(&policy, "fp8-block"));
    options.device = &dw__device_cuda;
    options.precision = &policy;
    for (uint32_t i = 0; i < 2; i++) wrt[i] = dw_graph_leaf_at(graph, i);
    REQUIRE_OK(dw_engine_create(graph, 1, (uint32_t[]){0}, 2, wrt, &options, &engine));
    dw_graph_destroy(graph);
    return engine;
}

/* The products of codes whose result is BF16, or those of them with a bias. */
static int count_products(const dw_engine *engine, bool with_bias) {
    enum { BIAS = 6 };
    const dw_graph *graph = dw_engine_graph(engine);
    int count = 0;
    for (dw_node n = 0; n < dw_graph_node_count(graph); n++) {
        if (dw_node_op(graph, n) != DW_OP_MULTIPLY_CODES ||
            dw_value_dtype(graph, dw_node_output(graph, n, 0)) != DW_BF16)
            continue;
        count += !with_bias ||
                 (dw_node_input_count(graph, n) > BIAS && dw_node_input(graph, n, BIAS) != DW_NONE);
    }
    return count;
}

/* All three GEMMs are the library's, with their casts and the bias. A plan with rows that it does not take has ours. */
static void fp8_block_plans(void *unused) {
    dw_plan *plan = NULL;
    uint32_t multiplied = 0, simulated = 0;
    (void)unused;
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1); /* the fake compiler's programs fail it */
    begin(FAKE_CUBLASLT);
    dw_engine *engine = fp8_block_engine();
    CHILD_REQUIRE(strcmp(dw_engine_code_products(engine, &multiplied, &simulated), "") == 0);
    CHILD_REQUIRE(multiplied == 3 && simulated == 0);
    CHILD_REQUIRE(count_products(engine, false) == 3 && count_products(engine, true) == 1);
    REQUIRE_OK(dw_engine_plan(engine, (int64_t[]){40}, &plan));
    CHILD_REQUIRE(lists(plan, "cublaslt_fp8_block") && lists(plan, "fp8_block_codes"));
    CHILD_REQUIRE(!lists(plan, ": sm90_codes"));
    dw_plan_release(plan);
    REQUIRE_OK(dw_engine_plan(engine, (int64_t[]){36}, &plan));
    /* wgrad has features as rows */
    CHILD_REQUIRE(lists(plan, ": sm90_codes") && lists(plan, "cublaslt_fp8_block"));
    dw_plan_release(plan);
    dw_engine_destroy(engine);
}

/* An older library leaves all products to Deepwell's kernels. If the one for FP8 tensor cores fails its first-use
 * check, as the fake compiler's programs do, another multiplies in F16, and the reason says what to do. */
static void fp8_block_by_an_old_library(void *unused) {
    uint32_t multiplied = 0, simulated = 0;
    (void)unused;
    setenv("FAKE_CUBLASLT_VERSION", "120805", 1);
    begin(FAKE_CUBLASLT);
    dw_engine *engine = fp8_block_engine();
    const char *reason = dw_engine_code_products(engine, &multiplied, &simulated);
    CHILD_REQUIRE(multiplied == 0 && simulated == 3);
    CHILD_REQUIRE(strstr(reason, "expected 120900 (CUDA 12.9) or later"));
    dw_engine_destroy(engine);
}

static void fp8_block_by_our_kernel(void *unused) {
    uint32_t multiplied = 0, simulated = 0;
    (void)unused;
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    setenv("FAKE_CUBLASLT_VERSION", "120805", 1);
    begin(FAKE_CUBLASLT);
    dw_engine *engine = fp8_block_engine();
    CHILD_REQUIRE(strcmp(dw_engine_code_products(engine, &multiplied, &simulated), "") == 0);
    CHILD_REQUIRE(multiplied == 3 && simulated == 0);
    dw_engine_destroy(engine);
}

/* The first-use check accepts 14 bits of each addend within a block. */
static void fp8_blocks_in_14_bits(void *unused) {
    (void)unused;
    begin(FAKE_CUBLASLT);
    setenv("FAKE_CUBLASLT_14_BITS", "1", 1);
    REQUIRE_OK(dw__variant_status(first_use_of_fp8_blocks()));
}

/* It refuses a library that reads the scales in another order, or computes something else. */
static void fp8_blocks_in_another_order(void *unused) {
    (void)unused;
    begin(FAKE_CUBLASLT);
    setenv("FAKE_CUBLASLT_ROWS_OF_SCALES", "1", 1);
    CHILD_REQUIRE(first_use_of_fp8_blocks()->disabled);
}

/* ---- measured algorithms ----------------------------------------------------------------------------------------- */

typedef struct choice {
    const char *times, *version, *autotune, *cache;
    bool short_of_memory;
    float ours;   /* milliseconds of our kernel; 0: the library's last */
    bool is_ours; /* our kernel is expected to compute the GEMM */
    int expected; /* algorithm; -1: any */
    int measured; /* GEMMs; -1: any */
} choice;

static char kept_path[300];

static float our_milliseconds;

static void take_our_time(const fake_launch *launch) {
    if (strcmp(launch->name, "sm90_gemm") == 0) fake->event_milliseconds = our_milliseconds;
}

/* A process that multiplies 2^29 pairs once. */
static void choose(void *argument) {
    const choice *c = argument;
    const dw__variant *variant = NULL;
    dw__operation_call call = {.call = {.op = DW_OP_MATMUL, .input_count = 2, .output_count = 1}};
    char workspace[8192];
    setenv("FAKE_CUBLASLT_TIMES", c->times, 1);
    setenv("FAKE_CUBLASLT_VERSION", c->version ? c->version : "130100", 1);
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    if (c->autotune) setenv("DEEPWELL_AUTOTUNE", c->autotune, 1);
    if (c->cache) setenv("DEEPWELL_CACHE", c->cache, 1);
    fake->l2_bytes = 1 << 16; /* which is overwritten often */
    our_milliseconds = c->ours;
    if (c->ours > 0.0f) fake->kernel = take_our_time;
    begin(FAKE_CUBLASLT);
    call.call.inputs[0] = make(DW_BF16, 2, NULL, 1024, 1024);
    call.call.inputs[1] = make(DW_BF16, 2, NULL, 1024, 512);
    call.call.outputs[0] = make(DW_BF16, 2, NULL, 1024, 512);
    const int64_t memory = fake->memory;
    if (c->short_of_memory) fake->failing = "cuMemAlloc_v2", fake->result = 2;
    const dw_status status =
        dw__graph_cublaslt.prepare(&dw__graph_cublaslt, &call, context, &variant);
    CHILD_REQUIRE(status == (c->is_ours ? DW_UNSUPPORTED : DW_OK));
    CHILD_REQUIRE(fake->memory == memory);
    const int measured = asked_of_library("fake_cublaslt_multiplied", DW_LT_BF16);
    if (c->measured >= 0) CHILD_REQUIRE(measured == c->measured);
    if (c->is_ours) {
        CHILD_REQUIRE(strstr(dw_last_error(), "sm90_gemm"));
        const dw__kernel *next = dw__kernel_for(&call, &gpu, &dw__graph_cublaslt);
        CHILD_REQUIRE(next == &dw__graph_gemm_hopper);
        return;
    }
    for (int i = 0; i < 2; i++) call.call.inputs[i].data = workspace;
    call.call.outputs[0].data = workspace;
    call.workspace = (void *)(((uintptr_t)workspace + 255) / 256 * 256);
    for (int i = 0; i < 2; i++) call.call.inputs[i].data = call.workspace;
    call.call.outputs[0].data = call.workspace;
    REQUIRE_OK(dw__graph_cublaslt.enqueue(&call, context, variant));
    const int used = asked_of_library("fake_cublaslt_last", 0);
    if (c->expected >= 0) CHILD_REQUIRE(used == c->expected);
}

static void run_choice(choice c) { expect_child(start_child(choose, &c)); }

static void set_kept(const char *text, size_t bytes) {
    assert_int_equal(dw__file_write(kept_path, text, bytes), DW_OK);
}

/* One warm-up and five runs of each of four algorithms, then one and three of the fastest beside our kernel. The latter are
 * loads of 4 ms or three GEMMs: of `LOAD(milliseconds)` GEMMs. */
enum { ALL_RUNS = 4 * 6, BESIDE = 4 };
#define LOAD(milliseconds) ((milliseconds) > 1 ? 3 : 4 / (milliseconds))

/* The fastest is kept: later processes measure nothing, whatever is faster now. */
static void test_fastest(void **state) {
    (void)state;
    run_choice((choice){.times = "5 5 2 4", .autotune = "0", .expected = 0, .measured = 0});
    run_choice((choice){.times = "5 5 2 4", .autotune = "off", .expected = 0, .measured = 0});
    run_choice(
        (choice){.times = "5 5 2 4", .expected = 2, .measured = ALL_RUNS + BESIDE * LOAD(2)});
    run_choice((choice){.times = "1 9 9 9", .expected = 2, .measured = 0});
    run_choice((choice){.times = "1 9 9 9", .autotune = "0", .expected = 0, .measured = 0});
    /* The library no longer has it. */
    run_choice((choice){.times = "5 1", .expected = 0, .measured = 0});
    /* Another version of the library. */
    run_choice((choice){.times = "9 3 9 9",
                        .version = "130200",
                        .expected = 1,
                        .measured = ALL_RUNS + BESIDE * LOAD(3)});
    run_choice((choice){.times = "9 9 9 1", .version = "130200", .expected = 1, .measured = 0});
    /* A gain below 3 %. */
    run_choice(
        (choice){.times = "5 4.9 5 5", .expected = 0, .measured = ALL_RUNS + BESIDE * LOAD(4)});
    run_choice((choice){.times = "5 1 5 5", .expected = 0, .measured = 0});
    /* A choice that cannot be kept is not made. */
    run_choice((choice){.times = "5 1", .cache = "/proc/none", .expected = 0, .measured = 0});
    /* There is nothing to choose, but its time is kept. */
    run_choice((choice){
        .times = "5", .version = "130300", .expected = 0, .measured = 6 + BESIDE * LOAD(4)});
}

/* Our kernel computes what it was measured to compute faster than the library's best, by 1 % or more, also in later
 * processes. */
static void test_ours_is_faster(void **state) {
    (void)state;
    assert_int_equal(unlink(kept_path), 0);
    run_choice((choice){.times = "5 4 6 7",
                        .ours = 3.95f,
                        .is_ours = true,
                        .measured = ALL_RUNS + BESIDE * LOAD(4)});
    run_choice((choice){.times = "1 1 1 1", .ours = 9.0f, .is_ours = true, .measured = 0});
    run_choice((choice){.times = "5 4 6 7", .autotune = "0", .expected = 0, .measured = 0});
    assert_int_equal(unlink(kept_path), 0);
    run_choice((choice){
        .times = "5 4 6 7", .ours = 3.97f, .expected = 1, .measured = ALL_RUNS + BESIDE * LOAD(4)});
    run_choice((choice){.times = "5 4 6 7", .ours = 0.1f, .expected = 1, .measured = 0});
}

/* A measurement says by how much ours is faster. Without one, or if the library is faster, nothing is said. */
static void list_measured(void *gain) {
    char *json = NULL, shape[64];
    begin(FAKE_CUBLASLT);
    REQUIRE_OK(dw_gemm_measured(&json));
    json_t *root = json_loads(json, 0, NULL);
    const json_t *rows = json_object_get(root, "faster"), *row = json_array_get(rows, 0);
    CHILD_REQUIRE(strcmp(json_string_value(json_object_get(root, "gpu")), "Fake GPU 0") == 0);
    CHILD_REQUIRE(json_array_size(rows) == (gain ? 1 : 0));
    if (gain) {
        snprintf(shape, sizeof shape, "%.0f %.0f %.0f %s %d %d",
                 json_number_value(json_object_get(row, "m")),
                 json_number_value(json_object_get(row, "n")),
                 json_number_value(json_object_get(row, "k")),
                 json_string_value(json_object_get(row, "dtype")),
                 json_is_true(json_object_get(row, "a_across")),
                 json_is_true(json_object_get(row, "b_across")));
        CHILD_REQUIRE(strcmp(shape, "1024 512 1024 bf16 0 1") == 0);
        const double library = json_number_value(json_object_get(row, "cublaslt_seconds")),
                     ours = json_number_value(json_object_get(row, "deepwell_seconds"));
        CHILD_REQUIRE(fabs(library / ours - *(double *)gain) < 1e-6 && fabs(library - 4e-3) < 1e-9);
    }
    json_decref(root);
    dw_text_free(json);
}
static void test_measured(void **state) {
    double gain = 1.25;
    (void)state;
    (void)unlink(kept_path);
    expect_child(start_child(list_measured, NULL));
    run_choice((choice){
        .times = "5 4 6 7", .ours = 4.1f, .expected = 1, .measured = ALL_RUNS + BESIDE * LOAD(4)});
    expect_child(start_child(list_measured, NULL));
    assert_int_equal(unlink(kept_path), 0);
    run_choice((choice){.times = "5 4 6 7",
                        .ours = 3.2f,
                        .is_ours = true,
                        .measured = ALL_RUNS + BESIDE * LOAD(4)});
    expect_child(start_child(list_measured, &gain));
    assert_int_equal(unlink(kept_path), 0);
}

/* The sums are a step of their own if the library is slow at them: 0.1 ms more, for the 2 MiB of an operand. */
static void sum(void *more) {
    const dw__variant *variant = NULL;
    dw__operation_call call = {.call = {.op = DW_OP_MATMUL, .input_count = 2, .output_count = 2}};
    dw__call *c = &call.call;
    setenv("FAKE_CUBLASLT_TIMES", "3 2", 1);
    if (more) setenv("FAKE_CUBLASLT_SUM_TIME", more, 1);
    setenv("DEEPWELL_FIRST_USE_CHECK", "off", 1);
    fake->l2_bytes = 1 << 16;
    begin(FAKE_CUBLASLT);
    c->inputs[0] = make(DW_BF16, 2, NULL, 512, 1024);
    c->inputs[1] = make(DW_BF16, 2, NULL, 1024, 1024);
    c->outputs[0] = make(DW_BF16, 2, NULL, 512, 1024);
    c->outputs[1] = (dw__tensor){.dtype = DW_BF16, .rank = 1, .shape = {1024}, .stride = {1}};
    c->sums = DW__SUMS_B;
    const dw_status status =
        dw__graph_cublaslt.prepare(&dw__graph_cublaslt, &call, context, &variant);
    CHILD_REQUIRE(status == (more ? DW_UNSUPPORTED : DW_OK));
    CHILD_REQUIRE(!more || strstr(dw_last_error(), "faster than a step of their own"));
}

static void test_slow_sums(void **state) {
    (void)state;
    char more[] = "0.1";
    expect_child(start_child(sum, NULL));
    assert_int_equal(unlink(kept_path), 0);
    expect_child(start_child(sum, more));
}

static void test_no_memory(void **state) {
    (void)state;
    assert_int_equal(unlink(kept_path), 0);
    run_choice((choice){.times = "5 1", .short_of_memory = true, .expected = 0, .measured = 0});
    run_choice((choice){.times = "5 1", .expected = 0, .measured = 0});
}

/* Whatever the file holds, an algorithm of the library computes, and it is measured again if its text has changed. */
static void test_damaged(void **state) {
    (void)state;
    char *text = NULL, *changed = NULL;
    size_t bytes = 0;
    assert_int_equal(unlink(kept_path), 0);
    run_choice(
        (choice){.times = "5 5 2 4", .expected = 2, .measured = ALL_RUNS + BESIDE * LOAD(2)});
    assert_int_equal(dw__file_read(kept_path, &text, &bytes), DW_OK);
    changed = dw__malloc(bytes);
    assert_non_null(changed);
    const char *entry = strstr(text, "\"cublaslt\""); /* the tile of sm90_gemm has a detail, too */
    assert_non_null(entry);
    const char *detail = strstr(entry, "\"detail\"");
    assert_non_null(detail);
    const size_t first = (size_t)(strchr(detail + 8, '"') + 1 - text);
    for (size_t i = 0; i < 128; i += 9) {
        memcpy(changed, text, bytes);
        changed[first + i] = changed[first + i] == '1' ? '0' : '1';
        set_kept(changed, bytes);
        run_choice(
            (choice){.times = "5 1 5 5", .expected = 1, .measured = ALL_RUNS + BESIDE * LOAD(1)});
        run_choice((choice){.times = "1 5 5 5", .expected = 1, .measured = 0});
    }
    for (uint32_t i = 0; i < 100; i++) {
        memcpy(changed, text, bytes);
        const uint64_t at = (i * 2654435761u) % bytes;
        changed[at] = (char)(changed[at] ^ (1 + i % 255));
        set_kept(changed, i % 5 == 0 ? (size_t)at : bytes);
        run_choice((choice){.times = "5 1 2 4", .expected = -1, .measured = -1});
    }
    set_kept("{}", 2);
    run_choice(
        (choice){.times = "5 5 2 4", .expected = 2, .measured = ALL_RUNS + BESIDE * LOAD(2)});
    dw__free(changed);
    dw__free(text);
}

/* ---- the program ------------------------------------------------------------------------------------------------------ */

#define IN_CHILD(name, check, argument)                                                            \
    static void name(void **state) {                                                               \
        (void)state;                                                                               \
        expect_child(start_child(check, argument));                                                \
    }
IN_CHILD(test_matmul, matmuls, NULL)
IN_CHILD(test_linear, linears, NULL)
IN_CHILD(test_codes, codes, NULL)
IN_CHILD(test_codes_in_14_bits, codes_in_14_bits, NULL)
IN_CHILD(test_refusals, refusals, NULL)
IN_CHILD(test_plan, by_cublaslt, NULL)
IN_CHILD(test_expansion, expands_in_16_bits, NULL)
IN_CHILD(test_sums, sums_of_operands, NULL)
IN_CHILD(test_bias_f32, bias_gradient, (&(bias_case){DW_F32, 1, false, false}))
IN_CHILD(test_bias_f32_kn, bias_gradient, (&(bias_case){DW_F32, 0, false, false}))
IN_CHILD(test_bias_bf16, bias_gradient, (&(bias_case){DW_BF16, 1, false, false}))
IN_CHILD(test_bias_bf16_kn, bias_gradient, (&(bias_case){DW_BF16, 0, false, false}))
IN_CHILD(test_bias_cast, bias_gradient, (&(bias_case){DW_BF16, 1, false, true}))
IN_CHILD(test_bias_cast_apart, bias_gradient, (&(bias_case){DW_BF16, 0, true, true}))
IN_CHILD(test_bias_apart, bias_gradient, (&(bias_case){DW_F32, 1, true, false}))
IN_CHILD(test_bias_apart_kn, bias_gradient, (&(bias_case){DW_F32, 0, true, false}))
IN_CHILD(test_off, turned_off, NULL)
IN_CHILD(test_missing, missing, NULL)
IN_CHILD(test_another_library, another_library, NULL)
IN_CHILD(test_no_algorithm, without_algorithm, "none")
IN_CHILD(test_not_supported, without_algorithm, "15")
IN_CHILD(test_wrong, wrong, NULL)
IN_CHILD(test_rounds_before_bias, rounds_before_bias, NULL)
IN_CHILD(test_codes_in_blocks, codes_in_blocks, NULL)
IN_CHILD(test_fp8_blocks, fp8_blocks, NULL)
IN_CHILD(test_fp8_block_plans, fp8_block_plans, NULL)
IN_CHILD(test_fp8_block_by_an_old_library, fp8_block_by_an_old_library, NULL)
IN_CHILD(test_fp8_block_by_our_kernel, fp8_block_by_our_kernel, NULL)
IN_CHILD(test_fp8_blocks_in_14_bits, fp8_blocks_in_14_bits, NULL)
IN_CHILD(test_fp8_blocks_in_another_order, fp8_blocks_in_another_order, NULL)
IN_CHILD(test_rounds_and_wrong, rounds_before_bias, "wrong")

static int set_up(void **state) {
    if (begin_on_fake_gpu(state) != 0) return -1;
    unsetenv("DEEPWELL_FIRST_USE_CHECK");
    unsetenv("DEEPWELL_AUTOTUNE");
    unsetenv("FAKE_CUBLASLT_TIMES");
    snprintf(kept_path, sizeof kept_path, "%s/tune/Fake_GPU_0.json", folder);
    unsetenv("FAKE_CUBLASLT_FAIL");
    unsetenv("FAKE_CUBLASLT_WRONG");
    unsetenv("FAKE_CUBLASLT_ROUNDS");
    unsetenv("FAKE_CUBLASLT_NO_SUMS");
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_codes),
        cmocka_unit_test(test_codes_in_14_bits),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_plan),
        cmocka_unit_test(test_expansion),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_bias_f32),
        cmocka_unit_test(test_bias_f32_kn),
        cmocka_unit_test(test_bias_bf16),
        cmocka_unit_test(test_bias_bf16_kn),
        cmocka_unit_test(test_bias_cast),
        cmocka_unit_test(test_bias_cast_apart),
        cmocka_unit_test(test_bias_apart),
        cmocka_unit_test(test_bias_apart_kn),
        cmocka_unit_test(test_off),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_another_library),
        cmocka_unit_test(test_no_algorithm),
        cmocka_unit_test(test_not_supported),
        cmocka_unit_test(test_wrong),
        cmocka_unit_test(test_rounds_before_bias),
        cmocka_unit_test(test_rounds_and_wrong),
        cmocka_unit_test(test_codes_in_blocks),
        cmocka_unit_test(test_fp8_blocks),
        cmocka_unit_test(test_fp8_block_plans),
        cmocka_unit_test(test_fp8_block_by_an_old_library),
        cmocka_unit_test(test_fp8_block_by_our_kernel),
        cmocka_unit_test(test_fp8_blocks_in_14_bits),
        cmocka_unit_test(test_fp8_blocks_in_another_order),
        cmocka_unit_test(test_fastest),
        cmocka_unit_test(test_ours_is_faster),
        cmocka_unit_test(test_measured),
        cmocka_unit_test(test_slow_sums),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_damaged),
    };
    return cmocka_run_group_tests(tests, set_up, end_on_fake_gpu);
}
