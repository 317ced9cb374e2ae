/* Buffers of floats that notice writes outside of them. */
#ifndef DW_GUARDED_FLOATS_H
#define DW_GUARDED_FLOATS_H

#include "base/base.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static const float SENTINEL = 12345.678f;
enum { GUARD = 64 }; /* floats on either side of every buffer */

/* Returns `count` floats between guards, all of them SENTINEL. */
static inline float *guarded(int64_t count) {
    float *block = dw__malloc_aligned((size_t)(count + 2 * GUARD) * sizeof(float));
    assert_non_null(block);
    for (int64_t i = 0; i < count + 2 * GUARD; i++) block[i] = SENTINEL;
    return block + GUARD;
}

/* Checks the guards and frees the buffer. */
static inline void release(float *data, int64_t count) {
    for (int i = 0; i < GUARD; i++) {
        assert_true(data[-1 - i] == SENTINEL);
        assert_true(data[count + i] == SENTINEL);
    }
    dw__free_aligned(data - GUARD);
}

#endif
