/* The common part of the provider's kernels: errors, and the steps from arguments to a launch. */
#pragma once

#include "provider.h"

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass/numeric_types.h"

namespace deepwell {

/* Stores the message for deepwell_cutlass_error(). */
dw_cutlass_result refuse(dw_cutlass_result result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The kernels of each source; an entry without a name ends the list. */
extern const dw_cutlass_kernel sm90_dense[], sm100_dense[], sm100_scaled[], sm100_grouped[],
    sm100_attention[];

inline dw_cutlass_result check_gemm(const dw_cutlass_gemm &call) {
    if (call.size_of != sizeof call)
        return refuse(DW_CUTLASS_REFUSED, "a GEMM of %zu bytes: expected %zu", call.size_of,
                      sizeof call);
    if (call.m < 1 || call.n < 1 || call.k < 1 || call.m > INT32_MAX || call.n > INT32_MAX ||
        call.k > INT32_MAX)
        return refuse(DW_CUTLASS_REFUSED, "a GEMM of %lld x %lld x %lld: 1 to 2^31 - 1 each",
                      (long long)call.m, (long long)call.n, (long long)call.k);
    if (call.beta != 0 && !call.c)
        return refuse(DW_CUTLASS_REFUSED, "beta is %g and there is no C", call.beta);
    return DW_CUTLASS_OK;
}

/* `processors`: the most SMs to use, or 0. */
inline dw_cutlass_result hardware(cutlass::KernelHardwareInfo *info, int32_t processors = 0) {
    cudaError_t error = cudaGetDevice(&info->device_id);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&info->sm_count, cudaDevAttrMultiProcessorCount,
                                       info->device_id);
    if (error != cudaSuccess) return refuse(DW_CUTLASS_FAILED, "%s", cudaGetErrorString(error));
    if (processors > 0 && processors < info->sm_count) info->sm_count = processors;
    return DW_CUTLASS_OK;
}

/* The status of every kernel for Blackwell, as users see it. */
#define ON_EMULATOR_ONLY "proven on the emulator, not run on hardware"

/* Sets the preferred cluster, and a pair of blocks as the fallback. */
inline dw_cutlass_result check_cluster(const dw_cutlass_gemm &call,
                                       cutlass::KernelHardwareInfo *info) {
    const int along_m = call.cluster[0] ? call.cluster[0] : 4,
              along_n = call.cluster[1] ? call.cluster[1] : 2;
    if (along_m < 2 || along_n < 1 || along_m % 2 || along_m > 16 || along_n > 16 / along_m)
        return refuse(DW_CUTLASS_REFUSED,
                      "a cluster of %d x %d blocks: an even number along m, at most 16 together",
                      call.cluster[0], call.cluster[1]);
    info->cluster_shape = dim3(static_cast<unsigned>(along_m), static_cast<unsigned>(along_n), 1);
    info->cluster_shape_fallback = dim3(2, 1, 1);
    return DW_CUTLASS_OK;
}

template <class Operation>
dw_cutlass_result accepts(const typename Operation::Arguments &arguments) {
    if (Operation::can_implement(arguments) == cutlass::Status::kSuccess) return DW_CUTLASS_OK;
    return refuse(DW_CUTLASS_REFUSED,
                  "the kernel does not take these sizes: rows begin at multiples of 16 bytes, and "
                  "the contiguous axes of A, B and D are such multiples long");
}

/* Operation: a GemmUniversalAdapter or a class with its interface. */
template <class Operation>
dw_cutlass_result launch(const typename Operation::Arguments &arguments, void *workspace,
                         void *stream) {
    Operation operation;
    dw_cutlass_result result = accepts<Operation>(arguments);
    if (result != DW_CUTLASS_OK) return result;
    cutlass::Status status =
        operation.initialize(arguments, workspace, static_cast<cudaStream_t>(stream));
    if (status == cutlass::Status::kSuccess)
        status = operation.run(static_cast<cudaStream_t>(stream));
    if (status == cutlass::Status::kSuccess) return DW_CUTLASS_OK;
    const cudaError_t error = cudaGetLastError();
    return refuse(DW_CUTLASS_FAILED, "%s; the runtime: %s", cutlassGetStatusString(status),
                  cudaGetErrorString(error));
}

/* List entries of a GEMM: its Operation, and arguments of a call from prepare(call, &arguments). */
template <class Gemm> dw_cutlass_result workspace_of(const void *call, size_t *bytes) {
    typename Gemm::Operation::Arguments arguments;
    const dw_cutlass_result result = Gemm::prepare(call, &arguments);
    if (result == DW_CUTLASS_OK) *bytes = Gemm::Operation::get_workspace_size(arguments);
    return result;
}
template <class Gemm> dw_cutlass_result run_of(const void *call, void *workspace, void *stream) {
    using Operation = typename Gemm::Operation;
    typename Operation::Arguments arguments;
    const dw_cutlass_result result = Gemm::prepare(call, &arguments);
    return result == DW_CUTLASS_OK ? launch<Operation>(arguments, workspace, stream) : result;
}

} // namespace deepwell
