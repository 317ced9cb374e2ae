// The order in which persistent blocks compute the tiles of one or more GEMMs of a launch (gemm_groups.h). Every thread
// that needs a tile finds it by itself. Offsets of groups are read from device memory, so the host need not know them.
//
// Defines: GROUPS, TILE_M (rows of a tile), TILE_COLUMNS (columns of D in a tile), BAND (adjacent tiles along m that are
// processed together, because they share B in the L2 cache).
#ifndef DW_GROUP_TILES_CUH
#define DW_GROUP_TILES_CUH

#include "gemm_groups.h"
#include "sm90.cuh"

typedef struct tile {
    int group, row, column, end; // of D: its first row and column, and the row at which its rows end
    int first, k;                // of the contraction
} tile;

// A thread's position among the groups; must start zeroed.
typedef struct group_walk {
    int group, base; // the group of the last tile, and the index of the group's first one
} group_walk;

// Sets the place of tile `index` of a matrix of high x wide tiles.
DEVICE void place(int index, int high, int wide, tile &t) {
    int band = index / (BAND * wide), within = index % (BAND * wide), height = min(BAND, high - band * BAND);
    t.row = (band * BAND + within % height) * TILE_M;
    t.column = within / height * TILE_COLUMNS;
}

// Finds tile `index` of all groups; returns false if there are not so many. With DW_GROUPS_ROWS the indexes of a
// thread's calls must ascend. PARAMS has m, k, groups, tiles_m, tiles_n and offsets.
template <class PARAMS> DEVICE bool find_tile(const PARAMS &p, int index, group_walk &w, tile &t) {
    t.first = 0, t.k = p.k;
    if constexpr (GROUPS == DW_GROUPS_ROWS) {
        for (; w.group < p.groups; w.group++) {
            // Wrong offsets, which are reported, lead to no row that does not exist.
            int start = max(0, min(p.offsets[w.group], p.m)), rows = min(p.offsets[w.group + 1], p.m) - start,
                high = (rows + TILE_M - 1) / TILE_M;
            if (index - w.base < high * p.tiles_n) {
                place(index - w.base, high, p.tiles_n, t);
                t.group = w.group, t.row += start, t.end = start + rows;
                return true;
            }
            w.base += high * p.tiles_n;
        }
        return false;
    } else {
        t.group = index / (p.tiles_m * p.tiles_n);
        if (t.group >= p.groups) return false;
        place(index % (p.tiles_m * p.tiles_n), p.tiles_m, p.tiles_n, t);
        t.end = p.m;
        if constexpr (GROUPS == DW_GROUPS_CONTRACTION) {
            t.first = p.offsets[t.group];
            t.k = p.offsets[t.group + 1] - t.first;
        }
        return true;
    }
}

// D is 0 in rows behind the last group, or the residual. Called by the first `threads` threads of each block; all blocks
// share these rows. PARAMS has m, n, groups, offsets, d, residual and their strides.
template <bool F32, bool HAS_RESIDUAL, class PARAMS> DEVICE void store_rest(const PARAMS &p, int threads) {
    const int size = F32 ? 4 : 2, bytes = p.n % (16 / size) == 0 ? 16 : size; // of an element, of an access
    const long long first = max(p.offsets[p.groups], 0), across = p.n / (bytes / size), count = (p.m - first) * across,
                    step = (long long)gridDim.x * threads;
    for (long long i = (long long)blockIdx.x * threads + threadIdx.x; i < count; i += step) {
        const long long row = first + i / across, at = i % across * bytes;
        void *d = (uint8 *)p.d + row * p.stride_d * size + at;
        const void *residual = (const uint8 *)p.residual + row * p.stride_residual * size + at;
        if (bytes == 16) *(uint4 *)d = HAS_RESIDUAL ? *(const uint4 *)residual : make_uint4(0, 0, 0, 0);
        else if (F32) *(uint32 *)d = HAS_RESIDUAL ? *(const uint32 *)residual : 0;
        else *(uint16 *)d = HAS_RESIDUAL ? *(const uint16 *)residual : 0;
    }
}

#endif
