/* Models from Hugging Face folders, for tests and tools. Weights are passed as addresses; failures raise exceptions. */
#include "ext.h"
#include <string.h>

/* `model`: a folder, or a name of the catalogue. */
static dw_model_config *open_config(const char *model) {
    dw_model_config *config = NULL;
    dw_status status = dw_model_config_find(model, &config);
    if (status != DW_OK) extension_fail(status);
    return config;
}

static int read_dtype(const char *name, dw_dtype *dtype) {
    for (int i = 0; i < DW_DTYPE_COUNT; i++)
        if (strcmp(dw_dtype_name((dw_dtype)i), name) == 0) {
            *dtype = (dw_dtype)i;
            return 1;
        }
    PyErr_Format(PyExc_ValueError, "there is no element type '%s'", name);
    return 0;
}

/* model_config(path or name) -> text of config.json */
static PyObject *model_config(PyObject *self, PyObject *args) {
    const char *path = NULL;
    char *text = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:model_config", &path)) return NULL;
    dw_model_config *config = open_config(path);
    if (config == NULL) return NULL;
    dw_status status = dw_model_config_json(config, &text);
    PyObject *result = status == DW_OK ? PyUnicode_FromString(text) : extension_fail(status);
    dw_text_free(text);
    dw_model_config_destroy(config);
    return result;
}

/* model_graph(path, loss=False, dropout=False, dtype="f32", labels_moved=False) -> JSON of the graph */
static PyObject *model_graph(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "loss", "dropout", "dtype", "labels_moved", NULL};
    const char *path = NULL, *dtype = "f32";
    int loss = 0;
    dw_model_graph_options options = DW_MODEL_GRAPH_OPTIONS_DEFAULT;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|ppsp:model_graph", names, &path, &loss,
                                     &options.dropout, &dtype, &options.labels_moved) ||
        !read_dtype(dtype, &options.dtype))
        return NULL;
    options.output = loss ? DW_MODEL_LOSS : DW_MODEL_LOGITS;
    dw_model_config *config = open_config(path);
    if (config == NULL) return NULL;
    dw_graph *graph = NULL;
    char *text = NULL;
    dw_status status = dw_model_graph(config, &options, &graph);
    if (status == DW_OK) status = dw_graph_to_json(graph, &text);
    PyObject *result = status == DW_OK ? PyUnicode_FromString(text) : extension_fail(status);
    dw_text_free(text);
    dw_graph_destroy(graph);
    dw_model_config_destroy(config);
    return result;
}

/* model_parameters(path) -> ((name, elements), ...) */
static PyObject *model_parameters(PyObject *self, PyObject *args) {
    const char *path = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:model_parameters", &path)) return NULL;
    dw_model_config *config = open_config(path);
    if (config == NULL) return NULL;
    uint32_t count = dw_model_parameter_count(config);
    PyObject *list = PyTuple_New((Py_ssize_t)count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        dw_model_parameter parameter;
        dw_model_parameter_at(config, i, &parameter);
        PyObject *entry = Py_BuildValue("(sL)", parameter.name, (long long)parameter.count);
        if (entry == NULL)
            Py_CLEAR(list);
        else
            PyTuple_SetItem(list, (Py_ssize_t)i, entry);
    }
    dw_model_config_destroy(config);
    return list;
}

/* Reads addresses of F32 memory, one per parameter. Free with PyMem_Free. */
static float **read_weights(PyObject *sequence, const dw_model_config *config) {
    Py_ssize_t count = PySequence_Size(sequence);
    if (count < 0) return NULL;
    if (count != (Py_ssize_t)dw_model_parameter_count(config)) {
        PyErr_Format(PyExc_ValueError, "%zd addresses for %u parameters", count,
                     dw_model_parameter_count(config));
        return NULL;
    }
    float **weights = PyMem_Calloc((size_t)count + 1, sizeof *weights);
    if (weights == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        if (item != NULL) weights[i] = PyLong_AsVoidPtr(item);
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            PyMem_Free(weights);
            return NULL;
        }
    }
    return weights;
}

/* model_load(path, addresses, allow_not_finite=False) */
static PyObject *model_load(PyObject *self, PyObject *args) {
    const char *path = NULL;
    PyObject *addresses = NULL;
    dw_model_load_options options = DW_MODEL_LOAD_OPTIONS_DEFAULT;
    (void)self;
    if (!PyArg_ParseTuple(args, "sO|p:model_load", &path, &addresses, &options.allow_not_finite))
        return NULL;
    dw_model_config *config = open_config(path);
    float **weights = config == NULL ? NULL : read_weights(addresses, config);
    dw_status status = DW_OK;
    if (weights != NULL) status = dw_model_load(config, path, &options, weights);
    int read = weights != NULL;
    PyMem_Free(weights);
    dw_model_config_destroy(config);
    if (!read) return NULL;
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

/* model_init(path, seed, addresses) */
static PyObject *model_init(PyObject *self, PyObject *args) {
    const char *path = NULL;
    unsigned long long seed = 0;
    PyObject *addresses = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "sKO:model_init", &path, &seed, &addresses)) return NULL;
    dw_model_config *config = open_config(path);
    float **weights = config == NULL ? NULL : read_weights(addresses, config);
    dw_status status = DW_OK;
    if (weights != NULL) status = dw_model_init(config, seed, weights);
    int read = weights != NULL;
    PyMem_Free(weights);
    dw_model_config_destroy(config);
    if (!read) return NULL;
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

/* model_save(path, folder, addresses, source=None, dtype="f32", shard_bytes=5e9) */
static PyObject *model_save(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "folder", "addresses", "source", "dtype", "shard_bytes", NULL};
    const char *path = NULL, *folder = NULL, *dtype = "f32";
    PyObject *addresses = NULL;
    dw_model_save_options options = DW_MODEL_SAVE_OPTIONS_DEFAULT;
    long long shard_bytes = options.shard_bytes;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ssO|zsL:model_save", names, &path, &folder,
                                     &addresses, &options.source, &dtype, &shard_bytes) ||
        !read_dtype(dtype, &options.dtype))
        return NULL;
    options.shard_bytes = shard_bytes;
    dw_model_config *config = open_config(path);
    float **weights = config == NULL ? NULL : read_weights(addresses, config);
    dw_status status = DW_OK;
    if (weights != NULL)
        status = dw_model_save(config, folder, &options, (const float *const *)weights);
    int read = weights != NULL;
    PyMem_Free(weights);
    dw_model_config_destroy(config);
    if (!read) return NULL;
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

PyMethodDef model_functions[] = {
    {"model_config", model_config, METH_VARARGS, "model_config(path or name) -> JSON"},
    {"model_graph", (PyCFunction)(void (*)(void))model_graph, METH_VARARGS | METH_KEYWORDS,
     "model_graph(path, loss=False, dropout=False, dtype='f32', labels_moved=False) -> JSON"},
    {"model_parameters", model_parameters, METH_VARARGS,
     "model_parameters(path) -> ((name, elements), ...)"},
    {"model_load", model_load, METH_VARARGS, "model_load(path, addresses, allow_not_finite=False)"},
    {"model_init", model_init, METH_VARARGS, "model_init(path, seed, addresses)"},
    {"model_save", (PyCFunction)(void (*)(void))model_save, METH_VARARGS | METH_KEYWORDS,
     "model_save(path, folder, addresses, source=None, dtype='f32', shard_bytes=5000000000)"},
    {0}};
