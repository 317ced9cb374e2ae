/* Just-in-time compilation of device code: where the compiler is found.
 *
 *     const char *compiler;
 *     dw_jit_search("/opt/venv/lib/python3.12/site-packages");
 *     puts(dw_jit_compiler(&compiler) == DW_OK ? compiler : dw_last_error());
 *
 * Deepwell looks for NVIDIA's run-time compiler (NVRTC) in this order: the file in DEEPWELL_NVRTC; the folders given to
 * dw_jit_search; the loader's libnvrtc.so.13 and .12; CUDA_HOME and /usr/local/cuda; the site-packages of the Python on
 * PATH, where PyTorch's CUDA builds install it. Compiled modules are kept on disk, in DEEPWELL_CACHE, else
 * $XDG_CACHE_HOME/deepwell, else ~/.cache/deepwell. That folder is used only if no other user can write to it.
 */
#ifndef DEEPWELL_JIT_H
#define DEEPWELL_JIT_H

#include "deepwell/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Adds a folder to the search for NVRTC, and for cuBLASLt and NCCL: one that holds the libraries, or a Python's
 * site-packages. It is read when a library is first needed. DW_UNSUPPORTED: there are 32 already. DW_INVALID_ARGUMENT:
 * the path is too long. */
DW_API dw_status dw_jit_search(const char *folder);

/* Loads NVRTC and describes it: "NVRTC 13.0 (/path/libnvrtc.so.13)". The string is valid until the process ends.
 * DW_UNSUPPORTED: NVRTC was not found; the message says where it was looked for. */
DW_API dw_status dw_jit_compiler(const char **description);

#ifdef __cplusplus
}
#endif
#endif
