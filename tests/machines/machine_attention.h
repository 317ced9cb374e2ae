/* The cases of attention, by definition in FP64, with how far two machines may be apart. */
#ifndef COMPARE_ATTENTION_H
#define COMPARE_ATTENTION_H

#include "compare.h"
#include "kernel/cuda/attention.h"

/* Inputs. The last four make results that are exact in any order of sums. */
typedef enum attention_data {
    ATTENTION_ANY,     /* bell-shaped */
    ATTENTION_UNIFORM, /* q = 0: every probability is 1 / seq_len_kv, a power of two; integers */
    ATTENTION_PAIRED_Q, /* q = 0, and values whose pairs cancel, so that O = 0; integers: dQ is exact */
    ATTENTION_PAIRED_K, /* k = 0 likewise: dK is exact */
    ATTENTION_CHOSEN, /* each query picks one key, whose probability is 1, all others' 0; integers */
} attention_data;

typedef enum attention_mask { ATTENTION_ALL, ATTENTION_CAUSAL, ATTENTION_WINDOW } attention_mask;

typedef struct attention_case {
    dw_attention call;              /* but addresses */
    const int32_t *ends_q, *ends_k; /* packed: offsets */
    attention_data data;
    attention_mask mask;
    bool backward, by_definition, serial, quick;
} attention_case;

/* Tensors of the host as they lie on the device, in elements of the call's type; strides are the call's. */
typedef struct attention_tensors {
    uint16_t *q, *k, *v, *o, *d_o;
    float *lse;
} attention_tensors;

/* By definition, at the places of the outputs, and the bounds. */
typedef struct attention_results {
    double *o, *lse, *dq, *dk, *dv;
    double *o_bound, *lse_bound, *dq_bound, *dk_bound, *dv_bound;
} attention_results;

/* Forward fills o and lse, backward the others, from tensors->o and lse as well. */
dw_status attention_define(const attention_case *c, const attention_tensors *tensors,
                           attention_results *results);

#endif
