/* The common part of the BF16 GEMMs for all architectures: D = alpha A B^T + beta C, rows contiguous. */
#pragma once

#include "launch.cuh"

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace deepwell {

using namespace cute;
using Element = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
constexpr int ALIGNED = 8; /* elements: 16 bytes */

template <class Operation>
typename Operation::Arguments dense_arguments(const dw_cutlass_gemm &call,
                                              const cutlass::KernelHardwareInfo &info) {
    const auto *c = static_cast<const Element *>(call.c ? call.c : call.d);
    const int64_t c_stride = call.c ? call.c_stride : call.d_stride;
    return {cutlass::gemm::GemmUniversalMode::kGemm,
            {static_cast<int>(call.m), static_cast<int>(call.n), static_cast<int>(call.k), 1},
            {static_cast<const Element *>(call.a),
             {call.a_stride, _1{}, 0},
             static_cast<const Element *>(call.b),
             {call.b_stride, _1{}, 0}},
            {{call.alpha, call.beta},
             c,
             {c_stride, _1{}, 0},
             static_cast<Element *>(call.d),
             {call.d_stride, _1{}, 0}},
            info};
}

} // namespace deepwell
