/* What the reader and the writer of safetensors share. */
#ifndef DW_CHECKPOINT_H
#define DW_CHECKPOINT_H

#include "base/base.h"
#include "deepwell/safetensors.h"

/* Tensor files are little-endian, and their bytes go to memory and from it as they are. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor files are little-endian");

enum {
    DW__HEADER_PREFIX = 8,         /* bytes that hold the header's length */
    DW__HEADER_MOST = 100000000,   /* bytes of header: the format's own limit */
    DW__HEADER_ALIGNMENT = 8,      /* of the data's start */
    DW__TENSOR_NAME_MOST = 1024,   /* bytes of a name */
    DW__CONVERSION_BYTES = 1 << 16 /* converted at a time */
};

/* "F32" -> DW_STORED_F32; -1. */
int dw__stored_dtype_find(const char *name);
/* Elements and bytes of a shape; DW_SHAPE: a negative dim, too many of them, or 2^63 bytes and more. */
dw_status dw__stored_size(dw_stored_dtype dtype, int rank, const int64_t *shape, int64_t *count,
                          uint64_t *bytes);
/* `count` elements to F32; false when the type has no such meaning (integers, bools). */
bool dw__stored_to_f32(dw_stored_dtype dtype, size_t count, const void *from, float *to);

#endif
