/* GEMMs of deepwell/gemm.h for Python. On a GPU the addresses are the caller's. An emulated GPU has its own memory:
 * operands are copied there, and D is copied back. */
#include "ext.h"
#include <stdbool.h>
#include <string.h>

typedef struct operand {
    dw_matrix *matrix;
    size_t bytes;
    bool written;
    void *host;
} operand;

static size_t matrix_bytes(const dw_matrix *x, int64_t rows, int64_t columns, dw_dtype type) {
    return rows > 0
               ? ((size_t)(rows - 1) * (size_t)x->stride + (size_t)columns) * dw_dtype_bytes(type)
               : 0;
}

/* Fills in the call, with operands in the device's memory. */
static dw_status run_staged(dw_gemm *call) {
    const int64_t rows_b = call->activation == DW_ACTIVATION_SWIGLU ? 2 * call->n : call->n;
    dw_matrix bias = {(void *)(uintptr_t)call->bias, rows_b};
    operand all[] = {
        {&call->a, matrix_bytes(&call->a, call->m, call->k, call->dtype), false, NULL},
        {&call->b, matrix_bytes(&call->b, rows_b, call->k, call->dtype), false, NULL},
        {&bias, call->bias ? matrix_bytes(&bias, 1, rows_b, call->dtype) : 0, false, NULL},
        {&call->d, matrix_bytes(&call->d, call->m, call->n, call->output), true, NULL},
    };
    const size_t count = sizeof all / sizeof all[0];
    size_t made = 0;
    dw_status status = DW_OK;
    for (; made < count && status == DW_OK; made++) {
        operand *o = &all[made];
        o->host = o->matrix->data;
        o->matrix->data = NULL;
        if (o->bytes == 0) continue;
        status = dw_device_allocate(call->device, o->bytes, &o->matrix->data);
        if (status == DW_OK && !o->written)
            status = dw_device_copy_in(call->device, o->matrix->data, o->host, o->bytes);
    }
    call->bias = bias.data;
    if (status == DW_OK) status = dw_gemm_run(call);
    for (size_t i = 0; i < made; i++) {
        operand *o = &all[i];
        if (status == DW_OK && o->written && o->bytes > 0)
            status = dw_device_copy_out(call->device, o->host, o->matrix->data, o->bytes);
        dw_device_release(call->device, o->matrix->data, o->bytes);
    }
    return status;
}

/* gemm(device, f16, f32_output, (m, n, k), activation, a, stride_a, b, stride_b, bias, d, stride_d, stream) -> None
 * if computed, else the reason why no kernel supports it. `bias` 0: none. */
static PyObject *gemm(PyObject *self, PyObject *args) {
    (void)self;
    const char *device = NULL;
    int f16 = 0, f32_output = 0, activation = 0;
    unsigned long long a = 0, b = 0, bias = 0, d = 0, stream = 0;
    long long m = 0, n = 0, k = 0, stride_a = 0, stride_b = 0, stride_d = 0;
    if (!PyArg_ParseTuple(args, "spp(LLL)iKLKLKKLK:gemm", &device, &f16, &f32_output, &m, &n, &k,
                          &activation, &a, &stride_a, &b, &stride_b, &bias, &d, &stride_d, &stream))
        return NULL;
    dw_gemm call = {.struct_size = sizeof call,
                    .dtype = f16 ? DW_F16 : DW_BF16,
                    .m = m,
                    .n = n,
                    .k = k,
                    .alpha = 1.0f,
                    .activation = (dw_activation)activation,
                    .a = {(void *)(uintptr_t)a, stride_a},
                    .b = {(void *)(uintptr_t)b, stride_b},
                    .d = {(void *)(uintptr_t)d, stride_d},
                    .bias = (const void *)(uintptr_t)bias,
                    .stream = (void *)(uintptr_t)stream};
    call.output = f32_output ? DW_F32 : call.dtype;
    dw_status status, supported = DW_OK;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_find(device, &call.device);
    if (status == DW_OK) supported = dw_gemm_supported(&call);
    if (status == DW_OK && supported == DW_OK)
        status = strcmp(device, "cuda") == 0 ? dw_gemm_run(&call) : run_staged(&call);
    Py_END_ALLOW_THREADS;
    if (supported == DW_UNSUPPORTED) return PyUnicode_FromString(dw_last_error());
    if (status == DW_OK) status = supported;
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
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
    {"gemm", gemm, METH_VARARGS,
     "gemm(device, f16, f32_output, (m, n, k), activation, a, stride_a, b, stride_b, bias, d, "
     "stride_d, stream) -> None or why not"},
    {"gpu_kernels", gpu_kernels, METH_NOARGS, "Deepwell's GPU kernels, as JSON"},
    {0}};
