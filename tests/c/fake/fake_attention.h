/* Helpers for tests of attention up to the fake driver. */
#ifndef FAKE_ATTENTION_H
#define FAKE_ATTENTION_H

#include "fake_gpu.h"
#include "kernel/cuda/gpu_attention.h"

/* Number of tensor maps among a kernel's parameters. */
static inline int maps_of_attention(const char *name) {
    if (strcmp(name, "sm90_attention_forward") == 0) return 3;
    if (strcmp(name, "sm100_attention_forward") == 0) return 4;
    return strcmp(name, "sm90_attention_backward") == 0 ? 4 : 0;
}

static inline int begin_attention(void **state) {
    begin_on_fake_gpu(state);
    fake->maps_of = maps_of_attention;
    fake->params_bytes = sizeof(dw_attention_params);
    return 0;
}

/* BSHD tensors of [3, 4 or 2, 1000 or 900, 128], at addresses that identify each tensor. */
static inline dw_attention_tensor tensor(int number, int heads, int rows, int head_dim) {
    return (dw_attention_tensor){(void *)((uintptr_t)number << 32),
                                 (int64_t)heads * rows * head_dim, head_dim,
                                 (int64_t)heads * head_dim};
}

static inline dw_attention plain_call(void) {
    return (dw_attention){
        .struct_size = sizeof(dw_attention),
        .dtype = DW_BF16,
        .batch = 3,
        .heads_q = 4,
        .heads_kv = 2,
        .seq_len_q = 1000,
        .seq_len_kv = 900,
        .head_dim = 128,
        .scale = 0.125f,
        .window_left = -1,
        .window_right = -1,
        .q = tensor(1, 4, 1000, 128),
        .k = tensor(2, 2, 900, 128),
        .v = tensor(3, 2, 900, 128),
        .o = tensor(4, 4, 1000, 128),
        .d_o = tensor(5, 4, 1000, 128),
        .dq = tensor(6, 4, 1000, 128),
        .dk = tensor(7, 2, 900, 128),
        .dv = tensor(8, 2, 900, 128),
        .lse = (float *)((uintptr_t)9 << 32),
        .workspace = (void *)((uintptr_t)10 << 32),
        .workspace_bytes = SIZE_MAX,
        .stream = &folder,
    };
}

static inline dw_attention_params params_of(const fake_launch *launch) {
    dw_attention_params params;
    memcpy(&params, launch->params, sizeof params);
    return params;
}

#endif
