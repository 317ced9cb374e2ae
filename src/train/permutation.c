#include "train/permutation.h"
#include "number/philox.h"

enum { ROUNDS = 8 };

static uint64_t feistel(uint64_t x, int half, uint64_t seed, uint64_t epoch) {
    uint32_t mask = (uint32_t)((UINT64_C(1) << half) - 1);
    uint32_t left = (uint32_t)(x >> half), right = (uint32_t)x & mask;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        dw__philox_words counter = {{right, round, (uint32_t)epoch, (uint32_t)(epoch >> 32)}};
        dw__philox_words bits = dw__philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
        uint32_t next = left ^ (bits.word[0] & mask);
        left = right;
        right = next;
    }
    return (uint64_t)left << half | right;
}

int64_t dw__permute_index(int64_t index, int64_t count, uint64_t seed, uint64_t epoch) {
    int half = 1;
    while (half < 31 && (INT64_C(1) << 2 * half) < count) half++;
    uint64_t x = (uint64_t)index;
    do x = feistel(x, half, seed, epoch);
    while (x >= (uint64_t)count);
    return (int64_t)x;
}

int64_t dw__sample_sequence(int64_t sample, int64_t count, int shuffle, uint64_t seed) {
    int64_t index = sample % count;
    return shuffle ? dw__permute_index(index, count, seed, (uint64_t)(sample / count)) : index;
}
