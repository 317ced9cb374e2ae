/* The cases of attention, their definition in FP64, and bounds of the differences between machines. */
#ifndef COMPARE_ATTENTION_H
#define COMPARE_ATTENTION_H

#include "compare.h"
#include "kernel/cuda/gpu_attention.h"

/* Kinds of inputs. With the last four, results are exact in any order of sums. */
typedef enum attention_data {
    ATTENTION_ANY,     /* bell-shaped */
    ATTENTION_UNIFORM, /* q = 0: every probability is 1 / seq_len_kv, a power of two; integers */
    /* Q = 0, and values in pairs that cancel, so that O = 0; integers: dQ is exact. */
    ATTENTION_PAIRED_Q,
    ATTENTION_PAIRED_K, /* k = 0, with values as for the previous kind: dK is exact */
    ATTENTION_CHOSEN,   /* each query selects one key, with probability 1; integers */
} attention_data;

typedef enum attention_mask { ATTENTION_ALL, ATTENTION_CAUSAL, ATTENTION_WINDOW } attention_mask;

typedef struct attention_case {
    dw_attention call;              /* the call, without addresses */
    const int32_t *ends_q, *ends_k; /* packed: the offsets */
    attention_data data;
    attention_mask mask;
    bool backward, by_definition, serial, quick;
} attention_case;

/* The tensors in host memory, in elements of the call's type, with the strides of the call. */
typedef struct attention_tensors {
    uint16_t *q, *k, *v, *o, *d_o;
    float *lse;
} attention_tensors;

/* The definition's results at the places of the outputs, and the bounds. */
typedef struct attention_results {
    double *o, *lse, *dq, *dk, *dv;
    double *o_bound, *lse_bound, *dq_bound, *dk_bound, *dv_bound;
} attention_results;

/* Forward fills o and lse. Backward fills the others, and reads tensors->o and lse as well. */
dw_status attention_define(const attention_case *c, const attention_tensors *tensors,
                           attention_results *results);

#endif
