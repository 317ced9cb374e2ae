/* Parts of a training run for deepwell.Trainer: token files, learning rate, norm, checkpoints and files of tensors.
 * Options are a dict with the names of dw_trainer_options; objects are capsules. The GIL is released while files are
 * read or written. */
#include "ext.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- options --------------------------------------------------------------------------------- */

typedef enum option_kind { INT64, UINT64, INT32, NUMBER, TEXT, PATHS } option_kind;

#define OPTION(name, kind)                                                                         \
    { #name, kind, offsetof(dw_trainer_options, name) }
static const struct option {
    const char *name;
    option_kind kind;
    size_t offset;
} known_options[] = {
    OPTION(init, INT32),        OPTION(data, PATHS),          OPTION(token_type, INT32),
    OPTION(shuffle, INT32),     OPTION(sequence, INT64),      OPTION(batch, INT64),
    OPTION(micro_batch, INT64), OPTION(seed, UINT64),         OPTION(dropout, INT32),
    OPTION(steps, INT64),       OPTION(warmup_steps, INT64),  OPTION(schedule_steps, INT64),
    OPTION(lr, NUMBER),         OPTION(min_lr_ratio, NUMBER), OPTION(beta1, NUMBER),
    OPTION(beta2, NUMBER),      OPTION(eps, NUMBER),          OPTION(weight_decay, NUMBER),
    OPTION(decay_all, INT32),   OPTION(clip, NUMBER),         OPTION(precision, TEXT),
    OPTION(device, TEXT),       OPTION(schedule, TEXT),
};

/* `list`: a sequence of bytes, which the caller keeps. */
static int read_paths(PyObject *list, dw_trainer_options *options) {
    Py_ssize_t count = PySequence_Size(list);
    if (count < 0) return 0;
    const char **paths = PyMem_Calloc((size_t)count + 1, sizeof *paths);
    if (paths == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    options->data = paths;
    options->data_count = (uint32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *path = PySequence_GetItem(list, i);
        paths[i] = path == NULL ? NULL : PyBytes_AsString(path);
        Py_XDECREF(path); /* the list holds it */
        if (paths[i] == NULL) return 0;
    }
    return 1;
}

static int read_option(const struct option *option, PyObject *value, dw_trainer_options *options) {
    void *at = (char *)options + option->offset;
    switch (option->kind) {
    case INT64: *(int64_t *)at = PyLong_AsLongLong(value); break;
    case UINT64: *(uint64_t *)at = PyLong_AsUnsignedLongLong(value); break;
    case INT32: *(int *)at = (int)PyLong_AsLong(value); break;
    case NUMBER: *(double *)at = PyFloat_AsDouble(value); break;
    case TEXT: *(const char **)at = PyUnicode_AsUTF8AndSize(value, NULL); break;
    case PATHS: return read_paths(value, options);
    }
    return PyErr_Occurred() == NULL;
}

static void release_options(dw_trainer_options *options) { PyMem_Free((void *)options->data); }

/* The texts and paths belong to `dict`. Release with release_options, also after a failure. */
static int read_options(PyObject *dict, dw_trainer_options *options) {
    *options = (dw_trainer_options)DW_TRAINER_OPTIONS_DEFAULT;
    Py_ssize_t position = 0;
    PyObject *key = NULL, *value = NULL;
    while (PyDict_Next(dict, &position, &key, &value)) {
        const char *name = PyUnicode_AsUTF8AndSize(key, NULL);
        if (name == NULL) return 0;
        size_t i = 0, count = sizeof known_options / sizeof known_options[0];
        while (i < count && strcmp(known_options[i].name, name) != 0) i++;
        if (i == count) {
            PyErr_Format(PyExc_TypeError, "a training run has no option '%s'", name);
            return 0;
        }
        if (!read_option(&known_options[i], value, options)) return 0;
    }
    return 1;
}

/* ---- capsules -------------------------------------------------------------------------------- */

#define TOKENS "deepwell.tokens"
#define CHECKPOINTS "deepwell.checkpoints"
#define WRITER "deepwell.checkpoint_writer"
#define TENSORS "deepwell.safetensors_writer"

static void destroy_tokens(PyObject *capsule) {
    dw_token_data_close(PyCapsule_GetPointer(capsule, TOKENS));
}
static void destroy_checkpoints(PyObject *capsule) {
    dw_checkpoints_close(PyCapsule_GetPointer(capsule, CHECKPOINTS));
}
static void destroy_writer(PyObject *capsule) {
    dw_checkpoint_writer_destroy(PyCapsule_GetPointer(capsule, WRITER));
}

static void destroy_tensors(PyObject *capsule) {
    dw_safetensors_writer_destroy(PyCapsule_GetPointer(capsule, TENSORS));
}

static PyObject *done(dw_status status) {
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

static PyObject *take_json(dw_status status, char *text) {
    if (status != DW_OK) return extension_fail(status);
    PyObject *result = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    dw_text_free(text);
    return result;
}

/* ---- token files ----------------------------------------------------------------------------- */

static PyObject *tokens_open(PyObject *self, PyObject *args) {
    PyObject *dict = NULL;
    long long vocabulary = 0;
    dw_trainer_options options;
    dw_token_data *data = NULL;
    dw_status status = DW_OK;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!L:tokens_open", &PyDict_Type, &dict, &vocabulary)) return NULL;
    int fine = read_options(dict, &options);
    if (fine) {
        Py_BEGIN_ALLOW_THREADS;
        status = dw_token_data_open(&options, vocabulary, &data);
        Py_END_ALLOW_THREADS;
    }
    release_options(&options);
    if (!fine) return NULL;
    if (status != DW_OK) return extension_fail(status);
    PyObject *capsule = PyCapsule_New(data, TOKENS, destroy_tokens);
    if (capsule == NULL) dw_token_data_close(data);
    return capsule;
}

static PyObject *tokens_size(PyObject *self, PyObject *capsule) {
    (void)self;
    const dw_token_data *data = PyCapsule_GetPointer(capsule, TOKENS);
    if (data == NULL) return NULL;
    return Py_BuildValue("(LL)", (long long)dw_token_data_tokens(data),
                         (long long)dw_token_data_sequences(data));
}

/* The rows at `address` are int64 [count, width], width being the run's `sequence` + 1. */
static PyObject *tokens_read(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    long long first = 0, count = 0, width = 0;
    unsigned long long address = 0;
    dw_status status = DW_OK;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLLLK:tokens_read", &capsule, &first, &count, &width, &address))
        return NULL;
    dw_token_data *data = PyCapsule_GetPointer(capsule, TOKENS);
    if (data == NULL) return NULL;
    int64_t *rows = (int64_t *)(uintptr_t)address;
    Py_BEGIN_ALLOW_THREADS;
    for (long long i = 0; i < count && status == DW_OK; i++)
        status = dw_token_data_sample(data, first + i, rows + i * width);
    Py_END_ALLOW_THREADS;
    return done(status);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static PyObject *learning_rate(PyObject *self, PyObject *args) {
    PyObject *dict = NULL;
    long long step = 0;
    double lr = 0.0;
    dw_trainer_options options;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!L:learning_rate", &PyDict_Type, &dict, &step)) return NULL;
    int fine = read_options(dict, &options);
    dw_status status = fine ? dw_training_rate(&options, step, &lr) : DW_OK;
    release_options(&options);
    if (!fine) return NULL;
    return status == DW_OK ? PyFloat_FromDouble(lr) : extension_fail(status);
}

static PyObject *training_describe(PyObject *self, PyObject *args) {
    PyObject *dict = NULL, *capsule = NULL;
    dw_trainer_options options;
    const dw_token_data *data = NULL;
    char *text = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O:training_describe", &PyDict_Type, &dict, &capsule))
        return NULL;
    if (capsule != Py_None) {
        data = PyCapsule_GetPointer(capsule, TOKENS);
        if (data == NULL) return NULL;
    }
    int fine = read_options(dict, &options);
    dw_status status = fine ? dw_training_describe(&options, data, &text) : DW_OK;
    release_options(&options);
    return fine ? take_json(status, text) : NULL;
}

/* `flat`: address and element count of each gradient. */
static PyObject *gradient_norm(PyObject *self, PyObject *flat) {
    Py_ssize_t numbers = PySequence_Size(flat);
    (void)self;
    if (numbers < 0) return NULL;
    const uint32_t count = (uint32_t)(numbers / 2);
    const float **gradients = PyMem_Calloc((size_t)count + 1, sizeof *gradients);
    int64_t *elements = PyMem_Calloc((size_t)count + 1, sizeof *elements);
    double norm = 0.0;
    dw_status status = DW_OK;
    if (gradients == NULL || elements == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < 2 * (Py_ssize_t)count && !PyErr_Occurred(); i++) {
        PyObject *item = PySequence_GetItem(flat, i);
        if (item != NULL && i % 2 == 0) gradients[i / 2] = PyLong_AsVoidPtr(item);
        if (item != NULL && i % 2 == 1) elements[i / 2] = PyLong_AsLongLong(item);
        Py_XDECREF(item);
    }
    int fine = !PyErr_Occurred();
    if (fine) {
        Py_BEGIN_ALLOW_THREADS;
        status = dw_gradient_norm(count, gradients, elements, &norm);
        Py_END_ALLOW_THREADS;
    }
    PyMem_Free(gradients);
    PyMem_Free(elements);
    if (!fine) return NULL;
    return status == DW_OK ? PyFloat_FromDouble(norm) : extension_fail(status);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static PyObject *checkpoints_open(PyObject *self, PyObject *args) {
    PyObject *folder = NULL;
    dw_checkpoints *checkpoints = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&:checkpoints_open", PyUnicode_FSConverter, &folder)) return NULL;
    dw_status status = dw_checkpoints_open(PyBytes_AsString(folder), &checkpoints);
    Py_DECREF(folder);
    if (status != DW_OK) return extension_fail(status);
    PyObject *capsule = PyCapsule_New(checkpoints, CHECKPOINTS, destroy_checkpoints);
    if (capsule == NULL) dw_checkpoints_close(checkpoints);
    return capsule;
}

static PyObject *checkpoints_newest(PyObject *self, PyObject *capsule) {
    (void)self;
    const dw_checkpoints *checkpoints = PyCapsule_GetPointer(capsule, CHECKPOINTS);
    if (checkpoints == NULL) return NULL;
    return Py_BuildValue("(LN)", (long long)dw_checkpoints_newest(checkpoints),
                         PyUnicode_DecodeFSDefault(dw_checkpoints_newest_path(checkpoints)));
}

static PyObject *checkpoints_begin(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    long long step = 0;
    const char *folder = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "OL:checkpoints_begin", &capsule, &step)) return NULL;
    dw_checkpoints *checkpoints = PyCapsule_GetPointer(capsule, CHECKPOINTS);
    if (checkpoints == NULL) return NULL;
    dw_status status = dw_checkpoints_begin(checkpoints, step, &folder);
    return status == DW_OK ? PyUnicode_DecodeFSDefault(folder) : extension_fail(status);
}

static PyObject *checkpoints_commit(PyObject *self, PyObject *capsule) {
    dw_status status = DW_OK;
    (void)self;
    dw_checkpoints *checkpoints = PyCapsule_GetPointer(capsule, CHECKPOINTS);
    if (checkpoints == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_checkpoints_commit(checkpoints);
    Py_END_ALLOW_THREADS;
    return done(status);
}

static PyObject *checkpoints_abort(PyObject *self, PyObject *capsule) {
    (void)self;
    dw_checkpoints *checkpoints = PyCapsule_GetPointer(capsule, CHECKPOINTS);
    if (checkpoints == NULL) return NULL;
    dw_checkpoints_abort(checkpoints);
    Py_RETURN_NONE;
}

static PyObject *checkpoints_prune(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    long long keep = 0;
    dw_status status = DW_OK;
    (void)self;
    if (!PyArg_ParseTuple(args, "OL:checkpoints_prune", &capsule, &keep)) return NULL;
    dw_checkpoints *checkpoints = PyCapsule_GetPointer(capsule, CHECKPOINTS);
    if (checkpoints == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_checkpoints_prune(checkpoints, keep);
    Py_END_ALLOW_THREADS;
    return done(status);
}

/* -> (capsule, folder to write into) */
static PyObject *checkpoint_writer(PyObject *self, PyObject *args) {
    PyObject *path = NULL;
    dw_checkpoint_writer *writer = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&:checkpoint_writer", PyUnicode_FSConverter, &path)) return NULL;
    dw_status status = dw_checkpoint_writer_create(PyBytes_AsString(path), &writer);
    Py_DECREF(path);
    if (status != DW_OK) return extension_fail(status);
    PyObject *capsule = PyCapsule_New(writer, WRITER, destroy_writer);
    if (capsule == NULL) {
        dw_checkpoint_writer_destroy(writer);
        return NULL;
    }
    return Py_BuildValue("(NN)", capsule,
                         PyUnicode_DecodeFSDefault(dw_checkpoint_writer_folder(writer)));
}

static PyObject *checkpoint_writer_commit(PyObject *self, PyObject *capsule) {
    dw_status status = DW_OK;
    (void)self;
    dw_checkpoint_writer *writer = PyCapsule_GetPointer(capsule, WRITER);
    if (writer == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_checkpoint_writer_commit(writer);
    Py_END_ALLOW_THREADS;
    return done(status);
}

static PyObject *checkpoint_seal(PyObject *self, PyObject *args) {
    PyObject *folder = NULL;
    const char *run = NULL;
    long long step = 0, updates = 0, schedule_steps = 0;
    dw_status status = DW_OK;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&sLLL:checkpoint_seal", PyUnicode_FSConverter, &folder, &run,
                          &step, &updates, &schedule_steps))
        return NULL;
    const char *path = PyBytes_AsString(folder);
    Py_BEGIN_ALLOW_THREADS;
    status = dw_checkpoint_seal(path, run, step, updates, schedule_steps);
    Py_END_ALLOW_THREADS;
    Py_DECREF(folder);
    return done(status);
}

static PyObject *checkpoint_verify(PyObject *self, PyObject *args) {
    PyObject *folder = NULL;
    const char *run = NULL;
    char *text = NULL;
    dw_status status = DW_OK;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&s:checkpoint_verify", PyUnicode_FSConverter, &folder, &run))
        return NULL;
    const char *path = PyBytes_AsString(folder);
    Py_BEGIN_ALLOW_THREADS;
    status = dw_checkpoint_verify(path, run, &text);
    Py_END_ALLOW_THREADS;
    Py_DECREF(folder);
    return take_json(status, text);
}

/* ---- files of tensors ------------------------------------------------------------------------ */

/* A tensor in memory: its description, with the shape in `dims`, and its data. */
typedef struct memory_tensor {
    dw_stored_tensor tensor;
    int64_t dims[DW_STORED_MAX_RANK];
    void *data;
} memory_tensor;

static int read_dims(PyObject *shape, memory_tensor *t) {
    Py_ssize_t rank = PyTuple_Size(shape);
    if (rank < 0) return 0;
    if (rank > DW_STORED_MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "the tensor '%s' has %zd dimensions; at most %d are stored",
                     t->tensor.name, rank, DW_STORED_MAX_RANK);
        return 0;
    }
    t->tensor.rank = (int)rank;
    t->tensor.count = 1;
    for (Py_ssize_t i = 0; i < rank; i++) {
        t->dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        t->tensor.count *= t->dims[i];
    }
    t->tensor.shape = t->dims;
    return PyErr_Occurred() == NULL;
}

/* (name, dtype, shape, address) */
static int read_tensor(PyObject *entry, memory_tensor *t) {
    const char *dtype = NULL;
    PyObject *shape = NULL;
    unsigned long long address = 0;
    if (!PyArg_ParseTuple(entry, "ssO!K:tensor", &t->tensor.name, &dtype, &PyTuple_Type, &shape,
                          &address))
        return 0;
    t->data = (void *)(uintptr_t)address;
    int i = 0;
    while (i < DW_STORED_DTYPE_COUNT &&
           strcmp(dw_stored_dtype_name((dw_stored_dtype)i), dtype) != 0)
        i++;
    if (i == DW_STORED_DTYPE_COUNT) {
        PyErr_Format(PyExc_ValueError, "files of tensors have no element type '%s'", dtype);
        return 0;
    }
    t->tensor.dtype = (dw_stored_dtype)i;
    return read_dims(shape, t);
}

/* Names belong to the entries of `list`, a tuple. Free with PyMem_Free. */
static memory_tensor *read_tensors(PyObject *list, uint32_t *count) {
    *count = (uint32_t)PyTuple_Size(list);
    memory_tensor *tensors = PyMem_Calloc((size_t)*count + 1, sizeof *tensors);
    if (tensors == NULL) PyErr_NoMemory();
    for (uint32_t i = 0; tensors != NULL && i < *count; i++)
        if (!read_tensor(PyTuple_GetItem(list, (Py_ssize_t)i), &tensors[i])) {
            PyMem_Free(tensors);
            return NULL;
        }
    return tensors;
}

static size_t bytes_of(const memory_tensor *t) {
    return (size_t)t->tensor.count * dw_stored_dtype_bytes(t->tensor.dtype);
}

static dw_status write_tensors(const char *path, uint32_t count, const memory_tensor *tensors,
                               dw_stored_tensor *described) {
    dw_safetensors_writer *writer = NULL;
    for (uint32_t i = 0; i < count; i++) described[i] = tensors[i].tensor;
    dw_status status = dw_safetensors_writer_create(path, count, described, 0, NULL, &writer);
    for (uint32_t i = 0; i < count && status == DW_OK; i++)
        status = dw_safetensors_writer_put(writer, tensors[i].data, bytes_of(&tensors[i]));
    if (status == DW_OK) status = dw_safetensors_writer_commit(writer);
    dw_safetensors_writer_destroy(writer);
    return status;
}

/* safetensors_write(path, ((name, dtype, shape, address), ...)) */
static PyObject *safetensors_write(PyObject *self, PyObject *args) {
    PyObject *path = NULL, *list = NULL;
    uint32_t count = 0;
    dw_status status = DW_OK;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O!:safetensors_write", PyUnicode_FSConverter, &path,
                          &PyTuple_Type, &list))
        return NULL;
    const char *name = PyBytes_AsString(path);
    memory_tensor *tensors = read_tensors(list, &count);
    dw_stored_tensor *described =
        tensors == NULL ? NULL : PyMem_Calloc((size_t)count + 1, sizeof *described);
    if (described != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        status = write_tensors(name, count, tensors, described);
        Py_END_ALLOW_THREADS;
    } else if (tensors != NULL) {
        PyErr_NoMemory();
    }
    int fine = described != NULL;
    PyMem_Free(described);
    PyMem_Free(tensors);
    Py_DECREF(path);
    return fine ? done(status) : NULL;
}

/* safetensors_create(path, ((name, dtype, shape, 0), ...)) -> writer. The data follow in this order. */
static PyObject *safetensors_create(PyObject *self, PyObject *args) {
    PyObject *path = NULL, *list = NULL, *capsule = NULL;
    uint32_t count = 0;
    dw_safetensors_writer *writer = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O!:safetensors_create", PyUnicode_FSConverter, &path,
                          &PyTuple_Type, &list))
        return NULL;
    memory_tensor *tensors = read_tensors(list, &count);
    dw_stored_tensor *described =
        tensors == NULL ? NULL : PyMem_Calloc((size_t)count + 1, sizeof *described);
    if (tensors != NULL && described == NULL) PyErr_NoMemory();
    if (described != NULL) {
        for (uint32_t i = 0; i < count; i++) described[i] = tensors[i].tensor;
        dw_status status = dw_safetensors_writer_create(PyBytes_AsString(path), count, described, 0,
                                                        NULL, &writer);
        if (status != DW_OK)
            extension_fail(status);
        else if ((capsule = PyCapsule_New(writer, TENSORS, destroy_tensors)) == NULL)
            dw_safetensors_writer_destroy(writer);
    }
    PyMem_Free(described);
    PyMem_Free(tensors);
    Py_DECREF(path);
    return capsule;
}

/* safetensors_put(writer, address, bytes) */
static PyObject *safetensors_put(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    unsigned long long address = 0, bytes = 0;
    dw_status status = DW_OK;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKK:safetensors_put", &capsule, &address, &bytes)) return NULL;
    dw_safetensors_writer *writer = PyCapsule_GetPointer(capsule, TENSORS);
    if (writer == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_safetensors_writer_put(writer, (const void *)(uintptr_t)address, (size_t)bytes);
    Py_END_ALLOW_THREADS;
    return done(status);
}

static PyObject *safetensors_commit(PyObject *self, PyObject *capsule) {
    dw_status status = DW_OK;
    (void)self;
    dw_safetensors_writer *writer = PyCapsule_GetPointer(capsule, TENSORS);
    if (writer == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_safetensors_writer_commit(writer);
    Py_END_ALLOW_THREADS;
    return done(status);
}

/* The dtype and shape in the file must be the tensor's. Returns its number in the file, or -1 with an exception. */
static long long find_tensor(const dw_safetensors *file, const char *path, const memory_tensor *t) {
    uint32_t at = 0;
    dw_status status = dw_safetensors_find(file, t->tensor.name, &at);
    if (status != DW_OK) {
        extension_fail(status);
        return -1;
    }
    const dw_stored_tensor *stored = dw_safetensors_at(file, at);
    if (stored->dtype == t->tensor.dtype && stored->rank == t->tensor.rank &&
        memcmp(stored->shape, t->dims, (size_t)stored->rank * sizeof *t->dims) == 0)
        return at;
    PyErr_Format(PyExc_ValueError,
                 "\"%s\": \"%s\" is %s with %lld elements, but the run's tensor is %s with %lld; "
                 "the checkpoint is of another model, shape or element type",
                 path, t->tensor.name, dw_stored_dtype_name(stored->dtype),
                 (long long)stored->count, dw_stored_dtype_name(t->tensor.dtype),
                 (long long)t->tensor.count);
    return -1;
}

/* safetensors_read(path, ((name, dtype, shape, address), ...)): reads these tensors; `path` may be a folder. */
static PyObject *safetensors_read(PyObject *self, PyObject *args) {
    PyObject *path = NULL, *list = NULL;
    uint32_t count = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O!:safetensors_read", PyUnicode_FSConverter, &path,
                          &PyTuple_Type, &list))
        return NULL;
    const char *name = PyBytes_AsString(path);
    dw_safetensors *file = NULL;
    dw_status status = DW_OK;
    memory_tensor *tensors = read_tensors(list, &count);
    if (tensors != NULL) status = dw_safetensors_open(name, &file);
    if (status != DW_OK) extension_fail(status);
    for (uint32_t i = 0; file != NULL && i < count && !PyErr_Occurred(); i++) {
        long long at = find_tensor(file, name, &tensors[i]);
        if (at < 0) break;
        Py_BEGIN_ALLOW_THREADS;
        status = dw_safetensors_read_bytes(file, (uint32_t)at, 0, tensors[i].data,
                                           bytes_of(&tensors[i]));
        Py_END_ALLOW_THREADS;
        if (status != DW_OK) extension_fail(status);
    }
    dw_safetensors_close(file);
    PyMem_Free(tensors);
    Py_DECREF(path);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *shape_of(const dw_stored_tensor *tensor) {
    PyObject *shape = PyTuple_New(tensor->rank);
    for (int i = 0; shape != NULL && i < tensor->rank; i++) {
        PyObject *dim = PyLong_FromLongLong(tensor->shape[i]);
        if (dim == NULL)
            Py_CLEAR(shape);
        else
            PyTuple_SetItem(shape, i, dim);
    }
    return shape;
}

/* safetensors_list(path) -> [(name, dtype, shape), ...]; `path` may be a folder. */
static PyObject *safetensors_list(PyObject *self, PyObject *args) {
    PyObject *path = NULL;
    dw_safetensors *file = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&:safetensors_list", PyUnicode_FSConverter, &path)) return NULL;
    dw_status status = dw_safetensors_open(PyBytes_AsString(path), &file);
    Py_DECREF(path);
    if (status != DW_OK) return extension_fail(status);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < dw_safetensors_count(file); i++) {
        const dw_stored_tensor *stored = dw_safetensors_at(file, i);
        PyObject *entry = Py_BuildValue("(ssN)", stored->name, dw_stored_dtype_name(stored->dtype),
                                        shape_of(stored));
        if (entry == NULL || PyList_Append(list, entry) != 0) Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    dw_safetensors_close(file);
    return list;
}

PyMethodDef training_functions[] = {
    {"tokens_open", tokens_open, METH_VARARGS, "tokens_open(options, vocabulary) -> token files"},
    {"tokens_size", tokens_size, METH_O, "tokens_size(files) -> (tokens, sequences)"},
    {"tokens_read", tokens_read, METH_VARARGS,
     "tokens_read(files, first sample, count, width, address)"},
    {"learning_rate", learning_rate, METH_VARARGS, "learning_rate(options, step)"},
    {"training_describe", training_describe, METH_VARARGS,
     "training_describe(options, files or None) -> JSON"},
    {"gradient_norm", gradient_norm, METH_O, "gradient_norm((address, elements, ...))"},
    {"checkpoints_open", checkpoints_open, METH_VARARGS, "checkpoints_open(folder)"},
    {"checkpoints_newest", checkpoints_newest, METH_O, "checkpoints_newest(c) -> (step, path)"},
    {"checkpoints_begin", checkpoints_begin, METH_VARARGS, "checkpoints_begin(c, step) -> folder"},
    {"checkpoints_commit", checkpoints_commit, METH_O, "checkpoints_commit(c)"},
    {"checkpoints_abort", checkpoints_abort, METH_O, "checkpoints_abort(c)"},
    {"checkpoints_prune", checkpoints_prune, METH_VARARGS, "checkpoints_prune(c, keep)"},
    {"checkpoint_writer", checkpoint_writer, METH_VARARGS,
     "checkpoint_writer(path) -> (writer, folder)"},
    {"checkpoint_writer_commit", checkpoint_writer_commit, METH_O, "puts the folder in its place"},
    {"checkpoint_seal", checkpoint_seal, METH_VARARGS,
     "checkpoint_seal(folder, run, step, updates, schedule_steps)"},
    {"checkpoint_verify", checkpoint_verify, METH_VARARGS,
     "checkpoint_verify(folder, run) -> manifest"},
    {"safetensors_write", safetensors_write, METH_VARARGS, "safetensors_write(path, tensors)"},
    {"safetensors_create", safetensors_create, METH_VARARGS,
     "safetensors_create(path, tensors) -> writer"},
    {"safetensors_put", safetensors_put, METH_VARARGS, "safetensors_put(writer, address, bytes)"},
    {"safetensors_commit", safetensors_commit, METH_O, "completes the file"},
    {"safetensors_read", safetensors_read, METH_VARARGS, "safetensors_read(path, tensors)"},
    {"safetensors_list", safetensors_list, METH_VARARGS,
     "safetensors_list(path) -> [(name, dtype, shape)]"},
    {0}};
