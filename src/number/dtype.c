/* Element types: names and sizes in memory. */
#include "number/dtype_kinds.h"
#include <string.h>

static const struct {
    const char *name;
    int bits;
} dtypes[DW_DTYPE_COUNT] = {
#define ROW(key, name, bits) [DW_##key] = {name, bits},
    DW_DTYPE_MAP(ROW)
#undef ROW
};

const char *dw_dtype_name(dw_dtype dtype) {
    return (unsigned)dtype < DW_DTYPE_COUNT ? dtypes[dtype].name : "?";
}

int dw_dtype_bits(dw_dtype dtype) {
    return (unsigned)dtype < DW_DTYPE_COUNT ? dtypes[dtype].bits : 0;
}

size_t dw_dtype_bytes(dw_dtype dtype) { return (size_t)dw_dtype_bits(dtype) / 8; }

int64_t dw_tensor_bytes(dw_dtype dtype, int rank, const int64_t *shape) {
    static const int64_t most = (int64_t)1 << 61;
    const int bits = dw_dtype_bits(dtype);
    const int64_t last = rank > 0 ? shape[rank - 1] : 1;
    int64_t bytes;
    if (bits == 0 || last < 0) return -1;
    if (bits < 8)
        bytes = last / 2 + last % 2;
    else if (__builtin_mul_overflow(last, bits / 8, &bytes))
        return -1;
    bool empty = bytes == 0;
    if (empty) bytes = 1;
    for (int axis = 0; axis < rank - 1; axis++) {
        if (shape[axis] < 0) return -1;
        if (shape[axis] == 0)
            empty = true;
        else if (__builtin_mul_overflow(bytes, shape[axis], &bytes))
            return -1;
    }
    if (bytes > most) return -1;
    return empty ? 0 : bytes;
}

int dw__dtype_find(const char *name) {
    for (int i = 0; i < DW_DTYPE_COUNT; i++)
        if (strcmp(name, dtypes[i].name) == 0) return i;
    return -1;
}
