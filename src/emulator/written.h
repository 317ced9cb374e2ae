/* What has been written: a bit for each byte of global, shared or local memory, for each cell of tensor memory.
 * Clusters on other threads set bits of the same byte of global memory's.
 */
#ifndef DW_EMULATOR_WRITTEN_H
#define DW_EMULATOR_WRITTEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline void dw__set_written(uint8_t *bits, size_t first, size_t count, bool written) {
    while (count > 0) {
        const size_t within = first % 8, here = 8 - within < count ? 8 - within : count;
        const uint8_t mask = (uint8_t)(((1u << here) - 1) << within);
        uint8_t *at = &bits[first / 8];
        if (written && (__atomic_load_n(at, __ATOMIC_RELAXED) & mask) != mask)
            __atomic_fetch_or(at, mask, __ATOMIC_RELAXED);
        if (!written) __atomic_fetch_and(at, (uint8_t)~mask, __ATOMIC_RELAXED);
        first += here, count -= here;
        if (written && count >= 64 && first % 8 == 0) {
            const size_t whole = count / 8;
            memset(&bits[first / 8], 0xFF, whole);
            first += 8 * whole, count -= 8 * whole;
        }
    }
}

static inline uint32_t dw__count_unwritten(const uint8_t *bits, size_t first, size_t count) {
    uint32_t unwritten = 0;
    while (count > 0) {
        const size_t within = first % 8, here = 8 - within < count ? 8 - within : count;
        const uint8_t mask = (uint8_t)(((1u << here) - 1) << within);
        const unsigned missing =
            mask & ~(unsigned)__atomic_load_n(&bits[first / 8], __ATOMIC_RELAXED);
        if (missing) unwritten += (uint32_t)__builtin_popcount(missing);
        first += here, count -= here;
    }
    return unwritten;
}

#endif
