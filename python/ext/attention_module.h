/* Converts PyTorch's attention calls to libdeepwell's dw_attention. There are two callers: operators of PyTorch's
 * dispatcher (attention_operators.c) and direct calls with DLPack's exchange API (attention_calls.c). */
#ifndef DW_PYTHON_ATTENTION_H
#define DW_PYTHON_ATTENTION_H

#include "deepwell/attention.h"
#include "ext.h"

/* A tensor, owned by the caller. */
typedef struct tensor_view {
    void *data;
    int64_t rank;
    const int64_t *sizes, *strides; /* elements */
    int dtype;                      /* dw_dtype, or -1 if attention does not support it */
    int32_t device;                 /* index */
} tensor_view;

/* All arguments of a call that are not tensors. */
typedef struct attention_options {
    double scale, softcap;
    int64_t window_left, window_right;
    bool bottom_right;
    double dropout;
    int64_t longest_q, longest_k; /* packed */
    bool deterministic;
} attention_options;

/* The tensors of a call; data NULL if absent. Ranks: q, k, v, o and their gradients 4, [batch, heads, rows, head_dim],
 * or packed 3, [total rows, heads, head_dim]; lse 3, packed [heads, total rows]; offsets 1; seed 1. */
typedef struct attention_tensors {
    tensor_view q, k, v, o, lse, offsets_q, offsets_k, seed, d_o, dq, dk, dv;
} attention_tensors;

enum { ATTENTION_RANK = 4 };

/* Returns whether libdeepwell can read the tensor in place: contiguous rows, other strides and address multiples of 16
 * bytes. */
bool attention_lies_well(const tensor_view *tensor);
/* Sets the strides of a result like `like`: the same order of batch, heads and rows, no gaps. operators.py has the same
 * rule. */
void attention_strides_like(const tensor_view *like, int64_t strides[ATTENTION_RANK]);
/* Checks what a kernel cannot check, and fills all of `call` except workspace and stream. */
dw_status attention_describe(const attention_tensors *tensors, const attention_options *options,
                             bool backward, dw_attention *call);
/* Returns the message of the last attention_describe that failed on this thread. */
const char *attention_complaint(void);

/* Returns whether this is PyTorch's current GPU; false if attention_register found no PyTorch. */
bool attention_device_is_current(int32_t device);

/* Returns whether Deepwell is known to run such a call. True for every call while nothing is measured
 * (attention_watch). Costs one lookup in a table. */
bool attention_is_settled(const dw_attention *call, bool gradients, int32_t device);
/* Returns whether another backend is known to run some class of calls. */
bool attention_has_alternatives(void);

/* Return new uninitialized tensors of PyTorch's on its current GPU: like `like`, and lse of `q` (if not wanted: None,
 * and an empty view). NULL with an exception set. */
PyObject *attention_new_like(const tensor_view *like, tensor_view *view);
PyObject *attention_new_lse(const tensor_view *q, bool wanted, tensor_view *view);
/* Returns a tensor of this many bytes, which may be 0. */
PyObject *attention_new_bytes(int64_t bytes, int32_t device, tensor_view *view);

extern PyMethodDef attention_functions[];          /* attention_calls.c */
extern PyMethodDef attention_operator_functions[]; /* attention_operators.c */
extern PyMethodDef attention_decision_functions[]; /* attention_decide.c */

#endif
