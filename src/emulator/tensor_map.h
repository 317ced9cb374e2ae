/* Tensor maps (PTX ISA, "Tensors"; cuTensorMapEncodeTiled): the layout of a tensor in global memory and the box of it
 * that one copy moves. Programs treat the 128 bytes as opaque, so the emulator uses a layout of its own.
 */
#ifndef DW_EMULATOR_TENSOR_MAP_H
#define DW_EMULATOR_TENSOR_MAP_H

#include "base/base.h"

#define DW__TENSOR_AXES 5

/* Same numbers as CUtensorMapDataType. */
typedef enum dw__tensor_element {
    DW__TENSOR_U8,
    DW__TENSOR_U16,
    DW__TENSOR_U32,
    DW__TENSOR_S32,
    DW__TENSOR_U64,
    DW__TENSOR_S64,
    DW__TENSOR_F16,
    DW__TENSOR_F32,
    DW__TENSOR_F64,
    DW__TENSOR_BF16,
    DW__TENSOR_F32_FTZ,
    DW__TENSOR_TF32,
    DW__TENSOR_TF32_FTZ,
    DW__TENSOR_U4_ALIGN8, /* 16 elements of 4 bits in 8 bytes, as they lie in memory */
    DW__TENSOR_U4_ALIGN16, /* 16 elements of 4 bits become 16 bytes in shared memory, 8 of them unused */
    DW__TENSOR_U6_ALIGN16, /* 16 elements of 6 bits: 12 bytes in memory, 16 in shared memory */
    DW__TENSOR_ELEMENTS,
} dw__tensor_element;

/* Same numbers as CUtensorMapSwizzle. */
typedef enum dw__swizzle {
    DW__SWIZZLE_NONE,
    DW__SWIZZLE_32,
    DW__SWIZZLE_64,
    DW__SWIZZLE_128,
    DW__SWIZZLE_128_ATOM_32,
    DW__SWIZZLE_128_ATOM_32_FLIP_8,
    DW__SWIZZLE_128_ATOM_64,
    DW__SWIZZLES,
} dw__swizzle;

typedef struct dw__tensor_shape {
    uint32_t mark; /* DW__TENSOR_MARK: these bytes are a tensor map */
    uint8_t element, rank, swizzle, fill_nan;
    uint64_t address;
    uint64_t stride[DW__TENSOR_AXES - 1]; /* bytes, of axes 1 and up */
    uint32_t last[DW__TENSOR_AXES];       /* size - 1, in elements: up to 2^32 */
    uint16_t box[DW__TENSOR_AXES];        /* elements, 1 to 256 */
    uint8_t step[DW__TENSOR_AXES];        /* of the elements within the box, 1 to 8 */
    uint8_t interleave;
} dw__tensor_shape;
#define DW__TENSOR_MAP_BYTES 128
#define DW__TENSOR_MARK 0x50414D44u

/* Fails with DW_INVALID_ARGUMENT if the driver would reject the map; the message names the rule of
 * cuTensorMapEncodeTiled. */
dw_status dw__tensor_map_encode(const dw__tensor_shape *shape, void *map);
/* Returns false if the bytes are no tensor map. */
bool dw__tensor_map_decode(const void *map, dw__tensor_shape *shape);
/* Returns the bits of an element in global memory. */
int dw__tensor_element_bits(int element);

/* Returns the span in bytes within which a swizzle permutes pieces of 16 bytes. */
static inline uint32_t dw__swizzle_span(int swizzle) {
    static const uint32_t spans[DW__SWIZZLES] = {16, 32, 64, 128, 128, 128, 128};
    return spans[swizzle];
}
/* Returns the swizzled position of a byte at an absolute shared-memory address: an exclusive or of address bits. The
 * pattern of 32-byte atoms is that of NVIDIA's programs for B200, which repeats after 512 bytes. The patterns of
 * swizzles that flip and of 64-byte atoms are not known, so those are left unswizzled. */
static inline uint32_t dw__swizzled(uint32_t address, int swizzle) {
    static const struct {
        uint8_t shift, mask;
    } of[DW__SWIZZLES] = {[DW__SWIZZLE_32] = {3, 0x10},
                          [DW__SWIZZLE_64] = {3, 0x30},
                          [DW__SWIZZLE_128] = {3, 0x70},
                          [DW__SWIZZLE_128_ATOM_32] = {2, 0x60}};
    return address ^ (address >> of[swizzle].shift & of[swizzle].mask);
}

#endif
