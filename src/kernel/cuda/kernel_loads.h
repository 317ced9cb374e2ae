/* Measures kernels that compute the same, in turns, to choose one of them. A GPU that multiplies for some milliseconds is
 * slowed by its power limit, as it is in a training step, and one kernel more than another; so each kernel runs for some
 * milliseconds without a pause, which is called a load. */
#ifndef DW_KERNEL_LOADS_H
#define DW_KERNEL_LOADS_H

#include "device/device_table.h"
#include "kernel/kernel.h"

enum { DW__LOAD_MOST_RUNS = 32, DW__LOAD_MOST_KERNELS = 4 };

/* Device memory of the kernels' call. */
typedef struct dw__load_part {
    void **place; /* receives the address, a multiple of 256 */
    size_t bytes; /* 0: the part is absent, and its place is left as it is */
    /* Filled with nearly normal numbers, because zeros would draw less power; else not written. */
    bool read;
    dw_dtype type;
} dw__load_part;

typedef struct dw__loads {
    const dw_device *device;
    void *stream, *events[DW__LOAD_MOST_RUNS][2]; /* around each run of a load */
    char *memory;
    size_t bytes, flush_bytes;
    void *flush;
} dw__loads;

/* Enqueues kernel `which` on the stream. */
typedef dw_status (*dw__load_run)(const void *state, int which, void *stream);

/* Whether kernels of so many FLOPs are worth a measurement. */
bool dw__loads_are_worth_it(double flops);
/* Whether choices may be measured and kept: on a real GPU, if DEEPWELL_AUTOTUNE is neither "0" nor "off", and if there is a
 * folder, because a choice that is not kept would differ from run to run. */
bool dw__loads_are_wanted(const dw__context *context);

/* Makes a stream and memory for the parts. The thread may allocate (capture_relax). Call dw__loads_close() in any case. */
dw_status dw__loads_open(dw__loads *loads, const dw__context *context, const dw__load_part *parts,
                         int count);
void dw__loads_close(dw__loads *loads);

/* Receives the mean seconds of `runs` runs that follow one another. Before each run the L2 cache is overwritten. */
dw_status dw__loads_time(const dw__loads *loads, dw__load_run run, const void *state, int which,
                         int runs, double *seconds);
/* Receives the seconds of each of `count` kernels, the medians of some loads in turns. `about`: seconds of one run. */
dw_status dw__loads_compare(const dw__loads *loads, dw__load_run run, const void *state, int count,
                            double about, double *seconds);
double dw__loads_median(double *times, int count);

#endif
