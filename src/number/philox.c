/* Runs of uniform random numbers. */
#include "number/philox.h"

void dw__philox_fill(int64_t seed0, int64_t seed1, int64_t stream, uint64_t first, int64_t count,
                     float *out) {
    int64_t done = 0;
    for (; done < count && (first + (uint64_t)done) % 4 != 0; done++)
        out[done] = dw__philox_uniform(seed0, seed1, stream, first + (uint64_t)done);
    for (; count - done >= 4; done += 4)
        dw__philox_uniform4(seed0, seed1, stream, (first + (uint64_t)done) / 4, out + done);
    for (; done < count; done++)
        out[done] = dw__philox_uniform(seed0, seed1, stream, first + (uint64_t)done);
}
