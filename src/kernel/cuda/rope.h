/* Rotary position embedding on a GPU: what rope.c shares with products that rotate their result. */
#ifndef DW_ROPE_H
#define DW_ROPE_H

#include "common/rope_params.h"
#include "kernel/cuda/iteration.h"

/* The axes of a call outside of its rows, with the strides of x, cos, sin and y, in the order of DW_ROPE_X. */
void dw__rope_axes(const dw__call *call, dw__iteration *it);

#endif
