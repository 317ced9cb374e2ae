/* The probes of `deepwell doctor`. Each probe describes one thing as a JSON value. If something is missing or could be
 * better, it appends {"what": ..., "next": ...} to `advice`. A probe never fails: unknown values are null. */
#ifndef DW_DOCTOR_H
#define DW_DOCTOR_H

#include "deepwell/machine.h"
#include <jansson.h>

/* {"model", "isa", "usable", "online", "memory_bytes", "memory_available_bytes"} */
json_t *doctor_probe_cpu(const dw_machine *machine, json_t *advice);
/* "oneDNN 2.6.3" or "portable C" */
json_t *doctor_probe_gemm(json_t *advice);
/* {"driver", "devices": [{"name", "compute_capability", "memory_bytes"}], "compiler": NVRTC or null, "none":
 * why there is no GPU, or null} */
json_t *doctor_probe_gpu(const dw_machine *machine, json_t *advice);
/* {"executable", "version", "deepwell", "torch"} of the Python beside the program, else of the one on PATH */
json_t *doctor_probe_python(json_t *advice);

void doctor_advise(json_t *advice, const char *what, const char *next);

#endif
