/* Attention on a GPU, forward and backward, on device memory that the program owns.
 *
 *     cc attend.c $(pkg-config --cflags --libs deepwell) -o attend
 *     ./attend                             on an NVIDIA GPU (H100 or H200)
 *     deepwell emulate -- ./attend         without a GPU: an emulated H100 runs the same kernels, slowly
 *
 * Two checks need no reference. With a causal mask the first query sees the first key alone, so its output is the
 * first value. Probabilities of a row add up to 1, so with an output gradient of ones the gradients of all values add
 * up to the number of queries.
 */
#include <deepwell/deepwell.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 2, ROWS = 192, HEAD_DIM = 64, COUNT = HEADS * ROWS * HEAD_DIM, BYTES = 2 * COUNT };

static const dw_device *gpu;

static void must(dw_status status) {
    if (status == DW_OK) return;
    fprintf(stderr, "attend: %s: %s\n", dw_status_text(status), dw_last_error());
    exit(1);
}

static void *device_memory(size_t bytes) {
    void *memory = NULL;
    must(dw_device_allocate(gpu, bytes, &memory));
    return memory;
}

/* A contiguous BF16 tensor [1, HEADS, ROWS, HEAD_DIM]; host NULL: not filled. */
static dw_attention_tensor tensor(const float *host) {
    static unsigned short codes[COUNT];
    dw_attention_tensor t = {device_memory(BYTES), COUNT, ROWS * HEAD_DIM, HEAD_DIM};
    if (host) {
        must(dw_encode(DW_BF16, COUNT, host, NULL, codes));
        must(dw_device_copy_in(gpu, t.data, codes, BYTES));
    }
    return t;
}

static const float *read_back(dw_attention_tensor t, float *host) {
    static unsigned short codes[COUNT];
    must(dw_device_copy_out(gpu, codes, t.data, BYTES));
    must(dw_decode(DW_BF16, COUNT, codes, host));
    return host;
}

int main(void) {
    static float q[COUNT], v[COUNT], ones[COUNT], out[COUNT], dv[COUNT];
    if (dw_device_find("cuda", &gpu) != DW_OK) {
        printf("This machine has no GPU that Deepwell can use (%s).\n"
               "Run the program with `deepwell emulate -- ./attend` instead.\n",
               dw_last_error());
        return 0;
    }
    for (int i = 0; i < COUNT; i++) {
        q[i] = (float)rand() / (float)RAND_MAX - 0.5f;
        v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
        ones[i] = 1;
    }
    dw_attention call = {.struct_size = sizeof call,
                         .dtype = DW_BF16,
                         .batch = 1,
                         .heads_q = HEADS,
                         .heads_kv = HEADS,
                         .seq_len_q = ROWS,
                         .seq_len_kv = ROWS,
                         .head_dim = HEAD_DIM,
                         .scale = 0.125f, /* 1 / sqrt(HEAD_DIM) */
                         .window_left = -1,
                         .window_right = 0}; /* causal */
    call.q = tensor(q), call.k = tensor(q), call.v = tensor(v), call.o = tensor(NULL);
    call.lse = device_memory(HEADS * ROWS * sizeof *call.lse);
    must(dw_attention_forward(&call));

    call.d_o = tensor(ones);
    call.dq = tensor(NULL), call.dk = tensor(NULL), call.dv = tensor(NULL);
    must(dw_attention_backward_workspace(&call, &call.workspace_bytes));
    call.workspace = device_memory(call.workspace_bytes);
    /* GPUs do not need this. The kernels copy padding that is never used, and the emulator reports it unless it was
     * written. */
    must(dw_device_fill(gpu, call.workspace, 0, call.workspace_bytes));
    must(dw_attention_backward(&call));

    /* Reading back waits for the stream. The process's end frees the memory. */
    read_back(call.o, out), read_back(call.dv, dv), read_back(call.v, v);
    double sum = 0;
    for (int row = 0; row < ROWS; row++) sum += dv[row * HEAD_DIM];
    printf("first output %.4f, first value %.4f\n", out[0], v[0]);
    printf("gradients of the values add up to %.2f, queries: %d\n", sum, ROWS);
    const double off = out[0] > v[0] ? out[0] - v[0] : v[0] - out[0];
    return off < 0.01 && sum > 0.99 * ROWS && sum < 1.01 * ROWS ? 0 : 1;
}
