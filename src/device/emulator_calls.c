/* The public calls of deepwell/emulator.h. Each forwards to the emulator's library. dw_emulator_create opens it, so it
 * is open wherever there is an emulator or a module. */
#include "device/emulator_library.h"

/* After dw_emulator_create has succeeded. */
static const dw__emulator_interface *library(void) {
    const dw__emulator_interface *functions;
    return dw__emulator_library(&functions) == DW_OK ? functions : NULL;
}

dw_status dw_emulator_create(const char *architecture, const dw_emulator_options *options,
                             dw_emulator **emulator) {
    const dw__emulator_interface *functions;
    DW_RETURN_IF_FAILED(dw__emulator_library(&functions));
    return functions->create(architecture, options, emulator);
}
void dw_emulator_destroy(dw_emulator *emulator) {
    if (emulator) library()->destroy(emulator);
}
int dw_emulator_multiprocessors(const dw_emulator *emulator) {
    return library()->multiprocessors(emulator);
}
dw_status dw_emulator_allocate(dw_emulator *emulator, size_t bytes, void **memory) {
    return library()->allocate(emulator, bytes, memory);
}
dw_status dw_emulator_allocate_host(dw_emulator *emulator, size_t bytes, void **memory) {
    return library()->allocate_host(emulator, bytes, memory);
}
dw_status dw_emulator_register(dw_emulator *emulator, void *memory, size_t bytes) {
    return library()->register_memory(emulator, memory, bytes);
}
dw_status dw_emulator_release(dw_emulator *emulator, void *memory) {
    return library()->release(emulator, memory);
}
dw_status dw_emulator_copy_in(dw_emulator *emulator, void *to, const void *host, size_t bytes) {
    return library()->copy_in(emulator, to, host, bytes);
}
dw_status dw_emulator_copy(dw_emulator *emulator, void *to, const void *from, size_t bytes) {
    return library()->copy(emulator, to, from, bytes);
}
dw_status dw_emulator_copy_out(dw_emulator *emulator, void *host, const void *from, size_t bytes) {
    return library()->copy_out(emulator, host, from, bytes);
}
dw_status dw_emulator_fill(dw_emulator *emulator, void *memory, int byte, size_t bytes) {
    return library()->fill(emulator, memory, byte, bytes);
}
bool dw_emulator_holds(const dw_emulator *emulator, const void *memory, size_t bytes) {
    return library()->holds(emulator, memory, bytes);
}
dw_status dw_emulator_load(dw_emulator *emulator, const char *ptx, size_t bytes, const char *name,
                           dw_emulator_module **module) {
    return library()->load(emulator, ptx, bytes, name, module);
}
void dw_emulator_unload(dw_emulator_module *module) {
    if (module) library()->unload(module);
}
dw_status dw_emulator_has_kernel(const dw_emulator_module *module, const char *kernel) {
    return library()->has_kernel(module, kernel);
}
dw_status dw_emulator_kernel_memory(const dw_emulator_module *module, const char *kernel,
                                    uint32_t *shared_bytes, uint32_t *local_bytes) {
    return library()->kernel_memory(module, kernel, shared_bytes, local_bytes);
}
dw_status dw_emulator_kernel_bounds(const dw_emulator_module *module, const char *kernel,
                                    uint32_t *threads, uint32_t cluster[3]) {
    return library()->kernel_bounds(module, kernel, threads, cluster);
}
dw_status dw_emulator_kernel_parameter(const dw_emulator_module *module, const char *kernel,
                                       uint32_t index, uint32_t *offset, uint32_t *bytes) {
    return library()->kernel_parameter(module, kernel, index, offset, bytes);
}
dw_status dw_emulator_variable(const dw_emulator_module *module, const char *name, void **address,
                               size_t *bytes) {
    return library()->variable(module, name, address, bytes);
}
dw_status dw_emulator_launch(dw_emulator_module *module, const char *kernel,
                             const dw_emulator_launch_options *options, void *const *arguments,
                             uint64_t *instructions) {
    return library()->launch(module, kernel, options, arguments, instructions);
}
dw_status dw_emulator_tensor_map(const dw_emulator_tensor_shape *shape, void *map) {
    const dw__emulator_interface *functions;
    DW_RETURN_IF_FAILED(dw__emulator_library(&functions));
    return functions->tensor_map(shape, map);
}
size_t dw_emulator_finding_count(const dw_emulator *emulator) {
    return library()->finding_count(emulator);
}
dw_status dw_emulator_finding(const dw_emulator *emulator, size_t index, dw_finding *finding) {
    return library()->finding(emulator, index, finding);
}
void dw_emulator_clear_findings(dw_emulator *emulator) { library()->clear_findings(emulator); }
void dw_emulator_report_unsupported(dw_emulator *emulator, const char *why) {
    library()->report_unsupported(emulator, why);
}
