/* Who may compute a call of attention: entries with what they take, what they cost and how exact they are. */
#ifndef DW_ATTENTION_CANDIDATES_H
#define DW_ATTENTION_CANDIDATES_H

#include "kernel/cuda/attention.h"
#include "kernel/cuda/gpu_target.h"

/* Work of a call: every pair of query and key that a mask leaves counts 4 * head_dim operations forward. */
typedef struct dw__attention_work {
    double flops, bytes,
        score_bytes; /* score_bytes: of the matrix of scores, where one is stored */
} dw__attention_work;
dw__attention_work dw__attention_work_of(const dw_attention *call, bool backward);

typedef struct dw__attention_candidate {
    const char *name, *label, *source; /* label: as users know it */
    bool
        competes; /* measured where it takes a call; the others are for calls that nobody else takes */
    /* False, and why, where it does not take the call on that architecture. Looks at no address. */
    bool (*takes)(const dw_attention *call, bool backward, const dw__gpu_target *target,
                  char *reason, size_t bytes);
    /* Seconds, and where they come from; 0: nobody knows. */
    double (*cost)(const dw_attention *call, bool backward, const dw__gpu_target *target,
                   const char **from);
    /* What its results are held to: see docs/cuda.md. */
    const char *tolerance;
} dw__attention_candidate;
/* In the order in which they are taken where nothing has been measured. */
extern const dw__attention_candidate dw__attention_candidates[];
extern const size_t dw__attention_candidate_count;

/* One line of measurements: TFLOP/s of deepwell, cudnn, flash; each [0] forward, [1] backward. */
enum { DW__RATE_DEEPWELL, DW__RATE_CUDNN, DW__RATE_FLASH, DW__RATES };
typedef struct dw__attention_rate {
    int head_dim, rows;
    bool causal;
    double tflops[DW__RATES][2];
} dw__attention_rate;
extern const dw__attention_rate dw__attention_rates[];
extern const size_t dw__attention_rate_count;
extern const char dw__attention_rates_source[];

#endif
