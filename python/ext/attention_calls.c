/* Attention called from Python directly. What libdeepwell takes is asked here too. */
#include "attention.h"

/* attention_supported(dtype, batch, heads_q, heads_kv, rows_q, rows_k, head_dim, packed, softcap, window_left,
 * window_right, bottom_right, dropout, backward, deterministic) -> "" or the reason why not */
static PyObject *attention_supported(PyObject *self, PyObject *args) {
    (void)self;
    const char *dtype = NULL;
    int batch, heads_q, heads_kv, rows_q, rows_k, dim, packed, left, right, bottom_right, backward,
        deterministic;
    double softcap, dropout;
    if (!PyArg_ParseTuple(args, "siiiiiipdiipdpp:attention_supported", &dtype, &batch, &heads_q,
                          &heads_kv, &rows_q, &rows_k, &dim, &packed, &softcap, &left, &right,
                          &bottom_right, &dropout, &backward, &deterministic))
        return NULL;
    dw_attention call = {.size = sizeof call, .dtype = dtype[0] == 'b' ? DW_BF16 : DW_F16};
    call.batch = batch, call.heads_q = heads_q, call.heads_kv = heads_kv;
    call.rows_q = rows_q, call.rows_k = rows_k, call.head_dim = dim;
    call.scale = 1.0f, call.softcap = (float)softcap, call.dropout = (float)dropout;
    call.window_left = left, call.window_right = right, call.bottom_right = bottom_right;
    call.deterministic = deterministic;
    /* No memory is read: any address that is not NULL and lies well stands for a tensor. */
    void *address = (void *)(uintptr_t)256;
    dw_attention_tensor query = {address, (int64_t)heads_q * rows_q * dim, (int64_t)rows_q * dim,
                                 dim};
    dw_attention_tensor key = {address, (int64_t)heads_kv * rows_k * dim, (int64_t)rows_k * dim,
                               dim};
    if (packed) {
        call.offsets_q = call.offsets_k = address;
        call.total_q = (int64_t)batch * rows_q, call.total_k = (int64_t)batch * rows_k;
        query.head = key.head = dim;
        query.row = (int64_t)heads_q * dim, key.row = (int64_t)heads_kv * dim;
    }
    call.q = call.o = call.d_o = call.dq = query;
    call.k = call.v = call.dk = call.dv = key;
    call.lse = address;
    if (dropout > 0) call.seed_memory = address;
    dw_status status = dw_attention_supported(&call, backward);
    return PyUnicode_FromString(status == DW_OK ? "" : dw_last_error());
}

/* ---- a forward without PyTorch's dispatcher ------------------------------------------------------------------- */

/* DLPack 1.3, dlpack.h: the members that are used, in their places. */
typedef struct exchanged_tensor {
    void *data;
    int32_t device_type, device;
    int32_t rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *sizes, *strides; /* the tensor's own */
    uint64_t byte_offset;
} exchanged_tensor;

typedef struct exchange_api {
    uint32_t major, minor;
    struct exchange_api *previous;
    int (*allocate)(void);    /* not used: such memory is not known to PyTorch's record_stream */
    int (*from_object)(void); /* not used: owns */
    int (*to_object)(void);   /* not used */
    int (*view)(void *object, exchanged_tensor *out);
    int (*stream)(int32_t device_type, int32_t device, void **stream);
} exchange_api;

enum { DLPACK_INT = 0, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4, DLPACK_CUDA = 2 };

static const exchange_api *exchange; /* NULL: this PyTorch has none */

/* attention_exchange(capsule) -> whether attention_call works */
static PyObject *attention_exchange(PyObject *self, PyObject *capsule) {
    (void)self;
    const exchange_api *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (api == NULL) return NULL;
    if (api->major == 1 && api->view != NULL && api->stream != NULL) exchange = api;
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

/* False, with no exception set: not a tensor on a GPU. */
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

/* q, k and v of a call that needs no copies, on PyTorch's current GPU. */
static bool look_at_inputs(PyObject *const *args, attention_tensors *tensors) {
    return exchange != NULL && look_at(args[0], &tensors->q) && look_at(args[1], &tensors->k) &&
           look_at(args[2], &tensors->v) && attention_device_is_current(tensors->q.device) &&
           attention_lies_well(&tensors->q) && attention_lies_well(&tensors->k) &&
           attention_lies_well(&tensors->v) && (tensors->q.rank == 3 || tensors->q.rank == 4);
}

/* attention_ready(q, k, v, softcap, window_left, window_right, bottom_right, deterministic): whether attention_call and
 * the operator attention_backward take these as they lie. Without dropout and packing. */
static PyObject *attention_ready(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError, "attention_ready takes 8 arguments");
        return NULL;
    }
    attention_tensors tensors = {.q = {0}};
    if (!look_at_inputs(args, &tensors)) Py_RETURN_FALSE;
    attention_options options = {.scale = 1.0,
                                 .softcap = PyFloat_AsDouble(args[3]),
                                 .window_left = PyLong_AsLongLong(args[4]),
                                 .window_right = PyLong_AsLongLong(args[5]),
                                 .bottom_right = PyObject_IsTrue(args[6]) == 1,
                                 .deterministic = PyObject_IsTrue(args[7]) == 1};
    if (PyErr_Occurred()) return NULL;
    /* No memory is read: results lie as the inputs do. */
    tensors.o = tensors.d_o = tensors.dq = tensors.q;
    tensors.dk = tensors.k, tensors.dv = tensors.v;
    int64_t elements = tensors.q.sizes[0] * tensors.q.sizes[1] * tensors.q.sizes[2], one = 1;
    tensors.lse = (tensor_view){tensors.q.data, 1, &elements, &one, DW_F32, tensors.q.device};
    dw_attention call;
    bool ready = tensors.q.rank == 4 && elements > 0 &&
                 attention_describe(&tensors, &options, true, &call) == DW_OK && call.rows_k > 0 &&
                 dw_attention_supported(&call, true) == DW_OK;
    return PyBool_FromLong(ready);
}

/* attention_call(q, k, v, scale, softcap, window_left, window_right, bottom_right, dropout, seed, offsets_q, offsets_k,
 * longest_q, longest_k, want_lse) -> (o, lse), as the operator attention_forward, or o alone; None where the operator
 * must say what to do: another device than the current one, tensors that would have to be copied, nothing on a GPU, a
 * call that libdeepwell does not take. */
static PyObject *attention_call(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 15) {
        PyErr_SetString(PyExc_TypeError, "attention_call takes 15 arguments");
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
    bool want_lse = PyObject_IsTrue(args[14]) == 1;
    if (PyErr_Occurred()) return NULL;
    PyObject *o = attention_new_like(&tensors.q, &tensors.o), *lse = NULL, *made = NULL;
    if (o == NULL || (lse = attention_new_lse(&tensors.q, want_lse, &tensors.lse)) == NULL)
        goto done;
    dw_attention call;
    if (attention_describe(&tensors, &options, false, &call) != DW_OK) {
        made = Py_NewRef(Py_None);
        goto done;
    }
    if (!want_lse) call.lse = NULL;
    if (exchange->stream(DLPACK_CUDA, tensors.q.device, &call.stream) != 0) goto done;
    dw_status status = dw_attention_forward(&call);
    if (status == DW_UNSUPPORTED) {
        made = Py_NewRef(Py_None);
    } else if (status != DW_OK) {
        PyErr_SetString(PyExc_RuntimeError, dw_last_error());
    } else {
        made = want_lse ? PyTuple_Pack(2, o, lse) : Py_NewRef(o);
    }
done:
    Py_XDECREF(o);
    Py_XDECREF(lse);
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

/* "NVRTC 13.0 (path)", or None. */
static PyObject *jit_compiler(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    const char *description = NULL;
    if (dw_jit_compiler(&description) != DW_OK) Py_RETURN_NONE;
    return PyUnicode_DecodeFSDefault(description);
}

PyMethodDef attention_functions[] = {
    {"jit_search", jit_search, METH_O, "names a folder in which NVRTC may lie"},
    {"jit_compiler", jit_compiler, METH_NOARGS, "NVRTC's version and path, or None"},
    {"attention_supported", attention_supported, METH_VARARGS,
     "\"\" or why libdeepwell does not take such a call"},
    {"attention_exchange", attention_exchange, METH_O, "prepares attention_call"},
    {"attention_ready", (PyCFunction)(void (*)(void))attention_ready, METH_FASTCALL,
     "whether attention_call and its backward take such tensors"},
    {"attention_call", (PyCFunction)(void (*)(void))attention_call, METH_FASTCALL,
     "the operator attention_forward without the dispatcher, or None"},
    {0}};
