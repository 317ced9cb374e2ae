/* Plans, as the text of their files. */
#include "ext.h"

/* Returns a plan's JSON and destroys the plan. */
static PyObject *take_plan(dw_status status, dw_autoplan *plan) {
    char *text = NULL;
    if (status == DW_OK) status = dw_autoplan_json(plan, &text);
    dw_autoplan_destroy(plan);
    if (status != DW_OK) return extension_fail(status);
    PyObject *result = PyUnicode_FromString(text);
    dw_text_free(text);
    return result;
}

/* Returns the tuple's strings, borrowed, or NULL with an exception. */
static const char **texts_of(PyObject *tuple) {
    Py_ssize_t count = PyTuple_Size(tuple);
    const char **texts = PyMem_Malloc(((size_t)count + 1) * sizeof *texts);
    if (texts == NULL) return (const char **)PyErr_NoMemory();
    for (Py_ssize_t at = 0; at < count; at++) {
        texts[at] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(tuple, at), NULL);
        if (texts[at] == NULL) {
            PyMem_Free(texts);
            return NULL;
        }
    }
    return texts;
}

/* autoplan_search(name, model's fields, hardware's JSON, seq_len, global_batch, precision or -1, constraints,
 * reserve, what_ifs, bold) -> JSON */
static PyObject *autoplan_search(PyObject *self, PyObject *args) {
    PyObject *fields = NULL, *constraints = NULL;
    const char *hardware_text = NULL;
    Py_ssize_t hardware_bytes = 0;
    long long seq_len = 0, global_batch = 0;
    int precision = -1, what_ifs = 0, bold = 0;
    dw_model_sizes model;
    dw_hardware *hardware = NULL;
    dw_autoplan *plan = NULL;
    dw_autoplan_request request;
    (void)self;
    dw_autoplan_request_default(&request);
    if (!PyArg_ParseTuple(args, "sO!s#LLiO!dpp:autoplan_search", &request.model_name, &PyDict_Type,
                          &fields, &hardware_text, &hardware_bytes, &seq_len, &global_batch,
                          &precision, &PyTuple_Type, &constraints, &request.reserve, &what_ifs,
                          &bold))
        return NULL;
    if (planner_model_from_dict(fields, &model) != 0) return NULL;
    const char **texts = texts_of(constraints);
    if (texts == NULL) return NULL;
    request.model = &model;
    request.seq_len = seq_len;
    request.global_batch = global_batch;
    request.precision = precision < 0 ? DW_SCHEME_COUNT : (dw_scheme)precision;
    request.constraints = texts;
    request.constraint_count = (size_t)PyTuple_Size(constraints);
    request.what_ifs = what_ifs;
    request.bold = bold;
    dw_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_hardware_parse(hardware_text, (size_t)hardware_bytes, &hardware);
    request.hardware = hardware;
    if (status == DW_OK) status = dw_autoplan_search(&request, &plan);
    if (status == DW_OK) status = dw_autoplan_bind(plan);
    dw_hardware_destroy(hardware);
    Py_END_ALLOW_THREADS;
    PyMem_Free(texts);
    return take_plan(status, plan);
}

/* autoplan_parse(JSON) -> JSON, checked, with its prediction */
static PyObject *autoplan_parse(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    dw_autoplan *plan = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#:autoplan_parse", &json, &bytes)) return NULL;
    dw_status status = dw_autoplan_parse(json, (size_t)bytes, &plan);
    return take_plan(status, plan);
}

/* autoplan_text(JSON, explain) -> text */
static PyObject *autoplan_text(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    int explain = 0;
    dw_autoplan *plan = NULL;
    char *text = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#p:autoplan_text", &json, &bytes, &explain)) return NULL;
    dw_status status = dw_autoplan_parse(json, (size_t)bytes, &plan);
    if (status == DW_OK) status = dw_autoplan_text(plan, explain, &text);
    dw_autoplan_destroy(plan);
    if (status != DW_OK) return extension_fail(status);
    PyObject *result = PyUnicode_FromString(text);
    dw_text_free(text);
    return result;
}

/* autoplan_precisions() -> ("bf16", ...): names of schemes, indexed by value; the search refuses those whose cost it
 * cannot predict */
static PyObject *autoplan_precisions(PyObject *self, PyObject *unused) {
    PyObject *names = PyTuple_New(DW_SCHEME_COUNT);
    (void)self, (void)unused;
    for (int at = 0; names != NULL && at < DW_SCHEME_COUNT; at++) {
        PyObject *name = PyUnicode_FromString(dw_scheme_name((dw_scheme)at));
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SetItem(names, at, name);
    }
    return names;
}

PyMethodDef autoplan_functions[] = {
    {"autoplan_search", autoplan_search, METH_VARARGS, "autoplan_search(...) -> JSON"},
    {"autoplan_parse", autoplan_parse, METH_VARARGS, "autoplan_parse(json) -> JSON"},
    {"autoplan_text", autoplan_text, METH_VARARGS, "autoplan_text(json, explain) -> text"},
    {"autoplan_precisions", autoplan_precisions, METH_NOARGS, "names of schemes"},
    {0}};
