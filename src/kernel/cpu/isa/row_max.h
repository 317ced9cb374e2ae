/* The maximum of a row, for the loops of softmax and of cross-entropy. */
#ifndef DW_ROW_MAX_H
#define DW_ROW_MAX_H

#include "kernel/cpu/isa/vector_math.h"

/* The largest element. NaNs are ignored; the sum of exponentials propagates them. */
static inline float max_row(int64_t n, const float *x) {
    vf low = v_set(-INFINITY), a = low, b = low, c = low, d = low;
    int64_t i = 0;
    for (; i + 4 * DW_LANES <= n; i += 4 * DW_LANES) {
        a = v_max(v_load(x + i), a);
        b = v_max(v_load(x + i + DW_LANES), b);
        c = v_max(v_load(x + i + 2 * DW_LANES), c);
        d = v_max(v_load(x + i + 3 * DW_LANES), d);
    }
    for (; i + DW_LANES <= n; i += DW_LANES) a = v_max(v_load(x + i), a);
    if (i < n) b = v_max(v_load_part_or(x + i, n - i, -INFINITY), b);
    return v_max_lane(v_max(v_max(a, b), v_max(c, d)));
}

#endif
