// Random words of Philox4x32-10 as in src/number/philox.h: a function of seed, offset, stream and element.
#ifndef DW_RANDOM_WORD_CUH
#define DW_RANDOM_WORD_CUH

#include "tensor_types.cuh"

// The words of elements 4 * block to 4 * block + 3.
DEVICE void random_words(unsigned long long seed, unsigned long long offset, long long stream,
                         unsigned long long block, unsigned x[4]) {
    x[0] = (unsigned)block, x[1] = (unsigned)stream ^ (unsigned)(block >> 32) << 20;
    x[2] = (unsigned)offset, x[3] = (unsigned)(offset >> 32);
    unsigned key0 = (unsigned)seed, key1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned high0 = __umulhi(0xD2511F53u, x[0]), low0 = 0xD2511F53u * x[0];
        const unsigned high1 = __umulhi(0xCD9E8D57u, x[2]), low1 = 0xCD9E8D57u * x[2];
        x[0] = high1 ^ x[1] ^ key0, x[1] = low1, x[2] = high0 ^ x[3] ^ key1, x[3] = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
}

DEVICE unsigned random_word(unsigned long long seed, unsigned long long offset, long long stream,
                            unsigned long long element) {
    unsigned x[4];
    random_words(seed, offset, stream, element >> 2, x);
    const unsigned low = element & 1 ? x[1] : x[0], high = element & 1 ? x[3] : x[2];
    return element & 2 ? high : low;
}

#endif
