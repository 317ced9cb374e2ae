/* Loads NVRTC, the latest that the driver serves. */
#include "jit/nvrtc.h"
#include "deepwell/jit.h"
#include "device/cuda_driver.h"
#include "device/cuda_library.h"
#include <dlfcn.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all of the following */
static dw__nvrtc loaded;
static bool is_loaded;

dw_status dw_jit_search(const char *folder) { return dw__library_search(folder); }

/* ---- loading ----------------------------------------------------------------------------------- */

/* NVRTC opens this library by its bare name while it compiles. If it is already loaded, NVRTC finds it wherever it
 * lies. */
static void load_builtins(const char *library) {
    char pattern[PATH_MAX + 64], folder[PATH_MAX];
    glob_t found;
    snprintf(folder, sizeof folder, "%s", library);
    snprintf(pattern, sizeof pattern, "%s/libnvrtc-builtins.so.[0-9]*", dirname(folder));
    if (glob(pattern, 0, NULL, &found) != 0) return;
    for (size_t i = 0; i < found.gl_pathc; i++) dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
    globfree(&found);
}

static dw_status load_from(const char *path) {
    struct link_map *map = NULL;
    dw__nvrtc made = {0};
    if (strchr(path, '/')) load_builtins(path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        return dw__fail(DW_UNSUPPORTED, "%s", reason ? reason : path);
    }
    /* The library is never closed, because its functions stay in use. */
#define LOAD(member, name, parameters)                                                             \
    *(void **)&made.member = dlsym(library, #name);                                                \
    if (!made.member) return dw__fail(DW_UNSUPPORTED, "%s has no function " #name, path);
    DW_NVRTC_FUNCTIONS(LOAD)
#undef LOAD
    *(void **)&made.error_text = dlsym(library, "nvrtcGetErrorString");
    if (!made.error_text || made.version(&made.major, &made.minor) != 0)
        return dw__fail(DW_UNSUPPORTED, "%s does not say its version", path);
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map->l_name[0]) path = map->l_name;
    load_builtins(path);
    snprintf(made.path, sizeof made.path, "%s", path);
    snprintf(made.description, sizeof made.description, "NVRTC %d.%d (%s)", made.major, made.minor,
             made.path);
    loaded = made;
    is_loaded = true;
    return DW_OK;
}

/* Returns 13 for ".../libnvrtc.so.13". */
static int major_of(const char *path) {
    const char *at = strstr(path, ".so.");
    return at ? atoi(at + 4) : 0;
}

static dw_status load_first(const dw__library_paths *list) {
    const dw__cuda *cuda;
    int served = dw__cuda_driver(&cuda) == DW_OK ? cuda->version / 1000 : INT_MAX;
    /* An older driver may reject the code of a later compiler, so such a compiler comes last. */
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < list->count; i++) {
            bool too_new = major_of(list->paths[i]) > served;
            if (too_new == (pass == 1) && load_from(list->paths[i]) == DW_OK) return DW_OK;
        }
    return dw__fail(
        DW_UNSUPPORTED,
        "NVIDIA's run-time compiler (libnvrtc.so.13 or .12) was not found on the library path, in "
        "CUDA_HOME, /usr/local/cuda or the site-packages of python3 on PATH%s; install "
        "a CUDA build of PyTorch or the CUDA toolkit, or name the file in DEEPWELL_NVRTC",
        dw__library_has_folders() ? ", nor in the Python that runs" : "");
}

dw_status dw__nvrtc_load(const dw__nvrtc **nvrtc) {
    dw_status status = DW_OK;
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", NULL};
    dw__library_paths list = {0};
    pthread_mutex_lock(&lock);
    const char *named = getenv("DEEPWELL_NVRTC");
    if (is_loaded) goto cleanup;
    if (named && *named) {
        status = load_from(named);
        if (status != DW_OK)
            dw__fail_prefix(status,
                            "DEEPWELL_NVRTC=%s cannot be loaded; name a libnvrtc.so.13 or "
                            ".12, or unset it",
                            named);
        goto cleanup;
    }
    dw__library_find(names, &list);
    DW_TRY(load_first(&list));

cleanup:
    pthread_mutex_unlock(&lock);
    dw__library_paths_free(&list);
    if (status == DW_OK) *nvrtc = &loaded;
    return status;
}

dw_status dw_jit_compiler(const char **description) {
    const dw__nvrtc *nvrtc;
    DW_RETURN_IF_FAILED(dw__nvrtc_load(&nvrtc));
    *description = nvrtc->description;
    return DW_OK;
}
