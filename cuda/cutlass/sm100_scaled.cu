/* Block-scaled GEMMs on Blackwell, MXFP8 and NVFP4, with BF16 output. */
#include "launch.cuh"

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace deepwell {
namespace {

using namespace cute;
using Element = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
constexpr int ALIGNED = 8; /* elements of C and D: 16 bytes */
using Cluster = Shape<int, int, _1>;

/* The workspace starts with the product of alpha and its factors, if these are on the GPU. */
constexpr size_t ALPHA_BYTES = 256;

__global__ void multiply_alpha(float *made, float alpha, const float *a, const float *b) {
    *made = alpha * (a ? *a : 1.f) * (b ? *b : 1.f);
}

/* Pair: CUTLASS's name of elements with their scales; aligned: elements in 16 bytes. */
template <class Pair, int aligned, class Tile, class Schedule> struct scaled_gemm {
    using Out = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Row, ALIGNED,
        Element, Row, ALIGNED, cutlass::epilogue::TmaWarpSpecialized2Sm>::CollectiveOp;
    using In = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Pair, Row, aligned, Pair,
        Column, aligned, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
            sizeof(typename Out::SharedStorage))>,
        Schedule>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, In, Out, void>;
    using Operation = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
    using Scales = typename Kernel::CollectiveMainloop::Sm1xxBlkScaledConfig;
    using Data = typename Pair::DataType;
    using Scale = typename Pair::ScaleFactorType;

    static dw_cutlass_result prepare(const void *given, typename Operation::Arguments *made) {
        const auto &call = *static_cast<const dw_cutlass_gemm *>(given);
        cutlass::KernelHardwareInfo info;
        dw_cutlass_result result = check_gemm(call);
        if (result == DW_CUTLASS_OK) result = hardware(&info, call.processors);
        if (result == DW_CUTLASS_OK) result = check_cluster(call, &info);
        if (result != DW_CUTLASS_OK) return result;
        const auto *c = static_cast<const Element *>(call.c ? call.c : call.d);
        const int64_t c_stride = call.c ? call.c_stride : call.d_stride;
        const int m = static_cast<int>(call.m), n = static_cast<int>(call.n),
                  k = static_cast<int>(call.k);
        const auto shape = cute::make_shape(m, n, k, 1);
        *made = {cutlass::gemm::GemmUniversalMode::kGemm,
                 {m, n, k, 1},
                 {static_cast<const Data *>(call.a),
                  {call.a_stride, _1{}, 0},
                  static_cast<const Data *>(call.b),
                  {call.b_stride, _1{}, 0},
                  static_cast<const Scale *>(call.a_scales),
                  Scales::tile_atom_to_shape_SFA(shape),
                  static_cast<const Scale *>(call.b_scales),
                  Scales::tile_atom_to_shape_SFB(shape)},
                 {{call.alpha, call.beta},
                  c,
                  {c_stride, _1{}, 0},
                  static_cast<Element *>(call.d),
                  {call.d_stride, _1{}, 0}},
                 info};
        return DW_CUTLASS_OK;
    }
    static dw_cutlass_result workspace_bytes(const void *call, size_t *bytes) {
        const dw_cutlass_result result = workspace_of<scaled_gemm>(call, bytes);
        if (result == DW_CUTLASS_OK) *bytes += ALPHA_BYTES;
        return result;
    }
    static dw_cutlass_result run(const void *given, void *workspace, void *stream) {
        const auto &call = *static_cast<const dw_cutlass_gemm *>(given);
        typename Operation::Arguments arguments;
        dw_cutlass_result result = prepare(given, &arguments);
        if (result == DW_CUTLASS_OK) result = accepts<Operation>(arguments);
        if (result != DW_CUTLASS_OK) return result;
        if (!call.a_scales || !call.b_scales)
            return refuse(DW_CUTLASS_REFUSED, "a block-scaled GEMM without scales");
        if (call.a_factor || call.b_factor) {
            auto *alpha = static_cast<float *>(workspace);
            multiply_alpha<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
                alpha, call.alpha, call.a_factor, call.b_factor);
            const cudaError_t error = cudaGetLastError();
            if (error != cudaSuccess)
                return refuse(DW_CUTLASS_FAILED, "%s", cudaGetErrorString(error));
            arguments.epilogue.thread.alpha_ptr = alpha;
        }
        return launch<Operation>(arguments, static_cast<char *>(workspace) + ALPHA_BYTES, stream);
    }
};

using mxfp8 = scaled_gemm<cutlass::mx_float8_t<cutlass::float_e4m3_t>, 16, Shape<_256, _128, _128>,
                      cutlass::gemm::KernelTmaWarpSpecialized2SmMxf8f6f4Sm100>;
using nvfp4 = scaled_gemm<cutlass::nv_float4_t<cutlass::float_e2m1_t>, 32, Shape<_256, _128, _256>,
                      cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100>;

} // namespace

const dw_cutlass_kernel sm100_scaled[] = {
    {"cutlass.sm100.mxfp8", DW_CUTLASS_GEMM, DW_SCHEME_MXFP8, 100,
     "tiles of 256 x 128 by pairs of blocks; a preferred cluster; cluster launch control",
     ON_EMULATOR_ONLY, mxfp8::workspace_bytes, mxfp8::run},
    {"cutlass.sm100.nvfp4", DW_CUTLASS_GEMM, DW_SCHEME_NVFP4, 100,
     "tiles of 256 x 128 by pairs of blocks; a preferred cluster; cluster launch control",
     ON_EMULATOR_ONLY, nvfp4::workspace_bytes, nvfp4::run},
    {},
};

} // namespace deepwell
