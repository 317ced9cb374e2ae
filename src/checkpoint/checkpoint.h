/* Declarations shared by the reader and the writer of safetensors. */
#ifndef DW_CHECKPOINT_H
#define DW_CHECKPOINT_H

#include "base/base.h"
#include "deepwell/safetensors.h"

/* Tensor files are little-endian; their bytes are copied to and from memory unchanged. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor files are little-endian");

enum {
    DW__HEADER_PREFIX = 8,         /* bytes of the header's length field */
    DW__HEADER_MOST = 100000000,   /* most bytes of a header: the format's own limit */
    DW__HEADER_ALIGNMENT = 8,      /* alignment of the data's start */
    DW__TENSOR_NAME_MOST = 1024,   /* most bytes of a name */
    DW__CONVERSION_BYTES = 1 << 16 /* bytes converted at a time */
};

/* Converts "F32" to DW_STORED_F32. Returns -1 for an unknown name. */
int dw__stored_dtype_find(const char *name);
/* Computes elements and bytes of a shape. DW_SHAPE: a negative dim, too many dims, or 2^63 bytes or more. */
dw_status dw__stored_size(dw_stored_dtype dtype, int rank, const int64_t *shape, int64_t *count,
                          uint64_t *bytes);
/* Converts `count` elements to F32. Returns false for types that are not floating point (integers, bools). */
bool dw__stored_to_f32(dw_stored_dtype dtype, size_t count, const void *from, float *to);
/* Rounds `count` elements to BF16 or F16, to nearest even. */
void dw__stored_from_f32(dw_stored_dtype dtype, size_t count, const float *from, uint16_t *to);

#endif
