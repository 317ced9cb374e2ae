#include "hardware/nvml.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dw__nvml loaded;
static const dw__nvml *outcome;

/* Never shut down. Another part of the process may use NVML too, and NVML counts its users only since 2020. */
static void load_once(void) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
#define LOAD(member, name, parameters) *(void **)&loaded.member = dlsym(library, #name);
    DW_NVML_FUNCTIONS(LOAD)
#undef LOAD
    if (loaded.init && loaded.by_address && loaded.init() == 0) outcome = &loaded;
}

const dw__nvml *dw__nvml_library(void) {
    pthread_once(&once, load_once);
    return outcome;
}
