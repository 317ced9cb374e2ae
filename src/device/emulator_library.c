/* Opens libdeepwell_emulator.so: the file that DEEPWELL_EMULATOR names, else the one beside the file that this code is
 * in. No other folder is searched, least of all the current one: what is opened runs with the rights of the process.
 * The tests' static archive has the emulator inside instead (DW_EMULATOR_LINKED).
 */
#include "device/emulator_library.h"

#ifdef DW_EMULATOR_LINKED

dw_status dw__emulator_library(const dw__emulator_interface **functions) {
    *functions = &dw__emulator_functions;
    return DW_OK;
}

#else

#include "base/isa.h"
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME "libdeepwell_emulator.so"

static int cpu_isa(void) { return (int)dw__cpu_isa(); }

static const dw__emulator_services services = {
    .version = DW__EMULATOR_VERSION,
    .malloc = dw__malloc,
    .calloc = dw__calloc,
    .realloc = dw__realloc,
    .free = dw__free,
    .malloc_aligned = dw__malloc_aligned,
    .grow = dw__grow,
    .fail = (dw__fail),
    .fail_memory = (dw__fail_memory),
    .last_error = dw_last_error,
    .pool_run = dw__pool_run,
    .pool_threads = dw__pool_threads,
    .pool_limit = dw__pool_limit,
    .cpu_isa = cpu_isa,
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const dw__emulator_interface *loaded;
static dw_status outcome;
static char failure[2048];

/* NULL: there is none, and `reason` says why. */
static void *open_beside(const char *file, char *reason, size_t bytes) {
    char path[PATH_MAX + sizeof NAME];
    const char *slash = strrchr(file, '/');
    snprintf(path, sizeof path, "%.*s/" NAME, slash ? (int)(slash - file) : 0, file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *error = library ? NULL : dlerror();
    if (error) snprintf(reason, bytes, "%s", error);
    return library;
}

static void *open_library(char *reason, size_t bytes) {
    const char *named = getenv("DEEPWELL_EMULATOR");
    if (named && *named) {
        /* dlopen would look for a name without a folder in the system's folders. */
        void *library = *named == '/' ? dlopen(named, RTLD_NOW | RTLD_LOCAL) : NULL;
        const char *error = *named == '/' ? dlerror() : "it must be an absolute path";
        if (!library) snprintf(reason, bytes, "DEEPWELL_EMULATOR is \"%s\": %s", named, error);
        return library;
    }
    Dl_info own;
    if (!dladdr((const void *)&once, &own) || !own.dli_fname || own.dli_fname[0] != '/') {
        snprintf(reason, bytes, "libdeepwell was loaded by a relative path");
        return NULL;
    }
    void *library = open_beside(own.dli_fname, reason, bytes);
    if (library) return library;
    /* The file may be a link to the one that was built or installed. */
    char *real = realpath(own.dli_fname, NULL), ignored[1];
    if (real && strcmp(real, own.dli_fname) != 0)
        library = open_beside(real, ignored, sizeof ignored);
    free(real);
    return library;
}

static dw_status load(void) {
    char reason[1024] = "";
    dw__emulator_entry entry = NULL;
    void *library = open_library(reason, sizeof reason); /* never closed */
    if (!library)
        return dw__fail(DW_UNSUPPORTED,
                        "emulated GPUs need " NAME
                        ", which could not be loaded (%s); build and install "
                        "Deepwell with it, or name the file in DEEPWELL_EMULATOR",
                        reason);
    *(void **)&entry = dlsym(library, DW__EMULATOR_ENTRY);
    loaded = entry ? entry(&services) : NULL;
    if (!loaded || loaded->version != DW__EMULATOR_VERSION)
        return dw__fail(DW_UNSUPPORTED, NAME " belongs to another version of Deepwell than this "
                                             "libdeepwell: install both from the same build");
    return DW_OK;
}

static void load_once(void) {
    outcome = load();
    if (outcome != DW_OK) snprintf(failure, sizeof failure, "%s", dw_last_error());
}

dw_status dw__emulator_library(const dw__emulator_interface **functions) {
    pthread_once(&once, load_once);
    *functions = loaded;
    return outcome == DW_OK ? DW_OK : dw__fail(outcome, "%s", failure);
}

#endif
