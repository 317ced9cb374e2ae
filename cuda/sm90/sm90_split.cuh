// Tiles of D whose contraction several blocks share, for the GEMM of Hopper (SPLIT, sm90_gemm.cu).
//
// The first tiles, as many as fill whole rounds of the blocks, have a block each. The steps of all others form one
// sequence, tile after tile, of which every block has an equal share to within one step. A share that neither begins nor
// ends a tile is a part of it; the parts of a tile are those of consecutive blocks.
//
// Sums of parts are added in a tree that depends only on the number of parts, so that results have the same bits in each
// run: at each node meet the sums of two neighbours, and a + b has the bits of b + a. Each warp adds its own sums, those of
// 16 rows. It leaves them in the workspace, and exchanges the node's flag for the launch's mark. A warp that finds the mark
// there is the second one: it adds the sums of the first and goes on to the next node. The first one is done with the tile.
// No warp ever waits for another block, so blocks may run in any order, or one after the other.
//
// The second warp also clears the flag, which nobody reads after it. Flags need no initial contents: the mark is a random
// number of 64 bits, another one in each launch that is enqueued. A launch of a graph has the same mark as before, but finds
// its flags cleared.
#ifndef DW_SM90_SPLIT_CUH
#define DW_SM90_SPLIT_CUH

// A thread's position in its block's sequence of tiles and parts of tiles; must start zeroed.
typedef struct walk {
    int round, done; // tiles that the block has alone, and steps of its share that it has passed
    // The last part's tile among those that blocks share. They are `parts` blocks from `first_block` on; part `part` is
    // this block's.
    int tile, first_block, part, parts;
} walk;

// The first step of a block's share.
DEVICE int first_step(const dw_sm90_split &s, int steps, int block) {
    return (int)((uint64)((uint32)s.tiles * (uint32)steps) * (uint32)block / (uint32)s.blocks);
}

// The block that has a step of the sequence: the last one that does not begin behind it.
DEVICE int block_of_step(const dw_sm90_split &s, int steps, int step) {
    return (int)(((uint64)(step + 1) * (uint32)s.blocks - 1) / ((uint32)s.tiles * (uint32)steps));
}

// Tile `index` of D. With ACROSS, neighbours lie along n.
DEVICE void place_tile(const dw_sm90_gemm_params &p, int index, tile &t) {
    if (p.split.across) {
        t.row = index / p.tiles_n * TILE_M;
        t.column = index % p.tiles_n * TILE_COLUMNS;
    } else {
        place(index, p.tiles_m, p.tiles_n, t);
    }
    t.group = 0, t.end = p.m;
}

// Computes the block's next tile or part of a tile; returns false if there is none.
DEVICE bool next_tile(const dw_sm90_gemm_params &p, walk &w, tile &t) {
    const dw_sm90_split &s = p.split;
    const int alone = w.round * (int)gridDim.x + (int)blockIdx.x, steps = (p.k + STEP - 1) / STEP, block = blockIdx.x;
    w.parts = 1;
    t.first = 0, t.k = p.k;
    if (alone < s.alone) {
        w.round++;
        place_tile(p, alone, t);
        return true;
    }
    if (block >= s.blocks) return false;
    const int at = first_step(s, steps, block) + w.done, left = first_step(s, steps, block + 1) - at;
    if (left <= 0) return false;
    const int first = at % steps, count = min(steps - first, left);
    w.tile = at / steps;
    w.done += count;
    w.first_block = block_of_step(s, steps, w.tile * steps);
    w.part = block - w.first_block;
    w.parts = block_of_step(s, steps, w.tile * steps + steps - 1) - w.first_block + 1;
    place_tile(p, s.alone + w.tile, t);
    t.first = first * STEP, t.k = min(p.k - t.first, count * STEP);
    return true;
}

// Where the warp leaves the sums of its part: a thread has 16 bytes in each line of 512. Part 0 has a place for its tile,
// because its block may also have the last part of the tile before.
DEVICE float *sums_place(const dw_sm90_split &s, int place) {
    return s.sums + ((long long)place * 4 * DW_SM90_MULTIPLIERS + threadIdx.x / 32) * (WIDTH / 2 * 32) + lane_index() * 4;
}

DEVICE uint64 load_flag(const uint64 *flag) {
    uint64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"((uint64)__cvta_generic_to_global(flag)) : "memory");
    return value;
}

DEVICE uint64 exchange_flag(uint64 *flag, uint64 value) {
    uint64 before;
    asm volatile("atom.acq_rel.gpu.global.exch.b64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"((uint64)__cvta_generic_to_global(flag)), "l"(value)
                 : "memory");
    return before;
}

DEVICE void leave_sums(float *to, const float *sums) {
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++)
        *(float4 *)(to + i * 128) = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}

DEVICE void add_sums(const float *from, float *sums) {
    constexpr int LOADS = WIDTH % 64 == 0 ? 8 : 4; // in flight, twice
    static_assert(WIDTH / 8 % LOADS == 0, "whole groups of loads");
    float4 v[2][LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) v[0][i] = global_load_f32x4(from + i * 128);
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i += LOADS) {
        const int now = i / LOADS % 2;
#pragma unroll
        for (int j = 0; j < LOADS && i + LOADS < WIDTH / 8; j++) v[!now][j] = global_load_f32x4(from + (i + LOADS + j) * 128);
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            float *to = sums + 4 * (i + j);
            to[0] += v[now][j].x, to[1] += v[now][j].y, to[2] += v[now][j].z, to[3] += v[now][j].w;
        }
    }
}

// Meets the other parts of the last part's tile. Returns, for all threads of a warp, whether `sums` are now those of the
// whole contraction; if not, another block's warp has them or will have them.
DEVICE bool add_parts(const dw_sm90_gemm_params &p, const walk &w, float *sums) {
    const dw_sm90_split &s = p.split;
#pragma unroll 1
    for (int level = 0; 1 << level < w.parts; level++) {
        // The first parts of this subtree and of its neighbour. The node's flag is that of the later one's block.
        const int own = w.part >> level << level, other = own ^ 1 << level;
        if (other >= w.parts) continue;
        uint64 *flag = s.flags + (w.first_block + max(own, other)) * 4 * DW_SM90_MULTIPLIERS + threadIdx.x / 32;
        bool second = lane_index() == 0 && load_flag(flag) == s.mark;
        second = __shfl_sync(0xffffffff, second, 0);
        if (!second) {
            leave_sums(sums_place(s, own ? w.first_block + own : s.blocks + w.tile), sums);
            __syncwarp(); // orders the sums of all threads before the flag
            if (lane_index() == 0) second = exchange_flag(flag, s.mark) == s.mark;
            second = __shfl_sync(0xffffffff, second, 0);
            if (!second) return false;
        }
        if (lane_index() == 0) *flag = 0;
        __syncwarp(); // orders the flag before the sums that all threads read
        add_sums(sums_place(s, other ? w.first_block + other : s.blocks + w.tile), sums);
    }
    return true;
}

#endif
