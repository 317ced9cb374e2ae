// Kernels of a training step in one CUDA graph that belong neither to the model nor to AdamW. They compute the step's
// loss, add the gradients of micro-batches, and round parameters that were loaded.
//
// Defines: ELEMENT, the type of the model's parameters and gradients (element_types.h).
//
// Bytes per element: train_add reads a gradient and its sum and writes the sum; train_round reads FP32 and writes ELEMENT.

#include "tensor_types.cuh"
#include "train_step_params.h"

typedef element_of<ELEMENT> element;
typedef element::stored stored;

template <class T> struct alignas(16) vector_of {
    T x[DW_TRAIN_VECTOR];
};

// The first element of a thread's vector, or -1 behind the last.
DEVICE long long vector_of_thread(long long count) {
    const long long at = ((long long)blockIdx.x * DW_TRAIN_THREADS + (long long)threadIdx.x) * DW_TRAIN_VECTOR;
    return at < count ? at : -1;
}

// One thread. Runs after train_add of the same micro-batch.
extern "C" __global__ void train_loss(const __grid_constant__ dw_train_loss_params p) {
    const float loss = *p.loss;
    const bool finite = loss - loss == 0.0f;
    p.numbers->loss += (double)loss / p.batches;
    p.numbers->micro++;
    const bool too_large = p.numbers->micro == (int)p.batches && p.numbers->loss > p.numbers->limit;
    if (!finite || too_large || *p.data_error != 0) p.numbers->found_inf = 1.0f;
}

extern "C" __global__ void __launch_bounds__(DW_TRAIN_THREADS) train_add(const __grid_constant__ dw_train_add_params p) {
    const long long at = vector_of_thread(p.count);
    if (at < 0) return;
    const bool first = p.numbers->micro == 0;
    const vector_of<stored> part = *(const vector_of<stored> *)((const stored *)p.part + at);
    vector_of<float> sum;
    if (!first) sum = *(const vector_of<float> *)(p.sum + at);
#pragma unroll
    for (int i = 0; i < DW_TRAIN_VECTOR; i++) {
        const float x = element::load(part.x, i);
        sum.x[i] = first ? x : sum.x[i] + x;
    }
    *(vector_of<float> *)(p.sum + at) = sum;
}

extern "C" __global__ void __launch_bounds__(DW_TRAIN_THREADS)
    train_round(const __grid_constant__ dw_train_round_params p) {
    const long long at = vector_of_thread(p.count);
    if (at < 0) return;
    const vector_of<float> from = *(const vector_of<float> *)(p.from + at);
    vector_of<stored> to;
#pragma unroll
    for (int i = 0; i < DW_TRAIN_VECTOR; i++) element::store(to.x, i, from.x[i]);
    *(vector_of<stored> *)((stored *)p.to + at) = to;
}
