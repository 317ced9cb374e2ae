/* See launch_cost.h. */
#include "launch_cost.h"
#include "kernel/cuda/gpu_attention.h"
#include <stdio.h>
#include <stdlib.h>

enum { CALLS = 100, ROUNDS = 41, TENSORS = 8 };

typedef struct bench {
    dw_attention call;
    const dw__variant *variant;
    const dw__attention_tile *tile;
    const dw__context *context;
    dw__tensor_map maps[3];
    dw_attention_params params;
    char *memory;
    int round;
} bench;

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- timing ------------------------------------------------------------------------------------ */

static dw_status forward(bench *b) { return dw_attention_forward(&b->call); }
static dw_status backward(bench *b) { return dw_attention_backward(&b->call); }

/* Returns addresses that this thread has not used recently, so that tensor maps are encoded again. */
static dw_status forward_elsewhere(bench *b) {
    dw_attention call = b->call;
    b->round = (b->round + 1) % 1024;
    call.q.data = call.o.data = b->memory + 4096 * b->round;
    call.k.data = (char *)call.q.data + 1024;
    call.v.data = (char *)call.q.data + 2048;
    return dw_attention_forward(&call);
}

static dw_status check_alone(bench *b) {
    return dw__attention_check(&b->call, DW__ATTENTION_FORWARD, true);
}

static dw_status context_alone(bench *b) { return dw__device_cuda.context(&b->context); }

/* The driver's part with prepared parameters: the lower bound of any kernel's cost on the host. */
static dw_status launch_alone(bench *b) {
    void *arguments[] = {&b->maps[0], &b->maps[1], &b->maps[2], &b->params};
    return dw__device_cuda.launch(&(dw__launch){
        .name = "sm90_attention_forward",
        .function = b->variant->functions[DW__ATTENTION_MAIN],
        .grid = {1, 1, 1},
        .block = {128u * (1u + (unsigned)b->tile->consumers), 1, 1},
        .shared_bytes = b->tile->shared_bytes,
        .stream = b->call.stream,
        .arguments = arguments,
    });
}

/* Returns the median over rounds of the mean time of calls that are only enqueued. */
static dw_status time_it(bench *b, const char *name, dw_status (*run)(bench *)) {
    double rounds[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double begun = dw__seconds();
        for (int i = 0; i < CALLS; i++) DW_RETURN_IF_FAILED(run(b));
        rounds[r] = (dw__seconds() - begun) / CALLS;
        DW_RETURN_IF_FAILED(dw__device_cuda.stream_synchronize(b->call.stream));
    }
    qsort(rounds, ROUNDS, sizeof rounds[0], by_size);
    printf("%-52s %6.2f us  (%.2f to %.2f)\n", name, 1e6 * rounds[ROUNDS / 2],
           1e6 * rounds[ROUNDS / 10], 1e6 * rounds[ROUNDS - 1 - ROUNDS / 10]);
    return DW_OK;
}

/* ---- a tiny call --------------------------------------------------------------------------------- */

static dw_attention_tensor tensor(void *data) {
    return (dw_attention_tensor){.data = data, .batch = 512, .head = 512, .row = 64};
}

static dw_status prepare(bench *b) {
    dw_attention *c = &b->call;
    *c = (dw_attention){.struct_size = sizeof *c,
                        .dtype = DW_BF16,
                        .batch = 1,
                        .heads_q = 1,
                        .heads_kv = 1,
                        .seq_len_q = 8,
                        .seq_len_kv = 8,
                        .head_dim = 64,
                        .scale = 0.125f,
                        .window_left = -1,
                        .window_right = -1};
    DW_RETURN_IF_FAILED(dw__device_cuda.context(&b->context));
    DW_RETURN_IF_FAILED(dw__device_cuda.stream_create(&c->stream));
    DW_RETURN_IF_FAILED(dw__device_cuda.allocate((size_t)8 << 20, (void **)&b->memory));
    DW_RETURN_IF_FAILED(dw__device_cuda.fill_on(b->memory, 0, (size_t)8 << 20, c->stream));
    dw_attention_tensor *tensors[TENSORS] = {&c->q,   &c->k,  &c->v,  &c->o,
                                             &c->d_o, &c->dq, &c->dk, &c->dv};
    char *behind = b->memory + ((size_t)6 << 20);
    for (int i = 0; i < TENSORS; i++) *tensors[i] = tensor(behind + 1024 * i);
    c->lse = (float *)(void *)(behind + 1024 * TENSORS);
    c->workspace = behind + 65536;
    DW_RETURN_IF_FAILED(dw_attention_backward_workspace(c, &c->workspace_bytes));
    DW_RETURN_IF_FAILED(dw_attention_supported(c, true));
    dw__attention_shape shape =
        dw__attention_shape_of(c, DW__ATTENTION_FORWARD, b->context->sm_count);
    DW_RETURN_IF_FAILED(
        dw__variant_of(b->context, &dw__sm90_attention_forward, shape.params, &b->variant));
    const dw__attention_tile *tile = b->tile = dw__attention_tile_of(&shape, DW__ATTENTION_FORWARD);
    DW_RETURN_IF_FAILED(dw__attention_map(b->context, c, DW__ATTENTION_Q, tile->m, &b->maps[0]));
    DW_RETURN_IF_FAILED(dw__attention_map(b->context, c, DW__ATTENTION_K, tile->n, &b->maps[1]));
    DW_RETURN_IF_FAILED(dw__attention_map(b->context, c, DW__ATTENTION_V, tile->n, &b->maps[2]));
    dw__attention_set_params(c, &b->params);
    b->params.tiles = 1;
    return dw_attention_forward(c);
}

static dw_status time_all(bench *b) {
    DW_RETURN_IF_FAILED(prepare(b));
    printf("%s, driver for CUDA %d.%d: host time of calls that are only enqueued\n",
           b->context->name, b->context->driver_version / 1000,
           b->context->driver_version % 1000 / 10);
    DW_RETURN_IF_FAILED(time_it(b, "dw_attention_forward", forward));
    DW_RETURN_IF_FAILED(
        time_it(b, "dw_attention_forward, tensors at new addresses", forward_elsewhere));
    DW_RETURN_IF_FAILED(time_it(b, "dw_attention_backward (three kernels)", backward));
    DW_RETURN_IF_FAILED(time_it(b, "of these: the launch alone (cuLaunchKernelEx)", launch_alone));
    b->params.tiles = 0; /* the kernel ends immediately */
    DW_RETURN_IF_FAILED(time_it(b, "the same of a kernel without work", launch_alone));
    DW_RETURN_IF_FAILED(time_it(b, "of these: the check of the call", check_alone));
    return time_it(b, "of these: the context", context_alone);
}

int print_launch_cost(void) {
    bench b = {0};
    dw_status status = time_all(&b);
    if (status != DW_OK) fprintf(stderr, "deepwell-kernels: %s\n", dw_last_error());
    if (b.memory) dw__device_cuda.release(b.memory, (size_t)8 << 20);
    dw__device_cuda.stream_destroy(b.call.stream);
    return status == DW_OK ? 0 : status == DW_UNSUPPORTED ? 3 : 1;
}
