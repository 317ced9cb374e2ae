/* Launch parameters of the kernels of AdamW (adamw.cu). Plain C, read by the host and by device code.
 *
 * Tensors are described in the launch parameters, because a CUDA graph keeps those: a table in device memory would have
 * to be copied there before every replay. Up to TENSORS tensors share a launch. 4 KB of parameters work everywhere, and
 * 32 KB from CUDA 12.1 on. A tensor is divided into chunks of DW_ADAMW_CHUNK elements, and each block of a launch
 * processes one. */
#ifndef DW_ADAMW_PARAMS_H
#define DW_ADAMW_PARAMS_H

#define DW_ADAMW_THREADS 256
#define DW_ADAMW_CHUNK 4096
/* Elements that share a scale, and threads that share such a block. */
#define DW_ADAMW_BLOCK_ELEMENTS 128
#define DW_ADAMW_BLOCK_THREADS 16
/* The two sizes of a launch's table, and those of tables with extra addresses: of copies, of scales. */
#define DW_ADAMW_FEW 80
#define DW_ADAMW_MANY 640
#define DW_ADAMW_FEW_EXTRA 56
#define DW_ADAMW_MANY_EXTRA 448
/* Tensors of a launch of adamw_begin, and its threads: it has one block. */
#define DW_ADAMW_STEPS 256
#define DW_ADAMW_BEGIN_THREADS 1024

/* The factors of a step, which adamw_begin computes once for all updates. */
typedef struct dw_adamw_common {
    float unscale; /* 1 / *grad_scale */
    float clip;    /* multiplies unscaled gradients */
    float norm;    /* of all unscaled gradients; 0 if it is not computed */
    int skip;      /* 1: nothing changes */
} dw_adamw_common;

/* What a step tells its caller (dw_adamw_gpu_outcome). */
typedef struct dw_adamw_told {
    double norm;
    int applied;
} dw_adamw_told;

/* The factors of a tensor, which adamw_begin computes from the tensor's step. */
typedef struct dw_adamw_scalars {
    float step_size;    /* lr / (1 - beta1^step) */
    float inverse_root; /* 1 / sqrt(1 - beta2^step) */
    unsigned step, unused;
} dw_adamw_scalars;

/* The launch of adamw_begin. */
typedef struct dw_adamw_begin_params {
    dw_adamw_common *common;
    dw_adamw_scalars *scalars; /* [tensors] */
    const double *partials;    /* sums of squares, [partial_count], added if `first` */
    const float *grad_scale;   /* NULL: 1 */
    const float *found_inf;    /* NULL: 0 */
    float *norm;               /* receives the norm; NULL: unwanted */
    dw_adamw_told *told;       /* NULL: unwanted */
    const float *lr_at;        /* NULL: lr */
    double lr, beta1, beta2;
    double max_norm; /* negative: gradients are not clipped */
    long long partial_count;
    int first;       /* 1: the first launch of a step, which writes *common */
    int finite_only; /* 1: a norm that is not finite skips the step */
    int tensors;
    float *step[DW_ADAMW_STEPS]; /* each is incremented */
} dw_adamw_begin_params;

/* Launches of adamw_norm and adamw_update. The table's length is the define TENSORS of the compiled variant. The host
 * fills the larger one, of which a launch reads what its variant has. EXTRAS addresses of each tensor follow the table
 * of the variant: of the copy, if it has one, and of the scales, if it has some. */
#ifndef TENSORS
#define TENSORS DW_ADAMW_MANY
#endif
typedef struct dw_adamw_entry {
    void *p, *g, *m, *v; /* adamw_norm reads g alone */
    long long count;
    int first_chunk; /* in the launch; a tensor without elements has no chunks */
    unsigned stream; /* of random bits */
} dw_adamw_entry;
typedef struct dw_adamw_params {
    const dw_adamw_common *common;
    const dw_adamw_scalars *scalars; /* [tensors] */
    double *partials;   /* adamw_norm: of each chunk of the launch, the sum of squares */
    const float *lr_at; /* NULL: lr */
    unsigned long long seed;
    float lr, beta1, beta2, weight_decay, eps;
    int maximize;
    int store_gradients; /* 1: unscaled gradients replace the gradients */
    int tensors;
    dw_adamw_entry tensor[TENSORS];
#ifdef EXTRAS
#if EXTRAS > 0
    void *extra[TENSORS * EXTRAS]; /* of a tensor: EXTRAS in a row */
#endif
#endif
} dw_adamw_params;

#endif
