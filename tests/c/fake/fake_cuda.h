/* Replaces libcuda.so.1: a driver without a GPU that follows the test's instructions and records its calls. Tests
 * load it by its path first, so that the library's dlopen("libcuda.so.1") finds it loaded. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdint.h>

enum { FAKE_MAPS = 4096, FAKE_LAUNCHES = 16, FAKE_PARAMS_BYTES = 1024 };

typedef struct fake_map {
    int type, rank, interleave, swizzle, promotion, fill;
    void *address;
    uint64_t sizes[5], strides[4];
    uint32_t box[5], steps[5];
} fake_map;

typedef struct fake_launch {
    char name[64], image[64]; /* of the function; the first bytes of the module's image */
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    int attribute_count, cluster[3], dependent;
    unsigned largest_shared; /* dynamic shared memory that the function was allowed at its launch */
    int maps
        [8]; /* numbers of the tensor maps among its parameters, from 1: fake_cuda.maps[number - 1] */
    unsigned char params[FAKE_PARAMS_BYTES];
} fake_launch;

typedef struct fake_cuda {
    /* Properties of the fake; set them before the library's first call. */
    int version, devices, capability, sm_count, shared_bytes, l2_bytes;
    /* Names of the GPUs; NULL: numbered. Their PCI addresses are 0000:10:00.0, 0000:11:00.0, ... */
    const char *name;
    /* The call with this name returns this result and does nothing. */
    const char *failing;
    int result;
    int refuse_real; /* modules that the fake compiler has not made */
    int refuse_ptx;
    /* Parameters of launched kernels, which a real driver reads from the module: as many tensor maps as maps_of()
     * returns for the kernel's name, then one block of params_bytes. */
    int (*maps_of)(const char *name);
    int params_bytes;
    /* Contexts: 0 is none; `current` is per process here. */
    uint64_t current;
    int64_t memory;             /* bytes allocated and not released */
    float event_milliseconds;   /* between two events; 0: 1.5 ms */
    int graphs, graph_launches; /* executable graphs that exist, and launches of them */

    /* Records of the calls. */
    char loaded[64]; /* the first bytes of the last module's image */
    int calls, loads, functions, map_count, launch_count, retains, relaxed;
    fake_map maps[FAKE_MAPS];            /* in the order in which they were encoded */
    fake_launch launches[FAKE_LAUNCHES]; /* likewise */
    /* Runs instead of a kernel; may be NULL. */
    void (*kernel)(const fake_launch *launch);
} fake_cuda;

/* fake_cuda *fake_cuda_state(void): exported by the library. */
#endif
