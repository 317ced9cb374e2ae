/* The planner's models, as dicts of their fields. */
#include "ext.h"

#include <stddef.h>

#define FIELD(name)                                                                                \
    { #name, offsetof(dw_model_sizes, name) }
static const struct {
    const char *name;
    size_t offset;
} sizes[] = {
    FIELD(layers),
    FIELD(hidden),
    FIELD(heads),
    FIELD(kv_heads),
    FIELD(head_dim),
    FIELD(ffn),
    FIELD(gated),
    FIELD(vocabulary),
    FIELD(tied),
    FIELD(positions),
    FIELD(experts),
    FIELD(top_k),
    FIELD(expert_ffn),
    FIELD(shared_ffn),
    FIELD(expert_bias),
    FIELD(dense_layers),
    FIELD(moe_every),
    FIELD(q_rank),
    FIELD(kv_rank),
    FIELD(rope_dim),
    FIELD(value_dim),
    FIELD(window),
    FIELD(window_every),
    FIELD(window_layers),
    FIELD(attention_layers),
    FIELD(lora_rank),
};

static int put(PyObject *dict, const char *name, PyObject *value) {
    int failed = value == NULL || PyDict_SetItemString(dict, name, value) != 0;
    Py_XDECREF(value);
    return failed;
}

static PyObject *dict_of(dw_status status, const dw_model_sizes *model) {
    if (status != DW_OK) return extension_fail(status);
    PyObject *dict = PyDict_New();
    int failed = dict == NULL;
    for (size_t at = 0; !failed && at < sizeof sizes / sizeof *sizes; at++) {
        int value = *(const int *)((const char *)model + sizes[at].offset);
        failed = put(dict, sizes[at].name, PyLong_FromLong(value));
    }
    if (!failed)
        failed = put(dict, "parameters", PyFloat_FromDouble(dw_model_sizes_parameters(model)));
    if (!failed)
        failed = put(
            dict, "active",
            PyFloat_FromDouble(model->active > 0 ? model->active : dw_model_sizes_active(model)));
    if (failed) Py_CLEAR(dict);
    return dict;
}

/* An absent field is 0. */
static int get(PyObject *dict, const char *name, double *value) {
    PyObject *found = PyDict_GetItemString(dict, name);
    *value = found == NULL ? 0 : PyFloat_AsDouble(found);
    return PyErr_Occurred() ? -1 : 0;
}

int planner_model_from_dict(PyObject *dict, dw_model_sizes *model) {
    *model = (dw_model_sizes){0};
    for (size_t at = 0; at < sizeof sizes / sizeof *sizes; at++) {
        double value;
        if (get(dict, sizes[at].name, &value) != 0) return -1;
        if (!(value >= 0 && value <= 1 << 28 && value == (int)value)) {
            PyErr_Format(PyExc_ValueError, "the model's %s is not a whole number from 0 to %d",
                         sizes[at].name, 1 << 28);
            return -1;
        }
        *(int *)((char *)model + sizes[at].offset) = (int)value;
    }
    return get(dict, "parameters", &model->parameters) != 0 ||
                   get(dict, "active", &model->active) != 0
               ? -1
               : 0;
}

/* planner_model("llama3-70b" or a path) -> dict */
static PyObject *planner_model(PyObject *self, PyObject *args) {
    const char *name = NULL;
    dw_model_sizes model;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:planner_model", &name)) return NULL;
    return dict_of(dw_model_sizes_find(name, &model), &model);
}

/* planner_model_parse(text of config.json) -> dict */
static PyObject *planner_model_parse(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    dw_model_sizes model;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#:planner_model_parse", &json, &bytes)) return NULL;
    return dict_of(dw_model_sizes_parse(json, (size_t)bytes, &model), &model);
}

/* planner_model_of_graph(a graph's JSON) -> dict */
static PyObject *planner_model_of_graph(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    dw_graph *graph = NULL;
    dw_model_sizes model;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#:planner_model_of_graph", &json, &bytes)) return NULL;
    dw_status status = dw_graph_from_json(json, (size_t)bytes, &graph);
    if (status == DW_OK) status = dw_model_sizes_of_graph(graph, &model);
    dw_graph_destroy(graph);
    return dict_of(status, &model);
}

static PyObject *dict_of_work(const dw_planner_work *work) {
    return Py_BuildValue("{s:d,s:d,s:d,s:d,s:d,s:d}", "gemm", work->gemm, "attention",
                         work->attention, "backward_gemm", work->backward_gemm,
                         "backward_attention", work->backward_attention, "other", work->other,
                         "bytes", work->bytes);
}

/* planner_model_work(the planner's fields, sequences, length) -> dict */
static PyObject *planner_model_work(PyObject *self, PyObject *args) {
    PyObject *fields = NULL;
    double sequences, length;
    dw_model_sizes model;
    dw_planner_work work;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!dd:planner_model_work", &PyDict_Type, &fields, &sequences,
                          &length))
        return NULL;
    if (planner_model_from_dict(fields, &model) != 0) return NULL;
    dw_status status = dw_model_sizes_check(&model);
    if (status != DW_OK) return extension_fail(status);
    dw_planner_model_work(&model, sequences, length, &work);
    return dict_of_work(&work);
}

/* planner_graph_work(a graph's JSON, sizes of its symbols, backward) -> dict */
static PyObject *planner_graph_work(PyObject *self, PyObject *args) {
    enum { SYMBOLS_MOST = 64 };
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    PyObject *given = NULL;
    int backward = 0;
    int64_t sizes[SYMBOLS_MOST] = {0};
    dw_graph *graph = NULL;
    dw_planner_work work = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "s#O!p:planner_graph_work", &json, &bytes, &PyTuple_Type, &given,
                          &backward))
        return NULL;
    dw_status status = dw_graph_from_json(json, (size_t)bytes, &graph);
    if (status != DW_OK) return extension_fail(status);
    Py_ssize_t count = PyTuple_Size(given);
    if (count != (Py_ssize_t)dw_graph_symbol_count(graph) || count > SYMBOLS_MOST) {
        PyErr_Format(PyExc_ValueError, "the graph has %u symbols; %zd sizes are given",
                     dw_graph_symbol_count(graph), count);
        dw_graph_destroy(graph);
        return NULL;
    }
    for (Py_ssize_t at = 0; at < count; at++)
        sizes[at] = PyLong_AsLongLong(PyTuple_GetItem(given, at));
    if (!PyErr_Occurred()) status = dw_planner_graph_work(graph, sizes, backward, &work);
    dw_graph_destroy(graph);
    if (PyErr_Occurred()) return NULL;
    return status == DW_OK ? dict_of_work(&work) : extension_fail(status);
}

/* planner_model_names() -> ((name, source), ...) */
static PyObject *planner_model_names(PyObject *self, PyObject *unused) {
    uint32_t count = dw_model_catalogue_count();
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    (void)self, (void)unused;
    for (uint32_t i = 0; names != NULL && i < count; i++) {
        PyObject *row =
            Py_BuildValue("(ss)", dw_model_catalogue_name(i), dw_model_catalogue_source(i));
        if (row == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SetItem(names, (Py_ssize_t)i, row);
    }
    return names;
}

PyMethodDef planner_functions[] = {
    {"planner_model", planner_model, METH_VARARGS, "planner_model(path_or_name) -> dict"},
    {"planner_model_parse", planner_model_parse, METH_VARARGS,
     "planner_model_parse(config.json's text) -> dict"},
    {"planner_model_of_graph", planner_model_of_graph, METH_VARARGS,
     "planner_model_of_graph(graph's JSON) -> dict"},
    {"planner_model_work", planner_model_work, METH_VARARGS,
     "planner_model_work(fields, sequences, length) -> dict of operations"},
    {"planner_graph_work", planner_graph_work, METH_VARARGS,
     "planner_graph_work(graph's JSON, sizes, backward) -> dict of operations"},
    {"planner_model_names", planner_model_names, METH_NOARGS, "the catalogue: (name, source)"},
    {0}};
