/* Interval placement: assigns bytes of one arena to buffers.
 *
 * A buffer lives from step `first` to step `last`, both included. Buffers whose lives overlap never
 * share a byte. Finding the lowest peak is NP-hard (dynamic storage allocation). This is the usual
 * greedy algorithm: largest first, into the tightest hole that is free for the buffer's whole life.
 */
#ifndef DW_PLACEMENT_H
#define DW_PLACEMENT_H

#include "base/base.h"

#define DW_PLACEMENT_MOST ((size_t)1 << 62)

typedef struct dw__interval {
    size_t bytes; /* 0: gets offset 0 and no memory */
    uint32_t first, last;
    bool pinned;   /* is stacked from the bottom, see dw__place */
    size_t offset; /* result, a multiple of the alignment */
} dw__interval;

/* Stacks pinned intervals from 0 in the order of `first`, even if their lives do not overlap, so that
 * the first `pinned_bytes` hold them all. The others go into holes or above. `peak` is the end of the
 * highest buffer, to the byte. `alignment` is a power of two. DW_SHAPE: `peak` would exceed
 * DW_PLACEMENT_MOST. */
dw_status dw__place(uint32_t count, dw__interval *items, size_t alignment, size_t *pinned_bytes,
                    size_t *peak);

/* Returns the most bytes alive at one step, each buffer rounded up to the alignment. No placement has
 * a lower peak (up to the padding after the highest buffer). */
dw_status dw__placement_bound(uint32_t count, const dw__interval *items, size_t alignment,
                              size_t *bytes);

#endif
