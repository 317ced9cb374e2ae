// wgmma of FP8 codes on Hopper (PTX ISA, "wgmma.mma_async"), for sm90_gemm.cu.
//
// The tensor cores add 32 products and the old accumulator to 14 bits, truncated (docs/gemm.md). The error of a long
// sum therefore grows with its length, unless sums of a stage, 128 products, are added to others in F32 registers.
//
// Defines: CODES_A, CODES_B (1 for E4M3, 2 for E5M2).
#ifndef DW_SM90_CODES_CUH
#define DW_SM90_CODES_CUH

#if CODES_A == 1
#define DW_CODE_A "e4m3"
#else
#define DW_CODE_A "e5m2"
#endif
#if CODES_B == 1
#define DW_CODE_B "e4m3"
#else
#define DW_CODE_B "e5m2"
#endif

// wgmma_codes_N(d, a, b, accumulate): d (64 x N) = or += A (64 x 32) B (32 x N), both in shared memory along the
// contraction.
#define DW_DEFINE_WGMMA_CODES(N, P0, P1, P2)                                                                           \
    DEVICE void wgmma_codes_##N(float *d, uint64 a, uint64 b, int accumulate) {                                        \
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " P2 ", 0;\n\t"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." DW_CODE_A "." DW_CODE_B " {" DW_REGS_N##N       \
                     "}, " P0 ", " P1 ", p, 1, 1;\n\t}"                                                                \
                     : DW_ACCS_N##N(d)                                                                                 \
                     : "l"(a), "l"(b), "r"(accumulate));                                                               \
    }

DW_DEFINE_WGMMA_CODES(128, "%64", "%65", "%66")
DW_DEFINE_WGMMA_CODES(256, "%128", "%129", "%130")

// Tiles of other widths have no codes, but kernels without codes instantiate this, too.
template <int N> DEVICE void wgmma_codes(float *d, uint64 a, uint64 b, int accumulate) {
    static_assert(!CODES || N == 128 || N == 256, "no wgmma of this width");
    if constexpr (N == 128) wgmma_codes_128(d, a, b, accumulate);
    if constexpr (N == 256) wgmma_codes_256(d, a, b, accumulate);
}

#endif
