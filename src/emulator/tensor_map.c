#include "emulator/tensor_map.h"
#include <string.h>

static const int element_bits[DW__TENSOR_ELEMENTS] = {8,  16, 32, 32, 64, 64, 16, 32,
                                                      64, 16, 32, 32, 32, 4,  4,  6};
int dw__tensor_element_bits(int element) { return element_bits[element]; }

/* Checks the rules of cuTensorMapEncodeTiled (CUDA driver API, "Tensor Map Object Management"). */
dw_status dw__tensor_map_encode(const dw__tensor_shape *shape, void *map) {
    if (shape->element >= DW__TENSOR_ELEMENTS || shape->rank < 1 || shape->rank > DW__TENSOR_AXES)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "a tensor map of element type %d and %d axes: must be 0 to 15 and 1 to 5",
                        shape->element, shape->rank);
    if (shape->address % 16)
        return dw__fail(DW_INVALID_ARGUMENT, "a tensor map at 0x%llx: must be a multiple of 16",
                        (unsigned long long)shape->address);
    for (int axis = 0; axis < shape->rank; axis++) {
        if (axis > 0 &&
            (shape->stride[axis - 1] % 16 || shape->stride[axis - 1] >= (uint64_t)1 << 40))
            return dw__fail(
                DW_INVALID_ARGUMENT,
                "stride %llu of axis %d of a tensor map: must be a multiple of 16 below 2^40",
                (unsigned long long)shape->stride[axis - 1], axis);
        if (shape->box[axis] < 1 || shape->box[axis] > 256 || shape->step[axis] < 1 ||
            shape->step[axis] > 8)
            return dw__fail(
                DW_INVALID_ARGUMENT,
                "box %d with step %d of axis %d of a tensor map: must be 1 to 256 and 1 to 8",
                shape->box[axis], shape->step[axis], axis);
    }
    if (shape->interleave)
        return dw__fail(DW_UNSUPPORTED,
                        "interleaved tensor maps are not supported by the emulator");
    if (shape->swizzle > DW__SWIZZLE_128_ATOM_32)
        return dw__fail(DW_UNSUPPORTED,
                        "swizzle %d of a tensor map is not supported by the emulator",
                        shape->swizzle);
    const int stored_bits =
        shape->element >= DW__TENSOR_U4_ALIGN16 ? 8 : element_bits[shape->element];
    const int row = shape->box[0] * stored_bits / 8;
    if (row % 16)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "rows of %d bytes in a box of a tensor map: must be a multiple of 16", row);
    const int span = (int)dw__swizzle_span(shape->swizzle);
    if (shape->swizzle != DW__SWIZZLE_NONE && row > span)
        return dw__fail(DW_INVALID_ARGUMENT,
                        "rows of %d bytes in a box of a tensor map: its swizzle allows at most %d",
                        row, span);
    dw__tensor_shape marked = *shape;
    marked.mark = DW__TENSOR_MARK;
    _Static_assert(sizeof marked <= DW__TENSOR_MAP_BYTES, "a map fits");
    memset(map, 0, DW__TENSOR_MAP_BYTES);
    memcpy(map, &marked, sizeof marked);
    return DW_OK;
}

bool dw__tensor_map_decode(const void *map, dw__tensor_shape *shape) {
    memcpy(shape, map, sizeof *shape);
    bool good = shape->mark == DW__TENSOR_MARK && shape->rank >= 1 &&
                shape->rank <= DW__TENSOR_AXES && shape->element < DW__TENSOR_ELEMENTS &&
                shape->swizzle < DW__SWIZZLES;
    for (int axis = 0; good && axis < shape->rank; axis++)
        good = shape->box[axis] >= 1 && shape->step[axis] >= 1;
    return good;
}
