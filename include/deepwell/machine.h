/* This machine, device by device: what deepwell probe shows.
 *
 * dw_hardware (deepwell/hardware.h) is what a plan needs of it; here are the single GPUs, the links between them, the
 * paths over PCI Express, the CPU with its NUMA nodes, and the network ports. Everything is read through what the
 * machine has: NVIDIA's driver and NVML, hwloc, and /sys; each of them may be missing, and nothing is made up for it:
 * an absent number is -1, an absent text "", an absent figure DW_FIGURE_UNKNOWN.
 */
#ifndef DEEPWELL_MACHINE_H
#define DEEPWELL_MACHINE_H

#include "deepwell/hardware.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_machine_gpu {
    const char *name; /* the driver's: "NVIDIA H100 80GB HBM3" */
    const char *uuid;
    const char *bus;          /* "0000:1b:00.0" */
    const char *architecture; /* "sm_90a": what kernels are compiled for */
    const char *blackwell; /* "sm_100", "sm_103" or "sm_120", the variant; "": another generation */
    const char *profile;   /* of the catalogue, whose published figures hold for it; "" */
    int capability;        /* 90 */
    int memory_bus_bits;
    int pcie_generation, pcie_lanes; /* the most that GPU and slot can do */
    int numa_node;
    int link_version, links; /* of NVLink, those that are up; 0: none */
    dw_figure sm_count, clock, memory_clock, memory, memory_bandwidth, cache, power;
    dw_figure link_bandwidth; /* of all its NVLinks together */
    dw_figure host_bandwidth;
    dw_figure
        copy_bandwidth; /* bytes read and written in a second, within the GPU's memory: measured */
    dw_figure rate[DW_RATES]; /* published for the profile, estimated, or measured */
} dw_machine_gpu;

/* One NVLink that is up, seen from one of its ends. */
typedef struct dw_machine_link {
    int gpu, link; /* index among gpus; number of the link at that GPU */
    int version;
    const char *to;     /* "gpu", "switch", "cpu" or "unknown" */
    int peer;           /* index among gpus, where `to` is one of them */
    const char *to_bus; /* PCI address of the other end */
    dw_figure bandwidth;
} dw_machine_link;

/* Between two GPUs, or a GPU and a network port. */
typedef struct dw_machine_path {
    int gpu;
    int peer, nic; /* one of them is -1 */
    const char *
        level; /* as nvidia-smi topo: PIX one PCIe switch, PXB several, PHB the CPU's host bridge, NODE several
                        * of one NUMA node, SYS between NUMA nodes */
    int hops; /* PCIe bridges and links passed, host bridges included */
} dw_machine_path;

typedef struct dw_machine_nic {
    const char *name; /* "mlx5_0", "eth0" */
    const char *kind; /* "InfiniBand", "RoCE" or "Ethernet" */
    const char *bus;
    int up, numa_node;
    dw_figure bandwidth; /* bytes per second, one direction */
} dw_machine_nic;

typedef struct dw_machine_numa {
    int node;
    const char *cpus; /* "0-55,112-167" */
    dw_figure memory; /* bytes */
} dw_machine_numa;

typedef struct dw_machine_cpu {
    const char *model, *architecture; /* "x86_64" */
    const char *source;               /* "hwloc 2.9.0" or "/sys" */
    int packages, cores, threads;     /* of the machine */
    int usable;                       /* threads that this process may run on */
    dw_figure memory, cache;          /* bytes; the last level of all packages */
} dw_machine_cpu;

typedef struct dw_machine {
    dw_machine_cpu cpu;
    int gpu_count, link_count, path_count, nic_count, numa_count, remark_count;
    dw_machine_gpu *gpus;
    dw_machine_link *links;
    dw_machine_path *paths;
    dw_machine_nic *nics;
    dw_machine_numa *numa;
    const char **
        remarks; /* what a reader should know: why there is no GPU, what was not found, what differs */
    int switches;       /* NVSwitches that links end at */
    const char *driver; /* "580.95.05" */
    const char *cuda;   /* "13.0", what the driver serves */
    const char *fabric; /* "completed": the machine is a part of a rack that NVLink joins; "" */
    dw_figure bus_bandwidth; /* of an all-reduce over all GPUs, as nccl-tests counts it: measured */
} dw_machine;

/* `measure` as in dw_hardware_probe. Fails when memory is out; what cannot be found out is a remark. */
DW_API dw_status dw_machine_probe(int measure, dw_machine **machine);
/* What a plan needs of it. DW_INVALID_ARGUMENT: a figure is missing and cannot be read here. */
DW_API dw_status dw_machine_hardware(const dw_machine *machine, dw_hardware **hardware);
/* A file for dw_hardware_load, with all that is above under "machine". *text is released with dw_text_free. */
DW_API dw_status dw_machine_json(const dw_machine *machine, char **text);
DW_API void dw_machine_destroy(dw_machine *machine); /* NULL allowed */

#ifdef __cplusplus
}
#endif
#endif
