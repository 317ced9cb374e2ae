/* From a checked call and loaded kernels to launches: tensor maps, parameters, grids. Nothing is allocated. */
#include "kernel/cuda/attention.h"
#include "sm100/attention_forward_tiles.h"

enum { ROW_THREADS = 256 }; /* of backward's first and last kernel */

static dw_status count_tiles(int64_t rows, int tile_rows, int64_t heads, int *tiles) {
    int64_t count = (rows + tile_rows - 1) / tile_rows * heads; /* below 2^29 * 2^40 / 64 */
    if (count > INT32_MAX)
        return dw__fail(DW_UNSUPPORTED, "%lld tiles of work, more than %d; split the batch",
                        (long long)count, INT32_MAX);
    *tiles = (int)count;
    return DW_OK;
}

dw_status dw__attention_launch_forward(const dw_attention *call, const dw__context *context,
                                       const dw__attention_kernels *kernels) {
    if (kernels->shape.cutlass)
        return dw__attention_cutlass_launch(call, context->sm_count, kernels->shape.cutlass);
    const dw__attention_tile *tile = kernels->tile;
    dw_attention_params params;
    const bool blackwell = kernels->shape.blackwell;
    const int rows = blackwell ? DW_SM100_FORWARD_ROWS : tile->m;
    dw__tensor_map q, k, v, o;
    dw__attention_set_params(call, &params);
    DW_RETURN_IF_FAILED(
        count_tiles(call->rows_q, tile->m, (int64_t)call->heads_q * call->batch, &params.tiles));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, &call->q, "q", false, rows, &q));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, &call->k, "k", true, tile->n, &k));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, &call->v, "v", true, tile->n, &v));
    /* Blocks stay and take tile after tile. */
    int blocks = params.tiles < context->sm_count ? params.tiles : context->sm_count;
    void *arguments[] = {&q, &k, &v, &params, NULL};
    if (blackwell) { /* O leaves by the copy engine */
        DW_RETURN_IF_FAILED(
            dw__attention_map(context, call, &call->o, "o", false, DW_SM100_FORWARD_BOX_ROWS, &o));
        arguments[3] = &o, arguments[4] = &params;
    }
    return context->device->launch(&(dw__launch){
        .name = dw__attention_forward_entry(&kernels->shape),
        .function = kernels->main,
        .grid = {(unsigned)blocks, 1, 1},
        .block = {blackwell ? DW_SM100_FORWARD_THREADS : 128u * (1u + (unsigned)tile->consumers), 1,
                  1},
        .shared_bytes = tile->shared_bytes,
        .stream = call->stream,
        .arguments = arguments,
    });
}

/* One block for each tile of queries, of the first and the last kernel. */
static dw_status launch_rows(const dw_attention *call, const dw__context *context, const char *name,
                             void *function, int tiles, dw_attention_params *params) {
    void *arguments[] = {params};
    return context->device->launch(&(dw__launch){
        .name = name,
        .function = function,
        .grid = {(unsigned)tiles, 1, 1},
        .block = {ROW_THREADS, 1, 1},
        .stream = call->stream,
        .arguments = arguments,
    });
}

dw_status dw__attention_launch_backward(const dw_attention *call, const dw__context *context,
                                        const dw__attention_kernels *kernels) {
    const dw__attention_tile *tile = kernels->tile;
    dw__attention_workspace places;
    dw_attention_params params;
    dw__tensor_map q, k, v, d_o;
    int row_tiles;
    char *workspace = call->workspace;
    const dw__attention_shape *shape = &kernels->shape;
    DW_RETURN_IF_FAILED(dw__attention_workspace_of(call, shape, context->sm_count, &places));
    dw__attention_set_params(call, &params);
    params.dq_sum = (float *)(workspace + places.dq_sum);
    params.delta = (float *)(workspace + places.delta);
    params.turn = shape->deterministic ? (int *)(workspace + places.turn) : NULL;
    DW_RETURN_IF_FAILED(
        count_tiles(call->rows_q, tile->m, (int64_t)call->heads_q * call->batch, &row_tiles));
    DW_RETURN_IF_FAILED(
        count_tiles(call->rows_k, tile->n, (int64_t)call->heads_kv * call->batch, &params.tiles));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, &call->q, "q", false, tile->m, &q));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, &call->k, "k", true, tile->n, &k));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, &call->v, "v", true, tile->n, &v));
    DW_RETURN_IF_FAILED(dw__attention_map(context, call, &call->d_o, "d_o", false, tile->m, &d_o));
    void *arguments[] = {&q, &k, &v, &d_o, &params};
    DW_RETURN_IF_FAILED(launch_rows(call, context, "sm90_attention_backward_prepare",
                                    kernels->prepare, row_tiles, &params));
    DW_RETURN_IF_FAILED(context->device->launch(&(dw__launch){
        .name = "sm90_attention_backward",
        .function = kernels->main,
        .grid = {(unsigned)(shape->serial ? places.blocks : params.tiles), 1, 1},
        .block = {128u * (1u + (unsigned)tile->consumers), 1, 1},
        .shared_bytes = tile->shared_bytes,
        .stream = call->stream,
        .arguments = arguments,
    }));
    if (shape->serial) return DW_OK; /* dQ is written by then */
    return launch_rows(call, context, "sm90_attention_backward_finish", kernels->finish, row_tiles,
                       &params);
}

dw_status dw__attention_launch_reference(const dw_attention *call, const dw__context *context,
                                         dw__attention_pass pass,
                                         const dw__attention_kernels *kernels) {
    dw_attention_params params;
    void *arguments[] = {&params};
    dw__attention_set_params(call, &params);
    return context->device->launch(&(dw__launch){
        .name = pass == DW__ATTENTION_FORWARD ? "reference_attention_forward"
                                              : "reference_attention_backward",
        .function = kernels->main,
        .grid = {1024, 1, 1}, /* any number is right: a warp takes row after row */
        .block = {128, 1, 1},
        .stream = call->stream,
        .arguments = arguments,
    });
}
