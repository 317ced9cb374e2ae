/* BF16 GEMMs on Hopper: wgmma fed by TMA, specialized warps, persistent blocks. */
#include "dense_gemm.cuh"

namespace deepwell {
namespace {

template <class Tile, class Mainloop, class Epilogue> struct dense_gemm {
    using Cluster = Shape<_2, _1, _1>;
    using Out = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Row, ALIGNED,
        Element, Row, ALIGNED, Epilogue>::CollectiveOp;
    using In = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, ALIGNED, Element, Column,
        ALIGNED, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
            sizeof(typename Out::SharedStorage))>,
        Mainloop>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, In, Out,
                                                        cutlass::gemm::PersistentScheduler>;
    using Operation = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    static dw_cutlass_result prepare(const void *given, typename Operation::Arguments *made) {
        const auto &call = *static_cast<const dw_cutlass_gemm *>(given);
        cutlass::KernelHardwareInfo info;
        dw_cutlass_result result = check_gemm(call);
        if (result == DW_CUTLASS_OK) result = hardware(&info, call.processors);
        if (result != DW_CUTLASS_OK) return result;
        *made = dense_arguments<Operation>(call, info);
        return DW_CUTLASS_OK;
    }
    static dw_cutlass_result workspace_bytes(const void *call, size_t *bytes) {
        return workspace_of<dense_gemm>(call, bytes);
    }
    static dw_cutlass_result run(const void *call, void *workspace, void *stream) {
        return run_of<dense_gemm>(call, workspace, stream);
    }
};

using cooperative =
    dense_gemm<Shape<_128, _256, _64>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
            cutlass::epilogue::TmaWarpSpecializedCooperative>;
using pingpong = dense_gemm<Shape<_64, _256, _64>, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                         cutlass::epilogue::TmaWarpSpecialized>;

} // namespace

const dw_cutlass_kernel sm90_dense[] = {
    {"cutlass.sm90.bf16.cooperative", DW_CUTLASS_GEMM, DW_SCHEME_BF16, 90,
     "tiles of 128 x 256, two groups of warps on one; clusters of 2 x 1",
     "tested and measured on an H200", cooperative::workspace_bytes, cooperative::run},
    {"cutlass.sm90.bf16.pingpong", DW_CUTLASS_GEMM, DW_SCHEME_BF16, 90,
     "tiles of 64 x 256, one for each of two groups of warps; clusters of 2 x 1",
     "tested and measured on an H200", pingpong::workspace_bytes, pingpong::run},
    {},
};

} // namespace deepwell
