/* Inside measuring: what the three measurements share. */
#ifndef DW_MEASURE_H
#define DW_MEASURE_H

#include "device/cuda_driver.h"
#include "hardware/machine.h"

/* One GPU while something is timed on it: its primary context is current. */
typedef struct dw__bench {
    const dw__cuda *cuda;
    void *stream, *from, *to; /* from, to: events */
} dw__bench;

/* Makes the GPU's primary context current. The caller puts back what was. */
dw_status dw__bench_begin(const dw__cuda *cuda, int gpu, dw__bench *bench);
void dw__bench_end(dw__bench *bench);
/* Memory of this GPU, filled with a pattern: random numbers, since zeros draw less power and run faster. 0 on failure:
 * *address is 0. `block` is host memory of `block_bytes`, repeated. */
dw_status dw__bench_allocate(const dw__bench *bench, size_t bytes, const void *block,
                             size_t block_bytes, dw__cu_address *address);
void dw__bench_release(const dw__bench *bench, dw__cu_address address);

/* Seconds of one call of `run`: the median over a few series, after one that does not count. */
typedef dw_status dw__bench_run(const dw__bench *bench, void *context);
dw_status dw__bench_time(const dw__bench *bench, int calls, dw__bench_run *run, void *context,
                         double *seconds);

/* Random numbers of the type, between -1 and 1; of E2M1 any. */
void dw__bench_random(dw_rate type, void *block, size_t bytes);

/* One of NVIDIA's libraries: the file that the environment variable names, or else the first of the names (ended by
 * NULL) that the loader, the toolkit or a Python's site-packages have. NULL: not found. Never closed. */
void *dw__nvidia_library(const char *variable, const char *const *names);

/* Each sets what it measures; a failure's message says what could not be done. */
dw_status dw__measure_copies(const dw__bench *bench, const dw__machine_options *options,
                             dw_machine_gpu *gpu);
dw_status dw__measure_products(const dw__bench *bench, const dw__machine_options *options,
                               dw_machine_gpu *gpu);
dw_status dw__measure_all_reduce(const dw__cuda *cuda, const dw__machine_options *options, int gpus,
                                 dw_figure *bandwidth);

#endif
