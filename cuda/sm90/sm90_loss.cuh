// Cross-entropy behind a GEMM of sm_90a, whose D are the logits of rows of tokens (src/kernel/cuda/linear_cross_entropy.c).
// Defines: LOSS (sm90_loss_params.h).
//
// All is computed from D's rounded elements that the warpgroups hold, between the products of the next tile, a strip of 32
// columns at a time. Statistics: the first strip finds the largest logit of the tile's columns in each row, then each strip
// adds exponentials relative to it. So each tile has one pair of numbers for a row, and cross_entropy_combine
// (common/cross_entropy.cu) combines a row's pairs in the order of columns. D is stored if it is wanted. Gradient: the
// elements become the gradient of the loss by the logits, and are stored in their place.
//
// A tile of 128 x 256 takes 2048 clocks for its exponentials, 16 for each clock, beside 1024 clocks of products for each
// stage of the contraction.
#ifndef DW_SM90_LOSS_CUH
#define DW_SM90_LOSS_CUH

#define LOG2_E 1.4426950408889634f

// The gradients of two logits. `hit`: at 0 or 1 is the target's; other numbers: neither.
DEVICE uint32 gradients_of(const dw_sm90_loss &l, const dw_sm90_loss_row &r, uint32 word, int hit) {
    const float low = exp2_approx(fmaf(element_low(word), LOG2_E, -r.lse)),
                high = exp2_approx(fmaf(element_high(word), LOG2_E, -r.lse)), less = fmaf(l.hit, r.weight, r.even);
    return pack_elements(fmaf(low, r.weight, hit == 0 ? -less : -r.even), fmaf(high, r.weight, hit == 1 ? -less : -r.even));
}

#if LOSS

#define UNITS STRIPS

// The elements of the last tile.
typedef struct held {
    int row, column; // the thread's first row; the tile's first column
    int end;         // of the rows that exist; 0: there is no last tile
#if LOSS == DW_SM90_LOSS_STATISTICS
    int target[2]; // classes; any number if a row is ignored
    float shift[2], sums[2], logit_sums[2];
#else
    dw_sm90_loss_row rows[2];
#endif
    uint32 words[STRIPS][2][4];
} held;

// Tile t takes the place of the last one, whose units are finished.
DEVICE void hold(const dw_sm90_gemm_params &p, const tile &t, held &h) {
    h.row = row_of(t, 0, 0);
    h.column = t.column;
    h.end = t.end;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = h.row + 8 * half;
        if (row >= h.end) continue;
#if LOSS == DW_SM90_LOSS_STATISTICS
        h.target[half] = *(const int *)(p.loss.target + row); // cross_entropy_combine checks all 64 bits
#else
        const uint4 v = *(const uint4 *)(p.loss.rows + row);
        memcpy(&h.rows[half], &v, sizeof v);
#endif
    }
}

// The column of the thread's first element in a strip. Word i of a row has columns 8 i and 8 i + 1 behind it.
DEVICE int first_column(const held &h, int strip) { return h.column + 32 * strip + 2 * (lane_index() & 3); }

// Whether the thread has the element `distance` columns behind its first one in a strip.
DEVICE bool has_element(int distance) { return (unsigned)distance < 32 && (distance & 6) == 0; }

// Where the 16 rows of a warp have a strip on its way to memory: rows of 64 bytes in TMA's swizzle of 64, two strips in turn.
DEVICE uint32 warp_strip(const shared_layout &s, int strip) {
    return s.lines + (threadIdx.x / 32 * DW_SM90_LOSS_STRIPS + strip % DW_SM90_LOSS_STRIPS) * DW_SM90_LOSS_STRIP_BYTES;
}

// Stores a strip by TMA, which leaves out what is outside of D. So the warp neither exchanges elements nor looks for edges.
DEVICE void store_unit(const shared_layout &s, const tensor_map *map, const held &h, int strip) {
    const uint32 to = warp_strip(s, strip);
    const int lane = lane_index();
    if (lane == 0) bulk_wait_read<DW_SM90_LOSS_STRIPS - 1>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 8 * half + lane % 8, chunk = lane / 8;
        const uint32 *const words = h.words[strip][half];
        store_matrices(to + row * 64 + ((chunk ^ (row / 2 & 3)) << 4), words[0], words[1], words[2], words[3]);
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"((uint64)map), "r"(to),
                     "r"(h.column + 32 * strip), "r"(h.row)
                     : "memory");
        bulk_commit();
    }
}

#if LOSS == DW_SM90_LOSS_STATISTICS

DEVICE uint32 larger_elements(uint32 a, uint32 b) {
#if ELEMENT == 0
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
#else
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
#endif
    return a;
}

// Makes elements behind the last class -infinity.
DEVICE void clear_columns(const dw_sm90_gemm_params &p, held &h) {
    const uint32 lowest = ELEMENT == 0 ? 0xff80ff80u : 0xfc00fc00u;
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int left = p.n - first_column(h, strip) - 8 * i;
            const uint32 kept = left < 1 ? 0u : left < 2 ? 0xffffu : 0xffffffffu;
#pragma unroll
            for (int half = 0; half < 2; half++)
                h.words[strip][half][i] = (h.words[strip][half][i] & kept) | (lowest & ~kept);
        }
}

DEVICE long long at_partial(const dw_sm90_gemm_params &p, const held &h, int half) {
    return (long long)(h.column / TILE_N) * p.m + h.row + 8 * half;
}
DEVICE bool writes_partial(const held &h, int half) { return (lane_index() & 3) == 0 && h.row + 8 * half < h.end; }

DEVICE void begin_statistics(const dw_sm90_gemm_params &p, held &h) {
    if (p.n - h.column < TILE_N) clear_columns(p, h);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32 parts[4]; // in place of one, because each waits for the one before
#pragma unroll
        for (int i = 0; i < 4 * STRIPS; i++)
            parts[i % 4] = i < 4 ? h.words[0][half][i] : larger_elements(parts[i % 4], h.words[i / 4][half][i % 4]);
        uint32 most = larger_elements(larger_elements(parts[0], parts[1]), larger_elements(parts[2], parts[3]));
        most = larger_elements(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = larger_elements(most, __shfl_xor_sync(0xffffffff, most, 2));
        const float largest = fmaxf(element_low(most), element_high(most));
        if (writes_partial(h, half)) p.loss.largest[at_partial(p, h, half)] = largest;
        h.shift[half] = largest == -INFINITY_F ? 0.f : -LOG2_E * largest; // -inf - -inf would be NaN
        h.sums[half] = h.logit_sums[half] = 0.f;
    }
}

DEVICE void add_logits(const dw_sm90_gemm_params &p, held &h, int strip) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int left = p.n - first_column(h, strip) - 8 * i;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32 word = h.words[strip][half][i];
            if (left > 0) h.logit_sums[half] += element_low(word);
            if (left > 1) h.logit_sums[half] += element_high(word);
        }
    }
}

DEVICE float sum_of_quad(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

DEVICE void end_statistics(const dw_sm90_gemm_params &p, const held &h) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = sum_of_quad(h.sums[half]);
        if (writes_partial(h, half)) p.loss.sums[at_partial(p, h, half)] = sum;
        if (!p.loss.logit_sums) continue;
        const float logits = sum_of_quad(h.logit_sums[half]);
        if (writes_partial(h, half)) p.loss.logit_sums[at_partial(p, h, half)] = logits;
    }
}

// Stores the logits of the targets that are in a strip.
DEVICE void store_targets(const dw_sm90_gemm_params &p, const held &h, int strip) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint32 *const words = h.words[strip][half];
        const int distance = h.target[half] - first_column(h, strip);
        if (!has_element(distance) || h.row + 8 * half >= h.end) continue;
        uint32 word = words[0];
#pragma unroll
        for (int i = 1; i < 4; i++) word = distance >= 8 * i ? words[i] : word;
        p.loss.at_target[h.row + 8 * half] = distance & 1 ? element_high(word) : element_low(word);
    }
}

DEVICE void finish_unit(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map, held &h, int unit) {
    if (h.end == 0) return;
    if (unit == 0) begin_statistics(p, h);
    float part[2][2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32 word = h.words[unit][i % 2][i / 2];
        part[i % 2][0] += exp2_approx(fmaf(element_low(word), LOG2_E, h.shift[i % 2]));
        part[i % 2][1] += exp2_approx(fmaf(element_high(word), LOG2_E, h.shift[i % 2]));
    }
    h.sums[0] += part[0][0] + part[0][1];
    h.sums[1] += part[1][0] + part[1][1];
    const int column = first_column(h, unit);
    if (__any_sync(0xffffffff, has_element(h.target[0] - column) || has_element(h.target[1] - column))) store_targets(p, h, unit);
    if (p.loss.logit_sums) add_logits(p, h, unit);
    if (unit == UNITS - 1) end_statistics(p, h);
    if (p.d) store_unit(s, map, h, unit);
}

#else

// Replaces a strip's logits by their gradients; 0 in rows that are ignored, whatever their logits.
DEVICE void replace_words(const dw_sm90_loss &l, held &h, int strip, int column, bool has_targets) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const dw_sm90_loss_row &r = h.rows[i % 2];
        uint32 *const word = &h.words[strip][i % 2][i / 2];
        const uint32 gradients = gradients_of(l, r, *word, has_targets ? r.target - column - i / 2 * 8 : -1);
        *word = r.target == DW_SM90_LOSS_IGNORED ? 0 : gradients;
    }
}

DEVICE void finish_unit(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map, held &h, int unit) {
    if (h.end == 0) return;
    const int column = p.loss.first + first_column(h, unit);
    if (__any_sync(0xffffffff, has_element(h.rows[0].target - column) || has_element(h.rows[1].target - column)))
        replace_words(p.loss, h, unit, column, true);
    else replace_words(p.loss, h, unit, column, false);
    store_unit(s, map, h, unit);
}

#endif

// ---- tiles ------------------------------------------------------------------------------------------------

// How many of a tile's steps are started before a unit of the last tile is finished. Units are spread over all of them: one
// may take longer than a step's products, so that the tensor cores would have to wait if one followed the other.
DEVICE int steps_before(int unit, int steps) { return ((unit + 1) * steps + UNITS - 1) / UNITS; }

// Finishes the last tile while multiplying tile t, whose elements it keeps.
DEVICE void multiply_and_finish(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map, ring &r,
                                const tile &t, float (*sums)[WIDTH / 2], held &h) {
    // The compiler must see that all threads of a warp have the same.
    const int rows = __shfl_sync(0xffffffff, threadIdx.x / 128 * 64, 0), steps = __shfl_sync(0xffffffff, steps_of(t), 0);
    const float factor = factor_of(p, t);
    int step = 0;
    if (steps == 0) clear_sums(sums);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        multiply_steps(s, r, t, step, steps_before(unit, steps), rows, sums);
        if (BIAS && unit == 0) load_bias(p, s, t);
        finish_unit(p, s, map, h, unit);
    }
    multiply_steps(s, r, t, step, steps, rows, sums);
    hold(p, t, h);
    if constexpr (BIAS) __syncwarp();
    end_steps(s, r, steps, sums);
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) round_strip(s, factor, sums[0], strip, h.words[strip]);
}

DEVICE void compute_for_loss(const dw_sm90_gemm_params &p, const shared_layout &s, const tensor_map *map) {
    ring r = {0, 0};
    walk w = {};
    tile t;
    float sums[PARTS][WIDTH / 2];
    held h;
    h.end = 0;
    for (bool more = true; more;) {
        more = next_tile(p, w, t);
        if (!more) t.k = t.end = 0; // a tile without rows, which finishes the last one: a second copy of the units would be long
        multiply_and_finish(p, s, map, r, t, sums, h);
    }
    if (lane_index() == 0) bulk_wait_read<0>();
}

static_assert(TOGETHER && !RESIDUAL && !SWIGLU && !CODES && GROUPS == DW_GROUPS_BATCH, "what a loss follows");

#endif

#endif
