/* A shuffled order that is computed, not stored: a bijection on [0, count) for each seed and epoch.
 *
 * A balanced Feistel network (Luby and Rackoff 1988) on the smallest 2*h bits that hold count - 1, h >= 1, is
 * applied until the result is below count (Black and Rogaway 2002, "cycle walking"; fewer than four times on
 * average). With x = left * 2^h + right, for round = 0 .. 7:
 *
 *     left, right = right, left ^ (philox(counter, key).word[0] & (2^h - 1))
 *     counter = {right, round, low32(epoch), high32(epoch)}      key = {low32(seed), high32(seed)}
 *
 * philox: number/philox.h. */
#ifndef DW_PERMUTATION_H
#define DW_PERMUTATION_H

#include <stdint.h>

/* The position of `index` in the shuffled order. Requires 0 <= index < count <= 2^62. */
int64_t dw__permute_index(int64_t index, int64_t count, uint64_t seed, uint64_t epoch);

/* The sequence that sample `sample` of a run reads, both counted from 0: sample mod count of epoch sample / count, in
 * that epoch's order, or with shuffle 0 in the files' order. */
int64_t dw__sample_sequence(int64_t sample, int64_t count, int shuffle, uint64_t seed);

#endif
