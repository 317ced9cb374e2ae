/* This machine, device by device: what `deepwell probe` shows.
 *
 *     dw_machine *machine;
 *     if (dw_machine_probe(0, &machine) == DW_OK) printf("%d GPUs\n", machine->gpu_count);
 *     dw_machine_destroy(machine);
 *
 * dw_hardware (deepwell/hardware.h) is the summary that a plan needs. This header describes each GPU, the links between
 * them, the PCI Express paths, the CPU with its NUMA nodes, and the network ports. The sources are NVIDIA's driver and
 * NVML, hwloc, and /sys. Each of them may be missing, and no value is invented: an absent number is -1, an absent
 * string "", an absent figure DW_FIGURE_UNKNOWN. All strings belong to the machine.
 */
#ifndef DEEPWELL_MACHINE_H
#define DEEPWELL_MACHINE_H

#include "deepwell/hardware.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dw_machine_gpu {
    const char *name; /* as the driver reports it: "NVIDIA H100 80GB HBM3" */
    const char *uuid;
    const char *bus;          /* "0000:1b:00.0" */
    const char *architecture; /* "sm_90a": what kernels are compiled for */
    const char
        *blackwell;      /* the variant: "sm_100", "sm_103" or "sm_120"; "": not a Blackwell GPU */
    const char *profile; /* of the catalogue, whose published figures apply; "": none */
    int capability;      /* 90 */
    int memory_bus_bits;
    int pcie_generation, pcie_lanes; /* the best that both GPU and slot support */
    int numa_node;
    int link_version, links; /* NVLink: version, and number of links that are up; 0: none */
    dw_figure sm_count, clock, memory_clock, memory, memory_bandwidth, cache, power;
    dw_figure link_bandwidth; /* of all its NVLinks together */
    dw_figure host_bandwidth;
    /* Bytes read plus bytes written per second within the GPU's memory, measured. */
    dw_figure copy_bandwidth;
    dw_figure rate[DW_RATES]; /* published for the profile, estimated, or measured */
} dw_machine_gpu;

/* One NVLink that is up, seen from one end. */
typedef struct dw_machine_link {
    int gpu, link; /* index in dw_machine.gpus; number of the link at that GPU */
    int version;
    const char *to;     /* "gpu", "switch", "cpu" or "unknown" */
    int peer;           /* index in dw_machine.gpus if `to` is "gpu" */
    const char *to_bus; /* PCI address of the other end */
    dw_figure bandwidth;
} dw_machine_link;

/* The PCI Express path between two GPUs, or between a GPU and a network port. */
typedef struct dw_machine_path {
    int gpu;
    int peer, nic; /* the other end: index of a GPU or of a NIC; the unused one is -1 */
    /* As in nvidia-smi topo: PIX one PCIe switch, PXB several, PHB the CPU's host bridge, NODE several host bridges of
     * one NUMA node, SYS between NUMA nodes. */
    const char *level;
    int hops; /* PCIe bridges and links on the path, host bridges included */
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
    int usable;                       /* threads that this process may use */
    dw_figure memory, cache;          /* bytes; cache: the last level of all packages together */
} dw_machine_cpu;

typedef struct dw_machine {
    dw_machine_cpu cpu;
    int gpu_count, link_count, path_count, nic_count, numa_count, remark_count;
    dw_machine_gpu *gpus;
    dw_machine_link *links;
    dw_machine_path *paths;
    dw_machine_nic *nics;
    dw_machine_numa *numa;
    /* Notes for the reader: why there is no GPU, what was not found, how devices differ. */
    const char **remarks;
    int switches;            /* NVSwitches that links connect to */
    const char *driver;      /* "580.95.05" */
    const char *cuda;        /* "13.0", the newest version that the driver supports */
    const char *fabric;      /* "completed": the machine is part of an NVLink rack; "": it is not */
    dw_figure bus_bandwidth; /* of an all-reduce over all GPUs, as nccl-tests counts it, measured */
} dw_machine;

/* `measure` as in dw_hardware_probe. DW_OUT_OF_MEMORY is the only failure; a source that is missing is a remark. */
DW_API dw_status dw_machine_probe(int measure, dw_machine **machine);
/* Makes the summary that a plan needs. DW_INVALID_ARGUMENT: a figure is missing and cannot be read here. */
DW_API dw_status dw_machine_hardware(const dw_machine *machine, dw_hardware **hardware);
/* Writes a file for dw_hardware_load, with the members above under "machine". Free *text with dw_text_free. */
DW_API dw_status dw_machine_json(const dw_machine *machine, char **text);
DW_API void dw_machine_destroy(dw_machine *machine); /* may be NULL */

#ifdef __cplusplus
}
#endif
#endif
