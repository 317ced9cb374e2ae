/* The table of functions that a device is. New members go to the end, optional ones may be NULL and are
 * marked; `version` says how many there are. */
#ifndef DW_DEVICE_H
#define DW_DEVICE_H

#include "base/base.h"
#include "deepwell/device.h"

#define DW_DEVICE_VERSION 2

/* What does not change while a context lives. One entry for each context that was ever current when we were called,
 * found without a lock; valid until the process ends. `index` is below DW__CONTEXTS: tables of what is loaded per
 * context (modules, functions) use it. */
#define DW__CONTEXTS 32
typedef struct dw__context {
    int index;
    uint64_t id;    /* of the driver, never used again for another context */
    int ordinal;    /* of the device */
    char name[128]; /* "NVIDIA H200" */
    int capability; /* 90 for compute capability 9.0 */
    int sm_count, clock_khz;
    int memory_clock_khz, memory_bus_bits, l2_bytes;
    int shared_bytes; /* dynamic shared memory that a block may ask for */
    size_t memory_bytes;
    int driver_version;             /* 13000 */
    const struct dw_device *device; /* whose context this is */
    bool ptx_only;                  /* takes modules as PTX, no machine code */
} dw__context;

typedef struct dw__launch {
    const char *name; /* of the kernel, for messages */
    void *function;
    unsigned grid[3], block[3];
    unsigned cluster[3]; /* cluster[0] = 0: no cluster */
    unsigned shared_bytes;
    bool
        dependent; /* may begin before the kernel ahead of it in the stream ends (programmatic dependent launch) */
    void *stream;
    void **arguments; /* addresses of the kernel's parameters */
} dw__launch;

/* What tensor memory access reads: a box of a strided tensor. The 128 bytes are the hardware's. */
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

    /* Version 2. Of devices that run kernels; NULL in others, all or none. They work in the calling thread's current
     * context, or where it has none in the first device's, which they make current. */
    dw_status (*open)(void); /* DW_UNSUPPORTED: there is no such device on this machine */
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
    /* So that the kernel may be launched with this much dynamic shared memory. */
    dw_status (*function_shared)(void *function, const char *name, unsigned bytes);
    dw_status (*launch)(const dw__launch *launch); /* allocates nothing */
    dw_status (*tensor_map)(const dw__tensor_map_shape *shape, dw__tensor_map *map);
    /* Between these two the calling thread may allocate and load while some stream is being captured. */
    dw_status (*capture_relax)(int *before);
    void (*capture_restore)(int before);
};

extern const dw_device dw__device_cpu, dw__device_cuda, dw__device_emulator_sm_90a,
    dw__device_emulator_sm_100a, dw__device_emulator_sm_103a, dw__device_emulator_sm_120a;

#endif
