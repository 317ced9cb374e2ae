/* AdamW (deepwell/adamw.h) for Python. On a GPU and on the CPU the addresses are the caller's. An emulated GPU has its
 * own memory: operands are copied there and back. */
#include "ext.h"
#include <stdbool.h>
#include <string.h>

enum { INTEGERS = 9 }; /* of a tensor: p, g, m, v, step, count, copy, scales, stream */

typedef struct operand {
    void **at; /* the pointer in the call */
    void *host;
    size_t bytes;
} operand;

/* ---- an emulated GPU --------------------------------------------------------------------------------- */

static size_t list_operands(dw_adamw_gpu *call, dw_adamw_gpu_group *groups, operand *all) {
    size_t count = 0;
    for (uint32_t i = 0; i < call->group_count; i++) {
        dw_adamw_gpu_group *g = &groups[i];
        const size_t param = dw_dtype_bytes(g->param_dtype), state = dw_dtype_bytes(g->state_dtype);
        const size_t grad = dw_dtype_bytes(g->grad_dtype);
        const size_t copy = g->copy_dtype ? dw_dtype_bytes(g->copy_dtype) : 0;
        for (uint32_t j = 0; j < g->count; j++) {
            dw_adamw_gpu_tensor *t = (dw_adamw_gpu_tensor *)&g->tensors[j];
            const size_t elements = (size_t)t->count;
            all[count++] = (operand){&t->param, NULL, elements * param};
            all[count++] = (operand){&t->grad, NULL, elements * grad};
            all[count++] = (operand){&t->copy, NULL, elements * copy};
            all[count++] = (operand){(void **)&t->scales, NULL,
                                     (size_t)DW_ADAMW_SCALES(t->count) * sizeof(float)};
            all[count++] = (operand){&t->exp_avg, NULL, elements * state};
            all[count++] = (operand){&t->exp_avg_sq, NULL, elements * state};
            all[count++] = (operand){(void **)&t->step, NULL, sizeof(float)};
        }
        all[count++] = (operand){(void **)&g->lr_at, NULL, sizeof(float)};
    }
    all[count++] = (operand){(void **)&call->grad_scale, NULL, sizeof(float)};
    all[count++] = (operand){(void **)&call->found_inf, NULL, sizeof(float)};
    all[count++] = (operand){(void **)&call->norm, NULL, sizeof(float)};
    all[count++] = (operand){(void **)&call->outcome, NULL, sizeof *call->outcome};
    all[count++] = (operand){&call->workspace, NULL, call->workspace_bytes};
    return count;
}

static dw_status run_staged(dw_adamw_gpu *call, dw_adamw_gpu_group *groups, operand *all) {
    const size_t count = list_operands(call, groups, all);
    dw_status status = DW_OK;
    size_t made = 0;
    for (; made < count && status == DW_OK; made++) {
        operand *o = &all[made];
        o->host = *o->at;
        *o->at = NULL;
        if (!o->host || o->bytes == 0) continue;
        status = dw_device_allocate(call->device, o->bytes, o->at);
        if (status == DW_OK) status = dw_device_copy_in(call->device, *o->at, o->host, o->bytes);
    }
    if (status == DW_OK) status = dw_adamw_gpu_run(call);
    for (size_t i = 0; i < made; i++) {
        operand *o = &all[i];
        if (status == DW_OK && *o->at)
            status = dw_device_copy_out(call->device, o->host, *o->at, o->bytes);
        dw_device_release(call->device, *o->at, o->bytes);
    }
    return status;
}

/* ---- the call ---------------------------------------------------------------------------------------- */

static bool dtype_of(const char *name, dw_dtype *dtype) {
    static const dw_dtype types[] = {DW_BF16, DW_F16, DW_F32, DW_E4M3};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if (strcmp(name, dw_dtype_name(types[i])) == 0) {
            *dtype = types[i];
            return true;
        }
    PyErr_Format(PyExc_ValueError, "adamw_gpu: the type is %s; expected bf16, f16, f32 or e4m3",
                 name);
    return false;
}

static bool read_tensor(PyObject *flat, Py_ssize_t index, dw_adamw_gpu_tensor *t) {
    unsigned long long numbers[INTEGERS];
    for (int i = 0; i < INTEGERS; i++)
        numbers[i] = PyLong_AsUnsignedLongLong(PyList_GetItem(flat, INTEGERS * index + i));
    *t = (dw_adamw_gpu_tensor){.param = (void *)(uintptr_t)numbers[0],
                               .grad = (void *)(uintptr_t)numbers[1],
                               .exp_avg = (void *)(uintptr_t)numbers[2],
                               .exp_avg_sq = (void *)(uintptr_t)numbers[3],
                               .step = (float *)(uintptr_t)numbers[4],
                               .count = (int64_t)numbers[5],
                               .copy = (void *)(uintptr_t)numbers[6],
                               .scales = (float *)(uintptr_t)numbers[7],
                               .stream = (uint32_t)numbers[8]};
    return PyErr_Occurred() == NULL;
}

/* Reads (param type, grad type, state type or "", copy type or "", flat list, lr, address of lr or 0, beta1, beta2,
 * eps, weight_decay, maximize, stochastic, seed). */
static bool read_group(PyObject *given, dw_adamw_gpu_group *g) {
    const char *param = NULL, *grad = NULL, *state = NULL, *copy = NULL;
    PyObject *flat = NULL;
    unsigned long long lr_at = 0, seed = 0;
    if (!PyArg_ParseTuple(given, "ssssO!dKddddppK:adamw_gpu", &param, &grad, &state, &copy,
                          &PyList_Type, &flat, &g->lr, &lr_at, &g->beta1, &g->beta2, &g->eps,
                          &g->weight_decay, &g->maximize, &g->stochastic, &seed) ||
        !dtype_of(param, &g->param_dtype) || !dtype_of(grad, &g->grad_dtype) ||
        (*state && !dtype_of(state, &g->state_dtype)) || (*copy && !dtype_of(copy, &g->copy_dtype)))
        return false;
    g->seed = seed;
    g->lr_at = (const float *)(uintptr_t)lr_at;
    const Py_ssize_t size = PyList_Size(flat);
    if (size % INTEGERS != 0) {
        PyErr_Format(PyExc_ValueError, "adamw_gpu: %zd integers; nine for each tensor", size);
        return false;
    }
    g->count = (uint32_t)(size / INTEGERS);
    dw_adamw_gpu_tensor *tensors = PyMem_Calloc(g->count + 1, sizeof *tensors);
    g->tensors = tensors;
    if (tensors == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; tensors != NULL && i < (Py_ssize_t)g->count; i++)
        if (!read_tensor(flat, i, &tensors[i])) return false;
    return tensors != NULL;
}

static PyObject *run(const char *name, dw_adamw_gpu *call, dw_adamw_gpu_group *groups) {
    const bool staged = strcmp(name, "cuda") != 0 && strcmp(name, "cpu") != 0;
    operand *operands = NULL;
    size_t needed = 0, tensors = 0;
    for (uint32_t i = 0; i < call->group_count; i++) tensors += groups[i].count;
    if (staged) {
        operands = PyMem_Calloc(7 * tensors + call->group_count + 5, sizeof *operands);
        if (operands == NULL) return PyErr_NoMemory();
    }
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_find(name, &call->device);
    if (status == DW_OK) status = dw_adamw_gpu_workspace(call, &needed);
    if (status == DW_OK && needed <= call->workspace_bytes)
        status = staged ? run_staged(call, groups, operands) : dw_adamw_gpu_run(call);
    Py_END_ALLOW_THREADS;
    PyMem_Free(operands);
    if (status == DW_UNSUPPORTED) return PyUnicode_FromString(dw_last_error());
    if (status != DW_OK) return extension_fail(status);
    if (needed > call->workspace_bytes) return PyLong_FromSize_t(needed);
    Py_RETURN_NONE;
}

/* adamw_gpu(device, groups, max_norm, grad_scale, found_inf, norm, outcome, workspace, workspace_bytes, stream): the
 * addresses may be 0. A step with an outcome changes nothing if the norm is not finite. Returns None if the step was
 * enqueued, else the bytes of workspace that it needs, or the reason why no kernel supports it. */
static PyObject *adamw_gpu(PyObject *self, PyObject *args) {
    (void)self;
    const char *device = NULL;
    PyObject *list = NULL, *result = NULL;
    unsigned long long grad_scale = 0, found_inf = 0, norm = 0, outcome = 0, workspace = 0,
                       bytes = 0, stream = 0;
    dw_adamw_gpu call = {.struct_size = sizeof call};
    if (!PyArg_ParseTuple(args, "sO!dKKKKKKK:adamw_gpu", &device, &PyList_Type, &list,
                          &call.max_norm, &grad_scale, &found_inf, &norm, &outcome, &workspace,
                          &bytes, &stream))
        return NULL;
    const Py_ssize_t count = PyList_Size(list);
    dw_adamw_gpu_group *groups = PyMem_Calloc((size_t)count + 1, sizeof *groups);
    if (groups == NULL) return PyErr_NoMemory();
    call.groups = groups;
    call.group_count = (uint32_t)count;
    call.grad_scale = (const float *)(uintptr_t)grad_scale;
    call.found_inf = (const float *)(uintptr_t)found_inf;
    call.norm = (float *)(uintptr_t)norm;
    call.outcome = (dw_adamw_gpu_outcome *)(uintptr_t)outcome;
    call.finite_only = outcome != 0;
    call.workspace = (void *)(uintptr_t)workspace;
    call.workspace_bytes = (size_t)bytes;
    call.stream = (void *)(uintptr_t)stream;
    bool read = true;
    for (Py_ssize_t i = 0; read && i < count; i++)
        read = read_group(PyList_GetItem(list, i), &groups[i]);
    if (read) result = run(device, &call, groups);
    for (Py_ssize_t i = 0; i < count; i++) PyMem_Free((void *)groups[i].tensors);
    PyMem_Free(groups);
    return result;
}

PyMethodDef adamw_functions[] = {{"adamw_gpu", adamw_gpu, METH_VARARGS,
                                  "one AdamW update of many tensors on a device, with clipping"},
                                 {0}};
