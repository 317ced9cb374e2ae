/* NVIDIA's run-time compiler, loaded when a kernel must be compiled. */
#ifndef DW_NVRTC_H
#define DW_NVRTC_H

#include "base/base.h"

#define DW_NVRTC_FUNCTIONS(X)                                                                      \
    X(version, nvrtcVersion, (int *major, int *minor))                                             \
    X(create, nvrtcCreateProgram,                                                                  \
      (void **program, const char *source, const char *name, int header_count,                     \
       const char *const *headers, const char *const *header_names))                               \
    X(destroy, nvrtcDestroyProgram, (void **program))                                              \
    X(compile, nvrtcCompileProgram, (void *program, int option_count, const char *const *options)) \
    X(log_size, nvrtcGetProgramLogSize, (void *program, size_t *bytes))                            \
    X(log, nvrtcGetProgramLog, (void *program, char *log))                                         \
    X(cubin_size, nvrtcGetCUBINSize, (void *program, size_t *bytes))                               \
    X(cubin, nvrtcGetCUBIN, (void *program, char *cubin))                                          \
    X(ptx_size, nvrtcGetPTXSize, (void *program, size_t *bytes))                                   \
    X(ptx, nvrtcGetPTX, (void *program, char *ptx))

typedef struct dw__nvrtc {
#define DW_NVRTC_MEMBER(member, name, parameters) int(*member) parameters;
    DW_NVRTC_FUNCTIONS(DW_NVRTC_MEMBER)
#undef DW_NVRTC_MEMBER
    const char *(*error_text)(int result);
    int major, minor;
    char path[1024];        /* path of the library */
    char description[1200]; /* "NVRTC 13.0 (path)" */
} dw__nvrtc;

/* DW_UNSUPPORTED: no library was found. The next call looks again. */
dw_status dw__nvrtc_load(const dw__nvrtc **nvrtc);

#endif
