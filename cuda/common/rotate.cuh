// An element of a rotary position embedding, as rope.cu computes it and products that rotate their result do, so that both
// have the same bits.
#ifndef DW_ROTATE_CUH
#define DW_ROTATE_CUH

#include "tensor_types.cuh"

// x cosine + other across, where `other` is the other element of x's pair and `across` the sine, or the negative of it for
// the first element.
DEVICE float rotated(float x, float cosine, float other, float across) { return fmaf(x, cosine, other * across); }
DEVICE double rotated(double x, double cosine, double other, double across) { return fma(x, cosine, other * across); }

#endif
