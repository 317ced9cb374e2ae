// Norms of rows beside a GEMM, included by sm90_gemm.cu. With ROW_FACTORS each row of alpha A B^T is multiplied by a factor
// of its own before the bias is added. With ROW_SQUARES the sum of the squares of a row's rounded elements is written for
// each tile of columns, and sm90_row_squares.cu adds these in order: the statistics of an RMSNorm of D, whose factors the
// next GEMM may apply. A thread adds the squares of its elements of two rows when it has rounded them.
#ifndef DW_SM90_ROWS_CUH
#define DW_SM90_ROWS_CUH

static_assert(!(ROW_FACTORS || ROW_SQUARES) || (GROUPS == DW_GROUPS_BATCH && !CODES && !PROGRAM && !LOSS),
              "one dense product");
static_assert(!ROW_SQUARES || !F32_OUTPUT, "elements of 16 bits");

// The sums of squares of a thread's parts of two rows.
typedef struct row_sums {
    float x[2];
    int row, tile; // the first of the rows, and the tile of columns
} row_sums;

// Loads the factors of a thread's two rows of a part.
DEVICE void load_row_factors(const dw_sm90_gemm_params &p, const tile &t, int part, float *factors) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of(t, part, half);
        factors[half] = ROW_FACTORS && row < t.end ? p.row_factors[row] : 0.f;
    }
}

DEVICE row_sums begin_row_sums(const tile &t, int part) {
    return {{0.f, 0.f}, row_of(t, part, 0), t.column / TILE_COLUMNS};
}

// Adds the squares of a strip's rounded elements, before its words are transposed.
DEVICE void add_squares(const dw_sm90_gemm_params &p, const tile &t, int strip, uint32 (*words)[4], row_sums &sums) {
    const int columns = p.n - t.column - 32 * strip, first = 2 * (lane_index() & 3);
#pragma unroll
    for (int half = 0; ROW_SQUARES && half < 2; half++) {
        float sum = sums.x[half];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float low = element_low(words[half][i]), high = element_high(words[half][i]);
            if (columns >= 32) {
                sum = fmaf(high, high, fmaf(low, low, sum));
            } else {
                if (8 * i + first < columns) sum = fmaf(low, low, sum);
                if (8 * i + first + 1 < columns) sum = fmaf(high, high, sum);
            }
        }
        sums.x[half] = sum;
    }
}

// Writes them: four threads have parts of a row.
DEVICE void store_row_sums(const dw_sm90_gemm_params &p, const row_sums &sums) {
#pragma unroll
    for (int half = 0; ROW_SQUARES && half < 2; half++) {
        float x = sums.x[half];
        x += __shfl_xor_sync(0xffffffff, x, 1);
        x += __shfl_xor_sync(0xffffffff, x, 2);
        const int row = sums.row + 8 * half;
        if (lane_index() % 4 == 0 && row < p.m) p.row_squares[(long long)sums.tile * p.m + row] = x;
    }
}

#endif
