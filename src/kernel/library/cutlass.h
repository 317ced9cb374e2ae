/* libdeepwell_cutlass.so, where `make cutlass` has built it (docs/cutlass.md): kernels that CUTLASS's templates make.
 * Looked for once: DEEPWELL_CUTLASS names the file; else it lies beside libdeepwell.so, or where the loader looks. */
#ifndef DW_LIBRARY_CUTLASS_H
#define DW_LIBRARY_CUTLASS_H

#include "base/base.h"
#include "cutlass/provider.h"

typedef struct dw__cutlass {
    const dw_cutlass_kernel *kernels;
    size_t count;
    const char *version;        /* CUTLASS's: "4.2.0" */
    const char *(*error)(void); /* of the calling thread's last call that did not succeed */
} dw__cutlass;

/* DW_UNSUPPORTED: it is not there, and why. */
dw_status dw__cutlass_load(const dw__cutlass **library);
/* The first kernel of this kind, type and compute capability (100: 10.0), or NULL. */
const dw_cutlass_kernel *dw__cutlass_find(const dw__cutlass *library, dw_cutlass_kind kind,
                                          dw_cutlass_type type, int capability);

#endif
