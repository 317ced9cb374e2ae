/* Sources of kernels that are made at run time, each with its number, which is the parameter of its variants. */
#ifndef DW_PROGRAM_TABLE_H
#define DW_PROGRAM_TABLE_H

#include "base/base.h"
#include "kernel/gpu_kernel.h"

/* A source, and what else its kernel knows of it. It lives as long as the process. */
typedef struct dw__program {
    char *source;
    void *form;
} dw__program;

/* Returns the kernel's variant of a source; equal sources have one number. Takes over the text. The table has a copy of
 * the form that came with a source first. */
dw_status dw__program_variant(const dw__context *context, const dw__kernel *kernel,
                              dw__text *source, const void *form, size_t form_bytes,
                              const dw__variant **variant);
const dw__program *dw__program_at(uint64_t number);

#endif
