/* The widest float vector of the instruction set that the file is compiled for, in GCC's vector
 * extensions: operators work lane by lane, and a * b + c becomes a fused multiply-add where the
 * hardware has one. */
#ifndef DW_LANES_H
#define DW_LANES_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

#define DW_INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
/* The same in memory that is aligned for a float only. */
typedef float lanes_in_memory
    __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

DW_INLINE lanes lanes_load(const float *from) { return *(const lanes_in_memory *)from; }
DW_INLINE void lanes_store(float *to, lanes value) { *(lanes_in_memory *)to = value; }
DW_INLINE lanes lanes_of(float value) { return value - (lanes){0}; }
/* The first `count` (less than LANES) elements; zeros behind them. */
DW_INLINE lanes lanes_load_some(const float *from, int64_t count) {
    float padded[LANES] = {0};
    memcpy(padded, from, (size_t)count * sizeof(float));
    return lanes_load(padded);
}
DW_INLINE void lanes_store_some(float *to, lanes value, int64_t count) {
    float whole[LANES];
    lanes_store(whole, value);
    memcpy(to, whole, (size_t)count * sizeof(float));
}

#endif
