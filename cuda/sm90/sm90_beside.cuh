// Gradients of logits beside a GEMM of sm_90a (BESIDE): three warps of the warpgroup that loads have nothing else to do, and
// the memory is hardly used. They make the gradient of cross-entropy from logits, in their place or elsewhere, while this
// GEMM multiplies others (src/kernel/cuda/linear_cross_entropy.c).
//
// A warp has a ring of slots of 2 KiB each, which are loaded ahead of it: few registers are left, and a pass that hides
// behind products needs as much in flight as one that is alone. Elements behind the last whole 16 bytes of a row are loaded
// one by one, because nothing is known about the memory behind them.
#ifndef DW_SM90_BESIDE_CUH
#define DW_SM90_BESIDE_CUH

#if BESIDE

#define BESIDE_COLUMNS (DW_SM90_BESIDE_BYTES / 2) // of a slot

// A warp's position in its sequence of pieces, row by row.
typedef struct piece_walk {
    int row, piece;
} piece_walk;

typedef struct beside {
    const dw_sm90_loss *l;
    int across, next_rows, next_pieces; // pieces of a row; from a warp's piece to its next one
} beside;

DEVICE void next_piece(const beside &b, piece_walk &w) {
    w.row += b.next_rows;
    w.piece += b.next_pieces;
    if (w.piece >= b.across) w.piece -= b.across, w.row++;
}

DEVICE const uint16 *logits_of(const beside &b, const piece_walk &w) {
    return (const uint16 *)b.l->logits + w.row * b.l->logits_stride + w.piece * BESIDE_COLUMNS;
}
DEVICE int length_of(const beside &b, const piece_walk &w) { return min(b.l->columns - w.piece * BESIDE_COLUMNS, BESIDE_COLUMNS); }

DEVICE void load_piece(const beside &b, const piece_walk &w, uint32 slot, uint32 full) {
    const uint32 bytes = length_of(b, w) / 8 * 16;
    barrier_expect(full, bytes);
    if (bytes > 0) bulk_load(slot, logits_of(b, w), bytes, full);
}

DEVICE dw_sm90_loss_row load_row(const beside &b, const piece_walk &w) {
    dw_sm90_loss_row r = {};
    if (w.row >= b.l->count) return r;
    const uint4 v = *(const uint4 *)(b.l->rows + w.row);
    memcpy(&r, &v, sizeof r);
    return r;
}

// Makes a whole vector. `hit`: the target's element, or any number outside.
DEVICE void make_vector(const dw_sm90_loss &l, const dw_sm90_loss_row &r, uint32 from, uint16 *to, int hit) {
    const uint4 v = shared_load16(from);
    *(uint4 *)to = make_uint4(gradients_of(l, r, v.x, hit), gradients_of(l, r, v.y, hit - 2), gradients_of(l, r, v.z, hit - 4),
                              gradients_of(l, r, v.w, hit - 6));
}

DEVICE void make_piece(const beside &b, const piece_walk &w, const dw_sm90_loss_row &r, uint32 slot) {
    const dw_sm90_loss &l = *b.l;
    const int count = length_of(b, w), lane = lane_index(), target = r.target - l.first - w.piece * BESIDE_COLUMNS;
    uint16 *const line = (uint16 *)l.gradients + w.row * l.gradients_stride + w.piece * BESIDE_COLUMNS;
    if (count == BESIDE_COLUMNS && (unsigned)target >= BESIDE_COLUMNS && r.target != DW_SM90_LOSS_IGNORED) {
#pragma unroll
        for (int i = 0; i < BESIDE_COLUMNS / 256; i++)
            make_vector(l, r, slot + (32 * i + lane) * 16, line + (32 * i + lane) * 8, -1);
        return;
    }
#pragma unroll 1
    for (int at = 8 * lane; at < count; at += 256) {
        if (r.target == DW_SM90_LOSS_IGNORED) {
            const uint32 zeros[4] = {};
            store_row_chunk(line + at, count - at, zeros);
        } else if (count - at >= 8) {
            make_vector(l, r, slot + 2 * at, line + at, target - at);
        } else {
            uint32 words[4];
            load_row_chunk(logits_of(b, w) + at, count - at, words);
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = gradients_of(l, r, words[j], target - at - 2 * j);
            store_row_chunk(line + at, count - at, words);
        }
    }
}

DEVICE void make_gradients(const dw_sm90_loss &l, const shared_layout &s) {
    const int warp = threadIdx.x / 32 - 4 * DW_SM90_MULTIPLIERS - 1, step = gridDim.x * DW_SM90_BESIDE_WARPS,
              first = blockIdx.x * DW_SM90_BESIDE_WARPS + warp, across = (l.columns + BESIDE_COLUMNS - 1) / BESIDE_COLUMNS;
    const beside b = {&l, across, step / across, step % across};
    const uint32 slots = s.beside + warp * DW_SM90_BESIDE_SLOTS * DW_SM90_BESIDE_BYTES,
                 full = s.beside_full + warp * DW_SM90_BESIDE_SLOTS * 8;
    piece_walk now = {first / across, first % across}, ahead = now;
    ring r = {0, 0};
#pragma unroll 1
    for (int i = 0; i < DW_SM90_BESIDE_SLOTS && ahead.row < l.count; i++) {
        if (lane_index() == 0) load_piece(b, ahead, slots + i * DW_SM90_BESIDE_BYTES, full + 8 * i);
        next_piece(b, ahead);
    }
    dw_sm90_loss_row next = load_row(b, now);
#pragma unroll 1
    while (now.row < l.count) {
        const uint32 slot = slots + r.stage * DW_SM90_BESIDE_BYTES;
        const dw_sm90_loss_row row = next;
        const piece_walk here = now;
        next_piece(b, now);
        next = load_row(b, now);
        barrier_wait(full + 8 * r.stage, r.phase);
        make_piece(b, here, row, slot);
        __syncwarp();
        if (ahead.row < l.count) {
            if (lane_index() == 0) load_piece(b, ahead, slot, full + 8 * r.stage);
            next_piece(b, ahead);
        }
        advance(r, DW_SM90_BESIDE_SLOTS);
    }
}

#endif

#endif
