// What the epilogues of GEMMs share: activations, and chunks of rows that may end. Define: ACTIVATION
// (sm100/gemm_params.h).
#ifndef DW_EPILOGUE_PARTS_CUH
#define DW_EPILOGUE_PARTS_CUH

#include "activation.cuh"
#include "sm100/gemm_params.h"
#include "sm90.cuh"

DEVICE float silu(float x) { return x * logistic(-LOG2_E * x); }

// For D in F32 the errors are those of erff and of an exponential.
DEVICE float activate(float x) {
    if constexpr (ACTIVATION == DW_GEMM_GELU) {
        if constexpr (OUTPUT == DW_GEMM_OUTPUT_F32) return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
        float density;
        return x * normal_cdf(x, &density);
    }
    if constexpr (ACTIVATION == DW_GEMM_GELU_TANH) return x * gelu_tanh_share(x);
    return x;
}

// Loads or stores the 16 bytes of eight elements of a row, of which the first `count` exist. A chunk that is incomplete
// is rare, and loops keep it from taking registers of the usual case.
DEVICE void load_row_chunk(const uint16 *line, int count, uint32 *words) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (count >= 8) v = *(const uint4 *)line;
    else
#pragma unroll 1
        for (int i = count - 1; i >= 0; i--) {
            v.w = __funnelshift_l(v.z, v.w, 16), v.z = __funnelshift_l(v.y, v.z, 16);
            v.y = __funnelshift_l(v.x, v.y, 16), v.x = v.x << 16 | line[i];
        }
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}
DEVICE void store_row_chunk(uint16 *line, int count, const uint32 *words) {
    uint4 v = make_uint4(words[0], words[1], words[2], words[3]);
    if (count >= 8) *(uint4 *)line = v;
    else
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            line[i] = (uint16)v.x;
            v.x = __funnelshift_r(v.x, v.y, 16), v.y = __funnelshift_r(v.y, v.z, 16);
            v.z = __funnelshift_r(v.z, v.w, 16), v.w >>= 16;
        }
}

// Loads 16 bytes, or zeros, and stores them or nothing, without a branch, which would keep instructions behind it back.
DEVICE void load16_if(bool exists, const void *from, uint32 *words) {
    words[0] = words[1] = words[2] = words[3] = 0;
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
                 : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
                 : "l"((uint64)__cvta_generic_to_global(from)), "r"((uint32)exists)
                 : "memory");
}
DEVICE void store16_if(bool exists, void *to, const uint32 *words) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(
                     (uint64)__cvta_generic_to_global(to)),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"((uint32)exists)
                 : "memory");
}

#endif
