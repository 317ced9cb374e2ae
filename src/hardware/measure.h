/* Declarations shared by the three measurements. */
#ifndef DW_MEASURE_H
#define DW_MEASURE_H

#include "device/cuda_driver.h"
#include "hardware/machine_internal.h"

/* One GPU while something is timed on it. Its primary context is current. */
typedef struct dw__bench {
    const dw__cuda *cuda;
    void *stream, *from, *to; /* from, to: CUDA events */
} dw__bench;

/* Makes the GPU's primary context current. The caller restores the previous one. */
dw_status dw__bench_begin(const dw__cuda *cuda, int gpu, dw__bench *bench);
void dw__bench_end(dw__bench *bench);
/* Allocates memory of this GPU and fills it by repeating `block`, which is host memory of `block_bytes`. Use random
 * numbers: zeros draw less power and run faster. On failure *address is 0. */
dw_status dw__bench_allocate(const dw__bench *bench, size_t bytes, const void *block,
                             size_t block_bytes, dw__cu_address *address);
void dw__bench_release(const dw__bench *bench, dw__cu_address address);

/* Returns the seconds of one call of `run`: the median over a few series after a warm-up. */
typedef dw_status dw__bench_run(const dw__bench *bench, void *context);
dw_status dw__bench_time(const dw__bench *bench, int calls, dw__bench_run *run, void *context,
                         double *seconds);

/* Writes random numbers of the type between -1 and 1; any numbers for E2M1. */
void dw__bench_random(dw_rate type, void *block, size_t bytes);

/* Each sets the figures that it measures. The message of a failure names the failed step. */
dw_status dw__measure_copies(const dw__bench *bench, const dw__machine_options *options,
                             dw_machine_gpu *gpu);
dw_status dw__measure_gemms(const dw__bench *bench, const dw__machine_options *options,
                            dw_machine_gpu *gpu);
dw_status dw__measure_all_reduce(const dw__cuda *cuda, const dw__machine_options *options, int gpus,
                                 dw_figure *bandwidth);

#endif
