// Philox4x32-10 as in src/number/philox.h. The dropout mask is a function of (seed, offset, stream, element), so backward
// recomputes the mask of forward.
#ifndef DW_PHILOX_CUH
#define DW_PHILOX_CUH

#include "attention_params.h"

typedef struct philox_key {
    uint32 key0, key1, offset0, offset1, stream;
} philox_key;

DEVICE philox_key philox_key_of(const dw_attention_params &p) {
    uint64 seed = p.seed_memory ? p.seed_memory[0] : p.seed;
    uint64 offset = p.seed_memory ? p.seed_memory[1] : p.seed_offset;
    return {(uint32)seed, (uint32)(seed >> 32), (uint32)offset, (uint32)(offset >> 32), p.dropout_stream};
}

// Returns the four words of elements 4 * block .. 4 * block + 3.
DEVICE uint4 philox(philox_key key, uint64 block) {
    uint4 x = make_uint4((uint32)block, key.stream ^ (uint32)(block >> 32) << 20, key.offset0, key.offset1);
    uint32 key0 = key.key0, key1 = key.key1;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32 high0 = __umulhi(0xD2511F53u, x.x), low0 = 0xD2511F53u * x.x;
        uint32 high1 = __umulhi(0xCD9E8D57u, x.z), low1 = 0xCD9E8D57u * x.z;
        x = make_uint4(high1 ^ x.y ^ key0, low1, high0 ^ x.w ^ key1, low0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return x;
}

DEVICE uint32 philox_word(uint4 words, int index) {
    uint32 low = index & 1 ? words.y : words.x, high = index & 1 ? words.w : words.z;
    return index & 2 ? high : low;
}

// Bit 0: `element` is kept; bit 1: the next element is kept.
DEVICE uint32 philox_keeps_pair(philox_key key, uint64 element, uint32 threshold) {
    uint4 words = philox(key, element >> 2);
    int index = (int)(element & 3);
    uint32 first = philox_word(words, index);
    uint32 second = index < 3 ? philox_word(words, index + 1) : philox(key, (element >> 2) + 1).x;
    return ((first >> 8) >= threshold ? 1u : 0u) | ((second >> 8) >= threshold ? 2u : 0u);
}

#endif
