/* Grouped GEMM for mixtures of experts: groups with different numbers of rows in one launch, BF16 on Blackwell. */
#include "launch.cuh"

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include <memory>
#include <new>

namespace deepwell {
namespace {

using namespace cute;
using Element = cutlass::bfloat16_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
constexpr int ALIGNED = 8; /* elements: 16 bytes */
using Tile = Shape<_128, _128, _64>;
using Cluster = Shape<_1, _1, _1>;
using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;

using Out = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row *, ALIGNED, Element, Row *,
    ALIGNED, cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm>::CollectiveOp;
using In = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Element, Row *, ALIGNED, Element, Column *,
    ALIGNED, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(Out::SharedStorage))>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmSm100>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, In, Out>;
using Operation = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
using StrideA = Kernel::InternalStrideA;
using StrideB = Kernel::InternalStrideB;
using StrideD = Kernel::InternalStrideD;

/* Arrays that the kernel reads for each group, at the start of the workspace on the GPU, one after the other. */
struct layout {
    size_t shapes, a, b, d, a_stride, b_stride, d_stride, end;
    explicit layout(size_t groups) {
        size_t at = 0;
        auto next = [&](size_t each) {
            const size_t begin = at;
            at = (at + each * groups + 255) / 256 * 256;
            return begin;
        };
        shapes = next(sizeof(Problem::UnderlyingProblemShape));
        a = next(sizeof(void *)), b = next(sizeof(void *)), d = next(sizeof(void *));
        a_stride = next(sizeof(StrideA)), b_stride = next(sizeof(StrideB));
        d_stride = next(sizeof(StrideD));
        end = at;
    }
};

dw_cutlass_result check(const dw_cutlass_grouped &call) {
    if (call.size_of != sizeof call)
        return refuse(DW_CUTLASS_REFUSED, "grouped GEMMs of %zu bytes: expected %zu",
                      call.size_of, sizeof call);
    if (call.groups < 1 || call.n < 1 || call.k < 1 || call.n > INT32_MAX || call.k > INT32_MAX)
        return refuse(DW_CUTLASS_REFUSED, "%d groups of n %lld and k %lld: 1 or more each",
                      call.groups, (long long)call.n, (long long)call.k);
    if (call.n % ALIGNED || call.k % ALIGNED || call.a_stride % ALIGNED || call.b_stride % ALIGNED ||
        call.d_stride % ALIGNED)
        return refuse(DW_CUTLASS_REFUSED, "n %lld, k %lld, strides %lld, %lld, %lld: multiples of 8",
                      (long long)call.n, (long long)call.k, (long long)call.a_stride,
                      (long long)call.b_stride, (long long)call.d_stride);
    for (int32_t g = 0; g < call.groups; g++)
        if (call.m[g] < 0 || call.m[g] > INT32_MAX)
            return refuse(DW_CUTLASS_REFUSED, "group %d has %lld rows", g, (long long)call.m[g]);
    return DW_CUTLASS_OK;
}

/* `base`: the workspace on the GPU, or NULL to compute sizes. */
dw_cutlass_result prepare(const dw_cutlass_grouped &call, unsigned char *base,
                          Operation::Arguments *made) {
    const layout at(static_cast<size_t>(call.groups));
    cutlass::KernelHardwareInfo info;
    const dw_cutlass_result result = hardware(&info, call.processors);
    if (result != DW_CUTLASS_OK) return result;
    info.cluster_shape = dim3(1, 1, 1), info.cluster_shape_fallback = dim3(1, 1, 1);
    decltype(made->epilogue.thread) scaled{};
    scaled.alpha = call.alpha, scaled.beta = 0;
    *made = {cutlass::gemm::GemmUniversalMode::kGrouped,
             {call.groups,
              reinterpret_cast<Problem::UnderlyingProblemShape *>(base + at.shapes), nullptr},
             {reinterpret_cast<const Element **>(base + at.a),
              reinterpret_cast<StrideA *>(base + at.a_stride),
              reinterpret_cast<const Element **>(base + at.b),
              reinterpret_cast<StrideB *>(base + at.b_stride)},
             {scaled, nullptr, nullptr, reinterpret_cast<Element **>(base + at.d),
              reinterpret_cast<StrideD *>(base + at.d_stride)},
             info};
    return DW_CUTLASS_OK;
}

dw_cutlass_result workspace_bytes(const void *given, size_t *bytes) {
    const auto &call = *static_cast<const dw_cutlass_grouped *>(given);
    Operation::Arguments arguments;
    dw_cutlass_result result = check(call);
    if (result == DW_CUTLASS_OK) result = prepare(call, nullptr, &arguments);
    if (result == DW_CUTLASS_OK)
        *bytes = layout(static_cast<size_t>(call.groups)).end +
                 Operation::get_workspace_size(arguments);
    return result;
}

dw_cutlass_result run(const void *given, void *workspace, void *stream) {
    const auto &call = *static_cast<const dw_cutlass_grouped *>(given);
    Operation::Arguments arguments;
    dw_cutlass_result result = check(call);
    if (result != DW_CUTLASS_OK) return result;
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capturing);
    if (error != cudaSuccess) return refuse(DW_CUTLASS_FAILED, "%s", cudaGetErrorString(error));
    if (capturing != cudaStreamCaptureStatusNone)
        return refuse(DW_CUTLASS_REFUSED, "the stream is being captured, and a graph would copy the "
                                          "groups from memory that is gone when it runs");
    const size_t groups = static_cast<size_t>(call.groups);
    const layout at(groups);
    const std::unique_ptr<unsigned char[]> host(new (std::nothrow) unsigned char[at.end]);
    if (!host) return refuse(DW_CUTLASS_FAILED, "no memory for %d groups", call.groups);
    auto *base = static_cast<unsigned char *>(workspace);
    for (size_t g = 0; g < groups; g++) {
        reinterpret_cast<Problem::UnderlyingProblemShape *>(host.get() + at.shapes)[g] =
            cute::make_shape(static_cast<int>(call.m[g]), static_cast<int>(call.n),
                             static_cast<int>(call.k));
        reinterpret_cast<const void **>(host.get() + at.a)[g] = call.a[g];
        reinterpret_cast<const void **>(host.get() + at.b)[g] = call.b[g];
        reinterpret_cast<void **>(host.get() + at.d)[g] = call.d[g];
        reinterpret_cast<StrideA *>(host.get() + at.a_stride)[g] = StrideA{call.a_stride, _1{}, _0{}};
        reinterpret_cast<StrideB *>(host.get() + at.b_stride)[g] = StrideB{call.b_stride, _1{}, _0{}};
        reinterpret_cast<StrideD *>(host.get() + at.d_stride)[g] = StrideD{call.d_stride, _1{}, _0{}};
    }
    /* For pageable memory, the copy is complete or staged when the call returns. */
    error = cudaMemcpyAsync(base, host.get(), at.end, cudaMemcpyHostToDevice,
                            static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return refuse(DW_CUTLASS_FAILED, "%s", cudaGetErrorString(error));
    result = prepare(call, base, &arguments);
    return result == DW_CUTLASS_OK ? launch<Operation>(arguments, base + at.end, stream) : result;
}

} // namespace

const dw_cutlass_kernel sm100_grouped[] = {
    {"cutlass.sm100.grouped.bf16", DW_CUTLASS_GROUPED, DW_SCHEME_BF16, 100,
     "tiles of 128 x 128; groups of any rows", ON_EMULATOR_ONLY, workspace_bytes, run},
    {},
};

} // namespace deepwell
