/* Declarations shared by the files of the probe. */
#ifndef DW_MACHINE_INTERNAL_H
#define DW_MACHINE_INTERNAL_H

#include "deepwell/machine.h"
#include "hardware/hardware_internal.h"

/* Limits of the probe. A test gives a folder instead of "" as the root of /sys and /proc, and small sizes. */
typedef struct dw__machine_options {
    const char *root;
    int measure;
    size_t copy_bytes; /* size of a measured copy */
    int matrix_size;   /* rows of the square matrices of a measured GEMM */
} dw__machine_options;
dw_status dw__machine_probe(const dw__machine_options *options, dw_machine **machine);

/* A machine while it is described. Its lists grow; its texts are in the arena. */
typedef struct dw__machine {
    dw_machine public; /* first, so a pointer to it is a pointer to the whole */
    const dw__machine_options *options;
    dw__arena *arena;
    struct {
        const char **items;
        size_t count, capacity;
    } remarks;
    struct {
        dw_machine_gpu *items;
        size_t count, capacity;
    } gpus;
    struct {
        dw_machine_link *items;
        size_t count, capacity;
    } links;
    struct {
        dw_machine_path *items;
        size_t count, capacity;
    } paths;
    struct {
        dw_machine_nic *items;
        size_t count, capacity;
    } nics;
    struct {
        dw_machine_numa *items;
        size_t count, capacity;
    } numa;
} dw__machine;

/* Copies a text into the arena. Invalid UTF-8 becomes "?". */
dw_status dw__machine_text(dw__machine *m, const char *text, const char **copy);
dw_status dw__machine_remark(dw__machine *m, const char *format, ...) DW_PRINTF(2, 3);

/* Reads a line of a small file below the root; "" if it cannot be read. `format` gives the path: "/sys/...". */
bool dw__machine_read(const dw__machine *m, char *line, size_t bytes, const char *format, ...)
    DW_PRINTF(4, 5);
/* Reads a number from such a file; returns `absent` if there is none. */
int64_t dw__machine_read_number(const dw__machine *m, int64_t absent, const char *format, ...)
    DW_PRINTF(3, 4);

/* Each adds what it finds and fails only without memory. */
dw_status dw__machine_read_cpu(dw__machine *m);
dw_status dw__machine_read_gpus(dw__machine *m);
dw_status dw__machine_read_links(dw__machine *m);
dw_status dw__machine_read_nics(dw__machine *m);
dw_status dw__machine_read_paths(dw__machine *m);
dw_status dw__machine_measure(dw__machine *m);

/* Returns the NUMA node of a PCI device, or -1. */
int dw__machine_numa_of(const dw__machine *m, const char *bus);

/* Counts from hwloc. Returns false if hwloc is missing. */
typedef struct dw__hwloc_counts {
    int packages, cores, threads;
    double cache;
    char version[32];
} dw__hwloc_counts;
bool dw__hwloc_count(dw__hwloc_counts *counts);

/* Makes the summary for plans. Its texts belong to the machine. It is not checked, and unknown figures are left
 * out. */
void dw__machine_summary(const dw_machine *machine, dw_hardware *hardware);

#endif
