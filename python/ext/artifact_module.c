/* Artifacts and sessions, as capsules. deepwell/export.py wraps them. */
#include "ext.h"
#include <string.h>

#define ARTIFACT_NAME "deepwell.artifact"
#define SESSION_NAME "deepwell.session"

static void close_artifact(PyObject *capsule) {
    dw_artifact_close(PyCapsule_GetPointer(capsule, ARTIFACT_NAME));
}

static void close_session(PyObject *capsule) {
    dw_session_destroy(PyCapsule_GetPointer(capsule, SESSION_NAME));
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule)); /* the artifact */
}

/* ---- lists of ids -------------------------------------------------------------------------- */

/* Reads a sequence of integers. Free with PyMem_Free. */
static int64_t *read_ids(PyObject *sequence, size_t *count) {
    Py_ssize_t length = PySequence_Size(sequence);
    if (length < 0) return NULL;
    int64_t *ids = PyMem_Calloc((size_t)length + 1, sizeof *ids);
    if (ids == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        if (item != NULL) ids[i] = PyLong_AsLongLong(item);
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            PyMem_Free(ids);
            return NULL;
        }
    }
    *count = (size_t)length;
    return ids;
}

static PyObject *list_of(const int64_t *ids, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *id = PyLong_FromLongLong(ids[i]);
        if (id == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, id);
    }
    return list;
}

/* ---- writing ------------------------------------------------------------------------------- */

/* artifact_export(folder, path, dtype=None, tokenizer=None, precision=None) */
static PyObject *artifact_export(PyObject *self, PyObject *args) {
    const char *folder = NULL, *path = NULL;
    dw_artifact_options options = DW_ARTIFACT_OPTIONS_DEFAULT;
    Py_ssize_t bytes = 0;
    dw_status status;
    (void)self;
    if (!PyArg_ParseTuple(args, "ss|zz#z:artifact_export", &folder, &path, &options.dtype,
                          &options.tokenizer, &bytes, &options.precision))
        return NULL;
    options.tokenizer_bytes = (size_t)bytes;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_artifact_export(folder, path, &options);
    Py_END_ALLOW_THREADS;
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

/* artifact_parameters(config) -> [(name, shape), ...]: of a model with this text of a config.json */
static PyObject *artifact_parameters(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    dw_model_config *config = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#:artifact_parameters", &json, &bytes)) return NULL;
    dw_status status = dw_model_config_parse(json, (size_t)bytes, &config);
    if (status != DW_OK) return extension_fail(status);
    uint32_t count = dw_model_parameter_count(config);
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        dw_model_parameter p;
        dw_model_parameter_at(config, i, &p);
        PyObject *entry = Py_BuildValue("(sN)", p.name, list_of(p.shape, (size_t)p.rank));
        if (entry == NULL)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, entry);
    }
    dw_model_config_destroy(config);
    return list;
}

/* artifact_write(config, addresses, path, dtype, tokenizer, generation, precision): F32 weights at the addresses, in
 * the order of artifact_parameters */
static PyObject *artifact_write(PyObject *self, PyObject *args) {
    const char *json = NULL, *path = NULL;
    PyObject *addresses = NULL;
    dw_artifact_options options = DW_ARTIFACT_OPTIONS_DEFAULT;
    Py_ssize_t bytes = 0, tokenizer = 0, generation = 0;
    dw_model_config *config = NULL;
    size_t count = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#Oszz#z#z:artifact_write", &json, &bytes, &addresses, &path,
                          &options.dtype, &options.tokenizer, &tokenizer, &options.generation,
                          &generation, &options.precision))
        return NULL;
    options.tokenizer_bytes = (size_t)tokenizer;
    options.generation_bytes = (size_t)generation;
    int64_t *weights = read_ids(addresses, &count);
    if (weights == NULL) return NULL;
    dw_status status = dw_model_config_parse(json, (size_t)bytes, &config);
    if (status == DW_OK && count != dw_model_parameter_count(config)) {
        PyErr_Format(PyExc_ValueError, "%zu addresses for %u parameters", count,
                     dw_model_parameter_count(config));
    } else if (status == DW_OK) {
        const float **pointers = PyMem_Calloc(count + 1, sizeof *pointers);
        if (pointers == NULL) {
            PyErr_NoMemory();
        } else {
            for (size_t i = 0; i < count; i++) pointers[i] = (const float *)(intptr_t)weights[i];
            Py_BEGIN_ALLOW_THREADS;
            status = dw_artifact_write(config, path, &options, pointers);
            Py_END_ALLOW_THREADS;
            PyMem_Free(pointers);
        }
    }
    dw_model_config_destroy(config);
    PyMem_Free(weights);
    if (PyErr_Occurred()) return NULL;
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

/* ---- reading ------------------------------------------------------------------------------- */

static PyObject *artifact_open(PyObject *self, PyObject *args) {
    const char *path = NULL;
    dw_artifact *artifact = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:artifact_open", &path)) return NULL;
    dw_status status = dw_artifact_open(path, &artifact);
    if (status != DW_OK) return extension_fail(status);
    PyObject *capsule = PyCapsule_New(artifact, ARTIFACT_NAME, close_artifact);
    if (capsule == NULL) dw_artifact_close(artifact);
    return capsule;
}

/* artifact_info(artifact) -> {config, dtype, precision, vocabulary, end_tokens, has_tokenizer} */
static PyObject *artifact_info(PyObject *self, PyObject *capsule) {
    dw_artifact_info info;
    (void)self;
    const dw_artifact *artifact = PyCapsule_GetPointer(capsule, ARTIFACT_NAME);
    if (artifact == NULL) return NULL;
    dw_artifact_describe(artifact, &info);
    return Py_BuildValue("{s:s, s:s, s:s, s:i, s:N, s:O}", "config", info.config, "dtype",
                         info.dtype, "precision", info.precision, "vocabulary",
                         info.model.sizes.vocabulary, "end_tokens",
                         list_of(info.end_tokens, info.end_count), "has_tokenizer",
                         dw_artifact_tokenizer(artifact) ? Py_True : Py_False);
}

static const dw_tokenizer *tokenizer_of(PyObject *capsule) {
    const dw_artifact *artifact = PyCapsule_GetPointer(capsule, ARTIFACT_NAME);
    if (artifact == NULL) return NULL;
    const dw_tokenizer *tokenizer = dw_artifact_tokenizer(artifact);
    if (tokenizer == NULL)
        PyErr_SetString(PyExc_ValueError,
                        "the artifact has no tokenizer: pass ids instead of text");
    return tokenizer;
}

/* artifact_encode(artifact, bytes, special) -> ids */
static PyObject *artifact_encode(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    const char *text = NULL;
    Py_ssize_t bytes = 0;
    int special = 1;
    int64_t *ids = NULL;
    size_t count = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy#p:artifact_encode", &capsule, &text, &bytes, &special))
        return NULL;
    const dw_tokenizer *tokenizer = tokenizer_of(capsule);
    if (tokenizer == NULL) return NULL;
    dw_status status = dw_tokenizer_encode(tokenizer, text, (size_t)bytes, special, &ids, &count);
    if (status != DW_OK) return extension_fail(status);
    PyObject *list = list_of(ids, count);
    dw_tokens_free(ids);
    return list;
}

/* artifact_decode(artifact, ids, skip_special) -> bytes */
static PyObject *artifact_decode(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL, *sequence = NULL;
    int skip = 1;
    char *text = NULL;
    size_t count = 0, bytes = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOp:artifact_decode", &capsule, &sequence, &skip)) return NULL;
    const dw_tokenizer *tokenizer = tokenizer_of(capsule);
    int64_t *ids = tokenizer ? read_ids(sequence, &count) : NULL;
    if (ids == NULL) return NULL;
    dw_status status = dw_tokenizer_decode(tokenizer, ids, count, skip, &text, &bytes);
    PyMem_Free(ids);
    if (status != DW_OK) return extension_fail(status);
    PyObject *result = PyBytes_FromStringAndSize(text, (Py_ssize_t)bytes);
    dw_text_free(text);
    return result;
}

/* ---- sessions ------------------------------------------------------------------------------ */

/* session_create(artifact, device, dtype) */
static PyObject *session_create(PyObject *self, PyObject *args) {
    PyObject *owner = NULL;
    const char *device = NULL;
    dw_session_options options = DW_SESSION_OPTIONS_DEFAULT;
    dw_session *session = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "Osz:session_create", &owner, &device, &options.dtype)) return NULL;
    const dw_artifact *artifact = PyCapsule_GetPointer(owner, ARTIFACT_NAME);
    if (artifact == NULL) return NULL;
    dw_status status = dw_device_find(device, &options.device);
    if (status == DW_OK) {
        Py_BEGIN_ALLOW_THREADS;
        status = dw_session_create(artifact, &options, &session);
        Py_END_ALLOW_THREADS;
    }
    if (status != DW_OK) return extension_fail(status);
    PyObject *capsule = PyCapsule_New(session, SESSION_NAME, close_session);
    if (capsule == NULL) {
        dw_session_destroy(session);
        return NULL;
    }
    Py_INCREF(owner);
    PyCapsule_SetContext(capsule, owner);
    return capsule;
}

typedef struct receiver {
    PyObject *list, *callback; /* callback: NULL if there is none */
} receiver;

/* Ends generation if the callback returns a true value or raises, or if a signal's handler raises. */
static int receive(void *context, int64_t id) {
    receiver *r = context;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *item = PyLong_FromLongLong(id);
    int ends = item == NULL || PyList_Append(r->list, item) != 0 || PyErr_CheckSignals() != 0;
    if (!ends && r->callback != NULL) {
        PyObject *result = PyObject_CallFunctionObjArgs(r->callback, item, NULL);
        ends = result == NULL || PyObject_IsTrue(result) != 0;
        Py_XDECREF(result);
    }
    Py_XDECREF(item);
    PyGILState_Release(gil);
    return ends;
}

/* session_generate(session, ids, max_tokens, temperature, top_k, top_p, seed, ignore_end, callback) -> new ids. The
 * session's earlier tokens are forgotten. */
static PyObject *session_generate(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL, *prompt = NULL, *callback = NULL;
    dw_generate_options options = DW_GENERATE_OPTIONS_DEFAULT;
    long long max_tokens, top_k;
    unsigned long long seed;
    size_t count = 0;
    dw_status status;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOLdLdKpO:session_generate", &capsule, &prompt, &max_tokens,
                          &options.sampling.temperature, &top_k, &options.sampling.top_p, &seed,
                          &options.ignore_end, &callback))
        return NULL;
    dw_session *session = PyCapsule_GetPointer(capsule, SESSION_NAME);
    int64_t *ids = session ? read_ids(prompt, &count) : NULL;
    if (ids == NULL) return NULL;
    receiver r = {PyList_New(0), callback == Py_None ? NULL : callback};
    if (r.list == NULL) {
        PyMem_Free(ids);
        return NULL;
    }
    options.max_tokens = max_tokens;
    options.sampling.top_k = top_k;
    options.sampling.seed = seed;
    options.on_token = receive;
    options.context = &r;
    dw_session_reset(session);
    Py_BEGIN_ALLOW_THREADS;
    status = dw_session_generate(session, ids, count, &options, NULL);
    Py_END_ALLOW_THREADS;
    PyMem_Free(ids);
    if (!PyErr_Occurred() && status == DW_OK) return r.list;
    Py_DECREF(r.list);
    return PyErr_Occurred() ? NULL : extension_fail(status);
}

/* session_logits(session, ids, address): writes [ids, vocabulary] F32. The session's earlier tokens are forgotten. */
static PyObject *session_logits(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL, *sequence = NULL, *address = NULL;
    size_t count = 0;
    dw_status status;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO:session_logits", &capsule, &sequence, &address)) return NULL;
    dw_session *session = PyCapsule_GetPointer(capsule, SESSION_NAME);
    if (session == NULL) return NULL;
    float *logits = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    int64_t *ids = read_ids(sequence, &count);
    if (ids == NULL) return NULL;
    dw_session_reset(session);
    Py_BEGIN_ALLOW_THREADS;
    status = dw_session_append(session, ids, count, 1, logits);
    Py_END_ALLOW_THREADS;
    PyMem_Free(ids);
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

PyMethodDef artifact_functions[] = {
    {"artifact_export", artifact_export, METH_VARARGS, NULL},
    {"artifact_parameters", artifact_parameters, METH_VARARGS, NULL},
    {"artifact_write", artifact_write, METH_VARARGS, NULL},
    {"artifact_open", artifact_open, METH_VARARGS, NULL},
    {"artifact_info", artifact_info, METH_O, NULL},
    {"artifact_encode", artifact_encode, METH_VARARGS, NULL},
    {"artifact_decode", artifact_decode, METH_VARARGS, NULL},
    {"session_create", session_create, METH_VARARGS, NULL},
    {"session_generate", session_generate, METH_VARARGS, NULL},
    {"session_logits", session_logits, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
