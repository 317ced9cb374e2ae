/* BF16 GEMMs on Blackwell: tcgen05 by pairs of blocks. Clusters are chosen at launch: a preferred shape, and a
 * fallback where that does not fit.
 */
#include "dense_gemm.cuh"

namespace deepwell {
namespace {

using Tile = Shape<_256, _128, _64>;
using Cluster = Shape<int, int, _1>;

using Out = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Row, ALIGNED, Element,
    Row, ALIGNED, cutlass::epilogue::TmaWarpSpecialized2Sm>::CollectiveOp;
using In = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Element, Row, ALIGNED, Element, Column,
    ALIGNED, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(Out::SharedStorage))>,
    cutlass::gemm::KernelTmaWarpSpecialized2SmSm100>::CollectiveOp;

/* Scheduler: void means cluster launch control. */
template <class Scheduler> struct dense_gemm {
    using Kernel =
        cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, In, Out, Scheduler>;
    using Operation = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    static dw_cutlass_result prepare(const void *given, typename Operation::Arguments *made) {
        const auto &call = *static_cast<const dw_cutlass_gemm *>(given);
        cutlass::KernelHardwareInfo info;
        dw_cutlass_result result = check_gemm(call);
        if (result == DW_CUTLASS_OK) result = hardware(&info, call.processors);
        if (result == DW_CUTLASS_OK) result = check_cluster(call, &info);
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

using control = dense_gemm<void>;
using stream_k = dense_gemm<cutlass::gemm::StreamKScheduler>;

} // namespace

const dw_cutlass_kernel sm100_dense[] = {
    {"cutlass.sm100.bf16.control", DW_CUTLASS_GEMM, DW_SCHEME_BF16, 100,
     "tiles of 256 x 128 by pairs of blocks; a preferred cluster; cluster launch control",
     ON_EMULATOR_ONLY, control::workspace_bytes, control::run},
    {"cutlass.sm100.bf16.stream_k", DW_CUTLASS_GEMM, DW_SCHEME_BF16, 100,
     "tiles of 256 x 128 by pairs of blocks; a preferred cluster; stream-K", ON_EMULATOR_ONLY,
     stream_k::workspace_bytes, stream_k::run},
    {},
};

} // namespace deepwell
