/* Attention called directly from Python. */
#include "attention_module.h"
#include "tensors.h"
#include <math.h>

/* ---- a forward without PyTorch's dispatcher ------------------------------------------------------------------- */

enum { DLPACK_INT = 0, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_CUDA = 2 };

static const exchange_api *exchange; /* NULL: this PyTorch does not have it */

/* attention_exchange(capsule) -> whether attention_call works */
static PyObject *attention_exchange(PyObject *self, PyObject *capsule) {
    (void)self;
    const exchange_api *api = exchange_of(capsule);
    if (PyErr_Occurred()) return NULL;
    if (api != NULL) exchange = api;
    return PyBool_FromLong(exchange != NULL);
}

static int dtype_of(const exchanged_tensor *tensor) {
    if (tensor->lanes != 1) return -1;
    if (tensor->code == DLPACK_BFLOAT && tensor->bits == 16) return DW_BF16;
    if (tensor->code == DLPACK_FLOAT && tensor->bits == 16) return DW_F16;
    if (tensor->code == DLPACK_FLOAT && tensor->bits == 32) return DW_F32;
    if (tensor->code == DLPACK_INT && tensor->bits == 32) return DW_I32;
    if (tensor->code == DLPACK_INT && tensor->bits == 64) return DW_I64;
    return -1;
}

/* Returns false, without an exception, if the object is not a tensor on a GPU. */
static bool look_at(PyObject *object, tensor_view *view) {
    exchanged_tensor tensor;
    if (exchange->view(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    *view = (tensor_view){.data = (char *)tensor.data + tensor.byte_offset,
                          .rank = tensor.rank,
                          .sizes = tensor.sizes,
                          .strides = tensor.strides,
                          .dtype = dtype_of(&tensor),
                          .device = tensor.device};
    return tensor.device_type == DLPACK_CUDA;
}

static bool look_at_optional(PyObject *object, tensor_view *view) {
    return object == Py_None || look_at(object, view);
}

/* Reads q, k and v of a call that needs no copies, on PyTorch's current GPU. */
static bool look_at_inputs(PyObject *const *args, attention_tensors *tensors) {
    return exchange != NULL && look_at(args[0], &tensors->q) && look_at(args[1], &tensors->k) &&
           look_at(args[2], &tensors->v) && attention_device_is_current(tensors->q.device) &&
           attention_lies_well(&tensors->q) && attention_lies_well(&tensors->k) &&
           attention_lies_well(&tensors->v) && (tensors->q.rank == 3 || tensors->q.rank == 4);
}

/* Allocates the results of a call whose q, k, v, seed and offsets have been read, and launches it. Returns 1 if done,
 * with `o` and `lse` (None if not wanted) as new references; 0 if the operator must report the error; -1 with an
 * exception. */
static int run_forward(attention_tensors *tensors, const attention_options *options, bool want_lse,
                       PyObject **o, PyObject **lse) {
    dw_attention call;
    int done = -1;
    *o = attention_new_like(&tensors->q, &tensors->o), *lse = NULL;
    if (*o == NULL) return -1;
    *lse = attention_new_lse(&tensors->q, want_lse, &tensors->lse);
    if (*lse == NULL) goto cleanup;
    done = 0;
    if (attention_describe(tensors, options, false, &call) != DW_OK) goto cleanup;
    if (!want_lse && !attention_is_settled(&call, false, tensors->q.device)) goto cleanup;
    if (!want_lse) call.lse = NULL;
    done = -1;
    if (exchange->stream(DLPACK_CUDA, tensors->q.device, &call.stream) != 0) goto cleanup;
    dw_status status = dw_attention_forward(&call);
    if (status == DW_OK) return 1;
    if (status == DW_UNSUPPORTED)
        done = 0;
    else
        PyErr_SetString(PyExc_RuntimeError, dw_last_error());
cleanup:
    Py_CLEAR(*o);
    Py_CLEAR(*lse);
    return done;
}

/* attention_call(q, k, v, scale, softcap, window_left, window_right, bottom_right, dropout, seed, offsets_q,
 * offsets_k, longest_q, longest_k) -> (o, lse), as the operator attention_forward. Returns None if the operator must
 * handle the call: tensors on another device than the current one or not on a GPU, tensors that need a copy, and calls
 * that libdeepwell does not support. */
static PyObject *attention_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 14) {
        PyErr_SetString(PyExc_TypeError, "attention_call takes 14 arguments");
        return NULL;
    }
    attention_tensors tensors = {.q = {0}};
    if (!look_at_inputs(args, &tensors) || !look_at_optional(args[9], &tensors.seed) ||
        !look_at_optional(args[10], &tensors.offsets_q) ||
        !look_at_optional(args[11], &tensors.offsets_k))
        Py_RETURN_NONE;
    attention_options options = {.scale = PyFloat_AsDouble(args[3]),
                                 .softcap = PyFloat_AsDouble(args[4]),
                                 .window_left = PyLong_AsLongLong(args[5]),
                                 .window_right = PyLong_AsLongLong(args[6]),
                                 .bottom_right = PyObject_IsTrue(args[7]) == 1,
                                 .dropout = PyFloat_AsDouble(args[8]),
                                 .longest_q = PyLong_AsLongLong(args[12]),
                                 .longest_k = PyLong_AsLongLong(args[13])};
    if (PyErr_Occurred()) return NULL;
    PyObject *o, *lse;
    int done = run_forward(&tensors, &options, true, &o, &lse);
    if (done < 0) return NULL;
    if (done == 0) Py_RETURN_NONE;
    PyObject *made = PyTuple_Pack(2, o, lse);
    Py_DECREF(o);
    Py_DECREF(lse);
    return made;
}

/* ---- the usual call, in one step --------------------------------------------------------------------------------- */

enum { MOST_WATCHERS = 8, USUAL_OPTIONS = 5 };

/* PyTorch's functions that each call queries; see attention_prepare. */
static struct {
    PyObject *tensor, *parameter; /* types */
    PyObject *watchers[MOST_WATCHERS];
    Py_ssize_t watcher_count;
    PyObject *grad_enabled, *deterministic, *apply; /* apply NULL: not prepared */
    PyObject *requires_grad, *to_save, *options;    /* names */
} usual;

/* attention_prepare(tensor, parameter, watchers, is_grad_enabled, is_deterministic, apply): `watchers` are functions
 * without arguments; if one returns true, the call goes to the dispatcher. `apply` is that of an autograd function
 * whose forward is attention_node. */
static PyObject *attention_prepare(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *watchers = NULL, *given[5];
    if (!PyArg_ParseTuple(args, "OOO!OOO:attention_prepare", &given[0], &given[1], &PyTuple_Type,
                          &watchers, &given[2], &given[3], &given[4]))
        return NULL;
    Py_ssize_t count = PyTuple_Size(watchers);
    if (count > MOST_WATCHERS || usual.apply != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "attention_prepare: once, and with %d watchers at most, not %zd",
                     MOST_WATCHERS, count);
        return NULL;
    }
    usual.requires_grad = PyUnicode_InternFromString("requires_grad");
    usual.to_save = PyUnicode_InternFromString("to_save");
    usual.options = PyUnicode_InternFromString("options");
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        usual.watchers[i] = Py_NewRef(PyTuple_GetItem(watchers, i));
    usual.watcher_count = count;
    usual.tensor = Py_NewRef(given[0]), usual.parameter = Py_NewRef(given[1]);
    usual.grad_enabled = Py_NewRef(given[2]), usual.deterministic = Py_NewRef(given[3]);
    usual.apply = Py_NewRef(given[4]);
    Py_RETURN_NONE;
}

/* Returns 1, 0, or -1 with an exception set. */
static int says(PyObject *function) {
    PyObject *answer = PyObject_CallNoArgs(function);
    int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return truth;
}

static int is_watched(void) {
    int answer = 0;
    for (Py_ssize_t i = 0; i < usual.watcher_count && answer == 0; i++)
        answer = says(usual.watchers[i]);
    return answer;
}

/* Returns whether a gradient of one of the three may be required. */
static int wants_gradient(PyObject *const *tensors) {
    int answer = says(usual.grad_enabled);
    if (answer != 1) return answer;
    answer = 0;
    for (int i = 0; i < 3 && answer == 0; i++) {
        PyObject *required = PyObject_GetAttr(tensors[i], usual.requires_grad);
        answer = required == NULL ? -1 : PyObject_IsTrue(required);
        Py_XDECREF(required);
    }
    return answer;
}

static bool is_plain(PyObject *object) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    return type == usual.tensor || type == usual.parameter;
}

/* Reads `from`: scale or None, softcap, window_left, window_right, bottom_right. Returns false with an exception
 * set. */
static bool read_usual(PyObject *const *from, attention_options *options) {
    *options = (attention_options){.scale = from[0] == Py_None ? 0.0 : PyFloat_AsDouble(from[0]),
                                   .softcap = PyFloat_AsDouble(from[1]),
                                   .window_left = PyLong_AsLongLong(from[2]),
                                   .window_right = PyLong_AsLongLong(from[3]),
                                   .bottom_right = PyObject_IsTrue(from[4]) == 1};
    return PyErr_Occurred() == NULL;
}

/* Returns false for a scale that no kernel supports. */
static bool settle_scale(PyObject *given, const tensor_view *q, attention_options *options) {
    if (given == Py_None) options->scale = 1.0 / sqrt((double)q->sizes[q->rank - 1]);
    return options->scale >= 0.0 && isfinite(options->scale);
}

/* Returns whether another backend is known to run such a call, so that no autograd node is needed to learn that. */
static bool other_backend_runs(PyObject *const *args, const attention_options *options,
                               bool gradient) {
    attention_tensors tensors = {.q = {0}};
    dw_attention call;
    if (!attention_has_alternatives() || !look_at_inputs(args, &tensors)) return false;
    tensors.o = tensors.q;
    return attention_describe(&tensors, options, false, &call) == DW_OK &&
           !attention_is_settled(&call, gradient, tensors.q.device);
}

/* attention_direct(q, k, v, scale or None, softcap, window_left, window_right, bottom_right) -> o, differentiable: a
 * call without dropout and packing, run without the dispatcher. Returns None if this path does not support the call, or
 * if it is not known whether Deepwell runs it. */
static PyObject *attention_direct(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 3 + USUAL_OPTIONS) {
        PyErr_SetString(PyExc_TypeError, "attention_direct takes 8 arguments");
        return NULL;
    }
    if (usual.apply == NULL || !is_plain(args[0]) || !is_plain(args[1]) || !is_plain(args[2]))
        Py_RETURN_NONE;
    int watched = is_watched(), gradient = watched == 0 ? wants_gradient(args) : 0;
    if (watched < 0 || gradient < 0) return NULL;
    if (watched) Py_RETURN_NONE;
    attention_options options;
    if (!read_usual(args + 3, &options)) return NULL;
    if (other_backend_runs(args, &options, gradient)) Py_RETURN_NONE;
    if (gradient) {
        PyObject *packed = PyTuple_Pack(USUAL_OPTIONS, args[3], args[4], args[5], args[6], args[7]);
        if (packed == NULL) return NULL;
        PyObject *made =
            PyObject_CallFunctionObjArgs(usual.apply, args[0], args[1], args[2], packed, NULL);
        Py_DECREF(packed);
        return made;
    }
    attention_tensors tensors = {.q = {0}};
    if (!look_at_inputs(args, &tensors) || tensors.q.rank != 4 ||
        !settle_scale(args[3], &tensors.q, &options))
        Py_RETURN_NONE;
    PyObject *o, *lse;
    int done = run_forward(&tensors, &options, false, &o, &lse);
    if (done < 0) return NULL;
    if (done == 0) Py_RETURN_NONE;
    Py_DECREF(lse);
    return o;
}

/* Returns whether backward will support the call that forward is about to run. Results have the inputs' layout, and no
 * memory is read. */
static bool backward_supports(const attention_tensors *inputs, const attention_options *options) {
    attention_tensors tensors = *inputs;
    dw_attention call;
    tensors.o = tensors.d_o = tensors.dq = tensors.q;
    tensors.dk = tensors.k, tensors.dv = tensors.v;
    int64_t elements = tensors.q.sizes[0] * tensors.q.sizes[1] * tensors.q.sizes[2], one = 1;
    tensors.lse = (tensor_view){tensors.q.data, 1, &elements, &one, DW_F32, tensors.q.device};
    return elements > 0 && attention_describe(&tensors, options, true, &call) == DW_OK &&
           call.seq_len_kv > 0 && attention_is_settled(&call, true, inputs->q.device) &&
           dw_attention_supported(&call, true) == DW_OK;
}

/* Stores what backward needs on its node: tensors as save_for_backward stores them, with versions and without a cycle,
 * and `options` in the operators' schema. */
static bool save(PyObject *node, PyObject *const *inputs, PyObject *o, PyObject *lse,
                 const attention_options *options) {
    PyObject *tensors = PyTuple_Pack(5, inputs[0], inputs[1], inputs[2], o, lse);
    PyObject *numbers = Py_BuildValue(
        "(ddLLOd)", options->scale, options->softcap, (long long)options->window_left,
        (long long)options->window_right, options->bottom_right ? Py_True : Py_False, 0.0);
    bool saved = tensors != NULL && numbers != NULL &&
                 PyObject_SetAttr(node, usual.to_save, tensors) == 0 &&
                 PyObject_SetAttr(node, usual.options, numbers) == 0;
    Py_XDECREF(tensors);
    Py_XDECREF(numbers);
    return saved;
}

/* attention_node(ctx, q, k, v, options) -> o or None: the forward of an autograd function. `options` are packed as by
 * attention_direct. */
static PyObject *attention_node(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5 || !PyTuple_Check(args[4]) || PyTuple_Size(args[4]) != USUAL_OPTIONS) {
        PyErr_SetString(PyExc_TypeError, "attention_node takes ctx, q, k, v and five options");
        return NULL;
    }
    PyObject *const *inputs = args + 1, *given[USUAL_OPTIONS];
    for (int i = 0; i < USUAL_OPTIONS; i++) given[i] = PyTuple_GetItem(args[4], i);
    attention_tensors tensors = {.q = {0}};
    attention_options options;
    if (!read_usual(given, &options)) return NULL;
    if (!look_at_inputs(inputs, &tensors) || tensors.q.rank != 4 ||
        !settle_scale(given[0], &tensors.q, &options))
        Py_RETURN_NONE;
    int deterministic = says(usual.deterministic);
    if (deterministic < 0) return NULL;
    options.deterministic = deterministic == 1;
    if (!backward_supports(&tensors, &options)) Py_RETURN_NONE;
    PyObject *o, *lse;
    int done = run_forward(&tensors, &options, true, &o, &lse);
    if (done < 0) return NULL;
    if (done == 0) Py_RETURN_NONE;
    if (!save(args[0], inputs, o, lse, &options)) Py_CLEAR(o);
    Py_DECREF(lse);
    return o;
}

/* Allocates the gradients and the workspace, and launches. Returns 1 if done, with new references in `gradients`; 0 if
 * the operator must report the error; -1 with an exception. */
static int run_backward(attention_tensors *tensors, const attention_options *options,
                        PyObject *gradients[3]) {
    dw_attention call;
    PyObject *workspace = NULL;
    tensor_view memory = {0};
    int done = -1;
    gradients[0] = attention_new_like(&tensors->q, &tensors->dq);
    gradients[1] = gradients[0] ? attention_new_like(&tensors->k, &tensors->dk) : NULL;
    gradients[2] = gradients[1] ? attention_new_like(&tensors->v, &tensors->dv) : NULL;
    if (gradients[2] == NULL) goto cleanup;
    done = 0;
    if (attention_describe(tensors, options, true, &call) != DW_OK) goto cleanup;
    if (dw_attention_backward_workspace(&call, &call.workspace_bytes) != DW_OK) goto cleanup;
    done = -1;
    workspace = attention_new_bytes((int64_t)call.workspace_bytes, tensors->q.device, &memory);
    if (workspace == NULL) goto cleanup;
    call.workspace = memory.data;
    if (exchange->stream(DLPACK_CUDA, tensors->q.device, &call.stream) != 0) goto cleanup;
    if (dw_attention_backward(&call) == DW_OK)
        done = 1;
    else
        PyErr_SetString(PyExc_RuntimeError, dw_last_error());
cleanup:
    Py_XDECREF(workspace); /* PyTorch reuses it only for later work on this stream */
    for (int i = 0; i < 3 && done != 1; i++) Py_CLEAR(gradients[i]);
    return done;
}

/* attention_gradients(d_o, saved, options) -> (dq, dk, dv), from what attention_node saved. Returns None if the
 * operator must report the error. */
static PyObject *attention_gradients(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 3 || !PyTuple_Check(args[1]) || PyTuple_Size(args[1]) != 5 ||
        !PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "attention_gradients takes d_o, five tensors and options");
        return NULL;
    }
    PyObject *inputs[3] = {NULL}, *o = PyTuple_GetItem(args[1], 3),
             *lse = PyTuple_GetItem(args[1], 4);
    bool plain = usual.apply != NULL && is_plain(args[0]) && is_plain(o) && is_plain(lse);
    for (int i = 0; i < 3; i++) {
        inputs[i] = PyTuple_GetItem(args[1], i);
        plain = plain && is_plain(inputs[i]);
    }
    if (!plain) Py_RETURN_NONE;
    int watched = is_watched(), second = watched == 0 ? says(usual.grad_enabled) : 0;
    int deterministic = watched == 0 && second == 0 ? says(usual.deterministic) : 0;
    if (watched < 0 || second < 0 || deterministic < 0) return NULL;
    if (watched || second) Py_RETURN_NONE;
    double scale, softcap, dropout;
    long long left, right;
    int bottom_right;
    if (!PyArg_ParseTuple(args[2], "ddLLpd", &scale, &softcap, &left, &right, &bottom_right,
                          &dropout))
        return NULL;
    attention_options options = {.scale = scale,
                                 .softcap = softcap,
                                 .window_left = left,
                                 .window_right = right,
                                 .bottom_right = bottom_right,
                                 .deterministic = deterministic == 1};
    attention_tensors tensors = {.q = {0}};
    if (!look_at_inputs(inputs, &tensors) || !look_at(o, &tensors.o) ||
        !look_at(lse, &tensors.lse) || !look_at(args[0], &tensors.d_o) ||
        !attention_lies_well(&tensors.d_o) || tensors.d_o.device != tensors.q.device)
        Py_RETURN_NONE;
    PyObject *gradients[3];
    int done = run_backward(&tensors, &options, gradients);
    if (done < 0) return NULL;
    if (done == 0) Py_RETURN_NONE;
    PyObject *made = PyTuple_Pack(3, gradients[0], gradients[1], gradients[2]);
    for (int i = 0; i < 3; i++) Py_DECREF(gradients[i]);
    return made;
}

static PyObject *jit_search(PyObject *self, PyObject *folder) {
    (void)self;
    PyObject *bytes = PyUnicode_EncodeFSDefault(folder);
    const char *path = bytes ? PyBytes_AsString(bytes) : NULL;
    dw_status status = path ? dw_jit_search(path) : DW_OK;
    Py_XDECREF(bytes);
    if (!path) return NULL;
    if (status != DW_OK) return PyErr_SetString(PyExc_ValueError, dw_last_error()), NULL;
    Py_RETURN_NONE;
}

/* Returns "NVRTC 13.0 (path)", or None. */
static PyObject *jit_compiler(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    const char *description = NULL;
    if (dw_jit_compiler(&description) != DW_OK) Py_RETURN_NONE;
    return PyUnicode_DecodeFSDefault(description);
}

PyMethodDef attention_functions[] = {
    {"jit_search", jit_search, METH_O, "adds a folder to the search for NVRTC"},
    {"jit_compiler", jit_compiler, METH_NOARGS, "NVRTC's version and path, or None"},
    {"attention_exchange", attention_exchange, METH_O, "prepares attention_call"},
    {"attention_prepare", attention_prepare, METH_VARARGS, "prepares attention_direct"},
    {"attention_direct", (PyCFunction)(void (*)(void))attention_direct, METH_FASTCALL,
     "attention, differentiable, without the dispatcher; or None"},
    {"attention_node", (PyCFunction)(void (*)(void))attention_node, METH_FASTCALL,
     "the forward of the autograd function that attention_direct applies"},
    {"attention_gradients", (PyCFunction)(void (*)(void))attention_gradients, METH_FASTCALL,
     "the gradients of a call that attention_node ran; or None"},
    {"attention_call", (PyCFunction)(void (*)(void))attention_call, METH_FASTCALL,
     "the operator attention_forward without the dispatcher, or None"},
    {0}};
