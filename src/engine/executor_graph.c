/* The executor of GPUs that replays CUDA graphs: a range of instructions is recorded once by the same enqueues that
 * executor_stream.c makes, and launched as one graph from then on.
 *
 * A graph holds addresses. The graphs of the last few sets of addresses are kept for each range, because a caller's
 * allocator alternates between a few. For a new set the least recently used graph is recorded again; it takes on the
 * new arguments where that is all that changed. Recording uses a stream of its own, because the legacy default stream
 * records nothing. If the caller's stream records a graph itself, the instructions become part of that graph.
 */
#include "engine/executor.h"
#include <string.h>

enum { MOST_GRAPHS = 4 }; /* of one range */

/* A graph of one range, and the addresses that it was recorded with. */
typedef struct dw__gpu_record {
    struct dw__gpu_record *next; /* in the plan's list, the last used first */
    uint32_t from, to;
    void *graph;
    void *addresses[];
} dw__gpu_record;

/* ---- addresses ------------------------------------------------------------------------------------ */

static size_t address_count(const dw_engine *engine) {
    return DW_MOST_SEGMENTS + 1 + (size_t)engine->leaf_count + engine->output_count +
           engine->grad_output_count + engine->wrt_count;
}

static void **put(void **at, const dw_binding *bindings, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) *at++ = bindings ? bindings[i].data : NULL;
    return at;
}

static void list_addresses(const dw_engine *engine, const dw__bindings *b, void **at) {
    for (int s = 0; s < DW_MOST_SEGMENTS; s++) *at++ = b->segments[s];
    *at++ = b->zeros;
    at = put(at, b->leaves, engine->leaf_count);
    at = put(at, b->outputs, engine->output_count);
    at = put(at, b->output_grads, engine->grad_output_count);
    put(at, b->grads, engine->wrt_count);
}

/* ---- records -------------------------------------------------------------------------------------- */

static dw_status make_record(dw_plan *plan, uint32_t from, uint32_t to, dw__gpu_record **record) {
    const size_t count = address_count(plan->engine);
    dw__gpu_record *made = dw__calloc(1, sizeof *made + count * sizeof made->addresses[0]);
    if (!made) return dw__fail_memory("a recorded graph", count * sizeof made->addresses[0]);
    made->from = from;
    made->to = to;
    *record = made;
    return DW_OK;
}

/* Takes a record of the range out of the plan's list: the one with these addresses, or the least recently used if there
 * are as many as are kept. NULL: a new one is to be made. */
static dw__gpu_record *take_record(dw__gpu_kept *kept, uint32_t from, uint32_t to, void **addresses,
                                   size_t bytes) {
    dw__gpu_record **last = NULL;
    int found = 0;
    for (dw__gpu_record **at = &kept->records; *at; at = &(*at)->next) {
        if ((*at)->from != from || (*at)->to != to) continue;
        last = at;
        if (memcmp((*at)->addresses, addresses, bytes) == 0) break;
        found++;
    }
    if (!last || (found < MOST_GRAPHS && memcmp((*last)->addresses, addresses, bytes) != 0))
        return NULL;
    dw__gpu_record *record = *last;
    *last = record->next;
    return record;
}

static dw_status record_range(dw__run *run, dw__gpu_record *record) {
    const dw_device *device = run->plan->target.device;
    void *stream = NULL;
    DW_RETURN_IF_FAILED(device->stream_create(&stream));
    dw_status status = device->graph_begin(stream);
    if (status == DW_OK) {
        status = dw__gpu_enqueue_range(run, record->from, record->to, stream);
        /* A recording is ended in any case; one that failed must not replace the graph. */
        void *unused = NULL;
        dw_status ended = device->graph_end(stream, status == DW_OK ? &record->graph : &unused);
        if (unused) device->graph_destroy(unused);
        if (status == DW_OK) status = ended;
    }
    device->stream_destroy(stream);
    return status;
}

static dw_status replay(dw__run *run, uint32_t from, uint32_t to) {
    dw_status status = DW_OK;
    dw_plan *plan = run->plan;
    dw__gpu_kept *kept = plan->kept;
    const size_t bytes = address_count(plan->engine) * sizeof(void *);
    void **addresses = dw__malloc(bytes);
    if (!addresses) return dw__fail_memory("the addresses of a run", bytes);
    list_addresses(plan->engine, run->bindings, addresses);
    pthread_mutex_lock(&plan->lock);
    dw__gpu_record *record = take_record(kept, from, to, addresses, bytes);
    if (!record) DW_TRY(make_record(plan, from, to, &record));
    record->next = kept->records;
    kept->records = record;
    if (!record->graph || memcmp(record->addresses, addresses, bytes) != 0) {
        DW_TRY(record_range(run, record));
        memcpy(record->addresses, addresses, bytes);
    }
    DW_TRY(plan->target.device->graph_launch(record->graph, run->bindings->stream));
cleanup:
    pthread_mutex_unlock(&plan->lock);
    dw__free(addresses);
    return status;
}

static dw_status run_range(dw__run *run, uint32_t from, uint32_t to) {
    void *stream = run->bindings->stream;
    bool recorded;
    if (from == to) return DW_OK;
    DW_RETURN_IF_FAILED(run->plan->target.device->stream_records(stream, &recorded));
    if (recorded) return dw__gpu_enqueue_range(run, from, to, stream);
    return dw__plan_is_timed(run->plan) ? dw__gpu_time_range(run, from, to) : replay(run, from, to);
}

static void forget(dw_plan *plan) {
    dw__gpu_kept *kept = plan->kept;
    while (kept && kept->records) {
        dw__gpu_record *next = kept->records->next;
        plan->target.device->graph_destroy(kept->records->graph);
        dw__free(kept->records);
        kept->records = next;
    }
    dw__gpu_forget(plan);
}

const dw__executor dw__executor_graph = {
    .name = "graph",
    .open = dw__gpu_open,
    .zeros = dw__gpu_zeros,
    .begin = dw__gpu_begin,
    .run_range = run_range,
    .end = dw__gpu_end,
    .forget = forget,
    .synchronize = dw__gpu_synchronize,
};
