/* Clusters of two blocks: each loads its part of a matrix by TMA, with a swizzle, reads its neighbour's shared memory
 * and stores the sum by TMA. The program gets the entry point for tensor maps from the runtime, as most programs do.
 */
#include <cooperative_groups.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>

enum { ROWS = 8, COLUMNS = 32, TILES = 6 }; /* a tile is 8 rows of 128 bytes */

static __global__ __cluster_dims__(2, 1,
                                   1) void neighbours(const __grid_constant__ CUtensorMap in,
                                                      const __grid_constant__ CUtensorMap out) {
    __shared__ alignas(1024) float tile[ROWS * COLUMNS];
    __shared__ alignas(128) float sum[ROWS * COLUMNS];
    __shared__ alignas(8) uint64_t barrier;
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    const unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
    const int row = blockIdx.x * ROWS;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at),
                     "r"((unsigned)sizeof tile)
                     : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3}], [%4];" ::"r"((unsigned)__cvta_generic_to_shared(tile)),
                     "l"(&in), "r"(0), "r"(row), "r"(at)
                     : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; "
                     "selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at)
                     : "memory");
    cluster.sync();
    const float *other = cluster.map_shared_rank(tile, cluster.block_rank() ^ 1);
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        /* Swizzle of 16-byte units by row. */
        const int swizzled = r * COLUMNS + ((c / 4) ^ r) * 4 + c % 4;
        sum[i] = tile[swizzled] + 2 * other[swizzled];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    cluster.sync();
    if (threadIdx.x == 0) {
        asm volatile(
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
                &out),
            "r"(0), "r"(row), "r"((unsigned)__cvta_generic_to_shared(sum))
            : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static CUtensorMap describe(encode_function encode, float *memory, CUtensorMapSwizzle swizzle) {
    CUtensorMap map;
    const cuuint64_t size[2] = {COLUMNS, ROWS * TILES}, stride[1] = {COLUMNS * sizeof(float)};
    const cuuint32_t box[2] = {COLUMNS, ROWS}, step[2] = {1, 1};
    if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, memory, size, stride, box, step,
               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        exit(2);
    return map;
}

int main() {
    static float in[TILES][ROWS * COLUMNS], out[TILES][ROWS * COLUMNS];
    float *device[2];
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return 1;
    cudaMalloc(&device[0], sizeof in);
    cudaMalloc(&device[1], sizeof out);
    for (int i = 0; i < TILES * ROWS * COLUMNS; i++) in[0][i] = rand() % 1000;
    cudaMemcpy(device[0], in, sizeof in, cudaMemcpyHostToDevice);
    const encode_function encode = (encode_function)entry;
    const CUtensorMap from = describe(encode, device[0], CU_TENSOR_MAP_SWIZZLE_128B),
                      to = describe(encode, device[1], CU_TENSOR_MAP_SWIZZLE_NONE);
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = 2;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(TILES);
    config.blockDim = dim3(64);
    config.attrs = attributes;
    config.numAttrs = 2;
    if (cudaLaunchKernelEx(&config, neighbours, from, to) != cudaSuccess) return 3;
    if (cudaDeviceSynchronize() != cudaSuccess) return 4;
    cudaMemcpy(out, device[1], sizeof out, cudaMemcpyDeviceToHost);
    for (int t = 0; t < TILES; t++)
        for (int i = 0; i < ROWS * COLUMNS; i++)
            if (out[t][i] != in[t][i] + 2 * in[t ^ 1][i]) return 5;
    printf("right\n");
    return 0;
}
