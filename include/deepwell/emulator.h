/* A functional emulator of NVIDIA GPUs: runs the PTX that kernels compile to, on the host's cores, and reports
 * mistakes that hardware does not. docs/emulator.md says what is emulated.
 *
 * Work is done when it is called for: a launch has ended when dw_emulator_launch returns. Global addresses are
 * addresses of the host. An emulator may be used from several threads; its launches take turns.
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

/* What names of emulated GPUs begin with, also that of the driver of `deepwell emulate`: they take PTX, no machine
 * code. */
#define DW_EMULATOR_GPU_NAME "Deepwell emulator of "

typedef struct dw_emulator dw_emulator;
typedef struct dw_emulator_module dw_emulator_module;

typedef struct dw_emulator_options {
    size_t size; /* sizeof(dw_emulator_options) */
    bool check;  /* look for undefined reads and races, beside what always stops a kernel */
    uint64_t
        seed; /* of the order in which warps and asynchronous work run; the same seed, the same order */
    /* What kernels print, one call of printf at a time, while the launch lasts; NULL: it is dropped. Calls take
     * turns. */
    void (*print)(void *context, const char *text, size_t bytes);
    void *print_context;
    /* What 0.1 began with ends here: a caller's structure may, too. */
    int threads; /* of the host that run a launch, at most; 0: as many as dw_get_threads() */
    int multiprocessors; /* of the GPU: how many blocks live at once; 0: as many as the architecture's, 1 to 1024 */
    /* Operations of warps without anything happening (an arrival, a barrier, an atomic write, the end of a cluster)
     * after which loops are taken to be endless, where also each warp that runs had a 64th of them; 0: 2^27. Loops
     * whose registers repeat while nothing happens need not run as long. A warp that has executed eight times as many
     * operations is stopped, whatever happens. */
    uint64_t endless;
} dw_emulator_options;
#define DW_EMULATOR_OPTIONS_DEFAULT                                                                \
    { sizeof(dw_emulator_options), true, 1, NULL, NULL, 0, 0, 0 }

/* `architecture`: "sm_90a", "sm_100a", "sm_103a" or "sm_120a"; DW_NOT_FOUND lists them. options NULL: the
 * defaults; DW_INVALID_ARGUMENT: a number that none of them may be. */
DW_API dw_status dw_emulator_create(const char *architecture, const dw_emulator_options *options,
                                    dw_emulator **emulator);
/* With its memory and modules. */
DW_API void dw_emulator_destroy(dw_emulator *emulator);
/* Of the emulated GPU. */
DW_API int dw_emulator_multiprocessors(const dw_emulator *emulator);

/* Global memory, aligned to 256 bytes; reading it before anything was written is a finding. DW_OUT_OF_MEMORY. */
DW_API dw_status dw_emulator_allocate(dw_emulator *emulator, size_t bytes, void **memory);
/* Memory of the host's that kernels may use as well: counts as written. */
DW_API dw_status dw_emulator_allocate_host(dw_emulator *emulator, size_t bytes, void **memory);
/* The caller's own memory, for as long as the emulator lives or until it is released here; what was known of
 * the range before is forgotten. */
DW_API dw_status dw_emulator_register(dw_emulator *emulator, void *memory, size_t bytes);
/* Any of the three's. DW_INVALID_ARGUMENT: it was not allocated here, or has been given back. */
DW_API dw_status dw_emulator_release(dw_emulator *emulator, void *memory);
/* From the host: counts as written. DW_INVALID_ARGUMENT: the range is not within one allocation. */
DW_API dw_status dw_emulator_copy_in(dw_emulator *emulator, void *to, const void *host,
                                     size_t bytes);
DW_API dw_status dw_emulator_copy(dw_emulator *emulator, void *to, const void *from, size_t bytes);
DW_API dw_status dw_emulator_copy_out(dw_emulator *emulator, void *host, const void *from,
                                      size_t bytes);
DW_API dw_status dw_emulator_fill(dw_emulator *emulator, void *memory, int byte, size_t bytes);
/* Whether the range lies within one allocation. */
DW_API bool dw_emulator_holds(const dw_emulator *emulator, const void *memory, size_t bytes);

/* PTX text. DW_PARSE: "NAME, PTX line 12: what: the line". DW_UNSUPPORTED: what the emulator does not have, by
 * name. */
DW_API dw_status dw_emulator_load(dw_emulator *emulator, const char *ptx, size_t bytes,
                                  const char *name, dw_emulator_module **module);
DW_API void dw_emulator_unload(dw_emulator_module *module);
/* DW_NOT_FOUND: lists the kernels. DW_UNSUPPORTED: it cannot be launched, because of the instruction that the
 * message names. */
DW_API dw_status dw_emulator_has_kernel(const dw_emulator_module *module, const char *kernel);
/* Bytes of static shared memory, with the system's KiB, and bytes of a lane's local memory; registers are not
 * limited. */
DW_API dw_status dw_emulator_kernel_memory(const dw_emulator_module *module, const char *kernel,
                                           uint32_t *shared_bytes, uint32_t *local_bytes);
/* The most threads of a block, and the cluster that the kernel requires (0 0 0: none). */
DW_API dw_status dw_emulator_kernel_bounds(const dw_emulator_module *module, const char *kernel,
                                           uint32_t *threads, uint32_t cluster[3]);
/* Where parameter `index` lies among the parameters, and its bytes. DW_NOT_FOUND: there are not as many. */
DW_API dw_status dw_emulator_kernel_parameter(const dw_emulator_module *module, const char *kernel,
                                              uint32_t index, uint32_t *offset, uint32_t *bytes);
/* The address of a .global or .const variable. DW_NOT_FOUND. */
DW_API dw_status dw_emulator_variable(const dw_emulator_module *module, const char *name,
                                      void **address, size_t *bytes);

typedef struct dw_emulator_launch_options {
    size_t size;
    uint32_t grid[3], block[3],
        cluster[3];        /* cluster 0 0 0: one block, or what the kernel requires */
    uint32_t shared_bytes; /* dynamic */
    bool cooperative;      /* all blocks live at once, and may wait for one another */
} dw_emulator_launch_options;
#define DW_EMULATOR_LAUNCH_DEFAULT                                                                 \
    { sizeof(dw_emulator_launch_options), {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, 0, false }

/* `arguments`: the address of each parameter's value. DW_INVALID_ARGUMENT: a launch that no GPU would take.
 * DW_INTERNAL: the kernel was stopped; the findings say why. *instructions, if not NULL: how many lanes
 * executed how many. */
DW_API dw_status dw_emulator_launch(dw_emulator_module *module, const char *kernel,
                                    const dw_emulator_launch_options *options,
                                    void *const *arguments, uint64_t *instructions);

/* A tensor map (cuTensorMapEncodeTiled) for a kernel's 128-byte parameter, numbered as the driver's
 * enumerations are: `element` CUtensorMapDataType, `swizzle` CUtensorMapSwizzle. The form of the 128 bytes is
 * the emulator's own. */
typedef struct dw_emulator_tensor_shape {
    size_t size_of;    /* sizeof(dw_emulator_tensor_shape) */
    int element, rank; /* 1 to 5 axes, axis 0 contiguous */
    void *address;
    uint64_t size[5];   /* elements */
    uint64_t stride[4]; /* bytes, of axes 1 and up */
    uint32_t box[5], step[5];
    int interleave, swizzle, fill_nan;
} dw_emulator_tensor_shape;
/* DW_INVALID_ARGUMENT: by the rules of cuTensorMapEncodeTiled; DW_UNSUPPORTED: interleaved. */
DW_API dw_status dw_emulator_tensor_map(const dw_emulator_tensor_shape *shape, void *map);

/* What was found, since the last clear. Of one kind at one line of a kernel only the first is kept, and counted. */
typedef struct dw_finding {
    const char *kind; /* "out of bounds", "race", ... */
    char kernel[128], instruction[96];
    char source[256]; /* file, where the PTX has .loc; else empty */
    int source_line;
    char inlined_at
        [256]; /* where the line's function was called: "gemm.cu:81 called at gemm.cu:203" */
    int ptx_line;
    uint32_t block[3];
    int warp, lane; /* lane -1: the whole warp */
    uint64_t count;
    char what[1024];
} dw_finding;
DW_API size_t dw_emulator_finding_count(const dw_emulator *emulator);
/* DW_NOT_FOUND: there are not as many. */
DW_API dw_status dw_emulator_finding(const dw_emulator *emulator, size_t index,
                                     dw_finding *finding);
DW_API void dw_emulator_clear_findings(dw_emulator *emulator);
/* "out of bounds: kernel add, PTX line 12 (add.cu:3), block (0, 0, 0), warp 1, lane 3, ld.global.f32: reads ..." */
DW_API void dw_finding_text(const dw_finding *finding, char *text, size_t bytes);
/* Writes a file of JSON: architecture, seed, how many launches there were, how many instructions all lanes executed in
 * them, every finding, its members named as those of dw_finding are, with "text", and under "unsupported" why kernels
 * that were asked for could not be launched. DW_IO. */
DW_API dw_status dw_emulator_report(const dw_emulator *emulator, const char *path);
/* Adds to what the report has under "unsupported". */
DW_API void dw_emulator_report_unsupported(dw_emulator *emulator, const char *why);

#ifdef __cplusplus
}
#endif
#endif
