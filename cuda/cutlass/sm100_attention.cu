/* Attention forward on Blackwell from CUTLASS's example 77, whose headers NVIDIA's package contains beside CUTLASS's
 * own.
 */
#include "launch.cuh"

#include "collective/fmha_fusion.hpp"
#include "collective/sm100_fmha_fwd_epilogue_tma_warpspecialized.hpp"
#include "collective/sm100_fmha_fwd_mainloop_tma_warpspecialized.hpp"
#include "device/fmha.hpp"
#include "kernel/fmha_options.hpp"
#include "kernel/fmha_tile_scheduler.hpp"
#include "kernel/sm100_fmha_fwd_kernel_tma_warpspecialized.hpp"

namespace deepwell {
namespace {

using namespace cute;
using Element = cutlass::bfloat16_t;

template <class Tile, class Mask> struct attention {
    using Problem = cute::tuple<int, int, int, cute::tuple<cute::tuple<int, int>, int>>;
    using StrideQ = cute::tuple<int, _1, cute::tuple<cute::tuple<int, int>, int>>;
    using StrideK = cute::tuple<int, _1, cute::tuple<cute::tuple<_0, int>, int>>;
    using StrideLse = cute::tuple<_1, cute::tuple<cute::tuple<int, int>, int>>;
    using Mainloop = cutlass::fmha::collective::Sm100FmhaFwdMainloopTmaWarpspecialized<
        Element, float, float, Tile, StrideQ, StrideK, StrideK, Mask>;
    using Operation =
        cutlass::fmha::device::FMHA<cutlass::fmha::kernel::Sm100FmhaFwdKernelTmaWarpspecialized<
            Problem, Mainloop,
            cutlass::fmha::collective::Sm100FmhaFwdEpilogueTmaWarpspecialized<
                Element, float, typename Mainloop::TileShapePV, StrideQ, StrideLse>,
            cutlass::fmha::kernel::PersistentTileScheduler>>;

    static dw_cutlass_result prepare(const dw_cutlass_attention &call,
                                     typename Operation::Arguments *made) {
        cutlass::KernelHardwareInfo info;
        const dw_cutlass_result result = hardware(&info, call.processors);
        if (result != DW_CUTLASS_OK) return result;
        const int group = call.heads / call.heads_kv, d = call.head_dim;
        const StrideQ q{static_cast<int>(call.q_stride), _1{},
                        cute::make_tuple(cute::make_tuple(d, group * d),
                                         static_cast<int>(call.q_batch_stride))};
        const StrideQ o{static_cast<int>(call.o_stride), _1{},
                        cute::make_tuple(cute::make_tuple(d, group * d),
                                         static_cast<int>(call.o_batch_stride))};
        const StrideK kv{static_cast<int>(call.kv_stride), _1{},
                         cute::make_tuple(cute::make_tuple(_0{}, d),
                                          static_cast<int>(call.kv_batch_stride))};
        const StrideLse lse{
            _1{}, cute::make_tuple(cute::make_tuple(call.queries, call.queries * group),
                                   call.queries * call.heads)};
        *made = {{call.queries, call.keys, d,
                  cute::make_tuple(cute::make_tuple(group, call.heads_kv), call.batch)},
                 {{static_cast<const Element *>(call.q), q, static_cast<const Element *>(call.k), kv,
                   static_cast<const Element *>(call.v), kv},
                  call.scale},
                 {static_cast<Element *>(call.o), o, call.lse, lse},
                 info};
        return DW_CUTLASS_OK;
    }
    static dw_cutlass_result run(const dw_cutlass_attention &call, void *workspace, void *stream) {
        typename Operation::Arguments arguments;
        const dw_cutlass_result result = prepare(call, &arguments);
        return result == DW_CUTLASS_OK ? launch<Operation>(arguments, workspace, stream) : result;
    }
};

dw_cutlass_result check(const dw_cutlass_attention &call) {
    if (call.size_of != sizeof call)
        return refuse(DW_CUTLASS_REFUSED, "attention of %zu bytes: expected %zu", call.size_of,
                      sizeof call);
    if (call.head_dim != 64 && call.head_dim != 128)
        return refuse(DW_CUTLASS_REFUSED, "head dimension %d: 64 or 128", call.head_dim);
    if (call.batch < 1 || call.queries < 1 || call.keys < 1 || call.heads < 1 || call.heads_kv < 1 ||
        call.heads % call.heads_kv)
        return refuse(DW_CUTLASS_REFUSED,
                      "batch %d, queries %d, keys %d, heads %d of %d: 1 or more, and as many heads "
                      "for each of keys and values",
                      call.batch, call.queries, call.keys, call.heads, call.heads_kv);
    if (call.causal && call.queries != call.keys)
        return refuse(DW_CUTLASS_REFUSED, "causal attention of %d queries to %d keys: as many",
                      call.queries, call.keys);
    if (static_cast<double>(call.batch) * call.heads * call.queries > INT32_MAX)
        return refuse(DW_CUTLASS_REFUSED, "%d batches of %d heads of %d queries: below 2^31 in all",
                      call.batch, call.heads, call.queries);
    if (!(call.scale > 0)) return refuse(DW_CUTLASS_REFUSED, "scale %g: above 0", call.scale);
    const int64_t strides[] = {call.q_stride,       call.kv_stride,       call.o_stride,
                               call.q_batch_stride, call.kv_batch_stride, call.o_batch_stride};
    for (int64_t stride : strides)
        if (stride % 8 || stride < 0 || stride > INT32_MAX)
            return refuse(DW_CUTLASS_REFUSED, "stride %lld: a multiple of 8 below 2^31",
                          (long long)stride);
    return DW_CUTLASS_OK;
}

dw_cutlass_result workspace_bytes(const void *given, size_t *bytes) {
    *bytes = 0;
    return check(*static_cast<const dw_cutlass_attention *>(given));
}
dw_cutlass_result run(const void *given, void *workspace, void *stream) {
    using cutlass::fmha::collective::CausalMask;
    using cutlass::fmha::collective::ResidualMask;
    const auto &call = *static_cast<const dw_cutlass_attention *>(given);
    const dw_cutlass_result result = check(call);
    if (result != DW_CUTLASS_OK) return result;
    using wide = Shape<_256, _128, _128>;
    using narrow = Shape<_256, _128, _64>;
    if (call.causal)
        return (call.head_dim == 64 ? attention<narrow, CausalMask<true>>::run
                                    : attention<wide, CausalMask<true>>::run)(call, workspace, stream);
    return (call.head_dim == 64 ? attention<narrow, ResidualMask>::run
                                : attention<wide, ResidualMask>::run)(call, workspace, stream);
}

} // namespace

const dw_cutlass_kernel sm100_attention[] = {
    {"cutlass.sm100.attention.bf16", DW_CUTLASS_ATTENTION, DW_SCHEME_BF16, 100,
     "two tiles of 128 queries, 128 keys a step; head dimensions 64 and 128; causal or not",
     ON_EMULATOR_ONLY, workspace_bytes, run},
    {},
};

} // namespace deepwell
