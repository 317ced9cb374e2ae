// The check of the offsets of groups of rows, for kernels that read them from device memory.
#ifndef DW_GROUP_OFFSETS_CUH
#define DW_GROUP_OFFSETS_CUH

#include "data_error.h"

// Reports offsets that do not ascend from 0 to `rows`. Called by all blocks; the first one checks.
static __device__ __forceinline__ void check_offsets(const int *offsets, long long step, long long groups, long long rows,
                                                     dw_data_error error) {
    if (blockIdx.x > 0) return;
    for (long long group = threadIdx.x; group <= groups; group += blockDim.x) {
        const long long at = offsets[group * step], before = group > 0 ? offsets[(group - 1) * step] : 0;
        const bool valid = group == 0 ? at == 0 : at >= before;
        if (!valid || (group == groups && at != rows)) report(error, DW_DATA_INDEX);
    }
}

#endif
