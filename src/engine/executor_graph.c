/* The executor of GPUs that replays CUDA graphs: a range of instructions is recorded once by the same enqueues that
 * executor_stream.c makes, and launched as one graph from then on.
 *
 * A graph holds addresses. If a run binds other ones, its range is recorded again, and the graph takes on the new
 * arguments where that is all that changed. Recording uses a stream of its own, because the legacy default stream
 * records nothing.
 */
#include "engine/executor.h"
#include <string.h>

/* The graph of one range, and the addresses that it was recorded with. */
typedef struct dw__gpu_record {
    struct dw__gpu_record *next;
    uint32_t from, to;
    void *graph;
    size_t count;
    void *addresses[];
} dw__gpu_record;

/* ---- addresses ------------------------------------------------------------------------------------ */

static size_t address_count(const dw_engine *engine) {
    return 2 + (size_t)engine->leaf_count + engine->output_count + engine->grad_output_count +
           engine->wrt_count;
}

static void **put(void **at, const dw_binding *bindings, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) *at++ = bindings ? bindings[i].data : NULL;
    return at;
}

static void list_addresses(const dw_engine *engine, const dw__bindings *b, void **at) {
    *at++ = b->arena;
    *at++ = b->zeros;
    at = put(at, b->leaves, engine->leaf_count);
    at = put(at, b->outputs, engine->output_count);
    at = put(at, b->output_grads, engine->grad_output_count);
    put(at, b->grads, engine->wrt_count);
}

/* ---- records -------------------------------------------------------------------------------------- */

/* The range's record; made empty if there is none. */
static dw_status find_record(dw_plan *plan, uint32_t from, uint32_t to, dw__gpu_record **record) {
    dw__gpu_kept *kept = plan->kept;
    for (*record = kept->records; *record; *record = (*record)->next)
        if ((*record)->from == from && (*record)->to == to) return DW_OK;
    const size_t count = address_count(plan->engine);
    dw__gpu_record *made = dw__calloc(1, sizeof *made + count * sizeof made->addresses[0]);
    if (!made) return dw__fail_memory("a recorded graph", count * sizeof made->addresses[0]);
    made->from = from;
    made->to = to;
    made->count = count;
    made->next = kept->records;
    kept->records = *record = made;
    return DW_OK;
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

static dw_status run_range(dw__run *run, uint32_t from, uint32_t to) {
    dw_status status = DW_OK;
    dw_plan *plan = run->plan;
    dw__gpu_record *record;
    if (from == to) return DW_OK;
    const size_t bytes = address_count(plan->engine) * sizeof(void *);
    void **addresses = dw__malloc(bytes);
    if (!addresses) return dw__fail_memory("the addresses of a run", bytes);
    list_addresses(plan->engine, run->bindings, addresses);
    pthread_mutex_lock(&plan->lock);
    DW_TRY(find_record(plan, from, to, &record));
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
