/* The interface between libdeepwell and libdeepwell_emulator: two tables of functions.
 *
 * libdeepwell opens the emulator's library, hands it its services and gets its calls. The services are everything of
 * libdeepwell that has a state and must therefore exist once in a process: memory, the last error, the thread pool,
 * and the instruction set. The emulator's library carries its own copy of what has none (arenas, texts, maps, number
 * formats), so neither library needs a symbol of the other, and any program that has libdeepwell inside can open it.
 */
#ifndef DW_EMULATOR_INTERFACE_H
#define DW_EMULATOR_INTERFACE_H

#include "base/pool.h"
#include "deepwell/emulator.h"

/* Both libraries are built together. Raise this with any change of the two tables or of the structures in them. */
#define DW__EMULATOR_VERSION 1
/* The only symbol of the emulator's library. */
#define DW__EMULATOR_ENTRY "deepwell_emulator_open"

typedef struct dw__emulator_services {
    uint32_t version;
    /* The functions of the same names in base.h, pool.h, isa.h and status.h. */
    void *(*malloc)(size_t bytes);
    void *(*calloc)(size_t count, size_t bytes);
    void *(*realloc)(void *pointer, size_t bytes);
    void (*free)(void *pointer);
    void *(*malloc_aligned)(size_t bytes);
    dw_status (*grow)(void **items, size_t *capacity, size_t needed, size_t item_bytes);
    dw_status (*fail)(dw_status status, const char *format, ...) DW_PRINTF(2, 3);
    dw_status (*fail_memory)(const char *what, size_t bytes);
    const char *(*last_error)(void);
    void (*pool_run)(int64_t count, dw__task task, void *context);
    int (*pool_threads)(void);
    int (*pool_limit)(int threads);
    int (*cpu_isa)(void);
} dw__emulator_services;

/* The report's entries besides the findings. Valid until the next call. */
typedef struct dw__emulator_summary {
    const char *architecture;
    uint64_t seed, launches, instructions;
    const char *const *refused; /* why kernels that were asked for were not run */
    size_t refused_count;
} dw__emulator_summary;

/* The functions of the same names in deepwell/emulator.h. */
typedef struct dw__emulator_interface {
    uint32_t version;
    dw_status (*create)(const char *architecture, const dw_emulator_options *options,
                        dw_emulator **emulator);
    void (*destroy)(dw_emulator *emulator);
    int (*multiprocessors)(const dw_emulator *emulator);

    dw_status (*allocate)(dw_emulator *emulator, size_t bytes, void **memory);
    dw_status (*allocate_host)(dw_emulator *emulator, size_t bytes, void **memory);
    dw_status (*register_memory)(dw_emulator *emulator, void *memory, size_t bytes);
    dw_status (*release)(dw_emulator *emulator, void *memory);
    dw_status (*copy_in)(dw_emulator *emulator, void *to, const void *host, size_t bytes);
    dw_status (*copy)(dw_emulator *emulator, void *to, const void *from, size_t bytes);
    dw_status (*copy_out)(dw_emulator *emulator, void *host, const void *from, size_t bytes);
    dw_status (*fill)(dw_emulator *emulator, void *memory, int byte, size_t bytes);
    bool (*holds)(const dw_emulator *emulator, const void *memory, size_t bytes);

    dw_status (*load)(dw_emulator *emulator, const char *ptx, size_t bytes, const char *name,
                      dw_emulator_module **module);
    void (*unload)(dw_emulator_module *module);
    dw_status (*has_kernel)(const dw_emulator_module *module, const char *kernel);
    dw_status (*kernel_memory)(const dw_emulator_module *module, const char *kernel,
                               uint32_t *shared_bytes, uint32_t *local_bytes);
    dw_status (*kernel_bounds)(const dw_emulator_module *module, const char *kernel,
                               uint32_t *threads, uint32_t cluster[3]);
    dw_status (*kernel_parameter)(const dw_emulator_module *module, const char *kernel,
                                  uint32_t index, uint32_t *offset, uint32_t *bytes);
    dw_status (*variable)(const dw_emulator_module *module, const char *name, void **address,
                          size_t *bytes);
    dw_status (*launch)(dw_emulator_module *module, const char *kernel,
                        const dw_emulator_launch_options *options, void *const *arguments,
                        uint64_t *instructions);
    dw_status (*tensor_map)(const dw_emulator_tensor_shape *shape, void *map);

    size_t (*finding_count)(const dw_emulator *emulator);
    dw_status (*finding)(const dw_emulator *emulator, size_t index, dw_finding *finding);
    void (*clear_findings)(dw_emulator *emulator);
    void (*report_unsupported)(dw_emulator *emulator, const char *why);
    dw__emulator_summary (*summary)(const dw_emulator *emulator);
} dw__emulator_interface;

extern const dw__emulator_interface dw__emulator_functions;

/* The type of DW__EMULATOR_ENTRY. It returns NULL if the two libraries have different versions. The services must
 * outlive the library. */
typedef const dw__emulator_interface *(*dw__emulator_entry)(const dw__emulator_services *services);

#endif
