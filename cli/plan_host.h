/* Plans for a machine without GPUs. */
#ifndef DW_CLI_PLAN_HOST_H
#define DW_CLI_PLAN_HOST_H

#include "deepwell/hardware.h"
#include <stdint.h>

typedef struct plan_host_request {
    const char *model; /* a name or folder, as for `deepwell train --model` */
    const dw_hardware *hardware;
    int64_t seq_len, global_batch;
    const char *precision; /* one of the engine's: "fp32" */
    double reserve;        /* bytes to leave free; negative: 5 % */
    int json;
    const char *output; /* a file for the JSON, or NULL */
} plan_host_request;

/* Prints the plan. Returns a cli_exit. */
int plan_host(const plan_host_request *request);

#endif
