#include "device/cuda_library.h"
#include <dlfcn.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the folders */
static char folders[DW__LIBRARY_FOLDERS][PATH_MAX];
static size_t folder_count;

dw_status dw__library_search(const char *folder) {
    dw_status status = DW_OK;
    size_t length = strlen(folder);
    if (length == 0 || length >= PATH_MAX)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "a folder to look in for NVRTC has a path of %zu bytes; expected 1 to %d",
                        length, PATH_MAX - 1);
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < folder_count; i++)
        if (strcmp(folders[i], folder) == 0) goto cleanup;
    if (folder_count == DW__LIBRARY_FOLDERS)
        DW_TRY(dw__fail(DW_UNSUPPORTED,
                        "\"%s\" is one more than the %d folders in which NVRTC is looked for; name "
                        "the file in DEEPWELL_NVRTC instead",
                        folder, DW__LIBRARY_FOLDERS));
    memcpy(folders[folder_count++], folder, length + 1);

cleanup:
    pthread_mutex_unlock(&lock);
    return status;
}

bool dw__library_has_folders(void) {
    pthread_mutex_lock(&lock);
    const bool has = folder_count > 0;
    pthread_mutex_unlock(&lock);
    return has;
}

/* ---- places ---------------------------------------------------------------------------------- */

static void add(dw__library_paths *list, const char *path) {
    for (size_t i = 0; i < list->count; i++)
        if (strcmp(list->paths[i], path) == 0) return;
    if (list->count == DW__LIBRARY_PATHS) return;
    size_t bytes = strlen(path) + 1;
    char *copy = dw__malloc(bytes);
    if (copy) list->paths[list->count++] = memcpy(copy, path, bytes);
}

void dw__library_paths_free(dw__library_paths *list) {
    for (size_t i = 0; i < list->count; i++) dw__free(list->paths[i]);
    list->count = 0;
}

/* Adds the files of these names in `prefix` followed by `pattern`. */
static void add_matches(dw__library_paths *list, const char *const *names, const char *prefix,
                        const char *pattern) {
    char whole[PATH_MAX + 256];
    if (!prefix || !*prefix) return;
    for (; *names; names++) {
        glob_t found;
        if (snprintf(whole, sizeof whole, "%s%s%s", prefix, pattern, *names) >= (int)sizeof whole)
            continue;
        if (glob(whole, 0, NULL, &found) != 0) continue;
        for (size_t i = found.gl_pathc; i > 0; i--) add(list, found.gl_pathv[i - 1]);
        globfree(&found);
    }
}

/* Adds the libraries of an installation: the toolkit's, an environment's or a Python's prefix. */
static void add_prefix(dw__library_paths *list, const char *const *names, const char *prefix) {
    add_matches(list, names, prefix, "/lib64/");
    add_matches(list, names, prefix, "/lib/python3*/site-packages/nvidia/*/lib/");
    add_matches(list, names, prefix, "/lib/python3*/dist-packages/nvidia/*/lib/");
    add_matches(list, names, prefix, "/lib/");
}

/* Adds the prefix of python3 on PATH, as named there (a virtual environment's) and where its links lead. */
static void add_python(dw__library_paths *list, const char *const *names) {
    const char *path = getenv("PATH");
    char program[PATH_MAX], resolved[PATH_MAX];
    for (const char *at = path ? path : ""; *at;) {
        size_t length = strcspn(at, ":");
        int written = snprintf(program, sizeof program, "%.*s/python3", (int)length, at);
        at += length + (at[length] == ':');
        if (length == 0 || written >= (int)sizeof program || access(program, X_OK) != 0) continue;
        bool linked = realpath(program, resolved) != NULL;
        add_prefix(list, names, dirname(dirname(program)));
        if (linked) add_prefix(list, names, dirname(dirname(resolved)));
        return;
    }
}

/* Adds the prefix of the running program: Python's, or that of `deepwell` in a virtual environment. */
static void add_own(dw__library_paths *list, const char *const *names) {
    char program[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", program, PATH_MAX - 1);
    if (length <= 0) return;
    program[length] = '\0';
    add_prefix(list, names, dirname(dirname(program)));
}

void dw__library_find(const char *const *names, dw__library_paths *list) {
    static const char *const variables[] = {"CUDA_HOME", "CUDA_PATH"};
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < folder_count; i++) {
        add_matches(list, names, folders[i], "/");
        add_matches(list, names, folders[i], "/nvidia/*/lib/");
    }
    pthread_mutex_unlock(&lock);
    for (const char *const *name = names; *name; name++) add(list, *name);
    for (size_t i = 0; i < DW_COUNT(variables); i++) add_prefix(list, names, getenv(variables[i]));
    add_prefix(list, names, "/usr/local/cuda");
    add_prefix(list, names, getenv("VIRTUAL_ENV"));
    add_prefix(list, names, getenv("CONDA_PREFIX"));
    add_python(list, names);
    add_own(list, names);
    add_prefix(list, names, "/usr/local");
    add_prefix(list, names, "/usr");
}

/* ---- opening --------------------------------------------------------------------------------- */

static dw_status open_named(const char *title, const char *variable, const char *path,
                            void **library) {
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (*library) return DW_OK;
    const char *reason = dlerror();
    return dw__fail(DW_UNSUPPORTED,
                    "%s was not found: %s=%s cannot be loaded (%s); name another "
                    "file, or unset it",
                    title, variable, path, reason ? reason : "no reason given");
}

dw_status dw__library_open(const char *title, const char *variable, const char *const *names,
                           void **library) {
    dw__library_paths list = {0};
    const char *named = getenv(variable);
    *library = NULL;
    if (named && *named) return open_named(title, variable, named, library);
    for (const char *const *name = names; *name && !*library; name++)
        *library = dlopen(*name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (*library) return DW_OK;
    dw__library_find(names, &list);
    for (size_t i = 0; i < list.count && !*library; i++)
        *library = dlopen(list.paths[i], RTLD_NOW | RTLD_LOCAL);
    dw__library_paths_free(&list);
    if (*library) return DW_OK;
    return dw__fail(DW_UNSUPPORTED,
                    "%s was not found; install a CUDA build of PyTorch or the toolkit, or name the "
                    "file in %s",
                    title, variable);
}
