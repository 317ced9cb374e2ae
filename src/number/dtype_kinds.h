/* Kinds of element types. */
#ifndef DW_NUMBER_DTYPE_KINDS_H
#define DW_NUMBER_DTYPE_KINDS_H

#include "deepwell/dtype.h"
#include <stdbool.h>

static inline bool dw__dtype_is_integer(dw_dtype dtype) {
    return dtype == DW_I32 || dtype == DW_I64;
}
/* Operations compute in the type; codes are not counted. */
static inline bool dw__dtype_is_float(dw_dtype dtype) {
    return dtype >= DW_BF16 && dtype <= DW_F64;
}
static inline bool dw__dtype_is_half(dw_dtype dtype) { return dtype == DW_BF16 || dtype == DW_F16; }
/* Operations of a graph do not compute in the type. */
static inline bool dw__dtype_is_code(dw_dtype dtype) {
    return dtype > DW_F64 && dtype < DW_DTYPE_COUNT;
}
/* The elements that complete a row to whole bytes follow it: E2M1 has two in a byte. */
static inline int64_t dw__dtype_row(dw_dtype dtype, int64_t count) {
    return dtype == DW_E2M1 ? count + count % 2 : count;
}
/* Returns -1 for an unknown name. */
int dw__dtype_find(const char *name);

#endif
