/* Plans for a machine without GPUs. */
#ifndef DW_CLI_PLAN_HOST_H
#define DW_CLI_PLAN_HOST_H

#include "deepwell/hardware.h"
#include <stdint.h>

typedef struct plan_host_request {
    const char *model; /* a name or a folder that `deepwell train` takes */
    const dw_hardware *hardware;
    int64_t seq_len, global_batch;
    const char *precision; /* as the engine has it: "fp32" */
    double reserve;        /* bytes; below 0: a twentieth */
    int json;
} plan_host_request;

int plan_host(const plan_host_request *request); /* a cli_exit */

#endif
