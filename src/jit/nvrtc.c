/* Finds NVRTC. The toolkit contains it, and so does every Python environment with a CUDA build of PyTorch, in its
 * site-packages, which the loader does not search. */
#include "jit/nvrtc.h"
#include "deepwell/jit.h"
#include "device/cuda_driver.h"
#include <dlfcn.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_FOLDERS = 32, MOST_CANDIDATES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all of the following */
static char folders[MOST_FOLDERS][PATH_MAX];
static size_t folder_count;
static dw__nvrtc loaded;
static bool is_loaded;

dw_status dw_jit_search(const char *folder) {
    dw_status status = DW_OK;
    size_t length = strlen(folder);
    if (length == 0 || length >= PATH_MAX)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "a folder to look in for NVRTC has a path of %zu bytes; expected 1 to %d",
                        length, PATH_MAX - 1);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < folder_count; i++)
        if (strcmp(folders[i], folder) == 0) goto cleanup;
    if (folder_count == MOST_FOLDERS)
        DW_TRY(dw__fail(DW_UNSUPPORTED,
                        "\"%s\" is one more than the %d folders in which NVRTC is looked for; name "
                        "the file in DEEPWELL_NVRTC instead",
                        folder, MOST_FOLDERS));
    memcpy(folders[folder_count++], folder, length + 1);

cleanup:
    pthread_mutex_unlock(&lock);
    return status;
}

/* ---- candidates ------------------------------------------------------------------------------ */

/* Paths of libraries, or names for the loader, in order of preference. */
typedef struct candidates {
    char *paths[MOST_CANDIDATES];
    size_t count;
} candidates;

static void add(candidates *list, const char *path) {
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->paths[i], path) == 0) return;
    if (list->count == MOST_CANDIDATES) return;
    size_t bytes = strlen(path) + 1;
    char *copy = dw__malloc(bytes);
    if (copy) list->paths[list->count++] = memcpy(copy, path, bytes);
}

static void free_candidates(candidates *list) {
    for (size_t i = 0; i < list->count; i++) dw__free(list->paths[i]);
}

/* Adds the files that match `folder` followed by `pattern`, later versions first. */
static void add_matches(candidates *list, const char *folder, const char *pattern) {
    char whole[PATH_MAX + 128];
    glob_t found;
    if (!folder || !*folder) return;
    if (snprintf(whole, sizeof whole, "%s%s", folder, pattern) >= (int)sizeof whole) return;
    if (glob(whole, 0, NULL, &found) != 0) return;
    for (size_t i = found.gl_pathc; i > 0; i--) add(list, found.gl_pathv[i - 1]);
    globfree(&found);
}

/* Adds libraries in lib/ of a virtual environment, a conda environment or a Python's own prefix. */
static void add_prefix(candidates *list, const char *prefix) {
    add_matches(list, prefix, "/lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.1[23]");
    add_matches(list, prefix, "/lib/python3*/dist-packages/nvidia/*/lib/libnvrtc.so.1[23]");
    add_matches(list, prefix, "/lib/libnvrtc.so.1[23]");
}

/* Adds the prefix of python3 on PATH, as named there (a virtual environment's) and where its links lead. */
static void add_python(candidates *list) {
    const char *path = getenv("PATH");
    char program[PATH_MAX], resolved[PATH_MAX];
    for (const char *at = path ? path : ""; *at;) {
        size_t length = strcspn(at, ":");
        int written = snprintf(program, sizeof program, "%.*s/python3", (int)length, at);
        at += length + (at[length] == ':');
        if (length == 0 || written >= (int)sizeof program || access(program, X_OK) != 0) continue;
        bool linked = realpath(program, resolved) != NULL;
        add_prefix(list, dirname(dirname(program)));
        if (linked) add_prefix(list, dirname(dirname(resolved)));
        return;
    }
}

static void find_candidates(candidates *list) {
    for (size_t i = 0; i < folder_count; i++) {
        add_matches(list, folders[i], "/libnvrtc.so.1[23]");
        add_matches(list, folders[i], "/nvidia/*/lib/libnvrtc.so.1[23]");
    }
    add(list, "libnvrtc.so.13");
    add(list, "libnvrtc.so.12");
    add_matches(list, getenv("CUDA_HOME"), "/lib64/libnvrtc.so.1[23]");
    add_matches(list, getenv("CUDA_PATH"), "/lib64/libnvrtc.so.1[23]");
    add_matches(list, "/usr/local/cuda", "/lib64/libnvrtc.so.1[23]");
    add_prefix(list, getenv("VIRTUAL_ENV"));
    add_prefix(list, getenv("CONDA_PREFIX"));
    add_python(list);
}

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

static dw_status load_first(const candidates *list) {
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
        folder_count > 0 ? ", nor in the Python that runs" : "");
}

dw_status dw__nvrtc_load(const dw__nvrtc **nvrtc) {
    dw_status status = DW_OK;
    candidates list = {0};
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
    find_candidates(&list);
    DW_TRY(load_first(&list));

cleanup:
    pthread_mutex_unlock(&lock);
    free_candidates(&list);
    if (status == DW_OK) *nvrtc = &loaded;
    return status;
}

dw_status dw_jit_compiler(const char **description) {
    const dw__nvrtc *nvrtc;
    DW_RETURN_IF_FAILED(dw__nvrtc_load(&nvrtc));
    *description = nvrtc->description;
    return DW_OK;
}
