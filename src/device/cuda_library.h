/* Finds the libraries of NVIDIA's toolkit that no build of Deepwell links: NVRTC, cuBLASLt, NCCL. Every Python
 * environment with a CUDA build of PyTorch has them in its site-packages, which the loader does not search. */
#ifndef DW_CUDA_LIBRARY_H
#define DW_CUDA_LIBRARY_H

#include "base/base.h"

enum { DW__LIBRARY_PATHS = 64, DW__LIBRARY_FOLDERS = 32 };

/* Paths of libraries, or names for the loader, in order of preference. */
typedef struct dw__library_paths {
    char *paths[DW__LIBRARY_PATHS];
    size_t count;
} dw__library_paths;

/* Adds a folder to every search: one that holds the libraries, or a Python's site-packages. The rules are those of
 * dw_jit_search (deepwell/jit.h). */
dw_status dw__library_search(const char *folder);
bool dw__library_has_folders(void);

/* Lists where a library may be. `names` has its file names, the preferred one first, up to NULL. The places are: the
 * folders of dw__library_search, the loader's path, CUDA_HOME, CUDA_PATH, /usr/local/cuda, the virtual and the conda
 * environment, python3 on PATH, the running program's own folder, /usr/local and /usr. Free the list afterwards. */
void dw__library_find(const char *const *names, dw__library_paths *list);
void dw__library_paths_free(dw__library_paths *list);

/* Opens the file that the environment's `variable` names; if it names none, the library that the process has loaded
 * already, or the first that can be opened of those that dw__library_find lists. It is never closed. DW_UNSUPPORTED:
 * there is none; `title` begins the message: "NCCL (libnccl.so.2)". */
dw_status dw__library_open(const char *title, const char *variable, const char *const *names,
                           void **library);

#endif
