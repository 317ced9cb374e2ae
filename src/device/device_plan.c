/* A GPU that is not there, as a device for plans: "plan:sm_90a". Kernels are chosen and memory is placed as for an
 * H200, but no code is compiled and nothing runs. Only the host's memory that a plan keeps exists. */
#include "device/device_table.h"
#include <stdlib.h>

static const dw__context hopper = {.index = DW__CONTEXTS - 5, /* behind the emulated GPUs' */
                                   .id = UINT64_MAX - 4,
                                   .name = "a planned sm_90a",
                                   .capability = 90,
                                   .sm_count = 132,
                                   .clock_khz = 1980000,
                                   .memory_clock_khz = 3201000,
                                   .memory_bus_bits = 6144,
                                   .l2_bytes = 60 << 20,
                                   .shared_bytes = 227 << 10,
                                   .memory_bytes = (size_t)143771 << 20,
                                   .driver_version = 13000,
                                   .device = &dw__device_plan_sm_90a,
                                   .plans_only = true};

static dw_status refuse(void) {
    return dw__fail(DW_UNSUPPORTED,
                    "device \"%s\" makes plans and runs nothing: use \"cuda\" on a GPU, or "
                    "\"emulator:sm_90a\"",
                    dw__device_plan_sm_90a.name);
}

static dw_status plan_open(void) { return DW_OK; }
static dw_status plan_context(const dw__context **context) {
    *context = &hopper;
    return DW_OK;
}

static dw_status host_allocate(size_t bytes, void **memory) {
    *memory = calloc(1, bytes > 0 ? bytes : 1);
    return *memory ? DW_OK : dw__fail_memory("what a plan keeps", bytes);
}
static void host_release(void *memory) { free(memory); }

static dw_status no_memory(size_t bytes, void **memory) {
    (void)bytes;
    *memory = NULL;
    return refuse();
}
static void no_release(void *memory, size_t bytes) { (void)memory, (void)bytes; }
static dw_status no_copy(void *to, const void *from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
    return refuse();
}
static dw_status no_fill(void *memory, int byte, size_t bytes) {
    (void)memory, (void)byte, (void)bytes;
    return refuse();
}
static dw_status no_transfer(void *to, const void *from, size_t bytes, void *stream) {
    (void)to, (void)from, (void)bytes, (void)stream;
    return refuse();
}
static dw_status no_fill_on(void *memory, int byte, size_t bytes, void *stream) {
    (void)memory, (void)byte, (void)bytes, (void)stream;
    return refuse();
}
static dw_status no_handle(void **made) {
    *made = NULL;
    return refuse();
}
static void no_destroy(void *handle) { (void)handle; }
static dw_status no_wait(void *stream) {
    (void)stream;
    return refuse();
}
static dw_status no_pair(void *a, void *b) {
    (void)a, (void)b;
    return refuse();
}
static dw_status no_seconds(void *from, void *to, double *seconds) {
    (void)from, (void)to, (void)seconds;
    return refuse();
}
static dw_status no_module(const void *image, const char *name, void **module) {
    (void)image, (void)name, (void)module;
    return refuse();
}
static dw_status no_function(void *module, const char *name, void **function) {
    (void)module, (void)name, (void)function;
    return refuse();
}
static dw_status no_shared(void *function, const char *name, unsigned bytes) {
    (void)function, (void)name, (void)bytes;
    return refuse();
}
static dw_status no_launch(const dw__launch *launch) {
    (void)launch;
    return refuse();
}
static dw_status no_map(const dw__tensor_map_shape *shape, dw__tensor_map *map) {
    (void)shape, (void)map;
    return refuse();
}
static dw_status relax(int *before) {
    *before = 0;
    return DW_OK;
}
static void restore(int before) { (void)before; }
static dw_status no_graph_end(void *stream, void **graph) {
    (void)stream, (void)graph;
    return refuse();
}
static dw_status no_records(void *stream, bool *recorded) {
    (void)stream;
    *recorded = false;
    return refuse();
}

const dw_device dw__device_plan_sm_90a = {
    .version = DW_DEVICE_VERSION,
    .name = "plan:sm_90a",
    .allocate = no_memory,
    .release = no_release,
    .copy = no_copy,
    .fill = no_fill,
    .open = plan_open,
    .context = plan_context,
    .copy_in = no_transfer,
    .copy_out = no_transfer,
    .fill_on = no_fill_on,
    .stream_create = no_handle,
    .stream_destroy = no_destroy,
    .stream_synchronize = no_wait,
    .stream_wait = no_pair,
    .event_create = no_handle,
    .event_destroy = no_destroy,
    .event_record = no_pair,
    .event_seconds = no_seconds,
    .module_load = no_module,
    .module_unload = no_destroy,
    .module_function = no_function,
    .function_shared = no_shared,
    .launch = no_launch,
    .tensor_map = no_map,
    .capture_relax = relax,
    .capture_restore = restore,
    .graph_begin = no_wait,
    .graph_end = no_graph_end,
    .graph_launch = no_pair,
    .graph_destroy = no_destroy,
    .host_allocate = host_allocate,
    .host_release = host_release,
    .stream_records = no_records,
};
