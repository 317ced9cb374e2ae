/* NVIDIA GPUs as a device, through the driver API.
 *
 * The caller chooses the calling thread's current context (PyTorch makes one current per device), and we do
 * not change it. A thread without one, such as a worker of autograd, gets the first device's primary context,
 * which the CUDA runtime and PyTorch share. */
#include "deepwell/emulator.h"
#include "device/cuda_driver.h"
#include "device/device_table.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* ---- contexts ------------------------------------------------------------------------------ */

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static dw__context contexts[DW__CONTEXTS]; /* entries below context_count never change */
static _Atomic int context_count;

/* The primary context is retained once per process and never released, so it lives as long as the library. */
static dw_status make_primary_current(const dw__cuda *cuda, void **context) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *primary;
    dw_status status = DW_OK;
    int device, result = 0;
    pthread_mutex_lock(&lock);
    if (!primary) {
        result = cuda->device_get(&device, 0);
        if (result == 0) result = cuda->primary_retain(&primary, device);
        if (result != 0) {
            primary = NULL;
            status =
                dw__cuda_fail(result, "the primary context of GPU 0 (cuDevicePrimaryCtxRetain)");
        }
    }
    *context = primary;
    pthread_mutex_unlock(&lock);
    if (status == DW_OK && (result = cuda->context_set_current(*context)) != 0)
        status = dw__cuda_fail(result, "cuCtxSetCurrent");
    return status;
}

static dw_status enter_context(const dw__cuda **cuda, void **context) {
    DW_RETURN_IF_FAILED(dw__cuda_driver(cuda));
    int result = (*cuda)->context_current(context);
    if (result != 0) return dw__cuda_fail(result, "cuCtxGetCurrent");
    return *context ? DW_OK : make_primary_current(*cuda, context);
}

/* Returns the driver and ensures that a context is current. */
static dw_status enter(const dw__cuda **cuda) {
    void *context;
    return enter_context(cuda, &context);
}

static dw_status describe(const dw__cuda *cuda, dw__context *context) {
    int device, major = 0, minor = 0, result = cuda->context_device(&device);
    const struct {
        int attribute, *value;
    } wanted[] = {
        {DW_CU_DEVICE_CAPABILITY_MAJOR, &major},
        {DW_CU_DEVICE_CAPABILITY_MINOR, &minor},
        {DW_CU_DEVICE_SM_COUNT, &context->sm_count},
        {DW_CU_DEVICE_CLOCK_RATE, &context->clock_khz},
        {DW_CU_DEVICE_MEMORY_CLOCK_RATE, &context->memory_clock_khz},
        {DW_CU_DEVICE_MEMORY_BUS_WIDTH, &context->memory_bus_bits},
        {DW_CU_DEVICE_L2_BYTES, &context->l2_bytes},
        {DW_CU_DEVICE_SHARED_BYTES_OPTIN, &context->shared_bytes},
    };
    if (result != 0) return dw__cuda_fail(result, "cuCtxGetDevice");
    for (size_t i = 0; i < DW_COUNT(wanted) && result == 0; i++)
        result = cuda->device_attribute(wanted[i].value, wanted[i].attribute, device);
    if (result == 0) result = cuda->device_name(context->name, (int)sizeof context->name, device);
    if (result == 0) result = cuda->device_memory(&context->memory_bytes, device);
    if (result != 0) return dw__cuda_fail(result, "the attributes of GPU %d", device);
    context->ordinal = device; /* the driver's device handles are their ordinals */
    context->capability = 10 * major + minor;
    context->driver_version = cuda->version;
    context->ptx_only =
        strncmp(context->name, DW_EMULATOR_GPU_NAME, strlen(DW_EMULATOR_GPU_NAME)) == 0;
    return DW_OK;
}

static const dw__context *find_context(uint64_t id) {
    int count = atomic_load_explicit(&context_count, memory_order_acquire);
    for (int i = 0; i < count; i++)
        if (contexts[i].id == id) return &contexts[i];
    return NULL;
}

static dw_status add_context(const dw__cuda *cuda, uint64_t id, const dw__context **context) {
    dw_status status = DW_OK;
    pthread_mutex_lock(&contexts_lock);
    *context = find_context(id); /* another thread has added it meanwhile */
    int count = atomic_load_explicit(&context_count, memory_order_relaxed);
    if (*context) goto cleanup;
    if (count == DW__CONTEXTS)
        DW_TRY(
            dw__fail(DW_UNSUPPORTED,
                     "this process has used %d CUDA contexts, the most that are supported; use the "
                     "devices' primary contexts instead of creating new ones",
                     DW__CONTEXTS));
    dw__context *made = &contexts[count];
    memset(made, 0, sizeof *made);
    DW_TRY(describe(cuda, made));
    made->id = id;
    made->index = count;
    made->device = &dw__device_cuda;
    atomic_store_explicit(&context_count, count + 1, memory_order_release);
    *context = made;

cleanup:
    pthread_mutex_unlock(&contexts_lock);
    return status;
}

static dw_status cuda_context(const dw__context **context) {
    const dw__cuda *cuda;
    void *current;
    unsigned long long id;
    DW_RETURN_IF_FAILED(enter_context(&cuda, &current));
    int result = cuda->context_id(current, &id);
    if (result != 0) return dw__cuda_fail(result, "cuCtxGetId");
    *context = find_context(id);
    return *context ? DW_OK : add_context(cuda, id, context);
}

static dw_status cuda_open(void) {
    const dw__cuda *cuda;
    return dw__cuda_driver(&cuda);
}

/* ---- memory -------------------------------------------------------------------------------- */

static dw__cu_address address_of(const void *memory) { return (dw__cu_address)(uintptr_t)memory; }

static dw_status cuda_allocate(size_t bytes, void **memory) {
    const dw__cuda *cuda;
    dw__cu_address address = 0;
    *memory = NULL;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->memory_allocate(&address, bytes > 0 ? bytes : 1);
    if (result != 0) return dw__cuda_fail(result, "%zu bytes of GPU memory (cuMemAlloc)", bytes);
    *memory = (void *)(uintptr_t)address;
    return DW_OK;
}

static void cuda_release(void *memory, size_t bytes) {
    const dw__cuda *cuda;
    (void)bytes;
    if (enter(&cuda) == DW_OK) cuda->memory_release(address_of(memory));
}

/* With unified addressing, which every supported GPU has, the device's address is the host's. */
static dw_status cuda_host_allocate(size_t bytes, void **memory) {
    const dw__cuda *cuda;
    *memory = NULL;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->host_allocate(memory, bytes > 0 ? bytes : 1);
    return result == 0
               ? DW_OK
               : dw__cuda_fail(result, "%zu bytes of page-locked memory (cuMemAllocHost)", bytes);
}

static void cuda_host_release(void *memory) {
    const dw__cuda *cuda;
    if (memory && enter(&cuda) == DW_OK) cuda->host_release(memory);
}

static dw_status cuda_copy(void *to, const void *from, size_t bytes) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->copy(address_of(to), address_of(from), bytes, NULL);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a copy of %zu bytes on the GPU", bytes);
}

static dw_status cuda_copy_in(void *to, const void *host, size_t bytes, void *stream) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->copy_in(address_of(to), host, bytes, stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a copy of %zu bytes to the GPU", bytes);
}

static dw_status cuda_copy_out(void *host, const void *from, size_t bytes, void *stream) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->copy_out(host, address_of(from), bytes, stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a copy of %zu bytes from the GPU", bytes);
}

static dw_status cuda_fill_on(void *memory, int byte, size_t bytes, void *stream) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->fill(address_of(memory), (unsigned char)byte, bytes, stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a fill of %zu bytes on the GPU", bytes);
}

static dw_status cuda_fill(void *memory, int byte, size_t bytes) {
    return cuda_fill_on(memory, byte, bytes, NULL);
}

/* ---- streams and events ---------------------------------------------------------------------- */

static dw_status cuda_stream_create(void **stream) {
    enum { NON_BLOCKING = 1 };
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->stream_create(stream, NON_BLOCKING);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a new stream (cuStreamCreate)");
}

static void cuda_stream_destroy(void *stream) {
    const dw__cuda *cuda;
    if (stream && dw__cuda_driver(&cuda) == DW_OK) cuda->stream_destroy(stream);
}

static dw_status cuda_stream_synchronize(void *stream) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->stream_synchronize(stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "waiting for a stream");
}

static dw_status cuda_stream_wait(void *stream, void *event) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->stream_wait(stream, event, 0);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a stream's wait for an event");
}

static dw_status cuda_event_create(void **event) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->event_create(event, 0);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "a new event (cuEventCreate)");
}

static void cuda_event_destroy(void *event) {
    const dw__cuda *cuda;
    if (event && dw__cuda_driver(&cuda) == DW_OK) cuda->event_destroy(event);
}

static dw_status cuda_event_record(void *event, void *stream) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->event_record(event, stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "recording an event");
}

static dw_status cuda_event_seconds(void *from, void *to, double *seconds) {
    const dw__cuda *cuda;
    float milliseconds = 0.0f;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->event_synchronize(to);
    if (result == 0) result = cuda->event_elapsed(&milliseconds, from, to);
    if (result != 0) return dw__cuda_fail(result, "the time between two events");
    *seconds = 1e-3 * (double)milliseconds;
    return DW_OK;
}

/* ---- modules and launches ---------------------------------------------------------------------- */

static dw_status cuda_module_load(const void *image, const char *name, void **module) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->module_load(module, image);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "loading %s (cuModuleLoadData)", name);
}

static void cuda_module_unload(void *module) {
    const dw__cuda *cuda;
    if (module && enter(&cuda) == DW_OK) cuda->module_unload(module);
}

static dw_status cuda_module_function(void *module, const char *name, void **function) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->module_function(function, module, name);
    return result == 0
               ? DW_OK
               : dw__cuda_fail(result, "kernel %s in its module (cuModuleGetFunction)", name);
}

static dw_status cuda_function_shared(void *function, const char *name, unsigned bytes) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result =
        cuda->function_set_attribute(function, DW_CU_FUNCTION_DYNAMIC_SHARED_BYTES, (int)bytes);
    return result == 0 ? DW_OK
                       : dw__cuda_fail(result,
                                       "%u bytes of shared memory for kernel %s "
                                       "(cuFuncSetAttribute)",
                                       bytes, name);
}

static dw_status cuda_launch(const dw__launch *launch) {
    const dw__cuda *cuda;
    dw__cu_launch_attribute attributes[2];
    dw__cu_launch_config config = {
        .grid = {launch->grid[0], launch->grid[1], launch->grid[2]},
        .block = {launch->block[0], launch->block[1], launch->block[2]},
        .shared_bytes = launch->shared_bytes,
        .stream = launch->stream,
        .attributes = attributes,
    };
    if (launch->cluster[0] > 0) {
        dw__cu_launch_attribute *attribute = &attributes[config.attribute_count++];
        memset(attribute, 0, sizeof *attribute);
        attribute->id = DW_CU_LAUNCH_CLUSTER;
        memcpy(attribute->value.cluster, launch->cluster, sizeof launch->cluster);
    }
    if (launch->dependent) {
        dw__cu_launch_attribute *attribute = &attributes[config.attribute_count++];
        memset(attribute, 0, sizeof *attribute);
        attribute->id = DW_CU_LAUNCH_PROGRAMMATIC_SERIALIZATION;
        attribute->value.flag = 1;
    }
    /* This is the hot path, so it does not check for a current context; callers have made one current. */
    DW_RETURN_IF_FAILED(dw__cuda_driver(&cuda));
    int result = cuda->launch(&config, launch->function, launch->arguments, NULL);
    if (result == DW_CU_INVALID_CONTEXT) {
        DW_RETURN_IF_FAILED(enter(&cuda));
        result = cuda->launch(&config, launch->function, launch->arguments, NULL);
    }
    return result == 0
               ? DW_OK
               : dw__cuda_fail(result,
                               "launching %s, grid (%u, %u, %u), %u threads, %u bytes of "
                               "shared memory",
                               launch->name, launch->grid[0], launch->grid[1], launch->grid[2],
                               launch->block[0] * launch->block[1] * launch->block[2],
                               launch->shared_bytes);
}

static dw_status encode_map(const dw__tensor_map_shape *shape, dw__tensor_map *map) {
    enum { INTERLEAVE_NONE = 0, PROMOTION_L2_256B = 3, FILL_ZERO = 0 };
    static const int types[] = {[DW__MAP_F16] = 6,
                                [DW__MAP_BF16] = 9,
                                [DW__MAP_F32] = 7,
                                [DW__MAP_U8] = 0,
                                [DW__MAP_U64] = 4};
    static const uint32_t steps[DW__MAP_AXES] = {1, 1, 1, 1, 1};
    int swizzle = shape->swizzle_bytes == 128  ? 3
                  : shape->swizzle_bytes == 64 ? 2
                  : shape->swizzle_bytes == 32 ? 1
                                               : 0;
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(dw__cuda_driver(&cuda));
    int result = cuda->tensor_map_tiled(
        map->bytes, types[shape->element], (uint32_t)shape->rank, shape->address, shape->size,
        shape->stride, shape->box, steps, INTERLEAVE_NONE, swizzle, PROMOTION_L2_256B, FILL_ZERO);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "cuTensorMapEncodeTiled");
}

/* A map depends only on its shape, and the steps of a training run use the same addresses again. Each thread
 * keeps its most recent maps, which is cheaper than having the driver encode them again. */
enum { KEPT_MAPS = 64 };
typedef struct kept_map {
    dw__tensor_map_shape shape; /* rank 0: empty entry */
    dw__tensor_map map;
} kept_map;
static _Thread_local kept_map kept_maps[KEPT_MAPS];
_Static_assert(sizeof(dw__tensor_map_shape) == 112, "compared as bytes: no gaps");

static dw_status cuda_tensor_map(const dw__tensor_map_shape *shape, dw__tensor_map *map) {
    uint64_t mixed = ((uintptr_t)shape->address >> 4 ^ (uint64_t)shape->box[1] << 40) *
                     UINT64_C(0x9E3779B97F4A7C15);
    kept_map *kept = &kept_maps[mixed >> 58];
    if (memcmp(&kept->shape, shape, sizeof *shape) != 0) {
        kept->shape.rank = 0;
        DW_RETURN_IF_FAILED(encode_map(shape, &kept->map));
        kept->shape = *shape;
    }
    *map = kept->map;
    return DW_OK;
}

/* ---- graph capture ------------------------------------------------------------------------------ */

static dw_status cuda_capture_relax(int *before) {
    enum { RELAXED = 2 };
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    *before = RELAXED;
    int result = cuda->capture_mode(before);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "cuThreadExchangeStreamCaptureMode");
}

static void cuda_capture_restore(int before) {
    const dw__cuda *cuda;
    if (dw__cuda_driver(&cuda) == DW_OK) cuda->capture_mode(&before);
}

/* ---- graphs --------------------------------------------------------------------------------------- */

static dw_status cuda_graph_begin(void *stream) {
    enum { RELAXED = 2 };
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->capture_begin(stream, RELAXED);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "cuStreamBeginCapture");
}

/* The legacy default stream records nothing, and asking about it would break other streams' recordings. */
static dw_status cuda_stream_records(void *stream, bool *recorded) {
    const dw__cuda *cuda;
    int status = 0;
    *recorded = false;
    if (!stream) return DW_OK;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->capture_status(stream, &status);
    *recorded = status != 0;
    return result == 0 ? DW_OK : dw__cuda_fail(result, "cuStreamIsCapturing");
}

static dw_status cuda_graph_end(void *stream, void **graph) {
    const dw__cuda *cuda;
    void *recorded = NULL, *made = NULL;
    struct {
        int result;
        void *from, *to;
    } outcome; /* CUgraphExecUpdateResultInfo */
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->capture_end(stream, &recorded);
    if (result != 0) return dw__cuda_fail(result, "cuStreamEndCapture");
    if (*graph && cuda->graph_update(*graph, recorded, &outcome) == 0) {
        cuda->graph_destroy(recorded);
        return DW_OK;
    }
    result = cuda->graph_instantiate(&made, recorded, 0);
    cuda->graph_destroy(recorded);
    if (result != 0) return dw__cuda_fail(result, "cuGraphInstantiate");
    if (*graph) cuda->graph_release(*graph);
    *graph = made;
    return DW_OK;
}

static dw_status cuda_graph_launch(void *graph, void *stream) {
    const dw__cuda *cuda;
    DW_RETURN_IF_FAILED(enter(&cuda));
    int result = cuda->graph_launch(graph, stream);
    return result == 0 ? DW_OK : dw__cuda_fail(result, "cuGraphLaunch");
}

static void cuda_graph_destroy(void *graph) {
    const dw__cuda *cuda;
    if (graph && enter(&cuda) == DW_OK) cuda->graph_release(graph);
}

const dw_device dw__device_cuda = {
    .version = DW_DEVICE_VERSION,
    .name = "cuda",
    .allocate = cuda_allocate,
    .release = cuda_release,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .open = cuda_open,
    .context = cuda_context,
    .copy_in = cuda_copy_in,
    .copy_out = cuda_copy_out,
    .fill_on = cuda_fill_on,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_synchronize = cuda_stream_synchronize,
    .stream_wait = cuda_stream_wait,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_seconds = cuda_event_seconds,
    .module_load = cuda_module_load,
    .module_unload = cuda_module_unload,
    .module_function = cuda_module_function,
    .function_shared = cuda_function_shared,
    .launch = cuda_launch,
    .tensor_map = cuda_tensor_map,
    .capture_relax = cuda_capture_relax,
    .capture_restore = cuda_capture_restore,
    .graph_begin = cuda_graph_begin,
    .graph_end = cuda_graph_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .host_allocate = cuda_host_allocate,
    .host_release = cuda_host_release,
    .stream_records = cuda_stream_records,
};
