/* GEMMs of deepwell/gemm.h for Python. On a GPU the addresses are the caller's. An emulated GPU has its own memory:
 * operands are copied there, and D is copied back. */
#include "ext.h"
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct operand {
    void **data; /* the call's pointer; NULL: the operand is absent */
    size_t bytes;
    bool written;
    void *host;
} operand;

/* The bytes of a matrix whose rows have `row_bytes` bytes and start `stride_bytes` apart. */
static size_t matrix_bytes(int64_t rows, size_t row_bytes, size_t stride_bytes) {
    return rows > 0 && row_bytes > 0 ? (size_t)(rows - 1) * stride_bytes + row_bytes : 0;
}

static size_t numbers_bytes(const dw_matrix *x, int64_t rows, int64_t columns, dw_dtype type) {
    const size_t element = dw_dtype_bytes(type);
    return matrix_bytes(rows, (size_t)columns * element, (size_t)x->stride * element);
}

static size_t codes_bytes(const dw_matrix *x, int64_t rows, int64_t k, dw_scheme scheme) {
    const size_t row =
        dw_scheme_describe(scheme)->element == DW_E2M1 ? ((size_t)k + 1) / 2 : (size_t)k;
    return matrix_bytes(rows, row, (size_t)x->stride);
}

static size_t scales_bytes(int64_t rows, int64_t k, dw_scheme scheme) {
    const int block = dw_scheme_describe(scheme)->block;
    return block > 0 ? (size_t)dw_scales_swizzled_bytes(rows, (k + block - 1) / block) : 0;
}

/* Moves the call's operands to the device's memory, so that `run` can be called; afterwards copies the results back
 * and releases the memory. */
static dw_status run_staged(const dw_device *device, operand *all, size_t count,
                            dw_status (*run)(const void *call), const void *call) {
    size_t made = 0;
    dw_status status = DW_OK;
    for (; made < count && status == DW_OK; made++) {
        operand *o = &all[made];
        o->host = *o->data;
        *o->data = NULL;
        if (o->bytes == 0 || !o->host) continue;
        status = dw_device_allocate(device, o->bytes, o->data);
        /* D is copied in as well: what lies between its rows stays as it was. */
        if (status == DW_OK) status = dw_device_copy_in(device, *o->data, o->host, o->bytes);
    }
    if (status == DW_OK) status = run(call);
    for (size_t i = 0; i < made; i++) {
        operand *o = &all[i];
        if (!*o->data) continue;
        if (status == DW_OK && o->written)
            status = dw_device_copy_out(device, o->host, *o->data, o->bytes);
        dw_device_release(device, *o->data, o->bytes);
    }
    return status;
}

/* The call's operands that are not void pointers, while they are moved. */
typedef struct staged_gemm {
    dw_gemm *call;
    void *bias, *scales_a, *scales_b, *factor_a, *factor_b;
} staged_gemm;

static dw_status run_gemm(const void *context) {
    const staged_gemm *s = context;
    dw_gemm call = *s->call;
    call.bias = s->bias;
    call.scales_a = s->scales_a;
    call.scales_b = s->scales_b;
    call.factor_a = s->factor_a;
    call.factor_b = s->factor_b;
    return dw_gemm_run(&call);
}

static dw_status run_gemm_staged(dw_gemm *call) {
    staged_gemm s = {call,
                     (void *)call->bias,
                     (void *)call->scales_a,
                     (void *)call->scales_b,
                     (void *)call->factor_a,
                     (void *)call->factor_b};
    const int swiglu = call->activation == DW_ACTIVATION_SWIGLU;
    const int64_t rows_b = swiglu ? 2 * call->n : call->n;
    const int64_t m = call->m, k = call->k;
    const size_t bias_bytes = (size_t)rows_b * dw_dtype_bytes(call->dtype);
    size_t a_bytes, b_bytes, scales_a = 0, scales_b = 0;
    if (call->quantized) {
        a_bytes = codes_bytes(&call->a, m, k, call->scheme_a);
        b_bytes = codes_bytes(&call->b, rows_b, k, call->scheme_b);
        scales_a = scales_bytes(m, k, call->scheme_a);
        scales_b = (swiglu ? 2 : 1) * scales_bytes(call->n, k, call->scheme_b);
    } else {
        a_bytes = numbers_bytes(&call->a, m, k, call->dtype);
        b_bytes = numbers_bytes(&call->b, rows_b, k, call->dtype);
    }
    operand all[] = {
        {&call->a.data, a_bytes, false, NULL},
        {&call->b.data, b_bytes, false, NULL},
        {&s.bias, bias_bytes, false, NULL},
        {&call->residual.data, numbers_bytes(&call->residual, m, call->n, call->output), false,
         NULL},
        {&s.scales_a, scales_a, false, NULL},
        {&s.scales_b, scales_b, false, NULL},
        {&s.factor_a, sizeof(float), false, NULL},
        {&s.factor_b, sizeof(float), false, NULL},
        {&call->d.data, numbers_bytes(&call->d, m, call->n, call->output), true, NULL},
    };
    return run_staged(call->device, all, sizeof all / sizeof all[0], run_gemm, &s);
}

static bool in_own_memory(const char *device) { return strcmp(device, "cuda") != 0; }

/* Returns `done`, or the reason why no kernel supports the call, or raises. Takes a reference to `done`. */
static PyObject *answer(dw_status status, dw_status supported, PyObject *done) {
    if (status == DW_OK && supported == DW_OK) return done;
    Py_DECREF(done);
    if (supported == DW_UNSUPPORTED) return PyUnicode_FromString(dw_last_error());
    return extension_fail(status == DW_OK ? supported : status);
}

/* gemm(device, f16, f32_output, (m, n, k), activation, a, stride_a, b, stride_b, bias, d, stride_d, stream, *,
 * alpha=1, residual=0, stride_residual=0, scheme_a=-1, scheme_b=-1, scales_a=0, scales_b=0, factor_a=0, factor_b=0,
 * kernel=None, workspace=0, workspace_bytes=0) -> None if computed, else the reason why no kernel supports it.
 * Addresses of 0 mean "none". Schemes are numbers of number_names; -1: not quantized. With workspace_bytes -1 the call
 * computes nothing and returns the bytes of workspace that it needs, or the reason. */
static PyObject *gemm(PyObject *self, PyObject *args, PyObject *named) {
    (void)self;
    static char *names[] = {"device",          "f16",      "f32_output", "sizes",
                            "activation",      "a",        "stride_a",   "b",
                            "stride_b",        "bias",     "d",          "stride_d",
                            "stream",          "alpha",    "residual",   "stride_residual",
                            "scheme_a",        "scheme_b", "scales_a",   "scales_b",
                            "factor_a",        "factor_b", "kernel",     "workspace",
                            "workspace_bytes", NULL};
    const char *device = NULL, *kernel = NULL;
    int f16 = 0, f32_output = 0, activation = 0, scheme_a = -1, scheme_b = -1;
    float alpha = 1.0f;
    PyObject *sizes = NULL;
    unsigned long long a = 0, b = 0, bias = 0, d = 0, stream = 0, residual = 0, scales_a = 0;
    unsigned long long scales_b = 0, factor_a = 0, factor_b = 0, workspace = 0;
    long long m = 0, n = 0, k = 0, stride_a = 0, stride_b = 0, stride_d = 0, stride_residual = 0;
    long long workspace_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, named, "sppO!iKLKLKKLK|$fKLiiKKKKzKL:gemm", names, &device, &f16, &f32_output,
            &PyTuple_Type, &sizes, &activation, &a, &stride_a, &b, &stride_b, &bias, &d, &stride_d,
            &stream, &alpha, &residual, &stride_residual, &scheme_a, &scheme_b, &scales_a,
            &scales_b, &factor_a, &factor_b, &kernel, &workspace, &workspace_bytes) ||
        !PyArg_ParseTuple(sizes, "LLL", &m, &n, &k))
        return NULL;
    const bool quantized = scheme_a >= 0;
    if (quantized && (scheme_a >= DW_SCHEME_COUNT || scheme_b < 0 || scheme_b >= DW_SCHEME_COUNT))
        return PyErr_Format(PyExc_ValueError, "schemes %d and %d: expected two of number_names",
                            scheme_a, scheme_b);
    dw_gemm call = {.struct_size = sizeof call,
                    .dtype = f16 ? DW_F16 : DW_BF16,
                    .m = m,
                    .n = n,
                    .k = k,
                    .alpha = alpha,
                    .activation = (dw_activation)activation,
                    .a = {(void *)(uintptr_t)a, stride_a},
                    .b = {(void *)(uintptr_t)b, stride_b},
                    .d = {(void *)(uintptr_t)d, stride_d},
                    .bias = (const void *)(uintptr_t)bias,
                    .residual = {(void *)(uintptr_t)residual, stride_residual},
                    .stream = (void *)(uintptr_t)stream,
                    .quantized = quantized,
                    .scheme_a = quantized ? (dw_scheme)scheme_a : DW_SCHEME_BF16,
                    .scheme_b = quantized ? (dw_scheme)scheme_b : DW_SCHEME_BF16,
                    .scales_a = (const void *)(uintptr_t)scales_a,
                    .scales_b = (const void *)(uintptr_t)scales_b,
                    .factor_a = (const float *)(uintptr_t)factor_a,
                    .factor_b = (const float *)(uintptr_t)factor_b,
                    .kernel = kernel,
                    .workspace = (void *)(uintptr_t)workspace};
    const bool asks = workspace_bytes < 0;
    call.workspace_bytes = asks ? 0 : (size_t)workspace_bytes;
    call.output = f32_output ? DW_F32 : call.dtype;
    dw_status status, supported = DW_OK;
    size_t needed = 0;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_find(device, &call.device);
    if (status == DW_OK && asks) supported = dw_gemm_workspace(&call, &needed);
    if (status == DW_OK && !asks) supported = dw_gemm_supported(&call);
    if (status == DW_OK && supported == DW_OK && !asks)
        status = in_own_memory(device) ? run_gemm_staged(&call) : dw_gemm_run(&call);
    Py_END_ALLOW_THREADS;
    return answer(status, supported, asks ? PyLong_FromSize_t(needed) : Py_NewRef(Py_None));
}

/* ---- quantization ---------------------------------------------------------------------------- */

typedef struct staged_quantize {
    const dw_quantize *call;
    void *source, *codes, *scales, *tensor_scale, *amax;
} staged_quantize;

static dw_status run_quantize(const void *context) {
    const staged_quantize *s = context;
    dw_quantize call = *s->call;
    call.source = s->source;
    call.along_rows.codes = s->codes;
    call.along_rows.scales = s->scales;
    call.tensor_scale = s->tensor_scale;
    call.amax = s->amax;
    return dw_quantize_run(&call);
}

static dw_status run_quantize_staged(const dw_quantize *call) {
    const dw_quantized_matrix *to = &call->along_rows;
    staged_quantize s = {call,       (void *)call->source, to->codes,
                         to->scales, call->tensor_scale,   call->amax};
    const dw_matrix matrix = {NULL, call->row_stride};
    operand all[] = {
        {&s.source, numbers_bytes(&matrix, call->rows, call->cols, call->dtype), false, NULL},
        {&s.codes, (size_t)call->rows * (size_t)to->stride, true, NULL},
        {&s.scales, scales_bytes(call->rows, call->cols, call->scheme), true, NULL},
        {&s.tensor_scale, sizeof(float), true, NULL},
        {&s.amax, sizeof(float), true, NULL},
    };
    return run_staged(call->device, all, sizeof all / sizeof all[0], run_quantize, &s);
}

/* quantize_on(device, dtype, scheme, rows, cols, source, stride, codes, codes_stride, scales, tensor_scale, amax,
 * stream) -> None if computed, else the reason why no kernel supports it. Blocks run along rows, and scales are in the
 * order of dw_scales_swizzle. `dtype`: 0 BF16, 1 F16, 2 F32. `scheme`: a number of number_names. NVFP4 writes
 * tensor_scale and amax; for other schemes they are 0. */
static PyObject *quantize_on(PyObject *self, PyObject *args) {
    (void)self;
    static const dw_dtype types[] = {DW_BF16, DW_F16, DW_F32};
    const char *device = NULL;
    int dtype = 0, scheme = 0;
    long long rows = 0, cols = 0, stride = 0, codes_stride = 0;
    unsigned long long source = 0, codes = 0, scales = 0, tensor_scale = 0, amax = 0, stream = 0;
    if (!PyArg_ParseTuple(args, "siiLLKLKLKKKK:quantize_on", &device, &dtype, &scheme, &rows, &cols,
                          &source, &stride, &codes, &codes_stride, &scales, &tensor_scale, &amax,
                          &stream))
        return NULL;
    if (scheme < 0 || scheme >= DW_SCHEME_COUNT || dtype < 0 || dtype > 2 || rows < 0)
        return PyErr_Format(PyExc_ValueError, "dtype %d, scheme %d, %lld rows", dtype, scheme,
                            rows);
    dw_quantize call = {
        .struct_size = sizeof call,
        .dtype = types[dtype],
        .scheme = (dw_scheme)scheme,
        .rows = rows,
        .cols = cols,
        .source = (const void *)(uintptr_t)source,
        .row_stride = stride,
        .along_rows = {1, (void *)(uintptr_t)codes, codes_stride, (void *)(uintptr_t)scales},
        .tensor_scale = (float *)(uintptr_t)tensor_scale,
        .amax = (float *)(uintptr_t)amax,
        .stream = (void *)(uintptr_t)stream};
    dw_status status, supported = DW_OK;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_find(device, &call.device);
    if (status == DW_OK) supported = dw_quantize_supported(&call);
    if (status == DW_OK && supported == DW_OK)
        status = in_own_memory(device) ? run_quantize_staged(&call) : dw_quantize_run(&call);
    Py_END_ALLOW_THREADS;
    return answer(status, supported, Py_NewRef(Py_None));
}

/* ---- groups ------------------------------------------------------------------------------------ */

/* Fills in the call's pointers from the first group's: A's and D's rows follow each other. */
static void place_groups(dw_grouped_gemm *call, char *a, char *b, char *d, void **pointers) {
    const size_t element = dw_dtype_bytes(call->dtype);
    int64_t row = 0;
    for (int32_t g = 0; g < call->groups; row += call->m[g], g++) {
        pointers[g] = a + (size_t)row * (size_t)call->stride_a * element;
        pointers[call->groups + g] =
            b + (size_t)g * (size_t)call->n * (size_t)call->stride_b * element;
        pointers[2 * call->groups + g] = d + (size_t)row * (size_t)call->stride_d * element;
    }
    call->a = pointers;
    call->b = pointers + call->groups;
    call->d = pointers + 2 * call->groups;
}

typedef struct placed_groups {
    dw_grouped_gemm *call;
    void *a, *b, *d, **pointers;
} placed_groups;

static dw_status run_groups(const void *context) {
    const placed_groups *p = context;
    place_groups(p->call, p->a, p->b, p->d, p->pointers);
    return dw_grouped_gemm_run(p->call);
}

static dw_status run_groups_staged(placed_groups *p, int64_t rows) {
    const dw_grouped_gemm *call = p->call;
    const size_t element = dw_dtype_bytes(call->dtype);
    operand all[] = {
        {&p->a, (size_t)rows * (size_t)call->stride_a * element, false, NULL},
        {&p->b, (size_t)call->groups * (size_t)call->n * (size_t)call->stride_b * element, false,
         NULL},
        {&p->d, (size_t)rows * (size_t)call->stride_d * element, true, NULL},
    };
    return run_staged(call->device, all, sizeof all / sizeof all[0], run_groups, p);
}

/* grouped_gemm(device, f16, sizes, n, k, a, stride_a, b, stride_b, d, stride_d, stream, alpha, kernel, workspace,
 * workspace_bytes) -> as gemm. `sizes`: a tuple of each group's rows. A's groups follow each other, and so do D's; B's
 * have n rows each. Strides are in elements. */
static PyObject *grouped_gemm(PyObject *self, PyObject *args) {
    (void)self;
    const char *device = NULL, *kernel = NULL;
    int f16 = 0;
    PyObject *sizes = NULL;
    unsigned long long a = 0, b = 0, d = 0, stream = 0, workspace = 0;
    long long n = 0, k = 0, stride_a = 0, stride_b = 0, stride_d = 0, workspace_bytes = 0;
    float alpha = 1.0f;
    if (!PyArg_ParseTuple(args, "spO!LLKLKLKLKfzKL:grouped_gemm", &device, &f16, &PyTuple_Type,
                          &sizes, &n, &k, &a, &stride_a, &b, &stride_b, &d, &stride_d, &stream,
                          &alpha, &kernel, &workspace, &workspace_bytes))
        return NULL;
    const Py_ssize_t groups = PyTuple_Size(sizes);
    if (groups > INT32_MAX) return PyErr_Format(PyExc_ValueError, "%zd groups", groups);
    int64_t *m = calloc((size_t)groups + 1, sizeof *m), rows = 0;
    void **pointers = calloc(3 * (size_t)groups + 1, sizeof *pointers);
    PyObject *result = NULL;
    if (!m || !pointers) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t g = 0; g < groups; g++) {
        m[g] = PyLong_AsLongLong(PyTuple_GetItem(sizes, g));
        if (m[g] == -1 && PyErr_Occurred()) goto done;
        if (m[g] < 0) {
            PyErr_Format(PyExc_ValueError, "group %zd has %lld rows", g, (long long)m[g]);
            goto done;
        }
        rows += m[g];
    }
    dw_grouped_gemm call = {.struct_size = sizeof call,
                            .dtype = f16 ? DW_F16 : DW_BF16,
                            .alpha = alpha,
                            .groups = (int32_t)groups,
                            .n = n,
                            .k = k,
                            .m = m,
                            .stride_a = stride_a,
                            .stride_b = stride_b,
                            .stride_d = stride_d,
                            .stream = (void *)(uintptr_t)stream,
                            .kernel = kernel,
                            .workspace = (void *)(uintptr_t)workspace};
    const bool asks = workspace_bytes < 0;
    call.workspace_bytes = asks ? 0 : (size_t)workspace_bytes;
    placed_groups placed = {&call, (void *)(uintptr_t)a, (void *)(uintptr_t)b, (void *)(uintptr_t)d,
                            pointers};
    place_groups(&call, placed.a, placed.b, placed.d, pointers);
    dw_status status, supported = DW_OK;
    size_t needed = 0;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_find(device, &call.device);
    if (status == DW_OK && asks) supported = dw_grouped_gemm_workspace(&call, &needed);
    if (status == DW_OK && !asks) supported = dw_grouped_gemm_supported(&call);
    if (status == DW_OK && supported == DW_OK && !asks)
        status = in_own_memory(device) ? run_groups_staged(&placed, rows) : run_groups(&placed);
    Py_END_ALLOW_THREADS;
    result = answer(status, supported, asks ? PyLong_FromSize_t(needed) : Py_NewRef(Py_None));
done:
    free(m);
    free(pointers);
    return result;
}

typedef struct placed_segments {
    const dw_segment_gemm *call;
    void *a, *b, *d, *offsets, *rows_in, *rows_out, *weights;
} placed_segments;

static dw_status run_segments(const void *context) {
    const placed_segments *p = context;
    dw_segment_gemm call = *p->call;
    call.a = p->a;
    call.b = p->b;
    call.d = p->d;
    call.offsets = p->offsets;
    call.rows_in = p->rows_in;
    call.rows_out = p->rows_out;
    call.weights = p->weights;
    return dw_segment_gemm_run(&call);
}

static dw_status run_segments_staged(const dw_segment_gemm *c) {
    const size_t in = dw_dtype_bytes(c->dtype), out = dw_dtype_bytes(c->output),
                 rows = (size_t)c->rows, groups = (size_t)c->groups, n = (size_t)c->n,
                 k = (size_t)c->k;
    const size_t given = (size_t)c->rows_in_count,
                 rows_a = c->rows_in && !c->rows_in_of_b ? given : rows,
                 rows_b = c->rows_in && c->rows_in_of_b ? given : rows;
    placed_segments p = {c,
                         (void *)c->a,
                         (void *)c->b,
                         c->d,
                         (void *)c->offsets,
                         (void *)c->rows_in,
                         (void *)c->rows_out,
                         (void *)c->weights};
    operand all[7] = {
        {&p.a, rows_a * k * in, false, NULL},
        {&p.b, (c->contraction ? rows_b : groups * k) * n * in, false, NULL},
        {&p.offsets, (groups + 1) * sizeof(int32_t), false, NULL},
        {&p.d, (c->contraction ? groups * k : rows) * n * out, true, NULL},
    };
    size_t count = 4;
    if (p.rows_in) all[count++] = (operand){&p.rows_in, rows * sizeof(int32_t), false, NULL};
    if (p.rows_out) all[count++] = (operand){&p.rows_out, rows * sizeof(int32_t), false, NULL};
    if (p.weights) all[count++] = (operand){&p.weights, rows * in, false, NULL};
    return run_staged(c->device, all, count, run_segments, &p);
}

/* segment_gemm(device, dtype, f32_output, contraction, plain_b, (rows, groups, n, k), offsets, a, b, d, stream, kernel,
 * (rows_in, rows_in_count, rows_in_of_b, rows_out, weights)) -> (name of the kernel that computed it, None), or (None, the reason why no kernel supports it). `dtype`: 0 BF16, 1 F16, 2
 * F32, 3 F64. The other arguments are the members of dw_segment_gemm. */
static PyObject *segment_gemm(PyObject *self, PyObject *args) {
    (void)self;
    static const dw_dtype types[] = {DW_BF16, DW_F16, DW_F32, DW_F64};
    const char *device = NULL, *kernel = NULL, *name = NULL;
    int dtype = 0, f32_output = 0, contraction = 0, plain_b = 0;
    long long rows = 0, groups = 0, n = 0, k = 0;
    unsigned long long offsets = 0, a = 0, b = 0, d = 0, stream = 0, rows_in = 0, rows_out = 0,
                       weights = 0;
    long long rows_in_count = 0;
    int rows_in_of_b = 0;
    if (!PyArg_ParseTuple(args, "sippp(LLLL)KKKKKz(KLpKK):segment_gemm", &device, &dtype,
                          &f32_output, &contraction, &plain_b, &rows, &groups, &n, &k, &offsets, &a,
                          &b, &d, &stream, &kernel, &rows_in, &rows_in_count, &rows_in_of_b,
                          &rows_out, &weights))
        return NULL;
    if (dtype < 0 || dtype > 3) return PyErr_Format(PyExc_ValueError, "dtype %d", dtype);
    dw_segment_gemm call = {.struct_size = sizeof call,
                            .dtype = types[dtype],
                            .output = f32_output ? DW_F32 : types[dtype],
                            .contraction = contraction,
                            .plain_b = plain_b,
                            .rows = rows,
                            .groups = groups,
                            .n = n,
                            .k = k,
                            .offsets = (const int32_t *)(uintptr_t)offsets,
                            .a = (const void *)(uintptr_t)a,
                            .b = (const void *)(uintptr_t)b,
                            .d = (void *)(uintptr_t)d,
                            .stream = (void *)(uintptr_t)stream,
                            .kernel = kernel,
                            .rows_in = (const int32_t *)(uintptr_t)rows_in,
                            .rows_in_count = rows_in_count,
                            .rows_in_of_b = rows_in_of_b,
                            .rows_out = (const int32_t *)(uintptr_t)rows_out,
                            .weights = (const void *)(uintptr_t)weights};
    dw_status status, supported = DW_OK;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_find(device, &call.device);
    if (status == DW_OK) supported = dw_segment_gemm_kernel(&call, &name);
    if (status == DW_OK && supported == DW_OK)
        status = in_own_memory(device) ? run_segments_staged(&call) : dw_segment_gemm_run(&call);
    Py_END_ALLOW_THREADS;
    if (status == DW_OK && supported == DW_OK) return Py_BuildValue("(sO)", name, Py_None);
    if (supported == DW_UNSUPPORTED) return Py_BuildValue("(Os)", Py_None, dw_last_error());
    return extension_fail(status == DW_OK ? supported : status);
}

/* gpu_kernels() -> JSON: dw_gpu_kernels. */
static PyObject *gpu_kernels(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    char *text = NULL;
    dw_status status = dw_gpu_kernels(&text);
    if (status != DW_OK) return extension_fail(status);
    PyObject *result = PyUnicode_FromString(text);
    dw_text_free(text);
    return result;
}

PyMethodDef gemm_functions[] = {
    {"gemm", (PyCFunction)(void (*)(void))gemm, METH_VARARGS | METH_KEYWORDS,
     "gemm(device, f16, f32_output, (m, n, k), activation, a, stride_a, b, stride_b, bias, d, "
     "stride_d, stream, *, ...) -> None or why not"},
    {"grouped_gemm", grouped_gemm, METH_VARARGS,
     "grouped_gemm(device, f16, sizes, n, k, a, stride_a, b, stride_b, d, stride_d, stream, alpha, "
     "kernel, workspace, workspace_bytes) -> None or why not"},
    {"segment_gemm", segment_gemm, METH_VARARGS,
     "segment_gemm(device, dtype, f32_output, contraction, plain_b, (rows, groups, n, k), offsets, "
     "a, b, d, stream, kernel, (rows_in, rows_in_count, rows_in_of_b, rows_out, weights)) -> "
     "(kernel, "
     "None) or (None, why not)"},
    {"quantize_on", quantize_on, METH_VARARGS,
     "quantize_on(device, dtype, scheme, rows, cols, source, stride, codes, codes_stride, scales, "
     "tensor_scale, amax, stream) -> None or why not"},
    {"gpu_kernels", gpu_kernels, METH_NOARGS, "Deepwell's GPU kernels, as JSON"},
    {0}};
