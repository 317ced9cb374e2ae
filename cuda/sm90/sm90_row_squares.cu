// Sums of the squares of D's rows, from those of tiles of columns that sm90_gemm.cu writes with ROW_SQUARES: `tiles` vectors
// of `rows` F32, added in order by a thread for each row. `norm`: 1 / sqrt(sum / columns + epsilon) in place of the sum.
#include "sm90_gemm_params.h"

extern "C" __global__ void __launch_bounds__(256) sm90_row_squares(const __grid_constant__ dw_sm90_row_squares_params p) {
    const int row = (int)(blockIdx.x * 256 + threadIdx.x);
    float sum = 0.f;
    if (row >= p.rows) return;
    for (int tile = 0; tile < p.tiles; tile++) sum += p.partials[(long long)tile * p.rows + row];
    p.result[row] = p.norm ? 1.f / sqrtf(sum / (float)p.columns + p.epsilon) : sum;
}
