/* The entry of libdeepwell_emulator, and the functions of base/ that have a state: each forwards to libdeepwell's,
 * under the name by which the emulator calls it. Only the shared library contains this file. */
#include "base/isa.h"
#include "emulator/emulator_interface.h"
#include <stdio.h>

static const dw__emulator_services *services;

DW_API const dw__emulator_interface *deepwell_emulator_open(const dw__emulator_services *given);
const dw__emulator_interface *deepwell_emulator_open(const dw__emulator_services *given) {
    if (given->version != DW__EMULATOR_VERSION) return NULL;
    services = given;
    return &dw__emulator_functions;
}

void *dw__malloc(size_t bytes) { return services->malloc(bytes); }
void *dw__calloc(size_t count, size_t bytes) { return services->calloc(count, bytes); }
void *dw__realloc(void *pointer, size_t bytes) { return services->realloc(pointer, bytes); }
void dw__free(void *pointer) { services->free(pointer); }
void *dw__malloc_aligned(size_t bytes) { return services->malloc_aligned(bytes); }
void dw__free_aligned(void *pointer) { services->free(pointer); }
dw_status dw__grow(void **items, size_t *capacity, size_t needed, size_t item_bytes) {
    return services->grow(items, capacity, needed, item_bytes);
}

dw_status(dw__fail)(dw_status status, const char *format, ...) {
    char message[2048]; /* as long as the one that libdeepwell keeps */
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return services->fail(status, "%s", message);
}
dw_status(dw__fail_memory)(const char *what, size_t bytes) {
    return services->fail_memory(what, bytes);
}
const char *dw_last_error(void) { return services->last_error(); }

void dw__pool_run(int64_t count, dw__task task, void *context) {
    services->pool_run(count, task, context);
}
int dw__pool_threads(void) { return services->pool_threads(); }
int dw__pool_limit(int threads) { return services->pool_limit(threads); }
dw__isa dw__cpu_isa(void) { return (dw__isa)services->cpu_isa(); }
