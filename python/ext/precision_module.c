/* The guard of a run for deepwell.Trainer (deepwell/precision_watch.h), and policies made of others. A watch is a
 * capsule; policies, samples and changes are JSON. */
#include "ext.h"
#include <stdlib.h>
#include <string.h>

#define WATCH "deepwell.precision_watch"

static void destroy_watch(PyObject *capsule) {
    dw_precision_watch_destroy(PyCapsule_GetPointer(capsule, WATCH));
}

static dw_precision_watch *watch_of(PyObject *capsule) {
    return PyCapsule_GetPointer(capsule, WATCH);
}

static PyObject *take_text(dw_status status, char *text) {
    if (status != DW_OK) return extension_fail(status);
    PyObject *result = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    dw_text_free(text);
    return result;
}

/* ---- policies -------------------------------------------------------------------------------- */

/* Writes the policy, unless its making failed, and releases it. */
static PyObject *take_policy(dw_status status, dw_precision_policy *policy) {
    char *text = NULL;
    if (status == DW_OK) status = dw_precision_policy_json(policy, &text);
    dw_precision_policy_destroy(policy);
    return take_text(status, text);
}

static PyObject *in_bf16(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    dw_precision_policy *policy = NULL, *made = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#:precision_in_bf16", &json, &bytes)) return NULL;
    dw_status status = dw_precision_policy_parse(json, (size_t)bytes, &policy);
    if (status == DW_OK) status = dw_precision_policy_in_bf16(policy, &made);
    dw_precision_policy_destroy(policy);
    return take_policy(status, made);
}

static PyObject *with_fallen_back(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    PyObject *list = NULL;
    dw_precision_policy *policy = NULL, *made = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#O!:precision_with_fallen_back", &json, &bytes, &PyTuple_Type,
                          &list))
        return NULL;
    const Py_ssize_t count = PyTuple_Size(list);
    const char **names = PyMem_Calloc((size_t)count + 1, sizeof *names);
    if (names == NULL) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++)
        names[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(list, i), NULL);
    PyObject *result = NULL;
    if (!PyErr_Occurred()) {
        dw_status status = dw_precision_policy_parse(json, (size_t)bytes, &policy);
        if (status == DW_OK)
            status = dw_precision_policy_with_fallen_back(policy, (uint32_t)count, names, &made);
        dw_precision_policy_destroy(policy);
        result = take_policy(status, made);
    }
    PyMem_Free(names);
    return result;
}

/* ---- a run ----------------------------------------------------------------------------------- */

static PyObject *watch_new(PyObject *self, PyObject *args) {
    const char *json = NULL;
    Py_ssize_t bytes = 0;
    dw_precision_policy *policy = NULL;
    dw_precision_watch *watch = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#:precision_watch", &json, &bytes)) return NULL;
    dw_status status = dw_precision_policy_parse(json, (size_t)bytes, &policy);
    if (status == DW_OK) status = dw_precision_watch_create(policy, &watch);
    dw_precision_policy_destroy(policy);
    if (status != DW_OK) return extension_fail(status);
    PyObject *capsule = PyCapsule_New(watch, WATCH, destroy_watch);
    if (capsule == NULL) dw_precision_watch_destroy(watch);
    return capsule;
}

/* Reads (watch, step, steps). */
static const dw_precision_watch *read_step(PyObject *args, const char *form, long long *step,
                                           long long *steps) {
    PyObject *capsule = NULL;
    if (!PyArg_ParseTuple(args, form, &capsule, step, steps)) return NULL;
    return watch_of(capsule);
}

static PyObject *watch_repair_begins(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    long long steps = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OL:precision_watch_repair_begins", &capsule, &steps)) return NULL;
    const dw_precision_watch *watch = watch_of(capsule);
    if (watch == NULL) return NULL;
    return PyLong_FromLongLong(dw_precision_watch_repair_begins(watch, steps));
}

static PyObject *watch_samples(PyObject *self, PyObject *args) {
    long long step = 0, steps = 0;
    (void)self;
    const dw_precision_watch *watch = read_step(args, "OLL:precision_watch_samples", &step, &steps);
    if (watch == NULL) return NULL;
    return PyBool_FromLong(dw_precision_watch_samples(watch, step, steps));
}

static PyObject *watch_phase(PyObject *self, PyObject *args) {
    long long step = 0, steps = 0;
    (void)self;
    const dw_precision_watch *watch = read_step(args, "OLL:precision_watch_phase", &step, &steps);
    if (watch == NULL) return NULL;
    return PyLong_FromLongLong(dw_precision_watch_phase(watch, step, steps));
}

static PyObject *watch_policy(PyObject *self, PyObject *args) {
    long long step = 0, steps = 0;
    char *text = NULL;
    (void)self;
    const dw_precision_watch *watch = read_step(args, "OLL:precision_watch_policy", &step, &steps);
    if (watch == NULL) return NULL;
    const dw_status status = dw_precision_watch_policy(watch, step, steps, &text);
    return take_text(status, text);
}

/* precision_operands(layers, count, address of f64[count, 30]) -> JSON */
static PyObject *operands(PyObject *self, PyObject *args) {
    const char *layers = NULL;
    unsigned count = 0;
    unsigned long long address = 0;
    char *text = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "sIK:precision_operands", &layers, &count, &address)) return NULL;
    const double *statistics = (const double *)(uintptr_t)address;
    const dw_status status = dw_precision_operands_json(layers, count, statistics, &text);
    return take_text(status, text);
}

static PyObject *watch_judge(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    long long step = 0;
    const char *sample = NULL;
    char *text = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLs:precision_watch_judge", &capsule, &step, &sample)) return NULL;
    dw_precision_watch *watch = watch_of(capsule);
    if (watch == NULL) return NULL;
    const dw_status status = dw_precision_watch_judge(watch, step, sample, &text);
    return take_text(status, text);
}

static PyObject *watch_repair(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    long long step = 0;
    char *text = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "OL:precision_watch_repair", &capsule, &step)) return NULL;
    dw_precision_watch *watch = watch_of(capsule);
    if (watch == NULL) return NULL;
    const dw_status status = dw_precision_watch_repair(watch, step, &text);
    return take_text(status, text);
}

static PyObject *change_text(PyObject *self, PyObject *args) {
    const char *change = NULL;
    char *text = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "s:precision_change_text", &change)) return NULL;
    const dw_status status = dw_precision_change_text(change, &text);
    return take_text(status, text);
}

static PyObject *watch_state(PyObject *self, PyObject *capsule) {
    char *text = NULL;
    (void)self;
    const dw_precision_watch *watch = watch_of(capsule);
    if (watch == NULL) return NULL;
    const dw_status status = dw_precision_watch_state(watch, &text);
    return take_text(status, text);
}

static PyObject *watch_restore(PyObject *self, PyObject *args) {
    PyObject *capsule = NULL;
    const char *json = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "Os:precision_watch_restore", &capsule, &json)) return NULL;
    dw_precision_watch *watch = watch_of(capsule);
    if (watch == NULL) return NULL;
    dw_status status = dw_precision_watch_restore(watch, json);
    if (status != DW_OK) return extension_fail(status);
    Py_RETURN_NONE;
}

PyMethodDef precision_functions[] = {
    {"precision_in_bf16", in_bf16, METH_VARARGS, "precision_in_bf16(policy) -> policy"},
    {"precision_with_fallen_back", with_fallen_back, METH_VARARGS,
     "precision_with_fallen_back(policy, modules) -> policy"},
    {"precision_watch", watch_new, METH_VARARGS, "precision_watch(policy) -> watch"},
    {"precision_watch_repair_begins", watch_repair_begins, METH_VARARGS,
     "precision_watch_repair_begins(watch, steps) -> step"},
    {"precision_watch_samples", watch_samples, METH_VARARGS,
     "precision_watch_samples(watch, step, steps)"},
    {"precision_watch_phase", watch_phase, METH_VARARGS,
     "precision_watch_phase(watch, step, steps)"},
    {"precision_watch_policy", watch_policy, METH_VARARGS,
     "precision_watch_policy(watch, step, steps) -> policy"},
    {"precision_operands", operands, METH_VARARGS,
     "precision_operands(layers, count, address) -> operands"},
    {"precision_watch_judge", watch_judge, METH_VARARGS,
     "precision_watch_judge(watch, step, operands) -> changes"},
    {"precision_watch_repair", watch_repair, METH_VARARGS,
     "precision_watch_repair(watch, step) -> change"},
    {"precision_change_text", change_text, METH_VARARGS, "precision_change_text(change) -> line"},
    {"precision_watch_state", watch_state, METH_O, "precision_watch_state(watch) -> members"},
    {"precision_watch_restore", watch_restore, METH_VARARGS,
     "precision_watch_restore(watch, manifest)"},
    {0}};
