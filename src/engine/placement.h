/* Interval placement: assigns bytes of an arena's segments to buffers.
 *
 * A buffer lives from step `first` to step `last`, both included. Buffers whose lives overlap never
 * share a byte. Finding the lowest peak is NP-hard (dynamic storage allocation). This is the usual
 * greedy algorithm: largest first, into the tightest hole that is free for the buffer's whole life.
 *
 * Segments are separate ranges of memory, and a buffer lies in one of them. Segment 0 lasts longest and the others are
 * released before it in descending order, so a buffer is limited to the segments up to `most`. Behind these there may
 * be late segments, which exist for a part of the time only.
 */
#ifndef DW_PLACEMENT_H
#define DW_PLACEMENT_H

#include "base/base.h"

#define DW_PLACEMENT_MOST ((size_t)1 << 62)
enum { DW_PLACEMENT_SEGMENTS = 15 };

typedef struct dw__interval {
    size_t bytes; /* 0: gets offset 0 and no memory */
    uint32_t first, last;
    bool pinned;      /* is stacked from the bottom of segment `most`, see dw__place */
    uint32_t most;    /* the last segment that may hold it, below the number of segments */
    uint32_t late;    /* a late segment that may hold it too, if it is not pinned; 0: none */
    uint32_t segment; /* result */
    size_t offset;    /* result: in its segment, a multiple of the alignment */
} dw__interval;

typedef struct dw__extent {
    size_t bytes;        /* the end of the segment's highest buffer, to the byte */
    size_t pinned_bytes; /* the end of its pinned buffers */
} dw__extent;

/* Stacks the pinned intervals of each segment from 0 in the order of `first`, even if their lives do not overlap, so
 * that the first `pinned_bytes` hold them all. The others go into holes or above, those with the fewest segments to
 * choose from first. One that may lie in a late segment goes there if it finds no hole elsewhere. `extents`: one for
 * each of the `segments`. `alignment` is a power of two. DW_SHAPE: a segment would exceed DW_PLACEMENT_MOST. */
dw_status dw__place(uint32_t count, dw__interval *items, size_t alignment, uint32_t segments,
                    dw__extent *extents);

/* Returns the most bytes alive at one step, each buffer rounded up to the alignment. No placement has
 * a lower peak (up to the padding after the highest buffer). */
dw_status dw__placement_bound(uint32_t count, const dw__interval *items, size_t alignment,
                              size_t *bytes);

#endif
