// Rows that the grouped GEMM of sm_90a reads by an index, such as the tokens' rows for the experts that they chose, and
// rows of D that it stores by one.
//
// TMA reads no rows of any order, so the 128 threads of the loading warpgroup copy the gathered operand themselves
// (cp.async), 16 bytes at a time: a thread has the same 16 bytes of every 16th row of a stage, at their place in the
// swizzle. The other operand comes by TMA. A stage's full barrier counts the arrivals of all threads, which their copies
// make when they are complete; the warpgroups that multiply fence, because wgmma reads by another proxy than these
// copies write. Boxes of one row by TMA, the other way, take 10 to 15 clocks each, which is slower (docs/gemm.md).
//
// Groups of rows: GATHER is A, whose tile has the same rows in all of its steps, so a thread reads its indexes once in a
// tile. Groups of the contraction: GATHER is A or B, and a stage has 64 other rows, whose indexes are read one step
// ahead.
//
// Defines: GATHER (sm90_gather_params.h), SCATTER, WEIGHTS.
#ifndef DW_SM90_GATHER_CUH
#define DW_SM90_GATHER_CUH

#if GATHER || SCATTER || WEIGHTS
static_assert(GROUPS != DW_GROUPS_BATCH && !CODES && !LOSS && !PROGRAM, "groups of 16-bit elements have rows by index");
static_assert(GATHER != DW_SM90_GATHER_B || GROUPS == DW_GROUPS_CONTRACTION, "B's rows are the contraction's");
static_assert(!(SCATTER || WEIGHTS) || GROUPS == DW_GROUPS_ROWS, "D has the groups' rows");
#endif

#if GATHER

#define LOADERS 128
#define ROW_LOADERS 8                          // threads that copy the 128 bytes of a row
#define ROWS_AT_ONCE (LOADERS / ROW_LOADERS)   // a multiple of the 8 rows of the swizzle
#define GATHERED_BYTES (GATHER == DW_SM90_GATHER_A ? A_BYTES : STAGE_BYTES - A_BYTES)
#define ROWS_OF_THREAD ((GROUPS == DW_GROUPS_ROWS ? TILE_M : STEP) / ROWS_AT_ONCE)

// Copies 16 bytes, or writes as many zeros. `from` must be an address of the operand in either case.
DEVICE void copy_chunk(uint32 to, const void *from, bool exists) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"((uint64)__cvta_generic_to_global(from)),
                 "r"(exists ? 16 : 0)
                 : "memory");
}

// Arrives when this thread's copies are complete.
DEVICE void arrive_after_copies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE int loader() { return threadIdx.x % LOADERS; }
DEVICE int own_column() { return loader() % ROW_LOADERS * 8; } // the thread's eight elements of a row of 64

// Reads the indexes of the thread's rows from row `first` on; -1 for rows from `end` on, and for wrong indexes.
DEVICE void read_indexes(const dw_sm90_gemm_params &p, int first, int end, int *rows) {
#pragma unroll
    for (int j = 0; j < ROWS_OF_THREAD; j++) {
        const int row = first + loader() / ROW_LOADERS + j * ROWS_AT_ONCE;
        rows[j] = row < end ? __ldg(p.gather.in + row) : -1;
    }
}

DEVICE void check_indexes(const dw_sm90_gemm_params &p, int first, int end, int *rows) {
#pragma unroll
    for (int j = 0; j < ROWS_OF_THREAD; j++) {
        if ((uint32)rows[j] < (uint32)p.gather.count) continue;
        if (first + loader() / ROW_LOADERS + j * ROWS_AT_ONCE < end) report(p.error, DW_DATA_INDEX);
        rows[j] = -1;
    }
}

// Copies the thread's 16 bytes of its rows, from element `at` of each, of which there are `width`.
DEVICE void copy_rows(const dw_sm90_gemm_params &p, uint32 to, int at, int width, const int *rows) {
    const int own = loader() / ROW_LOADERS;
    const uint16 *from = (const uint16 *)p.gather.rows + at + own_column();
    const bool has_columns = at + own_column() < width;
    to += own * 128 + ((loader() ^ own) % ROW_LOADERS) * 16;
#pragma unroll
    for (int j = 0; j < ROWS_OF_THREAD; j++) {
        const bool exists = has_columns && rows[j] >= 0;
        copy_chunk(to + j * ROWS_AT_ONCE * 128, exists ? from + (long long)rows[j] * p.gather.stride : p.gather.rows, exists);
    }
}

// Loads the operand that is not gathered.
DEVICE void load_other(const dw_sm90_gemm_params &p, const tensor_map *map_a, const tensor_map *map_b, uint32 stage, uint32 full,
                       const tile &t, int at) {
    const uint32 b = stage + A_BYTES;
    barrier_expect(full, STAGE_BYTES - GATHERED_BYTES);
    if constexpr (GATHER == DW_SM90_GATHER_B) load_operand<TILE_M, TURNED_A>(stage, map_a, full, at, t.row, 0);
    else load_b(p, map_b, nullptr, b, full, at, t);
}

// The work of the loading warpgroup.
DEVICE void load_gathered(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map_a, const tensor_map *map_b) {
    const int end_of_rows = GROUPS == DW_GROUPS_ROWS ? p.m : p.k;
    ring r = {0, 0};
    walk w = {};
    tile t;
    while (next_tile(p, w, t)) {
        const int steps = steps_of(t);
        int rows[ROWS_OF_THREAD], next[ROWS_OF_THREAD];
        // Wrong offsets, which are reported, lead to no index that does not exist.
        const int first = GROUPS == DW_GROUPS_ROWS ? t.row : max(t.first, 0),
                  end = GROUPS == DW_GROUPS_ROWS ? t.end : min(t.first + t.k, end_of_rows);
        read_indexes(p, first, end, next);
        for (int step = 0; step < steps; step++) {
            const uint32 full = s.full + 8 * r.stage, stage = s.stages + r.stage * STAGE_BYTES;
            if (GROUPS == DW_GROUPS_CONTRACTION || step == 0) {
                const int at = GROUPS == DW_GROUPS_CONTRACTION ? first + step * STEP : first;
#pragma unroll
                for (int j = 0; j < ROWS_OF_THREAD; j++) rows[j] = next[j];
                check_indexes(p, at, end, rows);
                if constexpr (GROUPS == DW_GROUPS_CONTRACTION) read_indexes(p, at + STEP, end, next);
            }
            barrier_wait(s.empty + 8 * r.stage, r.phase ^ 1);
            if (loader() == 0) load_other(p, map_a, map_b, stage, full, t, t.first + step * STEP);
            if constexpr (GROUPS == DW_GROUPS_ROWS) {
                copy_rows(p, stage, step * STEP, p.k, rows);
            } else {
                const bool of_a = GATHER == DW_SM90_GATHER_A;
#pragma unroll
                for (int i = 0; i < (of_a ? TILE_M : TILE_N); i += 64)
                    copy_rows(p, stage + (of_a ? 0 : A_BYTES) + i * 128, (of_a ? t.row : t.column) + i, of_a ? p.m : p.n, rows);
            }
            arrive_after_copies(full);
            advance(r, STAGES);
        }
    }
}

#endif

// ---- D --------------------------------------------------------------------------------------------------------

// The row at which row `row` of D is stored. Wrong indexes are reported, and store nothing: the result is below 0.
DEVICE int stored_row(const dw_sm90_gemm_params &p, int row, int end) {
    if constexpr (!SCATTER) return row;
    if (row >= end) return -1;
    const int out = __ldg(p.gather.out + row);
    if ((uint32)out < (uint32)p.m) return out;
    report(p.error, DW_DATA_INDEX);
    return -1;
}

// The weight of a row.
DEVICE float weight_of(const dw_sm90_gemm_params &p, int row, int end) {
    if constexpr (!WEIGHTS) return 1.f;
    return row < end ? element_low(__ldg((const uint16 *)p.gather.weights + row)) : 0.f;
}

// The same as store_rest (group_tiles.cuh), for rows that are stored by an index.
[[maybe_unused]] DEVICE void scatter_rest(const dw_sm90_gemm_params &p, int threads) {
    const int size = F32_OUTPUT ? 4 : 2;
    const long long first = max(p.offsets[p.groups], 0), count = (p.m - first) * p.n, step = (long long)gridDim.x * threads;
    for (long long i = (long long)blockIdx.x * threads + threadIdx.x; i < count; i += step) {
        const long long row = stored_row(p, (int)(first + i / p.n), p.m), column = i % p.n;
        if (row < 0) continue;
        uint8 *d = (uint8 *)p.d + (row * p.stride_d + column) * size;
        const uint8 *residual = (const uint8 *)p.residual + (row * p.stride_residual + column) * size;
        if (F32_OUTPUT) *(uint32 *)d = RESIDUAL ? *(const uint32 *)residual : 0;
        else *(uint16 *)d = RESIDUAL ? *(const uint16 *)residual : 0;
    }
}

#endif
