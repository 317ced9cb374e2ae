/* An attention call as PyTorch makes it, turned into libdeepwell's dw_attention. Two ways lead here: operators of
 * PyTorch's dispatcher (attention_operators.c) and direct calls with DLPack's exchange (attention_calls.c). */
#ifndef DW_PYTHON_ATTENTION_H
#define DW_PYTHON_ATTENTION_H

#include "deepwell/attention.h"
#include "ext.h"

/* A tensor that someone else owns. */
typedef struct tensor_view {
    void *data;
    int64_t rank;
    const int64_t *sizes, *strides; /* elements */
    int dtype;                      /* dw_dtype, or -1 for one that attention does not take */
    int32_t device;                 /* index */
} tensor_view;

/* Everything of a call that is no tensor. */
typedef struct attention_options {
    double scale, softcap;
    int64_t window_left, window_right;
    bool bottom_right;
    double dropout;
    int64_t longest_q, longest_k; /* packed */
    bool deterministic;
} attention_options;

/* Views of a call; data NULL where there is none. Ranks: q, k, v, o and their gradients 4, [batch, heads, rows,
 * head_dim], or packed 3, [rows in all, heads, head_dim]; lse 3, packed [heads, rows in all]; offsets 1; seed 1. */
typedef struct attention_tensors {
    tensor_view q, k, v, o, lse, offsets_q, offsets_k, seed, d_o, dq, dk, dv;
} attention_tensors;

enum { ATTENTION_RANK = 4 };

/* Whether libdeepwell takes the tensor as it lies: rows contiguous, other strides and the address of 16 bytes. */
bool attention_lies_well(const tensor_view *tensor);
/* Strides of a result beside `like`: the same order of batch, heads and rows, without gaps. Also in operators.py. */
void attention_strides_like(const tensor_view *like, int64_t strides[ATTENTION_RANK]);
/* Checks what a kernel could not; fills all of `call` but workspace and stream. */
dw_status attention_describe(const attention_tensors *tensors, const attention_options *options,
                             bool backward, dw_attention *call);
/* The message of the last attention_describe that failed on this thread. */
const char *attention_complaint(void);

/* Whether PyTorch's current GPU is this one. False where attention_register has found no PyTorch. */
bool attention_device_is_current(int32_t device);

/* Whether Python has settled that such a call is Deepwell's, so that nobody need be asked: true of every call while
 * nothing is measured (attention_watch). One look-up in a table. */
bool attention_is_settled(const dw_attention *call, bool gradients, int32_t device);
/* Whether it has settled of any class that it is not. */
bool attention_has_rivals(void);

/* New tensors of PyTorch's, uninitialized, on PyTorch's current GPU: beside `like`, and lse of `q` (not wanted:
 * None, and an empty view). NULL with an exception set. */
PyObject *attention_new_like(const tensor_view *like, tensor_view *view);
PyObject *attention_new_lse(const tensor_view *q, bool wanted, tensor_view *view);
/* So many bytes, none included. */
PyObject *attention_new_bytes(int64_t bytes, int32_t device, tensor_view *view);

extern PyMethodDef attention_functions[];          /* attention_calls.c */
extern PyMethodDef attention_operator_functions[]; /* attention_operators.c */
extern PyMethodDef attention_decision_functions[]; /* attention_decide.c */

#endif
