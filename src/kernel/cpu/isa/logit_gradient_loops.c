/* Inner loops of the gradient of cross-entropy with respect to its logits. */
#include "kernel/cpu/isa/vector_math.h"
#include "kernel/cpu/logit_gradient.h"

static void row(int64_t count, const float *logits, float lse, float factor, float smooth,
                float *out) {
    int64_t j = 0;
    for (; j + DW_LANES <= count; j += DW_LANES) {
        v_store(out + j, factor * (v_exp(v_load(logits + j) - lse) - smooth));
    }
    if (j < count) {
        vf x = v_load_part(logits + j, count - j);
        v_store_part(out + j, factor * (v_exp(x - lse) - smooth), count - j);
    }
}

/* Rows are summed in parts. Equal terms are common here, and a long sum would round them in the same
 * direction each time. */
enum { PART = 128 };

static void column_sums(int64_t rows, int64_t columns, const float *x, int64_t stride,
                        bool accumulate, float *sums) {
    for (int64_t j = 0; j < columns; j += DW_LANES) {
        int64_t left = columns - j;
        vf sum = {0};
        if (accumulate) sum = left < DW_LANES ? v_load_part(sums + j, left) : v_load(sums + j);
        for (int64_t first = 0; first < rows; first += PART) {
            int64_t last = rows - first < PART ? rows : first + PART;
            vf part = {0};
            for (int64_t i = first; i < last; i++) {
                const float *at = x + i * stride + j;
                part += left < DW_LANES ? v_load_part(at, left) : v_load(at);
            }
            sum += part;
        }
        if (left < DW_LANES) {
            v_store_part(sums + j, sum, left);
        } else {
            v_store(sums + j, sum);
        }
    }
}

const dw__logit_gradient_loops DW_ISA_NAME(dw__logit_gradient_loops) = {
    .row = row,
    .column_sums = column_sums,
};
