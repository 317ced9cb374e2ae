/* _deepwell: the binding of libdeepwell for Python. It only translates: operands are passed as tensors or as addresses,
 * and failures raise exceptions. It uses the limited API, so that one binary serves CPython 3.10 and later. The GIL is
 * released while an engine runs. The caller keeps the tensors behind the addresses alive. */
#include "attention_module.h"
#include "ext.h"
#include "tensors.h"
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

typedef struct module_state {
    PyObject *instruction_type;
    PyObject *error; /* deepwell._deepwell.Error */
    /* deepwell._deepwell.IndexError, derived from Error and Python's IndexError. */
    PyObject *index_error;
    PyObject *graph_type, *policy_type, *engine_type, *plan_type, *arena_type;
} module_state;

static module_state state; /* single-phase module: one per process */

static PyObject *fail(dw_status status) {
    PyObject *kind = status == DW_INDEX ? state.index_error : state.error;
    PyObject *error = PyObject_CallFunction(kind, "s", dw_last_error());
    if (error == NULL) return NULL;
    PyObject *name = PyUnicode_FromString(dw_status_name(status));
    if (name != NULL && PyObject_SetAttrString(error, "status", name) == 0)
        PyErr_SetObject(kind, error);
    Py_XDECREF(name);
    Py_DECREF(error);
    return NULL;
}

PyObject *extension_fail(dw_status status) { return fail(status); }

static void *object_slot(PyObject *self) { return (char *)self + sizeof(PyObject); }

/* ---- arenas ---------------------------------------------------------------------------------------- */

typedef struct arena_slot {
    const dw_device *device;
    void *base;
    size_t bytes;
} arena_slot;

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"bytes", "device", NULL};
    Py_ssize_t bytes = 0;
    const char *device = "cpu";
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|s:Arena", names, &bytes, &device))
        return NULL;
    if (bytes < 0) {
        PyErr_Format(PyExc_ValueError, "Arena: %zd bytes; a size cannot be negative", bytes);
        return NULL;
    }
    arena_slot made = {.bytes = (size_t)bytes};
    dw_status status = dw_device_find(device, &made.device);
    if (status == DW_OK) status = dw_device_allocate(made.device, made.bytes, &made.base);
    if (status == DW_OUT_OF_MEMORY) {
        PyErr_Format(
            PyExc_MemoryError,
            "Deepwell needs an arena of %zd bytes and the system has no memory for it: use "
            "a smaller batch or sequence",
            bytes);
        return NULL;
    }
    if (status != DW_OK) return fail(status);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = allocate(type, 0);
    if (self == NULL) {
        dw_device_release(made.device, made.base, made.bytes);
        return NULL;
    }
    *(arena_slot *)object_slot(self) = made;
    return self;
}

static void release_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void arena_dealloc(PyObject *self) {
    arena_slot *slot = object_slot(self);
    dw_device_release(slot->device, slot->base, slot->bytes);
    release_object(self);
}

static PyObject *arena_address(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromVoidPtr(((arena_slot *)object_slot(self))->base);
}
static PyObject *arena_bytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(((arena_slot *)object_slot(self))->bytes);
}
/* copy_from(other, bytes) copies the first `bytes` of another arena. */
static PyObject *arena_copy_from(PyObject *self, PyObject *args) {
    PyObject *other = NULL;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "O!n:copy_from", state.arena_type, &other, &bytes)) return NULL;
    arena_slot *to = object_slot(self), *from = object_slot(other);
    if (bytes < 0 || (size_t)bytes > to->bytes || (size_t)bytes > from->bytes) {
        PyErr_Format(PyExc_ValueError, "copy_from: %zd bytes between arenas of %zu and %zu", bytes,
                     from->bytes, to->bytes);
        return NULL;
    }
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_copy(to->device, to->base, from->base, (size_t)bytes);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

/* Reads the arguments (address, bytes) of a copy between the first bytes of an arena and the host. */
static bool read_copy(PyObject *args, const char *format, const arena_slot *slot, void **host,
                      size_t *bytes) {
    PyObject *address = NULL;
    Py_ssize_t count = 0;
    if (!PyArg_ParseTuple(args, format, &address, &count)) return false;
    *host = PyLong_AsVoidPtr(address);
    *bytes = (size_t)count;
    if (PyErr_Occurred()) return false;
    if (count >= 0 && (size_t)count <= slot->bytes) return true;
    PyErr_Format(PyExc_ValueError, "a copy of %zd bytes to or from an arena of %zu", count,
                 slot->bytes);
    return false;
}

static PyObject *arena_copy_in(PyObject *self, PyObject *args) {
    const arena_slot *slot = object_slot(self);
    void *host;
    size_t bytes;
    dw_status status;
    if (!read_copy(args, "On:copy_in", slot, &host, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_copy_in(slot->device, slot->base, host, bytes);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}
static PyObject *arena_copy_out(PyObject *self, PyObject *args) {
    const arena_slot *slot = object_slot(self);
    void *host;
    size_t bytes;
    dw_status status;
    if (!read_copy(args, "On:copy_out", slot, &host, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_device_copy_out(slot->device, host, slot->base, bytes);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

static PyGetSetDef arena_getset[] = {
    {"address", arena_address, NULL, "address of the first byte", NULL},
    {"bytes", arena_bytes, NULL, "size", NULL},
    {0}};
static PyMethodDef arena_methods[] = {
    {"copy_from", arena_copy_from, METH_VARARGS, "copy_from(other, bytes): within the device"},
    {"copy_in", arena_copy_in, METH_VARARGS, "copy_in(address, bytes): from the host's memory"},
    {"copy_out", arena_copy_out, METH_VARARGS, "copy_out(address, bytes): to the host's memory"},
    {0}};
static PyType_Slot arena_slots[] = {{Py_tp_new, arena_new},
                                    {Py_tp_dealloc, arena_dealloc},
                                    {Py_tp_getset, arena_getset},
                                    {Py_tp_methods, arena_methods},
                                    {Py_tp_doc, "Arena(bytes, device='cpu'): memory of a device"},
                                    {0, NULL}};
static PyType_Spec arena_spec = {"deepwell._deepwell.Arena", sizeof(PyObject) + sizeof(arena_slot),
                                 0, Py_TPFLAGS_DEFAULT, arena_slots};

/* ---- operands and sequences of integers ----------------------------------------------------------- */

/* Reads the address of an operand: a tensor, an integer, or None (NULL). */
static bool read_address(PyObject *operand, void **address) {
    *address = NULL;
    if (operand == Py_None) return true;
    if (PyLong_Check(operand)) {
        *address = PyLong_AsVoidPtr(operand);
    } else {
        return tensor_address(operand, address);
    }
    return !PyErr_Occurred();
}

/* Reads a tuple or list of `expected` operands into fresh bindings (PyMem_Free). */
static dw_binding *read_bindings(PyObject *sequence, Py_ssize_t expected, const char *what) {
    Py_ssize_t count = PySequence_Size(sequence);
    if (count < 0) return NULL;
    if (expected >= 0 && count != expected) {
        PyErr_Format(PyExc_ValueError, "%s: %zd operands given, %zd expected", what, count,
                     expected);
        return NULL;
    }
    dw_binding *bindings = PyMem_Calloc((size_t)(count > 0 ? count : 1), sizeof *bindings);
    if (bindings == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        if (item == NULL) goto failed;
        bool read = read_address(item, &bindings[i].data);
        Py_DECREF(item);
        if (!read) goto failed;
    }
    return bindings;
failed:
    PyMem_Free(bindings);
    return NULL;
}

/* Reads integers into fresh memory (PyMem_Free). */
static int64_t *read_integers(PyObject *sequence, Py_ssize_t *count) {
    *count = PySequence_Size(sequence);
    if (*count < 0) return NULL;
    int64_t *integers = PyMem_Calloc((size_t)(*count > 0 ? *count : 1), sizeof *integers);
    if (integers == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        if (item != NULL) {
            integers[i] = PyLong_AsLongLong(item);
            Py_DECREF(item);
        }
        if (PyErr_Occurred()) {
            PyMem_Free(integers);
            return NULL;
        }
    }
    return integers;
}

/* Returns a text of the library as str and frees it. */
static PyObject *take_text(dw_status status, char *text) {
    if (status != DW_OK) return fail(status);
    PyObject *result = PyUnicode_FromString(text);
    dw_text_free(text);
    return result;
}

/* ---- Plan ------------------------------------------------------------------------------------------ */

typedef struct plan_slot {
    dw_plan *plan;
    PyObject *engine; /* keeps the engine, and so the plan, alive */
    Py_ssize_t leaf_count, output_count, grad_output_count, wrt_count;
    PyObject *watcher; /* called around the instructions of timed runs; NULL: none */
} plan_slot;

static void plan_dealloc(PyObject *self) {
    plan_slot *slot = object_slot(self);
    if (slot->watcher != NULL) dw_plan_watch(slot->plan, NULL, NULL);
    Py_XDECREF(slot->watcher);
    if (slot->plan != NULL) dw_plan_release(slot->plan);
    Py_XDECREF(slot->engine);
    release_object(self);
}

static PyObject *plan_arena_bytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(dw_plan_arena_bytes(((plan_slot *)object_slot(self))->plan));
}
static PyObject *plan_saved_bytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(dw_plan_saved_bytes(((plan_slot *)object_slot(self))->plan));
}

static PyObject *plan_kept_bytes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromSize_t(dw_plan_kept_bytes(((plan_slot *)object_slot(self))->plan));
}
static PyObject *plan_kept_layout(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(dw_plan_kept_layout(((plan_slot *)object_slot(self))->plan));
}

/* ((bytes, saved bytes, last part of backward that uses it, first part or 0 if forward uses it), ...), without that of
 * kept values, which is the last one of a run */
static PyObject *plan_segments(PyObject *self, void *closure) {
    (void)closure;
    const dw_plan *plan = ((plan_slot *)object_slot(self))->plan;
    const uint32_t count = dw_plan_segment_count(plan) - (dw_plan_kept_bytes(plan) > 0);
    PyObject *segments = PyTuple_New((Py_ssize_t)count);
    for (uint32_t s = 0; segments != NULL && s < count; s++) {
        const dw_segment segment = dw_plan_segment(plan, s);
        PyObject *entry =
            Py_BuildValue("(nnII)", (Py_ssize_t)segment.bytes, (Py_ssize_t)segment.saved_bytes,
                          segment.part, segment.first_part);
        if (entry == NULL)
            Py_CLEAR(segments);
        else
            PyTuple_SetItem(segments, (Py_ssize_t)s, entry);
    }
    return segments;
}

/* Reads the addresses of a plan's segments. Returns false with an exception. */
static bool read_segments(const dw_plan *plan, PyObject *sequence,
                          void *segments[DW_MOST_SEGMENTS]) {
    const uint32_t count = dw_plan_segment_count(plan);
    dw_binding *read = read_bindings(sequence, (Py_ssize_t)count, "segments of the arena");
    for (uint32_t s = 0; read != NULL && s < count; s++) segments[s] = read[s].data;
    PyMem_Free(read);
    return read != NULL;
}

/* ((dtype name, (dim, ...)), ...) */
static PyObject *plan_outputs(PyObject *self, void *closure) {
    (void)closure;
    dw_plan *plan = ((plan_slot *)object_slot(self))->plan;
    uint32_t count = dw_plan_output_count(plan);
    PyObject *outputs = PyTuple_New((Py_ssize_t)count);
    for (uint32_t i = 0; outputs != NULL && i < count; i++) {
        int64_t shape[DW_MAX_RANK];
        int rank = dw_plan_output_shape(plan, i, shape);
        PyObject *dims = PyTuple_New(rank);
        for (int axis = 0; dims != NULL && axis < rank; axis++) {
            PyObject *dim = PyLong_FromLongLong(shape[axis]);
            if (dim == NULL)
                Py_CLEAR(dims);
            else
                PyTuple_SetItem(dims, axis, dim);
        }
        PyObject *entry =
            dims == NULL
                ? NULL
                : Py_BuildValue("(sN)", dw_dtype_name(dw_plan_output_dtype(plan, i)), dims);
        if (entry == NULL)
            Py_CLEAR(outputs);
        else
            PyTuple_SetItem(outputs, (Py_ssize_t)i, entry);
    }
    return outputs;
}

static PyObject *plan_describe(PyObject *self, PyObject *unused) {
    (void)unused;
    char *text = NULL;
    dw_status status = dw_plan_describe(((plan_slot *)object_slot(self))->plan, &text);
    return take_text(status, text);
}

static PyObject *plan_operations(PyObject *self, PyObject *unused) {
    (void)unused;
    char *text = NULL;
    dw_status status = dw_plan_operations(((plan_slot *)object_slot(self))->plan, &text);
    return take_text(status, text);
}

static PyObject *plan_profile(PyObject *self, PyObject *on) {
    const int wanted = PyObject_IsTrue(on);
    if (wanted < 0) return NULL;
    dw_plan_profile(((plan_slot *)object_slot(self))->plan, wanted);
    Py_RETURN_NONE;
}

/* The plan's context is the slot, which lives as long as its runs. Another thread may replace the watcher meanwhile,
 * and so may the watcher itself, so that the call holds a reference. A watcher cannot make a run fail: its exceptions
 * are reported as those of a destructor. */
static void call_watcher(void *of, uint32_t instruction, int begins) {
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *watcher = ((plan_slot *)of)->watcher;
    if (watcher != NULL) {
        Py_INCREF(watcher);
        PyObject *result =
            PyObject_CallFunction(watcher, "IO", instruction, begins ? Py_True : Py_False);
        if (result == NULL) PyErr_WriteUnraisable(watcher);
        Py_XDECREF(result);
        Py_DECREF(watcher);
    }
    PyGILState_Release(gil);
}

static PyObject *plan_watch(PyObject *self, PyObject *watcher) {
    plan_slot *slot = object_slot(self);
    PyObject *earlier = slot->watcher;
    slot->watcher = watcher == Py_None ? NULL : watcher;
    Py_XINCREF(slot->watcher);
    dw_plan_watch(slot->plan, slot->watcher != NULL ? call_watcher : NULL, slot);
    Py_XDECREF(earlier);
    Py_RETURN_NONE;
}

/* Returns [(runs, seconds of all runs, start of the last one), ...] by instruction. */
static PyObject *plan_times(PyObject *self, PyObject *unused) {
    (void)unused;
    const dw_plan *plan = ((plan_slot *)object_slot(self))->plan;
    const uint32_t count = dw_plan_times(plan, 0, NULL);
    dw_instruction_time *times = PyMem_Calloc((size_t)count + 1, sizeof *times);
    if (times == NULL) return PyErr_NoMemory();
    dw_plan_times(plan, count, times);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *entry = Py_BuildValue("(Kdd)", (unsigned long long)times[i].runs,
                                        times[i].seconds, times[i].start);
        if (entry == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, entry);
    }
    PyMem_Free(times);
    return list;
}

/* ---- single instructions ---------------------------------------------------------------------------- */

typedef struct instruction_slot {
    dw_instruction *instruction;
    PyObject *plan; /* keeps it alive */
} instruction_slot;

static PyObject *plan_instruction(PyObject *self, PyObject *args) {
    unsigned int index = 0;
    if (!PyArg_ParseTuple(args, "I:instruction", &index)) return NULL;
    dw_instruction *made = NULL;
    dw_plan *plan = ((plan_slot *)object_slot(self))->plan;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_instruction_create(plan, index, &made);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return fail(status);
    PyTypeObject *type = (PyTypeObject *)state.instruction_type;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = allocate(type, 0);
    if (object == NULL) {
        dw_instruction_destroy(made);
        return NULL;
    }
    Py_INCREF(self);
    *(instruction_slot *)object_slot(object) = (instruction_slot){made, self};
    return object;
}

static void instruction_dealloc(PyObject *self) {
    instruction_slot *slot = object_slot(self);
    dw_instruction_destroy(slot->instruction);
    Py_XDECREF(slot->plan);
    release_object(self);
}

/* run(stream=0) */
static PyObject *instruction_run(PyObject *self, PyObject *args) {
    PyObject *stream_object = NULL;
    if (!PyArg_ParseTuple(args, "|O:run", &stream_object)) return NULL;
    void *stream = stream_object == NULL ? NULL : PyLong_AsVoidPtr(stream_object);
    if (PyErr_Occurred()) return NULL;
    dw_instruction *instruction = ((instruction_slot *)object_slot(self))->instruction;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_instruction_run(instruction, stream);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

static PyMethodDef instruction_methods[] = {
    {"run", instruction_run, METH_VARARGS, "run(stream=0); on a GPU it waits for nothing"}, {0}};
static PyType_Slot instruction_slots[] = {
    {Py_tp_dealloc, instruction_dealloc},
    {Py_tp_methods, instruction_methods},
    {Py_tp_doc, "An instruction of a plan by itself, on operands of its own"},
    {0, NULL}};
static PyType_Spec instruction_spec = {
    "deepwell._deepwell.Instruction", sizeof(PyObject) + sizeof(instruction_slot), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, instruction_slots};

/* ---- runs of a plan --------------------------------------------------------------------------------- */

/* forward(segments, leaves, outputs, stream=0), with tensors or addresses. */
static PyObject *plan_forward(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    plan_slot *slot = object_slot(self);
    if (count != 3 && count != 4) {
        PyErr_SetString(PyExc_TypeError,
                        "forward(segments, leaves, outputs, stream=0) takes 3 or 4 arguments");
        return NULL;
    }
    void *segments[DW_MOST_SEGMENTS];
    void *stream = count == 4 ? PyLong_AsVoidPtr(args[3]) : NULL;
    if (PyErr_Occurred() || !read_segments(slot->plan, args[0], segments)) return NULL;
    dw_binding *leaves = read_bindings(args[1], slot->leaf_count, "leaves");
    dw_binding *outputs =
        leaves == NULL ? NULL : read_bindings(args[2], slot->output_count, "outputs");
    dw_status status = DW_OK;
    if (outputs != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        status = dw_plan_forward_segments(slot->plan, segments, leaves, outputs, stream);
        Py_END_ALLOW_THREADS;
    }
    bool read = outputs != NULL;
    PyMem_Free(leaves);
    PyMem_Free(outputs);
    if (!read) return NULL;
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

/* keep(segments, leaves, stream=0) computes the values that depend on parameters alone. */
static PyObject *plan_keep(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    plan_slot *slot = object_slot(self);
    if (count != 2 && count != 3) {
        PyErr_SetString(PyExc_TypeError, "keep(segments, leaves, stream=0) takes 2 or 3 arguments");
        return NULL;
    }
    void *segments[DW_MOST_SEGMENTS];
    void *stream = count == 3 ? PyLong_AsVoidPtr(args[2]) : NULL;
    if (PyErr_Occurred() || !read_segments(slot->plan, args[0], segments)) return NULL;
    dw_binding *leaves = read_bindings(args[1], slot->leaf_count, "leaves");
    if (leaves == NULL) return NULL;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_plan_keep_segments(slot->plan, segments, leaves, stream);
    Py_END_ALLOW_THREADS;
    PyMem_Free(leaves);
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

/* backward(part, segments, leaves, outputs, output_grads, grads, stream=0), with tensors or addresses, None if absent.
 * A negative part runs all parts. */
static PyObject *plan_backward(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    plan_slot *slot = object_slot(self);
    if (count != 6 && count != 7) {
        PyErr_SetString(PyExc_TypeError,
                        "backward(part, segments, leaves, outputs, output_grads, grads, stream=0) "
                        "takes 6 or 7 arguments");
        return NULL;
    }
    long part = PyLong_AsLong(args[0]);
    void *segments[DW_MOST_SEGMENTS];
    void *stream = count == 7 && !PyErr_Occurred() ? PyLong_AsVoidPtr(args[6]) : NULL;
    if (PyErr_Occurred() || !read_segments(slot->plan, args[1], segments)) return NULL;
    const char *names[4] = {"leaves", "outputs", "output_grads", "grads"};
    Py_ssize_t expected[4] = {slot->leaf_count, slot->output_count, slot->grad_output_count,
                              slot->wrt_count};
    dw_binding *bound[4] = {NULL, NULL, NULL, NULL};
    bool read = true;
    for (int i = 0; i < 4 && read; i++) {
        bound[i] = read_bindings(args[i + 2], expected[i], names[i]);
        read = bound[i] != NULL;
    }
    dw_status status = DW_OK;
    if (read) {
        Py_BEGIN_ALLOW_THREADS;
        uint32_t from = part < 0 ? 0 : (uint32_t)part;
        uint32_t last = part < 0 ? dw_plan_part_count(slot->plan) - 1 : from;
        for (uint32_t p = from; status == DW_OK && p <= last; p++)
            status = dw_plan_backward_part_segments(slot->plan, p, segments, bound[0], bound[1],
                                                    bound[2], bound[3], stream);
        Py_END_ALLOW_THREADS;
    }
    for (int i = 0; i < 4; i++) PyMem_Free(bound[i]);
    if (!read) return NULL;
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

/* synchronize(stream) waits for a GPU's stream and raises errors that only data can show. */
static PyObject *plan_synchronize(PyObject *self, PyObject *stream_object) {
    plan_slot *slot = object_slot(self);
    void *stream = PyLong_AsVoidPtr(stream_object);
    dw_status status;
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_plan_synchronize(slot->plan, stream);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

static PyObject *moment_dict(const dw_step_moment *m) {
    return Py_BuildValue(
        "{s:s,s:I,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "phase",
        dw_step_phase_name(m->phase), "part", m->part, "parameters", (Py_ssize_t)m->parameters,
        "constants", (Py_ssize_t)m->constants, "inputs", (Py_ssize_t)m->inputs, "optimizer",
        (Py_ssize_t)m->optimizer, "arena", (Py_ssize_t)m->arena, "outputs", (Py_ssize_t)m->outputs,
        "output_gradients", (Py_ssize_t)m->output_gradients, "gradients", (Py_ssize_t)m->gradients,
        "temporaries", (Py_ssize_t)m->temporaries, "library", (Py_ssize_t)m->library, "resident",
        (Py_ssize_t)m->resident, "total", (Py_ssize_t)m->total);
}

/* Reads the options of a step by their names. Returns false with an exception. */
static bool read_step(const char *optimizer, const char *kept, Py_ssize_t kept_count,
                      Py_ssize_t outputs, Py_ssize_t resident, dw_step_options *options) {
    int which = 0;
    while (which < DW_STEP_OPTIMIZERS &&
           strcmp(dw_step_optimizer_name((dw_step_optimizer)which), optimizer) != 0)
        which++;
    if (which == DW_STEP_OPTIMIZERS || kept_count != outputs || resident < 0) {
        PyErr_Format(PyExc_ValueError,
                     "a step's optimizer is '%s', with %zd flags for %zd outputs and %zd bytes "
                     "resident",
                     optimizer, kept_count, outputs, resident);
        return false;
    }
    options->optimizer = (dw_step_optimizer)which;
    options->outputs_kept = (const uint8_t *)kept;
    options->resident = (size_t)resident;
    return true;
}

/* step_memory(optimizer, add_gradients, outputs_kept, resident) -> ([moment, ...], index of the largest). A moment is
 * a dict with the members of dw_step_moment. */
static PyObject *plan_step_memory(PyObject *self, PyObject *args) {
    plan_slot *slot = object_slot(self);
    const char *optimizer = NULL, *kept = NULL;
    Py_ssize_t kept_count = 0, resident = 0;
    dw_step_options options = DW_STEP_OPTIONS_DEFAULT;
    if (!PyArg_ParseTuple(args, "spy#n:step_memory", &optimizer, &options.add_gradients, &kept,
                          &kept_count, &resident) ||
        !read_step(optimizer, kept, kept_count, slot->output_count, resident, &options))
        return NULL;
    uint32_t count = dw_plan_step_moments(slot->plan), peak = 0;
    dw_step_moment *moments = PyMem_Calloc(count, sizeof *moments);
    if (moments == NULL) return PyErr_NoMemory();
    dw_status status = dw_plan_step_memory(slot->plan, &options, moments, &peak);
    PyObject *list = status == DW_OK ? PyList_New((Py_ssize_t)count) : NULL;
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *moment = moment_dict(&moments[i]);
        if (moment == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, moment);
    }
    PyMem_Free(moments);
    if (status != DW_OK) return fail(status);
    return list == NULL ? NULL : Py_BuildValue("(NI)", list, peak);
}

/* Returns (bytes live in the arena at each instruction, index of backward's first instruction). */
static PyObject *plan_arena_alive(PyObject *self, PyObject *unused) {
    (void)unused;
    const dw_plan *plan = ((plan_slot *)object_slot(self))->plan;
    uint32_t count = dw_plan_arena_alive(plan, 0, NULL);
    size_t *bytes = PyMem_Calloc((size_t)count + 1, sizeof *bytes);
    if (bytes == NULL) return PyErr_NoMemory();
    dw_plan_arena_alive(plan, count, bytes);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromSize_t(bytes[i]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, number);
    }
    PyMem_Free(bytes);
    return list == NULL ? NULL : Py_BuildValue("(NI)", list, dw_plan_first_backward(plan));
}

static PyObject *plan_part_count(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(dw_plan_part_count(((plan_slot *)object_slot(self))->plan));
}

/* Returns ((first part, last part), ...) for each wrt. */
static PyObject *plan_grad_parts(PyObject *self, void *closure) {
    (void)closure;
    plan_slot *slot = object_slot(self);
    PyObject *parts = PyTuple_New(slot->wrt_count);
    for (Py_ssize_t i = 0; parts != NULL && i < slot->wrt_count; i++) {
        uint32_t first, last;
        dw_plan_grad_parts(slot->plan, (uint32_t)i, &first, &last);
        PyObject *pair = Py_BuildValue("(II)", first, last);
        if (pair == NULL)
            Py_CLEAR(parts);
        else
            PyTuple_SetItem(parts, i, pair);
    }
    return parts;
}

/* Returns (last part that reads it, ...) for each of `count` leaves or outputs. */
static PyObject *last_parts(const dw_plan *plan, Py_ssize_t count,
                            uint32_t (*last_part)(const dw_plan *, uint32_t)) {
    PyObject *parts = PyTuple_New(count);
    for (Py_ssize_t i = 0; parts != NULL && i < count; i++) {
        PyObject *part = PyLong_FromUnsignedLong(last_part(plan, (uint32_t)i));
        if (part == NULL)
            Py_CLEAR(parts);
        else
            PyTuple_SetItem(parts, i, part);
    }
    return parts;
}
static PyObject *plan_output_parts(PyObject *self, void *closure) {
    (void)closure;
    plan_slot *slot = object_slot(self);
    return last_parts(slot->plan, slot->output_count, dw_plan_output_part);
}
static PyObject *plan_leaf_parts(PyObject *self, void *closure) {
    (void)closure;
    plan_slot *slot = object_slot(self);
    return last_parts(slot->plan, slot->leaf_count, dw_plan_leaf_part);
}

static PyGetSetDef plan_getset[] = {
    {"arena_bytes", plan_arena_bytes, NULL, "arena that forward and backward need", NULL},
    {"saved_bytes", plan_saved_bytes, NULL, "prefix of it that backward reads", NULL},
    {"kept_bytes", plan_kept_bytes, NULL, "bytes of its last segment, which keep fills", NULL},
    {"kept_layout", plan_kept_layout, NULL, "plans with the same can share that segment", NULL},
    {"segments", plan_segments, NULL,
     "((bytes, saved bytes, last part, first part), ...) of the arena", NULL},
    {"outputs", plan_outputs, NULL, "((dtype, shape), ...)", NULL},
    {"part_count", plan_part_count, NULL, "parts of backward", NULL},
    {"output_parts", plan_output_parts, NULL, "last part of backward that reads each output", NULL},
    {"leaf_parts", plan_leaf_parts, NULL, "last part of backward that reads each leaf", NULL},
    {"grad_parts", plan_grad_parts, NULL, "((first part, last part), ...) for each wrt", NULL},
    {0}};
static PyMethodDef plan_methods[] = {
    {"keep", (PyCFunction)(void (*)(void))plan_keep, METH_FASTCALL,
     "keep(segments, leaves, stream=0): computes what depends on parameters alone"},
    {"forward", (PyCFunction)(void (*)(void))plan_forward, METH_FASTCALL,
     "forward(segments, leaves, outputs, stream=0)"},
    {"backward", (PyCFunction)(void (*)(void))plan_backward, METH_FASTCALL,
     "backward(part, segments, leaves, outputs, output_grads, grads, stream=0); part -1: all"},
    {"synchronize", plan_synchronize, METH_O, "waits for a stream and raises data errors"},
    {"describe", plan_describe, METH_NOARGS, "one line per instruction"},
    {"operations", plan_operations, METH_NOARGS, "the instructions as JSON (dw_plan_operations)"},
    {"profile", plan_profile, METH_O, "profile(on): times instructions from now on, or no longer"},
    {"watch", plan_watch, METH_O,
     "watch(f): calls f(instruction, begins) around the instructions of timed runs; None: no "
     "longer"},
    {"times", plan_times, METH_NOARGS, "[(runs, seconds, start of the last run), ...]"},
    {"instruction", plan_instruction, METH_VARARGS,
     "instruction(index) -> Instruction with operands of its own"},
    {"step_memory", plan_step_memory, METH_VARARGS,
     "step_memory(optimizer, add_gradients, outputs_kept, resident) -> (moments, index of the "
     "peak)"},
    {"arena_alive", plan_arena_alive, METH_NOARGS,
     "(bytes alive at each instruction, the first of backward)"},
    {0}};
static PyType_Slot plan_slots[] = {{Py_tp_dealloc, plan_dealloc},
                                   {Py_tp_getset, plan_getset},
                                   {Py_tp_methods, plan_methods},
                                   {Py_tp_doc, "An engine's plan at one set of sizes"},
                                   {0, NULL}};
static PyType_Spec plan_spec = {"deepwell._deepwell.Plan", sizeof(PyObject) + sizeof(plan_slot), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, plan_slots};

/* ---- Graph ----------------------------------------------------------------------------------------- */

typedef struct graph_slot {
    dw_graph *graph;
} graph_slot;

static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "s#:Graph", &json, &bytes)) return NULL;
    dw_graph *graph = NULL;
    dw_status status = dw_graph_from_json(json, (size_t)bytes, &graph);
    if (status != DW_OK) return fail(status);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = allocate(type, 0);
    if (self == NULL)
        dw_graph_destroy(graph);
    else
        ((graph_slot *)object_slot(self))->graph = graph;
    return self;
}

static void graph_dealloc(PyObject *self) {
    dw_graph_destroy(((graph_slot *)object_slot(self))->graph);
    release_object(self);
}

static PyObject *graph_text(PyObject *self, PyObject *unused) {
    (void)unused;
    char *text = NULL;
    dw_status status = dw_graph_to_text(((graph_slot *)object_slot(self))->graph, &text);
    return take_text(status, text);
}
static PyObject *graph_json(PyObject *self, PyObject *unused) {
    (void)unused;
    char *text = NULL;
    dw_status status = dw_graph_to_json(((graph_slot *)object_slot(self))->graph, &text);
    return take_text(status, text);
}
static PyObject *graph_run_pass(PyObject *self, PyObject *args) {
    const char *name = NULL;
    if (!PyArg_ParseTuple(args, "s:run_pass", &name)) return NULL;
    for (int pass = 0; pass < DW_PASS_COUNT; pass++) {
        if (strcmp(dw_pass_name((dw_pass)pass), name) != 0) continue;
        dw_status status =
            dw_graph_run_pass(&((graph_slot *)object_slot(self))->graph, (dw_pass)pass);
        if (status != DW_OK) return fail(status);
        Py_RETURN_NONE;
    }
    PyErr_Format(PyExc_ValueError, "there is no pass called '%s'", name);
    return NULL;
}
/* cost(sizes) -> (flops, bytes) */
static PyObject *graph_cost(PyObject *self, PyObject *args) {
    PyObject *sequence = NULL;
    if (!PyArg_ParseTuple(args, "O:cost", &sequence)) return NULL;
    const dw_graph *graph = ((graph_slot *)object_slot(self))->graph;
    Py_ssize_t count = 0;
    int64_t *sizes = read_integers(sequence, &count);
    if (sizes == NULL) return NULL;
    if (count != (Py_ssize_t)dw_graph_symbol_count(graph)) {
        PyMem_Free(sizes);
        PyErr_Format(PyExc_ValueError, "cost: %zd sizes given for %u symbols", count,
                     dw_graph_symbol_count(graph));
        return NULL;
    }
    dw_cost cost = {0};
    dw_status status = dw_graph_cost(graph, sizes, &cost);
    PyMem_Free(sizes);
    if (status != DW_OK) return fail(status);
    return Py_BuildValue("(dd)", cost.flops, cost.bytes);
}
static PyObject *graph_leaves(PyObject *self, void *closure) {
    (void)closure;
    const dw_graph *graph = ((graph_slot *)object_slot(self))->graph;
    uint32_t count = dw_graph_leaf_count(graph);
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    for (uint32_t i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(dw_value_name(graph, dw_graph_leaf_at(graph, i)));
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SetItem(names, (Py_ssize_t)i, name);
    }
    return names;
}
static PyObject *graph_nodes(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(dw_graph_node_count(((graph_slot *)object_slot(self))->graph));
}

static PyGetSetDef graph_getset[] = {{"leaves", graph_leaves, NULL, "names, in order", NULL},
                                     {"node_count", graph_nodes, NULL, "number of nodes", NULL},
                                     {0}};
static PyMethodDef graph_methods[] = {
    {"text", graph_text, METH_NOARGS, "the readable form"},
    {"json", graph_json, METH_NOARGS, "the JSON form"},
    {"run_pass", graph_run_pass, METH_VARARGS, "run_pass(name)"},
    {"cost", graph_cost, METH_VARARGS, "cost(sizes) -> (flops, bytes)"},
    {0}};
static PyType_Slot graph_slots[] = {{Py_tp_new, graph_new},
                                    {Py_tp_dealloc, graph_dealloc},
                                    {Py_tp_getset, graph_getset},
                                    {Py_tp_methods, graph_methods},
                                    {Py_tp_doc, "Graph(json): a graph, verified"},
                                    {0, NULL}};
static PyType_Spec graph_spec = {"deepwell._deepwell.Graph", sizeof(PyObject) + sizeof(graph_slot),
                                 0, Py_TPFLAGS_DEFAULT, graph_slots};

/* ---- Policy ---------------------------------------------------------------------------------------- */

typedef struct policy_slot {
    dw_precision_policy *policy;
} policy_slot;

static PyObject *policy_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "s#:Policy", &json, &bytes)) return NULL;
    dw_precision_policy *policy = NULL;
    dw_status status = dw_precision_policy_parse(json, (size_t)bytes, &policy);
    if (status != DW_OK) return fail(status);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = allocate(type, 0);
    if (self == NULL)
        dw_precision_policy_destroy(policy);
    else
        ((policy_slot *)object_slot(self))->policy = policy;
    return self;
}

static void policy_dealloc(PyObject *self) {
    dw_precision_policy_destroy(((policy_slot *)object_slot(self))->policy);
    release_object(self);
}

static PyObject *policy_json(PyObject *self, PyObject *unused) {
    (void)unused;
    char *text = NULL;
    dw_status status = dw_precision_policy_json(((policy_slot *)object_slot(self))->policy, &text);
    return take_text(status, text);
}

static PyObject *policy_layers(PyObject *self, PyObject *args) {
    PyObject *graph = NULL;
    char *text = NULL;
    if (!PyArg_ParseTuple(args, "O!:layers", state.graph_type, &graph)) return NULL;
    dw_status status = dw_precision_layers_json(((graph_slot *)object_slot(graph))->graph,
                                                ((policy_slot *)object_slot(self))->policy, &text);
    return take_text(status, text);
}

/* operands() -> [(text of each operand), ...]: of the default, then of each exception */
static PyObject *policy_operands(PyObject *self, PyObject *unused) {
    (void)unused;
    const dw_precision_policy *policy = ((policy_slot *)object_slot(self))->policy;
    PyObject *rows = PyList_New(0);
    for (uint32_t i = 0; rows != NULL && i <= policy->exception_count; i++) {
        const dw_layer_precision *layer = i ? &policy->exceptions[i - 1].layer : &policy->layer;
        char text[DW_LINEAR_OPERANDS][64];
        for (int j = 0; j < DW_LINEAR_OPERANDS; j++)
            dw_operand_precision_text(&layer->operand[j], text[j], sizeof text[j]);
        PyObject *row =
            Py_BuildValue("(ssssss)", text[0], text[1], text[2], text[3], text[4], text[5]);
        if (row == NULL || PyList_Append(rows, row) != 0) Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    return rows;
}

static PyObject *policy_needs_seed(PyObject *self, void *closure) {
    (void)closure;
    return PyBool_FromLong(
        dw_precision_policy_needs_seed(((policy_slot *)object_slot(self))->policy));
}

static PyGetSetDef policy_getset[] = {
    {"needs_seed", policy_needs_seed, NULL, "whether graphs need a seed leaf", NULL}, {0}};
static PyMethodDef policy_methods[] = {
    {"json", policy_json, METH_NOARGS, "the policy's text"},
    {"operands", policy_operands, METH_NOARGS, "the operands' texts of the default and exceptions"},
    {"layers", policy_layers, METH_VARARGS, "layers(graph) -> JSON, a precision for each layer"},
    {0}};
static PyType_Slot policy_slots[] = {{Py_tp_new, policy_new},
                                     {Py_tp_dealloc, policy_dealloc},
                                     {Py_tp_getset, policy_getset},
                                     {Py_tp_methods, policy_methods},
                                     {Py_tp_doc, "Policy(json): a precision policy, checked"},
                                     {0, NULL}};
static PyType_Spec policy_spec = {"deepwell._deepwell.Policy",
                                  sizeof(PyObject) + sizeof(policy_slot), 0, Py_TPFLAGS_DEFAULT,
                                  policy_slots};

/* ---- Engine ---------------------------------------------------------------------------------------- */

typedef struct engine_slot {
    dw_engine *engine;
    Py_ssize_t leaf_count, output_count, grad_output_count, wrt_count, symbol_count;
} engine_slot;

static void engine_dealloc(PyObject *self) {
    dw_engine *engine = ((engine_slot *)object_slot(self))->engine;
    if (engine != NULL) dw_engine_destroy(engine);
    release_object(self);
}

/* Engine(graph, grad_outputs, wrt, recompute=True, fuse=True, policy=None, device="cpu", cuda_graphs=False,
 * arena_segments=1, part_bytes=0, keep_values=False): grad_outputs are indices of outputs, wrt of leaves. */
static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"graph",          "grad_outputs", "wrt",         "recompute",
                            "fuse",           "policy",       "device",      "cuda_graphs",
                            "arena_segments", "part_bytes",   "keep_values", NULL};
    PyObject *graph_object = NULL, *outputs_object = NULL, *wrt_object = NULL;
    int recompute = 1, fuse = 1, cuda_graphs = 0, arena_segments = 1, keep_values = 0;
    const char *device = "cpu";
    PyObject *policy = Py_None;
    Py_ssize_t part_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO|ppOspinp:Engine", names, state.graph_type,
                                     &graph_object, &outputs_object, &wrt_object, &recompute, &fuse,
                                     &policy, &device, &cuda_graphs, &arena_segments, &part_bytes,
                                     &keep_values))
        return NULL;
    if (policy != Py_None && !PyObject_TypeCheck(policy, (PyTypeObject *)state.policy_type)) {
        PyErr_SetString(PyExc_TypeError, "Engine: policy must be a Policy or None");
        return NULL;
    }
    dw_engine_options options = DW_ENGINE_OPTIONS_DEFAULT;
    dw_status status = dw_device_find(device, &options.device);
    if (status != DW_OK) return fail(status);
    const dw_graph *graph = ((graph_slot *)object_slot(graph_object))->graph;
    PyObject *self = NULL;
    uint32_t *output_indices = NULL;
    dw_value *wrt = NULL;
    Py_ssize_t output_count = 0, wrt_count = 0;
    int64_t *outputs_read = read_integers(outputs_object, &output_count);
    int64_t *wrt_read = outputs_read == NULL ? NULL : read_integers(wrt_object, &wrt_count);
    if (wrt_read == NULL) goto cleanup;
    output_indices = PyMem_Calloc((size_t)output_count + 1, sizeof *output_indices);
    wrt = PyMem_Calloc((size_t)wrt_count + 1, sizeof *wrt);
    if (output_indices == NULL || wrt == NULL) {
        PyErr_NoMemory();
        goto cleanup;
    }
    for (Py_ssize_t i = 0; i < output_count; i++) {
        if (outputs_read[i] < 0 || outputs_read[i] >= dw_graph_output_count(graph)) {
            PyErr_Format(PyExc_IndexError, "grad_outputs: %lld, but the graph has %u outputs",
                         (long long)outputs_read[i], dw_graph_output_count(graph));
            goto cleanup;
        }
        output_indices[i] = (uint32_t)outputs_read[i];
    }
    for (Py_ssize_t i = 0; i < wrt_count; i++) {
        if (wrt_read[i] < 0 || wrt_read[i] >= dw_graph_leaf_count(graph)) {
            PyErr_Format(PyExc_IndexError, "wrt: leaf %lld, but the graph has %u leaves",
                         (long long)wrt_read[i], dw_graph_leaf_count(graph));
            goto cleanup;
        }
        wrt[i] = dw_graph_leaf_at(graph, (uint32_t)wrt_read[i]);
    }
    options.recompute = recompute;
    options.fuse = fuse;
    if (policy != Py_None) options.precision = ((policy_slot *)object_slot(policy))->policy;
    options.cuda_graphs = cuda_graphs;
    options.arena_segments = arena_segments;
    options.part_bytes = part_bytes > 0 ? (size_t)part_bytes : 0;
    options.keep_values = keep_values;
    dw_engine *engine = NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_engine_create(graph, (uint32_t)output_count, output_indices, (uint32_t)wrt_count,
                              wrt, &options, &engine);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) {
        fail(status);
        goto cleanup;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    self = allocate(type, 0);
    if (self == NULL) {
        dw_engine_destroy(engine);
        goto cleanup;
    }
    engine_slot *slot = object_slot(self);
    slot->engine = engine;
    slot->leaf_count = (Py_ssize_t)dw_graph_leaf_count(graph);
    slot->output_count = (Py_ssize_t)dw_graph_output_count(graph);
    slot->symbol_count = (Py_ssize_t)dw_graph_symbol_count(graph);
    slot->grad_output_count = output_count;
    slot->wrt_count = wrt_count;
cleanup:
    PyMem_Free(outputs_read);
    PyMem_Free(wrt_read);
    PyMem_Free(output_indices);
    PyMem_Free(wrt);
    return self;
}

static PyObject *engine_quantized_count(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(
        dw_engine_quantized_count(((engine_slot *)object_slot(self))->engine));
}

static PyObject *engine_code_products(PyObject *self, void *closure) {
    (void)closure;
    uint32_t multiplied, simulated;
    const char *reason = dw_engine_code_products(((engine_slot *)object_slot(self))->engine,
                                                 &multiplied, &simulated);
    return Py_BuildValue("(IIs)", (unsigned int)multiplied, (unsigned int)simulated, reason);
}

static PyObject *engine_has_grad(PyObject *self, PyObject *args) {
    unsigned int index = 0;
    if (!PyArg_ParseTuple(args, "I:has_grad", &index)) return NULL;
    engine_slot *slot = object_slot(self);
    if ((Py_ssize_t)index >= slot->wrt_count) {
        PyErr_Format(PyExc_IndexError, "has_grad: %u of %zd", index, slot->wrt_count);
        return NULL;
    }
    return PyBool_FromLong(dw_engine_has_grad(slot->engine, index));
}

/* Returns the indices for which reads() is true. */
static PyObject *indices_read(const dw_engine *engine, Py_ssize_t count,
                              int (*reads)(const dw_engine *, uint32_t)) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        if (!reads(engine, (uint32_t)i)) continue;
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL || PyList_Append(list, index) != 0) Py_CLEAR(list);
        Py_XDECREF(index);
    }
    return list;
}
static PyObject *engine_backward_leaves(PyObject *self, void *closure) {
    (void)closure;
    engine_slot *slot = object_slot(self);
    return indices_read(slot->engine, slot->leaf_count, dw_engine_backward_reads_leaf);
}
static PyObject *engine_kept_leaves(PyObject *self, void *closure) {
    (void)closure;
    engine_slot *slot = object_slot(self);
    return indices_read(slot->engine, slot->leaf_count, dw_engine_kept_values_read_leaf);
}
static PyObject *engine_backward_outputs(PyObject *self, void *closure) {
    (void)closure;
    engine_slot *slot = object_slot(self);
    return indices_read(slot->engine, slot->output_count, dw_engine_backward_reads_output);
}

static PyGetSetDef engine_getset[] = {
    {"backward_leaves", engine_backward_leaves, NULL, "leaves that backward reads", NULL},
    {"backward_outputs", engine_backward_outputs, NULL, "outputs that backward reads", NULL},
    {"kept_leaves", engine_kept_leaves, NULL, "leaves that kept values depend on", NULL},
    {"quantized_count", engine_quantized_count, NULL, "linear layers that are quantized", NULL},
    {"code_products", engine_code_products, NULL,
     "products of operands with scales of blocks: multiplied as codes, simulated, and why", NULL},
    {0}};

static PyObject *engine_text(PyObject *self, PyObject *unused) {
    (void)unused;
    char *text = NULL;
    const dw_graph *graph = dw_engine_graph(((engine_slot *)object_slot(self))->engine);
    dw_status status = dw_graph_to_text(graph, &text);
    return take_text(status, text);
}

static PyObject *engine_plan(PyObject *self, PyObject *args) {
    PyObject *sequence = NULL;
    dw_plan_options options = DW_PLAN_OPTIONS_DEFAULT;
    if (!PyArg_ParseTuple(args, "O|p:plan", &sequence, &options.tf32)) return NULL;
    engine_slot *slot = object_slot(self);
    Py_ssize_t count = 0;
    int64_t *sizes = read_integers(sequence, &count);
    if (sizes == NULL) return NULL;
    if (count != slot->symbol_count) {
        PyMem_Free(sizes);
        PyErr_Format(PyExc_ValueError, "plan: %zd sizes given for %zd symbols", count,
                     slot->symbol_count);
        return NULL;
    }
    dw_plan *plan = NULL;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_engine_plan_with(slot->engine, sizes, &options, &plan);
    Py_END_ALLOW_THREADS;
    PyMem_Free(sizes);
    if (status != DW_OK) return fail(status);
    PyTypeObject *type = (PyTypeObject *)state.plan_type;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = allocate(type, 0);
    if (object == NULL) {
        dw_plan_release(plan);
        return NULL;
    }
    plan_slot *made = object_slot(object);
    made->plan = plan;
    Py_INCREF(self);
    made->engine = self;
    made->leaf_count = slot->leaf_count;
    made->output_count = slot->output_count;
    made->grad_output_count = slot->grad_output_count;
    made->wrt_count = slot->wrt_count;
    return object;
}

/* fit_step(sizes, symbol, least, optimizer, outputs_kept, resident, capacity) -> (micro-batch, fits, moment) */
static PyObject *engine_fit_step(PyObject *self, PyObject *args) {
    engine_slot *slot = object_slot(self);
    PyObject *sequence = NULL;
    const char *optimizer = NULL, *kept = NULL;
    unsigned int symbol = 0;
    long long least = 0;
    Py_ssize_t kept_count = 0, resident = 0, capacity = 0, count = 0;
    dw_step_options options = DW_STEP_OPTIONS_DEFAULT;
    if (!PyArg_ParseTuple(args, "OILsy#nn:fit_step", &sequence, &symbol, &least, &optimizer, &kept,
                          &kept_count, &resident, &capacity) ||
        !read_step(optimizer, kept, kept_count, slot->output_count, resident, &options))
        return NULL;
    int64_t *sizes = read_integers(sequence, &count);
    if (sizes == NULL) return NULL;
    if (count != slot->symbol_count) {
        PyMem_Free(sizes);
        PyErr_Format(PyExc_ValueError, "fit_step: %zd sizes given for %zd symbols", count,
                     slot->symbol_count);
        return NULL;
    }
    dw_step_fit fit;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_engine_fit_step(slot->engine, sizes, symbol, least, &options,
                                capacity > 0 ? (size_t)capacity : 0, &fit);
    Py_END_ALLOW_THREADS;
    PyMem_Free(sizes);
    if (status != DW_OK) return fail(status);
    return Py_BuildValue("(LNN)", (long long)fit.micro_batch, PyBool_FromLong(fit.fits),
                         moment_dict(&fit.peak));
}

static PyMethodDef engine_methods[] = {
    {"plan", engine_plan, METH_VARARGS, "plan(sizes, tf32=False) -> Plan"},
    {"fit_step", engine_fit_step, METH_VARARGS,
     "fit_step(sizes, symbol, least, optimizer, outputs_kept, resident, capacity) -> (micro-batch, "
     "fits, moment)"},
    {"has_grad", engine_has_grad, METH_VARARGS, "has_grad(index into wrt) -> bool"},
    {"text", engine_text, METH_NOARGS, "the graph after passes, forward and backward"},
    {0}};
static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_getset},
    {Py_tp_doc, "Engine(graph, grad_outputs, wrt, recompute=True, fuse=True, policy=None, ...)"},
    {0, NULL}};
static PyType_Spec engine_spec = {"deepwell._deepwell.Engine",
                                  sizeof(PyObject) + sizeof(engine_slot), 0, Py_TPFLAGS_DEFAULT,
                                  engine_slots};

/* ---- functions ------------------------------------------------------------------------------------- */

static PyObject *module_version(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return PyUnicode_FromString(dw_version());
}
static PyObject *module_machine(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    char *text = NULL;
    dw_status status = dw_machine_describe(&text);
    return take_text(status, text);
}
static PyObject *module_set_threads(PyObject *self, PyObject *args) {
    (void)self;
    int threads = 0;
    if (!PyArg_ParseTuple(args, "i:set_threads", &threads)) return NULL;
    dw_status status = dw_set_threads(threads);
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}
static PyObject *module_get_threads(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return PyLong_FromLong(dw_get_threads());
}

/* device_memory(restart=False) -> (bytes now, peak) of the CPU device, including arenas. */
static PyObject *module_device_memory(PyObject *self, PyObject *args) {
    (void)self;
    int restart = 0;
    if (!PyArg_ParseTuple(args, "|p:device_memory", &restart)) return NULL;
    const dw_device *device = NULL;
    dw_status status = dw_device_find("cpu", &device);
    if (status != DW_OK) return fail(status);
    size_t now = 0, most = 0;
    dw_device_memory(device, &now, &most);
    if (restart) dw_device_memory_restart(device);
    return Py_BuildValue("(nn)", (Py_ssize_t)now, (Py_ssize_t)most);
}

/* Returns freed memory that the C library caches to the system, if it can. */
static PyObject *module_trim_memory(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
#ifdef __GLIBC__
    Py_BEGIN_ALLOW_THREADS;
    malloc_trim(0);
    Py_END_ALLOW_THREADS;
#endif
    Py_RETURN_NONE;
}

/* adamw(tensors, lr, beta1, beta2, eps, weight_decay, step, maximize, grad_scale): `tensors` is flat, with the
 * addresses of param, grad, exp_avg and exp_avg_sq and the element count of each tensor. */
static PyObject *module_adamw(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *sequence = NULL;
    dw_adamw_options options = {.struct_size = sizeof options};
    long long step = 0;
    if (!PyArg_ParseTuple(args, "OdddddLpd:adamw", &sequence, &options.lr, &options.beta1,
                          &options.beta2, &options.eps, &options.weight_decay, &step,
                          &options.maximize, &options.grad_scale))
        return NULL;
    options.step = step;
    Py_ssize_t count = 0;
    int64_t *flat = read_integers(sequence, &count);
    if (flat == NULL) return NULL;
    if (count % 5 != 0) {
        PyMem_Free(flat);
        PyErr_Format(PyExc_ValueError, "adamw: %zd integers; five for each tensor", count);
        return NULL;
    }
    dw_adamw_tensor *tensors = PyMem_Calloc((size_t)count / 5 + 1, sizeof *tensors);
    if (tensors == NULL) {
        PyMem_Free(flat);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count / 5; i++) {
        const int64_t *one = flat + 5 * i;
        tensors[i] =
            (dw_adamw_tensor){(float *)(uintptr_t)one[0], (const float *)(uintptr_t)one[1],
                              (float *)(uintptr_t)one[2], (float *)(uintptr_t)one[3], one[4]};
    }
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_adamw_step(tensors, (uint32_t)(count / 5), &options);
    Py_END_ALLOW_THREADS;
    PyMem_Free(flat);
    PyMem_Free(tensors);
    if (status != DW_OK) return fail(status);
    Py_RETURN_NONE;
}

/* A container that watch() was given. All of them lie in one array, and no reference to them is held. */
typedef struct watched_container {
    PyObject *container; /* NULL: the one that first_change is given */
    bool is_list;
    Py_ssize_t count; /* of values */
    Py_ssize_t first; /* position of its first value, or of its first key and value, in `kept` */
} watched_container;
typedef struct watch_list {
    Py_ssize_t count;
    PyObject **kept;
    watched_container containers[];
} watch_list;
static const char WATCH_NAME[] = "deepwell._deepwell.watch";

static void watch_free(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, WATCH_NAME)); }

static bool watch_fill(watch_list *list, PyObject *watched) {
    Py_ssize_t used = 0;
    for (Py_ssize_t i = 0; i < list->count; i++) {
        PyObject *container = PyList_GetItem(watched, 2 * i);
        PyObject *kept = PyList_GetItem(watched, 2 * i + 1);
        const Py_ssize_t size = PyTuple_Size(kept);
        const bool is_list = PyList_Check(container), given = container == Py_None;
        if (!is_list && !given && !PyDict_Check(container)) {
            PyErr_SetString(PyExc_TypeError, "watch: neither a dict nor a list");
            return false;
        }
        list->containers[i] = (watched_container){
            .container = given ? NULL : container,
            .is_list = is_list,
            .count = is_list ? size : size / 2,
            .first = used,
        };
        for (Py_ssize_t k = 0; k < size; k++) list->kept[used++] = PyTuple_GetItem(kept, k);
    }
    return true;
}

/* watch(watched): `watched` is a flat list of dict, tuple, dict, tuple, ...; a tuple holds the keys and values that its
 * dict has, in order. A list may replace a dict; its tuple holds its items. None stands for the dict that first_change
 * is given. Returns what first_change reads. The caller keeps `watched`, unchanged, as long as that is used. */
static PyObject *module_watch(PyObject *self, PyObject *watched) {
    (void)self;
    if (!PyList_Check(watched) || PyList_Size(watched) % 2 != 0) {
        PyErr_SetString(PyExc_TypeError, "watch(watched) takes a list of pairs");
        return NULL;
    }
    const Py_ssize_t count = PyList_Size(watched) / 2;
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *kept = PyList_GetItem(watched, 2 * i + 1);
        if (!PyTuple_Check(kept)) {
            PyErr_SetString(PyExc_TypeError, "watch: what a container holds is not a tuple");
            return NULL;
        }
        total += PyTuple_Size(kept);
    }
    const size_t head = sizeof(watch_list) + (size_t)count * sizeof(watched_container);
    watch_list *list = PyMem_Malloc(head + (size_t)total * sizeof(PyObject *));
    if (list == NULL) return PyErr_NoMemory();
    list->count = count;
    list->kept = (PyObject **)((char *)list + head);
    PyObject *capsule =
        watch_fill(list, watched) ? PyCapsule_New(list, WATCH_NAME, watch_free) : NULL;
    if (capsule == NULL) PyMem_Free(list);
    return capsule;
}

static bool holds_the_same(const watched_container *c, PyObject *container, PyObject *const *kept) {
    if (c->is_list) {
        if (PyList_Size(container) != c->count) return false;
        for (Py_ssize_t i = 0; i < c->count; i++)
            if (PyList_GetItem(container, i) != kept[i]) return false;
        return true;
    }
    if (PyDict_Size(container) != c->count) return false;
    if (c->count == 0) return true;
    PyObject *key = NULL, *value = NULL;
    Py_ssize_t position = 0;
    for (; PyDict_Next(container, &position, &key, &value); kept += 2)
        if (key != kept[0] || (value != kept[1] && kept[1] != Py_Ellipsis)) return false;
    return true;
}

/* first_change(watch, given): returns the index of the first container that no longer holds the very objects that it
 * held at watch(), or -1. `given` is a dict in place of None there. An Ellipsis in a tuple matches any value. */
static PyObject *module_first_change(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2 || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "first_change(watch, given) takes a watch and a dict");
        return NULL;
    }
    const watch_list *list = PyCapsule_GetPointer(args[0], WATCH_NAME);
    if (list == NULL) return NULL;
    for (Py_ssize_t i = 0; i < list->count; i++) {
        const watched_container *c = &list->containers[i];
        PyObject *container = c->container != NULL ? c->container : args[1];
        if (!holds_the_same(c, container, list->kept + c->first)) return PyLong_FromSsize_t(i);
    }
    return PyLong_FromLong(-1);
}

/* first_replaced(places): `places` is a flat tuple of holder, key, value, ... Returns the index of the first holder
 * that no longer has this very object under the key, or -1. A holder is a dict, a class's mapping or an object with
 * that attribute; NotImplemented stands for an absent value. */
static PyObject *module_first_replaced(PyObject *self, PyObject *places) {
    (void)self;
    if (!PyTuple_Check(places)) {
        PyErr_SetString(PyExc_TypeError, "first_replaced(places) takes a tuple");
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(places);
    for (Py_ssize_t i = 0; i + 2 < count; i += 3) {
        PyObject *holder = PyTuple_GetItem(places, i);
        PyObject *key = PyTuple_GetItem(places, i + 1);
        PyObject *was = PyTuple_GetItem(places, i + 2);
        PyObject *found = NULL;
        if (PyDict_Check(holder)) {
            found = PyDict_GetItemWithError(holder, key);
            Py_XINCREF(found);
        } else if (Py_TYPE(holder) == &PyDictProxy_Type) {
            found = PyObject_GetItem(holder, key);
        } else {
            found = PyObject_GetAttr(holder, key);
        }
        if (found == NULL) PyErr_Clear();
        bool same = found == was || (found == NULL && was == Py_NotImplemented);
        Py_XDECREF(found);
        if (!same) return PyLong_FromSsize_t(i);
    }
    return PyLong_FromLong(-1);
}

static PyMethodDef functions[] = {
    {"first_replaced", module_first_replaced, METH_O,
     "first_replaced((holder, key, value, ...)) -> position"},
    {"watch", module_watch, METH_O, "watch([dict, kept, ...]) -> what first_change reads"},
    {"first_change", (PyCFunction)(void (*)(void))module_first_change, METH_FASTCALL,
     "first_change(watch, given) -> position"},
    {"version", module_version, METH_NOARGS, "version of libdeepwell"},
    {"machine", module_machine, METH_NOARGS, "the CPU engine of this process, as JSON"},
    {"set_threads", module_set_threads, METH_VARARGS, "set_threads(count)"},
    {"get_threads", module_get_threads, METH_NOARGS, "threads of the CPU engine"},
    {"device_memory", module_device_memory, METH_VARARGS,
     "device_memory(restart=False) -> (bytes now, peak)"},
    {"trim_memory", module_trim_memory, METH_NOARGS, "gives freed memory back to the system"},
    {"adamw", module_adamw, METH_VARARGS, "one AdamW update of many tensors"},
    {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "_deepwell",
                                        "libdeepwell for Python",
                                        -1,
                                        functions,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};

static PyObject *add_type(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL) return NULL;
    Py_INCREF(type); /* one reference for the module, one for state */
    if (PyModule_AddObject(module, name, type) != 0) {
        Py_DECREF(type);
        Py_CLEAR(type);
    }
    return type;
}

PyMODINIT_FUNC PyInit__deepwell(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddFunctions(module, adamw_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, artifact_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, autoplan_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, hardware_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, model_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, number_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, planner_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, gemm_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, precision_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, simulate_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, tensors_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, training_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, attention_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, attention_decision_functions) != 0) goto failed;
    if (PyModule_AddFunctions(module, attention_operator_functions) != 0) goto failed;
    /* Users catch deepwell.DeepwellError, whichever layer has found the mistake. */
    PyObject *errors = PyImport_ImportModule("deepwell.errors");
    if (errors == NULL) goto failed;
    PyObject *base = PyObject_GetAttrString(errors, "DeepwellError");
    Py_DECREF(errors);
    if (base == NULL) goto failed;
    state.error =
        PyErr_NewExceptionWithDoc("deepwell._deepwell.Error",
                                  "A failure in libdeepwell; .status names its kind.", base, NULL);
    Py_DECREF(base);
    if (state.error == NULL) goto failed;
    Py_INCREF(state.error);
    if (PyModule_AddObject(module, "Error", state.error) != 0) goto failed;
    PyObject *both = PyTuple_Pack(2, state.error, PyExc_IndexError);
    if (both == NULL) goto failed;
    state.index_error =
        PyErr_NewExceptionWithDoc("deepwell._deepwell.IndexError",
                                  "An index, or a target of a loss, is out of range.", both, NULL);
    Py_DECREF(both);
    if (state.index_error == NULL) goto failed;
    Py_INCREF(state.index_error);
    if (PyModule_AddObject(module, "IndexError", state.index_error) != 0) goto failed;
    state.instruction_type = add_type(module, "Instruction", &instruction_spec);
    if (!state.instruction_type) goto failed;
    if (!tensors_begin()) goto failed;
    state.arena_type = add_type(module, "Arena", &arena_spec);
    state.graph_type = add_type(module, "Graph", &graph_spec);
    state.policy_type = add_type(module, "Policy", &policy_spec);
    state.engine_type = add_type(module, "Engine", &engine_spec);
    state.plan_type = add_type(module, "Plan", &plan_spec);
    if (!state.arena_type || !state.graph_type || !state.policy_type || !state.engine_type ||
        !state.plan_type)
        goto failed;
    return module;
failed:
    Py_DECREF(module);
    return NULL;
}
