/* Element types. One enumeration names them in graphs, schemes, kernels and on devices.
 *
 *     int64_t shape[] = {3, 5};
 *     dw_tensor_bytes(DW_E2M1, 2, shape);    // 9: two codes in a byte, rows of whole bytes
 *
 * BOOL, the integers and the floating-point types of 16 bits and more are the types that operations of a graph compute
 * in. The others are codes: an element's value is its code times the scale of its block (deepwell/number.h), and only
 * operations that quantize or dequantize read or write them.
 *
 * Sources. OCP MX: "OCP Microscaling Formats (MX) Specification v1.0", 2023. OFP8: "OCP 8-bit Floating Point
 * Specification v1.0", 2023. PTX: "Parallel Thread Execution ISA 9.0", section cvt.
 */
#ifndef DEEPWELL_DTYPE_H
#define DEEPWELL_DTYPE_H

#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* key, name, bits of an element in memory.
 * E3M2 and E2M3 take a byte each: the code in the low bits, zeros above. E2M1 has two codes in a byte, the first in the
 * low nibble; a zero nibble follows an odd last code of a row. */
#define DW_DTYPE_MAP(X)                                                                            \
    X(BOOL, "bool", 8) /* 0 or 1 */                                                                \
    X(I32, "i32", 32)                                                                              \
    X(I64, "i64", 64)                                                                              \
    X(BF16, "bf16", 16)                                                                            \
    X(F16, "f16", 16)                                                                              \
    X(F32, "f32", 32)                                                                              \
    X(F64, "f64", 64)                                                                              \
    X(E4M3, "e4m3", 8) /* codes from here on; DW_FORMAT_MAP gives their values */                  \
    X(E5M2, "e5m2", 8)                                                                             \
    X(E3M2, "e3m2", 8)                                                                             \
    X(E2M3, "e2m3", 8)                                                                             \
    X(E2M1, "e2m1", 4)                                                                             \
    X(E8M0, "e8m0", 8)                                                                             \
    X(UE4M3, "ue4m3", 8)

typedef enum dw_dtype {
#define DW_DTYPE_ENUM(key, name, bits) DW_##key,
    DW_DTYPE_MAP(DW_DTYPE_ENUM)
#undef DW_DTYPE_ENUM
        DW_DTYPE_COUNT
} dw_dtype;

/* key, bits of a code, exponent bits, fraction bits, exponent bias, largest finite code: the floating-point types of 16
 * bits and fewer. A code is sign, exponent, fraction from the highest bit down; exponent field 0 is subnormal. */
#define DW_FORMAT_MAP(X)                                                                           \
    X(BF16, 16, 8, 7, 127, 0x7F7F)                                                                 \
    X(F16, 16, 5, 10, 15, 0x7BFF)                                                                  \
    X(E4M3, 8, 4, 3, 7, 0x7E)   /* OFP8: no infinity; 0x7F is NaN ("fn"). 448 */                   \
    X(E5M2, 8, 5, 2, 15, 0x7B)  /* OFP8: as IEEE. 57344 */                                         \
    X(E3M2, 6, 3, 2, 3, 0x1F)   /* OCP MX: no infinity, no NaN. 28 */                              \
    X(E2M3, 6, 2, 3, 1, 0x1F)   /* OCP MX: no infinity, no NaN. 7.5 */                             \
    X(E2M1, 4, 2, 1, 1, 0x7)    /* OCP MX: no infinity, no NaN. 6 */                               \
    X(E8M0, 8, 8, 0, 127, 0xFE) /* OCP MX 5.4.1: 2^(code-127); no sign, no zero; 0xFF NaN */       \
    X(UE4M3, 8, 4, 3, 7, 0x7E)  /* PTX: E4M3 with its sign bit always 0 */

DW_API const char *dw_dtype_name(dw_dtype dtype); /* "bool" "i32" ...; "?" */
DW_API int dw_dtype_bits(dw_dtype dtype);         /* of an element in memory; 0 if unknown */
/* Bytes of an element; 0 for E2M1, whose elements share bytes. */
DW_API size_t dw_dtype_bytes(dw_dtype dtype);
/* The largest finite number of a floating-point type of 16 bits or fewer; 0 for the other types. */
DW_API float dw_dtype_max(dw_dtype dtype);
/* Bytes of a contiguous tensor of `rank` axes. Its rows, along the last axis, are whole bytes. A scalar (rank 0) is a
 * row of one element. Returns -1 if the type is unknown, a dim is negative or the bytes exceed 2^61. */
DW_API int64_t dw_tensor_bytes(dw_dtype dtype, int rank, const int64_t *shape);

#ifdef __cplusplus
}
#endif
#endif
