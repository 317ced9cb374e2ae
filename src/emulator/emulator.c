/* The public functions (deepwell/emulator.h). An emulator is its memory, its findings and its modules. */
#include "emulator/emulator_interface.h"
#include "emulator/finding.h"
#include "emulator/running_grid.h"
#include "emulator/tensor_map.h"
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dw_emulator {
    int architecture;
    dw_emulator_options options;
    dw__emu_memory *memory;
    dw__emu_findings *findings;
    dw_emulator_module *modules;
    uint64_t launches, instructions;
    struct {
        char **items;
        size_t count, capacity;
    } refused; /* reasons why kernels that were looked up are not supported */
    pthread_mutex_t lock;
};
struct dw_emulator_module {
    dw_emulator *emulator;
    dw__emu_program *program;
    dw_emulator_module *next;
};

static const struct {
    const char *name;
    int number, sm_count;
    uint32_t shared_bytes; /* largest shared memory of a block, with the system's KiB */
} architectures[] = {
    {"sm_90a", 90, 132, 228 << 10},
    {"sm_100a", 100, 148, 228 << 10},
    {"sm_103a", 103, 148, 228 << 10},
    {"sm_120a", 120, 188, 100 << 10},
};

static void emulator_destroy(dw_emulator *emulator);
static void emulator_unload(dw_emulator_module *module);

#define MOST_MULTIPROCESSORS 1024
/* Takes a few seconds on one core. */
#define ENDLESS ((uint64_t)1 << 27)

static int index_of(int architecture) {
    for (int i = 0; i < (int)DW_COUNT(architectures); i++)
        if (architectures[i].number == architecture) return i;
    return 0;
}

/* Copies the caller's options, which may be those of an earlier version without the last members. */
static dw_status read_options(const dw_emulator_options *given, dw_emulator_options *wanted) {
    static const dw__struct known = {
        "dw_emulator_options", sizeof *wanted, {offsetof(dw_emulator_options, threads)}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, given, wanted));
    if (wanted->threads < 0)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "emulator options: %d threads: must be 1 or more, or 0 for all",
                        wanted->threads);
    if (wanted->multiprocessors < 0 || wanted->multiprocessors > MOST_MULTIPROCESSORS)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "emulator options: %d multiprocessors: must be 1 to %d, or 0 for "
                        "the architecture's number",
                        wanted->multiprocessors, MOST_MULTIPROCESSORS);
    return DW_OK;
}

static dw_status emulator_create(const char *architecture, const dw_emulator_options *options,
                                 dw_emulator **out) {
    dw_status status = DW_OK;
    int number = 0;
    for (size_t i = 0; i < DW_COUNT(architectures); i++)
        if (strcmp(architectures[i].name, architecture) == 0) number = architectures[i].number;
    if (!number)
        return dw__fail(
            DW_NOT_FOUND,
            "the emulator does not support \"%s\": use sm_90a, sm_100a, sm_103a or sm_120a",
            architecture);
    dw_emulator_options wanted = DW_EMULATOR_OPTIONS_DEFAULT;
    if (options) DW_RETURN_IF_FAILED(read_options(options, &wanted));
    dw_emulator *emulator = dw__calloc(1, sizeof *emulator);
    if (!emulator) return dw__fail_memory("an emulator", sizeof *emulator);
    emulator->architecture = number;
    emulator->options = wanted;
    pthread_mutex_init(&emulator->lock, NULL);
    DW_TRY(dw__emu_memory_create(&emulator->memory));
    DW_TRY(dw__emu_findings_create(&emulator->findings));
    *out = emulator;
    emulator = NULL;
cleanup:
    emulator_destroy(emulator);
    return status;
}

static void emulator_destroy(dw_emulator *emulator) {
    if (!emulator) return;
    while (emulator->modules) emulator_unload(emulator->modules);
    dw__emu_findings_destroy(emulator->findings);
    dw__emu_memory_destroy(emulator->memory);
    for (size_t i = 0; i < emulator->refused.count; i++) dw__free(emulator->refused.items[i]);
    dw__free(emulator->refused.items);
    pthread_mutex_destroy(&emulator->lock);
    dw__free(emulator);
}

static int emulator_multiprocessors(const dw_emulator *emulator) {
    const int wanted = emulator->options.multiprocessors;
    return wanted ? wanted : architectures[index_of(emulator->architecture)].sm_count;
}

/* ---- memory -------------------------------------------------------------------------------- */

static dw_status emulator_allocate(dw_emulator *emulator, size_t bytes, void **memory) {
    return dw__emu_memory_allocate(emulator->memory, bytes, memory);
}
static dw_status emulator_allocate_host(dw_emulator *emulator, size_t bytes, void **memory) {
    DW_RETURN_IF_FAILED(dw__emu_memory_allocate(emulator->memory, bytes, memory));
    dw__emu_memory_mark(emulator->memory, *memory, bytes, true);
    return DW_OK;
}
static dw_status emulator_register(dw_emulator *emulator, void *memory, size_t bytes) {
    return dw__emu_memory_register(emulator->memory, memory, bytes);
}
static dw_status emulator_release(dw_emulator *emulator, void *memory) {
    return memory ? dw__emu_memory_release(emulator->memory, memory) : DW_OK;
}

static dw_status within(const dw_emulator *emulator, const void *address, size_t bytes,
                        const char *what) {
    char where[160];
    if (dw__emu_memory_holds(emulator->memory, address, bytes)) return DW_OK;
    dw__emu_memory_describe(emulator->memory, (uintptr_t)address, where, sizeof where);
    return dw__fail(DW_INVALID_ARGUMENT, "%s %zu bytes at %p of the emulated device: %s", what,
                    bytes, address, where);
}
static dw_status emulator_copy_in(dw_emulator *emulator, void *to, const void *host, size_t bytes) {
    if (bytes == 0) return DW_OK;
    DW_RETURN_IF_FAILED(within(emulator, to, bytes, "copy to"));
    memcpy(to, host, bytes);
    dw__emu_memory_mark(emulator->memory, to, bytes, true);
    return DW_OK;
}
static dw_status emulator_copy(dw_emulator *emulator, void *to, const void *from, size_t bytes) {
    if (bytes == 0) return DW_OK;
    DW_RETURN_IF_FAILED(within(emulator, to, bytes, "copy to"));
    DW_RETURN_IF_FAILED(within(emulator, from, bytes, "copy from"));
    memmove(to, from, bytes);
    dw__emu_memory_copy_marks(emulator->memory, to, from, bytes);
    return DW_OK;
}
static dw_status emulator_copy_out(dw_emulator *emulator, void *host, const void *from,
                                   size_t bytes) {
    if (bytes == 0) return DW_OK;
    DW_RETURN_IF_FAILED(within(emulator, from, bytes, "copy from"));
    memcpy(host, from, bytes);
    return DW_OK;
}
static dw_status emulator_fill(dw_emulator *emulator, void *memory, int byte, size_t bytes) {
    if (bytes == 0) return DW_OK;
    DW_RETURN_IF_FAILED(within(emulator, memory, bytes, "fill"));
    memset(memory, byte, bytes);
    dw__emu_memory_mark(emulator->memory, memory, bytes, true);
    return DW_OK;
}

static bool emulator_holds(const dw_emulator *emulator, const void *memory, size_t bytes) {
    return dw__emu_memory_holds(emulator->memory, memory, bytes);
}

/* ---- modules ------------------------------------------------------------------------------- */

/* Checks that the module's target runs on this architecture: "sm_90a" only on sm_90a, "sm_90" on sm_90 and later,
 * "sm_100f" within its family. */
static dw_status check_target(const dw_emulator *emulator, const dw__ptx_module *module) {
    char *rest = NULL;
    long number =
        strncmp(module->target, "sm_", 3) == 0 ? strtol(module->target + 3, &rest, 10) : 0;
    bool fits =
        number > 0 && ((*rest == '\0' && number <= emulator->architecture) ||
                       (strcmp(rest, "a") == 0 && number == emulator->architecture) ||
                       (strcmp(rest, "f") == 0 && number / 10 == emulator->architecture / 10 &&
                        number <= emulator->architecture));
    if (fits) return DW_OK;
    return dw__fail(DW_UNSUPPORTED, "%s is PTX for %s, which an emulated %s cannot run",
                    module->name, module->target,
                    architectures[index_of(emulator->architecture)].name);
}

static dw_status emulator_load(dw_emulator *emulator, const char *ptx, size_t bytes,
                               const char *name, dw_emulator_module **out) {
    dw__ptx_module *parsed = NULL;
    dw_status status = DW_OK;
    dw_emulator_module *module = dw__calloc(1, sizeof *module);
    if (!module) return dw__fail_memory("a PTX module", sizeof *module);
    DW_TRY(dw__ptx_parse(ptx, bytes, name, &parsed));
    DW_TRY(check_target(emulator, parsed));
    DW_TRY(dw__emu_translate(parsed, emulator->architecture, emulator->memory, &module->program));
    parsed = NULL;
    module->emulator = emulator;
    pthread_mutex_lock(&emulator->lock);
    module->next = emulator->modules;
    emulator->modules = module;
    pthread_mutex_unlock(&emulator->lock);
    *out = module;
    module = NULL;
cleanup:
    dw__ptx_destroy(parsed);
    dw__free(module);
    return status;
}

static void emulator_unload(dw_emulator_module *module) {
    if (!module) return;
    dw_emulator *emulator = module->emulator;
    pthread_mutex_lock(&emulator->lock);
    for (dw_emulator_module **link = &emulator->modules; *link; link = &(*link)->next) {
        if (*link != module) continue;
        *link = module->next;
        break;
    }
    pthread_mutex_unlock(&emulator->lock);
    dw__emu_program_destroy(module->program, emulator->memory);
    dw__free(module);
}

/* Returns the most threads that a block of this function can have. */
static uint64_t most_threads(const dw__ptx_function *function) {
    const uint64_t bound =
        (uint64_t)function->max_threads[0] * function->max_threads[1] * function->max_threads[2];
    return bound > 0 && bound < 1024 ? bound : 1024;
}

static const dw__emu_kernel *find_kernel(const dw_emulator_module *module, const char *name) {
    for (uint32_t i = 0; i < module->program->kernel_count; i++)
        if (strcmp(module->program->kernels[i].name, name) == 0)
            return &module->program->kernels[i];
    return NULL;
}

/* Leaves out the reason if memory is out. */
static void emulator_report_unsupported(dw_emulator *emulator, const char *why) {
    pthread_mutex_lock(&emulator->lock);
    size_t at = 0;
    while (at < emulator->refused.count && strcmp(emulator->refused.items[at], why) != 0) at++;
    const size_t bytes = strlen(why) + 1;
    char *copy = at == emulator->refused.count ? dw__malloc(bytes) : NULL;
    if (copy) memcpy(copy, why, bytes);
    if (copy && DW_PUSH(&emulator->refused, copy) != DW_OK) dw__free(copy);
    pthread_mutex_unlock(&emulator->lock);
}

static dw_status emulator_has_kernel(const dw_emulator_module *module, const char *name) {
    const dw__emu_kernel *kernel = find_kernel(module, name);
    if (kernel && kernel->unsupported) {
        emulator_report_unsupported(module->emulator, kernel->unsupported);
        return dw__fail(DW_UNSUPPORTED, "%s", kernel->unsupported);
    }
    if (kernel) return DW_OK;
    dw__text list = {0};
    for (uint32_t i = 0; i < module->program->kernel_count; i++)
        dw__text_printf(&list, "%s%s", i ? ", " : "", module->program->kernels[i].name);
    dw_status status =
        dw__fail(DW_NOT_FOUND, "%s has no kernel \"%s\"; its kernels: %s",
                 module->program->module->name, name, list.text ? list.text : "none");
    dw__text_free(&list);
    return status;
}

static dw_status emulator_kernel_memory(const dw_emulator_module *module, const char *name,
                                        uint32_t *shared_bytes, uint32_t *local_bytes) {
    DW_RETURN_IF_FAILED(emulator_has_kernel(module, name));
    const dw__emu_kernel *kernel = find_kernel(module, name);
    *shared_bytes = kernel->shared_bytes;
    *local_bytes = kernel->local_bytes;
    return DW_OK;
}

static dw_status emulator_kernel_bounds(const dw_emulator_module *module, const char *name,
                                        uint32_t *threads, uint32_t cluster[3]) {
    DW_RETURN_IF_FAILED(emulator_has_kernel(module, name));
    const dw__emu_kernel *kernel = find_kernel(module, name);
    const uint64_t bound = most_threads(kernel->function);
    *threads = (uint32_t)bound;
    memcpy(cluster, kernel->function->required_cluster, 3 * sizeof *cluster);
    return DW_OK;
}

static dw_status emulator_kernel_parameter(const dw_emulator_module *module, const char *name,
                                           uint32_t index, uint32_t *offset, uint32_t *bytes) {
    DW_RETURN_IF_FAILED(emulator_has_kernel(module, name));
    const dw__emu_kernel *kernel = find_kernel(module, name);
    if (index >= kernel->parameter_count)
        return dw__fail(DW_NOT_FOUND, "kernel %s has %u parameters; index %u is out of range", name,
                        kernel->parameter_count, index);
    *offset = kernel->parameter_places[index];
    *bytes = kernel->parameter_sizes[index];
    return DW_OK;
}

static dw_status emulator_variable(const dw_emulator_module *module, const char *name,
                                   void **address, size_t *bytes) {
    for (uint32_t i = 0; i < module->program->symbol_count; i++) {
        if (strcmp(module->program->symbols[i].variable->name, name) != 0) continue;
        *address = module->program->symbols[i].address;
        *bytes = module->program->symbols[i].variable->bytes;
        return DW_OK;
    }
    return dw__fail(DW_NOT_FOUND, "%s has no variable \"%s\"", module->program->module->name, name);
}

/* ---- launches ------------------------------------------------------------------------------ */

static dw_status check_shape(const dw__emu_kernel *kernel, const dw__emu_grid *grid,
                             int architecture) {
    static const uint32_t most_grid[] = {INT32_MAX, 65535, 65535}, most_block[] = {1024, 1024, 64};
    const dw__ptx_function *function = kernel->function;
    for (int axis = 0; axis < 3; axis++) {
        if (grid->grid[axis] == 0 || grid->grid[axis] > most_grid[axis])
            return dw__fail(DW_INVALID_ARGUMENT,
                            "kernel %s: grid of %u blocks along axis %d: must be 1 to %u",
                            kernel->name, grid->grid[axis], axis, most_grid[axis]);
        if (grid->block[axis] == 0 || grid->block[axis] > most_block[axis])
            return dw__fail(DW_INVALID_ARGUMENT,
                            "kernel %s: block of %u threads along axis %d: must be 1 to %u",
                            kernel->name, grid->block[axis], axis, most_block[axis]);
        if (grid->cluster[axis] == 0 || grid->grid[axis] % grid->cluster[axis])
            return dw__fail(
                DW_INVALID_ARGUMENT,
                "kernel %s: %u blocks along axis %d: must be a multiple of the cluster's %u",
                kernel->name, grid->grid[axis], axis, grid->cluster[axis]);
        if (function->required_threads[axis] &&
            function->required_threads[axis] != grid->block[axis])
            return dw__fail(DW_INVALID_ARGUMENT,
                            "kernel %s: %u threads along axis %d: it requires %u", kernel->name,
                            grid->block[axis], axis, function->required_threads[axis]);
    }
    const uint64_t threads = (uint64_t)grid->block[0] * grid->block[1] * grid->block[2];
    if (threads > most_threads(function))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "kernel %s: blocks of %llu threads: must be at most %llu", kernel->name,
                        (unsigned long long)threads, (unsigned long long)most_threads(function));
    if ((uint64_t)grid->cluster[0] * grid->cluster[1] * grid->cluster[2] > 16)
        return dw__fail(DW_INVALID_ARGUMENT, "kernel %s: clusters must have at most 16 blocks",
                        kernel->name);
    const uint32_t most_shared = architectures[index_of(architecture)].shared_bytes;
    if ((uint64_t)kernel->dynamic_first + grid->dynamic_shared > most_shared)
        return dw__fail(
            DW_INVALID_ARGUMENT,
            "kernel %s: %u bytes of dynamic shared memory and %u static ones: a block has %u",
            kernel->name, grid->dynamic_shared, kernel->dynamic_first, most_shared);
    return DW_OK;
}

static dw_status emulator_launch(dw_emulator_module *module, const char *name,
                                 const dw_emulator_launch_options *given, void *const *arguments,
                                 uint64_t *instructions) {
    static const dw__struct known = {"dw_emulator_launch_options",
                                     sizeof *given,
                                     {offsetof(dw_emulator_launch_options, cooperative)}};
    dw_emulator *emulator = module->emulator;
    dw_emulator_launch_options wanted, *options = &wanted;
    DW_RETURN_IF_FAILED(dw__struct_read(&known, given, options));
    DW_RETURN_IF_FAILED(emulator_has_kernel(module, name));
    const dw__emu_kernel *kernel = find_kernel(module, name);
    dw__emu_grid grid = {.kernel = kernel,
                         .memory = emulator->memory,
                         .findings = emulator->findings,
                         .dynamic_shared = options->shared_bytes,
                         .check = emulator->options.check,
                         .print = emulator->options.print,
                         .print_context = emulator->options.print_context,
                         .sm_count = emulator_multiprocessors(emulator),
                         .threads = emulator->options.threads,
                         .endless =
                             emulator->options.endless ? emulator->options.endless : ENDLESS};
    for (int axis = 0; axis < 3; axis++) {
        grid.grid[axis] = options->grid[axis];
        grid.block[axis] = options->block[axis];
        uint32_t required = kernel->function->required_cluster[axis];
        grid.cluster[axis] = options->cluster[0] ? options->cluster[axis] : required ? required : 1;
    }
    DW_RETURN_IF_FAILED(check_shape(kernel, &grid, emulator->architecture));
    unsigned char *parameters = dw__malloc_aligned(kernel->parameter_bytes + 64);
    if (!parameters) return dw__fail_memory("parameters of a kernel", kernel->parameter_bytes);
    grid.cooperative = options->cooperative;
    if (grid.cooperative) {
        const uint32_t first[2] = {sizeof first, 0};
        dw_status made = emulator_allocate(emulator, sizeof first, &grid.workspace);
        if (made != DW_OK) {
            dw__free_aligned(parameters);
            return made;
        }
        memcpy(grid.workspace, first, sizeof first);
        dw__emu_memory_mark(emulator->memory, grid.workspace, sizeof first, true);
    }
    for (uint32_t i = 0; i < kernel->parameter_count; i++)
        memcpy(parameters + kernel->parameter_places[i], arguments[i], kernel->parameter_sizes[i]);
    grid.parameters = parameters;
    pthread_mutex_lock(&emulator->lock);
    grid.id = ++emulator->launches;
    grid.seed = emulator->options.seed + grid.id;
    uint64_t executed = 0;
    dw_status status = dw__emu_run_grid(&grid, &executed);
    emulator->instructions += executed;
    if (instructions) *instructions = executed;
    dw__emu_memory_collect(emulator->memory);
    pthread_mutex_unlock(&emulator->lock);
    if (grid.cooperative) (void)dw__emu_memory_release(emulator->memory, grid.workspace);
    dw__free_aligned(parameters);
    return status;
}

static dw_status emulator_tensor_map(const dw_emulator_tensor_shape *shape, void *map) {
    static const dw__struct known = {"dw_emulator_tensor_shape", sizeof *shape, {0}};
    DW_RETURN_IF_FAILED(dw__struct_read(&known, shape, NULL));
    dw__tensor_shape made = {.element = (uint8_t)shape->element,
                             .rank = (uint8_t)shape->rank,
                             .swizzle = (uint8_t)shape->swizzle,
                             .fill_nan = (uint8_t)shape->fill_nan,
                             .address = (uint64_t)(uintptr_t)shape->address,
                             .interleave = (uint8_t)shape->interleave};
    for (int axis = 0; axis < shape->rank && axis < DW__TENSOR_AXES; axis++) {
        if (shape->size[axis] < 1 || shape->size[axis] > (uint64_t)1 << 32)
            return dw__fail(DW_INVALID_ARGUMENT,
                            "tensor map of %llu elements along axis %d: must be 1 to 2^32",
                            (unsigned long long)shape->size[axis], axis);
        made.last[axis] = (uint32_t)(shape->size[axis] - 1);
        made.box[axis] = (uint16_t)(shape->box[axis] > 256 ? 257 : shape->box[axis]);
        made.step[axis] = (uint8_t)(shape->step[axis] > 8 ? 9 : shape->step[axis]);
        if (axis > 0) made.stride[axis - 1] = shape->stride[axis - 1];
    }
    return dw__tensor_map_encode(&made, map);
}

/* ---- findings ------------------------------------------------------------------------------ */

static size_t emulator_finding_count(const dw_emulator *emulator) {
    return dw__emu_findings_count(emulator->findings);
}
static dw_status emulator_finding(const dw_emulator *emulator, size_t index, dw_finding *finding) {
    if (dw__emu_findings_at(emulator->findings, index, finding)) return DW_OK;
    return dw__fail(DW_NOT_FOUND, "finding %zu is out of range: there are %zu", index,
                    dw__emu_findings_count(emulator->findings));
}
static void emulator_clear_findings(dw_emulator *emulator) {
    dw__emu_findings_clear(emulator->findings);
}

static dw__emulator_summary emulator_summary(const dw_emulator *emulator) {
    return (dw__emulator_summary){
        .architecture = architectures[index_of(emulator->architecture)].name,
        .seed = emulator->options.seed,
        .launches = emulator->launches,
        .instructions = emulator->instructions,
        .refused = (const char *const *)emulator->refused.items,
        .refused_count = emulator->refused.count,
    };
}

const dw__emulator_interface dw__emulator_functions = {
    .version = DW__EMULATOR_VERSION,
    .create = emulator_create,
    .destroy = emulator_destroy,
    .multiprocessors = emulator_multiprocessors,
    .allocate = emulator_allocate,
    .allocate_host = emulator_allocate_host,
    .register_memory = emulator_register,
    .release = emulator_release,
    .copy_in = emulator_copy_in,
    .copy = emulator_copy,
    .copy_out = emulator_copy_out,
    .fill = emulator_fill,
    .holds = emulator_holds,
    .load = emulator_load,
    .unload = emulator_unload,
    .has_kernel = emulator_has_kernel,
    .kernel_memory = emulator_kernel_memory,
    .kernel_bounds = emulator_kernel_bounds,
    .kernel_parameter = emulator_kernel_parameter,
    .variable = emulator_variable,
    .launch = emulator_launch,
    .tensor_map = emulator_tensor_map,
    .finding_count = emulator_finding_count,
    .finding = emulator_finding,
    .clear_findings = emulator_clear_findings,
    .report_unsupported = emulator_report_unsupported,
    .summary = emulator_summary,
};
