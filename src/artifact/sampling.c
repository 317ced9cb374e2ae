/* Choice of the next token from its logits. */
#include "base/base.h"
#include "deepwell/generate.h"
#include "number/philox.h"
#include <math.h>
#include <stdlib.h>

typedef struct candidate {
    double weight; /* exp((logit - largest) / temperature) */
    int64_t id;
} candidate;

static dw_status check(const float *logits, int64_t count, const dw_sampling *s) {
    if (!logits || !s || count < 1)
        return dw__fail(DW_INVALID_ARGUMENT, "dw_sample: an argument is NULL or empty");
    if (!(s->temperature >= 0.0 && s->temperature < HUGE_VAL))
        return dw__fail(DW_INVALID_ARGUMENT, "temperature is %g; expected 0 or more",
                        s->temperature);
    if (s->top_k < 0)
        return dw__fail(DW_INVALID_ARGUMENT, "top_k is %lld; expected 0 (all) or more",
                        (long long)s->top_k);
    if (!(s->top_p > 0.0 && s->top_p <= 1.0))
        return dw__fail(DW_INVALID_ARGUMENT, "top_p is %g; expected above 0, to 1", s->top_p);
    return DW_OK;
}

static dw_status find_largest(const float *logits, int64_t count, int64_t *largest) {
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isnan(logits[i]))
            return dw__fail(DW_INVALID_ARGUMENT,
                            "the logit of token %lld is NaN; check the model's weights",
                            (long long)i);
        if (logits[i] > logits[best]) best = i;
    }
    if (!isfinite(logits[best]))
        return dw__fail(DW_INVALID_ARGUMENT,
                        "the largest logit is %g; expected a finite number: check the model's "
                        "weights",
                        (double)logits[best]);
    *largest = best;
    return DW_OK;
}

static int by_weight(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    if (a->weight != b->weight) return a->weight > b->weight ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

/* Uniform in [0, 1), of 53 bits. */
static double random_number(uint64_t seed, uint64_t step) {
    dw__philox_words bits =
        dw__philox(dw__philox_counter((int64_t)step, 0, 0), (uint32_t)seed, (uint32_t)(seed >> 32));
    uint64_t whole = (uint64_t)bits.word[0] << 32 | bits.word[1];
    return (double)(whole >> 11) * 0x1p-53;
}

static int64_t draw(const candidate *candidates, int64_t count, double total, double random) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        sum += candidates[i].weight;
        if (sum > random * total) return candidates[i].id;
    }
    return candidates[count - 1].id;
}

/* Keeps the candidates that top_k and top_p allow, the most likely first. Returns their number. */
static int64_t restrict_candidates(candidate *candidates, int64_t count, const dw_sampling *s,
                                   double *total) {
    if (s->top_k == 0) {
        /* Tokens whose probabilities are this small have less than 1 - top_p together. */
        double least = (1.0 - s->top_p) * *total / (double)count;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (candidates[i].weight >= least) candidates[kept++] = candidates[i];
        count = kept;
    }
    qsort(candidates, (size_t)count, sizeof *candidates, by_weight);
    if (s->top_k && s->top_k < count) count = s->top_k;
    if (s->top_k) {
        *total = 0.0;
        for (int64_t i = 0; i < count; i++) *total += candidates[i].weight;
    }
    double sum = 0.0, wanted = s->top_p * *total;
    int64_t kept = 0;
    while (kept < count && (kept == 0 || sum < wanted)) sum += candidates[kept++].weight;
    if (s->top_p == 1.0) kept = count;
    *total = 0.0;
    for (int64_t i = 0; i < kept; i++) *total += candidates[i].weight;
    return kept;
}

dw_status dw_sample(const float *logits, int64_t count, const dw_sampling *sampling, uint64_t step,
                    int64_t *id) {
    int64_t largest = 0, kept = count;
    double total = 0.0;
    DW_RETURN_IF_FAILED(check(logits, count, sampling));
    DW_RETURN_IF_FAILED(find_largest(logits, count, &largest));
    *id = largest;
    if (sampling->temperature == 0.0 || sampling->top_k == 1) return DW_OK;
    candidate *candidates = dw__malloc((size_t)count * sizeof *candidates);
    if (!candidates) return dw__fail_memory("sampling", (size_t)count * sizeof *candidates);
    for (int64_t i = 0; i < count; i++) {
        double below = ((double)logits[i] - logits[largest]) / sampling->temperature;
        candidates[i] = (candidate){exp(below), i};
        total += candidates[i].weight;
    }
    if (sampling->top_k || sampling->top_p < 1.0)
        kept = restrict_candidates(candidates, count, sampling, &total);
    *id = draw(candidates, kept, total, random_number(sampling->seed, step));
    dw__free(candidates);
    return DW_OK;
}
