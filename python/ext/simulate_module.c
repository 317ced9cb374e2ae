/* Dry runs: from the text of a plan to figures. */
#include "ext.h"

/* dryrun(text of the plan, trace, report, title) -> text of the figures; paths may be None */
static PyObject *dryrun(PyObject *self, PyObject *args) {
    const char *json = NULL, *trace = NULL, *report = NULL, *title = NULL;
    Py_ssize_t bytes = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "s#zzz:dryrun", &json, &bytes, &trace, &report, &title))
        return NULL;
    dw_autoplan *plan = NULL;
    dw_simulation *simulation = NULL;
    char *text = NULL;
    dw_status status = dw_autoplan_parse(json, (size_t)bytes, &plan);
    if (status == DW_OK)
        status = dw_simulate(&plan->model, plan->hardware, &plan->layout, &simulation);
    if (status == DW_OK && trace) status = dw_simulation_trace(simulation, trace);
    if (status == DW_OK && report)
        status = dw_simulation_report(simulation, title ? title : plan->model_name, report);
    if (status == DW_OK) status = dw_simulation_json(simulation, &text);
    PyObject *result = status == DW_OK ? PyUnicode_FromString(text) : extension_fail(status);
    dw_text_free(text);
    dw_simulation_destroy(simulation);
    dw_autoplan_destroy(plan);
    return result;
}

PyMethodDef simulate_functions[] = {{"dryrun", dryrun, METH_VARARGS, NULL}, {0}};
