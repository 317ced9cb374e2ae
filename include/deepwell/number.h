/* Number formats of 16 bits and fewer, and quantization in blocks that share a scale.
 *
 *     dw_encode, dw_decode                   single numbers: F32 to codes and back
 *     dw_block_quantize, dw_block_dequantize MXFP8, MXFP6, MXFP4, NVFP4, FP8-block
 *     dw_hadamard                            random Hadamard transform
 *     dw_scales_swizzle, _unswizzle          the order in which tensor cores read block scales
 *
 *     uint8_t codes[32], scale;
 *     dw_block_options options = DW_BLOCK_OPTIONS_DEFAULT;         // MXFP8: E4M3, blocks of 32
 *     dw_block_quantize(&options, 1, 32, values, 32, codes, 0, &scale);
 *     dw_block_dequantize(&options, 1, 32, codes, 0, &scale, values, 32);
 *
 * Every result depends on the arguments alone: it has the same bits on every CPU, on any number of threads, and in any
 * floating-point mode of the calling thread. The library's threads share the work. Sizes are checked, pointers are not.
 * Inputs and outputs must not overlap.
 *
 * Sources. OCP MX: "OCP Microscaling Formats (MX) Specification v1.0", 2023. OFP8: "OCP 8-bit Floating Point
 * Specification v1.0", 2023. PTX: "Parallel Thread Execution ISA 9.0", sections cvt and tcgen05. NVFP4:
 * "Pretraining Large Language Models with NVFP4", arXiv 2509.25149. MXFP8 recipe: "Recipes for Pre-training
 * LLMs with MXFP8", arXiv 2506.08027. DeepSeek: "DeepSeek-V3 Technical Report", arXiv 2412.19437, 3.3.
 */
#ifndef DEEPWELL_NUMBER_H
#define DEEPWELL_NUMBER_H

#include "deepwell/dtype.h"
#include "deepwell/scheme.h"
#include "deepwell/status.h"
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- single numbers ------------------------------------------------------------------------------ */

/* The result for infinity and for numbers that round to more than the largest finite one:
 *   SATURATE   the largest finite number, sign kept (PTX .satfinite; torch's cast to E4M3)
 *   NONFINITE  infinity where the format has one (BF16, F16, E5M2), NaN in E4M3, UE4M3 and E8M0 (ml_dtypes);
 *              E3M2, E2M3 and E2M1 have neither and saturate
 * In both, NaN becomes NaN: E4M3 and E5M2 0x7F with the sign kept (torch), UE4M3 0x7F, E8M0 0xFF, BF16 and F16
 * a quiet NaN with the sign and the payload that fits; in E3M2, E2M3, E2M1 the largest number, positive (PTX).
 * UE4M3 and E8M0 have no sign: -0 is 0; a negative number becomes code 0 (SATURATE) or NaN (NONFINITE). */
typedef enum dw_overflow { DW_OVERFLOW_SATURATE, DW_OVERFLOW_NONFINITE } dw_overflow;

/*   NEAREST     to the nearest number, ties to the even code, subnormals included. The codes of E8M0 are powers of
 *               two; it rounds a tie (1.5 * 2^e) up. Numbers between 2^-127 and 2^-126, subnormal in F32, become
 *               2^-126, and all below 2^-127 code 0 (as in ml_dtypes and torch).
 *   STOCHASTIC  x between neighbours a and b = a + q (in magnitude) becomes b if
 *               w + floor((x - a) / q * 2^32) >= 2^32 for a random 32-bit word w. The probability of b is
 *               (x - a) / q, less an error below 2^-32. Not supported for E8M0. */
typedef enum dw_rounding { DW_ROUND_NEAREST, DW_ROUND_STOCHASTIC } dw_rounding;

/* Random words of Philox4x32-10, as in the operation `random_uniform`. Element `index` uses word index % 4 of block
 * index / 4, with key = {low32(seed), high32(seed)} and
 * counter = {low32(block), low32(stream) ^ high32(block) << 20, low32(offset), high32(offset)}. */
typedef struct dw_random {
    int64_t seed, offset, stream;
} dw_random;

typedef struct dw_encode_options {
    size_t struct_size; /* sizeof(dw_encode_options) */
    dw_overflow overflow;
    dw_rounding rounding;
    dw_random random; /* STOCHASTIC only */
} dw_encode_options;
#define DW_ENCODE_OPTIONS_DEFAULT                                                                  \
    {                                                                                              \
        sizeof(dw_encode_options), DW_OVERFLOW_SATURATE, DW_ROUND_NEAREST, { 0, 0, 0 }             \
    }

/* Rounds `count` values to codes of a floating-point type of 16 bits or fewer. `codes` has dw_tensor_bytes(dtype, 1,
 * &count) bytes. `options` NULL: the defaults. DW_INVALID_ARGUMENT. */
DW_API dw_status dw_encode(dw_dtype dtype, int64_t count, const float *values,
                           const dw_encode_options *options, void *codes);
/* Converts codes to F32 exactly. Bits above the code are ignored, in UE4M3 also its highest bit. A NaN becomes
 * 0x7FC00000 with the code's sign (BF16 and F16: also with its payload). */
DW_API dw_status dw_decode(dw_dtype dtype, int64_t count, const void *codes, float *values);

/* Packs four 6-bit codes into three bytes: code i has bits 6i..6i+5 of the stream, lowest bit first. `packed` has
 * (6 * count + 7) / 8 bytes; unused bits are 0. */
DW_API dw_status dw_fp6_pack(int64_t count, const uint8_t *codes, uint8_t *packed);
DW_API dw_status dw_fp6_unpack(int64_t count, const uint8_t *packed, uint8_t *codes);

/* ---- blocks ---------------------------------------------------------------------------------------- */

/* The rule that gives a block's scale from amax, its largest magnitude. M is the element format's largest number, and
 * 2^m <= M < 2^(m+1).
 *   RCEIL  2^e, e the smallest with amax <= M * 2^e: nothing saturates (MXFP8 recipe; PTX cvt.rp of amax / M)
 *   FLOOR  2^e, e = floor(log2(amax)) - m: amax up to 2^(m+1-e) saturates (OCP MX 6.3)
 *   CEIL   2^e, e = ceil(log2(amax)) - m: up to one binary digit less than RCEIL (torchao's "ceil")
 *   AMAX   amax / M rounded to the scale's own format: F32 in fp8-block (DeepSeek); in NVFP4
 *          (amax / 6) / tensor_scale, each quotient rounded to F32, then to UE4M3, nearest, saturating (NVFP4)
 *   DEFAULT  RCEIL for MX, AMAX for NVFP4 and fp8-block
 * MX supports RCEIL, FLOOR and CEIL, NVFP4 only AMAX, fp8-block all four. The scale of the first three is E8M0 with e
 * clamped to [-127, 127]; a zero block has e = -127.
 *
 * Elements always saturate. For an element x and the scale's value s they are
 *   E8M0 scales      x * 2^-e, which is exact wherever it matters
 *   fp8-block, AMAX  x / s rounded to F32, then to the format; s = 0 gives zeros
 *   NVFP4            x * r rounded to F32, then to the format; r = min((1 / tensor_scale) / s, FLT_MAX),
 *                    each quotient rounded to F32; s = 0 gives zeros
 * Zeros keep the sign of x.
 *
 * NaN and infinity. A NaN makes its block's scale NaN (E8M0 0xFF, UE4M3 0x7F, F32 0x7FC00000) and all its codes
 * positive NaNs (E4M3 and E5M2 0x7F, else the largest code). In a block with an infinity and no NaN the scale is e =
 * 127 with RCEIL, the rule's result for amax = 2^128 with FLOOR and CEIL, and 2^120 with AMAX of fp8-block.
 * Dequantizing then gives infinities back, and finite elements stay finite. NVFP4 has no scale large enough: its block
 * becomes NaN. */
typedef enum dw_scale_rule {
    DW_SCALE_DEFAULT,
    DW_SCALE_RCEIL,
    DW_SCALE_FLOOR,
    DW_SCALE_CEIL,
    DW_SCALE_AMAX
} dw_scale_rule;

/* A matrix [rows, cols] is divided into blocks along `axis`, the reduction axis of the GEMM that will read it. The
 * result is laid out for that GEMM, with the reduction axis last:
 *
 *     axis 1   outer = rows, inner = cols
 *     axis 0   outer = cols, inner = rows: codes and scales are those of the transposed matrix
 *     codes    [outer, inner], rows of dw_tensor_bytes(element, 1, &inner) bytes, or code_stride bytes apart
 *     scales   [outer, ceil(inner / block)]; square: [ceil(outer / block), ceil(inner / block)]
 *
 * If inner is not a multiple of the block, the last block is shorter, as if zeros followed. If code_stride leaves room,
 * the codes that complete this block are written as zeros. Nothing else after a row is written. To transpose, quantize
 * again along the other axis; only square blocks can be transposed as they are. */
typedef struct dw_block_options {
    size_t struct_size; /* sizeof(dw_block_options) */
    dw_scheme scheme;   /* with blocks: fp8-block, mxfp..., nvfp4; others: DW_UNSUPPORTED */
    dw_scale_rule scale_rule;
    int square; /* 1: one scale for block x block elements (fp8-block 128x128 and NVFP4 16x16, for weights) */
    int axis; /* 1 or 0 */
    dw_rounding rounding;
    dw_random random;   /* STOCHASTIC: element (i, k) of [outer, inner] uses word i * inner + k */
    float tensor_scale; /* NVFP4 only: a normal positive number, see dw_nvfp4_tensor_scale */
} dw_block_options;
#define DW_BLOCK_OPTIONS_DEFAULT                                                                   \
    {                                                                                              \
        sizeof(dw_block_options), DW_SCHEME_MXFP8, DW_SCALE_DEFAULT, 0, 1, DW_ROUND_NEAREST,       \
            {0, 0, 0}, 1.0f                                                                        \
    }

typedef struct dw_block_layout {
    int64_t outer, inner;
    int64_t block;     /* elements along inner that share a scale */
    int64_t row_bytes; /* of one row of codes, contiguous */
    int64_t scale_rows, scale_cols;
    size_t code_bytes, scale_bytes; /* of the whole arrays, contiguous */
    dw_dtype element;
    dw_dtype scale; /* E8M0, UE4M3 or F32 */
} dw_block_layout;
/* Computes the sizes of the result. DW_INVALID_ARGUMENT: an option or a size is invalid. */
DW_API dw_status dw_block_layout_of(const dw_block_options *options, int64_t rows, int64_t cols,
                                    dw_block_layout *layout);

/* `source`: F32 with row_stride elements from row to row (>= cols). `code_stride`: bytes from one row of codes to the
 * next; 0: contiguous. `scales`: contiguous bytes, or float if layout.scale is DW_F32. rows or cols may be 0.
 * DW_INVALID_ARGUMENT, DW_OUT_OF_MEMORY. */
DW_API dw_status dw_block_quantize(const dw_block_options *options, int64_t rows, int64_t cols,
                                   const float *source, int64_t row_stride, void *codes,
                                   int64_t code_stride, void *scales);
/* Restores [rows, cols] and its layout. An element becomes element * scale (NVFP4: (element * scale) * tensor_scale,
 * with an exact first product), rounded once to F32. */
DW_API dw_status dw_block_dequantize(const dw_block_options *options, int64_t rows, int64_t cols,
                                     const void *codes, int64_t code_stride, const void *scales,
                                     float *result, int64_t row_stride);

/* Finds the largest finite magnitude in a matrix; 0 if there is none. */
DW_API dw_status dw_amax(int64_t rows, int64_t cols, const float *source, int64_t row_stride,
                         float *amax);
/* Returns amax / (448 * 6), rounded to F32 and at least 2^-126; 1 if amax is 0 or not finite. */
DW_API float dw_nvfp4_tensor_scale(float amax);

/* ---- random Hadamard transform ------------------------------------------------------------------- */

/* Replaces each run x of `size` elements of a row by x D H / sqrt(size). H is the Hadamard matrix in Sylvester's order,
 * H[i][j] = (-1)^popcount(i & j). D is a diagonal of signs, the same for all runs: D[j] is -1 if bit j % 32 of word
 * j / 32 of `random` is set (words as for elements above). The inverse is x H D / sqrt(size). The transform is
 * orthogonal, so it changes a GEMM of transformed operands only by rounding (NVFP4, section on RHT: size 16 on the
 * inputs of weight gradients).
 *
 * `size` is 2, 4, ... 128, and cols must be a multiple of it. With axis 0 the runs go down the columns, and rows must
 * be a multiple. Sums are in F32 by radix-2 butterflies, stride 1 first, and then multiplied by 1 / sqrt(size) rounded
 * to F32. `result` may be `source`. */
typedef struct dw_hadamard_options {
    size_t struct_size; /* sizeof(dw_hadamard_options) */
    int size;           /* 16 */
    int axis;           /* 1 or 0 */
    int inverse;
    int random_signs; /* 0: D is the identity */
    dw_random random;
} dw_hadamard_options;
#define DW_HADAMARD_OPTIONS_DEFAULT                                                                \
    {                                                                                              \
        sizeof(dw_hadamard_options), 16, 1, 0, 1, { 0, 0, 0 }                                      \
    }
DW_API dw_status dw_hadamard(const dw_hadamard_options *options, int64_t rows, int64_t cols,
                             const float *source, int64_t row_stride, float *result,
                             int64_t result_stride);

/* ---- the order in which tensor cores read block scales ------------------------------------------ */

/* Arranges one-byte scales [rows, cols] in tiles of 128 x 4, each an atom of 512 bytes. Scale (r, c) of a tile is at
 * byte (r % 32) * 16 + (r / 32) * 4 + c (32 x 4 x 4). Tiles are in row-major order. Rows and columns that complete a
 * tile are 0. Sources: PTX, tcgen05.mma block scaling (the 32x128b.warpx4 copy reads an atom); cuBLAS, "Block scaling
 * factors layout". `repeat` above 1 is for square blocks: `rows` counts the operand's rows, the scales have ceil(rows /
 * repeat) rows, and row r of the scales serves the operand's rows r * repeat and following. Unswizzle reads the first
 * row of each block. */
DW_API int64_t dw_scales_swizzled_bytes(int64_t rows, int64_t cols); /* -1: negative or too large */
DW_API dw_status dw_scales_swizzle(int64_t rows, int64_t cols, int64_t repeat,
                                   const uint8_t *scales, uint8_t *swizzled);
DW_API dw_status dw_scales_unswizzle(int64_t rows, int64_t cols, int64_t repeat,
                                     const uint8_t *swizzled, uint8_t *scales);

#ifdef __cplusplus
}
#endif
#endif
