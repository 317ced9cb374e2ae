/* Emulated GPUs as devices, such as "emulator:sm_90a". There is one emulator per architecture, created on
 * first use and kept for the life of the process. Work runs when it is submitted, so streams and events never
 * wait. A finding of the checker makes the launch fail. */
#include "deepwell/emulator.h"
#include "device/device_table.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef struct emulated {
    const char *architecture;
    int sm_count;
    pthread_once_t once;
    dw_emulator *emulator;
    dw_status status;
    char message[1024];
    dw__context context;
} emulated;

static void start(emulated *e, int index, const dw_device *device) {
    static const size_t most_shared = 227 << 10;
    int capability = 0;
    e->status = dw_emulator_create(e->architecture, NULL, &e->emulator);
    if (e->status != DW_OK) snprintf(e->message, sizeof e->message, "%s", dw_last_error());
    sscanf(e->architecture, "sm_%d", &capability);
    /* These indexes are taken from the end; contexts of drivers are numbered from 0. */
    e->context = (dw__context){.index = DW__CONTEXTS - 1 - index,
                               .id = UINT64_MAX - (uint64_t)index,
                               .ordinal = index,
                               .capability = capability,
                               .sm_count = e->sm_count,
                               .clock_khz = 1980000,
                               .memory_clock_khz = 2619000,
                               .memory_bus_bits = 5120,
                               .l2_bytes = 50 << 20,
                               .shared_bytes = (int)(capability == 120 ? 99 << 10 : most_shared),
                               .memory_bytes = (size_t)80 << 30,
                               .driver_version = 13000,
                               .device = device,
                               .ptx_only = true};
    snprintf(e->context.name, sizeof e->context.name, DW_EMULATOR_GPU_NAME "%s", e->architecture);
}

static dw_status ready(const emulated *e) {
    return e->status == DW_OK ? DW_OK : dw__fail(e->status, "%s", e->message);
}

/* ---- memory, streams, events: the same for every architecture ---------------------------------------- */

struct recording;

/* A stream or an event. */
typedef struct handle {
    struct timespec time;        /* of an event */
    struct recording *recording; /* of a stream that records its work */
} handle;

static dw_status handle_create(void **made) {
    *made = dw__calloc(1, sizeof(handle));
    return *made ? DW_OK
                 : dw__fail_memory("a stream or event of an emulated device", sizeof(handle));
}
static dw_status done(void *of) {
    (void)of;
    return DW_OK;
}
static dw_status wait_for(void *stream, void *event) {
    (void)stream, (void)event;
    return DW_OK;
}
static dw_status record(void *event, void *stream) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &((handle *)event)->time);
    return DW_OK;
}
static dw_status seconds_between(void *from, void *to, double *seconds) {
    const struct timespec *a = &((handle *)from)->time, *b = &((handle *)to)->time;
    *seconds = (double)(b->tv_sec - a->tv_sec) + (double)(b->tv_nsec - a->tv_nsec) * 1e-9;
    return DW_OK;
}
static dw_status relax(int *before) {
    *before = 0;
    return DW_OK;
}
static void restore(int before) { (void)before; }

/* ---- kernels ----------------------------------------------------------------------------------------- */

/* Functions live as long as their module. */
typedef struct function {
    emulated *of;
    dw_emulator_module *module;
    struct function *next;
    char name[];
} function;
typedef struct module {
    dw_emulator_module *module;
    function *functions;
} module;

static dw_status load(emulated *e, const void *image, const char *name, void **made) {
    if (memcmp(image, "\177ELF", 4) == 0)
        return dw__fail(DW_UNSUPPORTED, "%s is machine code: an emulated device supports PTX",
                        name);
    module *m = dw__calloc(1, sizeof *m);
    if (!m) return dw__fail_memory("a module", sizeof *m);
    dw_status status = dw_emulator_load(e->emulator, image, strlen(image), name, &m->module);
    if (status == DW_OK)
        *made = m;
    else
        dw__free(m);
    return status;
}
static void unload(void *of) {
    module *m = of;
    if (!m) return;
    while (m->functions) {
        function *f = m->functions;
        m->functions = f->next;
        dw__free(f);
    }
    dw_emulator_unload(m->module);
    dw__free(m);
}
static dw_status find_function(emulated *e, void *of, const char *name, void **made) {
    module *m = of;
    DW_RETURN_IF_FAILED(dw_emulator_has_kernel(m->module, name));
    function *f = dw__malloc(sizeof *f + strlen(name) + 1);
    if (!f) return dw__fail_memory("a function", sizeof *f);
    *f = (function){.of = e, .module = m->module, .next = m->functions};
    memcpy(f->name, name, strlen(name) + 1);
    m->functions = f;
    *made = f;
    return DW_OK;
}
static dw_status set_shared(void *of, const char *name, unsigned bytes) {
    const function *f = of;
    const unsigned most = (unsigned)f->of->context.shared_bytes;
    if (bytes <= most) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "kernel %s needs %u bytes of shared memory: %s has %u", name,
                    bytes, f->of->context.name, most);
}

/* Findings belong to the launch that made them: if a second launch repeats a mistake, it is reported again. */
static dw_status run_launch(const dw__launch *l) {
    static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    const function *f = l->function;
    dw_emulator *emulator = f->of->emulator;
    dw_emulator_launch_options options = DW_EMULATOR_LAUNCH_DEFAULT;
    for (int axis = 0; axis < 3; axis++) {
        options.grid[axis] = l->grid[axis], options.block[axis] = l->block[axis];
        options.cluster[axis] = l->cluster[axis];
    }
    options.shared_bytes = l->shared_bytes;
    dw_finding finding;
    pthread_mutex_lock(&one_at_a_time);
    dw_emulator_clear_findings(emulator);
    dw_status status = dw_emulator_launch(f->module, f->name, &options, l->arguments, NULL);
    const bool found = dw_emulator_finding_count(emulator) > 0 &&
                       dw_emulator_finding(emulator, 0, &finding) == DW_OK;
    pthread_mutex_unlock(&one_at_a_time);
    if (!found) return status;
    char text[1200];
    dw_finding_text(&finding, text, sizeof text);
    return dw__fail(DW_DEVICE, "%s", text);
}

/* ---- graphs: launches with copies of their arguments ------------------------------------------------- */

typedef struct recording {
    struct {
        dw__launch *items;
        size_t count, capacity;
    } launches;
    dw__arena *memory; /* the arguments */
} recording;

static void graph_destroy(void *of) {
    recording *r = of;
    if (!r) return;
    dw__free(r->launches.items);
    dw__arena_destroy(r->memory);
    dw__free(r);
}

static void handle_destroy(void *of) {
    handle *h = of;
    if (h) graph_destroy(h->recording);
    dw__free(h);
}

static dw_status graph_begin(void *stream) {
    handle *h = stream;
    if (!h || h->recording)
        return dw__fail(DW_STATE, h ? "the stream records already: end that graph first"
                                    : "the legacy default stream records no graph: create one");
    recording *r = dw__calloc(1, sizeof *r);
    if (r) r->memory = dw__arena_create();
    if (!r || !r->memory) {
        graph_destroy(r);
        return dw__fail_memory("a graph of an emulated device", sizeof *r);
    }
    h->recording = r;
    return DW_OK;
}

static dw_status stream_records(void *stream, bool *recorded) {
    const handle *h = stream;
    *recorded = h && h->recording;
    return DW_OK;
}

static dw_status graph_end(void *stream, void **graph) {
    handle *h = stream;
    if (!h || !h->recording) return dw__fail(DW_STATE, "the stream records no graph: begin one");
    graph_destroy(*graph);
    *graph = h->recording;
    h->recording = NULL;
    return DW_OK;
}

/* Copies, fills and other graphs are not recorded. */
static dw_status may_run(const void *stream) {
    const handle *h = stream;
    if (!h || !h->recording) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "a graph of an emulated device holds kernels alone: copy, fill "
                                    "or launch another graph before it");
}

static dw_status graph_launch(void *graph, void *stream) {
    const recording *r = graph;
    DW_RETURN_IF_FAILED(may_run(stream));
    for (size_t i = 0; i < r->launches.count; i++) {
        dw__launch each = r->launches.items[i];
        each.stream = stream;
        DW_RETURN_IF_FAILED(run_launch(&each));
    }
    return DW_OK;
}

static dw_status record_launch(recording *r, const dw__launch *l) {
    const function *f = l->function;
    uint32_t offset, bytes, count = 0;
    dw__launch copy = *l;
    while (dw_emulator_kernel_parameter(f->module, f->name, count, &offset, &bytes) == DW_OK)
        count++;
    copy.arguments = dw__arena_alloc(r->memory, (count + 1) * sizeof *copy.arguments);
    if (!copy.arguments) return dw__fail_memory("arguments of a recorded launch", count);
    for (uint32_t i = 0; i < count; i++) {
        DW_RETURN_IF_FAILED(dw_emulator_kernel_parameter(f->module, f->name, i, &offset, &bytes));
        copy.arguments[i] = dw__arena_alloc(r->memory, bytes);
        if (!copy.arguments[i]) return dw__fail_memory("an argument of a recorded launch", bytes);
        memcpy(copy.arguments[i], l->arguments[i], bytes);
    }
    return DW_PUSH(&r->launches, copy);
}

static dw_status launch(const dw__launch *l) {
    const handle *stream = l->stream;
    return stream && stream->recording ? record_launch(stream->recording, l) : run_launch(l);
}

static dw_status tensor_map(const dw__tensor_map_shape *shape, dw__tensor_map *map) {
    static const int types[] = {[DW__MAP_F16] = 6,
                                [DW__MAP_BF16] = 9,
                                [DW__MAP_F32] = 7,
                                [DW__MAP_U8] = 0,
                                [DW__MAP_U64] = 4};
    dw_emulator_tensor_shape made = {.struct_size = sizeof made,
                                     .element = types[shape->element],
                                     .rank = shape->rank,
                                     .address = shape->address,
                                     .swizzle = shape->swizzle_bytes == 128  ? 3
                                                : shape->swizzle_bytes == 64 ? 2
                                                : shape->swizzle_bytes == 32 ? 1
                                                                             : 0};
    for (int axis = 0; axis < shape->rank; axis++) {
        made.size[axis] = shape->size[axis], made.box[axis] = shape->box[axis], made.step[axis] = 1;
        if (axis > 0) made.stride[axis - 1] = shape->stride[axis - 1];
    }
    return dw_emulator_tensor_map(&made, map->bytes);
}

/* ---- one table for each architecture ----------------------------------------------------------------- */

#define EMULATED(gpu, text, index, sms)                                                            \
    static emulated gpu = {.architecture = text, .sm_count = sms, .once = PTHREAD_ONCE_INIT};      \
    static void gpu##_start(void) { start(&gpu, index, &dw__device_##gpu); }                       \
    static dw_status gpu##_open(void) {                                                            \
        pthread_once(&gpu.once, gpu##_start);                                                      \
        return ready(&gpu);                                                                        \
    }                                                                                              \
    static dw_status gpu##_context(const dw__context **context) {                                  \
        DW_RETURN_IF_FAILED(gpu##_open());                                                         \
        *context = &gpu.context;                                                                   \
        return DW_OK;                                                                              \
    }                                                                                              \
    static dw_status gpu##_allocate(size_t bytes, void **memory) {                                 \
        DW_RETURN_IF_FAILED(gpu##_open());                                                         \
        return dw_emulator_allocate(gpu.emulator, bytes, memory);                                  \
    }                                                                                              \
    static void gpu##_release(void *memory, size_t bytes) {                                        \
        (void)bytes;                                                                               \
        dw_emulator_release(gpu.emulator, memory);                                                 \
    }                                                                                              \
    static dw_status gpu##_host_allocate(size_t bytes, void **memory) {                            \
        DW_RETURN_IF_FAILED(gpu##_open());                                                         \
        return dw_emulator_allocate_host(gpu.emulator, bytes, memory);                             \
    }                                                                                              \
    static void gpu##_host_release(void *memory) { gpu##_release(memory, 0); }                     \
    static dw_status gpu##_copy(void *to, const void *from, size_t bytes) {                        \
        return dw_emulator_copy(gpu.emulator, to, from, bytes);                                    \
    }                                                                                              \
    static dw_status gpu##_fill(void *memory, int byte, size_t bytes) {                            \
        return dw_emulator_fill(gpu.emulator, memory, byte, bytes);                                \
    }                                                                                              \
    static dw_status gpu##_copy_in(void *to, const void *host, size_t bytes, void *stream) {       \
        DW_RETURN_IF_FAILED(may_run(stream));                                                      \
        return dw_emulator_copy_in(gpu.emulator, to, host, bytes);                                 \
    }                                                                                              \
    static dw_status gpu##_copy_out(void *host, const void *from, size_t bytes, void *stream) {    \
        DW_RETURN_IF_FAILED(may_run(stream));                                                      \
        return dw_emulator_copy_out(gpu.emulator, host, from, bytes);                              \
    }                                                                                              \
    static dw_status gpu##_fill_on(void *memory, int byte, size_t bytes, void *stream) {           \
        DW_RETURN_IF_FAILED(may_run(stream));                                                      \
        return dw_emulator_fill(gpu.emulator, memory, byte, bytes);                                \
    }                                                                                              \
    static dw_status gpu##_load(const void *image, const char *file, void **made) {                \
        DW_RETURN_IF_FAILED(gpu##_open());                                                         \
        return load(&gpu, image, file, made);                                                      \
    }                                                                                              \
    static dw_status gpu##_function(void *of, const char *kernel, void **made) {                   \
        return find_function(&gpu, of, kernel, made);                                              \
    }                                                                                              \
    const dw_device dw__device_##gpu = {                                                           \
        .version = DW_DEVICE_VERSION,                                                              \
        .name = "emulator:" text,                                                                  \
        .allocate = gpu##_allocate,                                                                \
        .release = gpu##_release,                                                                  \
        .copy = gpu##_copy,                                                                        \
        .fill = gpu##_fill,                                                                        \
        .open = gpu##_open,                                                                        \
        .context = gpu##_context,                                                                  \
        .copy_in = gpu##_copy_in,                                                                  \
        .copy_out = gpu##_copy_out,                                                                \
        .fill_on = gpu##_fill_on,                                                                  \
        .stream_create = handle_create,                                                            \
        .stream_destroy = handle_destroy,                                                          \
        .stream_synchronize = done,                                                                \
        .stream_wait = wait_for,                                                                   \
        .event_create = handle_create,                                                             \
        .event_destroy = handle_destroy,                                                           \
        .event_record = record,                                                                    \
        .event_seconds = seconds_between,                                                          \
        .module_load = gpu##_load,                                                                 \
        .module_unload = unload,                                                                   \
        .module_function = gpu##_function,                                                         \
        .function_shared = set_shared,                                                             \
        .launch = launch,                                                                          \
        .tensor_map = tensor_map,                                                                  \
        .capture_relax = relax,                                                                    \
        .capture_restore = restore,                                                                \
        .graph_begin = graph_begin,                                                                \
        .graph_end = graph_end,                                                                    \
        .graph_launch = graph_launch,                                                              \
        .graph_destroy = graph_destroy,                                                            \
        .host_allocate = gpu##_host_allocate,                                                      \
        .host_release = gpu##_host_release,                                                        \
        .stream_records = stream_records,                                                          \
    };
EMULATED(emulator_sm_90a, "sm_90a", 0, 132)
EMULATED(emulator_sm_100a, "sm_100a", 1, 148)
EMULATED(emulator_sm_103a, "sm_103a", 2, 148)
EMULATED(emulator_sm_120a, "sm_120a", 3, 188)
