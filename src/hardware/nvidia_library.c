/* Finds NVIDIA's libraries of the toolkit and of Python packages, which the loader does not search. */
#include "hardware/measure.h"
#include <dlfcn.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *open_match(const char *prefix, const char *folder, const char *name) {
    char pattern[PATH_MAX + 256];
    glob_t found;
    void *library = NULL;
    if (!prefix || !*prefix) return NULL;
    if (snprintf(pattern, sizeof pattern, "%s%s%s", prefix, folder, name) >= (int)sizeof pattern)
        return NULL;
    if (glob(pattern, 0, NULL, &found) != 0) return NULL;
    for (size_t i = 0; i < found.gl_pathc && !library; i++)
        library = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_LOCAL);
    globfree(&found);
    return library;
}

/* Returns the folder above the running program's: Python's, or that of `deepwell` in a virtual environment. */
static const char *own_prefix(char program[PATH_MAX]) {
    ssize_t length = readlink("/proc/self/exe", program, PATH_MAX - 1);
    if (length <= 0) return NULL;
    program[length] = '\0';
    return dirname(dirname(program));
}

void *dw__nvidia_library(const char *variable, const char *const *names) {
    static const char *const folders[] = {"/lib/python3*/site-packages/nvidia/*/lib/",
                                          "/lib/python3*/dist-packages/nvidia/*/lib/", "/lib64/",
                                          "/lib/"};
    char program[PATH_MAX];
    const char *named = getenv(variable);
    if (named && *named) return dlopen(named, RTLD_NOW | RTLD_LOCAL);
    const char *const prefixes[] = {
        getenv("CUDA_HOME"),    getenv("CUDA_PATH"), "/usr/local/cuda", getenv("VIRTUAL_ENV"),
        getenv("CONDA_PREFIX"), own_prefix(program), "/usr/local",      "/usr"};
    for (; *names; names++) {
        /* also finds a library that PyTorch has loaded */
        void *library = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
        for (size_t i = 0; i < DW_COUNT(prefixes) && !library; i++)
            for (size_t j = 0; j < DW_COUNT(folders) && !library; j++)
                library = open_match(prefixes[i], folders[j], *names);
        if (library) return library;
    }
    return NULL;
}
