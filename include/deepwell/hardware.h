/* The hardware that a plan is made for: GPUs, their number, and how they are connected.
 *
 *     dw_hardware *hardware;
 *     dw_hardware_named("h100:16384", &hardware);       // a profile of published figures; also "gb200", "b200:64"
 *     dw_hardware_load("cluster.json", &hardware);      // or a file, written by dw_hardware_json or by hand
 *     dw_hardware_probe(0, &hardware);                  // or this machine
 *     dw_hardware_destroy(hardware);
 *
 * A description is a set of figures, each with its source. Units are SI: bytes, seconds, hertz, operations per second.
 * A bandwidth is that of one GPU in one direction. docs/hardware.md lists the file's fields.
 */
#ifndef DEEPWELL_HARDWARE_H
#define DEEPWELL_HARDWARE_H

#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where a figure comes from. An absent figure has value 0 and DW_FIGURE_UNKNOWN. A measured rate or bandwidth is what a
 * program reached on the machine. Other rates and bandwidths are peaks, of which programs reach a fraction. */
typedef enum dw_figure_kind {
    DW_FIGURE_UNKNOWN,
    DW_FIGURE_PUBLISHED, /* in a document of the vendor or operator */
    DW_FIGURE_READ,      /* from the driver, NVML or the operating system */
    DW_FIGURE_MEASURED,  /* timed on the machine */
    DW_FIGURE_ESTIMATED, /* derived from other figures, a similar device or a secondary document */
    DW_FIGURE_GIVEN      /* by the author of the file */
} dw_figure_kind;

typedef struct dw_figure {
    double value;
    dw_figure_kind kind;
    const char *source; /* belongs to the description; never NULL, "" if there is nothing to add */
} dw_figure;

/* Rates of dense GEMMs, by the dtype of the operands. */
typedef enum dw_rate {
    DW_RATE_FP32,
    DW_RATE_TF32,
    DW_RATE_BF16, /* and FP16 */
    DW_RATE_FP8,  /* scales per tensor, or block scales applied outside of the GEMM */
    DW_RATE_MXFP8,
    DW_RATE_FP4, /* MXFP4, NVFP4 */
    DW_RATES
} dw_rate;
DW_API const char *dw_rate_name(dw_rate rate); /* "bf16" */

/* The other figures of a GPU. */
#define DW_HARDWARE_FIGURES(X)                                                                     \
    X(sm_count)                                                                                    \
    X(clock)                 /* hertz, of the SMs, sustained boost */                              \
    X(power)                 /* watts */                                                           \
    X(memory)                /* bytes that a program may allocate: nvidia-smi's total */           \
    X(memory_bandwidth)      /* of the GPU's own memory */                                         \
    X(cache)                 /* bytes of L2 cache */                                               \
    X(host_bandwidth)        /* between one GPU and its host's memory */                           \
    X(host_memory)           /* bytes per GPU */                                                   \
    X(host_memory_bandwidth) /* of the host's memory, reads plus writes, per GPU */                \
    X(link_bandwidth)        /* NVLink (PCIe if there is none) within a domain */                  \
    X(link_latency)          /* seconds for a message between two GPUs of a domain */              \
    X(network_bandwidth)     /* between nodes, per GPU */                                          \
    X(network_latency)

typedef struct dw_hardware {
    const char *name;         /* "h100": the profile's, or the GPU's own */
    const char *architecture; /* "sm_90a" */
    int capability;           /* 90 */
    int gpus;                 /* total; 0: a machine without GPUs */
    int gpus_per_node;        /* under one operating system */
    int gpus_per_domain; /* joined by NVLink at full rate: 8, 72 in an NVL72 rack; 1: PCIe only */
    int link_version;    /* of NVLink; 0: none */
    int rails;           /* network ports of a node that connect GPUs; 0: not known */
    const char *network; /* text for readers: "InfiniBand NDR, 8 rails" */
    dw_figure rate[DW_RATES]; /* value 0: the GPU does not support the dtype */
#define DW_HARDWARE_FIGURE(name) dw_figure name;
    DW_HARDWARE_FIGURES(DW_HARDWARE_FIGURE)
#undef DW_HARDWARE_FIGURE
} dw_hardware;

/* `text`: "NAME" or "NAME:COUNT", a profile of the catalogue in either case. Without COUNT: one node, or one NVLink
 * rack. COUNT above one node must be a whole number of nodes. DW_NOT_FOUND lists the names. DW_INVALID_ARGUMENT: COUNT
 * is not a number from 1 to DW_HARDWARE_MOST_GPUS, or does not follow this rule. */
#define DW_HARDWARE_MOST_GPUS 1048576
DW_API dw_status dw_hardware_named(const char *text, dw_hardware **hardware);
DW_API uint32_t dw_hardware_catalogue_count(void);
DW_API const char *dw_hardware_catalogue_name(uint32_t index);

/* Reads a description from JSON text or a file: {"profile": "h100", "gpus": 256, "network_bandwidth": 5e10, ...}.
 * Absent fields have the profile's values; without a profile, all fields that a plan needs must be present. DW_PARSE:
 * not JSON, or a field of the wrong kind. DW_INVALID_ARGUMENT: a figure is out of range, or two contradict each other.
 * The message names the field. */
DW_API dw_status dw_hardware_parse(const char *json, size_t bytes, dw_hardware **hardware);
DW_API dw_status dw_hardware_load(const char *path, dw_hardware **hardware);

/* Describes this machine (deepwell/machine.h has the details). Works without a GPU: `gpus` is 0. `measure` 1 times
 * copies, GEMMs and, if NCCL is found, collectives; it takes some seconds per GPU. 0 measures nothing.
 * DW_INVALID_ARGUMENT: a figure that a plan needs cannot be read. */
DW_API dw_status dw_hardware_probe(int measure, dw_hardware **hardware);

/* Resolves a command line's name: "auto" for this machine, the path of an existing file, or a name of the catalogue.
 * Fails as the function for it does. */
DW_API dw_status dw_hardware_open(const char *text, dw_hardware **hardware);

/* Writes the description as a JSON file for dw_hardware_load, each figure with kind and source. Free *text with
 * dw_text_free. */
DW_API dw_status dw_hardware_json(const dw_hardware *hardware, char **text);

/* Makes a copy with another number of GPUs. Destroy *copy too. DW_INVALID_ARGUMENT: `gpus` is not from 1 to
 * DW_HARDWARE_MOST_GPUS, or is more than a node and not a whole number of nodes. */
DW_API dw_status dw_hardware_with_gpus(const dw_hardware *hardware, int gpus, dw_hardware **copy);
DW_API void dw_hardware_destroy(dw_hardware *hardware); /* may be NULL */

#ifdef __cplusplus
}
#endif
#endif
