/* The table of functions that defines a device. New members are appended; optional members are marked and may
 * be NULL. `version` says which members exist. */
#ifndef DW_DEVICE_TABLE_H
#define DW_DEVICE_TABLE_H

#include "base/base.h"
#include "deepwell/device.h"

#define DW_DEVICE_VERSION 4

/* Constant properties of a context. There is one entry for each context that was current during one of our
 * calls. It is found without a lock and is valid until the process ends. `index` is below DW__CONTEXTS:
 * tables of loaded objects per context (modules, functions) use it. */
#define DW__CONTEXTS 32
typedef struct dw__context {
    int index;
    uint64_t id;    /* from the driver; never reused for another context */
    int ordinal;    /* ordinal of the device */
    char name[128]; /* "NVIDIA H200" */
    int capability; /* 90 for compute capability 9.0 */
    int sm_count, clock_khz;
    int memory_clock_khz, memory_bus_bits, l2_bytes;
    int shared_bytes; /* most dynamic shared memory of a block */
    size_t memory_bytes;
    int driver_version;             /* 13000 */
    const struct dw_device *device; /* the device of the context */
    bool ptx_only;                  /* supports modules as PTX, not machine code */
    bool plans_only; /* plans are made for it, and nothing is compiled or runs (device_plan.c) */
} dw__context;

typedef struct dw__launch {
    const char *name; /* name of the kernel, for messages */
    void *function;
    unsigned grid[3], block[3];
    unsigned cluster[3]; /* cluster[0] = 0: no cluster */
    unsigned shared_bytes;
    bool
        dependent; /* may begin before the kernel ahead of it in the stream ends (programmatic dependent launch) */
    void *stream;
    void **arguments; /* addresses of the kernel's arguments */
} dw__launch;

/* The tensor that TMA reads: a box of a strided tensor. The hardware defines the 128 bytes. */
typedef struct dw__tensor_map {
    _Alignas(64) unsigned char bytes[128];
} dw__tensor_map;
typedef enum dw__map_element {
    DW__MAP_F16,
    DW__MAP_BF16,
    DW__MAP_F32,
    DW__MAP_U8,
    DW__MAP_U64
} dw__map_element;
#define DW__MAP_AXES 5
typedef struct dw__tensor_map_shape {
    dw__map_element element;
    int rank;                    /* axis 0 is contiguous */
    void *address;               /* multiple of 16 */
    uint64_t size[DW__MAP_AXES]; /* 1 to 2^32 elements */
    uint64_t
        stride[DW__MAP_AXES -
               1]; /* bytes from one to the next along axes 1, 2, ...; multiples of 16 below 2^40 */
    uint32_t box[DW__MAP_AXES]; /* 1 to 256 elements */
    int swizzle_bytes;          /* 0, 32, 64 or 128 */
} dw__tensor_map_shape;

struct dw_device {
    uint32_t version;
    const char *name;
    dw_status (*allocate)(size_t bytes, void **memory);
    void (*release)(void *memory, size_t bytes);
    dw_status (*copy)(void *to, const void *from, size_t bytes);
    dw_status (*fill)(void *memory, int byte, size_t bytes);

    /* Since version 2. Set on devices that run kernels, otherwise all NULL. The functions work in the calling
     * thread's current context. If it has none, they make the first device's context current. */
    dw_status (*open)(void); /* DW_UNSUPPORTED if this machine has no such device */
    dw_status (*context)(const dw__context **context);
    dw_status (*copy_in)(void *to, const void *host, size_t bytes, void *stream);
    dw_status (*copy_out)(void *host, const void *from, size_t bytes,
                          void *stream); /* read it after synchronizing */
    dw_status (*fill_on)(void *memory, int byte, size_t bytes, void *stream);
    dw_status (*stream_create)(void **stream); /* does not wait for the legacy default stream */
    void (*stream_destroy)(void *stream);
    dw_status (*stream_synchronize)(void *stream);
    dw_status (*stream_wait)(void *stream, void *event);
    dw_status (*event_create)(void **event);
    void (*event_destroy)(void *event);
    dw_status (*event_record)(void *event, void *stream);
    dw_status (*event_seconds)(void *from, void *to, double *seconds); /* waits for `to` */
    /* `image` is a cubin, or PTX that ends with a NUL. */
    dw_status (*module_load)(const void *image, const char *name, void **module);
    void (*module_unload)(void *module);
    dw_status (*module_function)(void *module, const char *name, void **function);
    /* Allows launches of the kernel with this much dynamic shared memory. */
    dw_status (*function_shared)(void *function, const char *name, unsigned bytes);
    dw_status (*launch)(const dw__launch *launch); /* allocates nothing */
    dw_status (*tensor_map)(const dw__tensor_map_shape *shape, dw__tensor_map *map);
    /* Between these two calls the thread may allocate and load while a stream is being captured. */
    dw_status (*capture_relax)(int *before);
    void (*capture_restore)(int before);

    /* Since version 3, on devices that run kernels: graphs of recorded work. Between graph_begin and graph_end, work
     * that the thread enqueues on the stream is recorded instead of run. The stream is not the legacy default
     * stream. */
    dw_status (*graph_begin)(void *stream);
    /* `graph` is NULL or a graph of an earlier recording, which takes on the new one: its kernels' arguments alone if
     * these are all that differ. After a failure it is unchanged. */
    dw_status (*graph_end)(void *stream, void **graph);
    dw_status (*graph_launch)(void *graph, void *stream);
    void (*graph_destroy)(void *graph);

    /* Since version 4, on devices that run kernels: page-locked memory of the host that kernels read and write at the
     * same address. */
    dw_status (*host_allocate)(size_t bytes, void **memory);
    void (*host_release)(void *memory);
    /* Says whether work on the stream is being recorded in a graph, ours or the caller's. */
    dw_status (*stream_records)(void *stream, bool *recorded);
};

extern const dw_device dw__device_cpu, dw__device_cuda, dw__device_emulator_sm_90a,
    dw__device_emulator_sm_100a, dw__device_emulator_sm_103a, dw__device_emulator_sm_120a,
    dw__device_plan_sm_90a;

#endif
