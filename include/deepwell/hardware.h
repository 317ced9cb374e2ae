/* What a plan is made for: GPUs, how they are connected, how many there are.
 *
 *     dw_hardware_named     "h100:16384", "gb200", "b200:64": profiles of published figures
 *     dw_hardware_load      a file, written by dw_hardware_json or by hand
 *     dw_hardware_probe     this machine
 *
 * A description is a set of figures, each with where it comes from. Units are SI throughout: bytes, seconds, hertz,
 * operations per second; bandwidths are of one GPU and one direction. docs/hardware.md has the file's fields.
 */
#ifndef DEEPWELL_HARDWARE_H
#define DEEPWELL_HARDWARE_H

#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where a figure comes from. An absent one is 0 and DW_FIGURE_UNKNOWN. A measured rate or bandwidth is what was reached
 * on the machine; the others are peaks, of which programs reach a part. */
typedef enum dw_figure_kind {
    DW_FIGURE_UNKNOWN,
    DW_FIGURE_PUBLISHED, /* the vendor's or operator's document */
    DW_FIGURE_READ,      /* the driver, NVML or the operating system says so */
    DW_FIGURE_MEASURED,  /* timed on the machine */
    DW_FIGURE_ESTIMATED, /* derived from other figures or a similar device, or a document not at hand */
    DW_FIGURE_GIVEN      /* by whoever wrote the file */
} dw_figure_kind;

typedef struct dw_figure {
    double value;
    dw_figure_kind kind;
    const char
        *source; /* belongs to the description; never NULL ("" where nothing more is known) */
} dw_figure;

/* Rates of dense matrix products, by the type of the factors. */
typedef enum dw_rate {
    DW_RATE_FP32,
    DW_RATE_TF32,
    DW_RATE_BF16, /* and FP16 */
    DW_RATE_FP8,  /* per-tensor or block scales outside of the product */
    DW_RATE_MXFP8,
    DW_RATE_FP4, /* MXFP4, NVFP4 */
    DW_RATES
} dw_rate;
DW_API const char *dw_rate_name(dw_rate rate); /* "bf16" */

/* One figure each. */
#define DW_HARDWARE_FIGURES(X)                                                                     \
    X(sm_count)                                                                                    \
    X(clock)            /* hertz, of the processors, sustained boost */                            \
    X(power)            /* watts */                                                                \
    X(memory)           /* bytes that a program may allocate: what nvidia-smi calls the total */   \
    X(memory_bandwidth) /* of the GPU's own memory */                                              \
    X(cache)            /* bytes of second-level cache */                                          \
    X(host_bandwidth)   /* between one GPU and its host's memory */                                \
    X(host_memory)      /* bytes for each GPU */                                                   \
    X(host_memory_bandwidth) /* of the host's memory, reads and writes together, for each GPU */   \
    X(link_bandwidth)        /* NVLink (or PCIe, where there is none) within a domain */           \
    X(link_latency)          /* seconds for a message between two GPUs of a domain */              \
    X(network_bandwidth)     /* between nodes, for each GPU */                                     \
    X(network_latency)

typedef struct dw_hardware {
    const char *name;         /* "h100": the profile's, or the GPU's own */
    const char *architecture; /* "sm_90a" */
    int capability;           /* 90 */
    int gpus;                 /* in all; 0: a machine without */
    int gpus_per_node;        /* under one operating system */
    int gpus_per_domain; /* joined by NVLink at full rate: 8, or 72 in an NVL72 rack; 1: by PCIe alone */
    int link_version;         /* of NVLink; 0: none */
    int rails;                /* network ports of a node that join GPUs; 0: not known */
    const char *network;      /* "InfiniBand NDR, 8 rails": a description */
    dw_figure rate[DW_RATES]; /* value 0: the GPU has no such product */
#define DW_HARDWARE_FIGURE(name) dw_figure name;
    DW_HARDWARE_FIGURES(DW_HARDWARE_FIGURE)
#undef DW_HARDWARE_FIGURE
} dw_hardware;

/* "NAME" or "NAME:COUNT", NAME of the catalogue in either case. Without COUNT: one node, or the rack that NVLink joins.
 * COUNT may be a part of a node; beyond one it is a whole number of nodes. DW_NOT_FOUND lists the names;
 * DW_INVALID_ARGUMENT: COUNT is no number from 1 to DW_HARDWARE_MOST_GPUS, or no whole number of nodes. */
#define DW_HARDWARE_MOST_GPUS 1048576
DW_API dw_status dw_hardware_named(const char *text, dw_hardware **hardware);
DW_API uint32_t dw_hardware_catalogue_count(void);
DW_API const char *dw_hardware_catalogue_name(uint32_t index);

/* A file's text, or a file: {"profile": "h100", "gpus": 256, "network_bandwidth": 5e10, ...}: what is not said is the
 * profile's, and without a profile what a plan needs must be there. DW_PARSE: no JSON, or a field of the wrong kind;
 * DW_INVALID_ARGUMENT: a figure outside of what is possible, or two that contradict each other: each named. */
DW_API dw_status dw_hardware_parse(const char *json, size_t bytes, dw_hardware **hardware);
DW_API dw_status dw_hardware_load(const char *path, dw_hardware **hardware);

/* This machine; deepwell/machine.h has it in detail. Works without a GPU: gpus is 0. Nothing is measured unless
 * `measure`, which takes some seconds on each GPU: copies, matrix products, and NCCL between GPUs where it is found. */
DW_API dw_status dw_hardware_probe(int measure, dw_hardware **hardware);

/* What a command line names: "auto" for this machine, the path of a file that is there, or a name of the catalogue. */
DW_API dw_status dw_hardware_open(const char *text, dw_hardware **hardware);

/* The description as such a file, every figure with its kind and source. *text is released with dw_text_free. */
DW_API dw_status dw_hardware_json(const dw_hardware *hardware, char **text);

/* Another number of GPUs of the same kind: *copy is new. */
DW_API dw_status dw_hardware_with_gpus(const dw_hardware *hardware, int gpus, dw_hardware **copy);
DW_API void dw_hardware_destroy(dw_hardware *hardware); /* NULL allowed */

#ifdef __cplusplus
}
#endif
#endif
