/* A generator of random numbers whose sequence is the same on every machine. */
#ifndef DW_RANDOM_NUMBERS_H
#define DW_RANDOM_NUMBERS_H

#include <stdint.h>

static uint64_t random_state;

static inline uint64_t random_step(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return random_state;
}

/* 32 random bits. */
static inline uint32_t next_random(void) { return (uint32_t)(random_step() >> 32); }

/* In [-1, 1). */
static inline float random_float(void) {
    return (float)((double)(random_step() >> 40) / (1 << 23) - 1.0);
}

#endif
