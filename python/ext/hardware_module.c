/* Hardware: this machine and profiles, as the text of their files. */
#include "ext.h"

static PyObject *take_text(dw_status status, char *text) {
    if (status != DW_OK) return extension_fail(status);
    PyObject *result = PyUnicode_FromString(text);
    dw_text_free(text);
    return result;
}

/* machine_probe(measure) -> JSON */
static PyObject *machine_probe(PyObject *self, PyObject *args) {
    int measure = 0;
    dw_machine *machine = NULL;
    char *text = NULL;
    dw_status status;
    (void)self;
    if (!PyArg_ParseTuple(args, "p:machine_probe", &measure)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = dw_machine_probe(measure, &machine);
    if (status == DW_OK) status = dw_machine_json(machine, &text);
    dw_machine_destroy(machine);
    Py_END_ALLOW_THREADS;
    return take_text(status, text);
}

static PyObject *text_of(dw_status status, dw_hardware *hardware) {
    char *text = NULL;
    if (status == DW_OK) status = dw_hardware_json(hardware, &text);
    dw_hardware_destroy(hardware);
    return take_text(status, text);
}

/* hardware_named("h100:64") -> JSON */
static PyObject *hardware_named(PyObject *self, PyObject *args) {
    const char *name = NULL;
    dw_hardware *hardware = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:hardware_named", &name)) return NULL;
    dw_status status = dw_hardware_named(name, &hardware);
    return text_of(status, hardware);
}

/* hardware_parse(JSON) -> JSON, checked and completed from its profile */
static PyObject *hardware_parse(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    dw_hardware *hardware = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#:hardware_parse", &json, &bytes)) return NULL;
    dw_status status = dw_hardware_parse(json, (size_t)bytes, &hardware);
    return text_of(status, hardware);
}

/* hardware_names() -> ("a100-40", ...) */
static PyObject *hardware_names(PyObject *self, PyObject *unused) {
    uint32_t count = dw_hardware_catalogue_count();
    PyObject *names = PyTuple_New((Py_ssize_t)count);
    (void)self, (void)unused;
    for (uint32_t i = 0; names != NULL && i < count; i++) {
        PyObject *name = PyUnicode_FromString(dw_hardware_catalogue_name(i));
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SetItem(names, (Py_ssize_t)i, name);
    }
    return names;
}

PyMethodDef hardware_functions[] = {
    {"machine_probe", machine_probe, METH_VARARGS, "machine_probe(measure) -> JSON"},
    {"hardware_named", hardware_named, METH_VARARGS, "hardware_named(name) -> JSON"},
    {"hardware_parse", hardware_parse, METH_VARARGS, "hardware_parse(json) -> JSON"},
    {"hardware_names", hardware_names, METH_NOARGS, "names of the catalogue"},
    {0}};
