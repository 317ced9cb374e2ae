// Instructions of consumer and workstation Blackwell GPUs (sm_120a): matrix multiplication by a warp from registers
// (mma.sync), also with block scales, and the loads that fill its fragments from shared memory (ldmatrix). sm90.cuh has
// barriers and TMA, which these GPUs have as well; they have neither wgmma nor tensor memory.
//
// Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16"): in lane 4 g + t, d[0] and d[1] are columns 2 t and 2 t + 1
// of row g of a 16 x 8 accumulator, d[2] and d[3] the same columns of row g + 8. A step of the contraction takes 32
// bytes of each row of A and B: 16 elements, 32 codes of 8 bits or 64 codes of 4 bits, in the same places.
#ifndef DW_SM120_CUH
#define DW_SM120_CUH

#include "sm90.cuh"

// ---- TMA ----------------------------------------------------------------------------------------------------

// Loads a box of a matrix into shared memory. Elements outside of the matrix arrive as zeros and count as bytes.
DEVICE void tma_load_box(uint32 to, const tensor_map *map, uint32 barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d." DW_TMA_TO ".global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"((uint64)map), "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}

// ---- fragments ----------------------------------------------------------------------------------------------

// Like load_matrices, with each matrix transposed.
DEVICE void load_matrices_transposed(uint32 *m, uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

// Tiles have TMA's 128-byte swizzle (tile_chunk of sm90.cuh), so that the eight rows of a matrix lie in eight different
// groups of four banks: no load of a fragment has a bank conflict.
//
// Rows along the contraction: loads the fragment of A for rows `row` to `row` + 15 and the 32 bytes from chunk `chunk` on.
DEVICE void load_a(uint32 *a, uint32 tile, int rows, int row, int chunk) {
    int lane = lane_index();
    load_matrices(a, tile_chunk(tile, rows, row + lane % 16, chunk + lane / 16));
}
// The fragments of B for two times eight rows of B: b[0] and b[1] for the first eight.
DEVICE void load_b_pair(uint32 *b, uint32 tile, int rows, int row, int chunk) {
    int lane = lane_index();
    load_matrices(b, tile_chunk(tile, rows, row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
}
// The same for tiles whose columns are the rows of A or B: their rows run along the contraction, `k` is the first.
DEVICE void load_a_transposed(uint32 *a, uint32 tile, int rows, int row, int k) {
    int lane = lane_index();
    load_matrices_transposed(a, tile_chunk(tile, rows, k + lane % 8 + lane / 16 * 8, row / 8 + lane / 8 % 2));
}
DEVICE void load_b_pair_transposed(uint32 *b, uint32 tile, int rows, int row, int k) {
    int lane = lane_index();
    load_matrices_transposed(b, tile_chunk(tile, rows, k + lane % 16, row / 8 + lane / 16));
}

// ---- mma.sync (PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions") --------------------------------

// d (16 x 8) += A (16 x 16) B^T (8 x 16) of elements.
DEVICE void multiply_add(float *d, const uint32 *a, const uint32 *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." DW_ELEMENT_TYPE "." DW_ELEMENT_TYPE
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d (16 x 8) += A B^T of codes with block scales ("Block Scaling for mma.sync"). Scales of A: those of row g lie in the
// word of lane 4 g + 2 thread_a, those of row g + 8 in the next lane's. Scales of B: those of row g in lane
// 4 g + thread_b. The first is byte `byte` of the word.
#define DW_DEFINE_SCALED(name, kind, vector, shape, type_a, type_b, type_scale)                                        \
    DEVICE void name(float *d, const uint32 *a, const uint32 *b, uint32 scales_a, uint16 byte, uint16 thread_a,        \
                     uint32 scales_b, uint16 thread_b) {                                                               \
        asm("mma.sync.aligned." kind ".block_scale." vector "." shape ".row.col.f32." type_a "." type_b                \
            ".f32." type_scale                                                                                         \
            " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%11, %14};"   \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scales_a), "h"(byte),              \
              "h"(thread_a), "r"(scales_b), "h"(thread_b));                                                            \
    }
DW_DEFINE_SCALED(multiply_mxfp8_4343, "kind::mxf8f6f4", "scale_vec::1X", "m16n8k32", "e4m3", "e4m3", "ue8m0")
DW_DEFINE_SCALED(multiply_mxfp8_4352, "kind::mxf8f6f4", "scale_vec::1X", "m16n8k32", "e4m3", "e5m2", "ue8m0")
DW_DEFINE_SCALED(multiply_mxfp8_5243, "kind::mxf8f6f4", "scale_vec::1X", "m16n8k32", "e5m2", "e4m3", "ue8m0")
DW_DEFINE_SCALED(multiply_mxfp8_5252, "kind::mxf8f6f4", "scale_vec::1X", "m16n8k32", "e5m2", "e5m2", "ue8m0")
DW_DEFINE_SCALED(multiply_mxfp4, "kind::mxf4", "scale_vec::2X", "m16n8k64", "e2m1", "e2m1", "ue8m0")
DW_DEFINE_SCALED(multiply_nvfp4, "kind::mxf4nvf4", "scale_vec::4X", "m16n8k64", "e2m1", "e2m1", "ue4m3")

#endif
