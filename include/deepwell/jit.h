/* Device code, compiled when it is first needed: where the compiler is found and what compiling has cost.
 *
 * NVIDIA's run-time compiler (NVRTC) is looked for, in this order: the file that DEEPWELL_NVRTC names; folders given
 * to dw_jit_search; libnvrtc.so.13 and .12 where the loader finds them; CUDA_HOME and /usr/local/cuda; the
 * site-packages of the Python on PATH, where PyTorch's CUDA builds bring it. Results are kept on disk, in
 * DEEPWELL_CACHE, else $XDG_CACHE_HOME/deepwell, else ~/.cache/deepwell, if nobody but the user of the process can
 * write there.
 */
#ifndef DEEPWELL_JIT_H
#define DEEPWELL_JIT_H

#include "deepwell/status.h"
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Remembers a folder to look in for NVRTC: one that holds libnvrtc.so.*, or a Python's site-packages. Looks at nothing
 * now. DW_UNSUPPORTED after 32 of them, DW_INVALID_ARGUMENT for a path that is too long. */
DW_API dw_status dw_jit_search(const char *folder);

/* Since the process began. */
typedef struct dw_jit_counts {
    uint32_t size;     /* sizeof(dw_jit_counts), set by the caller */
    uint32_t embedded; /* modules that came with the library, */
    uint32_t cached;   /* that were read from the disk cache, */
    uint32_t compiled; /* that were compiled */
    uint32_t
        corrupt; /* entries of the cache that did not hold what they should: removed and made again */
    uint32_t
        unwritten; /* compiled modules that could not be put into the cache: the next process compiles again */
    double compile_seconds;
    uint32_t translated; /* modules that came with the library as PTX, which the driver compiled */
} dw_jit_counts;
DW_API void dw_jit_count(dw_jit_counts *counts);

/* "NVRTC 13.0 (/path/libnvrtc.so.13)"; loads it. Valid until the process ends. DW_UNSUPPORTED: none was found, and
 * where it was looked for. */
DW_API dw_status dw_jit_compiler(const char **description);

#ifdef __cplusplus
}
#endif
#endif
