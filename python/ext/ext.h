/* Declarations shared by the files of the extension. */
#ifndef DW_PYTHON_EXT_H
#define DW_PYTHON_EXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "deepwell/deepwell.h"

/* Raises deepwell._deepwell.Error with the last message; returns NULL. */
PyObject *extension_fail(dw_status status);

/* Reads a model from the dict of its fields, as made by planner_model. Returns 0, or -1 with an exception
 * (planner.c). */
int planner_model_from_dict(PyObject *dict, dw_model_sizes *model);

extern PyMethodDef adamw_functions[];     /* adamw_module.c */
extern PyMethodDef artifact_functions[];  /* artifact_module.c */
extern PyMethodDef autoplan_functions[];  /* autoplan.c */
extern PyMethodDef hardware_functions[];  /* hardware_module.c */
extern PyMethodDef model_functions[];     /* model.c */
extern PyMethodDef number_functions[];    /* number.c */
extern PyMethodDef planner_functions[];   /* planner.c */
extern PyMethodDef gemm_functions[];      /* gemm_module.c */
extern PyMethodDef precision_functions[]; /* precision_module.c */
extern PyMethodDef simulate_functions[];  /* simulate_module.c */
extern PyMethodDef training_functions[];  /* training_module.c */

#endif
