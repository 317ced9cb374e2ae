/* Pipeline schedules as lists: the order of each rank's operations by the schedule's published rule. */
#ifndef DW_PIPELINE_SCHEDULE_H
#define DW_PIPELINE_SCHEDULE_H

#include "base/base.h"
#include "deepwell/simulate.h"

typedef struct dw__operation {
    int32_t micro_batch;
    int16_t chunk;
    uint8_t kind; /* DW_EVENT_FORWARD to DW_EVENT_BACKWARD_WEIGHT */
    /* 1: a forward that runs mixed with the whole backward after it, whose operations have 2. Their results are
     * available when all of them are done. */
    uint8_t mixed;
} dw__operation;

typedef struct dw__operations {
    dw__operation *items;
    size_t count, capacity;
} dw__operations;

typedef struct dw__schedule {
    dw_pipeline_schedule schedule;
    int stages, chunks, micro_batches;
    int split;             /* 1: backward is split into inputs and weights */
    dw__operations *ranks; /* one list per stage */
} dw__schedule;

/* `chunks` is the layout's virtual_stages; ZB-V and DualPipe always have two. DW_INVALID_ARGUMENT: DualPipe with an
 * odd number of stages. */
dw_status dw__schedule_create(dw_pipeline_schedule schedule, int stages, int chunks,
                              int micro_batches, dw__schedule *made);
void dw__schedule_free(dw__schedule *schedule);

/* The route of a micro-batch: `positions` places 0, 1, ..., each a chunk on a rank. */
int dw__schedule_positions(const dw__schedule *schedule);
int dw__schedule_position(const dw__schedule *schedule, int rank, int chunk);
void dw__schedule_place(const dw__schedule *schedule, int micro_batch, int position, int *rank,
                        int *chunk);

#endif
