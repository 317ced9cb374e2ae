// Tiles of D whose contraction several blocks share, for the GEMM of Hopper (SPLIT, sm90_gemm.cu).
//
// The first tiles, as many as fill whole rounds of the blocks, have a block each. The steps of all others form one
// sequence, tile after tile, of which every block has an equal share to within one step. What a share has of a tile is a
// part of it; the parts of a tile are those of consecutive blocks.
//
// Sums of parts are added in a tree that depends only on the number of parts, so that results have the same bits in each
// run: at each node meet the sums of two neighbours, and a + b has the bits of b + a. A block that comes to a node exchanges
// the node's claim for the launch's mark. The first one leaves its sums in the workspace, says so by another mark, and is done
// with the tile. The second one, which finds the claim taken, waits for that mark, adds the sums to its own, and goes on to
// the next node. It waits only for a block that runs and waits for nothing, so blocks may run in any order, or one after the
// other.
//
// The second block also clears both marks, which nobody reads after it. The workspace needs no initial contents: the mark is
// a random number of 64 bits, another one in each launch that is enqueued. A launch of a graph has the same mark as before,
// but finds all of them cleared.
#ifndef DW_SM90_SPLIT_CUH
#define DW_SM90_SPLIT_CUH

// A thread's position in its block's sequence of tiles and parts of tiles; must start zeroed.
typedef struct walk {
    int round, done; // tiles that the block has alone, and steps of its share that it has passed
    int tile; // that of the last part among those that blocks share, or -1
} walk;

// The first step of a block's share: all steps times the block, divided by the number of blocks.
DEVICE int first_step(const dw_sm90_split &s, int block) {
    return block * s.share + (int)((uint32)block * (uint32)s.rest / (uint32)s.blocks);
}

// Tile `index` of D.
DEVICE void place_tile(const dw_sm90_gemm_params &p, int index, tile &t) {
    if (p.split.order == DW_SM90_BANDS) {
        place(index, p.tiles_m, p.tiles_n, t);
    } else {
        const bool along_n = p.split.order == DW_SM90_ALONG_N;
        const int length = along_n ? p.tiles_n : p.tiles_m, line = index / length, at = index - line * length;
        t.row = (along_n ? line : at) * TILE_M;
        t.column = (along_n ? at : line) * TILE_COLUMNS;
    }
    t.group = 0, t.end = p.m;
}

// Computes the block's next tile or part of a tile; returns false if there is none.
DEVICE bool next_tile(const dw_sm90_gemm_params &p, walk &w, tile &t) {
    const dw_sm90_split &s = p.split;
    const int steps = (p.k + STEP - 1) / STEP, block = blockIdx.x;
    int index = w.round * (int)gridDim.x + block, first = 0, count = steps;
    w.tile = -1;
    if (index < s.alone) {
        w.round++;
    } else {
        const int at = first_step(s, block) + w.done, left = block < s.blocks ? first_step(s, block + 1) - at : 0;
        if (left <= 0) return false;
        w.tile = at / steps;
        index = s.alone + w.tile, first = at - w.tile * steps, count = min(steps - first, left);
        w.done += count;
    }
    place_tile(p, index, t);
    t.first = first * STEP, t.k = min(p.k - t.first, count * STEP);
    return true;
}

// The blocks that share a tile, `parts` ones from `first_block` on, of which this one has part `part`, and the node of the
// tree that it comes to next.
typedef struct meeting {
    int first_block, part, parts;
    int level, node; // node -1: none. It has the number of the block with the first part behind it
    bool is_first;             // in one thread: to come to the node
} meeting;

DEVICE uint64 exchange(uint64 *flag, uint64 value) {
    uint64 before;
    asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"((uint64)__cvta_generic_to_global(flag)), "l"(value)
                 : "memory");
    return before;
}

// Goes on to the next node with a neighbour, and claims it.
DEVICE void come_to_node(const dw_sm90_split &s, meeting &h) {
    h.node = -1;
    for (; h.node < 0 && 1 << h.level < h.parts; h.level++) {
        const int own = h.part >> h.level << h.level, other = own ^ 1 << h.level;
        if (other < h.parts) h.node = h.first_block + max(own, other);
    }
    h.is_first = h.node >= 0 && threadIdx.x == 0 && exchange(s.flags + 2 * h.node, s.mark) != s.mark;
}

// Finds the blocks with the last part's tile, this one and neighbours in front and behind, and comes to the first node.
DEVICE meeting begin_meeting(const dw_sm90_gemm_params &p, const walk &w) {
    const dw_sm90_split &s = p.split;
    const int steps = (p.k + STEP - 1) / STEP, begin = w.tile * steps;
    int first = blockIdx.x, last = blockIdx.x;
    if (w.tile >= 0) {
        while (first_step(s, first) > begin) first--;
        while (first_step(s, last + 1) < begin + steps) last++;
    }
    meeting h = {first, (int)blockIdx.x - first, last - first + 1, 0, -1, false};
    come_to_node(s, h);
    return h;
}

// Where a thread leaves its sums for a node: 16 bytes in each line of 512 of its warp.
DEVICE float *sums_of(const dw_sm90_split &s, int node) {
    return s.sums + ((long long)node * 4 * DW_SM90_MULTIPLIERS + threadIdx.x / 32) * (WIDTH / 2 * 32) + lane_index() * 4;
}

DEVICE void leave_sums(float *to, const float *sums) {
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++)
        *(float4 *)(to + i * 128) = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}

DEVICE void add_sums(const float *from, float *sums) {
    constexpr int LOADS = WIDTH % 128 == 0 ? 16 : 8; // in flight
    static_assert(WIDTH / 8 % LOADS == 0, "whole groups of loads");
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i += LOADS) {
        float4 v[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; j++) v[j] = global_load_f32x4(from + (i + j) * 128);
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            float *to = sums + 4 * (i + j);
            to[0] += v[j].x, to[1] += v[j].y, to[2] += v[j].z, to[3] += v[j].w;
        }
    }
}

// Waits for the block's `threads` threads that have rows of the tile, and returns whether it is true for one of them.
DEVICE bool is_true_for_one(bool it, int threads) {
    constexpr int MEETING = 5; // a named barrier
    uint32 found;
    asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %1, 0;\n\tbar.red.or.pred q, %2, %3, p;\n\tselp.u32 %0, 1, 0, q;\n\t}"
                 : "=r"(found)
                 : "r"((uint32)it), "n"(MEETING), "r"(threads)
                 : "memory");
    return __any_sync(0xffffffff, found != 0); // so that the compiler sees that a warp's threads have the same
}

// Meets the other parts of a tile. Returns whether `sums` are now those of the whole contraction; if not, another block has
// them or will have them. Called by all threads that have rows of the tile.
DEVICE bool add_parts(const dw_sm90_gemm_params &p, const tile &t, meeting &h, float *sums) {
    const dw_sm90_split &s = p.split;
    const int threads = __shfl_sync(0xffffffff, t.row + 64 < t.end ? 128 * DW_SM90_MULTIPLIERS : 128, 0);
#pragma unroll 1
    while (h.node >= 0) {
        const int node = h.node;
        uint64 *claim = s.flags + 2 * node, *left = claim + 1;
        if (is_true_for_one(h.is_first, threads)) {
            leave_sums(sums_of(s, node), sums);
            (void)is_true_for_one(false, threads);
            if (threadIdx.x == 0) global_store_release(left, s.mark);
            return false;
        }
        if (threadIdx.x == 0) {
            while (global_load_acquire(left) != s.mark) {
            }
            *claim = *left = 0;
        }
        (void)is_true_for_one(false, threads);
        come_to_node(s, h); // the exchange takes its time while the sums are added
        add_sums(sums_of(s, node), sums);
    }
    return true;
}

#endif
