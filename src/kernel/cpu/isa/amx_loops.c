/* Packing for AMX and the tile GEMM: see amx.h. */
#include "kernel/cpu/amx.h"
#include <cpuid.h>
#include <immintrin.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- the machine ---------------------------------------------------------------------------------- */

static bool cpu_has_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    bool tiles = d & (1u << 24), tile_bf16 = d & (1u << 22);
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return false;
    bool vector_bf16 = a & (1u << 5);
    return tiles && tile_bf16 && vector_bf16;
}

/* Linux grants the tile registers on request (Documentation/arch/x86/xstate.rst). */
static bool kernel_permits(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

bool dw__amx_available(void) {
    static _Atomic int known = -1;
    int available = atomic_load_explicit(&known, memory_order_relaxed);
    if (available < 0) {
        available = dw__isa_allows_amx() && cpu_has_amx() && kernel_permits();
        atomic_store_explicit(&known, available, memory_order_relaxed);
    }
    return available;
}

/* The tile configuration in the instruction's memory format. It is static, because GCC 12's intrinsic
 * declares only its first bytes as read and would drop stores to the others. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config __attribute__((aligned(64))) = {
    .palette = 1,
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

void dw__amx_begin(void) { _tile_loadconfig(&tile_config); }

void dw__amx_end(void) { _tile_release(); }

/* ---- packing -------------------------------------------------------------------------------------- */

enum { PARTS = DW_AMX_PARTS, TILE_BYTES = 1024 };

typedef __m512i tile_rows[16];

static inline __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Splits 16 numbers into three parts. Returns false if one of them cannot be split. */
static inline bool split(__m512 x, __m256i parts[PARTS]) {
    const __m512 limit = _mm512_set1_ps(0x1p127f);
    bool splits = _mm512_cmp_ps_mask(_mm512_abs_ps(x), limit, _CMP_NLT_UQ) == 0;
    for (int part = 0; part < PARTS; part++) {
        parts[part] = (__m256i)_mm512_cvtneps_pbh(x);
        x = _mm512_sub_ps(x, widen(parts[part]));
    }
    return splits;
}

/* Packs sixteen numbers i of the operand at 32 values of k, with k contiguous: row i of tile `part` holds
 * number i. */
static bool split_along_k(int64_t count, int64_t k, const float *x, int64_t stride,
                          tile_rows parts[PARTS]) {
    __mmask16 low = k >= 16 ? 0xffff : (__mmask16)((1u << k) - 1);
    __mmask16 high = k >= 32 ? 0xffff : k > 16 ? (__mmask16)((1u << (k - 16)) - 1) : 0;
    bool splits = true;
    for (int64_t i = 0; i < 16; i++) {
        __m256i first[PARTS], second[PARTS];
        const float *row = x + (i < count ? i : 0) * stride;
        splits &= split(_mm512_maskz_loadu_ps(i < count ? low : 0, row), first);
        splits &= split(_mm512_maskz_loadu_ps(i < count ? high : 0, row + 16), second);
        for (int part = 0; part < PARTS; part++) {
            parts[part][i] =
                _mm512_inserti64x4(_mm512_castsi256_si512(first[part]), second[part], 1);
        }
    }
    return splits;
}

/* The same with contiguous numbers: row p of tile `part` holds the pairs (2p, 2p+1) of k of all 16 numbers. */
static bool split_along_index(int64_t count, int64_t k, const float *x, int64_t k_stride,
                              tile_rows parts[PARTS]) {
    __mmask16 valid = count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
    bool splits = true;
    for (int64_t pair = 0; pair < 16; pair++) {
        __m256i even[PARTS], odd[PARTS];
        const float *row = x + (2 * pair < k ? 2 * pair : 0) * k_stride;
        const float *next = 2 * pair + 1 < k ? row + k_stride : row;
        splits &= split(_mm512_maskz_loadu_ps(2 * pair < k ? valid : 0, row), even);
        splits &= split(_mm512_maskz_loadu_ps(2 * pair + 1 < k ? valid : 0, next), odd);
        for (int part = 0; part < PARTS; part++) {
            parts[part][pair] =
                _mm512_or_si512(_mm512_cvtepu16_epi32(even[part]),
                                _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd[part]), 16));
        }
    }
    return splits;
}

/* As split_along_k and split_along_index, for BF16 numbers. */
static void load_along_k(int64_t count, int64_t k, const uint16_t *x, int64_t stride,
                         tile_rows rows) {
    __mmask32 valid = k >= 32 ? 0xffffffff : (1u << k) - 1;
    for (int64_t i = 0; i < 16; i++)
        rows[i] = _mm512_maskz_loadu_epi16(i < count ? valid : 0, x + (i < count ? i : 0) * stride);
}

static void load_along_index(int64_t count, int64_t k, const uint16_t *x, int64_t k_stride,
                             tile_rows rows) {
    __mmask16 valid = count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1);
    for (int64_t pair = 0; pair < 16; pair++) {
        const uint16_t *row = x + (2 * pair < k ? 2 * pair : 0) * k_stride;
        const uint16_t *next = 2 * pair + 1 < k ? row + k_stride : row;
        __m256i even = _mm256_maskz_loadu_epi16(2 * pair < k ? valid : 0, row);
        __m256i odd = _mm256_maskz_loadu_epi16(2 * pair + 1 < k ? valid : 0, next);
        rows[pair] = _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                                     _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    }
}

/* Transposes 16 x 16 words: pairs of rows, then pairs of pairs, then quarters. */
static void transpose(tile_rows rows) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4g+c], quarter q, holds column 4q+c of rows 4g..4g+3. */
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88);
        __m512i high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        rows[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        rows[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
        low = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
        high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        rows[4 + c] = _mm512_shuffle_i32x4(low, high, 0x88);
        rows[12 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
    }
}

bool dw__amx_pack(bool as_a, int64_t count, int64_t k, const float *x, int64_t stride,
                  int64_t k_stride, void *panel) {
    bool along_k = k_stride == 1;
    bool splits = true;
    char *out = panel;
    for (int64_t start = 0; start < k; start += DW_AMX_STEP, out += DW_AMX_STEP_BYTES) {
        for (int half = 0; half < 2; half++) {
            tile_rows parts[PARTS];
            int64_t present = count - 16 * half;
            if (present <= 0) {
                memset(parts, 0, sizeof parts);
            } else {
                const float *from = x + 16 * half * stride + start * k_stride;
                splits &= along_k ? split_along_k(present, k - start, from, stride, parts)
                                  : split_along_index(present, k - start, from, k_stride, parts);
            }
            for (int part = 0; part < PARTS; part++) {
                if (along_k != as_a) transpose(parts[part]);
                memcpy(out + (2 * part + half) * TILE_BYTES, parts[part], TILE_BYTES);
            }
        }
    }
    return splits;
}

static void pack_bf16(bool as_a, int64_t count, int64_t k, const uint16_t *x, int64_t stride,
                      int64_t k_stride, char *out) {
    bool along_k = k_stride == 1;
    for (int64_t start = 0; start < k; start += DW_AMX_STEP) {
        for (int half = 0; half < 2; half++, out += TILE_BYTES) {
            tile_rows rows;
            int64_t present = count - 16 * half;
            if (present <= 0) {
                memset(rows, 0, sizeof rows);
            } else {
                const uint16_t *from = x + 16 * half * stride + start * k_stride;
                if (along_k)
                    load_along_k(present, k - start, from, stride, rows);
                else
                    load_along_index(present, k - start, from, k_stride, rows);
            }
            if (along_k != as_a) transpose(rows);
            memcpy(out, rows, TILE_BYTES);
        }
    }
}

/* If numbers are contiguous and values of k are far apart, packs some values of k for all panels before the
 * next ones, so that each row of memory is read to its end before another one begins. */
static int64_t slab_of(int64_t k, int64_t k_stride) { return k_stride == 1 ? k : 4 * DW_AMX_STEP; }

bool dw__amx_pack_panels(bool as_a, int64_t extent, int64_t k, const float *x, int64_t stride,
                         int64_t k_stride, void *panels, size_t panel_bytes) {
    int64_t slab = slab_of(k, k_stride);
    bool splits = true;
    for (int64_t start = 0; start < k; start += slab) {
        int64_t count = k - start < slab ? k - start : slab;
        for (int64_t at = 0; at < extent; at += DW_AMX_PANEL) {
            int64_t present = extent - at < DW_AMX_PANEL ? extent - at : DW_AMX_PANEL;
            char *panel = (char *)panels + (size_t)(at / DW_AMX_PANEL) * panel_bytes;
            splits &= dw__amx_pack(as_a, present, count, x + at * stride + start * k_stride, stride,
                                   k_stride, panel + dw__amx_panel_bytes(start));
        }
    }
    return splits;
}

void dw__amx_pack_bf16_panels(bool as_a, int64_t extent, int64_t k, const uint16_t *x,
                              int64_t stride, int64_t k_stride, void *panels, size_t panel_bytes) {
    int64_t slab = slab_of(k, k_stride);
    for (int64_t start = 0; start < k; start += slab) {
        int64_t count = k - start < slab ? k - start : slab;
        for (int64_t at = 0; at < extent; at += DW_AMX_PANEL) {
            int64_t present = extent - at < DW_AMX_PANEL ? extent - at : DW_AMX_PANEL;
            char *panel = (char *)panels + (size_t)(at / DW_AMX_PANEL) * panel_bytes;
            pack_bf16(as_a, present, count, x + at * stride + start * k_stride, stride, k_stride,
                      panel + dw__amx_panel_bytes_bf16(start));
        }
    }
}

/* ---- multiplying ---------------------------------------------------------------------------------- */

/* Tile registers 0 to 3 are accumulators, a 2 x 2 block of tiles; 4 and 5 hold two tiles of A, 6 and 7 two
 * tiles of B. */
#define LOAD_A(part)                                                                               \
    _tile_loadd(4, a_step + (2 * (part)) * TILE_BYTES, 64);                                        \
    _tile_loadd(5, a_step + (2 * (part) + 1) * TILE_BYTES, 64)
#define LOAD_B(part)                                                                               \
    _tile_loadd(6, b_step + (2 * (part)) * TILE_BYTES, 64);                                        \
    _tile_loadd(7, b_step + (2 * (part) + 1) * TILE_BYTES, 64)
#define MULTIPLY()                                                                                 \
    _tile_dpbf16ps(0, 4, 6);                                                                       \
    _tile_dpbf16ps(1, 4, 7);                                                                       \
    _tile_dpbf16ps(2, 5, 6);                                                                       \
    _tile_dpbf16ps(3, 5, 7)

#define CLEAR()                                                                                    \
    _tile_zero(0);                                                                                 \
    _tile_zero(1);                                                                                 \
    _tile_zero(2);                                                                                 \
    _tile_zero(3)
#define STORE(tile, stride)                                                                        \
    _tile_stored(0, tile, (int)(stride)*4);                                                        \
    _tile_stored(1, (tile) + 16, (int)(stride)*4);                                                 \
    _tile_stored(2, (tile) + 16 * (stride), (int)(stride)*4);                                      \
    _tile_stored(3, (tile) + 16 * (stride) + 16, (int)(stride)*4)

void dw__amx_multiply(int64_t steps, const void *a, const void *b, float *tile, int64_t stride) {
    CLEAR();
    /* Six multiplications need seven pairs of loads, because consecutive ones share an operand. */
    for (int64_t step = 0; step < steps; step++) {
        const char *a_step = (const char *)a + step * DW_AMX_STEP_BYTES;
        const char *b_step = (const char *)b + step * DW_AMX_STEP_BYTES;
        LOAD_A(2);
        LOAD_B(0);
        MULTIPLY(); /* a2 b0 */
        LOAD_A(1);
        MULTIPLY(); /* a1 b0 */
        LOAD_B(1);
        MULTIPLY(); /* a1 b1 */
        LOAD_A(0);
        MULTIPLY(); /* a0 b1 */
        LOAD_B(2);
        MULTIPLY(); /* a0 b2 */
        LOAD_B(0);
        MULTIPLY(); /* a0 b0 */
    }
    STORE(tile, stride);
}

void dw__amx_multiply_bf16(int64_t steps, const void *a, const void *b, float *tile,
                           int64_t stride) {
    CLEAR();
    for (int64_t step = 0; step < steps; step++) {
        const char *a_step = (const char *)a + step * (DW_AMX_STEP_BYTES / PARTS);
        const char *b_step = (const char *)b + step * (DW_AMX_STEP_BYTES / PARTS);
        LOAD_A(0);
        LOAD_B(0);
        MULTIPLY();
    }
    STORE(tile, stride);
}
