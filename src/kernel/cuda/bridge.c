/* Attention behind one C function with raw pointers. libdw_fmha_bridge_min.so contains only this file, for programs
 * that load it by that name. */
#include "deepwell/attention.h"
#include <math.h>
#include <stddef.h>

static dw_attention_tensor contiguous(void *data, int heads, int rows, int head_dim) {
    return (dw_attention_tensor){
        .data = data,
        .batch = (int64_t)heads * rows * head_dim,
        .head = (int64_t)rows * head_dim,
        .row = head_dim,
    };
}

int dw_fmha_bf16_forward(void *q, void *k, void *v, void *o, int B, int H, int Q, int K, int D,
                         int causal) {
    dw_attention call = {
        .struct_size = sizeof call,
        .dtype = DW_BF16,
        .batch = B,
        .heads_q = H,
        .heads_kv = H,
        .seq_len_q = Q,
        .seq_len_kv = K,
        .head_dim = D,
        .scale = D > 0 ? (float)(1.0 / sqrt((double)D)) : 0.0f,
        .window_left = -1,
        .window_right = causal ? 0 : -1,
        .bottom_right = true,
        .q = contiguous(q, H, Q, D),
        .k = contiguous(k, H, K, D),
        .v = contiguous(v, H, K, D),
        .o = contiguous(o, H, Q, D),
    };
    return (int)dw_attention_forward(&call);
}
