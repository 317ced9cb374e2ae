/* Interval placement: which bytes of one arena each buffer gets.
 *
 * A buffer lives from step `first` to step `last`, both included. Two buffers whose lives meet
 * never share a byte. Finding the least peak is NP-hard (it is dynamic storage allocation); this is
 * the usual greedy: largest first, into the tightest hole that its whole life leaves free.
 */
#ifndef DW_PLACEMENT_H
#define DW_PLACEMENT_H

#include "base/base.h"

#define DW_PLACEMENT_MOST ((size_t)1 << 62)

typedef struct dw__interval {
    size_t bytes; /* 0: gets offset 0 and takes no room */
    uint32_t first, last;
    bool pinned;   /* goes to the bottom, where only pinned buffers lie one above the other */
    size_t offset; /* result, a multiple of the alignment */
} dw__interval;

/* Pinned intervals are stacked from 0 in the order of `first`, whether or not their lives meet: a
 * prefix of `pinned_bytes` holds them all. The others go into holes or above. `peak` is the end of
 * the highest buffer, to the byte. DW_SHAPE when it is beyond DW_PLACEMENT_MOST. */
dw_status dw__place(uint32_t count, dw__interval *items, size_t alignment, size_t *pinned_bytes,
                    size_t *peak);

/* Most bytes alive at one step, each rounded up to the alignment: no placement has a lower peak
 * (up to the padding after the highest buffer). */
dw_status dw__placement_bound(uint32_t count, const dw__interval *items, size_t alignment,
                              size_t *bytes);

#endif
