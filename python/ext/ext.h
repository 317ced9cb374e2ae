/* What the files of the extension share. */
#ifndef DW_PYTHON_EXT_H
#define DW_PYTHON_EXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "deepwell/deepwell.h"

/* Raises deepwell._deepwell.Error with the last message; returns NULL. */
PyObject *extension_fail(dw_status status);

extern PyMethodDef hardware_functions[]; /* hardware.c */
extern PyMethodDef model_functions[];    /* model.c */
extern PyMethodDef number_functions[];   /* number.c */
extern PyMethodDef planner_functions[];  /* planner.c */
extern PyMethodDef simulate_functions[]; /* simulate.c */

#endif
