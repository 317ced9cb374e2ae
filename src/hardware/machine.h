/* Inside the probe: what its files share. */
#ifndef DW_MACHINE_INTERNAL_H
#define DW_MACHINE_INTERNAL_H

#include "deepwell/machine.h"
#include "hardware/hardware.h"

/* How much is asked, and of what: a test gives another root than "" for /sys and /proc, and small sizes. */
typedef struct dw__machine_options {
    const char *root;
    int measure;
    size_t copy_bytes; /* of a measured copy */
    int matrix_size;   /* of the square matrices of a measured product */
} dw__machine_options;
dw_status dw__machine_probe(const dw__machine_options *options, dw_machine **machine);

/* A machine that is being described. Its lists grow; its texts live in the arena. */
typedef struct dw__machine {
    dw_machine public; /* first: the caller's pointer is ours */
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

/* Its own copy; what is no plain UTF-8 becomes "?". */
dw_status dw__machine_text(dw__machine *m, const char *text, const char **copy);
dw_status dw__machine_remark(dw__machine *m, const char *format, ...) DW_PRINTF(2, 3);

/* A line of a small file below the root; "" when it cannot be read. `format` gives the path: "/sys/...". */
bool dw__machine_read(const dw__machine *m, char *line, size_t bytes, const char *format, ...)
    DW_PRINTF(4, 5);
/* A number in such a file; `absent` when there is none. */
int64_t dw__machine_read_number(const dw__machine *m, int64_t absent, const char *format, ...)
    DW_PRINTF(3, 4);

/* Each adds what it finds. They fail when memory is out. */
dw_status dw__machine_read_cpu(dw__machine *m);
dw_status dw__machine_read_gpus(dw__machine *m);
dw_status dw__machine_read_links(dw__machine *m);
dw_status dw__machine_read_nics(dw__machine *m);
dw_status dw__machine_read_paths(dw__machine *m);
dw_status dw__machine_measure(dw__machine *m);

/* The NUMA node of a PCI device, -1. */
int dw__machine_numa_of(const dw__machine *m, const char *bus);

/* What hwloc counts. False: it is not there. */
typedef struct dw__hwloc_counts {
    int packages, cores, threads;
    double cache;
    char version[32];
} dw__hwloc_counts;
bool dw__hwloc_count(dw__hwloc_counts *counts);

/* The summary for plans; its texts are the machine's. Not checked: what is unknown is left out. */
void dw__machine_summary(const dw_machine *machine, dw_hardware *hardware);

#endif
