/* A functional emulator of NVIDIA GPUs. It runs PTX kernels on the host's cores and reports mistakes that hardware
 * does not: races, reads of undefined memory, accesses out of bounds.
 *
 *     dw_emulator *gpu;
 *     dw_emulator_module *module;
 *     dw_emulator_create("sm_90a", NULL, &gpu);
 *     dw_emulator_load(gpu, ptx, strlen(ptx), "add.ptx", &module);
 *     dw_emulator_allocate(gpu, 4 * n, &x);
 *     dw_emulator_launch_options launch = DW_EMULATOR_LAUNCH_DEFAULT;
 *     launch.grid[0] = (n + 255) / 256, launch.block[0] = 256;
 *     dw_emulator_launch(module, "add", &launch, (void *[]){&x, &n}, NULL);
 *     dw_emulator_destroy(gpu);
 *
 * Calls are synchronous: a launch has ended when dw_emulator_launch returns. Global addresses are addresses of the
 * host. Several threads may use one emulator; it runs one launch at a time. docs/emulator.md says what is emulated.
 */
#ifndef DEEPWELL_EMULATOR_H
#define DEEPWELL_EMULATOR_H

#include "deepwell/status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Prefix of the names of emulated GPUs, also under `deepwell emulate`. Such GPUs run PTX, not machine code. */
#define DW_EMULATOR_GPU_NAME "Deepwell emulator of "

typedef struct dw_emulator dw_emulator;
typedef struct dw_emulator_module dw_emulator_module;

typedef struct dw_emulator_options {
    size_t struct_size; /* sizeof(dw_emulator_options) */
    /* Also report undefined reads and races. Other mistakes stop a kernel in any case. */
    bool check;
    uint64_t seed; /* fixes the order in which warps and asynchronous operations run */
    /* Receives what kernels print during a launch, one printf at a time, never concurrently. NULL: output is
     * dropped. */
    void (*print)(void *context, const char *text, size_t bytes);
    void *print_context;
    /* The structure of version 0.1 ends here; that size is accepted as well. */
    int threads;         /* most host threads for one launch; 0: dw_get_threads() */
    int multiprocessors; /* SMs: bounds the blocks that run at once; 1 to 1024, 0: as the architecture */
    /* Bound for endless loops: a kernel is stopped after this many warp operations without an event (an arrival, a
     * barrier, an atomic write, the end of a cluster), once each running warp has executed a 64th of them; 0: 2^27. A
     * loop whose registers repeat without an event is found earlier. A warp that has executed eight times as many
     * operations is always stopped. */
    uint64_t endless;
} dw_emulator_options;
#define DW_EMULATOR_OPTIONS_DEFAULT                                                                \
    { sizeof(dw_emulator_options), true, 1, NULL, NULL, 0, 0, 0 }

/* `architecture`: "sm_90a", "sm_100a", "sm_103a" or "sm_120a". DW_NOT_FOUND: another one; the message lists these.
 * DW_INVALID_ARGUMENT: an option is out of range. DW_UNSUPPORTED: libdeepwell_emulator.so, which the first call loads
 * from beside libdeepwell, is missing or of another version. `options` NULL: the defaults. */
DW_API dw_status dw_emulator_create(const char *architecture, const dw_emulator_options *options,
                                    dw_emulator **emulator);
/* Also releases its memory and modules. */
DW_API void dw_emulator_destroy(dw_emulator *emulator);
/* Number of SMs of the emulated GPU. */
DW_API int dw_emulator_multiprocessors(const dw_emulator *emulator);

/* Global memory, aligned to 256 bytes. Reading it before it is written is a finding. DW_OUT_OF_MEMORY. */
DW_API dw_status dw_emulator_allocate(dw_emulator *emulator, size_t bytes, void **memory);
/* Host memory that kernels may access as well. It counts as written. DW_OUT_OF_MEMORY. */
DW_API dw_status dw_emulator_allocate_host(dw_emulator *emulator, size_t bytes, void **memory);
/* Lets kernels access the caller's own memory, until the emulator is destroyed or the memory is released here. Resets
 * what the emulator knew about the range. DW_OUT_OF_MEMORY. */
DW_API dw_status dw_emulator_register(dw_emulator *emulator, void *memory, size_t bytes);
/* Releases memory from any of the three calls above. DW_INVALID_ARGUMENT: it was not allocated here, or is already
 * released. */
DW_API dw_status dw_emulator_release(dw_emulator *emulator, void *memory);
/* Copies from the host; the range counts as written. DW_INVALID_ARGUMENT: it is not within one allocation. */
DW_API dw_status dw_emulator_copy_in(dw_emulator *emulator, void *to, const void *host,
                                     size_t bytes);
DW_API dw_status dw_emulator_copy(dw_emulator *emulator, void *to, const void *from, size_t bytes);
DW_API dw_status dw_emulator_copy_out(dw_emulator *emulator, void *host, const void *from,
                                      size_t bytes);
DW_API dw_status dw_emulator_fill(dw_emulator *emulator, void *memory, int byte, size_t bytes);
/* Returns whether the range lies within one allocation. */
DW_API bool dw_emulator_holds(const dw_emulator *emulator, const void *memory, size_t bytes);

/* Loads PTX text. DW_PARSE: the message is "NAME, PTX line 12: mistake: the line". DW_UNSUPPORTED names the PTX feature
 * that the emulator does not implement. */
DW_API dw_status dw_emulator_load(dw_emulator *emulator, const char *ptx, size_t bytes,
                                  const char *name, dw_emulator_module **module);
DW_API void dw_emulator_unload(dw_emulator_module *module);
/* DW_NOT_FOUND lists the kernels. DW_UNSUPPORTED: the kernel cannot be launched because of the instruction that the
 * message names. */
DW_API dw_status dw_emulator_has_kernel(const dw_emulator_module *module, const char *kernel);
/* Bytes of static shared memory, including the KiB that the system reserves, and bytes of local memory per lane.
 * Registers are not limited. DW_NOT_FOUND: there is no such kernel. */
DW_API dw_status dw_emulator_kernel_memory(const dw_emulator_module *module, const char *kernel,
                                           uint32_t *shared_bytes, uint32_t *local_bytes);
/* Most threads of a block, and the cluster size that the kernel requires (0 0 0: none). DW_NOT_FOUND. */
DW_API dw_status dw_emulator_kernel_bounds(const dw_emulator_module *module, const char *kernel,
                                           uint32_t *threads, uint32_t cluster[3]);
/* Byte offset of parameter `index` in the parameter space, and its size. DW_NOT_FOUND: there are fewer parameters. */
DW_API dw_status dw_emulator_kernel_parameter(const dw_emulator_module *module, const char *kernel,
                                              uint32_t index, uint32_t *offset, uint32_t *bytes);
/* Address of a .global or .const variable. DW_NOT_FOUND. */
DW_API dw_status dw_emulator_variable(const dw_emulator_module *module, const char *name,
                                      void **address, size_t *bytes);

typedef struct dw_emulator_launch_options {
    size_t struct_size; /* sizeof(dw_emulator_launch_options) */
    /* cluster 0 0 0: one block, or the size that the kernel requires. */
    uint32_t grid[3], block[3], cluster[3];
    uint32_t shared_bytes; /* dynamic shared memory */
    /* All blocks are resident at once and may wait for one another. `struct_size` may end before this member, which
     * means false. */
    bool cooperative;
} dw_emulator_launch_options;
#define DW_EMULATOR_LAUNCH_DEFAULT                                                                 \
    { sizeof(dw_emulator_launch_options), {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, 0, false }

/* `arguments`: the address of each parameter's value. `instructions` may be NULL; it receives the number of
 * instructions summed over all lanes. DW_INVALID_ARGUMENT: no GPU would accept the launch. DW_INTERNAL: the kernel was
 * stopped; the findings say why. */
DW_API dw_status dw_emulator_launch(dw_emulator_module *module, const char *kernel,
                                    const dw_emulator_launch_options *options,
                                    void *const *arguments, uint64_t *instructions);

/* A tensor map (cuTensorMapEncodeTiled) for a kernel's 128-byte parameter. `element` has the driver's values of
 * CUtensorMapDataType, `swizzle` those of CUtensorMapSwizzle. The format of the 128 bytes is the emulator's own. */
typedef struct dw_emulator_tensor_shape {
    size_t struct_size; /* sizeof(dw_emulator_tensor_shape) */
    int element, rank;  /* 1 to 5 axes, axis 0 contiguous */
    void *address;
    uint64_t size[5];   /* elements */
    uint64_t stride[4]; /* bytes, of axes 1 and up */
    uint32_t box[5], step[5];
    int interleave, swizzle, fill_nan;
} dw_emulator_tensor_shape;
/* DW_INVALID_ARGUMENT: a rule of cuTensorMapEncodeTiled is broken. DW_UNSUPPORTED: interleaved layouts. */
DW_API dw_status dw_emulator_tensor_map(const dw_emulator_tensor_shape *shape, void *map);

/* One finding. Repeated findings of one kind at one line of a kernel are kept once and counted. */
typedef struct dw_finding {
    const char *kind; /* "out of bounds", "race", ... */
    char kernel[128], instruction[96];
    char source[256]; /* file, if the PTX has .loc; else empty */
    int source_line;
    /* Where the line's function was inlined: "gemm.cu:81 called at gemm.cu:203". */
    char inlined_at[256];
    int ptx_line;
    uint32_t block[3];
    int warp, lane; /* lane -1: the whole warp */
    uint64_t count;
    char what[1024];
} dw_finding;
/* Findings since the last clear. */
DW_API size_t dw_emulator_finding_count(const dw_emulator *emulator);
/* DW_NOT_FOUND: there are fewer findings. */
DW_API dw_status dw_emulator_finding(const dw_emulator *emulator, size_t index,
                                     dw_finding *finding);
DW_API void dw_emulator_clear_findings(dw_emulator *emulator);
/* "out of bounds: kernel add, PTX line 12 (add.cu:3), block (0, 0, 0), warp 1, lane 3, ld.global.f32: reads ..." */
DW_API void dw_finding_text(const dw_finding *finding, char *text, size_t bytes);
/* Writes a JSON file: architecture, seed, number of launches, instructions summed over all lanes, every finding (with
 * the members of dw_finding and "text"), and under "unsupported" the reasons why kernels could not be launched.
 * DW_IO. */
DW_API dw_status dw_emulator_report(const dw_emulator *emulator, const char *path);
/* Adds an entry to the report's "unsupported". */
DW_API void dw_emulator_report_unsupported(dw_emulator *emulator, const char *why);

#ifdef __cplusplus
}
#endif
#endif
