/* The executor of GPUs: enqueues each instruction on the caller's stream and waits for nothing.
 *
 * Errors that only data can show go to one word per plan, with the number of the instruction. The word is the host's
 * memory, so that it is read without waiting: by the plan's next run, or when the caller waits for the stream.
 */
#include "engine/executor.h"
#include <string.h>

/* Done when the plan is made, because a caller may capture the first run in a CUDA graph of its own. */
dw_status dw__gpu_open(dw_plan *plan) {
    dw_status status = DW_OK;
    const dw_device *device = plan->target.device;
    dw__gpu_kept *kept = dw__calloc(1, sizeof *kept);
    if (!kept) return dw__fail_memory("what a plan keeps on a GPU", sizeof *kept);
    void *word = NULL;
    DW_TRY(device->host_allocate(sizeof *kept->word, &word));
    kept->word = word;
    atomic_init(kept->word, 0);
    plan->kept = kept;
    kept = NULL;
cleanup:
    dw__free(kept);
    return status;
}

/* Room for the largest output gradient, so that one block serves every run. */
static size_t most_zeros(const dw_plan *plan) {
    size_t most = 0;
    for (uint32_t i = 0; i < plan->engine->grad_output_count; i++) {
        const dw__tensor *shape = &plan->leaves[plan->engine->leaf_count + i];
        const size_t bytes = dw__tensor_bytes(shape);
        if (bytes > most) most = bytes;
    }
    return most;
}

/* Fills them on a stream of their own and waits: the caller may be capturing the run in a CUDA graph. */
static dw_status make_zeros(const dw_device *device, size_t bytes, void **zeros) {
    void *stream = NULL, *made = NULL;
    int before = 0;
    DW_RETURN_IF_FAILED(device->capture_relax(&before));
    dw_status status = DW_OK;
    DW_TRY(device->stream_create(&stream));
    DW_TRY(device->allocate(bytes, &made));
    DW_TRY(device->fill_on(made, 0, bytes, stream));
    DW_TRY(device->stream_synchronize(stream));
    *zeros = made;
    made = NULL;
cleanup:
    if (made) device->release(made, bytes);
    if (stream) device->stream_destroy(stream);
    device->capture_restore(before);
    return status;
}

dw_status dw__gpu_zeros(dw_plan *plan, size_t bytes, void **zeros) {
    dw_status status = DW_OK;
    if (bytes == 0) return DW_OK;
    pthread_mutex_lock(&plan->lock);
    dw__gpu_kept *kept = plan->kept;
    if (!kept->zeros) {
        kept->zeros_bytes = most_zeros(plan);
        DW_TRY(make_zeros(plan->target.device, kept->zeros_bytes, &kept->zeros));
    }
    *zeros = kept->zeros;
cleanup:
    pthread_mutex_unlock(&plan->lock);
    return status;
}

static dw_status fail_data(const dw_plan *plan, unsigned word) {
    const uint32_t instruction = word >> 8;
    char label[160] = "an instruction";
    if (instruction < plan->code.count)
        dw__node_label(plan->engine->graph, plan->code.items[instruction].step.node, label,
                       sizeof label);
    switch (word & 0xFF) {
    case DW_DATA_INDEX:
        return dw__fail(DW_INDEX, "%s: an index lies outside of its axis; check the indexes",
                        label);
    case DW_DATA_DIVISION:
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: integer division by zero; guard the divisor with select, or divide as "
                        "floating point",
                        label);
    default:
        return dw__fail(DW_INVALID_ARGUMENT,
                        "%s: an integer to a negative power; cast to a floating-point type first",
                        label);
    }
}

/* Returns and forgets the error of a run that has ended. */
static dw_status take_data_error(const dw_plan *plan) {
    const dw__gpu_kept *kept = plan->kept;
    if (atomic_load_explicit(kept->word, memory_order_relaxed) == 0) return DW_OK;
    return fail_data(plan, atomic_exchange(kept->word, 0));
}

const unsigned *dw__gpu_data_error(const dw_plan *plan) {
    return (const unsigned *)((const dw__gpu_kept *)plan->kept)->word;
}

dw_status dw__gpu_begin(dw__run *run) {
    dw_plan *plan = run->plan;
    dw_status status = take_data_error(plan);
    if (status != DW_OK) return dw__fail_prefix(status, "in an earlier run");
    pthread_mutex_lock(&plan->lock);
    dw__gpu_kept *kept = plan->kept;
    dw__gpu_call *call = kept->idle;
    if (call) kept->idle = call->next;
    pthread_mutex_unlock(&plan->lock);
    if (!call) call = dw__calloc(1, sizeof *call);
    if (!call) return dw__fail_memory("the state of a run", sizeof *call);
    run->state = call;
    return DW_OK;
}

dw_status dw__gpu_end(dw__run *run) {
    dw__gpu_call *call = run->state;
    if (!call) return DW_OK;
    pthread_mutex_lock(&run->plan->lock);
    dw__gpu_kept *kept = run->plan->kept;
    call->next = kept->idle;
    kept->idle = call;
    pthread_mutex_unlock(&run->plan->lock);
    run->state = NULL;
    return DW_OK;
}

void dw__gpu_forget(dw_plan *plan) {
    dw__gpu_kept *kept = plan->kept;
    if (!kept) return;
    while (kept->idle) {
        dw__gpu_call *next = kept->idle->next;
        dw__free(kept->idle);
        kept->idle = next;
    }
    plan->target.device->host_release(kept->word);
    if (kept->zeros) plan->target.device->release(kept->zeros, kept->zeros_bytes);
    dw__free(kept);
    plan->kept = NULL;
}

/* Makes the run's call of the instruction. False: the caller left out all that it writes. */
static bool bind(const dw__run *run, const dw__instruction *instruction) {
    dw__gpu_call *state = run->state;
    dw__call *call = &state->call.call;
    dw__bind_step(run->plan, run->bindings, &instruction->step, call);
    bool wanted = !instruction->optional || dw__wants_result(call);
    if (instruction->epilogue) {
        dw__bind_step(run->plan, run->bindings, instruction->epilogue, &state->epilogue);
        wanted |= dw__wants_result(&state->epilogue);
        dw__step_attach(instruction->epilogue, &state->epilogue, call);
    }
    return wanted;
}

/* Enqueues one instruction. Sets *ran to false if the caller left out all that it writes. */
static dw_status enqueue(dw__run *run, uint32_t index, void *stream, bool *ran) {
    const dw_plan *plan = run->plan;
    const dw__gpu_kept *kept = plan->kept;
    dw__operation_call *call = &((dw__gpu_call *)run->state)->call;
    const dw__instruction *instruction = &plan->code.items[index];
    const dw__step *step = &instruction->step;
    *ran = bind(run, instruction);
    if (!*ran) return DW_OK;
    call->stream = stream;
    call->workspace = instruction->scratch == DW_NONE
                          ? NULL
                          : dw__storage_address(plan, run->bindings, instruction->scratch);
    call->error = (dw_data_error){(unsigned *)kept->word, index};
    dw_status status = step->kernel->enqueue(call, plan->target.context, step->variant);
    if (status == DW_OK) return DW_OK;
    char label[160];
    dw__node_label(plan->engine->graph, step->node, label, sizeof label);
    return dw__fail_prefix(status, "%s, %s", label, step->kernel->name);
}

dw_status dw__gpu_enqueue_range(dw__run *run, uint32_t from, uint32_t to, void *stream) {
    bool ran;
    for (uint32_t i = from; i < to; i++) DW_RETURN_IF_FAILED(enqueue(run, i, stream, &ran));
    return DW_OK;
}

/* ---- timed runs ----------------------------------------------------------------------------------- */

/* Enqueues the range with an event in front of and behind each instruction. ran[i]: whether instruction from + i
 * ran. */
static dw_status enqueue_between(dw__run *run, uint32_t from, uint32_t to, void *const *events,
                                 bool *ran) {
    const dw_device *device = run->plan->target.device;
    void *stream = run->bindings->stream;
    DW_RETURN_IF_FAILED(device->event_record(events[0], stream));
    for (uint32_t i = 0; i < to - from; i++) {
        dw__instruction_watched(run->plan, from + i, 1);
        const dw_status status = enqueue(run, from + i, stream, &ran[i]);
        dw__instruction_watched(run->plan, from + i, 0);
        DW_RETURN_IF_FAILED(status);
        DW_RETURN_IF_FAILED(device->event_record(events[i + 1], stream));
    }
    return DW_OK;
}

/* The stream is idle when the first event is recorded, so that this event happens at `start` on the host's clock. */
static dw_status read_times(dw__run *run, uint32_t from, uint32_t to, void *const *events,
                            const bool *ran, double start) {
    dw_plan *plan = run->plan;
    const dw_device *device = plan->target.device;
    double whole;
    DW_RETURN_IF_FAILED(device->event_seconds(events[0], events[to - from], &whole)); /* waits */
    for (uint32_t i = 0; i < to - from; i++) {
        double seconds;
        DW_RETURN_IF_FAILED(device->event_seconds(events[i], events[i + 1], &seconds));
        if (ran[i]) dw__instruction_ran(&plan->code.items[from + i], start, seconds);
        start += seconds;
    }
    return DW_OK;
}

dw_status dw__gpu_time_range(dw__run *run, uint32_t from, uint32_t to) {
    const dw_device *device = run->plan->target.device;
    const size_t count = (size_t)(to - from) + 1;
    dw_status status = DW_OK;
    void **events = dw__calloc(count, sizeof *events);
    bool *ran = dw__calloc(count, sizeof *ran);
    if (!events || !ran) DW_TRY(dw__fail_memory("the events of a timed run", count));
    for (size_t i = 0; i < count; i++) DW_TRY(device->event_create(&events[i]));
    DW_TRY(device->stream_synchronize(run->bindings->stream));
    const double start = dw__seconds();
    DW_TRY(enqueue_between(run, from, to, events, ran));
    DW_TRY(read_times(run, from, to, events, ran, start));
cleanup:
    for (size_t i = 0; events && i < count; i++)
        if (events[i]) device->event_destroy(events[i]);
    dw__free(events);
    dw__free(ran);
    return status;
}

static dw_status run_range(dw__run *run, uint32_t from, uint32_t to) {
    void *stream = run->bindings->stream;
    bool recorded = true;
    if (from < to && dw__plan_is_timed(run->plan))
        DW_RETURN_IF_FAILED(run->plan->target.device->stream_records(stream, &recorded));
    return recorded ? dw__gpu_enqueue_range(run, from, to, stream)
                    : dw__gpu_time_range(run, from, to);
}

dw_status dw__gpu_synchronize(dw_plan *plan, void *stream) {
    DW_RETURN_IF_FAILED(plan->target.device->stream_synchronize(stream));
    return take_data_error(plan);
}

const dw__executor dw__executor_stream = {
    .name = "stream",
    .open = dw__gpu_open,
    .zeros = dw__gpu_zeros,
    .begin = dw__gpu_begin,
    .run_range = run_range,
    .end = dw__gpu_end,
    .forget = dw__gpu_forget,
    .synchronize = dw__gpu_synchronize,
};
