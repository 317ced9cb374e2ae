// Sums over the rows of a program's results, such as the gradient of a bias: column sums in F32 of the rounded elements.
// Each tile of 128 rows writes a row of partial sums, which another launch adds (reduce_parts in reduce.cu). The order of
// additions depends on the tile alone, so that sums have the same bits in every run.
//
// PROGRAM_SUMS has a bit for each result that is summed. A thread adds the elements of its units in registers. Its units
// lie 128 apart in the order of rows, so that the column of a unit is that of the unit PHASES before it; PHASES is 1
// unless a row has a multiple of 3 units. At a tile's end the threads' sums of a column meet in shared memory.
//
// Included by sm90_program.cuh.
#ifndef DW_SM90_PROGRAM_SUMS_CUH
#define DW_SM90_PROGRAM_SUMS_CUH

#define PHASES DW_SM90_SUM_PHASES(TILE_COLUMNS)
#define SUM_COUNT ((PROGRAM_SUMS & 1) + (PROGRAM_SUMS >> 1 & 1) + (PROGRAM_SUMS >> 2 & 1) + (PROGRAM_SUMS >> 3 & 1))
static_assert(128 * PHASES % ROW_UNITS == 0 && 2 * SHARE_UNITS % PHASES == 0, "as many units of every phase");
static_assert(!PROGRAM_SUMS || GROUPS == DW_GROUPS_BATCH, "rows of groups have no sums");

enum { SUMS_READ = 5, SUMS_WRITTEN = 6 }; // named barriers

// A thread's sums. The first phase is that of its next unit.
typedef struct column_sums {
    float x[SUM_COUNT + 1][PHASES][8];
} column_sums;

// Adds the results of a unit, the thread's `ahead`-th from its next one on.
DEVICE void add_unit(column_sums &sums, int ahead, const unit &u, const elements *out) {
    if (u.count <= 0) return; // a row that does not exist
#pragma unroll
    for (int i = 0, sum = 0; i < PROGRAM_RESULTS; i++) {
        if (!(PROGRAM_SUMS >> i & 1)) continue;
#pragma unroll
        for (int j = 0; j < 8; j++) sums.x[sum][ahead % PHASES][j] += out[i].at[j / 2].get(j % 2);
        sum++;
    }
}

// Goes on by `count` units.
DEVICE void pass_units(column_sums &sums, int count) {
    const column_sums was = sums;
#pragma unroll
    for (int sum = 0; sum < SUM_COUNT; sum++)
#pragma unroll
        for (int phase = 0; phase < PHASES; phase++)
#pragma unroll
            for (int j = 0; j < 8; j++) sums.x[sum][phase][j] = was.x[sum][(phase + count) % PHASES][j];
}

// Leaves a thread's sums in shared memory: those of its phases lie as its first units do in a tile.
DEVICE void share_sums(uint32 to, float (*x)[8]) {
#pragma unroll
    for (int phase = 0; phase < PHASES; phase++)
#pragma unroll
        for (int j = 0; j < 8; j += 4)
            shared_store16(to + (threadIdx.x % 128 + 128 * phase) * 32 + j * 4,
                           make_uint4(__float_as_uint(x[phase][j]), __float_as_uint(x[phase][j + 1]),
                                      __float_as_uint(x[phase][j + 2]), __float_as_uint(x[phase][j + 3])));
}

// Writes the tile's row of partial sums.
DEVICE void store_sums(const dw_sm90_gemm_params &p, const shared_layout &s, const tile &t, column_sums &sums) {
    constexpr int shares = 128 * PHASES / ROW_UNITS; // of a column
#pragma unroll
    for (int i = 0, sum = 0; i < PROGRAM_RESULTS; i++) {
        if (!(PROGRAM_SUMS >> i & 1)) continue;
        named_sync(SUMS_READ, 128); // those before
        share_sums(s.sums, sums.x[sum++]);
        named_sync(SUMS_WRITTEN, 128);
        float *row = p.sums[i] + (long long)(t.row / TILE_M) * p.n + t.column;
        for (int column = threadIdx.x % 128; column < TILE_COLUMNS && p.sums[i]; column += 128) {
            float x = 0.f;
#pragma unroll
            for (int share = 0; share < shares; share++) x += shared_load_f32(s.sums + (share * TILE_COLUMNS + column) * 4);
            if (t.column + column < p.n) row[column] = x;
        }
    }
}

#endif
