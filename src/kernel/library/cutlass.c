#include "kernel/library/cutlass.h"
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "libdeepwell_cutlass.so"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static dw__cutlass loaded;
static dw_status outcome;
static char failure[1024];

static void *open_library(void) {
    const char *named = getenv("DEEPWELL_CUTLASS");
    char path[PATH_MAX];
    Dl_info own;
    if (named && *named) return dlopen(named, RTLD_NOW | RTLD_LOCAL);
    if (dladdr((const void *)&once, &own) && own.dli_fname) {
        const char *slash = strrchr(own.dli_fname, '/');
        const int folder = slash ? (int)(slash - own.dli_fname) + 1 : 0;
        if (snprintf(path, sizeof path, "%.*s" NAME, folder, own.dli_fname) < (int)sizeof path) {
            void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            if (library) return library;
        }
    }
    return dlopen(NAME, RTLD_NOW | RTLD_LOCAL);
}

static dw_status load(void) {
    const dw_cutlass_kernel *(*kernels)(int, size_t *) = NULL;
    const char *(*version)(void) = NULL;
    void *library = open_library();
    if (!library) {
        const char *reason = dlerror();
        return dw__fail(DW_UNSUPPORTED,
                        "CUTLASS's kernels are not there (%s): `make cutlass` builds them",
                        reason ? reason : NAME);
    }
    /* Never closed: the runtime that it uses does not survive that. */
    *(void **)&kernels = dlsym(library, "deepwell_cutlass_kernels");
    *(void **)&version = dlsym(library, "deepwell_cutlass_version");
    *(void **)&loaded.error = dlsym(library, "deepwell_cutlass_error");
    loaded.kernels = kernels ? kernels(DW_CUTLASS_VERSION, &loaded.count) : NULL;
    if (!loaded.kernels || !version || !loaded.error)
        return dw__fail(DW_UNSUPPORTED,
                        NAME " is of another version than this library: `make cutlass` again");
    loaded.version = version();
    return DW_OK;
}

static void load_once(void) {
    outcome = load();
    if (outcome != DW_OK) snprintf(failure, sizeof failure, "%s", dw_last_error());
}

dw_status dw__cutlass_load(const dw__cutlass **library) {
    pthread_once(&once, load_once);
    *library = NULL;
    if (outcome != DW_OK) return dw__fail(outcome, "%s", failure);
    *library = &loaded;
    return DW_OK;
}

const dw_cutlass_kernel *dw__cutlass_find(const dw__cutlass *library, dw_cutlass_kind kind,
                                          dw_cutlass_type type, int capability) {
    for (size_t i = 0; i < library->count; i++) {
        const dw_cutlass_kernel *k = &library->kernels[i];
        if (k->kind == kind && k->type == type && k->capability == capability) return k;
    }
    return NULL;
}
