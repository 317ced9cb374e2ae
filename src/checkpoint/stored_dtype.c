/* Element types of tensor files. */
#include "checkpoint/checkpoint.h"
#include "deepwell/number.h"
#include "number/half.h"
#include <string.h>

static const struct {
    const char *name;
    size_t bytes;
} table[DW_STORED_DTYPE_COUNT] = {
#define ROW(key, name, bytes) [DW_STORED_##key] = {name, bytes},
    DW_STORED_DTYPE_MAP(ROW)
#undef ROW
};

const char *dw_stored_dtype_name(dw_stored_dtype dtype) {
    return (unsigned)dtype < DW_STORED_DTYPE_COUNT ? table[dtype].name : "unknown";
}

size_t dw_stored_dtype_bytes(dw_stored_dtype dtype) {
    return (unsigned)dtype < DW_STORED_DTYPE_COUNT ? table[dtype].bytes : 0;
}

int dw__stored_dtype_find(const char *name) {
    for (int dtype = 0; dtype < DW_STORED_DTYPE_COUNT; dtype++)
        if (strcmp(table[dtype].name, name) == 0) return dtype;
    return -1;
}

dw_status dw__stored_size(dw_stored_dtype dtype, int rank, const int64_t *shape, int64_t *count,
                          uint64_t *bytes) {
    bool empty = false;
    int64_t product = 1, total;
    if (rank < 0 || rank > DW_STORED_MAX_RANK)
        return dw__fail(DW_SHAPE, "it has %d dims; expected at most %d", rank, DW_STORED_MAX_RANK);
    for (int axis = 0; axis < rank; axis++) {
        if (shape[axis] < 0)
            return dw__fail(DW_SHAPE, "dim %d is %lld; expected 0 or more", axis,
                            (long long)shape[axis]);
        empty = empty || shape[axis] == 0;
    }
    for (int axis = 0; axis < rank && !empty; axis++)
        if (__builtin_mul_overflow(product, shape[axis], &product))
            return dw__fail(DW_SHAPE, "it has 2^63 elements or more");
    if (empty) product = 0;
    if (__builtin_mul_overflow(product, (int64_t)dw_stored_dtype_bytes(dtype), &total))
        return dw__fail(DW_SHAPE, "it has 2^63 bytes or more");
    *count = product;
    *bytes = (uint64_t)total;
    return DW_OK;
}

bool dw__stored_to_f32(dw_stored_dtype dtype, size_t count, const void *from, float *to) {
    const uint16_t *halves = from;
    const double *doubles = from;
    switch (dtype) {
    case DW_STORED_F32: memcpy(to, from, count * sizeof *to); return true;
    case DW_STORED_F64:
        for (size_t i = 0; i < count; i++) to[i] = (float)doubles[i];
        return true;
    case DW_STORED_BF16:
        for (size_t i = 0; i < count; i++) to[i] = dw__bf16_to_f32(halves[i]);
        return true;
    case DW_STORED_F16:
        for (size_t i = 0; i < count; i++) to[i] = dw__f16_to_f32(halves[i]);
        return true;
    case DW_STORED_F8_E4M3: return dw_decode(DW_E4M3, (int64_t)count, from, to) == DW_OK;
    case DW_STORED_F8_E5M2: return dw_decode(DW_E5M2, (int64_t)count, from, to) == DW_OK;
    default: return false;
    }
}

void dw__stored_from_f32(dw_stored_dtype dtype, size_t count, const float *from, uint16_t *to) {
    if (dtype == DW_STORED_BF16)
        for (size_t i = 0; i < count; i++) to[i] = dw__f32_to_bf16(from[i]);
    else
        for (size_t i = 0; i < count; i++) to[i] = dw__f32_to_f16(from[i]);
}
