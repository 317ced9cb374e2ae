/* libdeepwell_cutlass.so without CUTLASS: its kernels follow the test's instructions and record their calls. The
 * environment sets its version (FAKE_CUTLASS_VERSION). */
#ifndef FAKE_CUTLASS_H
#define FAKE_CUTLASS_H

#include "cutlass/provider.h"

typedef struct fake_cutlass {
    const char *refused;      /* if not NULL, every call is rejected with this message */
    size_t workspace_bytes;   /* workspace that every call needs */
    dw_cutlass_result result; /* number of launches */
    const char *error;
    /* Runs instead of a kernel, with `call` of the structure of its kind; may be NULL. */
    void (*kernel)(const dw_cutlass_kernel *kernel, const void *call);

    int launches;
    const dw_cutlass_kernel *last; /* the kernel of the last launch, its call, and its stream */
    union {
        dw_cutlass_gemm gemm;
        dw_cutlass_grouped grouped;
        dw_cutlass_attention attention;
    } call;
    void *workspace, *stream;
} fake_cutlass;

/* fake_cutlass *fake_cutlass_state(void): exported by the library. */

#ifdef FAKE_CUTLASS /* path of the file, which Deepwell loads too */
#include "fake_gpu.h"

static fake_cutlass *provider;

static inline void load_fake_provider(void) {
    void *library = dlopen(FAKE_CUTLASS, RTLD_NOW | RTLD_GLOBAL);
    assert_non_null(library);
    fake_cutlass *(*state)(void) = NULL;
    *(void **)&state = dlsym(library, "fake_cutlass_state");
    provider = state();
    setenv("DEEPWELL_CUTLASS", FAKE_CUTLASS, 1);
}
#endif

#endif
