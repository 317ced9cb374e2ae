/* Bitmaps of written memory: one bit for each byte of global, shared or local memory and for each cell of tensor
 * memory. Bits are set atomically, because clusters on different threads set bits of the same byte for global memory.
 */
#ifndef DW_EMULATOR_WRITTEN_H
#define DW_EMULATOR_WRITTEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Uses 64-bit words where alignment allows. */
typedef uint64_t dw__written_word __attribute__((may_alias));
static inline bool dw__is_whole(const uint8_t *at, size_t within, size_t count) {
    return within == 0 && count >= 64 && (uintptr_t)at % sizeof(dw__written_word) == 0;
}

static inline void dw__set_written(uint8_t *bits, size_t first, size_t count, bool written) {
    while (count > 0) {
        uint8_t *at = &bits[first / 8];
        size_t within = first % 8, here = 64;
        if (dw__is_whole(at, within, count)) {
            dw__written_word *word = (dw__written_word *)(void *)at;
            const uint64_t all = written ? UINT64_MAX : 0;
            if (__atomic_load_n(word, __ATOMIC_RELAXED) != all)
                __atomic_store_n(word, all, __ATOMIC_RELAXED);
        } else {
            here = 8 - within < count ? 8 - within : count;
            const uint8_t mask = (uint8_t)(((1u << here) - 1) << within);
            if (written && (__atomic_load_n(at, __ATOMIC_RELAXED) & mask) != mask)
                __atomic_fetch_or(at, mask, __ATOMIC_RELAXED);
            if (!written) __atomic_fetch_and(at, (uint8_t)~mask, __ATOMIC_RELAXED);
        }
        first += here, count -= here;
    }
}

static inline uint32_t dw__count_unwritten(const uint8_t *bits, size_t first, size_t count) {
    uint32_t unwritten = 0;
    while (count > 0) {
        const uint8_t *at = &bits[first / 8];
        size_t within = first % 8, here = 64;
        uint64_t missing;
        if (dw__is_whole(at, within, count)) {
            missing =
                ~__atomic_load_n((const dw__written_word *)(const void *)at, __ATOMIC_RELAXED);
        } else {
            here = 8 - within < count ? 8 - within : count;
            missing =
                ((1u << here) - 1) << within & ~(unsigned)__atomic_load_n(at, __ATOMIC_RELAXED);
        }
        if (missing) unwritten += (uint32_t)__builtin_popcountll(missing);
        first += here, count -= here;
    }
    return unwritten;
}

#endif
