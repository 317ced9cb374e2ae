/* A call through an optimized module reads the addresses and versions of many tensors, and backward makes tensors for
 * gradients. Each function here does this for all parameters, in place of a loop in Python. */
#include "tensors.h"
#include <dlfcn.h>
#include <string.h>

typedef struct opaque_tensor *tensor_handle;

/* Functions of PyTorch's C interface in libtorch_cpu.so, found by dlsym; NULL if there is none. */
static struct {
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t,
                     tensor_handle *);
    int32_t (*view)(tensor_handle, int64_t, const int64_t *, const int64_t *, int64_t,
                    tensor_handle *);
    int32_t (*release)(tensor_handle);
    PyObject *(*wrap)(tensor_handle); /* THPVariable_Wrap in libtorch_python.so */
} shim;
static void *torch_cpu;

static const exchange_api *exchange; /* NULL: this PyTorch does not have it */
static PyObject *tensor_type, *parameter_type;
static PyObject *data_ptr, *is_contiguous, *requires_grad, *version; /* names */

bool tensors_begin(void) {
    data_ptr = PyUnicode_InternFromString("data_ptr");
    is_contiguous = PyUnicode_InternFromString("is_contiguous");
    requires_grad = PyUnicode_InternFromString("requires_grad");
    version = PyUnicode_InternFromString("_version");
    return !PyErr_Occurred();
}

/* ---- single tensors -------------------------------------------------------------------------------- */

const exchange_api *exchange_of(PyObject *capsule) {
    const exchange_api *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    bool known = api != NULL && api->major == 1 && api->view != NULL && api->stream != NULL;
    return known ? api : NULL;
}

bool tensor_view_of(PyObject *object, exchanged_tensor *view) {
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (exchange == NULL || (type != parameter_type && type != tensor_type)) return false;
    if (exchange->view(object, view) == 0) return true;
    PyErr_Clear();
    return false;
}

bool tensor_address(PyObject *object, void **address) {
    exchanged_tensor view;
    if (tensor_view_of(object, &view)) {
        *address = (char *)view.data + view.byte_offset;
        return true;
    }
    PyObject *found = PyObject_CallMethodObjArgs(object, data_ptr, NULL);
    if (found == NULL) return false;
    *address = PyLong_AsVoidPtr(found);
    Py_DECREF(found);
    return !PyErr_Occurred();
}

static bool lies_densely(const exchanged_tensor *view) {
    int64_t expected = 1;
    bool dense = true;
    for (int32_t axis = view->rank - 1; axis >= 0; axis--) {
        if (view->sizes[axis] == 0) return true;
        if (view->sizes[axis] == 1) continue;
        dense = dense && view->strides[axis] == expected;
        expected *= view->sizes[axis];
    }
    return dense;
}

/* Returns 1 if a plan can read the tensor where it lies, 0 if not, -1 with an exception. */
static int is_readable(PyObject *tensor, size_t alignment) {
    exchanged_tensor view;
    void *address = NULL;
    if (tensor_view_of(tensor, &view))
        return lies_densely(&view) && ((uintptr_t)view.data + view.byte_offset) % alignment == 0;
    PyObject *contiguous = PyObject_CallMethodObjArgs(tensor, is_contiguous, NULL);
    if (contiguous == NULL) return -1;
    Py_DECREF(contiguous);
    if (!tensor_address(tensor, &address)) return -1;
    return contiguous == Py_True && (uintptr_t)address % alignment == 0;
}

/* ---- many tensors ---------------------------------------------------------------------------------- */

/* tensors_prepare(exchange capsule or None, Tensor, Parameter, libtorch_cpu, libtorch_python): what this PyTorch has is
 * used from then on. */
static PyObject *tensors_prepare(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *capsule = NULL;
    const char *cpu_path = NULL, *python_path = NULL;
    if (!PyArg_ParseTuple(args, "OOOss:tensors_prepare", &capsule, &tensor_type, &parameter_type,
                          &cpu_path, &python_path))
        return NULL;
    Py_INCREF(tensor_type);
    Py_INCREF(parameter_type);
    if (capsule != Py_None) exchange = exchange_of(capsule);
    if (PyErr_Occurred()) return NULL;
    torch_cpu = dlopen(cpu_path, RTLD_LAZY | RTLD_NOLOAD);
    void *python = dlopen(python_path, RTLD_LAZY | RTLD_NOLOAD);
    if (torch_cpu != NULL && python != NULL) {
        *(void **)&shim.empty = dlsym(torch_cpu, "aoti_torch_empty_strided");
        *(void **)&shim.view = dlsym(torch_cpu, "aoti_torch__reinterpret_tensor");
        *(void **)&shim.release = dlsym(torch_cpu, "aoti_torch_delete_tensor_object");
        *(void **)&shim.wrap = dlsym(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE");
    }
    Py_RETURN_NONE;
}

/* unreadable(tensors, alignment) -> the positions, in a list, of tensors that are not contiguous or whose address is
 * not a multiple of `alignment` bytes. */
static PyObject *unreadable(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError,
                        "unreadable(tensors, alignment) takes a list and a number");
        return NULL;
    }
    size_t alignment = PyLong_AsSize_t(args[1]);
    if (alignment == 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "unreadable: alignment 0; expected at least 1 byte");
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_Size(args[0]); i++) {
        PyObject *tensor = PyList_GetItem(args[0], i);
        Py_INCREF(tensor); /* a method of it may change the list */
        int readable = is_readable(tensor, alignment);
        Py_DECREF(tensor);
        PyObject *position = readable == 0 ? PyLong_FromSsize_t(i) : NULL;
        if (readable == 0 && (position == NULL || PyList_Append(found, position) != 0))
            readable = -1;
        Py_XDECREF(position);
        if (readable < 0) Py_CLEAR(found);
    }
    return found;
}

/* Returns an attribute of an item of a list, as a new reference. The item is held meanwhile, because a property of a
 * subclass may change the list. */
static PyObject *attribute_of(PyObject *list, Py_ssize_t position, PyObject *name) {
    PyObject *item = PyList_GetItem(list, position);
    if (item == NULL) return NULL;
    Py_INCREF(item);
    PyObject *found = PyObject_GetAttr(item, name);
    Py_DECREF(item);
    return found;
}

/* Returns 1, 0, or -1 with an exception. */
static int needs_gradient(PyObject *list, Py_ssize_t position) {
    if (PyList_GetItem(list, position) == Py_None) return 0;
    PyObject *answer = attribute_of(list, position, requires_grad);
    if (answer == NULL) return -1;
    Py_DECREF(answer);
    return answer == Py_True;
}

/* differentiable(tensors, last) -> the positions of the tensors that require a gradient, in a tuple: `last` itself if
 * they are the same. An item may be None. */
static PyObject *differentiable(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2 || !PyList_Check(args[0]) || !PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "differentiable(tensors, last) takes a list and a tuple");
        return NULL;
    }
    const Py_ssize_t tensors = PyList_Size(args[0]), before = PyTuple_Size(args[1]);
    Py_ssize_t found = 0;
    bool same = true;
    uint8_t *needs = PyMem_Malloc((size_t)tensors + 1);
    if (needs == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < tensors; i++) {
        const int need = needs_gradient(args[0], i);
        if (need < 0) {
            PyMem_Free(needs);
            return NULL;
        }
        needs[i] = need == 1;
        if (!needs[i]) continue;
        same = same && found < before && PyLong_AsSsize_t(PyTuple_GetItem(args[1], found)) == i;
        found++;
    }
    if (same && found == before) {
        PyMem_Free(needs);
        return Py_NewRef(args[1]);
    }
    PyObject *positions = PyTuple_New(found);
    for (Py_ssize_t i = 0, at = 0; positions != NULL && i < tensors; i++) {
        if (!needs[i]) continue;
        PyObject *position = PyLong_FromSsize_t(i);
        if (position == NULL || PyTuple_SetItem(positions, at++, position) != 0)
            Py_CLEAR(positions);
    }
    PyMem_Free(needs);
    return positions;
}

/* Returns the version of a tensor, or -1 with an exception. */
static int64_t version_of(PyObject *list, Py_ssize_t position) {
    PyObject *number = attribute_of(list, position, version);
    if (number == NULL) return -1;
    const int64_t found = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return found;
}

/* versions(tensors) -> their versions, each as a signed integer of 64 bits, in bytes */
static PyObject *versions(PyObject *self, PyObject *tensors) {
    (void)self;
    if (!PyList_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "versions(tensors) takes a list");
        return NULL;
    }
    const Py_ssize_t count = PyList_Size(tensors);
    PyObject *made = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        const int64_t found = version_of(tensors, i);
        memcpy(PyBytes_AsString(made) + (size_t)i * sizeof found, &found, sizeof found);
        if (found < 0 && PyErr_Occurred()) Py_CLEAR(made);
    }
    return made;
}

/* same_versions(tensors, versions, positions): whether the tensors at these positions have the versions that versions()
 * returned for the list. */
static PyObject *same_versions(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 3 || !PyList_Check(args[0]) || !PyBytes_Check(args[1]) ||
        !PySequence_Check(args[2])) {
        PyErr_SetString(
            PyExc_TypeError,
            "same_versions(tensors, versions, positions) takes a list, bytes and a sequence");
        return NULL;
    }
    const Py_ssize_t tensors = PyList_Size(args[0]), positions = PySequence_Size(args[2]);
    const Py_ssize_t known = PyBytes_Size(args[1]) / (Py_ssize_t)sizeof(int64_t);
    for (Py_ssize_t p = 0; p < positions; p++) {
        PyObject *item = PySequence_GetItem(args[2], p);
        const Py_ssize_t i = item == NULL ? -1 : PyLong_AsSsize_t(item);
        Py_XDECREF(item);
        if (!PyErr_Occurred() && (i < 0 || i >= tensors || i >= known))
            PyErr_Format(PyExc_IndexError, "same_versions: position %zd of %zd tensors", i, known);
        if (PyErr_Occurred()) return NULL;
        int64_t was;
        memcpy(&was, PyBytes_AsString(args[1]) + (size_t)i * sizeof was, sizeof was);
        const int64_t now = version_of(args[0], i);
        if (now < 0 && PyErr_Occurred()) return NULL;
        if (now != was) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* states(tensors, positions) -> addresses and versions of the tensors at these positions, in bytes. A tensor that has been
 * written by an operation of PyTorch, or replaced, has another state. */
static PyObject *states(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "states(tensors, positions) takes two lists");
        return NULL;
    }
    const Py_ssize_t positions = PyList_Size(args[1]);
    int64_t state[2];
    PyObject *made = PyBytes_FromStringAndSize(NULL, positions * (Py_ssize_t)sizeof state);
    for (Py_ssize_t p = 0; made != NULL && p < positions; p++) {
        const Py_ssize_t i = PyLong_AsSsize_t(PyList_GetItem(args[1], p));
        PyObject *tensor = PyErr_Occurred() ? NULL : PyList_GetItem(args[0], i);
        void *address = NULL;
        Py_XINCREF(tensor);
        if (tensor == NULL || !tensor_address(tensor, &address) ||
            ((state[1] = version_of(args[0], i)) < 0 && PyErr_Occurred())) {
            Py_CLEAR(made);
        } else {
            state[0] = (int64_t)(intptr_t)address;
            memcpy(PyBytes_AsString(made) + (size_t)p * sizeof state, state, sizeof state);
        }
        Py_XDECREF(tensor);
    }
    return made;
}

/* ---- gradients ------------------------------------------------------------------------------------- */

/* One tensor in a block. */
typedef struct placed_tensor {
    Py_ssize_t position; /* in the list of gradients */
    int rank;
    int64_t sizes[DW_MAX_RANK], strides[DW_MAX_RANK], offset; /* elements */
} placed_tensor;
typedef struct tensor_block {
    int32_t dtype;
    int64_t elements;
    Py_ssize_t first, count; /* of its tensors */
} tensor_block;
typedef struct allocations {
    int32_t device_type, device;
    Py_ssize_t block_count;
    tensor_block *blocks;
    placed_tensor tensors[];
} allocations;
static const char ALLOCATIONS_NAME[] = "deepwell._deepwell.allocations";

static void free_allocations(PyObject *capsule) {
    allocations *a = PyCapsule_GetPointer(capsule, ALLOCATIONS_NAME);
    PyMem_Free(a->blocks);
    PyMem_Free(a);
}

/* Returns a constant of PyTorch's C interface, or -1. */
static int32_t torch_constant(const char *family, const char *name) {
    char symbol[64];
    int32_t (*constant)(void) = NULL;
    PyOS_snprintf(symbol, sizeof symbol, "aoti_torch_%s_%s", family, name);
    if (torch_cpu != NULL) *(void **)&constant = dlsym(torch_cpu, symbol);
    return constant == NULL ? -1 : constant();
}

static bool read_sizes(PyObject *shape, int *rank, int64_t sizes[DW_MAX_RANK]) {
    const Py_ssize_t count = PyTuple_Size(shape);
    if (count < 0 || count > DW_MAX_RANK) return false;
    *rank = (int)count;
    for (Py_ssize_t axis = 0; axis < count; axis++)
        sizes[axis] = PyLong_AsLongLong(PyTuple_GetItem(shape, axis));
    return !PyErr_Occurred();
}

static bool read_block(PyObject *entry, allocations *a, tensor_block *block, Py_ssize_t *used) {
    const char *dtype = NULL;
    PyObject *placed = NULL;
    long long elements = 0;
    if (!PyArg_ParseTuple(entry, "sLO!", &dtype, &elements, &PyList_Type, &placed)) return false;
    *block = (tensor_block){.dtype = torch_constant("dtype", dtype),
                            .elements = elements,
                            .first = *used,
                            .count = PyList_Size(placed)};
    for (Py_ssize_t i = 0; i < block->count; i++) {
        placed_tensor *t = &a->tensors[(*used)++];
        PyObject *shape = NULL;
        long long offset = 0;
        if (!PyArg_ParseTuple(PyList_GetItem(placed, i), "nO!L", &t->position, &PyTuple_Type,
                              &shape, &offset) ||
            !read_sizes(shape, &t->rank, t->sizes))
            return false;
        t->offset = offset;
        int64_t stride = 1;
        for (int axis = t->rank - 1; axis >= 0; axis--) {
            t->strides[axis] = stride;
            stride *= t->sizes[axis];
        }
    }
    return true;
}

/* allocations("cpu" or "cuda", index, [(dtype, elements, [(position, shape, offset), ...]), ...]) -> what
 * allocate_gradients reads, or None if this PyTorch lacks a function that it needs. A block with one tensor has the
 * tensor's shape. */
static PyObject *make_allocations(PyObject *self, PyObject *args) {
    (void)self;
    const char *device = NULL;
    int index = 0;
    PyObject *blocks = NULL;
    if (!PyArg_ParseTuple(args, "siO!:allocations", &device, &index, &PyList_Type, &blocks))
        return NULL;
    if (!shim.empty || !shim.view || !shim.release || !shim.wrap) Py_RETURN_NONE;
    const Py_ssize_t count = PyList_Size(blocks);
    Py_ssize_t total = 0, used = 0;
    for (Py_ssize_t b = 0; b < count; b++) {
        PyObject *entry = PyList_GetItem(blocks, b);
        if (!PyTuple_Check(entry) || PyTuple_Size(entry) != 3 ||
            !PyList_Check(PyTuple_GetItem(entry, 2))) {
            PyErr_SetString(PyExc_TypeError, "allocations: a block is (dtype, elements, [...])");
            return NULL;
        }
        total += PyList_Size(PyTuple_GetItem(entry, 2));
    }
    allocations *a = PyMem_Calloc(1, sizeof *a + (size_t)total * sizeof a->tensors[0]);
    if (a == NULL) return PyErr_NoMemory();
    a->blocks = PyMem_Calloc((size_t)count + 1, sizeof *a->blocks);
    PyObject *capsule = a->blocks == NULL ? PyErr_NoMemory() : NULL;
    if (a->blocks != NULL) capsule = PyCapsule_New(a, ALLOCATIONS_NAME, free_allocations);
    if (capsule == NULL) {
        PyMem_Free(a->blocks);
        PyMem_Free(a);
        return NULL;
    }
    a->device_type = torch_constant("device_type", device), a->device = index;
    a->block_count = count;
    bool supported = a->device_type >= 0;
    for (Py_ssize_t b = 0; b < count && !PyErr_Occurred(); b++) {
        if (!read_block(PyList_GetItem(blocks, b), a, &a->blocks[b], &used) && !PyErr_Occurred())
            supported = false;
        supported = supported && a->blocks[b].dtype >= 0;
    }
    if (PyErr_Occurred()) Py_CLEAR(capsule);
    if (capsule == NULL || supported) return capsule;
    Py_DECREF(capsule);
    Py_RETURN_NONE;
}

/* Stores a new tensor with this handle, which is released, in a list. */
static bool store(tensor_handle handle, PyObject *list, Py_ssize_t position) {
    PyObject *made = shim.wrap(handle);
    shim.release(handle);
    return made != NULL && PyList_SetItem(list, position, made) == 0;
}

static bool allocate_block(const allocations *a, const tensor_block *block, PyObject *grads) {
    const int64_t one = 1;
    const placed_tensor *tensors = &a->tensors[block->first];
    tensor_handle memory = NULL, view = NULL;
    if (block->count == 1)
        return shim.empty(tensors->rank, tensors->sizes, tensors->strides, block->dtype,
                          a->device_type, a->device, &memory) == 0 &&
               store(memory, grads, tensors->position);
    if (shim.empty(1, &block->elements, &one, block->dtype, a->device_type, a->device, &memory))
        return false;
    bool made = true;
    for (Py_ssize_t i = 0; made && i < block->count; i++) {
        const placed_tensor *t = &tensors[i];
        made = shim.view(memory, t->rank, t->sizes, t->strides, t->offset, &view) == 0 &&
               store(view, grads, t->position);
    }
    shim.release(memory);
    return made;
}

/* allocate_gradients(allocations, list): stores new tensors in the list. Returns False if PyTorch has no memory for all
 * of them. */
static PyObject *allocate_gradients(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    const allocations *a = count == 2 && PyList_Check(args[1])
                               ? PyCapsule_GetPointer(args[0], ALLOCATIONS_NAME)
                               : NULL;
    if (a == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "allocate_gradients(allocations, list)");
        return NULL;
    }
    for (Py_ssize_t b = 0; b < a->block_count; b++) {
        if (allocate_block(a, &a->blocks[b], args[1])) continue;
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

PyMethodDef tensors_functions[] = {
    {"tensors_prepare", tensors_prepare, METH_VARARGS, "looks for what this PyTorch offers"},
    {"unreadable", (PyCFunction)(void (*)(void))unreadable, METH_FASTCALL,
     "unreadable([tensor, ...], alignment) -> [position, ...]"},
    {"differentiable", (PyCFunction)(void (*)(void))differentiable, METH_FASTCALL,
     "differentiable([tensor, ...], last) -> (position, ...)"},
    {"versions", versions, METH_O, "versions([tensor, ...]) -> bytes"},
    {"same_versions", (PyCFunction)(void (*)(void))same_versions, METH_FASTCALL,
     "same_versions([tensor, ...], versions, positions)"},
    {"states", (PyCFunction)(void (*)(void))states, METH_FASTCALL,
     "states([tensor, ...], [position, ...]) -> bytes"},
    {"allocations", make_allocations, METH_VARARGS, "what allocate_gradients reads, or None"},
    {"allocate_gradients", (PyCFunction)(void (*)(void))allocate_gradients, METH_FASTCALL,
     "allocate_gradients(allocations, list) -> whether there was memory"},
    {0}};
